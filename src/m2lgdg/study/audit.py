"""Leakage audit: cells of a study are refitted with an altered target, which must not change what is learned.

It fits cells as `study.runner` does. While `data.leakage` checks cohorts, the audit checks methods, including a user's own.
Each altered cohort ("world") has its own file and process, so that they share no memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN, Cohort
from m2lgdg.method import Method, nearest
from m2lgdg.storage import InputError
from m2lgdg.study.cells import Cell, make_cells
from m2lgdg.study.config import Study
from m2lgdg.study.no_brain import no_brain_scores as no_brain_scores  # shown with the audit, and imported from here
from m2lgdg.study.runner import CellContext, check_device, checked, failure_reason, fitted_cell, study_cohort

Proba = npt.NDArray[np.float64]
MEASURED = ("peak_memory_gib",)  # facts about the machine, not learned ones
REAL, NOISE, WITHHELD = "real", "noise", "withheld"


@dataclass(frozen=True)
class Audited:
    """Audit of one method; `reason` is why it could not be run."""

    method: str
    target: str
    seed: int
    differs: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the method ran and nothing of the target reached it."""
        return self.reason is None and not self.differs


@dataclass
class Seen:
    """One cell in one world: digests of the learned state, predictions, and files of the cohort that were opened."""

    learned: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)  # learned by a second fit, after the target was predicted
    proba: dict[str, Proba] = field(default_factory=dict)  # how the target was given -> its probabilities
    tolerance: float = 0.0
    opened: tuple[str, ...] = ()
    reason: str | None = None


def audit(
    study: Study | dict[str, Any] | str | Path,
    *,
    methods: Iterable[str] | None = None,
    target: str | None = None,
    seed: int | None = None,
) -> list[Audited]:
    """Audit methods of a study (default: all) at one target and one seed (default: the first of the study)."""
    study = checked(study)
    cohort = study_cohort(study)
    wanted = list(dict.fromkeys(methods or study.methods))
    for name in wanted:
        if name not in study.methods:
            raise InputError(f"{name} is not one of the study's methods{nearest(name, study.methods)}")
    target = target or (study.targets or cohort.site_names)[0]
    seeds = study.seeds[:1] if seed is None else [seed]
    study = study.model_copy(update={"methods": wanted, "targets": [target], "seeds": seeds, "explain": False})
    check_device(study)
    cells = [cell for cell in make_cells(study, cohort) if not cell.variant]
    with tempfile.TemporaryDirectory(prefix="m2lgdg-audit-") as folder:
        seen = {world: _run_world(world, cells, study, cohort, folder) for world in (REAL, NOISE, WITHHELD)}
        results = [_compare(cell, *(seen[world][i] for world in seen)) for i, cell in enumerate(cells)]
        suspects = [i for i, result in enumerate(results) if result.differs]
        # A method that is not reproducible differs in every world, and that is not a leak.
        control = _run_world(REAL, [cells[i] for i in suspects], study, cohort, folder) if suspects else []
    for i, second in zip(suspects, control, strict=True):
        if second.learned != seen[REAL][i].learned:
            reason = "two fits of the same source differ, so leakage cannot be tested; draw random numbers from the seed of fit"
            results[i] = dataclasses.replace(results[i], differs=(), reason=second.reason or reason)
    return results


def other_target(cohort: Cohort, site: str, world: str) -> Cohort:
    """Cohort whose target is noise (series, phenotypes, TR; labels flipped), or whose target labels are withheld."""
    here = np.flatnonzero(cohort.sites == site)
    labels = np.array(cohort.labels)
    if world == WITHHELD:
        labels[here] = UNKNOWN
        return dataclasses.replace(cohort, labels=labels)
    if world == REAL:
        return cohort
    draw = np.random.default_rng(9)
    labels[here] = np.where(labels[here] == UNKNOWN, draw.integers(0, 2, len(here)), 1 - labels[here])
    series = list(cohort.series)
    for i in here.tolist():
        series[i] = draw.normal(size=series[i].shape).astype(np.float32)
    phenotypes = cohort.phenotypes.apply(lambda column: _noisy(column, here, draw))
    tr = np.array(cohort.tr)
    tr[here] = draw.uniform(1, 3, len(here))
    return dataclasses.replace(cohort, labels=labels, series=series, phenotypes=phenotypes, tr=tr)


def _noisy(column: pd.Series[Any], here: npt.NDArray[np.int64], draw: np.random.Generator) -> pd.Series[Any]:
    """Phenotype column with random values at some positions: new numbers, or the text of a random subject."""
    values = column.to_numpy(copy=True)
    if values.dtype == np.float64:
        known = values[np.isfinite(values)]
        values[here] = draw.normal(known.mean(), known.std() + 1, len(here)) if len(known) else draw.normal(size=len(here))
    else:
        values[here] = draw.choice(values, len(here))
    return pd.Series(values, index=column.index, name=column.name)


