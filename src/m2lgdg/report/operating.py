"""Operating point of a model: confusion counts, sensitivity, specificity, calibration, predictive values, net benefit.

Pure functions of the predictions table, for the report and the card. Probabilities are first averaged over seeds, because a
user of a model has one probability per subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.metrics import (
    ECE_BINS,
    ECE_LEAST,
    THRESHOLD,
    auc,
    calibration,
    calibration_error,
    delong_interval,
    delong_test,
    wilson,
)
from m2lgdg.report.tables import Table, label
from m2lgdg.storage import InputError
from m2lgdg.study.stats import over_seeds

PREVALENCES = (0.01, 0.05, 0.1, 0.2, 0.5)  # from screening to a case-control study


def operating_table(predictions: pd.DataFrame) -> Table:
    """Confusion counts, sensitivity, specificity and calibration of each method at each target site."""
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
        f"probabilities averaged over seeds; threshold {THRESHOLD:g}; SEN and SPE in % with 95 % Wilson intervals; calibration "
        f"intercept (at slope 1; ideal 0) and slope (ideal 1); ECE over {ECE_BINS} bins of equal count if n is at least "
        f"{ECE_LEAST}"
    )
    return Table("Operating point and calibration", header, rows, [[0] * len(header) for _ in rows], note)


def comparison_table(mean: pd.DataFrame, first: tuple[str, str], second: tuple[str, str]) -> Table | None:
    """AUC of two methods at each target site, with DeLong's test of the difference; `mean` is from `over_seeds`.

    None if no target site with both classes was predicted by both methods.
    """
    rows = []
    for site, part in mean.groupby("target", sort=False):
        sides = [part[(part["method"] == method) & (part["variant"] == variant)] for method, variant in (first, second)]
        pairs = sides[0].merge(sides[1], on=["subject", "label"], suffixes=("_first", "_second"))
        if pairs["label"].nunique() < 2:
            continue
        y, scores = pairs["label"].to_numpy(), [pairs[f"proba_{side}"].to_numpy() for side in ("first", "second")]
        areas = [_interval(auc(y, score), *delong_interval(y, score)) for score in scores]
        difference, p = delong_test(y, *scores)
        rows.append([str(site), str(len(y)), str(int(y.sum())), *areas, f"{100 * difference:+.1f}", _number(p)])
    if not rows:
        return None
    names = [label(*first), label(*second)]
    header = ["Target", "n", "patients", *(f"AUC, {name}" for name in names), f"{names[0]} minus {names[1]}", "p"]
    note = (
        "AUC in % with 95 % DeLong intervals, probabilities averaged over seeds; p of DeLong's test at each site, not "
        "corrected for the number of sites"
    )
    return Table(f"{names[0]} versus {names[1]} by site", header, rows, [[0] * len(header) for _ in rows], note)


def predictive_table(mean: pd.DataFrame, keys: Sequence[tuple[str, str]]) -> Table:
    """PPV and NPV at several prevalences, from the mean sensitivity and specificity over target sites."""
    rows = []
    for method, variant in keys:
        chosen = mean[(mean["method"] == method) & (mean["variant"] == variant)]
        counts = [confusion(part["label"], part["proba"]) for _, part in chosen.groupby("target", sort=False)]
        sensitivity = _mean(_divided(hits, hits + misses) for hits, misses, _, _ in counts)
        specificity = _mean(_divided(rejections, rejections + alarms) for _, _, rejections, alarms in counts)
        for prevalence in PREVALENCES:
            values = (sensitivity, specificity, *predictive_values(sensitivity, specificity, prevalence))
            rows.append([label(method, variant), f"{100 * prevalence:g}", *map(_percent, values)])
    header = ["Method", "prevalence", "SEN", "SPE", "PPV", "NPV"]
    note = (
        f"in %; SEN and SPE at the threshold {THRESHOLD:g}, unweighted means over target sites; PPV and NPV from these and the "
        "prevalence by Bayes' rule"
    )
    return Table("Predictive values by prevalence", header, rows, [[0] * len(header) for _ in rows], note)


def confusion(labels: npt.ArrayLike, proba: npt.ArrayLike, threshold: float = THRESHOLD) -> tuple[int, int, int, int]:
    """TP, FN, TN, FP of labels 1 and 0; positive is a probability at or above the threshold."""
    y, decided = np.asarray(labels), np.asarray(proba) >= threshold
    pairs = ((1, True), (1, False), (0, False), (0, True))
    hits, misses, rejections, alarms = (int(((y == kind) & (decided == decision)).sum()) for kind, decision in pairs)
    return hits, misses, rejections, alarms


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """PPV and NPV at a prevalence; NaN if no subject would be called positive (PPV) or negative (NPV).

    The predictive values of a case-control cohort, about half of them patients, do not hold in a clinic.
    """
    _check_proportion("prevalence", prevalence)
    hits, misses = sensitivity * prevalence, (1 - sensitivity) * prevalence
    rejections, alarms = specificity * (1 - prevalence), (1 - specificity) * (1 - prevalence)
    return _divided(hits, hits + alarms), _divided(rejections, rejections + misses)


def net_benefit(
    labels: npt.ArrayLike, proba: npt.ArrayLike, thresholds: npt.ArrayLike, prevalence: float | None = None
) -> pd.DataFrame:
    """Decision curve: net benefit of the model, of treating all and of treating none, by threshold.

    Net benefit is true positives minus false positives times the odds of the threshold, per subject. The prevalence is that
    of the labels unless given.
    """
    y, p = _labelled(labels, proba)
    if prevalence is not None:
        _check_proportion("prevalence", prevalence)
    rate = prevalence if prevalence is not None else _divided(float(y.sum()), len(y))
    rows = []
    for threshold in np.atleast_1d(np.asarray(thresholds, dtype=np.float64)).tolist():
        if not 0 <= threshold < 1:
            raise InputError(f"threshold {threshold:g} is not a number from 0 to below 1.")
        odds = threshold / (1 - threshold)
        hits, misses, rejections, alarms = confusion(y, p, threshold)
        sensitivity, false_rate = _divided(hits, hits + misses), _divided(alarms, alarms + rejections)
        gain = sensitivity * rate if rate else 0.0
        cost = false_rate * (1 - rate) if 1 - rate else 0.0
        rows.append((threshold, gain - cost * odds, rate - (1 - rate) * odds, 0.0))
    return pd.DataFrame(rows, columns=["threshold", "model", "treat_all", "treat_none"])


def _labelled(labels: npt.ArrayLike, proba: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    y, p = np.asarray(labels, dtype=np.int64), np.asarray(proba, dtype=np.float64)
    return y[y >= 0], p[y >= 0]


def _check_proportion(what: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{what} {value:g} is not a number from 0 to 1.")


def _divided(part: float, whole: float) -> float:
    return part / whole if whole else np.nan


def _rate(part: int, whole: int) -> str:
    low, high = wilson(part, whole)
    return f"{100 * part / whole:.1f} ({100 * low:.1f}-{100 * high:.1f})" if whole else "-"


def _interval(area: float, low: float, high: float) -> str:
    return f"{100 * area:.1f}" + ("" if np.isnan(low) else f" ({100 * low:.1f}-{100 * high:.1f})")


def _mean(values: Iterable[float]) -> float:
    """Mean of the defined values; NaN if there is none."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


def _percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"
