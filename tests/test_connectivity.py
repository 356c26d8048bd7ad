"""Connectivity features against numpy, scikit-learn, nilearn and slow loops, and what must not change them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.linalg import expm
from sklearn.covariance import ledoit_wolf

from m2lgdg import connectivity
from m2lgdg.connectivity import (
    amplitude_features,
    correlations,
    covariances,
    deviations,
    fc_features,
    frame_weighted,
    standardised,
    upper_triangle,
)
from m2lgdg.scans import Connectomes
from m2lgdg.tangent import geometric_mean, tangent_features

FLAT = np.float32(1000.1)  # a constant whose mean is not itself in floating point


def signals(seed=0, lengths=(30, 55, 80, 42), rois=6, offset=0.0):
    """Correlated series of differing lengths, each ROI with its own level and amplitude."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(rois, rois))
    series = []
    for t in lengths:
        own = mixing + 0.5 * rng.normal(size=mixing.shape)
        series.append(((rng.normal(size=(t, rois)) @ own) * rng.uniform(0.1, 9, rois) + offset).astype(np.float32))
    return series


def with_flat(series, roi=2):
    one = series.copy()
    one[:, roi] = FLAT
    return one


def random_spd(rng, n, spread=0.5):
    root = rng.normal(size=(n, n)) * spread
    return expm((root + root.T) / 2)


def slow_correlation(a, b, weights):
    """Weighted Pearson correlation by its definition."""
    total = sum(weights)
    mean_a, mean_b = (sum(w * v for w, v in zip(weights, values, strict=True)) / total for values in (a, b))
    rows = list(zip(weights, a, b, strict=True))
    common, of_a, of_b = (
        sum(w * x * y for w, x, y in ((w, *pair((u - mean_a, v - mean_b))) for w, u, v in rows))
        for pair in (lambda d: d, lambda d: (d[0], d[0]), lambda d: (d[1], d[1]))
    )
    return common / math.sqrt(of_a * of_b)


def test_steady_correlations_count_unusual_time_points_less():
    (one,) = signals(lengths=(40,), rois=4)
    one[[7, 20]] *= 25  # as if the head had moved
    unit = [[(v - column.mean()) / column.std() for v in column] for column in one.astype(np.float64).T]  # [roi][time]
    size = [sum(roi[t] ** 2 for roi in unit) / 4 for t in range(40)]
    weights = [1 / (1 + (e / float(np.median(size))) ** 2) for e in size]
    assert max(weights[7], weights[20]) < 0.01 < min(w for t, w in enumerate(weights) if t not in (7, 20))
    expected = [math.atanh(slow_correlation(unit[i], unit[j], weights)) for i in range(4) for j in range(i + 1, 4)]
    np.testing.assert_allclose(fc_features([one], frame_weighted)[0], expected, rtol=1e-7)
    calm = np.delete(one, [7, 20], axis=0)
    near, far = (np.abs(fc_features([one], view)[0] - fc_features([calm])[0]).max() for view in (frame_weighted, standardised))
    assert near < 0.3 * far


def test_swings_are_correlations_of_sizes():
    (one,) = signals(lengths=(40,), rois=4)
    sizes = [[abs(v - column.mean()) for v in column] for column in one.astype(np.float64).T]
    expected = [math.atanh(slow_correlation(sizes[i], sizes[j], [1.0] * 40)) for i in range(4) for j in range(i + 1, 4)]
    np.testing.assert_allclose(fc_features([one], deviations)[0], expected, rtol=1e-6)
    turned = one * np.array([1, -1, 1, -1], dtype=np.float32)  # which way a ROI goes does not matter
    np.testing.assert_allclose(fc_features([turned], deviations), fc_features([one], deviations), atol=1e-6)


@pytest.mark.parametrize("view", [frame_weighted, deviations])
def test_views_of_flat_rois_are_zero(view):
    (one,) = signals(lengths=(30,))
    seen = view(with_flat(one))
    assert (seen[:, 2] == 0).all()
    np.testing.assert_allclose(np.delete((seen**2).mean(axis=0), 2), 1)
    assert (view(np.full((30, 3), FLAT)) == 0).all()
    assert np.isfinite(fc_features([with_flat(one)], view)).all()


def test_standardised_series_have_mean_zero_and_variance_one():
    (one,) = signals(lengths=(50,), offset=500.0)
    kept = one.copy()
    unit = standardised(one)
    assert unit.dtype == np.float64
    np.testing.assert_allclose(unit.mean(axis=0), 0, atol=1e-10)
    np.testing.assert_allclose(unit.std(axis=0), 1)
    for j in range(one.shape[1]):
        values = [float(v) for v in one[:, j]]
        mean = sum(values) / len(values)
        sd = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        np.testing.assert_allclose(unit[:, j], [(v - mean) / sd for v in values], atol=1e-9)
    np.testing.assert_array_equal(one, kept)
    assert (standardised(with_flat(one))[:, 2] == 0).all()


