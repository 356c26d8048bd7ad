"""The study runner: every cell (method x variant x target x seed) once, in any order, on any engine, resumable.

A cell's record is one file written atomically under `cells/`; `predictions.csv` is put together from the records in a fixed
order, so that it is the same bytes whatever the engine, the number of workers, or how often the run was killed.
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
)  # facts a record keeps
LOST = "the GPU failed, and this process cannot use it any more"


@dataclass(frozen=True)
class CellContext:
    """What a worker needs besides the cell; plain values, so that any engine can carry it."""

    out: str
    cohort: str
    inputs: tuple[str, ...]
    allow_proxies: bool
    plugins: tuple[str, ...]
    device: str
    threads: int


@dataclass
class Summary:
    """How a run ended."""

    total: int
    done: int = 0
    reused: int = 0
    taken: int = 0  # of the reused ones, those from another study's folder
    failed: list[tuple[str, str]] = field(default_factory=list)  # cell, reason
    seconds: float = 0.0


Watch = Callable[[Summary], None]


class Stopped(KeyboardInterrupt):
    """The user stopped the run; the cells that were finished are in `predictions.csv`."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done} of {total} cells done; run the same again to go on")


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
    """Run the cells that are not there yet and put the predictions together.

    `shard` ("2/8") runs every eighth cell only, for job arrays that share the folder. A failing cell is recorded and the
    rest goes on, unless it took the GPU with it; running again tries it again. Cells of the folders in `reuse` are taken over
    where they are the same, which another study with some seeds or methods more has.
    """
    start = time.monotonic()
    out = Path(out)
    study = checked(study)
    engine = engine or ("dask" if scheduler else "joblib" if jobs > 1 else "serial")
    if engine not in ENGINES:
        raise InputError(f"engine {engine} is not known; it is one of {', '.join(ENGINES)}.")
    part, parts = _shard(shard)
    for other in reuse:
        if not (Path(other) / "cells").is_dir():
            kind = "a copy made by m2lgdg share" if (Path(other) / "records.jsonl").is_file() else "not the folder of a run"
            raise InputError(f"{other} has no cells to reuse: it is {kind}.")
    cohort = study_cohort(study)
    cells = make_cells(study, cohort)
    check_device(study, scheduler)
    released = Path(study.cohort).is_dir()  # workers map a file: a release folder is converted once, into the study
    cohort_path = out / "cohort.cohort" if released else Path(study.cohort)
    mine = distinct(cells)[part - 1 :: parts]
    place = CellContext(
        str(out.resolve()),
        str(cohort_path.resolve()),
        cohort.inputs,
        cohort.allow_proxies,
        tuple(study.plugins),
        study.device,
        study.threads,
    )
    with locked_folder(out, study, cohort, cohort_path, (part, parts)):
        taken = sum(_take_over(out, cell, reuse) for cell in mine if not _is_done(out, cell))
        todo = [cell for cell in mine if not _is_done(out, cell)]
        summary = Summary(total=len(mine), reused=len(mine) - len(todo), taken=taken)
        if watch:
            watch(summary)
        # One target after the other: methods that share what they fit on a source find it still in memory.
        todo.sort(key=lambda cell: cell.target)
        try:
            for cell, reason in ENGINES[engine](todo, partial(run_cell, place=place), max(jobs, 1), scheduler):
                if reason is None or _is_done(out, cell):  # a worker may be lost after its record is there
                    summary.done += 1
                else:
                    summary.failed.append((str(cell), reason))
                    _record_loss(out, cell, reason)
                    if reason.startswith(LOST):  # the cells after it would all fail for nothing of their own
                        collect(out, cells)
                        done = f"{sum(_is_done(out, cell) for cell in mine)} of {len(mine)} cells are done"
                        raise InputError(f"{cell}: {reason}. {done}; run the same again to go on.")
                summary.seconds = time.monotonic() - start
                if watch:
                    watch(summary)
        except KeyboardInterrupt:
            collect(out, cells)
            raise Stopped(sum(_is_done(out, cell) for cell in mine), len(mine)) from None
        collect(out, cells)
    summary.seconds = time.monotonic() - start
    return summary


def _take_over(out: Path, cell: Cell, others: Sequence[str | Path]) -> bool:
    """Copy a cell that one of the other folders has done, with its explanation; its key says that it is the same."""
    for other in others:
        record = read_record(other, cell) or {}
        explained = explanation_path(other, cell.key)
        if record.get("status") != "done" or (cell.explain and "unexplained" not in record and not explained.is_dir()):
            continue
        if explained.is_dir():
            shutil.copytree(explained, explanation_path(out, cell.key), dirs_exist_ok=True)
        record |= _head(cell)  # the same training may have another name here: a value of a sweep that is now the default
        write_text(record_path(out, cell), json.dumps(record, ensure_ascii=False) + "\n")
        return True
    return False


def _record_loss(out: Path, cell: Cell, reason: str) -> None:
    """The failure of a worker that could write no record itself."""
    if read_record(out, cell) is None:
        write_text(record_path(out, cell), json.dumps(_head(cell) | {"status": "failed", "reason": reason}) + "\n")


