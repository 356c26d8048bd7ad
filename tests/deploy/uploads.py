"""Hostile uploads of `m2lgdg serve`, each with the status and the sentence that it must end in."""

import io
import os
import pickle
import zipfile

import numpy as np


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def text(array, separator=","):
    buffer = io.StringIO()
    np.savetxt(buffer, array, delimiter=separator, fmt="%.9g")
    return buffer.getvalue().encode()


def header_with(descr="'<f4'", shape="(60, 116)", order="False", data=b"", version=1):
    """A .npy file with any header."""
    head = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    size = len(head).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + head + data


def good():
    return np.random.default_rng(4).normal(size=(60, 116)).astype(np.float32)


def spoiled(value, dtype=np.float32):
    array = good().astype(dtype)
    array[7, 2] = value
    return array


def bomb():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(50_000_000))
    return buffer.getvalue()


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("pwned",))


NOT_NPY = "scan.npy is not a readable .npy file."
PICKLED = "scan.npy holds Python objects that only pickle could read, which may run code; save numbers."
CLAIM = "scan.npy is not a readable .npy file: it is too short for its shape {}."
KINDS = "cannot be read: a series file ends in .1D, .txt, .csv, .tsv, .npy or .ptseries.nii."
INFINITE = "infinite value at volume 8 of ROI Frontal_Sup_L (1 such value)."
TRAINED = "the model was trained on 116 ROIs (aal)"
MATLAB = "scan.mat cannot be read: damaged MATLAB files can crash their reader; save the series as .npy or .csv."
ORDER = "ROI 1 is Precentral_L in the model but V0 in the cohort: another atlas or order."
FILES = {  # name -> file name, content, status, sentence
    "pickle": ("scan.npy", pickle.dumps(Evil()), 422, NOT_NPY),
    "object array": ("scan.npy", npy(np.array([[Evil()]], dtype=object)), 422, PICKLED),
    "object header before pickle": ("scan.npy", header_with("'|O'", "(1,)", data=pickle.dumps([Evil()])), 422, PICKLED),
    "object in a structure": ("scan.npy", header_with("[('a', '|O')]", "(1, 1)", data=b"12345678"), 422, PICKLED),
    "huge shape": ("scan.npy", header_with(shape="(1000000000000, 116)"), 422, CLAIM.format("(1000000000000, 116)")),
    "shape beyond any integer": ("scan.npy", header_with(shape=f"({10**30}, 116)"), 422, CLAIM.format(f"({10**30}, 116)")),
    "negative shape": ("scan.npy", header_with(shape="(-1, 116)", data=bytes(464)), 422, NOT_NPY),
    "no volume": ("scan.npy", header_with(shape="(0, 116)"), 422, "scan.npy: the series has 0 volumes."),
    "empty items": ("scan.npy", header_with("'<U0'", "(1000000, 1000000)"), 422, None),
    "truncated": ("scan.npy", npy(good())[:-9], 422, CLAIM.format("(60, 116)")),
    "header cut": ("scan.npy", npy(good())[:40], 422, NOT_NPY),
    "code in the header": ("scan.npy", header_with("__import__('os').mkdir('pwned')"), 422, NOT_NPY),
    "nested header": ("scan.npy", header_with("(" * 4000 + ")" * 4000), 422, NOT_NPY),
    "endless header": ("scan.npy", header_with("'" + "f" * 10**6 + "'", version=2), 422, NOT_NPY),
    "unknown version": ("scan.npy", b"\x93NUMPY\x09\x00" + bytes(200), 422, NOT_NPY),
    "complex": ("scan.npy", npy(good() * 1j), 422, "scan.npy contains complex64 values, not real numbers."),
    "text array": ("scan.npy", npy(good().astype("U8")), 422, "scan.npy contains <U8 values, not real numbers."),
    "three dimensions": ("scan.npy", npy(good()[None]), 422, "scan.npy has shape (1, 60, 116), not (time, roi)."),
    "NaN": ("scan.npy", npy(spoiled(np.nan)), 422, "scan.npy: NaN at volume 8 of ROI Frontal_Sup_L (1 such value)."),
    "infinity": ("scan.csv", text(spoiled(np.inf)), 422, f"scan.csv: {INFINITE}"),
    "too large for single precision": ("scan.npy", npy(spoiled(1e300, np.float64)), 422, f"scan.npy: {INFINITE}"),
    "zeros": ("scan.npy", npy(good() * 0), 422, "scan.npy: the series is zero everywhere."),
    "wrong ROI count": ("scan.npy", npy(good()[:, :90]), 422, f"scan.npy has 90 columns, {TRAINED}."),
    "transposed": (
        "scan.npy",
        npy(good().T),
        422,
        f"scan.npy has 60 columns, {TRAINED}; it seems to have one row per ROI, so transpose it.",
    ),
    "too short": (
        "scan.npy",
        npy(good()[:12]),
        422,
        "the scan of subject scan.npy has 12 volumes; a prediction needs at least 20.",
    ),
    "too long": (
        "scan.npy",
        npy(np.zeros((20001, 116), dtype=np.int8)),
        422,
        "scan.npy has 20001 volumes; the limit is 20000.",
    ),
    "too many lines": ("scan.txt", b"1\n" * 20_001, 422, "scan.txt has more than 20000 lines."),
    "too many cells": ("scan.csv", b"," * 5_000_001, 422, "scan.csv has more than 5000000 cells."),
    "ragged": ("scan.csv", text(good()) + b"1,2,3\n", 422, "scan.csv, line 61: 3 columns, but earlier lines have 116."),
    "other ROIs": ("scan.csv", ",".join(f"V{i}" for i in range(116)).encode() + b"\n" + text(good()), 422, ORDER),
    "a ROI twice": (
        "scan.csv",
        ",".join(["V"] * 116).encode() + b"\n" + text(good()),
        422,
        "cohort of one: ROI V appears 116 times.",
    ),
    "header of another length": (
        "scan.csv",
        b"a,b,c\n" + text(good()),
        422,
        "scan.csv: the header names 3 ROIs but the lines have 116 columns.",
    ),
    "script as a cell": (
        "scan.csv",
        text(good()) + b"<script>alert(1)</script>,2\n",
        422,
        "scan.csv, line 61, column 1: '<script>alert(1)</script>' is not a number.",
    ),
    "rubbish": ("scan.csv", bytes(range(256)) * 40, 422, "scan.csv is not a text file."),
    "rubbish without zeros": (
        "scan.txt",
        np.random.default_rng(0).integers(128, 256, 5000, dtype=np.uint8).tobytes(),
        422,
        "scan.txt contains no numbers.",
    ),
    "UTF-16": ("scan.csv", "1,2\n3,4\n".encode("utf-16"), 422, "scan.csv is not a text file."),
    "empty": ("scan.csv", b"", 422, "scan.csv is empty."),
    "zip bomb": ("scan.npz", bomb(), 422, "scan.npz cannot be read: archives are not supported; save the array as .npy."),
    "zip bomb named .npy": ("scan.npy", bomb(), 422, NOT_NPY),
    "a CIFTI that is none": ("scan.ptseries.nii", bytes(2000), 422, None),
    "only the suffix of a CIFTI": (".ptseries.nii", b"x", 422, f".ptseries.nii {KINDS}"),
    "another NIfTI": ("scan.nii", b"x", 422, f"scan.nii {KINDS}"),
    "MATLAB": ("scan.mat", b"MATLAB 5.0 MAT-file" + bytes(200), 422, MATLAB),
    "another kind": ("scan.exe", b"MZ", 422, f"scan.exe {KINDS}"),
    "no suffix": ("scan", b"1 2", 422, f"scan {KINDS}"),
    "only a suffix": (".npy", npy(good()), 422, f".npy {KINDS}"),
    "script in the name": (
        "<script>alert(1)<script>.npy",
        b"x",
        422,
        "<script>alert(1)<script>.npy is not a readable .npy file.",
    ),
    "path in the name": ("../../../etc/passwd", b"x", 422, f"passwd {KINDS}"),
    "Windows path in the name": ("C:\\temp\\..\\x.npy", b"x", 422, "x.npy is not a readable .npy file."),
    "template in the name": ("{{ 7*7 }}{% raw %}.npy", b"x", 422, "{{ 7*7 }}{% raw %}.npy is not a readable .npy file."),
    "right-to-left in the name": ("a\u202eb.npy", b"x", 422, "ab.npy is not a readable .npy file."),
    "a long name": ("y" * 1000 + ".npy", b"x", 422, f"{'y' * 40}…{'y' * 14}.npy is not a readable .npy file."),
    "endless name": ("y" * 9000 + ".npy", b"x", 400, "The form cannot be read (Invalid multipart data)."),
}


