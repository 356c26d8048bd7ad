"""The simple peers: linear models on connectivity, regional amplitude and phenotypes, which a new method has to beat.

Each is a weighted sum of blocks (FC, tangent space, amplitude, phenotypes) with one linear learner per block; the penalty is
chosen and probabilities are Platt-scaled on held-out source sites. The features are in `connectivity.py`.
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
    covariances,
    fc_features,
    geometric_mean,
    standardised,
    steady,
    swings,
    tangent_features,
)
from m2lgdg.method import Method, method
from m2lgdg.methods.amplitude import AmplitudeRange, UsesAmplitude, fill_standardised, standardised_scans
from m2lgdg.metrics import auc, platt
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.splits import site_folds

Floats = npt.NDArray[np.float64]
VIEWS: dict[str, View] = {"fc": standardised, "steady": steady, "swings": swings}  # of a series, before it is correlated
LEAST_SCALE = 0.05  # least scale of an adaptive feature, relative to the mean association
# features (subject, feature), labels, subject weights, penalties -> coefficients (penalty, feature), intercepts (penalty,)
Learner = Callable[[Floats, npt.NDArray[np.int8], Floats, Floats], tuple[Floats, Floats]]


class Block(NamedTuple):
    """A fitted block: decision = features @ weights + intercept; `held_out` are decisions for source sites not trained on."""

    weights: Floats
    intercept: float
    held_out: Floats
    penalty: float


@dataclass
class Linear(UsesAmplitude, Method):
    """A weighted sum of linear blocks; base class of the simple peers, with the fields they share.

    Each block is standardised with source statistics. Its penalty is the one with the best mean AUC over held-out source sites,
    and its decision is divided by the sd of the held-out decisions before it is weighted. The sum is Platt-scaled on the
    held-out decisions. Variant `phenotypes` adds a block of the phenotypes with weight `phenotype_weight`.
    """

    site_folds: int = 5
    penalties: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # times the mean squared feature norm
    phenotypes: bool = False
    phenotype_weight: float = 0.3

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"site_folds": (2, math.inf), "penalties": (1e-12, math.inf)}
    stochastic: ClassVar[bool] = False
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"phenotypes": {"phenotypes": True}}
    blocks: ClassVar[Mapping[str, float]] = {}
    learner: ClassVar[str] = "logistic"
    within_sites: ClassVar[bool] = False  # centre features by site and balance classes within each site
    adaptive: ClassVar[tuple[str, ...]] = ()  # blocks with features scaled by their association with the label
    confounds: ClassVar[tuple[str, ...]] = ()  # phenotypes regressed out of the other blocks, in variant `phenotypes`

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Fit each block, then Platt-scale the sum of their decisions on held-out source sites."""
        if "phenotypes" not in self._weights():
            self.facts_["inputs"] = []
        folds = site_folds(source.sites, source.labels, self.site_folds)
        if "phenotypes" in self._weights():
            self.state_ |= PhenotypeScaler.fit(source).state("phenotypes.scaler")
        confound_columns = [i for i, name in enumerate(self.facts_["inputs"]) if name in self.confounds]
        total, confound_weights = np.zeros(len(source)), np.zeros(len(confound_columns))
        for name, weight in self._weights().items():
            if name == "tangent":
                self.state_["tangent.reference"] = _reference(source)
            features = self._features(name, source)
            if name == "amplitude" and not self._amplitude_is_usable(features, source):
                continue
            self.state_[f"{name}.mean"] = features.mean(axis=0)  # baseline of a single subject's explanation
            confounds = (
                self._features("phenotypes", source)[:, confound_columns] if confound_columns and name != "phenotypes" else None
            )
            block, slopes = self._fit_block(features, confounds, source, folds, name in self.adaptive)
            weight /= block.held_out.std() or 1.0
            total += weight * block.held_out
            self.state_[f"{name}.weights"] = weight * block.weights
            self.state_[f"{name}.intercept"] = np.array(weight * block.intercept)
            self.facts_.setdefault("penalties", {})[name] = block.penalty
            if slopes is not None:  # regressing out is linear: fold it into the confounds' weights
                confound_weights = confound_weights + weight * slopes @ block.weights
        if confound_columns:
            self.state_["phenotypes.weights"][confound_columns] -= confound_weights
        self.state_["calibration"] = np.array(platt(total, source.labels))
        self.held_out_ = total  # source subjects, by blocks fitted without their site; not saved with the model

    def _amplitude_is_usable(self, features: Floats, source: Cohort) -> bool:
        """Store the range of amplitudes in source, and fill in those of standardised scans.

        If most source scans are standardised, the block gets the weight 0.
        """
        standardised = standardised_scans(features)
        if standardised.any():
            self.facts_["standardised_scans"] = int(standardised.sum())
        usable = 2 * standardised.sum() < len(source)
        if usable:
            AmplitudeRange.fit(features, source).save(self.state_)
            fill_standardised(features, standardised, source.sites)
        else:
            self.state_ |= {"amplitude.weights": np.zeros(features.shape[1]), "amplitude.intercept": np.array(0.0)}
            self.state_["amplitude.mean"] = np.zeros(features.shape[1])
        return bool(usable)

    @property
    def amplitude_state(self) -> Mapping[str, Any]:
        """Fitted arrays."""
        return self.state_

    def score(self, target: Cohort) -> Floats:
        """Platt-scaled sum of the blocks' decisions."""
        slope, offset = self.state_["calibration"]
        return _sigmoid(slope * self.decision(target) + offset)

    def decision(self, target: Cohort) -> Floats:
        """(subject,) sum of the blocks' decisions, before Platt scaling."""
        total = np.zeros(len(target))
        for name in self._weights():
            features = self._features(name, target)
            # Row by row: BLAS may sum in a different order for one row than for many.
            total += [float(row @ self.state_[f"{name}.weights"]) for row in features] + self.state_[f"{name}.intercept"]
        return total

    def _weights(self) -> dict[str, float]:
        return dict(self.blocks) | ({"phenotypes": self.phenotype_weight} if self.phenotypes else {})

    def _features(self, block: str, cohort: Cohort) -> Floats:
        """(subject, feature) of one block; each row depends on that subject and on statistics of source only."""
        if block in VIEWS:
            return fc_features(cohort.series, VIEWS[block])
        if block == "tangent":
            return tangent_features(covariances(cohort.series), self.state_["tangent.reference"])
        if block == "amplitude":
            return self.amplitude_block(cohort)
        return PhenotypeScaler.restore(tuple(self.facts_["inputs"]), self.state_, "phenotypes.scaler").transform(cohort)

    def _fit_block(
        self, features: Floats, confounds: Floats | None, source: Cohort, folds: list[Any], adaptive: bool
    ) -> tuple[Block, Floats | None]:
        """The block, in the units of its features, and the (confound, feature) slopes regressed out of them beforehand."""
        weights = _balance(source) if self.within_sites else np.ones(len(source))
        slopes = None
        if confounds is not None:
            slopes = _slopes(features, confounds, source, weights)
            features = features - confounds @ slopes
        centre = np.average(features, axis=0, weights=weights)
        trained = features - (_site_means(features, source, weights) if self.within_sites else centre)
        scale = np.sqrt(np.average(trained**2, axis=0, weights=weights))
        scale = np.where(scale > 1e-12, scale, 1.0)
        scaled = (trained / scale, (features - centre) / scale)
        block = _choose(*scaled, source, weights, folds, LEARNERS[self.learner], self.penalties, adaptive)
        unscaled = block.weights / scale
        return block._replace(weights=unscaled, intercept=float(block.intercept - centre @ unscaled)), slopes


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
    """The block refitted on all of source with the penalty of the best mean AUC over held-out source sites.

    `trained` and `scored` are the same subjects' features: as used for training (centred by site where the method does so), and
    as they would be at an unseen site (centred by the mean of source).
    """
    axes, train_rows, score_rows = None, trained, scored
    if adaptive:
        learner = _adapted(learner)  # scales are per feature, from the training subjects of each fold
    else:
        # With an l2 penalty the solution lies in the span of the training rows: rotating into it is exact and much smaller.
        axes = _row_space(trained)  # (rank, feature)
        train_rows, score_rows = trained @ axes.T, scored @ axes.T
    strengths = np.array(penalties) * (trained**2).sum() / len(trained)
    held_out = np.full((len(penalties), len(source)), np.nan)
    for train, test in folds:
        coefficients, intercepts = learner(train_rows[train], source.labels[train], weights[train], strengths)
        held_out[:, test] = coefficients @ score_rows[test].T + intercepts[:, None]
    coefficients, intercepts = learner(train_rows, source.labels, weights, strengths)
    untested = np.isnan(held_out).any(axis=0)  # subjects whose fold could not be trained on
    held_out[:, untested] = coefficients @ score_rows[untested].T + intercepts[:, None]
    best = int(np.argmax([_mean_site_auc(decision, source) for decision in held_out]))
    chosen = coefficients[best] if axes is None else coefficients[best] @ axes
    return Block(chosen, float(intercepts[best]), held_out[best], penalties[best])


