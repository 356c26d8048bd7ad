"""Server of the page: uvicorn on a loopback address, without logs, until Ctrl-C. Called by `m2lgdg serve`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from m2lgdg.model.model import Model
from m2lgdg.storage import InputError, needing

LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}


def bound(host: str, port: int) -> socket.socket:
    """Socket on a loopback address; any other host and a port in use are refused."""
    if host not in LOOPBACK:
        raise InputError(f"--host {host} is refused: the page is for this machine only; use 127.0.0.1, localhost or ::1.")
    with needing("serve", "the page"):
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    server = socket.socket(LOOPBACK[host], socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1" if host == "localhost" else host, port))
    except (OSError, OverflowError) as error:
        server.close()
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else "a port is 0 to 65535"
        raise InputError(f"--port {port} on {host} cannot be used ({reason}); choose another.") from None
    return server


def run(fitted: Model, on: socket.socket, opened: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    from m2lgdg.deploy.serve.app import make_app
    from m2lgdg.deploy.serve.connections import Connection

    config = uvicorn.Config(
        make_app(fitted), http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=2,
    )  # fmt: skip
    on.listen()  # before the address is printed, so that requests are accepted at once
    host, port = on.getsockname()[:2]
    opened(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after a clean shutdown
        uvicorn.Server(config).run(sockets=[on])
