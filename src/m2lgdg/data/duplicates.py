"""Detection of duplicate scans: exact copies by hash, near copies by correlating first FC and then, if there are any, series.

Used by `check`, `leakage` and `m2lgdg convert --drop-duplicates`. A scan at two sites leaks target data into source: site 4
of REST-meta-MDD duplicates site 14.

Seen: copies that are cropped, shifted, rescaled, filtered again, reversed in time or resampled in time. FC does not change if
time is reversed and hardly if it is resampled, so an atlas of 50 ROIs or more is enough for such copies. Of the 1,035 scans
of ABIDE (AAL), two different scans reach an FC correlation of 0.76 (0.74 without the global signal); copies resampled to
between half and twice the number of volumes keep 0.95 or more.

Not seen: copies that share less than half of their volumes, copies that were both cropped and resampled if less than about
three quarters of the scan is left, every third volume of a short scan, series with permuted ROIs, other runs of the same
person, and, with fewer than 50 ROIs, resampled copies that no longer begin and end with the same volumes.

Connectomes are compared by FC alone: seen are copies in another kind (correlation, Fisher z, covariance), rounded or rescaled,
and, with 50 ROIs or more, those processed again whose FC without the global signal correlates at 0.9: in ABIDE, all copies
with 80 % of the volumes, three in four of those with 60 % and one in four of those with half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import UNKNOWN, Cohort
from m2lgdg.connectivity import upper_triangle
from m2lgdg.findings import COPY, UNLIKE_COPY, Exclusion
from m2lgdg.scans import CLIP, COVARIANCE, FISHER_Z, PARTIAL, Connectomes, arrays_of, own_correlation

FC_ALIKE = 0.8  # FC of two people correlates less than this, FC of one scan cropped or filtered again more
SERIES_ALIKE = 0.9
FC_COPY = 0.9  # FC of a copy that was reversed or resampled in time
FEWEST_ROIS = 50  # with fewer, FC of two people can correlate at 0.9
FC_EQUAL = 0.9999  # FC of a copy that was rounded or is of another kind, whatever the number of ROIs
FEWEST_EDGES = 45  # of which that can be said
MOST_ROIS = 116  # enough for a fingerprint; an atlas with 980 ROIs would take gigabytes
MOST_PAIRS = 5000


How = Literal["identical", "aligned", "reversed", "resampled", "fc", "same matrix"]


class Pair(NamedTuple):
    """Positions of two subjects with the same scan, and how that was recognised, in which of several atlases.

    `correlation` is that of the aligned series; for "fc" it is that of FC, without the global signal if that is needed.
    """

    first: int
    second: int
    exact: bool
    correlation: float
    how: How = "aligned"
    atlases: tuple[str, ...] = ()


def find_duplicates(cohort: Cohort) -> list[Pair]:
    """Pairs of subjects with the same scan in at least one atlas; the module's docstring states which copies are seen."""
    if not cohort.parcellations:
        return _pairs(cohort)
    pairs: dict[tuple[int, int], Pair] = {}
    for one in cohort.each_atlas():
        position = np.flatnonzero(np.isin(cohort.subjects, one.subjects)).tolist()
        for pair in _pairs(one):
            first, second = position[pair.first], position[pair.second]
            known = pairs.get((first, second), pair._replace(first=first, second=second))
            pairs[first, second] = known._replace(atlases=(*known.atlases, one.atlas))
    return sorted(pairs.values())


_LAST: dict[tuple[str, int, tuple[bytes, ...]], list[Pair]] = {}  # a study checks its cohort, then its folds for leaks


def _pairs(cohort: Cohort) -> list[Pair]:
    """Pairs in the first atlas."""
    digests = tuple(hashlib.sha256(one.tobytes()).digest() for one in arrays_of(cohort.scans))
    key = cohort.values, len(cohort.rois), digests
    if key not in _LAST:
        _LAST.clear()
        _LAST[key] = _compared(cohort, digests)
    return list(_LAST[key])


def _compared(cohort: Cohort, digests: tuple[bytes, ...]) -> list[Pair]:
    scans = cohort.scans
    pairs = []
    known: dict[bytes, int] = {}
    for i, digest in enumerate(digests):
        first = known.setdefault(digest, i)
        if first != i:
            pairs.append(Pair(first, i, True, 1.0, "same matrix" if isinstance(scans, Connectomes) else "identical"))
    exact = {(pair.first, pair.second) for pair in pairs}
    for i, j, alike in _candidates(cohort):
        if (i, j) not in exact:
            copy = _same_matrix(scans, i, j, alike) if isinstance(scans, Connectomes) else _copy(scans[i], scans[j], alike)
            if copy is not None:
                pairs.append(Pair(i, j, False, *copy))
    return sorted(pairs)


