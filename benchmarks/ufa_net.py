"""What keeps ufa-net at chance on resting scans: its dense layers see every time point, or its dense graph averages all ROIs?

A smaller network than the published one, which takes hours on a CPU, is trained with and without each of the two, at ABIDE
sites other than NYU and USM. Prints AUC at the target, the best AUC on source-validation subjects, and the last cross-entropy.

Usage: python benchmarks/ufa_net.py COHORT [--sites UCLA_1 PITT] [--seeds 0] [--device auto]
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import m2lgdg
from m2lgdg.metrics import auc
from m2lgdg.splits import leave_one_site_out

SMALLER = {
    **{"length": 100, "channels": (8, 8), "widths": (64, 16), "batch_size": 64, "batches_per_epoch": 10},
    **{"epochs": 30, "warmup": 3, "alignment_start": 15, "learning_rate": 0.1},
}
SETTINGS = {
    "as published, smaller": {},
    "one mean over time": {"time_bins": 1},
    "sparse graph": {"density": 0.1},
    "both": {"time_bins": 1, "density": 0.1},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--sites", nargs="*", default=["UCLA_1", "PITT"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    cohort = m2lgdg.read(options.cohort)
    rows = []
    for seed in options.seeds:
        for fold in leave_one_site_out(cohort.select(cohort.labels >= 0), options.sites):
            for name, fields in SETTINGS.items():
                fitted = m2lgdg.make("ufa-net", **SMALLER | fields).fit(fold.source, seed=seed, device=options.device)
                history = fitted.facts_["history"]
                area = 100 * auc(fold.target.labels, fitted.predict_proba(fold.target)[:, 1])
                row = (name, fold.site, seed, area, 100 * max(one["val_auc"] for one in history), history[-1]["ce"])
                rows.append(row)
                print("{}, {}, seed {}: AUC {:.1f}, validation {:.1f}, cross-entropy {:.3f}".format(*row), flush=True)
    table = pd.DataFrame(rows, columns=["setting", "site", "seed", "AUC", "validation", "cross-entropy"])
    print(table.groupby("setting", sort=False)[["AUC", "validation", "cross-entropy"]].mean().round(2).to_string())
    print(f"Sites: {', '.join(options.sites)}; {len(np.unique(table['seed']))} seeds.")


if __name__ == "__main__":
    main()
