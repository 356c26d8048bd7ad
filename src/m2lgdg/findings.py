"""`Finding` and `Exclusion`: what is known about the data of a cohort and who was left out, as values, not as sentences.

Readers and `m2lgdg check` make them, a cohort carries them, and studies, models and reports repeat them. SENTENCES has the
sentence of each kind by its severity; code decides by the kind and never reads a sentence.
"""

from __future__ import annotations

import re
import shlex
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Severity = Literal["unusable", "finding", "note"]
SEVERITIES: tuple[Severity, ...] = ("unusable", "finding", "note")
DUPLICATE, CONFLICT = "duplicate", "duplicate, labels differ"
TRAINING = (  # kinds that do not matter where subjects are only predicted
    *("one site", "no labels", "one class", "no label", "no controls at a site", "no patients at a site"),
    *("small site", "small sites", "alike sites", "direction by site", "inputs tell sites"),
)
NAMED = 6  # subjects or sites that a sentence names at most
METRICS = "too few for reliable metrics as a target"
SAME = "appear to be the same scan ([atlas {atlases}: ]"
HOW = {  # two scans are recognised as one
    "identical": "have identical series[ (atlas {atlases})]",
    "same matrix": "have identical connectomes[ (atlas {atlases})]",
    "aligned": SAME + "their series correlate at {correlation:.3f})",
    "reversed": SAME + "their series correlate at {correlation:.3f} if one is reversed in time)",
    "resampled": SAME + "their series correlate at {correlation:.3f} if one is resampled in time)",
    "fc": SAME + "their FC correlates at {correlation:.3f}, more than that of two people does)",
}
EXCLUDED = "{count:subject}[ ({only})] excluded: {reason}[, for example {example}; inclusion.csv names all] ({sites})."
NUMBERED = (
    "The {rois} ROIs have only numbers ({first} to {last}), so that another atlas with as many ROIs cannot be told apart; "
)
SEPARATES = "{column} separates patients from controls as only a label proxy should. Is it one?"
RATES = "{controls:.0f} % of controls and {patients:.0f} % of patients[ ({within})]"
# The sentence of each kind. A section in [] is left out if a value in it is missing; {size:subject} is a number with its noun.
SENTENCES: dict[Severity, dict[str, str]] = {
    "unusable": {
        "one site": "All subjects are from one site, {site}; leave-one-site-out needs at least two.",
        "no labels": "No subject has a label, so no method can be fitted or evaluated.",
        "one class": "All labelled subjects are {present}; both patients and controls are needed.",
    },
    "finding": {
        "no label": "{count:subject} {have} no label.",
        "no controls at a site": "{site} has {size:patient} and no controls; as a target, only its sensitivity is defined.",
        "no patients at a site": "{site} has {size:control} and no patients; as a target, only its specificity is defined.",
        "small site": f"{{site}} has only {{size:subject}}, {METRICS}.",
        "small sites": f"{{many}} sites have fewer than {{fewest}} subjects, {METRICS} ({{sizes}}).",
        "alike sites": "The site names {listed} differ only in spelling. If they are one site, merge them with `m2lgdg convert "
        "--merge-sites`; else rename one.",
        "exclusion": EXCLUDED,
        "empty scan": "{subject} ({site}) is an unusable subject: its scan is numerically empty (standard deviation "
        "{sd:.1g}, in the cohort {median:.1g}); leave it out with `m2lgdg convert --drop-bad`.",
        DUPLICATE: "{subject} ({site}) and {other} ({there}) {how}: the scan {leak}.",
        CONFLICT: "{subject} ({site}) and {other} ({there}) {how}, with different labels: the scan {leak}.",
        "no series of an atlas": "{count:subject} {have} no series of atlas {lacking}[ ({names})].",
        "no connectome of an atlas": "{count:subject} {have} no connectome of atlas {lacking}[ ({names})].",
        "later session": "{count:subject} {have} no first session, so that a later one was read ({names}).",
        "unusable series": "{who} has no series of atlas {lacking}: {reason}.",
        "flat ROI": "{count:subject} {have} at least one flat ROI (most often {rois}).",
        "many flat ROIs": "{subject} ({site}) has {flat:flat ROI} out of {rois}.",
        "empty ROI": "{count:subject} {have} at least one empty ROI, all edges of which are zero (at {sites}; most often "
        "{rois}).",
        "many empty ROIs": "{subject} ({site}) has {flat:empty ROI} out of {rois}.",
        "no structure": "{subject} ({site}) is an unusable subject: all edges of its connectome are alike (standard deviation "
        "{sd:.1g}, in the cohort {median:.1g}; median correlation {typical:.2f}); leave it out with `m2lgdg convert "
        "--drop-bad`.",
        "another kind": "{count} of {size} connectomes[ of {at}] look like kind {other}, not {values}: as {other} they have no "
        "negative eigenvalue, as {values} down to {least:.2f}. Convert them, or name the kind with --values.",
        "small values": "{site}: no edge is above 1, but {percent:.0f} % of the connectomes of other sites have one. If these "
        "are correlations and not Fisher z, convert them.",
        "negative eigenvalues": "{count} of {size} connectomes have a negative eigenvalue (down to {least:.2f}), which the "
        "correlations of a scan never have. Were edges removed or changed, or are they of another kind?",
        "scale of edges": "{site}: the standard deviation of the edges is {sd:.2g}, at a typical site {median:.2g}; they may "
        "be scaled or of another kind.",
        "zero edges": "{percent:.0f} % of the edges[ of {sites}] are exactly zero although their ROIs are not empty; were weak "
        "edges removed?",
        "no negative edges": "No edge[ of {sites}] is negative; were negative edges removed, or absolute values taken?",
        "rounded edges": "The edges[ of {sites}] are rounded to {decimals:decimal}.",
        "clipped edges": "The edges[ of {sites}] are cut at {largest:.3g}: several have this very value.",
        "short scan": "{site}: {count} of {size} scans have fewer than {fewest} volumes ({volumes}).",
        "axes": "Every scan has fewer volumes ({volumes}) than ROIs ({rois}), the same number in all, and no ROI has a "
        'name. If the time and ROI axes are swapped, write orientation = "roi,time" into dataset.toml; else name the atlas.',
        "unknown TR": "The TR of {count} of {size:subject} is not known[ ({sites})]; give it in a column tr, in "
        "dataset.toml (tr = 2.0), in a JSON sidecar, or (REST-meta-MDD) with --tr.",
        "long TR": "{count:subject} {have} a TR above {longest:g} s ({subject}: {tr:g} s), which looks like milliseconds.",
        "several TRs": "{site} has scans with {trs} TRs ({counts}); they may be two protocols or an error.",
        "motion": "{site}: high head motion (median FD {median:.2f} mm[, other sites {elsewhere:.2f}]); exclude with "
        "--max-motion.",
        "units": "{site}: the standard deviation of the signal is [{times:.0f} times that][1/{fraction:.0f} of that] of a "
        "typical site; its units may differ.",
        "value": "{who}, column {column}: {value:g} is not plausible.",
        "age": "{who}, column {column}: age {value:g} is not between 0 and {oldest:g} years; it was set to missing.",
        "no education": "{site}: {zeros} have 0 years of education. It was not recorded, so that it was set to missing for "
        "everybody at this site.",
        "global signal": "Mean FC is {low:.2f} for {removed}, but {high:.2f} for {kept}: the global signal seems to have been "
        "regressed out of some scans only. Read all of them from one pipeline, or leave some sites out.",
        "another pipeline": "The folder name {strategy} means that the global signal was {said}, but its standard deviation "
        "is {percent:.0f} % of that of the ROIs, so that it was {seen}. Are the files in the right folder?",
        "missing at sites": "{column} is missing at {listed}, but for only {elsewhere:.0f} % of subjects elsewhere; its "
        "missingness reveals the site.",
        "missing": "{column} is missing for {percent:.0f} % of subjects.",
        "missing by label": f"{{column}} is missing for {RATES}; its missingness reveals the label.",
        "direction by site": "Input {column} says different things of the label: patients have more of it than controls at "
        "{higher}, and less at {lower}. Are its codes the same at these sites? What it says may not hold at a new site.",
        "atlas missing by label": f"Atlas {{column}} is missing for {RATES}; its missingness reveals the label. Leave out the "
        "atlas, or the subjects without it.",
        "flat by label": f"ROI {{column}} is flat for {RATES}[, and {{more:other ROI}} likewise], which reveals the label.",
        "empty by label": f"ROI {{column}} is empty for {RATES}[, and {{more:other ROI}} likewise], which reveals the label.",
        "proxy input": "Input {column} reveals the diagnosis; a model can read the label from it.",
        "separating input": f"Input {SEPARATES}",
        "no row in a table": "{count:subject} {have} no values in table {table} ({names}).",
        "empty columns": "Table {table}: no subject has a value in {listed}.",
        "units of a table": "{site}: the values of table {table} are about [{times:.0f} times][1/{fraction:.0f} of] those of "
        "other sites; its units may differ.",
        "units of columns": "{site}: the values of {columns} in table {table} are about [{times:.0f} times][1/{fraction:.0f} "
        "of] those of other sites; their unit may differ.",
        "hemispheres of a table": "{site}: left and right of table {table} differ the other way round than at other sites; the "
        "hemispheres may be exchanged.",
        "whole table separates": "The columns of table {table} together separate patients from controls almost without error. "
        "Does it contain the diagnosis?",
        "same row": "{subject} ({site}) and {other} ({there}) have the same values in table {table}[, {side} hemisphere]: a "
        "row may be repeated, or that of another subject.",
        "tables disagree": "{who} ({site}) has {column} {value:g} in table {table} and {elsewhere:g} in table {second}: one of "
        "the rows may be that of another subject.",
        "failed segmentation": "{subject} ({site}): many columns are out of range at once (table {counts}); its segmentation "
        "may have failed.",
        "separating table": "Column {column} of table {table}[, and {more:other column} likewise,] separates patients from "
        "controls as only a label proxy should. Is it one?",
        "table missing by label": f"Table {{column}} is missing for {RATES}; its missingness reveals the label. Leave out the "
        "table, or the subjects without it.",
        "table gaps by label": f"Column {{column}} is missing for {RATES}[, and {{more:other column}} likewise], which reveals "
        "the label.",
        "table of others": "Table {table}: only {matched} of its {rows} rows are of subjects of the cohort, which has {size}. "
        "Is it the table of another cohort?",
        "text": "{text}",
    },
    "note": {
        "expected exclusion": EXCLUDED,
        "connectomes": "The scans are connectomes ({values}); volumes, TR and signals are not known and not checked.",
        "small negative eigenvalues": "{count} of {size} connectomes have a small negative eigenvalue (down to {least:.2g}), "
        "as after rounding or averaging.",
        "few volumes": "Every scan has fewer volumes ({volumes}) than ROIs ({rois}). Are the time and ROI axes swapped?",
        "inputs tell sites": "Inputs tell sites better than labels ({between:.0f} % of the variance of {column} is between "
        "sites, {label:.0f} % between patients and controls of a site), and {least:.0f} to {most:.0f} % of the subjects of a "
        "site are patients: a method that pools sites can learn the site in place of the label.",
        "motion and label": "Head motion alone separates patients from controls with a mean AUC of {percent:.0f} % inside "
        "sites.",
        "separating column": f"Column {SEPARATES}",
        "proxy columns": "Not inputs, because they reveal the diagnosis: {listed}.",
        "ROI names": NUMBERED
        + "name them by a header, or in dataset.toml by rois or atlas, before a model is applied to other data.",
        "atlas codes": NUMBERED
        + 'they are the codes of the included atlas {known}: name it in dataset.toml (atlas = "{known}").',
        "inputs": "Inputs of the methods: {listed}.",
        "scrubbed": "scrubbed volumes: {listed}",
        "constant columns": "Table {table}: all subjects have the same value in {listed}.",
        "table": "Table {table}: {columns:column} ({what}[, {side}]) for {matched} of {size:subject}[, {by_number} matched by "
        "the number alone][; no row for {sites}][; left out: {left}].",
        "session": "session: {text}",
        "run": "run: {text}",
        "values": "values: {text}",
        "label": "{text}",
        "note": "{text}",
    },
}
# Where the sentence without ids and file names is more than that with "A subject" in place of the id
ANONYMOUS = {
    "no row in a table": "{count:subject} {have} no values in table {table}.",
    "failed segmentation": "A subject ({site}) has many columns out of range at once (table {counts}).",
    "tables disagree": "A subject ({site}) has two values of {column}, one in table {table} and one in table {second}.",
    "empty scan": "The scan of a subject ({site}) is numerically empty.",
    "unusable series": "A subject has no series of atlas {lacking}, because its file is unusable.",
    "many flat ROIs": "A subject ({site}) has more than {percent} % flat ROIs.",
    "many empty ROIs": "A subject ({site}) has more than {percent} % empty ROIs.",
    "no structure": "The connectome of a subject ({site}) has edges that are all alike.",
    "long TR": "{count:subject} {have} a TR above {longest:g} s (for example {tr:g} s), which looks like milliseconds.",
    "scrubbed": "scrubbed volumes: of {count:subject}",
}
BY_KIND = {kind: (severity, sentence) for severity, some in SENTENCES.items() for kind, sentence in some.items()}


