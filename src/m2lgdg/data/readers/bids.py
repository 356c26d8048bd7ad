"""Reader of BIDS derivatives: parcellated series (XCP-D tables, CIFTI-2), or runs that an atlas divides into ROIs.

Called by `m2lgdg.read`. participants.tsv is in the folder or is given separately, because derivatives often lack it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import bids_atlas
from m2lgdg.data.readers import images, runs, tables
from m2lgdg.data.readers.arrays import LARGEST, Rois, Said, Series, parse_table
from m2lgdg.data.readers.images import DAMAGED, load_image, need_whole
from m2lgdg.data.readers.series import Atlases, OnBad, Progress, chosen, requested
from m2lgdg.storage import InputError, one_line, read_bytes

TABLES = "**/sub-*_timeseries.tsv"
NIFTI = "**/sub-*_desc-*_bold.nii.gz"
PARCELLATED, DENSE = f"**/*{images.PARCELLATED}", f"**/*{images.DENSE}"
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
    subjects: Sequence[str] = (),
    join_runs: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects of participants.tsv that have a series.

    `atlas` selects one or several `_atlas-` entities. `atlas_image` (with `atlas_labels`, a table of index and name) extracts
    the series from NIfTI runs instead, or from dense CIFTI-2 series if it is a .dlabel.nii file; `confounds` is nilearn's
    strategy for them. `only` lists entities that a file name must have ("task-rest run-01"), or must not have ("run-"). Of
    several sessions, the first is read, or that which `session` names. Several runs are an error unless `join_runs` joins
    them, each z-scored per ROI. `patient` and `control` are words of the label column, separated by commas; `subjects` are
    those to read (default: all). An ROI that is NaN at every volume becomes flat.
    """
    people = people_of(path, participants, site, patient, control, subjects)
    found = find_runs(path, atlas, atlas_image, atlas_labels, only, session, confounds, join_runs)
    return runs.read_runs(found, people, name=path.resolve().name, on_bad=on_bad, progress=progress, prefix="sub-")


def people_of(
    path: Path, participants: str | Path | None, site: str | None, patient: str, control: str, subjects: Sequence[str] = ()
) -> tables.Participants:
    """People of participants.tsv, by the options of `read`."""
    patients, controls = ([word.strip() for word in str(text).split(",") if word.strip()] for text in (patient, control))
    tables.need_distinct(patients, controls, "options patient and control")
    return tables.read_participants(
        Path(participants) if participants else _table_path(path),
        patient=patients,
        control=controls,
        site=site,
        advice=ADVICE,
        where=COLUMNS,
        same=runs.label,
        subjects=subjects,
    )


def _table_path(path: Path) -> Path:
    found = tables.find_table(path, "participants.tsv")
    if found is None:
        other = next((file for level in ("", "*/", "*/*/") for file in sorted(path.glob(f"{level}*henotypic*.csv"))), "FILE")
        raise InputError(
            f"{path / 'participants.tsv'} does not exist, nor is it up to two levels below; name the table of subjects: m2lgdg "
            f"check {path} --participants {other} (with --kind abide-ii for the table of ABIDE II)."
        )
    return found


def find_runs(
    path: Path,
    atlas: Atlases,
    atlas_image: str | Path | None,
    atlas_labels: str | Path | None,
    only: str,
    session: str | None,
    confounds: str | None,
    join_runs: bool,
    same: Callable[[str], str] = str,
) -> runs.FolderRuns:
    """The runs of a folder with BIDS names; `same` gives the subject of a file name as the table has it."""
    if confounds not in (None, *runs.STRATEGIES):
        raise InputError(f"option confounds: {confounds!r} is not a strategy; choose one of {', '.join(runs.STRATEGIES)}.")
    volumes: dict[Path, tuple[int, int]] = {}
    if atlas_image is None:
        if confounds is not None:
            raise InputError("option confounds is for runs that an atlas divides into ROIs; give it with --atlas-image.")
        load = _SeriesLoader(path).load
        groups = _series_files(path, atlas)
    else:
        extraction = _Extraction(Path(atlas_image), Path(atlas_labels) if atlas_labels else None, confounds, volumes)
        load = extraction.load
        groups = {_image_atlas(atlas, extraction.image): sorted(path.glob(DENSE if extraction.parcels else NIFTI))}
    groups = {name: [file for file in files if runs.has(file, only)] for name, files in groups.items()}
    by_atlas = {name: runs.by_subject(files, path, session, join_runs, same) for name, files in groups.items()}
    note = runs.session_note(next(iter(groups.values())), session, join_runs)
    return runs.FolderRuns(by_atlas, load, join_runs, confounds, note, volumes)


