"""Memory and CPU time of a study of many connectomes, with each site left out once, on random ones with a planted signal.

Usage: python benchmarks/connectomes.py [--subjects 1000] [--rois 60] [--sites 8] [--targets 0] [--jobs 1] [--threads 1]
    [--methods fc-logistic connectome-adaptive] [--folder DIR]
The defaults take a minute. The size of a large consortium: --subjects 10000 --rois 200 --sites 40 --jobs 2; with `--targets 2`,
only the first two sites are left out. `--folder` keeps cohort and study: the same command continues an interrupted run.
Prints one JSON line. Memory is the largest sum of the resident sizes of the study's process and its workers, seen ten times
a second in /proc (Linux); pages of the cohort file that several of them map count in each. CPU seconds are those of all.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_GIB = 8.0
VOLUMES = 150  # of the random series that the correlations are computed from
NETWORKS = 12


def make(options, path):
    """Save a cohort of correlations with effects of site, of the global signal, and of the label on two networks."""
    import numpy as np

    import m2lgdg

    rng = np.random.default_rng(0)
    sites, labels = np.arange(options.subjects) % options.sites, rng.integers(0, 2, options.subjects)
    networks = 0.5 * rng.normal(size=(NETWORKS, options.rois))
    at_site = networks + 0.1 * rng.normal(size=(options.sites, NETWORKS, options.rois))  # (site, network, roi)
    of_label = 0.5 * rng.normal(size=(2, options.rois))

    def connectome(site, label):
        strength = np.exp(0.4 * rng.normal(size=(NETWORKS, 1)))
        planted = of_label * np.exp(0.3 * rng.normal(size=(2, 1))) * (1 + 0.15 * label)
        everywhere = np.full((1, options.rois), 0.7 * np.exp(0.5 * rng.normal()))
        sources = np.concatenate([at_site[site] * strength, planted, everywhere])  # (source, roi)
        series = rng.normal(size=(VOLUMES, len(sources))) @ sources + rng.normal(size=(VOLUMES, options.rois))
        return np.corrcoef(series.T).astype(np.float32)

    matrices = [connectome(site, label) for site, label in zip(sites, labels, strict=True)]
    names = [f"S{site + 1:02d}" for site in sites]
    m2lgdg.Cohort.from_connectomes(matrices, labels, names, values="correlation", name="connectomes").save(path)


def study(options, folder):
    """Run it and print the mean AUC over the sites; in a process of its own."""
    import m2lgdg

    targets = [f"S{site + 1:02d}" for site in range(options.targets or options.sites)]
    keys = {"name": "connectomes", "cohort": str(folder / "made.cohort"), "methods": options.methods, "targets": targets}
    keys |= {"seeds": [0], "threads": options.threads}
    summary = m2lgdg.run_study(keys, folder / "study", jobs=options.jobs)
    assert not summary.failed, summary.failed
    print(json.dumps({"auc": summary.scores()["mean"].round(4).to_dict(), "cells": [summary.done, summary.reused]}))


def resident(root):
    """GiB of a process and all of its descendants."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                sizes[int(entry.name)] = int((entry / "statm").read_text().split()[1]) * resource.getpagesize()
            except (OSError, IndexError):  # it has ended
                continue
    found, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        found += sizes.get(one, 0)
        waiting += [child for child, parent in parents.items() if parent == one]
    return found / 2**30


def watched(words):
    """Output, largest memory (GiB), CPU seconds and seconds of a command with all of its processes."""
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0.0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.1)
        output = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return output, peak, cpu, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=int, default=1000)
    parser.add_argument("--rois", type=int, default=60)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--targets", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["fc-logistic", "connectome-adaptive"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=["make", "study"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "make":
        make(options, options.folder / "made.cohort")
    elif options.part == "study":
        study(options, options.folder)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["OMP_NUM_THREADS"] = str(options.threads)
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--part"]
            if not (folder / "made.cohort").exists():
                subprocess.run([*command, "make"], check=True)
            output, peak, cpu, seconds = watched([*command, "study"])
        measured = {"peak_gib": round(peak, 2), "below_limit": peak < LIMIT_GIB, "cpu_s": round(cpu), "seconds": round(seconds)}
        size = {key: getattr(options, key) for key in ("subjects", "rois", "sites", "jobs", "threads")}
        print(json.dumps(size | measured | json.loads(output.splitlines()[-1])))


if __name__ == "__main__":
    main()
