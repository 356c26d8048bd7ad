"""M2DC with random weights against loops over its equations, its three batch norms, episodes, the inner step, an overfit."""

import copy
import dataclasses
import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import InputError, make
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.m2dc import (
    M2DC,
    MetaBatchNorm,
    distances,
    edge_density,
    windows_of,
)
from m2lgdg.methods.msstan import strongest_edges, window_correlations

torch.set_num_threads(1)
ROIS, LENGTH, SHOTS = 7, 24, 2
STILL = {"dropout": 0.0, "head_dropout": 0.0}


def method(**fields):
    sizes = {"length": LENGTH, "hidden": 6, "layers": 2, "stride": 4, "shots": SHOTS, "embedding": 3}
    own = M2DC(**sizes | {"clock": True, "crop": 1.0} | fields)  # the parts that the default leaves out
    own.class_weight = torch.tensor([0.2, 9.0])  # must not be looked at
    return own


def network_of(seed=0, rois=ROIS, **fields):
    own = method(**fields)
    return own, randomised(own.build(Shape(rois, own.length, 0, 3, {})), seed)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scans(subjects, rois=ROIS, length=LENGTH, seed=1):
    return drawn(subjects, rois, length, seed=seed).cumsum(-1) / 2


def episode(sites=3, seed=1, **shape):
    """Sites one after the other, two subjects of each class in each."""
    count = sites * 2 * SHOTS
    label = (torch.arange(count) % (2 * SHOTS) >= SHOTS).long()
    return Batch({"series": scans(count, seed=seed, **shape)}, torch.zeros(count, 3), label, torch.arange(count) // (2 * SHOTS))


def agrees(given, expected, near=1e-5):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=near, atol=near)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, float)))


def normed(state, rows, training=False):
    """(row, width), by the rows' own mean and biased variance in training."""
    rows = np.array(rows)
    out = np.zeros_like(rows)
    for c in range(rows.shape[1]):
        mean, var = state.get("running_mean", [0] * 99)[c], state.get("running_var", [1] * 99)[c]
        if training:
            mean = sum(rows[:, c]) / len(rows)
            var = sum((v - mean) ** 2 for v in rows[:, c]) / len(rows)
        out[:, c] = (rows[:, c] - mean) / math.sqrt(var + 1e-5) * state["weight"][c] + state["bias"][c]
    return out


def gin(state, nodes, graphs, training=False):
    """(window, roi, width) of all subjects: rows of the batch norm are all ROIs of all windows."""
    rows = []
    for h, graph in zip(nodes, graphs, strict=True):
        for i in range(len(h)):
            rows.append(sum(graph[i, j] * h[j] for j in range(len(h))) + state["epsilon"][0] * h[i])
    rows = np.array(rows)
    for place in (0, 3):
        rows = oracle.linear(oracle.under(state, f"mlp.{place}"), rows)
        rows = np.maximum(normed(oracle.under(state, f"mlp.{place + 1}"), rows, training), 0)
    return rows.reshape(np.shape(nodes))


def sero(state, nodes, training=False):
    means = np.array([sum(h) / len(h) for h in nodes])
    inner = normed(oracle.under(state, "embed.1"), oracle.linear(oracle.under(state, "embed.0"), means), training)
    shares = sigmoid(oracle.linear(oracle.under(state, "attend"), oracle.gelu(inner)))
    return np.array([sum(a[n] * h[n] for n in range(len(h))) / len(h) for a, h in zip(shares, nodes, strict=True)])


def temporal(state, x):
    x = oracle.layer_norm(oracle.under(state, "norm_attention"), oracle.attention(oracle.under(state, "attention"), x, x, 1))
    wide = np.maximum(oracle.linear(oracle.under(state, "feed.0"), x), 0)
    return oracle.layer_norm(oracle.under(state, "norm_feed"), x + oracle.linear(oracle.under(state, "feed.3"), wide))