def _head(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in asdict(cell).items() if name not in ("fields", "explain")}


def _is_done(out: Path, cell: Cell) -> bool:
    return (read_record(out, cell) or {}).get("status") == "done"


def run_cell(cell: Cell, place: CellContext) -> str | None:
    """Fit on source, predict the target, write the record; returns the reason of a failure, or None."""
    start = time.monotonic()
    record = _head(cell)
    reason = None
    try:
        with fitted_cell(cell, place) as (fold, fitted):
            proba = fitted.predict_proba(fold.target)[:, 1]
            if cell.explain:
                record |= _explain_cell(cell, fitted, fold, place)
        record |= {
            "status": "done",
            "subjects": fold.target.subjects.tolist(),
            "labels": fold.target.labels.tolist(),
            "proba": proba.tolist(),
            "learned": {name: fitted.facts_[name] for name in LEARNED if name in fitted.facts_},
        }
    except Exception as error:  # a user's method may raise anything; the other cells must go on
        reason = failure_reason(error)
        if not isinstance(error, InputError):
            record["traceback"] = traceback.format_exc()
            if _gpu_lost():
                reason = f"{LOST} ({reason})"
    if reason is not None:
        record |= {"status": "failed", "reason": reason}
    record["seconds"] = round(time.monotonic() - start, 3)
    write_text(record_path(place.out, cell), json.dumps(record, ensure_ascii=False) + "\n")
    return reason


@contextmanager
def fitted_cell(cell: Cell, place: CellContext) -> Iterator[tuple[Fold, Method]]:
    """A cell's fold and its method fitted on source; inside the block, with the cell's number of threads."""
    from threadpoolctl import threadpool_limits

    load_methods(place.plugins)
    with threadpool_limits(place.threads), _torch_threads(place.threads):
        cohort = _load(place.cohort).with_inputs(place.inputs, allow_proxies=place.allow_proxies)
        (fold,) = leave_one_site_out(cohort, [cell.target])
        yield fold, make(cell.method, **cell.fields).fit(fold.source, seed=cell.seed, device=place.device)


def _gpu_lost() -> bool:
    """Without importing PyTorch for it: what has not been imported has lost nothing."""
    devices = sys.modules.get("m2lgdg.devices")
    return devices is not None and devices.lost()


def failure_reason(error: Exception) -> str:
    """Why a cell failed: our own sentence, or the kind and message of what a method raised."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {one_line(error)}"


def _explain_cell(cell: Cell, fitted: Method, fold: Fold, place: CellContext) -> dict[str, str]:
    """Write the cell's explanation; what cannot be explained (a method, a site of two subjects) does not fail the cell."""
    from m2lgdg.explain.attribution import explain

    try:
        found = explain(fitted, fold.target, steps=cell.explain, device=place.device, source=fold.source)
    except InputError as error:
        return {"unexplained": str(error)}
    found.save(explanation_path(place.out, cell.key))
    return {}


def explanation_path(out: str | Path, key: str) -> Path:
    """Where a cell's explanation lies."""
    return Path(out) / "explanations" / key


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Torch keeps a pool of its own; it is only there where a method is a network."""
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
    """Where a cell's record lies."""
    return Path(out) / "cells" / f"{cell.key}.json"


def read_record(out: str | Path, cell: Cell) -> dict[str, Any] | None:
    """A cell's record, or None where there is none that can be read."""
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
    """A study from its file or its plain values."""
    if isinstance(study, dict):
        return check_study(study, "study")
    return study if isinstance(study, Study) else read_study(study)


def study_cohort(study: Study) -> Cohort:
    """The study's cohort with the study's inputs."""
    options: dict[str, Any] = dict(study.options)
    cohort = read(study.cohort, study.kind, **options)
    if study.cohort_hash not in (None, cohort.hash):
        raise InputError(
            f"{study.cohort}: the content is not that of the study ({cohort.hash[:12]}, not {study.cohort_hash[:12]})."
        )
    inputs = cohort.inputs if study.inputs is None else study.inputs
    return cohort.with_inputs(inputs, allow_proxies=study.allow_proxies or cohort.allow_proxies)


def check_device(study: Study, scheduler: str | None = None) -> None:
    """Refuse a device that every network of the study would miss; a scheduler's workers may have what is not here."""
    classes = [load_methods()[name] for name in study.methods]
    deep, devices = (sys.modules.get(f"m2lgdg.{name}") for name in ("deep", "devices"))  # of a network's own importing
    if deep and devices and not scheduler and any(issubclass(cls, deep.DeepMethod) for cls in classes):
        try:
            devices.choose_device(study.device)
        except InputError as error:
            raise InputError(f"{str(error).rstrip('.')}; with --set device=cpu the study runs here, if slowly.") from None


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    part, _, parts = text.partition("/")
    plain = text.isascii() and len(text) < 20 and part.isdecimal() and parts.isdecimal()
    if not (plain and 1 <= int(part) <= int(parts)):
        raise InputError(f"--shard {text[:40]}: not of the form i/n with 1 <= i <= n.")
    return int(part), int(parts)