def _image_atlas(atlas: Atlases, image: Path) -> str:
    names = requested(atlas, ())
    if len(names) > 1:
        raise InputError(f"{image} is one atlas; give one name with atlas (--atlas), not {len(names)}.")
    return names[0] if names else bids_atlas.name_of(runs.entities(image)) or image.name.split(".")[0]


def _series_files(path: Path, atlas: Atlases) -> dict[str, list[Path]]:
    """Parcellated series of the requested atlases, or of the only one, by atlas.

    XCP-D writes a table next to each CIFTI-2 file; of the two, the table is read.
    """
    groups: dict[str, dict[tuple[str | None, ...], list[Path]]] = {}
    for file in (*sorted(path.glob(TABLES)), *sorted(path.glob(PARCELLATED))):
        names = runs.entities(file)
        in_table = file.suffix == ".tsv"
        name = bids_atlas.name_of(names) or ("" if in_table else UNNAMED)
        if name:  # other tables hold confounds
            scans = groups.setdefault(name, {}).setdefault(runs.scan_of(file), [])
            if in_table or not any(other.suffix == ".tsv" for other in scans):
                scans.append(file)
    if not groups:
        dense = min(path.glob(DENSE), default=None)
        raise InputError(
            f"{path} has no series tables (sub-*_atlas-*_timeseries.tsv); for NIfTI runs give an atlas image."
            if dense is None
            else f"{dense} is a dense series; give a parcellation with atlas_image (--atlas-image FILE{images.LABELS})."
        )
    names_given = requested(atlas, groups)
    if list(groups) == [UNNAMED] and len(names_given) == 1:
        groups = {names_given[0]: groups[UNNAMED]}
    return {name: [file for scan in groups[name].values() for file in scan] for name in chosen(path, atlas, groups)}


