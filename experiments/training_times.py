"""How long one training of each network takes on one core, at the size of ABIDE, for `m2lgdg methods NAME`.

Usage: OMP_NUM_THREADS=1 python experiments/training_times.py COHORT [--only NAME ...] [--subjects 240] [--epochs 2 6] [--write]
Two short trainings on some subjects of every site give the seconds before the first epoch and those of a step; `--epochs` are
their numbers of epochs. They are scaled to the whole cohort and to the epochs of the method's defaults: an upper limit, since
training may stop earlier. `--write` stores the figures in src/m2lgdg/methods/training_times.json and keeps those of methods
not measured.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import m2lgdg
from m2lgdg.cohort import Cohort
from m2lgdg.registry import load_methods

FILE = Path(__file__).parents[1] / "src/m2lgdg/methods/training_times.json"


def some_of_every_site(cohort, count):
    """About `count` subjects, of every site and class in proportion, and the rest of the cohort left out."""
    rng = np.random.default_rng(0)
    strata = [
        np.flatnonzero((cohort.sites == site) & (cohort.labels == label)) for site in cohort.site_names for label in (0, 1)
    ]
    taken = [rng.permutation(each)[: max(round(len(each) * count / len(cohort)), 1)] for each in strata if len(each)]
    return cohort.select(np.sort(np.concatenate(taken)))


def train(name, cohort, epochs):
    """CPU seconds of one training without early stopping."""
    used = set(m2lgdg.METHODS[name].__dataclass_fields__) - set(m2lgdg.METHODS[name].unused)
    changes = {"epochs": epochs, "warmup": 1} | ({"patience": epochs} if "patience" in used else {})
    start = time.process_time()
    m2lgdg.make(name, **changes).fit(cohort, device="cpu")
    return time.process_time() - start


def steps_of(name, cohort):
    """Steps of one epoch with 85 % of the cohort as training subjects."""
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(cohort))[: round(0.85 * len(cohort))])
    site = torch.from_numpy(np.unique(cohort.sites, return_inverse=True)[1])[rows]
    label = torch.from_numpy(cohort.labels.astype(np.int64))[rows]
    own = m2lgdg.make(name)
    own.lacks_sites(site, label)  # some methods prepare their batches there
    return len(own.batches(site, label, torch.Generator().manual_seed(0)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--subjects", type=int, default=240)
    parser.add_argument("--epochs", type=int, nargs=2, default=(2, 6))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cohort = Cohort.load(options.cohort)
    few = some_of_every_site(cohort, options.subjects)
    known = load_methods()
    networks = [name for name in known if "epochs" in known[name].__dataclass_fields__]
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"minutes": {}}
    stored |= {"subjects": len(cohort), "rois": len(cohort.rois)}
    for name in options.only or networks:
        train(name, few, 1)  # imports and first calls
        first, second = options.epochs
        short, long = (train(name, few, epochs) for epochs in (first, second))
        steps, all_steps = steps_of(name, few), steps_of(name, cohort)
        step = max(long - short, 0.0) / (second - first) / steps
        before = max(short - first * steps * step, 0.0) * len(cohort) / len(few)
        epochs = known[name].__dataclass_fields__["epochs"].default
        minutes = (before + epochs * all_steps * step) / 60
        stored["minutes"][name] = float(f"{minutes:.2g}")
        print(
            json.dumps({"method": name, "steps": all_steps, "s a step": round(step, 3), "epochs": epochs, "minutes": minutes}),
            flush=True,
        )
        if options.write:
            stored["minutes"] = dict(sorted(stored["minutes"].items()))
            FILE.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
