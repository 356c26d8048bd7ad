"""The simple peers: linear models on connectivity, regional amplitude and phenotypes, which a new method has to beat.

Each is a weighted sum of blocks (FC, tangent space, amplitude, phenotypes) with one linear learner per block; the penalty is
chosen and probabilities are Platt-scaled on held-out source sites. Features: `connectivity.py`, `tangent.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import (
    View,
    covariances,
    deviations,
    fc_features,
    frame_weighted,
    log_features,
    row_covariances,
    standardised,
)
from m2lgdg.method import ANY_SCAN, Method, method
from m2lgdg.methods.amplitude import AmplitudeRange, UsesAmplitude, fill_standardised, standardised_scans
from m2lgdg.methods.blocks import Block, Standardised, standardised_block
from m2lgdg.methods.solvers import FEW, Features, Problem, Rows, solved
from m2lgdg.methods.tables import CONFOUNDS as TABLE_CONFOUNDS
from m2lgdg.methods.tables import NONE, TableBlock, TakesTables, chosen_tables, table_weights
from m2lgdg.methods.together import Sources, sources_in_use
from m2lgdg.methods.within_sites import balance, held_parts, mean_site_auc, source_folds
from m2lgdg.metrics import FLAT_NOTE, is_flat, platt, sigmoid
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import METHODS
from m2lgdg.scans import SERIES, Scans
from m2lgdg.tangent import geometric_mean, tangent_features

Floats = npt.NDArray[np.float64]
Value = TypeVar("Value")
# FC, frame-weighted FC and deviation FC: what is done to a series before it is correlated. Models store these names.
VIEWS: dict[str, View] = {"fc": standardised, "steady": frame_weighted, "swings": deviations}
# Tangent spaces: of the covariances between ROIs, and of those between the rows of the correlation matrix
TANGENTS: dict[str, Callable[[Scans], Floats]] = {"tangent": covariances, "tangent_pearson": row_covariances}
LOG_EUCLIDEAN = "log_euclidean"  # logarithms of the latter
EDGES = (*VIEWS, LOG_EUCLIDEAN)  # features of a subject alone, which are a new array
OF_SERIES = {"swings": "deviation FC", "amplitude": "amplitude"}  # blocks that connectomes cannot have
REFERENCE_TOLERANCE = 0.02  # one Newton step
REFERENCE_SUBJECTS = 256  # whose logarithms are computed for it
DO_NOT_HOLD = "What phenotypes say of the label does not hold at left-out source sites: decisions are made without them."
# Strong, so that each phenotype has the weight of its own slope: inputs are correlated, and often one of them is missing.
PHENOTYPE_PENALTY = 100.0
HOOKS = ("_features", "_source_features", "_subject_weights", "_fit_block", "_solve")  # which a subclass may have of its own
# Fields that say which blocks there are, not how one is fitted
OUTSIDE_BLOCKS = ("atlases", "phenotypes", "held_phenotypes", "tables", "scan")


@dataclass
class Linear(TakesTables, UsesAmplitude, Method):
    """A weighted sum of linear blocks; base class of the simple peers, with the fields they share.

    Each block is standardised with source statistics; its penalty is the one with the best mean AUC over held-out source sites,
    and its decision is divided by the sd of the held-out ones before it is weighted. The sum is Platt-scaled on the held-out
    decisions. Variant `phenotypes` adds a block of phenotypes, learned within source sites. Each counts as far as it holds at
    left-out source sites (`held_parts`), all by the discriminant of decisions there; if none does, as if there were none.
    """

    site_folds: int = 5
    penalties: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # times the mean squared feature norm
    phenotypes: bool = False
    held_phenotypes: bool = True  # within source sites, as far as they hold at left-out ones; otherwise fitted as scans are
    tables: str | tuple[str, ...] = NONE  # of brain structure: "all", "none", or their names

    bounds = {"site_folds": (2, math.inf), "penalties": (1e-12, math.inf)}
    takes = ANY_SCAN
    stochastic = False
    former_fields = {"phenotype_weight": "it is learned at left-out source sites"}
    variants = {"phenotypes": {"phenotypes": True}}
    blocks: ClassVar[Mapping[str, float]] = {}  # name -> weight in the decision
    learner = "logistic"
    within_sites = False  # centre features by site and balance classes within each site
    adaptive: ClassVar[tuple[str, ...]] = ()  # blocks with features scaled by their association with the label

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        notes = [note] if (note := note_on_connectomes(self.blocks, self.trained_on)) else []
        tables = chosen_tables(self.tables, source, notes)
        if "phenotypes" not in self._weights():
            self.facts_["inputs"] = [name for name in source.inputs if tables and name in TABLE_CONFOUNDS]
        self.facts_ |= {"notes": notes} if notes else {}
        folds = source_folds(source, self.site_folds, self._subject_weights(source))
        if "phenotypes" in self._weights() or tables:
            self.state_ |= PhenotypeScaler.fit(source, self.facts_["inputs"]).state("phenotypes.scaler")
        held = self.held_phenotypes and "phenotypes" in self._weights()
        total = np.zeros(len(source))
        for name, weight in self._weights().items():
            if name in TANGENTS:
                self.state_[f"{name}.reference"] = _reference(name, source, self._content(source))
            block, mean = self._fit_together(name, source), None
            if block is None:
                features = self._source_features(name, source)
                if name == "amplitude" and not self._amplitude_is_usable(features, source):
                    continue
                mean = features.mean(axis=0, dtype=np.float64)
                if name == "phenotypes" and held:
                    block = self._fit_phenotypes(source)
                else:
                    block = self._fit_block(name, features, source, folds)
            self.state_[f"{name}.mean"] = block.mean if mean is None else mean  # baseline of a single subject's explanation
            weight /= block.held_out.std() or 1.0
            if name == "phenotypes" and total.any():
                weight = float(table_weights(total, [block.held_out], source)[0])
                self.facts_.setdefault("phenotypes", {})["relative"] = weight * float(block.held_out.std() / total.std())
            total += weight * block.held_out
            self.state_[f"{name}.weights"] = weight * block.weights
            self.state_[f"{name}.intercept"] = np.array(weight * block.intercept)
            self.facts_.setdefault("penalties", {})[name] = block.penalty
        self.base_ = total  # held-out decisions without tables, not saved with the model
        self._calibrate(total + self._fit_tables(tables, total, source) if tables else total, source)

    def _fit_phenotypes(self, source: Cohort) -> Block:
        """The block of phenotypes, learned within sites; each counts as far as it holds at left-out source sites."""
        features, weights = self._features("phenotypes", source), balance(source)
        folds = source_folds(source, self.site_folds, weights)
        rows, centre, scale, _ = standardised_block(features, source, weights, within_sites=True)
        parts = held_parts(rows.trained, source, weights, folds)  # (input,)
        self.facts_["phenotypes"] = {"parts": dict(zip(self.facts_["inputs"], parts.tolist(), strict=True))}
        if not parts.any():
            self.facts_.setdefault("notes", []).append(DO_NOT_HOLD)
            return Block(np.zeros(len(parts)), 0.0, np.zeros(len(source)), self.penalties_of("phenotypes")[0])
        root = np.sqrt(parts)  # under a strong penalty, weights are proportional to the square of a scale
        scaled = Rows(rows.trained * root, rows.shift * root, rows.site)
        unscaled = np.divide(scale, root, out=np.full(len(root), np.inf), where=root > 0)
        return self._solve("phenotypes", Standardised(scaled, centre, unscaled), source, folds)

    def _calibrate(self, held_out: Floats, source: Cohort) -> None:
        """Platt scaling on the decisions of source subjects by blocks fitted without their site."""
        self.state_["calibration"] = np.array(platt(held_out, source.labels, source.sites))
        if is_flat(self.state_["calibration"][0], held_out):
            self.facts_.setdefault("notes", []).append(FLAT_NOTE)
        self.held_out_ = held_out  # not saved with the model

    def _fit_tables(self, tables: Mapping[str, list[str]], base: Floats, source: Cohort) -> Floats:
        """(subject,) weighted held-out decisions of the tables, beside those of the other blocks."""
        self.facts_["tables"] = {name: {"columns": columns} for name, columns in tables.items()}
        self.table_fits_: dict[str, Block] = {}  # without weights, not saved; held-out decisions are NaN without the table
        for table in self.table_blocks():
            known = table.fit_filling(source)
            block = self._fit_table(table, source if known.all() else source.select(known))
            held_out = np.full(len(source), np.nan)
            held_out[known] = block.held_out
            self.table_fits_[table.name] = block._replace(held_out=held_out)
            self.facts_["tables"][table.name]["subjects"] = int(known.sum())
        return self.weigh_tables(table_weights(base, [one.held_out for one in self.table_fits_.values()], source), base)

    def _fit_table(self, table: TableBlock, source: Cohort) -> Block:
        """The block of a table, fitted to the subjects who have it; kept for a fit on other scans of the same subjects."""
        weights, features = self._subject_weights(source), table.features(source)
        confounds = table.confounds(source, self.scaled_confounds(source))

        def solve() -> tuple[Block, Standardised]:
            units = features.std(axis=0)
            standardised = standardised_block(features, source, weights, self.within_sites, confounds, units=units)
            return self._solve("table", standardised, source, source_folds(source, self.site_folds, weights)), standardised

        fields = ((name, value) for name, value in self.fields().items() if name not in OUTSIDE_BLOCKS)
        data = (one.tobytes() for one in (source.subjects, source.sites, source.labels, features, confounds))
        solved = type(self), type(self)._solve, self.learner, self.within_sites, *fields, *data
        block, standardised = _TABLES.get(self._key(source, *solved, content=()), solve)
        slopes = np.zeros((0, features.shape[1])) if standardised.slopes is None else standardised.slopes
        table.put(slopes=slopes, mean=standardised.centre, scale=standardised.scale)
        return block

    def weigh_tables(self, factors: Floats, base: Floats) -> Floats:
        """Give each table this weight beside a base; (subject,) held-out decisions, without a table those of a mean subject."""
        filled = []
        for table, factor in zip(self.table_blocks(), factors.tolist(), strict=True):
            block, about = self.table_fits_[table.name], self.facts_["tables"][table.name]
            absent = block.weights @ table["mean"] + block.intercept
            table.put(weights=factor * block.weights, intercept=factor * block.intercept, absent=factor * absent)
            filled.append(np.where(np.isnan(block.held_out), absent, block.held_out))
            part = float(factor * filled[-1].std() / (base.std() or 1.0))  # of the decision, in units of the other blocks'
            about |= {"weight": factor} | ({"relative": part} if base.any() else {})
        return np.asarray(factors @ np.stack(filled))

    def scaled_confounds(self, cohort: Cohort) -> dict[str, Floats]:
        scaled = np.asarray(self._features("phenotypes", cohort), dtype=np.float64)  # (subject, input)
        return {name: scaled[:, i] for i, name in enumerate(self.facts_["inputs"]) if name in TABLE_CONFOUNDS}

    def held_out_logits(self) -> Floats | None:
        """(source subject,) calibrated logits from blocks fitted without the subject's site; None for a loaded model."""
        if not hasattr(self, "held_out_"):
            return None
        slope, offset = self.state_["calibration"]
        return slope * self.held_out_ + offset

    def _amplitude_is_usable(self, features: Features, source: Cohort) -> bool:
        """Store the range of source and fill in standardised scans; weight 0 if most source scans are standardised."""
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
        return self.state_

    def score(self, target: Cohort) -> Floats:
        slope, offset = self.state_["calibration"]
        return sigmoid(slope * self.decision(target) + offset)

    def decision(self, target: Cohort) -> Floats:
        """(subject,) sum of the blocks' decisions, before Platt scaling."""
        total = np.zeros(len(target))
        for name in self._weights():
            features = self._features(name, target)
            # Row by row: BLAS may sum in a different order for one row than for many.
            total += [float(row @ self.state_[f"{name}.weights"]) for row in features] + self.state_[f"{name}.intercept"]
        if tables := self.table_blocks():
            scaled = self.scaled_confounds(target)
            total = total + sum(table.decision(target, scaled) for table in tables)
        return total

    def _weights(self) -> dict[str, float]:
        return self.weights_of(self.trained_on)

    def weights_of(self, scans: str) -> dict[str, float]:
        """Weight of each block of a fit on series, or on connectomes of a kind."""
        return blocks_of(self.blocks, scans) | ({"phenotypes": 1.0} if self.phenotypes else {})

    def _features(self, block: str, cohort: Cohort) -> Features:
        """(subject, feature) of one block; each row depends on that subject and on statistics of source only."""
        if block in VIEWS:
            return fc_features(cohort.scans, VIEWS[block])
        if block == LOG_EUCLIDEAN:
            return log_features(cohort.scans)
        if block in TANGENTS:
            return tangent_features(TANGENTS[block](cohort.scans), self.state_[f"{block}.reference"])
        if block == "amplitude":
            return self.amplitude_block(cohort)
        return PhenotypeScaler.restore(tuple(self.facts_["inputs"]), self.state_, "phenotypes.scaler").transform(cohort)

    def _source_features(self, name: str, source: Cohort) -> Features:
        if name in TANGENTS:
            return _TANGENTS.get(self._key(source, name), lambda: self._features(name, source))
        return self._features(name, source)

    def _key(self, source: Cohort, *more: object, content: tuple[object, ...] | None = None) -> tuple[object, ...] | None:
        """All that a result depends on which fits on the same source share; None for a class or an object of a plugin."""
        cls = type(self)
        package = METHODS.get(cls.name) is cls and METHODS.modules.get(cls.name) == cls.__module__
        if not package or any(map(callable, vars(self).values())):
            return None
        hooks = cls._features, cls._subject_weights, cls.amplitude_block
        return (*(self._content(source) if content is None else content), *hooks, *more)

    def _content(self, source: Cohort) -> tuple[str, bytes]:
        """Content of source and the order of its subjects, which is not part of its hash but that of the rows of a block."""
        return self.facts_["source"]["hash"], "\n".join(source.subjects.tolist()).encode()

    def _fit_block(self, name: str, features: Features, source: Cohort, folds: list[Any]) -> Block:
        """The block, in the units of its features."""
        chosen = {key: value for key, value in self.fields().items() if key not in OUTSIDE_BLOCKS}
        cls = type(self)

        def standardise() -> Standardised:
            # Edges are a copy, and the largest array of a fit.
            own = (cls._features, cls._source_features) == (Linear._features, Linear._source_features)
            made_here = own and name in EDGES
            weights = self._subject_weights(source)
            return standardised_block(features, source, weights, self.within_sites, overwrite=made_here)

        def solve() -> Block:
            return self._solve(name, _ROWS.get(self._key(source, name, self.within_sites), standardise), source, folds)

        made_by = cls, cls._solve, self.learner, self.within_sites, name in self.adaptive
        return _BLOCKS.get(self._key(source, name, *made_by, *chosen.items()), solve)

    def _fit_together(self, name: str, source: Cohort) -> Block | None:
        """An adaptive block with one penalty, solved with those of other sources of a study; None if it is another kind."""
        cls, penalties = type(self), self.penalties_of(name)
        plain = all(getattr(cls, hook) is getattr(Linear, hook) for hook in HOOKS)
        edges = len(source.rois) * (len(source.rois) - 1) // 2
        if not plain or name not in self.adaptive or name not in EDGES or len(penalties) > 1 or edges <= min(len(source), FEW):
            return None
        if (key := self._key(source, name)) is None or not self.within_sites:
            return None

        def fitted(sources: Sources) -> Block | None:
            return sources.block(source, partial(self._features, name), self.site_folds, penalties[0], name)

        for sources in sources_in_use():
            if block := fitted(sources):
                return block
        alone = Sources(source, [np.arange(len(source))])
        return _ALONE.get((*key, self.site_folds, penalties[0]), lambda: fitted(alone))

    def _subject_weights(self, source: Cohort) -> Floats:
        return balance(source) if self.within_sites else np.ones(len(source))

    def penalties_of(self, name: str) -> tuple[float, ...]:
        """Penalties of a block: the field `penalties`, but one for phenotypes beside scans."""
        return (PHENOTYPE_PENALTY,) if name == "phenotypes" and self.phenotypes and self.held_phenotypes else self.penalties

    def _solve(self, name: str, standardised: Standardised, source: Cohort, folds: list[Any]) -> Block:
        """For all penalties, of which the one with the best mean AUC over held-out source sites is taken."""
        rows, centre, scale, _ = standardised
        penalties = self.penalties_of(name)
        weights = balance(source) if name == "phenotypes" and self.held_phenotypes else self._subject_weights(source)
        problem = Problem(rows, source.labels, weights, folds, np.array(penalties) * rows.mean_square)
        solutions = solved(problem, "adaptive" if name in self.adaptive else self.learner)
        best = int(np.argmax([mean_site_auc(decision, source) for decision in solutions.held_out]))
        unscaled = solutions.coefficients(best) / scale
        intercept = float(solutions.intercepts[best] - centre @ unscaled)
        return Block(unscaled, intercept, solutions.held_out[best], penalties[best])


