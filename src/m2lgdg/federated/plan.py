"""What all sites of a federated study agree on: settings, members, folds of sites, and the sums that may be asked for.

The coordinator and every site derive the same `Plan` from the settings and the members' counts. `site` answers asks of this
plan, `coordinator` makes them, and `SUMS` lists all that can be asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.methods.linear import ConnectomeAdaptive
from m2lgdg.preprocess import CATEGORICAL
from m2lgdg.registry import create
from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
METHOD = "connectome-adaptive"
MOST_ROUNDS = 120  # a site answers no more, so that a coordinator cannot ask until it knows every subject
LEAST_SUBJECTS, LEAST_SITES = 10, 3
CODES = 10  # categorical columns hold integers below this
LARGEST_PHENOTYPE = 2.0**16  # absolute value of a phenotype
LARGEST_FC, LARGEST_AMPLITUDE = 4.0, 128.0  # Fisher z is clipped at 3.8; logarithms of float32 are below 89
LARGEST_STANDARDISED = 2.0**8  # a feature, in units of its spread
LARGEST_DECISION, LARGEST_LOSS = 2.0**12, 2.0**20
CUTS = 31  # thresholds per round of a search for an order statistic, which is one of 2^64 numbers: 13 rounds
SHORT, LONG = 5, 8  # bytes of a number in a message
MEASURES = ("slope", "spread", "distance")  # of `AmplitudeRange`
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Settings:
    """Settings of a federated study, chosen by the coordinator and read by every site before it joins."""

    id: str  # random; every message names it
    sites: tuple[str, ...]  # invited
    inputs: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the method
    masks: bool = True
    least_subjects: int = LEAST_SUBJECTS
    least_sites: int = LEAST_SITES
    leave_out: str = ""  # site that does not train, so that the model can be evaluated there

    def __post_init__(self) -> None:
        for site in self.sites:
            if not NAME.fullmatch(site):
                raise InputError(f"site {site[:80]!r}: use letters, digits, dots, dashes and underscores only.")
        if len(set(self.sites)) < len(self.sites):
            raise InputError("a site is listed twice.")
        if self.least_sites < 2 or self.least_subjects < 2:
            raise InputError("a sum over one subject or one site hides nothing: the least numbers must be at least 2.")
        count = len(self.training_sites)
        if count < self.least_sites:
            raise InputError(f"{count} sites train in the study; it needs at least {self.least_sites} (--least-sites).")
        if self.leave_out and self.leave_out not in self.sites:
            left = self.leave_out[:80]
            raise InputError(f"site {left} is left out, but is not one of the sites; add --site {left}.")
        if len(self.method.penalties) > 1:
            raise InputError("a federated fit has one penalty; it cannot choose among several by AUC.")

    @property
    def training_sites(self) -> tuple[str, ...]:
        """Sites whose subjects the model is trained on, if none drops out."""
        return tuple(site for site in self.sites if site != self.leave_out)

    @cached_property
    def method(self) -> ConnectomeAdaptive:
        """The method, not fitted; unusable fields are refused."""
        created = create(METHOD, **dict(self.fields) | {"phenotypes": bool(self.inputs)})
        assert isinstance(created, ConnectomeAdaptive)
        return created

    def need_subjects(self, site: str, count: int) -> None:
        """Refuse a site with few subjects."""
        if count < self.least_subjects:
            raise InputError(
                f"site {site} has {count} labelled subjects; the study needs at least {self.least_subjects} at every site, "
                "because sums over fewer are close to the subjects themselves."
            )


@dataclass(frozen=True)
class Member:
    """A site that joined: its counts, its ROIs, its public key."""

    site: str
    patients: int
    controls: int
    rois: tuple[str, ...]
    atlas: str
    cohort: str  # name of the cohort
    hash: str  # SHA-256 of the site's cohort
    incomplete: tuple[str, ...] = ()  # inputs with missing values at the site
    empty: tuple[str, ...] = ()  # inputs without any value at the site
    key: str = ""  # X25519 public key, hexadecimal

    @property
    def subjects(self) -> int:
        """Number of subjects."""
        return self.patients + self.controls

    @property
    def balanced(self) -> bool:
        """Whether the site has patients and controls."""
        return self.patients > 0 and self.controls > 0


@dataclass(frozen=True)
class Ask:
    """One sum that every site is asked for: a kind, what it is about (a block, a column), and arrays that it needs."""

    kind: str
    name: str
    arguments: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the sum in a message."""
        return f"{self.kind}.{self.name}"


