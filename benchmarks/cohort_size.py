"""How time and memory of a study of the default model grow with the cohort: 200 ROIs, every site left out, two workers.

Usage: python benchmarks/cohort_size.py [--times 0.25 1 2]
The cohort is the synthetic preset `rest-meta-mdd` (2,269 subjects of 22 sites), smaller or several times over.
Prints one JSON line for each size. CPU seconds and memory are those of the command and all of its processes, one thread each.
Memory is the largest sum of proportional set sizes, in which pages shared by processes count once.
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

ROOT = Path(__file__).parents[1]
MAKE = """
import sys, m2lgdg
from m2lgdg.data.synthetic import PRESETS
times, sizes = float(sys.argv[1]), PRESETS["rest-meta-mdd"].sizes
copies = range(max(round(times), 1))
sites = {f"{name}-{copy}": max(round(min(times, 1) * size), 8) for copy in copies for name, size in sizes.items()}
cohort = m2lgdg.make_cohort("rest-meta-mdd", n_rois=200, sizes=sites, seed=0)
cohort.save("cohort.safetensors")
print(len(cohort), len(sites))
"""
STUDY = """
name = "size"
cohort = "cohort.safetensors"
methods = ["connectome-adaptive"]
seeds = [0]
[method.connectome-adaptive]
variant = "phenotypes"
"""


def memory(process):
    """GiB of a process and its children."""
    total, waiting = 0, [Path(f"/proc/{process}")]
    while waiting:
        folder = waiting.pop()
        try:
            total += int((folder / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
            for task in (folder / "task").iterdir():
                waiting += [Path(f"/proc/{child}") for child in (task / "children").read_text().split()]
        except (OSError, IndexError):  # it has ended
            continue
    return total / 2**20


def measure(times, folder, environment):
    """Subjects, sites, CPU seconds, wall seconds and memory for one size."""
    made = subprocess.run(
        [sys.executable, "-c", MAKE, str(times)], cwd=folder, env=environment, stdout=subprocess.PIPE, check=True
    )
    (folder / "size.toml").write_text(STUDY)
    words = [sys.executable, "-m", "m2lgdg", "run", "size.toml", "--out", f"size-{times}", "--jobs", "2"]
    before, start, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0.0
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            most = max(most, memory(running.pid))
            time.sleep(0.5)
    if running.returncode:
        sys.exit(f"the study ended with {running.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    subjects, sites = map(int, made.stdout.split())
    seconds = time.perf_counter() - start
    return {"subjects": subjects, "sites": sites, "cpu s": round(cpu), "wall s": round(seconds), "GiB": round(most, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, nargs="*", default=[0.25, 1, 2])
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for times in parser.parse_args().times:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(times, Path(name), environment)), flush=True)


if __name__ == "__main__":
    main()
