"""M²LG-DG with random weights against loops over the paper's equations, its ablations, and the paper's table of settings."""

import dataclasses
import itertools

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg.deep import Batch, Shape
from m2lgdg.devices import fast_form
from m2lgdg.fast import time_convolution
from m2lgdg.fast.m2lgdg import bias_through, chebyshev_operators, graph_then_time, time_then_graph, with_ones
from m2lgdg.methods.m2lgdg import M2LGDG, CrossAttention, GlobalEncoder, LocalBlock, LocalEncoder, phenotype_encoder
from m2lgdg.methods.m2lgdg import time_convolution as plain_time_convolution

torch.set_num_threads(1)
ROIS, INPUTS, SUBJECTS = 6, 3, 4
SMALL = {  # all widths differ, so that a swapped one shows; the last local block keeps its shape and its input
    **M2LGDG.variants["small"],
    **{"length": 25, "global_channels": (3, 4, 5), "hidden": 8, "heads": 2, "layers": 2, "global_width": 6},
    **{"local_channels": (3, 4, 4), "local_strides": (1, 2, 1), "local_width": 5, "imaging_width": 7, "edge_width": 3},
    **{"phenotype_hidden": (9, 10), "phenotype_width": 11, "shared_width": 12, "fusion_heads": 3, "fusion_layers": 2},
    **{"fused_width": 16, "dropout": 0.1},
}
COMPONENTS = ("shared_f", "private_f", "shared_n", "private_n")
DUAL, PHENOTYPES = {"global_encoder", "local_encoder", "combine"}, {"phenotype_encoder"}
LOSSES = {"similarity", "orthogonality", "difference"}


def method(variant="C4", **fields):
    own = M2LGDG(**{**SMALL, **M2LGDG.variants[variant], **fields})
    own.class_weight = torch.tensor([0.8, 1.4])  # what training sets from the source-training labels
    return own


def shape(own):
    series = np.random.default_rng(0).normal(size=(4, ROIS, own.length)).astype(np.float32)
    return Shape(
        n_rois=ROIS,
        length=own.length,
        n_inputs=INPUTS,
        n_sites=3,
        fitted=own.prepare(None, {"series": torch.from_numpy(series)}),
    )


def network_of(variant="C4", seed=0, **fields):
    own = method(variant, **fields)
    return own, randomised(own.build(shape(own)), seed)