def clock(state, series):
    """(roi, time) -> (time, width), by the equations of an LSTM."""
    width = state["weight_hh_l0"].shape[1]
    h, c, out = np.zeros(width), np.zeros(width), []
    for t in range(series.shape[1]):
        gates = state["weight_ih_l0"] @ series[:, t] + state["bias_ih_l0"] + state["weight_hh_l0"] @ h + state["bias_hh_l0"]
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.array(out)


def graph_of(window, rank=70):
    """Binary: correlations above the percentile of the whole matrix, ones on its diagonal; self loops."""
    n = len(window)
    matrix = np.array([[1.0 if i == j else oracle.pearson(window[i], window[j]) for j in range(n)] for i in range(n)])
    threshold = oracle.percentile(matrix.ravel().tolist(), rank)
    return np.array([[float(i == j or matrix[i, j] > threshold) for j in range(n)] for i in range(n)])


def encode(state, series, points=12, stride=4, layers=2, training=False):
    """(subject, roi, time) of one site -> (layer, subject, 3 width)."""
    nodes, graphs, windows = [], [], 0
    for one in series:
        codes, rois = clock(oracle.under(state, "clock"), one), len(one)
        starts = range(0, one.shape[1] - points, stride)
        windows = len(starts)
        for start in starts:
            graphs.append(graph_of(one[:, start : start + points]))
            given = [np.concatenate([np.eye(rois)[n], codes[start + points - 1]]) for n in range(rois)]
            nodes.append(oracle.linear(oracle.under(state, "start"), np.array(given)))
    found = []
    for place in range(layers):
        nodes = gin(oracle.under(state, f"graphs.{place}"), nodes, graphs, training)
        read = sero(oracle.under(state, f"readouts.{place}"), nodes, training)
        rows = []
        for s in range(len(series)):
            own = slice(s * windows, (s + 1) * windows)
            q = temporal(oracle.under(state, f"temporal.{place}"), read[own])
            parts = [np.concatenate([nodes[own][w].mean(axis=0), read[own][w], q[w]]) for w in range(windows)]
            rows.append(sum(parts))
        found.append(rows)
    return np.array(found)


def plain(state, encoded, training=False):
    return np.array([normed(oracle.under(state, f"norms.{p}"), rows, training) for p, rows in enumerate(encoded)])


def classify(state, latent):
    return sum(oracle.linear(oracle.under(state, f"heads.{place}"), rows) for place, rows in enumerate(latent))


def latents(layers):
    """(layer, subject, width) -> (subject, layer width)."""
    return np.array([np.concatenate([layer[s] for layer in layers]) for s in range(len(layers[0]))])


@pytest.mark.parametrize(
    ("length", "points", "stride", "windows"), [(200, 50, 10, 15), (100, 50, 10, 5), (50, 25, 10, 3), (20, 10, 9, 2)]
)
def test_windows(length, points, stride, windows):
    assert windows_of(length, 50, 10) == (points, stride)
    assert window_correlations(scans(1, 3, length), points, stride).shape[1] == windows


def test_any_length_has_two_windows_and_impossible_ones_are_refused():
    for length, window, stride in itertools.product(range(20, 80), (3, 20, 50, 500), (1, 5, 50)):
        points, step = windows_of(length, window, stride)
        assert 3 <= points <= length // 2 and len(range(0, length - points, step)) >= 2
    for window, stride in [(2, 5), (50, 0)]:
        with pytest.raises(InputError, match="does not give two windows of at least three points"):
            method(window=window, stride=stride).build(Shape(5, LENGTH, 0, 2, {}))


@pytest.mark.parametrize("rois", [3, 5, 8, 11, 16])
@pytest.mark.parametrize("rank", [50, 70, 85])
def test_edges_are_entries_above_the_percentile_of_the_whole_matrix(rois, rank):
    series = scans(2, rois, 15)
    found = strongest_edges(window_correlations(series, 14, 3), edge_density(rois, rank))
    np.testing.assert_array_equal(found[:, 0], [graph_of(one[:, :14], rank) for one in series.double().numpy()])


