"""Model folders: written and read, and a corpus of folders that are broken or made to harm, each refused in one sentence.

Hashes are true again after each change unless the case is about them: whoever alters a model can also compute a hash.
"""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from m2lgdg import InputError, Model, make, make_cohort
from m2lgdg.model.folder import FORMAT, LARGEST, digest
from m2lgdg.report.card import card
from m2lgdg.storage import file_hash

WEIGHTS, LIMITS, ABOUT = "weights.safetensors", "source_distribution.safetensors", "method.json"
DEEP = "[" * 100_000 + "]" * 100_000


class Case(NamedTuple):
    """One way to be wrong, and what its sentence says."""

    name: str
    spoil: Callable[[Path], object]
    says: tuple[str, ...]


def about(folder):
    return json.loads((folder / ABOUT).read_text())


def rehash(folder, said=None):
    said = said or about(folder)
    hashes = {name: file_hash(folder / name, LARGEST) for name in (WEIGHTS, LIMITS)}
    said["hashes"] = hashes | {ABOUT: digest({key: value for key, value in said.items() if key != "hashes"})}
    (folder / ABOUT).write_text(json.dumps(said))


def said(**changes):
    """method.json with other values, hashes true."""

    def spoil(folder):
        rehash(folder, about(folder) | changes)

    return spoil


def without(*keys):
    def spoil(folder):
        content = about(folder)
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        rehash(folder, content)

    return spoil


def fact(**changes):
    def spoil(folder):
        content = about(folder)
        content["facts"] |= changes
        rehash(folder, content)

    return spoil


def source(**changes):
    def spoil(folder):
        content = about(folder)
        content["facts"]["source"] |= changes
        rehash(folder, content)

    return spoil


def local(**changes):
    return fact(local={"slope": 1.0, "offset": 0.0, "threshold": 0.5} | changes)


def fields(**changes):
    def spoil(folder):
        content = about(folder)
        content["fields"] |= changes
        rehash(folder, content)

    return spoil


def hashes(value):
    def spoil(folder):
        (folder / ABOUT).write_text(json.dumps(about(folder) | {"hashes": value}))

    return spoil


def text(content):
    """method.json of other text or bytes."""
    return lambda folder: (folder / ABOUT).write_bytes(content if isinstance(content, bytes) else content.encode())


def replaced(old, new):
    """A piece of the text of method.json, after hashing: for what a JSON parser takes and ours must not."""

    def spoil(folder):
        content = (folder / ABOUT).read_text()
        assert old in content
        (folder / ABOUT).write_text(content.replace(old, new, 1))

    return spoil


def raw(name, content):
    """A file of other bytes, hashed."""

    def spoil(folder):
        (folder / name).write_bytes(content(folder) if callable(content) else content)
        rehash(folder)

    return spoil


def tensors(header, size=64, kind=FORMAT, length=None):
    """A safetensors file of any header over `size` zero bytes."""
    if isinstance(header, dict):
        header = json.dumps(header | ({"__metadata__": {"format": kind}} if kind else {}))
    encoded = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + bytes(size)


