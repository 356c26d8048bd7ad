"""What leave-one-site-out inside source promises of a model at a site it has never seen, as numbers of sites, not of subjects.

Stands before the methods: `Method.fit(..., promise=True)` refits itself without each source site, and keeps what these scores
of unseen subjects say: a temperature, a threshold, prediction sets, and how much sites differ.
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
from scipy.special import stdtrit

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
from m2lgdg.splits import Indices, site_folds
from m2lgdg.storage import InputError, file_hash, one_line, write_text

FORMAT = "m2lgdg-promise-1"
LARGEST = 2**20  # bytes that are read of a promise
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # coverages that are kept; all quantiles together would be the scores themselves
LEAST_SITES = 3  # to say anything of how sites differ
LEAST_SUBJECTS = 10  # of a site, to tell its figures: those of fewer are close to the subjects themselves
STEP = 1000  # quantiles are rounded up to a thousandth: no subject's own score, and sets only grow by it
DIGITS = 3  # of the figures

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Unseen = Callable[[Cohort, Cohort], Floats]  # (source without some sites, these sites) -> probabilities of the latter


class Performance(NamedTuple):
    """What was found at one left-out site, or at all; NaN is not defined. The last three have a value for each of LEVELS."""

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
    reached: tuple[float, ...]  # share of subjects whose label is in their set
    decided: tuple[float, ...]  # share whose set has one class
    right: tuple[float, ...]  # of these, the share whose label it is


class Expected(NamedTuple):
    """What sets of one coverage did at left-out sites."""

    reached: float
    lowest: float
    median: float
    decided: float
    right: float


@dataclass(frozen=True)
class NewSiteCalibration:
    """What a model's scores mean at sites it has not seen, learned from source sites left out whole.

    Probabilities here are those of `predict_proba`, which has the slope and offset applied already. Figures of a site are had
    with slope, offset, threshold and quantiles from the other sites, so that they are not better than a new site's.
    """

    slope: float  # of the logit: the temperature
    offset: float
    threshold: float
    slope_sd: float  # between sites
    offset_sd: float
    folds: int  # refits; fewer than sites where these were left out in groups
    quantiles: Floats  # (level, class): a class is in the set of who is no further from it than this
    whole: Performance
    sites: Mapping[str, Performance]

    @classmethod
    def fit(
        cls, source: Cohort, unseen: Unseen, folds: int | None = None, progress: Callable[..., None] | None = None
    ) -> NewSiteCalibration:
        """Refit without each source site, or without each of `folds` groups of sites, and learn from what is said of them."""
        proba, cuts = np.full(len(source), np.nan), sites_left_out(source, folds)
        for i, (train, test) in enumerate(cuts, start=1):
            proba[test] = unseen(source.select(train), source.select(test))
            if progress:
                progress(i, len(cuts))
        there = ~np.isnan(proba)  # without some sites the others may have one class only
        return cls.from_scores(proba[there], source.labels[there], source.sites[there], len(cuts))

    @classmethod
    def from_scores(
        cls, proba: Floats, labels: npt.NDArray[Any], sites: npt.NDArray[np.str_], folds: int
    ) -> NewSiteCalibration:
        """From probabilities of subjects whose site was not trained on."""
        names = sorted(set(sites.tolist()))
        decision, labels = logit(proba), np.asarray(labels)
        at_site, found = np.zeros(len(labels)), np.zeros((len(LEVELS), len(labels), 2), dtype=bool)
        called = np.zeros(len(labels), dtype=bool)
        for site in names:
            here = sites == site
            others = _Rule.fit(decision[~here], labels[~here])
            at_site[here] = others.proba(decision[here])
            called[here] = at_site[here] >= others.threshold
            found[:, here] = _inside(at_site[here], others.quantiles)

        def figures(part: Bools) -> Performance:
            return _figures(labels[part], at_site[part], called[part], found[:, part])

        rule = _Rule.fit(decision, labels)
        spread = between_sites(rule.slope * decision + rule.offset, labels, sites)
        parts = {site: sites == site for site in names}
        kept = {site: figures(part) for site, part in parts.items() if part.sum() >= LEAST_SUBJECTS}
        return cls(rule.slope, rule.offset, rule.threshold, *spread, folds, rule.quantiles, figures(labels >= 0), kept)

    def sets(self, proba: npt.ArrayLike, coverage: float = 0.9) -> npt.NDArray[np.str_]:
        """For each subject 'control', 'patient', 'both' (unsure) or 'none' (unlike either).

        Of left-out patients and of left-out controls, about `coverage` had their true class in it; `sites` tells where.
        """
        control, patient = _inside(np.asarray(proba, dtype=np.float64), self.quantiles[[self._level(coverage)]])[0].T
        return np.select([control & patient, control, patient], ["both", "control", "patient"], "none")

    def interval(self, proba: npt.ArrayLike, level: float = 0.9) -> tuple[Floats, Floats]:
        """Low and high: the probability of a patient for subjects of this score, at so many of the sites like source's.

        It is about how sites differ in calibration, not about one subject, who is a patient or is not.
        """
        if not 0 < level < 1:
            raise InputError(f"level {level:g} is not a number between 0 and 1.")
        x = logit(np.asarray(proba, dtype=np.float64))
        count = max(len(self.sites), LEAST_SITES)
        spread = np.sqrt(((self.slope_sd * x) ** 2 + self.offset_sd**2) * (1 + 1 / count))
        half = float(stdtrit(count - 1, 0.5 + level / 2)) * spread
        return sigmoid(x - half), sigmoid(x + half)

    def expected(self, coverage: float = 0.9) -> Expected:
        """What sets of this coverage did at left-out sites; lowest and median are over sites whose figures are kept."""
        level = self._level(coverage)
        at_sites = [one.reached[level] for one in self.sites.values()] or [self.whole.reached[level]]
        low, middle = min(at_sites), float(np.median(at_sites))
        return Expected(self.whole.reached[level], low, middle, self.whole.decided[level], self.whole.right[level])

    def _level(self, coverage: float) -> int:
        if coverage not in LEVELS:
            raise InputError(f"coverage {coverage:g} is not one of {', '.join(f'{one:g}' for one in LEVELS)}.")
        return LEVELS.index(coverage)

    def save(self, path: str | Path) -> Path:
        """As a JSON file; what is not defined is null."""
        said = {"format": FORMAT, "levels": LEVELS} | {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        said |= {"quantiles": self.quantiles.tolist(), "whole": _plain(self.whole)}
        said |= {"sites": {site: _plain(one) for site, one in self.sites.items()}}
        return write_text(path, json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> NewSiteCalibration:
        """From a file, which is refused where it holds anything but the numbers that belong there."""
        file_hash(path, LARGEST)
        try:
            said = dict(json.loads(Path(path).read_text(encoding="utf-8")))
            if said.pop("format") != FORMAT or tuple(said.pop("levels")) != LEVELS:
                raise ValueError(f"its format is not {FORMAT}")
            least = {"slope": 1e-9, "offset": -1e9, "threshold": 0.0, "slope_sd": 0.0, "offset_sd": 0.0, "folds": 2}
            most = {"slope": 1e9, "offset": 1e9, "threshold": 1.0, "slope_sd": 10.0, "offset_sd": 10.0, "folds": 1e6}
            values = {name: _number(said.pop(name), least[name], most[name]) for name in least}
            quantiles = [[_number(one, 0, 1) for one in row] for row in said.pop("quantiles")]
            if [len(row) for row in quantiles] != [2] * len(LEVELS):
                raise ValueError("it does not have two quantiles a level")
            whole = _read_figures(said.pop("whole"))
            sites = {str(site): _read_figures(one) for site, one in dict(said.pop("sites")).items()}
            if said:
                raise ValueError(f"{next(iter(said))} does not belong there")
            folds = int(values.pop("folds"))
            return cls(**values, folds=folds, quantiles=np.array(quantiles), whole=whole, sites=sites)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None


def sites_left_out(source: Cohort, folds: int | None = None) -> list[tuple[Indices, Indices]]:
    """(train, test) positions, each source site in one test, with others where there are fewer folds than sites."""
    names = source.site_names
    if len(names) < LEAST_SITES:
        raise InputError(f"a promise needs {LEAST_SITES} source sites at least; there are {len(names)}.")
    if folds is not None and folds < 2:
        raise InputError(f"a promise from {folds} groups of sites: two at least are needed.")
    cuts = site_folds(source.sites, source.labels, folds or len(names))
    left = {site for _, test in cuts for site in source.sites[test].tolist()}
    if len(left) < LEAST_SITES:
        raise InputError(f"a promise needs {LEAST_SITES} sites without which source keeps both classes; it has {len(left)}.")
    return cuts


class _Rule(NamedTuple):
    """What is learned from some subjects' decisions on the logit scale."""

    slope: float
    offset: float
    threshold: float
    quantiles: Floats  # (level, class)

    @classmethod
    def fit(cls, decision: Floats, labels: npt.NDArray[Any]) -> _Rule:
        slope, offset = shrunken_platt(decision, labels.astype(np.float64))  # few subjects change little
        p = sigmoid(slope * decision + offset)
        far = (p[labels == 0], 1 - p[labels == 1])  # how unlike its own class each subject looks
        quantiles = np.array([[conformal_quantile(one, level) for one in far] for level in LEVELS])
        # At the share of patients, sensitivity and specificity weigh the same; an optimum over a few hundred is mostly chance.
        return cls(slope, offset, float(np.clip(labels.mean(), 0.01, 0.99)), quantiles)

    def proba(self, decision: Floats) -> Floats:
        return sigmoid(self.slope * decision + self.offset)