def _run_world(world: str, cells: list[Cell], study: Study, cohort: Cohort, folder: str) -> list[Seen]:
    """Fit and predict the cells of one world in a new process."""
    from joblib.externals.loky import ProcessPoolExecutor

    path = other_target(cohort, cells[0].target, world).save(Path(folder) / f"{world}.cohort")
    plugins = tuple(str(Path(plugin).resolve()) for plugin in study.plugins)
    context = CellContext(folder, str(path), cohort.inputs, cohort.allow_proxies, plugins, study.device, study.threads)
    pool = ProcessPoolExecutor(max_workers=1)
    try:
        seen: list[Seen] = pool.submit(_observe, cells, context, os.path.realpath(study.cohort), world).result()
    except RuntimeError as error:  # a method may end the whole process
        raise InputError(f"the audit's worker process died ({type(error).__name__}).") from None
    finally:
        pool.shutdown()
    return seen


def _observe(cells: list[Cell], context: CellContext, original: str, world: str) -> list[Seen]:
    """Fit and predict each cell in this process, and record files of the study's cohort that a method opens itself."""
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if (path == original or path.startswith(original + os.sep)) and not path.endswith((".py", ".pyc")):
                opened.append(os.path.relpath(path, os.path.dirname(original)))

    sys.addaudithook(watch)
    seen = []
    for cell in cells:
        result = Seen()
        opened.clear()
        try:
            _observe_cell(cell, context, world, result)
        except Exception as error:  # a user's method may raise anything
            result.reason = failure_reason(error)
        result.opened = tuple(dict.fromkeys(opened))
        seen.append(result)
    return seen


def _observe_cell(cell: Cell, context: CellContext, world: str, seen: Seen) -> None:
    from m2lgdg.deep import DeepMethod

    with fitted_cell(cell, context) as (fold, fitted):
        target = fold.target
        seen.learned = digests(fitted)
        seen.proba["as it is"] = fitted.predict_proba(target)[:, 1]
        if world != REAL:
            return
        draw = np.random.default_rng(9)
        order = draw.permutation(len(target))
        relabelled = dataclasses.replace(target, labels=draw.permutation(1 - np.maximum(target.labels, 0)))
        seen.proba["with other labels"] = fitted.predict_proba(relabelled)[:, 1]
        seen.proba["in another order"] = fitted.predict_proba(target.select(order))[np.argsort(order), 1]
        alone = [fitted.predict_proba(target.select([i]))[:, 1] for i in range(len(target))]
        seen.proba["one subject at a time"] = np.concatenate(alone)
        # Single-precision rounding, which the calibration of a barely trained network amplifies.
        seen.tolerance = 1e-4 if isinstance(fitted, DeepMethod) else 1e-9
    with fitted_cell(cell, context) as (_, refitted):
        seen.again = digests(refitted)


def digests(fitted: Method) -> dict[str, str]:
    """SHA-256 of every learned array and fact of a method, by name."""
    learned = {}
    for name, value in fitted.state_.items():
        array = np.ascontiguousarray(value)
        head = f"{array.dtype.str} {array.shape} ".encode()
        learned[f"weights {name}"] = hashlib.sha256(head + array.tobytes()).hexdigest()
    for name, fact in fitted.facts_.items():
        if name not in MEASURED:
            learned[f"fact {name}"] = hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()
    return learned


def _compare(cell: Cell, real: Seen, noise: Seen, withheld: Seen) -> Audited:
    head = Audited(cell.method, cell.target, cell.seed)
    reason = real.reason or noise.reason or withheld.reason
    opened = list(dict.fromkeys([*real.opened, *noise.opened, *withheld.opened]))
    differs = [f"the method opens {', '.join(opened[:3])}, which contains the target"] if opened else []
    if reason is not None:
        where = "" if real.reason else " (only with noise or withheld labels at the target)"
        return dataclasses.replace(head, differs=tuple(differs), reason=f"{reason}{where}")
    fits = (
        ("a target of noise", noise.learned),
        ("a target without labels", withheld.learned),
        ("fitting again after the target was predicted", real.again),
    )
    differs += [f"{how} changes {_named(real.learned, other)}" for how, other in fits if other != real.learned]
    base = real.proba["as it is"]
    exact = {"with labels withheld": withheld.proba["as it is"], "with other labels": real.proba["with other labels"]}
    near = {how: real.proba[how] for how in ("in another order", "one subject at a time")}
    for tolerance, given in ((0.0, exact), (real.tolerance, near)):
        for how, proba in given.items():
            most = float(np.abs(proba - base).max(initial=0))
            if most > tolerance:
                differs.append(f"predictions {how} differ by up to {most:.2g}")
    return dataclasses.replace(head, differs=tuple(differs))


def _named(first: dict[str, str], second: dict[str, str]) -> str:
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
