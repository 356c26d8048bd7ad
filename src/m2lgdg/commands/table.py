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
    also: options.Also = None,
    beside: options.Beside = None,
    site: options.TargetSite = None,
) -> None:
    """Print the tables of a study: scores at each target site, then the macro average over sites with paired tests.

    --tests adds the tests of all five metrics. If variants were run with several seeds, a last table compares each with the
    full method, paired by training.
    """
    from m2lgdg.report.paper_tables import table as text_of_tables
    from m2lgdg.study.predictions import read_joined_predictions, read_predictions

    with terminal.progress("computing the tables"):
        folders = [folder, *(also or ())]
        predictions = read_joined_predictions(folders)
        text = text_of_tables(
            folder,
            form,  # type: ignore[arg-type]
            best=best,
            rivals=rival or (),
            tests=tests,
            also=folders[1:],
            published=beside,
            sites=site,
            predictions=predictions,
        )
    typer.echo(text, nl=False)
    if form in ("text", "markdown"):
        for one in folders:
            lines = changes(one, read_predictions(one) if also else predictions)
            if other_version(folder, one):
                lines.append(f"run on another version of the cohort than {folder} (atlas, precision or preparation).")
            for line in lines:
                typer.echo(f"\n{one}: {line}" if also else f"\n{line}")
        # Not a part of the tables, so not on standard output. A report has all sites.
        suggestions.print_next(context, "report", folder, without=["--site"], error_stream=True)


def other_version(first: Path, second: Path) -> bool:
    """Whether the cohorts of two studies have different hashes."""
    from m2lgdg.report.contents import read_json

    hashes = [read_json(folder / "study.json", {}).get("cohort_hash") for folder in (first, second)]
    return all(hashes) and hashes[0] != hashes[1]


def changes(folder: Path, predictions: pd.DataFrame) -> list[str]:
    """Failed leakage checks, findings about the cohort, fields that differ from their defaults, and missing cells."""
    from m2lgdg.report.contents import changed_fields, missing_cells, read_json
    from m2lgdg.study.description import cohort_line, failed_checks
    from m2lgdg.study.plan import declarations

    lines = [*failed_checks(folder), cohort_line(folder, "m2lgdg report")]
    study, declared = read_json(folder / "study.json", {}), declarations(folder)
    if changed := changed_fields(study, declared):
        lines.append(f"Fields that differ from their defaults: {changed}.")
    if missing := missing_cells(predictions, study, declared):
        lines.append(f"Missing in these tables (failed or not run yet): {', '.join(missing)}.")
    return [line for line in lines if line]
