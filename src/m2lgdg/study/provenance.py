"""The commit of the code that a study runs with, as far as it is known; `study.folder` writes it to `environment.json`.

Git tells it in a checkout. A copy without git, as on many clusters, can be told by M2LGDG_COMMIT; the hash of the code, which
stands beside it, shows whether that is true.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from m2lgdg.own_code import PACKAGE
from m2lgdg.storage import InputError

VARIABLE = "M2LGDG_COMMIT"
UNKNOWN, NAMED, CHANGED, CLEAN = "unknown", f"named by {VARIABLE}", "changed", "clean"
ORDER = (UNKNOWN, NAMED, CHANGED, CLEAN)  # what a later run with the same code may replace
COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def provenance(package: Path = PACKAGE) -> dict[str, str]:
    """The commit, and whether the package's folder was as it is there: clean, changed, named by M2LGDG_COMMIT or unknown."""
    if found := _checked_out(package):
        return found
    named = os.environ.get(VARIABLE, "").strip().lower()
    if named and not COMMIT.fullmatch(named):
        raise InputError(f"{VARIABLE} is {named!r}, not the full hash of a commit; set it to the output of git rev-parse HEAD.")
    return {"commit": named or UNKNOWN, "tree": NAMED if named else UNKNOWN}


def says_more(now: Mapping[str, str], stored: Mapping[str, str]) -> bool:
    """Whether a run with the same code knows more of it: one from a clean folder shows which commit all cells are of.

    A changed folder is not forgotten for a commit that was only named.
    """
    before = stored.get("tree", UNKNOWN)
    return before not in ORDER or ORDER.index(now["tree"]) > ORDER.index(before)


def _checked_out(package: Path) -> dict[str, str] | None:
    """What git says; None where it does not have the package, as in an environment inside another project's checkout."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    # Ignored files count, too: a module among them runs as any other.
    states = _git(package, "status", "--porcelain=v2", "--branch", "--untracked-files=all", "--ignored", "--", ".")
    commit = re.search(r"^# branch\.oid (\w+)$", states or "", re.MULTILINE)
    if states is None or not commit:  # a repository without commits
        return None
    lines = [line for line in states.splitlines() if not line.startswith("#") and "__pycache__/" not in line]
    changed = [line for line in lines if not line.startswith("!") or line.endswith(".py")]
    return {"commit": commit[1], "tree": CHANGED if changed else CLEAN}


def _git(package: Path, *words: str) -> str | None:
    """Output of a git command in the package's folder; None if there is no git, or it refuses."""
    elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook names its own
    command = ["git", "--no-optional-locks", "-C", str(package), *words]
    try:
        run = subprocess.run(command, capture_output=True, check=True, timeout=60, env=elsewhere, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.decode(errors="replace")
