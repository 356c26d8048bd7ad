"""Fitting an estimator with the source sites as groups, so that what it chooses is chosen on held-out source sites.

`from_sklearn` calls it. Every `cv` that is a number or None becomes folds of whole sites; a splitter that the user chose
stays. Where the owner of a `cv` sees all source subjects, the folds are computed beforehand; inside another search,
scikit-learn's metadata routing passes the sites on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import UnsetMetadataPassedError
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import Pipeline
from sklearn.utils.metadata_routing import get_routing_for_object

from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError, one_line

FOLDS = 5
Rows = npt.NDArray[np.int64]


class SiteFolds(GroupKFold):  # type: ignore[misc]
    """Folds of whole sites (`splits.site_folds`); subjects of a single site are split into stratified folds."""

    def __init__(self, n_splits: int = FOLDS) -> None:
        super().__init__(n_splits)

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Rows, Rows]]:
        """(train, test) positions of each fold."""
        folds = site_folds(np.asarray(groups), np.asarray(y).astype(np.int8), self.n_splits)
        if not folds:
            raise InputError("the estimator cannot choose on held-out source sites: source has too few subjects of one class.")
        yield from folds

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Number of folds, at most the number of sites."""
        return len(list(self.split(X, y, groups)))


class Prepared(NamedTuple):
    """An estimator to fit, with a sentence in `notes` for each part that cannot choose on held-out sites.

    `computed` are the `cv` parameters that get folds of positions; `routed` is whether the others get the sites as groups.
    """

    estimator: Any
    computed: tuple[str, ...]
    routed: bool
    notes: tuple[str, ...]
    folds: int

    def fit(self, features: Any, labels: npt.NDArray[np.int64], sites: npt.NDArray[np.str_]) -> Any:
        """A fitted copy."""
        with config_context(enable_metadata_routing=True):
            made = clone(self.estimator)
        before = {name: made.get_params()[name] for name in self.computed}
        for name, given in before.items():
            splitter = given if hasattr(given, "split") else SiteFolds(self.folds)
            made.set_params(**{name: list(splitter.split(np.zeros(len(labels)), labels, sites))})
        if self.routed:
            made = _fit_with_groups(made, features, labels, sites)
        else:
            made.fit(features, labels)
        return made.set_params(**before)  # positions of source subjects are of no use later


def _fit_with_groups(estimator: Any, features: Any, labels: npt.NDArray[np.int64], sites: npt.NDArray[np.str_]) -> Any:
    try:
        with config_context(enable_metadata_routing=True):
            return estimator.fit(features, labels, groups=sites)
    except UnsetMetadataPassedError as error:
        raise InputError(
            f"scikit-learn cannot pass the source sites to every part of {type(estimator).__name__} ({one_line(error)[:150]}); "
            "give the inner search a cv of your own, such as StratifiedKFold()."
        ) from None


def prepared(estimator: Any, seed: int, folds: int) -> Prepared:
    """The estimator with seeded random numbers and with folds of sites."""
    with config_context(enable_metadata_routing=True):
        made = clone(estimator)
        for one in _unseeded(made):
            one.random_state = seed
        chosen = [name for name, value in made.get_params().items() if _chooses(name, value)]
        direct = [name for name in chosen if _sees_all(made, name)]
        inner = [name for name in chosen if name not in direct]
        # A search that holds another one passes the sites on to it, so that it needs them as groups itself.
        routed = [name for name in chosen if name in inner or any(_is_below(other, name) for other in inner)]
        notes = []
        for name in routed:
            owner, before = _owner(made, name), made.get_params()[name]
            owner.set_params(cv=before if hasattr(before, "split") else SiteFolds(folds))
            if not _takes_groups(owner):
                owner.set_params(cv=before)
                if name in inner:
                    notes.append(f"{type(owner).__name__} chooses on held-out subjects, because it does not get the sites.")
        _request_groups(made)
        computed = [name for name in direct if name not in routed or not _takes_groups(_owner(made, name))]
        takes = _takes_groups(clone(made).set_params(**dict.fromkeys(computed, folds)))  # besides those that need no groups
        return Prepared(made, tuple(computed), takes, tuple(notes), folds)


