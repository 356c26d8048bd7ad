"""Code that is not installed: a plugin's helpers are hashed, loaded again when they change, and never from old bytecode."""

import os
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from m2lgdg import METHODS, InputError, make_cohort, own_code, run_study
from m2lgdg.method import method
from m2lgdg.own_code import code_of_objects, imported_sources, memory_of_objects, refuse_not_covered, staying
from m2lgdg.study.predictions import read_predictions

PLUGIN = """
import numpy as np
from m2lgdg.method import Method, method
{above}

@method("helped")
class Helped(Method):
    def learn(self, source, *, seed, device, progress):
        {inside}
        self.state_["value"] = np.array([value()])

    def score(self, target):
        return np.full(len(target), self.state_["value"][0])
"""
WAYS = {
    "at the top": ("from helper_of_test import value", ""),
    "in the fit": ("", "from helper_of_test import value"),
    "through a package": ("from lab_of_test.tools import value", ""),
    "from a folder it adds": (
        "import sys; sys.path.insert(0, {elsewhere!r}); from other_of_test import value",
        "",
    ),
    "by import_module": ("import importlib; value = importlib.import_module('helper_of_test').value", ""),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    (tmp_path / "lab_of_test").mkdir()
    (tmp_path / "lab_of_test" / "__init__.py").write_text("")
    (tmp_path / "lab_of_test" / "tools.py").write_text("from .deep import value")
    (tmp_path / "lab_of_test" / "deep.py").write_text("from helper_of_test import value")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other_of_test.py").write_text("from helper_of_test import value")
    written(tmp_path, 0.25)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if "_of_test" in name]:
        del sys.modules[name]


def written(folder, value):
    (folder / "helper_of_test.py").write_text(f"def value():\n    return {value}\n")


def study(folder, plugin="mine.py", **changes):
    given = {"cohort": str(folder / "tiny.cohort"), "methods": ["helped"], "targets": ["east"], "seeds": [0]}
    return given | {"plugins": [str(folder / plugin)]} | changes


def predicted(folder, out, **how):
    summary = run_study(study(folder), folder / out, **how)
    assert summary.failed == []
    (value,) = read_predictions(folder / out)["proba"].unique()
    return value


@pytest.mark.parametrize("way", WAYS)
def test_an_edited_helper_gives_its_own_numbers_under_its_own_key(folder, way):
    """Written in the same second with the same size, in one process and one folder; and back again."""
    above, inside = (text.format(elsewhere=str(folder / "elsewhere")) for text in WAYS[way])
    (folder / "mine.py").write_text(PLUGIN.format(above=above, inside=inside))
    for value, cells in [(0.25, 1), (0.75, 2), (0.25, 2)]:
        written(folder, value)
        assert predicted(folder, "out") == value
        assert len(list((folder / "out" / "cells").iterdir())) == cells


def test_a_module_beside_the_plugin_is_found_and_covered(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(folder)])
    (folder / "mine.py").write_text(PLUGIN.format(above="", inside="from helper_of_test import value"))
    for i, value in enumerate([0.25, 0.75]):
        written(folder, value)
        assert predicted(folder, f"out{i}") == predicted(folder, "jobs", engine="joblib", jobs=2) == value


def test_a_helper_edited_while_a_study_runs_ends_it(folder):
    (folder / "mine.py").write_text(PLUGIN.format(above="from helper_of_test import value", inside=""))
    whole = study(folder, targets=None)
    with pytest.raises(InputError, match="the code has changed since the study began"):
        run_study(whole, folder / "out", watch=lambda state: state.done == 1 and written(folder, 0.75))
    assert set(read_predictions(folder / "out")["proba"]) == {0.25}
    run_study(whole, folder / "out", engine="joblib", jobs=2)
    assert set(read_predictions(folder / "out")["proba"]) == {0.75}


def test_two_plugins_share_a_helper_in_its_present_version(folder):
    text = PLUGIN.format(above="from helper_of_test import value", inside="")
    (folder / "mine.py").write_text(text)
    (folder / "other.py").write_text(text.replace('"helped"', '"helped-too"'))
    plugins = [str(folder / name) for name in ("mine.py", "other.py")]
    for i, value in enumerate([0.25, 0.75]):
        written(folder, value)
        run_study(study(folder, plugins=plugins, methods=["helped", "helped-too"]), folder / f"out{i}")
        assert set(read_predictions(folder / f"out{i}")["proba"]) == {value}


def test_compiled_code_that_was_replaced_is_refused(folder, monkeypatch):
    """It cannot be loaded again in one process; a file of bytecode stands in for it."""
    import py_compile

    (folder / "mine.py").write_text(PLUGIN.format(above="from compiled_of_test import value", inside=""))
    for value in (0.25, 0.75):
        written(folder, value)
        py_compile.compile(str(folder / "helper_of_test.py"), cfile=str(folder / "compiled_of_test.pyc"), doraise=True)
        if value == 0.25:
            assert predicted(folder, "out") == 0.25
    with pytest.raises(InputError, match=r"compiled_of_test.pyc has changed since this process loaded it; restart Python"):
        run_study(study(folder), folder / "new")


