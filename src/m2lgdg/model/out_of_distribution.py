"""How far a new subject is from those a model was trained on, and what else its user must be told about it, in short words.

Stands before the methods: a fitted model keeps `SourceStatistics` beside its weights, and `m2lgdg predict` prints what it says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, standardised
from m2lgdg.data.check import SHORT
from m2lgdg.storage import InputError, read_tensors, write_tensors

FORMAT = "m2lgdg-limits-1"
LEAST_VOLUMES = 20  # of fewer, a correlation has a standard error of 0.25 and more: there is nothing to decide on
LEAST_SUBJECTS = 20  # of source; of fewer, what is usual there is not known
AXES = 10  # of connectivity; 300 kB at 116 ROIs
PER_AXIS = 5  # source subjects at least: an axis is a direction of many, never one subject's scan
QUANTILES = (0.5, 0.95)
RANGE = (0.025, 0.5, 0.975)  # of source subjects: no single subject's age or length is kept
FOLDS = 5  # where source is one site
LEAST_SHARE = 10  # subjects, to speak of a share of males
MEASURES = ("volumes", "TR", "spectral edge", "age", "males")

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SourceDistribution:
    """What is usual among source subjects, as means, spreads and quantiles, never a subject.

    A distance is relative to the spread in source: the root of the mean square over the leading axes of connectivity and
    the length of what lies beside them, or over phenotypes. Its scale is what source subjects reach when the statistics are
    fitted without their site: a shift score above 1 is beyond 95 % of them.
    """

    mean: Singles  # (edge,) Fisher z
    axes: Singles  # (axis, edge), orthonormal
    spread: Singles  # (axis,)
    beside: Singles  # (2,) mean and sd of the logarithm of the distance from the axes
    centre: Singles  # (phenotype,)
    scale: Singles  # (phenotype,)
    reached: Singles  # (connectivity and phenotypes, quantile): distances of source subjects from all other sites
    ranges: Singles  # (measure, quantile) of source subjects; of males the lowest, middle and highest share of a site
    columns: tuple[str, ...] = ()  # of phenotypes

    @classmethod
    def fit(cls, source: Cohort) -> SourceDistribution:
        """From source subjects; labels are not looked at."""
        features, values = fc_features(source.series), _phenotypes(source, source.inputs)
        groups = (
            np.unique(source.sites, return_inverse=True)[1] if len(source.site_names) > 1 else np.arange(len(source)) % FOLDS
        )
        count = int(np.clip((len(source) - np.bincount(groups).max()) // PER_AXIS, 1, AXES))
        centred = features - features.mean(axis=0)
        gram = centred @ centred.T  # all distances follow from it, so that leaving a site out costs little
        everyone = np.ones(len(source), dtype=bool)
        reached = np.full((2, len(QUANTILES)), np.nan)
        if len(source) >= LEAST_SUBJECTS:
            parts = [groups != group for group in range(groups.max() + 1)]
            reached[0] = _quantiles([_Leading(gram, part, count).distance(gram, ~part) for part in parts], QUANTILES)
            reached[1] = _quantiles([_relative(values[~part], *_moments(values[part])) for part in parts], QUANTILES)
        leading = _Leading(gram, everyone, count)
        statistics = {
            "mean": features.mean(axis=0),
            "axes": leading.weights.T @ centred,
            "spread": leading.spread,
            "beside": leading.beside,
            "reached": reached,
            "ranges": np.array([_range(source, name) for name in MEASURES]),
        }
        statistics["centre"], statistics["scale"] = _moments(values)
        return cls(columns=source.inputs, **{name: value.astype(np.float32) for name, value in statistics.items()})

    def scores(self, cohort: Cohort) -> dict[str, Floats]:
        """The shift of each subject's connectivity and phenotypes; above 1 is outside, NaN where it cannot be known."""
        centred = fc_features(cohort.series) - self.mean if len(cohort) else np.empty((0, len(self.mean)))
        along = centred @ self.axes.T.astype(np.float64)  # (subject, axis)
        square = (centred**2).sum(axis=1) - (along**2).sum(axis=1)
        far = {
            "connectivity": _combined(along, square, self.spread, self.beside),
            "phenotypes": _relative(_phenotypes(cohort, self.columns), self.centre, self.scale),
        }
        return {name: distance / scale for (name, distance), scale in zip(far.items(), self.reached[:, 1], strict=True)}

    def compare(self, cohort: Cohort) -> list[str]:
        """The cohort as a whole beside source, one line a measure that both have."""
        lines = []
        for name, (low, middle, high) in zip(MEASURES, self.ranges.tolist(), strict=True):
            here = _range(cohort, name)[1]
            if np.isnan([here, middle]).any() or (name == "males" and len(cohort) < LEAST_SHARE):
                continue
            outside = "" if low - 1e-3 * abs(low) <= here <= high + 1e-3 * abs(high) else ", OUTSIDE"
            what = "sites" if name == "males" else "95 % of subjects"
            lines.append(f"{name}: {here:.3g} here, {middle:.3g} in source ({what} {low:.3g} to {high:.3g}){outside}")
        return lines

    def save(self, path: str | Path) -> Path:
        """As a safetensors file."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "columns"}
        return write_tensors(path, tensors, {"format": FORMAT, "columns": json.dumps(self.columns)})

    @classmethod
    def load(cls, path: str | Path, rois: int | None = None) -> SourceDistribution:
        """From a file, whose arrays must fit each other and the model's number of ROIs."""
        meta, tensors = read_tensors(path, FORMAT)
        try:
            columns = json.loads(meta["columns"])
            if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
                raise TypeError
            edges, count = tensors["mean"].size, tensors["spread"].size
            shapes = {"mean": (edges,), "axes": (count, edges), "spread": (count,), "beside": (2,), "centre": (len(columns),)}
            shapes |= {"scale": (len(columns),), "reached": (2, len(QUANTILES)), "ranges": (len(MEASURES), len(RANGE))}
            arrays = {name: np.array(tensors[name], dtype=np.float32) for name in shapes}
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{path} is damaged ({type(error).__name__}).") from None
        if rois is not None and edges != rois * (rois - 1) // 2:
            raise InputError(f"{path} is damaged: its {edges} edges are not those of {rois} ROIs.")
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise InputError(f"{path} is damaged: {name} has shape {arrays[name].shape}, not {shape}.")
        for name in ("mean", "axes", "spread", "beside", "centre"):  # others have values that mean "not known"
            if not np.isfinite(arrays[name]).all():
                raise InputError(f"{path} is damaged: {name} is not finite.")
        for name, scale in (("spread", arrays["spread"]), ("beside", arrays["beside"][1:]), ("scale", arrays["scale"])):
            if not (scale > 0).all():
                raise InputError(f"{path} is damaged: {name} is not above 0.")
        return cls(columns=tuple(columns), **arrays)


