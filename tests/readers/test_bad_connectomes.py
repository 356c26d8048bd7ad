"""Whatever is wrong with connectomes or their tables, `convert` ends in one sentence with the file and the subject.

Nothing is written then. Trouble with one subject's matrix is that subject's alone: `--drop-bad` leaves it out.
"""

import os
import pickle
import struct

import numpy as np
import pytest
from scipy.io import savemat
from test_connectomes import COV, NAMES, SUBJECTS, TABLE, R, Z, derivatives, frame, own, pconn, rows_of, sites

from m2lgdg import read
from m2lgdg.data.readers import matrices

EYE = np.eye(6)


def matrix(change, stack=R, suffix=".npy"):
    """One file a subject, with the matrix of P03 changed: in place, or by what is returned."""

    def make(path):
        own(path, stack, f"{{}}{suffix}")
        one = stack[2].copy()
        result = change(one)
        if suffix == ".npy":
            np.save(path / "P03.npy", one if result is None else result)
        else:
            np.savetxt(path / f"P03{suffix}", one if result is None else result, delimiter=",", fmt="%s")

    return make


def file(content, suffix=".npy"):
    """One file a subject, with another content of that of P03."""

    def make(path):
        own(path, R, f"{{}}{suffix}")
        (path / f"P03{suffix}").write_bytes(content if isinstance(content, bytes) else content().encode())

    return make


def text(change):
    """Named text files, with that of P03 changed."""

    def make(path):
        own(path, R, "{}.csv")
        for subject, one in zip(SUBJECTS, R, strict=True):
            (path / f"{subject}.csv").write_text(frame(one).to_csv())
        (path / "P03.csv").write_text(change((path / "P03.csv").read_text()))

    return make


def table(change):
    return lambda path: own(path, table=change(TABLE))


def folder(change):
    def make(path):
        sites(path)
        change(path)

    return make


def put(at, value, *others):
    def change(one):
        for (i, j), each in zip((at, *others[::2]), (value, *others[1::2]), strict=True):
            one[i, j] = each

    return change


def both(i, j, value):
    return put((i, j), value, (j, i), value)


def savez(**arrays):
    def make(path):
        path.mkdir()
        (path / "participants.tsv").write_text(TABLE)
        np.savez(path / "all.npz", **arrays)

    return make


def mat(**variables):
    def make(path):
        own(path, R, "{}.mat")
        savemat(path / "P03.mat", variables)

    return make


def edit(name, old, new):
    return lambda path: (path / name).write_text((path / name).read_text().replace(old, new))


def triangles(rows, people=TABLE):
    def make(path):
        path.mkdir()
        (path / "participants.tsv").write_text(people)
        np.save(path / "edges.npy", rows)

    return make


def bids(change):
    def make(path):
        derivatives(path)
        for other in path.glob("**/*Tian*"):
            other.unlink()
        change(next(path.glob("**/sub-P03*relmat.tsv")))

    return make


def objects():
    return pickle.dumps({"a": 1})


def too_short():
    head = "{'descr': '<f8', 'fortran_order': False, 'shape': (6, 6), }".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + b"\0" * 40


