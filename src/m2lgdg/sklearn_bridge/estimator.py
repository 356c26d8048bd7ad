"""`as_estimator`: a method as a scikit-learn classifier, for `cross_val_score`, `GridSearchCV`, `Pipeline` and the like.

Each method has a class of its own, whose parameters are the fields of the method, so that `get_params`, `set_params` and
`clone` work as scikit-learn expects. `inputs` turns X, y and groups into a cohort.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from m2lgdg.cohort import Cohort
from m2lgdg.fields import checked_fields
from m2lgdg.method import CONNECTOMES, Method
from m2lgdg.methods.linear import Linear
from m2lgdg.methods.tables import ALL, NONE
from m2lgdg.registry import METHODS, find
from m2lgdg.scans import SERIES
from m2lgdg.sklearn_bridge.inputs import InvalidInput, Subjects, as_cohort, read_groups, read_x
from m2lgdg.storage import InputError

EXTRA = {"random_state": 0, "device": "cpu"}  # parameters that are not fields
Floats = npt.NDArray[np.float64]
CLASSIFIER, VECTORS = "Classifier", "OnVectors"  # ends of the names of classes made here
_CLASSES: dict[str, type[MethodEstimator]] = {}
_ON_VECTORS: dict[str, type[Method]] = {}


class MethodEstimator(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A method of m2lgdg as a scikit-learn classifier; `as_estimator` makes one.

    Parameters are the fields of the method, `random_state` (the seed; None is 0) and `device`.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
        Labels in y; the second is the positive class.
    method_ : Method
        The fitted method. `method_.save(folder)` writes it as a model folder.
    n_features_in_ : int
        Number of ROIs, or of FC values if X holds FC vectors.
    """

    method_name: ClassVar[str] = ""
    parameters: ClassVar[Mapping[str, Any]] = {}

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fit on series, connectomes, FC vectors or a cohort.

        Parameters
        ----------
        X : list of arrays of shape (time, ROI), or array of shape (subject, time, ROI)
            Series; or connectomes, matrices of shape (ROI, ROI), for methods that take them (`Cohort.from_connectomes` says
            how their kind is recognised). Methods on FC (`fc-logistic`, `fc-svm`, `fc-adaptive`, `combat-logistic`) also take
            vectors of shape (subject, edge), which are used as they are. Or a `Cohort` of one atlas, with its phenotypes and
            tables of brain structure; its labels are not used, and scikit-learn's tools may select its subjects.
        y : array of shape (subject,)
            Labels of two classes.
        groups : array of shape (subject,), optional
            Site of each subject. Penalties are then chosen and probabilities calibrated on held-out sites. Without groups,
            the sites are those of a cohort; otherwise all subjects count as one site, and held-out subjects are used instead.

        Returns
        -------
        self
        """
        subjects = self._subjects(X, y, fitting=True)
        classes, labels = _classes(y, subjects.size)
        cohort = as_cohort(subjects, labels, read_groups(groups, subjects))
        self.classes_, self.on_cohort_ = classes, subjects.cohort is not None
        self.n_features_in_ = len(cohort.rois)
        cls = find(self.method_name)
        fields = {name: getattr(self, name) for name in self.parameters if name not in EXTRA}
        try:
            method = (_on_vectors(cls.name) if subjects.kind == "vectors" else cls)(**checked_fields(cls, fields))
            method.check()
            if isinstance(method, Linear) and method.phenotypes and not cohort.inputs:
                raise InputError(
                    f"method {cls.name} with phenotypes=True needs phenotypes, which X does not have; use a Cohort."
                )
            if (wanted := getattr(method, "tables", NONE)) not in (ALL, NONE) and not self.on_cohort_:
                raise InputError(f"method {cls.name} with tables={wanted!r} needs tables, which only a Cohort as X has.")
            self.method_ = method.fit(cohort, seed=_seed(self.random_state), device=self.device)
        except InputError as error:
            raise InvalidInput(str(error)) from None
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Probability of each class.

        Parameters
        ----------
        X : list of arrays, or array
            As in `fit`.

        Returns
        -------
        ndarray of shape (subject, 2)
            In the order of `classes_`.
        """
        check_is_fitted(self, "method_")
        subjects = self._subjects(X, None, fitting=False)
        try:
            return self.method_.predict_proba(as_cohort(subjects, fitted_on=self.method_.facts_["scans"]))
        except InputError as error:
            raise InvalidInput(str(error)) from None

    def decision_function(self, X: Any) -> Floats:
        """Log odds of the second class of `classes_`, (subject,); X as in `fit`."""
        proba = np.clip(self.predict_proba(X), np.finfo(np.float64).tiny, 1.0)
        return np.asarray(np.log(proba[:, 1]) - np.log(proba[:, 0]))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Class of each subject, (subject,): the second of `classes_` where its probability is above 0.5; X as in `fit`."""
        decision = self.decision_function(X)  # first, as it refuses an estimator that is not fitted
        return np.asarray(self.classes_[(decision > 0).astype(np.intp)])

    def _subjects(self, X: Any, y: Any, *, fitting: bool) -> Subjects:
        """X, checked; vectors are refused for methods that need series or matrices (`Method.fit` refuses matrices)."""
        subjects = read_x(X)
        if subjects.kind == "vectors" and not takes_fc(self.method_name):
            connectomes = CONNECTOMES in find(self.method_name).takes
            needs = f"series of shape (time, ROI){' or connectomes of shape (ROI, ROI)' * connectomes} for each subject"
            advice = "; nilearn.connectome.vec_to_sym_matrix makes matrices of vectors" * connectomes
            raise InvalidInput(f"method {self.method_name} needs {needs}, but X holds a table{advice}.")
        if not fitting:
            kind = "matrices" if self.method_.facts_["scans"] != SERIES else "series"
            fitted_on = "vectors" if isinstance(self.method_, OnVectors) else kind
            fitted_on, held = (
                f"a cohort of {one}" if of_cohort else one
                for one, of_cohort in ((fitted_on, self.on_cohort_), (subjects.kind, subjects.cohort is not None))
            )
            if fitted_on != held:
                raise InvalidInput(f"the estimator was fitted on {fitted_on}, but X holds {held}.")
        if subjects.kind != "vectors":
            if fitting and y is None:
                raise InvalidInput(f"{type(self).__name__} requires y to be passed, but the target y is None.")
            return subjects
        options = {"y": y} if fitting else {"reset": False}
        checked = validate_data(self, X, dtype=np.float64, **options)
        return subjects._replace(vectors=checked[0] if fitting else checked)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.two_d_array = takes_fc(self.method_name)
        tags.input_tags.three_d_array = True
        return tags


class OnVectors:
    """Part of a linear method on FC that takes its features from X: the first volume of each `series` (`inputs.as_cohort`)."""

    facts_: dict[str, Any]

    def _features(self, block: str, cohort: Cohort) -> npt.NDArray[np.float32]:
        return np.stack([one[0] for one in cohort.series])

    def checked_target(self, target: Cohort) -> Cohort:
        """The target, if it has as many FC values as source."""
        if len(target.rois) != len(self.facts_["rois"]):
            raise InputError(f"X has {len(target.rois)} FC values, but the estimator was fitted on {len(self.facts_['rois'])}.")
        return target

    def save(self, folder: str | Path) -> Path:
        """Refused: the folder would be read as a model of scans."""
        raise InputError(
            "the estimator was fitted on vectors instead of series or matrices, so it cannot be saved as a model folder."
        )


def takes_fc(name: str) -> bool:
    """Whether a method can be fitted on FC vectors: its features are Fisher z alone."""
    cls = find(name)
    return issubclass(cls, Linear) and dict(cls.blocks) == {"fc": 1.0} and cls.learn is Linear.learn


def _on_vectors(name: str) -> type[Method]:
    """Class of a method on FC that takes its features from X, the same at every call as long as the method is."""
    cls = find(name)
    if name not in _ON_VECTORS or cls not in _ON_VECTORS[name].__mro__:
        _ON_VECTORS[name] = type(_class_name(name, VECTORS), (OnVectors, cls), {"__module__": __name__})
    return _ON_VECTORS[name]


def _seed(random_state: Any) -> int:
    if random_state is None:
        return 0
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool) and 0 <= random_state < 2**32:
        return int(random_state)
    raise InputError("random_state must be None or an integer from 0 to 2**32 - 1, so that a fit can be repeated.")


def _classes(y: Any, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int8]]:
    """The two classes of y, and (subject,) labels of 0 and 1."""
    values = column_or_1d(y, warn=True)
    if len(values) != count:
        raise InvalidInput(f"y has {len(values)} labels, but X has {count} subjects.")
    kind = type_of_target(values, input_name="y", raise_unknown=True)
    if kind != "binary":
        number = f" ({len(np.unique(values))} classes)" if kind == "multiclass" else ""
        raise InvalidInput(f"Only binary classification is supported; the target y is {kind}{number}.")
    classes, labels = np.unique(values, return_inverse=True)
    if len(classes) < 2:
        raise InvalidInput(f"y has only one class ({classes[0]}); two classes are needed.")
    return classes, labels.astype(np.int8)


def estimator_class(name: str) -> type[MethodEstimator]:
    """Class of the estimators of a method, the same at every call as long as the method's fields are."""
    declared = METHODS.declaration(name).fields
    parameters = {field: value for field, value in declared.items() if field != "atlases"} | EXTRA  # X holds one atlas
    if name not in _CLASSES or _CLASSES[name].parameters != parameters:
        _CLASSES[name] = _new_class(name, parameters)
    return _CLASSES[name]


