"""What one site computes: sums over its own subjects, and nothing else.

A `Site` holds the features of its subjects and what follows from earlier totals (`known`). `answer` turns a request into
sums, with the same functions that the pooled fit of `methods/linear.py` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import amplitude_features, fc_features, log_features
from m2lgdg.federated import sums
from m2lgdg.federated.plan import (
    CODES,
    LARGEST_PHENOTYPE,
    MEASURES,
    Arrays,
    Ask,
    Floats,
    Member,
    Plan,
    Request,
    Settings,
)
from m2lgdg.methods.amplitude import _measures, standardised_scans
from m2lgdg.methods.linear import LOG_EUCLIDEAN, VIEWS
from m2lgdg.methods.solvers import combine, times
from m2lgdg.methods.within_sites import site_averages
from m2lgdg.metrics import sigmoid
from m2lgdg.preprocess import CATEGORICAL, _typical, _values
from m2lgdg.storage import InputError

FARTHEST = 4.0  # sd between mean and median, or a mode of ten codes: never more than 3, and missing values are filled by site


def prepared(study: Settings, cohort: Cohort, site: str, key: str = "", signing: str = "") -> tuple[Member, Arrays]:
    """Facts that a site joins with, and the arrays of its subjects that stay at the site; an unsuitable cohort is refused."""
    if site not in study.sites:
        raise InputError(f"{site} is not a site of this study (sites: {', '.join(study.sites)}).")
    if len(cohort.site_names) > 1:
        names = ", ".join(cohort.site_names)
        raise InputError(f"cohort {cohort.name} has the sites {names}; choose the subjects of one with --cohort-site.")
    cohort = cohort.parcellation(cohort.atlas).select(cohort.labels >= 0)
    for column in study.inputs:
        if column not in cohort.phenotypes.columns:
            raise InputError(f"cohort {cohort.name} has no phenotype {column}, which the study uses; add it, empty if unknown.")
    cohort = replace(cohort.with_inputs(study.inputs), tables={})  # not used, and no part of the hash that a site sends
    study.need_subjects(site, len(cohort))
    blocks = study.method.weights_of(cohort.values)
    arrays: Arrays = {name: fc_features(cohort.scans, VIEWS[name]) for name in blocks if name in VIEWS}
    arrays |= {LOG_EUCLIDEAN: log_features(cohort.scans)} if LOG_EUCLIDEAN in blocks else {}
    arrays |= {"phenotypes": _values(cohort, study.inputs), "labels": cohort.labels}
    _check_phenotypes(arrays["phenotypes"], study, cohort)
    missing, usable = np.isnan(arrays["phenotypes"]), np.zeros(len(cohort), dtype=bool)
    if "amplitude" in blocks:
        arrays["amplitude"] = amplitude_features(cohort.scans)
        usable = ~standardised_scans(arrays["amplitude"])
    for what, count in [
        ("scans that were not standardised", usable.sum()),
        *((f"values of {column}", count) for column, count in zip(study.inputs, (~missing).sum(axis=0), strict=True)),
    ]:
        if 0 < 2 * count < study.least_subjects:
            raise InputError(
                f"cohort {cohort.name} has only {count} {what}; sums over so few are close to the subjects themselves, "
                f"so have at least {study.least_subjects / 2:g}, or none."
            )
    columns = np.array(study.inputs, dtype=np.str_)
    incomplete, empty = (tuple(columns[lacking].tolist()) for lacking in (missing.any(axis=0), missing.all(axis=0)))
    counts, amplitudes = (int((cohort.labels == 1).sum()), int((cohort.labels == 0).sum())), bool(usable.any())
    member = Member(site, *counts, cohort.rois, cohort.atlas, cohort.hash, incomplete, empty, amplitudes, key, signing)
    return replace(member, scans=cohort.values), arrays


def _check_phenotypes(values: Floats, study: Settings, cohort: Cohort) -> None:
    for column, numbers in zip(study.inputs, values.T, strict=True):
        present = ~np.isnan(numbers)
        wrong = present & ~(np.abs(numbers) <= LARGEST_PHENOTYPE)
        limit = f"beyond {LARGEST_PHENOTYPE:g}; use a larger unit"
        if column in CATEGORICAL:
            wrong, limit = present & ~np.isin(numbers, np.arange(CODES)), f"not a code from 0 to {CODES - 1}"
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise InputError(f"cohort {cohort.name}, subject {cohort.subjects[i]}: {column} is {numbers[i]:g}, {limit}.")


class Site:
    """A site in a study: its arrays, and the values it has received so far."""

    def __init__(self, plan: Plan, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.plan, self.name, self.arrays = plan, name, arrays
        self.known: Arrays = {}
        self.rows: dict[str, tuple[npt.NDArray[Any], Floats]] = {}  # standardised features and shift, by block
        self.labels = np.asarray(arrays["labels"])
        self.signs = np.where(self.labels == 1, 1.0, -1.0)

    def answer(self, request: Request) -> dict[str, sums.Words]:
        """Fixed-point sums for each ask of a request, by key; not yet masked."""
        self.known |= request.values
        return {
            ask.key: sums.to_words(KINDS[ask.kind](self, ask), self.plan.form(ask), f"site {self.name}: {ask.key}")
            for ask in request.asks
        }

    @cached_property
    def weights(self) -> Floats:
        """(subject,) weights that balance the classes; 0 at a site with one class, unless all sites are such."""
        counts = np.bincount(self.labels, minlength=2)
        if counts.all():
            return np.asarray(len(self.labels) / (2 * counts[self.labels]))
        return np.full(len(self.labels), 0.0 if self.plan.weighted else 1.0)

    @cached_property
    def averages(self) -> Floats:
        """(1, subject) weights of the site's mean."""
        return site_averages(np.zeros(len(self.labels), dtype=np.intp), self.weights)  # all subjects are of one site

    def filled(self, column: str, *, by_site: bool = False) -> Floats:
        """(subject,) phenotype, missing values replaced by the median or mode of all sites, or by the median of this site.

        Mean and sd are those of values imputed by site, as in `PhenotypeScaler.fit`.
        """
        values = np.array(self.arrays["phenotypes"][:, self.plan.study.inputs.index(column)])
        missing = np.isnan(values)
        if missing.any():
            typical = _typical(values, column) if by_site and column not in CATEGORICAL else np.nan
            values[missing] = float(self.known[f"fill.{column}"]) if np.isnan(typical) else typical
        return values

    def z_scores(self) -> Floats:
        """(subject, input) imputed phenotypes in units of the sd over all sites; 0 for a constant one."""
        inputs = self.plan.study.inputs
        result = np.zeros((len(self.labels), len(inputs)))
        for j, column in enumerate(inputs):
            mean, scale = self.known[f"moments.{column}"]
            if scale > 0:
                if abs(float(self.known.get(f"fill.{column}", mean)) - mean) > FARTHEST * scale:
                    raise InputError(
                        f"the value for missing {column} is far from its mean, so sums would show the subjects without it; a "
                        "site sent wrong sums, and nothing is answered."
                    )
                result[:, j] = (self.filled(column) - mean) / scale
        return result

    def features(self, block: str) -> npt.NDArray[Any]:
        """(subject, feature) features of a block; amplitudes of standardised scans are filled in."""
        if block == "phenotypes":
            return self.z_scores()
        features = self.arrays[block]
        if block != "amplitude":
            return features
        standardised = standardised_scans(features)
        if not standardised.any():
            return features
        total = self.known["usable.amplitude"]
        mean = features[~standardised].mean(axis=0) if not standardised.all() else total[:-1] / max(total[-1], 1.0)
        return np.where(standardised[:, None], mean, features)

    def standardised(self, block: str) -> tuple[npt.NDArray[Any], Floats]:
        """(subject, feature) features centred by site and scaled, and the shift of an unseen site."""
        if block not in self.rows:
            features, (centre, scale) = self.features(block), self.known[f"standard.{block}"]
            (mean,) = combine(self.averages, features)
            trained = np.empty_like(features)
            np.divide(features - mean, scale, out=trained, casting="same_kind")
            self.rows[block] = trained, (mean - centre) / scale
        return self.rows[block]

    @cached_property
    def decisions(self) -> Floats:
        """(subject, block) decisions of the fits without this site, at the centre of the other sites."""
        columns = []
        for block in self.plan.blocks:
            solution = self.known[f"solution.{block}"][self.plan.fold_of[self.name]]  # fold -1: the last fit, on all sites
            trained, shift = self.standardised(block)
            columns.append(times(trained, solution[:-1, None])[:, 0] + shift @ solution[:-1] + solution[-1])
        return np.stack(columns, axis=1)


