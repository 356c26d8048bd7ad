"""Sections of the report, each with a title, text, tables and figures; only those the study has data for.

Made from the contents of a study, and put on the page by `page`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from m2lgdg.explain.explanation import Explanation, roi_label
from m2lgdg.registry import METHODS, PAPER
from m2lgdg.report import brains, figures
from m2lgdg.report.anonymised import shared_facts
from m2lgdg.report.answer import Answer, Data
from m2lgdg.report.checklists import checklists, known_facts
from m2lgdg.report.contents import Contents, Key
from m2lgdg.report.curve import learning_figure, stored_curve
from m2lgdg.report.curve import sentences as curve_sentences
from m2lgdg.report.data import connectomes, site_connectomes, site_table
from m2lgdg.report.drawing import Figure, hues_of
from m2lgdg.report.flow import flow_diagram
from m2lgdg.report.losses import loss_terms
from m2lgdg.report.methods_text import MethodsText, methods_text
from m2lgdg.report.motion import motion_of, motion_table
from m2lgdg.report.operating import comparison_table, operating_table, predictive_table
from m2lgdg.report.planted import planted_table
from m2lgdg.report.subgroups import few_of_a_class, few_of_a_site, subgroup_table
from m2lgdg.report.tables import (
    Table,
    changed_fields,
    label,
    named_key,
    one_panel,
    paired_tables,
    study_tables,
    training_table,
)
from m2lgdg.report.tracks import in_track, level_table, what_was_seen
from m2lgdg.study.predictions import ADAPTED, STRICT
from m2lgdg.study.stats import over_seeds

MOST_MAPS = 3  # targets with maps on the page, to keep it small
MOST_ROWS = 20


@dataclass
class Section:
    """A section of the page; `folded` tables are collapsed, `link` is its name in the table of contents.

    `first` is a figure above its tables, `data` a box of findings, `answer` that of the main result, `paste` a text to copy.
    """

    id: str
    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    folded: list[Table] = field(default_factory=list)
    link: str = ""
    first: Figure | None = None
    data: Data | None = None
    answer: Answer | None = None
    paste: MethodsText | None = None


def sections(
    contents: Contents, summary: Answer, shared: bool = False, *, best: str | None = None, rivals: Sequence[str] = ()
) -> list[Section]:
    """All sections, in the order of the page; with `shared`, no names of people, paths or small groups.

    `best` and `rivals` are those of the paired tests over all target sites, as in `study_tables`.
    """
    mean = over_seeds(contents.predictions)
    tested = [named_key(contents.keys, name) for name in (best, *rivals) if name is not None]
    usual = [key for key in contents.keys if not contents.is_sweep(key) and not (key[0] in PAPER and key[1])] or contents.keys
    shown = [key for key in contents.keys if key in (*usual, *tested)]
    *sites, overall = contents.with_published(
        study_tables(contents.predictions, best, rivals=rivals, scores=contents.cell_scores)
    )
    phenotypes = [(name, "") for name in METHODS.with_role("phenotypes")]
    focus = [key for key in dict.fromkeys([summary.main, summary.peer, *phenotypes]) if key in contents.keys]
    hues = hues_of([*focus, *shown, *contents.keys])  # one colour for a method in all figures
    motion = motion_table(mean, shown, motion_of(contents.cohort))
    parts = [
        _data(contents, summary, shared),
        Section("answer", "Answer", answer=summary),
        _overall(contents, shown, overall, best, rivals),
        _sites(contents, mean, shown, summary, sites, hues),
        _discrimination(mean, shown, focus, hues),
        _operating(contents, mean, focus, hues),
        None if motion is None else Section("motion", "Head motion", MOTION_RULE, [motion]),
        *_subgroups(contents, summary, shared),
        _adapted(contents, shown, best, rivals, hues),
        *_ablations(contents),
        *_sweeps(contents, hues),
        _learning(contents, hues),
        _training(contents, hues),
        _planted(contents),
        *_explanations(contents),
        Section("methods", "Methods, to paste", PASTE, paste=methods_text(contents, motion=motion is not None), link="Methods"),
        _leakage(contents),
        _checklists(contents, shared),
    ]
    return [part for part in parts if part is not None]


THRESHOLD_RULE = (
    "A subject is classified as a patient if the probability, averaged over seeds, is at least 0.5. The threshold is fixed, "
    "and calibration is fitted on source subjects only. Patients are rarer in a clinic than in a case-control cohort: the "
    "table of predictive values shows what the same sensitivity and specificity mean at other prevalences."
)


MOTION_RULE = (
    "Patients often move more than controls, and motion changes connectivity, so part of an AUC can be motion. The adjusted "
    "AUC compares each patient with controls of the same site who moved as much."
)
PASTE = "A draft from the files of this study. A click selects it."


def _data(contents: Contents, summary: Answer, shared: bool) -> Section:
    """Who was included, what the sites are like, what the check of the cohort reported, and mean connectomes."""
    table = site_table(contents)
    figure, edges = (None, None) if shared and few_of_a_class(contents.description) else connectomes(contents)
    by_site = None if shared and few_of_a_site(contents.description) else site_connectomes(contents)
    return Section(
        "data",
        "Data",
        summary.cohort,
        [table] if table else [],
        [each for each in (figure, by_site) if each is not None],
        [edges] if edges else [],
        first=flow_diagram(contents),
        data=summary.data,
    )


def _learning(contents: Contents, hues: Mapping[Key, int]) -> Section | None:
    """The learning curve, if `m2lgdg curve` wrote it into this folder or into its folder `curve`."""
    curve = stored_curve(contents.folder)
    if curve is None:
        return None
    return Section("learning", "Learning curve", " ".join(curve_sentences(curve, None)), figures=[learning_figure(curve, hues)])


def _planted(contents: Contents) -> Section | None:
    table = planted_table(contents)
    text = "This cohort is synthetic, so the ROIs and edges that differ between patients and controls are known."
    return None if table is None else Section("planted", "Planted and found", text, [table])


def _overall(contents: Contents, shown: list[Key], everything: Table, best: str | None, rivals: Sequence[str]) -> Section:
    """The macro table, and folded the tests of all metrics (Panel B of the paper).

    Ablations and values of sweeps are only in a folded macro table, because they would fill the first page.
    """
    title = "Over all target sites"
    predictions, scores = _parts_of(contents, shown)
    panel = one_panel(paired_tables(predictions, best, rivals=rivals, scores=scores))
    if len(shown) == len(contents.keys):
        return Section("overall", title, tables=[_best_first(everything)], folded=panel)
    (*_, table) = contents.with_published(study_tables(predictions, best, rivals=rivals, scores=scores))
    more = len(contents.keys) - len(shown)
    text = f"The folded table below also has the {more} ablations and sweep values of this study."
    methods = _best_first(replace(table, title="Methods over all target sites"))
    return Section("overall", title, text, [methods], folded=[everything, *panel])


def _best_first(table: Table) -> Table:
    """The rows of a macro table by AUC, highest first; rows without an AUC last."""
    column = table.header.index("AUC")

    def area(row: list[str]) -> float:
        value = row[column].partition(" ")[0]
        return -math.inf if value == "-" else float(value)

    order = sorted(range(len(table.rows)), key=lambda i: -area(table.rows[i]))
    return replace(table, rows=[table.rows[i] for i in order], ranks=[table.ranks[i] for i in order])


def _adapted(
    contents: Contents, shown: list[Key], best: str | None, rivals: Sequence[str], hues: Mapping[Key, int]
) -> Section | None:
    """The adapted track of a study with both tracks: its own tables, tests and forest plot, and one table with both tracks."""
    adapted = contents.of_adapted_track()
    if adapted is None:
        return None
    keys = [key for key in shown if key in adapted.keys]
    predictions, scores = _parts_of(adapted, keys)
    *sites, overall = adapted.with_published(study_tables(predictions, best, rivals=rivals, scores=scores))
    panel = in_track(one_panel(paired_tables(predictions, best, rivals=rivals, scores=scores)), ADAPTED, adapted.batch)
    operating = in_track([operating_table(adapted.predictions)], ADAPTED, adapted.batch)
    first = f"Adapted track: {what_was_seen(adapted.batch)}. "
    forest = figures.forest(over_seeds(adapted.predictions), adapted.site_scores, keys, "forest-adapted", first, hues)
    text = (
        f"In this track {what_was_seen(adapted.batch)}. All other sections are of the strict track, which sees nothing of it."
    )
    both = level_table(contents.predictions, adapted.predictions, adapted.batch)
    return Section("adapted", "Adapted track", text, [_best_first(overall), both], [forest], [*sites, *panel, *operating])


def _parts_of(contents: Contents, keys: list[Key]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predictions and cell scores of some methods and variants."""
    predictions, scores = (
        table[[key in keys for key in _pairs(table)]] for table in (contents.predictions, contents.cell_scores)
    )
    return predictions, scores


