"""The scans of a release as one Cohort: files are read in parallel, in every atlas, and put into one ROI order.

A reader lists its people (`Participants`) and the files of each atlas (`AtlasFiles`) and calls `read_series`. Columns that are
named are matched by name, columns without names by position.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from m2lgdg.cohort import Cohort, Parcellation, series_defect
from m2lgdg.data.readers.arrays import Rois, Series, numbered_rois
from m2lgdg.data.readers.tables import Participants
from m2lgdg.findings import NO_SERIES, NOT_LISTED, UNUSABLE_FILE, Exclusion, Finding
from m2lgdg.scans import NOT_SERIES
from m2lgdg.storage import InputError

Atlases = str | Sequence[str] | None  # the option atlas of a reader
OnBad = Literal["stop", "exclude"]
Progress = Callable[[int, int], None]
Rename = Callable[[Counter[Rois]], Mapping[Rois, Rois]]
ALL = "all"
JOINED = "runs joined: each run of every subject was z-scored per ROI, then put one after the other"
TRANSPOSE = 'transpose the files, or write orientation = "roi,time" into dataset.toml if all are so'


class NotSeries(InputError):
    """A file that should hold a series holds a connectome; `where` is the file and its subject."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: {NOT_SERIES}.")
        self.where = where


class Scan(NamedTuple):
    """A subject, its site and the files of its runs."""

    subject: str
    site: str
    runs: list[Path]


class AtlasFiles(NamedTuple):
    """The runs of each subject in one atlas, and how to load a scan (None: the scan does not have this atlas).

    `rename` maps the column names of the files to those of the ROIs, given those of all files with their number. An `optional`
    atlas may be that of no scan. `note` is one of the cohort.
    """

    atlas: str
    files: Mapping[str, list[Path]]
    load: Callable[[Scan], tuple[Rois, Series] | None]
    rename: Rename | None = None
    optional: bool = False
    note: str = ""


def requested(atlas: Atlases, available: Iterable[str]) -> tuple[str, ...]:
    """Names of the requested atlases, the first one first; `all` stands for the available ones in alphabetical order."""
    names = (atlas,) if isinstance(atlas, str) else tuple(atlas or ())
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise InputError(f"option atlas: {name!r} is not the name of an atlas.")
        if name in names[:i]:
            raise InputError(f"option atlas: {name} is given twice.")
    if ALL in names and len(names) > 1:
        raise InputError("option atlas: all stands for every atlas and is given alone.")
    return tuple(sorted(set(available))) if names == (ALL,) else names


def chosen(path: Path, atlas: Atlases, available: Iterable[str]) -> tuple[str, ...]:
    """Names of the requested atlases of a folder, or of its only one."""
    known = sorted(set(available))
    names = requested(atlas, known)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None or (not names and len(known) > 1):
        problem = "several atlases; choose one of" if unknown is None else f"no atlas {unknown}; it has"
        raise InputError(f"{path} has {problem} {', '.join(known)}.")
    return names or tuple(known)


