"""Contents of a study folder, read once for its report: predictions, settings, records, explanations, and the cohort.

Everything but the predictions may be missing; the report then leaves out the sections that need it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import read_centroids
from m2lgdg.data.leakage import failure_sentences
from m2lgdg.data.pseudonyms import without_paths
from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.explain.explanation import Explanation, mean_over
from m2lgdg.findings import Finding, with_kind
from m2lgdg.metrics import METRICS
from m2lgdg.registry import Declaration
from m2lgdg.report.inputs import Added, Key, Seen, additions, seen_by
from m2lgdg.scans import CORRELATION, COVARIANCE, FISHER_Z, PARTIAL, SERIES
from m2lgdg.storage import InputError, one_line
from m2lgdg.study.description import NOT_KNOWN, CohortFacts, describe, read_cohort_facts
from m2lgdg.study.plan import declarations
from m2lgdg.study.predictions import ADAPTED, STRICT, by_track, joined_tracks, read_predictions, sweep_variant, without_track
from m2lgdg.study.records import explanation_path
from m2lgdg.study.stats import BALANCED, cell_scores, counted_targets, min_per_class, over_seeds, site_scores
from m2lgdg.study.tune import Tune

Cells = list[tuple[dict[str, Any], Explanation]]  # explained cells, with their records
CELL = ["method", "variant", "target", "seed"]
RECORDS = "records.jsonl"  # in a shared copy, which has no cells/
MATRICES = {  # what connectomes hold, in words
    CORRELATION: "correlations",
    FISHER_Z: "Fisher z of correlations",
    COVARIANCE: "covariances",
    PARTIAL: "partial correlations",
}


@dataclass(frozen=True)
class Contents:
    """Files of a study folder; `records` are those of the cells in the predictions.

    `predictions` are those of the strict track, or of the adapted one (`track`) if the study has no other; `adapted` are those
    of the adapted track of a study with both. Variants are named without the track. `shared`: of a report that is given away.
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
    track: str = STRICT
    adapted: pd.DataFrame | None = None
    shared: bool = False
    parts: tuple[Contents, ...] = ()  # the studies, if these are the contents of several

    @property
    def all_predictions(self) -> pd.DataFrame:
        """Rows of both tracks."""
        return joined_tracks({self.track: self.predictions} | ({} if self.adapted is None else {ADAPTED: self.adapted}))

    @property
    def batch(self) -> int:
        """Subjects of a batch in the adapted track."""
        size = self.study.get("adapt_subjects")
        return size if isinstance(size, int) else 0

    def of_adapted_track(self) -> Contents | None:
        """The adapted track as a study of its own; None if the study has one track."""
        return None if self.adapted is None else replace(self, predictions=self.adapted, track=ADAPTED, adapted=None)

    def of_methods(self, keys: Sequence[Key]) -> Contents:
        """The same study with some of its methods and variants."""
        tables = (self.predictions, self.cell_scores)
        rows, scores = (table[pd.MultiIndex.from_frame(table[["method", "variant"]]).isin(keys)] for table in tables)
        chosen = replace(self, predictions=rows)
        chosen.__dict__["cell_scores"] = scores  # not computed again
        return chosen

    @cached_property
    def cell_scores(self) -> pd.DataFrame:
        """Metrics of every cell."""
        return cell_scores(self.predictions, (*METRICS, BALANCED))

    @cached_property
    def site_scores(self) -> pd.DataFrame:
        """Mean and sd over seeds by method, variant, target and metric."""
        return site_scores(self.cell_scores)

    @cached_property
    def counted(self) -> list[str]:
        """Target sites with enough patients and controls to count in means and tests."""
        return counted_targets(self.predictions, min_per_class(self.study))

    @cached_property
    def counted_scores(self) -> pd.DataFrame:
        """`cell_scores` at the sites that count."""
        return self.cell_scores[self.cell_scores["target"].isin(self.counted)]

    @cached_property
    def averaged(self) -> pd.DataFrame:
        """`site_scores` at the sites that count."""
        return self.site_scores[self.site_scores["target"].isin(self.counted)]

    @cached_property
    def areas(self) -> pd.DataFrame:
        """(target, method and variant) AUC at the sites that count."""
        scores = self.averaged[self.averaged["metric"] == "AUC"]
        return scores.pivot(index="target", columns=["method", "variant"], values="mean")

    @cached_property
    def counted_mean(self) -> pd.DataFrame:
        """`mean` at the sites that count."""
        return self.mean[self.mean["target"].isin(self.counted)]

    @cached_property
    def mean(self) -> pd.DataFrame:
        """Probabilities averaged over seeds: a user of a model has one for each subject."""
        return over_seeds(self.predictions)

    @property
    def findings(self) -> tuple[Finding, ...] | None:
        """Findings about the cohort; None if it was not checked."""
        stored = self.about_cohort.findings
        return stored if stored is not None or self.cohort is None else self.cohort.findings

    @property
    def failed_checks(self) -> list[str]:
        """A sentence for each leakage check that failed."""
        return failure_sentences(self.checks)

    @property
    def known_rois(self) -> tuple[str, tuple[str, ...]] | None:
        """Atlas and ROIs of the cohort; None for an earlier version without its cohort file."""
        if self.about_cohort.rois is not None:
            return self.about_cohort.atlas or "", self.about_cohort.rois
        return None if self.cohort is None else (self.cohort.atlas, self.cohort.rois)

    @property
    def scans(self) -> str:
        """What the scans of the cohort are: "series", or the kind of the connectomes."""
        return self.about_cohort.scans or (SERIES if self.cohort is None else self.cohort.values)

    @cached_property
    def description(self) -> Mapping[str, Any]:
        """Groups, sites and planted effects of the cohort."""
        stored = self.about_cohort.description
        return stored if stored or self.cohort is None else describe(self.cohort)

    @cached_property
    def declared(self) -> dict[str, Declaration]:
        """Fields, variants, references and roles of the methods, as far as they are known."""
        parts = {name: one for part in self.parts for name, one in part.declared.items()}
        return parts or declarations(self.folder)

    def with_role(self, *roles: str) -> list[str]:
        """Methods of the study with one of these roles."""
        return [name for name, declared in self.declared.items() if declared.role in roles]

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """Tables of brain structure of the cohort, as `describe` has them."""
        tables: Mapping[str, Mapping[str, Any]] = self.description.get("tables", {})
        return tables

    @cached_property
    def seen(self) -> dict[Key, Seen]:
        """What each method and variant sees of a subject."""
        return seen_by(self.keys, self.study, self.declared, self.tables)

    def inputs_of(self, key: Key) -> frozenset[str]:
        """What a method sees of a subject: "scan", "phenotypes" and "table NAME"."""
        return self.seen[key].inputs

    @cached_property
    def additions(self) -> list[Added]:
        """What each input adds, of a study in which a method takes tables of brain structure; empty without one."""
        takes = any(each.tables for each in self.seen.values())
        return additions(self.seen, self.predictions, min_per_class(self.study)) if takes else []

    @cached_property
    def keys(self) -> list[Key]:
        """Every (method, variant), in the order of the predictions."""
        return list(self.predictions[["method", "variant"]].drop_duplicates().itertuples(index=False, name=None))

    @property
    def swept(self) -> dict[str, dict[str, list[Any]]]:
        """The study's sweeps: method -> field -> values."""
        sweeps = self.study.get("sweep")
        return sweeps if isinstance(sweeps, dict) else {}

    def is_sweep(self, key: Key) -> bool:
        """Whether a (method, variant) is one value of a sweep."""
        return key[1] in _sweep_variants(self.study, key[0])

    def included(self, status: str = "included") -> list[dict[str, str]]:
        """Rows of inclusion.csv with a status."""
        return [row for row in self.inclusion if row["status"] == status]

    def exclusions(self) -> list[tuple[str, int]]:
        """Kinds of exclusions, which name no subject, and their counts, most frequent first."""
        return Counter(row["kind"] for row in self.included("excluded")).most_common()

    @cached_property
    def explanations(self) -> dict[str, Cells]:
        """Explained cells of each method."""
        explained: dict[str, Cells] = {}
        for part in self.parts:
            for method, cells in part.explanations.items():
                explained.setdefault(method, []).extend(cells)
        for record in () if self.parts else self.records:
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
        """Mean explanation of each method over its cells."""
        return {method: mean_over(each for _, each in cells) for method, cells in self.explanations.items()}

    def missing(self) -> list[str]:
        """`missing_cells` of this study, or of each of several."""
        if self.parts:
            return [line for part in self.parts for line in part.missing()]
        return missing_cells(self.predictions, self.study, self.declared, self.failures)


