"""Runs of a subject: entities of their file names, which are read or joined, their TR, head motion and confounds.

Used by the readers of BIDS derivatives, ABIDE II and ADHD-200: each finds the runs of its folder (`FolderRuns`) and reads them
by `read_runs`. Names of the Human Connectome Project and of ADHD-200, which are no BIDS names, have the same entities.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.cohort_arrays import need_seconds
from m2lgdg.data.readers.arrays import MISSING, Rois, Series
from m2lgdg.data.readers.images import header_seconds, is_cifti
from m2lgdg.data.readers.series import JOINED, AtlasFiles, OnBad, Progress, Scan, joined, read_series
from m2lgdg.data.readers.tables import MOTION, Participants, read_text_table
from m2lgdg.findings import Finding, Note
from m2lgdg.storage import InputError, one_line, read_bytes

ENTITY = re.compile(r"(?:^|_)([a-z]+)-([A-Za-z0-9]+)")
# SUBJECT/MNINonLinear/Results/rfMRI_REST1_LR/rfMRI_REST1_LR_Atlas_MSMAll.ptseries.nii: REST1 and REST2 are two sessions.
HCP = re.compile(r"/(?P<sub>\w+)/MNINonLinear/Results/[^/]+/(?P<task>[rt]fMRI)_(?P<ses>[A-Z]+\d?)_(?P<dir>LR|RL|AP|PA)_[^/]*$")
ATHENA = re.compile(r"/[a-z]+(?P<sub>\d+)_session_(?P<ses>\d+)_rest_(?P<run>\d+)_[^/]*_TCs\.1D$")  # of ADHD-200
SCAN_ENTITIES = ("ses", "task", "acq", "ce", "rec", "dir", "run", "echo")  # of the scan from which a series was extracted
RUN_ENTITIES = {"ses", "run", "dir"}  # in which the runs of a subject that are joined may differ
AFTER_SCAN = re.compile(r"_(?:space|desc|atlas|seg|res|den)-|_bold[_.]|_timeseries[_.]")  # what follows the entities of a scan
FIRST = "first"  # value of the option session
LAST_NUMBER = re.compile(r"(.*?)(\d+)")  # of the name of a session
STRATEGIES = ("simple", "scrubbing", "compcor")  # for confounds, by their names in nilearn
CLEANED = "runs detrended and filtered to 0.01-0.1 Hz, confounds of fMRIPrep regressed out by nilearn's strategy {}"
FMRIPREP = "_desc-confounds_timeseries.tsv"
XCPD = ("_motion.tsv", "_desc-filtered_motion.tsv")
DISPLACEMENT = "framewise_displacement"
MEAN_FD, REMOVED = "mean_fd", "scrubbed_volumes"  # phenotype columns
LARGEST_SIDECAR = 16 << 20  # bytes
Runs = dict[str, list[Path]]  # by subject, without sub-


@dataclass
class FolderRuns:
    """The runs of a folder by atlas and subject, how to load one, and notes on which were chosen.

    `strategy` is that of the confounds, if one was given. While runs are loaded, `volumes` takes the number of scrubbed and of
    all volumes of each run with confounds.
    """

    by_atlas: dict[str, Runs]
    load: Callable[[Path], tuple[Rois, Series]]
    join_runs: bool = False
    strategy: str | None = None
    choices: tuple[Note, ...] = ()
    volumes: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def first(self) -> Runs:
        """Runs of the main atlas."""
        return next(iter(self.by_atlas.values()))


def read_runs(
    runs: FolderRuns, people: Participants, *, name: str, on_bad: OnBad, progress: Progress | None, prefix: str = ""
) -> Cohort:
    """Cohort of the listed people who have runs, with their TR and head motion; `prefix` is that of an unlisted subject."""
    trs: dict[str, float] = {}
    motion: dict[str, float] = {}
    concatenated: dict[str, list[Path]] = {}  # files that hold the runs beside them, by subject
    ids = {label(one): one for one in people.subjects}
    files = {
        atlas: {ids.get(one, f"{prefix}{one}"): some for one, some in each.items()} for atlas, each in runs.by_atlas.items()
    }
    main, *_ = files

    def load(scan: Scan) -> tuple[Rois, Series]:
        if not runs.join_runs:
            return runs.load(scan.runs[0])
        loaded = {run: runs.load(run) for run in scan.runs}
        whole = _concatenations(loaded)
        concatenated.update({scan.subject: whole} if whole else {})
        return joined([run for run in scan.runs if run not in whole], loaded.__getitem__)

    def load_first(scan: Scan) -> tuple[Rois, Series]:
        trs[scan.subject] = _one_repetition_time(scan.runs)  # here, so that a bad sidecar file concerns its subject only
        found = load(scan)
        motion[scan.subject] = _mean_displacement([run for run in scan.runs if run not in concatenated.get(scan.subject, ())])
        return found

    def load_other(scan: Scan) -> tuple[Rois, Series]:
        first = files[main][scan.subject]
        if list(map(scan_of, scan.runs)) != list(map(scan_of, first)):
            raise InputError(f"{scan.runs[0]}: it is not of the same run as {first[0].name} of atlas {main}.")
        return load(scan)

    def complete(present: Participants) -> Participants:
        measured = np.array([trs[one] for one in present.subjects])
        present = _with_motion(present, [motion[one] for one in present.subjects], runs)
        if concatenated:
            example = f"{len(concatenated)} subjects, such as {min(concatenated)}"
            text = f"files that hold several runs one after the other were left out beside these runs ({example})"
            present = present._replace(notes=(*present.notes, Finding("run", numbers={"text": text})))
        return present._replace(tr=np.where(np.isnan(measured), present.tr, measured))

    atlases = [
        AtlasFiles(atlas, each, load_first if atlas == main else load_other, note=f"atlas {atlas}")
        for atlas, each in files.items()
    ]
    return read_series(people, atlases, name=name, on_bad=on_bad, progress=progress, complete=complete)


def label(subject: str) -> str:
    """Subject without the prefix sub-."""
    return subject.removeprefix("sub-")


def entities(file: Path) -> dict[str, str]:
    """Entities of a file by their short names (sub, ses, task, run ...)."""
    names = dict(ENTITY.findall(file.name))
    if "sub" in names:
        return names
    match = HCP.search(f"/{file.as_posix()}") or ATHENA.search(f"/{file.name}")
    return names if match is None else match.groupdict()


def has(file: Path, only: str) -> bool:
    """Whether a file name has all of some entities (`task-rest run-01`); `run-`, without a value, is a name without it."""
    name = f"_{file.name}"
    return all(f"_{one}" not in name if one.endswith("-") else f"_{one}_" in name for one in only.split())


def scan_of(file: Path) -> tuple[str | None, ...]:
    """Subject and entities of the scan from which a series was extracted."""
    names = entities(file)
    return tuple(names.get(name) for name in ("sub", *SCAN_ENTITIES))


def by_subject(
    files: Iterable[Path],
    path: Path,
    session: str | None,
    join_runs: bool,
    same: Callable[[str], str] = str,
    joinable: bool = True,
) -> Runs:
    """Runs of each subject in natural order: of the first session, the named one, or (`join_runs` alone) of all.

    Without `join_runs`, a second run is an error. `same` gives the subject of a file name as the table has it. Connectomes are
    not `joinable`.
    """
    joining = ", or join them with join_runs (--join-runs)" if joinable else ""
    chosen: Runs = {}
    for file in sorted(files, key=lambda one: natural_key(one.name)):
        chosen.setdefault(same(entities(file).get("sub", "")), []).append(file)
    if not chosen:
        raise InputError(f"{path} has no run with the requested entities.")
    if session is not None or not join_runs:
        chosen = _of_session(chosen, path, session or FIRST)
    for subject, runs in chosen.items():
        for file in runs[1:]:
            _need_same_kind(file, runs[0])
            if not join_runs:
                whole = [one for one in runs if "run" not in entities(one)]  # XCP-D concatenates runs
                example = "'run-' for the file without it" if 0 < len(whole) < len(runs) else f"for example '{_example(runs)}'"
                raise InputError(
                    f"{file}: subject sub-{subject} has a second run, {runs[0].name}; select one with only, {example}{joining}."
                )
    return chosen


def _example(runs: Sequence[Path]) -> str:
    """An entity that is in the name of the first run alone, such as run-1."""
    named = [f"{name}-{value}" for name, value in entities(runs[0]).items()]
    return next((one for one in named if has(runs[0], one) and not any(has(other, one) for other in runs[1:])), "run-01")


def session_note(files: Iterable[Path], session: str | None, join_runs: bool, joinable: bool = True) -> tuple[Note, ...]:
    """Notes on which session was read, if some subject has several, and on who has only a later one."""
    sessions: dict[str, set[str]] = {}
    for file in files:
        names = entities(file)
        sessions.setdefault(names.get("sub", ""), set()).add(names.get("ses", ""))
    later = _only_later(sessions) if session in (None, FIRST) else ()
    note: tuple[Note, ...] = (Finding("later session", "", later),) if later else ()
    several = sum(len(each) > 1 for each in sessions.values())
    if not several:
        return note
    subjects = f"({several} of {len(sessions)} subjects have several)"
    if session is not None and session != FIRST:
        text = f"{session.removeprefix('ses-')} {subjects}"
    elif session is None and join_runs:
        text = f"all, joined {subjects}"
    else:
        joining = ", --join-runs joins them" if joinable else ""
        text = f"the first of each subject {subjects}; --session NAME selects another one{joining}"
    return (Finding("session", numbers={"text": text}), *note)


def _only_later(sessions: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Subjects without a first session, where others have one: names say follow-up, or are numbered after a common stem."""
    every = {name for names in sessions.values() for name in names}
    parts = {name: LAST_NUMBER.fullmatch(name) for name in every}
    first = min((int(part[2]) for part in parts.values() if part), default=0)
    numbered = all(parts.values()) and len({part[1] for part in parts.values() if part}) == 1

    def is_later(name: str) -> bool:
        part = parts[name]
        return "follow" in name.lower() or bool(numbered and part and int(part[2]) > first)

    later = [subject for subject, names in sessions.items() if all(map(is_later, names))]
    return tuple(sorted(later, key=natural_key)) if len(later) < len(sessions) else ()


