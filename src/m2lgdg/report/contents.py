"""What a study folder holds, read once for its report: predictions, settings, records, explanations, and the cohort if near.

Everything but the predictions may be missing; the report then leaves out what it was for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import read_centroids
from m2lgdg.explain.explanation import Explanation
from m2lgdg.report.beside import Published, read_published, stand_beside
from m2lgdg.report.tables import Table
from m2lgdg.storage import InputError
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.runner import explanation_path
from m2lgdg.study.stats import cell_scores, site_scores

Key = tuple[str, str]
RECORDS = "records.jsonl"  # of a shared copy, which has no cells/


@dataclass(frozen=True)
class Contents:
    """A study folder's files; `records` are those of the cells that the predictions are of."""

    folder: Path
    predictions: pd.DataFrame
    study: dict[str, Any]
    environment: dict[str, Any]
    checks: list[dict[str, Any]]
    inclusion: list[dict[str, str]]
    failures: list[dict[str, str]]
    records: list[dict[str, Any]]
    cohort: Cohort | None
    centroids: pd.DataFrame | None = None  # of ROIs, where they are not those of an atlas we ship
    published: Published | None = None

    @cached_property
    def cell_scores(self) -> pd.DataFrame:
        """Every metric of every cell (`stats.cell_scores`), computed once for all sections."""
        return cell_scores(self.predictions)

    @cached_property
    def site_scores(self) -> pd.DataFrame:
        """Mean and sd over seeds by method, variant, target and metric (`stats.site_scores`)."""
        return site_scores(self.cell_scores)

    @property
    def keys(self) -> list[Key]:
        """Every (method, variant), in the order of the predictions."""
        return list(dict.fromkeys(zip(self.predictions["method"], self.predictions["variant"], strict=True)))

    @property
    def swept(self) -> dict[str, dict[str, list[Any]]]:
        """The study's sweeps: method -> field -> values."""
        sweeps = self.study.get("sweep")
        return sweeps if isinstance(sweeps, dict) else {}

    def is_sweep(self, key: Key) -> bool:
        """Whether a row is one value of a sweep."""
        return any(key[1] == f"{field}={value}" for field, values in self.swept.get(key[0], {}).items() for value in values)

    def beside(self, tables: list[Table]) -> list[Table]:
        """The tables, with published values in brackets where there are some."""
        return tables if self.published is None else stand_beside(tables, self.published)

    def explanations(self) -> dict[str, list[tuple[dict[str, Any], Explanation]]]:
        """The explained cells of each method, with their records."""
        found: dict[str, list[tuple[dict[str, Any], Explanation]]] = {}
        for record in self.records:
            path = explanation_path(self.folder, record["key"])
            if path.is_dir():
                one = Explanation.load(path)
                found.setdefault(record["method"], []).append(
                    (record, one if self.centroids is None else one.with_centroids(self.centroids))
                )
        return found

    def missing(self) -> list[str]:
        """Cells that the study asks for, of variants and sweeps too, that are neither there nor failed: a sentence a method."""
        have = {(row["method"], row["variant"], row["target"], str(row["seed"])) for row in self.failures}
        rows = self.predictions.drop_duplicates(["method", "variant", "target", "seed"])
        have |= {(row.method, row.variant, row.target, str(row.seed)) for row in rows.itertuples()}
        told = []
        methods, all_seeds, targets = (self._listed(name) for name in ("methods", "seeds", "targets"))
        for method in methods:
            own = {row[3] for row in have if row[0] == method}
            asked = all_seeds[:1] if own <= set(all_seeds[:1]) and _runs_once(method, bool(own)) else all_seeds
            rows_of = dict.fromkeys(["", *self._variants(method, {row[1] for row in have if row[0] == method})])
            gone = sum((method, row, target, seed) not in have for row in rows_of for target in targets for seed in asked)
            if gone:
                told.append(f"{gone} cell{'s' if gone > 1 else ''} of {method}")
        return told

    def _variants(self, method: str, seen: set[str]) -> list[str]:
        """Variants and values of a sweep that the study asks of a method; of a plugin's method `seen` tells what it has."""
        from m2lgdg.registry import load_methods

        asked = self.study.get("variants") or []
        have = set(load_methods()[method].variants) if method in load_methods() else seen
        named = asked.get(method, []) if isinstance(asked, dict) else [one for one in asked if one in have]
        axes = self.swept.get(method, {})
        return [*named, *(f"{field}={value}" for field, values in axes.items() for value in values)]

    def _listed(self, name: str) -> list[str]:
        """A list of the study as words; none where a damaged study.json has something else there."""
        value = self.study.get(name)
        return [str(one) for one in value] if isinstance(value, list) else []


