"""CUDA steps that are recorded once as CUDA graphs and replayed, and two computations in parallel on separate streams.

Used by the training loop in `deep` and by fast forms. Replaying saves the thousand small launches of a step; a method declares
whether its step can be recorded. The first steps run unrecorded, because libraries need a warm-up; recording takes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor], dict[str, Tensor]]
WARMUP_STEPS = 3  # steps before the recording


def set_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    """Set the learning rates of an optimizer's groups, which are numbers or tensors on a device."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Recorded:
    """`step` for batches of one size; the returned terms are overwritten by the next call.

    When `phase` changes, Python decisions inside the step may change too, so the recording is discarded.
    """

    def __init__(
        self, step: Step, optimizer: torch.optim.Optimizer, search: bool, phase: Callable[[], object] = lambda: None
    ) -> None:
        self.step, self.optimizer, self.phase = step, optimizer, phase
        self.search = search  # cuDNN benchmark mode, which takes a second (forty in float32)
        self.taken, self.present = 0, phase()
        self.rows: Tensor
        self.terms: dict[str, Tensor]
        self.graph: Any = None
        for group in optimizer.param_groups:  # rates and counters on the device, so that a replay reads current values
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            group |= {"capturable": True, "foreach": False, "fused": True}

    def __call__(self, rows: Tensor) -> dict[str, Tensor]:
        """One step on these rows; batches of another size than the recorded one run unrecorded."""
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
        if self.graph is not None or self.taken <= WARMUP_STEPS:
            return self._warm_up(rows)
        self.rows = rows.clone()
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)  # gradients must be allocated inside the recording
        with torch.cuda.graph(self.graph):
            self.terms = self.step(self.rows)
        torch.cuda.empty_cache()  # workspaces of cuDNN's benchmark
        self.graph.replay()
        return self.terms

    def _warm_up(self, rows: Tensor) -> dict[str, Tensor]:
        """A step on a separate stream, on which libraries must be warmed up before a recording."""
        main, side = torch.cuda.current_stream(), _stream("warm-up", torch.cuda.current_device())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            terms = self.step(rows)
        main.wait_stream(side)
        return terms


class Replayed:
    """Result of `compute` on tensors at fixed addresses; recorded at the second call, overwritten by the next."""

    def __init__(self, compute: Callable[[], Tensor], phase: Callable[[], object] = lambda: None) -> None:
        self.compute, self.phase = compute, phase
        self.present, self.warmed_up = phase(), False
        self.result: Tensor
        self.graph: Any = None

    def __call__(self) -> Tensor:
        """The result for the current values of the tensors."""
        if self.phase() != self.present:
            self.present, self.warmed_up, self.graph = self.phase(), False, None
        if not self.warmed_up:
            self.warmed_up = True
            return self.compute()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.compute()
        self.graph.replay()
        return self.result


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
    """One stream per purpose and process: cuBLAS keeps 32 MiB for every stream it has been used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def at_once(first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Both results. On CUDA, `first` and its gradient run on a parallel stream, so that small kernels fill gaps."""
    if device.type != "cuda":
        return first(), second()
    main, parallel = torch.cuda.current_stream(), _stream("parallel", torch.cuda.current_device())
    parallel.wait_stream(main)
    with torch.cuda.stream(parallel):
        first_result = first()
    second_result = second()
    main.wait_stream(parallel)
    first_result.record_stream(main)
    return first_result, second_result
