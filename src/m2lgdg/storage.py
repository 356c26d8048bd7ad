"""Atomic writing of files and folders, tensors stored without pickle, and `InputError`, the error for invalid user input.

The lowest layer of the package: cohorts, models, predictions and reports are written and read through it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # Windows: files are written without locks, and nothing is taken for abandoned
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:  # commands that only print a sentence do not wait for numpy
    import numpy as np
    import numpy.typing as npt

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}
# What reading a damaged file may raise, in addition to InputError
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
MARK = ".m2lgdg-"  # in the names of temporary files and folders: .NAME.m2lgdg-MACHINE-RANDOM
TEMPORARY = re.compile(r"\..*" + re.escape(MARK) + r"[0-9a-f]{6}-[a-z0-9_]{8}")


class InputError(Exception):
    """Invalid input of the user. The message is one sentence that names the place and the reason."""


EXTRAS = {  # optional parts of the package -> libraries that they bring, by the names under which they are imported
    "networks": ("torch",),
    "onnx": ("torch", "onnx", "onnxruntime", "onnxscript"),
    "serve": ("starlette", "uvicorn", "python_multipart"),
    "cluster": ("dask", "distributed", "dask_jobqueue"),
    "skops": ("skops",),
    "matlab": ("h5py",),
    "optuna": ("optuna",),
    "federated": ("cryptography",),
    "flower": ("flwr",),
}


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Context for imports of optional libraries: a missing one becomes a sentence with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS[extra]:
            raise
        raise InputError(f"{what} needs {error.name}; install it with: {install_command(extra)}") from error


def missing_libraries(extra: str) -> list[str]:
    """Libraries of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if not importable(name)]


def importable(name: str) -> bool:
    """Whether a module is installed; it is not imported to find out."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # from import hooks, and for a module that is blocked in sys.modules
        return False


def install_command(extra: str) -> str:
    """Command that installs an extra; double quotes, which the shells of Windows understand too."""
    return f'pip install "m2lgdg[{extra}]"'


def one_line(error: BaseException) -> str:
    """Message of an error on one line, for use within a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Context with a temporary path that replaces `path` if the block succeeds and is deleted if it fails."""
    path = Path(path)
    with _staged(path) as draft:
        yield draft
        _make_safe(draft)
        os.replace(draft, path)


@contextlib.contextmanager
def _staged(path: Path) -> Iterator[Path]:
    try:
        if path.exists() and not path.is_file():  # replacing a device such as /dev/null would harm the whole machine
            raise OSError(0, "it is a folder" if path.is_dir() else "it is not a regular file")
        with _folder_for(path), _temporary(path.parent, path.name, folder=False) as draft:
            yield draft
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from None


def _make_safe(draft: Path) -> None:
    """Give a temporary file the usual permissions, and wait until the disk has it."""
    os.chmod(draft, 0o666 & ~_umask())
    with draft.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Context with a temporary folder that becomes `path`, which must be empty or new, if the block succeeds."""
    path = Path(path)
    need_unused(path)
    draft = path
    try:
        if path.is_dir():  # it may be the working folder or a mounted disk, so its content is moved into it at the end
            with _temporary(path, "new", folder=True) as draft:
                yield draft
                for file in list(draft.iterdir()):
                    file.rename(path / file.name)
        else:
            with _folder_for(path), _temporary(path.parent, path.name, folder=True) as draft:
                yield draft
                os.chmod(draft, 0o777 & ~_umask())
                draft.rename(path)
    except InputError as error:  # it names a file of the temporary folder, which is gone
        raise InputError(str(error).replace(str(draft), str(path))) from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from None


def need_unused(path: str | Path) -> None:
    """Refuse a folder that is not empty, before hours of reading and training."""
    path = Path(path)
    if path.is_dir():
        remove_abandoned(path)
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} is not empty; choose another --out." if path.is_dir() else f"{path} is not a folder.")


def remove_abandoned(folder: str | Path) -> None:
    """Remove what a killed process was writing in a folder: it can be locked, and its name has the mark of this machine.

    Locks may not reach other machines; without locks, nothing is removed.
    """
    if fcntl is None:
        return
    try:
        names = [name for name in os.listdir(folder) if name.startswith(".") and TEMPORARY.fullmatch(name)]
    except OSError:
        return
    for path in [Path(folder) / name for name in names if f"{MARK}{_machine()}-" in name]:
        with contextlib.suppress(OSError):  # locked by a living process, or already removed by another
            handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _temporary(parent: Path, name: str, *, folder: bool) -> Iterator[Path]:
    """New temporary file or folder, locked for this process, and removed at the end if it is still there."""
    remove_abandoned(parent)
    while True:
        prefix = f".{name[:50]}{MARK}{_machine()}-"
        if folder:
            draft = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            handle = os.open(draft, os.O_RDONLY) if fcntl else None
        else:
            handle, path = tempfile.mkstemp(prefix=prefix, dir=parent)
            draft = Path(path)
            if fcntl is None:  # Windows does not replace a file that is open
                os.close(handle)
                handle = None
        if _locked(handle, draft):
            break
    try:
        yield draft
    finally:
        _remove(draft)
        if handle is not None:
            os.close(handle)


