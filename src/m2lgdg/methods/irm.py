"""IRM: a classifier that no site would want to rescale.

One of the generalization methods on `erm.py`'s network, batches and loss; training is `deep.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, SiteMethod
from m2lgdg.sampler import balanced_sites


def scale_slope(logits: Tensor, label: Tensor, smoothing: float) -> Tensor:
    """(subject,) derivative of the smoothed cross-entropy of w * logits with respect to w, at w = 1."""
    logits = logits.float()
    target = functional.one_hot(label, 2) * (1 - smoothing) + smoothing / 2  # (subject, class)
    return ((logits.softmax(dim=1) - target) * logits).sum(dim=1)


def halves(site: Tensor, label: Tensor) -> Tensor:
    """(subject,) False or True: every other one of each site, sorted by class, so that two of a class go to both halves."""
    order = torch.argsort(2 * site + label, stable=True)
    return torch.argsort(order) % 2 == 1


def irm_penalty(slope: Tensor, label: Tensor, site: Tensor) -> Tensor:
    """Mean over sites of the product of the mean slopes of two halves of the site; a site of one row adds 0."""
    member = site == torch.unique(site)[:, None]  # (site, subject)
    second = halves(site, label)
    one, other = ((slope * half).sum(dim=1) / half.sum(dim=1).clamp(min=1) for half in (member & ~second, member & second))
    product: Tensor = one * other  # (site,)
    return product.sum() / max(len(member), 1)


@method("irm")
class IRM(SiteMethod):
    """Invariant risk minimisation: at each site the loss must not change with the scale of the logits.

    The square of a site's slope is estimated without bias by the product over two halves of its rows, and may be negative.
    Mended: a source-training site with fewer than `least_per_class` subjects of a class stays out of the penalty, where its
    repeated subjects would be in both halves; only epochs under the full penalty may be kept, the earlier ones are hardly IRM.
    Read so: about 500 steps of 5000 with weight 1 are a fifth of the epochs here, which have some ten steps each and a warm-up.
    Read so: the slope is that of the loss that is minimised, smoothing included, as another one would not vanish where it does.
    """

    penalty_weight: float = 100.0
    anneal: float = 0.2  # share of the epochs with a penalty of weight 1; of what is not learned by then, little is later
    least_per_class: int = 4

    reference: ClassVar[str] = "Arjovsky et al. 2019, Invariant risk minimization, arXiv:1907.02893"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"small": {**ERM.variants["small"], "anneal": 0.5}}
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "penalty_weight": (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5),
        "anneal": (0.05, 0.1, 0.2, 0.3),
        **ERM.space,
    }

    @property
    def switch(self) -> int:
        """The first epoch of the full penalty."""
        return min(round(self.anneal * self.epochs), self.epochs - 1)

    def candidate(self, epoch: int) -> bool:
        """Not before the switch."""
        return super().candidate(epoch) and epoch >= self.switch

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Those of all methods; called once an epoch, and the only place that sees how many subjects a site has."""
        self._comparable = balanced_sites(site, label, self.least_per_class)
        self._forget = self.epoch == self.switch
        return super().batches(site, label, order)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """The penalty is of one site at a time."""
        return not len(balanced_sites(site, label, self.least_per_class))

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of everybody, the penalty of the sites that are large enough."""
        logits = network(batch)
        rows = torch.isin(batch.site, self._comparable.to(batch.site.device))
        slope = scale_slope(logits[rows], batch.label[rows], self.label_smoothing)
        penalty = irm_penalty(slope, batch.label[rows], batch.site[rows])
        weight = 1.0 if self.epoch < self.switch else self.penalty_weight
        return {"ce": self.cross_entropy(logits, batch), "invariance": weight * penalty}

    def step(self, network: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The usual update; at the switch the optimizer forgets the gradients of another loss."""
        if self._forget:
            optimizer.state.clear()
            self._forget = False
        return super().step(network, batch, optimizer)
