"""Small healthy inputs of every kind, about which `check` finds nothing, and the tools that break them.

Used by test_bad_input.py, the tools for cohort files also by test_parcellations.py: 20 subjects of 2 sites, 100 volumes, 6
ROIs (REST-meta-MDD has the width it must have).
"""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import numpy.typing as npt
import openpyxl
from safetensors import safe_open
from safetensors.numpy import save_file
from scipy.io import savemat

from m2lgdg import InputError
from m2lgdg.data.readers import read

SITES = ("north", "south")
COUNT, VOLUMES, ROIS = 20, 100, 6
MDD_WIDTH, AAL = 1568, 116
BOOK = "phenotypes.xlsx"
ABIDE_TABLE = "Phenotypic_V1_0b_preprocessed1.csv"

Spoil = Callable[[Path], object]


def signal(number: int, rois: int = ROIS) -> npt.NDArray[np.float32]:
    """The healthy (time, roi) series of one subject."""
    return np.random.default_rng(number).normal(100, 10, (VOLUMES, rois)).astype(np.float32)


def person(number: int) -> dict[str, str]:
    """Site, label, sex and age of subject 1, 2 ...: ten a site, half of them patients."""
    return {
        "site": SITES[(number - 1) // (COUNT // 2)],
        "label": "patient" if number % 2 else "control",
        "sex": "MF"[number // 2 % 2],
        "age": str(20 + number * 7 % 30),
    }


def make_folder(path: Path) -> None:
    """participants.tsv and P01.npy ... P20.npy."""
    path.mkdir()
    lines = ["\t".join(("participant_id", *person(1)))]
    for number in range(1, COUNT + 1):
        lines.append("\t".join((f"P{number:02}", *person(number).values())))
        np.save(path / f"P{number:02}.npy", signal(number))
    (path / "participants.tsv").write_text("\n".join(lines) + "\n")


def make_texts(path: Path) -> None:
    """The same folder with P01.csv ... P20.csv, which have no header."""
    make_folder(path)
    for file in sorted(path.glob("*.npy")):
        np.savetxt(file.with_suffix(".csv"), np.load(file), delimiter=",", fmt="%.3f")
        file.unlink()


def make_abide(path: Path) -> None:
    """A phenotype table and north_0001_rois_cc200.1D ... in the release's folders."""
    folder = path / "Outputs" / "cpac" / "filt_global" / "rois_cc200"
    folder.mkdir(parents=True)
    lines = ["SUB_ID,SITE_ID,FILE_ID,DX_GROUP,AGE_AT_SCAN,SEX,FIQ,VIQ,PIQ"]
    for number in range(1, COUNT + 1):
        who = person(number)
        name = f"{who['site']}_{number:04}"
        group, sex = 1 if who["label"] == "patient" else 2, 1 if who["sex"] == "M" else 2
        lines.append(
            f"{number},{who['site'].upper()},{name},{group},{who['age']},{sex},100,{90 + number % 7},{95 + number % 5}"
        )
        codes = "\t".join(f"#{2001 + roi}" for roi in range(ROIS))
        np.savetxt(folder / f"{name}_rois_cc200.1D", signal(number), delimiter="\t", fmt="%.3f", header=codes, comments="")
    (path / ABIDE_TABLE).write_text("\n".join(lines) + "\n")


def make_mdd(path: Path) -> None:
    """A workbook of two sheets and ROISignals_S1-1-0001.mat ..."""
    folder = path / "ROISignals_FunImgARCWF"
    folder.mkdir(parents=True)
    book = openpyxl.Workbook()
    sheets = {"patient": book.create_sheet("MDD"), "control": book.create_sheet("Controls")}
    del book["Sheet"]
    for sheet in sheets.values():
        sheet.append(["ID", "Sex", "Age", "Education (years)"])
    for number in range(1, COUNT + 1):
        who = person(number)
        group = 1 if who["label"] == "patient" else 2
        name = f"S{SITES.index(who['site']) + 1}-{group}-{number:04}"
        sheets[who["label"]].append([name, 1 if who["sex"] == "M" else 2, int(who["age"]), 9 + number % 4])
        numbers = np.zeros((VOLUMES, MDD_WIDTH), dtype=np.int8)
        numbers[:, :AAL] = np.random.default_rng(number).integers(-100, 100, (VOLUMES, AAL), dtype=np.int8)
        # Compressed, since these files are copied for each case; but not the one to break, where every byte has its meaning.
        savemat(folder / f"ROISignals_{name}.mat", {"ROISignals": numbers}, do_compression=number != 3)
    book.save(path / BOOK)


def make_bids(path: Path) -> None:
    """participants.tsv and sub-01/func/sub-01_task-rest_atlas-Six_timeseries.tsv ..."""
    path.mkdir()
    (path / "dataset_description.json").write_text('{"Name": "six"}')
    lines = ["\t".join(("participant_id", *person(1)))]
    for number in range(1, COUNT + 1):
        lines.append("\t".join((f"sub-{number:02}", *person(number).values())))
        file = bids_series(path, number)
        file.parent.mkdir(parents=True)
        names = "\t".join(f"roi{roi}" for roi in range(ROIS))
        np.savetxt(file, signal(number), delimiter="\t", fmt="%.3f", header=names, comments="")
    (path / "participants.tsv").write_text("\n".join(lines) + "\n")


def bids_series(path: Path, number: int, atlas: str = "Six") -> Path:
    """Where the series of one subject lies."""
    return path / f"sub-{number:02}" / "func" / f"sub-{number:02}_task-rest_atlas-{atlas}_timeseries.tsv"


def make_nifti(path: Path) -> None:
    """Four subjects as runs of 4 x 4 x 4 voxels, with an atlas of two regions and its names beside them."""
    path.mkdir()
    (path / "dataset_description.json").write_text('{"Name": "runs"}')
    half = np.ones((4, 4, 4), dtype=np.int16)
    half[2:] = 2
    nibabel.Nifti1Image(half, np.eye(4)).to_filename(path / "halves.nii.gz")
    (path / "halves.tsv").write_text("index\tname\n1\tleft\n2\tright\n")
    lines = ["participant_id\tsite\tlabel"]
    for number in (1, 2, 11, 12):
        lines.append(f"sub-{number:02}\t{person(number)['site']}\t{person(number)['label']}")
        file = path / f"sub-{number:02}" / "func" / f"sub-{number:02}_task-rest_desc-preproc_bold.nii.gz"
        file.parent.mkdir(parents=True)
        image = np.random.default_rng(number).normal(100, 10, (4, 4, 4, 60)).astype(np.float32)
        nibabel.Nifti1Image(image, np.eye(4)).to_filename(file)
    (path / "participants.tsv").write_text("\n".join(lines) + "\n")


def make_cohort_file(path: Path) -> None:
    """The folder once more, as one file."""
    folder = path.with_name(f"{path.name}-folder")
    make_folder(folder)
    read(folder).save(path)


def make_atlases(path: Path) -> None:
    """The folder with a second atlas, four/P01_four.npy ... P20_four.npy."""
    make_folder(path)
    (path / "dataset.toml").write_text('atlas = "six"\n[atlases.four]\npattern = "four/{subject}_four.npy"\n')
    (path / "four").mkdir()
    for number in range(1, COUNT + 1):
        np.save(path / "four" / f"P{number:02}_four.npy", signal(COUNT + number, 4))


def make_atlases_file(path: Path) -> None:
    """The folder with two atlases once more, as one file."""
    folder = path.with_name(f"{path.name}-folder")
    make_atlases(folder)
    read(folder).save(path)


MAKERS = {
    "folder": make_folder,
    "texts": make_texts,
    "abide": make_abide,
    "mdd": make_mdd,
    "bids": make_bids,
    "nifti": make_nifti,
    "cohort": make_cohort_file,
    "atlases": make_atlases,
    "atlases-file": make_atlases_file,
}


def write(name: str, content: str | bytes) -> Spoil:
    """Put this content in a file of the input (`name` may hold wild cards that fit one file)."""

    def spoil(path: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        _the(path, name).write_bytes(data)

    return spoil


def change(name: str, old: str | bytes, new: str | bytes, count: int = -1) -> Spoil:
    """Replace text in a file; it must be there."""

    def spoil(path: Path) -> None:
        before, after = (one.encode() if isinstance(one, str) else one for one in (old, new))
        file = _the(path, name)
        content = file.read_bytes()
        assert before in content
        file.write_bytes(content.replace(before, after, count))

    return spoil


def cell(name: str, subject: str, column: str, value: str) -> Spoil:
    """Set one cell of a delimited table."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        separator = "," if file.suffix == ".csv" else "\t"
        rows = [line.split(separator) for line in file.read_text().splitlines()]
        (row,) = [row for row in rows if subject in row]
        row[rows[0].index(column)] = value
        file.write_text("\n".join(separator.join(row) for row in rows) + "\n")

    return spoil


def column(name: str, which: str, value: Callable[[int], str]) -> Spoil:
    """Set a whole column of a delimited table from the subjects' numbers 1, 2 ..."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        separator = "," if file.suffix == ".csv" else "\t"
        rows = [line.split(separator) for line in file.read_text().splitlines()]
        at = rows[0].index(which)
        for number, row in enumerate(rows[1:], start=1):
            row[at] = value(number)
        file.write_text("\n".join(separator.join(row) for row in rows) + "\n")

    return spoil


def line(name: str, number: int, edit: Callable[[str], str]) -> Spoil:
    """Change one line of a text file, counted from 1."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        lines = file.read_text().split("\n")
        lines[number - 1] = edit(lines[number - 1])
        file.write_text("\n".join(lines))

    return spoil


def without(*names: str) -> Spoil:
    """Remove files."""

    def spoil(path: Path) -> None:
        for name in names:
            _the(path, name).unlink()

    return spoil


def folder_for(name: str) -> Spoil:
    """A folder where a file is expected."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        file.unlink(missing_ok=True)
        file.mkdir()

    return spoil


def array(name: str, change_it: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.generic]]) -> Spoil:
    """Replace a .npy file by something made of its content."""

    def spoil(path: Path) -> None:
        np.save(path / name, change_it(np.load(path / name)))

    return spoil


def value(number: float) -> Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
    """The series with one odd value: volume 8 of the third ROI."""

    def put(series: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        series[7, 2] = number
        return series

    return put


def cut(name: str, keep: int | float) -> Spoil:
    """Keep so many bytes, or such a share, of a file."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        content = file.read_bytes()
        file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])

    return spoil


def flip(name: str, at: int, bits: int) -> Spoil:
    """Flip bits of one byte of a file."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        content = bytearray(file.read_bytes())
        content[at] ^= bits
        file.write_bytes(content)

    return spoil


def variables(name: str, **content: object) -> Spoil:
    """Write a .mat file with these variables."""

    def spoil(path: Path) -> None:
        savemat(_the(path, name), content)

    return spoil


def in_book(edit: Callable[[openpyxl.Workbook], object]) -> Spoil:
    """Change the phenotype workbook."""

    def spoil(path: Path) -> None:
        book = openpyxl.load_workbook(path / BOOK)
        edit(book)
        book.save(path / BOOK)

    return spoil


def in_zip(name: str, part: str, content: bytes) -> Spoil:
    """Replace one part of a zip file such as a workbook."""

    def spoil(path: Path) -> None:
        with zipfile.ZipFile(path / name) as old:
            parts = {one: old.read(one) for one in old.namelist()}
        assert part in parts
        with zipfile.ZipFile(path / name, "w") as new:
            for one, data in (parts | {part: content}).items():
                new.writestr(one, data)

    return spoil


def image(name: str, shape: tuple[int, ...]) -> Spoil:
    """Write an image of ones and twos of another shape."""

    def spoil(path: Path) -> None:
        content = np.random.default_rng(0).integers(1, 3, shape, dtype=np.int16)
        nibabel.Nifti1Image(content, np.eye(4)).to_filename(path / name)

    return spoil


def damaged_mat(name: str) -> Spoil:
    """A compressed .mat file with a byte of its stream changed."""

    def spoil(path: Path) -> None:
        file = _the(path, name)
        savemat(file, {"ROISignals": np.zeros((VOLUMES, MDD_WIDTH))}, do_compression=True)
        content = bytearray(file.read_bytes())
        content[200] ^= 0xFF
        file.write_bytes(content)

    return spoil


def copy(source: Path, to: Path) -> None:
    """A copy of an input, be it a file or a folder."""
    if source.is_dir():
        shutil.copytree(source, to)
    else:
        shutil.copy(source, to)


def all_of(*spoils: Spoil) -> Spoil:
    """One after the other."""

    def spoil(path: Path) -> None:
        for one in spoils:
            one(path)

    return spoil


def tensors(path: Path, **changes: Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]]) -> None:
    """Rewrite a cohort file with some of its tensors changed and the header as it was."""
    with safe_open(path, framework="np") as file:
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    path.unlink()  # the healthy file may still be mapped
    save_file({name: changes.get(name, lambda one: one)(one) for name, one in content.items()}, path, metadata)


