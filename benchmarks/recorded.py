"""Whether what CUDA recorded is what would have been computed, and what a process keeps in memory from cell to cell.

Methods whose steps and validations are recorded train for some epochs on the preset `demo`; after every epoch the recorded
logits of source-validation subjects are held against logits computed anew. Usage: python benchmarks/recorded.py [METHOD ...]
[--epochs 10] [--precision bf16] [--cells 2]; prints a JSON line a training. Needs CUDA: elsewhere nothing is recorded.
"""

import argparse
import json

import torch

from m2lgdg import METHODS, make, make_cohort
from m2lgdg.deep import DeepMethod, pieces

RECORDABLE = [name for name, cls in METHODS.items() if issubclass(cls, DeepMethod) and cls.recordable]


def held_against(seen, off):
    """`DeepMethod._seen_by` that also notes how far the recorded logits are from those computed anew."""

    def both(own, network, batch):
        recorded = seen(own, network, batch).clone()
        anew = torch.cat([network(batch.take(rows)) for rows in pieces(len(batch), batch.label.device)])
        off.append(float((recorded.float() - anew.float()).abs().max()))
        return recorded

    return both


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=RECORDABLE)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--cells", type=int, default=2)
    parser.add_argument("--preset", default="demo")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA here, so nothing is recorded")
    cohort, off = make_cohort(options.preset), []
    DeepMethod.validation_logits = held_against(DeepMethod.validation_logits, off)
    for name in options.methods:
        for cell in range(options.cells):
            off.clear()
            own = make(name, precision=options.precision, epochs=options.epochs, warmup=2)
            own.fit(cohort, seed=cell, device="cuda")
            reported = {"off": max(off), "peak_gib": own.facts_["peak_memory_gib"], "last": own.facts_["history"][-1]}
            print(json.dumps({"method": name, "cell": cell + 1} | reported), flush=True)


if __name__ == "__main__":
    main()
