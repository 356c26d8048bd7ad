"""A Flower grid in one process: the server app and the client apps of Flower exchange real messages, without a network."""

from types import SimpleNamespace

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid:
    """Hands each message to the client app of its node; a node in `dead` does not answer."""

    def __init__(self, client_app, folders):
        self.client_app, self.folders = client_app, dict(enumerate(folders, start=1))
        self.dead, self.sent = set(), 0
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # set by Flower's processes otherwise

    def get_node_ids(self):
        return list(self.folders)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent += 1
            if node in self.dead:
                continue
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            context = SimpleNamespace(node_config={"site-folder": str(self.folders[node])}, run_config={}, node_id=node)
            reply = self.client_app(message, context)
            assert isinstance(reply, Message)
            replies.append(reply)
        return replies


def context(study):
    return SimpleNamespace(run_config={"study-folder": str(study)}, node_config={})
