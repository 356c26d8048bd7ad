"""Connectomes against the series they were made from, and the floor of their eigenvalues in tangent space.

`same` fits linear methods at every site left out, on series and on `to_connectomes()`, and prints the largest difference of a
probability. `floor` prints the mean AUC over left-out sites of `tangent-ridge` for values of `LEAST_EIGENVALUE`.

python benchmarks/connectome_methods.py same COHORT [METHOD ...]
python benchmarks/connectome_methods.py floor COHORT [SITE ...]    # without these sites
"""

from __future__ import annotations

import sys

import numpy as np

from m2lgdg import Cohort, connectivity, leave_one_site_out, make, read
from m2lgdg.connectivity import sharing_features
from m2lgdg.methods import linear
from m2lgdg.metrics import auc

SAME = ("fc-logistic", "fc-svm", "fc-adaptive", "tangent-pearson-ridge", "combat-logistic", "mida")
FLOORS = (0.02, 0.05, 0.1, 0.2, 0.4)


def probabilities(cohort: Cohort, name: str) -> dict[str, np.ndarray]:
    """Probabilities of the subjects of each site, by a fit on the others."""
    with sharing_features(cohort.scans):
        folds = leave_one_site_out(cohort)
        return {fold.site: make(name).fit(fold.source).predict_proba(fold.target)[:, 1] for fold in folds}


def same(cohort: Cohort, names: tuple[str, ...]) -> None:
    """Print the largest difference between both forms of a cohort, of each method."""
    forms = cohort, cohort.to_connectomes()
    for name in names:
        first, second = (probabilities(form, name) for form in forms)
        most = max(float(np.abs(first[site] - second[site]).max()) for site in first)
        print(f"{name}: {most:.1e} at most, {len(first)} sites", flush=True)


def floor(cohort: Cohort, left_out: tuple[str, ...]) -> None:
    """Print the AUC of each setting; if the cohort has series, also with their Ledoit-Wolf covariances."""
    cohort = cohort.select(~np.isin(cohort.sites, left_out))
    settings: list[tuple[str, Cohort, float]] = [("Ledoit-Wolf", cohort, 0.0)] if cohort.values == "series" else []
    matrices = cohort.to_connectomes()
    settings += [(f"{value}", matrices, value) for value in FLOORS]
    for name, form, value in settings:
        connectivity.LEAST_EIGENVALUE = value
        for kept in (linear._REFERENCES, linear._TANGENTS, linear._ROWS, linear._BLOCKS):  # known by the cohort alone
            kept.results.clear()
        found = probabilities(form, "tangent-ridge")
        scores = [auc(form.labels[form.sites == site], proba) for site, proba in found.items()]
        print(f"{name}: AUC {np.mean(scores):.4f}, sd over {len(scores)} sites {np.std(scores, ddof=1):.4f}", flush=True)


if __name__ == "__main__":
    what, path, *rest = sys.argv[1:]
    found = read(path)
    floor(found, tuple(rest)) if what == "floor" else same(found, tuple(rest) or SAME)
