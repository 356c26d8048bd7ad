"""`Method`: the interface of all classifiers, with `fit`, `predict_proba`, and models saved without pickle.

A new method is one file with a subclass that writes `learn` and `score` and is decorated with `@method("name")`; the registry,
the commands, the contract tests and the report then find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import keeping_features
from m2lgdg.data.atlases import same_rois
from m2lgdg.metrics import THRESHOLD, logit, sigmoid
from m2lgdg.model.folder import FORMAT, LARGEST, NEW_SITE_CALIBRATION, digest, distribution_name, read_about, stored_name
from m2lgdg.model.new_site import NewSiteCalibration
from m2lgdg.model.out_of_distribution import SourceDistribution, flags, refuse_short_scans
from m2lgdg.model.over_atlases import (
    chosen_atlases,
    fit_parts,
    in_one_atlas,
    joined_flags,
    joined_ood_scores,
    joined_state,
    mean_score,
    parts_for,
    split_parts,
)
from m2lgdg.model.site_level import SiteLevel, shift_of_share, source_share, stored_level
from m2lgdg.notebook.html import method_html
from m2lgdg.registry import METHODS, load_methods
from m2lgdg.storage import InputError, file_hash, one_line, read_tensors, write_tensors, write_text

T = TypeVar("T", bound="type[Method]")
Role = Literal["", "headline", "default", "peer", "phenotypes"]


@dataclasses.dataclass
class Method:
    """A classifier of subjects. Its dataclass fields are its hyper-parameters.

    A subclass writes `learn(source, seed, ...)`, which stores everything it learned in `state_` (arrays) and `facts_` (JSON),
    and `score(target)`, which computes the probability of the positive class from these alone. Class attributes: `reference`
    (citation), `variants` (ablation -> changed fields), `space` (field -> values of a sensitivity sweep), `stochastic` (whether
    the seed matters).

    Field `atlases` selects from a cohort with several atlases: "first", "all", a name, or several names. With more than one,
    the method is fitted in each, and the logits of these parts are averaged. `learn` and `score` always see one atlas.
    """

    atlases: str | tuple[str, ...] = "first"

    name: ClassVar[str] = ""
    role: ClassVar[Role] = ""  # headline of reports, default of `m2lgdg fit`, simple peer, or phenotypes only
    reference: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    stochastic: ClassVar[bool] = True
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}  # field -> smallest value, and the value it must stay below
    may_be_empty: ClassVar[tuple[str, ...]] = ()  # tuple fields for which an empty tuple is valid
    unused: ClassVar[tuple[str, ...]] = ()  # inherited fields that this method does not use
    sees_batch: ClassVar[bool] = False  # whether the adapted track calls `score_adapted` instead of using the level of the site
    remembers: ClassVar[tuple[str, ...]] = ()  # arrays of `state_` that hold data of single source subjects
    older: ClassVar[Mapping[str, Any]] = {"atlases": "first"}  # fields that earlier versions lacked -> value of their models

    # Fitted on request. Casts, because annotations would make them hyper-parameters.
    source_distribution_ = typing.cast(SourceDistribution | None, None)
    new_site_ = typing.cast(NewSiteCalibration | None, None)
    parts_ = typing.cast(Mapping[str, "Method"], types.MappingProxyType({}))  # by atlas, if fitted in more than one
    _folder = typing.cast(Path | None, None)  # folder that the method was loaded from

    def fit(
        self,
        source: Cohort,
        *,
        seed: int = 0,
        device: str = "cpu",
        progress: Callable[..., None] | None = None,
        source_distribution: bool = False,
        new_site_calibration: bool = False,
        calibration_folds: int | None = None,
    ) -> Self:
        """Fit on source subjects, which must all have a label. Nothing else can reach the fitted method.

        Parameters
        ----------
        source : Cohort
            Labelled subjects of one or several sites.
        seed : int
            Seed of the random numbers.
        device : str
            "cpu", "cuda", "mps" or "auto"; linear methods use the CPU.
        progress : callable, optional
            Called with the epoch, the number of epochs and, for networks, the losses by name.
        source_distribution : bool
            Also fit the statistics behind out-of-distribution scores (seconds; studies do not need it).
        new_site_calibration : bool
            Also refit the method without each source site, to calibrate its probabilities for an unseen site.
            `predict_proba` and `threshold` then use this calibration.
        calibration_folds : int, optional
            Refit without each of this many groups of sites instead, which is faster.

        Returns
        -------
        Method
            The method itself, fitted.

        Examples
        --------
        >>> import m2lgdg
        >>> fold = next(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny")))
        >>> fitted = m2lgdg.make("fc-logistic").fit(fold.source)
        >>> fitted.predict_proba(fold.target).shape
        (10, 2)
        """
        labels = set(source.labels.tolist())
        if labels != {0, 1}:
            problem = "subjects without a label" if -1 in labels else "only one class"
            raise InputError(f"method {self.name} cannot be fitted: source has {problem}.")
        self.check()
        names, findings = chosen_atlases(self.atlases, source), source.findings
        source = source.parcellation(names[0]) if len(names) == 1 else source
        self.state_: dict[str, npt.NDArray[Any]] = {}
        self.facts_: dict[str, Any] = {
            "rois": list(source.rois),
            "atlas": source.atlas,
            "inputs": list(source.inputs),
            "seed": seed,
            "source": {
                "cohort": source.name,
                "hash": source.hash,
                "sites": {
                    site: {
                        "patients": int(((source.sites == site) & (source.labels == 1)).sum()),
                        "controls": int(((source.sites == site) & (source.labels == 0)).sum()),
                    }
                    for site in source.site_names
                },
            }
            | ({} if findings is None else {"findings": [one.shared() for one in findings if one.level != "note"]}),
        }
        self._folder = self.new_site_ = self.source_distribution_ = None
        self.parts_ = {}
        all_series = [one.series for one in source.each_atlas()]
        with keeping_features(*all_series) if new_site_calibration else contextlib.nullcontext():
            if len(names) == 1:
                self.learn(source, seed=seed, device=device, progress=progress)
                self.source_distribution_ = SourceDistribution.fit(source) if source_distribution else None
            else:
                settings = {"seed": seed, "device": device, "progress": progress}
                self.parts_ = fit_parts(self, source, names, source_distribution=source_distribution, **settings)
                self._join_parts(source)
            if new_site_calibration:

                def predict_left_out(part: Cohort, rest: Cohort) -> npt.NDArray[np.float64]:
                    return type(self)(**self.fields()).fit(part, seed=seed, device=device).predict_proba(rest)[:, 1]

                self.new_site_ = NewSiteCalibration.fit(source, predict_left_out, calibration_folds, progress)
        return self

    def _join_parts(self, source: Cohort) -> None:
        """Arrays and facts of the parts, as those of this method."""
        self.state_ = joined_state(self.parts_, source)
        first = next(iter(self.parts_.values())).facts_
        self.facts_ |= {name: first[name] for name in ("rois", "atlas", "inputs")}
        self.facts_["parts"] = {name: part.facts_ for name, part in self.parts_.items()}

    def held_out_logits(self) -> npt.NDArray[np.float64] | None:
        """(source subject,) calibrated logits from fits without the subject's site, if `learn` computes them."""
        return None

    def check(self) -> None:
        """Refuse unusable field values. Integers are counts: at least 1 unless the default is smaller or `bounds` differs."""
        bounds = {name: pair for cls in reversed(type(self).__mro__) for name, pair in vars(cls).get("bounds", {}).items()}
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, where = getattr(self, field.name), f"method {self.name}, field {field.name}"
            if field.name in self.unused and value != field.default:
                raise InputError(f"{where}: this method does not use it; leave it at {field.default}.")
            if value == () and field.name not in self.may_be_empty:
                raise InputError(f"{where} is empty.")
            is_count = int in (hints[field.name], *typing.get_args(hints[field.name]))
            smallest = min(1, field.default) if isinstance(field.default, int) else 1
            least, below = bounds.get(field.name, (smallest if is_count else -math.inf, math.inf))
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int | float) or isinstance(number, bool):
                    continue
                if not abs(number) <= sys.float_info.max:  # integers can exceed it, too
                    raise InputError(f"{where}: {shown(number)} is not a finite number.")
                if not number >= least:
                    raise InputError(f"{where}: {number} is too small; it must be at least {least:g}.")
                if not number < below:
                    raise InputError(f"{where}: {number} is too large; it must be below {below:g}.")

    def predict_proba(self, target: Cohort) -> npt.NDArray[np.float64]:
        """Probability of each class. Labels, sites and ids of the target are not used.

        Parameters
        ----------
        target : Cohort
            Subjects with the ROIs of source.

        Returns
        -------
        ndarray of shape (subject, 2)
            Column 1 is the patient class.
        """
        self._check_fitted()
        masked = target if self.parts_ else self.visible(target)
        if not len(target):
            return np.empty((0, 2))
        with self.checking_weights():
            positive = mean_score(self, target) if self.parts_ else np.asarray(self.score(masked), dtype=np.float64)
        if positive.shape != (len(target),) or not ((positive >= 0) & (positive <= 1)).all():
            kind = InputError if self._folder else ValueError  # bad input if loaded from a folder, else a bug in the method
            raise kind(f"method {self.name} did not give one probability between 0 and 1 for each subject.")
        if self.recalibration:
            slope, offset = self.recalibration
            positive = sigmoid(slope * logit(positive) + offset)
        return np.stack([1 - positive, positive], axis=1)

    def predict_adapted(self, target: Cohort, batch: Cohort) -> npt.NDArray[np.float64]:
        """(subject,) probability of the patient class for a method that `sees_batch`: unlabelled subjects of the same site."""
        positive = np.asarray(self.score_adapted(self.visible(target), self.visible(batch)), dtype=np.float64)
        if positive.shape != (len(target),) or not ((positive >= 0) & (positive <= 1)).all():
            raise ValueError(f"method {self.name} did not give one probability between 0 and 1 for each subject.")
        return positive

    @property
    def recalibration(self) -> tuple[float, float] | None:
        """Slope and offset applied to the logit of `score`: of local calibration, or of new-site calibration and site level.

        None if the model has none of them.
        """
        if "local" in self.facts_:
            return float(self.facts_["local"]["slope"]), float(self.facts_["local"]["offset"])
        level = self.site_level
        if level is None:
            return (self.new_site_.slope, self.new_site_.offset) if self.new_site_ else None
        slope, offset = (self.new_site_.slope, self.new_site_.offset) if self.new_site_ else (1.0, 0.0)
        return slope, offset + level.shift

    @property
    def site_level(self) -> SiteLevel | None:
        """Level of the site that the model was adapted to with unlabelled subjects (`m2lgdg adapt`), or None."""
        return stored_level(self.facts_)

    @property
    def threshold(self) -> float:
        """Probability from which a subject is classified as patient: of the local or the new-site calibration, else 0.5.

        It moves with a share of patients that was given for the site of the model (`m2lgdg adapt --prevalence`).
        """
        default = self.new_site_.threshold if self.new_site_ else THRESHOLD
        moved = self._shift_of_share()
        if moved:  # with the probabilities, so that a given share alone changes no decision
            return float(sigmoid(logit(np.array(default)) + moved))
        return float(self.facts_.get("local", {}).get("threshold", default))

    def _shift_of_share(self) -> float:
        """Part of the site level that is due to a share of patients that was given for the site; 0 without one."""
        level = self.site_level
        return 0.0 if level is None or level.assumed else shift_of_share(level.prevalence, source_share(self.facts_))

    def conformal_sets(self, proba: npt.NDArray[np.float64], coverage: float = 0.9) -> npt.NDArray[np.str_]:
        """Conformal sets (`NewSiteCalibration.sets`) of probabilities of this model, whatever share of patients they assume."""
        if self.new_site_ is None:
            raise InputError("the model has no new-site calibration, so it has no conformal sets.")
        moved = self._shift_of_share()
        return self.new_site_.sets(sigmoid(logit(proba) - moved) if moved else proba, coverage)

    def flags(self, target: Cohort) -> list[list[str]]:
        """Quality flags of each subject: short reasons why its prediction may be less reliable."""
        self._check_fitted()
        if self.parts_:
            return joined_flags(self, target)
        target = self._checked_target(target)
        common = flags(target, self.facts_["inputs"], self.source_distribution_)
        with self.checking_weights():
            return [raised + added for raised, added in zip(common, self.method_flags(target), strict=True)]

    def ood_scores(self, target: Cohort) -> dict[str, npt.NDArray[np.float64]]:
        """Out-of-distribution scores by name; above 1 is outside of source. Empty without a source distribution."""
        self._check_fitted()
        if self.parts_:
            return joined_ood_scores(self, target)
        return self.source_distribution_.scores(self._checked_target(target)) if self.source_distribution_ else {}

    def compare(self, target: Cohort) -> list[str]:
        """Compare a whole target with source, one line per measure; empty without a source distribution."""
        self._check_fitted()
        if self.parts_:  # the measures are of subjects and scans, and the same in all atlases
            part = parts_for(self, target)[0]
            return part.fitted.compare(part.target)
        return self.source_distribution_.compare(self._checked_target(target)) if self.source_distribution_ else []

    def method_flags(self, target: Cohort) -> list[list[str]]:
        """Quality flags of each subject that only this method raises."""
        return [[] for _ in range(len(target))]

    @property
    def uses_amplitude(self) -> bool:
        """Whether the signal's amplitude in each ROI matters; otherwise z-scored series give the same probabilities."""
        return False

    def visible(self, target: Cohort) -> Cohort:
        """The target as `score` sees it: without label, site and id; inputs that the target lacks are added as missing."""
        target = self._checked_target(target)
        inputs, table = self.facts_["inputs"], target.phenotypes
        missing = [name for name in inputs if name not in table.columns or (table[name] == "").all()]
        completed = target._changed(phenotypes=table.assign(**dict.fromkeys(missing, np.nan)))
        return completed.with_inputs(inputs, allow_proxies=True).unlabelled()

    @contextlib.contextmanager
    def checking_weights(self) -> Iterator[None]:
        """Context for code that uses weights: turns the errors of a loaded model into one InputError.

        A folder can pass its hash check and still hold arrays with wrong names or shapes.
        """
        quiet = np.errstate() if self._folder is None else np.errstate(all="ignore")  # one error message, no warnings
        try:
            with quiet:
                yield
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError) as error:
            if self._folder is None:
                raise
            raise InputError(f"{self._folder}: its weights do not fit method {self.name} ({one_line(error)[:200]}).") from error

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Fit on source and store the result in `state_` and `facts_`."""
        raise NotImplementedError(f"{type(self).__name__} must implement learn")

    def score(self, target: Cohort) -> npt.NDArray[np.float64]:
        """(subject,) probability of the positive class."""
        raise NotImplementedError(f"{type(self).__name__} must implement score")

    def score_adapted(self, target: Cohort, batch: Cohort) -> npt.NDArray[np.float64]:
        """(subject,) probability of the positive class, with other subjects of the site, for a class that `sees_batch`."""
        raise NotImplementedError(f"{type(self).__name__} must implement score_adapted, or leave sees_batch as it is")

    def complete_state(self) -> None:
        """Add to `state_` what is costly to write, before it is saved or compared; most methods have nothing of the kind."""

    def _check_fitted(self) -> None:
        if not hasattr(self, "state_"):
            raise InputError(f"method {self.name} is not fitted yet.")

    def _checked_target(self, target: Cohort) -> Cohort:
        """The target in the atlas of this model; other ROIs and scans that are too short are refused."""
        self._check_fitted()
        target = in_one_atlas(target, self.facts_["atlas"])
        rois = self.facts_["rois"]
        if len(target.rois) != len(rois):
            trained = f"the model was trained on {len(rois)} ROIs ({self.facts_['atlas'] or 'atlas not named'})"
            raise InputError(f"{trained}, the cohort has {len(target.rois)}.")
        if not same_rois(rois, self.facts_["atlas"], target.rois, target.atlas):
            pairs = enumerate(zip(rois, target.rois, strict=True), start=1)
            i, (expected, name) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            raise InputError(f"ROI {i} is {expected} in the model but {name} in the cohort: another atlas or order.")
        refuse_short_scans(target)
        return target

    def fields(self) -> dict[str, Any]:
        """Hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _repr_html_(self) -> str:
        """Fields and source sites, for notebooks."""
        return method_html(self.name, type(self).__doc__ or "", self.fields(), getattr(self, "facts_", None))

    def save(self, folder: str | Path) -> Path:
        """Write a model folder: weights, method.json and, if fitted, source distribution and new-site calibration.

        Parameters
        ----------
        folder : str or Path

        Returns
        -------
        Path
            The folder.

        Examples
        --------
        >>> import tempfile
        >>> import m2lgdg
        >>> cohort = m2lgdg.make_cohort("tiny")
        >>> folder = m2lgdg.make("fc-logistic").fit(cohort).save(tempfile.mkdtemp())
        >>> m2lgdg.Method.load(folder).name
        'fc-logistic'
        """
        from m2lgdg import __version__

        if not hasattr(self, "state_"):
            raise InputError(f"method {self.name} is not fitted yet; there is nothing to save.")
        self.complete_state()
        folder = Path(folder)
        about: dict[str, Any] = {
            "format": FORMAT,
            "method": self.name,
            "fields": self.fields(),
            "facts": self.facts_,
            "versions": {"m2lgdg": __version__, "numpy": np.__version__, "python": sys.version.split()[0]},
        }
        write_tensors(folder / "weights.safetensors", self.state_, {"format": FORMAT})
        names = ["weights.safetensors"]
        for i, one in enumerate([self, *self.parts_.values()]):
            if one.source_distribution_:
                names.append(one.source_distribution_.save(folder / distribution_name(i)).name)
        if self.new_site_:
            names.append(self.new_site_.save(folder / NEW_SITE_CALIBRATION).name)
        about["hashes"] = {name: file_hash(folder / name, LARGEST) for name in names} | {"method.json": digest(about)}
        write_text(folder / "method.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Method:
        """Load a fitted method from a model folder; no code in the folder is run.

        Parameters
        ----------
        folder : str or Path

        Returns
        -------
        Method
        """
        folder = Path(folder)
        path = folder / "method.json"
        if not os.path.lexists(path):
            raise InputError(f"{folder} is not a model folder (no method.json).")
        try:
            about, hashes = read_about(folder)
            METHODS.define_estimator(about["method"], about["fields"], run=False)
            if about["method"] not in load_methods():
                name = about["method"][:100]
                raise InputError(f"{path}: method {name} is not known; pass the file that defines it with --plugin.")
            known = find(about["method"])
            older = {name: value for part in reversed(known.__mro__) for name, value in vars(part).get("older", {}).items()}
            fitted = known(**checked_fields(known, older | about["fields"]))
            fitted.facts_ = dict(about["facts"])
            fitted.check()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None
        _, tensors = read_tensors(folder / "weights.safetensors", FORMAT)
        fitted.state_ = {name: np.array(value) for name, value in tensors.items()}
        fitted._folder = folder
        fitted.parts_ = split_parts(fitted)
        for i, one in enumerate([fitted, *fitted.parts_.values()]):
            if distribution := stored_name(distribution_name(i), hashes):
                one.source_distribution_ = SourceDistribution.load(folder / distribution, len(one.facts_["rois"]))
        if calibration := stored_name(NEW_SITE_CALIBRATION, hashes):
            fitted.new_site_ = NewSiteCalibration.load(folder / calibration)
        return fitted


@dataclass_transform()
def method(name: str, role: Role = "") -> Callable[[T], T]:
    """Decorator that makes a `Method` subclass a dataclass and registers it under a name."""

    def register(cls: T) -> T:
        registered = dataclasses.dataclass(cls)
        registered.name, registered.role = name, role
        METHODS[name] = registered
        return typing.cast(T, registered)

    return register


def make(name: str, variant: str | None = None, **fields: Any) -> Method:
    """Create a method by its registered name, with some fields changed; unknown names and invalid values are refused.

    Parameters
    ----------
    name : str
        A name in `m2lgdg.METHODS`; `m2lgdg methods` lists them.
    variant : str, optional
        A variant of the method, such as "small"; `m2lgdg methods NAME` lists them.
    **fields
        Fields (hyper-parameters) that differ from their defaults or from those of the variant.

    Returns
    -------
    Method
        Not fitted.

    Examples
    --------
    >>> import m2lgdg
    >>> m2lgdg.make("fc-svm", site_folds=3).fields()["site_folds"]
    3
    """
    if name not in METHODS:
        METHODS.define_estimator(name, fields)
    cls = find(name)
    if variant is not None:
        fields = variant_fields(name, cls.variants, variant) | fields
    created = cls(**checked_fields(cls, fields))
    created.check()
    return created


def variant_fields(name: str, variants: Mapping[str, Mapping[str, Any]], variant: str) -> dict[str, Any]:
    """Fields that a variant of a method changes."""
    if variant not in variants:
        raise InputError(f"method {name} has no variant {variant}{nearest(variant, variants)}")
    return dict(variants[variant])


def is_network(created: Method) -> bool:
    """Whether a method is a `DeepMethod`; if none was imported it is not, and PyTorch need not be."""
    deep = sys.modules.get("m2lgdg.deep")
    return deep is not None and isinstance(created, deep.DeepMethod)


def find(name: str) -> type[Method]:
    """Class of a method, by its registered name."""
    if name not in load_methods():
        raise InputError(f"method {name} is not known{nearest(name, METHODS)}")
    return METHODS[name]


def checked_fields(cls: type[Method], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with lists turned into tuples; an InputError for the first that is unknown or has the wrong type."""
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    checked = {}
    for key, given in fields.items():
        if key not in known:
            raise InputError(f"method {cls.name} has no field {key}{nearest(key, known)}")
        value: Any = tuple(given) if isinstance(given, list) else given
        if not _fits(value, hints[key]):
            if typing.get_origin(hints[key]) is Literal:
                choices = ", ".join(map(str, typing.get_args(hints[key])))
                raise InputError(f"method {cls.name}, field {key}: {shown(value)} is not one of {choices}.")
            kind = getattr(hints[key], "__name__", str(hints[key]))
            raise InputError(f"method {cls.name}, field {key}: {shown(value)} is not of type {kind}.")
        checked[key] = float(value) if hints[key] is float else value
    return checked


def shown(value: object) -> str:
    """`repr` of a value, cut to 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return "a number with too many digits"
    return text if len(text) <= 100 else f"{text[:99]}…"


def nearest(word: str, known: Any) -> str:
    """End of a message about an unknown name: '; did you mean X?', or the list of available names."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; available: {', '.join(known) or 'none'}."


def _fits(value: object, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is dict:
        return isinstance(value, dict)
    if origin is tuple:
        inside = parts[:1] * len(value) if isinstance(value, tuple) and parts[1:] == (...,) else parts
        return isinstance(value, tuple) and len(value) == len(inside) and all(map(_fits, value, inside))
    if hint is float:
        return isinstance(value, float) or (_fits(value, int) and abs(typing.cast(int, value)) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
