"""`explain`: importance of ROIs, edges and phenotypes for the decisions of a fitted method.

Networks are explained by integrated gradients, linear methods by activation patterns. A study explains the cells it is asked
to after training, and the report shows the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.deep import Batch, DeepMethod
from m2lgdg.devices import choose_device
from m2lgdg.explain.explanation import (
    MAP_COLUMNS,
    Explanation,
    completeness_table,
    edge_table,
    gate_table,
    joined,
    phenotype_table,
    roi_table,
)
from m2lgdg.explain.representation import read_representation
from m2lgdg.method import Method
from m2lgdg.methods.linear import Linear
from m2lgdg.model.over_atlases import in_one_atlas, parts_for
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]
SUBJECTS_AT_ONCE = 4  # subjects explained at a time
POINTS_AT_ONCE = 16  # path points per pass: a large network takes 0.2 GB for each
LOOSE_COMPLETENESS = 0.1  # relative completeness error above which to warn
BASELINE = "zero: the mean of a standardised series, no correlation, an average phenotype"
BASELINE_OF_SOURCE = "mean of source for connectivity and amplitude, an average phenotype"
Of = Literal["logit", "margin"]
GRADIENTS = {
    "logit": "integrated gradients of the predicted class's logit; scores are mean absolute attributions",
    "margin": "integrated gradients of the patient's logit minus the control's; scores are mean absolute attributions",
}
PATTERNS = (
    "activation patterns (Haufe et al. 2014) of features in units of their sd; each block has mean 1 over edges, ROIs or "
    "phenotypes, times its proportion of the decision's variance"
)
CONTRIBUTIONS = (
    "contribution of each feature to the decision in logits: its weight times its distance from the baseline; scores are mean "
    "absolute contributions"
)
TANGENT = ("tangent", "tangent_pearson")  # blocks with a diagonal
AVERAGE = "mean of source, feature by feature"


class _Attributions(NamedTuple):
    """Input of the tables, from either kind of explanation; an activation pattern counts as one subject."""

    rois: dict[str, Floats]  # (subject, roi) by feature
    edges: dict[str, Floats]  # (2, roi, roi) by feature: absolute and signed
    phenotypes: Floats  # (subject, input), signed
    gate: Floats  # (subject, weight)
    change: Floats  # (subject, 2): change of the decision from the baseline, and sum of the attributions


def explain(
    fitted: Method,
    cohort: Cohort,
    *,
    of: Of = "logit",
    steps: int = 64,
    device: str = "cpu",
    source: Cohort | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Explain a fitted method's decisions on a cohort, preferably of subjects it was not trained on.

    `of` is what a network's attributions are of: the logit of the class it predicts (the higher of the two logits), as in the
    paper, or the `margin`, the patient's logit minus the control's. With the `source` it was trained on, the map of a network's
    representation shows both, and the probes use source.

    A network with thresholds (windowed graphs, top-k pooling) is discontinuous along the path, which gradients miss: its
    `completeness` is poor, and more `steps` do not improve it.
    """
    if not len(cohort):
        raise InputError(f"cohort {cohort.name} has no subjects to explain.")
    if fitted.parts_:
        settings: dict[str, Any] = {"of": of, "steps": steps, "device": device, "progress": progress}
        sources = {} if source is None else {part.atlas: part.target for part in parts_for(fitted, source)}
        parts = parts_for(fitted, cohort)
        return joined(
            {part.atlas: explain(part.fitted, part.target, source=sources.get(part.atlas), **settings) for part in parts}
        )
    visible = fitted.visible(cohort)  # as for a prediction: labels, sites and ids are hidden
    cohort = in_one_atlas(cohort, fitted.facts_["atlas"])
    if of not in GRADIENTS:
        raise InputError(f"explanations are of the {' or the '.join(GRADIENTS)}, not of {of!r}.")
    if steps < 1:
        raise InputError(f"integrated gradients need at least one step, not {steps}.")
    about: dict[str, Any] = {"method": fitted.name, "cohort": cohort.hash, "subjects": len(cohort)}
    points = pd.DataFrame(columns=list(MAP_COLUMNS))
    if isinstance(fitted, DeepMethod):
        attributions = _network_attributions(fitted, visible, of, steps, choose_device(device), progress)
        network = fitted.network()
        baseline = BASELINE_OF_SOURCE if _baselines(network) else BASELINE
        about |= {"scores": GRADIENTS[of], "of": of, "steps": steps, "baseline": baseline}
        if hasattr(network, "parts"):  # a user's own method may have none
            points, about["readability"] = read_representation(fitted, cohort, source)
    elif isinstance(fitted, Linear):
        attributions = _patterns(fitted, visible)
        about |= {"scores": PATTERNS, "steps": None, "baseline": None}
    else:
        raise InputError(f"method {fitted.name} cannot be explained: it is neither a network nor a linear method.")
    return _explanation(attributions, cohort, visible.inputs, points, about)


