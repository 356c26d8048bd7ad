"""How an epoch of M²LG-DG grows with the number of subjects, of ROIs and of time points.

An epoch is the package's own `DeepMethod.step` over made-up subjects, as `step.py` makes them, by turns over sizes.
Along ROIs and time only `--steps` steps are timed and scaled up to an epoch, along subjects too unless `--whole` is given.
Usage: python benchmarks/growth.py [--device cuda] [--variant small] [--precision bf16] [--batch 32] [--steps 2] [--repeats 3]
[--plot docs/growth.png]; prints one JSON line.
"""

import argparse
import json

import numpy as np
import torch
from step import Ours, made_up
from timing import by_turns, significant

from m2lgdg.methods.m2lgdg import M2LGDG
from m2lgdg.study.config import method_fields

AXES = {"subjects": (250, 500, 1000, 2000), "rois": (50, 116, 200, 400), "length": (100, 150, 200, 300, 400)}
BASE = {"subjects": 2000, "rois": 116, "length": 200}


def epochs(axis, options):
    """Seconds of an epoch at each size of an axis; the other two as in BASE."""
    sides, scale = {}, {}
    for size in [one for one in AXES[axis] if axis != "subjects" or one <= options.most]:
        at = BASE | {axis: size}
        count = at["subjects"] // options.batch
        held = at["subjects"] if axis == "subjects" else 4 * options.batch
        fields = method_fields("m2lgdg", options.variant, []) | {"length": at["length"], "precision": options.precision}
        ours = Ours(M2LGDG(**fields), made_up(held, at["rois"], at["length"], options.device))
        steps = count if axis == "subjects" and options.whole else min(options.steps, count)
        rows = [torch.randperm(held)[: options.batch].to(options.device) for _ in range(steps)]
        sides[size], scale[size] = (lambda ours=ours, rows=rows: [ours.step(one) for one in rows]), count / steps
    return {size: taken * scale[size] for size, taken in by_turns(sides, options.repeats, options.device).items()}


def slope(taken):
    """Of the straight line through the logarithms."""
    return float(np.polyfit(np.log(list(taken)), np.log(list(taken.values())), 1)[0])


def plot(found, path, title):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for panel, (axis, taken) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        panel.plot(list(taken), list(taken.values()), "o-", color="#205080")
        panel.set(xlabel=axis, xlim=(0, None), ylim=(0, None), title=f"slope {slope(taken):.2f}")
    figure.axes[0].set_ylabel("seconds an epoch")
    figure.suptitle(title)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="time whole epochs along subjects, so that linearity is measured")
    parser.add_argument("--most", type=int, default=2000, help="subjects, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot")
    options = parser.parse_args()
    found = {axis: epochs(axis, options) for axis in AXES}
    reported = {axis: {str(size): significant(value) for size, value in taken.items()} for axis, taken in found.items()}
    slopes = {axis: round(slope(taken), 2) for axis, taken in found.items()}
    print(json.dumps(vars(options) | {"base": BASE, "threads": torch.get_num_threads(), "seconds": reported, "slope": slopes}))
    if options.plot:
        name = f"M²LG-DG{f' ({options.variant})' if options.variant else ''}, {options.device}, {options.precision}"
        plot(found, options.plot, f"{name}, batch {options.batch}; {BASE['subjects']} subjects, N 116, T 200 unless varied")


if __name__ == "__main__":
    main()
