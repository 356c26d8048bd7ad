"""HTTP connections of the page's server, in which slow clients do not block the others.

uvicorn makes one `Connection` per client. Without it, a client that sends half a request would keep its place for ever.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 32  # connections at once
PATIENCE = 20.0  # seconds for the first line and the headers of a request


class Connection(H11Protocol):
    """Connection that is closed if no request arrives, or if a new one needs its place and it has been idle for longest."""

    active = 0.0  # time of the event loop at which the client last sent something

    def connection_made(self, transport: Any) -> None:
        """Accept a client; if there are already `MOST`, the one that has been idle for longest is disconnected."""
        others = [each for each in self.connections if isinstance(each, Connection) and not each.answering()]
        if len(self.connections) >= MOST and others:
            min(others, key=lambda each: each.active).disconnect()
        super().connection_made(transport)
        self.active = self.loop.time()
        self.loop.call_later(PATIENCE, self._disconnect_without_request)

    def data_received(self, data: bytes) -> None:
        """Remember when the client was active."""
        self.active = self.loop.time()
        super().data_received(data)

    def answering(self) -> bool:
        """Whether a whole request was received and its response is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def disconnect(self) -> None:
        """End the connection now; a client that does not read would otherwise delay the end."""
        self.connections.discard(self)
        self.transport.abort()

    def _disconnect_without_request(self) -> None:
        if self.cycle is None:
            self.disconnect()
