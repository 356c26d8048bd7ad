"""MetaExplainer: its parts and both terms on contrasts against loops, the dual update by its definition, who is in a batch."""

import copy
import dataclasses
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import make_cohort
from m2lgdg.connectivity import fisher_matrices
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.metaexplainer import (
    OF_ROWS,
    Encoder,
    LearnedConnectivity,
    MetaExplainer,
    class_means,
    contrast_maps,
    passed,
    spread,
    stability,
    unrecorded,
)
from m2lgdg.registry import create as make

torch.set_num_threads(1)
ROIS, INPUTS, SITES = 5, 2, 4
SMALL = {
    **{"length": 60, "channels": (3, 4, 2), "pool": 6, "hidden": 5, "embedding": 4, "heads": 2, "graph_widths": (6, 3)},
    **{"classifier_widths": (7, 4), "per_site": 4, "warmup": 0, "clip": 1e9, "attention": True},
}


def network_of(seed=0, **fields):
    own = MetaExplainer(**SMALL | fields)
    rng = np.random.default_rng(seed)
    fitted = {"mean": rng.normal(size=(ROIS, ROIS)), "scale": rng.uniform(0.5, 2, (ROIS, ROIS))}
    shape = Shape(ROIS, own.length, INPUTS, SITES, {name: value.astype(np.float32) for name, value in fitted.items()})
    return own, randomised(own.build(shape), seed)


def batch_for(own, sites=(2, 0, 3), seed=1):
    rng = torch.Generator().manual_seed(seed)
    n = len(sites) * own.per_site
    features = {"series": torch.randn(n, ROIS, own.length, generator=rng), "fc": torch.randn(n, ROIS, ROIS, generator=rng)}
    return Batch(
        features,
        torch.randn(n, INPUTS, generator=rng),
        label=torch.arange(n) % 2,
        site=torch.tensor(sites).repeat_interleave(own.per_site),
    )