@pytest.mark.parametrize("training", [True, False])
def test_the_plain_batch_norm_and_its_running_statistics(training):
    norm, x = randomised(MetaBatchNorm(5)).train(training), drawn(6, 5) * 2 + 1
    before, rows = numbers(norm), x.double().numpy()
    agrees(norm(x), normed(before, rows, training))
    share = 0.1 if training else 0.0
    agrees(norm.running_mean, (1 - share) * before["running_mean"] + share * rows.mean(axis=0))
    agrees(norm.running_var, (1 - share) * before["running_var"] + share * rows.var(axis=0, ddof=1))


@pytest.mark.parametrize("spread", ["sd", "variance"])
def test_sampling_towards_the_sites_that_were_met(spread):
    """The same draws again: first the noise of all sites, then one share for all."""
    norm, x = randomised(MetaBatchNorm(5)).train(), drawn(4, 5)
    met = [3 * drawn(6, 5, seed=1) + 2, 0.5 * drawn(3, 5, seed=2)]
    before = copy.deepcopy(norm.state_dict())
    torch.manual_seed(3)
    given = norm.sampled(x, [norm.statistics(one, spread) for one in met])
    torch.manual_seed(3)
    noise, share = torch.randn(2, 4, 5).double().numpy(), torch.rand(()).item()
    assert 0.02 < share < 0.98
    for k, site in enumerate(one.double().numpy() for one in met):
        mixture = np.zeros((4, 5))
        for i, c in itertools.product(range(4), range(5)):
            mean = sum(site[:, c]) / len(site)
            variance = sum((v - mean) ** 2 for v in site[:, c]) / len(site)
            sample = mean + (math.sqrt(variance) if spread == "sd" else variance) * noise[k, i, c]
            mixture[i, c] = share * sample + (1 - share) * x[i, c].item()
        agrees(given[k], normed(numbers(norm), mixture, training=True))
    assert given.shape == (2, 4, 5)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_the_share_is_uniform_and_nothing_of_it_is_plain_all_of_it_forgets_the_subject():
    norm, x, others = randomised(MetaBatchNorm(5)).train(), drawn(4, 5), drawn(2, 4, 5, seed=1)
    torch.testing.assert_close(norm.mixed(x, others, torch.tensor(0.0)), norm(x).expand(2, 4, 5))
    torch.testing.assert_close(norm.mixed(x, others, torch.tensor(1.0)), torch.stack([norm(one) for one in others]))
    shares = []
    norm.mixed = lambda features, drawn, share: shares.append(share.item())
    site = norm.statistics(x, "sd")
    for _ in range(400):
        norm.sampled(x, [site])
    np.testing.assert_allclose(np.quantile(shares, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.08)


def test_the_met_sites_get_no_gradient_from_sampling_but_the_query_does():
    norm, x, met = randomised(MetaBatchNorm(5)).train(), drawn(4, 5).requires_grad_(), drawn(6, 5, seed=1).requires_grad_()
    norm.sampled(x, [norm.statistics(met, "sd")]).square().sum().backward()
    assert met.grad is None and x.grad.any() and norm.weight.grad.any()


def pairs(query, support, query_label, support_label, margin):
    intra, inter = [], []
    for e, y in zip(query, query_label, strict=True):
        for other, z in zip(support, support_label, strict=True):
            if y == z:
                intra.append(1 - oracle.dot(e, other) / math.sqrt(oracle.dot(e, e) * oracle.dot(other, other)))
            else:
                inter.append(max(0.0, margin - math.sqrt(sum((e - other) ** 2))) ** 2)
    return sum(intra) / max(1, len(intra)), sum(inter) / max(1, len(inter))


def test_distances_without_pairs_or_at_one_point_have_finite_gradients():
    query, support = torch.zeros(2, 3, requires_grad=True), torch.zeros(3, 3, requires_grad=True)
    for same in (torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)):
        intra, inter = distances(query, support, same, 10.0)
        assert (intra.item(), inter.item()) == ((1.0, 0.0) if same.all() else (0.0, 100.0))
        (intra + inter).backward()
    assert query.grad.isfinite().all() and support.grad.isfinite().all()


