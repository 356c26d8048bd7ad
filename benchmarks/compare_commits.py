"""Two commits side by side: all methods and variants predict the same bits, and models saved by the first load in the second.

Usage: python benchmarks/compare_commits.py FIRST SECOND [--epochs 2] [--only m2lgdg]; runs each commit's own code (from
git archive) on the `tiny` cohort, one site held out, one thread, networks for `--epochs` epochs; prints a line for each
difference, then one JSON line, and ends with 1 where a probability, a threshold or the number of flags differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHILD = """
import inspect, json, sys
import torch
torch.set_num_threads(1)
import m2lgdg
from m2lgdg.deep import DeepMethod

out, models, epochs, only, load = json.loads(sys.argv[1])
fold = next(iter(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny"))))
Model = getattr(m2lgdg, "Model", m2lgdg.Method)  # what is saved; before it had a name of its own, a method
extras = [name for name in ("limits", "source_distribution", "promise", "new_site_calibration")
          if name in inspect.signature(Model.fit).parameters]


def scores(fitted):
    flags = [len(one) for one in fitted.flags(fold.target)]
    return fitted.predict_proba(fold.target)[:, 1].tolist(), fitted.threshold, flags


found = {}
for name in sorted(only or m2lgdg.METHODS):
    cls = m2lgdg.METHODS[name]
    for variant in ["", *cls.variants]:
        fields = dict(cls.variants.get(variant, {}))
        if issubclass(cls, DeepMethod):
            fields |= {"epochs": epochs, "warmup": 1}
        fitted = m2lgdg.make(name, **fields).fit(fold.source, seed=0)
        found[f"{name}:{variant}"] = fitted.predict_proba(fold.target)[:, 1].tolist()
        if variant in ("", "small") and not load:
            if not issubclass(cls, DeepMethod):
                fitted = m2lgdg.make(name, **fields).fit(fold.source, seed=0, **dict.fromkeys(extras, True))
            fitted.save(f"{models}/{name}:{variant}")
            found[f"saved {name}:{variant}"] = scores(fitted)
        if variant in ("", "small") and load:
            found[f"saved {name}:{variant}"] = scores(Model.load(f"{models}/{name}:{variant}"))
json.dump(found, open(out, "w"))
"""


def predicted(commit, folder, models, options, load):
    """Predictions of every method and variant by one commit's code."""
    source = folder / ("second" if load else "first")
    source.mkdir()
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=source, input=archive.stdout, check=True)
    asked = json.dumps([str(source / "found.json"), str(models), options.epochs, options.only, load])
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", CHILD, asked], cwd=folder, env=environment, check=True)
    return json.loads((source / "found.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, models = Path(name), Path(name) / "models"
        models.mkdir()
        first = predicted(options.first, folder, models, options, load=False)
        second = predicted(options.second, folder, models, options, load=True)
    differing = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    for key in differing:
        print(key, "differs" if key in first and key in second else "is in one commit only")
    digests = [hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16] for found in (first, second)]
    print(json.dumps({"predictions": len(first), "differing": len(differing), "first": digests[0], "second": digests[1]}))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
