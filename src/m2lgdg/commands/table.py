"""`m2lgdg table`: print the tables of a study for the terminal or a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def table(
    folder: options.Folder,
    form: Annotated[str, typer.Option("--format", help="Format: text, markdown, latex or csv.")] = "text",
    best: Annotated[
        str | None,
        typer.Option(help="Method to test against the others (default: highest AUC; among variants, the method itself)."),
    ] = None,
    beside: options.Beside = None,
) -> None:
    """Print the tables of a study: scores at each target site, then the macro average over sites with paired tests.

    If variants were run with several seeds, a last table compares each with the full method, paired by training.
    """
    from rich.markup import escape

    from m2lgdg.report.text import table as text_of_tables

    typer.echo(text_of_tables(folder, form, best=best, published=beside), nl=False)  # type: ignore[arg-type]
    if form in ("text", "markdown"):
        print_changes(folder)
        following = f"Next: m2lgdg report {escape(str(folder))}"  # not a part of the tables, so not on standard output
        terminal.err.print(following, highlight=False, soft_wrap=True)


def print_changes(folder: Path) -> None:
    """Print failed leakage checks, findings about the cohort, fields that differ from their defaults, and missing cells."""
    from dataclasses import replace

    from m2lgdg.report.contents import read_contents, read_json
    from m2lgdg.report.tables import changed_fields
    from m2lgdg.study.checks import cohort_line, failed_checks

    for sentence in failed_checks(folder):
        typer.echo(f"\n{sentence}")
    if line := cohort_line(folder, "m2lgdg report"):
        typer.echo(f"\n{line}")
    changed = changed_fields(read_json(folder / "study.json", {}))
    if changed:
        typer.echo(f"\nFields that differ from their defaults: {changed}.")
    missing = replace(read_contents(folder), failures=[]).missing()
    if missing:
        typer.echo(f"\nMissing in these tables (failed or not run yet): {', '.join(missing)}.")
