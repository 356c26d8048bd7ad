"""The same networks in less time: fast forms of networks, kernels and recorded steps; nothing outside imports Triton.

A method's `build` asks for the fast form of its network with `fast_form`; the forms for `methods/NAME.py` are in
`fast/NAME.py`, and `plain_form` goes back. The training loop in `deep.py` uses `recording` for steps on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, TypeVar

from torch import Tensor, nn

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


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
