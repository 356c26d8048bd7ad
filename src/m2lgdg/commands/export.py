"""`m2lgdg export`: a fitted model as an ONNX graph for other languages, or as a model folder for sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import models, options, terminal


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
    prepared: Annotated[
        bool,
        typer.Option(
            "--prepared", help="Leave the features out: the graph takes prepared inputs, as the .json file describes."
        ),
    ] = False,
    plugin: options.Plugin = None,
) -> None:
    """Write a model as an ONNX graph with a JSON file on its inputs, or with --share as a model folder for sharing."""
    from m2lgdg.report.sharing import shared_model
    from m2lgdg.storage import need_unused, needing

    fitted = models.load_model(model, plugin)
    if share:
        fitted = shared_model(fitted)
    if share and to.suffix != ".onnx":
        need_unused(to)
        models.write_model(fitted, to)
        terminal.say(f"Wrote {to}: a model folder for sharing, with its card.")
        terminal.say(f"Read {to / 'card.md'} before you share the folder.")
        return
    with needing("onnx", "ONNX export"):
        from m2lgdg.deploy.onnx import export_onnx
    with terminal.progress(f"exporting {fitted.name}"):
        written = export_onnx(fitted, to, takes_prepared=prepared)
    if fitted.site_level is not None:
        terminal.say(fitted.site_level.sentence())
    description = written.with_suffix(".json").name
    how = "how to prepare its inputs" if prepared else "its inputs, which are scans and phenotypes as they are"
    terminal.say(
        f"Wrote {written}, and {description} on {how}.",
        f"onnxruntime reproduced the model's probabilities on synthetic subjects. {models.RESEARCH}",
        f"Prepare the inputs of the graph as described in {description}."
        if prepared
        else f"Give ROIs and phenotypes in the order of {description}.",
    )
