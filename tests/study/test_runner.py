"""The study runner: cells, resume, kill, engines, shards, failures; the predictions file must be the same bytes always."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, leave_one_site_out, make, make_cohort, run_study
from m2lgdg.explain.attribution import explain
from m2lgdg.explain.explanation import Explanation
from m2lgdg.study.engines import ENGINES
from m2lgdg.study.plan import Cell
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.runner import _Times

PLUGIN = '''
import time
from typing import ClassVar
import numpy as np
from m2lgdg.method import Method, method

@method("slow-coin")
class SlowCoin(Method):
    """Draws a probability from the seed after a pause; fails where it is told to."""
    pause: float = 0.0
    fail_at: str = ""

    def learn(self, source, *, seed, device, progress):
        time.sleep(self.pause)
        if self.fail_at and self.fail_at not in source.site_names:
            raise RuntimeError("the coin was lost")
        self.state_["bias"] = np.random.default_rng([seed, len(source)]).random(1)

    def score(self, target):
        return np.array([(float(self.state_["bias"][0]) + abs(float(one[0, 0]))) % 1 for one in target.series])
'''


@pytest.fixture
def folder(tmp_path):
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    (tmp_path / "coin.py").write_text(PLUGIN)
    return tmp_path


def study(folder, **changes):
    base = {
        "cohort": str(folder / "tiny.cohort"),
        "methods": ["prior", "fc-logistic", "slow-coin"],
        "seeds": [0, 1],
        "plugins": [str(folder / "coin.py")],
        "variants": ["phenotypes"],
    }
    return base | changes


def content(out):
    return (Path(out) / "predictions.csv").read_bytes()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The folder and the summary of a quiet serial run."""
    folder = tmp_path_factory.mktemp("quiet")
    make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
    (folder / "coin.py").write_text(PLUGIN)
    return folder / "out", run_study(study(folder), folder / "out")


@pytest.fixture(scope="module")
def undisturbed(quiet):
    """The predictions of the quiet run, to compare all others with."""
    return content(quiet[0])


@pytest.fixture
def finished(folder, quiet):
    """A folder where the study has been run, by a copy of the quiet run."""
    shutil.copytree(quiet[0], folder / "out")
    return folder


def test_cells_and_predictions(quiet):
    cohort = make_cohort("tiny", seed=1)
    out, summary = quiet
    # prior 4 targets; fc-logistic 4 targets x (itself, phenotypes); slow-coin 4 targets x 2 seeds
    assert (summary.total, summary.done, summary.failed) == (20, 20, [])
    table = read_predictions(out)
    assert len(table) == 52 * (1 + 2 + 2)
    order = table[["method", "variant"]].drop_duplicates().to_numpy().tolist()
    assert order == [["prior", ""], ["fc-logistic", ""], ["fc-logistic", "phenotypes"], ["slow-coin", ""]]
    (fold,) = leave_one_site_out(cohort, ["east"])
    proba = make("fc-logistic", phenotypes=True).fit(fold.source).predict_proba(fold.target)[:, 1]
    part = table[(table.method == "fc-logistic") & (table.variant == "phenotypes") & (table.target == "east")]
    np.testing.assert_allclose(part.proba, proba, atol=1e-9)
    assert part.subject.tolist() == fold.target.subjects.tolist()
    assert part.label.tolist() == fold.target.labels.tolist()


def test_everything_needed_to_repeat_is_written(folder, undisturbed):
    run_study(study(folder, sweep={"slow-coin": {"pause": [0.001]}}), folder / "out")
    reported = json.loads((folder / "out" / "study.json").read_text())
    assert reported["method"]["fc-logistic"]["site_folds"] == 5
    assert reported["targets"] == ["east", "north", "south", "west"]
    assert reported["inputs"] == ["sex", "age", "education"]
    assert set(json.loads((folder / "out" / "environment.json").read_text())) >= {"python", "numpy", "code", "m2lgdg"}
    inclusion = pd.read_csv(folder / "out" / "inclusion.csv")
    assert len(inclusion) == 52
    run_study(folder / "out" / "study.json", folder / "again")
    assert content(folder / "again") == content(folder / "out")
    assert "slow-coin,pause=0.001,0,east" in content(folder / "out").decode()