def conformal_quantile(far: Floats, coverage: float) -> float:
    """The distance that another of the same kind stays within with this probability or more; 1, so anyone, of too few."""
    rank = math.ceil((len(far) + 1) * coverage - 1e-9)
    if rank > len(far):
        return 1.0
    return min(math.ceil(float(np.sort(far)[rank - 1]) * STEP) / STEP, 1.0)


def _inside(proba: Floats, quantiles: Floats) -> Bools:
    """(level, subject, class) whether a class is in the set."""
    far = np.stack([proba, 1 - proba], axis=-1)  # (subject, class)
    return np.asarray(far <= quantiles[:, None, :])


def between_sites(x: Floats, labels: npt.NDArray[Any], sites: npt.NDArray[np.str_]) -> tuple[float, float]:
    """Sds over sites of the slope and of the offset that the logit x needs there: a random-effects logistic regression.

    Each site has its own slope and offset, normal around 1 and 0, so that small sites say little. The sds are the roots of the
    mean squares under half-normal priors, with which few sites leave them near what is thought beforehand, not at zero.
    """
    slopes, offsets = np.linspace(-1.0, 3.0, 81), np.linspace(-5.0, 5.0, 101)
    wide, far = np.linspace(0.0, 1.5, 31), np.linspace(0.0, 3.0, 31)  # what the sds may be
    weigh_slope = np.stack([_discrete_normal(slopes - 1, one) for one in wide])  # (sd, slope)
    weigh_offset = np.stack([_discrete_normal(offsets, one) for one in far])  # (sd, offset)
    total = -0.5 * ((wide[:, None] / SLOPE_SD) ** 2 + (far / OFFSET_SD) ** 2)  # (sd of slopes, sd of offsets), logarithm
    for site in set(sites.tolist()):
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


