"""Arguments that several commands share, so that one name means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a study", show_default=False)]
StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY", help="a study file (.toml, or study.json of a run)", show_default=False)
]
Cohort = Annotated[
    Path, typer.Argument(metavar="COHORT", help="a cohort file, or a folder that `m2lgdg check` reads", show_default=False)
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder that `m2lgdg fit` wrote", show_default=False)]
Beside = Annotated[
    Path | None, typer.Option(help="a table of published values (method, target, metric, value) to show in brackets")
]
Jobs = Annotated[int, typer.Option(min=1, help="processes")]
Plugin = Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps or auto")]
Rois = Annotated[Path | None, typer.Option(help="rois.tsv (name, x, y, z in MNI) or an atlas image, if not AAL")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="key=value, as in the file: --set seeds=[0,1]")]
