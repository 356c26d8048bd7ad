"""What is wrong with a cohort, in sentences: counts, duplicates, flat ROIs, short scans, missingness, label proxies.

Stands between the readers and everything else: `m2lgdg check` prints it, and a lab reads it before the first study.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort, is_proxy, natural_key
from m2lgdg.data.duplicates import find_duplicates

Level = Literal["unusable", "finding", "note"]
SHORT = 100  # volumes
TINY = 10  # subjects of a site
BAD = "bad files"
MANY_FLAT = 0.1  # share of a subject's ROIs
EXPECTED = ("site left out", "failed by", "no scan in")  # exclusions that were asked for, or that the release itself states


@dataclass(frozen=True)
class Finding:
    """One sentence about the cohort, with the subjects it is about."""

    level: Level
    text: str
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """The result of `check_cohort`: a table by site, findings, and the list of included and excluded subjects."""

    sites: pd.DataFrame
    findings: tuple[Finding, ...]
    inclusion: pd.DataFrame

    @property
    def exit_code(self) -> int:
        """0 usable, 1 usable with findings, 2 unusable."""
        levels = {finding.level for finding in self.findings}
        return 2 if "unusable" in levels else 1 if "finding" in levels else 0


def check_cohort(cohort: Cohort, *, new_site: bool = False) -> Check:
    """Everything we know how to look for; `new_site` says that the cohort is only meant to be predicted."""
    flat = np.array([(one == one[0]).all(axis=0) for one in cohort.series])  # (subject, roi)
    findings = [
        *([] if new_site else _protocol(cohort)),
        *([] if new_site else _tiny(cohort)),
        *_exclusions(cohort),
        *_duplicates(cohort),
        *_flat(cohort, flat),
        *_short(cohort),
        *_swapped(cohort),
        *_units(cohort, flat),
        *_missing(cohort),
        *_proxies(cohort),
        Finding("note", f"inputs of the methods: {', '.join(cohort.inputs) or 'none'}"),
        *(Finding("note", note) for note in cohort.notes),
    ]
    order: dict[Level, int] = {"unusable": 0, "finding": 1, "note": 2}
    findings.sort(key=lambda finding: order[finding.level])
    return Check(_site_table(cohort, flat), tuple(findings), _inclusion(cohort, findings))


def _site_table(cohort: Cohort, flat: npt.NDArray[np.bool_]) -> pd.DataFrame:
    lengths = cohort.lengths
    missing = cohort.phenotypes[list(cohort.inputs)].isna().any(axis=1).to_numpy()
    rows = []
    for site in cohort.site_names:
        here = cohort.sites == site
        trs = sorted(set(np.round(cohort.tr[here], 3).tolist()) - {np.nan})
        rows.append(
            {
                "site": site,
                "subjects": int(here.sum()),
                "patients": int((cohort.labels[here] == 1).sum()),
                "controls": int((cohort.labels[here] == 0).sum()),
                "volumes": _span(lengths[here].tolist()),
                "TR": _span([value for value in trs if not np.isnan(value)]) or "?",
                "with flat ROIs": int(flat[here].any(axis=1).sum()),
                "missing phenotypes": int(missing[here].sum()),
            }
        )
    return pd.DataFrame(rows)


def _span(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _inclusion(cohort: Cohort, findings: list[Finding]) -> pd.DataFrame:
    """subject, site, label, status, reason: the reason of an exclusion, or the findings about an included subject."""
    about: dict[str, list[str]] = {}
    for finding in findings:
        for subject in finding.subjects:
            about.setdefault(subject, []).append(finding.text)
    rows: list[tuple[object, ...]] = [
        (subject, site, int(label), "included", " ".join(about.get(subject, [])))
        for subject, site, label in zip(cohort.subjects.tolist(), cohort.sites.tolist(), cohort.labels, strict=True)
    ]
    rows += [(one.subject, one.site, "", "excluded", one.reason) for one in cohort.excluded]
    return pd.DataFrame(rows, columns=["subject", "site", "label", "status", "reason"])


def _protocol(cohort: Cohort) -> Iterator[Finding]:
    """What leave-one-site-out needs: two sites, two classes, sites on which a metric is defined."""
    labels = cohort.labels
    if len(cohort.site_names) < 2:
        yield Finding("unusable", f"All subjects are of one site, {cohort.sites[0]}: leaving one site out leaves nothing.")
    if not (labels >= 0).any():
        yield Finding("unusable", "No subject has a label: nothing can be learned or scored.")
    elif len(set(labels[labels >= 0].tolist())) < 2:
        kind = "patients" if (labels == 1).any() else "controls"
        yield Finding("unusable", f"All labelled subjects are {kind}: there is nothing to tell apart.")
    if (labels < 0).any() and (labels >= 0).any():
        yield Finding("finding", f"{int((labels < 0).sum())} subjects have no label.", tuple(cohort.subjects[labels < 0]))
    for site in cohort.site_names:
        here = labels[cohort.sites == site]
        if len(set(here.tolist())) == 1 and here[0] >= 0 and len(set(labels.tolist())) > 1:
            had, lacks = ("patients", "control") if here[0] else ("controls", "patient")
            measure = "sensitivity" if here[0] else "specificity"
            yield Finding("finding", f"{site} has {len(here)} {had} and no {lacks}: as a target only its {measure} is defined.")


def _tiny(cohort: Cohort) -> Iterator[Finding]:
    sizes = {site: int((cohort.sites == site).sum()) for site in cohort.site_names}
    tiny = {site: size for site, size in sizes.items() if size < TINY}
    if len(tiny) > 3:
        listed = ", ".join(f"{site} {size}" for site, size in tiny.items())
        yield Finding(
            "finding", f"{len(tiny)} sites have fewer than {TINY} subjects: as targets their figures say little ({listed})."
        )
        return
    for site, size in tiny.items():
        yield Finding("finding", f"{site} has only {size} subject{'s' * (size > 1)}: as a target its figures say little.")


def _exclusions(cohort: Cohort) -> Iterator[Finding]:
    reasons = Counter(_general(one.reason) for one in cohort.excluded)
    for reason, count in reasons.most_common():
        named = [one for one in cohort.excluded if _general(one.reason) == reason]
        sites = Counter(one.site or "no site" for one in named)
        at = ", ".join(f"{site} {sites[site]}" for site in sorted(sites, key=natural_key))
        level: Level = "note" if reason.startswith(EXPECTED) else "finding"
        who = f" ({named[0].subject})" if count == 1 else ""
        text = reason
        if reason == BAD:
            text = (
                named[0].reason
                if count == 1
                else f"{BAD}, the first {named[0].reason.rstrip('.')}; all are in the inclusion list"
            )
        yield Finding(level, f"{count} subject{'s' * (count > 1)}{who} excluded: {text.rstrip('.')} ({at}).")


def _general(reason: str) -> str:
    """Reasons that name a file are one kind."""
    return BAD if reason.endswith(".") else reason


def _duplicates(cohort: Cohort) -> Iterator[Finding]:
    for pair in find_duplicates(cohort):
        first, second = (f"{cohort.subjects[i]} ({cohort.sites[i]})" for i in (pair.first, pair.second))
        across = cohort.sites[pair.first] != cohort.sites[pair.second]
        danger = "training would see the target" if across else "a validation split would see its training data"
        how = "the same series" if pair.exact else f"the same scan (series correlate {pair.correlation:.3f})"
        clash = "" if cohort.labels[pair.first] == cohort.labels[pair.second] else ", and with different labels"
        subjects = (str(cohort.subjects[pair.first]), str(cohort.subjects[pair.second]))
        yield Finding("finding", f"{first} and {second} are {how}{clash}: {danger}.", subjects)


def _flat(cohort: Cohort, flat: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    count = flat.sum(axis=1)
    if not count.any():
        return
    often = [i for i in np.argsort(-flat.sum(axis=0), kind="stable")[:3] if flat[:, i].any()]
    rois = ", ".join(f"{cohort.rois[i]} {flat[:, i].sum()}" for i in often)
    some = tuple(cohort.subjects[count > 0].tolist())
    yield Finding("finding", f"{len(some)} subjects have at least one flat ROI (most often {rois}).", some)
    for i in np.flatnonzero(count > MANY_FLAT * len(cohort.rois)):
        subject = str(cohort.subjects[i])
        yield Finding("finding", f"{subject} ({cohort.sites[i]}) has {count[i]} flat ROIs of {len(cohort.rois)}.", (subject,))


def _short(cohort: Cohort) -> Iterator[Finding]:
    short = cohort.lengths < SHORT
    for site in sorted(set(cohort.sites[short].tolist()), key=natural_key):
        here = short & (cohort.sites == site)
        total = int((cohort.sites == site).sum())
        text = (
            f"{site}: {here.sum()} of {total} scans have fewer than {SHORT} volumes ({_span(cohort.lengths[here].tolist())})."
        )
        yield Finding("finding", text, tuple(cohort.subjects[here].tolist()))


def _swapped(cohort: Cohort) -> Iterator[Finding]:
    if (cohort.lengths < len(cohort.rois)).all():
        text = f"Every scan has fewer volumes ({_span(cohort.lengths.tolist())}) than ROIs ({len(cohort.rois)})"
        yield Finding("note", f"{text}: are time and ROI swapped?")


def _units(cohort: Cohort, flat: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    """Sites whose signal is on another scale, as when one came in percent and another in raw units."""
    wide = np.float64  # the square of a small or large float32 is none
    spread = np.array([np.median(one.std(axis=0, dtype=wide)[~still]) for one, still in zip(cohort.series, flat, strict=True)])
    typical = {site: float(np.median(spread[cohort.sites == site])) for site in cohort.site_names}
    middle = float(np.median(list(typical.values())))
    for site, value in typical.items():
        ratio = value / middle
        if not 0.1 < ratio < 10:
            more = f"{ratio:.0f} times the" if ratio > 1 else f"1/{1 / ratio:.0f} of the"
            yield Finding("finding", f"{site}: the signal's standard deviation is {more} other sites': its units may differ.")


def _missing(cohort: Cohort) -> Iterator[Finding]:
    for column in cohort.inputs:
        lost = cohort.phenotypes[column].isna().to_numpy()
        share = {site: float(lost[cohort.sites == site].mean()) for site in cohort.site_names}
        telling = [site for site, value in share.items() if value >= 0.5]
        elsewhere = lost[~np.isin(cohort.sites, telling)]
        if telling and len(elsewhere) and elsewhere.mean() < 0.25:
            sites = ", ".join(
                f"{site} ({lost[cohort.sites == site].sum()} of {(cohort.sites == site).sum()})" for site in telling
            )
            text = (
                f"{column} is missing at {sites} but for {100 * elsewhere.mean():.0f} % elsewhere: missingness tells the site."
            )
            yield Finding("finding", text)
        elif lost.mean() > 0.5:
            yield Finding("finding", f"{column} is missing for {100 * lost.mean():.0f} % of the subjects.")
        both = [lost[cohort.labels == label].mean() for label in (0, 1) if (cohort.labels == label).any()]
        if len(both) == 2 and abs(both[0] - both[1]) > 0.5:
            shares = f"{100 * both[0]:.0f} % of controls and {100 * both[1]:.0f} % of patients"
            yield Finding("finding", f"{column} is missing for {shares}: missingness tells the label.")


def _proxies(cohort: Cohort) -> Iterator[Finding]:
    named = [column for column in cohort.phenotypes.columns if is_proxy(column)]
    kept_out = [column for column in named if column not in cohort.inputs]
    if kept_out:
        listed = ", ".join(kept_out[:6]) + (f" and {len(kept_out) - 6} more" if len(kept_out) > 6 else "")
        yield Finding("note", f"{len(kept_out)} columns follow from the diagnosis and are no inputs: {listed}.")
    for column in cohort.inputs:
        if column in named:
            yield Finding("finding", f"input {column} follows from the diagnosis: a model can read the label from it.")
    for column in cohort.phenotypes.columns:
        if column not in named and _separates(cohort, column):
            what = "input" if column in cohort.inputs else "column"
            level: Level = "finding" if what == "input" else "note"
            yield Finding(level, f"{what} {column} separates patients from controls almost perfectly: is it a label proxy?")


def _separates(cohort: Cohort, column: str) -> bool:
    """Whether a number alone ranks patients and controls with an area under the curve beyond 0.95 either way."""
    from scipy.stats import mannwhitneyu  # takes a second, and not every reading asks

    values = cohort.phenotypes[column]
    if values.dtype != np.float64:
        return False
    groups = [values[(cohort.labels == label) & values.notna().to_numpy()] for label in (0, 1)]
    if min(map(len, groups)) < TINY:
        return False
    area = mannwhitneyu(groups[1], groups[0]).statistic / (len(groups[0]) * len(groups[1]))
    return bool(abs(area - 0.5) > 0.45)
