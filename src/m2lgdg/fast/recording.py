"""CUDA steps that are recorded once and replayed, and two computations side by side on streams of their own.

Used by the training loop in `deep` and by fast forms. Replaying saves the thousand small launches of a step; a method says
whether its step can be recorded. The first steps run unrecorded, which libraries need to settle; recording takes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor], dict[str, Tensor]]
SETTLING = 3  # steps before the recording


def set_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    """The rates of an optimizer's groups, where they are numbers and where they lie on a device."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Recorded:
    """`step` on rows of one number; the terms that it returns are overwritten by the next call.

    Where `phase` changes, Python would decide otherwise in the step than it did: what was recorded is forgotten.
    """

    def __init__(
        self, step: Step, optimizer: torch.optim.Optimizer, search: bool, phase: Callable[[], object] = lambda: None
    ) -> None:
        self.step, self.optimizer, self.phase = step, optimizer, phase
        self.search = search  # whether cuDNN tries all its convolutions once, which takes a second, but forty in float32
        self.taken, self.present = 0, phase()
        self.rows: Tensor
        self.terms: dict[str, Tensor]
        self.graph: Any = None
        for group in optimizer.param_groups:  # rates and counters lie on the device, where a recording reads them anew
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            group |= {"capturable": True, "foreach": False, "fused": True}

    def __call__(self, rows: Tensor) -> dict[str, Tensor]:
        """One step on these rows; rows of another number than those recorded are stepped as they are."""
        if self.phase() != self.present:
            self.taken, self.present, self.graph = 0, self.phase(), None
        if self.graph is not None and len(rows) == len(self.rows):
            self.rows.copy_(rows)
            self.graph.replay()
            return self.terms
        self.taken += 1
        with _searching(self.search):
            return self._first(rows)

    def _first(self, rows: Tensor) -> dict[str, Tensor]:
        if self.graph is not None or self.taken <= SETTLING:
            return self._aside(rows)
        self.rows = rows.clone()
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)  # gradients must be born inside the recording
        with torch.cuda.graph(self.graph):
            self.terms = self.step(self.rows)
        torch.cuda.empty_cache()  # what cuDNN's search tried with
        self.graph.replay()
        return self.terms

    def _aside(self, rows: Tensor) -> dict[str, Tensor]:
        """A step on a stream of its own, as libraries must be warmed up before a recording."""
        here, aside = torch.cuda.current_stream(), _stream("settling", torch.cuda.current_device())
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            terms = self.step(rows)
        here.wait_stream(aside)
        return terms


class Replayed:
    """What `compute` returns, of tensors that stay where they are; recorded at the second call, overwritten by the next."""

    def __init__(self, compute: Callable[[], Tensor], phase: Callable[[], object] = lambda: None) -> None:
        self.compute, self.phase = compute, phase
        self.present, self.settled = phase(), False
        self.found: Tensor
        self.graph: Any = None

    def __call__(self) -> Tensor:
        """The result, computed anew."""
        if self.phase() != self.present:
            self.present, self.settled, self.graph = self.phase(), False, None
        if not self.settled:
            self.settled = True
            return self.compute()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.found = self.compute()
        self.graph.replay()
        return self.found


@contextmanager
def _searching(wanted: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@cache
def _stream(purpose: str, device: int) -> torch.cuda.Stream:
    """One stream for a purpose in all of a process: cuBLAS keeps 32 MiB for every stream that it has ever worked on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def at_once(first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Both results. On CUDA `first` runs on a stream beside `second`, and so does its gradient: small kernels fill gaps."""
    if device.type != "cuda":
        return first(), second()
    here, beside = torch.cuda.current_stream(), _stream("beside", torch.cuda.current_device())
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        one = first()
    other = second()
    here.wait_stream(beside)
    one.record_stream(here)
    return one, other