# Columns that reveal the diagnosis: clinical scales, interviews, medication, course of illness. Short names of scales and drugs
# must stand alone (digits and underscores around them are fine), since longer words contain them (subdivision).
PROXY = re.compile(
    r"ham[-_ ]?[ad]|ados|adi[-_ ]?r|srs|scq|vineland|dsm|^dx|diagnos|^group$|medic|[-_ ]med[-_ ]|stimulant|antidepress|"
    r"episode|illness|disease|disorder|symptom|treat(ed|ment)|comorbid|onset|severity|phq|madrs|panss|ymrs|adhd|inattent|"
    r"hyper.?impuls|secondary.?dx|^(is[-_ ]?)?(patients?|cases?|controls?)([-_ ]?(control|group|status|type))?$|"
    r"^(labels?|class|target|outcome|asd|mdd)([-_ ]?(label|status|group))?$|"
    r"^((clinical|disease|health|group|subject|participant)[-_ ]?)?status$|"
    r"(?<![a-z])(hdrs|hrsd|qids|cars|bdi|aq|ssris?|gaf|cgi-?[is]?|drugs?|diag)(ii|sr|total|score|sum)?(?![a-z])",
    re.IGNORECASE,
)
MEDIAL = re.compile(r"(?<=[-_. ])med(?=[-_. ])", re.IGNORECASE)  # lh_G_oc-temp_med-Lingual, Frontal_Med_Orb_L
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # between the words of onSsri


