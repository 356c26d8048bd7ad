"""Predictions of a model for all subjects of a cohort: a table, and what is to be said about it.

`m2lgdg predict` writes the table and prints the lines; labels are not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.check import duplicate_flags, with_checks
from m2lgdg.method import is_network
from m2lgdg.methods.linear import Linear
from m2lgdg.model.model import Model, table_columns
from m2lgdg.model.new_site import NewSiteCalibration, percent
from m2lgdg.model.out_of_distribution import SEGMENTATION
from m2lgdg.storage import InputError

UNLIKE = 0.5  # difference in the proportion of subjects with a table, from which an intercept may not hold
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
    _flag_segmentations(flags, cohort)
    lines = [*_level_lines(fitted, cohort), *table_lines(fitted, cohort)]
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
    several = len(cohort) >= 3 and np.ptp(proba) > 0
    explainable = is_network(fitted) or (isinstance(fitted.method, Linear) and (len(cohort) == 1 or several))
    return Predictions(table, [*lines, *_compared(fitted, cohort)], flagged, bool(explainable))


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


def _flag_segmentations(flags: list[list[str]], cohort: Cohort) -> None:
    """Also flag those whom `check` finds among the others of their site, which the range of source may be too wide for."""
    found = {one.subjects[0]: one.numbers["counts"] for one in cohort.findings or () if one.kind == "failed segmentation"}
    for raised, subject in zip(flags, cohort.subjects.tolist(), strict=True):
        if subject in found and not any(flag.startswith(SEGMENTATION.partition(":")[0]) for flag in raised):
            counts = " and ".join(f"{columns} columns of {name}" for name, columns in found[subject].items())
            raised.append(SEGMENTATION.format(counts))


def table_lines(fitted: Model, cohort: Cohort) -> Iterator[str]:
    """Lines on tables that the model takes and the cohort does not have, and on what it has instead."""
    wanted = dict.fromkeys(name for member in fitted.members.values() for name in table_columns(member))
    lacking = [name for name in wanted if name not in cohort.tables or cohort.tables[name].isna().all(axis=None)]
    others = [name for name in cohort.tables if name not in wanted]
    if lacking:
        has = f", and has {', '.join(others)}" if others else ""
        yield (
            f"The cohort has no table {' and '.join(lacking)}{has}; decided without, as a mean subject. Give it with --table "
            f"{lacking[0]}=FILE."
        )
    elif wanted and others:
        yield f"Not used, as the model was trained without: table {', '.join(others)}."


def _level_lines(fitted: Model, cohort: Cohort) -> Iterator[str]:
    """Lines on the site that the model was adapted to, if any, and on subjects of other sites."""
    level = fitted.site_level
    if level is not None:
        yield level.sentence()
        others = [name for name in cohort.site_names if name != level.site]
        if others:
            yield f"Note: the correction does not hold for subjects of other sites: {', '.join(others)}."
        stored = fitted.facts_["site_level"].get("tables", {})
        for name, count in fitted.having_tables(cohort).items() if stored and len(cohort) else ():
            before = stored.get(name, 0)
            if abs(before / level.subjects - count / len(cohort)) > UNLIKE:
                yield (
                    f"Note: {before} of {level.subjects} subjects that the correction was learned from have table {name}, and "
                    f"{count} of {len(cohort)} here; run m2lgdg adapt again with subjects like these."
                )


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
