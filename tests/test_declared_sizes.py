"""Files that declare more than they hold, or hold more than they declare: refused in a sentence, before memory is spent."""

import contextlib
import gzip
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from scipy.io import savemat

from m2lgdg import InputError
from m2lgdg.data.readers import images
from m2lgdg.data.readers.gather import load_mat
from m2lgdg.data.readers.images import load_image, need_whole

nibabel = pytest.importorskip("nibabel")
MODEST = 8 << 20  # bytes


@contextlib.contextmanager
def refused(match):
    """The block ends in this sentence, with little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=match):
            yield
        assert tracemalloc.get_traced_memory()[1] < MODEST
    finally:
        tracemalloc.stop()


def part(kind, content):
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def mat(path, shape, declared, content, *, name=b"x", compressed=False, shape_bytes=None, flags=6):
    """A MATLAB file of one array of doubles whose numbers are announced as `declared` bytes."""
    sizes = struct.pack(f"<{len(shape)}i", *shape)
    dims = part(5, sizes) if shape_bytes is None else struct.pack("<II", 5, shape_bytes) + sizes
    body = part(6, struct.pack("<II", flags, 0)) + dims + part(1, name) + struct.pack("<II", 9, declared) + content
    element = struct.pack("<II", 14, len(body)) + body
    if compressed:
        packed = zlib.compress(element)
        element = struct.pack("<II", 15, len(packed)) + packed
    path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM" + element)
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_a_true_file_is_read(tmp_path, compressed):
    numbers = np.arange(12.0).reshape(3, 4)
    path = mat(tmp_path / "a.mat", (3, 4), 96, numbers.tobytes(order="F"), compressed=compressed)
    np.testing.assert_array_equal(load_mat(path, None), numbers)
    savemat(tmp_path / "b.mat", {"x": numbers, "y": [[1, 2]], "z": {"a": 1}, "w": np.array([[1j]])}, do_compression=compressed)
    np.testing.assert_array_equal(load_mat(tmp_path / "b.mat", "x"), numbers)
    np.testing.assert_array_equal(load_mat(tmp_path / "b.mat", "y"), [[1, 2]])
    with refused("w contains complex values"):
        load_mat(tmp_path / "b.mat", "w")
    savemat(tmp_path / "c.mat", {"x": numbers}, format="4")
    np.testing.assert_array_equal(load_mat(tmp_path / "c.mat", "x"), numbers)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("declared", [4_000_000_000, 97, 0])
def test_bytes_that_do_not_fit_the_shape(tmp_path, compressed, declared):
    path = mat(tmp_path / "a.mat", (3, 4), declared, bytes(96), compressed=compressed)
    with refused(rf"variable x of shape \(3, 4\) needs 96 bytes, but the file declares {declared}"):
        load_mat(path, None)


def test_many_bytes_behind_a_small_shape(tmp_path):
    """As a compressed file of a few hundred kilobytes would have them."""
    path = mat(tmp_path / "a.mat", (2, 2), 32 << 20, bytes(32 << 20), compressed=True)
    assert path.stat().st_size < 1 << 20
    with refused("needs 32 bytes"):
        load_mat(path, None)


def test_bytes_that_are_not_in_the_file(tmp_path):
    path = mat(tmp_path / "a.mat", (3, 4_000_000), 96_000_000, bytes(96))
    with refused("of shape .3, 4000000. needs 96000000 bytes, but only 96 follow"):
        load_mat(path, None)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_shape_or_an_element_longer_than_the_file(tmp_path, compressed):
    with refused("not a readable MATLAB file"):
        load_mat(mat(tmp_path / "a.mat", (3, 4), 96, bytes(96), compressed=compressed, shape_bytes=2_000_000_000), None)
    path = mat(tmp_path / "b.mat", (3, 4), 96, bytes(96))
    content = bytearray(path.read_bytes())
    content[132:136] = struct.pack("<I", 3_000_000_000)
    path.write_bytes(content)
    with refused("not a readable MATLAB file"):
        load_mat(path, None)


def nifti(path, shape=(2, 3, 4, 5), extra=b"", **fields):
    image = nibabel.Nifti1Image(np.zeros((2, 3, 4, 5), np.float32), np.eye(4))
    content = bytearray(image.to_bytes())
    header = nibabel.Nifti1Header(bytes(content[:348]))
    header.set_data_shape(shape)
    for name, value in fields.items():
        header[name] = value
    content[:348] = header.binaryblock
    path.write_bytes(gzip.compress(bytes(content) + extra))
    return path


def test_an_image_as_declared(tmp_path):
    path = nifti(tmp_path / "a.nii.gz")
    image = load_image(path)
    need_whole(path, image)
    assert image.shape == (2, 3, 4, 5)


def test_a_header_that_declares_too_much(tmp_path):
    path = nifti(tmp_path / "a.nii.gz", shape=(2000, 2000, 2000, 300))
    with refused(r"declares 9600000000000 bytes of voxels .*more than the limit of 8589934592"):
        load_image(path)


def test_more_bytes_than_declared(tmp_path):
    """They are counted in chunks, and no further than the first that is too many."""
    path = nifti(tmp_path / "a.nii.gz", extra=bytes(200 << 20))
    with refused("has more than the 832 bytes that its header declares"):
        need_whole(path, load_image(path))


def test_an_extension_that_never_ends(tmp_path):
    path = nifti(tmp_path / "a.nii.gz", vox_offset=2e9)
    with refused(r"its voxels start at byte 2e\+09"):
        load_image(path)
    path = nifti(tmp_path / "b.nii.gz", vox_offset=np.nan)
    with refused("not a readable image"):
        load_image(path)


def test_the_limit_is_that_of_the_voxels(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "LARGEST_VOXELS", 479)
    with refused("declares 480 bytes"):
        load_image(nifti(tmp_path / "a.nii.gz"))
