"""Reader of BIDS derivatives: XCP-D `*_timeseries.tsv` tables, or preprocessed NIfTI runs parcellated with an atlas image.

Called by `m2lgdg.read`. participants.tsv is in the folder or is given separately, because derivatives often lack it.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort, Exclusion, natural_key
from m2lgdg.data.readers.gather import JOINED, Load, OnBad, Progress, Rois, Series, SeriesFile, joined
from m2lgdg.data.readers.images import DAMAGED, load_image, need_whole
from m2lgdg.data.readers.participants import Participants, read_participants
from m2lgdg.data.readers.several import Atlases, AtlasFiles, gather_atlases, no_series, requested
from m2lgdg.data.readers.tables import need_columns, need_distinct, need_seconds, numeric, read_text_table
from m2lgdg.data.readers.text import read_table
from m2lgdg.storage import InputError, one_line, read_bytes

ENTITY = re.compile(r"(?:^|_)([a-z]+)-([A-Za-z0-9]+)")
TABLES = "**/sub-*_timeseries.tsv"
IMAGES = "**/sub-*_desc-*_bold.nii.gz"
ADVICE = "give the words of each class with the options patient and control: --patient WORD,WORD --control WORD"
# How to name the column of a role that was not found, by role.
COLUMNS = {role: f"rename the right one to {role}" for role in ("subject", "label")}
COLUMNS["site"] = "rename the right one to site, or name one site for all with the option site (--site-name NAME)"
Runs = dict[str, list[Path]]  # by subject, without sub-
SCAN_ENTITIES = ("ses", "task", "acq", "ce", "rec", "dir", "run", "echo")  # of the scan from which a series was extracted
RUN_ENTITIES = {"ses", "run", "dir"}  # in which the runs of a subject that are joined may differ
TIME_UNITS = {"sec": 1.0, "unknown": 1.0, "msec": 1e-3, "usec": 1e-6}  # of a NIfTI header, in seconds
LARGEST_SIDECAR = 16 << 20  # bytes
BAND = (0.01, 0.1)  # Hz, as in both releases


def matches(path: Path) -> bool:
    """Whether a folder looks like BIDS derivatives."""
    return (path / "dataset_description.json").is_file() or any(path.glob("sub-*/**/func/*"))


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    participants: str | Path | None = None,
    atlas_image: str | Path | None = None,
    atlas_labels: str | Path | None = None,
    only: str = "",
    site: str | None = None,
    patient: str = "",
    control: str = "",
    join_runs: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects of participants.tsv that have a series.

    `atlas` selects the `_atlas-` entity, or several, which must be of the same runs; `"all"` stands for all of them.
    `atlas_image` (with `atlas_labels`, a table of index and name) extracts the series
    from NIfTI runs instead. `only` lists entities that a file name must have ("task-rest run-01"), needed if a subject has
    several runs, unless `join_runs` puts them one after the other in the order of their names: each run of every subject, also
    of one with a single run, is z-scored per ROI first, and all runs of a subject must have one TR. `patient` and `control`
    are the words of the label column for each class, separated by commas, if they are not the usual ones. An ROI that is NaN
    at every volume (too little coverage) becomes flat, and `check` counts it as such.
    """
    table = Path(participants) if participants else path / "participants.tsv"
    patients, controls = _words(patient), _words(control)
    need_distinct(patients, controls, "options patient and control")
    people = read_participants(table, patient=patients, control=controls, site=site, advice=ADVICE, where=COLUMNS, same=_label)
    load: Load = _load_table
    if atlas_image is None:
        by_atlas = _series_tables(path, atlas, only, join_runs)
    else:
        parcellation = _Parcellation(Path(atlas_image), Path(atlas_labels) if atlas_labels else None)
        images = [file for file in sorted(path.glob(IMAGES)) if _has(file, only)]
        by_atlas = {_image_atlas(atlas, Path(atlas_image)): _by_subject(images, path, join_runs)}
        load = parcellation.load
    atlases = tuple(by_atlas)
    runs = by_atlas[atlases[0]]
    order = {_label(one): i for i, one in enumerate(people.subjects)}
    excluded = [
        Exclusion(one, str(people.sites[i]), no_series(atlases))
        for i, one in enumerate(people.subjects)
        if _label(one) not in runs
    ]
    every = {name: files[0] for each in reversed(by_atlas.values()) for name, files in each.items()}
    for name in sorted(set(every) - set(order)):
        if on_bad == "stop":
            raise InputError(f"{every[name]}: subject sub-{name} is not in {table}.")
        excluded.append(Exclusion(f"sub-{name}", "", "series file but not listed"))
    trs: dict[Path, float] = {}

    def load_with_tr(file: Path) -> tuple[Rois, Series]:
        together = runs[_subject_of(file)]
        trs[file] = _one_repetition_time(together)  # here, so that a bad sidecar file concerns its subject only
        return joined(together, load) if join_runs else load(file)

    def load_same_runs(file: Path, others: Runs) -> tuple[Rois, Series]:
        together = others[_subject_of(file)]
        _need_same_runs(together, runs[_subject_of(file)], atlases[0])
        return joined(together, load) if join_runs else load(file)

    gathered, parcellations, notes = gather_atlases(
        AtlasFiles(atlases[0], _series_files(people, runs), load_with_tr),
        lambda: [
            AtlasFiles(name, _series_files(people, by_atlas[name]), partial(load_same_runs, others=by_atlas[name]))
            for name in atlases[1:]
        ],
        table,
        on_bad=on_bad,
        progress=progress,
    )
    rows = [order[_label(each.subject)] for each in gathered.files]
    measured = np.array([trs[each.path] for each in gathered.files])
    return Cohort(
        series=gathered.series,
        subjects=np.array([each.subject for each in gathered.files]),
        sites=people.sites[rows],
        labels=people.labels[rows],
        rois=gathered.rois,
        phenotypes=people.phenotypes.iloc[rows],
        inputs=people.inputs,
        tr=np.where(np.isnan(measured), people.tr[rows], measured),
        atlas=atlases[0],
        name=path.resolve().name,
        excluded=tuple(sorted(excluded + gathered.excluded)),
        notes=(*(f"atlas {name}" for name in atlases), *people.notes, *((JOINED,) if join_runs else ()), *notes),
        parcellations=parcellations,
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def _label(subject: str) -> str:
    return subject.removeprefix("sub-")


def _subject_of(file: Path) -> str:
    return str(dict(ENTITY.findall(file.name))["sub"])


def _series_files(people: Participants, runs: Runs) -> list[SeriesFile]:
    listed = zip(people.subjects, people.sites.tolist(), strict=True)
    return [SeriesFile(one, site, runs[_label(one)][0]) for one, site in listed if _label(one) in runs]


def _image_atlas(atlas: Atlases, image: Path) -> str:
    """Name of the atlas of an image: the one that was given, or that of the file."""
    names = requested(atlas, ())
    if len(names) > 1:
        raise InputError(f"{image} is one atlas; give one name with atlas (--atlas), not {len(names)}.")
    return names[0] if names else image.name.split(".")[0]


def _need_same_runs(runs: list[Path], first: list[Path], atlas: str) -> None:
    """Refuse a series that was not extracted from the runs of the first atlas."""
    scans, expected = (
        [[dict(ENTITY.findall(run.name)).get(name) for name in SCAN_ENTITIES] for run in each] for each in (runs, first)
    )
    if scans != expected:
        raise InputError(f"{runs[0]}: it is not of the same run as {first[0].name} of atlas {atlas}.")


def _has(file: Path, only: str) -> bool:
    return all(f"_{part}_" in f"_{file.name}" for part in only.split())


def _series_tables(path: Path, atlas: Atlases, only: str, join_runs: bool) -> dict[str, Runs]:
    """Runs of the requested atlases, or of the only one, by atlas."""
    groups: dict[str, list[Path]] = {}
    for file in sorted(path.glob(TABLES)):
        entities = dict(ENTITY.findall(file.name))
        if "atlas" in entities or "seg" in entities:
            groups.setdefault(entities.get("atlas") or entities["seg"], []).append(file)
    if not groups:
        raise InputError(f"{path} has no series tables (sub-*_atlas-*_timeseries.tsv); for NIfTI runs give an atlas image.")
    names = requested(atlas, groups)
    if not names and len(groups) > 1:
        raise InputError(f"{path} has several atlases; choose one of {', '.join(sorted(groups))}.")
    unknown = next((name for name in names if name not in groups), None)
    if unknown is not None:
        raise InputError(f"{path} has no atlas {unknown}; it has {', '.join(sorted(groups))}.")
    return {name: _by_subject([file for file in groups[name] if _has(file, only)], path, join_runs) for name in names or groups}


def _by_subject(files: list[Path], path: Path, join_runs: bool) -> Runs:
    """Runs of each subject in natural order; without `join_runs`, a second run is an error."""
    if not files:
        raise InputError(f"{path} has no run with the requested entities.")
    chosen: Runs = {}
    for file in sorted(files, key=lambda one: natural_key(one.name)):
        entities = dict(ENTITY.findall(file.name))
        runs = chosen.setdefault(entities.get("sub", ""), [])
        if runs and not join_runs:
            raise InputError(
                f"{file}: subject sub-{entities.get('sub', '')} has a second run, {runs[0].name}; select one with only, "
                "for example 'run-01', or join them with join_runs (--join-runs)."
            )
        if runs:
            _need_same_kind(file, entities, runs[0])
        runs.append(file)
    return chosen


def _need_same_kind(file: Path, entities: dict[str, str], other: Path) -> None:
    """Refuse to join what are no runs of one kind, such as one run in two spaces or runs of two tasks."""
    first = dict(ENTITY.findall(other.name))
    names = (set(first) | set(entities)) - RUN_ENTITIES
    differing = sorted(name for name in names if first.get(name) != entities.get(name))
    if differing:
        example = f"{differing[0]}-{first.get(differing[0]) or entities[differing[0]]}"
        raise InputError(
            f"{file}: subject sub-{entities['sub']} has runs that differ in {', '.join(differing)} ({other.name}) and are not "
            f"joined; select those to join with only, for example '{example}'."
        )


def _load_table(file: Path) -> tuple[Rois, Series]:
    names, series = read_table(file)
    if names is None or len(names) != series.shape[1]:
        raise InputError(f"{file}: the first line does not name the {series.shape[1]} ROI columns.")
    return tuple(names), _flatten_absent(series)


def _flatten_absent(series: Series) -> Series:
    """Set ROIs without coverage, which are NaN at every volume, to a flat zero signal."""
    return np.where(np.isnan(series).all(axis=0), np.float32(0), series)


def _repetition_time(file: Path) -> float:
    """RepetitionTime from the JSON sidecar of a file, else from the header of an image, else NaN; in seconds.

    A header states its unit of time; one without a unit is taken as seconds.
    """
    for sidecar in (file.with_suffix(".json"), Path(str(file).replace(".nii.gz", ".json"))):
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
    first, *others = (_repetition_time(run) for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        if not np.isclose(first, other, rtol=1e-3, equal_nan=True):
            raise InputError(
                f"{run}: a TR of {other:g} s, but {runs[0].name} has {first:g} s, so the runs cannot be joined; "
                "select one with only, for example 'run-01'."
            )
    return first


class _Parcellation:
    """Mean signal of each atlas region, denoised if fMRIPrep's confounds are next to the run."""

    def __init__(self, image: Path, labels: Path | None) -> None:
        self.image = load_image(image)
        need_whole(image, self.image)
        if self.image.ndim < 3 or self.image.shape[3:] not in ((), (1,)):
            raise InputError(f"{image} has shape {self.image.shape}, not the 3 dimensions of an atlas (x, y, z).")
        try:
            data = np.asarray(self.image.dataobj)
        except DAMAGED as error:
            raise InputError(f"{image} is not a readable image ({one_line(error)}).") from None
        present = sorted(int(value) for value in np.unique(data[np.isfinite(data)]) if value != 0)
        self.names = {index: str(index) for index in present}
        if labels is not None:
            self.names = _label_table(labels)
            unnamed = [index for index in present if index not in self.names]
            if unnamed:
                raise InputError(f"{labels} does not name region {unnamed[0]} of {image}.")

    def load(self, file: Path) -> tuple[Rois, Series]:
        """(time, roi) series for the full label list; regions lost in resampling become flat columns."""
        from nilearn.image import resample_img
        from nilearn.maskers import NiftiLabelsMasker

        run = load_image(file)
        need_whole(file, run)
        if run.ndim != 4:
            raise InputError(f"{file} has shape {run.shape}, not (x, y, z, time).")
        tr = _repetition_time(file)
        filters = {"high_pass": BAND[0], "low_pass": BAND[1], "t_r": tr} if tr > 0 else {}
        grid = {"target_affine": run.affine, "target_shape": run.shape[:3]}
        try:
            # Resampled here, because the masker would warn about each region that is lost.
            image = resample_img(self.image, **grid, interpolation="nearest", copy_header=True, force_resample=False)
            masker = NiftiLabelsMasker(image, detrend=True, standardize=None, verbose=0, **filters)
            confounds, sample_mask = _confounds(file)
            signals = masker.fit_transform(run, confounds=confounds, sample_mask=sample_mask)
        except DAMAGED as error:
            raise InputError(f"{file}: the region signals cannot be extracted ({one_line(error)}).") from None
        indices = list(self.names)
        series = np.zeros((len(signals), len(indices)), dtype=np.float32)
        for column, index in enumerate(_region_indices(masker)):
            series[:, indices.index(index)] = signals[:, column]
        return tuple(self.names.values()), _flatten_absent(series)


def _region_indices(masker: Any) -> list[int]:
    """Atlas value of each column returned by the masker, which drops regions lost in resampling."""
    columns = {key: value for key, value in masker.region_ids_.items() if key != "background"}
    return [int(columns[key]) for key in sorted(columns)]


def _label_table(path: Path) -> dict[int, str]:
    table = read_text_table(path, "," if path.suffix == ".csv" else "\t")
    need_columns(table, ("index", "name"), path)
    indices = numeric(table.set_index("name", drop=False), "index", path)
    if np.isnan(indices).any():
        raise InputError(f"{path}: region {table['name'].iloc[int(np.isnan(indices).argmax())]} has no index.")
    return {int(index): name for index, name in zip(indices, table["name"], strict=True) if index != 0}


def _confounds(file: Path) -> tuple[Any, npt.NDArray[np.int_] | None]:
    """fMRIPrep confounds by nilearn's simple strategy (motion, white matter, CSF), if they are next to the run."""
    if not any(file.parent.glob(file.name.split("_space-")[0].split("_desc-")[0] + "_desc-confounds_timeseries.tsv")):
        return None, None
    from nilearn.interfaces.fmriprep import load_confounds_strategy

    confounds, sample_mask = load_confounds_strategy(str(file), denoise_strategy="simple")
    return confounds, sample_mask
