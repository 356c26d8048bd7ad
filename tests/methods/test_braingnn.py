"""BrainGNN with random weights against loops over its equations, its choice of ROIs, its losses, and its size."""

import dataclasses
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers

from m2lgdg import make_cohort
from m2lgdg.connectivity import covariances
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods import braingnn
from m2lgdg.methods.braingnn import BrainGNN, RoiPooling
from m2lgdg.scans import PARTIAL, Connectomes

torch.set_num_threads(1)
ROIS, SUBJECTS = 7, 6
SMALL = {"communities": 3, "hidden": 4, "head": (5, 6)}
FORMS = pytest.mark.parametrize("form", ["paper", "release"])


def method(**fields):
    own = BrainGNN(**{**SMALL, **fields})
    own.class_weight = torch.tensor([0.8, 1.4])  # what training sets from the source-training labels
    return own


def randomised(module, seed=0):
    """Every parameter and statistic drawn anew, in eval mode; nothing stays 0 or 1 by its initialisation."""
    rng = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=rng))
        elif value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=rng) * 0.7)
    return module.eval()


def network_of(seed=0, rois=ROIS, **fields):
    own = method(**fields)
    return own, randomised(own.build(Shape(rois, 50, 0, 2, {})), seed)


def batch_of(seed=1, subjects=SUBJECTS, rois=ROIS):
    """Matrices that are not symmetric, so that a transposed one shows; the last ROI of the first subject is flat."""
    rng = torch.Generator().manual_seed(seed)
    fc, partial = torch.randn(subjects, rois, rois, generator=rng), torch.rand(subjects, rois, rois, generator=rng)
    partial = partial * (1 - torch.eye(rois))
    for matrices in (fc, partial):
        matrices[0, -1, :] = matrices[0, :, -1] = 0
    return Batch({"fc": fc, "partial": partial}, torch.zeros(subjects, 1), torch.arange(subjects) % 2, torch.zeros(subjects))


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def convolution(state, nodes, edges, rois, form):
    """One subject: a row of `nodes` and of `edges` for each of `rois`."""
    hidden = len(state["bias"])
    sent = []
    for h, roi in zip(nodes, rois, strict=True):
        belongs = np.maximum(state["communities.weight"][:, roi], 0)
        flat = state["mixture.weight"] @ belongs + state["mixture.bias"]
        sent.append([sum(h[d] * flat[d * hidden + e] for d in range(len(h))) for e in range(hidden)])
    sent = np.array(sent)
    out = []
    for i in range(len(nodes)):
        weights = {j: edges[i, j] for j in range(len(nodes)) if j != i and edges[i, j] != 0} | {i: 1.0}
        if form == "release":
            weights = dict(zip(weights, oracle.softmax(list(weights.values())), strict=True))
        total = state["bias"] + sum(weight * sent[j] for j, weight in weights.items())
        out.append(np.maximum(total, 0) if form == "paper" else total)
    return np.array(out)


def pooling(direction, nodes, ratio, form):
    """One subject: scores before the sigmoid, and positions kept in ascending order."""
    scores = np.array([oracle.dot(h, direction) / math.sqrt(oracle.dot(direction, direction)) for h in nodes])
    if form == "paper":
        scores = (scores - scores.mean()) / math.sqrt(((scores - scores.mean()) ** 2).mean() + 1e-5)
    ranked = sorted(range(len(nodes)), key=lambda i: (-scores[i], i))
    return scores, sorted(ranked[: math.ceil(ratio * len(nodes))])


def two_hop(edges):
    n = len(edges)
    joined = [[edges[i][j] + (i == j) for j in range(n)] for i in range(n)]
    return np.array([[sum(joined[i][k] * joined[k][j] for k in range(n)) * (i != j) for j in range(n)] for i in range(n)])


def readout(nodes):
    return np.array([max(column) for column in nodes.T] + [sum(column) / len(column) for column in nodes.T])


def whole(state, fc, partial, own):
    """One subject through the network: what `parts` returns."""
    found = {}
    nodes = convolution(oracle.under(state, "first"), fc, partial, range(len(fc)), own.form)
    found["scores"], kept = pooling(state["pool_first.direction"], nodes, own.ratio, own.form)
    first = np.array([nodes[i] * sigmoid(found["scores"][i]) for i in kept])
    edges = two_hop([[partial[i, j] for j in kept] for i in kept])
    nodes = convolution(oracle.under(state, "second"), first, edges, kept, own.form)
    found["scores_second"], again = pooling(state["pool_second.direction"], nodes, own.ratio, own.form)
    second = np.array([nodes[i] * sigmoid(found["scores_second"][i]) for i in again])
    found |= {"kept": kept, "kept_second": again, "fused": np.concatenate([readout(first), readout(second)])}
    x = found["fused"]
    for place in (0, 4):
        x = np.maximum(oracle.linear(oracle.under(state, f"classifier.{place}"), x), 0)
        x = oracle.batch_norm(oracle.under(state, f"classifier.{place + 2}"), x)
    return found | {"logits": oracle.linear(oracle.under(state, "classifier.8"), x)}