def autoencoder(state, rows):
    embedding = oracle.linear(oracle.under(state, "encoder"), rows)
    inner = np.maximum(normed(oracle.under(state, "decoder.0"), embedding, training=True), 0)
    back = oracle.linear(oracle.under(state, "decoder.2"), inner)
    return embedding, [sum((a - b) ** 2) / len(a) for a, b in zip(back, rows, strict=True)]


@pytest.mark.parametrize("seed", range(2))
def test_the_whole_network_in_eval_mode(seed):
    _, network = network_of(seed)
    batch = episode(1, seed=seed)
    batch.series[0, 5] = 0.0
    state = numbers(network)
    latent = plain(state, encode(state, batch.series.double().numpy()))
    given = network.parts(batch)
    agrees(given["fused"], latents(latent))
    agrees(given["logits"], classify(state, latent))
    agrees(network(batch), classify(state, latent))
    assert given["logits"].std(dim=0).min() > 1e-3


@pytest.mark.parametrize("fields", [{}, {"spread": "variance", "margin": 3.0}, {"sampling": False}, {"constraint_weight": 0.0}])
def test_the_losses_of_an_episode(fields):
    """Every site by its own statistics; the query in a copy for each of the two sites, by the same draws again."""
    own, network = network_of(5, **{"constraint_weight": 0.3, "label_smoothing": 0.1, **STILL, **fields})
    batch = episode()
    state, series, label = numbers(network), batch.series.double().numpy(), batch.label.tolist()
    encoded = [encode(state, series[4 * k : 4 * k + 4], training=True) for k in range(3)]
    support = [plain(state, one, training=True) for one in encoded[:2]]
    network.train()
    losses = [
        oracle.cross_entropy(classify(state, one) / 0.5, label[4 * k : 4 * k + 4], [1, 1]) for k, one in enumerate(support)
    ]
    agrees(own.support_loss(network, batch), sum(losses) / 2)
    torch.manual_seed(4)
    given = own.loss(network, batch)
    torch.manual_seed(4)
    copies = [plain(state, encoded[2], training=True)]
    if own.sampling:
        copies = [np.zeros_like(encoded[2]) for _ in range(2)]
        for place in range(2):
            noise, share = torch.randn(2, 4, 18).double().numpy(), torch.rand(()).item()
            for k in range(2):
                met = encoded[k][place]
                scale = met.std(axis=0) if own.spread == "sd" else met.var(axis=0)
                mixture = share * (met.mean(axis=0) + scale * noise[k]) + (1 - share) * encoded[2][place]
                copies[k][place] = normed(oracle.under(state, f"norms.{place}"), mixture, training=True)
    logits = np.concatenate([classify(state, one) for one in copies])
    asked = label[8:] * len(copies)
    agrees(given["query"], oracle.cross_entropy(logits / 0.5, asked, [1, 1]), 1e-4)
    if not own.constraint_weight:
        assert given.keys() == {"query"}
        return
    rows = np.concatenate([latents(one) for one in support + copies])
    embedding, error = autoencoder(oracle.under(state, "autoencoder"), rows)
    intra, inter = pairs(embedding[8:], embedding[:8], asked, label[:8], own.margin)
    agrees(given["intra"], 0.3 * intra, 1e-4)
    agrees(given["inter"], 0.3 * inter, 1e-4)
    agrees(given["reconstruction"], 0.3 * (sum(error[:8]) / 8 + sum(error[8:]) / len(asked)), 1e-4)
    assert given.keys() == {"query", "intra", "inter", "reconstruction"}


