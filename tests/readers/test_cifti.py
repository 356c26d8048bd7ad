"""Headers of CIFTI-2 files: what nibabel reads of a whole file is the oracle, and a list of parcels is parsed once."""

import concurrent.futures
import re
import struct
import time
import tracemalloc
import warnings

import nibabel
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nibabel.cifti2 import BrainModelAxis, LabelAxis, ParcelsAxis, SeriesAxis

from m2lgdg.data.readers import cifti, images
from m2lgdg.data.readers.images import header_seconds, load_connectome, load_parcellated
from m2lgdg.storage import InputError

AFFINE = np.diag([2.0, 2.0, 2.0, 1.0])
LEFT = "CIFTI_STRUCTURE_CORTEX_LEFT"

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Every map is looked up, as those of real files are, and nothing is known before a test."""
    monkeypatch.setattr(cifti, "SHORT", 0)
    monkeypatch.setattr(cifti, "KNOWN", cifti._Known())


@pytest.fixture
def texts(monkeypatch):
    """Texts that nibabel parses."""
    seen = []
    parse = cifti._parsed
    monkeypatch.setattr(cifti, "_parsed", lambda xml: seen.append(xml) or parse(xml))
    return seen


def parcels(names, each=3):
    voxels = [np.arange(3 * each).reshape(each, 3) % 4 for _ in names]
    return ParcelsAxis(list(names), voxels, [{LEFT: np.arange(each)} for _ in names], AFFINE, (4, 5, 40), {LEFT: 32492})


def content(numbers, *axes, dtype="<f4", slope=(1, 0), before=(), history="", padding=0):
    """A CIFTI-2 file made by hand: NIfTI-2 header, extensions, numbers; nibabel would not write all that it can read."""
    header = nibabel.Nifti2Header(endianness=dtype[0])
    header.set_data_shape((1, 1, 1, 1, *numbers.shape))
    header.set_data_dtype(np.dtype(dtype))
    header["intent_code"], header["magic"] = 3004, b"n+2"
    header["scl_slope"], header["scl_inter"] = slope
    xml = nibabel.Cifti2Header.from_axes(axes).to_xml()
    if history:
        metadata = f"<MetaData><MD><Name>Provenance</Name><Value>{history}</Value></MD></MetaData>".encode()
        xml = xml.replace(b"<Matrix>", b"<Matrix>" + metadata)
    extensions = b"".join(extension(code, one, dtype[0]) for code, one in (*before, (32, xml)))
    header["vox_offset"] = 544 + len(extensions) + 16 * padding
    with np.errstate(all="ignore"):
        stored = np.asarray(numbers).astype(dtype).tobytes(order="F")
    return header.binaryblock + b"\1\0\0\0" + extensions + bytes(16 * padding) + stored


def extension(code, value, endian="<"):
    size = 8 + len(value) + -(8 + len(value)) % 16
    return struct.pack(f"{endian}2i", size, code) + value.ljust(size - 8, b"\0")


def oracle(stored):
    """Names, numbers and seconds by nibabel alone, or None for what it refuses or what is no parcellated series."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = nibabel.Cifti2Image.from_bytes(stored)
            axes = [image.header.get_axis(i) for i in range(image.ndim)]
            with np.errstate(all="ignore"):
                numbers = np.asarray(image.dataobj, dtype=np.float32)
        except Exception:
            return None
    if [type(axis) for axis in axes] != [SeriesAxis, ParcelsAxis] or numbers.shape != tuple(map(len, axes)):
        return None
    seconds = axes[0].step if axes[0].unit == "SECOND" else np.nan
    return tuple(str(name).strip() for name in axes[1].name), numbers, seconds


def ours(path, stored):
    path.write_bytes(stored)
    try:
        _, (time_axis, _) = images._open(path)
        return *load_parcellated(path), time_axis.seconds
    except InputError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return None


def same(one, other):
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one[1:], other[1:], strict=True))


