"""A scikit-learn estimator as text: an import path, or JSON with its class and parameters, and back.

The text is a field of the method (`from_sklearn`), so that study files, cell keys and workers have all of it without pickle.
As a study file or a model folder may be somebody else's, a text can name only estimators of scikit-learn and what belongs to
them, objects of loaded plugins, and what the code of this process gave to `from_sklearn`. The rest is refused before a call.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import operator
import sys
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from m2lgdg.registry import METHODS
from m2lgdg.storage import InputError, one_line

LIBRARIES = ("sklearn", "numpy", "scipy", "builtins", "math")  # their versions are in the key of a cell, or of no concern
ARGUMENTS = ("sklearn.model_selection._split", "sklearn.gaussian_process.kernels")  # modules of splitters and kernels
FUNCTIONS = ("sklearn.feature_selection.", "sklearn.metrics.")  # such as the score of SelectKBest
OF_NUMPY = ("nan_to_num", "clip", "sort", "cumsum", "diff", "round")  # besides ufuncs, for FunctionTransformer
LONGEST_ITEM = 2**12  # bytes of a value of an array
MAIN = "__main__"
CLASS, IMPORT, TUPLE, DICT, ARRAY, FLOAT, RANDOM = "class", "import", "tuple", "dict", "array", "float", "distribution"
_GIVEN: dict[str, Any] = {}  # by path: classes and functions that the code of this process gave to `from_sklearn`


def estimator_text(estimator: Any) -> str:
    """JSON text of an estimator that is not fitted."""
    return json.dumps(_encoded(estimator, "the estimator"), sort_keys=True)


def estimator_of(text: str) -> Any:
    """The estimator of a text: an import path of a class, of a function that returns an estimator, or JSON."""
    try:
        if text.startswith("{"):
            estimator = _decoded(json.loads(text))
        else:
            estimator = resolve(text)
            if is_estimator(estimator) if isinstance(estimator, type) else _is_own_function(estimator):
                estimator = estimator()
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"field estimator is neither an import path nor valid JSON ({one_line(error)[:100]}).") from None
    except Exception as error:  # a class or a function may raise anything
        raise InputError(f"{text[:100]} makes no estimator ({type(error).__name__}: {one_line(error)[:100]}).") from None
    if not is_estimator(estimator) or isinstance(estimator, type):
        raise InputError(f"{text[:100]} is not a scikit-learn estimator (it has no fit or get_params).")
    return estimator


def is_estimator(value: Any) -> bool:
    """Whether an object looks like an estimator of scikit-learn."""
    return hasattr(value, "fit") and hasattr(value, "get_params")


def _is_own_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] not in LIBRARIES


def split_path(path: str) -> tuple[str, str]:
    """Module and name of an import path, `module:name` or `module.name`."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return module, name


def admit(path: str) -> None:
    """Import what the code of this process, not a file, names by its path; `resolve` finds it from then on."""
    module, name = split_path(path)
    if module and name and path not in _GIVEN and not METHODS.plugin_module(module) and not _is_public(module):
        _GIVEN[path] = _imported(module, name)


def resolve(path: str) -> Any:
    """Object of an import path, `module:name` or `module.name`; the module may be a plugin, by the name of its file."""
    if path in _GIVEN:
        return _GIVEN[path]
    module, name = split_path(path)
    plugin = METHODS.plugin_module(module)
    if not module or not name:
        raise InputError(f"{path[:100]} is not an import path; write module:name, such as sklearn.svm:SVC.")
    if module == MAIN or "@" in name:
        raise InputError(
            f"{path.partition('@')[0][:100]} is defined in another process; put it into a module or a plugin file."
        )
    if not plugin and not _is_public(module):
        raise InputError(
            f"{path[:100]} is neither of scikit-learn nor of a loaded plugin; import it in a plugin file, and name that file "
            "in plugins or with --plugin."
        )
    value = _imported(plugin or module, name)
    if not (_is_of_plugin(value, plugin, name) if plugin else _is_of_library(value, name)):
        raise InputError(f"{path[:100]} is refused: it is neither an estimator nor a usual argument of one.")
    return value


def _imported(module: str, name: str) -> Any:
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a module may raise anything
        advice = "install the package, or list its file in plugins"
        raise InputError(f"cannot import {module[:100]} ({type(error).__name__}: {one_line(error)}); {advice}.") from None
    try:
        return operator.attrgetter(name)(imported)
    except (AttributeError, ImportError):
        raise InputError(f"module {METHODS.plugin_stem(module) or module} has no {name[:100]}.") from None


