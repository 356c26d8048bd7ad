"""The operating point: every number against a loop from its definition, intervals and bins over random input."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas
from scipy.optimize import minimize
from scipy.stats import binomtest

from m2lgdg import InputError
from m2lgdg.metrics import calibration_bins, calibration_error, delong_interval, delong_test, wilson
from m2lgdg.report import figures
from m2lgdg.report.drawing import Sheet
from m2lgdg.report.operating import (
    adjusted_auc,
    comparison_table,
    confusion,
    motion_sentence,
    motion_table,
    net_benefit,
    operating_table,
    predictive_table,
    predictive_values,
)
from m2lgdg.report.tables import render
from m2lgdg.study.stats import over_seeds

quick = settings(max_examples=80, deadline=None)
subjects = st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=60)
coarse = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4).map(lambda i: i / 4)), min_size=1, max_size=60)


def averaged(rows):
    """Probabilities of one method averaged over seeds, from (seed, target, subject, label, proba)."""
    columns = ["method", "variant", "seed", "target", "subject", "label", "proba"]
    return over_seeds(pd.DataFrame([("fc", "", *row) for row in rows], columns=columns))


def cells(table, row=0):
    return dict(zip(table.header, table.shown[row], strict=True))


@quick
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_where_the_score_test_turns(pair):
    part, whole = pair
    low, high = wilson(part, whole)
    other = binomtest(part, whole).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((other.low, other.high), abs=1e-9)
    assert 0 <= low <= part / whole <= high <= 1
    for bound in {low, high} - {0.0, 1.0}:
        distance = abs(part / whole - bound) / math.sqrt(bound * (1 - bound) / whole)
        assert distance == pytest.approx(1.959964, abs=1e-5)
    assert wilson(whole - part, whole) == pytest.approx((1 - high, 1 - low))


def test_wilson_of_nobody_and_of_all():
    assert np.isnan(wilson(0, 0)).all()
    assert wilson(0, 7)[0] == 0.0
    assert wilson(7, 7)[1] == 1.0


@quick
@given(subjects, st.integers(1, 12))
def test_bins_of_distinct_probabilities_are_of_equal_count(pairs, bins):
    pairs = list({p: (y, p) for y, p in pairs}.values())
    labels, proba = zip(*pairs, strict=True)
    table = calibration_bins(labels, proba, bins)
    assert table["n"].sum() == len(pairs)
    assert len(table) == min(bins, len(pairs))
    assert table["n"].max() - table["n"].min() <= 1
    left = sorted(pairs, key=lambda pair: pair[1])
    for row in table.itertuples():
        here, left = left[: row.n], left[row.n :]
        assert row.proba == pytest.approx(sum(p for _, p in here) / row.n)
        assert row.observed == pytest.approx(sum(y for y, _ in here) / row.n)
        other = binomtest(sum(y for y, _ in here), row.n).proportion_ci(0.95, method="wilson")
        assert (row.low, row.high) == pytest.approx((other.low, other.high), abs=1e-9)


@quick
@given(coarse, st.integers(1, 12), st.randoms(use_true_random=False))
def test_equal_probabilities_share_a_bin_whatever_the_order(pairs, bins, random):
    shuffled = pairs[:]
    random.shuffle(shuffled)
    table, again = (calibration_bins(*zip(*each, strict=True), bins) for each in (pairs, shuffled))
    pd.testing.assert_frame_equal(table, again)
    sizes = [sum(p == value for _, p in pairs) for value in sorted({p for _, p in pairs})]
    ends = set(np.cumsum(sizes).tolist())
    assert set(np.cumsum(table["n"]).tolist()) <= ends
    assert np.average(table["observed"], weights=table["n"]) == pytest.approx(np.mean([y for y, _ in pairs]))


def test_bins_leave_unknown_labels_out_and_refuse_none():
    table = calibration_bins([0, 1, -1, 1], [0.2, 0.4, 0.3, 0.9], 1)
    assert table[["proba", "observed", "n"]].to_numpy().tolist() == [[0.5, pytest.approx(2 / 3), 3]]
    assert len(calibration_bins([], [], 5)) == 0
    with pytest.raises(InputError, match="0 bins"):
        calibration_bins([0, 1], [0.1, 0.2], 0)


def test_calibration_error_over_five_bins():
    proba = np.arange(50) / 50
    labels = (np.arange(50) % 10 < 3).astype(int)  # three of ten in every bin
    expected = sum(abs(sum(proba[10 * k : 10 * k + 10]) / 10 - 0.3) for k in range(5)) / 5
    assert calibration_error(labels, proba) == pytest.approx(expected)
    assert np.isnan(calibration_error(labels[:49], proba[:49]))


@quick
@given(subjects, st.floats(0, 1))
def test_confusion_counts_everybody_once(pairs, threshold):
    expected = {(y, said): sum(y == a and (b >= threshold) == said for a, b in pairs) for y in (0, 1) for said in (False, True)}
    order = ((1, True), (1, False), (0, False), (0, True))
    assert confusion(*zip(*pairs, strict=True), threshold) == tuple(expected[key] for key in order)


def negative_log_likelihood(labels, linear):
    return sum(math.log1p(math.exp(-x if y else x)) for y, x in zip(labels, linear, strict=True))


def test_the_table_takes_the_mean_over_seeds():
    """Subject a is missed by seed 0 alone and found by the mean; d is alarmed by seed 1 alone and rejected by the mean."""
    first = {"a": (1, 0.4), "b": (1, 0.8), "c": (1, 0.3), "d": (0, 0.1), "e": (0, 0.7), "f": (0, 0.2), "x": (-1, 0.9)}
    second = {"a": 0.8, "b": 0.6, "c": 0.3, "d": 0.6, "e": 0.7, "f": 0.4, "x": 0.9}
    rows = [(0, "NYU", one, y, p) for one, (y, p) in first.items()]
    rows += [(1, "NYU", one, y, second[one]) for one, (y, _) in first.items()]
    table = operating_table(averaged([*rows, (0, "USM", "z", 1, 0.5)]))
    row = cells(table)
    labels, means = [1, 1, 1, 0, 0, 0], [0.6, 0.7, 0.3, 0.35, 0.7, 0.3]
    assert [row[name] for name in ("Method", "Target", "n", "patients")] == ["fc", "NYU", "6", "3"]
    assert [row[name] for name in ("TP", "FN", "TN", "FP")] == ["2", "1", "2", "1"]
    other = binomtest(2, 3).proportion_ci(0.95, method="wilson")
    assert row["SEN"] == row["SPE"] == f"66.7 ({100 * other.low:.1f}-{100 * other.high:.1f})"
    assert row["Brier"] == f"{sum((p - y) ** 2 for y, p in zip(labels, means, strict=True)) / 6:.3f}"
    logits = [math.log(p / (1 - p)) for p in means]
    both = minimize(lambda w: negative_log_likelihood(labels, [w[0] + w[1] * x for x in logits]), [0.0, 1.0], tol=1e-10)
    alone = minimize(lambda w: negative_log_likelihood(labels, [w[0] + x for x in logits]), [0.0], tol=1e-10)
    assert float(row["slope"]) == pytest.approx(both.x[1], abs=1e-3)
    assert float(row["intercept"]) == pytest.approx(alone.x[0], abs=1e-3)
    assert row["ECE"] == "-"
    lonely = cells(table, 1)
    assert [lonely[name] for name in ("n", "TP", "FN", "TN", "FP", "SPE", "slope")] == ["1", "1", "0", "0", "0", "-", "-"]
    assert "| fc | NYU | 6 |" in render([table], "markdown")


def test_large_sites_have_a_calibration_error():
    rng = np.random.default_rng(0)
    proba = rng.uniform(size=60)
    rows = [(0, "NYU", f"s{i}", int(rng.uniform() < p), p) for i, p in enumerate(proba)]
    ranked = sorted((p, y) for *_, y, p in rows)
    parts = [ranked[12 * k : 12 * k + 12] for k in range(5)]
    error = sum(abs(sum(p for p, _ in part) - sum(y for _, y in part)) for part in parts) / 60
    assert cells(operating_table(averaged(rows)))["ECE"] == f"{error:.3f}"


def test_predictive_values_by_bayes():
    assert predictive_values(0.9, 0.8, 0.1) == pytest.approx((0.09 / 0.27, 0.72 / 0.73))
    ppv, npv = predictive_values(0.7, 0.6, 0.5)  # among 200, half patients: 70 of 110 called, 60 of 90 not called
    assert (ppv, npv) == pytest.approx((70 / 110, 60 / 90))
    assert predictive_values(1.0, 1.0, 0.3) == (1.0, 1.0)
    nobody_called = predictive_values(0.0, 1.0, 0.3)
    assert np.isnan(nobody_called[0])
    assert nobody_called[1] == pytest.approx(0.7)


@quick
@given(subjects, st.lists(st.floats(0, 0.95), min_size=1, max_size=5))
def test_net_benefit_is_found_patients_less_weighted_alarms(pairs, thresholds):
    labels, proba = zip(*pairs, strict=True)
    table = net_benefit(labels, proba, thresholds)
    n = len(pairs)
    for threshold, row in zip(thresholds, table.itertuples(), strict=True):
        odds = threshold / (1 - threshold)
        found = sum(y == 1 and p >= threshold for y, p in pairs)
        alarms = sum(y == 0 and p >= threshold for y, p in pairs)
        assert row.threshold == threshold
        assert row.model == pytest.approx(found / n - alarms / n * odds, abs=1e-9)
        assert row.treat_all == pytest.approx(sum(labels) / n - (n - sum(labels)) / n * odds, abs=1e-9)
        assert row.treat_none == 0


def two_methods(sites):
    """A table as of `over_seeds` from target -> [(label, proba of a, proba of b)]; subjects of b are in another order."""
    rows = []
    for site, subjects in sites.items():
        rows += [("a", "", site, f"s{i}", y, p) for i, (y, p, _) in enumerate(subjects)]
        rows += [("b", "phenotypes", site, f"s{i}", y, p) for i, (y, _, p) in reversed(list(enumerate(subjects)))]
    return pd.DataFrame(rows, columns=["method", "variant", "target", "subject", "label", "proba"])


SMALL_SITE = [
    *((1, 0.9, 0.6), (1, 0.8, 0.4), (1, 0.3, 0.7), (1, 0.6, 0.2), (1, 0.7, 0.5)),
    *((0, 0.2, 0.4), (0, 0.3, 0.1), (0, 0.6, 0.8), (0, 0.1, 0.3)),
]


def u_statistics(subjects):
    """AUC of a and b, and the variances of a, b and a - b, from every pair of a patient and a control."""
    patients, controls = ([row[1:] for row in subjects if row[0] == label] for label in (1, 0))
    wins = [[[(x > y) + 0.5 * (x == y) for x, y in zip(p, c, strict=True)] for c in controls] for p in patients]
    wins = [[[*pair, pair[0] - pair[1]] for pair in row] for row in wins]  # (patient, control, [a, b, a - b])
    m, n = len(patients), len(controls)
    means, variances = [], []
    for k in range(3):
        area = sum(wins[i][j][k] for i in range(m) for j in range(n)) / (m * n)
        by_patient = [sum(wins[i][j][k] for j in range(n)) / n for i in range(m)]
        by_control = [sum(wins[i][j][k] for i in range(m)) / m for j in range(n)]
        variance = (
            sum((v - area) ** 2 for v in by_patient) / (m - 1) / m + sum((v - area) ** 2 for v in by_control) / (n - 1) / n
        )
        means.append(area)
        variances.append(variance)
    return means, variances


def test_two_methods_are_compared_at_each_site_by_delong():
    rng = np.random.default_rng(3)
    large = [(int(y), float(0.3 * y + rng.random()) / 1.3, float(rng.random())) for y in np.arange(40) % 2]
    one_class = [(1, 0.4, 0.6), (1, 0.7, 0.2)]
    sites = {"tiny": SMALL_SITE, "patients only": one_class, "large": large}
    table = comparison_table(two_methods(sites), ("a", ""), ("b", "phenotypes"))
    assert table.header == ["Target", "n", "patients", "AUC, a", "AUC, b + phenotypes", "a minus b + phenotypes", "p"]
    assert [row[0] for row in table.shown] == ["tiny", "large"]  # no AUC where there is one class
    for row in table.shown:
        labels, *scores = zip(*sites[row[0]], strict=True)
        assert row[1:3] == [str(len(labels)), str(sum(labels))]
        (first, second, difference), variances = u_statistics(sites[row[0]])
        p = math.erfc(abs(difference) / math.sqrt(2 * variances[2]))
        assert row[5:] == [f"{100 * difference:+.1f}", f"{p:.3f}"]
        assert delong_test(labels, *scores) == pytest.approx((difference, p))
        for cell, area, score, variance in zip(row[3:5], (first, second), scores, variances[:2], strict=True):
            low, high = delong_interval(labels, score)
            assert cell == f"{100 * area:.1f} ({100 * low:.1f}-{100 * high:.1f})"
            scale = area * (1 - area)  # the interval is symmetric in the logit of the AUC
            half = 1.959964 * math.sqrt(variance) / scale
            ends = [1 / (1 + math.exp(-(math.log(area / (1 - area)) + sign * half))) for sign in (-1, 1)]
            assert (low, high) == pytest.approx(ends, abs=1e-6)
    other = cells(comparison_table(two_methods(sites), ("b", "phenotypes"), ("a", "")))
    assert other["p"] == cells(table)["p"]
    assert float(other["b + phenotypes minus a"]) == -float(cells(table)["a minus b + phenotypes"]) != 0


def test_only_subjects_of_both_methods_are_compared():
    """Controls s5 and s7 were not predicted by b, and count for neither."""
    mean = two_methods({"NYU": SMALL_SITE})
    fewer = mean[~((mean.method == "b") & mean.subject.isin(["s5", "s7"]))]
    shorter = [row for i, row in enumerate(SMALL_SITE) if i not in (5, 7)]
    table = comparison_table(fewer, ("a", ""), ("b", "phenotypes"))
    assert table.shown == comparison_table(two_methods({"NYU": shorter}), ("a", ""), ("b", "phenotypes")).shown
    assert cells(table)["n"] == "7"
    assert comparison_table(mean, ("a", ""), ("b", "")) is None  # b was run with phenotypes only
    assert comparison_table(mean[mean.label == 1], ("a", ""), ("b", "phenotypes")) is None


def test_predictive_values_are_those_of_the_mean_rates_over_sites():
    """Method a: SEN 4/5 and 1/2, SPE 3/4 and 2/3; a third site of patients only counts for SEN, 1."""
    usm = [(1, 0.9, 0.1), (1, 0.2, 0.1), (0, 0.1, 0.1), (0, 0.2, 0.1), (0, 0.6, 0.1)]
    mean = two_methods({"NYU": SMALL_SITE, "USM": usm, "patients": [(1, 0.5, 0.1)]})  # 0.5 reaches the threshold
    table = predictive_table(mean, [("a", ""), ("b", "phenotypes")])
    rows = {(row[0], float(row[1])): row[2:] for row in table.shown}
    assert [key for key in rows if key[0] == "a"] == [("a", prevalence) for prevalence in (1, 5, 10, 20, 50)]
    sensitivity, specificity = (4 / 5 + 1 / 2 + 1) / 3, (3 / 4 + 2 / 3) / 2
    for prevalence in (1, 5, 10, 20, 50):
        sick, well = 1000 * prevalence, 1000 * (100 - prevalence)  # of 100,000
        positive = [sick * sensitivity, well * (1 - specificity)]
        negative = [well * specificity, sick * (1 - sensitivity)]
        values = [sensitivity, specificity, positive[0] / sum(positive), negative[0] / sum(negative)]
        assert rows["a", prevalence] == [f"{100 * value:.1f}" for value in values]
    only_patients = two_methods({"patients": [(1, 0.9, 0.1), (1, 0.2, 0.1)]})
    assert cells(predictive_table(only_patients, [("a", "")]))["SPE"] == "-"
    assert cells(predictive_table(only_patients, [("a", "")]))["PPV"] == "-"


def lines_of(monkeypatch, mean, keys):
    """Label -> (x, y) of the lines of a decision curve, and its sheet; None where nothing is drawn."""
    monkeypatch.setattr(figures, "draw", lambda name, caption, alt, size, paint: paint)
    paint = figures.decision_curves(mean, keys, {key: i for i, key in enumerate(keys)})
    if paint is None:
        return None
    sheet = Sheet(Canvas(layout="constrained"))
    paint(sheet)
    return {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in sheet.canvas.axes[0].lines}


def slow_benefit(subjects, threshold):
    """Net benefit of method a and of treating all, from the definition."""
    found = sum(y == 1 and p >= threshold for y, p, _ in subjects)
    alarms = sum(y == 0 and p >= threshold for y, p, _ in subjects)
    n, patients, odds = len(subjects), sum(y for y, *_ in subjects), threshold / (1 - threshold)
    return found / n - alarms / n * odds, patients / n - (n - patients) / n * odds


def test_decision_curves_are_drawn_from_the_definition(monkeypatch):
    usm = [(1, 0.9, 0.1), (1, 0.2, 0.1), (1, 0.6, 0.1), (0, 0.1, 0.1)]
    sites = {"NYU": SMALL_SITE, "USM": usm, "patients": [(1, 0.5, 0.1)]}
    alone = lines_of(monkeypatch, two_methods({"NYU": SMALL_SITE}), [("a", "")])
    both = lines_of(monkeypatch, two_methods(sites), [("a", ""), ("b", "phenotypes"), ("c", "")])
    assert list(alone) == ["treat all", "treat none", "a"]
    assert list(both) == ["treat all", "treat none", "a", "b + phenotypes"]  # c was not run
    for lines, parts in ((alone, [SMALL_SITE]), (both, [SMALL_SITE, usm])):  # a site of one class does not count
        thresholds, benefits = lines["a"]
        assert thresholds == pytest.approx(range(1, 100))  # both axes are in percent
        expected = [[slow_benefit(part, threshold) for part in parts] for threshold in np.linspace(0.01, 0.99, 99)]
        assert benefits == pytest.approx([100 * sum(model for model, _ in each) / len(parts) for each in expected])
        every = [100 * sum(treated for _, treated in each) / len(parts) for each in expected]
        assert lines["treat all"][1] == pytest.approx(every)
        assert set(lines["treat none"][1]) == {0}
    assert benefits[49] == pytest.approx(
        100 * (4 / 9 - 1 / 9 + 2 / 4) / 2
    )  # at 0.5 found patients and false alarms weigh the same
    assert lines_of(monkeypatch, two_methods({"patients": [(1, 0.5, 0.1)]}), [("a", "")]) is None


def moving(rng, effect, slope, sites=("A", "B", "C"), shift=0.0, size=60):
    """Predictions of sites that differ in level, and motion by subject; patients move `shift` more."""
    rows, motion = [], {}
    for s, site in enumerate(sites):
        for i in range(size + 10 * s):
            label = i % 2
            moved = rng.gamma(2.0, 0.1) + shift * label
            decision = 0.5 * s + effect * label + slope * moved + rng.normal()
            motion[f"{site}{i}"] = moved
            rows.append(("fc", "", site, f"{site}{i}", label, 1 / (1 + np.exp(-decision))))
    return pd.DataFrame(rows, columns=["method", "variant", "target", "subject", "label", "proba"]), pd.Series(motion)


def by_definition(table, motion):
    """Janes and Pepe: the mean over patients of the proportion of controls with a smaller residual; one site at a time."""
    decision = np.log(table["proba"] / (1 - table["proba"])).to_numpy()
    moved = motion.loc[table["subject"]].to_numpy()
    sick, sites = table["label"].to_numpy() == 1, table["target"].to_numpy()
    names = sorted(set(sites))
    design = np.column_stack([moved, *(sites == site for site in names)]).astype(float)  # a slope, and a level for each site
    slope = np.linalg.lstsq(design[~sick], decision[~sick], rcond=None)[0][0]
    areas = []
    for site in names:
        controls = [(decision - slope * moved)[i] for i in np.flatnonzero((sites == site) & ~sick)]
        places = []
        for i in np.flatnonzero((sites == site) & sick):
            residual = decision[i] - slope * moved[i]
            places.append(np.mean([residual > other for other in controls]))
        areas.append(np.mean(places))
    return areas


def test_it_is_the_mean_place_of_a_patient_among_controls_who_moved_as_much():
    table, motion = moving(np.random.default_rng(0), effect=0.8, slope=4.0, shift=0.1)
    scores, areas = adjusted_auc(table, motion), by_definition(table, motion)
    assert scores.adjusted == pytest.approx(np.mean(areas), abs=1e-12)
    half = 4.302653 * np.std(areas, ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
    assert (scores.low, scores.high) == pytest.approx((np.mean(areas) - half, min(np.mean(areas) + half, 1)), abs=1e-6)
    assert (scores.sites, scores.subjects) == (3, 60 + 70 + 80)


def test_what_is_motion_alone_is_chance_after_the_adjustment():
    table, motion = moving(np.random.default_rng(1), effect=0.0, slope=12.0, shift=0.25, size=400)
    scores = adjusted_auc(table, motion)
    assert scores.plain > 0.75 and scores.motion > 0.85 and scores.correlation > 0.8
    assert scores.adjusted == pytest.approx(0.5, abs=0.04)


def test_a_decision_without_motion_is_left_alone():
    table, motion = moving(np.random.default_rng(2), effect=1.0, slope=0.0, shift=0.2, size=400)
    scores = adjusted_auc(table, motion)
    assert scores.adjusted == pytest.approx(scores.plain, abs=0.02) and scores.plain > 0.7
    constant = adjusted_auc(table.assign(proba=0.5 + table["target"].map({"A": 0.013, "B": 0.017, "C": 0.1})), motion)
    assert (constant.plain, constant.adjusted, constant.correlation) == (0.5, 0.5, 0.0)
    flat = adjusted_auc(table, motion * 0 + 0.1)
    assert flat.adjusted == flat.plain and flat.motion == 0.5


def test_subjects_without_a_value_and_sites_of_one_class_are_left_out():
    table, motion = moving(np.random.default_rng(3), effect=1.0, slope=1.0)
    motion["A0"] = np.nan
    one_class = table[(table["target"] != "B") | (table["label"] == 1)]
    scores = adjusted_auc(one_class, motion)
    assert (scores.sites, scores.subjects) == (2, 59 + 35 + 80)
    patients = table[table["label"] == 1]
    assert adjusted_auc(patients, motion) is None and motion_table(patients, [("fc", "")], motion) is None
    assert motion_sentence(patients, ("fc", ""), motion) == ""


def test_table_and_sentence_have_the_same_numbers():
    rng = np.random.default_rng(4)
    table, motion = moving(rng, effect=1.0, slope=2.0, shift=0.1)
    other = table.assign(method="other", proba=rng.random(len(table)))
    both = pd.concat([other, table])
    shown = motion_table(both, [("other", ""), ("fc", "")], motion)
    assert [row[0] for row in shown.shown] == ["fc", "other"]  # the highest first
    scores = adjusted_auc(table, motion)
    low, high = 100 * scores.low, 100 * scores.high
    assert shown.shown[0][1:4] == [f"{100 * scores.plain:.1f}", f"{100 * scores.adjusted:.1f}", f"{low:.1f} to {high:.1f}"]
    sentence = motion_sentence(both, ("fc", ""), motion)
    assert f"is {100 * scores.adjusted:.1f} % (95 % interval {low:.1f} to {high:.1f})" in sentence
    assert motion_table(both, [("fc", "")], None) is None and motion_sentence(both, ("fc", ""), None) == ""
