"""Detection of duplicate scans: exact copies by hash, near copies by correlating first FC and then the series.

Used by `check` and `leakage`. A scan at two sites leaks target data into source: site 4 of REST-meta-MDD duplicates site 14.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort

FC_ALIKE = 0.8  # FC of two people correlates less than this, FC of one scan cropped or filtered again more
SERIES_ALIKE = 0.9
MOST_ROIS = 116  # enough for a fingerprint; an atlas with 980 ROIs would take gigabytes
MOST_PAIRS = 5000


class Pair(NamedTuple):
    """Positions of two subjects with the same scan."""

    first: int
    second: int
    exact: bool
    correlation: float


def find_duplicates(cohort: Cohort) -> list[Pair]:
    """Pairs of subjects with identical series, or with the same scan cropped, rescaled, shifted or processed differently."""
    pairs = []
    known: dict[bytes, int] = {}
    for i, one in enumerate(cohort.series):
        first = known.setdefault(hashlib.sha256(one.tobytes()).digest(), i)
        if first != i:
            pairs.append(Pair(first, i, True, 1.0))
    exact = {(pair.first, pair.second) for pair in pairs}
    for i, j in _candidates(cohort):
        if (i, j) not in exact:
            correlation = best_alignment(cohort.series[i], cohort.series[j])
            if correlation >= SERIES_ALIKE:
                pairs.append(Pair(i, j, False, correlation))
    return sorted(pairs)


def _candidates(cohort: Cohort) -> list[tuple[int, int]]:
    """Candidate pairs, whose FC vectors correlate more than those of two people do."""
    n = len(cohort.rois)
    rois = np.linspace(0, n - 1, min(n, MOST_ROIS)).astype(int)
    upper = np.triu_indices(len(rois), 1)
    if len(upper[0]) < 2 or len(cohort) < 2:
        return []
    # In float64, because the square of a large float32 is out of range. (subject, edge)
    edges = np.stack([_correlation(one[:, rois].astype(np.float64))[upper].astype(np.float32) for one in cohort.series])
    alike = np.triu(_correlation(edges.T), 1)
    candidates = np.argwhere(alike > FC_ALIKE)
    strongest = np.argsort(-alike[tuple(candidates.T)], kind="stable")[:MOST_PAIRS]
    return [(int(i), int(j)) for i, j in candidates[strongest]]


def _correlation(columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Correlation between columns; 0 for a constant column."""
    centred = columns - columns.mean(axis=0)
    norm = np.linalg.norm(centred, axis=0)
    unit = centred / np.where(norm > 0, norm, 1)
    result: npt.NDArray[Any] = unit.T @ unit
    return result


def best_alignment(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Largest correlation of two (time, roi) series over all shifts that overlap by half of the shorter one or more."""
    first, second = (_standardised(one) for one in (first, second))
    total = len(first) + len(second) - 1
    size = 1 << (total - 1).bit_length()

    def slide(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
        product = np.fft.rfft(one, size, axis=0) * np.conj(np.fft.rfft(other, size, axis=0))
        return np.fft.irfft(product.sum(axis=1), size)  # (shift,), negative shifts at the end

    shifts = np.r_[0 : len(first), -(len(second) - 1) : 0]
    common = np.minimum(len(first) - np.maximum(shifts, 0), len(second) + np.minimum(shifts, 0))
    cross = slide(first, second)[shifts]
    energy_first = slide(first**2, np.ones_like(second))[shifts]
    energy_second = slide(np.ones_like(first), second**2)[shifts]
    enough = common >= max(min(len(first), len(second)) / 2, 20)
    if not enough.any():
        return 0.0
    scale = np.sqrt(np.maximum(energy_first * energy_second, 1e-12))
    return float((cross / scale)[enough].max())


def _standardised(series: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = series.astype(np.float64) - series.mean(axis=0, dtype=np.float64)
    spread = wide.std(axis=0)
    return np.asarray(wide / np.where(spread > 0, spread, 1))
