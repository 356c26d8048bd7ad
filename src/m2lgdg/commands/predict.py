"""`m2lgdg predict`: probability, decision, out-of-distribution scores and quality flags of every subject of a cohort."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import models, options, suggestions, terminal


@terminal.command()
def predict(
    context: typer.Context,
    model: options.Model,
    path: options.Scans,
    to: Annotated[Path, typer.Option("--out", help="Table to write (.csv).", show_default=False)],
    site: options.Site = None,
    kind: options.Kind = None,
    table: options.Table = None,
    phenotype: options.Phenotype = None,
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
    """Predict the probability of being a patient for every subject of a cohort, or for one scan; labels are not used."""
    from m2lgdg.data.check import with_checks
    from m2lgdg.data.pseudonyms import Pseudonyms
    from m2lgdg.data.spreadsheets import csv_text
    from m2lgdg.deploy.predict import calibration_for
    from m2lgdg.deploy.predict import predict as predicted
    from m2lgdg.storage import write_text

    options.refuse_existing(to, overwrite)
    fitted = models.load_model(model, plugin)
    if abstain and coverage is None:
        coverage = 0.9
    if coverage is not None:
        calibration_for(fitted, coverage)  # before the cohort is read
    cohort = models.read_for(fitted, path, site, kind, table, phenotype)
    with terminal.progress("predicting"):
        cohort = with_checks(cohort)  # here, since what is said of the data below needs them again
        result = predicted(fitted, cohort, coverage, abstain=abstain)
    write_text(to, csv_text(Pseudonyms().sorted_table(result.table, []) if share else result.table))
    patients = int((result.table["decision"].astype(str) == "1").sum())
    rule = "decided as patients" if abstain else f"at or above the threshold of {fitted.threshold:.3g}"
    counted = f"{len(cohort)} subjects, {patients} {rule}"
    if len(cohort) == 1:
        one, decided = result.table.iloc[0], {"1": "patient", "0": "control"}
        decision = decided.get(str(one["decision"]), "none")
        counted = f"probability {one['proba']:.3f} of being a patient; decision: {decision} (threshold {fitted.threshold:.3g})"
    terminal.say(f"Wrote {to}: {counted}.", *(f"  {line}" for line in result.lines))
    if len(cohort) == 1 and one["flags"]:
        terminal.say(f"Flags: {one['flags']}.")
    elif result.flagged:
        counts = ", ".join(f"{kind} ({count})" for kind, count in result.flagged.items())
        terminal.say(f"Flagged: {counts}; see the column flags.")
    if not models.is_one_scan(path, kind):  # `check` reads cohorts
        models.print_data_line(cohort, path, table, new_site=True)
    models.print_notes(fitted, cohort)
    models.warn_of_other_code(fitted)
    terminal.say(
        f"{models.RESEARCH} Calibration may be poor at a site the model has never seen.",
        "Read the column flags before you use the decisions.",
    )
    if result.explainable:
        suggestions.print_next(context, "explain", model, path, "--out", suggestions.free(f"{to.stem}-explained"))
