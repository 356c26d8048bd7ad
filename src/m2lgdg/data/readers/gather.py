"""Parallel reading of the series files of a release, with all series in one ROI order.

Every reader lists subjects and files and calls `gather`, which reads and checks each series and records what it excludes.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Exclusion, series_defect
from m2lgdg.storage import InputError

Rois = tuple[str, ...]
Series = npt.NDArray[np.float32]
Load = Callable[[Path], tuple[Rois, Series]]
Progress = Callable[[int, int], None]
OnBad = Literal["stop", "exclude"]


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
    files: Sequence[SeriesFile], load: Load, table: Path, *, on_bad: OnBad = "stop", progress: Progress | None = None
) -> Gathered:
    """Read all files in parallel, sorted by subject; an invalid one raises an error, or is excluded with its reason.

    `table` is the file that lists the subjects, for the message if none of them has a series.
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
    return _one_order(files, loaded, on_bad)


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
    for each, one in zip(files, loaded, strict=True):
        ordered = one if isinstance(one, InputError) else _reordered(each, *one, rois)
        if isinstance(ordered, InputError):
            if on_bad == "stop":
                raise ordered
            reason = str(ordered).replace(f"{each.path.parent}{os.sep}", "")  # cohorts are shared, folder names must not be
            result.excluded.append(Exclusion(each.subject, each.site, reason))
        else:
            ordered.flags.writeable = False  # so that the cohort takes it without a copy
            result.files.append(each)
            result.series.append(ordered)
    return result


def _reordered(each: SeriesFile, columns: Rois, series: Series, rois: Rois) -> Series | InputError:
    """The series with its columns in the ROI order of the other subjects, matched by name."""
    if columns == rois:
        return series
    where = f"{each.path}: subject {each.subject}"
    if len(columns) != len(rois):
        return InputError(f"{where}: {len(columns)} ROI columns, but the other subjects have {len(rois)}.")
    position = {name: i for i, name in enumerate(columns)}
    absent = next((name for name in rois if name not in position), None)
    if absent is not None:
        return InputError(f"{where}: no column for ROI {absent}, which the other subjects have.")
    return np.ascontiguousarray(series[:, [position[name] for name in rois]])


def numbered_rois(count: int) -> Rois:
    """Names for ROIs without names: 1, 2, 3 ..."""
    return tuple(str(i + 1) for i in range(count))


def load_array(path: Path, variable: str | None = None) -> tuple[list[str] | None, npt.NDArray[Any]]:
    """Column names (None if the file has none) and numbers of a .npy, .mat or text file; pickled content is refused."""
    if path.suffix == ".mat":
        return None, load_mat(path, variable)
    try:
        return parse_array(path, path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from None


def parse_array(path: Path, content: bytes) -> tuple[list[str] | None, npt.NDArray[Any]]:
    """Column names and numbers from the content of a .npy or text file; `path` serves for its suffix and messages only."""
    from m2lgdg.data.readers.text import parse_table

    return (None, _parse_npy(path, content)) if path.suffix == ".npy" else parse_table(path, content)


def _parse_npy(path: Path, content: bytes) -> npt.NDArray[Any]:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        if dtype.hasobject:
            raise InputError(f"{path} holds Python objects that only pickle could read, which may run code; save numbers.")
        if math.prod(shape) * dtype.itemsize > len(content) - file.tell():  # before any memory is allocated for it
            raise InputError(f"{path} is not a readable .npy file: it is too short for its shape {shape}.")
        file.seek(0)
        array = np.lib.format.read_array(file, allow_pickle=False)  # np.load would open zip archives too
    except InputError:
        raise
    except Exception:  # a damaged header also raises tokenizer, syntax and memory errors in numpy
        raise InputError(f"{path} is not a readable .npy file.") from None
    return _as_table(array, path)


def load_mat(path: Path, variable: str | None) -> npt.NDArray[Any]:
    """2-D variable of a MATLAB file, by name or the only one."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=None if variable is None else [variable])
    except NotImplementedError:
        raise InputError(f"{path} is a MATLAB 7.3 file; save it with -v7 instead.") from None
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except Exception as error:  # damaged files raise errors of any type in scipy and zlib
        raise InputError(f"{path} is not a readable MATLAB file ({type(error).__name__}).") from None
    names = [name for name in content if not name.startswith("__")]
    if variable is not None and variable not in names:
        raise InputError(f"{path} has no variable {variable}.")
    if variable is None and len(names) != 1:
        raise InputError(f"{path} has {len(names)} variables ({', '.join(names)}); name one in dataset.toml: variable = ...")
    return _as_table(np.asarray(content[variable or names[0]]), path)


def _as_table(array: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
    if array.dtype.kind not in "fiu":
        raise InputError(f"{path} contains {array.dtype} values, not real numbers.")
    if array.ndim != 2:
        raise InputError(f"{path} has shape {array.shape}, not (time, roi).")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)
