"""The web application of one model: a form, its answer, and a guard against other pages and other machines.

`m2lgdg serve` runs it. Everything stays in memory: no file and no log of what was sent, and one computation at a time.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncGenerator, Mapping
from importlib.resources import files
from typing import Any

import anyio
from jinja2 import Environment
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m2lgdg.deploy.serve.result import Result, result_of
from m2lgdg.deploy.serve.structure import LARGEST_TABLE, MOST_FILES, STATS, TABLES, Files, expected_tables
from m2lgdg.deploy.serve.upload import LARGEST, SUFFIXES, TR, field_of, one_subject, plain_name, taken
from m2lgdg.method import Method, is_network
from m2lgdg.model.model import Model
from m2lgdg.scans import CORRELATION, FISHER_Z, SERIES
from m2lgdg.storage import InputError, one_line

ENVELOPE = 2**16  # bytes of a form without its file
LONGEST_FIELD = 200
AT_ONCE = 16  # forms that are computed or wait for it
MOST_BYTES = 16 * LARGEST  # of all forms that are arriving, waiting or computed
IDLE = 2.0  # seconds without a byte, after which a form gives way if there is no memory for another
PATIENCE = 60.0  # seconds for a form to arrive
RETRY = 10  # seconds after which a client that was sent away may try again
BUSY = f"The server is busy with other uploads; try again in {RETRY} seconds."
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MEGABYTES = LARGEST // 2**20
FILE = {"series": "a file with ROI series", "connectome": "a file with a connectome"}
TOO_LARGE = f"The file is larger than the limit of {MEGABYTES} MB."


class Refused(Exception):
    """A form that cannot be answered, with a sentence for the page and an HTTP status."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


class _InMemory(MultiPartParser):
    spool_max_size = 2 * LARGEST  # by default, starlette writes files above 1 MB to disk

    def close(self) -> None:
        """Close every file; starlette does so only if parsing fails."""
        for file in self._files_to_close_on_error:
            file.close()


