"""What a model promises of a site it has never seen, as the facts, tables and sentences of its card.

Made from the promise alone, which holds figures of sites and no subject.
"""

from __future__ import annotations

import math

from m2lgdg.model.new_site import LEAST_SUBJECTS, LEVELS, NewSiteCalibration, Performance, percent
from m2lgdg.report.tables import Table

UNSEEN = "At a site it has never seen"
SHOWN = 0.9  # the coverage that is told site by site
SLACK = 0.02  # what coverage over all sites may lack before it is told as a failure
NO_PROMISE = (
    "The model was fitted without a promise, so it cannot tell what its probabilities mean at a site it has never seen: "
    "m2lgdg fit --promise."
)
PROMISED = [
    "Every figure is of source sites left out whole, with temperature, threshold and sets from the other sites.",
    "It holds for sites that differ from source as source sites differ from each other; a site of another kind may do worse.",
    "A set holds every class that cannot be ruled out: both is unsure, none is unlike either.",
    "The interval of a probability is of what this score means from site to site, not of one subject.",
]


def promised_facts(new_site: NewSiteCalibration) -> list[tuple[str, str]]:
    """Over all left-out sites."""
    whole, kept = new_site.whole, new_site.expected(SHOWN)
    return [
        ("learned from", f"{whole.subjects} subjects of left-out sites, in {new_site.folds} refits"),
        ("AUC over all", f"{_percent(whole.auc)} ({_percent(whole.auc_low)}-{_percent(whole.auc_high)})"),
        ("sensitivity, specificity", f"{_percent(whole.sensitivity)}, {_percent(whole.specificity)}"),
        ("calibration", f"slope {_number(whole.slope)} (ideal 1), intercept {_number(whole.intercept)} (ideal 0)"),
        ("Brier, ECE", f"{_number(whole.brier)}, {_number(whole.ece)}"),
        (
            "differences between sites",
            f"sd {new_site.slope_sd:.2f} of the slope, {new_site.offset_sd:.2f} of the offset",
        ),
        (
            f"sets of {percent(SHOWN)} coverage",
            f"held the true class of {_percent(kept.reached)} % (lowest site {_percent(kept.lowest)}, median "
            f"{_percent(kept.median)}); one class for {_percent(kept.decided)} %, right for {_percent(kept.right)} % of these",
        ),
    ]


def promised_tables(new_site: NewSiteCalibration) -> list[Table]:
    """Each left-out site, and each coverage."""
    at = LEVELS.index(SHOWN)
    header = ["Site left out", "n", "patients", "AUC", "slope", "intercept", "Brier", "ECE", "in set", "one class", "right"]
    rows = [_row(site, one, at) for site, one in new_site.sites.items()] + [_row("all", new_site.whole, at)]
    note = (
        f"AUC with DeLong's interval; in set, one class and right of sets of {percent(SHOWN)} coverage, in per cent, right of "
        f"those with one class; sites of fewer than {LEAST_SUBJECTS} subjects count in the last row only"
    )
    levels = []
    for coverage in LEVELS:
        kept = new_site.expected(coverage)
        shares = (kept.reached, kept.lowest, kept.median, kept.decided, kept.right)
        levels.append([percent(coverage), *map(_percent, shares)])
    by_level = ["Coverage", "in set", "lowest site", "median site", "one class", "right"]
    return [_table("Sites left out", header, rows, note), _table("Sets", by_level, levels, "per cent, over all left-out sites")]


def weak_sites(new_site: NewSiteCalibration) -> list[str]:
    """Sites at which the method, fitted without them, may be no better than chance."""
    chance = [site for site, one in new_site.sites.items() if one.auc <= 0.5 or one.auc_low <= 0.5]
    return [f"Source sites at which, left out, the interval of the AUC reaches chance: {', '.join(chance)}."] if chance else []


def too_small_sets(new_site: NewSiteCalibration) -> list[str]:
    """Whether prediction sets held the truth less often than their name says."""
    kept = new_site.expected(SHOWN)
    if kept.reached >= SHOWN - SLACK:
        return []
    held = f"{_percent(kept.reached)} % of subjects, {_percent(kept.lowest)} % at the lowest site"
    return [f"Sets of {percent(SHOWN)} coverage held the true class of fewer at left-out sites: {held}."]


def _row(name: str, one: Performance, at: int) -> list[str]:
    area = _percent(one.auc) + ("" if math.isnan(one.auc_low) else f" ({_percent(one.auc_low)}-{_percent(one.auc_high)})")
    numbers = map(_number, (one.slope, one.intercept, one.brier, one.ece))
    shares = map(_percent, (one.reached[at], one.decided[at], one.right[at]))
    return [name, str(one.subjects), str(one.patients), area, *numbers, *shares]


def _table(title: str, header: list[str], rows: list[list[str]], note: str) -> Table:
    return Table(title, header, rows, [[0] * len(header) for _ in rows], note)


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
