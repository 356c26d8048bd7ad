"""Contents of a study folder, read once for its report: predictions, settings, records, explanations, and the cohort.

Everything but the predictions may be missing; the report then leaves out the sections that need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import read_centroids
from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.explain.explanation import Explanation, mean_over
from m2lgdg.findings import Finding, with_kind
from m2lgdg.report.paths import without_paths
from m2lgdg.report.published import Published, read_published, with_published
from m2lgdg.report.tables import Table
from m2lgdg.report.tracks import in_track
from m2lgdg.storage import InputError
from m2lgdg.study.checks import NOT_KNOWN, CohortFacts, read_cohort_facts
from m2lgdg.study.description import describe
from m2lgdg.study.predictions import ADAPTED, STRICT, by_track, joined_tracks, read_predictions, sweep_variant, without_track
from m2lgdg.study.runner import explanation_path
from m2lgdg.study.stats import cell_scores, site_scores

Key = tuple[str, str]
RECORDS = "records.jsonl"  # in a shared copy, which has no cells/


@dataclass(frozen=True)
class Contents:
    """Files of a study folder; `records` are those of the cells in the predictions.

    `predictions` are those of the strict track. `adapted` are those of the adapted track, if the study has both; of a study
    with the adapted track alone, `predictions` are of that track, and `track` says so. Variants are named without the track.
    """

    folder: Path
    predictions: pd.DataFrame
    study: dict[str, Any]
    environment: dict[str, Any]
    checks: list[dict[str, Any]]
    inclusion: list[dict[str, str]]
    failures: list[dict[str, str]]
    records: list[dict[str, Any]]
    cohort: Cohort | None
    about_cohort: CohortFacts = NOT_KNOWN
    centroids: pd.DataFrame | None = None  # of ROIs, for an atlas that is not included
    published: Published | None = None
    track: str = STRICT
    adapted: pd.DataFrame | None = None

    @property
    def all_predictions(self) -> pd.DataFrame:
        """Rows of both tracks, as in predictions.csv but for their order."""
        tracks = {self.track: self.predictions} | ({} if self.adapted is None else {ADAPTED: self.adapted})
        return joined_tracks(tracks)

    @property
    def batch(self) -> int:
        """Subjects of a batch in the adapted track."""
        size = self.study.get("adapt_subjects")
        return size if isinstance(size, int) else 0

    def of_adapted_track(self) -> Contents | None:
        """The same study with the adapted track as its predictions; None if it has both tracks or only the strict one."""
        return None if self.adapted is None else replace(self, predictions=self.adapted, track=ADAPTED, adapted=None)

    @cached_property
    def cell_scores(self) -> pd.DataFrame:
        """Metrics of every cell (`stats.cell_scores`), computed once for all sections."""
        return cell_scores(self.predictions)

    @cached_property
    def site_scores(self) -> pd.DataFrame:
        """Mean and sd over seeds by method, variant, target and metric (`stats.site_scores`)."""
        return site_scores(self.cell_scores)

    @property
    def findings(self) -> tuple[Finding, ...] | None:
        """Findings about the cohort; None if it was not checked."""
        stored = self.about_cohort.findings
        return stored if stored is not None or self.cohort is None else self.cohort.findings

    @property
    def known_rois(self) -> tuple[str, tuple[str, ...]] | None:
        """Atlas and ROIs of the cohort; None for a folder of an earlier version whose cohort file is not there."""
        if self.about_cohort.rois is not None:
            return self.about_cohort.atlas or "", self.about_cohort.rois
        return None if self.cohort is None else (self.cohort.atlas, self.cohort.rois)

    @cached_property
    def description(self) -> Mapping[str, Any]:
        """Groups, sites and planted effects of the cohort (`study.description`); empty if they are not known."""
        stored = self.about_cohort.description
        return stored if stored or self.cohort is None else describe(self.cohort)

    @cached_property
    def keys(self) -> list[Key]:
        """Every (method, variant), in the order of the predictions."""
        return list(self.predictions[["method", "variant"]].drop_duplicates().itertuples(index=False, name=None))

    @property
    def swept(self) -> dict[str, dict[str, list[Any]]]:
        """The study's sweeps: method -> field -> values."""
        return _sweeps(self.study)

    def is_sweep(self, key: Key) -> bool:
        """Whether a (method, variant) is one value of a sweep."""
        axes = self.swept.get(key[0], {})
        return any(key[1] == sweep_variant(field, value) for field, values in axes.items() for value in values)

    def with_published(self, tables: list[Table]) -> list[Table]:
        """The tables, with the track in their titles if it is the adapted one, else with published values if there are any."""
        if self.track == ADAPTED:  # published values are of sites that nothing was seen of
            return in_track(tables, self.track, self.batch)
        return tables if self.published is None else with_published(tables, self.published)

    def explanations(self) -> dict[str, list[tuple[dict[str, Any], Explanation]]]:
        """Explained cells of each method, with their records; read once."""
        return self._explanations

    @cached_property
    def _explanations(self) -> dict[str, list[tuple[dict[str, Any], Explanation]]]:
        explained: dict[str, list[tuple[dict[str, Any], Explanation]]] = {}
        for record in self.records:
            path = explanation_path(self.folder, record["key"])
            if path.is_dir():
                explanation = Explanation.load(path)
                if "atlas" in explanation.about:  # an atlas may be called by the path of its image
                    for about in (explanation.about, *explanation.about.get("by_atlas", {}).values()):
                        about["atlas"] = without_paths(str(about["atlas"]))
                if self.centroids is not None:
                    explanation = explanation.with_centroids(self.centroids)
                explained.setdefault(record["method"], []).append((record, explanation))
        return explained

    @cached_property
    def mean_explanations(self) -> dict[str, Explanation]:
        """Mean explanation of each method over its cells, computed once for the page and for the files."""
        return {method: mean_over(each for _, each in cells) for method, cells in self._explanations.items()}

    def missing(self) -> list[str]:
        """Number of cells of each method that have neither finished nor failed (`missing_cells`)."""
        return missing_cells(self.predictions, self.study, self.failures)


