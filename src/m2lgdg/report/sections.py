"""Sections of the report, each with a title, text, tables and figures; only those the study has data for.

Made from the contents of a study, and put on the page by `page`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from m2lgdg.registry import PAPER
from m2lgdg.report import brains, figures
from m2lgdg.report.answer import Answer, Data
from m2lgdg.report.checklists import MethodsText, checklist_tables, methods_text
from m2lgdg.report.contents import Contents
from m2lgdg.report.curve import learning_figure, sentences, stored_curve
from m2lgdg.report.data import connectomes, flow_diagram, site_connectomes, site_table
from m2lgdg.report.drawing import Figure, hues_of
from m2lgdg.report.operating import comparison_table, motion_of, motion_table, operating_table, predictive_table
from m2lgdg.report.paper_tables import (
    Comparison,
    Key,
    both_tracks,
    changed_fields,
    in_track,
    label,
    named_key,
    one_panel,
    training_table,
    what_was_seen,
)
from m2lgdg.report.published import Published
from m2lgdg.report.subgroups import few_of_a_class, few_of_a_site, subgroup_table
from m2lgdg.report.tables import NAN, Cell, Column, Table, columns
from m2lgdg.study.predictions import ADAPTED, STRICT

CONSTANT = 0.02  # a loss term whose values in a training differ by less, relative to the largest, was the same in every epoch
MOST_NAMES = 3  # in a sentence


@dataclass
class Section:
    """A section of the page; `folded` tables are collapsed, `link` is its name in the table of contents.

    `first` is a figure above its tables, `data` a box of findings, `answer` that of the main result, `paste` a text to copy.
    """

    id: str
    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    folded: Sequence[Table] = ()
    link: str = ""
    first: Figure | None = None
    data: Data | None = None
    answer: Answer | None = None
    paste: MethodsText | None = None


@dataclass(frozen=True)
class Shown:
    """What all sections share: the methods that are shown, those in focus, their colours, and the methods of the tests."""

    contents: Contents
    summary: Answer
    best: str | None = None
    rivals: Sequence[str] = ()
    published: Published | None = None
    keys: list[Key] = field(default_factory=list)
    focus: list[Key] = field(default_factory=list)
    hues: Mapping[Key, int] = field(default_factory=dict)

    def compared(self, contents: Contents, best: str | None = None) -> Comparison:
        """The comparison of the methods of some contents, by default that of the whole report."""
        tests = {"best": best} if best else {"best": self.best, "rivals": self.rivals}
        return Comparison(contents.predictions, **tests, scores=contents.cell_scores, declared=contents.declared)

    def titled(self, contents: Contents, tables: list[Table]) -> list[Table]:
        """Tables of some contents, with published values or, of the adapted track, with that track in their titles."""
        if contents.track == ADAPTED:  # published values are of sites that nothing was seen of
            return in_track(tables, ADAPTED, contents.batch)
        return tables if self.published is None else self.published.beside(tables)


def sections(
    contents: Contents,
    summary: Answer,
    *,
    best: str | None = None,
    rivals: Sequence[str] = (),
    published: Published | None = None,
) -> list[Section]:
    """All sections, in the order of the page; `best` and `rivals` are those of the paired tests (`Comparison`)."""
    tested = [named_key(contents.keys, name) for name in (best, *rivals) if name is not None]
    usual = [key for key in contents.keys if not contents.is_sweep(key) and not (key[0] in PAPER and key[1])] or contents.keys
    keys = [key for key in contents.keys if key in (*usual, *tested)]
    phenotypes = [(name, "") for name in contents.with_role("phenotypes")]
    focus = [key for key in dict.fromkeys([summary.main, summary.peer, *phenotypes]) if key in contents.keys]
    hues = hues_of([*focus, *keys, *contents.keys])  # one colour for a method in all figures
    shown = Shown(contents, summary, best, rivals, published, keys, focus, hues)
    made = [
        _data(shown),
        Section("answer", "Answer", answer=summary),
        *_results(shown),
        _discrimination(shown),
        _operating(shown),
        motion := _motion(shown),
        _subgroups(shown),
        _adapted(shown),
        _ablations(shown),
        _sweeps(shown),
        _learning(shown),
        _training(shown),
        _planted(shown),
        *_explanations(shown),
        Section("methods", "Methods, to paste", PASTE, paste=methods_text(contents, motion=motion is not None), link="Methods"),
        _leakage(shown),
        Section("checklists", "Reporting checklists", CHECKLISTS, folded=checklist_tables(contents)),
    ]
    return [section for section in made if section is not None]


THRESHOLD_RULE = (
    "A subject is classified as a patient if the probability, averaged over seeds, is at least 0.5. The threshold is fixed, "
    "and calibration is fitted on source subjects only. Patients are rarer in a clinic than in a case-control cohort: the "
    "table of predictive values shows what the same sensitivity and specificity mean at other prevalences."
)
MOTION_RULE = (
    "Patients often move more than controls, and motion changes connectivity, so part of an AUC can be motion. The adjusted "
    "AUC compares each patient with controls of the same site who moved as much."
)
READABILITY = (
    "Accuracy of a cross-validated linear probe that predicts site or label from the classifier's input, for source subjects. "
    "A probe finds more of any information in more dimensions, so the table includes the effective number of dimensions."
)
PASTE = "A draft from the files of this study. A click selects it."
CHECKLISTS = 'Filled in from the files of the study; the rest reads "authors to complete".'


def _data(shown: Shown) -> Section:
    """Who was included, what the sites are like, what the check of the cohort reported, and mean connectomes."""
    contents = shown.contents
    table, few = site_table(contents), contents.description
    figure, edges = (None, None) if contents.shared and few_of_a_class(few) else connectomes(contents)
    by_site = None if contents.shared and few_of_a_site(few) else site_connectomes(contents)
    return Section(
        "data",
        "Data",
        shown.summary.cohort,
        [table] if table else [],
        [each for each in (figure, by_site) if each is not None],
        [edges] if edges else [],
        first=flow_diagram(contents),
        data=shown.summary.data,
    )


def _results(shown: Shown) -> list[Section]:
    """The macro table, and folded the tests of all metrics (Panel B of the paper); then target sites with a forest plot.

    Ablations and values of sweeps are only in a folded macro table, because they would fill the first page.
    """
    contents = shown.contents
    whole = shown.compared(contents)
    *sites, overall = shown.titled(contents, whole.tables())
    text, first, folded = "", overall, one_panel(whole.panels())
    if len(shown.keys) < len(contents.keys):
        more = len(contents.keys) - len(shown.keys)
        text = f"The folded table below also has the {more} ablations and sweep values of this study."
        methods = contents.of_methods(shown.keys)
        compared = shown.compared(methods)
        *_, first = shown.titled(methods, compared.tables())
        first, folded = replace(first, title="Methods over all target sites"), [overall, *one_panel(compared.panels())]
    peer = shown.summary.peer
    comparison = None if peer is None else comparison_table(contents.mean, shown.summary.main, peer)
    forest = figures.forest(contents.mean, contents.site_scores, shown.keys, hues=shown.hues)
    tables = [*([] if comparison is None else [comparison]), *sites]
    return [
        Section("overall", "Over all target sites", text, [first.highest_first("AUC")], folded=folded),
        Section("sites", "By target site", figures=[forest], folded=tables),
    ]


def _discrimination(shown: Shown) -> Section | None:
    mean, keys, focus, hues = shown.contents.mean, shown.keys, shown.focus, shown.hues
    curves = (figures.roc_by_target(mean, keys, focus, hues), figures.calibration_by_target(mean, focus, hues))
    drawn = [figure for figure in curves if figure is not None]
    return Section("curves", "ROC and calibration", figures=drawn) if drawn else None


def _operating(shown: Shown) -> Section:
    mean, focus = shown.contents.mean, shown.focus
    curve = figures.decision_curves(mean, focus, shown.hues)
    tables, folded = [predictive_table(mean, focus)], [operating_table(mean)]
    return Section("operating", "Operating point", THRESHOLD_RULE, tables, [curve] if curve else [], folded)


def _motion(shown: Shown) -> Section | None:
    table = motion_table(shown.contents.mean, shown.keys, motion_of(shown.contents.cohort))
    return None if table is None else Section("motion", "Head motion", MOTION_RULE, [table])


def _subgroups(shown: Shown) -> Section | None:
    contents = shown.contents
    if contents.cohort is None:
        return None
    keys = [key for key in (shown.summary.main, shown.summary.peer) if key is not None]
    tables = [subgroup_table(contents.mean, contents.cohort, key, hide_small=contents.shared) for key in keys]
    return Section("subgroups", "Subgroups", tables=tables[:1], folded=tables[1:])


def _adapted(shown: Shown) -> Section | None:
    """The adapted track of a study with both tracks: its own tables, tests and forest plot, and one table with both tracks."""
    adapted = shown.contents.of_adapted_track()
    if adapted is None:
        return None
    chosen = adapted.of_methods(shown.keys)
    compared = shown.compared(chosen)
    *sites, overall = shown.titled(adapted, compared.tables())
    folded = shown.titled(adapted, [*one_panel(compared.panels()), operating_table(adapted.mean)])
    first = f"Adapted track: {what_was_seen(adapted.batch)}. "
    forest = figures.forest(adapted.mean, adapted.site_scores, chosen.keys, "forest-adapted", first, shown.hues)
    both = both_tracks(shown.contents.predictions, adapted.predictions, adapted.batch)
    text = (
        f"In this track {what_was_seen(adapted.batch)}. All other sections are of the strict track, which sees nothing of it."
    )
    tables = [overall.highest_first("AUC"), both]
    return Section("adapted", "Adapted track", text, tables, [forest], [*sites, *folded])


def _ablations(shown: Shown) -> Section | None:
    """Tables of the variants of each method of the paper: the full method first, then each variant."""
    tables, contents = [], shown.contents
    for method in dict.fromkeys(key[0] for key in contents.keys if key[0] in PAPER):
        keys = [key for key in contents.keys if key[0] == method and not contents.is_sweep(key)]
        if len(keys) > 1:
            variants = contents.of_methods(keys)
            *_, table = shown.titled(variants, shown.compared(variants, label(*keys[0])).tables())
            pairs = training_table(contents.cell_scores, method, [variant for _, variant in keys], "Ablations")
            tables += [replace(table, title=f"Ablations of {method}"), *([pairs] if pairs is not None else [])]
    text = "The first row is the full method; each other row leaves out or changes one part."
    return Section("ablations", "Ablations", text, tables) if tables else None


def _sweeps(shown: Shown) -> Section | None:
    drawn, folded, contents = [], [], shown.contents
    for method, axes in contents.swept.items():
        variants = [key[1] for key in contents.keys if key[0] == method and contents.is_sweep(key)]
        if axes and variants:
            scores = contents.cell_scores[contents.cell_scores["method"] == method]
            default = (contents.study.get("method") or {}).get(method, {})
            drawn.append(figures.sensitivity_curves(method, scores, axes, default, shown.hues.get((method, ""), 0)))
            folded.append(training_table(scores, method, variants, "Sweeps"))
    text = "Effect of changing one field (hyper-parameter) while all others are unchanged."
    tables = [table for table in folded if table is not None]
    return Section("sensitivity", "Sensitivity", text, figures=drawn, folded=tables) if drawn else None


def _learning(shown: Shown) -> Section | None:
    """The learning curve, if `m2lgdg curve` wrote it into this folder or into its folder `curve`."""
    curve = stored_curve(shown.contents.folder)
    if curve is None:
        return None
    return Section("learning", "Learning curve", " ".join(sentences(curve, None)), figures=[learning_figure(curve, shown.hues)])


def _training(shown: Shown) -> Section | None:
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for record in shown.contents.records:
        history = (record.get("learned") or {}).get("history")
        if history and not record["variant"]:
            runs.setdefault(record["method"], []).append(history)
    drawn = figures.training_curves(runs, shown.hues)
    text = "Early stopping: the epoch with the highest AUC on source-validation subjects is used."
    table, idle = loss_terms(shown.contents.records)
    if idle:
        text += f" Terms of the loss that did not act, so that their weight changed nothing: {'; '.join(idle)}."
    tables = [] if table is None else [table]
    return Section("training", "Training curves", text, figures=[drawn], folded=tables) if drawn else None


def loss_terms(records: Iterable[Mapping[str, Any]]) -> tuple[Table | None, list[str]]:
    """The table of all methods whose loss has several terms (None without any), and clauses on terms that did not act."""
    trainings: dict[Key, list[Mapping[str, Any]]] = {}
    for record in records:
        learned = record.get("learned") or {}
        if learned.get("history") and len(_terms([learned])) > 1:
            trainings.setdefault((str(record["method"]), str(record["variant"])), []).append(learned)
    rows: list[list[Cell]] = []
    idle: dict[tuple[str, str, str], list[Key]] = {}
    for key, learned in trainings.items():
        for name in _terms(learned):
            values = [[epoch[name] for epoch in one["history"] if name in epoch] for one in learned]
            selected = [one["history"][int(one.get("best_epoch") or len(one["history"])) - 1] for one in learned]
            means = [[each[0] for each in values if each], [epoch[name] for epoch in selected if name in epoch]]
            weights = {(one.get("losses") or {}).get(name, {}).get("weight") for one in learned}
            weight = weights.pop() if len(weights) == 1 else None
            pooled = [value for each in values for value in each]
            numbers = [float(np.mean(each)) if each else NAN for each in means]
            reason = _idle(values)
            remark = f"did not act ({reason})" if reason else ""
            rows.append([label(*key), name, NAN if weight is None else weight, *numbers, min(pooled), max(pooled), remark])
            if reason:
                idle.setdefault((key[0], name, reason), []).append(key)
    clauses = []
    for (_, name, reason), keys in idle.items():
        count = sum(len(trainings[key]) for key in keys)
        every = f"all {count} trainings" if count > 1 else "the training"
        some = ", ".join(label(*key) for key in keys)
        some = f"{label(*keys[0])} and {len(keys) - 1} variants" if len(keys) > MOST_NAMES else some
        clauses.append(f"{name} of {some} ({reason} in every epoch of {every})")
    names = ("first epoch", "kept epoch", "smallest", "largest")
    header = [Column("Method"), Column("term"), Column("weight", "number", "g"), *columns("number", *names, form=".4g")]
    note = (
        "mean over batches, then over trainings, of each term as it enters the total loss, so times its weight; kept epoch: "
        "the one that early stopping selected; smallest and largest: over all epochs of all trainings; a weight is '-' if no "
        "field of the method is declared to hold it, or if the training is of an earlier version"
    )
    table = Table("Terms of the training loss", [*header, Column("remark")], rows, note)
    return (table if rows else None), clauses


def _terms(learned: Iterable[Mapping[str, Any]]) -> list[str]:
    """Terms of the loss, in the order of their first epoch; validation scores start with val_."""
    names = dict.fromkeys(name for one in learned for epoch in one["history"] for name in epoch)
    return [name for name in names if not name.startswith("val_")]


def _idle(values: list[list[float]]) -> str:
    """Why a term did not act: zero or constant in every epoch of every training; empty if it changed."""
    if max(map(len, values)) < 2:  # one epoch shows nothing
        return ""
    ranges = [(min(each), max(each)) for each in values if each]
    if all(low == high == 0 for low, high in ranges):
        return "zero"
    same = all(high - low <= CONSTANT * max(abs(low), abs(high)) for low, high in ranges)
    return f"constant within {100 * CONSTANT:.0f} %" if same else ""


def _planted(shown: Shown) -> Section | None:
    table = brains.planted_table(shown.contents)
    text = "This cohort is synthetic, so the ROIs and edges that differ between patients and controls are known."
    return None if table is None else Section("planted", "Planted and found", text, [table])


def _explanations(shown: Shown) -> Iterator[Section]:
    """A section per method with ROIs, edges, phenotypes, gate and maps; then one on site information for all methods."""
    means = shown.contents.mean_explanations
    for method, cells in shown.contents.explanations.items():
        text, drawn = brains.explained_text(means[method], len(cells)), brains.explained_figures(method, means[method], cells)
        tables = brains.explained_tables(method, means[method])
        yield Section("explained", f"Explanations: {method}", text, figures=drawn, folded=tables)
    title = "Site information in the representations"
    table = brains.readability_table(title, means)
    if table is not None:
        yield Section("readability", title, READABILITY, [table], link="Site information")


def _leakage(shown: Shown) -> Section | None:
    rows = []
    for row in shown.contents.checks:
        passed = "passed, with a remark" if row.get("remark") else "passed"
        rows.append([str(row["check"]), passed if row["passed"] else "FAILED", str(row["detail"])])
    rows.append(["target labels, site names and ids hidden from methods", "by construction", "not passed by the interface"])
    header = columns("text", "Check", "Result", "Detail")
    table = Table("Leakage checks", header, rows, "checked in every fold before the study began")
    return Section("leakage", "Leakage checks", tables=[table]) if shown.contents.checks else None


def facts(contents: Contents) -> list[tuple[str, str]]:
    """Settings, versions and training time of the study."""
    study, seconds = contents.study, sum(float(record.get("seconds") or 0) for record in contents.records)
    both = contents.track if contents.adapted is None else f"{STRICT} and {ADAPTED}"
    threads = study.get("threads", 1)
    devices = f"{study.get('device', 'cpu')}, {threads} thread{'s' * (threads != 1)} per cell"
    return [
        ("targets", ", ".join(contents.predictions["target"].unique())),
        *([("tracks", f"{both}; in the adapted one {what_was_seen(contents.batch)}")] if both != STRICT else []),
        ("seeds", ", ".join(map(str, study.get("seeds", [])))),
        ("phenotype inputs", ", ".join(study.get("inputs") or []) or "none"),
        ("selection", "penalties, calibration and early stopping on source subjects only"),
        ("fields changed from their defaults", changed_fields(study, contents.declared) or "none"),
        ("decision threshold", "0.5"),
        ("cells", f"{len(contents.records)} finished, {seconds / 60:.1f} minutes of training and prediction; {devices}"),
        ("cohort hash", str(study.get("cohort_hash", ""))[:16] or "unknown"),
        ("versions", ", ".join(f"{name} {version}" for name, version in contents.environment.items())),
    ]
