"""Messages of a federated study: settings and joins in JSON, requests and answers in signed safetensors, and all in words.

Files and Flower carry the same bytes. A message is read strictly: signature, study, attempt, round, site, names, types and
shapes must be those of the protocol.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from m2lgdg.federated import keys, sums
from m2lgdg.federated.plan import (
    LEAST_TOGETHER,
    MOST_ROIS,
    MOST_ROUNDS,
    MOST_SUBJECTS,
    NAME,
    NO_TABLES,
    SUMS,
    Arrays,
    Ask,
    Member,
    Plan,
    Request,
    Settings,
)
from m2lgdg.federated.site import Site
from m2lgdg.scans import KINDS, SERIES
from m2lgdg.storage import InputError, one_line, read_bytes

STUDY, JOIN = "m2lgdg-federated-study-3", "m2lgdg-federated-join-3"
REQUEST, ANSWER = "m2lgdg-federated-request-3", "m2lgdg-federated-answer-3"
LARGEST, LARGEST_ANSWER, LARGEST_HEADER = 2**30, 2**27, 2**24  # bytes of a message, of one site, of JSON
JSON_TYPES: dict[str, type[Any]] = {  # by annotation
    **{"str": str, "int": int, "bool": bool, "Mapping[str, Any]": dict, "tuple[str, ...]": list},
}
ABOUT = {  # in the order in which a file is recognised: a request holds the answers and join messages
    REQUEST: "Request of the coordinator to all sites. It holds the masked answers to the request before it, and what follows.",
    ANSWER: "Answer of one site. Each array is a sum over all labelled subjects of the site; no row belongs to a subject.",
    JOIN: "A site joins a study. It holds counts, names of ROIs and phenotypes, and public keys; nothing of single subjects.",
    STUDY: "Settings of a federated study. It holds nothing about subjects.",
}
T = TypeVar("T")


class Sent(NamedTuple):
    """A request as it was sent: its hash, the hash of the one before, the members (first round), and the answers in it."""

    hash: str
    previous: str
    attempt: int
    request: Request
    members: tuple[Member, ...]
    answers: Mapping[str, bytes]


def study_json(study: Settings) -> str:
    """Settings of a study, for every site to read."""
    return json.dumps({"format": STUDY} | dataclasses.asdict(study), indent=1) + "\n"


def read_study(content: bytes, where: str) -> Settings:
    """Settings of a study; anything else is refused, and so is what a site would not agree to."""
    if b'"m2lgdg-federated-study-1"' in content or b'"m2lgdg-federated-study-2"' in content:
        raise InputError(f"{where} was begun by an earlier version, which asks for other sums; begin a new study.")
    return _checked(Settings, _json(content, STUDY, where), where)


def settings_hash(study: Settings) -> str:
    """SHA-256 of the settings, so that a site notices if the coordinator changes them."""
    return _hash(json.loads(study_json(study)))


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
    counts = (member.patients, member.controls)
    if min(counts) < 0 or max(counts) > MOST_SUBJECTS or len(member.rois) > MOST_ROIS or not NAME.fullmatch(member.site):
        raise InputError(f"{where} is damaged (its counts, ROIs or site are not those of a study).")
    if member.scans not in (SERIES, *KINDS):
        raise InputError(f"{where} is damaged (its scans are neither series nor a kind of connectomes).")
    return member


def fingerprint(plan: Plan) -> str:
    """What all sites have to read in common before the first answer: settings, members, counts and keys, in 160 bits."""
    members = [dataclasses.asdict(member) for member in plan.members]
    digest = _hash([settings_hash(plan.study), plan.attempt, members])
    return "-".join(digest[i : i + 4] for i in range(0, 40, 4))


def _hash(given: Any) -> str:
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


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
        texts = list(value) if isinstance(value, list | dict) else [value] if kind is str else []
        if type(value) is not kind or not all(isinstance(one, str) and one.isprintable() for one in texts):
            raise InputError(f"{where} is damaged ({name} is not of type {kind.__name__}, or not of printable texts).")
    return cls(**{name: tuple(value) if types[name] is list else value for name, value in given.items()})


def write_request(plan: Plan, request: Request, previous: str, answers: Mapping[str, bytes], private: str) -> bytes:
    """A request as bytes, signed by the coordinator.

    It holds the answers of all sites to the request before, so that every site adds them itself; the first holds the members.
    """
    arrays: Arrays = request_arrays(request)
    arrays |= {f"answer {site}": np.frombuffer(answer, dtype=np.uint8) for site, answer in answers.items()}
    head = {"previous": previous, "asks": asks_json(request), "members": "[]"}
    if request.round == 1:
        head["members"] = json.dumps([json.loads(member_json(plan.study, member)) for member in plan.members])
    return _write(REQUEST, plan, request.round, head, arrays, private)


def request_arrays(request: Request) -> Arrays:
    """Arrays of a message that holds a request."""
    arrays: Arrays = {f"value {name}": value for name, value in request.values.items()}
    for i, ask in enumerate(request.asks):
        arrays |= {f"ask {i} {name}": value for name, value in ask.arguments.items()}
    return arrays


def asks_json(request: Request) -> str:
    """Kinds and names of what is asked for."""
    return json.dumps([[ask.kind, ask.name] for ask in request.asks])


def read_request(content: bytes, study: Settings, where: str) -> Sent:
    """A request from bytes; one that the coordinator of this study did not sign is refused."""
    head, arrays, digest = read_message(content, REQUEST, where, study, study.key)
    try:
        given = [json.dumps(one).encode() for one in json.loads(head["members"])]
        attempt, previous, number = int(head["attempt"]), head["previous"], int(head["round"])
        if not 0 < number <= MOST_ROUNDS or not 0 < attempt < len(study.sites):
            raise ValueError(f"round {number} of attempt {attempt} is not allowed")
        request = request_of(number, head["asks"], arrays)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{where} is damaged ({one_line(error)[:200]}).") from None
    if len(given) > len(study.sites):
        raise InputError(f"{where} has {len(given)} members, and the study {len(study.sites)} sites.")
    members = tuple(read_member(member, where, study) for member in given)
    answers = {site: array.tobytes() for site, array in named(arrays, "answer ").items()}
    if len(arrays) != len(answers) + len(request_arrays(request)):
        raise InputError(f"{where} holds arrays that are not part of the protocol.")
    return Sent(digest, previous, attempt, request, members, answers)


def request_of(number: int, asks: str, arrays: Arrays) -> Request:
    """A request from the arrays of a message."""
    listed = [Ask(kind, name, named(arrays, f"ask {i} ")) for i, (kind, name) in enumerate(json.loads(asks))]
    return Request(number, named(arrays, "value "), tuple(listed))


def named(arrays: Arrays, prefix: str) -> Arrays:
    """Arrays whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def write_answer(site: Site, request: Request, asked: str, private: str, signing: str) -> bytes:
    """Answer of a site to the request with the hash `asked` as bytes, masked and signed."""
    arrays, words = {}, site.answer(request)
    for ask in request.asks:
        sent = keys.masked(words[ask.key], site.plan, site.name, private, ask, asked)
        arrays[ask.key] = sums.to_bytes(sent, site.plan.form(ask))
    return _write(ANSWER, site.plan, request.round, {"site": site.name, "request": asked}, arrays, signing)


