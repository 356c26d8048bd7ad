"""Opening of NIfTI and other images with bounded memory: a small compressed file can hold any number of bytes.

Used by the BIDS reader before nibabel and nilearn, which allocate what a header declares and read what a file contains.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from m2lgdg.data.readers.gather import need_regular
from m2lgdg.storage import InputError, one_line

LARGEST_FILE = 32 << 30  # bytes of an image file
LARGEST_VOXELS = 8 << 30  # bytes of voxels: 1,200 volumes of 2 mm take 4.3 GB
LARGEST_HEADER = 64 << 20  # bytes before the voxels, with extensions
HEADER_BYTES = 540  # of NIfTI-2, the longer one
CHUNK = 1 << 20
DAMAGED = (ValueError, OSError, EOFError, zlib.error)  # raised for a truncated or altered .nii.gz


def load_image(path: Path) -> Any:
    """Image whose voxels are not yet read; one that declares more than the limits is refused before anything is allocated."""
    import nibabel

    need_regular(path, LARGEST_FILE)
    try:
        check_offset(path)
        image: Any = nibabel.load(path)
        affine = np.asarray(image.affine, dtype=np.float64)
        size = math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize
    except (*DAMAGED, AttributeError, OverflowError, nibabel.filebasedimages.ImageFileError) as error:
        raise InputError(f"{path} is not a readable image ({one_line(error)}).") from None
    if size > LARGEST_VOXELS:
        declared = f"{size} bytes of voxels (shape {image.shape})"
        raise InputError(f"{path}: its header declares {declared}, more than the limit of {LARGEST_VOXELS}.")
    if affine.shape != (4, 4) or not np.isfinite(affine).all() or np.linalg.matrix_rank(affine) < 4:
        raise InputError(f"{path} has an affine that is singular or not finite, so its voxels have no place in space.")
    return image


def need_whole(path: Path, image: Any) -> None:
    """Refuse a .nii.gz with more bytes than its header declares, which are counted without keeping them."""
    if not path.name.endswith(".nii.gz"):
        return
    declared = int(image.dataobj.offset) + math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize
    count = 0
    with contextlib.suppress(*DAMAGED), gzip.open(path) as file:  # reading the voxels tells what is wrong with a damaged file
        while count <= declared and (chunk := file.read(CHUNK)):
            count += len(chunk)
    if count > declared:
        raise InputError(f"{path} has more than the {declared} bytes that its header declares; it is damaged.")


def check_offset(path: Path) -> None:
    """Refuse a NIfTI file whose voxels start so late that its header extensions would fill the memory."""
    import nibabel

    if not path.name.endswith((".nii", ".nii.gz")):
        return
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    header: Any
    for header in (nibabel.Nifti1Header, nibabel.Nifti2Header):
        length = header.template_dtype.itemsize
        if header.may_contain_header(start) and len(start) >= length:
            offset = float(header(start[:length], check=False)["vox_offset"])
            if not offset <= LARGEST_HEADER:
                raise ValueError(f"its voxels start at byte {offset:g}, beyond the limit of {LARGEST_HEADER}")
