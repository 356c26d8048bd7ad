"""ComBat against loops over the published equations, and what remains of it at a site that was not in training."""

import dataclasses
import math

import numpy as np
import pytest

from m2lgdg import leave_one_site_out, make_cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.methods.combat import combat, shrunk
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import create as make


def mean(values):
    return sum(values) / len(values)


def variance(values, ddof=1):
    return sum((value - mean(values)) ** 2 for value in values) / (len(values) - ddof)


def by_loops(y, sites, covariates):
    """Johnson 2007, one feature of one subject after the other; least squares by the normal equations."""
    n, features = y.shape
    names = sorted(set(sites))
    design = np.array([[float(site == one) for one in names] + list(row) for site, row in zip(sites, covariates, strict=True)])
    beta = np.linalg.solve(design.T @ design, design.T @ y)
    share = [mean([float(site == one) for site in sites]) for one in names]
    z, expected, sd = np.zeros_like(y), np.zeros_like(y), np.zeros(features)
    for v in range(features):
        grand = sum(p * beta[k, v] for k, p in enumerate(share))
        residual = [y[i, v] - sum(design[i, k] * beta[k, v] for k in range(design.shape[1])) for i in range(n)]
        sd[v] = math.sqrt(mean([one**2 for one in residual]))
        for i in range(n):
            expected[i, v] = grand + sum(covariates[i, k] * beta[len(names) + k, v] for k in range(covariates.shape[1]))
            z[i, v] = (y[i, v] - expected[i, v]) / sd[v]
    result = np.zeros_like(y)
    for one in names:
        rows = [i for i in range(n) if sites[i] == one]
        gamma_hat = [mean([z[i, v] for i in rows]) for v in range(features)]
        delta_hat = [variance([z[i, v] for i in rows]) for v in range(features)]
        gamma_bar, tau2 = mean(gamma_hat), variance(gamma_hat)
        m, s2 = mean(delta_hat), variance(delta_hat)
        a, b = (2 * s2 + m**2) / s2, (m * s2 + m**3) / s2
        for v in range(features):
            gamma, delta = gamma_hat[v], delta_hat[v]
            for _ in range(500):  # to the fixed point
                gamma = (len(rows) * tau2 * gamma_hat[v] + delta * gamma_bar) / (len(rows) * tau2 + delta)
                squares = sum((z[i, v] - gamma) ** 2 for i in rows)
                delta = (squares / 2 + b) / (len(rows) / 2 + a - 1)
            for i in rows:
                result[i, v] = sd[v] * (z[i, v] - gamma) / math.sqrt(delta) + expected[i, v]
    return result


@pytest.fixture
def scattered():
    """Sites with their own level and spread of eight features, which also follow two covariates."""
    rng = np.random.default_rng(0)
    sites = np.array(["b"] * 9 + ["a"] * 7 + ["c"] * 12)
    covariates = np.stack([rng.integers(0, 2, 28).astype(float), rng.normal(size=28)], axis=1)
    level = {"a": 0.4, "b": -0.7, "c": 0.1}
    width = {"a": 0.5, "b": 2.0, "c": 1.0}
    noise = rng.normal(size=(28, 8))
    y = np.array([level[s] + width[s] * e + 0.8 * c[0] - 0.3 * c[1] for s, e, c in zip(sites, noise, covariates, strict=True)])
    return y, sites, covariates


def test_the_published_equations(scattered):
    y, sites, covariates = scattered
    centred = covariates - covariates.mean(axis=0)
    # The iteration ends at a relative change of 1e-4.
    np.testing.assert_allclose(combat(y, sites, covariates), by_loops(y, list(sites), centred), atol=2e-3)


