"""Cohorts that show what tables of brain structure are not: head size, or age and sex.

python benchmarks/structure_cohorts.py matched COHORT OUT [YEARS]
    pairs of a patient and a control of the same site and sex, as many as there are with at most YEARS (default 1) between their
    ages, and among these the ones closest in age
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


def pairs(ages: tuple[np.ndarray, np.ndarray], years: float) -> list[tuple[int, int]]:
    """Rows of patients and of controls that belong together."""
    apart = np.abs(ages[0][:, None] - ages[1])  # (patient, control)
    too_far = 1e3  # more than all other costs of a site together, so that the number of pairs comes first
    rows, columns = linear_sum_assignment(np.where(apart <= years, apart, too_far))
    return [(i, j) for i, j in zip(rows, columns, strict=True) if apart[i, j] <= years]


def matched(cohort: Cohort, years: float = 1.0) -> list[int]:
    """Rows of the cohort that are in a pair."""
    age, sex = (cohort.phenotypes[name].to_numpy(dtype=float) for name in ("age", "sex"))
    chosen: list[int] = []
    for site in cohort.site_names:
        for value in np.unique(sex[np.isfinite(sex)]):
            groups = [np.flatnonzero((cohort.sites == site) & (sex == value) & (cohort.labels == label)) for label in (1, 0)]
            patients, controls = (group[np.isfinite(age[group])] for group in groups)
            for i, j in pairs((age[patients], age[controls]), years):
                chosen += [int(patients[i]), int(controls[j])]
    return sorted(chosen)


def head_size(cohort: Cohort) -> Cohort:
    """The cohort with head size as its only table, under a name by which methods do not know and regress it out."""
    blocks = [TableBlock(name, list(table), {}) for name, table in cohort.tables.items()]
    name, column = next((block.name, block.head_column) for block in blocks if block.head_column)
    table = pd.DataFrame({"head": cohort.tables[name][column].to_numpy()}, index=cohort.subjects)
    return dataclasses.replace(cohort, tables={"head": table})


if __name__ == "__main__":
    kind, path, out, *years = sys.argv[1:]
    cohort = Cohort.load(path, in_memory=True)
    chosen = head_size(cohort) if kind == "head-size" else cohort.select(matched(cohort, *map(float, years)))
    age, patient = chosen.phenotypes["age"].to_numpy(dtype=float), chosen.labels == 1
    print(chosen)
    print(f"Mean age of patients {age[patient].mean():.2f}, of controls {age[~patient].mean():.2f}.")
    chosen.save(out)
