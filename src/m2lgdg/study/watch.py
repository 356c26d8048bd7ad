"""Watch on the files and processes that a method uses while it is fitted and predicts, for `study.audit`.

Python reports each file it opens to an audit hook. On Linux the kernel also reports who else opens the study's cohort: compiled
code, another process, or a method that uses another name of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import m2lgdg.method

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


@cache
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


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_method(frame: FrameType) -> bool:
    """Whether a frame was called by `fit` or `predict_proba` of a method."""
    names = {"fit", "predict_proba"}
    return any(one.f_code.co_name in names and one.f_code.co_filename == m2lgdg.method.__file__ for one in _frames(frame))


def _by_library(frame: FrameType) -> bool:
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
