"""What `check` finds in connectomes: another kind than is said, negative eigenvalues, edges that were cut, rounded or removed.

`check` calls `edges_of` and `connectome_findings` for each atlas that holds connectomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.findings import Finding
from m2lgdg.preprocess import on_threads
from m2lgdg.scans import CLIP, CORRELATION, COVARIANCE, FISHER_Z, PARTIAL, Connectomes, empty_rois, own_correlation, triangle

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# Least eigenvalues of correlations. Those of a scan with fewer volumes than ROIs are 0, in real data down to -1e-6; float16
# brings them to -0.002, two decimals to -0.05. Fisher z taken for correlations have -0.3 to -1.4, the reverse -0.1 to -0.4.
SLIGHT, WRONG_KIND, STRONG = 0.005, 0.05, 0.1
MEASURED = 20  # connectomes of which eigenvalues are computed
ALIKE = 0.05  # sd of the edges of a connectome without structure, relative to the median of the cohort
ONE_SIGNAL = 0.95  # median correlation of ROIs that have one signal
OTHER_SCALE = 2.0  # ratio of the sd of edges to that of a typical site; between sites of ABIDE and REST-meta-MDD, up to 1.25
FEWEST = 5  # subjects of a site that can be told from others by the range of their edges
MOST = 0.95  # of the other subjects
ZEROS = 0.01  # share of edges that are zero, although no ROI is empty
TIES = 3  # edges with the largest value
DECIMALS = (1, 2, 3)


class Edges(NamedTuple):
    """Facts of each connectome, over the edges between ROIs that are not empty: (subject,) each."""

    spread: Floats  # sd; of covariances, the median sd of the ROIs
    largest: Floats  # absolute value
    typical: Floats  # median absolute correlation
    zeros: Floats  # share
    negative: Floats  # share
    ties: Floats  # number of edges with the largest absolute value
    decimals: Floats  # of all values or of all correlations; 0 if they are not rounded


def edges_of(connectomes: Connectomes) -> Edges:
    """Facts of each connectome."""
    of_one = partial(_facts, kind=connectomes.kind, n=connectomes.n_rois)
    return Edges(*np.array(list(on_threads(of_one, connectomes.triangles)), dtype=np.float64).reshape(-1, len(Edges._fields)).T)


def _facts(one: npt.NDArray[np.float32], kind: str, n: int) -> tuple[float, ...]:
    rows, columns, diagonal = triangle(n)
    empty = empty_rois(one, n)
    values = one[~(diagonal | empty[rows] | empty[columns])].astype(np.float64)  # (edge,)
    size = np.abs(values)
    if kind == COVARIANCE:
        spread = np.sqrt(np.maximum(one[diagonal], 0))
        typical = _typical(own_correlation(one, kind, n)[~empty][:, ~empty])
        return float(np.median(spread[~empty])), size.max(), typical, *_shares(values), _ties(size), 0
    correlations = np.tanh(values) if kind == FISHER_Z else values
    decimals = _decimals(values) or _decimals(correlations)
    return float(values.std()), size.max(), float(np.median(np.abs(correlations))), *_shares(values), _ties(size), decimals


def _typical(matrix: Floats) -> float:
    return float(np.median(np.abs(matrix[np.triu_indices(len(matrix), 1)])))


def _shares(values: Floats) -> tuple[float, float]:
    return float((values == 0).mean()), float((values < 0).mean())


def _ties(size: Floats) -> int:
    return int((size == size.max()).sum())


def _decimals(values: Floats) -> int:
    """Number of decimals to which all values are rounded, 0 if to none or more than three."""
    for decimals in DECIMALS if _is_rounded(values[:50], DECIMALS[-1]) else ():
        if _is_rounded(values, decimals):
            return decimals
    return 0


def _is_rounded(values: Floats, decimals: int) -> bool:
    scaled = values * 10**decimals
    return bool((np.abs(scaled - np.rint(scaled)) < 2e-3).all())  # float32 has seven digits


def without_structure(cohort: Cohort, edges: Edges) -> Bools:
    """(subject,) whether all edges are alike, as those of a constant matrix, or all ROIs have one signal."""
    at_sites = {site: np.median(edges.spread[cohort.sites == site]) for site in cohort.site_names}
    # If all connectomes of a site are so, its scale differs instead.
    usual = np.minimum([at_sites[site] for site in cohort.sites.tolist()], np.median(edges.spread))
    alike = edges.spread < ALIKE * usual * (cohort.values != COVARIANCE)
    return np.asarray(alike | (edges.typical >= ONE_SIGNAL))


def connectome_findings(cohort: Cohort, edges: Edges) -> Iterator[Finding]:
    """Findings on the connectomes of the first atlas of a cohort."""
    yield Finding("connectomes", numbers={"values": cohort.values})
    degenerate = without_structure(cohort, edges)
    for i in np.flatnonzero(degenerate):
        numbers = {"sd": float(edges.spread[i]), "median": float(np.median(edges.spread)), "typical": float(edges.typical[i])}
        yield Finding("no structure", str(cohort.sites[i]), (str(cohort.subjects[i]),), numbers)
    rounded = edges.decimals > 0
    cut = _at_sites(cohort, (edges.zeros > ZEROS) & ~rounded & ~degenerate)
    below = edges.largest < (np.arctanh(CLIP) if cohort.values == FISHER_Z else CLIP) - 1e-4  # where every method cuts
    clipped = _at_sites(cohort, (edges.ties >= TIES) & below & ~rounded & ~degenerate & ~cut)
    yield from _where(cohort, "zero edges", cut, lambda here: {"percent": 100 * float(np.median(edges.zeros[here]))})
    yield from _where(cohort, "rounded edges", rounded, lambda here: {"decimals": int(edges.decimals[here].max())})
    yield from _where(cohort, "clipped edges", clipped, lambda here: {"largest": float(np.median(edges.largest[here]))})
    yield from _one_sided(cohort, edges)
    scaled = list(_scales(cohort, edges))
    yield from scaled
    known = clipped | np.isin(cohort.sites, [one.site for one in scaled])
    for finding in _definiteness(cohort, degenerate | cut):
        if finding.kind == "another kind":
            known |= np.isin(cohort.subjects, finding.subjects)
        yield finding
    yield from _small_values(cohort, edges, known)


def _at_sites(cohort: Cohort, affected: Bools) -> Bools:
    """Those of the affected connectomes that are at sites at which half of them or more are affected."""
    sites = [site for site in cohort.site_names if affected[cohort.sites == site].mean() >= 0.5]
    return affected & np.isin(cohort.sites, sites)


def _where(cohort: Cohort, kind: str, affected: Bools, numbers: Callable[[Bools], dict[str, Any]]) -> Iterator[Finding]:
    """A finding on the sites at which half of the connectomes or more are affected; it names no site if all are."""
    here = _at_sites(cohort, affected)
    if sites := [site for site in cohort.site_names if here[cohort.sites == site].any()]:
        everywhere = len(sites) == len(cohort.site_names)
        yield Finding(kind, "", (), numbers(here) | ({} if everywhere else {"sites": sites}))


def _one_sided(cohort: Cohort, edges: Edges) -> Iterator[Finding]:
    """Sites without any negative edge where nearly all other subjects have some."""
    none = edges.negative == 0
    sites = [site for site in cohort.site_names if (here := none[cohort.sites == site]).all() and len(here) >= FEWEST]
    others = none[~np.isin(cohort.sites, sites)]
    if sites and (not len(others) or (~others).mean() >= MOST):
        yield Finding("no negative edges", "", (), {"sites": sites} if len(others) else {})


def _scales(cohort: Cohort, edges: Edges) -> Iterator[Finding]:
    """Sites whose edges vary much more or less; of covariances, `check` compares the units of the signal instead."""
    if cohort.values == COVARIANCE:
        return
    typical = {site: float(np.median(edges.spread[cohort.sites == site])) for site in cohort.site_names}
    middle = float(np.median(list(typical.values())))
    for site, value in typical.items():
        if not middle / OTHER_SCALE <= value <= middle * OTHER_SCALE:
            yield Finding("scale of edges", site, (), {"sd": value, "median": middle})


def _small_values(cohort: Cohort, edges: Edges, known: Bools) -> Iterator[Finding]:
    """Sites at which no Fisher z is above 1, although nearly all subjects elsewhere have one: they may be correlations."""
    if cohort.values != FISHER_Z:
        return
    small = edges.largest <= 1
    for site in cohort.site_names:
        here = cohort.sites == site
        elsewhere = small[~here & ~known]
        share = float((~elsewhere).mean()) if len(elsewhere) else 0.0
        if here.sum() >= FEWEST and small[here].all() and not known[here].any() and share >= MOST:
            yield Finding("small values", site, (), {"percent": 100 * share})


def _definiteness(cohort: Cohort, explained: Bools) -> Iterator[Finding]:
    """Connectomes that are positive definite only as another kind, by site, and those that are not at all.

    A matrix of covariances, so of correlations, has no negative eigenvalue. For partial correlations P, of which the inverse
    covariance is scaled to 2 I - P, that has none.
    """
    scans = cohort.scans
    assert isinstance(scans, Connectomes)
    of_one = partial(_looks, kind=scans.kind, n=scans.n_rois)
    looks = np.array(list(on_threads(of_one, scans.triangles)), dtype=object)  # (subject,)
    for other in (CORRELATION, FISHER_Z, PARTIAL):
        found = (looks == other) & ~explained
        sites = [site for site in cohort.site_names if found[cohort.sites == site].any()]
        whole = found.mean() >= 0.5
        for here in [found] if whole else [found & (cohort.sites == site) for site in sites]:
            site = "" if whole else str(cohort.sites[here][0])
            size = len(cohort) if whole else int((cohort.sites == site).sum())
            numbers = {"size": size, "values": scans.kind, "other": other, "least": _least(scans, here)}
            numbers |= {"at": site} if site else {}
            yield Finding("another kind", site, tuple(cohort.subjects[here].tolist()), numbers)
    for kind, here in (("negative eigenvalues", looks == "strong"), ("small negative eigenvalues", looks == "slight")):
        if (here := here & ~explained).any():
            numbers = {"size": len(cohort), "least": _least(scans, here)}
            yield Finding(kind, "", tuple(cohort.subjects[here].tolist()), numbers)


def _looks(one: npt.NDArray[np.float32], kind: str, n: int) -> str:
    """Empty if a matrix has no negative eigenvalue, else the only kind as which it has none, or the size of the smallest."""
    matrix = own_correlation(one, kind, n)
    own = _scaled_inverse(matrix) if kind == PARTIAL else matrix
    if _definite(own, SLIGHT):
        return ""
    if kind != COVARIANCE and not _definite(own, WRONG_KIND):
        values = matrix
        if kind == FISHER_Z:
            values = own_correlation(one, CORRELATION, n)
            np.fill_diagonal(values, 1.0)
        others = {CORRELATION: values, PARTIAL: _scaled_inverse(values)} if np.abs(values).max() <= 1 else {}
        others |= {FISHER_Z: np.tanh(values) + (1 - np.tanh(1)) * np.eye(n)}
        for name, other in others.items():
            if name != kind and _definite(other, SLIGHT):
                return name
    return "slight" if _definite(own, STRONG) else "strong"


def _scaled_inverse(partial_correlations: Floats) -> Floats:
    return 2 * np.eye(len(partial_correlations)) - partial_correlations


def _definite(matrix: Floats, allowed: float) -> bool:
    """Whether no eigenvalue is below -allowed, by a Cholesky decomposition, which is much faster than the eigenvalues."""
    try:
        np.linalg.cholesky(matrix + allowed * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        return False
    return True


def _least(scans: Connectomes, here: Bools) -> float:
    """Smallest eigenvalue of some of the connectomes, as what they are said to be."""
    chosen = np.flatnonzero(here)
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), MEASURED)).astype(int)]
    matrices = [own_correlation(scans.triangles[i], scans.kind, scans.n_rois) for i in chosen]
    return min(float(np.linalg.eigvalsh(_scaled_inverse(one) if scans.kind == PARTIAL else one)[0]) for one in matrices)
