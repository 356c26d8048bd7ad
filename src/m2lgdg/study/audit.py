"""Leakage audit: cells of a study are refitted with an altered target, which must not change what is learned.

It fits cells as `study.runner` does. While `data.leakage` checks cohorts, the audit checks methods, including a user's own.
Each altered cohort ("world") has its own file and process, so that they share no memory. In one more process other targets are
fitted first, because a study fits many targets in one process. A method that still keeps something of the target after that
is fitted after a random number of further cells, and what it keeps is reported, since it may wait for more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import UNKNOWN, Cohort, Parcellation
from m2lgdg.fields import nearest
from m2lgdg.method import Method, is_network
from m2lgdg.model.model import Model
from m2lgdg.registry import create, load_methods
from m2lgdg.scans import CLIP, COVARIANCE, FISHER_Z, Connectomes, Scans, arrays_of, correlation, packed, standardised
from m2lgdg.storage import InputError
from m2lgdg.study.audit_watch import Used, Watch, digest, held_elsewhere
from m2lgdg.study.baselines import no_brain_scores as no_brain_scores  # shown with the audit, and imported from here
from m2lgdg.study.cells import CellContext, adapted_proba, failure_reason, fitted_cell
from m2lgdg.study.config import Study
from m2lgdg.study.plan import Cell, make_cells
from m2lgdg.study.predictions import ADAPTED, STRICT
from m2lgdg.study.runner import checked, on_device, study_cohort

Proba = npt.NDArray[np.float64]
MEASURED = ("peak_memory_gib",)  # facts about the machine, not learned ones
REAL, NOISE, WITHHELD, AFTER, AFTER_NOISE = "real", "noise", "withheld", "after others", "after others, noise"
# How a target is given; as it is, it is compared with a target whose labels are withheld.
AS_IS, RELABELLED, REORDERED = "with labels withheld", "with other labels", "in another order"
ALONE, AFTER_OTHERS = "one subject at a time", "after other targets in the same process"
OTHERS = 2  # cells of other targets that are fitted before the audited one
MORE = (5, 15)  # least and most cells that are fitted before it if the method keeps something of them
NO_OTHERS = "no other target has both classes in its source, so it cannot be tested whether another target leaks"
LIMITS = (
    "The audit cannot see files that another process or compiled code opens (except the cohort of the study, on Linux), data "
    "that a method takes from memory (gc) and that change neither weights nor predictions nor kept values, or a method that "
    "recognises the audit."
)


@dataclass(frozen=True)
class Audited:
    """Audit of one method; `reason` is why it could not be run, `note` what the audit cannot rule out."""

    method: str
    target: str
    seed: int
    differs: tuple[str, ...] = ()
    reason: str | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the method ran and nothing of the target reached it."""
        return self.reason is None and not self.differs


@dataclass
class Seen:
    """One cell in one world: digests of what was learned and of what is kept elsewhere, predictions, and files used."""

    learned: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)  # learned by a second fit, after the target was predicted
    held: dict[str, str] = field(default_factory=dict)  # outside state_ and facts_, changed by the fit
    before: dict[str, str] = field(default_factory=dict)  # kept by the user's code from earlier fits
    proba: dict[tuple[str, str], Proba] = field(default_factory=dict)  # track, and how the target was given
    tolerance: float = 0.0
    used: Used = field(default_factory=Used)
    reason: str | None = None


