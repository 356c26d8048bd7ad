"""One fold end to end at the size of REST-meta-MDD: how much of `fit` is spent outside the training steps.

M²LG-DG is fitted on the preset `rest-meta-mdd` without site S20, for a given number of epochs with validation after each;
events on the GPU (a clock on a CPU) tell how long the steps took. The rest is standardising, the group graph, recording,
validation, keeping the best network and calibration. The first fold of a process also pays for its imports and for CUDA, the
others are what a cell of a study costs. Usage: python benchmarks/fold.py [--device cuda] [--precision bf16] [--epochs 100]
[--variant small] [--folds 2]; prints a JSON line a fold.
"""

import argparse
import json
import time

import torch
from presets import preset
from timing import significant, wait

from m2lgdg.method import method
from m2lgdg.methods.m2lgdg import M2LGDG
from m2lgdg.study.config import method_fields


@method("m2lgdg-timed")
class Timed(M2LGDG):
    """M²LG-DG that notes when each of its steps begins and ends."""

    def _stepper(self, network, optimizer, everyone, train):
        step = super()._stepper(network, optimizer, everyone, train)
        self.taken = []

        def timed(rows):
            self.began = getattr(self, "began", time.perf_counter())
            begin = self._now()
            terms = step(rows)
            self.taken.append((begin, self._now()))
            return terms

        self.cuda = train.is_cuda
        return timed

    def validate(self, network, batch):
        wait(batch.label.device)
        start = time.perf_counter()
        found = super().validate(network, batch)
        self.validating = getattr(self, "validating", 0.0) + time.perf_counter() - start
        return found

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self):
        return sum(begin.elapsed_time(end) / 1e3 if self.cuda else end - begin for begin, end in self.taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--variant")
    parser.add_argument("--folds", type=int, default=2)
    options = parser.parse_args()
    cohort = preset()
    source = cohort.select(cohort.sites != "S20")
    changed = {"epochs": options.epochs, "warmup": min(10, options.epochs), "patience": options.epochs}
    fields = method_fields("m2lgdg", options.variant, []) | changed | {"precision": options.precision}
    for fold in range(options.folds):
        print(json.dumps(vars(options) | {"fold": fold + 1} | timed(Timed(**fields), source, options.device)), flush=True)


def timed(own, source, device):
    """Seconds of one fit, in steps and before and between them."""
    wait(device)
    start = time.perf_counter()
    own.fit(source, device=device)
    wait(device)
    whole, steps = time.perf_counter() - start, own.seconds()
    parts = {"before_steps": significant(own.began - start), "validation": significant(own.validating)}
    reported = {"subjects": len(source), "steps": len(own.taken), "seconds": significant(whole), "in_steps": significant(steps)}
    return reported | parts | {"outside": round(1 - steps / whole, 3)}


if __name__ == "__main__":
    main()
