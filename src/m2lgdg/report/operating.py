"""What a model does at its threshold: counts, sensitivity and specificity with intervals, calibration, decision curves.

Pure functions of the predictions table, beside the paper's tables. Probabilities are averaged over seeds first, because a
lab that uses a model has one probability for a subject.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.metrics import ECE_BINS, ECE_LEAST, THRESHOLD, calibration, calibration_error, wilson
from m2lgdg.report.tables import Table, label
from m2lgdg.storage import InputError


def over_seeds(predictions: pd.DataFrame) -> pd.DataFrame:
    """One row a method, variant, target and subject (label, proba): the mean over seeds, unknown labels left out."""
    grouped = predictions[predictions["label"] >= 0].groupby(["method", "variant", "target", "subject"], sort=False)
    table: pd.DataFrame = grouped.agg(label=("label", "first"), proba=("proba", "mean")).reset_index()
    return table


def operating_table(predictions: pd.DataFrame) -> Table:
    """Each method at each target site: who is told right and wrong, and how far probabilities can be taken literally."""
    header = ["Method", "Target", "n", "patients", "TP", "FN", "TN", "FP", "SEN", "SPE", "intercept", "slope", "Brier", "ECE"]
    rows = []
    for (method, variant, target), part in over_seeds(predictions).groupby(["method", "variant", "target"], sort=False):
        y, p = part["label"].to_numpy(), part["proba"].to_numpy()
        hits, misses, rejections, alarms = counts = confusion(y, p)
        slope, intercept = calibration(y, p)
        rates = [_rate(hits, hits + misses), _rate(rejections, rejections + alarms)]
        brier, error = float(((p - y) ** 2).mean()), calibration_error(y, p)
        numbers = [_number(value) for value in (intercept, slope, brier, error)]
        rows.append([label(method, variant), target, *map(str, (len(y), hits + misses, *counts)), *rates, *numbers])
    note = (
        f"probabilities averaged over seeds; patient at {THRESHOLD:g} or above; 95 % Wilson intervals; intercept (ideal 0) at "
        f"slope 1, slope ideal 1; ECE over {ECE_BINS} bins of equal count where n is at least {ECE_LEAST}"
    )
    return Table("Operating point and calibration", header, rows, [[0] * len(header) for _ in rows], note)


def confusion(labels: npt.ArrayLike, proba: npt.ArrayLike, threshold: float = THRESHOLD) -> tuple[int, int, int, int]:
    """TP, FN, TN, FP of labels 1 and 0; a patient is who reaches the threshold."""
    y, decided = np.asarray(labels), np.asarray(proba) >= threshold
    pairs = ((1, True), (1, False), (0, False), (0, True))
    hits, misses, rejections, alarms = (int(((y == kind) & (decided == said)).sum()) for kind, said in pairs)
    return hits, misses, rejections, alarms


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """PPV and NPV where `prevalence` of those tested are patients; NaN where nobody would get that answer.

    A case-control cohort is about half patients, a clinic is not: its own predictive values hold nowhere else.
    """
    _need_share("prevalence", prevalence)
    hits, misses = sensitivity * prevalence, (1 - sensitivity) * prevalence
    rejections, alarms = specificity * (1 - prevalence), (1 - specificity) * (1 - prevalence)
    return _divided(hits, hits + alarms), _divided(rejections, rejections + misses)


def net_benefit(
    labels: npt.ArrayLike, proba: npt.ArrayLike, thresholds: npt.ArrayLike, prevalence: float | None = None
) -> pd.DataFrame:
    """The decision curve: threshold, and net benefit of the model, of treating all and of treating none.

    In patients found per subject, false alarms counted at the odds of the threshold; at the cohort's own share of patients
    unless a prevalence is given.
    """
    y, p = _labelled(labels, proba)
    if prevalence is not None:
        _need_share("prevalence", prevalence)
    share = prevalence if prevalence is not None else _divided(float(y.sum()), len(y))
    rows = []
    for threshold in np.atleast_1d(np.asarray(thresholds, dtype=np.float64)).tolist():
        if not 0 <= threshold < 1:
            raise InputError(f"threshold {threshold:g} is not a number from 0 to below 1.")
        odds = threshold / (1 - threshold)
        hits, misses, rejections, alarms = confusion(y, p, threshold)
        found, alarmed = _divided(hits, hits + misses), _divided(alarms, alarms + rejections)
        gain, cost = (0.0 if not weight else rate * weight for rate, weight in ((found, share), (alarmed, 1 - share)))
        rows.append((threshold, gain - cost * odds, share - (1 - share) * odds, 0.0))
    return pd.DataFrame(rows, columns=["threshold", "model", "treat_all", "treat_none"])


def _labelled(labels: npt.ArrayLike, proba: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    y, p = np.asarray(labels, dtype=np.int64), np.asarray(proba, dtype=np.float64)
    return y[y >= 0], p[y >= 0]


def _need_share(what: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{what} {value:g} is not a number from 0 to 1.")


def _divided(part: float, whole: float) -> float:
    return part / whole if whole else np.nan


def _rate(part: int, whole: int) -> str:
    low, high = wilson(part, whole)
    return f"{100 * part / whole:.1f} ({100 * low:.1f}-{100 * high:.1f})" if whole else "-"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"
