"""Whether the global signal was regressed out of some scans only, judged by their mean FC.

Used by `check`. A model cannot be compared between scans with and without it, and where patients and controls differ in it, the
pipeline tells the label.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.findings import Finding
from m2lgdg.scans import PARTIAL, Connectomes, each_scan, empty_rois, own_correlation, standardised

Floats = npt.NDArray[np.float64]
# Median of the mean FC of a site. After regression of the global signal it is at most 0.03 (20 sites of ABIDE in two atlases,
# two sites of REST-meta-MDD); with the global signal it is at least 0.22 (12 sites of REST-meta-MDD).
REMOVED, KEPT = 0.05, 0.15
FEWEST = 5  # subjects of whom a median is taken
FEWEST_ROIS = 50  # of an atlas of the whole brain, in which regression brings the mean to zero
CLASSES = {1: "patients", 0: "controls"}


def global_signal_findings(cohort: Cohort) -> Iterator[Finding]:
    """A finding if mean FC is near zero at some sites, or for one class at a site, and far from it elsewhere."""
    if len(cohort.rois) < FEWEST_ROIS or cohort.values == PARTIAL:
        return
    level = mean_fc(cohort)
    groups: dict[str, float] = {}
    for site in cohort.site_names:
        here = cohort.sites == site
        by_class = {f"{site} ({CLASSES[one]})": level[here & (cohort.labels == one)] for one in CLASSES}
        medians = {name: float(np.median(some)) for name, some in by_class.items() if len(some) >= FEWEST}
        differ = any(one < REMOVED for one in medians.values()) and any(one > KEPT for one in medians.values())
        groups |= medians if differ else {site: float(np.median(level[here]))} if here.sum() >= FEWEST else {}
    removed = [name for name, one in groups.items() if one < REMOVED]
    kept = [name for name, one in groups.items() if one > KEPT]
    if removed and kept:
        low, high = (float(np.median([groups[name] for name in names])) for names in (removed, kept))
        yield Finding("global signal", numbers={"low": max(low, 0.0), "high": high, "removed": removed, "kept": kept})


def mean_fc(cohort: Cohort) -> Floats:
    """(subject,) mean correlation of two ROIs that have a signal; 0 if there is no such pair."""
    if isinstance(scans := cohort.scans, Connectomes):
        return np.array([_of_connectome(one, scans.kind, scans.n_rois) for _, one in each_scan(scans)])
    return np.array([_of_series(one) for one in scans])


def _of_series(series: npt.NDArray[np.float32]) -> float:
    unit = standardised(series)  # (time, roi)
    n = int(unit.any(axis=0).sum())
    return _mean(float((unit.sum(axis=1) ** 2).mean()), n)  # the variance of the sum is the sum of all correlations


def _of_connectome(one: npt.NDArray[np.float32], kind: str, n: int) -> float:
    signal = ~empty_rois(one, n)
    return _mean(float(own_correlation(one, kind, n)[signal][:, signal].sum()), int(signal.sum()))


def _mean(total: float, n: int) -> float:
    """Mean of the n (n - 1) correlations off the diagonal, from the sum of all n x n."""
    return (total - n) / (n * (n - 1)) if n > 1 else 0.0
