"""The most memory a worker of a study takes, on a synthetic cohort as large as REST-meta-MDD that lies memory-mapped on disk.

Each method runs one cell (target S20, all others source) through the study runner in a process of its own, whose peak resident
size the system tells. Pages of the map count as resident, though all workers share them.
Usage: python benchmarks/memory.py [METHOD ...]; prints a JSON line each.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

CELLS = {
    "fc-logistic": {"phenotypes": True},
    "tangent-logistic": {},
    "connectome-ensemble": {},
    "m2lgdg": {"variant": "small", "epochs": 1},
}
LIMIT_GIB = 3.0


def worker(name):
    """In a process of its own."""
    import m2lgdg

    path = Path(tempfile.gettempdir()) / f"m2lgdg-rest-meta-mdd-{m2lgdg.__version__}.cohort"  # made once
    if not path.exists():
        m2lgdg.make_cohort("rest-meta-mdd").save(path)
    with tempfile.TemporaryDirectory() as folder:
        study = {"name": "memory", "cohort": str(path), "methods": [name], "seeds": [0], "targets": ["S20"]}
        summary = m2lgdg.run_study(study | {"method": {name: CELLS[name]}}, Path(folder) / "results")
        assert not summary.failed, summary.failed
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(CELLS))
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    for name in options.methods:
        command = [sys.executable, __file__, "--worker", name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peak = float(said.split()[-1])
        print(json.dumps({"method": name, **CELLS.get(name, {}), "peak_gib": round(peak, 2), "below_limit": peak < LIMIT_GIB}))


if __name__ == "__main__":
    main()
