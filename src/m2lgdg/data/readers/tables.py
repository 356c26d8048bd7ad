"""Tables of subjects: ids as text, missing codes, numeric and text columns, codes of sex and label.

Every reader makes `Participants` of its table. No choice is silent: how a column was interpreted is returned as a note.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN
from m2lgdg.findings import Exclusion, Finding, Note
from m2lgdg.storage import InputError, one_line, read_bytes

Floats = npt.NDArray[np.float64]
MALE, FEMALE = 1.0, 2.0  # the coding of both ABIDE and REST-meta-MDD
SEX_WORDS = {"1": MALE, "m": MALE, "male": MALE, "2": FEMALE, "f": FEMALE, "female": FEMALE}
SEX_WORDS |= dict.fromkeys(("0", "u", "unknown", "o", "other"), np.nan)
PATIENT_WORDS = {"1", "patient", "patients", "case", "asd", "autism", "mdd", "depression", "adhd", "scz", "schizophrenia"}
CONTROL_WORDS = {"0", "control", "controls", "hc", "nc", "tc", "td", "healthy", "typical", "healthy control"}
# Columns with a subject's head motion, in lower case.
MOTION = ("func_mean_fd", "mean_fd", "meanfd", "mean_framewise_displacement", "framewise_displacement")
MOST_NAMES = 12  # columns that a message lists
LARGEST_TABLE = 256 << 20  # bytes, also of a workbook without compression
MOST_CELLS = 4_000_000  # of a sheet, with the empty ones between its first and last cell
SLOWEST = 20.0  # seconds; a longer TR is in milliseconds
OLDEST = 120.0  # years
MISSING_CODES = ("", "n/a", "nan", "na", "-9999", "-9999.0", "[]", "none")
INPUTS = ("sex", "age", "education")  # of participants.tsv

ALIASES = {
    "subject": ("participant_id", "subject", "subject_id", "sub_id", "id", "sub"),
    "site": ("site", "site_id", "site_name", "center", "centre", "scanner_site"),
    "label": ("label", "diagnosis", "dx", "dx_group", "group", "class", "patient"),
    "age": ("age", "age_at_scan", "age_years"),
    "sex": ("sex", "gender"),
    "education": ("education", "education_years", "years_of_education", "edu"),
    "tr": ("tr", "repetition_time", "repetitiontime"),
}
# How to name the column of a role that was not found, by role.
NAMED = {role: f'name the right one in dataset.toml: [columns] {role} = "..."' for role in ("subject", "site", "label")}


class Participants(NamedTuple):
    """The people of a table in its order. `column` has their ids; `excluded` are those who are left out by the table alone."""

    table: Path
    subjects: list[str]
    sites: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int8]
    tr: Floats
    phenotypes: pd.DataFrame
    inputs: tuple[str, ...]
    notes: tuple[Note, ...]
    column: str = ""
    excluded: Sequence[Exclusion] = ()

    def rows(self, chosen: list[int]) -> Participants:
        """The people at these positions."""
        return self._replace(
            subjects=[self.subjects[i] for i in chosen],
            sites=self.sites[chosen],
            labels=self.labels[chosen],
            tr=self.tr[chosen],
            phenotypes=self.phenotypes.iloc[chosen],
        )


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
    """Read participants.tsv; `columns` gives the column of a role, `site` the site of all subjects if there is no site column.

    Columns are found by their usual names unless they are given. `advice` ends the message about an unknown label: how to give
    the words of each class to this reader; `where` that about the column of a role that was not found. Names with the same text
    by `same` are one subject.
    """
    table = read_text_table(path)
    found = {role: columns.get(role) or find_column(table, role) for role in ALIASES}
    roles = {role: name for role, name in found.items() if name}
    need_columns(table, roles.values(), path)
    for role in ("subject", "site"):
        if role not in roles and (role == "subject" or site is None):
            usual = ", ".join(ALIASES[role])
            raise InputError(f"{path} has no column for the {role} ({usual}); {present_columns(table)}; {where[role]}.")
    table = index_by_subject(table, roles["subject"], path, same)
    if not len(table):
        raise InputError(f"{path} lists no subject.")
    bare = [code.lower().removesuffix(".0") for code in missing]
    codes = (*MISSING_CODES, *bare, *(f"{code}.0" for code in bare))  # integers next to gaps are often written as floats
    if "label" in roles:
        coded, note = labels(table, roles["label"], path, patient, control, codes, advice)
        notes: list[Note] = [note]
    else:
        coded = np.full(len(table), UNKNOWN, dtype=np.int8)
        note = Finding("label", numbers={"text": "no label column: all subjects are unlabelled"})
        notes = [note, f"{present_columns(table)}; {where['label']}"]
    phenotypes, implausible = _phenotypes(table, roles, path, codes)
    chosen = [name for name in INPUTS if name in phenotypes] if inputs is None else list(inputs)
    for name in chosen:
        if name not in phenotypes:
            raise InputError(f"{path}: input {name} is neither a column nor one of {', '.join(INPUTS)}.")
        if phenotypes[name].dtype != np.float64:
            phenotypes[name] = numeric(table, name, path, codes)  # raises an error that names the subject
    return Participants(
        table=path,
        subjects=[str(one) for one in table.index],
        sites=sites(table, roles["site"], path) if "site" in roles else np.array([site] * len(table), dtype=np.str_),
        labels=coded,
        tr=_repetition_times(table, roles["tr"], path, codes) if "tr" in roles else np.full(len(table), np.nan),
        phenotypes=phenotypes,
        inputs=tuple(chosen),
        notes=(*(f"{role} from column {name}" for role, name in roles.items() if role != "label"), *notes, *implausible),
    )


def _repetition_times(table: pd.DataFrame, column: str, path: Path, codes: Sequence[str]) -> Floats:
    seconds = numeric(table, column, path, codes)
    for i in np.flatnonzero(seconds <= 0):
        raise InputError(f"{path}: subject {table.index[i]}, column {column}: a TR of {seconds[i]:g} s is not positive.")
    for subject, one in zip(table.index, seconds, strict=True):
        need_seconds(one, f"{path}: subject {subject}, column {column}")
    return seconds


def _phenotypes(
    table: pd.DataFrame, roles: Mapping[str, str], path: Path, codes: Sequence[str]
) -> tuple[pd.DataFrame, list[Finding]]:
    """Phenotypes, and notes on implausible values."""
    columns: dict[str, object] = {}
    notes: list[Finding] = []
    if "sex" in roles:
        columns["sex"] = sex(table, roles["sex"], path, codes)
    if "age" in roles:
        columns["age"], notes = ages(table, roles["age"], path, codes)
    if "education" in roles:
        columns["education"] = years_of_education(table, roles["education"], path, codes)
    columns |= other_columns(table, {*roles.values(), *columns}, codes)
    return pd.DataFrame(columns, index=table.index), notes


def read_text_table(path: Path, otherwise: str | None = None) -> pd.DataFrame:
    """Table of a .csv or .tsv file with every cell as stripped text, indexed by line number, without unnamed columns.

    Not read by pandas, which fills short rows, shifts long ones and renames repeated columns. `otherwise` is the encoding of
    a table that is not UTF-8, for releases that have such tables.
    """
    content = read_bytes(path, LARGEST_TABLE)
    try:
        text = _decoded(content, otherwise)
        separator = "," if path.suffix == ".csv" else "\t"
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table ({one_line(error)}).") from None
    rows = {line: cells for line, cells in lines if any(cells)}
    if not rows:
        raise InputError(f"{path} is empty and cannot be read as a table.")
    names = rows.pop(min(rows))
    for line, cells in rows.items():
        if len(cells) != len(names):
            raise InputError(f"{path}, line {line}: {len(cells)} cells, but the header has {len(names)} columns.")
        if any("\0" in cell for cell in cells):  # pandas cannot look such a cell up
            raise InputError(f"{path} cannot be read as a table (line {line} has a NUL byte).")
    for name, count in Counter(names).items():
        if name and count > 1:
            raise InputError(f"{path}: column {name} appears {'twice' if count == 2 else f'{count} times'}.")
    table = pd.DataFrame(list(rows.values()), index=list(rows), columns=names, dtype=str)
    return table.loc[:, [bool(name) for name in names]]


def _decoded(content: bytes, otherwise: str | None) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        if otherwise is None:
            raise
        return content.decode(otherwise)


def read_sheet(path: Path, sheet: str) -> pd.DataFrame:
    """Sheet of a workbook with every cell as stripped text."""
    content = io.BytesIO(read_bytes(path, LARGEST_TABLE))
    try:
        with zipfile.ZipFile(content) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > LARGEST_TABLE:
            raise InputError(f"{path} has {size} bytes without compression, more than the limit of {LARGEST_TABLE}.")
        with pd.ExcelFile(content, engine="openpyxl") as book:
            if sheet not in book.sheet_names:
                raise InputError(f"{path} has no sheet {sheet} (it has {', '.join(map(str, book.sheet_names))}).")
            _need_small(book.book[sheet], path)
            table = pd.read_excel(book, sheet_name=sheet, dtype=str, keep_default_na=False)
    except InputError:
        raise
    except Exception as error:  # damaged files raise errors of any type in zip, XML and openpyxl
        raise InputError(f"{path} cannot be read as a workbook ({one_line(error)}).") from None
    table.columns = [str(name).strip() for name in table.columns]
    return table.map(lambda cell: "" if pd.isna(cell) else str(cell).strip())


def _need_small(sheet: Any, path: Path) -> None:
    """Refuse a sheet with a cell far from the others: pandas would fill everything between with empty cells."""
    sheet.reset_dimensions()  # as written in the file, where any number may stand
    height = width = 0
    for number, row in enumerate(sheet.iter_rows(values_only=True), start=1):
        filled = [column for column, value in enumerate(row, start=1) if value is not None]
        if filled:
            height, width = number, max(width, filled[-1])
        if height * width > MOST_CELLS:
            raise InputError(f"{path}, sheet {sheet.title} has more than {MOST_CELLS} cells; delete what is outside the table.")


def need_columns(table: pd.DataFrame, columns: Iterable[str], path: Path) -> None:
    """Raise an InputError for the first column that the table does not have."""
    for column in columns:
        if column not in table.columns:
            raise InputError(f"{path} has no column {column}; {present_columns(table)}.")


def present_columns(table: pd.DataFrame) -> str:
    """The columns of a table, twelve at most, as part of a sentence."""
    names = [str(name) for name in table.columns]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"its columns are {', '.join(names[:MOST_NAMES])}{more}"


def find_column(table: pd.DataFrame, role: str) -> str | None:
    """Column for a role (subject, site, label, age ...), found by its usual names regardless of case."""
    lower = {str(name).lower().replace(" ", "_"): str(name) for name in reversed(table.columns)}
    return next((lower[alias] for alias in ALIASES[role] if alias in lower), None)


def index_by_subject(table: pd.DataFrame, column: str, path: Path, same: Callable[[str], str] = str) -> pd.DataFrame:
    """Index the table by its subject column; empty or repeated subjects are an error.

    Two names are the same subject if `same` gives the same text for both (sub-01 and 01 in BIDS).
    """
    names = table[column]
    lines: dict[str, int] = {}
    for line, name in names.items():
        if not name:
            raise InputError(f"{path}, line {line}: column {column} is empty.")
        first = lines.setdefault(same(name), line)
        if first != line and names[first] == name:
            raise InputError(f"{path}: subject {name} is listed twice in column {column}.")
        if first != line:
            both = f"{names[first]} and {name} are the same subject; remove one of the two rows"
            raise InputError(f"{path}, lines {first} and {line}, column {column}: {both}.")
    return table.set_index(names.to_numpy())


def sites(table: pd.DataFrame, column: str, path: Path) -> npt.NDArray[np.str_]:
    """Site of each subject; a subject without one is an error."""
    named = np.asarray(table[column], dtype=np.str_)
    empty = np.isin(np.char.lower(named), MISSING_CODES)
    if empty.any():
        raise InputError(f"{path}: subject {table.index[empty][0]} has no site in column {column}.")
    return named


def numeric(table: pd.DataFrame, column: str, path: Path, missing: Sequence[str] = MISSING_CODES) -> Floats:
    """Column as numbers with NaN where missing; text is an error that names the subject."""
    values = np.full(len(table), np.nan)
    for i, (subject, cell) in enumerate(table[column].items()):
        if cell.lower() not in missing:
            try:
                values[i] = number(cell)
            except ValueError:
                raise InputError(f"{path}: subject {subject}, column {column}: {cell[:40]!r} is not a number.") from None
    return np.where(np.isfinite(values), values, np.nan)


def number(cell: str) -> float:
    """A cell as a number; ValueError if it is none."""
    if "_" in cell:
        raise ValueError("Python reads 17_1 as 171")
    return float(cell)


def ages(table: pd.DataFrame, column: str, path: Path, missing: Sequence[str] = MISSING_CODES) -> tuple[Floats, list[Finding]]:
    """Age in years, NaN where missing or 0, and a note on each age below 0 or above 120, which is set to missing."""
    values = numeric(table, column, path, missing)
    notes = [
        Finding("age", "", (str(table.index[i]),), {"column": column, "value": float(values[i]), "oldest": OLDEST})
        for i in np.flatnonzero((values < 0) | (values > OLDEST))
    ]
    return np.where((values > 0) & (values <= OLDEST), values, np.nan), notes


def years_of_education(table: pd.DataFrame, column: str, path: Path, missing: Sequence[str] = MISSING_CODES) -> Floats:
    """Years of education, NaN where missing or negative; zero years are valid."""
    values = numeric(table, column, path, missing)
    return np.where(values >= 0, values, np.nan)


def need_seconds(seconds: float, where: str) -> float:
    """A repetition time; one above 20 s is refused, because it is in milliseconds."""
    if seconds > SLOWEST:
        raise InputError(
            f"{where}: a TR of {seconds:g} s is above {SLOWEST:g} s and looks like milliseconds; "
            f"give it in seconds ({seconds / 1000:g})."
        )
    return seconds


def sex(
    table: pd.DataFrame,
    column: str,
    path: Path,
    missing: Sequence[str] = MISSING_CODES,
    words: Mapping[str, float] = SEX_WORDS,
    expected: str = "male nor female",
) -> Floats:
    """Sex as 1 male, 2 female, NaN unknown (0 and missing codes); any other word is an error."""
    values = []
    for subject, cell in table[column].items():
        word = cell.lower().removesuffix(".0")
        if word not in words and word not in missing:
            raise InputError(f"{path}: subject {subject}, column {column}: {cell[:40]!r} is neither {expected}.")
        values.append(words.get(word, np.nan))
    return np.array(values, dtype=np.float64)


def labels(
    table: pd.DataFrame,
    column: str,
    path: Path,
    patient: Sequence[str] = (),
    control: Sequence[str] = (),
    missing: Sequence[str] = MISSING_CODES,
    advice: str = "",
) -> tuple[npt.NDArray[np.int8], Finding]:
    """Labels (1 patient, 0 control, -1 missing) and a note on the coding, by the given words or else the usual ones.

    `advice` ends the message about an unknown word: how to give the words of each class to this reader.
    """
    cells = table[column].str.lower().str.removesuffix(".0")
    patients, controls = _words(patient), _words(control)
    # A word given for one class is no longer a usual word of the other.
    patients, controls = patients or PATIENT_WORDS - controls, controls or CONTROL_WORDS - patients
    present = sorted(word for word in set(cells) if word not in missing or word in patients | controls)
    advice = f"; {advice}" if advice else ""
    if not patient and {"1", "2"} <= set(present):
        raise InputError(f"{path}, column {column}: labels 1 and 2 are ambiguous{advice}.")
    for word in present:
        if word not in patients | controls:
            subject = table.index[np.flatnonzero((cells == word).to_numpy())[0]]
            raise InputError(f"{path}: subject {subject}, column {column}: label {word[:40]!r} is not known{advice}.")
    coded = np.where(cells.isin(list(patients)), 1, np.where(cells.isin(list(controls)), 0, UNKNOWN)).astype(np.int8)
    used = {kind: sorted(set(present) & words) for kind, words in (("patient", patients), ("control", controls))}
    coding = ", ".join(f"{'/'.join(used[kind]) or 'none'} = {kind}" for kind in used)
    return coded, Finding("label", numbers={"text": f"label from column {column}: {coding}"})


def need_distinct(patient: Sequence[str], control: Sequence[str], where: str) -> None:
    """Raise an InputError for a word that was given for both classes."""
    both = _words(patient) & _words(control)
    if both:
        raise InputError(f"{where}: {min(both)} stands for both patient and control.")


def _words(given: Iterable[str]) -> set[str]:
    return {word.lower().removesuffix(".0") for word in given}


def other_columns(table: pd.DataFrame, skip: Iterable[str], missing: Sequence[str] = MISSING_CODES) -> dict[str, object]:
    """The remaining columns without missing codes: numeric if every other cell is a number, else text."""
    columns: dict[str, object] = {}
    for name in table.columns.difference(list(skip), sort=False):
        cells = ["" if cell.lower() in missing else cell for cell in table[name]]
        try:
            columns[str(name)] = np.array([number(cell) if cell else np.nan for cell in cells], dtype=np.float64)
        except ValueError:
            columns[str(name)] = np.array(cells, dtype=object)
    return columns
