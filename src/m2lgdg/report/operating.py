"""The operating point of a method: confusion counts, calibration, predictive values, net benefit, and AUC without head motion.

Pure functions of probabilities averaged over seeds (`stats.over_seeds`), because a user of a model has one for each subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import (
    ECE_BINS,
    ECE_LEAST,
    THRESHOLD,
    auc,
    calibration,
    calibration_error,
    delong_interval,
    delong_test,
    logit,
    wilson,
)
from m2lgdg.report.paper_tables import Key, label
from m2lgdg.report.tables import NAN, Column, Estimate, Interval, Table, Value, columns
from m2lgdg.study.description import motion_column
from m2lgdg.study.stats import half_interval

PREVALENCES = (0.01, 0.05, 0.1, 0.2, 0.5)  # from screening to a case-control study
ROUNDING = 1e-9


def of_key(mean: pd.DataFrame, key: Key) -> pd.DataFrame:
    """Rows of one method and variant."""
    return mean[(mean["method"] == key[0]) & (mean["variant"] == key[1])]


def operating_table(mean: pd.DataFrame) -> Table:
    """Confusion counts, sensitivity, specificity and calibration of each method at each target site."""
    rows: list[list[Value]] = []
    for (method, variant, target), own in mean.groupby(["method", "variant", "target"], sort=False):
        y, p = own["label"].to_numpy(), own["proba"].to_numpy()
        hits, misses, rejections, alarms = counts = confusion(y, p)
        slope, intercept = calibration(y, p)
        rates = [_rate(hits, hits + misses), _rate(rejections, rejections + alarms)]
        numbers = [intercept, slope, float(((p - y) ** 2).mean()), calibration_error(y, p)]
        rows.append([label(method, variant), str(target), len(y), hits + misses, *counts, *rates, *numbers])
    header = [Column("Method"), Column("Target"), *columns("count", "n", "patients", "TP", "FN", "TN", "FP")]
    header += columns("percent", "SEN", "SPE", form=".1f")
    note = (
        f"probabilities averaged over seeds; threshold {THRESHOLD:g}; SEN and SPE in % with 95 % Wilson intervals; calibration "
        f"intercept (at slope 1; ideal 0) and slope (ideal 1); ECE over {ECE_BINS} bins of equal count if n is at least "
        f"{ECE_LEAST}"
    )
    header += columns("number", "intercept", "slope", "Brier", "ECE", form=".3f")
    return Table("Operating point and calibration", header, rows, note)


def comparison_table(mean: pd.DataFrame, first: Key, second: Key) -> Table | None:
    """AUC of two methods at each target site, with DeLong's test; None without a site that both predicted."""
    rows: list[list[Value]] = []
    sides = [of_key(mean, key) for key in (first, second)]
    both = sides[0].merge(sides[1], on=["target", "subject", "label"], suffixes=("_first", "_second"))
    for site, pairs in both.groupby("target", sort=False):
        if pairs["label"].nunique() < 2:
            continue
        y, scores = pairs["label"].to_numpy(), [pairs[f"proba_{side}"].to_numpy() for side in ("first", "second")]
        areas = [Estimate(auc(y, score), *delong_interval(y, score)) for score in scores]
        rows.append([str(site), len(y), int(y.sum()), *areas, *delong_test(y, *scores)])
    if not rows:
        return None
    names = [label(*first), label(*second)]
    header = [
        Column("Target"),
        *columns("count", "n", "patients"),
        *columns("percent", *(f"AUC, {name}" for name in names), form=".1f"),
    ]
    header += [Column(f"{names[0]} minus {names[1]}", "percent", "+.1f"), Column("p", "number", ".3f")]
    note = (
        "AUC in % with 95 % DeLong intervals, probabilities averaged over seeds; p of DeLong's test at each site, not "
        "corrected for the number of sites"
    )
    return Table(f"{names[0]} versus {names[1]} by site", header, rows, note)