def _locked(handle: int | None, draft: Path) -> bool:
    """Lock an open temporary file; False if another process took it for abandoned before it was locked."""
    if handle is None or fcntl is None:
        return True
    with contextlib.suppress(OSError):  # no locks on this file system
        fcntl.flock(handle, fcntl.LOCK_EX)
    if draft.exists():
        return True
    os.close(handle)
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@cache
def _machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


@contextlib.contextmanager
def _folder_for(path: Path) -> Iterator[None]:
    """Context with the folder of a file; if the block fails, folders created for it are removed again."""
    new = [folder for folder in path.parents if not folder.exists()]  # innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file atomically; characters that are not valid Unicode (in some file names) are escaped."""
    return write_bytes(path, _encoded(text))


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write a file atomically."""
    with writing(path) as draft:
        draft.write_bytes(content)
    return Path(path)


def write_once(path: str | Path, content: bytes) -> bool:
    """Write a file whole unless it is there; of several processes that try at the same time, one succeeds."""
    path = Path(path)
    with _folder_for(path), _temporary(path.parent, path.name, folder=False) as draft:
        try:
            draft.write_bytes(content)
            _make_safe(draft)
            os.link(draft, path)  # unlike a rename, it does not replace a file
        except FileExistsError:
            return False
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}.") from None
    return True


def write_texts(folder: str | Path, texts: Mapping[str, str | bytes]) -> Path:
    """Write several files of a folder by name; none is replaced before all are safely on the disk."""
    with contextlib.ExitStack() as stack:
        drafts = {}
        for name, text in texts.items():
            path = Path(folder) / name
            drafts[path] = stack.enter_context(_staged(path))
            drafts[path].write_bytes(_encoded(text))
            _make_safe(drafts[path])
        for path, draft in drafts.items():
            os.replace(draft, path)
    return Path(folder)


def write_tensors(path: str | Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> Path:
    """Write a safetensors file atomically."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(path) as draft:
        try:
            save_file({key: np.asarray(value, order="C") for key, value in tensors.items()}, draft, metadata=dict(metadata))
        except SafetensorError as error:  # raised by the library for a full disk, too
            raise OSError(0, one_line(error)) from None
        _order_metadata(draft)
    return Path(path)


def _order_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, whose library writes them in an order that differs from run to run."""
    with open(path, "r+b") as file:
        header, end = _tensor_header(file)
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= end - 8:
            file.seek(8)
            file.write(text.ljust(end - 8))


def read_tensors(path: str | Path, kind: str, *, in_memory: bool = False) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """Metadata and tensors of a safetensors file with the format `kind`.

    Tensors are read-only memory maps or, `in_memory`, views of bytes, which stay as they are whatever happens to the file.
    """
    import numpy as np
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as checked:  # the library checks shapes, offsets and the size of the file
            metadata = dict(checked.metadata() or {})
        if metadata.get("format") != kind:
            raise InputError(f"{path} is not an {kind} file (its format is {metadata.get('format', 'not given')}).")
        with open(path, "rb") as file:
            header, start = _tensor_header(file)
            if in_memory:
                data: npt.NDArray[np.uint8] = np.frombuffer(file.read(), np.uint8)
            else:
                mapped = np.memmap(file, np.uint8, "r")
                mapped.inode = os.fstat(file.fileno()).st_ino  # type: ignore[attr-defined]  # to see whether it is overwritten
                data = np.asarray(mapped)[start:]
        header.pop("__metadata__")
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return metadata, tensors
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (SafetensorError, *DAMAGED) as error:
        raise InputError(f"{path} is damaged or not an {kind} file ({one_line(error)}).") from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """Metadata of a safetensors file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return dict(_tensor_header(file)[0]["__metadata__"])
    except DAMAGED:
        return {}


def _tensor_header(file: io.BufferedReader | io.BufferedRandom) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))
    return header, 8 + size


def file_hash(path: str | Path, most: int) -> str:
    """SHA-256 of a file of at most `most` bytes."""
    with _open_regular(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: str | Path, most: int) -> bytes:
    """Content of a file of at most `most` bytes."""
    with _open_regular(path, most) as file:
        # Not file.read(most), which allocates `most` bytes; a little more than the size, in case the file grows.
        return file.read(min(most, os.fstat(file.fileno()).st_size + 2**16))


@contextlib.contextmanager
def _open_regular(path: str | Path, most: int) -> Iterator[io.BufferedReader]:
    """Open a regular file that is not too large (reading a device may never end, and a pipe may never begin)."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"cannot read {path}: it is not a regular file.")
            if status.st_size > most:
                raise InputError(f"{path} has {status.st_size} bytes, more than the limit of {most}.")
            yield file
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from None


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
