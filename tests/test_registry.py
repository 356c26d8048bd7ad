"""The registry: names and roles from the files of the package, imported no sooner than asked for, and what methods declare."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import m2lgdg.methods
from m2lgdg import METHODS, InputError, make, make_cohort
from m2lgdg.method import Method, is_network, method
from m2lgdg.registry import PAPER, Registry, create, find

HEAVY = ("torch", "scipy.stats", "scipy.special", "sklearn", "m2lgdg.deep", "m2lgdg.methods.m2lgdg")


def test_every_method_of_the_package_is_found_where_it_is():
    for module in pkgutil.iter_modules(m2lgdg.methods.__path__):
        importlib.import_module(f"m2lgdg.methods.{module.name}")
    own = {name: cls for name, cls in METHODS._loaded.items() if cls.__module__.startswith("m2lgdg.methods.")}
    assert METHODS.modules == {name: cls.__module__ for name, cls in own.items()}
    assert {name: role for name, (_, role) in METHODS._declared.items()} == {name: cls.role for name, cls in own.items()}
    assert set(PAPER) <= set(METHODS) and len(METHODS) == len(list(METHODS)) >= 28
    assert all(METHODS[name].name == name for name in METHODS)


def test_a_linear_model_waits_for_no_network(tmp_path):
    """Neither PyTorch nor scipy's statistics: three seconds of every prediction."""
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    make_cohort("tiny").select([0]).save(tmp_path / "one.cohort")
    make("connectome-adaptive").fit(make_cohort("tiny"), source_distribution=True).save(tmp_path / "model")
    code = f"""
import sys
sys.argv = ["m2lgdg", "predict", "model", "one.cohort", "--out", "p.csv"]
from m2lgdg.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code or 0)
print([name for name in {HEAVY} if name in sys.modules])
import m2lgdg
m2lgdg.make("m2lgdg")
print("torch" in sys.modules)
"""
    reported = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert reported.stdout.splitlines()[-3:] == ["0", "[]", "True"]
    assert (tmp_path / "p.csv").read_text().startswith("subject,site,proba,decision")


def test_a_name_is_taken_once():
    with pytest.raises(InputError, match=r"method fc-svm is already registered by m2lgdg\.methods\.linear"):
        method("fc-svm")(type("Other", (Method,), {}))
    fresh = Registry()
    with pytest.raises(InputError, match=r"already registered by m2lgdg\.methods\.mldg"):
        fresh["mldg"] = Method  # though its file was not imported for it yet
    fresh["own"] = Method
    assert "own" in fresh and list(fresh)[-1] == "own"
    del fresh["own"]
    assert "own" not in fresh
    with pytest.raises(KeyError):
        fresh["own"]
    with pytest.raises(InputError, match="method fc-swm is not known; did you mean fc-svm"):
        make("fc-swm")


def test_a_variant_by_its_name_and_other_fields_on_top():
    plain, small, variants = create("m2lgdg"), make("m2lgdg", "small", epochs=3), find("m2lgdg").variants
    assert small.fields() == plain.fields() | variants["small"] | {"epochs": 3}
    assert make("m2lgdg", variant="C1").fields() == plain.fields() | variants["C1"]
    with pytest.raises(InputError, match="method m2lgdg has no variant smal; did you mean small"):
        make("m2lgdg", variant="smal")
    with pytest.raises(InputError, match="method prior has no variant small; available: none"):
        make("prior", variant="small")


def test_a_method_is_declared_by_plain_class_attributes():
    @method("declared-by-a-test", role="peer")
    class Own(Method):
        """Of a test.

        More.
        """

        strength: float = 2.0
        variants = {"weak": {"strength": 0.5}}
        stochastic = False

    try:
        declared = METHODS.declaration("declared-by-a-test")
        assert declared.fields == {"atlases": "first", "strength": 2.0} and declared.variants == {"weak": {"strength": 0.5}}
        assert (declared.stochastic, declared.summary, declared.role) == (False, "Of a test.", "peer")
        assert "declared-by-a-test" in METHODS.with_role("peer")
    finally:
        del METHODS["declared-by-a-test"]


def test_is_network():
    assert is_network(make("m2lgdg")) and is_network(create("m2lgdg")) and not is_network(make("fc-svm"))
