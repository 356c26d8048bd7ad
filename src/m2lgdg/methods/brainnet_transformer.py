"""Brain Network Transformer: rows of the correlation matrix as tokens, and a readout that assigns ROIs to orthonormal clusters.

One of the peers that reviewers ask for, written from the publication's equations; the training loop is in `deep.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import correlations
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, schedule, with_phenotypes
from m2lgdg.method import ANY_SCAN, method

SLOPE = 0.01  # of the leaky ReLU


def rectified(features: Tensor) -> Tensor:
    """ReLU as a function that PyTorch's transformer does not recognise: its fused inference path has no ONNX operator."""
    return functional.relu(features)


def orthonormal(vectors: Tensor) -> Tensor:
    """(cluster, width) vectors after Gram-Schmidt, each of length 1 and at right angles to the others."""
    basis: list[Tensor] = []
    for vector in vectors.double():
        for _ in range(2):  # the second time removes what rounding left
            for other in basis:
                vector = vector - (vector @ other) * other
        basis.append(vector / torch.linalg.vector_norm(vector))
    return torch.stack(basis).to(vectors.dtype)


class ClusterReadout(nn.Module):
    """Orthonormal clustering readout: encoded ROIs are softly assigned to fixed cluster centres and summed by cluster."""

    def __init__(self, n_rois: int, config: BrainNetTransformer) -> None:
        super().__init__()
        size, hidden = n_rois * n_rois, config.encoder_width
        self.encoder = dense(size, hidden, hidden, size)[:-1]  # no activation after the last layer
        clusters = min(config.clusters, n_rois)  # a space of n_rois dimensions has no more vectors at right angles
        self.centres: Tensor
        self.register_buffer("centres", orthonormal(nn.init.xavier_uniform_(torch.empty(clusters, n_rois))))

    def forward(self, nodes: Tensor) -> Tensor:
        """(subject, roi, width) -> (subject, cluster, width)."""
        encoded = self.encoder(nodes.flatten(1)).view(nodes.shape)  # (subject, roi, width)
        assignment = torch.softmax((encoded @ self.centres.T).square(), dim=2)  # (subject, roi, cluster)
        return assignment.mT @ encoded


def dense(*widths: int) -> nn.Sequential:
    """Linear layers, each with a leaky ReLU."""
    layers = [(nn.Linear(a, b), nn.LeakyReLU(SLOPE)) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for pair in layers for part in pair))


class Network(PartsNetwork):
    """Transformer layers over ROIs, the readout, and a classifier of all clusters."""

    def __init__(self, shape: Shape, config: BrainNetTransformer) -> None:
        super().__init__()
        width = shape.n_rois  # a ROI's token is its row of correlations
        heads = next(heads for heads in range(min(config.heads, width), 0, -1) if width % heads == 0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, config.feedforward, config.dropout, activation=rectified, batch_first=True)
            for _ in range(config.layers)
        )
        self.readout = ClusterReadout(width, config)
        self.reduce = dense(width, config.cluster_width)
        self.hidden = dense(len(self.readout.centres) * config.cluster_width, *config.head)
        self.inputs = shape.n_inputs
        self.classifier = nn.Linear(config.head[-1] + shape.n_inputs, 2)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        nodes = batch["correlation"]  # (subject, roi, roi)
        for layer in self.layers:
            nodes = layer(nodes)
        clusters = self.reduce(self.readout(nodes))  # (subject, cluster, cluster width)
        fused = self.hidden(clusters.flatten(1))
        return {"fused": fused, "logits": self.classifier(with_phenotypes(fused, batch, self.inputs))}


@method("brainnet-transformer")
class BrainNetTransformer(DeepMethod):
    """Brain Network Transformer: transformer on rows of the correlation matrix, orthonormal cluster readout; sites pooled.

    As released: two post-norm layers, the second followed by the readout; cluster centres are Xavier-initialised, made
    orthonormal by Gram-Schmidt and then fixed; subjects of a batch are mixed in pairs, labels included; Adam with a cosine from
    the learning rate to a tenth of it.
    Differs from the release: the mean of the cross-entropy over a batch, not its sum, and with class weights; at most as many
    clusters as ROIs; the largest number of heads up to `heads` that divides the number of ROIs; the epoch is selected on
    source-validation subjects, with early stopping.
    """

    layers: int = 2
    heads: int = 4
    feedforward: int = 1024
    clusters: int = 100
    encoder_width: int = 32
    cluster_width: int = 8
    head: tuple[int, ...] = (256, 32)
    mixup: float = 1.0  # both parameters of the beta distribution; 0: no mixing
    last_rate: float = 0.1  # learning rate at the end, as a fraction of the first
    epochs: int = 200
    warmup: int = 0
    patience: int = 40
    batch_size: int = 16
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    dropout: float = 0.1
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    bounds = {"mixup": (0, math.inf), "last_rate": (0, math.inf)}
    takes = ANY_SCAN
    unused = ("length",)
    reference = "Kan et al. 2022: Brain network transformer, NeurIPS 35"
    variants = {
        "no-mixup": {"mixup": 0.0},
        "phenotypes": {"phenotypes": True},
        "small": {"layers": 1, "feedforward": 32, "clusters": 8, "head": (32, 16), "learning_rate": 3e-3, "epochs": 40},
    }
    space = {
        "clusters": (10, 25, 50, 100),
        "mixup": (0.0, 0.2, 1.0),
        "dropout": (0.0, 0.1, 0.3, 0.5),
        "learning_rate": (3e-5, 1e-4, 3e-4, 1e-3),
    }

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        return {"correlation": torch.from_numpy(correlations(cohort.scans).astype(np.float32))}

    def rate_factor(self, batch: int, batches: int) -> float:
        """Learning-rate factor: after the warm-up, if any, a cosine from 1 to `last_rate`."""
        factor = schedule(self.epoch * batches + batch, batches, self.warmup, self.epochs)
        return factor if self.epoch < self.warmup else self.last_rate + (1 - self.last_rate) * factor

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of subjects mixed in random pairs with one weight, from Beta(mixup, mixup)."""
        if not self.mixup:
            return super().loss(network, batch)
        weight = float(torch.distributions.Beta(self.mixup, self.mixup).sample())
        other = batch.take(torch.randperm(len(batch)).to(batch.label.device))
        features = {name: weight * value + (1 - weight) * other[name] for name, value in batch.features.items()}
        phenotypes = weight * batch.phenotypes + (1 - weight) * other.phenotypes
        logits = network(replace(batch, features=features, phenotypes=phenotypes))
        return {"ce": weight * self.cross_entropy(logits, batch) + (1 - weight) * self.cross_entropy(logits, other)}
