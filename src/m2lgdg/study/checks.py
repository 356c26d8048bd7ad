"""Failed leakage checks of a study folder, as sentences for `m2lgdg run` and `m2lgdg table`.

`study.folder` writes the checks to `checks.json` before the first cell runs. The report has the same sentences at its top.
"""

from __future__ import annotations

import json
from pathlib import Path

from m2lgdg.data.leakage import failure_sentences
from m2lgdg.storage import InputError


def failed_checks(folder: str | Path) -> list[str]:
    """One sentence for each leakage check that the study failed; empty for a folder without `checks.json`."""
    path = Path(folder) / "checks.json"
    if not path.is_file():
        return []
    try:
        checks = json.loads(path.read_text(encoding="utf-8"))
        return failure_sentences(checks)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        advice = "remove it, and repeat m2lgdg run to write it again"
        raise InputError(f"{path} is damaged and cannot be read as leakage checks; {advice}.") from None
