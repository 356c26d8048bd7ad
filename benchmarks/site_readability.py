"""Does M²LG-DG find the planted signal, and does the cross-site contrast make the site harder to read?

On the synthetic `demo` cohort with a weaker effect: AUC at each held-out site beside phenotype-only and chance, and the
accuracy with which a cross-validated linear probe reads the site from the fused representation of source subjects, at several
weights of the contrast (0 is none). A representation of more dimensions lets a probe read more of anything, so their effective
number, and how well the probe reads the label, stand beside it.
Usage: python benchmarks/site_readability.py [--weights 0 0.1 0.5] [--device cuda] [--variant small] [--set precision=tf32]
[--targets Aarhus Cork] [--seeds 2] [--jobs 4]; prints one JSON line a weight.
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
from m2lgdg.metrics import auc
from m2lgdg.study.config import method_fields

HARDER = {"n_disease_rois": 24, "roi_effect": 2.0}  # than the demo's own effect, which a laptop's network finds in a minute


def probe(fused, sites):
    """Accuracy of a linear probe over five folds; for sites, chance is the largest one's share."""
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return float(
        cross_val_score(make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)), fused, sites, cv=folds).mean()
    )


def dimensions(fused):
    """Effective number of dimensions: (sum of the covariance's eigenvalues)^2 over the sum of their squares."""
    spread = np.linalg.eigvalsh(np.cov(fused.T))
    return float(spread.sum() ** 2 / (spread**2).sum())


def one(site, seed, fields, device):
    import torch

    torch.set_num_threads(1)
    (fold,) = m2lgdg.leave_one_site_out(m2lgdg.make_cohort("demo", **HARDER), [site])
    start = time.monotonic()
    fitted = m2lgdg.make("m2lgdg", **fields).fit(fold.source, seed=seed, device=device)
    seconds = time.monotonic() - start
    proba = fitted.predict_proba(fold.target)[:, 1]
    fused = fitted.represent(fold.source)
    return {
        "auc": auc(fold.target.labels, proba),
        "site": probe(fused, fold.source.sites),
        "label": probe(fused, fold.source.labels),
        "dimensions": dimensions(fused),
        "epoch": fitted.facts_["best_epoch"],
        "chance": max(np.mean(fold.source.sites == name) for name in fold.source.site_names),
        "one_class": bool((proba >= 0.5).all() or (proba < 0.5).all()),
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", default=None)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--weights", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    base = method_fields("m2lgdg", options.variant, options.set)
    cohort = m2lgdg.make_cohort("demo", **HARDER)
    cells = [(site, seed) for site in options.targets or cohort.site_names for seed in range(options.seeds)]
    grid = [(*cell, base | {"contrastive_weight": weight}, options.device) for weight in options.weights for cell in cells]
    done = Parallel(n_jobs=options.jobs)(delayed(one)(*cell) for cell in grid)
    for i, weight in enumerate(options.weights):
        runs = done[i * len(cells) : (i + 1) * len(cells)]
        line = {"variant": options.variant or "paper size", "contrastive_weight": weight, "trainings": len(runs)}
        for key in ("auc", "site", "label", "dimensions", "epoch", "chance", "seconds"):
            values = [run[key] for run in runs]
            line |= {key: round(float(np.mean(values)), 3), f"{key}_each": [round(float(value), 3) for value in values]}
        print(json.dumps(line | {"one_class_runs": sum(run["one_class"] for run in runs)}))
    for name in ("phenotype-logistic", "prior"):
        areas = []
        for fold in m2lgdg.leave_one_site_out(cohort, options.targets):
            areas.append(auc(fold.target.labels, m2lgdg.make(name).fit(fold.source).predict_proba(fold.target)[:, 1]))
        print(json.dumps({"method": name, "auc": round(float(np.mean(areas)), 3)}))


if __name__ == "__main__":
    main()
