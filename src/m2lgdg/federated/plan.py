"""What all sites of a federated study agree on: settings, members, folds of sites, and the sums that may be asked for.

The coordinator and every site derive the same `Plan` from the settings and the members' counts. `coordinator` makes the asks
of this plan, `site` answers them, and `SUMS` lists all that can be asked for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.data.atlases import same_rois
from m2lgdg.method import interchangeable
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.methods.linear import LOG_EUCLIDEAN
from m2lgdg.methods.tables import NONE
from m2lgdg.registry import create
from m2lgdg.scans import SERIES
from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
METHOD = "connectome-adaptive"
LEAST_TOGETHER = 3  # sites that every total adds up: with two, each could subtract its own sums
LEAST_SITES = 2 * LEAST_TOGETHER  # folds hold out sites, so a total over a fold needs as many sites inside as outside
LEAST_SUBJECTS = 10  # at a site
MOST_SITES, MOST_SUBJECTS, MOST_ROIS = 256, 10**6, 2000  # of a study
MOST_ROUNDS = 120
CODES = 10  # categorical columns hold integers below this
LARGEST_PHENOTYPE = 2.0**16  # absolute value of a phenotype
LARGEST_FC, LARGEST_AMPLITUDE = 4.0, 128.0  # Fisher z is clipped at 3.8; logarithms of float32 are below 89
LARGEST_LOGARITHM = 64.0  # of a matrix, times sqrt 2: eigenvalues are between 1e-12 and the number of ROIs
LARGEST_STANDARDISED = 2.0**8  # a feature, in units of its spread
LARGEST_DECISION, LARGEST_LOSS = 2.0**12, 2.0**20
CUTS = 31  # thresholds per round of a search for an order statistic, which is one of 2^64 numbers: 13 rounds
SHORT, LONG = 5, 8  # bytes of a number in a message
MEASURES = ("slope", "spread", "distance")  # of `AmplitudeRange`
NO_TABLES = "Tables of brain structure are not used in federated training; a site that has some keeps them."
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Settings:
    """Settings of a federated study, chosen by the coordinator and read by every site before it joins."""

    id: str  # random; every message names it
    sites: tuple[str, ...]  # invited
    inputs: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the method
    least_subjects: int = LEAST_SUBJECTS
    least_sites: int = LEAST_SITES
    leave_out: str = ""  # site that does not train, so that the model can be evaluated there
    key: str = ""  # Ed25519 public key of the coordinator, hexadecimal
    version: str = ""  # of m2lgdg: all sites run the same program

    def __post_init__(self) -> None:
        for site in self.sites:
            if not NAME.fullmatch(site):
                raise InputError(f"site {site[:80]!r}: use letters, digits, dots, dashes and underscores only.")
        if len(set(self.sites)) < len(self.sites) or len(set(self.inputs)) < len(self.inputs):
            raise InputError("a site or a phenotype is listed twice.")
        for name, given, least in (
            ("--least-subjects", self.least_subjects, LEAST_SUBJECTS),
            ("--least-sites", self.least_sites, LEAST_SITES),
        ):
            if given < least:
                raise InputError(f"{name} is {given}; no site takes part in a study with less than {least}.")
        if self.leave_out and self.leave_out not in self.sites:
            raise InputError(f"site {self.leave_out[:80]!r} is left out, but is not one of the sites; add it with --site.")
        self.need_sites(len(self.training_sites), "train")
        if len(self.sites) > MOST_SITES:
            raise InputError(f"the study has {len(self.sites)} sites; {MOST_SITES} are possible.")
        self._check_fields()
        most = len(self.training_sites) // LEAST_TOGETHER
        if self.folds and self.folds > most:
            raise InputError(
                f"site_folds is {self.folds}; every fold needs {LEAST_TOGETHER} sites, so set at most {most}, or leave it out."
            )

    def _check_fields(self) -> None:
        if self.fields.get("tables", NONE) != NONE:
            raise InputError("field tables: federated training uses scans and phenotypes only; leave this field out.")
        if not self.method.scan and not self.inputs:
            raise InputError("field scan: without the scan, federated training needs phenotypes; name them with --inputs.")
        if not self.method.held_phenotypes:
            raise InputError("field held_phenotypes: federated training learns phenotypes within sites; leave this field out.")
        if len(self.method.penalties) > 1:
            raise InputError("a federated fit has one penalty; it cannot choose among several by AUC.")

    @property
    def folds(self) -> int | None:
        """Number of folds of sites, if the study chose one."""
        return self.method.site_folds if "site_folds" in self.fields else None

    def need_sites(self, count: int, verb: str) -> None:
        """Refuse a study of few sites."""
        if count < self.least_sites:
            raise InputError(
                f"{count} sites {verb}, and the study needs {self.least_sites} (--least-sites): every total is over "
                f"{LEAST_TOGETHER} sites or more, also when sites are held out for calibration."
            )

    @property
    def training_sites(self) -> tuple[str, ...]:
        """Sites whose subjects the model is trained on, if none drops out."""
        return tuple(site for site in self.sites if site != self.leave_out)

    @cached_property
    def method(self) -> ConnectomeAdaptive:
        """The method, not fitted; unusable fields are refused."""
        created = create(METHOD, **dict(self.fields) | {"phenotypes": bool(self.inputs), "tables": NONE})
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
    """A site that joined: its counts, its ROIs, its public keys."""

    site: str
    patients: int
    controls: int
    rois: tuple[str, ...]
    atlas: str
    hash: str  # SHA-256 of the site's cohort
    incomplete: tuple[str, ...] = ()  # inputs with missing values at the site
    empty: tuple[str, ...] = ()  # inputs without any value at the site
    amplitudes: bool = True  # whether it has scans that were not standardised
    key: str = ""  # X25519 public key for the masks, hexadecimal
    signing: str = ""  # Ed25519 public key for the signature of its answers, hexadecimal
    scans: str = SERIES  # or a kind of connectomes

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
        self.study.need_sites(len(self.members), "take part")
        if len({member.site for member in self.members}) < len(self.members):
            raise InputError("a site takes part twice.")
        for member in self.members:
            self._check(member, self.members[0])
        if self.subjects > MOST_SUBJECTS:
            raise InputError(f"the sites have {self.subjects} subjects; a study has at most {MOST_SUBJECTS}.")
        if not sum(one.patients for one in self.members) or not sum(one.controls for one in self.members):
            raise InputError("the sites together have only one class; patients and controls are needed.")
        for column in self.study.inputs:
            self._need_several(f"values of {column}", [one for one in self.members if column not in one.empty])
        self._need_several("scans that were not standardised", [one for one in self.members if one.amplitudes])
        self._need_several("patients and controls", [one for one in self.members if one.balanced])
        if self.weighted:
            self._need_several("subjects of one class only", [one for one in self.members if not one.balanced])
        self.method  # noqa: B018  refuses folds of few sites

    def _check(self, member: Member, first: Member) -> None:
        if member.site not in self.study.training_sites:
            why = "left out of" if member.site == self.study.leave_out else "not a site of"
            raise InputError(f"site {member.site} is {why} this study, so it sends no sums.")
        self.study.need_subjects(member.site, member.subjects)
        if member.rois != first.rois or not same_rois(member.rois, member.atlas, first.rois, first.atlas):
            differing = [a for a, b in zip(member.rois, first.rois, strict=False) if a != b]
            detail = f"; the first that differs is {differing[0]}" if differing else ""
            raise InputError(
                f"site {member.site} has {len(member.rois)} ROIs and site {first.site} {len(first.rois)}, or others{detail}: "
                "all sites need the same atlas."
            )
        if not interchangeable(member.scans, first.scans):
            raise InputError(
                f"the scans of site {member.site} are {member.scans} and those of site {first.site} {first.scans}; all sites "
                "need series, or connectomes of one kind (m2lgdg convert --connectomes makes them of series)."
            )

    def _need_several(self, what: str, having: list[Member]) -> None:
        if 0 < len(having) < LEAST_TOGETHER:
            names = " and ".join(member.site for member in having)
            raise InputError(
                f"only {names} has {what}, so a total would give away its sums; {LEAST_TOGETHER} sites are needed."
            )

    @cached_property
    def method(self) -> ConnectomeAdaptive:
        """The method, not fitted; its number of folds leaves three sites or more in each."""
        chosen, default = self.study.folds, self.study.method.site_folds
        for count in [chosen] if chosen else range(min(default, len(self.members) // LEAST_TOGETHER), 1, -1):
            folds = self._folds(count)
            counted = Counter(folds[member.site] for member in self.members if member.balanced or not self.weighted)
            if all(counted[fold] >= LEAST_TOGETHER for fold in folds.values()):
                return type(self.study.method)(**self.study.method.fields() | {"site_folds": count})
        raise InputError(
            f"the folds of the calibration would hold fewer than {LEAST_TOGETHER} sites with patients and controls"
            + (
                f"; choose another site_folds than {chosen}."
                if chosen
                else ", because one site is too large or others too small."
            )
        )

    def _folds(self, count: int) -> dict[str, int]:
        numbers = [member.subjects for member in self.members]
        labels = np.concatenate([np.repeat([1, 0], [one.patients, one.controls]) for one in self.members]).astype(np.int8)
        places: npt.NDArray[Any] = np.repeat(np.arange(len(numbers)), numbers)  # of the names in their order: less memory
        result = {member.site: -1 for member in self.members}
        for i, (_, test) in enumerate(site_folds(places, labels, count)):
            result |= {self.members[place].site: i for place in np.unique(places[test])}
        return result

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
        """Weight of each block in the sum of decisions; blocks that need series are left out of a fit on connectomes."""
        return self.method.weights_of(self.members[0].scans)

    def features(self, block: str) -> int:
        """Number of features of a block."""
        with_diagonal = self.rois * (self.rois + 1) // 2
        sizes = {"amplitude": self.rois, "phenotypes": len(self.study.inputs), LOG_EUCLIDEAN: with_diagonal}
        return sizes.get(block, self.rois * (self.rois - 1) // 2)

    @cached_property
    def fold_of(self) -> dict[str, int]:
        """Fold in which each site is held out; -1 for a site in none, as the others have one class."""
        return self._folds(self.method.site_folds)

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

    @cached_property
    def site_weights(self) -> dict[str, float]:
        """Weights of the sites with both classes in a mean of differences between classes, as in `held_parts`."""
        sizes = {one.site: one.patients * one.controls / one.subjects for one in self.members if one.balanced}
        return {site: size / sum(sizes.values()) for site, size in sizes.items()}

    def mean_sign(self, fit: int) -> float:
        """Weighted mean of the labels -1 and 1 over the training sites of a fit."""
        if self.weighted:
            return 0.0
        return sum(one.patients - one.controls for one in self.training(fit)) / max(self.summed_weights(fit), 1.0)

    def form(self, ask: Ask) -> Form:
        """Form of the answer to an ask."""
        return SUMS[ask.kind].form(self, ask)


class Sum(NamedTuple):
    """A kind of sum: what its total reveals, and its form."""

    reveals: str
    form: Callable[[Plan, Ask], Form]


def _spread(plan: Plan, ask: Ask) -> Form:
    n = plan.subjects
    # The largest feature of a block; no z-score of n values is greater than the root of n.
    sizes = {"amplitude": LARGEST_AMPLITUDE, "phenotypes": math.sqrt(n), LOG_EUCLIDEAN: LARGEST_LOGARITHM}
    size = sizes.get(ask.name, LARGEST_FC)
    return Form((3, plan.features(ask.name)), np.array([[size * n], [size * n], [4 * size**2 * n]]))


def _association(plan: Plan, ask: Ask) -> Form:
    return Form((2, plan.features(ask.name)), np.array(LARGEST_STANDARDISED**2 * plan.subjects), by_fold=True)


def _product(plan: Plan, ask: Ask) -> Form:
    # Cauchy-Schwarz, for a direction of length 1: the weighted squares of a standardised feature sum to the summed weights.
    bound = np.array(2.01 * plan.subjects * math.sqrt(plan.features(ask.name)))
    return Form(ask.arguments["directions"].shape, bound, SHORT)


def _held(plan: Plan, ask: Ask) -> Form:
    bounds = 2 * LARGEST_STANDARDISED * np.array([1.0, 1.0, 2 * LARGEST_STANDARDISED])
    return Form((3, plan.features(ask.name)), bounds[:, None])


def _decisions(plan: Plan, _: Ask) -> Form:
    count = len(plan.blocks)
    bounds = np.full((3 + 4 * count, 1), LARGEST_DECISION**2 * plan.subjects)
    bounds[[0, 1 + count]] = LARGEST_DECISION * plan.subjects
    bounds[2 + 3 * count] = 2 * LARGEST_DECISION  # a mean of differences
    return Form((3 + 4 * count, count), bounds)


SUMS = {
    "codes": Sum(
        "number of subjects with each code of a categorical phenotype",
        lambda plan, ask: Form((CODES,), np.array(0.0)),
    ),
    "search": Sum(
        "number of subjects below some values, from which the median of a phenotype or a limit of the amplitudes follows",
        lambda plan, ask: Form((2 * CUTS + 1,), np.array(0.0)),
    ),
    "moments": Sum(
        "sum and sum of squares of a phenotype: its mean and spread",
        lambda plan, ask: Form((2,), np.array([LARGEST_PHENOTYPE, LARGEST_PHENOTYPE**2]) * plan.subjects),
    ),
    "usable": Sum(
        "sum of the regional amplitudes, and number of scans that were not standardised: the mean amplitude of each ROI",
        lambda plan, ask: Form((plan.rois + 1,), np.array(LARGEST_AMPLITUDE * plan.subjects)),
    ),
    "spread": Sum("sums and sums of squares of each feature: means and spreads", _spread),
    "association": Sum(
        "sum of squares of each feature, and sum of its products with the diagnosis, by fold of sites",
        _association,
    ),
    "product": Sum(
        "features times their product with a direction: one step towards the weights of the model",
        _product,
    ),
    "held": Sum(
        "difference between patients and controls in each phenotype, times its slope at other sites, weighted by size, and its "
        "square: how far what it says of the diagnosis holds at other sites",
        _held,
    ),
    "decisions": Sum(
        "sums of decisions of fits without the site, and of their products, also within sites and classes, and the difference "
        "between patients and controls: their spread, and how much phenotypes add to scans",
        _decisions,
    ),
    "calibration": Sum(
        "derivatives of the log loss of a logistic curve, over decisions of fits without the site",
        lambda plan, ask: Form((5,), np.array(LARGEST_LOSS * plan.subjects)),
    ),
}
