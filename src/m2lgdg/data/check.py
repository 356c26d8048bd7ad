"""Quality check of a cohort: counts by site, duplicates, flat ROIs, short scans, missing values and label proxies.

`m2lgdg check` prints the result, so that problems are known before the first study. `m2lgdg convert` stores the findings in
the cohort file, and later commands repeat them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort, is_proxy, natural_key
from m2lgdg.cohort_arrays import SLOWEST
from m2lgdg.data.atlases import recognised
from m2lgdg.data.connectome_checks import Edges, connectome_findings, edges_of, without_structure
from m2lgdg.data.duplicates import find_duplicates
from m2lgdg.data.global_signal import global_signal_findings
from m2lgdg.data.missingness import missing_by_label, without_signal
from m2lgdg.data.phenotype_slopes import phenotype_findings
from m2lgdg.data.proxies import revealing_columns
from m2lgdg.data.readers.selection import keep, usual_column
from m2lgdg.data.readers.tables import OLDEST
from m2lgdg.data.site_names import alike, shown
from m2lgdg.data.table_check import table_findings
from m2lgdg.findings import (
    CONFLICT,
    DUPLICATE,
    SEVERITIES,
    TRAINING,
    UNUSABLE_FILE,
    Finding,
    counted,
    is_duplicate,
    text_finding,
)
from m2lgdg.metrics import auc
from m2lgdg.notebook import shown_table
from m2lgdg.scans import COVARIANCE, SERIES, Connectomes, kind_of

SHORT = 100  # volumes
RESTLESS = 0.3  # mm, median head motion of a site
TINY = 10  # subjects at a site
MANY_FLAT = 0.1  # fraction of a subject's ROIs
EMPTY = 1e-6  # sd of a scan without signal, relative to the median of the cohort
LARGEST_INPUT = 1e6  # no phenotype in its usual units is larger


class Scans(NamedTuple):
    """The scans in one atlas, their ROIs without a signal, and the median sd of the others (0 if there is none)."""

    cohort: Cohort
    flat: npt.NDArray[np.bool_]  # (subject, roi)
    spread: npt.NDArray[np.float64]  # (subject,)
    edges: Edges | None = None  # of connectomes


@dataclass(frozen=True)
class Check:
    """Result of `check_cohort`: a table by site, the findings, and the list of included and excluded subjects."""

    sites: pd.DataFrame
    findings: tuple[Finding, ...]
    inclusion: pd.DataFrame

    @property
    def exit_code(self) -> int:
        """0 usable, 1 usable with findings, 2 unusable."""
        found = {finding.severity for finding in self.findings}
        return 2 if "unusable" in found else 1 if "finding" in found else 0

    def _repr_html_(self) -> str:
        """Findings and the table by site, for notebooks."""
        words = ("usable", "usable, with findings", "unusable")[self.exit_code]
        findings = shown_table(f"Check: {words}", ("severity", "finding"), [(one.severity, one.text) for one in self.findings])
        rows = self.sites.itertuples(index=False)
        return findings + shown_table("Sites", [str(name) for name in self.sites.columns], rows)


def check_cohort(cohort: Cohort, *, new_site: bool = False) -> Check:
    """Check a cohort for what makes it unusable or needs attention before a study.

    Parameters
    ----------
    cohort : Cohort
    new_site : bool
        Whether the cohort is only to be predicted: checks that concern training are then left out.

    Returns
    -------
    Check
        `sites` (a table by site), `findings`, `inclusion` (a table by subject) and `exit_code`.

    Examples
    --------
    >>> import m2lgdg
    >>> check = m2lgdg.check_cohort(m2lgdg.make_cohort("tiny"))
    >>> check.findings[0].text
    'east: 10 of 10 scans have fewer than 100 volumes (89).'
    """
    scans = _scans(cohort)
    checks = (
        *(_protocol(cohort), _tiny(cohort), _alike_sites(cohort), _exclusions(cohort)),
        *(_duplicates(cohort), _lacking(cohort), _short(cohort)),
        *(_in_atlas(one, several=bool(cohort.parcellations)) for one in scans),
        *(_repetition_times(cohort), _motion(cohort), _implausible(cohort)),
        *(_missing(cohort), missing_by_label(cohort), phenotype_findings(cohort), _proxies(cohort), table_findings(cohort)),
        [Finding("inputs", numbers={"listed": ", ".join(cohort.inputs) or "none"})],
        [text_finding(note) if isinstance(note, str) else note for note in cohort.notes],
    )
    findings = [finding for some in checks for finding in some if not (new_site and finding.kind in TRAINING)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Check(_site_table(cohort, scans), tuple(findings), _inclusion(cohort, findings))


def with_checks(cohort: Cohort) -> Cohort:
    """The cohort with its findings; it is checked unless it carries them already."""
    if cohort.findings is not None:
        return cohort
    return cohort.with_findings(check_cohort(cohort).findings if len(cohort) else ())


def duplicate_flags(cohort: Cohort) -> list[list[str]]:
    """A flag for each subject whose scan is also that of another subject; it names nobody, since tables are shared."""
    copies = {subject for one in cohort.findings or () if is_duplicate(one) for subject in one.subjects}
    return [["duplicate: same scan as another subject"] if subject in copies else [] for subject in cohort.subjects.tolist()]


def atlas_line(cohort: Cohort) -> str:
    """One line on the atlases of a cohort, with their ROIs and subjects; empty if there is only one."""
    kinds = {one.atlas: "" if one.values == SERIES else f", connectomes: {one.values}" for one in cohort.each_atlas()}
    listed = [
        f"{one.atlas} ({len(one.rois)} ROIs, {counted(len(one), 'subject')}{kinds[one.atlas]})" for one in cohort.each_atlas()
    ]
    return f"Atlases: {', '.join(listed)}." if cohort.parcellations else ""


def _scans(cohort: Cohort) -> list[Scans]:
    scans = []
    for each in cohort.each_atlas():
        if not len(each):
            continue
        flat = without_signal(each)
        if isinstance(each.scans, Connectomes):
            edges = edges_of(each.scans)
            scans.append(Scans(each, flat, edges.spread, edges))
            continue
        # In float64, because squares of small or large float32 values are out of range.
        spread = [
            0.0 if still.all() else np.median(one.std(axis=0, dtype=np.float64)[~still])
            for one, still in zip(each.series, flat, strict=True)
        ]
        scans.append(Scans(each, flat, np.array(spread)))
    return scans


def _in_atlas(scans: Scans, *, several: bool) -> Iterator[Finding]:
    of_kind = (_empty, _flat, _units, _swapped) if scans.edges is None else (_connectomes, _flat, _units)
    found = (finding for check in (*of_kind, _unnamed) for finding in check(scans))
    for finding in chain(found, global_signal_findings(scans.cohort)):
        yield finding._replace(atlas=scans.cohort.atlas if several else "")


def _lacking(cohort: Cohort) -> Iterator[Finding]:
    for atlas, each in cohort.parcellations.items():
        subjects = tuple(cohort.subjects[~each.present].tolist())
        if subjects:
            what = "series" if kind_of(each.scans) == SERIES else "connectome"
            yield Finding(f"no {what} of an atlas", "", subjects, {"lacking": atlas})


def empty_scans(cohort: Cohort) -> list[int]:
    """Positions of subjects whose scan is numerically empty in an atlas: its sd is below a millionth of the cohort's median.

    Such a series is the rounding residue of a regression, which passes for a signal once it is standardised. If all scans of
    a site are so small, its units differ instead. A connectome is empty if all its edges are alike.
    """
    subjects = {str(one.cohort.subjects[i]) for one in _scans(cohort) for i in _empty_positions(one)}
    return [i for i, subject in enumerate(cohort.subjects.tolist()) if subject in subjects]


def without_empty_scans(cohort: Cohort) -> Cohort:
    """The cohort without numerically empty scans, which are listed as excluded."""
    full = ~np.isin(np.arange(len(cohort)), empty_scans(cohort))
    return keep(cohort, full, lambda i: ("numerically empty scan",))


def _empty_positions(scans: Scans) -> list[int]:
    if scans.edges is not None:
        return np.flatnonzero(without_structure(scans.cohort, scans.edges)).tolist()
    sites, spread = scans.cohort.sites, scans.spread
    low = np.flatnonzero(spread < EMPTY * np.median(spread)).tolist()
    at_site = [spread[sites == sites[i]] for i in low]
    return [i for i, here in zip(low, at_site, strict=True) if len(here) == 1 or spread[i] < EMPTY * here.max()]


def _connectomes(scans: Scans) -> Iterator[Finding]:
    assert scans.edges is not None
    yield from connectome_findings(scans.cohort, scans.edges)


def _empty(scans: Scans) -> Iterator[Finding]:
    for i in _empty_positions(scans):
        numbers = {"sd": float(scans.spread[i]), "median": float(np.median(scans.spread))}
        yield Finding("empty scan", str(scans.cohort.sites[i]), (str(scans.cohort.subjects[i]),), numbers)


def _site_table(cohort: Cohort, scans: Iterable[Scans]) -> pd.DataFrame:
    """One row per site; flat ROIs count in any atlas. Of connectomes alone, volumes and TR are left out."""
    with_flat = {subject for one in scans for subject in one.cohort.subjects[one.flat.any(axis=1)].tolist()}
    flat = np.isin(cohort.subjects, sorted(with_flat))
    missing = cohort.phenotypes[list(cohort.inputs)].isna().any(axis=1).to_numpy()
    motion, volumes = _head_motion(cohort), _volumes(cohort)
    no_signal = "with empty ROIs" if volumes is None else "with flat ROIs"
    rows = []
    for site in cohort.site_names:
        here = cohort.sites == site
        row = {
            "site": site,
            "subjects": int(here.sum()),
            "patients": int((cohort.labels[here] == 1).sum()),
            "controls": int((cohort.labels[here] == 0).sum()),
        }
        if volumes is not None:
            row["volumes"] = _span(volumes[here & (volumes > 0)]) or "?"
            row["TR"] = _span(np.round(cohort.tr[here & ~np.isnan(cohort.tr)], 3)) or "?"
        row |= {no_signal: int(flat[here].sum()), "missing inputs": int(missing[here].sum())}
        if motion is not None:
            known = motion[here & np.isfinite(motion)]
            row["motion"] = f"{np.median(known):.2f}" if len(known) else "?"
        rows.append(row)
    return pd.DataFrame(rows)


def _volumes(cohort: Cohort) -> npt.NDArray[np.int64] | None:
    """(subject,) volumes in the first atlas that has series, 0 for a subject without them; None if no atlas has series."""
    for scans in (cohort.scans, *(each.scans for each in cohort.parcellations.values())):
        if kind_of(scans) == SERIES:
            return np.array([0 if one is None else len(one) for one in scans], dtype=np.int64)
    return None


def _span(values: npt.NDArray[Any]) -> str:
    if not len(values):
        return ""
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _inclusion(cohort: Cohort, findings: list[Finding]) -> pd.DataFrame:
    """Table of subject, site, label, status and reason: why a subject was excluded, or the findings about it."""
    about: dict[str, list[str]] = {}
    for finding in findings:
        for subject in finding.subjects if finding.severity != "note" else ():
            about.setdefault(subject, []).append(finding.text)
    people = zip(cohort.subjects.tolist(), cohort.sites.tolist(), cohort.labels.tolist(), strict=True)
    rows: list[tuple[object, ...]] = [(*one, "included", " ".join(about.get(one[0], []))) for one in people]
    rows += [(one.subject, one.site, "", "excluded", one.reason) for one in cohort.excluded]
    return pd.DataFrame(rows, columns=["subject", "site", "label", "status", "reason"])


def _protocol(cohort: Cohort) -> Iterator[Finding]:
    """Requirements of leave-one-site-out: two sites, two classes, and sites at which the metrics are defined."""
    labels = cohort.labels
    if len(cohort.site_names) < 2:
        yield Finding("one site", str(cohort.sites[0]))
    if not (labels >= 0).any():
        yield Finding("no labels")
    elif len(set(labels[labels >= 0].tolist())) < 2:
        yield Finding("one class", numbers={"present": "patients" if (labels == 1).any() else "controls"})
    if (labels < 0).any() and (labels >= 0).any():
        yield Finding("no label", "", tuple(cohort.subjects[labels < 0].tolist()))
    for site in cohort.site_names:
        here = labels[cohort.sites == site]
        if len(set(here.tolist())) == 1 and here[0] >= 0 and len(set(labels.tolist())) > 1:
            yield Finding("no controls at a site" if here[0] else "no patients at a site", site, (), {"size": len(here)})


def _tiny(cohort: Cohort) -> Iterator[Finding]:
    sizes = {site: int((cohort.sites == site).sum()) for site in cohort.site_names}
    tiny = {site: size for site, size in sizes.items() if size < TINY}
    if len(tiny) > 3:
        yield Finding("small sites", numbers={"fewest": TINY, "sizes": tiny, "many": len(tiny)})
    else:
        yield from (Finding("small site", site, (), {"size": size}) for site, size in tiny.items())


def _alike_sites(cohort: Cohort) -> Iterator[Finding]:
    for names in alike(cohort.site_names):
        sizes = [f"{shown(name)} ({counted(int((cohort.sites == name).sum()), 'subject')})" for name in names]
        yield Finding("alike sites", numbers={"listed": sizes})


def _exclusions(cohort: Cohort) -> Iterator[Finding]:
    for reason, count in Counter(one.general for one in cohort.excluded).most_common():
        excluded = [one for one in cohort.excluded if one.general == reason]
        sites = Counter(one.site or "site not known:" for one in excluded)
        first = excluded[0]
        numbers: dict[str, Any] = {"reason": reason, "sites": {site: sites[site] for site in sorted(sites, key=natural_key)}}
        numbers |= {"only": first.subject} if count == 1 else {}
        numbers |= {"example": first.reason.rstrip(".")} if first.kind == UNUSABLE_FILE else {}
        kind = "expected exclusion" if first.expected else "exclusion"
        yield Finding(kind, "", tuple(one.subject for one in excluded), numbers)


def _duplicates(cohort: Cohort) -> Iterator[Finding]:
    for pair in find_duplicates(cohort):
        both = [pair.first, pair.second]
        here, there = cohort.sites[both].tolist()
        numbers = {"there": there, "how": pair.how, "correlation": float(pair.correlation), "atlases": list(pair.atlases)}
        conflict = set(cohort.labels[both].tolist()) == {0, 1}
        yield Finding(CONFLICT if conflict else DUPLICATE, here, tuple(cohort.subjects[both].tolist()), numbers)


def _flat(scans: Scans) -> Iterator[Finding]:
    cohort, flat = scans.cohort, scans.flat
    count, by_roi = flat.sum(axis=1), flat.sum(axis=0)
    if not count.any():
        return
    most = {cohort.rois[i]: int(by_roi[i]) for i in np.argsort(-by_roi, kind="stable")[:3] if by_roi[i]}
    word = "flat" if scans.edges is None else "empty"
    sites = Counter(cohort.sites[count > 0].tolist())
    numbers: dict[str, Any] = {"rois": most, "sites": {site: sites[site] for site in cohort.site_names if site in sites}}
    yield Finding(f"{word} ROI", "", tuple(cohort.subjects[count > 0].tolist()), numbers)
    for i in np.flatnonzero(count > MANY_FLAT * len(cohort.rois)):
        numbers = {"flat": int(count[i]), "rois": len(cohort.rois), "percent": round(100 * MANY_FLAT)}
        yield Finding(f"many {word} ROIs", str(cohort.sites[i]), (str(cohort.subjects[i]),), numbers)


def _short(cohort: Cohort) -> Iterator[Finding]:
    volumes = _volumes(cohort)
    if volumes is None:
        return
    short = (volumes > 0) & (volumes < SHORT)
    for site in sorted(set(cohort.sites[short].tolist()), key=natural_key):
        here = short & (cohort.sites == site)
        numbers = {"size": int((cohort.sites == site).sum()), "fewest": SHORT, "volumes": _span(volumes[here])}
        yield Finding("short scan", site, tuple(cohort.subjects[here].tolist()), numbers)


def _head_motion(cohort: Cohort) -> npt.NDArray[np.float64] | None:
    """(subject,) mean head motion, NaN where it is not known; None if the cohort has no such column."""
    column = usual_column(cohort)
    if column is None or cohort.phenotypes[column].dtype != np.float64:
        return None
    values = cohort.phenotypes[column].to_numpy()
    return np.where(values >= 0, values, np.nan)


def _motion(cohort: Cohort) -> Iterator[Finding]:
    """Sites at which half of the heads move much, and how well motion alone separates patients from controls inside sites."""
    values = _head_motion(cohort)
    if values is None:
        return
    known = np.isfinite(values)
    for site in cohort.site_names:
        here = values[known & (cohort.sites == site)]
        if len(here) and np.median(here) >= RESTLESS:
            elsewhere = values[known & (cohort.sites != site)]
            others = {"elsewhere": float(np.median(elsewhere))} if len(elsewhere) else {}
            yield Finding("motion", site, (), {"median": float(np.median(here)), **others})
    at_sites = [known & (cohort.labels >= 0) & (cohort.sites == site) for site in cohort.site_names]
    areas = [auc(cohort.labels[here], values[here]) for here in at_sites if len(set(cohort.labels[here].tolist())) == 2]
    if areas:
        yield Finding("motion and label", numbers={"percent": 100 * float(np.mean(areas))})


def _swapped(scans: Scans) -> Iterator[Finding]:
    """Series that may be transposed, unless their ROIs have names or they have several lengths."""
    cohort, lengths = scans.cohort, scans.cohort.lengths
    if (lengths < len(cohort.rois)).all():
        unnamed = len(set(lengths.tolist())) == 1 < len(cohort) and _are_numbers(cohort) and not cohort.atlas
        numbers = {"volumes": _span(lengths), "rois": len(cohort.rois)}
        yield Finding("axes" if unnamed else "few volumes", numbers=numbers)


def _are_numbers(cohort: Cohort) -> bool:
    return all(name.isdigit() for name in cohort.rois)


def _unnamed(scans: Scans) -> Iterator[Finding]:
    rois = scans.cohort.rois
    if _are_numbers(scans.cohort):
        known = recognised(rois)
        numbers = {"rois": len(rois), "first": rois[0], "last": rois[-1]}
        yield Finding("atlas codes", numbers=numbers | {"known": known}) if known else Finding("ROI names", numbers=numbers)


def _repetition_times(cohort: Cohort) -> Iterator[Finding]:
    if _volumes(cohort) is None:
        return
    unknown = np.isnan(cohort.tr)
    if unknown.any():
        sites = [] if unknown.all() else sorted(set(cohort.sites[unknown].tolist()), key=natural_key)
        yield Finding("unknown TR", "", tuple(cohort.subjects[unknown].tolist()), {"size": len(cohort), "sites": sites})
    long = cohort.tr > SLOWEST
    if long.any():
        numbers = {"longest": SLOWEST, "tr": float(cohort.tr[long][0])}
        yield Finding("long TR", "", tuple(cohort.subjects[long].tolist()), numbers)
    for site in cohort.site_names:
        values, counts = np.unique(np.round(cohort.tr[(cohort.sites == site) & ~unknown], 3), return_counts=True)
        if len(values) > 1:
            listed = {f"{value:g} s": int(count) for value, count in zip(values, counts, strict=True)}
            yield Finding("several TRs", site, (), {"trs": len(values), "counts": listed})


def _implausible(cohort: Cohort) -> Iterator[Finding]:
    """Values of inputs that no person has; readers set such ages to missing, cohort files may still have them."""
    for column in cohort.inputs:
        values = cohort.phenotypes[column].to_numpy()
        low, high = (0.0, OLDEST) if column == "age" else (-LARGEST_INPUT, LARGEST_INPUT)
        for i in np.flatnonzero((values < low) | (values > high)):
            numbers = {"column": column, "value": float(values[i])}
            yield Finding("value", str(cohort.sites[i]), (str(cohort.subjects[i]),), numbers)


def _units(scans: Scans) -> Iterator[Finding]:
    """Sites whose signal is on another scale, for example in percent where others are in raw units."""
    cohort, spread = scans.cohort, scans.spread
    if cohort.values not in (SERIES, COVARIANCE):
        return
    typical = {site: float(np.median(spread[cohort.sites == site])) for site in cohort.site_names}
    middle = float(np.median(list(typical.values())))
    for site, value in typical.items():
        ratio = value / middle
        if not 0.1 < ratio < 10:
            yield Finding("units", site, (), {"times": ratio} if ratio > 1 else {"fraction": 1 / ratio})


def _missing(cohort: Cohort) -> Iterator[Finding]:
    for column in cohort.inputs:
        missing = cohort.phenotypes[column].isna().to_numpy()
        at_site = {site: missing[cohort.sites == site] for site in cohort.site_names}
        affected = {site: here for site, here in at_site.items() if here.mean() >= 0.5}
        elsewhere = missing[~np.isin(cohort.sites, list(affected))]
        if affected and len(elsewhere) and elsewhere.mean() < 0.25:
            listed = [f"{site} ({here.sum()} of {len(here)})" for site, here in affected.items()]
            numbers = {"column": column, "listed": listed, "elsewhere": 100 * float(elsewhere.mean())}
            yield Finding("missing at sites", numbers=numbers)
        elif missing.mean() > 0.5:
            yield Finding("missing", numbers={"column": column, "percent": 100 * float(missing.mean())})


def _proxies(cohort: Cohort) -> Iterator[Finding]:
    columns = [str(column) for column in cohort.phenotypes.columns]
    if unused := [column for column in columns if is_proxy(column) and column not in cohort.inputs]:
        yield Finding("proxy columns", numbers={"listed": unused})
    yield from (Finding("proxy input", numbers={"column": column}) for column in cohort.inputs if is_proxy(column))
    for column in revealing_columns(cohort, (column for column in columns if not is_proxy(column))):
        kind = "separating input" if column in cohort.inputs else "separating column"
        yield Finding(kind, numbers={"column": column})
