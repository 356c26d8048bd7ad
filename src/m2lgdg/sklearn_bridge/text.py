"""A scikit-learn estimator as text: an import path, or JSON with its class and parameters, and back.

The text is a field of the method (`from_sklearn`), so that study files, cell keys and workers have all of it without pickle.
Code outside scikit-learn, numpy and scipy enters by a hash of its file, because the versions of only these are in a cell's key.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import inspect
import json
import math
import operator
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from m2lgdg.registry import METHODS
from m2lgdg.storage import InputError, one_line

LIBRARIES = ("sklearn", "numpy", "scipy", "builtins", "math")  # their versions are in the key of a cell, or of no concern
MAIN = "__main__"
CLASS, IMPORT, TUPLE, DICT, ARRAY, FLOAT, RANDOM = "class", "import", "tuple", "dict", "array", "float", "distribution"
_LOCAL: dict[str, Any] = {}  # by path: what another process cannot import, such as a function of a notebook


def estimator_text(estimator: Any) -> str:
    """JSON text of an estimator that is not fitted."""
    return json.dumps(_encoded(estimator, "the estimator"), sort_keys=True)


def estimator_of(text: str) -> Any:
    """The estimator of a text: an import path of a class, of a function that returns an estimator, or JSON."""
    if not text.startswith("{"):
        given = resolve(text)
        estimator = given() if (callable(given) and not hasattr(given, "get_params")) or isinstance(given, type) else given
    else:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"field estimator is neither an import path nor valid JSON ({one_line(error)[:100]}).") from None
        estimator = _decoded(content)
    if not is_estimator(estimator):
        raise InputError(f"{text[:100]} is not a scikit-learn estimator (it has no fit or get_params).")
    return estimator


def is_estimator(value: Any) -> bool:
    """Whether an object looks like an estimator of scikit-learn."""
    return hasattr(value, "fit") and hasattr(value, "get_params")


def split_path(path: str) -> tuple[str, str]:
    """Module and name of an import path, `module:name` or `module.name`."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return module, name


def resolve(path: str) -> Any:
    """Object of an import path, `module:name` or `module.name`; the module may be a plugin, by the name of its file."""
    if path in _LOCAL:
        return _LOCAL[path]
    module_name, name = split_path(path)
    if not module_name or not name:
        raise InputError(f"{path[:100]} is not an import path; write module:name, such as sklearn.svm:SVC.")
    if module_name == MAIN or "@" in name:
        raise InputError(
            f"{path.partition('@')[0][:100]} is defined in another process; put it into a module or a plugin file."
        )
    try:
        value = importlib.import_module(METHODS.plugin_module(module_name) or module_name)
    except Exception as error:  # a module may raise anything
        advice = "install the package, or list its file in plugins"
        raise InputError(f"cannot import {module_name[:100]} ({type(error).__name__}: {one_line(error)}); {advice}.") from None
    try:
        return operator.attrgetter(name)(value)
    except AttributeError:
        raise InputError(f"module {module_name} has no {name}.") from None


