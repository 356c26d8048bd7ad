"""Packaged models at the terminal: the list, one scan in two commands, cards, and everything that does not fit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from packaged_models import synthetic

import m2lgdg
from m2lgdg.cli import main
from m2lgdg.model.packaged import TRAINED, packaged


@pytest.fixture(scope="module")
def fitted():
    return m2lgdg.load("abide-aal")


@pytest.fixture
def series(fitted, tmp_path, monkeypatch):
    """A new directory with the series of one subject and nothing else."""
    monkeypatch.chdir(tmp_path)
    one = synthetic(fitted).series[0]
    np.savetxt("one.1D", one, fmt="%.6f")
    return one


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["m2lgdg", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def test_the_list_and_one_model(command):
    code, text, _ = command("models")
    assert code == 0 and "not a diagnostic device" in text
    for name, about in packaged().items():
        assert f"{name}  {about.summary}" in text and f"{100 * about.auc:.1f} %" in text
    _, text, _ = command("models", "abide-aal-structure")
    about = packaged()["abide-aal-structure"]
    assert about.commit in text and about.sha256 in text and "CC BY-NC-SA" in text
    assert "m2lgdg predict abide-aal-structure SCANS --table aseg=STATS --table thickness=STATS --out" in text
    _, text, _ = command("models", "--json")
    assert [one["name"] for one in json.loads(text)] == list(packaged())
    code, _, errors = command("models", "abide-all")
    assert code == 2 and "abide-all is not a model of the package; did you mean abide-aal" in errors


def test_one_series_gets_a_probability_with_flags_and_a_picture(command, series, fitted):
    code, text, _ = command("predict", "abide-aal", "one.1D", "--out", "p.csv")
    table = pd.read_csv("p.csv")
    assert code == 0 and len(table) == 1 and "has changed since this model was fitted" not in text
    assert f"probability {table['proba'][0]:.3f} of being a patient" in text
    assert "phenotypes missing: sex age viq piq fiq" in table["flags"][0] and table["flags"][0] in text
    assert "Next: m2lgdg explain abide-aal one.1D --out p-explained" in text
    cohort = synthetic(fitted).select([0])
    unknown = cohort._changed(phenotypes=cohort.phenotypes.assign(**dict.fromkeys(cohort.inputs, np.nan)))
    assert table["proba"][0] == pytest.approx(fitted.predict_proba(unknown)[0, 1], abs=1e-5)  # six digits in the file
    code, text, _ = command("explain", "abide-aal", "one.1D", "--out", "p-explained")
    assert code == 0 and "brain.png" in text
    with open("p-explained/brain.png", "rb") as picture:
        assert picture.read(8) == b"\x89PNG\r\n\x1a\n"
    edges = pd.read_csv("p-explained/edges.csv")
    assert len(edges) == 116 * 115 // 2 and edges["score"].iloc[0] > 0


def test_phenotypes_of_one_scan_count(command, series, fitted):
    given = {"sex": 2.0, "age": 11.5, "viq": 90.0, "piq": 95.0, "fiq": 91.0}
    words = [word for name, value in given.items() for word in ("--phenotype", f"{name}={value}")]
    code, text, _ = command("predict", "abide-aal", "one.1D", *words, "--out", "p.csv")
    table = pd.read_csv("p.csv")
    assert code == 0 and "phenotypes missing" not in text
    assert "--phenotype sex=2.0" in text.splitlines()[-1]  # the next command knows them, too
    cohort = synthetic(fitted).select([0])
    expected = fitted.predict_proba(cohort._changed(phenotypes=cohort.phenotypes.assign(**given)))[0, 1]
    assert table["proba"][0] == pytest.approx(expected, abs=1e-5)


def test_a_scan_of_one_atlas_goes_to_that_atlas(command, series):
    np.savetxt("ho.csv", np.random.default_rng(0).normal(size=(120, 111)), delimiter=",")
    code, text, _ = command("predict", "abide-aal-ho", "ho.csv", "--out", "p.csv")
    assert code == 0 and "atlas missing: aal" in text
    code, text, _ = command("predict", "abide-aal-ho", "one.1D", "--out", "p.csv", "--overwrite")
    assert code == 0 and "atlas missing: ho" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("abide-aal", "cc200.1D"), "cc200.1D has 200 columns, the model was trained on 116 ROIs (aal)."),
        (("abide-aal", "turned.1D"), "it seems to have one row per ROI, so transpose it"),
        (("abide-aal", "fc.csv"), "is a connectome, and the model was trained on time series"),
        (("abide-aal", "one.1D", "--phenotype", "agee=3"), "agee is not a phenotype of the model; did you mean age?"),
        (("abide-aal", "one.1D", "--phenotype", "age=-3"), "Age: -3 is not in the range"),
        (("abide-aal", "one.1D", "--phenotype", "age"), "give it as NAME=VALUE"),
        (("abide-aal", "one.1D", "--phenotype", "age=3", "--phenotype", "age=4"), "age=4: is given twice"),
        (("abide-aal", "one.1D", "--site", "NYU"), "one.1D is the file of one scan, which has no site"),
        (("abide-aal", "one.1D", "--table", "aseg=one.1D"), "aseg is not a table of the model"),
        (("abide-aal-structure", "one.1D", "--table", "aseg=."), "give the files of its subject"),
        (("abide-aal", "tiny.cohort", "--phenotype", "age=3"), "tiny.cohort is not the file of one scan"),
        (("abide-aal", "tiny.cohort"), "the model was trained on 116 ROIs (aal), the cohort has 12."),
        (("abide-aal", "empty.1D"), "empty.1D is empty."),
        (("abide_aal", "one.1D"), "abide_aal is not a model folder (no method.json), nor a model of the package; did you mean"),
    ],
)
def test_what_does_not_fit_ends_in_one_sentence(command, series, words, sentence):
    np.savetxt("cc200.1D", np.random.default_rng(0).normal(size=(90, 200)))
    np.savetxt("turned.1D", series.T)
    np.savetxt("fc.csv", np.corrcoef(series.T), delimiter=",")
    open("empty.1D", "w").close()
    m2lgdg.make_cohort("tiny").save("tiny.cohort")
    code, _, errors = command("predict", *words, "--out", "p.csv")
    lines = [line for line in errors.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and sentence in lines[0]


def test_adapt_card_and_export_take_the_name(command, series, fitted):
    synthetic(fitted).save("new.cohort")
    code, text, _ = command("adapt", "abide-aal", "new.cohort", "--out", "adapted")
    assert code == 0 and m2lgdg.load("adapted").site_level.subjects == 10
    before = {path: path.read_bytes() for path in TRAINED.rglob("*") if path.is_file()}
    code, text, _ = command("card", "abide-aal")
    assert code == 0 and "Wrote abide-aal-card/card.md" in text
    with open("abide-aal-card/card.md") as card, open(TRAINED / "abide-aal" / "card.md") as packaged_card:
        assert card.read() == packaged_card.read()
    assert {path: path.read_bytes() for path in TRAINED.rglob("*") if path.is_file()} == before
    code, text, _ = command("export", "abide-aal", "--share", "--out", "copy")
    assert code == 0
    np.testing.assert_array_equal(m2lgdg.load("copy").predict_proba(synthetic(fitted)), fitted.predict_proba(synthetic(fitted)))
    shutil.copytree("copy", "abide-aal")
    code, _, errors = command("predict", "abide-aal", "one.1D", "--out", "p.csv")
    assert code == 2 and "is a model of the package and a model folder in the working directory" in errors


def test_no_model_is_written_under_a_name_of_the_package(command, series, fitted):
    """Every command would then refuse the name, which is that of two models."""
    m2lgdg.make_cohort("tiny").save("tiny.cohort")
    for words in (
        ("fit", "tiny.cohort", "--method", "fc-logistic", "--out", "abide-aal"),
        ("export", "abide-aal", "--share", "--out", "./abide-aal"),
    ):
        code, out, error = command(*words)
        assert (code, error) == (2, "m2lgdg: --out abide-aal: a model of the package has this name; choose another one.\n")
        assert "Next" not in out and not Path("abide-aal").exists()
