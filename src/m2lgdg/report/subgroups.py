"""Performance by sex, age, eye status, motion and site size; and which groups are too small for a report that is shared.

Totals are public, so the size of a hidden group must not follow by subtraction either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers.tables import FEMALE, MALE, MOTION, usual_name
from m2lgdg.metrics import THRESHOLD, delong
from m2lgdg.report.operating import confusion, of_key
from m2lgdg.report.paper_tables import INTERVAL, Key, label
from m2lgdg.report.tables import NAN, Column, Estimate, Interval, Table, Value, columns
from m2lgdg.storage import InputError
from m2lgdg.study.description import LEAST
from m2lgdg.study.stats import NORMAL

LEAST_OF_CLASS = 5  # patients and controls of the group that a site needs for an AUC
SMALL, WITHHELD = f"<{LEAST}", "withheld"
HIDDEN = f"groups of fewer than {LEAST} subjects are hidden, as are groups that would reveal their size"
SMALL_GROUPS = f"scores of groups of fewer than {LEAST} subjects vary widely by chance"
UNKNOWN = "unknown"
# By lower edge, in years and in subjects.
AGES: dict[float, str] = {0: "under 12", 12: "12 to 17", 18: "18 to 29", 30: "30 to 49", 50: "50 and over"}
SIZES: dict[float, str] = {0: "under 20 subjects", 20: "20 to 49 subjects", 50: "50 subjects or more"}
THIRDS = ("lowest third", "middle third", "highest third")
ORDERED = (*AGES.values(), *SIZES.values(), *THIRDS)
EYES = ("eye_status_at_scan", "eye_status", "eyes")
DIFFERENCE = "AUC difference (95 % interval)"
Names = npt.NDArray[np.object_]


def subgroup_table(mean: pd.DataFrame, cohort: Cohort, key: Key, *, hide_small: bool = False) -> Table:
    """Performance of one method by subgroup: mean of within-site AUCs with intervals, and pooled SEN, SPE and ACC.

    `mean` is from `over_seeds`; `hide_small` hides groups of fewer than ten subjects, for a report that is shared.
    """
    own, name = of_key(mean, key), label(*key)
    if not len(own):
        raise InputError(f"the study has no predictions of {name} for labelled subjects.")
    missing = sorted(set(own["subject"]) - set(cohort.subjects.tolist()))
    if missing:
        raise InputError(f"subject {missing[0]} of the predictions is not in cohort {cohort.name}, so it is another cohort.")
    enough = len(own) >= LEAST or not hide_small
    rows: list[list[Value]] = [["all", *([*_scores(own), NAN] if enough else _hidden(SMALL))]]
    for title, groups in _partitions(own, cohort) if enough else ():
        rows += _rows(own, title, groups, hide_small)
    header = [Column("Subgroup"), *columns("count", "subjects", "patients"), *columns("percent", "AUC", INTERVAL, form=".1f")]
    header += [Column("AUC sites", "count"), *columns("percent", "SEN", "SPE", "ACC", form=".1f")]
    note = (
        "in %; probabilities averaged over seeds; AUC: mean of within-site AUCs, over target sites with at least "
        f"{LEAST_OF_CLASS} patients and {LEAST_OF_CLASS} controls of the subgroup; SEN, SPE, ACC: pooled at {THRESHOLD:g}; "
        f"{HIDDEN if hide_small else SMALL_GROUPS}; difference: AUC minus that of the largest group of the same kind; "
        "intervals: DeLong's, over subjects of these sites, not corrected for the number of groups"
    )
    return Table(f"Subgroups, {name}", [*header, Column(DIFFERENCE, "percent", "+.1f")], rows, note)


def _partitions(own: pd.DataFrame, cohort: Cohort) -> Iterator[tuple[str, Names]]:
    """(title, group of each subject) for each phenotype that defines subgroups, and for site size."""
    phenotypes = cohort.phenotypes.loc[own["subject"].tolist()]
    columns = {usual_name(name): phenotypes[name] for name in phenotypes.columns}
    numbers = {name: values.to_numpy() for name, values in columns.items() if values.dtype == np.float64}
    if "sex" in columns:
        yield "sex", _coded(columns["sex"], {MALE: "male", FEMALE: "female"})
    if "age" in numbers:
        yield "age", _banded(numbers["age"], AGES)
    for name in [name for name in EYES if name in columns][:1]:
        yield "eyes", _coded(columns[name], {1.0: "open", 2.0: "closed"} if name == EYES[0] else {})  # ABIDE's codes
    for name in [name for name in MOTION if name in numbers and not np.isnan(numbers[name]).all()][:1]:
        edges = (-np.inf, *np.nanquantile(numbers[name], [1 / 3, 2 / 3]).tolist())
        yield "motion", _banded(numbers[name], dict(zip(edges, THIRDS, strict=True)))
    sizes = {site: int((cohort.sites == site).sum()) for site in cohort.site_names}
    yield "site", _banded(np.array([sizes.get(site, np.nan) for site in own["target"]], dtype=np.float64), SIZES)


def _coded(values: pd.Series, names: dict[float, str]) -> Names:
    if values.dtype == np.float64:
        groups = [UNKNOWN if np.isnan(value) else names.get(value, f"{value:g}") for value in values.tolist()]
    else:
        groups = [value or UNKNOWN for value in values.tolist()]
    return np.array(groups, dtype=object)


def _banded(values: npt.NDArray[np.float64], names: dict[float, str]) -> Names:
    band = np.searchsorted(np.array(list(names), dtype=np.float64), values, side="right") - 1
    named = np.array(list(names.values()), dtype=object)[np.clip(band, 0, len(names) - 1)]
    return np.where(np.isnan(values), UNKNOWN, named)


def _rows(own: pd.DataFrame, title: str, groups: Names, hide_small: bool) -> list[list[Value]]:
    rank = {name: i for i, name in enumerate(ORDERED)}
    names = sorted(set(groups.tolist()), key=lambda name: (name == UNKNOWN, rank.get(name, 0), name))
    if len(names) < 2:  # the same as all
        return []
    marks = suppressed([int((groups == name).sum()) for name in names]) if hide_small else [""] * len(names)
    if set(marks) == {WITHHELD}:
        return [[f"{title}: all groups", *_hidden(WITHHELD)]]
    shown = {name: own[groups == name] for name, mark in zip(names, marks, strict=True) if not mark}
    largest = max((name for name in shown if name != UNKNOWN), key=lambda name: len(shown[name]), default="")
    rows: list[list[Value]] = []
    for name, mark in zip(names, marks, strict=True):
        difference = "reference" if name == largest else _difference(shown.get(name), shown.get(largest))
        rows.append([f"{title}: {name}", *(_hidden(mark) if mark else [*_scores(shown[name]), difference])])
    return rows


def _hidden(mark: str) -> list[Value]:
    return [mark, mark, *["-"] * 7]


def _difference(own: pd.DataFrame | None, reference: pd.DataFrame | None) -> Value:
    """The groups share no subject, so their variances add up."""
    if own is None or reference is None:
        return NAN
    (area, variance, _), (other, others, _) = within_sites(own), within_sites(reference)
    half = NORMAL * np.sqrt(variance + others)
    ends = (area - other - half, area - other + half) if half > 0 else (NAN, NAN)
    return Estimate(area - other, *ends)


def within_sites(own: pd.DataFrame) -> tuple[float, float, int]:
    """Mean of the within-site AUCs, its variance by DeLong, and the number of sites with enough subjects."""
    areas, variances = [], []
    for _, site in own.groupby("target", sort=False):
        patients = int(site["label"].sum())
        if min(patients, len(site) - patients) >= LEAST_OF_CLASS:
            area, covariance = delong(site["label"].to_numpy(), site["proba"].to_numpy())
            areas.append(float(area[0]))
            variances.append(float(covariance[0, 0]))
    if not areas:
        return np.nan, np.nan, 0
    return float(np.mean(areas)), float(np.sum(variances)) / len(areas) ** 2, len(areas)


def _scores(own: pd.DataFrame) -> list[Value]:
    area, variance, sites = within_sites(own)
    half = NORMAL * np.sqrt(variance)
    ends = Interval(max(area - half, 0), min(area + half, 1)) if variance > 0 else Interval(NAN, NAN)
    hits, misses, rejections, alarms = confusion(own["label"], own["proba"])
    rates = [(hits, hits + misses), (rejections, rejections + alarms), (hits + rejections, len(own))]
    return [len(own), hits + misses, area, ends, sites, *(count / whole if whole else NAN for count, whole in rates)]


def suppressed(sizes: Sequence[int]) -> list[str]:
    """Mark of each group of a partition: SMALL, WITHHELD for groups that would reveal a small one, "" for groups shown.

    The total is assumed to be public. The smallest shown groups are withheld until no hidden size can be computed; if that
    is impossible, all are withheld and their number must not be shown.
    """
    marks = [SMALL if size < LEAST else "" for size in sizes]
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        if not _follows(sizes, marks):
            return marks
        marks[i] = marks[i] or WITHHELD
    return [WITHHELD] * len(sizes) if _follows(sizes, marks) else marks


def _follows(sizes: Sequence[int], marks: Sequence[str]) -> bool:
    hidden = [(size, mark) for size, mark in zip(sizes, marks, strict=True) if mark]
    total = sum(size for size, _ in hidden)
    low = [1 if mark == SMALL else LEAST for _, mark in hidden]
    high = [LEAST - 1 if mark == SMALL else total for _, mark in hidden]
    return any(
        max(low[i], total - (sum(high) - high[i])) == min(high[i], total - (sum(low) - low[i])) for i in range(len(hidden))
    )
