"""The paper's tables from the predictions of a study, as text, Markdown, LaTeX or CSV.

One table per target site (mean and sd over seeds), the macro average over sites with paired tests of the best method against
the others, and, for studies with seeds and variants, each variant against the full method. Made from scores of cells
(`stats.cell_scores`); used by `m2lgdg table` and by the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from m2lgdg.metrics import PAPER_METRICS
from m2lgdg.storage import InputError
from m2lgdg.study.stats import macro_scores, paired_tests, site_scores, training_differences

FEW = 5  # with fewer sites, tests and intervals over sites have little power
Format = Literal["text", "markdown", "latex", "csv"]
PERCENT = {"ACC", "SEN", "SPE", "F1", "AUC"}


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
        return any(len(cell) > 60 for row in self.rows for cell in row[1:])

    @property
    def ranked(self) -> bool:
        """Whether best and second are marked."""
        return any(any(row) for row in self.ranks)


def study_tables(scores: pd.DataFrame, best: str | None = None, metrics: tuple[str, ...] = PAPER_METRICS) -> list[Table]:
    """A table for each target site, then the macro table, from scores of cells; `best` is tested against all others.

    By default `best` has the highest macro AUC. Among variants of one method it is the method itself, because the highest of
    many variants is also the luckiest.
    """
    sites = site_scores(scores)
    macro = macro_scores(sites)
    keys = list(dict.fromkeys(zip(sites["method"], sites["variant"], strict=True)))
    chosen = _best(macro, keys, best)
    tables = [_site_table(sites, keys, metrics, site) for site in dict.fromkeys(sites["target"])]
    return [*tables, _macro_table(sites, macro, keys, chosen, metrics)]


def training_tables(scores: pd.DataFrame) -> list[Table]:
    """One table for each method with variants and several seeds (`training_table`)."""
    variants_of = scores[scores["variant"] != ""].groupby("method", sort=False)["variant"].unique()
    tables = [training_table(scores, str(method), list(map(str, variants))) for method, variants in variants_of.items()]
    return [table for table in tables if table is not None]


def training_table(scores: pd.DataFrame, method: str, variants: list[str], what: str = "Variants") -> Table | None:
    """AUC of a method minus that of each variant, paired by site and seed; None with one seed or without the full method."""
    chosen = (scores["method"] == method) & scores["variant"].isin(["", *variants]) & (scores["metric"] == "AUC")
    areas = scores[chosen]
    if "" not in set(areas["variant"]) or areas["seed"].nunique() == 1:
        return None
    rows = []
    for row in training_differences(areas, method).to_dict("records"):
        mean, half = 100 * row["mean"], 100 * row["half"]
        ends = [_number(mean, "+.2f"), _number(mean - half, "+.2f"), _number(mean + half, "+.2f")]
        rows.append([row["variant"], str(row["trainings"]), *ends])
    if not rows:  # no site and seed has both
        return None
    header = ["Variant", "trainings", "AUC difference", "low", "high"]
    note = (
        f"AUC of {method} minus that of the variant, paired by site and seed; 95 % t interval from the variance over seeds "
        "within sites, so for training randomness at these sites only; not corrected for the number of rows"
    )
    return Table(f"{what} of {method}, paired by site and seed", header, rows, [[0] * len(header) for _ in rows], note)


def changed_fields(study: dict[str, Any]) -> str:
    """Methods of a study with fields that differ from the defaults, and these fields; empty if there are none."""
    from m2lgdg.method import make
    from m2lgdg.registry import load_methods

    changes_of = []
    for name, fields in (study.get("method") or {}).items():
        if name not in load_methods():  # a plugin that is not loaded here
            changes_of += [f"possibly {name} (a plugin; its fields are in study.json)"] if fields else []
            continue
        default = json.loads(json.dumps(make(name).fields()))  # tuples become lists, as in study.json
        changed = {field: value for field, value in fields.items() if default.get(field) != value}
        for variant, changes in load_methods()[name].variants.items():
            if changed and json.loads(json.dumps({**changes})) == changed:
                changed = {"variant": variant}
        if changed:
            changes_of.append(f"{name} ({_assignments(changed)})")
    return "; ".join(changes_of)


def variant_fields(method: str, variant: str) -> str:
    """Fields that a variant of a method of the paper sets; empty for other methods and for sweep values."""
    from m2lgdg.registry import METHODS, PAPER

    known = METHODS[method].variants if method in PAPER else {}
    return f"{variant}: {_assignments(known[variant]) or 'the full method'}" if variant in known else ""


def _assignments(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{field} = {json.dumps(value)}" for field, value in fields.items())


def label(method: str, variant: str) -> str:
    """Name of a method and variant in tables; a plus sign only for added phenotypes, because an ablation removes something."""
    if not variant:
        return method
    return f"{method} + {variant}" if variant == "phenotypes" else f"{method}: {variant}"


def _best(macro: pd.DataFrame, keys: list[tuple[str, str]], name: str | None) -> tuple[str, str]:
    if name is not None:
        for key in keys:
            if name in (label(*key), key[0]):
                return key
        raise InputError(f"the study has no method {name}; it has {', '.join(label(*key) for key in keys)}.")
    if len({method for method, _ in keys}) == 1 and (keys[0][0], "") in keys:
        return keys[0][0], ""
    area = macro[macro["metric"] == "AUC"].set_index(["method", "variant"])
    ranked = area.sort_values(["sites", "mean"], ascending=False, kind="stable", na_position="last")
    return next(((str(method), str(variant)) for method, variant in ranked.index if (method, variant) in keys), keys[0])


def _site_table(scores: pd.DataFrame, keys: list[tuple[str, str]], metrics: tuple[str, ...], site: str) -> Table:
    at_site = scores[scores["target"] == site].set_index(["method", "variant", "metric"])
    values = np.array([[_lookup(at_site, (*key, metric), "mean") for metric in metrics] for key in keys])
    rows = []
    for key in keys:
        cells = [_shown(metric, *(_lookup(at_site, (*key, metric), name) for name in ("mean", "sd"))) for metric in metrics]
        rows.append([label(*key), *cells])
    seeds = max(at_site["seeds"].tolist(), default=0)
    note = f"mean ± sd over {seeds} seeds (one seed for methods without randomness)" if seeds > 1 else "one seed"
    return Table(f"Target {site}", ["Method", *metrics], rows, _ranks(values), note, site)


def _macro_table(
    scores: pd.DataFrame, macro: pd.DataFrame, keys: list[tuple[str, str]], best: tuple[str, str], metrics: tuple[str, ...]
) -> Table:
    by_key = macro.set_index(["method", "variant", "metric"])
    values = np.array([[_lookup(by_key, (*key, metric), "mean") for metric in metrics] for key in keys])
    tests = paired_tests(scores[scores["metric"].isin(metrics)], best).set_index(["method", "variant", "metric"])
    rows = []
    for key in keys:
        cells = [_shown(metric, *(_lookup(by_key, (*key, metric), name) for name in ("mean", "sd"))) for metric in metrics]
        difference, p = (_lookup(tests, (*key, "AUC"), name) for name in ("delta", "p_holm"))
        test = ["", ""] if key == best else [_number(100 * difference, "+.2f"), _p_value(p)]
        rows.append([label(*key), *cells, *test])
    header = ["Method", *metrics, "AUC difference", "p (Holm)"]
    ranks = [[*row, 0, 0] for row in _ranks(values)]
    sites = len(set(scores["target"]))
    note = f"mean ± sd over {sites} target sites; paired t-tests over sites, {label(*best)} against each other method"
    note += ", Holm-corrected within AUC"
    if sites == 1:
        note = "one target site, so no tests"
    elif sites < FEW:
        note += f" (little power with {sites} sites)"
    counts = {label(*key): int(_lookup(by_key, (*key, "AUC"), "sites")) for key in keys}
    fewer = ", ".join(f"{name} ({count})" for name, count in counts.items() if count < sites)
    if fewer and len(set(counts.values())) == 1:
        fewer = f"all methods ({min(counts.values())})"
    note += f"; AUC over fewer than {sites} sites: {fewer}" if fewer else ""
    variants = "; ".join(filter(None, (variant_fields(*key) for key in keys)))
    note += f". {variants}" if variants else ""
    return Table("Macro average over target sites", header, rows, ranks, note, "all")


def _lookup(table: pd.DataFrame, key: tuple[str, ...], column: str) -> float:
    return float(table.at[key, column]) if key in table.index else np.nan


def _shown(metric: str, mean: float, sd: float) -> str:
    scale = 100 if metric in PERCENT else 1
    spread = "" if np.isnan(sd) else f" ± {scale * sd:.2f}"
    return _number(scale * mean, ".2f") + spread


def _number(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def _p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else _number(p, ".3f")


def _ranks(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[list[int]]:
    """1 for every best value of a column, 2 for every second best; equal values (as printed) share a rank."""
    ranks = np.zeros((values.shape[0], values.shape[1] + 1), dtype=int)
    for column in range(values.shape[1]):
        printed = np.round(100 * values[:, column], 2)
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
        text = text.replace("|", "\\|")
        return {1: f"**{text}**", 2: f"_{text}_"}.get(rank, text)

    lines = [" | ".join(table.header), " | ".join(["---"] + ["---:"] * (len(table.header) - 1))]
    lines += [" | ".join(map(cell, row, ranks)) for row, ranks in zip(table.rows, table.ranks, strict=True)]
    return "\n".join([f"### {table.title}", "", *(f"| {line} |" for line in lines), "", f"{table.note}."])


def _latex(table: Table) -> str:
    special = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "\\": r"\textbackslash{}"}
    special |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}

    def cell(text: str, rank: int) -> str:
        text = "".join(special.get(letter, letter) for letter in text)
        return {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(rank, text)

    def line(cells: list[str], ranks: list[int]) -> str:
        return " & ".join(map(cell, cells, ranks)) + r" \\"

    body = [line(row, ranks) for row, ranks in zip(table.rows, table.ranks, strict=True)]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{cell(table.title, 0)}: {cell(table.note, 0)}.}}",
            rf"\begin{{tabular}}{{l{'c' * (len(table.header) - 1)}}}",
            r"\toprule",
            line(table.header, [0] * len(table.header)),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _csv(tables: list[Table]) -> str:
    """One row per value: table, method, metric, mean, sd, and the published value if there are any."""
    rows = []
    for table in tables:
        for cells in table.rows:
            for metric, cell in zip(table.header[1:], cells[1:], strict=True):
                value, _, published = cell.removesuffix("]").partition(" [")
                mean, _, sd = value.partition(" ± ")
                rows.append((table.title, cells[0], metric, "" if mean == "-" else mean, sd, published))
    frame = pd.DataFrame(rows, columns=["table", "method", "metric", "mean", "sd", "published"])
    if not frame["published"].any():
        frame = frame.drop(columns="published")
    return str(frame.to_csv(index=False, lineterminator="\n"))


RENDER = {"text": _text, "markdown": _markdown, "latex": _latex}