@pytest.mark.parametrize("support_weight", [0.0, 0.7])
def test_the_inner_step_is_taken_back_bit_for_bit(support_weight):
    own, network = network_of(2, support_weight=support_weight, clip=0.5, inner_share=10.0, **STILL)
    batch, optimizer = episode(), own.optimizer(network.train())
    optimizer.param_groups[0]["lr"] = 0.003  # where the schedule stands
    after_support = copy.deepcopy(network)
    support = own.support_loss(after_support, batch)  # moves the running statistics
    learned = [name for name, _ in network.named_parameters() if "autoencoder" not in name]
    slopes = dict(zip(learned, torch.autograd.grad(support, after_support.predictor()), strict=True))
    ahead = copy.deepcopy(after_support)
    with torch.no_grad():
        for name, value in ahead.named_parameters():
            value -= 10.0 * 0.003 * slopes.get(name, torch.zeros(()))
    torch.manual_seed(6)
    terms = own.loss(ahead, batch)
    sum(terms.values()).backward()
    expected = {n: p.grad + support_weight * slopes.get(n, torch.zeros(())) for n, p in ahead.named_parameters()}
    length = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert length > own.clip  # so that clipping shows

    seen = []
    optimizer.step = lambda: seen.append(
        (copy.deepcopy(network.state_dict()), {name: p.grad.clone() for name, p in network.named_parameters()})
    )
    torch.manual_seed(6)
    given = own.step(network, batch, optimizer)
    ((state, gradients),) = seen
    for name, value in after_support.state_dict().items():
        assert torch.equal(state[name], value), name
    for name, gradient in gradients.items():  # those of biases before a batch norm are rounding, up to 2e-6
        torch.testing.assert_close(gradient, expected[name] * own.clip / length, rtol=1e-4, atol=1e-5, msg=name)
    assert given.keys() == terms.keys() | {"support"} and not any(value.requires_grad for value in given.values())
    agrees(given["support"], support_weight * support.item())
    assert not torch.equal(state["norms.0.running_mean"], numbers_before(own)["norms.0.running_mean"])


def numbers_before(own):
    return randomised(own.build(Shape(ROIS, LENGTH, 0, 3, {})), 2).state_dict()


def test_episodes_meet_sites_with_enough_subjects_of_both_classes():
    """Sites 0 to 3 have 9 of each class, 4 has 9 of one, 5 has 3 of the other class, 6 has one subject."""
    counts = [(9, 9)] * 4 + [(9, 0), (9, 3), (1, 0)]
    site = torch.tensor([n for n, (a, b) in enumerate(counts) for _ in range(a + b)])
    label = torch.tensor([y for a, b in counts for y in [0] * a + [1] * b])
    own, order = M2DC(), torch.Generator().manual_seed(0)
    batches, met = own.batches(site, label, order), set()
    assert len(batches) == 40
    for rows in batches:
        sites, labels = site[rows].view(3, 10), label[rows].view(3, 10)
        assert (sites == sites[:, :1]).all() and len(set(sites[:, 0].tolist())) == 3 and (labels.sum(dim=1) == 5).all()
        assert len(set(rows.tolist())) == 30
        met |= set(sites.flatten().tolist())
    assert met == {0, 1, 2, 3}
    assert not all(torch.equal(a, b) for a, b in zip(batches, own.batches(site, label, order), strict=True))  # anew

    def sites_of(*kept):
        rows = torch.isin(site, torch.tensor(kept))
        return {frozenset(site[rows][one].tolist()) for one in own.batches(site[rows], label[rows], order)}

    assert sites_of(0, 1, 4, 5, 6) == {frozenset({0, 1, 5})}  # three of a class are better than no third site
    assert sites_of(0, 1, 4, 6) == {frozenset({0, 1})}
    assert {len(one) for one in sites_of(0, 4, 6)} == {3} and sites_of(4) == {frozenset({4})}


@pytest.mark.parametrize("sites", [1, 2, 3])
def test_the_last_site_is_the_query_and_a_single_one_is_both(sites):
    batch = episode(sites)
    support, query = method().by_site(batch)
    assert torch.equal(query.series, batch.series[-4:]) and len(support) == max(1, sites - 1)
    for k, one in enumerate(support):
        assert torch.equal(one.series, batch.series[4 * k : 4 * k + 4]) and torch.equal(one.site, batch.site[4 * k : 4 * k + 4])


