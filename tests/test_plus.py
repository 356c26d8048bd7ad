"""M²LG-DG plus: the head it stands on, what its streams are trained beside, and how much of them is kept."""

import numpy as np
import pytest
import torch

from m2lgdg import METHODS, leave_one_site_out, make, make_cohort
from m2lgdg.deep import Batch
from m2lgdg.methods.m2lgdg_connectome import WEIGHTS, network_weight
from m2lgdg.methods.plus import M2LGDGPlus
from m2lgdg.metrics import logit, platt

SMALL = dict(METHODS["m2lgdg"].variants["small"]) | {"epochs": 3, "warmup": 1, "length": 32}


@pytest.fixture(scope="module")
def fold():
    cohort = make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), missing=0.0, seed=1)
    return next(leave_one_site_out(cohort, ["d"]))


@pytest.fixture(scope="module")
def head(fold):
    return make("connectome-adaptive", phenotypes=True).fit(fold.source)


@pytest.fixture(scope="module")
def fitted(fold):
    return make("m2lgdg-plus", **SMALL).fit(fold.source, seed=0)


def test_without_its_streams_it_is_the_head(fold, head, fitted):
    bare = make("m2lgdg-plus", **SMALL)
    bare.facts_, bare.state_ = fitted.facts_, fitted.state_ | {"network.share": np.zeros((), dtype=np.float32)}
    bare.state_["calibration"] = np.array([1.0, 0.0])
    expected = logit(head.predict_proba(fold.target)[:, 1])
    np.testing.assert_allclose(logit(bare.predict_proba(fold.target)[:, 1]), expected, atol=1e-5)


def test_streams_are_trained_beside_heads_that_did_not_know_the_site(fold, head, monkeypatch):
    seen = []
    kept = M2LGDGPlus.step

    def step(self, network, batch, optimizer):
        seen.append((network.head(batch), batch))
        return kept(self, network, batch, optimizer)

    monkeypatch.setattr(M2LGDGPlus, "step", step)
    make("m2lgdg-plus", **SMALL).fit(fold.source, seed=0)
    slope, offset = head.state_["calibration"]
    allowed = (slope * head.held_out_ + offset).astype(np.float32)
    everyone = fold.source.labels
    assert len(seen) > 3
    for logits, batch in seen:
        assert set(batch.features) == {"series", "held_out"}  # what the head sees of its own training subjects is not there
        for value, label in zip(logits.tolist(), batch.label.tolist(), strict=True):
            near = np.flatnonzero(np.isclose(allowed, value, atol=1e-6))
            assert label in everyone[near]
    in_sample = slope * head.decision(fold.source) + offset
    assert np.abs(in_sample).mean() > 1.1 * np.abs(allowed).mean()  # the difference matters: in sample it is too sure


def test_without_phenotypes_its_head_has_none_either(fold):
    bare = make("m2lgdg-plus", **SMALL | {"phenotypes": False, "contrastive_weight": 0.0}).fit(fold.source, seed=0)
    bare.state_ |= {"network.share": np.zeros((), dtype=np.float32), "calibration": np.array([1.0, 0.0])}
    expected = logit(make("connectome-adaptive").fit(fold.source).predict_proba(fold.target)[:, 1])
    np.testing.assert_allclose(logit(bare.predict_proba(fold.target)[:, 1]), expected, atol=1e-5)


def test_logits_are_those_of_head_and_streams_together(fitted):
    network = fitted.network()
    draw = torch.Generator().manual_seed(0)
    edges = 12 * 11 // 2
    sizes = {"steady": edges, "swings": edges, "amplitude": 12}
    features = {name: torch.randn(5, size, generator=draw) for name, size in sizes.items()}
    features["series"] = torch.randn(5, 12, 32, generator=draw)
    phenotypes = torch.randn(5, 3, generator=draw)
    batch = Batch(features, phenotypes, torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    network.share.fill_(0.25)
    with torch.no_grad():
        logits, residual = network(batch).numpy(), network.parts(batch)["residual"].numpy()
    expected = 0.25 * (residual[:, 1] - residual[:, 0]) + float(fitted.state_["fitted.head.intercept"])
    for name in sizes:
        expected = expected + features[name].numpy().astype(np.float64) @ fitted.state_[f"fitted.head.{name}"]
    expected = expected + phenotypes.numpy() @ fitted.state_["fitted.head.phenotypes"]
    assert np.abs(residual).max() > 0.01
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_the_share_is_what_helps_subjects_not_trained_on():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    y = 2.0 * labels - 1
    head, noise = y + rng.normal(size=400), 3 * rng.normal(size=400)
    assert network_weight(head, noise, labels) == 0
    assert network_weight(head, np.zeros(400), labels) == 0
    assert network_weight(head, y + rng.normal(size=400), labels) == 1
    assert network_weight(head, -y, labels) == 0
    some = network_weight(head, y + 2 * rng.normal(size=400), labels)
    assert 0 < some < 1
    losses = {}
    for share in WEIGHTS:
        slope, offset = platt(head + share * noise, labels)
        losses[share] = np.log1p(np.exp(-y * (slope * (head + share * noise) + offset))).mean()
    assert min(losses, key=losses.get) == 0


def test_the_share_is_told_and_used(fitted):
    assert fitted.facts_["share"] in WEIGHTS
    assert float(fitted.network().share) == pytest.approx(fitted.facts_["share"])
    assert "_unseen" not in vars(fitted)
