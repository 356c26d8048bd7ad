"""The scans of a cohort: time series of ROIs, or connectomes, which are the matrices between ROIs that others computed.

`Cohort` holds them and `connectivity` computes features from either. Every array here is read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from m2lgdg.storage import InputError

SERIES = "series"
CORRELATION, FISHER_Z, COVARIANCE, PARTIAL = KINDS = ("correlation", "fisher-z", "covariance", "partial-correlation")
HIDDEN = 1e-5  # sd of a column relative to its level, below which float32 would spoil the signal
ROUNDING = 1e-11  # the same of a flat column, in float64
ASYMMETRY = 1e-4  # largest difference between the two halves of a symmetric matrix, relative to its largest value
DIAGONAL = 1e-3  # the same of a diagonal from 1
ROUNDED = 1e-6  # the same of the values of a constant diagonal from each other
OVER_ONE = 1e-4  # by which rounding may carry a correlation above 1
CLIP = 0.999  # of correlations computed here, as Fisher's z of 1 is infinite
LARGEST = float(np.finfo(np.float32).max)
LEAST_Z = 2.0  # of a diagonal: Fisher's z of 0.96, as what replaces 1; covariances of z-scored series have about 1
LARGEST_Z = 20.0  # Fisher's z of the largest double below 1 is 18.7
# What whoever gives a matrix for a series is told, in files as in memory
IS_CONNECTOME = "a symmetric or triangular matrix, or one with a constant diagonal, is a connectome, not a series"
NOT_SERIES = f"{IS_CONNECTOME}; a folder of them is read with --kind connectomes, arrays by Cohort.from_connectomes"
Singles = npt.NDArray[np.float32]


class Connectomes(Sequence[Any]):
    """Symmetric matrices of one kind; `connectomes[i]` is the (roi, roi) matrix of a subject, None if it has none.

    Only the upper triangles are held, diagonal included, in row order: (roi (roi + 1) / 2,) each. The diagonal is 1 for
    correlations and 0 for Fisher z, whatever it was in a file.
    """

    def __init__(self, triangles: Iterable[npt.ArrayLike | None], kind: str, n_rois: int) -> None:
        if kind not in KINDS:
            raise InputError(f"connectomes hold {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {kind}.")
        self.kind, self.n_rois = kind, n_rois
        self.triangles = tuple(None if one is None else frozen(as_float32(np.asarray(one))) for one in triangles)

    @classmethod
    def of(cls, matrices: Iterable[npt.ArrayLike | None], kind: str, n_rois: int) -> Connectomes:
        """From (roi, roi) matrices without a defect (`connectome_defect`)."""
        return cls((None if one is None else packed(np.asarray(one), kind) for one in matrices), kind, n_rois)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.triangles, self.kind, self.n_rois)  # as an unpickled array can be written to

    def __len__(self) -> int:
        return len(self.triangles)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self.take(range(len(self))[which])
        one = self.triangles[which]
        return None if one is None else unpacked(one, self.n_rois)

    def take(self, rows: Iterable[int]) -> Connectomes:
        """The connectomes of some subjects."""
        return Connectomes((self.triangles[i] for i in rows), self.kind, self.n_rois)

    def __repr__(self) -> str:
        return f"{len(self)} connectomes ({self.kind}) of {self.n_rois} ROIs"


class Absent(Sequence[Any]):
    """Stands for the series of a cohort of connectomes, or the reverse: whoever uses it gets one error that says so."""

    def __init__(self, scans: Scans, message: str) -> None:
        self.scans, self.message = scans, message

    def _refuse(self, *_: object) -> NoReturn:
        raise InputError(self.message)

    __len__ = __getitem__ = __iter__ = __contains__ = __array__ = _refuse

    def __repr__(self) -> str:
        return f"<{self.message}>"


Scans = tuple[Any, ...] | Connectomes  # of an atlas, one for each subject


def as_scans(given: Any) -> Scans:
    """Series or connectomes as a cohort holds them."""
    if isinstance(given, Absent):  # `dataclasses.replace` gives back what it has read from the field
        given = given.scans
    if isinstance(given, Connectomes):
        return given.take(range(len(given)))
    return tuple(None if one is None else read_only(one) for one in given)


def kind_of(scans: Sequence[Any]) -> str:
    """Kind of connectomes, or "series"."""
    return scans.kind if isinstance(scans, Connectomes) else SERIES


def arrays_of(scans: Sequence[Any]) -> tuple[Any, ...]:
    """What is held of each subject: its series, or the triangle of its connectome."""
    return scans.triangles if isinstance(scans, Connectomes) else tuple(scans)


def some_of(scans: Scans, rows: Sequence[int]) -> Scans:
    """The scans of some subjects."""
    return scans.take(rows) if isinstance(scans, Connectomes) else tuple(scans[i] for i in rows)


def read_only(series: npt.ArrayLike) -> Singles:
    """A series as float32 that nobody can write to."""
    return frozen(as_float32(np.asarray(series)))


def as_float32(array: npt.NDArray[Any]) -> Singles:
    """Numbers as float32, of which a column (of (time, roi)) is centred first where its level would hide its signal."""
    if array.ndim == 2 and array.dtype.itemsize > 4 and array.dtype.kind in "fiu" and array.size:
        with np.errstate(invalid="ignore", over="ignore"):
            level, spread = array.mean(axis=0, dtype=np.float64), array.std(axis=0, dtype=np.float64)
            hidden = (spread < HIDDEN * np.abs(level)) & (spread > ROUNDING * np.abs(level))
        if hidden.any():
            array = array - np.where(hidden, level, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values as a view of bytes, which nobody can make writeable; such an array, or one of a read-only map, as it is."""
    root = map_of(array)
    safe = isinstance(root, bytes) or (isinstance(root, np.memmap) and root.mode == "r")
    if safe and array.flags.c_contiguous and not array.flags.writeable:
        return array
    return np.ndarray(array.shape, array.dtype, array.tobytes())


