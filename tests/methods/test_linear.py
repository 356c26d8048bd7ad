"""The simple peers: the learners against slow solutions, balancing and centring by site, penalty choice by whole sites."""

import numpy as np
import pytest
from scipy.linalg import logm

from m2lgdg import make, make_cohort
from m2lgdg.connectivity import amplitude_features, deviations, fc_features, frame_weighted, log_features, row_covariances
from m2lgdg.methods.linear import _Recent, standardised_block
from m2lgdg.methods.solvers import LEAST_SCALE, Problem, Rows, association
from m2lgdg.methods.within_sites import balance, site_averages
from m2lgdg.metrics import platt
from m2lgdg.splits import site_folds


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=7)


def rows_of(features):
    """Rows that are the same in training and at an unseen site."""
    return Rows(features, np.zeros((1, features.shape[1])), np.zeros(len(features), dtype=int))


def solved(learner, features, cohort, penalty, folds=(), weights=None):
    """Held-out decisions, coefficients and intercept for one penalty, times the mean squared norm."""
    rows = rows_of(features)
    weights = np.ones(len(features)) if weights is None else weights
    found = learner(Problem(rows, cohort.labels, weights, list(folds), np.array([penalty * rows.mean_square])))
    return found.held_out[0], found.coefficients(0), found.intercepts[0]


def test_association_is_the_correlation_inside_sites_above_chance(cohort):
    """Against numpy's correlations of subjects repeated until the classes of each site are balanced."""
    weights = balance(cohort)
    features = fc_features(cohort.series).astype(np.float64)
    site = np.unique(cohort.sites, return_inverse=True)[1]
    x = features - (site_averages(site, weights) @ features)[site]
    y = 2.0 * cohort.labels - 1
    scale = association(x, y, weights)
    expected = []
    for column in x.T:
        product = sum(w * a * b for w, a, b in zip(weights, column, y, strict=True))
        expected.append(abs(product) / (sum(a * a for a in column) * weights.sum()) ** 0.5)
    mean = sum(expected) / len(expected)
    above = np.array([max(r**2 - 1 / len(x), 0) ** 0.5 + LEAST_SCALE * mean for r in expected])
    np.testing.assert_allclose(scale / scale[0], above / above[0], rtol=1e-9)
    assert ((x * scale) ** 2).sum() == pytest.approx((x**2).sum())  # penalties keep their meaning
    assert (scale > 0).all() and scale.max() > 3 * scale.min()


def test_association_of_features_that_say_nothing():
    x = np.zeros((4, 3))
    np.testing.assert_array_equal(association(x, np.array([-1.0, 1, -1, 1]), np.ones(4)), 1.0)


def test_balance_gives_each_class_of_a_site_the_same_weight(cohort):
    weights = balance(cohort)
    for site in cohort.site_names:
        here = cohort.sites == site
        assert weights[here & (cohort.labels == 1)].sum() == pytest.approx(here.sum() / 2)
        assert weights[here & (cohort.labels == 0)].sum() == pytest.approx(here.sum() / 2)
    one_class = cohort.select((cohort.sites != "east") | (cohort.labels == 0))
    assert (balance(one_class)[one_class.sites == "east"] == 0).all()


def test_site_means_are_means_of_class_means(cohort):
    features = fc_features(cohort.series).astype(np.float64)
    means = site_averages(np.unique(cohort.sites, return_inverse=True)[1], balance(cohort)) @ features
    for site in cohort.site_names:
        here = cohort.sites == site
        expected = sum(features[here & (cohort.labels == label)].mean(axis=0) for label in (0, 1)) / 2
        np.testing.assert_allclose(means[list(np.unique(cohort.sites)).index(site)], expected, rtol=1e-6)


def test_calibration_never_turns_the_ranking_round():
    decision = np.linspace(-1, 1, 20)
    slope, _ = platt(decision, (decision < 0).astype(np.int8))
    assert slope > 0
    slope, offset = platt(decision, (decision > -0.5).astype(np.int8))
    assert -0.6 < -offset / slope < -0.4


