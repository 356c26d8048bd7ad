"""Choice of a device, its numerical precision and its memory.

Used by the training loop in `deep`, by explanations and by studies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from m2lgdg.storage import InputError


def choose_device(name: str) -> torch.device:
    """Device by name: cpu, cuda, cuda:1, mps, or auto for the best one available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, recordings and kernels use the current device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"device {name} is not available on this machine.") from None
    return device


def cuda_failed() -> bool:
    """Whether CUDA is unusable in this process, as after an out-of-bounds access: every later call fails, too."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.ones(1, device="cuda").item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


@contextmanager
def numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """Context with the given precision and determinism of PyTorch; the previous settings are restored afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    tf32_before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        if deterministic != before:  # setting it imports half a second of PyTorch, even without a change
            torch.use_deterministic_algorithms(deterministic)
        yield
    finally:
        if deterministic != before:
            torch.use_deterministic_algorithms(before)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32_before


def free_memory(device: torch.device) -> None:
    """Free unused memory of a device and reset its peak counter.

    Networks and their recordings refer to each other, so the garbage collector must run first.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def check_network_size(build: Callable[[], nn.Module], stored: int, name: str) -> None:
    """Refuse a network whose size differs from the number of stored values, before memory is allocated for it."""
    try:
        with torch.device("meta"):
            size = sum(value.numel() for value in build().state_dict().values())
    except (RuntimeError, NotImplementedError, TypeError):  # a plugin's network may read values, and meta tensors have none
        return
    if size != stored:
        raise InputError(f"the weights do not fit method {name}: {stored} numbers for a network of {size}.")
