"""The plan of a study: what is part of a cell's key, and what tables know of methods without their classes."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import m2lgdg
from m2lgdg.cohort import Parcellation
from m2lgdg.method import need_scans
from m2lgdg.registry import METHODS
from m2lgdg.storage import InputError
from m2lgdg.study import plan
from m2lgdg.study.plan import (
    METHODS_FILE,
    PACKAGE,
    code_version,
    declarations,
    explaining_code_version,
    package_code,
    write_declarations,
)

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def folder(tmp_path):
    study = {"cohort": m2lgdg.make_cohort("tiny"), "methods": ["prior", "fc-logistic"], "targets": ["east"]}
    m2lgdg.run_study(study, tmp_path / "out")
    return tmp_path / "out"


def test_a_run_writes_what_its_methods_declare(folder):
    found = declarations(folder)
    assert list(found) == ["prior", "fc-logistic"]
    cls = METHODS["fc-logistic"]
    assert found["fc-logistic"].fields == json.loads(json.dumps(cls().fields()))
    assert found["fc-logistic"].variants == json.loads(json.dumps(cls.variants))
    assert (found["prior"].stochastic, found["prior"].role) == (False, METHODS["prior"].role)


def test_a_folder_of_0_1_0_is_declared_by_the_classes(folder):
    stored = declarations(folder)
    (folder / METHODS_FILE).unlink()
    fallback = declarations(folder)
    assert {name: one.stochastic for name, one in fallback.items()} == {name: one.stochastic for name, one in stored.items()}
    study = json.loads((folder / "study.json").read_text())
    del study["method"]["fc-logistic"]["phenotypes"]  # a field that the method did not have then
    (folder / "study.json").write_text(json.dumps(study))
    assert "phenotypes" not in declarations(folder)["fc-logistic"].variants


def test_a_changed_declaration_is_written_again_and_a_damaged_one_is_refused(folder):
    path = folder / METHODS_FILE
    for text in ("{", "[]", '{"prior": {"fields": 1}}', '{"prior": {"fields": {}, "variants": {"a": 1}, "stochastic": true}}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"methods.json is damaged"):
            declarations(folder)
    write_declarations(folder, ["prior"])
    assert list(declarations(folder)) == ["prior"]


@pytest.mark.parametrize("folder", sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("study.json")))
def test_committed_results_declare_their_methods(folder):
    study = json.loads((RESULTS / folder / "study.json").read_text())
    assert set(study["methods"]) == set(declarations(RESULTS / folder))
    assert (RESULTS / folder / METHODS_FILE).is_file()


MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    to = tmp_path_factory.mktemp("copy") / "m2lgdg"
    shutil.copytree(PACKAGE, to, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return to


def versions(package, plugins=()):
    package_code.cache_clear()
    explaining_code_version.cache_clear()
    return code_version(tuple(plugins), package), explaining_code_version(package)


def test_a_copy_has_the_key_of_the_package(copy):
    assert versions(copy) == versions(PACKAGE)


def test_an_edit_changes_the_key_where_it_can_change_a_prediction(copy):
    before = versions(copy)
    ends = {module.parts[:-1]: module for module in MODULES}.values()  # one of each folder; all of the root
    for module in [module for module in MODULES if len(module.parts) == 1 or module in ends]:
        text = (copy / module).read_text()
        (copy / module).write_text(f"{text}\n# edited\n")
        after = versions(copy)
        (copy / module).write_text(text)
        predicts = len(module.parts) == 1 or module.parts[0] in ("methods", "fast", "model", "sklearn_bridge", "study")
        changed = (after[0] != before[0], after[1] != before[1])
        assert changed == (predicts, len(module.parts) == 1 or module.parts[0] == "explain"), module
    assert versions(copy) == before


def test_a_new_or_renamed_module_changes_the_key(copy):
    before = versions(copy)
    new = copy / "fast" / "new.py"
    new.write_text("")
    added = versions(copy)
    new.rename(copy / "fast" / "other.py")
    assert len({before, added, versions(copy)}) == 3
    (copy / "fast" / "other.py").unlink()


def test_a_plugin_and_its_content_are_part_of_the_key(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("a = 1\n")
    first = versions(PACKAGE, [str(plugin)])[0]
    plugin.write_text("a = 2\n")
    assert len({versions(PACKAGE)[0], first, versions(PACKAGE, [str(plugin)])[0]}) == 3


def test_another_version_of_a_numerical_library_is_another_key(monkeypatch):
    found = {versions(PACKAGE)[0]}
    for library in ("torch", "numpy", "scipy", "scikit-learn", "none of them"):
        monkeypatch.setattr(plan, "version", lambda name, library=library: "0.0" if name == library else "1.0")
        found.add(versions(PACKAGE)[0])
    assert len(found) == 6


@pytest.fixture(autouse=True)
def forget():
    yield
    package_code.cache_clear()
    explaining_code_version.cache_clear()


def test_the_package_is_found_where_it_lies():
    assert (PACKAGE / "methods" / "m2lgdg.py").is_file() and Path("methods/m2lgdg.py") in MODULES


def test_methods_and_variants_that_need_series_are_refused_before_the_first_cell(tmp_path):
    """Nothing is written, whatever else the study holds."""
    matrices = m2lgdg.make_cohort("tiny").to_connectomes()
    study = {"cohort": matrices, "methods": ["fc-logistic", "m2lgdg-connectome"], "targets": ["east"], "seeds": [0]}
    words = "method ufa-net needs time series, and cohort tiny holds connectomes; methods"
    with pytest.raises(InputError, match=words):
        m2lgdg.run_study(study | {"methods": ["fc-logistic", "ufa-net"]}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    both = m2lgdg.make_cohort("tiny")
    both = dataclasses.replace(both, atlas="own", parcellations={"other": Parcellation(both.rois, both.to_connectomes().scans)})
    for atlases, refused in (("first", False), ("other", True), ("all", True)):
        with pytest.raises(InputError, match="needs time series") if refused else contextlib.nullcontext():
            need_scans(m2lgdg.make("ufa-net", atlases=atlases).method, both)
