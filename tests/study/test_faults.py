"""A disk that is full at any write of a study, folders that turn read-only, clocks that jump: nothing is lost.

The long runs are `make faults`; whose folder it is and what kills leave is in test_claim.py.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import faults
import pytest

from m2lgdg import InputError, make_cohort, run_study

METHODS = ["prior", "phenotype-logistic"]  # quick ones
FILES = (
    "predictions.csv",
    "study.json",
    "inclusion.csv",
    "checks.json",
    "cohort.json",
    "connectomes.safetensors",
    "environment.json",
    "methods.json",
)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """An undisturbed run beside its cohort."""
    folder = tmp_path_factory.mktemp("faults")
    make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
    run_study(settings(folder), folder / "quiet")
    return folder / "quiet"


def settings(folder):
    full = {"phenotype-logistic": {"held_phenotypes": False}}  # else some folds of a tiny cohort have nothing to explain
    study = {"cohort": str(folder / "tiny.cohort"), "methods": METHODS, "method": full, "seeds": [0]}
    return study | {"explain": METHODS[1:]}


def same(out, quiet):
    names = [path.relative_to(quiet) for path in quiet.rglob("*") if path.is_file() and path.parent.name != "cells"]
    assert set(FILES) < set(map(str, names))
    for name in names:
        assert (out / name).read_bytes() == (quiet / name).read_bytes(), name
    assert {path.name for path in out.rglob(".*")} <= {".lock"}


def count_writes(patch):
    """The writes of a study, each of which ends in making its file safe on the disk."""
    count, sync = [0], os.fsync
    patch.setattr("os.fsync", lambda handle: (count.__setitem__(0, count[0] + 1), sync(handle)))
    return count


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["full", "read-only", "broken"])
def test_a_disk_that_fails_at_any_write(code, quiet):
    """From the n-th write on, over the whole study: a sentence, only whole records; then the same bytes as undisturbed."""
    with pytest.MonkeyPatch.context() as patch:
        count = count_writes(patch)
        run_study(settings(quiet.parent), quiet.parent / "all")
    shutil.rmtree(quiet.parent / "all")
    writes, sync, lost = count[0], os.fsync, set()
    assert writes == 8 + 8 + 4 * 2  # beside the results, records, the files of explanations
    for n in {*range(0, writes, 5 if code == errno.ENOSPC else 12), writes - 1}:
        out, left = quiet.parent / f"out-{code}-{n}", [n]

        def fails(handle, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
            sync(handle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.fsync", fails)
            with pytest.raises(InputError, match=rf"^cannot write .*: {os.strerror(code)}\.$"):
                run_study(settings(quiet.parent), out)
        records = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
        lost.add(len(records))
        assert all(record["status"] == "done" for record in records)
        assert not (out / "predictions.csv").exists()
        summary = run_study(settings(quiet.parent), out)
        assert (summary.reused, summary.failed) == (len(records), [])
        same(out, quiet)
        shutil.rmtree(out)
    assert len(lost) > 2 and {0, 8} <= lost if code == errno.ENOSPC else 0 in lost


@pytest.mark.parametrize("dates", [(0, 1), (4e9, 4.1e9)], ids=["past", "future"])
def test_dates_of_files_decide_nothing(dates, quiet):
    out = quiet.parent / f"dated-{dates[1]:g}"
    shutil.copytree(quiet, out)
    for i, path in enumerate(sorted(path for path in out.rglob("*") if path.is_file())):
        os.utime(path, (dates[i % 2],) * 2)
    for path in sorted((out / "cells").iterdir())[::2]:
        path.unlink()
    summary = run_study(settings(quiet.parent), out)
    assert (summary.reused, summary.done) == (4, 4)
    same(out, quiet)


def test_a_clock_that_is_set_while_a_study_runs(quiet, monkeypatch):
    clock = iter(range(10**9, 0, -(10**7)))
    monkeypatch.setattr("time.time", lambda: next(clock))
    run_study(settings(quiet.parent), quiet.parent / "set")
    same(quiet.parent / "set", quiet)


@pytest.mark.long
def test_a_full_and_a_read_only_file_system(tmp_path):
    """Real ones, of the long run, at a few sizes."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("only root may mount a disk to fill; the failing writes above stand in")
    command = [sys.executable, str(Path(faults.__file__)), "--jobs", "1", "--sizes", "2", "--faults", "full", "read-only"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    reported = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, ended
    assert [one["fault"] for one in reported] == ["full disk", "read-only folder"]
    assert [one["runs"] for one in reported] == [2, 3]
    assert all(one["no_sentence"] == one["different_files"] == 0 for one in reported)
    assert sum(reported[0]["filled"].values()) == 2 and "after the last cell" not in reported[0]["filled"]
