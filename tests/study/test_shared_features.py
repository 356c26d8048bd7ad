"""Features computed once and shared: the same bits as without sharing, never those of another scan, gone after a study."""

import dataclasses
import functools

import numpy as np
import pytest

import m2lgdg
from m2lgdg import connectivity, make, make_cohort
from m2lgdg.connectivity import (
    CohortFeatures,
    covariances,
    deviations,
    fc_features,
    frame_weighted,
    sharing_features,
)
from m2lgdg.methods import linear
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.study import cells
from m2lgdg.study.runner import run_study

PEERS = ["fc-logistic", "fc-svm", "fc-adaptive", "tangent-ridge", "connectome-ensemble", "connectome-adaptive"]


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=5)


def forget():
    for recent in (linear._REFERENCES, linear._TANGENTS, linear._ROWS, linear._BLOCKS):
        recent.results.clear()


@pytest.fixture(autouse=True)
def nothing_shared():
    yield
    cells.forget_features()
    forget()


@pytest.mark.parametrize(
    "compute", [fc_features, lambda s: fc_features(s, frame_weighted), lambda s: fc_features(s, deviations), covariances]
)
def test_shared_features_are_those_computed_alone(cohort, compute):
    alone = compute(cohort.series)
    with sharing_features(cohort.series):
        np.testing.assert_array_equal(compute(cohort.series), alone)
        part = cohort.select(np.arange(0, len(cohort), 3))
        np.testing.assert_array_equal(compute(part.series), alone[::3])
        np.testing.assert_array_equal(compute(part.unlabelled().series[::-1]), alone[::3][::-1])


def test_each_kind_is_computed_once(cohort, monkeypatch):
    calls = []
    inner = connectivity.correlation
    monkeypatch.setattr(connectivity, "correlation", lambda *given: calls.append(0) or inner(*given))
    with sharing_features(cohort.series):
        for _ in range(3):
            fc_features(cohort.series[:5])
        assert len(calls) == len(cohort)
    fc_features(cohort.series[:5])
    assert len(calls) == len(cohort) + 5


def test_a_changed_scan_never_gets_shared_features(cohort):
    with sharing_features(cohort.series):
        fc_features(cohort.series)
        turned = [one[:, ::-1].copy() for one in cohort.series[:3]]
        got = fc_features(turned)
    np.testing.assert_array_equal(got, fc_features(turned))
    assert np.abs(got - fc_features(cohort.series[:3])).max() > 0.1


def test_what_is_returned_can_be_changed_without_harm(cohort):
    with sharing_features(cohort.series):
        first = fc_features(cohort.series)
        before = first.copy()
        first += 1
        np.testing.assert_array_equal(fc_features(cohort.series), before)


def test_models_are_the_same_with_and_without_sharing(cohort):
    """Also where another method or variant was fitted on the same source before."""
    fold = next(m2lgdg.leave_one_site_out(cohort))

    def scores(name, **fields):
        return make(name, **fields).fit(fold.source).predict_proba(fold.target)

    alone = {}
    for name in PEERS:
        forget()
        alone[name] = scores(name, phenotypes=True)
    with sharing_features(cohort.series):
        for name in PEERS:
            scores(name)
        for name in PEERS:
            np.testing.assert_array_equal(scores(name, phenotypes=True), alone[name])


def test_another_order_of_the_same_subjects_shares_no_rows(cohort):
    fold = next(m2lgdg.leave_one_site_out(cohort))
    turned = fold.source.select(np.random.default_rng(0).permutation(len(fold.source)))
    assert turned.hash == fold.source.hash
    for name in PEERS:
        first = make(name).fit(fold.source).predict_proba(fold.target)
        # libsvm and the tangent reference stop early, and where depends on the order; cells have their subjects sorted
        tolerance = 1e-5 if name in ("fc-logistic", "fc-adaptive", "connectome-adaptive") else 2e-3
        np.testing.assert_allclose(make(name).fit(turned).predict_proba(fold.target), first, atol=tolerance)


class Shifted(linear.FCAdaptive):
    power: float = 1.0

    def _features(self, block, cohort):
        return np.sign(found := super()._features(block, cohort)) * np.abs(found) ** self.power


class Weighted(linear.FCAdaptive):
    def _subject_weights(self, source):
        return 1.0 + np.arange(len(source))


class Loud(ConnectomeAdaptive):
    def amplitude_block(self, cohort):
        return -3 * super().amplitude_block(cohort)


def patched():
    one = linear.FCAdaptive()
    one._subject_weights = lambda source: np.linspace(1, 9, len(source))
    return one


OWN = {
    "power 1": lambda: dataclasses.dataclass(Shifted)(power=1.0),
    "power 3": lambda: dataclasses.dataclass(Shifted)(power=3.0),
    "weighted": Weighted,
    "loud": Loud,
    "patched": patched,
    "fc-adaptive": linear.FCAdaptive,
    "connectome-adaptive": ConnectomeAdaptive,
}


