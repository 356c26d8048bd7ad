"""MLDG: a gradient step on some source sites must also lower the loss at others, which stand for the unseen site.

The network, batches and cross-entropy are in `erm.py`; this file has the split of a batch's sites and the meta-objective.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, SiteMethod
from m2lgdg.sampler import balanced_sites


@method("mldg")
class MLDG(SiteMethod):
    """MLDG: our FC network; loss at some source sites plus the loss at others after a gradient step on the first.

    Differs from the public releases: the inner step is one plain gradient step on the mean over sites, of second order as
    published and without dropout. One release takes a step of a fresh Adam for each site, which uses only the gradient's sign.
    Sites with fewer than 4 subjects per class are never meta-test sites; a batch without a possible meta-test site is an ERM
    step.
    The publication's inner rate is for a sum over sites and for other features; the default is the middle of the range to tune.
    """

    order: Literal[1, 2] = 2  # 1: the inner gradient is treated as a constant
    meta_test_sites: int = 2
    inner_rate: float = 0.02
    meta_weight: float = 1.0

    reference = "Li et al. 2018, Learning to generalize: meta-learning for domain generalization, AAAI"
    variants = {"first-order": {"order": 1}, **ERM.variants}
    space = {
        "order": (1, 2),
        "meta_test_sites": (1, 2),
        "inner_rate": (0.001, 0.005, 0.02, 0.1, 0.5),
        "meta_weight": (0.1, 0.3, 1.0, 3.0, 10.0),
        **ERM.space,
    }

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        self._balanced = balanced_sites(site, label)
        return super().batches(site, label, order)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Fewer than two sites, or none large enough to be a meta-test site."""
        return super().lacks_sites(site, label) or not len(balanced_sites(site, label))

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss at the meta-train sites, and at the meta-test sites after the inner step; sites are of equal size."""
        unseen = self.meta_test(batch.site)  # (subject,)
        train, test = batch.take(torch.nonzero(~unseen)[:, 0]), batch.take(torch.nonzero(unseen)[:, 0])
        terms = {"ce": self.cross_entropy(network(train), train)}
        if not len(test):
            return terms | {"meta": torch.zeros_like(terms["ce"])}
        logits = functional_call(network, self.stepped(network, train), (test,))
        return terms | {"meta": self.meta_weight * self.cross_entropy(logits, test)}

    def meta_test(self, site: Tensor) -> Tensor:
        """(subject,) whether the subject's site is a meta-test site; these are drawn at random, and never all sites."""
        present = torch.unique(site).cpu()
        fit = present[torch.isin(present, self._balanced)]
        drawn = fit[torch.randperm(len(fit))[: min(self.meta_test_sites, len(present) - 1)]]
        return torch.isin(site, drawn.to(site.device))

    def stepped(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Parameters after one gradient step on a batch, without dropout."""
        training = network.training
        parameters = dict(network.named_parameters())
        loss = self.cross_entropy(network.eval()(batch), batch)
        network.train(training)
        slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=self.order == 2)
        return {name: parameters[name] - self.inner_rate * slope for name, slope in zip(parameters, slopes, strict=True)}
