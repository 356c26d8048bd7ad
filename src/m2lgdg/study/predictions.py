"""The predictions table of a study folder: one row per subject and cell, the only input of scores, tables and figures.

Written by `study.records` and read here; a table edited so that its scores would be wrong is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.storage import InputError, one_line

COLUMNS = ["method", "variant", "seed", "target", "subject", "label", "proba"]


def sweep_variant(field: str, value: object) -> str:
    """Name of the variant with one value of a sweep, such as `margin=0.1` or `atlases=aal+ho`."""
    return f"{field}={'+'.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def read_predictions(out: str | Path) -> pd.DataFrame:
    """Read the predictions table of a study folder."""
    path = Path(out) / "predictions.csv"
    text = dict.fromkeys(("method", "variant", "target", "subject"), str)
    try:
        table = unquoted_table(pd.read_csv(path, dtype=text, keep_default_na=False))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{out} is not a study folder (no predictions.csv).") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    if list(table.columns) != COLUMNS:
        raise InputError(f"{path} does not have the columns {', '.join(COLUMNS)}.")
    if not len(table):
        raise InputError(f"{path} has no finished cell; run the study first.")
    return _checked(table, path)


def _checked(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    proba, label, seed = (pd.to_numeric(table[name], errors="coerce") for name in ("proba", "label", "seed"))
    fits = {"proba": proba.between(0, 1), "label": label.isin([-1, 0, 1]), "seed": (seed >= 0) & (seed % 1 == 0)}
    for name, kind in (("proba", "a probability"), ("label", "1, 0 or -1 (not known)"), ("seed", "a seed")):
        wrong = np.flatnonzero(~fits[name])
        if len(wrong):
            raise InputError(f"{path}, line {wrong[0] + 2}: {name} {str(table[name].iloc[wrong[0]])[:40]!r} is not {kind}.")
    twice = np.flatnonzero(table.duplicated([*COLUMNS[:4], "subject"]))
    if len(twice):
        raise InputError(f"{path}, line {twice[0] + 2}: a subject occurs twice in the same cell.")
    labels = table.groupby(["target", "subject"], sort=False)["label"].nunique()
    if (labels > 1).any():
        target, subject = labels.index[labels > 1][0]
        raise InputError(f"{path}: subject {subject} at {target} has different labels in different rows.")
    return table.astype({"seed": int, "label": int, "proba": float})
