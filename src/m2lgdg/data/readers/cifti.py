"""CIFTI-2 series: parcellated ones (.ptseries.nii) as they are, dense ones (.dtseries.nii) as means over a parcellation.

Used by the BIDS reader. Names of the ROIs come from the parcels of the file, or from the label table of the .dlabel.nii file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.data.readers.gather import Rois, Series, need_regular
from m2lgdg.data.readers.images import LARGEST_FILE, LARGEST_VOXELS, check_offset
from m2lgdg.data.readers.tables import need_seconds
from m2lgdg.storage import InputError, one_line

PARCELLATED, DENSE, LABELS = ".ptseries.nii", ".dtseries.nii", ".dlabel.nii"
AXES = {  # of each kind of file, by their classes in nibabel
    PARCELLATED: (("SeriesAxis", "ParcelsAxis"), "a parcellated series (time, parcel)"),
    DENSE: (("SeriesAxis", "BrainModelAxis"), "a dense series (time, grayordinate)"),
    LABELS: (("LabelAxis", "BrainModelAxis"), "a parcellation (label, grayordinate)"),
}
LARGEST_GRID = 1 << 27  # vertices of a surface, or voxels of the grid in which those of a parcellation lie


def is_cifti(path: Path) -> bool:
    """Whether a file is a CIFTI-2 series, by its name."""
    return path.name.endswith((PARCELLATED, DENSE))


def repetition_time(path: Path) -> float:
    """Step of the time axis in seconds; NaN if the axis is not in seconds or has no positive step."""
    _, (series, _) = _open(path)
    # The file stores a step and a power of ten, so that milliseconds and microseconds are in seconds here.
    seconds = float(series.step) if series.unit == "SECOND" else math.nan
    return need_seconds(seconds, f"{path}, time axis") if 0 < seconds < math.inf else math.nan


def load_parcellated(path: Path) -> tuple[Rois, Series]:
    """Names of the parcels and (time, roi) series."""
    image, (_, parcels) = _open(path)
    return tuple(str(name).strip() for name in parcels.name), np.ascontiguousarray(_numbers(path, image))


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
            _need_small(path, models.volume_shape)
            self.grid = np.zeros(models.volume_shape, dtype=np.int64)
        for name, part, model in models.iter_structures():
            if name in models.nvertices:
                _need_small(path, (models.nvertices[name],))
                self.surfaces[name] = np.zeros(models.nvertices[name], dtype=np.int64)
                self.surfaces[name][_inside(path, model.vertex[:, None], self.surfaces[name].shape)] = keys[part]
            else:
                self.grid[_inside(path, model.voxel, self.grid.shape)] = keys[part]

    def means(self, path: Path) -> tuple[Rois, Series]:
        """(time, roi) means over the grayordinates of each parcel.

        A grayordinate without coverage (NaN or 0 at every volume) is left out. A parcel without any becomes a flat column.
        """
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
        """Parcel of each grayordinate of a series, 0 for those that belong to none."""
        keys = np.zeros(len(models), dtype=np.int64)
        for name, part, model in models.iter_structures():
            if name in models.nvertices and name in self.surfaces:
                surface = self.surfaces[name]
                if models.nvertices[name] != len(surface):
                    vertices = f"{models.nvertices[name]} vertices in {name}, but {self.path.name} has {len(surface)}"
                    raise InputError(f"{path}: {vertices}; give a parcellation of the same surfaces.")
                keys[part] = surface[_inside(path, model.vertex[:, None], surface.shape)]
            elif name not in models.nvertices and self.grid.size:
                if models.volume_shape != self.grid.shape or not np.allclose(models.affine, self.affine):
                    raise InputError(f"{path}: its voxels are not on the grid of {self.path.name}.")
                keys[part] = self.grid[_inside(path, model.voxel, self.grid.shape)]
        if not keys.any():
            raise InputError(f"{path} has no grayordinate of a parcel of {self.path.name}.")
        return keys


def _open(path: Path) -> tuple[Any, tuple[Any, Any]]:
    """Image and its two axes; the numbers are not yet read. A file of another kind than its name says is refused."""
    import nibabel

    expected, meaning = next(AXES[suffix] for suffix in AXES if path.name.endswith(suffix))
    need_regular(path, LARGEST_FILE)
    if not path.is_file():
        raise InputError(f"{path} does not exist.")
    try:
        check_offset(path)
        image: Any = nibabel.Cifti2Image.from_filename(path)
        axes = tuple(image.header.get_axis(i) for i in range(image.ndim))
        shape = tuple(map(int, image.shape))
        size = math.prod(shape) * image.get_data_dtype().itemsize
    except Exception as error:  # a damaged header raises errors of any type in nibabel and the parser of XML
        raise InputError(f"{path} is not a readable CIFTI-2 file ({one_line(error) or type(error).__name__}).") from None
    if tuple(type(axis).__name__ for axis in axes) != expected or shape != tuple(map(len, axes)):
        raise InputError(f"{path} is not {meaning}.")
    if size > LARGEST_VOXELS:
        raise InputError(f"{path}: its header declares {size} bytes of numbers, more than the limit of {LARGEST_VOXELS}.")
    return image, (axes[0], axes[1])


def _numbers(path: Path, image: Any) -> Series:
    try:
        with np.errstate(over="ignore"):
            return np.asarray(image.dataobj, dtype=np.float32)
    except Exception as error:  # as above
        raise InputError(f"{path} is damaged or incomplete: its numbers cannot be read ({one_line(error)}).") from None


def _need_small(path: Path, shape: tuple[int, ...]) -> None:
    if math.prod(shape) > LARGEST_GRID:
        raise InputError(f"{path} declares {' x '.join(map(str, shape))} places, more than the limit of {LARGEST_GRID}.")


def _inside(path: Path, places: npt.NDArray[np.int_], shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int_], ...]:
    """Index of the vertices or voxels of a structure, which must lie on its surface or grid."""
    if len(places) and ((places < 0).any() or (places >= shape).any()):
        raise InputError(f"{path} is damaged: some of its vertices or voxels are outside of their surface or grid.")
    return tuple(places.T)
