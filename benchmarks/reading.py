"""How fast the ABIDE text files load, beside numpy.loadtxt over the same files in the same run: one JSON line.

Usage: python benchmarks/reading.py FOLDER (an ABIDE_pcp folder; default: M2LGDG_ABIDE)
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import m2lgdg
from m2lgdg.data.readers.abide import load_1d
from m2lgdg.data.readers.gather import SeriesFile, gather


def seconds(work, repeats=3):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["M2LGDG_ABIDE"])
    files = sorted(folder.glob("**/*_rois_aal.1D"))
    found = [SeriesFile(file.stem, "", file) for file in files]
    for file in files:  # both sides read from the page cache
        file.read_bytes()
    ours = seconds(lambda: gather(found, lambda file: load_1d(file, "aal"), folder, on_bad="exclude"))
    numpy = seconds(lambda: [np.loadtxt(file) for file in files])
    whole = seconds(lambda: m2lgdg.read(folder, on_bad="exclude"))
    result = {
        "files": len(files),
        "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1),
        "loadtxt_seconds": round(numpy, 3),
        "read_series_seconds": round(ours, 3),
        "times_faster": round(numpy / ours, 2),
        "whole_cohort_seconds": round(whole, 3),
        "whole_cohort_times_faster": round(numpy / whole, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
