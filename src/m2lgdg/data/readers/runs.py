"""Runs of a subject: the entities in their file names, which session and run is read, and which runs can be joined.

Used by readers before they load anything. Names of the Human Connectome Project and of ADHD-200, which are no BIDS names, have
the same entities.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from m2lgdg.cohort import natural_key
from m2lgdg.findings import Finding
from m2lgdg.storage import InputError

ENTITY = re.compile(r"(?:^|_)([a-z]+)-([A-Za-z0-9]+)")
# SUBJECT/MNINonLinear/Results/rfMRI_REST1_LR/rfMRI_REST1_LR_Atlas_MSMAll.ptseries.nii: REST1 and REST2 are two sessions.
HCP = re.compile(r"/(?P<sub>\w+)/MNINonLinear/Results/[^/]+/(?P<task>[rt]fMRI)_(?P<ses>[A-Z]+\d?)_(?P<dir>LR|RL|AP|PA)_[^/]*$")
ATHENA = re.compile(r"/[a-z]+(?P<sub>\d+)_session_(?P<ses>\d+)_rest_(?P<run>\d+)_[^/]*_TCs\.1D$")  # of ADHD-200
SCAN_ENTITIES = ("ses", "task", "acq", "ce", "rec", "dir", "run", "echo")  # of the scan from which a series was extracted
RUN_ENTITIES = {"ses", "run", "dir"}  # in which the runs of a subject that are joined may differ
FIRST = "first"  # value of the option session
Runs = dict[str, list[Path]]  # by subject, without sub-


def entities(file: Path) -> dict[str, str]:
    """Entities of a file by their short names (sub, ses, task, run ...)."""
    names = dict(ENTITY.findall(file.name))
    if "sub" in names:
        return names
    match = HCP.search(f"/{file.as_posix()}") or ATHENA.search(f"/{file.name}")
    return names if match is None else match.groupdict()


def subject_of(file: Path) -> str:
    """Subject of a file, without sub-."""
    return entities(file).get("sub", "")


def scan_of(file: Path) -> tuple[str | None, ...]:
    """Subject and entities of the scan from which a series was extracted."""
    names = entities(file)
    return tuple(names.get(name) for name in ("sub", *SCAN_ENTITIES))


def has_entities(file: Path, only: str) -> bool:
    """Whether a file name has all the entities of the option only, such as "task-rest run-01"."""
    return all(f"_{part}_" in f"_{file.name}" for part in only.split())


def by_subject(
    files: Iterable[Path], path: Path, session: str | None, join_runs: bool, same: Callable[[str], str] = str
) -> Runs:
    """Runs of each subject in natural order; without `join_runs`, a second run of a session is an error.

    Of a subject with several sessions, the first is read, or the one that `session` names. With `join_runs` and without
    `session`, all of them are. `same` gives the subject of a file name as the table has it.
    """
    chosen: Runs = {}
    for file in sorted(files, key=lambda one: natural_key(one.name)):
        chosen.setdefault(same(subject_of(file)), []).append(file)
    if not chosen:
        raise InputError(f"{path} has no run with the requested entities.")
    if session is not None or not join_runs:
        chosen = _of_session(chosen, path, session or FIRST)
    for subject, runs in chosen.items():
        for file in runs[1:]:
            if not join_runs:
                raise InputError(
                    f"{file}: subject sub-{subject} has a second run, {runs[0].name}; select one with only, "
                    "for example 'run-01', or join them with join_runs (--join-runs)."
                )
            _need_same_kind(file, runs[0])
    return chosen


def session_note(files: Iterable[Path], session: str | None, join_runs: bool) -> Finding | None:
    """Note on which session was read; None if no subject has several."""
    sessions: dict[str, set[str]] = {}
    for file in files:
        names = entities(file)
        sessions.setdefault(names.get("sub", ""), set()).add(names.get("ses", ""))
    several = sum(len(each) > 1 for each in sessions.values())
    if not several:
        return None
    subjects = f"{several} of {len(sessions)} subjects have several"
    if session is not None and session != FIRST:
        return Finding("session", numbers={"text": f"{_label(session)} ({subjects})"})
    if session is None and join_runs:
        return Finding("session", numbers={"text": f"all, joined ({subjects})"})
    first = f"the first of each subject ({subjects}); --session NAME selects another one, --join-runs joins them"
    return Finding("session", numbers={"text": first})


def _label(session: str) -> str:
    return session.removeprefix("ses-")


def _of_session(runs: Runs, path: Path, session: str) -> Runs:
    """The runs of one session: the first of each subject, or the named one, which some subjects may lack."""
    available = {subject: [entities(file).get("ses", "") for file in files] for subject, files in runs.items()}
    if session == FIRST:  # files without a session next to others are left to the check for a second run
        wanted = {subject: names[0] for subject, names in available.items() if all(names)}
        return {
            subject: [file for file, name in zip(files, available[subject], strict=True) if name == wanted.get(subject, name)]
            for subject, files in runs.items()
        }
    chosen = {
        subject: [file for file, name in zip(files, available[subject], strict=True) if name == _label(session)]
        for subject, files in runs.items()
    }
    if not any(chosen.values()):
        names = sorted({name for each in available.values() for name in each if name}, key=natural_key)
        sessions = f"its sessions are {', '.join(names)}" if names else "its file names have no sessions"
        raise InputError(f"{path} has no run of session {_label(session)}; {sessions}.")
    return {subject: files for subject, files in chosen.items() if files}


def _need_same_kind(file: Path, other: Path) -> None:
    """Refuse to join what are no runs of one kind, such as one run in two spaces or runs of two tasks."""
    own, first = entities(file), entities(other)
    names = (set(first) | set(own)) - RUN_ENTITIES
    differing = sorted(name for name in names if first.get(name) != own.get(name))
    if differing:
        example = f"{differing[0]}-{first.get(differing[0]) or own[differing[0]]}"
        raise InputError(
            f"{file}: subject sub-{own['sub']} has runs that differ in {', '.join(differing)} ({other.name}) and are not "
            f"joined; select those to join with only, for example '{example}'."
        )


def need_same_runs(runs: Sequence[Path], first: Sequence[Path], atlas: str) -> None:
    """Refuse a series that was not extracted from the runs of the first atlas."""
    if [scan_of(run) for run in runs] != [scan_of(run) for run in first]:
        raise InputError(f"{runs[0]}: it is not of the same run as {first[0].name} of atlas {atlas}.")