def _figures(labels: npt.NDArray[Any], proba: Floats, called: Bools, found: Bools) -> Performance:
    single = found.sum(axis=2) == 1  # (level, subject)
    own = found[:, np.arange(len(labels)), labels]
    right = [_share((hit & one).sum(), one.sum()) for hit, one in zip(own, single, strict=True)]
    low, high = delong_interval(labels, proba)
    slope, intercept = calibration(labels, proba)
    return Performance(
        subjects=len(labels),
        patients=int(labels.sum()),
        auc=_rounded(auc(labels, proba)),
        auc_low=_rounded(low),
        auc_high=_rounded(high),
        sensitivity=_rounded(_share(called[labels == 1].sum(), (labels == 1).sum())),
        specificity=_rounded(_share((~called[labels == 0]).sum(), (labels == 0).sum())),
        slope=_rounded(slope),
        intercept=_rounded(intercept),
        brier=_rounded(((proba - labels) ** 2).mean()),
        ece=_rounded(calibration_error(labels, proba)),
        reached=tuple(map(_rounded, own.mean(axis=1))),
        decided=tuple(map(_rounded, single.mean(axis=1))),
        right=tuple(map(_rounded, right)),
    )


def percent(share: float) -> str:
    """A share as it is told in sentences."""
    return f"{100 * share:.0f} %"


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else math.nan


def _rounded(value: Any) -> float:
    return round(float(value), DIGITS)


def _plain(figures: Performance) -> dict[str, Any]:
    """For JSON, which has no NaN."""

    def plain(value: Any) -> Any:
        return list(map(plain, value)) if isinstance(value, tuple) else None if math.isnan(value) else value

    return {name: plain(value) for name, value in figures._asdict().items()}


def _read_figures(said: Any) -> Performance:
    least = {"slope": -1e9, "intercept": -1e9}
    most = {"subjects": 1e9, "patients": 1e9, "slope": 1e9, "intercept": 1e9}
    if set(said) != set(Performance._fields):
        raise ValueError(f"figures of a site are {', '.join(Performance._fields)}")
    values: dict[str, Any] = {}
    for name, value in said.items():
        ends = least.get(name, 0.0), most.get(name, 1.0)
        if name in ("reached", "decided", "right"):
            values[name] = tuple(_number(one, *ends, or_none=name == "right") for one in value)
            if len(values[name]) != len(LEVELS):
                raise ValueError(f"{name} does not have a number for each level")
        else:
            values[name] = _number(value, *ends, or_none=name not in most or name in least)
    return Performance(**values | {name: int(values[name]) for name in ("subjects", "patients")})


def _number(value: Any, least: float, most: float, or_none: bool = False) -> float:
    if value is None and or_none:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number from {least:g} to {most:g}")
    return float(value)
