"""CDANN: the representation is trained against a discriminator that guesses the site of a subject whose class it knows.

`erm.py` gives the network, the batches and the loss; here are the discriminator, its objective and the two updates of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch, Shape
from m2lgdg.method import method
from m2lgdg.methods.erm import Network, SiteMethod
from m2lgdg.sampler import balanced_sites


class Discriminator(nn.Module):
    """The class joins the representation as a learned vector; a multi-layer perceptron guesses the site."""

    def __init__(self, width: int, n_sites: int, config: CDANN) -> None:
        super().__init__()
        self.classes = nn.Embedding(2, width)
        layers: list[nn.Module] = []
        for before, after in pairwise((width, *config.discriminator_widths)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(config.discriminator_dropout)]
        self.guess = nn.Sequential(*layers, nn.Linear((width, *config.discriminator_widths)[-1], n_sites))


class AdversarialNetwork(Network):
    """The shared network, with a discriminator that only training uses."""

    def __init__(self, shape: Shape, config: CDANN) -> None:
        super().__init__(shape, config)
        self.discriminator = Discriminator(config.widths[-1], shape.n_sites, config)


def site_weights(site: Tensor, label: Tensor) -> Tensor:
    """(subject,) weights of sum 1, alike for each site and class; a site that shows one class only has weight 0."""
    here = site[:, None] == site[None, :]  # (subject, subject)
    alike = label[:, None] == label[None, :]
    paired = (here & ~alike).any(dim=1)
    weight = paired / (here & alike).sum(dim=1)
    return weight / weight.sum().clamp(min=1.0)  # there is a whole 1 in the sum for each site and class that counts


@method("cdann")
class CDANN(SiteMethod):
    """Conditional adversarial training: a discriminator given the class must not tell the source sites apart.

    Against the public release: site and class are balanced together (small sites were drowned out), a site with one class in
    the batch does not count, the weight rises slowly, and only epochs with at least half of it may be kept.
    Both updates are made in each step, so that encoder and classifier are updated as often as in ERM (the release alternates).
    The loss weights and the per-class discriminators of the publication are unverified: the class embedding is the release's.
    """

    adversary_weight: float = 1.0
    gradient_penalty: float = 0.1
    discriminator_widths: tuple[int, ...] = (128, 128)
    discriminator_dropout: float = 0.5
    discriminator_steps: int = 1  # updates of the discriminator before each of the rest
    discriminator_rate: float = 1e-3
    discriminator_decay: float = 0.0
    beta1: float = 0.5

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"discriminator_dropout": (0, 1)}
    may_be_empty: ClassVar[tuple[str, ...]] = ("discriminator_widths",)
    reference: ClassVar[str] = (
        "Li et al. 2018, Deep domain generalization via conditional invariant adversarial networks, ECCV; "
        "as in Gulrajani and Lopez-Paz 2021, In search of lost domain generalization"
    )
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "small": {"widths": (32, 16), "discriminator_widths": (16, 16), "epochs": 40, "warmup": 4, "patience": 15}
    }
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "adversary_weight": (0.01, 0.1, 1.0, 10.0, 100.0),
        "gradient_penalty": (0.01, 0.1, 1.0, 10.0),
        "discriminator_widths": ((64, 64), (128, 128), (256, 256), (128, 128, 128)),
        "discriminator_dropout": (0.0, 0.1, 0.5),
        "discriminator_steps": (1, 2, 4, 8),
        "discriminator_rate": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        "discriminator_decay": (0.0, 1e-6, 1e-4, 1e-2),
        "beta1": (0.0, 0.5),
        "site_power": (0.0, 0.5, 1.0),
        "learning_rate": (1e-4, 3e-4, 1e-3, 3e-3),
        "weight_decay": (1e-4, 1e-3, 1e-2, 1e-1),
        "dropout": (0.0, 0.1, 0.5),
    }

    def build(self, shape: Shape) -> nn.Module:
        """The shared network and its discriminator."""
        return AdversarialNetwork(shape, self)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Two groups, for `step` moves one at a time."""
        rest, rival = two_sides(network)
        others = {"params": rival, "lr": self.discriminator_rate, "weight_decay": self.discriminator_decay}
        kept = {"params": rest, "lr": self.learning_rate, "weight_decay": self.weight_decay}
        return torch.optim.AdamW([kept, others], betas=(self.beta1, 0.9))

    def ramp(self, epoch: int) -> float:
        """Share of the adversary's weight: 0 at the first epoch, near 1 from the middle of training on."""
        return 2 / (1 + math.exp(-10 * epoch / self.epochs)) - 1

    def candidate(self, epoch: int) -> bool:
        """Not before the adversary has at least half of its weight: until then the network is nearly ERM's."""
        felt = not self.select_after_warmup or self.ramp(epoch) >= 0.5 or epoch == self.epochs - 1
        return super().candidate(epoch) and felt

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Sites of one class do not count, and one that counts is all the discriminator could say."""
        return len(balanced_sites(site, label, 1)) < 2

    def site_terms(self, network: AdversarialNetwork, fused: Tensor, batch: Batch) -> dict[str, Tensor]:
        """What the discriminator minimises: its balanced cross-entropy, and how steep it is where the subjects are."""
        weight = site_weights(batch.site, batch.label)  # (subject,)
        counted = (weight > 0).float()
        with torch.autocast(fused.device.type, enabled=False):
            joined = fused.float() + network.discriminator.classes(batch.label)  # (subject, width)
            each = functional.cross_entropy(network.discriminator.guess(joined), batch.site, reduction="none")
            (slope,) = torch.autograd.grad((each * counted).sum(), joined, create_graph=True)
            steepness = slope.square().sum() / counted.sum().clamp(min=1.0)
            return {"site": (weight * each).sum(), "penalty": self.gradient_penalty * steepness}

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """What encoder and classifier minimise: cross-entropy, less what the discriminator minimises."""
        assert isinstance(network, AdversarialNetwork)
        found = network.parts(batch)
        against = -self.adversary_weight * self.ramp(self.epoch)
        terms = self.site_terms(network, found["fused"], batch)
        return {"ce": self.cross_entropy(found["logits"], batch)} | {name: against * term for name, term in terms.items()}

    def step(self, network: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """First the discriminator alone, then everything but the discriminator."""
        assert isinstance(network, AdversarialNetwork)
        rest, rival = two_sides(network)
        device = batch.label.device
        for _ in range(self.discriminator_steps):
            with torch.no_grad(), self.autocast(device):
                fused = network.encode(batch["fc"])
            self._update(self.site_terms(network, fused, batch), rival, optimizer)
        with self.autocast(device):
            terms = self.loss(network, batch)
        self._update(terms, rest, optimizer)
        return {name: term.detach() for name, term in terms.items()}

    def _update(self, terms: Mapping[str, Tensor], moved: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Move some parameters; the others get no gradient, so that they are not even decayed."""
        optimizer.zero_grad(set_to_none=True)
        total: Any = torch.stack([term.float() for term in terms.values()]).sum()
        total.backward(inputs=moved)
        nn.utils.clip_grad_norm_(moved, self.clip)
        optimizer.step()


def two_sides(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of encoder and classifier, and those of the discriminator."""
    named = list(network.named_parameters())
    rest = [value for name, value in named if not name.startswith("discriminator.")]
    return rest, [value for name, value in named if name.startswith("discriminator.")]
