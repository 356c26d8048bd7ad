"""Convolution along time of (subject, channel, time, roi) features, and GELU: where networks on series spend their time.

Fast forms call these in place of a layer's own forward. ROIs stay the last, contiguous dimension, so nothing is transposed.
On ARM, where PyTorch's own are slow, both are made of its fast operations; everywhere else PyTorch does the work itself.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

SLOW_CONVOLUTIONS = SLOW_GELU = platform.machine() in ("aarch64", "arm64")


def along_time(convolution: nn.Conv2d, features: Tensor) -> Tensor:
    """The convolution's own forward, (subject, width, time, roi) -> (subject, channel, time / stride, roi)."""
    return time_convolution(features, convolution.weight, convolution.bias, convolution.stride[0])


def time_convolution(features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """The same as conv2d with weight (channel, width, kernel, 1) and padding of half the kernel."""
    if SLOW_CONVOLUTIONS and features.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        if weight.shape[2] == 1:
            return _mixed(features[:, :, ::stride], weight[:, :, 0, 0], bias)
        found: Tensor = _ByProducts.apply(features, weight, bias, stride)  # type: ignore[no-untyped-call]
        return found
    if features.device.type == "cuda":
        features, weight = (_channels_last(one) for one in (features, weight))
    return functional.conv2d(features, weight, bias, stride=(stride, 1), padding=(weight.shape[2] // 2, 0))


def _channels_last(features: Tensor) -> Tensor:
    """Channels last in memory, and zeros for channels that are missing to eight: what a GPU's matrix units take as it is."""
    missing = -features.shape[1] % 8 if features.shape[1] < 8 else 0
    if missing:
        features = functional.pad(features, (0, 0, 0, 0, 0, missing))
    return features.contiguous(memory_format=torch.channels_last)


def _mixed(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight (channel, width) times (subject, width, time, roi): a convolution of kernel 1, with nothing copied."""
    flat, mixing = features.flatten(2), weight.expand(len(features), -1, -1)
    found = torch.bmm(mixing, flat) if bias is None else torch.baddbmm(bias[:, None], mixing, flat)
    return found.view(len(features), len(weight), *features.shape[2:])


def gelu(features: Tensor) -> Tensor:
    """The same as functional.gelu."""
    if SLOW_GELU and features.device.type == "cpu" and features.dtype == torch.float32:
        found: Tensor = _QuickGelu.apply(features)  # type: ignore[no-untyped-call]
        return found
    return functional.gelu(features)


class _QuickGelu(torch.autograd.Function):
    """Three times as quick as PyTorch's own, whose gradient is not vectorised on ARM."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.save_for_backward(features)
        return functional.gelu(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        below = torch.erf(features * math.sqrt(0.5)).add_(1).mul_(0.5)  # probability of less than x
        density = features.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return below.addcmul_(features, density).mul_(gradient)


class _ByProducts(torch.autograd.Function):
    """The convolution and its gradients as matrix products, at the full speed of the processor.

    With time as the first dimension the steps that an output sees lie in a row in memory: a matrix, and nothing is copied to
    make one. What an output step sends back to the features is again such a product, one for each phase of the stride.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        kernel = weight.shape[2]
        padded = _time_first(features, kernel // 2, kernel // 2)  # (time, width, subject roi)
        seen = _windows(padded, kernel, (features.shape[2] - 1) // stride + 1, stride)
        flat = weight[..., 0].transpose(1, 2).flatten(1)  # (channel, kernel width)
        found = torch.bmm(flat.expand(len(seen), -1, -1), seen)  # (time / stride, channel, subject roi)
        if bias is not None:
            found += bias[:, None]
        ctx.save_for_backward(padded, weight)
        ctx.stride, ctx.has_bias = stride, bias is not None
        return _time_third(found, len(features))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        padded, weight = ctx.saved_tensors
        kernel, steps, margin = weight.shape[2], gradient.shape[2], weight.shape[2] // 2
        reach = (kernel - 1) // ctx.stride  # steps of the output before its own that an input meets
        spread = _time_first(gradient, reach, reach)  # (time / stride, channel, subject roi)
        to_features = None
        if ctx.needs_input_grad[0]:
            back = torch.zeros_like(padded) if ctx.stride > 1 else torch.empty_like(padded)
            for phase in range(min(ctx.stride, kernel)):
                taps = weight[:, :, phase :: ctx.stride, 0].flip(2)  # (channel, width, tap)
                count, rows = taps.shape[2], min(len(back[phase :: ctx.stride]), steps + reach)
                seen = _windows(spread[reach + 1 - count :], count, rows, 1)
                flat = taps.permute(1, 2, 0).flatten(1)  # (width, tap channel)
                torch.bmm(flat.expand(rows, -1, -1), seen, out=back[phase :: ctx.stride][:rows])
            to_features = _time_third(back[margin : len(back) - margin], len(gradient))
        total = weight.new_zeros(len(weight), kernel * weight.shape[1])  # (channel, kernel width)
        for sent, seen in zip(spread[reach : reach + steps], _windows(padded, kernel, steps, ctx.stride), strict=True):
            total.addmm_(sent, seen.T)
        to_weight = total.view(len(weight), kernel, -1).transpose(1, 2).unsqueeze(3)
        return to_features, to_weight, gradient.sum(dim=(0, 2, 3)) if ctx.has_bias else None, None


def _time_first(features: Tensor, before: int, after: int) -> Tensor:
    """(subject, channel, time, roi) -> (time, channel, subject roi) with zeros at both ends."""
    subjects, channels, steps, rois = features.shape
    made = features.new_empty(steps + before + after, channels, subjects, rois)
    made[:before].zero_()
    made[before + steps :].zero_()
    made[before : before + steps] = features.permute(2, 1, 0, 3)
    return made.flatten(2)


def _time_third(features: Tensor, subjects: int) -> Tensor:
    """(time, channel, subject roi) -> (subject, channel, time, roi)."""
    return features.view(*features.shape[:2], subjects, -1).permute(2, 1, 0, 3).contiguous()


def _windows(features: Tensor, size: int, count: int, stride: int) -> Tensor:
    """(count, size channel, subject roi) view of (time, channel, subject roi): `size` steps from every `stride`-th on."""
    _, channels, rest = features.shape
    shape, steps = (count, size * channels, rest), (stride * channels * rest, rest, 1)
    return features.as_strided(shape, steps, features.storage_offset())
