"""BrainNetCNN: cross-shaped filters over a connectivity matrix, from edges to nodes to the whole graph.

One of the paper's baselines; the network takes Fisher-z FC, and the training loop is in `deep.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fisher_matrices
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.method import ANY_SCAN, method

SLOPE = 0.33  # of the leaky ReLU


class EdgeToEdge(nn.Module):
    """Edge-to-edge filter: each edge becomes a weighted sum of the edges in its row and its column."""

    def __init__(self, width: int, channels: int, n_rois: int) -> None:
        super().__init__()
        self.row = nn.Conv2d(width, channels, (1, n_rois))
        self.column = nn.Conv2d(width, channels, (n_rois, 1))

    def forward(self, edges: Tensor) -> Tensor:
        """(subject, channel, roi, roi) -> (subject, channel out, roi, roi)."""
        return self.row(edges) + self.column(edges)  # (.., roi, 1) + (.., 1, roi)


class Network(PartsNetwork):
    """Edge-to-edge, edge-to-node, node-to-graph and dense layers; leaky ReLU after each but the last."""

    def __init__(self, shape: Shape, config: BrainNetCNN) -> None:
        super().__init__()
        channels = (1, *config.edge_channels)
        self.edges = nn.ModuleList(EdgeToEdge(before, after, shape.n_rois) for before, after in pairwise(channels))
        self.nodes = nn.Conv2d(channels[-1], config.node_channels, (1, shape.n_rois))
        self.graph = nn.Conv2d(config.node_channels, config.graph_channels, (shape.n_rois, 1))
        self.hidden = nn.ModuleList(
            nn.Linear(before, after) for before, after in pairwise((config.graph_channels, *config.hidden))
        )
        self.inputs = shape.n_inputs
        self.output = nn.Linear((config.graph_channels, *config.hidden)[-1] + shape.n_inputs, 2)
        self.dropout = nn.Dropout(config.dropout)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")  # +- sqrt(3 / fan-in)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        edges = batch["fc"].unsqueeze(1)  # (subject, 1, roi, roi)
        for layer in self.edges:
            edges = functional.leaky_relu(layer(edges), SLOPE)  # (subject, edge channel, roi, roi)
        nodes = functional.leaky_relu(self.nodes(edges), SLOPE)  # (subject, node channel, roi, 1)
        fused = self.dropout(functional.leaky_relu(self.graph(nodes).flatten(1), SLOPE))  # (subject, graph channel)
        for layer in self.hidden:
            fused = self.dropout(functional.leaky_relu(layer(fused), SLOPE))  # (subject, hidden)
        return {"logits": self.output(with_phenotypes(fused, batch, self.inputs)), "fused": fused}


@method("brainnetcnn")
class BrainNetCNN(DeepMethod):
    """BrainNetCNN: edge-to-edge, edge-to-node and node-to-graph convolutions on Fisher-z FC; source sites pooled.

    As published: the stack of layers. Variant `lite` is the stack of the common PyTorch port, which later papers compare with;
    unlike there, dropout is off outside training, and there is no activation on the logits.
    Interpretation: edge-to-node has row filters only, as in the authors' release (columns of a symmetric matrix add nothing);
    Xavier initialisation is Caffe's, in which the publication was trained, hence by fan-in; Adam replaces SGD with its doubled
    learning rate of biases, and cross-entropy the squared error of the original regression.
    """

    edge_channels: tuple[int, ...] = (32, 32)
    node_channels: int = 64
    graph_channels: int = 256
    hidden: tuple[int, ...] = (128, 30)
    dropout: float = 0.5
    batch_size: int = 16
    weight_decay: float = 5e-4
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    may_be_empty = ("edge_channels", "hidden")
    takes = ANY_SCAN
    unused = ("length",)
    reference = "Kawahara et al. 2017: BrainNetCNN, NeuroImage 146:1038-1049"
    variants = {
        "lite": {"edge_channels": (32, 64), "node_channels": 1},
        "phenotypes": {"phenotypes": True},
        "small": {
            "edge_channels": (8, 8),
            "node_channels": 16,
            "graph_channels": 32,
            "hidden": (16, 8),
            "dropout": 0.2,
            "learning_rate": 3e-3,
            "epochs": 40,
            "warmup": 4,
            "patience": 15,
        },
    }
    space = {
        "dropout": (0.1, 0.3, 0.5, 0.7),
        "weight_decay": (1e-4, 5e-4, 1e-3, 1e-2),
        "learning_rate": (3e-5, 1e-4, 3e-4, 1e-3),
    }

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        return {"fc": torch.from_numpy(fisher_matrices(cohort.scans))}
