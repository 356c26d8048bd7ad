"""`m2lgdg table`: print the tables of a study for the terminal or a paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal

if TYPE_CHECKING:
    import pandas as pd


@terminal.command()
def table(
    context: typer.Context,
    folder: options.Folder,
    form: Annotated[str, typer.Option("--format", help="Format: text, markdown, latex or csv.")] = "text",
    best: options.Best = None,
    rival: options.Rival = None,
    tests: Annotated[
        bool, typer.Option("--tests", help="Add the paired tests of all five metrics (t, p, Holm); --rival adds them, too.")
    ] = False,
    beside: options.Beside = None,
    site: options.TargetSite = None,
) -> None:
    """Print the tables of a study: scores at each target site, then the macro average over sites with paired tests.

    --tests adds the tests of all five metrics. If variants were run with several seeds, a last table compares each with the
    full method, paired by training.
    """
    from m2lgdg.report.text import table as text_of_tables
    from m2lgdg.study.predictions import read_predictions

    with terminal.progress("computing the tables"):
        predictions = read_predictions(folder)
        text = text_of_tables(
            folder,
            form,  # type: ignore[arg-type]
            best=best,
            rivals=rival or (),
            tests=tests,
            published=beside,
            sites=site,
            predictions=predictions,
        )
    typer.echo(text, nl=False)
    if form in ("text", "markdown"):
        print_changes(folder, predictions)
        # Not a part of the tables, so not on standard output. A report has all sites.
        suggestions.print_next(context, "report", folder, without=["--site"], error_stream=True)


def print_changes(folder: Path, predictions: pd.DataFrame) -> None:
    """Print failed leakage checks, findings about the cohort, fields that differ from their defaults, and missing cells."""
    from m2lgdg.report.contents import missing_cells, read_json
    from m2lgdg.report.tables import changed_fields
    from m2lgdg.study.checks import cohort_line, failed_checks

    for sentence in failed_checks(folder):
        typer.echo(f"\n{sentence}")
    if line := cohort_line(folder, "m2lgdg report"):
        typer.echo(f"\n{line}")
    study = read_json(folder / "study.json", {})
    changed = changed_fields(study)
    if changed:
        typer.echo(f"\nFields that differ from their defaults: {changed}.")
    missing = missing_cells(predictions, study)
    if missing:
        typer.echo(f"\nMissing in these tables (failed or not run yet): {', '.join(missing)}.")
