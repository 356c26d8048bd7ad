"""Connectivity of a subject's series: Fisher-z correlations, also of its swings, tangent-space projections, amplitude.

Features for methods. Correlation and amplitude need one subject alone; the tangent space has a reference that is fitted on
source and then applied to anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.threads import on_threads

Floats = npt.NDArray[np.float64]
Series = Sequence[npt.NDArray[np.float32]]
View = Callable[[npt.NDArray[np.float32]], Floats]  # of one (time, roi) series
CLIP = 0.999  # Fisher's z of 1 is infinite
PIECE = 64  # subjects whose logarithms are in memory at once
CURVATURE = 32  # subjects from whose logarithms the step to the tangent reference is found


def standardised(series: npt.NDArray[np.floating[Any]]) -> Floats:
    """A (time, roi) series with mean 0 and variance 1 in each ROI; a flat ROI becomes 0."""
    wide = series.astype(np.float64)
    wide -= wide.mean(axis=0)
    spread = wide.std(axis=0)
    flat = (series == series[0]).all(axis=0)
    wide /= np.where(flat, 1.0, spread)
    wide[:, flat] = 0.0
    return wide


def steady(series: npt.NDArray[np.float32]) -> Floats:
    """`standardised` with each time point scaled by how usual its size is, so that a few large ones do not rule correlations.

    A time point of mean square e over ROIs has the weight 1 / (1 + (e / median)^2); mean 0 and variance 1 are those of the
    weighted points.
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
    """How far each ROI is from its mean at each time point, whichever way, as (time, roi) with mean 0 and variance 1."""
    return standardised(np.abs(standardised(series)))


def correlations(series: Series, view: View = standardised) -> Floats:
    """(subject, roi, roi) Pearson correlations of series as `view` sees them, 1 on the diagonal, 0 with a flat ROI."""
    n = series[0].shape[1]
    result = np.empty((len(series), n, n))

    def product(one: npt.NDArray[np.float32]) -> Floats:
        unit = view(one)  # (time, roi)
        return np.asarray(unit.T @ unit / len(unit))

    for i, found in enumerate(on_threads(product, series)):
        result[i] = found
    np.clip(result, -1.0, 1.0, out=result)
    result[:, np.arange(n), np.arange(n)] = 1.0
    return result


def upper_triangle(matrices: Floats) -> Floats:
    """(subject, edge) values above the diagonal, row by row."""
    rows, columns = np.triu_indices(matrices.shape[-1], 1)
    return matrices[:, rows, columns]


def fc_features(series: Series, view: View = standardised) -> Floats:
    """(subject, edge) Fisher z of the correlations."""
    return np.arctanh(np.clip(upper_triangle(correlations(series, view)), -CLIP, CLIP))


def fisher_matrices(series: Series) -> npt.NDArray[np.float32]:
    """(subject, roi, roi) Fisher z of the correlations, 0 on the diagonal: what networks on connectivity take in."""
    result = np.arctanh(np.clip(correlations(series), -CLIP, CLIP))
    result[:, np.arange(result.shape[-1]), np.arange(result.shape[-1])] = 0.0
    return result.astype(np.float32)


