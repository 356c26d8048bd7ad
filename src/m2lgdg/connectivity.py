"""Features of scans: Fisher-z correlations, shrunk covariances and signal amplitude, each of one subject only.

Correlations and covariances are computed from series or taken from connectomes; the others need series.

Methods call these functions; `tangent.py` projects covariances to a tangent space. Fits on one cohort can share the features
of this module (`sharing_features`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.preprocess import on_threads
from m2lgdg.scans import CLIP as CLIP
from m2lgdg.scans import COVARIANCE, FISHER_Z, Connectomes, arrays_of, correlation, kind_of, own_correlation, triangle
from m2lgdg.scans import standardised as standardised
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Series = Sequence[Singles]
Scans = Series | Connectomes
View = Callable[[npt.NDArray[np.float32]], Floats]  # transforms one (time, roi) series before it is correlated
LARGEST_Z = np.float32(np.arctanh(CLIP))
LEAST_EIGENVALUE = 0.2  # of a correlation matrix that is made positive definite; chosen in docs/methods.md


def frame_weighted(series: npt.NDArray[np.float32]) -> Floats:
    """`standardised`, a time point with mean square e over ROIs having the weight 1 / (1 + (e / median e)^2).

    So a few time points of high amplitude do not dominate correlations. The weighted series has mean 0 and variance 1.
    """
    wide = standardised(series)
    size = (wide**2).mean(axis=1)
    weight = 1 / (1 + (size / (np.median(size) or 1.0)) ** 2)  # (time,)
    weight /= weight.mean()
    wide -= (weight @ wide) / len(wide)
    wide *= np.sqrt(weight)[:, None]
    spread = np.sqrt((wide**2).mean(axis=0))
    return np.asarray(wide / np.where(spread > 0, spread, 1.0))


def deviations(series: npt.NDArray[np.float32]) -> Floats:
    """Absolute deviation of each ROI from its mean, as a (time, roi) series with mean 0 and variance 1."""
    return standardised(np.abs(standardised(series)))


def correlations(scans: Scans, view: View = standardised) -> Floats:
    """(subject, roi, roi) Pearson correlations of the series after `view`; 1 on the diagonal, 0 for a flat ROI.

    Those of connectomes are the matrices themselves, after the inverse of Fisher's z, or with covariances divided by the sds.
    """
    n = n_rois(scans)
    result = np.empty((len(scans), n, n))
    of_one = partial(own_correlation, kind=_kind(scans, view), n=n) if isinstance(scans, Connectomes) else None
    for i, matrix in enumerate(on_threads(of_one or (lambda one: correlation(view(one))), arrays_of(scans))):
        result[i] = matrix
    return result


def n_rois(scans: Scans) -> int:
    """Number of ROIs."""
    return scans.n_rois if isinstance(scans, Connectomes) else int(scans[0].shape[1])


def _kind(connectomes: Connectomes, view: object = standardised) -> str:
    """Kind of the connectomes; a view of series other than the plain one is refused."""
    if view is not standardised:
        raise InputError("frame-weighted and deviation FC are computed from time series, and the cohort holds connectomes.")
    return connectomes.kind


def _own_edges(one: Singles, kind: str, n: int) -> npt.NDArray[Any]:
    """(edge,) Fisher z above the diagonal of a triangle."""
    if kind == FISHER_Z:
        return np.clip(one[~triangle(n)[2]], -LARGEST_Z, LARGEST_Z)
    plain = kind != COVARIANCE
    values = one[~triangle(n)[2]].astype(np.float64) if plain else upper_triangle(own_correlation(one, kind, n))
    return np.arctanh(np.clip(values, -CLIP, CLIP))


def fc_features(scans: Scans, view: View = standardised) -> Singles:
    """(subject, edge) Fisher z of the correlations above the diagonal, in row order.

    Those of the views of this module are shared between fits; any other view is computed afresh.
    """
    if isinstance(scans, Connectomes):
        _kind(scans, view)
    shared = next((feature for of_view, feature in zip(VIEWS, EDGES, strict=True) if of_view is view), None)
    return _of_subjects(scans, shared or _edge_feature(view))


def _edge_feature(view: View) -> Feature:
    own = _own_edges if view is standardised else None
    return Feature(getattr(view, "__name__", ""), _edge_count, partial(_edges, view=view), own)


def _edge_count(rois: int) -> tuple[int, ...]:
    return (rois * (rois - 1) // 2,)


def _edges(one: Singles, view: View) -> Floats:
    return np.arctanh(np.clip(upper_triangle(correlation(view(one))), -CLIP, CLIP))


def upper_triangle(matrices: Floats) -> Floats:
    """(..., edge) values above the diagonal of (..., roi, roi), in row order."""
    rows, columns = _above_diagonal(matrices.shape[-1])
    return np.asarray(matrices[..., rows, columns])


@cache
def _above_diagonal(n: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    rows, columns = np.triu_indices(n, 1)
    return rows, columns


def fisher_matrices(scans: Scans) -> npt.NDArray[np.float32]:
    """(subject, roi, roi) Fisher z of the correlations with a zero diagonal, the input of networks on connectivity."""
    rows, columns = _above_diagonal(n := n_rois(scans))
    result = np.zeros((len(scans), n, n), dtype=np.float32)
    result[:, rows, columns] = result[:, columns, rows] = fc_features(scans)
    return result


def source_scaling(values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Mean and sd of each feature over source subjects (the first dimension); constant features get the scale 1."""
    spread = values.std(axis=0, dtype=np.float64)
    scale = np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
    return {"mean": values.mean(axis=0, dtype=np.float64).astype(np.float32), "scale": scale}


