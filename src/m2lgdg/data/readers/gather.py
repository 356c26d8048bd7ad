"""Parallel reading of the series files of a release, with all series in one ROI order.

Every reader lists subjects and files and calls `gather`, which reads and checks each series and records what it excludes.
Columns that are named are matched by name, columns without names by position.
"""

from __future__ import annotations

import io
import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import series_defect
from m2lgdg.data.readers.text import LARGEST, need_no_index, parse_table
from m2lgdg.findings import UNUSABLE_FILE, Exclusion
from m2lgdg.storage import InputError, read_bytes

Rois = tuple[str, ...]
Series = npt.NDArray[np.float32]
Load = Callable[[Path], tuple[Rois, Series]]
Progress = Callable[[int, int], None]
Rename = Callable[[Counter[Rois]], Mapping[Rois, Rois]]
OnBad = Literal["stop", "exclude"]


JOINED = "runs joined: each run of every subject was z-scored per ROI, then put one after the other"
TRANSPOSE = 'transpose the files, or write orientation = "roi,time" into dataset.toml if all are so'
LARGEST_VARIABLE = 512 << 20  # bytes of a variable of a .mat file
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
ONE_AT_A_TIME = threading.Lock()  # numpy parses headers as Python code, which fails now and then in threads of Python 3.11
NUMBERS = ("double", "single", "logical", *INTEGERS)  # classes of MATLAB


class SeriesFile(NamedTuple):
    """A subject, its site and the file with its series."""

    subject: str
    site: str
    path: Path


class Gathered(NamedTuple):
    """The valid subjects with their series in one ROI order, and the excluded ones."""

    files: list[SeriesFile]
    series: list[Series]
    rois: Rois
    excluded: list[Exclusion]


def gather(
    files: Sequence[SeriesFile],
    load: Load,
    table: Path,
    *,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
    rename: Rename | None = None,
) -> Gathered:
    """Read all files in parallel, sorted by subject; an invalid one raises an error, or is excluded with its reason.

    `table` is the file that lists the subjects, for the message if none of them has a series. `rename` maps the column names
    of the files to those of the ROIs, given those of all files with their number of occurrences; names that it leaves out
    stay as they are.
    """
    if on_bad not in ("stop", "exclude"):
        raise InputError(f"on_bad must be 'stop' or 'exclude', not {on_bad!r}.")
    if not files:
        raise InputError(f"{table}: no listed subject has a series file.")
    files = sorted(files)
    loaded: list[tuple[Rois, Series] | InputError] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, result in enumerate(pool.map(lambda each: _try(load, each), files), start=1):
            if isinstance(result, InputError) and on_bad == "stop":
                pool.shutdown(cancel_futures=True)
                raise result
            loaded.append(result)
            if progress:
                progress(done, len(files))
    if rename is not None:
        names = rename(Counter(one[0] for one in loaded if not isinstance(one, InputError)))
        loaded = [one if isinstance(one, InputError) else (names.get(one[0], one[0]), one[1]) for one in loaded]
    return _one_order(files, loaded, on_bad)


def need_listed(present: Mapping[str, Path], listed: Iterable[str], table: Path) -> None:
    """Refuse a table that lists none of the subjects with a series file, most likely the table of other data."""
    names = list(listed)
    if present and not set(present) & set(names):
        example = f"such as {min(present)} ({present[min(present)].name})"
        raise InputError(
            f"{table} lists none of the {len(present)} subjects who have a series, {example}; its first subject is {names[0]}."
            if names
            else f"{table} lists no subject."
        )


def _try(load: Load, each: SeriesFile) -> tuple[Rois, Series] | InputError:
    try:
        rois, series = load(each.path)
        defect = series_defect(series, rois)
        return InputError(f"{each.path}: subject {each.subject}: {defect}.") if defect else (rois, series)
    except InputError as error:
        return error


