"""New-site calibration: Platt recalibration, threshold, conformal sets and between-site spread for a site not seen in training.

`Model.fit(..., new_site_calibration=True)` refits its method without each source site, and the predictions for the left-out
subjects are summarised here. Only figures of sites are stored, none of subjects.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import (
    OFFSET_SD,
    SLOPE_SD,
    auc,
    calibration,
    calibration_error,
    delong_interval,
    logit,
    shrunken_platt,
    sigmoid,
)
from m2lgdg.model.site_level import ADAPT_SUBJECTS, EXTREME, corrected_by_batches
from m2lgdg.splits import Indices, site_folds
from m2lgdg.storage import InputError, one_line, read_bytes, write_text

FORMAT = "m2lgdg-promise-1"
LARGEST = 2**20  # most bytes read from a file
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # quantiles at all coverages would be the scores themselves
LEAST_SITES = 3  # to estimate how sites differ
LEAST_SUBJECTS = 10  # per site: figures of fewer are close to the subjects themselves
STEP = 1000  # quantiles are rounded up to a thousandth: they equal no subject's score, and sets can only grow
DIGITS = 3  # decimals of the figures

# Of what a prediction uses from a file.
RANGES = {"slope": (1e-9, 1e9), "offset": (-1e9, 1e9), "threshold": (0, 1), "slope_sd": (0, 10), "offset_sd": (0, 10)}

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Unseen = Callable[[Cohort, Cohort], Floats]  # (source without some sites, these sites) -> probabilities at these sites


class Performance(NamedTuple):
    """Performance at one left-out site, or over all; NaN means undefined. The last three have one value per coverage."""

    subjects: int
    patients: int
    auc: float
    auc_low: float
    auc_high: float
    sensitivity: float
    specificity: float
    slope: float
    intercept: float
    brier: float
    ece: float
    reached: tuple[float, ...]  # coverage: fraction of subjects whose label is in their set
    decided: tuple[float, ...]  # fraction whose set has one class
    right: tuple[float, ...]  # of these, the fraction whose label it is


class Expected(NamedTuple):
    """Observed performance of conformal sets of one nominal coverage at left-out sites."""

    reached: float
    lowest: float
    median: float
    decided: float
    right: float


@dataclass(frozen=True)
class NewSiteCalibration:
    """Calibration of a model at sites it has not seen, learned by leaving out each source site in turn.

    Probabilities are those of `predict_proba`, which applies the slope and offset. The figures of a site use slope, offset,
    threshold and quantiles of the other sites. `m2lgdg adapt` puts `adapted` in its place, as sites then differ less.
    """

    slope: float  # of the logit
    offset: float  # intercept
    threshold: float
    slope_sd: float  # between sites
    offset_sd: float
    folds: int  # refits; fewer than sites if sites were left out in groups
    quantiles: Floats  # (coverage, class): a class is in a subject's set if the subject is no further from it than this
    whole: Performance
    sites: Mapping[str, Performance]
    adapted: NewSiteCalibration | None = None  # the same, each left-out site with the intercept of `ADAPT_SUBJECTS` of it

    @classmethod
    def fit(
        cls, source: Cohort, unseen: Unseen, folds: int | None = None, progress: Callable[..., None] | None = None
    ) -> NewSiteCalibration:
        """Refit without each source site, or each of `folds` groups of sites, and learn from the predictions there."""
        proba, cuts = np.full(len(source), np.nan), sites_left_out(source, folds)
        for i, (train, test) in enumerate(cuts, start=1):
            proba[test] = unseen(source.select(train), source.select(test))
            if progress:
                progress(i, len(cuts))
        predicted = ~np.isnan(proba)  # a site is not predicted if the other sites have one class only
        known, labels, sites = proba[predicted], source.labels[predicted], source.sites[predicted]
        corrected = known.copy()
        for site in sorted(set(sites.tolist())):  # with the prevalence of the other sites
            here, subjects = sites == site, source.subjects[predicted][sites == site].tolist()
            prevalence = float(np.clip(labels[~here].mean(), EXTREME, 1 - EXTREME))
            corrected[here] = corrected_by_batches(known[here], subjects, prevalence, 0, ADAPT_SUBJECTS)
        adapted = cls.from_scores(corrected, labels, sites, len(cuts))
        return dataclasses.replace(cls.from_scores(known, labels, sites, len(cuts)), adapted=adapted)

    @classmethod
    def from_scores(
        cls, proba: Floats, labels: npt.NDArray[Any], sites: npt.NDArray[np.str_], folds: int
    ) -> NewSiteCalibration:
        """Calibration from probabilities of subjects whose site was left out of training."""
        names = sorted(set(sites.tolist()))
        decision, labels = logit(proba), np.asarray(labels)
        at_site, in_set = np.zeros(len(labels)), np.zeros((len(COVERAGES), len(labels), 2), dtype=bool)
        called = np.zeros(len(labels), dtype=bool)
        for site in names:
            here = sites == site
            others = _Rule.fit(decision[~here], labels[~here])
            at_site[here] = others.proba(decision[here])
            called[here] = at_site[here] >= others.threshold
            in_set[:, here] = _inside(at_site[here], others.quantiles)

        def figures(some: Bools) -> Performance:
            return _figures(labels[some], at_site[some], called[some], in_set[:, some])

        rule = _Rule.fit(decision, labels)
        spread = between_sites(rule.slope * decision + rule.offset, labels, sites)
        by_site = {site: figures(sites == site) for site in names if (sites == site).sum() >= LEAST_SUBJECTS}
        return cls(rule.slope, rule.offset, rule.threshold, *spread, folds, rule.quantiles, figures(labels >= 0), by_site)

    def sets(self, proba: npt.ArrayLike, coverage: float = 0.9) -> npt.NDArray[np.str_]:
        """Conformal set of each subject: 'control', 'patient', 'both' (undecided) or 'none' (unlike either class).

        About `coverage` of left-out patients, and of left-out controls, had their true class in it.
        """
        control, patient = _inside(np.asarray(proba, dtype=np.float64), self.quantiles[[self._row(coverage)]])[0].T
        return np.select([control & patient, control, patient], ["both", "control", "patient"], "none")

    def interval(self, proba: npt.ArrayLike, level: float = 0.9) -> tuple[Floats, Floats]:
        """Bounds of the probability at this score over a fraction `level` of sites like the source sites.

        They describe how calibration differs between sites, not the uncertainty about one subject.
        """
        from scipy.special import stdtrit  # only here, since its import takes a fifth of a second

        if not 0 < level < 1:
            raise InputError(f"level {level:g} is not between 0 and 1.")
        x = logit(np.asarray(proba, dtype=np.float64))
        count = max(len(self.sites), LEAST_SITES)
        spread = np.sqrt(((self.slope_sd * x) ** 2 + self.offset_sd**2) * (1 + 1 / count))
        half = float(stdtrit(count - 1, 0.5 + level / 2)) * spread
        return sigmoid(x - half), sigmoid(x + half)

    def expected(self, coverage: float = 0.9) -> Expected:
        """Observed performance of sets of this coverage; lowest and median are over the sites in `sites`."""
        row, whole = self._row(coverage), self.whole
        at_sites = [site.reached[row] for site in self.sites.values()] or [whole.reached[row]]
        return Expected(whole.reached[row], min(at_sites), float(np.median(at_sites)), whole.decided[row], whole.right[row])

    def _row(self, coverage: float) -> int:
        if coverage not in COVERAGES:
            raise InputError(f"coverage {coverage:g} is not one of {', '.join(f'{one:g}' for one in COVERAGES)}.")
        return COVERAGES.index(coverage)

    def save(self, path: str | Path) -> Path:
        """Write a JSON file; undefined values are null."""
        content = {"format": FORMAT, "levels": COVERAGES} | self._content()
        return write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def _content(self) -> dict[str, Any]:
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "adapted"}
        content |= {"quantiles": self.quantiles.tolist(), "whole": _plain(self.whole)}
        content |= {"sites": {site: _plain(figures) for site, figures in self.sites.items()}}
        return content if self.adapted is None else content | {"adapted": self.adapted._content()}

    @classmethod
    def load(cls, path: str | Path) -> NewSiteCalibration:
        """Read a file; anything but the expected numbers is refused."""
        try:
            content = json.loads(read_bytes(path, LARGEST).decode())
            if content["format"] != FORMAT or tuple(content["levels"]) != COVERAGES:
                raise ValueError(f"the format is not {FORMAT}")
            return cls._read(content, cls._read(content["adapted"]) if "adapted" in content else None)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None

    @classmethod
    def _read(cls, content: Mapping[str, Any], adapted: NewSiteCalibration | None = None) -> NewSiteCalibration:
        numbers = {name: _number(content[name], *ends) for name, ends in RANGES.items()}
        quantiles = np.array([[_number(value, 0, 1) for value in row] for row in content["quantiles"]])
        if quantiles.shape != (len(COVERAGES), 2):
            raise ValueError("quantiles are not two per coverage")
        whole, sites = _read_figures(content["whole"]), {site: _read_figures(one) for site, one in content["sites"].items()}
        folds = int(_number(content["folds"], 2, 1e6))
        return cls(**numbers, folds=folds, quantiles=quantiles, whole=whole, sites=sites, adapted=adapted)


def sites_left_out(source: Cohort, folds: int | None = None) -> list[tuple[Indices, Indices]]:
    """(train, test) indices: each source site is in one test set, with other sites if there are fewer folds than sites."""
    names = source.site_names
    if len(names) < LEAST_SITES:
        raise InputError(f"new-site calibration needs at least {LEAST_SITES} source sites, and there are {len(names)}.")
    if folds is not None and folds < 2:
        raise InputError(f"new-site calibration needs at least 2 calibration folds, not {folds}.")
    cuts = site_folds(source.sites, source.labels, folds or len(names))
    usable = {site for _, test in cuts for site in source.sites[test].tolist()}
    if len(usable) < LEAST_SITES:
        raise InputError(
            f"new-site calibration needs at least {LEAST_SITES} sites without which the source keeps both classes, and there "
            f"are {len(usable)}."
        )
    return cuts


class _Rule(NamedTuple):
    """Calibration and quantiles learned from logits of some subjects."""

    slope: float
    offset: float
    threshold: float
    quantiles: Floats  # (coverage, class)

    @classmethod
    def fit(cls, decision: Floats, labels: npt.NDArray[Any]) -> _Rule:
        slope, offset = shrunken_platt(decision, labels.astype(np.float64))  # shrunken: few subjects change little
        p = sigmoid(slope * decision + offset)
        far = (p[labels == 0], 1 - p[labels == 1])  # non-conformity: how unlike its own class each subject looks
        quantiles = np.array([[conformal_quantile(distances, one) for distances in far] for one in COVERAGES])
        # At the prevalence, sensitivity and specificity weigh the same; an optimum over a few hundred subjects is mostly noise.
        return cls(slope, offset, float(np.clip(labels.mean(), 0.01, 0.99)), quantiles)

    def proba(self, decision: Floats) -> Floats:
        return sigmoid(self.slope * decision + self.offset)


def conformal_quantile(far: Floats, coverage: float) -> float:
    """Distance that a new subject of the class stays within with at least this probability; 1 (every subject) from too few."""
    rank = math.ceil((len(far) + 1) * coverage - 1e-9)
    if rank > len(far):
        return 1.0
    return min(math.ceil(float(np.sort(far)[rank - 1]) * STEP) / STEP, 1.0)


def _inside(proba: Floats, quantiles: Floats) -> Bools:
    """(coverage, subject, class) mask of the classes in each set."""
    far = np.stack([proba, 1 - proba], axis=-1)  # (subject, class)
    return np.asarray(far <= quantiles[:, None, :])


def between_sites(x: Floats, labels: npt.NDArray[Any], sites: npt.NDArray[np.str_]) -> tuple[float, float]:
    """Between-site sds of the slope and offset of the logit x, from a random-effects logistic regression.

    Slopes and offsets of sites are normal around 1 and 0; the sds are posterior root mean squares under half-normal priors.
    """
    slopes, offsets = np.linspace(-1.0, 3.0, 81), np.linspace(-5.0, 5.0, 101)
    wide, far = np.linspace(0.0, 1.5, 31), np.linspace(0.0, 3.0, 31)  # grids of the two sds
    weigh_slope = np.stack([_discrete_normal(slopes - 1, sd) for sd in wide])  # (sd, slope)
    weigh_offset = np.stack([_discrete_normal(offsets, sd) for sd in far])  # (sd, offset)
    total = -0.5 * ((wide[:, None] / SLOPE_SD) ** 2 + (far / OFFSET_SD) ** 2)  # (sd of slopes, sd of offsets), log posterior
    for site in sorted(set(sites.tolist())):  # in order, so that sums repeat bit for bit
        here = sites == site
        eta = slopes[:, None, None] * x[here] + offsets[:, None]  # (slope, offset, subject)
        logs = eta @ labels[here].astype(np.float64) - (np.maximum(eta, 0) + np.log1p(np.exp(-np.abs(eta)))).sum(axis=-1)
        total += np.log(weigh_slope @ np.exp(logs - logs.max()) @ weigh_offset.T) + logs.max()
    weights = np.exp(total - total.max())
    weights /= weights.sum()
    return float(np.sqrt(weights.sum(axis=1) @ wide**2)), float(np.sqrt(weights.sum(axis=0) @ far**2))


def _discrete_normal(values: Floats, sd: float) -> Floats:
    density = np.exp(-0.5 * (values / max(sd, 1e-3)) ** 2)
    return np.asarray(density / density.sum())


def _figures(labels: npt.NDArray[Any], proba: Floats, called: Bools, in_set: Bools) -> Performance:
    single = in_set.sum(axis=2) == 1  # (coverage, subject)
    covered = in_set[:, np.arange(len(labels)), labels]  # (coverage, subject)
    right = [_fraction((hit & alone).sum(), alone.sum()) for hit, alone in zip(covered, single, strict=True)]
    low, high = delong_interval(labels, proba)
    slope, intercept = calibration(labels, proba)
    sensitivity = _fraction(called[labels == 1].sum(), (labels == 1).sum())
    specificity = _fraction((~called[labels == 0]).sum(), (labels == 0).sum())
    brier, ece = ((proba - labels) ** 2).mean(), calibration_error(labels, proba)
    figures = (auc(labels, proba), low, high, sensitivity, specificity, slope, intercept, brier, ece)
    by_coverage = [tuple(map(_rounded, values)) for values in (covered.mean(axis=1), single.mean(axis=1), right)]
    return Performance(len(labels), int(labels.sum()), *map(_rounded, figures), *by_coverage)  # type: ignore[arg-type]


def percent(fraction: float) -> str:
    """Fraction as a percentage, for sentences."""
    return f"{100 * fraction:.0f} %"


def _fraction(some: Any, of: Any) -> float:
    return float(some / of) if of else math.nan


def _rounded(value: Any) -> float:
    return round(float(value), DIGITS)


def _plain(figures: Performance) -> dict[str, Any]:
    """Figures for JSON, which has no NaN."""

    def plain(value: Any) -> Any:
        return list(map(plain, value)) if isinstance(value, tuple) else None if math.isnan(value) else value

    return {name: plain(value) for name, value in figures._asdict().items()}


def _read_figures(content: Mapping[str, Any]) -> Performance:
    """Figures of a site, any finite number: only the card shows them."""
    several: dict[str, Any] = {name: tuple(map(_figure, content[name])) for name in ("reached", "decided", "right")}
    if any(len(values) != len(COVERAGES) for values in several.values()):
        raise ValueError("a figure does not have one number per coverage")
    single = {name: _figure(content[name]) for name in Performance._fields if name not in several}
    return Performance(**several | single | {name: int(single[name]) for name in ("subjects", "patients")})


def _figure(value: Any) -> float:
    return math.nan if value is None else _number(value, -1e9, 1e9)


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number from {least:g} to {most:g}")
    return float(value)