class Finding(NamedTuple):
    """One statement about a cohort: its kind, the site and the subjects it concerns, and what else its sentence says.

    `atlas` is given if the statement is about one of several atlases.
    """

    kind: str
    site: str = ""
    subjects: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = {}
    atlas: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def severity(self) -> Severity:
        """Whether the cohort is unusable, or needs attention, or neither."""
        return BY_KIND[self.kind][0]

    @property
    def text(self) -> str:
        """Its sentence."""
        subject, other = (*self.subjects[:2], "", "")[:2]
        named = {"subject": subject, "other": other, "who": f"Subject {subject}", "names": list(self.subjects)}
        return self._sentence("text", BY_KIND[self.kind][1], named | dict(self.numbers))

    @property
    def anonymous(self) -> str:
        """The sentence without ids and file names, for model cards and shared reports."""
        named = {"subject": "A subject", "other": "another subject", "who": "A subject"}
        hidden = {"names": "", "only": "", "example": ""}
        sentence = ANONYMOUS.get(self.kind, BY_KIND[self.kind][1])
        return self._sentence("anonymous", sentence, named | dict(self.numbers) | hidden)

    def shared(self) -> dict[str, str]:
        """Severity, kind and anonymous sentence, as a model folder stores them."""
        return {"level": self.severity, "kind": self.kind, "text": self.anonymous}

    def _sentence(self, stored: str, sentence: str, values: dict[str, Any]) -> str:
        if "text" in self.numbers and "anonymous" in self.numbers:  # of 0.1.0
            return str(self.numbers[stored])
        values |= {"site": self.site, "count": len(self.subjects), "have": "has" if len(self.subjects) == 1 else "have"}
        if "how" in values:
            apart = self.site != values["there"]
            values["how"] = _filled(HOW[values["how"]], values)
            values["leak"] = "would be in both source and target" if apart else "could be in both training and validation data"
        return (f"Atlas {self.atlas}: " if self.atlas else "") + _filled(sentence, values)