ONE = "P03.npy: subject P03: "
# name: how it is made, words of the sentence, options. Of the first group, only P03 is bad.
OF_ONE = {
    "not symmetric": (matrix(put((0, 1), 0.9)), ONE + "the matrix is not symmetric: between ROI 1 and ROI 2 it has 0.9 and"),
    "NaN": (matrix(both(1, 3, np.nan)), ONE + "NaN between ROI 2 and ROI 4 (2 such values)"),
    "infinite": (matrix(both(1, 3, -np.inf)), ONE + "an infinite value between ROI 2 and ROI 4"),
    "all NaN": (matrix(lambda one: one * np.nan), ONE + "NaN between ROI 1 and ROI 2"),
    "out of range": (matrix(both(0, 5, 1.7)), ONE + "1.7 between ROI 1 and ROI 6 is out of range for correlation"),
    "a wrong diagonal": (matrix(put((2, 2), 0.7)), ONE + "the diagonal is 0.7 at ROI 3, where a correlation has 1"),
    "a negative variance": (matrix(put((2, 2), -4.0), COV), ONE + "the diagonal is -4 at ROI 3, where a covariance"),
    "a covariance above its variances": (matrix(both(0, 1, 1e4), COV), ONE + "1e+04 between ROI 1 and ROI 2 is out of range"),
    "counts": (matrix(both(0, 1, 3400.0), Z), ONE + "3400 between ROI 1 and ROI 2 is out of range for fisher-z"),
    "zero everywhere": (matrix(lambda one: 0 * one, Z), ONE + "the connectome is zero everywhere"),
    "the identity": (matrix(lambda one: EYE), ONE + "the connectome is zero everywhere"),
    "fewer ROIs": (matrix(lambda one: one[:5, :5]), ONE + "5 ROIs, but the other subjects have 6"),
    "more ROIs": (matrix(lambda one: np.eye(7) + 0.1 - 0.1 * np.eye(7)), ONE + "7 ROIs, but the other subjects have 6"),
    "one ROI": (matrix(lambda one: one[:1, :1]), ONE + "has shape (1, 1): one ROI has no connections"),
    "a series": (matrix(lambda one: np.random.default_rng(0).normal(size=(50, 7))), ONE + "has shape (50, 7), not that of"),
    "a stack": (matrix(lambda one: R[:3]), ONE + "it holds 3 matrices, not one"),
    "a cube": (matrix(lambda one: np.zeros((2, 3, 4))), ONE + "has shape (2, 3, 4), in which no two axes are the ROIs"),
    "four axes": (matrix(lambda one: R[None]), ONE + "has shape (1, 8, 6, 6), not that of a square matrix"),
    "a number": (matrix(lambda one: np.array(0.5)), ONE + "has shape ()"),
    "no rows": (matrix(lambda one: one[:0]), ONE + "contains no numbers (its shape is (0, 6))"),
    "complex": (matrix(lambda one: one + 1j), ONE + "contains complex128 values, not real numbers"),
    "strings": (matrix(lambda one: one.astype("U5")), ONE + "contains <U5 values, not real numbers"),
    "truths": (matrix(lambda one: one > 0.2), ONE + "contains bool values, not real numbers"),
    "objects": (matrix(lambda one: one.astype(object)), ONE + "holds Python objects that only pickle could read"),
    "a pickle": (file(objects()), ONE + "is not a readable .npy file"),
    "an empty file": (file(b""), ONE + "is not a readable .npy file"),
    "a cut file": (file(too_short()), ONE + "is not a readable .npy file: it is too short for its shape (6, 6)"),
    "numbers of columns and rows": (
        matrix(lambda one: np.block([[np.zeros((1, 1)), np.arange(6)[None]], [np.arange(6)[:, None], one]])),
        ONE + "row 1 counts the ROIs",
    ),
    "empty text": (file(b"\n\n", ".csv"), "P03.csv: subject P03: is empty"),
    "text in the matrix": (
        matrix(lambda one: np.where(one == one[4, 2], "high", one.astype("U9")), suffix=".csv"),
        "P03.csv: subject P03: line 3, column 5: 'high' is not a number",
    ),
    "ragged text": (file(lambda: "1,0.5\n0.5\n", ".csv"), "P03.csv: subject P03: line 2: 1 columns, but earlier lines have 2"),
    "binary text": (file(b"\x00\x01" * 50, ".csv"), "P03.csv: subject P03: is not a text file"),
    "rows and columns of other names": (
        text(lambda one: one.replace("\narea c,", "\narea x,")),
        "P03.csv: subject P03: row 3 is 'area x', but column 3 'area c'",
    ),
    "a ROI of another name": (
        text(lambda one: one.replace("area c", "area x")),
        "P03.csv: subject P03: it has no ROI area c, which the other subjects have",
    ),
    "a ROI twice": (text(lambda one: one.replace("area c", "area d")), "P03.csv: subject P03: ROI area d is named twice"),
    "no names where others have them": (
        text(lambda one: "\n".join(line.split(",", 1)[1] for line in one.splitlines()[1:])),
        "P03.csv: subject P03: its ROIs have no names, which the other files have (area a ...)",
    ),
    "MATLAB text": (mat(fc="abc"), "P03.mat: subject P03: variable fc contains char values, not real numbers"),
    "two MATLAB matrices": (mat(fc=R[2], z=R[2]), "P03.mat: subject P03: has 2 variables (fc, z); name one in dataset.toml"),
    "no MATLAB file": (file(b"x" * 300, ".mat"), "P03.mat: subject P03: is not a readable MATLAB file"),
    "a damaged stack entry": (
        folder(
            lambda path: np.save(path / "north" / "FC_matrices.npy", np.where(np.arange(4)[:, None, None] == 2, np.nan, Z[:4]))
        ),
        "FC_matrices.npy: subject P03: NaN between ROI 1 and ROI 2",
    ),
    "relmat with text": (
        bids(lambda one: one.write_text(one.read_text().replace("1.0", "one", 1))),
        "relmat.tsv: subject sub-P03: line 2",
    ),
    "relmat without rows": (
        bids(lambda one: one.write_text("Node\ta\tb\n")),
        "relmat.tsv: subject sub-P03: contains no numbers",
    ),
}
# Of these, the whole folder is doubtful.
OF_ALL = {
    "a pipe for a stack": (
        folder(lambda path: ((path / "north" / "FC_matrices.npy").unlink(), os.mkfifo(path / "north" / "FC_matrices.npy"))),
        "FC_matrices.npy: it is not a regular file",
    ),
    "different kinds": (
        matrix(lambda one: Z[2]),
        "lab: the connectomes are of different kinds: that of {}/P01.npy (subject P01) looks like correlation, that of "
        "{}/P03.npy (subject P03) like fisher-z",
    ),
    "a stack that is too long": (
        folder(lambda path: np.save(path / "north" / "FC_matrices.npy", Z[:5])),
        "north/FC_matrices.npy: 5 matrices, but its table lists 4 subjects (P01 to P04); both must hold the same subjects",
    ),
    "a stack that is too short": (
        folder(lambda path: np.save(path / "south" / "FC_matrices.npy", Z[4:7])),
        "south/FC_matrices.npy: 3 matrices, but its table lists 4 subjects (P05 to P08)",
    ),
    "two stacks": (
        folder(lambda path: np.save(path / "north" / "more.npy", Z[:4])),
        "north/phenotypic.csv: no file is named by its subjects, and there are two that may be a stack of matrices in its "
        "order, FC_matrices.npy and more.npy; select one with --only FC_matrices",
    ),
    "two tables": (
        folder(lambda path: (path / "north" / "people.csv").write_text("ID,Label\nP01,1\n")),
        "two tables of subjects in one folder, north/people.csv and north/phenotypic.csv; name one with --participants",
    ),
    "an id twice": (
        folder(edit("north/phenotypic.csv", "P02", "P01")),
        "north/phenotypic.csv: subject P01 is listed twice in column ID",
    ),
    "an id of two sites": (folder(edit("south/phenotypic.csv", "P05", "P01")), "south/phenotypic.csv: subject P01 is also in "),
    "no id": (folder(edit("north/phenotypic.csv", "P02", "")), "north/phenotypic.csv, line 3: column ID is empty"),
    "no ids": (
        lambda path: (own(path), (path / "participants.tsv").write_text("age\tsite\n30\tnorth\n")),
        "participants.tsv has no column for the subject",
    ),
    "no table": (
        lambda path: (own(path), (path / "participants.tsv").unlink()),
        "lab has no table of subjects: participants.tsv, or",
    ),
    "no site": (
        table(lambda text: text.replace("site", "where")),
        "participants.tsv has no column for the site (site, site_id, site_name, center, centre, hospital, "
        "scanner_site); its columns are",
    ),
    "labels 1 and 2": (
        table(lambda text: text.replace("\t0\t", "\t2\t")),
        "participants.tsv, column label: labels 1 and 2 are ambiguous; give the words of each class",
    ),
    "an unknown label": (
        folder(edit("south/phenotypic.csv", "P05,0", "P05,maybe")),
        "south/phenotypic.csv: subject P05, column Label: label 'maybe' is not known",
    ),
    "an age that is no number": (
        folder(edit("south/phenotypic.csv", "P05,0,24", "P05,0,old")),
        "subject P05, column Age: 'old'",
    ),
    "a row too short": (folder(edit("south/phenotypic.csv", "P06,1,", "P06,")), "south/phenotypic.csv, line 3: 4 cells"),
    "an empty table": (lambda path: own(path, table="\n"), "participants.tsv is empty and cannot be read as a table"),
    "nobody listed": (table(lambda text: text.splitlines()[0] + "\n"), "participants.tsv lists no subject"),
    "a listed subject without a matrix": (
        lambda path: (own(path), (path / "P03.npy").unlink()),
        "participants.tsv: subject P03 has no connectome in",
    ),
    "a matrix of nobody": (
        lambda path: (own(path), np.save(path / "P77.npy", R[0])),
        "P77.npy: subject P77 is not in ",
    ),
    "two files of one": (
        lambda path: (own(path), np.savetxt(path / "P03.txt", R[2])),
        "P03.txt: subject P03 has a second file, ",
    ),
    "ids of other data": (
        table(lambda text: text.replace("P0", "Q0")),
        "participants.tsv: no file is named by its subjects, and there are two",
    ),
    "two arrays in an archive": (savez(a=R, b=Z), "all.npz has 2 arrays (a, b); name one in dataset.toml: variable"),
    "objects in an archive": (savez(a=R.astype(object)), "all.npz holds Python objects that only pickle could read"),
    "no archive": (
        lambda path: (savez(a=R)(path), (path / "all.npz").write_bytes(b"PK\x03\x04junk")),
        "all.npz is not a readable .npz file",
    ),
    "triangles of other ROIs than are named": (
        triangles(rows_of(R, "upper", False)),
        "edges.npy has rows of 15 values, the triangles of 5 ROIs with the diagonal or 6 without it, but 116 ROIs are named",
        ("--atlas", "aal"),
    ),
    "triangles of no matrix": (triangles(np.ones((8, 14)) / 2), "edges.npy has shape (8, 14), not that of a square matrix"),
    "triangles of too many": (
        triangles(rows_of(np.concatenate([R, R]), "upper", True)),
        "edges.npy: 16 matrices, but its table lists 8 subjects",
        ("--triangle", "upper"),
    ),
    "an unknown kind of values": (own, "option values: 'r' is not one of correlation, fisher-z", ("--values", "r")),
    "an unknown half": (own, "option triangle: 'left' is not one of upper, lower", ("--triangle", "left")),
    "names that are too few": (
        lambda path: (own(path), (path / "names.txt").write_text("a\nb\n")),
        "P01.npy: subject P01: 6 ROIs, but ",
        ("--atlas-labels", "{}/names.txt"),
    ),
    "a name twice": (
        lambda path: (own(path), (path / "names.txt").write_text("a\nb\na\n")),
        "names.txt: ROI a is listed twice",
        ("--atlas-labels", "{}/names.txt"),
    ),
    "a key about series": (
        lambda path: (own(path), (path / "dataset.toml").write_text("join_runs = true")),
        "dataset.toml, key join_runs: it is about series, and these are connectomes",
    ),
    "a pconn of other parcels": (
        lambda path: (
            derivatives(path, "pconn"),
            pconn(next(path.glob("**/sub-P03*Gordon*.nii")), R[2], ("x", *NAMES[1:])),
        ),
        "boldmap.pconn.nii: subject sub-P03: it has no ROI area a, which the other subjects have",
        ("--atlas", "Gordon"),
    ),
}


