"""Model folders that were damaged, altered or made to harm: each is refused in a sentence, and before memory is taken."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from m2lgdg import METHODS, InputError, make, make_cohort
from m2lgdg.method import Method
from m2lgdg.model.folder import FORMAT, LARGEST, digest
from m2lgdg.storage import file_hash

METHOD = METHODS["m2lgdg"]


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=1)


@pytest.fixture
def folder(cohort, tmp_path):
    return make("fc-logistic").fit(cohort, source_distribution=True).save(tmp_path / "model")


def about(folder):
    return json.loads((folder / "method.json").read_text())


def rewrite(folder, **changes):
    """Change method.json and make all hashes true again, as an attacker would."""
    said = about(folder) | changes
    hashes = {name: file_hash(folder / name, LARGEST) for name in said.pop("hashes") if name != "method.json"}
    said["hashes"] = hashes | {"method.json": digest(said)}
    (folder / "method.json").write_text(json.dumps(said))


def test_every_file_is_hashed(folder):
    import hashlib

    hashes = about(folder)["hashes"]
    assert sorted(hashes) == ["source_distribution.safetensors", "method.json", "weights.safetensors"]
    for name in ("source_distribution.safetensors", "weights.safetensors"):
        assert hashes[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["weights.safetensors", "source_distribution.safetensors"])
def test_one_changed_bit_is_found(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} was altered after it was written"):
        Method.load(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "source_distribution.safetensors"])
def test_a_truncated_or_lost_file_is_found(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-7])
    with pytest.raises(InputError, match=f"{name} was altered"):
        Method.load(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name} does not exist"):
        Method.load(folder)


def test_what_method_json_says_is_hashed_too(folder):
    said = about(folder)
    said["facts"]["inputs"] = ["age"]
    (folder / "method.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"method.json was altered after it was written: it does not match its own hash"):
        Method.load(folder)


def test_a_folder_without_hashes_is_refused(folder):
    said = about(folder)
    del said["hashes"]
    (folder / "method.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match="has no hashes: it is of an earlier version, or altered; fit the model again"):
        Method.load(folder)


def header(shape, size):
    """A safetensors file whose header promises one array of some shape, over `size` bytes."""
    entry = {"fc.weights": {"dtype": "F64", "shape": shape, "data_offsets": [0, size]}, "__metadata__": {"format": FORMAT}}
    text = json.dumps(entry).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


@pytest.mark.parametrize("shape", [[10**12], [2**62, 4], [10**6, 10**6]])
def test_huge_shapes_are_refused_unread(folder, shape):
    (folder / "weights.safetensors").write_bytes(header(shape, 64))
    rewrite(folder)
    with pytest.raises(InputError, match=r"weights.safetensors is damaged or no m2lgdg-model-1 file"):
        Method.load(folder)


def test_huge_files_are_refused_unread(folder):
    os.truncate(folder / "weights.safetensors", LARGEST + 1)  # sparse: it takes no room on the disk
    with pytest.raises(InputError, match=f"has {LARGEST + 1} bytes, more than the {LARGEST} that are read"):
        Method.load(folder)
    os.truncate(folder / "method.json", 2**24 + 1)
    with pytest.raises(InputError, match=r"method.json has 16777217 bytes"):
        Method.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"fc.weights": state["fc.weights"][:-1]},
        lambda state: state | {"fc.weights": state["fc.weights"].reshape(1, -1)[:, :0]},
        lambda state: {name: value for name, value in state.items() if name != "calibration"},
        lambda state: state | {"calibration": np.array([np.nan, 0.0])},
        lambda state: state | {"calibration": np.zeros(3)},
    ],
    ids=["short", "empty", "lost", "nan", "long"],
)
def test_weights_that_do_not_fit_end_in_a_sentence(folder, cohort, change):
    state = change(load_file(folder / "weights.safetensors"))
    save_file(
        {name: np.ascontiguousarray(value) for name, value in state.items()}, folder / "weights.safetensors", {"format": FORMAT}
    )
    rewrite(folder)
    with pytest.raises(InputError, match=r"do not fit method fc-logistic|did not give one probability"):
        Method.load(folder).predict_proba(cohort)


def test_fields_that_ask_for_a_huge_network_are_refused_before_it_is_made(cohort, tmp_path):
    fields = {"length": 32, "epochs": 1, "warmup": 0}
    folder = make("m2lgdg", **dict(METHOD.variants["small"]) | fields).fit(cohort).save(tmp_path / "deep")
    changed = about(folder)["fields"] | {"hidden": 2**22}
    rewrite(folder, fields=changed)
    with pytest.raises(InputError, match=r"the weights do not fit method m2lgdg: \d+ numbers for a network of \d+"):
        Method.load(folder).predict_proba(cohort)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rois": 3}, "its rois are no names"),
        ({"rois": [1]}, "its rois are no names"),
        ({"inputs": "../../etc"}, "its inputs are no names"),
        ({"atlas": None}, "its atlas is no name"),
    ],
)
def test_odd_facts_are_refused(folder, change, words):
    rewrite(folder, facts=about(folder)["facts"] | change)
    with pytest.raises(InputError, match=words):
        Method.load(folder)


@pytest.mark.parametrize("facts", [[], None, {}, 3])
def test_lost_facts_are_refused(folder, facts):
    rewrite(folder, facts=facts)
    with pytest.raises(InputError, match=r"method.json is damaged"):
        Method.load(folder)
