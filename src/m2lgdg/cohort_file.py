"""What a cohort is made of, and its file: one safetensors file with the scans of every atlas and a JSON header with the rest.

`Cohort.save` and `Cohort.load` call it with the fields of a cohort. Files of 0.1.0 are read too.
"""

from __future__ import annotations

import contextlib
import copy
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

from m2lgdg.cohort_arrays import UNKNOWN
from m2lgdg.findings import Exclusion, Finding, is_proxy, is_table_proxy, read_finding, read_note
from m2lgdg.scans import (
    SERIES,
    Absent,
    Connectomes,
    Scans,
    arrays_of,
    as_scans,
    each_scan,
    kind_of,
    map_of,
    series_defect,
    triangle,
    triangle_defect,
)
from m2lgdg.storage import DAMAGED, InputError, one_line, read_tensors, write_tensors

FORMAT = "m2lgdg-cohort-1"
FURTHER = "atlas-{}."  # starts the names of the tensors of a further atlas, numbered from 0
PLAIN = ("name", "atlas", "rois", "inputs", "allow_proxies", "truth")  # fields that the header holds as they are
Series = npt.NDArray[np.float32]  # (time, roi)


@dataclass(frozen=True, eq=False)
class Parcellation:
    """The scans of a cohort in a further atlas, None where a subject has none: `series`, or `Connectomes`.

    As in a cohort, `scans` are whichever it holds, and to read `series` where there are connectomes is an error.
    """

    rois: tuple[str, ...]
    series: Sequence[npt.NDArray[np.float32] | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rois", tuple(map(str, self.rois)))

    @property
    def scans(self) -> Scans:
        """Series or connectomes."""
        held: Scans = self.__dict__["series"]
        return held

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """(subject,) mask of the subjects that have this atlas."""
        return np.array([one is not None for one in arrays_of(self.scans)], dtype=bool)


def scan_field(owner: Callable[[Any], str]) -> Any:
    """The field `series`: it is set with series or connectomes, and where connectomes are, reading it gives an error."""

    def get(holder: Any) -> Any:
        held = holder.__dict__["series"]
        if not isinstance(held, Connectomes):
            return held
        advice = "see m2lgdg methods for those that take connectomes, or read the series"
        return Absent(held, f"{owner(holder)} holds connectomes, but the time series of the ROIs are needed; {advice}.")

    def put(holder: Any, value: object) -> None:
        holder.__dict__["series"] = as_scans(value)

    return property(get, put)


Parcellation.series = scan_field(lambda _: "this atlas")


def copied_field(name: str, copied: Callable[[Any], Any]) -> Any:
    """A field that is read and set as a copy, so that an edit never reaches the cohort."""

    def put(cohort: Any, value: object) -> None:
        cohort.__dict__[name] = copied(value)

    return property(lambda cohort: copied(cohort.__dict__[name]), put)


def copied_table(table: pd.DataFrame) -> pd.DataFrame:
    """A copy that shares nothing; pandas itself would share the names, which can be made writeable."""
    copied = table.copy()
    copied.index, copied.columns = table.index.copy(deep=True), table.columns.copy(deep=True)
    return copied


def held_table(cohort: Any, name: str) -> pd.DataFrame | None:
    """A table of a cohort as it is held, to read from: a copy of all takes longer than a prediction."""
    held: pd.DataFrame | None = cohort.__dict__["tables"].get(name)
    return held


def copied_tables(tables: Any) -> Any:
    """Copies of tables, by name; what is none is refused later."""
    if not isinstance(tables, Mapping):
        return tables
    return {name: copied_table(each) if isinstance(each, pd.DataFrame) else copy.copy(each) for name, each in tables.items()}


def mapped_files(scans: Iterable[Scans]) -> list[str]:
    """Files that scans are maps of; one that was cut short is refused, as reading it would end the process."""
    arrays = (one for each in scans for one in arrays_of(each))
    maps = {str(root.filename): root for root in map(map_of, arrays) if isinstance(root, np.memmap)}
    for file, mapped in maps.items():
        with contextlib.suppress(OSError):  # removed: its content lives on in the map
            state = os.stat(file)
            same = state.st_ino == getattr(mapped, "inode", None)  # not another file that took its place
            if same and state.st_size < mapped.offset + mapped.nbytes:
                raise overwritten(file)
    return sorted(maps)


def overwritten(path: str) -> InputError:
    """The error for a mapped file with other content than it had when it was read."""
    return InputError(f"{path} was overwritten after its cohort was read, and its scans are others now; read it again.")


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
    if (kind := kind_of(fields["series"])) != SERIES:
        header["values"] = kind
    if fields["tables"]:
        header["tables"] = [{"name": name, "columns": list(table.columns)} for name, table in fields["tables"].items()]
    if others:
        header["parcellations"] = [
            {"name": name, "rois": each.rois, "lacking": np.flatnonzero(~each.present).tolist()}
            | ({} if kind_of(each.scans) == SERIES else {"values": kind_of(each.scans)})
            for name, each in others.items()
        ]
    tensors = {"labels": fields["labels"], "tr": fields["tr"], **_scan_tensors("", fields["series"], fields["rois"], dtype)}
    for i, each in enumerate(others.values()):
        tensors |= _scan_tensors(FURTHER.format(i), each.scans, each.rois, dtype)
        if kind == SERIES:  # the same scan has the same number of volumes in every atlas
            tensors.pop(f"{FURTHER.format(i)}lengths", None)
    for i, table in enumerate(fields["tables"].values()):
        tensors[f"table-{i}"] = table.to_numpy(dtype=np.float64)
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
            "series": _stored_scans("", head, tensors, range(len(head["subjects"]))),
            "labels": tensors["labels"],
            "tr": tensors["tr"],
            "phenotypes": pd.DataFrame(columns, index=head["subjects"]),
            "excluded": tuple((Exclusion if len(each) > 3 else Exclusion.from_reason)(*each) for each in head["excluded"]),
            "notes": tuple(map(read_note, head["notes"])),
            "tables": _stored_tables(head, tensors),
            "parcellations": _stored_atlases(head.get("parcellations", []), tensors, len(head["subjects"])),
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
    rows = [table.to_numpy(dtype="<f8") + 0.0 for _, table in sorted(fields["tables"].items())]  # + 0.0: one zero, not two
    digests = []
    for i, one in enumerate(arrays_of(fields["series"])):
        text = [str(fields["subjects"][i]), str(fields["sites"][i]), int(fields["labels"][i]), _json_value(fields["tr"][i])]
        text.append([columns[name][i] for name in sorted(columns)])
        others = {name: arrays_of(each.scans)[i] for name, each in fields["parcellations"].items()}
        if others:
            text.append([name for name, other in others.items() if other is not None])
        digest = hashlib.sha256(json.dumps(text).encode())
        for each in (one, *(other for other in others.values() if other is not None)):
            digest.update(np.ascontiguousarray(each, dtype="<f4").data)
        for table in rows:
            digest.update(np.where(np.isnan(table[i]), np.nan, table[i]).tobytes())  # one NaN, not many
        digests.append(digest.digest())
    return tuple(digests)


def content_hash(fields: Mapping[str, Any], digests: Iterable[bytes]) -> str:
    """SHA-256 of the content of a cohort, from its fields and the digests of its subjects, in any order."""
    others, tables = fields["parcellations"], fields["tables"]
    head: list[object] = [fields["rois"], fields["inputs"], sorted(map(str, fields["phenotypes"].columns))]
    if others:
        head += [fields["atlas"], [(name, each.rois) for name, each in others.items()]]
    kinds = [kind_of(fields["series"]), *(kind_of(each.scans) for each in others.values())]
    if set(kinds) != {SERIES}:
        head.append(kinds)
    if tables:
        head.append({"tables": [(name, list(tables[name].columns)) for name in sorted(tables)]})
    return hashlib.sha256(json.dumps(head).encode() + b"".join(sorted(digests))).hexdigest()


def _json_columns(table: pd.DataFrame) -> dict[str, list[float | str | None]]:
    def values(column: pd.Series[Any]) -> list[float | str | None]:
        if column.dtype == np.float64:  # most of them, in a tenth of the time
            return [None if value != value else value for value in column.tolist()]
        return [_json_value(value) for value in column.tolist()]

    return {str(name): values(table[name]) for name in table}


def _json_value(value: Any) -> float | str | None:
    return value if isinstance(value, str) else None if np.isnan(float(value)) else float(value)


def rounded_scans(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with scans as a float16 file gives them back; refused if one is out of range."""
    cohort, subjects = f"cohort {fields['name']}", fields["subjects"]
    others = fields["parcellations"].items()
    further = {name: Parcellation(each.rois, _rounded(each.scans, subjects, cohort)) for name, each in others}
    return {"series": _rounded(fields["series"], subjects, cohort), "parcellations": further}


def _rounded(scans: Scans, subjects: Sequence[str], where: str) -> Scans:
    arrays: list[Any] = [None] * len(subjects)
    for i, one in each_scan(scans):
        with np.errstate(over="ignore", invalid="ignore"):
            arrays[i] = _unpacked(*_packed(one))
        if not np.isfinite(arrays[i]).all():
            what = "series" if kind_of(scans) == SERIES else "connectome"
            raise InputError(f"{where}: the {what} of subject {subjects[i]} is out of range for float16; save it as float32.")
    return Connectomes(arrays, scans.kind, scans.n_rois) if isinstance(scans, Connectomes) else tuple(arrays)


def _packed(array: Series) -> tuple[npt.NDArray[np.float16], Series, Series]:
    """A (time, roi) series as float16, with the offset and scale of each ROI; of a triangle, 0 and its sds or one scale."""
    if array.ndim == 1:
        rows, columns, diagonal = triangle(int(np.sqrt(2 * len(array))))
        sd = np.sqrt(array[diagonal])  # (roi,), by which variances of any size are 1
        scale = np.where(sd > 0, sd, 1) if sd.any() else np.abs(array).max(keepdims=True)
        by = scale[rows] * scale[columns] if sd.any() else scale
        return (array / by).astype(np.float16), np.zeros_like(scale), scale
    offset = array.mean(axis=0, dtype=np.float64).astype(np.float32)  # (roi,)
    flat = np.ptp(array, axis=0) == 0
    offset[flat] = array[0, flat]
    centred = array - offset
    scale = np.abs(centred).max(axis=0)
    scale[scale == 0] = 1
    return (centred / scale).astype(np.float16), offset, scale


def _unpacked(half: npt.NDArray[np.float16], offset: Series, scale: Series) -> Series:
    """The array that was packed, up to rounding, as a view of bytes, which nobody can make writeable."""
    if half.ndim == 1 and len(scale) > 1:
        rows, columns, _ = triangle(len(scale))
        scale, offset = scale[rows] * scale[columns], np.zeros(1, dtype=np.float32)
    array = half.astype(np.float32) * scale + offset
    return np.frombuffer(array.tobytes(), np.float32).reshape(array.shape)


def _scan_tensors(prefix: str, scans: Scans, rois: Sequence[str], dtype: str) -> dict[str, npt.NDArray[Any]]:
    """Series one after the other with their lengths, or connectomes as the rows of (subject, triangle)."""
    arrays = [one for _, one in each_scan(scans)]
    if isinstance(scans, Connectomes):
        name, lengths = "connectomes", {}
    else:
        name, lengths = SERIES, {f"{prefix}lengths": np.array([len(one) for one in arrays], dtype=np.int64)}
    join = np.concatenate if name == SERIES else np.stack
    if not arrays:  # no subject of a selection has this atlas
        width = len(rois) if name == SERIES else len(rois) * (len(rois) + 1) // 2
        return {f"{prefix}{name}": np.empty((0, width), dtype=np.float32), **lengths}
    if dtype == "float32":
        return {f"{prefix}{name}": join(arrays), **lengths}
    half, offset, scale = zip(*map(_packed, arrays), strict=True)
    return {f"{prefix}{name}": join(half), f"{prefix}offset": np.stack(offset), f"{prefix}scale": np.stack(scale), **lengths}


def _stored_scans(prefix: str, entry: Mapping[str, Any], tensors: Mapping[str, Any], present: Sequence[int]) -> Any:
    """Scans of the subjects that have an atlas; `entry` is its part of the header."""
    atlas = f" of atlas {entry['name']}" if prefix else ""
    if "values" in entry:
        arrays = list(tensors[f"{prefix}connectomes"])
        if len(arrays) != len(present):
            raise ValueError(f"there is not one connectome{atlas} for each subject")
    else:
        lengths = tensors[f"{prefix}lengths"] if f"{prefix}lengths" in tensors else tensors["lengths"][list(present)]
        # Of the first atlas, the check of each series names the subject.
        if prefix and (int(lengths.sum()) != len(tensors[f"{prefix}series"]) or len(lengths) != len(present)):
            raise ValueError(f"the series{atlas} do not have the volumes of its subjects")
        arrays = np.split(tensors[f"{prefix}series"], np.cumsum(lengths)[:-1]) if len(lengths) else []
    if f"{prefix}scale" in tensors:
        arrays = [_unpacked(*each) for each in zip(arrays, tensors[f"{prefix}offset"], tensors[f"{prefix}scale"], strict=True)]
    return Connectomes(arrays, entry["values"], len(entry["rois"])) if "values" in entry else arrays


def _stored_tables(head: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    return {
        each["name"]: pd.DataFrame(np.asarray(tensors[f"table-{i}"]), index=head["subjects"], columns=each["columns"])
        for i, each in enumerate(head.get("tables", []))
    }


def _stored_atlases(
    entries: Sequence[Mapping[str, Any]], tensors: Mapping[str, npt.NDArray[Any]], count: int
) -> dict[str, Parcellation]:
    atlases: dict[str, Parcellation] = {}
    for i, entry in enumerate(entries):
        name, lacking = entry["name"], set(entry["lacking"])
        if name in atlases or not lacking <= set(range(count)):
            raise ValueError(f"atlas {name} is listed twice, or for subjects that the file does not have")
        present = [position for position in range(count) if position not in lacking]
        stored = _stored_scans(FURTHER.format(i), entry, tensors, present)
        rest = iter(arrays_of(stored))
        scans: Any = [None if position in lacking else next(rest) for position in range(count)]
        if isinstance(stored, Connectomes):
            scans = Connectomes(scans, stored.kind, stored.n_rois)
        atlases[name] = Parcellation(entry["rois"], scans)
    return atlases


def check_unique(where: str, what: str, values: npt.NDArray[np.str_]) -> None:
    """Refuse names that occur twice."""
    names, counts = np.unique(values, return_counts=True)
    if (counts > 1).any():
        raise InputError(f"{where}: {what} {names[counts > 1][0]} appears {counts.max()} times.")


def check_counts(fields: Mapping[str, Any]) -> None:
    """Refuse fields with other numbers of subjects, unknown labels, impossible TRs and names that occur twice."""
    where, n, labels, tr = f"cohort {fields['name']}", len(fields["subjects"]), fields["labels"], fields["tr"]
    scans = "series" if kind_of(fields["series"]) == SERIES else "connectomes"
    sizes = {scans: fields["series"], "sites": fields["sites"], "labels": labels, "phenotype rows": fields["phenotypes"]}
    for what, values in sizes.items():
        if len(values) != n:
            raise InputError(f"{where}: {n} subjects but {len(values)} {what}.")
    for label in labels[~np.isin(labels, (UNKNOWN, 0, 1))]:
        raise InputError(f"label {label} is neither 1 (patient), 0 (control) nor -1 (unknown).")
    for i in np.flatnonzero((tr <= 0) | np.isinf(tr)):
        raise InputError(f"{where}: subject {fields['subjects'][i]} has a TR of {tr[i]:g} s.")
    check_unique(where, "subject", fields["subjects"])
    check_unique(where, "ROI", np.asarray(fields["rois"]))


def check_inputs(cohort: Any) -> None:
    """Refuse inputs that are no numeric phenotypes, or that reveal the label."""
    for column in cohort.inputs:
        if column not in cohort.phenotypes.columns:
            raise InputError(f"cohort {cohort.name}: input {column} is not a phenotype column.")
        if cohort.phenotypes[column].dtype != np.float64:
            raise InputError(f"cohort {cohort.name}: input {column} holds text; inputs must be numeric.")
        if is_proxy(column) and not cohort.allow_proxies:
            advice = "a model could read the label from it; leave it out, or keep it with allow_proxies=True"
            raise InputError(f"cohort {cohort.name}: input {column} reveals the diagnosis, so {advice}.")


def check_tables(cohort: Any) -> None:
    """Refuse tables with a column that reveals the label by its name: methods take all columns."""
    for name, table in cohort.tables.items():
        for column in table.columns:
            if is_table_proxy(column) and not cohort.allow_proxies:
                raise InputError(f"cohort {cohort.name}, table {name}: column {column} reveals the diagnosis; leave it out.")


def check_scans(where: str, subjects: npt.NDArray[np.str_], scans: Scans, rois: tuple[str, ...]) -> None:
    """Refuse a scan of another shape, or an unusable one."""
    for i, one in each_scan(scans):
        if isinstance(scans, Connectomes):
            defect = triangle_defect(one, rois, scans.kind)
        elif one.ndim != 2 or one.shape[1] != len(rois):
            raise InputError(f"{where}: the series of subject {subjects[i]} has shape {one.shape}, not (time, {len(rois)}).")
        else:
            defect = series_defect(one, rois)
        if defect:
            raise InputError(f"{where}: subject {subjects[i]}: {defect}.")


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
        if len(other.scans) != len(subjects):
            what = "series" if kind_of(other.scans) == SERIES else "connectomes"
            raise InputError(f"{where}: {len(subjects)} subjects but {len(other.scans)} {what}.")
        check_unique(where, "ROI", np.asarray(other.rois))
        check_scans(where, subjects, other.scans, other.rois)
        if {kind_of(other.scans), kind_of(fields["series"])} != {SERIES}:
            continue
        for subject, first, one in zip(subjects, fields["series"], other.scans, strict=True):
            if one is not None and len(one) != len(first):
                volumes = f"{len(one)} volumes, but {len(first)} in atlas {fields['atlas']}"
                raise InputError(f"{where}: subject {subject} has {volumes}.")