def audit(
    study: Study | dict[str, Any] | str | Path,
    *,
    methods: Iterable[str] | None = None,
    target: str | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Audited]:
    """Audit methods of a study (default: all) at one target and one seed (default: the first of the study).

    `progress` is called with the number of worlds that are done, and their number.
    """
    study = checked(study)
    cohort = study_cohort(study)
    wanted = list(dict.fromkeys(methods or study.methods))
    for name in wanted:
        if name not in study.methods:
            raise InputError(f"{name} is not one of the study's methods{nearest(name, study.methods)}")
    target = target or (study.targets or cohort.site_names)[0]
    others = _other_targets(cohort, target, study.targets or [])
    seeds = study.seeds[:1] if seed is None else [seed]
    study = study.model_copy(update={"methods": wanted, "targets": [target], "seeds": seeds, "explain": False})
    study = on_device(study)
    cells = [cell for cell in make_cells(study, cohort) if not cell.variant]
    alone = [[cell] for cell in cells]
    with tempfile.TemporaryDirectory(prefix="m2lgdg-audit-") as folder:
        late = [_after_others(cell, others) for cell in cells]
        sequences = {REAL: alone, NOISE: alone, WITHHELD: alone, AFTER: late, AFTER_NOISE: late}
        seen: dict[str, list[Seen]] = {}
        for world, cells_of_world in sequences.items():
            if progress:
                progress(len(seen), len(sequences))
            if world in (AFTER, AFTER_NOISE) and not others:
                seen[world] = [Seen(reason=NO_OTHERS) for _ in cells]
            else:
                seen[world] = _run_world(world, cells_of_world, study, cohort, folder)
        _forget_unstable(seen, lambda: _run_world(WITHHELD, alone, study, cohort, folder))
        results = [_compare(cell, {world: seen[world][i] for world in seen}) for i, cell in enumerate(cells)]
        kept = [seen[AFTER][i].before != seen[AFTER_NOISE][i].before for i in range(len(cells))]
        keeping = [i for i, result in enumerate(results) if result.passed and kept[i]]
        if keeping:
            run = partial(_run_world, AFTER, study=study, cohort=cohort, folder=folder)
            again = run([late[i] for i in keeping])
            sites = _other_targets(cohort, target, [], len(cohort.site_names))
            latest = run([_after_many(cells[i], sites) for i in keeping])
            for i, second, last in zip(keeping, again, latest, strict=True):
                own = (seen[REAL][i], seen[AFTER][i], seen[AFTER_NOISE][i])
                results[i] = _compare_kept(results[i], *own, second, last)
        leaking = [i for i, result in enumerate(results) if result.differs]
        # A method that is not reproducible differs in every world, and that is not a leak.
        control = _run_world(REAL, [alone[i] for i in leaking], study, cohort, folder) if leaking else []
    for i, second in zip(leaking, control, strict=True):
        if second.learned != seen[REAL][i].learned:
            reason = "two fits of the same source differ, so leakage cannot be tested; draw random numbers from the seed of fit"
            results[i] = dataclasses.replace(results[i], differs=(), reason=second.reason or reason)
    return results


def _other_targets(cohort: Cohort, target: str, preferred: Iterable[str], most: int = OTHERS) -> list[str]:
    """Sites to fit before the audited target, the study's own first; source must have both classes."""
    sites = [site for site in dict.fromkeys([*preferred, *cohort.site_names]) if site != target]
    return [site for site in sites if {0, 1} <= set(cohort.labels[cohort.sites != site].tolist())][:most]


def _after_others(cell: Cell, others: list[str]) -> list[Cell]:
    """Cells of other targets, then the cell itself; a cohort with one other target has it with two seeds."""
    first = [dataclasses.replace(cell, target=site) for site in others]
    if len(first) == 1:
        first.append(dataclasses.replace(first[0], seed=cell.seed + 1))
    return [*first, cell]


def _after_many(cell: Cell, sites: list[str]) -> list[Cell]:
    """A random number of cells of random other targets and seeds, then the cell itself; no method can know how many."""
    draw = random.SystemRandom()
    first = [
        dataclasses.replace(cell, target=draw.choice(sites), seed=cell.seed + draw.randrange(9))
        for _ in range(draw.randint(*MORE))
    ]
    return [*first, cell]


def _compare_kept(result: Audited, real: Seen, after: Seen, noise: Seen, again: Seen, late: Seen) -> Audited:
    """The result of a method that keeps something of the target between fits, after it was fitted late in a process."""
    unstable = {name for name in after.before | again.before if after.before.get(name) != again.before.get(name)}
    kept = [{name: value for name, value in one.before.items() if name not in unstable} for one in (after, noise)]
    if late.reason is not None or kept[0] == kept[1]:
        return dataclasses.replace(result, reason=late.reason)
    if late.learned != real.learned or not np.array_equal(late.proba[STRICT, AS_IS], real.proba[STRICT, AS_IS]):
        how = _named(real.learned, late.learned) if late.learned != real.learned else "predictions"
        return dataclasses.replace(result, differs=(f"fitting more targets first in the same process changes {how}",))
    note = f"it keeps {_named(*kept)} from fits of other targets, which have seen this one; the audit saw no use of it"
    return dataclasses.replace(result, note=note)


