"""Metrics against slow loops over the definitions, DeLong against its structural components and against simulation,
calibration against two maximum-likelihood solvers."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from m2lgdg import make
from m2lgdg.metrics import (
    FLAT_NOTE,
    METRICS,
    PAPER_METRICS,
    auc,
    calibration,
    delong,
    delong_interval,
    delong_test,
    evaluate,
    is_flat,
    platt,
    rankdata,
    roc_curve,
    sigmoid,
    wilson,
)

NORMAL = NormalDist()
quick = settings(max_examples=60, deadline=None)

# Few distinct values, so that ties within and between the classes are common.
coarse = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000001, 0.7, 0.9, 1.0])
fine = st.floats(0, 1, allow_subnormal=False)
subject = st.tuples(st.sampled_from([0, 1]), st.one_of(coarse, fine))
subjects = st.lists(subject, min_size=1, max_size=30)


def ratio(top, bottom):
    return top / bottom if bottom else math.nan


def loop_counts(labels, proba, threshold):
    counts = {(label, call): 0 for label in (0, 1) for call in (0, 1)}
    for label, p in zip(labels, proba, strict=True):
        counts[label, 1 if p >= threshold else 0] += 1
    return counts


def loop_auc(labels, score):
    wins, pairs = 0.0, 0
    for label, s in zip(labels, score, strict=True):
        for other, r in zip(labels, score, strict=True):
            if label == 1 and other == 0:
                pairs += 1
                wins += 1.0 if s > r else 0.5 if s == r else 0.0
    return ratio(wins, pairs)


def loop_metrics(labels, proba, threshold=0.5):
    counts = loop_counts(labels, proba, threshold)
    tp, fn, fp, tn = counts[1, 1], counts[1, 0], counts[0, 1], counts[0, 0]
    return {
        "ACC": ratio(tp + tn, len(labels)),
        "SEN": ratio(tp, tp + fn),
        "SPE": ratio(tn, tn + fp),
        "F1": ratio(2 * tp, 2 * tp + fp + fn),
        "AUC": loop_auc(labels, proba),
        "Brier": ratio(sum((p - label) ** 2 for label, p in zip(labels, proba, strict=True)), len(labels)),
    }


def loop_delong(labels, scores):
    """Variances and covariances of the structural components of DeLong, DeLong and Clarke-Pearson (1988), pair by pair."""
    components = []
    for score in scores:
        patients = [s for label, s in zip(labels, score, strict=True) if label == 1]
        controls = [s for label, s in zip(labels, score, strict=True) if label == 0]
        psi = [[1.0 if x > y else 0.5 if x == y else 0.0 for y in controls] for x in patients]
        v10 = [sum(row) / len(controls) for row in psi]
        v01 = [sum(row[j] for row in psi) / len(patients) for j in range(len(controls))]
        components.append((v10, v01))

    def covariance(a, b):
        mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
        return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / (len(a) - 1)

    return [
        [sum(covariance(one[side], two[side]) / len(one[side]) for side in (0, 1)) for two in components] for one in components
    ]


def draw(rng, n, shift=1.0):
    """As many patients as controls, normal scores that are `shift` apart, and the labels."""
    labels = np.repeat([1, 0], n)
    return labels, rng.normal(size=2 * n) + shift * labels


def expit(x):
    return 1 / (1 + np.exp(-x))


def logit(p):
    return np.log(p / (1 - p))


def assert_scores(got, expected):
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name


@quick
@given(subjects, st.sampled_from([0.5, 0.25, 0.7]))
def test_metrics_equal_loops_over_subjects_and_pairs(rows, threshold):
    labels, proba = zip(*rows, strict=True)
    got = evaluate(labels, proba, threshold)
    assert tuple(got) == METRICS
    assert_scores(got, loop_metrics(labels, proba, threshold))
    assert auc(labels, proba) == pytest.approx(loop_auc(labels, proba), abs=1e-12, nan_ok=True)


@quick
@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1]), coarse), min_size=1, max_size=25), st.randoms(use_true_random=False))
def test_unknown_labels_and_the_order_of_subjects_do_not_count(rows, random):
    known = [row for row in rows if row[0] != -1]
    shuffled = list(rows)
    random.shuffle(shuffled)
    labels, proba = [row[0] for row in shuffled], [row[1] for row in shuffled]
    expected = loop_metrics([row[0] for row in known], [row[1] for row in known])
    assert_scores(evaluate(labels, proba), expected)
    assert auc(labels, proba) == pytest.approx(expected["AUC"], abs=1e-12, nan_ok=True)


def test_unknown_labels_do_not_count_in_intervals_tests_and_calibration():
    labels, score = draw(np.random.default_rng(0), 20)
    proba, other = expit(score), expit(score[::-1])
    more, more_proba = np.append(labels, [-1, -1, -1]), np.append(proba, [0.1, 0.99, 0.5])
    more_other = np.append(other, [0.4, 0.0, 1.0])
    assert calibration(more, more_proba) == pytest.approx(calibration(labels, proba))
    assert delong_interval(more, more_proba) == pytest.approx(delong_interval(labels, proba))
    assert delong_test(more, more_proba, more_other) == pytest.approx(delong_test(labels, proba, other))
    np.testing.assert_allclose(delong(more, [more_proba, more_other])[1], delong(labels, [proba, other])[1])


@quick
@given(subjects)
def test_auc_is_a_matter_of_order_and_turns_with_the_score(rows):
    labels, score = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    assume(0 < labels.sum() < len(labels))
    ranks = np.array([(score < s).sum() for s in score])
    assert auc(labels, ranks) == pytest.approx(auc(labels, score), abs=1e-12)
    assert auc(labels, -score) == pytest.approx(1 - auc(labels, score), abs=1e-12)
    assert auc(1 - labels, score) == pytest.approx(1 - auc(labels, score), abs=1e-12)


@given(st.lists(st.sampled_from([-1.5, 0.0, 0.25, 0.25 + 2**-54, 7.0, math.inf, math.nan]), max_size=12))
def test_ranks_are_those_of_scipy(values):
    np.testing.assert_array_equal(rankdata(values), scipy.stats.rankdata(values))


def test_a_score_that_is_no_number_gives_no_auc():
    """It must not count as the highest, or a method that breaks at a patient would look the better for it."""
    labels, score = np.array([0, 1, 0, 1]), np.array([0.1, math.nan, 0.3, 0.4])
    assert math.isnan(auc(labels, score)) and math.isnan(evaluate(labels, score)["AUC"])
    assert np.isnan(delong(labels, score[None])[0]).all()


def test_f1_is_that_of_the_patients():
    """3 of 4 patients found, 2 of 4 controls called patients: F1 is 6/9 for patients, 4/7 for controls."""
    got = evaluate([1, 1, 1, 1, 0, 0, 0, 0], [0.9, 0.8, 0.7, 0.2, 0.6, 0.9, 0.1, 0.2])
    assert got["F1"] == pytest.approx(2 / 3)
    assert got["SEN"] == pytest.approx(0.75) and got["SPE"] == pytest.approx(0.5)


def test_a_probability_at_the_threshold_is_called_patient():
    got = evaluate([1, 0], [0.5, 0.5])
    assert (got["SEN"], got["SPE"]) == (1, 0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(3, 60),
    effect=st.floats(-2, 30),
    patients=st.floats(0.05, 0.95),
    unit=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
)
def test_platt_scaling_is_the_minimum_of_its_loss(n, effect, patients, unit, seed):
    """Also of classes that the decision separates, and of a class with one subject."""
    rng = np.random.default_rng(seed)
    labels = np.r_[0, 1, rng.random(n - 2) < patients].astype(np.int8)
    decision = unit * (effect * labels + rng.normal(size=n) + 5)
    z = (decision - decision.mean()) / decision.std()

    def loss(curve):
        raw = curve[0] * z + curve[1]
        return np.sum(np.logaddexp(0, raw) - labels * raw) + 0.005 * curve[0] ** 2

    slope, offset = platt(decision, labels)
    found = np.array([slope * decision.std(), offset + slope * decision.mean()])
    best = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000})
    if best.x[0] > 1e-3:  # a smaller slope is raised, so that no decision is turned round
        assert loss(found) <= best.fun + 1e-9
        for i in range(2):
            around = [loss(found + sign * 1e-4 * np.eye(2)[i]) for sign in (-1, 1)]
            assert abs(around[0] - around[1]) < 1e-6  # level


@pytest.mark.parametrize("labels", [[], [-1, -1]])
def test_nobody_gives_nan_everywhere(labels):
    proba = [0.3] * len(labels)
    assert all(math.isnan(value) for value in evaluate(labels, proba).values())
    assert math.isnan(auc(labels, proba))
    assert all(np.isnan(part).all() for part in delong(labels, proba))
    for pair in (calibration(labels, proba), delong_interval(labels, proba), delong_test(labels, proba, proba)):
        assert all(math.isnan(value) for value in pair)


@pytest.mark.parametrize(("label", "undefined"), [(0, "SEN"), (1, "SPE")])
def test_one_class_leaves_what_needs_both_undefined(label, undefined):
    labels, proba = [label] * 4, [0.1, 0.4, 0.6, 0.8]
    got = evaluate(labels, proba)
    assert got["ACC"] == 0.5
    assert {name for name in METRICS if math.isnan(got[name])} >= {undefined, "AUC", "slope", "intercept"}
    assert all(np.isnan(part).all() for part in delong(labels, proba))
    for pair in (calibration(labels, proba), delong_interval(labels, proba), delong_test(labels, proba, proba)):
        assert all(math.isnan(value) for value in pair)


@quick
@given(st.lists(st.tuples(coarse, coarse, coarse), min_size=4, max_size=24), st.data())
def test_delong_covariance_equals_the_structural_components(rows, data):
    count = data.draw(st.integers(2, len(rows) - 2))
    labels = data.draw(st.permutations([1] * count + [0] * (len(rows) - count)))
    scores = list(zip(*rows, strict=True))
    aucs, covariance = delong(labels, scores)
    assert aucs.shape == (3,) and covariance.shape == (3, 3)
    np.testing.assert_allclose(aucs, [loop_auc(labels, score) for score in scores], atol=1e-12)
    np.testing.assert_allclose(covariance, loop_delong(labels, scores), atol=1e-12)
    np.testing.assert_allclose(delong(labels, scores[0])[1], covariance[:1, :1], atol=1e-12)


@pytest.mark.parametrize("labels", [[1, 0, 0, 0], [0, 1, 1, 1]])
def test_delong_of_a_class_of_one_subject_has_an_auc_but_no_variance(labels):
    """The spread of one component over a single subject cannot be estimated (ddof 1)."""
    score = [0.5, 0.4, 0.6, 0.7]
    aucs, covariance = delong(labels, score)
    assert aucs[0] == pytest.approx(loop_auc(labels, score))
    assert np.isnan(covariance).all()
    assert all(math.isnan(value) for value in delong_interval(labels, score))


def test_delong_variance_is_that_of_the_auc_over_many_samples():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(1200):
        labels, score = draw(rng, 30)
        second = 0.6 * score + 0.8 * draw(rng, 30)[1]
        aucs, covariance = delong(labels, [score, second])
        found.append((*aucs, covariance[0, 0], covariance[1, 1], covariance[0, 1]))
    first, second, *estimates = np.array(found).T
    truth = np.cov(first, second)
    assert first.mean() == pytest.approx(NORMAL.cdf(1 / math.sqrt(2)), abs=0.005)
    assert np.mean(estimates, axis=1) == pytest.approx([truth[0, 0], truth[1, 1], truth[0, 1]], rel=0.12)


def test_delong_interval_is_normal_on_the_logit_scale():
    labels, score = draw(np.random.default_rng(3), 25)
    area, sd = loop_auc(labels, score), math.sqrt(loop_delong(labels, [score])[0][0])
    for level in (0.8, 0.95):
        half = NORMAL.inv_cdf((1 + level) / 2) * sd / (area * (1 - area))
        expected = [float(expit(logit(area) + side * half)) for side in (-1, 1)]
        assert delong_interval(labels, score, level) == pytest.approx(expected)


def test_delong_test_equals_the_definition_and_is_antisymmetric():
    rng = np.random.default_rng(4)
    labels, first = draw(rng, 25)
    second = 0.5 * first + draw(rng, 25, 0.3)[1]
    v = loop_delong(labels, [first, second])
    difference = loop_auc(labels, first) - loop_auc(labels, second)
    p = 2 * NORMAL.cdf(-abs(difference) / math.sqrt(v[0][0] + v[1][1] - 2 * v[0][1]))
    assert delong_test(labels, first, second) == pytest.approx((difference, p))
    assert delong_test(labels, second, first) == pytest.approx((-difference, p))


@quick
@given(subjects)
def test_delong_test_of_a_score_with_itself(rows):
    labels, score = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    assume(2 <= labels.sum() <= len(labels) - 2)
    difference, p = delong_test(labels, score, score)
    assert (difference, p) == (0, 1)
    ranks = [float((score < s).sum()) for s in score]
    assert delong_test(labels, score, ranks) == pytest.approx((0, 1), abs=1e-12)


def likelihood_fit(labels, x, slope=None):
    """Slope and intercept of the greatest likelihood, by a general optimiser; a given slope is held."""

    def loss(beta):
        b = slope if slope is not None else beta[1]
        eta = beta[0] + b * x
        return np.sum(np.logaddexp(0, eta) - labels * eta)

    start = [0.0] if slope is not None else [0.0, 0.0]
    solution = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000})
    assert solution.success
    return solution.x[::-1] if slope is None else solution.x


@pytest.mark.parametrize(("a", "b", "n"), [(0.0, 1.0, 400), (0.8, 0.4, 200), (-1.5, 2.5, 150), (0.3, -0.7, 60), (3.0, 1.0, 90)])
def test_calibration_is_the_maximum_likelihood_fit(a, b, n):
    rng = np.random.default_rng(6)
    x = rng.normal(size=n)
    labels = (rng.random(n) < expit(a + b * x)).astype(int)
    slope, intercept = calibration(labels, expit(x))
    assert slope == pytest.approx(likelihood_fit(labels, x)[0], abs=1e-5)
    assert intercept == pytest.approx(likelihood_fit(labels, x, slope=1.0)[0], abs=1e-5)
    peer = LogisticRegression(C=1e10, tol=1e-10, max_iter=10_000).fit(x[:, None], labels)
    assert slope == pytest.approx(peer.coef_[0, 0], abs=1e-4)
    assert evaluate(labels, expit(x))["slope"] == slope and evaluate(labels, expit(x))["intercept"] == intercept
    assert np.sum(expit(x + intercept)) == pytest.approx(labels.sum(), abs=1e-6)  # the score equation at slope 1


@quick
@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from([0.02, 0.3, 0.5, 0.6, 0.97])), min_size=4, max_size=30))
def test_calibration_slope_is_defined_exactly_when_the_classes_overlap(rows):
    """Overlap: neither way round are all patients at or above all controls. The score equations hold at the fit."""
    labels, proba = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    assume(0 < labels.sum() < len(labels))
    patients, controls, x = proba[labels == 1], proba[labels == 0], logit(proba)
    slope, intercept = calibration(labels, proba)
    if patients.min() >= controls.max() or patients.max() <= controls.min():
        assert math.isnan(slope)
        return
    assert np.sum(expit(x + intercept)) == pytest.approx(labels.sum(), abs=1e-6)
    alpha = likelihood_fit(labels, slope * x, slope=1.0)[0]
    residual = labels - expit(alpha + slope * x)
    assert residual @ x == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("wide", [1, 6])
def test_calibration_slope_of_classes_that_hardly_overlap(wide):
    """Two of twelve lie on the other side: slopes are large, and Newton's steps must not go back and forth.

    With the others farther apart the slope of standardised odds is above 100, more than fifty steps of at most 2.
    """
    x = np.array([-0.9, 1.6, -0.1, -0.2, -0.3, -6.5, -0.2, 0.0, -0.8, -2.0, 0.2, -0.3]) / 10
    labels = np.array([0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0])
    x[np.abs(x) > 0.05] *= wide
    slope, _ = calibration(labels, expit(x))
    residual = labels - expit(slope * x + likelihood_fit(labels, slope * x, slope=1.0)[0])
    assert slope > 5 and residual @ x == pytest.approx(0, abs=1e-6)


def test_calibration_slope_has_no_value_where_it_is_not_defined():
    assert math.isnan(calibration([1, 1, 0], [0.3, 0.3, 0.3])[0])  # a constant
    assert math.isnan(calibration([1, 1, 0, 0], [0.9, 0.6, 0.5, 0.1])[0])  # separated
    assert math.isnan(calibration([1, 1, 0, 0], [0.1, 0.2, 0.6, 0.7])[0])  # separated the wrong way round
    assert math.isnan(calibration([1, 1, 0, 0], [0.7, 0.6, 0.6, 0.5])[0])  # touching at one value: still infinite
    assert math.isnan(calibration([1, 1, 0, 0], [0.1, 0.6, 0.6, 0.7])[0])


@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1, 4])
def test_calibration_slope_of_probabilities_that_hardly_vary(factor):
    """A method near chance may put everyone within a thousandth of 0.5; the slope then is in the thousands."""
    rng = np.random.default_rng(12)
    x = rng.normal(size=80)
    labels = (rng.random(80) < expit(0.7 * x)).astype(int)
    expected = likelihood_fit(labels, x)[0] / factor
    assert calibration(labels, expit(factor * x))[0] == pytest.approx(expected, rel=1e-4)
    assert calibration(labels, expit(factor * x - 4))[0] == pytest.approx(expected, rel=1e-4)  # far from 0.5 as well


def test_calibration_stands_probabilities_of_zero_and_one():
    slope, intercept = calibration([1, 0, 1, 0, 1, 0], [1.0, 0.0, 0.0, 0.3, 0.6, 1.0])
    assert math.isfinite(slope) and math.isfinite(intercept)


def test_intervals_hold_the_estimate_and_shrink_with_more_subjects():
    labels, score = draw(np.random.default_rng(7), 15)
    proba = expit(score - 0.5)
    got = evaluate(labels, proba)
    widths = []
    for times in (1, 9):
        many, much = np.tile(labels, times), np.tile(proba, times)
        right = int(((much >= 0.5) == (many == 1)).sum())
        intervals = {"AUC": delong_interval(many, much), "ACC": wilson(right, len(many))}
        for name, (low, high) in intervals.items():
            assert low < got[name] < high, name
            assert 0 <= low < high <= 1, name
        widths.append([high - low for low, high in intervals.values()])
    np.testing.assert_allclose(np.divide(*widths), 3, rtol=0.35)


def test_intervals_widen_with_the_level():
    labels, score = draw(np.random.default_rng(8), 20)
    (a, b), (c, d), (e, f) = (delong_interval(labels, score, level) for level in (0.99, 0.9, 0.5))
    assert a < c < e < f < d < b


def test_inputs_may_be_lists_or_arrays_of_any_kind_and_stay_as_they_were():
    labels, proba = np.array([1, 0, 1, 0, 1], dtype=np.int8), np.array([0.7, 0.6, 0.4, 0.2, 0.9], dtype=np.float32)
    kept = labels.copy(), proba.copy()
    assert evaluate(labels, proba) == pytest.approx(evaluate(labels.tolist(), proba.tolist()), rel=1e-6)
    delong_interval(labels, proba)
    np.testing.assert_array_equal(labels, kept[0])
    np.testing.assert_array_equal(proba, kept[1])


@pytest.mark.parametrize("decimals", [0, 1, 3])
def test_roc_curves_are_those_of_scikit_learn(decimals):
    from sklearn.metrics import roc_curve as reference

    rng = np.random.default_rng(decimals)
    for count in (2, 3, 4, 30, 75):
        labels = np.r_[0, 1, rng.integers(0, 2, count - 2)]
        scores = np.round(rng.random(count), decimals)
        false_positive, true_positive, _ = reference(labels, scores)
        ours = roc_curve(np.r_[labels, -1], np.r_[scores, 0.7])  # a subject without a label does not count
        np.testing.assert_array_equal(ours[0], false_positive)
        np.testing.assert_array_equal(ours[1], true_positive)


def test_only_the_wanted_metrics_are_computed():
    labels, proba = [0, 1, 0, 1, 1], [0.2, 0.7, 0.6, 0.4, 0.9]
    every = evaluate(labels, proba)
    assert list(every) == list(METRICS)
    assert evaluate(labels, proba, metrics=PAPER_METRICS) == {metric: every[metric] for metric in PAPER_METRICS}


def decisions_with_offsets(seed, sizes, against=4.0):
    """Decisions that tell patients from controls within sites, with offsets of sites that go against their prevalences."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.r_[np.ones(patients), np.zeros(controls)] for patients, controls in sizes]).astype(np.int8)
    sites = np.repeat([f"s{i}" for i in range(len(sizes))], [sum(size) for size in sizes])
    offset = np.repeat(
        [against * (0.5 - patients / (patients + controls)) for patients, controls in sizes], list(map(sum, sizes))
    )
    return 1.5 * labels + offset + rng.normal(size=len(labels)), labels, sites


