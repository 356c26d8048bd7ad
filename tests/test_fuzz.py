"""Whatever the bytes are, a parser ends well or in an InputError: the inputs that once broke one, then a few random ones.

`make fuzz` does the same for longer, guided by coverage.
"""

import json
import shutil
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import MODEL_FILES, SEEDS, TARGETS, model, model_file, refused, table

from m2lgdg.registry import METHODS, load_methods
from m2lgdg.study.config import Study, check_study

ROOT = Path(__file__).parents[1]
KEPT = sorted((ROOT / "tests" / "data" / "fuzz").glob("*/*"))
FEW = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)  # the same examples at each run

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 2**31, 2**63, 10**400, -(10**400), float("nan"), float("inf")])
)
words = st.one_of(
    st.text(max_size=12), st.sampled_from(["age", "sex", "prior", "north", "../x", "/dev/zero", "\0", "\x1b[2J", ""])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=8
)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_broke_something(path):
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_good(name, monkeypatch):
    """Else mutations of them would reach nothing."""
    import targets

    def accepted(load):
        load()

    monkeypatch.setattr(targets, "refused", accepted)
    for seed in SEEDS[name]()[: 1 if name == "table" else None]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_random_damage(name):
    import random

    from run import mutated

    dice, seeds = random.Random(1), SEEDS[name]()
    for _ in range(40 if name.startswith("model") else 150):
        TARGETS[name](mutated(dice, dice.choice(seeds), seeds))


@FEW
@given(st.data())
def test_any_value_anywhere_in_method_json(data):
    said = json.loads((model() / "method.json").read_text())
    inner, key = said, data.draw(st.sampled_from(sorted(said)))
    while isinstance(inner[key], dict) and inner[key] and data.draw(st.booleans()):
        inner, key = inner[key], data.draw(st.sampled_from(sorted(inner[key])))
    inner[key] = data.draw(anything)
    model_file("method.json", json.dumps(said).encode())


@FEW
@given(st.data())
def test_any_tensors_header(data):
    content = (model() / "weights.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    inner, key = header, data.draw(st.sampled_from(sorted(header)))
    if data.draw(st.booleans()):
        inner, key = inner[key], data.draw(st.sampled_from(sorted(inner[key])))
    inner[key] = data.draw(anything)
    text = json.dumps(header).encode()
    model_file("weights.safetensors", len(text).to_bytes(8, "little") + text + content[8 + size :])


@FEW
@given(st.data())
def test_any_study(data):
    load_methods()
    study = {"cohort": "c.cohort", "methods": ["fc-logistic"], "seeds": [0], "method": {"fc-logistic": {"site_folds": 3}}}
    keys = st.sampled_from([*(key for key in Study.model_fields if key != "plugins"), "sede"])
    for _ in range(data.draw(st.integers(1, 3))):
        study[data.draw(keys)] = data.draw(anything)
    refused(lambda: check_study(study, "study"))


@FEW
@given(st.sampled_from(sorted(load_methods())), st.data())
def test_any_field_of_any_method(name, data):
    import dataclasses

    fields = [field.name for field in dataclasses.fields(METHODS[name])] or ["none"]
    changed = {data.draw(st.sampled_from(fields)): data.draw(anything)}
    refused(lambda: check_study({"cohort": "c", "methods": [name], "method": {name: changed}}, "study"))


cells = st.text(alphabet=string.printable + "é\0\u2028\x85", max_size=8)


@FEW
@given(st.lists(st.lists(cells, min_size=1, max_size=5), max_size=5), st.booleans())
def test_any_table(rows, headed):
    head = [["participant_id", "site", "label", "age", "sex"]] if headed else []
    table("\n".join("\t".join(row) for row in [*head, *rows]).encode())


def test_model_files_are_all_fuzzed():
    assert set(MODEL_FILES) == {path.name for path in model().iterdir()}


def test_the_c_parser_under_sanitizers(tmp_path):
    """100,000 damaged texts; a read or write beyond the memory, or undefined arithmetic, would end the process."""
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build = ["cc", *flags, "-o", str(tmp_path / "fuzz"), str(ROOT / "fuzz" / "numbers.c"), "-lm"]
    if not shutil.which("cc") or subprocess.run(build, capture_output=True).returncode:
        pytest.skip("no C compiler with sanitizers")
    ended = subprocess.run([tmp_path / "fuzz", "100000"], capture_output=True, text=True)
    if "ReserveShadowMemoryRange" in ended.stderr or "Shadow memory" in ended.stderr:
        pytest.skip("no room for the sanitizer's shadow memory here")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["runs"] == 100000


def test_the_loop_finds_a_planted_defect(tmp_path, monkeypatch):
    import run
    import targets

    def planted(data):
        if b"methods" not in data:
            raise ZeroDivisionError("planted")

    monkeypatch.setitem(targets.TARGETS, "study", planted)
    monkeypatch.setattr(run, "HERE", tmp_path)
    reported = run.mutations("study", 20, 0)
    assert reported["broken"] == 10
    for path in (tmp_path / "found" / "study").iterdir():
        assert b"methods" not in path.read_bytes()
