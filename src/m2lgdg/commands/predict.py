"""`m2lgdg predict`: probability, decision, out-of-distribution scores and quality flags of every subject of a cohort."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import models, options, suggestions, terminal

if TYPE_CHECKING:
    import pandas as pd

    from m2lgdg.cohort import Cohort
    from m2lgdg.model.model import Model
    from m2lgdg.model.new_site import NewSiteCalibration

MOST_SITES = 5  # up to this many sites are compared with source one by one


@terminal.command()
def predict(
    context: typer.Context,
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="Table to write (.csv).", show_default=False)],
    site: options.Site = None,
    overwrite: options.Overwrite = False,
    share: Annotated[
        bool, typer.Option("--share", help="Replace subject ids by salted hashes, and sort the rows by them.")
    ] = False,
    plugin: options.Plugin = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="Add an interval and conformal sets of this coverage: 0.5, 0.6, 0.7, 0.8, 0.85, 0.9 or 0.95."),
    ] = None,
    abstain: Annotated[
        bool, typer.Option("--abstain", help="Decide only if the conformal set has one class (coverage 0.9 unless given).")
    ] = False,
) -> None:
    """Predict the probability of being a patient for every subject of a cohort; labels are not used."""
    from collections import Counter

    import pandas as pd

    from m2lgdg.data.check import duplicate_flags, with_checks
    from m2lgdg.data.spreadsheets import csv_text
    from m2lgdg.storage import write_text

    options.refuse_existing(to, overwrite)
    fitted = models.load_model(model, plugin)
    if abstain and coverage is None:
        coverage = 0.9
    new_site = None if coverage is None else _calibration_for(fitted, coverage)
    cohort = models.read_subjects(path, site)
    with terminal.progress("predicting"):
        proba = fitted.predict_proba(cohort)[:, 1]
        cohort = with_checks(cohort)
    table = pd.DataFrame({"subject": cohort.subjects, "site": cohort.sites, "proba": proba})
    table["decision"] = (proba >= fitted.threshold).astype(int)
    flags = [raised + copies for raised, copies in zip(fitted.flags(cohort), duplicate_flags(cohort), strict=True)]
    lines = _add_sets(table, flags, fitted, coverage, abstain) if new_site and coverage else []
    for kind, score in fitted.ood_scores(cohort).items():
        table[f"{kind}_ood"] = score.round(3)
    table["flags"] = ["; ".join(raised) for raised in flags]
    if share:
        from m2lgdg.data.pseudonyms import Pseudonyms

        table = Pseudonyms().sorted_table(table, [])
    write_text(to, csv_text(table))
    patients = int((table["decision"].astype(str) == "1").sum())
    rule = "decided as patients" if abstain else f"at or above the threshold of {fitted.threshold:.3g}"
    terminal.say(f"Wrote {to}: {len(table)} subjects, {patients} {rule}.")
    terminal.say(*(f"  {line}" for line in [*_level_lines(fitted, cohort), *lines, *_compared(fitted, cohort)]))
    kinds = Counter(flag.split(":")[0] for raised in flags for flag in raised)
    if kinds:
        counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        terminal.say(f"Flagged: {counts}; see the column flags.")
    models.print_data_line(cohort, path, new_site=True)
    models.warn_of_training_sites(fitted, cohort)
    models.warn_of_other_code(fitted)
    terminal.say(
        f"{models.RESEARCH} Calibration may be poor at a site the model has never seen.",
        "Read the column flags before you use the decisions.",
    )
    if _can_be_explained(fitted, cohort):
        suggestions.print_next(context, "explain", model, path, "--out", suggestions.free(f"{to.stem}-explained"))


def _can_be_explained(fitted: Model, cohort: Cohort) -> bool:
    """Whether `m2lgdg explain` scores the ROIs of this model on these subjects: networks, and linear methods with patterns."""
    from m2lgdg.method import is_network
    from m2lgdg.methods.linear import Linear

    return is_network(fitted) or (isinstance(fitted.method, Linear) and len(cohort) >= 3)


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
    lines = fitted.compare(cohort)
    if not lines:
        return
    sites = cohort.site_names
    if len(sites) == 1:
        yield from lines
    elif len(sites) > MOST_SITES:
        yield f"All {len(sites)} sites pooled:"
        yield from (f"  {line}" for line in lines)
    else:
        for site in sites:
            here = cohort.select(cohort.sites == site)
            yield f"{site} ({len(here)} subjects):"
            yield from (f"  {line}" for line in fitted.compare(here))


def _calibration_for(fitted: Model, coverage: float) -> NewSiteCalibration:
    """New-site calibration of the model, which must exist and have this coverage."""
    from m2lgdg.storage import InputError

    if fitted.new_site_ is None:
        lacks = "has no new-site calibration; fit it with --new-site-calibration"
        if "local" in fitted.facts_:
            lacks = "is calibrated to one site and no longer has a new-site calibration; use the model that `m2lgdg fit` wrote"
        raise InputError(f"--coverage and --abstain: this model {lacks}.")
    fitted.new_site_.expected(coverage)  # refuses an unknown coverage
    return fitted.new_site_


def _add_sets(table: pd.DataFrame, flags: list[list[str]], fitted: Model, coverage: float, abstain: bool) -> list[str]:
    """Add interval and conformal set to the table, and a flag to undecided subjects; returns lines to print."""
    from m2lgdg.model.new_site import percent

    new_site = _calibration_for(fitted, coverage)
    table["low"], table["high"] = new_site.interval(table["proba"].to_numpy())
    table["set"] = fitted.conformal_sets(table["proba"].to_numpy(), coverage)
    expected = new_site.expected(coverage)
    lines = [
        f"Conformal sets of {percent(coverage)} coverage: at left-out source sites, they held the true class of "
        f"{percent(expected.reached)} of subjects (lowest site {percent(expected.lowest)}, median {percent(expected.median)})."
    ]
    if abstain:
        table["decision"] = table["set"].map({"control": "0", "patient": "1"}).fillna("")
        for raised, classes in zip(flags, table["set"], strict=True):
            raised += [f"abstained: {classes}"] if classes in ("both", "none") else []
        decided = int((table["decision"] != "").sum())
        right = "" if expected.decided == 0 else f", and {percent(expected.right)} of these correctly"
        lines.append(f"Decided on {decided} subjects, abstained on {len(table) - decided}.")
        lines.append(f"At left-out source sites, {percent(expected.decided)} were decided{right}.")
    return lines
