"""Features by subject id in NumPy's files: embeddings of another network, for example, as one archive or one vector a subject.

`structure.py` reads them as tables. Nothing is unpickled, and sizes are judged before numbers are read.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.data.readers.arrays import parse_npy
from m2lgdg.data.readers.runs import entities
from m2lgdg.data.readers.tables import LARGEST_TABLE
from m2lgdg.storage import InputError, read_bytes

IDS = ("ids", "subjects", "subject", "participant_id", "subject_id")  # arrays of an archive that say who the rows are of
COLUMNS = ("columns", "names")


def read_archive(path: Path) -> pd.DataFrame:
    """(subject, feature) of a .npz file with an array of ids, one of numbers and, if it has one, one of the columns' names."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path, LARGEST_TABLE))) as archive:
            if sum(one.file_size for one in archive.infolist()) > LARGEST_TABLE:
                raise InputError(f"{path} holds more than {LARGEST_TABLE >> 20} MB, the limit for a table.")
            held = {one.filename.removesuffix(".npy"): archive.read(one) for one in archive.infolist()}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError, ValueError, zlib.error):
        raise InputError(f"{path} is not a readable .npz file.") from None
    arrays = {name: parse_npy(path, content) for name, content in held.items()}
    ids = next((arrays.pop(name) for name in IDS if name in arrays), None)
    names = next((arrays.pop(name) for name in COLUMNS if name in arrays), None)
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "Uiu":
        raise InputError(f"{path} has no list of ids (an array {', '.join(IDS[:-1])} or {IDS[-1]} of text or whole numbers).")
    if len(arrays) != 1:
        listed = f" ({', '.join(sorted(arrays))})" if arrays else ""
        raise InputError(f"{path} has {len(arrays)} arrays of numbers beside its ids{listed}; save one, (subject, feature).")
    (numbers,) = arrays.values()
    if numbers.ndim != 2 or len(numbers) != len(ids):
        raise InputError(f"{path}: its numbers have shape {numbers.shape}, not ({len(ids)}, feature) as it has {len(ids)} ids.")
    if names is not None and (names.dtype.kind != "U" or names.shape != numbers.shape[1:] or len(set(names)) < len(names)):
        raise InputError(f"{path}: it has {numbers.shape[1]} columns of numbers, but not as many different names for them.")
    return _table(path, [str(one) for one in ids.tolist()], numbers, None if names is None else names.tolist())


def read_vectors(files: Sequence[Path]) -> pd.DataFrame:
    """(subject, feature) of .npy files with one vector each, named by the subject: sub-01_desc-embedding.npy or 51456.npy."""
    rows: list[npt.NDArray[Any]] = []
    ids: list[str] = []
    for file in files:
        vector = parse_npy(file, read_bytes(file, LARGEST_TABLE))
        if vector.ndim != 1 or not vector.size:
            raise InputError(f"{file} has shape {vector.shape}; the features of a subject are a vector.")
        if rows and len(vector) != len(rows[0]):
            raise InputError(f"{file} has {len(vector)} features, but {files[0].name} has {len(rows[0])}.")
        subject = entities(file).get("sub")
        ids.append(f"sub-{subject}" if subject else file.stem)
        rows.append(_real(file, vector))
    return _table(files[0].parent, ids, np.stack(rows), None)


def _table(path: Path, ids: Sequence[str], numbers: npt.NDArray[Any], names: Sequence[str] | None) -> pd.DataFrame:
    table = pd.DataFrame(
        np.array(_real(path, numbers), dtype=np.float64),
        index=pd.Index([one.strip() for one in ids], dtype=object),
        columns=list(names) if names is not None else [f"feature_{i + 1}" for i in range(numbers.shape[1])],
    )
    if table.empty or (table.index == "").any() or table.index.has_duplicates:
        again = table.index[table.index.duplicated()]
        raise InputError(f"{path}: {f'id {again[0]} has two rows' if len(again) else 'it has an empty id, or no numbers'}.")
    return table


def _real(path: Path, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if numbers.dtype.kind not in "fiu" or np.isinf(numbers).any():
        raise InputError(f"{path}: its features are not all real numbers (type {numbers.dtype}, NaN for what is missing).")
    return numbers