@dataclass(frozen=True)
class Request:
    """What the coordinator sends to all sites in one round: totals that they need (`values`), and asks."""

    round: int
    values: Mapping[str, npt.NDArray[Any]]
    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Form:
    """Form of a sum in a message: shape, bound of the total (one per row, or one), bytes, and over which sites it is masked."""

    shape: tuple[int, ...]
    bound: Floats
    bytes: int = LONG
    by_fold: bool = False


@dataclass(frozen=True)
class Plan:
    """A study with its members; `attempt` counts how often it began, each time without one site more.

    The model is fitted once without each fold of sites, for its calibration, and last on all sites.
    """

    study: Settings
    members: tuple[Member, ...]
    attempt: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.site)))
        if len(self.members) < self.study.least_sites:
            count, least = len(self.members), self.study.least_sites
            raise InputError(f"{count} sites take part; the study needs at least {least}, so it ends here.")
        for member in self.members:
            self._check(member, self.members[0])
        if not sum(one.patients for one in self.members) or not sum(one.controls for one in self.members):
            raise InputError("the sites together have only one class; patients and controls are needed.")

    def _check(self, member: Member, first: Member) -> None:
        if member.site not in self.study.sites:
            raise InputError(f"site {member.site} is not one of the sites of this study.")
        if member.site == self.study.leave_out:
            raise InputError(f"site {member.site} is left out of this study for evaluation, so it sends no sums.")
        self.study.need_subjects(member.site, member.subjects)
        if member.rois != first.rois:
            differing = [a for a, b in zip(member.rois, first.rois, strict=False) if a != b]
            detail = f"; the first that differs is {differing[0]}" if differing else ""
            raise InputError(
                f"site {member.site} has {len(member.rois)} ROIs and site {first.site} {len(first.rois)}, or others{detail}: "
                "all sites need the same atlas."
            )

    @property
    def method(self) -> ConnectomeAdaptive:
        """The method, not fitted."""
        return self.study.method

    @property
    def rois(self) -> int:
        """Number of ROIs."""
        return len(self.members[0].rois)

    @cached_property
    def subjects(self) -> int:
        """Number of subjects at all sites."""
        return sum(member.subjects for member in self.members)

    @cached_property
    def blocks(self) -> dict[str, float]:
        """Weight of each block in the sum of decisions."""
        return self.method._weights()

    def features(self, block: str) -> int:
        """Number of features of a block."""
        sizes = {"amplitude": self.rois, "phenotypes": len(self.study.inputs)}
        return sizes.get(block, self.rois * (self.rois - 1) // 2)

    @property
    def confounds(self) -> tuple[str, ...]:
        """Phenotypes that are regressed out of the imaging blocks."""
        return tuple(name for name in self.study.inputs if name in self.method.confounds)

    def confounds_of(self, block: str) -> tuple[str, ...]:
        """Phenotypes that are regressed out of a block."""
        return () if block == "phenotypes" else self.confounds

    @cached_property
    def fold_of(self) -> dict[str, int]:
        """Fold in which each site is held out; -1 for a site in none, as the others have one class."""
        sites = np.concatenate([np.full(member.subjects, member.site) for member in self.members])
        labels = np.concatenate([np.repeat([1, 0], [one.patients, one.controls]) for one in self.members]).astype(np.int8)
        result = {member.site: -1 for member in self.members}
        for i, (_, test) in enumerate(site_folds(sites, labels, self.method.site_folds)):
            result |= dict.fromkeys(np.unique(sites[test]).tolist(), i)
        return result

    @property
    def fits(self) -> int:
        """Number of fits: one without each fold, and one on all sites (the last)."""
        return max(self.fold_of.values()) + 2

    def training(self, fit: int) -> list[Member]:
        """Training sites of a fit."""
        return [member for member in self.members if self.fold_of[member.site] != fit]

    @cached_property
    def weighted(self) -> bool:
        """Whether classes are balanced within sites; if no site has both classes, all subjects count the same."""
        return any(member.balanced for member in self.members)

    def summed_weights(self, fit: int) -> float:
        """Sum of the subjects' weights over the training sites of a fit; balanced weights of a site sum to its size."""
        return float(sum(one.subjects for one in self.training(fit) if one.balanced or not self.weighted))

    def mean_sign(self, fit: int) -> float:
        """Weighted mean of the labels -1 and 1 over the training sites of a fit."""
        if self.weighted:
            return 0.0
        return sum(one.patients - one.controls for one in self.training(fit)) / max(self.summed_weights(fit), 1.0)

    @property
    def alone(self) -> list[str]:
        """Sites that are held out by themselves: the difference of two totals is their own sum."""
        folds = list(self.fold_of.values())
        return [site for site, fold in self.fold_of.items() if fold >= 0 and folds.count(fold) == 1]

    def form(self, ask: Ask) -> Form:
        """Form of the answer to an ask; an ask outside of the protocol is refused."""
        if ask.kind not in SUMS:
            raise InputError(f"a sum of kind {ask.kind[:40]!r} is not part of the protocol.")
        kind = SUMS[ask.kind]
        if ask.name not in kind.names(self):
            raise InputError(f"{ask.kind} of {ask.name[:40]!r} is not part of the protocol.")
        expected = kind.arguments(self, ask)
        if set(ask.arguments) != set(expected):
            raise InputError(f"{ask.key} has the arguments {', '.join(ask.arguments) or 'none'}, which is not the protocol.")
        for name, (shape, dtype) in expected.items():
            given = ask.arguments[name]
            if given.shape != shape or given.dtype != np.dtype(dtype):
                raise InputError(f"{ask.key}: {name} has shape {given.shape} and type {given.dtype}, not {shape} and {dtype}.")
            if given.dtype.kind == "f" and not np.isfinite(given).all():
                raise InputError(f"{ask.key}: {name} holds NaN or infinite values.")
        return kind.form(self, ask)

    @cached_property
    def values(self) -> dict[str, tuple[int, ...]]:
        """Shape of each value that the coordinator may send."""
        result: dict[str, tuple[int, ...]] = {"usable.amplitude": (self.rois + 1,)}
        for column in self.study.inputs:
            result |= {f"fill.{column}": (), f"moments.{column}": (2,)}
        for block in self.blocks:
            size = self.features(block)
            result |= {
                f"standard.{block}": (2 + len(self.confounds_of(block)), size),
                f"solution.{block}": (self.fits, size + 1),
            }
        return result


class Sum(NamedTuple):
    """A kind of sum: what its total reveals, what it may be about, its form, and shape and type of an ask's arguments."""

    reveals: str
    names: Callable[[Plan], Iterable[str]]
    form: Callable[[Plan, Ask], Form]
    arguments: Callable[[Plan, Ask], dict[str, tuple[tuple[int, ...], str]]] = lambda plan, ask: {}


def _searched(plan: Plan) -> list[str]:
    continuous = [name for name in plan.study.inputs if name not in CATEGORICAL]
    return [*continuous, *(f"amplitude {measure}" for measure in MEASURES)]


def _confounds(plan: Plan, ask: Ask) -> Form:
    count = len(plan.confounds_of(ask.name))
    return Form((1 + count, count), np.array(4.0 * plan.subjects**2))


def _spread(plan: Plan, ask: Ask) -> Form:
    n, confounds = plan.subjects, len(plan.confounds_of(ask.name))
    # The largest feature of a block; no z-score of n values is greater than the root of n.
    size = {"amplitude": LARGEST_AMPLITUDE, "phenotypes": math.sqrt(n)}.get(ask.name, LARGEST_FC)
    bounds = [size * n, size * n, 4 * size**2 * n, *[2 * size * math.sqrt(n) * n] * confounds]
    return Form((3 + confounds, plan.features(ask.name)), np.array(bounds)[:, None])


def _association(plan: Plan, ask: Ask) -> Form:
    return Form((2, plan.features(ask.name)), np.array(LARGEST_STANDARDISED**2 * plan.subjects), by_fold=True)


def _product(plan: Plan, ask: Ask) -> Form:
    # Cauchy-Schwarz: the weighted squares of a standardised feature sum to at most the summed weights.
    norms = np.sqrt((ask.arguments["directions"].astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    bound = 2 * plan.subjects * math.sqrt(plan.features(ask.name)) * np.maximum(norms, 1e-300)
    return Form(ask.arguments["directions"].shape, bound, SHORT)


def _product_arguments(plan: Plan, ask: Ask) -> dict[str, tuple[tuple[int, ...], str]]:
    fits = ask.arguments.get("fits", np.empty(0))
    if fits.ndim != 1 or not len(fits) or len(set(fits.tolist()) & set(range(plan.fits))) < len(fits):
        raise InputError(f"{ask.key}: its fits are not those of the protocol.")
    return {"fits": (fits.shape, "int64"), "directions": ((len(fits), plan.features(ask.name)), "float32")}


def _decisions(plan: Plan, _: Ask) -> Form:
    count = len(plan.blocks)
    bounds = np.full((1 + count, 1), LARGEST_DECISION**2 * plan.subjects)
    bounds[0] = LARGEST_DECISION * plan.subjects
    return Form((1 + count, count), bounds)


SUMS = {
    "codes": Sum(
        "number of subjects with each code of a categorical phenotype",
        lambda plan: [name for name in plan.study.inputs if name in CATEGORICAL],
        lambda plan, ask: Form((CODES,), np.array(0.0)),
    ),
    "search": Sum(
        "number of subjects below some values, from which the median of a phenotype or a limit of the amplitudes follows",
        _searched,
        lambda plan, ask: Form((2 * CUTS + 1,), np.array(0.0)),
        lambda plan, ask: {"cuts": ((2, CUTS), "int64")},
    ),
    "moments": Sum(
        "sum and sum of squares of a phenotype: its mean and spread",
        lambda plan: plan.study.inputs,
        lambda plan, ask: Form((2,), np.array([LARGEST_PHENOTYPE, LARGEST_PHENOTYPE**2]) * plan.subjects),
    ),
    "usable": Sum(
        "sum of the regional amplitudes, and number of scans that were not standardised: the mean amplitude of each ROI",
        lambda plan: ("amplitude",),
        lambda plan, ask: Form((plan.rois + 1,), np.array(LARGEST_AMPLITUDE * plan.subjects)),
    ),
    "confounds": Sum(
        "sums of age and sex, and of their products within sites: their spread and correlation",
        lambda plan: plan.blocks,
        _confounds,
    ),
    "spread": Sum(
        "sums, sums of squares, and products with age and sex, of each feature: means, spreads and slopes",
        lambda plan: plan.blocks,
        _spread,
    ),
    "association": Sum(
        "sum of squares of each feature, and sum of its products with the diagnosis, by fold of sites",
        lambda plan: plan.blocks,
        _association,
    ),
    "product": Sum(
        "features times their product with a direction: one step towards the weights of the model",
        lambda plan: plan.blocks,
        _product,
        _product_arguments,
    ),
    "decisions": Sum(
        "sums of decisions of fits without the site, and of their products: their spread",
        lambda plan: ("all",),
        _decisions,
    ),
    "calibration": Sum(
        "log loss of a logistic curve and its two derivatives, over decisions of fits without the site",
        lambda plan: ("all",),
        lambda plan, ask: Form((3,), np.array(LARGEST_LOSS * plan.subjects)),
        lambda plan, ask: {
            "weights": ((len(plan.blocks),), "float64"),
            "mean_sd": ((2,), "float64"),
            "point": ((2,), "float64"),
        },
    ),
}
