"""From scores to tables: the paper's Panels A and B from its own site table, Holm against closed testing, means over
seeds and sites by loops."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg.metrics import METRICS
from m2lgdg.study.stats import cell_scores, holm, macro_scores, paired_tests, site_scores, training_differences

DATA = Path(__file__).parents[1] / "data"
OWN = "M2LG-DG"
COMPARED = ("MSSTAN", "M2DC", "MM-GTUNets", "MetaExplainer")  # those of Panel B
PAPER_METRICS = ("ACC", "SPE", "SEN", "AUC", "F1")


def rounds_to(value, printed, decimals):
    """Whether a value may be printed so; halves may go either way."""
    return abs(value - printed) <= 0.5 * 10**-decimals + 1e-9


@pytest.fixture(scope="module")
def published():
    """The paper's table of four sites, as `site_scores` would give it."""
    table = pd.read_csv(DATA / "rest_meta_mdd_sites.csv").rename(columns={"site": "target"})
    assert len(table) == 14 * 4 * 5
    return table.assign(variant="", seeds=5)


@pytest.fixture(scope="module")
def tests(published):
    return paired_tests(published, (OWN, ""), [(name, "") for name in COMPARED]).set_index(["method", "metric"])


def test_panel_a_follows_from_the_site_table(published):
    macro = macro_scores(published).set_index(["method", "metric"])
    panel = pd.read_csv(DATA / "panel_a.csv").set_index("method")
    assert len(macro) == panel.shape[0] * panel.shape[1] / 2 == 70
    for method, metric in itertools.product(panel.index, PAPER_METRICS):
        row = macro.loc[(method, metric)]
        assert rounds_to(row["mean"], panel.loc[method, f"{metric}_mean"], 2), (method, metric)
        assert rounds_to(row["sd"], panel.loc[method, f"{metric}_sd"], 2), (method, metric)
        assert row["sites"] == 4 and row["variant"] == ""


def test_panel_b_follows_from_the_site_table(tests):
    panel = pd.read_csv(DATA / "panel_b.csv")
    assert len(panel) == 16 and len(tests) == 20
    for row in panel.itertuples():
        got = tests.loc[(row.method, row.metric)]
        assert rounds_to(got["delta"], row.delta, 2), row
        assert rounds_to(got["t"], row.t, 2), row
        assert rounds_to(got["p_holm"], row.p_holm, 3), row
        assert got["sites"] == 4


def test_the_remark_on_specificity_follows_from_the_site_table(tests):
    found = tests.xs("SPE", level="metric")
    assert rounds_to(found["delta"].min(), 1.07, 2) and rounds_to(found["delta"].max(), 2.97, 2)
    assert all(rounds_to(p, 0.351, 3) for p in found["p_holm"])


def test_paired_t_by_loops(published, tests):
    """t = mean / (sd / sqrt 4), p from the closed form of Student's distribution with three degrees of freedom."""
    scores = {(row.method, row.target, row.metric): row.mean for row in published.itertuples(index=False)}
    sites = sorted(set(published["target"]))
    for method, metric in itertools.product(COMPARED, PAPER_METRICS):
        d = [scores[OWN, site, metric] - scores[method, site, metric] for site in sites]
        mean = sum(d) / 4
        t = mean / math.sqrt(sum((x - mean) ** 2 for x in d) / 3 / 4)
        x = abs(t) / math.sqrt(3)
        p = 1 - 2 / math.pi * (x / (1 + x * x) + math.atan(x))
        got = tests.loc[(method, metric)]
        assert (got["delta"], got["t"], got["p"]) == pytest.approx((mean, t, p), rel=1e-6), (method, metric)


def test_all_others_are_compared_unless_some_are_named(published):
    everyone = paired_tests(published, (OWN, ""))
    assert set(everyone["method"]) == set(published["method"]) - {OWN}
    assert len(everyone) == 13 * 5
    # Thirteen comparisons are corrected for instead of four; nothing else changes.
    few = paired_tests(published, (OWN, ""), [(name, "") for name in COMPARED])
    both = everyone.merge(few, on=["method", "variant", "metric"], suffixes=("", "_few"))
    np.testing.assert_allclose(both["p"], both["p_few"])
    assert (both["p_holm"] >= both["p_holm_few"] - 1e-12).all()
    pd.testing.assert_frame_equal(paired_tests(published, (OWN, ""), iter([(name, "") for name in COMPARED])), few)


