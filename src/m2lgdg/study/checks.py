"""What was checked before the first cell of a study ran: its leakage checks, and the findings about its cohort.

`study.folder` writes `checks.json` and `cohort.json`. `m2lgdg run` and `m2lgdg table` print the sentences made here, and the
report has them at its top.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from m2lgdg.data.leakage import failure_sentences
from m2lgdg.findings import Finding, data_line, read_finding
from m2lgdg.storage import InputError

COHORT = "cohort.json"
NOT_CHECKED = "this study has no record of the findings about its cohort; m2lgdg check COHORT lists them."
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class CohortFacts(NamedTuple):
    """Atlas, ROIs and findings of the cohort of a study; None where they are not known (folders of earlier versions).

    `description` is that of `study.description`: groups, sites and planted effects; empty where it is not known.
    """

    atlas: str | None = None
    rois: tuple[str, ...] | None = None
    findings: tuple[Finding, ...] | None = None
    description: Mapping[str, Any] = MappingProxyType({})


NOT_KNOWN = CohortFacts()


def failed_checks(folder: str | Path) -> list[str]:
    """One sentence for each leakage check that the study failed; empty for a folder without `checks.json`."""
    path = Path(folder) / "checks.json"
    try:
        checks = _content(path)
        return [] if checks is None else failure_sentences(checks)
    except DAMAGED:
        raise _damaged(path, "leakage checks") from None


def read_cohort_facts(folder: str | Path) -> CohortFacts:
    """What a study folder has on its cohort in `cohort.json`."""
    path = Path(folder) / COHORT
    try:
        facts = _content(path)
        if facts is None:
            return NOT_KNOWN
        texts = [facts["atlas"], *facts["rois"]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("atlas and rois are not texts")
        description = {name: dict(facts[name]) for name in ("groups", "sites", "planted") if name in facts}
        for name in ("groups", "sites"):
            _check_groups(description.get(name, {}))
        return CohortFacts(texts[0], tuple(texts[1:]), tuple(map(read_finding, facts["findings"])), description)
    except DAMAGED:
        raise _damaged(path, "facts about a cohort") from None


def _check_groups(groups: dict[str, Any]) -> None:
    """Raise ValueError unless each group has counts, and numbers or texts (of a shared copy) in its other entries."""
    for group in groups.values():
        counts = [group[name] for name in ("subjects", "patients", "controls")]
        others = [value for entry in group.values() for value in (entry if isinstance(entry, list) else [entry])]
        if not all(isinstance(count, int) for count in counts) or not all(isinstance(v, int | float | str) for v in others):
            raise ValueError("a group has entries that are neither numbers nor texts")


def cohort_line(folder: str | Path, command: str) -> str:
    """One line on the findings about the cohort of a study; `command` lists them. Empty if there are none."""
    findings = read_cohort_facts(folder).findings
    return f"Data: {NOT_CHECKED}" if findings is None else data_line(findings, command)


def _content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is damaged and cannot be read as {what}; remove it, and repeat m2lgdg run to write it again.")
