"""Learning within source sites: balance of classes, means of sites, folds of whole sites, and what holds at sites left out.

`linear.py` and the networks on connectomes use it, so that a difference between sites is not taken for one between classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import auc
from m2lgdg.splits import Indices, site_folds

Floats = npt.NDArray[np.float64]
CHANCE = 0.05  # in either direction, that a feature which says nothing of the label is used


class Labelled(Protocol):
    """What is asked of a cohort to balance classes and centre sites."""

    @property
    def sites(self) -> npt.NDArray[np.str_]: ...  # (subject,)
    @property
    def labels(self) -> npt.NDArray[np.integer[Any]]: ...  # (subject,)
    @property
    def site_names(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...


def balance(source: Labelled) -> Floats:
    """(subject,) weights that balance patients and controls within each site; 0 at sites with one class."""
    weights = np.zeros(len(source))
    for site in source.site_names:
        at_site = source.sites == site
        counts = [int((at_site & (source.labels == label)).sum()) for label in (0, 1)]
        if min(counts) > 0:
            weights[at_site] = at_site.sum() / (2 * np.array(counts)[source.labels[at_site]])
    return weights if weights.any() else np.ones(len(source))


def site_averages(site: npt.NDArray[np.intp], weights: Floats) -> Floats:
    """(site, subject) weights whose products with features are the class-balanced means of the sites."""
    member = (site == np.arange(site.max() + 1)[:, None]).astype(np.float64)
    weighted = member * weights
    counted = np.where(weighted.any(axis=1, keepdims=True), weighted, member)
    return counted / counted.sum(axis=1, keepdims=True)


def source_folds(source: Cohort, count: int, weights: Floats) -> list[tuple[Indices, Indices]]:
    """`site_folds` of source that are the same whatever the order of its subjects."""
    order = np.argsort(source.subjects, kind="stable")
    folds = site_folds(source.sites[order], source.labels[order], count, weights[order])
    return [(np.sort(order[train]), np.sort(order[test])) for train, test in folds]


def mean_site_auc(decision: Floats, source: Cohort) -> float:
    """Mean AUC within sites, weighted by their size, so that offsets between sites do not count."""
    values, sizes = [], []
    for site in source.site_names:
        at_site = source.sites == site
        value = auc(source.labels[at_site], decision[at_site])
        if not np.isnan(value):
            values.append(value)
            sizes.append(at_site.sum())
    return float(np.average(values, weights=sizes)) if values else auc(source.labels, decision)


def held_parts(
    features: npt.NDArray[np.floating[Any]], source: Cohort, weights: Floats, folds: list[tuple[Indices, Indices]]
) -> Floats:
    """(feature,) part of its weight that each feature is given: 0 if what it says of the label does not hold at other sites.

    Features are centred by site. At each source site, the difference between patients and controls is multiplied by the slope
    of the label on the feature in folds without the site, so that it is positive where the direction holds.
    """
    signed = weights * np.where(source.labels == 1, 1.0, -1.0)
    held = np.asarray(features * (signed @ features / weights.sum()), dtype=np.float64)  # of sites in no fold
    for train, test in folds:
        held[test] = features[test] * (signed[train] @ features[train] / weights[train].sum())
    differences, sizes = [], []
    for site in source.site_names:
        patients, controls = (held[(source.sites == site) & (source.labels == label)] for label in (1, 0))
        if len(patients) and len(controls):
            differences.append(patients.mean(axis=0) - controls.mean(axis=0))
            sizes.append(len(patients) * len(controls) / (len(patients) + len(controls)))
    if not sizes:
        return np.zeros(features.shape[1])
    weight, by_site = np.array(sizes) / np.sum(sizes), np.array(differences)  # (site,), (site, feature)
    mean = weight @ by_site
    return parts_of_weight(mean, weight**2 @ (by_site - mean) ** 2, len(weight))


def parts_of_weight(mean: Floats, squares: Floats, sites: int) -> Floats:
    """1 - (critical t / t)² of a one-sided t test over sites, or 0 if it is not significant.

    Of each feature, `mean` is the weighted mean of the differences at the sites, and `squares` the sum of their squared
    deviations from it, each times the square of its weight.
    """
    from scipy.special import stdtrit  # of Student's t; importing scipy.stats takes a second

    if sites < 2:
        return np.zeros(len(mean))
    least = float(-stdtrit(sites - 1, CHANCE)) * np.sqrt(np.maximum(squares, 0.0) * sites / (sites - 1))
    return np.where(mean > least, 1.0 - (least / np.where(mean > least, mean, 1.0)) ** 2, 0.0)