def without_duplicates(cohort: Cohort) -> Cohort:
    """Cohort in which no two subjects have the same scan; the others are listed as excluded, with the reason.

    Of subjects with the same scan and the same label, the first by id is kept; of one with and one without a label, the first
    that has one. If their labels differ, none is kept, because it is not known which label is that of the scan.
    """
    kept = cohort
    while groups := _same_scan(kept):  # more than once only if there are more pairs than are compared in one round
        dropped = [exclusion for group in groups for exclusion in _dropped(kept, group)]
        rest = kept.select(~np.isin(kept.subjects, [one.subject for one in dropped]))
        kept = rest._changed(excluded=(*kept.excluded, *dropped))
    return kept


def _same_scan(cohort: Cohort) -> list[list[int]]:
    """Positions of subjects with the same scan, as groups: a copy of a copy is in the group of both."""
    from scipy.sparse import coo_array  # here, since `predict` need not wait for scipy
    from scipy.sparse.csgraph import connected_components

    pairs = np.array([(pair.first, pair.second) for pair in find_duplicates(cohort)], dtype=int).reshape(-1, 2)
    graph = coo_array((np.ones(len(pairs)), tuple(pairs.T)), shape=(len(cohort), len(cohort)))
    group = connected_components(graph, directed=False)[1]
    return [np.flatnonzero(group == one).tolist() for one in dict.fromkeys(group[np.unique(pairs)].tolist())]


def _dropped(cohort: Cohort, group: list[int]) -> list[Exclusion]:
    """The subjects of a group that are not kept."""
    by_id = sorted(group, key=lambda i: str(cohort.subjects[i]))
    conflict = len({int(cohort.labels[i]) for i in group} - {UNKNOWN}) > 1
    kept = None if conflict else next((i for i in by_id if cohort.labels[i] != UNKNOWN), by_id[0])
    dropped = []
    for i in (i for i in by_id if i != kept):
        others = [str(cohort.subjects[j]) for j in (by_id if kept is None else [kept]) if j != i]
        detail = f"same scan as {', '.join(others)}{'' if conflict else ', which is kept'}"
        dropped.append(Exclusion(str(cohort.subjects[i]), str(cohort.sites[i]), UNLIKE_COPY if conflict else COPY, "", detail))
    return dropped


def _copy(first: npt.NDArray[Any], second: npt.NDArray[Any], alike: float) -> tuple[float, How] | None:
    """Correlation of two series that are one scan, and how they were matched; None for two scans. `alike` is that of FC."""
    correlation = best_alignment(first, second)
    if correlation >= SERIES_ALIKE:
        return correlation, "aligned"
    if alike < FC_COPY:
        return None
    correlation = best_alignment(first, second[::-1])
    if correlation >= SERIES_ALIKE:
        return correlation, "reversed"
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    if len(longer) > len(shorter):
        from scipy.interpolate import interp1d  # here, since it imports scipy.special, which `predict` need not wait for

        time = np.linspace(0, len(shorter) - 1, len(longer))
        stretched = interp1d(np.arange(len(shorter)), shorter.astype(np.float64), axis=0)(time)
        correlation = max(best_alignment(longer, one) for one in (stretched, stretched[::-1]))
        if correlation >= SERIES_ALIKE:
            return correlation, "resampled"
    if first.shape[1] >= FEWEST_ROIS:
        correlation = float(np.corrcoef(_clean_edges(first), _clean_edges(second))[0, 1])
        if correlation >= FC_COPY:
            return correlation, "fc"
    return None


