"""Who trains and who tests: leave one site out, validation inside source, folds of whole source sites.

The only place where a cohort is cut in two; everything that is fitted is fitted on the `source` that comes from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.storage import InputError

Indices = npt.NDArray[np.int64]


class Fold(NamedTuple):
    """One site held out: `source` may be learned from, `target` may only be predicted."""

    site: str
    source: Cohort
    target: Cohort


def leave_one_site_out(cohort: Cohort, targets: Iterable[str] | None = None) -> Iterator[Fold]:
    """A fold for each target site (all by default). Subjects without a label are in no fold's source."""
    names = cohort.site_names
    if len(names) < 2:
        raise InputError(f"cohort {cohort.name} has one site only, {names[0]}: leaving it out leaves nothing to learn from.")
    if set(cohort.labels.tolist()) & {0, 1} != {0, 1}:
        raise InputError(f"cohort {cohort.name} has labels of one class only: there is nothing to tell apart.")
    wanted = names if targets is None else list(dict.fromkeys(targets))
    for site in wanted:
        if site not in names:
            raise InputError(f"target {site} is not a site of cohort {cohort.name}; it has {', '.join(names)}.")
    for site in wanted:
        here = cohort.sites == site
        yield Fold(site, cohort.select(~here & (cohort.labels >= 0)), cohort.select(here))


def validation_split(
    source: Cohort, *, seed: int, share: float = 0.15, by: Literal["subject", "site"] = "subject"
) -> tuple[Indices, Indices]:
    """Positions of the training and the validation subjects inside source.

    By subject: `share` of the subjects, stratified by site and label; a site x label cell of one subject stays in training.
    By site: whole sites, drawn at random until `share` of the subjects is reached.
    """
    draw = np.random.default_rng(seed)
    chosen = _some_sites(source, share, draw) if by == "site" else _some_subjects(source, share, draw)
    everyone = np.arange(len(source))
    return np.setdiff1d(everyone, chosen), chosen


def _some_subjects(source: Cohort, share: float, draw: np.random.Generator) -> Indices:
    cells = [
        np.flatnonzero((source.sites == site) & (source.labels == label)) for site in source.site_names for label in (0, 1)
    ]
    cells = [cell for cell in cells if len(cell) > 1]
    exact = np.array([share * len(cell) for cell in cells])
    take = np.floor(exact).astype(int)
    # The remainders are drawn, so that many small cells together still give their share.
    missing = min(round(share * len(source)) - int(take.sum()), int((exact > take).sum()))
    if missing > 0:
        remainder = exact - take
        take[draw.choice(len(cells), missing, replace=False, p=remainder / remainder.sum())] += 1
    parts = [draw.permutation(cell)[:count] for cell, count in zip(cells, take, strict=True)]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


def _some_sites(source: Cohort, share: float, draw: np.random.Generator) -> Indices:
    names = source.site_names
    if len(names) < 2:
        raise InputError(f"validation by site needs two source sites, source has {names[0]} alone.")
    chosen: list[str] = []
    for site in draw.permutation(names).tolist():
        if chosen and (np.isin(source.sites, chosen).mean() >= share or len(chosen) == len(names) - 1):
            break
        chosen.append(site)
    return np.flatnonzero(np.isin(source.sites, chosen))


def site_folds(sites: npt.NDArray[np.str_], labels: npt.NDArray[np.int8], count: int) -> list[tuple[Indices, Indices]]:
    """(train, test) positions of at most `count` folds of whole sites, of balanced size, each with both classes to train on.

    One site alone is cut into stratified folds of subjects instead, since there is nothing else to hold out.
    """
    from sklearn.model_selection import GroupKFold, StratifiedKFold

    n_sites = len(set(sites.tolist()))
    everyone = np.arange(len(sites))
    if n_sites > 1:
        folds = GroupKFold(min(count, n_sites)).split(everyone, groups=sites)
    else:
        smallest = int(min((labels == 0).sum(), (labels == 1).sum()))
        if smallest < 2:
            return []
        folds = StratifiedKFold(min(count, smallest)).split(everyone, labels)
    return [(train, test) for train, test in folds if len(set(labels[train].tolist())) == 2]
