"""Docstrings of the public API: numpydoc sections with parameters and an example, and every example runs."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import m2lgdg

CALLED = [name for name in m2lgdg._HOMES if name not in ("InputError", "METHODS", "Method", "Model")]
MODULES = [
    *("cohort", "metrics", "methods.from_torch", "model.model", "splits", "data.check", "data.synthetic", "data.readers"),
    *("report.page", "report.paper_tables", "study.runner"),
    *(f"sklearn_bridge.{name}" for name in ("edges", "estimator", "from_sklearn", "transformers")),
]
METHODS = [
    *(getattr(m2lgdg.Model, name) for name in ("fit", "save")),
    *(getattr(m2lgdg.Cohort, name) for name in ("select", "from_arrays", "query", "to_frame")),
]
pytestmark = pytest.mark.usefixtures("methods_forgotten")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tried = doctest.testmod(importlib.import_module(f"m2lgdg.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried.attempted > 0 and tried.failed == 0


def test_no_example_is_left_out():
    package = Path(m2lgdg.__file__).parent
    with_examples = [
        path.relative_to(package).with_suffix("") for path in package.rglob("*.py") if "    >>> " in path.read_text()
    ]
    assert sorted(".".join(path.parts).removesuffix(".__init__") for path in with_examples) == sorted(MODULES)


@pytest.mark.parametrize("value", [*(getattr(m2lgdg, name) for name in CALLED), *METHODS], ids=lambda one: one.__qualname__)
def test_what_a_user_calls_has_parameters_and_an_example(value):
    text = inspect.getdoc(value)
    assert text.splitlines()[0].endswith(".")
    parameters = [name for name in inspect.signature(value).parameters if name not in ("self", "cls", "which")]
    if value is m2lgdg.Cohort:
        parameters = ["series", "subjects", "sites", "labels", "rois", "phenotypes"]
    sections = {text.splitlines()[i - 1] for i, line in enumerate(text.splitlines()) if line and set(line) == {"-"}}
    assert "Examples" in sections and (inspect.isclass(value) or sections & {"Returns", "Yields"})
    documented = text.split("Parameters\n----------\n")[1].split("\n\n")[0] if parameters else ""
    names = {
        name.strip("* ") for line in documented.splitlines() if line[:1].strip() for name in line.split(" : ")[0].split(",")
    }
    assert set(parameters) <= names, set(parameters) - names
