"""Several studies of the same subjects as contents of one report: their methods in the same tables and figures.

`write_report(..., also=...)` reads them here. Data, checks and exclusions are those of the first study.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from m2lgdg.report.contents import Contents, read_contents
from m2lgdg.storage import InputError
from m2lgdg.study.predictions import STRICT, read_joined_predictions


def joined_contents(folder: str | Path, also: Sequence[str | Path], centroids: str | Path | None = None) -> Contents:
    """Contents of a study with the methods of others; they need the same subjects, targets and tracks."""
    if not also:
        return read_contents(folder, centroids)
    read_joined_predictions([folder, *also])  # refuses other subjects, and a method that is in two of them
    first, others = read_contents(folder, centroids), [read_contents(one) for one in also]
    same = [one.study.get("cohort_hash") == first.study.get("cohort_hash") for one in others]
    others = [replace(one, centroids=first.centroids) if own else one for one, own in zip(others, same, strict=True)]
    parts = [first, *others]
    for one in others:
        if (one.track, one.adapted is None) != (first.track, first.adapted is None):
            named = [_tracks(each) for each in (first, one)]
            raise InputError(f"{first.folder} has {named[0]}, {one.folder} {named[1]}; one report needs the same tracks.")
    adapted = [one.adapted for one in parts if one.adapted is not None]
    return replace(
        first,
        predictions=pd.concat([one.predictions for one in parts], ignore_index=True),
        adapted=pd.concat(adapted, ignore_index=True) if adapted else None,
        study=_study(parts),
        failures=[row for one in parts for row in one.failures],
        records=[record for one in parts for record in one.records],
        parts=tuple(parts),
    )


def _tracks(contents: Contents) -> str:
    return f"the {contents.track} track" if contents.adapted is None else f"both tracks ({STRICT} and adapted)"


def _study(parts: Sequence[Contents]) -> dict[str, Any]:
    """study.json of the first, with the methods of all; each is in one of them, so that no section is of two."""
    joined: dict[str, Any] = dict(parts[0].study)
    joined["name"] = " and ".join(dict.fromkeys(str(one.study.get("name", "study")) for one in parts))
    for key in ("methods", "seeds"):
        joined[key] = list(dict.fromkeys(value for one in parts for value in one.study.get(key) or []))
    for key in ("method", "sweep", "tune"):
        joined[key] = {name: own for one in parts for name, own in (one.study.get(key) or {}).items()}
    joined["variants"] = {}
    for one in parts:
        given = one.study.get("variants") or []
        for name in one.study.get("methods") or []:
            known = one.declared[name].variants if name in one.declared else ()
            own = given.get(name, []) if isinstance(given, dict) else [variant for variant in given if variant in known]
            joined["variants"].setdefault(name, []).extend(own)
    return joined


def together(contents: Contents) -> list[tuple[str, str]]:
    """Name, value: what other studies are in a report, with their code and cohort where these differ from the first."""
    if not contents.parts:
        return []
    first, *others = contents.parts
    lines = []
    for one in others:
        methods = ", ".join(dict.fromkeys(one.predictions["method"]))
        other = one.study.get("cohort_hash") != first.study.get("cohort_hash")
        about = ["another version of the cohort (atlas, precision or preparation)"] if other else []
        about += [f"{name} {value}" for name, value in one.environment.items() if value != first.environment.get(name)]
        lines.append(f"{one.study.get('name', 'study')} ({'; '.join([methods, *about])})")
    return [("together with", "; ".join(lines))]
