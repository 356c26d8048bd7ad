"""`m2lgdg table`: the tables of a study, for the terminal or a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def table(
    folder: options.Folder,
    form: Annotated[str, typer.Option("--format", help="text, markdown, latex or csv")] = "text",
    best: Annotated[
        str | None,
        typer.Option(help="the method to test against the others (default: highest AUC; among variants of one method itself)"),
    ] = None,
    beside: options.Beside = None,
) -> None:
    """Print the paper's tables of a study: each target site, then macro over sites with paired tests.

    Where variants were run with several seeds, a last table holds each against the whole, training by training.
    """
    from m2lgdg.report.beside import read_published, stand_beside
    from m2lgdg.report.tables import render, study_tables, training_tables
    from m2lgdg.study.predictions import read_predictions
    from m2lgdg.study.stats import cell_scores

    predictions = read_predictions(folder)
    scores = cell_scores(predictions)
    tables = study_tables(scores, best) + training_tables(scores)
    if beside is not None:
        tables = stand_beside(tables, read_published(beside, predictions))
    typer.echo(render(tables, form), nl=False)  # type: ignore[arg-type]
    if form in ("text", "markdown"):
        print_changes(folder)


def print_changes(folder: Path) -> None:
    """A table of methods that did not run with their defaults, or of a part of the study, must say so."""
    from dataclasses import replace

    from m2lgdg.report.contents import read_contents, read_json
    from m2lgdg.report.tables import changed_fields

    changed = changed_fields(read_json(folder / "study.json", {}))
    if changed:
        typer.echo(f"\nNot with their defaults: {changed}.")
    missing = replace(read_contents(folder), failures=[]).missing()
    if missing:
        typer.echo(f"\nNot in these tables, failed or not run yet: {', '.join(missing)}.")
