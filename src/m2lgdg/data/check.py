"""Quality check of a cohort: counts by site, duplicates, flat ROIs, short scans, missing values and label proxies.

`m2lgdg check` prints the result, so that problems are known before the first study. `m2lgdg convert` stores the findings in
the cohort file, and later commands repeat them (`data.findings`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import LEVELS, Cohort, Finding, Level, general_reason, is_proxy, natural_key
from m2lgdg.data.atlases import recognised
from m2lgdg.data.duplicates import Pair, find_duplicates
from m2lgdg.data.readers.confounds import REMOVED, SCRUBBED
from m2lgdg.data.readers.motion import TOO_LARGE, usual_column
from m2lgdg.data.readers.several import UNUSABLE
from m2lgdg.data.readers.tables import IMPLAUSIBLE, OLDEST, SLOWEST
from m2lgdg.metrics import auc
from m2lgdg.notebook.html import shown_table

SHORT = 100  # volumes
RESTLESS = 0.3  # mm, median head motion of a site
TINY = 10  # subjects at a site
BAD = "bad files"
MANY_FLAT = 0.1  # fraction of a subject's ROIs
EMPTY = 1e-6  # sd of a scan without signal, relative to the median of the cohort
LARGEST_INPUT = 1e6  # no phenotype in its usual units is larger
NAMED = 6  # subjects that a sentence names at most
SUBJECT = re.compile(r"subject ([^,]+), column ")  # in a note about a value of one subject
# Note of a reader on a series that it left out
ATLAS_OF_SUBJECT = re.compile(rf"{UNUSABLE}subject (?P<subject>[^,]+), atlas (?P<atlas>[^:]+): (?P<reason>.+)")
# Exclusions that the user requested or the release documents
EXPECTED = ("site left out", "site not selected", "left out by", "failed by", "no scan in", "duplicate", TOO_LARGE)
TRAINING = ("leave-one-site-out", "small site")  # kinds of findings that do not matter where subjects are only predicted
DUPLICATE, CONFLICT = "duplicate", "duplicate, labels differ"
Part = tuple[Cohort, npt.NDArray[np.bool_]]  # cohort of one atlas, and the (subject, roi) mask of its flat ROIs


@dataclass(frozen=True)
class Check:
    """Result of `check_cohort`: a table by site, the findings, and the list of included and excluded subjects."""

    sites: pd.DataFrame
    findings: tuple[Finding, ...]
    inclusion: pd.DataFrame

    @property
    def exit_code(self) -> int:
        """0 usable, 1 usable with findings, 2 unusable."""
        levels = {finding.level for finding in self.findings}
        return 2 if "unusable" in levels else 1 if "finding" in levels else 0

    def _repr_html_(self) -> str:
        """Findings and the table by site, for notebooks."""
        words = ("usable", "usable, with findings", "unusable")[self.exit_code]
        findings = shown_table(f"Check: {words}", ("level", "finding"), [(one.level, one.text) for one in self.findings])
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
    parts: list[Part] = [(part, _flat_rois(part)) for part in map(cohort.parcellation, cohort.atlases) if len(part)]
    checks = {
        "leave-one-site-out": _protocol(cohort),
        "small site": _tiny(cohort),
        "exclusion": _exclusions(cohort),
        "empty scan": _by_atlas(cohort, parts, _empty),
        DUPLICATE: _duplicates(cohort),
        "atlas": _lacking(cohort),
        "flat ROI": _by_atlas(cohort, parts, _flat),
        "short scan": _short(cohort),
        "axes": _by_atlas(cohort, parts, lambda part, _: _swapped(part)),
        "TR": _repetition_times(cohort),
        "motion": _motion(cohort),
        "units": _by_atlas(cohort, parts, _units),
        "value": _implausible(cohort),
        "missing": _missing(cohort),
        "proxy": _proxies(cohort),
        "ROI names": _by_atlas(cohort, parts, lambda part, _: _unnamed(part)),
        "inputs": iter([Finding("note", f"Inputs of the methods: {', '.join(cohort.inputs) or 'none'}.")]),
        "note": _notes(cohort),
    }
    findings = [
        finding._replace(kind=finding.kind or kind)
        for kind, sentences in checks.items()
        if not (new_site and kind in TRAINING)
        for finding in sentences
    ]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return Check(_site_table(cohort, parts), tuple(findings), _inclusion(cohort, findings))


def atlas_line(cohort: Cohort) -> str:
    """One line on the atlases of a cohort, with their ROIs and subjects; empty if there is only one."""
    if not cohort.parcellations:
        return ""
    parts = map(cohort.parcellation, cohort.atlases)
    listed = [f"{part.atlas} ({len(part.rois)} ROIs, {counted(len(part), 'subject')})" for part in parts]
    return f"Atlases: {', '.join(listed)}."


def _by_atlas(
    cohort: Cohort, parts: Iterable[Part], check: Callable[[Cohort, npt.NDArray[np.bool_]], Iterator[Finding]]
) -> Iterator[Finding]:
    """Findings about each atlas in turn; they name it if the cohort has several."""
    for part, flat in parts:
        name = f"Atlas {part.atlas}: " if cohort.parcellations else ""
        for finding in check(part, flat):
            anonymous = finding.anonymous and f"{name}{finding.anonymous}"
            yield finding._replace(text=f"{name}{finding.text}", anonymous=anonymous)


def _flat_rois(cohort: Cohort) -> npt.NDArray[np.bool_]:
    """(subject, roi) mask of the ROIs that are constant in time."""
    return np.array([(one == one[0]).all(axis=0) for one in cohort.series])


def _lacking(cohort: Cohort) -> Iterator[Finding]:
    """Subjects that do not have every atlas."""
    for atlas, each in cohort.parcellations.items():
        subjects = tuple(cohort.subjects[~each.present].tolist())
        if subjects:
            text = f"{counted(len(subjects), 'subject')} {'has' if len(subjects) == 1 else 'have'} no series of atlas {atlas}"
            rest = f" and {len(subjects) - NAMED} more" if len(subjects) > NAMED else ""
            yield Finding("finding", f"{text} ({', '.join(subjects[:NAMED])}{rest}).", subjects, anonymous=f"{text}.")


def empty_scans(cohort: Cohort) -> list[int]:
    """Positions of subjects whose scan is numerically empty: its sd is below a millionth of the median of the cohort.

    If the cohort has several atlases, it is enough that the scan is empty in one of them.

    Such a series is the rounding residue of a regression, which passes for a signal once it is standardised. If all scans of
    a site are so small, its units differ instead, which is another finding. To leave such subjects out:
    `cohort.select(np.setdiff1d(np.arange(len(cohort)), empty_scans(cohort)))`.
    """
    parts = [cohort.parcellation(atlas) for atlas in cohort.atlases]
    subjects = {str(part.subjects[i]) for part in parts for i in _empty_positions(part, _spreads(part))}
    return [i for i, subject in enumerate(cohort.subjects.tolist()) if subject in subjects]


def _spreads(cohort: Cohort, flat: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float64]:
    """Median sd over the ROIs of each subject that are not flat; 0 if all are."""
    wide = np.float64  # squares of small or large float32 values are out of range
    spread = []
    for i, one in enumerate(cohort.series):
        still = (one == one[0]).all(axis=0) if flat is None else flat[i]
        spread.append(np.median(one.std(axis=0, dtype=wide)[~still]) if not still.all() else 0.0)
    return np.array(spread)


def _empty_positions(cohort: Cohort, spread: npt.NDArray[np.float64]) -> list[int]:
    if not len(spread):
        return []
    low = np.flatnonzero(spread < EMPTY * np.median(spread)).tolist()
    at_site = [spread[cohort.sites == cohort.sites[i]] for i in low]
    return [i for i, here in zip(low, at_site, strict=True) if len(here) == 1 or spread[i] < EMPTY * here.max()]


def _empty(cohort: Cohort, flat: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    spread = _spreads(cohort, flat)
    middle = float(np.median(spread)) if len(spread) else 0.0
    for i in _empty_positions(cohort, spread):
        subject = str(cohort.subjects[i])
        text = (
            f"{subject} ({cohort.sites[i]}) is an unusable subject: its scan is numerically empty (standard deviation "
            f"{spread[i]:.1g}, in the cohort {middle:.1g}); leave it out with `m2lgdg convert --drop-bad`."
        )
        yield Finding("finding", text, (subject,), anonymous=f"The scan of a subject ({cohort.sites[i]}) is numerically empty.")


def _site_table(cohort: Cohort, parts: Iterable[Part]) -> pd.DataFrame:
    """One row per site; flat ROIs count in any atlas."""
    with_flat = {subject for part, flat in parts for subject in part.subjects[flat.any(axis=1)].tolist()}
    flat = np.isin(cohort.subjects, sorted(with_flat))
    lengths = cohort.lengths
    missing = cohort.phenotypes[list(cohort.inputs)].isna().any(axis=1).to_numpy()
    motion = _head_motion(cohort)
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
                "with flat ROIs": int(flat[here].sum()),
                "missing inputs": int(missing[here].sum()),
                **({} if motion is None else {"motion": _median(motion[here])}),
            }
        )
    return pd.DataFrame(rows)


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 subject, 2 subjects."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _span(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _median(values: npt.NDArray[np.float64]) -> str:
    values = values[np.isfinite(values)]
    return f"{np.median(values):.2f}" if len(values) else "?"


def _inclusion(cohort: Cohort, findings: list[Finding]) -> pd.DataFrame:
    """Table of subject, site, label, status and reason: why a subject was excluded, or the findings about it."""
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
    """Requirements of leave-one-site-out: two sites, two classes, and sites at which the metrics are defined."""
    labels = cohort.labels
    if len(cohort.site_names) < 2:
        yield Finding("unusable", f"All subjects are from one site, {cohort.sites[0]}; leave-one-site-out needs at least two.")
    if not (labels >= 0).any():
        yield Finding("unusable", "No subject has a label, so no method can be fitted or evaluated.")
    elif len(set(labels[labels >= 0].tolist())) < 2:
        kind = "patients" if (labels == 1).any() else "controls"
        yield Finding("unusable", f"All labelled subjects are {kind}; both patients and controls are needed.")
    if (labels < 0).any() and (labels >= 0).any():
        unlabelled = tuple(cohort.subjects[labels < 0])
        verb = "has" if len(unlabelled) == 1 else "have"
        yield Finding("finding", f"{counted(len(unlabelled), 'subject')} {verb} no label.", unlabelled)
    for site in cohort.site_names:
        here = labels[cohort.sites == site]
        if len(set(here.tolist())) == 1 and here[0] >= 0 and len(set(labels.tolist())) > 1:
            present, absent = ("patient", "control") if here[0] else ("control", "patient")
            metric = "sensitivity" if here[0] else "specificity"
            text = f"{site} has {counted(len(here), present)} and no {absent}s; as a target, only its {metric} is defined."
            yield Finding("finding", text)


def _tiny(cohort: Cohort) -> Iterator[Finding]:
    sizes = {site: int((cohort.sites == site).sum()) for site in cohort.site_names}
    tiny = {site: size for site, size in sizes.items() if size < TINY}
    if len(tiny) > 3:
        listed = ", ".join(f"{site} {size}" for site, size in tiny.items())
        text = f"{len(tiny)} sites have fewer than {TINY} subjects, too few for reliable metrics as a target ({listed})."
        yield Finding("finding", text)
        return
    for site, size in tiny.items():
        yield Finding("finding", f"{site} has only {counted(size, 'subject')}, too few for reliable metrics as a target.")


def _exclusions(cohort: Cohort) -> Iterator[Finding]:
    reasons = Counter(general_reason(one.reason) or BAD for one in cohort.excluded)
    for reason, count in reasons.most_common():
        excluded = [one for one in cohort.excluded if (general_reason(one.reason) or BAD) == reason]
        sites = Counter(one.site or "no site" for one in excluded)
        by_site = ", ".join(f"{site} {sites[site]}" for site in sorted(sites, key=natural_key))
        level: Level = "note" if reason.startswith(EXPECTED) else "finding"
        name = f" ({excluded[0].subject})" if count == 1 else ""
        text = reason
        if reason == BAD:
            first = excluded[0].reason.rstrip(".")
            text = first if count == 1 else f"{BAD}, for example {first}; the inclusion list names all of them"
        unnamed = "left out by an inclusion list" if reason.startswith("left out by ") else reason  # a list has a file name
        anonymous = f"{counted(count, 'subject')} excluded: {unnamed} ({by_site})."
        sentence = f"{counted(count, 'subject')}{name} excluded: {text.rstrip('.')} ({by_site})."
        yield Finding(level, sentence, anonymous=anonymous)


def _duplicates(cohort: Cohort) -> Iterator[Finding]:
    for pair in find_duplicates(cohort):
        first, second = (str(cohort.subjects[i]) for i in (pair.first, pair.second))
        here, there = (str(cohort.sites[i]) for i in (pair.first, pair.second))
        leak = "would be in both source and target" if here != there else "could be in both training and validation data"
        conflict = {int(cohort.labels[pair.first]), int(cohort.labels[pair.second])} == {0, 1}
        text = f"{_copy(pair)}{', with different labels' if conflict else ''}: the scan {leak}."
        yield Finding(
            "finding",
            f"{first} ({here}) and {second} ({there}) {text}",
            (first, second),
            CONFLICT if conflict else DUPLICATE,
            f"A subject ({here}) and another subject ({there}) {text}",
        )


def _copy(pair: Pair) -> str:
    atlases = f"atlas {', '.join(pair.atlases)}" if pair.atlases else ""
    if pair.exact:
        return f"have identical series ({atlases})" if atlases else "have identical series"
    how = {
        "reversed": "their series correlate at {:.3f} if one is reversed in time",
        "resampled": "their series correlate at {:.3f} if one is resampled in time",
        "fc": "their FC correlates at {:.3f}, more than that of two people does",
    }.get(pair.how, "their series correlate at {:.3f}")
    return f"appear to be the same scan ({atlases}{': ' * bool(atlases)}{how.format(pair.correlation)})"


def _flat(cohort: Cohort, flat: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    count = flat.sum(axis=1)
    if not count.any():
        return
    most = [i for i in np.argsort(-flat.sum(axis=0), kind="stable")[:3] if flat[:, i].any()]
    rois = ", ".join(f"{cohort.rois[i]} {flat[:, i].sum()}" for i in most)
    subjects = tuple(cohort.subjects[count > 0].tolist())
    verb = "has" if len(subjects) == 1 else "have"
    text = f"{counted(len(subjects), 'subject')} {verb} at least one flat ROI (most often {rois})."
    yield Finding("finding", text, subjects)
    for i in np.flatnonzero(count > MANY_FLAT * len(cohort.rois)):
        subject = str(cohort.subjects[i])
        text = f"{subject} ({cohort.sites[i]}) has {counted(int(count[i]), 'flat ROI')} out of {len(cohort.rois)}."
        anonymous = f"A subject ({cohort.sites[i]}) has more than {100 * MANY_FLAT:.0f} % flat ROIs."
        yield Finding("finding", text, (subject,), anonymous=anonymous)


def _short(cohort: Cohort) -> Iterator[Finding]:
    short = cohort.lengths < SHORT
    for site in sorted(set(cohort.sites[short].tolist()), key=natural_key):
        here = short & (cohort.sites == site)
        total = int((cohort.sites == site).sum())
        text = (
            f"{site}: {here.sum()} of {total} scans have fewer than {SHORT} volumes ({_span(cohort.lengths[here].tolist())})."
        )
        yield Finding("finding", text, tuple(cohort.subjects[here].tolist()))


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
            others = f", {np.median(elsewhere):.2f} at the other sites" if len(elsewhere) else ""
            text = f"{site}: heads move much (median {np.median(here):.2f} mm{others}); --max-motion leaves out who moves most."
            yield Finding("finding", text)
    parts = [known & (cohort.labels >= 0) & (cohort.sites == site) for site in cohort.site_names]
    areas = [auc(cohort.labels[part], values[part]) for part in parts if len(set(cohort.labels[part].tolist())) == 2]
    if areas:
        text = (
            f"Head motion alone separates patients from controls with a mean AUC of {100 * np.mean(areas):.0f} % inside sites."
        )
        yield Finding("note", text)


def _swapped(cohort: Cohort) -> Iterator[Finding]:
    """Series that may be transposed. ROIs that have names, or scans of several lengths, speak against it."""
    if not len(cohort) or not (cohort.lengths < len(cohort.rois)).all():
        return
    text = f"Every scan has fewer volumes ({_span(cohort.lengths.tolist())}) than ROIs ({len(cohort.rois)})"
    if len(set(cohort.lengths.tolist())) == 1 and _are_numbers(cohort) and not cohort.atlas and len(cohort) > 1:
        advice = 'If the time and ROI axes are swapped, write orientation = "roi,time" into dataset.toml; else name the atlas'
        yield Finding("finding", f"{text}, the same number in all, and no ROI has a name. {advice}.")
    else:
        yield Finding("note", f"{text}. Are the time and ROI axes swapped?")


def _are_numbers(cohort: Cohort) -> bool:
    return all(name.isdigit() for name in cohort.rois)


def _unnamed(cohort: Cohort) -> Iterator[Finding]:
    if _are_numbers(cohort):
        text = (
            f"The {len(cohort.rois)} ROIs have only numbers ({cohort.rois[0]} to {cohort.rois[-1]}), so that another atlas "
            "with as many ROIs cannot be told apart"
        )
        advice = "name them by a header, or in dataset.toml by rois or atlas, before a model is applied to other data"
        name = recognised(cohort.rois)
        if name is not None:
            advice = f'they are the codes of the included atlas {name}: name it in dataset.toml (atlas = "{name}")'
        yield Finding("note", f"{text}; {advice}.")


def _repetition_times(cohort: Cohort) -> Iterator[Finding]:
    unknown = np.isnan(cohort.tr)
    if unknown.any():
        count = f"{unknown.sum()} of {counted(len(cohort), 'subject')}"
        sites = sorted(set(cohort.sites[unknown].tolist()), key=natural_key)
        where = "" if unknown.all() else f" ({', '.join(sites[:6])}{' ...' if len(sites) > 6 else ''})"
        advice = "give it in a column tr, in dataset.toml (tr = 2.0), in a JSON sidecar, or (REST-meta-MDD) with --tr"
        yield Finding("finding", f"The TR of {count} is not known{where}; {advice}.", tuple(cohort.subjects[unknown].tolist()))
    slow = cohort.tr > SLOWEST
    if slow.any():
        i = int(slow.argmax())
        text = f"{counted(int(slow.sum()), 'subject')} {'has' if slow.sum() == 1 else 'have'} a TR above {SLOWEST:g} s"
        value, unit = f"{cohort.tr[i]:g} s", "which looks like milliseconds."
        yield Finding(
            "finding",
            f"{text} ({cohort.subjects[i]}: {value}), {unit}",
            tuple(cohort.subjects[slow].tolist()),
            anonymous=f"{text} (for example {value}), {unit}",
        )
    for site in cohort.site_names:
        here = np.round(cohort.tr[(cohort.sites == site) & ~unknown], 3)
        values, counts = np.unique(here, return_counts=True)
        if len(values) > 1:
            listed = ", ".join(f"{value:g} s {count}" for value, count in zip(values, counts, strict=True))
            yield Finding(
                "finding", f"{site} has scans with {len(values)} TRs ({listed}); they may be two protocols or an error."
            )


def _implausible(cohort: Cohort) -> Iterator[Finding]:
    """Values of inputs that no person has; readers set such ages to missing, cohort files may still have them."""
    for column in cohort.inputs:
        values = cohort.phenotypes[column].to_numpy()
        low, high = (0.0, OLDEST) if column == "age" else (-LARGEST_INPUT, LARGEST_INPUT)
        for i in np.flatnonzero((values < low) | (values > high)):
            subject, text = str(cohort.subjects[i]), f"column {column}: {values[i]:g} is not plausible."
            yield Finding("finding", f"Subject {subject}, {text}", (subject,), anonymous=f"A subject, {text}")


def _notes(cohort: Cohort) -> Iterator[Finding]:
    """Notes of the reader; those on implausible values are findings about their subject."""
    for note in cohort.notes:
        if note.startswith(IMPLAUSIBLE):
            match = SUBJECT.search(note)
            text = note.removeprefix(IMPLAUSIBLE)
            subjects = (match[1],) if match else ()
            anonymous = f"A subject, column {text[match.end() :]}." if match else "A value is not plausible."
            yield Finding("finding", f"{text[0].upper()}{text[1:]}.", subjects, "value", anonymous)
        elif (match := ATLAS_OF_SUBJECT.match(note)) is not None:
            lacks = f"has no series of atlas {match['atlas']}"
            text = f"Subject {match['subject']} {lacks}: {match['reason']}."
            yield Finding("finding", text, (match["subject"],), "atlas", f"A subject {lacks}, because its file is unusable.")
        elif note.startswith(SCRUBBED):
            count = int((cohort.phenotypes[REMOVED] > 0).sum()) if REMOVED in cohort.phenotypes else "some"
            yield Finding("note", note, anonymous=f"{SCRUBBED}of {count} subjects")
        else:
            yield Finding("note", note)


def _units(cohort: Cohort, flat: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    """Sites whose signal is on another scale, for example in percent where others are in raw units."""
    spread = _spreads(cohort, flat)
    typical = {site: float(np.median(spread[cohort.sites == site])) for site in cohort.site_names}
    middle = float(np.median(list(typical.values())))
    for site, value in typical.items():
        ratio = value / middle
        if not 0.1 < ratio < 10:
            factor = f"{ratio:.0f} times that" if ratio > 1 else f"1/{1 / ratio:.0f} of that"
            text = f"{site}: the standard deviation of the signal is {factor} of a typical site; its units may differ."
            yield Finding("finding", text)


def _missing(cohort: Cohort) -> Iterator[Finding]:
    for column in cohort.inputs:
        missing = cohort.phenotypes[column].isna().to_numpy()
        rates = {site: float(missing[cohort.sites == site].mean()) for site in cohort.site_names}
        affected = [site for site, rate in rates.items() if rate >= 0.5]
        elsewhere = missing[~np.isin(cohort.sites, affected)]
        if affected and len(elsewhere) and elsewhere.mean() < 0.25:
            sites = ", ".join(
                f"{site} ({missing[cohort.sites == site].sum()} of {(cohort.sites == site).sum()})" for site in affected
            )
            text = (
                f"{column} is missing at {sites}, but for only {100 * elsewhere.mean():.0f} % of subjects elsewhere; "
                "its missingness reveals the site."
            )
            yield Finding("finding", text)
        elif missing.mean() > 0.5:
            yield Finding("finding", f"{column} is missing for {100 * missing.mean():.0f} % of subjects.")
        by_label = [missing[cohort.labels == label].mean() for label in (0, 1) if (cohort.labels == label).any()]
        if len(by_label) == 2 and abs(by_label[0] - by_label[1]) > 0.5:
            percent = f"{100 * by_label[0]:.0f} % of controls and {100 * by_label[1]:.0f} % of patients"
            yield Finding("finding", f"{column} is missing for {percent}; its missingness reveals the label.")


def _proxies(cohort: Cohort) -> Iterator[Finding]:
    proxies = [column for column in cohort.phenotypes.columns if is_proxy(column)]
    unused = [column for column in proxies if column not in cohort.inputs]
    if unused:
        listed = ", ".join(unused[:6]) + (f" and {len(unused) - 6} more" if len(unused) > 6 else "")
        what = "1 column reveals" if len(unused) == 1 else f"{len(unused)} columns reveal"
        inputs = "is not an input" if len(unused) == 1 else "are not inputs"
        yield Finding("note", f"{what} the diagnosis and {inputs}: {listed}.")
    for column in cohort.inputs:
        if column in proxies:
            yield Finding("finding", f"Input {column} reveals the diagnosis; a model can read the label from it.")
    for column in cohort.phenotypes.columns:
        if column not in proxies and _separates(cohort, column):
            role = "Input" if column in cohort.inputs else "Column"
            level: Level = "finding" if role == "Input" else "note"
            yield Finding(level, f"{role} {column} separates patients from controls almost perfectly. Is it a label proxy?")


def _separates(cohort: Cohort, column: str) -> bool:
    """Whether a numeric column alone ranks patients against controls with an AUC above 0.95 or below 0.05."""
    values = cohort.phenotypes[column]
    if values.dtype != np.float64:
        return False
    known = values.notna().to_numpy()
    labels = cohort.labels[known]
    if min(int((labels == label).sum()) for label in (0, 1)) < TINY:
        return False
    return bool(abs(auc(labels, values.to_numpy()[known]) - 0.5) > 0.45)
