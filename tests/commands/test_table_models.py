"""Models with a table of brain structure on the command line: `--table` of fit, predict, adapt, calibrate and explain."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import Cohort, Model, make, make_cohort
from m2lgdg.deploy.adapt import adapt
from m2lgdg.metrics import logit

SITES = dict.fromkeys("abcd", 24)


@pytest.fixture(scope="module")
def whole():
    return make_cohort("tiny", sizes=SITES, n_regions=30, missing=0.0, seed=5)


@pytest.fixture(scope="module")
def fitted(whole):
    return make("connectome-adaptive").fit(whole.select(whole.sites != "d"), source_distribution=True)


@pytest.fixture
def command(monkeypatch, typed, tmp_path, whole, fitted):
    """A folder with cohorts of known sites and of a new one, without their table, which is a file of its own."""
    monkeypatch.chdir(tmp_path)
    for name, some in (("known", whole.sites != "d"), ("new", whole.sites == "d")):
        cohort = whole.select(some)
        cohort.tables["thickness"].rename_axis("participant_id").to_csv(f"{name}.tsv", sep="\t")
        Cohort(
            cohort.series, cohort.subjects, cohort.sites, cohort.labels, cohort.rois, cohort.phenotypes, cohort.inputs,
            tr=cohort.tr, atlas=cohort.atlas, name=name,
        ).save(f"{name}.cohort")  # fmt: skip
    fitted.save("model")
    return typed


def test_fit_with_a_file_is_fit_with_the_table(command, whole):
    code, text, _ = command(
        "fit", "known.cohort", "--table", "thickness=known.tsv", "--out", "own", "--method", "connectome-adaptive",
        "--no-new-site-calibration",
    )  # fmt: skip
    assert code == 0
    assert "Table thickness: 31 columns; all 72 subjects have it, and it counts" in text
    own, new = Model.load("own"), whole.select(sites=["d"])
    expected = make("connectome-adaptive").fit(whole.select(whole.sites != "d"))
    np.testing.assert_array_equal(own.predict_proba(new), expected.predict_proba(new))
    assert "m2lgdg predict own NEW_SITE --out predictions.csv" in text and "known.tsv --out" not in text


def test_who_lacks_a_table_is_said(command, whole):
    rows = pd.read_csv("known.tsv", sep="\t", dtype={"participant_id": str})
    rows.iloc[5:].to_csv("known.tsv", sep="\t", index=False)
    how = ("--method", "connectome-adaptive", "--no-new-site-calibration")
    code, text, _ = command("fit", "known.cohort", "--table", "thickness=known.tsv", "--out", "own", *how)
    assert code == 0 and "Table thickness: 31 columns; 5 of 72 subjects lack it, and it counts" in text
    patients = whole.subjects[whole.labels == 1].tolist()
    rows[rows["participant_id"].isin(patients)].to_csv("known.tsv", sep="\t", index=False)
    code, text, _ = command("fit", "known.cohort", "--table", "thickness=known.tsv", "--out", "other", *how)
    assert code == 0 and "Note: Table thickness is not used: only patients have it." in text
    assert "it counts" not in text


def test_predict_reads_a_table_and_says_what_it_lacks(command, whole, fitted):
    new = whole.select(sites=["d"])
    code, text, _ = command("predict", "model", "new.cohort", "--table", "thickness=new.tsv", "--out", "p.csv")
    assert code == 0 and "table_thickness_ood" in Path("p.csv").read_text()
    np.testing.assert_allclose(pd.read_csv("p.csv")["proba"], fitted.predict_proba(new)[:, 1], atol=1e-12)
    assert "m2lgdg explain model new.cohort --out p-explained --table thickness=new.tsv" in text
    code, text, _ = command("predict", "model", "new.cohort", "--out", "without.csv")
    assert code == 0 and "The cohort has no table thickness; decided without, as a mean subject." in text
    assert "Give it with --table thickness=FILE." in text and "no thickness (24)" in text
    table = pd.read_csv("without.csv")
    assert table["flags"].str.contains("no thickness: decided without it").all()
    assert table["table_thickness_ood"].isna().all()
    code, text, _ = command("predict", "model", "new.cohort", "--table", "volumes=new.tsv", "--out", "named.csv")
    assert code == 0 and "The cohort has no table thickness, and has volumes; decided without" in text


@pytest.mark.parametrize("name", ["predict", "adapt", "calibrate", "explain"])
def test_a_table_that_does_not_fit_is_one_sentence_and_nothing_is_written(command, name):
    rows = pd.read_csv("new.tsv", sep="\t", index_col=0)
    (rows / 1000).to_csv("metres.tsv", sep="\t")
    before = sorted(Path().rglob("*"))
    code, _, error = command(name, "model", "new.cohort", "--table", "thickness=metres.tsv", "--out", "out.csv")
    assert code == 2 and "they are of another unit or measure" in error and error.count("\n") <= 2
    code, _, error = command(name, "model", "new.cohort", "--table", "metres.tsv", "--out", "out.csv")
    assert code == 2 and "--table metres.tsv: give it as NAME=FILE" in error
    assert sorted(Path().rglob("*")) == before


def test_a_failed_segmentation_is_flagged_by_its_own_site_too(command):
    rows = pd.read_csv("new.tsv", sep="\t", index_col=0)
    regions = [column for column in rows if column.endswith("_thickness")]
    spread = rows[regions].std().mean()
    rows.loc[rows.index[3], regions] -= 8 * spread
    rows.to_csv("new.tsv", sep="\t")
    code, text, _ = command("predict", "model", "new.cohort", "--table", "thickness=new.tsv", "--out", "p.csv")
    flagged = pd.read_csv("p.csv").set_index("subject")["flags"].fillna("")
    assert code == 0 and "failed segmentation (1)" in text
    assert "m2lgdg check new.cohort --table thickness=new.tsv --new-site lists" in text
    code, found, _ = command("check", "new.cohort", "--table", "thickness=new.tsv", "--new-site")
    assert "its segmentation" in found and str(rows.index[3]) in found
    assert flagged[flagged.str.contains("failed segmentation")].index.astype(str).tolist() == [str(rows.index[3])]


def test_adapt_says_who_lacks_the_table_and_predict_who_is_unlike(command):
    code, text, _ = command("adapt", "model", "new.cohort", "--table", "thickness=new.tsv", "--out", "with")
    assert code == 0 and "lack table" not in text
    assert json.loads(Path("with/method.json").read_text())["facts"]["site_level"]["tables"] == {"thickness": 24}
    code, text, _ = command("predict", "with", "new.cohort", "--out", "p.csv")
    assert code == 0 and "24 of 24 subjects that the correction was learned from have table thickness, and 0 of 24 here" in text
    code, text, _ = command("predict", "with", "new.cohort", "--table", "thickness=new.tsv", "--out", "q.csv")
    assert code == 0 and "that the correction was learned from" not in text
    code, text, _ = command("adapt", "model", "new.cohort", "--out", "bare")
    assert code == 0 and "24 of 24 subjects lack table thickness" in text


def test_the_intercept_correction_is_a_centring_of_the_tables(whole, fitted):
    """A shift of all values at a site moves every linear decision alike, and `adapt` takes it out again."""
    new = whole.select(sites=["d"])
    table = new.tables["thickness"]
    regions = [column for column in table if column.endswith("_thickness")]
    table[regions] += 0.05 * np.arange(len(regions)) / len(regions)
    shifted = new.with_tables({"thickness": table})
    logits = []
    for cohort in (new, shifted):
        model = Model(fitted.method)
        model.facts_ = dict(fitted.facts_)
        before = logit(model.predict_proba(cohort)[:, 1])
        adapt(model, cohort)
        logits.append((before, logit(model.predict_proba(cohort)[:, 1])))
    moved, left = ((two - one)[np.abs(one) < 10] for one, two in zip(*logits, strict=True))  # beyond, `logit` is bounded
    assert moved.std() < 1e-6 < 0.1 < abs(moved.mean())
    assert abs(left.mean()) < 0.7 * abs(moved.mean())  # not 0, as logits beyond 5 count as 5
