"""The predictions table of a study folder: one row per subject and cell, the only input of scores, tables and figures.

Written by `study.records` and read here; a table edited so that its scores would be wrong is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.storage import InputError, one_line

COLUMNS = ["method", "variant", "seed", "target", "subject", "label", "proba"]


STRICT, ADAPTED = "strict", "adapted"  # tracks of a study; rows of the second have the variant "adapted" or "X, adapted"


def adapted_variant(variant: str) -> str:
    """Name of a variant in rows of the adapted track."""
    return f"{variant}, {ADAPTED}" if variant else ADAPTED


def is_adapted(variant: str) -> bool:
    """Whether rows of this variant are of the adapted track."""
    return variant == ADAPTED or variant.endswith(f", {ADAPTED}")


def without_track(variant: str) -> str:
    """Name of a variant without that of its track."""
    return variant.removesuffix(ADAPTED).removesuffix(", ") if is_adapted(variant) else variant


def by_track(predictions: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each track that a predictions table has, the strict one first; variants are named without their track."""
    adapted = predictions["variant"].map(is_adapted).to_numpy(dtype=bool)
    if not adapted.any():
        return {STRICT: predictions}
    parts = {STRICT: predictions[~adapted], ADAPTED: predictions[adapted]}
    parts[ADAPTED] = parts[ADAPTED].assign(variant=parts[ADAPTED]["variant"].map(without_track))
    return {track: part.reset_index(drop=True) for track, part in parts.items() if len(part)}


def joined_tracks(tracks: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One predictions table from the rows of each track (`by_track`)."""
    parts = [
        part if track == STRICT else part.assign(variant=part["variant"].map(adapted_variant)) for track, part in tracks.items()
    ]
    return pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]


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