def _row_space(rows: Floats) -> Floats:
    """(rank, feature) orthonormal axes of the row space, from the small Gram matrix."""
    eigenvalues, vectors = np.linalg.eigh(rows @ rows.T)
    nonzero = eigenvalues > 1e-10 * max(float(eigenvalues[-1]), 1e-300)
    return np.asarray((vectors[:, nonzero] / np.sqrt(eigenvalues[nonzero])).T @ rows)


def _mean_site_auc(decision: Floats, source: Cohort) -> float:
    """Mean AUC within sites, weighted by their size, so that offsets between sites do not count."""
    values, sizes = [], []
    for site in source.site_names:
        at_site = source.sites == site
        value = auc(source.labels[at_site], decision[at_site])
        if not np.isnan(value):
            values.append(value)
            sizes.append(at_site.sum())
    return float(np.average(values, weights=sizes)) if values else auc(source.labels, decision)


def _balance(source: Cohort) -> Floats:
    """(subject,) weights that balance patients and controls within each site; 0 at sites with one class."""
    weights = np.zeros(len(source))
    for site in source.site_names:
        at_site = source.sites == site
        counts = [int((at_site & (source.labels == label)).sum()) for label in (0, 1)]
        if min(counts) > 0:
            weights[at_site] = at_site.sum() / (2 * np.array(counts)[source.labels[at_site]])
    return weights if weights.any() else np.ones(len(source))


