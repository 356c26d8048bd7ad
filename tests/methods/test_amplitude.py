"""Scans whose ROIs were standardised or rescaled: flagged, and their amplitudes not used."""

import numpy as np
import pytest

from m2lgdg import make, make_cohort
from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import amplitude_features
from m2lgdg.data.readers import read
from m2lgdg.method import Method
from m2lgdg.methods.amplitude import FLAG, UNUSUAL, AmplitudeRange
from m2lgdg.metrics import auc
from m2lgdg.report.card import card


def divided(x, by):
    return x / np.where(by > 0, by, 1.0)


def by_the_median_deviation(x):
    away = x - np.median(x, axis=0)
    return divided(away, np.median(np.abs(away), axis=0))


SCALINGS = {
    "z-scored": lambda x: divided(x - x.mean(axis=0), x.std(axis=0)),
    "between 0 and 1": lambda x: divided(x - x.min(axis=0), np.ptp(x, axis=0)),
    "by the median deviation": by_the_median_deviation,
    "unit norm": lambda x: divided(x - x.mean(axis=0), np.linalg.norm(x - x.mean(axis=0), axis=0)),
}
ADAPTIVE, ENSEMBLE, PLUS = "connectome-adaptive", "connectome-ensemble", "m2lgdg-connectome"


def rescaled(cohort, how, which=None):
    rows = set(range(len(cohort)) if which is None else which)
    series = [np.float32(how(one.astype(np.float64))) if i in rows else one for i, one in enumerate(cohort.series)]
    kept = {
        name: getattr(cohort, name) for name in ("subjects", "sites", "labels", "rois", "phenotypes", "inputs", "tr", "atlas")
    }
    return Cohort(series=series, **kept)


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", n_rois=20, seed=4)


@pytest.fixture(scope="module")
def split(cohort):
    first = cohort.sites == cohort.site_names[0]
    return cohort.select(~first), cohort.select(first)


@pytest.mark.parametrize("name", [ADAPTIVE, ENSEMBLE])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rescaled_rois_are_flagged_and_amplitudes_are_not_used(split, name, scaling):
    source, target = split
    fitted = make(name).fit(source)
    assert fitted.uses_amplitude
    assert not any(FLAG in raised for raised in fitted.method_flags(target))
    other = rescaled(target, SCALINGS[scaling])
    assert all(FLAG in raised for raised in fitted.method_flags(other))
    # the same decision as with the amplitudes of the source mean
    plain = sum(
        fitted._features(block, target) @ fitted.state_[f"{block}.weights"] + fitted.state_[f"{block}.intercept"]
        for block in fitted.blocks
        if block != "amplitude"
    )
    mean = amplitude_features(source.series).mean(axis=0)
    plain += mean @ fitted.state_["amplitude.weights"] + fitted.state_["amplitude.intercept"]
    np.testing.assert_allclose(fitted.decision(other), plain, atol=2e-4)  # float32 series


@pytest.mark.parametrize("factor", [1e-3, 7.0, 4e5])
def test_a_gain_of_the_whole_scan_does_not_matter(split, factor):
    source, target = split
    fitted = make(ADAPTIVE).fit(source)
    louder = rescaled(target, lambda x: x * factor)
    assert fitted.flags(louder) == fitted.flags(target)
    np.testing.assert_allclose(fitted.predict_proba(louder), fitted.predict_proba(target), atol=1e-5)


def test_the_card_says_whether_units_matter(split, tmp_path):
    source, _ = split
    for name, uses in ((ADAPTIVE, True), ("fc-logistic", False)):
        parts = card(make(name).fit(source).save(tmp_path / name))
        units = dict(next(part for part in parts if part.title == "Inputs").facts)["units"]
        assert ("amplitude" in units) == uses


def test_methods_without_amplitude_take_any_scaling(split):
    source, target = split
    fitted = make("fc-logistic").fit(source)
    assert not fitted.uses_amplitude
    other = rescaled(target, SCALINGS["z-scored"])
    assert not any(FLAG in raised for raised in fitted.method_flags(other))
    np.testing.assert_allclose(fitted.predict_proba(other), fitted.predict_proba(target), atol=1e-4)


@pytest.mark.parametrize("name", [ADAPTIVE, ENSEMBLE])
def test_a_standardised_source_gives_the_block_no_weight(split, name):
    source, target = split
    fitted = make(name).fit(rescaled(source, SCALINGS["z-scored"]))
    assert not fitted.uses_amplitude
    assert fitted.facts_["standardised_scans"] == len(source)
    assert not fitted.state_["amplitude.weights"].any()
    assert not any(FLAG in raised for raised in fitted.method_flags(target))
    other = rescaled(target, SCALINGS["z-scored"])
    np.testing.assert_allclose(fitted.predict_proba(other), fitted.predict_proba(target), atol=1e-4)


def test_a_few_standardised_source_scans_take_the_mean_of_their_site(split):
    source, target = split
    here = np.flatnonzero(source.sites == source.site_names[0])
    few = here[:3]
    fitted = make(ADAPTIVE).fit(rescaled(source, SCALINGS["z-scored"], few))
    assert fitted.facts_["standardised_scans"] == 3
    features = amplitude_features(source.series)
    features[few] = features[here[3:]].mean(axis=0)
    np.testing.assert_allclose(fitted.state_["amplitude.mean"], features.mean(axis=0), atol=1e-6)
    assert fitted.uses_amplitude
    assert not any(FLAG in raised for raised in fitted.method_flags(target))


