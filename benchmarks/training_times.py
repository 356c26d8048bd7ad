"""How long one training of each network takes on one core, at the size of ABIDE, for `m2lgdg methods NAME`.

Usage: OMP_NUM_THREADS=1 python benchmarks/training_times.py COHORT [--only NAME ...] [--subjects 240] [--epochs 2 6] [--write]
Two short trainings on some subjects of every site give the seconds before the first epoch and those of an epoch; `--epochs` are
their numbers of epochs. A third one on half of the subjects shows how the steps of an epoch grow with them. All is scaled to
the whole cohort and to the epochs of the method's defaults: an upper limit, since training may stop earlier. `--write` stores
the figures in src/m2lgdg/methods/training_times.json and keeps those of methods not measured.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

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
    """CPU seconds of one training without early stopping, and its steps in one epoch."""
    fields = m2lgdg.METHODS[name].__dataclass_fields__
    changes = {"epochs": epochs, "warmup": 1} | ({"patience": epochs} if "patience" in fields else {})
    own, steps = m2lgdg.make(name, **changes), []
    plain = own.step
    own.step = lambda *arguments: steps.append(None) or plain(*arguments)
    start = time.process_time()
    own.fit(cohort, device="cpu")
    return time.process_time() - start, len(steps) / epochs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--subjects", type=int, default=240)
    parser.add_argument("--epochs", type=int, nargs=2, default=(2, 6))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cohort = Cohort.load(options.cohort)
    few, half = (some_of_every_site(cohort, count) for count in (options.subjects, options.subjects // 2))
    known = load_methods()
    networks = [name for name in known if "epochs" in known[name].__dataclass_fields__]
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"minutes": {}}
    stored |= {"subjects": len(cohort), "rois": len(cohort.rois)}
    for name in options.only or networks:
        _, steps_of_half = train(name, half, 1)  # also imports and first calls
        first, second = options.epochs
        (short, _), (long, steps) = (train(name, few, epochs) for epochs in (first, second))
        step = max(long - short, 0.0) / (second - first) / steps
        all_steps = steps + (steps - steps_of_half) / (len(few) - len(half)) * (len(cohort) - len(few))
        before = max(short - first * steps * step, 0.0) * len(cohort) / len(few)
        epochs = known[name].__dataclass_fields__["epochs"].default
        minutes = (before + epochs * all_steps * step) / 60
        stored["minutes"][name] = float(f"{minutes:.2g}")
        print(
            json.dumps(
                {"method": name, "steps": round(all_steps), "s a step": round(step, 3), "epochs": epochs, "minutes": minutes}
            ),
            flush=True,
        )
        if options.write:
            stored["minutes"] = dict(sorted(stored["minutes"].items()))
            FILE.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
