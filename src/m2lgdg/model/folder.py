"""A model folder: method.json, weights and further files, with their hashes; written and read by `Model`.

A hash only shows that a file is unchanged, and anyone who alters a model can also recompute it. Every value used later is
therefore checked here, and only ordinary files of limited size are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.model.site_level import check_stored
from m2lgdg.scans import KINDS as CONNECTOMES
from m2lgdg.scans import SERIES
from m2lgdg.storage import InputError, file_hash, one_line, read_bytes, read_tensors, write_tensors, write_text

FORMAT = "m2lgdg-model-1"
LARGEST, LARGEST_ABOUT = 2**31, 2**24  # most bytes read from a model's tensors, and from its method.json
ABOUT, WEIGHTS = "method.json", "weights.safetensors"
SOURCE_DISTRIBUTION, NEW_SITE_CALIBRATION = "source_distribution.safetensors", "new_site_calibration.json"

# What each fact must be that predictions, cards and exports rely on; a name with ? may be absent, * is any name.
TEXT, TEXTS, COUNT, NUMBER, TRUTH = "a string", "a list of strings", "a count", "a finite number", "true or false"
FINDINGS, SCANS = "a list of findings", f"series or a kind of connectome ({', '.join(CONNECTOMES)})"
KINDS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    TEXTS: lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    COUNT: lambda value: type(value) is int and 0 <= value < 2**63,
    NUMBER: lambda value: type(value) in (int, float) and math.isfinite(value),
    TRUTH: lambda value: isinstance(value, bool),
    SCANS: lambda value: value in (SERIES, *CONNECTOMES),
    FINDINGS: lambda value: all(isinstance(one[key], str) for one in list(value) for key in ("level", "kind", "text")),
}
FACTS = {
    **{"rois": TEXTS, "inputs": TEXTS, "atlas": TEXT, "scans?": SCANS, "seed": COUNT, "notes?": TEXTS, "validation?": TEXT},
    **dict.fromkeys(("parameters?", "training_subjects?", "validation_subjects?"), COUNT),
    "tables?": {"*": {"columns": TEXTS, "subjects?": COUNT, "weight?": NUMBER, "relative?": NUMBER}},
    "table_confounds?": TEXTS,
    "source": {"cohort": TEXT, "hash": TEXT, "sites": {"*": {"patients": COUNT, "controls": COUNT}}, "findings?": FINDINGS},
    "local?": {"slope": NUMBER, "offset": NUMBER, "threshold": NUMBER, "findings?": FINDINGS},
    "site_level?": {
        **{"shift": NUMBER, "subjects": COUNT, "prevalence": NUMBER, "assumed": TRUTH, "site": TEXT, "recalibrated": TRUTH},
        **{"logits?": {"*": COUNT}, "scans?": TEXTS, "tables?": {"*": COUNT}, "findings?": FINDINGS},
    },
    "federated?": {
        **dict.fromkeys(("attempt", "rounds", "least_subjects"), COUNT),
        **{"study": TEXT, "masks": TRUTH, "alone": TEXTS, "left_out?": TEXT},
    },
}
AVERAGED = {"members?": {"*": FACTS}}  # of the methods of an average
ALL = {"method": TEXT, "code?": TEXT, "versions": {"*": TEXT}, "facts": FACTS | AVERAGED | {"parts?": {"*": FACTS | AVERAGED}}}


def write_folder(folder: Path, about: Mapping[str, Any], state: Mapping[str, npt.NDArray[Any]], files: Iterable[Path]) -> Path:
    """Write the weights and method.json with the hashes of all files; `files` are those already in the folder."""
    own = sys.modules["m2lgdg"].__version__  # of the package, which imports all others and is imported by none
    versions = {"m2lgdg": own, "numpy": np.__version__, "python": sys.version.split()[0]}
    content = {"format": FORMAT, **about, "versions": versions}
    weights = write_tensors(folder / WEIGHTS, state, {"format": FORMAT})
    hashes = {path.name: file_hash(path, LARGEST) for path in (weights, *files)}
    content["hashes"] = hashes | {ABOUT: digest(content)}
    write_text(folder / ABOUT, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return folder


@contextlib.contextmanager
def reading_about(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Content of method.json and its hashes, all verified; values that do not fit, also in the block, raise an InputError."""
    path = folder / ABOUT
    if not os.path.lexists(path):
        raise InputError(f"{folder} is not a model folder (no {ABOUT}).")
    try:
        about = json.loads(read_bytes(path, LARGEST_ABOUT).decode())
        if about["format"] != FORMAT:
            raise InputError(f"{path} does not have the format {FORMAT}.")
        hashes = _checked_hashes(folder, about)
        _check(about, ALL, ABOUT)
        _check_sites(about["facts"])
        yield about, hashes
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def read_weights(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a model by name."""
    return {name: np.array(value) for name, value in read_tensors(folder / WEIGHTS, FORMAT)[1].items()}


def distribution_name(member: int) -> str:
    """File of a source distribution: 0 is that of a model of one atlas, others are those of its members."""
    return f"source_distribution-{member}.safetensors" if member else SOURCE_DISTRIBUTION


def digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of the content of method.json without its hashes, as one canonical text."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode()).hexdigest()


def _checked_hashes(folder: Path, about: dict[str, Any]) -> dict[str, str]:
    """Hashes of the folder's files and of method.json itself, after each was verified."""
    if "hashes" not in about:
        raise InputError(f"{folder / ABOUT} has no hashes (it was altered); fit the model again.")
    hashes = dict(about.pop("hashes"))
    members = (distribution_name(i + 1) for i in range(len(about["facts"].get("parts", {}))))
    others = set(hashes) - {ABOUT, WEIGHTS, SOURCE_DISTRIBUTION, NEW_SITE_CALIBRATION, *members}
    if others:
        raise ValueError(f"hashes lists {str(min(others))[:100]}, which is not a file of a model")
    for name in (WEIGHTS, *sorted(set(hashes) - {ABOUT, WEIGHTS})):
        if file_hash(folder / name, LARGEST) != hashes.get(name):
            raise InputError(f"{folder / name} was altered after it was written (its hash differs from that in {ABOUT}).")
    if digest(about) != hashes.get(ABOUT):
        raise InputError(f"{folder / ABOUT} was altered after it was written (its own hash differs).")
    return hashes


def _check(value: Any, kind: Any, name: str) -> None:
    """Refuse a value that is not what FACTS says."""
    if isinstance(kind, str):
        if not KINDS[kind](value):
            raise ValueError(f"{name} is not {kind}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{name} does not have names and values")
    for key, inner in kind.items():
        for one in value if key == "*" else [key.removesuffix("?")]:
            if one in value or not key.endswith("?"):
                _check(value[one], inner, one)


def _check_sites(facts: Mapping[str, Any]) -> None:
    """Refuse what types do not show: other counts of a site than two, and two calibrations to a site."""
    if not facts["source"]["sites"] or any(len(site) > 2 for site in facts["source"]["sites"].values()):
        raise ValueError("source has no site, or one with other keys than patients and controls")
    if any({"parts", "local", "site_level"} & set(member) for member in facts.get("parts", {}).values()):
        raise ValueError("a member of the model has members or a calibration of its own")
    if "site_level" in facts:
        check_stored(facts["site_level"])
        if "local" in facts:
            raise ValueError("it has both a local calibration and a site level")
