"""MSSTAN with random weights against loops over its equations, its parameter count, ties, flat ROIs, and an overfit."""

import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import InputError
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.msstan import (
    MSSTAN,
    Pooling,
    strongest_edges,
    window_correlations,
    window_points,
)

torch.set_num_threads(1)
ROIS, SUBJECTS, LENGTH = 9, 3, 27


def method(**fields):
    own = MSSTAN(**{"length": LENGTH, "stride": 3, "head": (5, 4), "label_smoothing": 0.1, **fields})
    own.class_weight = torch.tensor([0.8, 1.4])  # what training sets from the source-training labels
    return own


def network_of(seed=0, rois=ROIS, **fields):
    own = method(**fields)
    return own, randomised(own.build(Shape(rois, own.length, 0, 3, {})), seed)


def scans(subjects=SUBJECTS, rois=ROIS, length=LENGTH, seed=1):
    """(subject, roi, time) with slow drifts, so that windows differ and ROIs correlate."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(subjects, rois, length, generator=rng).cumsum(-1) / 2


def batch_of(series):
    count = len(series)
    return Batch({"series": series}, torch.zeros(count, 3), label=torch.arange(count) % 2, site=torch.arange(count) % 3)


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def correlations(series, points, stride):
    """(roi, time) -> (window, roi, roi), by loops over starts and pairs."""
    rois, time = series.shape
    result = []
    for start in range(0, time - points, stride):
        window = series[:, start : start + points]
        result.append([[oracle.pearson(window[i], window[j]) for j in range(rois)] for i in range(rois)])
    return np.array(result)


def edges(matrix, density):
    rois = len(matrix)
    upper = [matrix[i, j] for i in range(rois) for j in range(i + 1, rois)]
    threshold = np.percentile(upper, 100 * (1 - density))
    graph = np.eye(rois)
    for i in range(rois):
        for j in range(i + 1, rois):
            graph[i, j] = graph[j, i] = float(matrix[i, j] > threshold)
    return graph


def transformer(state, x, graph):
    """x = LN(x + O), x = LN(x + FFN(x)) with the graph added to the attention logits."""
    q, k, v = (oracle.linear(oracle.under(state, name), x) for name in ("query", "key", "value"))
    mixed = np.zeros_like(x)
    for i in range(len(x)):
        share = oracle.softmax([oracle.dot(q[i], k[j]) / math.sqrt(x.shape[1]) + graph[i, j] for j in range(len(x))])
        mixed[i] = sum(share[j] * v[j] for j in range(len(x)))
    x = oracle.layer_norm(oracle.under(state, "norm_attention"), x + oracle.linear(oracle.under(state, "output"), mixed))
    return oracle.layer_norm(oracle.under(state, "norm_feed"), x + oracle.mlp(oracle.under(state, "feed"), x, (0, 2)))


def pool(state, x, graph, kept):
    """The kept ROIs' features times their scores: mean, then maximum."""
    rois = len(x)
    scores = []
    for i in range(rois):
        spread = sum(graph[i, j] * x[j] for j in range(rois)) + state["epsilon"][0] * x[i]
        hidden = oracle.batch_norm(oracle.under(state, "score.1"), oracle.linear(oracle.under(state, "score.0"), spread))
        last = oracle.linear(oracle.under(state, "score.3"), np.maximum(hidden, 0))
        scores.append(math.tanh(oracle.batch_norm(oracle.under(state, "score.4"), last)[0]))
    best = sorted(range(rois), key=lambda i: (-scores[i], i))[:kept]
    weighted = np.array([scores[i] * x[i] for i in best])
    return np.concatenate([weighted.sum(axis=0) / kept, weighted.max(axis=0)])


def temporal(state, x):
    q, v = x @ state["query.weight"].T, x @ state["value.weight"].T
    mixed = np.zeros_like(x)
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i] or [i]
        share = oracle.softmax([oracle.dot(q[i], q[j]) / np.linalg.norm(q[j]) / math.sqrt(x.shape[1]) for j in others])
        mixed[i] = sum(p * v[j] for p, j in zip(share, others, strict=True))
    return oracle.linear(oracle.under(state, "output"), mixed)


@pytest.mark.parametrize(
    ("length", "share", "stride", "points", "windows"),
    [(200, 0.5, 2, 100, 50), (200, 0.3, 4, 60, 35), (230, 100 / 230, 2, 100, 65), (20, 0.5, 2, 10, 5), (20, 0.95, 2, 17, 2)],
)
def test_windows_are_the_published_ones(length, share, stride, points, windows):
    assert window_points(length, share, stride) == points
    assert window_correlations(torch.randn(1, 3, length), points, stride).shape == (1, windows, 3, 3)


def test_any_length_has_two_windows_and_impossible_ones_are_refused():
    for length, share, stride in itertools.product(range(20, 70), (0.2, 0.5, 0.8, 1.0), (1, 2, 5)):
        points = window_points(length, share, stride)
        assert points >= 3 and len(range(0, length - points, stride)) >= 2
    for share, stride in [(0.01, 2), (0.5, 190), (0.5, 0)]:
        with pytest.raises(InputError, match="do not give two windows of at least three points"):
            method(length=190, window=share, stride=stride).build(Shape(5, 190, 0, 2, {}))


