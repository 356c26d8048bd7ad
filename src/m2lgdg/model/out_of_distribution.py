"""Out-of-distribution (OOD) scores and quality flags of new subjects.

A fitted model stores a `SourceDistribution` with its weights; `m2lgdg predict` and `m2lgdg serve` show what it computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, standardised
from m2lgdg.data.check import SHORT
from m2lgdg.data.table_check import FAILED, FAR, FEWEST_COLUMNS, MAD
from m2lgdg.methods.tables import TableRows
from m2lgdg.scans import Connectomes, arrays_of, empty_rois
from m2lgdg.storage import InputError, one_line, read_tensors, write_tensors

FORMAT = "m2lgdg-limits-1"
LEAST_SUBJECTS = 20  # of source; with fewer, the distribution is not known
AXES = 10  # principal axes of connectivity; 300 kB at 116 ROIs
LEAST_AT_SITE = 5  # with fewer, the spread within a site is mostly that of its median
MANY = 200  # rows of a matrix whose few largest eigenvalues are found by Lanczos steps
MOST_STEPS = 200
AT_ONCE = 2**24  # features converted to float64 at once: 128 MiB
SOLVED, ENDED = 1e-9, 1e-12  # residual of an axis, relative to the largest eigenvalue; rest of a step, to the first one
PER_AXIS = 5  # least source subjects per axis: an axis is a direction of many subjects, never one subject's scan
QUANTILES = (0.5, 0.95)
TABLE = "table_"  # starts the names of the scores of tables
SEGMENTATION = "failed segmentation: {} out of range"
MOST, LEAST_SPREAD = 8.0, 1e-6  # of a column: greatest distance, and spread relative to that before confounds were removed
RANGE = (0.025, 0.5, 0.975)  # quantiles of source subjects: no single subject's age or scan length is stored
FOLDS = 5  # if source is one site
LEAST_WITH_SEX = 10  # subjects, to report a proportion of males
OF_SERIES = ("volumes", "TR", "spectral edge")  # not known of a connectome, which others computed
MEASURES = (*OF_SERIES, "age", "males")

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]


class TableRange(NamedTuple):
    """Range of a table in source, robust against failed segmentations; arrays are (column,), spreads infinite if constant.

    The distance of a subject is the root mean square of values without confounds in units of `spread`, each at most `MOST`.
    """

    centre: Singles  # medians without confounds
    spread: Singles
    usual: Singles  # medians of the values as they are
    within: Singles  # their spread within sites, or over all if sites are small; infinite with few subjects
    reached: Singles  # (quantile,) distances of source subjects from all other sites

    @classmethod
    def fit(cls, rows: TableRows, groups: npt.NDArray[np.int_]) -> TableRange:
        """Fit to source subjects, of sites `groups`."""
        known = ~np.isnan(rows.cleaned).all(axis=1)
        values, cleaned, groups = rows.values[known], rows.cleaned[known], groups[known]
        usual, whole = _robust(values)
        within = np.full_like(whole, np.inf) if len(values) < LEAST_SUBJECTS else whole
        large = np.bincount(groups)[groups] >= LEAST_AT_SITE
        if large.sum() >= LEAST_SUBJECTS:
            medians = pd.DataFrame(values[large]).groupby(groups[large]).transform("median").to_numpy()
            within = _robust(values[large] - medians)[1]

        def statistics(some: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
            centre, spread = _robust(cleaned[some])
            # Head size without itself is constant, but for rounding.
            return centre, np.where(spread > LEAST_SPREAD * whole, spread, np.inf)

        reached, sites = np.full(len(QUANTILES), np.nan), np.unique(groups)
        if len(values) >= LEAST_SUBJECTS and len(sites) > 1:
            cuts = [groups == site for site in sites]
            reached = _quantiles([_relative(cleaned[one], *statistics(~one), MOST) for one in cuts], QUANTILES)
        centre, spread = statistics(np.ones(len(values), dtype=bool))
        return cls(*(one.astype(np.float32) for one in (centre, spread, usual, within, reached)))

    def score(self, rows: TableRows) -> Floats:
        """(subject,) distance, in units of that which 5 % of source subjects exceed."""
        return np.asarray(_relative(rows.cleaned, self.centre, self.spread, MOST) / self.reached[1], dtype=np.float64)

    def failed(self, rows: TableRows) -> Iterator[tuple[int, str]]:
        """Subjects with many columns far out of range at once, and the number of columns in words."""
        far = (np.abs(rows.values - self.usual) > FAR * self.within.astype(np.float64)).sum(axis=1)  # (subject,)
        known = (~np.isnan(rows.values) & np.isfinite(self.within)).sum(axis=1)
        for i in np.flatnonzero((far >= FEWEST_COLUMNS) & (far >= FAILED * known)).tolist():
            yield i, f"{far[i]} of {known[i]} columns"


@dataclass(frozen=True)
class SourceDistribution:
    """Distribution of source subjects, as means, spreads and quantiles; no subject is stored.

    A distance is a root mean square in units of the source spread, over the leading axes of connectivity and the residual off
    them, or over phenotypes. A score above 1 is beyond 95 % of source subjects, measured without their site.
    """

    mean: Singles  # (edge,) Fisher z
    axes: Singles  # (axis, edge), orthonormal
    spread: Singles  # (axis,)
    beside: Singles  # (2,) mean and sd of the log residual off the axes
    centre: Singles  # (phenotype,)
    scale: Singles  # (phenotype,)
    reached: Singles  # (connectivity and phenotypes, quantile): distances of source subjects from all other sites
    ranges: Singles  # (measure, quantile) of source subjects; for males, lowest, overall and highest proportion at a site
    columns: tuple[str, ...] = ()  # of phenotypes
    tables: Mapping[str, TableRange] = field(default_factory=dict)  # by name

    @classmethod
    def fit(cls, source: Cohort, tables: Mapping[str, TableRows] | None = None) -> SourceDistribution:
        """Fit to source subjects, and to the tables that a method sees of them; labels are not used."""
        features, values = fc_features(source.scans), _phenotypes(source, source.inputs)
        groups = (
            np.unique(source.sites, return_inverse=True)[1] if len(source.site_names) > 1 else np.arange(len(source)) % FOLDS
        )
        count = int(np.clip((len(source) - np.bincount(groups).max()) // PER_AXIS, 1, AXES))
        mean = features.mean(axis=0, dtype=np.float64)
        gram = np.zeros((len(source), len(source)))  # all distances follow from it, so that leaving a site out is cheap
        for part in _centred(features, mean):
            gram += part @ part.T
        reached = np.full((2, len(QUANTILES)), np.nan)
        if len(source) >= LEAST_SUBJECTS:
            others = [groups != group for group in range(groups.max() + 1)]
            cut = _leading(gram, others, count)
            reached[0] = _quantiles([one.distance(gram, ~some) for one, some in zip(cut, others, strict=True)], QUANTILES)
            reached[1] = _quantiles([_relative(values[~some], *_moments(values[some])) for some in others], QUANTILES)
        (leading,) = _leading(gram, [np.ones(len(source), dtype=bool)], count)
        statistics = {
            "mean": mean,
            "axes": np.concatenate([leading.weights.T @ part for part in _centred(features, mean)], axis=1),
            "spread": leading.spread,
            "beside": leading.beside,
            "reached": reached,
            "ranges": np.array([_range(source, name) for name in MEASURES]),
        }
        statistics["centre"], statistics["scale"] = _moments(values)
        ranges = {name: TableRange.fit(rows, groups) for name, rows in (tables or {}).items()}
        arrays = {name: value.astype(np.float32) for name, value in statistics.items()}
        return cls(columns=source.inputs, tables=ranges, **arrays)

    def scores(self, cohort: Cohort, tables: Mapping[str, TableRows] | None = None) -> dict[str, Floats]:
        """Out-of-distribution scores of connectivity, phenotypes and tables; above 1 is outside, NaN means unknown."""
        centred = fc_features(cohort.scans).astype(np.float64) - self.mean if len(cohort) else np.empty((0, len(self.mean)))
        along = centred @ self.axes.T.astype(np.float64)  # (subject, axis)
        square = (centred**2).sum(axis=1) - (along**2).sum(axis=1)
        distances = {
            "connectivity": _combined(along, square, self.spread, self.beside),
            "phenotypes": _relative(_phenotypes(cohort, self.columns), self.centre, self.scale),
        }
        pairs = zip(distances.items(), self.reached[:, 1], strict=True)
        scores = {name: distance / scale for (name, distance), scale in pairs}
        known = {name: rows for name, rows in (tables or {}).items() if name in self.tables}
        return scores | {f"{TABLE}{name}": self.tables[name].score(rows) for name, rows in known.items()}

    def failed_segmentations(self, tables: Mapping[str, TableRows], subjects: int) -> list[list[str]]:
        """A flag for each table of a subject with many columns far out of the range of source at once."""
        flags: list[list[str]] = [[] for _ in range(subjects)]
        for name in (name for name in tables if name in self.tables):
            for i, columns in self.tables[name].failed(tables[name]):
                flags[i].append(SEGMENTATION.format(f"{columns} of {name}"))
        return flags

    def compare(self, cohort: Cohort) -> list[str]:
        """Compare the whole cohort with source: one line per measure that both have."""
        lines = []
        for name, (low, middle, high) in zip(MEASURES, self.ranges.tolist(), strict=True):
            value = _range(cohort, name)[1]
            if np.isnan([value, middle]).any() or (name == "males" and len(cohort) < LEAST_WITH_SEX):
                continue
            outside = "" if low - 1e-3 * abs(low) <= value <= high + 1e-3 * abs(high) else ", OUTSIDE"
            what = "sites" if name == "males" else "95 % of subjects"
            lines.append(f"{name}: {value:.3g} here, {middle:.3g} in source ({what} {low:.3g} to {high:.3g}){outside}")
        return lines

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("columns", "tables")}
        for i, one in enumerate(self.tables.values()):
            tensors |= {f"{TABLE}{i}.{name}": value for name, value in one._asdict().items()}
        meta = {"format": FORMAT, "columns": json.dumps(self.columns)}
        return write_tensors(path, tensors, meta | ({"tables": json.dumps(list(self.tables))} if self.tables else {}))

    @classmethod
    def load(cls, path: str | Path, rois: int, table_columns: Mapping[str, int] | None = None) -> SourceDistribution:
        """Read a file; its arrays must match each other, the model's number of ROIs and the columns of its tables."""
        meta, tensors = read_tensors(path, FORMAT)
        try:
            columns = json.loads(meta["columns"])
            if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
                raise ValueError("columns are not a list of strings")
            edges, axes = rois * (rois - 1) // 2, tensors["spread"].size
            shapes = {"mean": (edges,), "axes": (axes, edges), "spread": (axes,), "beside": (2,), "centre": (len(columns),)}
            shapes |= {"scale": (len(columns),), "reached": (2, len(QUANTILES)), "ranges": (len(MEASURES), len(RANGE))}
            arrays = {name: np.array(tensors[name], dtype=np.float32) for name in shapes}
            for name, shape in shapes.items():
                if arrays[name].shape != shape:
                    raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")
                if name not in ("scale", "reached", "ranges") and not np.isfinite(arrays[name]).all():  # in these: not known
                    raise ValueError(f"{name} is not finite")
            if not all((arrays[name] > 0).all() for name in ("spread", "scale")) or not arrays["beside"][1] > 0:
                raise ValueError("a spread is not positive")
            tables = _read_ranges(json.loads(meta.get("tables", "[]")), tensors, table_columns or {})
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None
        return cls(columns=tuple(columns), tables=tables, **arrays)