def agrees(given, expected):
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else np.array(expected)
    np.testing.assert_allclose(given.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def dense(weight, bias, x):
    return np.array([sum(weight[o, i] * x[i] for i in range(len(x))) + bias[o] for o in range(len(bias))])


def leaky(x):
    return np.array([v if v > 0 else 0.2 * v for v in x])


def softmax(x):
    return np.exp(x) / sum(np.exp(x))


def encoded(state, own, series):
    """(roi, time) -> (roi, feature), by loops."""
    rows = []
    for one in series:
        x = [(one - one.mean()) / math.sqrt(one.var() + 1e-5)]
        for layer, stride in zip((0, 3, 6), (2, 1, 1), strict=True):
            weight, bias = state[f"convolutions.{layer}.weight"][..., 0], state[f"convolutions.{layer}.bias"]
            norm = {k: state[f"convolutions.{layer + 1}.{k}"] for k in ("weight", "bias", "running_mean", "running_var")}
            found = []
            for o in range(len(bias)):
                steps = (len(x[0]) - weight.shape[2]) // stride + 1
                line = [
                    bias[o] + sum(weight[o, i, k] * x[i][t * stride + k] for i in range(len(x)) for k in range(weight.shape[2]))
                    for t in range(steps)
                ]
                scale = norm["weight"][o] / math.sqrt(norm["running_var"][o] + 1e-5)
                found.append(np.array([max(0.0, (v - norm["running_mean"][o]) * scale + norm["bias"][o]) for v in line]))
            x = found
        pooled = [max(line[p * own.pool : (p + 1) * own.pool]) for line in x for p in range(len(x[0]) // own.pool)]
        hidden = leaky(dense(state["output.0.weight"], state["output.0.bias"], pooled))
        rows.append(softmax(dense(state["output.2.weight"], state["output.2.bias"], hidden)))
    return np.array(rows)


def learned(state, nodes, heads):
    """(roi, feature) -> (roi, roi), by loops."""
    q, k, v = (
        np.array([dense(state[f"{n}.weight"], state[f"{n}.bias"], one) for one in nodes]) for n in ("query", "key", "value")
    )
    width = nodes.shape[1]
    size = width // heads
    joined = np.zeros_like(q)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        for i in range(len(nodes)):
            share = softmax(np.array([q[i, part] @ k[j, part] / math.sqrt(width) for j in range(len(nodes))]))
            joined[i, part] = sum(share[j] * v[j, part] for j in range(len(nodes)))
    return np.array([[sum(a * b) for b in joined] for a in joined])


def travelled(edges, nodes, kind, loops):
    """What each ROI gets, by loops."""
    n = len(edges)
    degree = [sum(abs(edges[i, j]) for j in range(n)) for i in range(n)]
    if kind == "release":
        return np.array([sum(edges[i]) * nodes[i] for i in range(n)])
    divide = {
        "size": lambda i, j: n,
        "row": lambda i, j: degree[i],
        "symmetric": lambda i, j: math.sqrt(degree[i] * degree[j]),
        "none": lambda i, j: 1,
    }
    spread = [sum(edges[i, j] / divide[kind](i, j) * nodes[j] for j in range(n)) for i in range(n)]
    return np.array([spread[i] + (nodes[i] if loops else 0) for i in range(n)])


@pytest.mark.parametrize(("length", "width"), [(20, 16), (25, 16), (32, 16), (50, 16), (100, 32), (200, 80)])
def test_any_length_has_an_encoder_and_flat_series_are_no_trouble(length, width):
    encoder = Encoder(length, MetaExplainer())
    assert encoder.output[0].in_features == width
    series = torch.randn(2, 3, length)
    series[:, 1] = 0
    series.requires_grad_()
    encoder(series)[:, :, 0].sum().backward()
    assert torch.isfinite(series.grad).all()


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("kind", ["size", "row", "symmetric", "none", "release"])
def test_message_passing_against_loops(kind, loops):
    draw = torch.Generator().manual_seed(0)
    edges, nodes = torch.randn(2, ROIS, ROIS, generator=draw), torch.randn(2, ROIS, 3, generator=draw)
    expected = [travelled(e, x, kind, loops) for e, x in zip(edges.double().numpy(), nodes.double().numpy(), strict=True)]
    agrees(passed(edges, nodes, kind, loops), expected)
    lonely = torch.zeros(1, ROIS, ROIS, requires_grad=True)
    passed(lonely, nodes[:1], kind, loops).sum().backward()
    assert torch.isfinite(lonely.grad).all()


def test_the_whole_network_against_loops():
    own, network = network_of()
    batch, state = batch_for(own, sites=(0,)), numbers(network)
    mean, scale = network.mean.double().numpy(), network.scale.double().numpy()
    expected = {"connectivity": [], "fused": [], "logits": []}
    for series, fc, inputs in zip(*(v.double().numpy() for v in (batch.series, batch["fc"], batch.phenotypes)), strict=True):
        edges = learned(numbers(network.connectivity), encoded(numbers(network.encoder), own, series), own.heads)
        nodes = (fc - mean) / scale
        for i, layers in enumerate(((0, 2), (0,), (0, 2))):
            nodes = travelled(edges, nodes, "size", True)
            for j in layers:
                weight, bias = state[f"layers.{i}.{j}.weight"], state[f"layers.{i}.{j}.bias"]
                nodes = np.array([leaky(dense(weight, bias, one)) for one in nodes])
            norm = [state[f"norms.{i}.{k}"][:, None] for k in ("running_mean", "running_var", "weight", "bias")]
            nodes = (nodes - norm[0]) / np.sqrt(norm[1] + 1e-5) * norm[2] + norm[3]
        x = nodes.flatten()
        for i in (1, 3):
            x = leaky(dense(state[f"fuse.{i}.0.weight"], state[f"fuse.{i}.0.bias"], x))
        expected["connectivity"].append(edges)
        expected["fused"].append(x)
        expected["logits"].append(dense(state["classifier.weight"], state["classifier.bias"], [*x, *inputs]))
    parts = network.parts(batch)
    assert parts.keys() == expected.keys()
    for name, value in expected.items():
        agrees(parts[name], value)
    agrees(network(batch), expected["logits"])


def contrasts(edges, label, per_site):
    """Maps of the sites in a row, by loops."""
    maps = []
    for start in range(0, len(label), per_site):
        rows = range(start, start + per_site)
        means = []
        for one in (0, 1):
            members = [i for i in rows if label[i] == one]
            means.append(sum(edges[i] for i in members) / len(members))
        delta = np.abs(means[0] - means[1])
        maps.append(delta / delta.sum())
    return maps


def entropy(maps):
    """Mean entropy in units of that of equal edges."""
    return np.mean([-sum(p * math.log2(p) for p in one.flatten()) / math.log2(one.size) for one in maps])


def dice(maps):
    pairs = [(a, b) for i, a in enumerate(maps) for b in maps[i + 1 :]]
    return sum(1 - 2 * (a * b).sum() / ((a**2).sum() + (b**2).sum()) for a, b in pairs) / len(pairs)


def test_contrast_maps_and_their_stability_against_loops():
    draw = torch.Generator().manual_seed(0)
    edges, label = torch.randn(18, ROIS, ROIS, generator=draw), torch.tensor([0, 1, 1, 0, 1, 0] * 2 + [0, 0, 0, 0, 1, 1])
    expected = contrasts(edges.double().numpy(), label.tolist(), 6)
    means, count = class_means(edges, label, 6)
    assert count.tolist() == [[3, 3], [3, 3], [4, 2]]
    agrees(means[2, 1], edges[16:].mean(dim=0))
    agrees(contrast_maps(means), expected)
    agrees(stability(contrast_maps(means)), dice(expected))
    agrees(spread(contrast_maps(means)), entropy(expected))
    assert float(stability(contrast_maps(means)[:1])) == 0 and float(spread(contrast_maps(means)[:0])) == 0
    agrees(contrast_maps(7 * means), expected)  # whatever the size of the connectivity
    agrees(stability(contrast_maps(means[[1, 1]])), 0.0)  # equal maps
    single = torch.zeros(1, 2, ROIS, ROIS)
    single[0, 0, 1, 2] = 3.0
    agrees(spread(contrast_maps(single)), 0.0)  # one edge alone
    agrees(spread(torch.full((2, ROIS, ROIS), 1 / ROIS**2)), 1.0)  # all edges alike
    alike = torch.zeros(2, 2, ROIS, ROIS, requires_grad=True)  # nothing tells the classes apart
    (stability(contrast_maps(alike)) + spread(contrast_maps(alike))).backward()
    assert torch.isfinite(alike.grad).all()


@pytest.mark.long
def test_both_terms_change_in_training_and_with_their_weights():
    """They did not, when each column was standardised: sparsity stayed within 1 % and stability within 2 %."""
    source = make_cohort("tiny", sizes={"a": 24, "b": 24, "c": 24}, seed=2)
    fields = dict(MetaExplainer.variants["small"]) | {"length": 40, "epochs": 30, "patience": 30, "warmup": 1}
    fields |= {"steps_per_epoch": 8, "learning_rate": 5e-3}

    def last(**weights):
        own = make("metaexplainer", **fields | weights).fit(source, seed=0)
        ends = own.facts_["history"][0], own.facts_["history"][-1]
        return [[one["sparsity"] / own.sparsity_weight, one["stability"] / own.stability_weight] for one in ends]

    first, plain = np.array(last())
    assert (plain / first < [0.95, 0.5]).all()
    sparse = np.array(last(sparsity_weight=1.0))[1]
    assert sparse[0] < 0.5 * plain[0]
    dense, unstable = np.array(last(sparsity_weight=1e-6))[1], np.array(last(stability_weight=1e-6))[1]
    assert plain[0] < 0.9 * dense[0]
    assert plain[1] < 0.1 * unstable[1]


def test_edges_are_inner_products_of_the_features_unless_attention_comes_first():
    nodes = torch.rand(2, ROIS, 4, generator=torch.Generator().manual_seed(0))
    expected = [[[oracle.dot(a, b) for b in one] for a in one] for one in nodes.double().numpy()]
    agrees(network_of(attention=False)[1].connectivity(nodes), expected)
    assert not list(network_of(attention=False)[1].connectivity.parameters())
    assert not MetaExplainer().attention and isinstance(network_of(attention=True)[1].connectivity, LearnedConnectivity)


def ready(**fields):
    own, network = network_of(**fields)
    optimizer = own.optimizer(network)
    own._inner, own.epoch = 0, 0
    return own, network, optimizer


def test_both_terms_are_weighted_means_on_unmixed_subjects_and_the_entropy_is_of_mixed_ones(monkeypatch):
    own, network, _ = ready(sparsity_weight=0.7, stability_weight=0.4, mixup=0.5)
    batch = batch_for(own)
    seen = []
    monkeypatch.setattr(MetaExplainer, "mixing", lambda self, b: seen.append(MIXING(self, b)) or seen[-1])
    terms = own.loss(network, batch)
    (share, partner) = seen[0]
    other = batch.take(partner)
    maps = contrasts(network.parts(batch)["connectivity"].detach().double().numpy(), batch.label.tolist(), own.per_site)
    agrees(terms["sparsity"], 0.7 * entropy(maps))
    agrees(terms["stability"], 0.4 * dice(maps))
    phenotypes = share * batch.phenotypes + (1 - share) * other.phenotypes
    mixed = {"batch": Batch({}, phenotypes, batch.label, batch.site)}
    edges = [network.parts(one)["connectivity"] for one in (batch, other)]  # the series themselves are never mixed
    mixed |= {"edges": share * edges[0] + (1 - share) * edges[1], "fc": share * batch["fc"] + (1 - share) * other["fc"]}
    log = torch.log_softmax(network.decide(**mixed)["logits"], dim=1)
    rows = torch.arange(len(batch))
    agrees(terms["ce"], -(share * log[rows, batch.label] + (1 - share) * log[rows, other.label]).mean().detach())
    plain = make("metaexplainer", **SMALL, mixup=0.0).loss(network, batch)
    agrees(plain["ce"], -torch.log_softmax(network(batch), dim=1)[rows, batch.label].mean().detach())


MIXING = MetaExplainer.mixing


def test_subjects_are_mixed_with_others_of_their_site():
    own = MetaExplainer(**SMALL)
    batch = batch_for(own)
    torch.manual_seed(0)
    shares = set()
    for _ in range(5):
        share, partner = own.mixing(batch)
        other = batch.take(partner)
        shares.add(share)
        assert 0 < share < 1
        assert torch.equal(other.site, batch.site)
        for n in (0, 2, 3):
            here = batch.site == n
            assert sorted(other["fc"][here][:, 0, 1].tolist()) == sorted(batch["fc"][here][:, 0, 1].tolist())
        assert not torch.equal(other["fc"], batch["fc"])
    assert len(shares) == 5


def test_a_site_remembers_its_class_means_without_a_gradient():
    own, network, _ = ready(memory=0.3)
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(12, ROIS, ROIS, generator=draw) for _ in range(2))
    batch = batch_for(own)
    one_class = dataclasses.replace(batch, label=torch.cat([batch.label[:8], torch.ones(4).long()]))
    agrees(own.remembered(network, first, one_class), class_means(first, batch.label, 4)[0][:2])
    assert network.known.tolist() == [True, False, True, False]
    second.requires_grad_()
    again = own.remembered(network, second, batch)
    now = class_means(second, batch.label, 4)[0]
    agrees(again[:2], (0.3 * class_means(first, batch.label, 4)[0][:2] + 0.7 * now[:2]).detach())
    agrees(again[2], now[2].detach())  # seen for the first time
    assert not network.history.requires_grad
    agrees(network.history[[2, 0, 3]], again.detach())
    again[0, 0].sum().backward()
    agrees(second.grad[[0, 2]].mean(), 0.7 / 2)


def test_without_both_classes_anywhere_only_the_entropy_is_left():
    own, network, _ = ready()
    batch = dataclasses.replace(batch_for(own), label=torch.ones(12).long())
    terms = own.loss(network, batch)
    assert terms["sparsity"].item() == terms["stability"].item() == 0
    assert terms["ce"].item() > 0


def test_the_dual_update_is_its_definition_and_only_outer_subjects_reach_the_running_statistics():
    own, network, optimizer = ready(dropout=0.0, mixup=0.0, learning_rate=0.01, memory=0.0)
    network.train()
    own._inner = 8
    by_hand = copy.deepcopy(network)  # holds the weights; its optimizers are made here
    moments = {}
    outer_step = torch.optim.Adam(by_hand.parameters(), lr=0.01, weight_decay=1e-4)
    for seed in range(3):  # later steps have moments of the trial's as well
        batch = batch_for(own, sites=(1, 3, 0, 2), seed=seed)
        inner, outer = batch.take(torch.arange(8)), batch.take(torch.arange(8, 16))
        terms = own.step(network, batch, optimizer)
        assert terms.keys() == {"trial", "ce", "sparsity", "stability"}
        fast = copy.deepcopy(by_hand)
        trial = torch.optim.Adam(fast.parameters(), lr=0.01, weight_decay=1e-4)
        if moments:
            trial.load_state_dict(moments)
        with unrecorded(fast):
            torch.nn.functional.cross_entropy(fast(inner), inner.label).backward()
        trial.step()
        moments = trial.state_dict()
        fast.zero_grad()
        parts = fast.parts(outer)
        maps = contrast_maps(class_means(parts["connectivity"], outer.label, 4)[0])
        loss = torch.nn.functional.cross_entropy(parts["logits"], outer.label) + 0.1 * spread(maps) + 0.03 * stability(maps)
        loss.backward()
        for value, other in zip(by_hand.parameters(), fast.parameters(), strict=True):
            value.grad = other.grad
        outer_step.step()
        for value, other in zip(by_hand.buffers(), fast.buffers(), strict=True):
            value.copy_(other)
    for (name, given), expected in zip(network.state_dict().items(), by_hand.state_dict().values(), strict=True):
        np.testing.assert_allclose(given, expected, atol=1e-5, err_msg=name)
    assert {int(v) for name, v in network.state_dict().items() if name.endswith("tracked")} == {3}


def test_a_mixed_pass_leaves_the_running_statistics_alone():
    states = []
    for mixup in (0.0, 1.0):
        own, network, _ = ready(mixup=mixup)
        torch.manual_seed(0)
        own.loss(network.train(), batch_for(own))
        states.append({name: value.clone() for name, value in network.encoder.named_buffers()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(value, dict(network_of()[1].encoder.named_buffers())[name]) for name, value in states[0].items())


def test_small_sites_are_inner_only_and_few_sites_are_halved():
    own = make("metaexplainer", per_site=4, steps_per_epoch=30, inner_sites=2, outer_sites=3)
    site = torch.cat([torch.full((size,), n) for n, size in enumerate([20, 20, 20, 20, 6, 1])])
    label = torch.cat([torch.arange(80) % 2, torch.tensor([0, 1, 1, 1, 1, 1, 1])])
    met = set()
    for rows in own.batches(site, label, torch.Generator().manual_seed(0)):
        there = site[rows].view(-1, 4)
        assert (there == there[:, :1]).all()
        order = there[:, 0].tolist()
        assert len(set(order)) == 5
        assert own._inner == 8
        assert set(order[2:]) <= {0, 1, 2, 3}
        assert (label[rows].view(-1, 4)[2:].sum(dim=1) == 2).all()
        met |= set(order[:2])
    assert met == {0, 1, 2, 3, 4, 5}
    for sites, inner in ((1, 0), (2, 1), (3, 1), (4, 2)):
        some = site < sites
        for rows in own.batches(site[some], label[some], torch.Generator().manual_seed(0)):
            assert own._inner == 4 * inner
            assert len(rows) == 4 * sites
    assert len(own.batches(site[80:], label[80:], torch.Generator().manual_seed(0))[0]) == 8  # nobody is fit to be outer
    full = make("metaexplainer")
    rows = full.batches(torch.arange(170) % 17, torch.arange(170) // 17 % 2, torch.Generator().manual_seed(0))[0]
    assert (full._inner, len(rows)) == (60, 130)


def test_edges_are_scaled_by_source_training_subjects_alone():
    cohort = make_cohort("tiny", seed=3)
    own = MetaExplainer(length=30)
    features = own.features(cohort, torch.device("cpu"))
    assert features["series"].shape == (len(cohort), 12, 30)
    np.testing.assert_array_equal(features["fc"], fisher_matrices(cohort.series))
    some = features["fc"][::2]
    fitted = own.prepare(cohort.select(np.arange(0, len(cohort), 2)), {"fc": some})
    np.testing.assert_allclose(fitted["mean"], some.double().numpy().mean(axis=0), atol=1e-6)
    spread = some.double().numpy().std(axis=0)
    np.testing.assert_allclose(fitted["scale"], spread + np.eye(12), atol=1e-6)  # the diagonal never varies


def test_the_number_of_parameters_and_what_is_saved():
    fitted = {name: np.ones((116, 116), dtype=np.float32) for name in ("mean", "scale")}
    own = MetaExplainer(attention=True)
    network = own.build(Shape(116, 200, 3, 17, fitted))
    names = set(network.state_dict())
    own.optimizer(network)
    assert set(network.state_dict()) == names
    assert not [name for name in names if name.split(".")[0] not in dict(network.named_children())]
    encoder = (4 + 1) * 32 + (32 * 8 + 1) * 32 + (32 * 8 + 1) * 16 + 2 * (32 + 32 + 16) + 81 * 32 + 33 * 8
    graph = 3 * 9 * 8 + 3 * 117 * 116 + 117 * 64 + 65 * 8 + 3 * 2 * 116
    classifier = (8 * 116 + 1) * 256 + 257 * 32 + (32 + 3 + 1) * 2
    assert sum(value.numel() for value in network.parameters()) == encoder + graph + classifier == 311_268


def test_on_connectomes_the_graph_is_learned_from_rows_of_fc():
    """Equations of the encoder without convolutions; no series is read, and the model says so."""
    cohort = make_cohort("tiny", seed=1).to_connectomes()
    fields = dict(MetaExplainer.variants["small"]) | {"epochs": 1, "warmup": 0, "steps_per_epoch": 1}
    method = make("metaexplainer", **fields).fit(cohort, seed=0)
    assert method.facts_["notes"][-1] == OF_ROWS
    network = method.network()
    batch = Batch(method.features(cohort, torch.device("cpu")), torch.zeros(len(cohort), 0), torch.zeros(len(cohort)), None)
    assert set(batch.features) == {"fc"}
    edges = network.parts(batch)["connectivity"].detach().numpy()
    weights = numbers(network.encoder.output)
    rows = (fisher_matrices(cohort.scans) - method.state_["fitted.mean"]) / method.state_["fitted.scale"]
    hidden = rows @ weights["0.weight"].T + weights["0.bias"]
    scores = np.where(hidden > 0, hidden, 0.2 * hidden) @ weights["2.weight"].T + weights["2.bias"]
    features = np.exp(scores - scores.max(axis=2, keepdims=True))
    features /= features.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(edges, features @ features.transpose(0, 2, 1), atol=1e-5)
    assert np.ptp(edges[0]) > 0
