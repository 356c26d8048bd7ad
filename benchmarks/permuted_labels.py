"""Mean AUC at left-out sites when labels are permuted within each site: what chance gives, and how far it reaches.

python benchmarks/permuted_labels.py COHORT OUT.csv PERMUTATIONS METHOD[:VARIANT] ...
"""

import sys

import numpy as np
import pandas as pd

from m2lgdg import Cohort, leave_one_site_out, make
from m2lgdg.metrics import auc


def permuted(cohort: Cohort, seed: int) -> Cohort:
    """The cohort with labels permuted within sites, so that each keeps its proportion of patients."""
    rng, labels = np.random.default_rng(seed), cohort.labels.copy()
    for site in cohort.site_names:
        rows = np.flatnonzero(cohort.sites == site)
        labels[rows] = rng.permutation(labels[rows])
    return cohort._changed(labels=labels)


def mean_auc(cohort: Cohort, named: str) -> float:
    """Mean AUC in percent over sites, each left out once."""
    name, _, variant = named.partition(":")
    areas = []
    for fold in leave_one_site_out(cohort):
        fitted = make(name, variant or None).fit(fold.source)
        areas.append(100 * auc(fold.target.labels, fitted.predict_proba(fold.target)[:, 1]))
    return float(np.mean(areas))


if __name__ == "__main__":
    path, out, count, *methods = sys.argv[1:]
    cohort = Cohort.load(path)
    rows = [(seed, name, mean_auc(permuted(cohort, seed), name)) for seed in range(int(count)) for name in methods]
    table = pd.DataFrame(rows, columns=["permutation", "method", "AUC"])
    table.to_csv(out, index=False, float_format="%.2f")
    print(table.groupby("method")["AUC"].agg(["mean", "std", "min", "max"]).round(1).to_string())
