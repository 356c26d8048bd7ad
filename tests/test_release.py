"""docs/rest-meta-mdd.md holds: from a release folder to the paper's tables by the three commands that it prints."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.io import savemat

from m2lgdg import Cohort, make_cohort
from m2lgdg.cli import main
from m2lgdg.study.predictions import read_predictions

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "rest-meta-mdd.md").read_text()
BLOCK = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)[0]
COMMANDS = [shlex.split(line) for line in BLOCK.splitlines()]
# What makes the run one of seconds: two methods, one seed, a small network, no GPU.
QUICK = ['methods=["m2lgdg", "fc-logistic"]', "seeds=[0]", "device=cpu", "explain=false"]
QUICK += [f"method.m2lgdg.{field}" for field in ("variant=small", "precision=fp32", "epochs=1", "warmup=1")]


def write_release(cohort, folder):
    """The cohort's series as the AAL columns of the consortium's files, its phenotypes as the workbook."""
    place = Path(folder) / "Results" / "ROISignals_FunImgARCWF"
    place.mkdir(parents=True)
    sheets = {"MDD": [], "Controls": []}
    phenotypes = cohort.phenotypes[["sex", "age", "education"]].fillna(-9999).to_numpy()
    for i, series in enumerate(cohort.series):
        patient = cohort.labels[i] == 1
        subject = f"{cohort.sites[i]}-{1 if patient else 2}-{i:04d}"
        signals = np.zeros((len(series), 1833))
        signals[:, : series.shape[1]] = series
        savemat(place / f"ROISignals_{subject}.mat", {"ROISignals": signals})
        sheets["MDD" if patient else "Controls"].append((subject, *phenotypes[i]))
    with pd.ExcelWriter(Path(folder) / "REST-meta-MDD-PhenotypicData_WithHAMDSubItem_V4.xlsx", engine="openpyxl") as book:
        for name, rows in sheets.items():
            pd.DataFrame(rows, columns=["ID", "Sex", "Age", "Education (years)"]).to_excel(book, sheet_name=name, index=False)


@pytest.fixture(scope="module")
def cohort():
    """The paper's targets and two source sites, eight people each; and the copy of site 14 that must not be used."""
    sizes = dict.fromkeys(["S1", "S4", "S9", "S14", "S15", "S20", "S21"], 8)
    return make_cohort("tiny", sizes=sizes, n_rois=116, lengths=(30, 40), networks=7, n_disease_rois=40, roi_effect=3.0)


@pytest.fixture(scope="module")
def checkout(cohort, tmp_path_factory):
    """A folder as the page has it: the download and the study files."""
    folder = tmp_path_factory.mktemp("checkout")
    write_release(cohort, folder / "REST-meta-MDD")
    shutil.copytree(ROOT / "studies", folder / "studies")
    return folder


def said(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["m2lgdg", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    streams = capsys.readouterr()
    assert not ended.value.code, streams.err
    return streams.out


def test_three_commands_from_the_download_to_the_tables(cohort, checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    assert [(command[0], command[1]) for command in COMMANDS] == [("m2lgdg", one) for one in ("convert", "run", "table")]
    said(monkeypatch, capsys, *COMMANDS[0][1:])
    read = Cohort.load("local/rest-meta-mdd.cohort")
    assert (len(read), len(read.excluded)) == (48, 8)  # without site 4
    assert set(read.site_names) == set(cohort.site_names) - {"S4"}
    changes = [word for change in QUICK for word in ("--set", change)]
    alone = ["1" if before == "--jobs" else word for before, word in zip(COMMANDS[1], COMMANDS[1][1:], strict=False)]
    assert "12 of 12 cells done" in said(monkeypatch, capsys, *alone, *changes)
    table = said(monkeypatch, capsys, *COMMANDS[2][1:])
    assert re.findall(r"^Target (\w+)$", table, re.M) == ["S9", "S15", "S20", "S21"]
    rows = re.findall(r"^m2lgdg .*$", table, re.M)
    assert re.findall(r"\[([\d.]+)\]", rows[0]) == ["65.80", "85.20", "46.40", "75.81", "56.60"]
    assert re.findall(r"\[([\d.]+)\]", rows[4]) == ["63.64", "62.42", "63.92", "69.48", "63.62"]
    assert set(read_predictions("results/rest-meta-mdd")["variant"]) == {"", "phenotypes"}


def test_the_linear_peers_without_a_gpu_as_printed(checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    changes = shlex.split(re.search(r"add `(--method .*?)`", TEXT, re.DOTALL)[1])
    said(monkeypatch, capsys, *COMMANDS[0][1:-1], "linear.cohort")
    short = ["--set", "cohort=../linear.cohort", "--out", "linear"]
    assert "20 of 20 cells done" in said(monkeypatch, capsys, "run", "studies/rest-meta-mdd.toml", *changes, *short)
