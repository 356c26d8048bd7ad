"""How CPU time and memory of `m2lgdg fit` grow with subjects, ROIs and sites: the default model with its new-site calibration.

Usage: python benchmarks/growth.py [--limit 8] [--seconds 1500] [--only subjects rois sites] [--draw]
Each point is one command in a process of its own, on random scans with a planted signal, as series of 150 volumes and as
correlations. Points are added to docs/images/growth.csv, which a later run continues; then docs/images/growth.png is drawn
(`--draw`: nothing is measured). A process above `--limit` GiB or `--seconds` of CPU time is ended, and larger points of its
curve are left out. CPU time is user and system time, memory the peak resident size, in which pages of the cohort file count.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE, FIGURE = ROOT / "docs" / "images" / "growth.csv", ROOT / "docs" / "images" / "growth.png"
COLUMNS = ("axis", "scan", "subjects", "rois", "sites", "cpu_seconds", "peak_gib", "file_gib", "ended")
USUAL = {"subjects": 1000, "rois": 116, "sites": 20}
AXES = {
    "subjects": (500, 1000, 2000, 5000, 10000, 20000),
    "rois": (100, 200, 400, 700, 1000),
    "sites": (5, 10, 20, 50, 100),
}
SCANS = ("series", "connectomes")
VOLUMES, NETWORKS = 150, 12


def make(scan, size, path):
    """Save a cohort with an effect of the label on one of twelve networks, and with age and sex; in a process of its own."""
    import numpy as np
    import pandas as pd

    import m2lgdg

    rng = np.random.default_rng(0)
    subjects, rois = size["subjects"], size["rois"]
    sites, labels = np.arange(subjects) % size["sites"], rng.integers(0, 2, subjects)
    networks = 0.5 * rng.normal(size=(NETWORKS, rois)).astype(np.float32)
    at_site = networks + 0.1 * rng.normal(size=(size["sites"], NETWORKS, rois)).astype(np.float32)  # (site, network, roi)

    def series(site, label):
        strength = np.exp(0.4 * rng.normal(size=(NETWORKS, 1))).astype(np.float32)
        strength[0] *= 1 + 0.3 * label
        own = 0.6 * rng.standard_normal((NETWORKS, rois), dtype=np.float32)  # otherwise FC of two subjects is that of copies
        draws = rng.standard_normal((VOLUMES, NETWORKS + rois), dtype=np.float32)
        return draws[:, :NETWORKS] @ ((at_site[site] + own) * strength) + draws[:, NETWORKS:]  # (volume, roi)

    def correlations(one):
        return np.corrcoef(one.T).astype(np.float32)  # (roi, roi)

    phenotypes = pd.DataFrame({"age": rng.uniform(8, 40, subjects).round(1), "sex": rng.integers(1, 3, subjects)})
    scans = [series(site, label) for site, label in zip(sites, labels, strict=True)]
    names, shared = [f"S{site + 1:03d}" for site in sites], {"phenotypes": phenotypes, "name": "growth"}
    if scan == "series":
        cohort = m2lgdg.Cohort.from_arrays(scans, labels, names, **shared)
    else:
        for i, one in enumerate(scans):  # in place: both lists together would be the largest of all
            scans[i] = correlations(one)
        cohort = m2lgdg.Cohort.from_connectomes(scans, labels, names, values="correlation", **shared)
    cohort.save(path)


def measured(scan, size, options, folder):
    """CPU seconds, peak memory and size of the file (GiB), and why the process was ended, if it was."""
    path = folder / "made.cohort"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import growth, pathlib; "
    code += f"growth.make({scan!r}, {size!r}, pathlib.Path({str(path)!r}))"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    command = [sys.executable, "-m", "m2lgdg", "fit", str(path), "--out", str(folder / "model"), "--device", "cpu"]
    with (folder / "said.txt").open("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        ended = ""
        while not (found := os.wait4(process.pid, os.WNOHANG))[0]:
            ended = ended or beyond(process.pid, options)
            if ended:
                process.kill()
            time.sleep(0.05)
        _, status, used = found
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode and not ended:
            sys.exit(f"fit of {size} as {scan} ended with {process.returncode}: {said.read()[-2000:]}")
    size_gib = path.stat().st_size / 2**30
    path.unlink()
    subprocess.run(["rm", "-rf", str(folder / "model")], check=True)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, size_gib, ended


def beyond(process, options):
    """What the process has too much of, if anything, as Linux tells."""
    try:
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
        after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return ""
    seconds = (int(after[11]) + int(after[12])) / os.sysconf("SC_CLK_TCK")
    return "memory" if resident > options.limit else "time" if seconds > options.seconds else ""


def read():
    return list(csv.DictReader(TABLE.open())) if TABLE.exists() else []


def measure(options):
    with tempfile.TemporaryDirectory() as name:
        for axis in options.only:
            for scan in SCANS:
                for value in AXES[axis]:
                    size = USUAL | {axis: value}
                    before = [row for row in read() if row["scan"] == scan and all(int(row[k]) == n for k, n in size.items())]
                    if before:
                        found = [before[0][column] for column in COLUMNS[5:]]
                    else:
                        found = list(measured(scan, size, options, Path(name)))
                        found[:3] = [f"{one:.3f}" for one in found[:3]]
                    row = [axis, scan, *map(str, size.values()), *found]
                    print(*row, flush=True)
                    if not any([entry[column] for column in COLUMNS] == row for entry in read()):
                        new = not TABLE.exists()
                        with TABLE.open("a", newline="") as file:
                            csv.writer(file, lineterminator="\n").writerows([COLUMNS, row] if new else [row])
                    if row[-1]:
                        break


def draw():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(9, 5), sharex="col", sharey="row", layout="constrained")
    looks = {"series": ("#1f6f8b", "o", "time series"), "connectomes": ("#c8553d", "s", "connectomes")}
    rows = read()
    for column, axis in enumerate(AXES):
        usual = ", ".join(f"{value:,} {name}" for name, value in USUAL.items() if name != axis).replace("rois", "ROIs")
        for panel, quantity in zip(panels[:, column], ("cpu_seconds", "peak_gib"), strict=True):
            for scan, (colour, marker, name) in looks.items():
                points = [(int(row[axis]), row) for row in rows if row["axis"] == axis and row["scan"] == scan]
                points.sort(key=lambda point: point[0])
                whole = [(x, float(row[quantity])) for x, row in points if not row["ended"]]
                panel.plot([x for x, _ in whole], [y for _, y in whole], color=colour, marker=marker, markersize=4, label=name)
                for x, row in points:
                    if row["ended"]:  # the true value lies above
                        panel.plot(x, float(row[quantity]), color=colour, marker=6, markersize=8)
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.25)
        panels[0, column].set_title(usual, fontsize=9)
        panels[1, column].set_xlabel({"rois": "ROIs"}.get(axis, axis))
        panels[1, column].set_xticks(AXES[axis], [f"{value:,}" for value in AXES[axis]], rotation=45)
        panels[1, column].minorticks_off()
    panels[0, 0].set_ylabel("CPU seconds of fit")
    panels[1, 0].set_ylabel("peak memory, GiB")
    for panel, ticks in ((panels[0, 0], (10, 30, 100, 300, 1000)), (panels[1, 0], (0.25, 0.5, 1, 2, 4, 8, 16))):
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(FIGURE, dpi=150, metadata={"Software": None})
    print(f"Wrote {FIGURE.relative_to(ROOT)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--only", nargs="*", choices=list(AXES), default=list(AXES))
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        measure(options)
    draw()


if __name__ == "__main__":
    main()
