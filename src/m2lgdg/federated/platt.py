"""Platt scaling from sums over sites: what `metrics.platt` computes from the decisions of all subjects.

Generators that ask for sums of log losses, as those of `coordinator`, which weighs the decisions and calls these last.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from m2lgdg.federated.plan import Ask, Floats
from m2lgdg.metrics import LEAST_SLOPE

MOST_STEPS = 30  # of Newton's method


def curve(
    name: str, weights: Floats, mean: float, spread: float, count: int
) -> Generator[list[Ask], list[Floats], tuple[float, float]]:
    """Slope and offset of Platt scaling for decisions, or for those centred within sites."""
    evaluated: list[tuple[float, Floats]] = []
    while True:
        point, converged = _next_point(evaluated)
        if converged:
            slope = max(float(point[0]), LEAST_SLOPE) / spread
            return slope, float(point[1]) - slope * mean
        arguments = {"weights": weights.copy(), "mean_sd": np.array([mean, spread]), "point": point}
        ((loss, *gradient, _),) = yield [Ask("calibration", name, arguments)]
        penalised, slopes = loss + 0.5 * point[0] ** 2 / 100.0, np.array([point[0] / 100.0, 0.0])  # C = 100: `metrics.platt`
        evaluated.append((penalised / count, (np.array(gradient) + slopes) / count))


def intercept(weights: Floats, slope: float) -> Generator[list[Ask], list[Floats], float]:
    """Offset for a given slope, by Newton's method."""
    offset = 0.0
    for _ in range(MOST_STEPS):
        arguments = {"weights": weights.copy(), "mean_sd": np.array([0.0, 1.0]), "point": np.array([slope, offset])}
        ((*_, residual, curvature),) = yield [Ask("calibration", "all", arguments)]
        step = -residual / (curvature + 1e-10)
        offset += float(np.clip(step, -2, 2))
        if abs(step) < 1e-9:
            break
    return offset


class _Unknown(Exception):
    """The loss at a point that no round has evaluated yet."""


def _next_point(evaluated: list[tuple[float, Floats]]) -> tuple[Floats, bool]:
    """The next point that L-BFGS needs the loss of, or its result and True.

    The minimiser is that of scikit-learn's logistic regression, which `metrics.platt` uses: the same steps give the same
    result. It is run again from its start in every round, on the losses known so far.
    """
    from scipy.optimize import minimize

    remaining = iter(evaluated)

    def loss(point: Floats) -> tuple[float, Floats]:
        known = next(remaining, None)
        if known is None:
            raise _Unknown(np.array(point))
        return known[0], known[1].copy()

    options = {"maxiter": 2000, "maxls": 50, "gtol": 1e-4, "ftol": 64 * np.finfo(float).eps}
    try:
        result = minimize(loss, np.zeros(2), method="L-BFGS-B", jac=True, options=options)
    except _Unknown as unknown:
        return unknown.args[0], False
    return np.asarray(result.x), True
