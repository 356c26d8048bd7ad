"""What a cohort is made of, and its file: one safetensors file with the series of every atlas and a JSON header with the rest.

`Cohort.save` and `Cohort.load` call it with the fields of a cohort. Files of 0.1.0 are read too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.findings import Exclusion, Finding, read_finding, read_note
from m2lgdg.storage import DAMAGED, InputError, one_line, read_tensors, write_tensors

FORMAT = "m2lgdg-cohort-1"
UNKNOWN = -1  # label of a subject whose diagnosis is unknown or hidden from a method
FURTHER = "atlas-{}."  # starts the names of the tensors of a further atlas, numbered from 0
PLAIN = ("name", "atlas", "rois", "inputs", "allow_proxies", "truth")  # fields that the header holds as they are
HIDDEN = 1e-5  # sd of a column relative to its level, below which float32 would spoil the signal
FASTEST, SLOWEST = 0.05, 20.0  # seconds; a shorter or longer TR is in another unit
ROUNDING = 1e-11  # the same of a flat column, in float64
Series = npt.NDArray[np.float32]  # (time, roi)


@dataclass(frozen=True, eq=False)
class Parcellation:
    """The scans of a cohort in a further atlas: one (time, roi) series per subject, None where a subject has none."""

    rois: tuple[str, ...]
    series: Sequence[npt.NDArray[np.float32] | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rois", tuple(map(str, self.rois)))
        object.__setattr__(self, "series", tuple(None if one is None else read_only(one) for one in self.series))

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """(subject,) mask of the subjects that have this atlas."""
        return np.array([one is not None for one in self.series], dtype=bool)


def read_only(series: npt.ArrayLike) -> Series:
    """A series as float32 that nobody can write to."""
    return frozen(as_float32(np.asarray(series)))


def as_float32(array: npt.NDArray[Any]) -> Series:
    """Numbers as float32, of which a column (of (time, roi)) is centred first where its level would hide its signal."""
    if array.ndim == 2 and array.dtype.itemsize > 4 and array.dtype.kind in "fiu" and array.size:
        with np.errstate(invalid="ignore", over="ignore"):
            level, spread = array.mean(axis=0, dtype=np.float64), array.std(axis=0, dtype=np.float64)
            hidden = (spread < HIDDEN * np.abs(level)) & (spread > ROUNDING * np.abs(level))
        if hidden.any():
            array = array - np.where(hidden, level, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values as a view of bytes, which nobody can make writeable; such an array, or one of a read-only map, as it is."""
    root = _root(array)
    safe = isinstance(root, bytes) or (isinstance(root, np.memmap) and root.mode == "r")
    if safe and array.flags.c_contiguous and not array.flags.writeable:
        return array
    return np.ndarray(array.shape, array.dtype, array.tobytes())


def copied_field(name: str, copied: Callable[[Any], Any]) -> Any:
    """A field that is read and set as a copy, so that an edit never reaches the cohort."""

    def put(cohort: Any, value: object) -> None:
        cohort.__dict__[name] = copied(value)

    return property(lambda cohort: copied(cohort.__dict__[name]), put)


def _root(array: object) -> object:
    """The map of a file, or what else an array is a view of."""
    while isinstance(array, np.ndarray) and not (isinstance(array, np.memmap) and array.filename):
        array = array.base
    return array


def mapped_files(series: Iterable[Series | None]) -> list[str]:
    """Files that series are maps of; one that was cut short is refused, as reading it would end the process."""
    maps = {str(root.filename): root for root in map(_root, series) if isinstance(root, np.memmap)}
    for file, mapped in maps.items():
        with contextlib.suppress(OSError):  # removed: its content lives on in the map
            state = os.stat(file)
            same = state.st_ino == getattr(mapped, "inode", None)  # not another file that took its place
            if same and state.st_size < mapped.offset + mapped.nbytes:
                raise overwritten(file)
    return sorted(maps)


