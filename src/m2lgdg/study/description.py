"""What a study folder says of its cohort: leakage checks, findings, and a description in numbers, without subjects.

`study.folder` writes `checks.json`, `cohort.json` and `connectomes.safetensors` before the first cell runs. `m2lgdg run` and
`m2lgdg table` print the sentences, and the report shows the data where the cohort file is not available.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.data.atlases.table_columns import head_column
from m2lgdg.data.leakage import failure_sentences
from m2lgdg.data.phenotype_slopes import slopes_by_site
from m2lgdg.data.readers.tables import MALE, MOTION
from m2lgdg.findings import Finding, data_line, read_finding
from m2lgdg.scans import KINDS, SERIES, some_of
from m2lgdg.storage import InputError, read_tensors, write_tensors

COHORT, CONNECTOMES = "cohort.json", "connectomes.safetensors"
FORMAT = "m2lgdg-connectomes-1"
TABLE = (("columns", int), ("constant", int), ("subjects", int), ("gaps", float), ("head_size", str))  # entries of a table
SITES = "sites"  # the tensor with the mean of each site
LEAST = 10  # subjects; means of smaller sites are not kept, and smaller groups are hidden in shared reports
NOT_CHECKED = "this study has no record of the findings about its cohort; m2lgdg check COHORT lists them."
Floats = npt.NDArray[np.float64]


class CohortFacts(NamedTuple):
    """Atlas, ROIs, findings, description (`describe`) and kind of scans of the cohort; None or empty where not known."""

    atlas: str | None = None
    rois: tuple[str, ...] | None = None
    findings: tuple[Finding, ...] | None = None
    description: Mapping[str, Any] = MappingProxyType({})
    scans: str | None = None


NOT_KNOWN = CohortFacts()


@contextmanager
def _refusing_damage(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        advice = "remove it, and repeat m2lgdg run to write it again"
        raise InputError(f"{path} is damaged and cannot be read as {what}; {advice}.") from None


def failed_checks(folder: str | Path) -> list[str]:
    """One sentence for each leakage check that the study failed; empty for a folder without `checks.json`."""
    path = Path(folder) / "checks.json"
    with _refusing_damage(path, "leakage checks"):
        return failure_sentences(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def read_cohort_facts(folder: str | Path) -> CohortFacts:
    """What a study folder has on its cohort in `cohort.json`."""
    path = Path(folder) / COHORT
    if not path.is_file():
        return NOT_KNOWN
    with _refusing_damage(path, "facts about a cohort"):
        facts = json.loads(path.read_text(encoding="utf-8"))
        texts = [facts["atlas"], *facts["rois"]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("atlas and rois are not texts")
        description = {name: dict(facts[name]) for name in ("groups", "sites", "planted", "tables", "slopes") if name in facts}
        for group in (group for name in ("groups", "sites") for group in description.get(name, {}).values()):
            _check_group(group)
        if not all(isinstance(each[name], kind) for each in description.get("tables", {}).values() for name, kind in TABLE):
            raise ValueError("a table has entries of other types")
        rows = [row for by_site in description.get("slopes", {}).values() for row in by_site.values()]
        if not all(len(row) == 3 and all(isinstance(end, int | float) for end in row) for row in rows):
            raise ValueError("a slope is not a number with its interval")
        findings, scans = tuple(map(read_finding, facts["findings"])), facts.get("scans", SERIES)  # not in 0.1.0
        if scans not in (SERIES, *KINDS):
            raise ValueError("an unknown kind of scans")
        return CohortFacts(texts[0], tuple(texts[1:]), findings, description, scans)


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError unless a group has counts, and numbers or texts (of a shared copy) in its other entries."""
    counts = [group[name] for name in ("subjects", "patients", "controls")]
    without = group.get("without", {})  # subjects without a table
    others = [value for entry in group.values() for value in (entry if isinstance(entry, list) else [entry])]
    others = [*(value for value in others if value is not without), *without.values()]
    if not all(isinstance(count, int) for count in counts) or not all(isinstance(v, int | float | str) for v in others):
        raise ValueError("a group has entries that are neither numbers nor texts")