def _sites(
    contents: Contents,
    mean: pd.DataFrame,
    shown: list[Key],
    summary: Answer,
    tables: list[Table],
    hues: Mapping[Key, int],
) -> Section:
    """Forest plot, the main method compared with its simple peer, and a table for each site."""
    comparison = None if summary.peer is None else comparison_table(mean, summary.main, summary.peer)
    folded = [*([] if comparison is None else [comparison]), *tables]
    drawn = figures.forest(mean, contents.site_scores, shown, hues=hues)
    return Section("sites", "By target site", figures=[drawn], folded=folded)


def _operating(contents: Contents, mean: pd.DataFrame, focus: list[Key], hues: Mapping[Key, int]) -> Section:
    curve = figures.decision_curves(mean, focus, hues)
    shown, folded = [predictive_table(mean, focus)], [operating_table(contents.predictions)]
    return Section("operating", "Operating point", THRESHOLD_RULE, shown, [curve] if curve else [], folded)


def _discrimination(mean: pd.DataFrame, shown: list[Key], focus: list[Key], hues: Mapping[Key, int]) -> Section | None:
    curves = (figures.roc_by_target(mean, shown, focus, hues), figures.calibration_by_target(mean, focus, hues))
    drawn = [figure for figure in curves if figure is not None]
    return Section("curves", "ROC and calibration", figures=drawn) if drawn else None


