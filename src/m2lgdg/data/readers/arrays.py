"""Numbers in the file of one scan: text (.1D, .csv, .tsv, .txt), .npy and .mat, each as a table with one row a volume.

Readers load these files through here; NIfTI and CIFTI have `images.py`. Nothing is unpickled, and an error names the first
cell that is not a number.
"""

from __future__ import annotations

import csv
import io
import math
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.data.atlases import roi_names
from m2lgdg.data.readers.matlab import load_variable
from m2lgdg.data.readers.tables import quoted
from m2lgdg.scans import as_float32
from m2lgdg.storage import InputError, read_bytes

Rois = tuple[str, ...]
Series = npt.NDArray[np.float32]  # (time, roi)
BLANK_LINES = re.compile(rb"(?:[ \r]*\n)+")
PLAIN = b"\t\n\r" + bytes(range(32, 127))  # numpy treats some other bytes as white space
MISSING = {"", "n/a", "na", "nan"}  # codes for a missing number in BIDS, pandas and spreadsheets
UNNAMED = "unnamed: 0"  # written by pandas over a row index that it has read and saved again
# Names of a column that counts volumes or has their time, in lower case, alone or before a unit (time_s, time [s])
INDEX_NAME = re.compile(r"(unnamed: 0|index|idx|row|time|timepoint|volume|vol|frame|scan|seconds|sec|tr|t)([\W_].*|\d*)")
WHOLE = re.compile(r"[-+]?\d{1,9}(\.0*)?")  # a whole number, as pandas also writes it
LIKE_A_NUMBER = re.compile(r"[-+]?[\d.,' ]*\d[\d.,' ]*([eE][-+]?\d+)?")  # with marks that Python does not read
LARGEST = 512 << 20  # bytes of a file with the series of one subject
MANY = 10  # values that row or column numbers take and a signal does not
MONOTONE = 50  # volumes over which no signal only rises or only falls
SAID = "or say what it is for a folder of your own"
ONE_AT_A_TIME = threading.Lock()  # numpy parses headers as Python code, which fails now and then in threads of Python 3.11


@lru_cache(maxsize=64)
def numbered_rois(count: int) -> Rois:
    """Names for ROIs without names: 1, 2, 3 ..."""
    return tuple(str(i + 1) for i in range(count))


def named_columns(path: Path, header: list[str] | None, series: Series, atlas: str) -> tuple[Rois, Series]:
    """ROI names and series of a file of a release: codes of an included atlas become the names of its regions."""
    if header is None:
        return numbered_rois(series.shape[1]), series
    if len(header) != series.shape[1]:
        raise InputError(f"{path}: the header names {len(header)} ROIs but the lines have {series.shape[1]} columns.")
    return roi_names(tuple(header), atlas), series


class Said(NamedTuple):
    """What a user says of the files, where numbers leave it open: a header, columns that count volumes, rows that are ROIs."""

    header: bool | None = None
    index_column: Literal["drop", "keep"] | None = None
    transposed: bool = False


GUESSED = Said()


def load_array(path: Path, variable: str | None = None, said: Said = GUESSED) -> tuple[list[str] | None, Series]:
    """Column names (None if the file has none) and numbers of a .npy, .mat or text file; pickled content is refused."""
    if path.suffix == ".mat":
        return _checked(path, None, load_variable(path, variable), said)
    return parse_array(path, read_bytes(path, LARGEST), said)


def parse_array(path: Path, content: bytes, said: Said = GUESSED) -> tuple[list[str] | None, Series]:
    """Column names and numbers from the content of a .npy or text file; `path` serves for its suffix and messages only."""
    if path.suffix == ".npy":
        return _checked(path, None, parse_npy(path, content), said)
    return parse_table(path, content, said)


def load_mat(path: Path, variable: str | None) -> Series:
    """2-D variable of a MATLAB file, by name or the only one."""
    return _checked(path, None, load_variable(path, variable), GUESSED)[1]


def parse_npy(path: Path, content: bytes) -> npt.NDArray[Any]:
    """Array of the content of a .npy file, of any shape and any type but Python objects; it shares the memory of `content`."""
    shape, by_columns, dtype, start = npy_header(path, content, len(content))
    try:
        array = np.frombuffer(content, dtype, math.prod(shape), start)
        return array.reshape(shape, order="F" if by_columns else "C")
    except Exception:  # numbers without bytes, an order that is no truth and the like
        raise InputError(f"{path} is not a readable .npy file.") from None


