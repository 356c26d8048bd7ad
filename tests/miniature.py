"""Miniature releases, written the way the real ones are laid out, with every quirk that their users report.

Each function fills a new folder and returns what a reader must find there; `order` shuffles rows and the making of files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
import pandas as pd
from scipy.io import savemat

from m2lgdg.cohort import Parcellation
from m2lgdg.data.atlases import regions

Series = dict[str, np.ndarray]


class Release(NamedTuple):
    """A folder on disk and the (time, roi) numbers that were written for each subject."""

    folder: Path
    series: Series


def signals(rng: np.random.Generator, volumes: int, columns: int) -> np.ndarray:
    return np.cumsum(rng.normal(size=(volumes, columns)), axis=0) + 100 * rng.normal(size=columns)


def shuffled(items: Iterable[Any], order: int | None) -> list[Any]:
    listed = list(items)
    if order is not None:
        np.random.default_rng(order).shuffle(listed)
    return listed


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], separator: str = "\t") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [separator.join(map(str, row)) for row in (columns, *rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


REST_BOOK = "REST-meta-MDD-PhenotypicData_WithHAMDSubItem_V4.xlsx"
REST_COLUMNS = ("ID", "Sex", "Age", "Education (years)")
REST_ITEMS = (*(f"*HAMD{i}" for i in range(1, 18)), *(f"HAMD{i}" for i in range(18, 25)))
REST_CLINICAL = ("If first episode?", "On medication?", "Illness duration (months)", "HAMD", "HAMA", *REST_ITEMS)
REST_PATIENTS = [  # yes is 1, no is -1; HAMA is a number, a number as text, [] or an empty cell; items of HAMD are often empty
    ("S1-1-0001", 1, 30, 12, 1, -1, 6.5, 20, "[]", 2, *[0] * 16),
    ("S1-1-0002", 1, 62, 0, -1, 1, "[]", "[]", None),  # zero years at school are valid
    ("S2-1-0010", 2, 45, -9999, -9999, -9999, 24, 31, "18", 4, *[1] * 12, None, 0, 0, 2),
    ("S4-1-0001", 1, 22, 15, 1, -1, 3, 24, 11),
    ("S5-1-0001", 2, 33, 9, 1, -1, 3, 24, 11),
    ("S14-1-0001", 1, 22, 15, 1, -1, 3, 24, 11),  # the same person as S4-1-0001
    ("S19-1-0001", 2, 51, 9, 1, -1, 3, 24, 11),
    ("S20-1-0002", 2, 40, 10.5, 1, -1, 3, 24, 11),  # listed, but without a series
]
REST_CONTROLS = [
    ("S1-2-0001", 1, "[]", 16),
    ("S2-2-0003", 0, 0, 0),  # nothing is known of this subject
    ("S4-2-0001", 2, 29, 14),
    ("S14-2-0001", 2, 29, 14),
]
# Files of the release have 1,833 columns; those of S2 are as an older DPARSF writes them.
REST_SHAPES = {"S1": (20, 1833), "S2": (14, 1568), "S4": (19, 1833), "S5": (8, 1833), "S14": (19, 1833), "S19": (8, 1833)}


def rest_signals(rng: np.random.Generator, volumes: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Series around zero, as after a band-pass filter, with a global signal, and what is left when that is regressed out."""
    kept = rng.normal(size=(volumes, columns)) + rng.normal(size=(volumes, 1))
    kept -= kept.mean(axis=0)
    signal = kept[:, :1568].mean(axis=1)
    if columns > 1568:
        kept[:, 1568] = signal
    regressed = kept - np.outer(signal, signal @ kept) / (signal @ signal)
    if columns > 1568:
        regressed[:, 1568] = 0.01 * rng.normal(size=volumes)
    return kept, regressed


def rest_meta_mdd(
    folder: Path, *, seed: int = 0, order: int | None = None, unlisted: Sequence[str] = (), newer: Sequence[str] = ()
) -> Release:
    """Two strategies, without and with global signal regression, a workbook with two sheets, S4 a copy of S14.

    The files of sites `newer` are as a newer DPARSF writes them.
    """
    rng = np.random.default_rng(seed)
    listed = [str(row[0]) for row in REST_PATIENTS + REST_CONTROLS if row[0] != "S20-1-0002"]
    made: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for subject in [*listed, *unlisted]:
        volumes, columns = REST_SHAPES[site := subject.split("-")[0]]
        made[subject] = rest_signals(rng, volumes, 2233 if site in newer else columns)
    for subject in ("S4-1-0001", "S4-2-0001"):
        made[subject] = made[subject.replace("S4", "S14")]
    for i, name in enumerate(("ROISignals_FunImgARCWF", "ROISignals_FunImgARglobalCWF")):
        place = folder / "Results" / name
        place.mkdir(parents=True)
        for subject in shuffled(made, order):
            savemat(place / f"ROISignals_{subject}.mat", {"ROISignals": made[subject][i]}, do_compression=True)
    rest_workbook(folder / REST_BOOK, shuffled(REST_PATIENTS, order), shuffled(REST_CONTROLS, order))
    return Release(folder, {subject: kept for subject, (kept, _) in made.items()})


