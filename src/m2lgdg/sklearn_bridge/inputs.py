"""What scikit-learn passes to an estimator (X, y, groups) as a `Cohort`, with one sentence for input that is not usable.

`estimator` calls it in `fit` and `predict_proba`. Groups are sites. X holds series, FC matrices or FC vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import UNKNOWN, Cohort
from m2lgdg.connectivity import CLIP, upper_triangle
from m2lgdg.storage import InputError

ONE_SITE = "all"  # name of the site of all subjects if no groups are given
Kind = Literal["series", "matrices", "vectors"]
Floats = npt.NDArray[np.float64]


class InvalidInput(InputError, ValueError):
    """Input that an estimator cannot use; scikit-learn expects a ValueError."""


class Subjects(NamedTuple):
    """X of an estimator: (time, roi) series, or (subject, edge) FC in `vectors`."""

    kind: Kind
    series: Sequence[npt.NDArray[Any]] = ()
    vectors: Floats = np.empty((0, 0))


def read_x(x: Any) -> Subjects:
    """Series or FC matrices in X; anything with fewer than three dimensions is returned as vectors, not yet checked."""
    if hasattr(x, "iloc") or not hasattr(x, "__len__") or not _is_3d(x):
        return Subjects("vectors")
    matrices = [np.asarray(one) for one in x]
    for i, one in enumerate(matrices):
        if one.ndim != 2 or one.dtype.kind not in "fiu":
            raise InvalidInput(f"X holds arrays of shape (time, ROI), but that of subject {i + 1} has shape {one.shape}.")
        if not np.isfinite(one).all():
            raise InvalidInput(f"Input X contains NaN or infinity, first in the array of subject {i + 1}.")
    if all(_is_symmetric(one) for one in matrices):
        if len({one.shape for one in matrices}) > 1:
            raise InvalidInput("X holds FC matrices with different numbers of ROIs.")
        return Subjects("matrices", vectors=fc_vectors(np.stack(matrices).astype(np.float64)))
    return Subjects("series", series=matrices)


def _is_3d(x: Any) -> bool:
    if hasattr(x, "ndim"):
        return bool(x.ndim == 3 and len(x))
    return isinstance(x, list | tuple) and len(x) > 0 and np.ndim(x[0]) == 2


def _is_symmetric(matrix: npt.NDArray[Any]) -> bool:
    return matrix.shape[0] == matrix.shape[1] > 1 and np.allclose(matrix, matrix.T, atol=1e-6)


def fc_vectors(matrices: Floats) -> Floats:
    """(subject, edge) values above the diagonal; those of correlations (a diagonal of 1) become Fisher z."""
    edges = upper_triangle(matrices)
    correlations = np.isclose(np.diagonal(matrices, axis1=1, axis2=2), 1.0, atol=1e-4).all(axis=1, keepdims=True)
    return np.where(correlations, np.arctanh(np.clip(edges, -CLIP, CLIP)), edges)


def read_groups(groups: Any, count: int) -> npt.NDArray[np.str_]:
    """(subject,) site of each subject; without groups, all subjects are of one site."""
    if groups is None:
        return np.full(count, ONE_SITE)
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
    subjects: Subjects, labels: npt.NDArray[np.int8] | None = None, sites: npt.NDArray[np.str_] | None = None
) -> Cohort:
    """A cohort of the subjects in X; without labels and sites if they are only to be predicted.

    FC vectors become series of two volumes whose first is the vector (`OnVectors`), because a cohort holds series.
    """
    series = [np.stack([one, one + 1]) for one in subjects.vectors] if subjects.kind != "series" else subjects.series
    count, rois = len(series), series[0].shape[1]
    try:
        return Cohort(
            series=series,
            subjects=np.array([f"subject-{i + 1}" for i in range(count)]),
            sites=np.full(count, "") if sites is None else sites,
            labels=np.full(count, UNKNOWN, dtype=np.int8) if labels is None else labels,
            rois=tuple(str(i + 1) for i in range(rois)),
            name="X",
        )
    except InputError as error:
        raise InvalidInput(str(error)) from None
