"""`Method`: two verbs, `fit` and `predict_proba`, and models on disk without pickle.

Everything that learns is a `Method`. A new one is a dataclass with `learn` and `score` under `@method("name")`, in one file:
the registry, the commands, the contract tests and the report find it.
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
from m2lgdg.metrics import THRESHOLD, logit, sigmoid
from m2lgdg.model.folder import FORMAT, LARGEST, NEW_SITE_CALIBRATION, SOURCE_DISTRIBUTION, digest, read_about, stored_name
from m2lgdg.model.new_site import NewSiteCalibration
from m2lgdg.model.out_of_distribution import SourceDistribution, flags, refuse_short_scans
from m2lgdg.registry import METHODS, load_methods
from m2lgdg.storage import InputError, file_hash, one_line, read_tensors, write_tensors, write_text

T = TypeVar("T", bound="type[Method]")
Role = Literal["", "headline", "default", "peer", "phenotypes"]


@dataclasses.dataclass
class Method:
    """A classifier of subjects; its dataclass fields are its hyper-parameters.

    A subclass writes `learn(source, seed, ...)`, which leaves all it learned in `state_` (arrays) and `facts_` (JSON), and
    `score(target)`, the probability of the positive class from these alone. Class attributes: `reference` (citation),
    `variants` (ablation -> changed fields), `space` (field -> values of a sensitivity sweep), `stochastic` (seeds matter).
    """

    name: ClassVar[str] = ""
    role: ClassVar[Role] = ""  # headline of reports, default of `m2lgdg fit`, simple peer, or phenotypes alone
    reference: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    stochastic: ClassVar[bool] = True
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}  # field -> least value, and what it must be below
    may_be_empty: ClassVar[tuple[str, ...]] = ()  # tuples of no value that mean something
    unused: ClassVar[tuple[str, ...]] = ()  # inherited fields that change nothing here
    remembers: ClassVar[tuple[str, ...]] = ()  # arrays of `state_` that hold source subjects themselves

    # Fitted on request; casts, because annotations would make them hyper-parameters.
    source_distribution_ = typing.cast(SourceDistribution | None, None)
    new_site_ = typing.cast(NewSiteCalibration | None, None)
    _folder = typing.cast(Path | None, None)  # where a method was loaded from

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
        """Learn from source subjects, all of whom have a label. Nothing else can reach the fitted method.

        `source_distribution` also fits the statistics behind out-of-distribution scores (seconds; studies do not need it).
        `new_site_calibration` also refits the method without each source site, or without each of `calibration_folds` groups
        of sites, to calibrate its probabilities for a site it has not seen. `predict_proba` and `threshold` then use it.
        """
        labels = set(source.labels.tolist())
        if labels != {0, 1}:
            missing = "subjects without a label" if -1 in labels else "one class only"
            raise InputError(f"method {self.name} cannot be fitted: the source has {missing}.")
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
            },
        }
        self._folder = self.new_site_ = None
        self.check()
        self.learn(source, seed=seed, device=device, progress=progress)
        self.source_distribution_ = SourceDistribution.fit(source) if source_distribution else None
        if new_site_calibration:

            def unseen(part: Cohort, rest: Cohort) -> npt.NDArray[np.float64]:
                return type(self)(**self.fields()).fit(part, seed=seed, device=device).predict_proba(rest)[:, 1]

            self.new_site_ = NewSiteCalibration.fit(source, unseen, calibration_folds, progress)
        return self

    def check(self) -> None:
        """Refuse fields that nothing can be learned with; integers count something and are 1 at least, or as their default."""
        bounds = {name: pair for cls in reversed(type(self).__mro__) for name, pair in vars(cls).get("bounds", {}).items()}
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, where = getattr(self, field.name), f"method {self.name}, field {field.name}"
            if field.name in self.unused and value != field.default:
                raise InputError(f"{where}: this method does not use it, so leave it at {field.default}.")
            if value == () and field.name not in self.may_be_empty:
                raise InputError(f"{where} is empty.")
            counts = int in (hints[field.name], *typing.get_args(hints[field.name]))
            first = min(1, field.default) if isinstance(field.default, int) else 1
            least, below = bounds.get(field.name, (first if counts else -math.inf, math.inf))
            for one in value if isinstance(value, tuple) else (value,):
                if not isinstance(one, int | float) or isinstance(one, bool):
                    continue
                if not abs(one) <= sys.float_info.max:  # integers may be beyond it, too
                    raise InputError(f"{where}: {shown(one)} is not a finite number.")
                if not one >= least:
                    raise InputError(f"{where}: {one} is too small, it is {least:g} at least.")
                if not one < below:
                    raise InputError(f"{where}: {one} is too large, it is below {below:g}.")

    def predict_proba(self, target: Cohort) -> npt.NDArray[np.float64]:
        """(subject, class) probabilities: column 1 is the patient. Labels, sites and ids of the target are not looked at."""
        seen = self.visible(target)
        if not len(target):
            return np.empty((0, 2))
        with self.doubted():
            positive = np.asarray(self.score(seen), dtype=np.float64)
        if positive.shape != (len(target),) or not ((positive >= 0) & (positive <= 1)).all():
            wrong = InputError if self._folder else ValueError  # what a folder holds is the user's, else it is our mistake
            raise wrong(f"method {self.name} did not give one probability between 0 and 1 for each subject.")
        if self.recalibration:
            slope, offset = self.recalibration
            positive = sigmoid(slope * logit(positive) + offset)
        return np.stack([1 - positive, positive], axis=1)

    @property
    def recalibration(self) -> tuple[float, float] | None:
        """Slope and offset of the logit of what `score` says: a site's own, else those that source sites left out promise."""
        if "local" in self.facts_:
            return float(self.facts_["local"]["slope"]), float(self.facts_["local"]["offset"])
        return (self.new_site_.slope, self.new_site_.offset) if self.new_site_ else None

    @property
    def threshold(self) -> float:
        """The probability from which a subject is decided to be a patient: a site's own, else the promise's, else 0.5."""
        promised = self.new_site_.threshold if self.new_site_ else THRESHOLD
        return float(self.facts_.get("local", {}).get("threshold", promised))

    def flags(self, target: Cohort) -> list[list[str]]:
        """For each subject, in short words, why its prediction may be worse than others."""
        self._check_target(target)
        return flags(target, self.facts_["inputs"], self.source_distribution_)

    def visible(self, target: Cohort) -> Cohort:
        """The target as `score` sees it: no label, site or id; phenotypes that the target lacks are there, all missing."""
        self._check_target(target)
        inputs, table = self.facts_["inputs"], target.phenotypes
        lacking = [name for name in inputs if name not in table.columns or (table[name] == "").all()]
        filled = target._changed(phenotypes=table.assign(**dict.fromkeys(lacking, np.nan)))
        return filled.with_inputs(inputs, allow_proxies=True).unlabelled()

    @contextlib.contextmanager
    def doubted(self) -> Iterator[None]:
        """Around all that uses weights: a folder can be whole by its hashes and hold arrays of other names or shapes."""
        quiet = np.errstate() if self._folder is None else np.errstate(all="ignore")  # nonsense gets a sentence, no warnings
        try:
            with quiet:
                yield
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError) as error:
            if self._folder is None:
                raise
            raise InputError(f"{self._folder}: its weights do not fit method {self.name} ({one_line(error)[:200]}).") from error

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Fill `state_` and `facts_` from source."""
        raise NotImplementedError(f"{type(self).__name__} must write learn")

    def score(self, target: Cohort) -> npt.NDArray[np.float64]:
        """(subject,) probability of the positive class."""
        raise NotImplementedError(f"{type(self).__name__} must write score")

    def _check_target(self, target: Cohort) -> None:
        if not hasattr(self, "state_"):
            raise InputError(f"method {self.name} is not fitted yet.")
        rois = self.facts_["rois"]
        if len(target.rois) != len(rois):
            trained = f"the model was trained on {len(rois)} ROIs ({self.facts_['atlas'] or 'atlas not named'})"
            raise InputError(f"{trained}, the cohort has {len(target.rois)}.")
        for i, (mine, yours) in enumerate(zip(rois, target.rois, strict=True), start=1):
            if mine != yours:
                raise InputError(f"ROI {i} is {mine} in the model but {yours} in the cohort: another atlas or another order.")
        refuse_short_scans(target)

    def fields(self) -> dict[str, Any]:
        """The hyper-parameters."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def save(self, folder: str | Path) -> Path:
        """Write the fitted method as a folder: weights.safetensors, method.json and, where it has them, limits and promise."""
        from m2lgdg import __version__

        if not hasattr(self, "state_"):
            raise InputError(f"method {self.name} is not fitted yet, there is nothing to save.")
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
        if self.source_distribution_:
            names.append(self.source_distribution_.save(folder / SOURCE_DISTRIBUTION).name)
        if self.new_site_:
            names.append(self.new_site_.save(folder / NEW_SITE_CALIBRATION).name)
        about["hashes"] = {name: file_hash(folder / name, LARGEST) for name in names} | {"method.json": digest(about)}
        write_text(folder / "method.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Method:
        """Read a fitted method; nothing in the folder is executed."""
        folder = Path(folder)
        path = folder / "method.json"
        if not os.path.lexists(path):
            raise InputError(f"{folder} is no model folder: it has no method.json.")
        try:
            about, hashes = read_about(folder)
            if about["method"] not in load_methods():
                name = about["method"][:100]
                raise InputError(f"{path}: method {name} is not known here; give the file that defines it (--plugin).")
            known = find(about["method"])
            fitted = known(**checked_fields(known, about["fields"]))
            fitted.facts_ = dict(about["facts"])
            fitted.check()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise InputError(f"{path} is damaged ({one_line(error)[:200]}).") from None
        _, tensors = read_tensors(folder / "weights.safetensors", FORMAT)
        fitted.state_ = {name: np.array(value) for name, value in tensors.items()}
        if distribution := stored_name(SOURCE_DISTRIBUTION, hashes):
            fitted.source_distribution_ = SourceDistribution.load(folder / distribution, len(fitted.facts_["rois"]))
        if calibration := stored_name(NEW_SITE_CALIBRATION, hashes):
            fitted.new_site_ = NewSiteCalibration.load(folder / calibration)
        fitted._folder = folder
        return fitted


@dataclass_transform()
def method(name: str, role: Role = "") -> Callable[[T], T]:
    """Register a `Method` subclass under a name and make it a dataclass."""

    def register(cls: T) -> T:
        made = dataclasses.dataclass(cls)
        made.name, made.role = name, role
        METHODS[name] = made
        return typing.cast(T, made)

    return register


def make(name: str, **fields: Any) -> Method:
    """A method by its registered name, with some fields changed; unknown names and fields and wrong values are refused."""
    cls = find(name)
    made = cls(**checked_fields(cls, fields))
    made.check()
    return made


def find(name: str) -> type[Method]:
    """A method's class by its registered name."""
    if name not in load_methods():
        raise InputError(f"method {name} is not known{nearest(name, METHODS)}")
    return METHODS[name]


def checked_fields(cls: type[Method], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with lists turned into tuples, or an InputError about the first that is unknown or of a wrong type."""
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    checked = {}
    for key, given in fields.items():
        if key not in known:
            raise InputError(f"method {cls.name} has no field {key}{nearest(key, known)}")
        value: Any = tuple(given) if isinstance(given, list) else given
        if not _fits(value, hints[key]):
            if typing.get_origin(hints[key]) is Literal:
                one_of = ", ".join(map(str, typing.get_args(hints[key])))
                raise InputError(f"method {cls.name}, field {key}: {shown(value)} is not one of {one_of}.")
            kind = getattr(hints[key], "__name__", str(hints[key]))
            raise InputError(f"method {cls.name}, field {key}: {shown(value)} is not of type {kind}.")
        checked[key] = float(value) if hints[key] is float else value
    return checked


def shown(value: object) -> str:
    """A value as Python writes it, of bearable length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of very many digits"
    return text if len(text) <= 100 else f"{text[:99]}…"


def nearest(word: str, known: Any) -> str:
    """The end of a message: '; did you mean X?' or the list of what is known."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known) or 'none'}."


def _fits(value: object, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        inside = parts[:1] * len(value) if isinstance(value, tuple) and parts[1:] == (...,) else parts
        return isinstance(value, tuple) and len(value) == len(inside) and all(map(_fits, value, inside))
    if hint is float:
        return isinstance(value, float) or (_fits(value, int) and abs(typing.cast(int, value)) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
