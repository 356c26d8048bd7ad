"""Seconds per epoch of our BrainGNN, BrainNetCNN, IBGNN+ and UFA-Net beside rulers in public code's style (`public_style.py`).

Ours is the package's own loop (`fit`, an epoch from one report of progress to the next, validation included); the ruler has
loaders, the same batch size, the same source-training and validation subjects. Both by turns in one run, the median.
Usage: python benchmarks/peers.py [NAME ...] [--device cuda] [--subjects 300] [--repeats 3]; prints a JSON line each.
The graph rulers need torch_geometric (pip install --no-deps torch_geometric xxhash).
"""

import argparse
import contextlib
import json
import statistics
import time
import warnings

import numpy as np
import public_style
import torch
from timing import significant, wait

import m2lgdg
from m2lgdg.splits import validation_split

EPOCHS = 3  # a run; the first is not counted
FIELDS = {
    "braingnn": {"epochs": EPOCHS},
    "brainnetcnn": {"epochs": EPOCHS},
    "ibgnn-plus": {"epochs": 3 * EPOCHS},  # the backbone's third is looked at
    "ufa-net": {"epochs": EPOCHS, "alignment_start": 0},
}


class Enough(Exception):
    """The epochs wanted are done."""


def our_epochs(name, cohort, device):
    """Seconds of each epoch but the first."""
    marks = []

    def progress(**_):
        wait(device)
        marks.append(time.perf_counter())
        if len(marks) == EPOCHS:
            raise Enough

    with contextlib.suppress(Enough):
        m2lgdg.make(name, **FIELDS[name]).fit(cohort, seed=0, device=device, progress=progress)
    return np.diff(marks).tolist()


def ruler_of(name, cohort, device):
    """A network, its items, and the batch size, made once."""
    own = m2lgdg.make(name, **FIELDS[name])
    found = {key: value.cpu() for key, value in own.features(cohort, torch.device("cpu")).items()}
    label = torch.from_numpy(cohort.labels.astype(np.int64))
    rois = len(cohort.rois)
    if name == "braingnn":
        return public_style.BrainGNN(rois), public_style.graphs(found["fc"], found["partial"], label), own
    if name == "ibgnn-plus":
        return public_style.IBGNN(rois), public_style.graphs(found["fc"], found["fc"], label), own
    if name == "brainnetcnn":
        return public_style.BrainNetCNN(rois), (found["fc"], label), own
    graph = torch.from_numpy(own.prepare(cohort, found)["graph"])
    site = torch.tensor([cohort.site_names.index(one) for one in cohort.sites])
    return public_style.UFANet(graph, own.length), (found["scaled_series"], label, site), own


def ruler_epochs(ruler, loaders, device):
    network, _, own = ruler
    network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, weight_decay=own.weight_decay)
    taken = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        public_style.epoch(network, optimizer, *loaders, device)
        wait(device)
        taken.append(time.perf_counter() - start)
    return taken[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FIELDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--subjects", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of sparse products, which are in beta
    cohort = m2lgdg.make_cohort("demo")
    cohort = cohort.select(np.arange(len(cohort))[:: -(-len(cohort) // options.subjects)])
    training, validation = validation_split(cohort, seed=0, share=0.15, by="subject")
    for name in options.names:
        if public_style.pyg is None and name in ("braingnn", "ibgnn-plus"):
            print(json.dumps({"method": name, "left_out": "torch_geometric is not installed"}))
            continue
        ruler = ruler_of(name, cohort, options.device)
        loaders = public_style.loaders(ruler[1], training, validation, ruler[2].batch_size)
        ours, theirs = [], []
        for _ in range(options.repeats):
            theirs += ruler_epochs(ruler, loaders, options.device)
            ours += our_epochs(name, cohort, options.device)
        mine, other = statistics.median(ours), statistics.median(theirs)
        result = {"method": name, "subjects": len(cohort), "batch": ruler[2].batch_size, "threads": torch.get_num_threads()}
        result |= {"device": options.device, "ruler_parameters": sum(one.numel() for one in ruler[0].parameters())}
        result |= {"ruler_seconds": significant(other), "our_seconds": significant(mine)}
        print(json.dumps(result | {"times_faster": significant(other / mine)}), flush=True)


if __name__ == "__main__":
    main()
