"""The group graph, its normalised operator and the Chebyshev convolution against loops, and what must not change them."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg.graph import chebyshev, group_graph, group_graph_of, propagation
from m2lgdg.methods.m2lgdg import M2LGDG

torch.set_num_threads(1)
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=30, deadline=None)
PERCENTILES = (60, 65, 70, 75, 80, 85, 90)  # of the paper's sensitivity analysis


def scans(seed=0, lengths=(40, 25, 31), rois=7):
    """(time, roi) series with structure that subjects share, each ROI with its own level and amplitude."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(rois, rois))
    own = [mixing + 0.7 * rng.normal(size=mixing.shape) for _ in lengths]
    levels = rng.uniform(0.1, 50, rois)
    return [
        (rng.normal(size=(t, rois)) @ m * levels + 10 * levels).astype(np.float32) for t, m in zip(lengths, own, strict=True)
    ]


def edges(graph):
    return int(graph.sum() - np.trace(graph))


def test_the_sensitivity_percentiles_are_those_of_the_paper():
    assert M2LGDG.space["percentile"] == PERCENTILES


@pytest.mark.parametrize("rank", [*PERCENTILES, 0, 33.3, 100])
def test_the_group_graph_is_its_equation(rank, seed=0):
    series = scans(seed)
    kept = [one.copy() for one in series]
    graph = group_graph(series, rank)
    assert graph.dtype == np.float32 and set(np.unique(graph)) <= {0.0, 1.0}
    np.testing.assert_array_equal(graph, oracle.adjacency(oracle.group_correlation(series), rank))
    np.testing.assert_array_equal(graph, graph.T)
    np.testing.assert_array_equal(np.diag(graph), 1)
    for one, before in zip(series, kept, strict=True):
        np.testing.assert_array_equal(one, before)


@many
@given(seeds, st.integers(2, 12), st.integers(1, 4), st.sampled_from(PERCENTILES))
def test_the_group_graph_is_its_equation_for_any_number_of_rois_and_subjects(seed, rois, subjects, rank):
    series = scans(seed, lengths=range(20, 20 + subjects), rois=rois)
    np.testing.assert_array_equal(group_graph(series, rank), oracle.adjacency(oracle.group_correlation(series), rank))


@many
@given(seeds, st.integers(2, 12), st.integers(1, 70), st.sampled_from(PERCENTILES), st.booleans())
def test_the_graph_of_series_on_a_device_is_the_same(seed, rois, subjects, rank, flat):
    series = scans(seed, lengths=[21] * subjects, rois=rois)
    if flat:
        for one in series[::2]:
            one[:, 0] = 3.0
    graph = group_graph_of(torch.from_numpy(np.stack(series)).transpose(1, 2), rank)
    assert graph.dtype == np.float32
    np.testing.assert_array_equal(graph, group_graph(series, rank))


def test_at_the_size_of_the_aal_atlas_a_fifth_of_the_connections_stay():
    series = scans(1, lengths=(150, 170), rois=116)
    graph = group_graph(series)  # the 80th percentile is the default
    assert abs(edges(graph) / (116 * 115) - 0.2) < 0.001
    np.testing.assert_array_equal(graph, graph.T)
    kept = [edges(group_graph(series, rank)) for rank in PERCENTILES]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_opposing_signs_cancel_and_a_negative_connection_counts_as_strong():
    rng = np.random.default_rng(3)
    base = rng.normal(size=(200, 4))
    base[:, 1] = base[:, 0] + 0.1 * rng.normal(size=200)  # strong in each subject, of opposing sign
    base[:, 3] = -base[:, 2] + 0.5 * rng.normal(size=200)  # weaker, negative in both
    turned = base * [1, -1, 1, 1]
    graph = group_graph([base, turned], 80)
    assert graph[0, 1] == 0 and graph[2, 3] == 1
    assert group_graph([base], 80)[0, 1] == 1  # in one subject alone it is the strongest


@pytest.mark.parametrize("rank", [0, *PERCENTILES])
def test_a_flat_roi_has_no_connections_and_no_say_in_the_threshold(rank):
    """Its zeros are no connections: were they counted, more than the strongest of the others would stay."""
    series = scans(6)
    rest = [np.delete(one, 2, axis=1) for one in series]
    for one in series:
        one[:, 2] = 1000.1
    graph = group_graph(series, rank)
    np.testing.assert_array_equal(graph[2], np.eye(7)[2])
    np.testing.assert_array_equal(np.delete(np.delete(graph, 2, 0), 2, 1), group_graph(rest, rank))
    np.testing.assert_array_equal(graph, oracle.adjacency(oracle.group_correlation(series), rank))


