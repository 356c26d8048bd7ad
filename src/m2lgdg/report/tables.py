"""The paper's tables from the predictions of a study, as text, Markdown, LaTeX or CSV.

One table per target site (mean and sd over seeds, interval of the AUC), the macro average over sites with paired tests of each
method against one, these tests for all metrics (the paper's Panel B), and, for studies with seeds and variants, each variant
against the full method. Made from predictions; used by `m2lgdg table` and by the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from m2lgdg.data.spreadsheets import csv_text
from m2lgdg.metrics import PAPER_METRICS, THRESHOLD, delong_interval
from m2lgdg.report.escaping import latex, markdown
from m2lgdg.storage import InputError
from m2lgdg.study.stats import cell_scores, macro_scores, over_seeds, paired_tests, site_scores, training_differences

FEW = 5  # with fewer sites, tests and intervals over sites have little power
Format = Literal["text", "markdown", "latex", "csv"]
PERCENT = {"ACC", "SEN", "SPE", "F1", "AUC"}
INTERVAL = "AUC 95 % interval"
PANEL = "Paired tests over target sites"  # Panel B of the paper
WORDED = 60  # letters; longer cells are sentences
Key = tuple[str, str]
Lookup = dict[tuple[str, str, str], dict[Any, Any]]


@dataclass(frozen=True)
class Table:
    """A titled table of strings; `ranks` (row, column) is 1 for the best of a column, 2 for the second, else 0.

    `target` is the site of its scores, or "all".
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    ranks: list[list[int]]
    note: str = ""
    target: str = ""

    @property
    def worded(self) -> bool:
        """Whether it has sentences rather than numbers."""
        return any(len(cell) > WORDED for row in self.rows for cell in row[1:])

    @property
    def ranked(self) -> bool:
        """Whether best and second are marked."""
        return any(any(row) for row in self.ranks)


def main_method(study: Mapping[str, Any], predictions: pd.DataFrame, rivals: Sequence[str] = ()) -> str | None:
    """Main method of a study, to test against the others; None if it has none, or none that was run."""
    name = study.get("main")
    ran = ((predictions["method"] == name) & (predictions["variant"] == "")).any()
    return str(name) if ran and name not in rivals else None


def study_tables(
    predictions: pd.DataFrame,
    best: str | None = None,
    *,
    rivals: Sequence[str] = (),
    scores: pd.DataFrame | None = None,
) -> list[Table]:
    """A table for each target site, then the macro table; the `rivals`, by default all others, are tested against `best`.

    By default `best` has the highest macro AUC. Among variants of one method it is the method itself, because the highest of
    many variants is also the luckiest. `scores` are those of the cells (`stats.cell_scores`), if they are already computed.
    """
    sites, macro, keys = _scored(predictions, scores)
    chosen, selected = _best(macro, keys, best, constant_keys(predictions))
    others = _rivals(keys, chosen, rivals)
    mean = over_seeds(predictions)
    constant = {metric: _constant(predictions, metric) for metric in PAPER_METRICS}
    tables = []
    for site in dict.fromkeys(sites["target"]):
        unranked = {metric: {key for key in keys if of.get((*key, site))} for metric, of in constant.items()}
        tables.append(_site_table(sites, mean, keys, unranked, site))
    unranked = {metric: _of_all_targets(of) for metric, of in constant.items()}
    return [
        *tables,
        _macro_table(sites, macro, keys, chosen, others, selected, unranked, len(mean.drop_duplicates(["target", "subject"]))),
    ]


def _scored(predictions: pd.DataFrame, scores: pd.DataFrame | None) -> tuple[pd.DataFrame, pd.DataFrame, list[Key]]:
    """Site scores and macro scores of the paper's metrics, and every (method, variant) in their order."""
    sites = site_scores(cell_scores(predictions, PAPER_METRICS) if scores is None else scores)
    sites = sites[sites["metric"].isin(PAPER_METRICS)]
    return sites, macro_scores(sites), list(dict.fromkeys(zip(sites["method"], sites["variant"], strict=True)))


