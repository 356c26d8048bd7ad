"""Cohorts from arrays and data frames, slices, masks and queries, studies of a cohort in memory, and HTML for notebooks."""

import re
from html import escape

import numpy as np
import pandas as pd
import pytest
from sklearn.svm import SVC

import m2lgdg
from m2lgdg.study.audit import audit
from m2lgdg.study.predictions import read_predictions


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, edge_effect=2.0)


def arrays(cohort, **changes):
    given = {
        "series": list(cohort.series), "y": cohort.labels, "sites": cohort.sites, "phenotypes": cohort.phenotypes,
        "rois": cohort.rois, "tr": cohort.tr, "atlas": cohort.atlas, "name": cohort.name,
    }  # fmt: skip
    return m2lgdg.Cohort.from_arrays(**given | changes)


def test_from_arrays_is_the_same_cohort(cohort):
    again = arrays(cohort)
    assert again.hash == cohort.hash and again.inputs == ("sex", "age", "education")
    assert again.subjects.tolist() == cohort.subjects.tolist()
    mixed = cohort.phenotypes.sample(frac=1, random_state=1)
    assert arrays(cohort, phenotypes=mixed, subjects=cohort.subjects).hash == cohort.hash
    words = np.where(cohort.labels == 1, "ASD", "TD")
    assert arrays(cohort, y=words, patient="ASD").hash == cohort.hash
    assert arrays(cohort, y=pd.Series(cohort.labels.astype(bool))).hash == cohort.hash
    assert arrays(cohort, phenotypes=cohort.phenotypes.to_dict("list"), subjects=cohort.subjects).hash == cohort.hash


def test_from_arrays_by_default():
    series = np.random.default_rng(0).normal(size=(4, 50, 3))
    made = m2lgdg.Cohort.from_arrays(
        series, [0, 1, np.nan, -1], "Oslo", {"age": [1, 2, 3, 4], "iq": [9, 8, 7, 6], "sex": list("MFMF")}
    )
    assert made.subjects.tolist() == ["sub-0001", "sub-0002", "sub-0003", "sub-0004"]
    assert made.labels.tolist() == [0, 1, -1, -1] and made.sites.tolist() == ["Oslo"] * 4
    assert made.rois == ("1", "2", "3") and made.inputs == ("age",) and np.isnan(made.tr).all()
    assert m2lgdg.Cohort.from_arrays(series, [0, 1, 0, 1], ["a", "a", "b", "b"], {"iq": range(4)}, inputs=["iq"]).inputs == (
        "iq",
    )
    np.testing.assert_array_equal(made.series[2], series[2].astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.arange(52) % 3}, "y has 3 classes (0, 1, 2); a cohort has patients and controls."),
        ({"y": np.where(np.arange(52) % 2, "a", "b")}, "y holds b, a; name the value of patients, such as patient='a'."),
        ({"patient": "c"}, "patient='c' does not occur in y"),
        ({"y": [0, 1]}, "52 subjects but 2 labels."),
        ({"sites": ["x"] * 51 + [None]}, "sites has a missing value; name the site of every subject."),
        ({"sites": ["x"] * 3}, "52 subjects but 3 sites."),
        ({"series": []}, "series is empty."),
        ({"series": np.zeros((52, 30))}, "series holds arrays of shape (time, ROI), but the first has (30,)."),
        ({"series": "nan"}, "subject east-0002: NaN at volume 4 of ROI roi-003 (1 such value)."),
        ({"rois": ["a"]}, "not (time, 1)."),
        ({"phenotypes": pd.DataFrame({"age": [1, 2]})}, "52 subjects but 2 phenotype rows."),
        ({"phenotypes": "one missing", "subjects": "own"}, "subject east-0001 has no row in phenotypes, although others have."),
        ({"inputs": ["iq"]}, "input iq is not a phenotype column."),
    ],
)  # fmt: skip
def test_bad_arrays_are_one_sentence(cohort, changes, message):
    broken = [np.array(one) for one in cohort.series]
    broken[1][3, 2] = np.nan
    values = {"nan": broken, "one missing": cohort.phenotypes.iloc[1:], "own": cohort.subjects}
    changes = {
        key: values.get(value, value) if isinstance(value, str) and key != "patient" else value
        for key, value in changes.items()
    }
    with pytest.raises(m2lgdg.InputError) as error:
        arrays(cohort, **changes)
    assert message in str(error.value)


def test_slices_masks_and_positions(cohort):
    assert cohort[:10].subjects.tolist() == cohort.subjects[:10].tolist()
    assert cohort[::-1].hash == cohort.hash and cohort[-1].subjects.tolist() == [cohort.subjects[-1]]
    assert cohort[cohort.labels == 1].labels.tolist() == [1] * int(cohort.labels.sum())
    assert cohort[[3, 1]].subjects.tolist() == cohort.subjects[[3, 1]].tolist()
    assert cohort[cohort.phenotypes["age"] > 30].hash == cohort.query("age > 30").hash
    assert len(cohort[[]]) == len(cohort[5:5]) == 0
    assert [one.subjects[0] for one in cohort] == cohort.subjects.tolist()
    for which, message in (
        ("NYU", "select subjects by position or mask"),
        ([True, False], "boolean index did not match"),
        ([100], "out of bounds"),
    ):
        with pytest.raises(m2lgdg.InputError, match=message):
            cohort[which]
    with pytest.raises(IndexError):
        cohort[100]


