"""Atomic writing of files, tensors stored without pickle, and `InputError`, the error for invalid user input.

The lowest layer of the package: cohorts, models, predictions and reports are written and read through it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that only print a sentence do not wait for numpy
    import numpy.typing as npt

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}


class InputError(Exception):
    """Invalid input of the user. The message is one sentence that names the place and the reason."""


def one_line(error: BaseException) -> str:
    """Message of an error on one line, for use within a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Context with a temporary path that replaces `path` if the block succeeds and is deleted if it fails."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # replacing a device such as /dev/null would harm the whole machine
            raise OSError(0, "it is a folder" if path.is_dir() else "it is not a regular file")
        with _folder_for(path):
            handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
            os.close(handle)
            part = Path(name)
            try:
                yield part
                os.chmod(part, 0o666 & ~_umask())  # mkstemp creates files that only their owner can read
                with part.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from None


@contextlib.contextmanager
def _folder_for(path: Path) -> Iterator[None]:
    """Create the folder of a file; if the block fails, the folders created for it are removed again."""
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
    with writing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write a file atomically."""
    with writing(path) as part:
        part.write_bytes(content)
    return Path(path)


def write_texts(folder: str | Path, texts: Mapping[str, str]) -> Path:
    """Write several text files of a folder by name; none is replaced before all are written."""
    with contextlib.ExitStack() as stack:
        for name, text in texts.items():
            part = stack.enter_context(writing(Path(folder) / name))
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(folder)


def write_tensors(path: str | Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> Path:
    """Write a safetensors file atomically."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(path) as part:
        try:
            save_file({key: np.asarray(value, order="C") for key, value in tensors.items()}, part, metadata=dict(metadata))
        except SafetensorError as error:  # raised by the library for a full disk, too
            raise OSError(0, one_line(error)) from None
    return Path(path)


def read_tensors(path: str | Path, kind: str) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """Metadata and tensors of a safetensors file with the format `kind`; tensors are read-only memory maps."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="np") as file:  # the library checks that header and file size agree
            metadata = dict(file.metadata() or {})
        if metadata.get("format") == kind:
            return metadata, _map_tensors(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, SafetensorError, ValueError, KeyError, struct.error) as error:
        raise InputError(f"{path} is damaged or not an {kind} file ({one_line(error)}).") from None
    raise InputError(f"{path} is not an {kind} file (its format is {metadata.get('format', 'not given')}).")


def file_hash(path: str | Path, most: int) -> str:
    """SHA-256 of a file, read in chunks; files above `most` bytes are refused."""
    with _open_regular(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: str | Path, most: int) -> bytes:
    """Content of a file; files above `most` bytes are refused."""
    with _open_regular(path, most) as file:
        return file.read(most)


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


def _map_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    import numpy as np

    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors[name] = np.asarray(data[start:end]).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
