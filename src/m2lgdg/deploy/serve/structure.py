"""Uploaded tables of brain structure: what a model expects, and one row of it from stats files or tables of one subject.

`upload` adds the rows to the cohort of one subject. As for scans, bytes are parsed in memory, and no file is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from m2lgdg.data.atlases.table_columns import VERSIONS
from m2lgdg.data.readers.ids import matched_ids
from m2lgdg.data.readers.structure import ATLASES, WHOLE, parse_stats, parse_table
from m2lgdg.model.model import Model
from m2lgdg.storage import InputError

STATS, TABLES = ".stats", (".csv", ".tsv", ".txt")
LARGEST_TABLE = 2**20  # bytes of a file: a stats file has 20 kB
MOST_CELLS = 20_000
MOST_FILES = 4  # of a table
NAMELESS = "\0"  # a row without an id
SURFACE = re.compile(r"(?P<side>[lr]h)_(?P<region>.+)_(?P<measure>[a-z]+)")
NAMES = {"desikan-killiany": "Desikan-Killiany", "destrieux": "Destrieux"}
Files = Mapping[str, Sequence[tuple[str, bytes]]]  # name and content of the files of each table


class Expected(NamedTuple):
    """A table that a model was trained with, and what its columns say of it."""

    name: str
    columns: tuple[str, ...]
    measure: str = ""  # of FreeSurfer's columns
    atlas: str = ""  # desikan-killiany, destrieux or aseg, as far as it is known
    sides: tuple[str, ...] = ()
    weightless: bool = False  # it was not of use at left-out source sites

    @property
    def files(self) -> str:
        """The stats files that hold it, in words; empty if it is not of FreeSurfer."""
        if not self.sides:
            return f"{self.atlas}.stats" if self.measure else ""
        short = next((short for short, long in ATLASES.items() if long == self.atlas), "*")
        return " and ".join(f"{side}.{short}.stats" for side in self.sides)

    @property
    def what(self) -> str:
        """Measure and atlas in words, or the first columns."""
        if self.measure:
            return ", ".join(filter(None, (self.measure, NAMES.get(self.atlas, self.atlas))))
        return f"columns {', '.join(self.columns[:3])}{' ...' * (len(self.columns) > 3)}"


def expected_tables(fitted: Model) -> list[Expected]:
    """The tables that any member of a model takes, or a method that a member averages."""
    columns: dict[str, dict[str, None]] = {}
    weights: dict[str, list[float]] = {}
    facts = [member.facts_ for member in fitted.members.values()]
    facts += [averaged for member in facts for averaged in member.get("members", {}).values()]
    for one in facts:
        for name, about in one.get("tables", {}).items():
            columns.setdefault(name, {}).update(dict.fromkeys(map(str, about["columns"])))
            weights.setdefault(name, []).append(about.get("weight", 1.0))
    return [_expected(name, tuple(own), not any(weights[name])) for name, own in columns.items()]


def _expected(name: str, columns: tuple[str, ...], weightless: bool) -> Expected:
    found = [match for column in columns if not WHOLE.fullmatch(column) and (match := SURFACE.fullmatch(column))]
    measures, regions = {match["measure"] for match in found}, {match["region"] for match in found}
    if len(measures) == 1:
        sides = tuple(sorted({match["side"] for match in found}))
        folds = any(re.match(r"[GS]_", region) for region in regions)
        atlas = "destrieux" if folds else "desikan-killiany" if "bankssts" in regions else ""
        return Expected(name, columns, measures.pop(), atlas, sides, weightless)
    if not found and any(re.match(r"(Left|Right)-|Brain-Stem$", column) for column in columns):
        return Expected(name, columns, "volume", "aseg", weightless=weightless)
    return Expected(name, columns, weightless=weightless)


class Row(NamedTuple):
    """What a file holds of its subject."""

    file: str
    values: dict[str, float]
    subject: str = ""
    atlas: str = ""
    what: str = ""


def rows_of(expected: Sequence[Expected], files: Files, subject: str) -> dict[str, pd.DataFrame]:
    """Tables of one row, by name, with NaN for values that the files do not have; a table without files is left out."""
    rows = {
        one.name: [_row(one, file, content) for file, content in files[one.name]] for one in expected if files.get(one.name)
    }
    _need_one_subject([row for own in rows.values() for row in own])
    frames = {}
    for one in expected:
        if one.name in rows:
            values = _merged(one, rows[one.name])
            row = [values.get(VERSIONS.get(column, column), np.nan) for column in one.columns]
            frames[one.name] = pd.DataFrame([row], index=[subject], columns=list(one.columns))
    return frames


def _row(expected: Expected, file: str, content: bytes) -> Row:
    """Values of a file, which has to have the measure and the atlas of the table."""
    if len(content) > LARGEST_TABLE:
        raise InputError(f"{file} is larger than {LARGEST_TABLE // 2**20} MB, the limit for a table.")
    if not content:
        raise InputError(f"{file} is empty.")
    suffix = Path(file.lower()).suffix
    if suffix == STATS:
        row = _from_stats(expected, file, content)
    elif suffix in TABLES:
        row = _from_table(expected, file, content)
    else:
        raise InputError(f"{file} cannot be read: a table ends in {', '.join((STATS, *TABLES[:-1]))} or {TABLES[-1]}.")
    regions = [column for column in expected.columns if not WHOLE.fullmatch(column)] or expected.columns
    other = row.atlas and expected.atlas and row.atlas != expected.atlas
    if other or not any(VERSIONS.get(column, column) in row.values for column in regions):
        holds = f" ({row.what})" if row.what else ""
        wanted = f"{expected.files} or a table" if expected.files else "a table"
        raise InputError(
            f"{file}{holds} does not fit table {expected.name} of the model ({expected.what}), as it has no column such as "
            f"{regions[0]} of the same atlas; give {wanted} with one row."
        )
    for column, value in row.values.items():
        if np.isinf(value):
            raise InputError(f"{file}: the value of {column} is infinite.")
    return row


def _from_stats(expected: Expected, file: str, content: bytes) -> Row:
    if not expected.measure:
        raise InputError(f"{file} is a stats file of FreeSurfer, and table {expected.name} is not ({expected.what}).")
    values = _known(parse_stats(Path(file), content, expected.measure), file)
    lines = [line.split() for line in content.decode(errors="replace").splitlines() if line.startswith("# ")]
    header = {words[1]: words[2] for words in lines if len(words) > 2}
    short = re.sub(r"^[lr]h\.", "", header.get("AnnotationFile", file).rsplit("/", 1)[-1]).rsplit(".", 1)[0]
    atlas = ATLASES.get(short, short) if any(SURFACE.fullmatch(column) for column in values) else "aseg"
    if short == "aparc.pial" and expected.measure != "thickness":  # areas of another surface
        atlas = short
    return Row(file, values, header.get("subjectname", ""), atlas, f"{expected.measure}, {NAMES.get(atlas, atlas)}")


def _from_table(expected: Expected, file: str, content: bytes) -> Row:
    if content.count(b"\0"):
        raise InputError(f"{file} is not a text file.")
    if sum(content.count(mark) for mark in (b"\n", b",", b";", b"\t", b" ")) > MOST_CELLS:
        raise InputError(f"{file} has more than {MOST_CELLS} cells; give the row of one subject.")
    read = parse_table(Path(file), content, expected.name, alone=NAMELESS)
    if len(read.table) != 1:
        raise InputError(f"{file} has the rows of {len(read.table)} subjects; give that of one.")
    values = _known({str(column): float(value) for column, value in read.table.iloc[0].items()}, file)
    who = str(read.table.index[0]).removeprefix(NAMELESS)
    return Row(file, values, who, read.atlas if read.kind == "freesurfer" else "", read.what)


def _known(values: Mapping[str, float], file: str) -> dict[str, float]:
    """Values by the names of the latest version; two names of one measure with other values are refused."""
    known: dict[str, float] = {}
    for column, value in values.items():
        name = VERSIONS.get(column, column)
        if name in known and not np.isclose(known[name], value, rtol=1e-6, equal_nan=True):
            raise InputError(f"{file}: {column} has another value than {name}, which is the same measure.")
        known[name] = value
    return known


def _need_one_subject(rows: Sequence[Row]) -> None:
    named = [row for row in rows if row.subject]
    for row in named[1:]:
        first = named[0]
        if not matched_ids([row.subject], [first.subject], row.file):
            raise InputError(
                f"{first.file} is of subject {first.subject[:60]} and {row.file} of {row.subject[:60]}; give the files of one."
            )


def _merged(expected: Expected, rows: Sequence[Row]) -> dict[str, float]:
    """Values of all files of a table; what two files have must be equal, such as the size of the head in both hemispheres."""
    values: dict[str, float] = {}
    source: dict[str, str] = {}
    for row in rows:
        for column, value in row.values.items():
            whole = WHOLE.fullmatch(column) and column[:3] not in ("lh_", "rh_")
            if column in values and (not whole or not np.isclose(values[column], value, rtol=1e-6, equal_nan=True)):
                both = f"{source[column]} and {row.file} both have {column}"
                reason = ", with different values, so they are of different subjects" if whole else ""
                raise InputError(f"table {expected.name}: {both}{reason}; give {expected.files or 'one file'} of one subject.")
            values[column], source[column] = value, row.file
    for side in expected.sides:
        own = [column for column in expected.columns if column.startswith(f"{side}_") and not WHOLE.fullmatch(column)]
        if not any(VERSIONS.get(column, column) in values for column in own):
            without = (
                f"{' and '.join(row.file for row in rows)} {'has' if len(rows) == 1 else 'have'} no column such as {own[0]}"
            )
            raise InputError(
                f"table {expected.name}: {without}; give {expected.files} of one subject, or a table with one row."
            )
    return values
