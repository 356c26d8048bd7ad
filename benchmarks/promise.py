"""Is what leave-one-site-out promises inside source kept at a site that nobody saw? Sets, calibration and intervals by site.

Usage: python benchmarks/promise.py COHORT [--method fc-logistic] [--targets USM] [--scores FILE]; prints a JSON line a site,
then one over all. A model without two sites serves both as target and as source site, so 18 sites cost 171 fits, not 324;
--scores keeps these fits' scores in a file, so that a stopped run goes on.
"""

from itertools import combinations

import numpy as np

import m2lgdg


def collect(cohort, name, fields, file):
    """{'A+B': (subject,) scores of the model without sites A and B, 'A': without A}; NaN for those it was trained on."""
    scores = dict(np.load(file)) if file.exists() else {}
    names = cohort.site_names
    for left in [(one,) for one in names] + list(combinations(names, 2)):
        key = "+".join(left)
        if key in scores:
            continue
        out = np.isin(cohort.sites, left)
        fitted = m2lgdg.make(name, **fields).fit(cohort.select(~out))
        scores[key] = np.full(len(cohort), np.nan)
        scores[key][out] = fitted.predict_proba(cohort.select(out))[:, 1]
        np.savez(file.with_suffix(".part.npz"), **scores)
        file.with_suffix(".part.npz").replace(file)
    return scores
