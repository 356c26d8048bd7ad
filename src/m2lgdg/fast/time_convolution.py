"""Convolution along time of (subject, channel, time, roi) features, and GELU: the hot spots of networks on series.

Fast forms call these instead of a layer's own forward. ROIs stay the last, contiguous dimension, so nothing is transposed. On
ARM, where PyTorch's versions are slow, both are composed of its fast operations; elsewhere PyTorch's versions are used.
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
    """Forward of a convolution along time, (subject, width, time, roi) -> (subject, channel, time / stride, roi)."""
    return time_convolution(features, convolution.weight, convolution.bias, convolution.stride[0])


def time_convolution(features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Same as conv2d with weight (channel, width, kernel, 1) and padding of half the kernel."""
    if SLOW_CONVOLUTIONS and features.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        if weight.shape[2] == 1:
            return _mixed(features[:, :, ::stride], weight[:, :, 0, 0], bias)
        result: Tensor = _ByProducts.apply(features, weight, bias, stride)  # type: ignore[no-untyped-call]
        return result
    if features.device.type == "cuda":
        features, weight = (_channels_last(tensor) for tensor in (features, weight))
    return functional.conv2d(features, weight, bias, stride=(stride, 1), padding=(weight.shape[2] // 2, 0))


def _channels_last(features: Tensor) -> Tensor:
    """Channels last in memory, zero-padded to at least eight channels, as a GPU's matrix units need them."""
    missing = -features.shape[1] % 8 if features.shape[1] < 8 else 0
    if missing:
        features = functional.pad(features, (0, 0, 0, 0, 0, missing))
    return features.contiguous(memory_format=torch.channels_last)


def _mixed(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight (channel, width) times (subject, width, time, roi): a convolution with kernel size 1, without copies."""
    flat, mixing = features.flatten(2), weight.expand(len(features), -1, -1)
    result = torch.bmm(mixing, flat) if bias is None else torch.baddbmm(bias[:, None], mixing, flat)
    return result.view(len(features), len(weight), *features.shape[2:])


def gelu(features: Tensor) -> Tensor:
    """Same as functional.gelu."""
    if SLOW_GELU and features.device.type == "cpu" and features.dtype == torch.float32:
        result: Tensor = _FastGelu.apply(features)  # type: ignore[no-untyped-call]
        return result
    return functional.gelu(features)


class _FastGelu(torch.autograd.Function):
    """Three times as fast as PyTorch's, whose gradient is not vectorised on ARM."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.save_for_backward(features)
        return functional.gelu(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        below = torch.erf(features * math.sqrt(0.5)).add_(1).mul_(0.5)  # standard normal distribution function
        density = features.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return below.addcmul_(features, density).mul_(gradient)


class _ByProducts(torch.autograd.Function):
    """The convolution and its gradients as matrix products, at the full speed of the processor.

    With time as the first dimension the inputs of an output step are contiguous: a matrix, without a copy. The gradient of the
    features is again such a product, one for each phase of the stride.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        kernel = weight.shape[2]
        padded = _time_first(features, kernel // 2, kernel // 2)  # (time, width, subject * roi)
        windows = _windows(padded, kernel, (features.shape[2] - 1) // stride + 1, stride)
        flat = weight[..., 0].transpose(1, 2).flatten(1)  # (channel, kernel * width)
        result = torch.bmm(flat.expand(len(windows), -1, -1), windows)  # (time / stride, channel, subject * roi)
        if bias is not None:
            result += bias[:, None]
        ctx.save_for_backward(padded, weight)
        ctx.stride, ctx.has_bias = stride, bias is not None
        return _time_third(result, len(features))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        padded, weight = ctx.saved_tensors
        kernel, steps, margin = weight.shape[2], gradient.shape[2], weight.shape[2] // 2
        reach = (kernel - 1) // ctx.stride  # earlier output steps that depend on an input
        spread = _time_first(gradient, reach, reach)  # (time / stride, channel, subject * roi)
        to_features = None
        if ctx.needs_input_grad[0]:
            back = torch.zeros_like(padded) if ctx.stride > 1 else torch.empty_like(padded)
            for phase in range(min(ctx.stride, kernel)):
                taps = weight[:, :, phase :: ctx.stride, 0].flip(2)  # (channel, width, tap)
                count, rows = taps.shape[2], min(len(back[phase :: ctx.stride]), steps + reach)
                windows = _windows(spread[reach + 1 - count :], count, rows, 1)
                flat = taps.permute(1, 2, 0).flatten(1)  # (width, tap * channel)
                torch.bmm(flat.expand(rows, -1, -1), windows, out=back[phase :: ctx.stride][:rows])
            to_features = _time_third(back[margin : len(back) - margin], len(gradient))
        total = weight.new_zeros(len(weight), kernel * weight.shape[1])  # (channel, kernel * width)
        for step, window in zip(spread[reach : reach + steps], _windows(padded, kernel, steps, ctx.stride), strict=True):
            total.addmm_(step, window.T)
        to_weight = total.view(len(weight), kernel, -1).transpose(1, 2).unsqueeze(3)
        return to_features, to_weight, gradient.sum(dim=(0, 2, 3)) if ctx.has_bias else None, None


def _time_first(features: Tensor, before: int, after: int) -> Tensor:
    """(subject, channel, time, roi) -> (time, channel, subject * roi), zero-padded in time."""
    subjects, channels, steps, rois = features.shape
    padded = features.new_empty(steps + before + after, channels, subjects, rois)
    padded[:before].zero_()
    padded[before + steps :].zero_()
    padded[before : before + steps] = features.permute(2, 1, 0, 3)
    return padded.flatten(2)


def _time_third(features: Tensor, subjects: int) -> Tensor:
    """(time, channel, subject * roi) -> (subject, channel, time, roi)."""
    return features.view(*features.shape[:2], subjects, -1).permute(2, 1, 0, 3).contiguous()


def _windows(features: Tensor, size: int, count: int, stride: int) -> Tensor:
    """(count, size * channel, subject * roi) view of (time, channel, subject * roi): windows of `size` steps."""
    _, channels, rest = features.shape
    shape, steps = (count, size * channels, rest), (stride * channels * rest, rest, 1)
    return features.as_strided(shape, steps, features.storage_offset())