def amplitude_features(series: Scans) -> Floats:
    """(subject, roi) log standard deviation of each ROI, minus the subject's mean over ROIs; 0 for a flat ROI."""
    return np.asarray(_of_subjects(series, AMPLITUDE))


def _amplitude(series: Singles) -> Floats:
    alive = (series != series[0]).any(axis=0)
    log = np.log(np.where(alive, series.std(axis=0, dtype=np.float64), 1.0))
    middle = (log * alive).sum() / max(int(alive.sum()), 1)
    return np.where(alive, log - middle, 0.0)


def covariances(scans: Scans) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances of the standardised series, always positive definite.

    Of a connectome, whose number of volumes is not known, (1 - a) R + a I of the correlations R, with the smallest a of at
    least 0.2 with which no eigenvalue is below 0.2.
    """
    return _of_subjects(scans, COVARIANCES).astype(np.float64)


def row_covariances(scans: Scans) -> Floats:
    """(subject, roi, roi) Ledoit-Wolf covariances with the rows of each subject's correlation matrix as observations."""
    return _of_subjects(scans, ROW_COVARIANCES).astype(np.float64)


def _row_covariance(series: Singles) -> Floats:
    return _of_rows(correlation(standardised(series)))


def _of_rows(rows: Floats) -> Floats:
    return _shrunk(rows - rows.mean(axis=0))


def log_features(scans: Scans) -> Singles:
    """(subject, roi (roi + 1) / 2) matrix logarithms of `row_covariances`, off-diagonal entries times sqrt 2.

    Log-Euclidean coordinates: those of a tangent space at the identity, so that nothing is fitted.
    """
    return _of_subjects(scans, LOGARITHMS)


