"""What a method uses and keeps while it runs, for `study.audit`: files, processes, and values outside of what it learned.

Python reports each file it opens to an audit hook. On Linux the kernel also reports who else opens the study's cohort: compiled
code, another process, or a method that uses another name of the file. Values that a method keeps in attributes, globals or
caches are not saved with a model, and reach the next target that the same process fits.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import os
import re
import site
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import m2lgdg.method
from m2lgdg.cohort import Cohort
from m2lgdg.method import Method

PACKAGE = Path(__file__).parents[1]
FILES = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "sqlite3.connect")
PAIRS = ("os.rename", "os.link", "os.symlink", "shutil.copyfile", "shutil.move")  # events with two paths
REMOVING = "_rmtree"  # function of shutil that removes a folder, with names relative to it
TEMPORARY = ("tempfile.mkstemp", "tempfile.mkdtemp")
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
CODE = (".py", ".pyc", ".so", ".pyd", ".dll", ".dylib")
SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/bin", "/System", "/Library")
SHARED_MEMORY = "/dev/shm"
PREFIX_FOLDERS = ("lib", "lib64", "bin", "share", "include", "etc", "Lib", "DLLs", "Scripts")
LIBRARY_CACHES = ("~/.triton", "~/.nv", "~/.config/matplotlib", *(f"~/.cache/{name}" for name in ("torch", "matplotlib")))
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "JOBLIB_TEMP_FOLDER")
LIBRARY_TEMPORARY = re.compile(r"(joblib_|loky-|pymp-|torch_|torchinductor_|triton_|matplotlib-|numba_)")
INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
IN_OPEN = 0x20  # of inotify


@dataclass
class Used:
    """Files and processes that one method used; `unseen` are files of the cohort opened by anything but its Python code."""

    cohort: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)


class Watch:
    """Watch of this process on the study's cohort (`original`), its copy for the audit (`copy`) and all other files."""

    def __init__(self, original: str, copy: str) -> None:
        self._original, self._copy = original, os.path.realpath(copy)
        self._used: Used | None = None
        self._temporary: list[str] = []  # made by this process
        self._kernel = _KernelWatch(original)
        is_of_library(original)  # looks for the temporary folder now, because that opens files
        sys.addaudithook(self._hook)  # for the rest of the process, since a hook cannot be removed

    @contextlib.contextmanager
    def watching(self) -> Iterator[Used]:
        """Files and processes used in the block."""
        used = Used()
        self._kernel.opened()  # forget what came before
        self._used = used
        try:
            yield used
        finally:
            self._used = None
            used.unseen = [] if used.cohort else self._kernel.opened()

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        used = self._used
        if used is None:
            return
        if (event in FILES or event in PAIRS) and not sys._getframe(1).f_code.co_name.startswith(REMOVING):
            for argument in arguments[: 2 if event in PAIRS else 1]:
                self._file(used, event, argument)
        elif event in TEMPORARY:
            self._temporary.append(os.path.realpath(os.fsdecode(arguments[0])))
        elif event in PROCESSES and not _by_library(sys._getframe(1)):
            _add(used.processes, _program(arguments))

    def _file(self, used: Used, event: str, argument: object) -> None:
        if not isinstance(argument, str | bytes | os.PathLike) or argument in (":memory:", ""):  # a descriptor, or no file
            return
        path = os.path.realpath(os.fsdecode(argument))
        if path.endswith(CODE):
            return
        if _below(path, self._original):
            _add(used.cohort, os.path.relpath(path, os.path.dirname(self._original)))
        elif path == self._copy:
            if _in_method(sys._getframe(1)):  # not the runner, which loads it before the fit
                _add(used.cohort, os.path.basename(self._original))
        elif event in ("os.listdir", "os.scandir") and path in map(os.path.realpath, sys.path):  # an import
            return
        elif not (is_of_library(path) or any(_below(path, folder) for folder in self._temporary)):
            _add(used.files, path)


class _KernelWatch:
    """Opens of a file, or of files in a folder, by any program (inotify, Linux only)."""

    def __init__(self, path: str) -> None:
        self._path, self._handle = path, -1
        if not sys.platform.startswith("linux"):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        folders = [folder for folder, _, _ in os.walk(path)] if os.path.isdir(path) else [path]
        for folder in folders if self._handle >= 0 else []:
            libc.inotify_add_watch(self._handle, os.fsencode(folder), IN_OPEN)

    def opened(self) -> list[str]:
        """Name of the watched path if it was opened since the last call, else nothing."""
        seen = False
        while self._handle >= 0:
            try:
                seen = bool(os.read(self._handle, 65536)) or seen
            except BlockingIOError:
                break
        return [os.path.basename(self._path)] if seen else []


