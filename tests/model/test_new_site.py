"""New-site calibration: quantiles, sets, recalibration and intervals against slow oracles and planted truths."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from m2lgdg import InputError, Model, make, make_cohort
from m2lgdg.deploy.calibrate import calibrate
from m2lgdg.metrics import logit, shrunken_platt
from m2lgdg.model.folder import digest
from m2lgdg.model.new_site import COVERAGES, LARGEST, NewSiteCalibration, between_sites, conformal_quantile, percent
from m2lgdg.report.card import write_card
from m2lgdg.storage import file_hash


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def planted(seed, sites=20, size=60, slope=1.0, offset=0.0, slope_sd=0.0, offset_sd=0.0):
    """Scores whose truth is known: at site s, logit of being a patient = (slope + u_s) logit of the score + offset + v_s."""
    rng = np.random.default_rng(seed)
    names = np.repeat([f"site{i:03}" for i in range(sites)], size)
    u, v = (np.repeat(sd * rng.normal(size=sites), size) for sd in (slope_sd, offset_sd))
    x = 1.5 * rng.normal(size=sites * size)
    labels = (rng.random(len(x)) < sigmoid((slope + u) * x + offset + v)).astype(np.int8)
    return sigmoid(x), labels, names


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=1)


@pytest.fixture(scope="module")
def source(cohort):
    return cohort.select(cohort.sites != "west")


@pytest.fixture(scope="module")
def new(cohort):
    return cohort.select(sites=["west"])


@pytest.fixture(scope="module")
def fitted(source):
    return make("fc-logistic").fit(source, source_distribution=True, new_site_calibration=True)


def slow_quantile(far, coverage):
    """The least thousandth within which lie so many of the known and, should it be outside, the one that is not known."""
    for step in range(1001):
        if sum(one <= step / 1000 + 1e-12 for one in far) >= coverage * (len(far) + 1) - 1e-9:
            return step / 1000
    return 1.0


@pytest.mark.parametrize("count", [0, 1, 8, 9, 10, 19, 57])
@pytest.mark.parametrize("coverage", COVERAGES)
def test_a_quantile_is_its_definition(count, coverage):
    far = np.random.default_rng(count).random(count)
    assert conformal_quantile(far, coverage) == pytest.approx(slow_quantile(far, coverage), abs=1e-9)


def test_sets_hold_the_truth_as_often_as_said_where_subjects_are_exchangeable(monkeypatch):
    """Averaged over many draws, each class on its own; never less than said, and not much more."""
    monkeypatch.setattr("m2lgdg.model.new_site.between_sites", lambda *_: (0.0, 0.0))  # has no part in the sets
    held = {0: [], 1: []}  # share of a draw's new subjects whose set holds their class
    for seed in range(60):
        proba, labels, _ = planted(seed, sites=5, size=50)
        new_site = NewSiteCalibration.from_scores(proba[:150], labels[:150], np.repeat(["a", "b", "c"], 50), 3)
        sets = new_site.sets(sigmoid(new_site.slope * logit(proba[150:]) + new_site.offset), 0.9)
        for kind, name in ((0, "control"), (1, "patient")):
            held[kind].append(np.isin(sets[labels[150:] == kind], [name, "both"]).mean())
    for shares in held.values():
        error = np.std(shares) / np.sqrt(len(shares))
        assert error < 0.01
        assert 0.9 - 3 * error <= np.mean(shares) <= 0.93


def test_sets_by_hand():
    proba, labels, sites = planted(0)
    new_site = NewSiteCalibration.from_scores(proba, labels, sites, 20)
    row = COVERAGES.index(0.8)
    control, patient = new_site.quantiles[row]
    assert control + patient > 1  # so that both can happen, and none cannot
    given = [0.01, control - 1e-6, control + 1e-6, 1 - patient - 1e-6, 1 - patient + 1e-6, 0.99]
    assert new_site.sets(given, 0.8).tolist() == ["control", "both", "patient", "control", "both", "patient"]
    both_far = NewSiteCalibration(1, 0, 0.5, 0, 0, 3, np.full((len(COVERAGES), 2), 0.3), new_site.whole, {})
    assert both_far.sets([0.2, 0.299, 0.301, 0.699, 0.701], 0.9).tolist() == ["control", "control", "none", "none", "patient"]
    with pytest.raises(InputError, match=r"coverage 0.91 is not one of 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95\."):
        new_site.sets(given, 0.91)


@pytest.mark.parametrize(("slope", "offset"), [(0.4, 0.0), (2.0, -1.0), (1.0, 0.0)])
def test_recalibration_recovers_planted_miscalibration(slope, offset):
    new_site = NewSiteCalibration.from_scores(*planted(1, sites=3, size=1000, slope=slope, offset=offset), 3)
    assert new_site.slope == pytest.approx(slope, abs=0.1)
    assert new_site.offset == pytest.approx(offset, abs=0.1)
    assert new_site.whole.slope == pytest.approx(1, abs=0.05)  # figures are of calibrated scores
    assert new_site.whole.intercept == pytest.approx(0, abs=0.05)


def test_figures_of_a_site_are_had_without_it():
    proba, labels, sites = planted(3, sites=5, size=30, offset_sd=1.0)
    new_site = NewSiteCalibration.from_scores(proba, labels, sites, 5)
    x, row = logit(proba), COVERAGES.index(0.9)
    held = 0
    for site, one in new_site.sites.items():
        here = sites == site
        slope, offset = shrunken_platt(x[~here], labels[~here])
        p, others = sigmoid(slope * x[here] + offset), sigmoid(slope * x[~here] + offset)
        y, z = labels[here], labels[~here]
        ends = slow_quantile(others[z == 0], 0.9), slow_quantile(1 - others[z == 1], 0.9)
        own = np.where(y == 1, 1 - p <= ends[1], p <= ends[0])
        single = (1 - p <= ends[1]) ^ (p <= ends[0])
        assert one.reached[row] == pytest.approx(own.mean(), abs=6e-4)
        assert one.decided[row] == pytest.approx(single.mean(), abs=6e-4)
        assert one.right[row] == pytest.approx(own[single].mean(), abs=6e-4)
        assert one.brier == pytest.approx(((p - y) ** 2).mean(), abs=6e-4)
        assert one.sensitivity == pytest.approx((p >= z.mean())[y == 1].mean(), abs=6e-4)
        held += own.sum()
    assert new_site.whole.reached[row] == pytest.approx(held / 150, abs=6e-4)
    shares = [one.reached[row] for one in new_site.sites.values()]
    assert new_site.expected(0.9)[1:3] == (min(shares), np.median(shares))


def test_between_site_sds_are_posterior_mean_squares():
    """Against draws from the model: sds from their priors, slopes and offsets from these, weighed by the likelihood."""
    proba, labels, sites = planted(5, sites=3, size=12, offset_sd=1.0)
    x, rng = logit(proba), np.random.default_rng(0)
    wide, far = (np.abs(sd * rng.normal(size=2000)) for sd in (0.5, 1.0))  # sds from their priors
    weights = np.ones(2000)
    for site in np.unique(sites):
        a, y = x[sites == site], labels[sites == site]
        for i in range(2000):
            slope, offset = 1 + wide[i] * rng.normal(size=200), far[i] * rng.normal(size=200)
            p = sigmoid(slope[:, None] * a + offset[:, None])  # (draw, subject)
            weights[i] *= np.where(y == 1, p, 1 - p).prod(axis=1).mean()
    weights /= weights.sum()
    expected = np.sqrt(weights @ wide**2), np.sqrt(weights @ far**2)
    np.testing.assert_allclose(between_sites(x, labels, sites), expected, rtol=0.1)


def test_between_site_sds_recover_what_was_planted():
    proba, labels, sites = planted(6, 40, 80, slope_sd=0.3, offset_sd=0.8)
    slope_sd, offset_sd = between_sites(logit(proba), labels, sites)
    assert slope_sd == pytest.approx(0.3, abs=0.1)
    assert offset_sd == pytest.approx(0.8, abs=0.15)
    proba, labels, sites = planted(7, 40, 80)
    alike = between_sites(logit(proba), labels, sites)
    assert max(alike) < 0.25


@pytest.mark.long
def test_the_interval_holds_what_a_score_means_at_nine_of_ten_new_sites():
    inside = []
    for seed in range(16):
        new_site = NewSiteCalibration.from_scores(*planted(seed, 18, 60, 1, 0, 0.2, 0.7), 18)
        rng = np.random.default_rng(100 + seed)
        for x in (-1.5, 0.0, 1.0):
            true = sigmoid((1 + 0.2 * rng.normal(size=400)) * x + 0.7 * rng.normal(size=400))
            low, high = new_site.interval(sigmoid(new_site.slope * np.array([x]) + new_site.offset))
            inside.append(((true >= low) & (true <= high)).mean())
    assert 0.86 < np.mean(inside) < 0.96
    few = NewSiteCalibration.from_scores(*planted(0, 3, 60, 1, 0, 0.2, 0.7), 3)
    widths = [np.subtract(*one.interval([0.5])[::-1])[0] for one in (new_site, few)]
    assert widths[1] > widths[0]  # three sites know less of how sites differ


def test_the_interval_is_students_prediction_of_one_more_site(fitted):
    """By its equation: sds of slope and offset between sites, one more site than were seen, and so many degrees of freedom."""
    new_site = dataclasses.replace(fitted.new_site_, slope_sd=0.3, offset_sd=0.4)
    sites = len(new_site.sites)
    for proba, level in ((0.5, 0.9), (0.8, 0.9), (0.1, 0.6)):
        x = math.log(proba / (1 - proba))
        sd = math.sqrt((0.09 * x * x + 0.16) * (sites + 1) / sites)
        half = stats.t(sites - 1).ppf(1 - (1 - level) / 2) * sd
        expected = [1 / (1 + math.exp(-(x + sign * half))) for sign in (-1, 1)]
        np.testing.assert_allclose(np.ravel(new_site.interval([proba], level)), expected, rtol=1e-9)


def test_the_interval_is_around_the_probability():
    new_site = NewSiteCalibration.from_scores(*planted(2, offset_sd=0.5), 20)
    proba = np.array([0.0, 0.1, 0.5, 0.9, 1.0])
    low, high = new_site.interval(proba)
    assert (low <= np.maximum(proba, 1e-6)).all()
    assert (high >= np.minimum(proba, 1 - 1e-6)).all()
    assert (new_site.interval(proba, 0.5)[0] > low).all()
    with pytest.raises(InputError, match="level 1 is not between 0 and 1"):
        new_site.interval(proba, 1)


def test_the_refits_never_saw_their_sites(source):
    seen = []

    def unseen(part, rest):
        seen.append((set(part.site_names), set(rest.site_names)))
        return np.full(len(rest), 0.5) + 0.01 * rest.labels

    NewSiteCalibration.fit(source, unseen)
    assert sorted(next(iter(rest)) for _, rest in seen) == source.site_names
    assert all(part | rest == set(source.site_names) and not part & rest for part, rest in seen)
    seen.clear()
    assert NewSiteCalibration.fit(source, unseen, 2).folds == len(seen) == 2
    with pytest.raises(InputError, match="new-site calibration needs at least 2 calibration folds, not 1"):
        NewSiteCalibration.fit(source, unseen, 1)
    with pytest.raises(InputError, match="new-site calibration needs at least 3 source sites, and there are 2"):
        NewSiteCalibration.fit(source.select(source.sites != "east"), unseen)


def test_weights_are_the_same_and_probabilities_have_the_temperature(source, new, fitted):
    plain = make("fc-logistic").fit(source)
    assert plain.new_site_ is None
    assert plain.threshold == 0.5
    for name, value in plain.state_.items():
        np.testing.assert_array_equal(fitted.state_[name], value)
    assert json.dumps(plain.facts_) == json.dumps(fitted.facts_)
    new_site, before = fitted.new_site_, plain.predict_proba(new)[:, 1]
    expected = sigmoid(new_site.slope * logit(before) + new_site.offset)
    np.testing.assert_allclose(fitted.predict_proba(new)[:, 1], expected, rtol=1e-12)
    assert fitted.threshold == new_site.threshold == source.labels.mean()
    slope, offset = plain.state_["calibration"]
    assert fitted.recalibration == (new_site.slope, new_site.offset)
    decision = (logit(before) - offset) / slope
    combined = sigmoid(new_site.slope * slope * decision + new_site.slope * offset + new_site.offset)
    np.testing.assert_allclose(fitted.predict_proba(new)[:, 1], combined, rtol=1e-9)
    again = fitted.fit(source)  # the calibration belongs to one fit only
    assert again.new_site_ is None
    np.testing.assert_array_equal(again.predict_proba(new)[:, 1], before)
    fitted.fit(source, source_distribution=True, new_site_calibration=True)


def test_scores_are_those_of_a_fit_without_the_site(source, fitted):
    site = "north"
    here = source.sites == site
    scores = {}
    for one in source.site_names:
        part = make("fc-logistic").fit(source.select(source.sites != one))
        scores[one] = part.predict_proba(source.select(sites=[one]))[:, 1]
    x, y = logit(np.concatenate(list(scores.values()))), np.concatenate([source.labels[source.sites == one] for one in scores])
    assert (fitted.new_site_.slope, fitted.new_site_.offset) == pytest.approx(shrunken_platt(x, y), rel=1e-9)
    assert fitted.new_site_.sites[site].subjects == here.sum()


def test_a_saved_calibration_is_the_same_and_holds_no_subject(source, new, fitted, tmp_path):
    loaded = Model.load(fitted.save(tmp_path / "model"))
    stored, new_site = loaded.new_site_, fitted.new_site_
    assert str(stored.whole) == str(new_site.whole)  # NaN is not equal to itself
    assert str(stored.sites) == str(new_site.sites)
    np.testing.assert_array_equal(stored.quantiles, new_site.quantiles)
    np.testing.assert_array_equal(loaded.predict_proba(new), fitted.predict_proba(new))
    text = (tmp_path / "model" / "new_site_calibration.json").read_text()
    assert not [subject for subject in source.subjects if subject in text]

    def numbers(said):
        if isinstance(said, dict | list):
            return [n for one in (said.values() if isinstance(said, dict) else said) for n in numbers(one)]
        return [said] if isinstance(said, float) else []

    names = ("slope", "offset", "threshold", "slope_sd", "offset_sd")
    rule = {getattr(one, name) for one in (new_site, new_site.adapted) for name in names}
    assert all(n in rule or n == round(n, 3) for n in numbers(json.loads(text)))  # too coarse to be a subject's score


def test_figures_of_few_subjects_are_not_kept():
    proba, labels, sites = planted(0, 5, 20)
    sites = np.where(np.arange(100) < 9, "few", sites)
    new_site = NewSiteCalibration.from_scores(proba, labels, sites, 5)
    assert "few" not in new_site.sites
    assert new_site.whole.subjects == 100


def rewrite(folder, change):
    """Alter new_site_calibration.json and make all hashes true again, as an attacker would."""
    said = json.loads((folder / "new_site_calibration.json").read_text())
    change(said)
    (folder / "new_site_calibration.json").write_text(json.dumps(said))
    rehash(folder)


def rehash(folder):
    about = json.loads((folder / "method.json").read_text())
    names = [name for name in about.pop("hashes") if name != "method.json"]
    about["hashes"] = {name: file_hash(folder / name, 2**30) for name in names} | {"method.json": digest(about)}
    (folder / "method.json").write_text(json.dumps(about))


def put(*path, value):
    def change(said):
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("slope", value=float("nan")), "'nan' is not a number from 1e-09 to 1e"),
        (put("slope", value=-1.0), "'-1.0' is not a number"),
        (put("slope", value=True), "'True' is not a number"),
        (put("offset", value=float("inf")), "'inf' is not a number"),
        (put("offset", value=10**400), "is not a number"),
        (put("threshold", value="0.5"), "'0.5' is not a number from 0 to 1"),
        (put("threshold", value=2), "'2' is not a number from 0 to 1"),
        (put("offset_sd", value=None), "'None' is not a number"),
        (put("quantiles", value=[[0.5, 0.5]]), "quantiles are not two per coverage"),
        (put("quantiles", value=[[0.5, 7]] * len(COVERAGES)), "'7' is not a number from 0 to 1"),
        (put("quantiles", value=3), "damaged"),
        (put("levels", value=[0.1]), "format"),
        (put("format", value="other"), "the format is not m2lgdg-promise-1"),
        (put("whole", "reached", value=[1.0]), "a figure does not have one number per coverage"),
        (put("sites", value=[1, 2]), "damaged"),
        (put("sites", value={"a": {}}), "reached"),
        (lambda said: said.pop("folds"), "folds"),
    ],
)
def test_a_hostile_calibration_is_refused(fitted, tmp_path, change, words):
    folder = fitted.save(tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(InputError, match=r"new_site_calibration\.json is damaged") as refused:
        Model.load(folder)
    assert words in str(refused.value)


def test_a_calibration_that_is_no_json_too_large_or_altered_is_refused(fitted, tmp_path):
    folder = fitted.save(tmp_path / "model")
    file = folder / "new_site_calibration.json"
    whole = file.read_text()
    file.write_text(whole.replace('"slope": ', '"slope": 1', 1))
    with pytest.raises(InputError, match=r"new_site_calibration\.json was altered after it was written"):
        Model.load(folder)
    for text in ("{", "[]", "[" * 10**5, "3"):
        file.write_text(text)
        rehash(folder)
        with pytest.raises(InputError, match=r"new_site_calibration\.json is damaged"):
            Model.load(folder)
    file.write_text(whole + " " * LARGEST)
    rehash(folder)
    with pytest.raises(InputError, match=f"more than the limit of {LARGEST}"):
        Model.load(folder)
    file.unlink()
    with pytest.raises(InputError, match=r"new_site_calibration\.json does not exist"):
        Model.load(folder)


def test_local_calibration_goes_on_from_the_temperature_and_ends_the_new_site_calibration(source, new, tmp_path):
    fitted = make("fc-logistic").fit(source, new_site_calibration=True)
    before = fitted.predict_proba(new)[:, 1]
    found = calibrate(fitted, new)
    loaded = Model.load(fitted.save(tmp_path / "own"))
    expected = sigmoid(found.slope * logit(before) + found.offset)
    np.testing.assert_allclose(loaded.predict_proba(new)[:, 1], expected, rtol=1e-9)
    assert loaded.new_site_ is None
    assert loaded.threshold == new.labels.mean()
    write_card(tmp_path / "own")
    assert "unseen site" not in (tmp_path / "own" / "card.md").read_text().split("## Decision")[1].split("## Data")[0]


def test_the_card_shows_the_calibration(fitted, tmp_path):
    folder = fitted.save(tmp_path / "model")
    text = (write_card(folder) / "card.md").read_text()
    part = text.split("## Expected performance at an unseen site")[1].split("\n## ")[0]
    new_site = fitted.new_site_
    assert f"sd {new_site.slope_sd:.2f} of the slope, {new_site.offset_sd:.2f} of the " in part
    for site, one in new_site.sites.items():
        (row,) = [line for line in part.splitlines() if line.startswith(f"| {site} |")]
        assert row.split(" | ")[1:3] == [str(one.subjects), str(one.patients)]
        right = f"{100 * one.right[5]:.1f}" if one.decided[5] else "-"
        assert row.endswith(f" | {100 * one.reached[5]:.1f} | {100 * one.decided[5]:.1f} | {right} |")
    assert f"logit times {new_site.slope:.4g} plus {new_site.offset:.4g}" in text
    assert f"patient at {new_site.threshold:.3g} or above" in text
    plain = make("fc-logistic", site_folds=2).fit(make_cohort("tiny", seed=1)).save(tmp_path / "plain")
    text = (write_card(plain) / "card.md").read_text()
    assert "fitted without new-site calibration, so its probabilities are not calibrated for a site it has not seen." in text
    assert "Fit it with m2lgdg fit --new-site-calibration." in text


@pytest.fixture
def command(monkeypatch, typed, tmp_path, source, new):
    monkeypatch.chdir(tmp_path)
    source.save("known.cohort")
    new.save("new.cohort")
    return typed


def test_fit_predict_and_abstain(command, new, fitted):
    code, text, _ = command("fit", "known.cohort", "--method", "fc-logistic", "--out", "model")
    assert code == 0
    assert "New-site calibration: 3 extra fits, each without one site" in text
    assert command("predict", "model", "new.cohort", "--out", "plain.csv")[0] == 0
    code, text, _ = command("predict", "model", "new.cohort", "--out", "p.csv", "--coverage", "0.7")
    assert code == 0
    kept = fitted.new_site_.expected(0.7)
    reached, lowest, median = map(percent, (kept.reached, kept.lowest, kept.median))
    assert f"of {reached} of subjects (lowest site {lowest}, median {median})" in text
    table, plain = pd.read_csv("p.csv"), pd.read_csv("plain.csv")
    assert "set" not in plain
    for column in plain:
        assert table[column].equals(plain[column]), column
    proba = fitted.predict_proba(new)[:, 1]
    np.testing.assert_allclose(table["proba"], proba, rtol=1e-12)
    np.testing.assert_allclose(table[["low", "high"]].T, fitted.new_site_.interval(proba), rtol=1e-9)
    assert table["set"].tolist() == fitted.new_site_.sets(proba, 0.7).tolist()
    assert (table["decision"] == (proba >= fitted.threshold)).all()

    code, text, _ = command("predict", "model", "new.cohort", "--out", "a.csv", "--abstain")
    assert code == 0
    table = pd.read_csv("a.csv", keep_default_na=False, dtype=str)
    sets = fitted.new_site_.sets(proba, 0.9).tolist()
    assert table["decision"].tolist() == [{"control": "0", "patient": "1"}.get(one, "") for one in sets]
    unsure = [one in ("both", "none") for one in sets]
    assert 0 < sum(unsure) < 12  # else nothing was tried
    assert [f"abstained: {one}" in flags for one, flags in zip(sets, table["flags"], strict=True)] == unsure
    assert f"Decided on {12 - sum(unsure)} subjects, abstained on {sum(unsure)}." in text
    kept = fitted.new_site_.expected(0.9)
    assert f"{percent(kept.decided)} were decided, and {percent(kept.right)} of these correctly" in text
    assert f"{sets.count('patient')} decided as patients" in text


def test_options_without_a_calibration_are_refused_in_one_sentence(command):
    fit = ("fit", "known.cohort", "--method", "fc-logistic")
    assert "calibration" not in command(*fit, "--no-new-site-calibration", "--out", "model")[1]
    assert not Path("model/new_site_calibration.json").exists()
    for option in (["--coverage", "0.9"], ["--abstain"]):
        code, _, errors = command("predict", "model", "new.cohort", "--out", "p.csv", *option)
        assert code == 2
        assert "this model has no new-site calibration; fit it with --new-site-calibration." in errors
        assert not Path("p.csv").exists()
    command("fit", "known.cohort", "--method", "fc-logistic", "--calibration-folds", "2", "--out", "kept")
    assert Model.load("kept").new_site_.folds == 2
    code, _, errors = command("predict", "kept", "new.cohort", "--out", "p.csv", "--coverage", "0.92")
    assert (code, "coverage 0.92 is not one of" in errors) == (2, True)
    command("calibrate", "kept", "new.cohort", "--out", "own")
    code, _, errors = command("predict", "own", "new.cohort", "--out", "p.csv", "--abstain")
    assert (code, "is calibrated to one site" in errors) == (2, True)
    code, _, errors = command("fit", "known.cohort", "--no-new-site-calibration", "--calibration-folds", "2", "--out", "m")
    assert (code, "contradict each other" in errors) == (2, True)


def test_what_is_not_done_is_said(command, source):
    small = ["--method", "erm", "--variant", "small", "--set", "epochs=1", "--set", "warmup=0", "--device", "cpu"]
    code, text, _ = command("fit", "known.cohort", *small, "--out", "deep")
    assert code == 0
    skipped = (
        "Skipped new-site calibration (3 extra fits); enable it with --new-site-calibration, or with --calibration-folds 5"
    )
    assert skipped in text
    assert command("fit", "known.cohort", *small, "--calibration-folds", "2", "--out", "kept")[0] == 0
    assert Model.load("kept").new_site_.folds == 2
    source.select(source.sites != "east").save("two.cohort")
    code, text, _ = command("fit", "two.cohort", "--method", "fc-logistic", "--out", "two")
    assert code == 0
    assert "Skipped: new-site calibration needs at least 3 source sites, and there are 2." in text
    code, _, errors = command("fit", "two.cohort", "--method", "fc-logistic", "--new-site-calibration", "--out", "three")
    assert (code, "new-site calibration needs at least 3 source sites" in errors, Path("three").exists()) == (2, True, False)


def test_a_method_of_constant_scores_gives_sets_of_both(source, new):
    fitted = make("prior").fit(source, new_site_calibration=True)
    proba = fitted.predict_proba(new)[:, 1]
    assert set(fitted.new_site_.sets(proba, 0.95)) == {"both"}
    assert np.ptp(proba) == 0


@pytest.mark.onnx
def test_the_onnx_graph_is_recalibrated(fitted, new, tmp_path):
    pytest.importorskip("onnxruntime")
    from m2lgdg.deploy.onnx import export_onnx, parts_of, prepared, raw_inputs, run_onnx

    one, whole = new.select([0]), export_onnx(fitted, tmp_path / "whole.onnx")
    found = run_onnx(whole, raw_inputs(parts_of(fitted, prepared(fitted, one)), one))
    np.testing.assert_allclose(found, fitted.predict_proba(one)[:, 1], atol=1e-6)
    file = export_onnx(fitted, tmp_path / "model.onnx", takes_prepared=True)
    np.testing.assert_allclose(run_onnx(file, prepared(fitted, new)), fitted.predict_proba(new)[:, 1], atol=1e-6)
    assert json.loads(file.with_suffix(".json").read_text())["output"]["threshold"] == fitted.new_site_.threshold


def test_no_bit_depends_on_the_hash_seed_of_the_process():
    """Sets of texts are in another order in every process, and the last bits of a sum depend on its order."""
    code = """
import numpy as np
from m2lgdg.model.new_site import between_sites
rng = np.random.default_rng(0)
x, sites = rng.normal(size=300), np.repeat([f"site{i}" for i in range(20)], 15)
print([one.hex() for one in between_sites(x, (x + rng.normal(size=300) > 0).astype(np.int8), sites)])
"""
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1