class _SeriesLoader:
    """Loads parcellated series; ROIs that are only numbers get the names that the folder's own table of the atlas has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, dict[str, str]] = {}  # by atlas

    def load(self, file: Path) -> tuple[Rois, Series]:
        """(time, roi) series of a table or a CIFTI-2 file."""
        if images.is_cifti(file):
            rois, series = images.load_parcellated(file)
        else:
            content = read_bytes(file, LARGEST)
            codes = content[: content.find(b"\n")].split()  # whole numbers in the first line are no volume
            header, series = parse_table(file, content, Said(header=all(map(bytes.isdigit, codes)) or None))
            if header is None or len(header) != series.shape[1]:
                raise InputError(f"{file}: the first line does not name the {series.shape[1]} ROI columns.")
            rois = tuple(header)
        if all(map(str.isdigit, rois)):
            rois = bids_atlas.named(rois, self._known(bids_atlas.name_of(runs.entities(file))))
        return rois, _flatten_absent(series)

    def _known(self, atlas: str) -> dict[str, str]:
        if atlas not in self.names:
            found = bids_atlas.tables(self.path, atlas) if atlas else []
            self.names[atlas] = bids_atlas.names_by_index(found[0]) if found else {}
        return self.names[atlas]


def _flatten_absent(series: Series) -> Series:
    """Set ROIs without coverage, which are NaN at every volume, to a flat zero signal, unless all are."""
    return series if np.isnan(series).all() else np.where(np.isnan(series).all(axis=0), np.float32(0), series)


class _Extraction:
    """Mean signal of each region of an atlas, denoised by fMRIPrep's confounds; scrubbed volumes are put into `volumes`."""

    def __init__(self, image: Path, labels: Path | None, strategy: str | None, volumes: dict[Path, tuple[int, int]]) -> None:
        self.image, self.strategy, self.volumes = image, strategy, volumes
        self.parcels = images.Parcels(image) if image.name.endswith(images.LABELS) else None
        if self.parcels is None:
            self.atlas, self.names = _regions(image, labels)

    def load(self, file: Path) -> tuple[Rois, Series]:
        """(time, roi) series of a NIfTI run or a dense series."""
        return self._load_dense(file, self.parcels) if self.parcels else self._load_nifti(file)

    def _load_nifti(self, file: Path) -> tuple[Rois, Series]:
        """Series for the full label list; regions lost in resampling become flat columns."""
        from nilearn.image import resample_img
        from nilearn.maskers import NiftiLabelsMasker

        run = load_image(file)
        need_whole(file, run)
        if run.ndim != 4:
            raise InputError(f"{file} has shape {run.shape}, not (x, y, z, time).")
        cleaning = _cleaning(runs.repetition_time(file))
        regressors, sample_mask = self._confounds(file, run.shape[3])
        grid = {"target_affine": run.affine, "target_shape": run.shape[:3]}
        try:
            # Resampled here, because the masker would warn about each region that is lost.
            image = resample_img(self.atlas, **grid, interpolation="nearest", copy_header=True, force_resample=False)
            masker = NiftiLabelsMasker(image, verbose=0, **cleaning)
            signals = masker.fit_transform(run, confounds=regressors, sample_mask=sample_mask)
        except DAMAGED as error:
            raise InputError(f"{file}: the region signals cannot be extracted ({one_line(error)}).") from None
        columns = {key: int(value) for key, value in masker.region_ids_.items() if key != "background"}
        indices = list(self.names)
        series = np.zeros((len(signals), len(indices)), dtype=np.float32)
        for column, key in enumerate(sorted(columns)):  # the masker drops regions lost in resampling
            series[:, indices.index(columns[key])] = signals[:, column]
        return tuple(self.names.values()), _flatten_absent(series)

    def _load_dense(self, file: Path, parcels: images.Parcels) -> tuple[Rois, Series]:
        """Without confounds, the series stays as it is, because other pipelines write denoised series."""
        rois, series = parcels.means(file)
        if self.strategy is None and runs.confounds_table(file) is None:
            return rois, series
        from nilearn.signal import clean

        regressors, sample_mask = self._confounds(file, len(series))
        try:
            cleaned = clean(series, confounds=regressors, sample_mask=sample_mask, **_cleaning(runs.repetition_time(file)))
        except DAMAGED as error:
            raise InputError(f"{file}: the confounds cannot be removed ({one_line(error)}).") from None
        return rois, cleaned.astype(np.float32)

    def _confounds(self, file: Path, count: int) -> runs.Confounds:
        confounds = runs.load_confounds(file, self.strategy)
        if confounds.regressors is not None:
            remaining = count if confounds.sample_mask is None else len(confounds.sample_mask)
            self.volumes[file] = (count - remaining, count)
        return confounds


def _regions(path: Path, labels: Path | None) -> tuple[Any, dict[int, str]]:
    """Image of an atlas, and the names of its regions by their index."""
    image = load_image(path)
    need_whole(path, image)
    if image.ndim < 3 or image.shape[3:] not in ((), (1,)):
        raise InputError(f"{path} has shape {image.shape}, not the 3 dimensions of an atlas (x, y, z).")
    try:
        data = np.asarray(image.dataobj)
    except DAMAGED as error:
        raise InputError(f"{path} is not a readable image ({one_line(error)}).") from None
    present = sorted(int(value) for value in np.unique(data[np.isfinite(data)]) if value != 0)
    beside = Path(f"{str(path).removesuffix('.gz').removesuffix('.nii')}.tsv")  # BIDS has the names there
    if labels is None and path.name.endswith(("_dseg.nii", "_dseg.nii.gz")) and beside.is_file():
        labels = beside
    if labels is None:
        return image, {index: str(index) for index in present}
    table = tables.read_text_table(labels)
    tables.need_columns(table, ("index", "name"), labels)
    indices = tables.SubjectTable(table.set_index("name", drop=False), labels).numeric("index")
    if np.isnan(indices).any():
        raise InputError(f"{labels}: region {table['name'].iloc[int(np.isnan(indices).argmax())]} has no index.")
    names = {int(index): name for index, name in zip(indices, table["name"], strict=True) if index != 0}
    unnamed = [index for index in present if index not in names]
    if unnamed:
        raise InputError(f"{labels} does not name region {unnamed[0]} of {path}.")
    return image, names


def _cleaning(tr: float) -> dict[str, Any]:
    filters = {"high_pass": BAND[0], "low_pass": BAND[1], "t_r": tr} if tr > 0 else {}
    return {"detrend": True, "standardize": None, **filters}
