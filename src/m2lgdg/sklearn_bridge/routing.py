"""Fitting an estimator with the source sites as groups, so that what it chooses is chosen on held-out source sites.

`from_sklearn` calls it. Every `cv` that is a number or None becomes folds of whole sites, to which scikit-learn's metadata
routing passes the sites; a splitter that the user chose stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GroupKFold
from sklearn.utils.metadata_routing import get_routing_for_object

from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError

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
    """An estimator to fit; `groups` is whether it takes the sites, and `notes` has a sentence for each part that cannot."""

    estimator: Any
    groups: bool
    notes: tuple[str, ...]

    def fit(self, features: Any, labels: npt.NDArray[np.int64], sites: npt.NDArray[np.str_]) -> Any:
        """A fitted copy."""
        if not self.groups:
            return clone(self.estimator).fit(features, labels)
        with config_context(enable_metadata_routing=True):
            return clone(self.estimator).fit(features, labels, groups=sites)


def prepared(estimator: Any, seed: int, folds: int) -> Prepared:
    """The estimator with seeded random numbers and with folds of sites."""
    notes = []
    with config_context(enable_metadata_routing=True):
        made = clone(estimator)
        made.set_params(**{name: seed for name, value in made.get_params().items() if _is_unseeded(name, value)})
        for name, value in made.get_params().items():
            owner = made if "__" not in name else made.get_params()[name.rpartition("__")[0]]
            if name.rpartition("__")[2] == "cv" and (value is None or isinstance(value, int)):
                before = owner.cv
                owner.set_params(cv=SiteFolds(folds))
                if not _takes_groups(owner):
                    owner.set_params(cv=before)
                    notes.append(
                        f"{type(owner).__name__} chooses on held-out subjects, because scikit-learn does not pass sites to it."
                    )
        _request_groups(made)
        return Prepared(made, _takes_groups(made), tuple(notes))


def is_random(estimator: Any) -> bool:
    """Whether an estimator has a random state that is neither fixed nor without effect."""
    parameters = estimator.get_params()
    owners = {name: parameters.get(name.rpartition("__")[0], estimator) for name in parameters}
    return any(_is_unseeded(name, value) and not _is_exact(owners[name]) for name, value in parameters.items())


def _is_exact(estimator: Any) -> bool:
    """Whether this estimator never draws a random number as it is set."""
    name = type(estimator).__name__
    if name in ("SVC", "NuSVC"):
        return estimator.probability is not True
    exact = {"LogisticRegression": ("lbfgs", "newton-cg", "newton-cholesky"), "RidgeClassifier": ("auto", "svd", "cholesky")}
    return getattr(estimator, "solver", None) in exact.get(name.removesuffix("CV"), ())


def _is_unseeded(name: str, value: Any) -> bool:
    return name.rpartition("__")[2] == "random_state" and value is None


def _request_groups(estimator: Any) -> None:
    """Ask for groups in the fit of every part that can take them and says nothing about them."""
    for part in [estimator, *estimator.get_params().values()]:
        request = getattr(part, "_get_metadata_request", None)
        if request is not None and not isinstance(part, type) and request().fit.requests.get("groups", True) is None:
            part.set_fit_request(groups=True)


def _takes_groups(estimator: Any) -> bool:
    try:
        return "groups" in get_routing_for_object(estimator).consumes("fit", ["groups"])
    except (NotImplementedError, ValueError, TypeError, AttributeError):  # routing is not implemented for a part
        return False