class _Leading:
    """The leading axes of some rows, as weights of these rows, from the Gram matrix of all."""

    def __init__(self, gram: Floats, rows: npt.NDArray[np.bool_], count: int) -> None:
        from scipy.linalg import eigh

        self.rows, n = rows, int(rows.sum())
        inner = gram[np.ix_(rows, rows)]
        self.middle = inner.mean(axis=0)  # (row,) product with the mean of the rows
        centred = inner - self.middle - self.middle[:, None] + self.middle.mean()
        size, vectors = eigh(centred, subset_by_index=[max(n - count, 0), n - 1])
        kept = size > 1e-9 * max(float(np.trace(centred)), 1e-300)
        size, vectors = size[kept][::-1], vectors[:, kept][:, ::-1]
        weights = vectors / np.sqrt(size)  # (row, axis)
        self.weights = weights - weights.mean(axis=0)
        self.spread = np.sqrt(size / n)
        square = np.diag(centred) - (centred @ self.weights) ** 2 @ np.ones(len(size))
        log = 0.5 * np.log(np.maximum(square, 1e-12))
        self.beside = np.array([log.mean(), log.std() or 1.0])

    def distance(self, gram: Floats, others: npt.NDArray[np.bool_]) -> Floats:
        """(other,) distances of other rows."""
        cross = gram[np.ix_(others, self.rows)]
        middle = cross.mean(axis=1)  # (other,)
        along = (cross - self.middle) @ self.weights
        square = np.diag(gram)[others] - 2 * middle + self.middle.mean()
        return _combined(along, square - (along**2).sum(axis=1), self.spread, self.beside)


def _combined(along: Floats, square: Floats, spread: npt.NDArray[np.floating], beside: npt.NDArray[np.floating]) -> Floats:
    """Distances from scores along the axes and the squared distance beside them: both halves weigh the same."""
    inside = ((along / spread) ** 2).mean(axis=1) if len(spread) else np.zeros(len(along))
    off = (0.5 * np.log(np.maximum(square, 1e-12)) - beside[0]) / beside[1]
    return np.asarray(np.sqrt((inside + off**2) / 2), dtype=np.float64)


