"""Metrics of one site's predictions, with intervals: pure functions of labels and probabilities.

Fed from the predictions table, never from inside training. What is not defined (the AUC of one class, say) is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtr, ndtri

from m2lgdg.storage import InputError

Labels = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
METRICS = ("ACC", "SEN", "SPE", "F1", "AUC", "Brier", "slope", "intercept")
PAPER_METRICS = ("ACC", "SPE", "SEN", "AUC", "F1")  # in the order of the paper's tables
THRESHOLD = 0.5
SLOPE_SD, OFFSET_SD = 0.5, 1.0  # of the logit: how far a site is from slope 1 and offset 0 before its own subjects speak
FLATTEST = 0.05  # slope; the ranking of the model is never turned round
ECE_BINS, ECE_LEAST = 5, 50  # below ten subjects a bin the error is mostly chance


def evaluate(labels: npt.ArrayLike, proba: npt.ArrayLike, threshold: float = THRESHOLD) -> dict[str, float]:
    """All METRICS of labels (1 patient, 0 control) and probabilities of the patient; unknown labels are left out."""
    y, p = _known(labels, proba)
    decided = p >= threshold
    hits, misses = int((decided & (y == 1)).sum()), int((~decided & (y == 1)).sum())
    alarms, rejections = int((decided & (y == 0)).sum()), int((~decided & (y == 0)).sum())
    slope, intercept = calibration(y, p)
    return {
        "ACC": _ratio(hits + rejections, len(y)),
        "SEN": _ratio(hits, hits + misses),
        "SPE": _ratio(rejections, rejections + alarms),
        "F1": _ratio(2 * hits, 2 * hits + alarms + misses),
        "AUC": auc(y, p),
        "Brier": float(((p - y) ** 2).mean()) if len(y) else np.nan,
        "slope": slope,
        "intercept": intercept,
    }


def rankdata(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Ranks from 1, ties with their mean, none where a value is none: as scipy.stats has it, which takes a second to import."""
    given = np.asarray(values, dtype=np.float64)
    if np.isnan(given).any():  # sorting would call it the highest
        return np.full(len(given), np.nan)
    _, place, count = np.unique(given, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[place], dtype=np.float64)


def auc(labels: npt.ArrayLike, score: npt.ArrayLike) -> float:
    """Probability that a patient scores higher than a control, ties counting half."""
    y, s = _known(labels, score)
    patients = int((y == 1).sum())
    controls = len(y) - patients
    if not patients or not controls:
        return np.nan
    ranks = rankdata(s)
    return float((ranks[y == 1].sum() - patients * (patients + 1) / 2) / (patients * controls))


def logit(proba: Floats) -> Floats:
    """The logarithm of the odds, of probabilities kept 1e-6 from 0 and 1."""
    kept = np.clip(proba, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(kept / (1 - kept)))


def sigmoid(values: Floats) -> Floats:
    """The probability whose logit this is."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


def calibration(labels: npt.ArrayLike, proba: npt.ArrayLike) -> tuple[float, float]:
    """Slope of the label on the logit of the probability (1 is ideal), and the intercept at slope 1 (0 is ideal).

    NaN where not defined: one class, a constant probability, or classes that the score separates (an infinite slope).
    """
    y, p = _known(labels, proba)
    if len(set(y.tolist())) < 2:
        return np.nan, np.nan
    logit = np.log(np.clip(p, 1e-6, 1 - 1e-6) / (1 - np.clip(p, 1e-6, 1 - 1e-6)))
    intercept = _newton(np.ones((len(y), 1)), y, logit)[0]
    patients, controls, unit = logit[y == 1], logit[y == 0], logit.std()
    if unit < 1e-9 or patients.min() >= controls.max() or patients.max() <= controls.min():  # touching at one value counts
        return np.nan, float(intercept)
    slope = _newton(np.stack([np.ones_like(logit), (logit - logit.mean()) / unit], axis=1), y, 0.0)[1] / unit
    return float(slope), float(intercept)


def platt(decision: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[float, float]:
    """Slope and offset that turn decisions into probabilities: a logistic regression of the label on the decision.

    The slope never turns the ranking round, and a little shrinkage keeps it finite where the decision separates the classes.
    """
    from sklearn.linear_model import LogisticRegression

    y, d = _known(labels, decision)
    spread = float(d.std()) if len(d) else 0.0
    if len(set(y.tolist())) < 2 or spread < 1e-12:
        share = float(np.clip(y.mean(), 0.01, 0.99)) if len(y) else 0.5
        return 1.0, float(np.log(share / (1 - share)) - (d.mean() if len(d) else 0.0))
    fitted = LogisticRegression(C=100.0, max_iter=2000).fit(((d - d.mean()) / spread)[:, None], y)
    slope = max(float(fitted.coef_[0, 0]), 1e-3) / spread
    return slope, float(fitted.intercept_[0]) - slope * float(d.mean())


def shrunken_platt(decision: Floats, y: Floats) -> tuple[float, float]:
    """Slope and offset of a logistic regression drawn towards those from before, 1 and 0, by normal priors."""
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


def _newton(design: Floats, y: Labels, offset: Floats | float) -> Floats:
    """Maximum-likelihood logistic regression of y on the columns of design."""
    weights = np.zeros(design.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(design @ weights + offset, -30, 30)))
        gradient = design.T @ (y - p)
        hessian = (design * (p * (1 - p))[:, None]).T @ design + 1e-10 * np.eye(len(weights))
        step = np.linalg.solve(hessian, gradient)
        weights += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-10:
            break
    return weights


def wilson(part: int, whole: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share; NaN of nobody."""
    if not whole:
        return np.nan, np.nan
    z2 = float(ndtri(0.5 + level / 2)) ** 2
    centre = part + z2 / 2
    half = np.sqrt(z2 * (part * (whole - part) / whole + z2 / 4))
    low = 0.0 if part == 0 else (centre - half) / (whole + z2)
    high = 1.0 if part == whole else (centre + half) / (whole + z2)
    return float(low), float(high)


