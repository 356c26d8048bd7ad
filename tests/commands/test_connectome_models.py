"""A model of connectomes from `fit` to `export`, typed: its numbers are those of series, and wrong kinds are one sentence."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import Model, make, make_cohort
from m2lgdg.cohort import Cohort
from m2lgdg.scans import Connectomes

SIZES = {"north": 26, "south": 24, "west": 22, "new": 24}


@pytest.fixture(scope="module")
def series():
    return make_cohort("tiny", sizes=SIZES, seed=5, missing=0.0)


@pytest.fixture(scope="module")
def folder(series, tmp_path_factory):
    """The cohort of series and its connectomes: of Fisher z, of correlations, and with empty ROIs."""
    place = tmp_path_factory.mktemp("connectomes")
    series.save(place / "series.cohort")
    of_z = series.to_connectomes()
    of_z.save(place / "z.cohort")
    matrices = [np.tanh(one) for one in of_z.connectomes]
    correlation = dataclasses.replace(of_z, series=Connectomes.of(matrices, "correlation", len(series.rois)))
    correlation.save(place / "r.cohort")
    dataclasses.replace(of_z, series=Connectomes.of(matrices, "partial-correlation", len(series.rois))).save(place / "p.cohort")
    emptied = [np.array(one) for one in of_z.connectomes]
    first = int(np.flatnonzero(of_z.sites == "new")[0])
    emptied[first][3] = emptied[first][:, 3] = 0.0
    dataclasses.replace(of_z, series=Connectomes.of(emptied, "fisher-z", len(series.rois))).save(place / "empty.cohort")
    return place


@pytest.fixture
def cli(folder, monkeypatch, typed):
    monkeypatch.chdir(folder)

    def run(*words, fails=False):
        code, printed, problem = typed(*words)
        assert code == (2 if fails else 0), printed + problem
        return problem if fails else " ".join(printed.split())

    return run


@pytest.fixture
def model(cli, folder):
    """Model folder of `fc-logistic` on the Fisher z of three sites."""
    if not (folder / "model").exists():
        cli("fit", "z.cohort", "--method", "fc-logistic", "--without", "new", "--out", "model")
    return folder / "model"


def test_predictions_are_those_of_the_series(cli, model, series, folder):
    source, target = series.select(series.sites != "new"), series.select(sites=["new"])
    expected = make("fc-logistic").fit(source, source_distribution=True, new_site_calibration=True)
    cli("predict", "model", "z.cohort", "--site", "new", "--out", "z.csv", "--coverage", "0.9", "--overwrite")
    table = pd.read_csv("z.csv", keep_default_na=False)
    proba = expected.predict_proba(target)[:, 1]
    np.testing.assert_allclose(table["proba"], proba, atol=1e-6)
    assert table["set"].tolist() == expected.conformal_sets(proba, 0.9).tolist()
    np.testing.assert_allclose(table["connectivity_ood"], expected.ood_scores(target)["connectivity"], atol=6e-4)
    assert not table["flags"].str.contains("short|flat").any()
    said = cli("predict", "model", "r.cohort", "--site", "new", "--out", "r.csv", "--overwrite")
    np.testing.assert_allclose(pd.read_csv("r.csv")["proba"], proba, atol=1e-6)
    assert "Note: the connectomes were read as correlation and converted to fisher-z" in said
    assert "m2lgdg convert --values fisher-z" in said
    said = cli("predict", "model", "empty.cohort", "--site", "new", "--out", "empty.csv", "--overwrite")
    assert pd.read_csv("empty.csv", keep_default_na=False)["flags"].str.contains("empty rois: 1").sum() == 1
    assert "empty rois (1)" in said and "read as" not in said


@pytest.mark.parametrize("command", ["predict", "calibrate", "adapt"])
@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("series", "holds time series; m2lgdg convert --connectomes makes connectomes (fisher-z) of series."),
        ("p", "holds connectomes (partial-correlation); if they hold fisher-z, say so with m2lgdg convert --values fisher-z."),
    ],
)
def test_another_kind_is_one_sentence(command, given, advice, cli, model, folder):
    before = set(folder.iterdir())
    problem = cli(command, "model", f"{given}.cohort", "--site", "new", "--out", "wrong", fails=True)
    assert problem.count("\n") == 1 and f"the model was trained on connectomes (fisher-z), and cohort tiny {advice}" in problem
    assert set(folder.iterdir()) == before


def test_a_model_of_series_refuses_connectomes(cli, folder):
    cli("fit", "series.cohort", "--method", "fc-logistic", "--out", "of-series", "--no-new-site-calibration")
    problem = cli("predict", "of-series", "z.cohort", "--out", "wrong", fails=True)
    assert (
        "trained on time series, and cohort tiny holds connectomes (fisher-z); give it the time series of the ROIs." in problem
    )
    problem = cli("fit", "z.cohort", "--method", "m2lgdg", "--out", "wrong", fails=True)
    assert "method m2lgdg needs time series, and cohort tiny holds connectomes; methods that take connectomes: " in problem
    assert not Path("wrong").exists()


def test_the_default_method_and_its_card(cli, folder):
    said = cli("fit", "z.cohort", "--out", "default")
    left_out = "deviation FC and amplitude, computed from time series, are left out."
    assert left_out in said
    for text in ((folder / "default" / "card.md").read_text(), (folder / "default" / "card.html").read_text()):
        assert "connectomes (fisher-z)" in text and left_out in text
        assert "matrices of correlation or fisher-z with 12 ROIs" in text
        assert not any(word in text for word in ("scan length", "volumes", "spectral edge", "standardised within its scan"))
    fitted = Model.load("default")
    assert set(fitted.facts_["penalties"]) == {"fc", "log_euclidean", "phenotypes"} and fitted.facts_["scans"] == "fisher-z"
    assert "TR" not in " ".join(fitted.compare(Cohort.load("z.cohort")))


def test_calibrate_and_adapt(cli, model, series):
    """The same slope, offset and shift as from series; correlations of scans that were counted as Fisher z are refused."""
    target = series.select(sites=["new"])
    source = series.select(series.sites != "new")
    expected = make("fc-logistic").fit(source, source_distribution=True, new_site_calibration=True)
    cli("calibrate", "model", "z.cohort", "--site", "new", "--out", "local")
    from m2lgdg.deploy.adapt import adapt
    from m2lgdg.deploy.calibrate import calibrate

    local = calibrate(make("fc-logistic").fit(source, source_distribution=True, new_site_calibration=True), target)
    stored = Model.load("local").facts_["local"]
    assert stored["threshold"] == local.threshold and stored["slope"] > 0
    np.testing.assert_allclose(stored["sensitivity"], local.sensitivity, atol=1e-9)
    cli("adapt", "model", "z.cohort", "--site", "new", "--subjects", "10", "--out", "adapted")
    shift = adapt(expected, target[:10]).level.shift
    assert Model.load("adapted").site_level.shift == pytest.approx(shift, abs=1e-6)
    said = cli("adapt", "adapted", "z.cohort", "--site", "new", "--update", "--out", "updated")
    assert "10 scans were counted before and do not count again." in said
    updated = Model.load("updated").site_level
    assert updated.subjects == len(target)
    assert updated.shift == pytest.approx(adapt(expected, target, update=True).level.shift, abs=1e-6)
    problem = cli("adapt", "adapted", "r.cohort", "--site", "new", "--update", "--out", "twice", fails=True)
    assert (
        "adapted with connectomes of fisher-z, and these are correlation; give fisher-z, so that no scan counts twice"
        in problem
    )
    assert not Path("twice").exists()


def test_onnx_from_the_description_alone(cli, model, folder):
    onnxruntime = pytest.importorskip("onnxruntime")
    cli("export", "model", "--out", "z.onnx", "--prepared")
    about = json.loads(Path("z.json").read_text())
    target = Cohort.load("z.cohort").select(sites=["new"])
    (described,) = about["inputs"]
    assert about["scans"] == "fisher-z" and described["name"] == "fc"
    assert described["prepared"].startswith(
        "the Fisher z of the connectome, clipped to -3.800201 ... 3.800201; of the ROI pairs"
    )
    rows, columns = np.triu_indices(len(about["rois"]), 1)
    edges = np.stack([one[rows, columns] for one in target.connectomes]).astype(np.float64)
    given = {"fc": np.clip(edges, -3.800201, 3.800201)}
    proba = onnxruntime.InferenceSession("z.onnx").run(["proba"], given)[0]
    np.testing.assert_allclose(proba, Model.load("model").predict_proba(target)[:, 1], atol=1e-6)


def test_a_shared_model_predicts_the_same(cli, model, series):
    cli("export", "model", "--out", "shared", "--share")
    target = series.to_connectomes().select(sites=["new"])
    np.testing.assert_array_equal(Model.load("shared").predict_proba(target), Model.load("model").predict_proba(target))
    assert Model.load("shared").facts_["scans"] == "fisher-z"


def release(place, cohort, matrices, *, labels=True, suffix=".npy"):
    """A folder with a file for each subject and a table."""
    place.mkdir()
    table = cohort.to_frame().rename_axis("participant_id")[["site", "age"]]
    if labels:
        table["diagnosis"] = np.where(cohort.labels == 1, "patient", "control")
    table.to_csv(place / "participants.tsv", sep="\t")
    for subject, matrix in zip(cohort.subjects, matrices, strict=True):
        if suffix == ".npy":
            np.save(place / f"{subject}.npy", matrix)
        else:
            pd.DataFrame(matrix, index=list(cohort.rois), columns=list(cohort.rois)).to_csv(place / f"{subject}{suffix}")


def test_folders_of_matrices(cli, series, tmp_path):
    """Fitted on a folder of correlations, applied to one of Fisher z without labels: as the cohort files do."""
    source, target = series.select(series.sites != "new"), series.select(sites=["new"])
    matrices = [np.tanh(one) + np.eye(len(one)) for one in source.to_connectomes().connectomes]
    release(tmp_path / "hospitals", source, matrices, suffix=".csv")
    of_z = [np.where(np.eye(len(one)) == 1, 18.0, one) for one in target.to_connectomes().connectomes]
    release(tmp_path / "new", target, of_z, labels=False)
    words = ("--method", "fc-logistic", "--no-new-site-calibration")
    cli("fit", tmp_path / "hospitals", *words, "--out", tmp_path / "model")
    fitted = Model.load(tmp_path / "model")
    assert fitted.facts_["scans"] == "correlation" and tuple(fitted.facts_["rois"]) == series.rois
    problem = cli("predict", tmp_path / "model", tmp_path / "new", "--out", tmp_path / "p.csv", fails=True)
    assert f"ROI 1 is {series.rois[0]} in the model but 1 in the cohort" in problem  # .npy files name no ROI
    (tmp_path / "new" / "dataset.toml").write_text('rois = "rois.txt"\n')
    (tmp_path / "new" / "rois.txt").write_text("\n".join(series.rois) + "\n")
    said = cli("predict", tmp_path / "model", tmp_path / "new", "--out", tmp_path / "p.csv")
    assert "read as fisher-z and converted to correlation" in said
    expected = make("fc-logistic").fit(source).predict_proba(target)[:, 1]
    table = pd.read_csv(tmp_path / "p.csv").set_index("subject")
    np.testing.assert_allclose(table.loc[target.subjects.tolist(), "proba"], expected, atol=1e-6)


def test_matrices_are_never_taken_for_series(cli, series, tmp_path):
    """A folder of series with one matrix, or of matrices that are said to be series: nothing is fitted or predicted."""
    place = tmp_path / "mixed"
    few = series.select(range(6))
    release(place, few, [np.array(one) for one in few.series])
    matrix = np.corrcoef(few.series[2].T)
    np.save(place / f"{few.subjects[2]}.npy", matrix)
    of_series = tmp_path / "of-series"
    make("fc-logistic").fit(series).save(of_series)
    for words in (("fit", place), ("predict", of_series, place)):
        problem = cli(*words, "--kind", "folder", "--out", tmp_path / "wrong", fails=True)
        assert problem.count("\n") == 1 and f"{few.subjects[2]}.npy" in problem and "is a connectome, not a series" in problem
        assert "--kind connectomes" in problem and not (tmp_path / "wrong").exists()