def _of_session(runs: Runs, path: Path, session: str) -> Runs:
    chosen: Runs = {}
    available: set[str] = set()
    for subject, files in runs.items():
        names = [entities(file).get("ses", "") for file in files]
        available.update(names)
        wanted = session.removeprefix("ses-") if session != FIRST else names[0]
        # Files without a session next to others are left to the check for a second run.
        some = [
            file for file, name in zip(files, names, strict=True) if name == wanted or (session == FIRST and not all(names))
        ]
        chosen |= {subject: some} if some else {}
    if not chosen:
        known = sorted(available - {""}, key=natural_key)
        sessions = f"its sessions are {', '.join(known)}" if known else "its file names have no sessions"
        raise InputError(f"{path} has no run of session {session.removeprefix('ses-')}; {sessions}.")
    return chosen


def _need_same_kind(file: Path, other: Path) -> None:
    """Refuse to join what are no runs of one kind, such as one run in two spaces or runs of two tasks."""
    own, first = entities(file), entities(other)
    names = (set(first) | set(own)) - RUN_ENTITIES
    differing = sorted(name for name in names if first.get(name) != own.get(name))
    if differing:
        example = f"{differing[0]}-{first.get(differing[0], '')}"  # those without it, if the first has none
        raise InputError(
            f"{file}: subject sub-{own['sub']} has runs that differ in {', '.join(differing)} ({other.name}) and are not "
            f"joined; select those to join with only, for example '{example}'."
            if set(differing) & set(SCAN_ENTITIES)
            else f"{file}: subject sub-{own['sub']} has one run in two forms, which differ in {', '.join(differing)} "
            f"({other.name}); select one with only (--only {example})."
        )


