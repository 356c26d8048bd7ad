"""Files that declare more than they hold, or hold more than they declare: refused in a sentence, before memory is spent."""

import contextlib
import gzip
import tracemalloc

import numpy as np
import pytest

from m2lgdg import InputError
from m2lgdg.data.readers import images
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
