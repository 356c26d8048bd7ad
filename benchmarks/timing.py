"""Ratios that can be trusted on a shared machine: both sides by turns in one run, the median over repeats."""

import statistics
import time

import torch


def by_turns(sides, repeats=5, device="cpu", warmup=1):
    """{name: median seconds} of some functions without arguments, each called `warmup` + `repeats` times, in turn."""
    taken = {name: [] for name in sides}
    for i in range(warmup + repeats):
        for name, work in sides.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            if i >= warmup:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in taken.items()}


def wait(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def significant(value, digits=3):
    return float(f"{value:.{digits}g}")
