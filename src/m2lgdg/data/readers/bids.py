"""Reader of BIDS derivatives: parcellated series (XCP-D tables, CIFTI-2), or runs that an atlas divides into ROIs.

Called by `m2lgdg.read`. participants.tsv is in the folder or is given separately, because derivatives often lack it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort, Exclusion
from m2lgdg.data.readers import cifti
from m2lgdg.data.readers.confounds import add_motion, confounds_table, load_confounds, mean_displacement, need_strategy
from m2lgdg.data.readers.gather import JOINED, Load, OnBad, Progress, Rois, Series, SeriesFile, joined, need_listed
from m2lgdg.data.readers.images import DAMAGED, load_image, need_whole
from m2lgdg.data.readers.participants import Participants, read_participants
from m2lgdg.data.readers.runs import Runs, by_subject, entities, need_same_runs, scan_of, session_note
from m2lgdg.data.readers.several import Atlases, AtlasFiles, gather_atlases, no_series, requested
from m2lgdg.data.readers.tables import need_columns, need_distinct, need_seconds, numeric, read_text_table
from m2lgdg.data.readers.text import read_table
from m2lgdg.storage import InputError, one_line, read_bytes

TABLES = "**/sub-*_timeseries.tsv"
IMAGES = "**/sub-*_desc-*_bold.nii.gz"
PARCELLATED, DENSE = f"**/*{cifti.PARCELLATED}", f"**/*{cifti.DENSE}"
UNNAMED = "ptseries"  # atlas of CIFTI-2 series whose names have none
ADVICE = "give the words of each class with the options patient and control: --patient WORD,WORD --control WORD"
# How to name the column of a role that was not found, by role.
COLUMNS = {role: f"rename the right one to {role}" for role in ("subject", "label")}
COLUMNS["site"] = "rename the right one to site, or name one site for all with the option site (--site-name NAME)"
TIME_UNITS = {"sec": 1.0, "unknown": 1.0, "msec": 1e-3, "usec": 1e-6}  # of a NIfTI header, in seconds
LARGEST_SIDECAR = 16 << 20  # bytes
BAND = (0.01, 0.1)  # Hz, as in both releases
CLEANED = "runs detrended and filtered to 0.01-0.1 Hz, confounds of fMRIPrep regressed out by nilearn's strategy {}"


def matches(path: Path) -> bool:
    """Whether a folder looks like BIDS derivatives."""
    described = (path / "dataset_description.json").is_file() or any(path.glob("sub-*/**/func/*"))
    return described or any(any(path.glob(pattern)) for pattern in (PARCELLATED, DENSE))


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    participants: str | Path | None = None,
    atlas_image: str | Path | None = None,
    atlas_labels: str | Path | None = None,
    only: str = "",
    session: str | None = None,
    confounds: str | None = None,
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
    from NIfTI runs instead, or from dense CIFTI-2 series if it is a .dlabel.nii file. `confounds` is nilearn's strategy for
    such runs (simple, scrubbing or compcor). `only` lists entities that a file name must have ("task-rest run-01"). Of several
    sessions, the first of each subject is read, or that which `session` names. Several runs are an error
    unless `join_runs` puts them one after the other in the order of their names: each run of every subject, also
    of one with a single run, is z-scored per ROI first, and all runs of a subject must have one TR. `patient` and `control`
    are the words of the label column for each class, separated by commas, if they are not the usual ones. An ROI that is NaN
    at every volume (too little coverage) becomes flat, and `check` counts it as such.
    """
    table = Path(participants) if participants else path / "participants.tsv"
    patients, controls = _words(patient), _words(control)
    need_distinct(patients, controls, "options patient and control")
    people = read_participants(table, patient=patients, control=controls, site=site, advice=ADVICE, where=COLUMNS, same=label)
    runs = FolderRuns(path, atlas, atlas_image, atlas_labels, only, session, confounds, join_runs)
    return read_runs(runs, people, table, name=path.resolve().name, on_bad=on_bad, progress=progress)


