"""A result is stored only under the hash of the very data and code that made it, and one bad cell harms no other."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import METHODS, InputError, leave_one_site_out, make, make_cohort, read, run_study
from m2lgdg.registry import load_methods
from m2lgdg.study import runner
from m2lgdg.study.config import check_study
from m2lgdg.study.plan import make_cells
from m2lgdg.study.predictions import read_predictions

CONSTANT = """
import numpy as np
from m2lgdg.method import Method, method

@method("{name}")
class Constant(Method):
    def learn(self, source, *, seed, device, progress):
        self.state_["value"] = np.array([{value}])

    def score(self, target):
        return np.full(len(target), self.state_["value"][0])
"""

ACTS = '''
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from m2lgdg.method import Method, method

class Unusual(BaseException):
    pass

@method("acts")
class Acts(Method):
    """Does something where one site is the target, and predicts one half."""
    what: str = ""
    target: str = "east"

    def learn(self, source, *, seed, device, progress):
        self.state_["value"] = np.array([0.5])
        if self.target not in source.site_names:
            exec(self.what, globals() | {"self": self, "source": source})

    def score(self, target):
        return np.full(len(target), self.state_["value"][0])
'''


WAITS = """
import time
from pathlib import Path
import numpy as np
from m2lgdg.method import Method, method

@method("waits")
class Waits(Method):
    \"\"\"Waits until a file exists.\"\"\"
    path: str = ""

    def learn(self, source, *, seed, device, progress):
        self.state_["value"] = np.array([0.5])
        end = time.monotonic() + 120
        while not Path(self.path).exists():
            assert time.monotonic() < end
            time.sleep(0.01)

    def score(self, target):
        return np.full(len(target), self.state_["value"][0])
