"""The API of one model: `POST /api/predict` takes one subject as JSON or as files, and answers in JSON.

The numbers are those of `m2lgdg predict`; each error is one sentence, `{"error": "..."}`, with the status that fits.
`openapi.py` describes both.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from m2lgdg.deploy.serve.intake import ENVELOPE, RETRY, TOO_LARGE, Intake, Refused, need_small
from m2lgdg.deploy.serve.openapi import described
from m2lgdg.deploy.serve.result import COVERAGE, Result, result_of
from m2lgdg.deploy.serve.structure import MOST_FILES, Files, expected_tables
from m2lgdg.deploy.serve.upload import (
    LARGEST,
    MOST_NUMBERS,
    MOST_VOLUMES,
    SUFFIXES,
    Content,
    Numbers,
    one_subject,
    plain_name,
    taken,
)
from m2lgdg.fields import nearest
from m2lgdg.model.model import Model
from m2lgdg.storage import InputError

PREDICT = "/api/predict"
USE = "Research use; not a diagnostic device."
KINDS = ("application/json", "multipart/form-data")


class Subject(NamedTuple):
    """What was sent of a subject; values are not checked yet."""

    scans: dict[str, tuple[str, Content]]  # by atlas
    tables: Files
    phenotypes: dict[str, str]
    tr: str
    explain: bool


class Api:
    """The API of one model, beside its page."""

    def __init__(self, fitted: Model, intake: Intake) -> None:
        self.fitted, self.intake = fitted, intake
        self.takes = {atlas: taken(member) for atlas, member in fitted.members.items()}  # a series or a connectome
        self.tables = [one.name for one in expected_tables(fitted)]
        self.fields = {*self.takes.values(), "rois", "phenotypes", "tables", "explain"}
        if "series" in self.fields:
            self.fields.add("tr")
        self.description = described(fitted, PREDICT)

    async def describe(self, request: Request) -> Response:
        """OpenAPI description of this model's API."""
        return JSONResponse(self.description)

    async def predict(self, request: Request) -> Response:
        """The prediction for one subject, or one sentence on why there is none."""
        try:
            return JSONResponse(await self.intake.answer(request, self._read, self._compute))
        except Refused as error:
            retry = {"Retry-After": str(RETRY)} if error.status == 503 else None
            return JSONResponse({"error": error.sentence}, error.status, retry)

    async def _read(self, request: Request) -> bytes | Subject:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == KINDS[0]:
            return await self.intake.body(request)  # parsed in the thread of the computation, as it may be large
        if kind == KINDS[1]:
            files = len(self.fitted.members) + MOST_FILES * len(self.tables)
            return await self.intake.form(
                request, self._form, most_files=files, most_fields=len(self.fields), longest=ENVELOPE // 4
            )
        raise Refused(f"Send the subject as {' or '.join(KINDS)}; {kind[:40] or 'no content type'} is not known.", 415)

    def _compute(self, given: bytes | Subject) -> dict[str, Any]:
        subject = self._from_json(given) if isinstance(given, bytes) else given
        one = one_subject(self.fitted, subject.scans, subject.phenotypes, subject.tr, subject.tables)
        named = {table: [plain_name(name) for name, _ in own] for table, own in subject.tables.items()}
        return answer(self.fitted, result_of(self.fitted, one, explained=subject.explain, files=named), subject.explain)

    # ------------------------------------------------------------ JSON

    def _from_json(self, body: bytes) -> Subject:
        given = _object(_parsed(body, "The request"), "The request")
        self._need_known(given)
        scans = {
            atlas: rows
            for what in dict.fromkeys(self.takes.values())
            for atlas, rows in self._by_atlas(given.get(what), what).items()
        }
        if not scans:
            raise InputError(f"the request has no scan; this model takes {self._parts()}")
        names = self._by_atlas(given.get("rois"))
        tables = _object(given.get("tables") or {}, "tables")
        return Subject(
            {
                atlas: (self._name(atlas), Numbers(_matrix(rows, self._name(atlas)), _rois(names.get(atlas))))
                for atlas, rows in scans.items()
            },
            {
                self._table(name): [(f"{name}.csv", _csv(_object(values, f"table {name}"), name))]
                for name, values in tables.items()
            },
            self._phenotypes(given.get("phenotypes")),
            _number(given.get("tr"), "tr"),
            _truth(given.get("explain")),
        )

    def _by_atlas(self, given: Any, what: str | None = None) -> dict[str, Any]:
        """Values by atlas; without a name they are of the only one."""
        values = given if isinstance(given, dict) else {} if given is None else {self._only_atlas(what): given}
        for atlas in values:
            self._need_atlas(atlas, what)
        return values

    def _name(self, atlas: str) -> str:
        return f"{self.takes[atlas]} of {atlas}" if len(self.takes) > 1 else self.takes[atlas]

    def _only_atlas(self, what: str | None) -> str:
        names = [atlas for atlas, taken in self.takes.items() if what in (None, taken)]
        if len(names) > 1:
            raise InputError(f"the model has several atlases: name that of each {what or 'list'} ({', '.join(names)})")
        return names[0]

    # ------------------------------------------------------------ files

    async def _form(self, form: FormData) -> Subject:
        scans: dict[str, tuple[str, Content]] = {}
        words: dict[str, Any] = {}
        tables: dict[str, list[UploadFile]] = {}
        for key, value in form.multi_items():
            if isinstance(value, UploadFile):
                part, _, name = key.partition(".")
                if part == "tables" and name:
                    tables.setdefault(self._table(name), []).append(value)
                    continue
                if part not in self.takes.values():
                    raise InputError(f"the form has an unexpected file {key[:40]!r}; this model takes {self._parts()}")
                atlas = name or self._only_atlas(part)
                self._need_atlas(atlas, part)
                if atlas in scans:
                    raise InputError(f"the form has two files for {key[:40]!r}")
                if (value.size or 0) > LARGEST:
                    raise Refused(TOO_LARGE, 413)
                scans[atlas] = (value.filename or "", await value.read())
            elif key in words:
                raise InputError(f"the form has the field {key[:40]!r} twice")
            else:
                words[key] = _parsed(value.encode(), key[:40]) if value.strip() else None
        files = {*self.takes.values(), "rois", "tables"}  # not fields in a form, whose files name the ROIs in a header
        if needless := next((name for name in words if name in files), ""):
            raise InputError(f"the form has {needless!r} as a field; this model takes the file {self._parts()}")
        self._need_known(words)
        if not scans:
            raise InputError(f"the form has no file; this model takes {self._parts()}")
        need_small(tables)
        return Subject(
            {atlas: scans[atlas] for atlas in self.fitted.members if atlas in scans},
            {name: [(one.filename or "", await one.read()) for one in own] for name, own in tables.items()},
            self._phenotypes(words.get("phenotypes")),
            _number(words.get("tr"), "tr"),
            _truth(words.get("explain")),
        )

    def _parts(self) -> str:
        first = next(iter(self.takes.values()))
        return first if len(self.takes) == 1 else " and ".join(f"{what}.{name}" for name, what in self.takes.items())

    # ------------------------------------------------------------ both

    def _need_known(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name in SUFFIXES and name not in self.fields:
                raise InputError(f"the request has a {name}, and the model takes a {next(iter(self.takes.values()))}")
            if name not in self.fields:
                raise InputError(f"{name[:40]!r} is not a field of a request{nearest(name[:40], sorted(self.fields))}")

    def _need_atlas(self, atlas: str, what: str | None) -> None:
        if atlas not in self.takes:
            wanted = ", ".join(name or "(not named)" for name in self.takes)
            raise InputError(f"the model was trained on atlas {wanted}; the request has atlas {atlas[:40]}")
        if what not in (None, self.takes[atlas]):
            raise InputError(f"the request has a {what} of atlas {atlas}, of which the model takes a {self.takes[atlas]}")

    def _table(self, name: str) -> str:
        if name not in self.tables:
            takes = f"the tables {', '.join(self.tables)}" if self.tables else "no tables"
            raise InputError(f"table {name[:40]!r} is not one of the model, which takes {takes}")
        return name

    def _phenotypes(self, given: Any) -> dict[str, str]:
        inputs = self.fitted.facts_["inputs"]
        values = _object({} if given is None else given, "phenotypes")
        for name in values:
            if name not in inputs:
                takes = f"takes {', '.join(inputs)}" if inputs else "takes no phenotypes"
                raise InputError(f"phenotype {name[:40]!r} is not one of the model, which {takes}")
        return {name: _number(value, f"phenotype {name}") for name, value in values.items()}


def answer(fitted: Model, result: Result, explained: bool) -> dict[str, Any]:
    """The answer to a request; names are those of the columns of `m2lgdg predict`."""
    interval = result.new_site
    explanation = result.explained
    return {
        "subject": result.name,
        "scan": result.scan,
        "proba": result.proba,
        "decision": int(result.positive),
        "threshold": result.threshold,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "set": None if interval is None else interval.set,
        "coverage": None if interval is None else COVERAGE,
        "flags": [flag for flag, _ in result.flags],
        "ood": {name: None if math.isnan(score) else score for name, score in result.ood_scores.items()},
        "compared": result.compared,
        "site_level": result.level or None,
        "tables": dict(result.tables),
        "explanation": {
            "rois": [{"roi": name, "rank": rank, "score": score} for rank, name, score in explanation.rois],
            "phenotypes": [
                {"phenotype": name, "score": score, "towards": towards} for name, score, towards in explanation.phenotypes
            ],
            "regions": [
                {"region": name, "value": value, "score": score, "towards": towards, "table": table}
                for name, value, score, towards, table in explanation.regions
            ],
            "notes": explanation.sentences,
        }
        if explained
        else None,
        "method": fitted.name,
        "use": USE,
    }


def _parsed(content: bytes, where: str) -> Any:
    """The value of a JSON text; NaN, repeated or unreadable names and deep nesting are refused."""

    def no_number(text: str) -> Any:
        raise InputError(f"{where} has {text}, which is not a number of JSON; write null for a missing value")

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{where} has {twice[:40]!r} twice")
        _need_readable(found, where)
        return found

    try:
        return json.loads(content, parse_constant=no_number, object_pairs_hook=once)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        place = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{where} is not valid JSON{place}") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object with names and values")
    return value