class FolderRuns:
    """The runs of a folder by atlas and subject, and how to load them."""

    def __init__(
        self,
        path: Path,
        atlas: Atlases,
        atlas_image: str | Path | None,
        atlas_labels: str | Path | None,
        only: str,
        session: str | None,
        confounds: str | None,
        join_runs: bool,
        same: Callable[[str], str] = str,
    ) -> None:
        """`same` gives the subject of a file name as the table has it."""
        need_strategy(confounds)
        self.path, self.strategy, self.join_runs = path, confounds, join_runs
        self.volumes: dict[Path, tuple[int, int]] = {}  # scrubbed and all volumes of a run with confounds
        self.load: Load = _load_series
        if atlas_image is None:
            if confounds is not None:
                raise InputError("option confounds is for runs that an atlas divides into ROIs; give it with --atlas-image.")
            groups = _series_files(path, atlas)
        else:
            image = Path(atlas_image)
            is_dense = image.name.endswith(cifti.LABELS)
            self.load = self._of_parcels(image) if is_dense else self._of_image(image, atlas_labels)
            groups = {_image_atlas(atlas, image): sorted(path.glob(DENSE if is_dense else IMAGES))}
        self.by_atlas: dict[str, Runs] = {}
        for name, files in groups.items():
            chosen = by_subject(files, path, only, session, join_runs)
            self.by_atlas[name] = {same(subject): runs for subject, runs in chosen.items()}
        self.atlases = tuple(self.by_atlas)
        self.first = self.by_atlas[self.atlases[0]]
        self.session_note = session_note(groups[self.atlases[0]], session, join_runs)

    def notes(self) -> tuple[str, ...]:
        """Which atlases and runs are read, and what was done with them."""
        cleaned = (CLEANED.format(self.strategy or "simple"),) if self.volumes else ()
        joined_runs = (JOINED,) if self.join_runs else ()
        sessions = (self.session_note,) if self.session_note else ()
        return (*sessions, *cleaned, *joined_runs)

    def scrubbed(self, runs: Sequence[Path]) -> tuple[int, int] | None:
        """Scrubbed and all volumes of the runs of a subject; None if they have no confounds."""
        counts = [self.volumes[run] for run in runs if run in self.volumes]
        return (sum(each[0] for each in counts), sum(each[1] for each in counts)) if counts else None

    def _of_image(self, image: Path, labels: str | Path | None) -> Load:
        regions = _Parcellation(image, Path(labels) if labels else None)
        return lambda file: regions.load(file, self._confounds)

    def _of_parcels(self, image: Path) -> Load:
        parcels = cifti.Parcels(image)

        def load(file: Path) -> tuple[Rois, Series]:
            """Means of the parcels; cleaned like a NIfTI run if fMRIPrep wrote it, since other pipelines have done so."""
            rois, series = parcels.load(file)
            if self.strategy is None and confounds_table(file) is None:
                return rois, series
            from nilearn.signal import clean

            regressors, sample_mask = self._confounds(file, len(series))
            try:
                cleaned = clean(series, confounds=regressors, sample_mask=sample_mask, **_cleaning(repetition_time(file)))
            except DAMAGED as error:
                raise InputError(f"{file}: the confounds cannot be removed ({one_line(error)}).") from None
            return rois, cleaned.astype(np.float32)

        return load

    def _confounds(self, file: Path, volumes: int) -> tuple[Any, npt.NDArray[np.int_] | None]:
        """Confounds of a run, whose number of scrubbed volumes is kept."""
        regressors, sample_mask = load_confounds(file, self.strategy)
        if regressors is not None:
            self.volumes[file] = (0 if sample_mask is None else volumes - len(sample_mask), volumes)
        return regressors, sample_mask


def read_runs(
    runs: FolderRuns, people: Participants, table: Path, *, name: str, on_bad: OnBad, progress: Progress | None
) -> Cohort:
    """Cohort of the listed people who have runs."""
    order = {label(one): i for i, one in enumerate(people.subjects)}
    every = {one: files[0] for each in reversed(runs.by_atlas.values()) for one, files in each.items()}
    need_listed(every, order, table)
    excluded = [
        Exclusion(one, str(people.sites[i]), no_series(runs.atlases))
        for i, one in enumerate(people.subjects)
        if label(one) not in runs.first
    ]
    for one in sorted(set(every) - set(order)):
        if on_bad == "stop":
            raise InputError(f"{every[one]}: subject sub-{one} is not in {table}.")
        excluded.append(Exclusion(f"sub-{one}", "", "series file but not listed"))
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


def _words(text: str) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def label(subject: str) -> str:
    """Subject without the prefix sub-."""
    return subject.removeprefix("sub-")


