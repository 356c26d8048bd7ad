"""Code that is not installed: the files of a plugin, a script or a module of the user, and all that they import.

The registry loads plugins with it, and studies put its hashes into the keys of cells. Imports are found in the source, also
inside functions. What is hashed is what runs: such modules are loaded from the hashed source, never from bytecode.
"""

from __future__ import annotations

import ast
import contextlib
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
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from m2lgdg.storage import InputError

PACKAGE = Path(__file__).parent
PREDICTS = ("methods", "fast", "model", "sklearn_bridge")  # folders whose code can change a prediction, as that of the root
PLUGIN = "m2lgdg_plugin_"  # begin of the name of a plugin's module
INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


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
        if name == "__mp_main__":  # the script of this process, under the name that it has in others
            continue
        if isinstance(path, str) and name not in FINDER.sources and not name.startswith(PLUGIN) and not is_installed(path):
            del sys.modules[name]
            raise InputError(
                f"{what} imports {path} by a name that is made while it runs, so a study cannot notice when this file changes; "
                f"write `import {name}` in the plugin."
            )


def code_of_objects(values: Iterable[Any], what: str) -> dict[str, str]:
    """Name and hash of the code of classes and functions that are neither installed, of this package nor of a plugin.

    The hash is of the file and of what this process has loaded from it, since the file may have been edited after that.
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
            hashes[f"{one} {os.path.basename(source.path)}"] = source.hash + _in_memory(sys.modules.get(one), source)
    return hashes


_SEEN: weakref.WeakKeyDictionary[types.ModuleType, tuple[Source, str]] = weakref.WeakKeyDictionary()


def _in_memory(module: types.ModuleType | None, source: Source) -> str:
    """Hash of a module's functions, classes and constants, as they were when this version of its file was first asked for."""
    if module is None:
        return ""
    if module not in _SEEN or _SEEN[module][0] != source:
        content = sorted(f"{name} {_shown(value, module.__name__)}" for name, value in vars(module).items() if name[:2] != "__")
        _SEEN[module] = source, hashlib.sha256("\n".join(content).encode()).hexdigest()
    return _SEEN[module][1]


def _shown(value: Any, module: str) -> str:
    """Text of a constant, or of the code of a function or class of a module."""
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {value.co_names} {[_shown(one, module) for one in value.co_consts]}"
    if isinstance(value, bool | int | float | str | bytes | types.NoneType):
        return repr(value)
    if isinstance(value, list | tuple | dict):
        return str([_shown(one, module) for one in (value.items() if isinstance(value, dict) else value)])
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType) and value.__module__ == module:
        return _shown(value.__code__, module) + _shown(value.__defaults__, module)
    if isinstance(value, type) and value.__module__ == module:
        return str(sorted(f"{name} {_shown(one, module)}" for name, one in vars(value).items() if name[:2] != "__"))
    return type(value).__name__


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