def _ablations(contents: Contents) -> Iterator[Section]:
    """Tables of the variants of each method of the paper: the full method first, then each variant."""
    tables = []
    for method in dict.fromkeys(key[0] for key in contents.keys):
        keys = [key for key in contents.keys if key[0] == method and not contents.is_sweep(key)]
        if method in PAPER and len(keys) > 1:
            predictions, scores = _parts_of(contents, keys)
            (*_, table) = contents.with_published(study_tables(predictions, label(*keys[0]), scores=scores))
            tables.append(replace(table, title=f"Ablations of {method}"))
            pairs = training_table(contents.cell_scores, method, [variant for _, variant in keys], "Ablations")
            tables += [pairs] if pairs is not None else []
    if tables:
        text = "The first row is the full method; each other row leaves out or changes one part."
        yield Section("ablations", "Ablations", text, tables)


def _pairs(table: pd.DataFrame) -> list[Key]:
    return list(zip(table["method"].tolist(), table["variant"].tolist(), strict=True))


def _sweeps(contents: Contents, hues: Mapping[Key, int]) -> Iterator[Section]:
    drawn, folded = [], []
    for method, axes in contents.swept.items():
        variants = [key[1] for key in contents.keys if key[0] == method and contents.is_sweep(key)]
        if axes and variants:
            scores = contents.cell_scores[contents.cell_scores["method"] == method]
            default = (contents.study.get("method") or {}).get(method, {})
            drawn.append(figures.sensitivity_curves(method, scores, axes, default, hues.get((method, ""), 0)))
            folded.append(training_table(scores, method, variants, "Sweeps"))
    if drawn:
        text = "Effect of changing one field (hyper-parameter) while all others are unchanged."
        tables = [table for table in folded if table is not None]
        yield Section("sensitivity", "Sensitivity", text, figures=drawn, folded=tables)


def _training(contents: Contents, hues: Mapping[Key, int]) -> Section | None:
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for record in contents.records:
        history = (record.get("learned") or {}).get("history")
        if history and not record["variant"]:
            runs.setdefault(record["method"], []).append(history)
    drawn = figures.training_curves(runs, hues)
    text = "Early stopping: the epoch with the highest AUC on source-validation subjects is used."
    table, idle = loss_terms(contents.records)
    if idle:
        text += f" Terms of the loss that did not act, so that their weight changed nothing: {'; '.join(idle)}."
    tables = [] if table is None else [table]
    return Section("training", "Training curves", text, figures=[drawn], folded=tables) if drawn else None