def test_no_path_of_this_machine_is_written(quiet):
    out, _ = quiet
    for name in ("study.json", "environment.json", "inclusion.csv", "predictions.csv"):
        assert str(out.parent) not in (out / name).read_text()


def test_the_record_of_a_network_says_whom_validation_looked_at(folder):
    quick = {"method": {"erm": {"variant": "small", "epochs": 2, "warmup": 1}}, "variants": [], "targets": ["east"]}
    run_study(study(folder, methods=["erm"], seeds=[0], **quick), folder / "out")
    (record,) = [json.loads(file.read_text()) for file in (folder / "out" / "cells").iterdir()]
    assert record["learned"]["validation"] == "held-out subjects"
    assert [note[:22] for note in record["learned"]["notes"]] in ([], ["Platt scaling is flat:"])  # after two epochs


def test_a_finished_cell_is_not_run_again(finished):
    folder = finished
    before = {file.name: file.stat().st_mtime_ns for file in (folder / "out" / "cells").iterdir()}
    summary = run_study(study(folder), folder / "out")
    assert (summary.reused, summary.done) == (20, 0)
    assert {file.name: file.stat().st_mtime_ns for file in (folder / "out" / "cells").iterdir()} == before


def test_keys_change_with_data_fields_and_seed(folder):
    from m2lgdg.study.config import check_study
    from m2lgdg.study.plan import make_cells

    cohort = make_cohort("tiny", seed=1)

    def keys(cohort, **changes):
        return {cell.key for cell in make_cells(check_study(study(folder, **changes), "s"), cohort)}

    base = keys(cohort)
    assert len(base) == 20
    assert not base & keys(make_cohort("tiny", seed=2))
    changed = keys(cohort, method={"fc-logistic": {"site_folds": 3}})
    assert len(base & changed) == 12
    assert not base & keys(cohort, threads=2)


def test_shards_together_give_the_same_bytes(folder, undisturbed):
    for shard in ("2/3", "1/3"):
        run_study(study(folder), folder / "out", shard=shard)
        assert content(folder / "out") != undisturbed
    run_study(study(folder), folder / "out", shard="3/3")
    assert content(folder / "out") == undisturbed
    with pytest.raises(InputError, match="--shard 4/3"):
        run_study(study(folder), folder / "out", shard="4/3")


def test_a_failing_cell_is_recorded_and_tried_again(folder, undisturbed):
    broken = study(folder, method={"slow-coin": {"fail_at": "east"}})
    summary = run_study(broken, folder / "out")
    assert len(summary.failed) == 2
    assert summary.failed[0] == ("slow-coin, target east, seed 0", "RuntimeError: the coin was lost")
    failures = pd.read_csv(folder / "out" / "failures.csv")
    assert failures.reason.tolist() == ["RuntimeError: the coin was lost"] * 2
    assert len(read_predictions(folder / "out")) == 52 * 5 - 2 * 10
    records = [json.loads(file.read_text()) for file in (folder / "out" / "cells").iterdir()]
    assert any("the coin was lost" in record.get("traceback", "") for record in records)
    assert run_study(broken, folder / "out").reused == 18


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(folder, monkeypatch):
    import m2lgdg.study.runner as runner

    lost = {"methods": ["prior", "erm"], "seeds": [0], "variants": [], "device": "cuda:99"}
    with pytest.raises(InputError, match="device cuda:99 is not available on this machine"):
        run_study(study(folder, **lost), folder / "out")
    assert not (folder / "out").exists()
    # Nothing but a network looks at it, and the workers of a scheduler may be on machines that have it.
    assert run_study(study(folder, **lost | {"methods": ["prior"]}), folder / "linear").done == 4
    monkeypatch.setitem(runner.ENGINES, "dask", lambda items, *rest: ((item, None) for item in items))
    assert run_study(study(folder, **lost), folder / "elsewhere", scheduler="tcp://far:8786").done == 8


