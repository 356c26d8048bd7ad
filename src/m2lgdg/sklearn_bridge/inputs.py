"""What scikit-learn passes to an estimator (X, y, groups) as a `Cohort`, with one sentence for input that is not usable.

`estimator` calls it in `fit` and `predict_proba`. Groups are sites. X holds series, connectomes or FC vectors, or is a cohort
with all that it has.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN, Cohort
from m2lgdg.scans import CORRELATION, FISHER_Z, SERIES, Connectomes, common_kind, in_kind, is_connectome, possible_kinds
from m2lgdg.storage import InputError

ONE_SITE = "all"  # name of the site of all subjects if no groups are given
Kind = Literal["series", "matrices", "vectors"]
Floats = npt.NDArray[np.float64]


class InvalidInput(InputError, ValueError):
    """Input that an estimator cannot use; scikit-learn expects a ValueError."""


class Subjects(NamedTuple):
    """X of an estimator: (time, roi) series or (roi, roi) matrices in `scans`, (subject, edge) FC in `vectors`, or `cohort`."""

    kind: Kind
    scans: Sequence[npt.NDArray[Any]] = ()
    vectors: Floats = np.empty((0, 0))
    cohort: Cohort | None = None

    @property
    def size(self) -> int:
        """Number of subjects."""
        return len(self.scans) or len(self.vectors) if self.cohort is None else len(self.cohort)


def read_x(x: Any) -> Subjects:
    """Series, matrices or a cohort in X; what has fewer than three dimensions is returned as vectors, not yet checked."""
    if isinstance(x, Cohort) or (isinstance(x, list) and any(isinstance(one, Cohort) for one in x)):
        return _of_cohort(x if isinstance(x, Cohort) else _together(x))
    if hasattr(x, "iloc") or not hasattr(x, "__len__") or not _is_3d(x):
        return Subjects("vectors")
    matrices = [np.asarray(one) for one in x]
    for i, one in enumerate(matrices):
        if one.ndim != 2 or one.dtype.kind not in "fiu":
            raise InvalidInput(f"X holds arrays of shape (time, ROI), but that of subject {i + 1} has shape {one.shape}.")
    if all(map(is_connectome, matrices)):
        return Subjects("matrices", scans=matrices)
    for i, one in enumerate(matrices):
        if not np.isfinite(one).all():
            raise InvalidInput(f"Input X contains NaN or infinity, first in the array of subject {i + 1}.")
    return Subjects("series", scans=matrices)


def _of_cohort(x: Cohort) -> Subjects:
    if len(x.atlases) > 1:
        names = " and ".join(x.atlases)
        raise InvalidInput(f"X holds the atlases {names}; an estimator takes one, such as X.parcellation({x.atlases[0]!r}).")
    if not len(x):
        raise InvalidInput("X is a cohort without subjects.")
    return Subjects("series" if x.values == SERIES else "matrices", cohort=x)


def _together(parts: Sequence[Any]) -> Cohort:
    """One cohort of cohorts of one subject, which is how scikit-learn selects subjects of X; some may be there twice."""
    if any(not isinstance(one, Cohort) or len(one) != 1 for one in parts):
        raise InvalidInput("X is a list with cohorts in it; give one cohort of all subjects.")
    first: Cohort = parts[0]
    tables = [one.tables for one in parts]
    held = {(one.rois, one.atlas, one.values, one.inputs, *own) for one, own in zip(parts, tables, strict=True)}
    if len(held) > 1 or first.parcellations:
        raise InvalidInput("X is a list of cohorts with several atlases, or with different ROIs, scans, inputs or tables.")
    names, drawn = [], Counter[str]()
    for one in parts:
        name = str(one.subjects[0])
        drawn[name] += 1
        names.append(name if drawn[name] == 1 else f"{name} ({drawn[name]})")
    scans: Any = tuple(one.scans[0] for one in parts)
    if isinstance(first.scans, Connectomes):
        scans = Connectomes((one.scans.triangles[0] for one in parts), first.values, len(first.rois))
    each: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in parts]) for name in ("sites", "labels", "tr")}
    return dataclasses.replace(
        first,
        **each,
        series=scans,
        subjects=np.array(names),
        phenotypes=pd.concat([one.phenotypes for one in parts]).set_axis(names, axis=0),
        tables={name: pd.concat([own[name] for own in tables]).set_axis(names, axis=0) for name in tables[0]},
    )


def _is_3d(x: Any) -> bool:
    if hasattr(x, "ndim"):
        return bool(x.ndim == 3 and len(x))
    return isinstance(x, list | tuple) and len(x) > 0 and np.ndim(x[0]) == 2


def _connectomes(matrices: Sequence[npt.NDArray[Any]], fitted_on: str | None) -> Connectomes:
    """Matrices as connectomes of the kind of a fit, each for itself; at a fit, of the kind that all of them can have."""
    rois = _numbers(len(matrices[0]))
    possible, names = list(map(possible_kinds, matrices)), [f"subject {i + 1}" for i in range(len(matrices))]
    kind = fitted_on or common_kind(possible, names, "X")
    bare = [i for i, one in enumerate(matrices) if not np.diagonal(one).any()]  # of one source, as far as one can see
    beyond = next((i for i in bare if kind == CORRELATION and possible[i] == (FISHER_Z,)), None)
    doubtful = next((i for i in bare if len(possible[i]) > 1), None)
    if beyond is not None and doubtful is not None:  # one would be converted, and the other not
        raise InputError(
            f"X holds matrices with a diagonal of 0, of which that of {names[beyond]} is {FISHER_Z} and that of "
            f"{names[doubtful]} may be either; the estimator was fitted on {kind}: give that."
        )
    held = []
    for i, one in enumerate(matrices):
        try:
            held.append(in_kind(one, rois, kind))
        except InputError as error:
            raise InputError(f"X, subject {i + 1}: {error}.") from None
    return Connectomes.of(held, kind, len(rois))


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(i + 1) for i in range(count))


def read_groups(groups: Any, subjects: Subjects) -> npt.NDArray[np.str_]:
    """(subject,) site of each subject; without groups, those of a cohort, and otherwise all subjects are of one site."""
    count = subjects.size
    if groups is None:
        return np.full(count, ONE_SITE) if subjects.cohort is None else subjects.cohort.sites
    given = np.asarray(groups)
    if given.shape != (count,):
        raise InvalidInput(f"groups has shape {given.shape}, but X has {count} subjects; give one site for each subject.")
    if any(one is None or one != one for one in given.tolist()):
        raise InvalidInput("groups contains missing values; give the site of each subject.")
    sites = given.astype(np.str_)
    if count > 1 and len(set(sites.tolist())) == count:
        raise InvalidInput(
            "every group has one subject; groups are the imaging sites, so give subjects of one site the same group."
        )
    return sites


def as_cohort(
    subjects: Subjects,
    labels: npt.NDArray[np.int8] | None = None,
    sites: npt.NDArray[np.str_] | None = None,
    fitted_on: str | None = None,
) -> Cohort:
    """A cohort of the subjects in X; without labels and sites if they are only to be predicted, then of the kind of the fit.

    FC vectors become series of two volumes whose first is the vector (`OnVectors`), because a cohort holds scans.
    """
    if subjects.cohort is not None:
        if labels is None or sites is None:
            return subjects.cohort
        return dataclasses.replace(subjects.cohort, labels=labels, sites=sites)
    held = [np.stack([one, one + 1]) for one in subjects.vectors] if subjects.kind == "vectors" else subjects.scans
    count, rois = len(held), held[0].shape[1]
    try:
        return Cohort(
            series=_connectomes(held, fitted_on) if subjects.kind == "matrices" else held,
            subjects=np.array([f"subject-{i + 1}" for i in range(count)]),
            sites=np.full(count, "") if sites is None else sites,
            labels=np.full(count, UNKNOWN, dtype=np.int8) if labels is None else labels,
            rois=_numbers(rois),
            name="X",
        )
    except InputError as error:
        raise InvalidInput(str(error)) from None