def npy_header(path: Path, content: bytes, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, order (by columns), type and start of the numbers of a .npy file of `size` bytes that begins with `content`."""
    try:
        width = 2 if content[6:8] == b"\1\0" else 4  # of the length of the header
        start = 8 + width + int.from_bytes(content[8 : 8 + width], "little")
        shape, by_columns, dtype = _npy_header(content[:start])
        needed = math.prod(shape) * dtype.itemsize
    except Exception:  # a damaged header also raises tokenizer, syntax and memory errors in numpy
        raise InputError(f"{path} is not a readable .npy file.") from None
    if dtype.hasobject:
        raise InputError(f"{path} holds Python objects that only pickle could read, which may run code; save numbers.")
    if needed > size - start:  # before any memory is allocated for it
        raise InputError(f"{path} is not a readable .npy file: it is too short for its shape {shape}.")
    return shape, by_columns, dtype, start


@lru_cache(maxsize=64)
def _npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Thousands of files of one cohort have one header, which numpy takes longer to parse than to read their numbers."""
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with ONE_AT_A_TIME:
        shape, by_columns, dtype = header(file)
    if min(shape, default=0) < 0:  # numpy would read -1 as "as many as there are"
        raise ValueError("a negative number of rows")
    return shape, by_columns, dtype


def _checked(path: Path, names: list[str] | None, array: npt.NDArray[Any], said: Said) -> tuple[list[str] | None, Series]:
    """Names and series of a table whose rows are volumes and whose columns are ROIs; others are refused, or left out."""
    if array.dtype.kind not in "fiu":
        raise InputError(f"{path} contains {array.dtype} values, not real numbers.")
    if array.ndim != 2:
        raise InputError(f"{path} has shape {array.shape}, not (time, roi).")
    table = array if array.dtype.kind == "f" else array.astype(np.float64)  # (row, column)
    if said.transposed:
        names, table = None, np.ascontiguousarray(table.T)
    if said.header is None and _names_in_row(table):
        raise InputError(
            f"{path}, row 1 ({', '.join(f'{value:g}' for value in table[0, :3])} ...) looks like numbers or codes of the "
            f"columns, not like a volume; remove it, {SAID} (--header yes or no)."
        )
    if said.header and names is None and len(table):
        names, table = [f"{value:g}" for value in table[0].tolist()], table[1:]
    index = [] if said.index_column == "keep" else _index_columns(table, names)
    if index and said.index_column is None:
        name = f" ({names[index[0]]})" if names is not None and len(names) == table.shape[1] else ""
        raise InputError(
            f"{path}, column {index[0] + 1}{name} is a row index, not an ROI; remove it from the file (pandas: to_csv(..., "
            f"index=False)), {SAID} (--index-column drop or keep)."
        )
    if names is not None and len(names) == table.shape[1]:  # R writes no name over the numbers of rows
        names = [name for column, name in enumerate(names) if column not in index]
    return names, as_float32(np.delete(table, index, axis=1) if index else table)


def _names_in_row(table: npt.NDArray[Any]) -> bool:
    """Whether the first row has numbers or codes of the columns: whole over decimals, rising as no other row, or far away."""
    rows, columns = table.shape
    first, rest = table[0] if rows else table, table[1:]
    if rows < 4 or columns < 4 or not np.isfinite(first).all():
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        steps = np.diff(table, axis=1)
        ordered = np.asarray((steps > 0).all(axis=1) | (steps < 0).all(axis=1), dtype=bool)  # (row,)
        whole = bool((first == np.round(first)).all()) and len(np.unique(first)) == columns
        decimals = (rest != np.round(rest)).mean() > 0.5
        far = np.abs(first - np.median(rest, axis=0)) > 5 * np.ptp(rest, axis=0)
    only_first = ordered[0] and ordered[1:].mean() < 0.5
    if columns >= MANY and (only_first or (whole and decimals)):
        return True
    return bool(whole and ((only_first and decimals) or (rows > MANY and far.all())))


def _index_columns(table: npt.NDArray[Any], names: Sequence[str] | None) -> list[int]:
    """Columns that count volumes or have their time: regular steps, none but rising ones, or such a name."""
    rows, columns = table.shape
    if columns < 2 or rows < 2:
        return []
    with np.errstate(invalid="ignore", over="ignore"):  # some damaged files hold signalling NaN
        steps = np.diff(table, axis=0)
        rising, falling = (steps > 0).mean(axis=0), (steps < 0).mean(axis=0)
        found = (np.maximum(rising, falling) == 1) & (rows >= MONOTONE)
        for column in np.flatnonzero((np.maximum(rising, falling) >= 0.9) & (rows >= MANY)).tolist():
            usual = np.median(steps[:, column])
            # Runs that were joined begin to count again, and times are rounded.
            found[column] |= np.mean(np.abs(steps[:, column] - usual) <= 0.05 * abs(usual)) >= 0.9
    if names is not None and len(names) == columns:
        named = [bool(INDEX_NAME.fullmatch(name.lower())) for name in names]
        found |= np.array(named) & (rising == 1)
        found |= np.array([name.lower() == UNNAMED for name in names])
    return [int(column) for column in np.flatnonzero(found)]


def read_table(path: Path) -> tuple[list[str] | None, Series]:
    """Column names (None without a header) and the (row, column) numbers of a text file."""
    return parse_table(path, read_bytes(path, LARGEST))


def parse_table(path: Path, text: bytes, said: Said = GUESSED) -> tuple[list[str] | None, Series]:
    """Column names and numbers from the content of a text file; `path` serves for its suffix and for messages only.

    The first line is a header if it starts with # or has a cell that is not a number; a line that mixes words and decimals is
    an error. A first line of column numbers (0, 1, 2 ... as pandas writes them) or codes is a header too, see `_numbered`; if
    its numbers are in order, the columns count as unnamed. Cells may be missing, written as NaN, n/a or nothing (between tabs
    or commas only). Any other cell that is not a number, or a row of another length, is an error that names its place.
    """
    if b"\0" in text:
        raise InputError(f"{path} is not a text file.")
    begin, end = line_at(text, 0)
    first = text[begin:end]
    separator = separator_of(path, first)
    cells = cells_of(first, separator)
    words = [column for column, cell in enumerate(cells, start=1) if not is_number(cell)]
    names = None
    if said.header is not False and (first.startswith(b"#") or words):
        odd = [column for column in words if LIKE_A_NUMBER.fullmatch(cells[column - 1])]
        if odd or (not first.startswith(b"#") and any("." in cell and is_number(cell) for cell in cells)):
            column = (odd or words)[0]
            raise _no_number(path, 1 + text.count(b"\n", 0, begin), column, cells[column - 1])
        names = _names(path, cells, separator)
    elif said.header or (said.header is None and _numbered(cells, cells_of(text[slice(*line_at(text, end))], separator))):
        names = [name.partition(".")[0] if WHOLE.fullmatch(name) else name for name in _names(path, cells, separator)]
        names = _column_numbers(names) if all(WHOLE.fullmatch(name) for name in names) else names
    else:
        end = begin
    table = numbers_of(path, text[end:], separator, 1 + text.count(b"\n", 0, end))
    return _checked(path, names, table, said._replace(header=False) if end > begin else said)


def _no_number(path: Path, line: int, column: int, cell: str) -> InputError:
    return InputError(f"{path}, line {line}, column {column}: {quoted(path, cell)} is not a number.")


def line_at(text: bytes, start: int) -> tuple[int, int]:
    """Begin and end of the first line from `start` on that is not blank."""
    blank = BLANK_LINES.match(text, start)
    begin = blank.end() if blank else start
    return begin, text.find(b"\n", begin) + 1 or len(text)


def _numbered(cells: list[str], following: list[str]) -> bool:
    """Whether a line of numbers is a header: whole numbers that differ, over decimals, or the numbers of many columns.

    With fewer than ten columns they must be 0, 1, 2 ... or 1, 2, 3 ... in some order, over decimals.
    """
    unnamed = 1 if len(cells) > 1 and not cells[0] else 0  # pandas leaves the cell over its row index empty
    numbers = [int(cell.partition(".")[0]) for cell in cells[unnamed:] if cell.isascii() and WHOLE.fullmatch(cell)]
    if len(numbers) < max(len(cells) - unnamed, 2) or len(set(numbers)) < len(numbers):
        return False
    decimals = sum(not WHOLE.fullmatch(cell) and cell.lower() not in MISSING for cell in following)
    every = sorted(numbers) in (list(range(len(numbers))), list(range(1, len(numbers) + 1)))
    if len(numbers) < MANY:
        counts = numbers == sorted(numbers) and len(numbers) > 2 if any("." in cell for cell in cells) else every
        return every and counts and decimals > 0
    return decimals > len(following) / 2 or (every and len(following) >= len(numbers))


def _column_numbers(names: list[str]) -> list[str] | None:
    """Column numbers from 1 on, or None if they are in order and so name nothing; codes are left as they are."""
    numbers = [int(name) for name in names]
    first = min(numbers)
    if max(numbers) - first != len(numbers) - 1 or first > 1:
        return names
    return None if numbers == sorted(numbers) else [str(number - first + 1) for number in numbers]


def separator_of(path: Path, line: bytes) -> bytes:
    """What stands between the cells of a text file."""
    if path.suffix == ".tsv":
        return b"\t"
    if path.suffix == ".csv":
        return b"," if b"," in line or b";" not in line else b";"
    return b" "  # any white space


def cells_of(line: bytes, separator: bytes) -> list[str]:
    """Cells of a line, without spaces and quotes around them."""
    text = line.decode("utf-8-sig", errors="replace").strip("\r\n")
    if separator == b" ":
        cells = text.split()
    elif '"' in text:
        try:
            cells = next(csv.reader([text], delimiter=separator.decode(), skipinitialspace=True), [])
        except csv.Error:  # a carriage return within the line, or a cell without end
            cells = text.split(separator.decode())
    else:
        cells = text.split(separator.decode())
    return [cell.strip().strip('"') for cell in cells]


def _names(path: Path, cells: list[str], separator: bytes) -> list[str]:
    """Column names of a header in the form "a b", "#a #b" or, as written by numpy.savetxt, "# a b"."""
    if separator == b" " and cells[0] == "#":
        cells = cells[1:]
    names = [cell.lstrip("#").strip() for cell in cells]
    if "" in names:
        raise InputError(f"{path}, column {names.index('') + 1} has no name in the header; remove it if it is a row index.")
    return names


def is_number(cell: str) -> bool:
    """Whether a cell is a number or a code for a missing one."""
    if cell.lower() in MISSING:
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python reads 17_1 as 171


def numbers_of(path: Path, text: bytes, separator: bytes, first_line: int) -> npt.NDArray[np.float64]:
    """(row, column) numbers of lines, of which the first has this number in the file; a missing cell is NaN."""
    table = _plain_numbers(text, separator)
    if table is None:
        table = _numbers_by_cell(path, text, separator, first_line)
    if table.size == 0:
        raise InputError(f"{path} contains no numbers.")
    return table


def _plain_numbers(text: bytes, separator: bytes) -> npt.NDArray[np.float64] | None:
    """Numbers of a text without missing cells, by numpy's parser; None if it rejects the text."""
    if text.translate(None, PLAIN):
        return None
    if not text.strip(b" \r\n" if separator == b"\t" else None):
        return np.empty((0, 0))
    delimiter = None if separator == b" " else separator.decode()
    try:
        return np.loadtxt(io.BytesIO(text), delimiter=delimiter, comments=None, ndmin=2)
    except ValueError:
        return None


def _numbers_by_cell(path: Path, text: bytes, separator: bytes, first_line: int) -> npt.NDArray[np.float64]:
    """Slow fallback for text that numpy rejects: missing cells become NaN, others raise an error that names them."""
    rows: list[list[float]] = []
    padding = b" \r" if separator == b"\t" else None  # a line of tabs is a row of missing cells, one of spaces is blank
    for number, line in enumerate(text.split(b"\n"), start=first_line):
        if not line.strip(padding):
            continue
        cells = cells_of(line, separator)
        for column, cell in enumerate(cells, start=1):
            if not is_number(cell):
                raise _no_number(path, number, column, cell)
        if rows and len(cells) != len(rows[0]):
            raise InputError(f"{path}, line {number}: {len(cells)} columns, but earlier lines have {len(rows[0])}.")
        rows.append([np.nan if cell.lower() in MISSING else float(cell) for cell in cells])
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(rows[0]) if rows else 0)