def _site_means(features: Floats, source: Cohort, weights: Floats) -> Floats:
    """(subject, feature) class-balanced mean of each subject's site."""
    means = np.empty_like(features)
    for site in source.site_names:
        at_site = source.sites == site
        site_weights = weights[at_site] if weights[at_site].any() else None
        means[at_site] = np.average(features[at_site], axis=0, weights=site_weights)
    return means


def _slopes(features: Floats, confounds: Floats, source: Cohort, weights: Floats) -> Floats:
    """(confound, feature) least-squares slopes within sites, so that scanner effects are not taken for effects of age."""
    root = np.sqrt(weights)[:, None]
    x, y = (root * (values - _site_means(values, source, weights)) for values in (confounds, features))
    return np.asarray(np.linalg.lstsq(x, y, rcond=None)[0])


def _adapted(learner: Learner) -> Learner:
    """A learner on features scaled by their `association`, so that features without one are penalised most (adaptive ridge)."""

    def learn(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
        scale = association(x, labels, weights)
        coefficients, intercepts = learner(x * scale, labels, weights, strengths)
        return coefficients * scale, intercepts

    return learn


def association(x: Floats, labels: npt.NDArray[np.int8], weights: Floats) -> Floats:
    """(feature,) scales: each feature's absolute correlation with the label, less its chance level, rescaled to keep the norm.

    With r the correlation over n subjects: sqrt(max(r² - 1 / n, 0)) + 0.05 mean |r|. Features centred by site, with weights
    that balance the classes there, need no centring of the labels.
    """
    y = 2.0 * labels - 1
    squares = (x**2).sum(axis=0)
    r = np.abs((weights * y) @ x) / np.sqrt(np.where(squares > 0, squares, 1.0) * (weights.sum() or 1.0))
    r = (
        np.sqrt(np.maximum(r**2 - 1 / len(x), 0.0)) + LEAST_SCALE * r.mean()
    )  # no feature is dropped: the chance level is an estimate
    norm = np.sqrt((squares * r**2).sum())
    return r * np.sqrt(squares.sum()) / norm if norm > 0 else np.ones(x.shape[1])


def _ridge(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """Ridge regression on labels -1 / 1; one eigendecomposition serves all penalties."""
    y = 2.0 * labels - 1
    mean, mean_label = np.average(x, axis=0, weights=weights), np.average(y, weights=weights)
    root = np.sqrt(weights)
    z, t = (x - mean) * root[:, None], (y - mean_label) * root
    if len(z) < z.shape[1]:
        eigenvalues, vectors = np.linalg.eigh(z @ z.T)
        coefficients = ((vectors.T @ t) / (eigenvalues + strengths[:, None])) @ vectors.T @ z  # (penalty, feature)
    else:
        eigenvalues, vectors = np.linalg.eigh(z.T @ z)
        coefficients = ((vectors.T @ (z.T @ t)) / (eigenvalues + strengths[:, None])) @ vectors.T
    return coefficients, mean_label - coefficients @ mean


def _logistic(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """l2-penalised logistic regression, from the strongest penalty to the weakest with warm starts."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=2000, warm_start=True)
    coefficients, intercepts = np.empty((len(strengths), x.shape[1])), np.empty(len(strengths))
    for i in np.argsort(-strengths):
        model.set_params(C=1 / strengths[i]).fit(x, labels, sample_weight=weights)
        coefficients[i], intercepts[i] = model.coef_[0], model.intercept_[0]
    return coefficients, intercepts


def _svm(x: Floats, labels: npt.NDArray[np.int8], weights: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """Linear support vector machine; all penalties share one precomputed kernel."""
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
    """Tangent-space reference of source; the last four are cached, since the methods of a study share sources."""
    if source.hash not in _REFERENCES:
        while len(_REFERENCES) >= 4:
            del _REFERENCES[next(iter(_REFERENCES))]
        _REFERENCES[source.hash] = geometric_mean(covariances(source.series), tolerance=1e-4)
    return _REFERENCES[source.hash]


@method("prior", role="peer")
class Prior(Method):
    """Proportion of patients in source as the probability of every subject (no features); the reference at chance level."""

    stochastic: ClassVar[bool] = False

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Store the proportion of patients in source."""
        self.facts_["inputs"] = []
        self.state_["share"] = np.array(float(source.labels.mean()))

    def score(self, target: Cohort) -> Floats:
        """The stored proportion, for every subject."""
        return np.full(len(target), float(self.state_["share"]))


@method("phenotype-logistic", role="phenotypes")
class PhenotypeLogistic(Linear):
    """l2-penalised logistic regression on phenotypes alone (no imaging), penalty chosen on held-out source sites."""

    blocks: ClassVar[Mapping[str, float]] = {"phenotypes": 1.0}
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}


@method("fc-logistic", role="peer")
class FCLogistic(Linear):
    """l2-penalised logistic regression on Fisher-z FC, penalty chosen on held-out source sites."""

    reference: ClassVar[str] = "Abraham et al. 2017, NeuroImage 147: 736-745"
    blocks: ClassVar[Mapping[str, float]] = {"fc": 1.0}


@method("fc-svm", role="peer")
class FCSVM(Linear):
    """Linear support vector machine on Fisher-z FC, penalty chosen on held-out source sites."""

    reference: ClassVar[str] = "Abraham et al. 2017, NeuroImage 147: 736-745"
    blocks: ClassVar[Mapping[str, float]] = {"fc": 1.0}
    learner: ClassVar[str] = "svm"


@method("fc-adaptive", role="peer")
class FCAdaptive(Linear):
    """Adaptive ridge on site-centred Fisher-z FC: each edge is scaled by its within-site correlation with the label.

    Features are centred by source site and classes balanced within sites. The scale of an edge is its correlation with the
    label less the chance level (`association`), estimated anew in every fold, so that the penalty falls on edges without an
    association. The penalty is chosen on held-out source sites.
    """

    reference: ClassVar[str] = (
        "after the adaptive lasso: Zou 2006, Journal of the American Statistical Association 101: 1418-1429"
    )
    blocks: ClassVar[Mapping[str, float]] = {"fc": 1.0}
    learner: ClassVar[str] = "ridge"
    within_sites: ClassVar[bool] = True
    adaptive: ClassVar[tuple[str, ...]] = ("fc",)


@method("tangent-logistic", role="peer")
class TangentLogistic(Linear):
    """l2-penalised logistic regression on tangent-space covariances (Ledoit-Wolf), penalty chosen on held-out source sites."""

    reference: ClassVar[str] = "Varoquaux et al. 2010, MICCAI: 200-208; Dadi et al. 2019, NeuroImage 192: 115-134"
    blocks: ClassVar[Mapping[str, float]] = {"tangent": 1.0}


@method("tangent-ridge", role="peer")
class TangentRidge(Linear):
    """Ridge classifier on tangent-space covariances (Ledoit-Wolf), penalty chosen on held-out source sites."""

    reference: ClassVar[str] = "Varoquaux et al. 2010, MICCAI: 200-208; Dadi et al. 2019, NeuroImage 192: 115-134"
    blocks: ClassVar[Mapping[str, float]] = {"tangent": 1.0}
    learner: ClassVar[str] = "ridge"


@method("connectome-ensemble", role="peer")
class ConnectomeEnsemble(Linear):
    """Weighted sum of ridge classifiers on site-centred Fisher-z FC, tangent-space covariances and log regional amplitude.

    Weights 0.5, 0.5 and 0.3. Features are centred by source site and classes balanced within sites; each penalty is chosen on
    held-out source sites.
    """

    blocks: ClassVar[Mapping[str, float]] = {"fc": 0.5, "tangent": 0.5, "amplitude": 0.3}
    learner: ClassVar[str] = "ridge"
    within_sites: ClassVar[bool] = True


@method("connectome-adaptive", role="default")
class ConnectomeAdaptive(Linear):
    """Adaptive ridge on site-centred frame-weighted FC, correlations of absolute deviations and log regional amplitude.

    The decision is the sum of three ridge classifiers with weights 1, 0.3 and 0.2 (labels -1 / 1), Platt-scaled on held-out
    source sites. Their features, from each ROI's z-scored series:
    `steady`: Fisher z of weighted correlations. A time point with mean square e over ROIs has weight 1 / (1 + (e / median e)²),
    so that frames of unusual amplitude, as in head motion, count less.
    `swings`: Fisher z of the correlations between absolute deviations |z|, which are high where ROIs deviate from their means
    at the same time, in either direction.
    `amplitude`: log sd of each ROI's raw series minus the subject's mean over ROIs.
    Features are centred by source site, classes balanced within sites, and every feature scaled by its within-site correlation
    with the label less the chance level, as in `fc-adaptive`; target subjects are centred by the mean of source. The penalty is
    fixed at 3 times the mean squared feature norm.
    Variant `phenotypes` adds a phenotype block (weight 0.3) and regresses age and sex out of the three blocks within sites.
    """

    penalties: tuple[float, ...] = (3.0,)  # choosing among several on held-out source sites cost half a point of AUC on ABIDE

    blocks: ClassVar[Mapping[str, float]] = {"steady": 1.0, "swings": 0.3, "amplitude": 0.2}
    learner: ClassVar[str] = "ridge"
    within_sites: ClassVar[bool] = True
    adaptive: ClassVar[tuple[str, ...]] = ("steady", "swings", "amplitude")
    confounds: ClassVar[tuple[str, ...]] = ("age", "sex")
