"""Checks of the tables of a cohort: empty columns, units, repeated rows, failed segmentations, columns that reveal the label.

`check` adds these findings to its own. What is missing from a table by label is found by `missingness`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.proxies import separates_together, separating_columns
from m2lgdg.findings import Finding

Counts = npt.NDArray[np.int_]
FEWEST_SUBJECTS = 10  # with fewer, the range of a column is not known
FAR = 4.0  # robust standard deviations from the median of the site
FAILED, FEWEST_COLUMNS = 0.15, 5  # fraction and number of columns out of range at once
POWER = 0.15  # distance of the ratio of two units from a power of ten (log10); sites of ABIDE are within 0.11 of 1
SAME = 1e-3  # relative difference of a value that is written in two tables
ALIKE, FEWEST_SITES = 0.3, 3  # range of other sites (log10) in a column whose unit can be told, and their least number
EXCHANGED, FEWEST_PAIRS = -0.6, 8  # correlation of asymmetries with those of other sites (ABIDE: -0.25 or more), and regions
LEFT = re.compile("(lh|Left|L)(?=[-_.])")  # a region of the left hemisphere
RIGHT_OF = {"lh": "rh", "Left": "Right", "L": "R"}
AGREE = 0.9  # fraction of subjects with the same value in both, so that it is the same thing
MAD = 1.4826  # standard deviations in a median absolute deviation


def table_findings(cohort: Cohort) -> Iterator[Finding]:
    """Findings about each table of a cohort, and about two that disagree."""
    tables = cohort.tables
    usual = {}  # tables without the sites whose units differ, at which nothing is in the range of the others
    for name, table in tables.items():
        yield from _lacking(cohort, name, table)
        yield from _columns(name, table)
        units = list(_units(cohort, name, table))
        usual[name] = table.copy()
        for one in units:
            usual[name].loc[cohort.sites == one.site, one.numbers.get("columns", list(table.columns))] = np.nan
        yield from units
        yield from _exchanged(cohort, name, table)
        yield from _same_rows(cohort, name, table)
        if separating := separating_columns(table, cohort.labels, cohort.sites):
            numbers = {"table": name, "column": separating[0], "more": len(separating) - 1 or ""}
            yield Finding("separating table", numbers=numbers)
        elif separates_together(table, cohort.labels, cohort.sites):
            yield Finding("whole table separates", numbers={"table": name})
    yield from _failed(cohort, usual)
    for first, second in combinations(tables, 2):
        yield from _disagreeing(cohort, first, second, usual[first], usual[second])


def _lacking(cohort: Cohort, name: str, table: pd.DataFrame) -> Iterator[Finding]:
    empty = table.isna().all(axis=1).to_numpy()
    if empty.any():
        yield Finding("no row in a table", "", tuple(cohort.subjects[empty].tolist()), {"table": name})


def _columns(name: str, table: pd.DataFrame) -> Iterator[Finding]:
    values = table.nunique()
    if empty := [str(column) for column in table.columns if values[column] == 0]:
        yield Finding("empty columns", numbers={"table": name, "listed": empty})
    constant = [str(column) for column in table.columns if values[column] == 1]
    if constant and table.notna().any(axis=1).sum() > 1:
        yield Finding("constant columns", numbers={"table": name, "listed": constant})


def _units(cohort: Cohort, name: str, table: pd.DataFrame) -> Iterator[Finding]:
    """Sites whose values are ten, a hundred ... times those of other sites, or such a fraction: mm and m, mm3 and ml."""
    medians = table.groupby(cohort.sites).median()  # (site, column)
    medians = medians.where(medians > 0).dropna(how="all")
    sites = list(medians.index)
    if len(sites) == 2:  # which of two is in the usual unit is not known; the one with fewer subjects is named
        sites = sorted(sites, key=lambda site: int((cohort.sites == site).sum()))[:1]
    for site in sites:
        others = np.log10(medians.drop(index=site))
        ratios = (np.log10(medians.loc[site]) - others.median()).dropna()  # (column,)
        if not len(ratios):
            continue
        power = _power(float(np.median(ratios)))
        if power:
            yield Finding("units of a table", str(site), (), {"table": name, **_times(power)})
            continue
        # Single columns, if the other sites agree about them
        alike = (others.max() - others.min() < ALIKE) & (others.notna().sum() >= FEWEST_SITES)
        powers = ratios[alike[ratios.index]].map(_power)
        for power in sorted(set(powers) - {0}):
            columns = [str(column) for column in powers.index[powers == power]]
            yield Finding("units of columns", str(site), (), {"table": name, "columns": columns, **_times(power)})


def _power(ratio: float) -> int:
    """The power of ten that a ratio (log10) is close to; 0 for none, and for the same size."""
    return round(ratio) if abs(ratio - round(ratio)) < POWER else 0


def _times(power: int) -> dict[str, float]:
    return {"times": 10.0**power} if power > 0 else {"fraction": 10.0**-power}


def _exchanged(cohort: Cohort, name: str, table: pd.DataFrame) -> Iterator[Finding]:
    """Sites at which left is larger than right where it is the other way round at others: hemispheres may be exchanged."""
    if len(table) < FEWEST_SUBJECTS:
        return
    left, right = hemispheres(table.columns)
    sums = table[left].to_numpy() + table[right].to_numpy()  # (subject, pair)
    shares = pd.DataFrame((table[left].to_numpy() - table[right].to_numpy()) / np.where(sums > 0, sums, np.nan))
    medians = shares.groupby(cohort.sites).median()  # (site, pair)
    sites = list(medians.index[shares.notna().any(axis=1).groupby(cohort.sites).sum() >= FEWEST_SUBJECTS])
    if len(sites) == 2:
        sites = sorted(sites, key=lambda site: int((cohort.sites == site).sum()))[:1]
    for site in sites:
        both = pd.concat([medians.loc[site], medians.drop(index=site).median()], axis=1).dropna()
        if len(both) >= FEWEST_PAIRS and both.corr().iloc[0, 1] < EXCHANGED:
            yield Finding("hemispheres of a table", str(site), (), {"table": name})


def hemispheres(columns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Columns of the left and of the right hemisphere that are of the same region, in the same order."""
    known = {str(column) for column in columns}
    pairs = [(column, LEFT.sub(lambda match: RIGHT_OF[match[0]], column)) for column in known if LEFT.match(column)]
    both = sorted(pair for pair in pairs if pair[1] in known)
    return [one for one, _ in both], [other for _, other in both]


