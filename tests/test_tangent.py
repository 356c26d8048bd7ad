"""The tangent space against nilearn, matrix logarithms and closed forms."""

import math
import warnings

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power, logm, sqrtm
from sklearn.covariance import LedoitWolf
from test_connectivity import random_spd, signals, with_flat

from m2lgdg import leave_one_site_out, make, make_cohort, tangent
from m2lgdg.connectivity import covariances, row_covariances, standardised
from m2lgdg.tangent import geometric_mean, tangent_features


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_geometric_mean_and_tangent_features_are_nilearns():
    from nilearn.connectome import ConnectivityMeasure

    series = signals(lengths=(40, 60, 80, 50, 45, 90, 70), rois=7)
    ours = covariances(series)
    reference = geometric_mean(ours)
    # nilearn scales to unit variance with another ddof, so that it is given what we standardised.
    peer = ConnectivityMeasure(kind="tangent", standardize=False, vectorize=False)
    tangents = peer.fit_transform([standardised(one) for one in series])
    np.testing.assert_allclose(reference, peer.mean_, atol=1e-4)
    rows, columns = np.triu_indices(7)
    scale = np.where(rows == columns, 1, math.sqrt(2))
    np.testing.assert_allclose(tangent_features(ours, reference), tangents[:, rows, columns] * scale, atol=1e-3)


def mean_log(matrices, reference):
    whitening = np.linalg.inv(sqrtm(reference))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # logm names its error where it is above 1e-13
        return sum(logm(whitening @ matrix @ whitening) for matrix in matrices) / len(matrices)


@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("count", [2, 9])
def test_the_geometric_mean_is_where_the_mean_logarithm_vanishes(spread, count):
    rng = np.random.default_rng(0)
    matrices = np.stack([random_spd(rng, 6, spread) for _ in range(count)])
    reference = geometric_mean(matrices)
    assert np.linalg.eigvalsh(reference).min() > 0
    np.testing.assert_array_equal(reference, reference.T)
    assert np.linalg.norm(mean_log(matrices, reference)) < 1e-4
    finer = geometric_mean(matrices, tolerance=1e-12, steps=200)
    assert np.linalg.norm(mean_log(matrices, finer)) < 1e-9
    np.testing.assert_allclose(geometric_mean(matrices[::-1]), reference, atol=1e-4)
    change = rng.normal(size=(6, 6)) + 3 * np.eye(6)
    moved = np.stack([change @ matrix @ change.T for matrix in matrices])
    np.testing.assert_allclose(
        geometric_mean(moved, tolerance=1e-12, steps=200), change @ finer @ change.T, atol=1e-7 * np.abs(change).max() ** 2
    )


def test_the_geometric_mean_of_very_different_matrices():
    """Eigenvalues over six orders of magnitude: full steps would run away."""
    rng = np.random.default_rng(1)
    matrices = np.stack([random_spd(rng, 6, 2.0) for _ in range(6)])
    values = np.linalg.eigvalsh(matrices)
    assert values.max() / values.min() > 1e6
    reference = geometric_mean(matrices)
    assert np.linalg.norm(mean_log(matrices, reference)) < 1e-3


def test_the_geometric_mean_of_two_has_a_closed_form():
    rng = np.random.default_rng(1)
    a, b = random_spd(rng, 5), random_spd(rng, 5)
    root = sqrtm(a)
    inverse = np.linalg.inv(root)
    expected = root @ sqrtm(inverse @ b @ inverse) @ root
    np.testing.assert_allclose(geometric_mean(np.stack([a, b])), expected, atol=1e-4)


def test_the_geometric_mean_of_commuting_matrices_is_exp_of_the_mean_log():
    rng = np.random.default_rng(2)
    axes = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    logs = rng.normal(size=(8, 6))
    matrices = np.stack([axes @ np.diag(np.exp(values)) @ axes.T for values in logs])
    np.testing.assert_allclose(geometric_mean(matrices), axes @ np.diag(np.exp(logs.mean(axis=0))) @ axes.T, atol=1e-4)
    np.testing.assert_allclose(geometric_mean(matrices[:1]), matrices[0], atol=1e-10)


