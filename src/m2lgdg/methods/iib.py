"""IIB: a Gaussian bottleneck from which a site-aware classifier does no better than a site-blind one.

The encoder, batches and cross-entropy are in `erm.py`; this file has the bottleneck, the two classifiers and their losses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from m2lgdg.deep import Batch, Shape, with_phenotypes
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod


class BottleneckNetwork(Network):
    """The shared encoder, a Gaussian bottleneck, a site-blind classifier, and a site-aware one used only in training."""

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
        """Logits, mean and log variance of the bottleneck, and its value: a sample in training, otherwise the mean."""
        hidden = self.bottleneck(self.encode(batch["fc"]))
        mu, log_variance = self.mu(hidden).float(), self.log_variance(hidden).float()  # (subject, latent)
        fused = mu + torch.exp(0.5 * log_variance) * torch.randn_like(mu) if self.training else mu
        logits = self.classify(fused, batch)
        return {"fused": fused, "logits": logits, "mu": mu, "log_variance": log_variance}

    def classify_aware(self, fused: Tensor, batch: Batch) -> Tensor:
        known = with_phenotypes(fused, batch, self.inputs)
        return self.aware(torch.cat([known, self.sites(batch.site)], dim=1))


def head(inputs: int, width: int) -> nn.Module:
    """Classifier with one hidden layer, or a linear one if `width` is 0."""
    if not width:
        return nn.Linear(inputs, 2)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2))


def divergence(mu: Tensor, log_variance: Tensor) -> Tensor:
    """Kullback-Leibler divergence from the standard normal, summed over dimensions and averaged over subjects."""
    return 0.5 * (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean()


@method("iib")
class IIB(SiteMethod):
    """IIB: our FC network with a Gaussian bottleneck; penalises the gap between site-blind and site-aware losses.

    Differs from the public release: a learned vector for each site instead of its number; layer norm instead of batch norm; a
    hidden layer in both classifiers (with linear ones and balanced classes the site could only shift the logits); more weight
    decay in the site-aware part; a penalty that ramps up, and no epoch is selected before it is full.
    The publication's loss weights are unverified: they are the release's. The divergence is a mean over the 64 subjects of a
    batch, not their sum, and has 64 times its weight of 1e-4. In trainings on ABIDE the invariance is on average below a
    hundredth of the cross-entropy: both classifiers fit their subjects alike.
    """

    latent: int = 64
    head_width: int = 32
    site_width: int = 8
    bottleneck_weight: float = 6.4e-3
    invariance_weight: float = 10.0
    rise: float = 0.1  # fraction of the epochs over which the invariance weight ramps up
    aware_decay: float = 1e-2

    network_class = BottleneckNetwork
    bounds = {"head_width": (0, math.inf)}
    reference = "Li et al. 2022, Invariant information bottleneck for domain generalization, AAAI"
    variants = {
        "phenotypes": {"phenotypes": True},
        "small": {**ERM.variants["small"], "latent": 32, "head_width": 16},
    }
    space = {
        "bottleneck_weight": (1e-4, 1e-3, 6.4e-3, 3e-2, 1e-1),
        "invariance_weight": (1.0, 3.0, 10.0, 30.0, 100.0),
        "rise": (0.05, 0.1, 0.3),
        "latent": (16, 32, 64, 128),
        "head_width": (0, 16, 32),
        **ERM.space,
    }

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """More weight decay for the site-aware part, which sees few subjects per site and would overfit."""
        aware = [*network.get_submodule("aware").parameters(), *network.get_submodule("sites").parameters()]
        others = [value for value in network.parameters() if all(value is not other for other in aware)]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": aware, "weight_decay": self.aware_decay}]
        return self.updating(groups)

    def ramp(self, epoch: int) -> float:
        return min(1.0, epoch / max(1, math.ceil(self.rise * self.epochs)))

    def candidate(self, epoch: int) -> bool:
        full = not self.select_after_warmup or self.ramp(epoch) == 1 or epoch == self.epochs - 1
        return super().candidate(epoch) and full

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return len(torch.unique(site)) < 2

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        parts = network.parts(batch)
        blind = self.cross_entropy(parts["logits"], batch)
        aware = self.cross_entropy(network.classify_aware(parts["fused"], batch), batch)
        return {
            "ce": blind,
            "aware": aware,
            "bottleneck": self.bottleneck_weight * divergence(parts["mu"], parts["log_variance"]),
            "invariance": self.invariance_weight * self.ramp(self.epoch) * (blind - aware).square(),
        }
