"""CDANN: adversarial training against a discriminator that predicts the site from the representation and the class.

The network, batches and cross-entropy are in `erm.py`; this file has the discriminator, its loss and the two updates of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch, Shape
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod
from m2lgdg.sampler import balanced_sites


class Discriminator(nn.Module):
    """Multi-layer perceptron that predicts the site; the class is added to the representation as a learned vector."""

    def __init__(self, width: int, n_sites: int, config: CDANN) -> None:
        super().__init__()
        self.classes = nn.Embedding(2, width)
        layers: list[nn.Module] = []
        for before, after in pairwise((width, *config.discriminator_widths)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(config.discriminator_dropout)]
        self.guess = nn.Sequential(*layers, nn.Linear((width, *config.discriminator_widths)[-1], n_sites))


class AdversarialNetwork(Network):
    """The shared network, with a discriminator used only in training."""

    def __init__(self, shape: Shape, config: CDANN) -> None:
        super().__init__(shape, config)
        self.discriminator = Discriminator(config.widths[-1], shape.n_sites, config)


def site_weights(site: Tensor, label: Tensor) -> Tensor:
    """(subject,) weights that sum to 1 and are equal for each site and class; sites with one class in the batch have 0."""
    same_site = site[:, None] == site[None, :]  # (subject, subject)
    same_class = label[:, None] == label[None, :]
    has_both = (same_site & ~same_class).any(dim=1)
    weight = has_both / (same_site & same_class).sum(dim=1)
    return weight / weight.sum().clamp(min=1.0)  # each site and class that counts adds 1 to the sum


@method("cdann")
class CDANN(SiteMethod):
    """CDANN: our FC network; aligns source sites against an adversarial, class-conditional site discriminator.

    Differs from the public release: site and class are balanced jointly (small sites were drowned out), a site with one class
    in the batch does not count, the adversarial weight ramps up slowly, only epochs with at least half of it can be selected,
    and each step makes both updates, so that encoder and classifier are updated as often as in ERM (the release alternates).
    The publication's loss weights and per-class discriminators are unverified: the class embedding is the release's.
    """

    adversary_weight: float = 1.0
    gradient_penalty: float = 0.1
    discriminator_widths: tuple[int, ...] = (128, 128)
    discriminator_dropout: float = 0.5
    discriminator_steps: int = 1  # updates of the discriminator per update of the rest
    discriminator_rate: float = 1e-3
    discriminator_decay: float = 0.0
    beta1: float = 0.5
    update_rule: Literal["adamw", "adam"] = "adamw"

    network_class = AdversarialNetwork
    bounds = {"discriminator_dropout": (0, 1)}
    may_be_empty = ("discriminator_widths",)
    reference = (
        "Li et al. 2018, Deep domain generalization via conditional invariant adversarial networks, ECCV; "
        "as in Gulrajani and Lopez-Paz 2021, In search of lost domain generalization"
    )
    variants = {
        "phenotypes": {"phenotypes": True},
        "small": {**ERM.variants["small"], "discriminator_widths": (16, 16)},
    }
    space = {
        "adversary_weight": (0.01, 0.1, 1.0, 10.0, 100.0),
        "gradient_penalty": (0.01, 0.1, 1.0, 10.0),
        "discriminator_widths": ((64, 64), (128, 128), (256, 256), (128, 128, 128)),
        "discriminator_dropout": (0.0, 0.1, 0.5),
        "discriminator_steps": (1, 2, 4, 8),
        "discriminator_rate": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        "discriminator_decay": (0.0, 1e-6, 1e-4, 1e-2),
        "beta1": (0.0, 0.5),
        **ERM.space,
    }

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        rest, discriminator = two_sides(network)
        discriminator_group = {"params": discriminator, "lr": self.discriminator_rate, "weight_decay": self.discriminator_decay}
        network_group = {"params": rest, "lr": self.learning_rate, "weight_decay": self.weight_decay}
        return self.updating([network_group, discriminator_group], betas=(self.beta1, 0.9))

    def ramp(self, epoch: int) -> float:
        """Factor of the adversarial weight: 0 at the first epoch, near 1 from the middle of training on."""
        return 2 / (1 + math.exp(-10 * epoch / self.epochs)) - 1

    def candidate(self, epoch: int) -> bool:
        """Only epochs with at least half of the adversarial weight; earlier networks are nearly ERM's."""
        adversarial = not self.select_after_warmup or self.ramp(epoch) >= 0.5 or epoch == self.epochs - 1
        return super().candidate(epoch) and adversarial

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return len(balanced_sites(site, label, 1)) < 2

    def site_terms(self, network: AdversarialNetwork, fused: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Losses of the discriminator: balanced cross-entropy of the site, and a gradient penalty at the subjects."""
        weight = site_weights(batch.site, batch.label)  # (subject,)
        counted = (weight > 0).float()
        with torch.autocast(fused.device.type, enabled=False):
            joined = fused.float() + network.discriminator.classes(batch.label)  # (subject, width)
            each = functional.cross_entropy(network.discriminator.guess(joined), batch.site, reduction="none")
            (slope,) = torch.autograd.grad((each * counted).sum(), joined, create_graph=True)
            steepness = slope.square().sum() / counted.sum().clamp(min=1.0)
            return {"site": (weight * each).sum(), "penalty": self.gradient_penalty * steepness}

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Losses of encoder and classifier: cross-entropy minus the weighted losses of the discriminator."""
        parts = network.parts(batch)
        factor = -self.adversary_weight * self.ramp(self.epoch)
        terms = self.site_terms(network, parts["fused"], batch)
        return {"ce": self.cross_entropy(parts["logits"], batch)} | {name: factor * term for name, term in terms.items()}

    def step(self, network: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Update the discriminator alone, then everything but the discriminator."""
        rest, discriminator = two_sides(network)
        device = batch.label.device
        for _ in range(self.discriminator_steps):
            with torch.no_grad(), self.autocast(device):
                fused = network.encode(batch["fc"])
            self._update(self.site_terms(network, fused, batch), discriminator, optimizer)
        with self.autocast(device):
            terms = self.loss(network, batch)
        self._update(terms, rest, optimizer)
        return {name: term.detach() for name, term in terms.items()}

    def _update(self, terms: Mapping[str, Tensor], parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Update some parameters; the others get no gradient, so that the optimizer does not decay them either."""
        optimizer.zero_grad(set_to_none=True)
        total: Any = torch.stack([term.float() for term in terms.values()]).sum()
        total.backward(inputs=parameters)
        self.clip_gradients(parameters)
        optimizer.step()


def two_sides(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of encoder and classifier, and of the discriminator."""
    named = list(network.named_parameters())
    rest = [value for name, value in named if not name.startswith("discriminator.")]
    return rest, [value for name, value in named if name.startswith("discriminator.")]
