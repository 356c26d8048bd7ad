"""BIDS derivatives: XCP-D `*_timeseries.tsv` tables, or preprocessed NIfTI runs cut by an atlas image.

One of the readers behind `m2lgdg.read`. participants.tsv lies in the folder or is named, since derivatives often lack it.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort, Exclusion
from m2lgdg.data.readers.gather import Found, OnBad, Progress, Rois, Series, gather
from m2lgdg.data.readers.participants import read_participants
from m2lgdg.data.readers.tables import need_columns, need_distinct, numeric, read_text_table
from m2lgdg.data.readers.text import read_table
from m2lgdg.storage import InputError, one_line

ENTITY = re.compile(r"(?:^|_)([a-z]+)-([A-Za-z0-9]+)")
TABLES = "**/sub-*_timeseries.tsv"
IMAGES = "**/sub-*_desc-*_bold.nii.gz"
ADVICE = "say which is which by the options patient and control: --patient WORD,WORD --control WORD"
BAND = (0.01, 0.1)  # Hz, as in both releases
DAMAGED = (ValueError, OSError, EOFError, zlib.error)  # what a cut or altered .nii.gz ends in


def matches(path: Path) -> bool:
    """Whether a folder looks like BIDS derivatives."""
    return (path / "dataset_description.json").is_file() or any(path.glob("sub-*/**/func/*"))


def read(
    path: Path,
    *,
    atlas: str | None = None,
    participants: str | Path | None = None,
    atlas_image: str | Path | None = None,
    atlas_labels: str | Path | None = None,
    only: str = "",
    site: str | None = None,
    patient: str = "",
    control: str = "",
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """The subjects of participants.tsv that have a series.

    `atlas` picks the `_atlas-` entity. `atlas_image` (with `atlas_labels`, a table of index and name) cuts NIfTI runs
    instead. `only` holds entities that a file name must have ("task-rest run-01"), needed where a subject has several runs.
    `patient` and `control` are the words of the label column for each class, separated by commas, where they are not usual.
    An ROI that is NaN throughout (too little coverage) becomes flat, and is counted as such by `check`.
    """
    table = Path(participants) if participants else path / "participants.tsv"
    patients, controls = _words(patient), _words(control)
    need_distinct(patients, controls, "options patient and control")
    people = read_participants(table, patient=patients, control=controls, site=site, advice=ADVICE)
    if atlas_image is None:
        atlas, files = _series_tables(path, atlas, only)
        load = _load_table
    else:
        cut = _Cut(Path(atlas_image), Path(atlas_labels) if atlas_labels else None)
        atlas = atlas or Path(atlas_image).name.split(".")[0]
        files = _by_subject([file for file in sorted(path.glob(IMAGES)) if _has(file, only)], path)
        load = cut.load
    order = {_label(one): i for i, one in enumerate(people.subjects)}
    excluded = [
        Exclusion(one, str(people.sites[i]), "listed but no series file")
        for i, one in enumerate(people.subjects)
        if _label(one) not in files
    ]
    for name in sorted(set(files) - set(order)):
        if on_bad == "stop":
            raise InputError(f"{files[name]}: subject sub-{name} is not in {table}.")
        excluded.append(Exclusion(f"sub-{name}", "", "series file but not listed"))
    found = [Found(people.subjects[i], str(people.sites[i]), files[name]) for name, i in order.items() if name in files]
    trs: dict[Path, float] = {}

    def load_with_tr(file: Path) -> tuple[Rois, Series]:
        trs[file] = _repetition_time(file)  # so that a bad sidecar is trouble of its subject alone
        return load(file)

    gathered = gather(found, load_with_tr, table, on_bad=on_bad, progress=progress)
    rows = [order[_label(each.subject)] for each in gathered.found]
    measured = np.array([trs[each.path] for each in gathered.found])
    return Cohort(
        series=gathered.series,
        subjects=np.array([each.subject for each in gathered.found]),
        sites=people.sites[rows],
        labels=people.labels[rows],
        rois=gathered.rois,
        phenotypes=people.phenotypes.iloc[rows],
        inputs=people.inputs,
        tr=np.where(np.isnan(measured), people.tr[rows], measured),
        atlas=atlas,
        name=path.resolve().name,
        excluded=tuple(sorted(excluded + gathered.excluded)),
        notes=(f"atlas {atlas}", *people.notes),
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def _label(subject: str) -> str:
    return subject.removeprefix("sub-")


def _has(file: Path, only: str) -> bool:
    return all(f"_{part}_" in f"_{file.name}" for part in only.split())


def _series_tables(path: Path, atlas: str | None, only: str) -> tuple[str, dict[str, Path]]:
    groups: dict[str, list[Path]] = {}
    for file in sorted(path.glob(TABLES)):
        entities = dict(ENTITY.findall(file.name))
        if "atlas" in entities or "seg" in entities:
            groups.setdefault(entities.get("atlas") or entities["seg"], []).append(file)
    if not groups:
        raise InputError(f"{path} has no series tables (sub-*_atlas-*_timeseries.tsv); for NIfTI runs give an atlas image.")
    if atlas is None and len(groups) > 1:
        raise InputError(f"{path} has several atlases, choose one of {', '.join(sorted(groups))}.")
    name = atlas or next(iter(groups))
    if name not in groups:
        raise InputError(f"{path} has no atlas {name}; it has {', '.join(sorted(groups))}.")
    return name, _by_subject([file for file in groups[name] if _has(file, only)], path)


def _by_subject(files: list[Path], path: Path) -> dict[str, Path]:
    if not files:
        raise InputError(f"{path} has no run with the asked entities.")
    chosen: dict[str, Path] = {}
    for file in files:
        subject = dict(ENTITY.findall(file.name)).get("sub", "")
        if subject in chosen:
            other = chosen[subject].name
            raise InputError(f"{file}: subject sub-{subject} has a second run, {other}; choose with only, such as 'run-01'.")
        chosen[subject] = file
    return chosen


def _load_table(file: Path) -> tuple[Rois, Series]:
    names, series = read_table(file)
    if names is None or len(names) != series.shape[1]:
        raise InputError(f"{file}: the first line does not name the {series.shape[1]} ROI columns.")
    return tuple(names), _flatten_absent(series)


def _flatten_absent(series: Series) -> Series:
    """ROIs without any coverage are NaN at every volume: no signal, so a flat line."""
    return np.where(np.isnan(series).all(axis=0), np.float32(0), series)


def _repetition_time(file: Path) -> float:
    """RepetitionTime of the JSON beside a file, else that of an image's header, else NaN."""
    for beside in (file.with_suffix(".json"), Path(str(file).replace(".nii.gz", ".json"))):
        if beside.suffix == ".json" and beside.is_file():
            try:
                seconds = float(json.loads(beside.read_text()).get("RepetitionTime", np.nan))
            except (ValueError, TypeError, AttributeError):
                raise InputError(f"{beside} holds no readable RepetitionTime.") from None
            if seconds <= 0 or np.isinf(seconds):
                raise InputError(f"{beside} holds a RepetitionTime of {seconds:g} s.")
            return seconds
    zooms: tuple[float, ...] = _nifti(file).header.get_zooms() if file.name.endswith(".nii.gz") else ()
    return float(zooms[3]) if len(zooms) == 4 and zooms[3] > 0 else np.nan


