"""Settings of m2lgdg-connectome compared at held-out ABIDE sites other than NYU, USM, UM_1 and YALE.

The 16 other sites are in five folds of whole sites. Each fold is the target once; source is everyone else, so the four sites
are in source only and are never scored. One CSV row per setting, seed and site; what the file has already is not trained again.
A setting is a name and fields of the method as JSON; "method" among them names another method.

connectome-settings.csv next to this file has the settings compared when the defaults were chosen (docs/beyond.md). Its fields
are differences from the first recipe: hidden 64, readout_dropout 0.5, connectivity fc, scaling_power 1, edge_dropout 0,
learning_rate 3e-4, weight_decay 0.05, 40 epochs, four members, and crops of 70 % of the series (`crop`). The method no longer
has `crop`, `site_offsets` and `mix` (the mean with another subject of the class). Fields in connectome-shorter.csv are
differences from the defaults; it has three seeds.

Usage: python benchmarks/connectome_settings.py COHORT --out FILE.csv [--settings FILE.json] [--seeds 0 1] [--device cuda]
       [--part 0/1]; with --part i/n, process i of n writes FILE-i.csv. --summary FILE.csv ... prints mean AUC by setting.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

import m2lgdg
from m2lgdg.connectivity import keeping_features
from m2lgdg.metrics import auc

UNSCORED = ("NYU", "USM", "UM_1", "YALE")
FOLDS = 5
SETTINGS = {
    "default": {},
    "without phenotypes": {"phenotypes": False},
    "one member": {"members": 1},
    "eight members": {"members": 8},
    "20 epochs": {"epochs": 20, "warmup": 3},
    "64 wide": {"hidden": 64},
    "FC of all time points": {"connectivity": "fc"},
    "edges by sd": {"scaling": "sd"},
    "power 1": {"scaling_power": 1.0},
    "power 2": {"scaling_power": 2.0},
    "no edge dropout": {"edge_dropout": 0.0},
    "no contrast": {"contrastive_weight": 0.0},
    "centred by source": {"centring": "source"},
    "connectome-adaptive with phenotypes": {"method": "connectome-adaptive", "phenotypes": True},
}
COLUMNS = ("setting", "fields", "fold", "seed", "site", "auc")


def folds_of(cohort):
    """Sites of each fold: by size, dealt in snake order, so that folds have about as many subjects."""
    names = [site for site in cohort.site_names if site not in UNSCORED]
    names.sort(key=lambda site: (-(cohort.sites == site).sum(), site))
    order = [*range(FOLDS), *reversed(range(FOLDS))]
    return [[site for i, site in enumerate(names) if order[i % len(order)] == fold] for fold in range(FOLDS)]


def rows_of(cohort, sites, fields, seed, device):
    """AUC at each site of a fold, after a fit on all others."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    method = m2lgdg.make(fields.pop("method", "m2lgdg-connectome"), **fields)
    here = np.isin(cohort.sites, sites)
    fitted = method.fit(cohort.select(~here), seed=seed, device=device)
    target = cohort.select(here)
    proba = fitted.predict_proba(target)[:, 1]
    parts = {site: target.sites == site for site in sites}
    return [(site, round(100 * auc(target.labels[part], proba[part]), 2)) for site, part in parts.items()]


def train(cohort, options):
    settings = json.loads(options.settings.read_text()) if options.settings else SETTINGS
    part, parts = map(int, options.part.split("/"))
    out = options.out if parts == 1 else options.out.with_stem(f"{options.out.stem}-{part}")
    table = pd.read_csv(out) if out.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(zip(table["setting"], table["fold"], table["seed"], strict=True))
    jobs = [(name, fold, seed) for seed in options.seeds for name in settings for fold in range(FOLDS)]
    folds = folds_of(cohort)
    with keeping_features(cohort.series):
        for name, fold, seed in [job for job in jobs[part::parts] if job not in done]:
            fields = settings[name]
            results = rows_of(cohort, folds[fold], dict(fields), seed, options.device)
            lines = pd.DataFrame([(name, json.dumps(fields), fold, seed, *row) for row in results], columns=COLUMNS)
            lines.to_csv(out, mode="a", header=not out.exists(), index=False)
            print(f"{name}, fold {fold}, seed {seed}: {lines['auc'].mean():.2f}", flush=True)


def summary(paths):
    """Mean over sites by setting, mean and sd over seeds; only seeds that have every fold."""
    table = pd.concat([pd.read_csv(path) for path in paths])
    whole = table.groupby(["setting", "seed"])["fold"].transform("nunique") == FOLDS
    means = table[whole].groupby(["setting", "seed"])["auc"].mean().groupby("setting").agg(["count", "mean", "std"])
    print(means.sort_values("mean", ascending=False).round(2).to_string())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("connectome-settings.csv"))
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--summary", type=Path, nargs="*")
    options = parser.parse_args()
    if options.summary:
        return summary(options.summary)
    if options.cohort is None:
        parser.error("name a cohort, or --summary FILE.csv ...")
    cohort = m2lgdg.read(options.cohort)
    return train(cohort.select(cohort.labels >= 0), options)


if __name__ == "__main__":
    main()
