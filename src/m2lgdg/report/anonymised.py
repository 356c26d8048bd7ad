"""What leaves the house: ids become salted hashes, ages bands, and words that may hold a path, a host or a person are withheld.

Between what was made at home and what is given away (`m2lgdg report --share`, `export --share`, `predict --share`). The salt is
drawn anew for each output and kept nowhere, so that nobody, its maker included, can go back from a hash or join two outputs.
"""

from __future__ import annotations

import copy
import getpass
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.data.pseudonyms import Pseudonyms
from m2lgdg.method import Method
from m2lgdg.model.out_of_distribution import MEASURES
from m2lgdg.report.card import LICENCES
from m2lgdg.report.contents import Contents
from m2lgdg.storage import InputError

YEARS = 5  # of a band of ages
WITHHELD = "withheld"
PATH = re.compile(r"(^|[\s=\"'(])(~?/|\.{1,2}/|[A-Za-z]:\\|\\\\)")  # the beginning of one, in a name
CELL = ["method", "variant", "seed", "target"]


def age_band(age: float) -> str:
    """The five years that an age is in."""
    low = int(age // YEARS) * YEARS
    return f"{low} to {low + YEARS - 1}"


def identifying_words_withheld(ids: Iterable[str] = ()) -> Callable[[str], str]:
    """A filter for words that somebody wrote: whole where they hold no path, id, host or user name, else `withheld`."""
    people = {getpass_user(), socket.gethostname(), *socket.gethostname().split(".")[:1], Path.home().name}
    given = set(ids)
    long = {one for one in given if len(one) > 3}
    short = {word for word in people if len(word) > 1} | (given - long)
    alone = re.compile(r"(?<![^\W_])(?:" + "|".join(map(re.escape, sorted(short))) + r")(?![^\W_])", re.IGNORECASE)

    def told(text: str) -> str:
        hidden = "/" in text or "\\" in text or (short and alone.search(text)) or any(one in text for one in long)
        return WITHHELD if hidden else text

    return told


def getpass_user() -> str:
    """Who runs this, where the system knows."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without an entry for its user
        return ""


def cohort_name(name: str) -> str:
    """The name of a public release; any other is that of somebody's folder."""
    return name if name.lower() in LICENCES else "cohort"


def shared_contents(contents: Contents) -> Contents:
    """A study's contents as they may be shown to others; methods, variants, sites, phenotypes and ROIs keep their names."""
    names = Pseudonyms()
    for name in {*contents.predictions["method"], *contents.predictions["variant"], *contents.predictions["target"]}:
        if PATH.search(name):
            raise InputError(f"{name!r} is the name of a method, variant or site and holds a path: it cannot be shared.")
    ids = {*contents.predictions["subject"], *(row["subject"] for row in contents.inclusion)}
    told = identifying_words_withheld(ids)
    study = contents.study | {
        "name": _or(told(str(contents.study.get("name", "study"))), "study"),
        "method": {name: _fields(fields, told) for name, fields in (contents.study.get("method") or {}).items()},
    }
    cohort = contents.cohort
    if cohort is not None:
        subjects = np.array([names(str(one)) for one in cohort.subjects])
        notes = tuple(note for note in cohort.notes if told(note) != WITHHELD)
        cohort = cohort._changed(
            subjects=subjects,
            phenotypes=cohort.phenotypes.set_axis(subjects, axis=0),
            name=cohort_name(cohort.name),
            notes=notes,
            excluded=(),
        )
    return replace(
        contents,
        predictions=names.sorted_table(contents.predictions, CELL),
        study=study,
        inclusion=[
            row | {"subject": names(row["subject"]), "reason": _exclusion(row["reason"], told)} for row in contents.inclusion
        ],
        failures=[row | {"reason": _failure(row["reason"])} for row in contents.failures],
        cohort=cohort,
    )


def shared_facts(known: Mapping[str, str], contents: Contents) -> dict[str, str]:
    """What checklists may say: the facts of the folder where they name no person or place; `contents` are shared ones."""
    from m2lgdg.report.tables import changed_fields

    facts = dict(known)
    reasons = pd.Series([row["reason"] for row in contents.inclusion if row["status"] == "excluded"], dtype=str)
    told = {
        "study": str(contents.study["name"]),
        "hyperparameters": changed_fields(contents.study) or "nothing",
        "exclusions": "; ".join(f"{why} {count}" for why, count in reasons.value_counts().items()) or "none",
    }
    if contents.cohort is not None:
        told["cohort_name"] = contents.cohort.name
        told["outcome"] = next((note for note in contents.cohort.notes if "label" in note), "")
        told["characteristics"] = "; ".join(
            _banded(part, contents.cohort.phenotypes) for part in facts["characteristics"].split("; ")
        )
    return facts | {key: value for key, value in told.items() if key in facts}


def _banded(part: str, table: pd.DataFrame) -> str:
    if not part.startswith("age "):
        return part
    low, middle, high = (age_band(float(age)) for age in table["age"].quantile([0.25, 0.5, 0.75]))
    return f"age median in {middle} (quartiles in {low} and {high})"


def shared_model(fitted: Method) -> Method:
    """A fitted method that may be given away: the same weights; typical ages are the middle of their band.

    What it gives to subjects whose age is known is the same, bit for bit.
    """
    kept = [name for name in fitted.remembers if name in fitted.state_] or _rows_of_subjects(fitted)
    if kept:
        raise InputError(
            f"method {fitted.name} keeps features of its source subjects ({', '.join(kept)}): it cannot be shared."
        )
    told = identifying_words_withheld()
    for name, value in fitted.fields().items():
        if told(str(value)) == WITHHELD:
            raise InputError(f"field {name} of the model may hold a path or a user or host name: it cannot be shared.")
    shared = copy.copy(fitted)
    shared.facts_ = fitted.facts_ | {
        "source": fitted.facts_["source"] | {"cohort": cohort_name(fitted.facts_["source"]["cohort"])}
    }
    if "notes" in shared.facts_:
        shared.facts_["notes"] = [note for note in fitted.facts_["notes"] if told(note) != WITHHELD]
    shared.state_ = {
        name: _middle(value, fitted.facts_["inputs"]) if name.endswith("scaler.fill") else value
        for name, value in fitted.state_.items()
    }
    if fitted.source_distribution_ is not None:
        ranges = fitted.source_distribution_.ranges.copy()
        low, middle, high = ranges[MEASURES.index("age")]
        ranges[MEASURES.index("age")] = _floor(low), _floor(middle) + YEARS / 2, _floor(high) + YEARS
        shared.source_distribution_ = replace(fitted.source_distribution_, ranges=ranges)
    return shared


def _rows_of_subjects(fitted: Method) -> list[str]:
    """Arrays of a plugin that have a row for each source subject, whose author forgot to say so in `remembers`."""
    if type(fitted).__module__.startswith("m2lgdg."):
        return []  # ours say it, and a test holds that; an array of theirs may have as many rows by chance
    subjects = sum(sum(site.values()) for site in fitted.facts_["source"]["sites"].values())
    return [name for name, value in fitted.state_.items() if value.ndim and len(value) == subjects]


def _middle(fill: npt.NDArray[Any], inputs: list[str]) -> npt.NDArray[Any]:
    ages = np.array([name.lower() == "age" for name in inputs], dtype=bool)
    return np.where(ages, _floor(fill) + YEARS / 2, fill)


def _floor(ages: Any) -> Any:
    return np.floor(np.asarray(ages) / YEARS) * YEARS


def _fields(fields: Mapping[str, Any], told: Callable[[str], str]) -> dict[str, Any]:
    return {name: WITHHELD if told(str(value)) == WITHHELD else value for name, value in fields.items()}


def _or(text: str, other: str) -> str:
    return other if text == WITHHELD else text


def _exclusion(reason: str, told: Callable[[str], str]) -> str:
    """A reason that ends as a sentence is about one file and one subject."""
    return "unusable file" if reason.endswith(".") else _or(told(reason), "another reason")


def _failure(reason: str) -> str:
    """The kind of an error alone: its words are a method's own and may quote anything."""
    kind = re.match(r"[A-Za-z]+(?:Error|Exception)(?=:|$)", reason)
    return kind[0] if kind else f"reason {WITHHELD}"
