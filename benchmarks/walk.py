"""A new hospital, subject by subject: a model of all other sites, compared with what its new-site calibration expects.

Usage: python benchmarks/walk.py COHORT SITE [--method fc-logistic] [--out FOLDER]; prints a JSON line a subject (no id), then
the site as a whole. The model is saved and loaded in between, as on its way to the hospital; labels enter at the very end.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import m2lgdg
from m2lgdg.method import Method
from m2lgdg.metrics import auc, calibration, calibration_error, delong_interval, wilson


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cohort")
    parser.add_argument("site")
    parser.add_argument("--method", default="fc-logistic")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--out")
    options = parser.parse_args()
    cohort = m2lgdg.read(options.cohort)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.out or folder) / "model"
        if not model.exists():
            source = cohort.select((cohort.sites != options.site) & (cohort.labels >= 0))
            m2lgdg.make(options.method, phenotypes=True).fit(source, source_distribution=True, new_site_calibration=True).save(
                model
            )
        fitted = Method.load(model)
    site = cohort.select(sites=[options.site])
    rows = [walk(fitted, site.select([i]), options.coverage) for i in range(len(site))]
    for row in rows:
        print(json.dumps(row))
    together = fitted.predict_proba(site)[:, 1]
    found = judge(fitted, rows, site.labels, options.coverage)
    found["apart_from_all_at_once"] = float(np.abs(together - [row["proba"] for row in rows]).max())
    print(json.dumps(plain(found), indent=1, allow_nan=False))


def plain(said):
    """For JSON: short numbers, and null for what is not defined."""
    if isinstance(said, dict):
        return {name: plain(one) for name, one in said.items()}
    if isinstance(said, list | tuple):
        return [plain(one) for one in said]
    return said if said is None or isinstance(said, int) else None if np.isnan(said) else round(float(said), 4)


def walk(fitted, one, coverage):
    """All that the hospital sees of one subject."""
    proba = fitted.predict_proba(one)[:, 1]
    (low,), (high,) = fitted.new_site_.interval(proba)
    scores = {f"{kind}_ood": round(float(score[0]), 3) for kind, score in fitted.source_distribution_.scores(one).items()}
    said = {"proba": float(proba[0]), "low": round(low, 3), "high": round(high, 3)}
    return said | {"set": str(fitted.new_site_.sets(proba, coverage)[0]), "flags": fitted.flags(one)[0]} | scores


def judge(fitted, rows, labels, coverage):
    """Observed figures, and those expected from new-site calibration."""
    known = labels >= 0
    y, p = labels[known], np.array([row["proba"] for row in rows])[known]
    sets = np.array([row["set"] for row in rows])[known]
    held = (sets == "both") | (sets == np.where(y == 1, "patient", "control"))
    single = np.isin(sets, ["control", "patient"])
    called = p >= fitted.threshold
    new_site, kept = fitted.new_site_, fitted.new_site_.expected(coverage)
    slope, intercept = calibration(y, p)
    return {
        "subjects": len(rows),
        "flags": Counter(flag.split(":")[0] for row in rows for flag in row["flags"]),
        "sets": Counter(sets.tolist()),
        "observed": {
            "in_set": [held.mean(), *wilson(int(held.sum()), len(held))],
            "one_class": single.mean(),
            "right": held[single].mean() if single.any() else None,
            "sensitivity": called[y == 1].mean(),
            "specificity": (~called[y == 0]).mean(),
            "auc": [auc(y, p), *delong_interval(y, p)],
            "slope": slope,
            "intercept": intercept,
            "brier": ((p - y) ** 2).mean(),
            "ece": calibration_error(y, p),
            "share_of_patients": y.mean(),
            "mean_interval": [np.mean([row["low"] for row in rows]), np.mean([row["high"] for row in rows])],
        },
        "expected": new_site.whole._asdict() | kept._asdict(),
        "rule": {name: getattr(new_site, name) for name in ("slope", "offset", "threshold", "slope_sd", "offset_sd", "folds")},
    }


if __name__ == "__main__":
    main()