def read_series(
    people: Participants,
    atlases: Sequence[AtlasFiles],
    *,
    name: str,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
    complete: Callable[[Participants], Participants] = lambda people: people,
    allow_proxies: bool = False,
) -> Cohort:
    """Cohort of the listed people who have a series of the first atlas.

    A series that is invalid or of somebody who is not listed raises an error; with `on_bad="exclude"` its subject is excluded
    with the reason. Who lacks a further atlas is kept. A scan has as many volumes in every atlas. `complete` adds to the people
    what is known when their files have been read.
    """
    first, *others = atlases
    listed = [
        Scan(one, site, first.files.get(one, [])) for one, site in zip(people.subjects, people.sites.tolist(), strict=True)
    ]
    about = f"atlas {first.atlas}" if others else ""
    present = {one: runs[0] for each in reversed(atlases) for one, runs in each.files.items()}
    excluded = [*people.excluded, *unlisted(people, present, on_bad)]
    excluded += [Exclusion(scan.subject, scan.site, NO_SERIES, about) for scan in listed if not scan.runs]
    rois, series, bad = _gather(first, listed, on_bad, progress)
    if not series:
        raise InputError(f"{people.table}: no listed subject has a series file.")
    excluded += bad
    further: dict[str, tuple[Rois, dict[str, Series]]] = {}
    unusable: list[Finding] = []
    for each in others:
        scans = [scan._replace(runs=each.files.get(scan.subject, [])) for scan in listed if scan.subject in series]
        found_rois, found, bad = _gather(each, scans, on_bad, progress)
        if found:
            further[each.atlas] = found_rois, found
        elif not each.optional:
            raise InputError(f"{people.table}: no subject with a series of atlas {first.atlas} has one of atlas {each.atlas}.")
        for one in bad:
            numbers = {"lacking": each.atlas, "reason": one.reason.rstrip(".")}
            unusable.append(Finding("unusable series", one.site, (one.subject,), numbers))
        excluded += _without_other_lengths(series, found, scans, first.atlas, on_bad)
    row = {one: i for i, one in enumerate(people.subjects)}
    people = complete(people.rows([row[one] for one in series]))
    return Cohort(
        series=list(series.values()),
        subjects=np.array(list(series)),
        sites=people.sites,
        labels=people.labels,
        rois=rois,
        phenotypes=people.phenotypes,
        inputs=people.inputs,
        tr=people.tr,
        atlas=first.atlas,
        name=name,
        excluded=tuple(sorted(excluded)),
        notes=(
            *(each.note for each in atlases if each.note and each.atlas in (first.atlas, *further)),
            *people.notes,
            *unusable,
        ),
        allow_proxies=allow_proxies,
        parcellations={
            atlas: Parcellation(found_rois, [found.get(one) for one in series])
            for atlas, (found_rois, found) in further.items()
        },
    )


def _without_other_lengths(
    series: dict[str, Series], found: Mapping[str, Series], scans: Sequence[Scan], atlas: str, on_bad: OnBad
) -> list[Exclusion]:
    """Take out of `series`, which are of the first atlas, the subjects who have another number of volumes in a further one."""
    excluded = []
    for scan in scans:
        ours, theirs = series[scan.subject], found.get(scan.subject)
        if theirs is not None and len(theirs) != len(ours):
            problem = f"{len(theirs)} volumes, but {len(ours)} in atlas {atlas}"
            error = InputError(f"{scan.runs[0]}: subject {scan.subject}: {problem}.")
            if on_bad == "stop" or len(series) == 1:
                raise error
            del series[scan.subject]
            excluded.append(excluded_file(scan, error))
    return excluded


def unlisted(
    people: Participants, present: Mapping[str, Path], on_bad: OnBad, what: str = "series", kind: str = NOT_LISTED
) -> list[Exclusion]:
    """Subjects with a file who are not listed; if nobody is, the table is most likely that of other data."""
    others = sorted(set(present) - set(people.subjects))
    if not people.subjects:
        raise InputError(f"{people.table} lists no subject.")
    if present and len(others) == len(present):
        example = f"such as {min(present)} ({present[min(present)].name})"
        raise InputError(
            f"{people.table} lists none of the {len(present)} subjects who have a {what}, {example}; its first subject is "
            f"{people.subjects[0]}."
        )
    if others and on_bad == "stop":
        where = f"column {people.column} of {people.table}" if people.column else people.table
        raise InputError(f"{present[others[0]]}: subject {others[0]} is not in {where}.")
    return [Exclusion(one, people.site_of(one), kind) for one in others]


