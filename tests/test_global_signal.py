"""Mean FC and what it tells: the global signal is found where it was regressed out of some scans only, and nowhere else."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg import Cohort, check_cohort, make_cohort
from m2lgdg.data.global_signal import global_signal_findings, mean_fc

SITES = {"A": 12, "B": 12, "C": 12}


def with_signal(one, amount, seed):
    """Series to which a signal is added that all ROIs share, or from which their mean is regressed out."""
    unit = (one - one.mean(axis=0)) / one.std(axis=0)
    if amount:
        return unit + amount * np.random.default_rng(seed).normal(size=(len(unit), 1))
    signal = unit.mean(axis=1)
    return unit - np.outer(signal, signal @ unit) / (signal @ signal)


def cohort(removed, n_rois=60, sizes=SITES):
    """Scans with a global signal (mean FC about 0.4), but for those for which `removed(site, label)` holds."""
    plain = make_cohort("tiny", n_rois=n_rois, sizes=sizes, lengths=(80, 90), missing=0.0)
    series = [
        with_signal(one.astype(np.float64), 0.0 if removed(site, label) else 0.8, i)
        for i, (one, site, label) in enumerate(zip(plain.series, plain.sites, plain.labels, strict=True))
    ]
    return Cohort.from_arrays(series, plain.labels, plain.sites, subjects=plain.subjects)


def found(cohort):
    return [one for one in check_cohort(cohort).findings if one.kind == "global signal"]


@pytest.fixture(scope="module")
def mixed():
    return cohort(lambda site, label: site == "B")


@pytest.mark.parametrize("change", [lambda one: one, Cohort.to_connectomes], ids=["series", "connectomes"])
def test_a_site_of_another_pipeline(mixed, change):
    (finding,) = found(change(mixed))
    assert finding.severity == "finding"
    assert finding.numbers["removed"] == ["B"]
    assert finding.numbers["kept"] == ["A", "C"]
    assert abs(finding.numbers["low"]) < 0.02 < 0.3 < finding.numbers["high"]
    assert finding.text.startswith("Mean FC is 0.00 for B, but 0.")
    assert finding.anonymous == finding.text


def test_the_two_folders_taken_for_the_two_classes():
    (finding,) = found(cohort(lambda site, label: label == 1))
    assert finding.numbers["removed"] == [f"{site} (patients)" for site in SITES]
    assert finding.numbers["kept"] == [f"{site} (controls)" for site in SITES]


@pytest.mark.parametrize("removed", [True, False])
def test_one_pipeline(removed):
    assert not found(cohort(lambda site, label: removed))


def test_few_subjects_or_rois_tell_nothing():
    assert not found(cohort(lambda site, label: site == "B", sizes={"A": 12, "B": 4, "C": 12}))
    assert not found(cohort(lambda site, label: site == "B", n_rois=20))


def test_partial_correlations_are_near_zero_in_any_pipeline(mixed):
    matrices = [-0.01 * np.ones((60, 60)) + 1.01 * np.eye(60)] * len(mixed)
    given = {"subjects": mixed.subjects, "values": "partial-correlation"}
    assert not list(global_signal_findings(Cohort.from_connectomes(matrices, mixed.labels, mixed.sites, **given)))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(3, 9), st.integers(0, 1))
def test_mean_fc_against_a_loop_over_pairs(seed, n_rois, flat):
    rng = np.random.default_rng(seed)
    series = [rng.normal(size=(20, n_rois)) + rng.normal(size=(20, 1)) for _ in range(2)]
    for one in series:
        one[:, :flat] = 3.0
    live = range(flat, n_rois)
    expected = [
        np.mean([np.corrcoef(one[:, i], one[:, j])[0, 1] for i, j in itertools.combinations(live, 2)]) for one in series
    ]
    of_series = Cohort.from_arrays(series, [0, 1], ["a", "b"])
    np.testing.assert_allclose(mean_fc(of_series), expected, atol=1e-5)
    for kind in ("correlation", "fisher-z", "covariance"):
        given = {"values": kind, "subjects": ["p", "q"]}
        np.testing.assert_allclose(
            mean_fc(Cohort.from_connectomes([matrix(one, kind) for one in series], [0, 1], ["a", "b"], **given)),
            expected,
            atol=1e-5,
        )


def matrix(series, kind):
    if kind == "covariance":
        return np.cov(series.T)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.nan_to_num(np.corrcoef(series.T))
    np.fill_diagonal(correlation, 1.0 if kind == "correlation" else 0.0)
    return correlation if kind == "correlation" else np.arctanh(correlation)