class Desk:
    """Form and results of one model."""

    def __init__(self, fitted: Model, patience: float = PATIENCE) -> None:
        self.fitted, self.patience = fitted, patience
        self.names = {f"p{i}": name for i, name in enumerate(fitted.facts_["inputs"])}  # field -> phenotype
        self.takes = {atlas: taken(member) for atlas, member in fitted.members.items()}  # a series or a connectome
        named = enumerate(self.takes.items())
        self.files = {f"{what}-{i}" if i else what: atlas for i, (atlas, what) in named}  # field -> atlas
        self.tables = {f"table-{i}": one for i, one in enumerate(expected_tables(fitted))}  # by field
        self.most_files = len(self.files) + MOST_FILES * len(self.tables)
        self.most = len(self.files) * LARGEST + MOST_FILES * len(self.tables) * LARGEST_TABLE + ENVELOPE  # bytes of a form
        self.inside, self.turn = 0, anyio.Lock()
        self.reading: dict[anyio.CancelScope, float] = {}  # forms that are arriving, and when their last bytes came
        self.bytes: dict[Request, int] = {}  # of each form in memory
        self.page, self.policy = _page()

    async def show(self, request: Request) -> Response:
        """The empty form."""
        return self._respond({}, status=200)

    async def reply(self, request: Request) -> Response:
        """The form with a result, or with the reason why there is none."""
        words: dict[str, str] = {}
        try:
            self._need_place()
            files, tables, words = await self._form(request)
            self._need_place()  # others may have arrived meanwhile
            self.inside += 1
            try:
                async with self.turn:
                    result = await anyio.to_thread.run_sync(self._compute, files, tables, words, abandon_on_cancel=True)
            finally:
                self.inside -= 1
            return self._respond(words, result=result, status=200)
        except Refused as error:
            return self._respond(words, error.sentence, status=error.status)
        except InputError as error:
            return self._respond(words, f"{one_line(error)}.", status=422)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has gone
        except Exception as error:  # the message may contain uploaded data, so only the type is shown
            return self._respond(words, f"The prediction failed ({type(error).__name__}).", status=500)
        finally:
            self.bytes.pop(request, None)

    def _need_place(self) -> None:
        if self.inside >= AT_ONCE:
            raise Refused(BUSY, 503)

    def _compute(self, files: Mapping[str, tuple[str, bytes]], tables: Files, words: Mapping[str, str]) -> Result:
        phenotypes = {phenotype: words.get(field, "") for field, phenotype in self.names.items()}
        subject = one_subject(self.fitted, files, phenotypes, words.get("tr", ""), tables)
        named = {table: [plain_name(name) for name, _ in own] for table, own in tables.items()}
        return result_of(self.fitted, subject, explained="explain" in words, files=named)

    async def _form(self, request: Request) -> tuple[dict[str, tuple[str, bytes]], Files, dict[str, str]]:
        """Name and content of the file of each atlas and of those of each table, and the other fields."""
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Refused("The form must be sent as multipart/form-data.", 415)
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self.most:
            raise Refused(TOO_LARGE, 413)
        scope = anyio.CancelScope(deadline=anyio.current_time() + self.patience)
        parser = _InMemory(
            request.headers,
            self._chunks(request, scope),
            max_files=self.most_files,
            max_fields=len(self.names) + 2,
            max_part_size=LONGEST_FIELD,
        )
        self.reading[scope] = anyio.current_time()
        try:
            with scope:
                files, tables, words = self._checked(await parser.parse())
                scans = {atlas: (file.filename or "", await file.read()) for atlas, file in files.items()}
                read = {name: [(one.filename or "", await one.read()) for one in own] for name, own in tables.items()}
                return scans, read, words
            raise Refused("The upload took too long.", 408)
        except MultiPartException as error:
            raise Refused(f"The form cannot be read ({error.message.rstrip('.')}).") from None
        finally:
            self.reading.pop(scope, None)
            parser.close()

    async def _chunks(self, request: Request, scope: anyio.CancelScope) -> AsyncGenerator[bytes, None]:
        """Chunks of the body, refused as soon as they exceed a limit, whatever length was declared."""
        async for chunk in request.stream():
            self.reading[scope] = anyio.current_time()
            self.bytes[request] = self.bytes.get(request, 0) + len(chunk)
            if self.bytes[request] > self.most:
                raise Refused(TOO_LARGE, 413)
            if sum(self.bytes.values()) > MOST_BYTES:
                slowest = min(self.reading, key=self.reading.__getitem__)
                if self.reading[slowest] > anyio.current_time() - IDLE:
                    raise Refused(BUSY, 503)
                slowest.cancel()
            yield chunk

    def _checked(self, form: FormData) -> tuple[dict[str, UploadFile], dict[str, list[UploadFile]], dict[str, str]]:
        """File of each atlas, files of tables and other fields; one that the page does not have, or has twice, is refused."""
        words: dict[str, str] = {}
        given: dict[str, UploadFile] = {}
        tables: dict[str, list[UploadFile]] = {}
        for key, value in form.multi_items():
            if key in self.files and isinstance(value, UploadFile) and key not in given:
                given[key] = value
            elif key in self.tables and isinstance(value, UploadFile):
                tables.setdefault(self.tables[key].name, []).extend([value] if value.filename or value.size else [])
            elif key in ("tr", "explain", *self.names) and isinstance(value, str) and key not in words:
                words[key] = value
            elif key in SUFFIXES and key not in self.files:
                raise Refused(f"The form has a part {key!r}; this model takes {' and '.join(map(repr, self.files))}.")
            else:
                raise Refused(f"The form has an unexpected part {key[:40]!r}.")
        filled = {key: file for key, file in given.items() if file.filename or file.size}  # a browser sends empty fields, too
        if not filled:
            raise Refused(f"Choose {FILE[self.takes[next(iter(self.takes))]]} first.", 422)
        if any((file.size or 0) > LARGEST for file in filled.values()):
            raise Refused(TOO_LARGE, 413)
        _need_small(tables)
        return {atlas: filled[key] for key, atlas in self.files.items() if key in filled}, tables, words

    def _respond(self, words: Mapping[str, str], sentence: str = "", *, status: int, result: Result | None = None) -> Response:
        facts = self.fitted.facts_
        sites = facts.get("source", {}).get("sites", {})
        phenotypes = [(field, field_of(name), words.get(field, "")) for field, name in self.names.items()]
        text = self.page.render(
            method=self.fitted.name,
            subjects=sum(sum(site.values()) for site in sites.values()),
            sites=len(sites),
            files=[(field, atlas, self.takes[atlas], self.fitted.members[atlas]) for field, atlas in self.files.items()],
            fields=[*phenotypes, *([("tr", TR, words.get("tr", ""))] if "series" in self.takes.values() else [])],
            suffixes=SUFFIXES,
            tables=list(self.tables.items()),
            table_suffixes=[STATS, *TABLES],
            largest_table=LARGEST_TABLE,
            first=FILE[self.takes[next(iter(self.takes))]],
            shapes=list(dict.fromkeys(map(_shape, self.fitted.members.values()))),
            explain=not words or "explain" in words,
            network=is_network(self.fitted),
            largest=LARGEST,
            megabytes=MEGABYTES,
            sentence=sentence,
            result=result,
            drawn=Markup,
        )
        retry = {"Retry-After": str(RETRY)} if status == 503 else {}
        return HTMLResponse(text, status, {"Content-Security-Policy": self.policy} | retry)