def _codes(site: Site, ask: Ask) -> Floats:
    values = site.arrays["phenotypes"][:, site.plan.study.inputs.index(ask.name)]
    return np.array([(values == code).sum() for code in range(CODES)], dtype=np.float64)


def _search(site: Site, ask: Ask) -> Floats:
    """Number of values below each cut, and of all values."""
    keys = np.sort(sums.ordered(_searched(site, ask.name)))
    cuts = ask.arguments["cuts"].view(np.uint64).ravel()
    return np.append(np.searchsorted(keys, cuts, side="left"), len(keys)).astype(np.float64)


def _searched(site: Site, name: str) -> Floats:
    if name in site.plan.study.inputs:
        values = site.arrays["phenotypes"][:, site.plan.study.inputs.index(name)]
        return np.asarray(values[~np.isnan(values)])
    features, total = site.arrays["amplitude"], site.known["usable.amplitude"]
    usable = features[~standardised_scans(features)]
    others = total[-1] - len(usable)
    if not len(usable) or others <= 0:
        return np.empty(0)
    profile = (total[:-1] - usable.sum(axis=0)) / others  # of the other sites
    return np.asarray(_measures(usable, profile)[:, MEASURES.index(name.removeprefix("amplitude "))])


def _moments(site: Site, ask: Ask) -> Floats:
    values = site.filled(ask.name, by_site=True)
    return np.array([values.sum(), (values**2).sum()])


