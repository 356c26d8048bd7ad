"""The study runner: every cell (method x variant x target x seed) once, in any order, on any engine, resumable.

The record of a cell is one file, written atomically under `cells/` by the process that ran it (`study.records`). That process
has the cohort and the code of the cell's key, or the run ends.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers import read
from m2lgdg.method import Method, make
from m2lgdg.model.site_level import LEAST, Floats, at_cross_levels, cross_batches, source_share
from m2lgdg.notebook.html import shown_table
from m2lgdg.registry import load_methods
from m2lgdg.splits import Fold, leave_one_site_out
from m2lgdg.storage import InputError, one_line, write_text
from m2lgdg.study.cells import LIBRARIES, Cell, cell_code, distinct, make_cells
from m2lgdg.study.config import Study, read_study, study_of
from m2lgdg.study.engines import ENGINES, Engine
from m2lgdg.study.features import forget_features, share_features
from m2lgdg.study.folder import locked_folder
from m2lgdg.study.loaded import cohort_in_memory
from m2lgdg.study.predictions import ADAPTED, read_predictions
from m2lgdg.study.records import Records, are_probabilities, encoded, head, plain, record_path
from m2lgdg.study.records import explanation_path as explanation_path  # also imported from here

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
)  # facts stored in a record
_LOADING = threading.Lock()
LOST = "the GPU failed and can no longer be used by this process"


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
    share_features: bool = False  # in files of the study folder
    cohort_hash: str | None = None  # content that the cohort must have, with these inputs; None: any


@dataclass
class Summary:
    """Progress or result of a run."""

    total: int
    done: int = 0
    reused: int = 0
    taken: int = 0  # reused cells copied from another study folder
    failed: list[tuple[str, str]] = field(default_factory=list)  # cell, reason
    seconds: float = 0.0
    folder: str = ""  # of the study

    def scores(self) -> pd.DataFrame:
        """AUC of each method at each target site, (method, target), mean over seeds, with their mean over sites."""
        from m2lgdg.study.stats import cell_scores

        scores = cell_scores(read_predictions(self.folder), ("AUC",))
        scores["method"] = [one.method if not one.variant else f"{one.method} ({one.variant})" for one in scores.itertuples()]
        table = scores.pivot_table(index="method", columns="target", values="value", aggfunc="mean", sort=False)
        return table.assign(mean=table.mean(axis=1))

    def _repr_html_(self) -> str:
        """Counts and the AUC at each target site, for notebooks."""
        title = f"{self.done + self.reused} of {self.total} cells done, {len(self.failed)} failed"
        lines = [f"{cell}: {reason}" for cell, reason in self.failed[:10]]
        if not self.folder or not self.done + self.reused:
            return shown_table(title, (), (), lines)
        table = self.scores()
        rows = [(name, *(f"{value:.3f}" for value in row)) for name, row in zip(table.index, table.to_numpy(), strict=True)]
        return shown_table(f"{title}; AUC at each target site", ("method", *table.columns), rows, lines)


Watch = Callable[[Summary], None]


class RunEnds(InputError):
    """Reason why no further cell can be run, and what to do. The cell at hand has no record unless it was written before."""

    def __init__(self, reason: str, advice: str = "run the same command again to continue") -> None:
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice

    def __str__(self) -> str:
        return f"{self.reason}; {self.advice}."


class Stopped(KeyboardInterrupt):
    """The user stopped the run; finished cells are in `predictions.csv`."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done} of {total} cells done; run the same command again to continue")


