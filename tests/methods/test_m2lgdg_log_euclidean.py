"""Members of `m2lgdg_connectome.py` that read log-Euclidean edges: what they see, how these are centred and scaled."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.linalg import logm
from sklearn.covariance import ledoit_wolf

from m2lgdg import METHODS, Model, leave_one_site_out, make_cohort
from m2lgdg.connectivity import fc_features, upper_triangle
from m2lgdg.devices import plain_form
from m2lgdg.explain.attribution import explain
from m2lgdg.methods.m2lgdg_connectome import LOG_EDGES, M2LGDGConnectome
from m2lgdg.methods.solvers import association
from m2lgdg.methods.within_sites import balance
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import create as make

NAME = "m2lgdg-connectome"
SMALL = dict(METHODS[NAME].variants["small"]) | {"epochs": 2, "warmup": 1, "connectivity": "fc"}


@pytest.fixture(scope="module")
def fold():
    cohort = make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), missing=0.0, seed=1)
    return next(leave_one_site_out(cohort, ["d"]))


@pytest.fixture(scope="module")
def fitted(fold):
    return make(NAME, **SMALL | {"members": 3}).fit(fold.source, seed=0)


def batch_of(method, cohort):
    scaler = PhenotypeScaler.restore(tuple(method.facts_["inputs"]), method.state_, "scaler")
    return method.make_batch(cohort, scaler, torch.device("cpu"))


def by_hand(series):
    """Edges of one subject, by scikit-learn's covariance and scipy's logarithm."""
    r = np.corrcoef(series.astype(np.float64).T)
    return np.sqrt(2) * upper_triangle(logm(ledoit_wolf(r - r.mean(axis=0), assume_centered=True)[0]))


def test_half_of_the_members_read_rows_of_the_log_euclidean_form(fold, fitted):
    network, batch = plain_form(fitted.network()), batch_of(fitted, fold.target)
    assert network.of_fc == 2
    edges = np.stack([by_hand(one) for one in fold.target.series])
    np.testing.assert_allclose(batch[LOG_EDGES], edges, atol=1e-4)
    seen = {}
    for i, member in enumerate(network.networks):
        member.encode = lambda given, i=i, kept=member.encode, rows=member.rows: (seen.update({i: rows(given)}), kept(given))[1]
    with torch.no_grad():
        network(batch)
    mean, scale = (fitted.state_[f"fitted.log.{name}"] for name in ("mean", "scale"))
    np.testing.assert_allclose(upper_triangle(seen[2].numpy()), (edges - mean) * scale, atol=1e-3)
    fc = (fc_features(fold.target.series) - fitted.state_["fitted.mean"]) * fitted.state_["fitted.scale"]
    for i in range(2):
        np.testing.assert_allclose(upper_triangle(seen[i].numpy()), fc, atol=1e-4)


def test_in_training_each_member_has_its_own_edges_and_only_fc_is_centred_by_site(fold, monkeypatch):
    seen = []
    kept = M2LGDGConnectome.centred

    def centred(self, batch):
        seen.append((batch, kept(self, batch)))
        return seen[-1][1]

    monkeypatch.setattr(M2LGDGConnectome, "centred", centred)
    fields = SMALL | {"members": 3, "batch_size": 90, "validation_share": 0.0, "epochs": 1, "warmup": 0}
    method = make(NAME, **fields).fit(fold.source, seed=0)
    given, moved = seen[0]
    size = len(given) // 3
    assert set(moved.features) == {"fc"} and len(moved["fc"]) == len(given)
    for i in range(2):
        rows = slice(i * size, (i + 1) * size)
        site, label, own = given.site[rows].numpy(), given.label[rows].numpy(), given["fc"][rows].numpy()
        for each in range(3):
            centre = np.mean([own[(site == each) & (label == one)].mean(axis=0) for one in (0, 1)], axis=0)
            expected = own[site == each] - centre + method.state_["fitted.mean"]
            np.testing.assert_allclose(moved["fc"][rows].numpy()[site == each], expected, atol=2e-5)
    np.testing.assert_array_equal(moved["fc"][2 * size :], given[LOG_EDGES][2 * size :])


@pytest.mark.parametrize(
    "fields", [{"members": 1}, {"log_euclidean": False}, {"imaging": False, "contrastive_weight": 0.0}], ids=str
)
def test_without_it_nothing_of_it_is_fitted(fold, fields):
    method = make(NAME, **SMALL | fields).fit(fold.source, seed=0)
    assert not any(name.startswith("fitted.log.") for name in method.state_)
    assert LOG_EDGES not in batch_of(method, fold.target).features
    with_field = make(NAME, **SMALL | fields | {"log_euclidean": True}).fit(fold.source, seed=0)
    if "log_euclidean" not in fields:
        np.testing.assert_array_equal(with_field.predict_proba(fold.target), method.predict_proba(fold.target))


def test_a_model_from_before_reads_fc_only(fold, tmp_path):
    before = make(NAME, **SMALL | {"log_euclidean": False}).fit(fold.source, seed=0)
    loaded = Model.load(Model(before).save(tmp_path / "model"))
    loaded.method.log_euclidean = True  # the default, which a folder without the field gets
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), before.predict_proba(fold.target))


def test_a_saved_model_predicts_the_same(fold, fitted, tmp_path):
    loaded = Model.load(Model(fitted).save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted.predict_proba(fold.target))


# Scaling.


@pytest.mark.parametrize("scaling", ["association", "sd"])
def test_edges_have_unit_variance_over_all_sites_and_one_scale(fold, scaling):
    fields = {"validation_share": 0.0, "epochs": 1, "warmup": 0, "scaling": scaling, "scaling_power": 3.0, "centring": "site"}
    method = make(NAME, **SMALL | fields).fit(fold.source, seed=0)
    edges, weights = np.stack([by_hand(one) for one in fold.source.series]), balance(fold.source)
    mean = np.average(edges, axis=0, weights=weights)
    np.testing.assert_allclose(method.state_["fitted.log.mean"], mean, atol=1e-4)
    standard = (edges - mean) / np.sqrt(np.average((edges - mean) ** 2, axis=0, weights=weights))
    signs = 2.0 * fold.source.labels - 1
    one = np.sqrt(np.mean(association(standard, signs, weights) ** 2)) if scaling == "association" else 1.0
    np.testing.assert_allclose(method.state_["fitted.log.scale"] * (edges - mean).std(axis=0), one, rtol=0.1)
    np.testing.assert_allclose((edges - mean) * method.state_["fitted.log.scale"], one * standard, rtol=1e-3, atol=1e-3)
    fc = method.state_["fitted.scale"] * fc_features(fold.source.series).std(axis=0)
    assert (np.ptp(fc) > 10 * np.median(fc)) == (scaling == "association")  # the third power, of FC alone


# Connectomes, explanations, variant `plus`.


def test_connectomes_have_the_edges_of_their_series(fold):
    series = make(NAME, **SMALL).fit(fold.source, seed=0)
    matrices = make(NAME, **SMALL).fit(fold.source.to_connectomes(), seed=0)
    np.testing.assert_allclose(matrices.state_["fitted.log.mean"], series.state_["fitted.log.mean"], rtol=1e-3, atol=1e-4)
    found = matrices.predict_proba(fold.target.to_connectomes())
    np.testing.assert_allclose(found, series.predict_proba(fold.target), atol=1e-3)


def test_attributions_of_both_kinds_of_edges_sum_to_the_decision(fold, fitted):
    found = explain(fitted, fold.target.select(np.arange(4)), of="margin", steps=64)
    assert {"fc", LOG_EDGES} <= set(found.rois.columns)
    assert found.rois[LOG_EDGES].to_numpy().all() and found.rois["fc"].to_numpy().all()
    assert found.error()["median_relative"] < 0.05
    baselines = fitted.network().baselines()
    np.testing.assert_array_equal(baselines[LOG_EDGES], fitted.state_["fitted.log.mean"])
    np.testing.assert_array_equal(baselines["fc"], fitted.state_["fitted.mean"])


def test_plus_with_members_that_read_them(fold):
    method = make(NAME, **SMALL | {"plus": True}).fit(fold.source, seed=0)
    changed = dataclasses.replace(method)
    changed.facts_, changed.state_ = method.facts_, dict(method.state_)
    changed.state_["fitted.log.scale"] = 0 * method.state_["fitted.log.scale"]
    assert np.abs(changed.predict_proba(fold.target) - method.predict_proba(fold.target)).max() > 1e-6
