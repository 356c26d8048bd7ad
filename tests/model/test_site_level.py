"""Intercept correction for a site: the equation it solves, what it does not depend on, and the command that stores it."""

import copy
import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg import InputError, Model, make, make_cohort
from m2lgdg.cohort import UNKNOWN, Parcellation
from m2lgdg.deploy.adapt import adapt
from m2lgdg.deploy.calibrate import calibrate
from m2lgdg.metrics import logit, sigmoid
from m2lgdg.model.new_site import NewSiteCalibration
from m2lgdg.model.site_level import (
    PRIOR_SUBJECTS,
    corrected_by_batches,
    cross_batches,
    read_counts,
    rounded_counts,
    shift_of_counts,
    site_shift,
    source_prevalence,
    written_counts,
)
from m2lgdg.report.sharing import shared_model

logits = st.lists(st.floats(-4, 4), min_size=2, max_size=40).map(np.array)
shares = st.floats(0.05, 0.95)


def bisected(values, share):
    """The same equation, solved on its own: rounded logits, a wide bracket, plain Python."""
    low, high = -40.0, 40.0
    values = [max(-5.0, min(5.0, math.floor(10 * value + 0.5) / 10)) for value in values]
    for _ in range(200):
        middle = (low + high) / 2
        mean = math.fsum(1 / (1 + math.exp(-(value + middle))) for value in values) / len(values)
        low, high = (middle, high) if mean < share else (low, middle)
    return low * len(values) / (len(values) + PRIOR_SUBJECTS)


@given(logits, shares)
def test_the_shift_solves_its_equation(values, share):
    values = np.where(np.abs(10 * values % 1 - 0.5) < 1e-9, 0.0, values)  # a tie may be rounded either way
    assert site_shift(values, share) == pytest.approx(bisected(values, share), abs=1e-9)


@given(logits, shares, st.randoms())
def test_order_does_not_matter(values, share, random):
    shuffled = values.tolist()
    random.shuffle(shuffled)
    assert site_shift(np.array(shuffled), share) == site_shift(values, share)


@given(logits, shares, st.floats(0, 3))
def test_the_shift_falls_as_the_logits_rise_and_grows_with_the_share(values, share, more):
    assert site_shift(values + more, share) <= site_shift(values, share) + 1e-12
    assert site_shift(values, min(share + 0.04, 0.99)) > site_shift(values, share)


@given(st.integers(2, 50), st.integers(-40, 40), shares)
def test_equal_subjects_are_moved_to_the_share(number, tenth, share):
    shift = site_shift(np.full(number, tenth / 10), share)
    full = math.log(share / (1 - share)) - tenth / 10
    assert shift == pytest.approx(full * number / (number + PRIOR_SUBJECTS), abs=1e-9)


@settings(max_examples=50)
@given(st.lists(st.floats(-2, 2), min_size=20, max_size=20).map(np.array), st.floats(-1e6, 1e6))
def test_one_outlier_moves_the_level_little(values, outlier):
    changed = values.copy()
    changed[0] = outlier
    # One of 20 probabilities changes by at most 1, so the mean by 0.05; its slope in the shift is at least that at |logit| 4.
    assert abs(site_shift(changed, 0.5) - site_shift(values, 0.5)) < 0.05 / (sigmoid(np.array(4.0)) * sigmoid(np.array(-4.0)))
    assert abs(site_shift(changed, 0.5) - site_shift(values, 0.5)) < 0.8


def test_fewer_than_two_subjects_have_no_level():
    assert site_shift(np.array([3.0]), 0.5) == site_shift(np.empty(0), 0.5) == 0.0


def test_more_subjects_count_more():
    shifts = [site_shift(np.full(n, -1.0), 0.5) for n in (2, 5, 20, 1000)]
    np.testing.assert_allclose(shifts, [0.5, 5 / 7, 20 / 22, 1000 / 1002], atol=1e-9)


@given(logits)
def test_counts_survive_json(values):
    counts = rounded_counts(values)
    assert read_counts(json.loads(json.dumps(written_counts(counts)))) == counts
    assert sum(counts.values()) == len(values)


