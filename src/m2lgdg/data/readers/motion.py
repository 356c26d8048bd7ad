"""Exclusion of subjects who moved too much in the scanner, by a phenotype column with their mean head motion.

`m2lgdg.read` applies it to any kind of cohort after the subjects were read, if `max_motion` is given.
"""

from __future__ import annotations

import math

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers.tables import MOTION, present_columns
from m2lgdg.findings import NO_MOTION, TOO_MUCH_MOTION, Exclusion
from m2lgdg.storage import InputError


def limit_motion(cohort: Cohort, max_motion: float, column: str | None = None) -> Cohort:
    """The subjects whose head motion is below `max_motion`; the others are listed in `Cohort.excluded` with their value.

    `column` is the phenotype with the motion, by default the first that has one of the usual names (`tables.MOTION`). A subject
    without a value, or with a negative one, is excluded: nothing says that it moved little.
    """
    if isinstance(max_motion, bool) or not isinstance(max_motion, int | float) or not 0 < max_motion < math.inf:
        raise InputError(f"max_motion must be a number above 0, not {max_motion!r}.")
    column = _motion_column(cohort, column)
    values = cohort.phenotypes[column].to_numpy()
    keep = (values >= 0) & (values < max_motion)
    if not keep.any():
        raise InputError(f"cohort {cohort.name} has no subject with {column} below {max_motion:g}; raise --max-motion.")
    excluded = [
        Exclusion(str(cohort.subjects[i]), str(cohort.sites[i]), *_reason(float(values[i]), column, max_motion))
        for i in np.flatnonzero(~keep)
    ]
    note = f"only subjects with {column} below {max_motion:g} (head motion)"
    return cohort.select(keep)._changed(excluded=tuple(sorted([*cohort.excluded, *excluded])), notes=(*cohort.notes, note))


def _reason(value: float, column: str, limit: float) -> tuple[str, str, str]:
    if value >= 0:
        return TOO_MUCH_MOTION, f"{column} is not below {limit:g}", f"value {value:.6g}"
    return NO_MOTION, f"column {column}", "" if math.isnan(value) else f"value {value:g}"


def usual_column(cohort: Cohort) -> str | None:
    """The first phenotype that has one of the usual names of mean head motion, if there is one."""
    names = {str(name).lower(): str(name) for name in reversed(cohort.phenotypes.columns)}
    return next((names[name] for name in MOTION if name in names), None)


def _motion_column(cohort: Cohort, wanted: str | None) -> str:
    table = cohort.phenotypes
    column = wanted if wanted is not None else usual_column(cohort)
    if column is None:
        raise InputError(
            f"cohort {cohort.name} has no column of head motion ({', '.join(MOTION)}); name another one with --motion-column."
        )
    if column not in table.columns:
        raise InputError(f"cohort {cohort.name} has no column {column} for --motion-column; {present_columns(table)}.")
    if table[column].dtype != np.float64:
        raise InputError(f"cohort {cohort.name}, column {column} holds text; head motion must be a number.")
    return column
