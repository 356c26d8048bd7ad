"""Whatever is wrong with an input, `check` and `convert` end in one sentence that says where, and leave nothing half-written.

Trouble with one subject's series is that subject's alone, which `check` lists as excluded; trouble with a table stops both.
"""

import json
import os
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
from m2lgdg.commands.reading import read_cohort
from m2lgdg.data.readers import read
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
    says: tuple[str, ...]  # words of the sentence
    subject: str  # the one that `check` leaves out; nobody: both commands stop
    options: tuple[str, ...]
    reason: tuple[str, ...]  # words of the reason in inclusion.csv, where it is not the sentence


def case(name, spoil, says, subject="", options=(), reason=(), base=""):
    return Case(name, base, spoil, tuple(says.split(" | ")), subject, options, reason)


def cases(base, *listed):
    """Cases that spoil an input of one kind, if they name no other."""
    return [one._replace(base=one.base or base) for one in listed]


def p03(column: str, text: str) -> b.Spoil:
    return b.cell(PEOPLE, "P03", column, text)


def people(old: str, new: str, count: int = -1) -> b.Spoil:
    return b.change(PEOPLE, old, new, count)


def labels(word) -> b.Spoil:
    return b.column(PEOPLE, "label", word)


def abide(old, new) -> b.Spoil:
    return b.change(b.ABIDE_TABLE, old, new)


def north_3(column: str, text: str) -> b.Spoil:
    return b.cell(b.ABIDE_TABLE, "north_0003", column, text)


def npy(change) -> b.Spoil:
    return b.array("P03.npy", change)


def toml(text: str) -> b.Spoil:
    return b.write(TOML, text)


def nothing(path: Path) -> None:
    pass


both = b.all_of
ROIS = toml("rois = 'rois.tsv'")
UNLISTED, ABSENT = ("series file but not listed",), ("listed but no series file",)


TABLES = cases(
    "folder",
    case("text in the age column", p03("age", "old"), "participants | P03 | column age | 'old'"),
    case("an unknown sex word", p03("sex", "X"), "participants | P03 | column sex | 'X'"),
    case("an unknown label word", p03("label", "maybe"), "participants | P03 | label | 'maybe'"),
    case("labels 1 and 2", labels(lambda n: str(1 + n % 2)), "participants | label | 1 and 2 | dataset.toml"),
    case("an empty site cell", p03("site", ""), "participants | P03 | column site"),
    case("an empty subject cell", p03("participant_id", ""), "participants | line 4 | participant_id"),
    case("a subject's TR of zero", both(people("\tage", "\ttr", 1), p03("tr", "0")), "participants | P03 | column tr | 0 s"),
    case("a column twice", both(people("\n", "\t30\n"), people("age\t30", "age\tage", 1)), "participants | column age | twice"),
    case("a subject twice", people("P04", "P03"), "participants | P03 | twice | participant_id"),
    case("a row with a cell too many", people("P03\t", "P03\tx\t"), "participants | line 4"),
    case("a row with a cell too few", people("P03\tnorth\t", "P03\t"), "participants | line 4"),
    case("a table of binary junk", b.write(PEOPLE, b"\xff\xfe\x00\x81" * 50), "participants | table"),
    case("an empty table", b.write(PEOPLE, ""), "participants | table"),
    case("a table without a row", b.cut(PEOPLE, len("participant_id\tsite\tlabel\tsex\tage\n")), "participants | no subject"),
    case("a folder for a table", b.folder_for(PEOPLE), "participants | directory", options=("--kind", "folder")),
)

