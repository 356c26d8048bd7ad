"""Newton's method for many logistic regressions at once, and the conjugate gradients of its steps.

`solvers.py` gives it the features of all models on common axes, or, of many subjects, the Gram matrix alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
MOST_STEPS = 500  # of conjugate gradients; 20 to 40 are usual
MOST_NEWTON_STEPS = 50
CONVERGED = 1e-7  # slope of the loss, relative to that of the start
STEP_CONVERGED = 1e-4  # squared residual of a step, so that the slope falls by about a factor of 100
LEADING = 192  # axes of a Gram matrix that a step solves beforehand
LEAST_CURVATURE = 1e-10  # of the loss of a subject, for which the probability is 0 or 1


def conjugate_gradients(
    product: Callable[[Floats], Floats],
    right: Floats,
    relative: Floats | float,
    precondition: Callable[[Floats], Floats] = lambda residual: residual,
) -> Floats:
    """Approximate solution of product(x) = right, column by column; `precondition` is about the inverse of `product`.

    A column is solved when its squared residual is `relative` times that of the start. From then on its direction is 0.
    """
    solution, residual = np.zeros_like(right), right
    direction = precondition(residual)
    size = (residual * direction).sum(axis=0)
    goal = relative * size
    for _ in range(MOST_STEPS):
        active = size > goal
        if not active.any():
            break
        direction = np.where(active, direction, 0.0)
        changed = product(direction)
        curvature = (direction * changed).sum(axis=0)
        length = np.where(active & (curvature > 0), size / np.where(curvature > 0, curvature, 1.0), 0.0)
        solution, residual = solution + length * direction, residual - length * changed
        scaled = precondition(residual)
        before, size = size, (residual * scaled).sum(axis=0)
        direction = scaled + np.where(active, size / np.where(before > 0, before, 1.0), 0.0) * direction
    return solution


def newton_logistic(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, penalties: Floats) -> tuple[Floats, Floats]:
    """Logistic regressions that share their features: (feature, model) coefficients and (model,) intercepts.

    `weights` are (subject, model). Newton's method, with preconditioned conjugate gradients.
    """
    y = labels.astype(np.float64)[:, None]
    prevalence = np.clip((weights * y).sum(axis=0) / weights.sum(axis=0), 1e-6, 1 - 1e-6)
    beta = np.zeros((x.shape[1] + 1, weights.shape[1]))  # (feature and intercept, model)
    beta[-1] = np.log(prevalence / (1 - prevalence))
    penalty = np.concatenate([np.tile(penalties, (x.shape[1], 1)), np.zeros((1, len(penalties)))])  # none of intercepts
    square = np.append((x**2).sum(axis=0) / len(x), 1.0)[:, None]  # (feature and intercept, 1)
    # A step need not be exact, hence in float32: the slope of the next one is computed in float64.
    rows, columns = x.astype(np.float32), np.ascontiguousarray(x.T, dtype=np.float32)
    decision = np.broadcast_to(beta[-1], weights.shape)
    loss = _loss(decision, y, weights, (beta[:-1] ** 2).sum(axis=0), penalties)
    first = None
    for _ in range(MOST_NEWTON_STEPS):
        p = 0.5 * (1 + np.tanh(0.5 * decision))
        residual = weights * (p - y)
        slope = np.concatenate([x.T @ residual, residual.sum(axis=0)[None]]) + penalty * beta
        size = np.sqrt((slope**2).sum(axis=0))
        first = size if first is None else first
        if (size <= CONVERGED * first).all():
            break
        curvature = weights * p * (1 - p)

        def product(direction: Floats, curvature: Floats = curvature) -> Floats:
            bent = curvature * (rows @ direction[:-1].astype(np.float32) + direction[-1])  # (subject, model)
            sums = np.concatenate([columns @ bent.astype(np.float32), bent.sum(axis=0)[None]])
            return sums + penalty * direction

        scale = square * curvature.sum(axis=0) + penalty
        scale[-1] = np.maximum(scale[-1], 1e-12)
        step = conjugate_gradients(product, -slope, STEP_CONVERGED, partial(_divided, scale=scale))
        along = x @ step[:-1] + step[-1]  # (subject, model)
        length = np.ones(len(penalties))
        for _ in range(30):  # halve the steps of models whose loss would rise
            trial = decision + length * along
            trial_loss = _loss(trial, y, weights, ((beta + length * step)[:-1] ** 2).sum(axis=0), penalties)
            worse = trial_loss > loss + 1e-12 * np.abs(loss)
            if not worse.any():
                break
            length = np.where(worse, length / 2, length)
        beta, decision, loss = beta + length * step, trial, trial_loss
    return beta[:-1], beta[-1]


def _divided(residual: Floats, scale: Floats) -> Floats:
    return residual / scale


def _loss(decision: Floats, y: Floats, weights: Floats, square: Floats, penalties: Floats) -> Floats:
    """(model,) weighted log loss plus penalty of the squared norm of the coefficients."""
    log_loss = np.maximum(decision, 0) - y * decision + np.log1p(np.exp(-np.abs(decision)))
    return (weights * log_loss).sum(axis=0) + 0.5 * penalties * square


def newton_logistic_by_gram(
    gram: Floats, labels: npt.NDArray[np.int8], weights: Floats, penalties: Floats
) -> tuple[Floats, Floats]:
    """The same regressions from the Gram matrix of the subjects: (subject, model) dual coefficients and (model,) intercepts.

    An eigendecomposition would make the axes of `newton_logistic`, but takes ten times as long with 10,000 subjects, and three
    further matrices of this size.
    """
    y = labels.astype(np.float64)[:, None]
    prevalence = np.clip((weights * y).sum(axis=0) / weights.sum(axis=0), 1e-6, 1 - 1e-6)
    intercepts = np.log(prevalence / (1 - prevalence))
    dual, along = np.zeros_like(weights), np.zeros_like(weights)  # (subject, model), and its product with the Gram matrix
    # A step need not be exact, hence in float32: the slope of the next one is computed in float64.
    single = gram.astype(np.float32)
    leading, rest = _leading(single)

    def loss_at(dual: Floats, along: Floats, intercepts: Floats) -> Floats:
        return _loss(along + intercepts, y, weights, (dual * along).sum(axis=0), penalties)

    loss, first = loss_at(dual, along, intercepts), None
    for _ in range(MOST_NEWTON_STEPS):
        p = 0.5 * (1 + np.tanh(0.5 * (along + intercepts)))
        residual = weights * (p - y)
        slope = residual + penalties * dual  # the slope of the coefficients, as a sum of subjects
        size = np.sqrt(np.maximum((slope * (gram @ slope)).sum(axis=0), 0.0) + residual.sum(axis=0) ** 2)
        first = size if first is None else first
        left = size > 0.1 * CONVERGED * first  # (model,): a solved one is not improved by the steps of others
        if not left.any():
            break
        curvature = weights * np.maximum(p * (1 - p), LEAST_CURVATURE)
        step, change = np.zeros_like(dual), np.zeros_like(dual)
        step[:, left] = _step(single, leading, rest, curvature[:, left], slope[:, left], penalties[left])
        change[:, left] = gram @ step[:, left]
        shift = np.where(left, -(slope + curvature * change).sum(axis=0) / curvature.sum(axis=0), 0.0)
        length = np.ones(len(penalties))
        for _ in range(30):  # halve the steps of models whose loss would rise
            trial = dual + length * step, along + length * change, intercepts + length * shift
            trial_loss = loss_at(*trial)
            worse = trial_loss > loss + 1e-12 * np.abs(loss)
            if not worse.any():
                break
            length = np.where(worse, length / 2, length)
        (dual, along, intercepts), loss = trial, trial_loss
    return dual, intercepts


def _leading(gram: Singles) -> tuple[Floats, float]:
    """(subject, axis) and a number, with which axes axes' + number I is about the Gram matrix."""
    block = np.random.default_rng(0).standard_normal((len(gram), min(LEADING, len(gram))), dtype=np.float32)
    for _ in range(2):  # subspace iterations
        block = np.linalg.qr(gram @ block)[0]
    values, vectors = np.linalg.eigh((block.T @ (gram @ block)).astype(np.float64))
    rest = max(float(np.trace(gram, dtype=np.float64) - values.sum()), 0.0) / max(len(gram) - len(values), 1)
    return (block @ vectors) * np.sqrt(np.maximum(values - rest, 0.0)), rest


