"""A Flower grid in one process: the server app and the client apps of Flower exchange real messages, without a network."""

from types import SimpleNamespace

from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid:
    """Hands each message to the client app of its node; a node in `dead` does not answer.

    `configs` are the node configs. Each node has one context, which keeps its records from message to message.
    """

    def __init__(self, client_app, configs):
        self.client_app, self.dead, self.sent = client_app, set(), 0
        self.contexts = {
            node: SimpleNamespace(node_config=config, run_config={}, node_id=node, state=RecordDict())
            for node, config in enumerate(configs, start=1)
        }
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # set by Flower's processes otherwise

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent += 1
            if node in self.dead:
                continue
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            reply = self.client_app(message, self.contexts[node])
            assert isinstance(reply, Message)
            replies.append(reply)
        return replies


def folders(root, sites):
    """Node configs of the sites whose folders are in `root`."""
    return [{"site-folder": str(root / site)} for site in sites]


def context(**config):
    """Context of a server app, with a run config."""
    return SimpleNamespace(run_config={name.replace("_", "-"): str(value) for name, value in config.items()}, node_config={})