def _explanations(contents: Contents) -> Iterator[Section]:
    """A section per method with ROIs, edges, phenotypes, gate and maps; then one on site information for all methods."""
    probed: list[tuple[str, Explanation]] = []
    for method, cells in contents.explanations().items():
        mean = contents.mean_explanations[method]
        if mean.about.get("readability"):
            probed.append((method, mean))
        drawn: list[Figure | None] = []
        tables = []
        for name, part in named_parts(method, mean).items():
            if part.rois["score"].any():
                drawn += [brains.top_rois(name, part.rois), brains.glass_brain(name, part.rois)]
                drawn += [brains.top_edges(name, part.edges, part.rois)]
            tables += [_scores(f"ROIs, {name}", part.rois, ["rank", "roi", "code", "x", "y", "z", "score", "low", "high"])]
            tables += [_grouped(name, part, by) for by in ("lobe", "network")]
            tables += [_scores(f"Edges, {name}", part.edges, ["roi", "other roi", "score", "low", "high", "direction"])]
        tables.insert(0, _lobes_over_atlases(method, mean))
        drawn += [brains.gate_weights(method, mean.gate), *_maps(method, cells)]
        tables += [_scores(f"Phenotypes, {method}", mean.phenotypes, ["phenotype", "score", "low", "high", "direction"])]
        count = f"Mean over {len(cells)} explained cell{'s' if len(cells) > 1 else ''}."
        if mean.about.get("agreement") is not None:
            count += f" Mean rank correlation of ROI scores between cells: {mean.about['agreement']:.2f} (1: identical order)."
        scores = str(mean.about["scores"])
        text = " ".join([f"{scores[0].upper()}{scores[1:]}. {_completeness(mean)}{count}", *mean.lacking(), *mean.about_rois()])
        shown, folded = [figure for figure in drawn if figure is not None], [table for table in tables if table.rows]
        yield Section("explained", f"Explanations: {method}", text, [], shown, folded)
    if probed:
        title = "Site information in the representations"
        yield Section("readability", title, READABILITY, [_readability(title, probed)], link="Site information")


def named_parts(method: str, explanation: Explanation) -> dict[str, Explanation]:
    """Explanation of each atlas, by a name for tables and figures: that of the method, with the atlas if there are several."""
    parts = explanation.by_atlas()
    return {f"{method} ({atlas})" if len(parts) > 1 else method: part for atlas, part in parts.items()}


READABILITY = (
    "Accuracy of a cross-validated linear probe that predicts site or label from the classifier's input, for source subjects. "
    "A probe finds more of any information in more dimensions, so the table includes the effective number of dimensions."
)


def _completeness(explanation: Explanation) -> str:
    error = explanation.error()
    if error is None:
        return ""
    relative = f"median {100 * error['median_relative']:.1f} % of the decision, " if "median_relative" in error else ""
    return f"Completeness error of the attributions: {relative}at most {error['max_absolute']:.2g} logits. "


def _maps(method: str, cells: list[tuple[dict[str, Any], Explanation]]) -> list[Figure]:
    """Maps of the first seed for the first few targets."""
    first = {record["target"]: each.map for record, each in reversed(cells) if len(each.map)}
    ordered = [target for target in dict.fromkeys(record["target"] for record, _ in cells) if target in first]
    return [brains.representation_map(method, target, first[target], i) for i, target in enumerate(ordered[:MOST_MAPS])]


def _scores(title: str, table: pd.DataFrame, columns: list[str]) -> Table:
    names = [name for name in columns if name in table]
    top = table[table["score"] > 0].head(MOST_ROWS)[names]
    rows = [[_cell(name, value) for name, value in row.items()] for row in top.to_dict("records")]
    note = f"{len(rows)} highest of {len(table)} scores; low, high: interval over folds and seeds"
    return Table(title, names, rows, [[0] * len(names) for _ in rows], note)


def _lobes_over_atlases(method: str, explanation: Explanation) -> Table:
    """Proportion of the ROI scores of each lobe, by atlas and their mean; without rows unless two atlases have lobes."""
    table = explanation.over_atlases()
    names = ["lobe", "mean", *(str(name) for name in table.columns[2:])]
    rows = [[str(lobe), *(f"{100 * value:.1f} %" for value in values)] for lobe, *values in table.itertuples(index=False)]
    note = "proportion of the sum of all ROI scores of an atlas; mean: over atlases, each counting the same"
    return Table(f"ROI scores by lobe over atlases, {method}", names, rows, [[0] * len(names) for _ in rows], note)


