"""IBGNN+: message passing with edge weights, and one edge mask for all subjects that explains and then enhances the network.

The network works on the dense graph of Fisher-z FC. The loop of `deep.py` trains it in three stages, a third of the epochs
each: the network, the mask, and the network again with the mask.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fisher_matrices
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, schedule, with_phenotypes
from m2lgdg.method import ANY_SCAN, method

BACKBONE, MASK, ENHANCED = range(3)  # the stages


class MessagePassing(nn.Module):
    """Node update: ReLU of the sum over all other nodes of MLP([own state; other state; edge weight])."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.edge = nn.Linear(1, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, nodes: Tensor, weights: Tensor) -> Tensor:
        """(subject, roi, width) and (subject, roi, other roi) -> (subject, roi, hidden)."""
        # Channels first: on a CPU the broadcast sum is twice as fast along ROIs as along a few channels.
        own, other = (part(nodes).mT.contiguous() for part in (self.own, self.other))  # (subject, hidden, roi)
        edge = self.edge.weight[:, :, None]  # (hidden, 1, 1)
        messages = torch.addcmul(own[..., None] + other[:, :, None], edge, weights[:, None]).relu_()  # (s, hidden, roi, other)
        itself = weights.diagonal(dim1=1, dim2=2)[:, None]  # (subject, 1, roi)
        to_itself = torch.addcmul(own + other, edge[..., 0], itself).relu_()  # (subject, hidden, roi)
        summed = (messages.sum(dim=3) - to_itself) / nodes.shape[1]
        return functional.relu(self.output(summed.mT))


class Network(PartsNetwork):
    """Message passing, a readout with a residual, a linear classifier, and the edge mask."""

    def __init__(self, shape: Shape, config: IBGNNPlus) -> None:
        super().__init__()
        widths = (shape.n_rois, *[config.hidden] * (config.layers - 1))
        self.layers = nn.ModuleList(MessagePassing(width, config.hidden) for width in widths)
        self.dropout = nn.Dropout(config.dropout)
        self.readout = nn.Sequential(
            nn.Linear(config.hidden, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.hidden)
        )
        self.inputs = shape.n_inputs
        self.classifier = nn.Linear(config.hidden + shape.n_inputs, 2)
        self.mask = nn.Parameter(torch.ones(shape.n_rois, shape.n_rois))
        self.masked = True  # off in the first stage of training only; prediction always uses the mask
        self.mask_nodes = config.mask_nodes
        self.best: tuple[float, float] | None = None  # validation of the best epoch of the first stage, used in training only
        self.kept: dict[str, Tensor] = {}  # its weights

    def edges(self) -> Tensor:
        """(roi, roi) logit of the fraction of its weight that each edge keeps."""
        return (self.mask + self.mask.T) / 2

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        nodes = weights = batch["fc"]
        if self.masked:
            weights = weights * torch.sigmoid(self.edges())
            nodes = weights if self.mask_nodes else nodes
        for position, layer in enumerate(self.layers):
            nodes = layer(self.dropout(nodes) if position else nodes, weights)
        pooled = nodes.mean(dim=1)  # (subject, hidden)
        fused = self.readout(pooled) + pooled
        return {"fused": fused, "logits": self.classifier(with_phenotypes(fused, batch, self.inputs))}


