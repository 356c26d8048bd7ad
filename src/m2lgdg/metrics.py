"""Metrics of one site's predictions, with confidence intervals: pure functions of labels and probabilities.

Reports apply them to the predictions table; training uses some for early stopping and calibration. Undefined values are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.storage import InputError

Labels = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
METRICS = ("ACC", "SEN", "SPE", "F1", "AUC", "Brier", "slope", "intercept")
PAPER_METRICS = ("ACC", "SPE", "SEN", "AUC", "F1")  # in the order of the paper's tables
THRESHOLD = 0.5
SLOPE_SD, OFFSET_SD = 0.5, 1.0  # prior sd of a site's Platt slope around 1 and offset around 0
FLATTEST = 0.05  # smallest slope; a positive one never reverses the model's ranking
LEAST_SLOPE = 1e-3  # of Platt scaling, for a decision with sd 1
PLATT_PENALTY = np.array([0.01, 0.0])  # weak, of the slope for such a decision: there is one also if the classes are separated
FLAT_NOTE = (
    "Platt scaling is flat: decisions on held-out subjects do not tell patients from controls within sites, so that all "
    "probabilities are nearly the prevalence in source. Do not use the decisions of this model."
)
FLAT = 0.02  # sd of logits below which probabilities are nearly constant: within half a percent of each other
ECE_BINS, ECE_LEAST = 5, 50  # with fewer than ten subjects per bin the error is mostly chance


def evaluate(
    labels: npt.ArrayLike, proba: npt.ArrayLike, threshold: float = THRESHOLD, metrics: Sequence[str] = METRICS
) -> dict[str, float]:
    """Scores of one site's predictions; undefined ones are NaN.

    Parameters
    ----------
    labels : array of int
        1 patient, 0 control; subjects with an unknown label (-1) are left out.
    proba : array of float
        Probability of the patient class.
    threshold : float
        Probability from which a subject is classified as patient.
    metrics : sequence of str
        Some of `METRICS`.

    Returns
    -------
    dict of str to float

    Examples
    --------
    >>> import m2lgdg
    >>> m2lgdg.evaluate([0, 0, 1, 1], [0.1, 0.6, 0.4, 0.9], metrics=("ACC", "AUC"))
    {'ACC': 0.5, 'AUC': 0.75}
    """
    y, p = _known(labels, proba)
    positive = p >= threshold
    hits, misses = int((positive & (y == 1)).sum()), int((~positive & (y == 1)).sum())
    alarms, rejections = int((positive & (y == 0)).sum()), int((~positive & (y == 0)).sum())
    slope, intercept = calibration(y, p) if {"slope", "intercept"} & set(metrics) else (np.nan, np.nan)
    values = {
        "ACC": _ratio(hits + rejections, len(y)),
        "SEN": _ratio(hits, hits + misses),
        "SPE": _ratio(rejections, rejections + alarms),
        "F1": _ratio(2 * hits, 2 * hits + alarms + misses),
        "AUC": auc(y, p),
        "Brier": float(((p - y) ** 2).mean()) if len(y) else np.nan,
        "slope": slope,
        "intercept": intercept,
    }
    return {metric: values[metric] for metric in metrics}


def rankdata(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """scipy.stats.rankdata without the second its import takes: ranks from 1, means for ties, all NaN with a NaN."""
    given = np.asarray(values, dtype=np.float64)
    if np.isnan(given).any():  # sorting would rank NaN highest
        return np.full(len(given), np.nan)
    _, position, count = np.unique(given, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[position], dtype=np.float64)


def auc(labels: npt.ArrayLike, score: npt.ArrayLike) -> float:
    """Probability that a patient scores higher than a control, ties counting half."""
    y, s = _known(labels, score)
    patients = int((y == 1).sum())
    controls = len(y) - patients
    if not patients or not controls:
        return np.nan
    ranks = rankdata(s)
    return float((ranks[y == 1].sum() - patients * (patients + 1) / 2) / (patients * controls))


def roc_curve(labels: npt.ArrayLike, score: npt.ArrayLike) -> tuple[Floats, Floats]:
    """False and true positive rates from the highest score down, without points on a straight line; both classes are needed."""
    from sklearn.metrics import roc_curve as with_thresholds

    y, s = _known(labels, score)
    alarms, hits, _ = with_thresholds(y, s)
    return alarms, hits


def logit(proba: Floats) -> Floats:
    """Log odds of probabilities, which are clipped to 1e-6 from 0 and 1."""
    clipped = np.clip(proba, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))


def sigmoid(values: Floats) -> Floats:
    """Probability with the given log odds."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


