"""Parser of numeric text files (.1D, .csv, .tsv, .txt) that names the first cell that is not a number.

Used by every reader of text files. numpy parses plain tables; one with missing or odd cells is parsed cell by cell.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.storage import InputError, read_bytes

BLANK_LINES = re.compile(rb"(?:[ \r]*\n)+")
PLAIN = b"\t\n\r" + bytes(range(32, 127))  # numpy treats some other bytes as white space
MISSING = {"", "n/a", "na", "nan"}  # codes for a missing number in BIDS, pandas and spreadsheets
UNNAMED = "unnamed: 0"  # written by pandas over a row index that it has read and saved again
INDEX_NAMES = (UNNAMED, "index", "time", "volume", "frame")  # of a column that counts volumes, in lower case
LARGEST = 512 << 20  # bytes of a file with the series of one subject
MANY = 10  # values that row or column numbers take and a signal does not


def read_table(path: Path) -> tuple[list[str] | None, npt.NDArray[np.float32]]:
    """Column names (None without a header) and the (row, column) numbers of a text file."""
    return parse_table(path, read_bytes(path, LARGEST))


def parse_table(path: Path, text: bytes) -> tuple[list[str] | None, npt.NDArray[np.float32]]:
    """Column names and numbers from the content of a text file; `path` serves for its suffix and for messages only.

    The first line is a header if it starts with # or has a cell that is not a number; a line that mixes words and decimals is
    an error. A first line of column numbers (0, 1, 2 ... as pandas writes them) or codes is a header too, see `_numbered`; if
    its numbers are in order, the columns count as unnamed. A first column that is a row index is an error. Cells may be
    missing, written as NaN, n/a or nothing (between tabs or commas only). Any other cell that is not a number, or a row of
    another length, is an error that names its place.
    """
    if b"\0" in text:
        raise InputError(f"{path} is not a text file.")
    blank = BLANK_LINES.match(text)
    begin = blank.end() if blank else 0
    end = text.find(b"\n", begin) + 1 or len(text)
    first = text[begin:end]
    separator = _separator(path, first)
    cells = _cells(first, separator)
    words = [column for column, cell in enumerate(cells, start=1) if not _is_number(cell)]
    if first.startswith(b"#") or words:
        if not first.startswith(b"#") and any("." in cell and _is_number(cell) for cell in cells):
            line = 1 + text.count(b"\n", 0, begin)
            raise InputError(f"{path}, line {line}, column {words[0]}: {cells[words[0] - 1][:40]!r} is not a number.")
        names: list[str] | None = _names(path, cells, separator)
    elif _numbered(cells, _cells(_line(text, end), separator)):
        names = _column_numbers(_names(path, cells, separator))
    else:
        names, end = None, begin
    table = _numbers(path, text, end, separator)
    need_no_index(path, table, names)
    return names, table


def need_no_index(path: Path, table: npt.NDArray[Any], names: Sequence[str] | None = None) -> None:
    """Refuse a table whose first column is a row index, which would be taken for an ROI."""
    rows, columns = table.shape
    title = names[0].lower() if names is not None else ""
    if columns < 2 or rows < 2 or (rows < MANY and title not in INDEX_NAMES):
        return
    steps = np.diff(table[:, 0].astype(np.float64))
    regular = np.allclose(steps, steps[0], rtol=1e-3) and steps[0] > 0
    if (regular and (title in INDEX_NAMES or (steps[0] == 1 and table[0, 0] in (0, 1)))) or title == UNNAMED:
        name = f" ({names[0]})" if names is not None else ""
        raise InputError(
            f"{path}, column 1{name} is a row index, not an ROI; remove it from the file (pandas: to_csv(..., index=False))."
        )


def _line(text: bytes, start: int) -> bytes:
    """The first line from byte `start` on that is not blank, without its end."""
    blank = BLANK_LINES.match(text, start)
    start = blank.end() if blank else start
    end = text.find(b"\n", start)
    return text[start:] if end < 0 else text[start:end]


def _numbered(cells: list[str], following: list[str]) -> bool:
    """Whether a line of numbers is a header: whole numbers that differ, over decimals, or the numbers of many columns.

    With fewer than ten columns they must be 0, 1, 2 ... or 1, 2, 3 ... in some order, over decimals.
    """
    unnamed = 1 if len(cells) > 1 and not cells[0] else 0  # pandas leaves the cell over its row index empty
    numbers = [int(cell) for cell in cells[unnamed:] if cell.isascii() and cell.isdigit() and len(cell) < 10]
    if len(numbers) < max(len(cells) - unnamed, 2) or len(set(numbers)) < len(numbers):
        return False
    decimals = sum(not cell.lstrip("+-").isdigit() and cell.lower() not in MISSING for cell in following)
    every = sorted(numbers) in (list(range(len(numbers))), list(range(1, len(numbers) + 1)))
    if len(numbers) < MANY:
        return every and decimals > 0
    return decimals > len(following) / 2 or (every and len(following) >= len(numbers))


def _column_numbers(names: list[str]) -> list[str] | None:
    """Column numbers from 1 on, or None if they are in order and so name nothing; codes are left as they are."""
    numbers = [int(name) for name in names]
    first = min(numbers)
    if max(numbers) - first != len(numbers) - 1 or first > 1:
        return names
    ordered = numbers == sorted(numbers)
    return None if ordered else [str(number - first + 1) for number in numbers]


def _separator(path: Path, line: bytes) -> bytes:
    if path.suffix == ".tsv":
        return b"\t"
    if path.suffix == ".csv":
        return b"," if b"," in line or b";" not in line else b";"
    return b" "  # any white space


def _cells(line: bytes, separator: bytes) -> list[str]:
    text = line.decode("utf-8-sig", errors="replace").strip("\r\n")
    cells = text.split() if separator == b" " else text.split(separator.decode())
    return [cell.strip().strip('"') for cell in cells]


def _names(path: Path, cells: list[str], separator: bytes) -> list[str]:
    """Column names of a header in the form "a b", "#a #b" or, as written by numpy.savetxt, "# a b"."""
    if separator == b" " and cells[0] == "#":
        cells = cells[1:]
    names = [cell.lstrip("#").strip() for cell in cells]
    if "" in names:
        raise InputError(f"{path}, column {names.index('') + 1} has no name in the header; remove it if it is a row index.")
    return names


def _is_number(cell: str) -> bool:
    if cell.lower() in MISSING:
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python reads 17_1 as 171


def _numbers(path: Path, text: bytes, start: int, separator: bytes) -> npt.NDArray[np.float32]:
    """Numbers of a text from byte `start` on (after blank lines and the header)."""
    table = _plain_numbers(text[start:], separator)
    if table is None:
        table = _numbers_by_cell(path, text[start:], separator, first_line=1 + text.count(b"\n", 0, start))
    if table.size == 0:
        raise InputError(f"{path} contains no numbers.")
    return table


def _plain_numbers(text: bytes, separator: bytes) -> npt.NDArray[np.float32] | None:
    """Numbers of a text without missing cells, by numpy's parser; None if it rejects the text."""
    if text.translate(None, PLAIN):
        return None
    if not text.strip(b" \r\n" if separator == b"\t" else None):
        return np.empty((0, 0), dtype=np.float32)
    delimiter = None if separator == b" " else separator.decode()
    try:
        table = np.loadtxt(io.BytesIO(text), delimiter=delimiter, comments=None, ndmin=2)
    except ValueError:
        return None
    with np.errstate(over="ignore"):
        return table.astype(np.float32)


def _numbers_by_cell(path: Path, text: bytes, separator: bytes, first_line: int) -> npt.NDArray[np.float32]:
    """Slow fallback for text that the fast parser rejects: missing cells become NaN, others raise an error that names them."""
    rows: list[list[float]] = []
    padding = b" \r" if separator == b"\t" else None  # a line of tabs is a row of missing cells, one of spaces is blank
    for number, line in enumerate(text.split(b"\n"), start=first_line):
        if not line.strip(padding):
            continue
        cells = _cells(line, separator)
        for column, cell in enumerate(cells, start=1):
            if not _is_number(cell):
                raise InputError(f"{path}, line {number}, column {column}: {cell[:40]!r} is not a number.")
        if rows and len(cells) != len(rows[0]):
            raise InputError(f"{path}, line {number}: {len(cells)} columns, but earlier lines have {len(rows[0])}.")
        rows.append([np.nan if cell.lower() in MISSING else float(cell) for cell in cells])
    with np.errstate(over="ignore"):
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(rows[0]) if rows else 0).astype(np.float32)
