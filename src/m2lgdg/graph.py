"""The brain graph of the local encoder: group adjacency, its learnable refinement, and Chebyshev convolution.

The adjacency is fitted on source-training subjects and saved with the model; the rest is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2lgdg.connectivity import correlations

PIECE, EPSILON = 64, 1e-6  # subjects at a time; floor for the norm of a ROI's series, which is sqrt(time) once z-scored


def group_graph(series_list: Sequence[npt.NDArray[Any]], percentile: float = 80.0) -> npt.NDArray[np.float32]:
    """(roi, roi) 0/1 adjacency: edges whose |mean correlation| is at or above a percentile, and all self-loops.

    The percentile is taken over the non-zero off-diagonal entries of the group matrix.
    """
    return thresholded(correlations([np.asarray(one) for one in series_list]).mean(axis=0), percentile)


def group_graph_of(series: Tensor, percentile: float = 80.0) -> npt.NDArray[np.float32]:
    """`group_graph` of (subject, roi, time) series of one length, computed on the device that holds them."""
    if series.device.type == "mps":  # has no float64
        series = series.cpu()
    group = torch.zeros(series.shape[1], series.shape[1], dtype=torch.float64, device=series.device)
    for piece in torch.split(series, PIECE):
        wide = piece.double() - piece.double().mean(dim=2, keepdim=True)
        unit = wide / torch.linalg.vector_norm(wide, dim=2, keepdim=True).clamp(min=EPSILON)  # a flat ROI stays 0
        group += (unit @ unit.transpose(1, 2)).sum(dim=0)
    return thresholded(((group + group.T) / (2 * len(series))).cpu().numpy(), percentile)


def thresholded(group: npt.NDArray[np.float64], percentile: float) -> npt.NDArray[np.float32]:
    """The adjacency of `group_graph` from the (roi, roi) mean correlations, whose diagonal is set to 0."""
    np.fill_diagonal(group, 0.0)
    strength = np.abs(group)
    present = strength[strength > 0]
    threshold = np.percentile(present, percentile) if len(present) else np.inf
    adjacency = (strength >= threshold) | np.eye(len(group), dtype=bool)
    return np.asarray(adjacency, dtype=np.float32)


def propagation(adjacency: Tensor, embedding: Tensor, beta: float = 0.5) -> Tensor:
    """(..., roi, roi) operator: mixture of learned and group adjacency plus self-loops, normalised by degree on both sides."""
    learned = torch.softmax(embedding @ embedding.mT, dim=-1)  # rows sum to 1
    mixed = beta * learned + (1 - beta) * adjacency + torch.eye(adjacency.shape[-1], device=adjacency.device)
    scale = mixed.sum(dim=-1).rsqrt()
    return scale[..., :, None] * mixed * scale[..., None, :]


def chebyshev(operator: Tensor, features: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum over k of T_k(operator) features weights_k + bias.

    features (..., roi, channel), weights (order, channel, out), bias (out,); T_0 is the identity, T_1 the operator, and
    T_k = 2 operator T_{k-1} - T_{k-2}.
    """
    before, now = None, features
    result = now @ weights[0]
    for k in range(1, len(weights)):
        stepped = operator @ now if before is None else 2 * (operator @ now) - before
        before, now = now, stepped
        result = result + now @ weights[k]
    return result if bias is None else result + bias
