"""Mixup between sites: the network learns from correlation matrices that lie between two subjects of different sites.

One of the generalization methods on `erm.py`'s network, batches and loss; training is `deep.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.connectivity import CLIP
from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod


def site_pairs(site: Tensor) -> Tensor:
    """(2, site, subject) positions: sites in random order over the next ones, the last over the first.

    Needs as many rows of each site. Subjects are shuffled within a site: rows come sorted by class, so that otherwise nobody
    would be mixed with the other class.
    """
    shuffled = torch.randperm(len(site)).to(site.device)
    by_site = shuffled[torch.argsort(site[shuffled], stable=True)]
    n_sites = len(torch.unique(site))
    first = by_site.view(n_sites, -1)[torch.randperm(n_sites).to(site.device)]
    return torch.stack([first, first.roll(-1, dims=0)])


def mixed_connectivity(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Fisher z of the mixed correlations, from Fisher z: (subject, edge) twice, (subject, 1) share of the first."""
    correlation = share * first.tanh() + (1 - share) * second.tanh()
    return correlation.clamp(-CLIP, CLIP).atanh()


@method("mixup")
class Mixup(SiteMethod):
    """Mixup between sites: connectivity, phenotypes and labels of pairs of subjects from two sites, mixed by one share.

    Correlations are mixed before Fisher z, as a mixture of correlation matrices is one again; mixed series would not give it.
    Mended: `share_per_subject` draws a share for each pair of subjects, which is less noisy than one for each pair of sites.
    Read so: alpha 0, or a batch of one site, is plain cross-entropy.
    """

    alpha: float = 0.2
    share_per_subject: bool = False

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"alpha": (0, math.inf)}
    reference: ClassVar[str] = "Zhang et al. 2018, mixup, ICLR; between sites: Xu et al. 2020, AAAI, and Yan et al. 2020"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {**ERM.variants, "per-subject": {"share_per_subject": True}}
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {"alpha": (0.1, 0.2, 0.4, 1.0, 3.0, 10.0), **ERM.space}

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy with the mixed label, which is the mixture of both cross-entropies."""
        assert isinstance(network, Network)
        if self.alpha == 0 or (batch.site == batch.site[0]).all():
            return super().loss(network, batch)
        rows = site_pairs(batch.site)  # (2, site, subject)
        first, second = batch.take(rows[0].flatten()), batch.take(rows[1].flatten())
        share = self.shares(*rows.shape[1:]).flatten()[:, None].to(batch.site.device)  # (subject, 1)
        phenotypes = share * first.phenotypes + (1 - share) * second.phenotypes
        logits = network.classify(network.encode(mixed_connectivity(first["fc"], second["fc"], share)), phenotypes)
        label = share * functional.one_hot(first.label, 2) + (1 - share) * functional.one_hot(second.label, 2)
        return {"ce": functional.cross_entropy(logits.float(), label, label_smoothing=self.label_smoothing)}

    def shares(self, n_sites: int, per_site: int) -> Tensor:
        """(site, subject) shares of the first of two subjects, from Beta(alpha, alpha)."""
        drawn = torch.distributions.Beta(self.alpha, self.alpha).sample((n_sites, per_site if self.share_per_subject else 1))
        return drawn.expand(n_sites, per_site)
