"""The terms of each network's loss in training: a table of their values, and which of them did not act.

Made from the training histories in the records of a study; the report shows it below the training curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from m2lgdg.report.tables import Key, Table, label

CONSTANT = 0.02  # a term whose values in a training differ by less, relative to the largest, was the same in every epoch
MOST_NAMES = 3  # in a sentence
TITLE = "Terms of the training loss"
NOTE = (
    "mean over batches, then over trainings, of each term as it enters the total loss, so times its weight; kept epoch: the "
    "one that early stopping selected; smallest and largest: over all epochs of all trainings; a weight is '-' if no field of "
    "the method is declared to hold it, or if the training is of an earlier version"
)


def loss_terms(records: Iterable[Mapping[str, Any]]) -> tuple[Table | None, list[str]]:
    """The table for all methods whose loss has several terms (None without any), and clauses on terms that did not act."""
    trainings: dict[Key, list[Mapping[str, Any]]] = {}
    for record in records:
        learned = record.get("learned") or {}
        if learned.get("history") and len(_names([learned])) > 1:
            trainings.setdefault((str(record["method"]), str(record["variant"])), []).append(learned)
    rows: list[list[str]] = []
    idle: dict[tuple[str, str, str], list[Key]] = {}
    for key, learned in trainings.items():
        for name in _names(learned):
            values = [[epoch[name] for epoch in one["history"] if name in epoch] for one in learned]
            reason = _idle(values)
            kept = [epoch[name] for epoch in map(_kept, learned) if name in epoch]
            numbers = [_mean([one[0] for one in values if one]), _mean(kept), *_range(values)]
            remark = f"did not act ({reason})" if reason else ""
            rows.append([label(*key), name, _weight(learned, name), *map(_shown, numbers), remark])
            if reason:
                idle.setdefault((key[0], name, reason), []).append(key)
    if not rows:
        return None, []
    header = ["Method", "term", "weight", "first epoch", "kept epoch", "smallest", "largest", "remark"]
    clauses = [
        f"{name} of {_joined(keys)} ({reason} in every epoch of {_trainings(sum(len(trainings[key]) for key in keys))})"
        for (_, name, reason), keys in idle.items()
    ]
    return Table(TITLE, header, rows, [[0] * len(header) for _ in rows], NOTE), clauses


def _joined(keys: list[Key]) -> str:
    if len(keys) <= MOST_NAMES:
        return ", ".join(label(*key) for key in keys)
    return f"{label(*keys[0])} and {len(keys) - 1} variants"


def _names(learned: Iterable[Mapping[str, Any]]) -> list[str]:
    """Terms of the loss, in the order of their first epoch; validation scores start with val_."""
    epochs = (epoch for one in learned for epoch in one["history"])
    return [name for name in dict.fromkeys(name for epoch in epochs for name in epoch) if not name.startswith("val_")]


def _kept(learned: Mapping[str, Any]) -> Mapping[str, float]:
    epoch: Mapping[str, float] = learned["history"][int(learned.get("best_epoch") or len(learned["history"])) - 1]
    return epoch


def _idle(values: list[list[float]]) -> str:
    """Why a term did not act: zero or constant in every epoch of every training; empty if it changed."""
    if max(map(len, values)) < 2:  # one epoch shows nothing
        return ""
    ranges = [_range([one]) for one in values if one]
    if all(low == high == 0 for low, high in ranges):
        return "zero"
    same = all(high - low <= CONSTANT * max(abs(low), abs(high)) for low, high in ranges)
    return f"constant within {100 * CONSTANT:.0f} %" if same else ""


def _range(values: list[list[float]]) -> tuple[float, float]:
    pooled = [value for one in values for value in one]
    return min(pooled), max(pooled)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _weight(learned: list[Mapping[str, Any]], name: str) -> str:
    weights = {(one.get("losses") or {}).get(name, {}).get("weight") for one in learned}
    (weight,) = weights if len(weights) == 1 else (None,)
    return "-" if weight is None else f"{weight:g}"


def _shown(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4g}"


def _trainings(count: int) -> str:
    return f"all {count} trainings" if count > 1 else "the training"
