"""Features of ROI series: Fisher-z correlations, shrunk covariances and signal amplitude, each of one subject only.

Methods call these functions; `tangent.py` projects covariances to a tangent space. Fits on one cohort can share the features
of this module (`sharing_features`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.preprocess import on_threads

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Series = Sequence[Singles]
View = Callable[[npt.NDArray[np.float32]], Floats]  # transforms one (time, roi) series before it is correlated
CLIP = 0.999  # Fisher's z of 1 is infinite


def standardised(series: npt.NDArray[np.floating[Any]]) -> Floats:
    """(time, roi) series with mean 0 and variance 1 in each ROI; a flat ROI becomes 0."""
    wide = series.astype(np.float64)
    wide -= wide.mean(axis=0)
    spread = wide.std(axis=0)
    flat = (series == series[0]).all(axis=0)
    wide /= np.where(flat, 1.0, spread)
    wide[:, flat] = 0.0
    return wide


def frame_weighted(series: npt.NDArray[np.float32]) -> Floats:
    """`standardised`, a time point with mean square e over ROIs having the weight 1 / (1 + (e / median e)^2).

    So a few time points of high amplitude do not dominate correlations. The weighted series has mean 0 and variance 1.
    """
    wide = standardised(series)
    size = (wide**2).mean(axis=1)
    weight = 1 / (1 + (size / (np.median(size) or 1.0)) ** 2)  # (time,)
    weight /= weight.mean()
    wide -= (weight @ wide) / len(wide)
    wide *= np.sqrt(weight)[:, None]
    spread = np.sqrt((wide**2).mean(axis=0))
    return np.asarray(wide / np.where(spread > 0, spread, 1.0))


def deviations(series: npt.NDArray[np.float32]) -> Floats:
    """Absolute deviation of each ROI from its mean, as a (time, roi) series with mean 0 and variance 1."""
    return standardised(np.abs(standardised(series)))


def correlations(series: Series, view: View = standardised) -> Floats:
    """(subject, roi, roi) Pearson correlations of the series after `view`; 1 on the diagonal, 0 for a flat ROI."""
    n = series[0].shape[1]
    result = np.empty((len(series), n, n))
    for i, matrix in enumerate(on_threads(lambda one: _correlation(one, view), series)):
        result[i] = matrix
    return result


def _correlation(series: npt.NDArray[np.float32], view: View) -> Floats:
    unit = view(series)  # (time, roi)
    matrix = np.clip(unit.T @ unit / len(unit), -1.0, 1.0)
    np.fill_diagonal(matrix, 1.0)
    return matrix


def fc_features(series: Series, view: View = standardised) -> Singles:
    """(subject, edge) Fisher z of the correlations above the diagonal, in row order.

    Those of the views of this module are shared between fits; any other view is computed afresh.
    """
    shared = next((feature for of_view, feature in zip(VIEWS, EDGES, strict=True) if of_view is view), None)
    return _of_subjects(series, shared or _edge_feature(view))


def _edge_feature(view: View) -> Feature:
    return Feature(getattr(view, "__name__", ""), _edge_count, partial(_edges, view=view))


def _edge_count(rois: int) -> tuple[int, ...]:
    return (rois * (rois - 1) // 2,)


def _edges(one: Singles, view: View) -> Floats:
    return np.arctanh(np.clip(upper_triangle(_correlation(one, view)), -CLIP, CLIP))


def upper_triangle(matrices: Floats) -> Floats:
    """(..., edge) values above the diagonal of (..., roi, roi), in row order."""
    rows, columns = _above_diagonal(matrices.shape[-1])
    return np.asarray(matrices[..., rows, columns])


@cache
def _above_diagonal(n: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    rows, columns = np.triu_indices(n, 1)
    return rows, columns


def fisher_matrices(series: Series) -> npt.NDArray[np.float32]:
    """(subject, roi, roi) Fisher z of the correlations with a zero diagonal, the input of networks on connectivity."""
    result = np.arctanh(np.clip(correlations(series), -CLIP, CLIP))
    result[:, np.arange(result.shape[-1]), np.arange(result.shape[-1])] = 0.0
    return result.astype(np.float32)


def source_scaling(values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Mean and sd of each feature over source subjects (the first dimension); constant features get the scale 1."""
    spread = values.std(axis=0, dtype=np.float64)
    scale = np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
    return {"mean": values.mean(axis=0, dtype=np.float64).astype(np.float32), "scale": scale}


def amplitude_features(series: Series) -> Floats:
    """(subject, roi) log standard deviation of each ROI, minus the subject's mean over ROIs; 0 for a flat ROI."""
    return np.asarray(_of_subjects(series, AMPLITUDE))


