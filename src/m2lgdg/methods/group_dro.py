"""Group DRO: source sites with a high loss get a larger weight.

One of the generalization methods: network, batches and cross-entropy are in `erm.py`, the training loop in `deep.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m2lgdg.deep import Batch, Shape
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod


class WeighingNetwork(Network):
    """The shared network, with the weight and running loss of each site as buffers for training that are not saved."""

    def __init__(self, shape: Shape, config: GroupDRO) -> None:
        super().__init__(shape, config)
        self.weight: Tensor
        self.risk: Tensor
        self.register_buffer("weight", torch.full((shape.n_sites,), 1 / shape.n_sites), persistent=False)
        self.register_buffer("risk", torch.full((shape.n_sites,), torch.nan), persistent=False)  # nan: not sampled yet


def capped(weight: Tensor, most: float) -> Tensor:
    """Weights clipped at `most`; the excess is distributed over the others in proportion."""
    total = weight.sum()
    clipped = torch.zeros_like(weight, dtype=torch.bool)
    for _ in weight:  # each round clips at least one more or changes nothing
        clipped = clipped | (weight > most)
        free = weight.masked_fill(clipped, 0.0)
        remaining = (total - most * clipped.sum()).clamp(min=0.0)
        weight = torch.where(clipped, most, free * remaining / free.sum().clamp(min=1e-12))
    return weight


@method("group-dro")
class GroupDRO(SiteMethod):
    """Group DRO: our FC network; source sites are weighted exponentially by their running loss.

    Differs from the publication: weights follow a running mean of each site's loss and are capped at `cap` times the uniform
    weight; otherwise a small site that cannot be learned takes all the weight.
    Interpretation: the sites in a batch redistribute the weight they hold together and the others keep theirs, so that no site
    gains by being drawn often. The loss is scaled by all sites / sites in the batch, to stand for the sum over all sites.
    """

    eta: float = 0.01
    memory: float = 0.9  # weight of the past in the running mean of a site's loss
    cap: float = 5.0

    network_class = WeighingNetwork
    bounds = {"cap": (1, math.inf), "memory": (0, 1)}
    reference = "Sagawa et al. 2020, Distributionally robust neural networks for group shifts, ICLR"
    variants = ERM.variants
    space = {"eta": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), **ERM.space}

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        logits = network(batch).float()
        each = functional.cross_entropy(logits, batch.label, reduction="none", label_smoothing=self.label_smoothing)
        present = torch.unique(batch.site)  # (site,)
        member = batch.site == present[:, None]  # (site, subject)
        risk = (member * each).sum(dim=1) / member.sum(dim=1)
        self.reweigh(network, present, risk.detach())
        return {"ce": (network.weight[present] * risk).sum() * len(network.weight) / len(present)}

    def reweigh(self, network: WeighingNetwork, present: Tensor, risk: Tensor) -> None:
        """Update the weights of the sites in the batch by their running losses."""
        past = network.risk[present]
        running = torch.where(past.isnan(), risk, self.memory * past + (1 - self.memory) * risk)
        weight = network.weight[present]
        raised = weight * (self.eta * (running - running.max())).exp()
        network.risk[present] = running
        network.weight[present] = capped(raised * weight.sum() / raised.sum(), self.cap / len(network.weight))
