"""Learning curves: nested parts of source with its proportions, the trend, and the command."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, leave_one_site_out, make_cohort, run_study
from m2lgdg.metrics import auc
from m2lgdg.report.curve import trend_table
from m2lgdg.splits import nested_order
from m2lgdg.study.config import check_study
from m2lgdg.study.curve import learning_curve, linear_study, subset_of_source, summarise
from m2lgdg.study.predictions import read_predictions


@pytest.fixture(scope="module")
def cohort():
    """Six sites with an effect that a linear model learns slowly."""
    sizes = dict(north=40, south=30, east=24, west=36, centre=28, coast=32)
    return make_cohort("mild", sizes=sizes, seed=2, duplicates=0)


@pytest.fixture(scope="module")
def folder(cohort, tmp_path_factory):
    to = tmp_path_factory.mktemp("curve")
    cohort.save(to / "c.cohort")
    (to / "study.toml").write_text('cohort = "c.cohort"\nmethods = ["prior", "fc-logistic", "erm"]\nseeds = [0]\n')
    return to


@pytest.fixture(scope="module")
def computed(folder):
    study = linear_study(check_study({"cohort": "c.cohort", "methods": ["prior", "fc-logistic"]}, "study", folder), None)
    return learning_curve(study, folder / "out", sizes=(0.125, 0.25, 0.5, 1), repeats=2)


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_nested_and_keep_sites_and_classes(cohort, seed):
    for fold in leave_one_site_out(cohort):
        assert sorted(nested_order(fold.source, seed)) == list(range(len(fold.source)))
        before = set()
        for size in (0.125, 0.25, 0.5, 30, 100, 1):
            part = subset_of_source(fold.source, size, seed)
            assert len(part) == (round(size * len(fold.source)) if size <= 1 else size)
            assert fold.site not in part.sites and not set(part.subjects) & set(fold.target.subjects)
            fraction = len(part) / len(fold.source)
            for site in fold.source.site_names:
                for label in (0, 1):
                    expected = fraction * ((fold.source.sites == site) & (fold.source.labels == label)).sum()
                    assert abs(((part.sites == site) & (part.labels == label)).sum() - expected) <= 1.5
            if size in (0.125, 0.25, 0.5, 1):
                assert before <= set(part.subjects)
                before = set(part.subjects)
        assert subset_of_source(fold.source, 1, seed).subjects.tolist() == fold.source.subjects.tolist()


def test_repeats_differ_and_the_order_of_rows_does_not_matter(cohort):
    first = set(subset_of_source(cohort, 0.25, 0).subjects)
    assert first != set(subset_of_source(cohort, 0.25, 1).subjects)
    shuffled = cohort.select(np.random.default_rng(0).permutation(len(cohort)))
    assert set(subset_of_source(shuffled, 0.25, 0).subjects) == first
    smaller = cohort.select(cohort.sites != "north")  # the order within a site does not depend on the other sites
    south = [s for s in cohort.subjects[nested_order(cohort, 0)] if s in set(cohort.subjects[cohort.sites == "south"])]
    assert [s for s in smaller.subjects[nested_order(smaller, 0)] if s in set(south)] == south


def test_the_curve_rises_and_its_sizes_are_as_requested(computed, cohort):
    curve, summary = computed
    assert summary.total == summary.done == 6 * (3 * 2 + 1) and not summary.failed
    assert list(curve.trends) == ["fc-logistic"]
    for row in curve.points.itertuples():
        source = len(cohort) - (cohort.sites == row.target).sum()
        assert row.subjects == round(row.size * source) and 0 < row.patients < row.subjects
    areas = curve.table["AUC"].to_numpy()
    assert areas[-1] > areas[0] + 0.03 and curve.trends["fc-logistic"].slope > 0.01
    assert (curve.table["low"] <= curve.table["AUC"]).all() and (curve.table["AUC"] <= curve.table["high"]).all()
    assert (curve.table["sites"] == 6).all()


def test_a_site_with_few_of_a_class_is_no_target_of_the_curve(tmp_path):
    cohort = make_cohort("tiny")  # four controls at east
    study = check_study({"cohort": "tiny.cohort", "methods": ["prior"]}, "study", tmp_path)
    cohort.save(tmp_path / "tiny.cohort")
    curve, _ = learning_curve(study, tmp_path / "out", sizes=(0.5, 1), repeats=1)
    assert set(curve.points["target"]) == {"north", "south", "west"}
    with pytest.raises(InputError, match="at least 50 patients and controls"):
        learning_curve(study.model_copy(update={"min_per_class": 50}), tmp_path / "none", sizes=(0.5, 1), repeats=1)


def test_the_whole_of_source_is_the_study_itself(computed, folder):
    run_study({"cohort": str(folder / "c.cohort"), "methods": ["fc-logistic"], "seeds": [0]}, folder / "study")
    whole = computed[0].points.query("size == 1").set_index("target")["AUC"]
    for target, rows in read_predictions(folder / "study").groupby("target"):
        assert whole[target] == auc(rows["label"].to_numpy(), rows["proba"].to_numpy())


def test_it_continues_where_it_was_stopped(computed, folder):
    removed = sorted((folder / "out" / "points").iterdir())[:3]
    for path in removed:
        path.unlink()
    study = linear_study(check_study({"cohort": "c.cohort", "methods": ["prior", "fc-logistic"]}, "study", folder), None)
    again, summary = learning_curve(study, folder / "out", sizes=(0.125, 0.25, 0.5, 1), repeats=2, jobs=2)
    assert (summary.reused, summary.done) == (summary.total - 3, 3)
    pd.testing.assert_frame_equal(again.points, computed[0].points)


def test_an_altered_training_is_run_again(computed, folder):
    """Another AUC, with and without the checksum that it would have; a point of another training."""
    study = linear_study(check_study({"cohort": "c.cohort", "methods": ["prior", "fc-logistic"]}, "study", folder), None)
    first, second, third, *_ = sorted((folder / "out" / "points").iterdir())
    kept = {path: path.read_text() for path in (first, second, third)}
    for path, text in kept.items():
        record = json.loads(text)
        record["row"][-1] = 5.0
        path.write_text(json.dumps(record) if path == first else kept[first] if path == second else "[1]")
    again, summary = learning_curve(study, folder / "out", sizes=(0.125, 0.25, 0.5, 1), repeats=2)
    assert summary.done == 3
    pd.testing.assert_frame_equal(again.points, computed[0].points)
    with pytest.raises(ValueError, match="out of range"):
        summarise(computed[0].points.assign(AUC=5.0))


def points(areas, sizes):
    rows = [
        ("a", f"s{i}", 0, size, repeat, size * 100, 10, area + shift)
        for i, by_size in enumerate(areas)
        for size, area in zip(sizes, by_size, strict=True)
        for repeat, shift in ((0, -0.01), (1, 0.01))
    ]
    return pd.DataFrame(rows, columns=["method", "target", "seed", "size", "repeat", "subjects", "patients", "AUC"])


def test_the_trend_is_that_of_polyfit():
    rng, sizes = np.random.default_rng(0), (1, 2, 4, 7)
    areas = 0.6 + 0.04 * np.log2(sizes) + rng.normal(0, 0.03, (9, 4))
    curve = summarise(points(areas, sizes))
    subjects = 100 * np.array(sizes)
    slope, level = np.polyfit(np.log2(subjects), areas.mean(axis=0), 1)
    trend = curve.trends["a"]
    assert np.isclose(trend.slope, slope) and np.isclose(trend.level, level)
    np.testing.assert_allclose(curve.table["AUC"], areas.mean(axis=0))
    # Every draw of the bootstrap is a line through the mean of the drawn sites.
    chosen = np.random.default_rng(0).integers(0, 9, (2000, 9))
    drawn = np.array([np.polyfit(np.log2(subjects), areas[rows].mean(axis=0), 1)[::-1] for rows in chosen[:50]])
    np.testing.assert_allclose(trend.draws[:50], drawn, atol=1e-9)
    means = areas[chosen].mean(axis=1)
    np.testing.assert_allclose(curve.table[["low", "high"]].to_numpy().T, np.quantile(means, (0.025, 0.975), axis=0))
    value, low, high = trend.at(1400)
    assert np.isclose(value, level + slope * math.log2(1400)) and low < value < high
    assert np.isclose(trend.at(trend.needed(0.85))[0], 0.85)
    table = trend_table(curve)
    assert table["subjects"].tolist()[1:] == [1400, 2800] and np.isclose(table["value"][1], value)


def test_the_published_numbers_of_abide():
    """Mean AUC of connectome-adaptive on ABIDE (AAL): three points for each doubling."""
    sizes = [1.06, 2.12, 4.18, 6.22, 8.34]
    curve = summarise(points([[0.659, 0.690, 0.711, 0.728, 0.749]], sizes))
    assert 0.028 < curve.trends["a"].slope < 0.031
    assert 0.765 < curve.trends["a"].at(1668)[0] < 0.785
    assert all(math.isnan(value) for value in curve.trends["a"].slope_interval())  # one site has no interval


def test_an_auc_stays_below_one_and_a_falling_curve_reaches_no_goal():
    rising, falling = (summarise(points([areas] * 3, (1, 2))).trends["a"] for areas in ([0.8, 0.95], [0.7, 0.65]))
    assert rising.at(6400) == (1.0, 1.0, 1.0)
    assert falling.needed(0.8) is None and rising.needed(0.95) == pytest.approx(200)


def test_the_command(typed, folder, tmp_path):
    words = ("curve", folder / "study.toml", "--out", tmp_path / "out", "--sizes", "40,80", "--repeats", 1, "--goal", 0.9)
    code, out, err = typed(*words)
    assert code == 0, err
    assert "12 of 12 trainings done" in out and "for each doubling" in out and "reach" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"points.csv", "curve.csv", "trend.csv", "learning-curve.png", "learning-curve.svg"} <= names
    table = pd.read_csv(tmp_path / "out" / "curve.csv")
    assert table["subjects"].tolist() == [40, 80] and table["method"].unique().tolist() == ["fc-logistic"]
    assert typed(*words)[1].count("12 from an earlier run") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--sizes", "0.5"), "at least two different sizes"),
        (("--sizes", "much,more"), "numbers separated by commas"),
        (("--sizes", "0.5,500"), "source has only 162 subjects when centre is the target"),
        (("--sizes", "0.01,1"), "is too small"),
        (("--sizes", "30.5,60"), "neither a fraction of source"),
        (("--goal", "80"), "an AUC between 0.5 and 1"),
        (("--method", "fc-svm"), "not one of the study's methods"),
        (("--set", 'methods=["prior"]'), "no linear method; choose with --method from prior"),
    ],
)
def test_bad_input_is_one_sentence(typed, folder, tmp_path, words, reason):
    code, _, err = typed("curve", folder / "study.toml", "--out", tmp_path / "out", *words)
    assert code == 2 and reason in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