def ends_in_one_sentence(typed, path, words, *options):
    before = sorted(os.listdir(path.parent))
    words, options = words.replace("{}", str(path)), [one.replace("{}", str(path)) for one in options]
    code, _, error = typed("convert", path, path.parent / "out.cohort", "--kind", "connectomes", *options)
    assert code == 2, error
    assert words in error.replace("\n", " "), error
    assert error.strip().endswith(".") and error.count("Traceback") == 0
    assert sorted(os.listdir(path.parent)) == before  # nothing was written


@pytest.mark.parametrize("name", OF_ONE)
def test_a_bad_matrix_is_that_of_one_subject(tmp_path, typed, name):
    make, words = OF_ONE[name]
    path = tmp_path / "lab"
    make(path)
    ends_in_one_sentence(typed, path, words)
    cohort = read(path, "connectomes", on_bad="exclude")
    bad = "sub-P03" if "relmat" in words else "P03"
    expected = [(bad, "unusable file")] + ([("P99", "no scan in the release")] if (path / "north").exists() else [])
    assert [(one.subject, one.kind) for one in cohort.excluded] == expected
    assert len(cohort) == 7 and bad not in cohort.subjects
    reason = cohort.excluded[0].reason
    assert words.split(": ", 2)[-1].split(" (its")[0] in reason and str(tmp_path) not in reason  # folders are not shared