@pytest.mark.parametrize(
    ("sizes", "against"),
    [
        ([(20, 20)] * 4 + [(30, 0), (0, 30)], 12.0),  # two sites of one class
        ([(30, 10), (10, 30), (30, 10), (10, 30)], 12.0),  # none, and offsets are enough
        ([(20, 20), (30, 0), (0, 30), (1, 2)], 12.0),  # one site is left, and a very small one
    ],
)
def test_platt_scaling_does_not_collapse_by_offsets_of_sites(sizes, against):
    decision, labels, sites = decisions_with_offsets(0, sizes, against)
    pooled, (slope, offset) = platt(decision, labels), platt(decision, labels, sites)
    assert is_flat(pooled[0], decision) or pooled[0] < 0.2
    assert not is_flat(slope, decision) and 0.4 < slope < 3  # 1.5 is that of the labels
    counted = np.isin(sites, [site for site in set(sites.tolist()) if len(set(labels[sites == site].tolist())) == 2])
    assert sigmoid(slope * decision + offset)[counted].mean() == pytest.approx(labels[counted].mean(), abs=1e-3)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1e3), (1e-3, 5.0), (1e3, -1e6)])
def test_platt_scaling_within_sites_does_not_depend_on_the_units_of_decisions(scale, shift):
    decision, labels, sites = decisions_with_offsets(0, [(30, 10), (10, 30), (30, 10), (10, 30)], 12.0)
    (slope, offset), own = platt(decision, labels, sites), platt(scale * decision + shift, labels, sites)
    assert own[0] * scale == pytest.approx(slope, rel=1e-6) and slope > 2 * platt(decision, labels)[0]
    np.testing.assert_allclose(own[0] * (scale * decision + shift) + own[1], slope * decision + offset, atol=1e-5)


