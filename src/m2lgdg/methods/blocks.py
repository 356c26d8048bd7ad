"""Blocks of a linear method: features standardised by their source, and the fitted block that a method weighs beside others.

`linear.py` fits one block after another; `together.py` fits a block of several sources of one cohort at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.methods.solvers import CHUNK, Features, Rows, combine
from m2lgdg.methods.within_sites import Labelled, site_averages

Floats = npt.NDArray[np.float64]
SMALLEST_SPREAD = 1e-6  # of a feature, below which it counts as constant


class Block(NamedTuple):
    """A fitted block: decision = features @ weights + intercept; `held_out` are decisions for source sites not trained on."""

    weights: Floats
    intercept: float
    held_out: Floats
    penalty: float
    mean: Floats = np.empty(0)  # of the features over source subjects, if the block was made without them


class Standardised(NamedTuple):
    """Rows of a block, the mean and sd of its features in source, and the slopes of the confounds regressed out of them."""

    rows: Rows
    centre: Floats
    scale: Floats
    slopes: Floats | None = None  # (confound, feature)


def standardised_block(
    features: Features,
    source: Labelled,
    weights: Floats,
    within_sites: bool,
    confounds: Features | None = None,
    *,
    overwrite: bool = False,
    units: Floats | float = 1.0,  # of the features
) -> Standardised:
    """Features without confounds, centred (by site, if asked) and divided by their sd in source; in place to `overwrite`."""
    units = np.broadcast_to(units, features.shape[1:])
    names, site = np.unique(source.sites, return_inverse=True)
    averages = np.concatenate([weights[None] / weights.sum(), site_averages(site, weights)])  # (all and site, subject)
    if confounds is None:
        confounds = np.zeros((len(features), 0))
    confound_means = averages @ confounds
    # Slopes are those within sites, so that scanner effects are not taken for effects of age.
    centred = confounds - confound_means[1:][site]
    weighted = centred.T * weights  # (confound, subject), orthogonal to the mean of each site
    sums = combine(np.concatenate([averages, weighted]), features)
    slopes = np.linalg.pinv(weighted @ centred, hermitian=True) @ sums[len(averages) :]  # (confound, feature)
    means = sums[: len(averages)] - confound_means @ slopes
    centre, means = means[0], means[1:] if within_sites else np.tile(means[0], (len(names), 1))
    trained = features if overwrite else np.empty_like(features)
    scale = np.empty(features.shape[1])
    for start in range(0, features.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        values = features[:, part] - means[site, part]  # float64
        if len(slopes):
            values -= confounds @ slopes[:, part]
        spread = np.sqrt(np.einsum("i,ij,ij->j", weights, values, values) / weights.sum())
        varies = spread > SMALLEST_SPREAD * units[part]
        scale[part] = np.where(varies, spread, units[part])
        np.divide(values * varies, scale[part], out=trained[:, part], casting="same_kind")  # rounding is no feature
    return Standardised(Rows(trained, (means - centre) / scale, site), centre, scale, slopes if len(slopes) else None)
