"""`Model`: one fitted method, or one for each of several atlases, as it is calibrated, saved and applied to new subjects.

`m2lgdg.make` creates it, `Model.fit` fits it, and `Model.load` reads it from a folder; `deploy` adapts it to a site.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import sharing_features
from m2lgdg.data.atlases import are_identified
from m2lgdg.method import Floats, Method, both_classes, chosen_atlases, need_labels, need_scans, source_facts
from m2lgdg.methods.together import Sources, fitting_together
from m2lgdg.metrics import THRESHOLD, logit, sigmoid
from m2lgdg.model.atlases import (
    PREFIX,
    MemberTarget,
    fit_members,
    mean_calibration,
    mean_of,
    new_member,
    targets_of,
    weigh_tables,
)
from m2lgdg.model.folder import ABOUT, NEW_SITE_CALIBRATION, distribution_name, read_weights, reading_about, write_folder
from m2lgdg.model.new_site import NewSiteCalibration, sites_left_out
from m2lgdg.model.out_of_distribution import TABLE, SourceDistribution, flags
from m2lgdg.model.packaged import model_folder
from m2lgdg.model.site_level import SiteLevel, prevalence_shift, source_prevalence
from m2lgdg.notebook import shown_table
from m2lgdg.own_code import predicting_code
from m2lgdg.registry import METHODS, create
from m2lgdg.scans import SERIES
from m2lgdg.storage import InputError

UNNAMED = "rois by number: atlas not named"
# Quality flags that are the same in all atlases
OF_SUBJECT = ("phenotypes missing", "short scan", "no ", "units of ", "failed segmentation")


class Model:
    """A fitted method, or one for each of several atlases, with calibration, source distribution and the correction for a site.

    It has the fields and hooks of its `method`.
    """

    def __init__(self, method: Method) -> None:
        self.members: dict[str, Method] = {}  # fitted method of each atlas; empty before `fit`
        self.facts_: dict[str, Any] = {}  # ROIs, inputs, source sites, and the calibration to a site
        self.mean_recalibration = np.array([1.0, 0.0])  # of the mean logit of several members
        self.source_distributions: dict[str, SourceDistribution] = {}  # of each atlas, if they were fitted
        self.new_site_: NewSiteCalibration | None = None
        self.code_ = ""  # hash of the code that fitted it
        self.method = method  # last, as fields are set on it, and m2lgdg-connectome has one called `members`
        if hasattr(method, "state_"):
            self._hold({method.facts_["atlas"]: method}, method.facts_)
            self.code_ = "" if method._folder else code_of_model(self.name)

    def _hold(self, members: dict[str, Method], facts: dict[str, Any]) -> None:
        """Take fitted members, and the facts of all of them."""
        self.members, self.facts_ = members, facts
        if len(members) > 1:
            first = next(iter(members.values())).facts_
            self.facts_ |= {name: first[name] for name in ("rois", "atlas", "inputs", "scans") if name in first}
            self.facts_["parts"] = {name: member.facts_ for name, member in members.items()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "method" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.method, name)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.method.fields() if "method" in self.__dict__ else {}
        object.__setattr__(self.method if name in fields and name not in self.__dict__ else self, name, value)

    @property
    def name(self) -> str:
        """Registered name of the method."""
        return self.method.name

    def fields(self) -> dict[str, Any]:
        """Hyper-parameters by name."""
        return self.method.fields()

    @property
    def state_(self) -> dict[str, npt.NDArray[Any]]:
        """Learned arrays, named as in a model folder: those of several members start with the number of their atlas."""
        self._check_fitted()
        if self._alone:
            return next(iter(self.members.values())).state_
        numbered = enumerate(self.members.values())
        state = {f"{PREFIX.format(i)}{name}": value for i, member in numbered for name, value in member.state_.items()}
        return state | {"calibration": self.mean_recalibration}

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
        """Fit on source subjects, which must all have a label. Nothing else can reach the fitted model.

        Parameters
        ----------
        source : Cohort
        seed : int
        device : str
            "cpu", "cuda", "mps" or "auto"; linear methods use the CPU.
        progress : callable, optional
            Called with the epoch, the number of epochs and, for networks, the losses by name.
        source_distribution : bool
            Also fit the statistics behind out-of-distribution scores (seconds; studies do not need it).
        new_site_calibration : bool
            Also refit without each source site, to calibrate `predict_proba` and `threshold` for an unseen site.
        calibration_folds : int, optional
            Refit without each of this many groups of sites instead, which is faster.

        Returns
        -------
        Model

        Examples
        --------
        >>> import m2lgdg
        >>> fold = next(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny")))
        >>> fitted = m2lgdg.make("fc-logistic").fit(fold.source)
        >>> fitted.predict_proba(fold.target).shape
        (10, 2)
        """
        need_labels(self.name, source)
        self.method.check()
        order = np.argsort(source.subjects, kind="stable")
        if not self.method.stochastic and (np.diff(order) < 0).any():
            source = source.select(order)  # rounding would choose between penalties of nearly the same AUC
        names = chosen_atlases(self.method.atlases, source)
        need_scans(self.method, source)
        settings: dict[str, Any] = {"seed": seed, "device": device, "progress": progress}
        all_scans = [one.scans for one in source.each_atlas()]
        self.new_site_, self.source_distributions = None, {}
        self.code_ = code_of_model(self.name)
        with contextlib.ExitStack() as shared:
            if new_site_calibration:
                cuts = sites_left_out(source, calibration_folds)
                shared.enter_context(sharing_features(*all_scans))
                shared.enter_context(fitting_together(Sources(source, [np.arange(len(source)), *(train for train, _ in cuts)])))
            if len(names) == 1:
                self.method.fit(source, **settings)
                self._hold({names[0]: self.method}, self.method.facts_)
            else:
                facts, members = (
                    source_facts(source, source.findings, seed),
                    fit_members(self.method, source, names, **settings),
                )
                notes = [f"{name}: {note}" for name, one in members.items() for note in one.facts_.get("notes", ())]
                self._hold(members, facts | ({"notes": notes} if notes else {}))
                weigh_tables(self.members, source)
                self.mean_recalibration = np.array(mean_calibration(self.members, source))
            if source_distribution:
                for name, member in self.members.items():
                    seen = source.parcellation(name)
                    self.source_distributions[name] = SourceDistribution.fit(seen, member.table_rows(seen))
            if new_site_calibration:

                def predict_left_out(rest: Cohort, left_out: Cohort) -> Floats:
                    refitted = Model(type(self.method)(**self.fields())).fit(rest, seed=seed, device=device)
                    return refitted.predict_proba(left_out)[:, 1]

                self.new_site_ = NewSiteCalibration.fit(source, predict_left_out, calibration_folds, progress)
        return self

    def predict_proba(self, target: Cohort) -> Floats:
        """Probability of each class. Labels, sites and ids of the target are not used.

        Parameters
        ----------
        target : Cohort
            Subjects with the ROIs of source. A subject may lack some of several atlases.

        Returns
        -------
        ndarray of shape (subject, 2)
            Column 1 is the patient class.
        """
        proba = self._uncalibrated(target)
        if not self.recalibration or not len(target):
            return proba
        slope, offset = self.recalibration
        return both_classes(sigmoid(slope * logit(proba[:, 1]) + offset))

    def _uncalibrated(self, target: Cohort) -> Floats:
        self._check_fitted()
        targets = targets_of(self.members, target)
        if self._alone or not len(target):
            return targets[0].member.predict_proba(targets[0].target)
        logits = [(one.rows, logit(one.member.predict_proba(one.target)[:, 1])) for one in targets]
        with self.method.checking_weights():
            slope, offset = self.mean_recalibration
            positive = sigmoid(slope * mean_of(logits, len(target)) + offset)
        return both_classes(targets[0].member.probabilities(positive, len(target)))

    @property
    def recalibration(self) -> tuple[float, float] | None:
        """Slope and offset of the logit: of local calibration, or of new-site calibration and intercept correction; or None."""
        if "local" in self.facts_:
            return float(self.facts_["local"]["slope"]), float(self.facts_["local"]["offset"])
        level = self.site_level
        if level is None and self.new_site_ is None:
            return None
        slope, offset = (self.new_site_.slope, self.new_site_.offset) if self.new_site_ else (1.0, 0.0)
        return slope, offset if level is None else offset + level.shift

    @property
    def site_level(self) -> SiteLevel | None:
        """Intercept correction for the site that the model was adapted to, or None."""
        return SiteLevel.stored(self.facts_)

    @property
    def threshold(self) -> float:
        """Probability from which a subject is classified as patient; it moves with a given prevalence (`m2lgdg adapt`)."""
        default = self.new_site_.threshold if self.new_site_ else THRESHOLD
        moved = self._given_shift()
        if moved:  # with the probabilities, so that a given prevalence alone changes no decision
            return float(sigmoid(logit(np.array(default)) + moved))
        return float(self.facts_.get("local", {}).get("threshold", default))

    def _given_shift(self) -> float:
        level = self.site_level
        return 0.0 if level is None or level.assumed else prevalence_shift(level.prevalence, source_prevalence(self.facts_))

    def conformal_sets(self, proba: Floats, coverage: float = 0.9) -> npt.NDArray[np.str_]:
        """`NewSiteCalibration.sets` of probabilities of this model, whatever prevalence they assume."""
        if self.new_site_ is None:
            raise InputError("the model has no new-site calibration, so it has no conformal sets.")
        moved = self._given_shift()
        return self.new_site_.sets(sigmoid(logit(proba) - moved) if moved else proba, coverage)

    def flags(self, target: Cohort) -> list[list[str]]:
        """Quality flags of each subject: short reasons why its prediction may be less reliable, with the atlas if of one."""
        raised: list[list[str]] = [[] for _ in range(len(target))]
        lacking = [list(self.members) for _ in range(len(target))]
        for atlas, member, rows, seen in self._targets(target):
            with member.checking_weights():
                own, tables = member.method_flags(seen), _table_rows(member, seen)
            common = flags(seen, member.facts_["inputs"], self.source_distributions.get(atlas), tables)
            known = are_identified(seen.rois, member.facts_["atlas"], seen.atlas)
            for row, one, added in zip(rows, common, own, strict=True):
                lacking[row].remove(atlas)
                named = [
                    flag if self._alone or flag.startswith(OF_SUBJECT) else f"{flag} ({atlas})"
                    for flag in one + added + [UNNAMED] * (not known)
                ]
                raised[row] += [flag for flag in named if flag not in raised[row]]
        return [
            some + ([f"atlas missing: {' '.join(names)}"] if names else []) for some, names in zip(raised, lacking, strict=True)
        ]

    def ood_scores(self, target: Cohort) -> dict[str, Floats]:
        """Out-of-distribution scores by name; above 1 is outside of source, NaN without the atlas of the score."""
        scores: dict[str, Floats] = {}
        for atlas, member, rows, seen in self._targets(target) if self.source_distributions else ():
            with member.checking_weights():
                tables = _table_rows(member, seen)
            for kind, values in self.source_distributions[atlas].scores(seen, tables).items():
                name = kind if self._alone or kind.startswith(("phenotypes", TABLE)) else f"{kind}_{atlas}"
                scores.setdefault(name, np.full(len(target), np.nan))[rows] = values
        return scores

    def having_tables(self, target: Cohort) -> dict[str, int]:
        """Number of subjects in whose decision each table has a part."""
        having: dict[str, set[int]] = {}
        for _, member, rows, seen in self._targets(target):
            with member.checking_weights():
                tables = _table_rows(member, seen)
            for name, each in tables.items():
                having.setdefault(name, set()).update(rows[~np.isnan(each.cleaned).all(axis=1)].tolist())
        return {name: len(subjects) for name, subjects in having.items()}

    def compare(self, target: Cohort) -> list[str]:
        """`SourceDistribution.compare` of a whole target, if there is one."""
        targets = self._targets(target)  # the measures are of subjects and scans, and the same in all atlases of series
        first = next((one for one in targets if one.target.values == SERIES), targets[0])
        return self.source_distributions[first.atlas].compare(first.target) if self.source_distributions else []

    @property
    def source_distribution_(self) -> SourceDistribution | None:
        """Source distribution of the first atlas, or None."""
        return next(iter(self.source_distributions.values()), None)

    @property
    def _alone(self) -> bool:
        return len(self.members) == 1

    def _targets(self, target: Cohort) -> list[MemberTarget]:
        self._check_fitted()
        return [one._replace(target=one.member.checked_target(one.target)) for one in targets_of(self.members, target)]

    def _check_fitted(self) -> None:
        if not self.members:
            raise InputError(f"method {self.name} is not fitted yet.")

    def _repr_html_(self) -> str:
        """Fields and source sites, for notebooks."""
        lines = (self.method.__doc__ or "").strip().splitlines()[:1]
        counts = self.facts_["source"]["sites"].values() if self.facts_ else ()
        patients, controls = (sum(site[key] for site in counts) for key in ("patients", "controls"))
        fitted = f"Fitted on {patients} patients and {controls} controls of {len(counts)} sites."
        texts = {field: f"{value:.3g}" if isinstance(value, float) else str(value) for field, value in self.fields().items()}
        rows = [(field, text if len(text) <= 80 else f"{text[:79]}…") for field, text in texts.items()]
        return shown_table(f"Method {self.name}", ("field", "value"), rows, [*lines, fitted if counts else "Not fitted."])

    def save(self, folder: str | Path) -> Path:
        """Write a model folder: weights, method.json and, if fitted, source distributions and new-site calibration.

        Parameters
        ----------
        folder : str or Path

        Returns
        -------
        Path

        Examples
        --------
        >>> import tempfile
        >>> import m2lgdg
        >>> cohort = m2lgdg.make_cohort("tiny")
        >>> folder = m2lgdg.make("fc-logistic").fit(cohort).save(tempfile.mkdtemp())
        >>> m2lgdg.Model.load(folder).name
        'fc-logistic'
        """
        if not self.members:
            raise InputError(f"method {self.name} is not fitted yet; there is nothing to save.")
        for member in self.members.values():
            member.complete_state()
        folder, about = Path(folder), {"method": self.name, "fields": self.fields(), "facts": self.facts_}
        about |= {"code": self.code_} if self.code_ else {}
        numbers = {atlas: i for i, atlas in enumerate(self.members, start=not self._alone)}
        files = [one.save(folder / distribution_name(numbers[atlas])) for atlas, one in self.source_distributions.items()]
        if self.new_site_:
            files.append(self.new_site_.save(folder / NEW_SITE_CALIBRATION))
        return write_folder(folder, about, self.state_, files)

    @classmethod
    def load(cls, folder: str | Path) -> Model:
        """Load a fitted model from its folder; no code in the folder is run."""
        folder = Path(folder)
        with reading_about(folder) as (about, hashes):
            METHODS.define_estimator(about["method"], about["fields"], run=False)
            if about["method"] not in METHODS:
                name = " ".join(about["method"][:100].split())
                raise InputError(f"{folder / ABOUT}: method {name} is not known; pass the file that defines it with --plugin.")
            former = METHODS[about["method"]].former_fields  # the arrays hold what they did
            method = create(about["method"], **{name: value for name, value in about["fields"].items() if name not in former})
        model, facts, state = cls(method), dict(about["facts"]), read_weights(folder)
        model.code_ = about.get("code", "")
        method._folder = folder
        if facts.get("parts"):
            members = {name: new_member(method) for name in facts["parts"]}
            for i, (name, member) in enumerate(members.items()):
                prefix = PREFIX.format(i)
                own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                member.state_ = {method.former_arrays.get(key, key): value for key, value in own.items()}
                member.facts_, member._folder = dict(facts["parts"][name]), folder
            model.mean_recalibration = state.get("calibration", np.full(2, np.nan))
        else:
            method.state_ = {method.former_arrays.get(key, key): value for key, value in state.items()}
            method.facts_ = facts
            members = {facts["atlas"]: method}
        model._hold(members, facts)
        for i, (name, member) in enumerate(members.items(), start=len(members) > 1):
            if (file := distribution_name(i)) in hashes:
                columns = table_columns(member)
                model.source_distributions[name] = SourceDistribution.load(folder / file, len(member.facts_["rois"]), columns)
        if NEW_SITE_CALIBRATION in hashes:
            model.new_site_ = NewSiteCalibration.load(folder / NEW_SITE_CALIBRATION)
        return model


def _table_rows(member: Method, target: Cohort) -> dict[str, Any]:
    return member.table_rows(member.visible(target)) if table_columns(member) else {}


def table_columns(member: Method) -> dict[str, int]:
    """Number of columns of each table that a fitted method takes, or one of those that it averages."""
    of_methods = [member.facts_, *member.facts_.get("members", {}).values()]
    return {name: len(about["columns"]) for facts in of_methods for name, about in facts.get("tables", {}).items()}


def code_of_model(method: str) -> str:
    """Hash of the code that fits and predicts with a method: of the package, and of the plugin that defines it."""
    plugin = METHODS.plugin_of(method)
    return predicting_code() + (f"-{METHODS.plugin_hash(plugin)[:16]}" if plugin else "")


def make(name: str, variant: str | None = None, **fields: Any) -> Model:
    """Create a model by the registered name of its method, with some fields changed; invalid values are refused.

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
    Model
        Not fitted.

    Examples
    --------
    >>> import m2lgdg
    >>> m2lgdg.make("fc-svm", site_folds=3).fields()["site_folds"]
    3
    """
    return Model(create(name, variant, **fields))


def load(model: str | Path) -> Model:
    """Load a fitted model: one that comes with the package by its name, any other from its folder.

    Parameters
    ----------
    model : str or Path
        Name of a packaged model, such as "abide-aal" (`m2lgdg models` lists them), or a model folder.

    Returns
    -------
    Model

    Examples
    --------
    >>> import tempfile
    >>> import m2lgdg
    >>> folder = m2lgdg.make("fc-logistic").fit(m2lgdg.make_cohort("tiny")).save(tempfile.mkdtemp())
    >>> m2lgdg.load(folder).name
    'fc-logistic'
    """
    return Model.load(model_folder(model))
