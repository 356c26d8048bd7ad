"""Published values in brackets after those of a study: `m2lgdg table DIR --beside paper.csv`, and `m2lgdg report`.

The file has one row per value: method as named in our tables, target site or "all" for the macro table, metric, value in %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.report.tables import Beside, Table
from m2lgdg.storage import InputError, one_line

COLUMNS = ["method", "target", "metric", "value"]


@dataclass(frozen=True)
class Published:
    """Published values by (method, target, metric)."""

    name: str
    values: dict[tuple[str, str, str], float]

    def beside(self, tables: Sequence[Table], sites: Sequence[str]) -> list[Table]:
        """The tables, with these values in brackets after the study's own; `sites` are those of its averages."""
        return [self._beside(table, sites) for table in tables]

    def at(self, method: str, target: str, metric: str, sites: Sequence[str]) -> float | None:
        """A value; an average that the file does not have is that of its values at all `sites`."""
        if target != "all" or (method, target, metric) in self.values:
            return self.values.get((method, target, metric))
        known = [self.values[method, site, metric] for site in sites if (method, site, metric) in self.values]
        return sum(known) / len(known) if known and len(known) == len(sites) else None

    def _beside(self, table: Table, sites: Sequence[str]) -> Table:
        names, averaged, found = table.header, False, False
        rows = []
        for row in table.rows:
            values = [self.at(str(row[0]), table.target, name, sites) for name in names]
            found |= any(value is not None for value in values)
            averaged |= any(
                value is not None and (row[0], table.target, name) not in self.values
                for name, value in zip(names, values, strict=True)
            )
            rows.append([cell if value is None else Beside(cell, value) for cell, value in zip(row, values, strict=True)])
        mean = "; where it has no average, the mean of its values at these sites" if averaged else ""
        note = f"{table.note}; in brackets: published values ({self.name}{mean})"
        return replace(table, rows=rows, note=note) if found else table


def read_published(path: str | Path, names: set[str], targets: set[str]) -> Published:
    """Read a file of published values; one at least must be for a method and target of the study."""
    path = Path(path)
    try:
        table = unquoted_table(pd.read_csv(path, dtype=str, keep_default_na=False))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None
    if list(table.columns) != COLUMNS:
        raise InputError(f"{path} must have the columns {', '.join(COLUMNS)}.")
    numbers = pd.to_numeric(table["value"], errors="coerce").replace([np.inf, -np.inf], np.nan).tolist()
    values: dict[tuple[str, str, str], float] = {}
    for line, ((method, target, metric, text), value) in enumerate(zip(table.itertuples(index=False), numbers, strict=True), 2):
        if math.isnan(value):
            raise InputError(f"{path}, line {line}: {text!r} is not a number.")
        if (method, target, metric) in values:
            raise InputError(f"{path}, line {line}: {metric} of {method} at {target} is given twice.")
        values[method, target, metric] = value
    if not any(method in names and target in targets | {"all"} for method, target, _ in values):
        raise InputError(f"{path} has no value for a method and target of this study.")
    return Published(path.name, values)
