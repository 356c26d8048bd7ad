"""The house rules that a test can hold: who may import whom, small files, modules that say what they are."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from m2lgdg.deep import DeepMethod

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "m2lgdg"
# Downwards only: a module may import those before it.
ORDER = [
    *(
        "storage",
        "threads",
        "cohort",
        "readers",
        "duplicates",
        "check",
        "synthetic",
        "splits",
        "leakage",
        "preprocess",
        "connectivity",
    ),
    *("metrics", "stats", "losses", "graph", "sampler", "kernels", "gpu", "devices", "model_folder", "shift", "promise"),
    *("registry", "method", "deep", "methods"),
    *("representation", "explanation", "explain", "export", "config", "cells", "claim", "engines", "predictions", "study"),
    *("baselines", "audit", "report", "local", "serve", "commands", "cli"),
]
FILES = sorted(PACKAGE.rglob("*.py"))


def place(module):
    return ORDER.index(module.split(".")[1])


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("m2lgdg."):
            yield node.module
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("m2lgdg."))


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != PACKAGE or not path.stem.startswith("__")], ids=str)
def test_imports_go_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports(path):
        if (own, module) in {("registry", "m2lgdg.methods"), ("registry", "m2lgdg.method")}:  # when asked; for its type alone
            continue
        assert place(module) <= ORDER.index(own), f"{own} imports {module}"


def test_the_order_names_every_module():
    there = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert there == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_are_small_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text))


def test_nothing_is_pickled():
    for path in FILES:
        assert not re.search(r"import pickle|allow_pickle=True|weights_only=False|joblib\.(dump|load)", path.read_text()), path


def test_nothing_looks_at_the_clock():
    """A clock may jump: only differences of time.monotonic are told, and no file's date decides anything."""
    for path in FILES:
        assert not re.search(r"time\.time\(|datetime|mtime|ctime|atime|time\.localtime|time\.gmtime", path.read_text()), path


def test_the_docs_tell_every_field_that_networks_share():
    text = (ROOT / "docs" / "studies.md").read_text()
    rows = [
        row.split("|")[1]
        for row in text.split("## Fields that all networks share")[1].split("## ")[0].splitlines()
        if "|" in row
    ]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert told == {field.name for field in dataclasses.fields(DeepMethod)}


def test_the_readme_is_short_and_its_file_map_true():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for name in ORDER:
        assert f"`{name}" in text, f"README does not place {name}"
    for name in re.findall(r"^\| `(\w+)", text.split("## Where things are")[1], flags=re.M):
        assert name in ORDER
