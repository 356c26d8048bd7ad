"""Which subjects of a site that is held out would a model flag as unlike its source? Shares by site, on a cohort of yours.

Usage: python benchmarks/out_of_distribution.py COHORT [--targets OHSU SBL]; prints a JSON line a site, then one over all.
"""

import argparse
import json

import numpy as np

import m2lgdg
from m2lgdg.model.out_of_distribution import SourceDistribution


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cohort")
    parser.add_argument("--targets", nargs="+")
    options = parser.parse_args()
    flagged = {}
    for fold in m2lgdg.leave_one_site_out(m2lgdg.read(options.cohort), options.targets):
        scores = SourceDistribution.fit(fold.source).scores(fold.target)
        for kind, values in scores.items():
            flagged.setdefault(kind, []).append(np.asarray(values) > 1)
        shares = {kind: round(float(parts[-1].mean()), 3) for kind, parts in flagged.items()}
        print(json.dumps({"site": fold.site, "subjects": len(fold.target), "flagged": shares}), flush=True)
    whole = {kind: round(float(np.concatenate(parts).mean()), 3) for kind, parts in flagged.items()}
    sites = {kind: round(float(np.mean([part.mean() for part in parts])), 3) for kind, parts in flagged.items()}
    print(json.dumps({"all": whole, "mean_of_sites": sites}))


if __name__ == "__main__":
    main()
