"""ComBat before a linear model: a negative control, because a site that was not in training cannot be harmonised.

Empirical-Bayes location and scale of each source site, by the published equations. The model is trained on harmonised source
subjects as the peers of `linear.py` are; target subjects keep their values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.method import method
from m2lgdg.methods.blocks import Block, standardised_block
from m2lgdg.methods.linear import Linear
from m2lgdg.methods.solvers import Features
from m2lgdg.preprocess import PhenotypeScaler

Floats = npt.NDArray[np.float64]
SMALLEST = 1e-12  # variance below which a feature counts as constant
CHANGE, STEPS = 1e-4, 1000  # relative change at which the iteration ends, and most steps


class SiteEffect(NamedTuple):
    """Shift and variance ratio of the features of one site, (feature,) each, in units of the pooled sd."""

    location: Floats
    scale: Floats


def combat(values: Features, sites: npt.NDArray[np.str_], covariates: Floats) -> Floats:
    """(subject, feature) values without location and scale of their sites; effects of (subject, covariate) covariates stay.

    y = alpha + covariates beta + gamma_site + delta_site error: alpha is the mean over subjects, beta and gamma are least
    squares, and gamma and delta are shrunk towards the mean over features (Johnson 2007; Fortin 2018 for connectivity).
    """
    names, site = np.unique(sites, return_inverse=True)
    member = np.eye(len(names))[site]  # (subject, site)
    design = np.concatenate([member, covariates - covariates.mean(axis=0)], axis=1)
    coefficients = np.linalg.lstsq(design, values.astype(np.float64), rcond=None)[0]
    expected = (member.mean(axis=0) @ coefficients[: len(names)]) + design[:, len(names) :] @ coefficients[len(names) :]
    variance = ((values - design @ coefficients) ** 2).mean(axis=0)
    sd = np.sqrt(np.where(variance > SMALLEST, variance, 0.0))  # 0: a constant feature stays as it is
    standardised = (values - expected) / np.where(sd > 0, sd, 1.0)
    for number in range(len(names)):
        here = site == number
        effect = shrunk(standardised[here])
        spread = np.sqrt(np.where(effect.scale > 0, effect.scale, 1.0))  # 0 where all scans of the site are the same
        standardised[here] = (standardised[here] - effect.location) / spread
    return standardised * sd + expected


def shrunk(values: Floats) -> SiteEffect:
    """Effects of one site from its (subject, feature) standardised values, with priors estimated over its features.

    A site with one subject has no variance, so its scale stays 1.
    """
    n, location = len(values), values.mean(axis=0)
    scale = values.var(axis=0, ddof=1) if n > 1 else np.ones(values.shape[1])
    centre, width = location.mean(), _variance(location)  # normal prior of the location
    mean, spread = scale.mean(), max(_variance(scale), SMALLEST)
    shape, rate = (2 * spread + mean**2) / spread, (mean * spread + mean**3) / spread  # inverse gamma prior of the scale
    new, square = location, scale
    for _ in range(STEPS):
        before, earlier = new, square
        total = n * width + square
        new = np.divide(n * width * location + square * centre, total, out=location.copy(), where=total > 0)
        if n > 1:
            square = (((values - new) ** 2).sum(axis=0) / 2 + rate) / (n / 2 + shape - 1)
        pairs = (new, before), (square, earlier)
        if all((np.abs(now - then) <= CHANGE * np.abs(then)).all() for now, then in pairs):
            break
    return SiteEffect(new, square)


def _variance(values: Floats) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


@method("combat-logistic")
class CombatLogistic(Linear):
    """Negative control: logistic regression on Fisher-z FC after ComBat, which cannot harmonise a site it has not seen.

    ComBat is fitted on source subjects with diagnosis and phenotypes as covariates, as is common. Its site effects are known
    for source sites only. A target subject has no shift (0) and no scale (1) to remove: it is mapped by the pooled mean and
    variance alone, and the formula returns its values as they are. The penalty is chosen and probabilities are Platt-scaled on
    held-out source sites, whose subjects were harmonised together with the others; this is optimistic, and part of what is
    shown.
    """

    reference = "Johnson et al. 2007, Biostatistics 8: 118-127; Fortin et al. 2018, NeuroImage 167: 104-120"
    blocks = {"fc": 1.0}

    def _source_features(self, name: str, source: Cohort) -> Features:
        values = super()._source_features(name, source)
        if name != "fc" or len(source.site_names) < 2:
            return values
        phenotypes = PhenotypeScaler.fit(source).transform(source)
        covariates = np.concatenate([source.labels[:, None].astype(np.float64), phenotypes], axis=1)
        return combat(values, source.sites, covariates).astype(values.dtype)

    def _fit_block(self, name: str, features: Features, source: Cohort, folds: list[Any]) -> Block:
        """As for all linear peers, but never shared with a method whose features were not harmonised."""
        if name != "fc":
            return super()._fit_block(name, features, source, folds)
        rows = standardised_block(features, source, self._subject_weights(source), self.within_sites)
        return self._solve(name, rows, source, folds)
