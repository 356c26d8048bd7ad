"""Connectomes in one file: a matrix, a stack of them, or upper triangles as rows; .npy, .npz, .mat, text and .pconn.nii.

Used by the reader of connectomes. A matrix is reduced to its upper triangle at once, and what is wrong with it is kept as a
sentence, so that one bad matrix of a stack concerns one subject.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg import scans
from m2lgdg.data.readers import arrays, images
from m2lgdg.data.readers.arrays import Rois, numbered_rois
from m2lgdg.data.readers.matlab import Variable, load_variable
from m2lgdg.data.readers.tables import ALIASES
from m2lgdg.storage import InputError, read_bytes

TEXT = (".csv", ".tsv", ".txt", ".1D")
SUFFIXES = (".npy", ".npz", ".mat", *TEXT)
IDS = (*ALIASES["subject"], "subjects", "ids", "subject_ids")  # arrays of an archive that name its rows
HEAD = 1 << 16  # bytes in which the header of a .npy file lies
LARGEST_STACK = 64 << 30  # bytes; a stack is mapped, not read
LARGEST_ARCHIVE = 4 << 30  # bytes of an array in a .npz file
CHUNK = 1 << 24  # numbers of a stack that are in memory at once
SOME = 30  # rows of triangles by which their order is judged
NEGATIVE = -1e-3  # eigenvalue of a correlation matrix, relative to the largest, that is more than rounding
ORDERS = {  # MATLAB takes what is below a diagonal by columns
    "upper": "the upper half by rows (numpy's triu_indices, MATLAB's squareform and tril)",
    "lower": "the lower half by rows (nilearn, MATLAB's triu)",
}


class Content(NamedTuple):
    """Numbers of a file with the names of their columns and rows, where it has some."""

    numbers: npt.NDArray[Any]
    columns: list[str] | None = None
    rows: list[str] | None = None


class Matrices(NamedTuple):
    """The connectomes of one file: (matrix, edge) upper triangles, diagonal included, and what each may hold (`scans`).

    `diagonals` are (matrix, roi) as in the file; in the triangles they are 0. `rows` are names of the matrices. By position:
    `defects`, `halves` (the file has one half only) and `absent` (an ROI is NaN throughout). `order` is that of triangles.
    """

    triangles: npt.NDArray[np.float32]
    diagonals: npt.NDArray[np.float32]
    kinds: list[tuple[str, ...]]
    largest: npt.NDArray[np.float32]  # absolute value off the diagonal
    rois: Rois | None = None
    rows: list[str] | None = None
    defects: dict[int, str] = {}
    halves: Sequence[int] = ()
    absent: Sequence[int] = ()
    order: str = ""

    @property
    def n_rois(self) -> int:
        """Number of ROIs."""
        return int(self.diagonals.shape[1])


def load_matrices(path: Path, variable: str | None = None, order: str | None = None, counts: Collection[int] = ()) -> Matrices:
    """Connectomes of a file; `order` (upper or lower) and possible `counts` of ROIs say what rows of triangles leave open."""
    content = load_content(path, variable)
    numbers = content.numbers
    if numbers.dtype.kind not in "fiu":
        raise InputError(f"{path} contains {numbers.dtype} values, not real numbers.")
    if not numbers.size:
        raise InputError(f"{path} contains no numbers (its shape is {numbers.shape}).")
    if numbers.ndim == 2 and numbers.shape[0] == numbers.shape[1]:
        return of_stack(path, numbers[None], _rois(path, content))
    if numbers.ndim == 3:
        return of_stack(path, subjects_first(path, numbers))._replace(rows=content.rows)
    if numbers.ndim in (1, 2) and (widths := _roi_counts(numbers.shape[-1])):
        return _of_rows(path, np.atleast_2d(numbers), widths, content.rows, order, counts)
    hint = "; it may be a series, which kind folder reads" if numbers.ndim == 2 else ""
    raise InputError(
        f"{path} has shape {numbers.shape}, not that of a square matrix, a stack (subject, roi, roi), or upper triangles "
        f"(subject, edge){hint}."
    )


def load_content(path: Path, variable: str | None = None) -> Content:
    """Numbers and names of a file; nothing is unpickled."""
    if path.name.endswith(images.CONNECTOME):
        names, matrix = images.load_connectome(path)
        return Content(matrix, list(names), list(names))
    if path.suffix == ".npy":
        return Content(_load_npy(path))
    if path.suffix == ".npz":
        return _load_npz(path, variable)
    if path.suffix == ".mat":
        return Content(load_variable(path, variable, _is_square))
    return parse_text(path, read_bytes(path, arrays.LARGEST))


def parse_matrix(path: Path, content: bytes) -> tuple[Rois | None, npt.NDArray[Any]]:
    """Names of the ROIs (None without any) and numbers in the content of a file; `path` serves for its suffix and messages.

    Numbers that are no square matrix are returned as they are.
    """
    if path.name.endswith(images.CONNECTOME):
        names, matrix = images.load_connectome(path, content)
        return names, _mended(matrix)[0]
    given = Content(arrays.parse_npy(path, content)) if path.suffix == ".npy" else parse_text(path, content)
    if given.numbers.dtype.kind not in "fiu":
        raise InputError(f"{path} contains {given.numbers.dtype} values, not real numbers.")
    if given.numbers.ndim != 2 or given.numbers.shape[0] != given.numbers.shape[1]:
        return None, given.numbers
    return _rois(path, given), _mended(given.numbers)[0]


def _load_npy(path: Path) -> npt.NDArray[Any]:
    """Array of a file, which is mapped if it is larger than that of one subject."""
    try:
        return arrays.parse_npy(path, read_bytes(path, arrays.LARGEST))
    except InputError:
        size = path.stat().st_size if path.is_file() else 0
        if size <= arrays.LARGEST:
            raise
    if size > LARGEST_STACK:
        raise InputError(f"{path} has {size} bytes, more than the limit of {LARGEST_STACK}.")
    with path.open("rb") as file:
        shape, by_columns, dtype, start = arrays.npy_header(path, file.read(HEAD), size)
    return np.memmap(path, dtype, "r", start, shape, order="F" if by_columns else "C")


def _load_npz(path: Path, variable: str | None) -> Content:
    """Array of an archive, with the ids of its rows if another one has them."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path, LARGEST_ARCHIVE))) as archive:
            sizes = {each.filename.removesuffix(".npy"): each.file_size for each in archive.infolist()}
            if variable is not None and variable not in sizes:
                raise InputError(f"{path} has no variable {variable}.")
            ids = [name for name in sizes if name != variable and name.lower() in IDS]
            others = [name for name in sizes if name not in ids] or list(sizes)
            if variable is None and len(others) != 1:
                listed = ", ".join(others)
                raise InputError(f"{path} has {len(others)} arrays ({listed}); name one in dataset.toml: variable = ...")
            name = variable or others[0]
            for one in (name, *ids):
                if sizes[one] > LARGEST_ARCHIVE:
                    raise InputError(f"{path}: {one} has {sizes[one]} bytes, more than the limit of {LARGEST_ARCHIVE}.")
            named = [archive.read(f"{one}.npy") for one in ids[:1]]  # zipfile reads no more than was declared
            with archive.open(f"{name}.npy") as member:
                content = member.read(sizes[name])
        rows = [arrays.parse_npy(path, one).ravel() for one in named]
        return Content(arrays.parse_npy(path, content), rows=[_text_of(one) for one in rows[0].tolist()] if rows else None)
    except InputError:
        raise
    except Exception as error:  # damaged archives raise errors of any type
        raise InputError(f"{path} is not a readable .npz file ({type(error).__name__}).") from None


