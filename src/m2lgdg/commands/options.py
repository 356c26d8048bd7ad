"""Arguments that several commands share, so that a name has the same meaning everywhere.

`Site` selects sites in every command that reads a cohort or a study.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from m2lgdg.cohort import Cohort as LoadedCohort

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Study folder written by `m2lgdg run`.", show_default=False)]
StudyFile = Annotated[
    Path,
    typer.Argument(
        metavar="STUDY",
        help="Study file (.toml, or study.json of an earlier run), or a cohort file: the default model and its simple peers.",
        show_default=False,
    ),
]
Cohort = Annotated[
    Path, typer.Argument(metavar="COHORT", help="Cohort file, or a folder that `m2lgdg check` can read.", show_default=False)
]
Scans = Annotated[
    Path,
    typer.Argument(
        metavar="COHORT",
        help="Cohort file, a folder that `m2lgdg check` can read, or the file of one scan (.1D, .txt, .csv, .tsv, .npy, "
        ".ptseries.nii).",
        show_default=False,
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="Model folder written by `m2lgdg fit`, or a name of `m2lgdg models`.", show_default=False
    ),
]
NewModel = Annotated[Path, typer.Option("--out", help="Model folder to write.", show_default=False)]
FieldChanges = Annotated[
    list[str] | None, typer.Option("--set", help="Change a field of the method: field=value; may be repeated.")
]
Beside = Annotated[
    Path | None, typer.Option(help="Table of published values (columns method, target, metric, value) to show in brackets.")
]
Best = Annotated[
    str | None,
    typer.Option(
        help="Method to test against the others (default: the study's main method, else highest AUC; of variants, the method)."
    ),
]
Rival = Annotated[
    list[str] | None,
    typer.Option(
        "--rival", help="Method that --best is tested against (default: all others); may be repeated.", show_default=False
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of parallel processes.")]
Plugin = Annotated[list[Path] | None, typer.Option(help="Python file with your own methods; may be repeated.")]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda, mps or auto.")]
Also = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="Another study of the same subjects, in the same tables; may be repeated."),
]
Rois = Annotated[
    Path | None,
    typer.Option(
        help="ROI centroids if the atlas is not included: rois.tsv (name, x, y, z in MNI space), an image, or XCP-D's folder."
    ),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key of the study file, such as --set seeds=[0,1]; may be repeated.")
]
Site = Annotated[
    list[str] | None,
    typer.Option("--site", help="Site of the cohort to use (default: all); may be repeated.", show_default=False),
]
TargetSite = Annotated[
    list[str] | None,
    typer.Option("--site", help="Target site of the study to use (default: all); may be repeated.", show_default=False),
]
Kind = Annotated[str | None, typer.Option(help="Kind of data, as in `m2lgdg check` (default: guessed).", show_default=False)]
Table = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        metavar="NAME=FILE",
        help="Table of brain structure or other features of the subjects, such as thickness=lh.thickness.tsv, or a "
        "folder of FreeSurfer's subjects. May be repeated; files of the same name become one table.",
        show_default=False,
    ),
]
Phenotype = Annotated[
    list[str] | None,
    typer.Option(
        "--phenotype",
        metavar="NAME=VALUE",
        help="Phenotype of the subject if COHORT is the file of one scan, such as age=14.5 or sex=1 (male; 2 female). May be "
        "repeated.",
        show_default=False,
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", help="Site to leave out, of source and of targets; may be repeated.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text.")]


def refuse_existing(to: Path, overwrite: bool) -> None:
    """Refuse to replace a file unless --overwrite was given, before anything is read."""
    from m2lgdg.storage import InputError

    if to.is_file() and not overwrite:
        raise InputError(f"{to} already exists; add --overwrite to replace it, or choose another name.")


def values_of(given: Sequence[str] | None) -> dict[str, str]:
    """Values of --phenotype, by name."""
    from m2lgdg.storage import InputError

    values: dict[str, str] = {}
    for one in given or ():
        name, equals, value = (part.strip() for part in one.partition("="))
        if not equals or not name or not value or name in values:
            fault = "is given twice" if name in values else "give it as NAME=VALUE, such as age=14.5"
            raise InputError(f"--phenotype {one}: {fault}.")
        values[name] = value
    return values


def table_files(given: Sequence[str] | None) -> dict[str, list[Path]]:
    """Files of the tables of --table, by name."""
    from m2lgdg.storage import InputError

    files: dict[str, list[Path]] = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not equals or not name.strip() or not path.strip():
            raise InputError(f"--table {one}: give it as NAME=FILE, such as thickness=lh.thickness.tsv.")
        files.setdefault(name.strip(), []).append(Path(path).expanduser())
    return files


def of_sites(cohort: LoadedCohort, sites: Sequence[str]) -> npt.NDArray[np.bool_]:
    """(subject,) mask of the subjects of these sites; an unknown site is refused."""
    import numpy as np

    from m2lgdg.fields import nearest
    from m2lgdg.storage import InputError

    for site in sites:
        if site not in cohort.site_names:
            raise InputError(f"{site} is not a site of cohort {cohort.name}{nearest(site, cohort.site_names)}")
    return np.isin(cohort.sites, sites)


def with_sites(cohort: LoadedCohort, sites: Sequence[str] | None) -> LoadedCohort:
    """Cohort with the subjects of the sites given by --site; without the option, the cohort itself."""
    return cohort.select(of_sites(cohort, sites)) if sites else cohort
