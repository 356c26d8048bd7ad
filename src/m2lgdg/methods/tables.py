"""Tables of brain structure in a linear method: one ridge classifier for each table, without age, sex and head size.

`linear.py` adds their decisions to that of its other blocks. How much each counts is learned on held-out source sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
ALL, NONE = "all", "none"
CONFOUNDS = ("age", "sex")
HEAD_SIZE = ("estimatedtotalintracranialvol", "intracranialvol", "etiv", "icv")  # columns, in lower case without signs
FLAG = "no {}: decided without it"

MOST = 10.0  # that a table counts, relative to the other blocks, in sds of decisions


def chosen_tables(tables: str | tuple[str, ...], source: Cohort) -> dict[str, list[str]]:
    """Columns of the tables that the field `tables` selects; tables without any value in source are left out."""
    held = source.tables
    names = list(held) if tables == ALL else [] if tables == NONE else [tables] if isinstance(tables, str) else list(tables)
    for name in names:
        if name not in held:
            known = f"it has {', '.join(held)}" if held else "it has none (m2lgdg convert --table adds one)"
            raise InputError(f"cohort {source.name} has no table {name}; {known}.")
    used = {name: [column for column in held[name] if held[name][column].nunique() > 1] for name in names}
    return {name: columns for name, columns in used.items() if columns}


def rows_of(cohort: Cohort, name: str, columns: Sequence[str]) -> Floats:
    """(subject, column) values of a table, NaN where they are missing; NaN for a cohort that does not have the table."""
    table = cohort.tables.get(name)
    if table is None:
        return np.full((len(cohort), len(columns)), np.nan)
    for column in columns:
        if column not in table.columns:
            raise InputError(f"table {name} of cohort {cohort.name} has no column {column}, which the model was trained on.")
    return table[list(columns)].to_numpy(dtype=np.float64)


class TableBlock:
    """A fitted table: a decision linear in its columns without confounds, and the mean decision for subjects without it."""

    def __init__(self, name: str, columns: Sequence[str], state: dict[str, npt.NDArray[Any]]) -> None:
        self.name, self.columns, self.state = name, list(columns), state

    def __getitem__(self, array: str) -> Floats:
        return np.asarray(self.state[f"table.{self.name}.{array}"], dtype=np.float64)

    def put(self, **arrays: Any) -> None:
        self.state |= {f"table.{self.name}.{name}": np.asarray(value) for name, value in arrays.items()}

    def fit_filling(self, source: Cohort) -> None:
        """Means of source, which take the place of single missing values, and those of head size."""
        rows = rows_of(source, self.name, self.columns)
        head = self._head_size(rows)
        spread = float(np.nanstd(head)) if head is not None else 0.0
        self.put(fill=np.nanmean(rows, axis=0), head=[float(np.nanmean(head)) if head is not None else 0.0, spread or 1.0])

    @property
    def head_column(self) -> str | None:
        """The column of head size, if the table has one."""
        plain = ["".join(filter(str.isalnum, column.lower())) for column in self.columns]
        return next((self.columns[plain.index(name)] for name in HEAD_SIZE if name in plain), None)

    def _head_size(self, rows: Floats) -> Floats | None:
        return None if self.head_column is None else rows[:, self.columns.index(self.head_column)]

    def features(self, cohort: Cohort) -> Floats:
        """(subject, column) values, single missing ones filled with the mean of source."""
        rows = rows_of(cohort, self.name, self.columns)
        return np.where(np.isnan(rows), self["fill"], rows)

    def present(self, cohort: Cohort) -> npt.NDArray[np.bool_]:
        """(subject,) whether at least half of the columns have a value."""
        return np.asarray(np.isfinite(rows_of(cohort, self.name, self.columns)).mean(axis=1) >= 0.5)

    def confounds(self, cohort: Cohort, scaled: Mapping[str, Floats]) -> Floats:
        """(subject, confound) scaled age, its square, sex and head size, as far as they are known."""
        columns = list(scaled.values()) + ([scaled["age"] ** 2] if "age" in scaled else [])
        head = self._head_size(self.features(cohort))
        if head is not None:
            mean, spread = self["head"]
            columns.append((head - mean) / spread)
        return np.stack(columns, axis=1) if columns else np.empty((len(cohort), 0))

    def cleaned(self, cohort: Cohort, scaled: Mapping[str, Floats]) -> Floats:
        """(subject, column) values without confounds."""
        return np.asarray(self.features(cohort) - self.confounds(cohort, scaled) @ self["slopes"])

    def decision(self, cohort: Cohort, scaled: Mapping[str, Floats]) -> Floats:
        """(subject,) decision, in its weight."""
        linear = np.array([float(row @ self["weights"]) for row in self.cleaned(cohort, scaled)]) + self["intercept"]
        return np.where(self.present(cohort), linear, self["absent"])


def table_weights(base: Floats, tables: Sequence[Floats], source: Cohort) -> Floats:
    """(table,) weights of held-out decisions beside a base of weight 1: the linear discriminant within sites, none negative.

    A table that adds nothing gets 0.
    """
    from scipy.optimize import nnls

    decisions = np.stack([base, *tables], axis=1)  # (subject, 1 + table)
    scale = np.where(decisions.std(axis=0) > 0, decisions.std(axis=0), 1.0)
    decisions = decisions / scale
    difference, scatter = np.zeros(decisions.shape[1]), np.zeros((decisions.shape[1],) * 2)
    total = 0.0
    for site in source.site_names:
        patients, controls = (decisions[(source.sites == site) & (source.labels == label)] for label in (1, 0))
        if not len(patients) or not len(controls):
            continue
        weight = len(patients) * len(controls) / (len(patients) + len(controls))
        difference += weight * (patients.mean(axis=0) - controls.mean(axis=0))
        total += weight
        for group in (patients, controls):
            scatter += (group - group.mean(axis=0)).T @ (group - group.mean(axis=0))
    if not total:
        return np.zeros(len(tables))
    scatter = scatter / len(decisions) + 1e-9 * np.eye(len(scatter))
    root = np.linalg.cholesky(scatter)
    found = nnls(root.T, np.linalg.solve(root, difference / total))[0]  # for decisions of sd 1
    if not base.any():  # the method has no other block
        return np.asarray((found[1:] if found[1:].any() else 1.0) / scale[1:])
    sd = np.sqrt(np.diag(scatter))  # within sites and classes
    least = max(found[0], float((found * sd)[1:].max() / sd[0] / MOST))  # beside a useless base, a table would count infinitely
    return np.asarray(found[1:] / scale[1:] * scale[0] / least) if least > 0 else np.zeros(len(tables))
