"""UFA-Net with random weights against loops over its equations; its graph, its alignment and when it begins, its settings."""

import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import make_cohort
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.ufa_net import UFANet, same_subjects, shared_graph, site_discrepancy, unbiased_discrepancy
from m2lgdg.preprocess import scaled_series

torch.set_num_threads(1)
ROIS, LENGTH, SUBJECTS = 4, 9, 6
ODD = {"length": LENGTH, "channels": (2, 3), "temporal_kernel": 5, "widths": (7, 6, 5)}  # all differ, so a swapped one shows
ODD |= {"scaling": "roi"}  # the network is the same for both, and so are most tests


def method(**fields):
    own = UFANet(**(ODD | fields))
    own.class_weight, own.epoch = torch.tensor([0.8, 1.4]), own.epochs - 1  # what training sets
    return own


def shape(own, rois=ROIS):
    return Shape(rois, own.length, 0, 2, {"graph": np.full((rois, rois), 1 / rois, dtype=np.float32)})


def network_of(rois=ROIS, seed=0, **fields):
    own = method(**fields)
    return own, randomised(own.build(shape(own, rois)), seed)


def batch_for(own, seed=1, subjects=SUBJECTS, rois=ROIS):
    series = torch.randn(subjects, rois, own.length, generator=torch.Generator().manual_seed(seed))
    return Batch({"series": series}, torch.zeros(subjects, 3), torch.arange(subjects) % 2, torch.arange(subjects) // 2)


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def block(state, x, graph):
    """(channel, time, roi) -> the same with other channels, one time point and one ROI after the other."""
    mixing, time, rois = state["mix.weight"][:, :, 0, 0], x.shape[1], x.shape[2]
    mixed = np.array([[[oracle.dot(w, x[:, t, n]) for n in range(rois)] for t in range(time)] for w in mixing])
    mixed += state["mix.bias"][:, None, None]
    spread = np.zeros_like(mixed)
    for c, t, j in np.ndindex(spread.shape):
        spread[c, t, j] = sum(mixed[c, t, i] * graph[i, j] * state["mask"][i, j] for i in range(rois))
    spread = np.maximum(oracle.batch_norm(oracle.under(state, "norm_space"), spread), 0)
    weight, bias = state["temporal.weight"], state["temporal.bias"]
    through = np.stack([oracle.convolution(weight, bias, spread[:, :, n]) for n in range(rois)], axis=-1)
    return np.maximum(oracle.batch_norm(oracle.under(state, "norm_time"), through), 0)


def discrepancy(features, site):
    """|mean - mean|^2 over all pairs of sites, averaged."""
    means = [sum(f for f, s in zip(features, site, strict=True) if s == one) / site.count(one) for one in sorted(set(site))]
    gaps = [sum((a - b) ** 2) for a, b in itertools.combinations(means, 2)]
    return sum(gaps) / len(gaps)


def test_the_graph_is_the_correlation_of_the_series_put_end_to_end():
    series = np.random.default_rng(0).normal(size=(5, ROIS, 30)) + np.random.default_rng(1).normal(size=(5, 1, 30))
    series = (series - series.mean(axis=2, keepdims=True)) / series.std(axis=2, keepdims=True)
    series[2, 1] = 0.0  # a ROI that one subject lacks
    joined = [np.concatenate([one[i] for one in series]) for i in range(ROIS)]
    strength = [[0.0 if i == j else abs(oracle.pearson(a, b)) for j, b in enumerate(joined)] for i, a in enumerate(joined)]
    degree = [sum(row) for row in strength]
    expected = [[strength[i][j] / math.sqrt(degree[i] * degree[j]) for j in range(ROIS)] for i in range(ROIS)]
    given = shared_graph(series.astype(np.float32))
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    assert given.dtype == np.float32


def test_a_roi_that_nobody_has_gets_no_edges():
    series = np.random.default_rng(0).normal(size=(3, ROIS, 20)).astype(np.float32)
    series[:, 2] = 0.0
    graph = shared_graph(series)
    assert not graph[2].any() and not graph[:, 2].any() and np.isfinite(graph).all()
    assert (graph[np.ix_([0, 1, 3], [0, 1, 3])].sum(axis=1) > 0).all()


@pytest.mark.parametrize("bins", [0, 1, 4, 9])
def test_the_whole_network(bins):
    own, network = network_of(time_bins=bins)
    state, batch = numbers(network), batch_for(own)
    expected = {name: [] for name in ("dense1", "dense2", "dense3", "fused", "logits")}
    for series in batch.series.double().numpy():
        x = oracle.batch_norm(oracle.under(state, "norm"), series).T[None]
        for place in range(2):
            x = block(oracle.under(state, f"blocks.{place}"), x, state["graph"])
        course = x.mean(axis=2)  # (channel, time)
        if bins:
            edges = [(b * LENGTH // bins, -(-(b + 1) * LENGTH // bins)) for b in range(bins)]
            course = np.array([[row[a:b].mean() for a, b in edges] for row in course])
        x = course.reshape(-1)
        for place in range(3):
            x = oracle.linear(oracle.under(state, f"dense.{place}"), x)
            expected[f"dense{place + 1}"].append(x)
        expected["fused"].append(x)
        expected["logits"].append([0.0, *oracle.linear(oracle.under(state, "output"), x)])
    given = network.parts(batch)
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        agrees(given[name], value)
    agrees(network(batch), expected["logits"])


@pytest.mark.parametrize("site", [[0, 0, 1, 1, 2, 2], [3, 9, 9, 1, 3, 3], [0, 1, 2, 3, 4, 5], [1, 0, 0, 0, 0, 0]])
def test_several_sites_differ_by_the_average_over_their_pairs(site):
    features = np.random.default_rng(1).normal(size=(6, 4)) + 2
    given = site_discrepancy(torch.tensor(features), torch.tensor(site))
    assert given.item() == pytest.approx(discrepancy(features, site), rel=1e-5)


def test_the_discrepancy_is_invariant_and_its_gradient_right():
    features, site = np.random.default_rng(2).normal(size=(6, 3)), [0, 0, 1, 1, 1, 2]
    given = torch.tensor(features, requires_grad=True)
    gap = site_discrepancy(given, torch.tensor(site))
    gap.backward()
    np.testing.assert_allclose(given.grad, oracle.gradient(lambda x: discrepancy(x, site), features), atol=1e-5)
    shifted = site_discrepancy(torch.tensor(features) + 3.0, torch.tensor(site))
    renamed = site_discrepancy(torch.tensor(features), 7 - torch.tensor(site))
    torch.testing.assert_close(shifted, gap.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(renamed, gap.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(site_discrepancy(torch.tensor(features), torch.tensor(site)), gap.detach())


@pytest.mark.parametrize("mmd", ["unbiased", "biased"])
def unbiased(features, site, subject=None):
    """The mean inner product of two different subjects of each of two sites, minus twice that across them, over all pairs."""
    rows = range(len(site))
    subject = list(rows) if subject is None else subject

    once = [i for i in rows if subject.index(subject[i]) == i]
    mean_of = [np.mean([features[j] for j in rows if subject[j] == subject[i]], axis=0) for i in rows]

    def mean(one, other):
        pairs = [(i, j) for i in once for j in once if site[i] == one and site[j] == other and i != j]
        return np.mean([mean_of[i] @ mean_of[j] for i, j in pairs])

    sites = [one for one in sorted(set(site)) if len({subject[i] for i in rows if site[i] == one}) > 1]
    gaps = [mean(a, a) + mean(b, b) - 2 * mean(a, b) for a, b in itertools.combinations(sites, 2)]
    return np.mean(gaps)


@pytest.mark.parametrize(
    ("site", "subject"),
    [
        ([0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5, 6]),
        ([0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 2, 4, 5, 6]),  # one drawn twice
        ([3, 3, 3, 1, 1, 7, 7], [0, 1, 1, 3, 4, 5, 5]),  # a site of one subject does not count
    ],
)
def test_the_unbiased_discrepancy_leaves_out_a_subject_with_itself(site, subject):
    drawn = np.random.default_rng(0).normal(size=(7, 5)) + 3
    features = drawn[subject] + 0.1 * np.random.default_rng(1).normal(size=(7, 5))  # dropout differs from row to row
    same = torch.tensor([[a == b for b in subject] for a in subject])
    given = torch.tensor(features, requires_grad=True)
    gap = unbiased_discrepancy(given, torch.tensor(site), same)
    assert gap.item() == pytest.approx(unbiased(features, site, subject), rel=1e-4, abs=1e-5)
    gap.backward()
    slope = oracle.gradient(lambda x: unbiased(x, site, subject), features)
    np.testing.assert_allclose(given.grad - given.grad.mean(dim=0), slope - slope.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(slope.mean(axis=0), 0, atol=1e-4)  # a shift of all subjects changes nothing


def test_it_is_zero_on_average_where_sites_do_not_differ_and_the_biased_one_is_not():
    rng, site = np.random.default_rng(0), torch.arange(4).repeat_interleave(8)
    same = torch.eye(32, dtype=torch.bool)
    draws = [torch.tensor(rng.normal(size=(32, 6))) for _ in range(400)]
    gaps = np.array([[unbiased_discrepancy(x, site, same).item(), site_discrepancy(x, site).item()] for x in draws])
    error = gaps.std(axis=0) / math.sqrt(len(draws))
    assert abs(gaps[:, 0].mean()) < 4 * error[0]
    assert abs(gaps[:, 1].mean() - 2 * 6 / 8) < 4 * error[1]  # twice the dimensions over the subjects of a site
    assert unbiased_discrepancy(draws[0], torch.zeros(32, dtype=torch.long), same).item() == 0.0


def test_sampling_noise_below_zero_is_not_minimised():
    """Otherwise features grow without limit: their products, and so the negative estimates, grow with the square."""
    rng, site = np.random.default_rng(0), torch.arange(4).repeat_interleave(8)
    series = torch.tensor(rng.normal(size=(32, ROIS, LENGTH)))
    batch = Batch({"scaled_series": series}, torch.zeros(32, 0), torch.zeros(32, dtype=torch.long), site)
    gaps, estimates = [], []
    for _ in range(20):
        features = torch.tensor(rng.normal(size=(32, 6)), requires_grad=True)
        gap = UFANet().gap(features, batch)
        gap.backward()
        gaps.append((gap.item(), float(features.grad.abs().max())))
        estimates.append(unbiased_discrepancy(features.detach(), site, torch.eye(32, dtype=torch.bool)).item())
    assert min(estimates) < 0 < max(estimates)
    for (gap, slope), estimate in zip(gaps, estimates, strict=True):
        assert gap == pytest.approx(max(estimate, 0.0)) and (slope > 0) == (estimate > 0)


def test_a_subject_drawn_twice_is_recognised():
    series = torch.randn(4, ROIS, LENGTH, generator=torch.Generator().manual_seed(0))[[0, 1, 0, 3]]
    assert torch.equal(
        same_subjects(series),
        torch.eye(4, dtype=torch.bool) | torch.tensor([[0, 0, 1, 0], [0] * 4, [1, 0, 0, 0], [0] * 4]).bool(),
    )


def test_a_scan_is_divided_by_one_number():
    rng = np.random.default_rng(0)
    scan = (rng.normal(size=(LENGTH, ROIS)) * [1, 2, 5, 0.1] + [10, -3, 0, 1]).astype(np.float32)
    centred = scan.astype(np.float64) - scan.astype(np.float64).mean(axis=0)
    expected = centred / math.sqrt((centred**2).mean())
    given = scaled_series([scan, 1000 * scan, np.zeros_like(scan)], LENGTH)
    np.testing.assert_allclose(given[0], expected.T, atol=1e-5)
    np.testing.assert_allclose(given[1], given[0], atol=1e-4)  # units of the scanner do not matter
    assert not given[2].any()
    assert given[0].std(axis=1).argmax() == 2  # the amplitudes of ROIs do
    own, cohort = UFANet(length=40), make_cohort("tiny", sizes={"a": 4}, seed=3)
    (name,) = own.features(cohort, torch.device("cpu"))
    assert name == "scaled_series" and own.uses_amplitude and not UFANet(scaling="roi").uses_amplitude


def test_the_sparse_graph_has_the_strongest_tenth_of_the_edges_and_self_loops():
    series = np.random.default_rng(0).normal(size=(2, 7, 40)).astype(np.float32)
    joined = np.concatenate(series, axis=1)
    strength = np.abs(np.corrcoef(joined))
    edges = sorted(((strength[i, j], i, j) for i in range(7) for j in range(i)), reverse=True)[:2]  # of 21
    kept = np.eye(7)
    for value, i, j in edges:
        kept[i, j] = kept[j, i] = value
    degree = kept.sum(axis=1)
    given = shared_graph(series, UFANet(**UFANet.variants["sparse"]).density)
    np.testing.assert_allclose(given, kept / np.sqrt(np.outer(degree, degree)), atol=1e-6)


@pytest.mark.parametrize("mmd", ["unbiased", "biased"])
@pytest.mark.parametrize("per_dimension", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_alignment_is_summed_over_the_dense_layers(weight, per_dimension, mmd):
    own, network = network_of(alignment_weight=weight, per_dimension=per_dimension, mmd=mmd)
    batch, gap = batch_for(own), {"biased": discrepancy, "unbiased": unbiased}[mmd]
    parts = {name: value.detach().double().numpy() for name, value in network.parts(batch).items()}
    layers = [parts[f"dense{i}"] for i in (1, 2, 3)]
    total = sum(max(gap(one, batch.site.tolist()), 0) / (one.shape[1] if per_dimension else 1) for one in layers)
    terms = own.loss(network, batch)
    agrees(terms["alignment"], weight * total)
    agrees(terms["ce"], oracle.cross_entropy(parts["logits"], batch.label.tolist(), [0.8, 1.4], 0.0))


def test_the_alignment_begins_after_its_epochs_of_classification_alone():
    own, network = network_of(alignment_start=3)
    for epoch, names in {0: {"ce"}, 2: {"ce"}, 3: {"ce", "alignment"}, 9: {"ce", "alignment"}}.items():
        own.epoch = epoch
        assert own.loss(network, batch_for(own)).keys() == names
    own.alignment_weight = 0.0
    assert own.loss(network, batch_for(own)).keys() == {"ce"}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, range(20, 120)),
        ({"epochs": 21}, [20]),
        ({"epochs": 20, "select_after_warmup": True}, range(10, 20)),  # never aligned: the loop's own rule
        ({"epochs": 1}, [0]),
        ({"epochs": 30, "warmup": 25, "select_after_warmup": True}, range(25, 30)),
        ({"epochs": 30, "alignment_weight": 0.0}, range(30)),
        ({"epochs": 12, "alignment_start": 0, "select_after_warmup": True}, range(10, 12)),
    ],
)
def test_only_aligned_networks_are_kept_where_there_are_any(fields, kept):
    own = UFANet(**fields)
    assert [epoch for epoch in range(own.epochs) if own.candidate(epoch)] == list(kept)


def test_a_fit_keeps_an_aligned_epoch_and_a_short_one_keeps_something():
    source = make_cohort("tiny", seed=1, n_rois=5, n_disease_edges=2, sizes={"a": 14, "b": 10, "c": 1})
    quick = UFANet.variants["small"] | {"length": 20, "batch_size": 8, "batches_per_epoch": 1, "warmup": 1}
    fitted = UFANet(**(quick | {"epochs": 5, "alignment_start": 2})).fit(source)
    assert ["alignment" in one for one in fitted.facts_["history"]] == [False, False, True, True, True]
    assert fitted.facts_["best_epoch"] > 2
    short = UFANet(**(quick | {"epochs": 2})).fit(source)
    assert short.facts_["best_epoch"] in (1, 2) and not any("alignment" in one for one in short.facts_["history"])
    again = UFANet(**(quick | {"epochs": 5, "alignment_start": 2, "deterministic": True})).fit(source)
    np.testing.assert_array_equal(again.predict_proba(source), fitted.predict_proba(source))


@pytest.mark.parametrize(
    ("sizes", "size", "together", "each"), [([60] * 6, 32, 4, 8), ([40, 9, 3], 32, 3, 10), ([5, 1], 128, 2, 64)]
)
def test_batches_hold_the_same_number_of_each_site_and_class(sizes, size, together, each):
    site = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    label = torch.arange(len(site)) % 2
    own, order = UFANet(batch_size=size), torch.Generator().manual_seed(0)
    batches = own.batches(site, label, order)
    assert len(batches) == max(1, sum(sizes) // (together * each))
    for rows in batches:
        _, counts = torch.unique(site[rows], return_counts=True)
        assert counts.tolist() == [each] * together
        for one in torch.unique(site[rows]).tolist():
            if sizes[one] > 1:
                assert label[rows][site[rows] == one].sum() == each // 2
    assert len(UFANet(batch_size=size, batches_per_epoch=7).batches(site, label, order)) == 7


def test_all_sites_pass_the_network_together():
    own, network = network_of()
    seen = []
    network.norm.register_forward_hook(lambda module, given, result: seen.append(given[0].shape[0]))
    own.loss(network.train(), batch_for(own))
    assert seen == [SUBJECTS]


def test_sgd_with_momentum():
    own, network = network_of(learning_rate=0.07, weight_decay=0.02, momentum=0.8)
    (group,) = own.optimizer(network).param_groups
    assert type(own.optimizer(network)) is torch.optim.SGD
    assert (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"]) == (0.07, 0.02, 0.8, False)
    assert len(group["params"]) == len(list(network.parameters()))
