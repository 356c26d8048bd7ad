"""Published values in brackets after those of a study: `m2lgdg table DIR --beside paper.csv`, and `m2lgdg report`.

The file has one row per value: method as named in our tables, target site or "all" for the macro table, metric, value in %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.report.tables import Table, label
from m2lgdg.storage import InputError, one_line

COLUMNS = ["method", "target", "metric", "value"]


@dataclass(frozen=True)
class Published:
    """Published values by (method, target, metric), and the name of their file."""

    name: str
    values: dict[tuple[str, str, str], float]


def read_published(path: str | Path, predictions: pd.DataFrame) -> Published:
    """Read a file of published values; at least one must be for a method and target of the predictions."""
    path = Path(path)
    try:
        table = unquoted_table(pd.read_csv(path, dtype=str, keep_default_na=False))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    if list(table.columns) != COLUMNS:
        raise InputError(f"{path} must have the columns {', '.join(COLUMNS)}.")
    values: dict[tuple[str, str, str], float] = {}
    for row, (method, target, metric, text) in enumerate(table.itertuples(index=False), start=2):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(f"{path}, line {row}: {text!r} is not a number.")
        if (method, target, metric) in values:
            raise InputError(f"{path}, line {row}: {metric} of {method} at {target} is given twice.")
        values[method, target, metric] = value
    methods = set(map(label, predictions["method"], predictions["variant"]))
    targets = {*predictions["target"], "all"}
    if not any(method in methods and target in targets for method, target, _ in values):
        raise InputError(f"{path} has no value for a method and target of this study.")
    return Published(path.name, values)


def with_published(tables: list[Table], published: Published) -> list[Table]:
    """The tables, with published values in brackets after the study's own.

    An average over target sites that the file does not have is that of its values at these sites, if it has all of them.
    """
    sites = [table.target for table in tables if table.target not in ("", "all")]
    return [_with_values(table, published, sites) for table in tables]


def _value(published: Published, method: str, target: str, metric: str, sites: list[str]) -> float | None:
    value = published.values.get((method, target, metric))
    if value is not None or target != "all":
        return value
    at_sites = [published.values.get((method, site, metric)) for site in sites]
    known = [each for each in at_sites if each is not None]
    return sum(known) / len(known) if known and len(known) == len(sites) else None


def _with_values(table: Table, published: Published, sites: list[str]) -> Table:
    values = [[_value(published, row[0], table.target, metric, sites) for metric in table.header] for row in table.rows]
    rows = [
        [cell if value is None else f"{cell} [{value:.2f}]" for cell, value in zip(row, numbers, strict=True)]
        for row, numbers in zip(table.rows, values, strict=True)
    ]
    if rows == table.rows:
        return table
    averaged = table.target == "all" and any(
        value is not None and (row[0], "all", metric) not in published.values
        for row, numbers in zip(table.rows, values, strict=True)
        for metric, value in zip(table.header, numbers, strict=True)
    )
    mean = "; where it has no average, the mean of its values at these sites" if averaged else ""
    return replace(table, rows=rows, note=f"{table.note}; in brackets: published values ({published.name}{mean})")