@given(st.integers(0, 40), st.integers(2, 25), st.integers(0, 5))
def test_nobody_is_in_their_own_batch(number, size, seed):
    ids = [f"s{i}" for i in range(number)]
    scored = []
    for group, batch in cross_batches(ids, seed, size):
        assert not set(group.tolist()) & set(batch.tolist())
        assert len(set(batch.tolist())) == len(batch) == min(size, number - 1)
        scored += group.tolist()
    assert sorted(scored) == list(range(number))


@given(st.permutations(range(12)), st.integers(0, 3))
def test_cross_levels_depend_on_neither_order(order, seed):
    proba = np.linspace(0.05, 0.7, 12)
    ids = np.array([f"s{i}" for i in range(12)])
    usual = corrected_by_batches(proba, ids.tolist(), 0.5, seed, 5)
    shuffled = corrected_by_batches(proba[list(order)], ids[list(order)].tolist(), 0.5, seed, 5)
    np.testing.assert_array_equal(shuffled, usual[list(order)])


def test_subjects_outside_of_the_batch_share_one_level():
    ids = [f"s{i}" for i in range(30)]
    draw = np.random.default_rng(0)
    proba = sigmoid(draw.normal(-1, 1, 30))
    shifts = logit(corrected_by_batches(proba, ids, 0.5, 3, 10)) - logit(proba)
    (outside, batch), *_ = cross_batches(ids, 3, 10)
    assert len(outside) == 20
    np.testing.assert_allclose(shifts[outside], site_shift(logit(proba[batch]), 0.5), atol=1e-9)
    assert np.ptp(shifts) > 0  # the ten of the batch have others


def test_a_site_of_one_or_two_subjects_is_as_without_level():
    for proba in ([0.2], [0.2, 0.9]):  # of two, each has a batch of one
        np.testing.assert_array_equal(corrected_by_batches(np.array(proba), list("ab")[: len(proba)], 0.5, 0, 20), proba)


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", sizes={"a": 40, "b": 40, "c": 40, "new": 40}, roi_effect=2.0, edge_effect=2.5, seed=2)


@pytest.fixture(scope="module")
def model(cohort, tmp_path_factory):
    source = cohort.select(cohort.sites != "new")
    fitted = make("fc-logistic").fit(source, new_site_calibration=True, source_distribution=True)
    return fitted.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fitted(model):
    return Model.load(model)


@pytest.fixture(scope="module")
def new(cohort):
    return cohort.select(cohort.sites == "new")


def test_a_model_at_a_level(fitted, new, tmp_path):
    strict = fitted.predict_proba(new)[:, 1]
    threshold = fitted.threshold
    known = fitted.new_site_.adapted
    plain = copy.copy(fitted)
    plain.new_site_ = known
    before = plain.predict_proba(new)[:, 1]
    result = adapt(fitted, new)
    share = source_prevalence(fitted.facts_)
    assert result.level.prevalence == share
    assert result.level.assumed
    assert (result.level.subjects, result.added, result.level.site) == (40, 40, "new")
    assert result.level.shift == pytest.approx(bisected(logit(before), share), abs=1e-9)
    loaded = Model.load(fitted.save(tmp_path / "model"))
    assert loaded.new_site_.whole == known.whole
    assert loaded.new_site_.adapted is None
    assert loaded.site_level.recalibrated
    np.testing.assert_allclose(loaded.predict_proba(new)[:, 1], sigmoid(logit(before) + result.level.shift), atol=1e-9)
    assert loaded.threshold == known.threshold == threshold
    assert loaded.site_level == result.level
    assert result.patients_before == (strict >= threshold).sum()
    assert result.patients_after == (loaded.predict_proba(new)[:, 1] >= threshold).sum()
    np.testing.assert_array_equal(np.argsort(loaded.predict_proba(new)[:, 1]), np.argsort(strict))


def test_calibration_at_left_out_sites_with_a_level(model, cohort):
    """The second calibration of a model is that of left-out sites at the level of 20 other subjects each."""
    source = cohort.select(cohort.sites != "new")
    levelled = np.empty(len(source))
    for site in source.site_names:
        here = source.sites == site
        proba = make("fc-logistic").fit(source.select(~here)).predict_proba(source.select(here))[:, 1]
        share = float((source.labels[~here] == 1).mean())
        levelled[here] = corrected_by_batches(proba, source.subjects[here].tolist(), share, 0, 20)
    expected = NewSiteCalibration.from_scores(levelled, source.labels, source.sites, 3)
    stored = Model.load(model).new_site_
    assert stored.adapted.slope == pytest.approx(expected.slope)
    assert stored.adapted.offset == pytest.approx(expected.offset)
    np.testing.assert_array_equal(stored.adapted.quantiles, expected.quantiles)
    assert stored.adapted.whole == expected.whole
    assert stored.whole != expected.whole