Note = str | Finding  # of a reader


def text_finding(text: str, anonymous: str = "", *, kind: str = "note", subjects: Iterable[str] = ()) -> Finding:
    """A finding of which only the sentence is known."""
    return Finding(kind, "", tuple(subjects), {"text": text, "anonymous": anonymous or text})


def read_finding(stored: Any) -> Finding:
    """A finding from its JSON form, in 0.1.0 a list; raises ValueError, TypeError or LookupError if that is damaged."""
    if isinstance(stored, dict):
        finding = Finding(**stored)._replace(subjects=tuple(stored["subjects"]))
    else:
        level, text, subjects, kind, anonymous = stored
        if kind in TRAINING or kind == "leave-one-site-out":
            kind = "one site" if level == "unusable" else "small site"
        elif kind not in (DUPLICATE, CONFLICT):
            kind = {"unusable": "one site", "finding": "text", "note": "note"}[level]
        if not isinstance(subjects, list) or not isinstance(text, str) or not isinstance(anonymous, str):
            raise ValueError("a finding is not made of texts")
        finding = text_finding(text, anonymous, kind=kind, subjects=subjects)
    if not all(isinstance(one, str) for one in (*finding.subjects, finding.site, finding.atlas)):
        raise ValueError("a finding is not made of texts")
    if not (finding.text and finding.anonymous):
        raise ValueError("a finding has no sentence")
    return finding


