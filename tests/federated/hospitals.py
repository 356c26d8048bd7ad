"""Helpers of the tests of federated training: a study by files, and the pooled fit that it must equal."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load, save

import m2lgdg
from m2lgdg.federated import exchange, keys, messages
from m2lgdg.federated.plan import Settings

SIZES = {"north": 14, "south": 13, "west": 12, "east": 11, "coast": 11, "hills": 10, "lakes": 10}


def by_site(cohort):
    return {site: cohort.select(sites=[site]) for site in cohort.site_names}


def study_of(cohort, **settings):
    return Settings("a" * 32, tuple(cohort.site_names), **{"inputs": cohort.inputs} | settings)


def pooled(cohort, **fields):
    return m2lgdg.make("connectome-adaptive", **{"phenotypes": bool(cohort.inputs)} | fields).fit(cohort)


def assert_pooled(fitted, cohort, **fields):
    """The fitted model is that of the pooled cohort."""
    other = pooled(cohort, **{"site_folds": fitted.method.site_folds} | fields)
    assert set(fitted.state_) == set(other.state_)
    for name in ("phenotypes.scaler.fill", "amplitude.low", "amplitude.high"):
        if name in other.state_:
            np.testing.assert_allclose(fitted.state_[name], other.state_[name], rtol=1e-12)
    assert np.abs(fitted.predict_proba(cohort) - other.predict_proba(cohort)).max() < 2e-7
    for key in ("rois", "inputs", "penalties"):
        assert fitted.facts_[key] == other.facts_[key]
    counts = [one.facts_.get("phenotypes", {}) for one in (fitted, other)]
    assert [set(one) for one in counts] == [set(counts[1])] * 2
    for key, value in counts[1].items():
        assert counts[0][key] == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert fitted.facts_["source"]["sites"] == other.facts_["source"]["sites"]
    assert fitted.facts_.get("standardised_scans") == other.facts_.get("standardised_scans")


def make_study(cohort, root, **settings):
    """Folders of a study and of its sites, which have joined; the first request is written."""
    exchange.init(root / "study", cohort.site_names, inputs=cohort.inputs, **settings)
    for site, part in by_site(cohort).items():
        shutil.copy(exchange.join(root / "study", part, site, root / site), root / "study" / "joins")
    assert exchange.combine(root / "study").round == 1


def agreed(root):
    """Fingerprint that the sites read to each other by telephone."""
    return messages.fingerprint(exchange.standing(root / "study").plan)


def answer_all(root, without=(), sites=None):
    newest = max(path.name for path in (root / "study" / "requests").iterdir())
    fingerprint = agreed(root) if newest.endswith("-001.safetensors") else ""
    for site in sites or exchange.open_study(root / "study").sites:
        if site not in without:
            exchange.step(root / site, root / "study", root / "study" / "answers", fingerprint, without)


def finish(root, **settings):
    """Go on until the model is written; its folder."""
    while True:
        answer_all(root, **settings)
        progress = exchange.combine(root / "study")
        if progress.request is None:
            return exchange.save_model(root / "study", progress)


def bits(fitted):
    return {name: value.tobytes() for name, value in fitted.state_.items()}


def request_of(root, number, attempt=1):
    """Bytes of a request that the coordinator wrote."""
    return (root / "study" / "requests" / exchange.request_name(attempt, number)).read_bytes()


def changed(content, head=None, arrays=None, drop=(), key=""):
    """Bytes of a message with another header or other arrays, signed with a private key if one is given."""
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"] | (head or {})
    kept = {name: value for name, value in load(content).items() if name not in drop} | (arrays or {})
    if key:
        del metadata["signature"]
        header, data = messages._parted(save(kept, metadata=metadata))
        metadata["signature"] = keys.sign(messages._joined(header, data), key)
    return save(kept, metadata=metadata)


def forged(root, content, **changes):
    """A request changed by the coordinator, who holds the key."""
    about = json.loads((root / "study" / "private" / "coordinator.json").read_text())
    return changed(content, **changes, key=about["signing"])