def _read_ranges(names: Any, tensors: Mapping[str, Any], columns: Mapping[str, int]) -> dict[str, TableRange]:
    """Ranges of the tables of a file, which must be some of those of the model, with as many columns each."""
    if not isinstance(names, list) or not set(names) <= set(columns):
        raise ValueError("its tables are not those of the model")
    ranges = {}
    for i, name in enumerate(names):
        parts = {each: np.array(tensors[f"{TABLE}{i}.{each}"], dtype=np.float32) for each in TableRange._fields}
        one = ranges[name] = TableRange(**parts)
        if {each.shape for each in one[:-1]} != {(columns[name],)} or one.reached.shape != (len(QUANTILES),):
            raise ValueError(f"the range of table {name} does not have its {columns[name]} columns")
        middles, spreads = np.stack([one.centre, one.usual]), np.stack([one.spread, one.within])
        if not np.isfinite(middles).all() or not (spreads > 0).all():
            raise ValueError(f"the range of table {name} is not finite or not positive")
    return ranges


def _robust(values: Floats) -> tuple[Floats, Floats]:
    """(column,) median and robust sd; a constant or unknown column gets an infinite sd and never counts."""
    frame = pd.DataFrame(values)
    centre = frame.median().fillna(0.0).to_numpy()
    spread = MAD * (frame - centre).abs().median().fillna(0.0).to_numpy()
    return centre, np.where(spread > 0, spread, np.inf)


