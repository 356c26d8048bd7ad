"""The same networks in less time: fast forms of networks, kernels, recorded steps. Nothing outside knows of Triton.

A method asks for the fast form of its network with `fast_form`, in `build`; the forms of `methods/NAME.py` are in
`fast/NAME.py`. `plain_form` goes back. The training loop asks `recording` for steps that are recorded on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, TypeVar

from torch import Tensor, nn

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


def fast_form(network: AnyNetwork) -> AnyNetwork:
    """The network itself, each of its parts in its fast form where `fast/` has one.

    A fast form is a subclass that computes the same from the same parameters, so that a part need only change its class.
    """
    for part in network.modules():
        plain = type(part)
        if plain not in _FAST:
            _FAST[plain] = _fast_class(plain)
            _PLAIN.setdefault(_FAST[plain], plain)
        part.__class__ = _FAST[plain]
    return network


def plain_form(network: AnyNetwork) -> AnyNetwork:
    """The network itself, each of its parts as its method's file has it; for exports, which know no kernels."""
    for part in network.modules():
        part.__class__ = _PLAIN.get(type(part), type(part))
    return network


_FAST: dict[type[nn.Module], type[nn.Module]] = {}
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {}


def _fast_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The fast form of a class: of itself, or of the class that it extends."""
    for base in plain.__mro__:
        package, _, name = base.__module__.rpartition(".")
        home = f"m2lgdg.fast.{name}"
        if package != "m2lgdg.methods" or importlib.util.find_spec(home) is None:
            continue
        fast: type[nn.Module] | None = importlib.import_module(home).FORMS.get(base)
        if fast is not None:
            return fast if base is plain else type(plain.__name__, (fast, plain), {})
    return plain


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels_fit(features: Tensor, *channels: int) -> bool:
    """Whether the kernels can take features of these numbers of channels (powers of two: a row is a block of a kernel)."""
    return features.is_cuda and _has_triton() and all(8 <= count <= 512 and count & (count - 1) == 0 for count in channels)


def norm_kernels() -> Any:
    """`fast.norms`, imported when it is needed: it cannot be imported without Triton."""
    return importlib.import_module("m2lgdg.fast.norms")


def graph_kernels() -> Any:
    """`fast.graph_product`, likewise."""
    return importlib.import_module("m2lgdg.fast.graph_product")
