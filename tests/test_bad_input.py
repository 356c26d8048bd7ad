"""Whatever is wrong with an input, `check` and `convert` end in one sentence that says where, and leave nothing half-written.

Trouble with one subject's series is that subject's alone, which `check` lists as excluded; trouble with a table stops both.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import breakage as b
import numpy as np
import pandas as pd
import pytest
import typer
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import save_file

from m2lgdg import Cohort, InputError, cli
from m2lgdg.commands import terminal
from m2lgdg.data.readers import read
from m2lgdg.data.readers.arrays import load_array, load_mat
from m2lgdg.data.readers.tables import read_sheet

LISTS = {"inclusion.csv", "sites.csv", "findings.csv"}
PEOPLE, TOML = "participants.tsv", "dataset.toml"
NORTH_3 = "**/north_0003_rois_cc200.1D"
MDD_3 = "**/ROISignals_S1-1-0003.mat"
HALVES = ("--atlas-image", "{input}/halves.nii.gz", "--atlas-labels", "{input}/halves.tsv")
RUN_1 = "sub-01/func/sub-01_task-rest_desc-preproc_bold.nii.gz"


class Case(NamedTuple):
    """One way to be wrong."""

    name: str
    base: str
    spoil: b.Spoil
    says: tuple[str, ...]  # parts of the sentence
    subject: str = ""  # the one that `check` leaves out; nobody: both commands stop
    options: tuple[str, ...] = ()
    reason: tuple[str, ...] = ()  # parts of the reason in inclusion.csv, where it is not the sentence


def toml(text: str) -> b.Spoil:
    return b.write(TOML, text)


def nothing(path: Path) -> None:
    pass


TABLES = [
    Case("text in the age column", "folder", b.cell(PEOPLE, "P03", "age", "old"), (PEOPLE, "P03", "column age", "'old'")),
    Case("an unknown sex word", "folder", b.cell(PEOPLE, "P03", "sex", "X"), (PEOPLE, "P03", "column sex", "'X'")),
    Case("an unknown label word", "folder", b.cell(PEOPLE, "P03", "label", "maybe"), (PEOPLE, "P03", "label", "'maybe'")),
    Case(
        "three labels",
        "folder",
        b.column(PEOPLE, "label", lambda number: ("mdd", "bipolar", "hc")[number % 3]),
        (PEOPLE, "P01", "label", "'bipolar'"),
    ),
    Case("labels 1 and 2", "folder", b.column(PEOPLE, "label", lambda n: str(1 + n % 2)), (PEOPLE, "label", "1 and 2", TOML)),
    Case("labels 0, 1 and 2", "folder", b.column(PEOPLE, "label", lambda n: str(n % 3)), (PEOPLE, "label", "1 and 2")),
    Case("labels between", "folder", b.cell(PEOPLE, "P03", "label", "0.5"), (PEOPLE, "P03", "label", "'0.5'")),
    Case("an empty site cell", "folder", b.cell(PEOPLE, "P03", "site", ""), (PEOPLE, "P03", "column site")),
    Case("a site n/a", "folder", b.cell(PEOPLE, "P03", "site", "n/a"), (PEOPLE, "P03", "column site")),
    Case("an empty subject cell", "folder", b.cell(PEOPLE, "P03", "participant_id", ""), (PEOPLE, "line 4", "participant_id")),
    Case(
        "an empty subject cell after blank lines",
        "folder",
        b.all_of(b.cell(PEOPLE, "P03", "participant_id", ""), b.line(PEOPLE, 2, "\n\t\t\t\t\n{}".format)),
        (PEOPLE, "line 6", "participant_id"),
    ),
    Case(
        "a subject's TR of zero",
        "folder",
        b.all_of(b.change(PEOPLE, "\tage", "\ttr", 1), b.cell(PEOPLE, "P03", "tr", "0")),
        (PEOPLE, "P03", "column tr", "0 s"),
    ),
    Case("no site column", "folder", b.change(PEOPLE, "site", "ward", 1), (PEOPLE, "no column for the site")),
    Case("no subject column", "folder", b.change(PEOPLE, "participant_id", "who", 1), (PEOPLE, "no column for the subject")),
    Case(
        "a column twice",
        "folder",
        b.all_of(b.change(PEOPLE, "\n", "\t30\n"), b.change(PEOPLE, "age\t30", "age\tage", 1)),
        (PEOPLE, "column age", "twice"),
    ),
    Case("a subject twice", "folder", b.change(PEOPLE, "P04", "P03"), (PEOPLE, "P03", "twice", "participant_id")),
    Case("a row with a cell too many", "folder", b.change(PEOPLE, "P03\t", "P03\tx\t"), (PEOPLE, "line 4")),
    Case("a row with a cell too few", "folder", b.change(PEOPLE, "P03\tnorth\t", "P03\t"), (PEOPLE, "line 4")),
    Case("a cell too many in every row", "folder", b.change(PEOPLE, "th\t", "th\tx\t"), (PEOPLE, "line 2")),
    Case(
        "a comma-separated .tsv", "folder", b.change(PEOPLE, "\t", ","), (PEOPLE, "no column for the subject", "participant_id")
    ),
    Case("a table of binary junk", "folder", b.write(PEOPLE, b"\xff\xfe\x00\x81" * 50), (PEOPLE, "table")),
    Case("an empty table", "folder", b.write(PEOPLE, ""), (PEOPLE, "table")),
    Case(
        "a table without a row", "folder", b.cut(PEOPLE, len("participant_id\tsite\tlabel\tsex\tage\n")), (PEOPLE, "no subject")
    ),
    Case("a folder for a table", "folder", b.folder_for(PEOPLE), (PEOPLE, "directory"), options=("--kind", "folder")),
]

DATASET = [
    Case("broken TOML", "folder", toml("name = = 3"), (TOML, "line 1, column 8")),
    Case("TOML that is no text", "folder", b.write(TOML, b"name = '\xff'"), (TOML, "TOML")),
    Case("a folder for a TOML", "folder", b.folder_for(TOML), (TOML, "directory")),
    Case("an unknown key", "folder", toml("colour = 'red'"), (TOML, "key colour", "known keys", "pattern")),
    Case("a key of the wrong type", "folder", toml("name = 3"), (TOML, "key name", "string")),
    Case("an unknown orientation", "folder", toml("orientation = 'sideways'"), (TOML, "key orientation", "time,roi")),
    Case("a TR in words", "folder", toml("tr = 'fast'"), (TOML, "key tr: input should be a valid number")),
    Case("a negative TR", "folder", toml("tr = -2.0"), (TOML, "key tr: input should be greater than 0")),
    Case(
        "an infinite TR",
        "folder",
        toml("tr = {north = inf, south = 2}"),
        (TOML, "key tr.north: input should be a finite number"),
    ),
    Case("a pattern without subject", "folder", toml("pattern = '{site}.npy'"), (TOML, "key pattern", "{subject}")),
    Case("an unknown column role", "folder", toml("[columns]\nheight = 'age'"), (TOML, "key columns.height", "education")),
    Case("a column that is not there", "folder", toml("[columns]\nage = 'years'"), (PEOPLE, "no column years")),
    Case(
        "a word for both classes",
        "folder",
        toml("[labels]\npatient = ['patient', 'control']\ncontrol = ['control']"),
        (TOML, "key labels", "control"),
    ),
    Case("a table that is not there", "folder", toml("participants = 'people.tsv'"), ("people.tsv", "does not exist")),
    Case("an input that is not there", "folder", toml("inputs = ['shoe size']"), (PEOPLE, "input shoe size")),
    Case(
        "an input of text",
        "folder",
        b.all_of(b.change(PEOPLE, "sex", "hand", 1), toml("inputs = ['hand']")),
        (PEOPLE, "P01", "column hand", "not a number"),
    ),
    Case(
        "a label proxy among the inputs",
        "folder",
        b.all_of(b.change(PEOPLE, "\tage", "\tHAMD", 1), toml("inputs = ['HAMD']")),
        (TOML, "HAMD", "diagnosis", "allow_proxies"),
    ),
    Case(
        "a label proxy under another name",
        "folder",
        b.all_of(b.change(PEOPLE, "\tage", "\tHAMD", 1), toml("[columns]\nage = 'HAMD'")),
        (TOML, "HAMD", "diagnosis", "allow_proxies"),
    ),
    Case(
        "ROI names of the wrong number",
        "folder",
        b.all_of(b.write("rois.tsv", "name\na\nb\nc\n"), toml("rois = 'rois.tsv'")),
        ("P01.npy", "6 ROI columns", "rois.tsv names 3"),
    ),
    Case(
        "a ROI name twice",
        "folder",
        b.all_of(b.write("rois.tsv", "name\na\nb\nc\nd\ne\na\n"), toml("rois = 'rois.tsv'")),
        ("rois.tsv", "ROI a"),
    ),
    Case(
        "ROI names without a name column",
        "folder",
        b.all_of(b.write("rois.tsv", "region\na\n"), toml("rois = 'rois.tsv'")),
        ("rois.tsv", "no column name"),
    ),
    Case("ROI names that are not there", "folder", toml("rois = 'rois.tsv'"), ("rois.tsv", "does not exist")),
]

ARRAYS = [
    Case("a NaN", "folder", b.array("P03.npy", b.value(np.nan)), ("P03.npy", "P03", "NaN at volume 8 of ROI 3"), "P03"),
    Case("an infinity", "folder", b.array("P03.npy", b.value(np.inf)), ("P03.npy", "P03", "infinite value at volume 8"), "P03"),
    Case(
        "a number beyond float32",
        "folder",
        b.array("P03.npy", lambda one: b.value(1e39)(one.astype(np.float64))),
        ("P03.npy", "P03", "infinite value at volume 8 of ROI 3"),
        "P03",
    ),
    Case("zeros", "folder", b.array("P03.npy", np.zeros_like), ("P03.npy", "P03", "zero everywhere"), "P03"),
    Case("constants", "folder", b.array("P03.npy", np.ones_like), ("P03.npy", "P03", "every ROI is constant"), "P03"),
    Case("one volume", "folder", b.array("P03.npy", lambda one: one[:1]), ("P03.npy", "P03", "1 volume."), "P03"),
    Case("no volume", "folder", b.array("P03.npy", lambda one: one[:0]), ("P03.npy", "P03", "0 volumes."), "P03"),
    Case("no ROI", "folder", b.array("P03.npy", lambda one: one[:, :0]), ("P03.npy", "P03"), "P03"),
    Case(
        "a ROI too many",
        "folder",
        b.array("P03.npy", lambda one: np.hstack([one, one])),
        ("P03.npy", "P03", "12 ROI columns", "have 6"),
        "P03",
    ),
    Case("three dimensions", "folder", b.array("P03.npy", lambda one: one[None]), ("P03.npy", "shape (1, 100, 6)"), "P03"),
    Case("one dimension", "folder", b.array("P03.npy", lambda one: one[0]), ("P03.npy", "shape (6,)"), "P03"),
    Case("complex numbers", "folder", b.array("P03.npy", lambda one: one * 1j), ("P03.npy", "complex64"), "P03"),
    Case("strings", "folder", b.array("P03.npy", lambda one: one.astype("U8")), ("P03.npy", "real numbers"), "P03"),
    Case("Python objects", "folder", b.array("P03.npy", lambda one: one.astype(object)), ("P03.npy", "pickle"), "P03"),
    Case("a truncated .npy", "folder", b.cut("P03.npy", 0.7), ("P03.npy", "readable .npy"), "P03"),
    Case("an empty .npy", "folder", b.cut("P03.npy", 0), ("P03.npy", "readable .npy"), "P03"),
    Case("a .npy with a broken header", "folder", b.change("P03.npy", b"}", b" ", 1), ("P03.npy", "readable .npy"), "P03"),
    Case(
        "a .npy that claims too much",
        "folder",
        b.change("P03.npy", b"(100, 6), }              ", b"(100, 6000000000000000), }", 1),
        ("P03.npy", "readable .npy"),
        "P03",
    ),
    Case(
        "an .npz named .npy",
        "folder",
        lambda path: (np.savez(path / "P03.npz", b.signal(3)), (path / "P03.npz").replace(path / "P03.npy")),
        ("P03.npy", "readable .npy"),
        "P03",
    ),
    Case("a zip of junk named .npy", "folder", b.write("P03.npy", b"PK\3\4" + b"x" * 99), ("P03.npy", "readable .npy"), "P03"),
    Case(
        "a listed subject without series",
        "folder",
        b.without("P03.npy"),
        (PEOPLE, "P03", "no series file"),
        "P03",
        reason=("listed but no series file",),
    ),
    Case(
        "a folder for a series",
        "folder",
        b.folder_for("P03.npy"),
        ("P03", "no series file"),
        "P03",
        reason=("listed but no series file",),
    ),
    Case(
        "a series of nobody",
        "folder",
        b.change(PEOPLE, "P03\tnorth\tpatient\tF\t41\n", ""),
        ("P03.npy", "P03", "not in", PEOPLE),
        "P03",
        reason=("series file but not listed",),
    ),
    Case(
        "a series of nobody under a pattern",
        "folder",
        b.all_of(toml("pattern = '{subject}.npy'"), b.change(PEOPLE, "P03\tnorth\tpatient\tF\t41\n", "")),
        ("P03.npy", "P03", "not in", PEOPLE),
        "P03",
        reason=("series file but not listed",),
    ),
    Case(
        "a series with a name that is no UTF-8",
        "folder",
        lambda path: np.save(path / os.fsdecode(b"caf\xe9.npy"), b.signal(30)),
        ("caf\\udce9.npy", "not in", PEOPLE),
        "caf\\udce9",
        reason=("series file but not listed",),
    ),
    Case(
        "two series of a subject",
        "folder",
        b.write("P03.csv", "1,2,3,4,5,6\n"),
        ("P03.csv", "P03", "second series file", "P03.npy"),
    ),
]


def first_cell(text: str) -> Callable[[str], str]:
    return lambda line: text + line[line.index(",") :]


TEXTS = [
    Case(
        "a word among numbers",
        "texts",
        b.line("P03.csv", 8, first_cell("oops")),
        ("P03.csv", "line 8, column 1: 'oops'"),
        "P03",
    ),
    Case(
        "digits with an underscore",
        "texts",
        b.line("P03.csv", 8, first_cell("1_0")),
        ("P03.csv", "line 8, column 1: '1_0'"),
        "P03",
    ),
    Case("an empty cell", "texts", b.line("P03.csv", 8, first_cell("")), ("P03.csv", "P03", "NaN at volume 8 of ROI 1"), "P03"),
    Case("a line too long", "texts", b.line("P03.csv", 8, "1,{}".format), ("P03.csv", "line 8: 7 columns", "have 6"), "P03"),
    Case(
        "a line too short",
        "texts",
        b.line("P03.csv", 8, lambda line: line[line.index(",") + 1 :]),
        ("P03.csv", "line 8: 5 columns", "have 6"),
        "P03",
    ),
    Case(
        "a column too few",
        "texts",
        b.write("P03.csv", "1,2,3,4,5\n2,3,4,5,9\n"),
        ("P03.csv", "P03", "5 ROI columns", "have 6"),
        "P03",
    ),
    Case(
        "a word in the first line",
        "texts",
        b.all_of(
            b.line("P03.csv", 1, first_cell("oops")),
            b.write("rois.tsv", "name\na\nb\nc\nd\ne\nf\n"),
            toml("rois = 'rois.tsv'"),
        ),
        ("P03.csv", "line 1", "'oops'"),
        "P03",
    ),
    Case("bytes of no text", "texts", b.write("P03.csv", bytes(range(256)) * 9), ("P03.csv", "not a text file"), "P03"),
    Case(
        "bytes of no text without a NUL",
        "texts",
        b.write("P03.csv", bytes(range(128, 256)) + b"\n\xff,\n"),
        ("P03.csv",),
        "P03",
    ),
    Case("UTF-16", "texts", b.write("P03.csv", "1,2,3,4,5,6\n".encode("utf-16")), ("P03.csv", "not a text file"), "P03"),
    Case("an empty text", "texts", b.write("P03.csv", ""), ("P03.csv", "no numbers"), "P03"),
    Case("a header and no number", "texts", b.write("P03.csv", "a,b,c,d,e,f\n"), ("P03.csv", "no numbers"), "P03"),
    Case(
        "other ROI names",
        "texts",
        b.write("P03.csv", "a,b,c,d,e,f\n" + "1,2,3,4,5,6\n2,2,2,2,2,2\n"),
        ("P03.csv", "P03", "ROI 1"),
        "P03",
    ),
]


def second_atlas(path: Path) -> None:
    folder = path / "Outputs" / "cpac" / "filt_global" / "rois_aal"
    folder.mkdir()
    (folder / "north_0001_rois_aal.1D").write_text("1 2\n2 1\n")


def second_file(path: Path) -> None:
    folder = path / "Outputs" / "cpac" / "filt_global" / "more"
    folder.mkdir()
    (folder / "north_0003_rois_cc200.1D").write_text("1 2\n2 1\n")


ABIDE = [
    Case("no phenotype table", "abide", b.without(b.ABIDE_TABLE), ("no phenotype table",)),
    Case("a column missing", "abide", b.change(b.ABIDE_TABLE, "FIQ", "IQ"), (b.ABIDE_TABLE, "no column FIQ")),
    Case("no ratings", "abide", nothing, (b.ABIDE_TABLE, "no column qc_rater_1"), options=("--quality-checked",)),
    Case("a table in Latin-1", "abide", b.change(b.ABIDE_TABLE, "NORTH", b"N\xf8RTH"), (b.ABIDE_TABLE, "table")),
    Case(
        "text for an IQ",
        "abide",
        b.cell(b.ABIDE_TABLE, "north_0003", "FIQ", "high"),
        (b.ABIDE_TABLE, "north_0003", "column FIQ", "'high'"),
    ),
    Case(
        "a group 3",
        "abide",
        b.cell(b.ABIDE_TABLE, "north_0003", "DX_GROUP", "3"),
        (b.ABIDE_TABLE, "north_0003", "column DX_GROUP", "'3'"),
    ),
    Case(
        "no site",
        "abide",
        b.cell(b.ABIDE_TABLE, "north_0003", "SITE_ID", ""),
        (b.ABIDE_TABLE, "north_0003", "column SITE_ID"),
    ),
    Case(
        "a FILE_ID twice", "abide", b.change(b.ABIDE_TABLE, "north_0004", "north_0003"), (b.ABIDE_TABLE, "north_0003", "twice")
    ),
    Case("an unknown atlas", "abide", nothing, ("atlas ho", "cc200"), options=("--atlas", "ho")),
    Case("an unknown strategy", "abide", nothing, ("strategy dparsf", "cpac/filt_global"), options=("--strategy", "dparsf")),
    Case("several atlases", "abide", second_atlas, ("several", "atlas aal", "atlas cc200")),
    Case(
        "two series files of a subject",
        "abide",
        second_file,
        ("north_0003_rois_cc200.1D", "north_0003", "second series file"),
    ),
    Case("a folder for a .1D", "abide", b.folder_for(NORTH_3), ("north_0003_rois_cc200.1D", "directory"), "north_0003"),
    Case(
        "a header too short",
        "abide",
        b.line(NORTH_3, 1, lambda line: line[line.index("\t") + 1 :]),
        ("north_0003_rois_cc200.1D", "header names 5 ROIs", "6 columns"),
        "north_0003",
    ),
    Case(
        "a .1D of another atlas",
        "abide",
        b.write(NORTH_3, "#1\t#2\n1\t2\n2\t1\n"),
        ("north_0003_rois_cc200.1D", "north_0003", "2 ROI columns", "have 6"),
        "north_0003",
    ),
    Case("a truncated .1D", "abide", b.cut(NORTH_3, 0.5), ("north_0003_rois_cc200.1D", "columns"), "north_0003"),
    Case(
        "a .1D of nobody",
        "abide",
        b.cell(b.ABIDE_TABLE, "north_0003", "FILE_ID", "no_filename"),
        ("north_0003_rois_cc200.1D", "north_0003", "FILE_ID", b.ABIDE_TABLE),
        "north_0003",
        reason=("series file but not listed",),
    ),
]


def set_cell(sheet: str, at: str, value: object) -> b.Spoil:
    return b.in_book(lambda book: book[sheet].__setitem__(at, value))


SIGNALS = np.random.default_rng(0).normal(size=(b.VOLUMES, b.MDD_WIDTH))
MDD = [
    Case("no workbook", "mdd", b.without(b.BOOK), ("no phenotype workbook",)),
    Case("two workbooks", "mdd", b.write("more.xlsx", "x"), ("several workbooks", "more.xlsx")),
    Case("a workbook that is none", "mdd", b.write(b.BOOK, "ID,Sex,Age\n"), (b.BOOK, "workbook")),
    Case("a truncated workbook", "mdd", b.cut(b.BOOK, 0.6), (b.BOOK, "workbook")),
    Case(
        "a sheet of broken XML", "mdd", b.in_zip(b.BOOK, "xl/worksheets/sheet1.xml", b"<worksheet><row"), (b.BOOK, "workbook")
    ),
    Case("a zip that is no workbook", "mdd", b.in_zip(b.BOOK, "[Content_Types].xml", b"<Types/>"), (b.BOOK, "workbook")),
    Case("a folder for a workbook", "mdd", b.folder_for(b.BOOK), (b.BOOK, "directory")),
    Case("a sheet missing", "mdd", b.in_book(lambda book: book.remove(book["Controls"])), (b.BOOK, "no sheet Controls", "MDD")),
    Case("a column missing", "mdd", set_cell("MDD", "C1", "Years"), (b.BOOK, "no column Age")),
    Case("text for an age", "mdd", set_cell("MDD", "C3", "old"), (b.BOOK, "S1-1-0003", "column Age", "'old'")),
    Case("an unknown sex", "mdd", set_cell("MDD", "B3", 7), (b.BOOK, "S1-1-0003", "column Sex", "'7'")),
    Case("an id of the wrong form", "mdd", set_cell("MDD", "A3", "S1-0003"), (b.BOOK, "'S1-0003'", "S<site>")),
    Case("an id of the other sheet", "mdd", set_cell("MDD", "A3", "S1-2-0003"), (b.BOOK, "sheet MDD", "S1-2-0003")),
    Case("an id twice", "mdd", set_cell("MDD", "A3", "S1-1-0001"), (b.BOOK, "S1-1-0001", "twice", "column ID")),
    Case("an unknown atlas", "mdd", nothing, ("atlas ho", "aal"), options=("--atlas", "ho")),
    Case("an atlas beyond the columns", "mdd", nothing, ("power264", "1568 columns"), options=("--atlas", "power264")),
    Case("an unknown strategy", "mdd", nothing, ("strategy raw", "FunImgARCWF"), options=("--strategy", "raw")),
    Case("a negative TR", "mdd", nothing, ("TR", "-2"), options=("--tr", "-2")),
    Case("a TR of zero", "mdd", nothing, ("TR", "0"), options=("--tr", "0")),
    Case("a .mat without ROISignals", "mdd", b.variables(MDD_3, Other=SIGNALS), ("S1-1-0003.mat", "ROISignals"), "S1-1-0003"),
    Case(
        "a .mat of another width",
        "mdd",
        b.variables(MDD_3, ROISignals=SIGNALS[:, :116]),
        ("S1-1-0003.mat", "116 columns", "1568"),
        "S1-1-0003",
    ),
    Case("a .mat of text", "mdd", b.variables(MDD_3, ROISignals="empty"), ("S1-1-0003.mat", "real numbers"), "S1-1-0003"),
    Case(
        "a .mat of complex numbers",
        "mdd",
        b.variables(MDD_3, ROISignals=SIGNALS * 1j),
        ("S1-1-0003.mat", "complex"),
        "S1-1-0003",
    ),
    Case("a .mat of cells", "mdd", b.variables(MDD_3, ROISignals={"a": 1}), ("S1-1-0003.mat", "real numbers"), "S1-1-0003"),
    Case("a truncated .mat", "mdd", b.cut(MDD_3, 0.7), ("S1-1-0003.mat", "MATLAB"), "S1-1-0003"),
    Case("an empty .mat", "mdd", b.write(MDD_3, ""), ("S1-1-0003.mat", "MATLAB"), "S1-1-0003"),
    Case("a .mat that is none", "mdd", b.write(MDD_3, "1 2 3\n" * 99), ("S1-1-0003.mat", "MATLAB"), "S1-1-0003"),
    Case("a .mat with damaged compression", "mdd", b.damaged_mat(MDD_3), ("S1-1-0003.mat", "MATLAB"), "S1-1-0003"),
    Case("a .mat with a flipped bit", "mdd", b.flip(MDD_3, 144, 16), ("S1-1-0003.mat", "MATLAB"), "S1-1-0003"),
    Case("a MATLAB 7.3 file", "mdd", b.write(MDD_3, b.matlab_73()), ("S1-1-0003.mat", "MATLAB 7.3", "-v7"), "S1-1-0003"),
    Case("a folder for a .mat", "mdd", b.folder_for(MDD_3), ("S1-1-0003.mat", "read"), "S1-1-0003"),
    Case(
        "a .mat of nobody",
        "mdd",
        b.in_book(lambda book: book["MDD"].delete_rows(3)),
        ("S1-1-0003.mat", "S1-1-0003", "column ID", b.BOOK),
        "S1-1-0003",
        reason=("series file but not listed",),
    ),
    Case(
        "a .mat with a name of the wrong form",
        "mdd",
        b.write("ROISignals_FunImgARCWF/ROISignals_S1-0099.mat", "x"),
        ("ROISignals_S1-0099.mat", "not"),
        "S1-0099",
        reason=("not",),
    ),
    Case(
        "a .mat of a third group",
        "mdd",
        b.write("ROISignals_FunImgARCWF/ROISignals_S1-3-0099.mat", "x"),
        ("ROISignals_S1-3-0099.mat", "not"),
        "S1-3-0099",
        reason=("not",),
    ),
]

SUB_3 = "sub-03/func/sub-03_task-rest_atlas-Six_timeseries.tsv"
BIDS = [
    Case(
        "labels 1 and 2",
        "bids",
        b.column(PEOPLE, "label", lambda n: str(1 + n % 2)),
        (PEOPLE, "label", "1 and 2", "--patient", "--control"),
    ),
    Case(
        "an unknown label word",
        "bids",
        b.cell(PEOPLE, "sub-03", "label", "maybe"),
        (PEOPLE, "sub-03", "label", "'maybe'", "--patient"),
    ),
    Case(
        "a word for both classes",
        "bids",
        nothing,
        ("options patient and control", "hc"),
        options=("--patient", "asd, HC", "--control", "hc"),
    ),
    Case("no participants.tsv", "bids", b.without(PEOPLE), (PEOPLE, "does not exist"), options=("--kind", "bids")),
    Case("another participants.tsv", "bids", nothing, ("gone.tsv", "not exist"), options=("--participants", "gone.tsv")),
    Case("an unknown atlas", "bids", nothing, ("no atlas Nine", "Six"), options=("--atlas", "Nine")),
    Case("several atlases", "bids", b.write(SUB_3.replace("Six", "Two"), "a\tb\n1\t2\n"), ("several atlases", "Six, Two")),
    Case("entities of no run", "bids", nothing, ("no run",), options=("--only", "run-07")),
    Case(
        "two runs of a subject",
        "bids",
        b.write(SUB_3.replace("_atlas", "_run-2_atlas"), "a\tb\n1\t2\n"),
        ("sub-03", "second run", "run-01"),
    ),
    Case("a folder for a series", "bids", b.folder_for(SUB_3), ("sub-03_task-rest", "directory"), "sub-03"),
    Case(
        "a series without ROI names",
        "bids",
        b.line(SUB_3, 1, lambda line: "1\t2\t3\t4\t5\t6"),
        ("sub-03_task-rest", "name the 6 ROI columns"),
        "sub-03",
    ),
    Case("a series of n/a", "bids", b.write(SUB_3, "a\tb\nn/a\tn/a\nn/a\tn/a\n"), ("sub-03", "zero everywhere"), "sub-03"),
    Case(
        "a volume of n/a",
        "bids",
        b.line(SUB_3, 9, lambda line: "\t".join(["n/a"] * 6)),
        ("sub-03", "NaN at volume 8"),
        "sub-03",
    ),
    Case(
        "a series of nobody",
        "bids",
        b.line(PEOPLE, 4, lambda line: line.replace("sub-03", "sub-99")),
        ("sub-03_task-rest", "sub-03", "not in", PEOPLE),
        "sub-03",
        reason=("series file but not listed",),
    ),
    Case(
        "a broken sidecar",
        "bids",
        b.write(SUB_3.replace(".tsv", ".json"), "{"),
        ("sub-03_task-rest", "RepetitionTime"),
        "sub-03",
    ),
    Case(
        "a sidecar of nonsense",
        "bids",
        b.write(SUB_3.replace(".tsv", ".json"), '{"RepetitionTime": "slow"}'),
        ("sub-03_task-rest", "RepetitionTime"),
        "sub-03",
    ),
    Case(
        "a sidecar of no time",
        "bids",
        b.write(SUB_3.replace(".tsv", ".json"), '{"RepetitionTime": 0}'),
        ("sub-03_task-rest", "RepetitionTime of 0 s"),
        "sub-03",
    ),
]

NIFTI = [
    Case("an atlas image that is not there", "nifti", nothing, ("gone.nii",), options=("--atlas-image", "gone.nii")),
    Case("an atlas image of junk", "nifti", b.write("halves.nii.gz", "x" * 400), ("halves.nii.gz", "image"), options=HALVES),
    Case("a truncated atlas image", "nifti", b.cut("halves.nii.gz", 0.5), ("halves.nii.gz", "image"), options=HALVES),
    Case("an atlas image with time", "nifti", b.image("halves.nii.gz", (4, 4, 4, 3)), ("halves.nii.gz", "3"), options=HALVES),
    Case(
        "a region without a name", "nifti", b.change("halves.tsv", "2\tright\n", ""), ("halves.tsv", "region 2"), options=HALVES
    ),
    Case("a name without a region", "nifti", b.change("halves.tsv", "2\t", "n/a\t"), ("halves.tsv", "index"), options=HALVES),
    Case("a truncated run", "nifti", b.cut(RUN_1, 0.5), ("sub-01_task-rest",), "sub-01", HALVES),
    Case("a run of junk", "nifti", b.write(RUN_1, "x" * 400), ("sub-01_task-rest",), "sub-01", HALVES),
    Case("a run without time", "nifti", b.image(RUN_1, (4, 4, 4)), ("sub-01_task-rest",), "sub-01", HALVES),
]


def another_format(path: Path) -> None:
    b.header(path, format="m2lgdg-model-1")


def no_zero_length(path: Path) -> None:
    b.tensors(path, lengths=lambda lengths: lengths + np.eye(b.COUNT, dtype=np.int64)[4] * 10**6)


def odd_labels(path: Path) -> None:
    b.tensors(path, labels=lambda labels: labels + 64)


def foreign(path: Path) -> None:
    save_file({"weight": np.zeros((3, 3), dtype=np.float32)}, path)


def hollow(path: Path) -> None:
    save_file({}, path, {"format": "m2lgdg-cohort-1"})


def header_list(path: Path) -> None:
    b.header(path, cohort="[]")


def header_columns(path: Path) -> None:
    b.header(path, cohort='{"text_columns": [], "phenotypes": []}')


COHORT = [
    Case("a truncated cohort file", "cohort", b.cut("", 0.9), ("/input", "damaged")),
    Case("a cohort file cut in its header", "cohort", b.cut("", 100), ("/input", "damaged")),
    Case("an empty cohort file", "cohort", b.write("", ""), ("/input", "damaged")),
    Case("a cohort file of text", "cohort", b.write("", "subject,site\n" * 99), ("/input", "damaged")),
    Case("a flipped bit", "cohort", b.flip("", -1000, 64), ("/input", "altered")),
    Case("a flipped length", "cohort", no_zero_length, ("/input", "damaged", "P06")),
    Case("a flipped label", "cohort", odd_labels, ("/input", "damaged", "label 6")),
    Case("a foreign safetensors file", "cohort", foreign, ("/input", "not an m2lgdg-cohort-1 file", "not given")),
    Case(
        "a safetensors file of another kind",
        "cohort",
        another_format,
        ("/input", "not an m2lgdg-cohort-1 file", "m2lgdg-model-1"),
    ),
    Case("a hollow cohort file", "cohort", hollow, ("/input", "damaged")),
    Case("a cohort file with a list for a header", "cohort", header_list, ("/input", "damaged")),
    Case("a cohort file with a list for phenotypes", "cohort", header_columns, ("/input", "damaged")),
    Case(
        "a cohort file as a folder kind",
        "cohort",
        nothing,
        ("/input", "is a file", "abide-pcp"),
        options=("--kind", "abide-pcp"),
    ),
    Case("a cohort file as no kind", "cohort", nothing, ("kind abide ", "abide-pcp"), options=("--kind", "abide")),
    Case("an atlas for a cohort file", "cohort", nothing, ("cohort file", "no option --atlas"), options=("--atlas", "aal")),
    Case("a folder as a cohort file", "folder", nothing, ("/input", "cohort"), options=("--kind", "cohort")),
]


def other_entry(**changes: object) -> b.Spoil:
    """Change the entry of the second atlas in the header of a cohort file."""

    def spoil(path: Path) -> None:
        with safe_open(path, framework="np") as file:
            head = json.loads(file.metadata()["cohort"])
        head["parcellations"][0] |= changes
        b.header(path, cohort=json.dumps(head))

    return spoil


def shorter_atlas(path: Path) -> None:
    b.tensors(path, **{"atlas-0.series": lambda series: series[:-3]})


def nan_in_atlas(path: Path) -> None:
    b.tensors(path, **{"atlas-0.series": lambda series: np.where(np.arange(len(series))[:, None] == 105, np.nan, series)})


FOUR = "four/P05_four.npy"
ATLASES = [
    Case(
        "fewer volumes in one atlas", "atlases", b.array(FOUR, lambda one: one[:-1]), (FOUR[5:], "99 volumes, but 100"), "P05"
    ),
    Case("a bad series of the first atlas", "atlases", b.array("P05.npy", b.value(np.nan)), ("P05.npy", "NaN"), "P05"),
    Case("no series of the first atlas", "atlases", b.without("P05.npy"), ("P05", "no series file"), "P05", reason=("six",)),
    Case("an unknown atlas", "atlases", nothing, ("no atlas ho", "six, four"), options=("--atlas", "six", "--atlas", "ho")),
    Case("an atlas twice", "atlases", nothing, ("six is given twice",), options=("--atlas", "six", "--atlas", "six")),
    Case("all and another", "atlases", nothing, ("all stands for every",), options=("--atlas", "all", "--atlas", "six")),
    Case("no first atlas", "atlases", b.change(TOML, 'atlas = "six"\n', ""), (TOML, "atlases.four", "needs a name")),
    Case("a key that no atlas has", "atlases", b.change(TOML, "pattern", "patern"), (TOML, "atlases.four.patern", "pattern")),
    Case("a table for an atlas", "atlases", toml("[atlas.six]\npattern = '{subject}.npy'"), (TOML, "key atlas", "string")),
    Case("a cut atlas", "atlases-file", shorter_atlas, ("/input", "damaged", "atlas four")),
    Case("NaN in an atlas", "atlases-file", nan_in_atlas, ("/input", "damaged", "atlas four", "P02", "NaN at volume 6")),
    Case("an atlas of other subjects", "atlases-file", other_entry(lacking=[20]), ("/input", "damaged", "atlas four")),
    Case("an atlas that is the first", "atlases-file", other_entry(name="six"), ("/input", "damaged", "six appears 2 times")),
    Case("an atlas without a name", "atlases-file", other_entry(name=""), ("/input", "damaged", "no name")),
    Case("an atlas with other ROIs", "atlases-file", other_entry(rois=["a", "b"]), ("/input", "damaged", "(100, 4)")),
    Case("an atlas with another name", "atlases-file", other_entry(name="five"), ("/input", "altered")),
]


def gone(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def only_these(*patterns: str) -> b.Spoil:
    """Leave nothing but the files that fit."""

    def spoil(path: Path) -> None:
        keep = {file for pattern in patterns for file in path.glob(pattern)}
        for file in path.iterdir():
            if file not in keep:
                file.unlink()

    return spoil


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHOICES = [
    Case("a folder that is not there", "folder", gone, ("/input", "does not exist")),
    Case("an empty folder", "folder", only_these(), ("/input", "empty folder")),
    Case(
        "a folder of no known kind",
        "folder",
        only_these("*.npy"),
        ("/input", "not of a supported kind", PEOPLE, "bids", "abide-pcp"),
    ),
    Case("a table and no series", "folder", only_these(PEOPLE), (PEOPLE, "series file")),
    Case("a pipe", "cohort", pipe, ("/input", "neither a file nor a folder")),
    Case("an unknown kind", "folder", nothing, ("kind adhd ", "abide-pcp", "cohort"), options=("--kind", "adhd")),
    Case("another kind", "folder", nothing, ("/input", "workbook"), options=("--kind", "rest-meta-mdd")),
    Case("an option of another kind", "folder", nothing, ("kind folder", "no option --tr"), options=("--tr", "2")),
    Case("a coding of another kind", "folder", nothing, ("kind folder", "no option --patient"), options=("--patient", "asd")),
    Case("a flag of another kind", "folder", nothing, ("kind folder", "no option --all-sites"), options=("--all-sites",)),
    Case(
        "a flag with a dash of another kind",
        "bids",
        nothing,
        ("kind bids", "no option --quality-checked"),
        options=("--quality-checked",),
    ),
]

CASES = [*TABLES, *DATASET, *ARRAYS, *TEXTS, *ABIDE, *MDD, *BIDS, *NIFTI, *COHORT, *ATLASES, *CHOICES]
SUBJECTS = [case for case in CASES if case.subject]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=[f"{case.base}: {case.name}" for case in cases])


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one sentence of a command that stopped."""
        assert self.code == 2, self
        (line,) = [line for line in self.err.splitlines() if line.strip()]
        assert line.startswith("m2lgdg: ") and line.endswith(".") and "Traceback" not in self.err and len(line) < 700
        return line


