"""Adaptive ridge on several sources of one cohort in one solve, each of which leaves out other sites.

Studies and new-site calibration name their sources (`fitting_together`), and `linear.py` finds the block of its source here.
Fits share features of subjects and sums over single sites, which each of them adds up over the sites of its own source.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.methods.blocks import SMALLEST_SPREAD, Block
from m2lgdg.methods.solvers import CHUNK, Features, adaptive_scales, scaled_ridge
from m2lgdg.methods.within_sites import balance, source_folds
from m2lgdg.scans import arrays_of, kind_of
from m2lgdg.splits import Indices

Floats = npt.NDArray[np.float64]
SUBJECTS_OF_A_FIT = 5  # whose features take as much memory as the scales, coefficients and products of one fit


class Sources:
    """Sources of a cohort that are fitted one after another, each given by the positions of its subjects."""

    def __init__(self, cohort: Cohort, sources: Sequence[Indices]) -> None:
        self.cohort, self.subjects = cohort, [cohort.subjects[rows] for rows in sources]
        self.atlases: dict[str, tuple[Cohort, list[Indices]]] = {}
        self.blocks: dict[Hashable, dict[bytes, Block]] = {}  # by the rows of a source
        self.lock = Lock()  # one solve of all sources at a time: it needs memory for their features

    def find(self, source: Cohort) -> tuple[Cohort, list[Indices], Indices] | None:
        """The cohort in the atlas of a source, the rows of all sources and of this one; None if it is not one of them."""
        if not self.subjects or source.atlas not in self.cohort.atlases:
            return None
        if source.atlas not in self.atlases:
            every = self.cohort.parcellation(source.atlas)
            self.atlases[source.atlas] = every, [np.flatnonzero(np.isin(every.subjects, some)) for some in self.subjects]
        every, sources = self.atlases[source.atlas]
        places = {id(one): i for i, one in enumerate(arrays_of(every.scans))}  # held by the cohort, so that ids stay unique
        rows = np.array([places.get(id(one), -1) for one in arrays_of(source.scans)])
        same = kind_of(source.scans) == kind_of(every.scans) and any(np.array_equal(rows, one) for one in sources)
        if not same or (source.labels != every.labels[rows]).any() or (source.sites != every.sites[rows]).any():
            return None
        return every, sources, rows

    def block(
        self, source: Cohort, features: Callable[[Cohort], Features], site_folds: int, penalty: float, key: Hashable
    ) -> Block | None:
        """Block of one of the sources, solved together with those of all; None if it is not one of them, or was left out.

        `key` holds all that it depends on besides the cohort. Features must be a new array.
        """
        if (found := self.find(source)) is None:
            return None
        every, sources, rows = found
        key = source.atlas, site_folds, penalty, key
        with self.lock:
            if key not in self.blocks:
                self.blocks[key] = adaptive_blocks(features(every), every, sources, site_folds, penalty)
        return self.blocks[key].get(rows.tobytes())


_IN_USE: ContextVar[tuple[Sources, ...]] = ContextVar("sources", default=())  # cells of two studies may run in two threads


def sources_in_use() -> tuple[Sources, ...]:
    """Those of the study or the calibration that runs here."""
    return _IN_USE.get()


@contextmanager
def fitting_together(sources: Sources) -> Iterator[None]:
    """Within this context, blocks of these sources are solved together."""
    before = _IN_USE.set((*_IN_USE.get(), sources))
    try:
        yield
    finally:
        _IN_USE.reset(before)


class _SiteSums(NamedTuple):
    """Sums over the subjects of each site; features are centred by site, with balanced classes."""

    weights: Floats  # (site,)
    subjects: Floats  # (site,)
    features: Floats  # (site, feature), before they are centred
    means: Floats  # (site, feature), with balanced classes
    weighted_squares: Floats  # (site, feature)
    squares: Floats  # (site, feature)
    products: Floats  # (site, feature), weighted, with the label


def _centred(features: Features, member: Floats, weights: Floats, signs: Floats) -> _SiteSums:
    """Centre features by site, in place. The sums of a site have terms of its own subjects, and zeros."""
    weighted, signed, site = member * weights, member * (weights * signs), member.argmax(axis=0)
    counted = np.where(weighted.any(axis=1, keepdims=True), weighted, member)  # as in `site_averages`
    averages = counted / np.maximum(counted.sum(axis=1, keepdims=True), 1.0)
    shape = len(member), features.shape[1]
    sums = _SiteSums(weighted.sum(axis=1), member.sum(axis=1), *(np.empty(shape) for _ in range(5)))
    for start in range(0, features.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        values = features[:, part].astype(np.float64)
        sums.features[:, part], sums.means[:, part] = member @ values, averages @ values
        values -= sums.means[site, part]
        features[:, part] = values
        sums.products[:, part] = signed @ values
        np.square(values, out=values)
        sums.weighted_squares[:, part], sums.squares[:, part] = weighted @ values, member @ values
    return sums


class _Fit(NamedTuple):
    """One source: its rows, folds, and the scaling of its features. The last of its fits is that on all of its sites."""

    rows: Indices
    folds: list[tuple[Indices, Indices]]
    sites: Floats  # (fit, site) 1 for those trained on
    centre: Floats  # (feature,) mean
    squared_scales: Floats  # (fit, feature): associations, divided by sds
    penalty: float


def adaptive_blocks(
    features: Features, cohort: Cohort, sources: Sequence[Indices], site_folds: int, penalty: float
) -> dict[bytes, Block]:
    """Blocks of adaptive ridge within sites, by the rows of their source; features of the cohort are overwritten.

    As `standardised_block` and `adaptive_ridge` with one penalty, a multiple of the mean squared norm. Left out are sources
    with less than two sites of both classes, whose folds are not of whole sites, or in which no feature varies.
    """
    names, site = np.unique(cohort.sites, return_inverse=True)
    signs, labelled, weights = np.where(cohort.labels == 1, 1.0, -1.0), cohort.labels >= 0, np.zeros(len(cohort))
    weights[labelled] = balance(cohort.select(labelled))
    sums = _centred(features, (site == np.arange(len(names))[:, None]) * labelled.astype(np.float64), weights, signs)
    at_once = max(len(features) // (SUBJECTS_OF_A_FIT * (site_folds + 1)), 1)
    blocks = {}
    for first in range(0, len(sources), at_once):
        some = sources[first : first + at_once]
        fits = [_prepared(cohort.select(rows), rows, site, weights, sums, site_folds, penalty) for rows in some]
        for fit, solution in zip(fits, _solved(features, fits, site, weights, signs, site_folds + 1), strict=True):
            if fit is not None:
                blocks[fit.rows.tobytes()] = _block(fit, *solution, sums, site, weights * signs, penalty)
    return blocks


def _solved(
    features: Features, fits: Sequence[_Fit | None], site: npt.NDArray[np.intp], weights: Floats, signs: Floats, most: int
) -> Iterator[tuple[Floats, Floats]]:
    """(fit, feature) coefficients of each source, and their (fit, subject) products with all subjects.

    Each source has its own places for `most` fits, whatever the others: the rounding of a product depends on the place.
    """
    scales = np.zeros((len(fits) * most, features.shape[1]))  # (fit, feature), squared
    trained, penalties = np.zeros((len(scales), len(features))), np.ones(len(scales))  # (fit, subject), (fit,)
    places = [slice(i * most, i * most + (len(fit.sites) if fit else 0)) for i, fit in enumerate(fits)]
    for own, fit in zip(places, fits, strict=True):
        if fit is not None:
            scales[own], trained[own], penalties[own] = fit.squared_scales, fit.sites[:, site] * weights, fit.penalty
    coefficients, products = scaled_ridge(features, scales, trained.T, signs, penalties)
    return ((coefficients[own], products[own]) for own in places)


def _block(
    fit: _Fit,
    coefficients: Floats,
    products: Floats,
    sums: _SiteSums,
    site: npt.NDArray[np.intp],
    signed: Floats,
    penalty: float,
) -> Block:
    intercepts = (fit.sites[:, site] @ signed) / (fit.sites @ sums.weights)  # mean labels
    shift = coefficients @ (sums.means - fit.centre).T  # (fit, site), at an unseen site
    decisions = (products + shift[:, site] + intercepts[:, None])[:, fit.rows]
    held_out, weights = decisions[-1].copy(), coefficients[-1].copy()
    for decision, (_, test) in zip(decisions[:-1], fit.folds, strict=True):
        held_out[test] = decision[test]
    mean = fit.sites[-1] @ sums.features / len(fit.rows)
    return Block(weights, float(intercepts[-1] - fit.centre @ weights), held_out, penalty, mean)


def _prepared(
    source: Cohort, rows: Indices, site: npt.NDArray[np.intp], weights: Floats, sums: _SiteSums, site_folds: int, penalty: float
) -> _Fit | None:
    folds = source_folds(source, site_folds, weights[rows])
    trained = [*(train for train, _ in folds), np.arange(len(rows))]
    counts = np.stack([np.bincount(site[rows[some]], minlength=len(sums.subjects)) for some in trained])  # (fit, site)
    whole_sites = ((counts == 0) | (counts == sums.subjects)).all()
    mixed = any(len(set(source.labels[source.sites == one].tolist())) > 1 for one in source.site_names)
    if not whole_sites or not mixed:
        return None
    sites = (counts > 0).astype(np.float64)
    total = sites @ sums.weights  # (fit,)
    spread = np.sqrt(sites[-1] @ sums.weighted_squares / total[-1])
    inverse = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > SMALLEST_SPREAD)  # 0: rounding is no feature
    squares = sites @ sums.squares * inverse**2  # (fit, feature)
    if not (mean_square := float(squares[-1].sum()) / len(rows)) > 0:
        return None
    scales = adaptive_scales(sites @ sums.products * inverse, squares, total, sites @ sums.subjects)
    centre = sites[-1] * sums.weights @ sums.means / total[-1]
    return _Fit(rows, folds, sites, centre, (scales * inverse) ** 2, penalty * mean_square)