def test_decision_is_linear_in_the_features_and_probability_monotone(cohort):
    fitted = make("fc-logistic").fit(cohort)
    decision = fitted.decision(cohort)
    expected = fc_features(cohort.series) @ fitted.state_["fc.weights"] + fitted.state_["fc.intercept"]
    np.testing.assert_allclose(decision, expected, atol=1e-10)
    proba = fitted.predict_proba(cohort)[:, 1]
    assert (np.diff(proba[np.argsort(decision)]) >= 0).all()


def test_phenotypes_change_the_score_only_when_asked(cohort):
    cohort = cohort._changed(phenotypes=cohort.phenotypes.assign(age=30.0 + 20.0 * cohort.labels + np.arange(len(cohort)) % 7))
    older = cohort.phenotypes.assign(age=cohort.phenotypes["age"] + 20)
    changed = cohort._changed(phenotypes=older)
    without, with_ = make("fc-logistic").fit(cohort), make("fc-logistic", phenotypes=True).fit(cohort)
    np.testing.assert_array_equal(without.predict_proba(cohort), without.predict_proba(changed))
    assert (with_.predict_proba(cohort) != with_.predict_proba(changed)).any()
    bare = cohort._changed(phenotypes=cohort.phenotypes.drop(columns=["age", "sex", "education"]), inputs=())
    np.testing.assert_array_equal(without.predict_proba(bare), without.predict_proba(cohort))


def test_ensemble_removes_site_offsets_in_training():
    """A cohort whose sites differ in class ratio and in connectivity: what tells the site must not be learned."""
    shares = make_cohort("tiny", sizes={"a": 40, "b": 40, "c": 40}, roi_effect=0, edge_effect=0, phenotype_effect=0, seed=3)
    rng = np.random.default_rng(0)
    labels = np.where(shares.sites == "a", rng.random(len(shares)) < 0.85, rng.random(len(shares)) < 0.15).astype(np.int8)
    confounded = shares._changed(labels=labels)
    spread = {}
    for name in ("fc-logistic", "connectome-ensemble"):
        decision = make(name).fit(confounded).decision(confounded)
        decision = (decision - decision.mean()) / decision.std()
        spread[name] = decision[shares.sites == "a"].mean() - decision[shares.sites != "a"].mean()
    assert spread["fc-logistic"] > 1.0
    assert spread["connectome-ensemble"] < 0.5 * spread["fc-logistic"]


def test_slopes_are_those_inside_sites(cohort):
    """Against a weighted regression on the confounds and one column a site."""
    weights, rng = balance(cohort), np.random.default_rng(0)
    confounds = rng.normal(size=(len(cohort), 2)) + (cohort.sites == cohort.site_names[0])[:, None]
    features = 3.0 * (cohort.sites == cohort.site_names[0])[:, None] + confounds @ rng.normal(size=(2, 5))
    features += 0.1 * rng.normal(size=features.shape)
    columns = np.concatenate([confounds, cohort.sites[:, None] == np.array(cohort.site_names)], axis=1).astype(float)
    inverse = np.linalg.inv(columns.T @ (weights[:, None] * columns))
    expected = (inverse @ (columns.T @ (weights[:, None] * features)))[:2]
    standardised = standardised_block(features, cohort, weights, True, confounds)
    np.testing.assert_allclose(standardised.slopes, expected, rtol=1e-9)
    without = standardised_block(features - confounds @ expected, cohort, weights, True)
    np.testing.assert_allclose(standardised.rows.trained, without.rows.trained, atol=1e-9)
    np.testing.assert_allclose(standardised.rows.shift, without.rows.shift, atol=1e-9)
    np.testing.assert_allclose(standardised.centre, without.centre, atol=1e-9)
    np.testing.assert_allclose(standardised.scale, without.scale, rtol=1e-9)


