"""What is done before a method sees a subject: series to one length, phenotypes imputed and scaled by what source knows.

Stands between a cohort and the methods; every fitted number is in plain arrays, so that it is saved with the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.threads import on_threads

Floats = npt.NDArray[np.float64]
CATEGORICAL = ("sex",)
SERIES_EPSILON = 1e-8


@dataclass(frozen=True)
class PhenotypeScaler:
    """Imputation and z-scoring by the paper's rules.

    Sex: the mode. Others: the median of the subject's own source site, else the overall median; a target's subjects, whose
    site is unknown here, get the overall median. Then z-scores with the mean and sd of the (imputed) source subjects.
    """

    columns: tuple[str, ...]
    sites: tuple[str, ...]
    site_fill: Floats  # (site, column)
    fill: Floats  # (column,)
    mean: Floats  # (column,)
    scale: Floats  # (column,)

    @classmethod
    def fit(cls, source: Cohort) -> PhenotypeScaler:
        """Learn from the inputs of source subjects; labels are not looked at."""
        columns, sites = source.inputs, tuple(source.site_names)
        values = _values(source, columns)
        fill = np.array([_typical(values[:, j], name) for j, name in enumerate(columns)])
        fill = np.where(np.isnan(fill), 0.0, fill)  # a column that nobody has is constant, hence ignored
        site_fill = np.tile(fill, (len(sites), 1))
        for i, site in enumerate(sites):
            for j, name in enumerate(columns):
                own = np.nan if name in CATEGORICAL else _typical(values[source.sites == site, j], name)
                site_fill[i, j] = fill[j] if np.isnan(own) else own
        unscaled = cls(columns, sites, site_fill, fill, np.zeros(len(columns)), np.ones(len(columns)))
        filled = unscaled.transform(source)
        # What does not vary in source says nothing: 0 for everyone, whatever a target brings.
        spread = np.where(np.ptp(filled, axis=0) > 0, filled.std(axis=0), np.inf)
        return cls(columns, sites, site_fill, fill, filled.mean(axis=0), spread)

    def transform(self, cohort: Cohort) -> Floats:
        """The (subject, column) inputs without gaps, in source standard deviations."""
        values = _values(cohort, self.columns)
        position = {site: i for i, site in enumerate(self.sites)}
        for i, site in enumerate(cohort.sites.tolist()):
            fill = self.site_fill[position[site]] if site in position else self.fill
            values[i] = np.where(np.isnan(values[i]), fill, values[i])
        result: Floats = (values - self.mean) / self.scale
        return result

    def state(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """The fitted arrays by name, for saving. Site medians serve source subjects only and stay behind."""
        return {f"{prefix}.{name}": getattr(self, name) for name in ("fill", "mean", "scale")}

    @classmethod
    def restore(cls, columns: tuple[str, ...], state: dict[str, npt.NDArray[Any]], prefix: str) -> PhenotypeScaler:
        """From the saved arrays."""
        arrays = {name: np.asarray(state[f"{prefix}.{name}"], dtype=np.float64) for name in ("fill", "mean", "scale")}
        return cls(columns, (), np.empty((0, len(columns))), **arrays)


def _values(cohort: Cohort, columns: tuple[str, ...]) -> Floats:
    return np.array(cohort.phenotypes[list(columns)], dtype=np.float64).reshape(len(cohort), len(columns))


def _typical(values: Floats, name: str) -> float:
    present = values[~np.isnan(values)]
    if not len(present):
        return np.nan
    if name in CATEGORICAL:
        kinds, counts = np.unique(present, return_counts=True)
        return float(kinds[counts.argmax()])
    return float(np.median(present))


def standardised_series(series: Sequence[npt.NDArray[np.float32]], length: int) -> npt.NDArray[np.float32]:
    """(subject, roi, time) series of one length: cubic spline to `length` points, then z-scores of each ROI and subject."""
    result = np.empty((len(series), series[0].shape[1], length), dtype=np.float32)

    def standardise(i: int) -> None:
        one = series[i]
        from_first = one.astype(np.float64) - one[0]  # a flat ROI is exactly 0, not the rounding of its level
        resampled = spline_matrix(len(one), length) @ from_first  # (time, roi)
        resampled -= resampled.mean(axis=0)
        result[i] = (resampled / (resampled.std(axis=0) + SERIES_EPSILON)).T

    for _ in on_threads(standardise, range(len(series))):
        pass
    return result


@cache
def spline_matrix(given: int, wanted: int) -> Floats:
    """(wanted, given) matrix that evaluates the cubic spline through `given` equally spaced points at `wanted` points.

    A spline is linear in the values it goes through, so resampling every ROI of a scan is one matrix product.
    """
    from scipy.interpolate import CubicSpline

    spline = CubicSpline(np.linspace(0.0, 1.0, given), np.eye(given))
    return np.asarray(spline(np.linspace(0.0, 1.0, wanted)))