def rest_workbook(path: Path, patients: Iterable[Sequence[object]], controls: Iterable[Sequence[object]]) -> None:
    columns = (*REST_COLUMNS, *REST_CLINICAL)
    filled = [(*row, *[None] * (len(columns) - len(row))) for row in patients]
    with pd.ExcelWriter(path, engine="openpyxl") as book:
        pd.DataFrame(filled, columns=list(columns)).to_excel(book, sheet_name="MDD", index=False)
        pd.DataFrame(list(controls), columns=list(REST_COLUMNS)).to_excel(book, sheet_name="Controls", index=False)


PARTICIPANT_COLUMNS = ("participant_id", "age", "sex", "group", "site", "handedness", "iq")
PARTICIPANTS = [
    ("sub-0051", 23.5, "M", "patient", "Oslo", "R", 101),
    ("sub-0052", "n/a", "F", "control", "Oslo", "n/a", "n/a"),
    ("sub-07", 31, "n/a", "Control", "Rome", "L", 99),
    ("sub-8", 0, "female", "n/a", "Rome", "R", 120),
    ("sub-99", 44, "male", "patient", "Rome", "R", 95),  # listed, but without a series
]
PARCELS = tuple(f"{side}_{network}_{i}" for network in ("Vis", "SomMot", "Default") for i in (1, 2) for side in ("LH", "RH"))
GORDON = ("L_Default_1", "R_Default_1", "L_Visual_2")


