"""Where networks are trained: the choice of a device, its numerical precision and its memory.

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
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, recordings and our kernels go to the present one
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"device {name} is not available on this machine.") from None
    return device


def lost() -> bool:
    """Whether CUDA failed for good in this process, as after an access out of bounds: whatever is tried next fails too."""
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
    """How exactly PyTorch computes inside the block; what a process had set is set again after it."""
    before = torch.are_deterministic_algorithms_enabled()
    had = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        if deterministic != before:  # saying what is so already imports half a second of PyTorch
            torch.use_deterministic_algorithms(deterministic)
        yield
    finally:
        if deterministic != before:
            torch.use_deterministic_algorithms(before)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = had


def let_go(device: torch.device) -> None:
    """Give back the memory of a device that nobody uses any more: networks and their recordings hold on to each other.

    The peak is counted anew from here.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def refuse_other_size(build: Callable[[], nn.Module], stored: int, name: str) -> None:
    """Refuse a network of more or fewer numbers than are stored for it, before it takes memory."""
    try:
        with torch.device("meta"):
            size = sum(value.numel() for value in build().state_dict().values())
    except (RuntimeError, NotImplementedError, TypeError):  # a user's own network may look at values, which are none here
        return
    if size != stored:
        raise InputError(f"the weights do not fit method {name}: {stored} numbers for a network of {size}.")
