"""Messages of a federated study: settings and joins in JSON, requests and answers in safetensors, and all of them in words.

Files and Flower carry the same bytes. A message is read strictly: its study, attempt, round, site, names, types and shapes
must be those of the protocol.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from m2lgdg.federated import sums
from m2lgdg.federated.plan import MOST_ROUNDS, SUMS, Arrays, Ask, Member, Plan, Request, Settings
from m2lgdg.federated.site import Site
from m2lgdg.storage import InputError, one_line, read_bytes

STUDY, JOIN = "m2lgdg-federated-study-1", "m2lgdg-federated-join-1"
REQUEST, ANSWER = "m2lgdg-federated-request-1", "m2lgdg-federated-answer-1"
LARGEST = 2**28  # bytes of a message
MOST_SUBJECTS = 10**6  # patients or controls of a site
JSON_TYPES: dict[str, type[Any]] = {  # by annotation
    **{"str": str, "int": int, "bool": bool, "Mapping[str, Any]": dict, "tuple[str, ...]": list},
}
ABOUT = {  # in the order in which a file is recognised: a request holds the join messages
    REQUEST: "Request of the coordinator to all sites. It holds totals over sites and directions computed from them.",
    ANSWER: "Answer of one site. Each array is a sum over all labelled subjects of the site; no row belongs to a subject.",
    JOIN: "A site joins a study. It holds counts, names of ROIs and phenotypes, and a public key; nothing of single subjects.",
    STUDY: "Settings of a federated study. It holds nothing about subjects.",
}
T = TypeVar("T")


def study_json(study: Settings) -> str:
    """Settings of a study, for every site to read."""
    return json.dumps({"format": STUDY} | dataclasses.asdict(study), indent=1) + "\n"


def read_study(content: bytes, where: str) -> Settings:
    """Settings of a study; anything else is refused."""
    given = {"leave_out": ""} | _json(content, STUDY, where)
    if "noise" in given:
        raise InputError(f"{where} asks for noise on the sums, which this version does not have; begin a study without it.")
    return _checked(Settings, given, where)


def settings_hash(study: Settings) -> str:
    """SHA-256 of the settings, so that a site notices if the coordinator changes them."""
    return hashlib.sha256(json.dumps(json.loads(study_json(study)), sort_keys=True).encode()).hexdigest()


def member_json(study: Settings, member: Member) -> str:
    """What a site tells the others when it joins."""
    return json.dumps({"format": JOIN, "study": study.id} | dataclasses.asdict(member), indent=1) + "\n"


def read_member(content: bytes, where: str, study: Settings | None = None) -> Member:
    """The member that a join message is about; that of another study than the given one is refused."""
    given = _json(content, JOIN, where)
    identity = given.pop("study", None)
    if study and identity != study.id:
        raise InputError(f"{where} belongs to another study.")
    member = _checked(Member, given, where)
    if min(member.patients, member.controls) < 0 or max(member.patients, member.controls) > MOST_SUBJECTS:
        raise InputError(f"{where} is damaged (a count is not between 0 and a million).")
    return member


def _json(content: bytes, form: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None
    if not isinstance(given, dict) or given.pop("format", "") != form:
        raise InputError(f"{where} is not an {form} file.")
    return given


def _checked(cls: type[T], given: Mapping[str, Any], where: str) -> T:
    """A dataclass of JSON values; it has exactly these keys, with the types of its annotations."""
    types = {each.name: JSON_TYPES[str(each.type)] for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if set(given) != set(types):
        raise InputError(f"{where} is damaged (its keys are not {', '.join(sorted(types))}).")
    for name, kind in types.items():
        value: Any = given[name]
        if type(value) is not kind or (kind is list and not all(isinstance(one, str) for one in value)):
            raise InputError(f"{where} is damaged ({name} is not of type {kind.__name__}, or not of texts).")
    return cls(**{name: tuple(value) if types[name] is list else value for name, value in given.items()})


def write_request(plan: Plan, request: Request) -> bytes:
    """A request as bytes; it lists the members, so that sites can check who takes part."""
    arrays: Arrays = {f"value {name}": value for name, value in request.values.items()}
    for i, ask in enumerate(request.asks):
        arrays |= {f"ask {i} {name}": value for name, value in ask.arguments.items()}
    head = {
        "asks": json.dumps([[ask.kind, ask.name] for ask in request.asks]),
        "members": json.dumps([json.loads(member_json(plan.study, member)) for member in plan.members]),
    }
    return _write(REQUEST, plan, request.round, head, arrays)


def read_request(content: bytes, study: Settings, where: str) -> tuple[Plan, Request]:
    """Plan and request from bytes; everything that the protocol does not have is refused."""
    head, arrays = read_message(content, REQUEST, where, study)
    try:
        members = [json.dumps(one).encode() for one in json.loads(head["members"])]
        attempt, number, asked = int(head["attempt"]), int(head["round"]), json.loads(head["asks"])
        if not 0 < number <= MOST_ROUNDS or attempt < 1:
            raise ValueError(f"round {number} of attempt {attempt} is not allowed")
        asks = tuple(Ask(str(kind), str(name), _named(arrays, f"ask {i} ")) for i, (kind, name) in enumerate(asked))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None
    plan = Plan(study, tuple(read_member(member, where, study) for member in members), attempt)
    for ask in asks:
        plan.form(ask)
    values = values_of(arrays)
    if len(arrays) != len(values) + sum(len(ask.arguments) for ask in asks):
        raise InputError(f"{where} holds arrays that are not part of the protocol.")
    return plan, Request(number, values, asks)


def values_of(arrays: Arrays) -> Arrays:
    """Values among the arrays of a request."""
    return _named(arrays, "value ")


def _named(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def write_answer(site: Site, request: Request, private: str) -> bytes:
    """Answer of a site as bytes, masked if the study has masks."""
    arrays, words = {}, site.answer(request)
    for ask in request.asks:
        sent = words[ask.key]
        if site.plan.study.masks:
            sent = sums.masked(sent, site.plan, site.name, private, ask, request.round)
        arrays[ask.key] = sums.to_bytes(sent, site.plan.form(ask))
    return _write(ANSWER, site.plan, request.round, {"site": site.name}, arrays)


def read_answer(content: bytes, plan: Plan, request: Request, site: str, where: str) -> Arrays:
    """Arrays of the answer of a site to this very request; any other message is refused."""
    head, arrays = read_message(content, ANSWER, where, plan.study)
    sender, number = head.get("site", ""), head.get("round", "")
    if sender != site:
        raise InputError(f"{where} is from site {sender[:64]}, not {site}.")
    if head.get("attempt") != str(plan.attempt) or number != str(request.round):
        at = f"round {number[:8]} of attempt {head.get('attempt', '')[:8]}"
        raise InputError(f"{where} answers {at}; the study is at round {request.round} of attempt {plan.attempt}.")
    if set(arrays) != {ask.key for ask in request.asks}:
        raise InputError(f"{where}: its sums are not those that round {request.round} asks for.")
    for ask in request.asks:
        sums.check_array(arrays[ask.key], plan.form(ask), f"{where}: {ask.key}")
    return arrays


def _write(form: str, plan: Plan, number: int, head: Mapping[str, str], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    from safetensors.numpy import save

    common = {"format": form, "study": plan.study.id, "settings": settings_hash(plan.study)}
    common |= {"attempt": str(plan.attempt), "round": str(number)}
    # Copies with a shape: the library takes no scalars that share memory.
    content = save({name: np.array(array, order="C") for name, array in arrays.items()}, metadata={**common, **head})
    # The library writes metadata in no fixed order: sort the keys of the header.
    (size,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def read_message(content: bytes, form: str, where: str, study: Settings | None = None) -> tuple[dict[str, str], Arrays]:
    """Metadata and arrays of a message of a certain format; one of another study than the given one is refused."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if len(content) > LARGEST:
        raise InputError(f"{where} has {len(content)} bytes, more than the limit of {LARGEST}.")
    try:
        (size,) = struct.unpack("<Q", content[:8])
        metadata = dict(json.loads(content[8 : 8 + size]).get("__metadata__", {}))
        if metadata.get("format") != form:
            raise InputError(f"{where} is not an {form} file.")
        arrays = {name: np.array(array) for name, array in load(content).items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise InputError(f"{where} is damaged or not an {form} file ({one_line(error)[:200]}).") from None
    if study and (metadata.get("study") != study.id or metadata.get("settings") != settings_hash(study)):
        raise InputError(f"{where} belongs to another study, or to one with other settings.")
    return metadata, arrays


def in_words(path: str | Path) -> Iterator[str]:
    """Lines that say, for a data officer, what a file of a federated study holds and what it reveals."""
    content = read_bytes(path, LARGEST)
    form = next((form for form in ABOUT if form.encode() in content[:100_000]), None)
    if form is None:
        raise InputError(f"{path} is not a file of a federated study.")
    yield ABOUT[form]
    if form == STUDY:
        yield from _study_in_words(read_study(content, str(path)))
    elif form == JOIN:
        yield from _member_in_words(read_member(content, str(path)))
    else:
        head, arrays = read_message(content, form, str(path))
        who = f", site {head.get('site', '')}" if form == ANSWER else ""
        place = f"attempt {head.get('attempt')}, round {head.get('round')}{who}"
        yield f"Study {head.get('study')}, {place}, {len(content):,} bytes."
        for name, array in sorted(arrays.items()):
            numbers = array.size // array.shape[-1] if array.dtype == "uint8" else array.size
            kind = name.partition(".")[0]
            meaning = f" ({SUMS[kind].reveals})" if kind in SUMS else ""
            yield f"  {name}: {numbers:,} number{'' if numbers == 1 else 's'}{meaning}"
        if form == ANSWER:
            yield "With masks (see study.json), these numbers look random, and only totals over sites can be read."


def _study_in_words(study: Settings) -> Iterator[str]:
    yield f"Study {study.id}; sites: {', '.join(study.sites)}; phenotypes: {', '.join(study.inputs) or 'none'}."
    seen = "on, the coordinator sees totals over sites" if study.masks else "off, the coordinator sees the sums of each site"
    yield f"Masks: {seen}."
    if study.leave_out:
        yield (
            f"Site {study.leave_out} does not train, so that the model can be evaluated there. Totals of studies with and "
            "without a site reveal the sums of that site; joining needs --consent."
        )
    yield f"At least {study.least_subjects} subjects at every site, and {study.least_sites} sites."


def _member_in_words(member: Member) -> Iterator[str]:
    incomplete, empty = (", ".join(names) or "none" for names in (member.incomplete, member.empty))
    yield f"Site {member.site}: {member.patients} patients, {member.controls} controls."
    yield f"ROIs: {len(member.rois)} ({member.atlas or 'atlas not named'})."
    yield f"Phenotypes with missing values: {incomplete}; without any value: {empty}."
    yield f"Public key {member.key or 'none'}; SHA-256 of the site's cohort {member.hash}."
