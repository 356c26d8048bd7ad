"""IIB: a narrow noisy representation from which a classifier that knows the site does no better than one that does not.

`erm.py` gives encoder, batches and loss; here are the bottleneck, the two classifiers and the terms that tie them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from m2lgdg.deep import Batch, Shape
from m2lgdg.method import method
from m2lgdg.methods.erm import Network, SiteMethod


class BottleneckNetwork(Network):
    """The shared encoder, a Gaussian bottleneck, a classifier without the site; one with it that only training uses."""

    def __init__(self, shape: Shape, config: IIB) -> None:
        super().__init__(shape, config)
        layers: list[nn.Module] = []
        for before in (config.widths[-1], config.latent):
            layers += [nn.Linear(before, config.latent), nn.LayerNorm(config.latent), nn.ReLU()]
        self.bottleneck = nn.Sequential(*layers)
        self.mu, self.log_variance = nn.Linear(config.latent, config.latent), nn.Linear(config.latent, config.latent)
        self.classifier = head(config.latent + shape.n_inputs, config.head_width)  # type: ignore[assignment]
        self.sites = nn.Embedding(shape.n_sites, config.site_width)
        self.aware = head(config.latent + shape.n_inputs + config.site_width, config.head_width)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits, mean and log variance of the bottleneck, and the value it takes: by chance in training, else the mean."""
        hidden = self.bottleneck(self.encode(batch["fc"]))
        mu, log_variance = self.mu(hidden).float(), self.log_variance(hidden).float()  # (subject, latent)
        fused = mu + torch.exp(0.5 * log_variance) * torch.randn_like(mu) if self.training else mu
        logits = self.classify(fused, batch.phenotypes)
        return {"fused": fused, "logits": logits, "mu": mu, "log_variance": log_variance}

    def classify_aware(self, fused: Tensor, batch: Batch) -> Tensor:
        """(subject, 2) logits by a classifier that knows the source site."""
        logits: Tensor = self.aware(torch.cat([fused, batch.phenotypes, self.sites(batch.site)], dim=1))
        return logits


def head(inputs: int, width: int) -> nn.Module:
    """A classifier with one hidden layer, or linear where its width is 0."""
    if not width:
        return nn.Linear(inputs, 2)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2))


def divergence(mu: Tensor, log_variance: Tensor) -> Tensor:
    """Kullback-Leibler divergence from the standard normal: summed over dimensions, mean over subjects."""
    return 0.5 * (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean()


@method("iib")
class IIB(SiteMethod):
    """Invariant information bottleneck: knowing the site must not help to classify a compressed representation.

    Against the public release: a learned vector for each site in place of its number, layer norm in place of batch norm, the
    divergence a mean over subjects, a hidden layer in both classifiers (with linear ones and balanced classes the site could
    only shift the logits, and nothing would be penalised), more decay where the site is known, and a penalty that rises.
    The publication's weights are unverified: they are the release's, and no epoch is kept before the penalty is whole.
    """

    latent: int = 64
    head_width: int = 32
    site_width: int = 8
    bottleneck_weight: float = 1e-4
    invariance_weight: float = 10.0
    rise: float = 0.1  # share of the epochs over which the invariance weight grows
    aware_decay: float = 1e-2

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"head_width": (0, math.inf)}
    reference: ClassVar[str] = "Li et al. 2022, Invariant information bottleneck for domain generalization, AAAI"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "small": {
            "widths": (32, 16),
            "latent": 32,
            "head_width": 16,
            "learning_rate": 3e-3,  # the noise slows a narrow network down
            "epochs": 40,
            "warmup": 4,
            "patience": 15,
        }
    }
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "bottleneck_weight": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
        "invariance_weight": (1.0, 3.0, 10.0, 30.0, 100.0),
        "rise": (0.05, 0.1, 0.3),
        "latent": (16, 32, 64, 128),
        "head_width": (0, 16, 32),
        "site_power": (0.0, 0.5, 1.0),
        "learning_rate": (1e-4, 3e-4, 1e-3, 3e-3),
        "weight_decay": (1e-4, 1e-3, 1e-2, 1e-1),
        "dropout": (0.0, 0.1, 0.5),
    }

    def build(self, shape: Shape) -> nn.Module:
        """The network with its bottleneck."""
        return BottleneckNetwork(shape, self)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """More decay for what knows the site: it meets few subjects of each and would learn them by heart."""
        knowing = [*network.get_submodule("aware").parameters(), *network.get_submodule("sites").parameters()]
        others = [value for value in network.parameters() if all(value is not one for one in knowing)]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": knowing, "weight_decay": self.aware_decay}]
        return torch.optim.AdamW(groups, lr=self.learning_rate, weight_decay=self.weight_decay)

    def ramp(self, epoch: int) -> float:
        """Share of the invariance weight: from 0 in a straight line to 1."""
        return min(1.0, epoch / max(1, math.ceil(self.rise * self.epochs)))

    def candidate(self, epoch: int) -> bool:
        """Not before the invariance weight is whole."""
        whole = not self.select_after_warmup or self.ramp(epoch) == 1 or epoch == self.epochs - 1
        return super().candidate(epoch) and whole

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Knowing the only site says nothing, whoever meets in a batch."""
        return len(torch.unique(site)) < 2

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy without and with the site, the bottleneck, and the squared difference of the two."""
        assert isinstance(network, BottleneckNetwork)
        found = network.parts(batch)
        blind = self.cross_entropy(found["logits"], batch)
        aware = self.cross_entropy(network.classify_aware(found["fused"], batch), batch)
        return {
            "ce": blind,
            "aware": aware,
            "bottleneck": self.bottleneck_weight * divergence(found["mu"], found["log_variance"]),
            "invariance": self.invariance_weight * self.ramp(self.epoch) * (blind - aware).square(),
        }