class _Cut:
    """Mean signal of each atlas region, denoised where fMRIPrep's confounds lie beside the run."""

    def __init__(self, image: Path, labels: Path | None) -> None:
        self.image = _nifti(image)
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
        """The (time, roi) series over the full label list; regions lost in resampling stay as flat columns."""
        from nilearn.image import resample_img
        from nilearn.maskers import NiftiLabelsMasker

        run = _nifti(file)
        if run.ndim != 4:
            raise InputError(f"{file} has shape {run.shape}, not (x, y, z, time).")
        tr = _repetition_time(file)
        filters = {"high_pass": BAND[0], "low_pass": BAND[1], "t_r": tr} if tr > 0 else {}
        grid = {"target_affine": run.affine, "target_shape": run.shape[:3]}
        try:
            # Resampled here, because the masker would warn of each region that it loses.
            image = resample_img(self.image, **grid, interpolation="nearest", copy_header=True, force_resample=False)
            masker = NiftiLabelsMasker(image, detrend=True, standardize=None, verbose=0, **filters)
            confounds, kept = _confounds(file)
            signals = masker.fit_transform(run, confounds=confounds, sample_mask=kept)
        except DAMAGED as error:
            raise InputError(f"{file}: the regions cannot be cut ({one_line(error)}).") from None
        indices = list(self.names)
        series = np.zeros((len(signals), len(indices)), dtype=np.float32)
        for column, index in enumerate(_region_indices(masker)):
            series[:, indices.index(index)] = signals[:, column]
        return tuple(self.names.values()), _flatten_absent(series)


def _region_indices(masker: Any) -> list[int]:
    """The atlas value behind each column that the masker returned: it drops regions that resampling lost."""
    columns = {key: value for key, value in masker.region_ids_.items() if key != "background"}
    return [int(columns[key]) for key in sorted(columns)]


def _nifti(path: Path) -> Any:
    import nibabel

    try:
        return nibabel.load(path)
    except (*DAMAGED, nibabel.filebasedimages.ImageFileError) as error:
        raise InputError(f"{path} is not a readable image ({one_line(error)}).") from None


def _label_table(path: Path) -> dict[int, str]:
    table = read_text_table(path, "," if path.suffix == ".csv" else "\t")
    need_columns(table, ("index", "name"), path)
    indices = numeric(table.set_index("name", drop=False), "index", path)
    if np.isnan(indices).any():
        raise InputError(f"{path}: region {table['name'].iloc[int(np.isnan(indices).argmax())]} has no index.")
    return {int(index): name for index, name in zip(indices, table["name"], strict=True) if index != 0}


def _confounds(file: Path) -> tuple[Any, npt.NDArray[np.int_] | None]:
    """fMRIPrep's own confounds by nilearn's simple strategy (motion, white matter, CSF), where they lie beside the run."""
    if not any(file.parent.glob(file.name.split("_space-")[0].split("_desc-")[0] + "_desc-confounds_timeseries.tsv")):
        return None, None
    from nilearn.interfaces.fmriprep import load_confounds_strategy

    confounds, kept = load_confounds_strategy(str(file), denoise_strategy="simple")
    return confounds, kept
