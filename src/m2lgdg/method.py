"""`Method`: the interface of all classifiers. It has fields, learns from source and scores a target, in one atlas.

A new method is one file with a subclass that writes `learn` and `score` and is decorated with `@method("name")`; the registry,
the commands, the contract tests and the report then find it. `m2lgdg.Model` is what is calibrated, saved and applied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import same_rois
from m2lgdg.fields import check_bounds
from m2lgdg.registry import METHODS
from m2lgdg.scans import CORRELATION, FISHER_Z, SERIES
from m2lgdg.storage import InputError, one_line

T = TypeVar("T", bound="type[Method]")
Role = Literal["", "headline", "default", "peer", "phenotypes"]
CONNECTOMES = "connectomes"
ANY_SCAN = (SERIES, CONNECTOMES)
FIRST, ALL = "first", "all"  # values of the field `atlases`
LEAST_VOLUMES = 20  # with fewer, a correlation has a standard error of 0.25 or more: too noisy for any decision

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass
class Method:
    """A classifier of subjects. Its dataclass fields are its hyper-parameters.

    A subclass writes `learn(source, seed, ...)`, which stores everything it learned in `state_` (arrays) and `facts_` (JSON),
    and `score(target)`, which computes the probability of the positive class from these alone.

    Field `atlases` selects from a cohort with several atlases: "first", "all", a name, or several names. With more than one, a
    `Model` fits the method in each and averages their logits.
    """

    atlases: str | tuple[str, ...] = FIRST

    name: ClassVar[str] = ""
    role: ClassVar[Role] = ""  # headline of reports, default of `m2lgdg fit`, simple peer, or phenotypes only
    reference: ClassVar[str] = ""  # citation
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # ablation -> changed fields
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # field -> values of a sensitivity sweep
    takes: ClassVar[tuple[str, ...]] = (SERIES,)  # or ANY_SCAN, if correlations between ROIs are enough
    stochastic: ClassVar[bool] = True  # whether the seed matters
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}  # field -> smallest value, and the value it must stay below
    may_be_empty: ClassVar[tuple[str, ...]] = ()  # tuple fields for which an empty tuple is valid
    unused: ClassVar[tuple[str, ...]] = ()  # inherited fields that this method does not use
    sees_batch: ClassVar[bool] = False  # whether the adapted track calls `score_adapted` instead of shifting the intercept
    former_arrays: ClassVar[Mapping[str, str]] = {}  # name in models of 0.1.0 -> name of an array of `state_`
    former_fields: ClassVar[Mapping[str, str]] = {}  # field of models of 0.1.0 -> why it is gone
    remembers: ClassVar[tuple[str, ...]] = ()  # arrays of `state_` that hold data of single source subjects

    _folder = typing.cast(Path | None, None)  # model folder that the method was loaded from; a cast, as it is no field

    def fit(self, source: Cohort, *, seed: int = 0, device: str = "cpu", progress: Callable[..., None] | None = None) -> Self:
        """Fit on source subjects, which must all have a label; `Model.fit` describes the parameters."""
        need_labels(self.name, source)
        self.check()
        names = chosen_atlases(self.atlases, source)
        if len(names) > 1:
            raise InputError(f"method {self.name} is fitted in one atlas; m2lgdg.Model fits it in {', '.join(names)}.")
        need_scans(self, source)
        self.need_inputs(source)
        findings, source = source.findings, source.parcellation(names[0])
        need_labels(self.name, source, f" in atlas {names[0]}")  # of those who have it
        self._folder = None
        self.state_: dict[str, npt.NDArray[Any]] = {}
        self.facts_ = source_facts(source, findings, seed)
        self.learn(source, seed=seed, device=device, progress=progress)
        return self

    def predict_proba(self, target: Cohort) -> Floats:
        """(subject, 2) probability of control and patient. Labels, sites and ids of the target are not used."""
        masked = self.visible(target)
        if not len(target):
            return np.empty((0, 2))
        with self.checking_weights():
            positive = np.asarray(self.score(masked), dtype=np.float64)
        return both_classes(self.probabilities(positive, len(target)))

    def predict_adapted(self, target: Cohort, batch: Cohort) -> Floats:
        """(subject,) probability of the patient class for a method that `sees_batch`: unlabelled subjects of the same site."""
        positive = np.asarray(self.score_adapted(self.visible(target), self.visible(batch)), dtype=np.float64)
        return self.probabilities(positive, len(target))

    def probabilities(self, positive: Floats, subjects: int) -> Floats:
        """The given values, if they are one probability for each subject."""
        if positive.shape != (subjects,) or not ((positive >= 0) & (positive <= 1)).all():
            kind = InputError if self._folder else ValueError  # bad input if loaded from a folder, else a bug in the method
            raise kind(f"method {self.name} did not give one probability between 0 and 1 for each subject.")
        return positive

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Fit on source and store the result in `state_` and `facts_`."""
        raise NotImplementedError(f"{type(self).__name__} must implement learn")

    def score(self, target: Cohort) -> Floats:
        """(subject,) probability of the positive class."""
        raise NotImplementedError(f"{type(self).__name__} must implement score")

    def score_adapted(self, target: Cohort, batch: Cohort) -> Floats:
        """(subject,) probability of the positive class, with other subjects of the site, for a class that `sees_batch`."""
        raise NotImplementedError(f"{type(self).__name__} must implement score_adapted, or leave sees_batch as it is")

    def held_out_logits(self) -> Floats | None:
        """(source subject,) calibrated logits from fits without the subject's site, if `learn` computes them."""
        return None

    def method_flags(self, target: Cohort) -> list[list[str]]:
        """Quality flags of each subject that only this method raises."""
        return [[] for _ in range(len(target))]

    def table_rows(self, target: Cohort) -> dict[str, Any]:
        """What the method sees of each table that it takes (`methods.tables.TableRows`)."""
        return {}

    def needs_series(self) -> str:
        """What of the method needs time series, such as its name with a field; empty if connectomes are enough."""
        return "" if CONNECTOMES in self.takes else f"method {self.name}"

    def need_inputs(self, source: Cohort) -> None:
        """Refuse a cohort without something that the fields ask for, such as a table; a study asks before its first cell."""

    @property
    def trained_on(self) -> str:
        """What the scans of source are: series, or a kind of connectomes; of a method that is not fitted, series."""
        return str(vars(self).get("facts_", {}).get("scans", SERIES))

    @property
    def uses_amplitude(self) -> bool:
        """Whether the signal's amplitude in each ROI matters; otherwise z-scored series give the same probabilities."""
        return False

    def complete_state(self) -> None:
        """Add to `state_` what is costly to write, before it is saved or compared; most methods have nothing of the kind."""

    def check(self) -> None:
        """Refuse unusable field values (`fields.check_bounds`)."""
        check_bounds(self)

    def fields(self) -> dict[str, Any]:
        """Hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def visible(self, target: Cohort) -> Cohort:
        """The target as `score` sees it: without label, site and id; inputs that the target lacks are added as missing."""
        target = self.checked_target(target)
        inputs, table = self.facts_["inputs"], target.phenotypes
        missing = [name for name in inputs if name not in table.columns or (table[name] == "").all()]
        completed = target._changed(phenotypes=table.assign(**dict.fromkeys(missing, np.nan)))
        return completed.with_inputs(inputs, allow_proxies=True).unlabelled()

    def checked_target(self, target: Cohort) -> Cohort:
        """The target in the atlas of this method; other ROIs and scans that are too short are refused."""
        if not hasattr(self, "state_"):
            raise InputError(f"method {self.name} is not fitted yet.")
        target = in_one_atlas(target, self.facts_["atlas"])
        rois = self.facts_["rois"]
        if len(target.rois) != len(rois):
            trained = f"the model was trained on {len(rois)} ROIs ({self.facts_['atlas'] or 'atlas not named'})"
            raise InputError(f"{trained}, the cohort has {len(target.rois)}.")
        if not same_rois(rois, self.facts_["atlas"], target.rois, target.atlas):
            for i, (expected, name) in enumerate(zip(rois, target.rois, strict=True), start=1):
                if expected != name:
                    raise InputError(f"ROI {i} is {expected} in the model but {name} in the cohort: another atlas or order.")
            raise InputError(
                f"the model was trained on atlas {self.facts_['atlas']}, the cohort has atlas {target.atlas}; their ROIs "
                "have only numbers. If it is one atlas, convert the files with one name (--atlas, or atlas in dataset.toml)."
            )
        same_scans(self.trained_on, target)
        for subject, length in zip(target.subjects, target.lengths, strict=True) if target.values == SERIES else ():
            if length < LEAST_VOLUMES:
                needed = f"a prediction needs at least {LEAST_VOLUMES}"
                raise InputError(f"the scan of subject {subject} has {length} volumes; {needed}.")
        return target

    @contextlib.contextmanager
    def checking_weights(self) -> Iterator[None]:
        """Context for code that uses weights: arrays of a loaded model with wrong names or shapes raise one InputError."""
        quiet = np.errstate() if self._folder is None else np.errstate(all="ignore")  # one error message, no warnings
        try:
            with quiet:
                yield
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError) as error:
            if self._folder is None:
                raise
            raise InputError(f"{self._folder}: its weights do not fit method {self.name} ({one_line(error)[:200]}).") from error

    def save(self, folder: str | Path) -> Path:
        """Write a model folder; see `Model.save`."""
        return typing.cast(Path, _model_class()(self).save(folder))

    @staticmethod
    def load(folder: str | Path) -> Any:
        """Load a `Model` from its folder; see `Model.load`."""
        return _model_class().load(folder)


def _model_class() -> Any:
    """`Model`, which is made of methods and therefore imported by name, on request."""
    return importlib.import_module(f"{__package__}.model.model").Model


@dataclass_transform()
def method(name: str, role: Role = "") -> Callable[[T], T]:
    """Decorator that makes a `Method` subclass a dataclass and registers it under a name."""

    def register(cls: T) -> T:
        registered = dataclasses.dataclass(cls)
        registered.name, registered.role = name, role
        METHODS[name] = registered
        return typing.cast(T, registered)

    return register


def both_classes(positive: Floats) -> Floats:
    """(subject, 2) probabilities of control and patient."""
    return np.stack([1 - positive, positive], axis=1)


def need_labels(name: str, source: Cohort, where: str = "") -> None:
    """Refuse a source with one class, or with subjects without a label."""
    labels = set(source.labels.tolist())
    if labels != {0, 1}:
        problem = "subjects without a label" if -1 in labels else "only one class" if labels else "no subject"
        raise InputError(f"method {name} cannot be fitted: source has {problem}{where}.")


def need_scans(one: Method, cohort: Cohort) -> None:
    """Refuse connectomes, in any atlas that the method is fitted in, that it does not take."""
    if (what := one.needs_series()) and holds_connectomes(cohort, one.atlases):
        able = ", ".join(sorted(name for name in METHODS if not series_needed(name)))
        raise InputError(
            f"{what} needs time series, and cohort {cohort.name} holds connectomes; methods that take connectomes: {able}."
        )


def holds_connectomes(cohort: Cohort, atlases: str | tuple[str, ...]) -> bool:
    """Whether a cohort holds connectomes in one of the atlases that a method selects."""
    return any(cohort.parcellation(name).values != SERIES for name in chosen_atlases(atlases, cohort))


def series_needed(name: str) -> str:
    """`Method.needs_series` of a registered method with its default fields; of a network without PyTorch, that it needs it."""
    try:
        return str(METHODS[name]().needs_series())
    except InputError as error:
        return str(error)
    except TypeError:  # a plugin with a field that has no default
        return "" if CONNECTOMES in METHODS[name].takes else f"method {name}"


def interchangeable(one: str, other: str) -> bool:
    """Whether two kinds of scans are the same, or Fisher z and correlations."""
    return one == other or {one, other} == {CORRELATION, FISHER_Z}


def same_scans(trained: str, target: Cohort) -> None:
    """Refuse a target whose scans are not of the kind that a model was trained on; Fisher z and correlations are one kind."""
    given = target.values
    if interchangeable(given, trained):
        return
    advice = f"if they hold {trained}, say so with m2lgdg convert --values {trained}"
    if trained == SERIES:
        advice = "give it the time series of the ROIs"
    elif given == SERIES:
        advice = f"m2lgdg convert --connectomes makes connectomes ({FISHER_Z}) of series"
    kinds = [f"connectomes ({kind})" if kind != SERIES else "time series" for kind in (trained, given)]
    raise InputError(f"the model was trained on {kinds[0]}, and cohort {target.name} holds {kinds[1]}; {advice}.")


def source_facts(source: Cohort, findings: Any, seed: int) -> dict[str, Any]:
    """First `facts_` of a fit: ROIs and inputs, and the cohort and sites it is fitted on, with what its check found."""
    kinds = {"patients": 1, "controls": 0}
    counts = {
        site: {kind: int(((source.sites == site) & (source.labels == label)).sum()) for kind, label in kinds.items()}
        for site in source.site_names
    }
    about: dict[str, Any] = {"cohort": source.name, "hash": source.hash, "sites": counts}
    if findings is not None:
        about["findings"] = [one.shared() for one in findings if one.severity != "note"]
    rois, inputs = list(source.rois), list(source.inputs)
    return {"rois": rois, "atlas": source.atlas, "scans": source.values, "inputs": inputs, "seed": seed, "source": about}


def chosen_atlases(atlases: str | tuple[str, ...], cohort: Cohort) -> tuple[str, ...]:
    """Names of the atlases that the field `atlases` of a method selects from a cohort."""
    if atlases == FIRST:
        return cohort.atlases[:1]
    names = cohort.atlases if atlases == ALL else (atlases,) if isinstance(atlases, str) else atlases
    for name in names:
        if name not in cohort.atlases:
            cohort.parcellation(name)  # raises the error
        if names.count(name) > 1:
            raise InputError(f"field atlases: {name} is listed twice.")
    return names


def in_one_atlas(target: Cohort, atlas: str) -> Cohort:
    """A target as a method fitted in an atlas sees it; subjects without this atlas are refused."""
    if not target.parcellations:
        return target
    name = atlas if atlas in target.atlases else target.atlas
    absent = np.flatnonzero(~has_atlas(target, name))
    if len(absent):
        raise InputError(f"subject {target.subjects[absent[0]]} has no scan in atlas {name}, which the model needs.")
    return target.parcellation(name)


def has_atlas(cohort: Cohort, atlas: str) -> npt.NDArray[np.bool_]:
    """(subject,) whether each subject has a scan in an atlas of the cohort."""
    further = cohort.parcellations.get(atlas)
    return np.ones(len(cohort), dtype=bool) if further is None else np.asarray(further.present)


def is_network(fitted: Any) -> bool:
    """Whether a method, or that of a model, is a `DeepMethod`; if none was imported it is not, and PyTorch need not be."""
    deep = sys.modules.get("m2lgdg.deep")
    return deep is not None and isinstance(getattr(fitted, "method", fitted), deep.DeepMethod)
