"""Whatever the bytes are, a parser ends well or in an InputError: the inputs that once broke one, then a few random ones.

`make fuzz` draws 50 times as many (M2LGDG_FUZZ=50).
"""

import dataclasses
import functools
import io
import json
import os
import random
import re
import shutil
import string
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from m2lgdg import Cohort, InputError, make, make_cohort
from m2lgdg.cohort import Parcellation
from m2lgdg.data.readers import arrays as text
from m2lgdg.data.readers import matrices, read
from m2lgdg.data.readers.arrays import load_array
from m2lgdg.method import Method
from m2lgdg.model.folder import LARGEST, digest
from m2lgdg.registry import METHODS, load_methods
from m2lgdg.report.card import card
from m2lgdg.storage import file_hash
from m2lgdg.study.config import Study, check_study, read_study

pytestmark = pytest.mark.fuzz
KEPT = sorted((Path(__file__).parent / "data" / "fuzz").glob("*/*"))
TIMES = int(os.environ.get("M2LGDG_FUZZ", "1"))
FEW = settings(
    max_examples=40 * TIMES, derandomize=TIMES == 1, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
ODD = [
    b"0",
    b"-1",
    b"1e400",
    b"NaN",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"9" * 30,
    b"2147483648",
    b"\xff",
    b"\0",
    b"\n",
    b"../x",
]
HELD = tempfile.TemporaryDirectory(prefix="m2lgdg-fuzz-")  # gone with the process
PLACE = Path(HELD.name)
MODEL_FILES = ("method.json", "weights.safetensors", "source_distribution.safetensors")


def refused(load):
    """Whether what was loaded is refused as it must be."""
    try:
        load()
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 3000, error
        return True
    return False


@functools.cache
def cohort():
    return make_cohort("tiny", seed=1)


@functools.cache
def model():
    return make("fc-logistic", phenotypes=True).fit(cohort(), source_distribution=True).save(PLACE / "model")


@functools.cache
def people():
    """A folder of three subjects."""
    folder = PLACE / "people"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"P{i}.npy", np.random.default_rng(i).normal(size=(30, 4)).astype(np.float32))
    return folder


def series_text(data):
    """numpy's parser reads what `float` reads in each cell, or leaves the text to it."""
    path = PLACE / f"a{('.csv', '.tsv', '.1D')[data[0] % 3 if data else 0]}"
    path.write_bytes(data[1:])
    found = []
    for plain in (text._plain_numbers, lambda *_: None):
        with mock.patch.object(text, "_plain_numbers", plain):
            try:
                found.append(text.read_table(path))
            except InputError as error:
                assert "\n" not in str(error)
                found.append((str(error), None))
    (names, numbers), (others, expected) = found
    assert names == others, found
    if expected is not None:
        np.testing.assert_array_equal(numbers, expected)


def npy(data):
    """An array file."""
    (PLACE / "a.npy").write_bytes(data)
    refused(lambda: load_array(PLACE / "a.npy"))


def connectome(data):
    """A file of connectomes; its first byte is its format."""
    file = PLACE / f"c{matrices.SUFFIXES[data[0] % len(matrices.SUFFIXES)] if data else '.csv'}"
    file.write_bytes(data[1:])
    refused(lambda: matrices.load_matrices(file))


def table(data):
    """participants.tsv of a folder."""
    (people() / "participants.tsv").write_bytes(data)
    refused(lambda: read(people(), "folder", on_bad="exclude"))


def dataset(data):
    """dataset.toml of a folder."""
    (people() / "participants.tsv").write_bytes(PEOPLE)
    (people() / "dataset.toml").write_bytes(data)
    try:
        refused(lambda: read(people(), "folder", on_bad="exclude"))
    finally:
        (people() / "dataset.toml").unlink()


def cohort_file(data):
    """A cohort file."""
    path = PLACE / "a.cohort"
    path.unlink(missing_ok=True)  # an earlier one may be mapped still
    path.write_bytes(data)
    refused(lambda: Cohort.load(path).hash)


def study(data):
    """A study file."""
    (PLACE / "study.toml").write_bytes(data)
    refused(lambda: read_study(PLACE / "study.toml"))


def model_file(name, data):
    """A model folder with one file changed; hashes are made true, so that what lies behind them is reached."""
    folder = PLACE / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model(), folder)
    (folder / name).write_bytes(data)
    about = folder / "method.json"
    try:
        said = json.loads(about.read_bytes())
        hashes = {one: file_hash(folder / one, LARGEST) for one in MODEL_FILES[1:]}
        rest = {key: value for key, value in said.items() if key != "hashes"}
        about.write_text(json.dumps(rest | {"hashes": hashes | {"method.json": digest(rest)}}))
    except (ValueError, AttributeError, RecursionError):
        pass  # no JSON object: the loader must say so

    def use():
        fitted = Method.load(folder)
        some = cohort().select(np.arange(2))
        proba = fitted.predict_proba(some)
        assert ((proba >= 0) & (proba <= 1)).all()
        fitted.flags(some)
        if fitted.source_distribution_:
            fitted.source_distribution_.compare(some)
        card(folder)

    refused(use)


