"""OpenAPI description of the API of one model, from what the model takes and what the requests are checked for.

`api.py` serves it as `/openapi.json`.
"""

from __future__ import annotations

from typing import Any

from m2lgdg.deploy.serve.result import SETS
from m2lgdg.deploy.serve.structure import expected_tables
from m2lgdg.deploy.serve.upload import MOST_VOLUMES, SUFFIXES, TR, Field, field_of, taken
from m2lgdg.method import Method
from m2lgdg.model.model import Model

Schema = dict[str, Any]
NUMBER: Schema = {"type": ["number", "null"]}
TEXT: Schema = {"type": "string"}
ERRORS = {
    400: "The form cannot be read.",
    401: "The token is missing or wrong.",
    403: "The request comes from another page.",
    408: "The request did not arrive within a minute.",
    413: "The request is larger than the limit.",
    415: "The content type is neither JSON nor a form.",
    421: "The server is asked for under another host name.",
    422: "Something of the subject is wrong: its shape, atlas, ROIs, phenotypes or values.",
    500: "The prediction failed.",
    503: "The server is busy; try again after `Retry-After` seconds.",
}


def described(fitted: Model, path: str) -> Schema:
    """OpenAPI 3.1 document of one model."""
    from m2lgdg import __version__

    errors = {
        str(status): {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
        for status, text in ERRORS.items()
    }
    answered = {"description": "The prediction.", "content": {"application/json": {"schema": _ref("Prediction")}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{fitted.name}: one subject",
            "version": __version__,
            "description": "Probability of being a patient, as by `m2lgdg predict`. Research use; not a diagnostic device.",
        },
        "paths": {
            path: {
                "post": {
                    "operationId": "predict",
                    "summary": "Predict one subject",
                    "security": [{"bearer": []}, {}],
                    "requestBody": {
                        "required": True,
                        "content": {
                            "application/json": {"schema": _ref("Subject")},
                            "multipart/form-data": {"schema": _ref("Upload")},
                        },
                    },
                    "responses": {"200": answered, **errors},
                }
            }
        },
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "Needed if there is a token."}},
            "schemas": {
                "Subject": _subject(fitted),
                "Upload": _upload(fitted),
                "Prediction": _prediction(),
                "Error": _object({"error": TEXT | {"description": "One sentence on what is wrong."}}, ["error"]),
            },
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required or []}


def _common(fitted: Model) -> Schema:
    """What JSON and forms have in common."""
    phenotypes = {name: _number(field_of(name)) for name in fitted.facts_["inputs"]}
    series = "series" in map(taken, fitted.members.values())
    return {
        "phenotypes": _object(phenotypes) | {"description": "Those that are null or left out are imputed and flagged."},
        **({"tr": _number(TR)} if series else {}),
        "explain": {"type": "boolean", "default": False, "description": "Also the most important ROIs."},
    }


def _number(field: Field) -> Schema:
    unit = f" ({field.unit})" if field.unit else ""
    about: Schema = NUMBER | {"description": f"{field.label}{unit}"}
    if field.choices:
        words = ", ".join(f"{code}: {word}" for code, word in field.choices)
        return {"enum": [*(int(code) for code, _ in field.choices), None], "description": f"{field.label} ({words})"}
    return about | {"minimum": field.low, "maximum": field.high}


def _rows(member: Method) -> Schema:
    """Schema of a scan as lists of rows."""
    rois = len(member.facts_["rois"])
    row: Schema = {"type": "array", "items": {"type": "number"}, "minItems": rois, "maxItems": rois}
    if taken(member) == "series":
        return {"type": "array", "items": row, "minItems": 20, "maxItems": MOST_VOLUMES, "description": "(volume, ROI)"}
    matrix = row | {"items": NUMBER}
    return {
        "type": "array",
        "items": matrix,
        "minItems": rois,
        "maxItems": rois,
        "description": f"{member.trained_on}, (ROI, ROI)",
    }


def _subject(fitted: Model) -> Schema:
    members = fitted.members
    takes = list(dict.fromkeys(map(taken, members.values())))
    names = {atlas: {"type": "array", "items": TEXT} for atlas in members}
    alone = len(members) == 1
    scans: Schema = {}
    for what in takes:
        named = {atlas: _rows(member) for atlas, member in members.items() if taken(member) == what}
        by_atlas = _object(named) | {"minProperties": 1, "description": "By atlas."}
        scans[what] = {"anyOf": [next(iter(named.values())), by_atlas]} if len(named) == 1 else by_atlas
    rois: Schema = _object(names)
    tables = {
        one.name: _object({column: NUMBER for column in one.columns}) | {"description": one.what}
        for one in expected_tables(fitted)
    }
    return _object(
        {
            **scans,
            "rois": ({"anyOf": [next(iter(names.values())), rois]} if alone else rois)
            | {"description": "Names of the columns, to be compared with those of the model; without, the order counts."},
            **_common(fitted),
            **({"tables": _object(tables)} if tables else {}),
        },
        takes if alone else [],
    )


def _upload(fitted: Model) -> Schema:
    members = {atlas: taken(member) for atlas, member in fitted.members.items()}
    file: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
    parts = list(members.values()) if len(members) == 1 else [f"{what}.{atlas}" for atlas, what in members.items()]
    scans = {
        part: file | {"description": f"A file that ends in {', '.join(SUFFIXES[what])}."}
        for part, what in zip(parts, members.values(), strict=True)
    }
    tables = {
        f"tables.{one.name}": {
            "type": "array",
            "items": file,
            "description": f"{one.what}: files of FreeSurfer, or a table of one row.",
        }
        for one in expected_tables(fitted)
    }
    return _object({**scans, **_common(fitted), **tables}, parts if len(members) == 1 else [])


def _prediction() -> Schema:
    text = {"type": ["string", "null"]}
    towards = {"enum": ["patient", "control"]}
    scored = {"score": {"type": "number"}, "towards": towards}
    probability = {"type": "number", "minimum": 0, "maximum": 1}
    properties: Schema = {
        "subject": TEXT | {"description": "Name of the file, or of the field."},
        "scan": TEXT,
        "proba": probability | {"description": "Calibrated probability of being a patient."},
        "decision": {"enum": [0, 1], "description": "1, a patient, from the threshold on."},
        "threshold": probability,
        "low": NUMBER | {"description": "Interval at new sites; null without new-site calibration."},
        "high": NUMBER,
        "set": {"enum": [*SETS, None], "description": "Conformal set."},
        "coverage": NUMBER | {"description": "Of interval and set."},
        "flags": {"type": "array", "items": TEXT, "description": "Reasons why the prediction may be less reliable."},
        "ood": {
            "type": "object",
            "additionalProperties": NUMBER,
            "description": "Out-of-distribution scores; above 1 is outside of source.",
        },
        "compared": {"type": "array", "items": TEXT},
        "site_level": text,
        "tables": {"type": "object", "additionalProperties": TEXT, "description": "What was used of each table."},
        "explanation": {
            "type": ["object", "null"],
            "properties": {
                "rois": _list({"roi": TEXT, "rank": {"type": "integer"}, "score": {"type": "number"}}),
                "phenotypes": _list({"phenotype": TEXT, **scored}),
                "regions": _list({"region": TEXT, "value": {"type": "number"}, **scored, "table": TEXT}),
                "notes": {"type": "array", "items": TEXT},
            },
        },
        "method": TEXT,
        "use": TEXT,
    }
    return _object(properties, list(properties))


def _list(properties: Schema) -> Schema:
    return {"type": "array", "items": _object(properties, list(properties))}
