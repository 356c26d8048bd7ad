"""Convolution along time of (subject, channel, time, roi) features, and GELU: where networks on series spend their time.

Networks of `methods/` build on `TimeConvolution`; ROIs stay the last, contiguous dimension, so nothing is transposed between.
On ARM, where PyTorch's own gradients of both are slow, they are made of its quick operations; everywhere else it does the work.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

SLOW_BACKWARDS = platform.machine() in ("aarch64", "arm64")


class TimeConvolution(nn.Conv2d):
    """A convolution of odd kernel along time with same padding, alike for every ROI."""

    def __init__(self, width: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(width, channels, (kernel, 1), stride=(stride, 1), padding=(kernel // 2, 0))

    def forward(self, features: Tensor) -> Tensor:
        """(subject, width, time, roi) -> (subject, channel, time / stride, roi)."""
        return time_convolution(features, self.weight, self.bias, self.stride[0])


def time_convolution(features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """The same as conv2d with weight (channel, width, kernel, 1) and padding of half the kernel."""
    if (
        SLOW_BACKWARDS
        and features.device.type == "cpu"
        and max(weight.shape[:2]) <= 64
        and not torch.is_autocast_enabled("cpu")
    ):
        found: Tensor = _QuickBackward.apply(features, weight, bias, stride)  # type: ignore[no-untyped-call]
        return found
    return functional.conv2d(features, weight, bias, stride=(stride, 1), padding=(weight.shape[2] // 2, 0))


class Gelu(nn.Module):
    """GELU as it is defined, by the error function."""

    def forward(self, features: Tensor) -> Tensor:
        """Of any shape."""
        return gelu(features)


def gelu(features: Tensor) -> Tensor:
    """The same as functional.gelu."""
    if SLOW_BACKWARDS and features.device.type == "cpu" and features.dtype == torch.float32:
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


class _QuickBackward(torch.autograd.Function):
    """The gradient made of a forward convolution (to the features) and one matrix product for each tap (to the weights)."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.stride, ctx.has_bias = stride, bias is not None
        return functional.conv2d(features, weight, bias, stride=(stride, 1), padding=(weight.shape[2] // 2, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        features, weight = ctx.saved_tensors
        stride, kernel = ctx.stride, weight.shape[2]
        subjects, channels, steps, rois = gradient.shape
        padding = kernel // 2
        to_features = None
        if ctx.needs_input_grad[0]:
            spaced = gradient
            if stride > 1:  # zeros where the stride skipped
                spaced = gradient.new_zeros(subjects, channels, features.shape[2], rois)
                spaced[:, :, : (steps - 1) * stride + 1 : stride] = gradient
            turned = weight.transpose(0, 1).flip(2).contiguous()  # (width, channel, kernel, 1)
            to_features = functional.conv2d(spaced, turned, padding=(kernel - 1 - padding, 0))
        padded = functional.pad(features.permute(1, 2, 0, 3), (0, 0, 0, 0, padding, padding))  # (width, time, subject, roi)
        flat = gradient.permute(1, 2, 0, 3).reshape(channels, -1)  # (channel, time subject roi)
        to_weight = torch.empty_like(weight)
        for tap in range(kernel):
            seen = padded[:, tap : tap + (steps - 1) * stride + 1 : stride].reshape(len(padded), -1)  # a view for stride 1
            to_weight[:, :, tap, 0] = flat @ seen.T
        return to_features, to_weight, gradient.sum(dim=(0, 2, 3)) if ctx.has_bias else None, None