def source_scaling(values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Mean and spread of each feature over source subjects, the first dimension; what never varies is left as it is."""
    spread = values.std(axis=0, dtype=np.float64)
    scale = np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
    return {"mean": values.mean(axis=0, dtype=np.float64).astype(np.float32), "scale": scale}


def amplitude_features(series: Series) -> Floats:
    """(subject, roi) log standard deviation of each ROI relative to the subject's mean over ROIs; 0 for a flat ROI."""
    spread = np.array([one.std(axis=0, dtype=np.float64) for one in series])
    alive = np.array([(one != one[0]).any(axis=0) for one in series])
    log = np.log(np.where(alive, spread, 1.0))
    middle = (log * alive).sum(axis=1, keepdims=True) / np.maximum(alive.sum(axis=1, keepdims=True), 1)
    return np.where(alive, log - middle, 0.0)


def covariances(series: Series) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances of the standardised series, always positive definite.

    The shrinkage has a closed form, so there is no need for a fit object per subject: S = X'X / t is drawn towards mu I
    by the share of the error of S in its distance from mu I.
    """
    n = series[0].shape[1]
    result = np.empty((len(series), n, n))
    for i, one in enumerate(series):
        x = standardised(one)  # (time, roi)
        t = len(x)
        sample = x.T @ x / t
        mu = np.trace(sample) / n
        distance = (sample**2).sum() - n * mu**2  # |S - mu I|^2
        error = (((x**2).sum(axis=1) ** 2).sum() / t - (sample**2).sum()) / t  # mean of |x x' - S|^2, over t
        shrinkage = min(error, distance) / distance if distance > 0 else 0.0
        result[i] = (1 - shrinkage) * sample
        result[i][np.diag_indices(n)] += max(shrinkage, 1e-6) * mu  # the floor keeps fully flat ROIs invertible
    return result


def geometric_mean(matrices: Floats, *, tolerance: float = 1e-5, steps: int = 50) -> Floats:
    """The positive definite matrix whose mean logarithmic distance to the others is zero (the tangent reference).

    Newton's iteration from between the arithmetic and the harmonic mean; it ends when the mean tangent vector, relative to the
    number of ROIs, is below `tolerance`, and is then some twenty times nearer still.
    """
    reference, before, step = _middle(matrices), np.inf, 1.0
    every = -(-len(matrices) // CURVATURE)
    for _ in range(steps):
        root, inverse = _symmetric(reference, np.sqrt), _symmetric(reference, _inverse_root)
        mean, some = np.zeros_like(reference), []
        for i, one in enumerate(_whitened_logs(matrices, inverse)):
            mean += one / len(matrices)
            some += [one] if i % every == 0 else []
        error = float(np.linalg.norm(mean))
        step, before = step / 2 if error > before else step, error  # very different matrices need shorter steps
        reference = root @ _symmetric(step * _newton(mean, np.stack(some)), np.exp) @ root
        reference = (reference + reference.T) / 2
        if error / len(mean) < tolerance:
            break
    return np.asarray(reference)


def _middle(matrices: Floats) -> Floats:
    """The geometric mean of the arithmetic and the harmonic mean: near that of all, and had without logarithms."""
    total = np.zeros_like(matrices[0])
    for one in matrices:
        total += np.linalg.inv(one)
    mean, harmonic = matrices.mean(axis=0), np.linalg.inv(total / len(matrices))
    root, inverse = _symmetric(mean, np.sqrt), _symmetric(mean, _inverse_root)
    between = inverse @ harmonic @ inverse
    found = root @ _symmetric((between + between.T) / 2, np.sqrt) @ root
    return np.asarray((found + found.T) / 2)


def _newton(mean: Floats, logs: Floats) -> Floats:
    """The step that would bring the mean tangent vector to zero, from the curvature at some of the subjects.

    To second order a step d changes a subject's log L by d + (L L d - 2 L d L + d L L) / 12; a few conjugate gradients invert
    the mean of that. More than is there at large distances, so a step is rather too short than too long.
    """
    square = (logs @ logs).mean(axis=0)

    def change(step: Floats) -> Floats:
        return np.asarray(step + (square @ step + step @ square - 2 * (logs @ step @ logs).mean(axis=0)) / 12)

    found = 0.85 * mean
    rest = mean - change(found)
    along = rest
    for _ in range(2):
        changed, size = change(along), float((rest**2).sum())
        if size == 0:
            break
        share = size / float((along * changed).sum())
        found, rest = found + share * along, rest - share * changed
        along = rest + float((rest**2).sum()) / size * along
    return found


def tangent_features(matrices: Floats, reference: Floats) -> Floats:
    """(subject, roi (roi + 1) / 2) coordinates: the matrix logarithm after whitening by the reference.

    The off-diagonal is scaled by sqrt 2, so that Euclidean distances are those of the matrices.
    """
    whitening = _symmetric(reference, _inverse_root)
    rows, columns = np.triu_indices(len(reference))
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    result = np.empty((len(matrices), len(rows)))
    for i, one in enumerate(_whitened_logs(matrices, whitening)):
        result[i] = one[rows, columns] * scale
    return result


def _whitened_logs(matrices: Floats, whitening: Floats) -> Iterator[Floats]:
    """The logarithm of whitening @ matrix @ whitening, subject by subject, on as many threads as BLAS has.

    One matrix at a time: a subject's features must not depend, in the last bit, on who else is there or how many threads.
    """

    def log(matrix: Floats) -> Floats:
        inside = whitening @ matrix @ whitening
        return _symmetric((inside + inside.T) / 2, _safe_log)

    for start in range(0, len(matrices), PIECE):
        yield from on_threads(log, list(matrices[start : start + PIECE]))


def _symmetric(matrix: Floats, function: Callable[[Floats], Floats]) -> Floats:
    """A function of a symmetric matrix, through its eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * function(values)) @ vectors.T)


def _inverse_root(values: Floats) -> Floats:
    return np.asarray(1 / np.sqrt(values))


def _safe_log(values: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(values, 1e-12)))