"""


@pytest.fixture
def folder(tmp_path):
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    (tmp_path / "acts.py").write_text(ACTS)
    return tmp_path


def study(folder, *methods, **changes):
    return {"cohort": str(folder / "tiny.cohort"), "methods": list(methods), "seeds": [0]} | changes


def acting(folder, what, *others, **changes):
    settings = {"plugins": [str(folder / "acts.py")], "method": {"acts": {"what": what}}} | changes
    return study(folder, "acts", *others, **settings)


def content(out):
    return (Path(out) / "predictions.csv").read_bytes()


def records(out):
    return {path.name: json.loads(path.read_text()) for path in (Path(out) / "cells").iterdir()}


def replaced(path, cohort, how):
    """Another cohort under the same path: by renaming a new file, or in place."""
    if how == "renamed":
        cohort.save(path)
    else:
        cohort.save(path.parent / "other.cohort")
        path.write_bytes((path.parent / "other.cohort").read_bytes())


@pytest.mark.parametrize("how", ["renamed", "in place"])
def test_a_second_study_of_one_process_sees_the_cohort_that_is_there(folder, how):
    plain = study(folder, "fc-logistic", targets=["east"])
    run_study(plain, folder / "old")
    other = make_cohort("tiny", seed=2)
    replaced(folder / "tiny.cohort", other, how)
    run_study(plain, folder / "new")
    (fold,) = leave_one_site_out(other, ["east"])
    proba = make("fc-logistic").fit(fold.source).predict_proba(fold.target)[:, 1]
    np.testing.assert_array_equal([row["proba"] for row in records(folder / "new").values()], [proba])
    assert json.loads((folder / "new" / "study.json").read_text())["cohort_hash"] == other.hash
    assert not np.allclose(read_predictions(folder / "old")["proba"], read_predictions(folder / "new")["proba"])


@pytest.mark.parametrize(("engine", "how"), [("serial", "renamed"), ("joblib", "in place"), ("dask", "in place")])
def test_a_cohort_replaced_while_a_study_runs_ends_it(folder, engine, how):
    """The last four cells wait for it, so that fast workers cannot be done before."""
    (folder / "waits.py").write_text(WAITS)
    go_on, path = folder / "go-on", folder / "tiny.cohort"
    waits = {"plugins": [str(folder / "waits.py")], "method": {"waits": {"path": str(go_on)}}}
    plain = study(folder, "fc-logistic", "prior", "waits", **waits)
    go_on.touch()
    run_study(plain, folder / "quiet")
    go_on.unlink()
    quiet = records(folder / "quiet")
    shutil.copy(path, folder / "kept")

    def watch(summary):
        if summary.done == 1:
            replaced(path, make_cohort("tiny", seed=2), how)
            go_on.touch()

    with pytest.raises(InputError) as ended:
        run_study(plain, folder / "out", engine=engine, jobs=2, watch=watch)
    done = records(folder / "out")
    begin, _, end = str(ended.value).partition(". ")
    hashes = [make_cohort("tiny", seed=seed).hash[:12] for seed in (2, 1)]
    different = f"the cohort has changed since the study began: {path} has the hash {hashes[0]}, not {hashes[1]}"
    halfway = f"the cohort has changed since the study began: {path} is damaged"  # read while it is being overwritten
    assert begin == different or (how == "in place" and begin.startswith(halfway))
    assert end == (
        f"{len(done)} of 12 cells are done; restore the file and run the same command again, or choose another --out for the "
        "changed cohort."
    )
    assert 1 <= len(done) < 12
    assert all(record["proba"] == quiet[name]["proba"] for name, record in done.items())  # of the first cohort
    assert len(read_predictions(folder / "out").drop_duplicates(["method", "target"])) == len(done)
    with pytest.raises(InputError, match="belongs to another study"):
        run_study(plain, folder / "out")
    shutil.copy(folder / "kept", path)
    assert run_study(plain, folder / "out").reused == len(done)
    assert content(folder / "out") == content(folder / "quiet")


@pytest.mark.parametrize(("what", "words"), [("", "does not exist"), ("path.write_bytes(content[:99])", "is damaged")])
def test_a_cohort_that_cannot_be_read_any_more_ends_the_run(folder, what, words, typed):
    """By the first cell of a plugin, so that the command itself shows what happens."""
    gone = f"path = Path({str(folder / 'tiny.cohort')!r}); content = path.read_bytes(); path.unlink(); {what}"
    (folder / "study.json").write_text(json.dumps(acting(folder, gone, "fc-logistic")))
    code, _, errors = typed("run", folder / "study.json", "--out", folder / "out")
    sentence = " ".join(errors.split())
    assert code == 2 and "Traceback" not in errors
    assert sentence.startswith("m2lgdg: the cohort has changed since the study began") and words in sentence
    assert [(record["method"], record["status"]) for record in records(folder / "out").values()] == [("acts", "done")]


def test_bytes_altered_in_place_reach_no_cell(folder):
    """The header of the file is as it was, but the cells use what was compared with the hash."""
    path = folder / "tiny.cohort"
    alter = f"path = Path({str(path)!r}); b = path.read_bytes(); "
    alter += "path.write_bytes(b[:-41000] + b[-21000:-1000] + b[-41000:-21000] + b[-1000:])"  # series of two subjects
    settings = acting(folder, alter, "fc-logistic")
    assert run_study(settings, folder / "out").failed == []
    with pytest.raises(InputError, match="was altered after it was written"):
        run_study(settings, folder / "again")
    found = read_predictions(folder / "out").query("method == 'fc-logistic'")
    for fold in leave_one_site_out(make_cohort("tiny", seed=1)):
        proba = make("fc-logistic").fit(fold.source).predict_proba(fold.target)[:, 1]
        np.testing.assert_allclose(found[found["target"] == fold.site]["proba"], proba, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_method_cannot_write_to_the_cohort_of_the_next_cell(folder, dtype):
    make_cohort("tiny", seed=1).save(folder / "tiny.cohort", dtype)
    what = "source.series[0].flags.writeable = True"
    summary = run_study(acting(folder, what, "fc-logistic"), folder / "out")
    assert summary.failed == [("acts, target east, seed 0", "ValueError: cannot set WRITEABLE flag to True of this array")]
    run_study(study(folder, "fc-logistic"), folder / "quiet")
    assert read_predictions(folder / "out").query("method == 'fc-logistic'").proba.tolist() == (
        read_predictions(folder / "quiet").proba.tolist()
    )


def test_a_study_with_its_own_inputs_can_be_repeated(folder):
    run_study(study(folder, "phenotype-logistic", inputs=["age"]), folder / "out")
    run_study(folder / "out" / "study.json", folder / "again")
    assert content(folder / "again") == content(folder / "out")
    whole = study(folder, "phenotype-logistic", inputs=["age"], cohort_hash=read(folder / "tiny.cohort").hash)
    assert run_study(whole, folder / "whole").done == 4  # a user knows the hash of the file
    with pytest.raises(InputError, match="has changed since the study was run"):
        run_study(whole | {"cohort_hash": "0" * 64}, folder / "none")


def constant(path, value, name="constant"):
    path.parent.mkdir(exist_ok=True)
    path.write_text(CONSTANT.format(name=name, value=value))
    return str(path)


def predicted(folder, out, plugin, **how):
    summary = run_study(study(folder, "constant", plugins=[plugin], targets=["east"]), folder / out, **how)
    assert summary.failed == []
    (value,) = read_predictions(folder / out)["proba"].unique()
    return value


def test_an_edited_plugin_is_loaded_again(folder):
    """Written in the same second with the same size, so that Python's own cache would not notice; and back again."""
    for i, value in enumerate([0.25, 0.75, 0.25]):
        assert predicted(folder, f"out{i}", constant(folder / "mine.py", value)) == value
    keys = [set(records(folder / f"out{i}")) for i in range(3)]
    assert keys[0] == keys[2] != keys[1]
    constant(folder / "mine.py", 0.5, "renamed")
    with pytest.raises(InputError, match="method constant is not known"):
        predicted(folder, "none", str(folder / "mine.py"))