@pytest.fixture(scope="session")
def healthy(tmp_path_factory):
    """Makes each healthy input once."""
    folder = tmp_path_factory.mktemp("healthy")

    def get(base: str) -> Path:
        path = folder / base
        if not path.exists():
            b.MAKERS[base](path)
        return path

    return get


@pytest.fixture(scope="session")
def built():
    """The commands, which typer would build anew at each call."""
    return typer.main.get_command(terminal.app)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, built):
    """Runs a command as from a shell, in an empty folder, with {input} standing for the input."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(terminal, "app", built)
    monkeypatch.setattr(terminal, "out", Console(force_terminal=False, color_system=None))
    monkeypatch.setattr(terminal, "err", Console(stderr=True, force_terminal=False, color_system=None))

    def run(*words: object) -> Ended:
        given = [str(word).replace("{input}", str(tmp_path / "input")) for word in words]
        monkeypatch.setattr(sys, "argv", ["m2lgdg", *given])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Ended(stop.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def spoiled(healthy, tmp_path):
    """Copies a healthy input and spoils it."""

    def make(base: str, spoil: b.Spoil = nothing) -> Path:
        b.copy(healthy(base), tmp_path / "input")
        spoil(tmp_path / "input")
        return tmp_path / "input"

    return make


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("base", b.MAKERS)
def test_the_healthy_inputs_are_healthy(base, spoiled, command):
    spoiled(base)
    options = HALVES if base == "nifti" else ()
    checked = command("check", "{input}", "--out", "lists", *options)
    findings = pd.read_csv("lists/findings.csv").query("level != 'note'")["text"]
    unknown_tr = findings.str.match(r"The TR of 20 of 20 subjects is not known; give it ")
    assert unknown_tr.sum() == (base != "nifti")
    assert (~unknown_tr).any() == (base == "nifti")  # four runs are too few for `check`
    assert (checked.code, checked.err) == (1, ""), checked
    converted = command("convert", "{input}", "out.cohort", *options)
    assert (converted.code, converted.err) == (0, "")
    assert everything(Path()) == {"lists", "out.cohort", *(f"lists/{name}" for name in LISTS)}


@named(CASES)
def test_a_bad_input_ends_in_a_sentence(case, spoiled, command, tmp_path):
    spoiled(case.base, case.spoil)
    before = everything(tmp_path)
    sentence = command("convert", "{input}", "new/out.cohort", *case.options).sentence()
    for part in case.says:
        assert part in sentence
    assert everything(tmp_path) == before
    ended = command("check", "{input}", "--out", "lists", *case.options)
    if case.subject:
        leaves_out(case, ended)
    else:
        for part in case.says:
            assert part in ended.sentence()
        assert everything(tmp_path) == before


def leaves_out(case: Case, ended: Ended) -> None:
    """`check` went on without the one bad subject, and says why."""
    assert (ended.code, ended.err) == (1, ""), ended
    assert "excluded" in ended.out
    assert everything(Path()) == {"lists", *(f"lists/{name}" for name in LISTS)}
    inclusion = pd.read_csv("lists/inclusion.csv", dtype=str, keep_default_na=False)
    gone = inclusion[inclusion["status"] == "excluded"].set_index("subject")
    assert case.subject in gone.index
    assert len(gone) <= 2 and inclusion["subject"].is_unique
    for part in case.reason or case.says:
        assert part in gone.at[case.subject, "reason"]


DROPPED = {case.base: case for case in reversed(SUBJECTS)} | {"names": next(case for case in SUBJECTS if "caf" in case.subject)}


@named(list(DROPPED.values()))
def test_convert_can_drop_the_bad_subject(case, spoiled, command):
    spoiled(case.base, case.spoil)
    ended = command("convert", "{input}", "out.cohort", "--drop-bad", *case.options)
    assert (ended.code, ended.err) == (0, ""), ended
    cohort = Cohort.load("out.cohort")
    assert case.subject not in cohort.subjects.tolist()
    assert case.subject in [one.subject.encode(errors="backslashreplace").decode() for one in cohort.excluded]
    assert len(cohort) >= (3 if case.base == "nifti" else b.COUNT - 1)


UNUSABLE = [
    Case("one site", "folder", b.column(PEOPLE, "site", lambda number: "north"), ("one site, north",)),
    Case("patients only", "folder", b.column(PEOPLE, "label", lambda number: "patient"), ("labelled subjects are patients",)),
    Case("controls only", "folder", b.column(PEOPLE, "label", lambda number: "0"), ("labelled subjects are controls",)),
    Case("labels all missing", "folder", b.column(PEOPLE, "label", lambda number: "n/a"), ("No subject has a label",)),
    Case("no label column", "folder", b.change(PEOPLE, "label", "note", 1), ("No subject has a label",)),
]


@named(UNUSABLE)
def test_check_calls_a_cohort_unusable_that_can_be_converted(case, spoiled, command):
    spoiled(case.base, case.spoil)
    checked = command("check", "{input}", "--out", "lists")
    assert (checked.code, checked.err) == (2, "")
    assert "unusable" in checked.out and "Next:" not in checked.out
    for part in case.says:
        assert part in checked.out
    assert everything(Path("lists")) == LISTS
    assert command("convert", "{input}", "out.cohort").code == 0  # as a new site's, to be predicted


def test_nothing_readable_is_told_by_its_first_file(spoiled, command):
    path = spoiled("folder")
    for file in path.glob("*.npy"):
        file.write_bytes(b"")
    for words in (["check"], ["convert", "out.cohort"], ["convert", "out.cohort", "--drop-bad"]):
        assert "P01.npy" in command(words[0], "{input}", *words[1:]).sentence()
    assert everything(Path()) == set()


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_extreme_units_are_a_finding_and_no_crash(scale, spoiled, command):
    path = spoiled("folder")
    for number in range(1, 11):
        np.save(path / f"P{number:02}.npy", (b.signal(number) * scale).astype(np.float32))
    ended = command("check", "{input}", "--out", "lists")
    assert (ended.code, ended.err) == (1, "")
    assert "units may differ" in ended.out
    assert command("convert", "{input}", "out.cohort").code == 0


def test_a_range_that_halves_cannot_hold_writes_nothing(spoiled, command):
    spoiled("folder", b.array("P03.npy", lambda one: np.where(np.arange(100)[:, None] == 7, -3e38, 3e38).repeat(6, axis=1)))
    assert "P03" in command("convert", "{input}", "out.cohort", "--float16").sentence()
    assert everything(Path()) == set()


KEEP = [
    ("subject,site,label,status,reason\nP99,north,1,included,\n", ("keep.csv", "P99")),
    ("subject,site,label,status,reason\nP01,north,1,excluded,\n", ("keep.csv", "includes no subject")),
    ("subject,site,label,status,reason\nP01,north,1,included,\nP02,north,0,maybe,\n", ("keep.csv", "P02", "status", "'maybe'")),
    ("subject,status\nP01,included\nP01,excluded\n", ("keep.csv", "P01", "twice")),
    ("subject,site\nP01,north\n", ("keep.csv", "no column status")),
    ("", ("keep.csv", "table")),
    (None, ("keep.csv", "does not exist")),
]


@pytest.mark.parametrize(("text", "says"), KEEP)
def test_a_bad_inclusion_list(text, says, spoiled, command, tmp_path):
    spoiled("folder")
    keep = tmp_path / "keep.csv"
    if text is not None:
        keep.write_text(text)
    sentence = command("convert", "{input}", "out.cohort", "--keep", keep).sentence()
    for part in says:
        assert part in sentence
    assert everything(Path()) == set()


def test_an_output_that_is_a_folder(spoiled, command):
    spoiled("folder")
    Path("there").mkdir()
    assert "there: it is a folder" in command("convert", "{input}", "there").sentence()
    assert everything(Path()) == {"there"}


@pytest.mark.parametrize(
    "words", [["convert", "there/out.cohort"], ["check", "--out", "there"], ["check", "--out", "there/it"]]
)
def test_an_output_below_a_file(words, spoiled, command):
    spoiled("folder")
    Path("there").write_text("a file")
    assert "there" in command(words[0], "{input}", *words[1:]).sentence()
    assert everything(Path()) == {"there"} and Path("there").read_text() == "a file"


def test_an_output_that_is_a_device(spoiled, command):
    spoiled("folder")
    os.mkfifo("there")
    assert "there" in command("convert", "{input}", "there").sentence()
    assert Path("there").is_fifo()


@pytest.mark.parametrize("words", [["convert", "{long}"], ["check", "--out", "{long}"], ["convert", "{long}/a"]])
def test_an_output_with_a_name_too_long(words, spoiled, command):
    spoiled("folder")
    words = [word.replace("{long}", "x" * 300) for word in words]
    assert "name too long" in command(words[0], "{input}", *words[1:]).sentence()
    assert everything(Path()) == set()


@pytest.mark.parametrize("words", [["convert", "out.cohort"], ["check"]])
def test_an_input_with_a_name_too_long(words, command):
    assert "name too long" in command(words[0], "x" * 300, *words[1:]).sentence()
    assert everything(Path()) == set()


def test_a_failed_convert_leaves_the_file_of_the_last_one(spoiled, command):
    spoiled("folder", b.without("P03.npy"))
    Path("out.cohort").write_text("good")
    command("convert", "{input}", "out.cohort").sentence()
    assert Path("out.cohort").read_text() == "good"
    assert everything(Path()) == {"out.cohort"}


def test_a_cohort_name_is_no_way_out_of_the_working_folder(spoiled, command, tmp_path):
    spoiled("folder", toml("name = '../../away'"))
    before = everything(tmp_path)
    assert command("check", "{input}").code in (0, 1)
    made = everything(tmp_path) - before
    assert made and all(name.startswith("work/") for name in made)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from m2lgdg.cli import main
main()
"""


