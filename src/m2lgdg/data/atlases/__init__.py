"""Region names, codes and MNI centroids of the included atlases (tables, no images) or of a user's table or image.

Readers take ROI names from here, and brain figures take centroids.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.storage import InputError, one_line, read_bytes

LARGEST = 64 << 20  # bytes of a table of ROIs


@cache
def regions(atlas: str) -> pd.DataFrame | None:
    """Regions of an atlas in column order (name, code, x, y, z), or None if the atlas is not included."""
    resource = files("m2lgdg.data.atlases") / f"{atlas.lower()}.tsv"
    if not resource.is_file():
        return None
    with resource.open() as file:
        return pd.read_csv(file, sep="\t", dtype={"code": str})


@cache
def roi_names(header: tuple[str, ...], atlas: str) -> tuple[str, ...]:
    """Region names for the codes of a header; codes that are not in an included atlas stay as they are."""
    known = regions(atlas)
    names = {} if known is None else dict(zip(known["code"], known["name"], strict=True))
    return tuple(names.get(code, code) for code in header)


def read_centroids(path: str | Path, rois: Sequence[str]) -> pd.DataFrame:
    """Name, code and MNI centroid of each ROI, from a table (name, x, y, z, optionally code) or an image in ROI order."""
    path = Path(path)
    if path.name.endswith((".nii", ".nii.gz")):
        return _centroids_of_image(path, rois)
    if not path.exists():
        raise InputError(f"{path} cannot be read (it does not exist).")
    content = io.BytesIO(read_bytes(path, LARGEST))
    try:
        table = pd.read_csv(content, sep="," if path.suffix == ".csv" else "\t", dtype={"name": str, "code": str})
    except ValueError as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    for column in ("name", "x", "y", "z"):
        if column not in table:
            raise InputError(
                f"{path} has no column {column}; it needs name, x, y and z (MNI coordinates in mm), one row per ROI."
            )
    for column in ("x", "y", "z"):
        table[column] = pd.to_numeric(table[column], errors="coerce")
    missing = [roi for roi in rois if not table.loc[table["name"] == roi, ["x", "y", "z"]].notna().all(axis=1).any()]
    if missing:
        plural = "s, the first is" if len(missing) > 1 else ","
        raise InputError(f"{path} has no coordinates for {len(missing)} ROI{plural} {missing[0]}.")
    return table.assign(code=table.get("code", "")).drop_duplicates("name")[["name", "code", "x", "y", "z"]]


def _centroids_of_image(path: Path, rois: Sequence[str]) -> pd.DataFrame:
    import nibabel
    from nibabel.filebasedimages import ImageFileError
    from nilearn.plotting import find_parcellation_cut_coords

    if path.exists() and not path.is_file():
        raise InputError(f"cannot read {path}: it is not a regular file.")
    try:
        image: Any = nibabel.load(path)
        if not np.isfinite(image.affine).all():
            raise ValueError("its affine is not finite")
        centroids, codes = find_parcellation_cut_coords(image, return_label_names=True)
    except (OSError, ValueError, EOFError, IndexError, ImageFileError) as error:
        raise InputError(f"{path} cannot be read as an atlas ({one_line(error)}).") from None
    if len(centroids) != len(rois):
        raise InputError(f"{path} has {len(centroids)} regions, but the cohort has {len(rois)} ROIs.")
    named = pd.DataFrame({"name": list(rois), "code": [str(int(code)) for code in codes]})
    return named.assign(x=centroids[:, 0], y=centroids[:, 1], z=centroids[:, 2])