def test_two_plugins_of_one_name_are_both_loaded(folder):
    first = constant(folder / "a" / "mine.py", 0.25, "constant-a")
    second = constant(folder / "b" / "mine.py", 0.75, "constant-b")
    run_study(study(folder, "constant-a", "constant-b", plugins=[first, second, first]), folder / "out")
    assert read_predictions(folder / "out").groupby("method")["proba"].unique().map(list).to_dict() == {
        "constant-a": [0.25],
        "constant-b": [0.75],
    }
    again = constant(folder / "b" / "mine.py", 0.5, "constant-a")
    with pytest.raises(InputError, match=r"method constant-a is already registered by .*a.mine\.py"):
        load_methods((first, again))
    assert METHODS["constant-a"]().fit(make_cohort("tiny")).state_["value"] == 0.25  # all or none
    load_methods((again,))
    assert METHODS["constant-a"]().fit(make_cohort("tiny")).state_["value"] == 0.5
    with pytest.raises(InputError, match=r"method prior is already registered by m2lgdg\.methods\."):
        load_methods((constant(folder / "prior.py", 0.5, "prior"),))


def test_a_method_of_a_plugin_that_is_not_listed_is_refused(folder):
    """Its code would not be part of the key."""
    plugin = constant(folder / "mine.py", 0.25)
    predicted(folder, "out", plugin)
    with pytest.raises(InputError, match=r"method constant is defined in .*mine\.py; add this file to the key plugins"):
        run_study(study(folder, "constant"), folder / "none")
    with pytest.raises(InputError, match=r"mine\.py cannot be imported \(GeneratorExit"):
        Path(plugin).write_text("raise GeneratorExit")
        load_methods((plugin,))


