"""The same networks in less time: fast forms of networks and kernels; nothing outside imports Triton.

The training loop puts the forms of `fast/NAME.py` in place of the modules of `methods/NAME.py` (`devices.fast_form`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels_fit(features: Tensor, *channels: int) -> bool:
    """Whether the kernels support these features and channel counts (powers of two: a row is a block of a kernel)."""
    return features.is_cuda and _has_triton() and all(8 <= count <= 512 and count & (count - 1) == 0 for count in channels)


def norm_kernels() -> Any:
    """`fast.norms`, imported on demand because it needs Triton."""
    return importlib.import_module("m2lgdg.fast.norms")


def graph_kernels() -> Any:
    """`fast.graph_product`, imported on demand because it needs Triton."""
    return importlib.import_module("m2lgdg.fast.graph_product")


def along_time(convolution: nn.Conv2d, features: Tensor) -> Tensor:
    """Forward of a convolution along time, (subject, width, time, roi) -> (subject, channel, time / stride, roi)."""
    return time_convolution(features, convolution.weight, convolution.bias, convolution.stride[0])


def time_convolution(features: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """conv2d with weight (channel, width, kernel, 1) and padding of half the kernel, in the memory order a GPU needs."""
    if features.device.type == "cuda":
        features, weight = (_channels_last(tensor) for tensor in (features, weight))
    return functional.conv2d(features, weight, bias, stride=(stride, 1), padding=(weight.shape[2] // 2, 0))


def _channels_last(features: Tensor) -> Tensor:
    """Channels last in memory, zero-padded to at least eight channels, as a GPU's matrix units need them."""
    missing = -features.shape[1] % 8 if features.shape[1] < 8 else 0
    if missing:
        features = functional.pad(features, (0, 0, 0, 0, 0, missing))
    return features.contiguous(memory_format=torch.channels_last)