def _forget_unstable(seen: dict[str, list[Seen]], repeat: Callable[[], list[Seen]]) -> None:
    """Where worlds differ in what is kept, drop names that also differ between two runs of one world, such as a timer."""
    if all(noise.held == withheld.held for noise, withheld in zip(seen[NOISE], seen[WITHHELD], strict=True)):
        return
    for first, second, noise in zip(seen[WITHHELD], repeat(), seen[NOISE], strict=True):
        for name in {name for name in first.held | second.held if first.held.get(name) != second.held.get(name)}:
            first.held.pop(name, None)
            noise.held.pop(name, None)


def other_target(cohort: Cohort, site: str, world: str) -> Cohort:
    """Cohort whose target is noise (scans, tables, phenotypes, TR; labels flipped), or whose target labels are withheld."""
    here = np.flatnonzero(cohort.sites == site)
    labels = np.array(cohort.labels)
    if world == WITHHELD:
        labels[here] = UNKNOWN
        return dataclasses.replace(cohort, labels=labels)
    if world in (REAL, AFTER):
        return cohort
    draw = np.random.default_rng(9)
    labels[here] = np.where(labels[here] == UNKNOWN, draw.integers(0, 2, len(here)), 1 - labels[here])
    atlases = {
        name: Parcellation(each.rois, _noisy_scans(each.scans, here, draw)) for name, each in cohort.parcellations.items()
    }
    phenotypes = cohort.phenotypes.apply(lambda column: _noisy(column, here, draw))
    tr = np.array(cohort.tr)
    tr[here] = draw.uniform(1, 3, len(here))
    series = _noisy_scans(cohort.scans, here, draw)
    tables = {  # a value that is missing still is: which ones a subject has is not hidden
        name: table.apply(lambda column: _noisy(column, here, draw)).where(table.notna())
        for name, table in cohort.tables.items()
    }
    changed: dict[str, Any] = {"series": series, "parcellations": atlases, "phenotypes": phenotypes, "tr": tr, "tables": tables}
    return dataclasses.replace(cohort, labels=labels, **changed)


def _noisy_scans(scans: Scans, here: npt.NDArray[np.int64], draw: np.random.Generator) -> Any:
    """Scans with noise of the same kind at some positions."""

    def noise(one: Any) -> Any:
        if isinstance(scans, Connectomes):
            return packed(_noisy_matrix(scans.n_rois, scans.kind, draw), scans.kind)
        return draw.normal(size=one.shape).astype(np.float32)

    chosen = set(here.tolist())  # a subject that lacks an atlas still lacks it: which ones it has is not hidden
    given = enumerate(arrays_of(scans))
    made = [noise(one) if one is not None and i in chosen else one for i, one in given]
    return Connectomes(made, scans.kind, scans.n_rois) if isinstance(scans, Connectomes) else made


def _noisy_matrix(rois: int, kind: str, draw: np.random.Generator) -> Proba:
    """(roi, roi) connectome of independent noise; that of partial correlations is a correlation matrix like any other."""
    matrix = correlation(standardised(draw.normal(size=(2 * rois, rois))))
    if kind == COVARIANCE:
        spread = draw.uniform(0.5, 2.0, rois)
        return np.asarray(matrix * (spread[:, None] * spread))
    return np.arctanh(np.clip(matrix, -CLIP, CLIP)) if kind == FISHER_Z else matrix


def _noisy(column: pd.Series[Any], here: npt.NDArray[np.int64], draw: np.random.Generator) -> pd.Series[Any]:
    """Phenotype column with random values at some positions: new numbers, or the text of a random subject."""
    values = column.to_numpy(copy=True)
    if values.dtype == np.float64:
        known = values[np.isfinite(values)]
        values[here] = draw.normal(known.mean(), known.std() + 1, len(here)) if len(known) else draw.normal(size=len(here))
    else:
        values[here] = draw.choice(values, len(here))
    return pd.Series(values, index=column.index, name=column.name)


