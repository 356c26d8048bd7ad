"""Several atlases of the same scans: which were requested, and their series next to those of the first atlas.

A reader passes its option atlas to `requested` and the files of each atlas to `gather_atlases`, which calls `gather` for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from m2lgdg.cohort import Parcellation
from m2lgdg.data.readers.gather import Gathered, Load, OnBad, Progress, Rename, Rois, Series, SeriesFile, gather
from m2lgdg.findings import NO_SERIES, UNUSABLE_FILE, Exclusion, Finding
from m2lgdg.storage import InputError

Atlases = str | Sequence[str] | None  # the option atlas of a reader
ALL = "all"


class AtlasFiles(NamedTuple):
    """The series files of one atlas and how to load them."""

    atlas: str
    files: Sequence[SeriesFile]
    load: Load
    rename: Rename | None = None


class GatheredAtlases(NamedTuple):
    """The valid subjects of the first atlas, their series in the others, and notes on series that are left out."""

    first: Gathered
    parcellations: dict[str, Parcellation]
    notes: tuple[Finding, ...]


def requested(atlas: Atlases, available: Iterable[str]) -> tuple[str, ...]:
    """Names of the requested atlases, the first one first; `all` stands for the available ones in alphabetical order."""
    names = (atlas,) if isinstance(atlas, str) else tuple(atlas or ())
    wrong = next((name for name in names if not isinstance(name, str) or not name), None)
    if wrong is not None:
        raise InputError(f"option atlas: {wrong!r} is not the name of an atlas.")
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise InputError(f"option atlas: {repeated} is given twice.")
    if ALL in names and len(names) > 1:
        raise InputError("option atlas: all stands for every atlas and is given alone.")
    return tuple(sorted(set(available))) if is_all(names) else names


def is_all(atlas: Atlases) -> bool:
    """Whether every atlas was requested."""
    return atlas == ALL or tuple(atlas or ()) == (ALL,)


def no_series(subject: str, site: str, atlases: Sequence[str]) -> Exclusion:
    """Exclusion of a subject without a series of the first atlas."""
    return Exclusion(subject, site, NO_SERIES, f"atlas {atlases[0]}" if len(atlases) > 1 else "")


def gather_atlases(
    first: AtlasFiles,
    others: Callable[[], Iterable[AtlasFiles]],
    table: Path,
    *,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> GatheredAtlases:
    """Read the files of every atlas; `others` is called when the first atlas has been read.

    A subject without a series of the first atlas is excluded, one without a series of another atlas is kept. An invalid series
    raises an error; with `on_bad="exclude"` its subject is excluded if it is of the first atlas, else it has no series of that
    atlas. The series of a subject must have as many volumes in every atlas, since they are of one scan.
    """
    gathered = gather(first.files, first.load, table, on_bad=on_bad, progress=progress, rename=first.rename)
    position = {each.subject: i for i, each in enumerate(gathered.files)}
    further: dict[str, tuple[Rois, list[Series | None]]] = {}
    notes: list[Finding] = []
    unequal: dict[str, Exclusion] = {}
    for each in others():
        files = [file for file in each.files if file.subject in position]
        if not files:
            raise InputError(f"{table}: no subject with a series of atlas {first.atlas} has one of atlas {each.atlas}.")
        other = gather(files, each.load, table, on_bad=on_bad, progress=progress, rename=each.rename)
        series: list[Series | None] = [None] * len(position)
        for file, one in zip(other.files, other.series, strict=True):
            i = position[file.subject]
            series[i] = one
            if len(one) != len(gathered.series[i]):
                problem = f"{len(one)} volumes, but {len(gathered.series[i])} in atlas {first.atlas}"
                unequal[file.subject] = _excluded(file, problem, on_bad)
        further[each.atlas] = other.rois, series
        for bad in other.excluded:
            numbers = {"lacking": each.atlas, "reason": bad.reason.rstrip(".")}
            notes.append(Finding("unusable series", bad.site, (bad.subject,), numbers))
    return _without(gathered, further, notes, unequal)


def _excluded(file: SeriesFile, problem: str, on_bad: OnBad) -> Exclusion:
    error = InputError(f"{file.path}: subject {file.subject}: {problem}.")
    if on_bad == "stop":
        raise error
    reason = str(error).replace(f"{file.path.parent}{os.sep}", "")  # cohorts are shared, folder names must not be
    return Exclusion(file.subject, file.site, UNUSABLE_FILE, detail=reason)


def _without(
    gathered: Gathered,
    further: dict[str, tuple[Rois, list[Series | None]]],
    notes: list[Finding],
    unequal: dict[str, Exclusion],
) -> GatheredAtlases:
    """The subjects whose series have as many volumes in every atlas; the others are excluded."""
    keep = [i for i, file in enumerate(gathered.files) if file.subject not in unequal]
    if not keep:
        raise InputError(next(iter(unequal.values())).reason)
    first = Gathered(
        [gathered.files[i] for i in keep],
        [gathered.series[i] for i in keep],
        gathered.rois,
        gathered.excluded + list(unequal.values()),
    )
    parcellations = {name: Parcellation(rois, [series[i] for i in keep]) for name, (rois, series) in further.items()}
    return GatheredAtlases(first, parcellations, tuple(notes))