def cohort_line(folder: str | Path, command: str) -> str:
    """One line on the findings about the cohort of a study; `command` lists them. Empty if there are none."""
    findings = read_cohort_facts(folder).findings
    return f"Data: {NOT_CHECKED}" if findings is None else data_line(findings, command)


def describe(cohort: Cohort) -> dict[str, Any]:
    """Groups of a cohort (all, patients, controls), its sites, what its inputs say of the label at each, its tables and the
    planted effects of a synthetic one, for cohort.json.
    """
    everybody = np.ones(len(cohort), dtype=bool)
    groups = {"all": everybody, "patients": cohort.labels == 1, "controls": cohort.labels == 0}
    description: dict[str, Any] = {
        "groups": {name: _group(cohort, chosen) for name, chosen in groups.items() if chosen.any()},
        "sites": {site: _group(cohort, cohort.sites == site) for site in cohort.site_names},
    }
    slopes = {column: {one.site: list(one[1:]) for one in slopes_by_site(cohort, column)} for column in cohort.inputs}
    if any(slopes.values()):
        description["slopes"] = {column: by_site for column, by_site in slopes.items() if by_site}
    if cohort.tables:
        description["tables"] = {name: _table(table) for name, table in cohort.tables.items()}
    if cohort.truth is not None:
        description["planted"] = {name: cohort.truth[name] for name in ("rois", "edges") if name in cohort.truth}
    return description


def _table(table: pd.DataFrame) -> dict[str, Any]:
    """Numbers of a table of brain structure; gaps are missing values of subjects who have the table."""
    has = with_table(table)
    gaps = float(table[has].isna().to_numpy().mean()) if has.any() else 0.0
    constant = int((table.nunique() <= 1).sum())
    about = {"columns": len(table.columns), "constant": constant, "subjects": int(has.sum()), "gaps": gaps}
    return about | {"head_size": head_column(table) or ""}


