"""Is anything lost when a study is killed? SIGKILL at random moments, resume, compare with an undisturbed run byte by byte.

Usage: python benchmarks/kill.py [--kills 50] [--per-study 5] [--engines serial joblib dask]; prints a JSON line an engine, ends
with 1 on a difference. A kill takes the whole process group, workers too; a study that has come to its end is begun anew.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import m2lgdg
from m2lgdg.study.folder import LEFT

PLUGIN = '''
import time
import numpy as np
from m2lgdg.method import Method, method

@method("slow-coin")
class SlowCoin(Method):
    """Draws a bias from the seed after a pause."""

    pause: float = 0.02

    def learn(self, source, *, seed, device, progress):
        time.sleep(self.pause)
        self.state_["bias"] = np.random.default_rng([seed, len(source)]).random(1)

    def score(self, target):
        return np.array([(float(self.state_["bias"][0]) + abs(float(one[0, 0]))) % 1 for one in target.series])
'''
STUDY = """
cohort = "tiny.cohort"
plugins = ["coin.py"]
methods = ["prior", "phenotype-logistic", "fc-logistic", "fc-svm", "tangent-ridge", "slow-coin"]
variants = ["phenotypes"]
seeds = [0, 1, 2, 3, 4, 5, 6, 7]
"""
# Forked from one process that has everything imported: a kill then falls into the run itself, not into importing Python.
RUNS = """
import os, sys
from m2lgdg import run_study
from m2lgdg.registry import load_methods
import m2lgdg.study.folder, m2lgdg.deep, joblib, sklearn.svm, sklearn.linear_model, threadpoolctl
load_methods()
for line in sys.stdin:
    out, engine, jobs = line.split()
    child = os.fork()
    if child == 0:
        os.setsid()
        summary = run_study("study.toml", out, jobs=int(jobs), engine=engine)
        os._exit(1 if summary.failed else 0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
FILES = ("predictions.csv", "study.json", "inclusion.csv", "checks.json", "cohort.json", "environment.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--per-study", type=int, default=5, help="kills after which a study may come to its end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", default=["serial", "joblib", "dask"])
    options = parser.parse_args()
    draw = random.Random(options.seed)
    different = 0
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            reported = disturb(Path(folder), engine, options.kills, options.per_study, draw)
        print(json.dumps({"engine": engine, **reported}), flush=True)
        different += reported["different_files"] + reported["refused"]
    sys.exit(1 if different else 0)


def disturb(folder, engine, wanted, per_study, draw):
    """Kill runs until there were `wanted` kills, let each study come to its end, count what is not as it should be."""
    m2lgdg.make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
    (folder / "coin.py").write_text(PLUGIN)
    (folder / "study.toml").write_text(STUDY)
    jobs = 1 if engine == "serial" else 2
    command = [sys.executable, "-c", RUNS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    runs = subprocess.Popen(command, cwd=folder, **pipes)
    run(runs, "warm", engine, jobs, None)
    start = time.monotonic()
    run(runs, "quiet", engine, jobs, None)
    length = time.monotonic() - start
    reported = {
        "kills": 0,
        "studies": 0,
        "undisturbed_s": round(length, 2),
        "half_written": 0,
        "refused": 0,
        "different_files": 0,
    }
    killed = Counter()
    while reported["kills"] < wanted:
        out = folder / f"out-{reported['studies']}"
        reported["studies"] += 1
        code, last = -signal.SIGKILL, min(reported["kills"] + per_study, wanted)
        while code == -signal.SIGKILL:
            pause = draw.random() ** 3 * length / 2  # often early, where the folder is claimed
            code = run(runs, out.name, engine, jobs, pause if reported["kills"] < last else None)
            if code == -signal.SIGKILL:
                reported["kills"] += 1
                killed[moment(out, folder / "quiet")] += 1
                reported["half_written"] += sum(bool(LEFT.fullmatch(file.name)) for file in out.rglob(".*"))
        reported["refused"] += code != 0
        reported["different_files"] += sum(text(out / name) != text(folder / "quiet" / name) for name in FILES)
        reported["different_files"] += sum(file.name != ".lock" for file in out.rglob(".*"))  # nothing may be left behind
    runs.stdin.close()
    runs.wait()
    return reported | {"killed": dict(killed)}


def text(path):
    return path.read_bytes() if path.is_file() else None


def moment(out, quiet):
    """How far a run was when it was killed."""
    if not (out / "study.json").is_file():
        return "before study.json"
    cells = len(list((out / "cells").glob("*.json")))
    total = len(list((quiet / "cells").iterdir()))
    return "before the first cell" if not cells else "between cells" if cells < total else "after the last cell"


def run(runs, out, engine, jobs, pause):
    """One run of the study, killed after a pause unless it has ended; its exit code."""
    runs.stdin.write(f"{out} {engine} {jobs}\n")
    runs.stdin.flush()
    child = int(runs.stdout.readline())
    if pause is not None:
        time.sleep(pause)
        for kill in (os.killpg, os.kill):  # the second for a process that has no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
    return int(runs.stdout.readline())


if __name__ == "__main__":
    main()
