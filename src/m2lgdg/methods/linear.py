"""The simple peers: linear models on connectivity, amplitude and phenotypes, which a new method has to beat.

Each is a weighted sum of blocks (FC, tangent space, amplitude, phenotypes), one linear learner a block, with the penalty
chosen and the probabilities calibrated on source sites held out whole. All of it is in this file, but for the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import (
    View,
    amplitude_features,
    covariances,
    fc_features,
    geometric_mean,
    standardised,
    steady,
    swings,
    tangent_features,
)
from m2lgdg.method import Method, method
from m2lgdg.metrics import auc, platt
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.splits import site_folds

Floats = npt.NDArray[np.float64]
VIEWS: dict[str, View] = {"fc": standardised, "steady": steady, "swings": swings}  # of a series, before correlations
LEAST_SCALE = 0.05  # of an adaptive feature without any association, relative to the mean
# coefficients (penalty, feature) and intercepts (penalty,) from features (subject, feature), labels and subject weights
Learner = Callable[[Floats, npt.NDArray[np.int8], Floats, Floats], tuple[Floats, Floats]]


class Block(NamedTuple):
    """One block fitted: its decision is features @ weights + intercept, `held_out` that of source subjects not trained on."""

    weights: Floats
    intercept: float
    held_out: Floats
    penalty: float


@dataclass
class Linear(Method):
    """A weighted sum of linear blocks; the fields are common to all simple peers."""

    site_folds: int = 5
    penalties: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # relative to the mean squared feature norm
    phenotypes: bool = False
    phenotype_weight: float = 0.3

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"site_folds": (2, math.inf), "penalties": (1e-12, math.inf)}
    stochastic: ClassVar[bool] = False
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"phenotypes": {"phenotypes": True}}
    blocks: ClassVar[Mapping[str, float]] = {}
    learner: ClassVar[str] = "logistic"
    within_sites: ClassVar[bool] = False  # train on features centred by site, with the classes balanced inside each site
    adaptive: ClassVar[tuple[str, ...]] = ()  # blocks whose features are first scaled by how they go with the label
    confounds: ClassVar[tuple[str, ...]] = ()  # phenotypes that are taken out of the other blocks, where there are phenotypes

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Fit each block, then calibrate the sum of their decisions on held-out source sites."""
        if "phenotypes" not in self._weights():
            self.facts_["inputs"] = []
        folds = site_folds(source.sites, source.labels, self.site_folds)
        if "phenotypes" in self._weights():
            self.state_ |= PhenotypeScaler.fit(source).state("phenotypes.scaler")
        taken = [i for i, name in enumerate(self.facts_["inputs"]) if name in self.confounds]
        total, outside = np.zeros(len(source)), np.zeros(len(taken))
        for name, weight in self._weights().items():
            if name == "tangent":
                self.state_["tangent.reference"] = _reference(source)
            features = self._features(name, source)
            self.state_[f"{name}.mean"] = features.mean(axis=0)  # what a subject's own features are told against
            confounds = self._features("phenotypes", source)[:, taken] if taken and name != "phenotypes" else None
            block, slopes = self._fit_block(features, confounds, source, folds, name in self.adaptive)
            weight /= block.held_out.std() or 1.0
            total += weight * block.held_out
            self.state_[f"{name}.weights"] = weight * block.weights
            self.state_[f"{name}.intercept"] = np.array(weight * block.intercept)
            self.facts_.setdefault("penalties", {})[name] = block.penalty
            if slopes is not None:  # what was taken out is linear in the confounds: their own weights tell it, too
                outside = outside + weight * slopes @ block.weights
        if taken:
            self.state_["phenotypes.weights"][taken] -= outside
        self.state_["calibration"] = np.array(platt(total, source.labels))
        self.held_out_ = total  # of each source subject, by blocks that did not know its site; not kept with the model

    def score(self, target: Cohort) -> Floats:
        """The calibrated sum of the blocks' decisions."""
        slope, offset = self.state_["calibration"]
        return _sigmoid(slope * self.decision(target) + offset)

    def decision(self, target: Cohort) -> Floats:
        """(subject,) sum of the blocks' decisions, before calibration."""
        total = np.zeros(len(target))
        for name in self._weights():
            features = self._features(name, target)
            # A row at a time: BLAS may sum a matrix of one row and of many in another order.
            total += [float(row @ self.state_[f"{name}.weights"]) for row in features] + self.state_[f"{name}.intercept"]
        return total

    def _weights(self) -> dict[str, float]:
        return dict(self.blocks) | ({"phenotypes": self.phenotype_weight} if self.phenotypes else {})

    def _features(self, block: str, cohort: Cohort) -> Floats:
        """(subject, feature) of one block; every row from that subject alone and what was fitted on source."""
        if block in VIEWS:
            return fc_features(cohort.series, VIEWS[block])
        if block == "tangent":
            return tangent_features(covariances(cohort.series), self.state_["tangent.reference"])
        if block == "amplitude":
            return amplitude_features(cohort.series)
        return PhenotypeScaler.restore(tuple(self.facts_["inputs"]), self.state_, "phenotypes.scaler").transform(cohort)

    def _fit_block(
        self, features: Floats, confounds: Floats | None, source: Cohort, folds: list[Any], adaptive: bool
    ) -> tuple[Block, Floats | None]:
        """A block in units of its features, and the (confound, feature) slopes of what was taken out of them first."""
        weights = _balance(source) if self.within_sites else np.ones(len(source))
        slopes = None
        if confounds is not None:
            slopes = _slopes(features, confounds, source, weights)
            features = features - confounds @ slopes
        centre = np.average(features, axis=0, weights=weights)
        trained = features - (_site_means(features, source, weights) if self.within_sites else centre)
        scale = np.sqrt(np.average(trained**2, axis=0, weights=weights))
        scale = np.where(scale > 1e-12, scale, 1.0)
        both = (trained / scale, (features - centre) / scale)
        block = _choose(*both, source, weights, folds, LEARNERS[self.learner], self.penalties, adaptive)
        own = block.weights / scale
        return block._replace(weights=own, intercept=float(block.intercept - centre @ own)), slopes


