"""The losses against plain loops and central differences, and the batches in which there is little or nothing to compare."""

import itertools
import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg.losses import (
    cross_site_contrastive_loss,
    difference_loss,
    orthogonality_loss,
    similarity_loss,
    smoothed_cross_entropy,
)

torch.set_num_threads(1)
sizes = st.integers(1, 9)
widths = st.integers(1, 8)
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=40, deadline=None)
COMPONENTS = {  # loss, oracle, how many (subject, width) inputs
    "similarity": (similarity_loss, oracle.similarity, 2),
    "orthogonality": (orthogonality_loss, oracle.orthogonality, 4),
    "difference": (lambda *p: difference_loss(*p, margin=2.5), lambda *p: oracle.difference(*p, margin=2.5), 2),
}
components = pytest.mark.parametrize("name", COMPONENTS)


def single(array):
    """Float32 values, and the same numbers in float64 for the loops."""
    array = np.asarray(array, np.float32)
    return torch.tensor(array, requires_grad=True), array.astype(np.float64)


def draw(seed, subjects, width, count=1, scale=1.0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(subjects, width)) * scale for _ in range(count)]


def batch(seed, subjects, width, sites=3, classes=2):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(subjects, width)), rng.integers(0, classes, subjects), rng.integers(0, sites, subjects)


def contrast(h, label, site, temperature=0.07):
    return cross_site_contrastive_loss(h, torch.as_tensor(label), torch.as_tensor(site), temperature)


def agrees(value, expected):
    assert value.shape == () and value.dtype == torch.float32
    np.testing.assert_allclose(value.item(), expected, rtol=1e-5, atol=1e-5)


def slopes_agree(given, expected):
    np.testing.assert_allclose(given.numpy(), expected, rtol=2e-4, atol=2e-4 * max(1.0, np.abs(expected).max()))


def finite_with_gradient(value, *inputs):
    assert value.dtype == torch.float32 and torch.isfinite(value)
    value.backward()
    for one in inputs:
        assert one.grad is not None and one.grad.dtype == one.dtype and torch.isfinite(one.grad).all()


@components
@many
@given(sizes, widths, seeds, st.sampled_from([0.01, 1.0, 30.0]))
def test_component_losses_are_their_equations(name, subjects, width, seed, scale):
    loss, loops, count = COMPONENTS[name]
    torches, arrays = zip(*map(single, draw(seed, subjects, width, count, scale)), strict=True)
    agrees(loss(*torches), loops(*arrays))


@many
@given(st.integers(1, 14), widths, seeds, st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.07, 0.3, 1.0]))
def test_contrastive_loss_is_its_equation(subjects, width, seed, sites, classes, temperature):
    h, label, site = batch(seed, subjects, width, sites, classes)
    h, array = single(h)
    agrees(contrast(h, label, site, temperature), oracle.contrastive(array, label, site, temperature))


@many
@given(st.integers(1, 14), st.integers(2, 4), seeds, st.sampled_from([0.0, 0.1, 0.5]), st.booleans())
def test_smoothed_cross_entropy_is_the_weighted_mean_over_smoothed_targets(subjects, classes, seed, smoothing, weighted):
    rng = np.random.default_rng(seed)
    logits, array = single(rng.normal(size=(subjects, classes)) * 4)
    label = rng.integers(0, classes, subjects)
    weight, numbers = single(rng.uniform(0.2, 3, classes))
    value = smoothed_cross_entropy(logits, torch.tensor(label), weight.detach() if weighted else None, smoothing)
    agrees(value, oracle.cross_entropy(array, label, numbers if weighted else np.ones(classes), smoothing))


def test_defaults_are_those_of_the_paper():
    (p_f, a), (p_n, b) = map(single, draw(1, 5, 4, 2))
    agrees(difference_loss(p_f, p_n), oracle.difference(a, b, margin=1.0))
    h, label, site = batch(2, 9, 4)
    agrees(
        cross_site_contrastive_loss(single(h)[0], torch.tensor(label), torch.tensor(site)),
        oracle.contrastive(h, label, site, 0.07),
    )
    agrees(smoothed_cross_entropy(single(h[:, :2])[0], torch.tensor(label)), oracle.cross_entropy(h[:, :2], label, [1, 1], 0.1))


