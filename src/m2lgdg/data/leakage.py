"""Leakage checks: whether source and target share sites, subjects or scans in any fold, and whether an input is a proxy.

A study writes the result to `checks.json`. The folds of `splits` are correct by construction; these checks verify them again
and cover what a split cannot know, such as duplicate scans and inputs that reveal the diagnosis.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from m2lgdg.cohort import Cohort, is_proxy
from m2lgdg.data.duplicates import FC_ALIKE, FC_COPY, SERIES_ALIKE, find_duplicates
from m2lgdg.data.missingness import missing_by_label
from m2lgdg.data.proxies import revealing_columns, separating_columns
from m2lgdg.data.site_names import DIFFER, alike, shown
from m2lgdg.findings import counted
from m2lgdg.scans import SERIES, arrays_of
from m2lgdg.splits import Fold, leave_one_site_out


def leakage_checks(cohort: Cohort, targets: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """One {"check", "passed", "detail"} for each kind of leak, over the folds of the targets (all sites by default)."""
    return check_folds(cohort, list(leave_one_site_out(cohort, targets)))


def check_folds(cohort: Cohort, folds: Sequence[Fold]) -> list[dict[str, Any]]:
    """`leakage_checks` of given folds. Details name sites and counts but no subjects, because reports are shared."""
    names = cohort.subjects.tolist()
    by_series: dict[bytes, list[str]] = {}
    for subject, one in zip(names, arrays_of(cohort.scans), strict=True):
        by_series.setdefault(hashlib.sha256(one.tobytes()).digest(), []).append(subject)
    same = [pair for group in by_series.values() for pair in itertools.combinations(group, 2)]
    itself = [*same, *zip(names, names, strict=True)]  # a subject on both sides is a scan on both sides
    # Copies in a further atlas only are near-duplicates: their scans in the first atlas differ.
    near = [pair for one in find_duplicates(cohort) if (pair := (names[one.first], names[one.second])) not in same]
    of_series = cohort.values == SERIES
    aligned = f"FC correlates above {FC_ALIKE:g} and the aligned series at {SERIES_ALIKE:g} or more"
    criterion = aligned if of_series else f"FC correlates at {FC_COPY:g} or more without the global signal"
    scan = "series" if of_series else "connectome"
    inputs = ", ".join(cohort.inputs) or "none"
    checks: list[tuple[str, Callable[[Fold], str], str]] = [  # name, problem of a fold, detail if there is none
        ("target site absent from source", _target_site, "no source subject is from the target site"),
        ("no subject on both sides", _shared_subjects, "no subject id is in both source and target"),
        ("no identical scan on both sides", lambda fold: _copies(fold, itself), f"no {scan} of the target is also in source"),
        (
            "no near-duplicate scan on both sides",
            lambda fold: _copies(fold, near),
            f"no scan of the target is in source with other processing ({criterion})",
        ),
        (
            "no label proxy among the inputs",
            _proxies,
            f"no input has the name of a label proxy or separates patients from controls (inputs: {inputs})",
        ),
        ("source labels known", _unlabelled, "every source subject is labelled as patient or control"),
    ]
    results = [_result(name, [(fold.site, problem(fold)) for fold in folds], fine) for name, problem, fine in checks]
    for result, copies, scans in ((results[2], same, "identical scans"), (results[3], near, "near-duplicate scans")):
        remark = _one_side(cohort, folds, copies, scans)
        if remark:
            result |= {"remark": remark, "detail": f"{result['detail']} {remark}"}
    return [*results, *_separating_tables(cohort), _missingness(cohort), _site_names(cohort)]


def failure_sentences(checks: Iterable[dict[str, Any]]) -> list[str]:
    """One sentence for each failed check, for the end of a run and the top of tables and reports."""
    failed = [check for check in checks if not check.get("passed", True)]
    return [f"Leakage check failed: {check['check']}. {check['detail']}" for check in failed]


def _result(check: str, problems: list[tuple[str, str]], fine: str) -> dict[str, Any]:
    targets: dict[str, list[str]] = {}  # by problem, so that a problem of several targets is listed once
    for site, problem in problems:
        if problem:
            targets.setdefault(problem, []).append(site)
    if not targets:
        return {"check": check, "passed": True, "detail": f"{counted(len(problems), 'target')} checked: {fine}."}
    listed = "; ".join(
        f"{'every target' if len(sites) == len(problems) > 1 else 'target ' + ', '.join(sites)}: {problem}"
        for problem, sites in targets.items()
    )
    return {"check": check, "passed": False, "detail": f"{listed[0].upper()}{listed[1:]}."}


def _target_site(fold: Fold) -> str:
    count = int((fold.source.sites == fold.site).sum())
    return f"{counted(count, 'subject')} of the target site {'is' if count == 1 else 'are'} in source" if count else ""


def _shared_subjects(fold: Fold) -> str:
    count = len(set(fold.source.subjects.tolist()) & set(fold.target.subjects.tolist()))
    return f"{counted(count, 'subject id')} {'is' if count == 1 else 'are'} also in source" if count else ""


def _copies(fold: Fold, pairs: list[tuple[str, str]]) -> str:
    """Source scans that are also in target, counted by site."""
    target = set(fold.target.subjects.tolist())
    source = dict(zip(fold.source.subjects.tolist(), fold.source.sites.tolist(), strict=True))
    copies = {one for pair in pairs for one, other in (pair, pair[::-1]) if one in source and other in target}
    sites = Counter(source[one] for one in copies)
    where = ", ".join(f"{count} at {site}" for site, count in sorted(sites.items()))
    return f"source contains copies of its scans ({where}; `m2lgdg check` lists them)" if where else ""


def _one_side(cohort: Cohort, folds: Sequence[Fold], pairs: list[tuple[str, str]], scans: str) -> str:
    """Sentence about copies that are always on the same side: no leak from target to source, but a scan that counts twice."""
    site_of = dict(zip(cohort.subjects.tolist(), cohort.sites.tolist(), strict=True))
    targets = {fold.site for fold in folds}
    ends = [sorted({site_of[one] for one in pair}) for pair in pairs]
    where = Counter(" and ".join(sites) for sites in ends if len(sites) == 1 or not targets.intersection(sites))
    listed = ", ".join(f"{count} at {sites}" for sites, count in sorted(where.items()))
    verb = "is" if where.total() == 1 else "are"
    sentence = f"But {counted(where.total(), 'pair')} of {scans} {verb} on the same side ({listed}; `m2lgdg check` lists them)."
    return sentence if where else ""


def _proxies(fold: Fold) -> str:
    """Inputs of source that reveal the label, by their name or by their values."""
    named = [column for column in fold.source.inputs if is_proxy(column)]
    separating = revealing_columns(fold.source, (column for column in fold.source.inputs if column not in named))
    sentences = [f"{column} reveals the diagnosis (allow_proxies is set)" for column in named]
    like_proxy = "separates patients from controls as a label proxy does (leave it out of the inputs)"
    return ", and ".join([*sentences, *(f"{column} {like_proxy}" for column in separating)])


def _separating_tables(cohort: Cohort) -> list[dict[str, Any]]:
    """Check that no column of a table separates the classes; over the whole cohort, and only if it has tables."""
    if not cohort.tables:
        return []
    check, count = "no label proxy among the tables", sum(len(table.columns) for table in cohort.tables.values())
    found = {
        name: columns
        for name, table in cohort.tables.items()
        if (columns := separating_columns(table, cohort.labels, cohort.sites))
    }
    listed = "; ".join(f"{columns[0]} of table {name}" for name, columns in found.items())
    like_proxy = "separates patients from controls as a label proxy does (remove it from the table)."
    fine = f"{counted(count, 'column')} checked: none separates patients from controls as a label proxy does."
    return [{"check": check, "passed": not found, "detail": f"{listed} {like_proxy}" if found else fine}]


def _missingness(cohort: Cohort) -> dict[str, Any]:
    """Check that nothing is missing more often for one class; over the whole cohort, as a class of a source may be small."""
    check, found = "missingness does not reveal the label", missing_by_label(cohort)
    fine = "no input, atlas, table or ROI is missing for one class much more often than for the other."
    detail = " ".join(one.text for one in found) or f"{counted(len(cohort), 'subject')} checked: {fine}"
    return {"check": check, "passed": not found, "detail": detail}


def _site_names(cohort: Cohort) -> dict[str, Any]:
    """Check that no site has two names; over the whole cohort, since each name would be a target of its own."""
    check = "no two site names are one site"
    counts = Counter(cohort.sites.tolist())
    groups = alike(counts)
    if not groups:
        fine = f"no two {DIFFER}"
        return {"check": check, "passed": True, "detail": f"{counted(len(counts), 'site name')} checked: {fine}."}
    listed = "; ".join(
        " and ".join(f"{shown(name)} ({counted(counts[name], 'subject')})" for name in group) for group in groups
    )
    problem = f"{DIFFER}, so a site would be trained on when it is the target"
    advice = "merge the names with m2lgdg convert PATH OUT --merge-sites"
    return {"check": check, "passed": False, "detail": f"{listed} {problem}; {advice}."}


def _unlabelled(fold: Fold) -> str:
    count = int((fold.source.labels < 0).sum())
    return f"{counted(count, 'source subject')} {'has' if count == 1 else 'have'} no label" if count else ""