def repetition_time(file: Path) -> float:
    """Seconds per volume from the axis of a CIFTI-2 file, else the JSON sidecar, else the header of an image, else NaN."""
    seconds = header_seconds(file) if is_cifti(file) else math.nan
    if not math.isnan(seconds):
        return seconds
    for sidecar in (file.with_suffix(".json"), Path(re.sub(r"(\.[dp]tseries)?\.nii(\.gz)?$", ".json", str(file)))):
        if sidecar.suffix == ".json" and sidecar.is_file():
            try:
                seconds = float(json.loads(read_bytes(sidecar, LARGEST_SIDECAR)).get("RepetitionTime", math.nan))
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                raise InputError(f"{sidecar} has no readable RepetitionTime.") from None
            if seconds <= 0 or math.isinf(seconds):
                raise InputError(f"{sidecar} has a RepetitionTime of {seconds:g} s.")
            if not math.isnan(seconds):
                return need_seconds(seconds, f"{sidecar}, RepetitionTime")
    return math.nan if is_cifti(file) else header_seconds(file)


def _concatenations(loaded: Mapping[Path, tuple[Rois, Series]]) -> list[Path]:
    """Files without the entity of a run (or direction, or session) that hold the runs beside them: XCP-D joins runs, too."""
    entity = {run: {name: value for name, value in entities(run).items() if name in RUN_ENTITIES} for run in loaded}
    found = []
    for file, (_, series) in loaded.items():
        inside = [loaded[run][1] for run in loaded if entity[file].items() < entity[run].items()]
        same = len(inside) == 1 and inside[0].shape == series.shape and np.allclose(inside[0], series, rtol=1e-3)
        if same or (len(inside) > 1 and sum(map(len, inside)) == len(series)):
            found.append(file)
    return found


