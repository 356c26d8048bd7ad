"""Region names, codes and MNI centroids: of the atlases we ship, as facts (no images), or of a user's own table or image.

Readers take ROI names from here, brain figures take centroids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import pandas as pd

from m2lgdg.storage import InputError, one_line


@cache
def regions(atlas: str) -> pd.DataFrame | None:
    """The regions of an atlas in column order (name, code, x, y, z), or None for an atlas that we do not ship."""
    resource = files("m2lgdg.data.atlases") / f"{atlas.lower()}.tsv"
    if not resource.is_file():
        return None
    with resource.open() as file:
        return pd.read_csv(file, sep="\t", dtype={"code": str})


@cache
def roi_names(header: tuple[str, ...], atlas: str) -> tuple[str, ...]:
    """The region names behind a header's codes, for an atlas that we ship; else the header's own words."""
    known = regions(atlas)
    names = {} if known is None else dict(zip(known["code"], known["name"], strict=True))
    return tuple(names.get(code, code) for code in header)


def read_centroids(path: str | Path, rois: Sequence[str]) -> pd.DataFrame:
    """Name, code and MNI centroid of each ROI, from a table (name, x, y, z, perhaps code) or an atlas image in ROI order."""
    path = Path(path)
    if path.name.endswith((".nii", ".nii.gz")):
        return _centroids_of_image(path, rois)
    try:
        table = pd.read_csv(path, sep="," if path.suffix == ".csv" else "\t", dtype={"name": str, "code": str})
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    for column in ("name", "x", "y", "z"):
        if column not in table:
            raise InputError(f"{path} has no column {column}; it needs name, x, y and z (MNI, in mm), one row a ROI.")
    for column in ("x", "y", "z"):
        table[column] = pd.to_numeric(table[column], errors="coerce")
    lost = [roi for roi in rois if not table.loc[table["name"] == roi, ["x", "y", "z"]].notna().all(axis=1).any()]
    if lost:
        raise InputError(f"{path} has no place for {len(lost)} ROI{'s' if len(lost) > 1 else ''}, the first is {lost[0]}.")
    return table.assign(code=table.get("code", "")).drop_duplicates("name")[["name", "code", "x", "y", "z"]]


def _centroids_of_image(path: Path, rois: Sequence[str]) -> pd.DataFrame:
    from nibabel.filebasedimages import ImageFileError
    from nilearn.plotting import find_parcellation_cut_coords

    try:
        centroids, codes = find_parcellation_cut_coords(str(path), return_label_names=True)
    except (OSError, ValueError, EOFError, IndexError, ImageFileError) as error:
        raise InputError(f"{path} cannot be read as an atlas ({one_line(error)}).") from None
    if len(centroids) != len(rois):
        raise InputError(f"{path} has {len(centroids)} regions, the cohort {len(rois)} ROIs.")
    named = pd.DataFrame({"name": list(rois), "code": [str(int(code)) for code in codes]})
    return named.assign(x=centroids[:, 0], y=centroids[:, 1], z=centroids[:, 2])