def _phenotypes(cohort: Cohort, columns: Sequence[str]) -> Floats:
    table = cohort.phenotypes.reindex(columns=list(columns))
    known = table.where(table != "", np.nan)
    return np.array(known, dtype=np.float64).reshape(len(cohort), len(columns))


def _moments(values: Floats) -> tuple[Floats, Floats]:
    """Mean and sd of each column over those who have it; a column that does not vary says nothing."""
    known = ~np.isnan(values)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, values, 0.0).sum(axis=0) / count
    spread = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(axis=0) / count)
    return mean, np.where(spread > 0, spread, np.inf)


def _relative(values: Floats, centre: npt.NDArray[np.floating], scale: npt.NDArray[np.floating]) -> Floats:
    """(subject,) root mean square of the phenotypes a subject has, in source sds; NaN without any."""
    known = ~np.isnan(values)
    square = np.where(known, (values - centre) / scale, 0.0) ** 2
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(square.sum(axis=1) / known.sum(axis=1)), dtype=np.float64)


def _quantiles(parts: list[Floats], which: tuple[float, ...]) -> Floats:
    values = np.concatenate(parts)
    values = values[~np.isnan(values)]
    return np.quantile(values, which) if len(values) else np.full(len(which), np.nan)


def _range(cohort: Cohort, measure: str) -> Floats:
    """Low, middle and high of a measure over subjects; of males, over sites."""
    if measure == "volumes":
        values = cohort.lengths.astype(np.float64)
    elif measure == "TR":
        values = cohort.tr
    elif measure == "spectral edge":
        values = np.array([spectral_edge(one, tr) for one, tr in zip(cohort.series, cohort.tr, strict=True)])
    elif measure == "age":
        values = _phenotypes(cohort, ["age"])[:, 0]
    else:
        sex = _phenotypes(cohort, ["sex"])[:, 0]
        shares = [sex[(cohort.sites == site) & ~np.isnan(sex)] == 1 for site in cohort.site_names]
        everyone = sex[~np.isnan(sex)] == 1
        means = [float(one.mean()) for one in shares if len(one) >= LEAST_SHARE]
        return np.array([min(means), everyone.mean(), max(means)]) if means else np.full(3, np.nan)
    return _quantiles([np.asarray(values, dtype=np.float64)], RANGE)


def spectral_edge(series: npt.NDArray[np.float32], tr: float) -> float:
    """The frequency (Hz) below which 95 % of the power of a scan's ROIs lies; NaN where the TR is not known."""
    power = (np.abs(np.fft.rfft(standardised(series), axis=0)) ** 2).sum(axis=1)[1:]  # (frequency,)
    first = int(np.searchsorted(np.cumsum(power), 0.95 * power.sum()))
    return float((first + 1) / (len(series) * tr))


def refuse_short_scans(cohort: Cohort) -> None:
    """Refuse scans that are too short for any method."""
    for subject, length in zip(cohort.subjects, cohort.lengths, strict=True):
        if length < LEAST_VOLUMES:
            raise InputError(
                f"the scan of subject {subject} has {length} volumes; a prediction needs {LEAST_VOLUMES} at least."
            )


def missing_phenotypes(cohort: Cohort, wanted: Sequence[str]) -> list[list[str]]:
    """For each subject, which of the wanted phenotypes are not known; a column that is not there is known of nobody."""
    have = cohort.phenotypes.reindex(columns=list(wanted))
    lost = (have.isna() | (have == "")).to_numpy()  # (subject, column)
    return [[name for name, gone in zip(wanted, row, strict=True) if gone] for row in lost]


def flags(cohort: Cohort, wanted: Sequence[str], distribution: SourceDistribution | None) -> list[list[str]]:
    """For each subject, in short words, why its prediction may be worse than others; `wanted` are the model's phenotypes."""
    scores = distribution.scores(cohort) if distribution else {}
    found: list[list[str]] = []
    for i, (one, missing) in enumerate(zip(cohort.series, missing_phenotypes(cohort, wanted), strict=True)):
        flat = int((one == one[0]).all(axis=0).sum())
        outside = [name for name, score in scores.items() if score[i] > 1]
        said = [f"phenotypes missing: {' '.join(missing)}"] if missing else []
        said += [f"short scan: {len(one)}"] if len(one) < SHORT else []
        said += [f"flat rois: {flat}"] if flat else []
        said += [f"outside: {' '.join(outside)}"] if outside else []
        found.append(said)
    return found