def test_the_device_that_auto_means_is_part_of_the_key(folder, monkeypatch):
    """A study that is continued on another machine has no cells of both."""
    from m2lgdg import devices
    from m2lgdg.study.config import check_study
    from m2lgdg.study.plan import make_cells
    from m2lgdg.study.runner import on_device

    def keys(device, **changes):
        monkeypatch.setattr(devices, "choose_device", lambda name: device if name == "auto" else name)
        given = check_study(study(folder, variants=[], device="auto", **changes), "s")
        return {cell.key for cell in make_cells(on_device(given), make_cohort("tiny", seed=1))}

    network = {"methods": ["erm"], "seeds": [0]}
    assert not keys("cpu", **network) & keys("cuda", **network)
    assert keys("cuda:0", **network) == keys("cuda:1", **network)
    linear = {"methods": ["fc-logistic"]}
    assert keys("cpu", **linear) == keys("cuda", **linear)
    with pytest.raises(InputError, match="name one, such as --set device=cuda"):
        run_study(study(folder, device="auto", variants=[], **network), folder / "out", scheduler="tcp://far:8786")


def test_sites_can_be_left_out(folder, typed):
    """Of source and of targets, by the study file and by the command; the folder repeats it."""
    plain = study(folder, methods=["prior"], plugins=[], variants=[], targets=["east", "west"])
    (folder / "study.json").write_text(json.dumps(plain))
    code, text, _ = typed("run", folder / "study.json", "--out", folder / "out", "--without", "west", "--without", "north")
    assert code == 0 and "1 of 1 cells done" in text
    table = read_predictions(folder / "out")
    cohort = make_cohort("tiny", seed=1)
    south = cohort.labels[cohort.sites == "south"].mean()
    assert set(table["target"]) == {"east"} and np.allclose(table["proba"], south)
    inclusion = pd.read_csv(folder / "out" / "inclusion.csv")
    assert set(inclusion[inclusion["reason"] == "site left out by the user"]["site"]) == {"north", "west"}
    left_out = plain | {"exclude_sites": ["north", "west"], "targets": ["east"]}
    assert run_study(left_out, folder / "again", reuse=[folder / "out"]).taken == 1
    assert run_study(folder / "out" / "study.json", folder / "repeated").done == 1
    assert content(folder / "again") == content(folder / "repeated") == content(folder / "out")
    code, _, errors = typed("run", folder / "study.json", "--out", folder / "none", "--without", "wset")
    assert (code, errors) == (2, "m2lgdg: key exclude_sites: wset is not a site of cohort tiny; did you mean west?\n")


def test_time_left_is_by_the_last_cells_of_each_method():
    quick, slow = (Cell(name, "", "east", 0, {}, name) for name in ("quick", "slow"))
    times = _Times([quick] * 4 + [slow] * 3)
    times.add(quick, 2.0, now=2.0)
    assert times.left() == (6.0, True)  # and what the slow ones take
    times.add(slow, 500.0, now=251.0)  # two at a time
    assert times.left() == ((3 * 2.0 + 2 * 500.0) / 2, False)
    times.add(quick, 4.0, now=253.5)  # the mean is 3, the work so far 506
    left, more = times.left()
    assert np.isclose(left, (2 * 3.0 + 2 * 500.0) * 253.5 / 506.0) and not more


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_time_left_is_right_within_a_factor_of_two(jobs, seed):
    """Of methods that take a second or a minute, on cores so busy that a cell records 40 % of the time, from a tenth on."""
    random = np.random.default_rng(seed)
    usual = dict(zip("abcdef", np.exp(random.normal(1.5, 1.2, 6)), strict=True))
    cells = [Cell(name, "", f"{target:02d}", 0, {}, name) for target in range(20) for name in usual]
    free, ended = [60.0] * jobs, []  # the cohort is read in the first minute
    for cell in cells:
        worker, seconds = int(np.argmin(free)), usual[cell.method] * float(np.exp(random.normal(0, 0.3)))
        free[worker] += 2.5 * seconds
        ended.append((free[worker], cell, seconds))
    times, end = _Times(cells), max(free)
    for done, (now, cell, seconds) in enumerate(sorted(ended, key=lambda one: one[0]), start=1):
        times.add(cell, seconds, now)
        if len(cells) / 10 <= done <= 0.9 * len(cells):
            left, more = times.left()
            assert 0.5 < left / (end - now) < 2 and not more