def _one_order(files: Sequence[SeriesFile], loaded: Sequence[tuple[Rois, Series] | InputError], on_bad: OnBad) -> Gathered:
    orders = Counter(one[0] for one in loaded if not isinstance(one, InputError))
    if not orders:
        raise next(one for one in loaded if isinstance(one, InputError))
    rois = orders.most_common(1)[0][0]
    result = Gathered([], [], rois, [])
    shapes = {one[1].shape for one in loaded if not isinstance(one, InputError)}
    # Subjects differ in their number of volumes, never in that of ROIs.
    swapped = len({rows for rows, _ in shapes}) == 1 < len({columns for _, columns in shapes})
    for each, one in zip(files, loaded, strict=True):
        ordered = one if isinstance(one, InputError) else _reordered(each, *one, rois, swapped)
        if isinstance(ordered, InputError):
            if on_bad == "stop":
                raise ordered
            reason = str(ordered).replace(f"{each.path.parent}{os.sep}", "")  # cohorts are shared, folder names must not be
            result.excluded.append(Exclusion(each.subject, each.site, UNUSABLE_FILE, detail=reason))
        else:
            ordered.flags.writeable = False  # so that the cohort takes it without a copy
            result.files.append(each)
            result.series.append(ordered)
    return result


def _reordered(each: SeriesFile, columns: Rois, series: Series, rois: Rois, swapped: bool) -> Series | InputError:
    """The series with its columns in the ROI order of the other subjects, matched by name."""
    if columns == rois:
        return series
    where = f"{each.path}: subject {each.subject}"
    if len(columns) != len(rois):
        hint = _hint(columns, rois, len(series), swapped)
        return InputError(f"{where}: {len(columns)} ROI columns, but the other subjects have {len(rois)}{hint}.")
    position = {name: i for i, name in enumerate(columns)}
    absent = next((name for name in rois if name not in position), None)
    if absent is not None:
        return InputError(f"{where}: no column for ROI {absent}, which the other subjects have.")
    return np.ascontiguousarray(series[:, [position[name] for name in rois]])


def _hint(columns: Rois, rois: Rois, rows: int, swapped: bool) -> str:
    """The likely reason for another number of columns than that of the other subjects."""
    if rows == len(rois):
        return f"; its rows are as many as these, so its time and ROI axes seem to be swapped ({TRANSPOSE})"
    if columns != numbered_rois(len(columns)) and set(columns) & set(rois):  # names of a header: not swapped
        absent = [name for name in rois if name not in columns]
        further = [name for name in columns if name not in rois]
        return f"; it has no column {_first(absent)}" if absent else f"; only this one has {_first(further)}"
    if swapped and rows > 1:
        either = "either this file has other ROIs, or the time and ROI axes are swapped in all"
        return f"; all files have {rows} rows and the columns differ, so {either} ({TRANSPOSE})"
    return ""