def overwritten(path: str) -> InputError:
    """The error for a mapped file with other content than it had when it was read."""
    return InputError(f"{path} was overwritten after its cohort was read, and the series are others now; read it again.")


def canonical_table(table: pd.DataFrame, subjects: npt.NDArray[np.str_]) -> pd.DataFrame:
    """Convert each column to float64 with NaN, or to text with "", so that a saved table is read back unchanged."""
    columns = {}
    for name in table.columns:
        column = table[name]
        if pd.api.types.is_numeric_dtype(column.dtype):
            columns[str(name)] = column.to_numpy(dtype=np.float64, na_value=np.nan)
        else:
            columns[str(name)] = np.array(["" if pd.isna(value) else str(value) for value in column], dtype=object)
    return pd.DataFrame(columns, index=pd.Index(subjects.tolist(), dtype=object))


def series_defect(series: npt.NDArray[Any], rois: Sequence[str]) -> str | None:
    """Why a (time, roi) series is unusable, in words, or None. Single flat ROIs are reported by `check` instead."""
    if _is_connectome(series):
        return "a symmetric or triangular matrix is a connectome, not a series; give the time series of the ROIs"
    if len(series) < 2:
        return f"the series has {len(series)} volume{'s' * (len(series) != 1)}"
    if not np.isfinite(series).all():
        bad = ~np.isfinite(series)
        count = int(bad.sum())
        volume, roi = np.argwhere(bad)[0]
        kind = "NaN" if np.isnan(series[volume, roi]) else "infinite value"
        return f"{kind} at volume {volume + 1} of ROI {rois[roi]} ({count} such value{'s' * (count != 1)})"
    if (series[1:] == series[0]).all():
        return "every ROI is constant" if series.any() else "the series is zero everywhere"
    return None


def _is_connectome(matrix: npt.NDArray[Any]) -> bool:
    """Whether a matrix is symmetric, or one half of such a matrix, whatever stands on its diagonal."""
    if len(matrix) != matrix.shape[1] or len(matrix) < 3:
        return False
    finite = np.where(np.isfinite(matrix), matrix, 0)  # (roi, roi)
    halves = finite[np.triu_indices(len(matrix), 1)], finite.T[np.triu_indices(len(matrix), 1)]  # (edge,) each
    empty, full = sorted(np.count_nonzero(half) / len(half) for half in halves)
    with np.errstate(over="ignore"):
        largest, difference = np.abs(halves).max(), np.abs(halves[0] - halves[1]).max()
    return bool(full > 0 and (difference <= 1e-4 * largest or (empty == 0 and full > 0.5)))


def write_cohort(path: str | Path, fields: Mapping[str, Any], digest: str, dtype: str) -> Path:
    """Write the fields of a cohort atomically; `digest` is the hash of what the file will hold."""
    table, findings, others = fields["phenotypes"], fields["findings"], fields["parcellations"]
    header = {name: fields[name] for name in PLAIN} | {
        "subjects": fields["subjects"].tolist(),
        "sites": fields["sites"].tolist(),
        "phenotypes": _json_columns(table),
        "text_columns": [str(name) for name in table.columns if table[name].dtype != np.float64],
        "excluded": fields["excluded"],
        "notes": [note if isinstance(note, str) else note._asdict() for note in fields["notes"]],
        "findings": None if findings is None else [one._asdict() for one in findings],
    }
    if others:
        header["parcellations"] = [
            {"name": name, "rois": each.rois, "lacking": np.flatnonzero(~each.present).tolist()}
            for name, each in others.items()
        ]
    lengths = np.array([len(one) for one in fields["series"]], dtype=np.int64)
    tensors = {"lengths": lengths, "labels": fields["labels"], "tr": fields["tr"]}
    tensors |= _series_tensors("", fields["series"], len(fields["rois"]), dtype)
    for i, each in enumerate(others.values()):
        tensors |= _series_tensors(FURTHER.format(i), [one for one in each.series if one is not None], len(each.rois), dtype)
    return write_tensors(path, tensors, {"format": FORMAT, "hash": digest, "cohort": json.dumps(header)})


