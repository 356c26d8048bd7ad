"""Layers of several networks of one kind as one: weights are (member, ...), and every product is a batched one.

`stacked` makes such a network of trained or new ones, and `fast/m2lgdg_connectome.py` trains its members in this form. A layer
takes (member, subject, ..., width) and gives each member what its own layer would give.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


class Linear(nn.Linear):
    """Weight (member, out, in), bias (member, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """(member, ..., in) -> (member, ..., out)."""
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """Weight and bias (member, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """(member, ..., width)."""
        flat = functional.layer_norm(x.flatten(1, -2), self.normalized_shape, eps=self.eps)  # (member, rows, width)
        return torch.addcmul(self.bias[:, None], flat, self.weight[:, None]).view(x.shape)


class BatchNorm(nn.BatchNorm1d):
    """Statistics, weight and bias (member, width); over the subjects of each member."""

    def forward(self, x: Tensor) -> Tensor:
        """(member, subject, width)."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        assert self.momentum is not None
        columns = x.transpose(0, 1).flatten(1)  # (subject, member * width)
        mean, variance, weight, bias = (
            value.flatten() for value in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        normed = functional.batch_norm(columns, mean, variance, weight, bias, self.training, self.momentum, self.eps)
        return normed.view(len(columns), *self.weight.shape).transpose(0, 1)


class Attention(nn.MultiheadAttention):
    """Weights (member, 3 * width, width)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """(member, subject, token, width); keys and values are of the same tokens."""
        width, shape = self.embed_dim, query.shape
        q = linear(query, self.in_proj_weight[:, :width], self.in_proj_bias[:, :width])
        both = linear(key, self.in_proj_weight[:, width:], self.in_proj_bias[:, width:])
        k, v = both[..., :width], both[..., width:]  # (member, subject, token, width)
        q, k, v = (
            each.reshape(-1, each.shape[2], self.num_heads, self.head_dim).transpose(1, 2) for each in (q, k, v)
        )  # (member * subject, head, token, width / heads)
        attention = torch.softmax(q @ k.mT * self.head_dim**-0.5, dim=-1)  # (member * subject, head, token, token)
        mixed = dropped(attention, self.dropout, self.training) @ v  # (member * subject, head, token, width / heads)
        return self.out_proj(mixed.transpose(1, 2).reshape(shape)), None


class Dropout(nn.Dropout):
    """Dropout with the cheap masks of `dropped`."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return dropped(x, self.p, self.training)


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: Linear,
    nn.LayerNorm: LayerNorm,
    nn.BatchNorm1d: BatchNorm,
    nn.MultiheadAttention: Attention,
    nn.Dropout: Dropout,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(member, ..., in) by weights (member, out, in) -> (member, ..., out)."""
    flat = x if x.dim() == 3 else x.flatten(1, -2)  # (member, rows, in)
    product = torch.baddbmm(bias[:, None], flat, weight.mT)  # (member, rows, out)
    return product if x.dim() == 3 else product.view(*x.shape[:-1], weight.shape[1])


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout. On a CPU, PyTorch's would take a quarter of a training step; this draws 16 bits for a number."""
    if not (training and 0 < p < 1) or x.device.type != "cpu":
        return functional.dropout(x, p, training)
    whole = torch.iinfo(torch.int64)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(whole.min, None).view(torch.int16)
    kept = drawn[: x.numel()].view(x.shape) >= round(p * 2**16) - 2**15
    return x * (kept * (1 / (1 - p)))


def stacked(
    networks: Sequence[AnyNetwork], layers: dict[type[nn.Module], type[nn.Module]], common: Sequence[str]
) -> AnyNetwork:
    """One network of all, with `layers` in place of theirs, and the `common` buffers of the first.

    From now on, weights and statistics of each network are rows of those of the stack, so that training it trains them all.
    """
    first: Any = networks[0]
    stack = copy.deepcopy(first, {id(first.config): first.config})
    for path, module in stack.named_modules():
        module.__class__ = layers.get(type(module), type(module))
        own = [network.get_submodule(path) for network in networks]
        for name, parameter in module.named_parameters(recurse=False):
            rows = torch.stack([each.get_parameter(name).detach() for each in own])  # (member, ...)
            setattr(module, name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
            for each, row in zip(own, rows, strict=True):
                each.get_parameter(name).data = row
        for name, _ in module.named_buffers(recurse=False):
            if name not in common:
                rows = torch.stack([each.get_buffer(name) for each in own])
                module._buffers[name] = rows
                for each, row in zip(own, rows, strict=True):
                    each._buffers[name] = row
    result: AnyNetwork = stack
    return result


def clip_each(parameters: Sequence[Tensor], largest: float) -> None:
    """Scale the gradient of each member down to this norm."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients])  # (parameter, member)
    factor = (largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)  # (member,)
    torch._foreach_mul_(gradients, [factor.view(-1, *[1] * (each.dim() - 1)) for each in gradients])