def paired_tables(
    predictions: pd.DataFrame,
    best: str | None = None,
    *,
    rivals: Sequence[str] = (),
    scores: pd.DataFrame | None = None,
) -> list[Table]:
    """Panel B of the paper, a table per metric: `best` minus each rival, with t, p and Holm-adjusted p over target sites.

    `best` and `scores` are as in `study_tables`. Empty with one target site or one method, where there is nothing to test.
    """
    sites, macro, keys = _scored(predictions, scores)
    chosen, selected = _best(macro, keys, best, constant_keys(predictions))
    return panels_of(sites, chosen, _rivals(keys, chosen, rivals), selected)


def panels_of(sites: pd.DataFrame, best: Key, rivals: Sequence[Key], selected: int = 1) -> list[Table]:
    """`paired_tables` from site scores, such as published ones; `best` was selected from so many methods."""
    count = sites["target"].nunique()
    if count < 2 or not rivals:
        return []
    note = (
        f"{label(*best)} minus each method, in percentage points (positive: {label(*best)} is better); two-sided paired "
        f"t-tests over {count} target sites, each the mean over seeds; Holm-corrected within each metric"
    )
    note += f" (little power with {count} sites)" if count < FEW else ""
    note += f"; {chosen_among(label(*best), selected)}" if selected > 1 else ""
    tests = paired_tests(sites, best, rivals)
    fewer = tests[tests["sites"] < count]
    clauses = (f"{row.metric} of {label(row.method, row.variant)} ({row.sites})" for row in fewer.itertuples())
    note += f"; over fewer sites: {', '.join(clauses)}" if len(fewer) else ""
    tables = []
    for metric in [metric for metric in PAPER_METRICS if metric in set(tests["metric"])]:
        rows = []
        for row in tests[tests["metric"] == metric].to_dict("records"):
            numbers = [_signed(100 * row["delta"]), _number(row["t"], ".2f"), _p_value(row["p"]), _p_value(row["p_holm"])]
            rows.append([label(row["method"], row["variant"]), *numbers])
        header = ["Method", f"{metric} difference", f"{metric} t", f"{metric} p", f"{metric} p (Holm)"]
        tables.append(Table(f"{PANEL}, {metric}", header, rows, [[0] * len(header) for _ in rows], note))
    return tables


def one_panel(tables: list[Table]) -> list[Table]:
    """The tables of `paired_tables` next to each other as one wide table, as the paper prints them; empty if there are none."""
    if not tables:
        return []
    header = ["Method", *(name for table in tables for name in table.header[1:])]
    same_method = zip(*(table.rows for table in tables), strict=True)
    rows = [[parts[0][0], *(cell for row in parts for cell in row[1:])] for parts in same_method]
    return [replace(tables[0], title=PANEL, header=header, rows=rows, ranks=[[0] * len(header) for _ in rows])]


def chosen_among(name: str, count: int) -> str:
    """Sentence for a method that was selected by its AUC at the sites it is reported for."""
    return f"{name} was chosen for its AUC, the highest of {count} methods at these very sites, so this AUC is optimistic"


def constant_keys(predictions: pd.DataFrame) -> set[Key]:
    """(method, variant) of methods that give all subjects of a cell the same probability, such as `prior`."""
    return _of_all_targets(_constant(predictions, "AUC"))


def _constant(predictions: pd.DataFrame, metric: str) -> dict[tuple[str, str, str], bool]:
    """Whether a score says nothing about subjects, by (method, variant, target).

    That is so if all subjects of each cell have the same probability (AUC) or the same decision (other metrics).
    """
    cell = ["method", "variant", "target", "seed"]
    values = predictions["proba"] if metric == "AUC" else predictions["proba"] >= THRESHOLD
    same = predictions[cell].assign(value=values).groupby(cell, sort=False)["value"].nunique() == 1
    result = same.groupby(level=cell[:3], sort=False).all()
    return {(str(method), str(variant), str(target)): bool(each) for (method, variant, target), each in result.items()}


