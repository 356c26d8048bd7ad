"""A federated study over a network, by Flower: its ServerApp and ClientApp carry the very messages that files carry.

Flower connects the hospitals, with its own TLS and authentication. The server app works on the folder of the coordinator and
the client app on the folder of its site, as `m2lgdg federate` does: with the same checks, the same bits, and after a stop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from m2lgdg.federated import exchange, messages
from m2lgdg.storage import InputError, needing, read_bytes, write_bytes

with needing("flower", "A federated study over a network"):
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

RECORD = "m2lgdg"  # name of the only record in a message
STUDY_FOLDER, TIMEOUT = "study-folder", "timeout"  # run config of the server; seconds that it waits for the sites in a round
SITE_FOLDER, FINGERPRINT, WITHOUT = "site-folder", "fingerprint", "without"  # node config of a site; sites with commas between
QUERY = "query"

client_app: Any = ClientApp()
server_app: Any = ServerApp()


def reply(message: Any, context: Any) -> Any:
    """Answer of a site to the server: its join message, or sums for a request; anything else is refused with a sentence."""
    try:
        content = _reply(message, context)
    except InputError as error:
        content = {"refused": str(error)}
        print(
            f"m2lgdg refused: {error}", file=sys.stderr, flush=True
        )  # the site's own fingerprint, not one that was sent to it
    return Message(RecordDict({RECORD: ConfigRecord(content)}), reply_to=message)


def _reply(message: Any, context: Any) -> dict[str, Any]:
    folder = _setting(context.node_config, SITE_FOLDER, "the node config of the SuperNode")
    record = message.content.get(RECORD)
    if list(message.content) != [RECORD] or not isinstance(record, ConfigRecord):
        raise InputError("the message is not part of the protocol.")
    if dict(record) == {"join": True}:
        return {"join": exchange.join_message(folder)}
    if list(record) != ["request"] or not isinstance(record["request"], bytes):
        raise InputError("the message is not part of the protocol.")
    fingerprint, without = (str(context.node_config.get(name, "")) for name in (FINGERPRINT, WITHOUT))
    absent = [site.strip() for site in without.split(",") if site.strip()]
    path = exchange.answer(folder, record["request"], "the request", fingerprint=fingerprint, without=absent)
    return {"answer": read_bytes(path, messages.LARGEST)}


def lead(grid: Any, context: Any) -> None:
    """Run the study of the server's folder to its end: collect joins, then send requests and add the answers."""
    folder = Path(_setting(context.run_config, STUDY_FOLDER, "the run config"))
    timeout = float(context.run_config.get(TIMEOUT, 3600.0))
    study = exchange.open_study(folder)
    nodes = _joined(grid, folder, study, timeout)
    progress = exchange.standing(folder)  # after a kill, at a request whose answers may be missing
    while progress.request is not None:
        _send(grid, folder, progress, nodes, timeout)
        progress = exchange.combine(folder)
    exchange.save_model(folder, progress)


def _send(grid: Any, folder: Path, progress: exchange.Progress, nodes: dict[str, int], timeout: float) -> None:
    """Send a request to all sites, and store their answers in the folder of the study."""
    assert progress.request is not None
    content = read_bytes(progress.request, messages.LARGEST)
    for site in progress.plan.fold_of:
        if site not in nodes:
            again = f"m2lgdg federate combine STUDY --without {site}"
            raise InputError(f"site {site} is not connected; connect it, or begin again with {again}.")
    replies = _asked(grid, {nodes[site]: {"request": content} for site in progress.plan.fold_of}, timeout)
    answers = {site: _content(replies, nodes[site], "answer", site) for site in progress.plan.fold_of}
    # All of them, before one is stored: the site can then send it again.
    messages.read_answers(answers, progress.plan, progress.asked, progress.hash, f"round {progress.round}")
    for site, answer in answers.items():
        write_bytes(folder / exchange.ANSWERS / exchange.answer_name(progress.plan.attempt, progress.round, site), answer)


def _joined(grid: Any, folder: Path, study: Any, timeout: float) -> dict[str, int]:
    """Node of each site, once all have joined; new join messages are stored in the folder of the study."""
    wanted = len(study.training_sites) - len(exchange.left_out(folder))
    nodes = _connected(grid, wanted, timeout)
    replies = _asked(grid, {node: {"join": True} for node in nodes}, timeout)
    by_site: dict[str, int] = {}
    for node in nodes:
        if node not in replies or replies[node].has_error():
            continue  # Flower lists a node for a minute after it was lost; a site that is missing is noticed in `_send`
        content = _content(replies, node, "join", str(node))
        member = messages.read_member(content, f"the join message of node {node}", study)
        if member.site not in study.sites or member.site in by_site:
            raise InputError(f"node {node} joins as site {member.site}, which is not expected, or is connected already.")
        by_site[member.site] = node
        path = folder / exchange.JOINS / f"{member.site}.json"
        if not path.exists():
            write_bytes(path, content)
        elif read_bytes(path, messages.LARGEST) != content:
            raise InputError(f"site {member.site} joined before with another message ({path}).")
    return by_site


def _connected(grid: Any, wanted: int, timeout: float) -> list[int]:
    import time

    start = time.monotonic()
    while len(nodes := sorted(grid.get_node_ids())) < wanted:
        if time.monotonic() - start > timeout:
            raise InputError(f"{len(nodes)} of {wanted} sites are connected after {timeout:g} seconds.")
        time.sleep(1)
    return nodes


def _asked(grid: Any, contents: dict[int, dict[str, Any]], timeout: float) -> dict[int, Any]:
    """Replies of nodes by their id; a node that did not answer is absent."""
    sent = [
        Message(content=RecordDict({RECORD: ConfigRecord(content)}), message_type=QUERY, dst_node_id=node)
        for node, content in contents.items()
    ]
    return {one.metadata.src_node_id: one for one in grid.send_and_receive(sent, timeout=timeout)}


def _content(replies: dict[int, Any], node: int, name: str, site: str) -> bytes:
    """Bytes in the reply of a site; a missing or refused one ends the round with a sentence."""
    again = f"m2lgdg federate combine STUDY --without {site}"
    message = replies.get(node)
    if message is None or message.has_error():
        raise InputError(f"site {site} did not answer; run again when it is back, or begin again with {again}.")
    record = message.content.get(RECORD) or {}
    if "refused" in record:
        raise InputError(f"site {site} refused: {str(record['refused'])[:500]}")
    if not isinstance(record.get(name), bytes):
        raise InputError(f"the reply of site {site} is not part of the protocol.")
    return bytes(record[name])


def _setting(config: Any, name: str, where: str) -> str:
    if not isinstance(config.get(name), str):
        raise InputError(f"{where} has no {name}.")
    return str(config[name])


client_app.query()(reply)
server_app.main()(lead)
