"""`m2lgdg export`: a fitted model as an ONNX graph for other languages, or as a model folder for sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.command()
def export(
    model: options.Model,
    to: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The .onnx file to write, with a .json file of the same name; or, with --share, a folder.",
            show_default=False,
        ),
    ],
    share: Annotated[
        bool, typer.Option("--share", help="Prepare for sharing: withhold paths, host and user names, and round ages to bands.")
    ] = False,
    plugin: options.Plugin = None,
) -> None:
    """Write a model as an ONNX graph with a JSON file on its inputs, or with --share as a model folder for sharing."""
    from rich.markup import escape

    from m2lgdg.model.model import Model
    from m2lgdg.registry import load_methods
    from m2lgdg.report.anonymised import shared_model
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import need_unused, needing, new_folder

    load_methods(tuple(map(str, plugin or [])))
    fitted = Model.load(model)
    if share:
        fitted = shared_model(fitted)
    if share and to.suffix != ".onnx":
        need_unused(to)
        with new_folder(to) as part:
            write_card(fitted.save(part))
        terminal.out.print(f"Wrote {escape(str(to))}: a model folder for sharing, with its card.", soft_wrap=True)
        terminal.out.print(f"Read {escape(str(to / 'card.md'))} before you share the folder.", soft_wrap=True)
        return
    with needing("onnx", "ONNX export"):
        from m2lgdg.deploy.onnx import export_onnx
    with terminal.progress(f"exporting {fitted.name}"):
        written = export_onnx(fitted, to)
    if fitted.site_level is not None:
        terminal.out.print(fitted.site_level.sentence(), markup=False, highlight=False, soft_wrap=True)
    preparation = written.with_suffix(".json").name
    terminal.out.print(f"Wrote {escape(str(written))}, and {escape(preparation)} on how to prepare its inputs.", soft_wrap=True)
    note = "onnxruntime reproduced the model's probabilities on synthetic subjects. Research use; not a diagnostic device."
    terminal.out.print(note, soft_wrap=True)
    terminal.out.print(f"Prepare the inputs of the graph as described in {escape(preparation)}.", soft_wrap=True)