@method("ibgnn-plus")
class IBGNNPlus(DeepMethod):
    """IBGNN+: edge-weighted message passing on Fisher-z FC with a learned edge mask for all subjects; source sites pooled.

    Differs from the release: messages are an MLP of states and edge weight; the release's linear message cannot distinguish
    which neighbour has which weight on a dense graph. The mask is symmetric and its diagonal stays; while it is learned,
    messages are not multiplied by its logits as well, dropout is off and the network is frozen. The mask and the last stage
    start from the epoch of the first stage with the best source validation (`keep_best_backbone`), because the network fits the
    source completely within a hundred epochs.
    Interpretation: the readout is the paper's MLP with a residual, which the release's default leaves out. Edges keep their
    sign. Nodes keep their unmasked rows, as in the release; `mask_nodes` masks the rows as well.
    Differs from the publication: the sums over neighbours and over nodes are divided by the number of ROIs (otherwise the loss
    starts near 2000), and each stage has its own warm-up and cosine schedule.
    Cost: a layer's messages are subject x hidden x ROI x ROI numbers, 14 MB for a batch at 116 ROIs and 164 MB at 400.
    """

    hidden: int = 16
    layers: int = 2
    mask_rate: float = 0.01
    label_weight: float = 10.0
    agreement_weight: float = 10.0
    size_weight: float = 5e-4
    entropy_weight: float = 1.0
    mask_nodes: bool = False
    keep_best_backbone: bool = True  # the mask is learned for the best epoch of the first stage; False: for the last
    epochs: int = 300
    batch_size: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    dropout: float = 0.5
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    takes = ANY_SCAN
    unused = ("length",)
    recordable = True
    reference = "Cui et al. 2022: Interpretable graph neural networks for connectome-based brain disorder analysis"
    variants = {
        "mask-nodes": {"mask_nodes": True},
        "phenotypes": {"phenotypes": True},
        "small": {"learning_rate": 0.01, "dropout": 0.1},
    }
    space = {
        "size_weight": (0.0, 5e-5, 5e-4, 5e-3),
        "agreement_weight": (0.0, 1.0, 10.0),
        "layers": (1, 2, 3),
        "hidden": (8, 16, 32),
    }

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        return {"fc": torch.from_numpy(fisher_matrices(cohort.scans))}

    def optimizer(self, network: Any) -> torch.optim.Optimizer:
        """The mask has no weight decay, which would pull it towards one half."""
        backbone = [value for name, value in network.named_parameters() if name != "mask"]
        mask = {"params": [network.mask], "lr": self.mask_rate, "weight_decay": 0.0}
        groups = [{"params": backbone, "lr": self.learning_rate}, mask]
        return self.updating(groups)

    def starts(self) -> tuple[int, int, int, int]:
        """First epoch of each stage, and the end; the last epoch always belongs to the last stage."""
        return 0, self.epochs // 3, 2 * self.epochs // 3, self.epochs

    def stage(self) -> int:
        return sum(self.epoch >= start for start in self.starts()[1:3])

    def phase(self) -> object:
        return self.stage()

    def rate_factor(self, batch: int, batches: int) -> float:
        """Warm-up and cosine within each stage, per epoch."""
        stage, starts = self.stage(), self.starts()
        return schedule(self.epoch - starts[stage], 1, self.warmup, starts[stage + 1] - starts[stage])

    def candidate(self, epoch: int) -> bool:
        """Only epochs of the last stage, in which the network is trained with the mask."""
        return epoch >= min(self.starts()[ENHANCED] + self.warmup * self.select_after_warmup, self.epochs - 1)

    def validate(self, network: Any, batch: Batch) -> dict[str, float]:
        """Validation; the first stage keeps its best epoch and loads it at its end, if `keep_best_backbone`."""
        metrics = super().validate(network, batch)
        if not self.keep_best_backbone or self.stage() != BACKBONE:
            return metrics
        rank = (metrics["val_auc"], -metrics["val_loss"])
        if network.best is None or rank > network.best:
            network.best = rank
            network.kept = {name: value.clone() for name, value in network.state_dict().items()}
        if self.epoch == self.starts()[MASK] - 1:
            network.load_state_dict(network.kept)
        return metrics

    def step(self, network: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Parameters of other stages have no gradient, so the optimizer leaves them unchanged."""
        stage = self.stage()
        network.masked = stage != BACKBONE
        network.train(stage != MASK).requires_grad_(stage != MASK)
        network.mask.requires_grad_(stage == MASK)
        return super().step(network, batch, optimizer)

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy; in the mask stage also agreement with the unmasked network, and the mask's size and entropy."""
        if self.stage() != MASK:
            return super().loss(network, batch)
        network.masked = False
        with torch.no_grad():
            unmasked = network(batch).argmax(dim=1)
        network.masked = True
        logits = network(batch).float()
        edges, n = network.edges(), len(network.mask)  # (roi, roi) both directions
        pairs = 1 - torch.eye(n, device=logits.device)  # without self-connections
        keep, drop = torch.sigmoid(edges), torch.sigmoid(-edges)
        log_likelihood = keep * functional.logsigmoid(edges) + drop * functional.logsigmoid(-edges)
        entropy = -(pairs * log_likelihood).sum() / max(n * (n - 1), 1)
        return {
            "label": self.label_weight * self.cross_entropy(logits, batch),
            "agreement": self.agreement_weight * functional.cross_entropy(logits, unmasked),
            "size": self.size_weight * (pairs * keep).sum(),
            "entropy": self.entropy_weight * entropy,
        }
