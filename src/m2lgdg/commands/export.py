"""`m2lgdg export`: a fitted model as an ONNX graph for a program that is not Python, or as a folder that may be given away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def export(
    model: options.Model,
    to: Annotated[
        Path, typer.Option("--out", help="the .onnx file to write, a .json goes beside it; or a folder", show_default=False)
    ],
    share: Annotated[bool, typer.Option("--share", help="without names of folders and people, ages in bands")] = False,
    plugin: options.Plugin = None,
) -> None:
    """Write a model as an ONNX graph with a JSON on how its inputs are prepared, or with --share as a folder to give away."""
    from rich.markup import escape

    from m2lgdg.commands.fit import refuse_used
    from m2lgdg.deploy.onnx import export_onnx
    from m2lgdg.method import Method
    from m2lgdg.registry import load_methods
    from m2lgdg.report.anonymised import shared_model
    from m2lgdg.report.card import write_card

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    if share:
        fitted = shared_model(fitted)
    if share and to.suffix != ".onnx":
        refuse_used(to)
        write_card(fitted.save(to))
        terminal.out.print(f"Wrote {escape(str(to))}, a model folder with its card, to be given away.", soft_wrap=True)
        return
    written = export_onnx(fitted, to)
    told = written.with_suffix(".json").name
    terminal.out.print(f"Wrote {escape(str(written))}, and {escape(told)} on how its inputs are prepared.", soft_wrap=True)
    said = "onnxruntime gave the same probabilities on made-up subjects. Research use; not a diagnostic device."
    terminal.out.print(said, soft_wrap=True)
