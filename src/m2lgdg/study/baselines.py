"""Baselines without imaging: how well phenotypes, head motion, missing values, head size and the site alone classify subjects.

`m2lgdg audit` shows them after its own table; a method is only useful above them. Each is fitted on source like any method
of the study. Motion and missingness are tested whether or not they are inputs, head size if a table of the cohort has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases.table_columns import head_column
from m2lgdg.data.readers.tables import MOTION
from m2lgdg.methods.linear import Linear
from m2lgdg.metrics import auc, delong_interval
from m2lgdg.model.model import make
from m2lgdg.splits import Fold, leave_one_site_out
from m2lgdg.storage import InputError
from m2lgdg.study.config import Study
from m2lgdg.study.description import with_table
from m2lgdg.study.runner import checked, study_cohort

LEARNER = "phenotype-logistic"
# A leak counts wherever it comes from: sites, classes, or columns that tell the label only together.
POOLED: dict[str, Any] = {"held_phenotypes": False, "penalties": Linear.penalties}
SHUFFLES = 200


@dataclass(frozen=True)
class NoBrainScore:
    """AUC of one baseline over `subjects`, NaN if undefined; `note` is what it uses, or why it is not reported."""

    name: str
    note: str
    columns: tuple[str, ...] = ()
    subjects: int = 0
    auc: float = math.nan
    low: float = math.nan  # of DeLong's 95 % interval, as is `high`
    high: float = math.nan
    chance: float = 0.5  # AUC without any information; higher for site-only, which has seen the labels it predicts


def no_brain_scores(study: Study | dict[str, Any] | str | Path, *, target: str | None = None) -> list[NoBrainScore]:
    """Phenotype-only, motion-only, missingness-only and, of tables, head-size-only at one target (default: the study's first),
    and site-only.
    """
    study = checked(study)
    cohort = study_cohort(study)
    target = target or (study.targets or cohort.site_names)[0]
    (fold,) = leave_one_site_out(cohort, [target])
    fields = {name: value for name, value in study.method.get(LEARNER, {}).items() if name != "tables"}
    scores = [_fitted(name, columns, fold, fields) for name, columns in _tables(cohort)]
    return [*scores, site_only(fold.source.sites, fold.source.labels)]


def _tables(cohort: Cohort) -> Iterator[tuple[str, pd.DataFrame]]:
    """Name and columns of each fitted baseline."""
    table, inputs = cohort.phenotypes, list(cohort.inputs)
    motion = [name for name in table if str(name).lower() in MOTION and table[name].dtype == np.float64]
    yield "phenotype-only", table[inputs]
    yield "motion-only", table[motion]
    lacking = {f"table {name}": ~with_table(each) for name, each in cohort.tables.items()}
    yield "missingness-only", table[inputs].isna().assign(**lacking).astype(np.float64)
    head = {f"{column} ({name})": each[column] for name, each in cohort.tables.items() if (column := head_column(each))}
    if head:
        yield "head-size-only", pd.DataFrame(head)


def _fitted(name: str, table: pd.DataFrame, fold: Fold, fields: dict[str, Any]) -> NoBrainScore:
    """Logistic regression on the columns of a table, fitted on source and scored at the target."""
    source, target = (_with_columns(side, table) for side in (fold.source, fold.target))
    columns = tuple(column for column in source.inputs if source.phenotypes[column].nunique() > 1)
    if not columns:
        return NoBrainScore(name, NOTHING[name])
    if target.phenotypes[list(columns)].isna().all(axis=None):
        return NoBrainScore(name, f"not reported: {fold.site} has no values of {', '.join(columns)}", columns)
    try:
        fitted = make(LEARNER, **POOLED | fields).fit(source.with_inputs(columns, allow_proxies=True))
        proba = fitted.predict_proba(target)[:, 1]
    except InputError as error:  # the audit itself must still be shown
        return NoBrainScore(name, f"not reported: {error}", columns)
    area = auc(target.labels, proba)
    if math.isnan(area):
        return NoBrainScore(name, f"not reported: {fold.site} does not have labels of both classes", columns)
    which = f"which of {', '.join(columns)} are missing" if name == "missingness-only" else ", ".join(columns)
    alike = bool(np.ptp(proba) == 0)
    low, high = (math.nan, math.nan) if alike else delong_interval(target.labels, proba)
    note = f"{which}; fitted on source, scored at {fold.site}{', where all values are equal' * alike}"
    return NoBrainScore(name, note, columns, int((target.labels >= 0).sum()), area, low, high)


NOTHING = {
    "phenotype-only": "not reported: no input phenotype varies in source",
    "motion-only": f"not reported: no column of head motion varies in source (recognised: {', '.join(MOTION)})",
    "missingness-only": "not reported: no input is missing for some source subjects only",
    "head-size-only": "not reported: the head size of tables does not vary in source",
}


def _with_columns(side: Cohort, columns: pd.DataFrame) -> Cohort:
    """One side of a fold with these phenotype columns only, all of them inputs."""
    table = columns.loc[side.subjects.tolist()]
    return side._changed(phenotypes=table, inputs=tuple(map(str, table.columns)), allow_proxies=True)


def site_only(sites: npt.NDArray[np.str_], labels: npt.NDArray[np.int8]) -> NoBrainScore:
    """Pooled AUC of the proportion of patients at each subject's site.

    No score that is constant within sites has a higher AUC. It is never below 0.5, and above 0.5 by chance if sites are
    small: `chance` is its mean over shuffled labels. Leaving each subject out of its own proportion would not help: patients
    would then score lower than controls of their site, and sites with equal proportions would have an AUC near 0.
    """
    _, site = np.unique(sites, return_inverse=True)
    sizes = np.bincount(site)

    def pooled(shuffled: npt.NDArray[np.int8]) -> float:
        return auc(shuffled, (np.bincount(site, weights=shuffled) / sizes)[site])

    draw = np.random.default_rng(0)
    chance = float(np.mean([pooled(draw.permutation(labels)) for _ in range(SHUFFLES)]))
    note = f"pooled AUC over the {len(sizes)} source sites from the site alone; no information at a single target"
    return NoBrainScore("site-only", note, subjects=len(labels), auc=pooled(labels), chance=chance)