DATASET = cases(
    "folder",
    case("broken TOML", toml("name = = 3"), "dataset.toml | line 1, column 8"),
    case("TOML that is no text", b.write(TOML, b"name = '\xff'"), "dataset.toml | TOML"),
    case("a folder for a TOML", b.folder_for(TOML), "dataset.toml | directory"),
    case("an unknown key", toml("colour = 'red'"), "dataset.toml | key colour | known keys | pattern"),
    case("a key of the wrong type", toml("name = 3"), "dataset.toml | key name | string"),
    case("an unknown orientation", toml("orientation = 'sideways'"), "dataset.toml | key orientation | time,roi"),
    case(
        "an infinite TR", toml("tr = {north = inf, south = 2}"), "dataset.toml | key tr.north: input should be a finite number"
    ),
    case("a pattern without subject", toml("pattern = '{site}.npy'"), "dataset.toml | key pattern | {subject}"),
    case("an unknown column role", toml("[columns]\nheight = 'age'"), "dataset.toml | key columns.height | education"),
    case("a column that is not there", toml("[columns]\nage = 'years'"), "participants | no column years"),
    case("an input that is not there", toml("inputs = ['shoe size']"), "participants | input shoe size"),
    case(
        "an input of text",
        both(people("sex", "hand", 1), toml("inputs = ['hand']")),
        "participants | P01 | column hand | not a number",
    ),
    case(
        "a label proxy under another name",
        both(people("\tage", "\tHAMD", 1), toml("[columns]\nage = 'HAMD'")),
        "dataset.toml | HAMD | diagnosis | allow_proxies",
    ),
    case(
        "ROI names of the wrong number",
        both(b.write("rois.tsv", "name\na\nb\nc\n"), ROIS),
        "P01.npy | 6 ROI columns | rois.tsv names 3",
    ),
    case("a ROI name twice", both(b.write("rois.tsv", "name\na\nb\nc\nd\ne\na\n"), ROIS), "rois.tsv | ROI a"),
    case("ROI names that are not there", ROIS, "rois.tsv | does not exist"),
)

ARRAYS = cases(
    "folder",
    case("a NaN", npy(b.value(np.nan)), "P03.npy | P03 | NaN at volume 8 of ROI 3", "P03"),
    case(
        "a number beyond float32",
        npy(lambda one: b.value(1e39)(one.astype(np.float64))),
        "P03.npy | P03 | infinite value at volume 8 of ROI 3",
        "P03",
    ),
    case("zeros", npy(np.zeros_like), "P03.npy | P03 | zero everywhere", "P03"),
    case("one volume", npy(lambda one: one[:1]), "P03.npy | P03 | 1 volume.", "P03"),
    case("a ROI too many", npy(lambda one: np.hstack([one, one])), "P03.npy | P03 | 12 ROI columns | have 6", "P03"),
    case("three dimensions", npy(lambda one: one[None]), "P03.npy | shape (1, 100, 6)", "P03"),
    case("complex numbers", npy(lambda one: one * 1j), "P03.npy | complex64", "P03"),
    case("Python objects", npy(lambda one: one.astype(object)), "P03.npy | pickle", "P03"),
    case("a truncated .npy", b.cut("P03.npy", 0.7), "P03.npy | readable .npy", "P03"),
    case("a .npy with a broken header", b.change("P03.npy", b"}", b" ", 1), "P03.npy | readable .npy", "P03"),
    case(
        "a .npy that claims too much",
        b.change("P03.npy", b"(100, 6), }              ", b"(100, 6000000000000000), }", 1),
        "P03.npy | readable .npy",
        "P03",
    ),
    case(
        "an .npz named .npy",
        lambda path: (np.savez(path / "P03.npz", b.signal(3)), (path / "P03.npz").replace(path / "P03.npy")),
        "P03.npy | readable .npy",
        "P03",
    ),
    case("a listed subject without series", b.without("P03.npy"), "participants | P03 | no series file", "P03", reason=ABSENT),
    case(
        "a series of nobody",
        people("P03\tnorth\tpatient\tF\t41\n", ""),
        "P03.npy | P03 | not in | participants",
        "P03",
        reason=UNLISTED,
    ),
    case(
        "a series with a name that is no UTF-8",
        lambda path: np.save(path / os.fsdecode(b"caf\xe9.npy"), b.signal(30)),
        "caf\\udce9.npy | not in | participants",
        "caf\\udce9",
        reason=UNLISTED,
    ),
    case("two series of a subject", b.write("P03.csv", "1,2,3,4,5,6\n"), "P03.csv | P03 | second series file | P03.npy"),
)


def first_cell(text: str) -> Callable[[str], str]:
    return lambda line: text + line[line.index(",") :]


