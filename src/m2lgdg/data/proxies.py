"""Whether the values of a phenotype, or of a column of a table, reveal the label, whatever its name is.

`check` reports such columns, and `leakage` fails a study that has one among its inputs. `findings.is_proxy` judges by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import auc

Floats = npt.NDArray[np.float64]
FEWEST = 10  # subjects of each class
REVEALING, OF_FEW = 0.35, 0.45  # distance of the AUC from 0.5; the second where chance alone may reach the first
RIDGE = 0.01  # penalty of a whole table, of the mean squared norm of its rows
MOST_VALUES = 10  # groups of values, each with a rate of patients of its own


def revealing_columns(cohort: Cohort, columns: Iterable[str]) -> list[str]:
    """Those of the phenotypes that are numbers and alone tell patients from controls."""
    table = cohort.phenotypes
    return [one for one in columns if table[one].dtype == np.float64 and _reveals_label(cohort, table[one])]


def _reveals_label(cohort: Cohort, values: pd.Series[float]) -> bool:
    """Over all subjects, or by ranks within sites, because a scale may have other units elsewhere."""
    known = np.isfinite(values.to_numpy()) & (cohort.labels >= 0)
    if min((cohort.labels[known] == label).sum() for label in (0, 1)) < FEWEST:
        return False
    table = pd.DataFrame({"value": values.to_numpy(), "label": cohort.labels, "site": cohort.sites})[known]
    by_site = table.groupby("site")
    both = table[by_site["label"].transform("nunique") == 2]
    ranks = both.groupby("site")["value"].rank(pct=True)
    return _separates(table["value"], table["label"]) or _separates(ranks, both["label"])


def _separates(values: pd.Series[float], labels: pd.Series[int]) -> bool:
    """Whether values rank patients against controls, as they are or by the rate of patients among similar values."""
    counts = np.bincount(labels.to_numpy(dtype=int), minlength=2)
    if counts.min() < FEWEST:
        return False
    known = labels.to_numpy(dtype=int)
    areas = auc(known, values.to_numpy()), _area_of_rates(values.to_numpy(), known)
    return bool(max(abs(area - 0.5) for area in areas) > least_distance(counts))


def _area_of_rates(values: Floats, labels: npt.NDArray[Any]) -> float:
    """AUC of the rate of patients among similar values: that of codes, and of values with patients at both ends."""
    groups = min(MOST_VALUES, max(3, len(values) // 20))
    distinct, similar = np.unique(values, return_inverse=True)
    if len(distinct) > groups:
        similar = np.searchsorted(np.unique(np.quantile(values, np.arange(1, groups) / groups)), values)
    counts = np.bincount(2 * similar + labels, minlength=2 * (similar.max() + 1)).reshape(-1, 2)  # (group, control and patient)
    counts = counts[counts.sum(axis=1) > 0]
    controls, patients = counts[np.argsort(counts[:, 1] / counts.sum(axis=1))].T
    below = np.cumsum(controls) - controls / 2
    return float(patients @ below / (patients.sum() * controls.sum()))


def least_distance(counts: npt.NDArray[Any]) -> Any:
    """Distance from 0.5 at which an AUC is that of a proxy; `counts` are (2, ...) controls and patients."""
    chance = np.sqrt((counts.sum(axis=0) + 1) / (12 * counts.prod(axis=0)))  # sd of an AUC without any effect
    return np.maximum(REVEALING, np.minimum(OF_FEW, 4 * chance))


def separating_columns(table: pd.DataFrame, labels: npt.NDArray[Any], sites: npt.NDArray[Any]) -> list[str]:
    """Columns of a table that tell patients from controls, over all subjects or within sites; the clearest first."""
    known = labels >= 0
    if min((labels == label).sum() for label in (0, 1)) < FEWEST:
        return []
    table, labels, sites = table[known].reset_index(drop=True), labels[known], sites[known]
    both = pd.Series(labels).groupby(sites).transform("nunique").to_numpy() == 2
    within = table[both].groupby(sites[both]).rank(pct=True)
    distances = [_distances(table, labels), _distances(within, labels[both])]
    largest = pd.concat(distances, axis=1).max(axis=1)
    return [str(name) for name in largest[largest > 0].sort_values(ascending=False, kind="stable").index]


def separates_together(table: pd.DataFrame, labels: npt.NDArray[Any], sites: npt.NDArray[Any]) -> bool:
    """Whether all columns of a table together tell patients from controls, though each alone may not.

    By ridge regression within sites, fitted without a fifth of the subjects at a time. An honest table may do as much where
    each column alone is a strong marker, so that this is less than `separating_columns`.
    """
    known = labels >= 0
    table, labels, sites = table[known].reset_index(drop=True), labels[known], sites[known]
    counts = np.array([(labels == label).sum() for label in (0, 1)])
    if counts.min() < FEWEST or not len(table.columns):
        return False
    centred = table - table.groupby(sites).transform("median")
    spread = centred.abs().median()
    spread = spread.where(spread > 0, centred.std())  # most values may be the same
    scaled = (centred / spread.where(spread > 0)).clip(-10, 10)
    rows = (scaled - scaled.groupby(sites).transform("mean")).fillna(0.0).to_numpy()  # (subject, column)
    kernel, signs = rows @ rows.T, np.where(labels == 1, 1.0, -1.0)
    fold, decision = np.random.default_rng(0).permutation(len(labels)) % 5, np.zeros(len(labels))
    ridge = np.trace(kernel) / len(kernel) * RIDGE + 1e-9
    for left in range(5):
        here = fold == left
        inside = kernel[np.ix_(~here, ~here)] + ridge * np.eye(int((~here).sum()))
        decision[here] = kernel[np.ix_(here, ~here)] @ np.linalg.solve(inside, signs[~here] - signs[~here].mean())
    return bool(auc(labels, decision) - 0.5 > OF_FEW)


def _distances(table: pd.DataFrame, labels: npt.NDArray[Any]) -> pd.Series[float]:
    """(column,) distance of the AUC of each column from 0.5, and 0 if it is not that of a proxy."""
    present = table.notna().to_numpy()
    counts = np.stack([(present & (labels == label)[:, None]).sum(axis=0) for label in (0, 1)])  # (2, column)
    enough = counts.min(axis=0) >= FEWEST
    ranks = table.rank().fillna(0.0).to_numpy()[labels == 1].sum(axis=0)  # (column,)
    with np.errstate(invalid="ignore", divide="ignore"):
        areas = (ranks - counts[1] * (counts[1] + 1) / 2) / counts.prod(axis=0)
        distance, least = np.abs(areas - 0.5), least_distance(counts)
    values = table.to_numpy(dtype=np.float64)
    for i in np.flatnonzero(enough & (distance <= least)):
        distance[i] = max(distance[i], _area_of_rates(values[present[:, i], i], labels[present[:, i]]) - 0.5)
    return pd.Series(np.where(enough & (distance > least), distance, 0.0), index=table.columns)