def test_long_trainings_are_announced(folder, typed, monkeypatch):
    """At most about as long as measured: by the subjects, and the square of the ROIs."""
    from m2lgdg.study.runner import expected_time

    cohort = make_cohort("tiny", seed=1)
    cells = [Cell(name, "", "east", seed, {}, name) for name in ("m2lgdg", "fc-logistic") for seed in (0, 1)]
    count, seconds = expected_time(cells, cohort, jobs=2)
    assert count == 2 and np.isclose(seconds, 2200 * 60 * len(cohort) / 1035 * (len(cohort.rois) / 116) ** 2)
    assert expected_time(cells[2:], cohort, 1) is None
    assert expected_time([Cell("m2lgdg", "", "east", 0, {"epochs": 3}, "short")], cohort, 1) is None
    monkeypatch.setattr("m2lgdg.study.runner.expected_time", lambda *_: (85, 7 * 3600.0))
    (folder / "study.json").write_text(json.dumps(study(folder, methods=["prior"], plugins=[], variants=[])))
    _, text, _ = typed("run", folder / "study.json", "--out", folder / "out")
    assert " ".join(text.split()).startswith("Training 85 networks takes up to about 7 hours on 1 CPU core. Fewer seeds")


def test_another_study_in_the_folder_is_refused(finished):
    folder = finished
    with pytest.raises(InputError, match=r"belongs to another study \(key seeds differs\)"):
        run_study(study(folder, seeds=[0, 1, 2]), folder / "out")
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty and not a study folder"):
        run_study(study(folder), folder / "full")
    assert [file.name for file in (folder / "full").iterdir()] == ["thesis.txt"]


def test_cells_of_a_smaller_study_can_be_copied_into_a_larger_one(finished, undisturbed):
    folder = finished
    larger = study(folder, seeds=[0, 1, 2])
    run_study(larger, folder / "new", shard="24/24")
    for file in (folder / "out" / "cells").iterdir():
        shutil.copy(file, folder / "new" / "cells")
    summary = run_study(larger, folder / "new")
    assert (summary.total, summary.reused) == (24, 20 + 1)  # a third seed of slow-coin at four targets, one of them run before
    table = read_predictions(folder / "new")
    assert table[table.seed < 2].to_csv(index=False, lineterminator="\n").encode() == undisturbed


def test_a_training_taken_over_under_another_name_is_called_by_it(folder):
    from m2lgdg.report.contents import read_contents

    swept = {"methods": ["fc-logistic"], "variants": [], "seeds": [0], "sweep": {"fc-logistic": {"site_folds": [3]}}}
    run_study(study(folder, **swept), folder / "old")
    default = swept | {"sweep": {}, "method": {"fc-logistic": {"site_folds": 3}}}
    assert run_study(study(folder, **default), folder / "new", reuse=[folder / "old"]).taken == 4
    assert [(record["variant"], record["status"]) for record in read_contents(folder / "new").records] == [("", "done")] * 4


def test_records_without_their_content_are_run_again(finished, undisturbed):
    folder = finished
    paths = sorted((folder / "out" / "cells").iterdir())
    for path, rest in zip(paths, ({"status": "done"}, {"status": "failed"}, {"status": ["done"]}, {}), strict=False):
        path.write_text(json.dumps({"key": json.loads(path.read_text())["key"]} | rest))
    paths[4].write_text(paths[4].read_text()[:50])
    assert run_study(study(folder), folder / "out").done == 5
    assert content(folder / "out") == undisturbed


def test_a_cohort_of_other_content_is_refused(finished):
    folder = finished
    make_cohort("tiny", seed=5).save(folder / "tiny.cohort")
    with pytest.raises(InputError, match="has changed since the study was run"):
        run_study(folder / "out" / "study.json", folder / "again")