def _grouped(method: str, explanation: Explanation, by: str) -> Table:
    """Sums of the ROI scores of each lobe or network; without rows if the atlas has none."""
    groups = explanation.by_group(by)
    total = groups["score"].sum() or 1.0
    rows = [
        [
            str(row[by]),
            str(row["rois"]),
            f"{row['score']:.4g}",
            f"{100 * row['score'] / total:.1f} %",
            f"{row['score per roi']:.4g}",
        ]
        for row in groups.to_dict("records")
        if row["score"] > 0
    ]
    names = [by, "ROIs", "score", "of all", "score per ROI"]
    note = f"sum of the scores of the ROIs of each {by}; a {by} with more ROIs has a higher sum"
    return Table(f"ROI scores by {by}, {method}", names, rows, [[0] * len(names) for _ in rows], note)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return "-" if pd.isna(value) else f"{value:.1f}" if name in "xyz" else f"{value:.4g}"
    return roi_label(str(value)) if name in ("roi", "other roi") else str(value)


def _readability(title: str, probed: list[tuple[str, Explanation]]) -> Table:
    columns = {"site": "site accuracy", "site_chance": "site chance", "label": "label accuracy", "label_chance": "label chance"}
    rows = []
    for method, explanation in probed:
        numbers = explanation.about["readability"]
        accuracies = [f"{100 * numbers[name]:.1f} %" if name in numbers else "-" for name in columns]
        rows.append([method, *accuracies, f"{numbers['dimensions']:.1f}" if "dimensions" in numbers else "-"])
    header = ["Method", *columns.values(), "effective dimensions"]
    return Table(title, header, rows, [[0] * len(header) for _ in rows], "accuracy of linear probes, mean over explained cells")


def _subgroups(contents: Contents, summary: Answer, shared: bool) -> Iterator[Section]:
    if contents.cohort is None:
        return
    keys = [key for key in (summary.main, summary.peer) if key is not None]
    tables = [subgroup_table(contents.predictions, contents.cohort, *key, hide_small=shared) for key in keys]
    yield Section("subgroups", "Subgroups", tables=tables[:1], folded=tables[1:])


def _leakage(contents: Contents) -> Section | None:
    if not contents.checks:
        return None
    rows = [[str(row["check"]), _passed(row), str(row["detail"])] for row in contents.checks]
    rows.append(["target labels, site names and ids hidden from methods", "by construction", "not passed by the interface"])
    header = ["Check", "Result", "Detail"]
    table = Table("Leakage checks", header, rows, [[0] * 3 for _ in rows], "checked in every fold before the study began")
    return Section("leakage", "Leakage checks", tables=[table])


def _passed(check: dict[str, Any]) -> str:
    if not check["passed"]:
        return "FAILED"
    return "passed, with a remark" if check.get("remark") else "passed"


def _checklists(contents: Contents, shared: bool) -> Section:
    tables = []
    known = known_facts(contents.folder, contents.cell_scores)
    for checklist in checklists(shared_facts(known, contents) if shared else known):
        header = ["Item", "Section", "Topic", "Answer"]
        rows = [[row.item, row.section, row.topic, row.answer] for row in checklist.rows]
        filled = sum(row.filled for row in checklist.rows)
        note = f"{checklist.citation}. {filled} of {len(rows)} items have an answer. {checklist.note}".rstrip(".")
        tables.append(Table(checklist.title, header, rows, [[0] * len(header) for _ in rows], note))
    return Section("checklists", "Reporting checklists", CHECKLISTS, folded=tables)


CHECKLISTS = 'Filled in from the files of the study; the rest reads "authors to complete".'


def facts(contents: Contents) -> list[tuple[str, str]]:
    """Settings, versions and training time of the study."""
    study, seconds = contents.study, sum(float(record.get("seconds") or 0) for record in contents.records)
    both = contents.track if contents.adapted is None else f"{STRICT} and {ADAPTED}"
    devices = (
        f"{study.get('device', 'cpu')}, {study.get('threads', 1)} thread{'s' if study.get('threads', 1) != 1 else ''} per cell"
    )
    return [
        ("targets", ", ".join(contents.predictions["target"].unique())),
        *([("tracks", f"{both}; in the adapted one {what_was_seen(contents.batch)}")] if both != STRICT else []),
        ("seeds", ", ".join(map(str, study.get("seeds", [])))),
        ("phenotype inputs", ", ".join(study.get("inputs") or []) or "none"),
        ("selection", "penalties, calibration and early stopping on source subjects only"),
        ("fields changed from their defaults", changed_fields(study) or "none"),
        ("decision threshold", "0.5"),
        ("cells", f"{len(contents.records)} finished, {seconds / 60:.1f} minutes of training and prediction; {devices}"),
        ("cohort hash", str(study.get("cohort_hash", ""))[:16] or "unknown"),
        ("versions", ", ".join(f"{name} {version}" for name, version in contents.environment.items())),
    ]
