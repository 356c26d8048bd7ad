"""IRM: penalises the gradient of each site's loss with respect to the scale of the logits.

One of the generalization methods: network, batches and cross-entropy are in `erm.py`, the training loop in `deep.py`.
"""

from __future__ import annotations

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
    """(subject,) whether in the second half of its site; halves alternate in order of class, so each class is split in two."""
    order = torch.argsort(2 * site + label, stable=True)
    return torch.argsort(order) % 2 == 1


def irm_penalty(slope: Tensor, label: Tensor, site: Tensor) -> Tensor:
    """Mean over sites of the product of the mean slopes of the site's two halves; a site of one row adds 0."""
    member = site == torch.unique(site)[:, None]  # (site, subject)
    second = halves(site, label)
    mean_first, mean_second = (
        (slope * half).sum(dim=1) / half.sum(dim=1).clamp(min=1) for half in (member & ~second, member & second)
    )
    product: Tensor = mean_first * mean_second  # (site,)
    return product.sum() / max(len(member), 1)


@method("irm")
class IRM(SiteMethod):
    """IRM: our FC network; penalises each source site's squared loss gradient with respect to the logit scale.

    The squared gradient of a site is estimated without bias as the product over two halves of its rows, and may be negative.
    Differs from the publication: source-training sites with fewer than `least_per_class` subjects of a class are left out of
    the penalty, because their repeated subjects would be in both halves. Only epochs under the full penalty can be selected;
    earlier ones are hardly IRM.
    Interpretation: about 500 of 5000 steps with weight 1 become a fifth of the epochs, which have some ten steps each and a
    warm-up. The gradient is that of the minimised loss, label smoothing included; that of another loss would not vanish at the
    same point.
    """

    penalty_weight: float = 100.0
    anneal: float = 0.2  # fraction of the epochs with a penalty of weight 1; little is learned after them
    least_per_class: int = 4

    reference = "Arjovsky et al. 2019, Invariant risk minimization, arXiv:1907.02893"
    variants = {**ERM.variants, "small": {**ERM.variants["small"], "anneal": 0.5}}
    space = {
        "penalty_weight": (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5),
        "anneal": (0.05, 0.1, 0.2, 0.3),
        **ERM.space,
    }

    @property
    def switch(self) -> int:
        """First epoch of the full penalty."""
        return min(round(self.anneal * self.epochs), self.epochs - 1)

    def candidate(self, epoch: int) -> bool:
        return super().candidate(epoch) and epoch >= self.switch

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        self._comparable = balanced_sites(site, label, self.least_per_class)
        self._forget = self.epoch == self.switch
        return super().batches(site, label, order)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return not len(balanced_sites(site, label, self.least_per_class))

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = network(batch)
        rows = torch.isin(batch.site, self._comparable.to(batch.site.device))
        slope = scale_slope(logits[rows], batch.label[rows], self.label_smoothing)
        penalty = irm_penalty(slope, batch.label[rows], batch.site[rows])
        weight = 1.0 if self.epoch < self.switch else self.penalty_weight
        return {"ce": self.cross_entropy(logits, batch), "invariance": weight * penalty}

    def step(self, network: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """One update; at the switch the optimizer state is reset, since its moments belong to another loss."""
        if self._forget:
            optimizer.state.clear()
            self._forget = False
        return super().step(network, batch, optimizer)
