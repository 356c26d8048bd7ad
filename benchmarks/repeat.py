"""Cells of a committed study run again, here: how far the probabilities and the AUC are from those in its predictions.csv.

A linear model must give the same up to rounding; a network trained on another device, or twice on a GPU, takes another path,
and only its AUC can be compared with what other seeds give. Usage: python benchmarks/repeat.py RESULTS COHORT METHOD ...
[--variant phenotypes] [--targets NYU USM] [--seed 0] [--device cpu]; one JSON line a cell.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

import m2lgdg
from m2lgdg.metrics import auc


def repeated(results, cohort, name, variant, target, seed, device):
    """The report of one cell: both AUCs, the spread of the committed one over seeds, and the largest difference."""
    study = json.loads((results / "study.json").read_text())
    table = pd.read_csv(results / "predictions.csv", dtype={"variant": str}, keep_default_na=False)
    own = table[(table["method"] == name) & (table["variant"] == variant) & (table["target"] == target)]
    kept = own[own["seed"] == seed].set_index("subject")
    fields = study["method"].get(name, {}) | dict(m2lgdg.METHODS[name].variants.get(variant, {}))
    (fold,) = m2lgdg.leave_one_site_out(cohort.with_inputs(study["inputs"]), [target])
    fitted = m2lgdg.make(name, **fields).fit(fold.source, seed=seed, device=device)
    here = kept.loc[fold.target.subjects]
    proba = fitted.predict_proba(fold.target)[:, 1]
    areas = [auc(part["label"].to_numpy(), part["proba"].to_numpy()) for _, part in own.groupby("seed")]
    return {
        "cell": [name, variant, target, seed],
        "auc": round(auc(fold.target.labels, proba), 4),
        "committed": round(auc(here["label"].to_numpy(), here["proba"].to_numpy()), 4),
        "seeds": [round(min(areas), 4), round(max(areas), 4)],
        "largest_difference": float(np.abs(proba - here["proba"].to_numpy()).max()),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--variant", default="")
    parser.add_argument("--targets", nargs="+", default=["NYU", "USM"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    cohort = m2lgdg.read(asked.cohort)
    for name in asked.methods:
        for target in asked.targets:
            print(
                json.dumps(repeated(asked.results, cohort, name, asked.variant, target, asked.seed, asked.device)), flush=True
            )


if __name__ == "__main__":
    main()
