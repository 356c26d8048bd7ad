"""The findings of `m2lgdg check` on their way from the cohort file to studies, models and reports.

A cohort carries them (`Cohort.findings`); these functions add them where they are missing and put them into words.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from m2lgdg.cohort import Cohort, Finding
from m2lgdg.data.check import CONFLICT, DUPLICATE, TRAINING, check_cohort, counted


def with_checks(cohort: Cohort) -> Cohort:
    """The cohort with its findings; it is checked unless it carries them already."""
    if cohort.findings is not None:
        return cohort
    return cohort.with_findings(check_cohort(cohort).findings if len(cohort) else ())


def problems(findings: Iterable[Finding], *, new_site: bool = False) -> list[Finding]:
    """Findings that are more than notes, duplicate scans first; with `new_site`, without those that concern training only."""
    chosen = [one for one in findings if one.level != "note" and not (new_site and one.kind in TRAINING)]
    return sorted(chosen, key=lambda one: not is_duplicate(one))


def is_duplicate(finding: Finding) -> bool:
    """Whether a finding is about two subjects with the same scan."""
    return finding.kind in (DUPLICATE, CONFLICT)


def duplicate_flags(cohort: Cohort) -> list[list[str]]:
    """A flag for each subject whose scan is also that of another subject; it names nobody, since tables are shared."""
    copies = {subject for one in cohort.findings or () if is_duplicate(one) for subject in one.subjects}
    return [["duplicate: same scan as another subject"] if subject in copies else [] for subject in cohort.subjects.tolist()]


def summary(findings: Sequence[Finding]) -> str:
    """Number of duplicate scans and of other findings, in words; empty if there are none."""
    pairs = [one for one in findings if is_duplicate(one)]
    conflicts = sum(one.kind == CONFLICT for one in pairs)
    others = len(findings) - len(pairs)
    parts = []
    if pairs:
        labels = f" ({conflicts} of them with different labels)" if conflicts else ""
        labels = " but different labels" if conflicts == len(pairs) else labels
        parts.append(f"{counted(len(pairs), 'pair')} of subjects with the same scan{labels}")
    if others:
        parts.append(counted(others, "other finding" if pairs else "finding"))
    return " and ".join(parts)


def data_line(findings: Iterable[Finding], command: str, *, new_site: bool = False) -> str:
    """One line on the problems of a cohort, with the command that lists them; empty if there are none."""
    words = summary(problems(findings, new_site=new_site))
    them = "it" if words == "1 finding" else "them"
    return f"Data: {words}; {command} lists {them}." if words else ""


def check_command(cohort: str | Path, *, new_site: bool = False) -> str:
    """The command that lists the findings about a cohort file or folder."""
    return shlex.join(["m2lgdg", "check", str(cohort), *(["--new-site"] if new_site else [])])


def anonymous_sentences(stored: Iterable[Mapping[str, str]]) -> list[str]:
    """Sentences of `Finding.shared`, duplicate scans first; one that holds for several subjects occurs once, with a count."""
    ordered = sorted(stored, key=lambda one: one["kind"] not in (DUPLICATE, CONFLICT))
    counts = Counter(one["text"] for one in ordered)
    return [text if count == 1 else f"{text.removesuffix('.')} ({count} times)." for text, count in counts.items()]
