"""Names, codes, MNI centroids, lobes and networks of the included atlases (tables, no images), or of a user's table or image.

Readers take ROI names from here, brain figures take centroids, and explanations take the groups of ROIs.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.storage import InputError, one_line, read_bytes

LARGEST = 64 << 20  # bytes of a table of ROIs
FOLDER = files("m2lgdg.data.atlases")
LOBES = ("frontal", "parietal", "temporal", "occipital", "insula", "limbic", "subcortical", "cerebellum", "brainstem")
GROUPS = ("lobe", "network", "hemisphere")  # columns of a table that group its ROIs
DISTINCT = 1000  # a code from here on belongs to one atlas; smaller ones are used in many
# Other spellings of a name: parcels of Schaefer with their prefix, regions of FreeSurfer and nilearn with the side in front,
# parcels of Gordon with number, side and community.
SPELLINGS = (
    *((r"^7Networks_", ""), (r"^(?:ctx[_-])?([lr])h[_-](.+)$", r"\2_\1"), (r"^([LR]) (.+)$", r"\2_\1")),
    (r"^(\d+)_([LR])_(.+)$", r"\3_\2_\1"),
)


@cache
def about() -> dict[str, dict[str, Any]]:
    """Title, reference, source, licence and making of each included atlas, by its name."""
    atlases: dict[str, dict[str, Any]] = json.loads((FOLDER / "about.json").read_text(encoding="utf-8"))
    return atlases


@cache
def included(atlas: str) -> str | None:
    """Name of the included table of an atlas, which may have other names; None if there is none."""
    wanted = atlas.lower()
    return next((name for name, facts in about().items() if wanted in (name, *facts.get("aliases", ()))), None)


@cache
def regions(atlas: str) -> pd.DataFrame | None:
    """Regions of an atlas in column order (name, code, x, y, z, hemisphere, lobe, network); None if it is not included."""
    name = included(atlas)
    if name is None:
        return None
    with (FOLDER / f"{name}.tsv").open(encoding="utf-8") as file:
        return pd.read_csv(file, sep="\t", dtype={"code": str}, keep_default_na=False)


@cache
def roi_names(header: tuple[str, ...], atlas: str) -> tuple[str, ...]:
    """Region names for the codes of a header; other headers stay as they are.

    Small codes are used in many atlases. They are only named if the header has all codes of the atlas.
    """
    known = regions(atlas)
    if known is None:
        return header
    names = dict(zip(known["code"], known["name"], strict=True))
    further = set(_further(atlas))
    complete = set(header) in (set(names), set(names) - further)
    own = {code for code in names if complete or int(code) >= DISTINCT}
    return tuple(names[code] if code in own else code for code in header)


def names_by_position(atlas: str, count: int) -> tuple[str, ...] | None:
    """Names of the columns of a file without names; None if the atlas is not included or has another number of ROIs."""
    known = regions(atlas)
    if known is None:
        return None
    usual = known[~known["code"].isin(_further(atlas))]
    return next((tuple(table["name"]) for table in (known, usual) if len(table) == count), None)


def same_rois(rois: Sequence[str], atlas: str, others: Sequence[str], other_atlas: str) -> bool:
    """Whether two lists of ROIs are the same, also if one has the names of an included atlas and the other its codes.

    Numbers are the same ROIs unless both atlases have a name and these differ.
    """
    if tuple(rois) == tuple(others):
        return not (_are_numbers(rois) and atlas and other_atlas) or _one_name(atlas) == _one_name(other_atlas)
    return _named(rois, atlas) == _named(others, other_atlas)


def are_identified(rois: Sequence[str], atlas: str, other_atlas: str) -> bool:
    """Whether ROIs with the same names are certainly the same: they are more than numbers, or both atlases are known."""
    return not _are_numbers(rois) or bool(atlas and other_atlas)


def _are_numbers(rois: Sequence[str]) -> bool:
    """Whether ROIs have no names but 1, 2, ... or ROI_1, ROI_2, ..., and no codes that belong to one atlas."""
    words = {re.sub(r"\d+$", "", name) for name in rois}
    return len(words) == 1 and all(name[-1:].isdigit() for name in rois) and recognised(rois) is None


def _one_name(atlas: str) -> str:
    return included(atlas) or atlas.lower()


def recognised(rois: Sequence[str]) -> str | None:
    """Name of the only included atlas whose codes are exactly these; numbers from 1 on are the codes of several."""
    codes = set(rois)
    if codes == {str(i + 1) for i in range(len(rois))}:
        return None
    fitting = [name for name in about() if (table := regions(name)) is not None and codes == set(table["code"])]
    return fitting[0] if len(fitting) == 1 else None


@cache
def _places(atlas: str, rois: tuple[str, ...]) -> pd.DataFrame | None:
    known = regions(atlas)
    if known is None:
        return None
    by_name = known.set_index("name")
    names = [_spelled(name, by_name.index) for name in _named(rois, atlas)]
    table = by_name.reindex(names)[["code", "x", "y", "z", *GROUPS]].set_axis(list(rois))
    return None if table["x"].isna().all() else table


def places(atlas: str, rois: Sequence[str]) -> pd.DataFrame | None:
    """Code, MNI centroid, hemisphere, lobe and network of each ROI of a cohort, by its name; None if none is known."""
    table = _places(atlas, tuple(rois))
    return None if table is None else table.copy()


def groups(atlas: str, rois: Sequence[str], by: str = "lobe") -> tuple[str, ...]:
    """Lobe (one of `LOBES`), network or hemisphere (L, R, M) of each ROI; empty where it is not known."""
    if by not in GROUPS:
        raise InputError(f"ROIs are grouped by {', '.join(GROUPS)}, not by {by}.")
    table = _places(atlas, tuple(rois))
    return ("",) * len(rois) if table is None else tuple(table[by].fillna(""))


def _further(atlas: str) -> list[str]:
    """Codes of regions that only some files of an atlas have."""
    name = included(atlas)
    return [] if name is None else list(about()[name].get("further", ()))


def _named(rois: Sequence[str], atlas: str) -> tuple[str, ...]:
    """Names of ROIs that a cohort of an earlier version has by their codes or numbers."""
    names = roi_names(tuple(rois), atlas)
    numbered = names == tuple(str(i + 1) for i in range(len(names)))
    return (names_by_position(atlas, len(names)) if numbered else None) or names


def _spelled(name: str, known: pd.Index[str]) -> str:
    """A name as the table spells it, if it does."""
    if name in known:
        return name
    for pattern, replacement in SPELLINGS:
        other = re.sub(r"_([lr])$", lambda side: side[0].upper(), re.sub(pattern, replacement, name))
        if other in known:
            return other
    return name


def read_centroids(path: str | Path, rois: Sequence[str], atlas: str = "") -> pd.DataFrame:
    """Name, code and MNI centroid of each ROI, from a table (name, x, y, z, optionally code) or an image in ROI order.

    Of a folder, such as that of XCP-D, the table and the image of the atlas are read.
    """
    path = Path(path)
    if path.is_dir():
        from m2lgdg.data.atlases.bids_atlas import centroids

        return centroids(path, atlas, rois)
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
    found = centroids_by_code(path)
    if len(found) != len(rois):
        raise InputError(f"{path} has {len(found)} regions, but the cohort has {len(rois)} ROIs.")
    return found.assign(name=list(rois))[["name", "code", "x", "y", "z"]]


def centroids_by_code(path: Path) -> pd.DataFrame:
    """Code and MNI centroid of each region of an atlas image, in the order of the codes."""
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
    found = pd.DataFrame(np.reshape(centroids, (len(codes), 3)), columns=["x", "y", "z"])
    return found.assign(code=[str(int(code)) for code in codes])
