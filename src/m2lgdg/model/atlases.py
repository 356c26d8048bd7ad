"""The members of a model: one fitted method for each atlas, and the subjects of a cohort that each of them sees.

`Model` averages their calibrated logits, so that the member of a weak atlas, whose logits are close to 0, counts less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.method import FIRST, Method, has_atlas
from m2lgdg.methods.linear import Linear
from m2lgdg.methods.tables import table_weights
from m2lgdg.metrics import platt
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
PREFIX = "atlas-{}."  # starts the names of the arrays of a member in a model of several, numbered from 0


class MemberTarget(NamedTuple):
    """One member of a model, and the subjects of a target that have its atlas."""

    atlas: str
    member: Method
    rows: Rows
    target: Cohort  # these subjects, in this atlas


def new_member(method: Method) -> Method:
    """A method with the same fields, for one atlas."""
    return type(method)(**method.fields() | {"atlases": FIRST})


def fit_members(method: Method, source: Cohort, names: Iterable[str], **settings: Any) -> dict[str, Method]:
    """The method fitted in each atlas, on the source subjects that have it."""
    members = {}
    for name in names:
        try:
            members[name] = new_member(method).fit(source.parcellation(name), **settings)
        except InputError as error:
            raise InputError(f"atlas {name}: {error}") from None
    return members


def weigh_tables(members: Mapping[str, Method], source: Cohort) -> None:
    """Weigh tables anew, beside the mean logit of linear methods in all atlases, and add the same to the logit of each.

    A member has weighed them beside its own atlas, which tells less than the mean of several: they would count too much.
    """
    linear = {atlas: one for atlas, one in members.items() if isinstance(one, Linear)}
    names = [list(one.facts_.get("tables", {})) for one in linear.values()]
    if len(linear) < len(members) or not names[0] or any(some != names[0] for some in names):
        return
    if not all(one.base_.any() for one in linear.values()):  # tables alone: there is nothing beside them
        return
    rows = {atlas: np.flatnonzero(has_atlas(source, atlas)) for atlas in linear}
    lines = {atlas: platt(one.base_, source.labels[rows[atlas]], source.sites[rows[atlas]]) for atlas, one in linear.items()}
    logits = [(rows[atlas], lines[atlas][0] * one.base_ + lines[atlas][1]) for atlas, one in linear.items()]
    base = mean_of(logits, len(source))
    held_out = [
        mean_of([(rows[atlas], one.table_fits_[name].held_out) for atlas, one in linear.items()], len(source))
        for name in names[0]
    ]
    factors = table_weights(base, held_out, source)
    for atlas, one in linear.items():
        slope, offset = lines[atlas]
        one.held_out_ = one.base_ + one.weigh_tables(factors / slope, one.base_)
        one.state_["calibration"] = np.array([slope, offset])
        for name, factor, decision in zip(names[0], factors, held_out, strict=True):
            one.facts_["tables"][name]["relative"] = float(factor * np.nanstd(decision) / base.std())


def mean_calibration(members: Mapping[str, Method], source: Cohort) -> tuple[float, float]:
    """Slope and offset of the members' mean logit.

    Linear methods know their decisions on held-out source sites, to which they are fitted. Without them, the mean of the
    members' calibrated logits is taken as it is.
    """
    held_out = [(np.flatnonzero(has_atlas(source, name)), member.held_out_logits()) for name, member in members.items()]
    known = [(rows, values) for rows, values in held_out if values is not None]
    if len(known) < len(held_out):
        return 1.0, 0.0
    return platt(mean_of(known, len(source)), source.labels, source.sites)


def targets_of(members: Mapping[str, Method], target: Cohort) -> list[MemberTarget]:
    """Members whose atlas a target has; a subject without any of them is refused. A single member sees the whole target."""
    chosen = []
    for name, member in members.items():
        if len(members) == 1 or (target.atlases == ("",) and tuple(member.facts_["rois"]) == target.rois):  # no name
            chosen.append(MemberTarget(name, member, np.arange(len(target)), target))
        elif name in target.atlases:
            rows = np.flatnonzero(has_atlas(target, name))
            chosen.append(MemberTarget(name, member, rows, target.parcellation(name)))
    if not chosen:
        has = ", ".join(filter(None, target.atlases)) or "one without a name"
        raise InputError(f"the model was trained on the atlases {', '.join(members)}; the cohort has {has}.")
    if len(chosen) > 1 and target.atlases == ("",):
        names = " and ".join(one.atlas for one in chosen)
        raise InputError(f"the ROIs of the cohort are those of {names}; give its atlas a name (--atlas, or in dataset.toml).")
    without = np.setdiff1d(np.arange(len(target)), np.concatenate([one.rows for one in chosen]))
    if len(without):
        names = ", ".join(one.atlas for one in chosen)
        raise InputError(f"subject {target.subjects[without[0]]} has no scan in any atlas of the model ({names}).")
    return chosen


def mean_of(values: Iterable[tuple[Rows, Floats]], count: int) -> Floats:
    """(subject,) mean over the atlases that each subject has."""
    total, number = np.zeros(count), np.zeros(count)
    for rows, some in values:
        total[rows] += some
        number[rows] += 1
    return np.asarray(total / number)
