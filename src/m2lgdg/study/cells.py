"""One cell of a study: fit on source, predict the target, and write the record, in whatever process an engine chose.

That process has the cohort and the code of the cell's key, or the run ends. Curve and audit fit their cells here, too.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import CohortFeatures, use_features
from m2lgdg.methods.together import Sources, fitting_together
from m2lgdg.model.model import Model
from m2lgdg.model.site_level import LEAST, Floats, corrected_by_batches, cross_batches, source_prevalence
from m2lgdg.own_code import refuse_not_covered, staying
from m2lgdg.registry import METHODS, create, find, load_methods
from m2lgdg.splits import Fold, leave_one_site_out
from m2lgdg.storage import InputError, one_line, read_metadata, write_text
from m2lgdg.study.foreign import package_as_it_was
from m2lgdg.study.plan import LIBRARIES, Cell, cell_code, is_code, own_code
from m2lgdg.study.predictions import ADAPTED
from m2lgdg.study.records import are_probabilities, encoded, explanation_path, head, plain, record_path
from m2lgdg.study.term_summary import summarised
from m2lgdg.study.tune import search

# Facts stored in a record.
LEARNED = (
    "penalties",
    "history",
    "best_epoch",
    "losses",
    "parameters",
    "peak_memory_gib",
    "validation",
    "share",
    "notes",
    "tuned",
)
LOST = "the GPU failed and can no longer be used by this process"
_LOADING = threading.Lock()


@dataclass(frozen=True)
class CellContext:
    """What a worker needs besides the cell; plain values, so that any engine can send them."""

    out: str
    cohort: str
    inputs: tuple[str, ...]
    allow_proxies: bool
    plugins: tuple[str, ...]
    device: str
    threads: int
    keep_features: bool = False  # for the next cells of the process
    cohort_hash: str | None = None  # content that the cohort must have, with these inputs; None: any
    targets: tuple[str, ...] = ()  # of the study, whose sources are fitted together


class RunEnds(InputError):
    """Reason why no further cell can be run, and what to do. The cell at hand has no record unless it was written before."""

    def __init__(self, reason: str, advice: str = "run the same command again to continue") -> None:
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice

    def __str__(self) -> str:
        return f"{self.reason}; {self.advice}."


def run_cell(cell: Cell, context: CellContext) -> str | None:
    """Fit on source, predict the target and write the record; returns the reason for a failure, or None."""
    start, reason = time.monotonic(), None
    try:
        text = encoded(head(cell) | _done(cell, context) | _since(start))
    except (RunEnds, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's method may raise anything, or exit; the other cells must continue
        reason = failure_reason(error)
        failed = {} if isinstance(error, InputError) else {"traceback": traceback.format_exc()}
        text = encoded(head(cell) | failed | {"status": "failed", "reason": reason} | _since(start))
    write_text(record_path(context.out, cell.key), text)
    return reason


def _since(start: float) -> dict[str, float]:
    return {"seconds": round(time.monotonic() - start, 3)}


def _done(cell: Cell, context: CellContext) -> dict[str, Any]:
    """Record of a finished cell: the predictions of its target, and what was learned."""
    with fitted_cell(cell, context) as (fold, fitted):
        proba = np.asarray(fitted.predict_proba(fold.target)[:, 1], dtype=np.float64)
        scores = {"proba": proba.tolist()}
        if not are_probabilities(scores["proba"], len(fold.target)):
            raise ValueError(f"method {cell.method} did not give one probability between 0 and 1 for each subject")
        if cell.adapt:
            scores[ADAPTED] = adapted_proba(fitted, fold.target, proba, cell.seed, cell.adapt).tolist()
        unexplained = _explain(cell, fitted, fold, context) if cell.explain else {}
    facts = {name: fitted.facts_[name] for name in LEARNED if name in fitted.facts_} | table_parts(fitted)
    learned = {name: plain(fact, f"method {cell.method}: fact {name}") for name, fact in facts.items()}
    history = learned.get("history")
    if terms := summarised(history) if isinstance(history, list) else {}:
        learned["terms"] = terms
    return {
        "status": "done",
        "subjects": fold.target.subjects.tolist(),
        "labels": fold.target.labels.tolist(),
        **scores,
        **unexplained,
        "learned": learned,
    }


def table_parts(fitted: Model) -> dict[str, dict[str, float]]:
    """Part of each table in the decision of a linear method, relative to other blocks, mean over atlases; empty without any."""
    parts: dict[str, list[float]] = {}
    for member in fitted.members.values():
        for name, about in member.facts_.get("tables", {}).items():
            parts.setdefault(name, []).extend([about["relative"]] if "relative" in about else [])
    known = {name: float(np.mean(each)) for name, each in parts.items() if each}
    return {"table_parts": known} if known else {}


def adapted_proba(fitted: Model, target: Cohort, proba: Floats, seed: int, size: int) -> Floats:
    """Probabilities of the adapted track: each subject of the target is at the level of up to `size` others, unlabelled.

    A method that `sees_batch` predicts with them itself. `proba` are the probabilities of the strict track, which stay where
    there is no batch.
    """
    subjects = target.subjects.tolist()
    if not fitted.method.sees_batch:
        return corrected_by_batches(proba, subjects, source_prevalence(fitted.facts_), seed, size)
    result = np.array(proba)
    for scored, batch in cross_batches(subjects, seed, size):
        if len(batch) >= LEAST:
            result[scored] = fitted.method.predict_adapted(target.select(scored), target.select(batch))
    return result


def _explain(cell: Cell, fitted: Model, fold: Fold, context: CellContext) -> dict[str, str]:
    """Write the explanation of a cell; a method or target that cannot be explained does not fail the cell."""
    from m2lgdg.explain.attribution import explain

    how: dict[str, Any] = {"of": cell.explain_of, "steps": cell.explain, "device": context.device}
    try:
        explanation = explain(fitted, fold.target, source=fold.source, **how)
    except InputError as error:
        return {"unexplained": str(error)}
    explanation.save(explanation_path(context.out, cell.key))
    return {}


def failure_reason(error: BaseException) -> str:
    """Reason for a failed cell: the text of an InputError, or type and message of any other exception; then its notes."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, InputError):
        return f"{error}{notes}"
    devices = sys.modules.get("m2lgdg.devices")  # PyTorch is not imported to find out
    reason = f"{type(error).__name__}: {one_line(error)}{notes}"
    return f"{LOST} ({reason})" if devices is not None and devices.cuda_failed() else reason


