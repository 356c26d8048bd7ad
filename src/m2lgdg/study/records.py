"""Records of cells: one file each under `cells/`, trusted only if it is unaltered and fits the cohort, and their tables.

`study.runner` writes and reads them. `predictions.csv` has a fixed order, so that its bytes depend neither on the engine, nor
on the number of workers, nor on interruptions.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.spreadsheets import csv_text
from m2lgdg.storage import InputError, write_text
from m2lgdg.study.folder import one_at_a_time
from m2lgdg.study.plan import Cell
from m2lgdg.study.predictions import ADAPTED, COLUMNS, STRICT, adapted_variant


def record_path(out: str | Path, key: str) -> Path:
    """File of a cell's record."""
    return Path(out) / "cells" / f"{key}.json"


def explanation_path(out: str | Path, key: str) -> Path:
    """Folder of a cell's explanation."""
    return Path(out) / "explanations" / key


def head(cell: Cell) -> dict[str, Any]:
    """Beginning of a record: which cell it is."""
    return {name: getattr(cell, name) for name in ("method", "variant", "target", "seed", "key")}


def encoded(record: Mapping[str, Any]) -> str:
    """Text of a record with its checksum; an error if JSON cannot hold it."""
    return json.dumps({**record, "checksum": checksum(record)}, ensure_ascii=False, allow_nan=False) + "\n"


def checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record's content; it shows a change, not who made it."""
    content = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> dict[str, Any] | None:
    """Content of a file that `encoded` wrote, or None if it does not exist or was altered."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if record["checksum"] == checksum(record) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def plain(value: Any, where: str) -> Any:
    """A fact as JSON can hold it: NumPy scalars and arrays as numbers and lists, tuples as lists, names as text.

    A number that is not finite is left out of a table and is null in a list. Anything else is refused.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        entries = [(str(name), entry, plain(entry, where)) for name, entry in value.items()]
        return {name: stored for name, entry, stored in entries if entry is None or stored is not None}
    if isinstance(value, list | tuple):
        return [plain(entry, where) for entry in value]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufU":
        return plain(value.tolist(), where)
    kind = type(value).__name__
    raise InputError(f"{where} holds a value of type {kind}, which cannot be stored; use numbers, text or lists.")


@dataclass(frozen=True)
class Records:
    """Records of a study folder. One that does not fit the targets of the cohort counts as missing."""

    out: Path
    targets: Mapping[str, tuple[list[str], list[int]]]  # subjects and labels of each site, sorted by subject

    @classmethod
    def of(cls, out: Path, cohort: Cohort) -> Records:
        """Records of a study of this cohort."""
        ordered = cohort.in_order()
        masks = {site: ordered.sites == site for site in ordered.site_names}
        return cls(out, {site: (ordered.subjects[m].tolist(), ordered.labels[m].tolist()) for site, m in masks.items()})

    def read(self, cell: Cell, out: str | Path | None = None) -> dict[str, Any] | None:
        """Record of a cell, or None if it does not exist, cannot be read, was altered, or does not fit the cohort."""
        record = read_record(record_path(out or self.out, cell.key))
        if record is None or record.get("key") != cell.key:
            return None
        if record.get("status") == "failed":
            return record if isinstance(record.get("reason"), str) else None
        return record if record.get("status") == "done" and self._fits(record, cell) else None

    def _fits(self, record: dict[str, Any], cell: Cell) -> bool:
        subjects, labels = self.targets[cell.target]
        if record.get("target") != cell.target or record.get("subjects") != subjects:
            return False
        probabilities = [record.get("proba"), *([record.get("adapted")] if cell.adapt else [])]
        return same_labels(record.get("labels"), labels) and all(are_probabilities(one, len(subjects)) for one in probabilities)

    def done(self, cell: Cell) -> bool:
        """Whether a cell has a record of a finished training."""
        return (self.read(cell) or {}).get("status") == "done"

    def seconds(self, cell: Cell) -> float | None:
        """How long a cell took; None if it has no record."""
        return (self.read(cell) or {}).get("seconds")

    def copy(self, cell: Cell, others: Sequence[str | Path]) -> bool:
        """Copy a cell with the same key, and its explanation, from another study folder; False if none has it."""
        for other in others:
            record = self.read(cell, other) or {}
            explained = explanation_path(other, cell.key)
            if record.get("status") != "done" or (cell.explain and "unexplained" not in record and not explained.is_dir()):
                continue
            if explained.is_dir():
                shutil.copytree(explained, explanation_path(self.out, cell.key), dirs_exist_ok=True)
            # The training may have another name here, such as a sweep value that is now the default.
            write_text(record_path(self.out, cell.key), encoded(record | head(cell)))
            return True
        return False

    def lost(self, cell: Cell, reason: str) -> None:
        """Write the record of a worker that was lost before it could do so itself."""
        if self.read(cell) is None:
            write_text(record_path(self.out, cell.key), encoded(head(cell) | {"status": "failed", "reason": reason}))

    def collect(self, cells: Sequence[Cell]) -> pd.DataFrame:
        """Write predictions.csv from the finished cells and failures.csv from the failed ones.

        Runs that share the folder take turns, so that the last of them writes the table of all records.
        """
        with one_at_a_time(self.out):
            table, failures = self._tables(cells)
            write_text(self.out / "predictions.csv", csv_text(table))
            failed = self.out / "failures.csv"
            if len(failures):
                write_text(failed, csv_text(failures))
            else:
                failed.unlink(missing_ok=True)
        return table

    def _tables(self, cells: Sequence[Cell]) -> tuple[pd.DataFrame, pd.DataFrame]:
        rows, failures = [], []
        for cell in cells:
            record = self.read(cell)
            if record is None:
                continue
            named = (cell.method, cell.variant, cell.seed, cell.target)
            if record["status"] == "done":
                for track in cell.tracks:
                    name, key = (cell.variant, "proba") if track == STRICT else (adapted_variant(cell.variant), ADAPTED)
                    triples = zip(record["subjects"], record["labels"], record[key], strict=True)
                    rows += [(cell.method, name, *named[2:], subject, label, proba) for subject, label, proba in triples]
            else:
                failures.append((*named, record["reason"]))
        return pd.DataFrame(rows, columns=COLUMNS), pd.DataFrame(failures, columns=[*COLUMNS[:4], "reason"])


def same_labels(labels: object, expected: list[int]) -> bool:
    """Whether labels read from a file are those of the cohort; 1.0 and true are not 1."""
    return isinstance(labels, list) and labels == expected and all(type(label) is int for label in labels)


def are_probabilities(proba: object, count: int) -> bool:
    """Whether values are one probability for each of `count` subjects."""
    return (
        isinstance(proba, list)
        and len(proba) == count
        and all(type(value) in (int, float) and 0 <= value <= 1 for value in proba)
    )
