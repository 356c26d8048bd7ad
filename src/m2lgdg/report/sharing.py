"""`m2lgdg share`: a copy of a study folder for a repository or an archive, without paths of the machine it ran on.

Tables and report can be made from the copy alone. Records of cells become one file, without the predictions, which are in
`predictions.csv`; paths become file names.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from m2lgdg.report.contents import RECORDS, read_contents, read_json
from m2lgdg.storage import InputError, write_text
from m2lgdg.study.checks import COHORT
from m2lgdg.study.runner import explanation_path

FOLDERS = re.compile(r"(?<![\w.~])(?:[A-Za-z]:\\|~?/)(?:[^\s'\"<>|:;,/\\]+[/\\])+")  # of a path from a root or a home folder
# The name of a home folder may contain spaces, and its last part is a user name, not a file.
HOME = r"(?<![\w.~])(?:/home|/Users|[A-Za-z]:\\Users)[/\\]"
BELOW_HOME = re.compile(HOME + r"(?:[^'\"<>|:;,/\\\n]+[/\\])+")
BARE_HOME = re.compile(HOME + r"[^\s'\"<>|:;,/\\]+(?![^'\"<>|:;,/\\\n]*[/\\])")
COPIED = ("method", "variant", "target", "seed", "key", "status", "seconds", "learned", "unexplained")  # keys of a record


def share_study(folder: str | Path, to: str | Path) -> list[Path]:
    """Copy the files that tables and report need into a new folder; return their paths."""
    folder, to = Path(folder), Path(to)
    contents = read_contents(folder)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} already exists; choose another --out.")
    study = contents.study | {"cohort": PurePath(str(contents.study.get("cohort", ""))).name}
    study["plugins"] = [PurePath(plugin).name for plugin in study.get("plugins") or []]
    records = [{name: record[name] for name in COPIED if name in record} for record in contents.records]
    texts = {
        "predictions.csv": (folder / "predictions.csv").read_text(encoding="utf-8"),
        "study.json": _json(study),
        "environment.json": _json(contents.environment),
        "checks.json": _json(contents.checks),
        COHORT: _json(read_json(folder / COHORT, {})),
        RECORDS: "".join(json.dumps(_without_folders(record), ensure_ascii=False) + "\n" for record in records),
        "inclusion.csv": _csv(contents.inclusion),
        "failures.csv": _csv(contents.failures),
    }
    for name, text in texts.items():
        if text and (name in ("predictions.csv", RECORDS) or (folder / name).is_file()):
            write_text(to / name, text)
    for record in records:
        explained = explanation_path(folder, record["key"])
        if explained.is_dir():
            shutil.copytree(explained, explanation_path(to, record["key"]))
    return sorted(path for path in to.rglob("*") if path.is_file())


def _json(content: Any) -> str:
    return json.dumps(_without_folders(content), indent=1, ensure_ascii=False) + "\n"


def _csv(rows: list[dict[str, str]]) -> str:
    return str(pd.DataFrame(_without_folders(rows)).to_csv(index=False, lineterminator="\n")) if rows else ""


def without_folders(text: str) -> str:
    """Text with paths reduced to file names."""
    return FOLDERS.sub("", BELOW_HOME.sub("", BARE_HOME.sub("~", text)))


def _without_folders(content: Any) -> Any:
    """JSON content with paths reduced to file names in every string."""
    if isinstance(content, str):
        return without_folders(content)
    if isinstance(content, list):
        return [_without_folders(value) for value in content]
    return {key: _without_folders(value) for key, value in content.items()} if isinstance(content, dict) else content
