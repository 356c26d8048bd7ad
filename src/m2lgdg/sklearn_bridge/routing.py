"""Fitting an estimator with the source sites as groups, so that what it chooses is chosen on held-out source sites.

`from_sklearn` calls it. Every `cv` that is a number or None becomes folds of whole sites; a splitter that the user chose
stays. Where the owner of a `cv` sees all source subjects, the folds are computed beforehand; inside another search,
scikit-learn's metadata routing passes the sites on. An estimator that asks for `sample_domain` gets it as skada's do: each
source site has a positive number, and subjects of a target, if there are any, have a negative one and the label -1.
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
UNLABELLED = -1  # label of a target's subjects
GROUPS, DOMAINS = "groups", "sample_domain"  # names of metadata
ASKING = ("fit", "transform", "predict_proba", "decision_function")  # methods of a part that may ask for metadata
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

    `computed` are the `cv` parameters that get folds of positions; `routed` is whether the others get the sites as groups, and
    `domains` whether the estimator takes `sample_domain`.
    """

    estimator: Any
    computed: tuple[str, ...]
    routed: bool
    notes: tuple[str, ...]
    folds: int
    domains: bool = False

    def fit(
        self, features: Any, labels: npt.NDArray[np.int64], sites: npt.NDArray[np.str_], unlabelled: Any | None = None
    ) -> Any:
        """A fitted copy; `unlabelled` are the features of a target, for an estimator with `domains`."""
        with config_context(enable_metadata_routing=True):
            made = clone(self.estimator)
        count, added = len(labels), 0 if unlabelled is None else len(unlabelled)
        if added and self.routed:
            raise InputError(f"scikit-learn cannot pass both sites and a target to the inner search of {type(made).__name__}.")
        before = {name: made.get_params()[name] for name in self.computed}
        for name, given in before.items():
            splitter = given if hasattr(given, "split") else SiteFolds(self.folds)
            folds = splitter.split(np.zeros(count), labels, sites)
            target = np.arange(count, count + added)
            made.set_params(**{name: [(np.concatenate([train, target]), test) for train, test in folds]})
        metadata: dict[str, Any] = {"groups": sites} if self.routed else {}
        if self.domains:
            names, number = np.unique(sites, return_inverse=True)
            metadata["sample_domain"] = np.concatenate([number + 1, np.full(added, -len(names) - 1)])
        if unlabelled is not None:
            features = features + unlabelled if isinstance(features, list) else np.concatenate([features, unlabelled])
            labels = np.concatenate([labels, np.full(added, UNLABELLED)])
        if metadata:
            _fit_with(made, features, labels, metadata)
        else:
            made.fit(features, labels)
        return made.set_params(**before)  # positions of source subjects are of no use later


def _fit_with(estimator: Any, features: Any, labels: npt.NDArray[np.int64], metadata: dict[str, Any]) -> None:
    try:
        with config_context(enable_metadata_routing=True):
            estimator.fit(features, labels, **metadata)  # of skada's, not all return themselves
    except UnsetMetadataPassedError as error:
        raise InputError(
            f"scikit-learn cannot pass the source sites to every part of {type(estimator).__name__} ({one_line(error)[:150]}); "
            "give the inner search a cv of your own, such as StratifiedKFold()."
        ) from None


def scores(fitted: Any, name: str, features: Any, sites: int) -> npt.NDArray[np.float64]:
    """What a method of a fitted estimator gives for subjects of a target, whose domain follows those of the source sites."""
    with config_context(enable_metadata_routing=True):
        takes = _takes(fitted, DOMAINS, name)
        given = {DOMAINS: np.full(len(features), -sites - 1)} if takes else {}
        return np.asarray(getattr(fitted, name)(features, **given), dtype=np.float64)


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
        _request(made)
        computed = [name for name in direct if name not in routed or not _takes_groups(_owner(made, name))]
        takes = _takes_groups(clone(made).set_params(**dict.fromkeys(computed, folds)))  # besides those that need no groups
        return Prepared(made, tuple(computed), takes, tuple(notes), folds, _takes(made, DOMAINS))


def takes_domains(estimator: Any) -> bool:
    """Whether an estimator, or a part of it, takes `sample_domain`."""
    return prepared(estimator, 0, FOLDS).domains


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


def _request(estimator: Any) -> None:
    """Ask for groups and domains in every part that can take them and says nothing about them.

    In all its methods, as scikit-learn wants one answer for both halves of `fit_transform`.
    """
    for part in [estimator, *estimator.get_params().values()]:
        if isinstance(part, type) or not hasattr(part, "_get_metadata_request"):
            continue
        request = part._get_metadata_request()
        for name in ASKING:
            open_ones = {key: True for key in (GROUPS, DOMAINS) if getattr(request, name).requests.get(key, True) is None}
            if open_ones:
                getattr(part, f"set_{name}_request")(**open_ones)


def _takes_groups(estimator: Any) -> bool:
    return _takes(estimator, GROUPS)


def _takes(estimator: Any, metadata: str, method: str = "fit") -> bool:
    try:
        return metadata in get_routing_for_object(estimator).consumes(method, [metadata])
    except (NotImplementedError, ValueError, TypeError, AttributeError):  # routing is not implemented for a part
        return False
