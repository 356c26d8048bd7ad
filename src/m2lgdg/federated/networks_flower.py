"""Federated networks over a network, by Flower: its ServerApp and ClientApp carry the requests of `networks` as plain arrays.

Flower connects the sites, with its own TLS and authentication. The client app reads the study file and the cohort of its site;
the server app reads the study file and writes a model folder with the bits of `networks.simulate`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import m2lgdg
from m2lgdg.federated.networks import Client, lead
from m2lgdg.federated.networks_plan import Arrays, NetworkStudy, Participant, Request
from m2lgdg.storage import InputError, needing

with needing("flower", "A federated study over a network"):
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from m2lgdg.federated.flower import QUERY, TIMEOUT, _connected, _setting

RECORD, ARRAYS, MEMORY = "m2lgdg", "arrays", "m2lgdg-memory"  # names of records
STUDY_FILE, COHORT_FILE, SITE, MODEL_FOLDER = "study-file", "cohort-file", "site", "model-folder"  # of node and run config
MOST_CLIENTS = 64  # kept in one process

client_app: Any = ClientApp()
server_app: Any = ServerApp()
_clients: dict[tuple[str, str, str, str], Client] = {}  # the features of a site are computed once in a process


def reply(message: Any, context: Any) -> Any:
    """Answer of a site: facts with which it joins, or arrays for a request; anything else is refused with a sentence."""
    try:
        content = _reply(message, context)
    except InputError as error:
        content = RecordDict({RECORD: ConfigRecord({"refused": str(error)})})
    return Message(content, reply_to=message)


def _reply(message: Any, context: Any) -> Any:
    record = message.content.get(RECORD)
    if not isinstance(record, ConfigRecord) or set(message.content) - {RECORD, ARRAYS}:
        raise InputError("the message is not part of the protocol.")
    client = _client(context)
    study = client.study.id
    if dict(record) == {"study": study, "kind": "join", "round": 0} and ARRAYS not in message.content:
        return RecordDict({RECORD: ConfigRecord({"study": study, "join": json.dumps(client.participant._asdict())})})
    if set(record) != {"study", "kind", "round"} or not isinstance(record["round"], int) or isinstance(record["round"], bool):
        raise InputError("the message is not part of the protocol.")
    if record["study"] != study:
        raise InputError("the request is of another study than the study file of this site.")
    stored = context.state.get(MEMORY)
    client.memory = {} if stored is None else arrays_of(stored, "the memory of the site")
    arrays = arrays_of(message.content.get(ARRAYS), "the request")
    answer = client.answer(Request(str(record["kind"]), record["round"], arrays))
    context.state[MEMORY] = array_record(client.memory)
    return RecordDict({RECORD: ConfigRecord(dict(record)), ARRAYS: array_record(answer)})


def _client(context: Any) -> Client:
    where = "the node config of the SuperNode"
    study, cohort, site = (_setting(context.node_config, name, where) for name in (STUDY_FILE, COHORT_FILE, SITE))
    settings = NetworkStudy.load(study)
    key = settings.id, study, cohort, site
    if key not in _clients:
        subjects = m2lgdg.read(cohort)
        if len(subjects.site_names) > 1:
            subjects = subjects.select(sites=[site])
        if len(_clients) >= MOST_CLIENTS:
            _clients.clear()
        _clients[key] = Client(settings, subjects, site)
    return _clients[key]


def array_record(arrays: Arrays) -> Any:
    """Arrays as a record of Flower, without pickled objects."""
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def arrays_of(record: Any, where: str) -> Arrays:
    """Plain arrays of a record; a record of another type, or an array that numpy cannot read without pickle, is refused."""
    if not isinstance(record, ArrayRecord):
        raise InputError(f"{where} is not a record of arrays.")
    try:
        return {str(name): value.numpy() for name, value in record.items()}
    except (ValueError, TypeError, EOFError, OSError, MemoryError) as error:
        raise InputError(f"{where} holds something else than plain arrays ({str(error)[:100]}).") from None


def run(grid: Any, context: Any) -> None:
    """Train the network of the study file at all connected sites, and write the model folder."""
    settings = context.run_config
    study = NetworkStudy.load(_setting(settings, STUDY_FILE, "the run config"))
    folder = Path(_setting(settings, MODEL_FOLDER, "the run config"))
    timeout = float(settings.get(TIMEOUT, 3600.0))
    nodes, members = _joined(grid, study, timeout)
    work = lead(study, members)
    request = next(work)
    while True:
        content = {"study": study.id, "kind": request.kind, "round": request.round}
        replies = _asked(grid, list(nodes.values()), content, request.arrays, timeout)
        answers = {}
        for site, node in nodes.items():
            reply_content = _content(replies, node, f"site {site}")
            if dict(reply_content[RECORD]) != content:
                raise InputError(f"the answer of site {site} is of another request.")
            answers[site] = arrays_of(reply_content.get(ARRAYS), f"the answer of site {site}")
        try:
            request = work.send(answers)
        except StopIteration as ended:
            ended.value.save(folder)
            return


def _joined(grid: Any, study: NetworkStudy, timeout: float) -> tuple[dict[str, int], list[Participant]]:
    """Node of each site, and the facts with which the sites joined."""
    nodes = _connected(grid, len(study.sites), timeout)
    replies = _asked(grid, nodes, {"study": study.id, "kind": "join", "round": 0}, None, timeout)
    members: dict[int, Participant] = {}
    for node in nodes:
        record = _content(replies, node, f"node {node}")[RECORD]
        if record.get("study") != study.id:
            raise InputError(f"node {node} has another study file.")
        members[node] = _participant(record.get("join"), f"node {node}")
    by_site = {member.site: node for node, member in members.items()}
    if len(by_site) < len(members) or set(by_site) != set(study.sites):
        joined = ", ".join(member.site for member in members.values())
        raise InputError(f"connected are the sites {joined}; the study needs {', '.join(study.sites)}, each once.")
    return {site: by_site[site] for site in study.sites}, list(members.values())


def _participant(text: Any, where: str) -> Participant:
    try:
        content = json.loads(text)
        rois = tuple(str(name) for name in content["rois"])
        counts = int(content["patients"]), int(content["controls"])
        return Participant(str(content["site"]), *counts, rois, *(str(content[name]) for name in ("atlas", "cohort", "hash")))
    except (ValueError, TypeError, LookupError, RecursionError):
        raise InputError(f"the join message of {where} is not part of the protocol.") from None


def _asked(grid: Any, nodes: list[int], content: dict[str, Any], arrays: Arrays | None, timeout: float) -> dict[int, Any]:
    """Replies of nodes by their id; a node that did not answer is absent."""
    sent = []
    for node in nodes:
        records = RecordDict({RECORD: ConfigRecord(content)} | ({} if arrays is None else {ARRAYS: array_record(arrays)}))
        sent.append(Message(content=records, message_type=QUERY, dst_node_id=node))
    return {one.metadata.src_node_id: one for one in grid.send_and_receive(sent, timeout=timeout)}


def _content(replies: dict[int, Any], node: int, where: str) -> Any:
    message = replies.get(node)
    if message is None or message.has_error():
        raise InputError(f"{where} did not answer; run the study again when it is back.")
    if not isinstance(message.content.get(RECORD), ConfigRecord):
        raise InputError(f"the reply of {where} is not part of the protocol.")
    if "refused" in message.content[RECORD]:
        raise InputError(f"{where} refused: {str(message.content[RECORD]['refused'])[:500]}")
    return message.content


client_app.query()(reply)
server_app.main()(run)
