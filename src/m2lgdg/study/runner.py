"""The study runner: every cell (method x variant x target x seed) once, in any order, on any engine, resumable.

`study.plan` makes the cells, an engine of `study.engines` runs each by `study.cells`, and `study.records` holds the results.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers import read
from m2lgdg.data.readers.selection import keep
from m2lgdg.fields import nearest
from m2lgdg.notebook import shown_table
from m2lgdg.registry import load_methods
from m2lgdg.storage import InputError
from m2lgdg.study.cells import LOST, CellContext, RunEnds, forget_features, run_cell
from m2lgdg.study.config import Study, read_study, study_of
from m2lgdg.study.engines import ENGINES, Engine
from m2lgdg.study.folder import locked_folder
from m2lgdg.study.plan import Cell, distinct, make_cells, refuse_only_here
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.records import Records

LAST_CELLS = 9  # of a method, whose mean time counts


@dataclass
class Summary:
    """Progress or result of a run."""

    total: int
    done: int = 0
    reused: int = 0
    taken: int = 0  # reused cells copied from another study folder
    failed: list[tuple[str, str]] = field(default_factory=list)  # cell, reason
    seconds: float = 0.0
    left: float | None = None  # seconds until the end, by the last cells of each method; None: not known yet
    expected: tuple[int, float] | None = None  # networks to train on the CPU, and about how many seconds at most
    at_least: bool = False  # whether some method has not been run yet, so that more time is left
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
        Part of the cells, such as "2/8", for job arrays that share the folder.
    reuse : sequence of paths
        Study folders to copy identical cells from, such as those of a study with fewer seeds.
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
    A failed cell is recorded and the others continue, unless the GPU failed with it; the next run tries it again. The run ends
    if the cohort or a plugin is changed meanwhile.
    """
    out = Path(out)
    study = checked(study)
    engine = engine or ("dask" if scheduler else "joblib" if jobs > 1 else "serial")
    if engine not in ENGINES:
        raise InputError(f"engine {engine} is not known; choose one of {', '.join(ENGINES)}.")
    shard_of = _shard(shard)
    for other in reuse:
        if not (Path(other) / "cells").is_dir():
            kind = "a copy written by m2lgdg share" if (Path(other) / "records.jsonl").is_file() else "not a study folder"
            raise InputError(f"--reuse {other}: it has no cells, because it is {kind}.")
    cohort = study_cohort(study)
    placed = on_device(study, scheduler)
    cells = make_cells(placed, cohort)
    cohort_path, context = cell_context(placed, cohort, out)
    own = distinct(cells)[shard_of[0] - 1 :: shard_of[1]]
    records = Records.of(out, cohort)
    summary = Summary(total=len(own), folder=str(out))
    with locked_folder(out, study, cohort, cohort_path, shard_of):
        summary.taken = sum(records.copy(cell, reuse) for cell in own if not records.done(cell))
        if placed.device == "cpu":
            summary.expected = expected_time([cell for cell in own if not records.done(cell)], cohort, jobs)
        work = partial(run_cell, context=context)
        try:
            run_items(
                own,
                work,
                records.done,
                summary,
                context,
                engine,
                jobs,
                scheduler,
                watch=watch,
                lost=records.lost,
                seconds=records.seconds,
            )
        finally:
            records.collect(cells)
    return summary


