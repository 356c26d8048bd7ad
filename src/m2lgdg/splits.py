"""Leave-one-site-out folds, the validation split within source, and cross-validation folds of whole source sites.

This is the only module that splits a cohort: everything that is fitted is fitted on a `source` returned here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.storage import InputError

Indices = npt.NDArray[np.int64]


class Fold(NamedTuple):
    """One site held out: methods are fitted on `source` and may only predict `target`."""

    site: str
    source: Cohort
    target: Cohort


def leave_one_site_out(cohort: Cohort, targets: Iterable[str] | None = None) -> Iterator[Fold]:
    """One fold for each target site. Subjects without a label are never in source.

    Parameters
    ----------
    cohort : Cohort
        With at least two sites and both classes.
    targets : iterable of str, optional
        Sites to hold out; all by default.

    Yields
    ------
    Fold
        `site`, `source` and `target`.

    Examples
    --------
    >>> import m2lgdg
    >>> [(fold.site, len(fold.source), len(fold.target)) for fold in m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny"))]
    [('east', 42, 10), ('north', 36, 16), ('south', 38, 14), ('west', 40, 12)]
    """
    names = cohort.site_names
    if len(names) < 2:
        raise InputError(f"cohort {cohort.name} has only one site, {names[0]}; leave-one-site-out needs at least two.")
    if set(cohort.labels.tolist()) & {0, 1} != {0, 1}:
        raise InputError(f"cohort {cohort.name} has labels of only one class; both patients and controls are needed.")
    wanted = names if targets is None else list(dict.fromkeys(targets))
    for site in wanted:
        if site not in names:
            raise InputError(f"target {site} is not a site of cohort {cohort.name} (sites: {', '.join(names)}).")
    for site in wanted:
        here = cohort.sites == site
        yield Fold(site, cohort.select(~here & (cohort.labels >= 0)), cohort.select(here))


def validation_split(
    source: Cohort, *, seed: int, proportion: float = 0.15, by: Literal["subject", "site"] = "subject"
) -> tuple[Indices, Indices]:
    """Positions of the training and the validation subjects within source.

    By subject: a fraction `proportion` of the subjects, stratified by site and label. The only subject of a site x label group
    stays in training. By site: whole sites, drawn at random until they hold a fraction `proportion` of the subjects.
    """
    rng = np.random.default_rng(seed)
    chosen = _draw_sites(source, proportion, rng) if by == "site" else _draw_subjects(source, proportion, rng)
    positions = np.arange(len(source))
    return np.setdiff1d(positions, chosen), chosen


def _draw_subjects(source: Cohort, proportion: float, rng: np.random.Generator) -> Indices:
    strata = [
        np.flatnonzero((source.sites == site) & (source.labels == label)) for site in source.site_names for label in (0, 1)
    ]
    strata = [stratum for stratum in strata if len(stratum) > 1]
    exact = np.array([proportion * len(stratum) for stratum in strata])
    counts = np.floor(exact).astype(int)
    # Remainders are drawn at random, so that many small strata together still give their part.
    missing = min(round(proportion * len(source)) - int(counts.sum()), int((exact > counts).sum()))
    if missing > 0:
        remainder = exact - counts
        counts[rng.choice(len(strata), missing, replace=False, p=remainder / remainder.sum())] += 1
    chosen = [rng.permutation(stratum)[:count] for stratum, count in zip(strata, counts, strict=True)]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)


def _draw_sites(source: Cohort, proportion: float, rng: np.random.Generator) -> Indices:
    names = source.site_names
    if len(names) < 2:
        raise InputError(f"validation by site needs at least two source sites; source has only {names[0]}.")
    chosen: list[str] = []
    for site in rng.permutation(names).tolist():
        if chosen and (np.isin(source.sites, chosen).mean() >= proportion or len(chosen) == len(names) - 1):
            break
        chosen.append(site)
    return np.flatnonzero(np.isin(source.sites, chosen))


def nested_order(source: Cohort, seed: int) -> Indices:
    """Positions of all source subjects in a random order whose first n are a smaller source, for any n.

    Every part has nearly the proportions of sites and classes of the whole: each site x label group is spread evenly over the
    order. The order within a group depends on the seed and its subjects alone, not on the other sites.
    """
    places = np.empty(len(source))
    for site in source.site_names:
        for label in (0, 1):
            group = np.flatnonzero((source.sites == site) & (source.labels == label))
            digest = hashlib.sha256(f"{seed}\0{site}\0{label}".encode(errors="surrogatepass")).digest()
            rng = np.random.default_rng(list(digest))
            group = group[np.argsort(source.subjects[group])]
            places[rng.permutation(group)] = (np.arange(len(group)) + rng.random()) / max(len(group), 1)
    return np.argsort(places, kind="stable").astype(np.int64)


def site_folds(
    sites: npt.NDArray[np.str_], labels: npt.NDArray[np.int8], count: int, weights: npt.NDArray[np.float64] | None = None
) -> list[tuple[Indices, Indices]]:
    """(train, test) positions of at most `count` folds of whole sites, balanced in size, with both classes to train on.

    Subjects of weight 0 count for nothing: where a fold would train on them alone, only the others are held out. A single site
    is split into stratified folds of subjects, because there is no other site to hold out.
    """
    counts = np.ones(len(sites), dtype=bool) if weights is None else weights > 0

    def trainable(train: Indices) -> bool:
        return len(set(labels[train][counts[train]].tolist())) == 2

    positions, folds = np.arange(len(sites)), _folds(sites, labels, count)
    if not counts.all() and not all(trainable(train) for train, _ in folds):
        chosen = [positions[counts][test] for _, test in _folds(sites[counts], labels[counts], count)]
        folds = [(np.setdiff1d(positions, test), test) for test in chosen]
    return [(train, test) for train, test in folds if trainable(train)]


def _folds(sites: npt.NDArray[np.str_], labels: npt.NDArray[np.int8], count: int) -> list[tuple[Indices, Indices]]:
    names, site = np.unique(sites, return_inverse=True)
    if len(names) > 1:
        return _group_folds(site, min(count, len(names)))
    smallest = int(min((labels == 0).sum(), (labels == 1).sum()))
    if smallest < 2:
        return []
    from sklearn.model_selection import StratifiedKFold

    return list(StratifiedKFold(min(count, smallest)).split(sites, labels))


def _group_folds(site: Indices, count: int) -> list[tuple[Indices, Indices]]:
    """scikit-learn's GroupKFold without the two seconds that its import takes: the largest site to the smallest fold so far."""
    sizes = np.bincount(site)
    total, fold_of = np.zeros(count), np.zeros(len(sizes), dtype=int)
    for one in np.argsort(sizes, kind="stable")[::-1]:
        fold_of[one] = total.argmin()
        total[fold_of[one]] += sizes[one]
    chosen = fold_of[site]
    return [(np.flatnonzero(chosen != fold), np.flatnonzero(chosen == fold)) for fold in range(count)]
