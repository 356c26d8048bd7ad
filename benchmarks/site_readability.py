"""Does M²LG-DG find the planted signal, and does the cross-site contrast make the site harder to read?

On the synthetic `demo` cohort: AUC at each held-out site beside phenotype-only and chance, and the accuracy with which a
cross-validated linear probe reads the site from the fused representation of source subjects, with and without the contrast.
Usage: python benchmarks/site_readability.py [--device cuda] [--variant small] [--set precision=tf32] [--targets Aarhus Cork]
[--seeds 2] [--jobs 4]; prints one JSON line.
"""

import argparse
import json
import time

import numpy as np
from joblib import Parallel, delayed
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import m2lgdg
from m2lgdg.config import method_fields
from m2lgdg.metrics import auc


def probe(fused, sites):
    """Accuracy of a linear probe for the site over five folds; chance is the largest site's share."""
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return float(
        cross_val_score(make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)), fused, sites, cv=folds).mean()
    )


def one(site, seed, fields, device):
    import torch

    torch.set_num_threads(1)
    (fold,) = m2lgdg.leave_one_site_out(m2lgdg.make_cohort("demo"), [site])
    start = time.monotonic()
    fitted = m2lgdg.make("m2lgdg", **fields).fit(fold.source, seed=seed, device=device)
    seconds = time.monotonic() - start
    proba = fitted.predict_proba(fold.target)[:, 1]
    return {
        "auc": auc(fold.target.labels, proba),
        "site": probe(fitted.represent(fold.source), fold.source.sites),
        "chance": max(np.mean(fold.source.sites == name) for name in fold.source.site_names),
        "one_class": bool((proba >= 0.5).all() or (proba < 0.5).all()),
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", default=None)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    base = method_fields("m2lgdg", options.variant, options.set)
    cohort = m2lgdg.make_cohort("demo")
    cells = [(site, seed) for site in options.targets or cohort.site_names for seed in range(options.seeds)]
    result = {"variant": options.variant or "paper size", "device": options.device, "trainings": len(cells)}
    kinds = {"with_contrast": {}, "without_contrast": {"contrastive_weight": 0.0}}
    both = [(*cell, base | changes, options.device) for changes in kinds.values() for cell in cells]
    done = Parallel(n_jobs=options.jobs)(delayed(one)(*cell) for cell in both)
    for i, name in enumerate(kinds):
        runs = done[i * len(cells) : (i + 1) * len(cells)]
        result[name] = {
            "auc": [round(run["auc"], 3) for run in runs],
            "auc_mean": round(float(np.mean([run["auc"] for run in runs])), 3),
            "auc_sd": round(float(np.std([run["auc"] for run in runs], ddof=1)), 3),
            "site_probes": [round(run["site"], 3) for run in runs],
            "site_probe": round(float(np.mean([run["site"] for run in runs])), 3),
            "site_chance": round(float(np.mean([run["chance"] for run in runs])), 3),
            "one_class_runs": sum(run["one_class"] for run in runs),
            "seconds_per_training": round(float(np.mean([run["seconds"] for run in runs])), 1),
        }
    for name in ("phenotype-logistic", "prior"):
        areas = []
        for fold in m2lgdg.leave_one_site_out(cohort, options.targets):
            areas.append(auc(fold.target.labels, m2lgdg.make(name).fit(fold.source).predict_proba(fold.target)[:, 1]))
        result[name] = round(float(np.mean(areas)), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