TEXTS = cases(
    "texts",
    case("a word among numbers", b.line("P03.csv", 8, first_cell("oops")), "P03.csv | line 8, column 1: 'oops'", "P03"),
    case("an empty cell", b.line("P03.csv", 8, first_cell("")), "P03.csv | P03 | NaN at volume 8 of ROI 1", "P03"),
    case("a line too long", b.line("P03.csv", 8, "1,{}".format), "P03.csv | line 8: 7 columns | have 6", "P03"),
    case(
        "a word in the first line",
        both(b.line("P03.csv", 1, first_cell("oops")), b.write("rois.tsv", "name\na\nb\nc\nd\ne\nf\n"), ROIS),
        "P03.csv | line 1 | 'oops'",
        "P03",
    ),
    case("bytes of no text", b.write("P03.csv", bytes(range(256)) * 9), "P03.csv | not a text file", "P03"),
    case("other ROI names", b.write("P03.csv", "a,b,c,d,e,f\n" + "1,2,3,4,5,6\n2,2,2,2,2,2\n"), "P03.csv | P03 | ROI 1", "P03"),
)


def second_file(path: Path) -> None:
    folder = path / "Outputs" / "cpac" / "filt_global" / "more"
    folder.mkdir()
    (folder / "north_0003_rois_cc200.1D").write_text("1 2\n2 1\n")


ABIDE = cases(
    "abide",
    case("no phenotype table", b.without(b.ABIDE_TABLE), "no phenotype table"),
    case("a column missing", abide("FIQ", "IQ"), "Phenotypic_V1_0b | no column FIQ"),
    case("no ratings", nothing, "Phenotypic_V1_0b | no column qc_rater_1", options=("--quality-checked",)),
    case("a table in Latin-1", abide("NORTH", b"N\xf8RTH"), "Phenotypic_V1_0b | table"),
    case("a FILE_ID twice", abide("north_0004", "north_0003"), "Phenotypic_V1_0b | north_0003 | twice"),
    case("two series files of a subject", second_file, "north_0003_rois | second series file"),
    case("a folder for a .1D", b.folder_for(NORTH_3), "north_0003_rois_cc200.1D | directory", "north_0003"),
    case(
        "a header too short",
        b.line(NORTH_3, 1, lambda line: line[line.index("\t") + 1 :]),
        "north_0003_rois_cc200.1D | header names 5 ROIs | 6 columns",
        "north_0003",
    ),
    case(
        "a .1D of another atlas",
        b.write(NORTH_3, "#1\t#2\n1\t2\n2\t1\n"),
        "north_0003_rois | 2 ROI columns | have 6",
        "north_0003",
    ),
    case("a truncated .1D", b.cut(NORTH_3, 0.5), "north_0003_rois_cc200.1D | columns", "north_0003"),
)


def set_cell(sheet: str, at: str, value: object) -> b.Spoil:
    return b.in_book(lambda book: book[sheet].__setitem__(at, value))