def read_cohort(path: str | Path, *, in_memory: bool = False) -> tuple[dict[str, Any], tuple[Finding, ...] | None, str | None]:
    """Fields of a cohort, its findings (None if it was not checked) and the hash in the file."""
    metadata, tensors = read_tensors(path, FORMAT, in_memory=in_memory)
    try:
        head = json.loads(metadata["cohort"])
        columns = {
            name: values if name in head["text_columns"] else np.array(values, dtype=np.float64)
            for name, values in head["phenotypes"].items()
        }
        fields = {name: head[name] for name in (*PLAIN, "subjects", "sites")} | {
            "series": _stored_series("", tensors, tensors["lengths"]),
            "labels": tensors["labels"],
            "tr": tensors["tr"],
            "phenotypes": pd.DataFrame(columns, index=head["subjects"]),
            "excluded": tuple((Exclusion if len(each) > 3 else Exclusion.from_reason)(*each) for each in head["excluded"]),
            "notes": tuple(map(read_note, head["notes"])),
            "parcellations": _stored_atlases(head.get("parcellations", []), tensors),
        }
        findings = None if head.get("findings") is None else tuple(map(read_finding, head["findings"]))
    except (InputError, *DAMAGED) as error:
        raise damaged(path, error) from None
    return fields, findings, metadata.get("hash")


def damaged(path: str | Path, error: Exception) -> InputError:
    """The error for a file that does not hold a cohort."""
    return InputError(f"{path} is damaged and cannot be read as a cohort ({one_line(error)}).")


