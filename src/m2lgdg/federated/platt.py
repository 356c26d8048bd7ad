"""Platt scaling from sums over sites: what `metrics.platt` computes from the decisions of all subjects.

Generators that ask for derivatives of log losses, as those of `coordinator`, which weighs the decisions and calls these last.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from m2lgdg.federated.plan import Ask, Floats
from m2lgdg.metrics import PLATT_PENALTY, newton_step, unstandardised
from m2lgdg.storage import InputError

MOST_STEPS = 30  # of Newton's method
CONVERGED = 1e-5  # a step; what is left after it is of the order of its square


def curve(name: str, weights: Floats, mean: float, spread: float) -> Generator[list[Ask], list[Floats], tuple[float, float]]:
    """Slope and offset of Platt scaling for decisions, or for those centred within sites."""
    point = np.zeros(2)
    for _ in range(MOST_STEPS):
        arguments = {"weights": weights.copy(), "mean_sd": np.array([mean, spread]), "point": point.copy()}
        ((*slope, squares, products, count),) = yield [Ask("calibration", name, arguments)]
        curvature = np.array([[squares, products], [products, count]])
        try:
            step = newton_step(point, np.array(slope), curvature, PLATT_PENALTY)
        except np.linalg.LinAlgError:
            raise InputError("the totals of the calibration cannot be those of any subjects: a site sent wrong sums.") from None
        point += step
        if np.abs(step).max() < CONVERGED:
            break
    return unstandardised(point, mean, spread)


def intercept(weights: Floats, slope: float, mean: float) -> Generator[list[Ask], list[Floats], float]:
    """Offset for a given slope of decisions with this mean."""
    offset = np.zeros(1)
    for _ in range(MOST_STEPS):
        point = np.array([slope, offset[0]])
        arguments = {"weights": weights.copy(), "mean_sd": np.array([mean, 1.0]), "point": point}
        ((_, residual, *_, curvature),) = yield [Ask("calibration", "all", arguments)]
        step = newton_step(offset, np.array([residual]), np.array([[curvature]]))
        offset += step
        if np.abs(step).max() < CONVERGED:
            break
    return float(offset[0]) - slope * mean
