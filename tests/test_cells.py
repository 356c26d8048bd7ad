"""What is part of a cell's key: every module that can change a prediction, plugins and the numerical libraries."""

import shutil
from pathlib import Path

import pytest

from m2lgdg.study import plan
from m2lgdg.study.plan import PACKAGE, code_version, explaining_code_version, package_code

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


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_an_edit_changes_the_key_where_it_can_change_a_prediction(copy, module):
    before = versions(copy)
    text = (copy / module).read_text()
    (copy / module).write_text(f"{text}\n# edited\n")
    after = versions(copy)
    (copy / module).write_text(text)
    predicts = len(module.parts) == 1 or module.parts[0] in ("methods", "fast", "model", "sklearn_bridge")
    assert (after[0] != before[0], after[1] != before[1]) == (predicts, module.parts[0] == "explain")
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


@pytest.mark.parametrize("library", ["torch", "numpy", "scipy", "scikit-learn"])
def test_another_version_of_a_numerical_library_is_another_key(library, monkeypatch):
    before = versions(PACKAGE)[0]
    monkeypatch.setattr(plan, "version", lambda name: "0.0" if name == library else "1.0")
    other = versions(PACKAGE)[0]
    monkeypatch.setattr(plan, "version", lambda name: "1.0")
    assert len({before, other, versions(PACKAGE)[0]}) == 3


@pytest.fixture(autouse=True)
def forget():
    yield
    package_code.cache_clear()
    explaining_code_version.cache_clear()


def test_the_package_is_found_where_it_lies():
    assert (PACKAGE / "methods" / "m2lgdg.py").is_file() and Path("methods/m2lgdg.py") in MODULES
