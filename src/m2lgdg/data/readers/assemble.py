"""Cohort of listed subjects and their runs: what the readers of BIDS derivatives, ABIDE II and ADHD-200 have in common.

Each of them reads its table of subjects and finds the runs of its folder; `read_runs` loads them and adds TR and head motion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers import cifti
from m2lgdg.data.readers.confounds import add_motion, mean_displacement
from m2lgdg.data.readers.gather import JOINED, Load, OnBad, Progress, Rois, Series, SeriesFile, joined, need_listed
from m2lgdg.data.readers.images import load_image
from m2lgdg.data.readers.participants import Participants
from m2lgdg.data.readers.runs import Runs, need_same_runs
from m2lgdg.data.readers.several import AtlasFiles, gather_atlases, no_series
from m2lgdg.data.readers.tables import need_seconds
from m2lgdg.findings import NOT_LISTED, Exclusion, Note
from m2lgdg.storage import InputError, read_bytes

TIME_UNITS = {"sec": 1.0, "unknown": 1.0, "msec": 1e-3, "usec": 1e-6}  # of a NIfTI header, in seconds
LARGEST_SIDECAR = 16 << 20  # bytes
CLEANED = "runs detrended and filtered to 0.01-0.1 Hz, confounds of fMRIPrep regressed out by nilearn's strategy {}"


@dataclass
class FolderRuns:
    """The runs of a folder by atlas and subject, how to load one, and notes on which were chosen.

    `strategy` is that of the confounds, if one was given. While the runs are loaded, `volumes` takes the number of scrubbed
    and of all volumes of each run with confounds.
    """

    by_atlas: dict[str, Runs]
    load: Load
    join_runs: bool = False
    strategy: str | None = None
    choices: tuple[Note, ...] = ()
    volumes: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def atlases(self) -> tuple[str, ...]:
        """Names of the atlases, the main one first."""
        return tuple(self.by_atlas)

    @property
    def first(self) -> Runs:
        """Runs of the main atlas."""
        return self.by_atlas[self.atlases[0]]

    def notes(self) -> tuple[Note, ...]:
        """Which runs were read, and what was done with them."""
        cleaned = (CLEANED.format(self.strategy or "simple"),) if self.volumes else ()
        return (*self.choices, *cleaned, *((JOINED,) if self.join_runs else ()))

    def scrubbed(self, runs: Sequence[Path]) -> tuple[int, int] | None:
        """Scrubbed and all volumes of the runs of a subject; None if they have no confounds."""
        counts = [self.volumes[run] for run in runs if run in self.volumes]
        return (sum(each[0] for each in counts), sum(each[1] for each in counts)) if counts else None


def read_runs(
    runs: FolderRuns,
    people: Participants,
    table: Path,
    *,
    name: str,
    on_bad: OnBad,
    progress: Progress | None,
    prefix: str = "",
) -> Cohort:
    """Cohort of the listed people who have runs; `prefix` comes before subjects who are not listed."""
    order = {label(one): i for i, one in enumerate(people.subjects)}
    every = {one: files[0] for each in reversed(runs.by_atlas.values()) for one, files in each.items()}
    need_listed(every, order, table)
    excluded = [
        no_series(one, str(people.sites[i]), runs.atlases)
        for i, one in enumerate(people.subjects)
        if label(one) not in runs.first
    ]
    for one in sorted(set(every) - set(order)):
        if on_bad == "stop":
            raise InputError(f"{every[one]}: subject {prefix}{one} is not in {table}.")
        excluded.append(Exclusion(f"{prefix}{one}", "", NOT_LISTED))
    files = {each[0]: each for each in runs.first.values()}  # all runs of a subject by its first one
    trs: dict[Path, float] = {}
    motion: dict[Path, float] = {}

    def load_first(file: Path) -> tuple[Rois, Series]:
        trs[file] = _one_repetition_time(files[file])  # here, so that a bad sidecar file concerns its subject only
        motion[file] = mean_displacement(files[file])
        return joined(files[file], runs.load) if runs.join_runs else runs.load(file)

    def load_other(file: Path, others: Mapping[Path, list[Path]], firsts: Mapping[Path, list[Path]]) -> tuple[Rois, Series]:
        need_same_runs(others[file], firsts[file], runs.atlases[0])
        return joined(others[file], runs.load) if runs.join_runs else runs.load(file)

    def further(atlas: str) -> AtlasFiles:
        present = {one: each for one, each in runs.by_atlas[atlas].items() if one in runs.first}
        others = {each[0]: each for each in present.values()}
        firsts = {each[0]: runs.first[one] for one, each in present.items()}
        return AtlasFiles(atlas, _listed(people, present), partial(load_other, others=others, firsts=firsts))

    gathered, parcellations, notes = gather_atlases(
        AtlasFiles(runs.atlases[0], _listed(people, runs.first), load_first),
        lambda: [further(atlas) for atlas in runs.atlases[1:]],
        table,
        on_bad=on_bad,
        progress=progress,
    )
    rows = [order[label(each.subject)] for each in gathered.files]
    paths = [each.path for each in gathered.files]
    measured = np.array([trs[path] for path in paths])
    scrubbed = [runs.scrubbed(files[path]) for path in paths]
    phenotypes, lost = add_motion(people.phenotypes.iloc[rows], [motion[path] for path in paths], scrubbed, runs.strategy)
    return Cohort(
        series=gathered.series,
        subjects=np.array([each.subject for each in gathered.files]),
        sites=people.sites[rows],
        labels=people.labels[rows],
        rois=gathered.rois,
        phenotypes=phenotypes,
        inputs=people.inputs,
        tr=np.where(np.isnan(measured), people.tr[rows], measured),
        atlas=runs.atlases[0],
        name=name,
        excluded=tuple(sorted(excluded + gathered.excluded)),
        notes=(*(f"atlas {atlas}" for atlas in runs.atlases), *people.notes, *runs.notes(), *lost, *notes),
        parcellations=parcellations,
    )


def label(subject: str) -> str:
    """Subject without the prefix sub-."""
    return subject.removeprefix("sub-")


def _listed(people: Participants, runs: Runs) -> list[SeriesFile]:
    listed = zip(people.subjects, people.sites.tolist(), strict=True)
    return [SeriesFile(one, site, runs[label(one)][0]) for one, site in listed if label(one) in runs]


def repetition_time(file: Path) -> float:
    """RepetitionTime from the JSON sidecar of a file, else from the header of an image, else NaN; in seconds.

    A header states its unit of time; one without a unit is taken as seconds. A CIFTI-2 file has the time in its axis, which
    comes first.
    """
    seconds = cifti.repetition_time(file) if cifti.is_cifti(file) else np.nan
    if not np.isnan(seconds):
        return seconds
    for sidecar in (file.with_suffix(".json"), Path(re.sub(r"(\.[dp]tseries)?\.nii(\.gz)?$", ".json", str(file)))):
        if sidecar.suffix == ".json" and sidecar.is_file():
            try:
                content = json.loads(read_bytes(sidecar, LARGEST_SIDECAR))
                seconds = float(content.get("RepetitionTime", np.nan))
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                raise InputError(f"{sidecar} has no readable RepetitionTime.") from None
            if seconds <= 0 or np.isinf(seconds):
                raise InputError(f"{sidecar} has a RepetitionTime of {seconds:g} s.")
            return need_seconds(seconds, f"{sidecar}, RepetitionTime")
    if not file.name.endswith(".nii.gz"):
        return np.nan
    header = load_image(file).header
    zooms: tuple[float, ...] = header.get_zooms()
    try:
        unit = TIME_UNITS.get(header.get_xyzt_units()[1], np.nan)  # NaN for hertz and other units that are no time
    except KeyError:
        raise InputError(f"{file}, header: its unit of time has an unknown code; write the TR into a JSON sidecar.") from None
    seconds = float(zooms[3]) * unit if len(zooms) == 4 and zooms[3] > 0 else np.nan
    return need_seconds(seconds, f"{file}, header")


def _one_repetition_time(runs: list[Path]) -> float:
    """Repetition time that all runs of a subject have."""
    first, *others = (repetition_time(run) for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        if not np.isclose(first, other, rtol=1e-3, equal_nan=True):
            raise InputError(
                f"{run}: a TR of {other:g} s, but {runs[0].name} has {first:g} s, so the runs cannot be joined; "
                "select one with only, for example 'run-01'."
            )
    return first