@pytest.mark.parametrize(
    ("words", "size"), [(["convert", "disk/new/out.cohort"], 20_000), (["check", "--out", "disk/new"], 300)]
)
def test_a_disk_that_fills_up(words, size, spoiled, command, tmp_path):
    """By the limit on the size of a file, which a process may set for itself; Python ignores the signal, writing fails."""
    pytest.importorskip("resource", reason="this system cannot limit the size of a file")
    spoiled("folder")
    Path("disk").mkdir()
    arguments = [str(size), words[0], str(tmp_path / "input"), *words[1:]]
    ended = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True)
    sentence = Ended(ended.returncode, ended.stdout, ended.stderr).sentence()
    assert "cannot write disk/new" in sentence and "too large" in sentence
    assert everything(Path("disk")) == set()


def test_a_disk_that_is_really_full(spoiled, command, tmp_path):
    """A file system of a few pages, in a name space of its own that vanishes with the command."""
    spoiled("folder")
    Path("disk").mkdir()
    mount = "mount -t tmpfs -o size=8k none disk"
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("only root may mount a disk to fill; the limit on the size of a file stands in above")
    script = f'{mount} && "$@"; code=$?; ls -A disk; exit $code'
    run = [sys.executable, "-m", "m2lgdg.cli", "convert", str(tmp_path / "input"), "disk/new/out.cohort"]
    ended = subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *run], capture_output=True, text=True)
    sentence = Ended(ended.returncode, ended.stdout, ended.stderr).sentence()
    assert "cannot write disk/new/out.cohort" in sentence and "No space left" in sentence
    assert ended.stdout == ""