def run_study(
    study: Study | dict[str, Any] | str | Path,
    out: str | Path,
    *,
    engine: Engine | None = None,
    jobs: int = 1,
    scheduler: str | None = None,
    shard: str | None = None,
    reuse: Sequence[str | Path] = (),
    watch: Watch | None = None,
) -> Summary:
    """Run the cells of a study that are not done yet and write predictions.csv.

    Parameters
    ----------
    study : dict, Study, str or Path
        A study file, or its keys in Python. There, `cohort` can be a `Cohort` in memory, which is stored in the study
        folder, and `methods` can hold `Method` objects.
    out : str or Path
        Study folder.
    engine : {"serial", "joblib", "dask"}, optional
        By default joblib if there are several jobs, dask if there is a scheduler.
    jobs : int
        Number of parallel processes.
    scheduler : str, optional
        Address of a Dask scheduler.
    shard : str, optional
        Part of the cells, such as "2/8".
    reuse : sequence of paths
        Study folders to copy identical cells from.
    watch : callable, optional
        Called with the `Summary` after every cell.

    Returns
    -------
    Summary
        Numbers of cells, failures, and `scores()`: the AUC of each method at each target site.

    Examples
    --------
    >>> import tempfile
    >>> import m2lgdg
    >>> study = {"cohort": m2lgdg.make_cohort("tiny"), "methods": ["fc-logistic", "prior"], "targets": ["east"]}
    >>> summary = m2lgdg.run_study(study, tempfile.mkdtemp())
    >>> summary.done, summary.failed, summary.scores().loc["prior", "east"].item()
    (2, [], 0.5)

    Notes
    -----
    `shard` ("2/8") runs every eighth cell only, for job arrays that share the folder. A failed cell is recorded and the others
    continue, unless the GPU failed with it; the next run tries it again. The run ends if the cohort or a plugin is changed
    meanwhile. Identical cells are copied from the folders in `reuse`, for example from a study with fewer seeds or methods.
    """
    start = time.monotonic()
    out = Path(out)
    study = checked(study)
    engine = engine or ("dask" if scheduler else "joblib" if jobs > 1 else "serial")
    if engine not in ENGINES:
        raise InputError(f"engine {engine} is not known; choose one of {', '.join(ENGINES)}.")
    part, parts = _shard(shard)
    for other in reuse:
        if not (Path(other) / "cells").is_dir():
            kind = "a copy written by m2lgdg share" if (Path(other) / "records.jsonl").is_file() else "not a study folder"
            raise InputError(f"--reuse {other}: it has no cells, because it is {kind}.")
    cohort = study_cohort(study)
    cells = make_cells(study, cohort)
    check_device(study, scheduler)
    cohort_path, context = cell_context(study, cohort, out)
    shard_cells = distinct(cells)[part - 1 :: parts]
    records = Records.of(out, cohort)
    with locked_folder(out, study, cohort, cohort_path, (part, parts)):
        taken = sum(records.copy(cell, reuse) for cell in shard_cells if not records.done(cell))
        todo = [cell for cell in shard_cells if not records.done(cell)]
        summary = Summary(total=len(shard_cells), reused=len(shard_cells) - len(todo), taken=taken, folder=str(out))
        if watch:
            watch(summary)
        # Grouped by target: methods that cache what they fit on a source find it in memory.
        todo.sort(key=lambda cell: cell.target)
        try:
            with closing(ENGINES[engine](todo, partial(run_cell, context=context), max(jobs, 1), scheduler)) as results:
                for cell, reason in results:
                    _count(summary, records, cell, reason)
                    summary.seconds = time.monotonic() - start
                    if watch:
                        watch(summary)
        except RunEnds as error:
            records.collect(cells)
            done = f"{sum(map(records.done, shard_cells))} of {len(shard_cells)} cells are done"
            raise InputError(f"{error.reason}. {done}; {error.advice}.") from None
        except KeyboardInterrupt:
            records.collect(cells)
            raise Stopped(sum(map(records.done, shard_cells)), len(shard_cells)) from None
        finally:
            forget_features(context.out)
        records.collect(cells)
    summary.seconds = time.monotonic() - start
    return summary


