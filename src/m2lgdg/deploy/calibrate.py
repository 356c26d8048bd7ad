"""Local calibration: slope, offset and threshold of one site, from some of its labelled subjects.

It changes no weights of a fitted model, only the probabilities and the threshold that `predict_proba` uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.findings import problems
from m2lgdg.metrics import logit, shrunken_platt, sigmoid, wilson
from m2lgdg.model.model import Model
from m2lgdg.storage import InputError

LEAST = 5  # subjects of each class

Floats = npt.NDArray[np.float64]


class SiteCalibration(NamedTuple):
    """Calibration of one site; sensitivity and specificity are leave-one-subject-out, with 95 % intervals."""

    slope: float
    offset: float
    threshold: float
    patients: int
    controls: int
    sensitivity: tuple[float, float, float]
    specificity: tuple[float, float, float]


def calibrate(fitted: Model, cohort: Cohort) -> SiteCalibration:
    """Calibrate a fitted method to the labelled subjects of a site, which must not be used to evaluate it."""
    if "local" in fitted.facts_:
        raise InputError("this model is already calibrated to a site; use the model that `m2lgdg fit` wrote.")
    if fitted.site_level is not None:
        raise InputError("this model is adapted to a site (m2lgdg adapt); calibrate the model that `m2lgdg fit` wrote.")
    known = cohort.select(cohort.labels >= 0)
    y = known.labels.astype(np.float64)
    patients, controls = int(y.sum()), int((1 - y).sum())
    if min(patients, controls) < LEAST:
        raise InputError(
            f"cohort {cohort.name} has {patients} labelled patients and {controls} controls; at least {LEAST} of each needed."
        )
    decision = logit(fitted.predict_proba(known)[:, 1])
    correct = np.array([_decision_without(decision, y, i) for i in range(len(y))]) == y
    slope, offset = shrunken_platt(decision, y)
    rates = []
    for label, count in ((1, patients), (0, controls)):
        right = int(correct[y == label].sum())
        rates.append((right / count, *wilson(right, count)))
    result = SiteCalibration(slope, offset, float(y.mean()), patients, controls, *rates)
    before, added = fitted.recalibration or (1.0, 0.0)
    facts: dict[str, Any] = result._asdict() | {"slope": slope * before, "offset": slope * added + offset}
    if known.findings is not None:
        facts["findings"] = [one.shared() for one in problems(known.findings, new_site=True)]
    fitted.facts_["local"] = facts | {"sensitivity": list(rates[0]), "specificity": list(rates[1])}
    fitted.new_site_ = None  # it is for sites without labels; its slope and offset are now in those of the site
    return result


def _decision_without(decision: Floats, y: Floats, i: int) -> bool:
    """Decision on a subject with the calibration of the others; the threshold is their proportion of patients."""
    others = np.arange(len(y)) != i
    slope, offset = shrunken_platt(decision[others], y[others])
    return bool(sigmoid(slope * decision[i] + offset) >= y[others].mean())
