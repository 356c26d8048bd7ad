"""Whether it tells the label that an input, an atlas, a table or the signal of a ROI is missing.

`check` reports it, and `leakage` fails a study for it: a method need not see a value to learn from its absence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.findings import Finding
from m2lgdg.scans import SERIES, Connectomes, each_scan, empty_rois

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int_]
OVER_ALL, WITHIN_SITES = 0.3, 0.1  # least difference between patients and controls in how often something is missing
ANY_INPUT = "At least one input"
# Kinds of which there may be very many: of each group, the one of the largest difference is reported
LISTED = (("flat by label", "empty by label"), ("table gaps by label",))
SIGNIFICANT = 0.01  # over everything that is missing for somebody (Bonferroni)


class Absence(NamedTuple):
    """Something that some subjects do not have, with the kind of finding that names it if it tells the label."""

    kind: str
    name: str
    missing: Bools  # (subject,)


def missing_by_label(cohort: Cohort) -> list[Finding]:
    """A finding for everything that is missing for patients and controls at different rates.

    Compared are subjects of the same site, and all subjects. A difference that is due to sites alone, such as an IQ that a
    site did not measure, tells the site and must be three times as large.
    """
    labelled = cohort.labels >= 0
    patients = cohort.labels[labelled] == 1
    sites = np.unique(cohort.sites[labelled], return_inverse=True)[1]
    absences = [one._replace(missing=one.missing[labelled]) for one in _absences(cohort)]
    absences = [one for one in absences if one.missing.any() and not one.missing.all()]
    findings = []
    for one in absences:
        for groups, least in ((sites, WITHIN_SITES), (np.zeros_like(sites), OVER_ALL)):
            counts = _counts(one.missing, patients, groups)
            controls_rate, patients_rate = _rates(counts)
            if abs(patients_rate - controls_rate) >= least and _chance(counts) * 2 * len(absences) < SIGNIFICANT:
                rates = {"controls": 100 * controls_rate, "patients": 100 * patients_rate}
                within = {"within": "within sites"} if least == WITHIN_SITES else {}
                findings.append(Finding(one.kind, numbers={"column": one.name, **rates, **within}))
                break
    return _summarised(findings)


def _summarised(findings: list[Finding]) -> list[Finding]:
    """One finding on ROIs without signal, one on gaps of tables, and none on all inputs where one tells as much."""

    def difference(one: Finding) -> float:
        return float(abs(one.numbers["patients"] - one.numbers["controls"]))

    last = []
    for kinds in LISTED:
        if some := [one for one in findings if one.kind in kinds]:
            largest, more = max(some, key=difference), {"more": len(some) - 1} if len(some) > 1 else {}
            last.append(largest._replace(numbers={**largest.numbers, **more}))
    single = [difference(one) for one in findings if one.kind == "missing by label" and one.numbers["column"] != ANY_INPUT]
    others = [one for one in findings if not any(one.kind in kinds for kinds in LISTED)]
    return [
        one for one in others if one.numbers["column"] != ANY_INPUT or difference(one) > max(single, default=0.0) + 5
    ] + last


def _absences(cohort: Cohort) -> Iterator[Absence]:
    inputs = cohort.phenotypes[list(cohort.inputs)].isna()
    for column in cohort.inputs:
        yield Absence("missing by label", column, inputs[column].to_numpy())
    if len(cohort.inputs) > 1:
        yield Absence("missing by label", ANY_INPUT, inputs.any(axis=1).to_numpy())
    for atlas, each in cohort.parcellations.items():
        yield Absence("atlas missing by label", atlas, ~each.present)
    yield from _table_absences(cohort)
    for one in cohort.each_atlas():
        flat = np.zeros((len(cohort), len(one.rois)), dtype=bool)  # (subject, roi)
        flat[np.isin(cohort.subjects, one.subjects)] = without_signal(one)
        kind = "flat by label" if one.values == SERIES else "empty by label"
        for name, missing in zip(one.rois, flat.T, strict=True):
            yield Absence(kind, f"{name} ({one.atlas})" if cohort.parcellations else name, missing)


def without_signal(cohort: Cohort) -> Bools:
    """(subject, roi) whether a series is constant in time, or a row of a connectome zero, in the first atlas."""
    if isinstance(scans := cohort.scans, Connectomes):
        return np.array([empty_rois(one, scans.n_rois) for _, one in each_scan(scans)]).reshape(len(scans), scans.n_rois)
    return np.array([(one == one[0]).all(axis=0) for one in scans]).reshape(len(scans), len(cohort.rois))


def _table_absences(cohort: Cohort) -> Iterator[Absence]:
    """Tables without a row, and columns with other gaps than that."""
    for name, table in cohort.tables.items():
        missing = table.isna().to_numpy()  # (subject, column)
        lacking = missing.all(axis=1)
        yield Absence("table missing by label", name, lacking)
        for column, gaps in zip(table.columns, missing.T, strict=True):
            if (gaps != lacking).any():
                yield Absence("table gaps by label", f"{column} of table {name}", gaps)


def _counts(missing: Bools, patients: Bools, groups: Counts) -> Counts:
    """(group, 4) patients, controls, missing patients and missing controls; only groups that have both classes."""
    kinds = np.stack([patients, ~patients, patients & missing, ~patients & missing], axis=1)
    counts = np.zeros((groups.max(initial=-1) + 1, 4), dtype=int)
    np.add.at(counts, groups, kinds)
    return counts[counts[:, :2].all(axis=1)]


def _rates(counts: Counts) -> tuple[float, float]:
    """How often it is missing in controls and in patients, mean over groups with the weights of Mantel and Haenszel."""
    if not len(counts):
        return 0.0, 0.0
    n_patients, n_controls, patients, controls = counts.T
    weights = n_patients * n_controls / (n_patients + n_controls)
    return float(np.average(controls / n_controls, weights=weights)), float(np.average(patients / n_patients, weights=weights))


def _chance(counts: Counts) -> float:
    """Two-sided exact p value: labels permuted within groups, by the number of missing patients over all groups."""
    from scipy.stats import hypergeom  # its import takes a second

    observed, chances = 0, []
    for n_patients, n_controls, patients, controls in counts.tolist():
        missing = patients + controls
        fewest = max(0, missing - n_controls)
        possible = np.arange(fewest, min(missing, n_patients) + 1)
        chances.append(hypergeom.pmf(possible, n_patients + n_controls, n_patients, missing))
        observed += patients - fewest
    total = reduce(np.convolve, chances)
    return float(total[total <= total[observed] * (1 + 1e-7)].sum())