def _number(value: Any, where: str) -> str:
    """A number as text, as a form has it; empty if it is missing."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where} must be a number, or null if it is not known")
    return repr(value)


def _truth(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InputError("explain must be true or false")
    return bool(value)


def _matrix(rows: Any, name: str) -> Any:
    """(row, column) numbers of lists of lists; null is NaN."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise InputError(f"{name} must be a list of rows, and each row a list of numbers")
    if len(rows) > MOST_VOLUMES:
        raise InputError(f"{name} has {len(rows)} rows; the limit is {MOST_VOLUMES}")
    width = len(rows[0])
    if width == 0 or len(rows) * width > MOST_NUMBERS:
        raise InputError(f"{name} has rows of {width} numbers; there must be some, and at most {MOST_NUMBERS} in all rows")
    values = np.empty((len(rows), width))
    for i, row in enumerate(rows):
        if len(row) != width:
            raise InputError(f"{name}, row {i + 1}: {len(row)} numbers, but earlier rows have {width}")
        kinds = set(map(type, row))
        if not kinds <= {int, float, type(None)}:
            raise InputError(f"{name}, row {i + 1} has a value that is not a number")
        try:
            values[i] = [math.nan if one is None else one for one in row] if type(None) in kinds else row
        except OverflowError:
            raise InputError(f"{name}, row {i + 1} has a number that is too large") from None
    return values


def _rois(names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("rois must be a list of names, one for each column")
    _need_readable(names, "rois")
    return tuple(names)


def _need_readable(names: Iterable[str], where: str) -> None:
    """Refuse names that no sentence can show; half of a surrogate pair, which JSON allows, cannot even be encoded."""
    for name in names:
        if not name.isprintable():
            raise InputError(f"{where} has the name {name[:40]!r}, which cannot be printed")


def _csv(values: Mapping[str, Any], table: str) -> bytes:
    """A table of one row, as the readers of tables take it."""
    import csv
    import io

    text = io.StringIO()
    numbers = [_number(value, f"table {table}, column {name[:40]}") for name, value in values.items()]
    csv.writer(text).writerows([list(values), numbers])
    return text.getvalue().encode()
