"""Messages of a federated study as bytes: settings and joins in JSON, requests and answers in safetensors.

Files and Flower carry the same bytes. A message is read strictly: its study, attempt, round, site, names, types and shapes
must be those of the protocol.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.federated import sums
from m2lgdg.federated.plan import MOST_ROUNDS, Ask, Member, Plan, Request, Study
from m2lgdg.federated.secure import Masks
from m2lgdg.federated.site import Site
from m2lgdg.storage import DTYPES, InputError, one_line

STUDY, JOIN = "m2lgdg-federated-study-1", "m2lgdg-federated-join-1"
REQUEST, ANSWER = "m2lgdg-federated-request-1", "m2lgdg-federated-answer-1"
LATER = {"leave_out": ""}  # settings that the first version of study.json did not have
LARGEST = 2**28  # bytes of a message
Arrays = dict[str, npt.NDArray[Any]]


def study_json(study: Study) -> str:
    """Settings of a study, for every site to read."""
    given = dataclasses.asdict(study)
    # Settings that older versions do not have are written only where they are used.
    given = {name: value for name, value in given.items() if name not in LATER or value != LATER[name]}
    return json.dumps({"format": STUDY} | given, indent=1) + "\n"


def read_study(content: bytes, where: str) -> Study:
    """Settings of a study; anything else is refused."""
    given = _json(content, STUDY, Study, where, optional=LATER)
    try:
        kinds = {"id": str, "masks": bool, "least_subjects": int, "least_sites": int, "fields": dict}
        _check_types(given, kinds | {"leave_out": str}, ("sites", "inputs"))
        return Study(**given | {name: tuple(given[name]) for name in ("sites", "inputs")})
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None


def member_json(study: Study, member: Member) -> str:
    """What a site tells the others when it joins."""
    return json.dumps({"format": JOIN, "study": study.id} | dataclasses.asdict(member), indent=1) + "\n"


def read_member(content: bytes, study: Study, where: str) -> Member:
    """The member that a join message is about; that of another study is refused."""
    if _json(content, JOIN, Member, where, "study")["study"] != study.id:
        raise InputError(f"{where} belongs to another study.")
    return read_member_of_any(content, where)


def read_member_of_any(content: bytes, where: str) -> Member:
    """The member that a join message is about, whatever its study."""
    given = _json(content, JOIN, Member, where, "study")
    del given["study"]
    try:
        texts = ("rois", "incomplete", "empty")
        kinds = {name: str for name in ("site", "atlas", "cohort", "hash", "key")} | {"patients": int, "controls": int}
        _check_types(given, kinds, texts)
        if min(given["patients"], given["controls"]) < 0 or max(given["patients"], given["controls"]) > 10**6:
            raise ValueError("a count is not between 0 and a million")
        return Member(**given | {name: tuple(given[name]) for name in texts})
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None


def _json(
    content: bytes, form: str, cls: type, where: str, *more: str, optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        given = json.loads(content.decode())
        if not isinstance(given, dict) or given.pop("format", "") != form:
            raise InputError(f"{where} is not an {form} file.")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None
    given = dict(optional or {}) | given
    if "noise" in given:
        raise InputError(f"{where} asks for noise on the sums, which this version does not have; begin a study without it.")
    expected = {each.name for each in dataclasses.fields(cls)} | set(more)
    if set(given) != expected:
        raise InputError(f"{where} is damaged (its keys are not {', '.join(sorted(expected))}).")
    return given


def _check_types(given: Mapping[str, Any], kinds: Mapping[str, type], texts: tuple[str, ...]) -> None:
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            raise ValueError(f"{name} is not of type {kind.__name__}")
    for name in texts:
        if not isinstance(given[name], list) or not all(isinstance(one, str) for one in given[name]):
            raise ValueError(f"{name} is not a list of texts")


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


def read_request(content: bytes, study: Study, where: str) -> tuple[Plan, Request]:
    """Plan and request from bytes; everything that the protocol does not have is refused."""
    head, arrays = read_message(content, REQUEST, where)
    _check_study(head, study, where)
    try:
        members = [json.dumps(one).encode() for one in json.loads(head["members"])]
        attempt, number, asked = int(head["attempt"]), int(head["round"]), json.loads(head["asks"])
        if not 0 < number <= MOST_ROUNDS or attempt < 1:
            raise ValueError(f"round {number} of attempt {attempt} is not allowed")
        values = values_of(arrays)
        asks = []
        for i, (kind, name) in enumerate(asked):
            prefix = f"ask {i} "
            given = {key.removeprefix(prefix): np.array(array) for key, array in arrays.items() if key.startswith(prefix)}
            asks.append(Ask(str(kind), str(name), given))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None
    plan = Plan(study, tuple(read_member(member, study, where) for member in members), attempt)
    for ask in asks:
        plan.form(ask)
    if len(arrays) != len(values) + sum(len(ask.arguments) for ask in asks):
        raise InputError(f"{where} holds arrays that are not part of the protocol.")
    return plan, Request(number, values, tuple(asks))


def values_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Values among the arrays of a request."""
    return {name.removeprefix("value "): np.array(array) for name, array in arrays.items() if name.startswith("value ")}


