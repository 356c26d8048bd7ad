"""Duplicates: copies of a scan are found whatever was done to them, and no two people are called copies."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from m2lgdg import check_cohort, make_cohort, read
from m2lgdg.data.duplicates import best_alignment, find_duplicates


@pytest.fixture(scope="module")
def twins():
    """A cohort into which copies of known kinds were put: position -> position of its twin."""
    cohort = make_cohort("tiny", n_rois=20, lengths=(120, 160), sizes={"a": 12, "b": 12, "c": 12}, seed=1)
    series = [np.array(one) for one in cohort.series]
    rng = np.random.default_rng(0)
    series[20] = series[3].copy()  # exact, across sites
    series[30] = 7.5 * series[5] - 100  # other units
    series[10] = series[8][15:-10]  # volumes dropped, inside a site
    noisy = series[2] + 0.15 * series[2].std(axis=0) * rng.normal(size=series[2].shape)
    series[25] = noisy[5:]  # processed a little apart and shifted
    return replace(cohort, series=series), {(3, 20): True, (5, 30): False, (8, 10): False, (2, 25): False}


def test_duplicates_of_every_kind_are_found_and_nobody_else(twins):
    cohort, planted = twins
    found = {(pair.first, pair.second): pair.exact for pair in find_duplicates(cohort)}
    assert found == planted


def test_alignment_equals_a_slow_search():
    rng = np.random.default_rng(2)
    first, second = rng.normal(size=(40, 3)), rng.normal(size=(33, 3))
    second[:20] = first[15:35]
    unit = [(one - one.mean(axis=0)) / one.std(axis=0) for one in (first, second)]
    best = -1.0
    for shift in range(-32, 40):
        pairs = [(t, t - shift) for t in range(40) if 0 <= t - shift < 33]
        if len(pairs) >= 20:
            a = np.array([unit[0][i] for i, _ in pairs])
            b = np.array([unit[1][j] for _, j in pairs])
            best = max(best, (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))
    assert best_alignment(first, second) == pytest.approx(best, abs=1e-9)
    assert best > 0.7


def smooth(rng, volumes, rois):
    """Series with the frequencies of a filtered scan and an FC of their own."""
    spectrum = np.fft.rfft(rng.normal(size=(volumes, rois)), axis=0)
    spectrum[np.fft.rfftfreq(volumes) > 0.15] = 0
    return np.fft.irfft(spectrum, volumes, axis=0) @ (np.eye(rois) + rng.normal(size=(rois, rois)) / 6)


@pytest.fixture(scope="module")
def copies():
    """Different scans, and copies of five of them: reversed, longer, shorter, both, and every second volume."""
    cohort = make_cohort("tiny", n_rois=60, lengths=(160, 160), sizes={"a": 10, "b": 10}, seed=1)
    rng = np.random.default_rng(0)
    series = [smooth(rng, 160, 60) for _ in range(20)]

    def at(one, volumes):
        old, new = np.arange(len(one)), np.linspace(0, len(one) - 1, volumes)
        return np.stack([np.interp(new, old, column) for column in one.T], axis=1)

    series[10] = series[0][::-1]
    series[11] = at(series[1], 240)
    series[12] = at(series[2], 100)
    series[13] = at(series[3], 130)[::-1] * 3 + 5
    series[14] = series[4][::2]
    series[15] = at(series[5][8:-8], 110)  # cropped and resampled: found by FC alone
    return replace(cohort, series=[one.astype(np.float32) for one in series])


def test_reversed_and_resampled_copies_are_found_and_nobody_else(copies):
    pairs = {(pair.first, pair.second): pair.how for pair in find_duplicates(copies)}
    assert set(pairs) == {(i, i + 10) for i in range(6)}
    assert [pairs[i, i + 10] for i in range(4)] == ["reversed", "resampled", "resampled", "resampled"]
    assert pairs[5, 15] == "fc"


def test_copies_are_told_with_what_was_done(copies):
    findings = [finding.text for finding in check_cohort(copies).findings if finding.severity == "finding"]
    names = [f"{copies.subjects[i]} ({copies.sites[i]})" for i in range(len(copies))]
    start = "{} and {} appear to be the same scan (their {} correlate{} at "
    assert any(t.startswith(start.format(names[0], names[10], "series", "")) and "reversed in time" in t for t in findings)
    assert any(t.startswith(start.format(names[1], names[11], "series", "")) and "resampled in time" in t for t in findings)
    assert any(t.startswith(start.format(names[5], names[15], "FC", "s")) and "two people" in t for t in findings)


def test_copies_of_real_scans(abide_folder):
    """Of the real subjects no two are called copies, and every reversed or resampled copy is."""
    cohort = read(abide_folder, on_bad="exclude")
    assert find_duplicates(cohort) == []
    series = list(cohort.series)
    n = len(series)
    for i in range(n):
        one = series[i]
        old, new = np.arange(len(one)), np.linspace(0, len(one) - 1, int(len(one) * (0.6, 0.8, 1.4)[i % 3]))
        other = np.stack([np.interp(new, old, column) for column in one.T], axis=1).astype(np.float32)
        series.append(one[::-1].copy() if i % 4 == 3 else other)
    names = [f"{name}{copy}" for copy in ("", "-copy") for name in cohort.subjects]
    table = pd.concat([cohort.phenotypes, cohort.phenotypes]).set_axis(names)
    twice = {key: np.tile(getattr(cohort, key), 2) for key in ("sites", "labels", "tr")}
    both = replace(cohort, series=series, subjects=np.array(names), phenotypes=table, **twice)
    assert {(pair.first, pair.second) for pair in find_duplicates(both)} == {(i, i + n) for i in range(n)}