def _of_all_targets(constant: Mapping[tuple[str, str, str], bool]) -> set[Key]:
    varying = {(method, variant) for (method, variant, _), same in constant.items() if not same}
    return {(method, variant) for method, variant, _ in constant} - varying


def training_tables(scores: pd.DataFrame) -> list[Table]:
    """One table for each method with variants and several seeds (`training_table`)."""
    variants_of = scores[scores["variant"] != ""].groupby("method", sort=False)["variant"].unique()
    tables = [training_table(scores, str(method), list(map(str, variants))) for method, variants in variants_of.items()]
    return [table for table in tables if table is not None]


def training_table(scores: pd.DataFrame, method: str, variants: list[str], what: str = "Variants") -> Table | None:
    """AUC of each variant minus that of the method, paired by site and seed; None with one seed or without the full method."""
    chosen = (scores["method"] == method) & scores["variant"].isin(["", *variants]) & (scores["metric"] == "AUC")
    areas = scores[chosen]
    if "" not in set(areas["variant"]) or areas["seed"].nunique() == 1:
        return None
    rows = []
    for row in training_differences(areas, method).to_dict("records"):
        mean, half = -100 * row["mean"], 100 * row["half"]
        ends = [_signed(mean), _signed(mean - half), _signed(mean + half)]
        rows.append([row["variant"], str(row["trainings"]), *ends])
    if not rows:  # no site and seed has both
        return None
    header = ["Variant", "trainings", f"AUC minus that of {method}", "low", "high"]
    note = (
        f"AUC of the variant minus that of {method} (negative: the variant is worse), paired by site and seed; 95 % t interval "
        "from the variance over seeds within sites, so for training randomness at these sites only; not corrected for the "
        "number of rows"
    )
    return Table(f"{what} of {method}, paired by site and seed", header, rows, [[0] * len(header) for _ in rows], note)


def changed_fields(study: dict[str, Any]) -> str:
    """Methods of a study with fields that differ from the defaults, and these fields; empty if there are none."""
    from m2lgdg.registry import load_methods

    changes_of = []
    for name, fields in (study.get("method") or {}).items():
        if name not in load_methods():  # a plugin that is not loaded here
            changes_of += [f"possibly {name} (a plugin; its fields are in study.json)"] if fields else []
            continue
        declared = load_methods().declaration(name)
        default = json.loads(json.dumps({**declared.fields}))  # tuples become lists, as in study.json
        changed = {field: value for field, value in fields.items() if default.get(field) != value}
        for variant, changes in declared.variants.items():
            if changed and json.loads(json.dumps({**changes})) == changed:
                changed = {"variant": variant}
        if changed:
            changes_of.append(f"{name} ({_assignments(changed)})")
    return "; ".join(changes_of)


def variant_fields(method: str, variant: str) -> str:
    """Fields that a variant of a method of the paper sets; empty for other methods and for sweep values."""
    from m2lgdg.registry import METHODS, PAPER

    known = METHODS.declaration(method).variants if method in PAPER else {}
    return f"{variant}: {_assignments(known[variant]) or 'the full method'}" if variant in known else ""


