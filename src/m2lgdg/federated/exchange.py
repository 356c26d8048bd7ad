"""A federated study by files: the folders of the coordinator and of each site, and what each command does with them.

Every file appears whole or not at all, and is a function of the files before it. A killed command is therefore repeated: it
writes the same bits.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.federated import messages
from m2lgdg.federated.coordinator import Totals, coordinate, total
from m2lgdg.federated.plan import Arrays, Member, Plan, Request, Settings
from m2lgdg.federated.site import Site, prepared
from m2lgdg.federated.sums import new_key
from m2lgdg.model.model import Model
from m2lgdg.storage import InputError, new_folder, one_line, read_bytes, read_tensors, write_bytes, write_tensors, write_text

TOTALS, SUBJECTS = "m2lgdg-federated-totals-1", "m2lgdg-federated-subjects-1"
STUDY, SITE, LEFT_OUT, MODEL = "study.json", "site.json", "without.json", "model"
JOINS, REQUESTS, ANSWERS, SUMMED = "joins", "requests", "answers", "totals"  # folders of the coordinator
PRIVATE, RECEIVED, OUTBOX = "private", "received", "outbox"  # folders of a site
FEATURES = f"{PRIVATE}/subjects.safetensors"


class Progress(NamedTuple):
    """Where a study stands: at a request that waits for answers, or at its end."""

    plan: Plan
    asked: Request  # the request, or the last one
    request: Path | None  # its file, to be sent to all sites; None if the model is finished
    is_new: bool = False  # whether the file was written just now
    fitted: Model | None = None

    @property
    def round(self) -> int:
        """Number of the request."""
        return self.asked.round


def init(folder: str | Path, sites: Sequence[str], **settings: Any) -> Settings:
    """Write the folder of a new study; its study.json goes to every site."""
    study = Settings(secrets.token_hex(16), tuple(sites), **settings)
    with new_folder(folder) as new:
        write_text(new / STUDY, messages.study_json(study))
        for name in (JOINS, REQUESTS, ANSWERS, SUMMED):
            (new / name).mkdir()
    return study


def open_study(folder: str | Path) -> Settings:
    """Settings of a study, from its folder or its study.json."""
    path = Path(folder)
    path = path / STUDY if path.is_dir() else path
    return messages.read_study(_read(path), str(path))


def join(study: str | Path, cohort: Cohort, site: str, folder: str | Path, consent: bool = False) -> Path:
    """Write the folder of a site, with its key and the features of its subjects; the join message is in its outbox.

    A study that leaves out a site needs the `consent` of every site, the one left out included.
    """
    settings = open_study(study)
    if settings.leave_out and not consent:
        raise InputError(
            f"this study leaves out {settings.leave_out}; totals of studies with and without a site reveal the sums of that "
            "site, so join only if this is agreed, with --consent."
        )
    private, public = new_key() if settings.masks else ("", "")
    member, arrays = prepared(settings, cohort, site, public)
    with new_folder(folder) as new:
        write_text(new / STUDY, messages.study_json(settings))
        (new / PRIVATE).mkdir(mode=0o700)  # before the key is in it
        write_tensors(new / FEATURES, arrays, {"format": SUBJECTS})
        write_text(new / PRIVATE / SITE, json.dumps({"site": site, "key": private}) + "\n")
        (new / RECEIVED).mkdir()
        write_text(new / OUTBOX / f"{site}.json", messages.member_json(settings, member))
    return Path(folder) / OUTBOX / f"{site}.json"


def step(folder: str | Path, request: str | Path, to: str | Path | None = None, attempt: int = 1) -> Path:
    """Answer a request (a file, or the newest one of a folder, or of the folder of a study); the path of the answer."""
    path = Path(request)
    path = path / REQUESTS if (path / REQUESTS).is_dir() else path
    if path.is_dir():
        requests = sorted(path.glob("request-*.safetensors"))
        if not requests:
            raise InputError(f"{path} has no request yet.")
        path = requests[-1]
    return answer(folder, _read(path), str(path), to, attempt)


def answer(folder: str | Path, content: bytes, where: str, to: str | Path | None = None, attempt: int = 1) -> Path:
    """Answer the bytes of a request, and keep both in the folder of the site; the path of the answer."""
    folder = Path(folder)
    study, name, private = _open_site(folder)
    if name == study.leave_out:
        raise InputError(f"site {name} is left out of this study for evaluation, so it sends no sums.")
    plan, asked = messages.read_request(content, study, where)
    if messages.read_member(join_message(folder), f"the join message of {name}", study) not in plan.members:
        raise InputError(f"{where}: site {name} does not take part with the counts and the key that it joined with.")
    if plan.attempt != attempt:
        absent = ", ".join(sorted(set(study.sites) - set(plan.fold_of))) or "no site"
        raise InputError(
            f"the request is of attempt {plan.attempt}, without {absent}; totals with and without a site reveal the sums of "
            f"that site, so answer only if this is agreed, with --attempt {plan.attempt}."
        )
    earlier = _received(folder, plan, asked, content, where)
    site = Site(plan, name, read_tensors(folder / FEATURES, SUBJECTS)[1])
    for values in earlier:
        site.receive(values)
    sent = messages.write_answer(site, asked, private)
    write_bytes(folder / RECEIVED / request_name(plan.attempt, asked.round), content)
    return write_bytes(Path(to or folder / OUTBOX) / answer_name(plan.attempt, asked.round, name), sent)


def join_message(folder: str | Path) -> bytes:
    """Join message of a site."""
    return _read(Path(folder) / OUTBOX / f"{_open_site(Path(folder))[1]}.json")


def _open_site(folder: Path) -> tuple[Settings, str, str]:
    """Settings of the study, name of the site, and its private key."""
    path = folder / PRIVATE / SITE
    if not path.is_file():
        raise InputError(f"{folder} is not the folder of a site; make one with m2lgdg federate join.")
    try:
        about = json.loads(_read(path))
        return open_study(folder), str(about["site"]), str(about["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def _received(folder: Path, plan: Plan, asked: Request, content: bytes, where: str) -> list[Arrays]:
    """Values of the earlier requests; a round out of turn, or one that differs from what came before, is refused."""
    again = folder / RECEIVED / request_name(plan.attempt, asked.round)
    if again.exists() and _read(again) != content:
        raise InputError(f"{where} differs from the request of round {asked.round} that was answered before.")
    members, values = messages.read_message(content, messages.REQUEST, where)[0]["members"], []
    for number in range(1, asked.round):
        path = folder / RECEIVED / request_name(plan.attempt, number)
        if not path.exists():
            raise InputError(f"{where} is round {asked.round}, but round {number} was not answered; answer it first.")
        head, arrays = messages.read_message(_read(path), messages.REQUEST, str(path))
        if head["members"] != members:
            raise InputError(f"{where}: the members of the study changed between rounds.")
        values.append(messages.values_of(arrays))
    return values


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
    metadata = {"format": TOTALS, "study": plan.study.id, "attempt": str(plan.attempt), "round": str(asked.round)}
    write_tensors(_totals_path(folder, plan, asked), total(plan, asked, _answers(folder, plan, asked)), metadata)
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
    path, content = folder / REQUESTS / request_name(plan.attempt, asked.round), messages.write_request(plan, asked)
    is_new = not path.exists()
    if is_new:
        write_bytes(path, content)
    elif _read(path) != content:
        raise InputError(
            f"{path} is not the request that follows from the totals before it (another version, or altered); begin again."
        )
    return Progress(plan, asked, path, is_new)


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
        member = messages.read_member(_read(path), str(path), study)
        if member.site != site:
            raise InputError(f"{path} is from site {member.site}.")
        if site != study.leave_out:  # its join message is its consent
            yield member


def _answers(folder: Path, plan: Plan, request: Request) -> dict[str, Arrays]:
    """Answers of all sites to a request."""
    paths = {site: folder / ANSWERS / answer_name(plan.attempt, request.round, site) for site in plan.fold_of}
    missing = [site for site, path in paths.items() if not path.exists()]
    if missing:
        raise InputError(
            f"round {request.round} has no answer from {', '.join(missing)} in {folder / ANSWERS}; wait for it, or begin again "
            f"with --without {missing[0]}."
        )
    return {site: messages.read_answer(_read(path), plan, request, site, str(path)) for site, path in paths.items()}


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


def _read(path: Path) -> bytes:
    return read_bytes(path, messages.LARGEST)