def write_answer(site: Site, request: Request, masks: Masks | None) -> bytes:
    """Answer of a site as bytes."""
    arrays = {}
    for key, words in site.answer(request).items():
        ask = next(one for one in request.asks if one.key == key)
        form = site.plan.form(ask)
        arrays[key] = sums.to_bytes(masks.masked(words, ask, form, request.round) if masks else words, form)
    return _write(ANSWER, site.plan, request.round, {"site": site.name}, arrays)


def read_answer(content: bytes, plan: Plan, request: Request, where: str) -> tuple[str, Arrays]:
    """Site and arrays of an answer to this very request; any other message is refused."""
    head, arrays = read_message(content, ANSWER, where)
    _check_study(head, plan.study, where)
    site, number = head.get("site", ""), head.get("round", "")
    if site not in plan.fold_of:
        raise InputError(f"{where} is from site {site[:64]}, which does not take part.")
    if head.get("attempt") != str(plan.attempt) or number != str(request.round):
        at = f"round {number[:8]} of attempt {head.get('attempt', '')[:8]}"
        raise InputError(f"{where} answers {at}; the study is at round {request.round} of attempt {plan.attempt}.")
    if set(arrays) != {ask.key for ask in request.asks}:
        raise InputError(f"{where}: its sums are not those that round {request.round} asks for.")
    for ask in request.asks:
        sums.check_array(arrays[ask.key], plan.form(ask), f"{where}: {ask.key}")
    return site, {name: np.array(array) for name, array in arrays.items()}


def _check_study(head: Mapping[str, str], study: Study, where: str) -> None:
    if head.get("study") != study.id or head.get("settings") != settings_hash(study):
        raise InputError(f"{where} belongs to another study, or to one with other settings.")


def settings_hash(study: Study) -> str:
    """SHA-256 of the settings, so that a site notices if the coordinator changes them."""
    return hashlib.sha256(json.dumps(json.loads(study_json(study)), sort_keys=True).encode()).hexdigest()


def _write(form: str, plan: Plan, number: int, head: Mapping[str, str], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    from safetensors.numpy import save

    common = {"format": form, "study": plan.study.id, "settings": settings_hash(plan.study)}
    common |= {"attempt": str(plan.attempt), "round": str(number)}
    # Copies with a shape: the library takes no scalars that share memory.
    content = save({name: np.array(array, order="C") for name, array in arrays.items()}, metadata={**common, **head})
    return _in_order(content)


def _in_order(content: bytes) -> bytes:
    """The same message with the keys of its header sorted: the library writes metadata in no fixed order."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def read_message(content: bytes, form: str, where: str) -> tuple[dict[str, str], Arrays]:
    """Metadata and arrays of a message of a certain format."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if len(content) > LARGEST:
        raise InputError(f"{where} has {len(content)} bytes, more than the limit of {LARGEST}.")
    try:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        metadata = {str(name): str(value) for name, value in dict(header.get("__metadata__", {})).items()}
        if metadata.get("format") != form:
            raise InputError(f"{where} is not an {form} file.")
        if any(entry["dtype"] not in DTYPES for name, entry in header.items() if name != "__metadata__"):
            raise ValueError("an array has an unknown type")
        return metadata, load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise InputError(f"{where} is damaged or not an {form} file ({one_line(error)[:200]}).") from None
