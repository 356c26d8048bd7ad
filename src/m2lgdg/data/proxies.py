"""Whether the values of a phenotype reveal the label, whatever its name is.

`check` reports such columns, and `leakage` fails a study that has one among its inputs. `findings.is_proxy` judges by name.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import auc

Floats = npt.NDArray[np.float64]
FEWEST = 10  # subjects of each class
REVEALING, OF_FEW = 0.35, 0.45  # distance of the AUC from 0.5; the second where chance alone may reach the first
MOST_VALUES = 10  # groups of values, each with a rate of patients of its own


def reveals_label(cohort: Cohort, column: str) -> bool:
    """Whether a numeric column alone tells patients from controls, over all subjects or by its ranks within sites.

    Within sites, because a scale may have other units elsewhere.
    """
    values = cohort.phenotypes[column]
    if values.dtype != np.float64:
        return False
    table = pd.DataFrame({"value": values.to_numpy(), "label": cohort.labels, "site": cohort.sites})
    table = table[np.isfinite(table["value"]) & (table["label"] >= 0)]
    by_site = table.groupby("site")
    both = table[by_site["label"].transform("nunique") == 2]
    ranks = both.groupby("site")["value"].rank(pct=True)
    return _separates(table["value"], table["label"]) or _separates(ranks, both["label"])


def _separates(values: pd.Series[float], labels: pd.Series[int]) -> bool:
    """Whether values rank patients against controls, as they are or by the rate of patients among similar values."""
    counts = np.bincount(labels.to_numpy(dtype=int), minlength=2)
    if counts.min() < FEWEST:
        return False
    chance = np.sqrt((counts.sum() + 1) / (12 * counts.prod()))  # sd of an AUC without any effect
    least = max(REVEALING, min(OF_FEW, 4 * chance))
    # Codes, and values of patients at both ends, rank by the rate of patients of their group.
    groups = min(MOST_VALUES, max(3, len(values) // 20))
    similar = values if values.nunique() <= groups else pd.qcut(values, groups, labels=False, duplicates="drop")
    rates = labels.groupby(similar).transform("mean")
    areas = [auc(labels.to_numpy(), each.to_numpy(dtype=float)) for each in (values, rates)]
    return bool(max(abs(area - 0.5) for area in areas) > least)
