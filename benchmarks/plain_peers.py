"""`fc-svm` and `tangent-logistic` against a plain script with nilearn and scikit-learn, some sites left out, in one run.

Usage: python benchmarks/plain_peers.py COHORT [--sites 2] [--jobs 1] [--only fc-svm]
The script is what a colleague would write: features of all subjects once by `ConnectivityMeasure`, then for each site left out
a standardised linear model whose penalty is chosen by `GridSearchCV` on five groups of sites, with the penalties of our
methods. Its tangent reference is fitted on all subjects, the left-out site included, which is a leak that ours does not have.
Prints a JSON line for each method, with both mean AUCs.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from nilearn.connectome import ConnectivityMeasure
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, GroupKFold, LeaveOneGroupOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import m2lgdg
from m2lgdg.cohort import Cohort

PENALTIES = m2lgdg.make("fc-svm").penalties
MODELS = {
    "fc-svm": ("correlation", SVC(kernel="linear"), "svc__C"),
    "tangent-logistic": ("tangent", LogisticRegression(max_iter=2000), "logisticregression__C"),
}


def plain(cohort, name, chosen, jobs):
    """Mean AUC of the script at the chosen sites."""
    kind, model, field = MODELS[name]
    measure = ConnectivityMeasure(kind=kind, vectorize=True, discard_diagonal=kind == "correlation", standardize=False)
    series = [(one - one.mean(axis=0)) / np.where(one.std(axis=0) > 0, one.std(axis=0), 1) for one in cohort.series]
    features = measure.fit_transform(series)
    if kind == "correlation":
        features = np.arctanh(np.clip(features, -0.999, 0.999))
    values = []
    for train, test in LeaveOneGroupOut().split(features, cohort.labels, cohort.sites):
        if cohort.sites[test[0]] not in chosen:
            continue
        # the mean squared norm of standardised features is their number
        grid = {field: [1 / (penalty * features.shape[1]) for penalty in PENALTIES]}
        search = GridSearchCV(make_pipeline(StandardScaler(), model), grid, cv=GroupKFold(5), scoring="roc_auc", n_jobs=jobs)
        search.fit(features[train], cohort.labels[train], groups=cohort.sites[train])
        values.append(roc_auc_score(cohort.labels[test], search.decision_function(features[test])))
    return float(np.mean(values))


def ours(path, name, chosen, jobs):
    with tempfile.TemporaryDirectory() as folder:
        study = {"cohort": str(path), "methods": [name], "targets": chosen, "seeds": [0]}
        m2lgdg.run_study(study, folder, jobs=jobs)
        table = pd.read_csv(Path(folder) / "predictions.csv")
    return float(np.mean([roc_auc_score(part["label"], part["proba"]) for _, part in table.groupby("target")]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    cohort = Cohort.load(options.cohort)
    names = cohort.site_names
    chosen = names[:: max(len(names) // options.sites, 1)][: options.sites] if options.sites else names
    for name in options.only:
        reported = {"method": name, "sites": len(chosen)}
        for side, work in (
            ("plain", lambda name=name: plain(cohort, name, chosen, options.jobs)),
            ("ours", lambda name=name: ours(options.cohort.resolve(), name, chosen, options.jobs)),
        ):
            start = time.perf_counter()
            reported[f"{side}_auc"] = round(100 * work(), 2)
            reported[f"{side}_s"] = round(time.perf_counter() - start, 1)
        print(json.dumps(reported | {"times faster": round(reported["plain_s"] / reported["ours_s"], 2)}), flush=True)


if __name__ == "__main__":
    main()