def test_the_default_is_the_weighted_sum_of_its_blocks(cohort):
    """The decision, rebuilt from the features of each block, its ridge and its weight."""
    fitted, weights = make("connectome-adaptive", phenotypes=True).fit(cohort), balance(cohort)
    folds, rebuilt = site_folds(cohort.sites, cohort.labels, fitted.site_folds), np.zeros(len(cohort))
    logarithms = []
    for one in row_covariances(cohort.series):
        log = logm(one)
        logarithms.append(np.concatenate([[log[i, i], *(np.sqrt(2) * log[i, i + 1 :])] for i in range(len(log))]))
    own = {
        "steady": fc_features(cohort.series, frame_weighted),
        "log_euclidean": np.array(logarithms, dtype=np.float32),
        "swings": fc_features(cohort.series, deviations),
        "amplitude": amplitude_features(cohort.series),
    }
    for (name, features), part in zip(own.items(), (1.0, 0.5, 0.3, 0.2), strict=True):
        block = fitted._solve(name, standardised_block(features, cohort, weights, True), cohort, folds)
        part /= block.held_out.std()
        np.testing.assert_allclose(fitted.state_[f"{name}.weights"], part * block.weights, rtol=1e-3, atol=1e-5)
        rebuilt += part * (features @ block.weights + block.intercept)
    z = fitted._features("phenotypes", cohort)
    rebuilt += z @ fitted.state_["phenotypes.weights"] + fitted.state_["phenotypes.intercept"]
    np.testing.assert_allclose(fitted.decision(cohort), rebuilt, atol=1e-3)


def test_a_former_model_of_the_default_decides_without_the_log_euclidean_block(cohort):
    fitted = make("connectome-adaptive").fit(cohort).method
    own = log_features(cohort.series) @ fitted.state_["log_euclidean.weights"] + fitted.state_["log_euclidean.intercept"]
    expected = fitted.decision(cohort) - own
    for name in [name for name in fitted.state_ if name.startswith("log_euclidean.")]:
        del fitted.state_[name]
    del fitted.facts_["penalties"]["log_euclidean"]
    np.testing.assert_allclose(fitted.decision(cohort), expected, atol=1e-5)


def test_on_connectomes_the_default_has_no_block_of_series(cohort):
    """The blocks that need series are left out, and the model says so."""
    matrices = cohort.to_connectomes()
    found = make("connectome-adaptive", phenotypes=True).fit(matrices)
    assert found.method._weights() == {"fc": 1.0, "log_euclidean": 0.5, "phenotypes": 1.0}
    assert {name.partition(".")[0] for name in found.state_} == {"fc", "log_euclidean", "phenotypes", "calibration"}
    assert not found.uses_amplitude and found.method.method_flags(matrices) == [[]] * len(matrices)
    (note,) = found.facts_["notes"]
    assert note.startswith("Trained on connectomes: plain FC takes the place of frame-weighted FC; deviation FC and amplitude")
    peer = make("fc-adaptive", penalties=(3.0,)).fit(matrices)
    plain = found.method.state_["fc.weights"] / peer.method.state_["fc.weights"]
    np.testing.assert_allclose(plain, plain[0], rtol=1e-6)
    assert "notes" not in peer.facts_


def test_the_ensemble_on_connectomes_has_no_amplitude(cohort):
    found = make("connectome-ensemble").fit(cohort.to_connectomes())
    assert found.method._weights() == {"fc": 0.5, "tangent": 0.5}
    assert found.facts_["notes"] == ["Trained on connectomes: amplitude, computed from time series, is left out."]


@pytest.mark.parametrize("within_sites", [True, False])
def test_standardising_in_place_gives_the_same_rows(cohort, within_sites):
    features, weights = fc_features(cohort.series), balance(cohort)
    ages = np.linspace(-1, 1, len(cohort))[:, None]
    kept = features.copy()
    expected = standardised_block(features, cohort, weights, within_sites, ages)
    np.testing.assert_array_equal(features, kept)
    found = standardised_block(features, cohort, weights, within_sites, ages, overwrite=True)
    assert found.rows.trained is features
    for ours, theirs in zip(
        (*vars(found.rows).values(), *found[1:]), (*vars(expected.rows).values(), *expected[1:]), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_the_last_result_is_freed_before_the_next_is_computed():
    recent = _Recent(1)
    recent.get("first", lambda: 1)
    assert recent.get("second", lambda: dict(recent.results)) == {}
    assert list(recent.results) == ["second"]
    assert recent.get("second", lambda: pytest.fail("computed again")) == {}
