"""Does new-site calibration hold at sites that took no part in it? Conformal sets, calibration and intervals by site.

Usage: python benchmarks/new_site.py COHORT [--method fc-logistic] [--targets USM] [--coverage 0.9]
[--scores FILE.npz]; prints a JSON line for each site, then one over all. A model without two sites serves each of them as the
target of the other, so that 18 sites cost 171 fits, not 324; --scores keeps them in a file, so that a stopped run continues.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import m2lgdg
from m2lgdg.metrics import auc, calibration, calibration_error, logit, sigmoid
from m2lgdg.model.new_site import NewSiteCalibration


def collect(cohort, name, fields, targets, file):
    """{'A+B': (subject,) scores of the model without sites A and B, 'A': without A}; NaN for those it was trained on."""
    scores = dict(np.load(file)) if file and file.exists() else {}
    for left in wanted(cohort.site_names, targets):
        key = "+".join(left)
        if key in scores:
            continue
        out = np.isin(cohort.sites, left)
        fitted = m2lgdg.make(name, **fields).fit(cohort.select(~out))
        scores[key] = np.full(len(cohort), np.nan)
        scores[key][out] = fitted.predict_proba(cohort.select(out))[:, 1]
        if file:
            part = file.with_suffix(".part.npz")
            np.savez(part, **scores)
            part.replace(file)
    return scores


def wanted(names, targets):
    """Which sites are left out together: each target alone, and with each other site."""
    pairs = {tuple(sorted((one, other))) for one in targets for other in names if one != other}
    return [(one,) for one in targets] + sorted(pairs)


def calibration_without(cohort, scores, target):
    """New-site calibration of the model without the target, as `fit(new_site_calibration=True)` makes it of that source."""
    source, proba = cohort.sites != target, np.full(len(cohort), np.nan)
    for site in set(cohort.sites[source].tolist()):
        here = cohort.sites == site
        proba[here] = scores["+".join(sorted((site, target)))][here]
    return NewSiteCalibration.from_scores(
        proba[source], cohort.labels[source], cohort.sites[source], len(cohort.site_names) - 1
    )


def kept(new_site, raw, labels, coverage):
    """What the same figures are at the target."""
    proba = sigmoid(new_site.slope * logit(raw) + new_site.offset)
    sets = new_site.sets(proba, coverage)
    true = np.where(labels == 1, "patient", "control")
    held, single = (sets == "both") | (sets == true), np.isin(sets, ["control", "patient"])
    slope, intercept = calibration(labels, proba)
    low, high = (float(one.mean()) for one in new_site.interval(proba))
    return {
        "in_set": held.mean(),
        "one_class": single.mean(),
        "right": held[single].mean() if single.any() else np.nan,
        "right_of": int(single.sum()),
        "auc": auc(labels, proba),
        "slope": slope,
        "intercept": intercept,
        "brier": ((proba - labels) ** 2).mean(),
        "brier_before": ((raw - labels) ** 2).mean(),
        "ece": calibration_error(labels, proba),
        "patients": labels.mean(),
        "interval_of_patients": [round(low, 3), round(high, 3)],
    }


def plain(values):
    """For JSON: short numbers, and null for what is not defined."""
    return {
        name: value if isinstance(value, int | list) else None if np.isnan(value) else round(float(value), 3)
        for name, value in values.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cohort")
    parser.add_argument("--method", default="fc-logistic")
    parser.add_argument("--no-phenotypes", action="store_true")
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--scores", type=Path)
    options = parser.parse_args()
    cohort = m2lgdg.read(options.cohort)
    cohort = cohort.select(cohort.labels >= 0)
    targets = options.targets or cohort.site_names
    scores = collect(cohort, options.method, {"phenotypes": not options.no_phenotypes}, targets, options.scores)
    rows = []
    for target in targets:
        new_site, here = calibration_without(cohort, scores, target), cohort.sites == target
        found = kept(new_site, scores[target][here], cohort.labels[here], options.coverage)
        said = new_site.expected(options.coverage)._asdict() | {"brier": new_site.whole.brier, "ece": new_site.whole.ece}
        said |= {name: getattr(new_site, name) for name in ("slope", "slope_sd", "offset_sd")}
        rows.append((int(here.sum()), found, said))
        line = {"site": target, "subjects": rows[-1][0], "observed": plain(found), "expected": plain(said)}
        print(json.dumps(line), flush=True)
    sizes = [size for size, *_ in rows]
    held, said = [one["in_set"] for _, one, _ in rows], [one["reached"] for *_, one in rows]
    decided = [one["right_of"] for _, one, _ in rows]
    inside = [found["interval_of_patients"][0] <= found["patients"] <= found["interval_of_patients"][1] for _, found, _ in rows]
    over = {
        "in_set_subjects": np.average(held, weights=sizes),
        "in_set_sites_median": np.median(held),
        "in_set_sites_lowest": min(held),
        "expected_in_set": np.average(said, weights=sizes),
        "one_class": sum(decided) / sum(sizes),
        "expected_one_class": np.average([one["decided"] for *_, one in rows], weights=sizes),
        "right": sum(found["right"] * found["right_of"] for _, found, _ in rows if found["right_of"]) / max(sum(decided), 1),
        "expected_right": np.average([one["right"] for *_, one in rows], weights=sizes),
        "brier": np.average([found["brier"] for _, found, _ in rows], weights=sizes),
        "brier_before": np.average([found["brier_before"] for _, found, _ in rows], weights=sizes),
        "sites_whose_share_of_patients_is_inside": int(sum(inside)),
    }
    print(json.dumps({"sites": len(rows), "subjects": sum(sizes), "over_all": plain(over)}))


if __name__ == "__main__":
    main()
