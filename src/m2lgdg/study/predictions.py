"""The predictions table of a study folder: one row per subject and cell, the only input of scores, tables and figures.

Written by `study.records` and read here, also from several folders; what would give wrong scores is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    tracks = {STRICT: predictions[~adapted], ADAPTED: predictions[adapted]}
    tracks[ADAPTED] = tracks[ADAPTED].assign(variant=tracks[ADAPTED]["variant"].map(without_track))
    return {track: rows.reset_index(drop=True) for track, rows in tracks.items() if len(rows)}


def joined_tracks(tracks: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One predictions table from the rows of each track (`by_track`)."""
    if ADAPTED not in tracks:
        return tracks[STRICT]
    adapted = tracks[ADAPTED].assign(variant=tracks[ADAPTED]["variant"].map(adapted_variant))
    return pd.concat([*([tracks[STRICT]] if STRICT in tracks else []), adapted], ignore_index=True)


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


Subjects = frozenset[tuple[str, str]]  # subject and site


def read_joined_predictions(folders: Sequence[str | Path]) -> pd.DataFrame:
    """Predictions of several study folders as one table; each method or variant may be in one of them only."""
    tables = [read_predictions(folder) for folder in folders]
    if len(tables) == 1:
        return tables[0]
    found: dict[tuple[str, str], str | Path] = {}
    for folder, table in zip(folders, tables, strict=True):
        _compare_targets(folders[0], tables[0], folder, table)
        for method, variant in dict.fromkeys(zip(table["method"], table["variant"], strict=True)):
            if (method, variant) in found:
                name = f"{method}, variant {variant}" if variant else method
                raise InputError(f"{folder} and {found[method, variant]} both have {name}; one table has each method once.")
            found[method, variant] = folder
    need_same_subjects(folders)
    return pd.concat(tables, ignore_index=True)


def need_same_subjects(folders: Sequence[str | Path]) -> None:
    """Refuse folders that were run with different subjects, in source too; one that does not list them is taken on trust."""
    listed = {folder: _included(path) for folder in folders if (path := Path(folder) / "inclusion.csv").exists()}
    for folder, subjects in listed.items():
        if subjects != listed[first := next(iter(listed))]:
            raise InputError(f"{folder} and {first} were run with different subjects (inclusion.csv).")


def _compare_targets(first: str | Path, expected: pd.DataFrame, folder: str | Path, table: pd.DataFrame) -> None:
    """Refuse a study that has not the same labelled subjects at the same target sites as the first."""
    theirs, own = _labels(expected), _labels(table)
    for one, other, here, there in ((folder, first, own, theirs), (first, folder, theirs, own)):
        if missing := [site for site in there if site not in here]:
            raise InputError(f"{one} has no predictions at {missing[0]}, a target of {other}; both need the same target sites.")
    for site, labels in own.items():
        if labels != theirs[site]:
            raise InputError(f"{folder} and {first} have different subjects or labels at {site}.")


def _labels(table: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Label of each subject by target site."""
    rows = table.drop_duplicates(["target", "subject"])
    return {str(site): dict(zip(here["subject"], here["label"], strict=True)) for site, here in rows.groupby("target")}


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