def _step(gram: Singles, leading: Floats, rest: float, curvature: Floats, slope: Floats, penalties: Floats) -> Floats:
    """Newton step of the (subject, model) dual coefficients.

    With r the root of the curvature, S = diag(r), P the projection off r and K the Gram matrix, the step is S q, where
    (P S K S P + penalty) q = -P S^-1 slope. Preconditioned by the inverse of this matrix with `leading` instead of K.
    """
    root = np.sqrt(curvature)
    unit = root / np.sqrt(curvature.sum(axis=0))
    right = -np.divide(slope, root, out=np.zeros_like(root), where=root > 0)  # 0 for subjects left out
    beside = penalties + rest * np.mean(curvature, axis=0)
    inner = np.empty((len(penalties), leading.shape[1], leading.shape[1]))  # (model, axis, axis)
    for i, penalty in enumerate(beside):
        scaled = root[:, i, None] * leading
        scaled -= unit[:, i, None] * (unit[:, i] @ scaled)
        inner[i] = np.linalg.inv(scaled.T @ scaled + penalty * np.eye(leading.shape[1]))

    def project(values: Floats, which: npt.NDArray[np.intp] | slice = slice(None)) -> Floats:
        return values - unit[:, which] * (unit[:, which] * values).sum(axis=0)

    def product(direction: Floats) -> Floats:
        live = np.flatnonzero(
            direction.any(axis=0)
        )  # models that are not solved yet: the largest penalties take the fewest steps
        result = np.zeros_like(direction)
        bent = gram @ (root[:, live] * project(direction[:, live], live)).astype(np.float32)
        result[:, live] = project(root[:, live] * bent, live) + penalties[live] * direction[:, live]
        return result

    def precondition(residual: Floats) -> Floats:
        inside = leading.T @ (root * project(residual))  # (axis, model)
        inside = np.einsum("mij,jm->im", inner, inside)
        return (residual - project(root * (leading @ inside))) / beside

    return root * conjugate_gradients(product, project(right), STEP_CONVERGED, precondition)
