"""Convolution along time and GELU: the hand-made gradients are PyTorch's own."""

import pytest
import torch
from torch.nn import functional

from m2lgdg.fast import time_convolution as fast
from m2lgdg.fast.time_convolution import along_time, gelu, time_convolution


@pytest.mark.parametrize("kernel", [1, 3, 9])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("time", [9, 10, 12])
@pytest.mark.parametrize("biased", [True, False])
def test_the_products_are_the_convolution_and_its_gradient(kernel, stride, time, biased, monkeypatch):
    monkeypatch.setattr(fast, "SLOW_CONVOLUTIONS", True)
    torch.manual_seed(0)
    features, weight = torch.randn(3, 2, time, 5).double(), torch.randn(4, 2, kernel, 1).double()
    bias = torch.randn(4).double() if biased else None
    given = [one.requires_grad_(True) for one in (features, weight, bias) if one is not None]
    plain = functional.conv2d(features, weight, bias, stride=(stride, 1), padding=(kernel // 2, 0))
    own = time_convolution(features, weight, bias, stride)
    assert own.grad_fn.name() == ("ViewBackward0" if kernel == 1 else "_ByProductsBackward")
    torch.testing.assert_close(own, plain)
    weights = torch.randn_like(plain)
    for mine, theirs in zip(
        torch.autograd.grad((own * weights).sum(), given), torch.autograd.grad((plain * weights).sum(), given), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_only_where_it_pays(monkeypatch):
    features, layer = torch.randn(2, 3, 20, 4), torch.nn.Conv2d(3, 6, (5, 1), padding=(2, 0))
    monkeypatch.setattr(fast, "SLOW_CONVOLUTIONS", True)
    assert "Products" in along_time(layer, features).grad_fn.name()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "Products" not in along_time(layer, features).grad_fn.name()
    monkeypatch.setattr(fast, "SLOW_CONVOLUTIONS", False)
    assert "Products" not in along_time(layer, features).grad_fn.name()


def test_gelu(monkeypatch):
    monkeypatch.setattr(fast, "SLOW_GELU", True)
    features = torch.cat([torch.linspace(-12, 12, 2001), torch.zeros(1)]).requires_grad_(True)
    own, plain = gelu(features), functional.gelu(features)
    assert own.grad_fn.name() == "_FastGeluBackward"
    weights = torch.linspace(-2, 3, 2002)
    torch.testing.assert_close(own, plain)
    mine, theirs = (torch.autograd.grad(one, features, weights)[0] for one in (own, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