def _assignments(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{field} = {json.dumps(value)}" for field, value in fields.items())


def label(method: str, variant: str) -> str:
    """Name of a method and variant in tables; a plus sign only for added phenotypes, because an ablation removes something."""
    if not variant:
        return method
    return f"{method} + {variant}" if variant == "phenotypes" else f"{method}: {variant}"


def named_key(keys: list[Key], name: str) -> Key:
    """The (method, variant) with this name in tables, or else the first of the method with this name."""
    by_name = {method: (method, variant) for method, variant in reversed(keys)} | {label(*key): key for key in keys}
    if name not in by_name:
        raise InputError(f"the study has no method {name}; it has {', '.join(label(*key) for key in keys)}.")
    return by_name[name]


def _rivals(keys: list[Key], best: Key, names: Sequence[str]) -> list[Key]:
    """The methods to test against `best`: those named, by default all others."""
    rivals = list(dict.fromkeys(named_key(keys, name) for name in names)) if names else [key for key in keys if key != best]
    if best in rivals:
        raise InputError(f"{label(*best)} cannot be its own rival; choose another --rival, or another --best.")
    return rivals


def _best(macro: pd.DataFrame, keys: list[Key], name: str | None, constant: set[Key]) -> tuple[Key, int]:
    """The method to compare the others with, and the number of methods it was selected from (1: not by its AUC)."""
    if name is not None:
        return named_key(keys, name), 1
    if len({method for method, _ in keys}) == 1 and (keys[0][0], "") in keys:
        return (keys[0][0], ""), 1
    area = macro[macro["metric"] == "AUC"].set_index(["method", "variant"])
    ranked = area.sort_values(["sites", "mean"], ascending=False, kind="stable", na_position="last")
    rows = [(str(method), str(variant)) for method, variant in ranked.index]
    learned = [key for key in rows if key not in constant]
    return (learned or rows or keys)[0], max(len(learned), 1)


def _site_table(
    scores: pd.DataFrame, mean: pd.DataFrame, keys: list[Key], unranked: Mapping[str, set[Key]], site: str
) -> Table:
    at_site = _by_key(scores[scores["target"] == site])
    values = np.array([[_lookup(at_site, (*key, metric), "mean") for metric in PAPER_METRICS] for key in keys])
    parts = dict(iter(mean[mean["target"] == site].groupby(["method", "variant"], sort=False)))
    rows = []
    for key in keys:
        part = parts.get(key, mean.iloc[:0])
        low, high = delong_interval(part["label"].to_numpy(), part["proba"].to_numpy()) if len(part) else (np.nan, np.nan)
        interval = "-" if np.isnan(low) or key in unranked["AUC"] else f"{100 * low:.2f} to {100 * high:.2f}"
        rows.append([label(*key), str(len(part)) if len(part) else "-", *_scores(at_site, key), interval])
    several = sorted({int(row["seeds"]) for row in at_site.values() if row["seeds"] > 1})
    seeds = " to ".join(str(count) for count in dict.fromkeys([*several[:1], *several[-1:]]))
    subjects = mean[mean["target"] == site].drop_duplicates("subject")
    note = f"{len(subjects)} subjects, {int(subjects['label'].sum())} of them patients; scores in %; "
    note += f"mean ± sd over {seeds} seeds (one seed where no sd is given)" if seeds else "one seed"
    note += "; 95 % interval: DeLong's, over subjects (none for an AUC of 0 or 100 and for constant probabilities)"
    if seeds:
        note += ", of the probabilities averaged over seeds, whose AUC is often above the mean AUC of single seeds"
    header = ["Method", "n", *PAPER_METRICS, INTERVAL]
    return Table(f"Target {site}", header, rows, [[0, *row, 0] for row in _ranks(values, keys, unranked)], note, site)


def _macro_table(
    scores: pd.DataFrame,
    macro: pd.DataFrame,
    keys: list[Key],
    best: Key,
    rivals: list[Key],
    selected: int,
    unranked: Mapping[str, set[Key]],
    subjects: int,
) -> Table:
    from m2lgdg.registry import FC_NETWORK

    by_key = _by_key(macro)
    values = np.array([[_lookup(by_key, (*key, metric), "mean") for metric in PAPER_METRICS] for key in keys])
    areas = scores[scores["metric"] == "AUC"]
    differences, tests = _by_key(paired_tests(areas, best)), _by_key(paired_tests(areas, best, rivals))
    rows, compared = [], len(keys) > 1
    for key in keys:
        difference, p = _lookup(differences, (*key, "AUC"), "delta"), _lookup(tests, (*key, "AUC"), "p_holm")
        test = ["", ""] if key == best else [_signed(-100 * difference), _p_value(p)]
        rows.append([label(*key), *_scores(by_key, key), *(test if compared else [])])
    header = ["Method", *PAPER_METRICS, *([f"AUC minus that of {label(*best)}", "p (Holm)"] if compared else [])]
    ranks = [[*row, *([0, 0] if compared else [])] for row in _ranks(values, keys, unranked)]
    tested = "" if len(rivals) == len(keys) - 1 else ", ".join(label(*key) for key in rivals)
    note = _macro_note(len(set(scores["target"])), subjects, label(*best), selected, compared, tested)
    note += _fewer_sites(by_key, keys, len(set(scores["target"])))
    variants = "; ".join(filter(None, (variant_fields(*key) for key in keys)))
    note += f". {variants}" if variants else ""
    shared = [name for name in dict.fromkeys(method for method, _ in keys) if name in FC_NETWORK]
    note += f". {', '.join(shared)}: the algorithm on m2lgdg's own FC network" if shared else ""
    return Table("Macro average over target sites", header, rows, ranks, note, "all")


def _macro_note(sites: int, subjects: int, best: str, selected: int, compared: bool, tested: str) -> str:
    if sites == 1:
        note = f"one target site, {subjects} subjects, so no tests"
    else:
        note = f"mean ± sd in % over {sites} target sites, {subjects} subjects"
        if compared:
            note += f"; differences are each row minus {best} (negative: worse than {best}), with paired t-tests over sites, "
            note += f"of {tested} only, " if tested else ""
            note += "Holm-corrected within AUC" + (f" (little power with {sites} sites)" if sites < FEW else "")
    return note + (f"; {chosen_among(best, selected)}" if selected > 1 else "")


def _fewer_sites(by_key: Lookup, keys: list[Key], sites: int) -> str:
    """Clause on rows whose AUC is defined at some of the sites only."""
    counts = {label(*key): int(_lookup(by_key, (*key, "AUC"), "sites")) for key in keys}
    fewer = ", ".join(f"{name} ({count})" for name, count in counts.items() if count < sites)
    if fewer and len(set(counts.values())) == 1:
        fewer = f"all methods ({min(counts.values())})"
    return f"; AUC over fewer than {sites} sites: {fewer}" if fewer else ""


def _scores(table: Lookup, key: Key) -> list[str]:
    """Mean and sd of each metric of one row, as text."""
    return [_shown(metric, *(_lookup(table, (*key, metric), name) for name in ("mean", "sd"))) for metric in PAPER_METRICS]


def _by_key(table: pd.DataFrame) -> Lookup:
    """Rows of a table by method, variant and metric; looking them up in pandas takes longer than computing them."""
    return {(row["method"], row["variant"], row["metric"]): row for row in table.to_dict("records")}


def _lookup(table: Lookup, key: tuple[str, str, str], column: str) -> float:
    return float(table[key][column]) if key in table else np.nan


def _shown(metric: str, mean: float, sd: float) -> str:
    scale = 100 if metric in PERCENT else 1
    spread = "" if np.isnan(sd) else f" ± {scale * sd:.2f}"
    return _number(scale * mean, ".2f") + spread


def _number(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def _signed(value: float) -> str:
    """A difference with its sign; what rounds to zero has a plus."""
    text = _number(value, "+.2f")
    return "+0.00" if text == "-0.00" else text


def _p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else _number(p, ".3f")


def _ranks(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], keys: list[Key], unranked: Mapping[str, set[Key]]
) -> list[list[int]]:
    """1 for every best value of a column, 2 for every second best; equal values (as printed) share a rank.

    A constant method has no rank: calling everybody a patient gives the highest sensitivity and is no merit.
    """
    ranks = np.zeros((values.shape[0], values.shape[1] + 1), dtype=int)
    ranked = np.where([[key in unranked[metric] for metric in PAPER_METRICS] for key in keys], np.nan, values)
    for column in range(values.shape[1]):
        printed = np.round(100 * ranked[:, column], 2)
        distinct = sorted({value for value in printed.tolist() if not np.isnan(value)}, reverse=True)
        for rank, value in enumerate(distinct[:2], start=1):
            ranks[printed == value, column + 1] = rank
    result: list[list[int]] = ranks.tolist()
    return result


def render(tables: list[Table], form: Format) -> str:
    """The tables in one of the formats."""
    if form != "csv" and form not in RENDER:
        raise InputError(f"unknown format {form}; choose one of {', '.join(RENDER)}, csv.")
    if form == "csv":
        return _csv(tables)
    return "\n\n".join(RENDER[form](table) for table in tables) + "\n"


def _text(table: Table) -> str:
    grid = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.header))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in grid
    ]
    return "\n".join([table.title, lines[0], "-" * len(lines[0]), *lines[1:], f"({table.note})"])