def missing_cells(
    predictions: pd.DataFrame,
    study: Mapping[str, Any],
    declared: Mapping[str, Declaration],
    failures: Sequence[Mapping[str, str]] = (),
) -> list[str]:
    """Number of cells of each method, variants and sweeps included, that have neither finished nor failed."""
    ended = {(row["method"], row["variant"], row["target"], str(row["seed"])) for row in failures}
    rows = predictions.drop_duplicates(CELL)
    ended |= {(row.method, without_track(row.variant), row.target, str(row.seed)) for row in rows.itertuples()}
    methods, all_seeds, targets = (_listed(study, name) for name in ("methods", "seeds", "targets"))
    requested, counts = study.get("variants") or [], []
    for method in methods:
        seen = [row for row in ended if row[0] == method]
        # A method without randomness runs with the first seed only; so, perhaps, does a plugin that was seen with that seed.
        once = not declared[method].stochastic if method in declared else bool(seen)
        seeds = all_seeds[:1] if once and {row[3] for row in seen} <= set(all_seeds[:1]) else all_seeds
        known = declared[method].variants if method in declared else {row[1] for row in seen}
        named = requested.get(method, []) if isinstance(requested, dict) else [one for one in requested if one in known]
        variants = {"", *named, *_sweep_variants(study, method)}
        cells = [(method, variant, target, seed) for variant in variants for target in targets for seed in seeds]
        missing = sum(cell not in ended for cell in cells)
        if missing:
            counts.append(f"{missing} cell{'s' * (missing > 1)} of {method}")
    return counts


