"""`read`: a release folder or a cohort file in, a `Cohort` out, the kind guessed from what lies there.

Each kind is one module with `matches(path)` and `read(path, ...)`; its keyword arguments are the options a user may give.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from pathlib import Path
from types import ModuleType

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers.gather import OnBad, Progress
from m2lgdg.storage import InputError

# In the order of guessing: a release's own file names say more than a participants.tsv.
KINDS = {
    "abide-pcp": "m2lgdg.data.readers.abide",
    "rest-meta-mdd": "m2lgdg.data.readers.rest_meta_mdd",
    "bids": "m2lgdg.data.readers.bids",
    "folder": "m2lgdg.data.readers.folder",
}


def read(
    path: str | Path,
    kind: str | None = None,
    *,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
    **options: object,
) -> Cohort:
    """The cohort at `path`: a file that `Cohort.save` wrote, or a folder of a kind we know.

    A bad subject (unreadable file, NaN, wrong columns, not listed ...) stops the reading with its place and reason, or with
    `on_bad="exclude"` is left out and recorded in `Cohort.excluded`. The options are those of the kind's own `read`.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist.")
    if kind == "cohort" or (kind is None and path.is_file()):
        if options:
            raise InputError(f"a cohort file takes no option {next(iter(options))}; it was chosen when the file was made.")
        return Cohort.load(path)
    if kind is not None:
        _module(kind)  # a misspelt kind is the first thing to hear of
    if not path.is_dir():
        what = f"a file; a cohort of kind {kind} is a folder" if kind else "neither a file nor a folder"
        raise InputError(f"{path} is {what}.")
    if not any(path.iterdir()):
        raise InputError(f"{path} is an empty folder.")
    kind = kind or guess(path)
    reader = _module(kind)
    _check_options(reader, kind, options)
    cohort: Cohort = reader.read(path, on_bad=on_bad, progress=progress, **options)
    return cohort


def guess(path: Path) -> str:
    """The kind of a folder."""
    if (path / "dataset.toml").is_file():
        return "folder"  # its owner has said so
    for kind in KINDS:
        if _module(kind).matches(path):
            return kind
    raise InputError(
        f"{path} is of no kind we know: it has no *_rois_*.1D files (abide-pcp), no ROISignals_S*.mat files (rest-meta-mdd), "
        "no dataset_description.json or sub-*/func (bids), and no participants.tsv (folder)."
    )


def _module(kind: str) -> ModuleType:
    if kind not in KINDS:
        raise InputError(f"kind {kind} is not known; it is one of {', '.join(KINDS)}, cohort.")
    return importlib.import_module(KINDS[kind])


def _check_options(reader: ModuleType, kind: str, options: dict[str, object]) -> None:
    known = [name for name in inspect.signature(reader.read).parameters if name not in ("path", "on_bad", "progress")]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}."
            raise InputError(f"kind {kind} has no option {name}; {hint}")