def subject_digests(fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    """SHA-256 of the data of each subject, from the fields of a cohort."""
    columns = _json_columns(fields["phenotypes"])
    digests = []
    for i, one in enumerate(fields["series"]):
        text = [str(fields["subjects"][i]), str(fields["sites"][i]), int(fields["labels"][i]), _json_value(fields["tr"][i])]
        text.append([columns[name][i] for name in sorted(columns)])
        others = {name: each.series[i] for name, each in fields["parcellations"].items()}
        if others:
            text.append([name for name, other in others.items() if other is not None])
        digest = hashlib.sha256(json.dumps(text).encode())
        for each in (one, *(other for other in others.values() if other is not None)):
            digest.update(np.ascontiguousarray(each, dtype="<f4").data)
        digests.append(digest.digest())
    return tuple(digests)


def _json_columns(table: pd.DataFrame) -> dict[str, list[float | str | None]]:
    return {str(name): [_json_value(value) for value in table[name].tolist()] for name in table}


def _json_value(value: Any) -> float | str | None:
    return value if isinstance(value, str) else None if np.isnan(float(value)) else float(value)


def rounded(series: Series, where: str) -> Series:
    """A series as a float16 file gives it back; refused, by the words of `where`, if it is out of range."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = _unpacked(*_packed(series))
    if not np.isfinite(result).all():
        raise InputError(f"{where} is out of range for float16; save it as float32.")
    return result


def _packed(series: Series) -> tuple[npt.NDArray[np.float16], Series, Series]:
    """A (time, roi) series as float16, with the offset and scale of each ROI."""
    offset = series.mean(axis=0, dtype=np.float64).astype(np.float32)  # (roi,)
    flat = np.ptp(series, axis=0) == 0
    offset[flat] = series[0, flat]
    centred = series - offset
    scale = np.abs(centred).max(axis=0)
    scale[scale == 0] = 1
    return (centred / scale).astype(np.float16), offset, scale


def _unpacked(half: npt.NDArray[np.float16], offset: Series, scale: Series) -> Series:
    """The series that was packed, up to rounding, as a view of bytes, which nobody can make writeable."""
    series = half.astype(np.float32) * scale + offset
    return np.frombuffer(series.tobytes(), np.float32).reshape(series.shape)


def _series_tensors(prefix: str, series: Sequence[Series], rois: int, dtype: str) -> dict[str, npt.NDArray[Any]]:
    if prefix and not series:  # no subject of a selection has this atlas
        return {f"{prefix}series": np.empty((0, rois), dtype=np.float32)}
    if dtype == "float32":
        return {f"{prefix}series": np.concatenate(series)}
    half, offset, scale = zip(*map(_packed, series), strict=True)
    return {f"{prefix}series": np.concatenate(half), f"{prefix}offset": np.stack(offset), f"{prefix}scale": np.stack(scale)}


def _stored_series(prefix: str, tensors: Mapping[str, npt.NDArray[Any]], lengths: npt.NDArray[np.int64]) -> list[Series]:
    series = np.split(tensors[f"{prefix}series"], np.cumsum(lengths)[:-1]) if len(lengths) else []
    if f"{prefix}scale" not in tensors:
        return series
    return [_unpacked(*each) for each in zip(series, tensors[f"{prefix}offset"], tensors[f"{prefix}scale"], strict=True)]


def _stored_atlases(entries: Sequence[Mapping[str, Any]], tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, Parcellation]:
    lengths = tensors["lengths"]
    atlases: dict[str, Parcellation] = {}
    for i, entry in enumerate(entries):
        name, lacking = entry["name"], set(entry["lacking"])
        if name in atlases or not lacking <= set(range(len(lengths))):
            raise ValueError(f"atlas {name} is listed twice, or for subjects that the file does not have")
        stored = lengths[[position not in lacking for position in range(len(lengths))]]
        if int(stored.sum()) != len(tensors[f"{FURTHER.format(i)}series"]):
            raise ValueError(f"the series of atlas {name} do not have the volumes of its subjects")
        present = iter(_stored_series(FURTHER.format(i), tensors, stored))
        series = [None if position in lacking else next(present) for position in range(len(lengths))]
        atlases[name] = Parcellation(entry["rois"], series)
    return atlases


def check_unique(where: str, what: str, values: npt.NDArray[np.str_]) -> None:
    """Refuse names that occur twice."""
    names, counts = np.unique(values, return_counts=True)
    if (counts > 1).any():
        raise InputError(f"{where}: {what} {names[counts > 1][0]} appears {counts.max()} times.")


def check_series(
    where: str, subjects: npt.NDArray[np.str_], series: Iterable[npt.NDArray[np.float32] | None], rois: tuple[str, ...]
) -> None:
    """Refuse a series of another shape, or an unusable one."""
    for subject, one in zip(subjects, series, strict=True):
        if one is None:
            continue
        if one.ndim != 2 or one.shape[1] != len(rois):
            raise InputError(f"{where}: the series of subject {subject} has shape {one.shape}, not (time, {len(rois)}).")
        if defect := series_defect(one, rois):
            raise InputError(f"{where}: subject {subject}: {defect}.")


def check_parcellations(fields: Mapping[str, Any]) -> None:
    """Refuse further atlases without a name of their own, or with other subjects or volumes than the first."""
    subjects, cohort = fields["subjects"], f"cohort {fields['name']}"
    for name, other in fields["parcellations"].items():
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"{cohort}: one of its atlases has no name.")
        if not fields["atlas"]:
            raise InputError(f"{cohort}: its first atlas has no name, so it cannot hold atlas {name} too.")
        if name == fields["atlas"]:
            raise InputError(f"{cohort}: atlas {name} appears 2 times.")
        where = f"{cohort}, atlas {name}"
        if len(other.series) != len(subjects):
            raise InputError(f"{where}: {len(subjects)} subjects but {len(other.series)} series.")
        check_unique(where, "ROI", np.asarray(other.rois))
        check_series(where, subjects, other.series, other.rois)
        for subject, first, one in zip(subjects, fields["series"], other.series, strict=True):
            if one is not None and len(one) != len(first):
                volumes = f"{len(one)} volumes, but {len(first)} in atlas {fields['atlas']}"
                raise InputError(f"{where}: subject {subject} has {volumes}.")


def rows_of(names: Sequence[str], table: pd.DataFrame, where: str, what: str = "phenotypes") -> pd.DataFrame:
    """Rows of the subjects, by the index if it holds their names, else as they are; 0, 1, 2 ... are no names."""
    index = table.index.astype(str)
    missing = sorted(set(names) - set(index))
    if not len(table.columns):
        return table
    if isinstance(table.index, pd.RangeIndex):
        if not missing and len(names) == len(index) and list(names) != list(index):
            raise InputError(
                f"cohort {where}: the rows of {what} are numbered {index[0]} to {index[-1]}, and the subjects are these "
                f"numbers in another order; set {what}.index to the subjects of its rows, or give arrays (of phenotypes a "
                "dict of columns), which are in the order of the series."
            )
        return table.set_axis(names, axis=0) if len(table) == len(names) else table
    if missing and len(missing) < len(set(names)):
        raise InputError(f"cohort {where}: subject {missing[0]} has no row in {what}, although others have.")
    if missing or index.has_duplicates:
        return table.set_axis(names, axis=0) if len(table) == len(names) else table
    return table.set_axis(index, axis=0).loc[list(names)]


def in_order(values: Any, names: Sequence[str], where: str, what: str) -> Any:
    """Values of the subjects; a pandas Series is put into their order, as the rows of phenotypes are."""
    return rows_of(names, values.to_frame(), where, what).iloc[:, 0] if isinstance(values, pd.Series) else values


def need_seconds(seconds: float, where: str) -> float:
    """A repetition time; one above 20 s or below 0.05 s is refused, because milliseconds are meant."""
    if 0 < seconds < FASTEST:
        raise InputError(
            f"{where}: a TR of {seconds:g} s is below {FASTEST:g} s, and no scanner is so fast; milliseconds may have been "
            f"divided by 1000 twice: give it in seconds ({seconds * 1000:g})."
        )
    if seconds > SLOWEST:
        raise InputError(
            f"{where}: a TR of {seconds:g} s is above {SLOWEST:g} s and looks like milliseconds; "
            f"give it in seconds ({seconds / 1000:g})."
        )
    return seconds


def checked_tr(tr: Any, where: str) -> npt.NDArray[np.float64]:
    """Repetition times of subjects, or of all of them, in seconds; NaN is unknown."""
    seconds = np.asarray(tr, dtype=np.float64)
    for one in np.unique(seconds[np.isfinite(seconds)]):
        need_seconds(float(one), where)
    return seconds


def coded_labels(y: Any, patient: Any, name: str) -> npt.NDArray[np.int8]:
    """Labels of 1, 0 and -1 from y."""
    values = pd.Series(np.asarray(y).tolist(), dtype=object)
    known = values[~values.isna() & ~values.isin([UNKNOWN])] if patient is None else values[~values.isna()]
    classes = list(dict.fromkeys(known.tolist()))
    listed = ", ".join(map(str, classes[:5]))
    if len(classes) > 2:
        raise InputError(f"cohort {name}: y has {len(classes)} classes ({listed}); a cohort has patients and controls.")
    if patient is None and not set(classes) <= {0, 1}:
        raise InputError(f"cohort {name}: y holds {listed}; name the value of patients, such as patient={classes[-1]!r}.")
    if patient is not None and patient not in classes:
        raise InputError(f"cohort {name}: patient={patient!r} does not occur in y, which holds {listed}.")
    labels = np.full(len(values), UNKNOWN, dtype=np.int8)
    labels[known.index] = (known == (1 if patient is None else patient)).to_numpy(dtype=np.int8)
    return labels