EMPTY = "leave the field empty if the value is not known."
FIELDS = {
    "negative age": ({"p1": "-3"}, f"Age: -3 is not in the range 0.1 to 120 years; {EMPTY}"),
    "missing code": ({"p2": "-9999"}, f"Education: -9999 is not in the range 0 to 60 years; {EMPTY}"),
    "text": ({"p1": "old"}, "Age: 'old' is not a number."),
    "script": ({"p1": "<script>alert(1)</script>"}, "Age: '<script>alert(1)</script>' is not a number."),
    "end of an attribute": ({"p1": '"><img src=x>'}, "Age: '\"><img src=x>' is not a number."),
    "NaN": ({"p1": "nan"}, "Age: 'nan' is not a number."),
    "infinity": ({"p1": "1e999"}, "Age: '1e999' is not a number."),
    "underscore": ({"p1": "1_0"}, "Age: '1_0' is not a number."),
    "a third sex": ({"p0": "3"}, "Sex: 3 is not 1 (male) or 2 (female)."),
    "TR in milliseconds": ({"tr": "2000"}, f"TR: 2000 is not in the range 0.05 to 30 seconds; {EMPTY}"),
    "TR of nothing": ({"tr": "0"}, f"TR: 0 is not in the range 0.05 to 30 seconds; {EMPTY}"),
}