def header(path: Path, **changes: str) -> None:
    """Rewrite a cohort file with some of its header's entries changed."""
    with safe_open(path, framework="np") as file:
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    path.unlink()
    save_file(content, path, metadata | changes)


def matlab_73() -> bytes:
    """The head of a MATLAB 7.3 file: 512 bytes of which the first 128 are MATLAB's, then HDF5."""
    head = b"MATLAB 7.3 MAT-file".ljust(124) + struct.pack("<H", 0x0200) + b"IM"
    return head.ljust(512, b"\0") + b"\x89HDF\r\n\x1a\n"


def _the(path: Path, name: str) -> Path:
    """The file of that name, or the one that fits the wild cards; the input itself where the name is empty."""
    if not name:
        return path
    if "*" not in name:
        return path / name
    (file,) = path.glob(name)
    return file


def damage(content: bytes, count: int, safe: range = range(0)):
    """The content cut short, and with one to five bits flipped (none at the positions to spare)."""
    dice = random.Random(0)
    for turn in range(count):
        if turn % 3 == 0:
            yield content[: dice.randrange(len(content))]
        else:
            changed = bytearray(content)
            for _ in range(dice.choice((1, 1, 5))):
                at = dice.randrange(min(400, len(content)) if turn % 2 else len(content))
                if at not in safe:
                    changed[at] ^= 1 << dice.randrange(8)
            yield bytes(changed)


def only_sentences(load, file, content: bytes, count: int, safe: range = range(0)) -> None:
    refused = 0
    for damaged in damage(content, count, safe):
        file.unlink(missing_ok=True)
        file.write_bytes(damaged)
        try:
            load(file)
        except InputError as error:
            refused += 1
            assert file.name in str(error) and "\n" not in str(error)
    assert refused > count / 5
