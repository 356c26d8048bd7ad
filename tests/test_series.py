"""Temporal standardisation against scipy's spline and loops, one ROI at a time, and the learning rate of every batch."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import CubicSpline

from m2lgdg.deep import schedule
from m2lgdg.methods.m2lgdg import M2LGDG
from m2lgdg.preprocess import standardised_series

LENGTHS = (150, 175, 200, 225)  # of the paper's sensitivity analysis
EPSILON = 1e-8
many = settings(max_examples=25, deadline=None)


def scans(seed=0, lengths=(78, 116, 176, 200, 240, 316), rois=4, level=0.0):
    """(time, roi) series as scanners give them: smooth in time, at some level."""
    rng = np.random.default_rng(seed)
    walks = [np.cumsum(rng.normal(size=(t, rois)), axis=0) for t in lengths]
    return [(level + rng.uniform(0.5, 20, rois) * walk).astype(np.float32) for walk in walks]


def resampled(values, length):
    """A natural reading of 'resampled with a cubic spline': first and last sample stay where they are."""
    return CubicSpline(np.linspace(0, 1, len(values)), values.astype(float))(np.linspace(0, 1, length))


def expected(series, length):
    out = np.zeros((len(series), series[0].shape[1], length))
    for i, one in enumerate(series):
        for n in range(one.shape[1]):
            x = resampled(one[:, n], length)
            mean = sum(x) / length
            sd = math.sqrt(sum((v - mean) ** 2 for v in x) / length)
            out[i, n] = [(v - mean) / (sd + EPSILON) for v in x]
    return out


def test_the_lengths_are_those_of_the_paper():
    assert M2LGDG.space["length"] == LENGTHS and M2LGDG().length == 200


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("level", [0.0, 10_000.0])
def test_standardised_series_are_splines_then_z_scores(length, level):
    series = scans(level=level)
    kept = [one.copy() for one in series]
    given = standardised_series(series, length)
    assert given.dtype == np.float32 and given.shape == (len(series), 4, length)
    np.testing.assert_allclose(given, expected(series, length), rtol=1e-5, atol=1e-5)
    for one, before in zip(series, kept, strict=True):
        np.testing.assert_array_equal(one, before)


@many
@given(st.integers(0, 2**32 - 1), st.integers(78, 316), st.sampled_from(LENGTHS), st.integers(1, 5))
def test_any_length_of_scan(seed, time, length, rois):
    series = scans(seed, lengths=(time,), rois=rois)
    np.testing.assert_allclose(standardised_series(series, length), expected(series, length), rtol=1e-5, atol=1e-5)


def test_mean_zero_and_population_variance_one():
    given = standardised_series(scans(1), 200).astype(float)
    np.testing.assert_allclose(given.mean(axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose((given**2).sum(axis=-1) / 200, 1, rtol=1e-5)


@pytest.mark.parametrize("time", [78, 150, 316])
def test_a_scan_of_the_wanted_length_is_only_scaled(time):
    (one,) = scans(2, lengths=(time,))
    x = one.astype(float)
    np.testing.assert_allclose(
        standardised_series([one], time)[0].T, (x - x.mean(axis=0)) / x.std(axis=0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("time", [78, 316])
def test_a_cubic_in_time_stays_that_cubic(time):
    """A cubic spline with free ends is the cubic it goes through, first and last point included."""
    at, wanted = np.linspace(0, 1, time), np.linspace(0, 1, 200)
    cubic = np.polynomial.Polynomial([0.3, -2.0, 1.0, 4.0])
    (given,) = standardised_series([cubic(at)[:, None].astype(np.float32)], 200)
    x = cubic(wanted)
    np.testing.assert_allclose(given[0], (x - x.mean()) / x.std(), atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_subject_alone_equals_all_together_bit_for_bit(length):
    series = scans(3, lengths=(78, 200, 78, 316, 150, 200))
    together = standardised_series(series, length)
    for i, one in enumerate(series):
        assert standardised_series([one], length).tobytes() == together[i : i + 1].tobytes()
    assert standardised_series(series[::-1], length).tobytes() == together[::-1].tobytes()


def test_an_roi_does_not_reach_another():
    (one,) = scans(4, lengths=(120,))
    other = one.copy()
    other[:, 1] = other[::-1, 1] * 50 + 7
    before, after = standardised_series([one], 200)[0], standardised_series([other], 200)[0]
    np.testing.assert_allclose(after[[0, 2, 3]], before[[0, 2, 3]], atol=1e-6)


@pytest.mark.parametrize("level", [0.0, 1000.1, -1e6])
@pytest.mark.parametrize("time", [78, 200, 316])
def test_a_flat_roi_becomes_zeros(level, time):
    """A spline through equal values has rounding for a variance; divided by itself that would be noise of variance one."""
    (one,) = scans(5, lengths=(time,))
    one[:, 2] = level
    for length in LENGTHS:
        (given,) = standardised_series([one], length)
        np.testing.assert_array_equal(given[2], 0)
        np.testing.assert_allclose(given[[0, 1, 3]].std(axis=-1), 1, rtol=1e-5)


def test_scale_and_level_of_a_scan_do_not_matter():
    (one,) = scans(6, lengths=(100,))
    np.testing.assert_allclose(standardised_series([one * 8 + 3], 200), standardised_series([one], 200), atol=1e-4)
    np.testing.assert_allclose(standardised_series([-one], 200), -standardised_series([one], 200), atol=1e-6)


PER_EPOCH, WARMUP, EPOCHS = 13, 10, 100
RATES = [schedule(step, PER_EPOCH, WARMUP, EPOCHS) for step in range(PER_EPOCH * EPOCHS)]


def test_warm_up_is_a_line_from_the_first_batch_to_the_end_of_the_tenth_epoch():
    first = RATES[: PER_EPOCH * WARMUP]
    for step, rate in enumerate(first):
        assert rate == pytest.approx((step + 1) / (PER_EPOCH * WARMUP))
    assert 0 < first[0] < 0.01 and first[-1] == pytest.approx(1)


def test_then_a_half_cosine_to_zero_stepped_by_batch():
    rest = PER_EPOCH * (EPOCHS - WARMUP)
    for step in range(rest + 1):
        rate = schedule(PER_EPOCH * WARMUP + step, PER_EPOCH, WARMUP, EPOCHS)
        assert rate == pytest.approx(0.5 * (1 + math.cos(math.pi * step / rest)), abs=1e-12)
    assert schedule(PER_EPOCH * EPOCHS, PER_EPOCH, WARMUP, EPOCHS) == pytest.approx(0, abs=1e-12)
    assert schedule(PER_EPOCH * (WARMUP + EPOCHS) // 2, PER_EPOCH, WARMUP, EPOCHS) == pytest.approx(0.5)


def test_the_rate_never_leaves_its_bounds_and_turns_once():
    assert all(0 <= rate <= 1 for rate in RATES)
    top = RATES.index(max(RATES))
    assert all(a < b for a, b in itertools.pairwise(RATES[: top + 1]))
    assert all(a >= b for a, b in itertools.pairwise(RATES[top:]))


@pytest.mark.parametrize(("per_epoch", "warmup", "epochs"), [(1, 0, 5), (7, 0, 1), (1, 1, 1), (3, 4, 4), (5, 10, 3)])
def test_short_trainings_have_a_rate_too(per_epoch, warmup, epochs):
    rates = [schedule(step, per_epoch, warmup, epochs) for step in range(per_epoch * epochs)]
    assert all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates) and max(rates) > 0