def test_from_a_shell(spoiled, tmp_path):
    path = spoiled("folder", b.array("P03.npy", b.value(np.nan)))
    run = [sys.executable, "-m", "m2lgdg.cli", "convert", str(path), str(tmp_path / "out.cohort")]
    ended = subprocess.run(run, capture_output=True, text=True)
    assert "P03.npy: subject P03: NaN" in Ended(ended.returncode, ended.stdout, ended.stderr).sentence()
    assert ended.stdout == ""


def damage(content: bytes, count: int, safe: range = range(0)):
    """The content cut short, and with one to five bits flipped (none at the positions to spare)."""
    dice = random.Random(0)
    for turn in range(count):
        if turn % 3 == 0:
            yield content[: dice.randrange(len(content))]
        else:
            changed = bytearray(content)
            for _ in range(dice.choice((1, 1, 5))):
                at = dice.randrange(min(400, len(content)) if turn % 2 else len(content))
                if at not in safe:
                    changed[at] ^= 1 << dice.randrange(8)
            yield bytes(changed)


def only_sentences(load, file: Path, content: bytes, count: int, safe: range = range(0)) -> None:
    refused = 0
    for damaged in damage(content, count, safe):
        file.unlink(missing_ok=True)
        file.write_bytes(damaged)
        try:
            load(file)
        except InputError as error:
            refused += 1
            assert file.name in str(error) and "\n" not in str(error)
    assert refused > count / 5


