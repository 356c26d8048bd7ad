"""Names and places of ROIs from a folder of atlases in BIDS, as XCP-D writes one beside its series.

`data.readers.bids` takes names for ROIs that are only numbered, and `read_centroids` the coordinates for figures.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from m2lgdg.data.atlases import LARGEST, centroids_by_code
from m2lgdg.storage import InputError, one_line, read_bytes

ENTITY = re.compile(r"(?:^|_)([a-z]+)-([A-Za-z0-9]+)")
TABLE = "_dseg.tsv"
FOLDERS = (".", "atlases", "sourcedata/atlases")  # in derivatives: XCP-D has had both


def name_of(entities: Mapping[str, str]) -> str:
    """Name of the atlas of a file, by its entities `atlas` or `seg` and, if it has several sizes, `scale`; may be empty."""
    named = [entities[one] for one in ("atlas", "seg") if one in entities]
    return "-".join([*named, *([entities["scale"]] if named and "scale" in entities else [])])


def tables(folder: Path, atlas: str) -> list[Path]:
    """Tables of the regions of an atlas in a folder of derivatives or of atlases, those of volumes first."""
    places = [folder / one for one in FOLDERS[1:] if (folder / one).is_dir()] or [folder]
    found = {file for place in places for file in place.glob(f"**/*{TABLE}") if not file.name.startswith("sub-")}
    own = [file for file in found if name_of(dict(ENTITY.findall(file.name))).lower() == atlas.lower()]
    return sorted(own, key=lambda file: (not _image(file).is_file(), file.as_posix()))


def names_by_index(path: Path) -> dict[str, str]:
    """Name of each region by its index as text, without the background 0."""
    table = _read(path)
    named = {str(index): str(name).strip() for index, name in zip(table["index"], table["name"], strict=True) if index}
    if len(named) < len(table[table["index"] != 0]) or len(set(named.values())) < len(named) or not all(named.values()):
        raise InputError(f"{path}: an index or a name is empty or listed twice.")
    return named


def named(rois: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """ROIs that are only numbers by their names, if all are known."""
    return tuple(names[roi] for roi in rois) if all(roi in names for roi in rois) else rois


def centroids(folder: Path, atlas: str, rois: Sequence[str]) -> pd.DataFrame:
    """Name, code and MNI centroid of ROIs: from columns x, y and z of the table of an atlas, or from the image beside it."""
    found = tables(folder, atlas)
    if not found:
        raise InputError(f"{folder} has no table of atlas {atlas or 'without a name'} (*_atlas-{atlas or 'NAME'}*{TABLE}).")
    for path in found:
        table, names = _read(path), names_by_index(path)
        if {"x", "y", "z"} <= set(table.columns):
            table = table.assign(code=table["index"].astype(str))
        elif _image(path).is_file():
            table = centroids_by_code(_image(path))
            table = table.assign(name=[names.get(code, code) for code in table["code"]])
        else:
            continue
        wanted = pd.DataFrame({"roi": list(rois), "name": [names.get(roi, roi) for roi in rois]})
        merged = wanted.merge(table[["name", "code", "x", "y", "z"]].drop_duplicates("name"), on="name", how="left")
        lacking = merged.loc[merged[["x", "y", "z"]].isna().any(axis=1), "roi"]
        if len(lacking):
            raise InputError(
                f"{path} and its image have no coordinates for {len(lacking)} ROIs, the first is {lacking.iloc[0]}."
            )
        return merged.drop(columns="name").rename(columns={"roi": "name"})
    raise InputError(f"{found[0]} has no columns x, y and z, and no _dseg.nii.gz is beside it; give a table with --rois FILE.")


def _image(table: Path) -> Path:
    return table.with_suffix(".nii.gz")


def _read(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(io.BytesIO(read_bytes(path, LARGEST)), sep="\t", dtype={"name": str}, keep_default_na=False)
    except ValueError as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    if "name" not in table and "label" in table:  # before BIDS had name
        table = table.rename(columns={"label": "name"})
    if missing := [column for column in ("index", "name") if column not in table]:
        raise InputError(f"{path} has no column {missing[0]}; the regions of an atlas have index and name.")
    numbers = {one: pd.to_numeric(table[one], errors="coerce") for one in ("index", "x", "y", "z") if one in table}
    if numbers["index"].isna().any() or (numbers["index"] % 1 != 0).any():
        raise InputError(f"{path}: index {table['index'][numbers['index'].isna().argmax()]!r} is not a whole number.")
    return table.assign(**(numbers | {"index": numbers["index"].astype(int)}))
