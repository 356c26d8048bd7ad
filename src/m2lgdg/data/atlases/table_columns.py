"""Regions, hemispheres and MNI centroids of the columns of tables of brain structure, told from their names.

FreeSurfer, ENIGMA, fMRIPrep and XCP-D spell the same region differently; explanations take its name and place from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

import pandas as pd

from m2lgdg.data.atlases import about, places, regions

STRUCTURE = ("desikan-killiany", "destrieux", "aseg")  # whose names are known one by one; those of others only all together
MEASURE = re.compile(
    r"[_.-](thickness(std)?|area|(gr[ae]y_?)?vol(ume)?|thickavg|surfavg|meancurv|gauscurv|foldind|curvind|curv|sulc)$", re.I
)
SIDE = r"(?P<side>(?-i:[LR])|lh|rh|left|right)"
SIDES = (
    re.compile(rf"(ctx[_.-])?{SIDE}[_. -](?P<region>.+)", re.I),
    re.compile(rf"(?P<region>.+)[_. -]{SIDE}", re.I),
    re.compile(r"(?P<side>[lr]h|[LR](?=Thickness|SurfArea))(?P<region>[A-Z]\w+)"),  # of a hemisphere: asegstats2table, ENIGMA
)
ENIGMA = {
    **{"latvent": "Lateral-Ventricle", "thal": "Thalamus", "caud": "Caudate", "put": "Putamen", "pal": "Pallidum"},
    **{"hippo": "Hippocampus", "amyg": "Amygdala", "accumb": "Accumbens-area"},
}
ENIGMA_ASEG = re.compile(rf"(?P<side>[LR])(?P<region>{'|'.join(ENIGMA)})", re.I)
COLUMNS = ["region", "hemisphere", "x", "y", "z"]
HEAD_SIZE = ("estimatedtotalintracranialvol", "intracranialvol", "etiv", "icv")  # in lower case without signs
# One measure under the names of different versions of FreeSurfer and of its two commands
VERSIONS = {
    **{"eTIV": "EstimatedTotalIntraCranialVol", "IntraCranialVol": "EstimatedTotalIntraCranialVol"},
    **{f"{side}-Thalamus-Proper": f"{side}-Thalamus" for side in ("Left", "Right")},
    **{f"{side}CorticalWhiteMatterVol": f"{side}CerebralWhiteMatterVol" for side in ("lh", "rh", "")},
}


def renamed_as(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The table with the names that columns have, where it has the same measure under the name of another version."""
    wanted = {VERSIONS.get(column, column): column for column in columns if column not in table.columns}
    names = {column: wanted.get(VERSIONS.get(column, column), column) for column in table.columns if column not in columns}
    return table.rename(columns={old: new for old, new in names.items() if list(names.values()).count(new) == 1})


def head_column(columns: Iterable[str]) -> str | None:
    """The column of head size, the intracranial volume, if there is one."""
    plain = {"".join(filter(str.isalnum, str(column).lower())): str(column) for column in columns}
    return next((plain[name] for name in HEAD_SIZE if name in plain), None)


def column_places(columns: Sequence[str]) -> pd.DataFrame:
    """Region, hemisphere (L, R, M for the midline) and MNI centroid of each column of a table, by its name.

    A column that is not known keeps its name as the region and has no place; its hemisphere is empty unless its name tells it.
    """
    return _column_places(tuple(columns)).copy()


@cache
def _column_places(columns: tuple[str, ...]) -> pd.DataFrame:
    table = pd.DataFrame([_row(column) for column in columns], index=list(columns), columns=COLUMNS)
    table = table.astype({"x": float, "y": float, "z": float})
    atlas = _whole_atlas(columns) if table["x"].isna().any() else None
    if atlas is not None and (known := places(atlas, columns)) is not None:
        found = table["x"].isna() & known["x"].notna()
        table.loc[found, COLUMNS[1:]] = known.loc[found, COLUMNS[1:]]
    return table


def _row(column: str) -> list[object]:
    for written in (column, MEASURE.sub("", column)):  # first as it is: Left-Accumbens-area has no measure
        side, region = _parts(written)
        if (known := _known().get((_plain(region), side))) is not None:
            return known
    return [column, side, None, None, None]


def _parts(column: str) -> tuple[str, str]:
    """Hemisphere (empty without any) and region of a column."""
    if subcortical := ENIGMA_ASEG.fullmatch(column):
        return subcortical["side"].upper(), ENIGMA[subcortical["region"].lower()]
    for pattern in SIDES:
        if found := pattern.fullmatch(column):
            return found["side"][0].upper(), found["region"]
    return "", column


def _plain(region: str) -> str:
    """Letters and digits of a name in lower case: R writes X3rd.Ventricle and G.S for 3rd-Ventricle and G&S."""
    words = [word for word in re.split(r"[^a-z0-9]+", region.lower()) if word not in ("", "and", "proper")]
    return re.sub(r"^x(?=\d)", "", "".join(words))


@cache
def _known() -> dict[tuple[str, str], list[object]]:
    """Name, hemisphere and centroid of each region of FreeSurfer, by its plain name and hemisphere (empty in the midline)."""
    known: dict[tuple[str, str], list[object]] = {}
    for atlas in STRUCTURE:
        table = regions(atlas)
        assert table is not None
        for name, side, *centroid in table[["name", *COLUMNS[1:]]].itertuples(index=False):
            known[_plain(name.removesuffix(f"_{side}")), "" if side == "M" else side] = [name, side, *centroid]
    return known


def _whole_atlas(columns: Sequence[str]) -> str | None:
    """The largest other atlas all of whose regions are columns: names such as LH_Vis_1 are those of several."""
    sizes: dict[str, int] = {}
    for atlas in (name for name in about() if name not in STRUCTURE):
        table, known = regions(atlas), places(atlas, columns)
        if table is not None and known is not None and known["code"].nunique() == len(table):
            sizes[atlas] = len(table)
    return max(sizes, key=lambda name: sizes[name], default=None)
