"""Digests of what a method keeps outside `state_` and `facts_`: attributes, globals of its modules, classes and caches.

`study.audit` compares them between cohorts whose target differs. What is kept there is not saved with a model, and reaches
the next target that the same process fits.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import os
import sys
import types
from collections.abc import Iterator

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.method import Method
from m2lgdg.study.watch import is_of_library

KNOWN = (
    "state_",
    "facts_",
    "source_distribution_",
    "new_site_",
    "parts_",
    "_folder",
    "_size_checked",
)  # attributes that a model folder stores
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
UNORDERED = (dict, types.MappingProxyType, set, frozenset)
DEEPEST = 20  # nesting at which a value counts by its type only


def kept_outside(cls: type[Method], fitted: Method | None = None) -> dict[str, str]:
    """Digests by name: globals, classes and functions of the method's modules, environment variables, and attributes.

    Modules are those of the method's classes, and all that are neither installed nor of the interpreter.
    """
    kept = {f"environment variable {name}": digest(value) for name, value in os.environ.items()}
    for module_name, module in _modules(cls):
        for name, value in list(vars(module).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType):
                continue
            if isinstance(value, type):
                kept |= _class_attributes(value) if value.__module__ == module_name else {}
            else:
                kept[f"global {name} of {os.path.basename(str(vars(module).get('__file__', module_name)))}"] = digest(value)
    if fitted is not None:
        fields = {field.name for field in dataclasses.fields(fitted)}
        own = {name: value for name, value in vars(fitted).items() if name not in fields and name not in KNOWN}
        kept |= {f"attribute {name}": digest(value) for name, value in own.items()}
    return kept


def _modules(cls: type[Method]) -> Iterator[tuple[str, types.ModuleType]]:
    """Modules of the method's classes, and those that are neither installed nor of the interpreter, with their names."""
    of_method = {base.__module__ for base in cls.__mro__ if base not in (object, Method)}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name == "__main__":
            continue
        path = vars(module).get("__file__")
        if name in of_method or (isinstance(path, str) and not _is_installed(path)):
            yield name, module


@functools.cache  # asked again for thousands of modules at every fit, while the file of a loaded module stays where it is
def _is_installed(path: str) -> bool:
    return is_of_library(os.path.realpath(path))


def _class_attributes(cls: type) -> dict[str, str]:
    attributes = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
    return {f"class attribute {cls.__name__}.{name}": digest(value) for name, value in attributes.items()}


def digest(value: object) -> str:
    """SHA-256 of a value's content, whatever its type; objects count by their attributes, and by their type if they have none.

    Equal content has an equal digest in every process: addresses and the order of sets do not matter.
    """
    return _digest(value, ()).hex()


def _digest(value: object, above: tuple[int, ...]) -> bytes:
    content = hashlib.sha256(f"{type(value).__module__}.{type(value).__qualname__} ".encode())
    if isinstance(value, PLAIN):
        content.update(repr(value).encode("utf-8", "backslashreplace"))
    elif id(value) not in above and len(above) < DEEPEST:
        inside = (*above, id(value))
        try:
            parts = [part if isinstance(part, bytes) else _digest(part, inside) for part in _parts(value)]
        except Exception as error:  # attributes of a foreign object may raise anything; it then counts by its type
            parts = [type(error).__name__.encode()]
        content.update(b"".join(sorted(parts) if isinstance(value, UNORDERED) else parts))
    return content.digest()


def _parts(value: object) -> Iterator[object]:
    """Content of a value: bytes, or values that are digested in turn."""
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str} {value.shape} ".encode()
        yield value.tolist() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Cohort):
        yield value.hash
    elif isinstance(value, pd.DataFrame | pd.Series | pd.Index):
        yield from (value.to_numpy(), [*value.columns] if isinstance(value, pd.DataFrame) else value.name)
    elif isinstance(value, dict | types.MappingProxyType):
        yield from list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, np.random.Generator | np.random.RandomState):
        yield value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)
    elif isinstance(value, type | types.ModuleType):
        yield f"{getattr(value, '__module__', '')} {value.__name__}"
    else:
        yield from _parts_of_object(value)


def _parts_of_object(value: object) -> Iterator[object]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        yield from (str(value.dtype), list(value.shape))
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, functools._lru_cache_wrapper):  # what it holds, which only the garbage collector knows
        yield from (one for one in gc.get_referents(value) if not isinstance(one, types.FunctionType | type))
    elif isinstance(value, types.FunctionType):
        yield value.__qualname__
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield from (value.__defaults__, value.__kwdefaults__, cells, vars(value))
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    else:
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
        yield {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)}
        yield getattr(value, "__dict__", None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False