def test_tables_do_not_depend_on_the_order_of_rows_and_are_not_changed(published):
    shuffled = published.sample(frac=1, random_state=0)
    before = shuffled.copy()
    keys = ["method", "variant", "metric"]
    for compute in (macro_scores, lambda table: paired_tests(table, (OWN, ""))):
        first, second = (compute(table).sort_values(keys, ignore_index=True) for table in (published, shuffled))
        pd.testing.assert_frame_equal(first, second, check_exact=False, rtol=1e-12)
    pd.testing.assert_frame_equal(shuffled, before)


def test_variants_are_methods_of_their_own(published):
    plain = published[published["method"] == OWN]
    less = plain.assign(variant="fMRI only", mean=plain["mean"] - [1, 2, 3, 4, 5] * 4)
    tests = paired_tests(pd.concat([plain, less]), (OWN, ""))
    assert set(zip(tests["method"], tests["variant"], strict=True)) == {(OWN, "fMRI only")}
    assert len(macro_scores(pd.concat([plain, less]))) == 10


def sites_table(rows):
    return pd.DataFrame(rows, columns=["method", "target", "metric", "mean"]).assign(variant="", sd=1.0, seeds=5)


def test_sites_without_a_score_are_left_out_of_means_and_pairs():
    nan = math.nan
    ours, theirs = (70.0, 66.0, nan, 64.0, 59.0), (65.0, 65.5, 60.0, nan, 57.0)
    rows = [("ours", f"s{i}", "AUC", v) for i, v in enumerate(ours)]
    rows += [("theirs", f"s{i}", "AUC", v) for i, v in enumerate(theirs)]
    rows += [("never", f"s{i}", "AUC", nan) for i in range(5)]
    rows += [("once", "s0", "AUC", 50.0)]
    table = sites_table(rows)
    macro = macro_scores(table).set_index("method")
    assert macro.loc["ours", "mean"] == pytest.approx((70 + 66 + 64 + 59) / 4)
    assert macro["sites"].to_dict() == {"ours": 4, "theirs": 4, "never": 0, "once": 1}
    assert math.isnan(macro.loc["never", "mean"]) and math.isnan(macro.loc["once", "sd"])
    tests = paired_tests(table, ("ours", "")).set_index("method")
    d = [5.0, 0.5, 2.0]
    t = 2.5 / math.sqrt(sum((x - 2.5) ** 2 for x in d) / 2 / 3)
    assert (tests.loc["theirs", "delta"], tests.loc["theirs", "t"]) == pytest.approx((2.5, t))
    assert tests["sites"].to_dict() == {"theirs": 3, "never": 0, "once": 1}
    assert tests.loc[["never", "once"], ["t", "p", "p_holm"]].isna().all(axis=None)
    assert tests.loc["theirs", "p_holm"] == tests.loc["theirs", "p"]  # the other two are no comparisons


def test_identical_scores_have_no_t():
    rows = [(m, f"s{i}", "ACC", v) for m in ("ours", "same") for i, v in enumerate((60.1, 61.2, 63.3))]
    (row,) = paired_tests(sites_table(rows), ("ours", "")).itertuples()
    assert row.delta == 0 and math.isnan(row.t) and math.isnan(row.p) and math.isnan(row.p_holm)


def loop_holm(values):
    """The closure of Bonferroni: the largest, over all sets of comparisons that hold this one, of size times smallest p."""
    known = [i for i, p in enumerate(values) if not math.isnan(p)]
    adjusted = [math.nan] * len(values)
    for i in known:
        others = [j for j in known if j != i]
        adjusted[i] = max(
            min(1.0, (1 + size) * min([values[i], *(values[j] for j in some)]))
            for size in range(len(others) + 1)
            for some in itertools.combinations(others, size)
        )
    return adjusted


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.01, 0.02, 0.05, 0.3, 1.0, math.nan])), max_size=7))
def test_holm_equals_closed_testing(values):
    np.testing.assert_allclose(holm(values), loop_holm(values), rtol=1e-12)


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.01, math.nan, 0.04, 0.03]), [0.03, math.nan, 0.06, 0.06])