SIGNALS = np.random.default_rng(0).normal(size=(b.VOLUMES, b.MDD_WIDTH))
MDD = cases(
    "mdd",
    case("no workbook", b.without(b.BOOK), "no phenotype workbook"),
    case("two workbooks", b.write("more.xlsx", "x"), "several workbooks | more.xlsx"),
    case("a workbook that is none", b.write(b.BOOK, "ID,Sex,Age\n"), "phenotypes.xlsx | workbook"),
    case("a truncated workbook", b.cut(b.BOOK, 0.6), "phenotypes.xlsx | workbook"),
    case(
        "a sheet of broken XML", b.in_zip(b.BOOK, "xl/worksheets/sheet1.xml", b"<worksheet><row"), "phenotypes.xlsx | workbook"
    ),
    case("a folder for a workbook", b.folder_for(b.BOOK), "phenotypes.xlsx | directory"),
    case("a sheet missing", b.in_book(lambda book: book.remove(book["Controls"])), "phenotypes.xlsx | no sheet Controls | MDD"),
    case("an id of the wrong form", set_cell("MDD", "A3", "S1-0003"), "phenotypes.xlsx | 'S1-0003' | S<site>"),
    case("an id of the other sheet", set_cell("MDD", "A3", "S1-2-0003"), "phenotypes.xlsx | sheet MDD | S1-2-0003"),
    case("an atlas beyond the columns", nothing, "power264 | 1568 columns", options=("--atlas", "power264")),
    case("an unknown strategy", nothing, "strategy raw | FunImgARCWF", options=("--strategy", "raw")),
    case("a negative TR", nothing, "TR | -2", options=("--tr", "-2")),
    case("a .mat without ROISignals", b.variables(MDD_3, Other=SIGNALS), "S1-1-0003.mat | ROISignals", "S1-1-0003"),
    case(
        "a .mat of another width",
        b.variables(MDD_3, ROISignals=SIGNALS[:, :116]),
        "S1-1-0003.mat | 116 columns | 1568",
        "S1-1-0003",
    ),
    case("a .mat of complex numbers", b.variables(MDD_3, ROISignals=SIGNALS * 1j), "S1-1-0003.mat | complex", "S1-1-0003"),
    case("a truncated .mat", b.cut(MDD_3, 0.7), "S1-1-0003.mat | MATLAB", "S1-1-0003"),
    case("a .mat with damaged compression", b.damaged_mat(MDD_3), "S1-1-0003.mat | MATLAB", "S1-1-0003"),
    case("a .mat with a flipped bit", b.flip(MDD_3, 144, 16), "S1-1-0003.mat | MATLAB", "S1-1-0003"),
    case("a MATLAB 7.3 file", b.write(MDD_3, b.matlab_73()), "S1-1-0003.mat | MATLAB 7.3 | -v7", "S1-1-0003"),
    case(
        "a .mat of nobody",
        b.in_book(lambda book: book["MDD"].delete_rows(3)),
        "S1-1-0003.mat | S1-1-0003 | column ID | phenotypes.xlsx",
        "S1-1-0003",
        reason=UNLISTED,
    ),
    case(
        "a .mat with a name of the wrong form",
        b.write("ROISignals_FunImgARCWF/ROISignals_S1-0099.mat", "x"),
        "ROISignals_S1-0099.mat | not",
        "S1-0099",
        reason=("not",),
    ),
)

SUB_3 = "sub-03/func/sub-03_task-rest_atlas-Six_timeseries.tsv"
BIDS = cases(
    "bids",
    case("no participants.tsv", b.without(PEOPLE), "participants | does not exist", options=("--kind", "bids")),
    case("entities of no run", nothing, "no run", options=("--only", "run-07")),
    case("a folder for a series", b.folder_for(SUB_3), "sub-03_task-rest | directory", "sub-03"),
    case(
        "a series without ROI names",
        b.line(SUB_3, 1, lambda line: "1\t2\t3\t4\t5\t6"),
        "sub-03_task-rest | name the 6 ROI columns",
        "sub-03",
    ),
    case("a series of n/a", b.write(SUB_3, "a\tb\nn/a\tn/a\nn/a\tn/a\n"), "sub-03 | NaN at volume 1", "sub-03"),
    case("a volume of n/a", b.line(SUB_3, 9, lambda line: "\t".join(["n/a"] * 6)), "sub-03 | NaN at volume 8", "sub-03"),
    case("a broken sidecar", b.write(SUB_3.replace(".tsv", ".json"), "{"), "sub-03_task-rest | RepetitionTime", "sub-03"),
    case(
        "a sidecar of no time",
        b.write(SUB_3.replace(".tsv", ".json"), '{"RepetitionTime": 0}'),
        "sub-03_task-rest | RepetitionTime of 0 s",
        "sub-03",
    ),
)

NIFTI = cases(
    "nifti",
    case("an atlas image that is not there", nothing, "gone.nii", options=("--atlas-image", "gone.nii")),
    case("an atlas image of junk", b.write("halves.nii.gz", "x" * 400), "halves.nii.gz | image", options=HALVES),
    case("an atlas image with time", b.image("halves.nii.gz", (4, 4, 4, 3)), "halves.nii.gz | 3", options=HALVES),
    case("a truncated atlas image", b.cut("halves.nii.gz", 0.5), "halves.nii.gz | image", options=HALVES),
    case("a name without a region", b.change("halves.tsv", "2\t", "n/a\t"), "halves.tsv | index", options=HALVES),
    case("a region without a name", b.change("halves.tsv", "2\tright\n", ""), "halves.tsv | region 2", options=HALVES),
    case("a run of junk", b.write(RUN_1, "x" * 400), "sub-01_task-rest", "sub-01", options=HALVES),
    case("a run without time", b.image(RUN_1, (4, 4, 4)), "sub-01_task-rest", "sub-01", options=HALVES),
)


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


