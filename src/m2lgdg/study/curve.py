"""Learning curve of a study: AUC at left-out sites against the number of source subjects.

Each cell of the study is trained on nested subsets of its source. The trend over sizes gives an extrapolation. `m2lgdg curve`
writes both with a figure. A training is one file of the folder, so that a stopped run continues.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import auc
from m2lgdg.registry import load_methods
from m2lgdg.splits import leave_one_site_out, nested_order
from m2lgdg.storage import InputError, write_text
from m2lgdg.study.cells import CellContext, RunEnds, failure_reason, fitted_cell
from m2lgdg.study.config import Study, usable, with_only
from m2lgdg.study.engines import Engine
from m2lgdg.study.folder import locked_folder
from m2lgdg.study.plan import Cell, make_cells
from m2lgdg.study.records import encoded, read_record
from m2lgdg.study.runner import Summary, Watch, cell_context, on_device, run_items, study_cohort

Floats = npt.NDArray[np.float64]
SIZES = (0.125, 0.25, 0.5, 0.75, 1.0)  # fractions of source
REPEATS = 3
LEAST = 4  # subjects of each class in a subset of source
DRAWS = 2000  # of the bootstrap over sites
FURTHER = (2, 4)  # extrapolated to these multiples of the largest size
POINTS = ["method", "target", "seed", "size", "repeat", "subjects", "patients", "AUC"]


class Point(NamedTuple):
    """One training of the curve: a cell with a subset of its source."""

    cell: Cell
    size: float  # fraction of source up to 1, or number of subjects
    repeat: int

    @property
    def target(self) -> str:
        """Target of the cell; an engine gives the points of one target to the same process."""
        return self.cell.target

    @property
    def row(self) -> list[object]:
        """First columns of the table of points."""
        return [self.cell.method, self.target, self.cell.seed, self.size, self.repeat]

    @property
    def key(self) -> str:
        """Hash of everything that can change the result."""
        identity = json.dumps([self.cell.key, self.size, self.repeat])
        return hashlib.sha256(identity.encode()).hexdigest()[:24]

    def __str__(self) -> str:
        return f"{self.cell.method}, target {self.target}, size {self.size:g}, repeat {self.repeat}"


@dataclass(frozen=True)
class Trend:
    """AUC = `level` + `slope` x log2(subjects), with the same two numbers of each bootstrap draw over sites."""

    level: float
    slope: float
    draws: Floats  # (draw, 2): level and slope

    def at(self, subjects: float) -> tuple[float, float, float]:
        """Extrapolated AUC with a 95 % interval; an AUC cannot exceed 1."""
        low, high = _interval(self.draws @ np.array([1.0, math.log2(subjects)]))
        return min(self.level + self.slope * math.log2(subjects), 1.0), min(low, 1.0), min(high, 1.0)

    def slope_interval(self) -> tuple[float, float]:
        """95 % interval of the gain for each doubling."""
        return _interval(self.draws[:, 1])

    def needed(self, goal: float) -> float | None:
        """Number of source subjects at which the trend reaches an AUC; None if it does not rise."""
        power = (goal - self.level) / self.slope if self.slope > 0 else math.inf
        return float(2.0**power) if power < 40 else None


def _interval(draws: Floats) -> tuple[float, float]:
    """95 % interval of bootstrap draws; NaN without any."""
    low, high = np.quantile(draws, (0.025, 0.975)) if len(draws) else (math.nan, math.nan)
    return float(low), float(high)


@dataclass(frozen=True)
class Curve:
    """Points, their mean by size with intervals, and the trend of each method."""

    points: pd.DataFrame
    table: pd.DataFrame
    trends: dict[str, Trend]


def linear_study(study: Study, names: Sequence[str] | None) -> Study:
    """The study with the named methods, or with its linear ones; without variants, sweeps, explanations and adapted track."""
    from m2lgdg.methods.linear import Linear

    known = load_methods()
    chosen = list(names) if names else [name for name in study.methods if usable(name) and issubclass(known[name], Linear)]
    if not chosen:
        raise InputError(f"the study has no linear method; choose with --method from {', '.join(study.methods)}.")
    plainly = {"variants": [], "sweep": {}, "explain": False, "track": "strict"}
    return with_only(study, chosen).model_copy(update=plainly)


def learning_curve(
    study: Study,
    out: str | Path,
    *,
    sizes: Sequence[float] = SIZES,
    repeats: int = REPEATS,
    jobs: int = 1,
    watch: Watch | None = None,
) -> tuple[Curve, Summary]:
    """Train every method of a study on subsets of each source, nested in each repeat, and test it on the target."""
    out, cohort = Path(out), study_cohort(study)
    placed = on_device(study)
    cells = [cell for cell in make_cells(placed, cohort) if _fewest(cohort, cell.target) >= study.min_per_class]
    if not cells:
        raise InputError(f"no target site has at least {study.min_per_class} patients and controls (key min_per_class).")
    check_sizes(cohort, study.targets, sizes, repeats)
    points = make_points(cells, sizes, repeats)
    path, context = cell_context(placed, cohort, out)
    summary = Summary(total=len(points))
    work = partial(run_point, context=context)
    engine: Engine = "joblib" if jobs > 1 else "serial"
    with locked_folder(out, study, cohort, path, (1, 1)):
        run_items(points, work, lambda point: _stored(out, point) is not None, summary, context, engine, jobs, watch=watch)
    rows = [row for row in (_stored(out, point) for point in points) if row is not None]
    if not rows:
        raise InputError(f"no training of the curve succeeded: {summary.failed[0][1].rstrip('.')}.")
    return summarise(pd.DataFrame(rows, columns=POINTS)), summary


def _fewest(cohort: Cohort, site: str) -> int:
    labels = cohort.labels[cohort.sites == site]
    return int(min((labels == 1).sum(), (labels == 0).sum()))


def check_sizes(cohort: Cohort, targets: Sequence[str] | None, sizes: Sequence[float], repeats: int) -> None:
    """Refuse sizes that a source cannot have, before anything is trained."""
    if len(set(sizes)) < 2 or len(set(sizes)) < len(sizes):
        raise InputError("a curve needs at least two different sizes, each listed once.")
    if repeats < 1:
        raise InputError(f"a curve needs at least one repeat, not {repeats}.")
    for fold in leave_one_site_out(cohort, targets):
        for size in sizes:
            if not 0 < size < math.inf or (size > 1 and size != round(size)):
                raise InputError(f"size {size:g} is neither a fraction of source (up to 1) nor a number of subjects.")
            if subset_size(fold.source, size) > len(fold.source):
                raise InputError(f"size {size:g}: source has only {len(fold.source)} subjects when {fold.site} is the target.")
            labels = fold.source.labels[nested_order(fold.source, 0)[: subset_size(fold.source, size)]]
            if min((labels == 0).sum(), (labels == 1).sum()) < LEAST:
                raise InputError(
                    f"size {size:g} is too small: with target {fold.site} it has {(labels == 1).sum()} patients and "
                    f"{(labels == 0).sum()} controls, and at least {LEAST} of each are needed; give larger ones with --sizes."
                )


def subset_size(source: Cohort, size: float) -> int:
    """Number of subjects of a subset of source."""
    return round(size * len(source)) if size <= 1 else round(size)


def subset_of_source(source: Cohort, size: float, repeat: int) -> Cohort:
    """Subset of source in its order, with nearly its proportions of sites and classes; a larger one contains a smaller one."""
    return source.select(np.sort(nested_order(source, repeat)[: subset_size(source, size)]))


def make_points(cells: Sequence[Cell], sizes: Sequence[float], repeats: int) -> list[Point]:
    """All trainings of the curve; the whole of source is one subset only, so it has one repeat for each cell."""
    return [
        Point(cell, float(size), repeat)
        for cell in cells
        for size in sorted(sizes)
        for repeat in range(1 if size == 1 else repeats)
    ]


def run_point(point: Point, context: CellContext) -> str | None:
    """Fit on a subset of source, predict the target and store the AUC; returns the reason for a failure, or None."""
    try:
        with fitted_cell(point.cell, context, partial(subset_of_source, size=point.size, repeat=point.repeat)) as (
            fold,
            fitted,
        ):
            area = auc(fold.target.labels, fitted.predict_proba(fold.target)[:, 1])
            counts = (len(fold.source), int((fold.source.labels == 1).sum()))
    except (RunEnds, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's method may raise anything, or exit; the other points must continue
        return failure_reason(error)
    value = None if math.isnan(area) else float(area)  # undefined if the target has one class
    write_text(_path(context.out, point), encoded({"key": point.key, "row": [*point.row, *counts, value]}))
    return None


def _path(out: str | Path, point: Point) -> Path:
    return Path(out) / "points" / f"{point.key}.json"


def _stored(out: Path, point: Point) -> list[object] | None:
    """Row of a finished training, or None; one that was altered counts as missing."""
    record = read_record(_path(out, point)) or {}
    row = record.get("row")
    return row if record.get("key") == point.key and isinstance(row, list) and row[:5] == point.row else None


def summarise(points: pd.DataFrame, seed: int = 0) -> Curve:
    """Mean AUC over sites by method and size, with bootstrap intervals over sites, and the trend of each method.

    Repeats and seeds are averaged within a site first. Sites without a defined AUC at every size are left out.
    """
    rows, trends = [], {}
    if not points["AUC"].dropna().between(0, 1).all() or not points["subjects"].between(1, 10**9).all():
        raise ValueError("an AUC or a number of subjects is out of range")
    for method, rows_of_method in points.groupby("method", sort=False):
        areas = rows_of_method.pivot_table(index="target", columns="size", values="AUC", aggfunc="mean").dropna()
        if not len(areas):
            raise InputError(f"method {method} has no target site with both classes, so there is no AUC.")
        used = rows_of_method[rows_of_method["target"].isin(areas.index)]
        subjects = used.groupby("size")["subjects"].mean()[areas.columns].to_numpy(dtype=np.float64)
        values = areas.to_numpy(dtype=np.float64)  # (site, size)
        drawn = _bootstrap_means(values, seed)
        low, high = np.quantile(drawn, (0.025, 0.975), axis=0) if len(drawn) else np.full((2, values.shape[1]), np.nan)
        columns = zip(areas.columns, subjects, values.mean(axis=0), low, high, strict=True)
        rows += [(method, size, n, mean, lowest, highest, len(areas)) for size, n, mean, lowest, highest in columns]
        trends[str(method)] = fit_trend(subjects, values.mean(axis=0), drawn)
    return Curve(points, pd.DataFrame(rows, columns=["method", "size", "subjects", "AUC", "low", "high", "sites"]), trends)


def _bootstrap_means(values: Floats, seed: int) -> Floats:
    """(draw, size) mean over sites drawn with replacement; no draws for a single site, which has no interval."""
    if len(values) < 2:
        return np.empty((0, values.shape[1]))
    chosen = np.random.default_rng(seed).integers(0, len(values), (DRAWS, len(values)))
    return np.asarray(values[chosen].mean(axis=1))


def fit_trend(subjects: Floats, areas: Floats, draws: Floats) -> Trend:
    """Least-squares line of AUC against log2 of the number of subjects, also of each draw (draw, size)."""
    design = np.stack([np.ones(len(subjects)), np.log2(subjects)], axis=1)
    solver = np.linalg.pinv(design)  # (2, size)
    level, slope = solver @ areas
    return Trend(float(level), float(slope), draws @ solver.T)
