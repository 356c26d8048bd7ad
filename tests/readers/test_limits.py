"""Files that could exhaust memory or never end, and those that once ended in a traceback, are refused in one sentence."""

import os
import threading
import zipfile

import miniature
import nibabel
import numpy as np
import openpyxl
import pytest
from scipy.io import savemat

from m2lgdg import InputError, read
from m2lgdg.data.atlases import read_centroids
from m2lgdg.data.readers import arrays, tables
from m2lgdg.data.readers.arrays import load_array, load_mat
from m2lgdg.data.readers.tables import read_sheet, read_text_table

ATLAS = "4S156Parcels"


def numbers(rows=30, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def sidecar_of(release, subject):
    (file,) = release.folder.glob(f"{subject}/**/*_atlas-{ATLAS}_*timeseries.tsv")
    return file.with_suffix(".json")


def fifo(path):
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("suffix", "load"),
    [
        (".csv", load_array),
        (".npy", load_array),
        (".mat", load_array),
        (".tsv", read_text_table),
        (".xlsx", lambda path: read_sheet(path, "MDD")),
        (".tsv", lambda path: read_centroids(path, ("a",))),
        (".nii.gz", lambda path: read_centroids(path, ("a",))),
    ],
)
def test_pipes_and_devices_are_refused(tmp_path, suffix, load):
    link = tmp_path / f"zero{suffix}"
    link.symlink_to("/dev/zero")
    for path in (fifo(tmp_path / f"pipe{suffix}"), link):
        result = []

        def attempt(path=path, result=result):
            with pytest.raises(InputError) as error:
                load(path)
            result.append(str(error.value))

        reader = threading.Thread(target=attempt, daemon=True)
        reader.start()
        reader.join(60)  # only if it hangs
        assert result == [f"cannot read {path}: it is not a regular file."]


def test_an_image_that_is_a_pipe(tmp_path):
    images = miniature.nifti(tmp_path / "images")
    pipe = fifo(tmp_path / "atlas.nii.gz")
    with pytest.raises(InputError, match=r"cannot read .*atlas\.nii\.gz: it is not a regular file\."):
        read(images.folder, atlas_image=pipe)


def test_files_above_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "LARGEST", 1000)
    monkeypatch.setattr(tables, "LARGEST_TABLE", 1000)
    np.save(tmp_path / "a.npy", numbers(100))
    (tmp_path / "a.tsv").write_text("a\n" * 1000)
    with pytest.raises(InputError, match=r"a\.npy has 2528 bytes, more than the limit of 1000\."):
        load_array(tmp_path / "a.npy")
    with pytest.raises(InputError, match=r"a\.tsv has 2000 bytes, more than the limit of 1000\."):
        read_text_table(tmp_path / "a.tsv")


def test_a_matlab_file_that_grows(tmp_path):
    """Two compressed megabytes would become one gigabyte; the header is enough to refuse them."""
    savemat(tmp_path / "a.mat", {"ts": np.zeros((10, 10)), "more": np.ones(3)}, do_compression=True)
    assert load_mat(tmp_path / "a.mat", "ts").shape == (10, 10)
    big = np.zeros((9000, 9000), dtype=np.int8)
    savemat(tmp_path / "b.mat", {"ts": big}, do_compression=True)
    assert (tmp_path / "b.mat").stat().st_size < 1_000_000
    words = rf"b\.mat: variable ts would take {8 * 9000 * 9000} bytes, more than the limit of {arrays.LARGEST}\."
    with pytest.raises(InputError, match=words):
        load_mat(tmp_path / "b.mat", None)


def test_a_workbook_with_a_cell_far_away(tmp_path):
    book = openpyxl.Workbook()
    book.active.title = "MDD"
    book.active["A1"], book.active["B1"], book.active["A2"] = "ID", "Age", "S1-1-0001"
    book.save(tmp_path / "a.xlsx")
    assert read_sheet(tmp_path / "a.xlsx", "MDD").to_dict("list") == {"ID": ["S1-1-0001"], "Age": [""]}
    book.active["XFD90000"] = 1
    book.save(tmp_path / "b.xlsx")
    assert (tmp_path / "b.xlsx").stat().st_size < 10_000
    with pytest.raises(InputError, match=r"b\.xlsx, sheet MDD has more than 4000000 cells; delete what is outside the table\."):
        read_sheet(tmp_path / "b.xlsx", "MDD")


def test_a_workbook_that_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LARGEST_TABLE", 100_000)
    book = openpyxl.Workbook()
    book.save(tmp_path / "a.xlsx")
    with zipfile.ZipFile(tmp_path / "a.xlsx", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/more.xml", b" " * 5_000_000)
    with pytest.raises(InputError, match=r"a\.xlsx has 50\d+ bytes without compression, more than the limit of 100000\."):
        read_sheet(tmp_path / "a.xlsx", "Sheet")


def test_a_sidecar_that_is_nested_deeply(tmp_path):
    xcpd = miniature.xcpd(tmp_path / "xcpd")
    sidecar_of(xcpd, "sub-07").write_text("[" * 200_000)
    with pytest.raises(InputError, match=r"sub-07.*\.json has no readable RepetitionTime\."):
        read(xcpd.folder, atlas=ATLAS)


def test_a_toml_that_is_nested_deeply(tmp_path):
    path = miniature.own_folder(tmp_path / "lab", dataset="name = " + "[" * 100_000).folder
    with pytest.raises(InputError, match=r"dataset\.toml is not valid TOML \("):
        read(path)


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_an_affine_without_a_place_in_space(tmp_path, value):
    images = miniature.nifti(tmp_path)
    (run,) = images.folder.glob("sub-02/func/*.nii.gz")
    for file in (run, images.atlas):
        image = nibabel.load(file)
        header, data = image.header.copy(), np.asarray(image.dataobj)
        header["sform_code"], header["qform_code"] = 1, 0
        spoiled = nibabel.Nifti1Image(data, None, header)
        spoiled.header["srow_x"] = value
        broken = tmp_path / "broken" / file.name
        broken.parent.mkdir(exist_ok=True)
        nibabel.save(spoiled, broken)
        other = {"atlas_image": broken}
        if file == run:
            broken.replace(run)
            other = {"atlas_image": images.atlas}
        with pytest.raises(InputError, match=rf"{file.name} has an affine that is singular or not finite"):
            read(images.folder, **other)
        nibabel.save(image.__class__(data, image.affine, image.header), file)
    if np.isnan(value):
        with pytest.raises(InputError, match=r"cannot be read as an atlas \(its affine is not finite\)"):
            read_centroids(broken, ("a",))


def test_an_absolute_pattern(tmp_path):
    path = miniature.own_folder(tmp_path / "lab", dataset=f"pattern = '{tmp_path}/lab/{{subject}}.npy'").folder
    with pytest.raises(InputError, match=r"dataset\.toml, key pattern: '/.*\.npy' is absolute; write it relative to "):
        read(path)
