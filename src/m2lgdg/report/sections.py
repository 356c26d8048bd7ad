"""The sections of the report, each made only where the study has what it shows.

Between the study's contents and the page: a section is a title, words, tables and figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from m2lgdg.explain.explanation import Explanation, mean_over
from m2lgdg.registry import METHODS, PAPER
from m2lgdg.report import brains, figures
from m2lgdg.report.anonymised import shared_facts
from m2lgdg.report.answer import Answer
from m2lgdg.report.checklists import checklists, known_facts
from m2lgdg.report.contents import Contents, Key
from m2lgdg.report.drawing import Figure
from m2lgdg.report.operating import operating_table, over_seeds
from m2lgdg.report.subgroups import subgroup_table
from m2lgdg.report.tables import Table, changed_fields, label, study_tables, training_table

MOST_MAPS = 3  # targets whose maps stand on the page, so that it stays small
MOST_ROWS = 20


@dataclass
class Section:
    """A part of the page; `folded` tables can be opened, `link` is its name in the contents bar."""

    id: str
    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    folded: list[Table] = field(default_factory=list)
    link: str = ""


def sections(contents: Contents, told: Answer, shared: bool = False) -> list[Section]:
    """All sections, in the order of the page; `shared` contents are not read from the folder again."""
    mean = over_seeds(contents.predictions)
    shown = [key for key in contents.keys if not contents.is_sweep(key) and not (key[0] in PAPER and key[1])] or contents.keys
    *sites, overall = contents.beside(study_tables(contents.cell_scores))
    phenotypes = [(name, "") for name in METHODS.with_role("phenotypes")]
    focus = [key for key in dict.fromkeys([told.main, told.peer, *phenotypes]) if key in contents.keys]
    made = [
        Section("overall", "Over all target sites", tables=[overall]),
        Section("sites", "By target site", figures=[figures.forest(mean, contents.site_scores, shown)], folded=sites),
        _discrimination(mean, shown, focus),
        Section("operating", "At the threshold", THRESHOLD_RULE, folded=[operating_table(contents.predictions)]),
        *_ablations(contents),
        *_sweeps(contents),
        _training(contents),
        *_explanations(contents),
        *_subgroups(contents, told),
        _leakage(contents),
        _checklists(contents, shared),
    ]
    return [one for one in made if one is not None]


THRESHOLD_RULE = (
    "A subject is called a patient where the probability, averaged over seeds, is at least 0.5. The threshold is fixed; "
    "calibration is fitted on source subjects only. A clinic has fewer patients than these cohorts, so predictive values do "
    "not carry over."
)


def _discrimination(mean: pd.DataFrame, shown: list[Key], focus: list[Key]) -> Section | None:
    drawn = [figures.roc_by_target(mean, shown, focus), figures.calibration_by_target(mean, focus)]
    kept = [one for one in drawn if one is not None]
    return Section("curves", "ROC and calibration", figures=kept) if kept else None


def _ablations(contents: Contents) -> Iterator[Section]:
    """One table for each of the paper's methods that was run with variants: the whole first, then what each variant costs."""
    tables = []
    for method in dict.fromkeys(key[0] for key in contents.keys):
        keys = [key for key in contents.keys if key[0] == method and not contents.is_sweep(key)]
        if method in PAPER and len(keys) > 1:
            chosen = contents.cell_scores[[key in keys for key in _pairs(contents.cell_scores)]]
            (*_, table) = contents.beside(study_tables(chosen, best=label(*keys[0])))
            tables.append(replace(table, title=f"Ablations of {method}"))
            pairs = training_table(chosen, method, [variant for _, variant in keys], "Ablations")
            tables += [pairs] if pairs is not None else []
    if tables:
        yield Section("ablations", "Ablations", "Each row leaves out or changes one part; the first row is the whole.", tables)


def _pairs(table: pd.DataFrame) -> list[Key]:
    return list(zip(table["method"], table["variant"], strict=True))


