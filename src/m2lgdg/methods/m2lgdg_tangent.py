"""Tangent-space edges, which half of the members of `m2lgdg_connectome.py` read in place of FC.

Their reference is fitted on source, and whether they are scaled by their association with the label is chosen inside source.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import row_covariances
from m2lgdg.methods.linear import REFERENCE_SUBJECTS, REFERENCE_TOLERANCE, _Recent
from m2lgdg.methods.solvers import Problem, Rows, adaptive_ridge, ridge
from m2lgdg.methods.within_sites import mean_site_auc, source_folds
from m2lgdg.tangent import CHUNK, geometric_mean, tangent_features

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
EDGES = "tangent_edges"  # name of the feature
REFERENCE = f"{EDGES}.reference"  # in `state_`
PREFIX = "tangent."  # of what is fitted for them
FOLDS = 5
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the mean squared feature norm
# Trainings of a study, with other seeds and variants, share the source of a target; eigenvalues of 900 matrices of 352 ROIs
# take half a minute of a CPU.
REFERENCES: _Recent[Floats] = _Recent(2)
SOURCES: _Recent[Singles] = _Recent(1)


def source_reference(source: Cohort, content: str | None) -> Floats:
    """`fitted_reference`, shared by fits on a source with this hash; without a hash it is computed afresh."""
    return REFERENCES.get(content, lambda: fitted_reference(source)).copy()  # part of a model, which may be edited


def source_edges(source: Cohort, reference: Floats, content: str | None) -> Singles:
    """`tangent_edges` of source or a part of it, shared as its reference is; not to be written to."""
    key = content and (content, "\n".join(source.subjects.tolist()))
    return SOURCES.get(key, lambda: tangent_edges(source, reference))


def fitted_reference(source: Cohort) -> Floats:
    """(roi, roi) geometric mean of the row covariances of source, the same whatever the order of its subjects."""
    ordered = source.select(np.argsort(source.subjects, kind="stable"))
    return geometric_mean(row_covariances(ordered.scans), tolerance=REFERENCE_TOLERANCE, first_step=REFERENCE_SUBJECTS)


def tangent_edges(cohort: Cohort, reference: Floats) -> Singles:
    """(subject, edge) entries above the diagonal of each subject's row covariance in the tangent space at a reference."""
    rows, columns = np.triu_indices(len(reference))
    above = np.flatnonzero(rows != columns)
    edges = np.empty((len(cohort), len(above)), dtype=np.float32)
    for start in range(0, len(cohort), CHUNK):  # matrices of all subjects would take several times the memory of edges
        some = cohort.select(np.arange(start, min(start + CHUNK, len(cohort))))
        edges[start : start + CHUNK] = tangent_features(row_covariances(some.scans), reference)[:, above]
    return edges


def chosen_scaling(rows: Rows, train: Cohort, weights: Floats) -> dict[str, Any]:
    """Whether edges are scaled by their association with the label ("association") or only by their sd ("sd").

    The one whose ridge classifier, each with its best penalty, has the higher mean AUC at left-out source sites. In tangent
    space scaling can harm: noise is then taken for association. Without folds, edges are scaled as those of FC.
    """
    folds = source_folds(train, FOLDS, weights)
    if not folds:
        return {"scaling": "association"}
    problem = Problem(rows, train.labels, weights, folds, np.array(PENALTIES) * rows.mean_square)
    held_out = {"association": adaptive_ridge(problem).held_out, "sd": ridge(problem).held_out}  # (penalty, subject) each
    best = {name: max(mean_site_auc(decision, train) for decision in each) for name, each in held_out.items()}
    return {"scaling": max(best, key=lambda name: best[name]), "auc": best}