def _one_repetition_time(runs: list[Path]) -> float:
    first, *others = (repetition_time(run) for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        if not np.isclose(first, other, rtol=1e-3, equal_nan=True):
            raise InputError(
                f"{run}: a TR of {other:g} s, but {runs[0].name} has {first:g} s, so the runs cannot be joined; "
                f"select one with only, for example '{_example(runs)}'."
            )
    return first


class Confounds(NamedTuple):
    """Regressors of a run, and the volumes to keep; None where there are none, and where all are kept."""

    regressors: Any
    sample_mask: npt.NDArray[np.int_] | None


def confounds_table(run: Path) -> Path | None:
    """fMRIPrep's table of confounds in the folder of a run."""
    return _next_to(run, (FMRIPREP,))


def load_confounds(run: Path, strategy: str | None) -> Confounds:
    """Confounds of a run by a strategy of nilearn, `simple` by default; a run without a table has none."""
    table = confounds_table(run)
    if table is None:
        if strategy is not None:
            raise InputError(f"{run}: no {_scan_name(run)}{FMRIPREP} in its folder, which option confounds ({strategy}) needs.")
        return Confounds(None, None)
    from nilearn.interfaces.fmriprep import load_confounds_strategy

    strategy = strategy or STRATEGIES[0]
    try:
        confounds = Confounds(*load_confounds_strategy(str(run), denoise_strategy=strategy))
    except Exception as error:  # nilearn raises errors of its own for missing columns and sidecar files
        raise InputError(f"{table}: confounds of strategy {strategy} cannot be loaded ({one_line(error)}).") from None
    if confounds.sample_mask is not None and not len(confounds.sample_mask):
        raise InputError(f"{table}: confounds of strategy {strategy} leave no volume.")
    return confounds


def _with_motion(people: Participants, displacement: Sequence[float], runs: FolderRuns) -> Participants:
    """The people with head motion, unless their table has it, scrubbed volumes, and notes on what was done with their runs."""
    added: dict[str, object] = {}
    notes: list[Note] = list(runs.choices)
    if runs.volumes:
        notes.append(CLEANED.format(runs.strategy or STRATEGIES[0]))
    if runs.join_runs:
        notes.append(JOINED)
    if not np.isnan(displacement).all() and not {str(name).lower() for name in people.phenotypes.columns} & set(MOTION):
        added[MEAN_FD] = np.asarray(displacement, dtype=np.float64)
    counts = {one: [runs.volumes[run] for run in runs.first[label(one)] if run in runs.volumes] for one in people.subjects}
    lost = {one: sum(each[0] for each in count) for one, count in counts.items() if count}
    if any(lost.values()) or (runs.strategy == "scrubbing" and lost):
        added[REMOVED] = np.array([lost.get(one, np.nan) for one in people.subjects], dtype=np.float64)
        listed = {one: f"{count} of {sum(each[1] for each in counts[one])}" for one, count in lost.items() if count}
        notes.append(Finding("scrubbed", "", tuple(listed), {"listed": listed or "none"}))
    return people._replace(phenotypes=people.phenotypes.assign(**added), notes=(*people.notes, *notes))


def _mean_displacement(runs: Sequence[Path]) -> float:
    """Mean framewise displacement over all volumes of all runs, also of those that are scrubbed; NaN if a run has none."""
    tables = [_next_to(run, (FMRIPREP, *XCPD)) for run in runs]
    values = [_displacement(table) for table in tables if table is not None]
    if len(values) < len(runs) or not any(map(len, values)):
        return math.nan
    return float(np.concatenate(values).mean())


def _displacement(path: Path) -> npt.NDArray[np.float64]:
    table = read_text_table(path)
    values = []
    for line, cell in table.get(DISPLACEMENT, pd.Series(dtype=str)).items():
        try:
            values.append(math.nan if cell.lower() in MISSING else float(cell))
        except ValueError:
            raise InputError(f"{path}, line {line}, column {DISPLACEMENT}: {cell[:40]!r} is not a number.") from None
    displacement = np.array(values, dtype=np.float64)
    return displacement[np.isfinite(displacement)]


def _scan_name(run: Path) -> str:
    return AFTER_SCAN.split(run.name)[0]


def _next_to(run: Path, endings: Sequence[str]) -> Path | None:
    return next((file for end in endings if (file := run.with_name(f"{_scan_name(run)}{end}")).is_file()), None)