def test_a_name_made_while_it_runs_is_refused(folder):
    """No key could cover it: when the plugin is loaded, and when its method is fitted."""
    hidden = "import importlib; value = importlib.import_module('helper' + '_of_test').value"
    (folder / "mine.py").write_text(PLUGIN.format(above=hidden, inside=""))
    with pytest.raises(InputError, match=r"imports .*helper_of_test.py by a name that is made while it runs"):
        run_study(study(folder), folder / "out")
    (folder / "mine.py").write_text(PLUGIN.format(above="", inside=hidden))
    for _ in range(2):
        ((_, reason),) = run_study(study(folder), folder / "out").failed
        assert "by a name that is made while it runs" in reason and "write `import helper_of_test`" in reason


def test_imports_are_found_wherever_they_stand(folder):
    def names(text):
        return list(imported_sources(text.encode()))

    assert names("import lab_of_test.tools as t") == ["helper_of_test", "lab_of_test", "lab_of_test.deep", "lab_of_test.tools"]
    assert names("def f():\n    from lab_of_test import deep") == ["helper_of_test", "lab_of_test", "lab_of_test.deep"]
    assert names("import numpy, json, m2lgdg, sklearn.svm, no_such_module") == []
    assert names("not python at all (") == []


def from_a_module(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    import importlib

    return importlib.import_module(name)


def test_a_class_of_a_module_counts_with_what_its_file_imports(folder):
    base = from_a_module(folder, "base_of_test", "class Base:\n    pass\n").Base
    code = code_of_objects([base], "it")
    text = "from base_of_test import Base\nimport helper_of_test\nclass Own(Base):\n    pass\n"
    own = from_a_module(folder, "own_of_test", text).Own
    found = code_of_objects([own], "it")
    assert code.items() < found.items()
    assert {name.split()[0] for name in found} == {"base_of_test", "own_of_test", "helper_of_test"}
    written(folder, 0.5)
    assert code_of_objects([own], "it") != found
    assert code_of_objects([LogisticRegression, np.exp, METHODS["prior"]], "it") == {}


def executed(folder, text):
    """Module with a file whose content has run."""
    (folder / "own_of_test.py").write_text(text)
    own = types.ModuleType("own_of_test")
    own.__file__ = str(folder / "own_of_test.py")
    sys.modules["own_of_test"] = own
    exec(compile(text, own.__file__, "exec"), vars(own))
    return own


@pytest.mark.parametrize("text", ["Level = {}", "def Level():\n    return {}", "class Level:\n    value = {}"])
def test_a_module_that_was_edited_after_it_was_imported_counts_as_neither(folder, text):
    """What runs is the old code, while the file has the new one: the key is of another process with neither."""
    keys, using = [], "class Own:\n    def use(self):\n        return Level\n"
    for before, after in [(0.25, 0.25), (0.75, 0.75), (0.25, 0.75)]:
        own = executed(folder, using + text.format(before))
        (folder / "own_of_test.py").write_text(using + text.format(after))
        keys.append((*code_of_objects([own.Own], "it").items(), memory_of_objects([own.Own])))
    assert len(set(keys)) == 3


USES = """
import functools
import numpy as np
import helper_of_test

scale, table, array, unused = 1.0, {{"a": [1, 2]}}, np.arange(3), {unused}
table["itself"] = table

def inner(x, by=1.0):
    return outer(x) if x else scale

def outer(x):
    return [one for one in map(lambda y: y * table["a"][0], x)] + [inner(0), array, x.unused]

@functools.lru_cache
def kept():
    return helper_of_test.value()

class Base:
    @staticmethod
    def level():
        return kept()

class Own(Base):
    def __init__(self):
        self.at = inner

def closed(value):
    return lambda x: value
"""


def test_memory_is_of_what_an_object_uses_now(folder):
    """Nothing else of its module counts, so that a time or a temporary folder does not; functions may call each other."""
    own = executed(folder, USES.format(unused=1))
    first = memory_of_objects([own.Own])
    own.unused = 2
    assert memory_of_objects([own.Own]) == first == memory_of_objects([executed(folder, USES.format(unused=3)).Own])
    own = sys.modules["own_of_test"]
    changes = [
        lambda: setattr(own, "scale", 2.0),
        lambda: own.table["a"].append(3),
        lambda: own.array.__setitem__(0, 5),
        lambda: setattr(own.inner, "__defaults__", (2.0,)),
        lambda: setattr(own.Base, "more", 1),
        lambda: setattr(own.helper_of_test, "value", lambda: 0.5),
        lambda: setattr(own.Own, "__init__", lambda self: None),
    ]
    found = [first]
    for change in changes:
        change()
        found.append(memory_of_objects([own.Own]))
    assert len(set(found)) == len(found)
    assert memory_of_objects([own.closed(1)]) != memory_of_objects([own.closed(2)])
    assert memory_of_objects([own.closed(object())]) == memory_of_objects([own.closed(object())])


SCRIPT = """
import sys, time
import helper_of_test
from sklearn.linear_model import LogisticRegression
from m2lgdg import METHODS, InputError, from_sklearn, method, run_study

started, SCALE, calls, kept = time.time(), 1.0, 0, {}

def feats(cohort):
    global calls
    calls += 1
    kept[calls] = calls
    return cohort.series[0].std(0) * SCALE

class Mine(LogisticRegression):
    pass

@method.method("of-script")
class OfScript(METHODS["prior"]):
    "Own."

def plain(cohort):
    return cohort.series[0].std(0) * SCALE

given = {
    "feats": lambda: from_sklearn(LogisticRegression(max_iter=3000), features=feats, name="lrf"),
    "plain": lambda: from_sklearn(LogisticRegression(max_iter=3000), features=plain, name="lrf"),
    "module": lambda: from_sklearn(LogisticRegression(max_iter=3000), features=helper_of_test.value, name="lrf"),
    "class": lambda: from_sklearn(Mine(), name="mine"),
    "method": lambda: OfScript(),
}[sys.argv[1]]()
for SCALE in map(float, sys.argv[3:]):
    study = {"cohort": "tiny.cohort", "methods": ["prior", given], "targets": ["east", "west"], "seeds": [0]}
    try:
        summary = run_study(study, "out", jobs=int(sys.argv[2]))
        print(summary.done, summary.reused, summary.failed)
    except InputError as error:
        print(error)
"""


def printed(folder, *arguments):
    (folder / "script.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, "script.py", *arguments], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_script_is_reused_unless_a_global_that_it_uses_changes(folder):
    assert printed(folder, "plain", "1", "1.0", "50.0", "1.0") == ["4 0 []", "2 2 []", "0 4 []"]
    assert printed(folder, "plain", "1", "50.0") == ["0 4 []"]


def test_globals_that_a_method_changes_itself_do_not_end_the_study(folder):
    assert printed(folder, "feats", "1", "1.0") == ["4 0 []"]
    assert printed(folder, "feats", "1", "1.0") == ["0 4 []"]


@pytest.mark.parametrize(("what", "name"), [("feats", "lrf"), ("module", "lrf"), ("class", "mine"), ("method", "of-script")])
def test_code_of_the_script_is_refused_for_other_processes(folder, what, name):
    """A worker loads plugins only."""
    (line,) = printed(folder, what, "2", "1.0")
    assert line.startswith(f"method {name} is defined in the script itself or in a module of it, which other processes do not")
    assert line.endswith("put it into a plugin file, or run with one job.")
    assert not list(folder.glob("out/cells/*"))


@pytest.mark.parametrize("by", ["method", "from_sklearn"])
def test_what_has_no_file_is_refused_in_studies(folder, by, monkeypatch):
    """As in a notebook, whose module has none."""
    from m2lgdg import from_sklearn

    notebook = types.ModuleType("notebook_of_test")
    monkeypatch.setitem(sys.modules, "notebook_of_test", notebook)
    if by == "method":
        cls = type("Own", (METHODS["prior"],), {"__module__": "notebook_of_test", "__doc__": "Own."})
        given = method("own-of-notebook")(cls)()
    else:
        own = type("OwnLogistic", (LogisticRegression,), {"__module__": "notebook_of_test"})
        notebook.OwnLogistic = own
        given = from_sklearn(own(), name="own-of-notebook")
    try:
        with pytest.raises(InputError, match="method own-of-notebook is defined in an interactive session"):
            run_study({"cohort": make_cohort("tiny"), "methods": [given], "targets": ["east"]}, folder / "out")
    finally:
        METHODS.pop("own-of-notebook", None)
    assert not (folder / "out").exists()


def test_a_process_that_a_method_starts_may_end():
    with staying():
        with pytest.raises(SystemExit, match=r"os\._exit\(0\) was called"):
            os._exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks in a process with threads
            child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os._exit is own_code._real_exit


def test_the_script_that_a_worker_imports_again_is_not_refused(tmp_path, monkeypatch):
    script = types.ModuleType("__mp_main__")
    script.__file__ = str(tmp_path / "m2lgdg")
    before = set(sys.modules) - {"__mp_main__"}
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    refuse_not_covered(before, "method fc-svm")
    assert "__mp_main__" in sys.modules


def test_a_module_that_an_installed_package_makes_is_not_refused(tmp_path, monkeypatch):
    """torch.classes names a file that is nowhere; a file of the user stays refused under any name."""
    monkeypatch.chdir(tmp_path)
    made = types.ModuleType("numpy.made_of_test")
    made.__file__ = "_made_of_test.py"
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    refuse_not_covered(before, "method fc-svm")
    (tmp_path / made.__file__).write_text("")
    with pytest.raises(InputError, match=r"_made_of_test\.py by a name that is made while it runs"):
        refuse_not_covered(before, "method fc-svm")
    monkeypatch.setitem(sys.modules, "made_of_test", made)  # not below an installed package
    (tmp_path / made.__file__).unlink()
    with pytest.raises(InputError, match="write `import made_of_test`"):
        refuse_not_covered(before, "method fc-svm")