def _centred(features: Singles, mean: Floats) -> Iterator[Floats]:
    """(subject, edge) features less their means in float64, of some edges at a time."""
    edges = max(AT_ONCE // max(len(features), 1), 1)
    for start in range(0, len(mean), edges):
        part = slice(start, start + edges)
        yield features[:, part].astype(np.float64) - mean[part]


class _Leading:
    """Leading axes of some rows, as weights of these rows, from the Gram matrix of all rows."""

    def __init__(self, gram: Floats, rows: npt.NDArray[np.bool_], size: Floats, vectors: Floats) -> None:
        """From the largest eigenvalues of the centred Gram matrix of these rows, in ascending order, and their vectors."""
        self.rows, n = rows, int(rows.sum())
        self.middle = gram @ rows / n  # (row of all,) product with the mean of the rows
        square = np.diag(gram)[rows] - 2 * self.middle[rows] + self.middle[rows].mean()  # diagonal of the centred matrix
        nonzero = size > 1e-9 * max(float(square.sum()), 1e-300)
        size, vectors = size[nonzero][::-1], vectors[:, nonzero][:, ::-1]
        weights = vectors / np.sqrt(size)  # (row, axis)
        self.weights = weights - weights.mean(axis=0)
        self.spread = np.sqrt(size / n)
        log = 0.5 * np.log(np.maximum(square - vectors**2 @ size, 1e-12))
        self.beside = np.array([log.mean(), log.std() or 1.0])

    def distance(self, gram: Floats, others: npt.NDArray[np.bool_]) -> Floats:
        """(other,) distances of the other rows."""
        every = np.zeros((len(gram), len(self.spread)))
        every[self.rows] = self.weights
        along = gram[others] @ every - self.middle @ every  # (other, axis)
        square = np.diag(gram)[others] - 2 * self.middle[others] + self.middle[self.rows].mean()
        return _combined(along, square - (along**2).sum(axis=1), self.spread, self.beside)


def _leading(gram: Floats, cuts: Sequence[npt.NDArray[np.bool_]], count: int) -> list[_Leading]:
    """Leading axes of the rows of each cut."""
    if len(gram) >= MANY and (found := _lanczos(gram, np.stack(cuts), count)) is not None:
        return [_Leading(gram, rows, size, vectors[rows]) for rows, size, vectors in zip(cuts, *found, strict=True)]
    return [_Leading(gram, rows, *_decomposed(gram[np.ix_(rows, rows)], count)) for rows in cuts]


def _decomposed(matrix: Floats, count: int) -> tuple[Floats, Floats]:
    """Largest eigenvalues of a Gram matrix after centring it, and their vectors."""
    from scipy.linalg import eigh

    mean = matrix.mean(axis=0)
    matrix = matrix - mean - mean[:, None] + mean.mean()
    size, vectors = eigh(matrix, subset_by_index=[max(len(matrix) - count, 0), len(matrix) - 1])
    return size, vectors


def _lanczos(gram: Floats, cuts: npt.NDArray[np.bool_], count: int) -> tuple[Floats, Floats] | None:
    """(cut, axis) largest eigenvalues of the centred Gram matrix of each cut, and their (cut, row, axis) vectors.

    A Lanczos step multiplies the vectors of all cuts by the whole matrix: one product in place of one for each, and no copies
    of the matrix. None if they do not get to an end, or end before `count` axes, since the rows have fewer.
    """
    member = cuts.astype(np.float64)  # (cut, row)

    def centred(vectors: Floats) -> Floats:
        inside = member * vectors
        return np.asarray(inside - member * (inside.sum(axis=1) / member.sum(axis=1))[:, None])

    start = centred(np.random.default_rng(0).normal(size=member.shape))
    basis = np.zeros((len(cuts), MOST_STEPS + 1, len(gram)))  # (cut, step, row)
    basis[:, 0] = start / np.linalg.norm(start, axis=1, keepdims=True)
    tridiagonal = np.zeros((len(cuts), MOST_STEPS + 1, MOST_STEPS + 1))
    for step in range(1, MOST_STEPS + 1):
        vectors = centred((gram @ basis[:, step - 1].T).T)
        tridiagonal[:, step - 1, step - 1] = np.einsum("cr,cr->c", vectors, basis[:, step - 1])
        for _ in range(2):  # against all former vectors, as rounding would bring them back
            along = basis[:, :step] @ vectors[:, :, None]  # (cut, step, 1)
            vectors -= (along.transpose(0, 2, 1) @ basis[:, :step])[:, 0]
        length = np.linalg.norm(vectors, axis=1)
        if (length <= ENDED * np.abs(tridiagonal[:, 0, 0])).any():
            return None
        basis[:, step] = vectors / length[:, None]
        if step >= 2 * count and step % 4 == 0:
            size, inner = np.linalg.eigh(tridiagonal[:, :step, :step])
            if (length[:, None] * np.abs(inner[:, -1, -count:]) <= SOLVED * size[:, -1:]).all():  # residuals
                return size[:, -count:], basis[:, :step].transpose(0, 2, 1) @ inner[:, :, -count:]
        tridiagonal[:, step, step - 1] = tridiagonal[:, step - 1, step] = length
    return None


def _combined(along: Floats, square: Floats, spread: npt.NDArray[np.floating], beside: npt.NDArray[np.floating]) -> Floats:
    """Distances from scores along the axes and, with equal weight, the squared residual off them."""
    inside = ((along / spread) ** 2).mean(axis=1) if len(spread) else np.zeros(len(along))
    off = (0.5 * np.log(np.maximum(square, 1e-12)) - beside[0]) / beside[1]
    return np.asarray(np.sqrt((inside + off**2) / 2), dtype=np.float64)


def _phenotypes(cohort: Cohort, columns: Sequence[str]) -> Floats:
    table = cohort.phenotypes.reindex(columns=list(columns))
    known = table.where(table != "", np.nan)
    return np.array(known, dtype=np.float64).reshape(len(cohort), len(columns))


def _moments(values: Floats) -> tuple[Floats, Floats]:
    """Mean and sd of each column over known values; a constant column gets an infinite sd and never counts."""
    known = ~np.isnan(values)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, values, 0.0).sum(axis=0) / count
    spread = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(axis=0) / count)
    return mean, np.where(spread > 0, spread, np.inf)