@pytest.mark.parametrize(("points", "stride"), [(13, 3), (14, 1), (5, 2)])
def test_window_correlations(points, stride):
    series = scans(seed=points)
    series[0, 2] = 0.1  # its mean is not exactly 0.1 in single precision
    series[1, 4, :15] = 0.7  # flat in the first windows only
    found = window_correlations(series, points, stride)
    agrees(found, [correlations(one, points, stride) for one in series.double().numpy()])
    assert not found[0, :, 2].any() and not found[0, :, :, 2].any() and not found[1, 0, 4].any() and found[1, -1, 4].any()


@pytest.mark.parametrize("rois", [3, 5, 9, 16])
@pytest.mark.parametrize("density", [0.1, 0.2, 0.5])
def test_edges_are_those_above_the_interpolated_percentile(rois, density):
    found = window_correlations(scans(rois=rois), 13, 3)
    expected = [[edges(one, density) for one in subject] for subject in found.double().numpy()]
    np.testing.assert_array_equal(strongest_edges(found, density), expected)


def test_a_fifth_of_the_edges_at_116_rois_and_ties_are_left_out():
    (graph,) = strongest_edges(window_correlations(scans(1, 116, 41), 40, 2)[0], 0.2)
    assert graph.triu(1).sum() == 1334 and torch.equal(graph, graph.T) and (graph.diagonal() == 1).all()
    assert torch.equal(strongest_edges(torch.zeros(2, 6, 6), 0.2), torch.eye(6).expand(2, 6, 6))
    tied = torch.full((6, 6), 0.3)  # 15 edges, of which three would be kept
    tied[0, 4] = tied[4, 0] = 0.9
    tied[1, 2] = tied[2, 1] = -0.99  # strong but negative
    expected = torch.eye(6)
    expected[0, 4] = expected[4, 0] = 1.0
    assert torch.equal(strongest_edges(tied, 0.2), expected)


def test_scales_keep_whole_shares_of_the_rois():
    def kept(rois):
        return [one.kept for one in method().build(Shape(rois, LENGTH, 0, 2, {})).poolings]

    assert kept(116) == [34, 58, 81] and kept(5) == [1, 2, 3] and kept(2) == [1, 1, 1]
    for rois in (10, 30, 90, 170):
        assert kept(rois) == [rois * 3 // 10, rois // 2, rois * 7 // 10]


def test_equal_scores_keep_the_first_rois():
    pooling = randomised(Pooling(4, 3))
    with torch.no_grad():
        pooling.score[3].weight.zero_()  # every score alike
    x = torch.randn(40, 50, 4, generator=torch.Generator().manual_seed(0))
    score = torch.tanh(pooling.score[4](pooling.score[3].bias[None])).item()
    first = score * x[:, :3]
    torch.testing.assert_close(pooling(x, x), torch.cat([first.mean(1), first.amax(1)], dim=1))


@pytest.mark.parametrize("seed", range(2))
def test_the_whole_network(seed):
    own, network = network_of(seed)
    state, series = numbers(network), scans(seed=seed)
    series[0, 5] = 0.0
    fused, logits = [], []
    for one in series.double().numpy():
        sequences = [[], [], []]
        for matrix in correlations(one, 14, 3):  # round(27 / 2) is 14
            graph = edges(matrix, 0.2)
            x = transformer(oracle.under(state, "transformer"), matrix, graph)
            for s, kept in enumerate((2, 4, 6)):
                sequences[s].append(pool(oracle.under(state, f"poolings.{s}"), x, graph, kept))
        attended = [temporal(oracle.under(state, f"temporal.{s}"), np.array(sequences[s])) for s in range(3)]
        fused.append(sum(attended).mean(axis=0))
        hidden = np.maximum(oracle.linear(oracle.under(state, "head.0"), fused[-1]), 0)
        hidden = np.maximum(oracle.linear(oracle.under(state, "head.2"), hidden), 0)
        logits.append(oracle.linear(oracle.under(state, "head.4"), hidden))
    batch = batch_of(series)
    given = network.parts(batch)
    agrees(given["fused"], fused)
    agrees(given["logits"], logits)
    agrees(network(batch), logits)
    agrees(own.loss(network, batch)["ce"], oracle.cross_entropy(logits, batch.label.tolist(), [0.8, 1.4]))
    assert own.loss(network, batch).keys() == {"ce"}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a slower path, on processors without bfloat16
def test_bfloat16_and_deterministic_algorithms():
    own, network = network_of(precision="bf16", dropout=0.0)
    batch, scored = batch_of(scans()), []
    network.poolings[0].score[0].register_forward_hook(lambda *given: scored.append(given[-1].dtype))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with own.autocast(torch.device("cpu")):
            half = network(batch)
            inside = window_correlations(batch.series, 13, 3)
        assert inside.dtype == torch.float32 and torch.equal(inside, window_correlations(batch.series, 13, 3))
        assert half.dtype == torch.bfloat16 and scored == [torch.float32]  # ranked scores must not tie by rounding
        torch.testing.assert_close(half.float(), network(batch), rtol=0.1, atol=0.1)
        terms = own.step(network.train(), batch, own.optimizer(network))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(value.isfinite() for value in terms.values())
    assert all(value.isfinite().all() for value in network.state_dict().values())
