"""`from_sklearn`: a scikit-learn classifier or pipeline as a method, on features of the scan, under the same protocol.

Each estimator is a method with a name of its own, in the registry; study files define one by `estimator` in [method.NAME].
What the estimator is, `text` writes into a field; `routing` fits it on source sites, and `stored` keeps the result.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from sklearn import config_context

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import amplitude_features, covariances, fc_features
from m2lgdg.fields import nearest, shown
from m2lgdg.method import ANY_SCAN, Method
from m2lgdg.methods.linear import REFERENCE_SUBJECTS, REFERENCE_TOLERANCE
from m2lgdg.methods.tables import ALL, NONE, TakesTables, chosen_tables
from m2lgdg.metrics import platt, sigmoid
from m2lgdg.model.model import Model
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import METHODS
from m2lgdg.sklearn_bridge.routing import FOLDS, Prepared, is_random, prepared, scores, settled, takes_domains
from m2lgdg.sklearn_bridge.stored import lean, packed, unpacked
from m2lgdg.sklearn_bridge.text import (
    admit,
    code_of,
    estimator_of,
    estimator_text,
    given,
    is_estimator,
    need_no_cache,
    path_of,
    resolve,
)
from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError, one_line
from m2lgdg.tangent import geometric_mean, tangent_features

Floats = npt.NDArray[np.float64]
FEATURES = ("fc", "tangent", "amplitude", "phenotypes", "tables", "series")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
STANDS_IN = (
    "The estimator needs subjects of a target beside those of source: in the strict track, source subjects without labels take "
    "their place."
)
SCALER, REFERENCE, ESTIMATOR = "phenotypes.scaler", "tangent.reference", "estimator"  # in `state_`


@dataclasses.dataclass
class SklearnMethod(TakesTables, Method):
    """A scikit-learn estimator on features of each subject.

    `from_sklearn` and study files make subclasses, one for each name.
    Searches inside the estimator choose on held-out source sites. An estimator without `predict_proba` is Platt-scaled on
    decisions for held-out source sites.
    """

    estimator: str = ""  # import path, or JSON text of an estimator
    features: str = "fc"  # one of FEATURES, or the import path of a function of one subject
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)  # for set_params of the estimator
    site_folds: int = FOLDS
    code: str = ""  # hash of code that is neither of m2lgdg, of a plugin, nor of scikit-learn

    tables = NONE  # no field: what it takes, `features` says
    takes: ClassVar[tuple[str, ...]] = ANY_SCAN
    reference: ClassVar[str] = "scikit-learn: Pedregosa et al. 2011, Journal of Machine Learning Research 12: 2825-2830"
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"site_folds": (2, np.inf)}
    remembers: ClassVar[tuple[str, ...]] = (ESTIMATOR,)  # support vectors and neighbours are features of source subjects

    def __post_init__(self) -> None:
        self.code = self.code or self._current_code()

    def _current_code(self) -> str:
        return code_of(self.estimator, "" if self.features in FEATURES else self.features)

    def given_code(self) -> list[Any]:
        """Classes and functions that it was given in this process; a study refuses those without a file."""
        return given(self.estimator, self.features)

    def check(self) -> None:
        """As for all methods; features must be known, and an estimator given."""
        super().check()
        if not self.estimator:
            raise InputError(f"method {self.name}: field estimator is empty; give an import path, such as sklearn.svm:SVC.")
        if self.features not in FEATURES and ":" not in self.features and "." not in self.features:
            raise InputError(
                f"method {self.name}, field features: {self.features} is not known{nearest(self.features, FEATURES)}"
            )

    def needs_series(self) -> str:
        """Series and their amplitude; a function of the user sees what there is."""
        return f"method {self.name} with features {self.features}" if self.features in ("series", "amplitude") else ""

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Features of source, then the estimator, and Platt scaling where it has no probabilities."""
        if self.code != self._current_code():
            raise InputError(f"method {self.name}: the code of its estimator or features has changed since it was defined.")
        ready = prepared(self._unfitted(), seed, self.site_folds)
        if self.features == "phenotypes" and not source.inputs:
            raise InputError(f"method {self.name}: cohort {source.name} has no phenotypes as inputs.")
        if self.features == "tables":
            self._fit_tables(source)
        if self.features in ("fc", "tangent", "amplitude", "tables", "series"):
            self.facts_["inputs"] = []
        features = self._features(source, fitting=True)
        labels = source.labels.astype(np.int64)
        notes, self._stands_in = list(ready.notes), False
        if ready.domains and not self._fits_source(ready, features, labels, source.sites):
            self._stands_in = True
            notes.append(STANDS_IN)
        self.estimator_ = lean(self._fit(ready, features, labels, source.sites))
        _need_scores(self.estimator_)
        if not hasattr(self.estimator_, "predict_proba"):
            chosen = prepared(settled(self.estimator_), seed, self.site_folds)
            self.state_["calibration"] = np.array(self._calibration(chosen, features, source))
        if notes:
            self.facts_["notes"] = notes
        if ready.domains:
            self.source_ = ready, features, source  # not saved with the model

    def _fit_tables(self, source: Cohort) -> None:
        """Columns of the tables, and their means in source, which take the place of missing values."""
        self.facts_["tables"] = {name: {"columns": columns} for name, columns in chosen_tables(ALL, source).items()}
        if not self.facts_["tables"]:
            raise InputError(f"method {self.name}: cohort {source.name} has no tables (m2lgdg convert --table adds one).")
        for table in self.table_blocks():
            table.fit_filling(source)
            table.put(slopes=np.zeros((int(table.head_column is not None), len(table.columns))))  # all that varies is kept

    def scaled_confounds(self, cohort: Cohort) -> dict[str, Floats]:
        """None: nothing is regressed out of tables."""
        return {}

    def _unfitted(self) -> Any:
        with config_context(enable_metadata_routing=True):  # a function may set requests
            estimator = estimator_of(self.estimator)
        try:
            estimator = estimator.set_params(**self.parameters)
        except ValueError as error:
            raise InputError(f"method {self.name}, field parameters: {one_line(error)[:200]}.") from None
        need_no_cache(estimator)
        last = _last(estimator)
        _need_scores(last, type(last), estimator)
        return estimator

    def _fits_source(self, ready: Prepared, features: Any, labels: npt.NDArray[np.int64], sites: npt.NDArray[np.str_]) -> bool:
        """Whether an estimator with `sample_domain` learns from source sites alone; most of skada's need a target, too."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = ready.fit(features, labels, sites)
                scored = "predict_proba" if hasattr(fitted, "predict_proba") else "decision_function"
                return bool(np.isfinite(scores(fitted, scored, _rows(features, np.arange(2)), len(np.unique(sites)))).all())
        except InputError:
            raise
        except Exception:  # such as an empty array, of which each estimator says something else
            return False

    def _fit(self, ready: Prepared, features: Any, labels: npt.NDArray[np.int64], sites: npt.NDArray[np.str_]) -> Any:
        return ready.fit(features, labels, sites, unlabelled=features if self._stands_in else None)

    def _calibration(self, ready: Prepared, features: Any, source: Cohort, adapted: bool = False) -> tuple[float, float]:
        """Slope and offset of the decision, from fits without the labels of the subject's site, or without the site."""
        held_out = np.full(len(source), np.nan)
        for train, test in site_folds(source.sites, source.labels, self.site_folds):
            some, others = _rows(features, train), _rows(features, test)
            given = some, source.labels[train].astype(np.int64), source.sites[train]
            fitted = ready.fit(*given, unlabelled=others) if adapted else self._fit(ready, *given)
            held_out[test] = _decision(fitted, others, len(np.unique(given[2])))
        known = ~np.isnan(held_out)
        return platt(held_out[known], source.labels[known], source.sites[known])

    def score(self, target: Cohort) -> Floats:
        """Probability of the estimator, or its Platt-scaled decision."""
        if not hasattr(self, "estimator_"):
            self.estimator_ = unpacked(self.state_[ESTIMATOR])
        return self._scored(self.estimator_, self._features(target), self.state_.get("calibration"))

    def _scored(self, fitted: Any, features: Any, calibration: Any) -> Floats:
        sites = len(self.facts_["source"]["sites"])
        if calibration is not None:
            return sigmoid(calibration[0] * _decision(fitted, features, sites) + calibration[1])
        proba = scores(fitted, "predict_proba", features, sites)
        classes = list(getattr(fitted, "classes_", (0, 1)))  # pipelines of skada do not have it
        if proba.shape != (len(features), len(classes)):
            raise InputError(f"{type(fitted).__name__} of method {self.name} gives probabilities of shape {proba.shape}.")
        return np.asarray(np.clip(proba[:, classes.index(1)], 0.0, 1.0))

    def score_adapted(self, target: Cohort, batch: Cohort) -> Floats:
        """(subject,) probability by the estimator fitted on source and on the batch, which has no labels."""
        if not hasattr(self, "source_"):
            raise InputError(f"method {self.name} can be fitted with a batch only in the process that fitted it.")
        ready, features, source = self.source_
        if "calibration" in self.state_ and not hasattr(self, "adapted_"):
            self.adapted_ = self._calibration(ready, features, source, adapted=True)  # the same for all batches
        labels = source.labels.astype(np.int64)
        fitted = ready.fit(features, labels, source.sites, unlabelled=self._features(batch))
        return self._scored(lean(fitted), self._features(target), getattr(self, "adapted_", None))

    def _features(self, cohort: Cohort, *, fitting: bool = False) -> Any:
        """(subject, feature), or a list of (time, roi) series; each subject's from that subject and statistics of source.

        With `fitting`, the cohort is source, and the statistics (tangent reference, imputation) are computed first.
        """
        if self.features == "fc":
            return fc_features(cohort.scans).astype(np.float64)
        if self.features == "tangent":
            matrices = covariances(cohort.scans)
            if fitting:
                self.state_[REFERENCE] = geometric_mean(matrices, tolerance=REFERENCE_TOLERANCE, first_step=REFERENCE_SUBJECTS)
            return tangent_features(matrices, self.state_[REFERENCE]).astype(np.float64)
        if self.features == "amplitude":
            return amplitude_features(cohort.scans)
        if self.features == "tables":
            return np.concatenate([table.features(cohort) for table in self.table_blocks()], axis=1)
        if self.features == "series":
            return [one.astype(np.float64) for one in cohort.series]
        if self.features == "phenotypes" and fitting:
            scaler = PhenotypeScaler.fit(cohort)
            self.state_ |= scaler.state(SCALER)
            return scaler.transform(cohort)
        if self.features == "phenotypes":
            return PhenotypeScaler.restore(tuple(self.facts_["inputs"]), self.state_, SCALER).transform(cohort)
        return self._computed(cohort)

    def _computed(self, cohort: Cohort) -> Floats:
        """Features of a function, which sees one subject at a time, without label, site and id."""
        function, hidden = resolve(self.features), cohort.unlabelled()
        rows = [np.asarray(function(hidden.select([i])), dtype=np.float64) for i in range(len(hidden))]
        size = rows[0].size
        for subject, row in zip(cohort.subjects, rows, strict=True):
            if row.ndim != 1 or row.size != size or not size or not np.isfinite(row).all():
                raise InputError(
                    f"features {self.features}: subject {subject} has values of shape {row.shape} or values that are not "
                    "finite; return one vector of the same length for every subject."
                )
        return np.stack(rows)

    @property
    def uses_amplitude(self) -> bool:
        """Whether the signal's amplitude can matter: for amplitudes, series and what a function computes."""
        return self.features not in ("fc", "tangent", "phenotypes", "tables")

    def complete_state(self) -> None:
        """Add the bytes of the fitted estimator; refused if skops does not trust its types."""
        if hasattr(self, "estimator_") and ESTIMATOR not in self.state_:
            try:
                self.state_[ESTIMATOR] = packed(self.estimator_)
            except InputError as error:
                raise InputError(f"method {self.name} cannot be saved: {error}") from None


