"""MLDG: a step that helps some source sites must also help others, which play the unseen site in that step.

`erm.py` gives the network, the batches and the loss; here are the split of a batch's sites and the two-part objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import SiteMethod
from m2lgdg.sampler import balanced_sites


@method("mldg")
class MLDG(SiteMethod):
    """Meta-learning: the loss at some sites, plus the loss at other sites after a gradient step on the first.

    Against the public releases: the inner step is one plain gradient step on the mean over sites (one release takes a step of
    a fresh Adam for each site, which knows only the gradient's sign), of order 2 as published, without dropout.
    Sites of fewer than 4 per class never play the unseen site; a batch without another one is a step of ERM.
    The publication's inner rate is for a sum over sites and other features; here it is the middle of the range to be tuned.
    """

    order: Literal[1, 2] = 2  # 1: the inner gradient counts as a constant
    meta_test_sites: int = 2
    inner_rate: float = 0.02
    meta_weight: float = 1.0

    reference: ClassVar[str] = "Li et al. 2018, Learning to generalize: meta-learning for domain generalization, AAAI"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "first-order": {"order": 1},
        "small": {"widths": (32, 16), "epochs": 40, "warmup": 4, "patience": 15},
    }
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "order": (1, 2),
        "meta_test_sites": (1, 2),
        "inner_rate": (0.001, 0.005, 0.02, 0.1, 0.5),
        "meta_weight": (0.1, 0.3, 1.0, 3.0, 10.0),
        "site_power": (0.0, 0.5, 1.0),
        "learning_rate": (1e-4, 3e-4, 1e-3, 3e-3),
        "weight_decay": (1e-4, 1e-3, 1e-2, 1e-1),
        "dropout": (0.0, 0.1, 0.5),
    }

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """ERM's batches; which sites are large enough to play the unseen one is seen here."""
        self._balanced = balanced_sites(site, label)
        return super().batches(site, label, order)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """One of two sites must be large enough to play the unseen one."""
        return super().lacks_sites(site, label) or not len(balanced_sites(site, label))

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss at the meta-train sites, and at the meta-test sites after the inner step.

        The sampler takes the same number of subjects from each site, so a mean over subjects is a mean over sites.
        """
        unseen = self.meta_test(batch.site)  # (subject,)
        train, test = batch.take(torch.nonzero(~unseen)[:, 0]), batch.take(torch.nonzero(unseen)[:, 0])
        terms = {"ce": self.cross_entropy(network(train), train)}
        if not len(test):
            return terms | {"meta": torch.zeros_like(terms["ce"])}
        logits = functional_call(network, self.stepped(network, train), (test,))
        return terms | {"meta": self.meta_weight * self.cross_entropy(logits, test)}

    def meta_test(self, site: Tensor) -> Tensor:
        """(subject,) whether a subject's site plays the unseen one: drawn by chance, and never all sites."""
        present = torch.unique(site).cpu()
        fit = present[torch.isin(present, self._balanced)]
        drawn = fit[torch.randperm(len(fit))[: min(self.meta_test_sites, len(present) - 1)]]
        return torch.isin(site, drawn.to(site.device))

    def stepped(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The parameters after one gradient step on some subjects, without dropout."""
        training = network.training
        now = dict(network.named_parameters())
        loss = self.cross_entropy(network.eval()(batch), batch)
        network.train(training)
        slopes = torch.autograd.grad(loss, list(now.values()), create_graph=self.order == 2)
        return {name: now[name] - self.inner_rate * slope for name, slope in zip(now, slopes, strict=True)}
