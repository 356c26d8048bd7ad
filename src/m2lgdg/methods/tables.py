"""Tables of brain structure in a method: what is known of each in source, and which subjects of a target can use it.

`linear.py` fits one ridge classifier for each, without age, sex and head size, `m2lgdg_structure.py` an encoder. How much each
counts in a linear method is learned on held-out source sites.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.cohort_file import held_table
from m2lgdg.data.atlases.table_columns import head_column, renamed_as
from m2lgdg.findings import counted
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ALL, NONE = "all", "none"
CONFOUNDS = ("age", "sex")
FLAG = "no {}: decided without it"
OTHER_UNIT = "units of {}: values are {:.2g} times those of source, decided without it"
MAD = 1.4826  # standard deviations in a median absolute deviation
FACTOR = 2.0  # between the usual values of a subject and of source; the smallest of ABIDE, a failed segmentation, is 1 / 1.9
STEADY, FEWEST_COLUMNS = 4.0, 5  # columns to tell it by: least ratio of the median to the robust sd, and their least number
FEWEST_OF_CLASS = 5  # patients, and controls, of source who have a table
COLUMN_FACTOR, FEWEST = 5.0, 10  # the same of one column, over at least so many subjects

LEAST_SCATTER = 1e-3  # of a decision within classes, in parts of their difference: one that is the label has none but rounding
MOST = 10.0  # that a table counts, relative to the other blocks, in sds of decisions


def chosen_tables(tables: str | tuple[str, ...], source: Cohort, notes: list[str] | None = None) -> dict[str, list[str]]:
    """Columns of the tables that the field `tables` selects; `notes` get a sentence on each that cannot be used.

    That is one that few or none of source have, and one that only one class has: having it would be the diagnosis.
    """
    held = source.tables
    chosen = held if tables == ALL else () if tables == NONE else (tables,) if isinstance(tables, str) else tables
    names = sorted(set(chosen))  # rounding does not depend on their order
    used: dict[str, list[str]] = {}
    for name in names:
        if name not in held:
            known = f"it has {', '.join(held)}" if held else "it has none (m2lgdg convert --table adds one)"
            raise InputError(f"cohort {source.name} has no table {name}; {known}.")
        by_site = held[name].groupby(source.sites)
        varies = (by_site.max() > by_site.min()).any()  # a column that is constant at each site tells nothing but the site
        columns = [column for column in held[name] if varies[column]]
        having = source.labels[_known(held[name][columns].to_numpy(dtype=np.float64))[0] & bool(columns)]
        patients, controls = (int(np.sum(having == label)) for label in (1, 0))
        if min(patients, controls) >= FEWEST_OF_CLASS:
            used[name] = columns
        elif notes is not None:
            who = f"only {counted(patients, 'patient')} and {counted(controls, 'control')} have"
            if not patients or not controls:
                who = "only patients have" if patients else "only controls have" if controls else "no training subject has"
            notes.append(f"Table {name} is not used: {who} it.")
    return used


def rows_of(cohort: Cohort, name: str, columns: Sequence[str]) -> Floats:
    """(subject, column) values of a table, NaN where they are missing; NaN for a cohort that does not have the table."""
    table = held_table(cohort, name)
    if table is None:
        return np.full((len(cohort), len(columns)), np.nan)
    missing = [column for column in columns if column not in table.columns]
    if missing:
        table = renamed_as(table, columns)
        missing = [column for column in columns if column not in table.columns]
    if not missing:
        return table[list(columns)].to_numpy(dtype=np.float64, copy=True)
    where = f"table {name} of cohort {cohort.name}"
    if 2 * len(missing) > len(columns):
        has, example = f"has {len(columns) - len(missing)} of the {len(columns)} columns", f"{missing[0]} is not among them"
        raise InputError(f"{where} {has} that the model was trained on ({example}): it is of another atlas or measure.")
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    near = difflib.get_close_matches(missing[0], [str(each) for each in table.columns if each not in columns], n=1)
    hint = f"; is it called {near[0]} there?" if near else "."
    raise InputError(f"{where} has no column {missing[0]}{more}, which the model was trained on{hint}")


def _given(rows: Floats) -> Bools:
    """(subject,) whether at least half of the columns have a value."""
    return np.asarray(2 * np.isfinite(rows).sum(axis=1) >= rows.shape[1])


def _known(rows: Floats) -> tuple[Bools, Floats]:
    """(subject,) who of source has a table, in the unit of most, and (column,) usual values: medians, 0 if they vary much."""
    given = _given(rows)
    frame = pd.DataFrame(rows[given])
    middle = frame.median().to_numpy()
    spread = MAD * (frame - middle).abs().median().to_numpy()
    usual = np.where(middle > STEADY * spread, middle, 0.0)
    factor = factors(rows, usual)
    return given & (factor < FACTOR) & (factor > 1 / FACTOR), usual


def factors(rows: Floats, usual: Floats) -> Floats:
    """(subject,) median ratio of the values to those that are usual; 1 if too few can be compared."""
    comparable = usual > 0
    if comparable.sum() < FEWEST_COLUMNS:
        return np.ones(len(rows))
    ratios = pd.DataFrame(np.maximum(rows[:, comparable], 0.0) / usual[comparable])
    return ratios.median(axis=1).fillna(1.0).to_numpy()


class TableBlock:
    """A fitted table: a decision linear in its columns without confounds, and the mean decision for subjects without it."""

    def __init__(self, name: str, columns: Sequence[str], state: dict[str, npt.NDArray[Any]]) -> None:
        self.name, self.columns, self.state = name, list(columns), state

    def __getitem__(self, array: str) -> Floats:
        return np.asarray(self.state[f"table.{self.name}.{array}"], dtype=np.float64)

    def put(self, **arrays: Any) -> None:
        self.state |= {f"table.{self.name}.{name}": np.array(value) for name, value in arrays.items()}

    def fit_filling(self, source: Cohort) -> Bools:
        """(subject,) who has the table. Their means take the place of single missing values, and of a missing head size."""
        rows = rows_of(source, self.name, self.columns)
        known, usual = _known(rows)
        # A column that only subjects without the rest have is filled with their mean.
        theirs = rows if known.all() else np.where(known[:, None] | ~np.isfinite(rows[known]).any(axis=0), rows, np.nan)
        head = self._head_size(theirs)
        spread = float(np.nanstd(head)) if head is not None else 0.0
        middle = float(np.nanmean(head)) if head is not None else 0.0
        self.put(usual=usual, fill=np.nanmean(theirs, axis=0), head=[middle, spread or 1.0])
        return known

    @property
    def head_column(self) -> str | None:
        """The column of head size, if the table has one."""
        return head_column(self.columns)

    def _head_size(self, rows: Floats) -> Floats | None:
        return None if self.head_column is None else rows[:, self.columns.index(self.head_column)]

    def rows(self, cohort: Cohort) -> Floats:
        """(subject, column) values, NaN where they are missing, and in all columns of who has another unit than source."""
        rows = rows_of(cohort, self.name, self.columns)
        factor = factors(rows, self["usual"])
        return np.where(((factor < FACTOR) & (factor > 1 / FACTOR))[:, None], rows, np.nan)

    def features(self, cohort: Cohort) -> Floats:
        """(subject, column) values, single missing ones filled with the mean of source."""
        rows = self.rows(cohort)
        return np.where(np.isnan(rows), self["fill"], rows)

    def present(self, cohort: Cohort) -> Bools:
        """(subject,) whether at least half of the columns have a value, in the unit of source."""
        return _given(self.rows(cohort))

    def check(self, target: Cohort) -> None:
        """Refuse a target with other columns, or most of whose values are of another size: another unit or measure."""
        rows, usual = rows_of(target, self.name, self.columns), self["usual"]
        rows = rows[_given(rows)]
        factor = float(np.median(factors(rows, usual))) if len(rows) else 1.0
        where, than = f"table {self.name} of cohort {target.name}", "times those of the training data"
        if not 1 / FACTOR < factor < FACTOR:
            raise InputError(f"{where}: its values are about {factor:.2g} {than}; they are of another unit or measure.")
        if len(rows) < FEWEST:
            return
        medians = pd.DataFrame(rows).median().to_numpy()
        for column, value, expected in zip(self.columns, medians, usual, strict=True):
            ratio = value / expected if expected > 0 else 1.0
            if ratio > COLUMN_FACTOR or ratio < 1 / COLUMN_FACTOR:
                raise InputError(f"{where}: the values of column {column} are about {ratio:.2g} {than}; it has another unit.")

    def flags(self, target: Cohort) -> list[str]:
        """(subject,) why each is decided without the table; empty for those who have it."""
        rows, usual = rows_of(target, self.name, self.columns), self["usual"]
        why = zip(self.present(target), _given(rows), factors(rows, usual), strict=True)
        return [
            "" if used else OTHER_UNIT.format(self.name, times) if given else FLAG.format(self.name)
            for used, given, times in why
        ]

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


class TableRows(NamedTuple):
    """(subject, column) values of a table as they are, and without confounds; NaN for subjects who are decided without it."""

    values: Floats
    cleaned: Floats


class TakesTables:
    """Part of a method that takes tables: what is fitted for each, and how those of a target are checked and flagged."""

    facts_: dict[str, Any]
    state_: dict[str, npt.NDArray[Any]]
    tables: str | tuple[str, ...]

    def need_inputs(self, source: Cohort) -> None:
        """Refuses tables that source does not have."""
        chosen_tables(self.tables, source)

    def table_blocks(self) -> list[TableBlock]:
        """What is fitted for each table; empty for a model without tables, or one that is not fitted."""
        known = vars(self).get("facts_", {}).get("tables", {})
        return [TableBlock(name, each["columns"], self.state_) for name, each in known.items()]

    def scaled_confounds(self, cohort: Cohort) -> dict[str, Floats]:
        """(subject,) scaled age and sex, as far as source has them."""
        raise NotImplementedError

    def table_rows(self, target: Cohort) -> dict[str, TableRows]:
        """What the method sees of each table."""
        seen = {}
        for table in self.table_blocks():
            cleaned, rows = table.cleaned(target, self.scaled_confounds(target)), table.rows(target)
            present = table.present(target)[:, None]
            seen[table.name] = TableRows(np.where(present, rows, np.nan), np.where(present, cleaned, np.nan))
        return seen

    def checked_target(self, target: Cohort) -> Cohort:
        """Also refuses tables of other columns, units or measures."""
        target = super().checked_target(target)  # type: ignore[misc]
        with self.checking_weights():  # type: ignore[attr-defined]
            for table in self.table_blocks():
                table.check(target)
        return target

    def method_flags(self, target: Cohort) -> list[list[str]]:
        """Also for subjects without a table that the model takes."""
        flags: list[list[str]] = super().method_flags(target)  # type: ignore[misc]
        for table in self.table_blocks():
            for raised, flag in zip(flags, table.flags(target), strict=True):
                raised += [flag] if flag else []
        return flags


def table_weights(base: Floats, tables: Sequence[Floats], source: Cohort) -> Floats:
    """(table,) weights of held-out decisions beside a base of weight 1: the linear discriminant within sites, none negative.

    A table that adds nothing gets 0. Subjects without it (NaN) count as the class-balanced mean of their site, so that who has
    a table adds nothing either.
    """
    decisions = np.stack([base, *tables], axis=1)  # (subject, 1 + table)
    for site in source.site_names if np.isnan(decisions).any() else ():
        here = source.sites == site
        classes = pd.DataFrame(decisions[here]).groupby(source.labels[here]).mean()  # (label, 1 + table)
        decisions[here] = np.where(np.isnan(decisions[here]), classes.mean().fillna(0.0).to_numpy(), decisions[here])
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
    return discriminant_weights(difference / total, scatter / len(decisions)) if total else np.zeros(len(tables))


def discriminant_weights(difference: Floats, scatter: Floats) -> Floats:
    """(1 + added,) difference of decisions between classes and their scatter within sites and classes -> (added,) weights.

    The first decision is the base, of weight 1. A base of 0 is of no weight; then one added decision at least has some.
    """
    from scipy.optimize import nnls

    sd = np.maximum(np.sqrt(np.diag(scatter)), LEAST_SCATTER * np.abs(difference))
    scale = np.where(sd > 0, sd, 1.0)
    root = np.linalg.cholesky(scatter / np.outer(scale, scale) + 1e-9 * np.eye(len(scatter)))
    found = nnls(root.T, np.linalg.solve(root, difference / scale))[0]  # for decisions of sd 1
    if not sd[0]:  # the method has no other block
        return np.asarray((found[1:] if found[1:].any() else 1.0) / scale[1:])
    least = max(found[0], float(found[1:].max() / MOST))  # beside a useless base, an added decision would count infinitely
    return np.asarray(found[1:] / scale[1:] * scale[0] / least) if least > 0 else np.zeros(len(found) - 1)
