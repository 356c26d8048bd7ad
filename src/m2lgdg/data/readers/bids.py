"""Reader of BIDS derivatives: parcellated series (XCP-D tables, CIFTI-2), or runs that an atlas divides into ROIs.

Called by `m2lgdg.read`. participants.tsv is in the folder or is given separately, because derivatives often lack it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers import cifti
from m2lgdg.data.readers.assemble import FolderRuns, label, read_runs, repetition_time
from m2lgdg.data.readers.confounds import Confounds, confounds_table, load_confounds, need_strategy
from m2lgdg.data.readers.gather import Load, OnBad, Progress, Rois, Series
from m2lgdg.data.readers.images import DAMAGED, load_image, need_whole
from m2lgdg.data.readers.participants import read_participants
from m2lgdg.data.readers.runs import by_subject, entities, has_entities, scan_of, session_note
from m2lgdg.data.readers.several import Atlases, requested
from m2lgdg.data.readers.tables import need_columns, need_distinct, numeric, read_text_table
from m2lgdg.data.readers.text import read_table
from m2lgdg.storage import InputError, one_line

TABLES = "**/sub-*_timeseries.tsv"
IMAGES = "**/sub-*_desc-*_bold.nii.gz"
PARCELLATED, DENSE = f"**/*{cifti.PARCELLATED}", f"**/*{cifti.DENSE}"
UNNAMED = "ptseries"  # atlas of CIFTI-2 series whose names have none
ADVICE = "give the words of each class with the options patient and control: --patient WORD,WORD --control WORD"
# How to name the column of a role that was not found, by role.
COLUMNS = {role: f"rename the right one to {role}" for role in ("subject", "label")}
COLUMNS["site"] = "rename the right one to site, or name one site for all with the option site (--site-name NAME)"
BAND = (0.01, 0.1)  # Hz, as in both releases


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
    runs = find_runs(
        path,
        atlas=atlas,
        atlas_image=atlas_image,
        atlas_labels=atlas_labels,
        only=only,
        session=session,
        confounds=confounds,
        join_runs=join_runs,
    )
    return read_runs(runs, people, table, name=path.resolve().name, on_bad=on_bad, progress=progress, prefix="sub-")


def find_runs(
    path: Path,
    *,
    atlas: Atlases,
    atlas_image: str | Path | None,
    atlas_labels: str | Path | None,
    only: str,
    session: str | None,
    confounds: str | None,
    join_runs: bool,
    same: Callable[[str], str] = str,
) -> FolderRuns:
    """The runs of a folder with BIDS names; `same` gives the subject of a file name as the table has it."""
    need_strategy(confounds)
    volumes: dict[Path, tuple[int, int]] = {}
    if atlas_image is None:
        if confounds is not None:
            raise InputError("option confounds is for runs that an atlas divides into ROIs; give it with --atlas-image.")
        load: Load = _load_series
        groups = _series_files(path, atlas)
    else:
        image = Path(atlas_image)
        is_dense = image.name.endswith(cifti.LABELS)
        regions = _DenseParcellation(image) if is_dense else _Parcellation(image, Path(atlas_labels) if atlas_labels else None)
        load = partial(regions.load, confounds=_Confounds(confounds, volumes))
        groups = {_image_atlas(atlas, image): sorted(path.glob(DENSE if is_dense else IMAGES))}
    groups = {name: [file for file in files if has_entities(file, only)] for name, files in groups.items()}
    by_atlas = {name: by_subject(files, path, session, join_runs, same) for name, files in groups.items()}
    note = session_note(next(iter(groups.values())), session, join_runs)
    return FolderRuns(by_atlas, load, join_runs, confounds, (note,) if note else (), volumes)


class _Confounds:
    """Confounds of a run by one strategy. The number of scrubbed volumes of each run is kept."""

    def __init__(self, strategy: str | None, volumes: dict[Path, tuple[int, int]]) -> None:
        self.strategy, self.volumes = strategy, volumes

    def load(self, file: Path, count: int) -> Confounds:
        """Confounds of a run with so many volumes."""
        confounds = load_confounds(file, self.strategy)
        if confounds.regressors is not None:
            kept = count if confounds.sample_mask is None else len(confounds.sample_mask)
            self.volumes[file] = (count - kept, count)
        return confounds


def _words(text: str) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


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

    def load(self, file: Path, confounds: _Confounds) -> tuple[Rois, Series]:
        """(time, roi) series for the full label list; regions lost in resampling become flat columns."""
        from nilearn.image import resample_img
        from nilearn.maskers import NiftiLabelsMasker

        run = load_image(file)
        need_whole(file, run)
        if run.ndim != 4:
            raise InputError(f"{file} has shape {run.shape}, not (x, y, z, time).")
        cleaning = _cleaning(repetition_time(file))
        regressors, sample_mask = confounds.load(file, run.shape[3])
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


class _DenseParcellation(cifti.Parcels):
    """Mean signal of each parcel of a dense series, denoised if fMRIPrep's confounds are next to it."""

    def load(self, file: Path, confounds: _Confounds) -> tuple[Rois, Series]:
        """(time, roi) series. Without confounds it stays as it is, because other pipelines write denoised series."""
        rois, series = self.means(file)
        if confounds.strategy is None and confounds_table(file) is None:
            return rois, series
        from nilearn.signal import clean

        regressors, sample_mask = confounds.load(file, len(series))
        try:
            cleaned = clean(series, confounds=regressors, sample_mask=sample_mask, **_cleaning(repetition_time(file)))
        except DAMAGED as error:
            raise InputError(f"{file}: the confounds cannot be removed ({one_line(error)}).") from None
        return rois, cleaned.astype(np.float32)


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
