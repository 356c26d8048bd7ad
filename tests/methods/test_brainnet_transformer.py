"""Brain Network Transformer with random weights against loops over its equations; its clusters, mixing, rates and settings."""

import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import make_cohort
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.brainnet_transformer import BrainNetTransformer, orthonormal

torch.set_num_threads(1)
ROIS, SUBJECTS = 6, 5
SMALL = {"layers": 2, "heads": 3, "feedforward": 7, "clusters": 4, "encoder_width": 5, "cluster_width": 2, "head": (8, 3)}


def network_of(rois=ROIS, inputs=0, **fields):
    own = BrainNetTransformer(**SMALL | fields)
    own.class_weight = torch.tensor([0.8, 1.4])
    return own, randomised(own.build(Shape(rois, 50, inputs, 2, {})), keep="centres")


def batch_of(subjects=SUBJECTS, inputs=0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    features = {"correlation": torch.randn(subjects, ROIS, ROIS, generator=draw)}
    phenotypes = torch.randn(subjects, inputs, generator=draw)
    return Batch(features, phenotypes, torch.arange(subjects) % 2, torch.arange(subjects) // 2)


def layer_norm(state, x):
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * state["weight"] + state["bias"]


def attention(state, x, heads):
    """(token, width): each head attends within its part of the width."""
    width = x.shape[1]
    weight, bias = np.split(state["in_proj_weight"], 3), np.split(state["in_proj_bias"], 3)
    query, key, value = ([w @ one + b for one in x] for w, b in zip(weight, bias, strict=True))
    out = np.zeros_like(x)
    for part in np.split(np.arange(width), heads):
        for i in range(len(x)):
            match = np.exp([query[i][part] @ key[j][part] / math.sqrt(len(part)) for j in range(len(x))])
            out[i, part] = sum(m * value[j][part] for j, m in enumerate(match / match.sum()))
    return np.array([oracle.linear(oracle.under(state, "out_proj"), one) for one in out])


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


def expected_logits(state, x, phenotypes):
    for place in range(2):
        block = oracle.under(state, f"layers.{place}")
        x = x + attention(oracle.under(block, "self_attn"), x, 3)
        x = np.array([layer_norm(oracle.under(block, "norm1"), one) for one in x])
        inner = [np.maximum(oracle.linear(oracle.under(block, "linear1"), one), 0) for one in x]
        x = x + np.array([oracle.linear(oracle.under(block, "linear2"), one) for one in inner])
        x = np.array([layer_norm(oracle.under(block, "norm2"), one) for one in x])
    code = x.reshape(-1)
    for place in (0, 2):
        code = leaky(oracle.linear(oracle.under(state, f"readout.encoder.{place}"), code))
    nodes = oracle.linear(oracle.under(state, "readout.encoder.4"), code).reshape(x.shape)
    clusters = np.zeros((4, ROIS))
    for node in nodes:
        match = np.exp([(node @ centre) ** 2 / math.sqrt(centre @ centre) for centre in state["readout.centres"]])
        for k, share in enumerate(match / match.sum()):
            clusters[k] += share * node
    hidden = np.concatenate([leaky(oracle.linear(oracle.under(state, "reduce.0"), one)) for one in clusters])
    for place in (0, 2):
        hidden = leaky(oracle.linear(oracle.under(state, f"hidden.{place}"), hidden))
    return oracle.linear(oracle.under(state, "classifier"), np.concatenate([hidden, phenotypes]))


@pytest.mark.parametrize("inputs", [0, 3])
def test_the_whole_network(inputs):
    _, network = network_of(inputs=inputs)
    batch = batch_of(inputs=inputs)
    pairs = zip(batch["correlation"].double().numpy(), batch.phenotypes.double().numpy(), strict=True)
    expected = [expected_logits(numbers(network), *one) for one in pairs]
    np.testing.assert_allclose(network(batch).detach().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("clusters", "width"), [(4, 6), (9, 9), (100, 116)])
def test_centres_are_gram_schmidt_of_their_start(clusters, width):
    vectors = torch.randn(clusters, width, generator=torch.Generator().manual_seed(0))
    basis = orthonormal(vectors).double().numpy()
    np.testing.assert_allclose(basis @ basis.T, np.eye(clusters), atol=1e-6)
    # The first k span what the first k vectors span, and each leans towards its own vector.
    triangular = vectors.double().numpy() @ basis.T
    np.testing.assert_allclose(np.triu(triangular, 1), 0, atol=1e-4)
    assert (np.diag(triangular) > 0).all()


def test_centres_are_fixed_and_saved_and_not_more_than_rois():
    own = BrainNetTransformer(**SMALL | {"clusters": 50})
    network = own.build(Shape(ROIS, 50, 0, 2, {}))
    assert network.readout.centres.shape == (ROIS, ROIS)
    assert "readout.centres" in network.state_dict() and "readout.centres" not in dict(network.named_parameters())
    assert own.build(Shape(7, 50, 0, 2, {})).layers[0].self_attn.num_heads == 1  # 3 and 2 do not divide 7


def test_mixed_pairs_share_one_weight_and_the_labels(monkeypatch):
    own, network = network_of(inputs=2)
    batch = batch_of(inputs=2)
    torch.manual_seed(5)
    given = own.loss(network, batch)["ce"].item()
    torch.manual_seed(5)
    weight = float(torch.distributions.Beta(1.0, 1.0).sample())
    partner = torch.randperm(SUBJECTS)
    x = weight * batch["correlation"] + (1 - weight) * batch["correlation"][partner]
    phenotypes = weight * batch.phenotypes + (1 - weight) * batch.phenotypes[partner]
    logits = network(Batch({"correlation": x}, phenotypes, batch.label, batch.site)).detach().double().numpy()
    both = [oracle.cross_entropy(logits, label.tolist(), [0.8, 1.4], 0.0) for label in (batch.label, batch.label[partner])]
    assert given == pytest.approx(weight * both[0] + (1 - weight) * both[1], rel=1e-4)
    own.mixup = 0.0
    plain = own.loss(network, batch)["ce"].item()
    logits = network(batch).detach().double().numpy()
    assert plain == pytest.approx(oracle.cross_entropy(logits, batch.label.tolist(), [0.8, 1.4], 0.0), rel=1e-4)


def test_the_rate_falls_as_a_cosine_to_a_tenth():
    own = BrainNetTransformer(epochs=10)
    rates = []
    for own.epoch in range(10):
        rates += [own.rate_factor(i, 4) for i in range(4)]
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 40)) for step in range(40)]
    np.testing.assert_allclose(rates, expected)


def test_features_are_pearson_correlations():
    cohort = make_cohort("tiny", sizes={"a": 3}, seed=1)
    (name, given), *_ = BrainNetTransformer().features(cohort, torch.device("cpu")).items()
    assert name == "correlation"
    np.testing.assert_allclose(given[1], np.corrcoef(cohort.series[1].T.astype(float)), atol=1e-5)
