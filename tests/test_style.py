"""The house rules that a test can hold: who may import whom, small files, modules that say what they are."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import m2lgdg
from m2lgdg.deep import DeepMethod

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "m2lgdg"
# Downwards only: a room (a module of the root, or a folder) may import those before it, at any place in its files.
ORDER = [
    *("storage", "findings", "scans", "cohort_arrays", "notebook", "cohort_file", "cohort", "splits", "preprocess"),
    *("connectivity", "tangent", "graph", "losses"),
    *("sampler", "metrics", "devices", "data", "fields", "own_code", "registry", "method", "deep", "methods", "fast", "model"),
    *("sklearn_bridge", "explain", "study", "report", "deploy", "federated", "commands", "cli"),
]
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("m2lgdg."):
            yield node.module
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("m2lgdg."))


def test_imports_go_one_way():
    back = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        if path.parent != PACKAGE or not path.stem.startswith("__")
        for module in imports(path)
        if ORDER.index(module.split(".")[1]) > ORDER.index(room_of(path))
    ]
    assert not back


def test_every_room_has_its_place():
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} <= set(ORDER)


def test_the_root_is_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 24


def test_a_method_knows_no_kernel():
    for path in (PACKAGE / "methods").glob("*.py"):
        assert not [module for module in imports(path) if module.startswith("m2lgdg.fast")], path
    text = (PACKAGE / "methods" / "m2lgdg.py").read_text().lower()
    assert not re.search(r"cuda|gpu|triton|kernel_|autocast|bfloat|contiguous", text)


def test_files_are_small_and_say_what_they_are():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 500, path
        assert ast.get_docstring(ast.parse(text)), path


def test_nothing_is_pickled():
    for path in FILES:
        assert not re.search(r"import pickle|allow_pickle=True|weights_only=False|joblib\.(dump|load)", path.read_text()), path


def test_nothing_looks_at_the_clock():
    """A clock may jump: only differences of time.monotonic are reported, and no file's date decides anything."""
    for path in FILES:
        assert not re.search(r"time\.time\(|datetime|mtime|ctime|atime|time\.localtime|time\.gmtime", path.read_text()), path


def test_the_docs_tell_every_field_that_networks_share():
    text = (ROOT / "docs" / "studies.md").read_text()
    rows = [
        row.split("|")[1]
        for row in text.split("## Fields that all networks share")[1].split("## ")[0].splitlines()
        if "|" in row
    ]
    reported = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert reported == {field.name for field in dataclasses.fields(DeepMethod)}


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_lines_of_pages_are_short(path):
    """Tables, images and blocks of code cannot be wrapped."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.S | re.M)
    assert not [line for line in text.splitlines() if len(line) > 100 and not line.lstrip().startswith(("|", "!["))]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_import_public_names_only(path):
    """The package itself, and the modules of its root that it names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("m2lgdg"):
            public = m2lgdg.__all__ if node.module == "m2lgdg" else vars(importlib.import_module(node.module))
            assert node.module == "m2lgdg" or node.module.removeprefix("m2lgdg.") in m2lgdg.__all__, node.module
            assert all(name.name in public and not name.name.startswith("_") for name in node.names)
        if isinstance(node, ast.Import):
            assert all(name.name == "m2lgdg" for name in node.names if name.name.startswith("m2lgdg"))