def test_flat_subjects_leave_only_self_loops():
    np.testing.assert_array_equal(group_graph([np.full((20, 3), 2, np.float32)], 80), np.eye(3))


def test_equal_connections_all_reach_the_threshold():
    """At or above the percentile, not above it: three ROIs that are copies of one another keep all their connections."""
    one = np.random.default_rng(8).normal(size=(30, 1)).astype(np.float32)
    np.testing.assert_array_equal(group_graph([np.repeat(one, 3, axis=1)], 80), np.ones((3, 3)))


@many
@given(seeds, st.integers(1, 9), st.integers(1, 5), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_propagation_is_its_equation(seed, rois, width, beta):
    rng = np.random.default_rng(seed)
    graph = np.maximum(rng.integers(0, 2, (rois, rois)), np.eye(rois))
    embedding = rng.normal(size=(rois, width))
    given = propagation(torch.tensor(graph).float(), torch.tensor(embedding).float(), beta)
    np.testing.assert_allclose(given.numpy(), oracle.operator(graph, embedding, beta), rtol=1e-5, atol=1e-6)


def test_propagation_mixes_half_and_half_and_softmaxes_rows():
    """By hand: E Eᵀ has rows (0, 0) and (0, log 3); the graph is the identity."""
    embedding = torch.tensor([[0.0], [np.log(3.0) ** 0.5]])
    summed = np.array([[0.25 + 0.5 + 1, 0.25], [0.125, 0.375 + 0.5 + 1]])
    degree = summed.sum(axis=1)
    expected = summed / np.sqrt(np.outer(degree, degree))
    np.testing.assert_allclose(propagation(torch.eye(2), embedding).numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(degree, 2)  # a row of the softmax sums to 1, and so does one of the identity, and so the loop


def test_the_embedding_learns_through_the_operator():
    rng = np.random.default_rng(9)
    graph = oracle.adjacency(oracle.group_correlation(scans(9)), 80)
    embedding, probe = rng.normal(size=(7, 3)) * 0.5, rng.normal(size=(7, 7))
    leaf = torch.tensor(embedding, requires_grad=True)
    (propagation(torch.tensor(graph), leaf) * torch.tensor(probe)).sum().backward()
    expected = oracle.gradient(lambda e: float((oracle.operator(graph, e) * probe).sum()), embedding)
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-4, atol=1e-5)


@many
@given(seeds, st.integers(1, 4), st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.sampled_from([(), (3,), (2, 3)]))
def test_chebyshev_is_the_explicit_polynomials(seed, order, rois, channels, out, lead):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rois, rois)) / rois  # not symmetric, so that a transposed product shows
    features, weights, bias = (
        rng.normal(size=(*lead, rois, channels)),
        rng.normal(size=(order, channels, out)),
        rng.normal(size=out),
    )
    given = chebyshev(*(torch.tensor(a).float() for a in (matrix, features, weights, bias)))
    assert given.shape == (*lead, rois, out)
    for place in np.ndindex(lead):
        expected = oracle.chebyshev(matrix, features[place], weights, bias)
        np.testing.assert_allclose(given[place].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_order_one_never_looks_at_the_graph():
    features, weights = torch.randn(4, 5, 2), torch.randn(1, 2, 3)
    given = chebyshev(torch.full((5, 5), torch.nan), features, weights)
    torch.testing.assert_close(given, features @ weights[0])


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_order_is_the_reach_in_hops(order):
    """On a path of ROIs a signal at one end comes as far as order - 1 neighbours."""
    path = torch.diag(torch.ones(5), 1) + torch.diag(torch.ones(5), -1)
    signal = torch.zeros(6, 1)
    signal[0] = 1
    out = chebyshev(path, signal, torch.rand(order, 1, 1) + 0.5)
    assert out[order - 1].item() != 0 and not out[order:].any()


def test_chebyshev_learns_weights_bias_and_operator():
    rng = np.random.default_rng(11)
    shapes = ((4, 4), (2, 4, 3), (3, 3, 2), (2,))
    leaves = [torch.tensor(rng.normal(size=shape), requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(chebyshev, leaves)