# Importing takes longer than the study: it is done once, and each line asks for a run in a process group of its own.
KILLED = """
import os, sys
from m2lgdg import run_study
from m2lgdg.registry import load_methods
load_methods()
for _ in sys.stdin:
    if not os.fork():
        os.setsid()
        print(os.getpid(), flush=True)
        run_study({study!r}, {out!r}, engine={engine!r}, jobs=2)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("engine", ["serial", "joblib"])
def test_killed_anywhere_then_resumed_gives_the_same_bytes(folder, undisturbed, engine):
    out = folder / "out"
    plain = study(folder, method={"slow-coin": {"pause": 0.05}})
    command = [sys.executable, "-c", KILLED.format(study=plain, out=str(out), engine=engine)]
    cells = out / "cells"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:
        for wanted in (1, 11):  # killed after the first cell, then later
            process.stdin.write("run\n")
            running = int(process.stdout.readline())
            deadline = time.monotonic() + 60
            while (not cells.is_dir() or len(list(cells.glob("*.json"))) < wanted) and time.monotonic() < deadline:
                time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError):  # a slow machine may see the study done before it looks
                os.killpg(running, signal.SIGKILL)
        process.stdin.close()
    finished = len(list(cells.glob("*.json")))
    assert finished >= 11
    summary = run_study(plain, out)
    assert summary.reused == finished
    assert content(out) == undisturbed  # the pause changes no byte


MORTAL = '''
import os, signal
from pathlib import Path
import numpy as np
from m2lgdg.method import Method, method

@method("mortal")
class Mortal(Method):
    """Takes its process with it, the first time that some cells are run."""
    marks: str = ""

    def learn(self, source, *, seed, device, progress):
        mark = Path(self.marks) / f"{'-'.join(source.site_names)}-{seed}"
        if seed == 0 and "west" in source.site_names and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.state_["bias"] = np.random.default_rng([seed, len(source)]).random(1)

    def score(self, target):
        return np.full(len(target), self.state_["bias"][0])
'''


FATAL = '''"""Method whose first training takes the GPU with it; no training of that process can use it after."""
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from m2lgdg.method import Method, method


@method("fatal")
class Fatal(Method):
    marks: str = ""

    def learn(self, source, *, seed, device, progress):
        mark = Path(self.marks) / "fallen"
        if not mark.exists():
            mark.touch()
            sys.modules["m2lgdg.devices"] = SimpleNamespace(cuda_failed=lambda: True)
        if isinstance(sys.modules.get("m2lgdg.devices"), SimpleNamespace):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.state_["bias"] = np.array([0.5])

    def score(self, target):
        return np.full(len(target), self.state_["bias"][0])
'''


def test_a_lost_gpu_ends_the_study_instead_of_failing_all_that_is_left(folder, typed):
    """And the same command goes on: its processes are new. CUDA is stood in for by a method that says what CUDA would."""
    (folder / "fatal.py").write_text(FATAL)
    settings = study(folder, plugins=[str(folder / "fatal.py")], methods=["prior", "fatal"], seeds=[0], variants=[])
    (folder / "fatal.json").write_text(json.dumps(settings | {"method": {"fatal": {"marks": str(folder)}}}))
    command = ("run", folder / "fatal.json", "--out", folder / "out", "--jobs", "2")
    code, _, errors = typed(*command)
    sentence = " ".join(errors.split())
    assert code == 2 and "Traceback" not in errors
    assert "the GPU failed and can no longer be used by this process (RuntimeError: CUDA error" in sentence
    assert sentence.endswith("of 8 cells are done; run the same command again to continue.")
    assert len(pd.read_csv(folder / "out" / "failures.csv")) <= 2  # not what that process would have been given after it
    code, _, errors = typed(*command)
    assert code == 0, errors
    assert len(read_predictions(folder / "out")) == 2 * 52
    assert not (folder / "out" / "failures.csv").exists()


@pytest.mark.parametrize("engine", ["dask", "joblib"])
def test_engines_give_the_same_bytes_and_a_killed_worker_loses_nothing(folder, undisturbed, engine):
    """Dask starts another worker, also where another program has its usual port; joblib says which cell is lost."""
    (folder / "mortal.py").write_text(MORTAL)
    marks = folder / "marks"
    marks.mkdir()
    mortal = study(folder, methods=["prior", "fc-logistic", "slow-coin", "mortal"], method={"mortal": {"marks": str(marks)}})
    mortal["plugins"].append(str(folder / "mortal.py"))
    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("0.0.0.0", 8787))
            taken.listen()
        summary = run_study(mortal, folder / "out", engine=engine, jobs=2)
    assert len(list(marks.iterdir())) == 3  # of the cells that are deadly: seed 0, not where west is the target
    if engine == "joblib":
        assert {cell for cell, _ in summary.failed} == {f"mortal, target {site}, seed 0" for site in ("east", "north", "south")}
        assert {reason.split(":")[0] for _, reason in summary.failed} == {"worker lost"}
        assert (summary.done, len(pd.read_csv(folder / "out" / "failures.csv"))) == (25, 3)
        assert run_study(mortal, folder / "out").reused == 25
    else:
        assert (summary.done, summary.failed) == (28, [])
    assert not (folder / "out" / "failures.csv").exists()
    kept = [line for line in content(folder / "out").splitlines(keepends=True) if not line.startswith(b"mortal,")]
    assert b"".join(kept) == undisturbed
    for (target, seed), rows in read_predictions(folder / "out").query("method == 'mortal'").groupby(["target", "seed"]):
        sizes = {"east": 42, "north": 36, "south": 38, "west": 40}
        assert set(rows["proba"]) == {np.random.default_rng([seed, sizes[target]]).random(1)[0]}


# A shell's background job ignores SIGINT, and its children inherit that.
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from m2lgdg.cli import main
main()
"""