def test_a_model_without_the_second_calibration_keeps_its_own(model, new):
    fitted = Model.load(model)
    fitted.new_site_ = dataclasses.replace(fitted.new_site_, adapted=None)  # as of an earlier version
    before = fitted.predict_proba(new)[:, 1]
    shift = adapt(fitted, new).level.shift
    np.testing.assert_allclose(fitted.predict_proba(new)[:, 1], sigmoid(logit(before) + shift), atol=1e-9)


def test_labels_and_order_do_not_reach_it(model, new):
    shuffled = new.select(np.random.default_rng(0).permutation(len(new)))
    without = new._changed(labels=np.full(len(new), UNKNOWN))
    turned = new._changed(labels=1 - new.labels)
    stored = []
    for batch in (new, shuffled, without, turned):
        fitted = Model.load(model)
        adapt(fitted, batch)
        stored.append({name: value for name, value in fitted.facts_["site_level"].items() if name != "findings"})
    assert stored[0] == stored[1] == stored[2] == stored[3]


def test_an_update_equals_all_at_once(model, new, tmp_path):
    fitted, stepwise = Model.load(model), Model.load(model)
    adapt(fitted, new, prevalence=0.3)
    adapt(stepwise, new.select(range(15)), prevalence=0.3)
    stepwise = Model.load(stepwise.save(tmp_path / "first"))
    adapt(stepwise, new.select([15]), update=True)
    result = adapt(stepwise, new.select(range(16, 40)), update=True)
    assert result.added == 24
    assert stepwise.site_level == fitted.site_level
    assert not fitted.site_level.assumed
    assert stepwise.facts_["site_level"]["logits"] == fitted.facts_["site_level"]["logits"]
    assert sum(fitted.facts_["site_level"]["logits"].values()) == 40


def test_a_given_share_moves_probabilities_and_threshold_together(model, new):
    usual = Model.load(model)
    adapt(usual, new)
    at_source = source_prevalence(usual.facts_)
    means, decisions, sets = [], [], []
    for share in (0.1, 0.5, 0.9):
        fitted = Model.load(model)
        adapt(fitted, new, prevalence=share)
        assert not fitted.site_level.assumed
        proba = fitted.predict_proba(new)[:, 1]
        means.append(proba.mean())
        assert fitted.threshold == pytest.approx(share)  # that of new-site calibration is the share of source
        decisions.append((proba >= fitted.threshold).mean())
        sets.append(fitted.conformal_sets(proba, 0.9))
    assert means[0] < means[1] < means[2]
    given = Model.load(model)
    adapt(given, new, prevalence=at_source)
    np.testing.assert_array_equal(given.predict_proba(new), usual.predict_proba(new))
    assert given.threshold == usual.threshold
    # The fewer of the same scans are patients, the more the site resembles patients elsewhere, or the reverse: sets follow.
    order = np.sign(np.diff(decisions))
    assert (np.sign(np.diff([(one == "patient").mean() for one in sets])) * order >= 0).all()


@given(st.integers(2, 60), st.integers(-30, 30), shares, shares)
def test_few_subjects_are_shrunk_towards_the_given_share(number, tenth, share, usual):
    counts = {tenth: number}
    moved = math.log(share / (1 - share)) - math.log(usual / (1 - usual))
    full = math.log(share / (1 - share)) - tenth / 10
    expected = moved + (full - moved) * number / (number + PRIOR_SUBJECTS)
    assert shift_of_counts(counts, share, usual) == pytest.approx(expected, abs=1e-9)
    assert shift_of_counts({tenth: 1}, share, usual) == pytest.approx(moved)


def test_a_model_without_new_site_calibration(cohort, new):
    fitted = make("fc-logistic").fit(cohort.select(cohort.sites != "new"))
    before = fitted.predict_proba(new)[:, 1]
    shift = adapt(fitted, new).level.shift
    np.testing.assert_allclose(fitted.predict_proba(new)[:, 1], sigmoid(logit(before) + shift), atol=1e-9)
    assert fitted.threshold == 0.5
    assert not fitted.site_level.recalibrated
    with pytest.raises(InputError, match="no conformal sets"):
        fitted.conformal_sets(before)


