"""Search of a method's fields inside source: trials are scored at left-out source sites, and the best is fitted on all of it.

`study.cells` calls it for the methods with a section [tune.NAME] in the study file. It is given the source of a cell and no
more, so that the target cannot reach it.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import auc
from m2lgdg.model.model import Model
from m2lgdg.registry import create, find
from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError, install_command, missing_libraries, needing

MOST = 1_000_000  # combinations of listed values
Score = Callable[[dict[str, Any]], float]


class Range(BaseModel):
    """Values between two ends, which Optuna searches."""

    model_config = ConfigDict(extra="forbid", strict=True)

    low: int | float
    high: int | float
    log: bool = False


class Tune(BaseModel):
    """Keys of a section [tune.NAME]."""

    model_config = ConfigDict(extra="forbid", strict=True)

    fields: dict[str, list[Any] | Range] = Field(min_length=1, description="values of each field, or {low, high, log}")
    trials: int | None = Field(default=None, ge=1, le=100_000, description="at most so many; all combinations by default")
    folds: int = Field(default=5, ge=2, le=1000, description="folds of whole source sites")

    @property
    def ranges(self) -> dict[str, Range]:
        """Fields that are not lists of values."""
        return {name: values for name, values in self.fields.items() if isinstance(values, Range)}

    @property
    def combinations(self) -> int:
        """Number of combinations of listed values."""
        return math.prod(len(values) for values in self.fields.values() if isinstance(values, list))

    @property
    def count(self) -> int:
        """Number of trials of each cell."""
        return self.trials or self.combinations if self.ranges else min(self.combinations, self.trials or self.combinations)

    def check(self, name: str, fields: Mapping[str, Any]) -> None:
        """Refuse a space that a method cannot search from these fields."""
        for field, values in self.fields.items():
            where = f"field {field}"
            if isinstance(values, Range):
                if not (math.isfinite(values.low) and math.isfinite(values.high) and values.low < values.high):
                    raise InputError(f"{where}: low must be below high, and both finite.")
                if values.log and values.low <= 0:
                    raise InputError(f"{where}: with log, low must be above 0.")
            elif not values or any(values.count(value) > 1 for value in values):
                raise InputError(f"{where}: the list is empty, or a value is listed twice.")
            for value in [values.low, values.high] if isinstance(values, Range) else values:
                create(name, **(dict(fields) | {field: value}))
        if self.ranges and self.trials is None:
            raise InputError("key trials is missing: a range has no end of values.")
        if self.combinations > MOST:
            raise InputError(f"{self.combinations} combinations of values are more than {MOST}; list fewer.")
        if self.ranges and (missing := missing_libraries("optuna")):
            raise InputError(f"a range needs {missing[0]}; list values, or install it with: {install_command('optuna')}")


class Found(NamedTuple):
    """Fields of the best trial, and what a record keeps of the search: its number of trials, its score and all others."""

    fields: dict[str, Any]
    facts: dict[str, Any]


def search(space: Tune, name: str, fields: Mapping[str, Any], source: Cohort, *, seed: int, device: str) -> Found:
    """Try the fields of a space at left-out sites of source.

    The score of a trial is its AUC at these sites, mean over those with both classes. Of equal scores the first counts.
    """
    folds = site_folds(source.sites, source.labels, space.folds)
    if not folds:
        raise InputError(f"[tune.{name}]: no source site can be left out with both classes in the others.")

    def score(changes: dict[str, Any]) -> float:
        held_out = np.full(len(source), np.nan)  # probability of each subject by a fit without its site
        try:
            for train, test in folds:
                fitted = Model(create(name, **(dict(fields) | changes))).fit(source.select(train), seed=seed, device=device)
                held_out[test] = fitted.predict_proba(source.select(test))[:, 1]
        except Exception as error:
            error.add_note(f"in a trial of tune: {changes}")
            raise
        return mean_area(source, held_out)

    trials = list(_asked(space, name, seed, score) if space.ranges else _listed(space, seed, score))
    areas = [area for _, area in trials]
    best = areas.index(max(areas))
    listed = [{"fields": changes, "AUC": area} for changes, area in trials]
    facts = {"trials": len(trials), "best": best, "AUC": areas[best], "folds": len(folds), "tried": listed}
    return Found(dict(fields) | trials[best][0], facts)


def mean_area(source: Cohort, held_out: npt.NDArray[np.float64]) -> float:
    """AUC within each site, mean over sites with both classes held out; over all subjects if there is no such site."""
    known = ~np.isnan(held_out)
    areas = [
        auc(source.labels[rows], held_out[rows]) for site in source.site_names if (rows := known & (source.sites == site)).any()
    ]
    within = [area for area in areas if not np.isnan(area)]
    area = float(np.mean(within)) if within else float(auc(source.labels[known], held_out[known]))
    if np.isnan(area):
        raise InputError("the trials of tune cannot be compared, because only one class is held out.")
    return area


def _listed(space: Tune, seed: int, score: Score) -> Iterator[tuple[dict[str, Any], float]]:
    """All combinations of values in their order, or as many as there are trials, drawn by the seed."""
    lists = [values for values in space.fields.values() if isinstance(values, list)]
    chosen: Iterable[int] = range(space.combinations)
    if space.count < space.combinations:
        chosen = sorted(np.random.default_rng(seed).choice(space.combinations, space.count, replace=False).tolist())
    sizes = [len(values) for values in lists]
    for number in chosen:
        places = np.unravel_index(number, sizes)
        changes = {field: values[int(place)] for field, values, place in zip(space.fields, lists, places, strict=True)}
        yield changes, score(changes)


def _asked(space: Tune, name: str, seed: int, score: Score) -> Iterator[tuple[dict[str, Any], float]]:
    """Trials that Optuna's TPE proposes one after the other, by the seed."""
    with needing("optuna", f"[tune.{name}]: a range"):
        import optuna
    logged = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        hints = typing.get_type_hints(find(name))
        for _ in range(space.count):
            trial = study.ask()
            changes = {field: _suggested(trial, field, values, hints[field]) for field, values in space.fields.items()}
            area = score(changes)
            study.tell(trial, area)
            yield changes, area
    finally:
        optuna.logging.set_verbosity(logged)


def _suggested(trial: Any, field: str, values: list[Any] | Range, hint: Any) -> Any:
    if isinstance(values, list):
        return values[trial.suggest_categorical(field, list(range(len(values))))]
    whole = isinstance(values.low, int) and isinstance(values.high, int) and hint is not float
    return (trial.suggest_int if whole else trial.suggest_float)(field, values.low, values.high, log=values.log)
