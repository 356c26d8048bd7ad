"""Whether anything of a target could have been learned: what can leak between source and target, looked for in every fold.

Stands beside `splits`, whose folds are right by construction; this looks again, and at what no split can know: scans that
are there twice, inputs that follow from the diagnosis. Made for the `checks.json` of a study.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort, is_proxy
from m2lgdg.data.duplicates import FC_ALIKE, SERIES_ALIKE, find_duplicates
from m2lgdg.splits import Fold, leave_one_site_out


def leakage_checks(cohort: Cohort, targets: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """One {"check", "passed", "detail"} for each way to leak, over the folds of all targets (every site by default)."""
    return check_folds(cohort, list(leave_one_site_out(cohort, targets)))


def check_folds(cohort: Cohort, folds: Sequence[Fold]) -> list[dict[str, Any]]:
    """The same for given folds of a cohort. Details name sites and counts, never subjects: they go into shared reports."""
    series = {subject: _digest(one) for subject, one in zip(cohort.subjects.tolist(), cohort.series, strict=True)}
    names = cohort.subjects.tolist()
    pairs = [(names[pair.first], names[pair.second]) for pair in find_duplicates(cohort)]
    near = [(a, b) for a, b in pairs if series[a] != series[b]]
    how = f"connectivity correlates above {FC_ALIKE:g} and the aligned series at least {SERIES_ALIKE:g}"
    inputs = ", ".join(cohort.inputs) or "none"
    looked: list[tuple[str, Callable[[Fold], str], str]] = [
        ("target site absent from source", _own_site, "no source subject is of the target site"),
        ("no subject on both sides", _shared_subjects, "no subject id is in both source and target"),
        ("no identical scan on both sides", lambda fold: _identical(fold, series), "no series of target is also in source"),
        ("no near-duplicate scan on both sides", lambda fold: _near(fold, near), f"no scan twice in other processing ({how})"),
        (
            "no label proxy among the inputs",
            _proxies,
            f"no input has a name that follows from the diagnosis (inputs: {inputs})",
        ),
        ("source labels known", _unlabelled, "every source subject is a patient or a control"),
    ]
    return [_told(check, [(fold.site, fault(fold)) for fold in folds], fine) for check, fault, fine in looked]


def _told(check: str, faults: list[tuple[str, str]], fine: str) -> dict[str, Any]:
    found: dict[str, list[str]] = {}  # fault -> targets, so that what is wrong everywhere is said once
    for site, fault in faults:
        if fault:
            found.setdefault(fault, []).append(site)
    number = f"{len(faults)} target{'s' * (len(faults) != 1)}"
    if not found:
        return {"check": check, "passed": True, "detail": f"Over {number}: {fine}."}
    listed = "; ".join(
        f"{'every target' if len(sites) == len(faults) > 1 else 'target ' + ', '.join(sites)}: {fault}"
        for fault, sites in found.items()
    )
    return {"check": check, "passed": False, "detail": f"{listed[0].upper()}{listed[1:]}."}


def _own_site(fold: Fold) -> str:
    count = int((fold.source.sites == fold.site).sum())
    return f"{count} of its own subjects in source" if count else ""


def _shared_subjects(fold: Fold) -> str:
    count = len(set(fold.source.subjects.tolist()) & set(fold.target.subjects.tolist()))
    return f"{count} subject ids are also in source" if count else ""


def _identical(fold: Fold, series: dict[str, bytes]) -> str:
    held = {series[subject] for subject in fold.target.subjects.tolist()}
    sites = Counter(
        site
        for subject, site in zip(fold.source.subjects.tolist(), fold.source.sites.tolist(), strict=True)
        if series[subject] in held
    )
    return _scans(sites)


def _near(fold: Fold, pairs: list[tuple[str, str]]) -> str:
    target = set(fold.target.subjects.tolist())
    source = dict(zip(fold.source.subjects.tolist(), fold.source.sites.tolist(), strict=True))
    twins = {one for pair in pairs for one, other in (pair, pair[::-1]) if one in source and other in target}
    return _scans(Counter(source[one] for one in sorted(twins)))


def _scans(sites: Counter[str]) -> str:
    """Source scans that target holds too, by their site."""
    where = ", ".join(f"{count} of {site}" for site, count in sorted(sites.items()))
    return f"source holds scans of its subjects again ({where}; `m2lgdg check` names them)" if where else ""


def _proxies(fold: Fold) -> str:
    named = [column for column in fold.source.inputs if is_proxy(column)]
    return f"{', '.join(named)} follow{'s' * (len(named) == 1)} from the diagnosis (allow_proxies is set)" if named else ""


def _unlabelled(fold: Fold) -> str:
    count = int((fold.source.labels < 0).sum())
    return f"{count} source subjects have no label" if count else ""


def _digest(series: npt.NDArray[np.float32]) -> bytes:
    return hashlib.sha256(series.tobytes()).digest()
