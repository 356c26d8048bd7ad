"""BrainGNN: graph convolutions with ROI-specific kernels, and pooling that selects ROIs consistently within a class.

Each subject is a graph with Fisher-z FC rows at the nodes and absolute partial correlations on the edges.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import Scans, correlations, covariances, fisher_matrices
from m2lgdg.deep import CHUNK, Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.scans import PARTIAL, Connectomes


class RoiConvolution(nn.Module):
    """Graph convolution with a kernel per ROI, a mixture of a few community kernels; messages are weighted by edges."""

    def __init__(self, n_rois: int, width: int, config: BrainGNN) -> None:
        super().__init__()
        self.communities = nn.Linear(n_rois, config.communities, bias=False)
        self.mixture = nn.Linear(config.communities, width * config.hidden)
        self.bias = nn.Parameter(torch.zeros(config.hidden))
        self.form = config.form

    def forward(self, nodes: Tensor, edges: Tensor, kept: Tensor | None = None) -> Tensor:
        """(subject, roi, width) -> (subject, node, hidden); nodes are all or the `kept` ROIs, edges (subject, node, node)."""
        mixed = self.mixture(functional.relu(self.communities.weight.T))  # (roi, width hidden)
        kernels = mixed.view(len(mixed), nodes.shape[2], -1)  # (roi, width, hidden)
        # For all ROIs: gathering a kernel for each kept node would be far slower.
        messages = torch.einsum("sid,ide->sie", nodes, kernels)  # (subject, roi, hidden)
        if kept is not None:
            messages = rows(messages, kept)
        weights = edges + torch.eye(edges.shape[1], device=edges.device)
        if self.form == "paper":
            return functional.relu(weights @ messages + self.bias)
        return torch.softmax(weights.masked_fill(weights == 0, -torch.inf), dim=2) @ messages + self.bias


class RoiPooling(nn.Module):
    """Top-k pooling: keeps the nodes with the highest scores along a learned direction, times the sigmoid of their score."""

    def __init__(self, config: BrainGNN) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(config.hidden).uniform_(-1, 1) / math.sqrt(config.hidden))
        self.ratio, self.form = config.ratio, config.form

    def forward(self, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted nodes, positions of the kept ones (subject, kept), and all scores before the sigmoid (subject, node)."""
        scores = (nodes.float() * self.direction).sum(dim=2) / torch.linalg.vector_norm(self.direction)  # (subject, node)
        if self.form == "paper":
            scores = functional.layer_norm(scores, scores.shape[1:])
        order = torch.argsort(scores, dim=1, descending=True, stable=True)  # ties keep the earlier node
        kept = order[:, : math.ceil(self.ratio * scores.shape[1])].sort(dim=1).values
        return nodes * torch.sigmoid(scores)[:, :, None], kept, scores