def _clean_edges(series: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """FC as a vector, without the global signal, which makes the FC of all people alike."""
    unit = _standardised(series[:, _fingerprint_rois(series.shape[1])])
    mean = unit.mean(axis=1, keepdims=True)
    energy = float((mean**2).sum())
    edges = _correlation(unit - mean @ (mean.T @ unit) / energy if energy > 0 else unit)
    return upper_triangle(edges)


def _same_matrix(connectomes: Connectomes, first: int, second: int, alike: float) -> tuple[float, How] | None:
    """As `_copy`, of two connectomes."""
    both = [_matrix(connectomes, i) for i in (first, second)]  # (roi, roi) each
    a, b = map(upper_triangle, both)
    if len(a) >= FEWEST_EDGES and alike >= FC_COPY:
        # One of them may be of another kind than the cohort says.
        kinds = ((a, b), (a, _fisher(b)), (_fisher(a), b), (a, np.tanh(b)), (np.tanh(a), b))
        correlation = max(_vector_correlation(*pair) for pair in kinds)
        if correlation >= FC_EQUAL:
            return correlation, "fc"
    if connectomes.n_rois < FEWEST_ROIS:
        return None
    if connectomes.kind != PARTIAL:
        a, b = (upper_triangle(_without_global_signal(one)) for one in both)
    correlation = _vector_correlation(a, b)
    return (correlation, "fc") if correlation >= FC_COPY else None


def _matrix(connectomes: Connectomes, subject: int) -> npt.NDArray[np.float64]:
    """(roi, roi) correlations between the ROIs of the fingerprint; 0 for an empty ROI."""
    rois = _fingerprint_rois(connectomes.n_rois)
    triangle = connectomes.triangles[subject]
    assert triangle is not None  # a cohort of one atlas has the subjects that have it
    return own_correlation(triangle, connectomes.kind, connectomes.n_rois)[np.ix_(rois, rois)]


def _matrix_edges(connectomes: Connectomes, rois: npt.NDArray[np.int_]) -> Iterator[npt.NDArray[Any]]:
    """(edge,) correlations between the ROIs of the fingerprint, of each subject."""
    n, kind = connectomes.n_rois, connectomes.kind
    if kind == COVARIANCE:
        yield from (upper_triangle(_matrix(connectomes, i)) for i in range(len(connectomes)))
        return
    here, there = (rois[i] for i in np.triu_indices(len(rois), 1))  # (edge,) each
    positions = here * n - here * (here - 1) // 2 + there - here  # of these edges in a triangle
    for one in connectomes.triangles:
        assert one is not None
        yield np.tanh(one[positions]) if kind == FISHER_Z else one[positions]


def _vector_correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    a, b = a - a.mean(), b - b.mean()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def _fisher(correlations: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(np.arctanh(np.clip(correlations, -CLIP, CLIP)))


def _without_global_signal(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(roi, roi) correlations of the signals from which their mean was regressed, as `_clean_edges` has them from series."""
    signal = (matrix != np.eye(len(matrix))).any(axis=0)  # an empty ROI adds nothing to the mean
    matrix = matrix * signal * signal[:, None]
    shared = matrix.sum(axis=0)  # covariance of each ROI with the sum of all
    total = shared.sum()
    left = matrix - np.outer(shared, shared) / total if total > 0 else matrix
    spread = np.sqrt(np.maximum(np.diagonal(left), 0))
    spread = np.where(spread > 1e-6, spread, np.inf)
    return np.asarray(left / spread / spread[:, None])


def _fingerprint_rois(count: int) -> npt.NDArray[np.int_]:
    return np.linspace(0, count - 1, min(count, MOST_ROIS)).astype(int)


def _candidates(cohort: Cohort) -> list[tuple[int, int, float]]:
    """Candidate pairs, whose FC vectors correlate more than those of two people do, with that correlation."""
    rois = _fingerprint_rois(len(cohort.rois))
    upper = np.triu_indices(len(rois), 1)
    if len(upper[0]) < 2 or len(cohort) < 2:
        return []
    # In float64, because the square of a large float32 is out of range. (subject, edge)
    if isinstance(scans := cohort.scans, Connectomes):
        edges = np.stack([one.astype(np.float32) for one in _matrix_edges(scans, rois)])
    else:
        edges = np.stack([_correlation(one[:, rois].astype(np.float64))[upper].astype(np.float32) for one in scans])
    alike = np.triu(_correlation(edges.T), 1)
    candidates = np.argwhere(alike > FC_ALIKE)
    strongest = np.argsort(-alike[tuple(candidates.T)], kind="stable")[:MOST_PAIRS]
    return [(int(i), int(j), float(alike[i, j])) for i, j in candidates[strongest]]


def _correlation(columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Correlation between columns; 0 for a constant column."""
    centred = columns - columns.mean(axis=0)
    norm = np.linalg.norm(centred, axis=0)
    unit = centred / np.where(norm > 0, norm, 1)
    return np.asarray(unit.T @ unit)


def best_alignment(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Largest correlation of two (time, roi) series over all shifts that overlap by half of the shorter one or more."""
    first, second = (_standardised(one) for one in (first, second))
    total = len(first) + len(second) - 1
    size = 1 << (total - 1).bit_length()
    product = np.fft.rfft(first, size, axis=0) * np.conj(np.fft.rfft(second, size, axis=0))
    shifts = np.r_[0 : len(first), -(len(second) - 1) : 0]
    common = np.minimum(len(first) - np.maximum(shifts, 0), len(second) + np.minimum(shifts, 0))
    cross = np.fft.irfft(product.sum(axis=1), size)[shifts]  # negative shifts lie at the end
    energy_first, energy_second = _energy(first, np.maximum(shifts, 0), common), _energy(second, np.maximum(-shifts, 0), common)
    enough = common >= max(min(len(first), len(second)) / 2, 20)
    if not enough.any():
        return 0.0
    scale = np.sqrt(np.maximum(energy_first * energy_second, 1e-12))
    return float((cross / scale)[enough].max())


def _energy(series: npt.NDArray[Any], start: npt.NDArray[np.int_], length: npt.NDArray[np.int_]) -> npt.NDArray[np.float64]:
    """(shift,) sums of squares of the (time, roi) series over its time points from `start` on, `length` of them."""
    until = np.r_[0.0, np.cumsum((series**2).sum(axis=1))]  # (time + 1,)
    return np.asarray(until[start + length] - until[start])


def _standardised(series: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = series.astype(np.float64) - series.mean(axis=0, dtype=np.float64)
    spread = wide.std(axis=0)
    return np.asarray(wide / np.where(spread > 0, spread, 1))