def calibration(labels: npt.ArrayLike, proba: npt.ArrayLike) -> tuple[float, float]:
    """Calibration slope of the label on the logit (1 is ideal) and intercept at slope 1 (0 is ideal).

    NaN with one class; the slope also of a constant probability, or of classes that the score separates.
    """
    y, p = _known(labels, proba)
    if len(set(y.tolist())) < 2:
        return np.nan, np.nan
    odds = logit(p)
    intercept = _newton(np.ones((len(y), 1)), y, odds)[0]
    patients, controls, unit = odds[y == 1], odds[y == 0], odds.std()
    if unit < 1e-9 or patients.min() >= controls.max() or patients.max() <= controls.min():  # touching at one value counts
        return np.nan, float(intercept)
    slope = _newton(np.stack([np.ones_like(odds), (odds - odds.mean()) / unit], axis=1), y, 0.0)[1] / unit
    return float(slope), float(intercept)


def platt(decision: npt.ArrayLike, labels: npt.ArrayLike, sites: npt.ArrayLike | None = None) -> tuple[float, float]:
    """Platt scaling: slope (positive) and offset of a weakly penalised logistic regression of the label on the decision.

    With the `sites` of held-out decisions, those of one class are left out, and the slope is at least half of that within
    sites: offsets of sites that go against their prevalences would otherwise make all probabilities the same.
    """
    y, d = _known(labels, decision)
    if sites is None:
        return _pooled_platt(d, y)
    site = np.unique(np.asarray(sites)[np.asarray(labels) >= 0], return_inverse=True)[1]
    patients, controls = (np.bincount(site[y == label], minlength=site.max(initial=0) + 1) for label in (1, 0))
    both = np.asarray(np.minimum(patients, controls)[site] > 0)  # (subject,)
    if not both.any():
        return _pooled_platt(d, y)
    y, d, site = y[both], d[both], site[both]
    slope, offset = _pooled_platt(d, y)
    centred = d - (np.bincount(site, d) / np.maximum(np.bincount(site), 1))[site]
    within = _pooled_platt(centred, y)[0]
    if centred.std() < 1e-12 or slope >= within / 2:
        return slope, offset
    middle = within / 2 * float(d.mean())  # Newton's steps start where the probabilities are not all 0 or 1
    return within / 2, float(_newton(np.ones((len(y), 1)), y, within / 2 * d - middle)[0]) - middle


def _pooled_platt(d: Floats, y: Labels) -> tuple[float, float]:
    spread = float(d.std()) if len(d) else 0.0
    if len(set(y.tolist())) < 2 or spread < 1e-12:
        prevalence = float(np.clip(y.mean(), 0.01, 0.99)) if len(y) else 0.5
        return 1.0, float(np.log(prevalence / (1 - prevalence)) - (d.mean() if len(d) else 0.0))
    design = np.stack([(d - d.mean()) / spread, np.ones_like(d)], axis=1)
    return unstandardised(_newton(design, y, 0.0, PLATT_PENALTY), float(d.mean()), spread)


def unstandardised(curve: Floats, mean: float, spread: float) -> tuple[float, float]:
    """Slope and offset of a curve of standardised decisions, as one of the decisions themselves."""
    slope = max(float(curve[0]), LEAST_SLOPE) / spread
    return slope, float(curve[1]) - slope * mean


def is_flat(slope: float, decision: npt.ArrayLike) -> bool:
    """Whether Platt scaling with this slope gives all subjects nearly the same probability."""
    return bool(slope * np.asarray(decision, dtype=np.float64).std() < FLAT)


def shrunken_platt(decision: Floats, y: Floats) -> tuple[float, float]:
    """Platt scaling with normal priors that shrink the slope towards 1 and the offset towards 0."""
    design = np.stack([decision, np.ones_like(decision)], axis=1)
    prior, strength = np.array([1.0, 0.0]), np.diag([SLOPE_SD**-2, OFFSET_SD**-2])
    weights = prior.copy()
    for _ in range(100):
        p = sigmoid(design @ weights)
        gradient = design.T @ (y - p) - strength @ (weights - prior)
        step = np.linalg.solve((design * (p * (1 - p))[:, None]).T @ design + strength, gradient)
        weights += np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 1e-10:
            break
    return max(float(weights[0]), FLATTEST), float(weights[1])


def _newton(design: Floats, y: Labels, offset: Floats | float, penalty: Floats | float = 0.0) -> Floats:
    """Logistic regression of y on the columns of the design, with an l2 penalty of each."""
    weights = np.zeros(design.shape[1])
    for _ in range(500):
        p = 1 / (1 + np.exp(-np.clip(design @ weights + offset, -30, 30)))
        step = newton_step(weights, design.T @ (y - p), (design * (p * (1 - p))[:, None]).T @ design, penalty)
        weights += step
        if np.abs(step).max() < 1e-10:
            break
    return weights


def newton_step(weights: Floats, slope: Floats, curvature: Floats, penalty: Floats | float = 0.0) -> Floats:
    """Step towards the largest likelihood, of which slope and curvature are given.

    A step of more than 2 is shortened, so that it does not overshoot; its direction is kept, or steps could go back and forth.
    """
    inverse = curvature + np.diag(np.broadcast_to(penalty, len(weights)) + 1e-10)
    step = np.linalg.solve(inverse, slope - penalty * weights)
    return np.asarray(step * min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-300)))