def test_the_range_by_hand(split):
    source, _ = split
    features = amplitude_features(source.series)
    slopes, spreads, distances = [], [], []
    for site in source.site_names:
        profile = np.mean([row for row, own in zip(features, source.sites, strict=True) if own != site], axis=0)
        for row in features[source.sites == site]:
            slopes.append(np.linalg.lstsq(profile[:, None], row, rcond=None)[0][0])
            spreads.append(np.sqrt(np.mean((row - row.mean()) ** 2)))
            distances.append(np.sqrt(np.mean((row - profile) ** 2)))
    fitted = AmplitudeRange.fit(features, source)
    np.testing.assert_allclose(fitted.profile, features.mean(axis=0))
    np.testing.assert_allclose(fitted.low, [np.quantile(slopes, 0.005) / 2, np.quantile(spreads, 0.005) / 2, -np.inf])
    np.testing.assert_allclose(fitted.high, [np.inf, np.inf, 2 * np.quantile(distances, 0.995)])


def test_a_profile_that_source_subjects_do_not_share_says_nothing():
    cohort = make_cohort("tiny", n_rois=20, seed=4)
    features = np.random.default_rng(0).normal(size=(len(cohort), 20))
    fitted = AmplitudeRange.fit(features, cohort)
    assert fitted.low[0] == -np.inf
    assert not fitted.outside(features).any()


def test_saved_models_keep_the_range_and_older_ones_know_standardised_scans(split, tmp_path):
    source, target = split
    fitted = make(ADAPTIVE).fit(source)
    loaded = Method.load(fitted.save(tmp_path / "model"))
    other = rescaled(target, SCALINGS["between 0 and 1"])
    np.testing.assert_array_equal(loaded.predict_proba(other), fitted.predict_proba(other))
    assert loaded.method_flags(other) == [[FLAG]] * len(target)
    for name in ("profile", "low", "high"):
        del loaded.state_[f"amplitude.{name}"]
    assert not any(FLAG in raised for raised in loaded.method_flags(other))
    assert loaded.method_flags(rescaled(target, SCALINGS["z-scored"])) == [[FLAG]] * len(target)


def test_the_network_with_a_linear_head_does_the_same(split):
    source, target = split
    fitted = make(PLUS, plus=True, epochs=1, warmup=1, members=1, hidden=16).fit(source)
    other = rescaled(target, SCALINGS["z-scored"])
    assert not any(FLAG in raised for raised in fitted.method_flags(target))
    assert all(FLAG in raised for raised in fitted.method_flags(other))
    blocks = fitted.features(other, "cpu")["amplitude"].numpy()
    np.testing.assert_allclose(blocks, np.tile(amplitude_features(source.series).mean(axis=0), (len(target), 1)), atol=1e-6)


def test_real_scans(abide_folder):
    """No real scan is taken for a rescaled one, and all rescaled ones are recognised; z-scores cost no more than 0.01 AUC."""
    cohort = read(abide_folder, atlas="aal")
    labels, raw, scored = [], [], []
    for site in cohort.site_names[:2]:
        target = cohort.select(cohort.sites == site)
        fitted = make(ADAPTIVE).fit(cohort.select(cohort.sites != site))
        assert not any(FLAG in raised for raised in fitted.method_flags(target))
        others = {name: rescaled(target, how) for name, how in SCALINGS.items()}
        for name, other in others.items():
            assert fitted.method_flags(other) == [[FLAG]] * len(target), name
        labels.append(target.labels)
        raw.append(auc(target.labels, fitted.predict_proba(target)[:, 1]))
        scored.append(auc(target.labels, fitted.predict_proba(others["z-scored"])[:, 1]))
    assert np.mean(raw) - np.mean(scored) <= 0.01


def test_a_gain_of_each_roi_is_flagged_where_amplitude_is_used():
    """Too small for the amplitudes to be left out, and large enough to change decisions."""
    cohort = make_cohort("tiny", n_rois=40, sizes={"a": 40, "b": 40, "c": 40, "new": 40}, seed=0)
    source, target = cohort.select(cohort.sites != "new"), cohort.select(sites=["new"])
    fitted = make(ADAPTIVE).fit(source)
    rng = np.random.default_rng(0)
    gained = rescaled(target, lambda one: one * np.exp(rng.normal(0, 0.6, one.shape[1])))
    raised = [bool({FLAG, UNUSUAL} & set(flags)) for flags in fitted.flags(gained)]
    assert np.mean(raised) > 0.9 and UNUSUAL in fitted.flags(gained)[0]
    assert np.abs(fitted.predict_proba(gained) - fitted.predict_proba(target)).max() > 0.02
    assert np.mean([UNUSUAL in flags for flags in fitted.flags(target)]) < 0.5
    assert not any(UNUSUAL in flags for flags in make("fc-adaptive").fit(source).flags(gained))  # it uses none
    del fitted.method.state_["amplitude.usual"]  # as of 0.1.0
    assert not any(UNUSUAL in flags for flags in fitted.flags(gained))
