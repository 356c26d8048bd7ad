"""Members that read tangent-space edges: what they see, how these are scaled, and that no target reaches them."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy.linalg import logm
from sklearn.covariance import ledoit_wolf

from m2lgdg import METHODS, Model, leave_one_site_out, make_cohort
from m2lgdg.connectivity import fc_features, row_covariances, upper_triangle
from m2lgdg.explain.attribution import explain
from m2lgdg.methods import m2lgdg_tangent
from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome
from m2lgdg.methods.m2lgdg_tangent import EDGES, REFERENCE, chosen_scaling, fitted_reference, tangent_edges
from m2lgdg.methods.solvers import Rows
from m2lgdg.methods.within_sites import balance
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import create as make
from m2lgdg.study.runner import run_study

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


def by_hand(series, reference):
    """Edges of one subject in the tangent space, by scikit-learn's covariance and scipy's logarithm."""
    r = np.corrcoef(series.astype(np.float64).T)
    covariance = ledoit_wolf(r - r.mean(axis=0), assume_centered=True)[0]
    values, vectors = np.linalg.eigh(reference)
    whitening = vectors @ np.diag(values**-0.5) @ vectors.T
    return np.sqrt(2) * upper_triangle(logm(whitening @ covariance @ whitening))


def test_half_of_the_members_read_rows_of_the_tangent_matrix(fold, fitted):
    network, batch = fitted.network(), batch_of(fitted, fold.target)
    assert network.of_fc == 2
    edges = np.stack([by_hand(one, fitted.state_[REFERENCE]) for one in fold.target.series])
    np.testing.assert_allclose(batch[EDGES], edges, atol=1e-4)
    seen = {}
    for i, member in enumerate(network.networks):
        member.encode = lambda given, i=i, kept=member.encode, rows=member.rows: (seen.update({i: rows(given)}), kept(given))[1]
    with torch.no_grad():
        network(batch)
    mean, scale = (fitted.state_[f"fitted.tangent.{name}"] for name in ("mean", "scale"))
    np.testing.assert_allclose(upper_triangle(seen[2].numpy()), (edges - mean) * scale, atol=1e-3)
    fc = (fc_features(fold.target.series) - fitted.state_["fitted.mean"]) * fitted.state_["fitted.scale"]
    for i in range(2):
        np.testing.assert_allclose(upper_triangle(seen[i].numpy()), fc, atol=1e-4)


def test_in_training_each_member_has_its_own_edges_centred_by_site(fold, monkeypatch):
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
    for i, (name, mean) in enumerate((("fc", "mean"), ("fc", "mean"), (EDGES, "tangent.mean"))):
        rows = slice(i * size, (i + 1) * size)
        site, label, own = given.site[rows].numpy(), given.label[rows].numpy(), given[name][rows].numpy()
        for each in range(3):
            centre = np.mean([own[(site == each) & (label == one)].mean(axis=0) for one in (0, 1)], axis=0)
            expected = own[site == each] - centre + method.state_[f"fitted.{mean}"]
            np.testing.assert_allclose(moved["fc"][rows].numpy()[site == each], expected, atol=2e-5)


def test_the_reference_is_of_source_alone_whatever_its_order(fold, fitted):
    reference = fitted.state_[REFERENCE]
    shuffled = fold.source.select(np.random.default_rng(0).permutation(len(fold.source)))
    np.testing.assert_array_equal(fitted_reference(shuffled), reference)
    values, vectors = np.linalg.eigh(reference)
    whitening = vectors @ np.diag(values**-0.5) @ vectors.T
    logs = [logm(whitening @ one @ whitening) for one in row_covariances(fold.source.series)]
    assert np.linalg.norm(np.mean(logs, axis=0)) / len(reference) < 0.02  # of a geometric mean it is zero
    one, other = (tangent_edges(fold.target.select(rows), reference) for rows in ([3], [7, 3, 1]))
    np.testing.assert_array_equal(one[0], other[1])


def test_a_target_changes_nothing_that_is_fitted(fold, fitted):
    draw, target = np.random.default_rng(5), fold.target
    noise = [draw.normal(size=one.shape).astype(np.float32) for one in target.series]
    whole = make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), missing=0.0, seed=1)
    at_target = dict(zip(target.subjects.tolist(), noise, strict=True))
    series = [at_target.get(subject, one) for subject, one in zip(whole.subjects.tolist(), whole.series, strict=True)]
    m2lgdg_tangent.REFERENCES.results.clear()
    m2lgdg_tangent.SOURCES.results.clear()
    changed = next(leave_one_site_out(dataclasses.replace(whole, series=series), ["d"]))
    assert not np.array_equal(changed.target.series[0], target.series[0])
    again = make(NAME, **SMALL | {"members": 3}).fit(changed.source, seed=0)
    assert again.state_.keys() == fitted.state_.keys() and again.facts_["tangent"] == fitted.facts_["tangent"]
    for name, value in fitted.state_.items():
        np.testing.assert_array_equal(again.state_[name], value, err_msg=name)


@pytest.mark.parametrize("fields", [{"members": 1}, {"tangent": False}, {"imaging": False, "contrastive_weight": 0.0}], ids=str)
def test_without_it_nothing_of_it_is_fitted(fold, fields):
    method = make(NAME, **SMALL | fields).fit(fold.source, seed=0)
    assert not any("tangent" in name for name in (*method.state_, *method.facts_))
    assert EDGES not in batch_of(method, fold.target).features
    with_field = make(NAME, **SMALL | fields | {"tangent": True}).fit(fold.source, seed=0)
    if "tangent" not in fields:
        np.testing.assert_array_equal(with_field.predict_proba(fold.target), method.predict_proba(fold.target))


def test_a_model_from_before_reads_fc_only(fold, tmp_path):
    before = make(NAME, **SMALL | {"tangent": False}).fit(fold.source, seed=0)
    loaded = Model.load(Model(before).save(tmp_path / "model"))
    loaded.method.tangent = True  # the default, which a folder without the field gets
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), before.predict_proba(fold.target))


def test_a_saved_model_predicts_the_same(fold, fitted, tmp_path):
    loaded = Model.load(Model(fitted).save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted.predict_proba(fold.target))
    assert loaded.facts_["tangent"] == fitted.facts_["tangent"]


def test_seeds_share_the_edges_of_source_and_nothing_else_does(fold, monkeypatch):
    m2lgdg_tangent.SOURCES.results.clear()
    counted = []
    kept = m2lgdg_tangent.tangent_edges
    monkeypatch.setattr(m2lgdg_tangent, "tangent_edges", lambda *given: counted.append(len(given[0])) or kept(*given))
    first, second = (make(NAME, **SMALL | {"epochs": 1, "warmup": 0}).fit(fold.source, seed=seed) for seed in (0, 1))
    assert counted == [90]
    assert first.state_[REFERENCE] is not second.state_[REFERENCE]
    first.predict_proba(fold.target)
    assert counted == [90, 30]
    noise = [np.random.default_rng(i).normal(size=one.shape).astype(np.float32) for i, one in enumerate(fold.source.series)]
    other = make(NAME, **SMALL | {"epochs": 1, "warmup": 0}).fit(dataclasses.replace(fold.source, series=noise), seed=0)
    assert counted == [90, 30, 90]
    assert np.abs(other.state_[REFERENCE] - first.state_[REFERENCE]).max() > 0.01

    class Own(M2LGDGConnectome):
        """A class of somebody else."""

    Own(**SMALL | {"epochs": 1, "warmup": 0}).fit(fold.source, seed=0)
    Own(**SMALL | {"epochs": 1, "warmup": 0}).fit(fold.source, seed=0)
    assert counted == [90, 30, 90, 90, 90]


# Scaling.


def problem(draw, effects):
    """Rows with these effects of the label on the first features, and noise in the others, at five sites."""
    cohort = make_cohort("tiny", sizes=dict.fromkeys("abcde", 40), missing=0.0, seed=2)
    values = draw.normal(size=(len(cohort), 400)).astype(np.float32)
    values[:, : len(effects)] += np.outer(2 * cohort.labels - 1, effects).astype(np.float32)
    site = np.unique(cohort.sites, return_inverse=True)[1]
    return Rows(values, np.zeros((5, 400)), site), cohort, balance(cohort)


def test_scaling_is_chosen_by_what_holds_at_left_out_sites():
    draw = np.random.default_rng(0)
    few = chosen_scaling(*problem(draw, np.full(6, 0.4)))
    assert few["scaling"] == "association" and few["auc"]["association"] > few["auc"]["sd"] + 0.03
    many = chosen_scaling(*problem(draw, np.full(400, 0.06)))
    assert many["scaling"] == "sd" and many["auc"]["sd"] > many["auc"]["association"]


@pytest.mark.parametrize("scaling", ["association", "sd"])
def test_edges_are_scaled_as_chosen(fold, monkeypatch, scaling):
    monkeypatch.setattr("m2lgdg.methods.m2lgdg_tangent.chosen_scaling", lambda *given: {"scaling": scaling})
    method = make(NAME, **SMALL | {"validation_share": 0.0, "epochs": 1, "warmup": 0}).fit(fold.source, seed=0)
    edges, weights = tangent_edges(fold.source, method.state_[REFERENCE]).astype(np.float64), balance(fold.source)
    for site in "abc":
        here = fold.source.sites == site
        edges[here] -= np.average(edges[here], axis=0, weights=weights[here])
    sd = np.sqrt(np.average(edges**2, axis=0, weights=weights))
    found = method.state_["fitted.tangent.scale"] * sd
    if scaling == "sd":
        np.testing.assert_allclose(found, 1.0, rtol=1e-4)
        return
    strength = np.abs((weights * (2.0 * fold.source.labels - 1)) @ (edges / sd))
    assert np.corrcoef(np.argsort(np.argsort(found)), np.argsort(np.argsort(strength)))[0, 1] > 0.9
    assert found.max() > 20 * np.median(found)  # the third power
    assert method.facts_["tangent"] == {"scaling": "association"}


def test_asked_for_sd_nothing_is_chosen(fold):
    method = make(NAME, **SMALL | {"scaling": "sd"}).fit(fold.source, seed=0)
    assert "tangent" not in method.facts_ and "fitted.tangent.scale" in method.state_


def test_the_record_of_a_cell_says_what_was_chosen(tmp_path):
    study = {"cohort": make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort"), "methods": [NAME], "seeds": [0]}
    study |= {"targets": ["east"], "method": {NAME: {"variant": "small", "epochs": 1, "warmup": 0}}, "variants": []}
    run_study(study | {"cohort": str(study["cohort"])}, tmp_path / "out")
    (record,) = [json.loads(file.read_text()) for file in (tmp_path / "out" / "cells").iterdir()]
    auc = record["learned"]["tangent"]["auc"]
    assert record["learned"]["tangent"]["scaling"] == max(auc, key=auc.get) and set(auc) == {"association", "sd"}


# Connectomes, explanations, variant `plus`.


def test_connectomes_have_the_edges_of_their_series(fold):
    series = make(NAME, **SMALL).fit(fold.source, seed=0)
    matrices = make(NAME, **SMALL).fit(fold.source.to_connectomes(), seed=0)
    np.testing.assert_allclose(matrices.state_[REFERENCE], series.state_[REFERENCE], rtol=1e-4, atol=1e-6)
    found = matrices.predict_proba(fold.target.to_connectomes())
    np.testing.assert_allclose(found, series.predict_proba(fold.target), atol=1e-3)


def test_attributions_of_both_kinds_of_edges_sum_to_the_decision(fold, fitted):
    found = explain(fitted, fold.target.select(np.arange(4)), of="margin", steps=64)
    assert {"fc", EDGES} <= set(found.rois.columns)
    assert found.rois[EDGES].to_numpy().all() and found.rois["fc"].to_numpy().all()
    assert found.error()["median_relative"] < 0.05
    baselines = fitted.network().baselines()
    np.testing.assert_array_equal(baselines[EDGES], fitted.state_["fitted.tangent.mean"])
    np.testing.assert_array_equal(baselines["fc"], fitted.state_["fitted.mean"])


def test_plus_with_tangent_members(fold):
    method = make(NAME, **SMALL | {"plus": True}).fit(fold.source, seed=0)
    changed = dataclasses.replace(method)
    changed.facts_, changed.state_ = method.facts_, dict(method.state_)
    changed.state_["fitted.tangent.scale"] = 0 * method.state_["fitted.tangent.scale"]
    assert np.abs(changed.predict_proba(fold.target) - method.predict_proba(fold.target)).max() > 1e-6