def path_of(value: Any) -> str:
    """Import path of a class or function."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if not module or not name:
        raise InputError(f"{value!r:.100} has no import path; pass a function that makes the estimator by its import path.")
    module = METHODS.plugin_stem(module) or _public(module, name, value)
    if module != MAIN and "<" not in name:
        return f"{module}:{name}"
    path = f"{module}:{name}@{_source_hash(value, name)}"
    _LOCAL[path] = value
    return path


def _source_hash(value: Any, name: str) -> str:
    """Hash of the source of a class or function, and of the values that a function has captured."""
    try:
        texts = [inspect.getsource(value)]
    except (OSError, TypeError):
        raise InputError(f"the source of {name} cannot be read; put it into a module or a plugin file.") from None
    if hasattr(value, "__code__"):  # two functions can be on one line
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        texts += [value.__code__.co_code.hex(), repr(value.__code__.co_names), repr(value.__defaults__), repr(captured)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _public(module: str, name: str, value: Any) -> str:
    """Public module of a class, such as sklearn.svm for sklearn.svm._classes."""
    public = module.partition("._")[0]
    is_there = public != module and getattr(importlib.import_module(public), name, None) is value
    return public if is_there else module


def code_of(*texts: str) -> str:
    """Hash of the code that texts or import paths name, outside the libraries; empty if there is none. Nothing is imported."""
    paths = sorted({path for text in texts for path in _paths(text)})
    hashed = [code for path in paths if (code := _code(path))]
    return hashlib.sha256("\n".join(hashed).encode()).hexdigest()[:16] if hashed else ""


def _paths(text: str) -> Iterator[str]:
    if text.startswith("{"):
        try:
            yield from _paths_in(json.loads(text))
        except (ValueError, RecursionError):  # estimator_of reports it
            return
    elif ":" in text or "." in text:
        yield text


def _paths_in(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        yield from (str(value) for key, value in content.items() if key in (CLASS, IMPORT))
        content = list(content.values())
    for one in content if isinstance(content, list) else ():
        yield from _paths_in(one)


def _code(path: str) -> str:
    """Path and hash of the file of its module; a plugin is part of the key of a cell already."""
    module, _ = split_path(path)
    top = module.partition(".")[0]
    if top in LIBRARIES or "@" in path or METHODS.plugin_module(module):  # a local path has its hash at its end
        return ""
    file = _file(module)
    content = hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else "not found"
    try:
        return f"{path} {content} {version(top)}"
    except (PackageNotFoundError, ValueError):
        return f"{path} {content}"


def _file(module: str) -> Path | None:
    """File of a module, without importing it or the packages above it."""
    places: Any = None
    words = module.split(".")
    for i in range(len(words)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(words[: i + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin else None


def _encoded(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic):
        return _encoded(value.item(), where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    if isinstance(value, list):
        return [_encoded(one, where) for one in value]
    if isinstance(value, tuple):
        return {TUPLE: [_encoded(one, where) for one in value]}
    if isinstance(value, dict):
        return {DICT: [[_encoded(key, where), _encoded(one, where)] for key, one in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufU":
        return {ARRAY: value.tolist(), "dtype": value.dtype.str}
    return _encoded_object(value, where)


def _encoded_object(value: Any, where: str) -> Any:
    if isinstance(value, type) or inspect.isroutine(value) or isinstance(value, np.ufunc):
        return {IMPORT: path_of(value)}
    if type(value).__module__.startswith("scipy.stats") and hasattr(value, "dist"):  # of a randomised search
        return {RANDOM: value.dist.name, "values": _encoded([list(value.args), dict(value.kwds)], where)}
    names = _parameters(type(value))
    if names is None or not all(hasattr(value, name) for name in names):
        raise InputError(
            f"{where} holds {type(value).__name__}, which cannot be written as text; pass the import path of a function that "
            "makes the estimator."
        )
    changed = {}
    for name, default in names.items():
        encoded = _encoded(getattr(value, name), f"parameter {name} of {type(value).__name__}")
        if default is inspect.Parameter.empty or encoded != _default(default):
            changed[name] = encoded
    return {CLASS: path_of(type(value)), "parameters": changed}


def _default(value: Any) -> Any:
    try:
        return _encoded(value, "")
    except InputError:
        return object()  # equals nothing


def _parameters(cls: type) -> dict[str, Any] | None:
    """Parameters of an estimator, kernel or splitter with their defaults; None for other classes."""
    if not hasattr(cls, "get_params") and not hasattr(cls, "split"):
        return None
    try:
        given = inspect.signature(cls).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY) for one in given):
        return None
    return {one.name: one.default for one in given}


def _decoded(content: Any) -> Any:
    if isinstance(content, list):
        return [_decoded(one) for one in content]
    if not isinstance(content, dict):
        return content
    if CLASS in content:
        return resolve(content[CLASS])(**{name: _decoded(value) for name, value in content["parameters"].items()})
    if IMPORT in content:
        return resolve(content[IMPORT])
    if RANDOM in content:
        args, kwds = _decoded(content["values"])
        return getattr(importlib.import_module("scipy.stats"), content[RANDOM])(*args, **kwds)
    if TUPLE in content:
        return tuple(_decoded(one) for one in content[TUPLE])
    if DICT in content:
        return {_decoded(key): _decoded(value) for key, value in content[DICT]}
    return float(content[FLOAT]) if FLOAT in content else np.array(content[ARRAY], dtype=content["dtype"])