@pytest.mark.parametrize("engine", ["serial", "joblib"])
def test_a_plugin_edited_while_a_study_runs_ends_it(folder, engine):
    plugin = constant(folder / "mine.py", 0.25)
    settings = study(folder, "constant", "prior", plugins=[plugin])

    def watch(summary):
        if summary.done == 1:
            constant(folder / "mine.py", 0.75)

    with pytest.raises(InputError, match=r"was not run: the code has changed since the study began.*\d of 8 cells are done"):
        run_study(settings, folder / "out", engine=engine, jobs=2, watch=watch)
    old = records(folder / "out").values()
    assert {value for record in old if record["method"] == "constant" for value in record["proba"]} <= {0.25}
    run_study(settings, folder / "out")
    assert set(read_predictions(folder / "out").query("method == 'constant'")["proba"]) == {0.75}


def test_a_worker_with_other_code_writes_no_record(folder):
    checked = check_study(study(folder, "prior"), "study")
    cohort = read(folder / "tiny.cohort")
    cell = make_cells(checked, cohort)[0]
    context = runner.CellContext(str(folder / "out"), checked.cohort, cohort.inputs, False, (), "cpu", 1, cohort.hash)
    with pytest.raises(runner.RunEnds, match="or a worker has other code"):
        runner.run_cell(replace(cell, code="other"), context)
    assert not (folder / "out").exists()
    assert runner.run_cell(cell, context) is None
    (record,) = records(folder / "out").values()
    assert "code" not in record


def test_a_cluster_that_lives_on_sees_new_data_and_new_code(folder, monkeypatch):
    """And a plugin whose path is relative to the working folder, which is not that of the workers."""
    from dask.distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster:
        monkeypatch.chdir(folder)
        for i, value in enumerate([0.25, 0.75]):
            make_cohort("tiny", seed=i).save(folder / "tiny.cohort")
            constant(folder / "mine.py", value)
            settings = study(folder, "constant", "fc-logistic", plugins=["mine.py"], targets=["east"])
            assert run_study(settings, folder / f"cluster{i}", scheduler=cluster.scheduler_address).failed == []
            run_study(settings, folder / f"here{i}")
            assert content(folder / f"cluster{i}") == content(folder / f"here{i}")
            assert set(read_predictions(folder / f"here{i}").query("method == 'constant'")["proba"]) == {value}


def test_the_order_of_subjects_and_columns_changes_nothing(folder):
    cohort = make_cohort("tiny", seed=1)
    order = np.random.default_rng(0).permutation(len(cohort))
    shuffled = cohort.select(order)
    replace(shuffled, phenotypes=shuffled.phenotypes[["age", "education", "sex"]]).save(folder / "shuffled.cohort")
    small = {"method": {"mm-gtunets": {"epochs": 2, "warmup": 1}}, "targets": ["east"]}
    plain = study(folder, "mm-gtunets", "fc-logistic", **small)
    run_study(plain, folder / "out")
    run_study(plain | {"cohort": str(folder / "shuffled.cohort")}, folder / "other")
    assert content(folder / "out") == content(folder / "other")
    assert set(records(folder / "out")) == set(records(folder / "other"))
    assert read_predictions(folder / "out")["subject"].tolist()[:10] == sorted(cohort.select(sites=["east"]).subjects.tolist())


FACTS = """
self.facts_ |= {
    "penalties": np.array([1.5, np.nan]), "parameters": np.int64(7), "share": {"fc": np.float32(0.25), 2: float("nan")},
    "history": ({"ce": np.float64(0.5), "val_auc": np.nan},), "notes": np.array(["a"]), "validation": np.bool_(True),
}
"""


def test_facts_of_numpy_are_stored_as_plain_values(folder):
    assert run_study(acting(folder, FACTS, targets=["east"]), folder / "out").failed == []
    (path,) = (folder / "out" / "cells").iterdir()
    (record,) = records(folder / "out").values()
    assert record["learned"] == {
        "penalties": [1.5, None],
        "history": [{"ce": 0.5}],
        "terms": {"ce": {"epochs": 1, "acted": 1, "mean": 0.5, "smallest": 0.5, "largest": 0.5}},
        "parameters": 7,
        "validation": True,
        "share": {"fc": 0.25},
        "notes": ["a"],
    }
    assert "NaN" not in path.read_text()