def _sweeps(contents: Contents) -> Iterator[Section]:
    drawn, folded = [], []
    for method, axes in contents.swept.items():
        variants = [key[1] for key in contents.keys if key[0] == method and contents.is_sweep(key)]
        if axes and variants:
            scores = contents.cell_scores[contents.cell_scores["method"] == method]
            default = (contents.study.get("method") or {}).get(method, {})
            drawn.append(figures.sensitivity_curves(method, scores, axes, default))
            folded.append(training_table(scores, method, variants, "Sweeps"))
    if drawn:
        text = "What happens when one field is changed and all others stay."
        kept = [table for table in folded if table is not None]
        yield Section("sensitivity", "Sensitivity", text, figures=drawn, folded=kept)


def _training(contents: Contents) -> Section | None:
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for record in contents.records:
        history = (record.get("learned") or {}).get("history")
        if history and not record["variant"]:
            runs.setdefault(record["method"], []).append(history)
    drawn = figures.training_curves(runs)
    text = "Training stopped, and the kept epoch was chosen, by the validation AUC of source subjects."
    return Section("training", "Training curves", text, figures=[drawn]) if drawn else None


def _explanations(contents: Contents) -> Iterator[Section]:
    """A section a method: top ROIs, glass brain, edges, phenotypes, gate, maps; then how readable sites are, for all."""
    read: list[tuple[str, Explanation]] = []
    for method, cells in contents.explanations().items():
        found = mean_over(one for _, one in cells)
        if found.about.get("readability"):
            read.append((method, found))
        drawn: list[Figure | None] = []
        if found.rois["score"].any():
            drawn += [brains.top_rois(method, found.rois), brains.glass_brain(method, found.rois)]
        drawn += [brains.gate_weights(method, found.gate), *_maps(method, cells)]
        tables = [_scores(f"ROIs, {method}", found.rois, ["rank", "roi", "code", "x", "y", "z", "score", "low", "high"])]
        tables += [_scores(f"Edges, {method}", found.edges, ["roi", "other roi", "score", "low", "high", "direction"])]
        tables += [_scores(f"Phenotypes, {method}", found.phenotypes, ["phenotype", "score", "low", "high", "direction"])]
        count = f"Mean over {len(cells)} explained cell{'s' if len(cells) > 1 else ''}."
        if found.about.get("agreement") is not None:
            agreement = f"{found.about['agreement']:.2f} on average (1: the same order in all)"
            count += f" The ROI ranks of two cells correlate by {agreement}."
        scores = str(found.about["scores"])
        text = f"{scores[0].upper()}{scores[1:]}. {_how_complete(found)}{count}"
        figured, folded = [one for one in drawn if one is not None], [one for one in tables if one.rows]
        yield Section("explained", f"What {method} rests on", text, [], figured, folded, f"Why: {method}")
    if read:
        yield Section(
            "readability", "What representations tell of the site", READABILITY, [_readability(read)], link="Site readability"
        )


READABILITY = (
    "A cross-validated linear probe tries to read site and label from what the classifier sees of source subjects. A "
    "representation of more dimensions lets a probe read more of anything, so their effective number stands beside it."
)


def _how_complete(found: Explanation) -> str:
    error = found.error()
    if error is None:
        return ""
    relative = (
        f"{100 * error['median_relative']:.1f} % of the decision's change (median)" if "median_relative" in error else "nothing"
    )
    return f"Completeness: attributions miss {relative}, at most {error['max_absolute']:.2g} logits. "


def _maps(method: str, cells: list[tuple[dict[str, Any], Explanation]]) -> list[Figure]:
    """Maps of the first seed, of the first few targets."""
    first = {record["target"]: one.map for record, one in reversed(cells) if len(one.map)}
    ordered = [target for target in dict.fromkeys(record["target"] for record, _ in cells) if target in first]
    return [brains.representation_map(method, target, first[target], i) for i, target in enumerate(ordered[:MOST_MAPS])]