def read_answers(answers: Mapping[str, bytes], plan: Plan, request: Request, asked: str, where: str) -> dict[str, Arrays]:
    """Arrays of the answers of all members to the request with the hash `asked`; any other message is refused."""
    if set(answers) != set(plan.fold_of):
        raise InputError(f"{where}: the answers to round {request.round} are not those of all members.")
    return {site: read_answer(answers[site], plan, request, asked, site, f"{where}, answer of site {site}") for site in answers}


def read_answer(content: bytes, plan: Plan, request: Request, asked: str, site: str, where: str) -> Arrays:
    """Arrays of the answer that a site signed, to this very request; any other message is refused."""
    signing = next(member.signing for member in plan.members if member.site == site)
    head, arrays, _ = read_message(content, ANSWER, where, plan.study, signing)
    if head.get("site") != site or head.get("request") != asked:
        raise InputError(f"{where} is of another site, or answers another request than that of round {request.round}.")
    if set(arrays) != {ask.key for ask in request.asks}:
        raise InputError(f"{where}: its sums are not those that round {request.round} asks for.")
    for ask in request.asks:
        sums.check_array(arrays[ask.key], plan.form(ask), f"{where}: {ask.key}")
    return arrays


def _write(
    form: str, plan: Plan, number: int, head: Mapping[str, str], arrays: Mapping[str, npt.NDArray[Any]], private: str
) -> bytes:
    common = {"format": form, "study": plan.study.id, "settings": settings_hash(plan.study)}
    common |= {"attempt": str(plan.attempt), "round": str(number), **head}
    return packed(arrays, common | {"signature": keys.sign(packed(arrays, common), private)})


