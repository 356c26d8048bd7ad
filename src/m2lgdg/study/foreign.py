"""Code that is not of the package, such as a plugin, must not change the package for the cells after its own.

`cells.py` runs cells inside `package_as_it_was` where a study has plugins or methods from elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

PLACES = ("m2lgdg.methods", "m2lgdg.fast")  # beside the root, whose code can change a prediction
CODE = (FunctionType, type, staticmethod, classmethod, property, int, float, str, bytes, tuple, frozenset)  # incl. constants


@contextmanager
def package_as_it_was() -> Iterator[None]:
    """Undo at the end what was changed in functions, constants, tables and classes of the package."""
    names = [name for name in sys.modules if name.count(".") <= 1 and name.startswith("m2lgdg")]
    names += [name for name in sys.modules if name.startswith(tuple(f"{place}." for place in PLACES))]
    holders: list[Any] = [module for name in names if isinstance(module := sys.modules[name], ModuleType)]
    found = {id(value): value for module in holders for value in vars(module).values() if isinstance(value, type)}
    holders += [cls for cls in found.values() if cls.__module__ in names]
    before = [(holder, dict(vars(holder))) for holder in holders]
    tables = [(value, value.copy()) for _, held in before for name, value in held.items() if _is_table(name, value)]
    try:
        yield
    finally:
        for holder, held in before:
            _restore(holder, held)
        for table, content in tables:
            if table != content or list(map(id, table.values())) != list(map(id, content.values())):
                table.clear()
                table.update(content)


def _is_table(name: str, value: object) -> bool:
    return type(value) is dict and not name.startswith("_")


def _restore(holder: Any, held: dict[str, Any]) -> None:
    for name, value in held.items():
        if isinstance(value, CODE) and not name.startswith("__") and vars(holder).get(name) is not value:
            setattr(holder, name, value)
    if isinstance(holder, type):
        for name in [name for name in vars(holder) if name not in held and not name.startswith("_abc")]:
            delattr(holder, name)
