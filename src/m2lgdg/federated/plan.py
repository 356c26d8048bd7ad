"""What all sites of a federated study agree on: settings, members, folds of sites and the sums that may be asked for.

The coordinator and every site derive the same `Plan` from the settings and the members' counts. `site` answers asks of this
plan, `coordinator` makes them, and nothing else can be asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.methods.linear import ConnectomeAdaptive
from m2lgdg.preprocess import CATEGORICAL
from m2lgdg.registry import create
from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
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
class Study:
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
        if len(self.training_sites) < self.least_sites:
            count = len(self.training_sites)
            raise InputError(f"{count} sites train in the study; it needs at least {self.least_sites} (--least-sites).")
        if self.leave_out and self.leave_out not in self.sites:
            raise InputError(
                f"site {self.leave_out[:80]} is left out, but is not one of the sites; add --site {self.leave_out[:80]}."
            )
        if len(self.method.penalties) > 1:
            raise InputError("a federated fit has one penalty; it cannot choose among several by AUC.")

    @property
    def training_sites(self) -> tuple[str, ...]:
        """Sites whose subjects the model is trained on, if none drops out."""
        return tuple(site for site in self.sites if site != self.leave_out)

    @cached_property
    def method(self) -> ConnectomeAdaptive:
        """The method, not fitted; unusable fields are refused."""
        fields = dict(self.fields) | {"phenotypes": bool(self.inputs)}
        created = create(METHOD, **fields)
        assert isinstance(created, ConnectomeAdaptive)
        return created


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
    """A study with its members; `attempt` counts how often it began, each time without one site more."""

    study: Study
    members: tuple[Member, ...]
    attempt: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.site)))
        if len(self.members) < self.study.least_sites:
            count, least = len(self.members), self.study.least_sites
            raise InputError(f"{count} sites take part; the study needs at least {least}, so it ends here.")
        first = self.members[0]
        for member in self.members:
            self._check(member, first)
        if not sum(one.patients for one in self.members) or not sum(one.controls for one in self.members):
            raise InputError("the sites together have only one class; patients and controls are needed.")

    def _check(self, member: Member, first: Member) -> None:
        if member.site not in self.study.sites:
            raise InputError(f"site {member.site} is not one of the sites of this study.")
        if member.site == self.study.leave_out:
            raise InputError(f"site {member.site} is left out of this study for evaluation, so it sends no sums.")
        if member.subjects < self.study.least_subjects:
            raise InputError(
                f"site {member.site} has {member.subjects} labelled subjects; the study needs at least "
                f"{self.study.least_subjects} at every site, because sums over fewer are close to the subjects themselves."
            )
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
    def parts(self) -> int:
        """Number of fits: one without each fold, and one on all sites (the last)."""
        return max(self.fold_of.values()) + 2

    def trains(self, site: str, part: int) -> bool:
        """Whether a site is a training site of a part."""
        return self.fold_of[site] != part

    def mates(self, site: str) -> list[str]:
        """Sites that are held out together with this one, itself included."""
        return [other for other, fold in self.fold_of.items() if fold == self.fold_of[site]]

    @cached_property
    def weighted(self) -> bool:
        """Whether classes are balanced within sites; if no site has both classes, all subjects count the same."""
        return any(member.balanced for member in self.members)

    def summed_weights(self, part: int) -> float:
        """Sum of the subjects' weights over the training sites of a part; balanced weights of a site sum to its size."""
        sites = [member for member in self.members if self.trains(member.site, part)]
        return float(sum(member.subjects for member in sites if member.balanced or not self.weighted))

    def mean_sign(self, part: int) -> float:
        """Weighted mean of the labels -1 and 1 over the training sites of a part."""
        if self.weighted:
            return 0.0
        sites = [member for member in self.members if self.trains(member.site, part)]
        return sum(member.patients - member.controls for member in sites) / max(self.summed_weights(part), 1.0)

    def count(self, part: int) -> int:
        """Number of subjects at the training sites of a part."""
        return sum(member.subjects for member in self.members if self.trains(member.site, part))

    def form(self, ask: Ask) -> Form:
        """Form of the answer to an ask; an ask outside of the protocol is refused."""
        if ask.kind not in FORMS:
            raise InputError(f"a sum of kind {ask.kind[:40]!r} is not part of the protocol.")
        known, expected = FORMS[ask.kind], _arguments(self, ask)
        if ask.name not in _names(self, ask.kind):
            raise InputError(f"{ask.kind} of {ask.name[:40]!r} is not part of the protocol.")
        if set(ask.arguments) != set(expected):
            raise InputError(f"{ask.key} has the arguments {', '.join(ask.arguments) or 'none'}, which is not the protocol.")
        for name, (shape, kind) in expected.items():
            given = ask.arguments[name]
            if given.shape != shape or given.dtype != np.dtype(kind):
                raise InputError(f"{ask.key}: {name} has shape {given.shape} and type {given.dtype}, not {shape} and {kind}.")
            if given.dtype.kind == "f" and not np.isfinite(given).all():
                raise InputError(f"{ask.key}: {name} holds NaN or infinite values.")
        return known(self, ask)

    @property
    def alone(self) -> list[str]:
        """Sites that are held out by themselves: the difference of two totals is their own sum."""
        folds = list(self.fold_of.values())
        return [site for site, fold in self.fold_of.items() if fold >= 0 and folds.count(fold) == 1]


