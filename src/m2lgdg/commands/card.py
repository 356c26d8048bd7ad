"""`m2lgdg card`: the model card of a model folder, as Markdown and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def card(
    model: options.Model,
    study: Annotated[Path | None, typer.Option(help="a study folder with the same method, for its sites left out")] = None,
    to: Annotated[Path | None, typer.Option("--out", help="where to write; the model folder unless given")] = None,
    plugin: options.Plugin = None,
) -> None:
    """Write card.md and card.html: what a model is for, was trained on, and did at sites left out."""
    from rich.markup import escape

    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import LEFT_OUT, OTHER_COHORT, OTHERWISE, write_parts
    from m2lgdg.report.card import card as sections

    load_methods(tuple(map(str, plugin or [])))
    parts = sections(model, study)
    folder = write_parts(parts, to or model)
    terminal.out.print(f"Wrote {escape(str(folder / 'card.md'))} and card.html.", soft_wrap=True)
    for told in next(part.sentences for part in parts if part.title == LEFT_OUT):
        if told == OTHER_COHORT or told.endswith(OTHERWISE):
            terminal.out.print(f"Note: {escape(told)}", soft_wrap=True)
    if study is None:
        terminal.out.print(
            "Next: --study DIR, a study folder of the same method, adds how it does at sites left out.", soft_wrap=True
        )
