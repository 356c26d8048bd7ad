"""What a method declares, read from source files, and the commands that therefore need neither PyTorch nor scipy.stats."""

import json
import subprocess
import sys

import pytest

from m2lgdg import make, make_cohort
from m2lgdg.method import Method, is_network, method
from m2lgdg.registry import METHODS, declared

HEAVY = ("torch", "scipy.stats", "sklearn", "m2lgdg.deep")


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", METHODS.modules)
def test_what_the_source_declares_is_what_the_class_has(name):
    read, cls = declared(METHODS.modules[name], name), METHODS[name]
    assert list(read.fields.items()) == list(cls().fields().items())
    assert read.variants == cls.variants and list(read.variants) == list(cls.variants)
    assert read.stochastic == cls.stochastic


def test_declarations_import_no_network(tmp_path):
    code = f"""
import sys
from m2lgdg.registry import METHODS, declared
print(all(METHODS.declaration(name).fields is not None for name in METHODS))
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert run(code, tmp_path) == ["True", "[]"]


def test_a_class_that_is_not_plain_is_imported(tmp_path):
    code = """
import sys
import m2lgdg.registry
def refuse(module, name):
    raise ValueError(name)
m2lgdg.registry.declared = refuse
print(m2lgdg.registry.METHODS.declaration("fc-svm").variants)
print("m2lgdg.methods.linear" in sys.modules)
"""
    assert run(code, tmp_path) == ["{'phenotypes': {'phenotypes': True}}", "True"]


def test_a_plugin_is_described_by_its_class():
    @method("declared-by-a-test")
    class Own(Method):
        strength: float = 2.0
        variants = {"weak": {"strength": 0.5}}

    try:
        described = METHODS.declaration("declared-by-a-test")
        assert described.fields == {"atlases": "first", "strength": 2.0} and described.variants == {"weak": {"strength": 0.5}}
        assert described.stochastic
    finally:
        del METHODS["declared-by-a-test"]
    with pytest.raises(ValueError, match="no class of method nowhere"):
        declared("m2lgdg.methods.mldg", "nowhere")


def test_is_network():
    assert is_network(make("m2lgdg")) and not is_network(make("fc-svm"))


def test_predicting_with_a_linear_model_imports_no_network(tmp_path):
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    make_cohort("tiny").select([0]).save(tmp_path / "one.cohort")
    make("fc-logistic").fit(make_cohort("tiny"), source_distribution=True).save(tmp_path / "model")
    code = f"""
import sys
sys.argv = ["m2lgdg", "predict", "model", "one.cohort", "--out", "p.csv"]
from m2lgdg.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code or 0)
print([name for name in ("scipy.special", *{HEAVY}) if name in sys.modules])
"""
    assert run(code, tmp_path)[-2:] == ["0", "[]"]
    assert (tmp_path / "p.csv").read_text().splitlines()[0].startswith("subject,site,proba,decision")


def test_tables_of_networks_import_no_network(tmp_path):
    """Their variants and changed fields are in the tables all the same."""
    rows = ["method,variant,seed,target,subject,label,proba"]
    for variant in ("", "C1"):
        for seed in (0, 1):
            for site in ("a", "b"):
                rows += [f"m2lgdg,{variant},{seed},{site},s{i},{i % 2},{0.1 * i + 0.05 * seed:.2f}" for i in range(8)]
    (tmp_path / "predictions.csv").write_text("\n".join(rows) + "\n")
    study = {
        "methods": ["m2lgdg", "mldg"],
        "seeds": [0, 1],
        "targets": ["a", "b"],
        "variants": ["C1"],
        "method": {"m2lgdg": make("m2lgdg").fields() | {"precision": "bf16"}, "mldg": make("mldg").fields()},
    }
    (tmp_path / "study.json").write_text(json.dumps(study))
    code = f"""
import sys
sys.argv = ["m2lgdg", "table", "."]
from m2lgdg.cli import main
try:
    main()
except SystemExit as ended:
    pass
print([name for name in {HEAVY} if name in sys.modules])
"""
    printed = run(code, tmp_path)
    assert printed[-1] == "[]"
    assert 'Fields that differ from their defaults: m2lgdg (precision = "bf16").' in printed
    assert any("C1: decomposition = false" in line for line in printed)
    assert "Missing in these tables (failed or not run yet): 4 cells of mldg." in printed