@FORMS
@pytest.mark.parametrize(("ratio", "count"), [(0.5, 4), (0.3, 3), (1.0, 7)])
def test_pooling_keeps_the_best_and_weighs_them_by_one_sigmoid(form, ratio, count):
    pool = randomised(RoiPooling(method(form=form, ratio=ratio)))
    nodes = np.random.default_rng(3).normal(size=(SUBJECTS, ROIS, 4))
    weighted, kept, scores = pool(torch.tensor(nodes).float())
    assert kept.shape == (SUBJECTS, count)
    for s in range(SUBJECTS):
        expected, places = pooling(numbers(pool)["direction"], nodes[s], ratio, form)
        agrees(scores[s], expected)
        assert kept[s].tolist() == places
        agrees(weighted[s], [h * sigmoid(score) for h, score in zip(nodes[s], expected, strict=True)])


def test_of_equal_scores_the_first_rois_are_kept():
    pool = randomised(RoiPooling(method()))
    nodes = torch.ones(2, 40, 4, requires_grad=True)
    weighted, kept, scores = pool(nodes)
    assert kept.tolist() == [list(range(20))] * 2
    (weighted.sum() + scores.square().sum()).backward()
    assert torch.isfinite(nodes.grad).all() and torch.isfinite(pool.direction.grad).all()


@FORMS
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_network(form, seed):
    own, network = network_of(seed, form=form)
    batch = batch_of(seed)
    given, state = network.parts(batch), numbers(network)
    for s in range(SUBJECTS):
        expected = whole(state, batch["fc"][s].double().numpy(), batch["partial"][s].double().numpy(), own)
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            agrees(given[name][s], value)
    assert torch.equal(network(batch), given["logits"])
    assert len({tuple(one) for one in given["kept"].tolist()}) > 1  # subjects differ in what is kept


def test_gradients_reach_the_scores_through_the_pooled_nodes():
    own, network = network_of(4)
    batch = batch_of(4)
    fc, partial, state = batch["fc"].double().numpy(), batch["partial"].double().numpy(), numbers(network)
    network(batch)[:, 1].sum().backward()
    for name in ("pool_first.direction", "pool_second.direction"):

        def logit(direction, name=name):
            return sum(whole(state | {name: direction}, fc[s], partial[s], own)["logits"][1] for s in range(SUBJECTS))

        slope = oracle.gradient(logit, state[name])
        assert np.abs(slope).max() > 0.01
        np.testing.assert_allclose(network.get_parameter(name).grad.numpy(), slope, rtol=1e-3, atol=1e-4)


@FORMS
def test_kernels_and_scores_belong_to_rois(form):
    """Another order of ROIs gives other logits, until the parameters are put into that order as well."""
    _, network = network_of(5, form=form, hidden=12)  # wide enough that no two nodes are dead, which would tie
    batch, order = batch_of(5), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    features = {name: value[:, order][:, :, order] for name, value in batch.features.items()}
    moved = dataclasses.replace(batch, features=features)
    before = network(batch)
    assert (network(moved) - before).abs().max() > 0.01
    with torch.no_grad():
        for layer in (network.first, network.second):
            layer.communities.weight.copy_(layer.communities.weight[:, order])
        for value in (network.first.mixture.weight, network.first.mixture.bias):
            value.copy_(value.view(ROIS, 12, -1)[order].reshape(value.shape))
    torch.testing.assert_close(network(moved), before, rtol=1e-4, atol=1e-4)


def topk(scores, ratio):
    """The equation on sorted sigmoids, of all subjects."""
    total = 0.0
    for row in scores:
        s = sorted((sigmoid(v) for v in row), reverse=True)
        k = math.ceil(ratio * len(s))
        total -= (sum(math.log(v + 1e-10) for v in s[:k]) + sum(math.log(1 - v + 1e-10) for v in s[k:])) / len(s)
    return total / len(scores)


def consistency(scores, label):
    total = 0.0
    for c in (0, 1):
        own = [[sigmoid(v) for v in row] for row, y in zip(scores, label, strict=True) if y == c]
        pairs = sum((x - y) ** 2 for a in own for b in own for x, y in zip(a, b, strict=True))
        total += pairs / max(len(own), 1) ** 2
    return total