def _first(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def joined(runs: Sequence[Path], load: Load) -> tuple[Rois, Series]:
    """The runs of a subject one after the other, each with mean 0 and standard deviation 1 per ROI; a flat ROI stays 0.

    Without z-scoring, the different means and scales of the runs would be steps of the signal, which correlate all ROIs.
    """
    first: Rois = ()
    parts = []
    for run in runs:
        rois, series = load(run)
        defect = series_defect(series, rois)
        if defect:
            raise InputError(f"{run}: {defect}.")
        first = first or rois
        if set(rois) != set(first):
            raise InputError(f"{run}: its ROIs are not those of {runs[0].name}, so the runs cannot be joined.")
        position = {name: i for i, name in enumerate(rois)}
        wide = series[:, [position[name] for name in first]].astype(np.float64)
        spread = wide.std(axis=0)
        flat = np.ptp(wide, axis=0) == 0
        parts.append(np.where(flat, 0, (wide - wide.mean(axis=0)) / np.where(flat, 1, spread)))
    return first, np.concatenate(parts).astype(np.float32)


def need_regular(path: Path, most: int) -> None:
    """Refuse a device, a pipe or a file above `most` bytes, for libraries that open a file themselves."""
    try:
        status = path.stat()
    except OSError:
        return  # the library tells why it cannot open the file
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise InputError(f"cannot read {path}: it is not a regular file.")
    if status.st_size > most:
        raise InputError(f"{path} has {status.st_size} bytes, more than the limit of {most}.")


def numbered_rois(count: int) -> Rois:
    """Names for ROIs without names: 1, 2, 3 ..."""
    return tuple(str(i + 1) for i in range(count))


def load_array(path: Path, variable: str | None = None) -> tuple[list[str] | None, npt.NDArray[Any]]:
    """Column names (None if the file has none) and numbers of a .npy, .mat or text file; pickled content is refused."""
    if path.suffix == ".mat":
        return None, load_mat(path, variable)
    return parse_array(path, read_bytes(path, LARGEST))


def parse_array(path: Path, content: bytes) -> tuple[list[str] | None, npt.NDArray[Any]]:
    """Column names and numbers from the content of a .npy or text file; `path` serves for its suffix and messages only."""
    return (None, _parse_npy(path, content)) if path.suffix == ".npy" else parse_table(path, content)


def _parse_npy(path: Path, content: bytes) -> npt.NDArray[Any]:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with ONE_AT_A_TIME:
            shape, by_columns, dtype = header(file)
        if min(shape, default=0) < 0:  # numpy would read -1 as "as many as there are"
            raise InputError(f"{path} is not a readable .npy file.")
        if dtype.hasobject:
            raise InputError(f"{path} holds Python objects that only pickle could read, which may run code; save numbers.")
        if math.prod(shape) * dtype.itemsize > len(content) - file.tell():  # before any memory is allocated for it
            raise InputError(f"{path} is not a readable .npy file: it is too short for its shape {shape}.")
        array = np.frombuffer(content, dtype, math.prod(shape), file.tell()).reshape(shape, order="F" if by_columns else "C")
    except InputError:
        raise
    except Exception:  # a damaged header also raises tokenizer, syntax and memory errors in numpy
        raise InputError(f"{path} is not a readable .npy file.") from None
    return _as_table(array, path)


def load_mat(path: Path, variable: str | None) -> npt.NDArray[Any]:
    """2-D variable of a MATLAB file, by name or the only one."""
    from scipy.io import loadmat, whosmat

    content = io.BytesIO(read_bytes(path, LARGEST))
    try:
        name = _variable(path, whosmat(content), variable)
        content.seek(0)
        array = np.asarray(loadmat(content, variable_names=[name])[name])
    except InputError:
        raise
    except NotImplementedError:
        raise InputError(f"{path} is a MATLAB 7.3 file; save it with -v7 instead.") from None
    except Exception as error:  # damaged files raise errors of any type in scipy and zlib
        raise InputError(f"{path} is not a readable MATLAB file ({type(error).__name__}).") from None
    return _as_table(array, path)


def _variable(path: Path, variables: Sequence[tuple[str, tuple[int, ...], str]], wanted: str | None) -> str:
    """Name of the variable to read, checked before memory is allocated for it."""
    known = {name: (shape, kind) for name, shape, kind in variables if not name.startswith("__")}
    if wanted is not None and wanted not in known:
        raise InputError(f"{path} has no variable {wanted}.")
    if wanted is None and len(known) != 1:
        raise InputError(f"{path} has {len(known)} variables ({', '.join(known)}); name one in dataset.toml: variable = ...")
    name = wanted or next(iter(known))
    shape, kind = known[name]
    if kind == "unknown":
        raise ValueError("no class of MATLAB has this number")
    if kind not in NUMBERS:
        raise InputError(f"{path}: variable {name} contains {kind} values, not real numbers.")
    size = 8 * math.prod(shape)
    if size > LARGEST_VARIABLE:
        raise InputError(f"{path}: variable {name} would take {size} bytes, more than the limit of {LARGEST_VARIABLE}.")
    return name


def _as_table(array: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
    if array.dtype.kind not in "fiu":
        raise InputError(f"{path} contains {array.dtype} values, not real numbers.")
    if array.ndim != 2:
        raise InputError(f"{path} has shape {array.shape}, not (time, roi).")
    with np.errstate(over="ignore"):
        table = np.ascontiguousarray(array, dtype=np.float32)
    need_no_index(path, table)
    return table