def explain_subject(fitted: Method, cohort: Cohort, *, steps: int = 64) -> Explanation:
    """As `explain`, for one subject; linear methods, which have no pattern then, by the contribution of each feature."""
    if not isinstance(fitted, Linear):
        return explain(fitted, cohort, steps=steps)
    if fitted.parts_:
        parts = parts_for(fitted, cohort)
        scale = fitted.state_["calibration"][0] * (fitted.recalibration or (1.0, 0.0))[0] / len(parts)
        explained = {part.atlas: _subject(part.fitted, part.target, scale) for part in parts}
        total = pd.concat([one.phenotypes for one in explained.values()]).groupby("phenotype", sort=False)["direction"].sum()
        return joined(explained, phenotype_table(total.to_numpy()[None], total.index.tolist()))
    return _subject(fitted, in_one_atlas(cohort, fitted.facts_["atlas"]), (fitted.recalibration or (1.0, 0.0))[0])


def _subject(fitted: Method, cohort: Cohort, scale: float) -> Explanation:
    """Contributions to the decision of a linear method in one atlas, times `scale`."""
    assert isinstance(fitted, Linear)
    visible = fitted.visible(cohort)
    about = {"method": fitted.name, "cohort": cohort.hash, "subjects": len(cohort), "scores": CONTRIBUTIONS, "steps": None}
    about["baseline"] = AVERAGE
    points = pd.DataFrame(columns=list(MAP_COLUMNS))
    return _explanation(_contributions(fitted, visible, scale), cohort, visible.inputs, points, about)


def _explanation(
    attributions: _Attributions, cohort: Cohort, inputs: tuple[str, ...], points: pd.DataFrame, about: dict[str, Any]
) -> Explanation:
    return Explanation(
        rois=roi_table(attributions.rois, cohort),
        edges=edge_table(attributions.edges, cohort.rois),
        phenotypes=phenotype_table(attributions.phenotypes, inputs),
        gate=gate_table(attributions.gate, cohort),
        completeness=completeness_table(attributions.change, cohort),
        map=points,
        about=about | {"atlas": cohort.atlas},
    )


def _network_attributions(
    fitted: DeepMethod, cohort: Cohort, of: Of, steps: int, device: torch.device, progress: Callable[[int, int], None] | None
) -> _Attributions:
    network = fitted.network().to(device).requires_grad_(False)
    scaler = PhenotypeScaler.restore(tuple(fitted.facts_["inputs"]), fitted.state_, "scaler")
    rois: dict[str, list[Floats]] = {}
    edges: dict[str, Floats] = {}
    phenotypes, gates, changes = [], [], []
    for start in range(0, len(cohort), SUBJECTS_AT_ONCE):
        some = cohort.select(np.arange(start, min(start + SUBJECTS_AT_ONCE, len(cohort))))
        batch = fitted.make_batch(some, scaler, device)
        classes = _predicted(network, batch) if of == "logit" else None
        attributed, change = integrated_gradients(network, batch, steps, classes)
        values = {name: value.double().cpu().numpy() for name, value in attributed.items()}
        # Signs point to patient: what raises the control's logit points to control.
        sign = np.ones(len(batch)) if classes is None else 2.0 * classes.cpu().numpy() - 1
        phenotypes.append(values.pop("phenotypes") * sign[:, None])
        for name, value in values.items():
            matrices = _matrices(name, value * sign.reshape(-1, *[1] * (value.ndim - 1)), len(cohort.rois))
            if matrices is None:
                rois.setdefault(name, []).append(_over_time(name, value, len(cohort.rois)))
            else:
                rois.setdefault(name, []).append(_over_others(matrices[0]))
                edges[name] = edges.get(name, 0.0) + matrices.sum(axis=1) / len(cohort)
        gates.append(_gate(network, batch))
        changes.append(change.double().cpu().numpy())
        if progress:
            progress(start + len(some), len(cohort))
    parts = {name: np.concatenate(pieces) for name, pieces in rois.items()}
    return _Attributions(parts, edges, np.concatenate(phenotypes), np.concatenate(gates), np.concatenate(changes))


