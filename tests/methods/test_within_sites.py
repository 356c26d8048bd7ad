"""What holds at left-out source sites: parts of weights against a slow count by site, and methods with phenotypes."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from m2lgdg import Cohort, leave_one_site_out, make
from m2lgdg.methods.linear import DO_NOT_HOLD
from m2lgdg.methods.tables import table_weights
from m2lgdg.methods.within_sites import CHANCE, balance, held_parts, source_folds


def cohort_of(directions, n=24, effect=1.0, seed=0, prevalence=None):
    """One site for each direction of age; education says nothing. Sites differ in their mean age."""
    rng, rows = np.random.default_rng(seed), []
    for i, direction in enumerate(directions):
        patients = round(n * (prevalence[i] if prevalence else 0.5))
        labels = (np.arange(n) < patients).astype(int)
        age = 30 + 5 * i + rng.normal(0, 4, n) + 4 * effect * direction * labels
        rows += [(f"site{i:02d}", label, one, rng.normal(12, 2)) for label, one in zip(labels, age, strict=True)]
    sites, labels, age, education = (list(column) for column in zip(*rows, strict=True))
    series = rng.normal(size=(len(rows), 30, 6)).astype(np.float32)
    phenotypes = {"age": age, "education": education}
    return Cohort.from_arrays(list(series), labels, sites, phenotypes=phenotypes, inputs=("age", "education"))


def test_parts_are_those_of_a_t_test_over_left_out_sites():
    cohort = cohort_of([1, 1, 1, 0.5, 0, 1, -0.5], n=21, prevalence=[0.3, 0.5, 0.6, 0.4, 0.5, 0.5, 0.7])
    values = cohort.phenotypes.to_numpy()
    values = values - np.array([values[cohort.sites == site].mean(axis=0) for site in cohort.sites])
    weights = balance(cohort)
    folds = source_folds(cohort, 7, weights)  # each site alone
    found = held_parts(values, cohort, weights, folds)
    for j in range(2):
        differences, sizes = [], []
        for site in cohort.site_names:
            here, x, y = cohort.sites == site, values[:, j], np.where(cohort.labels == 1, 1, -1)
            slope = np.average((x * y)[~here], weights=weights[~here])
            groups = [x[here & (cohort.labels == label)] for label in (1, 0)]
            differences.append(slope * (groups[0].mean() - groups[1].mean()))
            sizes.append(stats.hmean([len(one) for one in groups]))
        share = np.array(sizes) / np.sum(sizes)
        mean = share @ differences
        error = np.sqrt(7 / 6 * np.sum(share**2 * (np.array(differences) - mean) ** 2))
        critical = stats.t.ppf(1 - CHANCE, 6) * error
        assert found[j] == pytest.approx(1 - (critical / mean) ** 2 if mean > critical else 0.0, abs=1e-12)
    assert found[0] > 0


def test_a_phenotype_without_meaning_is_rarely_used():
    """The test is one-sided and the direction is learned: a tenth of all fits, mostly with a small part."""
    used = []
    for seed in range(120):
        cohort = cohort_of([0] * 8, n=16, seed=seed)
        weights = balance(cohort)
        values = cohort.phenotypes.to_numpy()
        values = values - np.array([values[cohort.sites == site].mean(axis=0) for site in cohort.sites])
        used += held_parts(values, cohort, weights, source_folds(cohort, 5, weights)).tolist()
    assert np.mean(np.array(used) > 0) < 0.16 and np.mean(used) < 0.06


@pytest.mark.parametrize("name", ["phenotype-logistic", "fc-logistic", "connectome-adaptive"])
def test_phenotypes_count_where_they_hold_and_not_where_they_do_not(name):
    fields = {} if name == "phenotype-logistic" else {"phenotypes": True}
    same, mixed = cohort_of([1] * 8, n=20), cohort_of([1, -1] * 4, n=20, effect=2.0)
    holds, differs = make(name, **fields).fit(same), make(name, **fields).fit(mixed)
    assert holds.facts_["phenotypes"]["parts"]["age"] > 0.5 and DO_NOT_HOLD not in holds.facts_.get("notes", [])
    assert not differs.facts_["phenotypes"]["parts"]["age"] and DO_NOT_HOLD in differs.facts_["notes"]
    changed = mixed._changed(phenotypes=mixed.phenotypes.assign(age=mixed.phenotypes["age"] + 10))
    np.testing.assert_array_equal(differs.predict_proba(mixed), differs.predict_proba(changed))
    if fields:  # it decides as the method without phenotypes does
        np.testing.assert_array_equal(differs.predict_proba(mixed), make(name).fit(mixed).predict_proba(mixed))


def test_means_and_proportions_of_sites_are_not_learned():
    """Older sites have more patients, but within sites patients are younger: an unseen site must not be inverted."""
    cohort = cohort_of([-1] * 8, n=30, prevalence=np.linspace(0.2, 0.8, 8).tolist())
    pooled = np.corrcoef(cohort.phenotypes["age"], cohort.labels)[0, 1]
    for fold in leave_one_site_out(cohort, ["site00", "site04", "site07"]):
        fitted = make("phenotype-logistic").fit(fold.source)
        assert fitted.state_["phenotypes.weights"][0] < 0 < pooled
        proba, labels = fitted.predict_proba(fold.target)[:, 1], fold.target.labels
        assert proba[labels == 1].mean() > proba[labels == 0].mean()


def test_one_source_site_cannot_show_that_anything_holds():
    cohort = cohort_of([1, 1])
    fitted = make("phenotype-logistic").fit(cohort.select(cohort.sites == "site00"))
    assert set(fitted.facts_["phenotypes"]["parts"].values()) == {0.0}
    assert len(set(fitted.predict_proba(cohort)[:, 1].tolist())) == 1


def test_phenotypes_leave_the_blocks_of_the_scan_as_they_are():
    """Age, which tells the label here, counts on its own only: nothing is regressed out of the scan."""
    cohort = cohort_of([1] * 8, n=20)
    scan, both = (make("connectome-adaptive", phenotypes=one).fit(cohort) for one in (False, True))
    for name in ("steady", "log_euclidean", "swings", "amplitude"):
        for part in ("weights", "intercept", "mean"):
            np.testing.assert_array_equal(both.state_[f"{name}.{part}"], scan.state_[f"{name}.{part}"])
    z = both._features("phenotypes", cohort)
    added = z @ both.state_["phenotypes.weights"] + both.state_["phenotypes.intercept"]
    assert added.std() > 0.1
    np.testing.assert_allclose(both.decision(cohort) - scan.decision(cohort), added, atol=1e-12)


@pytest.mark.parametrize("name", ["fc-svm", "connectome-adaptive"])
def test_phenotypes_count_as_much_as_they_tell_at_left_out_sites(name):
    """Series are noise, so that age decides; where the scan tells more than age, age counts less than the scan."""
    cohort = cohort_of([1] * 8, n=20)
    alone = make(name, phenotypes=True).fit(cohort)
    assert alone.facts_["phenotypes"]["relative"] > 2
    rng = np.random.default_rng(5)
    shared = rng.normal(size=(len(cohort), 30, 1)).astype(np.float32)
    told = [one + 4 * label * both for one, label, both in zip(cohort.series, cohort.labels, shared, strict=True)]
    assert make(name, phenotypes=True).fit(cohort._changed(series=tuple(told))).facts_["phenotypes"]["relative"] < 1


def test_the_weight_is_that_of_a_linear_discriminant_within_sites():
    rng = np.random.default_rng(3)
    cohort = cohort_of([1] * 6, n=40)
    values = pd.DataFrame(rng.normal(size=(len(cohort), 2)) + 0.7 * cohort.labels[:, None] * [1.0, 0.5])
    groups = values.groupby([cohort.sites, cohort.labels])
    scatter = (values - groups.transform("mean")).cov()
    difference = groups.mean().groupby(level=1).mean().diff().iloc[-1]  # sites are of one size
    expected = np.linalg.solve(scatter, difference)
    (found,) = table_weights(values[0].to_numpy(), [3 * values[1].to_numpy()], cohort)
    assert found == pytest.approx(expected[1] / expected[0] / 3, rel=1e-6)


def test_a_decision_that_is_the_label_has_a_finite_weight_whatever_the_order():
    """Within classes it has no scatter but that of rounding, which differs with the order of subjects."""
    cohort, rng = cohort_of([1] * 6, n=40), np.random.default_rng(4)
    base, label = rng.normal(size=len(cohort)) + cohort.labels, 0.1 * cohort.labels + 0.3
    label = label + 1e-17 * rng.normal(size=len(label)) + np.where(rng.random(len(label)) < 0.5, np.spacing(label), 0.0)
    found = [
        table_weights(base[order], [label[order]], cohort.select(order))[0]
        for order in (np.arange(len(cohort)), rng.permutation(len(cohort)))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert 1e3 < found[0] * 0.1 / base.std() < 1e5
