"""Connectivity features of ROI series: Fisher-z correlations, tangent-space projections and signal amplitude.

Methods call these functions. Correlations and amplitudes need one subject only; the tangent space needs a reference, which
is fitted on source and then applied to any subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from m2lgdg.threads import on_threads

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Series = Sequence[Singles]
View = Callable[[npt.NDArray[np.float32]], Floats]  # transforms one (time, roi) series before it is correlated
Value = TypeVar("Value")
Compute = Callable[[Series], Iterator[Floats]]  # features of each subject, in order
CLIP = 0.999  # Fisher's z of 1 is infinite
PIECE = 64  # matrix logarithms in memory at once
CURVATURE = 32  # subjects used to estimate the curvature for a Newton step


def standardised(series: npt.NDArray[np.floating[Any]]) -> Floats:
    """(time, roi) series with mean 0 and variance 1 in each ROI; a flat ROI becomes 0."""
    wide = series.astype(np.float64)
    wide -= wide.mean(axis=0)
    spread = wide.std(axis=0)
    flat = (series == series[0]).all(axis=0)
    wide /= np.where(flat, 1.0, spread)
    wide[:, flat] = 0.0
    return wide


def steady(series: npt.NDArray[np.float32]) -> Floats:
    """`standardised` with high-amplitude time points weighted down, so that a few of them do not dominate correlations.

    A time point with mean square e over ROIs has the weight 1 / (1 + (e / median)^2), where the median is over time points.
    The weighted series has mean 0 and variance 1.
    """
    wide = standardised(series)
    size = (wide**2).mean(axis=1)
    weight = 1 / (1 + (size / (np.median(size) or 1.0)) ** 2)  # (time,)
    weight /= weight.mean()
    wide -= (weight @ wide) / len(wide)
    wide *= np.sqrt(weight)[:, None]
    spread = np.sqrt((wide**2).mean(axis=0))
    return np.asarray(wide / np.where(spread > 0, spread, 1.0))


def swings(series: npt.NDArray[np.float32]) -> Floats:
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
    """(subject, roi, roi) Ledoit-Wolf covariances of the standardised series, always positive definite.

    The shrinkage has a closed form: S = X'X / t is shrunk towards mu I, by the ratio of the estimation error of S to its
    squared distance from mu I. They are rounded to float32, like the other features.
    """
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
    """Ledoit-Wolf covariance of (observation, roi) values with mean 0."""
    t, n = x.shape
    sample = x.T @ x / t
    mu = np.trace(sample) / n
    distance = (sample**2).sum() - n * mu**2  # |S - mu I|^2
    error = (((x**2).sum(axis=1) ** 2).sum() / t - (sample**2).sum()) / t  # mean of |x x' - S|^2, over t
    shrinkage = min(error, distance) / distance if distance > 0 else 0.0
    result = (1 - shrinkage) * sample
    result[np.diag_indices(n)] += max(shrinkage, 1e-6) * mu  # the floor keeps the matrix invertible with flat ROIs
    return np.asarray(result)


def geometric_mean(matrices: Floats, *, tolerance: float = 1e-5, steps: int = 50, first_step: int | None = None) -> Floats:
    """Geometric mean of positive definite matrices: their mean tangent vector there is zero (the tangent reference).

    Newton's iteration, started between the arithmetic and the harmonic mean. It stops when the norm of the mean tangent vector,
    divided by the number of ROIs, is below `tolerance`; the last step then brings it about twenty times closer still.
    If `first_step` is given and there are at least twice as many matrices, the first step estimates the mean tangent vector
    from about that many, evenly spaced.
    """
    reference, before, step = _start(matrices), np.inf, 1.0
    every = max(len(matrices) // first_step, 1) if first_step else 1
    for _ in range(steps):
        root, inverse = _symmetric(reference, np.sqrt), _symmetric(reference, _inverse_root)
        mean, logs = _mean_log(matrices, inverse) if every == 1 else _estimated_mean_log(matrices[::every], inverse)
        every = 1
        error = float(np.linalg.norm(mean))
        step, before = step / 2 if error > before else step, error  # matrices far apart need shorter steps
        reference = root @ _symmetric(step * _newton(mean, logs), np.exp) @ root
        reference = (reference + reference.T) / 2
        if error / len(mean) < tolerance:
            break
    return np.asarray(reference)


def _mean_log(matrices: Floats, whitening: Floats) -> tuple[Floats, Floats]:
    """Mean of the whitened logarithms, and the logarithms of some subjects, for the curvature."""
    mean, some = np.zeros_like(whitening), []
    every = -(-len(matrices) // CURVATURE)
    for i, log in enumerate(_whitened_logs(matrices, whitening)):
        mean += log / len(matrices)
        some += [log] if i % every == 0 else []
    return mean, np.stack(some)


def _estimated_mean_log(sample: Floats, whitening: Floats) -> tuple[Floats, Floats]:
    """`_mean_log` of all subjects, estimated from some of them at the start of the iteration.

    There, a whitened matrix W and its inverse have the same mean over all subjects. W - W^-1 follows log W closely, so its mean
    in the sample (a control variate) removes most of the sampling error.
    """

    def log_and_difference(matrix: Floats) -> tuple[Floats, Floats]:
        values, vectors = np.linalg.eigh(_whitened(matrix, whitening))
        return (vectors * _safe_log(values)) @ vectors.T, (vectors * (values - 1 / np.maximum(values, 1e-12))) @ vectors.T

    n, some = len(sample), []
    mean, difference, product, square = np.zeros_like(whitening), np.zeros_like(whitening), 0.0, 0.0
    every = -(-n // CURVATURE)
    for i, (log, other) in enumerate(_in_pieces(log_and_difference, sample)):
        mean += log / n
        difference += other / n
        product, square = product + float((log * other).sum()), square + float((other**2).sum())
        some += [log] if i % every == 0 else []
    covariance, variance = product - n * float((mean * difference).sum()), square - n * float((difference**2).sum())
    return mean - (covariance / variance if variance > 0 else 0.0) * difference, np.stack(some)


def _start(matrices: Floats) -> Floats:
    """Geometric mean of the arithmetic and the harmonic mean: close to that of all matrices, without any logarithm."""
    total = np.zeros_like(matrices[0])
    for one in matrices:
        total += _inverse(one)
    mean, harmonic = matrices.mean(axis=0), np.linalg.inv(total / len(matrices))
    root, inverse = _symmetric(mean, np.sqrt), _symmetric(mean, _inverse_root)
    between = inverse @ harmonic @ inverse
    middle = root @ _symmetric((between + between.T) / 2, np.sqrt) @ root
    return np.asarray((middle + middle.T) / 2)


def _inverse(matrix: Floats) -> Floats:
    """Inverse of a positive definite matrix, by its Cholesky factor: half the time of a general inverse."""
    from scipy.linalg.lapack import dpotrf, dpotri

    lower, failed = dpotrf(matrix, lower=1, clean=1)
    inverse, also_failed = dpotri(lower, lower=1)
    if failed or also_failed:
        return np.asarray(np.linalg.inv(matrix), dtype=np.float64)
    return np.asarray(np.tril(inverse) + np.tril(inverse, -1).T, dtype=np.float64)


def _newton(mean: Floats, logs: Floats) -> Floats:
    """Newton step that brings the mean tangent vector to zero, with the curvature estimated from some of the subjects.

    To second order, a step d changes a subject's log L by d + (L L d - 2 L d L + d L L) / 12. A few conjugate gradient steps
    invert the mean of this map. It overestimates the curvature at large distances, so steps are rather too short than too long.
    """
    square = (logs @ logs).mean(axis=0)

    def change(step: Floats) -> Floats:
        return np.asarray(step + (square @ step + step @ square - 2 * (logs @ step @ logs).mean(axis=0)) / 12)

    solution = 0.85 * mean
    residual = mean - change(solution)
    direction = residual
    for _ in range(2):
        changed, size = change(direction), float((residual**2).sum())
        if size == 0:
            break
        length = size / float((direction * changed).sum())
        solution, residual = solution + length * direction, residual - length * changed
        direction = residual + float((residual**2).sum()) / size * direction
    return solution


def tangent_features(matrices: Floats, reference: Floats) -> Singles:
    """(subject, roi (roi + 1) / 2) tangent vectors: the matrix logarithm after whitening with the reference.

    Off-diagonal entries are scaled by sqrt 2, so that Euclidean distances between vectors equal those between matrices.
    """
    whitening = _symmetric(reference, _inverse_root)
    rows, columns = np.triu_indices(len(reference))
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    result = np.empty((len(matrices), len(rows)), dtype=np.float32)
    for i, one in enumerate(_whitened_logs(matrices, whitening)):
        result[i] = one[rows, columns] * scale
    return result


def _whitened_logs(matrices: Floats, whitening: Floats) -> Iterator[Floats]:
    """Logarithm of whitening @ matrix @ whitening for each subject."""
    return _in_pieces(lambda matrix: _symmetric(_whitened(matrix, whitening), _safe_log), matrices)


def _whitened(matrix: Floats, whitening: Floats) -> Floats:
    inside = whitening @ matrix @ whitening
    return np.asarray((inside + inside.T) / 2)


def _in_pieces(function: Callable[[Floats], Value], matrices: Floats) -> Iterator[Value]:
    """Results for each subject, on as many threads as BLAS has.

    One matrix at a time, so that a subject's features are bit-identical whatever the other subjects and the number of threads.
    """
    for start in range(0, len(matrices), PIECE):
        yield from on_threads(function, list(matrices[start : start + PIECE]))


def _symmetric(matrix: Floats, function: Callable[[Floats], Floats]) -> Floats:
    """Apply a function to a symmetric matrix through its eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * function(values)) @ vectors.T)


def _inverse_root(values: Floats) -> Floats:
    return np.asarray(1 / np.sqrt(values))


def _safe_log(values: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(values, 1e-12)))


class KeptFeatures:
    """Features of the subjects of a cohort, each kind computed once, when it is first asked for.

    A feature belongs to the array that holds a subject's series, so a changed or unknown series never gets the features of
    another. Nothing that is kept is fitted: a row depends on one subject only.
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
