"""Which terms of a network's loss acted in a training: a few numbers for each, in place of every epoch.

`cells` stores them with the record of a cell (`terms`); pages on results pool them over trainings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ZERO = 1e-6  # a term whose mean over an epoch is not above it was zero there
CONSTANT = 0.02  # values in a training that differ by less, relative to the largest, are the same
Terms = dict[str, dict[str, float]]


def summarised(history: Sequence[Any]) -> Terms:
    """For each term of the loss: epochs of the training that have it, those in which it is not zero, mean and range over them.

    Values are as they enter the total loss, so times their weights.
    """
    values: dict[str, list[float]] = {}
    for epoch in history:
        for name, value in epoch.items() if isinstance(epoch, Mapping) else ():  # a plugin may keep anything under this name
            if not name.startswith("val_") and isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    return {
        name: {
            "epochs": len(each),
            "acted": sum(abs(value) > ZERO for value in each),
            **{"mean": _short(sum(each) / len(each)), "smallest": _short(min(each)), "largest": _short(max(each))},
        }
        for name, each in values.items()
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def is_constant(term: Mapping[str, float]) -> bool:
    """Whether a term was the same in every epoch of a training; one epoch shows nothing."""
    largest = max(abs(term["smallest"]), abs(term["largest"]))
    return term["epochs"] > 1 and term["largest"] - term["smallest"] <= CONSTANT * largest


def pooled(trainings: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each term: epochs that have it, epochs in which it is not zero, mean over trainings, and how many have it constant.

    `trainings` are the facts of records (`learned`); those without `terms` and without a history are left out.
    """
    every = [one.get("terms") or summarised(one.get("history") or []) for one in trainings]
    names = dict.fromkeys(name for terms in every for name in terms)
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        own = [terms[name] for terms in every if name in terms]
        result[name] = {key: sum(term[key] for term in own) for key in ("epochs", "acted")} | {
            "mean": sum(term["mean"] for term in own) / len(own),
            "trainings": len(own),
            "constant": sum(is_constant(term) for term in own),
        }
    return result