def _relative(
    values: Floats, centre: npt.NDArray[np.floating], scale: npt.NDArray[np.floating], most: float = np.inf
) -> Floats:
    """(subject,) root mean square of the known values in source sds, each at most `most`; NaN without any."""
    known = ~np.isnan(values)
    square = np.minimum(np.abs(np.where(known, (values - centre) / scale, 0.0)), most) ** 2
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(square.sum(axis=1) / known.sum(axis=1)), dtype=np.float64)


def _quantiles(distances: list[Floats], which: tuple[float, ...]) -> Floats:
    values = np.concatenate(distances)
    values = values[~np.isnan(values)]
    return np.quantile(values, which) if len(values) else np.full(len(which), np.nan)


def _range(cohort: Cohort, measure: str) -> Floats:
    """Low, middle and high of a measure over subjects; for males, over sites."""
    if measure in OF_SERIES and isinstance(cohort.scans, Connectomes):
        return np.full(len(RANGE), np.nan)
    if measure == "volumes":
        values = cohort.lengths.astype(np.float64)
    elif measure == "TR":
        values = cohort.tr
    elif measure == "spectral edge":
        values = np.array([spectral_edge(series, tr) for series, tr in zip(cohort.series, cohort.tr, strict=True)])
    elif measure == "age":
        values = _phenotypes(cohort, ["age"])[:, 0]
    else:
        sex = _phenotypes(cohort, ["sex"])[:, 0]
        male = [sex[(cohort.sites == site) & ~np.isnan(sex)] == 1 for site in cohort.site_names]
        everyone = sex[~np.isnan(sex)] == 1
        means = [float(site.mean()) for site in male if len(site) >= LEAST_WITH_SEX]
        return np.array([min(means), everyone.mean(), max(means)]) if means else np.full(3, np.nan)
    return _quantiles([np.asarray(values, dtype=np.float64)], RANGE)


