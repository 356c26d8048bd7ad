"""`explain`: importance of ROIs, edges, phenotypes and regions of tables for the decisions of a fitted method.

Networks are explained by integrated gradients (`explain.gradients`), linear methods by activation patterns, without PyTorch. A
study explains the cells it is asked to after training, and the report shows the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.explain.explanation import (
    MAP_COLUMNS,
    Explanation,
    completeness_table,
    edge_table,
    gate_table,
    joined,
    mean_over_methods,
    phenotype_table,
    roi_table,
)
from m2lgdg.explain.patterns import Attributions, Of, contributions, patterns
from m2lgdg.explain.regions import region_table, sum_of
from m2lgdg.method import Method, in_one_atlas, is_network
from m2lgdg.methods.average import Average
from m2lgdg.methods.linear import Linear
from m2lgdg.methods.tables import TableBlock
from m2lgdg.model.atlases import targets_of
from m2lgdg.model.model import Model
from m2lgdg.storage import InputError, needing

LOOSE_COMPLETENESS = 0.1  # relative completeness error above which to warn
GRADIENTS = {
    "logit": "integrated gradients of the predicted class's logit; scores are mean absolute attributions",
    "margin": "integrated gradients of the patient's logit minus the control's; scores are mean absolute attributions",
}
PATTERNS = (
    "activation patterns (Haufe et al. 2014) of features in units of their sd; each block has mean 1 over edges, ROIs, "
    "phenotypes or regions of a table, times its proportion of the decision's variance"
)
CONTRIBUTIONS = (
    "contribution of each feature to the decision in logits: its weight times its distance from the baseline; scores are mean "
    "absolute contributions"
)


def explain(
    fitted: Model | Method,
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
    fitted = fitted if isinstance(fitted, Model) else Model(fitted)
    if not fitted.members:
        raise InputError(f"method {fitted.name} is not fitted yet.")
    sources = {} if source is None else {one.atlas: one.target for one in targets_of(fitted.members, source)}
    how = {"of": of, "steps": steps, "device": device, "progress": progress}
    explained = {
        one.atlas: _explain_member(one.member, one.target, sources.get(one.atlas), how)
        for one in targets_of(fitted.members, cohort)
    }
    return joined(explained) if len(fitted.members) > 1 else next(iter(explained.values()))


def _explain_member(fitted: Method, cohort: Cohort, source: Cohort | None, how: dict[str, Any]) -> Explanation:
    """Explanation of a method in its atlas."""
    if isinstance(fitted, Average):
        return mean_over_methods({name: _explain_member(one, cohort, source, how) for name, one in fitted.averaged.items()})
    visible = fitted.visible(cohort)  # as for a prediction: labels, sites and ids are hidden
    cohort = in_one_atlas(cohort, fitted.facts_["atlas"])
    of, steps = how["of"], how["steps"]
    if of not in GRADIENTS:
        raise InputError(f"explanations are of the {' or the '.join(GRADIENTS)}, not of {of!r}.")
    if steps < 1:
        raise InputError(f"integrated gradients need at least one step, not {steps}.")
    points = None
    if is_network(fitted):
        with needing("networks", f"the explanation of method {fitted.name}"):
            from m2lgdg.explain.gradients import explain_network
        attributions, points, network_about = explain_network(fitted, cohort, visible, source, **how)
        about = {"scores": GRADIENTS[of], "of": of, "steps": steps} | network_about
    elif isinstance(fitted, Linear):
        attributions = patterns(fitted, visible)
        about = {"scores": PATTERNS, "steps": None, "baseline": None}
    else:
        raise InputError(f"method {fitted.name} cannot be explained: it is neither a network nor a linear method.")
    return _explanation(fitted, attributions, cohort, visible.inputs, about, points)


def explain_subject(fitted: Model, cohort: Cohort, *, steps: int = 64) -> Explanation:
    """As `explain`, for one subject; linear methods, which have no pattern then, by the contribution of each feature."""
    if isinstance(fitted.method, Average):
        each = {}
        for atlas, member, _, target in targets_of(fitted.members, cohort):
            assert isinstance(member, Average)
            explained = {name: explain_subject(Model(one), target, steps=steps) for name, one in member.averaged.items()}
            each[atlas] = mean_over_methods(explained)
        return joined(each) if len(each) > 1 else next(iter(each.values()))
    if not isinstance(fitted.method, Linear):
        return explain(fitted, cohort, steps=steps)
    if len(fitted.members) > 1:
        targets = targets_of(fitted.members, cohort)
        scale = fitted.mean_recalibration[0] * (fitted.recalibration or (1.0, 0.0))[0] / len(targets)
        explained = {one.atlas: _subject(one.member, one.target, scale) for one in targets}
        total = pd.concat([one.phenotypes for one in explained.values()]).groupby("phenotype", sort=False)["direction"].sum()
        regions = sum_of([one.regions for one in explained.values()])
        return joined(explained, phenotype_table(total.to_numpy()[None], total.index.tolist()), regions)
    return _subject(fitted.method, in_one_atlas(cohort, fitted.facts_["atlas"]), (fitted.recalibration or (1.0, 0.0))[0])


def _subject(fitted: Method, cohort: Cohort, scale: float) -> Explanation:
    """Contributions to the decision of a linear method in one atlas, times `scale`."""
    assert isinstance(fitted, Linear)
    visible = fitted.visible(cohort)
    about = {"scores": CONTRIBUTIONS, "steps": None, "baseline": "mean of source, feature by feature"}
    return _explanation(fitted, contributions(fitted, visible, scale), cohort, visible.inputs, about)


def _explanation(
    fitted: Method,
    attributions: Attributions,
    cohort: Cohort,
    inputs: tuple[str, ...],
    about: dict[str, Any],
    points: pd.DataFrame | None = None,
) -> Explanation:
    known: dict[str, Any] = fitted.facts_.get("tables", {})
    return Explanation(
        rois=roi_table(attributions.rois, cohort),
        edges=edge_table(attributions.edges, cohort.rois),
        phenotypes=phenotype_table(attributions.phenotypes, inputs),
        gate=gate_table(attributions.gate, cohort, attributions.modalities),
        completeness=completeness_table(attributions.change, cohort.subjects.tolist()),
        map=pd.DataFrame(columns=list(MAP_COLUMNS)) if points is None else points,
        regions=region_table(
            attributions.tables, attributions.values, {name: table["columns"] for name, table in known.items()}
        ),
        about={"method": fitted.name, "cohort": cohort.hash, "subjects": len(cohort)}
        | about
        | {"atlas": cohort.atlas}
        | ({"structure": _structure(fitted, cohort)} if known or cohort.tables else {}),
    )


def _structure(fitted: Method, cohort: Cohort) -> dict[str, dict[str, Any]]:
    """For each table that a model takes, the number of subjects that have it, and its weight in a linear method."""
    return {
        name: {"subjects": int(TableBlock(name, table["columns"], fitted.state_).present(cohort).sum())}
        | ({"weight": table["weight"]} if "weight" in table else {})
        for name, table in fitted.facts_.get("tables", {}).items()
    }
