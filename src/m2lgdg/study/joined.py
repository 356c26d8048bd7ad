"""Several studies of the same subjects as one: the predictions of all, for the tables that `m2lgdg table --also` prints.

Networks are often run on another machine than linear models. Studies that cannot be compared are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.storage import InputError, one_line
from m2lgdg.study.predictions import read_predictions

Subjects = frozenset[tuple[str, str]]  # subject and site


def read_joined_predictions(folders: Sequence[str | Path]) -> pd.DataFrame:
    """Predictions of several study folders as one table; each method or variant may be in one of them only."""
    tables = [read_predictions(folder) for folder in folders]
    if len(tables) == 1:
        return tables[0]
    found: dict[tuple[str, str], str | Path] = {}
    included: tuple[str | Path, Subjects] | None = None  # of the first folder that lists them
    for folder, table in zip(folders, tables, strict=True):
        _compare_targets(folders[0], tables[0], folder, table)
        if (Path(folder) / "inclusion.csv").exists():
            own = _included(Path(folder) / "inclusion.csv")
            included = included or (folder, own)
            if own != included[1]:
                raise InputError(f"{folder} and {included[0]} were run with different subjects (inclusion.csv).")
        for method, variant in dict.fromkeys(zip(table["method"], table["variant"], strict=True)):
            if (method, variant) in found:
                name = f"{method}, variant {variant}" if variant else method
                raise InputError(f"{folder} and {found[method, variant]} both have {name}; one table has each method once.")
            found[method, variant] = folder
    return pd.concat(tables, ignore_index=True)


def _compare_targets(first: str | Path, expected: pd.DataFrame, folder: str | Path, table: pd.DataFrame) -> None:
    """Refuse a study that has not the same labelled subjects at the same target sites as the first."""
    theirs, own = (_labels(part) for part in (expected, table))
    for one, other, here, there in ((folder, first, own, theirs), (first, folder, theirs, own)):
        if missing := [site for site in there if site not in here]:
            raise InputError(f"{one} has no predictions at {missing[0]}, a target of {other}; both need the same target sites.")
    for site, labels in own.items():
        if labels != theirs[site]:
            raise InputError(f"{folder} and {first} have different subjects or labels at {site}.")


def _labels(table: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Label of each subject by target site."""
    rows = table.drop_duplicates(["target", "subject"])
    return {str(site): dict(zip(part["subject"], part["label"], strict=True)) for site, part in rows.groupby("target")}


def _included(path: Path) -> Subjects:
    """All subjects of a study, those in source too."""
    try:
        table = unquoted_table(pd.read_csv(path, dtype=str, keep_default_na=False))
        rows = table[table["status"] == "included"]
        subjects = frozenset(zip(rows["subject"], rows["site"], strict=True))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    if not subjects:
        raise InputError(f"{path} lists no subject as included.")
    return subjects
