"""A training step of M²LG-DG beside the plain reading of the paper (`plain.py`): that both are equal, then how long they take.

Usage: python benchmarks/step.py [--device cuda] [--precision bf16] [--batch 32] [--rois 116] [--length 200] [--variant small]
[--repeats 5] [--steps 1]; prints one JSON line, and ends with 1 where the two are not equal to 1e-4 in
float32.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time

import plain
import torch

from m2lgdg.deep import Batch, Shape
from m2lgdg.devices import fast_form
from m2lgdg.graph import group_graph
from m2lgdg.methods.m2lgdg import M2LGDG
from m2lgdg.study.config import method_fields

INPUTS, SITES, TOLERANCE = 3, 20, 1e-4


def made_up(subjects, rois, length, device="cpu"):
    """Subjects of many sites on the device; what is in the series matters neither to time nor to equality."""
    rng = torch.Generator().manual_seed(1)
    series = torch.randn(subjects, rois, length, generator=rng)
    phenotypes = torch.randn(subjects, INPUTS, generator=rng)
    label, site = (torch.randint(top, (subjects,), generator=rng) for top in (2, SITES))
    return Batch({"series": series.to(device)}, phenotypes.to(device), label.to(device), site.to(device))


class Ours:
    """The package's side: what `DeepMethod`'s loop calls on rows of the data, on CUDA recorded."""

    def __init__(self, own, everyone):
        rois = everyone.series.shape[1]
        adjacency = group_graph([one.T for one in everyone.series[:8].cpu().numpy()], own.percentile)
        torch.manual_seed(0)
        place = everyone.label.device
        self.own, self.everyone = own, everyone
        shape = Shape(rois, own.length, INPUTS, SITES, {"adjacency": adjacency})
        self.network = fast_form(own.build(shape)).to(place).train()
        own.class_weight, own.epoch = torch.tensor([0.9, 1.1], device=place), 0
        self.optimizer = own.optimizer(self.network)
        own.facts_ = {"notes": []}
        with tf32(own.precision != "fp32"):
            self.stepper = own._stepper(self.network, self.optimizer, everyone, torch.arange(len(everyone), device=place))

    def step(self, rows):
        with tf32(self.own.precision != "fp32"):
            return torch.stack([term.float() for term in self.stepper(rows).values()]).sum()

    def gradients(self, rows):
        """Loss, and gradients left in the parameters."""
        total = torch.stack(list(self.own.loss(self.network, self.everyone.take(rows)).values())).sum()
        total.backward()
        return total.detach()


class Plain:
    """The ruler's side, in eager float32 whatever ours has."""

    def __init__(self, ours):
        self.own, self.everyone = ours.own, ours.everyone
        _, rois, length = ours.everyone.series.shape
        network = plain.PlainNetwork(rois, length, INPUTS, ours.own).to(ours.everyone.label.device)
        self.network = plain.copy_weights(ours.network, network).train()
        self.optimizer = plain.plain_optimizer(self.network, self.own)

    def step(self, rows):
        batch, weight = self.everyone.take(rows), self.own.class_weight
        with tf32(False):
            return plain.plain_step(self.network, batch, self.optimizer, self.own, weight)

    def gradients(self, rows):
        loss = plain.plain_loss(self.network, self.everyone.take(rows), self.own, self.own.class_weight)
        loss.backward()
        return loss.detach()


@contextlib.contextmanager
def tf32(allowed):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def differences(own, everyone, rows):
    """Relative difference of losses, and of gradients as the norm of all differences over the norm of all; dropout off."""
    ours = Ours(own, everyone)
    ruler = Plain(ours)
    with tf32(False):
        loss, expected = ours.gradients(rows), ruler.gradients(rows)
    pairs = plain.plain_gradients(ours.network, ruler.network).values()
    apart = sum((one - other).double().square().sum() for one, other in pairs) ** 0.5
    size = sum(other.double().square().sum() for _, other in pairs) ** 0.5
    return {"loss": float((loss - expected).abs() / expected.abs()), "gradient": float(apart / size)}


def ten_steps(own, everyone, batches):
    """Largest relative difference of the losses over ten training steps; dropout off."""
    ours = Ours(own, everyone)
    ruler = Plain(ours)
    pairs = [(float(ours.step(rows)), float(ruler.step(rows))) for rows in (batches * 10)[:10]]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def by_turns(sides, repeats, device):
    """{name: median seconds} of functions called in turn, after two turns that do not count."""
    taken = {name: [] for name in sides}
    for _ in range(2 + repeats):
        for name, work in sides.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[2:]) for name, each in taken.items()}


def wait(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def significant(value):
    return float(f"{value:.3g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rois", type=int, default=116)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--variant")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps timed together; on a GPU take 20")
    options = parser.parse_args()
    fields = method_fields("m2lgdg", options.variant, []) | {"length": options.length}
    everyone = made_up(8 * options.batch, options.rois, options.length, options.device)
    rows = torch.arange(options.batch, device=options.device)
    apart = differences(M2LGDG(**fields | {"dropout": 0.0, "precision": "fp32"}), everyone, rows)
    shifted = [(rows + i * options.batch) % len(everyone) for i in range(4)]
    apart["ten_steps"] = ten_steps(M2LGDG(**fields | {"dropout": 0.0, "precision": "fp32"}), everyone, shifted)
    ours = Ours(M2LGDG(**fields | {"precision": options.precision}), everyone)
    ruler = Plain(ours)
    batches = [(rows + i * options.batch) % len(everyone) for i in range(options.steps)]
    sides = {"plain": lambda: [ruler.step(one) for one in batches], "ours": lambda: [ours.step(one) for one in batches]}
    taken = by_turns(sides, options.repeats, options.device)
    result = vars(options) | {
        "threads": torch.get_num_threads(),
        "relative_difference": {name: significant(value) for name, value in apart.items()},
        "plain_ms": significant(1e3 * taken["plain"] / options.steps),
        "ours_ms": significant(1e3 * taken["ours"] / options.steps),
        "times_faster": significant(taken["plain"] / taken["ours"]),
    }
    print(json.dumps(result))
    sys.exit(max(apart.values()) > TOLERANCE)


if __name__ == "__main__":
    main()