def test_correlations_are_pearsons():
    series = signals(offset=300.0)
    found = correlations(series)
    assert found.shape == (4, 6, 6)
    for one, matrix in zip(series, found, strict=True):
        np.testing.assert_allclose(matrix, np.corrcoef(one.astype(np.float64), rowvar=False), atol=1e-10)
        np.testing.assert_array_equal(np.diag(matrix), 1)
        np.testing.assert_array_equal(matrix, matrix.T)


@settings(deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=7), elements=st.integers(-3, 3)))
def test_correlations_by_loops_also_with_flat_regions(one):
    t, n = one.shape
    rows = one.astype(float).tolist()
    (got,) = correlations([one])
    for a in range(n):
        for b in range(n):
            x, y = [row[a] for row in rows], [row[b] for row in rows]
            mx, my = sum(x) / t, sum(y) / t
            sxy = sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True))
            size = math.sqrt(sum((u - mx) ** 2 for u in x) * sum((v - my) ** 2 for v in y))
            flat = min(x) == max(x) or min(y) == max(y)
            expected = 1 if a == b else 0 if flat else sxy / size
            assert got[a, b] == pytest.approx(expected, abs=1e-12)
    assert np.abs(got).max() <= 1


@pytest.mark.parametrize("value", [0.0, FLAT, np.float32(0.1), np.float32(-1e30)])
def test_a_flat_roi_has_no_correlation(value):
    (one,) = signals(lengths=(37,))
    flat = one.copy()
    flat[:, 2] = value
    (matrix,) = correlations([flat])
    assert matrix[2, 2] == 1
    assert (np.delete(matrix[2], 2) == 0).all() and (np.delete(matrix[:, 2], 2) == 0).all()
    rest = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(matrix[np.ix_(rest, rest)], correlations([one])[0][np.ix_(rest, rest)], atol=1e-12)
    assert np.isfinite(fc_features([flat])).all()


def test_edges_are_those_above_the_diagonal_row_by_row():
    matrices = np.arange(32.0).reshape(2, 4, 4)
    expected = [[matrices[s, a, b] for a in range(4) for b in range(a + 1, 4)] for s in range(2)]
    np.testing.assert_array_equal(upper_triangle(matrices), expected)
    assert expected[0] == [1, 2, 3, 6, 7, 11]


def test_fc_features_are_fishers_z_clipped():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(60, 5)).astype(np.float32)
    one[:, 1] = 2 * one[:, 0] + 1  # correlation 1
    one[:, 2] = -one[:, 0]  # correlation -1
    one[:, 3] = one[:, 0] + np.float32(0.02) * one[:, 4]  # beyond 0.999, not quite 1
    (got,) = fc_features([one])
    r = np.corrcoef(one.astype(np.float64), rowvar=False)
    expected = []
    for a in range(5):
        for b in range(a + 1, 5):
            c = min(max(r[a, b], -0.999), 0.999)
            expected.append(0.5 * math.log((1 + c) / (1 - c)))
    np.testing.assert_allclose(got, expected, atol=1e-10)
    assert got[0] == pytest.approx(math.atanh(0.999)) and got[1] == pytest.approx(-math.atanh(0.999))
    assert r[0, 3] > 0.999 and got[2] == pytest.approx(math.atanh(0.999))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.data())
def test_fc_does_not_change_with_the_level_and_the_unit_of_a_roi(seed, data):
    """Whole numbers times powers of two plus whole numbers are exact in float32, so that only our arithmetic can differ."""
    one = np.random.default_rng(seed).integers(-50, 50, size=(25, 4)).astype(np.float32)
    one[0], one[1] = 50, -50  # none is flat
    shift = np.array(data.draw(st.lists(st.integers(-1000, 1000), min_size=4, max_size=4)), dtype=np.float32)
    scale = np.array([2.0**k for k in data.draw(st.lists(st.integers(-6, 6), min_size=4, max_size=4))], dtype=np.float32)
    np.testing.assert_allclose(fc_features([(one + shift) * scale]), fc_features([one]), atol=1e-10)
    np.testing.assert_allclose(covariances([(one + shift) * scale]), covariances([one]), atol=1e-10)


def test_the_sign_of_a_roi_turns_its_edges():
    (one,) = signals(lengths=(40,))
    turned = one * np.array([1, -1, 1, 1, 1, 1], dtype=np.float32)
    sign = np.ones((6, 6))
    sign[1], sign[:, 1] = -1, -1
    np.testing.assert_allclose(correlations([turned])[0], correlations([one])[0] * np.where(np.eye(6), 1, sign), atol=1e-12)