def predictive_table(mean: pd.DataFrame, keys: Sequence[Key]) -> Table:
    """PPV and NPV at several prevalences, from the mean sensitivity and specificity over target sites."""
    rows: list[list[Value]] = []
    for key in keys:
        counts = [confusion(own["label"], own["proba"]) for _, own in of_key(mean, key).groupby("target", sort=False)]
        rates = [
            [_divided(hits, hits + misses) for hits, misses, _, _ in counts],
            [_divided(rejections, rejections + alarms) for _, _, rejections, alarms in counts],
        ]
        sensitivity, specificity = (float(pd.Series(rate, dtype=float).mean()) for rate in rates)
        for prevalence in PREVALENCES:
            values = predictive_values(sensitivity, specificity, prevalence)
            rows.append([label(*key), prevalence, sensitivity, specificity, *values])
    header = [Column("Method"), Column("prevalence", "percent", "g")]
    note = (
        f"in %; SEN and SPE at the threshold {THRESHOLD:g}, unweighted means over target sites; PPV and NPV from these and the "
        "prevalence by Bayes' rule"
    )
    header += columns("percent", "SEN", "SPE", "PPV", "NPV", form=".1f")
    return Table("Predictive values by prevalence", header, rows, note)


def confusion(labels: npt.ArrayLike, proba: npt.ArrayLike, threshold: float = THRESHOLD) -> tuple[int, int, int, int]:
    """TP, FN, TN, FP of labels 1 and 0."""
    y, decided = np.asarray(labels), np.asarray(proba) >= threshold
    pairs = ((1, True), (1, False), (0, False), (0, True))
    hits, misses, rejections, alarms = (int(((y == kind) & (decided == decision)).sum()) for kind, decision in pairs)
    return hits, misses, rejections, alarms


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """PPV and NPV at a prevalence: those of a case-control cohort, half of them patients, do not hold in a clinic."""
    hits, misses = sensitivity * prevalence, (1 - sensitivity) * prevalence
    rejections, alarms = specificity * (1 - prevalence), (1 - specificity) * (1 - prevalence)
    return _divided(hits, hits + alarms), _divided(rejections, rejections + misses)


def net_benefit(labels: npt.ArrayLike, proba: npt.ArrayLike, thresholds: Sequence[float]) -> pd.DataFrame:
    """Net benefit of the model, of treating all and of treating none, by threshold from 0 to below 1.

    It is true positives minus false positives times the odds of the threshold, per subject.
    """
    rows = []
    for threshold in thresholds:
        hits, misses, rejections, alarms = confusion(labels, proba, threshold)
        n, odds = hits + misses + rejections + alarms, threshold / (1 - threshold)
        treated = (hits + misses - (rejections + alarms) * odds) / n
        rows.append((threshold, (hits - alarms * odds) / n, treated, 0.0))
    return pd.DataFrame(rows, columns=["threshold", "model", "treat_all", "treat_none"])


def _divided(count: float, whole: float) -> float:
    return count / whole if whole else NAN


def _rate(count: int, whole: int) -> Estimate:
    return Estimate(_divided(count, whole), *(wilson(count, whole) if whole else (NAN, NAN)))


class Adjusted(NamedTuple):
    """Means over target sites of the AUC, of the adjusted AUC with its 95 % interval, and of the AUC of motion alone."""

    plain: float
    adjusted: float
    low: float
    high: float
    motion: float
    correlation: float  # of decision and motion among controls, within sites
    sites: int
    subjects: int


def motion_of(cohort: Cohort | None) -> pd.Series | None:
    """Mean head motion by subject; None if it is not known."""
    values = None if cohort is None else motion_column(cohort)
    return None if values is None or cohort is None else pd.Series(values, index=cohort.subjects)


