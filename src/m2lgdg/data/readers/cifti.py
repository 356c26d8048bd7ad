"""Opening a CIFTI-2 file: its two axes and its numbers, which are read later; used by `images.py`.

The files of a release share the long list of their parcels or grayordinates and differ in short parts of their headers, such
as the history of processing. Each distinct list is parsed once, and short parts in every file, all by nibabel.
"""

from __future__ import annotations

import io
import logging
import math
import re
import struct
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from m2lgdg.data.readers.arrays import Rois

MAP, END_OF_MAP = b"<MatrixIndicesMap", b"</MatrixIndicesMap>"
CHILDLESS = '<MatrixIndicesMap AppliesToMatrixDimension="{}" IndicesMapToDataType="{}"/>'
ALONE = b'<CIFTI Version="2"><Matrix>%b</Matrix></CIFTI>'
DECLARATION = re.compile(rb"""\s*(<\?xml\s+version=["']1\.0["'](\s+encoding=["']utf-8["'])?\s*\?>)?""", re.IGNORECASE)
SHORT = 4096  # bytes of XML that are parsed faster than looked up
LARGEST_KEPT = 8 << 20  # bytes of XML of all lists that are kept; one of 91,282 grayordinates has 0.7 MB
LARGEST_EXPONENT = 30  # of ten, in the unit of a time axis
EXTENSION = 32  # code of CIFTI-2 among the extensions of a NIfTI-2 header
MOST_MAPS = 8  # a matrix has two or three dimensions
QUIET = logging.Logger("m2lgdg.cifti")  # of what is odd but harmless, such as a NIfTI header without geometry
QUIET.addHandler(logging.NullHandler())


class Structure(NamedTuple):
    """Grayordinates of one brain structure; `vertices` is the size of its surface, None if its places are voxels."""

    name: str
    chosen: slice
    places: npt.NDArray[np.int64]  # (grayordinate, 1) vertices or (grayordinate, 3) voxels
    vertices: int | None


class Axis(NamedTuple):
    """What the files of a lab need of an axis, whose `kind` is its class in nibabel."""

    kind: str
    length: int
    parcels: Rois = ()
    seconds: float = math.nan  # from one volume to the next, NaN if the axis is not time
    labels: tuple[dict[int, str], ...] = ()  # names by label, of each map
    structures: tuple[Structure, ...] = ()
    grid: tuple[int, ...] | None = None  # of the voxels
    affine: npt.NDArray[np.float64] = np.full((4, 4), np.nan)


class Map(NamedTuple):
    """An element MatrixIndicesMap: the dimensions of the matrix that it describes, its type, its number of children."""

    dimensions: tuple[int, ...]
    kind: str
    children: int
    axis: Axis


def open_cifti(path: Path, content: bytes | None = None) -> tuple[Any, tuple[Axis, ...]]:
    """The numbers of a file (or of its content), not yet read, and the axis of each dimension; errors are nibabel's."""
    import nibabel
    from nibabel.arrayproxy import ArrayProxy

    with path.open("rb") if content is None else io.BytesIO(content) as file:
        header = cast("Any", nibabel).Nifti2Header(file.read(nibabel.Nifti2Header.sizeof_hdr), check=False)
        header.check_fix(QUIET)
        xml = _extension(file, header)
    proxy = cast("Any", ArrayProxy)(path if content is None else io.BytesIO(content), header)
    numbers = proxy.reshape(proxy.shape[4:])  # the first four are those of space and time
    by_dimension = _axes(xml)
    absent = next((i for i in range(len(numbers.shape)) if i not in by_dimension), None)
    if absent is not None:
        raise ValueError(f"dimension {absent} is not described")
    return numbers, tuple(by_dimension[i] for i in range(len(numbers.shape)))


def _extension(file: BinaryIO, header: Any) -> bytes:
    """XML of the first CIFTI-2 extension; the file is at the end of its NIfTI header."""
    size = header.get_data_offset() - file.tell() - 4
    if file.read(4)[:1] not in (b"", b"\0"):
        while size >= 16:
            start = file.read(8)
            length, code = struct.unpack(f"{header.endianness}2i", start) if len(start) == 8 else (0, 0)
            # Not read before it is known to fit: a header can declare any number of bytes.
            if not 8 <= length <= size:
                raise ValueError("an extension of its header does not fit")
            content = file.read(length - 8)
            if len(content) < length - 8:
                raise ValueError("failed to read extension content")
            if code == EXTENSION:
                return content.rstrip(b"\0")
            size -= length
    raise ValueError("NIfTI2 header does not contain a CIFTI-2 extension")


def _axes(xml: bytes) -> dict[int, Axis]:
    try:
        maps = _short_parts(xml)
    except Exception:  # whatever is wrong or unusual, the whole text decides, and its error has the right line
        maps = None
    return {i: each.axis for each in (_parsed(xml) if maps is None else maps) for i in each.dimensions}


