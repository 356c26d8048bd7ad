"""Cohorts that show what a classifier does not live on: head size, age and sex, or IQ.

python benchmarks/structure_cohorts.py matched COHORT OUT [COLUMN [APART]]
    pairs of a patient and a control of the same site and sex, as many as there are with at most APART (default 1) between their
    values of COLUMN (default age), and among these the closest
python benchmarks/structure_cohorts.py head-size COHORT OUT
    all subjects, with head size as their only table
"""

import dataclasses
import sys

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment

from m2lgdg import Cohort
from m2lgdg.methods.tables import TableBlock


def pairs(values: tuple[np.ndarray, np.ndarray], limit: float) -> list[tuple[int, int]]:
    """Rows of patients and of controls that belong together."""
    apart = np.abs(values[0][:, None] - values[1])  # (patient, control)
    too_far = 1e3  # more than all other costs of a site together, so that the number of pairs comes first
    rows, columns = linear_sum_assignment(np.where(apart <= limit, apart, too_far))
    return [(i, j) for i, j in zip(rows, columns, strict=True) if apart[i, j] <= limit]


def matched(cohort: Cohort, column: str = "age", limit: float = 1.0) -> list[int]:
    """Rows of the cohort that are in a pair."""
    value, sex = (cohort.phenotypes[name].to_numpy(dtype=float) for name in (column, "sex"))
    chosen: list[int] = []
    for site in cohort.site_names:
        for one in np.unique(sex[np.isfinite(sex)]):
            groups = [np.flatnonzero((cohort.sites == site) & (sex == one) & (cohort.labels == label)) for label in (1, 0)]
            patients, controls = (group[np.isfinite(value[group])] for group in groups)
            for i, j in pairs((value[patients], value[controls]), limit):
                chosen += [int(patients[i]), int(controls[j])]
    return sorted(chosen)


def head_size(cohort: Cohort) -> Cohort:
    """The cohort with head size as its only table, under a name by which methods do not know and regress it out."""
    blocks = [TableBlock(name, list(table), {}) for name, table in cohort.tables.items()]
    name, column = next((block.name, block.head_column) for block in blocks if block.head_column)
    table = pd.DataFrame({"head": cohort.tables[name][column].to_numpy()}, index=cohort.subjects)
    return dataclasses.replace(cohort, tables={"head": table})


if __name__ == "__main__":
    kind, path, out, *how = sys.argv[1:]
    column, limit = (*how, *("age", "1")[len(how) :])
    cohort = Cohort.load(path, in_memory=True)
    chosen = head_size(cohort) if kind == "head-size" else cohort.select(matched(cohort, column, float(limit)))
    values, patient = chosen.phenotypes[column].to_numpy(dtype=float), chosen.labels == 1
    print(chosen)
    print(f"Mean {column} of patients {values[patient].mean():.2f}, of controls {values[~patient].mean():.2f}.")
    chosen.save(out)
