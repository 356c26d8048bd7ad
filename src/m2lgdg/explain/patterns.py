"""Explanations of linear methods, without PyTorch: activation patterns of a cohort, contributions to one decision.

`attribution.explain` uses it, and makes tables of the `Attributions` that both kinds of explanation give.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.methods.linear import Linear
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
Of = Literal["logit", "margin"]
TANGENT = ("tangent", "tangent_pearson", "log_euclidean")  # blocks with a diagonal
TABLE = "table."  # before the names of features that are tables of brain structure
CONSTANT = 1e-9  # sd of a column without confounds, as a proportion of its sd with them, up to which it is constant


class Attributions(NamedTuple):
    """Input of the tables, from either kind of explanation; an activation pattern counts as one subject."""

    rois: dict[str, Floats]  # (subject, roi) by feature
    edges: dict[str, Floats]  # (2, roi, roi) by feature: absolute and signed
    phenotypes: Floats  # (subject, input), signed
    gate: Floats  # (subject, weight)
    change: Floats  # (subject, 2): change of the decision from the baseline, and sum of the attributions
    tables: Mapping[str, Floats] = MappingProxyType({})  # (subject, column) by table of brain structure, signed
    values: Mapping[str, Floats] = MappingProxyType({})  # of these columns: distance from the mean of source in sd; no patterns
    modalities: tuple[str, ...] = ("imaging", "phenotypes")  # of the gate's weights


def squares(edges: Floats, n: int, *, diagonal: bool = False) -> Floats:
    """(subject, edge) values above the diagonal, or with it, row by row -> (subject, roi, roi) symmetric."""
    rows, columns = np.triu_indices(n, 0 if diagonal else 1)
    matrices = np.zeros((len(edges), n, n))
    matrices[:, rows, columns] = matrices[:, columns, rows] = edges
    return matrices


def over_others(sizes: Floats) -> Floats:
    """(subject, roi, roi) -> (subject, roi): mean over the other ROIs."""
    return np.asarray(sizes.sum(axis=2) / (sizes.shape[1] - 1))


def patterns(fitted: Linear, cohort: Cohort) -> Attributions:
    """Activation pattern of each block of a linear method, times its proportion of the decision's variance."""
    n = len(cohort.rois)
    features = {name: fitted._features(name, cohort).astype(np.float64) for name in fitted._weights()}
    features |= {f"{TABLE}{name}": values for name, values in table_values(fitted, cohort).items()}
    for table in fitted.table_blocks():  # a confound, such as head size, is constant without itself but for rounding
        rest = features[f"{TABLE}{table.name}"].std(axis=0) > CONSTANT * table.features(cohort).std(axis=0)  # (column,)
        features[f"{TABLE}{table.name}"] *= rest
    terms = {name: values @ fitted.state_[f"{name}.weights"] for name, values in features.items()}  # without intercepts
    decision = np.asarray(sum(terms.values()))
    if len(cohort) < 3 or decision.std() == 0:
        raise InputError(f"method {fitted.name} needs at least three subjects with different decisions to be explained.")
    rois, edges, tables, phenotypes = {}, {}, {}, np.zeros((1, len(cohort.inputs)))
    for name, values in features.items():
        pattern = activation_pattern(values, decision)
        if name in TANGENT:  # without its diagonal; in units of the sd the off-diagonal scale cancels
            rows, columns = np.triu_indices(n)
            pattern = pattern[rows != columns]
        (_, covariance), (_, variance) = np.cov(terms[name], decision)
        pattern *= max(covariance / variance, 0.0) / (np.abs(pattern).mean() or 1.0)
        if name == "phenotypes":
            phenotypes = pattern[None]
        elif name.startswith(TABLE):
            tables[name.removeprefix(TABLE)] = pattern[None]
        elif name == "amplitude":
            rois[name] = np.abs(pattern)[None]
        else:
            matrix = squares(pattern[None], n)
            rois[name], edges[name] = over_others(np.abs(matrix)), np.concatenate([np.abs(matrix), matrix])
    return Attributions(rois, edges, phenotypes, np.empty((len(cohort), 0)), np.empty((0, 2)), tables)


def table_values(fitted: Linear, cohort: Cohort) -> dict[str, Floats]:
    """(subject, column) values of each table without confounds; the mean of source for a subject without the table."""
    tables = fitted.table_blocks()
    scaled = fitted.scaled_confounds(cohort) if tables else {}
    return {
        table.name: np.where(table.present(cohort)[:, None], table.cleaned(cohort, scaled), table["mean"]) for table in tables
    }


def contributions(fitted: Linear, cohort: Cohort, scale: float) -> Attributions:
    """Weight times distance from the mean of source for each feature of a linear method, in logits times `scale`."""
    n, slope = len(cohort.rois), fitted.state_["calibration"][0] * scale
    rois, edges, phenotypes = {}, {}, np.zeros((len(cohort), len(cohort.inputs)))
    for name in fitted._weights():
        features = fitted._features(name, cohort) - fitted.state_[f"{name}.mean"]
        added = slope * features * fitted.state_[f"{name}.weights"]  # (subject, feature)
        if name == "phenotypes":
            phenotypes = added
        elif name == "amplitude":
            rois[name] = np.abs(added)
        else:
            matrices = squares(added, n, diagonal=name in TANGENT)
            rois[name] = over_others(np.abs(matrices))
            edges[name] = np.stack([np.abs(matrices).mean(axis=0), matrices.mean(axis=0)])
    tables, values, cleaned = {}, {}, table_values(fitted, cohort)
    for table in fitted.table_blocks():
        distance = cleaned[table.name] - table["mean"]  # (subject, column)
        tables[table.name], values[table.name] = slope * distance * table["weights"], distance / table["scale"]
    return Attributions(rois, edges, phenotypes, np.empty((len(cohort), 0)), np.empty((0, 2)), tables, values)


def activation_pattern(features: Floats, decision: Floats) -> Floats:
    """(feature,) cov(feature, decision) / var(decision) of features in units of their sd; 0 for constant features.

    Weights may be large only to cancel noise; the activation pattern shows where the signal is (Haufe et al. 2014).
    """
    deviation, centred = decision - decision.mean(), features - features.mean(axis=0)
    spread = centred.std(axis=0)
    return np.asarray(deviation @ (centred / np.where(spread > 1e-12, spread, np.inf)) / (deviation @ deviation))