@pytest.mark.parametrize(("jobs", "how"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_stopped_run_collects_what_is_done_and_says_how_to_go_on(folder, jobs, how):
    """A process does cells of prior, then sleeps in one of slow-coin until it is stopped: by Ctrl-C, or as a cluster does."""
    sleepy = study(folder, methods=["prior", "slow-coin"], seeds=[0], variants=[], method={"slow-coin": {"pause": 600.0}})
    (folder / "study.json").write_text(json.dumps(sleepy))
    command = [sys.executable, "-c", INTERRUPTED, "run", folder / "study.json", "--out", folder / "out", "--jobs", str(jobs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list((folder / "out" / "cells").glob("*.json"))) < jobs and time.monotonic() < deadline:
        time.sleep(0.02)
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):  # nor does any of its processes go on
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    done = len(list((folder / "out" / "cells").glob("*.json")))  # two processes may have taken another cell of prior
    assert errors.strip() == f"Stopped: {done} of 8 cells done; run the same command again to continue."
    assert jobs <= done <= 4
    assert read_predictions(folder / "out")["target"].nunique() == done


def test_workers_leave_ctrl_c_to_their_parent():
    """One that is interrupted between two cells would tell of it in a traceback of its own."""

    def hears(_):
        import signal

        return signal.getsignal(signal.SIGINT).name

    assert [heard for _, heard in ENGINES["joblib"](list(range(6)), hears, 2, None)] == ["SIG_IGN"] * 6


def test_a_release_folder_is_read_once_into_the_study(folder, tmp_path):
    cohort = make_cohort("tiny", seed=1)
    own = tmp_path / "own"
    own.mkdir()
    rows = ["participant_id\tsite\tdiagnosis\tage\tsex"]
    for i, subject in enumerate(cohort.subjects):
        np.save(own / f"{subject}.npy", cohort.series[i])
        rows.append(f"{subject}\t{cohort.sites[i]}\t{'patient' if cohort.labels[i] else 'control'}\t{30 + i % 7}\tM")
    (own / "participants.tsv").write_text("\n".join(rows) + "\n")
    run_study({"cohort": str(own), "methods": ["fc-logistic"], "seeds": [0]}, folder / "out")
    direct = folder / "direct"
    run_study({"cohort": str(folder / "tiny.cohort"), "methods": ["fc-logistic"], "seeds": [0]}, direct)
    assert content(folder / "out") == content(direct)
    assert (folder / "out" / "cohort.cohort").is_file()


def test_a_full_disk_stops_the_run_and_the_next_one_goes_on(folder, undisturbed, monkeypatch):
    import m2lgdg.study.cells as runner

    real, left = runner.write_text, [6]

    def filling(path, text):
        left[0] -= 1
        if left[0] < 0:
            raise InputError(f"cannot write {path}: No space left on device.")
        return real(path, text)

    monkeypatch.setattr(runner, "write_text", filling)
    with pytest.raises(InputError, match="No space left on device"):
        run_study(study(folder), folder / "out")
    assert len(list((folder / "out" / "cells").iterdir())) == 6
    monkeypatch.setattr(runner, "write_text", real)
    assert run_study(study(folder), folder / "out").reused == 6
    assert content(folder / "out") == undisturbed


def test_a_study_explains_what_it_is_asked_to(folder):
    """Every cell of the method itself, none of a variant or another method, and predictions are the same as without."""
    few = {"methods": ["prior", "fc-logistic"], "seeds": [0], "plugins": []}
    names = make_cohort("tiny", seed=1).site_names[:2]
    few |= {"targets": list(names)}
    run_study(study(folder, **few), folder / "plain")
    run_study(study(folder, **few, explain=["fc-logistic"]), folder / "out")
    assert content(folder / "plain") == content(folder / "out")
    cells = [json.loads(path.read_text()) for path in sorted((folder / "out" / "cells").iterdir())]
    explained = {path.name for path in (folder / "out" / "explanations").iterdir()}
    assert explained == {cell["key"] for cell in cells if (cell["method"], cell["variant"]) == ("fc-logistic", "")}
    assert len(explained) == 2
    for cell in cells:
        if cell["key"] in explained:
            (fold,) = leave_one_site_out(make_cohort("tiny", seed=1), [cell["target"]])
            wanted = explain(make("fc-logistic").fit(fold.source), fold.target)
            found = Explanation.load(folder / "out" / "explanations" / cell["key"])
            pd.testing.assert_frame_equal(found.rois, wanted.rois)
            assert found.about == json.loads(json.dumps(wanted.about)) | {"completeness": None, "tables": ["roi", "edges"]}
    assert not (folder / "plain" / "explanations").exists()


def test_a_larger_study_takes_over_the_cells_of_a_smaller_one(folder):
    """Nothing is trained twice, and nothing is taken that is not the same."""
    few = {"methods": ["prior", "fc-logistic", "slow-coin"], "targets": ["east", "west"], "variants": []}
    more = few | {"seeds": [0, 1, 2], "explain": ["fc-logistic"]}
    run_study(study(folder, **few, seeds=[0, 1]), folder / "plain")
    run_study(study(folder, **few | {"methods": ["fc-logistic"]}, explain=["fc-logistic"]), folder / "explained")
    summary = run_study(study(folder, **more), folder / "out", reuse=[folder / "plain", folder / "explained"])
    assert (summary.total, summary.taken, summary.done) == (10, 8, 2)  # fc-logistic comes with its explanations
    run_study(study(folder, **more), folder / "quiet")
    assert content(folder / "out") == content(folder / "quiet")
    kept, wanted = (sorted((folder / name / "explanations").rglob("*")) for name in ("out", "quiet"))
    assert [path.name for path in kept] == [path.name for path in wanted]
    assert run_study(study(folder, **more), folder / "out", reuse=[folder / "plain"]).taken == 0
    (folder / "explained" / "explanations").rename(folder / "gone")
    without = run_study(study(folder, **more), folder / "again", reuse=[folder / "explained"])
    assert (without.taken, without.done) == (0, 10)
    other = run_study(study(folder, **few, method={"slow-coin": {"pause": 0.01}}), folder / "other", reuse=[folder / "plain"])
    assert other.taken == 4  # prior and fc-logistic: the coin's field is another
    with pytest.raises(InputError, match="it has no cells, because it is not a study folder"):
        run_study(study(folder, **more), folder / "out", reuse=[folder / "nowhere"])


def test_what_cannot_be_explained_does_not_fail_a_study(folder):
    summary = run_study(study(folder, methods=["prior"], plugins=[], variants=[], explain=True), folder / "out")
    assert not summary.failed
    cells = [json.loads(path.read_text()) for path in (folder / "out" / "cells").iterdir()]
    assert {cell["unexplained"] for cell in cells} == {
        "method prior cannot be explained: it is neither a network nor a linear method."
    }
    with pytest.raises(InputError, match="key explain: fc-svm is not one of the study's methods"):
        run_study(study(folder, explain=["fc-svm"]), folder / "other")