@pytest.mark.parametrize("sites", [1, 2, 3])
def test_flat_scans_and_poor_sites_leave_everything_finite(sites):
    own, network = network_of()
    batch = episode(sites)
    batch.series[0] = 0.0  # a whole scan
    batch.series[1, 3] = 0.1
    batch.series[4:] = batch.series[-1:]  # one subject again and again
    batch = dataclasses.replace(batch, label=torch.where(batch.site == 0, 0, batch.label))
    optimizer = own.optimizer(network.train())
    for _ in range(3):
        terms = own.step(network, batch, optimizer)
    assert all(value.isfinite() for value in terms.values())
    assert all(p.grad.isfinite().all() for p in network.parameters())
    assert all(value.isfinite().all() for value in network.state_dict().values())


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, 30),
        ({"select_from": 0.0}, 0),
        ({"select_from": 0.0, "select_after_warmup": True}, 5),
        ({"select_from": 0.25, "epochs": 10}, 2),
        (M2DC.variants["last-epoch"], 59),
        (M2DC.variants["long"] | {"epochs": 10}, 9),
        ({"select_from": 2.0}, 59),  # the last epoch can always be kept
        ({"select_from": 0.5, "epochs": 1, "warmup": 1}, 0),
    ],
)
def test_which_epochs_can_be_kept(fields, first):
    own = make("m2dc", **fields)
    assert [epoch for epoch in range(own.epochs) if own.candidate(epoch)] == list(range(first, own.epochs))


def test_without_the_clock_nodes_are_their_identity_alone():
    """A scan whose windows have other values but the same graphs gives the same logits; with the clock it does not."""
    batch = episode()
    squeezed = Batch({"series": 3.0 * batch.series + 1.0}, batch.phenotypes, batch.label, batch.site)  # the same correlations
    for clock in (False, True):
        _, network = network_of(clock=clock)
        same = torch.allclose(network(batch), network(squeezed), atol=1e-4)
        assert same == (not clock)
    network = network_of(clock=False)[1]
    first = []
    network.graphs[0].register_forward_pre_hook(lambda module, given: first.append(given[0]))
    network(batch)
    state = numbers(network)
    agrees(first[0][0], [state["start.weight"][:, roi] + state["start.bias"] for roi in range(ROIS)])
    assert torch.equal(first[0], first[0][:1].expand_as(first[0]))  # the same in all windows and subjects


def test_a_prediction_is_the_mean_over_crops_at_fixed_places():
    own, network = network_of(crop=0.75, crops=3, clock=False)
    batch = episode()
    assert network.crop == 18 and own.build(Shape(ROIS, LENGTH, 0, 3, {})).views == 3
    whole, logits = copy.deepcopy(network), []
    whole.crop, whole.views = LENGTH, 1
    for start in (0, 3, 6):
        part = Batch({"series": batch.series[..., start : start + 18]}, batch.phenotypes, batch.label, batch.site)
        whole.crop = 18
        logits.append(whole(part).detach().numpy())
    agrees(network(batch), np.mean(logits, axis=0))
    assert np.ptp(logits, axis=0).max() > 1e-3
    torch.testing.assert_close(network(batch), network(batch), rtol=0, atol=0)


def test_training_sees_random_crops_of_the_same_length():
    _, network = network_of(crop=0.5, clock=False)
    series = torch.arange(LENGTH).float().expand(400, ROIS, LENGTH)
    torch.manual_seed(0)
    cropped = network.random_crop(series)
    assert cropped.shape == (400, ROIS, 12)
    starts = cropped[:, 0, 0]
    assert torch.equal(cropped, (starts[:, None, None] + torch.arange(12)).expand(400, ROIS, 12))
    assert set(starts.tolist()) == set(range(13))  # each start, the first and the last included
    batch = episode()
    network.train()
    torch.manual_seed(1)
    assert not torch.equal(network.encode(batch.series), network.encode(batch.series))