def test_levels_and_spreads_of_sites_become_alike_and_effects_of_covariates_stay(scattered):
    y, sites, covariates = scattered
    given = combat(y, sites, covariates)

    def residual(values):
        design = np.concatenate([np.ones((len(y), 1)), covariates], axis=1)
        return values - design @ np.linalg.lstsq(design, values, rcond=None)[0]

    spread = {site: [residual(one)[sites == site].std() for one in (y, given)] for site in "abc"}
    before, after = ([pair[k] for pair in spread.values()] for k in (0, 1))
    assert max(before) / min(before) > 2.5 and max(after) / min(after) < 1.3
    slopes = [
        np.linalg.lstsq(np.c_[np.eye(3)[np.unique(sites, return_inverse=True)[1]], covariates], one, rcond=None)[0][3]
        for one in (y, given)
    ]
    assert slopes[1].mean() == pytest.approx(slopes[0].mean(), rel=0.15)


def test_a_site_of_one_subject_and_constant_features():
    rng = np.random.default_rng(1)
    y = rng.normal(size=(11, 5))
    y[:, 2] = 7.0
    sites = np.array(["a"] * 10 + ["b"])
    given = combat(y, sites, np.zeros((11, 1)))
    assert np.isfinite(given).all()
    np.testing.assert_allclose(given[:, 2], 7.0)
    assert (shrunk(rng.normal(size=(1, 5))).scale == 1).all()
    assert np.isfinite(shrunk(rng.normal(size=(4, 1))).location).all()


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny", seed=1), ["west"]))


def test_target_subjects_keep_their_values_and_source_subjects_do_not(fold):
    own = make("combat-logistic")
    own.state_ = {}
    raw = fc_features(fold.source.series)
    harmonised = own._source_features("fc", fold.source)
    phenotypes = PhenotypeScaler.fit(fold.source).transform(fold.source)
    covariates = np.concatenate([fold.source.labels[:, None], phenotypes], axis=1).astype(float)
    np.testing.assert_allclose(harmonised, combat(raw, fold.source.sites, covariates), atol=1e-6)
    assert np.abs(harmonised - raw).max() > 0.01
    np.testing.assert_array_equal(own._features("fc", fold.target), fc_features(fold.target.series))


def test_its_blocks_are_not_those_of_a_method_without_combat(fold):
    plain = make("fc-logistic").fit(fold.source)
    own = make("combat-logistic").fit(fold.source)
    again = make("fc-logistic").fit(fold.source)
    assert not np.allclose(own.state_["fc.weights"], plain.state_["fc.weights"])
    np.testing.assert_array_equal(again.state_["fc.weights"], plain.state_["fc.weights"])
    single = make_cohort("tiny", sizes={"a": 20}, seed=1)  # one site has nothing to be harmonised with
    one, other = (make(name).fit(single).state_["fc.weights"] for name in ("combat-logistic", "fc-logistic"))
    np.testing.assert_array_equal(one, other)


def test_predictions_need_no_phenotypes_though_the_fit_uses_them(fold):
    own = make("combat-logistic").fit(fold.source)
    bare = dataclasses.replace(fold.target, phenotypes=fold.target.phenotypes[[]], inputs=())
    assert own.facts_["inputs"] == []
    np.testing.assert_array_equal(own.predict_proba(bare), own.predict_proba(fold.target))
    aged = fold.source.phenotypes.assign(age=fold.source.phenotypes["age"] * (1 + (fold.source.labels == 1)))
    other = make("combat-logistic").fit(dataclasses.replace(fold.source, phenotypes=aged))
    assert not np.allclose(other.state_["fc.weights"], own.state_["fc.weights"])


def test_a_site_where_all_scans_are_the_same():
    """Its variance is 0 in every feature; the values stay finite, and those of a cohort of one scan stay as they are."""
    rng = np.random.default_rng(0)
    values, sites = rng.normal(size=(12, 5)), np.array(["a"] * 6 + ["b"] * 6)
    values[6:] = values[6]
    assert np.isfinite(combat(values, sites, np.zeros((12, 0)))).all()
    same = np.tile(values[0], (12, 1))
    np.testing.assert_allclose(combat(same, sites, np.zeros((12, 0))), same, atol=1e-12)
