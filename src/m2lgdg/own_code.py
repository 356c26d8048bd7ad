"""Code that is not installed: the files of a plugin, a script or a module of the user, and all that they import.

The registry loads plugins with it, and studies put its hashes into the keys of cells. Imports are found in the source, also
inside functions. What is hashed is what runs: such modules are loaded from the hashed source, never from bytecode.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from m2lgdg.storage import InputError

PACKAGE = Path(__file__).parent
PREDICTS = ("methods", "fast", "model", "sklearn_bridge")  # folders whose code can change a prediction, as that of the root
PLUGIN = "m2lgdg_plugin_"  # begin of the name of a plugin's module
INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
LARGE = 2**26  # bytes of an array whose content is not hashed
LOADS = re.compile("LOAD_(GLOBAL|NAME|FROM_DICT_OR_GLOBALS)")
CONSTANTS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, Path, np.generic)
PARTS: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
}


class Source(NamedTuple):
    """A module's file with its content, as it was when it was hashed."""

    path: str
    content: bytes

    @property
    def hash(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()


def package_files(*folders: str, package: Path = PACKAGE) -> list[tuple[str, str]]:
    """Name and hash of the package's root modules and of those in some of its folders."""
    files = [*package.glob("*.py"), *(file for name in folders for file in (package / name).rglob("*.py"))]
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(files)]


@functools.cache
def predicting_code() -> str:
    """Hash of the package's code that can change the predictions of a fitted model, as it was when this was first called."""
    return hashlib.sha256(json.dumps(package_files(*PREDICTS)).encode()).hexdigest()[:16]


@functools.cache
def is_installed(path: str) -> bool:
    """Whether a file is of Python, of an installed package or of this one."""
    real = os.path.realpath(path)
    folders = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()]
    folders += [site.getusersitepackages(), str(PACKAGE)]
    return bool(INSTALLED.search(real)) or any(real.startswith(os.path.realpath(one) + os.sep) for one in folders if one)


def imported_sources(content: bytes, module: str = "", package: str = "", folder: str | Path = "") -> dict[str, Source]:
    """Modules that some source imports and that are not installed, and those that they import, by name.

    `module`, `package` and `folder` are those of the source; modules in the folder of a plugin are found, too. A module that
    cannot be found now is left to the import statement.
    """
    importlib.invalidate_caches()  # a file may have been written in the same second as another
    found: dict[str, Source] = {}
    waiting, installed = list(_imports(content, package)), {*sys.stdlib_module_names}
    while waiting:
        name = waiting.pop(0)  # a package before what is in it
        if name in found or name == module or name.partition(".")[0] in installed:
            continue
        spec = _spec(name, str(folder))
        origin = spec.origin if spec else None
        if origin and is_installed(origin):
            installed.add(name)
        if spec is None or not origin or not os.path.isfile(origin) or is_installed(origin):
            continue
        found[name] = Source(origin, Path(origin).read_bytes())
        if origin.endswith(".py"):
            waiting += _imports(found[name].content, name if spec.submodule_search_locations else name.rpartition(".")[0])
    return dict(sorted(found.items()))


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Names of all modules that a source may import, with the packages above them; `from a import b` may name a module a.b."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):  # reported where it is run
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{one.name}" for one in node.names)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        for name in names:
            words = name.split(".")
            yield from (".".join(words[:i]) for i in range(1, len(words) + 1) if all(words[:i]))