@pytest.mark.parametrize("turned", [False, True])
def test_classes_of_others_share_nothing(cohort, turned):
    """A field, a hook or a method of one object: the fit is that of a process in which nothing was fitted before."""
    fold = next(m2lgdg.leave_one_site_out(cohort))

    def scores(name):
        return OWN[name]().fit(fold.source).predict_proba(fold.target)

    alone = {}
    for name in OWN:
        forget()
        alone[name] = scores(name)
    forget()
    for name in list(OWN)[:: -1 if turned else 1] * 2:
        np.testing.assert_array_equal(scores(name), alone[name], err_msg=name)
    assert len({one.tobytes() for one in alone.values()}) == len(OWN) - 1  # a power of 1 changes nothing


def test_an_edited_model_spoils_no_other(cohort):
    fold = next(m2lgdg.leave_one_site_out(cohort))
    first = make("tangent-ridge").fit(fold.source)
    expected = first.predict_proba(fold.target)
    for value in first.state_.values():
        value[...] = 7
    np.testing.assert_array_equal(make("tangent-ridge").fit(fold.source).predict_proba(fold.target), expected)


@pytest.mark.long
def test_a_study_leaves_no_features_behind_and_engines_agree(cohort, tmp_path):
    path = cohort.save(tmp_path / "some.cohort")
    study = {"cohort": str(path), "methods": ["fc-logistic", "connectome-adaptive", "tangent-ridge"], "seeds": [0]}
    study |= {"variants": ["phenotypes"]}
    texts = []
    for engine, jobs in (("serial", 1), ("joblib", 2), ("joblib", 3)):
        out = tmp_path / f"{engine}-{jobs}"
        assert not run_study(study, out, engine=engine, jobs=jobs).failed
        assert not connectivity._IN_USE
        texts.append((out / "predictions.csv").read_bytes())
    assert texts[0] == texts[1] == texts[2]


def test_the_hash_of_a_selection_is_that_of_the_same_subjects_alone(cohort):
    cohort.hash  # noqa: B018
    part = cohort.select(sites=cohort.site_names[:2])
    fresh = make_cohort("tiny", seed=5).select(sites=cohort.site_names[:2])
    assert part.hash == fresh.hash
    assert part.with_inputs(cohort.inputs[:1]).hash == fresh.with_inputs(cohort.inputs[:1]).hash != part.hash
    moved = part._changed(labels=1 - part.labels)
    assert moved.hash != part.hash


def test_only_subjects_of_the_cohort_are_found(cohort):
    shared = CohortFeatures(cohort.series)
    assert shared.find(cohort.series[2:4]) == [2, 3]
    assert shared.find([cohort.series[0], cohort.series[1].copy()]) is None


class Lag:
    """A view with a field, that calls itself equal to everything; no function, no name, no hash."""

    __hash__ = None

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return True

    def __call__(self, series):
        return connectivity.standardised(series[self.by :])


def own_views():
    def frame_weighted(series):  # the name of one of the package's
        return connectivity.standardised(series**2)

    return [frame_weighted, lambda s: connectivity.standardised(s[:-1]), lambda s: connectivity.standardised(s[1:]),
            functools.partial(connectivity.deviations), Lag(1), Lag(2)]  # fmt: skip


@pytest.mark.parametrize("own_first", [True, False])
def test_views_of_others_are_computed_afresh(cohort, own_first):
    """Whatever they are called, and beside those of the package, in either order."""
    package = [connectivity.standardised, frame_weighted, deviations]
    views = own_views() + package if own_first else package + own_views()
    alone = [fc_features(cohort.series, view) for view in views]
    with sharing_features(cohort.series):
        for view, expected in zip(views, alone, strict=True):
            np.testing.assert_array_equal(fc_features(cohort.series, view), expected)
    nameless = fc_features(cohort.series, lambda s: connectivity.standardised(s**2))
    np.testing.assert_array_equal(fc_features(cohort.series, own_views()[0]), nameless)


def test_a_worker_that_lives_on_uses_no_features_of_other_code(cohort, monkeypatch):
    cells._share_features(cohort, "code")
    before = fc_features(cohort.series)
    edited = connectivity.EDGES[0]._replace(of_series=lambda one: 0.5 * connectivity._edges(one, connectivity.standardised))
    monkeypatch.setattr(connectivity, "EDGES", (edited, *connectivity.EDGES[1:]))
    monkeypatch.setattr(connectivity, "SHARED", frozenset(map(id, connectivity.EDGES)))
    cells._share_features(cohort, "other code")
    np.testing.assert_array_equal(fc_features(cohort.series), np.float32(0.5) * before)