@functools.cache
def libraries() -> tuple[str, ...]:
    """Folders of the interpreter, of installed packages, of this package, of the system, and caches of libraries."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders = [os.path.join(prefix, name) for prefix in prefixes for name in PREFIX_FOLDERS]
    folders += [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages(), str(PACKAGE), *SYSTEM]
    folders += [os.path.expanduser(path) for path in LIBRARY_CACHES]
    folders += [os.environ[name] for name in CACHE_VARIABLES if os.environ.get(name)]
    own = os.path.realpath(sys.prefix)  # `data` of sysconfig is the whole environment, which may hold a lab's files
    return tuple(folder for folder in dict.fromkeys(map(os.path.realpath, folders)) if folder not in (own, "/"))


def is_of_library(path: str) -> bool:
    """Whether a file belongs to the interpreter, an installed package or the system, or is a library's temporary file."""
    if not _below(path, SHARED_MEMORY) and any(_below(path, folder) for folder in libraries()):
        return True
    folders = map(os.path.realpath, (tempfile.gettempdir(), "/tmp", "/var/tmp", SHARED_MEMORY))
    return any(_below(path, folder) and LIBRARY_TEMPORARY.match(os.path.relpath(path, folder)) for folder in folders)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _add(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_method(frame: types.FrameType) -> bool:
    """Whether a frame was called by `fit` or `predict_proba` of a method."""
    names = {"fit", "predict_proba"}
    return any(one.f_code.co_name in names and one.f_code.co_filename == m2lgdg.method.__file__ for one in _frames(frame))


def _by_library(frame: types.FrameType) -> bool:
    """Whether a process was started by an installed package (as joblib does to count cores), not by the method itself."""
    standard = os.path.realpath(sysconfig.get_paths()["stdlib"])
    for one in _frames(frame):
        path = os.path.realpath(one.f_code.co_filename)
        if INSTALLED.search(path) or _below(path, str(PACKAGE)):
            return True
        if not _below(path, standard) and not one.f_code.co_filename.startswith("<"):
            return False
    return True


def _program(arguments: tuple[Any, ...]) -> str:
    """Name of a started program, from the arguments of an audit event."""
    words = [os.fsdecode(word).split() for word in arguments[:1] if isinstance(word, str | bytes | os.PathLike)]
    return os.path.basename(words[0][0]) if words and words[0] else "another process"


KNOWN = ("state_", "facts_", "_folder", "_size_checked")  # attributes that a model folder stores
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
UNORDERED = (dict, types.MappingProxyType, set, frozenset)
DEEPEST = 20  # nesting at which a value counts by its type only


def held_elsewhere(cls: type[Method], fitted: Method | None = None, *, package: bool = True) -> dict[str, str]:
    """Digests by name: globals, classes and functions of the method's modules, environment variables, and attributes.

    Modules are those of the method's classes (those of this package only with `package`), and all that are neither installed
    nor of the interpreter.
    """
    held = {f"environment variable {name}": digest(value) for name, value in os.environ.items()}
    for module_name, module in _modules(cls):
        if not package and _is_installed(str(vars(module).get("__file__", "/usr"))):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType):
                continue
            if isinstance(value, type):
                held |= _class_attributes(value) if value.__module__ == module_name else {}
            else:
                held[f"global {name} of {os.path.basename(str(vars(module).get('__file__', module_name)))}"] = digest(value)
    if fitted is not None:
        fields = {field.name for field in dataclasses.fields(fitted)}
        own = {name: value for name, value in vars(fitted).items() if name not in fields and name not in KNOWN}
        held |= {f"attribute {name}": digest(value) for name, value in own.items()}
    return held


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
            found = [one if isinstance(one, bytes) else _digest(one, inside) for one in _content(value)]
        except Exception as error:  # attributes of a foreign object may raise anything; it then counts by its type
            found = [type(error).__name__.encode()]
        content.update(b"".join(sorted(found) if isinstance(value, UNORDERED) else found))
    return content.digest()


def _content(value: object) -> Iterator[object]:
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
        yield from _content_of_object(value)


def _content_of_object(value: object) -> Iterator[object]:
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
