"""Mean decision of a method over several atlases of the same scans: one fit for each atlas, and the mean of their logits.

`Method.fit` uses it if its cohort has several atlases and its field `atlases` selects more than one. Every part is calibrated
on source before it is averaged, so that the part of a weak atlas, whose logits are close to 0, counts less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.metrics import logit, platt, sigmoid
from m2lgdg.storage import InputError

if TYPE_CHECKING:
    from m2lgdg.method import Method

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
FIRST, ALL = "first", "all"
PREFIX = "atlas-{}."  # starts the names of the arrays of a part, numbered from 0
OF_SCAN = ("phenotypes missing", "short scan")  # quality flags that are the same in all atlases


class Part(NamedTuple):
    """One part of a model, and the subjects of a target that have its atlas."""

    atlas: str
    fitted: Method
    rows: Rows
    target: Cohort  # these subjects, in this atlas


def chosen_atlases(atlases: str | tuple[str, ...], cohort: Cohort) -> tuple[str, ...]:
    """Names of the atlases that the field `atlases` of a method selects from a cohort."""
    if atlases == FIRST:
        return cohort.atlases[:1]
    names = cohort.atlases if atlases == ALL else (atlases,) if isinstance(atlases, str) else atlases
    for name in names:
        if name not in cohort.atlases:
            cohort.parcellation(name)  # raises the error
        if names.count(name) > 1:
            raise InputError(f"field atlases: {name} is listed twice.")
    return names


def fit_parts(method: Method, source: Cohort, names: Iterable[str], **settings: Any) -> dict[str, Method]:
    """The method fitted in each atlas, on the source subjects that have it."""
    parts = {}
    for name in names:
        try:
            parts[name] = _empty_part(method).fit(source.parcellation(name), **settings)
        except InputError as error:
            raise InputError(f"atlas {name}: {error}") from None
    return parts


def joined_state(parts: Mapping[str, Method], source: Cohort) -> dict[str, npt.NDArray[Any]]:
    """Arrays of all parts, named as in a model folder, and the calibration of their mean logit.

    Linear methods know their decisions on held-out source sites, to which the calibration is fitted. Without them, the mean of
    the parts' calibrated logits is taken as it is.
    """
    state = {f"{PREFIX.format(i)}{name}": value for i, part in enumerate(parts.values()) for name, value in part.state_.items()}
    held_out = [(_rows(source, name), part.held_out_logits()) for name, part in parts.items()]
    known = [(rows, values) for rows, values in held_out if values is not None]
    calibration = platt(_mean(known, len(source)), source.labels) if len(known) == len(held_out) else (1.0, 0.0)
    return state | {"calibration": np.array(calibration)}


def split_parts(method: Method) -> dict[str, Method]:
    """Parts of a method, from its arrays and facts as a model folder stores them; empty for a model of one atlas."""
    parts = {}
    for i, (name, facts) in enumerate(method.facts_.get("parts", {}).items()):
        part, prefix = _empty_part(method), PREFIX.format(i)
        part.facts_ = dict(facts)
        part.state_ = {key.removeprefix(prefix): value for key, value in method.state_.items() if key.startswith(prefix)}
        part._folder = method._folder
        parts[name] = part
    return parts


def parts_for(method: Method, target: Cohort) -> list[Part]:
    """Parts of a model whose atlas a target has; a subject without any of them is refused."""
    chosen = []
    for name, fitted in method.parts_.items():
        if name in target.atlases:
            chosen.append(Part(name, fitted, _rows(target, name), target.parcellation(name)))
        elif target.atlases == ("",) and tuple(fitted.facts_["rois"]) == target.rois:  # an atlas without a name
            chosen.append(Part(name, fitted, np.arange(len(target)), target))
    if not chosen:
        has = ", ".join(filter(None, target.atlases)) or "one without a name"
        raise InputError(f"the model was trained on the atlases {', '.join(method.parts_)}; the cohort has {has}.")
    without = np.setdiff1d(np.arange(len(target)), np.concatenate([part.rows for part in chosen]))
    if len(without):
        names = ", ".join(part.atlas for part in chosen)
        raise InputError(f"subject {target.subjects[without[0]]} has no series in any atlas of the model ({names}).")
    return chosen


def mean_score(method: Method, target: Cohort) -> Floats:
    """(subject,) probability from the mean logit over the atlases that a subject has."""
    parts = parts_for(method, target)
    slope, offset = method.state_["calibration"]
    logits = [(part.rows, logit(part.fitted.predict_proba(part.target)[:, 1])) for part in parts]
    return sigmoid(slope * _mean(logits, len(target)) + offset)


def joined_flags(method: Method, target: Cohort) -> list[list[str]]:
    """Quality flags of each subject over all atlases; those that depend on the atlas end with its name."""
    raised: list[list[str]] = [[] for _ in range(len(target))]
    parts = parts_for(method, target)
    for part in parts:
        for row, flags in zip(part.rows, part.fitted.flags(part.target), strict=True):
            shown = [flag if flag.startswith(OF_SCAN) else f"{flag} ({part.atlas})" for flag in flags]
            raised[row] += [flag for flag in shown if flag not in raised[row]]
    rows = {part.atlas: part.rows.tolist() for part in parts}
    for row, flags in enumerate(raised):
        missing = [name for name in method.parts_ if row not in rows.get(name, ())]
        flags += [f"atlas missing: {' '.join(missing)}"] if missing else []
    return raised


def joined_ood_scores(method: Method, target: Cohort) -> dict[str, Floats]:
    """Out-of-distribution scores: of connectivity in each atlas, and of phenotypes once; NaN without that atlas."""
    scores: dict[str, Floats] = {}
    for part in parts_for(method, target):
        for kind, values in part.fitted.ood_scores(part.target).items():
            name = kind if kind == "phenotypes" else f"{kind}_{part.atlas}"
            scores.setdefault(name, np.full(len(target), np.nan))[part.rows] = values
    return scores


def in_one_atlas(target: Cohort, atlas: str) -> Cohort:
    """A target as a model of one atlas sees it; subjects without this atlas are refused."""
    if not target.parcellations:
        return target
    name = atlas if atlas in target.atlases else target.atlas
    absent = np.setdiff1d(np.arange(len(target)), _rows(target, name))
    if len(absent):
        raise InputError(f"subject {target.subjects[absent[0]]} has no series in atlas {name}, which the model needs.")
    return target.parcellation(name)


def _empty_part(method: Method) -> Method:
    return type(method)(**method.fields() | {"atlases": FIRST})


def _rows(cohort: Cohort, atlas: str) -> Rows:
    """Positions of the subjects that have an atlas."""
    further = cohort.parcellations.get(atlas)
    return np.arange(len(cohort)) if further is None else np.flatnonzero(further.present)


def _mean(values: Iterable[tuple[Rows, Floats]], count: int) -> Floats:
    """(subject,) mean over the atlases that each subject has."""
    total, number = np.zeros(count), np.zeros(count)
    for rows, some in values:
        total[rows] += some
        number[rows] += 1
    return np.asarray(total / number)
