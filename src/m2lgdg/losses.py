"""The losses of M²LG-DG as pure functions of batches, each one equation of the paper.

Called by `methods/m2lgdg.py`. All compute in float32, whatever the input dtype, and return 0 with a gradient of 0 where there
is nothing to compare (no valid anchor, one class, one site). Inputs may have leading dimensions, such as one of networks that
are trained side by side: (..., subject, dimension) gives a loss for each, (...).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-8


def normalised(vectors: Tensor) -> Tensor:
    """v / (|v| + epsilon) over the last dimension, in float32. A zero vector stays 0 and has a gradient of 0."""
    vectors = vectors.float()
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors.masked_fill(length == 0, 0.0) / (length + EPSILON)


def similarity_loss(s_f: Tensor, s_n: Tensor) -> Tensor:
    """Mean squared difference of the normalised shared components, over batch and dimensions."""
    return (normalised(s_f) - normalised(s_n)).square().mean(dim=(-2, -1))  # (..., subject, shared) -> (...)


def orthogonality_loss(s_f: Tensor, p_f: Tensor, s_n: Tensor, p_n: Tensor) -> Tensor:
    """Mean over the batch of |s_f . p_f| + |s_n . p_n|, on the unnormalised components."""
    imaging = (s_f.float() * p_f.float()).sum(dim=-1).abs()  # (..., subject)
    other = (s_n.float() * p_n.float()).sum(dim=-1).abs()
    return (imaging + other).mean(dim=-1)


def difference_loss(p_f: Tensor, p_n: Tensor, margin: float = 1.0) -> Tensor:
    """Hinge on the batch mean of the squared distance between the normalised private components."""
    distance = (normalised(p_f) - normalised(p_n)).square().sum(dim=-1).mean(dim=-1)
    return (margin - distance).clamp(min=0.0)


def cross_site_contrastive_loss(z: Tensor, label: Tensor, site: Tensor, temperature: float = 0.07) -> Tensor:
    """Supervised contrastive loss whose positives are subjects of the same class at other sites.

    Same-class subjects of the anchor's site are not positives but stay in the denominator, which holds all subjects but the
    anchor. Anchors without a positive are left out. `z` is normalised here.
    """
    z = normalised(z)  # (..., subject, dimension)
    with torch.autocast(z.device.type, enabled=False):  # bfloat16 would be off by several percent here
        logits = z @ z.mT / temperature  # (..., anchor, other)
    itself = torch.eye(z.shape[-2], dtype=torch.bool, device=z.device)
    log_ratio = logits - torch.logsumexp(logits.masked_fill(itself, -torch.inf), dim=-1, keepdim=True)
    same_class, same_site = (each[..., :, None] == each[..., None, :] for each in (label, site))
    positive = same_class & ~same_site  # (..., anchor, other)
    count = positive.sum(dim=-1)  # (..., anchor)
    attraction = log_ratio.masked_fill(~positive, 0.0).sum(dim=-1) / count.clamp(min=1)
    valid = count > 0
    return -(attraction * valid).sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)


def smoothed_cross_entropy(logits: Tensor, label: Tensor, weight: Tensor | None = None, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy with label smoothing and class weights, as PyTorch defines their combination."""
    log_proba = functional.log_softmax(logits.float(), dim=-1)  # (..., subject, class)
    weight = log_proba.new_ones(log_proba.shape[-1]) if weight is None else weight.float()
    # PyTorch's own version synchronises with the GPU, so it cannot be part of a recorded step.
    true_class = -(weight[label] * log_proba.gather(-1, label[..., None])[..., 0]).sum(dim=-1)
    all_classes = -(log_proba @ weight).sum(dim=-1) / log_proba.shape[-1]
    return ((1 - smoothing) * true_class + smoothing * all_classes) / weight[label].sum(dim=-1)