def test_the_geometric_mean_stands_subjects_with_flat_rois_and_short_scans():
    """A scan of three volumes and a flat ROI: eigenvalues from 1e-6 to 6, beside ordinary subjects."""
    matrices = covariances([*signals(), *map(with_flat, signals(lengths=(3, 40)))])
    assert np.linalg.norm(mean_log(matrices, geometric_mean(matrices))) < 1e-3


def test_tangent_features_by_matrix_logarithms():
    rng = np.random.default_rng(3)
    matrices, reference = np.stack([random_spd(rng, 5) for _ in range(4)]), random_spd(rng, 5)
    whitening = np.linalg.inv(sqrtm(reference))
    got = tangent_features(matrices, reference)
    assert got.shape == (4, 15)
    logs = [logm(whitening @ matrix @ whitening) for matrix in matrices]
    for features, log in zip(got, logs, strict=True):
        expected = [log[a, b] * (1 if a == b else math.sqrt(2)) for a in range(5) for b in range(a, 5)]
        np.testing.assert_allclose(features, expected, rtol=1e-7, atol=1e-10)
    for i in range(4):
        for j in range(4):
            assert np.linalg.norm(got[i] - got[j]) == pytest.approx(np.linalg.norm(logs[i] - logs[j]), rel=1e-6)
    # The length of a subject's features is its affine-invariant distance from the reference.
    for features, matrix in zip(got, matrices, strict=True):
        values = np.linalg.eigvals(np.linalg.solve(reference, matrix)).real
        assert np.linalg.norm(features) == pytest.approx(math.sqrt(sum(math.log(v) ** 2 for v in values)))
    np.testing.assert_allclose(tangent_features(reference[None], reference), 0, atol=1e-10)


def test_the_tangent_reference_is_quickly_where_the_mean_tangent_vector_is_zero(tiny):
    matrices = covariances(tiny.series)
    found, exact = (geometric_mean(matrices, tolerance=tolerance) for tolerance in (1e-5, 1e-13))
    apart = np.abs(tangent_features(matrices, found) - tangent_features(matrices, exact)).max()
    assert apart < 2e-6
    assert np.abs(tangent_features(matrices, exact).mean(axis=0)).max() < 2e-8  # of float32 features


def test_the_number_of_threads_changes_no_bit(tiny):
    from threadpoolctl import threadpool_limits

    matrices = covariances(tiny.series)
    found = []
    for threads in (1, 3):
        with threadpool_limits(threads, "blas"):
            reference = geometric_mean(matrices)
            found.append(tangent_features(matrices, reference))
    assert found[0].tobytes() == found[1].tobytes()


def test_a_first_step_from_a_sample_is_close_to_that_of_all():
    """The control variate removes most of the sampling error."""
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(600, 8, 12))
    matrices = factors @ factors.transpose(0, 2, 1) / 12 + 0.1 * np.eye(8)
    start = tangent._start(matrices)
    whitening = tangent._symmetric(start, tangent._inverse_root)
    full, _ = tangent._mean_log(matrices, whitening)
    estimated, _ = tangent._estimated_mean_log(matrices[::4], whitening)
    plain, _ = tangent._mean_log(matrices[::4], whitening)
    assert np.linalg.norm(estimated - full) < np.linalg.norm(plain - full) / 2
    exact = geometric_mean(matrices, tolerance=1e-12)
    whitening = tangent._symmetric(exact, tangent._inverse_root)
    typical = np.median([np.linalg.norm(log) for log in tangent._whitened_logs(matrices, whitening)])

    def distance(reference):
        return np.linalg.norm(tangent._symmetric(whitening @ reference @ whitening, np.log)) / typical

    sampled = geometric_mean(matrices, tolerance=1.0, first_step=150)
    assert distance(sampled) < 0.02 < distance(start)
    assert distance(geometric_mean(matrices, tolerance=1e-12, first_step=150)) < 1e-6  # later steps use all subjects
    few = matrices[:200]  # less than twice the sample: all subjects
    np.testing.assert_array_equal(geometric_mean(few, tolerance=1.0, first_step=150), geometric_mean(few, tolerance=1.0))


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