@quick
@given(
    names=st.lists(st.text("aB1_ -&<>\"'é中", min_size=1, max_size=6), min_size=1, max_size=5),
    volumes=st.integers(1, 5),
    dtype=st.sampled_from(["u1", "i2", "i4", "f4", "f8"]),
    endian=st.sampled_from("<>"),
    slope=st.sampled_from([(1, 0), (0, 0), (np.nan, np.nan), (0.5, 3), (-2e-3, 1e4), (1, np.inf)]),
    before=st.lists(st.sampled_from([(4, b"<note/>"), (6, b"x" * 33), (44, b"")]), max_size=2),
    step=st.sampled_from([0.72, 2.0, 0.0, 1e-3]),
    unit=st.sampled_from(["SECOND", "HERTZ"]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_what_nibabel_reads(tmp_path, names, volumes, dtype, endian, slope, before, step, unit, padding, seed):
    """Types of numbers, byte orders, scales, further extensions and NaN, one file after the other."""
    numbers = np.random.default_rng(seed).normal(100, 60, size=(volumes, len(names))).clip(0, 255)
    if dtype[0] == "f" and seed % 2:
        numbers[0, 0] = np.nan
    axes = SeriesAxis(0, step, volumes, unit), parcels(names)
    how = {"dtype": f"{endian}{dtype}", "slope": slope, "before": before, "history": f"run {seed}"}
    expected = oracle(content(numbers, *axes, **how))
    assert (expected is None) == (slope[1] == np.inf)
    # Zeros between the extensions and the numbers, which nibabel takes for an extension without a length.
    assert same(ours(tmp_path / "a.ptseries.nii", content(numbers, *axes, **how, padding=padding)), expected)


def as_comment(xml):
    """The parcels are in a comment, and a map without any stands in their place."""
    long = re.search(rb"<MatrixIndicesMap[^>]*PARCELS.*?</MatrixIndicesMap>", xml, re.DOTALL)[0]
    empty = long[: long.index(b">")] + b"/>"
    return xml.replace(long, b"<!--" + long + b"-->" + empty)


ODD = {
    "plain": lambda xml: xml,
    "declaration": lambda xml: b"<?xml version='1.0' encoding='UTF-8'?>" + xml,
    "standalone": lambda xml: b'<?xml version="1.0" standalone="yes"?>' + xml,
    "comment": lambda xml: xml.replace(b"<Parcel ", b"<!-- </MatrixIndicesMap> --><Parcel ", 1),
    "long comment": lambda xml: xml.replace(b"<Parcel ", b"<!--" + b" " * cifti.SHORT + b"</MatrixIndicesMap>--><Parcel ", 1),
    "as comment": as_comment,
    "cdata": lambda xml: xml.replace(b"<Matrix>", b"<Matrix><MetaData><![CDATA[<MatrixIndicesMap]]></MetaData>"),
    "instruction": lambda xml: xml.replace(b"<Matrix>", b"<Matrix><?php <MatrixIndicesMap ?>"),
    "entity": lambda xml: xml.replace(b"<CIFTI", b'<!DOCTYPE CIFTI [<!ENTITY a "b">]><CIFTI', 1).replace(b'"one"', b'"&a;"'),
    "unknown entity": lambda xml: xml.replace(b'"one"', b'"&a;"'),
    "reference": lambda xml: xml.replace(b'"one"', b'"&#233;&amp;"'),
    "latin-1": lambda xml: b'<?xml version="1.0" encoding="iso-8859-1"?>' + xml.replace(b'"one"', b'"\xe9"'),
    "invalid utf-8": lambda xml: xml.replace(b'"one"', b'"\xe9"'),
    "utf-16": lambda xml: b"\xfe\xff" + xml.decode().encode("utf-16-be"),
    "version 1": lambda xml: xml.replace(b'Version="2.0"', b'Version="1.0"'),
    "same dimension twice": lambda xml: xml.replace(b'Dimension="1"', b'Dimension="0"'),
    "a third map": lambda xml: xml.replace(b"</Matrix>", b'<MatrixIndicesMap AppliesToMatrixDimension="1"/></Matrix>'),
    "no map": lambda xml: xml.replace(b'Dimension="1"', b'Dimension="2"'),
    "both": lambda xml: xml.replace(b'Dimension="1"', b'Dimension="1,0"'),
    "two matrices": lambda xml: xml.replace(b"</Matrix>", b"</Matrix><Matrix></Matrix>"),
    "other element": lambda xml: xml.replace(b"MatrixIndicesMap", b"MatrixIndicesMapping"),
    "nested": lambda xml: xml.replace(b"<Parcel ", b"<MatrixIndicesMap></MatrixIndicesMap><Parcel ", 1),
    "vertex that is no number": lambda xml: xml.replace(b">0 1 2<", b">0 x 2<"),
    "unclosed": lambda xml: xml.replace(b"</Matrix>", b""),
    "two roots": lambda xml: xml + xml[xml.index(b"<CIFTI") :],
    "text after": lambda xml: xml + b"<",
    "no CIFTI": lambda xml: b"<a/>",
    "other surface": lambda xml: xml.replace(b'<Surface BrainStructure="CIFTI', b'<Surface BrainStructure="X'),
}  # fmt: skip
READABLE = {
    "plain",
    "declaration",
    "standalone",
    "comment",
    "long comment",
    "cdata",
    "instruction",
    "entity",
    "reference",
    "latin-1",
    "utf-16",
}


@pytest.mark.parametrize("odd", ODD)
def test_unusual_and_wrong_headers(tmp_path, monkeypatch, odd):
    """After a plain file, whose parcels are known then, and before any."""
    plain = content(np.ones((3, 2)), SeriesAxis(0, 2, 3), parcels(["one", "two"]), history="h")
    to_xml = nibabel.Cifti2Header.to_xml
    monkeypatch.setattr(nibabel.Cifti2Header, "to_xml", lambda self: ODD[odd](to_xml(self)))
    stored = content(np.ones((3, 2)), SeriesAxis(0, 2, 3), parcels(["one", "two"]))
    expected = oracle(stored)
    assert (expected is not None) == (odd in READABLE)
    path = tmp_path / "a.ptseries.nii"
    for _ in range(2):
        assert same(ours(path, stored), expected)
        assert same(ours(path, plain), oracle(plain))


@quick
@given(st.data())
def test_damaged_files(tmp_path, data):
    """Bytes are changed, cut or repeated anywhere in header and XML: what nibabel reads is read, all else is refused."""
    stored = bytearray(content(np.arange(6.0).reshape(3, 2), SeriesAxis(0, 2, 3), parcels(["one", "two"]), history="h"))
    end = len(stored) - 24
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(544, end - 1) | st.sampled_from([0, 4, 12, 16, 56, 64, 168, 176, 504, 540, 544, 548]))
        how = data.draw(st.sampled_from(["set", "copy", "cut"]))
        if how == "set":
            stored[place] = data.draw(st.sampled_from(list(b"\0\1\x7f\xff<>/\"'&;!? 019-x")))
        elif how == "copy":
            other, length = data.draw(st.integers(552, end - 1)), data.draw(st.integers(1, 40))
            part = stored[other : other + length]
            stored[place : place + len(part)] = part
        else:
            del stored[data.draw(st.integers(0, len(stored))) :]
            stored += bytes(max(0, end + 1 - len(stored)))
    if re.search(rb'SeriesExponent="[^"]{2}', bytes(stored)):  # nibabel computes 10 ** 1000000000
        return
    found, expected = ours(tmp_path / "a.ptseries.nii", bytes(stored)), oracle(bytes(stored))
    header = nibabel.Nifti2Header(bytes(stored[:540]), check=False)
    (length,) = struct.unpack_from(f"{header.endianness}i", stored, 544)
    if header["vox_offset"] < 544 + length:  # nibabel then takes a part of the extension for numbers
        expected = None
    assert same(found, expected)


def test_parcels_are_parsed_once(tmp_path, texts):
    """Histories and lengths differ, as in every release; the long list is the same."""
    axis = parcels([f"roi {i}" for i in range(200)])
    length = len(nibabel.Cifti2Header.from_axes([axis]).to_xml())
    for i in range(6):
        path = tmp_path / f"{i}.ptseries.nii"
        path.write_bytes(content(np.full((3 + i, 200), i), SeriesAxis(0, 1 + i, 3 + i), axis, history=f"subject {i}"))
        rois, series = load_parcellated(path)
        assert (rois, series.shape, header_seconds(path)) == (tuple(axis.name), (3 + i, 200), 1 + i)
        assert (series == i).all()
    assert sum(len(xml) > length / 2 for xml in texts) == 1
    assert len(cifti.KNOWN.maps) == 1


def test_another_parcel_is_noticed(tmp_path, texts):
    """One character of a name, or one vertex outside: lists that are not the same bytes are not the same list."""
    names = ["one", "two"]
    stored = content(np.ones((3, 2)), SeriesAxis(0, 2, 3), parcels(names))
    path = tmp_path / "a.ptseries.nii"
    assert ours(path, stored)[0] == ("one", "two")
    assert ours(path, stored.replace(b'"two"', b'"twp"'))[0] == ("one", "twp")
    assert ours(path, stored.replace(b">0 1 2<", b">0 a 2<", 1)) is None
    assert ours(path, stored.replace(b'"two"', b'"t"wo')) is None
    assert ours(path, stored)[0] == ("one", "two")


def test_a_connectome_has_one_list_for_both_dimensions(tmp_path, texts):
    path = tmp_path / "a.pconn.nii"
    matrix = np.arange(4.0).reshape(2, 2)
    for _ in range(2):
        path.write_bytes(content(matrix, parcels(["one", "two"]), parcels(["one", "two"])))
        rois, found = load_connectome(path)
        assert rois == ("one", "two")
        np.testing.assert_array_equal(found, matrix)
    assert sum(b"<Parcel " in xml for xml in texts) == 1
    path.write_bytes(content(matrix, parcels(["one", "two"]), parcels(["two", "one"])))
    with pytest.raises(InputError, match=r"the parcels of its rows are not those of its columns\."):
        load_connectome(path)


def dense(folder, vertices=40, name="a"):
    axis = BrainModelAxis.from_surface(np.arange(vertices), 40, LEFT)
    labels = {0: ("none", (0, 0, 0, 0)), 1: ("front", (1, 1, 1, 1)), 2: ("back", (1, 0, 0, 1))}
    keys = np.repeat([1, 0, 2, 1], 10)[None]
    whole = BrainModelAxis.from_surface(np.arange(40), 40, LEFT)
    (folder / "p.dlabel.nii").write_bytes(content(keys, LabelAxis(["map"], [labels]), whole))
    numbers = np.random.default_rng(vertices).normal(size=(5, vertices)).astype(np.float32)
    path = folder / f"{name}.dtseries.nii"
    path.write_bytes(content(numbers, SeriesAxis(0, 2, 5), axis))
    return path, numbers


def test_members_of_parcels_follow_the_grayordinates_of_each_file(tmp_path):
    """Files with and without the last vertices in turn: what is kept of one is not used for the other."""
    cases = [dense(tmp_path, 40, "a"), dense(tmp_path, 25, "b")]
    atlas = images.Parcels(tmp_path / "p.dlabel.nii")
    for path, numbers in cases * 2:
        rois, means = atlas.means(path)
        assert rois == ("front", "back")
        front = np.r_[0:10, 30:40] if numbers.shape[1] == 40 else np.r_[0:10]
        back = np.arange(20, min(30, numbers.shape[1]))
        expected = np.stack([numbers[:, front].mean(1), numbers[:, back].mean(1)], axis=1)
        np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-6)


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(cifti, "LARGEST_KEPT", 20_000)
    for i in range(40):
        path = tmp_path / "a.ptseries.nii"
        path.write_bytes(content(np.ones((3, 5)), SeriesAxis(0, 2, 3), parcels([f"{i} {j}" for j in range(5)])))
        assert load_parcellated(path)[0] == tuple(f"{i} {j}" for j in range(5))
        assert cifti.KNOWN.bytes == sum(size for _, size in cifti.KNOWN.maps.values()) <= 20_000
    large = parcels([f"{i}" for i in range(300)])
    path.write_bytes(content(np.ones((3, 300)), SeriesAxis(0, 2, 3), large))
    assert len(load_parcellated(path)[0]) == 300
    assert cifti.KNOWN.bytes <= 20_000


