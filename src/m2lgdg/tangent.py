"""Tangent space of positive definite matrices: their geometric mean, and projections of covariances at such a reference.

Linear methods on `connectivity.covariances` use it. The reference is fitted on source and then applied to any subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from m2lgdg.preprocess import on_threads

Floats = npt.NDArray[np.float64]
Value = TypeVar("Value")
CHUNK = 64  # matrix logarithms in memory at once
CURVATURE = 32  # subjects used to estimate the curvature for a Newton step


def geometric_mean(matrices: Floats, *, tolerance: float = 1e-5, steps: int = 50, first_step: int | None = None) -> Floats:
    """Geometric mean of positive definite matrices, at which their mean tangent vector is zero (the tangent reference).

    Newton's iteration, started between the arithmetic and the harmonic mean, until the norm of the mean tangent vector divided
    by the number of ROIs is below `tolerance`. The first step uses about `first_step` matrices, if there are twice as many.
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
    """Mean of the whitened logarithms, and some of them for the curvature."""
    mean, some = np.zeros_like(whitening), []
    every = -(-len(matrices) // CURVATURE)
    for i, log in enumerate(_whitened_logs(matrices, whitening)):
        mean += log / len(matrices)
        some += [log] if i % every == 0 else []
    return mean, np.stack(some)


def _estimated_mean_log(sample: Floats, whitening: Floats) -> tuple[Floats, Floats]:
    """`_mean_log` of all subjects, estimated from some of them at the start of the iteration.

    There, W and W^-1 have the same mean over all subjects, so that of W - W^-1 in the sample is a control variate for log W.
    """

    def log_and_difference(matrix: Floats) -> tuple[Floats, Floats]:
        values, vectors = np.linalg.eigh(_whitened(matrix, whitening))
        return (vectors * _safe_log(values)) @ vectors.T, (vectors * (values - 1 / np.maximum(values, 1e-12))) @ vectors.T

    n, some = len(sample), []
    mean, difference, product, square = np.zeros_like(whitening), np.zeros_like(whitening), 0.0, 0.0
    every = -(-n // CURVATURE)
    for i, (log, other) in enumerate(_in_chunks(log_and_difference, sample)):
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
    """Inverse by the Cholesky factor: half the time of a general one."""
    from scipy.linalg.lapack import dpotrf, dpotri

    lower, failed = dpotrf(matrix, lower=1, clean=1)
    inverse, also_failed = dpotri(lower, lower=1)
    if failed or also_failed:
        return np.asarray(np.linalg.inv(matrix), dtype=np.float64)
    return np.asarray(np.tril(inverse) + np.tril(inverse, -1).T, dtype=np.float64)


def _newton(mean: Floats, logs: Floats) -> Floats:
    """Newton step towards a mean tangent vector of zero, with the curvature estimated from the logs of some subjects.

    To second order, a step d changes a subject's log L by d + (L L d - 2 L d L + d L L) / 12; conjugate gradients invert the
    mean of this map.
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


def tangent_features(matrices: Floats, reference: Floats) -> npt.NDArray[np.float32]:
    """(subject, roi (roi + 1) / 2) tangent vectors: logarithms after whitening, off-diagonal entries times sqrt 2."""
    whitening = _symmetric(reference, _inverse_root)
    rows, columns = np.triu_indices(len(reference))
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    result = np.empty((len(matrices), len(rows)), dtype=np.float32)
    for i, one in enumerate(_whitened_logs(matrices, whitening)):
        result[i] = one[rows, columns] * scale
    return result


def _whitened_logs(matrices: Floats, whitening: Floats) -> Iterator[Floats]:
    return _in_chunks(lambda matrix: _symmetric(_whitened(matrix, whitening), _safe_log), matrices)


def _whitened(matrix: Floats, whitening: Floats) -> Floats:
    inside = whitening @ matrix @ whitening
    return np.asarray((inside + inside.T) / 2)


def _in_chunks(function: Callable[[Floats], Value], matrices: Floats) -> Iterator[Value]:
    """Results for each subject, one matrix at a time, so that its bits do not depend on other subjects or on threads."""
    for start in range(0, len(matrices), CHUNK):
        yield from on_threads(function, list(matrices[start : start + CHUNK]))


def _symmetric(matrix: Floats, function: Callable[[Floats], Floats]) -> Floats:
    """Apply a function to a symmetric matrix through its eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * function(values)) @ vectors.T)


def _inverse_root(values: Floats) -> Floats:
    return np.asarray(1 / np.sqrt(values))


def _safe_log(values: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(values, 1e-12)))
