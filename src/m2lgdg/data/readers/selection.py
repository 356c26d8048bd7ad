"""Which subjects of a cohort are kept after reading: by head motion, by site, or by an inclusion list of `m2lgdg check`.

`m2lgdg.read` and `m2lgdg convert` apply these to any kind of cohort. Everybody who is left out is listed in `Cohort.excluded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers.tables import MOTION, SubjectTable, need_columns, present_columns, read_text_table, usual_name
from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.findings import BY_LIST, NO_MOTION, TOO_MUCH_MOTION, Exclusion
from m2lgdg.storage import InputError


def keep(cohort: Cohort, chosen: npt.ArrayLike, reason: Callable[[int], Sequence[str]], *notes: str) -> Cohort:
    """The subjects of a mask; `reason` gives the kind, and what else an Exclusion has, for the position of another one."""
    mask = np.asarray(chosen, dtype=bool)
    excluded = [Exclusion(str(cohort.subjects[i]), str(cohort.sites[i]), *reason(i)) for i in np.flatnonzero(~mask).tolist()]
    return cohort.select(mask)._changed(excluded=tuple(sorted([*cohort.excluded, *excluded])), notes=(*cohort.notes, *notes))


def limit_motion(cohort: Cohort, max_motion: float, column: str | None = None) -> Cohort:
    """The subjects whose head motion is below `max_motion`; the others are listed in `Cohort.excluded` with their value.

    `column` is the phenotype with the motion, by default the first of a usual name. A subject without a value, or with a
    negative one, is excluded: nothing says that it moved little.
    """
    if isinstance(max_motion, bool) or not isinstance(max_motion, int | float) or not 0 < max_motion < math.inf:
        raise InputError(f"max_motion must be a number above 0, not {max_motion!r}.")
    name = _motion_column(cohort, column)
    values = cohort.phenotypes[name].to_numpy()
    mask = (values >= 0) & (values < max_motion)
    if not mask.any():
        raise InputError(f"cohort {cohort.name} has no subject with {name} below {max_motion:g}; raise --max-motion.")

    def reason(i: int) -> tuple[str, str, str]:
        if values[i] >= 0:
            return TOO_MUCH_MOTION, f"{name} is not below {max_motion:g}", f"value {values[i]:.6g}"
        return NO_MOTION, f"column {name}", "" if math.isnan(values[i]) else f"value {values[i]:g}"

    return keep(cohort, mask, reason, f"only subjects with {name} below {max_motion:g} (head motion)")


def usual_column(cohort: Cohort) -> str | None:
    """The first phenotype that has one of the usual names of mean head motion, if there is one."""
    names = {usual_name(name): str(name) for name in reversed(cohort.phenotypes.columns)}
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


def keep_included(cohort: Cohort, path: Path) -> Cohort:
    """Keep the subjects that are included in an inclusion.csv of `check`; the others are recorded as excluded by it."""
    table = unquoted_table(read_text_table(path))
    need_columns(table, ("subject", "status"), path)
    table = table[(table["subject"] != "") | (table["status"] != "excluded")]  # some releases list scans without a subject
    table = SubjectTable.of(table, "subject", path).rows
    for subject, status in table["status"].items():
        if status not in ("included", "excluded"):
            raise InputError(f"{path}: subject {subject}, column status: {status[:40]!r} is neither included nor excluded.")
    included = table.loc[table["status"] == "included", "subject"]
    unknown = sorted(set(included) - set(cohort.subjects.tolist()))
    if unknown:
        raise InputError(f"{path}: subject {unknown[0]} is listed as included but is not in the cohort.")
    mask = np.isin(cohort.subjects, included)
    if not mask.any():
        raise InputError(f"{path} includes no subject.")
    return keep(cohort, mask, lambda i: (BY_LIST, "", path.name))