def map_of(array: object) -> object:
    """The map of a file, or what else an array is a view of."""
    while isinstance(array, np.ndarray) and not (isinstance(array, np.memmap) and array.filename):
        array = array.base
    return array


@cache
def triangle(n_rois: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Rows and columns of the upper triangle in row order, and where it is the diagonal."""
    rows, columns = np.triu_indices(n_rois)
    return rows, columns, rows == columns


def packed(matrix: npt.NDArray[Any], kind: str) -> Singles:
    """(roi (roi + 1) / 2,) upper triangle of the mean of both halves, with the diagonal of its kind."""
    values = _upper(matrix, kind)
    return (values if kind in (FISHER_Z, COVARIANCE) else np.clip(values, -1.0, 1.0)).astype(np.float32)


def _upper(matrix: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float64]:
    rows, columns, diagonal = triangle(len(matrix))
    wide = np.asarray(matrix, dtype=np.float64)
    values = np.asarray(wide[rows, columns] / 2 + wide[columns, rows] / 2)
    if kind != COVARIANCE:
        values[diagonal] = 0.0 if kind == FISHER_Z else 1.0
    return values


def unpacked(values: npt.NDArray[Any], n_rois: int) -> npt.NDArray[Any]:
    """(roi, roi) read-only matrix of an upper triangle."""
    matrix = _full(values, n_rois)
    matrix.setflags(write=False)
    return matrix


def _full(values: npt.NDArray[Any], n_rois: int) -> npt.NDArray[Any]:
    return values[_places(n_rois)]


@cache
def _places(n_rois: int) -> npt.NDArray[np.intp]:
    """(roi, roi) position of each pair in a triangle: one lookup takes a fifth of two assignments by rows and columns."""
    rows, columns, _ = triangle(n_rois)
    places = np.empty((n_rois, n_rois), dtype=np.intp)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return places


def empty_rois(values: npt.NDArray[Any], n_rois: int) -> npt.NDArray[np.bool_]:
    """(roi,) whether all connections of a ROI are zero, from a triangle: it had no signal."""
    rows, columns, diagonal = triangle(n_rois)
    connected = (values != 0) & ~diagonal
    if len(values) - n_rois - np.count_nonzero(connected) < n_rois - 1:  # fewer zeros than one such ROI has
        return np.zeros(n_rois, dtype=bool)
    return np.asarray(np.bincount(rows, connected, n_rois) + np.bincount(columns, connected, n_rois) == 0)


def standardised(series: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """(time, roi) series with mean 0 and variance 1 in each ROI; a flat ROI becomes 0."""
    wide = series.astype(np.float64)
    wide -= wide.mean(axis=0)
    spread = wide.std(axis=0)
    flat = (series == series[0]).all(axis=0)
    wide /= np.where(flat, 1.0, spread)
    wide[:, flat] = 0.0
    return wide


def correlation(unit: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(roi, roi) Pearson correlations of a standardised (time, roi) series; 1 on the diagonal, 0 for a flat ROI."""
    matrix = np.clip(unit.T @ unit / len(unit), -1.0, 1.0)
    np.fill_diagonal(matrix, 1.0)
    return matrix


def own_correlation(one: Singles, kind: str, n: int) -> npt.NDArray[np.float64]:
    """(roi, roi) correlations of a triangle; 1 on the diagonal."""
    values = one.astype(np.float64)
    matrix = _full(np.tanh(values) if kind == FISHER_Z else values, n)
    if kind == COVARIANCE:
        spread = np.sqrt(np.diagonal(matrix))
        spread[spread == 0] = 1.0
        matrix = np.clip(matrix / (spread[:, None] * spread), -1.0, 1.0)
    np.fill_diagonal(matrix, 1.0)
    return matrix


def fisher_connectomes(scans: Scans, n_rois: int) -> Connectomes:
    """Fisher z of the correlations of each series; connectomes as they are."""
    if isinstance(scans, Connectomes):
        return scans
    rows, columns, diagonal = triangle(n_rois)
    triangles: list[Any] = [None] * len(scans)
    for i, one in each_scan(scans):
        values = np.arctanh(np.clip(correlation(standardised(one))[rows, columns], -CLIP, CLIP))
        triangles[i] = np.where(diagonal, 0.0, values).astype(np.float32)
    return Connectomes(triangles, FISHER_Z, n_rois)


def each_scan(scans: Scans) -> Iterator[tuple[int, Any]]:
    """Position and array of the subjects that have a scan."""
    return ((i, one) for i, one in enumerate(arrays_of(scans)) if one is not None)


def series_defect(series: npt.NDArray[Any], rois: Sequence[str]) -> str | None:
    """Why a (time, roi) series is unusable, in words, or None. Single flat ROIs are reported by `check` instead."""
    if is_connectome(series):
        return NOT_SERIES
    if len(series) < 2:
        return f"the series has {len(series)} volume{'s' * (len(series) != 1)}"
    if not np.isfinite(series).all():
        bad = ~np.isfinite(series)
        count = int(bad.sum())
        volume, roi = np.argwhere(bad)[0]
        kind = "NaN" if np.isnan(series[volume, roi]) else "infinite value"
        return f"{kind} at volume {volume + 1} of ROI {rois[roi]} ({count} such value{'s' * (count != 1)})"
    if (series[1:] == series[0]).all():
        return "every ROI is constant" if series.any() else "the series is zero everywhere"
    return None


def is_connectome(matrix: npt.NDArray[Any]) -> bool:
    """Whether a matrix is symmetric or one half of such a matrix, whatever stands on its diagonal, or has a constant one."""
    if len(matrix) != matrix.shape[1] or len(matrix) < 3:
        return False
    finite = np.where(np.isfinite(matrix), matrix, 0)  # (roi, roi)
    halves = finite[np.triu_indices(len(matrix), 1)], finite.T[np.triu_indices(len(matrix), 1)]  # (edge,) each
    empty, full = sorted(np.count_nonzero(half) / len(half) for half in halves)
    with np.errstate(over="ignore"):
        largest, difference = np.abs(halves).max(), np.abs(halves[0] - halves[1]).max()
    constant = len(matrix) > 3 and full > 0.5 and np.ptp(np.diagonal(finite)) <= ROUNDED * largest  # that of a series varies
    return bool(full > 0 and (difference <= ASYMMETRY * largest or (empty == 0 and full > 0.5) or constant))


def possible_kinds(matrix: npt.NDArray[Any]) -> tuple[str, ...]:
    """What a (roi, roi) matrix may hold by its range and diagonal; partial correlations cannot be told from correlations."""
    off = np.abs(matrix[~np.eye(len(matrix), dtype=bool)])
    return kinds_by(np.diagonal(matrix), float(off[np.isfinite(off)].max(initial=0)))


def kinds_by(diagonal: npt.NDArray[Any], largest: float) -> tuple[str, ...]:
    """The same by the diagonal and the largest absolute value beside it; a diagonal of NaN was left out, as one of 0 was."""
    ones = np.abs(diagonal - 1) <= DIAGONAL
    left_out = (diagonal == 0) | np.isnan(diagonal)
    if 2 * np.count_nonzero(ones | left_out) < len(diagonal):  # single ROIs may be empty, or wrong
        if not np.isfinite(diagonal).all():
            return (FISHER_Z,)
        middle = float(np.median(diagonal))
        constant = np.ptp(diagonal) <= DIAGONAL * np.abs(diagonal).max()
        if constant and middle < 0:  # of an inverse covariance that was scaled and turned into partial correlations
            return (CORRELATION,)
        return (FISHER_Z,) if constant and (middle >= LEAST_Z or largest > middle) else (COVARIANCE,)
    if ones.any():
        return (CORRELATION,)
    return (FISHER_Z,) if largest > 1 + OVER_ONE else (CORRELATION, FISHER_Z)


def common_kind(possible: Iterable[tuple[str, ...]], names: Sequence[str], where: str) -> str:
    """The kind that all matrices can have, of those that each can have; names are of the matrices."""
    left: tuple[str, ...] = (CORRELATION, FISHER_Z, COVARIANCE)
    decided = names[0]  # the last one that left fewer kinds
    for name, kinds in zip(names, possible, strict=True):
        both = tuple(kind for kind in left if kind in kinds)
        if not both:
            found = f"that of {decided} looks like {left[0]}, that of {name} like {kinds[0]}"
            raise InputError(f"{where}: the connectomes are of different kinds: {found}; convert them to one kind.")
        left, decided = both, decided if both == left else name
    return left[0]


def in_kind(matrix: npt.NDArray[Any], rois: Sequence[str], kind: str) -> npt.NDArray[Any]:
    """A (roi, roi) matrix as a connectome of the kind that a model was trained on, or an InputError that says why it is none.

    Fisher z and correlations are turned into each other. A matrix that may hold either is taken as it is.
    """
    possible = possible_kinds(matrix)
    own = kind if kind in possible or (kind == PARTIAL and CORRELATION in possible) else possible[0]
    if defect := connectome_defect(matrix, rois, own):
        raise InputError(defect)
    if own != kind and {own, kind} != {CORRELATION, FISHER_Z}:
        raise InputError(f"the matrix looks like {own}, and the model was trained on {kind}")
    if own == kind:
        return matrix
    return np.asarray(np.tanh(matrix) if own == FISHER_Z else np.arctanh(np.clip(matrix, -CLIP, CLIP)))


def connectome_defect(matrix: npt.NDArray[Any], rois: Sequence[str], kind: str) -> str | None:
    """Why a (roi, roi) matrix is not a connectome of this kind, in words, or None. Empty ROIs are reported by `check`."""
    n = len(rois)
    if matrix.shape != (n, n):
        return f"the matrix has shape {matrix.shape}, not ({n}, {n})"
    if n < 2 or matrix.dtype.kind not in "fiu":
        return "a connectome has two ROIs or more" if n < 2 else f"the matrix has values of type {matrix.dtype}, not numbers"
    defect = symmetry_defect(matrix, rois) or diagonal_defect(np.diagonal(matrix), rois, kind)
    return defect or triangle_defect(_upper(matrix, kind), rois, kind)


def symmetry_defect(matrix: npt.NDArray[Any], rois: Sequence[str]) -> str | None:
    """Why a (roi, roi) matrix is not finite and symmetric beside its diagonal, in words, or None."""
    matrix = np.where(np.eye(len(rois), dtype=bool), 0, matrix.astype(np.float64))  # unsigned numbers have no difference
    if not np.isfinite(matrix).all():
        bad = ~np.isfinite(matrix)
        row = int(bad.sum(axis=1).argmax())  # a ROI that has no other values, if there is one
        column, count = int(bad[row].argmax()), int(bad.sum())
        what = "NaN" if np.isnan(matrix[row, column]) else "an infinite value"
        hint = "; a ROI without a signal has zeros" if np.isnan(matrix[row]).sum() == len(rois) - 1 else ""
        return f"{what} between ROI {rois[row]} and ROI {rois[column]} ({count} such values){hint}"
    with np.errstate(over="ignore"):
        difference = np.abs(matrix - matrix.T)
    if difference.max() > ASYMMETRY * float(np.abs(matrix).max()):
        row, column = divmod(int(difference.argmax()), len(rois))
        pair = f"{matrix[row, column]:.4g} and {matrix[column, row]:.4g}"
        return f"the matrix is not symmetric: between ROI {rois[row]} and ROI {rois[column]} it has {pair}"
    return None


def diagonal_defect(diagonal: npt.NDArray[Any], rois: Sequence[str], kind: str) -> str | None:
    """Why a diagonal is not that of a connectome of this kind, in words, or None."""
    finite = np.where(np.isfinite(diagonal), diagonal, 0)
    if kind == COVARIANCE:
        wrong, wanted = ~np.isfinite(diagonal) | (diagonal < 0), "a covariance has variances, which are not negative"
    elif kind == FISHER_Z:
        middle = np.median(finite)  # Fisher's z of 1 is infinite
        wrong = (np.abs(finite - middle) > DIAGONAL * max(abs(middle), 1.0)) & (finite != 0)
        wanted = f"others have {middle:.4g}"
    else:
        wrong = np.isinf(diagonal) | ((np.abs(finite - 1) > DIAGONAL) & (finite != 0))  # many files have 0 or NaN there
        wanted = "a correlation has 1"
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    return f"the diagonal is {diagonal[first]:.4g} at ROI {rois[first]}, where {wanted}"


def triangle_defect(values: npt.NDArray[Any], rois: Sequence[str], kind: str) -> str | None:
    """Why an upper triangle, diagonal included, is not a connectome of this kind, in words, or None."""
    n = len(rois)
    if values.shape != (n * (n + 1) // 2,):
        return f"{values.size} values are not the upper triangle of a matrix of {n} ROIs"
    most = {COVARIANCE: -1.0, FISHER_Z: LARGEST_Z}.get(kind, 1 + OVER_ONE)
    connected = n > 1 and (values[1] != 0 or np.count_nonzero(values) > n)  # value 1 is an edge
    if connected and values.max() <= most and -values.min() <= most:
        return None  # nearly all, at a fifth of the time
    rows, columns, diagonal = triangle(n)
    if not np.isfinite(values).all():
        first = int(np.argmax(~np.isfinite(values)))
        return f"no finite value between ROI {rois[rows[first]]} and ROI {rois[columns[first]]}"
    if not np.where(diagonal, 0, values).any():
        return "the connectome is zero everywhere"
    if kind == COVARIANCE:
        spread = np.sqrt(np.maximum(values[diagonal], 0))
        limit = (spread[rows] * spread[columns]) * (1 + OVER_ONE) + np.finfo(np.float32).tiny
    else:
        limit = np.full(len(values), most)
    over = np.abs(values) > np.minimum(limit, LARGEST)
    if over.any():
        first = int(np.argmax(over))
        pair = f"between ROI {rois[rows[first]]} and ROI {rois[columns[first]]}"
        return f"{values[first]:.4g} {pair} is out of range for {kind} (at most {min(limit[first], LARGEST):.4g})"
    return None