def _listed(people: Participants, runs: Runs) -> list[SeriesFile]:
    listed = zip(people.subjects, people.sites.tolist(), strict=True)
    return [SeriesFile(one, site, runs[label(one)][0]) for one, site in listed if label(one) in runs]


def _image_atlas(atlas: Atlases, image: Path) -> str:
    """Name of the atlas of an image: the one that was given, or that of the file."""
    names = requested(atlas, ())
    if len(names) > 1:
        raise InputError(f"{image} is one atlas; give one name with atlas (--atlas), not {len(names)}.")
    return names[0] if names else image.name.split(".")[0]


def _series_files(path: Path, atlas: Atlases) -> dict[str, list[Path]]:
    """Parcellated series of the requested atlases, or of the only one, by atlas.

    XCP-D writes a table next to each CIFTI-2 file; of the two, the table is read.
    """
    groups: dict[str, dict[tuple[str | None, ...], list[Path]]] = {}
    for file in (*sorted(path.glob(TABLES)), *sorted(path.glob(PARCELLATED))):
        parts = entities(file)
        in_table = file.suffix == ".tsv"
        name = parts.get("atlas") or parts.get("seg") or ("" if in_table else UNNAMED)
        if name:  # other tables hold confounds
            scans = groups.setdefault(name, {}).setdefault(scan_of(file), [])
            if in_table or not any(other.suffix == ".tsv" for other in scans):
                scans.append(file)
    if not groups:
        raise InputError(_no_series(path))
    names = requested(atlas, groups)
    if list(groups) == [UNNAMED] and len(names) == 1:
        groups = {names[0]: groups[UNNAMED]}
    if not names and len(groups) > 1:
        raise InputError(f"{path} has several atlases; choose one of {', '.join(sorted(groups))}.")
    unknown = next((name for name in names if name not in groups), None)
    if unknown is not None:
        raise InputError(f"{path} has no atlas {unknown}; it has {', '.join(sorted(groups))}.")
    return {name: [file for scan in groups[name].values() for file in scan] for name in names or groups}


def _no_series(path: Path) -> str:
    dense = min(path.glob(DENSE), default=None)
    if dense is not None:
        return f"{dense} is a dense series; give a parcellation with atlas_image (--atlas-image FILE{cifti.LABELS})."
    return f"{path} has no series tables (sub-*_atlas-*_timeseries.tsv); for NIfTI runs give an atlas image."


def _load_series(file: Path) -> tuple[Rois, Series]:
    if not cifti.is_cifti(file):
        return _load_table(file)
    rois, series = cifti.load_parcellated(file)
    return rois, _flatten_absent(series)


def _load_table(file: Path) -> tuple[Rois, Series]:
    names, series = read_table(file)
    if names is None or len(names) != series.shape[1]:
        raise InputError(f"{file}: the first line does not name the {series.shape[1]} ROI columns.")
    return tuple(names), _flatten_absent(series)


def _flatten_absent(series: Series) -> Series:
    """Set ROIs without coverage, which are NaN at every volume, to a flat zero signal."""
    return np.where(np.isnan(series).all(axis=0), np.float32(0), series)


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

    def load(self, file: Path, confounds: Callable[[Path, int], tuple[Any, Any]]) -> tuple[Rois, Series]:
        """(time, roi) series for the full label list; regions lost in resampling become flat columns."""
        from nilearn.image import resample_img
        from nilearn.maskers import NiftiLabelsMasker

        run = load_image(file)
        need_whole(file, run)
        if run.ndim != 4:
            raise InputError(f"{file} has shape {run.shape}, not (x, y, z, time).")
        cleaning = _cleaning(repetition_time(file))
        regressors, sample_mask = confounds(file, run.shape[3])
        grid = {"target_affine": run.affine, "target_shape": run.shape[:3]}
        try:
            # Resampled here, because the masker would warn about each region that is lost.
            image = resample_img(self.image, **grid, interpolation="nearest", copy_header=True, force_resample=False)
            masker = NiftiLabelsMasker(image, verbose=0, **cleaning)
            signals = masker.fit_transform(run, confounds=regressors, sample_mask=sample_mask)
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


def _cleaning(tr: float) -> dict[str, Any]:
    """Options of nilearn for a run: detrended, and filtered if its TR is known."""
    filters = {"high_pass": BAND[0], "low_pass": BAND[1], "t_r": tr} if tr > 0 else {}
    return {"detrend": True, "standardize": None, **filters}
