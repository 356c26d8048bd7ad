"""How fast an ABIDE folder is read, beside numpy.loadtxt over the same files in the same run: one JSON line.

Usage: python benchmarks/reading.py FOLDER (an ABIDE_pcp folder; default: M2LGDG_ABIDE)
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import m2lgdg


def seconds(work, repeats=3):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(min(times), 3)


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["M2LGDG_ABIDE"])
    files = sorted(folder.glob("**/*_rois_aal.1D"))
    size = sum(len(file.read_bytes()) for file in files)  # both sides then read from the page cache
    numpy = seconds(lambda: [np.loadtxt(file) for file in files])
    ours = seconds(lambda: m2lgdg.read(folder, on_bad="exclude"))
    found = {"files": len(files), "megabytes": round(size / 1e6, 1), "loadtxt_seconds": numpy, "read_seconds": ours}
    print(json.dumps(found | {"times_faster": round(numpy / ours, 2)}))


if __name__ == "__main__":
    main()
