"""The Triton kernels of `m2lgdg.fast` beside the PyTorch operations they stand for; without a GPU in Triton's interpreter."""

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")
PLACE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py asks for the interpreter where there is no GPU

from m2lgdg.fast import graph_product, norms  # noqa: E402

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs one after the other."""
    if PLACE == "cpu":
        monkeypatch.setattr(norms, "PROGRAMS", 3)
        monkeypatch.setattr(graph_product, "PROGRAMS", 2)


def features(*shape, seed=0):
    made = 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.7
    return made.to(PLACE).contiguous(memory_format=torch.channels_last).requires_grad_()


def norm(channels, seed):
    made = nn.BatchNorm2d(channels).to(PLACE)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.copy_(0.5 + torch.rand(channels, generator=draw))
        made.bias.copy_(torch.randn(channels, generator=draw))
    return made


def close(one, other, tolerance=2e-5):
    assert torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))


def same_running(one, other):
    close(one.running_mean, other.running_mean)
    close(one.running_var, other.running_var)
    assert one.num_batches_tracked == other.num_batches_tracked == 1


def test_joined_equals_two_batch_norms_a_sum_and_relu():
    through, rest, bias = (
        features(3, 16, 4, 7),
        features(3, 16, 4, 7, seed=1),
        torch.randn(16, device=PLACE, requires_grad=True),
    )
    mine, theirs = (norm(16, 2), norm(16, 3)), (norm(16, 2), norm(16, 3))
    weight = torch.randn(3, 16, 4, 7, device=PLACE)
    found = norms.joined(through, rest, *mine, bias, 0.0)
    got = torch.autograd.grad((found * weight).sum(), [through, rest, *mine[0].parameters(), *mine[1].parameters(), bias])
    expected = functional.relu(theirs[0](through) + theirs[1](rest + bias[:, None, None]))
    inputs = [through, rest, *theirs[0].parameters(), *theirs[1].parameters()]
    close(found, expected)
    for one, other in zip(got, torch.autograd.grad((expected * weight).sum(), inputs), strict=False):
        close(one, other)
    assert torch.equal(got[-1], torch.zeros_like(bias))  # the norm takes any bias away again
    for one, other in zip(mine, theirs, strict=True):
        same_running(one, other)


def test_the_gradient_of_a_sum_over_time_and_rois_is_not_written_out():
    through, rest, bias = features(3, 16, 4, 7), features(3, 16, 4, 7, seed=1), torch.zeros(16, device=PLACE)
    found = norms.joined(through, rest, norm(16, 2), norm(16, 3), bias, 0.0)
    weight = torch.randn(3, 16, device=PLACE)
    got = torch.autograd.grad((found.sum(dim=(2, 3)) * weight).sum(), [through, rest], retain_graph=True)
    expected = torch.autograd.grad((found * weight[:, :, None, None].expand(3, 16, 4, 7).contiguous()).sum(), [through, rest])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rois_first", [False, True])
def test_pooled_equals_batch_norm_gelu_and_the_maximum_of_two_steps(rois_first):
    series, bias = features(3, 8, 6, 5), torch.randn(8, device=PLACE, requires_grad=True)
    mine, theirs = norm(8, 2), norm(8, 2)
    weight = torch.randn(3, 8, 3, 5, device=PLACE)
    found = norms.pooled(series, mine, bias, 0.0, rois_first)
    assert found.permute(0, 3, 2, 1).is_contiguous() == rois_first
    got = torch.autograd.grad((found * weight).sum(), [series, mine.weight, mine.bias, bias])
    expected = functional.max_pool2d(functional.gelu(theirs(series + bias[:, None, None])), (2, 1))
    close(found, expected)
    for one, other in zip(
        got, torch.autograd.grad((expected * weight).sum(), [series, theirs.weight, theirs.bias]), strict=False
    ):
        close(one, other)
    assert torch.equal(got[-1], torch.zeros_like(bias))
    same_running(mine, theirs)


@pytest.mark.parametrize("which", ["joined", "pooled"])
def test_dropout_keeps_its_share_and_scales_what_it_keeps(which):
    series = features(8, 32, 8, 20)
    call = {
        "joined": lambda p: norms.joined(series, series, norm(32, 0), norm(32, 1), torch.zeros(32, device=PLACE), p),
        "pooled": lambda p: norms.pooled(series, norm(32, 0), torch.zeros(32, device=PLACE), p, True),
    }[which]
    whole, some, again = call(0.0), call(0.25), call(0.25)
    there = whole != 0
    kept = (some != 0) & there
    close(some[kept], whole[kept] / 0.75)
    share = float(kept.sum() / there.sum())
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / int(there.sum())) ** 0.5
    assert not torch.equal(some, again)  # another seed each time
    both = float((kept & (again != 0)).sum() / there.sum())
    assert abs(both - 0.75**2) < 0.02  # two draws know nothing of each other
    (gradient,) = torch.autograd.grad(some.sum(), series)
    assert torch.isfinite(gradient).all()


def test_the_gradient_goes_where_dropout_kept():
    series = features(2, 8, 4, 5)
    mine = norm(8, 0)
    found = norms.pooled(series, mine, torch.zeros(8, device=PLACE), 0.5)
    weight = torch.randn_like(found)
    (to_bias,) = torch.autograd.grad((found * weight).sum(), mine.bias, retain_graph=True)
    plain = nn.BatchNorm2d(8).to(PLACE)
    plain.load_state_dict(norm(8, 0).state_dict())
    expected = functional.max_pool2d(functional.gelu(plain(series)), (2, 1)) * (found != 0) * 2
    close(to_bias, torch.autograd.grad((expected * weight).sum(), plain.bias)[0])


@pytest.mark.parametrize(("rois", "order"), [(5, 3), (9, 2)])
def test_spread_equals_the_sum_of_products(rois, order):
    draw = torch.Generator().manual_seed(0)
    terms = torch.randn(2, 3, rois, order, 64, generator=draw).to(PLACE).requires_grad_()
    operators = torch.randn(rois, (order - 1) * rois, generator=draw).to(PLACE).requires_grad_()
    level = torch.randn(3, 64, generator=draw).to(PLACE).requires_grad_()
    weight = torch.randn(2, 3, rois, 64, generator=draw).to(PLACE)
    expected = terms[:, :, :, 0] + level[:, None]
    for k in range(1, order):
        operator = operators[:, (k - 1) * rois : k * rois].T
        expected = expected + torch.einsum("nm,btmc->btnc", operator, terms[:, :, :, k])
    found = graph_product.spread(terms, operators, level)
    tolerance = 2e-2 if PLACE == "cuda" else 2e-5  # a GPU multiplies float32 in fewer bits
    close(found, expected, tolerance)
    inputs = [terms, operators, level]
    both = (torch.autograd.grad((one * weight).sum(), inputs) for one in (found, expected))
    for one, other in zip(*both, strict=True):
        close(one, other, tolerance)


def test_the_network_of_m2lgdg_is_the_same_with_and_without_the_kernels(monkeypatch):
    from m2lgdg.deep import Batch, Shape
    from m2lgdg.devices import fast_form
    from m2lgdg.fast import m2lgdg as fast
    from m2lgdg.methods import m2lgdg

    changed = {"length": 16, "global_channels": (8, 8, 8), "local_channels": (8, 16), "local_strides": (1, 2), "dropout": 0.0}
    own = m2lgdg.M2LGDG(**changed)
    draw = torch.Generator().manual_seed(0)
    adjacency = (torch.rand(7, 7, generator=draw) > 0.5).float().numpy()
    torch.manual_seed(0)
    network = fast_form(own.build(Shape(7, 16, 2, 3, {"adjacency": adjacency}))).to(PLACE).train()
    own.class_weight = torch.tensor([0.9, 1.1], device=PLACE)
    label, site = (torch.randint(top, (6,), generator=draw).to(PLACE) for top in (2, 3))
    series, phenotypes = (torch.randn(*shape, generator=draw).to(PLACE) for shape in ((6, 7, 16), (6, 2)))
    batch, before = Batch({"series": series}, phenotypes, label, site), {k: v.clone() for k, v in network.state_dict().items()}
    found = []
    for quick in (False, True):
        network.load_state_dict(before)
        monkeypatch.setattr(fast, "kernels_fit", lambda *_, quick=quick: quick)
        terms = own.loss(network, batch)
        grads = torch.autograd.grad(sum(terms.values()), list(network.parameters()))
        found.append((terms, grads, {k: v.clone() for k, v in network.named_buffers()}))
    for name, value in found[0][0].items():
        close(found[1][0][name], value)
    largest = max(float(one.abs().max()) for one in found[0][1])
    for mine, theirs in zip(found[1][1], found[0][1], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=2e-5 * largest)
    for name, value in found[0][2].items():
        close(found[1][2][name].float(), value.float(), 1e-4)
