"""The folder of a study: one run at a time, shards side by side, locks that end with their process, read-only folders."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from joblib.externals.loky import get_reusable_executor
from test_runner import PLUGIN, content, study

import m2lgdg.study.folder
from m2lgdg import InputError, make_cohort, run_study
from m2lgdg.cli import main


@pytest.fixture
def folder(tmp_path):
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    (tmp_path / "coin.py").write_text(PLUGIN)
    return tmp_path


def quick(folder, **changes):
    return study(folder, **{"methods": ["prior"], "variants": [], "seeds": [0]} | changes)


def locks(out):
    return sorted(file.name for file in Path(out).iterdir() if file.name.startswith(".lock-"))


def while_running(folder, first, second):
    """What a second run says while the first is at its beginning."""
    said = []

    def watch(summary):
        if summary.done == 0:
            try:
                run_study(quick(folder), folder / "out", shard=second)
            except InputError as error:
                said.append(str(error))

    assert run_study(quick(folder), folder / "out", shard=first, watch=watch).failed == []
    assert locks(folder / "out") == []
    return said


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [
        (None, None, ""),
        ("1/2", "1/2", "shard 1/2, "),
        ("2/4", None, "shard 2/4, "),
        (None, "1/2", ""),
        ("1/3", "2/4", "shard 1/3, "),
    ],
)
def test_a_second_run_of_the_same_cells_is_refused(folder, first, second, who):
    (said,) = while_running(folder, first, second)
    process = f"{who}process {os.getpid()}"
    assert said == f"{folder / 'out'} is in use by another run ({process}); wait until it ends, or choose another --out."


@pytest.mark.parametrize(("first", "second"), [("1/2", "2/2"), ("1/2", "2/4"), ("4/4", "3/4")])
def test_shards_share_a_folder(folder, first, second):
    assert while_running(folder, first, second) == []


def test_shards_at_once_complete_a_study(folder):
    while_running(folder, "1/2", "2/2")
    run_study(quick(folder), folder / "whole")
    assert content(folder / "out") == content(folder / "whole")


def test_the_lock_ends_with_an_error(folder, monkeypatch):
    def broken(*_):
        raise RuntimeError("no checks today")

    with monkeypatch.context() as patch:
        patch.setattr(m2lgdg.study.folder, "leakage_checks", broken)
        with pytest.raises(RuntimeError, match="no checks today"):
            run_study(quick(folder), folder / "out")
    assert locks(folder / "out") == []
    assert not (folder / "out" / "checks.json").exists()
    assert run_study(quick(folder), folder / "out").done == 4  # and what was missing is written
    names = {"study.json", "inclusion.csv", "checks.json", "environment.json"}
    assert names <= {file.name for file in (folder / "out").iterdir()}


KILLED = """
import os, signal
from m2lgdg import run_study
def watch(summary):
    if summary.done == {done}:
        os.kill(os.getpid(), signal.SIGKILL)
run_study({study!r}, {out!r}, jobs={jobs}, watch=watch)
"""


def test_the_lock_of_a_killed_run_is_stale(folder):
    out = folder / "out"
    code = KILLED.format(done=2, study=quick(folder), out=str(out), jobs=1)
    process = subprocess.Popen([sys.executable, "-c", code])
    assert process.wait() == -signal.SIGKILL
    assert locks(out) == [".lock-1-of-1"]
    assert (out / ".lock-1-of-1").read_text() == str(process.pid)  # and nothing else of this machine
    (out / "cells" / ".abc.json.m2lgdg-0a1b2c-k3j_h1ab").write_text("half")
    (out / "cells" / ".mine").write_text("whole")
    summary = run_study(quick(folder), out)
    assert (summary.reused, summary.done) == (2, 2)
    assert locks(out) == []
    assert [file.name for file in (out / "cells").iterdir() if file.name.startswith(".")] == [".mine"]


def test_workers_that_survive_a_killed_run_do_not_hold_its_lock(folder):
    """One worker sleeps in a cell of slow-coin when the run is killed."""
    sleepy = study(folder, methods=["prior", "slow-coin"], seeds=[0], variants=[], method={"slow-coin": {"pause": 600.0}})
    code = KILLED.format(done=1, study=sleepy, out=str(folder / "out"), jobs=2)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        assert process.wait() == -signal.SIGKILL
        assert locks(folder / "out") == [".lock-1-of-1"]
        m2lgdg.study.folder._check_runs(folder / "out", (1, 1))
        assert locks(folder / "out") == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_folder_with_nothing_but_leftovers_is_free(folder):
    out = folder / "out"
    out.mkdir()
    for name in (".lock", ".lock-1-of-1", ".study.json.m2lgdg-0a1b2c-k3j_h1ab"):
        (out / name).write_text("")
    assert run_study(quick(folder), out).done == 4
    assert sorted(file.name for file in out.iterdir() if file.name.startswith(".")) == [".lock"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_read_only_folder_is_one_sentence(begun, monkeypatch, capsys):
    """Root may write anywhere, so root becomes somebody else for a while, in a folder that others can see."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
        out = folder / "out"
        out.mkdir()
        given = quick(folder, plugins=[])
        (folder / "study.json").write_text(json.dumps(given))
        if begun:
            run_study(given, out, shard="1/2")
        before = sorted((file.name, file.stat().st_mtime_ns) for file in out.rglob("*"))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        monkeypatch.setattr(sys, "argv", ["m2lgdg", "run", str(folder / "study.json"), "--out", str(out)])
        # Worker pools of earlier tests hold semaphores of root, which only root may remove: they go first.
        get_reusable_executor().shutdown(wait=True)
        gc.collect()
        gc.disable()
        mine = os.geteuid()
        if mine == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            os.seteuid(mine)
            gc.enable()
        assert ended.value.code == 2
        streams = capsys.readouterr()
        assert (streams.out, streams.err) == ("", f"m2lgdg: cannot write to {out}: Permission denied.\n")
        assert sorted((file.name, file.stat().st_mtime_ns) for file in out.rglob("*")) == before
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_the_environment_is_that_of_the_predictions(folder):
    run_study(quick(folder), folder / "out")
    path = folder / "out" / "environment.json"
    before = path.read_text()
    path.write_text(before.replace(json.loads(before)["code"], "older").replace(json.loads(before)["numpy"], "0.1"))
    run_study(quick(folder), folder / "out")
    assert path.read_text() == before


def test_nothing_about_the_host_is_in_a_lock(folder):
    texts = []
    run_study(quick(folder), folder / "out", watch=lambda _: texts.append((folder / "out" / ".lock-1-of-1").read_text()))
    assert all(re.fullmatch(r"\d+", text) for text in texts)
    assert texts