def _choose(
    trained: Floats,
    scored: Floats,
    source: Cohort,
    weights: Floats,
    folds: list[Any],
    learner: Learner,
    penalties: tuple[float, ...],
    adaptive: bool = False,
) -> Block:
    """The penalty with the best mean AUC over held-out source sites, and the block refitted on all of source with it.

    `trained` and `scored` are the same subjects as they enter training and as an unseen site would be seen.
    """
    axes, inside, seen = None, trained, scored
    if adaptive:
        learner = _adapted(learner)  # scales are of the features themselves, and of each fold's own training subjects
    else:
        # An l2 penalty knows only the span of the training rows: rotating them into it is exact and much smaller.
        axes = _row_space(trained)  # (rank, feature)
        inside, seen = trained @ axes.T, scored @ axes.T
    strengths = np.array(penalties) * (trained**2).sum() / len(trained)
    held_out = np.full((len(penalties), len(source)), np.nan)
    for train, test in folds:
        coefficients, intercepts = learner(inside[train], source.labels[train], weights[train], strengths)
        held_out[:, test] = coefficients @ seen[test].T + intercepts[:, None]
    coefficients, intercepts = learner(inside, source.labels, weights, strengths)
    untested = np.isnan(held_out).any(axis=0)  # subjects whose fold could not be trained
    held_out[:, untested] = coefficients @ seen[untested].T + intercepts[:, None]
    best = int(np.argmax([_mean_site_auc(one, source) for one in held_out]))
    chosen = coefficients[best] if axes is None else coefficients[best] @ axes
    return Block(chosen, float(intercepts[best]), held_out[best], penalties[best])


def _row_space(rows: Floats) -> Floats:
    """(rank, feature) orthonormal axes of the span of some rows, from the Gram matrix, which is small."""
    size, vectors = np.linalg.eigh(rows @ rows.T)
    kept = size > 1e-10 * max(float(size[-1]), 1e-300)
    return np.asarray((vectors[:, kept] / np.sqrt(size[kept])).T @ rows)


def _mean_site_auc(decision: Floats, source: Cohort) -> float:
    """AUC inside each site, weighted by its subjects: offsets between sites must not count."""
    values, sizes = [], []
    for site in source.site_names:
        here = source.sites == site
        value = auc(source.labels[here], decision[here])
        if not np.isnan(value):
            values.append(value)
            sizes.append(here.sum())
    return float(np.average(values, weights=sizes)) if values else auc(source.labels, decision)


