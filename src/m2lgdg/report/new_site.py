"""New-site calibration on the model card: expected performance at an unseen site, as facts, tables and sentences.

Made from the `NewSiteCalibration` of a fitted method, which has figures of sites and of no single subject.
"""

from __future__ import annotations

import math

from m2lgdg.model.new_site import COVERAGES, LEAST_SUBJECTS, NewSiteCalibration, Performance, percent
from m2lgdg.model.site_level import ADAPT_SUBJECTS
from m2lgdg.report.tables import Table

UNSEEN = "Expected performance at an unseen site"
SHOWN = 0.9  # nominal coverage that is shown for each site
SLACK = 0.02  # coverage over all sites may be lower than nominal by this much before it counts as a failure
NOT_CALIBRATED = (
    "The model was fitted without new-site calibration, so its probabilities are not calibrated for a site it has not seen. "
    "Fit it with m2lgdg fit --new-site-calibration."
)
READING = [
    "All figures are from source sites left out in turn, with temperature, threshold and conformal sets from the other sites.",
    "They hold for sites that differ from the source sites as these differ from each other; other sites may do worse.",
    "A conformal set has every class that cannot be ruled out: both (undecided) or none (unlike either class) are possible.",
    "The interval of a probability describes differences between sites, not the uncertainty about one subject.",
]
AT_LEVEL = (
    f"Each left-out site is at its level, learned from up to {ADAPT_SUBJECTS} of its other subjects without labels, as this "
    "model is at the level of its site."
)
WITHOUT_LEVEL = "The left-out sites are not at their level, so these figures are not those of this model at its site."


def new_site_facts(new_site: NewSiteCalibration) -> list[tuple[str, str]]:
    """Performance over all left-out sites."""
    whole, sets = new_site.whole, new_site.expected(SHOWN)
    return [
        ("learned from", f"{whole.subjects} subjects of left-out sites, in {new_site.folds} refits"),
        ("AUC over all", f"{_percent(whole.auc)} % ({_percent(whole.auc_low)}-{_percent(whole.auc_high)} %)"),
        ("sensitivity, specificity", f"{_percent(whole.sensitivity)} %, {_percent(whole.specificity)} %"),
        ("calibration", f"slope {_number(whole.slope)} (ideal 1), intercept {_number(whole.intercept)} (ideal 0)"),
        ("Brier score, ECE", f"{_number(whole.brier)}, {_number(whole.ece)}"),
        (
            "differences between sites",
            f"sd {new_site.slope_sd:.2f} of the slope, {new_site.offset_sd:.2f} of the offset",
        ),
        (
            f"conformal sets of {percent(SHOWN)} coverage",
            f"contain the true class for {_percent(sets.reached)} % of subjects (lowest site {_percent(sets.lowest)} %, median "
            f"site {_percent(sets.median)} %); have one class for {_percent(sets.decided)} %, which is correct for "
            f"{_percent(sets.right)} % of these",
        ),
    ]


def new_site_tables(new_site: NewSiteCalibration) -> list[Table]:
    """A table by left-out site and a table by nominal coverage."""
    level = COVERAGES.index(SHOWN)
    header = ["Left-out site", "n", "patients", "AUC", "slope", "intercept", "Brier", "ECE", "in set", "one class", "correct"]
    rows = [_row(site, figures, level) for site, figures in new_site.sites.items()] + [_row("all", new_site.whole, level)]
    note = (
        f"AUC in % with DeLong interval; last three columns: conformal sets of {percent(SHOWN)} coverage, % of subjects with "
        f"the true class in their set, % with one class, % of these that are correct; sites with fewer than {LEAST_SUBJECTS} "
        "subjects count only in the last row"
    )
    levels = []
    for coverage in COVERAGES:
        sets = new_site.expected(coverage)
        rates = (sets.reached, sets.lowest, sets.median, sets.decided, sets.right)
        levels.append([percent(coverage), *map(_percent, rates)])
    by_level = ["Coverage", "in set", "lowest site", "median site", "one class", "correct"]
    return [
        _table("Left-out source sites", header, rows, note),
        _table("Conformal sets", by_level, levels, "% of subjects of all left-out sites; nominal coverage in the first column"),
    ]


def weak_sites(new_site: NewSiteCalibration) -> list[str]:
    """Source sites where the method, fitted without them, may be no better than chance."""
    chance = [site for site, figures in new_site.sites.items() if figures.auc <= 0.5 or figures.auc_low <= 0.5]
    return [f"Source sites with an AUC interval that includes chance when left out: {', '.join(chance)}."] if chance else []


def low_coverage(new_site: NewSiteCalibration) -> list[str]:
    """A sentence if conformal sets had a coverage below the nominal one."""
    sets = new_site.expected(SHOWN)
    if sets.reached >= SHOWN - SLACK:
        return []
    observed = f"{_percent(sets.reached)} % of subjects, {_percent(sets.lowest)} % at the lowest site"
    return [f"Conformal sets of {percent(SHOWN)} coverage contain the true class less often at left-out sites: {observed}."]


def _row(name: str, figures: Performance, level: int) -> list[str]:
    interval = "" if math.isnan(figures.auc_low) else f" ({_percent(figures.auc_low)}-{_percent(figures.auc_high)})"
    numbers = map(_number, (figures.slope, figures.intercept, figures.brier, figures.ece))
    rates = map(_percent, (figures.reached[level], figures.decided[level], figures.right[level]))
    return [name, str(figures.subjects), str(figures.patients), _percent(figures.auc) + interval, *numbers, *rates]


def _table(title: str, header: list[str], rows: list[list[str]], note: str) -> Table:
    return Table(title, header, rows, [[0] * len(header) for _ in rows], note)


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