def read_note(stored: Any) -> Note:
    """A note from its JSON form; in 0.1.0, all were texts."""
    if isinstance(stored, str):
        if stored.startswith(("label from ", "site and label from ", "no label ")):
            return Finding("label", numbers={"text": stored})
        kind, _, text = stored.partition(": ")
        if kind == "implausible value":
            subject = text.removeprefix("subject ").partition(",")[0] if text.startswith("subject ") else ""
            who = (subject,) if subject else ()
            return text_finding(f"{text[:1].upper()}{text[1:]}.", "A value is not plausible.", kind="text", subjects=who)
        if kind == "unusable series":
            subject, _, rest = text.removeprefix("subject ").partition(", atlas ")
            atlas, _, reason = rest.partition(": ")
            return Finding("unusable series", "", (subject,), {"lacking": atlas, "reason": reason})
        return text_finding(stored, "scrubbed volumes: of some subjects") if kind == "scrubbed volumes" else stored
    return read_finding(stored)


UNUSABLE_FILE = "unusable file"
NO_SERIES, NOT_LISTED = "listed but no series file", "series file but not listed"
NO_CONNECTOME, CONNECTOME_NOT_LISTED = "listed but no connectome", "connectome but not listed"
TOO_MUCH_MOTION, NO_MOTION = "head motion", "no motion value"
BY_LIST = "left out by an inclusion list"
COPY, UNLIKE_COPY = "duplicate", "duplicate with different labels"
# Exclusions that the user requested or the release documents
EXPECTED = (
    *("site left out", "site left out by the user", "site not selected", "failed by the quality raters"),
    *("no scan in the release", BY_LIST, COPY, UNLIKE_COPY, TOO_MUCH_MOTION),
)


class Exclusion(NamedTuple):
    """A subject of the release that is not in the cohort, and why.

    `kind` and `about` may be shared; `detail` (a value, another subject, what is wrong with a file) may not.
    """

    subject: str
    site: str
    kind: str
    about: str = ""
    detail: str = ""

    @property
    def general(self) -> str:
        """The reason without ids, values and file names."""
        return f"{self.kind}: {self.about}" if self.about else self.kind

    @property
    def reason(self) -> str:
        """The reason."""
        if self.kind == UNUSABLE_FILE and self.detail:
            return self.detail
        return f"{self.general} ({self.detail})" if self.detail else self.general

    @property
    def expected(self) -> bool:
        """Whether the user requested it, or the release documents it."""
        return self.kind in EXPECTED

    @classmethod
    def from_reason(cls, subject: str, site: str, reason: str) -> Exclusion:
        """An exclusion of 0.1.0, which stored the reason as one text."""
        if reason.endswith("."):
            return cls(subject, site, UNUSABLE_FILE, detail=reason)
        if reason.startswith("left out by "):
            return cls(subject, site, BY_LIST, detail=reason.removeprefix("left out by "))
        match = re.fullmatch(r"(?P<general>.+?)(?: \((?P<detail>(?:same scan as|value) .+)\))?", reason, re.DOTALL)
        general, detail = (match["general"], match["detail"] or "") if match else (reason, "")
        kind, _, about = general.partition(": ")
        return cls(subject, site, kind, about, detail) if kind in EXPECTED else cls(subject, site, general, detail=detail)


