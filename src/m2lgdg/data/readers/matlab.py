"""Declared sizes in MATLAB files (version 5 to 7), compared with the bytes that follow before scipy reads them.

Used by `load_mat`. scipy allocates the number of bytes that an element declares, and a file of a few bytes can declare 4 GB.
Layout: MAT-File Format, MathWorks; a file is a header of 128 bytes and elements, each a tag (type, bytes) and its content.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from m2lgdg.storage import InputError

HEADER = 128  # bytes
MATRIX, COMPRESSED = 14, 15  # types of elements
BYTES = {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 4, 7: 4, 9: 8, 12: 8, 13: 8}  # of a number, by type of element
NUMERIC = range(6, 16)  # classes of arrays of numbers: double, single and the integers
WITHOUT_SHAPE = 17  # class of objects that have no dimensions
COMPLEX = 0x0800  # flag of an array with an imaginary part
LONGEST_HEAD = 1 << 16  # bytes that hold flags, shape and name of an array; names have at most 63 letters


class Array(NamedTuple):
    """Shape and declared bytes of the numbers of an array, of their real part if they are complex."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    declared: int
    is_complex: bool
    available: int | None  # bytes of the element from there on; None if they are compressed


def check_declared(path: Path, content: bytes) -> set[str]:
    """Refuse a file with an array whose shape and declared bytes do not agree; return the names of complex arrays.

    An element longer than the file, or a name or shape longer than its element, is a ValueError. Files of version 4 have no
    such tags, and those of version 7.3 are refused elsewhere.
    """
    arrays = list(_arrays(content))
    for array in arrays:
        expected = math.prod(array.shape) * array.itemsize
        shown = "".join(letter for letter in array.name if letter.isprintable())
        needs = f"{path}: variable {shown} of shape {array.shape} needs {expected} bytes"
        if array.declared != expected:
            raise InputError(f"{needs}, but the file declares {array.declared}, so it is not a readable MATLAB file.")
        if array.available is not None and array.declared > array.available:
            raise InputError(f"{needs}, but only {array.available} follow, so it is not a readable MATLAB file.")
    return {array.name for array in arrays if array.is_complex}


def _arrays(content: bytes) -> Iterator[Array]:
    mark = content[126:HEADER]
    if len(content) < HEADER or mark not in (b"IM", b"MI") or 0 in content[:4]:
        return
    order = "<" if mark == b"IM" else ">"
    if struct.unpack(f"{order}H", content[124:126])[0] >> 8 != 1:
        return
    for kind, body in _elements(content, order):
        if kind == COMPRESSED:
            head = zlib.decompressobj().decompress(body, LONGEST_HEAD)
            if struct.unpack_from(f"{order}I", head)[0] == MATRIX:
                yield from _array(head[8:], order, None)
        elif kind == MATRIX:
            yield from _array(body[:LONGEST_HEAD], order, len(body))


def _elements(content: bytes, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of the elements of a file."""
    position = HEADER
    while position + 8 <= len(content):
        kind, count = struct.unpack_from(f"{order}II", content, position)
        position += 8
        if count > len(content) - position:
            raise ValueError(f"an element of {count} bytes is longer than the file")
        yield kind, memoryview(content)[position : position + count]
        position += count


def _array(head: bytes | memoryview, order: str, available: int | None) -> Iterator[Array]:
    """The array whose flags, shape and name these bytes hold; nothing if it is not an array of numbers."""
    _, flags, position = _part(head, order, 0)
    (word,) = struct.unpack_from(f"{order}I", flags)
    if word & 0xFF == WITHOUT_SHAPE:
        return
    _, shape, position = _part(head, order, position)
    _, name, position = _part(head, order, position)
    if word & 0xFF not in NUMERIC:
        return
    kind, declared, position = _tag(head, order, position)
    sizes = struct.unpack_from(f"{order}{len(shape) // 4}i", shape)
    rest = None if available is None else available - position
    if kind not in BYTES:
        raise ValueError(f"type {kind} is not one of numbers")
    shown = bytes(name[:64]).decode("ascii", "backslashreplace")
    yield Array(shown, sizes, BYTES[kind], declared, bool(word & COMPLEX), rest)


def _tag(head: bytes | memoryview, order: str, position: int) -> tuple[int, int, int]:
    """Type, bytes and position of the content of a part; short parts have both numbers in one word."""
    (word,) = struct.unpack_from(f"{order}I", head, position)
    if word >> 16:
        return word & 0xFFFF, word >> 16, position + 4
    (count,) = struct.unpack_from(f"{order}I", head, position + 4)
    return word, count, position + 8


def _part(head: bytes | memoryview, order: str, position: int) -> tuple[int, bytes | memoryview, int]:
    """Type and content of a part, and the position of the next one, which starts at a multiple of eight bytes."""
    kind, count, start = _tag(head, order, position)
    if count > len(head) - start:
        raise ValueError(f"a part of {count} bytes is longer than the element")
    following = position + 8 if start == position + 4 else start + count + -count % 8
    return kind, head[start : start + count], following
