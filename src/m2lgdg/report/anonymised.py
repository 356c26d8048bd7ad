"""De-identified copies for sharing: hashed subject ids, ages in bands, and no text that may name a path, host or person.

Used by `m2lgdg report --share` and `export --share`. The salt of the hashes is drawn anew for each output and stored nowhere,
so that no one, the author included, can recover an id or link two outputs.
"""

from __future__ import annotations

import copy
import getpass
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.data.pseudonyms import Pseudonyms
from m2lgdg.findings import Finding, note_on_label, text_finding
from m2lgdg.method import Method
from m2lgdg.model.model import Model
from m2lgdg.model.out_of_distribution import MEASURES, SourceDistribution
from m2lgdg.report.card import LICENCES
from m2lgdg.report.contents import Contents
from m2lgdg.report.paths import has_path, without_paths
from m2lgdg.report.sharing import refuse_paths, structural_names
from m2lgdg.report.subgroups import without_small_groups
from m2lgdg.storage import InputError
from m2lgdg.study.description import LEAST

YEARS = 5  # width of an age band
WITHHELD = "withheld"
HIDDEN_FINDING = "A finding that may name a subject or a file is withheld."
CELL = ["method", "variant", "seed", "target"]


def age_band(age: float) -> str:
    """Five-year band of an age."""
    low = int(age // YEARS) * YEARS
    return f"{low} to {low + YEARS - 1}"


def identifying_words_withheld(ids: Iterable[str] = ()) -> Callable[[str], str]:
    """Filter for free text: returns it unchanged if it has no path, id, host or user name, else `withheld`."""
    people = {getpass_user(), socket.gethostname(), *socket.gethostname().split(".")[:1], Path.home().name}
    known = set(ids)
    long = {name for name in known if len(name) > 3}
    short = {name for name in people if len(name) > 1} | (known - long)  # matched as whole words only
    whole_word = re.compile(r"(?<![^\W_])(?:" + "|".join(map(re.escape, sorted(short))) + r")(?![^\W_])", re.IGNORECASE)

    def filtered(text: str) -> str:
        hidden = has_path(text) or (short and whole_word.search(text)) or any(name in text for name in long)
        return WITHHELD if hidden else text

    return filtered


def getpass_user() -> str:
    """User name, or an empty string if the system has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without a passwd entry for its user
        return ""


def cohort_name(name: str) -> str:
    """Name of a public release; other names may be those of a private folder and become `cohort`."""
    return name if name.lower() in LICENCES else "cohort"


def shared_contents(contents: Contents) -> Contents:
    """De-identified contents of a study; methods, variants, sites, phenotypes and ROIs keep their names."""
    names = Pseudonyms()
    refuse_paths(structural_names(contents))
    ids = {*contents.predictions["subject"], *(row["subject"] for row in contents.inclusion)}
    filtered = identifying_words_withheld(ids)
    study = contents.study | {
        "name": _unless_withheld(filtered(str(contents.study.get("name", "study"))), "study"),
        "method": {name: _fields(fields, filtered) for name, fields in (contents.study.get("method") or {}).items()},
    }
    cohort = contents.cohort
    if cohort is not None:
        subjects = np.array([names(str(subject)) for subject in cohort.subjects])
        notes = tuple(note for note in cohort.notes if filtered(str(note)) != WITHHELD)
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
        adapted=None if contents.adapted is None else names.sorted_table(contents.adapted, CELL),
        study=study,
        inclusion=[
            row | {"subject": names(row["subject"])} | dict.fromkeys(("reason", "kind"), _exclusion(row["kind"], filtered))
            for row in contents.inclusion
        ],
        checks=[row | {"detail": without_paths(str(row.get("detail", "")))} for row in contents.checks],
        failures=[row | {"reason": _failure(row["reason"])} for row in contents.failures],
        cohort=cohort,
        about_cohort=contents.about_cohort._replace(
            findings=_findings(contents.findings, filtered), description=shared_description(contents.description)
        ),
    )


def _findings(findings: Sequence[Finding] | None, filtered: Callable[[str], str]) -> tuple[Finding, ...] | None:
    """Findings without ids, file names and paths; None, for a cohort that was not checked, stays None."""
    if findings is None:
        return None
    texts = [_unless_withheld(filtered(one.anonymous), HIDDEN_FINDING) for one in findings]
    return tuple(text_finding(text, kind=one.kind) for one, text in zip(findings, texts, strict=True))


def shared_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """Groups and sites of a cohort for sharing: ages in bands, and nothing personal of small groups.

    Sexes are left out by site, and everywhere if a class has fewer than ten of one sex, because sizes follow by subtraction.
    """
    shared = without_small_groups(description)
    groups = shared.get("groups", {})
    sexes = [
        size for group in groups.values() if "male" in group for size in (group["male"], group["sex_known"] - group["male"])
    ]
    for name in ("groups", "sites"):
        for group in shared.get(name, {}).values():
            if name == "sites" or min(sexes, default=0) < LEAST:
                group.pop("male", None)
                group.pop("sex_known", None)
            if "age" in group:
                group["age"] = f"median in {age_band(group['age'][1])}"
    return shared


def shared_facts(known: Mapping[str, str], contents: Contents) -> dict[str, str]:
    """Facts for the checklists without names of people or paths; `contents` are those of `shared_contents`."""
    from m2lgdg.report.tables import changed_fields

    facts = dict(known)
    reasons = pd.Series([row["reason"] for row in contents.inclusion if row["status"] == "excluded"], dtype=str)
    replaced = {
        "study": str(contents.study["name"]),
        "hyperparameters": changed_fields(contents.study) or "none",
        "exclusions": "; ".join(f"{why} {count}" for why, count in reasons.value_counts().items()) or "none",
    }
    if contents.cohort is not None:
        replaced["cohort_name"] = contents.cohort.name
        replaced["outcome"] = note_on_label(contents.cohort.notes)
        replaced["characteristics"] = "; ".join(
            _banded(part, contents.cohort.phenotypes) for part in facts["characteristics"].split("; ")
        )
    facts |= {key: value for key, value in replaced.items() if key in facts}
    return {key: without_paths(value) for key, value in facts.items()}


def _banded(part: str, table: pd.DataFrame) -> str:
    if not part.startswith("age "):
        return part
    low, middle, high = (age_band(float(age)) for age in table["age"].quantile([0.25, 0.5, 0.75]))
    return f"age median in {middle} (quartiles in {low} and {high})"


def shared_model(fitted: Model) -> Model:
    """Copy of a fitted method for sharing: the same weights; typical ages become the middle of their band.

    Its predictions for subjects of known age are the same, bit for bit.
    """
    filtered = identifying_words_withheld()
    for name, value in fitted.fields().items():
        if filtered(str(value)) == WITHHELD:
            raise InputError(f"field {name} of the model may contain a path, user or host name, so it cannot be shared.")
    shared = copy.copy(fitted)
    shared.members = {name: _shared_member(member, filtered) for name, member in fitted.members.items()}
    if len(shared.members) == 1:
        (shared.method,) = shared.members.values()
        shared.facts_ = shared.method.facts_
    else:
        parts = {name: member.facts_ for name, member in shared.members.items()}
        shared.facts_ = _shared_facts(fitted.facts_, filtered) | {"parts": parts}
    shared.source_distributions = {name: _banded_ages(one) for name, one in fitted.source_distributions.items()}
    return shared


def _shared_member(fitted: Method, filtered: Callable[[str], str]) -> Method:
    remembered = [name for name in fitted.remembers if name in fitted.state_] or _rows_of_subjects(fitted)
    if remembered:
        names = ", ".join(remembered)
        raise InputError(f"method {fitted.name} keeps features of its source subjects ({names}) and cannot be shared.")
    shared = copy.copy(fitted)
    shared.facts_ = _shared_facts(fitted.facts_, filtered)
    shared.state_ = {
        name: _middle(value, fitted.facts_["inputs"]) if name.endswith("scaler.fill") else value
        for name, value in fitted.state_.items()
    }
    return shared


def _shared_facts(facts: dict[str, Any], filtered: Callable[[str], str]) -> dict[str, Any]:
    source = facts["source"]
    shared = facts | {"source": _stored_findings(source, filtered) | {"cohort": cohort_name(source["cohort"])}}
    if "local" in facts:
        shared["local"] = _stored_findings(facts["local"], filtered)
    if "site_level" in facts:  # without the counts of scores, which only an update needs
        level = {name: value for name, value in facts["site_level"].items() if name != "logits"}
        shared["site_level"] = _stored_findings(level, filtered)
    if "notes" in facts:
        shared["notes"] = [note for note in facts["notes"] if filtered(note) != WITHHELD]
    return shared


def _banded_ages(distribution: SourceDistribution) -> SourceDistribution:
    ranges = distribution.ranges.copy()
    low, middle, high = ranges[MEASURES.index("age")]
    ranges[MEASURES.index("age")] = _floor(low), _floor(middle) + YEARS / 2, _floor(high) + YEARS
    return replace(distribution, ranges=ranges)


def _stored_findings(facts: dict[str, Any], filtered: Callable[[str], str]) -> dict[str, Any]:
    """Facts of a model with the findings among them filtered."""
    if "findings" not in facts:
        return facts
    texts = [one | {"text": _unless_withheld(filtered(one["text"]), HIDDEN_FINDING)} for one in facts["findings"]]
    return facts | {"findings": texts}


def _rows_of_subjects(fitted: Method) -> list[str]:
    """Arrays of a plugin with one row per source subject that its author did not list in `remembers`."""
    if type(fitted).__module__.startswith("m2lgdg."):
        return []  # ours list them, as a test checks; another array may have as many rows by chance
    subjects = sum(sum(site.values()) for site in fitted.facts_["source"]["sites"].values())
    return [name for name, value in fitted.state_.items() if value.ndim and len(value) == subjects]


def _middle(fill: npt.NDArray[Any], inputs: list[str]) -> npt.NDArray[Any]:
    ages = np.array([name.lower() == "age" for name in inputs], dtype=bool)
    return np.where(ages, _floor(fill) + YEARS / 2, fill)


def _floor(ages: Any) -> Any:
    return np.floor(np.asarray(ages) / YEARS) * YEARS


def _fields(fields: Mapping[str, Any], filtered: Callable[[str], str]) -> dict[str, Any]:
    return {name: WITHHELD if filtered(str(value)) == WITHHELD else value for name, value in fields.items()}


def _unless_withheld(text: str, replacement: str) -> str:
    return replacement if text == WITHHELD else text


def _exclusion(general: str, filtered: Callable[[str], str]) -> str:
    """Reason of an exclusion, unless a name occurs in it."""
    return _unless_withheld(filtered(general), "other reason")


def _failure(reason: str) -> str:
    """Type of an error without its message, which comes from a method and may quote anything."""
    kind = re.match(r"[A-Za-z]+(?:Error|Exception)(?=:|$)", reason)
    return kind[0] if kind else f"reason {WITHHELD}"