@components
@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_component_losses(name, seed):
    loss, loops, count = COMPONENTS[name]
    torches, arrays = zip(*map(single, draw(seed, 4, 5, count)), strict=True)
    loss(*torches).backward()
    for place, one in enumerate(torches):
        arguments = list(arrays)
        slopes_agree(one.grad, oracle.gradient(lambda x, a=arguments, i=place: loops(*a[:i], x, *a[i + 1 :]), arrays[place]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_gradient_of_the_contrastive_loss(seed, temperature):
    h, label, site = batch(seed, 8, 3)
    h, array = single(h)
    contrast(h, label, site, temperature).backward()
    slopes_agree(h.grad, oracle.gradient(lambda x: oracle.contrastive(x, label, site, temperature), array))


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_the_smoothed_cross_entropy(seed):
    logits, label, _ = batch(seed, 7, 2)
    logits, array = single(logits)
    smoothed_cross_entropy(logits, torch.tensor(label), torch.tensor([0.6, 3.0]), 0.1).backward()
    slopes_agree(logits.grad, oracle.gradient(lambda x: oracle.cross_entropy(x, label, [0.6, 3.0], 0.1), array))


def test_the_hinge_is_on_the_batch_mean():
    """One pair beyond the margin, one not: a hinge for each subject would give 1/2, their mean is beyond it and gives 0."""
    p_f = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    p_n = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    value = difference_loss(p_f, p_n, 1.0)
    value.backward()
    assert value.item() == 0 and not p_f.grad.any()


def test_the_margin_reached_exactly_costs_nothing_and_a_hair_above_it_costs_that_hair():
    p_f = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
    p_n = torch.tensor([[0.0, 5.0, 0.0]])
    value = difference_loss(p_f, p_n, 2.0)
    assert value.item() == 0
    finite_with_gradient(value, p_f)
    agrees(difference_loss(p_f, p_n, 2.125), 0.125)


def test_equal_and_opposite_components():
    (s,) = (torch.tensor(a).float() for a in draw(4, 5, 4))
    agrees(similarity_loss(s, s), 0)
    agrees(similarity_loss(s, -s), 4 / 4)  # squared distance 4 over 4 dimensions
    agrees(difference_loss(s, s, 1.0), 1)
    agrees(difference_loss(s, -s, 4.5), 0.5)


@pytest.mark.parametrize(
    ("label", "site"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1]),  # each class at one site: no anchor has a positive
        ([0, 1, 0, 1], [2, 2, 2, 2]),  # one site
        ([1], [0]),  # one subject
        ([0, 1], [0, 1]),  # two subjects with nothing in common
    ],
)
def test_no_valid_anchor_gives_zero_and_a_gradient_of_zero(label, site):
    h = torch.randn(len(label), 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = contrast(h, label, site)
    finite_with_gradient(value, h)
    assert value.item() == 0 and not h.grad.any()


def test_an_anchor_without_positives_is_left_out_of_the_mean_but_stays_in_denominators():
    h, label, site = draw(6, 4, 3)[0], [0, 0, 0, 1], [0, 1, 1, 0]
    with_it, without = contrast(single(h)[0], label, site), contrast(single(h[:3])[0], label[:3], site[:3])
    z = [oracle.unit(v) for v in h]
    mean = 0.0
    for i, positives in ((0, (1, 2)), (1, (0,)), (2, (0,))):  # the fourth is nobody's anchor
        total = sum(math.exp(z[i] @ z[k] / 0.07) for k in range(4) if k != i)
        mean -= sum(math.log(math.exp(z[i] @ z[j] / 0.07) / total) for j in positives) / len(positives) / 3
    agrees(with_it, mean)
    assert with_it > without


def test_a_same_site_same_class_subject_that_comes_closer_raises_the_contrastive_loss():
    """Two subjects of one site, both at right angles to their common positive at the other: only their own angle changes."""
    values = []
    for angle in np.linspace(math.pi, 0.0, 13):
        h = torch.tensor([[1.0, 0.0, 0.0], [math.cos(angle), math.sin(angle), 0.0], [0.0, 0.0, 1.0]], requires_grad=True)
        values.append(contrast(h, [1, 1, 1], [0, 0, 1]))
    assert all(after > before for before, after in itertools.pairwise(values))
    assert values[-1] - values[0] > 5
    closer = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.0, 1.0]], requires_grad=True)
    contrast(closer, [1, 1, 1], [0, 0, 1]).backward()
    assert closer.grad[0, 1] > 0  # descent turns the anchor away from the other of its site


@components
@pytest.mark.parametrize("subjects", [1, 3])
def test_zero_vectors_in_component_losses(name, subjects):
    loss, loops, count = COMPONENTS[name]
    for zeroed in range(count):
        arrays = draw(zeroed, subjects, 4, count)
        arrays[zeroed][:] = 0
        torches, arrays = zip(*map(single, arrays), strict=True)
        value = loss(*torches)
        agrees(value, loops(*arrays))
        finite_with_gradient(value, *torches)


def test_zero_vectors_in_the_contrastive_loss():
    h, label, site = batch(9, 8, 4)
    for zeros in (slice(0, 1), slice(0, 4), slice(None)):
        some = h.copy()
        some[zeros] = 0
        one, array = single(some)
        value = contrast(one, label, site)
        agrees(value, oracle.contrastive(array, label, site))
        finite_with_gradient(value, one)
        assert not one.grad[zeros].any()  # 1e8 by the equation, which clipping would turn into a step for nobody else


def test_all_compute_in_single_precision_under_autocast():
    parts = [torch.tensor(a).float() for a in draw(11, 12, 64, 4)]
    _, label, site = batch(11, 12, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agrees(contrast(parts[0], label, site), oracle.contrastive(parts[0].double().numpy(), label, site))
        for loss, loops, count in COMPONENTS.values():
            agrees(loss(*parts[:count]), loops(*(p.double().numpy() for p in parts[:count])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 300.0])
def test_half_precision_inputs_are_computed_in_single(dtype, scale):
    parts = [(torch.tensor(a) * scale).to(dtype).requires_grad_() for a in draw(10, 8, 16, 4)]
    arrays = [p.detach().double().numpy() for p in parts]
    _, label, site = batch(10, 8, 4)
    for loss, loops, count in COMPONENTS.values():
        value = loss(*parts[:count])
        agrees(value, loops(*arrays[:count]))
        finite_with_gradient(value, *parts[:count])
    value = contrast(parts[0], label, site)
    agrees(value, oracle.contrastive(arrays[0], label, site))
    finite_with_gradient(value, parts[0])
    logits = parts[1][:, :2].detach().requires_grad_()
    value = smoothed_cross_entropy(logits, torch.tensor(label), torch.tensor([0.5, 2.0]))
    agrees(value, oracle.cross_entropy(arrays[1][:, :2], label, [0.5, 2.0]))
    finite_with_gradient(value, logits)