def run_items(
    items: Sequence[Any],
    work: Callable[[Any], str | None],
    is_done: Callable[[Any], bool],
    summary: Summary,
    context: CellContext,
    engine: Engine,
    jobs: int,
    scheduler: str | None = None,
    *,
    watch: Watch | None = None,
    lost: Callable[[Any, str], None] = lambda item, reason: None,
    seconds: Callable[[Any], float | None] = lambda item: None,
) -> None:
    """Run the items that are not done yet on an engine, and count them in the summary; `lost` is told of a failure.

    Items are cells, or trainings of a learning curve. Those of one target go to the same process, where methods share what they
    fit on its source. A failed item does not end the run, unless the GPU failed with it: every later one would fail, too.
    """
    start = time.monotonic()
    todo = sorted((item for item in items if not is_done(item)), key=lambda item: str(item.target))
    if engine != "serial":
        refuse_only_here(getattr(item, "cell", item) for item in todo)
    times = _Times(todo)
    summary.reused = len(items) - len(todo)
    if watch:
        watch(summary)
    try:
        with closing(ENGINES[engine](todo, work, max(jobs, 1), scheduler)) as results:
            for item, reason in results:
                if reason is None or is_done(item):  # a worker may be lost after it wrote its record
                    summary.done += 1
                else:
                    summary.failed.append((str(item), reason))
                    lost(item, reason)
                    if reason.startswith(LOST):
                        raise RunEnds(f"{item}: {reason}")
                summary.seconds = time.monotonic() - start
                finished = summary.done + len(summary.failed)
                times.add(item, seconds(item) or summary.seconds * jobs / finished, summary.seconds)
                summary.left, summary.at_least = times.left()
                if watch:
                    watch(summary)
    except RunEnds as error:
        done = f"{sum(map(is_done, items))} of {len(items)} cells are done"
        raise InputError(f"{error.reason}. {done}; {error.advice}.") from None
    except KeyboardInterrupt:
        raise Stopped(sum(map(is_done, items)), len(items)) from None
    finally:
        forget_features()


def expected_time(cells: Sequence[Cell], cohort: Cohort, jobs: int) -> tuple[int, float] | None:
    """Number of networks among the cells, and at most about how many seconds they train on `jobs` cores; None without any.

    By times that were measured on one core, which grow with the subjects and with the square of the ROIs. A network with
    another number of epochs does not count: it often is a small one, too, such as those of the demo.
    """
    measured = json.loads(files("m2lgdg.methods").joinpath("training_times.json").read_text(encoding="utf-8"))
    known, usual = measured["minutes"], load_methods()
    minutes = [known[cell.method] * _trainings(cell) for cell in cells if cell.method in known and _whole(cell, usual)]
    size = len(cohort) / measured["subjects"] * (len(cohort.rois) / measured["rois"]) ** 2
    return (len(minutes), 60 * sum(minutes) * size / max(jobs, 1)) if minutes else None


def _whole(cell: Cell, methods: Mapping[str, Any]) -> bool:
    return bool(cell.fields.get("epochs", methods[cell.method].epochs) == methods[cell.method].epochs)


def _trainings(cell: Cell) -> int:
    return 1 if cell.tune is None else 1 + cell.tune.count * cell.tune.folds


