"""Which methods find what was planted? AUC at held-out sites of the synthetic `demo` cohort with a weaker effect.

Usage: python benchmarks/planted.py METHOD ... [--targets Aarhus Cork] [--device cuda] [--jobs 4]; prints a JSON line a method.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import m2lgdg
from m2lgdg.metrics import auc
from m2lgdg.study.predictions import read_predictions

HARDER = {"n_disease_rois": 24, "roi_effect": 2.0}  # than the demo's own effect, which a laptop's network finds in a minute


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cohort = m2lgdg.make_cohort("demo", **HARDER)
        cohort.save(Path(folder) / "demo.cohort")
        targets = options.targets or list(cohort.site_names)
        names = [*options.methods, "phenotype-logistic", "fc-logistic"]
        study = f'name = "planted"\ncohort = "demo.cohort"\nseeds = [0]\ndevice = "{options.device}"\n'
        study += f"methods = {json.dumps(names)}\ntargets = {json.dumps(targets)}\n"
        path = Path(folder) / "study.toml"
        path.write_text(study)
        summary = m2lgdg.run_study(path, Path(folder) / "results", jobs=options.jobs)
        for cell, reason in summary.failed:
            print(json.dumps({"failed": cell, "reason": reason}))
        predictions = read_predictions(Path(folder) / "results")
    for name in names:
        own = predictions[predictions["method"] == name]
        areas = {site: auc(one["label"].to_numpy(), one["proba"].to_numpy()) for site, one in own.groupby("target")}
        reported = {site: round(area, 3) for site, area in areas.items()}
        print(json.dumps({"method": name, "auc_mean": round(float(np.mean(list(areas.values()))), 3), "auc": reported}))


if __name__ == "__main__":
    main()