def _is_public(module: str) -> bool:
    """Whether a text may name a library's module, which is then imported."""
    words = module.split(".")
    hidden = any(word.startswith("_") or word in ("tests", "conftest", "externals") for word in words)
    return module in ("numpy", "builtins") or (words[0] == "sklearn" and not hidden)


def _is_of_library(value: Any, name: str) -> bool:
    """Whether an object of a library is an estimator, a splitter, a kernel, a type of number, or a function on arrays."""
    from sklearn.base import BaseEstimator

    home = str(getattr(value, "__module__", ""))
    if isinstance(value, type):
        made = issubclass(value, BaseEstimator) or home in ARGUMENTS
        return (made and home.startswith("sklearn.")) or issubclass(value, np.generic) or value in (bool, int, float, str)
    of_sklearn = isinstance(value, types.FunctionType) and home.startswith(FUNCTIONS)
    return isinstance(value, np.ufunc) or of_sklearn or (home == "numpy" and name in OF_NUMPY)


def _is_of_plugin(value: Any, plugin: str, name: str) -> bool:
    """Whether an object is a plugin's own, or was imported by it under this name; nothing of the standard library."""
    home = str(getattr(value, "__module__", ""))
    own = home == plugin or (home and "." not in name and home.partition(".")[0] not in sys.stdlib_module_names)
    return bool(own) and (callable(value) or is_estimator(value))


def path_of(value: Any) -> str:
    """Import path of a class or function that the code of this process has."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if not module or not name:
        raise InputError(f"{value!r:.100} has no import path; pass a function that makes the estimator by its import path.")
    stem = METHODS.plugin_stem(module)
    path = f"{stem or _public(module, name, value)}:{name}"
    if "<" in name or (module == MAIN and not stem):
        path += f"@{_source_hash(value, name)}"
    if not stem or "@" in path:
        _GIVEN[path] = value
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


def given(*texts: str) -> list[Any]:
    """Classes and functions of this process that texts or import paths name."""
    return [_GIVEN[path] for text in texts for path in _paths(text) if path in _GIVEN]


def _code(path: str) -> str:
    """Path and hash of the file of its module; a plugin is part of the key of a cell already."""
    module, _ = split_path(path)
    top = module.partition(".")[0]
    if top in LIBRARIES or "@" in path or METHODS.plugin_module(module):  # a local path has its hash at its end
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    content = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else "not found"
    try:
        return f"{path} {content} {version(top)}"
    except (PackageNotFoundError, ValueError):
        return f"{path} {content}"


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
        return _class(content[CLASS])(**{name: _decoded(value) for name, value in content["parameters"].items()})
    if IMPORT in content:
        return resolve(content[IMPORT])
    if RANDOM in content:
        return _distribution(content[RANDOM], *_decoded(content["values"]))
    if TUPLE in content:
        return tuple(_decoded(one) for one in content[TUPLE])
    if DICT in content:
        return {_decoded(key): _decoded(value) for key, value in content[DICT]}
    return float(content[FLOAT]) if FLOAT in content else np.array(content[ARRAY], dtype=_dtype(content["dtype"]))


def _class(path: str) -> type:
    cls = resolve(path)
    if not isinstance(cls, type) or _parameters(cls) is None:
        raise InputError(f"{path[:100]} is not a class of estimators, splitters or kernels.")
    return cls


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biufU" or dtype.itemsize > LONGEST_ITEM:
        raise InputError("an array of the estimator holds neither numbers nor short texts.")
    return dtype


def _distribution(name: str, args: list[Any], named: dict[str, Any]) -> Any:
    from scipy import stats

    found = getattr(stats, name, None)
    if not isinstance(found, stats.rv_continuous | stats.rv_discrete):
        raise InputError(f"{name[:100]} is not a distribution of scipy.stats.")
    return found(*args, **named)


def need_no_cache(value: Any, name: str = "") -> None:
    """Refuse a `memory` anywhere in an estimator or in what a search tries: scikit-learn would read its files as pickle."""
    if name.rpartition("__")[2] == "memory" and value is not None:
        raise InputError("parameter memory is refused, because scikit-learn reads the files of its cache as pickle.")
    inside = value.get_params(deep=False) if hasattr(value, "get_params") and not isinstance(value, type) else value
    for key, one in inside.items() if isinstance(inside, dict) else ():
        need_no_cache(one, str(key))
    for one in inside if isinstance(inside, list | tuple) else ():
        need_no_cache(one)
