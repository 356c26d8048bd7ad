"""Tangent-Pearson features against scikit-learn and scipy, and that no target subject is in the reference."""

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power, logm
from sklearn.covariance import LedoitWolf

from m2lgdg import leave_one_site_out, make, make_cohort
from m2lgdg.connectivity import geometric_mean, row_covariances


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny", seed=1), ["west"]))


def second_order(series):
    """Ledoit-Wolf covariance whose observations are the rows of the correlation matrix."""
    return LedoitWolf(store_precision=False).fit(np.corrcoef(series.T.astype(np.float64))).covariance_


def test_covariances_of_the_rows_of_correlation_matrices(fold):
    given = row_covariances(fold.target.series)
    for one, series in zip(given, fold.target.series, strict=True):
        np.testing.assert_allclose(one, second_order(series), rtol=1e-5, atol=1e-6)


def test_features_are_tangent_vectors_at_the_mean_of_source(fold):
    own = make("tangent-pearson-ridge").fit(fold.source)
    reference = own.state_["tangent_pearson.reference"]
    expected = geometric_mean(np.array([second_order(one) for one in fold.source.series]))
    np.testing.assert_allclose(reference, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    whitening = np.real(fractional_matrix_power(reference, -0.5))
    rows, columns = np.triu_indices(len(reference))
    for row, series in zip(own._features("tangent_pearson", fold.target), fold.target.series, strict=True):
        log = np.real(logm(whitening @ second_order(series) @ whitening))
        np.testing.assert_allclose(row, log[rows, columns] * np.where(rows == columns, 1, np.sqrt(2)), atol=1e-3)
    assert len(row) == len(rows)  # with the diagonal


def test_it_is_a_ridge_on_these_features_alone(fold):
    own = make("tangent-pearson-ridge").fit(fold.source)
    features = own._features("tangent_pearson", fold.target).astype(np.float64)
    expected = features @ own.state_["tangent_pearson.weights"] + own.state_["tangent_pearson.intercept"]
    np.testing.assert_allclose(own.decision(fold.target), expected, atol=1e-9)
    assert own.learner == "ridge" and list(own._weights()) == ["tangent_pearson"] and own.facts_["inputs"] == []
    assert list(make("tangent-pearson-ridge", phenotypes=True)._weights()) == ["tangent_pearson", "phenotypes"]
