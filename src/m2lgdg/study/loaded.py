"""The cohort that a worker process holds: read once, kept while its file is the same, and compared with the study's hash.

`study.runner` asks for it before each cell. It is read into memory, not mapped: a map would show new content when the file is
overwritten, or end the process when the file is cut short.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import FORMAT, Cohort
from m2lgdg.storage import DTYPES, InputError, one_line

_HELD: dict[tuple[str, str, tuple[str, ...], bool], Cohort] = {}  # path, hash in the file, inputs, allow_proxies; at most one
BAD = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)


def cohort_in_memory(path: str, inputs: tuple[str, ...], allow_proxies: bool, expected: str | None) -> Cohort:
    """Cohort of a file with these inputs, its subjects in order; refused unless its content has the expected hash."""
    origin = (path, _stored_hash(path), inputs, allow_proxies)
    if origin not in _HELD:
        _HELD.clear()
        cohort = _read(path, verify=expected is None)
        _HELD[origin] = in_order(cohort.with_inputs(inputs, allow_proxies=allow_proxies))
    held = _HELD[origin]
    if expected not in (None, held.hash):
        raise InputError(f"{path} has the hash {held.hash[:12]}, not {str(expected)[:12]}.")
    return held


def in_order(cohort: Cohort) -> Cohort:
    """The cohort with its subjects sorted by id, as readers give them, and its phenotype columns by name.

    The hash of a cohort depends on neither order, so cells must not depend on it either.
    """
    ordered = cohort.select(np.argsort(cohort.subjects, kind="stable"))
    return ordered._changed(phenotypes=ordered.phenotypes[sorted(ordered.phenotypes.columns)])


def _stored_hash(path: str) -> str:
    """Hash in the header of a cohort file, which changes whenever the file is replaced by another cohort."""
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            return str(_metadata(json.loads(file.read(size)))["hash"])
    except (OSError, *BAD) as error:
        raise _unreadable(path, error) from None


def _read(path: str, verify: bool) -> Cohort:
    try:
        content = Path(path).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        metadata = _metadata(header)
        tensors = {name: _tensor(content, 8 + size, entry) for name, entry in header.items() if name != "__metadata__"}
        cohort = Cohort._from_parts(json.loads(metadata["cohort"]), tensors)
    except (OSError, InputError, *BAD) as error:
        raise _unreadable(path, error) from None
    if verify and cohort.hash != metadata["hash"]:
        raise InputError(f"{path} was altered after it was written: its content does not match its hash.")
    return cohort._each_series(_constant)


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    metadata: dict[str, str] = header["__metadata__"]
    if metadata["format"] != FORMAT:
        raise ValueError(f"its format is {metadata['format']}")
    return metadata


def _tensor(content: bytes, start: int, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    begin, end = entry["data_offsets"]
    dtype = np.dtype(DTYPES[entry["dtype"]])
    return np.frombuffer(content, dtype, (end - begin) // dtype.itemsize, start + begin).reshape(entry["shape"])


def _constant(series: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The series as a view of bytes, which no method can make writeable; only float16 files need a copy."""
    return series if series.base is not None else np.frombuffer(series.tobytes(), np.float32).reshape(series.shape)


def _unreadable(path: str, error: Exception) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path} does not exist.")
    return InputError(f"{path} is damaged and cannot be read as a cohort ({one_line(error)}).")
