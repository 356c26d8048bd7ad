"""How networks are computed: device, precision and memory, fast forms of networks, and CUDA steps that are recorded.

Used by the training loop in `deep`, by fast forms, explanations and studies. The fast forms for `methods/NAME.py` are in
`fast/NAME.py`. A recorded step is replayed as a CUDA graph, which saves the thousand small launches of a step.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from m2lgdg.storage import InputError

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)
Step = Callable[[Tensor], dict[str, Tensor]]
WARMUP_STEPS = 3  # unrecorded steps before the recording, because libraries need a warm-up


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


DEPTHS = ("layers", "depth", "members")  # ends of the names of fields that say how often a part of a network is repeated


def check_network_size(build: Callable[[], nn.Module], weights: Mapping[str, Tensor], method: Any) -> None:
    """Refuse a network whose size differs from that of the stored weights, before time or memory is spent on it."""
    name, stored, made = method.name, sum(value.numel() for value in weights.values()), 0
    for field, value in method.fields().items():
        if field.endswith(DEPTHS) and isinstance(value, int) and value > len(weights):
            raise InputError(f"the weights do not fit method {name}: {len(weights)} arrays for {field} = {value}.")

    def count(_: nn.Module, __: str, parameter: nn.Parameter) -> None:
        nonlocal made
        made += parameter.numel() if parameter is not None else 0
        if made > 20 * stored + 10**6:  # a million layers would take minutes to make; some networks make more than they keep
            raise InputError(f"the weights do not fit method {name}: {stored} numbers for a network of more than that.")

    counting = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            size = sum(value.numel() for value in build().state_dict().values())
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # meta tensors have no values, lazy layers no size yet
        return
    finally:
        counting.remove()
    if size != stored:
        raise InputError(f"the weights do not fit method {name}: {stored} numbers for a network of {size}.")


def fast_form(network: AnyNetwork) -> AnyNetwork:
    """The network, with each module in its fast form where `fast/` has one.

    A fast form is a subclass that computes the same from the same parameters, so that only the class of a module changes.
    """
    for module in network.modules():
        plain = type(module)
        if plain not in _FAST:
            _FAST[plain] = _fast_class(plain)
            _PLAIN.setdefault(_FAST[plain], plain)
        module.__class__ = _FAST[plain]
    return network


def plain_form(network: AnyNetwork) -> AnyNetwork:
    """The network, with each module in the form of its method's file; for exports, which have no kernels."""
    for module in network.modules():
        module.__class__ = _PLAIN.get(type(module), type(module))
    return network


_FAST: dict[type[nn.Module], type[nn.Module]] = {}
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {}


def _fast_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Fast form of a class, or of the nearest base class that has one; the class itself without any."""
    for base in plain.__mro__:
        package, _, name = base.__module__.rpartition(".")
        module = f"m2lgdg.fast.{name}"
        if package != "m2lgdg.methods" or importlib.util.find_spec(module) is None:
            continue
        fast: type[nn.Module] | None = getattr(importlib.import_module(module), "FORMS", {}).get(base)
        if fast is not None:
            if issubclass(plain, fast):  # it is one already
                return plain
            return fast if base is plain else type(plain.__name__, (fast, plain), {})
    return plain


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