def _names(plan: Plan, kind: str) -> tuple[str, ...]:
    columns, blocks = plan.study.inputs, tuple(plan.blocks)
    continuous = tuple(name for name in columns if name not in CATEGORICAL)
    return {
        "codes": tuple(name for name in columns if name in CATEGORICAL),
        "search": (*continuous, *(f"amplitude {measure}" for measure in MEASURES)),
        "moments": columns,
        "usable": ("amplitude",),
        "confounds": blocks,
        "spread": blocks,
        "association": blocks,
        "product": blocks,
        "decisions": ("all",),
        "calibration": ("all",),
    }[kind]


def _arguments(plan: Plan, ask: Ask) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each argument of an ask."""
    if ask.kind == "search":
        return {"cuts": ((2, CUTS), "int64")}
    if ask.kind == "product":
        parts = ask.arguments.get("parts", np.empty(0))
        if parts.ndim != 1 or not 0 < len(parts) <= plan.parts or len(set(parts.tolist())) < len(parts):
            raise InputError(f"{ask.key}: its parts are not those of the protocol.")
        if parts.dtype != np.int64 or parts.min() < 0 or parts.max() >= plan.parts:
            raise InputError(f"{ask.key}: its parts are not those of the protocol.")
        return {"parts": (parts.shape, "int64"), "directions": ((len(parts), plan.features(ask.name)), "float32")}
    if ask.kind == "calibration":
        return {"weights": ((len(plan.blocks),), "float64"), "mean_sd": ((2,), "float64"), "point": ((2,), "float64")}
    return {}


def largest(plan: Plan, block: str) -> float:
    """Bound of the absolute value of a feature of a block."""
    z = math.sqrt(plan.subjects)  # no z-score of n values is greater
    return {"amplitude": LARGEST_AMPLITUDE, "phenotypes": z}.get(block, LARGEST_FC)


def _spread(plan: Plan, ask: Ask) -> Form:
    n, size, confounds = plan.subjects, largest(plan, ask.name), len(plan.confounds_of(ask.name))
    bounds = [size * n, size * n, 4 * size**2 * n, *[2 * size * math.sqrt(n) * n] * confounds]
    return Form((3 + confounds, plan.features(ask.name)), np.array(bounds)[:, None])


def _product(plan: Plan, ask: Ask) -> Form:
    # Cauchy-Schwarz: the weighted squares of a standardised feature sum to at most the summed weights.
    norms = np.sqrt((ask.arguments["directions"].astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    bound = 2 * plan.subjects * math.sqrt(plan.features(ask.name)) * np.maximum(norms, 1e-300)
    return Form(ask.arguments["directions"].shape, bound, SHORT)


def _decisions(plan: Plan, _: Ask) -> Form:
    count = len(plan.blocks)
    bounds = np.full((1 + count, 1), LARGEST_DECISION**2 * plan.subjects)
    bounds[0] = LARGEST_DECISION * plan.subjects
    return Form((1 + count, count), bounds)


def _confounds(plan: Plan, ask: Ask) -> Form:
    count = len(plan.confounds_of(ask.name))
    return Form((1 + count, count), np.array(4.0 * plan.subjects**2))


FORMS: dict[str, Callable[[Plan, Ask], Form]] = {
    "codes": lambda plan, ask: Form((CODES,), np.array(0.0)),
    "search": lambda plan, ask: Form((2 * CUTS + 1,), np.array(0.0)),
    "moments": lambda plan, ask: Form((2,), np.array([LARGEST_PHENOTYPE, LARGEST_PHENOTYPE**2]) * plan.subjects),
    "usable": lambda plan, ask: Form((plan.rois + 1,), np.array(LARGEST_AMPLITUDE * plan.subjects)),
    "confounds": _confounds,
    "spread": _spread,
    "association": lambda plan, ask: Form(
        (2, plan.features(ask.name)), np.array(LARGEST_STANDARDISED**2 * plan.subjects), by_fold=True
    ),
    "product": _product,
    "decisions": _decisions,
    "calibration": lambda plan, ask: Form((3,), np.array(LARGEST_LOSS * plan.subjects)),
}


def value_shape(plan: Plan, name: str) -> tuple[int, ...]:
    """Shape of a value that the coordinator may send; others are refused."""
    kind, _, about = name.partition(".")
    if kind == "fill" and about in plan.study.inputs:
        return ()
    if kind == "moments" and about in plan.study.inputs:
        return (2,)
    if name == "usable.amplitude":
        return (plan.rois + 1,)
    if kind == "standard" and about in plan.blocks:
        return 2 + len(plan.confounds_of(about)), plan.features(about)
    if kind == "solution" and about in plan.blocks:
        return plan.parts, plan.features(about) + 1
    raise InputError(f"a value named {name[:40]!r} is not part of the protocol.")