def _usable(site: Site, _: Ask) -> Floats:
    features = site.arrays["amplitude"]
    usable = features[~standardised_scans(features)]
    return np.append(usable.sum(axis=0), float(len(usable)))


def _spread(site: Site, ask: Ask) -> Floats:
    features = site.features(ask.name)
    centred = features - combine(site.averages, features)
    plain, by_weight = combine(np.stack([np.ones(len(features)), site.weights]), features)
    return np.stack([plain, by_weight, np.einsum("i,ij,ij->j", site.weights, centred, centred)])


def _association(site: Site, ask: Ask) -> Floats:
    trained = site.standardised(ask.name)[0].astype(np.float64)
    return np.stack([(trained**2).sum(axis=0), (site.weights * site.signs) @ trained])


def _product(site: Site, ask: Ask) -> Floats:
    directions = ask.arguments["directions"].astype(np.float64)
    active = ask.arguments["fits"] != site.plan.fold_of[site.name]  # fits that this site trains
    result = np.zeros(directions.shape)
    if active.any():
        trained = site.standardised(ask.name)[0]
        result[active] = combine((site.weights[:, None] * times(trained, directions[active].T)).T, trained)
    return result


def _held(site: Site, ask: Ask) -> Floats:
    """Differences between the classes by the weight of the site, by its square, and the squares of the first."""
    weight, trained = site.plan.site_weights.get(site.name, 0.0), site.standardised(ask.name)[0]
    if not weight:  # one class
        return np.zeros((3, trained.shape[1]))
    difference = trained[site.labels == 1].mean(axis=0) - trained[site.labels == 0].mean(axis=0)
    held = difference * ask.arguments["slopes"][site.plan.fold_of[site.name]]
    return np.stack([weight * held, weight**2 * held, (weight * held) ** 2])


def _decisions(site: Site, _: Ask) -> Floats:
    """Sums and products of decisions: of all sites, of sites that calibrate, and within these sites.

    Last, the difference between the classes by the weight of the site, and the scatter within classes; 0 with one class.
    """
    values, weight = site.decisions, site.plan.site_weights.get(site.name, 0.0)
    used = values if site.weights.any() else values[:0]
    centred = used - used.sum(axis=0) / max(len(used), 1)
    parts = [values.sum(axis=0)[None], values.T @ values, used.sum(axis=0)[None], used.T @ used, centred.T @ centred]
    by_class = np.zeros((1 + values.shape[1], values.shape[1]))
    if weight:
        means = np.stack([values[site.labels == label].mean(axis=0) for label in (0, 1)])  # (class, block)
        centred = values - means[site.labels]
        by_class = np.concatenate([weight * (means[1:] - means[:1]), centred.T @ centred])
    return np.concatenate([*parts, by_class])


def _calibration(site: Site, ask: Ask) -> Floats:
    """Slopes of the log likelihood of a logistic curve, and its curvatures; 0 at a site with one class."""
    if not site.weights.any():
        return np.zeros(5)
    mean, spread = ask.arguments["mean_sd"]
    slope, offset = ask.arguments["point"]
    values = site.decisions
    x = ((values - values.mean(axis=0) if ask.name == "within" else values) @ ask.arguments["weights"] - mean) / spread
    p = sigmoid(slope * x + offset)
    residual, curvature = (site.labels == 1) - p, p * (1 - p)
    return np.array([residual @ x, residual.sum(), curvature @ x**2, curvature @ x, curvature.sum()])


KINDS: dict[str, Callable[[Site, Ask], Floats]] = {
    "codes": _codes,
    "search": _search,
    "moments": _moments,
    "usable": _usable,
    "spread": _spread,
    "association": _association,
    "product": _product,
    "held": _held,
    "decisions": _decisions,
    "calibration": _calibration,
}