def adjusted_auc(own: pd.DataFrame, motion: pd.Series) -> Adjusted | None:
    """How well a method separates patients from controls who moved as much; None without a site with both classes.

    The covariate-adjusted AUC of Janes and Pepe (2009): the decision (logit) is linear in motion among controls, with one slope
    for all sites and an intercept for each. Patients do not enter the slope, because their decisions also differ by diagnosis.
    Subjects without a motion value are left out.
    """
    own = own.assign(motion=motion.reindex(own["subject"]).to_numpy(), decision=logit(own["proba"].to_numpy()))
    own = own[own["motion"].notna()]
    controls = own[own["label"] == 0]
    centred = controls[["motion", "decision"]] - controls.groupby("target")[["motion", "decision"]].transform("mean")
    x, y = centred["motion"].to_numpy(), centred["decision"].to_numpy()
    y = np.where(np.abs(y) < ROUNDING, 0.0, y)  # a constant decision, such as that of `prior`, must stay constant
    slope = float(x @ y / (x @ x)) if (x @ x) > 0 else 0.0
    spread = float(np.sqrt((x @ x) * (y @ y)))
    rows, last = [], None
    for _, site in own.groupby("target", sort=False):
        labels, decision, moved = (site[name].to_numpy() for name in ("label", "decision", "motion"))
        if len(set(labels.tolist())) == 2:
            last = labels, decision - slope * moved
            rows.append((auc(labels, decision), auc(*last), auc(labels, moved)))
    if last is None:
        return None
    areas = np.array(rows)  # (site, plain / adjusted / motion)
    plain, adjusted, alone = areas.mean(axis=0).tolist()
    low, high = delong_interval(*last)
    if len(areas) > 1:
        half = half_interval(float(areas[:, 1].std(ddof=1)), len(areas))
        low, high = max(adjusted - half, 0.0), min(adjusted + half, 1.0)
    correlation = float(x @ y) / spread if spread > 0 else 0.0
    return Adjusted(plain, adjusted, low, high, alone, correlation, len(areas), len(own))


def motion_sentence(mean: pd.DataFrame, key: Key, motion: pd.Series | None) -> str:
    """The motion-adjusted AUC of a method; empty if motion is not known."""
    scores = None if motion is None else adjusted_auc(of_key(mean, key), motion)
    if scores is None:
        return ""
    interval = "" if np.isnan(scores.low) else f" (95 % interval {100 * scores.low:.1f} to {100 * scores.high:.1f})"
    return (
        f"Adjusted for head motion, the AUC of {label(*key)} is {100 * scores.adjusted:.1f} %{interval}, instead of "
        f"{100 * scores.plain:.1f} % for the same {scores.subjects} subjects; motion alone has {100 * scores.motion:.1f} %."
    )


def motion_table(mean: pd.DataFrame, keys: Sequence[Key], motion: pd.Series | None) -> Table | None:
    """AUC with and without the adjustment of each method, highest first; None if motion is not known."""
    found = {} if motion is None else {key: adjusted_auc(of_key(mean, key), motion) for key in keys}
    scored = {key: scores for key, scores in found.items() if scores is not None}
    if not scored:
        return None
    rows: list[list[Value]] = [
        [label(*key), of.plain, of.adjusted, Interval(of.low, of.high), of.adjusted - of.plain, of.correlation]
        for key, of in scored.items()
    ]
    first = next(iter(scored.values()))
    header = [Column("Method"), *columns("percent", "AUC", "motion-adjusted AUC", "95 % interval", form=".1f")]
    header += [Column("difference", "percent", "+z.1f"), Column("correlation with motion", "number", "+z.2f")]
    known = f"{first.subjects:,} subjects with a motion value at {first.sites} target site{'s' * (first.sites > 1)}"
    note = (
        f"in %, means over target sites, probabilities averaged over seeds; {known}; motion alone: AUC "
        f"{100 * first.motion:.1f}; adjusted: after the part of the decision (logit) that is linear in mean framewise "
        "displacement among controls, within sites, is removed (covariate-adjusted AUC, Janes and Pepe 2009, Biometrika 96: "
        f"371-382); interval: {'t over sites' if first.sites > 1 else 'DeLong'}; correlation: of decision and motion among "
        "controls, within sites"
    )
    return Table("AUC adjusted for head motion", header, rows, note).highest_first("motion-adjusted AUC")