def header_columns(path: Path) -> None:
    b.header(path, cohort='{"text_columns": [], "phenotypes": []}')


COHORT = cases(
    "cohort",
    case("a truncated cohort file", b.cut("", 0.9), "/input | damaged"),
    case("an empty cohort file", b.write("", ""), "/input | damaged"),
    case("a cohort file of text", b.write("", "subject,site\n" * 99), "/input | damaged"),
    case("a flipped bit", b.flip("", -1000, 64), "/input | altered"),
    case("a flipped length", no_zero_length, "/input | damaged | P06"),
    case("a flipped label", odd_labels, "/input | damaged | label 6"),
    case("a foreign safetensors file", foreign, "/input | not an m2lgdg-cohort-1 file | not given"),
    case("a safetensors file of another kind", another_format, "/input | not an m2lgdg-cohort-1 file | m2lgdg-model-1"),
    case("a hollow cohort file", hollow, "/input | damaged"),
    case("a cohort file with a list for phenotypes", header_columns, "/input | damaged"),
    case("a cohort file as a folder kind", nothing, "/input | is a file | abide-pcp", options=("--kind", "abide-pcp")),
    case("an atlas for a cohort file", nothing, "cohort file | no option --atlas", options=("--atlas", "aal")),
    case("a folder as a cohort file", nothing, "/input | cohort", options=("--kind", "cohort"), base="folder"),
)


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
ATLASES = cases(
    "atlases",
    case("fewer volumes in one atlas", b.array(FOUR, lambda one: one[:-1]), "P05_four.npy | 99 volumes, but 100", "P05"),
    case("no series of the first atlas", b.without("P05.npy"), "P05 | no series file", "P05", reason=("six",)),
    case("an unknown atlas", nothing, "no atlas ho | six, four", options=("--atlas", "six", "--atlas", "ho")),
    case("an atlas twice", nothing, "six is given twice", options=("--atlas", "six", "--atlas", "six")),
    case("all and another", nothing, "all stands for every", options=("--atlas", "all", "--atlas", "six")),
    case("no first atlas", b.change(TOML, 'atlas = "six"\n', ""), "dataset.toml | atlases.four | needs a name"),
    case("a key that no atlas has", b.change(TOML, "pattern", "patern"), "dataset.toml | atlases.four.patern | pattern"),
    case("a cut atlas", shorter_atlas, "/input | damaged | atlas four", base="atlases-file"),
    case("NaN in an atlas", nan_in_atlas, "/input | damaged | atlas four | P02 | NaN at volume 6", base="atlases-file"),
    case("an atlas that is the first", other_entry(name="six"), "/input | damaged | six appears 2 times", base="atlases-file"),
    case("an atlas without a name", other_entry(name=""), "/input | damaged | no name", base="atlases-file"),
    case("an atlas with other ROIs", other_entry(rois=["a", "b"]), "/input | damaged | (100, 4)", base="atlases-file"),
    case("an atlas with another name", other_entry(name="five"), "/input | altered", base="atlases-file"),
)


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


CHOICES = cases(
    "folder",
    case(
        "a folder of no known kind", only_these("*.npy"), "/input | not of a supported kind | participants | bids | abide-pcp"
    ),
    case("a table and no series", only_these(PEOPLE), "participants | series file"),
    case("a pipe", pipe, "/input | neither a file nor a folder", base="cohort"),
    case("an unknown kind", nothing, "kind adhd  | abide-pcp | cohort", options=("--kind", "adhd")),
    case("another kind", nothing, "/input | workbook", options=("--kind", "rest-meta-mdd")),
    case("an option of another kind", nothing, "kind folder | no option --tr", options=("--tr", "2")),
    case("a flag of another kind", nothing, "kind folder | no option --all-sites", options=("--all-sites",)),
)

