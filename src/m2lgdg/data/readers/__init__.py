"""`read`: load a `Cohort` from a release folder or a cohort file, whose kind is guessed from its files.

Each kind is one module with `matches(path)` and `read(path, ...)`, whose keyword arguments are the options of that kind.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers.selection import limit_motion
from m2lgdg.data.readers.series import NotSeries, OnBad, Progress
from m2lgdg.findings import CONNECTOME_NOT_LISTED, NO_CONNECTOME, NO_SERIES, NOT_LISTED, UNUSABLE_FILE, Exclusion
from m2lgdg.scans import IS_CONNECTOME
from m2lgdg.storage import InputError

if TYPE_CHECKING:
    from m2lgdg.data.readers.structure import Paths

# In the order in which they are tried: file names of a release are more specific than a participants.tsv.
KINDS = {
    "abide-ii": "m2lgdg.data.readers.abide_ii",
    "abide-pcp": "m2lgdg.data.readers.abide",
    "adhd-200": "m2lgdg.data.readers.adhd200",
    "rest-meta-mdd": "m2lgdg.data.readers.rest_meta_mdd",
    "connectomes": "m2lgdg.data.readers.connectomes",
    "bids": "m2lgdg.data.readers.bids",
    "folder": "m2lgdg.data.readers.folder",
}
NOT_COHORTS = (".npy", ".csv", ".tsv", ".mat", ".1D", ".txt", ".toml", ".json")  # series, tables and studies


def read(
    path: str | Path,
    kind: str | None = None,
    *,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
    max_motion: float | None = None,
    motion_column: str | None = None,
    in_memory: bool = False,
    tables: Mapping[str, Paths] | None = None,
    **options: object,
) -> Cohort:
    """Read a cohort from a file written by `Cohort.save`, or from a folder of a supported kind.

    Parameters
    ----------
    path : str or Path
    kind : str, optional
        Kind of the folder; recognised from its content by default.
    on_bad : {"stop", "exclude"}
        What to do with an invalid subject.
    progress : callable, optional
        Called with the number of files that were read, and their number.
    max_motion : float, optional
        Largest mean head motion.
    motion_column : str, optional
        Phenotype with the head motion.
    in_memory : bool, default False
        Read a cohort file whole, in place of a map of it; what becomes of the file then does not matter.
    tables : mapping of names to paths, optional
        Tables of brain structure or other features, such as `{"thickness": "lh.thickness.tsv"}`; several files of one table
        are given as a list.
    **options
        Options of the kind.

    Returns
    -------
    Cohort

    Examples
    --------
    >>> import os, tempfile
    >>> import m2lgdg
    >>> path = m2lgdg.make_cohort("tiny").save(os.path.join(tempfile.mkdtemp(), "tiny.cohort"))
    >>> m2lgdg.read(path)
    Cohort tiny: 52 subjects (28 patients, 24 controls) of 4 sites, 12 ROIs (synthetic)

    Notes
    -----
    An invalid subject (unreadable file, NaN, wrong columns, not listed ...) raises an error with its place and reason; with
    `on_bad="exclude"` it is left out and recorded in `Cohort.excluded`. The options are those of the `read` of the kind;
    `atlas` takes one name, several (`atlas=("aal", "ho")`) or `"all"`.

    `max_motion` keeps only subjects whose mean head motion is below it, for any kind of cohort (`selection.limit_motion`);
    `motion_column` names the phenotype with the motion if it has none of the usual names. `tables` works for any kind, too:
    tables of FreeSurfer, folders of its subjects, `*_morph.tsv` of XCP-D, ENIGMA's and any table with a column of ids are
    recognised (`structure.read_table`), and their ids are matched to the subjects.
    """
    path = Path(path)
    if on_bad not in ("stop", "exclude"):
        raise InputError(f"on_bad must be 'stop' or 'exclude', not {on_bad!r}.")
    if motion_column is not None and max_motion is None:
        raise InputError("--motion-column needs --max-motion.")
    cohort = _read(path, kind, on_bad, progress, in_memory, options)
    cohort = cohort if max_motion is None else limit_motion(cohort, max_motion, motion_column)
    if not tables:
        return cohort
    from m2lgdg.data.readers.structure import with_files

    return with_files(cohort, tables)


def _read(
    path: Path, kind: str | None, on_bad: OnBad, progress: Progress | None, in_memory: bool, options: dict[str, object]
) -> Cohort:
    if not path.exists():
        raise InputError(f"{path} does not exist.")
    if kind == "cohort" or (kind is None and path.is_file()):
        if options:
            raise InputError(f"a cohort file takes no option {next(iter(options))}; it was set when the file was created.")
        if path.suffix in NOT_COHORTS and kind is None:
            raise InputError(
                f"{path} is not a cohort file; give the folder of the series, or a file that m2lgdg convert wrote."
            )
        return Cohort.load(path, in_memory=in_memory)
    if kind is not None:
        _module(kind)  # report a misspelt kind before anything else
    if not path.is_dir():
        what = f"a file; a cohort of kind {kind} is a folder" if kind else "neither a file nor a folder"
        raise InputError(f"{path} is {what}.")
    if not any(path.iterdir()):
        raise InputError(f"{path} is an empty folder.")
    kind = kind or guess(path)
    reader = _module(kind)
    _check_options(reader, kind, options)
    try:
        cohort: Cohort = reader.read(path, on_bad=on_bad, progress=progress, **options)
    except NotSeries as error:
        command = shlex.join(["m2lgdg", "check", str(path), "--kind", "connectomes"])
        raise InputError(f"{error.where}: {IS_CONNECTOME}; if all files hold one, read them with: {command}") from None
    return cohort


def stops_reading(path: Path, kind: str | None, excluded: Iterable[Exclusion]) -> bool:
    """Whether some of the subjects excluded from a folder would end its reading with `on_bad="stop"`."""
    from m2lgdg.data.readers.connectome_files import is_bids

    # An own folder must be complete. A release or BIDS derivatives may have been downloaded in part.
    kind = kind or guess(path)
    own = kind == "folder" or (kind == "connectomes" and not is_bids(path))
    defects = {UNUSABLE_FILE, NOT_LISTED, CONNECTOME_NOT_LISTED} | ({NO_SERIES, NO_CONNECTOME} if own else set())
    return any(each.kind in defects for each in excluded)


def guess(path: Path) -> str:
    """Guess the kind of a folder."""
    own = ("connectomes", "folder")  # only these kinds have a dataset.toml
    for kind in own if (path / "dataset.toml").is_file() else KINDS:
        if _module(kind).matches(path):
            return kind
    raise InputError(
        f"{path} is not of a supported kind: a folder of your own needs a table of subjects, participants.tsv or one other "
        ".csv or .tsv file with columns of ids and sites; names of other columns and files are given in dataset.toml "
        "(folder, docs/data.md#datasettoml). There are no *_rois_*.1D files (abide-pcp), no "
        "ABIDEII_Composite_Phenotypic.csv (abide-ii), no *_TCs.1D files (adhd-200), no ROISignals_S*.mat files "
        "(rest-meta-mdd), no square matrices (connectomes), and no dataset_description.json, sub-*/func or "
        "*.ptseries.nii (bids)."
    )


def _module(kind: str) -> ModuleType:
    if kind not in KINDS:
        raise InputError(f"kind {kind} is not known; choose one of {', '.join(KINDS)}, cohort.")
    return importlib.import_module(KINDS[kind])


def _check_options(reader: ModuleType, kind: str, options: dict[str, object]) -> None:
    known = [name for name in inspect.signature(reader.read).parameters if name not in ("path", "on_bad", "progress")]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"available: {', '.join(known) or 'none'}."
            raise InputError(f"kind {kind} has no option {name}; {hint}")
