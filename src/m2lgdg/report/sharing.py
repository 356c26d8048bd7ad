"""`m2lgdg share`: a copy of a study folder for a repository or an archive, without paths of the machine it ran on.

Tables and report can be made from the copy alone. Records of cells become one file, without the predictions, which are in
`predictions.csv`; of paths at most a file name remains.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from m2lgdg.data.spreadsheets import csv_text
from m2lgdg.explain.explanation import Explanation
from m2lgdg.report.contents import RECORDS, Contents, read_contents, read_json
from m2lgdg.report.paths import file_name, starts_path, without_paths
from m2lgdg.report.subgroups import few_of_a_class, few_of_a_site, without_small_groups
from m2lgdg.storage import InputError, write_text
from m2lgdg.study.checks import COHORT
from m2lgdg.study.description import CONNECTOMES, copy_connectomes
from m2lgdg.study.plan import METHODS_FILE
from m2lgdg.study.runner import explanation_path

COPIED = ("method", "variant", "target", "seed", "key", "status", "seconds", "learned", "unexplained")  # keys of a record


def share_study(folder: str | Path, to: str | Path) -> list[Path]:
    """Copy the files that tables and report need into a new folder; return their paths."""
    folder, to = Path(folder), Path(to)
    contents = read_contents(folder)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} already exists; choose another --out.")
    names = structural_names(contents)
    refuse_paths(names)
    contents.explanations()  # refuses a damaged one before anything is written
    study = contents.study | {"cohort": file_name(str(contents.study.get("cohort", "")))}
    study["plugins"] = [file_name(str(plugin)) for plugin in study.get("plugins") or []]
    records = [{name: record[name] for name in COPIED if name in record} for record in contents.records]
    texts = {
        "predictions.csv": csv_text(contents.all_predictions),
        "study.json": _json(study, names),
        "environment.json": _json(contents.environment, names),
        "checks.json": _json(contents.checks, names),
        METHODS_FILE: _json(read_json(folder / METHODS_FILE, {}), names),
        COHORT: _json(without_small_groups(read_json(folder / COHORT, {})), names),
        RECORDS: "".join(json.dumps(_without_paths(record, names), ensure_ascii=False) + "\n" for record in records),
        "inclusion.csv": _csv(contents.inclusion, names),
        "failures.csv": _csv(contents.failures, names),
    }
    for name, text in texts.items():
        if text and (name in ("predictions.csv", RECORDS) or (folder / name).is_file()):
            write_text(to / name, text)
    if (folder / CONNECTOMES).is_file() and not few_of_a_class(contents.description):
        copy_connectomes(folder, to, sites=not few_of_a_site(contents.description))
    for record in records:
        explained = explanation_path(folder, record["key"])
        if explained.is_dir():
            copy = Path(shutil.copytree(explained, explanation_path(to, record["key"])))
            write_text(copy / "explanation.json", _json(Explanation.load(explained).about, names))
    return sorted(path for path in to.rglob("*") if path.is_file())


def structural_names(contents: Contents) -> set[str]:
    """Names that tables are joined by, so they are shared as they are: methods, variants, sites, subjects and inputs."""
    table = contents.all_predictions
    names = {*table["method"], *table["variant"], *table["target"], *table["subject"], *(contents.study.get("inputs") or [])}
    return names | {row[key] for row in contents.inclusion for key in ("subject", "site") if key in row}


def refuse_paths(names: Iterable[str]) -> None:
    """Refuse to share a name that contains a path."""
    for name in names:
        if starts_path(str(name)):
            raise InputError(f"the method, variant, site, input or subject name {name!r} contains a path and cannot be shared.")


def _json(content: Any, names: set[str]) -> str:
    return json.dumps(_without_paths(content, names), indent=1, ensure_ascii=False) + "\n"


def _csv(rows: list[dict[str, str]], names: set[str]) -> str:
    return csv_text(pd.DataFrame(_without_paths(rows, names))) if rows else ""


def _without_paths(content: Any, names: set[str]) -> Any:
    """JSON content without paths in any string; `names` stay, and may have a slash."""
    if isinstance(content, str):
        return content if content in names else without_paths(content)
    if isinstance(content, list):
        return [_without_paths(value, names) for value in content]
    return {key: _without_paths(value, names) for key, value in content.items()} if isinstance(content, dict) else content