def _need_scores(*known: Any) -> None:
    """Refuse an estimator with neither probabilities nor decisions; some have them only once they are fitted."""
    if not any(hasattr(one, name) for one in known for name in ("predict_proba", "decision_function")):
        name = type(known[0]).__name__
        raise InputError(f"{name} has neither predict_proba nor decision_function, so it gives no score for a subject.")


def _last(estimator: Any) -> Any:
    """What predicts in the end: the last step of a pipeline, the estimator inside a search."""
    if hasattr(estimator, "steps"):
        return _last(estimator.steps[-1][1])
    inner = estimator.get_params(deep=False).get("estimator") if hasattr(estimator, "get_params") else None
    return estimator if inner is None else _last(inner)


def _decision(fitted: Any, features: Any, sites: int) -> Floats:
    decision = scores(fitted, "decision_function", features, sites)
    return decision[:, 1] if decision.ndim == 2 else decision


def _rows(features: Any, positions: npt.NDArray[np.int64]) -> Any:
    return [features[i] for i in positions] if isinstance(features, list) else features[positions]


def define(name: str, fields: Mapping[str, Any], *, module: str = __name__) -> type[SklearnMethod]:
    """Class of a method with these fields as defaults, not yet registered."""
    if not NAME.fullmatch(name):
        raise InputError(f"{name[:100]} cannot be the name of a method; use letters, digits, dots, - and _.")
    content: dict[str, Any] = {"__annotations__": {}, "__doc__": SklearnMethod.__doc__, "__module__": module}
    for key, value in fields.items():
        content["__annotations__"][key] = {"parameters": dict[str, Any]}.get(key, str)
        content[key] = dataclasses.field(default_factory=partial(dict, value)) if key == "parameters" else value
    made: type[SklearnMethod] = dataclasses.dataclass(type("SklearnMethod", (SklearnMethod,), content))
    made.name = name
    return made