def _short_parts(xml: bytes) -> list[Map] | None:
    """Maps of a header whose long ones are looked up; None if it is not plain enough to be taken apart as text.

    A long map is replaced by one without children, so that nibabel sees all else as it is. Without comments, CDATA, document
    types and other encodings, each `<` starts a tag, so that what looks like a map is one. A known map has none of these, so
    that its text is searched for them once.
    """
    declaration = DECLARATION.match(xml)
    first = start = 0 if declaration is None else declaration.end()
    long: dict[tuple[int, ...], Map] = {}
    parts, done, seen = [], 0, 0
    while (begin := xml.find(MAP, start)) >= 0:
        seen += 1
        if seen > MOST_MAPS:
            return None
        end = xml.find(END_OF_MAP, begin) + len(END_OF_MAP)
        start = begin + len(MAP)
        if end < start:
            break
        text = xml[begin:end]
        if len(text) <= SHORT or (
            text not in KNOWN and MAP in text[1:]
        ):  # the map before the one that ends here has no children
            continue
        if text not in KNOWN and _is_not_plain(text):
            return None
        found = KNOWN.map(text)
        if found.dimensions in long:
            return None
        long[found.dimensions] = found
        dimensions = ",".join(map(str, found.dimensions))
        parts += [xml[done:begin], CHILDLESS.format(dimensions, found.kind).encode()]
        done = start = end
    short = b"".join([*parts, xml[done:]])
    if _is_not_plain(short[first:]) or short.count(MAP) > MOST_MAPS:
        return None
    maps = _parsed(short)
    if sum(each.children == 0 and each.dimensions in long for each in maps) != len(long):
        return None
    return [each if each.children else long.get(each.dimensions, each) for each in maps]


def _is_not_plain(xml: bytes) -> bool:
    """Whether a text can have comments, CDATA, document types or processing instructions."""
    return b"<!" in xml or b"<?" in xml


class _Known:
    """Maps by their XML, the last used ones up to a number of bytes, for all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.maps: OrderedDict[bytes, tuple[Map, int]] = OrderedDict()
        self.bytes = 0

    def __contains__(self, xml: bytes) -> bool:
        return xml in self.maps

    def map(self, xml: bytes) -> Map:
        with self.lock:  # also while it is parsed, so that many threads with the same map parse it once
            if xml in self.maps:
                self.maps.move_to_end(xml)
                return self.maps[xml][0]
            (found,) = _parsed(ALONE % xml)
            self.maps[xml] = found, len(xml)
            self.bytes += len(xml)
            while self.bytes > LARGEST_KEPT:
                self.bytes -= self.maps.popitem(last=False)[1][1]
            return found


KNOWN = _Known()


def _parsed(xml: bytes) -> list[Map]:
    from nibabel.cifti2 import parse_cifti2

    parser = cast("Any", parse_cifti2).Cifti2Parser()
    parser.parse(string=xml)
    if parser.header is None:
        raise ValueError("its extension has no element CIFTI")
    return [
        Map(tuple(each.applies_to_matrix_dimension), each.indices_map_to_data_type, len(each), _axis(each, len(xml)))
        for each in parser.header.matrix
    ]


def _axis(described: Any, longest: int) -> Axis:
    """The axis of a map in an XML text of this length; one without children may stand for one with them."""
    from nibabel.cifti2 import cifti2_axes

    kind = described.indices_map_to_data_type
    if not len(described) and kind != "CIFTI_INDEX_TYPE_SERIES":
        return Axis("", 0)
    # A few characters can stand for any number, or for any number of grayordinates.
    if abs(described.series_exponent or 0) > LARGEST_EXPONENT:
        raise ValueError(f"SeriesExponent is {described.series_exponent}")
    if sum(abs(each.index_count or 0) for each in described.brain_models) > longest:
        raise ValueError("more grayordinates are declared than listed")
    axis = cast("Any", cifti2_axes).from_index_mapping(described)
    name, length = type(axis).__name__, len(axis)
    if name == "SeriesAxis":
        # The file stores a step and a power of ten, so that milliseconds and microseconds are in seconds here.
        return Axis(name, length, seconds=float(axis.step) if axis.unit == "SECOND" else math.nan)
    if name == "ParcelsAxis":
        return Axis(name, length, parcels=tuple(str(each).strip() for each in axis.name))
    if name == "LabelAxis":
        return Axis(name, length, labels=tuple({key: str(each[0]).strip() for key, each in one.items()} for one in axis.label))
    if name == "BrainModelAxis":
        models = tuple(
            Structure(one, chosen, each.vertex[:, None] if one in axis.nvertices else each.voxel, axis.nvertices.get(one))
            for one, chosen, each in axis.iter_structures()
        )
        return Axis(name, length, structures=models, grid=axis.volume_shape, affine=np.array(axis.affine, dtype=np.float64))
    return Axis(name, length)