def wilson(part: int, whole: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion; NaN if `whole` is 0."""
    if not whole:
        return np.nan, np.nan
    z2 = _normal_quantile(0.5 + level / 2) ** 2
    centre = part + z2 / 2
    half = np.sqrt(z2 * (part * (whole - part) / whole + z2 / 4))
    low = 0.0 if part == 0 else (centre - half) / (whole + z2)
    high = 1.0 if part == whole else (centre + half) / (whole + z2)
    return float(low), float(high)


def calibration_bins(labels: npt.ArrayLike, proba: npt.ArrayLike, bins: int = 10) -> pd.DataFrame:
    """Calibration curve in bins of equal count: mean proba, observed proportion of patients with its Wilson interval, n.

    Equal probabilities share a bin; empty bins are left out.
    """
    y, p = _known(labels, proba)
    if bins < 1:
        raise InputError(f"a calibration curve cannot have {bins} bins; at least one is needed.")
    rank = rankdata(p)  # ties share the mean rank, a multiple of a half
    bin_of = ((2 * rank - 1) * bins // (2 * max(len(p), 1))).astype(int)  # (subject,)
    rows = []
    for bin_ in sorted(set(bin_of.tolist())):
        here = bin_of == bin_
        patients, n = int(y[here].sum()), int(here.sum())
        rows.append((float(p[here].mean()), patients / n, *wilson(patients, n), n))
    return pd.DataFrame(rows, columns=["proba", "observed", "low", "high", "n"])


def calibration_error(labels: npt.ArrayLike, proba: npt.ArrayLike) -> float:
    """Expected calibration error: mean |proba - observed proportion| over bins; NaN with too few subjects."""
    table = calibration_bins(labels, proba, ECE_BINS)
    if table["n"].sum() < ECE_LEAST:
        return np.nan
    return float(np.average((table["proba"] - table["observed"]).abs(), weights=table["n"]))


def delong(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Floats, Floats]:
    """AUCs (score,) of several scores of the same subjects and their covariance (score, score), by DeLong's method."""
    y, s = np.asarray(labels), np.atleast_2d(np.asarray(scores, dtype=np.float64))
    s, y = s[:, y >= 0], y[y >= 0]
    patients, controls = s[:, y == 1], s[:, y == 0]
    m, n = patients.shape[1], controls.shape[1]
    if not m or not n:
        return np.full(len(s), np.nan), np.full((len(s), len(s)), np.nan)
    ranks = np.stack([rankdata(np.r_[a, b]) for a, b in zip(patients, controls, strict=True)])
    # For each patient the fraction of controls below, for each control the fraction of patients above.
    over = (ranks[:, :m] - np.stack([rankdata(one) for one in patients])) / n  # (score, patient)
    under = 1 - (ranks[:, m:] - np.stack([rankdata(one) for one in controls])) / m  # (score, control)
    covariance = _covariance(over) / m + _covariance(under) / n
    return over.mean(axis=1), covariance


def delong_interval(labels: npt.ArrayLike, score: npt.ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """DeLong interval of one AUC, computed on the logit scale so that it stays within 0 and 1."""
    areas, covariance = delong(labels, score)
    area, spread = float(areas[0]), float(np.sqrt(covariance[0, 0]))
    if np.isnan(area) or area in (0.0, 1.0):
        return np.nan, np.nan
    half = _normal_quantile(0.5 + level / 2) * spread / (area * (1 - area))
    centre = np.log(area / (1 - area))
    return float(1 / (1 + np.exp(half - centre))), float(1 / (1 + np.exp(-half - centre)))


def delong_test(labels: npt.ArrayLike, first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float]:
    """Difference of two AUCs on the same subjects, and its two-sided p value."""
    from scipy.special import ndtr

    areas, c = delong(labels, np.stack([np.asarray(first), np.asarray(second)]))
    difference, variance = float(areas[0] - areas[1]), float(c[0, 0] + c[1, 1] - 2 * c[0, 1])
    if not variance > 0:
        return difference, 1.0 if difference == 0 else np.nan
    return difference, float(2 * ndtr(-abs(difference) / np.sqrt(variance)))


@functools.cache
def _normal_quantile(probability: float) -> float:
    from scipy.special import ndtri  # a prediction does not need it, and its import takes a fifth of a second

    return float(ndtri(probability))


def _known(labels: npt.ArrayLike, values: npt.ArrayLike) -> tuple[Labels, Floats]:
    y, v = np.asarray(labels), np.asarray(values, dtype=np.float64)
    return y[y >= 0], v[y >= 0]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else np.nan


def _covariance(rows: Floats) -> Floats:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return np.asarray(centred @ centred.T / (rows.shape[1] - 1 or np.nan))  # one subject has no variance
