"""Region names, codes and MNI centroids of the atlases we ship, as facts (no images).

Readers take ROI names from here, brain figures take centroids.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import pandas as pd


@cache
def regions(atlas: str) -> pd.DataFrame | None:
    """The regions of an atlas in column order (name, code, x, y, z), or None for an atlas that we do not ship."""
    resource = files("m2lgdg") / "atlases" / f"{atlas.lower()}.tsv"
    if not resource.is_file():
        return None
    with resource.open() as file:
        return pd.read_csv(file, sep="\t", dtype={"code": str})