def blocks_of(blocks: Mapping[str, float], scans: str) -> dict[str, float]:
    """The blocks that scans have: of connectomes, plain FC in place of frame-weighted FC and none that needs series."""
    if scans == SERIES:
        return dict(blocks)
    return {"fc" if name == "steady" else name: weight for name, weight in blocks.items() if name not in OF_SERIES}


def note_on_connectomes(blocks: Mapping[str, float], scans: str) -> str:
    """A sentence on the blocks that are replaced or left out because the scans are connectomes; empty without any."""
    if scans == SERIES or blocks_of(blocks, scans) == dict(blocks):
        return ""
    missing = [words for name, words in OF_SERIES.items() if name in blocks]
    parts = ["plain FC takes the place of frame-weighted FC"] if "steady" in blocks else []
    parts += (
        [f"{' and '.join(missing)}, computed from time series, {'are' if missing[1:] else 'is'} left out"] if missing else []
    )
    return f"Trained on connectomes: {'; '.join(parts)}."


class _Recent(Generic[Value]):
    """The last few results of a computation, by a key that holds all that it depends on; without a key, nothing is shared."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.results: dict[Any, Value] = {}

    def get(self, key: Any, compute: Callable[[], Value]) -> Value:
        if key is None:
            return compute()
        if key not in self.results:
            while len(self.results) >= self.most:  # first, as there may be no memory for both
                del self.results[next(iter(self.results))]
            self.results[key] = compute()
        return self.results[key]


# The methods of a study are fitted on the same sources, one target after another.
_REFERENCES: _Recent[Floats] = _Recent(4)
_TANGENTS: _Recent[Features] = _Recent(2)  # one of each kind: methods of both take turns
_ROWS: _Recent[Standardised] = _Recent(1)
_BLOCKS: _Recent[Block] = _Recent(32)
_ALONE: _Recent[Block | None] = _Recent(32)  # of a source that is not fitted together with others
_TABLES: _Recent[tuple[Block, Standardised]] = _Recent(8)


def _reference(block: str, source: Cohort, content: tuple[str, bytes]) -> Floats:
    """Tangent-space reference of source: the geometric mean of its covariances."""

    def compute() -> Floats:
        matrices = TANGENTS[block](source.scans)
        return geometric_mean(matrices, tolerance=REFERENCE_TOLERANCE, first_step=REFERENCE_SUBJECTS)

    return _REFERENCES.get((block, *content), compute).copy()  # part of a model, which may be edited


@method("prior", role="peer")
class Prior(Method):
    """Proportion of patients in source as the probability of every subject (no features); the reference at chance level."""

    stochastic = False
    takes = ANY_SCAN
    former_arrays = {"share": "prevalence"}

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        self.facts_["inputs"] = []
        self.state_["prevalence"] = np.array(float(source.labels.mean()))

    def score(self, target: Cohort) -> Floats:
        return np.full(len(target), float(self.state_["prevalence"]))


@method("phenotype-logistic", role="phenotypes")
class PhenotypeLogistic(Linear):
    """l2-penalised logistic regression on phenotypes alone (no imaging), within source sites.

    What does not hold at left-out source sites is not used; every subject then has the same probability.
    """

    penalties: tuple[float, ...] = (PHENOTYPE_PENALTY,)

    blocks = {"phenotypes": 1.0}
    variants = {}


@method("fc-logistic", role="peer")
class FCLogistic(Linear):
    """l2-penalised logistic regression on Fisher-z FC, penalty chosen on held-out source sites."""

    reference = "Abraham et al. 2017, NeuroImage 147: 736-745"
    blocks = {"fc": 1.0}


@method("fc-svm", role="peer")
class FCSVM(Linear):
    """Linear support vector machine on Fisher-z FC, penalty chosen on held-out source sites."""

    reference = "Abraham et al. 2017, NeuroImage 147: 736-745"
    blocks = {"fc": 1.0}
    learner = "svm"


@method("fc-adaptive", role="peer")
class FCAdaptive(Linear):
    """Adaptive ridge on site-centred Fisher-z FC: each edge is scaled by its within-site correlation with the label.

    Classes are balanced within sites. The scale of an edge is its correlation with the label less the chance level
    (`association`), estimated anew in every fold, so that the penalty falls on edges without an association.
    """

    reference = "after the adaptive lasso: Zou 2006, Journal of the American Statistical Association 101: 1418-1429"
    blocks = {"fc": 1.0}
    learner = "ridge"
    within_sites = True
    adaptive = ("fc",)


@method("tangent-logistic", role="peer")
class TangentLogistic(Linear):
    """l2-penalised logistic regression on tangent-space covariances (Ledoit-Wolf), penalty chosen on held-out source sites."""

    reference = "Varoquaux et al. 2010, MICCAI: 200-208; Dadi et al. 2019, NeuroImage 192: 115-134"
    blocks = {"tangent": 1.0}


@method("tangent-ridge", role="peer")
class TangentRidge(Linear):
    """Ridge classifier on tangent-space covariances (Ledoit-Wolf), penalty chosen on held-out source sites."""

    reference = "Varoquaux et al. 2010, MICCAI: 200-208; Dadi et al. 2019, NeuroImage 192: 115-134"
    blocks = {"tangent": 1.0}
    learner = "ridge"


@method("connectome-ensemble", role="peer")
class ConnectomeEnsemble(Linear):
    """Weighted sum of ridge classifiers on site-centred Fisher-z FC, tangent-space covariances and log regional amplitude.

    Weights 0.5, 0.5 and 0.3; classes are balanced within sites, and each penalty is chosen on held-out source sites.
    On connectomes there is no amplitude.
    """

    blocks = {"fc": 0.5, "tangent": 0.5, "amplitude": 0.3}
    learner = "ridge"
    within_sites = True