def test_query(cohort):
    assert set(cohort.query("site == 'east'").sites) == {"east"}
    chosen = cohort.query("label == 1 and volumes > 60 and site in ['east', 'west']")
    expected = (cohort.labels == 1) & (cohort.lengths > 60) & np.isin(cohort.sites, ["east", "west"])
    assert chosen.subjects.tolist() == cohort.subjects[expected].tolist()
    assert len(cohort.query("age < 0")) == 0
    for expression in ("sites == 'east'", "age >", "age + 1", ""):
        with pytest.raises(
            m2lgdg.InputError, match=r"cannot evaluate the query.*its columns are site, label, tr, volumes, sex"
        ):
            cohort.query(expression)


def test_to_frame_and_back(cohort):
    frame = cohort.to_frame()
    assert frame.columns.tolist() == ["site", "label", "tr", "volumes", "sex", "age", "education"]
    assert frame.index.tolist() == cohort.subjects.tolist()
    pd.testing.assert_frame_equal(frame[["sex", "age", "education"]], cohort.phenotypes, check_names=False)
    again = arrays(cohort, y=frame["label"], sites=frame["site"], phenotypes=frame[["sex", "age", "education"]], tr=frame["tr"])
    assert again.hash == cohort.hash
    named = arrays(cohort, phenotypes=cohort.phenotypes.assign(site="x"))
    assert named.to_frame().columns.tolist()[-1] == "phenotype_site" and set(named.query("site == 'east'").sites) == {"east"}


def test_study_of_a_cohort_in_memory(cohort, tmp_path):
    study = {"cohort": cohort, "methods": ["fc-logistic", "prior"], "targets": ["east", "west"]}
    summary = m2lgdg.run_study(study, tmp_path / "memory")
    cohort.save(tmp_path / "tiny.cohort")
    m2lgdg.run_study(study | {"cohort": str(tmp_path / "tiny.cohort")}, tmp_path / "file")
    pd.testing.assert_frame_equal(read_predictions(tmp_path / "memory"), read_predictions(tmp_path / "file"))
    assert (summary.done, summary.folder) == (4, str(tmp_path / "memory"))
    assert m2lgdg.run_study(study, tmp_path / "memory").reused == 4
    assert m2lgdg.run_study(tmp_path / "memory" / "study.json", tmp_path / "memory").reused == 4
    with pytest.raises(m2lgdg.InputError, match="belongs to another study"):
        m2lgdg.run_study(study | {"cohort": cohort[1:]}, tmp_path / "memory")
    scores = summary.scores()
    assert scores.index.tolist() == ["fc-logistic", "prior"] and scores.columns.tolist() == ["east", "west", "mean"]
    part = read_predictions(tmp_path / "memory").query("method == 'fc-logistic' and target == 'east'")
    assert scores.loc["fc-logistic", "east"] == m2lgdg.evaluate(part["label"], part["proba"])["AUC"]
    assert scores.loc["prior", "mean"] == 0.5


def test_methods_of_a_study_can_be_objects(cohort, tmp_path):
    svm = m2lgdg.from_sklearn(SVC(kernel="linear"), name="an-svm")
    try:
        methods = [svm, m2lgdg.make("fc-logistic", phenotypes=True), "prior"]
        summary = m2lgdg.run_study({"cohort": cohort, "methods": methods, "targets": ["east"]}, tmp_path / "out")
    finally:
        del m2lgdg.METHODS["an-svm"]
    assert summary.failed == [] and summary.done == 3
    predictions = read_predictions(tmp_path / "out").set_index("method")["proba"]
    (fold,) = m2lgdg.leave_one_site_out(cohort, ["east"])
    expected = m2lgdg.make("fc-logistic", phenotypes=True).fit(fold.source).predict_proba(fold.target)[:, 1]
    np.testing.assert_allclose(np.sort(predictions["fc-logistic"]), np.sort(expected), rtol=1e-9)


def test_audit_of_a_cohort_in_memory(cohort):
    (result,) = audit({"cohort": cohort, "methods": ["prior"]})
    assert result.passed


def cells(html):
    return re.findall(r"<td>(.*?)</td>", html)


def test_html(cohort, tmp_path):
    html = cohort._repr_html_()
    assert cells(html)[:5] == ["east", "10", "5", "5", "0"] and "52 subjects" in html
    method = m2lgdg.make("fc-svm", site_folds=3)
    assert "Not fitted." in method._repr_html_() and cells(method._repr_html_())[:4] == ["atlases", "first", "site_folds", "3"]
    assert "Fitted on 23 patients and 29 controls of 4 sites." in method.fit(cohort)._repr_html_()
    check = m2lgdg.check_cohort(cohort)
    assert check.findings and all(escape(one.text) in check._repr_html_() for one in check.findings)
    summary = m2lgdg.run_study({"cohort": cohort, "methods": ["fc-logistic"], "targets": ["east"]}, tmp_path / "out")
    assert "1 of 1 cells done, 0 failed" in summary._repr_html_()
    assert cells(summary._repr_html_())[0] == "fc-logistic"


def test_html_is_escaped(cohort):
    odd = arrays(cohort, sites=np.where(cohort.sites == "east", "<script>", cohort.sites), name="<b>")
    assert "<script>" not in odd._repr_html_() and "&lt;script&gt;" in odd._repr_html_() and "<b>:" not in odd._repr_html_()