@pytest.fixture(scope="module")
def predictions():
    """Two methods, three sites, three seeds; site c has one class, one subject of a has no label, one cell is missing."""
    rng = np.random.default_rng(0)
    rows = []
    for method, seed, (site, n) in itertools.product(("A", "B"), range(3), (("a", 9), ("b", 14), ("c", 5))):
        if (method, seed, site) == ("B", 2, "b"):
            continue
        for i in range(n):
            label = -1 if (site, i) == ("a", 0) else 1 if site == "c" else i % 2
            rows.append((method, "", seed, site, f"{site}{i}", label, round(rng.random(), 2)))
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def loop_cell(predictions, method, seed, site):
    """Accuracy, specificity and AUC of one cell in plain loops; None where there is no such cell."""
    here = [row for row in predictions.itertuples() if (row.method, row.seed, row.target) == (method, seed, site)]
    patients = [row.proba for row in here if row.label == 1]
    controls = [row.proba for row in here if row.label == 0]
    if not here:
        return None
    right = sum(p >= 0.5 for p in patients) + sum(p < 0.5 for p in controls)
    pairs = [1.0 if p > c else 0.5 if p == c else 0.0 for p in patients for c in controls]
    return {
        "ACC": right / (len(patients) + len(controls)),
        "SPE": sum(p < 0.5 for p in controls) / len(controls) if controls else math.nan,
        "AUC": sum(pairs) / len(pairs) if pairs else math.nan,
    }


def mean_sd(values):
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return math.nan, math.nan, 0
    mean = sum(known) / len(known)
    sd = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1)) if len(known) > 1 else math.nan
    return mean, sd, len(known)


def test_cells_sites_and_macro_by_loops(predictions):
    cells = cell_scores(predictions)
    assert list(cells.columns) == ["method", "variant", "seed", "target", "metric", "value"]
    assert len(cells) == 17 * len(METRICS) and set(cells["metric"]) == set(METRICS)
    some = cell_scores(predictions, ["SPE", "AUC"])
    pd.testing.assert_frame_equal(some, cells[cells["metric"].isin(["SPE", "AUC"])].sort_index(ignore_index=True)[some.columns])
    value = cells.set_index(["method", "seed", "target", "metric"])["value"]
    sites = site_scores(cells).set_index(["method", "target", "metric"])
    macro = macro_scores(site_scores(cells)).set_index(["method", "metric"])
    for method, metric in itertools.product(("A", "B"), ("ACC", "SPE", "AUC")):
        site_means = []
        for site in "abc":
            loops = [loop_cell(predictions, method, seed, site) for seed in range(3)]
            for seed, one in enumerate(loops):
                if one is not None:
                    assert value[method, seed, site, metric] == pytest.approx(one[metric], nan_ok=True)
            mean, sd, seeds = mean_sd([one[metric] for one in loops if one is not None])
            got = sites.loc[(method, site, metric)]
            assert (got["mean"], got["sd"], got["seeds"]) == pytest.approx((mean, sd, seeds), nan_ok=True)
            site_means.append(mean)
        got = macro.loc[(method, metric)]
        assert (got["mean"], got["sd"], got["sites"]) == pytest.approx(mean_sd(site_means), nan_ok=True)
    assert sites.loc[("B", "b", "ACC"), "seeds"] == 2 and sites.loc[("A", "c", "AUC"), "seeds"] == 0


def test_one_seed_has_a_mean_and_no_sd(predictions):
    sites = site_scores(cell_scores(predictions[predictions["seed"] == 0], ["ACC"]))
    assert sites["mean"].notna().all() and sites["sd"].isna().all() and (sites["seeds"] == 1).all()