def spectral_edge(series: npt.NDArray[np.float32], tr: float) -> float:
    """Frequency (Hz) below which 95 % of the power of a scan's ROIs lies; NaN if the TR is not known."""
    power = (np.abs(np.fft.rfft(standardised(series), axis=0)) ** 2).sum(axis=1)[1:]  # (frequency,)
    first = int(np.searchsorted(np.cumsum(power), 0.95 * power.sum()))
    return float((first + 1) / (len(series) * tr))


def missing_phenotypes(cohort: Cohort, wanted: Sequence[str]) -> list[list[str]]:
    """Missing ones of the wanted phenotypes, by subject; an absent column is missing for all subjects."""
    have = cohort.phenotypes.reindex(columns=list(wanted))
    absent = (have.isna() | (have == "")).to_numpy()  # (subject, column)
    return [[name for name, missing in zip(wanted, row, strict=True) if missing] for row in absent]


def flags(
    cohort: Cohort,
    wanted: Sequence[str],
    distribution: SourceDistribution | None,
    tables: Mapping[str, TableRows] | None = None,
) -> list[list[str]]:
    """Quality flags by subject: reasons why a prediction may be unreliable.

    `wanted` are the model's phenotypes, `tables` what its method sees of those of the cohort.
    """
    scores = distribution.scores(cohort, tables) if distribution else {}
    failed = distribution.failed_segmentations(tables or {}, len(cohort)) if distribution else [[]] * len(cohort)
    by_subject: list[list[str]] = []
    for i, (scan, missing) in enumerate(zip(arrays_of(cohort.scans), missing_phenotypes(cohort, wanted), strict=True)):
        outside = [name for name, score in scores.items() if score[i] > 1]
        raised = [f"phenotypes missing: {' '.join(missing)}"] if missing else []
        if isinstance(cohort.scans, Connectomes):
            empty = int(empty_rois(scan, len(cohort.rois)).sum())
            raised += [f"empty rois: {empty}"] if empty else []
        else:
            flat = int((scan == scan[0]).all(axis=0).sum())
            raised += [f"short scan: {len(scan)}"] if len(scan) < SHORT else []
            raised += [f"flat rois: {flat}"] if flat else []
        raised += [f"outside: {' '.join(outside)}"] if outside else []
        by_subject.append(raised + failed[i])
    return by_subject