def missing_cells(predictions: pd.DataFrame, study: dict[str, Any], failures: Sequence[dict[str, str]] = ()) -> list[str]:
    """Number of cells of each method, variants and sweeps included, that have neither finished nor failed."""
    ended = {(row["method"], row["variant"], row["target"], str(row["seed"])) for row in failures}
    rows = predictions.drop_duplicates(["method", "variant", "target", "seed"])
    ended |= {(row.method, without_track(row.variant), row.target, str(row.seed)) for row in rows.itertuples()}
    counts = []
    methods, all_seeds, targets = (_listed(study, name) for name in ("methods", "seeds", "targets"))
    for method in methods:
        seen = {row[3] for row in ended if row[0] == method}
        seeds = all_seeds[:1] if seen <= set(all_seeds[:1]) and _runs_once(method, bool(seen)) else all_seeds
        variants = dict.fromkeys(["", *_variants(study, method, {row[1] for row in ended if row[0] == method})])
        cells = [(method, variant, target, seed) for variant in variants for target in targets for seed in seeds]
        missing = sum(cell not in ended for cell in cells)
        if missing:
            counts.append(f"{missing} cell{'s' if missing > 1 else ''} of {method}")
    return counts


def _sweeps(study: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Sweeps of study.json: method -> field -> values."""
    sweeps = study.get("sweep")
    return sweeps if isinstance(sweeps, dict) else {}


def _variants(study: dict[str, Any], method: str, seen: set[str]) -> list[str]:
    """Variants and sweep values that the study requests of a method; `seen` lists those of a plugin that is not loaded."""
    from m2lgdg.registry import load_methods

    requested = study.get("variants") or []
    if isinstance(requested, dict):
        named = requested.get(method, [])
    else:
        known = load_methods()
        declared = known.declaration(method).variants if method in known else {variant: {} for variant in seen}
        fields = study.get("method")
        recorded = fields.get(method) if isinstance(fields, dict) else None
        # A variant of a field that the method did not have when the study ran was not requested of it.
        available = {
            variant
            for variant, changes in declared.items()
            if not isinstance(recorded, dict) or changes.keys() <= recorded.keys()
        }
        named = [variant for variant in requested if variant in available]
    axes = _sweeps(study).get(method, {})
    return [*named, *(sweep_variant(field, value) for field, values in axes.items() for value in values)]


def _listed(study: dict[str, Any], name: str) -> list[str]:
    """A list of study.json as strings; empty if a damaged file has anything else under that name."""
    value = study.get(name)
    return [str(item) for item in value] if isinstance(value, list) else []


def _runs_once(method: str, seen: bool) -> bool:
    """Whether a method has no randomness and runs with the first seed only.

    For a plugin this is unknown, because its code is not loaded to read a folder: assume so if it was seen with that seed.
    """
    from m2lgdg.registry import load_methods

    known = load_methods()
    return not known.declaration(method).stochastic if method in known else seen


def read_contents(folder: str | Path, centroids: str | Path | None = None, published: str | Path | None = None) -> Contents:
    """Read a study folder, ROI centroids from a table or an atlas image, and published values."""
    folder = Path(folder)
    tracks = by_track(read_predictions(folder))
    (track, predictions), *others = tracks.items()
    study = read_json(folder / "study.json", {})
    cohort = _cohort(folder, study)
    if centroids is not None and cohort is None:
        raise InputError(f"{centroids} cannot be used without the cohort file of the study, which is missing or has changed.")
    return Contents(
        centroids=None if centroids is None or cohort is None else read_centroids(centroids, cohort.rois),
        published=None if published is None else read_published(published, predictions),
        folder=folder,
        predictions=predictions,
        study=study,
        environment=read_json(folder / "environment.json", {}),
        checks=read_json(folder / "checks.json", []),
        inclusion=[with_kind(row) for row in _rows(folder / "inclusion.csv")],
        failures=_rows(folder / "failures.csv"),
        records=_records(folder, predictions, track),
        cohort=cohort,
        track=track,
        adapted=others[0][1] if others else None,
        about_cohort=read_cohort_facts(folder),
    )


def read_json(path: Path, empty: Any) -> Any:
    """Content of a JSON file if it has the type of `empty`, else `empty`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return content if isinstance(content, type(empty)) else empty


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    rows: list[dict[str, str]] = unquoted_table(pd.read_csv(path, dtype=str, keep_default_na=False)).to_dict("records")
    return rows


def _records(folder: Path, predictions: pd.DataFrame, track: str) -> list[dict[str, Any]]:
    """The finished record of each cell in the predictions, in their order.

    A folder can have records of older code: the one that matches the predictions is taken, whatever the file dates.
    """
    cells = {cell: part for cell, part in predictions.groupby(["method", "variant", "target", "seed"], sort=False)}
    chosen: dict[Any, tuple[bool, dict[str, Any]]] = {}  # whether it matches the predictions, record
    for record in _all_records(folder):
        cell = tuple(record.get(name) for name in ("method", "variant", "target", "seed"))
        if cell not in cells or record.get("status") != "done":
            continue
        same = _matches(record, "proba" if track == STRICT else ADAPTED, cells[cell])
        if cell not in chosen or (same and not chosen[cell][0]):
            chosen[cell] = (same, record)
    return [chosen[cell][1] for cell in cells if cell in chosen]


def _matches(record: dict[str, Any], name: str, part: pd.DataFrame) -> bool:
    """Whether a record has the subjects and probabilities of a cell, up to rounding of the CSV file."""
    proba = np.array(record.get(name, []), dtype=np.float64)
    if record.get("subjects") != part["subject"].tolist() or len(proba) != len(part):
        return False
    return bool(np.allclose(proba, part["proba"], rtol=0, atol=1e-12))


def _all_records(folder: Path) -> Iterator[dict[str, Any]]:
    """All records, of a shared copy or of cells/."""
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
    """The cohort of the study, if its file exists and its content is unchanged."""
    path = folder / str(study.get("cohort", ""))
    if not path.is_file():
        return None
    try:
        cohort = Cohort.load(path).with_inputs(study.get("inputs") or [], allow_proxies=True)
    except InputError:
        return None
    return cohort if cohort.hash == study.get("cohort_hash") else None