def test_seeds_where_a_metric_is_undefined_do_not_count():
    values = [0.5, math.nan, 0.7, math.nan]
    scores = pd.DataFrame({"value": values, "seed": range(4)}).assign(method="A", variant="", target="a", metric="slope")
    (row,) = site_scores(scores).itertuples()
    assert (row.mean, row.sd, row.seeds) == pytest.approx((0.6, math.sqrt(0.02), 2))


def test_trainings_are_compared_in_pairs_of_one_site_and_seed():
    whole = {("A", 0): 0.7, ("A", 1): 0.6, ("B", 0): 0.9, ("B", 1): 0.5}
    less = {("B", 1): 0.45, ("B", 0): 0.7, ("A", 0): 0.6, ("A", 1): 0.65, ("C", 0): 0.1}  # C has no whole: left out
    once, same = {("A", 0): 0.5}, dict(reversed(whole.items()))
    rows = [
        ("own", variant, seed, target, "AUC", value)
        for variant, values in (("less", less), ("", whole), ("once", once), ("same", same))
        for (target, seed), value in values.items()
    ]
    rows += [("other", "less", 0, "A", "AUC", 0.0), ("other", "", 0, "A", "AUC", 1.0)]
    scores = pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "metric", "value"])
    found = training_differences(scores, "own").set_index("variant")
    pairs = [0.1, -0.05, 0.2, 0.05]
    mean = sum(pairs) / 4
    sd = math.sqrt(sum((pair - mean) ** 2 for mean, pair in zip([0.025, 0.025, 0.125, 0.125], pairs, strict=True)) / 2)
    assert list(found.index) == ["less", "once", "same"]
    assert found.loc["less", ["mean", "half", "trainings"]].tolist() == pytest.approx([mean, 4.302653 * sd / 2, 4])  # t of 2
    assert found.loc["once", "mean"] == pytest.approx(0.2) and math.isnan(found.loc["once", "half"])
    assert found.loc["same", "mean"] == 0 and math.isnan(found.loc["same", "half"])
    assert training_differences(scores[scores["variant"] != ""], "own").empty  # nothing to hold them against


def test_sites_count_the_same_and_what_they_differ_by_is_not_chance():
    """Three seeds at A, two at B; what each site's mean is does not change the interval."""
    pairs = {("A", 0): 0.1, ("A", 1): 0.2, ("A", 2): 0.3, ("B", 0): -0.4, ("B", 1): -0.2}
    for shift in (0.0, 0.5):
        rows = []
        for (target, seed), value in pairs.items():
            rows += [("own", "", seed, target, "AUC", value + shift * (target == "B")), ("own", "x", seed, target, "AUC", 0.0)]
        scores = pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "metric", "value"])
        (found,) = training_differences(scores, "own").itertuples()
        assert found.mean == pytest.approx((0.2 - 0.3 + shift) / 2)
        variance = (0.1**2 + 0.1**2 + 0.1**2 + 0.1**2) / 3
        assert found.half == pytest.approx(3.182446 * math.sqrt(variance * (1 / 3 + 1 / 2)) / 2)


def test_standard_deviations_are_those_of_pandas():
    rng = np.random.default_rng(0)
    rows = [(m, v, t, s, k) for m in "ab" for v in ("", "x") for t in "pq" for s in range(5) for k in METRICS]
    scores = pd.DataFrame(rows, columns=["method", "variant", "target", "seed", "metric"]).assign(value=rng.random(len(rows)))
    scores.loc[::7, "value"] = np.nan
    scores.loc[(scores["method"] == "b") & (scores["metric"] == "AUC") & (scores["seed"] > 0), "value"] = np.nan
    expected = scores.groupby(["method", "variant", "target", "metric"], sort=False)["value"].std(ddof=1)
    np.testing.assert_allclose(site_scores(scores)["sd"], expected, rtol=1e-12)
    sites = site_scores(scores)
    expected = sites.groupby(["method", "variant", "metric"], sort=False)["mean"].std(ddof=1)
    np.testing.assert_allclose(macro_scores(sites)["sd"], expected, rtol=1e-12)