def test_random_damage_to_a_cohort_file(healthy, tmp_path):
    only_sentences(Cohort.load, tmp_path / "cohort", healthy("cohort").read_bytes(), 300)


def test_random_damage_to_a_npy_file(tmp_path):
    np.save(tmp_path / "a.npy", b.signal(1)[:10])
    only_sentences(load_array, tmp_path / "a.npy", (tmp_path / "a.npy").read_bytes(), 500)


@pytest.mark.parametrize("compressed", [False, True])
def test_random_damage_to_a_mat_file(compressed, tmp_path):
    file = tmp_path / "a.mat"
    b.savemat(file, {"ROISignals": b.signal(1)[:10]}, do_compression=compressed)
    spare = range(0) if compressed else range(184, 200)  # scipy ends the process at an unknown type of numbers there
    only_sentences(lambda one: load_mat(one, "ROISignals"), file, file.read_bytes(), 300, spare)


def test_random_damage_to_a_workbook(healthy, tmp_path):
    book = (healthy("mdd") / b.BOOK).read_bytes()
    only_sentences(lambda one: read_sheet(one, "MDD"), tmp_path / "a.xlsx", book, 100)


def test_random_damage_to_a_text_file(healthy, tmp_path):
    text = (healthy("texts") / "P01.csv").read_bytes()[:600]
    only_sentences(load_array, tmp_path / "a.csv", text, 300)


def test_random_damage_to_a_table(healthy, tmp_path):
    path = tmp_path / "input"
    b.copy(healthy("folder"), path)
    only_sentences(lambda file: read(path, on_bad="exclude"), path / PEOPLE, (path / PEOPLE).read_bytes(), 60)
