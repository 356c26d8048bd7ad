"""Reader of participants.tsv, the table of subjects with site, label and phenotypes that BIDS and most labs use.

Shared by the `bids` and `folder` readers. Columns are found by their usual names unless they are given; notes record each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN
from m2lgdg.data.readers import tables
from m2lgdg.findings import Finding, Note
from m2lgdg.storage import InputError

INPUTS = ("sex", "age", "education")
# How to name the column of a role, by role.
NAMED = {role: f'name the right one in dataset.toml: [columns] {role} = "..."' for role in ("subject", "site", "label")}


class Participants(NamedTuple):
    """Content of participants.tsv: one entry per subject, in the order of the file."""

    subjects: list[str]
    sites: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int8]
    tr: npt.NDArray[np.float64]
    phenotypes: pd.DataFrame
    inputs: tuple[str, ...]
    notes: tuple[Note, ...]


def read_participants(
    path: Path,
    *,
    columns: Mapping[str, str] = {},
    patient: Sequence[str] = (),
    control: Sequence[str] = (),
    missing: Sequence[str] = (),
    inputs: Sequence[str] | None = None,
    site: str | None = None,
    advice: str = "",
    where: Mapping[str, str] = NAMED,
    same: Callable[[str], str] = str,
) -> Participants:
    """Read the table; `columns` gives the column of a role, `site` the site of all subjects if there is no site column.

    `advice` ends the message about an unknown label: how to give the words of each class to this reader; `where` that about the
    column of a role that was not found. Names with the same text by `same` are one subject.
    """
    table = tables.read_text_table(path, "," if path.suffix == ".csv" else "\t")
    roles = {role: columns.get(role) or tables.find_column(table, role) for role in tables.ALIASES}
    tables.need_columns(table, [name for name in roles.values() if name], path)
    if roles["subject"] is None:
        raise InputError(_not_found(path, table, "subject", where))
    table = tables.index_by_subject(table, roles["subject"], path, same)
    if not len(table):
        raise InputError(f"{path} lists no subject.")
    bare = [code.lower().removesuffix(".0") for code in missing]
    codes = (
        *tables.MISSING_CODES,
        *bare,
        *(f"{code}.0" for code in bare),
    )  # integers in a column with gaps are often written as floats
    notes = [f"{role} from column {name}" for role, name in roles.items() if name and role != "label"]
    labels = np.full(len(table), UNKNOWN, dtype=np.int8)
    note = Finding("label", numbers={"text": "no label column: all subjects are unlabelled"})
    present = [f"{tables.present_columns(table)}; {where['label']}"]
    if roles["label"]:
        labels, note = tables.labels(table, roles["label"], path, patient, control, codes, advice)
        present = []
    named = {role: name for role, name in roles.items() if name}
    phenotypes, implausible = _phenotypes(table, named, path, codes)
    chosen = [name for name in INPUTS if name in phenotypes] if inputs is None else list(inputs)
    for name in chosen:
        if name not in phenotypes:
            raise InputError(f"{path}: input {name} is neither a column nor one of {', '.join(INPUTS)}.")
        if phenotypes[name].dtype != np.float64:
            phenotypes[name] = tables.numeric(table, name, path, codes)  # raises an error that names the subject
    return Participants(
        subjects=[str(one) for one in table.index],
        sites=_sites(table, roles["site"], site, path, where),
        labels=labels,
        tr=_repetition_times(table, roles["tr"], path, codes),
        phenotypes=phenotypes,
        inputs=tuple(chosen),
        notes=(*notes, note, *present, *implausible),
    )


def _repetition_times(table: pd.DataFrame, column: str | None, path: Path, codes: Sequence[str]) -> npt.NDArray[np.float64]:
    if column is None:
        return np.full(len(table), np.nan)
    seconds = tables.numeric(table, column, path, codes)
    wrong = np.flatnonzero(seconds <= 0)
    if len(wrong):
        raise InputError(
            f"{path}: subject {table.index[wrong[0]]}, column {column}: a TR of {seconds[wrong[0]]:g} s is not positive."
        )
    for subject, one in zip(table.index, seconds, strict=True):
        tables.need_seconds(one, f"{path}: subject {subject}, column {column}")
    return seconds


def _not_found(path: Path, table: pd.DataFrame, role: str, where: Mapping[str, str]) -> str:
    usual = ", ".join(tables.ALIASES[role])
    return f"{path} has no column for the {role} ({usual}); {tables.present_columns(table)}; {where[role]}."


def _sites(
    table: pd.DataFrame, column: str | None, site: str | None, path: Path, where: Mapping[str, str]
) -> npt.NDArray[np.str_]:
    if column is None:
        if site is None:
            raise InputError(_not_found(path, table, "site", where))
        return np.array([site] * len(table), dtype=np.str_)  # np.full would keep only the first letter
    return tables.sites(table, column, path)


def _phenotypes(
    table: pd.DataFrame, roles: Mapping[str, str], path: Path, codes: Sequence[str]
) -> tuple[pd.DataFrame, list[Finding]]:
    """Phenotypes, and notes on implausible values."""
    columns: dict[str, object] = {}
    notes: list[Finding] = []
    if "sex" in roles:
        columns["sex"] = tables.sex(table, roles["sex"], path, codes)
    if "age" in roles:
        columns["age"], notes = tables.ages(table, roles["age"], path, codes)
    if "education" in roles:
        education = tables.numeric(table, roles["education"], path, codes)
        columns["education"] = np.where(education >= 0, education, np.nan)
    columns |= tables.other_columns(table, {*roles.values(), *columns}, codes)
    return pd.DataFrame(columns, index=table.index), notes
