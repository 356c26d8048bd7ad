"""`explain` writes and names what a method has, says what it lacks, takes sites, and speaks of ROIs without names or places."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import METHODS, make, make_cohort, run_study
from m2lgdg.explain.attribution import explain
from m2lgdg.explain.explanation import Explanation, mean_over, roi_label
from m2lgdg.report.page import write_report


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=1)


@pytest.fixture(scope="module")
def numbered(cohort):
    """The same scans with an atlas that is not included and has no names."""
    names = tuple(str(i + 1) for i in range(len(cohort.rois)))
    return dataclasses.replace(cohort, rois=names, atlas="cc200", truth=None)


@pytest.fixture
def command(monkeypatch, typed, tmp_path, cohort):
    monkeypatch.chdir(tmp_path)
    cohort.save("new.cohort")
    return typed


def tables_of(folder):
    return sorted(path.stem for path in Path(folder).glob("*.csv"))


@pytest.mark.parametrize(
    ("name", "parts"), [("fc-svm", ["edges", "roi"]), ("phenotype-logistic", ["phenotypes"]), ("m2lgdg", None)]
)
def test_only_tables_with_scores_are_written_and_named(name, parts, command, cohort):
    changes = METHODS[name].variants["small"] | {"epochs": 1, "warmup": 1, "length": 24} if name == "m2lgdg" else {}
    older = cohort._changed(phenotypes=cohort.phenotypes.assign(age=cohort.phenotypes["age"] + 20.0 * cohort.labels))
    make(name, **changes).fit(older, seed=0).save("model")  # a phenotype that says nothing is not used
    code, text, _ = command("explain", "model", "new.cohort", "--out", "why", "--steps", 2)
    assert code == 0
    parts = parts or ["gate", "map", "phenotypes", "roi"]
    assert tables_of("why") == parts
    assert all(len(pd.read_csv(f"why/{part}.csv")) for part in parts)
    (wrote,) = [line for line in text.splitlines() if line.startswith("Wrote why")]
    assert sorted(word.removesuffix(".csv") for word in wrote.split() if word.endswith(".csv")) == parts
    assert json.loads(Path("why/explanation.json").read_text())["tables"] == list(Explanation.load("why").filled)
    lacking = Explanation.load("why").lacking()
    assert all(sentence in text for sentence in lacking)
    assert ("gate weights" in " ".join(lacking)) == ("gate" not in parts)
    assert ("map" in " ".join(lacking)) == ("map" not in parts)


def test_tables_of_an_earlier_explanation_do_not_stay(command, cohort):
    make("fc-svm").fit(cohort).save("scan")
    make("phenotype-logistic", held_phenotypes=False).fit(cohort).save("table")
    for model, parts in (("scan", ["edges", "roi"]), ("table", ["phenotypes"])):
        assert command("explain", model, "new.cohort", "--out", "why")[0] == 0
        assert tables_of("why") == parts


def test_explanations_of_earlier_versions_are_read(cohort, tmp_path):
    explained = explain(make("fc-svm").fit(cohort), cohort)
    explained.save(tmp_path)
    about = json.loads((tmp_path / "explanation.json").read_text())
    del about["tables"], about["atlas"]
    (tmp_path / "explanation.json").write_text(json.dumps(about))
    heads = {"phenotypes": "phenotype,score,sd,direction", "gate": "site,label,subjects", "map": "site,label,part,x,y"}
    for name, head in heads.items():
        (tmp_path / f"{name}.csv").write_text(f"{head}\n")
    back = Explanation.load(tmp_path)
    assert list(back.filled) == ["roi", "edges"] and back.rois.equals(explained.rois.astype(back.rois.dtypes))
    assert list(mean_over([back, back]).filled) == ["roi", "edges"]


def test_a_block_without_weight_in_one_fold_counts_as_zero(cohort, tmp_path):
    told = cohort.phenotypes.assign(education=cohort.phenotypes["education"] + 4 * cohort.labels)  # beside the scan, too
    cohort = cohort._changed(phenotypes=told)
    explained = explain(make("fc-svm", phenotypes=True).fit(cohort), cohort)
    none = dataclasses.replace(explained, phenotypes=explained.phenotypes.assign(score=0.0, direction=0.0))
    for name, one in (("a", explained), ("b", none)):
        one.save(tmp_path / name)
    assert not (tmp_path / "b" / "phenotypes.csv").exists()
    mean = mean_over([Explanation.load(tmp_path / name) for name in "ba"])
    wanted = explained.phenotypes.set_index("phenotype")["score"] / 2
    got = mean.phenotypes.set_index("phenotype")["score"]
    assert got[wanted.index].tolist() == pytest.approx(wanted.tolist())


def test_only_subjects_of_the_sites_are_explained(command, cohort):
    make("fc-svm").fit(cohort).save("model")
    for words, sites in ((("--site", "west"), ["west"]), (("--site", "west", "--site", "east"), ["west", "east"])):
        assert command("explain", "model", "new.cohort", "--out", "why", *words)[0] == 0
        chosen = cohort.select(np.isin(cohort.sites, sites))
        about = json.loads(Path("why/explanation.json").read_text())
        assert (about["subjects"], about["cohort"]) == (len(chosen), chosen.hash)
    code, _, errors = command("explain", "model", "new.cohort", "--out", "other", "--site", "wets")
    assert code == 2 and "wets is not a site of cohort" in errors and "west" in errors
    assert not Path("other").exists()


def test_rois_without_names_are_called_rois(command, numbered):
    numbered.save("new.cohort")
    make("fc-svm").fit(numbered).save("model")
    code, text, _ = command("explain", "model", "new.cohort", "--out", "why")
    assert code == 0
    first = pd.read_csv("why/roi.csv", dtype=str)["roi"][0]
    assert first.isdigit() and f"ROI {first}\n" in text
    assert "no names for the ROIs of atlas cc200" in text
    assert "no MNI coordinates for all ROIs of atlas cc200" in text and "--rois FILE" in text
    assert (roi_label("18"), roi_label("Insula_L")) == ("ROI 18", "Insula_L")


@pytest.mark.usefixtures("figures_painted_only")
def test_the_report_says_why_there_is_no_brain_and_draws_it_with_coordinates(numbered, tmp_path):
    numbered.save(tmp_path / "odd.cohort")
    study = {"cohort": str(tmp_path / "odd.cohort"), "methods": ["fc-svm", "prior"], "seeds": [0], "targets": ["east"]}
    run_study(study | {"explain": ["fc-svm"]}, tmp_path / "out")
    page = write_report(tmp_path / "out").read_text()
    section = page.split('data-section="explained"')[1].split("</section>")[0]
    assert "no MNI coordinates for all ROIs of atlas cc200" in section and "no names for the ROIs of atlas cc200" in section
    assert "A linear method has no gate weights and no map" in section
    assert not list((tmp_path / "out" / "figures").glob("brain-*"))
    table = pd.read_csv(tmp_path / "out" / "tables" / "ROIs-fc-svm.csv")
    assert table["roi"].str.fullmatch(r"ROI \d+").all()
    assert tables_of(tmp_path / "out" / "explained" / "fc-svm") == ["edges", "roi"]
    places = pd.DataFrame({"name": numbered.rois, "x": 1.0, "y": 2.0, "z": 3.0})
    places.to_csv(tmp_path / "rois.tsv", sep="\t", index=False)
    page = write_report(tmp_path / "out", centroids=tmp_path / "rois.tsv").read_text()
    assert "no MNI coordinates" not in page
    assert list((tmp_path / "out" / "figures").glob("brain-*.svg"))


def test_the_atlas_that_is_included_needs_no_sentence(atlas_cohort):
    explained = explain(make("fc-svm").fit(atlas_cohort), atlas_cohort)
    assert explained.about_rois() == []