PEOPLE = (
    b"participant_id\tsite\tlabel\tsex\tage\n"
    b"P0\tnorth\tpatient\tM\t20\nP1\tnorth\tcontrol\tF\t31.5\nP2\tsouth\tcontrol\tF\tn/a\n"
)
STUDY = b"""cohort = "c.cohort"
methods = ["fc-logistic", "prior", "erm"]
seeds = [0, 1]
targets = ["north"]
variants = ["phenotypes"]
explain = ["fc-logistic"]
[method.fc-logistic]
site_folds = 3
penalties = [0.1, 1.0]
[sweep.erm]
learning_rate = [1e-3, 1e-4]
"""


def _connectome(suffix):
    """The number of a format, and a file of it."""
    names, content = ["a", "b", "c", "d"], io.BytesIO()
    matrix = pd.DataFrame(np.eye(4) + 0.25, index=names, columns=names)
    if suffix == ".npy":
        np.save(content, matrix)
    elif suffix == ".npz":
        np.savez(content, np.stack([matrix, matrix]))
    elif suffix == ".mat":
        savemat(content, {"fc": matrix.to_numpy()})
    else:
        content.write(matrix.to_csv(sep={".csv": ",", ".tsv": "\t"}.get(suffix, " "), header=suffix != ".txt").encode())
    return bytes([matrices.SUFFIXES.index(suffix)]) + content.getvalue()


def _array():
    np.save(PLACE / "seed.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
    return (PLACE / "seed.npy").read_bytes()


def _cohort_bytes(*parcellations):
    """A cohort file with further atlases of these names, which the first subject lacks."""
    some = dataclasses.replace(cohort().select(np.arange(4)), atlas="first")
    halves = Parcellation(some.rois[:3], [None, *(np.asarray(one)[:, :3] for one in some.series[1:])])
    path = dataclasses.replace(some, parcellations=dict.fromkeys(parcellations, halves)).save(PLACE / "seed.cohort")
    return path.read_bytes()


TARGETS = {
    "series_text": series_text,
    "npy": npy,
    "connectome": connectome,
    "table": table,
    "dataset": dataset,
    "cohort_file": cohort_file,
    "study": study,
    **{f"model_{name.split('.')[0]}": functools.partial(model_file, name) for name in MODEL_FILES},
}
SEEDS = {
    "series_text": lambda: [
        b"\0" + b"a,b\n1.5,2e3\n-3,nan\n",
        b"\1#x\t#y\n1\t2\n\t3\n",
        b"\2 1 2 3\n4 5 6\n",
        b"\x021e22 1e-300\n",
    ],
    "npy": lambda: [_array()],
    "connectome": lambda: [_connectome(suffix) for suffix in matrices.SUFFIXES],
    "table": lambda: [PEOPLE, PEOPLE.replace(b"\t", b","), b"\xef\xbb\xbf" + PEOPLE],
    "dataset": lambda: [
        b'name = "x"\ntr = 2.0\ninputs = ["age"]\npattern = "{subject}.npy"\n[columns]\nage = "age"\n',
        b'atlas = "x"\n[atlases.y]\npattern = "{subject}.npy"\norientation = "time,roi"\n',
    ],
    "cohort_file": lambda: [_cohort_bytes(), _cohort_bytes("ho", "cc")],
    "study": lambda: [STUDY],
    **{
        f"model_{name.split('.')[0]}": functools.partial(lambda name: [(model() / name).read_bytes()], name)
        for name in MODEL_FILES
    },
}


def mutated(dice, data, seeds):
    """One to four changes: bits, bytes, pieces cut, repeated or taken from another seed, numbers and words replaced."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        at, size = dice.randrange(len(data) + 1), dice.choice((1, 1, 4, 16, 64))
        kind = dice.randrange(7)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + dice.randbytes(size) + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + size :]
        elif kind == 3:
            data = data[:at] + data[at : at + size] * dice.choice((2, 3, 50)) + data[at + size :]
        elif kind == 4:
            other = dice.choice(seeds)
            data = data[:at] + other[dice.randrange(len(other) + 1) :]
        elif kind == 5:
            data = data[:at] + dice.choice(ODD) + data[at:]
        else:
            tokens = list(re.finditer(rb"[A-Za-z0-9_.+-]+|\"[^\"\n]*\"", data[:200_000]))
            if tokens:
                token = dice.choice(tokens)
                new = dice.choice(ODD) if dice.random() < 0.7 else dice.choice(tokens)[0]
                data = data[: token.start()] + new + data[token.end() :]
    return data


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
    monkeypatch.setitem(globals(), "refused", lambda load: load())
    for seed in SEEDS[name]()[: 1 if name == "table" else None]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_random_damage(name):
    dice, seeds = random.Random(1), SEEDS[name]()
    for _ in range(TIMES * (20 if name.startswith("model") else 60)):
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
