"""Integrated gradients of networks: attributions of their decisions to features and phenotypes.

`explain` imports this module, and with it PyTorch, when it explains a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.deep import Batch, DeepMethod
from m2lgdg.devices import choose_device
from m2lgdg.explain.patterns import TABLE, Attributions, Floats, Of, over_others, squares
from m2lgdg.explain.representation import read_representation
from m2lgdg.method import Method
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.scans import SERIES
from m2lgdg.storage import InputError

Values = Mapping[str, Tensor]

SUBJECTS_AT_ONCE = 4  # subjects explained at a time
POINTS_AT_ONCE = 16  # path points per pass, unless the network names a number: a large one takes 0.2 GB for each
BASELINES = {  # by whether the network has its own, and whether the scans are series
    (False, True): "zero: the mean of a standardised series, no correlation, an average phenotype",
    (False, False): "zero: no correlation, an average phenotype",
    (True, True): "mean of source for connectivity and amplitude, an average phenotype",
    (True, False): "mean of source for connectivity, an average phenotype",
}


def explain_network(
    fitted: Method,
    cohort: Cohort,
    visible: Cohort,
    source: Cohort | None,
    *,
    of: Of,
    steps: int,
    device: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[Attributions, pd.DataFrame | None, dict[str, Any]]:
    """Attributions of a network, the map of its representation, and what `explanation.json` says of both."""
    assert isinstance(fitted, DeepMethod)
    attributions = _network_attributions(fitted, visible, of, steps, choose_device(device), progress)
    network = fitted.network()
    baseline = BASELINES[bool(_baselines(network)), cohort.values == SERIES]
    about: dict[str, Any] = {"baseline": f"{baseline}{', average regions of tables' if attributions.tables else ''}"}
    points = None
    if hasattr(network, "parts"):  # a user's own method may have none
        points, about["readability"] = read_representation(fitted, cohort, source)
    return attributions, points, about


def _network_attributions(
    fitted: DeepMethod, cohort: Cohort, of: Of, steps: int, device: torch.device, progress: Callable[[int, int], None] | None
) -> Attributions:
    network = fitted.network().to(device).requires_grad_(False)
    scaler = PhenotypeScaler.restore(tuple(fitted.facts_["inputs"]), fitted.state_, "scaler")
    rois: dict[str, list[Floats]] = {}
    edges: dict[str, Floats] = {}
    tables: dict[str, list[Floats]] = {}
    given: dict[str, list[Floats]] = {}
    phenotypes, gates, changes = [], [], []
    for start in range(0, len(cohort), SUBJECTS_AT_ONCE):
        some = cohort.select(np.arange(start, min(start + SUBJECTS_AT_ONCE, len(cohort))))
        batch = fitted.make_batch(some, scaler, device)
        with torch.no_grad():
            classes = network(batch).argmax(dim=1) if of == "logit" else None  # (subject,) class with the higher logit
        attributed, change = integrated_gradients(network, batch, steps, classes)
        values = {name: value.double().cpu().numpy() for name, value in attributed.items()}
        # Signs point to patient: what raises the control's logit points to control.
        sign = np.ones(len(batch)) if classes is None else 2.0 * classes.cpu().numpy() - 1
        phenotypes.append(values.pop("phenotypes") * sign[:, None])
        for name in [name for name in values if name.startswith(TABLE)]:
            tables.setdefault(name.removeprefix(TABLE), []).append(values.pop(name) * sign[:, None])
            given.setdefault(name.removeprefix(TABLE), []).append(batch[name].double().cpu().numpy())
        for name, value in values.items():
            matrices = _matrices(name, value * sign.reshape(-1, *[1] * (value.ndim - 1)), len(cohort.rois))
            if matrices is None:
                rois.setdefault(name, []).append(_over_time(name, value, len(cohort.rois)))
            else:
                rois.setdefault(name, []).append(over_others(matrices[0]))
                edges[name] = edges.get(name, 0.0) + matrices.sum(axis=1) / len(cohort)
        gates.append(_gate(network, batch))
        changes.append(change.double().cpu().numpy())
        if progress:
            progress(start + len(some), len(cohort))
    scores = {name: np.concatenate(pieces) for name, pieces in rois.items()}
    by_table, columns = ({name: np.concatenate(pieces) for name, pieces in each.items()} for each in (tables, given))
    modalities = tuple(getattr(network, "modalities", ("imaging", "phenotypes")))
    whole = (np.concatenate(phenotypes), np.concatenate(gates), np.concatenate(changes))
    return Attributions(scores, edges, *whole, by_table, columns, modalities)


def integrated_gradients(
    network: nn.Module, batch: Batch, steps: int, classes: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Attributions of the logit of each subject's class to every feature and to "phenotypes", from a baseline.

    The baseline is zero, or the value of a feature in `network.baselines()` where the network has that method.
    Without `classes` (subject,) they are of logit(patient) - logit(control). Also returns (subject, 2): the change of this
    logit or difference from the baseline, and the sum of the attributions.
    """
    given = {name: value.float() for name, value in _values(batch).items()}
    known = _baselines(network)
    start = {name: known[name].expand_as(value) if name in known else torch.zeros_like(value) for name, value in given.items()}
    start = {name: value.clone().requires_grad_() for name, value in start.items()}
    points = max(getattr(network, "points_at_once", POINTS_AT_ONCE) // len(batch), 1)

    def decisions(values: Values) -> Tensor:
        logits: Tensor = network(_batch(values, batch)).view(-1, len(batch), 2)  # (point, subject, class)
        return logits[..., 1] - logits[..., 0] if classes is None else logits[..., torch.arange(len(batch)), classes]

    # What is affine in the inputs has the same gradient all along the path: it is computed at both ends only.
    affine = getattr(network, "affine", lambda same: same)
    first = _values(affine(_batch(start, batch)))
    with torch.no_grad():
        last = _values(affine(_batch(given, batch)))
        change = (decisions(last) - decisions(first))[0]
    mean = _mean_gradients(decisions, {name: value.detach() for name, value in first.items()}, last, steps, points)
    gradients = torch.autograd.grad([*first.values()], [*start.values()], mean, materialize_grads=True)
    attributed = {
        name: gradient * (value - start[name].detach())
        for (name, value), gradient in zip(given.items(), gradients, strict=True)
    }
    total = torch.stack([value.flatten(1).sum(1) for value in attributed.values()]).sum(0)
    return {"phenotypes": torch.zeros_like(batch.phenotypes)} | attributed, torch.stack([change, total], dim=1)


def _mean_gradients(
    decisions: Callable[[Values], Tensor], first: Values, last: Values, steps: int, points: int
) -> list[Tensor]:
    """Mean gradient of each value on the straight path to `last`, by Gauss-Legendre quadrature, some points at a time."""
    at = {name: value.clone().requires_grad_() for name, value in first.items()}
    means = [torch.zeros_like(value) for value in first.values()]
    like = means[0]
    nodes, weights = (
        torch.split(torch.tensor(each / 2, dtype=like.dtype, device=like.device), points)
        for each in np.polynomial.legendre.leggauss(steps)
    )
    for some, shares in zip(nodes, weights, strict=True):
        between = {
            name: (value + (some + 0.5).view(-1, *[1] * value.ndim) * (last[name] - first[name])).flatten(0, 1)
            for name, value in at.items()
        }  # (point * subject, ...)
        total = (decisions(between) * shares[:, None]).sum()
        if not total.requires_grad:  # the network uses what has no gradient alone, such as a graph of 0 and 1
            break
        for mean, gradient in zip(means, torch.autograd.grad(total, [*at.values()], materialize_grads=True), strict=True):
            mean += gradient
    return means


def _values(batch: Batch) -> dict[str, Tensor]:
    """Features, and phenotypes if there are any."""
    return dict(batch.features) | ({"phenotypes": batch.phenotypes} if batch.phenotypes.shape[1] else {})


def _batch(values: Values, subjects: Batch) -> Batch:
    """These values, (point * subject, ...) each."""
    features = dict(values)
    points = len(next(iter(features.values()))) // len(subjects)
    label, site = subjects.label.repeat(points), subjects.site.repeat(points)
    return Batch(features, features.pop("phenotypes", subjects.phenotypes.repeat(points, 1)), label, site)


def _baselines(network: Any) -> dict[str, Tensor]:
    """Feature -> its baseline, where a network states any."""
    return dict(network.baselines()) if hasattr(network, "baselines") else {}


def _matrices(name: str, values: Floats, n: int) -> Floats | None:
    """(2, subject, roi, roi) absolute and signed values of a connectivity feature, symmetric; None for other features."""
    edges = n * (n - 1) // 2
    if values.shape[1:] in ((edges,), (edges + n,)):
        both = squares(values, n, diagonal=values.shape[1] > edges)
    elif not name.endswith("series") and values.shape[1:] == (n, n):  # a series may have as many time points as ROIs
        both = values * (1 - np.eye(n))
    else:
        return None
    pair = np.stack([np.abs(both), both])
    return np.asarray((pair + pair.swapaxes(2, 3)) / 2)


def _over_time(name: str, values: Floats, n: int) -> Floats:
    """(subject, roi) or (subject, roi, time) -> (subject, roi): mean absolute value."""
    if values.ndim < 2 or values.shape[1] != n:
        raise InputError(f"feature {name} of shape {values.shape[1:]} cannot be explained: it does not map to {n} ROIs.")
    return np.asarray(np.abs(values).reshape(len(values), n, -1).mean(axis=2))


def _gate(network: Any, batch: Batch) -> Floats:
    """(subject, weight) of the network's gate; (subject, 0) without a gate."""
    with torch.no_grad():
        outputs = network.parts(batch) if hasattr(network, "parts") else {}
    return np.asarray(outputs["gate"].double().cpu()) if "gate" in outputs else np.empty((len(batch), 0))