def define_from_study(name: str, fields: Mapping[str, Any]) -> None:
    """Register the method that a section [method.NAME] of a study file defines by its `estimator`."""
    if name in METHODS and METHODS[name].__module__ != __name__:
        return  # a plugin made it, or its fields are refused later
    kinds = {"estimator": str, "features": str, "parameters": dict}
    given = {key: value for key, value in fields.items() if key in kinds and value}
    for key, value in given.items():
        if not isinstance(value, kinds[key]):
            raise InputError(f"method {name}, field {key}: {shown(value)} is not of type {kinds[key].__name__}.")
    _register(define(name, given))


def _register(cls: type[SklearnMethod]) -> SklearnMethod:
    """Check a method and put it into the registry, where it replaces an earlier one of its name."""
    method = cls()
    method.check()
    estimator = method._unfitted()
    cls.stochastic, cls.sees_batch = is_random(estimator), takes_domains(estimator)
    METHODS[cls.name] = cls
    return method


def from_sklearn(estimator: Any, features: str | Callable[[Cohort], Any] = "fc", name: str | None = None) -> Model:
    """A scikit-learn classifier or pipeline as a method for `fit`, studies, audit and reports.

    Parameters
    ----------
    estimator : scikit-learn estimator, or str
        A classifier that is not fitted, or the import path of a class or of a function that makes one. Searches inside it
        choose on held-out source sites. It needs `predict_proba`, or `decision_function`, which is then Platt-scaled on
        held-out source sites.
    features : {"fc", "tangent", "amplitude", "phenotypes", "tables", "series"} or callable
        What the estimator sees of a subject. "tangent" has its reference from source only; "tables" are all columns of the
        tables of brain structure, missing values replaced by the mean of source; "series" is a list of (time, ROI) arrays.
        A function receives a cohort of one subject, without label, site and id, and returns a vector.
    name : str, optional
        Name of the method in studies and tables; by default from the estimator and its features.

    Returns
    -------
    Model
        Not fitted. Its method is also in the registry under its name, so that study files can name it.

    Examples
    --------
    >>> import m2lgdg
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from sklearn.svm import SVC
    >>> method = m2lgdg.from_sklearn(make_pipeline(StandardScaler(), SVC(kernel="linear")), features="fc", name="my-svm")
    >>> fold = next(iter(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny"))))
    >>> method.fit(fold.source).predict_proba(fold.target).shape
    (10, 2)
    """
    text = estimator
    if not isinstance(estimator, str):
        if isinstance(estimator, type) or not is_estimator(estimator):
            raise InputError(f"{shown(estimator)} is not a scikit-learn estimator; pass an instance, such as SVC().")
        text = estimator_text(estimator)
    kind = features if isinstance(features, str) else path_of(features)
    for path in (text, kind):
        if not path.startswith("{") and path not in FEATURES:
            admit(path)
    chosen = name or _default_name(estimator_of(text), features)
    home = METHODS.home(chosen, sys._getframe(1).f_globals.get("__name__", ""), __name__)
    return Model(_register(define(chosen, {"estimator": text, "features": kind}, module=home)))


def _default_name(estimator: Any, features: str | Callable[[Cohort], Any]) -> str:
    kind = features.rpartition(":")[2] if isinstance(features, str) else features.__name__
    return f"sklearn-{re.sub(r'[^A-Za-z0-9_.-]', '', kind)}-{type(_last(estimator)).__name__.lower()}"
