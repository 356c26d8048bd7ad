"""The study runner: every cell (method x variant x target x seed) once, in any order, on any engine, resumable.

The record of a cell is one file, written atomically under `cells/`. `predictions.csv` is assembled from the records in a
fixed order, so that its bytes depend neither on the engine, nor on the number of workers, nor on interruptions.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers import read
from m2lgdg.method import Method, make
from m2lgdg.registry import load_methods
from m2lgdg.splits import Fold, leave_one_site_out
from m2lgdg.storage import InputError, one_line, write_text
from m2lgdg.study.cells import Cell, distinct, make_cells
from m2lgdg.study.config import Study, check_study, read_study
from m2lgdg.study.engines import ENGINES, Engine
from m2lgdg.study.folder import locked_folder
from m2lgdg.study.predictions import COLUMNS

LEARNED = (
    "penalties",
    "history",
    "best_epoch",
    "parameters",
    "peak_memory_gib",
    "validation",
    "share",
    "notes",
)  # facts stored in a record
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


@dataclass
class Summary:
    """Progress or result of a run."""

    total: int
    done: int = 0
    reused: int = 0
    taken: int = 0  # reused cells copied from another study folder
    failed: list[tuple[str, str]] = field(default_factory=list)  # cell, reason
    seconds: float = 0.0


Watch = Callable[[Summary], None]


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
    """Run the cells that are not done yet and write predictions.csv.

    `shard` ("2/8") runs every eighth cell only, for job arrays that share the folder. A failed cell is recorded and the others
    continue, unless the GPU failed with it; the next run tries it again. Identical cells are copied from the folders in
    `reuse`, for example from a study with fewer seeds or methods.
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
    released = Path(study.cohort).is_dir()  # workers map a file, so a release folder is converted once, into the study folder
    cohort_path = out / "cohort.cohort" if released else Path(study.cohort)
    shard_cells = distinct(cells)[part - 1 :: parts]
    context = CellContext(
        str(out.resolve()),
        str(cohort_path.resolve()),
        cohort.inputs,
        cohort.allow_proxies,
        tuple(study.plugins),
        study.device,
        study.threads,
    )
    with locked_folder(out, study, cohort, cohort_path, (part, parts)):
        taken = sum(_copy_cell(out, cell, reuse) for cell in shard_cells if not _is_done(out, cell))
        todo = [cell for cell in shard_cells if not _is_done(out, cell)]
        summary = Summary(total=len(shard_cells), reused=len(shard_cells) - len(todo), taken=taken)
        if watch:
            watch(summary)
        # Grouped by target: methods that cache what they fit on a source find it in memory.
        todo.sort(key=lambda cell: cell.target)
        try:
            for cell, reason in ENGINES[engine](todo, partial(run_cell, context=context), max(jobs, 1), scheduler):
                if reason is None or _is_done(out, cell):  # a worker may be lost after it wrote its record
                    summary.done += 1
                else:
                    summary.failed.append((str(cell), reason))
                    _record_loss(out, cell, reason)
                    if reason.startswith(LOST):  # every later cell would fail for the same reason
                        collect(out, cells)
                        done = f"{sum(_is_done(out, cell) for cell in shard_cells)} of {len(shard_cells)} cells are done"
                        raise InputError(f"{cell}: {reason}. {done}; run the same command again to continue.")
                summary.seconds = time.monotonic() - start
                if watch:
                    watch(summary)
        except KeyboardInterrupt:
            collect(out, cells)
            raise Stopped(sum(_is_done(out, cell) for cell in shard_cells), len(shard_cells)) from None
        collect(out, cells)
    summary.seconds = time.monotonic() - start
    return summary


def _copy_cell(out: Path, cell: Cell, others: Sequence[str | Path]) -> bool:
    """Copy a cell with the same key, and its explanation, from another study folder; False if none has it."""
    for other in others:
        record = read_record(other, cell) or {}
        explained = explanation_path(other, cell.key)
        if record.get("status") != "done" or (cell.explain and "unexplained" not in record and not explained.is_dir()):
            continue
        if explained.is_dir():
            shutil.copytree(explained, explanation_path(out, cell.key), dirs_exist_ok=True)
        record |= _head(cell)  # the training may have another name here, such as a sweep value that is now the default
        write_text(record_path(out, cell), json.dumps(record, ensure_ascii=False) + "\n")
        return True
    return False


def _record_loss(out: Path, cell: Cell, reason: str) -> None:
    """Write the record of a worker that was lost before it could do so itself."""
    if read_record(out, cell) is None:
        write_text(record_path(out, cell), json.dumps(_head(cell) | {"status": "failed", "reason": reason}) + "\n")


def _head(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in asdict(cell).items() if name not in ("fields", "explain")}


def _is_done(out: Path, cell: Cell) -> bool:
    return (read_record(out, cell) or {}).get("status") == "done"


