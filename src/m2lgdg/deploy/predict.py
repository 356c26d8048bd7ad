"""Predictions of a model for all subjects of a cohort: a table, and what is to be said about it.

`m2lgdg predict` writes the table and prints the lines; labels are not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.check import duplicate_flags, with_checks
from m2lgdg.method import is_network
from m2lgdg.methods.linear import Linear
from m2lgdg.model.model import Model
from m2lgdg.model.new_site import NewSiteCalibration, percent
from m2lgdg.storage import InputError

MOST_SITES = 5  # up to this many sites are compared with source one by one


class Predictions(NamedTuple):
    """Table of subjects, lines on the model and on how the cohort differs from source, and subjects with each kind of flag."""

    table: pd.DataFrame
    lines: list[str]
    flagged: Counter[str]
    explainable: bool  # whether `m2lgdg explain` scores the ROIs: of networks, and of linear methods with patterns


def predict(fitted: Model, cohort: Cohort, coverage: float | None = None, *, abstain: bool = False) -> Predictions:
    """Probability, decision, out-of-distribution scores and quality flags of every subject.

    `coverage` adds an interval and conformal sets; with `abstain`, only a set of one class decides.
    """
    new_site = None if coverage is None else calibration_for(fitted, coverage)
    proba = fitted.predict_proba(cohort)[:, 1]
    cohort = with_checks(cohort)
    table = pd.DataFrame({"subject": cohort.subjects, "site": cohort.sites, "proba": proba})
    table["decision"] = (proba >= fitted.threshold).astype(int)
    flags = [raised + copies for raised, copies in zip(fitted.flags(cohort), duplicate_flags(cohort), strict=True)]
    lines = list(_level_lines(fitted, cohort))
    if new_site and coverage:
        table["low"], table["high"] = new_site.interval(proba)
        table["set"] = fitted.conformal_sets(proba, coverage)
        if abstain:
            table["decision"] = table["set"].map({"control": "0", "patient": "1"}).fillna("")
            for raised, classes in zip(flags, table["set"], strict=True):
                raised += [f"abstained: {classes}"] if classes in ("both", "none") else []
        lines += _set_lines(new_site, coverage, table["decision"] if abstain else None)
    for kind, score in fitted.ood_scores(cohort).items():
        table[f"{kind}_ood"] = score.round(3)
    table["flags"] = ["; ".join(raised) for raised in flags]
    flagged = Counter(flag.split(":")[0] for raised in flags for flag in raised)
    explainable = is_network(fitted) or (isinstance(fitted.method, Linear) and len(cohort) >= 3)
    return Predictions(table, [*lines, *_compared(fitted, cohort)], flagged, explainable)


def calibration_for(fitted: Model, coverage: float) -> NewSiteCalibration:
    """New-site calibration of the model, which must exist and have this coverage."""
    if fitted.new_site_ is None:
        lacks = "has no new-site calibration; fit it with --new-site-calibration"
        if "local" in fitted.facts_:
            lacks = "is calibrated to one site and no longer has a new-site calibration; use the model that `m2lgdg fit` wrote"
        raise InputError(f"--coverage and --abstain: this model {lacks}.")
    fitted.new_site_.expected(coverage)  # refuses an unknown coverage
    return fitted.new_site_


def _set_lines(new_site: NewSiteCalibration, coverage: float, decision: pd.Series | None) -> Iterator[str]:
    """Lines on conformal sets and, if they decide, on how often they do."""
    expected = new_site.expected(coverage)
    yield (
        f"Conformal sets of {percent(coverage)} coverage: at left-out source sites, they held the true class of "
        f"{percent(expected.reached)} of subjects (lowest site {percent(expected.lowest)}, median {percent(expected.median)})."
    )
    if decision is not None:
        decided = int((decision != "").sum())
        right = "" if expected.decided == 0 else f", and {percent(expected.right)} of these correctly"
        yield f"Decided on {decided} subjects, abstained on {len(decision) - decided}."
        yield f"At left-out source sites, {percent(expected.decided)} were decided{right}."


def _level_lines(fitted: Model, cohort: Cohort) -> Iterator[str]:
    """Lines on the site that the model was adapted to, if any, and on subjects of other sites."""
    level = fitted.site_level
    if level is not None:
        yield level.sentence()
        others = [name for name in cohort.site_names if name != level.site]
        if others:
            yield f"Note: the correction does not hold for subjects of other sites: {', '.join(others)}."


def _compared(fitted: Model, cohort: Cohort) -> Iterator[str]:
    """Lines on how the cohort differs from source: site by site, or as a whole if there are many sites."""
    lines, sites = fitted.compare(cohort), cohort.site_names
    if lines and 1 < len(sites) <= MOST_SITES:
        for site in sites:
            here = cohort.select(cohort.sites == site)
            yield f"{site} ({len(here)} subjects):"
            yield from (f"  {line}" for line in fitted.compare(here))
    elif lines and len(sites) > MOST_SITES:
        yield f"All {len(sites)} sites pooled:"
        yield from (f"  {line}" for line in lines)
    else:
        yield from lines