def _markdown(table: Table) -> str:
    def cell(text: str, rank: int) -> str:
        text = markdown(text)
        return {1: f"**{text}**", 2: f"_{text}_"}.get(rank, text)

    lines = [" | ".join(map(markdown, table.header)), " | ".join(["---"] + ["---:"] * (len(table.header) - 1))]
    lines += [" | ".join(map(cell, row, ranks)) for row, ranks in zip(table.rows, table.ranks, strict=True)]
    return "\n".join([f"### {markdown(table.title)}", "", *(f"| {line} |" for line in lines), "", f"{markdown(table.note)}."])


def _latex(table: Table) -> str:
    def cell(text: str, rank: int) -> str:
        return {1: rf"\textbf{{{latex(text)}}}", 2: rf"\underline{{{latex(text)}}}"}.get(rank, latex(text))

    def line(cells: list[str], ranks: list[int]) -> str:
        return " & ".join(map(cell, cells, ranks)) + r" \\"

    body = [line(row, ranks) for row, ranks in zip(table.rows, table.ranks, strict=True)]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            rf"\caption{{{latex(table.title)}: {latex(table.note)}.}}",
            rf"\begin{{tabular}}{{l{''.join(_alignment(table, i) for i in range(1, len(table.header)))}}}",
            r"\toprule",
            line(table.header, [0] * len(table.header)),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _alignment(table: Table, column: int) -> str:
    """Alignment of a LaTeX column: centred, or a paragraph if it has sentences."""
    return "p{6cm}" if any(len(row[column]) > WORDED for row in table.rows) else "c"


def _csv(tables: list[Table]) -> str:
    """One row per value: table, method, metric, mean, sd, and the published value if there are any."""
    rows = []
    for table in tables:
        for cells in table.rows:
            for metric, cell in zip(table.header[1:], cells[1:], strict=True):
                value, _, published = cell.removesuffix("]").partition(" [")
                if metric == INTERVAL:
                    ends = [""] * 2 if value == "-" else value.split(" to ")
                    rows += [
                        (table.title, cells[0], f"{metric}, {end}", number, "", "")
                        for end, number in zip(("low", "high"), ends, strict=True)
                    ]
                    continue
                mean, _, sd = value.partition(" ± ")
                rows.append((table.title, cells[0], metric, "" if mean == "-" else mean, sd, published))
    frame = pd.DataFrame(rows, columns=["table", "method", "metric", "mean", "sd", "published"])
    if not frame["published"].any():
        frame = frame.drop(columns="published")
    return csv_text(frame)


RENDER = {"text": _text, "markdown": _markdown, "latex": _latex}