def _scores(title: str, table: pd.DataFrame, columns: list[str]) -> Table:
    names = [name for name in columns if name in table]
    top = table[table["score"] > 0].head(MOST_ROWS)[names]
    rows = [[_cell(name, value) for name, value in row.items()] for row in top.to_dict("records")]
    note = f"the {len(rows)} highest of {len(table)}; low and high: interval over folds and seeds"
    return Table(title, names, rows, [[0] * len(names) for _ in rows], note)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return "-" if pd.isna(value) else f"{value:.1f}" if name in "xyz" else f"{value:.4g}"
    return str(value)


def _readability(read: list[tuple[str, Explanation]]) -> Table:
    columns = {"site": "site read", "site_chance": "chance", "label": "label read", "label_chance": "chance of label"}
    rows = []
    for method, found in read:
        numbers = found.about["readability"]
        shares = [f"{100 * numbers[name]:.1f} %" if name in numbers else "-" for name in columns]
        rows.append([method, *shares, f"{numbers['dimensions']:.1f}" if "dimensions" in numbers else "-"])
    header = ["Method", *columns.values(), "effective dimensions"]
    return Table("Readability", header, rows, [[0] * len(header) for _ in rows], "accuracy, mean over explained cells")


def _subgroups(contents: Contents, told: Answer) -> Iterator[Section]:
    if contents.cohort is None:
        return
    keys = [key for key in (told.main, told.peer) if key is not None]
    tables = [subgroup_table(contents.predictions, contents.cohort, *key) for key in keys]
    yield Section("subgroups", "Subgroups", tables=tables[:1], folded=tables[1:])


def _leakage(contents: Contents) -> Section | None:
    if not contents.checks:
        return None
    rows = [[str(one["check"]), "passed" if one["passed"] else "FAILED", str(one["detail"])] for one in contents.checks]
    rows.append(["a method sees no label, site or id of a target", "by construction", "the interface hands over none of them"])
    header = ["Check", "Result", "Detail"]
    table = Table("Leakage checks", header, rows, [[0] * 3 for _ in rows], "looked for in every fold before the study began")
    return Section("leakage", "Leakage checks", tables=[table])


def _checklists(contents: Contents, shared: bool) -> Section:
    tables = []
    known = known_facts(contents.folder, contents.cell_scores)
    for one in checklists(shared_facts(known, contents) if shared else known):
        header = ["Item", "Section", "Topic", "Answer"]
        rows = [[row.item, row.section, row.topic, row.answer] for row in one.rows]
        filled = sum(row.filled for row in one.rows)
        note = f"{one.citation}. {filled} of {len(rows)} items have an answer. {one.note}".rstrip(".")
        tables.append(Table(one.title, header, rows, [[0] * len(header) for _ in rows], note))
    return Section("checklists", "Reporting checklists", CHECKLISTS, folded=tables)


CHECKLISTS = 'What the run knows is filled in; "authors to complete" marks the rest.'


def facts(contents: Contents) -> list[tuple[str, str]]:
    """How the study was run."""
    study, seconds = contents.study, sum(float(record.get("seconds") or 0) for record in contents.records)
    devices = (
        f"{study.get('device', 'cpu')}, {study.get('threads', 1)} thread{'s' if study.get('threads', 1) != 1 else ''} a cell"
    )
    return [
        ("targets", ", ".join(dict.fromkeys(contents.predictions["target"]))),
        ("seeds", ", ".join(map(str, study.get("seeds", [])))),
        ("phenotype inputs", ", ".join(study.get("inputs") or []) or "none"),
        ("selection", "penalties, calibration and early stopping on source subjects only"),
        ("fields changed from their defaults", changed_fields(study) or "none"),
        ("decision threshold", "0.5"),
        ("cells", f"{len(contents.records)} finished, {seconds / 60:.1f} minutes of training and prediction in all; {devices}"),
        ("cohort content", str(study.get("cohort_hash", ""))[:16] or "not known"),
        ("versions", ", ".join(f"{name} {version}" for name, version in contents.environment.items())),
    ]
