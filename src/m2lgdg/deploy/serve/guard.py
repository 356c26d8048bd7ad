"""Who may talk to the server: its own page on this machine, and with a token anybody who sends it.

`app.py` wraps the application in `Guard`, which refuses a request without reading its body and adds security headers to every
response.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEALTH, OPENAPI, API = "/health", "/openapi.json", "/api/"
NO_TOKEN = "Send the token of the server: Authorization: Bearer TOKEN; in a browser, it is the password of any user name."


class Guard:
    """Middleware: accepts requests of this machine and this page only, or with the token those of others.

    With a token, every path but `/health` needs it. `public` is for a server on another address than loopback, which answers
    under any host name; it always has a token, so another page in the user's browser cannot use it.
    """

    HEADERS: tuple[tuple[bytes, bytes], ...] = (
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"same-origin"),  # with no referrer, browsers would send `Origin: null` with our own form
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    )
    POLICY = b"default-src 'none'; frame-ancestors 'none'"

    def __init__(self, app: ASGIApp, token: str | None = None, *, public: bool = False) -> None:
        if public and not token:
            raise ValueError("a public server needs a token")
        self.app, self.public = app, public
        self.token = None if token is None else _digest(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it without reading its body."""
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served")

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                policy = [] if b"content-security-policy" in names else [(b"content-security-policy", self.POLICY)]
                message = {**message, "headers": [*message["headers"], *self.HEADERS, *policy]}
            await send(message)

        refused = self._refused(scope["method"], scope["path"], Headers(scope=scope))
        await (refused or self.app)(scope, receive, sealed)

    def _refused(self, method: str, path: str, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        known = len(hosts) == 1 and (self.public or _without_port(hosts[0]) in HOSTS)
        if not known:  # on loopback, any other host name is a DNS rebinding attack
            return sentence(path, "This page is served at 127.0.0.1 and localhost only.", 421)
        if self.token is not None and path != HEALTH and not self._authorised(headers):
            kind = "Bearer" if is_api(path) else 'Basic realm="m2lgdg", charset="UTF-8"'
            return sentence(path, NO_TOKEN, 401, {"WWW-Authenticate": kind})
        schemes = ("http", "https") if self.public else ("http",)  # https in front of a public server
        own = [f"{scheme}://{hosts[0]}" for scheme in schemes]
        origin, site = headers.get("origin", own[0]), headers.get("sec-fetch-site", "none")
        if method not in ("GET", "HEAD") and (origin not in own or site not in ("same-origin", "none")):
            return sentence(path, "Forms of other pages are refused.", 403)
        return None

    def _authorised(self, headers: Headers) -> bool:
        """Whether the token was sent, as a bearer token or as the password of a browser; compared in constant time."""
        given = headers.getlist("authorization")
        kind, _, value = (given[0] if len(given) == 1 else "").partition(" ")
        if kind.lower() == "basic":
            try:
                value = base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, ValueError):
                return False
        elif kind.lower() != "bearer":
            return False
        assert self.token is not None
        return hmac.compare_digest(_digest(value), self.token)  # of hashes, so that the length is no secret


def sentence(path: str, text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """One sentence as a response: JSON for the API, plain text for a browser."""
    if is_api(path):
        return JSONResponse({"error": text}, status, headers)
    return PlainTextResponse(f"{text}\n", status, headers)


def is_api(path: str) -> bool:
    """Whether a program, not a browser, asks."""
    return path.startswith(API) or path in (OPENAPI, HEALTH)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", errors="surrogateescape")).digest()


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()
