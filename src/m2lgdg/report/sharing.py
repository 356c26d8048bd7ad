"""What is given away: a copy of a study without paths, and reports and models without anything that names a person.

`m2lgdg share` writes the copy; tables and report can be made from it alone. `report --share` and `export --share` also hash
subject ids and put ages into bands. The salt of the hashes is drawn anew for each output and stored nowhere, so that no one,
the author included, can recover an id or link two outputs.
"""

from __future__ import annotations

import copy
import getpass
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.data.pseudonyms import Pseudonyms, file_name, has_path, starts_path, without_paths
from m2lgdg.data.spreadsheets import csv_text
from m2lgdg.explain.explanation import COLUMNS, Explanation
from m2lgdg.findings import text_finding
from m2lgdg.method import Method
from m2lgdg.methods.average import Average
from m2lgdg.model.model import Model
from m2lgdg.model.out_of_distribution import MEASURES, SourceDistribution
from m2lgdg.report.checklists import YEARS, age_band
from m2lgdg.report.contents import RECORDS, Contents, read_contents, read_json
from m2lgdg.report.subgroups import WITHHELD
from m2lgdg.storage import InputError, write_text
from m2lgdg.study.description import COHORT, CONNECTOMES, LEAST, copy_connectomes
from m2lgdg.study.plan import METHODS_FILE
from m2lgdg.study.provenance import CHANGED
from m2lgdg.study.records import explanation_path

COPIED = ("method", "variant", "target", "seed", "key", "status", "seconds", "learned", "unexplained")  # keys of a record
HIDDEN_FINDING = "A finding that may name a subject or a file is withheld."
LICENCES = {  # of public releases, by the cohort name that a reader sets; terms change with the release and are not quoted
    "abide": "ABIDE I (Preprocessed Connectomes Project): the terms of the downloaded release apply (non-commercial "
    "research); cite Di Martino et al. 2014 and Craddock et al. 2013",
    "rest-meta-mdd": "REST-meta-MDD: the terms agreed with its consortium apply; cite Yan et al. 2019",
}
SHORT = 3  # characters of an id, up to which it may be a part of a word by chance
CELL = ["method", "variant", "seed", "target"]
Filter = Callable[..., str]  # (text, replacement) -> text


def share_study(
    folder: str | Path, to: str | Path, pseudonyms: Pseudonyms | None = None, *, uncommitted: bool = False
) -> list[Path]:
    """Copy the files that tables and report need into a new folder; return their paths.

    Records of cells become one file, without the predictions, which are in predictions.csv. With `pseudonyms`, these take the
    place of subject ids, rows are sorted by them, and a text that contains an id is withheld. Results of code that was changed
    after its commit are refused, because nobody can look that code up, unless they may be `uncommitted`.
    """
    folder, to = Path(folder), Path(to)
    contents = read_contents(folder)
    if contents.environment.get("tree") == CHANGED and not uncommitted:
        since = f"changed after commit {str(contents.environment.get('commit'))[:12]}, so that nobody can look it up"
        advice = "commit it and repeat m2lgdg run, or add --uncommitted to share the results all the same"
        raise InputError(f"{folder} was made with code that was {since}; {advice}.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} already exists; choose another --out.")
    told, contents, ids = _telling(contents, pseudonyms)
    explanations = {record["key"]: each for cells in contents.explanations.values() for record, each in cells}
    study = contents.study | {"cohort": file_name(str(contents.study.get("cohort", "")))}
    study["plugins"] = [file_name(str(plugin)) for plugin in study.get("plugins") or []]
    files = {
        "predictions.csv": contents.all_predictions,
        "study.json": study,
        "environment.json": contents.environment,
        "checks.json": contents.checks,
        METHODS_FILE: read_json(folder / METHODS_FILE, {}),
        COHORT: without_small_groups(read_json(folder / COHORT, {})),
        RECORDS: [_copied(record) for record in contents.records],
        "inclusion.csv": contents.inclusion,
        "failures.csv": contents.failures,
    }
    for name, content in files.items():
        if not isinstance(content, pd.DataFrame):  # its subjects have their names; digits of a version are no ids
            content = _told(content, without_paths if name == "environment.json" else told, ids)
        _need_no_id(content, ids, folder / name)
        if text := _text(name, content) if name in ("predictions.csv", RECORDS) or (folder / name).is_file() else "":
            write_text(to / name, text)
    if (folder / CONNECTOMES).is_file() and not few_of_a_class(contents.description):
        copy_connectomes(folder, to, sites=not few_of_a_site(contents.description))
    for key in explanations:
        original = explanation_path(folder, key)
        about = _told(Explanation.load(original).about, told, ids)
        _need_no_id(about, ids, original / "explanation.json")
        write_text(explanation_path(to, key) / "explanation.json", _text("explanation.json", about))
        for table in (original / f"{name}.csv" for name in COLUMNS):  # no other file, which may be of single subjects
            if table.is_file():
                shutil.copy(table, explanation_path(to, key))
    return sorted(path for path in to.rglob("*") if path.is_file())