def description(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = {"Name": name, "BIDSVersion": "1.9.0", "DatasetType": "derivative"}
    (folder / "dataset_description.json").write_text(json.dumps(text))


def xcpd(
    folder: Path,
    *,
    seed: int = 0,
    order: int | None = None,
    atlases: Sequence[str] = ("4S156Parcels", "Gordon"),
    participants: Sequence[Sequence[object]] = PARTICIPANTS,
) -> Release:
    """Numeric-looking ids, a session for one, one with names of an older XCP-D, a parcel without coverage for another."""
    rng = np.random.default_rng(seed)
    description(folder, "XCP-D")
    write_rows(folder / "participants.tsv", PARTICIPANT_COLUMNS, shuffled(participants, order))
    series: Series = {}
    made = []
    for subject, volumes, tr in (("sub-0051", 12, 2.0), ("sub-0052", 9, 0.8), ("sub-07", 15, None), ("sub-8", 10, 3.0)):
        for atlas in atlases:
            names = PARCELS if atlas == "4S156Parcels" else GORDON
            numbers = signals(rng, volumes, len(names))
            if subject == "sub-0052" and atlas == "4S156Parcels":
                numbers[:, [3, 7]] = np.nan  # less than half of the parcel was covered
            if atlas == atlases[0]:
                series[subject] = numbers
            made.append((subject, atlas, names, numbers, tr))
    for subject, atlas, names, numbers, tr in shuffled(made, order):
        session = "ses-b_" if subject == "sub-8" else ""
        place = folder / subject / session.rstrip("_") / "func"
        place.mkdir(parents=True, exist_ok=True)
        stem = f"{subject}_{session}task-rest_space-MNI152NLin2009cAsym_atlas-{atlas}"
        mean = "" if subject == "sub-07" else "_stat-mean"
        table = pd.DataFrame(numbers, columns=list(names))
        table.to_csv(place / f"{stem}{mean}_timeseries.tsv", sep="\t", na_rep="n/a", index=False)
        if tr is not None:
            (place / f"{stem}{mean}_timeseries.json").write_text(json.dumps({"RepetitionTime": tr}))
        table.corr().to_csv(place / f"{stem}_stat-pearsoncorrelation_relmat.tsv", sep="\t", na_rep="n/a")
        table.iloc[:1].to_csv(place / f"{stem}_stat-coverage_bold.tsv", sep="\t", na_rep="n/a", index=False)
        (place / f"{subject}_{session}task-rest_motion.tsv").write_text("framewise_displacement\nn/a\n0.1\n")
    return Release(folder, series)


class Images(NamedTuple):
    """A folder of preprocessed runs, the atlas that cuts them, and the regions' mean signals before any filter."""

    folder: Path
    atlas: Path
    labels: Path
    series: Series
    trs: dict[str, float]


REGIONS = (3, 5, 7, 11, 20, 21, 22, 23, 24, 25, 26, 40)  # more than ten, so that text order and column order differ
LOST = 30  # a single voxel that falls between those of the coarser runs


def nifti(folder: Path, *, seed: int = 0, order: int | None = None) -> Images:
    """Runs of 2 mm voxels, an atlas of 1 mm voxels one region of which no run can hold; one TR in JSON, one in the header."""
    data = folder / "fmriprep"
    description(data, "fMRIPrep")
    rows = [("sub-01", "A", "control"), ("sub-02", "B", "patient")]
    write_rows(data / "participants.tsv", ("participant_id", "site", "diagnosis"), shuffled(rows, order))
    fine = np.zeros((12, 12, 6), dtype=np.int16)
    for i, region in enumerate(REGIONS):
        fine[2 * (i % 6) : 2 * (i % 6) + 2, 6 * (i // 6) : 6 * (i // 6) + 4] = region
    fine[11, 11, 5] = LOST
    atlas = folder / "atlas.nii.gz"
    nibabel.save(nibabel.Nifti1Image(fine, np.eye(4)), atlas)
    labels = folder / "labels.tsv"
    write_rows(labels, ("index", "name"), [(0, "background"), *((i, f"region-{i}") for i in sorted((*REGIONS, LOST)))])
    coarse = fine[::2, ::2, ::2]
    series: Series = {}
    trs = {"sub-01": 2.0, "sub-02": 2.5}
    for subject in shuffled(trs, order):
        own = np.random.default_rng([seed, int(subject[-2:])])
        run = (own.normal(size=(*coarse.shape, 60)) + 1000).astype(np.float32)
        place = data / subject / "func"
        place.mkdir(parents=True)
        image = nibabel.Nifti1Image(run, np.diag([2.0, 2.0, 2.0, 1.0]))
        image.header.set_zooms((2.0, 2.0, 2.0, 9.0 if subject == "sub-01" else 2.5))
        stem = f"{subject}_task-rest_space-MNI152NLin2009cAsym_desc-preproc_bold"
        nibabel.save(image, place / f"{stem}.nii.gz")
        if subject == "sub-01":
            (place / f"{stem}.json").write_text(json.dumps({"RepetitionTime": 2.0}))
        series[subject] = np.stack([run[coarse == region].mean(axis=0, dtype=np.float64) for region in REGIONS], axis=1)
    return Images(data, atlas, labels, series, trs)


OWN_COLUMNS = ("participant_id", "site", "diagnosis", "age", "sex", "education", "scanner", "motion")
OWN_PEOPLE = [
    ("0007", "Aarhus", "patient", 31.5, "M", 12, "Prisma", 0.11),
    ("0010", "Aarhus", "control", "n/a", "F", "n/a", "n/a", 0.2),
    ("12", "Bergen", "control", 27, "male", 0, "Skyra", "n/a"),
    ("013", "Bergen", "patient", -9999, "2", 16, "Skyra", 0.31),
]
OWN_ROIS = ("thalamus", "caudate", "insula", "cuneus")


def own_folder(
    folder: Path,
    suffix: str = ".npy",
    *,
    seed: int = 0,
    order: int | None = None,
    dataset: str | None = None,
    pattern: str = "{subject}",
    people: Sequence[Sequence[object]] = OWN_PEOPLE,
    columns: Sequence[str] = OWN_COLUMNS,
) -> Release:
    """Ids that look like numbers with and without leading zeros; text files have a header where their kind usually has."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "participants.tsv", columns, shuffled(people, order))
    if dataset is not None:
        (folder / "dataset.toml").write_text(dataset, encoding="utf-8")
    series = {str(row[0]): signals(rng, 8 + i, len(OWN_ROIS)) for i, row in enumerate(people)}
    sites = {str(row[0]): str(row[1]) for row in people}
    for subject in shuffled(series, order):
        path = folder / (pattern.replace("{subject}", subject).replace("{site}", sites[subject]) + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_array(path, series[subject])
    return Release(folder, series)


def write_array(path: Path, numbers: np.ndarray, names: Sequence[str] = OWN_ROIS) -> None:
    if path.suffix == ".npy":
        np.save(path, numbers)
    elif path.suffix == ".mat":
        savemat(path, {"ts": numbers})
    elif path.suffix in (".csv", ".tsv"):
        separator = "," if path.suffix == ".csv" else "\t"
        pd.DataFrame(numbers, columns=list(names)).to_csv(path, sep=separator, index=False)
    else:
        np.savetxt(path, numbers, fmt="%.17g")


ABIDE_TABLE = "Phenotypic_V1_0b_preprocessed1.csv"
ABIDE_COLUMNS = ("", "Unnamed: 0", "SUB_ID", "X", "subject", "SITE_ID", "FILE_ID", "DX_GROUP", "DSM_IV_TR", "AGE_AT_SCAN")
ABIDE_COLUMNS += ("SEX", "HANDEDNESS_CATEGORY", "FIQ", "VIQ", "PIQ", "ADOS_TOTAL", "CURRENT_MED_STATUS", "func_mean_fd")
ABIDE_COLUMNS += ("qc_rater_1", "qc_anat_rater_2", "qc_func_rater_2", "qc_anat_rater_3", "qc_func_rater_3")
PASSED = ("OK", "OK", "maybe", "OK", "OK")
ABIDE_PEOPLE = [  # SUB_ID, SITE_ID, FILE_ID, DX_GROUP, DSM, age, sex, hand, FIQ, VIQ, PIQ, ADOS, medication, motion, ratings
    (50002, "PITT", "no_filename", 1, 1, 16.77, 1, "Ambi", 103, 116, 89, 12, 0, 0.1, *PASSED),
    (50003, "PITT", "Pitt_0050003", 1, 1, 24.45, 1, "R", 124, 128, 115, 13, 1, 0.3, *PASSED),
    (50004, "PITT", "Pitt_0050004", 2, -9999, 19.09, 2, "-9999", -9999, "", 117, "", "`", "", "OK", "OK", "fail", "OK", "OK"),
    (50649, "CMU", "CMU_a_0050649", 1, 2, 27, 1, "L", 110, -9999, "", -9999, "", 0.2, *PASSED),
    (50669, "CMU", "CMU_b_0050669", 2, 0, 21, 2, "R", 98, 100, 97, "", "", 0.2, "fail", "OK", "OK", "OK", "OK"),
    (51607, "MAX_MUN", "MaxMun_a_0051607", 2, 0, 40, 1, "R", "", 100, 97, "", 0, 0.2, "maybe", "OK", "OK", "OK", "OK"),
    (50700, "LEUVEN_1", "Leuven_1_0050700", 1, 1, 23, 1, "R", 101, 102, 103, 9, 0, 0.1, *PASSED),  # listed, but not there
]


def abide(
    folder: Path,
    *,
    seed: int = 0,
    order: int | None = None,
    layout: str = "release",
    atlases: Sequence[str] = ("aal",),
    strategies: Sequence[str] = ("cpac/filt_global",),
    unlisted: Sequence[str] = (),
) -> Release:
    """One file with CRLF, one whose columns stand in another order; `layout` is release, flat, or subject (a folder each)."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(i, i + 1, row[0], i + 1, row[0], *row[1:]) for i, row in enumerate(ABIDE_PEOPLE)]
    write_rows(folder / ABIDE_TABLE, ABIDE_COLUMNS, shuffled(rows, order), ",")
    present = [str(row[2]) for row in ABIDE_PEOPLE if row[2] not in ("no_filename", "Leuven_1_0050700")]
    series: Series = {}
    made = []
    for strategy in strategies:
        for atlas in atlases:
            codes = [str(code) for code in regions("aal")["code"]] if atlas == "aal" else [str(i + 1) for i in range(20)]
            for i, subject in enumerate([*present, *unlisted]):
                numbers = signals(rng, 6 + i, len(codes)).round(6)
                series.setdefault(subject, numbers)
                made.append((strategy, atlas, subject, codes, numbers))
    for strategy, atlas, subject, codes, numbers in shuffled(made, order):
        place = {"release": folder / strategy, "flat": folder, "subject": folder / subject}[layout]
        place.mkdir(parents=True, exist_ok=True)
        columns = np.roll(np.arange(len(codes)), 5 if subject == "CMU_a_0050649" else 0)
        end = "\r\n" if subject.startswith("MaxMun") else "\n"
        write_1d(place / f"{subject}_rois_{atlas}.1D", [codes[i] for i in columns], numbers[:, columns], end)
    return Release(folder, series)


def write_1d(path: Path, codes: Sequence[str], numbers: np.ndarray, end: str) -> None:
    lines = ["\t".join(f"#{code}" for code in codes)]
    lines += ["\t".join(np.format_float_positional(value, trim="0") for value in row) for row in numbers]
    path.write_bytes("".join(line + end for line in lines).encode())


def with_two_atlases(cohort, lacking=0):
    """The cohort with a second atlas of nine ROIs that are mixtures of those of the first; every so many subjects lack it."""
    mixture = np.random.default_rng(0).normal(size=(len(cohort.rois), 9))
    further = [
        None if lacking and i % lacking == 0 else (one @ mixture).astype(np.float32) for i, one in enumerate(cohort.series)
    ]
    second = Parcellation([f"mixed-{i}" for i in range(9)], further)
    return dataclasses.replace(cohort, atlas="first-one", parcellations={"mixed": second})
