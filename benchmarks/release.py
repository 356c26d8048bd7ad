"""The three commands of docs/rest-meta-mdd.md on a made-up release of full size: seconds and peak memory of each.

The release is written first: 22 sites, 2,269 subjects (or a share of each site's), series of the `rest-meta-mdd` preset as
the AAL columns among 1,833. Usage: python benchmarks/release.py FOLDER [--share 0.1] [--methods fc-logistic ...]
[--device cuda] [--jobs 2] [--seeds 0] [--set key=value ...]; prints a JSON line a command.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.io import savemat

import m2lgdg
from m2lgdg.data.synthetic import REST_SITES

ROOT = Path(__file__).parents[1]
COLUMNS = 1833
BOOK = "REST-meta-MDD-PhenotypicData_WithHAMDSubItem_V4.xlsx"


def write_release(cohort, folder):
    """The cohort's series as the AAL columns of the consortium's files, its phenotypes as the workbook."""
    place = Path(folder) / "Results" / "ROISignals_FunImgARCWF"
    place.mkdir(parents=True)
    sheets = {"MDD": [], "Controls": []}
    phenotypes = cohort.phenotypes[["sex", "age", "education"]].fillna(-9999).to_numpy()
    for i, series in enumerate(cohort.series):
        patient = cohort.labels[i] == 1
        subject = f"{cohort.sites[i]}-{1 if patient else 2}-{i:04d}"
        signals = np.zeros((len(series), COLUMNS))
        signals[:, : series.shape[1]] = series
        savemat(place / f"ROISignals_{subject}.mat", {"ROISignals": signals})
        sheets["MDD" if patient else "Controls"].append((subject, *phenotypes[i]))
    with pd.ExcelWriter(Path(folder) / BOOK, engine="openpyxl") as book:
        for name, rows in sheets.items():
            pd.DataFrame(rows, columns=["ID", "Sex", "Age", "Education (years)"]).to_excel(book, sheet_name=name, index=False)


def measured(*command, where):
    """Run a command and tell what it took, its own processes included."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "m2lgdg.cli", *map(str, command)], cwd=where, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"command": command[0], "exit": process.returncode, "seconds": seconds, "GiB": used.ru_maxrss / 2**20}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--methods", nargs="+", default=["fc-logistic"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", dest="changes", nargs="*", default=[], help="more changes of the study file")
    asked = parser.parse_args()
    release = asked.folder / "REST-meta-MDD"
    if not release.is_dir():
        sizes = {site: max(4, round(size * asked.share)) for site, size in REST_SITES.items()}
        write_release(m2lgdg.make_cohort("rest-meta-mdd", sizes=sizes), release)
    (asked.folder / "studies").mkdir(exist_ok=True)
    for path in (ROOT / "studies").glob("*rest-meta-mdd*"):
        (asked.folder / "studies" / path.name).write_text(path.read_text())
    own = [f"methods={json.dumps(asked.methods)}", f"seeds={asked.seeds}", f"device={asked.device}", "explain=false"]
    if "m2lgdg" not in asked.methods:
        own.append("method={}")
    if not set(asked.methods) & {"fc-logistic", "fc-svm", "tangent-logistic", "tangent-ridge", "connectome-ensemble"}:
        own.append("variants=[]")
    changes = [word for change in own + asked.changes for word in ("--set", change)]
    cohort, results = "local/rest-meta-mdd.cohort", "results/rest-meta-mdd"
    measured("convert", "REST-meta-MDD", cohort, "--overwrite", where=asked.folder)
    measured("run", "studies/rest-meta-mdd.toml", "--out", results, "--jobs", asked.jobs, *changes, where=asked.folder)
    measured("table", results, where=asked.folder)


if __name__ == "__main__":
    main()