def batch_for(own, seed=1, subjects=SUBJECTS):
    rng = torch.Generator().manual_seed(seed)
    series, inputs = torch.randn(subjects, ROIS, own.length, generator=rng), torch.randn(subjects, INPUTS, generator=rng)
    return Batch({"series": series}, inputs, label=torch.arange(subjects) % 2, site=torch.arange(subjects) // 2 % 3)


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def h_fmri(state, own, series):
    h_global = oracle.global_encoder(oracle.under(state, "global_encoder"), series, own.heads, own.layers)
    h_local = oracle.local_encoder(oracle.under(state, "local_encoder"), series, own.local_strides, own.beta)
    return oracle.gelu(oracle.linear(oracle.under(state, "combine"), np.concatenate([h_global, h_local])))


def components(state, fmri, other):
    given = {"shared_f": fmri, "private_f": fmri, "shared_n": other, "private_n": other}
    return [oracle.mlp(oracle.under(state, name), given[name], (0, 2)) for name in COMPONENTS]


def fusion(state, own, parts):
    """Four components -> the gate's weights and the fused representation."""
    z_f, z_n = np.stack(parts[:2]), np.stack(parts[2:])
    for layer in range(own.fusion_layers):
        z_f, z_n = oracle.cross_attention(oracle.under(state, f"fusion.{layer}"), z_f, z_n, own.fusion_heads)
    flat_f, flat_n = z_f.reshape(-1), z_n.reshape(-1)
    alpha = oracle.softmax(oracle.mlp(oracle.under(state, "gate"), np.concatenate([flat_f, flat_n]), (0, 2)))
    return alpha, oracle.mlp(oracle.under(state, "output"), np.concatenate([alpha[0] * flat_f, alpha[1] * flat_n]))


def logits(state, fused):
    return oracle.mlp(oracle.under(state, "classifier"), fused, (0, 3, 6))


FORMS = pytest.mark.parametrize("form", [lambda network: network, fast_form], ids=["plain", "fast"])


@FORMS
@pytest.mark.parametrize("length", [24, 25, 31])
def test_global_encoder(length, form):
    own = method(length=length)
    encoder = form(randomised(GlobalEncoder(shape(own), own)))
    series = batch_for(own).series
    expected = [oracle.global_encoder(numbers(encoder), one, own.heads, own.layers) for one in series.double().numpy()]
    agrees(encoder(series), expected)
    with torch.inference_mode():  # another path through torch's transformer
        agrees(encoder(series), expected)
    assert encoder.transformer.layers[0].linear1.out_features == 4 * own.hidden


@pytest.mark.parametrize(("width", "channels", "stride"), [(2, 3, 1), (3, 3, 2), (2, 3, 2), (3, 3, 1), (1, 8, 1), (2, 8, 2)])
@pytest.mark.parametrize("time", [12, 13])
@pytest.mark.parametrize("order", [1, 3])
@FORMS
def test_local_block(width, channels, stride, time, order, form):
    block = form(randomised(LocalBlock(width, channels, stride, method(chebyshev_order=order))))
    state = numbers(block)
    assert ("residual.0.weight" in state) == ((width, stride) != (channels, 1))
    rng = np.random.default_rng(2)
    features, matrix = rng.normal(size=(3, width, time, ROIS)), rng.normal(size=(ROIS, ROIS)) / ROIS
    operator = torch.tensor(matrix).float()
    given = block(torch.tensor(features).float(), chebyshev_operators(operator, order) if form is fast_form else operator)
    assert given.shape == (3, channels, -(-time // stride), ROIS) and (given >= 0).all()
    agrees(given, [oracle.local_block(state, one, matrix, stride) for one in features])


@pytest.mark.parametrize("fields", [{}, {"length": 24, "local_strides": (1, 2, 2), "beta": 0.2}])
@FORMS
def test_local_encoder(fields, form):
    own = method(**fields)
    encoder = form(randomised(LocalEncoder(shape(own), own)))
    state, series = numbers(encoder), batch_for(own).series
    assert (np.diag(state["adjacency"]) == 1).all() and 0 < state["adjacency"].mean() < 1
    agrees(encoder(series), [oracle.local_encoder(state, one, own.local_strides, own.beta) for one in series.double().numpy()])


def test_the_graph_is_the_group_graph_of_the_standardised_series():
    own, series = method(percentile=70.0), np.random.default_rng(3).normal(size=(4, ROIS, 25)).astype(np.float32)
    (graph,) = own.prepare(None, {"series": torch.from_numpy(series)}).values()
    np.testing.assert_array_equal(graph, oracle.adjacency(oracle.group_correlation([one.T for one in series]), 70))


def test_phenotype_encoder():
    own = method()
    encoder, inputs = randomised(phenotype_encoder(INPUTS, own)), batch_for(own).phenotypes
    agrees(encoder(inputs), [oracle.phenotype_encoder(numbers(encoder), one) for one in inputs.double().numpy()])


def test_cross_attention_asks_the_phenotypes_first_and_then_the_updated_scan():
    layer = randomised(CrossAttention(12, 3, 0.1))
    rng = np.random.default_rng(4)
    z_f, z_n = rng.normal(size=(2, SUBJECTS, 2, 12))
    given = layer(torch.tensor(z_f).float(), torch.tensor(z_n).float())
    expected = [oracle.cross_attention(numbers(layer), f, n, 3) for f, n in zip(z_f, z_n, strict=True)]
    agrees(given[0], [f for f, _ in expected])
    agrees(given[1], [n for _, n in expected])
    state = numbers(layer)
    stale = oracle.attention(oracle.under(state, "attend_n"), z_n[0], z_f[0], 3)
    assert np.abs(stale - oracle.attention(oracle.under(state, "attend_n"), z_n[0], expected[0][0], 3)).max() > 0.01


@pytest.mark.parametrize("seed", range(2))
def test_the_whole_network_with_its_components_gate_and_fused_representation(seed):
    own, network = network_of(seed=seed)
    batch, state = batch_for(own, seed), numbers(network)
    expected = {name: [] for name in ("s_f", "p_f", "s_n", "p_n", "gate", "fused", "logits")}
    for series, inputs in zip(batch.series.double().numpy(), batch.phenotypes.double().numpy(), strict=True):
        other = oracle.phenotype_encoder(oracle.under(state, "phenotype_encoder"), inputs)
        parts = components(state, h_fmri(state, own, series), other)
        alpha, fused = fusion(state, own, parts)
        for name, value in zip(expected, [*parts, alpha, fused, logits(state, fused)], strict=True):
            expected[name].append(value)
    given = network.parts(batch)
    assert given.keys() == expected.keys()
    for name in expected:
        agrees(given[name], expected[name])
    agrees(network(batch), expected["logits"])
    assert np.ptp(np.array(expected["gate"])[:, 0]) > 1e-3  # weights of each subject's own


@pytest.mark.parametrize("variant", ["M1", "M2", "C1", "C2"])
def test_reduced_networks_concatenate_and_project(variant):
    own, network = network_of(variant)
    batch, state = batch_for(own), numbers(network)
    fused = []
    for series, inputs in zip(batch.series.double().numpy(), batch.phenotypes.double().numpy(), strict=True):
        joined = [] if variant == "M1" else [h_fmri(state, own, series)]
        joined += [] if variant == "M2" else [oracle.phenotype_encoder(oracle.under(state, "phenotype_encoder"), inputs)]
        joined = components(state, *joined) if variant == "C2" else joined
        fused.append(oracle.linear(oracle.under(state, "project"), np.concatenate(joined)))
    given = network.parts(batch)
    agrees(given["fused"], fused)
    agrees(given["logits"], [logits(state, one) for one in fused])


@pytest.mark.parametrize(
    ("variant", "modules", "losses"),
    [
        ("M1", PHENOTYPES, set()),
        ("M2", DUAL, set()),
        ("C1", DUAL | PHENOTYPES, {"contrast"}),
        ("C2", DUAL | PHENOTYPES | set(COMPONENTS), LOSSES | {"contrast"}),
        ("C3", DUAL | PHENOTYPES | set(COMPONENTS) | {"fusion", "gate", "output"}, LOSSES),
        ("C4", DUAL | PHENOTYPES | set(COMPONENTS) | {"fusion", "gate", "output"}, LOSSES | {"contrast"}),
    ],
)
def test_variants_have_the_ticks_of_the_ablation_table(variant, modules, losses):
    own, network = network_of(variant)
    fused = {"classifier"} if "fusion" in modules else {"classifier", "project"}
    assert {name for name, _ in network.named_children()} == modules | fused
    assert own.loss(network, batch_for(own)).keys() == losses | {"ce"}
    assert set(own.fields()) == set(M2LGDG().fields())
    changed = {name for name, value in method("C4").fields().items() if own.fields()[name] != value}
    assert changed == set(M2LGDG.variants[variant])  # nothing else differs from the complete method


@pytest.mark.parametrize(("variant", "ignored"), [("M1", "series"), ("M2", "phenotypes")])
def test_one_modality_alone_never_looks_at_the_other(variant, ignored):
    own, network = network_of(variant)
    batch = batch_for(own)
    nothing = torch.full_like(getattr(batch, ignored), torch.nan)
    without = dataclasses.replace(batch, **({"features": {"series": nothing}} if ignored == "series" else {ignored: nothing}))
    assert torch.equal(network(without), network(batch))


@pytest.mark.parametrize("variant", ["M1", "M2", "C1", "C2", "C3", "C4"])
@pytest.mark.parametrize("fields", [{}, {"margin": 3.5, "temperature": 0.3, "label_smoothing": 0.25}])
def test_the_total_loss_is_the_weighted_sum_of_the_equations(variant, fields):
    own, network = network_of(variant, **fields)
    batch = batch_for(own, subjects=9)
    parts = {name: value.detach().double().numpy() for name, value in network.parts(batch).items()}
    label, site = batch.label.tolist(), batch.site.tolist()
    total = oracle.cross_entropy(parts["logits"], label, [0.8, 1.4], fields.get("label_smoothing", 0.1))
    if variant in ("C2", "C3", "C4"):
        s_f, p_f, s_n, p_n = (parts[name] for name in ("s_f", "p_f", "s_n", "p_n"))
        hinge = oracle.difference(p_f, p_n, fields.get("margin", 1.0))
        assert hinge > 0 or not fields
        total += 0.1 * (oracle.similarity(s_f, s_n) + oracle.orthogonality(s_f, p_f, s_n, p_n) + hinge)
    if variant in ("C1", "C2", "C4"):
        total += 0.1 * oracle.contrastive(parts["fused"], label, site, fields.get("temperature", 0.07))
    agrees(sum(own.loss(network, batch).values()), total)


def test_the_weights_of_the_losses_are_fields():
    own, network = network_of(margin=3.5)
    base = own.loss(network, batch_for(own))
    other = method(margin=3.5, decomposition_weight=0.5, contrastive_weight=0.01).loss(network, batch_for(own))
    for name, factor in {"ce": 1, "similarity": 5, "orthogonality": 5, "difference": 5, "contrast": 0.1}.items():
        torch.testing.assert_close(other[name], base[name] * factor)


TABLE = {
    **{"global_channels": (32, 64, 128), "hidden": 128, "heads": 8, "layers": 2, "global_width": 256},
    **{"local_channels": (64, 128, 256), "temporal_kernel": 9, "chebyshev_order": 3, "local_width": 256},
    **{"phenotype_hidden": (32, 64), "phenotype_width": 64},
    **{"shared_width": 128, "fusion_heads": 4, "fusion_layers": 2, "fused_width": 128},
    **{"learning_rate": 1e-4, "weight_decay": 1e-4, "warmup": 10, "batch_size": 32, "epochs": 100, "patience": 20},
    **{"clip": 1.0, "dropout": 0.1},
    **{"label_smoothing": 0.1, "temperature": 0.07, "decomposition_weight": 0.1, "contrastive_weight": 0.1},
    **{"length": 200, "percentile": 80.0, "beta": 0.5},  # from the text
    **{"global_kernels": (7, 5, 3), "edge_width": 16, "local_strides": (1, 2, 2), "margin": 1.0, "validation_share": 0.15},
}


@pytest.mark.parametrize("name", TABLE)
def test_defaults_are_the_paper_s_table_and_the_design_s_decisions(name):
    assert M2LGDG().fields()[name] == TABLE[name]


def test_the_number_of_parameters_at_the_size_of_the_paper():
    def dense(*widths):
        return sum(a * b + b for a, b in itertools.pairwise(widths))

    attention, norm = 4 * dense(128, 128), 2 * 128
    layers = dense(7, 32) + dense(32 * 5, 64) + dense(64 * 3, 128) + 2 * (32 + 64 + 128)
    layers += dense(128 * 25, 128) + 116 * 128 + 2 * (attention + dense(128, 512, 128) + 2 * norm) + dense(128, 256, 256)
    layers += 116 * 16 + dense(256, 256, 256)
    for c_in, c_out in ((1, 64), (64, 128), (128, 256)):
        layers += dense(3 * c_in, c_out) + dense(9 * c_out, c_out) + dense(c_in, c_out) + 4 * c_out
    layers += dense(512, 256) + dense(3, 32, 64, 64) + 2 * (32 + 64)
    layers += 2 * dense(256, 128, 128) + 2 * dense(64, 128, 128)
    layers += 2 * (2 * attention + 2 * dense(128, 512, 128) + 4 * norm)
    layers += dense(512, 128, 2) + dense(512, 256, 128) + dense(128, 64, 32, 2)
    network = M2LGDG().build(Shape(116, 200, 3, 21, {"adjacency": np.eye(116, dtype=np.float32)}))
    count = sum(p.numel() for p in network.parameters())
    assert count == layers == 3_350_500, f"{count} parameters in the network, {layers} by the paper's widths"


@pytest.mark.parametrize(("width", "channels", "stride", "order"), [(5, 7, 2, 3), (4, 4, 1, 3), (3, 6, 2, 1), (3, 5, 1, 2)])
def test_time_and_graph_can_change_places(width, channels, stride, order):
    """What a GPU computes is what a CPU computes, and so are the gradients."""
    torch.manual_seed(0)
    block = LocalBlock(width, channels, stride, M2LGDG(chebyshev_order=order)).double()
    with torch.no_grad():
        block.bias.normal_()
    features = torch.randn(2, width, 11, 6, dtype=torch.float64, requires_grad=True)
    operator = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for way in (graph_then_time, time_then_graph):
        made = way(features, chebyshev_operators(operator, order), block.weights, block.bias, block.temporal)
        inputs = [features, *([operator] if order > 1 else []), block.weights, block.bias, block.temporal.weight]
        found.append([made, *torch.autograd.grad((made * torch.linspace(-1, 1, made.numel()).view_as(made)).sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_channel_of_ones_carries_the_bias_through_time(stride):
    """Near the ends too, where the padding is zeros and not ones; and so are the gradients."""
    torch.manual_seed(0)
    temporal = plain_time_convolution(3, 5, 9, stride).double()
    terms, bias = torch.randn(2, 4, 12, 6, dtype=torch.float64), torch.randn(3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, 9, 1, dtype=torch.float64)
    made = time_convolution(*with_ones(terms, weight, bias, temporal), None, stride)
    expected = time_convolution(terms, weight, None, stride) + bias_through(bias, temporal, 12)
    torch.testing.assert_close(made, expected)
    slope = torch.linspace(-1, 1, made.numel(), dtype=torch.float64).view_as(made)
    both = (torch.autograd.grad((one * slope).sum(), [bias, temporal.bias, temporal.weight]) for one in (made, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sd", [0.02, 1.0])
def test_the_identity_embedding_starts_with_its_sd(sd):
    torch.manual_seed(0)
    encoder = GlobalEncoder(Shape(116, 200, 3, 21, {}), M2LGDG(identity_sd=sd))
    assert encoder.identity.std().item() == pytest.approx(sd, rel=0.05)
    assert encoder.identity.mean().abs().item() < 0.05 * sd