def entry(shape, start, end, dtype="F64"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def arrays(name, kind, change):
    """Other arrays, well formed and hashed."""

    def spoil(folder):
        from safetensors import safe_open

        with safe_open(folder / name, framework="np") as file:
            metadata = dict(file.metadata())
        changed = {key: np.ascontiguousarray(value) for key, value in change(load_file(folder / name)).items()}
        save_file(changed, folder / name, metadata | {"format": kind})
        rehash(folder)

    return spoil


def weights(change):
    return arrays(WEIGHTS, FORMAT, change)


def distribution(change):
    return arrays(LIMITS, "m2lgdg-limits-1", change)


def columns(value):
    """source_distribution.safetensors with other metadata."""

    def spoil(folder):
        save_file(load_file(folder / LIMITS), folder / LIMITS, {"format": "m2lgdg-limits-1"} | value)
        rehash(folder)

    return spoil


def link(name, to):
    def spoil(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return spoil


def pipe(name):
    def spoil(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def folder_for(name):
    def spoil(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


class Evil:
    def __reduce__(self):
        return (Path("ran").touch, ())


def pickled():
    import pickle

    return pickle.dumps(Evil())


DAMAGED = (WEIGHTS, "damaged or not an m2lgdg-model-1 file")
TENSORS = [
    Case("scans of no kind", fact(scans="tensor"), ("method.json is damaged", "scans is not series or a kind of connectome")),
    Case("scans in a list", fact(scans=["series"]), ("method.json is damaged", "scans is not series or a kind of connectome")),
    Case("weights cut, hashes true", raw(WEIGHTS, lambda f: (f / WEIGHTS).read_bytes()[:-9]), DAMAGED),
    Case("weights longer than declared", raw(WEIGHTS, lambda f: (f / WEIGHTS).read_bytes() + b"more"), DAMAGED),
    Case("no byte of weights", raw(WEIGHTS, b""), DAMAGED),
    Case("seven bytes of weights", raw(WEIGHTS, b"\x01" * 7), DAMAGED),
    Case("a header longer than the file", raw(WEIGHTS, tensors({}, length=10**6)), DAMAGED),
    Case("a header of 2^63 bytes", raw(WEIGHTS, tensors({}, length=2**63)), DAMAGED),
    Case("a header of no byte", raw(WEIGHTS, tensors("", 0)), DAMAGED),
    Case("a header that is no JSON", raw(WEIGHTS, tensors("{'a': 1}")), DAMAGED),
    Case("a header that is no text", raw(WEIGHTS, tensors(b"{\xff\xfe}")), DAMAGED),
    Case("a header that is a list", raw(WEIGHTS, tensors("[1, 2]")), DAMAGED),
    Case("a header nested deep", raw(WEIGHTS, tensors('{"a":' + DEEP + "}")), DAMAGED),
    Case("a huge shape", raw(WEIGHTS, tensors({"a": entry([2**62, 4], 0, 64)})), DAMAGED),
    Case("a huge and an empty axis", raw(WEIGHTS, tensors({"a": entry([2**62, 2**62, 0], 0, 0)}, 0)), (WEIGHTS,)),
    Case("a negative axis", raw(WEIGHTS, tensors({"a": entry([-8], 0, 64)})), DAMAGED),
    Case("half an axis", raw(WEIGHTS, tensors({"a": entry([0.5, 16], 0, 64)})), DAMAGED),
    Case("an axis in words", raw(WEIGHTS, tensors({"a": entry(["8"], 0, 64)})), DAMAGED),
    Case("sixty-four axes", raw(WEIGHTS, tensors({"a": entry([1] * 64 + [8], 0, 64)})), DAMAGED),
    Case("a shape that is no list", raw(WEIGHTS, tensors({"a": entry(8, 0, 64)})), DAMAGED),
    Case(
        "arrays that overlap",
        raw(WEIGHTS, tensors({"a": entry([8], 0, 64), "b": entry([8], 0, 64)})),
        (*DAMAGED[:1], "damaged"),
    ),
    Case("a hole between arrays", raw(WEIGHTS, tensors({"a": entry([2], 0, 16), "b": entry([2], 48, 64)})), DAMAGED),
    Case("offsets beyond the file", raw(WEIGHTS, tensors({"a": entry([80], 0, 640)})), DAMAGED),
    Case("offsets that run backwards", raw(WEIGHTS, tensors({"a": entry([8], 64, 0)})), DAMAGED),
    Case("offsets below zero", raw(WEIGHTS, tensors({"a": entry([8], -64, 0)})), DAMAGED),
    Case("offsets beyond 64 bits", raw(WEIGHTS, tensors({"a": entry([8], 0, 2**70)})), DAMAGED),
    Case("one offset", raw(WEIGHTS, tensors({"a": {"dtype": "F64", "shape": [8], "data_offsets": [0]}})), DAMAGED),
    Case("an array without a type", raw(WEIGHTS, tensors({"a": {"shape": [8], "data_offsets": [0, 64]}})), DAMAGED),
    Case("a type that does not exist", raw(WEIGHTS, tensors({"a": entry([8], 0, 64, "F99")})), DAMAGED),
    Case("a type that numpy has not", raw(WEIGHTS, tensors({"a": entry([32], 0, 64, "BF16")})), DAMAGED),
    Case(
        "an array twice",
        raw(
            WEIGHTS,
            tensors(
                f'{{"__metadata__":{{"format":"{FORMAT}"}},'
                f'"a":{json.dumps(entry([4], 0, 32))},"a":{json.dumps(entry([4], 32, 64))}}}'
            ),
        ),
        (WEIGHTS,),
    ),
    Case("no metadata", raw(WEIGHTS, tensors({"a": entry([8], 0, 64)}, kind=None)), (WEIGHTS, "its format is not given")),
    Case("metadata of numbers", raw(WEIGHTS, tensors({"__metadata__": {"format": 3}}, 0, kind=None)), DAMAGED),
    Case("another format", raw(WEIGHTS, tensors({}, 0, kind="m2lgdg-model-9")), (WEIGHTS, "format is m2lgdg-model-9")),
    Case("limits for weights", raw(WEIGHTS, lambda f: (f / LIMITS).read_bytes()), (WEIGHTS, "format is m2lgdg-limits-1")),
    Case("a pickle for weights", raw(WEIGHTS, pickled()), DAMAGED),
    Case("a zip for weights", raw(WEIGHTS, b"PK\x03\x04" + bytes(200)), DAMAGED),
    Case("no array at all", raw(WEIGHTS, tensors({}, 0)), ("do not fit method fc-logistic",)),
]

FIT = ("do not fit method fc-logistic",)
NO_PROBA = ("did not give one probability between 0 and 1",)
ARRAYS = [
    Case("an array lost", weights(lambda s: {k: v for k, v in s.items() if k != "fc.weights"}), FIT),
    Case("an array cut", weights(lambda s: s | {"fc.weights": s["fc.weights"][:-1]}), FIT),
    Case("an axis more", weights(lambda s: s | {"fc.weights": s["fc.weights"][None]}), FIT),
    Case("NaN in the weights", weights(lambda s: s | {"fc.weights": s["fc.weights"] * np.nan}), NO_PROBA),
    Case("infinite weights", weights(lambda s: s | {"fc.weights": s["fc.weights"] + np.inf}), NO_PROBA),
    Case("a calibration of three", weights(lambda s: s | {"calibration": np.zeros(3)}), FIT),
    Case("a calibration of NaN", weights(lambda s: s | {"calibration": np.array([np.nan, 0.0])}), NO_PROBA),
    Case("an intercept of two", weights(lambda s: s | {"fc.intercept": np.zeros(2)}), FIT),
    Case("a scaler for other columns", weights(lambda s: s | {"phenotypes.scaler.mean": np.zeros(9)}), FIT),
    Case("a path for a name", weights(lambda s: {f"../../{k}": v for k, v in s.items()}), FIT),
    Case(
        "limits of another atlas",
        distribution(lambda s: s | {"mean": s["mean"][:-1], "axes": s["axes"][:, :-1]}),
        (LIMITS, "mean has shape"),
    ),
    Case("axes that do not fit", distribution(lambda s: s | {"axes": s["axes"][:, :-1]}), (LIMITS, "axes has shape")),
    Case("limits lost", distribution(lambda s: {k: v for k, v in s.items() if k != "reached"}), (LIMITS, "damaged")),
    Case("limits of complex meaning", distribution(lambda s: s | {"mean": s["mean"] * np.nan}), (LIMITS, "mean")),
    Case("ranges of one row", distribution(lambda s: s | {"ranges": s["ranges"][:1]}), (LIMITS, "ranges has shape")),
    Case("limits without columns", columns({}), (LIMITS, "damaged")),
    Case("columns that are no JSON", columns({"columns": "age, sex"}), (LIMITS, "damaged")),
    Case("columns that are no list", columns({"columns": "3"}), (LIMITS, "damaged")),
    Case("columns that are a word", columns({"columns": '"age"'}), (LIMITS, "damaged")),
    Case("columns nested deep", columns({"columns": DEEP}), (LIMITS, "damaged")),
    Case("limits that are weights", raw(LIMITS, lambda f: (f / WEIGHTS).read_bytes()), (LIMITS, "format is m2lgdg-model-1")),
]

JSON = [
    Case("an empty method.json", text(""), (ABOUT, "damaged")),
    Case("a method.json of NUL", text(bytes(100)), (ABOUT, "damaged")),
    Case("a method.json in UTF-16", text("{}".encode("utf-16")), (ABOUT, "damaged")),
    Case("a method.json of no text", text(b'{"format": "\xff"}'), (ABOUT, "damaged")),
    Case("a method.json cut", lambda f: text((f / ABOUT).read_bytes()[:-30])(f), (ABOUT, "damaged")),
    Case("a list for method.json", text("[]"), (ABOUT, "damaged")),
    Case("a word for method.json", text('"m2lgdg-model-1"'), (ABOUT, "damaged")),
    Case("null for method.json", text("null"), (ABOUT, "damaged")),
    Case("nesting", text(DEEP), (ABOUT, "damaged")),
    Case("nesting in a value", text('{"format": ' + DEEP + "}"), (ABOUT, "damaged")),
    Case("a number of 10,000 digits", replaced('"seed": 0', '"seed": ' + "9" * 10_000), (ABOUT, "damaged")),
    Case("NaN for a seed", fact(seed=float("nan")), ("seed is not a count",)),
    Case("infinity for a seed", fact(seed=-float("inf")), ("seed is not a count",)),
    Case("no format", without("format"), (ABOUT, "damaged")),
    Case("a format of tomorrow", said(format="m2lgdg-model-2"), (ABOUT, "does not have the format m2lgdg-model-1")),
    Case("a format that is a list", said(format=[FORMAT]), (ABOUT, "does not have the format")),
    Case("no method", without("method"), (ABOUT, "damaged")),
    Case("a method of nobody", said(method="fc-logistics"), (ABOUT, "fc-logistics is not known", "--plugin")),
    Case("a method that is a path", said(method="../../evil.py"), (ABOUT, "../../evil.py is not known")),
    Case("a method that is a module", said(method="os.system"), (ABOUT, "os.system is not known")),
    Case("a method that steers the terminal", said(method="\x1b[2Jx"), ("method \\x1b[2Jx is not known",)),
    Case("a method of 10,000 letters", said(method="x" * 10_000), (ABOUT, "is not known")),
    Case("a method that is a list", said(method=["prior"]), (ABOUT, "damaged")),
    Case("another method", said(method="tangent-logistic"), ("fit method tangent-logistic",)),
    Case("another network", said(method="brainnetcnn"), ("brainnetcnn",)),
    Case("no hashes", lambda f: text(json.dumps({k: v for k, v in about(f).items() if k != "hashes"}))(f), ("has no hashes",)),
    Case("hashes that are a list", hashes([1, 2]), (ABOUT, "damaged")),
    Case("hashes that are a number", hashes(3), (ABOUT, "damaged")),
    Case("hashes of nothing", hashes({}), (WEIGHTS, "altered")),
    Case("hashes that are numbers", hashes({WEIGHTS: 1, LIMITS: 2, ABOUT: 3}), (WEIGHTS, "altered")),
    Case("a hash of a path", lambda f: hashes(about(f)["hashes"] | {"../../etc/passwd": "0"})(f), (ABOUT, "../../etc/passwd")),
]

FACTS = [
    Case("fields that are a list", said(fields=[1]), (ABOUT, "damaged")),
    Case("a field of nobody", fields(colour=3), ("no field colour",)),
    Case("a field named like a method's own", fields(__class__="x"), ("no field __class__",)),
    Case("a field in words", fields(site_folds="three"), ("field site_folds: 'three' is not of type int",)),
    Case("a field of none", fields(site_folds=0), ("field site_folds: 0 is too small",)),
    Case("a field of 400 digits", fields(C=10**400), ("C",)),
    Case("a list of words", fields(penalties=["a"]), ("field penalties",)),
    Case("a list of 400 digits", fields(penalties=[10**400]), ("penalties",)),
    Case("no facts", without("facts"), (ABOUT, "damaged")),
    Case("facts that are a list", said(facts=[1]), (ABOUT, "damaged")),
    Case("no rois", without("facts", "rois"), (ABOUT, "damaged")),
    Case("rois that are a number", fact(rois=3), ("rois is not a list of strings",)),
    Case("rois that are numbers", fact(rois=[1, 2]), ("rois is not a list of strings",)),
    Case("rois of another number", fact(rois=["a", "b"]), (LIMITS, "mean has shape")),
    Case("an atlas that is a list", fact(atlas=[]), ("atlas is not a string",)),
    Case("inputs that are a word", fact(inputs="age"), ("inputs is not a list of strings",)),
    Case("inputs that are none of the model's", fact(inputs=[]), ("fit method fc-logistic",)),
    Case("an input more", fact(inputs=["sex", "age", "education", "height"]), ("fit method fc-logistic",)),
    Case("a seed in words", fact(seed="zero"), ("seed is not a count",)),
    Case("a seed that is true", fact(seed=True), ("seed is not a count",)),
    Case("no source", without("facts", "source"), (ABOUT, "damaged")),
    Case("a source that is a list", fact(source=[]), (ABOUT, "damaged")),
    Case("a cohort that is a number", source(cohort=3), ("cohort is not a string",)),
    Case("a hash that is a list", source(hash=[]), ("hash is not a string",)),
    Case("sites that are a list", source(sites=["north"]), (ABOUT, "damaged")),
    Case("a site without controls", source(sites={"north": {"patients": 3}}), (ABOUT, "damaged")),
    Case("a site of words", source(sites={"north": {"patients": "3", "controls": 1}}), ("patients is not a count",)),
    Case("a site of less than nobody", source(sites={"north": {"patients": -3, "controls": 1}}), ("patients is not a count",)),
    Case("a site of more", source(sites={"a": {"patients": 1, "controls": 1, "others": []}}), (ABOUT, "damaged")),
    Case("notes that are a word", fact(notes="none"), ("notes is not a list of strings",)),
    Case("notes of lists", fact(notes=[["a"]]), ("notes is not a list of strings",)),
    Case("parameters in words", fact(parameters="many"), ("parameters is not a count",)),
    Case("a validation that is a list", fact(validation=[]), ("validation is not a string",)),
    Case("training subjects in words", fact(training_subjects="all"), ("training_subjects is not a count",)),
    Case("a local calibration that is a list", fact(local=[]), (ABOUT, "damaged")),
    Case("a local calibration of nothing", fact(local={}), (ABOUT, "damaged")),
    Case("a local slope in words", local(slope="steep"), (ABOUT, "damaged")),
    Case("a local slope of 400 digits", local(slope=10**400), (ABOUT, "damaged")),
    Case("a local offset of nothing", local(offset=None), (ABOUT, "damaged")),
    Case("a threshold that is a list", local(threshold=[0.5]), (ABOUT, "damaged")),
    Case("no versions", without("versions"), (ABOUT, "damaged")),
    Case("versions that are a list", said(versions=[1]), (ABOUT, "damaged")),
]

PLACES = [
    Case("no method.json", lambda f: (f / ABOUT).unlink(), ("not a model folder (no method.json)",)),
    Case("a file for a model", lambda f: (shutil.rmtree(f), f.write_text("x")), ("not a model folder",)),
    Case("nothing for a model", lambda f: shutil.rmtree(f), ("not a model folder",)),
    Case("weights that are a link to nowhere", link(WEIGHTS, "nowhere"), (WEIGHTS, "does not exist")),
    Case("weights that are a link to a secret", link(WEIGHTS, "/etc/passwd"), (WEIGHTS, "altered")),
    Case("weights that are a link to itself", link(WEIGHTS, WEIGHTS), (WEIGHTS, "cannot read")),
    Case("weights that are a link to a device", link(WEIGHTS, "/dev/zero"), (WEIGHTS, "not a regular file")),
    Case("method.json that is a link to a device", link(ABOUT, "/dev/zero"), (ABOUT, "not a regular file")),
    Case("method.json that is a link to a secret", link(ABOUT, "/etc/passwd"), (ABOUT, "damaged")),
    Case("weights that are a pipe", pipe(WEIGHTS), (WEIGHTS, "not a regular file")),
    Case("method.json that is a pipe", pipe(ABOUT), (ABOUT, "not a regular file")),
    Case("limits that are a pipe", pipe(LIMITS), (LIMITS, "not a regular file")),
    Case("a folder for weights", folder_for(WEIGHTS), (WEIGHTS, "directory")),
    Case("a folder for method.json", folder_for(ABOUT), (ABOUT, "directory")),
    Case("weights beyond the limit", lambda f: os.truncate(f / WEIGHTS, LARGEST + 1), ("more than the",)),
    Case("method.json beyond the limit", lambda f: os.truncate(f / ABOUT, 2**24 + 1), ("more than the",)),
]

CASES = [*TENSORS, *ARRAYS, *JSON, *FACTS, *PLACES]


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=1)


@pytest.fixture(scope="module")
def healthy(cohort, tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    cohort.save(folder / "new.cohort")
    make("fc-logistic", phenotypes=True).fit(cohort, source_distribution=True).save(folder / "model")
    return folder


@pytest.fixture
def folder(healthy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(healthy / "model", tmp_path / "model")
    return Path("model")


def test_a_folder_is_tensors_json_and_their_hashes(folder, cohort):
    hashes = about(folder)["hashes"]
    assert {path.name for path in folder.iterdir()} == set(hashes) == {ABOUT, LIMITS, WEIGHTS}
    for name in (WEIGHTS, LIMITS):
        assert hashes[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    loaded = Model.load(folder)
    rehash(folder)
    assert np.array_equal(Model.load(folder).predict_proba(cohort), loaded.predict_proba(cohort))


@pytest.mark.parametrize("name", [WEIGHTS, LIMITS])
def test_one_changed_bit_a_cut_and_a_lost_file_are_found(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    for changed in (content, content[:-7]):
        (folder / name).write_bytes(changed)
        with pytest.raises(InputError, match=f"{name} was altered after it was written"):
            Model.load(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name} does not exist"):
        Model.load(folder)


def test_what_method_json_says_is_hashed_too(folder):
    changed = about(folder)
    changed["facts"]["inputs"] = ["age"]
    (folder / ABOUT).write_text(json.dumps(changed))
    with pytest.raises(InputError, match="its own hash differs"):
        Model.load(folder)


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_a_bad_model_is_refused(case, folder, cohort):
    case.spoil(folder)
    with pytest.raises(InputError) as refused:
        fitted = Model.load(folder)
        fitted.predict_proba(cohort)
    said = str(refused.value)
    assert ("\n" not in said and len(said) < 1000) or "10,000" in case.name
    for words in case.says:
        assert words.replace("\\x1b", "\x1b") in said
    try:
        card("model")  # it needs less of a model than a prediction
    except InputError as error:
        assert "\n" not in str(error)


COMMANDS = [
    "an array cut",
    "a calibration of NaN",
    "a pickle for weights",
    "a method that steers the terminal",
    "no method.json",
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_in_one_sentence_and_writes_nothing(name, folder, healthy, typed):
    next(case for case in CASES if case.name == name).spoil(folder)
    before = sorted(Path().rglob("*"))
    for words in (
        ["predict", "model", healthy / "new.cohort", "--out", "new/table.csv"],
        ["export", "model", "--out", "new/m.onnx"],
    ):
        code, _, err = typed(*words)
        assert code == 2 and err.startswith("m2lgdg: ") and err.count("\n") == 1 and "\x1b" not in err
        assert sorted(Path().rglob("*")) == before


HUGE = [
    ("m2lgdg", {"variant": "small", "length": 32}, {"hidden": 2**22}),
    ("m2lgdg", {"variant": "small", "length": 32}, {"fusion_layers": 10**6}),
    ("m2lgdg-connectome", {"variant": "small", "members": 1}, {"layers": 10**6}),
    ("m2lgdg-connectome", {"variant": "small", "members": 1}, {"members": 10**6}),
    ("brainnet-transformer", {"variant": "small"}, {"layers": 10**6}),
    ("erm", {"widths": (8,)}, {"widths": [8] * 10**6}),
]


@pytest.mark.parametrize(("name", "fields", "changes"), HUGE, ids=[f"{name}-{next(iter(asked))}" for name, _, asked in HUGE])
def test_fields_that_ask_for_a_huge_network_are_refused_before_it_is_made(name, fields, changes, cohort, tmp_path):
    folder = make(name, epochs=1, warmup=0, **fields).fit(cohort).save(tmp_path / "deep")
    content = about(folder)
    content["fields"] |= changes
    content["hashes"] = {WEIGHTS: file_hash(folder / WEIGHTS, LARGEST)}
    content["hashes"] |= {ABOUT: digest({key: value for key, value in content.items() if key != "hashes"})}
    (folder / ABOUT).write_text(json.dumps(content))
    started = time.process_time()
    with pytest.raises(InputError, match=rf"do not fit method {name}: \d+ (arrays for|numbers for a network of more)"):
        Model.load(folder).predict_proba(cohort)
    assert time.process_time() - started < 20


LITTLE = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from m2lgdg import Model
for folder in sys.argv[2:]:
    if not os.fork():  # limits and what is imported are inherited, what loading takes is its own
        try:
            Model.load(folder)
            said = "loaded"
        except Exception as error:
            said = f"{type(error).__name__} {error}"
        print(json.dumps([folder, said]), flush=True)
        os._exit(0)
    os.wait()
"""
EXPLOSIVE = [
    "a huge shape",
    "a huge and an empty axis",
    "a header of 2^63 bytes",
    "nesting",
    "weights that are a link to a device",
    "method.json that is a link to a device",
    "weights beyond the limit",
    "method.json beyond the limit",
]


@pytest.fixture(scope="module")
def told_with_little(healthy, tmp_path_factory):
    """What loading each says in 3 GiB of address space, of which importing takes half."""
    names = {}
    for name in EXPLOSIVE:
        folder = shutil.copytree(healthy / "model", tmp_path_factory.mktemp("little") / "model")
        next(case for case in CASES if case.name == name).spoil(folder)
        names[str(folder)] = name
    run = [sys.executable, "-c", LITTLE, str(3 * 2**30), *names]
    reported = subprocess.run(run, capture_output=True, text=True, timeout=600)
    return {names[folder]: said for folder, said in map(json.loads, reported.stdout.splitlines())} | {"stderr": reported.stderr}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_bad_model_takes_no_memory(name, told_with_little):
    reported = told_with_little.get(name, "")
    assert reported.startswith("InputError ") or "huge and an empty" in name, told_with_little


@pytest.mark.parametrize("name", ["connectome-ensemble", "phenotype-logistic"])
def test_every_array_of_a_linear_method_is_looked_at(name, cohort, tmp_path):
    spoil_each_array(make(name).fit(cohort), cohort, tmp_path)


def test_every_array_of_a_network_is_looked_at(cohort, tmp_path, monkeypatch):
    from torch.nn import init

    fitted = make("erm", widths=(8,), epochs=2, warmup=1).fit(cohort)
    for fill in ("uniform_", "kaiming_uniform_", "xavier_uniform_", "ones_", "zeros_"):  # stored weights replace random ones
        monkeypatch.setattr(init, fill, lambda tensor, *_, **__: tensor)
    spoil_each_array(fitted, cohort, tmp_path)


def spoil_each_array(fitted, cohort, tmp_path):
    some = cohort.select(np.arange(3))
    good = fitted.predict_proba(some)
    state, refused = dict(fitted.state_), 0
    changes = {
        "lost": lambda value: None,
        "cut": lambda value: value.reshape(-1)[:-1],
        "deep": lambda value: value[None, None],
        "nan": lambda value: np.full(value.shape, np.nan, dtype=np.float32),
    }
    tried = 0
    for name in state:
        for change in changes.values():
            changed = change(state[name])
            fitted.method.state_ = {key: value for key, value in state.items() if key != name}
            fitted.method.state_ |= {} if changed is None else {name: changed}
            folder = fitted.save(tmp_path / "model")
            tried += 1
            try:
                proba = Model.load(folder).predict_proba(some)
            except InputError as error:
                assert "\n" not in str(error)
                refused += 1
            else:
                assert proba.shape == good.shape and ((proba >= 0) & (proba <= 1)).all()
    assert refused >= tried / 2


def test_predict_says_that_the_code_has_changed(tmp_path, tiny, typed, monkeypatch):
    """Once, after the predictions; an adapted model keeps the code that fitted it."""
    tiny.save(tmp_path / "tiny.cohort")
    make("fc-logistic").fit(tiny).save(tmp_path / "model")

    def said(model, to):
        code, text, _ = typed("predict", tmp_path / model, tmp_path / "tiny.cohort", "--out", tmp_path / to)
        assert code == 0
        return " ".join(text.split()).count("has changed since this model was fitted")

    assert said("model", "same.csv") == 0
    monkeypatch.setattr("m2lgdg.model.model.predicting_code", lambda: "other")
    assert said("model", "other.csv") == 1
    Model.load(tmp_path / "model").save(tmp_path / "again")
    assert said("again", "again.csv") == 1
    content = about(tmp_path / "model")
    del content["code"]  # as in 0.1.0
    content["hashes"][ABOUT] = digest({key: value for key, value in content.items() if key != "hashes"})
    (tmp_path / "model" / ABOUT).write_text(json.dumps(content))
    assert said("model", "old.csv") == 0


def test_fields_of_former_models_that_are_gone(tmp_path, tiny):
    """A model of 0.1.0 names the weight of phenotypes; it predicts what it did, and no new model takes the field."""
    fitted = make("fc-svm", phenotypes=True).fit(tiny)
    fitted.save(tmp_path / "model")
    content = about(tmp_path / "model")
    content["fields"]["phenotype_weight"] = 0.3
    content["hashes"][ABOUT] = digest({key: value for key, value in content.items() if key != "hashes"})
    (tmp_path / "model" / ABOUT).write_text(json.dumps(content))
    np.testing.assert_array_equal(Model.load(tmp_path / "model").predict_proba(tiny), fitted.predict_proba(tiny))
    with pytest.raises(InputError, match="no longer has the field phenotype_weight: it is learned"):
        make("fc-svm", phenotypes=True, phenotype_weight=0.3)