def cell_context(study: Study, cohort: Cohort, out: Path) -> tuple[Path, CellContext]:
    """File of the cohort that workers read, and what they need besides the cell."""
    # Converted once, into the study folder, since workers read a file.
    in_memory = study._held is not None
    converted = in_memory or Path(study.cohort).is_dir() or bool(study.options) or study.atlas is not None
    cohort_path = out / "cohort.cohort" if converted else Path(study.cohort)
    return cohort_path, CellContext(
        str(out.resolve()),
        str(cohort_path.resolve()),
        cohort.inputs,
        cohort.allow_proxies,
        tuple(str(Path(plugin).absolute()) for plugin in study.plugins),
        study.device,
        study.threads,
        share_features=True,
        cohort_hash=cohort.hash,
    )


def _count(summary: Summary, records: Records, cell: Cell, reason: str | None) -> None:
    """Add a cell that has ended to the summary; a lost GPU ends the run."""
    if reason is None or records.done(cell):  # a worker may be lost after it wrote its record
        summary.done += 1
        return
    summary.failed.append((str(cell), reason))
    records.lost(cell, reason)
    if reason.startswith(LOST):  # every later cell would fail for the same reason
        raise RunEnds(f"{cell}: {reason}")


def run_cell(cell: Cell, context: CellContext) -> str | None:
    """Fit on source, predict the target and write the record; returns the reason for a failure, or None."""
    start = time.monotonic()
    record = head(cell)
    reason = None
    try:
        with fitted_cell(cell, context) as (fold, fitted):
            proba = np.asarray(fitted.predict_proba(fold.target)[:, 1], dtype=np.float64).tolist()
            if not are_probabilities(proba, len(fold.target)):
                raise ValueError(f"method {cell.method} did not give one probability between 0 and 1 for each subject")
            if cell.adapt:
                record[ADAPTED] = adapted_proba(fitted, fold.target, np.array(proba), cell.seed, cell.adapt).tolist()
            if cell.explain:
                record |= _explain_cell(cell, fitted, fold, context)
        record |= {
            "status": "done",
            "subjects": fold.target.subjects.tolist(),
            "labels": fold.target.labels.tolist(),
            "proba": proba,
            "learned": {
                name: plain(fitted.facts_[name], f"method {cell.method}: fact {name}")
                for name in LEARNED
                if name in fitted.facts_
            },
        }
        text = encoded(record | {"seconds": round(time.monotonic() - start, 3)})
    except (RunEnds, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's method may raise anything, or exit; the other cells must continue
        reason = failure_reason(error)
        failed: dict[str, Any] = head(cell)
        if not isinstance(error, InputError):
            failed["traceback"] = traceback.format_exc()
            if _gpu_lost():
                reason = f"{LOST} ({reason})"
        failed |= {"status": "failed", "reason": reason, "seconds": round(time.monotonic() - start, 3)}
        text = encoded(failed)
    write_text(record_path(context.out, cell.key), text)
    return reason


def adapted_proba(fitted: Method, target: Cohort, proba: Floats, seed: int, size: int) -> Floats:
    """Probabilities of the adapted track: each subject of the target is at the level of up to `size` others, unlabelled.

    A method that `sees_batch` predicts with them itself. `proba` are the probabilities of the strict track, which stay where
    there is no batch.
    """
    if fitted.sees_batch:
        result = np.array(proba)
        for scored, batch in cross_batches(target.subjects.tolist(), seed, size):
            if len(batch) >= LEAST:
                result[scored] = fitted.predict_adapted(target.select(scored), target.select(batch))
        return result
    return at_cross_levels(proba, target.subjects.tolist(), source_share(fitted.facts_), seed, size)


@contextmanager
def fitted_cell(
    cell: Cell, context: CellContext, part: Callable[[Cohort], Cohort] | None = None
) -> Iterator[tuple[Fold, Method]]:
    """Fold of a cell, and its method fitted on source, or on the `part` of source that a function selects.

    The block runs with the cell's number of threads.
    """
    from threadpoolctl import threadpool_limits

    with _LOADING:  # cells of two studies may run in threads of one worker
        method = _cell_method(cell, context)  # imports PyTorch if it is a network, before its threads are limited
        cohort = _cell_cohort(context)
        if context.share_features:
            share_features(cohort, context.out, cell.code)
    with threadpool_limits(context.threads), _torch_threads(context.threads):
        (fold,) = leave_one_site_out(cohort, [cell.target])
        fold = fold if part is None else fold._replace(source=part(fold.source))
        yield fold, method.fit(fold.source, seed=cell.seed, device=context.device)


def _cell_method(cell: Cell, context: CellContext) -> Method:
    """The method of a cell, from the code in the cell's key."""
    try:
        load_methods(context.plugins)
        changed = cell_code(context.plugins, cell.explain) != cell.code
    except (InputError, OSError) as error:
        raise RunEnds(f"{cell} was not run: {one_line(error)}") from None
    if changed:
        parts = f"m2lgdg, a plugin, or the version of {', '.join(LIBRARIES[:-1])} or {LIBRARIES[-1]}"
        raise RunEnds(
            f"{cell} was not run: the code has changed since the study began, or a worker has other code ({parts})",
            "restart the workers of a cluster with the code of this machine, and run the same command again",
        )
    return make(cell.method, **cell.fields)


def _cell_cohort(context: CellContext) -> Cohort:
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


def _gpu_lost() -> bool:
    """Whether this process lost its GPU; PyTorch is not imported to find out."""
    devices = sys.modules.get("m2lgdg.devices")
    return devices is not None and devices.cuda_failed()


def failure_reason(error: BaseException) -> str:
    """Reason for a failed cell: the text of an InputError, or type and message of any other exception."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {one_line(error)}"


def _explain_cell(cell: Cell, fitted: Method, fold: Fold, context: CellContext) -> dict[str, str]:
    """Write the explanation of a cell; a method or target that cannot be explained does not fail the cell."""
    from m2lgdg.explain.attribution import explain

    try:
        explanation = explain(
            fitted, fold.target, of=cell.explain_of, steps=cell.explain, device=context.device, source=fold.source
        )
    except InputError as error:
        return {"unexplained": str(error)}
    explanation.save(explanation_path(context.out, cell.key))
    return {}


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Limit PyTorch's own thread pool; nothing to do unless a network has imported PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checked(study: Study | dict[str, Any] | str | Path) -> Study:
    """Validated study from a file, plain values or a `Study`."""
    if isinstance(study, dict):
        return study_of(study)
    return study if isinstance(study, Study) else read_study(study)


def study_cohort(study: Study) -> Cohort:
    """Cohort of a study, with the inputs of the study."""
    options: dict[str, Any] = dict(study.options)
    content = study._held if study._held is not None else read(study.cohort, study.kind, **options)
    content = content if study.atlas is None else content.parcellation(study.atlas)
    inputs = content.inputs if study.inputs is None else study.inputs
    cohort = content.with_inputs(inputs, allow_proxies=study.allow_proxies or content.allow_proxies)
    if study.cohort_hash not in (None, content.hash, cohort.hash):  # study.json has the hash with the inputs of the study
        raise InputError(
            f"{study.cohort} has changed since the study was run (hash {content.hash[:12]}, not {study.cohort_hash[:12]})."
        )
    return cohort


def check_device(study: Study, scheduler: str | None = None) -> None:
    """Refuse a device that this machine does not have; a scheduler's workers may have it."""
    classes = [load_methods()[name] for name in study.methods]
    deep, devices = (
        sys.modules.get(f"m2lgdg.{name}") for name in ("deep", "devices")
    )  # imported only if a method is a network
    if deep and devices and not scheduler and any(issubclass(cls, deep.DeepMethod) for cls in classes):
        try:
            devices.choose_device(study.device)
        except InputError as error:
            raise InputError(
                f"{str(error).rstrip('.')}; add --set device=cpu to run the study on the CPU, which is slower."
            ) from None


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    part, _, parts = text.partition("/")
    plain = text.isascii() and len(text) < 20 and part.isdecimal() and parts.isdecimal()
    if not (plain and 1 <= int(part) <= int(parts)):
        raise InputError(f"--shard {text[:40]}: expected i/n with 1 <= i <= n, such as 2/8.")
    return int(part), int(parts)
