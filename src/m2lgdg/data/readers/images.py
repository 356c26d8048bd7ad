"""NIfTI images and CIFTI-2 series, opened with bounded memory: a small file can declare, or unpack to, any number of bytes.

Used by the BIDS reader. Parcellated CIFTI-2 series are taken as they are, dense ones as means over a parcellation, with the
names of its label table.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort_arrays import need_seconds
from m2lgdg.data.readers.arrays import Rois, Series
from m2lgdg.data.readers.cifti import Axis, open_cifti
from m2lgdg.storage import InputError, one_line

PARCELLATED, DENSE, LABELS, CONNECTOME = ".ptseries.nii", ".dtseries.nii", ".dlabel.nii", ".pconn.nii"
AXES = {  # of each kind of CIFTI-2 file, by their classes in nibabel
    PARCELLATED: (("SeriesAxis", "ParcelsAxis"), "a parcellated series (time, parcel)"),
    DENSE: (("SeriesAxis", "BrainModelAxis"), "a dense series (time, grayordinate)"),
    CONNECTOME: (("ParcelsAxis", "ParcelsAxis"), "a parcellated connectome (parcel, parcel)"),
    LABELS: (("LabelAxis", "BrainModelAxis"), "a parcellation (label, grayordinate)"),
}
LARGEST_VOXELS = 8 << 30  # bytes of voxels: 1,200 volumes of 2 mm take 4.3 GB
LARGEST_GRID = 1 << 27  # vertices of a surface, or voxels of the grid in which those of a parcellation lie
CHUNK = 1 << 20
DAMAGED = (ValueError, OSError, EOFError, zlib.error)  # raised for a truncated or altered .nii.gz
TIME_UNITS = {"sec": 1.0, "unknown": 1.0, "msec": 1e-3, "usec": 1e-6}  # of a NIfTI header, in seconds


def load_image(path: Path) -> Any:
    """Image whose voxels are not yet read; one that declares more than the limits is refused before anything is allocated."""
    import nibabel

    _need_regular(path)
    try:
        image: Any = nibabel.load(path)
        affine = np.asarray(image.affine, dtype=np.float64)
        size = _size(image)
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
    declared = int(image.dataobj.offset) + _size(image)
    count = 0
    with contextlib.suppress(*DAMAGED), gzip.open(path) as file:  # reading the voxels tells what is wrong with a damaged file
        while count <= declared and (chunk := file.read(CHUNK)):
            count += len(chunk)
    if count > declared:
        raise InputError(f"{path} has more than the {declared} bytes that its header declares; it is damaged.")


def _size(image: Any) -> int:
    return int(math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize)


def _need_regular(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"cannot read {path}: it is not a regular file.")


def is_cifti(path: Path) -> bool:
    """Whether a file is a CIFTI-2 series, by its name."""
    return path.name.endswith((PARCELLATED, DENSE))


def header_seconds(path: Path) -> float:
    """Seconds per volume by the header of a NIfTI image or the time axis of a CIFTI-2 series; NaN if it has none."""
    if is_cifti(path):
        _, (time, _) = _open(path)
        return need_seconds(time.seconds, f"{path}, time axis") if 0 < time.seconds < math.inf else math.nan
    if not path.name.endswith(".nii.gz"):
        return math.nan
    header = load_image(path).header
    zooms: tuple[float, ...] = header.get_zooms()
    try:
        unit = TIME_UNITS.get(header.get_xyzt_units()[1], math.nan)  # NaN for hertz and other units that are no time
    except KeyError:
        raise InputError(f"{path}, header: its unit of time has an unknown code; write the TR into a JSON sidecar.") from None
    return need_seconds(float(zooms[3]) * unit if len(zooms) == 4 and zooms[3] > 0 else math.nan, f"{path}, header")


def load_parcellated(path: Path, content: bytes | None = None) -> tuple[Rois, Series]:
    """Names of the parcels and (time, roi) series of a .ptseries.nii file, or of its content."""
    stored, (_, axis) = _open(path, content)
    return axis.parcels, np.ascontiguousarray(_numbers(path, stored))


def load_connectome(path: Path, content: bytes | None = None) -> tuple[Rois, Series]:
    """Names of the parcels and (roi, roi) matrix of a .pconn.nii file, or of its content."""
    stored, (rows, columns) = _open(path, content)
    if rows.parcels != columns.parcels:
        raise InputError(f"{path}: the parcels of its rows are not those of its columns.")
    return columns.parcels, _numbers(path, stored)


class Parcels:
    """Parcels of a .dlabel.nii file, by vertex of each surface and by voxel; its first map counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stored, (maps, models) = _open(path)
        if maps.length == 0:
            raise InputError(f"{path} has no map of labels.")
        keys = _numbers(path, stored)[0]
        table = maps.labels[0]
        present = [int(key) for key in np.unique(keys[np.isfinite(keys)]) if key != 0]  # 0 is what belongs to no parcel
        unnamed = next((key for key in present if key not in table), None)
        if unnamed is not None or not present:
            problem = "labels no grayordinate" if unnamed is None else f"has no name for label {unnamed}"
            raise InputError(f"{path} {problem}.")
        self.names = {key: table[key] for key in present}
        self.surfaces: dict[str, npt.NDArray[np.int64]] = {}
        self.grid, self.affine = np.zeros((0, 0, 0), dtype=np.int64), models.affine
        self.last: tuple[Axis, list[npt.NDArray[np.intp]]] | None = None
        if models.grid is not None:
            self.grid = _empty(path, models.grid)
        for name, chosen, places, vertices in models.structures:
            if vertices is not None:
                surface = self.surfaces[name] = _empty(path, (vertices,))
                surface[_inside(path, places, surface.shape)] = keys[chosen]
            else:
                self.grid[_inside(path, places, self.grid.shape)] = keys[chosen]

    def means(self, path: Path) -> tuple[Rois, Series]:
        """(time, roi) means over the grayordinates of each parcel that are not NaN or 0 at every volume; 0 without any."""
        stored, (_, models) = _open(path)
        last = self.last  # taken once, since other threads replace it
        if last is None or last[0] is not models:
            last = self.last = models, self._members(path, models)
        signals = _numbers(path, stored).T  # (grayordinate, time), as they are stored
        covered = np.ones(len(signals), dtype=bool)
        suspect = np.flatnonzero((np.isnan(signals[:, :1]) | (signals[:, :1] == 0)).all(axis=1))  # by their first volume
        covered[suspect] = ~(np.isnan(signals[suspect]).all(axis=1) | (signals[suspect] == 0).all(axis=1))
        series = np.zeros((signals.shape[1], len(self.names)), dtype=np.float32)
        for column, members in enumerate(last[1]):
            present = members[covered[members]]
            if len(present):
                series[:, column] = signals[present].mean(axis=0, dtype=np.float64)
        return tuple(self.names.values()), series

    def _members(self, path: Path, models: Axis) -> list[npt.NDArray[np.intp]]:
        """Grayordinates of each parcel."""
        keys = np.zeros(models.length, dtype=np.int64)
        for name, chosen, places, vertices in models.structures:
            if vertices is not None and name in self.surfaces:
                surface = self.surfaces[name]
                if vertices != len(surface):
                    counts = f"{vertices} vertices in {name}, but {self.path.name} has {len(surface)}"
                    raise InputError(f"{path}: {counts}; give a parcellation of the same surfaces.")
                keys[chosen] = surface[_inside(path, places, surface.shape)]
            elif vertices is None and self.grid.size:
                if models.grid != self.grid.shape or not np.allclose(models.affine, self.affine):
                    raise InputError(f"{path}: its voxels are not on the grid of {self.path.name}.")
                keys[chosen] = self.grid[_inside(path, places, self.grid.shape)]
        if not keys.any():
            raise InputError(f"{path} has no grayordinate of a parcel of {self.path.name}.")
        return [np.flatnonzero(keys == key) for key in self.names]