def _need_small(tables: Mapping[str, list[UploadFile]]) -> None:
    for name, own in tables.items():
        if len(own) > MOST_FILES:
            raise Refused(f"There are {len(own)} files for table {name}; the limit is {MOST_FILES}.")
        if any((file.size or 0) > LARGEST_TABLE for file in own):
            raise Refused(f"A file of table {name} is larger than the limit of {LARGEST_TABLE // 2**20} MB.", 413)


def _shape(member: Method) -> str:
    """What the rows and columns of a file are, for the form."""
    named = "in the order of the model unless a header names the ROIs."
    if (kind := member.trained_on) == SERIES:
        return f"Series: one row per volume and one column per ROI, {named}"
    doubt = f" With a diagonal of 0 and no value above 1 it is taken as {kind}." if kind in (CORRELATION, FISHER_Z) else ""
    return f"Connectome: a symmetric matrix with one row and one column per ROI, {named}{doubt}"


class Guard:
    """Middleware: accepts requests of this machine and this page only, and adds security headers to every response."""

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

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

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

        refused = _refused(scope["method"], Headers(scope=scope))
        await (refused or self.app)(scope, receive, sealed)


def _refused(method: str, headers: Headers) -> Response | None:
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _without_port(hosts[0]) not in HOSTS:  # any other host name is a DNS rebinding attack
        return PlainTextResponse("This page is served at 127.0.0.1 and localhost only.\n", 421)
    origin, site = headers.get("origin", f"http://{hosts[0]}"), headers.get("sec-fetch-site", "none")
    if method not in ("GET", "HEAD") and (origin != f"http://{hosts[0]}" or site not in ("same-origin", "none")):
        return PlainTextResponse("Forms of other pages are refused.\n", 403)
    return None


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def _page() -> tuple[Any, str]:
    """Template with inline style and script, and the content security policy that allows only these."""
    here, report = files("m2lgdg.deploy.serve"), files("m2lgdg.report")
    style = (report / "page.css").read_text(encoding="utf-8") + (here / "page.css").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    allowed = {"style-src": style, "script-src": script}
    parts = [
        f"{kind} 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for kind, text in allowed.items()
    ]
    policy = ["default-src 'none'", *parts, "img-src data:", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"style": Markup(style), "script": Markup(script)}
    return environment.from_string((here / "page.html").read_text(encoding="utf-8")), "; ".join(policy)


def make_app(fitted: Model, patience: float = PATIENCE) -> ASGIApp:
    """ASGI application of a fitted method."""
    desk = Desk(fitted, patience)
    routes = [Route("/", desk.show, methods=["GET"]), Route("/", desk.reply, methods=["POST"])]
    return Guard(Starlette(routes=routes))