def _text_of(one: object) -> str:
    return one.decode(errors="replace") if isinstance(one, bytes) else str(one)


def _is_square(variable: Variable) -> bool:
    shape = variable.shape
    return len(shape) in (2, 3) and shape[0] > 1 and len(set(shape)) < len(shape)


def subjects_first(path: Path, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(subject, roi, roi) of a stack in this order, or with the subjects last, as MATLAB has them."""
    first, middle, last = numbers.shape
    if first == middle and (middle != last or scans.is_connectome(numbers[..., 0]) > scans.is_connectome(numbers[0])):
        return np.moveaxis(numbers, -1, 0)
    if middle == last:
        return numbers
    raise InputError(f"{path} has shape {numbers.shape}, in which no two axes are the ROIs: a stack is (subject, roi, roi).")


# One matrix after the other, or many at once


@cache
def _places(n_rois: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Of a flat (roi * roi) matrix the places of the upper triangle, and of that the places of the diagonal."""
    rows, columns, diagonal = scans.triangle(n_rois)
    return rows * n_rois + columns, np.flatnonzero(diagonal)


def diagonal_places(n_rois: int) -> npt.NDArray[np.intp]:
    """Places of the diagonal in an upper triangle."""
    return _places(n_rois)[1]


def of_stack(path: Path, stack: npt.NDArray[Any], rois: Rois | None = None) -> Matrices:
    """Connectomes of (matrix, roi, roi) numbers."""
    count, n_rois = stack.shape[:2]
    if n_rois < 2:
        raise InputError(f"{path} has shape {stack.shape[1:]}: one ROI has no connections.")
    if rois is None and n_rois > 2 and (numbers := _counting(stack)) is not None:
        raise InputError(f"{path}, {numbers} counts the ROIs (1, 2, 3 ...); remove it from the file.")
    step = max(1, CHUNK // n_rois**2)
    names = rois or numbered_rois(n_rois)
    parts = [_of_chunk(stack[start : start + step], names, start) for start in range(0, count, step)]
    return joined_parts(parts)._replace(rois=rois)


def joined_parts(parts: Sequence[Matrices]) -> Matrices:
    """The parts of one file as one."""
    if len(parts) == 1:
        return parts[0]
    return Matrices(
        triangles=np.concatenate([one.triangles for one in parts]),
        diagonals=np.concatenate([one.diagonals for one in parts]),
        kinds=[kinds for one in parts for kinds in one.kinds],
        largest=np.concatenate([one.largest for one in parts]),
        defects={i: text for one in parts for i, text in one.defects.items()},
        halves=[i for one in parts for i in one.halves],
        absent=[i for one in parts for i in one.absent],
    )


def _counting(stack: npt.NDArray[Any]) -> str | None:
    """The first row or column of a square table where it only counts, as one does that was saved with an index."""
    first = stack[0]  # (row, column)
    for what, line in (("row 1", first[0, 1:]), ("column 1", first[1:, 0])):
        if line[0] in (0, 1) and np.array_equal(line - line[0], np.arange(len(line))):
            return what
    return None


def _of_chunk(chunk: npt.NDArray[Any], rois: Rois, start: int) -> Matrices:
    count, n_rois = chunk.shape[:2]
    if count == 1 and chunk.dtype == np.float32 and (sound := _sound(np.ascontiguousarray(chunk[0]))):
        return sound
    upper, diagonal = _places(n_rois)
    with np.errstate(over="ignore", invalid="ignore"):
        matrices = np.ascontiguousarray(chunk, dtype=np.float32)
    triangles = matrices.reshape(count, n_rois**2).take(upper, axis=1, mode="clip")  # (matrix, edge)
    diagonals = triangles[:, diagonal]  # (matrix, roi)
    triangles[:, diagonal] = 0
    low, high = triangles.min(axis=1), triangles.max(axis=1)  # (matrix,), NaN if a value is
    plain = (matrices == matrices.transpose(0, 2, 1)).all(axis=(1, 2)) & np.isfinite(low) & np.isfinite(high)
    largest = np.maximum(high, -low)
    defects: dict[int, str] = {}
    halves: list[int] = []
    absent: list[int] = []
    for i in np.flatnonzero(~plain).tolist():
        mended, empty, half = _mended(matrices[i])
        diagonals[i] = np.diagonal(mended)
        triangles[i] = largest[i] = 0
        if defect := scans.symmetry_defect(mended, rois):
            defects[start + i] = defect
            continue
        halves += [start + i] * half
        absent += [start + i] * empty
        triangles[i] = scans.packed(mended, scans.FISHER_Z)
        largest[i] = np.abs(triangles[i]).max()
    kinds = _kinds(diagonals, largest)
    return Matrices(triangles, diagonals, kinds, largest, defects=defects, halves=halves, absent=absent)


def _sound(matrix: npt.NDArray[np.float32]) -> Matrices | None:
    """The same for a single matrix that is finite and symmetric, as most files hold: a third of the calls of numpy."""
    n_rois = len(matrix)
    upper, places = _places(n_rois)
    values = matrix.reshape(-1).take(upper, mode="clip")  # (edge,)
    diagonal = values[places]  # (roi,)
    values[places] = 0
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(high - low) or np.isnan(diagonal[0]) or not (matrix == matrix.T).all():
        return None
    largest, first = max(high, -low), float(diagonal[0])
    if first in (0, 1) and (diagonal == first).all():
        kinds = _plain_kinds(first, largest > 1 + scans.OVER_ONE)
    else:
        kinds = scans.kinds_by(diagonal, largest)
    return Matrices(values[None], diagonal[None], [kinds], np.array([largest], dtype=np.float32))


def _mended(matrix: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], bool, bool]:
    """The matrix with zeros for ROIs that are NaN throughout, and completed if one half is empty; whether each was done."""
    gone = np.isnan(matrix).sum(axis=1) >= len(matrix) - 1  # (roi,), the diagonal may be 1
    empty = bool(gone.any() and not gone.all())
    if empty:
        matrix = np.where(gone[:, None] | gone[None, :], np.float32(0), matrix)
    above, below = np.triu(matrix, 1), np.tril(matrix, -1)
    half = bool(above.any() != below.any())
    if half:
        matrix = above + above.T + below + below.T + np.diag(np.diagonal(matrix))
    return matrix, empty, half


def _kinds(diagonals: npt.NDArray[np.float32], largest: npt.NDArray[np.float32]) -> list[tuple[str, ...]]:
    """What each matrix may hold. Most diagonals are all 1 or all 0, which is told at once."""
    low = diagonals[:, 0]  # (matrix,)
    plain = ((diagonals == low[:, None]).all(axis=1) & ((low == 0) | (low == 1))).tolist()
    beyond = (largest > 1 + scans.OVER_ONE).tolist()
    return [
        _plain_kinds(float(low[i]), beyond[i]) if plain[i] else scans.kinds_by(diagonals[i], float(largest[i]))
        for i in range(len(plain))
    ]


@cache
def _plain_kinds(diagonal: float, beyond: bool) -> tuple[str, ...]:
    return scans.kinds_by(np.array([diagonal]), np.inf if beyond else 0.0)


# Upper triangles as rows


def _roi_counts(edges: int) -> dict[int, bool]:
    """Numbers of ROIs whose triangle has so many values, and whether the diagonal is among them."""
    with_diagonal = round((np.sqrt(8.0 * edges + 1) - 1) / 2)
    if with_diagonal * (with_diagonal + 1) // 2 != edges or edges < 3:
        return {}
    return {with_diagonal: True, with_diagonal + 1: False}


def _of_rows(
    path: Path,
    rows: npt.NDArray[Any],
    widths: dict[int, bool],
    names: list[str] | None,
    order: str | None,
    counts: Collection[int],
) -> Matrices:
    """Connectomes of (matrix, edge) triangles.

    As many values are the triangle of n ROIs with its diagonal and of n + 1 without it, and both halves are in use. What is
    not said is told from some of the matrices: correlations in any other order have negative eigenvalues.
    """
    if counts and not set(counts) & set(widths):
        few, many = sorted(widths)
        triangles = f"the triangles of {few} ROIs with the diagonal or {many} without it"
        raise InputError(f"{path} has rows of {rows.shape[1]} values, {triangles}, but {max(counts)} ROIs are named.")
    possible = [(n, way) for n in widths if not counts or n in counts for way in ORDERS if order in (None, way)]
    if len(possible) > 1:
        some = np.asarray(rows[:: max(1, len(rows) // SOME)], dtype=np.float64)
        possible = [one for one in possible if _fits(some, *one, widths[one[0]])] or possible
    if len(possible) == 2 and rows.shape[1] == 3 and possible[0][0] == possible[1][0]:  # both halves have one order
        possible = possible[1:]
    if len(possible) > 1:
        raise InputError(
            f"{path} has rows of {rows.shape[1]} values, and nothing tells whether they are the upper or the lower half of a "
            f"matrix, of {' or '.join(map(str, sorted({n for n, _ in possible})))} ROIs; say it by --triangle upper or lower, "
            "and name the ROIs (--atlas, or --atlas-labels)."
        )
    ((count, way),) = possible
    places = _row_places(count, way, widths[count])
    step = max(1, CHUNK // count**2)
    stacked = (_unfolded(rows[start : start + step], places, count) for start in range(0, len(rows), step))
    parts = [_of_chunk(each, numbered_rois(count), step * i) for i, each in enumerate(stacked)]
    return joined_parts(parts)._replace(rows=names, order=way)


@cache
def _row_places(n_rois: int, way: str, diagonal: bool) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    indices = np.triu_indices if way == "upper" else np.tril_indices
    offset = 0 if diagonal else 1 if way == "upper" else -1
    rows, columns = indices(n_rois, offset)
    return rows, columns


def _unfolded(rows: npt.NDArray[Any], places: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]], n_rois: int) -> Any:
    stack = np.zeros((len(rows), n_rois, n_rois), dtype=rows.dtype if rows.dtype.kind == "f" else np.float64)
    stack[:, places[0], places[1]] = stack[:, places[1], places[0]] = rows
    return stack


def _fits(rows: npt.NDArray[np.float64], n_rois: int, way: str, diagonal: bool) -> bool:
    """Whether rows in this order are positive semidefinite matrices, as correlations and covariances are."""
    with np.errstate(invalid="ignore"):
        usable = rows[np.isfinite(rows).all(axis=1)]
    if not len(usable):
        return False
    stack = _unfolded(usable, _row_places(n_rois, way, diagonal), n_rois)  # (matrix, roi, roi)
    eye = np.eye(n_rois, dtype=bool)
    own = stack[:, eye]  # (matrix, roi)
    if diagonal and not (own == own[0, 0]).all() and not (own > 0).all():
        return False
    if diagonal and (own > 0).all() and not (own == own[0, 0]).all():  # variances
        spread = np.sqrt(own)
        stack = stack / (spread[:, :, None] * spread[:, None, :])
    elif np.abs(stack[:, ~eye]).max() > 1:
        stack = np.tanh(stack)
    values = np.linalg.eigvalsh(np.where(eye, 1.0, stack))  # (matrix, roi), rising
    return bool((values[:, 0] >= NEGATIVE * values[:, -1]).mean() > 0.5)  # most, since single ones may be damaged


# Text


def parse_text(path: Path, text: bytes) -> Content:
    """Numbers of a text file, with a header and a first column of names or without."""
    if b"\0" in text:
        raise InputError(f"{path} is not a text file.")
    begin, end = arrays.line_at(text, 0)
    first = text[begin:end]
    if not first.strip():
        raise InputError(f"{path} is empty.")
    separator = arrays.separator_of(path, first)
    columns = _header(first, separator)
    start = begin if columns is None else end
    body, rows = text[start:], None
    cells = arrays.cells_of(text[slice(*arrays.line_at(text, start))], separator)
    over_names = columns is not None and columns[0].lower() in ("", arrays.UNNAMED, *ALIASES["subject"])
    if over_names or (cells and not arrays.is_number(cells[0])):
        rows, body = _without_names(body, separator)
    numbers = arrays.numbers_of(path, body, separator, 1 + text.count(b"\n", 0, start))
    if rows is not None and len(rows) != len(numbers):
        raise InputError(f"{path}: {len(rows)} lines have a name, but only {len(numbers)} of them have numbers.")
    if columns is None and rows is None:
        return _without_column_numbers(numbers)
    if columns is not None and rows is not None and len(columns) == numbers.shape[1] + 1:
        columns = columns[1:]
    if columns is not None and len(columns) != numbers.shape[1]:
        raise InputError(f"{path}: the header names {len(columns)} columns but the lines have {numbers.shape[1]}.")
    return Content(numbers, columns, rows)


def _header(line: bytes, separator: bytes) -> list[str] | None:
    """Cells of the first line if it is a header; one that is a name before numbers is a row of the matrix."""
    cells = arrays.cells_of(line, separator)
    words = [not arrays.is_number(cell) for cell in cells]
    marked = line.startswith(b"#")
    if not marked and not any(words[1:]) and not (len(cells) > 1 and not cells[0]):
        return None
    return [cell.lstrip("#").strip() for cell in (cells[1:] if cells[0] == "#" and len(cells) > 1 else cells)]


def _without_column_numbers(numbers: npt.NDArray[np.float64]) -> Content:
    """A square table below a row of column numbers, as pandas writes them."""
    if len(numbers) == numbers.shape[1] + 1:
        first = [f"{value:g}" for value in numbers[0].tolist()]
        if all(re.fullmatch(r"\d+", name) for name in first) and len(set(first)) == len(first):
            return Content(numbers[1:], first)
    return Content(numbers)


def _without_names(body: bytes, separator: bytes) -> tuple[list[str], bytes]:
    """The first cell of each line, and the rest of the lines."""
    names, lines = [], []
    for line in body.split(b"\n"):
        if not line.strip():
            lines.append(line)  # so that the number of a line stays
            continue
        bare = line.lstrip() if separator == b" " else line
        if bare.startswith(b'"') and (close := bare.find(b'"', 1)) > 0:
            name, rest = bare[1:close], bare[close + 1 :].partition(separator)[2]
        elif separator == b" ":
            name, _, rest = bare.replace(b"\t", b" ").partition(b" ")
        else:
            name, _, rest = bare.partition(separator)
        names.append(name.decode("utf-8-sig", errors="replace").strip())
        lines.append(rest)
    return names, b"\n".join(lines)


def _rois(path: Path, content: Content) -> Rois | None:
    """Names of the ROIs of a square table; numbers in order are no names."""
    columns, rows = content.columns, content.rows
    names = columns or rows
    if names is None:
        return None
    if columns and rows and columns != rows:
        position = next(i for i, (one, other) in enumerate(zip(columns, rows, strict=True)) if one != other)
        raise InputError(
            f"{path}: row {position + 1} is {rows[position][:40]!r}, but column {position + 1} {columns[position][:40]!r}; "
            "rows and columns of a connectome are the same ROIs in one order."
        )
    if "" in names:
        raise InputError(f"{path}, column {names.index('') + 1} has no name in the header.")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"{path}: ROI {twice} is named twice.")
    numbers = [str(i) for i in range(len(names))]
    return None if names in (numbers, list(numbered_rois(len(names)))) else tuple(names)
