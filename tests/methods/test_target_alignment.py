"""Peers that see a batch of the target: their equations against plain ones, and what may not reach them."""

import dataclasses

import numpy as np
import pytest

from m2lgdg import InputError, leave_one_site_out, make, make_cohort
from m2lgdg.cohort import UNKNOWN
from m2lgdg.method import Method
from m2lgdg.metrics import auc
from m2lgdg.study.audit import audit
from m2lgdg.study.cells import adapted_proba

NAMES = ["mida", "coral-target"]


@pytest.fixture(scope="module")
def fold():
    cohort = make_cohort("tiny", sizes={"a": 30, "b": 30, "c": 30}, roi_effect=2.0, edge_effect=2.5, seed=5)
    return next(iter(leave_one_site_out(cohort, ["c"])))


@pytest.fixture(scope="module")
def fitted(fold):
    return {name: make(name, components=20).fit(fold.source) for name in NAMES}


def adapted(method, target, seed=0, size=12):
    return adapted_proba(method, target, method.predict_proba(target)[:, 1], seed, size)


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_is_used_and_the_signal_is_kept(fitted, fold, name):
    strict, seen = fitted[name].predict_proba(fold.target)[:, 1], adapted(fitted[name], fold.target)
    assert not np.allclose(strict, seen)
    assert auc(fold.target.labels, seen) > 0.8
    np.testing.assert_array_equal(adapted(fitted[name], fold.target), seen)


@pytest.mark.parametrize("name", NAMES)
def test_labels_sites_and_order_do_not_matter(fitted, fold, name):
    target, usual = fold.target, adapted(fitted[name], fold.target)
    order = np.random.default_rng(0).permutation(len(target))
    np.testing.assert_array_equal(adapted(fitted[name], target.select(order))[np.argsort(order)], usual)
    hidden = dataclasses.replace(target, labels=np.full(len(target), UNKNOWN), sites=np.full(len(target), "elsewhere"))
    np.testing.assert_array_equal(adapted(fitted[name], hidden), usual)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_batch_it_is_the_ridge(fitted, fold, name):
    alone = fold.target.select([0])
    np.testing.assert_array_equal(adapted(fitted[name], alone), fitted[name].predict_proba(alone)[:, 1])
    both = [fitted[one].predict_proba(fold.target) for one in NAMES]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_has_no_source(fitted, fold, name, tmp_path):
    loaded = Method.load(fitted[name].save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted[name].predict_proba(fold.target))
    with pytest.raises(InputError, match="only in the process that fitted it"):
        loaded.predict_adapted(fold.target, fold.target)


def test_mida_maximises_variance_and_independence():
    draw = np.random.default_rng(1)
    sites = np.array(["a", "b"]).repeat(12)
    source = draw.normal(size=(24, 40)) + np.where(sites == "a", 1.0, -1.0)[:, None] * np.eye(40)[0] * 5
    batch, target = draw.normal(size=(8, 40)) + np.eye(40)[0] * 20, draw.normal(size=(5, 40)) + np.eye(40)[0] * 20
    method = make("mida", components=6, mu=0.5)
    trained, scored = method.aligned(source, method.prepared(source), batch, target, sites)
    known = np.concatenate([source, batch])
    kernel, centre = known @ known.T, np.eye(32) - 1 / 32
    groups = np.array([*"a" * 12, *"b" * 12, *"t" * 8])
    same = (groups[:, None] == groups).astype(float)
    objective = kernel @ (0.5 * centre - centre @ same @ centre) @ kernel
    _, vectors = np.linalg.eigh(objective)
    expected = kernel @ vectors[:, ::-1][:, :6]
    np.testing.assert_allclose(np.abs(trained), np.abs(expected[:24]), atol=1e-6)  # an eigenvector has no sign
    np.testing.assert_allclose(np.abs(scored), np.abs(target @ known.T @ vectors[:, ::-1][:, :6]), atol=1e-6)
    difference = scored.mean(axis=0) - trained.mean(axis=0)
    raw = target.mean(axis=0) - source.mean(axis=0)
    assert np.linalg.norm(difference) / np.linalg.norm(trained.std(axis=0)) < np.linalg.norm(raw) / np.linalg.norm(
        source.std(axis=0)
    )


def test_coral_gives_source_the_mean_and_covariance_of_the_batch():
    draw = np.random.default_rng(2)
    source, batch = draw.normal(size=(60, 5)), draw.normal(size=(400, 5)) @ draw.normal(size=(5, 5)) + 3
    method = make("coral-target", components=5, ridge=1e-6)
    trained, scored = method.aligned(source, method.prepared(source), batch, batch, np.array(["a"] * 60))
    np.testing.assert_allclose(trained.mean(axis=0), scored.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(np.cov(trained.T), np.cov(scored.T), rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_the_audit_covers_a_method_that_sees_the_batch(tmp_path):
    path = make_cohort("tiny", sizes={"a": 16, "b": 16, "c": 16}, seed=6).save(tmp_path / "small.cohort")
    study = {"cohort": str(path), "methods": NAMES, "seeds": [0], "targets": ["a"], "track": "adapted", "adapt_subjects": 6}
    assert [result.passed for result in audit(study)] == [True, True]