def run_cell(cell: Cell, context: CellContext) -> str | None:
    """Fit on source, predict the target and write the record; returns the reason for a failure, or None."""
    start = time.monotonic()
    record = _head(cell)
    reason = None
    try:
        with fitted_cell(cell, context) as (fold, fitted):
            proba = fitted.predict_proba(fold.target)[:, 1]
            if cell.explain:
                record |= _explain_cell(cell, fitted, fold, context)
        record |= {
            "status": "done",
            "subjects": fold.target.subjects.tolist(),
            "labels": fold.target.labels.tolist(),
            "proba": proba.tolist(),
            "learned": {name: fitted.facts_[name] for name in LEARNED if name in fitted.facts_},
        }
    except Exception as error:  # a user's method may raise anything; the other cells must continue
        reason = failure_reason(error)
        if not isinstance(error, InputError):
            record["traceback"] = traceback.format_exc()
            if _gpu_lost():
                reason = f"{LOST} ({reason})"
    if reason is not None:
        record |= {"status": "failed", "reason": reason}
    record["seconds"] = round(time.monotonic() - start, 3)
    write_text(record_path(context.out, cell), json.dumps(record, ensure_ascii=False) + "\n")
    return reason


@contextmanager
def fitted_cell(cell: Cell, context: CellContext) -> Iterator[tuple[Fold, Method]]:
    """Fold of a cell, and its method fitted on source; the block runs with the cell's number of threads."""
    from threadpoolctl import threadpool_limits

    load_methods(context.plugins)
    with threadpool_limits(context.threads), _torch_threads(context.threads):
        cohort = _load(context.cohort).with_inputs(context.inputs, allow_proxies=context.allow_proxies)
        (fold,) = leave_one_site_out(cohort, [cell.target])
        yield fold, make(cell.method, **cell.fields).fit(fold.source, seed=cell.seed, device=context.device)


def _gpu_lost() -> bool:
    """Whether this process lost its GPU; PyTorch is not imported to find out."""
    devices = sys.modules.get("m2lgdg.devices")
    return devices is not None and devices.cuda_failed()


def failure_reason(error: Exception) -> str:
    """Reason for a failed cell: the text of an InputError, or type and message of any other exception."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {one_line(error)}"


def _explain_cell(cell: Cell, fitted: Method, fold: Fold, context: CellContext) -> dict[str, str]:
    """Write the explanation of a cell; a method or target that cannot be explained does not fail the cell."""
    from m2lgdg.explain.attribution import explain

    try:
        explanation = explain(fitted, fold.target, steps=cell.explain, device=context.device, source=fold.source)
    except InputError as error:
        return {"unexplained": str(error)}
    explanation.save(explanation_path(context.out, cell.key))
    return {}


def explanation_path(out: str | Path, key: str) -> Path:
    """Folder of a cell's explanation."""
    return Path(out) / "explanations" / key


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


@cache
def _load(path: str) -> Cohort:
    return Cohort.load(path)


def record_path(out: str | Path, cell: Cell) -> Path:
    """File of a cell's record."""
    return Path(out) / "cells" / f"{cell.key}.json"


def read_record(out: str | Path, cell: Cell) -> dict[str, Any] | None:
    """Record of a cell, or None if it does not exist or cannot be read."""
    try:
        record = json.loads(record_path(out, cell).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("key") != cell.key:
        return None
    needed = {"done": {"subjects", "labels", "proba"}, "failed": {"reason"}}.get(str(record.get("status")))
    return record if needed is not None and needed <= set(record) else None


def collect(out: str | Path, cells: list[Cell]) -> pd.DataFrame:
    """Write predictions.csv from the finished cells and failures.csv from the failed ones."""
    rows, failures = [], []
    for cell in cells:
        record = read_record(out, cell)
        head = (cell.method, cell.variant, cell.seed, cell.target)
        if record is None:
            continue
        if record["status"] == "done":
            triples = zip(record["subjects"], record["labels"], record["proba"], strict=True)
            rows += [(*head, subject, label, proba) for subject, label, proba in triples]
        else:
            failures.append((*head, record["reason"]))
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_text(Path(out) / "predictions.csv", table.to_csv(index=False, lineterminator="\n"))
    failed = Path(out) / "failures.csv"
    if failures:
        failed_table = pd.DataFrame(failures, columns=[*COLUMNS[:4], "reason"])
        write_text(failed, failed_table.to_csv(index=False, lineterminator="\n"))
    else:
        failed.unlink(missing_ok=True)
    return table


def checked(study: Study | dict[str, Any] | str | Path) -> Study:
    """Validated study from a file, plain values or a `Study`."""
    if isinstance(study, dict):
        return check_study(study, "study")
    return study if isinstance(study, Study) else read_study(study)


def study_cohort(study: Study) -> Cohort:
    """Cohort of a study, with the inputs of the study."""
    options: dict[str, Any] = dict(study.options)
    cohort = read(study.cohort, study.kind, **options)
    if study.cohort_hash not in (None, cohort.hash):
        raise InputError(
            f"{study.cohort} has changed since the study was run (hash {cohort.hash[:12]}, not {study.cohort_hash[:12]})."
        )
    inputs = cohort.inputs if study.inputs is None else study.inputs
    return cohort.with_inputs(inputs, allow_proxies=study.allow_proxies or cohort.allow_proxies)


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