def _log_coordinates(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    rows, columns, diagonal = triangle(len(matrix))
    log = (vectors * np.log(np.maximum(values, 1e-12))) @ vectors.T
    return np.asarray(log[rows, columns] * np.where(diagonal, 1.0, np.sqrt(2.0)))


def _positive_definite(one: Singles, kind: str, n: int) -> Floats:
    matrix = own_correlation(one, kind, n)
    least = min(float(np.linalg.eigvalsh(matrix)[0]), 0.0)
    shrinkage = (LEAST_EIGENVALUE - least) / (1 - least)
    return (1 - shrinkage) * matrix + shrinkage * np.eye(n)


def _covariance(series: Singles) -> Floats:
    return _shrunk(standardised(series))


def _shrunk(x: Floats) -> Floats:
    """Ledoit-Wolf covariance of (observation, roi) values with mean 0: S = X'X / t, shrunk towards mu I."""
    t, n = x.shape
    sample = x.T @ x / t
    mu = np.trace(sample) / n
    if not mu:  # a flat scan, whose ROIs do not correlate
        return np.eye(n)
    distance = (sample**2).sum() - n * mu**2  # |S - mu I|^2
    error = (((x**2).sum(axis=1) ** 2).sum() / t - (sample**2).sum()) / t  # mean of |x x' - S|^2, over t
    shrinkage = min(error, distance) / distance if distance > 0 else 0.0
    result = (1 - shrinkage) * sample
    result[np.diag_indices(n)] += max(shrinkage, 1e-6) * mu  # the floor keeps the matrix invertible with flat ROIs
    return np.asarray(result)


class Feature(NamedTuple):
    """A feature of one subject. Only the instances of this module, known by their identity, are shared between fits."""

    name: str
    shape: Callable[[int], tuple[int, ...]]  # of the feature, from the number of ROIs
    of_series: Callable[[Singles], Floats]
    of_connectome: Callable[..., Floats] | None = None  # from a triangle, its kind and the number of ROIs
    dtype: type = np.float32

    def of_all(self, scans: Scans) -> Iterator[Floats]:
        """Features of each subject, in order."""
        if not isinstance(scans, Connectomes):
            return on_threads(self.of_series, scans)
        if self.of_connectome is None:
            raise InputError(f"{self.name} is computed from time series, and the cohort holds connectomes.")
        return on_threads(partial(self.of_connectome, kind=scans.kind, n=scans.n_rois), scans.triangles)


VIEWS = (standardised, frame_weighted, deviations)
EDGES = tuple(map(_edge_feature, VIEWS))
AMPLITUDE = Feature("amplitude", lambda rois: (rois,), _amplitude, None, np.float64)
COVARIANCES = Feature("covariances", lambda rois: (rois, rois), _covariance, _positive_definite)
ROW_COVARIANCES = Feature(
    "row_covariances",
    lambda rois: (rois, rois),
    _row_covariance,
    lambda one, kind, n: _of_rows(own_correlation(one, kind, n)),
)
LOGARITHMS = Feature(
    "logarithms",
    lambda rois: (rois * (rois + 1) // 2,),
    lambda one: _log_coordinates(_row_covariance(one)),
    lambda one, kind, n: _log_coordinates(_of_rows(own_correlation(one, kind, n))),
)
SHARED = frozenset(map(id, (*EDGES, AMPLITUDE, COVARIANCES, ROW_COVARIANCES, LOGARITHMS)))


class CohortFeatures:
    """Features of the subjects of a cohort, each computed once, when it is first asked for.

    They belong to the array that holds a subject's scan, so another scan never gets them. None of them is fitted.
    """

    def __init__(self, scans: Scans) -> None:
        self.scans = scans  # held, so that the ids of their arrays stay unique
        self.rows = {id(one): i for i, one in enumerate(arrays_of(scans))}
        self.arrays: dict[int, npt.NDArray[Any]] = {}

    def find(self, scans: Scans) -> list[int] | None:
        """Rows of some subjects; None if one of them is not of this cohort, or of another kind."""
        if kind_of(scans) != kind_of(self.scans):  # one triangle may be taken for two kinds
            return None
        rows = [self.rows.get(id(one), -1) for one in arrays_of(scans)]
        return None if -1 in rows else rows

    def array(self, feature: Feature) -> npt.NDArray[Any]:
        """(subject, ...) features of all subjects."""
        if id(feature) not in self.arrays:
            self.arrays[id(feature)] = self.compute(feature)
        return self.arrays[id(feature)]

    def compute(self, feature: Feature) -> npt.NDArray[Any]:
        """A feature that was not asked for before."""
        return _stack(self.scans, feature)


_IN_USE: list[CohortFeatures] = []


@contextmanager
def sharing_features(*scans: Scans) -> Iterator[None]:
    """Within this context, features of these subjects, by atlas, are computed once; for several fits on parts of one cohort."""
    shared = [CohortFeatures(of_atlas) for of_atlas in scans]
    _IN_USE.extend(shared)
    try:
        yield
    finally:
        for one in shared:
            _IN_USE.remove(one)


def use_features(*features: CohortFeatures) -> None:
    """Use these features until others take their place; a worker process holds one cohort at a time."""
    _IN_USE[:] = features


def _of_subjects(scans: Scans, feature: Feature) -> npt.NDArray[Any]:
    """(subject, ...) features, from those of a cohort where they are shared.

    Edges of connectomes are not: they are nearly a copy, and a second one of all subjects would double the memory of a cohort.
    """
    copies = isinstance(scans, Connectomes) and feature in EDGES
    for shared in _IN_USE if id(feature) in SHARED and not copies else ():
        rows = shared.find(scans)
        if rows is not None:
            return np.asarray(shared.array(feature)[rows])
    return _stack(scans, feature)


def _stack(scans: Scans, feature: Feature) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = np.empty((len(scans), *feature.shape(n_rois(scans))), dtype=feature.dtype)
    for i, values in enumerate(feature.of_all(scans)):
        result[i] = values
    return result