def test_threads_parse_a_list_once(tmp_path, texts):
    path = tmp_path / "a.ptseries.nii"
    path.write_bytes(content(np.ones((3, 300)), SeriesAxis(0, 2, 3), parcels([f"{i}" for i in range(300)])))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: load_parcellated(path)[0], range(32)))
    assert set(found) == {tuple(f"{i}" for i in range(300))}
    assert sum(xml.count(b"<Parcel ") == 300 for xml in texts) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'SeriesExponent="0"', b'SeriesExponent="999999999"'),
        (b'IndexCount="40"', b'IndexCount="400000000000"'),
        (b"</Matrix>", b"<MatrixIndicesMap/>" * 60_000 + b"</Matrix>"),
    ],
)
def test_a_few_bytes_that_stand_for_very_much(tmp_path, monkeypatch, old, new):
    to_xml = nibabel.Cifti2Header.to_xml
    monkeypatch.setattr(nibabel.Cifti2Header, "to_xml", lambda self: to_xml(self).replace(old, new))
    path, _ = dense(tmp_path)
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a\.dtseries\.nii is not a readable CIFTI-2 file"):
        header_seconds(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20 and time.process_time() - start < 5


def test_extensions_that_do_not_fit(tmp_path):
    stored = bytearray(content(np.ones((3, 2)), SeriesAxis(0, 2, 3), parcels(["one", "two"])))
    path = tmp_path / "a.ptseries.nii"
    for size in (0, 7, -16, 2**31 - 1):
        stored[544:548] = struct.pack("<i", size)
        path.write_bytes(stored)
        with pytest.raises(InputError, match=r"not a readable CIFTI-2 file \(an extension of its header does not fit\)\."):
            load_parcellated(path)
    stored[548:552] = struct.pack("<i", 6)
    stored[544:548] = struct.pack("<i", 16)
    path.write_bytes(stored)
    with pytest.raises(InputError, match="not a readable CIFTI-2 file"):
        load_parcellated(path)
