"""`m2lgdg export`: a fitted model as an ONNX graph, for a program that is not Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import terminal


@terminal.app.command()
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder that `m2lgdg fit` wrote", show_default=False)],
    to: Annotated[Path, typer.Option("--out", help="the .onnx file to write; a .json goes beside it", show_default=False)],
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """Write a model as an ONNX graph, and a JSON that says how its inputs are prepared."""
    from rich.markup import escape

    from m2lgdg.export import export_onnx
    from m2lgdg.method import Method, load_methods

    load_methods(tuple(map(str, plugin or [])))
    written = export_onnx(Method.load(model), to)
    told = written.with_suffix(".json").name
    terminal.out.print(f"Wrote {escape(str(written))}, and {escape(told)} on how its inputs are prepared.", soft_wrap=True)
    terminal.out.print("onnxruntime gave the same probabilities on made-up subjects. Research use; not a diagnostic device.")