def _same_rows(cohort: Cohort, name: str, table: pd.DataFrame) -> Iterator[Finding]:
    """Pairs of subjects with the same values in all columns, or in those of a hemisphere; the first with each of the others."""
    left, right = hemispheres(table.columns)
    pairs: set[tuple[str, ...]] = set()
    for side, columns in {"": list(table.columns), "left": left, "right": right}.items():
        for one in _same(cohort, name, table[columns], side):
            if one.subjects not in pairs:
                pairs.add(one.subjects)
                yield one


def _same(cohort: Cohort, name: str, table: pd.DataFrame, side: str) -> Iterator[Finding]:
    if len(table) < 2:
        return
    several = table.loc[:, table.nunique() > 1]
    told = several[several.notna().sum(axis=1) >= min(FEWEST_COLUMNS, max(len(several.columns), 2))]
    position = {subject: i for i, subject in enumerate(cohort.subjects.tolist())}
    for _, rows in told[told.duplicated(keep=False)].groupby(list(told.columns), dropna=False, sort=False):
        first, *others = rows.index.tolist()
        for other in others:
            here, there = (str(cohort.sites[position[one]]) for one in (first, other))
            yield Finding("same row", here, (first, other), {"table": name, "there": there, "side": side})


def _failed(cohort: Cohort, tables: Mapping[str, pd.DataFrame]) -> Iterator[Finding]:
    """Subjects of whom a table has many columns out of range, one finding each."""
    counts: dict[int, dict[str, str]] = {}
    for name, table in tables.items():
        far, known = _out_of_range(table, cohort.sites)
        for i in np.flatnonzero((far >= FEWEST_COLUMNS) & (far >= FAILED * known)).tolist():
            counts.setdefault(i, {})[name] = f"{far[i]} of {known[i]}"
    for i in sorted(counts):
        yield Finding("failed segmentation", str(cohort.sites[i]), (str(cohort.subjects[i]),), {"counts": counts[i]})


def _out_of_range(table: pd.DataFrame, sites: npt.NDArray[np.str_]) -> tuple[Counts, Counts]:
    """(subject,) columns far from the median of the site, in robust standard deviations over all sites, and columns known."""
    centred = (table - table.groupby(sites).transform("median")).to_numpy()  # (subject, column)
    centred = centred[:, (~np.isnan(centred)).sum(axis=0) >= FEWEST_SUBJECTS]
    spread = MAD * np.nanmedian(np.abs(centred), axis=0) if centred.size else np.zeros(0)  # (column,)
    centred = centred[:, spread > 0]
    far = np.abs(centred) > FAR * spread[spread > 0]
    return far.sum(axis=1), (~np.isnan(centred)).sum(axis=1)


def _disagreeing(cohort: Cohort, first: str, second: str, one: pd.DataFrame, other: pd.DataFrame) -> Iterator[Finding]:
    """Subjects whose value of a column that two tables share, such as intracranial volume, is not the same in both."""
    found: set[int] = set()
    for column in one.columns.intersection(other.columns):
        ours, theirs = one[column].to_numpy(), other[column].to_numpy()
        both = ~np.isnan(ours) & ~np.isnan(theirs)
        unlike = both & (np.abs(ours - theirs) > SAME * np.abs(ours))
        if not both.any() or unlike.sum() > (1 - AGREE) * both.sum():
            continue  # not the same quantity, such as the thickness and the area of a region
        for i in np.flatnonzero(unlike):
            if int(i) not in found:
                found.add(int(i))
                numbers: dict[str, Any] = {"table": first, "second": second, "column": str(column)}
                numbers |= {"value": float(ours[i]), "elsewhere": float(theirs[i])}
                yield Finding("tables disagree", str(cohort.sites[i]), (str(cohort.subjects[i]),), numbers)
