"""The web application of one model: a form, its answer, and a guard against other pages and other machines.

`m2lgdg serve` runs it. Everything stays in memory: no file and no log of what was sent, and one computation at a time.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from m2lgdg.deploy.serve.api import PREDICT, Api
from m2lgdg.deploy.serve.guard import HEALTH, OPENAPI, Guard, sentence
from m2lgdg.deploy.serve.intake import ENVELOPE, MEGABYTES, PATIENCE, RETRY, TOO_LARGE, Intake, Refused, need_small
from m2lgdg.deploy.serve.result import Result, result_of
from m2lgdg.deploy.serve.structure import LARGEST_TABLE, MOST_FILES, STATS, TABLES, Files, expected_tables
from m2lgdg.deploy.serve.upload import LARGEST, SUFFIXES, TR, example_file, field_of, one_subject, plain_name, taken
from m2lgdg.method import Method, is_network
from m2lgdg.model.model import Model
from m2lgdg.model.packaged import told
from m2lgdg.scans import CORRELATION, FISHER_Z, SERIES

Form = tuple[dict[str, tuple[str, bytes]], Files, dict[str, str]]  # files of atlases, files of tables, other fields
EXAMPLE = "example"  # the part of the form that asks for a synthetic scan
FILE = {"series": "a file with ROI series", "connectome": "a file with a connectome"}


class Desk:
    """Form and results of one model."""

    def __init__(self, fitted: Model, patience: float = PATIENCE) -> None:
        self.fitted = fitted
        self.packaged = told(fitted.method._folder)
        self.names = {f"p{i}": name for i, name in enumerate(fitted.facts_["inputs"])}  # field -> phenotype
        self.takes = {atlas: taken(member) for atlas, member in fitted.members.items()}  # a series or a connectome
        self.example = set(self.takes.values()) == {"series"}  # whether a synthetic scan can be shown
        self.words = ("tr", "explain", *([EXAMPLE] if self.example else []), *self.names)  # fields of text
        named = enumerate(self.takes.items())
        self.files = {f"{what}-{i}" if i else what: atlas for i, (atlas, what) in named}  # field -> atlas
        self.tables = {f"table-{i}": one for i, one in enumerate(expected_tables(fitted))}  # by field
        self.most_files = len(self.files) + MOST_FILES * len(self.tables)
        self.most = len(self.files) * LARGEST + MOST_FILES * len(self.tables) * LARGEST_TABLE + ENVELOPE  # bytes of a form
        self.intake = Intake(self.most, patience)
        self.page, self.policy = _page()

    async def show(self, request: Request) -> Response:
        """The empty form."""
        return self._respond({}, status=200)

    async def reply(self, request: Request) -> Response:
        """The form with a result, or with the reason why there is none."""
        words: dict[str, str] = {}

        async def read(request: Request) -> Form:
            form = await self._form(request)
            words.update(form[2])
            return form

        try:
            result = await self.intake.answer(request, read, self._compute)
        except Refused as error:
            return self._respond(words, error.sentence, status=error.status)
        return self._respond(words, result=result, status=200)

    def _compute(self, form: Form) -> Result:
        files, tables, words = form
        phenotypes = {phenotype: words.get(field, "") for field, phenotype in self.names.items()}
        subject = one_subject(self.fitted, files, phenotypes, words.get("tr", ""), tables)
        named = {table: [plain_name(name) for name, _ in own] for table, own in tables.items()}
        return result_of(self.fitted, subject, explained="explain" in words, files=named)

    async def _form(self, request: Request) -> Form:
        """Name and content of the file of each atlas and of those of each table, and the other fields."""

        async def take(form: FormData) -> Form:
            files, tables, words = self._checked(form)
            scans = {atlas: (file.filename or "", await file.read()) for atlas, file in files.items()}
            if EXAMPLE in words:
                scans = {atlas: example_file(len(member.facts_["rois"])) for atlas, member in self.fitted.members.items()}
            read = {name: [(one.filename or "", await one.read()) for one in own] for name, own in tables.items()}
            return scans, read, words

        return await self.intake.form(request, take, most_files=self.most_files, most_fields=len(self.words))

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
            elif key in self.words and isinstance(value, str) and key not in words:
                words[key] = value
            elif key in SUFFIXES and key not in self.files:
                raise Refused(f"The form has a part {key!r}; this model takes {' and '.join(map(repr, self.files))}.")
            else:
                raise Refused(f"The form has an unexpected part {key[:40]!r}.")
        if EXAMPLE in words:
            return {}, {}, words
        filled = {key: file for key, file in given.items() if file.filename or file.size}  # a browser sends empty fields, too
        if not filled:
            raise Refused(f"Choose {FILE[self.takes[next(iter(self.takes))]]} first.", 422)
        if any((file.size or 0) > LARGEST for file in filled.values()):
            raise Refused(TOO_LARGE, 413)
        need_small(tables)
        return {atlas: filled[key] for key, atlas in self.files.items() if key in filled}, tables, words

    def _respond(self, words: Mapping[str, str], sentence: str = "", *, status: int, result: Result | None = None) -> Response:
        facts = self.fitted.facts_
        sites = facts.get("source", {}).get("sites", {})
        phenotypes = [(field, field_of(name), words.get(field, "")) for field, name in self.names.items()]
        text = self.page.render(
            method=self.fitted.name,
            packaged=self.packaged,
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
            example=self.example,
            shown=EXAMPLE in words,
            network=is_network(self.fitted),
            largest=LARGEST,
            megabytes=MEGABYTES,
            sentence=sentence,
            result=result,
            drawn=Markup,
        )
        retry = {"Retry-After": str(RETRY)} if status == 503 else {}
        return HTMLResponse(text, status, {"Content-Security-Policy": self.policy} | retry)


def _shape(member: Method) -> str:
    """What the rows and columns of a file are, for the form."""
    named = "in the order of the model unless a header names the ROIs."
    if (kind := member.trained_on) == SERIES:
        return f"Series: one row per volume and one column per ROI, {named}"
    doubt = f" With a diagonal of 0 and no value above 1 it is taken as {kind}." if kind in (CORRELATION, FISHER_Z) else ""
    return f"Connectome: a symmetric matrix with one row and one column per ROI, {named}{doubt}"


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


def make_app(fitted: Model, patience: float = PATIENCE, token: str | None = None, *, public: bool = False) -> ASGIApp:
    """ASGI application of a fitted method: the page, the API, and their guard."""
    desk = Desk(fitted, patience)
    api = Api(fitted, desk.intake)
    routes = [
        Route("/", desk.show, methods=["GET"]),
        Route("/", desk.reply, methods=["POST"]),
        Route(PREDICT, api.predict, methods=["POST"]),
        Route(OPENAPI, api.describe, methods=["GET"]),
        Route(HEALTH, _health, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown}), token, public=public)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _unknown(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    text = (
        f"There is no {request.url.path[:40]} here." if error.status_code == 404 else f"{request.method} is not allowed here."
    )
    return sentence(request.url.path, text, error.status_code, dict(error.headers or {}))