def _gather(
    source: AtlasFiles, scans: Sequence[Scan], on_bad: OnBad, progress: Progress | None
) -> tuple[Rois, dict[str, Series], list[Exclusion]]:
    """ROIs, the valid series by subject in their order, and the subjects whose series is invalid."""
    scans = sorted(scan for scan in scans if scan.runs)
    loaded: list[tuple[Scan, tuple[Rois, Series] | InputError]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, result in enumerate(pool.map(lambda scan: _loaded(source, scan), scans), start=1):
            if isinstance(result, InputError) and on_bad == "stop":
                pool.shutdown(cancel_futures=True)
                raise result
            if result is not None:
                loaded.append((scans[done - 1], result))
            if progress:
                progress(done, len(scans))
    valid = [result for _, result in loaded if not isinstance(result, InputError)]
    if loaded and not valid:
        raise next(result for _, result in loaded if isinstance(result, InputError))
    return _in_one_order(source.rename, loaded, valid, on_bad) if valid else ((), {}, [])


def _in_one_order(
    rename: Rename | None,
    loaded: Sequence[tuple[Scan, tuple[Rois, Series] | InputError]],
    valid: Sequence[tuple[Rois, Series]],
    on_bad: OnBad,
) -> tuple[Rois, dict[str, Series], list[Exclusion]]:
    orders = Counter(rois for rois, _ in valid)
    names = rename(orders) if rename else {}
    rois = Counter(names.get(order, order) for order in orders.elements()).most_common(1)[0][0]
    shapes = {series.shape for _, series in valid}
    # Subjects differ in their number of volumes, never in that of ROIs.
    swapped = len({rows for rows, _ in shapes}) == 1 < len({columns for _, columns in shapes})
    found: dict[str, Series] = {}
    excluded = []
    for scan, result in loaded:
        try:
            if isinstance(result, InputError):
                raise result
            columns, series = result
            ordered = _reordered(scan, names.get(columns, columns), series, rois, swapped)
        except InputError as error:
            if on_bad == "stop":
                raise
            excluded.append(excluded_file(scan, error))
        else:
            ordered.flags.writeable = False  # so that the cohort takes it without a copy
            found[scan.subject] = ordered
    return rois, found, excluded


def _loaded(source: AtlasFiles, scan: Scan) -> tuple[Rois, Series] | InputError | None:
    try:
        result = source.load(scan)
    except InputError as error:
        return error
    defect = None if result is None else series_defect(result[1], result[0])
    where = f"{scan.runs[0]}: subject {scan.subject}"
    if defect == NOT_SERIES:
        return NotSeries(where)
    return InputError(f"{where}: {defect}.") if defect else result


def excluded_file(scan: Scan, error: InputError) -> Exclusion:
    """Exclusion of a subject whose file is unusable."""
    reason = str(error).replace(f"{scan.runs[0].parent}{os.sep}", "")  # cohorts are shared, folder names must not be
    return Exclusion(scan.subject, scan.site, UNUSABLE_FILE, detail=reason)


def _reordered(scan: Scan, columns: Rois, series: Series, rois: Rois, swapped: bool) -> Series:
    if columns == rois:
        return series
    where = f"{scan.runs[0]}: subject {scan.subject}"
    if len(columns) != len(rois):
        hint = _hint(columns, rois, len(series), swapped)
        raise InputError(f"{where}: {len(columns)} ROI columns, but the other subjects have {len(rois)}{hint}.")
    position = {name: i for i, name in enumerate(columns)}
    absent = next((name for name in rois if name not in position), None)
    if absent is not None:
        raise InputError(f"{where}: no column for ROI {absent}, which the other subjects have.")
    return np.ascontiguousarray(series[:, [position[name] for name in rois]])


def _hint(columns: Rois, rois: Rois, rows: int, swapped: bool) -> str:
    if rows == len(rois):
        return f"; its rows are as many as these, so its time and ROI axes seem to be swapped ({TRANSPOSE})"
    if columns != numbered_rois(len(columns)) and set(columns) & set(rois):  # names of a header: not swapped
        absent = [name for name in rois if name not in columns]
        names = absent or [name for name in columns if name not in rois]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"; {'it has no column' if absent else 'only this one has'} {', '.join(names[:3])}{more}"
    if swapped and rows > 1:
        either = "either this file has other ROIs, or the time and ROI axes are swapped in all"
        return f"; all files have {rows} rows and the columns differ, so {either} ({TRANSPOSE})"
    return ""


def joined(runs: Sequence[Path], load: Callable[[Path], tuple[Rois, Series]]) -> tuple[Rois, Series]:
    """The runs of a subject one after the other, each with mean 0 and standard deviation 1 per ROI; a flat ROI stays 0.

    Without z-scoring, the different means and scales of the runs would be steps of the signal, which correlate all ROIs.
    """
    first: Rois = ()
    scaled = []
    for run in runs:
        rois, series = load(run)
        defect = series_defect(series, rois)
        if defect:
            raise InputError(f"{run}: {defect}.")
        first = first or rois
        if set(rois) != set(first):
            raise InputError(f"{run}: its ROIs are not those of {runs[0].name}, so the runs cannot be joined.")
        position = {name: i for i, name in enumerate(rois)}
        wide = series[:, [position[name] for name in first]].astype(np.float64)
        flat = np.ptp(wide, axis=0) == 0
        scaled.append(np.where(flat, 0, (wide - wide.mean(axis=0)) / np.where(flat, 1, wide.std(axis=0))))
    return first, np.concatenate(scaled).astype(np.float32)