def _balance(source: Cohort) -> Floats:
    """Subject weights under which each site has as much patient as control; sites of one class say nothing within a site."""
    weights = np.zeros(len(source))
    for site in source.site_names:
        here = source.sites == site
        counts = [int((here & (source.labels == label)).sum()) for label in (0, 1)]
        if min(counts) > 0:
            weights[here] = here.sum() / (2 * np.array(counts)[source.labels[here]])
    return weights if weights.any() else np.ones(len(source))


def _site_means(features: Floats, source: Cohort, weights: Floats) -> Floats:
    """(subject, feature): each subject's site mean, with the classes balanced."""
    means = np.empty_like(features)
    for site in source.site_names:
        here = source.sites == site
        own = weights[here] if weights[here].any() else None
        means[here] = np.average(features[here], axis=0, weights=own)
    return means


def _slopes(features: Floats, confounds: Floats, source: Cohort, weights: Floats) -> Floats:
    """(confound, feature) least-squares slopes inside sites, so that a site's scanner is not taken for its subjects' age."""
    root = np.sqrt(weights)[:, None]
    x, y = (root * (values - _site_means(values, source, weights)) for values in (confounds, features))
    return np.asarray(np.linalg.lstsq(x, y, rcond=None)[0])


def _adapted(learner: Learner) -> Learner:
    """A learner of features scaled by their own correlation with the label, so that its penalty falls on those without one."""

    def learn(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
        scale = association(x, labels, weights)
        coefficients, intercepts = learner(x * scale, labels, weights, strengths)
        return coefficients * scale, intercepts

    return learn


def association(x: Floats, labels: npt.NDArray[np.int8], weights: Floats) -> Floats:
    """(feature,) size of each feature's correlation with the label, less what chance would give, as scales that keep the norm.

    Features that are centred by site, with weights that balance the classes there, need no centring of the labels.
    """
    y = 2.0 * labels - 1
    squares = (x**2).sum(axis=0)
    r = np.abs((weights * y) @ x) / np.sqrt(np.where(squares > 0, squares, 1.0) * (weights.sum() or 1.0))
    r = np.sqrt(np.maximum(r**2 - 1 / len(x), 0.0)) + LEAST_SCALE * r.mean()  # nobody is left out: chance errs too
    size = np.sqrt((squares * r**2).sum())
    return r * np.sqrt(squares.sum()) / size if size > 0 else np.ones(x.shape[1])


def _ridge(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """Least squares on labels -1 / 1, every penalty from one eigendecomposition."""
    y = 2.0 * labels - 1
    middle, level = np.average(x, axis=0, weights=weights), np.average(y, weights=weights)
    root = np.sqrt(weights)
    z, t = (x - middle) * root[:, None], (y - level) * root
    if len(z) < z.shape[1]:
        size, vectors = np.linalg.eigh(z @ z.T)
        coefficients = ((vectors.T @ t) / (size + strengths[:, None])) @ vectors.T @ z  # (penalty, feature)
    else:
        size, vectors = np.linalg.eigh(z.T @ z)
        coefficients = ((vectors.T @ (z.T @ t)) / (size + strengths[:, None])) @ vectors.T
    return coefficients, level - coefficients @ middle


def _logistic(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """From the strongest penalty to the weakest, each starting where the last one ended."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=2000, warm_start=True)
    coefficients, intercepts = np.empty((len(strengths), x.shape[1])), np.empty(len(strengths))
    for i in np.argsort(-strengths):
        model.set_params(C=1 / strengths[i]).fit(x, labels, sample_weight=weights)
        coefficients[i], intercepts[i] = model.coef_[0], model.intercept_[0]
    return coefficients, intercepts


def _svm(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """With the kernel made once, since every penalty shares it."""
    from sklearn.svm import SVC

    kernel = x @ x.T
    coefficients, intercepts = np.empty((len(strengths), x.shape[1])), np.empty(len(strengths))
    for i, strength in enumerate(strengths):
        model = SVC(kernel="precomputed", C=1 / strength).fit(kernel, labels, sample_weight=weights)
        coefficients[i], intercepts[i] = model.dual_coef_[0] @ x[model.support_], model.intercept_[0]
    return coefficients, intercepts


LEARNERS: dict[str, Learner] = {"ridge": _ridge, "logistic": _logistic, "svm": _svm}


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


_REFERENCES: dict[str, Floats] = {}


def _reference(source: Cohort) -> Floats:
    """The tangent reference of source; the last few are kept, since several methods of a study share a source."""
    if source.hash not in _REFERENCES:
        while len(_REFERENCES) >= 4:
            del _REFERENCES[next(iter(_REFERENCES))]
        _REFERENCES[source.hash] = geometric_mean(covariances(source.series), tolerance=1e-4)
    return _REFERENCES[source.hash]


@method("prior", role="peer")
class Prior(Method):
    """Everybody gets the share of patients in source: what a model must beat to have learned anything."""

    stochastic: ClassVar[bool] = False

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """The share of patients."""
        self.facts_["inputs"] = []
        self.state_["share"] = np.array(float(source.labels.mean()))

    def score(self, target: Cohort) -> Floats:
        """The same for all."""
        return np.full(len(target), float(self.state_["share"]))


@method("phenotype-logistic", role="phenotypes")
class PhenotypeLogistic(Linear):
    """Logistic regression on the phenotypes alone: no brain in it."""

    blocks: ClassVar[Mapping[str, float]] = {"phenotypes": 1.0}
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}


@method("fc-logistic", role="peer")
class FCLogistic(Linear):
    """Logistic regression on Fisher-z correlations."""

    reference: ClassVar[str] = "Abraham et al. 2017, NeuroImage 147: 736-745"
    blocks: ClassVar[Mapping[str, float]] = {"fc": 1.0}


@method("fc-svm", role="peer")
class FCSVM(Linear):
    """Linear support vector machine on Fisher-z correlations."""

    reference: ClassVar[str] = "Abraham et al. 2017, NeuroImage 147: 736-745"
    blocks: ClassVar[Mapping[str, float]] = {"fc": 1.0}
    learner: ClassVar[str] = "svm"


@method("fc-adaptive", role="peer")
class FCAdaptive(Linear):
    """Ridge on Fisher-z correlations, each scaled by how it goes with the label inside source sites."""

    reference: ClassVar[str] = (
        "after the adaptive lasso: Zou 2006, Journal of the American Statistical Association 101: 1418-1429"
    )
    blocks: ClassVar[Mapping[str, float]] = {"fc": 1.0}
    learner: ClassVar[str] = "ridge"
    within_sites: ClassVar[bool] = True
    adaptive: ClassVar[tuple[str, ...]] = ("fc",)


@method("tangent-logistic", role="peer")
class TangentLogistic(Linear):
    """Logistic regression in the tangent space of covariances."""

    reference: ClassVar[str] = "Varoquaux et al. 2010, MICCAI: 200-208; Dadi et al. 2019, NeuroImage 192: 115-134"
    blocks: ClassVar[Mapping[str, float]] = {"tangent": 1.0}


@method("tangent-ridge", role="peer")
class TangentRidge(Linear):
    """Ridge regression on the labels in the tangent space of covariances."""

    reference: ClassVar[str] = "Varoquaux et al. 2010, MICCAI: 200-208; Dadi et al. 2019, NeuroImage 192: 115-134"
    blocks: ClassVar[Mapping[str, float]] = {"tangent": 1.0}
    learner: ClassVar[str] = "ridge"


@method("connectome-ensemble", role="peer")
class ConnectomeEnsemble(Linear):
    """Ridge on FC, tangent space and regional amplitude, trained within sites."""

    blocks: ClassVar[Mapping[str, float]] = {"fc": 0.5, "tangent": 0.5, "amplitude": 0.3}
    learner: ClassVar[str] = "ridge"
    within_sites: ClassVar[bool] = True


@method("connectome-adaptive", role="default")
class ConnectomeAdaptive(Linear):
    """Adaptive ridge on FC of usual time points, correlations of swings, and amplitude, age and sex taken out of them."""

    penalties: tuple[float, ...] = (3.0,)  # choosing among more, on source sites left out, cost half a point on ABIDE

    blocks: ClassVar[Mapping[str, float]] = {"steady": 1.0, "swings": 0.3, "amplitude": 0.2}
    learner: ClassVar[str] = "ridge"
    within_sites: ClassVar[bool] = True
    adaptive: ClassVar[tuple[str, ...]] = ("steady", "swings", "amplitude")
    confounds: ClassVar[tuple[str, ...]] = ("age", "sex")