@contextmanager
def fitted_cell(
    cell: Cell, context: CellContext, select: Callable[[Cohort], Cohort] | None = None
) -> Iterator[tuple[Fold, Model]]:
    """Fold of a cell, and its method fitted on source, or on those subjects of source that a function selects."""
    with _LOADING:  # cells of two studies may run in threads of one worker
        method = _method(cell, context)  # imports PyTorch if it is a network, before its threads are limited
        cohort = _cohort(context)
        if context.keep_features:
            _share_features(cohort, cell.code)
        sources = _sources(cohort, context.targets, cell.code)
    foreign = bool(context.plugins or own_code(method.method))
    with _threads(context.threads), staying(), package_as_it_was() if foreign else nullcontext(), fitting_together(sources):
        before = {*sys.modules}
        (fold,) = leave_one_site_out(cohort, [cell.target])
        fold = fold if select is None else fold._replace(source=select(fold.source))
        yield fold, _fitted(cell, method, fold.source, context.device)
        if foreign:
            refuse_not_covered(before, f"method {cell.method}")


def _fitted(cell: Cell, method: Model, source: Cohort, device: str) -> Model:
    """The method fitted on source, with the fields that were best inside source if some are searched."""
    if cell.tune is None:
        return method.fit(source, seed=cell.seed, device=device)
    found = search(cell.tune, cell.method, cell.fields, source, seed=cell.seed, device=device)
    fitted = Model(create(cell.method, **found.fields)).fit(source, seed=cell.seed, device=device)
    fitted.facts_["tuned"] = found.facts
    return fitted


