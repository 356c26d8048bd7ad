"""Phenotype tables: ids as text, missing codes, numeric and text columns, sex and label codes.

Shared by the readers. Nothing is guessed silently: what a column was taken for is returned as a note.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN, Cohort, Exclusion
from m2lgdg.storage import InputError, one_line

MALE, FEMALE = 1.0, 2.0  # the coding of both ABIDE and REST-meta-MDD
SEX_WORDS = {"1": MALE, "m": MALE, "male": MALE, "2": FEMALE, "f": FEMALE, "female": FEMALE}
PATIENT_WORDS = {"1", "patient", "patients", "case", "asd", "autism", "mdd", "depression", "adhd", "scz", "schizophrenia"}
CONTROL_WORDS = {"0", "control", "controls", "hc", "nc", "tc", "td", "healthy", "typical", "healthy control"}
MISSING_CODES = ("", "n/a", "nan", "na", "-9999", "-9999.0", "[]", "none")

ALIASES = {
    "subject": ("participant_id", "subject", "subject_id", "sub_id", "id", "sub"),
    "site": ("site", "site_id", "site_name", "center", "centre", "scanner_site"),
    "label": ("label", "diagnosis", "dx", "dx_group", "group", "class", "patient"),
    "age": ("age", "age_at_scan", "age_years"),
    "sex": ("sex", "gender"),
    "education": ("education", "education_years", "years_of_education", "edu"),
    "tr": ("tr", "repetition_time", "repetitiontime"),
}


def read_text_table(path: Path, separator: str) -> pd.DataFrame:
    """A delimited table with every cell as stripped text, or an InputError."""
    try:
        table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{path} cannot be read as a table ({one_line(error)}).") from None
    return _tidy(table)


def read_sheet(path: Path, sheet: str) -> pd.DataFrame:
    """One sheet of a workbook with every cell as stripped text."""
    try:
        with pd.ExcelFile(path, engine="openpyxl") as book:
            if sheet not in book.sheet_names:
                raise InputError(f"{path} has no sheet {sheet} (it has {', '.join(map(str, book.sheet_names))}).")
            table = book.parse(sheet, dtype=str, keep_default_na=False)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as a workbook ({one_line(error)}).") from None
    return _tidy(table)


def _tidy(table: pd.DataFrame) -> pd.DataFrame:
    table.columns = [str(name).strip() for name in table.columns]
    return table.map(lambda cell: "" if pd.isna(cell) else str(cell).strip())


def need_columns(table: pd.DataFrame, columns: Iterable[str], path: Path) -> None:
    """InputError for the first of the columns that the table does not have."""
    for column in columns:
        if column not in table.columns:
            raise InputError(f"{path} has no column {column}.")


def find_column(table: pd.DataFrame, role: str) -> str | None:
    """The table's column for a role (subject, site, label, age ...), by its usual names, upper or lower case."""
    lower = {str(name).lower().replace(" ", "_"): str(name) for name in reversed(table.columns)}
    return next((lower[alias] for alias in ALIASES[role] if alias in lower), None)


def index_by_subject(table: pd.DataFrame, column: str, path: Path) -> pd.DataFrame:
    """The table indexed by its subject column, each subject once and none without a name."""
    names = table[column]
    if (names == "").any():
        row = int(np.flatnonzero((names == "").to_numpy())[0]) + 2
        raise InputError(f"{path}, line {row}: column {column} is empty.")
    twice = names[names.duplicated()]
    if len(twice):
        raise InputError(f"{path}: subject {twice.iloc[0]} is listed twice in column {column}.")
    return table.set_index(names.to_numpy())


def numeric(table: pd.DataFrame, column: str, path: Path, missing: Sequence[str] = MISSING_CODES) -> npt.NDArray[np.float64]:
    """A column as numbers with NaN where missing; text is an error that names the subject."""
    values = np.full(len(table), np.nan)
    for i, (subject, cell) in enumerate(table[column].items()):
        if cell.lower() not in missing:
            try:
                values[i] = float(cell)
            except ValueError:
                raise InputError(f"{path}: subject {subject}, column {column}: {cell[:40]!r} is not a number.") from None
    return np.where(np.isfinite(values), values, np.nan)