def packed(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of arrays; the same content has the same bytes."""
    from safetensors.numpy import save

    # Copies with a shape: the library takes no scalars that share memory.
    header, data = _parted(save({name: np.array(array, order="C") for name, array in arrays.items()}))
    return _joined(header | {"__metadata__": dict(metadata)}, data)


def _parted(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", content[:8])
    if size > LARGEST_HEADER:
        raise ValueError("its header is too large")
    return dict(json.loads(content[8 : 8 + size])), content[8 + size :]


def _joined(header: dict[str, Any], data: bytes) -> bytes:
    """A safetensors file whose header has its keys in a fixed order, so that the same message has the same bytes."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read_message(
    content: bytes, form: str, where: str, study: Settings | None = None, public: str = ""
) -> tuple[dict[str, str], Arrays, str]:
    """Metadata, arrays and hash of a message of a certain format; with a `study`, its settings and signature are checked."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if len(content) > LARGEST:
        raise InputError(f"{where} has {len(content)} bytes, more than the limit of {LARGEST}.")
    try:
        header, data = _parted(content)
        metadata = {str(name): str(text) for name, text in dict(header.get("__metadata__", {})).items()}
        if metadata.get("format") != form:
            raise InputError(f"{where} is not an {form} file.")
        signature = metadata.pop("signature", "")
        unsigned = _joined(header | {"__metadata__": metadata}, data)
        if study and not keys.is_signed(unsigned, signature, public):
            who = "the coordinator" if form == REQUEST else f"site {metadata.get('site', '')[:64]!r}"
            raise InputError(f"{where} is not signed by {who} with the key of this study; do not use it.")
        arrays = {name: np.array(array) for name, array in load(unsigned).items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise InputError(f"{where} is damaged or not an {form} file ({one_line(error)[:200]}).") from None
    if study and (metadata.get("study") != study.id or metadata.get("settings") != settings_hash(study)):
        raise InputError(f"{where} belongs to another study, or to one with other settings.")
    return metadata, arrays, hashlib.sha256(unsigned).hexdigest()


def in_words(path: str | Path) -> Iterator[str]:
    """Lines that say, for a data officer, what a file of a federated study holds and what it reveals."""
    return map(_printable, _in_words(Path(path)))


def _printable(line: str) -> str:
    """A line that cannot steer the terminal, whatever a stranger wrote into a file."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


def _in_words(path: Path) -> Iterator[str]:
    content = read_bytes(path, LARGEST)
    form = next((form for form in ABOUT if form.encode() in content[:LARGEST_HEADER]), None)
    if form is None:
        raise InputError(f"{path} is not a file of a federated study of this version.")
    yield ABOUT[form]
    if form == STUDY:
        yield from study_in_words(read_study(content, str(path)))
    elif form == JOIN:
        yield from _member_in_words(read_member(content, str(path)))
    else:
        head, arrays, _ = read_message(content, form, str(path))
        who = f", site {head.get('site', '')}" if form == ANSWER else ""
        place = f"attempt {head.get('attempt')}, round {head.get('round')}{who}"
        yield f"Study {head.get('study')}, {place}, {len(content):,} bytes."
        for name, array in sorted(arrays.items()):
            numbers = array.size // array.shape[-1] if array.dtype == "uint8" and form == ANSWER else array.size
            meaning = f" ({SUMS[kind].reveals})" if (kind := name.partition(".")[0]) in SUMS else ""
            yield f"  {name}: {numbers:,} number{'' if numbers == 1 else 's'}{meaning}"
        if form == ANSWER:
            yield "These numbers are masked. Added to those of all other sites for the same request, they give the total."
        yield "The signature is checked by step and combine, not here."


def study_in_words(study: Settings) -> Iterator[str]:
    """What a site agrees to when it joins."""
    yield f"Study {study.id}; sites: {', '.join(study.sites)}; phenotypes: {', '.join(study.inputs) or 'none'}."
    changed = ", ".join(f"{name}={value}" for name, value in study.fields.items())
    yield _printable(f"Changed fields of the method: {changed or 'none'}.")
    yield NO_TABLES
    if study.leave_out:
        yield (
            f"Site {study.leave_out} does not train, so that the model can be evaluated there. Totals of studies with and "
            "without a site reveal the sums of that site; joining needs --consent."
        )
    yield (
        f"At least {study.least_subjects} subjects at every site, and {study.least_sites} sites. The coordinator and all sites "
        f"see totals over {LEAST_TOGETHER} sites or more. All other sites together can work out the sums of this one."
    )


def _member_in_words(member: Member) -> Iterator[str]:
    incomplete, empty = (", ".join(names) or "none" for names in (member.incomplete, member.empty))
    yield f"Site {member.site}: {member.patients} patients, {member.controls} controls."
    yield f"ROIs: {len(member.rois)} ({member.atlas or 'atlas not named'})."
    yield f"Phenotypes with missing values: {incomplete}; without any value: {empty}."
    yield f"Scans: {member.scans}; with amplitudes: {'yes' if member.amplitudes else 'no'}."
    yield f"SHA-256 of the site's cohort: {member.hash}."
    yield f"Public keys: {member.key or 'none'} (masks), {member.signing or 'none'} (signature)."