BOUNDARY = {"content-type": "multipart/form-data; boundary=b"}
BEGIN = b'--b\r\nContent-Disposition: form-data; name="series"; filename="a.npy"\r\n\r\n'
NO_FILE = "Choose a file with ROI series first."
UNREADABLE = "The form cannot be read ({})."
NO_PART = "The form has an unexpected part {!r}."
FORMS = {  # what is sent, status, sentence
    "nothing": ({"content": BEGIN.replace(b"a.npy", b"") + b"\r\n--b--\r\n", "headers": BOUNDARY}, 422, NO_FILE),
    "no file": ({"files": {"p1": (None, "3")}}, 422, NO_FILE),
    "two files": (
        {"files": [("series", ("a.npy", b"1")), ("series", ("b.npy", b"2"))]},
        400,
        UNREADABLE.format("Too many files. Maximum number of files is 1"),
    ),
    "file in another field": ({"files": {"p1": ("a.npy", b"1")}}, 400, NO_PART.format("p1")),
    "series as words": ({"files": {"series": (None, "1 2 3")}}, 400, NO_PART.format("series")),
    "unknown field": ({"files": {"series": ("a.npy", b"1")}, "data": {"<b>label": "1"}}, 400, NO_PART.format("<b>label")),
    "a field twice": ({"files": {"series": ("a.npy", b"1")}, "data": {"p1": ["1", "2"]}}, 400, NO_PART.format("p1")),
    "many fields": (
        {"files": {"series": ("a.npy", b"1")}, "data": {f"x{i}": "1" for i in range(50)}},
        400,
        UNREADABLE.format("Too many fields. Maximum number of fields is 6"),
    ),
    "a long field": (
        {"files": {"series": ("a.npy", b"1")}, "data": {"p1": "1" * 201}},
        400,
        UNREADABLE.format("Part exceeded maximum size of 0KB"),
    ),
    "JSON": ({"json": {"series": [1]}}, 415, "The form must be sent as multipart/form-data."),
    "no boundary": (
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        400,
        UNREADABLE.format("Missing boundary in multipart"),
    ),
    "rubbish inside": ({"content": b"rubbish", "headers": BOUNDARY}, 400, UNREADABLE.format("Invalid multipart data")),
    "cut short": ({"content": BEGIN + b"abc", "headers": BOUNDARY}, 422, NO_FILE),
    "part without a name": (
        {"content": b"--b\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--b--\r\n", "headers": BOUNDARY},
        400,
        None,
    ),
    "a charset that is no text": (
        {
            "content": b'--b\r\nContent-Disposition: form-data; name="p1"\r\n\r\nabc\r\n--b--\r\n',
            "headers": {"content-type": "multipart/form-data; boundary=b; charset=zip"},
        },
        422,
        NO_FILE,
    ),
}
