"""Validation of a model folder: the check between a folder of unknown origin and `Model.load`.

A hash only shows that a file is unchanged, and anyone who alters a model can also recompute it. Every
value used later is therefore validated here, and only ordinary files of limited size are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg import __version__
from m2lgdg.model.site_level import check_site_level
from m2lgdg.storage import InputError, file_hash, one_line, read_bytes, read_tensors, write_tensors, write_text

FORMAT = "m2lgdg-model-1"
LARGEST, LARGEST_ABOUT = 2**31, 2**24  # most bytes read from a model's tensors, and from its method.json
ABOUT, WEIGHTS = "method.json", "weights.safetensors"
SOURCE_DISTRIBUTION, NEW_SITE_CALIBRATION = "source_distribution.safetensors", "new_site_calibration.json"
FINDING = ("level", "kind", "text")  # of a finding about the training or calibration subjects
FORMER = {SOURCE_DISTRIBUTION: "limits.safetensors", NEW_SITE_CALIBRATION: "promise.json"}  # file names until version 0.1


def write_folder(folder: Path, about: Mapping[str, Any], state: Mapping[str, npt.NDArray[Any]], files: Iterable[Path]) -> Path:
    """Write the weights and method.json with the hashes of all files; `files` are those already in the folder."""
    versions = {"m2lgdg": __version__, "numpy": np.__version__, "python": sys.version.split()[0]}
    content = {"format": FORMAT, **about, "versions": versions}
    weights = write_tensors(folder / WEIGHTS, state, {"format": FORMAT})
    hashes = {path.name: file_hash(path, LARGEST) for path in (weights, *files)}
    content["hashes"] = hashes | {ABOUT: digest(content)}
    write_text(folder / ABOUT, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return folder


@contextlib.contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    """Context that reads method.json: a folder without one, or with values that do not fit, raises an InputError."""
    path = folder / ABOUT
    if not os.path.lexists(path):
        raise InputError(f"{folder} is not a model folder (no method.json).")
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def read_weights(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a model by name."""
    return {name: np.array(value) for name, value in read_tensors(folder / WEIGHTS, FORMAT)[1].items()}


def read_about(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Content of method.json and its hashes, all verified; a damaged file raises the plain Python error."""
    path = folder / ABOUT
    about = json.loads(read_bytes(path, LARGEST_ABOUT).decode(), object_pairs_hook=_once)
    if about["format"] != FORMAT:
        raise InputError(f"{path} does not have the format {FORMAT}.")
    hashes = _checked_hashes(folder, about)
    if not isinstance(about["method"], str):
        raise ValueError("method is not a string")
    _texts(about["versions"])
    check_facts(about["facts"])
    for part in about["facts"].get("parts", {}).values():
        check_facts(part)
        if {"parts", "local", "site_level"} & set(part):
            raise ValueError("a part of the model has parts or a calibration of its own")
    return about, hashes


def stored_name(name: str, hashes: Mapping[str, str]) -> str | None:
    """Current or former name under which a folder stores an optional file; None if it has no such file."""
    return next((candidate for candidate in (name, FORMER.get(name)) if candidate in hashes), None)


def distribution_name(part: int) -> str:
    """File of a source distribution: 0 is that of a model of one atlas, others are those of its parts."""
    return f"source_distribution-{part}.safetensors" if part else SOURCE_DISTRIBUTION


def digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of the content of method.json without its hashes, as one canonical text."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode()).hexdigest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object without repeated keys, so that two parsers cannot read it differently."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)} occurs twice")
    return content


def _checked_hashes(folder: Path, about: dict[str, Any]) -> dict[str, str]:
    """Hashes of the folder's files and of method.json itself, after each was verified."""
    if "hashes" not in about:
        raise InputError(f"{folder / ABOUT} has no hashes (written by an earlier version, or altered); fit the model again.")
    hashes = dict(about.pop("hashes"))
    parts = (distribution_name(i + 1) for i in range(len(about["facts"].get("parts", {}))))
    others = set(hashes) - {ABOUT, WEIGHTS, *FORMER, *FORMER.values(), *parts}
    if others:
        raise ValueError(f"hashes lists {str(min(others))[:100]}, which is not a file of a model")
    for name in (WEIGHTS, *sorted(set(hashes) - {ABOUT, WEIGHTS})):
        if file_hash(folder / name, LARGEST) != hashes.get(name):
            raise InputError(f"{folder / name} was altered after it was written (its hash differs from that in method.json).")
    if digest(about) != hashes.get(ABOUT):
        raise InputError(f"{folder / ABOUT} was altered after it was written (its own hash differs).")
    return hashes


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse facts whose types differ from those that predictions, cards and exports rely on."""
    for key in ("rois", "inputs", *(["notes"] if "notes" in facts else [])):
        if not isinstance(facts[key], list) or not all(isinstance(name, str) for name in facts[key]):
            raise ValueError(f"{key} is not a list of strings")
    source = facts["source"]
    texts = {"atlas": facts["atlas"], "cohort": source["cohort"], "hash": source["hash"]}
    texts |= {key: facts[key] for key in ("validation",) if key in facts}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} is not a string")
    counts = ("parameters", "training_subjects", "validation_subjects")
    _counts({"seed": facts["seed"]} | {key: facts[key] for key in counts if key in facts})
    for site in source["sites"].values():
        _counts({"patients": site["patients"], "controls": site["controls"]})
        if len(site) > 2:
            raise ValueError("a source site has other keys than patients and controls")
    _check_site(facts)
    _check_federated(facts)
    stored = [given.get("findings", []) for given in (source, facts.get("local", {}), facts.get("site_level", {}))]
    for findings in stored:
        if not isinstance(findings, list) or not all(isinstance(one[key], str) for one in findings for key in FINDING):
            raise ValueError("findings are not a list of texts")


def _check_site(facts: Mapping[str, Any]) -> None:
    """Refuse a local calibration or a site level with other values than those that predictions use, and both together."""
    if "site_level" in facts:
        check_site_level(facts["site_level"])
        if "local" in facts:
            raise ValueError("it has both a local calibration and a site level")
    if "local" in facts and not all(math.isfinite(float(facts["local"][key])) for key in ("slope", "offset", "threshold")):
        raise ValueError("the local calibration is not finite")


def _check_federated(facts: Mapping[str, Any]) -> None:
    """Refuse facts of a federated fit with other values than those that the card shows."""
    if "federated" not in facts:
        return
    given = facts["federated"]
    _counts({key: given[key] for key in ("attempt", "rounds", "least_subjects")})
    if not isinstance(given["study"], str) or not isinstance(given["masks"], bool) or not isinstance(given["alone"], list):
        raise ValueError("the facts of the federated fit have a value of the wrong type")
    if not all(isinstance(site, str) for site in given["alone"]):
        raise ValueError("the facts of the federated fit name a site that is not a text")
    if not isinstance(given.get("left_out", ""), str):
        raise ValueError("the facts of the federated fit name a site that is not a text")
    noise = given.get("noise", {"epsilon": 1.0, "delta": 0.0})
    if not all(math.isfinite(float(noise[key])) and float(noise[key]) >= 0 for key in ("epsilon", "delta")):
        raise ValueError("the noise of the federated fit is not a number")


def _counts(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise ValueError(f"{key} is not a count")


def _texts(given: Mapping[str, Any]) -> None:
    if not all(isinstance(value, str) for value in given.values()):
        raise ValueError("versions are not strings")
