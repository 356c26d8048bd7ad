"""Records of cells: trusted only if they fit the cohort, and collected into one table whoever ends last."""

import json
import shutil
import threading

import pytest
from test_cells import content, study

import m2lgdg.study.folder
from m2lgdg import make_cohort, read, run_study
from m2lgdg.study.config import check_study
from m2lgdg.study.plan import make_cells
from m2lgdg.study.records import Records, checksum, record_path


@pytest.fixture
def folder(tmp_path):
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    return tmp_path


def test_two_shards_that_end_at_once_leave_the_whole_table(folder, monkeypatch):
    """The first has read the records, the second then ends and waits for its turn, and only then the first writes."""
    prior = study(folder, "prior")
    run_study(prior, folder / "whole")
    read_by_first, second_waits, real = threading.Event(), threading.Event(), Records._tables
    lock, second = m2lgdg.study.folder._lock, threading.Thread(target=lambda: ends())

    def ends():
        run_study(prior, folder / "out", shard="2/2", watch=lambda state: state.done == 1 and read_by_first.wait())
        second_waits.set()

    def locked(handle, wait=False):
        if threading.current_thread() is second and read_by_first.is_set():
            second_waits.set()
        return lock(handle, wait)

    def slowly(self, cells):
        tables = real(self, cells)
        if threading.current_thread() is not second:
            read_by_first.set()
            second_waits.wait()
        return tables

    monkeypatch.setattr(Records, "_tables", slowly)
    monkeypatch.setattr(m2lgdg.study.folder, "_lock", locked)
    run_study(prior, folder / "out", shard="1/2", watch=lambda state: state.done == 0 and second.start())
    second.join()
    assert content(folder / "out") == content(folder / "whole")


def flipped(record):
    record["labels"] = [1 - label for label in record["labels"]]


def shorter(record):
    for name in ("subjects", "labels", "proba"):
        record[name] = record[name][1:]


def reordered(record):
    for name in ("subjects", "labels", "proba"):
        record[name] = record[name][::-1]


def with_proba(*values):
    def change(record):
        record["proba"] = [*record["proba"][: len(record["proba"]) - len(values)], *values]

    return change


def of(name, value):
    return lambda record: record.__setitem__(name, value(record[name]))


BAD = {
    "flipped labels": flipped,
    "one label": of("labels", lambda labels: [1 - labels[0], *labels[1:]]),
    "labels as floats": of("labels", lambda labels: [float(label) for label in labels]),
    "labels as truth": of("labels", lambda labels: [bool(label) for label in labels]),
    "a subject less": shorter,
    "other order": reordered,
    "other subjects": of("subjects", lambda subjects: [f"{subject}x" for subject in subjects]),
    "no subjects": of("subjects", lambda _: None),
    "wrong length": of("proba", lambda proba: proba[1:]),
    "longer": of("proba", lambda proba: [*proba, 0.5]),
    "null": of("proba", lambda _: None),
    "a null": with_proba(None),
    "above one": with_proba(1.5),
    "below zero": with_proba(-0.1),
    "not a number": with_proba(float("nan")),
    "infinite": with_proba(float("inf")),
    "text": with_proba("0.5"),
    "truth": with_proba(True),
    "a list": with_proba([0.5]),
    "an object": of("proba", dict.fromkeys),
    "another target": of("target", lambda _: "west"),
    "a reason that is no text": lambda record: record.update(status="failed", reason={"a": 1}),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
    run_study(plain(folder), folder / "out")
    return folder


def plain(folder):
    return study(folder, "phenotype-logistic", targets=["east", "north"])


@pytest.mark.parametrize("change", [*BAD.values(), "deep", "bytes"], ids=[*BAD, "deep JSON", "not UTF-8"])
def test_a_record_that_does_not_fit_the_cohort_counts_as_missing(finished, change, tmp_path):
    cohort = read(finished / "tiny.cohort")
    cell, other = make_cells(check_study(plain(finished), "study"), cohort)
    shutil.copytree(finished / "out", tmp_path / "out")
    found = Records.of(tmp_path / "out", cohort)
    path = record_path(tmp_path / "out", cell.key)
    record = json.loads(path.read_text())
    assert found.read(cell) == record
    if change == "deep":
        path.write_text(f'{{"key": "{cell.key}", "status": "done", "proba": {"[" * 100_000}')
    elif change == "bytes":
        path.write_bytes(path.read_bytes().replace(b"east", b"\xffast"))
    else:
        change(record)  # with the checksum of what is written: nobody can be kept from computing one
        path.write_text(json.dumps(record | {"checksum": checksum(record)}))
    assert found.read(cell) is None and found.done(other)
    copied = Records.of(tmp_path / "new", cohort)
    assert [copied.copy(one, [tmp_path / "out"]) for one in (cell, other)] == [False, True]


@pytest.mark.parametrize("name", ["proba", "learned", "checksum"])
def test_a_record_that_was_altered_counts_as_missing(finished, name, tmp_path):
    """One probability, a fact, or no checksum."""
    cohort = read(finished / "tiny.cohort")
    cell, other = make_cells(check_study(plain(finished), "study"), cohort)
    shutil.copytree(finished / "out", tmp_path / "out")
    path = record_path(tmp_path / "out", cell.key)
    record = json.loads(path.read_text())
    if name == "proba":
        record["proba"][0] = 1 - record["proba"][0] / 2
    else:
        del record[name]
    path.write_text(json.dumps(record))
    found = Records.of(tmp_path / "out", cohort)
    assert found.read(cell) is None and found.done(other)
    summary = run_study(plain(finished), tmp_path / "new", reuse=[tmp_path / "out"])
    assert (summary.taken, summary.done) == (1, 1)
    assert content(tmp_path / "new") == content(finished / "out")


def test_a_record_that_does_not_fit_is_run_again(finished, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    path = min((tmp_path / "out" / "cells").iterdir())
    record = json.loads(path.read_text())
    flipped(record)
    path.write_text(json.dumps(record))
    taken = run_study(plain(finished), tmp_path / "new", reuse=[tmp_path / "out"])
    assert (taken.taken, taken.done) == (1, 1)  # the other one
    settings = plain(finished) | {"cohort": str(finished / "tiny.cohort")}
    shutil.copytree(tmp_path / "out", finished / "again")
    summary = run_study(settings, finished / "again")
    assert (summary.reused, summary.done, summary.failed) == (1, 1, [])
    for folder in (tmp_path / "new", finished / "again"):
        assert content(folder) == content(finished / "out")