def _new_class(name: str, parameters: Mapping[str, Any]) -> type[MethodEstimator]:
    def __init__(self: MethodEstimator, **given: Any) -> None:
        for key, value in ({**parameters} | given).items():
            if key not in parameters:
                raise TypeError(f"{type(self).__name__} has no parameter {key!r}")
            setattr(self, key, value)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value) for key, value in parameters.items()]
    __init__.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
    doc = f"Method `{name}` of m2lgdg as a scikit-learn classifier.\n\n{MethodEstimator.__doc__}"
    content = {"__init__": __init__, "method_name": name, "parameters": parameters, "__module__": __name__, "__doc__": doc}
    return type(_class_name(name, CLASSIFIER), (MethodEstimator,), content)


def _class_name(name: str, end: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.replace("_", "-").split("-")) + end


def __getattr__(name: str) -> type:
    """Classes made here, by name, which is how joblib finds them in another process."""
    for method in METHODS if name.endswith((CLASSIFIER, VECTORS)) else ():
        if _class_name(method, CLASSIFIER) == name:
            return estimator_class(method)
        if _class_name(method, VECTORS) == name:
            return _on_vectors(method)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def as_estimator(name: str = "connectome-adaptive", **fields: Any) -> MethodEstimator:
    """A method as a scikit-learn classifier.

    Parameters
    ----------
    name : str
        Method; `m2lgdg methods` lists them.
    **fields
        Fields of the method that differ from their defaults, and `random_state` or `device`.

    Returns
    -------
    MethodEstimator
        An estimator with `fit(X, y, groups=None)`, `predict`, `predict_proba` and `decision_function`. X holds series, one
        (time, ROI) array for each subject, or connectomes, one (ROI, ROI) matrix for each; methods on FC also take vectors.
        A `Cohort` as X also gives phenotypes and tables. Groups are sites.

    Examples
    --------
    >>> import m2lgdg
    >>> cohort = m2lgdg.make_cohort("tiny")
    >>> estimator = m2lgdg.as_estimator("fc-svm", site_folds=3)
    >>> estimator.fit(list(cohort.series), cohort.labels, groups=cohort.sites).predict_proba(list(cohort.series)).shape
    (52, 2)
    """
    if find(name).role == "phenotypes":
        raise InputError(f"method {name} uses phenotypes alone, which X does not have; use m2lgdg.make and a Cohort.")
    own = {key: value for key, value in fields.items() if key not in EXTRA}
    if "atlases" in own:
        raise InputError("X of an estimator holds one atlas, so it has no parameter atlases.")
    checked_fields(find(name), own)
    return estimator_class(name)(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
