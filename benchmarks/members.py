"""A training step of `m2lgdg-connectome`, or its explanation of a subject, beside an earlier commit, in turns.

Usage: python benchmarks/members.py COMMIT [--what step|explain] [--rois 116] [--threads 2] [--device cpu] [--precision fp32]
[--variant quick] [--repeats 20]; COMMIT may be a folder that has its `src`. Both sides are processes that work in turns on
made-up subjects; prints one JSON line with the fastest wall and CPU milliseconds of each and their ratio.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHILD = """
import json, sys, time
import numpy as np
import torch
from m2lgdg.deep import Batch, Shape
from m2lgdg.devices import fast_form
from m2lgdg.explain.gradients import integrated_gradients
from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome

options = json.loads(sys.argv[1])
torch.set_num_threads(options["threads"])
device, n, subjects, sites = torch.device(options["device"]), options["rois"], 512, 20
edges = n * (n - 1) // 2
method = M2LGDGConnectome(**M2LGDGConnectome.variants.get(options["variant"], {}), precision=options["precision"])
draw, made = np.random.default_rng(0), torch.Generator().manual_seed(0)
fitted = {"mean": np.zeros(edges), "scale": np.ones(edges), "slopes": np.zeros((3, edges))}
fitted |= {f"log.{name}": value for name, value in fitted.items()} | {"adjacency": draw.random((n, n)) > 0.8}
shape = Shape(n, 200, 3, sites, {name: np.asarray(value, dtype=np.float32) for name, value in fitted.items()})
features = {name: torch.randn(subjects, edges, generator=made).to(device) for name in (method.view, "log_edges")}
label, site = (torch.randint(top, (subjects,), generator=made).to(device) for top in (2, sites))
everyone = Batch(features, torch.randn(subjects, 3, generator=made).to(device), label, site)
method._offsets = {name: torch.zeros(sites, edges, device=device) for name in features}
method.class_weight, method.facts_ = torch.tensor([0.9, 1.1], device=device), {"notes": []}
torch.manual_seed(0)
network = fast_form(method.build(shape)).to(device).train()
rows = [torch.randint(subjects, (method.members * method.batch_size,), generator=made).to(device) for _ in range(8)]
if options["what"] == "step":
    stepper = method._stepper(network, method.optimizer(network), everyone, torch.arange(subjects, device=device))
    work = lambda i: stepper(rows[i % 8])
else:
    network.eval().requires_grad_(False)
    few = everyone.take(rows[0][:4])
    work = lambda i: integrated_gradients(network, few, 64)
for i, _ in enumerate(sys.stdin):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start, used = time.perf_counter(), time.process_time()
    work(i)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps([1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - used)]), flush=True)
"""


def started(source, options):
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, "-c", CHILD, json.dumps(vars(options))]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process):
    """[wall, CPU] milliseconds of one piece of work."""
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--what", choices=("step", "explain"), default="step")
    parser.add_argument("--rois", type=int, default=116)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--variant", default="")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(options.commit) / "src"
        if not source.is_dir():
            archive = subprocess.run(["git", "archive", options.commit, "src"], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
            source = Path(folder) / "src"
        sides = [started(source, options), started(ROOT / "src", options)]
        for side in sides * 5:  # warm up, and on CUDA record
            asked(side)
        taken = [[asked(side) for side in sides] for _ in range(options.repeats)]
        for side in sides:
            side.stdin.close()
            side.wait()
    best = {name: [round(min(turn[i][k] for turn in taken), 2) for i in (0, 1)] for k, name in enumerate(("wall", "cpu"))}
    found = {f"{name}_ms": dict(zip(("before", "now"), both, strict=True)) for name, both in best.items()}
    ratios = {f"{name}_ratio": round(both[0] / both[1], 2) for name, both in best.items()}
    print(json.dumps(vars(options) | found | ratios))


if __name__ == "__main__":
    main()
