"""Site and label information in a network's representation: a two-dimensional map, and linear probes.

`explain` uses both on the subjects of a fold after training; nothing here affects a prediction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.deep import DeepMethod
from m2lgdg.explain.explanation import MAP_COLUMNS

Floats = npt.NDArray[np.float64]
FOLDS = 5  # of the probe; sites with fewer subjects are left out of it


def read_representation(fitted: DeepMethod, target: Cohort, source: Cohort | None) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A map of target and source subjects (no ids), and the probes' results on source, or on target without a source."""
    groups = {"target": target} if source is None else {"source": source, "target": target}
    points = {name: fitted.represent(fitted.visible(cohort)).astype(np.float64) for name, cohort in groups.items()}
    probed = next(iter(groups))
    columns = [
        np.concatenate([cohort.sites for cohort in groups.values()]),
        np.concatenate([cohort.labels for cohort in groups.values()]),
        np.repeat(list(groups), [len(cohort) for cohort in groups.values()]),
        *flat_map(np.concatenate(list(points.values()))).T,
    ]
    table = pd.DataFrame(dict(zip(MAP_COLUMNS, columns, strict=True)))
    return table, readability(points[probed], groups[probed]) | {"probed": probed}


def readability(points: Floats, cohort: Cohort) -> dict[str, float | None]:
    """Accuracy of cross-validated linear probes for site and label, with chance levels and the effective dimensions.

    The number of dimensions is reported because a probe can read more of anything from more dimensions.
    """
    known = cohort.labels >= 0
    site, site_chance = probe(points, cohort.sites)
    label, label_chance = probe(points[known], cohort.labels[known])
    accuracies = {"site": site, "site_chance": site_chance, "label": label, "label_chance": label_chance}
    return accuracies | {"dimensions": effective_dimensions(points)}


def probe(points: Floats, groups: npt.NDArray[Any]) -> tuple[float | None, float | None]:
    """Five-fold accuracy of a linear probe, and the proportion of the largest group; None with fewer than two groups."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    names, counts = np.unique(groups, return_counts=True)
    enough = np.isin(groups, names[counts >= FOLDS])
    if (counts >= FOLDS).sum() < 2:
        return None, None
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    accuracy = cross_val_score(classifier, points[enough], groups[enough], cv=folds)
    return float(accuracy.mean()), float(counts.max() / enough.sum())


def effective_dimensions(points: Floats) -> float | None:
    """Participation ratio: squared sum of the covariance's eigenvalues over the sum of their squares; None without variance."""
    if len(points) < 2:
        return None
    eigenvalues = np.linalg.eigvalsh(np.atleast_2d(np.cov(points.T)))
    return float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()) if (eigenvalues > 0).any() else None


def flat_map(points: Floats) -> Floats:
    """(subject, 2) coordinates: deterministic t-SNE, or principal components for fewer than ten points."""
    from sklearn.manifold import TSNE

    centred = points - points.mean(axis=0)
    if len(points) < 10 or np.linalg.matrix_rank(centred) < 2:
        axes, sizes, _ = np.linalg.svd(centred, full_matrices=False)
        flat = (axes * sizes)[:, :2]
        return np.pad(flat, ((0, 0), (0, 2 - flat.shape[1])))
    perplexity = min(30.0, (len(points) - 1) / 3)
    flat = TSNE(2, perplexity=perplexity, init="pca", random_state=0, n_jobs=1).fit_transform(centred)
    return np.asarray(flat, dtype=np.float64)
