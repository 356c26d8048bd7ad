"""Code that is not of the package, such as a plugin, must not change the package or its libraries for later cells.

`cells.py` runs cells inside `package_as_it_was` where a study has plugins or methods from elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

PLACES = ("m2lgdg.methods", "m2lgdg.fast")  # beside the root, whose code can change a prediction
CODE = (FunctionType, type, staticmethod, classmethod, property, int, float, str, bytes, tuple, frozenset)  # incl. constants


@contextmanager
def package_as_it_was() -> Iterator[None]:
    """Undo at the end what was changed in the package (functions, constants, tables, classes) and in library settings."""
    names = [name for name in sys.modules if name == "m2lgdg" or (name.startswith("m2lgdg.") and name.count(".") == 1)]
    names += [name for name in sys.modules if name.startswith(tuple(f"{place}." for place in PLACES))]
    holders: list[Any] = [module for name in names if isinstance(module := sys.modules[name], ModuleType)]
    found = {id(value): value for module in holders for value in vars(module).values() if isinstance(value, type)}
    holders += [cls for cls in found.values() if cls.__module__ in names]
    before = [(holder, dict(vars(holder))) for holder in holders]
    tables = [(value, value.copy()) for _, held in before for name, value in held.items() if _is_table(name, value)]
    settings = _settings()
    try:
        yield
    finally:
        _set(settings)
        for holder, held in before:
            _restore(holder, held)
        for table, content in tables:
            if table != content or list(map(id, table.values())) != list(map(id, content.values())):
                table.clear()
                table.update(content)


def _settings() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:  # what it will start with
        return {"numpy": np.geterr()}
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return {"numpy": np.geterr(), "dtype": dtype, "deterministic": deterministic, "device": torch.get_default_device()}


def _set(settings: dict[str, Any]) -> None:
    np.seterr(**settings["numpy"])
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(settings.get("dtype", torch.float32))
        torch.use_deterministic_algorithms(settings.get("deterministic", False))
        if torch.get_default_device() != settings.get("device", torch.device("cpu")):
            torch.set_default_device(settings.get("device"))


def _is_table(name: str, value: object) -> bool:
    return type(value) is dict and not name.startswith("_")


def _restore(holder: Any, held: dict[str, Any]) -> None:
    for name, value in held.items():
        if isinstance(value, CODE) and not name.startswith("__") and vars(holder).get(name) is not value:
            setattr(holder, name, value)
    if isinstance(holder, type):
        for name in [name for name in vars(holder) if name not in held and not name.startswith("_abc")]:
            delattr(holder, name)