def _method(cell: Cell, context: CellContext) -> Model:
    """The method of a cell, from the code in the cell's key."""
    try:
        load_methods(context.plugins)
        changed = not cell.code.startswith(cell_code(context.plugins, cell.explain))
    except (InputError, OSError) as error:
        raise RunEnds(f"{cell} was not run: {one_line(error)}") from None
    if not changed:
        METHODS.define_estimator(cell.method, cell.fields)
        made = find(cell.method)(**cell.fields)  # the plan has checked the fields
        changed = not is_code(cell, cell_code(context.plugins, cell.explain) + own_code(made))
    if changed:
        of = f"m2lgdg, a plugin, or the version of {', '.join(LIBRARIES[:-1])} or {LIBRARIES[-1]}"
        raise RunEnds(
            f"{cell} was not run: the code has changed since the study began, or a worker has other code ({of})",
            "restart the workers of a cluster with the code of this machine, and run the same command again",
        )
    return Model(made)


def cohort_in_memory(path: str, inputs: tuple[str, ...], allow_proxies: bool, expected: str | None) -> Cohort:
    """Cohort of a file with these inputs, its subjects in order; refused unless its content has the expected hash.

    It is kept while its file is the same, and not mapped: a map would show new content when the file is overwritten.
    """
    held = _held(path, read_metadata(path).get("hash"), inputs, allow_proxies)
    if expected not in (None, held.hash):
        raise InputError(f"{path} has the hash {held.hash[:12]}, not {str(expected)[:12]}.")
    return held


@lru_cache(maxsize=1)
def _held(path: str, stored_hash: str | None, inputs: tuple[str, ...], allow_proxies: bool) -> Cohort:
    return Cohort.load(path, in_memory=True).with_inputs(inputs, allow_proxies=allow_proxies).in_order()


def _cohort(context: CellContext) -> Cohort:
    """The cohort of a cell; the run ends if it is not that of the study."""
    try:
        return cohort_in_memory(context.cohort, context.inputs, context.allow_proxies, context.cohort_hash)
    except InputError as error:
        if context.cohort_hash is None:
            raise
        raise RunEnds(
            f"the cohort has changed since the study began: {one_line(error)}",
            "restore the file and run the same command again, or choose another --out for the changed cohort",
        ) from None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit the threads of numerical libraries, and of PyTorch if a network has imported it."""
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    with threadpool_limits(count):
        try:
            if torch:
                torch.set_num_threads(count)
            yield
        finally:
            if torch:
                torch.set_num_threads(before)


_shared_for: tuple[Cohort, str] | None = None  # cohort and code whose fits share features


def _share_features(cohort: Cohort, code: str) -> None:
    """Compute the features of this cohort once for the next fits of this process by the same code."""
    global _shared_for
    if _shared_for is None or _shared_for[0] is not cohort or _shared_for[1] != code:
        _shared_for = cohort, code
        use_features(*(CohortFeatures(one.scans) for one in cohort.each_atlas()))


_together: tuple[Cohort, tuple[str, ...], str, Sources] | None = None  # cohort, targets and code


def _sources(cohort: Cohort, targets: tuple[str, ...], code: str) -> Sources:
    """Sources of all targets of a study; a target of no study has none."""
    global _together
    if _together is None or _together[0] is not cohort or _together[1:3] != (targets, code):
        rows = [np.flatnonzero((cohort.sites != target) & (cohort.labels >= 0)) for target in targets]
        _together = cohort, targets, code, Sources(cohort, rows)
    return _together[3]


def forget_features() -> None:
    """Free what this process shares between fits."""
    global _shared_for, _together
    _shared_for = _together = None
    use_features()