class Network(PartsNetwork):
    """Two convolutions, each with pooling and readout, and a classifier on both readouts."""

    def __init__(self, shape: Shape, config: BrainGNN) -> None:
        super().__init__()
        self.first, self.second = (RoiConvolution(shape.n_rois, width, config) for width in (shape.n_rois, config.hidden))
        self.pool_first, self.pool_second = RoiPooling(config), RoiPooling(config)
        layers: list[nn.Module] = []
        width = 4 * config.hidden
        for out in config.head:
            layers += [nn.Linear(width, out), nn.ReLU(), nn.BatchNorm1d(out), nn.Dropout(config.dropout)]
            width = out
        self.inputs = shape.n_inputs
        self.classifier = nn.Sequential(*layers, nn.Linear(width + shape.n_inputs, 2))

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits, both readouts as `fused`, and for each pooling the scores of all nodes and the positions of the kept ones."""
        edges = batch["partial"]
        first, kept, scores = self.pool_first(self.first(batch["fc"], edges))
        edges = two_hop(rows(rows(edges, kept).mT, kept).mT)  # (subject, kept, kept)
        second, kept_second, scores_second = self.pool_second(self.second(first, edges, kept))
        fused = torch.cat([readout(rows(first, kept)), readout(rows(second, kept_second))], dim=1)  # (subject, 4 hidden)
        pooling = {"scores": scores, "kept": kept, "scores_second": scores_second, "kept_second": kept_second}
        hidden = with_phenotypes(self.classifier[:-1](fused), batch, self.inputs)
        return pooling | {"fused": fused, "logits": self.classifier[-1](hidden)}


def rows(matrices: Tensor, kept: Tensor) -> Tensor:
    """(subject, node, ...) -> (subject, kept, ...): rows chosen per subject."""
    # Not take_along_dim: its broadcasting would fix the number of subjects in an export.
    return matrices.gather(1, kept[:, :, None].expand(-1, -1, matrices.shape[2]))


def two_hop(edges: Tensor) -> Tensor:
    """(A + I)² without its diagonal: joins second-order neighbours, which pooling may have separated."""
    itself = torch.eye(edges.shape[1], device=edges.device)
    return ((edges + itself) @ (edges + itself)) * (1 - itself)


def readout(nodes: Tensor) -> Tensor:
    """(subject, node, hidden) -> (subject, 2 hidden): maximum and mean over nodes."""
    return torch.cat([nodes.amax(dim=1), nodes.mean(dim=1)], dim=1)


def topk_loss(scores: Tensor, kept: Tensor) -> Tensor:
    """Binary cross-entropy that drives the sigmoid scores of kept nodes to 1 and of dropped ones to 0."""
    return functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores).scatter(1, kept, 1.0))


def consistency_loss(scores: Tensor, label: Tensor) -> Tensor:
    """Mean squared distance between the score vectors of two subjects of a class, summed over classes."""
    total = torch.zeros((), device=scores.device)
    for value in (0, 1):
        member = (label == value).float()[:, None]  # (subject, 1)
        count = member.sum().clamp(min=1)
        mean = (member * scores).sum(dim=0) / count  # (roi,)
        total = total + 2 * (member * (scores - mean).square()).sum() / count  # the mean over pairs is twice the variance
    return total


def partial_correlations(scans: Scans, device: torch.device) -> Tensor:
    """(subject, roi, roi) absolute partial correlations from shrunk covariances; 0 on the diagonal and for flat ROIs.

    Connectomes that are partial correlations are taken as they are.
    """
    partial: Tensor
    if isinstance(scans, Connectomes) and scans.kind == PARTIAL:
        partial = torch.from_numpy(correlations(scans)).to(device).abs().float()
    else:
        precision = torch.linalg.inv(torch.from_numpy(covariances(scans)).to(device))
        scale = precision.diagonal(dim1=1, dim2=2).rsqrt()
        partial = (scale[:, :, None] * precision * scale[:, None, :]).abs().float()
    return partial * (1 - torch.eye(partial.shape[1], device=device))


@method("braingnn")
class BrainGNN(DeepMethod):
    """BrainGNN: ROI-aware graph convolutions on partial-correlation graphs with ROI-selection pooling; source sites pooled.

    Differs from the release: the consistency loss compares whole score vectors in ROI order, not sorted scores of kept nodes;
    scores pass one sigmoid before the losses, not up to three; warm-up and cosine instead of halving the learning rate.
    As released: form, learning rate 0.01, all partial correlations as edges and no unit loss, which did better than variant
    `paper` (unit loss of weight 1, learning rate 1e-3) in source validation on ABIDE (0.736 against 0.655).
    Interpretation: `form` "paper" is relu(W h_i + sum e_ij W h_j) with scores standardised in each graph; "release" has a
    softmax over edges instead, nearly uniform on this dense graph, no ReLU and plain scores. Both have the release's bias.
    In form "release" scores stay near 0 on ABIDE, so that the top-k loss is ln 2 for each pooling: it does not act.
    """

    communities: int = 8
    hidden: int = 32
    ratio: float = 0.5
    head: tuple[int, ...] = (32, 512)
    form: Literal["paper", "release"] = "release"
    unit_weight: float = 0.0
    topk_weight: float = 0.1
    consistency_weight: float = 0.1
    warmup: int = 5
    batch_size: int = 100
    learning_rate: float = 0.01
    weight_decay: float = 5e-3
    dropout: float = 0.5
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = True
    phenotypes: bool = False

    network_class = Network
    bounds = {"ratio": (1e-6, math.inf)}
    may_be_empty = ("head",)
    takes = ANY_SCAN
    unused = ("length",)
    reference = "Li et al. 2021: BrainGNN, interpretable brain graph neural network for fMRI analysis"
    variants = {
        "paper": {"form": "paper", "unit_weight": 1.0, "learning_rate": 1e-3},
        "phenotypes": {"phenotypes": True},
        "small": {"hidden": 16, "head": (16, 32)},
    }
    space = {
        "consistency_weight": (0.0, 0.1, 0.3, 0.5, 1.0),
        "topk_weight": (0.0, 0.1, 0.5),
        "communities": (4, 8, 16),
        "learning_rate": (1e-4, 1e-3, 1e-2),
    }

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        chunks = [cohort.scans[start : start + CHUNK] for start in range(0, len(cohort), CHUNK)]
        return {
            "fc": torch.from_numpy(fisher_matrices(cohort.scans)),
            "partial": torch.cat([partial_correlations(chunk, device) for chunk in chunks]),
        }

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        parts = network.parts(batch)
        lengths = [torch.linalg.vector_norm(pool.direction) for pool in (network.pool_first, network.pool_second)]
        first, second = (topk_loss(parts[f"scores{which}"], parts[f"kept{which}"]) for which in ("", "_second"))
        return {
            "ce": self.cross_entropy(parts["logits"], batch),
            "unit": self.unit_weight * sum((length - 1).square() for length in lengths),
            "topk": self.topk_weight * (first + second),
            "consistency": self.consistency_weight * consistency_loss(torch.sigmoid(parts["scores"]), batch.label),
        }