@pytest.mark.parametrize("name", OF_ALL)
def test_a_bad_folder_ends_in_a_sentence(tmp_path, typed, name):
    make, words, *options = OF_ALL[name]
    path = tmp_path / "lab"
    make(path)
    ends_in_one_sentence(typed, path, words, *(options[0] if options else ()))


def test_there_are_enough_of_them():
    assert len(OF_ONE) + len(OF_ALL) >= 40


def test_a_pickle_is_never_loaded(tmp_path, typed):
    """A file whose unpickling would leave a trace."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trace"),)

    path = own(tmp_path / "lab")
    for content in (pickle.dumps(Trap()), None):
        if content is None:
            np.save(path / "P03.npy", np.array([[Trap()]], dtype=object), allow_pickle=True)
        else:
            (path / "P03.npy").write_bytes(content)
        ends_in_one_sentence(typed, path, "P03.npy: subject P03: ")
    assert not (tmp_path / "trace").exists()


def test_an_archive_that_grows_is_refused(tmp_path, monkeypatch, typed):
    path = tmp_path / "lab"
    path.mkdir()
    (path / "participants.tsv").write_text(TABLE)
    np.savez_compressed(path / "all.npz", a=np.zeros((8, 100, 100)))
    monkeypatch.setattr(matrices, "LARGEST_ARCHIVE", 100_000)
    ends_in_one_sentence(typed, path, "all.npz: a has 640128 bytes, more than the limit of 100000")
