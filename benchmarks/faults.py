"""Is anything lost when a study is killed, the disk fills up or turns read-only, or the clock jumps?

Usage: python benchmarks/faults.py [--faults kill full read-only clock] [--jobs 1 2] [--sizes 6] [--kills 50]
[--engines serial joblib dask]. A study is disturbed, resumed, and compared with an undisturbed run byte by byte; prints a JSON
line a fault and ends with 1 on a difference. `kill` sends SIGKILL to the whole process group at random moments. `full` and
`read-only` need root, for file systems of their own in a mount name space that vanishes with them; `clock` needs `faketime`.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import m2lgdg
from m2lgdg import cli
from m2lgdg.registry import load_methods
from m2lgdg.storage import TEMPORARY

STUDY = """
cohort = "release"
methods = ["prior", "phenotype-logistic", "fc-logistic", "tangent-ridge"]
variants = ["phenotypes"]
seeds = [0]
explain = ["fc-logistic"]
"""
KILLED_STUDY = """
cohort = "tiny.cohort"
methods = ["prior", "phenotype-logistic", "fc-logistic", "fc-svm", "tangent-ridge"]
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
ROOM = "64m"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=int, default=6)
    parser.add_argument("--faults", nargs="+", default=["kill", "full", "read-only", "clock"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--engines", nargs="+", default=["serial", "joblib", "dask"])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wrong = 0
    if "kill" in options.faults and not options.inside:
        draw = random.Random(0)
        for engine in options.engines:
            with tempfile.TemporaryDirectory() as folder:
                reported = killed(Path(folder), engine, options.kills, draw)
            print(json.dumps(reported), flush=True)
            wrong += reported["different_files"] + reported["refused"]
        options.faults.remove("kill")
    if not options.faults:
        sys.exit(1 if wrong else 0)
    if not options.inside:
        script = [sys.executable, *sys.argv, "--inside", "--faults", *options.faults]
        if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
            sys.exit("only root may mount a disk to fill")
        sys.exit(max(bool(wrong), subprocess.run(["unshare", "--mount", *script]).returncode))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare(Path())
        load_methods()
        for jobs in options.jobs:
            quiet = Path(f"quiet-{jobs}")
            assert run(quiet, jobs).returncode == 0
            made = {
                "full": lambda quiet=quiet, jobs=jobs: full_disk(quiet, jobs, options.sizes),
                "read-only": lambda quiet=quiet, jobs=jobs: read_only(quiet, jobs),
                "clock": lambda quiet=quiet, jobs=jobs: clock(quiet, jobs),
            }
            for fault in options.faults:
                reported = made[fault]()
                print(json.dumps({"jobs": jobs, **reported}), flush=True)
                wrong += reported["different_files"] + reported["no_sentence"]
    sys.exit(1 if wrong else 0)


def killed(folder, engine, wanted, draw, per_study=5):
    """Kill runs until there were `wanted` kills, let each study come to its end, count what is not as it should be."""
    m2lgdg.make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
    (folder / "study.toml").write_text(KILLED_STUDY)
    jobs = 1 if engine == "serial" else 2
    command = [sys.executable, "-c", RUNS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    runs = subprocess.Popen(command, cwd=folder, **pipes)
    run_killed(runs, "warm", engine, jobs, None)
    start = time.monotonic()
    run_killed(runs, "quiet", engine, jobs, None)
    length = time.monotonic() - start
    reported = {"fault": "kill", "engine": engine} | dict.fromkeys(
        ("kills", "studies", "half_written", "refused", "different_files"), 0
    )
    moments = Counter()
    while reported["kills"] < wanted:
        out = folder / f"out-{reported['studies']}"
        reported["studies"] += 1
        code, last = -signal.SIGKILL, min(reported["kills"] + per_study, wanted)
        while code == -signal.SIGKILL:
            pause = draw.random() ** 3 * length / 2  # often early, where the folder is claimed
            code = run_killed(runs, out.name, engine, jobs, pause if reported["kills"] < last else None)
            if code == -signal.SIGKILL:
                reported["kills"] += 1
                moments[moment(out, folder / "quiet")] += 1
                reported["half_written"] += sum(bool(TEMPORARY.fullmatch(file.name)) for file in out.rglob(".*"))
        reported["refused"] += code != 0
        reported["different_files"] += differences(out, folder / "quiet")
    runs.stdin.close()
    runs.wait()
    return reported | {"killed": dict(moments)}


def run_killed(runs, out, engine, jobs, pause):
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


def prepare(folder):
    """A release folder, which a run converts into the study's own folder, and a study of it."""
    import numpy as np

    cohort = m2lgdg.make_cohort("tiny", seed=1)
    for name in ("fc-logistic", "tangent-ridge"):  # imports what a run needs, once before the runs are forked
        m2lgdg.make(name, phenotypes=True).fit(cohort).predict_proba(cohort)
    (folder / "release").mkdir()
    rows = ["participant_id\tsite\tlabel\tsex\tage"]
    for subject, site, label, one in zip(cohort.subjects, cohort.sites, cohort.labels, cohort.series, strict=True):
        who = cohort.phenotypes.loc[subject]
        rows.append(f"{subject}\t{site}\t{label}\t{who['sex']:g}\t{who['age']:.2f}")
        np.save(folder / "release" / f"{subject}.npy", one)
    (folder / "release" / "participants.tsv").write_text("\n".join(rows) + "\n")
    (folder / "study.toml").write_text(STUDY)


class Ended(NamedTuple):
    """How a run ended."""

    returncode: int
    stderr: str


def run(out, jobs, *before):
    """`m2lgdg run`; forked from this process, which has everything imported, unless another program goes before it."""
    words = ["run", "study.toml", "--out", str(out), "--jobs", str(jobs)]
    if before:
        command = [*before, sys.executable, "-m", "m2lgdg.cli", *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return Ended(ended.returncode, ended.stderr)
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(said.fileno(), 2)
            sys.argv = ["m2lgdg", *words]
            try:
                cli.main()
            except SystemExit as stop:
                sys.stderr.flush()
                os._exit(stop.code or 0)
            except BaseException as error:
                os.write(2, f"Traceback: {error!r}".encode())
            os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return Ended(code, said.read())


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


def used(folder):
    """Bytes of a folder, in pages, as a tmpfs counts them."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def full_disk(quiet, jobs, sizes):
    """Disks from one page to almost enough: each run ends in a sentence; with more room the next gives the same bytes."""
    reported = Counter(fault="full disk", runs=0, no_sentence=0, different_files=0, half_written=0)
    states = Counter()
    whole = used(quiet)
    for i in range(sizes):
        out = Path(f"full-{jobs}-{i}")
        out.mkdir()
        mount("-t", "tmpfs", "-o", f"size={max(int(whole * i / sizes) // 4096, 1) * 4096}", "none", out)
        ended = run(out, jobs)
        reported["runs"] += 1
        reported["no_sentence"] += not is_sentence(ended)
        states[moment(out, quiet)] += 1
        reported["half_written"] += len(broken_records(out))
        mount("-o", f"remount,size={ROOM}", out)
        reported["no_sentence"] += run(out, jobs).returncode != 0
        reported["different_files"] += differences(out, quiet)
        subprocess.run(["umount", out], check=True)
    return dict(reported) | {"fault": "full disk", "filled": dict(states)}


def read_only(quiet, jobs):
    """A folder that cannot be written to: empty, half done and done; each run ends in a sentence, and changes nothing."""
    reported = Counter(runs=0, no_sentence=0, different_files=0)
    for name in ("empty", "half", "done"):
        out = Path(f"read-only-{jobs}-{name}")
        out.mkdir()
        mount("-t", "tmpfs", "-o", f"size={ROOM}", "none", out)
        if name != "empty":
            shutil.copytree(quiet, out, dirs_exist_ok=True)
        if name == "half":
            for path in sorted((out / "cells").iterdir())[::2]:
                path.unlink()
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        mount("-o", "remount,ro", out)
        ended = run(out, jobs)
        reported["runs"] += 1
        reported["no_sentence"] += not (is_sentence(ended) and "Read-only file system" in ended.stderr)
        reported["different_files"] += before != {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        mount("-o", "remount,rw", out)
        reported["no_sentence"] += run(out, jobs).returncode != 0
        reported["different_files"] += differences(out, quiet)
        subprocess.run(["umount", out], check=True)
    return {"fault": "read-only folder", **reported}


def clock(quiet, jobs):
    """Half the cells done, and the clock ten years back or ahead at the next run; then files dated the other way round."""
    reported = Counter(runs=0, no_sentence=0, different_files=0)
    there = shutil.which("faketime") and jobs == 1  # joblib's semaphores do not work under it
    jumps = [["faketime", "-f", jump] for jump in ("-10y", "+10y")] if there else []
    for i, before in enumerate([*jumps, []]):
        out = Path(f"clock-{jobs}-{i}")
        shutil.copytree(quiet, out)
        for k, path in enumerate(sorted((out / "cells").iterdir())):
            if k % 2:
                path.unlink()
            else:
                os.utime(path, (4e9, 4e9) if k % 4 else (1, 1))
        reported["runs"] += 1
        reported["no_sentence"] += run(out, jobs, *before).returncode != 0
        reported["different_files"] += differences(out, quiet)
    return {"fault": "clock jumps", "faketime": bool(jumps), **reported}


def is_sentence(ended):
    """One line on the error side and exit code 2; or cells that failed for want of room, with their reason, and 1."""
    lines = ended.stderr.strip().splitlines()
    if ended.returncode == 1:
        return bool(lines) and all(line.startswith("failed: ") for line in lines)
    return ended.returncode == 2 and len(lines) == 1 and lines[0].startswith("m2lgdg: ")


def broken_records(out):
    """Records that are there but no JSON."""
    broken = []
    for path in (out / "cells").glob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            broken.append(path)
    return broken


def moment(out, quiet):
    """How far a run came before the disk was full."""
    if not (out / "study.json").is_file():
        return "before study.json"
    cells, total = (len(list((folder / "cells").glob("*.json"))) for folder in (out, quiet))
    return "before the first cell" if not cells else "between cells" if cells < total else "after the last cell"


def differences(out, quiet):
    """Files that are not those of an undisturbed run, and anything left behind."""
    names = {path.relative_to(quiet) for path in (quiet / "explanations").rglob("*") if path.is_file()} | set(map(Path, FILES))
    wrong = sum(not (out / name).is_file() or (out / name).read_bytes() != (quiet / name).read_bytes() for name in names)
    return wrong + sum(path.name != ".lock" for path in out.rglob(".*"))


if __name__ == "__main__":
    main()
