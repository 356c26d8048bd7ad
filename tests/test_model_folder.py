"""Model folders that were damaged, altered or made to harm: each is refused in a sentence, and before memory is taken."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from m2lgdg import METHODS, InputError, make, make_cohort
from m2lgdg.method import Method
from m2lgdg.model.folder import FORMAT, FORMER, LARGEST, digest
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


def test_a_folder_with_the_former_file_names_is_the_same_model(cohort, tmp_path):
    fitted = make("fc-logistic").fit(cohort.select(cohort.sites != "west"), source_distribution=True, new_site_calibration=True)
    new = cohort.select(sites=["west"])
    folder = fitted.save(tmp_path / "model")
    content = about(folder)
    for name, former in FORMER.items():
        (folder / name).rename(folder / former)
        content["hashes"][former] = content["hashes"].pop(name)
    content["hashes"].pop("method.json")
    hashes = content.pop("hashes")
    content["hashes"] = hashes | {"method.json": digest(content)}
    (folder / "method.json").write_text(json.dumps(content))
    files = {file.name for file in folder.iterdir()}
    assert files == {"method.json", "weights.safetensors", "limits.safetensors", "promise.json"} == set(content["hashes"])
    loaded = Method.load(folder)
    assert np.array_equal(loaded.predict_proba(new), fitted.predict_proba(new))
    assert loaded.threshold == fitted.threshold != 0.5
    assert loaded.recalibration == fitted.recalibration != (1.0, 0.0)
    assert loaded.new_site_.sets([0.1, 0.5, 0.9]).tolist() == fitted.new_site_.sets([0.1, 0.5, 0.9]).tolist()
    scores, expected = loaded.source_distribution_.scores(new), fitted.source_distribution_.scores(new)
    assert list(scores) == list(expected) == ["connectivity", "phenotypes"]
    for name, values in expected.items():
        assert np.array_equal(scores[name], values, equal_nan=True) and np.isfinite(values).all()
    again = about(loaded.save(tmp_path / "again"))  # written under the new names
    assert {*FORMER, "weights.safetensors", "method.json"} == set(again["hashes"])


@pytest.mark.parametrize("former", FORMER.values())
def test_an_altered_file_with_a_former_name_is_refused(cohort, tmp_path, former):
    folder = make("fc-logistic").fit(cohort, source_distribution=True, new_site_calibration=True).save(tmp_path / "model")
    content = about(folder)
    name = next(name for name in FORMER if FORMER[name] == former)
    (folder / name).rename(folder / former)
    content["hashes"][former] = content["hashes"].pop(name)
    (folder / "method.json").write_text(json.dumps(content))
    (folder / former).write_bytes((folder / former).read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{former} was altered after it was written"):
        Method.load(folder)


def test_every_file_is_hashed(folder):
    import hashlib

    hashes = about(folder)["hashes"]
    assert sorted(hashes) == ["method.json", "source_distribution.safetensors", "weights.safetensors"]
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
    with pytest.raises(InputError, match=r"method.json was altered after it was written \(its own hash differs\)"):
        Method.load(folder)


def test_a_folder_without_hashes_is_refused(folder):
    said = about(folder)
    del said["hashes"]
    (folder / "method.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"has no hashes \(written by an earlier version, or altered\); fit the model again"):
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
    with pytest.raises(InputError, match=r"weights.safetensors is damaged or not an m2lgdg-model-1 file"):
        Method.load(folder)


def test_huge_files_are_refused_unread(folder):
    os.truncate(folder / "weights.safetensors", LARGEST + 1)  # sparse: it takes no room on the disk
    with pytest.raises(InputError, match=f"has {LARGEST + 1} bytes, more than the limit of {LARGEST}"):
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
        ({"rois": 3}, "rois is not a list of strings"),
        ({"rois": [1]}, "rois is not a list of strings"),
        ({"inputs": "../../etc"}, "inputs is not a list of strings"),
        ({"atlas": None}, "atlas is not a string"),
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
