"""Intercept correction of a model for a site, learned from unlabelled subjects of it, and updated with further ones.

No weight of the model changes; `predict_proba` adds the shift to the logit. With labelled subjects, use `deploy.calibrate`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.data.check import with_checks
from m2lgdg.findings import is_duplicate, problems
from m2lgdg.metrics import logit
from m2lgdg.model.model import Model
from m2lgdg.model.site_level import (
    EXTREME,
    LEAST,
    SiteLevel,
    read_counts,
    rounded_counts,
    shift_of_counts,
    source_prevalence,
    written_counts,
)
from m2lgdg.scans import CORRELATION, FISHER_Z, SERIES, arrays_of
from m2lgdg.storage import InputError

TR_ALIKE = 0.1  # relative difference of repetition times from which scans may be of two scanners


class Adapted(NamedTuple):
    """Correction that was learned, decisions on the subjects it was learned from, and what is to be said about them."""

    level: SiteLevel
    added: int  # subjects that this call counted
    patients_before: int  # of these, at or above the threshold with the model as it was
    patients_after: int
    notes: list[str]


def adapt(fitted: Model, cohort: Cohort, *, prevalence: float | None = None, update: bool = False) -> Adapted:
    """Correct the intercept of a fitted model for a site, from subjects of it; labels are not used.

    `prevalence` is that of patients at the site, by default that of the training sites. With `update`, the subjects are added
    to those that the model was adapted with; a scan that was counted before does not count again.
    """
    stored = _stored(fitted, update)
    if prevalence is not None and not EXTREME <= prevalence <= 1 - EXTREME:
        raise InputError(f"prevalence {prevalence:g} is not between {EXTREME:g} and {1 - EXTREME:g}.")
    site = _site(cohort, stored)
    cohort = with_checks(cohort)
    batch, notes = _distinct(cohort)
    batch, again = _not_counted(batch, stored)
    counts = read_counts(stored["logits"]) if stored else Counter[int]()
    called = int((fitted.predict_proba(batch)[:, 1] >= fitted.threshold).sum())
    number = sum(counts.values()) + len(batch)
    if number < LEAST:
        raise InputError(f"the correction for a site needs at least {LEAST} subjects, and cohort {cohort.name} has {number}.")
    fitted.facts_.pop("site_level", None)
    recalibrated = bool(stored and stored["recalibrated"])
    if fitted.new_site_ and fitted.new_site_.adapted:
        recalibrated = True
        fitted.new_site_ = fitted.new_site_.adapted  # calibration, sets and figures for a site with a corrected intercept
    counts = counts + rounded_counts(logit(fitted.predict_proba(batch)[:, 1]))
    usual = source_prevalence(fitted.facts_)
    if prevalence is not None:
        assumed = False
    else:  # an update goes on with that of the model
        prevalence, assumed = (stored["prevalence"], stored["assumed"]) if stored else (usual, True)
    shift = shift_of_counts(counts, prevalence, usual)
    level = SiteLevel(shift, number, float(prevalence), assumed, site, recalibrated)
    before = (stored or {}).get("tables", {})
    having = {name: before.get(name, 0) + count for name, count in fitted.having_tables(batch).items()}
    findings = [one.shared() for one in problems(cohort.findings or (), new_site=True)]
    fitted.facts_["site_level"] = level._asdict() | {
        "logits": written_counts(counts),
        **({"tables": having} if having else {}),
        "scans": sorted({*(stored or {}).get("scans", []), *chain.from_iterable(_digests(batch))}),
        "findings": [*(stored or {}).get("findings", []), *findings],
    }
    now = int((fitted.predict_proba(batch)[:, 1] >= fitted.threshold).sum())
    return Adapted(level, len(batch), called, now, [*notes, *again, *_two_scanners(batch), *_some_without(having, number)])


def _stored(fitted: Model, update: bool) -> dict[str, Any] | None:
    """Correction that the model has and that is updated, or None; combinations without a meaning are refused."""
    stored: dict[str, Any] | None = fitted.facts_.get("site_level")
    if "local" in fitted.facts_:
        raise InputError("this model is calibrated to a site with labels, which corrects its intercept, too.")
    if stored and not update:
        raise InputError(
            "this model is adapted to a site already; add --update for further subjects of that site, or use the model that "
            "`m2lgdg fit` wrote."
        )
    if update and not stored:
        raise InputError("--update: this model is not adapted to a site yet; run m2lgdg adapt without --update first.")
    if stored and "logits" not in stored:
        raise InputError("--update: this model is a copy for sharing, which does not have the counts that an update needs.")
    return stored


def _site(cohort: Cohort, stored: dict[str, Any] | None) -> str:
    """Name of the one site of the cohort, which must be that of a stored correction."""
    names = cohort.site_names
    if len(names) != 1:
        listed = f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else ""
        raise InputError(f"cohort {cohort.name} has subjects of {len(names)} sites{listed}; choose one with --site.")
    if stored and names[0] != stored["site"]:
        raise InputError(f"--update: the model is adapted to site {stored['site']}, and the subjects are of site {names[0]}.")
    return names[0]


def _distinct(cohort: Cohort) -> tuple[Cohort, list[str]]:
    """Subjects with distinct scans, and a note if some were left out: of two with the same scan, the first id counts."""
    copies: set[str] = set()
    for one in cohort.findings or ():
        if is_duplicate(one):
            copies |= set(sorted(one.subjects)[1:])
    distinct = cohort.select(~np.isin(cohort.subjects, sorted(copies)))
    left = len(cohort) - len(distinct)
    return distinct, [f"{left} subjects with the same scan as another were not counted."] if left else []


def _not_counted(batch: Cohort, stored: dict[str, Any] | None) -> tuple[Cohort, list[str]]:
    """Subjects whose scans the model has not counted before, and a note on the others."""
    if stored is None:
        return batch, []
    if "scans" not in stored:
        return batch, ["The model does not say which scans it was adapted with: make sure that these are others."]
    counted, given = ({name.rpartition("-")[0] for name in names} for names in (stored["scans"], chain(*_digests(batch))))
    for kind, other in ((CORRELATION, FISHER_Z), (FISHER_Z, CORRELATION)):
        if kind in given - counted and other in counted:  # the same scan has other bits
            raise InputError(
                f"--update: the model was adapted with connectomes of {other}, and these are {kind}; give {other}, so that no "
                "scan counts twice."
            )
    fresh = batch.select([not set(own) & set(stored["scans"]) for own in _digests(batch)])
    left = len(batch) - len(fresh)
    if not len(fresh):
        raise InputError(f"--update: the model was adapted with all of these {left} scans already; give others of the site.")
    return fresh, [f"{left} scans were counted before and do not count again."] if left else []


def _digests(batch: Cohort) -> list[list[str]]:
    """Hashes of each subject's scans, one for each atlas that the subject has; those of connectomes start with their kind."""
    made: dict[str, list[str]] = {subject: [] for subject in batch.subjects.tolist()}
    for one in batch.each_atlas():
        kind = "" if one.values == SERIES else f"{one.values}-"
        for subject, scan in zip(one.subjects.tolist(), arrays_of(one.scans), strict=True):
            digest = hashlib.sha256(np.ascontiguousarray(scan, dtype=np.float32).tobytes()).hexdigest()[:16]
            made[subject].append(f"{kind}{digest}")
    return list(made.values())


def _two_scanners(batch: Cohort) -> list[str]:
    """A note if repetition times differ as those of two scanners do."""
    known = np.asarray(batch.tr, dtype=np.float64)
    known = known[np.isfinite(known) & (known > 0)]
    if not len(known) or known.max() <= (1 + TR_ALIKE) * known.min():
        return []
    return [
        f"The scans have repetition times from {known.min():g} to {known.max():g} s. If they are of two scanners, make a model "
        "for each: their intercepts may differ."
    ]


def _some_without(having: dict[str, int], number: int) -> list[str]:
    """Notes on tables that some of the subjects lack, for whom the mean of source takes their place."""
    return [
        f"{number - count} of {number} subjects lack table {name}; subjects with it may need another correction."
        for name, count in having.items()
        if count < number
    ]
