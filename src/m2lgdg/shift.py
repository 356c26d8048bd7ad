"""How far a new subject is from those a model was trained on, and what else its user must be told about it, in short words.

Stands before the methods: a fitted model keeps what is here beside its weights, and `m2lgdg predict` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2lgdg.check import SHORT
from m2lgdg.cohort import Cohort
from m2lgdg.storage import InputError

LEAST_VOLUMES = 20  # of fewer, a correlation has a standard error of 0.25 and more: there is nothing to decide on


def refuse_shortest(cohort: Cohort) -> None:
    """Refuse scans that are too short for any method."""
    for subject, length in zip(cohort.subjects, cohort.lengths, strict=True):
        if length < LEAST_VOLUMES:
            raise InputError(
                f"the scan of subject {subject} has {length} volumes; a prediction needs {LEAST_VOLUMES} at least."
            )


def missing_phenotypes(cohort: Cohort, wanted: Sequence[str]) -> list[list[str]]:
    """For each subject, which of the wanted phenotypes are not known; a column that is not there is known of nobody."""
    have = cohort.phenotypes.reindex(columns=list(wanted))
    lost = (have.isna() | (have == "")).to_numpy()  # (subject, column)
    return [[name for name, gone in zip(wanted, row, strict=True) if gone] for row in lost]


def flags(cohort: Cohort, wanted: Sequence[str]) -> list[list[str]]:
    """For each subject, in short words, why its prediction may be worse than others; `wanted` are the model's phenotypes."""
    found: list[list[str]] = []
    for one, missing in zip(cohort.series, missing_phenotypes(cohort, wanted), strict=True):
        flat = int((one == one[0]).all(axis=0).sum())
        said = [f"phenotypes missing: {' '.join(missing)}"] if missing else []
        said += [f"short scan: {len(one)}"] if len(one) < SHORT else []
        said += [f"flat rois: {flat}"] if flat else []
        found.append(said)
    return found
