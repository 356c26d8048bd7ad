"""The scripts of the pages for R and MATLAB, as far as R and GNU Octave are installed to run them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import m2lgdg
from m2lgdg.metrics import auc
from m2lgdg.study.predictions import read_predictions

DOCS = Path(__file__).parents[1] / "docs"
RSCRIPT, OCTAVE = shutil.which("Rscript"), shutil.which("octave-cli")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(linear_study, tiny, tmp_path_factory):
    """A study, a model, its graph, and the series of a subject with a flat ROI."""
    from m2lgdg.deploy.onnx import export_onnx

    folder = tmp_path_factory.mktemp("languages")
    shutil.copytree(linear_study, folder / "study")
    series = np.array(tiny.series[0])
    series[:, 3] = 2.0
    np.savetxt(folder / "subject.csv", series, delimiter=",", header=",".join(tiny.rois), comments="", fmt="%.9g")
    export_onnx(m2lgdg.make("fc-logistic").fit(tiny), folder / "model.onnx")
    return folder


def areas(folder):
    rows = read_predictions(folder / "study")
    own = rows[rows["method"] == "fc-logistic"]
    return {site: 100 * auc(here["label"], here["proba"]) for site, here in own.groupby("target")}


def run(command, text, name, folder, **environment):
    (folder / name).write_text(text)
    done = subprocess.run([command, name], cwd=folder, capture_output=True, text=True, timeout=120, env=environment or None)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def subject(folder, tiny):
    series = np.loadtxt(folder / "subject.csv", delimiter=",", skiprows=1).astype(np.float32)
    label, site = tiny.labels[:1], tiny.sites[:1]
    return m2lgdg.Cohort.from_arrays([series], label, site, rois=tiny.rois)


@pytest.mark.skipif(RSCRIPT is None, reason="R is not installed")
def test_r_reads_predictions(folder):
    printed = run(RSCRIPT, blocks("r.md", "r")[0], "predictions.R", folder).split()
    half = len(printed) // 2
    found = dict(zip(printed[:half], map(float, printed[half:]), strict=True))
    assert found == {site: pytest.approx(area, abs=0.006) for site, area in areas(folder).items()}


@pytest.mark.skipif(RSCRIPT is None, reason="R is not installed")
def test_r_calls_the_graph(folder, subject, tiny):
    if subprocess.run([RSCRIPT, "-e", "library(reticulate); library(jsonlite)"], capture_output=True).returncode:
        pytest.skip("reticulate or jsonlite of R is not installed")
    environment = dict(os.environ) | {"RETICULATE_PYTHON": sys.executable}
    printed = run(RSCRIPT, blocks("r.md", "r")[1], "onnx.R", folder, **environment)
    expected = m2lgdg.make("fc-logistic").fit(tiny).predict_proba(subject)[0, 1]
    assert float(printed.split()[-1]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.skipif(OCTAVE is None, reason="GNU Octave is not installed")
def test_octave_reads_predictions(folder):
    printed = run(OCTAVE, blocks("matlab.md", "matlab")[0], "predictions.m", folder)
    found = {site: float(area) for site, area in re.findall(r"(\w+): AUC ([\d.]+) %", printed)}
    assert found == {site: pytest.approx(area, abs=0.006) for site, area in areas(folder).items()}


@pytest.mark.skipif(OCTAVE is None, reason="GNU Octave is not installed")
def test_octave_reads_series_for_the_graph(folder, subject):
    text = blocks("matlab.md", "matlab")[2] + 'dlmwrite("read.csv", series, "precision", 17);\n'
    run(OCTAVE, text, "series.m", folder)
    np.testing.assert_array_equal(np.loadtxt(folder / "read.csv", delimiter=",").astype(np.float32), subject.series[0])
