"""Preprocessing: series resampled to one length and z-scored, phenotypes imputed and scaled with source statistics.

Methods call it on a cohort before they learn or predict; fitted values are plain arrays that are saved with the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort

Item = TypeVar("Item")
Result = TypeVar("Result")
Floats = npt.NDArray[np.float64]
CATEGORICAL = ("sex",)
SERIES_EPSILON = 1e-8


@dataclass(frozen=True)
class PhenotypeScaler:
    """Imputation and z-scoring of phenotypes by the paper's rules.

    Sex is imputed with the mode, every other column with the median of the subject's source site, or the overall median where
    there is none, as for target subjects. Then columns are z-scored with the mean and sd of the imputed source subjects.
    """

    columns: tuple[str, ...]
    sites: tuple[str, ...]
    site_fill: Floats  # (site, column)
    fill: Floats  # (column,)
    mean: Floats  # (column,)
    scale: Floats  # (column,)

    @classmethod
    def fit(cls, source: Cohort, columns: Iterable[str] | None = None) -> PhenotypeScaler:
        """Fit on source subjects' inputs, or on some of them (`columns`); labels are not used."""
        columns, sites = source.inputs if columns is None else tuple(columns), tuple(source.site_names)
        values = _values(source, columns)
        fill = np.array([_typical(values[:, j], name) for j, name in enumerate(columns)])
        fill = np.where(np.isnan(fill), 0.0, fill)  # a column without any value is constant, hence ignored
        site_fill = np.tile(fill, (len(sites), 1))
        for i, site in enumerate(sites):
            for j, name in enumerate(columns):
                median = np.nan if name in CATEGORICAL else _typical(values[source.sites == site, j], name)
                site_fill[i, j] = fill[j] if np.isnan(median) else median
        unscaled = cls(columns, sites, site_fill, fill, np.zeros(len(columns)), np.ones(len(columns)))
        filled = unscaled.transform(source)
        # A column that is constant in source carries no information: 0 for all, whatever its values in a target.
        spread = np.where(np.ptp(filled, axis=0) > 0, filled.std(axis=0), np.inf)
        return cls(columns, sites, site_fill, fill, filled.mean(axis=0), spread)

    def transform(self, cohort: Cohort) -> Floats:
        """(subject, column) inputs, imputed and in units of the source standard deviation."""
        values = _values(cohort, self.columns)
        position = {site: i for i, site in enumerate(self.sites)}
        for i, site in enumerate(cohort.sites.tolist()):
            fill = self.site_fill[position[site]] if site in position else self.fill
            values[i] = np.where(np.isnan(values[i]), fill, values[i])
        result: Floats = (values - self.mean) / self.scale
        return result

    def state(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """Fitted arrays by name, for saving. Site medians are left out: only source subjects need them."""
        return {f"{prefix}.{name}": getattr(self, name) for name in ("fill", "mean", "scale")}

    @classmethod
    def restore(cls, columns: tuple[str, ...], state: dict[str, npt.NDArray[Any]], prefix: str) -> PhenotypeScaler:
        """Rebuild a scaler from its saved arrays."""
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
    """(subject, roi, time) series: resampled to `length` points by a cubic spline, then z-scored for each subject and ROI."""
    return _resampled(series, length, lambda one: one.std(axis=0))


def scaled_series(series: Sequence[npt.NDArray[np.float32]], length: int) -> npt.NDArray[np.float32]:
    """(subject, roi, time) series: resampled, each ROI minus its mean, the whole scan divided by its root mean square."""
    return _resampled(series, length, lambda one: np.sqrt((one**2).mean()))


def _resampled(
    series: Sequence[npt.NDArray[np.float32]], length: int, spread: Callable[[Floats], Any]
) -> npt.NDArray[np.float32]:
    result = np.empty((len(series), series[0].shape[1], length), dtype=np.float32)

    def standardise(i: int) -> None:
        one = series[i]
        from_first = one.astype(np.float64) - one[0]  # makes a flat ROI exactly 0 rather than the rounding error of its level
        resampled = spline_matrix(len(one), length) @ from_first  # (time, roi)
        resampled -= resampled.mean(axis=0)
        result[i] = (resampled / (spread(resampled) + SERIES_EPSILON)).T

    for _ in on_threads(standardise, range(len(series))):
        pass
    return result


@lru_cache(maxsize=256)  # a server meets scans of ever new lengths
def spline_matrix(given: int, wanted: int) -> Floats:
    """(wanted, given) matrix that resamples `given` equally spaced points to `wanted` points by a cubic spline."""
    from scipy.interpolate import CubicSpline

    spline = CubicSpline(np.linspace(0.0, 1.0, given), np.eye(given))
    return np.asarray(spline(np.linspace(0.0, 1.0, wanted)))


def on_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results of `work` for each item, in order, on as many threads as BLAS has; the bits are those of one thread.

    The matrices of one subject are too small for BLAS itself to use its threads well, and numpy releases Python's lock.
    """
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")  # once, because it looks through all loaded libraries
    threads = _fewest_threads(blas.info())
    # Also for one item: the last bits of a product depend on the number of BLAS threads.
    with blas.limit(limits=1, user_api="blas"):
        if min(threads, len(items)) <= 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, items)


def _fewest_threads(pools: list[dict[str, Any]]) -> int:
    return min((int(pool["num_threads"]) for pool in pools), default=1)
