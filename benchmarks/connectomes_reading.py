"""Reading of connectomes: 10,000 .npy files of 200 x 200 by `m2lgdg.read`, beside `np.load` of the same files alone.

Called by `benchmarks/connectomes.py`, or alone: python benchmarks/connectomes_reading.py [--subjects 10000] [--rois 200].
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import m2lgdg


def write_folder(folder: Path, subjects: int, rois: int, sites: int = 40) -> None:
    """participants.tsv and one float32 correlation matrix a subject; a hundred of them are different."""
    rng = np.random.default_rng(0)
    some = []
    for _ in range(100):
        series = rng.normal(size=(150, rois)) + rng.normal(size=(150, 1))
        matrix = np.corrcoef(series.T).astype(np.float32)
        some.append((matrix + matrix.T) / 2)
    lines = ["participant_id\tsite\tlabel\tage"]
    for i in range(subjects):
        lines.append(f"sub-{i:05}\tsite-{i % sites:02}\t{i // sites % 2}\t{20 + i % 50}")
        np.save(folder / f"sub-{i:05}.npy", some[i % len(some)])
    (folder / "participants.tsv").write_text("\n".join(lines) + "\n")


def reading(subjects: int = 10_000, rois: int = 200, repeats: int = 3) -> dict[str, float]:
    """Seconds of the fastest of some repeats, each way, and how many times as long `read` takes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_folder(folder, subjects, rois)
        files = sorted(folder.glob("*.npy"))
        alone, whole = [], []
        for _ in range(repeats):  # one after the other, so that both see the same load and the same cache
            start = time.perf_counter()
            arrays = [np.load(file) for file in files]
            alone.append(time.perf_counter() - start)
            assert len(arrays) == subjects
            del arrays
            start = time.perf_counter()
            cohort = m2lgdg.read(folder)
            whole.append(time.perf_counter() - start)
            assert len(cohort) == subjects and cohort.values == "correlation"
    return {"np.load": min(alone), "m2lgdg.read": min(whole), "times": min(whole) / min(alone)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", type=int, default=10_000)
    parser.add_argument("--rois", type=int, default=200)
    given = parser.parse_args()
    for name, value in reading(given.subjects, given.rois).items():
        print(f"{name:12} {value:.2f}{'' if name == 'times' else ' s'}")
