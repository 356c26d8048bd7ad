"""Arguments that several commands share, so that a name has the same meaning everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Study folder written by `m2lgdg run`.", show_default=False)]
StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY", help="Study file (.toml, or study.json of an earlier run).", show_default=False)
]
Cohort = Annotated[
    Path, typer.Argument(metavar="COHORT", help="Cohort file, or a folder that `m2lgdg check` can read.", show_default=False)
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder written by `m2lgdg fit`.", show_default=False)]
Site = Annotated[list[str] | None, typer.Option("--site", help="Site of the cohort to use (default: all); may be repeated.")]
Beside = Annotated[
    Path | None, typer.Option(help="Table of published values (columns method, target, metric, value) to show in brackets.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of parallel processes.")]
Plugin = Annotated[list[Path] | None, typer.Option(help="Python file with your own methods; may be repeated.")]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda, mps or auto.")]
Rois = Annotated[
    Path | None,
    typer.Option(help="ROI centroids if the atlas is not AAL: rois.tsv (name, x, y, z in MNI space) or an atlas image."),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key of the study file, such as --set seeds=[0,1]; may be repeated.")
]
