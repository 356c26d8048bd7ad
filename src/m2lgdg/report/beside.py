"""Published values in brackets beside a study's own: `m2lgdg table DIR --beside paper.csv`, and the same on the page.

The file has a row a number: method as our tables call it, target site or "all" for the macro table, metric, value in percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from m2lgdg.report.tables import Table, label
from m2lgdg.storage import InputError, one_line

COLUMNS = ["method", "target", "metric", "value"]


@dataclass(frozen=True)
class Published:
    """(method, target, metric) -> value, and the name of the file."""

    name: str
    values: dict[tuple[str, str, str], float]


def read_published(path: str | Path, predictions: pd.DataFrame) -> Published:
    """Read a file of published values, some of which must be of the methods and targets of these predictions."""
    path = Path(path)
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    if list(table.columns) != COLUMNS:
        raise InputError(f"{path} does not have the columns {', '.join(COLUMNS)}.")
    values: dict[tuple[str, str, str], float] = {}
    for row, (method, target, metric, text) in enumerate(table.itertuples(index=False), start=2):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(f"{path}, line {row}: {text!r} is not a number.")
        if (method, target, metric) in values:
            raise InputError(f"{path}, line {row}: {metric} of {method} at {target} is there twice.")
        values[method, target, metric] = value
    methods = set(map(label, predictions["method"], predictions["variant"]))
    targets = {*predictions["target"], "all"}
    if not any(method in methods and target in targets for method, target, _ in values):
        raise InputError(f"{path} has no value of a method and target of this study.")
    return Published(path.name, values)


def stand_beside(tables: list[Table], published: Published) -> list[Table]:
    """The tables with a published value in brackets after each number that has one."""
    return [_with_values(table, published) for table in tables]


def _with_values(table: Table, published: Published) -> Table:
    values = [[published.values.get((row[0], table.target, metric)) for metric in table.header] for row in table.rows]
    rows = [
        [cell if value is None else f"{cell} [{value:.2f}]" for cell, value in zip(row, own, strict=True)]
        for row, own in zip(table.rows, values, strict=True)
    ]
    return table if rows == table.rows else replace(table, rows=rows, note=f"{table.note}; in brackets: {published.name}")
