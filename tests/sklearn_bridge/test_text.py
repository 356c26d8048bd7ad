"""Estimators as text: what a study file or a model folder may name, and that nothing else is called."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.svm import SVC

import m2lgdg
from m2lgdg.model.folder import digest
from m2lgdg.model.model import Model
from m2lgdg.sklearn_bridge import text
from m2lgdg.sklearn_bridge.text import estimator_of, resolve


def made(path, **parameters):
    return {"class": path, "parameters": parameters}


def named(path):
    return {"import": path}


def pipeline(*steps):
    return made("sklearn.pipeline:Pipeline", steps=[{"tuple": [f"s{i}", one]} for i, one in enumerate(steps)])


TOUCH = "open('touched', 'w')"
SHELL = {"args": "touch touched", "shell": True}
FUNCTION = "sklearn.preprocessing:FunctionTransformer"
ATTACKS = {
    "subprocess": made("subprocess:Popen", **SHELL),
    "by a dot": made("subprocess.Popen", **SHELL),
    "os": made("os:system", command="touch touched"),
    "posix": made("posix:system", command="touch touched"),
    "eval": made("builtins:eval", source=TOUCH),
    "exec": made("builtins:exec", source=TOUCH),
    "open": made("builtins:open", file="touched", mode="w"),
    "import": made("builtins:__import__", name="antigravity"),
    "type": made("builtins:type", name="x"),
    "partial": made("functools:partial", func=named("os:system")),
    "module in scikit-learn": made("sklearn.utils.fixes:platform.os.system", command="touch touched"),
    "private module": made("sklearn.utils._testing:os.system", command="touch touched"),
    "joblib": made("sklearn.utils.parallel:joblib.load", filename="x"),
    "external copy": made("sklearn.externals.joblib:load", filename="x"),
    "tests": made("sklearn.tests.test_base:os.system", command="touch touched"),
    "numpy pickle": made("numpy:load", file="x.npy", allow_pickle=True),
    "numpy file": made("numpy:memmap", filename="touched", shape={"tuple": [1]}, mode="w+"),
    "numpy exec": made("numpy.testing:measure", code_str=TOUCH),
    "numpy f2py": made("numpy.f2py:os.system", command="touch touched"),
    "scipy": made("scipy.io:savemat", file_name="touched", mdict={"dict": [["a", 1]]}),
    "download": made("sklearn.datasets:fetch_openml", name="x"),
    "in a step": pipeline(made("subprocess:Popen", **SHELL), made("sklearn.svm:SVC")),
    "in an argument": made("sklearn.svm:SVC", kernel=made("subprocess:Popen", **SHELL)),
    "in a dict": made("sklearn.svm:SVC", class_weight={"dict": [[1, made("subprocess:Popen", **SHELL)]]}),
    "in a key": made("sklearn.svm:SVC", class_weight={"dict": [[made("subprocess:Popen", **SHELL), 1]]}),
    "in a tuple": made("sklearn.svm:SVC", C={"tuple": [made("subprocess:Popen", **SHELL)]}),
    "as a function": pipeline(made(FUNCTION, func=named("os:system")), made("sklearn.svm:SVC")),
    "method of an array": pipeline(
        made(FUNCTION, func=named("numpy:ndarray.tofile"), kw_args={"dict": [["fid", "touched"]]}), made("sklearn.svm:SVC")
    ),
    "function of strings": pipeline(made(FUNCTION, func=named("builtins:eval")), made("sklearn.svm:SVC")),
    "distribution": {"distribution": "os.system", "values": [["touch touched"], {"dict": []}]},
    "not a distribution": {"distribution": "f_oneway", "values": [[[1, 2]], {"dict": []}]},
    "objects": made("sklearn.svm:SVC", C={"array": [1], "dtype": "O"}),
    "long items": made("sklearn.svm:SVC", C={"array": ["a"], "dtype": "<U1000000000"}),
    "a cache": made("sklearn.pipeline:Pipeline", steps=[{"tuple": ["s", made("sklearn.svm:SVC")]}], memory="cache"),
    "a cache that is tried": made(
        "sklearn.model_selection:GridSearchCV", estimator=pipeline(made("sklearn.svm:SVC")),
        param_grid={"dict": [["memory", ["cache"]]]},
    ),
    "a class without parameters": {"class": "sklearn.svm:SVC"},
    "a class that is no text": made(["sklearn.svm:SVC"]),
    "deep": json.loads("[" * 400 + "]" * 400),
}  # fmt: skip
PATHS = ("os:getcwd", "subprocess:Popen", "builtins:input", "sklearn.datasets:load_iris", "sklearn:show_versions",
         "sklearn.utils._testing:os.getcwd", "numpy:show_config", "functools:cache", "antigravity:x",
         "numpy:float64")  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder; nothing was given to `from_sklearn` before, and no method stays."""
    monkeypatch.setattr(text, "_GIVEN", {})
    monkeypatch.chdir(tmp_path)
    before = set(m2lgdg.METHODS)
    yield tmp_path
    for name in set(m2lgdg.METHODS) - before:
        del m2lgdg.METHODS[name]


def refused_by_study(estimator):
    study = {"cohort": "no.cohort", "methods": ["x"], "method": {"x": {"estimator": estimator}}}
    with pytest.raises(m2lgdg.InputError, match=r"\[method.x\]"):
        m2lgdg.run_study(study, "out")
    assert not os.listdir()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_study_file_runs_nothing(name):
    refused_by_study(json.dumps(ATTACKS[name] if isinstance(ATTACKS[name], dict) else {"tuple": ATTACKS[name]}))