def with_table(table: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """(subject,) whether at least half of the columns have a value; methods decide about others without the table."""
    return np.asarray(table.notna().mean(axis=1) >= 0.5)


def motion_column(cohort: Cohort) -> Floats | None:
    """Mean head motion of each subject, NaN where missing; None if the cohort has no such column."""
    columns = {str(name).lower(): values for name, values in cohort.phenotypes.items()}  # a copy: read once
    for name in MOTION:
        if name in columns and columns[name].dtype == np.float64 and columns[name].notna().any():
            return np.asarray(columns[name], dtype=np.float64)
    return None


def _group(cohort: Cohort, chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Numbers of one group; what the cohort does not have is left out."""
    labels, tr = cohort.labels[chosen], cohort.tr[chosen]
    group: dict[str, Any] = {
        "subjects": int(chosen.sum()),
        "patients": int((labels == 1).sum()),
        "controls": int((labels == 0).sum()),
    }
    if cohort.values == SERIES:
        lengths = cohort.lengths[chosen]
        group["volumes"] = [int(lengths.min()), int(lengths.max())]
    if not np.isnan(tr).all():
        group["tr"] = [float(np.nanmin(tr)), float(np.nanmax(tr))]
    columns = {str(name).lower(): values.to_numpy() for name, values in cohort.phenotypes.items()}
    for name, values in (("age", columns.get("age")), ("motion", motion_column(cohort))):
        if values is not None and values.dtype == np.float64 and not np.isnan(values[chosen]).all():
            group[name] = [float(value) for value in np.nanquantile(values[chosen], (0.25, 0.5, 0.75))]
    sex = columns.get("sex")
    if sex is not None and sex.dtype == np.float64 and not np.isnan(sex[chosen]).all():
        group["male"], group["sex_known"] = int((sex[chosen] == MALE).sum()), int((~np.isnan(sex[chosen])).sum())
    if cohort.tables:
        group["without"] = {name: int((chosen & ~with_table(table)).sum()) for name, table in cohort.tables.items()}
    return group


def mean_connectomes(cohort: Cohort) -> dict[str, Floats]:
    """Mean Fisher-z FC of patients, of controls and of each site, and the difference within sites, as edges above the diagonal.

    That of connectomes is the mean of the matrices that were given, in Fisher z (of partial correlations, if they hold these).
    The difference is the mean over sites of patients minus controls, weighted by the information of each site
    (patients x controls / subjects). What differs between sites alone, such as the scanner, is not in it. `sites` has a row
    for each site, in the order of `Cohort.site_names`: the mean of its labelled subjects, or NaN if they are fewer than 10.
    Empty unless some site has both classes.
    """
    edges = len(cohort.rois) * (len(cohort.rois) - 1) // 2
    sums, counts = {k: np.zeros(edges) for k in (0, 1)}, {k: 0 for k in (0, 1)}
    difference, weight = np.zeros(edges), 0.0
    of_sites = np.full((len(cohort.site_names), edges), np.nan)
    for row, site in enumerate(cohort.site_names):  # one site at a time, which keeps memory small
        by_class = {k: np.flatnonzero((cohort.sites == site) & (cohort.labels == k)) for k in (0, 1)}
        means = {}
        for k, chosen in by_class.items():
            if len(chosen):
                fc = fc_features(some_of(cohort.scans, chosen.tolist()))
                means[k] = fc.mean(axis=0, dtype=np.float64)
                sums[k] += means[k] * len(chosen)
                counts[k] += len(chosen)
        size = sum(map(len, by_class.values()))
        if size >= LEAST:
            of_sites[row] = sum(means[k] * len(by_class[k]) for k in means) / size
        if len(means) == 2:
            information = len(by_class[0]) * len(by_class[1]) / (len(by_class[0]) + len(by_class[1]))
            difference += information * (means[1] - means[0])
            weight += information
    if not weight:
        return {}
    by_label = {"patients": sums[1] / counts[1], "controls": sums[0] / counts[0]}
    return by_label | {"difference": difference / weight, SITES: of_sites}


def write_connectomes(cohort: Cohort, folder: Path) -> None:
    """Write the mean connectomes of a cohort as half-precision numbers (40 kB for 116 ROIs)."""
    _write(folder, mean_connectomes(cohort) if len(cohort.rois) > 1 and len(cohort) else {})


def copy_connectomes(folder: Path, to: Path, *, sites: bool) -> None:
    """Copy the mean connectomes of a study, with or without those of its sites."""
    _write(to, {name: values for name, values in _read(folder).items() if sites or name != SITES})


def _write(folder: Path, means: Mapping[str, Floats]) -> None:
    tensors = {name: values.astype(np.float16) for name, values in means.items()}
    write_tensors(folder / CONNECTOMES, tensors, {"format": FORMAT})  # of several entries, the order varies between runs


def read_connectomes(folder: Path) -> dict[str, Floats]:
    """(roi, roi) matrices of both classes and of their difference, with a zero diagonal; empty if the folder has none."""
    return {name: square(values) for name, values in _read(folder).items() if name != SITES}


def read_site_connectomes(folder: Path) -> Floats | None:
    """Mean of each site in the order of the sites of cohort.json, as edges (site, edge); None if the folder has none."""
    return _read(folder).get(SITES)


def square(edges: Floats) -> Floats:
    """The symmetric (roi, roi) matrix of edges above the diagonal."""
    n = round((1 + math.sqrt(1 + 8 * edges.size)) / 2)
    matrix = np.zeros((n, n))
    rows, columns = np.triu_indices(n, 1)
    matrix[rows, columns] = matrix[columns, rows] = edges
    return matrix


def _read(folder: Path) -> dict[str, Floats]:
    path = Path(folder) / CONNECTOMES
    tensors = read_tensors(path, FORMAT)[1] if path.is_file() else {}
    if not tensors:
        return {}
    with _refusing_damage(path, "mean connectomes"):
        classes = np.stack([tensors[name] for name in ("patients", "controls", "difference")])  # (class, edge)
        sites = tensors.get(SITES, classes)  # (site, edge)
        square(classes[0])  # raises ValueError unless the edges are those of a matrix
        if not np.isfinite(classes).all() or sites.shape[1:] != classes.shape[1:] or np.isinf(sites).any() or not classes.size:
            raise ValueError("other shapes or numbers")
    return {name: values.astype(np.float64) for name, values in tensors.items()}