def _copied(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without predictions; numbers of its epochs, most of its length, have six digits."""
    copied = {name: record[name] for name in COPIED if name in record}
    learned = copied.get("learned") or {}
    if isinstance(learned.get("history"), list):
        copied["learned"] = learned | {"history": [_short(epoch) for epoch in learned["history"]]}
    return copied


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def joining_names(contents: Contents) -> set[str]:
    """Names that tables are joined by, so they are shared as they are; one that contains a path is refused."""
    table = contents.all_predictions
    names = {*table["method"], *table["variant"], *table["target"], *table["subject"], *(contents.study.get("inputs") or [])}
    names |= {row[key] for row in contents.inclusion for key in ("subject", "site") if key in row} | {*contents.tables}
    for name in names:
        if starts_path(str(name)):
            kinds = "method, variant, site, input, table or subject"
            raise InputError(f"the {kinds} name {name!r} contains a path and cannot be shared.")
    return names


def _telling(contents: Contents, pseudonyms: Pseudonyms | None) -> tuple[Callable[[str], str], Contents, set[str]]:
    """What a text becomes in a copy, contents whose subjects are named as they are there, and the ids that must be gone."""
    names = joining_names(contents)
    if pseudonyms is None:
        return lambda text: text if text in names else without_paths(text), contents, set()
    ids = {*contents.all_predictions["subject"], *(row["subject"] for row in contents.inclusion)}
    ids |= {one for finding in contents.findings or () for one in finding.subjects}
    rois = contents.known_rois[1] if contents.known_rois else ()  # an id such as 1 is a word of ROI 1
    withheld, known = identifying_words_withheld(ids), (names | {roi for roi in rois if not has_path(roi)}) - ids
    inclusion = [row | {"subject": pseudonyms(row["subject"])} for row in contents.inclusion]
    adapted = None if contents.adapted is None else pseudonyms.sorted_table(contents.adapted, CELL)
    renamed = replace(
        contents,
        predictions=pseudonyms.sorted_table(contents.predictions, CELL),
        adapted=adapted,
        inclusion=sorted(inclusion, key=lambda row: (row["site"], row["subject"])),
    )
    new = known | {pseudonyms(one) for one in ids}

    def told(text: str) -> str:
        return pseudonyms(text) if text in ids else text if text in new else withheld(without_paths(text))

    return told, renamed, ids


def _text(name: str, content: Any) -> str:
    """Content of a file of a copy."""
    if name == RECORDS:
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in content)
    if name.endswith(".csv"):
        return csv_text(pd.DataFrame(content)) if len(content) else ""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _need_no_id(content: Any, ids: set[str], place: Path) -> None:
    """Refuse content with an id left, such as a key, or a site of the same name. Numbers, as of a seed, are no ids."""
    texts = {*_strings(content)} if ids else set()
    words = {word for text in texts for word in re.findall(r"[^\s\",]+", text) if len(word) > SHORT}
    if left := ids & (texts | words):
        reason = f"names subjects where no pseudonym can take their place, such as {min(left)}"
        raise InputError(f"{place} {reason}; give them other ids, and run the study again.")


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, pd.DataFrame):
        for name in ("method", "variant", "target", "subject"):
            yield from content[name].unique()
    elif isinstance(content, dict | list):
        for one in (*content.keys(), *content.values()) if isinstance(content, dict) else content:
            yield from _strings(one)


def _told(content: Any, told: Callable[[str], str], ids: set[str]) -> Any:
    """Content with its texts as they are told; subjects, and findings about them, in an order that does not tell them."""
    if isinstance(content, str):
        return told(content)
    if isinstance(content, dict):
        return {key: _told(value, told, ids) for key, value in content.items()}
    if not isinstance(content, list):
        return content
    values = [_told(value, told, ids) for value in content]
    if any(isinstance(value, str) and value in ids for value in content):
        return sorted(values)
    if ids and all(isinstance(value, dict) and {"kind", "subjects"} <= value.keys() for value in values):
        kinds = list(dict.fromkeys(value["kind"] for value in values))
        values.sort(key=lambda value: (kinds.index(value["kind"]), value["subjects"]))
    return values


def identifying_words_withheld(ids: Iterable[str] = ()) -> Filter:
    """Filter for free text: unchanged if it has no path, id, host or user name, else a replacement."""
    people = {_user(), socket.gethostname(), *socket.gethostname().split(".")[:1], Path.home().name}
    known = set(ids)
    long = {name for name in known if len(name) > SHORT}
    short = {name for name in people if len(name) > 1} | (known - long)  # matched as whole words only
    whole_word = re.compile(r"(?<![^\W_])(?:" + "|".join(map(re.escape, sorted(short))) + r")(?![^\W_])", re.IGNORECASE)

    def filtered(text: str, replacement: str = WITHHELD) -> str:
        hidden = has_path(text) or (short and whole_word.search(text)) or any(name in text for name in long)
        return replacement if hidden else text

    return filtered


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without a passwd entry for its user
        return ""


def cohort_name(name: str) -> str:
    """Name of a public release; other names may be those of a private folder."""
    return name if name.lower() in LICENCES else "cohort"


def shared_contents(contents: Contents) -> Contents:
    """De-identified contents of a study; methods, variants, sites, phenotypes and ROIs keep their names."""
    names = Pseudonyms()
    joining_names(contents)
    ids = {*contents.predictions["subject"], *(row["subject"] for row in contents.inclusion)}
    filtered = identifying_words_withheld(ids)
    methods = contents.study.get("method") or {}
    study = contents.study | {
        "name": filtered(str(contents.study.get("name", "study")), "study"),
        "method": {
            method: {name: WITHHELD if filtered(str(value)) == WITHHELD else value for name, value in fields.items()}
            for method, fields in methods.items()
        },
    }
    cohort = contents.cohort
    if cohort is not None:
        subjects = np.array([names(str(subject)) for subject in cohort.subjects])
        cohort = cohort._changed(
            subjects=subjects,
            phenotypes=cohort.phenotypes.set_axis(subjects, axis=0),
            name=cohort_name(cohort.name),
            notes=tuple(note for note in cohort.notes if filtered(str(note)) != WITHHELD),
            excluded=(),
        )
    inclusion = [
        row | {"subject": names(row["subject"])} | dict.fromkeys(("reason", "kind"), filtered(row["kind"], "other reason"))
        for row in contents.inclusion
    ]
    findings = contents.findings
    if findings is not None:
        findings = tuple(text_finding(filtered(one.anonymous, HIDDEN_FINDING), kind=one.kind) for one in findings)
    return replace(
        contents,
        predictions=names.sorted_table(contents.predictions, CELL),
        adapted=None if contents.adapted is None else names.sorted_table(contents.adapted, CELL),
        study=study,
        inclusion=inclusion,
        checks=[row | {"detail": without_paths(str(row.get("detail", "")))} for row in contents.checks],
        failures=[row | {"reason": _failure(row["reason"])} for row in contents.failures],
        records=[_shared_record(record, filtered) for record in contents.records],
        cohort=cohort,
        about_cohort=contents.about_cohort._replace(findings=findings, description=shared_description(contents.description)),
        shared=True,
    )


def _shared_record(record: dict[str, Any], filtered: Filter) -> dict[str, Any]:
    """A record without the notes of its training that may identify somebody, as those of a plugin may."""
    learned = record.get("learned") or {}
    kept = [note for note in learned.get("notes", []) if filtered(str(note)) != WITHHELD]
    return record | {"learned": learned | {"notes": kept}} if "notes" in learned else record


def _failure(reason: str) -> str:
    """Type of an error without its message, which may quote anything."""
    kind = re.match(r"[A-Za-z]+(?:Error|Exception)(?=:|$)", reason)
    return kind[0] if kind else f"reason {WITHHELD}"


def shared_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """Groups and sites of a cohort for sharing: ages in bands, and nothing personal of small groups.

    Sexes are left out by site, and everywhere if a class has few of one sex, because sizes follow by subtraction.
    """
    shared = without_small_groups(description)
    shared.get("slopes", {}).pop("sex", None)
    known = [group for group in shared.get("groups", {}).values() if "male" in group]
    few = min((n for group in known for n in (group["male"], group["sex_known"] - group["male"])), default=0) < LEAST
    for name in ("groups", "sites"):
        for group in shared.get(name, {}).values():
            if name == "sites":
                group.pop("without", None)  # who lacks a table
            if name == "sites" or few:
                group.pop("male", None)
                group.pop("sex_known", None)
            if "age" in group:
                group["age"] = f"median in {age_band(group['age'][1])}"
    return shared


def shared_model(fitted: Model) -> Model:
    """Copy of a model for sharing, with the same predictions for subjects of known age; typical ages are those of a band."""
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
        stored = {name: member.facts_ for name, member in shared.members.items()}
        shared.facts_ = _shared_facts(fitted.facts_, filtered) | {"parts": stored}
    shared.source_distributions = {name: _shared_ranges(one) for name, one in fitted.source_distributions.items()}
    return shared


def _shared_member(fitted: Method, filtered: Filter) -> Method:
    if isinstance(fitted, Average):
        inner = [_shared_member(one, filtered) for one in fitted.averaged.values()]
        return fitted.with_averaged(inner, _shared_facts(fitted.facts_, filtered))
    remembered = [name for name in fitted.remembers if name in fitted.state_] or _rows_of_subjects(fitted)
    if remembered:
        names = ", ".join(remembered)
        raise InputError(f"method {fitted.name} keeps features of its source subjects ({names}) and cannot be shared.")
    for name in fitted.facts_.get("tables", {}):
        if filtered(name) == WITHHELD:
            raise InputError(f"table {name} of the model may be named by a path, user or host, so it cannot be shared.")
    shared = copy.copy(fitted)
    shared.facts_ = _shared_facts(fitted.facts_, filtered)
    ages = np.array([name.lower() == "age" for name in fitted.facts_["inputs"]], dtype=bool)
    shared.state_ = {
        name: np.where(ages, _floor(value) + YEARS / 2, value) if name.endswith("scaler.fill") else value
        for name, value in fitted.state_.items()
    }
    for name in fitted.facts_.get("tables", {}):  # medians are values of a subject; three digits are enough to tell a unit
        shared.state_[f"table.{name}.usual"] = _three_digits(fitted.state_[f"table.{name}.usual"])
    return shared


def _three_digits(values: Any) -> Any:
    known = np.isfinite(values) & (values != 0)  # the spread of a constant column is infinite
    size = 10.0 ** (np.floor(np.log10(np.where(known, np.abs(values), 1.0))) - 2)
    return np.where(known, np.round(np.where(known, values, 0.0) / size) * size, values).astype(values.dtype)


def _shared_facts(facts: Mapping[str, Any], filtered: Filter) -> dict[str, Any]:
    names = ("source", "local", "site_level")
    found: dict[str, Any] = {name: _filtered_findings(facts[name], filtered) for name in names if name in facts}
    found["source"] = found["source"] | {"cohort": cohort_name(facts["source"]["cohort"])}
    if "site_level" in found:
        for name in ("logits", "scans"):  # counts of scores and hashes of scans, which only an update needs
            found["site_level"].pop(name, None)
    if "notes" in facts:
        found["notes"] = [note for note in facts["notes"] if filtered(note) != WITHHELD]
    return {**facts, **found}


def _shared_ranges(distribution: SourceDistribution) -> SourceDistribution:
    """Ages in bands, and medians of tables with three digits, since either may be the value of a subject."""
    ranges = distribution.ranges.copy()
    low, middle, high = ranges[MEASURES.index("age")]
    ranges[MEASURES.index("age")] = _floor(low), _floor(middle) + YEARS / 2, _floor(high) + YEARS
    tables = {name: type(one)(*map(_three_digits, one)) for name, one in distribution.tables.items()}
    return replace(distribution, ranges=ranges, tables=tables)


def _filtered_findings(about: Mapping[str, Any], filtered: Filter) -> dict[str, Any]:
    if about.get("findings") is None:
        return dict(about)
    return {**about, "findings": [one | {"text": filtered(one["text"], HIDDEN_FINDING)} for one in about["findings"]]}


def _rows_of_subjects(fitted: Method) -> list[str]:
    """Arrays of a plugin with one row per source subject that its author did not list in `remembers`."""
    if type(fitted).__module__.startswith("m2lgdg."):
        return []  # ours list them, as a test checks; another array may have as many rows by chance
    subjects = sum(sum(site.values()) for site in fitted.facts_["source"]["sites"].values())
    return [name for name, value in fitted.state_.items() if value.ndim and len(value) == subjects]


def _floor(ages: Any) -> Any:
    return np.floor(np.asarray(ages) / YEARS) * YEARS


def without_small_groups(description: Mapping[str, Any]) -> dict[str, Any]:
    """Groups and sites of a cohort without age, sex and motion of those with fewer than ten subjects; slopes in tenths."""
    shared: dict[str, Any] = copy.deepcopy(dict(description))
    for name in ("groups", "sites"):
        for group in shared.get(name, {}).values():
            for entry in ("age", "motion", "male", "sex_known", "without") if group["subjects"] < LEAST else ():
                group.pop(entry, None)
    for by_site in shared.get("slopes", {}).values():
        for site in list(by_site):
            group = shared["sites"].get(site, {})
            if min(group.get("patients", 0), group.get("controls", 0)) < LEAST:
                del by_site[site]
            else:
                by_site[site] = [round(end, 1) for end in by_site[site]]
    return shared


def few_of_a_class(description: Mapping[str, Any]) -> bool:
    """Whether a cohort has too few patients or controls, or an unknown number, to share their mean connectome."""
    groups = description.get("groups", {})
    return any(groups.get(name, {}).get("subjects", 0) < LEAST for name in ("patients", "controls"))


def few_of_a_site(description: Mapping[str, Any]) -> bool:
    """Whether some site is too small to share the means of all; those of the others would reveal its own."""
    sizes = [group.get("patients", 0) + group.get("controls", 0) for group in description.get("sites", {}).values()]
    return not sizes or min(sizes) < LEAST