def sex(table: pd.DataFrame, column: str, path: Path, words: Mapping[str, float] = SEX_WORDS) -> npt.NDArray[np.float64]:
    """Sex as 1 male, 2 female, NaN unknown (0 and missing codes); any other word is an error."""

    def code(subject: str, cell: str) -> float:
        word = cell.lower().removesuffix(".0")
        if word in words:
            return words[word]
        if word in MISSING_CODES or word in ("0", "u", "unknown", "o", "other"):
            return np.nan
        raise InputError(f"{path}: subject {subject}, column {column}: {cell[:40]!r} is neither male nor female.")

    return np.array([code(str(subject), cell) for subject, cell in table[column].items()], dtype=np.float64)


def labels(
    table: pd.DataFrame, column: str, path: Path, patient: Sequence[str] = (), control: Sequence[str] = ()
) -> tuple[npt.NDArray[np.int8], str]:
    """Labels 1 / 0 / -1 (missing) and a note on the coding, which is the given one or, without, the usual words."""
    cells = table[column].str.lower().str.removesuffix(".0")
    present = sorted(set(cells) - set(MISSING_CODES))
    patients = {word.lower() for word in patient} or PATIENT_WORDS
    controls = {word.lower() for word in control} or CONTROL_WORDS
    advice = 'say which is which in dataset.toml: [labels] patient = ["..."], control = ["..."]'
    if not patient and {"1", "2"} <= set(present):
        raise InputError(f"{path}, column {column}: labels 1 and 2 do not tell who is the patient; {advice}.")
    for word in present:
        if word not in patients | controls:
            subject = table.index[np.flatnonzero((cells == word).to_numpy())[0]]
            raise InputError(f"{path}: subject {subject}, column {column}: label {word[:40]!r} is not known; {advice}.")
    coded = np.where(cells.isin(list(patients)), 1, np.where(cells.isin(list(controls)), 0, UNKNOWN)).astype(np.int8)
    used = {kind: sorted(set(present) & words) for kind, words in (("patient", patients), ("control", controls))}
    return coded, f"label from column {column}: " + ", ".join(f"{'/'.join(used[kind]) or 'nobody'} = {kind}" for kind in used)


def other_columns(table: pd.DataFrame, skip: Iterable[str], missing: Sequence[str] = MISSING_CODES) -> dict[str, object]:
    """The remaining columns: numbers where every present cell is one, text otherwise, without the missing codes."""
    columns: dict[str, object] = {}
    for name in table.columns:
        if name in set(skip):
            continue
        cells = [("" if cell.lower() in missing else cell) for cell in table[name]]
        columns[str(name)] = _all_numbers(cells) if any(cells) else np.full(len(cells), np.nan)
    return columns


def _all_numbers(cells: list[str]) -> object:
    try:
        return np.array([float(cell) if cell else np.nan for cell in cells], dtype=np.float64)
    except ValueError:
        return np.array(cells, dtype=object)


def keep_included(cohort: Cohort, path: Path) -> Cohort:
    """The subjects that an inclusion.csv of `check` has as included; the others it names are recorded as excluded by it."""
    table = read_text_table(path, ",")
    need_columns(table, ("subject", "status"), path)
    unknown = sorted(set(table.loc[table["status"] == "included", "subject"]) - set(cohort.subjects.tolist()))
    if unknown:
        raise InputError(f"{path}: subject {unknown[0]} is listed as included but the cohort does not have it.")
    keep = np.isin(cohort.subjects, table.loc[table["status"] == "included", "subject"])
    if not keep.any():
        raise InputError(f"{path} includes no subject.")
    pairs = zip(cohort.subjects[~keep].tolist(), cohort.sites[~keep].tolist(), strict=True)
    dropped = tuple(Exclusion(subject, site, f"left out by {path.name}") for subject, site in pairs)
    return replace(cohort.select(keep), excluded=cohort.excluded + dropped)
