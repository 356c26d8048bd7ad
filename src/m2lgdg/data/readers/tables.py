"""Tables of subjects: ids as text, missing codes, numeric and text columns, codes of sex and label.

Every reader makes `Participants` of its table. No choice is silent: how a column was interpreted is returned as a note.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN
from m2lgdg.cohort_arrays import need_seconds
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
OLDEST = 120.0  # years
FEWEST_ZEROS = 5  # people who all have 0 years of education, so that 0 is a code and not a number
MISSING_CODES = ("", "n/a", "nan", "na", "-9999", "-9999.0", "[]", "none")
INPUTS = ("sex", "age", "education")  # of participants.tsv

ALIASES = {
    "subject": ("participant_id", "subject", "subject_id", "sub_id", "id", "sub", "patient_id"),
    "site": ("site", "site_id", "site_name", "center", "centre", "hospital", "scanner_site"),
    "label": ("label", "diagnosis", "dx", "dx_group", "group", "class", "patient"),
    "age": ("age", "age_at_scan", "age_years"),
    "sex": ("sex", "gender"),
    "education": ("education", "education_years", "years_of_education", "edu"),
    "tr": ("tr", "repetition_time", "repetitiontime"),
}
# How to name the column of a role that was not found, by role.
NAMED = {role: f'name the right one in dataset.toml: [columns] {role} = "..."' for role in ("subject", "site", "label")}


class Participants(NamedTuple):
    """The people of a table in its order. `column` has their ids; `excluded` are those who are left out by the table alone.

    `site_of` gives the site of somebody who has a series and is not listed, where the id tells it.
    """

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
    site_of: Callable[[str], str] = lambda subject: ""

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
    subjects: Sequence[str] = (),
    rows: pd.DataFrame | None = None,
) -> Participants:
    """Read participants.tsv; `columns` gives the column of a role, `site` the site of all subjects if there is no site column.

    `advice` ends the message about an unknown label, `where` that about a role without a column: what to type for this reader.
    Names with the same text by `same` are one subject. Only the rows of `subjects` are read, if some are given. `rows` is the
    content of the table, if it has been read.
    """
    rows = read_text_table(path) if rows is None else rows
    found = {role: columns.get(role) or find_column(rows, role) for role in ALIASES}
    roles = {role: name for role, name in found.items() if name}
    need_columns(rows, roles.values(), path)
    for role in ("subject", "site"):
        if role not in roles and (role == "subject" or site is None):
            usual = ", ".join(ALIASES[role])
            raise InputError(f"{path} has no column for the {role} ({usual}); {present_columns(rows, path)}; {where[role]}.")
    if subjects:
        rows = rows[rows[roles["subject"]].isin(subjects)]
    bare = [code.lower().removesuffix(".0") for code in missing]
    codes = (*MISSING_CODES, *bare, *(f"{code}.0" for code in bare))  # integers next to gaps are often written as floats
    table = SubjectTable.of(rows, roles["subject"], path, missing=codes, same=same)
    if not len(rows):
        raise InputError(f"{path} lists no subject.")
    if "label" in roles:
        labels, note = table.labels(roles["label"], patient, control, advice)
        notes: list[Note] = [note]
    else:
        labels = np.full(len(rows), UNKNOWN, dtype=np.int8)
        note = Finding("label", numbers={"text": "no label column: all subjects are unlabelled"})
        notes = [note, f"{present_columns(rows)}; {where['label']}"]
    phenotypes, implausible = _phenotypes(table, roles)
    sites = table.sites(roles["site"]) if "site" in roles else np.array([site] * len(rows), dtype=np.str_)
    if "education" in phenotypes:
        phenotypes["education"], zeros = recorded_education(phenotypes["education"].to_numpy(), sites, labels)
        implausible += zeros
    chosen = [name for name in INPUTS if name in phenotypes] if inputs is None else list(inputs)
    for name in chosen:
        if name not in phenotypes:
            raise InputError(f"{path}: input {name} is neither a column nor one of {', '.join(INPUTS)}.")
        if phenotypes[name].dtype != np.float64:
            phenotypes[name] = table.numeric(name)  # raises an error that names the subject
    return Participants(
        table=path,
        subjects=table.subjects,
        sites=sites,
        labels=labels,
        tr=_repetition_times(table, roles["tr"]) if "tr" in roles else np.full(len(rows), np.nan),
        phenotypes=phenotypes,
        inputs=tuple(chosen),
        notes=(*(f"{role} from column {name}" for role, name in roles.items() if role != "label"), *notes, *implausible),
    )


def _repetition_times(table: SubjectTable, column: str) -> Floats:
    seconds = table.numeric(column)
    for subject, one in sorted(zip(table.subjects, seconds, strict=True), key=lambda each: each[1] > 0):  # others first
        where = f"{table.path}: subject {subject}, column {column}"
        if one <= 0:
            raise InputError(f"{where}: a TR of {one:g} s is not positive.")
        need_seconds(one, where)
    return seconds


def _phenotypes(table: SubjectTable, roles: Mapping[str, str]) -> tuple[pd.DataFrame, list[Finding]]:
    columns: dict[str, object] = {}
    notes: list[Finding] = []
    if "sex" in roles:
        columns["sex"] = table.sex(roles["sex"])
    if "age" in roles:
        columns["age"], notes = table.ages(roles["age"])
    if "education" in roles:
        columns["education"] = table.years_of_education(roles["education"])
    return table.with_others(columns, {*roles.values(), *columns}), notes


def read_text_table(path: Path, otherwise: str | None = None, separator: str | None = None) -> pd.DataFrame:
    """Table of a .csv or .tsv file with every cell as stripped text, indexed by line number, without unnamed columns.

    Not read by pandas, which fills short rows, shifts long ones and renames repeated columns. `otherwise` is the encoding of a
    table that is not UTF-8; `separator` that of the columns, by default a comma in .csv files and a tab in others.
    """
    return parse_text_table(path, read_bytes(path, LARGEST_TABLE), otherwise, separator)


def parse_text_table(path: Path, content: bytes, otherwise: str | None = None, separator: str | None = None) -> pd.DataFrame:
    """Table in the content of a file, as `read_text_table`."""
    try:
        text = _decoded(content, otherwise)
        separator = separator or ("," if path.suffix == ".csv" else "\t")
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
        reason = one_line(error)
        raise InputError(f"{path} cannot be read as a workbook ({reason}); download it again, or save it as .xlsx.") from None
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
            raise InputError(f"{path} has no column {column}; {present_columns(table, path)}.")


def is_elsewhere(path: Path) -> bool:
    """Whether a file is a link or named from above, so that it may lie anywhere and hold anything."""
    return path.is_symlink() or ".." in path.parts


def quoted(path: Path, cell: str) -> str:
    """The text of a cell for a message, if the file is in its folder."""
    return "the text (not shown, since the file is a link)" if is_elsewhere(path) else repr(cell[:40])


def present_columns(table: pd.DataFrame, path: Path | None = None) -> str:
    """The columns of a table, twelve at most, as part of a sentence."""
    if path is not None and is_elsewhere(path):
        return f"it has {len(table.columns)} columns (not shown, since the file is a link)"
    names = [str(name) for name in table.columns]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"its columns are {', '.join(names[:MOST_NAMES])}{more}"


def find_table(path: Path, pattern: str, skip: str = "\0") -> Path | None:
    """The file of this name in a folder or up to two levels below, the highest one; several of one level are an error."""
    for level in ("", "*/", "*/*/"):
        found = sorted(file for file in path.glob(f"{level}{pattern}") if skip not in file.name)
        if len({file.parent for file in found}) > 1:
            places = " and ".join(str(file.relative_to(path)) for file in found[:2])
            raise InputError(f"{path} has several tables of subjects, {places}; name one with --participants FILE.")
        if found:
            return found[0]
    return None


def usual_name(column: object) -> str:
    """The name of a column as the usual names are written: `Mean FD` is mean_fd, `Age (years)` is age_years."""
    return re.sub(r"[^\w]+", "_", str(column).lower()).strip("_")


def find_column(table: pd.DataFrame, role: str) -> str | None:
    """Column for a role (subject, site, label, age ...), found by its usual names regardless of case and signs."""
    usual = {usual_name(name): str(name) for name in reversed(table.columns)}
    return next((usual[alias] for alias in ALIASES[role] if alias in usual), None)


@dataclass
class SubjectTable:
    """A table with one row for each subject: cells as text, the file that messages name, and the codes of missing values."""

    rows: pd.DataFrame
    path: Path
    missing: Sequence[str] = MISSING_CODES

    @classmethod
    def of(
        cls,
        rows: pd.DataFrame,
        subject: str,
        path: Path,
        *,
        needed: Iterable[str] = (),
        missing: Sequence[str] = MISSING_CODES,
        same: Callable[[str], str] = str,
    ) -> SubjectTable:
        """The table by its subjects; names with the same text by `same` (sub-01 and 01 in BIDS) are a repeated subject."""
        need_columns(rows, (subject, *needed), path)
        names = rows[subject]
        lines: dict[str, int] = {}
        for line, name in names.items():
            if not name:
                raise InputError(f"{path}, line {line}: column {subject} is empty.")
            first = lines.setdefault(same(name), line)
            if first != line and names[first] == name:
                raise InputError(f"{path}: subject {name} is listed twice in column {subject}.")
            if first != line:
                both = f"{names[first]} and {name} are the same subject; remove one of the two rows"
                raise InputError(f"{path}, lines {first} and {line}, column {subject}: {both}.")
        return cls(rows.set_index(names.to_numpy()), path, missing)

    @property
    def subjects(self) -> list[str]:
        """Names of the subjects."""
        return [str(one) for one in self.rows.index]

    def _error(self, subject: object, column: str, problem: str) -> InputError:
        return InputError(f"{self.path}: subject {subject}, column {column}: {problem}.")

    def sites(self, column: str) -> npt.NDArray[np.str_]:
        """Site of each subject; a subject without one is an error."""
        named = np.asarray(self.rows[column], dtype=np.str_)
        empty = np.isin(np.char.lower(named), MISSING_CODES)
        if empty.any():
            raise InputError(f"{self.path}: subject {self.rows.index[empty][0]} has no site in column {column}.")
        return named

    def numeric(self, column: str, above: float = -np.inf) -> Floats:
        """Column as numbers with NaN where missing or not above a limit; text is an error that names the subject."""
        values = np.full(len(self.rows), np.nan)
        for i, (subject, cell) in enumerate(self.rows[column].items()):
            if cell.lower() not in self.missing:
                try:
                    values[i] = number(cell)
                except ValueError:
                    raise self._error(subject, column, f"{quoted(self.path, cell)} is not a number") from None
        return np.where(np.isfinite(values) & (values > above), values, np.nan)

    def ages(self, column: str) -> tuple[Floats, list[Finding]]:
        """Age in years, NaN where missing or 0, and a note on each age below 0 or above 120, which is set to missing."""
        values = self.numeric(column)
        notes = [
            Finding("age", "", (str(self.rows.index[i]),), {"column": column, "value": float(values[i]), "oldest": OLDEST})
            for i in np.flatnonzero((values < 0) | (values > OLDEST))
        ]
        return np.where((values > 0) & (values <= OLDEST), values, np.nan), notes

    def years_of_education(self, column: str) -> Floats:
        """Years of education, NaN where missing or negative; zero years are valid."""
        values = self.numeric(column)
        return np.where(values >= 0, values, np.nan)

    def sex(self, column: str, words: Mapping[str, float] = SEX_WORDS, expected: str = "male nor female") -> Floats:
        """Sex as 1 male, 2 female, NaN unknown (0 and missing codes); any other word is an error."""
        values = []
        for subject, cell in self.rows[column].items():
            word = cell.lower().removesuffix(".0")
            if word not in words and word not in self.missing:
                raise self._error(subject, column, f"{quoted(self.path, cell)} is neither {expected}")
            values.append(words.get(word, np.nan))
        return np.array(values, dtype=np.float64)

    def labels(
        self, column: str, patient: Sequence[str] = (), control: Sequence[str] = (), advice: str = ""
    ) -> tuple[npt.NDArray[np.int8], Finding]:
        """Labels (1 patient, 0 control, -1 missing) and a note on the coding, by the given words or else the usual ones."""
        cells = self.rows[column].str.lower().str.removesuffix(".0")
        patients, controls = _words(patient), _words(control)
        # A word given for one class is no longer a usual word of the other.
        patients, controls = patients or PATIENT_WORDS - controls, controls or CONTROL_WORDS - patients
        present = sorted(word for word in set(cells) if word not in self.missing or word in patients | controls)
        advice = f"; {advice}" if advice else ""
        if not patient and {"1", "2"} <= set(present):
            raise InputError(f"{self.path}, column {column}: labels 1 and 2 are ambiguous{advice}.")
        for word in present:
            if word not in patients | controls:
                subject = self.rows.index[np.flatnonzero((cells == word).to_numpy())[0]]
                raise self._error(subject, column, f"label {quoted(self.path, word)} is not known{advice}")
        coded = np.where(cells.isin(list(patients)), 1, np.where(cells.isin(list(controls)), 0, UNKNOWN)).astype(np.int8)
        used = {kind: sorted(set(present) & words) for kind, words in (("patient", patients), ("control", controls))}
        coding = ", ".join(f"{'/'.join(used[kind]) or 'none'} = {kind}" for kind in used)
        return coded, Finding("label", numbers={"text": f"label from column {column}: {coding}"})

    def with_others(self, columns: Mapping[str, object], skip: Iterable[str]) -> pd.DataFrame:
        """Phenotypes: the given columns, then the others without missing codes, as numbers if every cell is one, else text."""
        others: dict[str, object] = {}
        for name in self.rows.columns.difference(list(skip), sort=False):
            cells = ["" if cell.lower() in self.missing else cell for cell in self.rows[name]]
            try:
                others[str(name)] = np.array([number(cell) if cell else np.nan for cell in cells], dtype=np.float64)
            except ValueError:
                others[str(name)] = np.array(cells, dtype=object)
        return pd.DataFrame({**columns, **others}, index=self.rows.index)


def number(cell: str) -> float:
    """A cell as a number; ValueError if it is none."""
    if "_" in cell:
        raise ValueError("Python reads 17_1 as 171")
    return float(cell)


def need_distinct(patient: Sequence[str], control: Sequence[str], where: str) -> None:
    """Raise an InputError for a word that was given for both classes."""
    both = _words(patient) & _words(control)
    if both:
        raise InputError(f"{where}: {min(both)} stands for both patient and control.")


def recorded_education(years: Floats, sites: npt.NDArray[Any], labels: npt.NDArray[Any]) -> tuple[Floats, list[Finding]]:
    """Years of education, NaN at sites where all patients or all controls have 0: there it was not recorded.

    The whole site is set to missing, since years that only one of the two groups has would reveal the label.
    """
    years, notes = years.copy(), []
    names = {1: "patients", 0: "controls", UNKNOWN: "subjects"}
    for site in dict.fromkeys(sites.tolist()):
        here = (sites == site) & ~np.isnan(years)
        values = {names[one]: years[here & (labels == one)] for one in names}
        zeros = {name: len(some) for name, some in values.items() if len(some) >= FEWEST_ZEROS and not some.any()}
        if zeros:
            listed = " and ".join(f"all {size} {name}" for name, size in zeros.items())
            notes.append(Finding("no education", site, (), {"zeros": listed}))
            years[here] = np.nan
    return years, notes


def _words(given: Iterable[str]) -> set[str]:
    return {word.lower().removesuffix(".0") for word in given}