def _run_world(world: str, sequences: list[list[Cell]], study: Study, cohort: Cohort, folder: str) -> list[Seen]:
    """Fit and predict sequences of cells of one world in a new process; the last cell of each is observed."""
    from joblib.externals.loky import ProcessPoolExecutor

    path = other_target(cohort, sequences[0][-1].target, world).save(Path(folder) / f"{world}.cohort")
    plugins = tuple(str(Path(plugin).resolve()) for plugin in study.plugins)
    given = folder, str(path), cohort.inputs, cohort.allow_proxies, plugins, study.device, study.threads
    context = CellContext(*given, targets=tuple(cohort.site_names))  # fitted together, as in a study of all targets
    pool = ProcessPoolExecutor(max_workers=1)
    try:
        seen: list[Seen] = pool.submit(_observe, sequences, context, os.path.realpath(study.cohort), world).result()
    except RuntimeError as error:  # a method may end the whole process
        raise InputError(f"the audit's worker process died ({type(error).__name__}).") from None
    finally:
        pool.shutdown()
    return seen


def _observe(sequences: list[list[Cell]], context: CellContext, original: str, world: str) -> list[Seen]:
    """Fit and predict each cell in this process, and record the files and processes that a method uses itself."""
    load_methods(context.plugins)  # what a plugin reads when it is imported is a part of it
    for name, fields in {cell.method: cell.fields for *_, cell in sequences}.items():
        with contextlib.suppress(InputError):  # raised again by the cell, and reported there
            create(name, **fields)  # imports the method and, if it is one, its scikit-learn estimator
    watch = Watch(original, context.cohort)
    seen = []
    for *others, cell in sequences:
        result = Seen()
        try:
            with watch.watching() as result.used:
                cls = type(create(cell.method, **cell.fields))
                at_first = held_elsewhere(cls, package=False) if others else {}
                for other in others:
                    _run_before(other, context)
                kept = held_elsewhere(cls, package=False) if others else {}
                result.before = {name: value for name, value in kept.items() if at_first.get(name) != value}
                if world != AFTER_NOISE:
                    _observe_cell(cell, cls, context, world, result)
        except (Exception, SystemExit) as error:  # a user's method may raise anything, or exit
            result.reason = failure_reason(error)
        seen.append(result)
    return seen


def _run_before(cell: Cell, context: CellContext) -> None:
    """Fit and predict a cell of another target, as a study does in the same process."""
    try:
        with fitted_cell(cell, context) as (fold, fitted):
            fitted.predict_proba(fold.target)
    except (Exception, SystemExit) as error:  # a user's method may raise anything, or exit
        raise InputError(f"target {cell.target}, which is fitted first: {failure_reason(error)}") from error


def _observe_cell(cell: Cell, cls: type[Method], context: CellContext, world: str, seen: Seen) -> None:
    before = held_elsewhere(cls)
    with fitted_cell(cell, context) as (fold, fitted):
        target = fold.target
        seen.learned = digests(fitted)
        seen.held = {name: value for name, value in held_elsewhere(cls, fitted.method).items() if before.get(name) != value}
        tracks = {STRICT: partial(_predicted, fitted)} | ({ADAPTED: partial(_adapted, fitted, cell)} if cell.adapt else {})
        for track, predicted in tracks.items():
            seen.proba[track, AS_IS] = predicted(target)
        if world != REAL:
            return
        draw = np.random.default_rng(9)
        order = draw.permutation(len(target))
        relabelled = dataclasses.replace(target, labels=draw.permutation(1 - np.maximum(target.labels, 0)))
        for track, predicted in tracks.items():
            seen.proba[track, RELABELLED] = predicted(relabelled)
            seen.proba[track, REORDERED] = predicted(target.select(order))[np.argsort(order)]
        if cell.adapt:  # a batch of one subject is no batch: the predictions are then those of the strict track
            seen.proba[ADAPTED, ALONE] = _one_by_one(tracks[ADAPTED], target)
        # Rounding of single precision, which the calibration of a barely trained network amplifies, or of double precision.
        seen.tolerance = 1e-4 if is_network(fitted) else 1e-9
    with fitted_cell(cell, context) as (_, refitted):
        seen.again = digests(refitted)
        # The second fit has not seen the whole target yet, and cannot have kept its statistics in an attribute.
        fresh = refitted if seen.again == seen.learned else fitted
        seen.proba[STRICT, ALONE] = _one_by_one(partial(_predicted, fresh), target)