def with_kind(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the inclusion.csv of a study with its `kind`, the reason without ids and file names (absent in 0.1.0)."""
    reason = str(row.get("reason", ""))
    return {"kind": Exclusion.from_reason("", "", reason).general if reason else "", **row}


def note_on_label(notes: Iterable[Note]) -> str:
    """What a reader noted on where the labels are from; empty if nothing."""
    return next((one.text for one in notes if not isinstance(one, str) and one.kind == "label"), "")


def problems(findings: Iterable[Finding], *, new_site: bool = False) -> list[Finding]:
    """Findings that are more than notes, duplicate scans first; with `new_site`, without those that concern training only."""
    chosen = [one for one in findings if one.severity != "note" and not (new_site and one.kind in TRAINING)]
    return sorted(chosen, key=lambda one: not is_duplicate(one))


def is_duplicate(finding: Finding) -> bool:
    """Whether a finding is about two subjects with the same scan."""
    return finding.kind in (DUPLICATE, CONFLICT)


def summary(findings: Sequence[Finding]) -> str:
    """Number of duplicate scans and of other findings, in words; empty if there are none."""
    pairs, conflicts = (sum(one.kind in kinds for one in findings) for kinds in ((DUPLICATE, CONFLICT), (CONFLICT,)))
    others = len(findings) - pairs
    labels = f" ({conflicts} of them with different labels)" if conflicts else ""
    labels = " but different labels" if conflicts == pairs else labels
    words = [f"{counted(pairs, 'pair')} of subjects with the same scan{labels}"] if pairs else []
    words += [counted(others, "other finding" if pairs else "finding")] if others else []
    return " and ".join(words)


def data_line(findings: Iterable[Finding], command: str, *, new_site: bool = False) -> str:
    """One line on the problems of a cohort, with the command that lists them; empty if there are none."""
    words = summary(problems(findings, new_site=new_site))
    them = "it" if words == "1 finding" else "them"
    return f"Data: {words}; {command} lists {them}." if words else ""


def check_command(cohort: str | Path, *, new_site: bool = False, tables: Sequence[str] = ()) -> str:
    """The command that lists the findings about a cohort file or folder, with the values of --table."""
    given = [word for one in tables for word in ("--table", one)]
    return shlex.join(["m2lgdg", "check", str(cohort), *given, *(["--new-site"] if new_site else [])])


def anonymous_sentences(stored: Iterable[Mapping[str, str]]) -> list[str]:
    """Sentences of `Finding.shared`, duplicate scans first; one that holds for several subjects occurs once, with a count."""
    ordered = sorted(stored, key=lambda one: one["kind"] not in (DUPLICATE, CONFLICT))
    counts = Counter(one["text"] for one in ordered)
    return [text if count == 1 else f"{text.removesuffix('.')} ({count} times)." for text, count in counts.items()]


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 subject, 2 subjects."""
    return f"{count} {noun}{'s' * (count != 1)}"


class _Words(string.Formatter):
    """Writes a number with its noun, {size:subject}, and lists; lists of names end after NAMED."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {number}" for name, number in value.items())
        if isinstance(value, list):
            return ", ".join(value[:NAMED]) + (f" and {len(value) - NAMED} more" if len(value) > NAMED else "")
        return counted(value, format_spec) if len(format_spec) > 3 else str(super().format_field(value, format_spec))


def _filled(template: str, values: Mapping[str, Any]) -> str:
    def section(match: re.Match[str]) -> str:
        names = [name for _, name, _, _ in string.Formatter().parse(match[1]) if name]
        return match[1] if all(values.get(name) not in (None, "", []) for name in names) else ""

    return _Words().vformat(re.sub(r"\[([^\]]*)\]", section, template), (), values)


def is_proxy(column: str) -> bool:
    """Whether a phenotype column reveals the diagnosis (a label proxy), judged by its name."""
    return any(PROXY.search(text) is not None for text in (column, CAMEL.sub("_", column)))


def is_table_proxy(column: str) -> bool:
    """As `is_proxy`, for a column of a table of brain regions, where med is medial and not medication."""
    return is_proxy(MEDIAL.sub("medial", column))