@pytest.mark.parametrize("path", PATHS)
def test_nor_by_an_import_path(path):
    before = set(sys.modules)
    refused_by_study(path)
    assert not {"antigravity", "sklearn.utils._testing"} & (set(sys.modules) - before)


def test_nor_by_parameters_of_a_study():
    study = {
        "cohort": "no.cohort",
        "methods": ["x"],
        "method": {"x": {"estimator": json.dumps(pipeline(made("sklearn.svm:SVC")))}},
    }
    study["method"]["x"]["parameters"] = {"memory": "cache"}
    with pytest.raises(m2lgdg.InputError, match="parameter memory is refused"):
        m2lgdg.run_study(study, "out")


def test_nor_do_features_of_a_study(tiny):
    tiny.save("tiny.cohort")
    for path in ("os:system", "lab.x:y", "builtins:eval", "sklearn.utils._testing:os.system"):
        study = {"cohort": "tiny.cohort", "methods": ["x"], "method": {"x": {"estimator": "sklearn.svm:SVC", "features": path}}}
        summary = m2lgdg.run_study(study | {"targets": ["east"]}, f"out-{path}")
        assert "refused" in str(summary.failed) or "is neither of scikit-learn" in str(summary.failed)


@pytest.mark.parametrize("name", ["subprocess", "in a step", "module in scikit-learn", "a cache"])
def test_a_model_folder_runs_nothing(name, tiny):
    fitted = m2lgdg.from_sklearn(SVC(), name="x").fit(tiny)
    fitted.save("model")
    about = json.loads(Path("model/method.json").read_text())
    about["fields"]["estimator"] = json.dumps(ATTACKS[name])
    hashes = about.pop("hashes")
    about["hashes"] = hashes | {"method.json": digest(about)}
    Path("model/method.json").write_text(json.dumps(about))
    del m2lgdg.METHODS["x"]
    np.testing.assert_array_equal(Model.load("model").predict_proba(tiny), fitted.predict_proba(tiny))  # it has the fitted one
    with pytest.raises(m2lgdg.InputError):
        Model.load("model").fit(tiny)
    assert sorted(os.listdir()) == ["model"]


def test_a_plugin_gives_what_it_defines_and_not_what_it_uses(here):
    (here / "lab.py").write_text(
        "import os, subprocess\nfrom subprocess import Popen, call\nfrom sklearn.svm import SVC\n"
        "def make():\n    return SVC(C=3)\nclass Own(SVC):\n    class Inner(SVC):\n        pass\nmodel = SVC(C=4)\n"
    )
    m2lgdg.METHODS.load_plugins(("lab.py",))
    for name, c in (("make", 3), ("SVC", 1), ("Own", 1), ("Own.Inner", 1), ("model", 4)):
        assert c == estimator_of(f"lab:{name}").C
    for name in (
        "os.system",
        "os",
        "subprocess.Popen",
        "Popen",
        "call",
        "make.__globals__",
        "Own.__init__.__globals__",
        "__builtins__",
    ):
        with pytest.raises(m2lgdg.InputError):
            estimator_of(json.dumps(made(f"lab:{name}", **SHELL)))
        with pytest.raises(m2lgdg.InputError):
            resolve(f"lab:{name}")
    with pytest.raises(m2lgdg.InputError, match="is not a class of estimators"):
        estimator_of(json.dumps(made("lab:make")))


def test_what_this_process_gives_is_known_to_it_alone(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "my_lab.py").write_text(
        "from sklearn.svm import SVC\nclass Own(SVC):\n    pass\ndef make():\n    return Own(C=2)\n"
    )
    with pytest.raises(m2lgdg.InputError, match="import it in a plugin file, and name that file in plugins or with --plugin"):
        estimator_of("my_lab:make")
    assert m2lgdg.from_sklearn("my_lab:make", name="x").estimator == "my_lab:make"
    import my_lab

    written = m2lgdg.from_sklearn(my_lab.Own(C=5), name="y").estimator
    assert estimator_of("my_lab:make").C == 2 and estimator_of(written).C == 5
    text._GIVEN.clear()  # as in another process
    for one in ("my_lab:make", written):
        with pytest.raises(m2lgdg.InputError, match="neither of scikit-learn nor of a loaded plugin"):
            estimator_of(one)


def test_usual_estimators_and_arguments():
    import scipy.stats
    from sklearn.ensemble import StackingClassifier, VotingClassifier
    from sklearn.feature_selection import SelectKBest, f_classif
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics.pairwise import rbf_kernel
    from sklearn.model_selection import GroupShuffleSplit, RandomizedSearchCV, ShuffleSplit, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

    for estimator in (
        make_pipeline(SelectKBest(f_classif, k=5), FunctionTransformer(np.nan_to_num), SVC(kernel=rbf_kernel)),
        GaussianProcessClassifier(2.0 * RBF(0.5)),
        make_pipeline(OneHotEncoder(dtype=np.float32), LogisticRegression()),
        *(RandomizedSearchCV(SVC(), {"C": scipy.stats.loguniform(1, 9)}, cv=cv)
          for cv in (StratifiedKFold(3), ShuffleSplit(2), GroupShuffleSplit(2))),
        StackingClassifier([("a", SVC()), ("b", VotingClassifier([("c", LogisticRegression())]))]),
    ):  # fmt: skip
        written = text.estimator_text(estimator)
        text._GIVEN.clear()
        assert text.estimator_text(estimator_of(written)) == written
