"""Group DRO: sites on which the network does badly count more.

One of the generalization methods on `erm.py`'s network, batches and loss; training is `deep.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch, Shape
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod


class WeighingNetwork(Network):
    """The shared network; in training it carries the weight and the remembered loss of each site, which are not saved."""

    def __init__(self, shape: Shape, config: GroupDRO) -> None:
        super().__init__(shape, config)
        self.weight: Tensor
        self.risk: Tensor
        self.register_buffer("weight", torch.full((shape.n_sites,), 1 / shape.n_sites), persistent=False)
        self.register_buffer("risk", torch.full((shape.n_sites,), torch.nan), persistent=False)  # nan: not met yet


def capped(share: Tensor, most: float) -> Tensor:
    """The shares with none above `most`; what is cut off goes to the others in proportion."""
    total = share.sum()
    full = torch.zeros_like(share, dtype=torch.bool)
    for _ in share:  # each round fills one more or changes nothing
        full = full | (share > most)
        free = share.masked_fill(full, 0.0)
        left = (total - most * full.sum()).clamp(min=0.0)
        share = torch.where(full, most, free * left / free.sum().clamp(min=1e-12))
    return share


@method("group-dro")
class GroupDRO(SiteMethod):
    """Group DRO: minimises a weighted mean of the sites' losses, whose weights grow exponentially with the losses.

    Mended: weights follow a running mean of each site's loss and stop at `cap` times the uniform weight; otherwise a small site
    that cannot be learned takes all.
    Read so: where a batch has some of the sites, these share anew the weight they had together and the others keep theirs, so
    that no site gains by being drawn often; their loss is scaled by all sites / sites in the batch, as a sum over all would be.
    """

    eta: float = 0.01
    memory: float = 0.9  # share of the past in the running mean of a site's loss
    cap: float = 5.0

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"cap": (1, math.inf), "memory": (0, 1)}
    reference: ClassVar[str] = "Sagawa et al. 2020, Distributionally robust neural networks for group shifts, ICLR"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = ERM.variants
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {"eta": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), **ERM.space}

    def build(self, shape: Shape) -> nn.Module:
        """The shared network with uniform weights of the sites: each fit begins anew."""
        return WeighingNetwork(shape, self)

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The weighted cross-entropy, after the weights have seen it."""
        assert isinstance(network, WeighingNetwork)
        logits = network(batch).float()
        each = functional.cross_entropy(logits, batch.label, reduction="none", label_smoothing=self.label_smoothing)
        met = torch.unique(batch.site)  # (site,)
        member = batch.site == met[:, None]  # (site, subject)
        risk = (member * each).sum(dim=1) / member.sum(dim=1)
        self.reweigh(network, met, risk.detach())
        return {"ce": (network.weight[met] * risk).sum() * len(network.weight) / len(met)}

    def reweigh(self, network: WeighingNetwork, met: Tensor, risk: Tensor) -> None:
        """The weights of the sites that were met, raised by their remembered losses."""
        past = network.risk[met]
        remembered = torch.where(past.isnan(), risk, self.memory * past + (1 - self.memory) * risk)
        weight = network.weight[met]
        raised = weight * (self.eta * (remembered - remembered.max())).exp()
        network.risk[met] = remembered
        network.weight[met] = capped(raised * weight.sum() / raised.sum(), self.cap / len(network.weight))
