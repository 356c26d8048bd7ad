"""The study folder: which study it belongs to, which process is writing to it, and the files that describe the results.

`study.runner` holds it while it runs. The kernel holds the lock for a process, so that it ends with the process; the lock
file only names the process. On file systems without locks, studies run without them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.check import with_checks
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.data.spreadsheets import csv_text
from m2lgdg.registry import create
from m2lgdg.splits import leave_one_site_out
from m2lgdg.storage import TEMPORARY, InputError, write_text
from m2lgdg.study.config import Study
from m2lgdg.study.description import COHORT, CONNECTOMES, describe, read_cohort_facts, write_connectomes
from m2lgdg.study.plan import code_version, installed_version, write_declarations
from m2lgdg.study.provenance import provenance, says_more

LOCK = re.compile(r"\.lock-(\d+)-of-(\d+)")
OURS = re.compile(rf"\.lock|{LOCK.pattern}|{TEMPORARY.pattern}")  # what a killed run may leave before study.json


@contextlib.contextmanager
def locked_folder(out: Path, study: Study, cohort: Cohort, cohort_path: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Lock the folder for this study, against other runs of the same cells, until the block ends."""
    about, environment = _about(out, study, cohort, cohort_path), _environment(study)
    _check_folder(out, about)  # before anything is written
    with one_at_a_time(out):
        _check_folder(out, about)
        _check_runs(out, shard)
        path = out / ".lock-{}-of-{}".format(*shard)
        handle = _opened(path)
        _lock(handle)
    try:
        with contextlib.suppress(OSError):  # a full disk; the process id is only information for other runs
            os.write(handle, str(os.getpid()).encode())
        with one_at_a_time(out):
            _describe(out, about, environment, study, cohort)
            if cohort_path != Path(study.cohort):  # a release folder is converted once, so that all workers can read it
                cohort.with_findings(read_cohort_facts(out).findings or ()).save(cohort_path)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


@contextlib.contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Runs that share a folder take turns in this block."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}.") from None
    handle = _opened(out / ".lock")
    try:
        _lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"cannot write to {path.parent}: {error.strerror}.") from None


def _lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no locks on this system
        pass
    return True


def _check_runs(out: Path, shard: tuple[int, int]) -> None:
    """Refuse cells of another run; locks of dead runs are removed, and their partial files if no other run is active."""
    alone = True
    for path in [path for path in out.iterdir() if LOCK.fullmatch(path.name)]:
        number, count = map(int, LOCK.findall(path.name)[0])
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # that run has just ended
            continue
        try:
            if _lock(handle):
                path.unlink(missing_ok=True)
                continue
            process = os.read(handle, 20).decode(errors="replace")
        finally:
            os.close(handle)
        alone = False
        if (number - shard[0]) % math.gcd(count, shard[1]) == 0:  # the two shards share cells
            which = f"shard {number}/{count}, process {process}" if count > 1 else f"process {process}"
            raise InputError(f"{out} is in use by another run ({which}); wait until it ends, or choose another --out.")
    if alone:
        for path in [path for path in out.rglob(".*") if TEMPORARY.fullmatch(path.name)]:
            path.unlink(missing_ok=True)


def _about(out: Path, study: Study, cohort: Cohort, cohort_path: Path) -> dict[str, Any]:
    """Content of study.json: the study with every default spelled out."""
    resolved = study.model_dump() | {
        "cohort": os.path.relpath(cohort_path, out),
        "kind": None,
        "options": {},
        "exclude_sites": [],
        "cohort_hash": cohort.hash,
        "targets": [fold.site for fold in leave_one_site_out(cohort, study.targets)],
        "inputs": list(cohort.inputs),
        "method": {name: create(name, **study.method.get(name, {})).fields() for name in study.methods},
        "plugins": [os.path.relpath(plugin, out) for plugin in study.plugins],
    }
    return dict(json.loads(json.dumps(resolved)))


def _check_folder(out: Path, about: dict[str, Any]) -> None:
    """Refuse a folder with another study, or with other files."""
    path = out / "study.json"
    if path.is_file():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            raise InputError(f"{path} is damaged; choose another --out, or remove the folder.") from None
        for key in about:  # one that an earlier version did not have counts as its default
            if not isinstance(stored, dict) or stored.get(key, Study.model_fields[key].get_default()) != about[key]:
                advice = f"choose another --out (and add --reuse {out} to copy cells that both studies have)"
                raise InputError(f"{out} belongs to another study (key {key} differs); {advice}.")
    elif out.exists() and (not out.is_dir() or not all(OURS.fullmatch(file.name) for file in out.iterdir())):
        raise InputError(f"{out} is not empty and not a study folder; choose another --out.")


def _describe(out: Path, about: dict[str, Any], environment: dict[str, str], study: Study, cohort: Cohort) -> None:
    """Write the files that describe the study; after a run was killed here, those still missing."""
    texts: dict[str, Callable[[], str]] = {
        "study.json": lambda: _json(about),
        "inclusion.csv": lambda: csv_text(_inclusion(cohort)),
        "checks.json": lambda: _json(leakage_checks(cohort, study.targets)),
        COHORT: lambda: _json(_facts(cohort)),
    }
    for name, text in texts.items():
        if not (out / name).is_file():
            write_text(out / name, text())
    write_declarations(out, study.methods)
    if not (out / CONNECTOMES).is_file():
        write_connectomes(cohort, out)
    stored = _stored(out / "environment.json")
    if stored.get("code") != environment["code"]:  # cells of other code are not in the predictions
        write_text(out / "environment.json", _json(environment))
    elif says_more(environment, stored):
        write_text(out / "environment.json", _json(stored | {name: environment[name] for name in ("commit", "tree")}))


def _stored(path: Path) -> dict[str, str]:
    """Content of environment.json; empty if it is missing or damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _inclusion(cohort: Cohort) -> pd.DataFrame:
    """Included and excluded subjects, with the reason."""
    rows = [(subject, site, "included", "", "") for subject, site in zip(cohort.subjects, cohort.sites, strict=True)]
    rows += [(one.subject, one.site, "excluded", one.reason, one.general) for one in cohort.excluded]
    return pd.DataFrame(rows, columns=["subject", "site", "status", "reason", "kind"])


def _facts(cohort: Cohort) -> dict[str, Any]:
    findings = [one._asdict() for one in with_checks(cohort).findings or ()]
    return {"atlas": cohort.atlas, "rois": cohort.rois, "scans": cohort.values, "findings": findings, **describe(cohort)}


def _environment(study: Study) -> dict[str, str]:
    from platform import machine, python_version, system

    packages = ("m2lgdg", "torch", "numpy", "scipy", "pandas", "scikit-learn", "nilearn")
    versions = {"python": python_version(), "system": f"{system()} {machine()}", "code": code_version(tuple(study.plugins))}
    return versions | provenance() | {name: installed_version(name) for name in packages}