class _Times:
    """Time left: what is left of each method, in seconds of its last cells, at the pace of the last half of finished cells.

    The pace is work in seconds of wall time, so that busy cores and waiting workers count, and the slow start of a run does not
    for long. `start` and `now` are in seconds of one clock.
    """

    def __init__(self, items: Sequence[Any], start: float = 0.0) -> None:
        self.count = Counter(map(self._kind, items))
        self.last: dict[Any, deque[float]] = {}
        self.finished: list[tuple[float, Any]] = [(start, None)]  # when, and of which method

    @staticmethod
    def _kind(item: Any) -> tuple[str, str]:
        cell = getattr(item, "cell", item)  # of a training of a learning curve
        return cell.method, cell.variant

    def add(self, item: Any, seconds: float, now: float) -> None:
        kind = self._kind(item)
        self.count[kind] -= 1
        self.last.setdefault(kind, deque(maxlen=LAST_CELLS)).append(seconds)
        self.finished.append((now, kind))

    def left(self) -> tuple[float, bool]:
        """Seconds until the end, and whether a method that has not been run yet is not in them."""
        usual = {kind: max(statistics.mean(each), 1e-3) for kind, each in self.last.items()}
        rest = sum(count * usual[kind] for kind, count in self.count.items() if kind in usual)
        since = len(self.finished) - 1 - max(LAST_CELLS, len(self.finished) // 2)
        (begin, _), *recent = self.finished[max(since, 0) :]
        pace = sum(usual[kind] for _, kind in recent) / max(recent[-1][0] - begin, 1e-3)
        return rest / pace, any(count and kind not in usual for kind, count in self.count.items())


def cell_context(study: Study, cohort: Cohort, out: Path) -> tuple[Path, CellContext]:
    """File of the cohort that workers read, and what they need besides the cell."""
    # Converted once, into the study folder, since workers read a file.
    in_memory = study._held is not None
    converted = (
        in_memory or Path(study.cohort).is_dir() or bool(study.options or study.exclude_sites) or study.atlas is not None
    )
    cohort_path = out / "cohort.cohort" if converted else Path(study.cohort)
    return cohort_path, CellContext(
        str(out.resolve()),
        str(cohort_path.resolve()),
        cohort.inputs,
        cohort.allow_proxies,
        tuple(str(Path(plugin).absolute()) for plugin in study.plugins),
        study.device,
        study.threads,
        keep_features=True,
        cohort_hash=cohort.hash,
        targets=tuple(study.targets or cohort.site_names),
    )


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
    content = without_sites(content, study.exclude_sites)
    inputs = content.inputs if study.inputs is None else study.inputs
    for column in inputs:
        if column not in content.phenotypes:
            hint = nearest(column, list(map(str, content.phenotypes.columns)))
            raise InputError(f"key inputs: {column} is not a phenotype of cohort {content.name}{hint}")
    cohort = content.with_inputs(inputs, allow_proxies=study.allow_proxies or content.allow_proxies)
    if study.cohort_hash not in (None, content.hash, cohort.hash):  # study.json has the hash with the inputs of the study
        raise InputError(
            f"{study.cohort} has changed since the study was run (hash {content.hash[:12]}, not {study.cohort_hash[:12]})."
        )
    return cohort


def without_sites(cohort: Cohort, sites: Sequence[str]) -> Cohort:
    """The cohort without some of its sites, whose subjects are listed as excluded."""
    for site in sites:
        if site not in cohort.site_names:
            raise InputError(
                f"key exclude_sites: {site} is not a site of cohort {cohort.name}{nearest(site, cohort.site_names)}"
            )
    return keep(cohort, ~np.isin(cohort.sites, sites), lambda _: ("site left out by the user",)) if sites else cohort


def on_device(study: Study, scheduler: str | None = None) -> Study:
    """The study with the device that `auto` means here, which is part of the keys of its cells.

    A device that this machine does not have is refused; a scheduler's workers may have it.
    """
    classes = [load_methods()[name] for name in study.methods]
    if study.device == "auto":
        return study.model_copy(update={"device": _automatic(any(cls.stochastic for cls in classes), scheduler)})
    deep, devices = (sys.modules.get(f"m2lgdg.{name}") for name in ("deep", "devices"))  # imported if a method is a network
    if deep and devices and not scheduler and any(issubclass(cls, deep.DeepMethod) for cls in classes):
        try:
            devices.choose_device(study.device)
        except InputError as error:
            raise InputError(
                f"{str(error).rstrip('.')}; add --set device=cpu to run the study on the CPU, which is slower."
            ) from None
    return study


def _automatic(trains: bool, scheduler: str | None) -> str:
    """The device that networks use here; methods without randomness use the CPU, and so does all without PyTorch."""
    if trains and scheduler:
        raise InputError("device auto may differ between the workers of a scheduler; name one, such as --set device=cuda.")
    if not trains or find_spec("torch") is None:
        return "cpu"
    from m2lgdg.devices import choose_device

    return str(choose_device("auto"))


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--shard {text[:40]}: expected i/n with 1 <= i <= n, such as 2/8.")
    return int(found[1]), int(found[2])
