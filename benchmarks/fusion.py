"""What networks add to a linear model: the AUC over left-out sites of weighted sums of their logits.

Each method's logits have mean 0 and sd 1 inside a site, which changes no ranking of its own; seeds are averaged first, and so
are the logits of several networks. Usage: python benchmarks/fusion.py LINEAR NETWORK [NETWORK ...] --table
predictions.csv [--without NYU USM], methods as connectome-adaptive or, in a variant, connectome-adaptive/phenotypes; one JSON
line with the mean AUC by weight of the networks, and the mean correlation of both inside sites.
"""

import argparse
import json

import numpy as np
import pandas as pd

from m2lgdg.metrics import auc

WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def scores(table, name):
    """(subject,) logits of a method in the order of subjects, standardised inside each site."""
    method, _, variant = name.partition("/")
    own = table[(table["method"] == method) & (table["variant"] == variant)]
    if own.empty:
        raise SystemExit(f"{name} is not in the table.")
    chance = own.groupby(["target", "subject"])["proba"].mean().clip(1e-6, 1 - 1e-6)
    logits = np.log(chance / (1 - chance))
    return logits.groupby("target").transform(lambda part: (part - part.mean()) / (part.std() or 1.0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("linear")
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--table", required=True)
    parser.add_argument("--without", nargs="*", default=[])
    options = parser.parse_args()
    table = pd.read_csv(options.table, keep_default_na=False, dtype={"subject": str})
    table = table[~table["target"].isin(options.without)]
    linear = scores(table, options.linear)
    deep = sum(scores(table, name) for name in options.networks).loc[linear.index]
    deep = deep.groupby("target").transform(lambda part: part / (part.std() or 1.0))
    label = table.drop_duplicates(["target", "subject"]).set_index(["target", "subject"])["label"].loc[linear.index]
    sites = linear.groupby("target").indices.values()

    def mean_area(score):
        return round(float(np.mean([auc(label.to_numpy()[rows], score.to_numpy()[rows]) for rows in sites])), 4)

    together = {weight: mean_area((1 - weight) * linear + weight * deep) for weight in WEIGHTS}
    alike = np.mean([np.corrcoef(linear.to_numpy()[rows], deep.to_numpy()[rows])[0, 1] for rows in sites])
    reported = {"linear": options.linear, "networks": options.networks, "sites": len(sites)}
    print(json.dumps(reported | {"mean_auc_by_weight": together, "correlation": round(float(alike), 2)}))


if __name__ == "__main__":
    main()
