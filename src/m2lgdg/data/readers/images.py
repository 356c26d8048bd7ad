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
        _, (series, _) = _open(path)
        # The file stores a step and a power of ten, so that milliseconds and microseconds are in seconds here.
        seconds = float(series.step) if series.unit == "SECOND" else math.nan
        return need_seconds(seconds, f"{path}, time axis") if 0 < seconds < math.inf else math.nan
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
    image, (_, parcels) = _open(path, content)
    return tuple(str(name).strip() for name in parcels.name), np.ascontiguousarray(_numbers(path, image))


def load_connectome(path: Path, content: bytes | None = None) -> tuple[Rois, Series]:
    """Names of the parcels and (roi, roi) matrix of a .pconn.nii file, or of its content."""
    image, axes = _open(path, content)
    rows, columns = (tuple(str(name).strip() for name in axis.name) for axis in axes)
    if rows != columns:
        raise InputError(f"{path}: the parcels of its rows are not those of its columns.")
    return columns, _numbers(path, image)


class Parcels:
    """Parcels of a .dlabel.nii file, by vertex of each surface and by voxel; its first map counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        image, (maps, models) = _open(path)
        if len(maps) == 0:
            raise InputError(f"{path} has no map of labels.")
        keys = _numbers(path, image)[0]
        table = maps.label[0]
        present = [int(key) for key in np.unique(keys[np.isfinite(keys)]) if key != 0]  # 0 is what belongs to no parcel
        unnamed = next((key for key in present if key not in table), None)
        if unnamed is not None or not present:
            problem = "labels no grayordinate" if unnamed is None else f"has no name for label {unnamed}"
            raise InputError(f"{path} {problem}.")
        self.names = {key: str(table[key][0]).strip() for key in present}
        self.surfaces: dict[str, npt.NDArray[np.int64]] = {}
        self.grid, self.affine = np.zeros((0, 0, 0), dtype=np.int64), models.affine
        if models.volume_shape is not None:
            self.grid = _empty(path, models.volume_shape)
        for name, chosen, model in models.iter_structures():
            if name in models.nvertices:
                surface = self.surfaces[name] = _empty(path, (models.nvertices[name],))
                surface[_inside(path, model.vertex[:, None], surface.shape)] = keys[chosen]
            else:
                self.grid[_inside(path, model.voxel, self.grid.shape)] = keys[chosen]

    def means(self, path: Path) -> tuple[Rois, Series]:
        """(time, roi) means over the grayordinates of each parcel that are not NaN or 0 at every volume; 0 without any."""
        image, (_, models) = _open(path)
        keys = self._keys(path, models)
        signals = _numbers(path, image).T  # (grayordinate, time), as they are stored
        covered = ~(np.isnan(signals).all(axis=1) | (signals == 0).all(axis=1))
        series = np.zeros((signals.shape[1], len(self.names)), dtype=np.float32)
        for column, key in enumerate(self.names):
            members = np.flatnonzero(covered & (keys == key))
            if len(members):
                series[:, column] = signals[members].mean(axis=0, dtype=np.float64)
        return tuple(self.names.values()), series

    def _keys(self, path: Path, models: Any) -> npt.NDArray[np.int64]:
        keys = np.zeros(len(models), dtype=np.int64)
        for name, chosen, model in models.iter_structures():
            if name in models.nvertices and name in self.surfaces:
                surface = self.surfaces[name]
                if models.nvertices[name] != len(surface):
                    vertices = f"{models.nvertices[name]} vertices in {name}, but {self.path.name} has {len(surface)}"
                    raise InputError(f"{path}: {vertices}; give a parcellation of the same surfaces.")
                keys[chosen] = surface[_inside(path, model.vertex[:, None], surface.shape)]
            elif name not in models.nvertices and self.grid.size:
                if models.volume_shape != self.grid.shape or not np.allclose(models.affine, self.affine):
                    raise InputError(f"{path}: its voxels are not on the grid of {self.path.name}.")
                keys[chosen] = self.grid[_inside(path, model.voxel, self.grid.shape)]
        if not keys.any():
            raise InputError(f"{path} has no grayordinate of a parcel of {self.path.name}.")
        return keys


def _open(path: Path, content: bytes | None = None) -> tuple[Any, tuple[Any, Any]]:
    """CIFTI-2 image and its two axes; the numbers are not yet read. A file of another kind than its name says is refused."""
    import nibabel

    expected, meaning = next(AXES[suffix] for suffix in AXES if path.name.endswith(suffix))
    if content is None:
        if not path.exists():
            raise InputError(f"{path} does not exist.")
        _need_regular(path)
    try:
        cls: Any = nibabel.Cifti2Image
        image = cls.from_filename(path) if content is None else cls.from_bytes(content)
        axes = tuple(image.header.get_axis(i) for i in range(image.ndim))
        size = _size(image)
    except Exception as error:  # a damaged header raises errors of any type in nibabel and the parser of XML
        raise InputError(f"{path} is not a readable CIFTI-2 file ({one_line(error) or type(error).__name__}).") from None
    if tuple(type(axis).__name__ for axis in axes) != expected or tuple(image.shape) != tuple(map(len, axes)):
        raise InputError(f"{path} is not {meaning}.")
    limit = LARGEST_VOXELS if content is None else len(content)
    if size > limit:
        raise InputError(f"{path}: its header declares {size} bytes of numbers, more than the limit of {limit}.")
    return image, (axes[0], axes[1])


def _numbers(path: Path, image: Any) -> Series:
    try:
        with np.errstate(over="ignore"):
            return np.asarray(image.dataobj, dtype=np.float32)
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
