"""Two methods at the same left-out sites: mean AUC, a paired t-test over sites, and a bootstrap over subjects.

The bootstrap draws subjects inside each site and class, the same for both methods. Probabilities are averaged over seeds.
Tables are the predictions.csv of one or more studies. Usage: python benchmarks/paired.py FIRST SECOND TABLE ... with methods as
fc-svm or, in a variant, fc-svm/phenotypes; one JSON line.
"""

import argparse
import json

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

from m2lgdg.metrics import auc, calibration, delong_test

DRAWS = 2000


def compared(first, second, seed=0):
    """What is said of two tables of the same subjects: subject, label, target, proba."""
    second = second.set_index("subject").loc[first["subject"]].reset_index()
    label, target = first["label"].to_numpy(int), first["target"].to_numpy()
    scores = first["proba"].to_numpy(float), second["proba"].to_numpy(float)
    sites, rng = sorted(set(target)), np.random.default_rng(seed)
    here = {site: [np.flatnonzero((target == site) & (label == y)) for y in (0, 1)] for site in sites}

    def areas(rows_of):
        return np.array([[auc(label[rows_of(site)], score[rows_of(site)]) for score in scores] for site in sites])

    whole = areas(lambda site: np.concatenate(here[site]))  # (site, method)
    drawn = []
    for _ in range(DRAWS):
        rows = {site: np.concatenate([rng.choice(one, len(one)) for one in here[site]]) for site in sites}
        drawn.append(float(np.subtract(*areas(rows.__getitem__).mean(axis=0))))
    reported = {
        "sites": len(sites),
        "mean_auc": whole.mean(axis=0).round(4).tolist(),
        "better_at": int((whole[:, 0] > whole[:, 1]).sum()),
        "p_over_sites": round(float(ttest_rel(*whole.T).pvalue), 5),
        "difference_95": np.percentile(drawn, [2.5, 97.5]).round(4).tolist(),
        "pooled_slope": [round(calibration(label, score)[0], 3) for score in scores],
    }
    for site in ("NYU", "USM"):
        rows = target == site
        if rows.any():
            reported[f"delong_{site}"] = round(float(delong_test(label[rows], *(score[rows] for score in scores))[1]), 4)
    return reported


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("tables", nargs="+")
    options = parser.parse_args()
    table = pd.concat([pd.read_csv(path, keep_default_na=False) for path in options.tables])
    both = []
    for asked in (options.first, options.second):
        name, _, variant = asked.partition("/")
        own = table[(table["method"] == name) & (table["variant"] == variant)]
        if own.empty:
            parser.error(f"no predictions of {asked}")
        both.append(own.groupby(["subject", "label", "target"], as_index=False)["proba"].mean())
    print(json.dumps({"methods": [options.first, options.second]} | compared(*both)))


if __name__ == "__main__":
    main()
