"""Models saved before a field existed: they load, and predict as they did with the value that the method then had."""

import json

import numpy as np
import pytest

from m2lgdg import make, make_cohort
from m2lgdg.method import Method
from m2lgdg.model.folder import LARGEST, digest
from m2lgdg.storage import file_hash

QUICK = {"length": 32, "epochs": 2, "warmup": 1}
# As each method was before it had these fields, in the value that it then worked with.
FORMER = {
    "cdann": {"phenotypes": True},
    "iib": {"phenotypes": True},
    "metaexplainer": {"phenotypes": True, "attention": True},
    "ufa-net": {"scaling": "roi", "mmd": "biased"},
    "m2dc": {"clock": True, "crop": 1.0, "select_from": 0.0},
    "mm-gtunets": {"used_phenotypes": ()},
}
ADDED = (
    *("phenotypes", "attention", "update_rule", "scaling", "mmd", "density", "clock", "crop", "crops", "select_from"),
    "used_phenotypes",
)


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", seed=1)


def aged(folder, inputs):
    """Take the new fields out of method.json, as an earlier version would have written it, with the inputs it recorded."""
    about = json.loads((folder / "method.json").read_text())
    hashes = {name: file_hash(folder / name, LARGEST) for name in about.pop("hashes") if name != "method.json"}
    about["fields"] = {name: value for name, value in about["fields"].items() if name not in ADDED}
    about["facts"]["inputs"] = inputs
    about["hashes"] = hashes | {"method.json": digest(about)}
    (folder / "method.json").write_text(json.dumps(about))


@pytest.mark.parametrize("name", FORMER)
def test_a_model_of_an_earlier_version_predicts_as_before(name, cohort, tmp_path):
    cls = type(make(name))
    fields = {**cls.variants["small"], **QUICK, **FORMER[name]}
    fitted = make(name, **{field: value for field, value in fields.items() if field not in cls.unused}).fit(cohort, seed=0)
    folder = fitted.save(tmp_path / "model")
    aged(folder, fitted.facts_["inputs"])
    loaded = Method.load(folder)
    assert {field: getattr(loaded, field) for field in FORMER[name]} == FORMER[name]
    np.testing.assert_array_equal(loaded.predict_proba(cohort), fitted.predict_proba(cohort))


def test_a_network_that_recorded_phenotypes_it_did_not_use(cohort, tmp_path):
    """Networks on the scan alone used to list the cohort's inputs and to keep a scaler of them."""
    fitted = make("brainnetcnn", **type(make("brainnetcnn")).variants["small"] | {"epochs": 2, "warmup": 1}).fit(cohort, seed=0)
    inputs = list(cohort.inputs)
    before = fitted.predict_proba(cohort)
    fitted.state_ |= {f"scaler.{part}": np.ones(len(inputs)) for part in ("fill", "mean", "scale")}
    folder = fitted.save(tmp_path / "model")
    aged(folder, inputs)
    loaded = Method.load(folder)
    assert loaded.facts_["inputs"] == inputs and not loaded.phenotypes
    np.testing.assert_array_equal(loaded.predict_proba(cohort), before)