def calibration_bins(labels: npt.ArrayLike, proba: npt.ArrayLike, bins: int = 10) -> pd.DataFrame:
    """Bins of equal count along proba: mean proba, observed share of patients with its Wilson interval, n.

    Equal probabilities stay in one bin, so that the order of the subjects changes nothing; a bin that this empties is left out.
    """
    y, p = _known(labels, proba)
    if bins < 1:
        raise InputError(f"{bins} bins: at least one is needed.")
    rank = rankdata(p)  # ties share the mean rank, a multiple of a half
    place = ((2 * rank - 1) * bins // (2 * max(len(p), 1))).astype(int)
    rows = []
    for bin_ in sorted(set(place.tolist())):
        here = place == bin_
        patients, n = int(y[here].sum()), int(here.sum())
        rows.append((float(p[here].mean()), patients / n, *wilson(patients, n), n))
    return pd.DataFrame(rows, columns=["proba", "observed", "low", "high", "n"])


def calibration_error(labels: npt.ArrayLike, proba: npt.ArrayLike) -> float:
    """Expected calibration error: the mean distance of a bin's proba from its observed share; NaN of few subjects."""
    table = calibration_bins(labels, proba, ECE_BINS)
    if table["n"].sum() < ECE_LEAST:
        return np.nan
    return float(np.average((table["proba"] - table["observed"]).abs(), weights=table["n"]))


def delong(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[Floats, Floats]:
    """AUCs (score,) and their covariance (score, score) of several scores of the same subjects, by DeLong's method."""
    y, s = np.asarray(labels), np.atleast_2d(np.asarray(scores, dtype=np.float64))
    s, y = s[:, y >= 0], y[y >= 0]
    patients, controls = s[:, y == 1], s[:, y == 0]
    m, n = patients.shape[1], controls.shape[1]
    if not m or not n:
        return np.full(len(s), np.nan), np.full((len(s), len(s)), np.nan)
    together = np.stack([rankdata(np.r_[a, b]) for a, b in zip(patients, controls, strict=True)])
    # For each patient the share of controls below, for each control the share of patients above.
    over = (together[:, :m] - np.stack([rankdata(one) for one in patients])) / n  # (score, patient)
    under = 1 - (together[:, m:] - np.stack([rankdata(one) for one in controls])) / m  # (score, control)
    covariance = _covariance(over) / m + _covariance(under) / n
    return over.mean(axis=1), covariance


def delong_interval(labels: npt.ArrayLike, score: npt.ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Interval of one AUC on the logit scale, where it stays inside 0 and 1."""
    areas, covariance = delong(labels, score)
    area, spread = float(areas[0]), float(np.sqrt(covariance[0, 0]))
    if np.isnan(area) or area in (0.0, 1.0):
        return np.nan, np.nan
    half = float(ndtri(0.5 + level / 2)) * spread / (area * (1 - area))
    centre = np.log(area / (1 - area))
    return float(1 / (1 + np.exp(half - centre))), float(1 / (1 + np.exp(-half - centre)))


def delong_test(labels: npt.ArrayLike, first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float]:
    """Difference of two AUCs on the same subjects and its two-sided p."""
    areas, c = delong(labels, np.stack([np.asarray(first), np.asarray(second)]))
    variance = float(c[0, 0] + c[1, 1] - 2 * c[0, 1])
    difference = float(areas[0] - areas[1])
    if not variance > 0:
        return difference, 1.0 if difference == 0 else np.nan
    return difference, float(2 * ndtr(-abs(difference) / np.sqrt(variance)))


def bootstrap_interval(
    labels: npt.ArrayLike, proba: npt.ArrayLike, metric: str, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval over subjects drawn again, patients and controls apart so that every draw has both."""
    y, p = _known(labels, proba)
    draw = np.random.default_rng(seed)
    groups = [np.flatnonzero(y == label) for label in (0, 1)]
    if not len(y):
        return np.nan, np.nan
    values = []
    for _ in range(draws):
        picked = np.concatenate([draw.choice(group, len(group)) for group in groups if len(group)])
        values.append(auc(y[picked], p[picked]) if metric == "AUC" else evaluate(y[picked], p[picked])[metric])
    values = [value for value in values if not np.isnan(value)]
    if not values:
        return np.nan, np.nan
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def _known(labels: npt.ArrayLike, values: npt.ArrayLike) -> tuple[Labels, Floats]:
    y, v = np.asarray(labels), np.asarray(values, dtype=np.float64)
    return y[y >= 0], v[y >= 0]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else np.nan


def _covariance(rows: Floats) -> Floats:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return np.asarray(centred @ centred.T / (rows.shape[1] - 1 or np.nan))  # one subject has no spread
