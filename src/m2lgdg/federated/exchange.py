"""A federated study by files: the folders of the coordinator and of each site, and what each command does with them.

Every file appears whole or not at all, and is a function of the files before it. A killed command is therefore repeated: it
writes the same bits. A site keeps one record for each round, which no later file replaces, and sends one answer for it.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.federated import keys, messages
from m2lgdg.federated.coordinator import Totals, adopt, coordinate, total
from m2lgdg.federated.plan import MOST_ROUNDS, Arrays, Member, Plan, Request, Settings
from m2lgdg.federated.site import Site, prepared
from m2lgdg.model.model import Model
from m2lgdg.storage import (
    InputError,
    new_folder,
    one_line,
    read_bytes,
    read_tensors,
    write_bytes,
    write_once,
    write_tensors,
    write_text,
)

TOTALS, SUBJECTS, RECORD = "m2lgdg-federated-totals-2", "m2lgdg-federated-subjects-2", "m2lgdg-federated-record-2"
STUDY, SITE, COORDINATOR, LEFT_OUT, MODEL = "study.json", "site.json", "coordinator.json", "without.json", "model"
JOINS, REQUESTS, ANSWERS, SUMMED = "joins", "requests", "answers", "totals"  # folders of the coordinator
PRIVATE, RECEIVED, OUTBOX = "private", "received", "outbox"  # folders of a site
FEATURES = f"{PRIVATE}/subjects.safetensors"


class Progress(NamedTuple):
    """Where a study stands: at a request that waits for answers, or at its end."""

    plan: Plan
    asked: Request  # the request, or the last one
    request: Path | None  # its file, to be sent to all sites; None if the model is finished
    hash: str = ""  # of the request
    is_new: bool = False  # whether the file was written just now
    fitted: Model | None = None

    @property
    def round(self) -> int:
        """Number of the request."""
        return self.asked.round


class Record(NamedTuple):
    """What a site keeps of a round: the request, its hash, the members (first round), and the totals of the round before."""

    hash: str
    request: Request
    members: tuple[Member, ...]
    totals: Arrays


def init(folder: str | Path, sites: Sequence[str], **settings: Any) -> Settings:
    """Write the folder of a new study; its study.json goes to every site."""
    private, public = keys.new_signing_key()
    study = Settings(secrets.token_hex(16), tuple(sites), **settings, key=public, version=_version())
    with new_folder(folder) as new:
        write_text(new / STUDY, messages.study_json(study))
        (new / PRIVATE).mkdir(mode=0o700)  # before the key is in it
        write_text(new / PRIVATE / COORDINATOR, json.dumps({"signing": private}) + "\n")
        for name in (JOINS, REQUESTS, ANSWERS, SUMMED):
            (new / name).mkdir()
    return study


def _version() -> str:
    return str(sys.modules["m2lgdg"].__version__)  # of the package, which imports all others and is imported by none


def open_study(folder: str | Path) -> Settings:
    """Settings of a study, from its folder or its study.json."""
    path = Path(folder)
    path = path / STUDY if path.is_dir() else path
    return messages.read_study(_read(path, messages.LARGEST_HEADER), str(path))


def join(study: str | Path, cohort: Cohort, site: str, folder: str | Path, consent: bool = False) -> Path:
    """Write the folder of a site, with its keys and the features of its subjects; the join message is in its outbox.

    A study that leaves out a site needs the `consent` of every site, the one left out included.
    """
    settings = open_study(study)
    if settings.leave_out and not consent:
        raise InputError(
            f"this study leaves out {settings.leave_out}; totals of studies with and without a site reveal the sums of that "
            "site, so join only if this is agreed, with --consent."
        )
    if settings.version != _version():
        raise InputError(
            f"the study was begun by m2lgdg {settings.version}, and this is {_version()}; all sites run the same program, "
            "so install that version."
        )
    (private, public), (signing, verifying) = keys.new_mask_key(), keys.new_signing_key()
    member, arrays = prepared(settings, cohort, site, public, verifying)
    with new_folder(folder) as new:
        write_text(new / STUDY, messages.study_json(settings))
        (new / PRIVATE).mkdir(mode=0o700)  # before the keys are in it
        write_tensors(new / FEATURES, arrays, {"format": SUBJECTS})
        write_text(new / PRIVATE / SITE, json.dumps({"site": site, "key": private, "signing": signing}) + "\n")
        (new / RECEIVED).mkdir()
        write_text(new / OUTBOX / f"{site}.json", messages.member_json(settings, member))
    return Path(folder) / OUTBOX / f"{site}.json"


def step(
    folder: str | Path, request: str | Path, to: str | Path | None = None, fingerprint: str = "", without: Iterable[str] = ()
) -> Path:
    """Answer a request (a file, or the newest one of a folder, or of the folder of a study); the path of the answer."""
    path = Path(request)
    path = path / REQUESTS if (path / REQUESTS).is_dir() else path
    if path.is_dir():
        requests = sorted(path.glob("request-*.safetensors"))
        if not requests:
            raise InputError(f"{path} has no request yet.")
        path = requests[-1]
    return answer(folder, _read(path), str(path), to, fingerprint, without)


def answer(
    folder: str | Path,
    content: bytes,
    where: str,
    to: str | Path | None = None,
    fingerprint: str = "",
    without: Iterable[str] = (),
) -> Path:
    """Answer the bytes of a request, and keep both in the folder of the site; the path of the answer.

    The first answer needs the `fingerprint` of the members that all sites agreed on, and the sites that the study begins
    again `without`, if any.
    """
    folder = Path(folder)
    study, about = _open_site(folder)
    name = about["site"]
    if name == study.leave_out:
        raise InputError(f"site {name} is left out of this study for evaluation, so it sends no sums.")
    sent = messages.read_request(content, study, where)
    records = [_record(folder, study, sent.attempt, number) for number in range(1, sent.request.round)]
    plan = Plan(study, records[0].members if records else sent.members, sent.attempt)
    claim = folder / RECEIVED / _record_name(sent.attempt, sent.request.round)
    if not records and not claim.exists():
        _check_members(folder, plan, name, fingerprint, without, where)
    if max((path.name for path in (folder / RECEIVED).glob("round-*")), default="") > _record_name(sent.attempt, MOST_ROUNDS):
        raise InputError(f"{where} is of attempt {sent.attempt}, and this site went on to a later one.")
    values, record = _replayed(folder, plan, name, records, sent, where)
    if not write_once(claim, record) and _record(folder, study, sent.attempt, sent.request.round).hash != sent.hash:
        raise InputError(f"{where} differs from the request of round {sent.request.round} that was answered before.")
    path = folder / OUTBOX / answer_name(sent.attempt, sent.request.round, name)
    if not path.exists():
        site = Site(plan, name, read_tensors(folder / FEATURES, SUBJECTS)[1])
        site.known |= values
        write_once(path, messages.write_answer(site, sent.request, sent.hash, about["key"], about["signing"]))
    return write_bytes(Path(to) / path.name, _read(path)) if to else path


def join_message(folder: str | Path) -> bytes:
    """Join message of a site."""
    return _read(Path(folder) / OUTBOX / f"{_open_site(Path(folder))[1]['site']}.json")


def _open_site(folder: Path) -> tuple[Settings, dict[str, str]]:
    """Settings of the study, and name and private keys of the site."""
    path = folder / PRIVATE / SITE
    if not path.is_file():
        raise InputError(f"{folder} is not the folder of a site; make one with m2lgdg federate join.")
    return open_study(folder), _private(path, "site", "key", "signing")


def _private(path: Path, *names: str) -> dict[str, str]:
    try:
        about = json.loads(_read(path))
        return {name: str(about[name]) for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def _check_members(folder: Path, plan: Plan, name: str, fingerprint: str, without: Iterable[str], where: str) -> None:
    """Refuse to begin with other members than the sites agreed on: all, or those that all remaining sites consented to."""
    own = messages.read_member(join_message(folder), f"the join message of {name}", plan.study)
    if own not in plan.members:
        raise InputError(f"{where}: site {name} does not take part with the counts and the keys that it joined with.")
    absent = [site for site in plan.study.training_sites if site not in plan.fold_of]
    if len(absent) != plan.attempt - 1:
        raise InputError(
            f"{where} is attempt {plan.attempt} without {', '.join(absent) or 'no site'}, which is not the protocol."
        )
    if set(absent) != set(without):
        raise InputError(
            f"{where} begins {'without ' + ' and '.join(absent) if absent else 'with all sites'}; totals with and without a "
            "site reveal the sums of that site, so answer only if all remaining sites agree"
            + (f", with {' '.join(f'--without {site}' for site in absent)}." if absent else ", and without --without.")
        )
    for attempt in range(1, plan.attempt):
        if (folder / RECEIVED / _record_name(attempt, 1)).exists():
            earlier = _record(folder, plan.study, attempt, 1).members
            if not set(plan.members) <= set(earlier):
                raise InputError(f"{where}: a member has other counts or keys than in attempt {attempt}; do not go on.")
    expected = messages.fingerprint(plan)
    if fingerprint.replace(" ", "").lower() != expected:
        given = "" if not fingerprint else f", not {fingerprint[:80]!r}"
        raise InputError(
            f"the members {', '.join(plan.fold_of)} have the fingerprint {expected}{given}. Compare it with every other site "
            f"by telephone; if all have the same, answer with --fingerprint {expected}."
        )


def _replayed(
    folder: Path, plan: Plan, name: str, records: Sequence[Record], sent: messages.Sent, where: str
) -> tuple[Arrays, bytes]:
    """Values of the earlier requests, and the record of this one.

    The program of the coordinator is run again on the totals so far, the last of which are added up here from the answers
    that every site signed. A request that does not follow from them is refused.
    """
    if sent.previous != (records[-1].hash if records else ""):
        raise InputError(f"{where} does not follow the request of round {len(records)} that this site answered.")
    if sent.request.round > 1 and sent.members:
        raise InputError(f"{where}: the members of the study changed between rounds.")
    totals: Totals = {}
    if records:
        own = folder / OUTBOX / answer_name(plan.attempt, len(records), name)
        if sent.answers.get(name) != _read(own):
            raise InputError(f"{where} does not hold the answer that this site sent in round {len(records)}.")
        answers = messages.read_answers(sent.answers, plan, records[-1].request, records[-1].hash, where)
        totals = total(plan, records[-1].request, answers)
    work, values = coordinate(plan), Arrays()
    asked = next(work)
    for i, record in enumerate(records):
        adopt(asked, record.request, where)
        values |= record.request.values
        try:
            asked = work.send(records[i + 1].totals if i + 1 < len(records) else totals)
        except StopIteration:
            raise InputError(f"{where} asks for more, but the study is finished; it is not answered.") from None
    adopt(asked, sent.request, where)
    return values, _record_bytes(plan, sent, totals)


def _record_name(attempt: int, number: int) -> str:
    return f"round-{attempt:02d}-{number:03d}.safetensors"


def _record_bytes(plan: Plan, sent: messages.Sent, totals: Totals) -> bytes:
    members = [json.loads(messages.member_json(plan.study, member)) for member in sent.members]
    metadata = {"format": RECORD, "hash": sent.hash, "asks": messages.asks_json(sent.request), "members": json.dumps(members)}
    return messages.packed(
        messages.request_arrays(sent.request) | {f"total {key}": value for key, value in totals.items()}, metadata
    )


def _record(folder: Path, study: Settings, attempt: int, number: int) -> Record:
    """What the site kept of a round that it answered."""
    path = folder / RECEIVED / _record_name(attempt, number)
    if not path.exists():
        raise InputError(f"round {number} of attempt {attempt} was not answered by this site; answer it first.")
    metadata, arrays = read_tensors(path, RECORD)
    try:
        given = [json.dumps(member).encode() for member in json.loads(metadata["members"])]
        members = tuple(messages.read_member(member, str(path), study) for member in given)
        request = messages.request_of(number, metadata["asks"], arrays)
        return Record(metadata["hash"], request, members, messages.named(arrays, "total "))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def request_name(attempt: int, number: int) -> str:
    """File name of a request."""
    return f"request-{attempt:02d}-{number:03d}.safetensors"


def answer_name(attempt: int, number: int, site: str) -> str:
    """File name of an answer."""
    return f"answer-{attempt:02d}-{number:03d}-{site}.safetensors"


def combine(folder: str | Path, without: Iterable[str] = ()) -> Progress:
    """Add the answers of a round and write the next request; `without` sites, begin again."""
    folder = Path(folder)
    progress = standing(folder, without)
    if progress.request is None or progress.is_new:
        return progress
    plan, asked = progress.plan, progress.asked
    answers = messages.read_answers(_answers(folder, plan, asked.round), plan, asked, progress.hash, str(folder / ANSWERS))
    metadata = {"format": TOTALS, "study": plan.study.id, "attempt": str(plan.attempt), "round": str(asked.round)}
    write_bytes(_totals_path(folder, plan, asked), messages.packed(total(plan, asked, answers), metadata))
    return standing(folder)


def standing(folder: str | Path, without: Iterable[str] = ()) -> Progress:
    """Replay the stored totals: the finished model, or the request that waits for answers, which is written if it is new."""
    folder = Path(folder)
    plan = _plan(folder, without)
    work = coordinate(plan)
    asked = next(work)
    while (totals := _totals(folder, plan, asked)) is not None:
        try:
            asked = work.send(totals)
        except StopIteration as ended:
            return Progress(plan, asked, None, fitted=ended.value)
    previous, answers = "", {}
    if asked.round > 1:
        before = folder / REQUESTS / request_name(plan.attempt, asked.round - 1)
        previous = messages.read_request(_read(before), plan.study, str(before)).hash
        answers = _answers(folder, plan, asked.round - 1)
    signing = _private(folder / PRIVATE / COORDINATOR, "signing")["signing"]
    content = messages.write_request(plan, asked, previous, answers, signing)
    path = folder / REQUESTS / request_name(plan.attempt, asked.round)
    is_new = not path.exists()
    if is_new:
        write_bytes(path, content)
    elif _read(path) != content:
        raise InputError(
            f"{path} is not the request that follows from the totals before it (another version, or altered); begin again."
        )
    return Progress(plan, asked, path, messages.read_request(content, plan.study, str(path)).hash, is_new)


def save_model(folder: str | Path, progress: Progress) -> Path:
    """Write the model folder of a finished study, with its card; one that is already there stays."""
    from m2lgdg.report.card import write_card  # here, since a client of Flower is a new process in every round

    model = Path(folder) / MODEL
    if not (model / "method.json").exists():
        assert progress.fitted is not None
        with new_folder(model) as new:
            write_card(progress.fitted.save(new))
    return model


def _plan(folder: Path, without: Iterable[str]) -> Plan:
    """Plan of the present attempt; more sites are left out if given."""
    study, absent = open_study(folder), left_out(folder)
    before = len(absent)
    for site in without:
        if (folder / MODEL).exists():
            raise InputError(f"the study is finished ({folder / MODEL}); begin a new one to leave out site {site}.")
        if site not in study.training_sites or site in absent:
            raise InputError(f"site {site} does not take part in the study.")
        absent.append(site)
    plan = Plan(study, tuple(_members(folder, study, absent)), attempt=1 + len(absent))
    if len(absent) > before:
        write_text(folder / LEFT_OUT, json.dumps(absent) + "\n")
    return plan


def left_out(folder: Path) -> list[str]:
    """Sites that left the study, in the order in which they did."""
    path = folder / LEFT_OUT
    try:
        given = json.loads(_read(path)) if path.exists() else []
        if not isinstance(given, list) or not all(isinstance(site, str) for site in given):
            raise ValueError("it is not a list of sites")
        return given
    except ValueError as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def _members(folder: Path, study: Settings, absent: Sequence[str]) -> Iterator[Member]:
    paths = {site: folder / JOINS / f"{site}.json" for site in study.sites if site not in absent}
    missing = [site for site, path in paths.items() if not path.exists()]
    if missing:
        go_on = "" if missing[0] == study.leave_out else f", or go on with --without {missing[0]}"
        raise InputError(f"{folder / JOINS} lacks the join message of {', '.join(missing)}; wait for it{go_on}.")
    for site, path in paths.items():
        member = messages.read_member(_read(path, messages.LARGEST_HEADER), str(path), study)
        if member.site != site:
            raise InputError(f"{path} is from site {member.site}.")
        if site != study.leave_out:  # its join message is its consent
            yield member


def _answers(folder: Path, plan: Plan, number: int) -> dict[str, bytes]:
    """Answers of all sites to the request of a round."""
    paths = {site: folder / ANSWERS / answer_name(plan.attempt, number, site) for site in plan.fold_of}
    missing = [site for site, path in paths.items() if not path.exists()]
    if missing:
        raise InputError(
            f"round {number} has no answer from {', '.join(missing)} in {folder / ANSWERS}; wait for it, or begin again "
            f"with --without {missing[0]}."
        )
    return {site: _read(path, messages.LARGEST_ANSWER) for site, path in paths.items()}


def _totals_path(folder: Path, plan: Plan, request: Request) -> Path:
    return folder / SUMMED / f"totals-{plan.attempt:02d}-{request.round:03d}.safetensors"


def _totals(folder: Path, plan: Plan, request: Request) -> Totals | None:
    """Stored totals of a round, if there are any."""
    path = _totals_path(folder, plan, request)
    if not path.exists():
        return None
    metadata, arrays = read_tensors(path, TOTALS)
    if metadata.get("study") != plan.study.id or set(arrays) != {ask.key for ask in request.asks}:
        raise InputError(f"{path} does not belong to round {request.round} of this study.")
    for ask in request.asks:
        form = plan.form(ask)
        shape = (plan.fits, *form.shape) if form.by_fold else form.shape
        if arrays[ask.key].shape != shape or arrays[ask.key].dtype != np.int64:
            raise InputError(f"{path} is damaged: {ask.key} has shape {arrays[ask.key].shape}, not {shape}.")
    return arrays


def _read(path: Path, most: int = messages.LARGEST) -> bytes:
    return read_bytes(path, most)
