"""What the records of a study tell of its trainings: the terms of the loss, and curves of loss and validation AUC.

`sections` shows both in the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import MaxNLocator

from m2lgdg.report.drawing import FAINT, WIDTH, Figure, Sheet, colour, draw, short
from m2lgdg.report.paper_tables import Key, label
from m2lgdg.report.tables import NAN, Column, Table, Value, columns
from m2lgdg.study.term_summary import CONSTANT

MOST_NAMES = 3  # in a sentence


def loss_terms(records: Iterable[Mapping[str, Any]]) -> tuple[Table | None, list[str]]:
    """The table of all methods whose loss has several terms (None without any), and clauses on terms that did not act."""
    trainings: dict[Key, list[Mapping[str, Any]]] = {}
    for record in records:
        learned = record.get("learned") or {}
        if learned.get("history") and len(_terms([learned])) > 1:
            trainings.setdefault((str(record["method"]), str(record["variant"])), []).append(learned)
    rows: list[list[Value]] = []
    idle: dict[tuple[str, str, str], list[Key]] = {}
    for key, learned in trainings.items():
        for name in _terms(learned):
            values = [[epoch[name] for epoch in one["history"] if name in epoch] for one in learned]
            selected = [one["history"][int(one.get("best_epoch") or len(one["history"])) - 1] for one in learned]
            means = [[each[0] for each in values if each], [epoch[name] for epoch in selected if name in epoch]]
            weights = {(one.get("losses") or {}).get(name, {}).get("weight") for one in learned}
            weight = weights.pop() if len(weights) == 1 else None
            pooled = [value for each in values for value in each]
            numbers = [float(np.mean(each)) if each else NAN for each in means]
            reason = _idle(values)
            remark = f"did not act ({reason})" if reason else ""
            rows.append([label(*key), name, NAN if weight is None else weight, *numbers, min(pooled), max(pooled), remark])
            if reason:
                idle.setdefault((key[0], name, reason), []).append(key)
    clauses = []
    for (_, name, reason), keys in idle.items():
        count = sum(len(trainings[key]) for key in keys)
        every = f"all {count} trainings" if count > 1 else "the training"
        some = ", ".join(label(*key) for key in keys)
        some = f"{label(*keys[0])} and {len(keys) - 1} variants" if len(keys) > MOST_NAMES else some
        clauses.append(f"{name} of {some} ({reason} in every epoch of {every})")
    names = ("first epoch", "kept epoch", "smallest", "largest")
    header = [Column("Method"), Column("term"), Column("weight", "number", "g"), *columns("number", *names, form=".4g")]
    note = (
        "mean over batches, then over trainings, of each term as it enters the total loss, so times its weight; kept epoch: "
        "the one that early stopping selected; smallest and largest: over all epochs of all trainings; a weight is '-' if no "
        "field of the method is declared to hold it, or if the training is of an earlier version"
    )
    table = Table("Terms of the training loss", [*header, Column("remark")], rows, note)
    return (table if rows else None), clauses


def _terms(learned: Iterable[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for one in learned for epoch in one["history"] for name in epoch)
    return [name for name in names if not name.startswith("val_")]


def _idle(values: list[list[float]]) -> str:
    """Why a term did not act; empty if it changed."""
    if max(map(len, values)) < 2:  # one epoch shows nothing
        return ""
    ranges = [(min(each), max(each)) for each in values if each]
    if all(low == high == 0 for low, high in ranges):
        return "zero"
    same = all(high - low <= CONSTANT * max(abs(low), abs(high)) for low, high in ranges)
    return f"constant within {100 * CONSTANT:.0f} %" if same else ""


def training_curves(histories: dict[str, list[list[dict[str, float]]]], hues: Mapping[Key, int]) -> Figure | None:
    """Loss and source-validation AUC by epoch: a thin line per training, and a thick mean up to the median length."""
    histories = {name: runs for name, runs in histories.items() if runs}
    if not histories:
        return None

    width, height = WIDTH, 1.8 * len(histories) + 0.4

    def paint(sheet: Sheet) -> None:
        edges = {"left": 0.7 / width, "right": 1 - 0.1 / width, "bottom": 0.45 / height, "top": 1 - 0.3 / height}
        grid = sheet.canvas.subplots(len(histories), 2, squeeze=False, gridspec_kw=edges | {"hspace": 0.42, "wspace": 0.18})
        for row, (name, runs) in zip(grid, histories.items(), strict=True):
            titles = (f"{short(name, 20)}, {len(runs)} training{'s' if len(runs) > 1 else ''}: training loss", "validation AUC")
            for axis, curve, title in zip(row, (_loss, _area), titles, strict=True):
                hue = colour(hues.get((name, ""), 0))
                _training_panel(axis, [[curve(epoch) for epoch in run] for run in runs], hue)
                axis.set_title(title, loc="left", fontsize=7.5, y=1.02)
        for axis in grid[-1]:
            axis.set_xlabel("epoch")

    caption = "Training loss (all terms) and AUC on source-validation subjects by epoch. Grey: each training; coloured: mean."
    alt = "Training curves; their numbers are in no table"
    return draw("training", caption, alt, (width, height), paint, layout=False)


def _training_panel(axis: Axes, lines: list[list[float]], hue: str) -> None:
    points = [np.column_stack([np.arange(1, len(line) + 1), line]) for line in lines]
    axis.add_collection(LineCollection(points, colors=FAINT, linewidths=0.6, alpha=0.6))
    until = int(np.median([len(line) for line in lines]))
    padded = np.array([line[:until] + [np.nan] * (until - len(line)) for line in lines])
    axis.plot(range(1, until + 1), np.nanmean(padded, axis=0), color=hue, lw=1.8)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.xaxis.set_label_coords(0.5, -0.2)  # a fixed place for both, so that no tick label is measured to find it
    axis.yaxis.set_label_coords(-0.1, 0.5)
    axis.yaxis.get_offset_text().set_x(-0.14)  # a power of ten is left of the title


def _loss(epoch: dict[str, float]) -> float:
    return sum(value for name, value in epoch.items() if not name.startswith("val_"))


def _area(epoch: dict[str, float]) -> float:
    return epoch.get("val_auc", math.nan)
