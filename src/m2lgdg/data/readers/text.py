"""Fast parser of numeric text files (.1D, .csv, .tsv, .txt) that names the first cell that is not a number.

Used by every reader of text files. A small C function (`_numbers.c`) parses in parallel if it was compiled at installation;
otherwise numpy does, with the same result.
"""

from __future__ import annotations

import ctypes
import io
import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2lgdg.storage import InputError

BLANK_LINES = re.compile(rb"(?:[ \r]*\n)+")
NO_NUMBER = re.compile(rb"[^\t\n\r -~]")  # numpy treats some of these as white space
MISSING = {"", "n/a", "na", "nan"}  # codes for a missing number in BIDS, pandas and spreadsheets


@cache
def compiled() -> ctypes.CDLL | None:
    """The compiled parser, or None if there was no C compiler at installation."""
    path = Path(__file__).with_name("_numbers.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    library.read_numbers.restype = ctypes.c_long
    library.read_numbers.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char,
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.POINTER(ctypes.c_long),
    ]
    return library


def read_table(path: Path) -> tuple[list[str] | None, npt.NDArray[np.float32]]:
    """Column names (None without a header) and the (row, column) numbers of a text file."""
    try:
        return parse_table(path, path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None


def parse_table(path: Path, text: bytes) -> tuple[list[str] | None, npt.NDArray[np.float32]]:
    """Column names and numbers from the content of a text file; `path` serves for its suffix and for messages only.

    The first line is a header if it starts with # or has a cell that is not a number; a line that mixes words and decimals is
    an error. Cells may be missing, written as NaN, n/a or nothing (between tabs or commas only). Any other cell that is not a
    number, or a row of another length, is an error that names its place.
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
        return _names(path, cells, separator), _numbers(path, text, end, separator)
    return None, _numbers(path, text, begin, separator)


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
    table = _compiled_numbers(text, start, separator) if compiled() else _numpy_numbers(text[start:], separator)
    if table is None:
        table = _numbers_by_cell(path, text[start:], separator, first_line=1 + text.count(b"\n", 0, start))
    if table.size == 0:
        raise InputError(f"{path} contains no numbers.")
    return table


def _compiled_numbers(text: bytes, start: int, separator: bytes) -> npt.NDArray[np.float32] | None:
    library = compiled()
    assert library is not None
    if start == len(text):
        return np.empty((0, 0), dtype=np.float32)
    address = np.frombuffer(text, dtype=np.uint8).ctypes.data + start  # bytes objects end in a NUL byte, which stops the parser
    out = np.empty((len(text) - start) // 2 + 1, dtype=np.float32)  # a number and its separator take two characters at least
    columns = ctypes.c_long()
    count = library.read_numbers(address, separator, out.ctypes.data, len(out), ctypes.byref(columns))
    if count < 0:
        return None
    out.resize(count, refcheck=False)  # frees the unused end without a copy
    return out.reshape(-1, max(columns.value, 1))


def _numpy_numbers(text: bytes, separator: bytes) -> npt.NDArray[np.float32] | None:
    if NO_NUMBER.search(text):
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