def _predicted(fitted: Model, target: Cohort) -> Proba:
    return fitted.predict_proba(target)[:, 1]


def _adapted(fitted: Model, cell: Cell, target: Cohort) -> Proba:
    return adapted_proba(fitted, target, _predicted(fitted, target), cell.seed, cell.adapt)


def _one_by_one(predicted: Callable[[Cohort], Proba], target: Cohort) -> Proba:
    return np.concatenate([np.empty(0), *(predicted(target.select([i])) for i in range(len(target)))])


def digests(fitted: Model) -> dict[str, str]:
    """SHA-256 of every learned array and fact of a method, by name."""
    learned = {}
    for name, value in fitted.state_.items():
        array = np.ascontiguousarray(value)
        head = f"{array.dtype.str} {array.shape} ".encode()
        learned[f"weights {name}"] = hashlib.sha256(head + array.tobytes()).hexdigest()
    for name, fact in fitted.facts_.items():
        if name not in MEASURED:
            learned[f"fact {name}"] = hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()
    for i, member in enumerate(fitted.members.values()):
        if hasattr(member, "estimator_"):  # of scikit-learn; it is put into state_ when it is saved
            learned[f"estimator {i}"] = digest(member.estimator_)
    return learned


def _compare(cell: Cell, seen: dict[str, Seen]) -> Audited:
    head = Audited(cell.method, cell.target, cell.seed)
    differs = _files_used([one.used for one in seen.values()])
    for world, one in seen.items():
        if one.reason is not None:
            where = " (only with noise or withheld labels at the target)" if world in (NOISE, WITHHELD, AFTER_NOISE) else ""
            return dataclasses.replace(head, differs=tuple(differs), reason=f"{one.reason}{where}")
    real, noise, withheld, after = (seen[world] for world in (REAL, NOISE, WITHHELD, AFTER))
    fits = (
        ("a target of noise", noise.learned),
        ("a target without labels", withheld.learned),
        ("fitting again after the target was predicted", real.again),
        ("fitting other targets first in the same process", after.learned),
    )
    differs += [f"{how} changes {_named(real.learned, other)}" for how, other in fits if other != real.learned]
    if noise.held != withheld.held:
        differs.append(f"a target of noise changes {_named(withheld.held, noise.held)}, kept outside of state_ and facts_")
    if after.learned == real.learned:
        real.proba[STRICT, AFTER_OTHERS] = after.proba[STRICT, AS_IS]
    return dataclasses.replace(head, differs=(*differs, *_compare_predictions(real, withheld)))


def _compare_predictions(real: Seen, withheld: Seen) -> list[str]:
    """Differences of predictions in each track; without a batch, those of the adapted track are those of the strict one."""
    sentences = []
    for (track, how), proba in real.proba.items():
        base = real.proba[STRICT if how == ALONE else track, AS_IS]
        other = withheld.proba[track, AS_IS] if how == AS_IS else proba
        most = float(np.abs(other - base).max(initial=0))
        if most > (real.tolerance if how in (REORDERED, ALONE) else 0.0):
            sentences.append(f"predictions{' of the adapted track' * (track == ADAPTED)} {how} differ by up to {most:.2g}")
    return sentences


def _files_used(used: list[Used]) -> list[str]:
    """Sentences about files and processes that a method used in any world."""
    cohort, unseen, files, processes = (
        list(dict.fromkeys(name for one in used for name in getattr(one, kind)))
        for kind in ("cohort", "unseen", "files", "processes")
    )
    sentences = []
    if cohort:
        sentences.append(f"the method opens {_first(cohort)}, which contains the target")
    elif unseen:
        how = "by compiled code or another process"
        sentences.append(f"{_first(unseen)}, which contains the target, is opened while the method runs, {how}")
    if files:
        sentences.append(f"the method uses {_first(files)}, where data of one target can reach another")
    if processes:
        sentences.append(f"the method starts {_first(processes)}, whose files the audit cannot see")
    return sentences


def _named(first: dict[str, str], second: dict[str, str]) -> str:
    return _first(sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name)))


def _first(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
