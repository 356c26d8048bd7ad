"""Fits of several sources in one solve: the same as one by one, and none of them knows of the sites that it leaves out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m2lgdg
from m2lgdg.methods import linear, solvers, together
from m2lgdg.methods.blocks import standardised_block
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.methods.solvers import Problem, solved
from m2lgdg.methods.together import Sources, adaptive_blocks, fitting_together
from m2lgdg.methods.within_sites import balance, source_folds
from m2lgdg.splits import leave_one_site_out

PENALTY = 3.0


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny").in_order()


def left_out(cohort, targets=None):
    return [np.flatnonzero(cohort.sites != site) for site in targets or cohort.site_names]


def one_by_one(features, source, site_folds=5):
    """Block of one source by the solver of single sources: weights, intercept, held-out decisions."""
    weights = balance(source)
    rows, centre, scale, _ = standardised_block(features, source, weights, within_sites=True)
    penalties = np.array([PENALTY * rows.mean_square])
    found = solved(Problem(rows, source.labels, weights, source_folds(source, site_folds, weights), penalties), "adaptive")
    unscaled = found.coefficients(0) / scale
    return unscaled, float(found.intercepts[0] - centre @ unscaled), found.held_out[0]


def cohort_of(sizes, seed):
    """Features (subject, feature) and a cohort whose sites have these numbers of controls and patients, in random order."""
    draw = np.random.default_rng(seed)
    sites = np.repeat([f"S{i}" for i in range(len(sizes))], [sum(size) for size in sizes])
    labels = np.concatenate([np.repeat([0, 1], size) for size in sizes])
    order = draw.permutation(len(sites))
    sites, labels = sites[order], labels[order]
    cohort = m2lgdg.Cohort.from_arrays(draw.normal(size=(len(sites), 20, 3)), labels, sites)
    level = draw.normal(size=(len(sizes), 150))[np.unique(sites, return_inverse=True)[1]]
    features = (
        level + labels[:, None] * draw.normal(size=150) * 0.5 + draw.normal(size=(len(sites), 150)) * draw.uniform(0.1, 9, 150)
    )
    features[:, 3] = 0.7  # constant everywhere
    features[sites != "S0", 4] = 0.2  # without one site
    return features.astype(np.float32), cohort


counts = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda size: sum(size) > 0)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(counts, min_size=3, max_size=7), seed=st.integers(0, 10**6), site_folds=st.integers(2, 6))
def test_every_block_is_the_one_that_its_source_alone_has(sizes, seed, site_folds):
    features, cohort = cohort_of(sizes, seed)
    sources = [*left_out(cohort), np.arange(len(cohort))]
    blocks = adaptive_blocks(features.copy(), cohort, sources, site_folds, PENALTY)
    for rows in sources:
        source = cohort.select(rows)
        if (block := blocks.get(rows.tobytes())) is None:
            mixed = [site for site in source.site_names if len(set(source.labels[source.sites == site])) > 1]
            assert len(mixed) < 2
            continue
        weights, intercept, held_out = one_by_one(features[rows], source, site_folds)
        size = np.abs(held_out).max()
        np.testing.assert_allclose(block.held_out, held_out, atol=3e-6 * size)
        np.testing.assert_allclose(
            features[rows] @ block.weights + block.intercept, features[rows] @ weights + intercept, atol=3e-6 * size
        )
        np.testing.assert_allclose(block.mean, features[rows].mean(axis=0, dtype=np.float64), atol=1e-12)
        assert block.weights[3] == 0 and block.penalty == PENALTY


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(counts, min_size=3, max_size=6), seed=st.integers(0, 10**6), here=st.integers(0, 5))
def test_a_left_out_site_changes_no_bit(sizes, seed, here):
    features, cohort = cohort_of(sizes, seed)
    site = cohort.site_names[here % len(cohort.site_names)]
    sources = left_out(cohort)
    own = np.flatnonzero(cohort.sites != site).tobytes()
    before = adaptive_blocks(features.copy(), cohort, sources, 5, PENALTY).get(own)
    target, draw = cohort.sites == site, np.random.default_rng(seed)
    features[target] = 1e3 * draw.normal(size=features[target].shape)
    relabelled = dataclasses.replace(cohort, labels=np.where(target, draw.permutation(1 - cohort.labels), cohort.labels))
    after = adaptive_blocks(features, relabelled, sources, 5, PENALTY).get(own)
    assert (before is None) == (after is None)
    for one, other in zip(before or (), after or (), strict=True):
        np.testing.assert_array_equal(one, other)


def test_probabilities_of_the_default_are_those_of_fits_alone(cohort, monkeypatch):
    for kept in (linear._BLOCKS, linear._ALONE):
        kept.results.clear()
    with fitting_together(sources := Sources(cohort, left_out(cohort))):
        shared = [
            m2lgdg.make("connectome-adaptive").fit(one.source).predict_proba(one.target) for one in leave_one_site_out(cohort)
        ]
    assert len(sources.blocks) == 3 and all(len(each) == 4 for each in sources.blocks.values())
    alone = [m2lgdg.make("connectome-adaptive").fit(one.source).predict_proba(one.target) for one in leave_one_site_out(cohort)]
    monkeypatch.setattr(ConnectomeAdaptive, "_fit_together", lambda *_: None)
    former = [
        m2lgdg.make("connectome-adaptive").fit(one.source).predict_proba(one.target) for one in leave_one_site_out(cohort)
    ]
    for a, b, c in zip(shared, alone, former, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_allclose(a, c, atol=1e-6)


def test_more_subjects_than_edges_are_fitted_together_if_edges_are_many(monkeypatch):
    """What is many is lowered: of 160 subjects, each source has 100 or more, and 66 edges."""
    cohort = m2lgdg.make_cohort("tiny", sizes={"a": 60, "b": 50, "c": 50}).in_order()
    method = {"phenotypes": True, "tables": "none"}
    alone = [m2lgdg.make("connectome-adaptive", **method).fit(cohort.select(rows)) for rows in left_out(cohort)]
    solved_together, blocks = [], together.adaptive_blocks
    monkeypatch.setattr(together, "adaptive_blocks", lambda *given: solved_together.append(len(given[2])) or blocks(*given))
    for module in (linear, solvers):
        monkeypatch.setattr(module, "FEW", 10)
    sources = Sources(cohort, left_out(cohort))
    with fitting_together(sources):
        fitted = [m2lgdg.make("connectome-adaptive", **method).fit(cohort.select(rows)) for rows in left_out(cohort)]
    assert solved_together == [3, 3, 3]  # frame-weighted FC, deviation FC and the log-Euclidean form, of three sources each
    for one, other in zip(fitted, alone, strict=True):
        np.testing.assert_allclose(one.predict_proba(cohort), other.predict_proba(cohort), atol=1e-6)


def test_only_a_source_that_was_named_is_found(cohort):
    sources = Sources(cohort, left_out(cohort, ["east", "west"]))
    east = cohort.select(cohort.sites != "east")
    every, rows, own = sources.find(east)
    assert len(every) == len(cohort) and len(rows) == 2
    assert np.array_equal(every.subjects[own], east.subjects)
    assert sources.find(cohort.select(cohort.sites != "north")) is None
    assert sources.find(east.select(np.arange(len(east))[::-1])) is None  # another order
    assert sources.find(dataclasses.replace(east, labels=1 - east.labels)) is None
    assert sources.find(dataclasses.replace(east, sites=np.where(east.sites == "west", "far", east.sites))) is None
    copied = dataclasses.replace(east, series=[np.array(one) for one in east.series])
    assert sources.find(copied) is None  # the same numbers in other arrays
    assert sources.find(east.to_connectomes()) is None
    assert Sources(cohort, []).find(east) is None


def test_sources_are_those_of_their_own_context(cohort):
    outer, inner = Sources(cohort, []), Sources(cohort, [])
    with fitting_together(outer):
        with pytest.raises(ZeroDivisionError), fitting_together(inner):
            assert together.sources_in_use() == (outer, inner)
            raise ZeroDivisionError
        assert together.sources_in_use() == (outer,)
    assert together.sources_in_use() == ()


def test_a_class_of_a_user_and_other_kinds_of_blocks_are_fitted_by_themselves(cohort):
    class Own(ConnectomeAdaptive):
        pass

    with fitting_together(sources := Sources(cohort, left_out(cohort))):
        source = cohort.select(cohort.sites != "east")
        Own().fit(source)
        m2lgdg.make("connectome-adaptive", penalties=(1.0, 3.0)).fit(source)
        m2lgdg.make("fc-adaptive").fit(source)
        m2lgdg.make("fc-logistic").fit(source)
    assert not sources.blocks


@pytest.mark.parametrize("folds", [None, 2])
def test_new_site_calibration_fits_all_sites_together(cohort, monkeypatch, folds):
    fitted = m2lgdg.make("connectome-adaptive").fit(cohort, new_site_calibration=True, calibration_folds=folds)
    solves, plain = [], adaptive_blocks
    monkeypatch.setattr(together, "adaptive_blocks", lambda *given: solves.append(len(given[2])) or plain(*given))
    again = m2lgdg.make("connectome-adaptive").fit(cohort, new_site_calibration=True, calibration_folds=folds)
    assert solves == 3 * [1 + (folds or 4)]  # frame-weighted FC, its logarithm and deviation FC
    monkeypatch.setattr(linear, "sources_in_use", tuple)
    alone = m2lgdg.make("connectome-adaptive").fit(cohort, new_site_calibration=True, calibration_folds=folds)
    assert again.new_site_.slope == fitted.new_site_.slope
    np.testing.assert_allclose(again.new_site_.slope, alone.new_site_.slope, atol=1e-5)
    np.testing.assert_allclose(again.new_site_.offset, alone.new_site_.offset, atol=1e-5)
    np.testing.assert_allclose(again.predict_proba(cohort), alone.predict_proba(cohort), atol=1e-6)


def test_a_left_out_site_without_labels_changes_no_bit(cohort):
    def fitted(cohort):
        with fitting_together(
            sources := Sources(
                cohort, [np.flatnonzero((cohort.sites != site) & (cohort.labels >= 0)) for site in cohort.site_names]
            )
        ):
            made = m2lgdg.make("connectome-adaptive").fit(cohort.select(cohort.sites != "east"))
        assert len(sources.blocks) == 3
        return made

    unknown = dataclasses.replace(cohort, labels=np.where(cohort.sites == "east", -1, cohort.labels))
    before, after = fitted(cohort), fitted(unknown)
    for name, value in before.state_.items():
        np.testing.assert_array_equal(value, after.state_[name], err_msg=name)
    np.testing.assert_array_equal(before.held_out_, after.held_out_)