def _predicted(network: nn.Module, batch: Batch) -> Tensor:
    """(subject,) class with the higher logit."""
    with torch.no_grad():
        logits: Tensor = network(batch)
    return logits.argmax(dim=1)


def integrated_gradients(
    network: nn.Module, batch: Batch, steps: int, classes: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Attributions of the logit of each subject's class to every feature and to "phenotypes", from a baseline.

    The baseline is zero, or the value of a feature in `network.baselines()` where the network has that method.
    Without `classes` (subject,) they are of logit(patient) - logit(control). Also returns (subject, 2): the change of this
    logit or difference from the baseline, and the sum of the attributions.
    """
    from captum.attr import IntegratedGradients

    inputs = dict(batch.features) | ({"phenotypes": batch.phenotypes} if batch.phenotypes.shape[1] else {})

    def decision(*values: Tensor) -> Tensor:
        features, count = dict(zip(inputs, values, strict=True)), len(values[0])
        phenotypes = features.pop("phenotypes", batch.phenotypes.new_empty(count, 0))
        logits: Tensor = network(Batch(features, phenotypes, batch.label[:1].expand(count), batch.site[:1].expand(count)))
        # Inputs that the network does not use need a gradient too, of zero.
        unused = torch.stack([value.flatten(1).sum(1) for value in values]).sum(0) * 0.0
        if classes is not None:
            return logits + unused[:, None]
        return logits[:, 1] - logits[:, 0] + unused

    given = tuple(value.float() for value in inputs.values())
    known = _baselines(network)
    start = tuple(known[name].expand_as(value) if name in known else torch.zeros_like(value) for name, value in inputs.items())
    attributions = IntegratedGradients(decision).attribute(
        given, start, target=classes, n_steps=steps, internal_batch_size=max(POINTS_AT_ONCE, len(batch))
    )
    with torch.no_grad():
        change = decision(*given) - decision(*(value.float() for value in start))
        change = change if classes is None else change.gather(1, classes[:, None])[:, 0]
    attributed = {name: value.detach() for name, value in zip(inputs, attributions, strict=True)}
    total = torch.stack([value.flatten(1).sum(1) for value in attributed.values()]).sum(0)
    return {"phenotypes": torch.zeros_like(batch.phenotypes)} | attributed, torch.stack([change, total], dim=1)


def _baselines(network: Any) -> dict[str, Tensor]:
    """Feature -> its baseline, where a network states any."""
    return dict(network.baselines()) if hasattr(network, "baselines") else {}


def _matrices(name: str, values: Floats, n: int) -> Floats | None:
    """(2, subject, roi, roi) absolute and signed values of a connectivity feature, symmetric; None for other features."""
    if values.shape[1:] == (n * (n - 1) // 2,):
        both = squares(values, n)
    elif not name.endswith("series") and values.shape[1:] == (n, n):  # a series may have as many time points as ROIs
        both = values * (1 - np.eye(n))
    else:
        return None
    pair = np.stack([np.abs(both), both])
    return np.asarray((pair + pair.swapaxes(2, 3)) / 2)


def squares(edges: Floats, n: int) -> Floats:
    """(subject, edge) values above the diagonal, row by row -> (subject, roi, roi) symmetric, 0 on the diagonal."""
    rows, columns = np.triu_indices(n, 1)
    matrices = np.zeros((len(edges), n, n))
    matrices[:, rows, columns] = matrices[:, columns, rows] = edges
    return matrices


def _over_others(sizes: Floats) -> Floats:
    """(subject, roi, roi) -> (subject, roi): mean over the other ROIs."""
    return np.asarray(sizes.sum(axis=2) / (sizes.shape[1] - 1))


def _over_time(name: str, values: Floats, n: int) -> Floats:
    """(subject, roi) or (subject, roi, time) -> (subject, roi): mean absolute value."""
    if values.ndim < 2 or values.shape[1] != n:
        raise InputError(f"feature {name} of shape {values.shape[1:]} cannot be explained: it does not map to {n} ROIs.")
    return np.asarray(np.abs(values).reshape(len(values), n, -1).mean(axis=2))


def _gate(network: Any, batch: Batch) -> Floats:
    """(subject, weight) of the network's gate; (subject, 0) without a gate."""
    with torch.no_grad():
        parts = network.parts(batch) if hasattr(network, "parts") else {}
    return np.asarray(parts["gate"].double().cpu()) if "gate" in parts else np.empty((len(batch), 0))


def _patterns(fitted: Linear, cohort: Cohort) -> _Attributions:
    n = len(cohort.rois)
    features = {name: fitted._features(name, cohort).astype(np.float64) for name in fitted._weights()}
    parts = {name: values @ fitted.state_[f"{name}.weights"] for name, values in features.items()}  # without intercepts
    decision = np.asarray(sum(parts.values()))
    if len(cohort) < 3 or decision.std() == 0:
        raise InputError(f"method {fitted.name} needs at least three subjects with different decisions to be explained.")
    rois, edges, phenotypes = {}, {}, np.zeros((1, len(cohort.inputs)))
    for name, values in features.items():
        pattern = activation_pattern(values, decision)
        if name in TANGENT:  # without its diagonal; in units of the sd the off-diagonal scale cancels
            rows, columns = np.triu_indices(n)
            pattern = pattern[rows != columns]
        (_, covariance), (_, variance) = np.cov(parts[name], decision)
        pattern *= max(covariance / variance, 0.0) / (np.abs(pattern).mean() or 1.0)
        if name == "phenotypes":
            phenotypes = pattern[None]
        elif name == "amplitude":
            rois[name] = np.abs(pattern)[None]
        else:
            matrix = squares(pattern[None], n)
            rois[name], edges[name] = _over_others(np.abs(matrix)), np.concatenate([np.abs(matrix), matrix])
    return _Attributions(rois, edges, phenotypes, np.empty((len(cohort), 0)), np.empty((0, 2)))


def _contributions(fitted: Linear, cohort: Cohort, scale: float) -> _Attributions:
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
            rows, columns = np.triu_indices(n, 0 if name in TANGENT else 1)
            matrices = np.zeros((len(cohort), n, n))
            matrices[:, rows, columns] = matrices[:, columns, rows] = added
            rois[name] = _over_others(np.abs(matrices))
            edges[name] = np.stack([np.abs(matrices).mean(axis=0), matrices.mean(axis=0)])
    return _Attributions(rois, edges, phenotypes, np.empty((len(cohort), 0)), np.empty((0, 2)))


def activation_pattern(features: Floats, decision: Floats) -> Floats:
    """(feature,) cov(feature, decision) / var(decision) of features in units of their sd; 0 for constant features.

    Weights may be large only to cancel noise; the activation pattern shows where the signal is (Haufe et al. 2014).
    """
    deviation, centred = decision - decision.mean(), features - features.mean(axis=0)
    spread = centred.std(axis=0)
    return np.asarray(deviation @ (centred / np.where(spread > 1e-12, spread, np.inf)) / (deviation @ deviation))
