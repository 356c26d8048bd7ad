"""The server app of the coordinator and the client app of each site; m2lgdg is installed at both."""

from m2lgdg.federated.flower import client_app, server_app

__all__ = ["client_app", "server_app"]
