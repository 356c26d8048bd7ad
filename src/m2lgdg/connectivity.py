"""Features of ROI series: Fisher-z correlations, shrunk covariances and signal amplitude, each of one subject only.

Methods call these functions; `tangent.py` projects covariances to a tangent space. Features of a cohort can be kept between
fits (`keeping_features`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.preprocess import on_threads

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Series = Sequence[Singles]
View = Callable[[npt.NDArray[np.float32]], Floats]  # transforms one (time, roi) series before it is correlated
Compute = Callable[[Series], Iterator[Floats]]  # features of each subject, in order
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
    """(subject, edge) Fisher z of the correlations above the diagonal, in row order; kept ones are not computed again."""
    rois = series[0].shape[1]

    def edges(one: Singles) -> Floats:
        return np.arctanh(np.clip(upper_triangle(_correlation(one, view)), -CLIP, CLIP))

    return _kept(series, view.__name__, (rois * (rois - 1) // 2,), lambda every: on_threads(edges, every))


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
    return np.asarray(_kept(series, "amplitude", (series[0].shape[1],), lambda every: map(_amplitude, every), np.float64))


def _amplitude(series: Singles) -> Floats:
    alive = (series != series[0]).any(axis=0)
    log = np.log(np.where(alive, series.std(axis=0, dtype=np.float64), 1.0))
    middle = (log * alive).sum() / max(int(alive.sum()), 1)
    return np.where(alive, log - middle, 0.0)


def covariances(series: Series) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances of the standardised series, always positive definite."""
    n = series[0].shape[1]
    return _kept(series, "covariances", (n, n), lambda every: on_threads(_covariance, every)).astype(np.float64)


def row_covariances(series: Series) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances with the rows of each subject's correlation matrix as observations."""
    n = series[0].shape[1]
    return _kept(series, "row_covariances", (n, n), lambda every: on_threads(_row_covariance, every)).astype(np.float64)


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


class KeptFeatures:
    """Features of the subjects of a cohort, each kind computed once, when it is first asked for.

    They belong to the array that holds a subject's series, so another series never gets them. None of them is fitted.
    """

    def __init__(self, series: Series) -> None:
        self.series = tuple(series)  # held, so that their ids stay unique
        self.rows = {id(one): i for i, one in enumerate(self.series)}
        self.arrays: dict[str, npt.NDArray[Any]] = {}

    def find(self, series: Series) -> list[int] | None:
        """Rows of some subjects; None if one of them is not of this cohort."""
        rows = [self.rows.get(id(one), -1) for one in series]
        return None if -1 in rows else rows

    def array(self, name: str, shape: tuple[int, ...], compute: Compute, dtype: type) -> npt.NDArray[Any]:
        """(subject, ...) features of all subjects."""
        if name not in self.arrays:
            self.arrays[name] = self.compute(name, shape, compute, dtype)
        return self.arrays[name]

    def compute(self, name: str, shape: tuple[int, ...], compute: Compute, dtype: type) -> npt.NDArray[Any]:
        """Features of a kind that was not asked for before."""
        return _stack(self.series, shape, compute, dtype)


_KEPT: list[KeptFeatures] = []


@contextmanager
def keeping_features(*series: Series) -> Iterator[None]:
    """Within this context, features of these subjects, by atlas, are computed once; for several fits on parts of one cohort."""
    kept = [KeptFeatures(of_atlas) for of_atlas in series]
    _KEPT.extend(kept)
    try:
        yield
    finally:
        for one in kept:
            _KEPT.remove(one)


def keep_features(*kept: KeptFeatures) -> None:
    """Use these features until others take their place; a worker process holds one cohort at a time."""
    _KEPT[:] = kept


def _kept(series: Series, name: str, shape: tuple[int, ...], compute: Compute, dtype: type = np.float32) -> npt.NDArray[Any]:
    """(subject, ...) features, those of a cohort whose features are kept or else computed."""
    for kept in _KEPT:
        rows = kept.find(series)
        if rows is not None:
            return np.asarray(kept.array(name, shape, compute, dtype)[rows])
    return _stack(series, shape, compute, dtype)


def _stack(series: Series, shape: tuple[int, ...], compute: Compute, dtype: type) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = np.empty((len(series), *shape), dtype=dtype)
    for i, values in enumerate(compute(series)):
        result[i] = values
    return result
