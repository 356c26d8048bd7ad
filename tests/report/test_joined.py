"""A report of several studies, and a figure of several learning curves."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

import m2lgdg
from m2lgdg.report.contents import read_contents
from m2lgdg.report.curve import stored_curve, with_others
from m2lgdg.report.joined import joined_contents, together
from m2lgdg.storage import InputError
from m2lgdg.study.curve import summarise
from m2lgdg.study.predictions import read_predictions


@pytest.fixture(scope="module")
def other_study(tiny, tmp_path_factory):
    """Another study of the same cohort, with a variant, a sweep and an explanation."""
    folder = tmp_path_factory.mktemp("other")
    tiny.save(folder / "tiny.cohort")
    study = {
        "cohort": str(folder / "tiny.cohort"),
        "name": "second",
        "methods": ["tangent-ridge"],
        "seeds": [0],
        "explain": True,
    }
    study |= {"variants": ["phenotypes"], "sweep": {"tangent-ridge": {"site_folds": [3]}}, "tune": {}}
    assert not m2lgdg.run_study(study, folder / "out").failed
    return folder / "out"


def test_methods_of_both_are_in_one_report(linear_study, other_study, tmp_path, typed, figures_painted_only):
    first = tmp_path / "first"
    shutil.copytree(linear_study, first)
    code, _, error = typed("report", first, "--also", other_study)
    assert code == 0, error
    page = (first / "report.html").read_text()
    assert "linear and second" in page and "together with" in page and "second (tangent-ridge" in page
    text = m2lgdg.table(first, also=[other_study])
    for name in ("prior", "fc-logistic", "fc-svm", "tangent-ridge", "tangent-ridge + phenotypes"):
        assert name in page and name in text
    assert {path.name for path in (first / "explained").iterdir()} == {"fc-logistic", "tangent-ridge"}
    assert not (other_study / "report.html").exists()


def test_what_is_joined_is_what_each_has(linear_study, other_study):
    joined, parts = joined_contents(linear_study, [other_study]), [read_contents(one) for one in (linear_study, other_study)]
    both = pd.concat([read_predictions(one) for one in (linear_study, other_study)], ignore_index=True)
    pd.testing.assert_frame_equal(joined.predictions, both)
    assert joined.keys == [*parts[0].keys, *parts[1].keys] and len(joined.records) == len(parts[0].records) + len(
        parts[1].records
    )
    scores = [one.counted_scores for one in (joined, *parts)]  # they do not depend on what is beside them
    order = ["method", "variant", "target", "metric"]
    joint, apart = (one.sort_values(order).reset_index(drop=True) for one in (scores[0], pd.concat(scores[1:])))
    pd.testing.assert_frame_equal(joint, apart)
    assert joined.is_sweep(("tangent-ridge", "site_folds=3")) and not joined.is_sweep(("tangent-ridge", "phenotypes"))
    assert joined.study["variants"] == {"prior": [], "fc-logistic": [], "fc-svm": [], "tangent-ridge": ["phenotypes"]}
    assert joined.declared.keys() == {"prior", "fc-logistic", "fc-svm", "tangent-ridge"} and not joined.missing()
    assert together(joined) == [("together with", "second (tangent-ridge)")] and together(parts[0]) == []
    assert joined_contents(linear_study, []).parts == ()


def test_missing_cells_and_other_code_are_told(linear_study, other_study, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(other_study, folder)
    about = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(
        json.dumps(about | {"seeds": [0], "methods": ["tangent-ridge", "fc-svm"], "cohort_hash": "x"})
    )
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"commit": "beef"}))
    joined = joined_contents(linear_study, [folder])
    ((_, line),) = together(joined)
    assert line == "second (tangent-ridge; another version of the cohort (atlas, precision or preparation); commit beef)"
    assert joined.missing() == ["4 cells of fc-svm"]


def test_refused(linear_study, two_track_study, tmp_path, typed):
    code, _, error = typed("report", linear_study, "--also", linear_study)
    assert code == 2 and "both have prior; one table has each method once" in " ".join(error.split())
    code, _, error = typed("report", linear_study, "--also", two_track_study)
    assert code == 2 and "both need the same target sites" in " ".join(error.split())
    code, _, error = typed("report", linear_study, "--also", tmp_path, "--share")
    assert code == 2 and "a report for sharing is of one study" in error


def test_the_next_command_keeps_the_other_study(linear_study, other_study, typed):
    code, _, error = typed("table", linear_study, "--also", other_study)
    assert code == 0 and f"--also {other_study}" in " ".join(error.split())


def test_curves_of_several_studies(tiny, tmp_path, typed, figures_painted_only):
    tiny.save(tmp_path / "tiny.cohort")
    for name, method in (("a", "fc-logistic"), ("b", "tangent-ridge")):
        text = f'cohort = "tiny.cohort"\nmethods = ["{method}"]\nseeds = [0]\n'
        (tmp_path / f"{name}.toml").write_text(text)
    words = ("--sizes", "0.6,1", "--repeats", "1")
    assert typed("curve", tmp_path / "a.toml", "--out", tmp_path / "a", *words)[0] == 0
    code, _, error = typed("curve", tmp_path / "b.toml", "--out", tmp_path / "none", *words, "--also", tmp_path)
    assert code == 2 and "has no points.csv" in error and not (tmp_path / "none").exists()
    code, out, _ = typed("curve", tmp_path / "b.toml", "--out", tmp_path / "b", *words, "--also", tmp_path / "a")
    assert code == 0 and "fc-logistic: AUC" in out and "tangent-ridge: AUC" in out
    one, both = stored_curve(tmp_path / "a"), stored_curve(tmp_path / "b")
    assert list(both.trends) == ["tangent-ridge", "fc-logistic"]
    own = both.table[both.table["method"] == "fc-logistic"].reset_index(drop=True)
    pd.testing.assert_frame_equal(own, one.table)
    code, _, error = typed("curve", tmp_path / "a.toml", "--out", tmp_path / "a", *words, "--also", tmp_path / "b")
    assert code == 2 and "both have fc-logistic" in error
    with pytest.raises(InputError, match="differ in their target sites"):
        cut = one.points[one.points["target"] != one.points["target"].iloc[0]]
        cut.to_csv(tmp_path / "a" / "points.csv", index=False)
        with_others(summarise(both.points[both.points["method"] == "tangent-ridge"]), tmp_path / "b", [tmp_path / "a"])


@pytest.mark.parametrize("other", ["subjects", "labels"])
def test_curves_of_other_subjects_are_not_joined(tiny, tmp_path, typed, figures_painted_only, other):
    last = np.flatnonzero(tiny.labels == tiny.labels[-1])[-1]
    turned = np.where(np.arange(len(tiny)) == last, 1 - tiny.labels, tiny.labels)
    tiny.save(tmp_path / "a.cohort")
    (tiny.select(range(1, len(tiny))) if other == "subjects" else tiny._changed(labels=turned)).save(tmp_path / "b.cohort")
    for name, method in (("a", "fc-logistic"), ("b", "tangent-ridge")):
        (tmp_path / f"{name}.toml").write_text(f'cohort = "{name}.cohort"\nmethods = ["{method}"]\nseeds = [0]\n')
    words = ("--sizes", "0.6,1", "--repeats", "1")
    assert typed("curve", tmp_path / "a.toml", "--out", tmp_path / "a", *words)[0] == 0
    code, _, error = typed("curve", tmp_path / "b.toml", "--out", tmp_path / "b", *words, "--also", tmp_path / "a")
    said = {"subjects": "were run with different subjects (inclusion.csv)", "labels": "have different labels"}[other]
    assert code == 2 and said in " ".join(error.split()) and not (tmp_path / "b" / "learning-curve.svg").exists()