def _open(path: Path, content: bytes | None = None) -> tuple[Any, tuple[Axis, Axis]]:
    """Numbers of a CIFTI-2 file, not yet read, and its two axes. A file of another kind than its name says is refused."""
    expected, meaning = next(AXES[suffix] for suffix in AXES if path.name.endswith(suffix))
    if content is None:
        if not path.exists():
            raise InputError(f"{path} does not exist.")
        _need_regular(path)
    try:
        stored, axes = open_cifti(path, content)
        size = math.prod(stored.shape) * stored.dtype.itemsize
    except Exception as error:  # a damaged header raises errors of any type in nibabel and the parser of XML
        raise InputError(f"{path} is not a readable CIFTI-2 file ({one_line(error) or type(error).__name__}).") from None
    if tuple(axis.kind for axis in axes) != expected or tuple(stored.shape) != tuple(axis.length for axis in axes):
        raise InputError(f"{path} is not {meaning}.")
    limit = LARGEST_VOXELS if content is None else len(content)
    if size > limit:
        raise InputError(f"{path}: its header declares {size} bytes of numbers, more than the limit of {limit}.")
    return stored, (axes[0], axes[1])


def _numbers(path: Path, stored: Any) -> Series:
    try:
        with np.errstate(over="ignore"):
            return np.asarray(stored, dtype=np.float32)
    except Exception as error:  # as above
        raise InputError(f"{path} is damaged or incomplete: its numbers cannot be read ({one_line(error)}).") from None


def _empty(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    if math.prod(shape) > LARGEST_GRID:
        raise InputError(f"{path} declares {' x '.join(map(str, shape))} places, more than the limit of {LARGEST_GRID}.")
    return np.zeros(shape, dtype=np.int64)


def _inside(path: Path, places: npt.NDArray[np.int_], shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int_], ...]:
    if len(places) and ((places < 0).any() or (places >= shape).any()):
        raise InputError(f"{path} is damaged: some of its vertices or voxels are outside of their surface or grid.")
    return tuple(places.T)