def test_the_same_scan_counts_once(model, new):
    fitted = Model.load(model)
    series = list(new.series)
    series[7] = series[3]
    result = adapt(fitted, new._changed(series=series, findings=None))
    assert result.added == 39
    assert result.notes == ["1 subjects with the same scan as another were not counted."]
    assert any(
        one["kind"].startswith("duplicate") or "same scan" in one["text"] for one in fitted.facts_["site_level"]["findings"]
    )


def test_an_update_counts_no_scan_twice(model, new, tmp_path):
    """Also under other ids, in another order, after saving, beside new ones, and with a further atlas."""
    once = Model.load(model)
    adapt(once, new)
    fitted = Model.load(model)
    adapt(fitted, new.select(range(15)))
    fitted = Model.load(fitted.save(tmp_path / "first"))
    before = copy.deepcopy(fitted.facts_["site_level"])
    renamed = new.select(range(15))._changed(subjects=np.array([f"other-{i}" for i in range(15)]), findings=None)
    for same in (new.select(range(15)), new.select(range(14, -1, -1)), renamed):
        with pytest.raises(InputError, match="adapted with all of these 15 scans already; give others of the site"):
            adapt(fitted, same, update=True)
        assert fitted.facts_["site_level"] == before
    result = adapt(fitted, new.select(range(10, 40)), update=True)
    assert (result.added, result.level.subjects) == (25, 40)
    assert "5 scans were counted before and do not count again." in result.notes
    assert fitted.site_level == once.site_level and fitted.facts_["site_level"]["scans"] == once.facts_["site_level"]["scans"]
    both = dataclasses.replace(new, parcellations={"other": Parcellation(new.rois[:2], [one[:, :2] for one in new.series])})
    with pytest.raises(InputError, match="all of these 40 scans"):
        adapt(fitted, both, update=True)
    assert "scans" not in shared_model(fitted).facts_["site_level"]
    del fitted.facts_["site_level"]["scans"]  # of an earlier version
    assert "does not say which scans" in adapt(fitted, new.select([0]), update=True).notes[0]


def test_two_repetition_times_are_said(model, new):
    tr = np.where(np.arange(len(new)) % 2, 2.0, 3.0)
    (note,) = adapt(Model.load(model), new._changed(tr=tr)).notes
    assert "from 2 to 3 s" in note


def test_what_is_refused_leaves_the_model_as_it_was(model, cohort, new):
    fitted = Model.load(model)
    others = cohort.select(np.isin(cohort.sites, ["a", "new"]))
    for batch, options, words in (
        (others, {}, "subjects of 2 sites"),
        (new.select([0]), {}, "at least 2 subjects"),
        (new, {"prevalence": 0.0}, "prevalence 0"),
        (new, {"prevalence": math.nan}, "prevalence nan"),
        (new, {"update": True}, "not adapted to a site yet"),
    ):
        with pytest.raises(InputError, match=words):
            adapt(fitted, batch, **options)
        assert fitted.site_level is None
    adapt(fitted, new.select(range(20)))
    level = fitted.site_level
    other_site = new._changed(sites=np.array(["other"] * len(new)))
    for batch, options, words in (
        (new, {}, "already"),
        (other_site, {"update": True}, "adapted to site new, and the subjects are of site other"),
    ):
        with pytest.raises(InputError, match=words):
            adapt(fitted, batch, **options)
        assert fitted.site_level == level
    with pytest.raises(InputError, match="is adapted to a site"):
        calibrate(fitted, new)
    local = Model.load(model)
    calibrate(local, new)
    with pytest.raises(InputError, match="calibrated to a site with labels"):
        adapt(local, new)


@pytest.mark.parametrize(
    "change",
    [
        {"shift": math.nan},
        {"shift": "0"},
        {"shift": True},
        {"subjects": 1},
        {"subjects": 2.5},
        {"prevalence": 0.0},
        {"assumed": 1},
        {"recalibrated": None},
        {"site": 3},
        {"logits": {"0.1": 3}},
        {"logits": {"9.0": 40}},
        {"logits": {"a": 40}},
        {"logits": {"0.1": 40.0}},
        {"findings": 3},
        {"findings": [{}]},
    ],
)
def test_a_damaged_level_is_refused(fitted, new, tmp_path, change):
    adapt(fitted, new)
    fitted.facts_["site_level"] |= change
    with pytest.raises(InputError, match="damaged"):
        Model.load(fitted.save(tmp_path / "model"))


