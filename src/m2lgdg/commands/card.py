"""`m2lgdg card`: the model card of a model folder, as Markdown and HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal


@terminal.command()
def card(
    context: typer.Context,
    model: options.Model,
    study: Annotated[
        Path | None, typer.Option(help="Study folder with the same method, for its performance at left-out sites.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write to (default: the model folder, of a packaged model NAME-card)."),
    ] = None,
    plugin: options.Plugin = None,
) -> None:
    """Write the model card (card.md and card.html): intended use, training data, performance at left-out sites."""
    from rich.markup import escape

    from m2lgdg.model.packaged import is_packaged, model_folder
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import card as card_sections
    from m2lgdg.report.card import write_sections

    load_methods(tuple(map(str, plugin or [])))
    source = model_folder(model)
    with terminal.progress("writing the model card"):
        sections = card_sections(source, study)
    if to is None:
        to = suggestions.free(f"{model.name}-card") if is_packaged(source) else source
    folder = write_sections(sections, to)
    terminal.out.print(f"Wrote {escape(str(folder / 'card.md'))} and card.html.", soft_wrap=True)
    for remark in (remark for section in sections for remark in section.remarks):
        terminal.out.print(f"Note: {escape(remark)}", soft_wrap=True)
    if study is None:
        terminal.out.print("The performance at left-out sites of a study can be added to the card.")
        suggestions.print_next(context, "card", model, "--study", suggestions.Fill("STUDY_FOLDER"))
