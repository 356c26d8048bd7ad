"""Local calibration: with some labelled subjects of a new site, a slope, an offset and a threshold that fit it.

Stands after the methods: it changes no weight of a fitted model, only what `predict_proba` makes of its probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.method import Method
from m2lgdg.metrics import logit, shrunken_platt, sigmoid, wilson
from m2lgdg.storage import InputError

LEAST = 5  # of each class

Floats = npt.NDArray[np.float64]


class SiteCalibration(NamedTuple):
    """What a site's own subjects say; the shares are of subjects left out of the calibration in turn, with 95 % intervals."""

    slope: float
    offset: float
    threshold: float
    patients: int
    controls: int
    sensitivity: tuple[float, float, float]
    specificity: tuple[float, float, float]


def calibrate(fitted: Method, cohort: Cohort) -> SiteCalibration:
    """Give a fitted method the calibration of the labelled subjects of a site, who can then not be used to evaluate it."""
    if "local" in fitted.facts_:
        raise InputError("this model is calibrated already; begin with the one that `m2lgdg fit` wrote.")
    known = cohort.select(cohort.labels >= 0)
    y = known.labels.astype(np.float64)
    patients, controls = int(y.sum()), int((1 - y).sum())
    if min(patients, controls) < LEAST:
        raise InputError(
            f"cohort {cohort.name} has {patients} labelled patients and {controls} controls; calibration needs {LEAST} of each."
        )
    decision = logit(fitted.predict_proba(known)[:, 1])
    right = np.array([_left_out(decision, y, i) for i in range(len(y))]) == y
    slope, offset = shrunken_platt(decision, y)
    sure = []
    for label, count in ((1, patients), (0, controls)):
        part = int(right[y == label].sum())
        sure.append((part / count, *wilson(part, count)))
    found = SiteCalibration(slope, offset, float(y.mean()), patients, controls, *sure)
    before, added = fitted.recalibration or (1.0, 0.0)
    said: dict[str, Any] = found._asdict() | {"slope": slope * before, "offset": slope * added + offset}
    fitted.facts_["local"] = said | {"sensitivity": list(sure[0]), "specificity": list(sure[1])}
    fitted.new_site_ = None  # it was of sites without labels of their own; its temperature lives on in the slope and offset
    return found


def _left_out(decision: Floats, y: Floats, i: int) -> bool:
    """What is decided of a subject by the calibration of the others; the threshold is their share of patients."""
    others = np.arange(len(y)) != i
    slope, offset = shrunken_platt(decision[others], y[others])
    return bool(sigmoid(slope * decision[i] + offset) >= y[others].mean())
