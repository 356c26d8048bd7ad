"""The mean of fitted methods: each decides on its own, and their calibrated logits are averaged.

Methods that err on different subjects are better together. `linear_head.py` does the same within one network.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.fields import checked_fields, variant_fields
from m2lgdg.method import ANY_SCAN, Floats, Method, method
from m2lgdg.metrics import logit, sigmoid
from m2lgdg.registry import find
from m2lgdg.storage import InputError

PREFIX = "method-{}."  # starts the names of the arrays of a member, numbered from 0


@method("average")
class Average(Method):
    """Mean of the calibrated logits of two or three methods, each fitted on the same source.

    A method is named as NAME or NAME:VARIANT. `settings` holds changed fields of each, under that name; in a study file:
    [method.average.settings."erm:phenotypes"]. Variant `quick` has the quick form of the network.
    """

    methods: tuple[str, ...] = ("m2lgdg-connectome", "connectome-adaptive")
    settings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    takes = ANY_SCAN
    variants = {
        "quick": {"methods": ("m2lgdg-connectome:quick", "connectome-adaptive")},
        "small": {"methods": ("fc-logistic", "phenotype-logistic")},
    }

    def check(self) -> None:
        super().check()
        if len({given.removesuffix(":") for given in self.methods}) != len(self.methods) or not 2 <= len(self.methods) <= 3:
            raise InputError(f"method {self.name}, field methods: name two or three different methods.")
        for given in (*self.methods, *self.settings):
            if given.partition(":")[0] == self.name or given not in self.methods:
                raise InputError(f"method {self.name}: {given} is not one of the methods that can be averaged here.")
        if not all(isinstance(one, dict) for one in self.settings.values()):
            raise InputError(f"method {self.name}, field settings: give a table of fields for each method.")
        for given, one in zip(self.methods, self._made(), strict=True):
            if one.sees_batch:  # its track needs the other subjects of a site, which `score` does not have
                raise InputError(f"method {self.name}: {given} needs other subjects of a site and cannot be averaged.")
            if "estimator" in one.fields() and type(one).__module__.startswith("m2lgdg."):  # other processes do not know it
                raise InputError(f"method {self.name}: {given} is defined in a study file; to average it, write a plugin.")
            if "atlases" in one.unused and self.atlases != type(self).atlases:
                raise InputError(f"method {self.name}: {given} takes one atlas only.")

    def needs_series(self) -> str:
        """As the first of the methods that needs them."""
        needing = ((given, one.needs_series()) for given, one in zip(self.methods, self._made(), strict=True))
        return next((f"method {self.name} of {given}" for given, what in needing if what), "")

    def need_inputs(self, source: Cohort) -> None:
        for one in self._made():
            one.need_inputs(source)

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        self._fitted = [one.fit(source, seed=seed, device=device, progress=progress) for one in self._made()]
        taken = {name for one in self._fitted for name in one.facts_["inputs"]}
        self.facts_["inputs"] = [name for name in source.inputs if name in taken]
        named = zip(self.methods, self._fitted, strict=True)
        notes = [f"{given}: {note}" for given, one in named for note in one.facts_.get("notes", ())]
        self.facts_ |= {"notes": notes} if notes else {}
        self._collect()

    def complete_state(self) -> None:
        for one in self.averaged.values():
            one.complete_state()
        self._collect()

    def _collect(self) -> None:
        self.facts_["members"] = {given: one.facts_ for given, one in self.averaged.items()}
        numbered = enumerate(self.averaged.values())
        self.state_ = {f"{PREFIX.format(i)}{name}": value for i, one in numbered for name, value in one.state_.items()}

    def with_averaged(self, fitted: Sequence[Method], facts: dict[str, Any]) -> Self:
        """The same average with other fitted methods and facts, for a copy that is shared."""
        other = copy.copy(self)
        other._fitted, other.facts_ = list(fitted), dict(facts)
        other._collect()
        return other

    def _made(self) -> list[Method]:
        made = []
        for given in self.methods:
            name, _, variant = given.partition(":")
            cls = find(name)
            fields = variant_fields(name, cls.variants, variant) if variant else {}
            made.append(cls(**{"atlases": "first"} | checked_fields(cls, fields | self.settings.get(given, {}))))
            made[-1].check()
        return made

    @property
    def averaged(self) -> dict[str, Method]:
        """The fitted methods, by their entry in `methods`."""
        if not hasattr(self, "_fitted"):  # from a model folder
            stored, made = self.facts_.get("members", {}), self._made()
            if set(stored) != set(self.methods):
                raise InputError(f"{self._folder}: its facts are not those of the methods that it averages.")
            for i, (given, one) in enumerate(zip(self.methods, made, strict=True)):
                prefix = PREFIX.format(i)
                one.state_ = {name.removeprefix(prefix): v for name, v in self.state_.items() if name.startswith(prefix)}
                one.facts_, one._folder = stored[given], self._folder
            self._fitted = made
        return dict(zip(self.methods, self._fitted, strict=True))

    def score(self, target: Cohort) -> Floats:
        return sigmoid(np.mean([logit(one.predict_proba(target)[:, 1]) for one in self.averaged.values()], axis=0))

    def held_out_logits(self) -> Floats | None:
        known = [values for one in self.averaged.values() if (values := one.held_out_logits()) is not None]
        return np.mean(known, axis=0) if len(known) == len(self.methods) else None

    def method_flags(self, target: Cohort) -> list[list[str]]:
        each = zip(*(one.method_flags(target) for one in self.averaged.values()), strict=True)
        return [list(dict.fromkeys(flag for raised in of_subject for flag in raised)) for of_subject in each]

    def table_rows(self, target: Cohort) -> dict[str, Any]:
        return {name: rows for one in self.averaged.values() for name, rows in one.table_rows(target).items()}

    @property
    def uses_amplitude(self) -> bool:
        return any(one.uses_amplitude for one in self.averaged.values())

    @property
    def remembers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Arrays of the methods that hold data of single source subjects."""
        return tuple(f"{PREFIX.format(i)}{name}" for i, one in enumerate(self.averaged.values()) for name in one.remembers)