@FORMS
@pytest.mark.parametrize("label", [[0, 1, 0, 1, 0, 1], [1, 1, 0, 1, 1, 1], [0] * 6])
def test_the_losses_are_the_weighted_equations(form, label):
    own, network = network_of(6, form=form, unit_weight=0.7, topk_weight=0.3, consistency_weight=0.2, label_smoothing=0.1)
    batch = dataclasses.replace(batch_of(6), label=torch.tensor(label))
    parts = {name: value.detach().double().numpy() for name, value in network.parts(batch).items()}
    directions = [numbers(network)[f"pool_{which}.direction"] for which in ("first", "second")]
    given = own.loss(network, batch)
    assert given.keys() == {"ce", "unit", "topk", "consistency"}
    agrees(given["ce"], oracle.cross_entropy(parts["logits"], label, [0.8, 1.4]))
    agrees(given["unit"], 0.7 * sum((math.sqrt(oracle.dot(w, w)) - 1) ** 2 for w in directions))
    agrees(given["topk"], 0.3 * (topk(parts["scores"], 0.5) + topk(parts["scores_second"], 0.5)))
    agrees(given["consistency"], 0.2 * consistency(parts["scores"], label))
    assert given["consistency"].item() > 0.01


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_scores_and_losses_stay_in_single_precision_under_autocast():
    own, network = network_of(10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, terms = network.parts(batch_of(10)), own.loss(network, batch_of(10))
    assert found["logits"].dtype == torch.bfloat16
    assert {value.dtype for value in [found["scores"], found["scores_second"], *terms.values()]} == {torch.float32}
    assert all(torch.isfinite(term) for term in terms.values())


def conditional_correlation(covariance, i, j):
    """Correlation of two ROIs given all others, by the covariance that is left of them; no inverse of the whole."""
    pair, rest = [i, j], [k for k in range(len(covariance)) if k not in (i, j)]
    across = covariance[np.ix_(pair, rest)]
    left = covariance[np.ix_(pair, pair)] - across @ np.linalg.solve(covariance[np.ix_(rest, rest)], across.T)
    return left[0, 1] / math.sqrt(left[0, 0] * left[1, 1])


def test_features_are_fisher_z_and_absolute_partial_correlations(monkeypatch):
    cohort = make_cohort("tiny", sizes={"a": 4, "b": 3}, n_rois=6, seed=1)
    series = [np.array(one) for one in cohort.series]
    series[1][:, 2] = 5.0  # a flat ROI
    series[4][:, 1:] = 0.0  # one ROI alone is not flat
    cohort = dataclasses.replace(cohort, series=series)
    given = method().features(cohort, torch.device("cpu"))
    monkeypatch.setattr(braingnn, "CHUNK", 3)  # seven subjects then come in three chunks
    pieces = method().features(cohort, torch.device("cpu"))
    assert given["partial"].dtype == torch.float32 and torch.equal(given["partial"], pieces["partial"])
    for s, covariance in enumerate(covariances(series)):
        expected, correlations = np.zeros((2, 6, 6))
        for i in range(6):
            for j in range(6):
                alive = i != j and np.ptp(series[s][:, i]) > 0 and np.ptp(series[s][:, j]) > 0
                expected[i, j] = abs(conditional_correlation(covariance, i, j)) if alive else 0.0
                correlations[i, j] = math.atanh(oracle.pearson(*series[s].T[[i, j]].astype(float))) if alive else 0.0
        agrees(given["partial"][s], expected)
        agrees(given["fc"][s], correlations)
        assert (given["partial"][s].numpy()[expected == 0] == 0).all()
    assert float(given["partial"][0].max()) > 0.1


def test_partial_correlations_are_taken_as_they_are_and_computed_from_others():
    cohort = make_cohort("tiny").select(range(4)).to_connectomes()
    computed = braingnn.partial_correlations(cohort.scans, torch.device("cpu"))
    for i, one in enumerate(computed.numpy()):
        precision = np.linalg.inv(covariances(cohort.scans)[i])
        spread = np.sqrt(np.diagonal(precision))
        expected = np.abs(precision / spread[:, None] / spread) * (1 - np.eye(len(one)))
        np.testing.assert_allclose(one, expected, atol=1e-6)
    signs = np.where(np.arange(len(one)) % 2, -1, 1)
    given = Connectomes.of([each * signs[:, None] * signs + np.eye(len(one)) for each in computed.numpy()], PARTIAL, len(one))
    np.testing.assert_allclose(braingnn.partial_correlations(given, torch.device("cpu")), computed, atol=1e-7)
