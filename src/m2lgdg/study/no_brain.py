"""What needs no brain: how far phenotypes, motion, missing values and the site alone get at telling patients from controls.

Stands beside `audit`, which tells them with what it found: a method's score is worth what it is above these. Each is fitted
on source like any method of the study; motion and missingness are looked at whether or not they are inputs.
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
from m2lgdg.data.readers.tables import MOTION
from m2lgdg.method import make
from m2lgdg.metrics import auc, delong_interval
from m2lgdg.splits import Fold, leave_one_site_out
from m2lgdg.storage import InputError
from m2lgdg.study.config import Study
from m2lgdg.study.runner import checked, study_cohort

LEARNER = "phenotype-logistic"
SHUFFLES = 200


@dataclass(frozen=True)
class NoBrainScore:
    """One baseline: its AUC over `subjects`, NaN where it cannot be had, and `note` on what it is or why it is not there."""

    name: str
    note: str
    columns: tuple[str, ...] = ()
    subjects: int = 0
    auc: float = math.nan
    low: float = math.nan  # of DeLong's 95 % interval, as is `high`
    high: float = math.nan
    chance: float = 0.5  # what nothing to be told gets: site-only has seen the labels it tells


def no_brain_scores(study: Study | dict[str, Any] | str | Path, *, target: str | None = None) -> list[NoBrainScore]:
    """Phenotype-only, motion-only and missingness-only at one target (the study's first by default), and site-only."""
    study = checked(study)
    cohort = study_cohort(study)
    target = target or (study.targets or cohort.site_names)[0]
    (fold,) = leave_one_site_out(cohort, [target])
    fields = study.method.get(LEARNER, {})
    found = [_fitted(name, known, fold, fields) for name, known in _tables(cohort)]
    return [*found, site_only(fold.source.sites, fold.source.labels)]


def _tables(cohort: Cohort) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name of each baseline that is fitted, and the columns that it may know."""
    table, inputs = cohort.phenotypes, list(cohort.inputs)
    motion = [name for name in table if str(name).lower() in MOTION and table[name].dtype == np.float64]
    yield "phenotype-only", table[inputs]
    yield "motion-only", table[motion]
    yield "missingness-only", table[inputs].isna().astype(np.float64)


def _fitted(name: str, known: pd.DataFrame, fold: Fold, fields: dict[str, Any]) -> NoBrainScore:
    """A logistic regression on some columns, fitted on source and scored at the target."""
    source, target = (_knowing(side, known) for side in (fold.source, fold.target))
    columns = tuple(column for column in source.inputs if source.phenotypes[column].nunique() > 1)
    if not columns:
        return NoBrainScore(name, NOTHING[name])
    if target.phenotypes[list(columns)].isna().all(axis=None):
        return NoBrainScore(name, f"not reported: {fold.site} has no value of {', '.join(columns)}", columns)
    try:
        fitted = make(LEARNER, **fields).fit(source.with_inputs(columns, allow_proxies=True))
        proba = fitted.predict_proba(target)[:, 1]
    except InputError as error:  # what the audit found must still be told
        return NoBrainScore(name, f"not reported: {error}", columns)
    area = auc(target.labels, proba)
    if math.isnan(area):
        return NoBrainScore(name, f"not reported: {fold.site} has no labels of both classes", columns)
    which = f"which of {', '.join(columns)} are missing" if name == "missingness-only" else ", ".join(columns)
    alike = bool(np.ptp(proba) == 0)
    low, high = (math.nan, math.nan) if alike else delong_interval(target.labels, proba)
    note = f"{which}; fitted on source, scored at {fold.site}{', where all are alike' * alike}"
    return NoBrainScore(name, note, columns, int((target.labels >= 0).sum()), area, low, high)


NOTHING = {
    "phenotype-only": "not reported: no phenotype that varies in source is an input",
    "motion-only": f"not reported: no phenotype that varies in source tells motion (known are {', '.join(MOTION)})",
    "missingness-only": "not reported: no input is missing for some source subjects and there for others",
}


def _knowing(side: Cohort, known: pd.DataFrame) -> Cohort:
    """One side of a fold with nothing but these columns, all of them inputs."""
    table = known.loc[side.subjects.tolist()]
    return side._changed(phenotypes=table, inputs=tuple(map(str, table.columns)), allow_proxies=True)


def site_only(sites: npt.NDArray[np.str_], labels: npt.NDArray[np.int8]) -> NoBrainScore:
    """The AUC, over all subjects together, of the share of patients at each subject's site.

    No score that is the same for all of a site gets more. It is never below 0.5, and above it by chance where sites are small:
    `chance`, its mean over shuffled labels, says by how much. Leaving each subject out of its share would be no cure: patients
    would then have a lower share than controls of their own site, and sites of equal shares an AUC near 0.
    """
    _, place = np.unique(sites, return_inverse=True)
    sizes = np.bincount(place)

    def pooled(these: npt.NDArray[np.int8]) -> float:
        return auc(these, (np.bincount(place, weights=these) / sizes)[place])

    draw = np.random.default_rng(0)
    chance = float(np.mean([pooled(draw.permutation(labels)) for _ in range(SHUFFLES)]))
    note = f"what a pooled AUC over the {len(sizes)} source sites would get from knowing the site alone; nothing at one target"
    return NoBrainScore("site-only", note, subjects=len(labels), auc=pooled(labels), chance=chance)