@pytest.mark.parametrize("length", [4, 12, 60, 300])
@pytest.mark.parametrize("flat", [False, True])
def test_covariances_are_ledoit_and_wolfs(length, flat):
    series = signals(seed=length, lengths=(length, length + 3), rois=8, offset=70.0)
    if flat:
        series = [with_flat(one) for one in series]
    for one, got in zip(series, covariances(series), strict=True):
        wide = one.astype(np.float64)
        constant = (wide == wide[0]).all(axis=0)
        unit = np.where(constant, 0.0, (wide - wide.mean(axis=0)) / np.where(constant, 1.0, wide.std(axis=0)))
        np.testing.assert_allclose(got, ledoit_wolf(unit)[0], atol=1e-10)
        np.testing.assert_array_equal(got, got.T)
        assert np.linalg.eigvalsh(got).min() > 0


@pytest.mark.parametrize("length", [2, 3])
def test_covariances_of_the_shortest_series_are_positive_definite(length):
    for matrix in covariances([*signals(lengths=(length,)), *map(with_flat, signals(lengths=(length,)))]):
        assert np.linalg.eigvalsh(matrix).min() > 0


def test_amplitudes_by_loops():
    series = [*signals(offset=40.0), with_flat(signals(seed=1)[0])]
    got = amplitude_features(series)
    assert got.shape == (5, 6)
    for one, features in zip(series, got, strict=True):
        logs = {}
        for j in range(6):
            values = [float(v) for v in one[:, j]]
            if min(values) < max(values):
                mean = sum(values) / len(values)
                logs[j] = math.log(math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)))
        middle = sum(logs.values()) / len(logs)
        np.testing.assert_allclose(features, [logs[j] - middle if j in logs else 0.0 for j in range(6)], atol=1e-9)
    assert got[4, 2] == 0


def test_amplitudes_do_not_change_with_the_unit_of_the_scanner():
    (one,) = signals(lengths=(50,))
    np.testing.assert_allclose(amplitude_features([one * 8]), amplitude_features([one]), atol=1e-12)
    np.testing.assert_allclose(amplitude_features([-one]), amplitude_features([one]), atol=1e-12)
    louder = one * np.array([np.e, 1, 1, 1, 1, 1], dtype=np.float32)
    change = amplitude_features([louder]) - amplitude_features([one])
    np.testing.assert_allclose(change, [[5 / 6, *[-1 / 6] * 5]], atol=1e-6)


@pytest.mark.parametrize("rois", [6, 33])
def test_features_do_not_depend_bit_for_bit_on_the_company(rois):
    series = [*signals(lengths=(30, 55, 80, 42, 61), rois=rois), with_flat(signals(seed=4, lengths=(40,), rois=rois)[0])]
    reference = geometric_mean(covariances(signals(seed=5, lengths=(90,) * 5, rois=rois)))

    def tangents(some):
        return tangent_features(covariances(some), reference)

    for features in (fc_features, amplitude_features, correlations, covariances, tangents):
        together = features(series)
        for i, one in enumerate(series):
            np.testing.assert_array_equal(features([one])[0], together[i])
        np.testing.assert_array_equal(features(series[::-1])[::-1], together)
        np.testing.assert_array_equal(features([*series, series[0], with_flat(series[1])])[: len(series)], together)


def test_series_are_not_changed():
    series = [*signals(), with_flat(signals()[0])]
    kept = [one.copy() for one in series]
    for features in (fc_features, amplitude_features, covariances):
        features(series)
    for one, before in zip(series, kept, strict=True):
        np.testing.assert_array_equal(one, before)


@pytest.mark.parametrize("kind", ["correlation", "partial-correlation", "covariance", "fisher-z"])
def test_edges_of_connectomes_are_those_of_the_full_matrices(kind):
    """And are not held a second time beside the cohort, which already holds them."""
    series = np.random.default_rng(0).normal(size=(6, 40, 9)) * np.arange(1, 10)
    matrices = [np.cov(one.T) if kind == "covariance" else np.corrcoef(one.T) for one in series]
    if kind == "fisher-z":
        matrices = [np.arctanh(one - np.eye(9)) for one in matrices]
    scans = Connectomes.of(matrices, kind, 9)
    above = np.triu_indices(9, 1)
    expected = [np.corrcoef(one.T)[above] for one in series]
    with connectivity.sharing_features(scans):
        np.testing.assert_allclose(np.tanh(fc_features(scans)), expected, atol=1e-6)
        assert connectivity.covariances(scans).shape == (6, 9, 9)
        assert list(connectivity._IN_USE[-1].arrays) == [id(connectivity.COVARIANCES)]


def test_features_are_not_shared_between_kinds_of_the_same_triangles():
    triangles = [np.array([0, 0.8, -0.3, 0, 0.5, 0], dtype=np.float32)]
    z = Connectomes(triangles, "fisher-z", 3)
    other = Connectomes(z.triangles, "partial-correlation", 3)
    alone = covariances(other)
    with connectivity.sharing_features(z):
        assert not np.array_equal(covariances(z), alone)
        np.testing.assert_array_equal(covariances(other), alone)