def _spec(name: str, folder: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module is, without importing it or the packages above it."""
    top, *below = name.split(".")
    try:
        spec = importlib.machinery.PathFinder.find_spec(top) or importlib.util.find_spec(top)  # the latter: editable installs
        if spec is None and folder:
            spec = importlib.machinery.PathFinder.find_spec(top, [folder])
    except (ImportError, ValueError):  # a loaded module without a specification
        return None
    full = top
    for word in below:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{full}.{word}"
        spec = importlib.machinery.PathFinder.find_spec(full, spec.submodule_search_locations)
    return spec


class _FromSource(importlib.machinery.SourceFileLoader):
    """Loads a module from the source that was hashed."""

    def __init__(self, name: str, source: Source) -> None:
        super().__init__(name, source.path)
        self.source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self.source.content, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that the plugins in use import."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        source = self.sources.get(name)
        if source is None:
            return None
        if not source.path.endswith(".py"):
            return importlib.util.spec_from_file_location(name, source.path)
        folder = [os.path.dirname(source.path)] if os.path.basename(source.path) == "__init__.py" else None
        loader = _FromSource(name, source)
        return importlib.util.spec_from_file_location(name, source.path, loader=loader, submodule_search_locations=folder)


FINDER = _Finder()
COMPILED: dict[str, Source] = {}  # modules without Python source, as this process met them first


def use(sources: Mapping[str, Source], modules: Mapping[str, types.ModuleType]) -> None:
    """Make imports of these modules give these versions, also imports inside functions; `modules` are loaded already."""
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    FINDER.sources.update(sources)
    for name, source in sources.items():  # compiled code cannot be loaded twice
        if not source.path.endswith(".py"):
            if name in sys.modules and COMPILED.get(name, source) != source:
                raise InputError(f"{source.path} has changed since this process loaded it; restart Python.")
            COMPILED[name] = source
    python = [name for name, source in sources.items() if source.path.endswith(".py")]
    stale = any(name in sys.modules and _source_of(sys.modules[name]) != sources[name] for name in python)
    for name in python:
        if name in modules:
            sys.modules[name] = modules[name]
        elif stale:  # all of them, since they may hold each other
            sys.modules.pop(name, None)


def _source_of(module: types.ModuleType) -> Source | None:
    return getattr(getattr(module, "__loader__", None), "source", None)


def refuse_not_covered(before: Iterable[str], what: str) -> None:
    """Refuse code that was imported since by a name that no source contains, so that no key covers it."""
    for name in sorted(sys.modules.keys() - set(before)):
        path = getattr(sys.modules.get(name), "__file__", None)
        if name == "__mp_main__" or _has_no_file(name):  # the script of this process, under the name that it has in others
            continue
        if isinstance(path, str) and name not in FINDER.sources and not name.startswith(PLUGIN) and not is_installed(path):
            del sys.modules[name]
            raise InputError(
                f"{what} imports {path} by a name that is made while it runs, so a study cannot notice when this file changes; "
                f"write `import {name}` in the plugin."
            )


def _has_no_file(name: str) -> bool:
    """Whether an installed package made a module that names a file which is not there, as torch.ops and torch.classes do."""
    path, above = (getattr(sys.modules.get(one), "__file__", None) for one in (name, name.partition(".")[0]))
    made = isinstance(path, str) and not os.path.isabs(path) and not os.path.exists(path)
    return made and isinstance(above, str) and os.path.isabs(above) and is_installed(above)


def code_of_objects(values: Iterable[Any], what: str) -> dict[str, str]:
    """Name and hash of the code of classes and functions that are neither installed, of this package nor of a plugin.

    The hash is of the file; `memory_of_objects` is of what this process has loaded from it, since either may have changed.
    What has no file is refused.
    """
    hashes: dict[str, str] = {}
    classes = [one for value in values for one in (value.__mro__ if isinstance(value, type) else [value])]
    for name in dict.fromkeys(str(getattr(one, "__module__", "")) for one in classes):
        if name == "builtins" or name.startswith(PLUGIN):
            continue
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not os.path.isfile(path):
            raise InputError(
                f"{what} is defined in an interactive session, so a study cannot notice when its code changes; write it to a "
                "file and name the file in plugins."
            )
        if is_installed(path):
            continue
        content = Path(path).read_bytes()
        sources = {name: Source(path, content)} | imported_sources(content, name, getattr(module, "__package__", None) or "")
        for one, source in sources.items():
            hashes[f"{one} {os.path.basename(source.path)}"] = source.hash
    return hashes


def memory_of_objects(values: Iterable[Any]) -> str:
    """Hash of what classes and functions are in this process and of all that they use, now; of installed code only the name.

    Used are globals that their code loads, with attributes of modules, closures, defaults, members and base classes. What has
    no stable text counts by its type.
    """
    seen: dict[Any, Any] = {}
    return hashlib.sha256("\n".join(_shown(value, seen) for value in values).encode()).hexdigest()


def is_only_here(values: Iterable[Any]) -> bool:
    """Whether a class or function is of a script or a module that no plugin imports, so that other processes do not have it."""
    modules = [str(getattr(value, "__module__", "")) for value in values]
    return any(_is_own(module) and module not in FINDER.sources for module in modules)


def _is_own(name: Any) -> bool:
    """Whether a module is neither installed nor a plugin, whose file has a hash of its own."""
    path = getattr(sys.modules.get(str(name)), "__file__", None)
    return isinstance(path, str) and not str(name).startswith(PLUGIN) and not is_installed(path)


def _shown(value: Any, seen: dict[Any, Any]) -> str:
    """Text of a constant, of an array, or of the code of a function or class and what it uses."""
    if isinstance(value, CONSTANTS):
        return repr(value)
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {value.co_names} {_shown(value.co_consts, seen)}"
    if isinstance(value, tuple):
        return str([_shown(one, seen) for one in value])
    if isinstance(value, set | frozenset):
        return str(sorted(_shown(one, seen) for one in value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes <= LARGE:
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if id(value) in seen:
        return "seen"
    seen[id(value)] = value  # kept, so that its id stays its own
    return _with_parts(value, seen)


def _with_parts(value: Any, seen: dict[Any, Any]) -> str:
    """Text of what can hold itself."""
    if isinstance(value, list | dict):
        return str([_shown(one, seen) for one in (value.items() if isinstance(value, dict) else value)])
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, type):
        name = f"{value.__module__}.{value.__qualname__}"
        return f"{name} {_members(value, seen)} {_shown(value.__bases__, seen)}" if _is_own(value.__module__) else name
    if type(value) in PARTS:
        return str([_shown(getattr(value, part), seen) for part in PARTS[type(value)]])
    inner = getattr(value, "__dict__", None) if _is_own(type(value).__module__) else None
    return f"{_shown(type(value), seen)} {_shown(inner, seen)}"


def _function(value: types.FunctionType, seen: dict[Any, Any]) -> str:
    scope = value.__globals__ if _is_own(value.__globals__.get("__name__")) else {}
    if not scope and not _is_own(value.__module__):
        return f"{value.__module__}.{value.__qualname__}"
    parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *_cells(value)]
    codes = [value.__code__]
    for code in codes:  # those of inner functions are added
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    loaded = {one.argval for code in codes for one in dis.get_instructions(code) if LOADS.match(one.opname)}
    names = frozenset(name for code in codes for name in code.co_names)
    return str([_shown(part, seen) for part in parts]) + _used(scope, loaded, names, seen)


def _cells(value: types.FunctionType) -> Iterator[Any]:
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _used(scope: Mapping[str, Any], loaded: Iterable[str], names: frozenset[str], seen: dict[Any, Any]) -> str:
    """Values of a module with these names; of a module among them, those that code may load as attributes."""
    texts = []
    for name in sorted({*loaded} & scope.keys()):
        value = scope[name]
        if not isinstance(value, types.ModuleType):
            texts.append(f"{name} {_shown(value, seen)}")
        elif _is_own(value.__name__) and (value.__name__, names) not in seen:
            seen[value.__name__, names] = True
            texts.append(f"{name} {_used(vars(value), names, names, seen)}")
    return str(texts)


def _members(value: type, seen: dict[Any, Any]) -> str:
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    members = [
        (name, one)
        for name, one in sorted(vars(value).items(), key=lambda item: item[0])
        if name[:2] != "__" or isinstance(one, kinds)
    ]
    return str([f"{name} {_shown(one, seen)}" for name, one in members])


_real_exit = os._exit
_staying: list[int] = []  # processes in which a method runs, once for each method


def _exit(status: int) -> NoReturn:
    if os.getpid() in _staying:  # not in a process that a method has started
        raise SystemExit(f"os._exit({status}) was called")
    _real_exit(status)


@contextlib.contextmanager
def staying(method: bool = True) -> Iterator[None]:
    """While a method runs, `os._exit` fails it instead of ending the process, as if the whole run were done.

    A plugin is loaded in it, too (`method` False), since it may keep the function under another name.
    """
    process = os.getpid() if method else 0
    os._exit = _exit
    _staying.append(process)
    try:
        yield
    finally:
        _staying.remove(process)
        if not _staying:
            os._exit = _real_exit