FAILURES = {
    "self.facts_['notes'] = {1, 2}": "fact notes holds a value of type set, which cannot be stored; use numbers, text",
    "self.facts_['share'] = [object()]": "fact share holds a value of type object, which cannot be stored",
    "self.facts_['penalties'] = np.array([1j])": "fact penalties holds a value of type ndarray",
    "notes = []; notes.append(notes); self.facts_['notes'] = notes": "RecursionError",
    "self.facts_['parameters'] = 10 ** 5000": "ValueError: Exceeds the limit",
    "self.facts_ = None": "TypeError",
    "self.predict_proba = lambda target: np.full((len(target), 2), np.nan)": "did not give one probability between 0 and 1",
    "self.predict_proba = lambda target: np.full((2, 2), 0.5)": "did not give one probability between 0 and 1",
    "sys.exit(0)": "SystemExit: 0",
    "raise Unusual('odd')": "Unusual: odd",
    "raise GeneratorExit": "GeneratorExit: ",
}


def test_what_a_method_raises_or_cannot_store_fails_one_cell(folder, typed):
    """A sweep over what it does, so that each is a cell of one study."""
    sweep = {"acts": {"what": list(FAILURES)}}
    settings = acting(folder, "", "prior", sweep=sweep, targets=["east"])
    (folder / "study.json").write_text(json.dumps(settings))
    code, text, errors = typed("run", folder / "study.json", "--out", folder / "out")
    assert code == 1 and "2 of 13 cells done" in text and "Traceback" not in errors
    assert "failed: acts (what=sys.exit(0)), target east, seed 0: SystemExit: 0" in errors
    failures = pd.read_csv(folder / "out" / "failures.csv")
    assert failures["variant"].tolist() == [f"what={what}" for what in FAILURES]
    for reason, words in zip(failures["reason"], FAILURES.values(), strict=True):
        assert words in reason
    again = run_study(settings, folder / "out")
    assert (again.reused, len(again.failed)) == (2, len(FAILURES))


@pytest.mark.parametrize(
    ("engine", "call"), [("serial", "os._exit"), ("serial", "leave"), ("joblib", "leave"), ("dask", "leave")]
)
def test_a_method_that_ends_the_process_fails_its_own_cell_only(folder, typed, engine, call):
    """Otherwise a serial run would end with 0 as if all were done. Also under a name that the plugin gave it."""
    text = ACTS.replace("import numpy", "from os import _exit as leave\nimport numpy", 1)
    (folder / "acts.py").write_text(text)
    child = (
        "child = os.fork()\nif not child:\n    os._exit(7)\nassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    settings = acting(folder, f"{child}{call}(0)", "prior")
    (folder / "study.json").write_text(json.dumps(settings))
    words = ("run", folder / "study.json", "--out", folder / "out", "--engine", engine, "--jobs", "2")
    code, text, errors = typed(*words)
    assert code == 1 and "Traceback" not in errors and "memory leak" not in errors
    assert "7 of 8 cells done" in text
    failures = pd.read_csv(folder / "out" / "failures.csv")
    assert failures[["method", "target"]].to_numpy().tolist() == [["acts", "east"]]
    assert failures["reason"].tolist() == ["SystemExit: os._exit(0) was called"]
    assert len(read_predictions(folder / "out").drop_duplicates(["method", "target"])) == 7


@pytest.mark.long
def test_a_dask_worker_that_ends_for_good_does_not_make_the_run_wait(folder, monkeypatch):
    """By compiled code, which no Python function can stop."""
    monkeypatch.setattr("m2lgdg.study.engines.PATIENCE", 5)
    ends = "import ctypes; ctypes.CDLL(None)._exit(0)"
    summary = run_study(acting(folder, ends, targets=["east"]), folder / "out", engine="dask", jobs=1)
    ((_, reason),) = summary.failed
    assert reason.startswith("worker lost")
