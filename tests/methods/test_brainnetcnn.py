"""BrainNetCNN with random weights against loops over its equations; its sizes, its settings, and that it can learn."""

import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import make_cohort
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.brainnetcnn import BrainNetCNN

torch.set_num_threads(1)
ROIS, SUBJECTS = 5, 3
ODD = {"edge_channels": (2, 3), "node_channels": 4, "graph_channels": 6, "hidden": (7, 8)}  # all differ, so a swapped one shows


def shape(rois=ROIS):
    return Shape(n_rois=rois, length=200, n_inputs=0, n_sites=2, fitted={})


def batch_for(seed=1, subjects=SUBJECTS, rois=ROIS):
    """Matrices that are not symmetric, so that rows and columns cannot stand in for each other."""
    matrices = torch.randn(subjects, rois, rois, generator=torch.Generator().manual_seed(seed))
    return Batch({"fc": matrices}, torch.zeros(subjects, 3), torch.arange(subjects) % 2, torch.arange(subjects) % 2)


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def leaky(x):
    return np.where(x > 0, x, 0.33 * x)


def edge_to_edge(state, edges):
    """(channel, i, j): what the row filter makes of row i and the column filter of column j, with both biases."""
    row, column = state["row.weight"][:, :, 0, :], state["column.weight"][:, :, :, 0]  # (out, channel, k)
    n = edges.shape[1]
    out = np.zeros((len(row), n, n))
    for c, i, j in np.ndindex(out.shape):
        out[c, i, j] = state["row.bias"][c] + state["column.bias"][c]
        for m, k in np.ndindex(row.shape[1:]):
            out[c, i, j] += row[c, m, k] * edges[m, i, k] + column[c, m, k] * edges[m, k, j]
    return out


def edge_to_node(state, edges):
    weight = state["weight"][:, :, 0, :]
    out = np.zeros((len(weight), edges.shape[1]))
    for c, i in np.ndindex(out.shape):
        out[c, i] = state["bias"][c] + sum(weight[c, m, k] * edges[m, i, k] for m, k in np.ndindex(weight.shape[1:]))
    return out


def node_to_graph(state, nodes):
    weight = state["weight"][:, :, :, 0]
    return np.array([state["bias"][c] + (weight[c] * nodes).sum() for c in range(len(weight))])


def network_of(rois=ROIS, seed=0, **fields):
    own = BrainNetCNN(**(ODD | fields))
    own.class_weight = torch.tensor([0.8, 1.4])
    return own, randomised(own.build(shape(rois)), seed)


@pytest.mark.parametrize(
    "fields", [{}, {"edge_channels": (3,), "hidden": (5,)}, {"edge_channels": (3, 2, 4), "node_channels": 1}]
)
def test_the_whole_network(fields):
    own, network = network_of(**fields)
    state, batch = numbers(network), batch_for()
    fused, logits = [], []
    for matrix in batch["fc"].double().numpy():
        x = matrix[None]
        for place in range(len(own.edge_channels)):
            x = leaky(edge_to_edge(oracle.under(state, f"edges.{place}"), x))
        x = leaky(edge_to_node(oracle.under(state, "nodes"), x))
        x = leaky(node_to_graph(oracle.under(state, "graph"), x))
        for place in range(len(own.hidden)):
            x = leaky(oracle.linear(oracle.under(state, f"hidden.{place}"), x))
        fused.append(x)
        logits.append(oracle.linear(oracle.under(state, "output"), x))
    given = network.parts(batch)
    agrees(given["fused"], fused)
    agrees(given["logits"], logits)
    agrees(network(batch), logits)
    assert np.min(logits) < -0.1  # an activation on the logits would have shown


def test_lite_is_another_stack_and_nothing_else():
    plain, lite = BrainNetCNN().fields(), BrainNetCNN(**BrainNetCNN.variants["lite"]).fields()
    assert {name: lite[name] for name in lite if lite[name] != plain[name]} == {"edge_channels": (32, 64), "node_channels": 1}


def test_weights_start_by_fan_in_and_biases_at_zero():
    torch.manual_seed(0)
    network = BrainNetCNN().build(shape(40))
    fans = {"edges.0.row": 40, "edges.1.column": 32 * 40, "nodes": 32 * 40, "graph": 64 * 40, "hidden.0": 256, "hidden.1": 128}
    for name, fan in fans.items():
        layer = network.get_submodule(name)
        bound = math.sqrt(3 / fan)
        assert 0.95 * bound < layer.weight.abs().max() <= bound, name
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    assert not any(value.any() for name, value in network.named_parameters() if name.endswith("bias"))


def test_dropout_comes_after_graph_and_hidden_layers_and_only_in_training():
    _, network = network_of()
    batch, seen = batch_for(), []
    network.dropout.register_forward_hook(lambda module, given, result: seen.append((given[0].shape, module.p)))
    assert torch.equal(network(batch), network(batch))
    seen.clear()
    network.train()
    torch.manual_seed(0)
    assert not torch.equal(network(batch), network(batch))
    assert seen == 2 * [((SUBJECTS, width), 0.5) for width in (6, 7, 8)]


def test_it_sees_fisher_z_with_an_empty_diagonal():
    cohort = make_cohort("tiny", seed=0, sizes={"a": 3})
    found = BrainNetCNN().features(cohort, torch.device("cpu"))["fc"].numpy()
    assert found.shape == (3, 12, 12)
    for one, series in zip(found, cohort.series, strict=True):
        for i, j in ((0, 0), (7, 7), (0, 5), (5, 0), (11, 3)):
            r = oracle.pearson(series[:, i].astype(float), series[:, j].astype(float))
            assert one[i, j] == pytest.approx(0.0 if i == j else math.atanh(r), abs=1e-5)
