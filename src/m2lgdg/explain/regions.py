"""Scores of the columns of tables of brain structure as one table of regions, with their names, hemispheres and places.

Part of an `Explanation`, which makes it from the attributions of a method and averages it over methods, atlases and folds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.data.atlases.table_columns import COLUMNS, column_places

Floats = npt.NDArray[np.float64]
KEYS, PLACE = ["table", "column"], COLUMNS
SAME = "same direction"  # column of a mean: proportion of explanations with its direction
REGION_COLUMNS = (*KEYS, *PLACE, "score", "sd", "direction")


def region_table(
    signed: Mapping[str, Floats], values: Mapping[str, Floats], columns: Mapping[str, Sequence[str]]
) -> pd.DataFrame:
    """Table of regions from (subject, column) signed scores by table, and the values they are of in units of the sd.

    Without values, a signed score already says where larger values point to, as an activation pattern does. With them it is
    for or against patient, and `direction` has the other sign where a value is below the mean.
    """
    parts = []
    for name, scores in signed.items():
        size, given = np.abs(scores), values.get(name)
        towards = scores if given is None else scores * np.sign(given)
        spread = size.std(axis=0, ddof=1) if len(size) > 1 else np.full(size.shape[1], np.nan)
        numbers = {"score": size.mean(axis=0), "sd": spread, "direction": towards.mean(axis=0)}
        if given is not None and len(given) == 1:
            numbers |= {"value": given[0], "contribution": scores[0]}
        parts.append(pd.DataFrame({"table": name, "column": list(columns[name]), **numbers}))
    if not parts:
        return empty_regions()
    return with_places(pd.concat(parts, ignore_index=True))


def empty_regions() -> pd.DataFrame:
    """A table without rows."""
    texts = (*KEYS, *PLACE[:2])
    return pd.DataFrame({name: pd.Series(dtype=str if name in texts else float) for name in REGION_COLUMNS})


def with_places(table: pd.DataFrame) -> pd.DataFrame:
    """The table with regions, hemispheres and centroids by the names of its columns, highest score first."""
    named = [
        own.drop(columns=[name for name in PLACE if name in own]).join(column_places(own["column"].tolist()), on="column")
        for _, own in table.groupby("table", sort=False)
    ]
    joined = pd.concat(named, ignore_index=True).sort_values("score", ascending=False, kind="stable", ignore_index=True)
    first = [*KEYS, *PLACE]
    return joined[[*first, *(name for name in joined if name not in first)]]


def completed(tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """The same tables with the rows that any of them has: a column without different values in a source is not used there."""
    rows = pd.concat(tables)[KEYS].drop_duplicates() if tables else pd.DataFrame(columns=KEYS)
    full = []
    for table in tables:
        every = rows.merge(table, on=KEYS, how="left")
        scored = [name for name in every.select_dtypes("number") if name not in (*PLACE, "sd", "value")]
        full.append(with_places(every.fillna(dict.fromkeys(scored, 0.0))) if len(rows) else table)
    return full


def mean_of(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Mean over the tables of several atlases; a column that one lacks counts as 0."""
    full = completed(tables)
    if not len(full[0]):
        return full[0]
    mean = pd.concat(full).drop(columns=list(PLACE)).groupby(KEYS, sort=False, as_index=False).mean()
    return with_places(mean)


def sum_of(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Contributions to the decision about one subject, summed over several atlases."""
    mean = mean_of(tables)
    if not len(mean):
        return mean
    total = len(tables) * mean["contribution"]
    return with_places(mean.assign(contribution=total, score=total.abs(), direction=total * np.sign(mean["value"])))


def by_table(regions: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each table with any score, highest first; tables in the order of their highest scores."""
    scored = regions[regions["score"] > 0]
    return {str(name): own.reset_index(drop=True) for name, own in scored.groupby("table", sort=False)}


def labels(own: pd.DataFrame) -> list[str]:
    """Names of the rows of one table: regions, or columns where a region has several (thickness and area)."""
    twice = own["region"].duplicated(keep=False)
    return [str(name) for name in own["region"].where(~twice, own["column"])]


def pointing(direction: float) -> str:
    """Which values point to patient."""
    return "larger" if direction > 0 else "smaller" if direction < 0 else "neither"