CASES = [*TABLES, *DATASET, *ARRAYS, *TEXTS, *ABIDE, *MDD, *BIDS, *NIFTI, *COHORT, *ATLASES, *CHOICES]


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
def test_a_bad_input_ends_in_a_sentence(case, spoiled, built):
    """As `convert` and `check` read it, with the options of both."""
    path = spoiled(case.base, case.spoil)
    given = [str(word).replace("{input}", str(path)) for word in case.options]
    context = built.get_command(None, "check").make_context("check", [str(path), *given])
    for on_bad in ("stop", "exclude") if not case.subject else ("stop",):
        with pytest.raises(InputError) as error:
            read_cohort(context, path, on_bad)
        sentence = str(error.value)
        assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 700
        for part in case.says:
            assert part in sentence.encode(errors="backslashreplace").decode()
    if case.subject:
        cohort = read_cohort(context, path, "exclude")
        gone = {one.subject.encode(errors="backslashreplace").decode(): one for one in cohort.excluded}
        assert case.subject in gone and len(gone) <= 2 and len(cohort) >= (3 if case.base == "nifti" else b.COUNT - 1)
        for part in case.reason or case.says:
            assert part in gone[case.subject].reason


TYPED = {(case.base, bool(case.subject)): case for case in reversed(CASES)}
TYPED |= {"names": next(case for case in CASES if "caf" in case.subject)}


@named(list(TYPED.values()))
def test_the_commands_end_in_that_sentence(case, spoiled, command, tmp_path):
    """`convert` stops without a trace; `check` goes on without a bad subject, says why, and `convert --drop-bad` can, too."""
    spoiled(case.base, case.spoil)
    before = everything(tmp_path)
    stopped = [command("convert", "{input}", "new/out.cohort", *case.options)]
    stopped += [] if case.subject else [command("check", "{input}", "--out", "lists", *case.options)]
    for ended in stopped:
        for part in case.says:
            assert part in ended.sentence()
    assert everything(tmp_path) == before
    if not case.subject:
        return
    ended = command("check", "{input}", "--out", "lists", *case.options)
    assert (ended.code, ended.err) == (1, "") and "excluded" in ended.out
    assert everything(Path()) == {"lists", *(f"lists/{name}" for name in LISTS)}
    inclusion = pd.read_csv("lists/inclusion.csv", dtype=str, keep_default_na=False)
    assert inclusion["subject"].is_unique
    gone = inclusion[inclusion["status"] == "excluded"].set_index("subject")
    for part in case.reason or case.says:
        assert part in gone.at[case.subject, "reason"]
    ended = command("convert", "{input}", "out.cohort", "--drop-bad", *case.options)
    assert (ended.code, ended.err) == (0, ""), ended
    assert case.subject not in Cohort.load("out.cohort").subjects.tolist()


UNUSABLE = cases(
    "folder",
    case("one site", b.column(PEOPLE, "site", lambda number: "north"), "one site, north"),
    case("patients only", labels(lambda number: "patient"), "labelled subjects are patients"),
    case("controls only", labels(lambda number: "0"), "labelled subjects are controls"),
    case("labels all missing", labels(lambda number: "n/a"), "No subject has a label"),
    case("no label column", people("label", "note", 1), "No subject has a label"),
)


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


@pytest.mark.parametrize(
    ("words", "size"), [(["convert", "disk/new/out.cohort"], 20_000), (["check", "--out", "disk/new"], 300)]
)
def test_a_disk_that_fills_up(words, size, spoiled, command, monkeypatch):
    """By the limit on the size of a file, which a process may set for itself; Python ignores the signal, writing fails."""
    resource = pytest.importorskip("resource", reason="this system cannot limit the size of a file")
    spoiled("folder")
    Path("disk").mkdir()
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # the limit would cut the bytecode of what is imported here
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        ended = command(words[0], "{input}", *words[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sentence = ended.sentence()
    assert "cannot write disk/new" in sentence and "too large" in sentence
    assert everything(Path("disk")) == set()


def test_random_damage_to_a_cohort_file(healthy, tmp_path):
    b.only_sentences(Cohort.load, tmp_path / "cohort", healthy("cohort").read_bytes(), 150)


def test_random_damage_to_a_workbook(healthy, tmp_path):
    book = (healthy("mdd") / b.BOOK).read_bytes()
    b.only_sentences(lambda one: read_sheet(one, "MDD"), tmp_path / "a.xlsx", book, 50)


def test_random_damage_to_a_table(healthy, tmp_path):
    path = tmp_path / "input"
    b.copy(healthy("folder"), path)
    b.only_sentences(lambda file: read(path, on_bad="exclude"), path / PEOPLE, (path / PEOPLE).read_bytes(), 40)