def test_both_a_level_and_a_local_calibration_are_refused(fitted, model, new, tmp_path):
    adapt(fitted, new)
    local = Model.load(model)
    calibrate(local, new)
    fitted.facts_["local"] = local.facts_["local"]
    with pytest.raises(InputError, match="both a local calibration and a site level"):
        Model.load(fitted.save(tmp_path / "model"))


def test_the_commands_from_adapt_to_predict(typed, model, new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new.select(range(20)).save("first.cohort")
    new.select(range(20, 40)).save("rest.cohort")
    code, text, _ = typed("adapt", model, "first.cohort", "--out", "site")
    assert code == 0
    new.save("all.cohort")
    assert typed("adapt", model, "all.cohort", "--kind", "cohort", "--subjects", 20, "--out", "of-twenty")[0] == 0
    assert Model.load("of-twenty").facts_ == Model.load("site").facts_
    code, _, errors = typed("adapt", model, "all.cohort", "--subjects", 41, "--out", "none")
    assert code == 2 and "--subjects 41: cohort " in errors and "has 40 subjects" in errors
    assert typed("predict", model, "all.cohort", "--kind", "bids", "--out", "none.csv")[0] == 2
    fitted, before = Model.load("site"), Model.load(model)
    rest = new.select(range(20, 40))
    known = before.new_site_.adapted
    before.new_site_ = known
    expected = sigmoid(logit(before.predict_proba(rest)[:, 1]) + fitted.site_level.shift)
    sentence = fitted.site_level.sentence()
    assert sentence in text
    assert "is assumed" in text
    assert "m2lgdg predict site" in text
    code, text, _ = typed("predict", "site", "rest.cohort", "--out", "table.csv", "--coverage", "0.9")
    assert code == 0
    assert sentence in text
    table = pd.read_csv("table.csv")
    np.testing.assert_allclose(table["proba"], expected, atol=1e-9)
    assert table["set"].tolist() == known.sets(expected, 0.9).tolist()
    assert (table["decision"] == (expected >= known.threshold)).all()
    code, text, _ = typed("adapt", "site", "rest.cohort", "--out", "both", "--update", "--prevalence", "0.2")
    assert code == 0
    assert Model.load("both").site_level.subjects == 40
    assert "(given)" in text
    card = (tmp_path / "both" / "card.md").read_text()
    assert "from 40 scans" in card
    code, text, _ = typed("export", "both", "--share", "--out", "shared")
    assert code == 0
    shared = Model.load("shared")
    assert "logits" not in shared.facts_["site_level"]
    np.testing.assert_allclose(shared.predict_proba(rest), Model.load("both").predict_proba(rest))
    code, _, error = typed("adapt", "shared", "rest.cohort", "--out", "more", "--update")
    assert code == 2
    assert "copy for sharing" in error
    assert not (tmp_path / "more").exists()


@pytest.mark.onnx
def test_explanations_and_onnx_are_at_the_level(fitted, new, tmp_path):
    from m2lgdg.deploy.onnx import export_onnx, parts_of, prepared, raw_inputs, run_onnx
    from m2lgdg.deploy.serve.result import result_of

    adapt(fitted, new)
    one, whole = new.select([0]), export_onnx(fitted, tmp_path / "whole.onnx")
    found = run_onnx(whole, raw_inputs(parts_of(fitted, prepared(fitted, one)), one))
    np.testing.assert_allclose(found, fitted.predict_proba(one)[:, 1], atol=1e-6)
    path = export_onnx(fitted, tmp_path / "model.onnx", takes_prepared=True)
    assert json.loads((tmp_path / "model.json").read_text())["site_level"]["subjects"] == 40
    np.testing.assert_allclose(run_onnx(path, prepared(fitted, new)), fitted.predict_proba(new)[:, 1], atol=1e-6)
    shown = result_of(fitted, new.select([0]), explained=False)
    assert shown.level == fitted.site_level.sentence()
    assert shown.proba == pytest.approx(fitted.predict_proba(new.select([0]))[0, 1])