def _amplitude(series: Singles) -> Floats:
    alive = (series != series[0]).any(axis=0)
    log = np.log(np.where(alive, series.std(axis=0, dtype=np.float64), 1.0))
    middle = (log * alive).sum() / max(int(alive.sum()), 1)
    return np.where(alive, log - middle, 0.0)


def covariances(series: Series) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances of the standardised series, always positive definite."""
    return _of_subjects(series, COVARIANCES).astype(np.float64)


def row_covariances(series: Series) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances with the rows of each subject's correlation matrix as observations."""
    return _of_subjects(series, ROW_COVARIANCES).astype(np.float64)


def _row_covariance(series: Singles) -> Floats:
    rows = _correlation(series, standardised)
    return _shrunk(rows - rows.mean(axis=0))


def _covariance(series: Singles) -> Floats:
    return _shrunk(standardised(series))


def _shrunk(x: Floats) -> Floats:
    """Ledoit-Wolf covariance of (observation, roi) values with mean 0: S = X'X / t, shrunk towards mu I."""
    t, n = x.shape
    sample = x.T @ x / t
    mu = np.trace(sample) / n
    distance = (sample**2).sum() - n * mu**2  # |S - mu I|^2
    error = (((x**2).sum(axis=1) ** 2).sum() / t - (sample**2).sum()) / t  # mean of |x x' - S|^2, over t
    shrinkage = min(error, distance) / distance if distance > 0 else 0.0
    result = (1 - shrinkage) * sample
    result[np.diag_indices(n)] += max(shrinkage, 1e-6) * mu  # the floor keeps the matrix invertible with flat ROIs
    return np.asarray(result)


class Feature(NamedTuple):
    """A feature of one subject. Only the instances of this module, known by their identity, are shared between fits."""

    name: str  # of its file in a study
    shape: Callable[[int], tuple[int, ...]]  # of the feature, from the number of ROIs
    of_subject: Callable[[Singles], Floats]
    dtype: type = np.float32

    def of_all(self, series: Series) -> Iterator[Floats]:
        """Features of each subject, in order."""
        return on_threads(self.of_subject, series)


VIEWS = (standardised, frame_weighted, deviations)
EDGES = tuple(map(_edge_feature, VIEWS))
AMPLITUDE = Feature("amplitude", lambda rois: (rois,), _amplitude, np.float64)
COVARIANCES = Feature("covariances", lambda rois: (rois, rois), _covariance)
ROW_COVARIANCES = Feature("row_covariances", lambda rois: (rois, rois), _row_covariance)
SHARED = frozenset(map(id, (*EDGES, AMPLITUDE, COVARIANCES, ROW_COVARIANCES)))


class CohortFeatures:
    """Features of the subjects of a cohort, each computed once, when it is first asked for.

    They belong to the array that holds a subject's series, so another series never gets them. None of them is fitted.
    """

    def __init__(self, series: Series) -> None:
        self.series = tuple(series)  # held, so that their ids stay unique
        self.rows = {id(one): i for i, one in enumerate(self.series)}
        self.arrays: dict[int, npt.NDArray[Any]] = {}

    def find(self, series: Series) -> list[int] | None:
        """Rows of some subjects; None if one of them is not of this cohort."""
        rows = [self.rows.get(id(one), -1) for one in series]
        return None if -1 in rows else rows

    def array(self, feature: Feature) -> npt.NDArray[Any]:
        """(subject, ...) features of all subjects."""
        if id(feature) not in self.arrays:
            self.arrays[id(feature)] = self.compute(feature)
        return self.arrays[id(feature)]

    def compute(self, feature: Feature) -> npt.NDArray[Any]:
        """A feature that was not asked for before."""
        return _stack(self.series, feature)


_IN_USE: list[CohortFeatures] = []


@contextmanager
def sharing_features(*series: Series) -> Iterator[None]:
    """Within this context, features of these subjects, by atlas, are computed once; for several fits on parts of one cohort."""
    shared = [CohortFeatures(of_atlas) for of_atlas in series]
    _IN_USE.extend(shared)
    try:
        yield
    finally:
        for one in shared:
            _IN_USE.remove(one)


def use_features(*features: CohortFeatures) -> None:
    """Use these features until others take their place; a worker process holds one cohort at a time."""
    _IN_USE[:] = features


def _of_subjects(series: Series, feature: Feature) -> npt.NDArray[Any]:
    """(subject, ...) features, from those of a cohort where they are shared."""
    for shared in _IN_USE if id(feature) in SHARED else ():
        rows = shared.find(series)
        if rows is not None:
            return np.asarray(shared.array(feature)[rows])
    return _stack(series, feature)


def _stack(series: Series, feature: Feature) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = np.empty((len(series), *feature.shape(series[0].shape[1])), dtype=feature.dtype)
    for i, values in enumerate(feature.of_all(series)):
        result[i] = values
    return result