def settled(fitted: Any) -> Any:
    """An estimator, not fitted, with what the fitted one has chosen; a search in it is already replaced by its best estimator.

    Fits without one site are then on the scale of the fit on all, which a penalty of their own would change.
    """
    parts = {"": fitted} | {name: part for name, part in fitted.get_params().items() if hasattr(part, "alpha_")}
    made = clone(fitted)
    for name, part in parts.items():
        if hasattr(part, "alpha_") and "alphas" in part.get_params(deep=False):  # ridge
            made.set_params(**{f"{name}__alphas" if name else "alphas": [float(part.alpha_)]})
    return made


def _chooses(name: str, value: Any) -> bool:
    """Whether a parameter is a `cv` without a splitter, or with one of groups."""
    if name.rpartition("__")[2] != "cv" or isinstance(value, bool):
        return False
    if hasattr(value, "split") and hasattr(value, "get_metadata_routing"):
        return value.get_metadata_routing().split.requests.get("groups") is True
    return value is None or isinstance(value, int)


def _owner(estimator: Any, name: str) -> Any:
    path = name.rpartition("__")[0]
    return estimator.get_params()[path] if path else estimator


def _sees_all(estimator: Any, name: str) -> bool:
    """Whether the owner of a parameter is fitted on all subjects: it is the estimator itself, or a step of its pipelines."""
    path = name.split("__")[:-1]
    above = [_owner(estimator, "__".join([*path[:i], "cv"])) for i in range(len(path))]
    return all(isinstance(one, Pipeline) for one in above)


def _is_below(inner: str, outer: str) -> bool:
    return inner.startswith(outer.removesuffix("cv")) and inner != outer


def is_random(estimator: Any) -> bool:
    """Whether an estimator has a random state that is neither fixed nor without effect."""
    return not all(_is_exact(one) for one in _unseeded(estimator))


def _is_exact(estimator: Any) -> bool:
    """Whether this estimator never draws a random number as it is set."""
    name = type(estimator).__name__
    if name in ("SVC", "NuSVC"):
        return estimator.probability is not True
    exact = {"LogisticRegression": ("lbfgs", "newton-cg", "newton-cholesky"), "RidgeClassifier": ("auto", "svd", "cholesky")}
    return getattr(estimator, "solver", None) in exact.get(name.removesuffix("CV"), ())


def _unseeded(value: Any) -> Iterator[Any]:
    """Every estimator and splitter inside, also among the values that a search tries, with an open `random_state`."""
    inside: Any = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    draws = not hasattr(value, "split") or getattr(value, "shuffle", True)
    if not isinstance(value, type) and getattr(value, "random_state", 0) is None and draws:
        yield value
    if hasattr(value, "get_params") and not isinstance(value, type):
        inside = value.get_params(deep=False).values()
    for one in inside:
        yield from _unseeded(one)


def _request_groups(estimator: Any) -> None:
    """Ask for groups in the fit of every part that can take them and says nothing about them.

    Also in its `transform`, as scikit-learn wants one answer for both halves of `fit_transform`.
    """
    for part in [estimator, *estimator.get_params().values()]:
        request = getattr(part, "_get_metadata_request", None)
        if request is None or isinstance(part, type) or request().fit.requests.get("groups", True) is not None:
            continue
        part.set_fit_request(groups=True)
        if request().transform.requests.get("groups", True) is None:
            part.set_transform_request(groups=True)


def _takes_groups(estimator: Any) -> bool:
    try:
        return "groups" in get_routing_for_object(estimator).consumes("fit", ["groups"])
    except (NotImplementedError, ValueError, TypeError, AttributeError):  # routing is not implemented for a part
        return False
