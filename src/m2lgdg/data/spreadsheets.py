"""CSV text in which no cell is a formula: names that a spreadsheet would run get an apostrophe, and our readers remove it.

Every CSV file of the package is written by `csv_text` or `csv_rows`. Tables that the package reads again go through `unquoted`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

# A spreadsheet starts a formula at these characters; the last four are full-width forms that some locales accept.
FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
QUOTED = re.compile(r"''*[=+\-@\t\r\n＝＋－＠]")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)|-")  # a dash is our mark of a missing number


def quoted(cell: Any) -> Any:
    """A cell that is safe in a spreadsheet: text that would be a formula gets an apostrophe; numbers stay as they are."""
    if not isinstance(cell, str) or not FORMULA.match(cell) or NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


def unquoted(cell: Any) -> Any:
    """The cell that `quoted` was given; all other cells unchanged."""
    return cell[1:] if isinstance(cell, str) and QUOTED.match(cell) else cell


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV without its index, every text cell and column name safe in a spreadsheet."""
    safe = table.rename(columns=quoted)
    for i, kind in enumerate(safe.dtypes):
        if not pd.api.types.is_numeric_dtype(kind):
            safe.isetitem(i, safe.iloc[:, i].map(quoted))
    return str(safe.to_csv(index=False, lineterminator="\n"))


def csv_rows(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as CSV, every cell safe in a spreadsheet."""
    sheet = io.StringIO()
    csv.writer(sheet, lineterminator="\n").writerows([[quoted(cell) for cell in row] for row in rows])
    return sheet.getvalue()


def unquoted_table(table: pd.DataFrame) -> pd.DataFrame:
    """A table read from CSV, with the names that `csv_text` was given."""
    read = table.rename(columns=unquoted)
    for i, kind in enumerate(read.dtypes):
        column = read.iloc[:, i]
        # Most columns of text have no apostrophe, and need not be mapped.
        plain = isinstance(kind, pd.StringDtype) and not column.str.startswith("'").any()
        if not (plain or pd.api.types.is_numeric_dtype(kind)):
            read.isetitem(i, column.map(unquoted))
    return read
