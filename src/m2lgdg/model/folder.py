"""What method.json of a model folder may say: the border between a folder that anybody may have made and `Method.load`.

Stands before `method`. A hash only shows that a file is as it was written; whoever alters a model can also compute one, so that
every value which is used later is looked at here, and files are opened only where they are ordinary and small enough.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2lgdg.storage import InputError, file_hash, read_bytes

FORMAT = "m2lgdg-model-1"
LARGEST, LARGEST_ABOUT = 2**31, 2**24  # bytes that are read of a model's tensors, and of its method.json
ABOUT, WEIGHTS = "method.json", "weights.safetensors"
SOURCE_DISTRIBUTION, NEW_SITE_CALIBRATION = "source_distribution.safetensors", "new_site_calibration.json"
FORMER = {SOURCE_DISTRIBUTION: "limits.safetensors", NEW_SITE_CALIBRATION: "promise.json"}  # names until version 0.1


def read_about(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What method.json says, and the hashes it gives, all of which are true; raises what Python raises at damage."""
    path = folder / ABOUT
    about = json.loads(read_bytes(path, LARGEST_ABOUT).decode(), object_pairs_hook=_once)
    if about["format"] != FORMAT:
        raise InputError(f"{path} is not of format {FORMAT}.")
    hashes = _checked_hashes(folder, about)
    if not isinstance(about["method"], str):
        raise ValueError("its method is no name")
    _texts(about["versions"])
    check_facts(about["facts"])
    return about, hashes


def stored_name(name: str, hashes: Mapping[str, str]) -> str | None:
    """The name under which a folder stores an optional file, perhaps its former one; None where it has no such file."""
    return next((one for one in (name, FORMER[name]) if one in hashes), None)


def digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of what method.json says, but for the hashes, as one canonical text."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode()).hexdigest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which two parsers cannot read different things."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)} twice")
    return found


def _checked_hashes(folder: Path, about: dict[str, Any]) -> dict[str, str]:
    """The hashes that method.json gives of the folder's files, and of itself, once each is found to be true."""
    if "hashes" not in about:
        raise InputError(f"{folder / ABOUT} has no hashes: it is of an earlier version, or altered; fit the model again.")
    hashes = dict(about.pop("hashes"))
    others = set(hashes) - {ABOUT, WEIGHTS, *FORMER, *FORMER.values()}
    if others:
        raise ValueError(f"a hash is of {str(min(others))[:100]}, which is no file of a model")
    for name in (WEIGHTS, *sorted(set(hashes) - {ABOUT, WEIGHTS})):
        if file_hash(folder / name, LARGEST) != hashes.get(name):
            raise InputError(f"{folder / name} was altered after it was written: it does not match its hash in method.json.")
    if digest(about) != hashes.get(ABOUT):
        raise InputError(f"{folder / ABOUT} was altered after it was written: it does not match its own hash.")
    return hashes


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse facts of other kinds than those that predictions, cards and exports rest on."""
    for key in ("rois", "inputs", *(["notes"] if "notes" in facts else [])):
        if not isinstance(facts[key], list) or not all(isinstance(name, str) for name in facts[key]):
            raise ValueError(f"its {key} are no names")
    source = facts["source"]
    texts = {"atlas": facts["atlas"], "cohort": source["cohort"], "hash": source["hash"]}
    texts |= {key: facts[key] for key in ("validation",) if key in facts}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"its {key} is no name")
    counts = ("parameters", "training_subjects", "validation_subjects")
    _counts({"seed": facts["seed"]} | {key: facts[key] for key in counts if key in facts})
    for one in source["sites"].values():
        _counts({"patients": one["patients"], "controls": one["controls"]})
        if len(one) > 2:
            raise ValueError("a site of its source has more than patients and controls")
    if "local" in facts and not all(math.isfinite(float(facts["local"][key])) for key in ("slope", "offset", "threshold")):
        raise ValueError("its local calibration is no number")


def _counts(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise ValueError(f"its {key} is no count")


def _texts(given: Mapping[str, Any]) -> None:
    if not all(isinstance(value, str) for value in given.values()):
        raise ValueError("its versions are no names")
