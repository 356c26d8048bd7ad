"""Checks of a method's fields: names, types and bounds of values that come from a study file, a command or a model folder.

`registry.create`, studies and `Model.load` use it. It knows methods only as dataclasses with some class attributes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from m2lgdg.storage import InputError


def checked_fields(cls: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with lists turned into tuples; an InputError for the first that is unknown or has the wrong type."""
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    checked = {}
    for key, given in fields.items():
        if key in cls.former_fields:
            raise InputError(f"method {cls.name} no longer has the field {key}: {cls.former_fields[key]}; leave it out.")
        if key not in known:
            raise InputError(f"method {cls.name} has no field {' '.join(key.split())[:100]}{nearest(key, known)}")
        value: Any = tuple(given) if isinstance(given, list) else given
        if not _fits(value, hints[key]):
            if typing.get_origin(hints[key]) is Literal:
                choices = ", ".join(map(str, typing.get_args(hints[key])))
                raise InputError(f"method {cls.name}, field {key}: {shown(value)} is not one of {choices}.")
            kind = getattr(hints[key], "__name__", str(hints[key]))
            raise InputError(f"method {cls.name}, field {key}: {shown(value)} is not of type {kind}.")
        checked[key] = float(value) if hints[key] is float else value
    return checked


def check_bounds(method: Any) -> None:
    """Refuse unusable values. Integers are counts: at least 1 unless the default is smaller or the class has other `bounds`."""
    bounds = {name: pair for cls in reversed(type(method).__mro__) for name, pair in vars(cls).get("bounds", {}).items()}
    hints = typing.get_type_hints(type(method))
    for field in dataclasses.fields(method):
        value, where = getattr(method, field.name), f"method {method.name}, field {field.name}"
        if field.name in method.unused and value != field.default:
            raise InputError(f"{where}: this method does not use it; leave it at {field.default}.")
        if value == () and field.name not in method.may_be_empty:
            raise InputError(f"{where} is empty.")
        is_count = int in (hints[field.name], *typing.get_args(hints[field.name]))
        smallest = min(1, field.default) if isinstance(field.default, int) else 1
        least, below = bounds.get(field.name, (smallest if is_count else -math.inf, math.inf))
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if not abs(number) <= sys.float_info.max:  # integers can exceed it, too
                raise InputError(f"{where}: {shown(number)} is not a finite number.")
            if not number >= least:
                raise InputError(f"{where}: {number} is too small; it must be at least {least:g}.")
            if not number < below:
                raise InputError(f"{where}: {number} is too large; it must be below {below:g}.")


def variant_fields(name: str, variants: Mapping[str, Mapping[str, Any]], variant: str) -> dict[str, Any]:
    """Fields that a variant of a method changes."""
    if variant not in variants:
        raise InputError(f"method {name} has no variant {variant}{nearest(variant, variants)}")
    return dict(variants[variant])


def shown(value: object) -> str:
    """`repr` of a value, cut to 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return "a number with too many digits"
    return text if len(text) <= 100 else f"{text[:99]}…"


def nearest(word: str, known: Iterable[str]) -> str:
    """End of a message about an unknown name: '; did you mean X?', or the list of available names."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; available: {', '.join(known) or 'none'}."


def _fits(value: object, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is dict:
        return isinstance(value, dict)
    if origin is tuple:
        inside = inner[:1] * len(value) if isinstance(value, tuple) and inner[1:] == (...,) else inner
        return isinstance(value, tuple) and len(value) == len(inside) and all(map(_fits, value, inside))
    if hint is float:
        return isinstance(value, float) or (_fits(value, int) and abs(typing.cast(int, value)) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
