"""Server of the page and the API: uvicorn on a loopback address, or with a token on any, without logs, until Ctrl-C.

Called by `m2lgdg serve`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from m2lgdg.model.model import Model
from m2lgdg.storage import InputError, needing

LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}
SHORTEST = 16  # letters of a token
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())'"


def need_token(host: str, token: str | None) -> None:
    """Refuse a host that other machines reach without a token, and a token that can be guessed or not be sent."""
    if token is None:
        if host not in LOOPBACK:
            raise InputError(
                f"--host {host} can be reached from other machines and needs a token of {SHORTEST} letters or more: set "
                f"M2LGDG_TOKEN, or give --token; {NEW_TOKEN} makes one."
            )
    elif len(token) < SHORTEST or not all("!" <= letter <= "~" for letter in token):
        raise InputError(f"--token needs {SHORTEST} letters or more, without spaces, of ASCII; {NEW_TOKEN} makes one.")


def bound(host: str, port: int, token: str | None = None) -> socket.socket:
    """Socket on an address; one that other machines reach needs a token, and a port in use is refused."""
    need_token(host, token)
    with needing("serve", "the page"):
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    try:
        family = LOOPBACK.get(host) or socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError):
        raise InputError(f"--host {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 with a token.") from None
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1" if host == "localhost" else host, port))
    except (OSError, OverflowError) as error:
        server.close()
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else "a port is 0 to 65535"
        raise InputError(f"--port {port} on {host} cannot be used ({reason}); choose another.") from None
    return server


def run(fitted: Model, on: socket.socket, opened: Callable[[str], None], token: str | None = None) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    from m2lgdg.deploy.serve.app import make_app
    from m2lgdg.deploy.serve.connections import Connection

    host, port = on.getsockname()[:2]
    app = make_app(fitted, token=token, public=host not in LOOPBACK)
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=2,
    )  # fmt: skip
    on.listen()  # before the address is printed, so that requests are accepted at once
    opened(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after a clean shutdown
        uvicorn.Server(config).run(sockets=[on])