def _runs_once(method: str, seen: bool) -> bool:
    """Whether a method has no randomness, so that one seed is all there is to run.

    Of a plugin, whose code is not run to read a folder, that is not known: if it was seen, then with the first seed alone.
    """
    from m2lgdg.registry import load_methods

    known = load_methods()
    return not known[method].stochastic if method in known else seen


def read_contents(folder: str | Path, centroids: str | Path | None = None, published: str | Path | None = None) -> Contents:
    """Read a study folder, the places of ROIs from a table or an atlas image, and published values."""
    folder = Path(folder)
    predictions = read_predictions(folder)
    study = read_json(folder / "study.json", {})
    cohort = _cohort(folder, study)
    if centroids is not None and cohort is None:
        raise InputError(
            f"{centroids} cannot be used: the cohort that the study names is not there, so its ROIs are not known."
        )
    return Contents(
        centroids=None if centroids is None or cohort is None else read_centroids(centroids, cohort.rois),
        published=None if published is None else read_published(published, predictions),
        folder=folder,
        predictions=predictions,
        study=study,
        environment=read_json(folder / "environment.json", {}),
        checks=read_json(folder / "checks.json", []),
        inclusion=_rows(folder / "inclusion.csv"),
        failures=_rows(folder / "failures.csv"),
        records=_records(folder, predictions),
        cohort=cohort,
    )


def read_json(path: Path, empty: Any) -> Any:
    """What a JSON file holds, if it is of the kind of `empty`; else `empty`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return content if isinstance(content, type(empty)) else empty


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    rows: list[dict[str, str]] = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    return rows


def _records(folder: Path, predictions: pd.DataFrame) -> list[dict[str, Any]]:
    """The finished record of each cell in the predictions, in their order.

    Older code leaves records behind: the one whose numbers are in the predictions is taken, whatever the files' dates are.
    """
    cells = {cell: part for cell, part in predictions.groupby(["method", "variant", "target", "seed"], sort=False)}
    found: dict[Any, tuple[bool, dict[str, Any]]] = {}
    for record in _all_records(folder):
        cell = tuple(record.get(name) for name in ("method", "variant", "target", "seed"))
        if cell not in cells or record.get("status") != "done":
            continue
        same = _is_of(record, cells[cell])
        if cell not in found or (same and not found[cell][0]):
            found[cell] = (same, record)
    return [found[cell][1] for cell in cells if cell in found]


def _is_of(record: dict[str, Any], part: pd.DataFrame) -> bool:
    """Whether a record's subjects and probabilities are those of a cell; the table's numbers were read from text."""
    proba = np.array(record.get("proba", []), dtype=np.float64)
    return record.get("subjects") == part["subject"].tolist() and bool(np.allclose(proba, part["proba"], rtol=0, atol=1e-12))


def _all_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Every record: of a shared copy, and of the cells."""
    shared = folder / RECORDS
    if shared.is_file():
        lines = shared.read_text(encoding="utf-8").splitlines()
        yield from (record for record in map(_parsed, lines) if isinstance(record, dict))
    for path in sorted((folder / "cells").glob("*.json")):
        yield read_json(path, {})


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _cohort(folder: Path, study: dict[str, Any]) -> Cohort | None:
    """The study's cohort, where it still lies where the study says and has the same content."""
    path = folder / str(study.get("cohort", ""))
    if not path.is_file():
        return None
    try:
        cohort = Cohort.load(path).with_inputs(study.get("inputs") or [], allow_proxies=True)
    except InputError:
        return None
    return cohort if cohort.hash == study.get("cohort_hash") else None
