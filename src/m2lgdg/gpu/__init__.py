"""What a CUDA device computes by kernels of our own (Triton), where PyTorch's would read and write the same memory many times.

Networks ask `ready` and otherwise keep to PyTorch's operations, of which each kernel here is an equal: the names say which.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from torch import Tensor


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def ready(features: Tensor, *channels: int) -> bool:
    """Whether the kernels can take features of these numbers of channels (powers of two: a row is a block of a kernel)."""
    return features.is_cuda and _has_triton() and all(8 <= count <= 512 and count & (count - 1) == 0 for count in channels)


def norm_kernels() -> Any:
    """`gpu.norms`, imported when it is needed: it cannot be where Triton is not."""
    return importlib.import_module("m2lgdg.gpu.norms")


def graph_kernels() -> Any:
    """`gpu.graphs`, likewise."""
    return importlib.import_module("m2lgdg.gpu.graphs")