def changed_fields(study: Mapping[str, Any], declared: Mapping[str, Declaration]) -> str:
    """Methods with fields that differ from their defaults, and these fields."""
    changes_of = []
    for name, fields in (study.get("method") or {}).items():
        if name not in declared:  # a plugin that is not loaded here
            changes_of += [f"possibly {name} (a plugin; its fields are in study.json)"] if fields else []
            continue
        default = _as_json(declared[name].fields)
        changed = {field: value for field, value in fields.items() if default.get(field) != value}
        variant = next((one for one, changes in declared[name].variants.items() if _as_json(changes) == changed), None)
        if changed:
            changes_of.append(f"{name} ({assignments({'variant': variant} if variant else changed)})")
    for name, given in (study.get("tune") or {}).items():
        space = Tune.model_validate(given)
        trials = f"{space.count} trial{'s' * (space.count > 1)}"
        searched = f"{', '.join(space.fields)} searched in {trials} at left-out source sites of each cell"
        changes_of.append(f"{name} ({searched})")
    return "; ".join(changes_of)


def _as_json(fields: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(fields)))  # tuples become lists, as in study.json


def assignments(fields: Mapping[str, Any]) -> str:
    """Fields and their values as they are written in a study file."""
    return ", ".join(f"{field} = {json.dumps(value)}" for field, value in fields.items())


def _sweep_variants(study: Mapping[str, Any], method: str) -> set[str]:
    sweeps = study.get("sweep")
    axes = sweeps.get(method, {}) if isinstance(sweeps, dict) else {}
    return {sweep_variant(field, value) for field, values in axes.items() for value in values}


def _listed(study: Mapping[str, Any], name: str) -> list[str]:
    """A list of study.json as strings; empty if a damaged file has anything else."""
    value = study.get(name)
    return [str(item) for item in value] if isinstance(value, list) else []


def read_contents(folder: str | Path, centroids: str | Path | None = None) -> Contents:
    """Read a study folder, and ROI centroids from a table or an atlas image."""
    folder = Path(folder)
    (track, predictions), *others = by_track(read_predictions(folder)).items()
    study = _whole(folder / "study.json", {})
    cohort = _cohort(folder, study)
    if centroids is not None and cohort is None:
        raise InputError(f"{centroids} cannot be used without the cohort file of the study, which is missing or has changed.")
    return Contents(
        centroids=None if centroids is None or cohort is None else read_centroids(centroids, cohort.rois, cohort.atlas),
        folder=folder,
        predictions=predictions,
        study=study,
        environment=_whole(folder / "environment.json", {}),
        checks=_whole(folder / "checks.json", []),
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


def _whole(path: Path, empty: Any) -> Any:
    """Content of a JSON file, `empty` without one; a damaged file is refused."""
    try:
        if path.is_file():
            json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    return read_json(path, empty)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    rows: list[dict[str, str]] = unquoted_table(pd.read_csv(path, dtype=str, keep_default_na=False)).to_dict("records")
    return rows


def _records(folder: Path, predictions: pd.DataFrame, track: str) -> list[dict[str, Any]]:
    """The finished record of each cell in the predictions, in their order.

    Of several, as older code leaves them, the one that matches the predictions is taken, whatever the file dates.
    """
    cells = dict(iter(predictions.groupby(CELL, sort=False)))
    chosen: dict[Any, tuple[bool, dict[str, Any]]] = {}  # whether it matches the predictions, record
    for record in _all_records(folder):
        cell = tuple(record.get(name) for name in CELL)
        if cell not in cells or record.get("status") != "done":
            continue
        proba, rows = np.array(record.get("proba" if track == STRICT else ADAPTED, []), dtype=np.float64), cells[cell]
        same = record.get("subjects") == rows["subject"].tolist() and len(proba) == len(rows)
        same = same and np.allclose(proba, rows["proba"], rtol=0, atol=1e-12)  # up to rounding of the CSV file
        if cell not in chosen or (same and not chosen[cell][0]):
            chosen[cell] = (same, record)
    return [chosen[cell][1] for cell in cells if cell in chosen]


def _all_records(folder: Path) -> Iterator[dict[str, Any]]:
    if (folder / RECORDS).is_file():
        for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
    for path in sorted((folder / "cells").glob("*.json")):
        yield read_json(path, {})


def _cohort(folder: Path, study: Mapping[str, Any]) -> Cohort | None:
    """The cohort of the study, if its file is there and unchanged."""
    path = folder / str(study.get("cohort", ""))
    if not path.is_file():
        return None
    try:
        cohort = Cohort.load(path).with_inputs(study.get("inputs") or [], allow_proxies=True)
    except InputError:
        return None
    return cohort if cohort.hash == study.get("cohort_hash") else None