def test_platt_scaling_is_that_of_all_subjects_where_sites_agree():
    for against in (0.0, 2.0):
        decision, labels, sites = decisions_with_offsets(1, [(20, 20), (15, 25), (30, 20)], against)
        assert platt(decision, labels, sites) == platt(decision, labels)
    decision, labels, sites = decisions_with_offsets(1, [(20, 0), (0, 25)])  # no site to compare within
    assert platt(decision, labels, sites) == platt(decision, labels)
    known = np.where(np.arange(len(labels)) < 3, -1, labels)
    assert platt(decision, known, sites) == platt(decision[3:], labels[3:], sites[3:])


def test_a_decision_without_signal_is_flat_and_the_fit_says_so(tiny):
    rng = np.random.default_rng(0)
    labels, sites = np.tile([0, 1], 60), np.repeat(list("abc"), 40)
    decision = rng.normal(size=120) - 0.5 * labels
    assert is_flat(platt(decision, labels, sites)[0], decision)
    source = tiny._changed(series=[rng.normal(size=one.shape) for one in tiny.series], labels=1 - tiny.labels)
    notes = {}
    for name in ("fc-logistic", "fc-adaptive", "tangent-ridge"):
        model = make(name).fit(source)
        slope, held_out = model.state_["calibration"][0], model.method.held_out_
        notes[name] = model.facts_.get("notes", [])
        assert notes[name] == ([FLAT_NOTE] if is_flat(slope, held_out) else [])
    assert any(notes.values())
