"""MATLAB 7.3 files, which are HDF5: read as older ones are, and nothing outside of them is followed."""

import sys

import h5py
import numpy as np
import pytest
from scipy.io import savemat

from m2lgdg import InputError
from m2lgdg.data.readers.arrays import load_mat
from m2lgdg.data.readers.matlab import LARGEST, load_variable

SERIES = np.random.default_rng(0).normal(size=(7, 3))


def write_73(path, **variables):
    """A file as MATLAB writes it: 512 bytes before HDF5, the axes in reverse, the class of each variable as an attribute."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in variables.items():
            data = file.create_dataset(name, data=np.asarray(value).T)
            data.attrs["MATLAB_class"] = np.bytes_("double")
    head = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
    with open(path, "r+b") as file:
        file.write(head)
    return path


def test_both_versions_hold_the_same(tmp_path):
    savemat(tmp_path / "old.mat", {"ts": SERIES})
    new = write_73(tmp_path / "new.mat", ts=SERIES)
    np.testing.assert_array_equal(load_mat(new, None), SERIES.astype(np.float32))
    np.testing.assert_array_equal(load_mat(new, "ts"), load_mat(tmp_path / "old.mat", "ts"))


def test_the_only_variable_that_fits(tmp_path):
    stack = np.zeros((4, 4, 6))
    new = write_73(tmp_path / "new.mat", ts=SERIES, fc=stack)
    assert load_variable(new, None, lambda one: one.shape == (4, 4, 6)).shape == (4, 4, 6)
    with pytest.raises(InputError, match=r"new\.mat has 2 variables \(fc, ts\); name one in dataset\.toml"):
        load_variable(new, None)
    with pytest.raises(InputError, match=r"new\.mat has no variable z\."):
        load_variable(new, "z")


def test_without_h5py_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    new = write_73(tmp_path / "new.mat", ts=SERIES)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"new\.mat: a MATLAB 7\.3 file .* needs h5py; install it with: .*matlab"):
        load_mat(new, None)


def test_no_link_and_no_external_numbers_are_followed(tmp_path):
    write_73(tmp_path / "secret.mat", ts=SERIES)
    SERIES.tofile(tmp_path / "numbers.bin")
    path = write_73(tmp_path / "a.mat", own=SERIES)
    with h5py.File(path, "r+") as file:
        file["linked"] = h5py.ExternalLink(str(tmp_path / "secret.mat"), "ts")
        file.create_dataset("raw", SERIES.shape, "f8", external=[(str(tmp_path / "numbers.bin"), 0, SERIES.nbytes)])
        layout = h5py.VirtualLayout(SERIES.shape[::-1], "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.mat"), "ts", SERIES.shape[::-1])
        file.create_virtual_dataset("virtual", layout)
        np.testing.assert_array_equal(file["virtual"][:], SERIES.T)  # h5py itself would follow it
    for name in ("linked", "raw", "virtual"):
        with pytest.raises(InputError, match=rf"a\.mat has no variable {name}\."):
            load_variable(path, name)
    np.testing.assert_array_equal(load_variable(path, None), SERIES)  # the only one left


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([[1 + 2j, 0], [0, 1]]), "variable x contains complex values"),
        (np.array([[b"a", b"b"]]), r"variable x contains \|S1 values"),
    ],
)
def test_what_is_no_number(tmp_path, value, words):
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["x"] = value
    with open(tmp_path / "a.mat", "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    with pytest.raises(InputError, match=words):
        load_variable(tmp_path / "a.mat", None)


def test_a_variable_that_grows(tmp_path):
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file.create_dataset("x", (9000, 9000), "f4", chunks=True, compression="gzip")  # never written: a few bytes
    with open(tmp_path / "a.mat", "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    assert (tmp_path / "a.mat").stat().st_size < 100_000
    with pytest.raises(InputError, match=rf"variable x would take {8 * 9000 * 9000} bytes, more than the limit of {LARGEST}"):
        load_variable(tmp_path / "a.mat", None)
