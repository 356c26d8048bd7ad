"""Mixup between sites: trains on convex combinations of two subjects from different source sites.

One of the generalization methods: network, batches and cross-entropy are in `erm.py`, the training loop in `deep.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m2lgdg.connectivity import CLIP
from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, SiteMethod


def site_pairs(site: Tensor) -> Tensor:
    """(2, site, subject) positions of pairs: sites in random order, each paired with the next and the last with the first.

    Needs the same number of rows from each site. Subjects are shuffled within a site: rows come sorted by class, so without it
    no subject would be mixed with the other class.
    """
    shuffled = torch.randperm(len(site)).to(site.device)
    by_site = shuffled[torch.argsort(site[shuffled], stable=True)]
    n_sites = len(torch.unique(site))
    first = by_site.view(n_sites, -1)[torch.randperm(n_sites).to(site.device)]
    return torch.stack([first, first.roll(-1, dims=0)])


def mixed_connectivity(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """(subject, edge) Fisher z of mixed correlations, from Fisher z of both and the (subject, 1) weight of the first."""
    correlation = weight * first.tanh() + (1 - weight) * second.tanh()
    return correlation.clamp(-CLIP, CLIP).atanh()


@method("mixup")
class Mixup(SiteMethod):
    """Mixup: our FC network; trains on convex combinations of subjects of two source sites, labels included.

    Correlations are mixed before Fisher z, because a mixture of correlation matrices is a correlation matrix; mixed series
    would not give it. Labels, and phenotypes if used, are mixed with the same weight as FC.
    Differs from the publication, if `share_per_subject`: mixing weights are drawn for each pair of subjects, which is less
    noisy than one for each pair of sites.
    Interpretation: with alpha 0, or one site in the batch, the loss is plain cross-entropy.
    """

    alpha: float = 0.2
    share_per_subject: bool = False

    bounds = {"alpha": (0, math.inf)}
    reference = "Zhang et al. 2018, mixup, ICLR; between sites: Xu et al. 2020, AAAI, and Yan et al. 2020"
    variants = {**ERM.variants, "per-subject": {"share_per_subject": True}}
    space = {"alpha": (0.1, 0.2, 0.4, 1.0, 3.0, 10.0), **ERM.space}

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy with mixed labels, which equals the mixture of both cross-entropies."""
        if self.alpha == 0 or (batch.site == batch.site[0]).all():
            return super().loss(network, batch)
        rows = site_pairs(batch.site)  # (2, site, subject)
        first, second = batch.take(rows[0].flatten()), batch.take(rows[1].flatten())
        weight = self.mixing_weights(*rows.shape[1:]).flatten()[:, None].to(batch.site.device)  # (subject, 1)
        mixed = replace(first, phenotypes=weight * first.phenotypes + (1 - weight) * second.phenotypes)
        logits = network.classify(network.encode(mixed_connectivity(first["fc"], second["fc"], weight)), mixed)
        label = weight * functional.one_hot(first.label, 2) + (1 - weight) * functional.one_hot(second.label, 2)
        return {"ce": functional.cross_entropy(logits.float(), label, label_smoothing=self.label_smoothing)}

    def mixing_weights(self, n_sites: int, per_site: int) -> Tensor:
        """(site, subject) mixing weights of the first subject of each pair, from Beta(alpha, alpha)."""
        drawn = torch.distributions.Beta(self.alpha, self.alpha).sample((n_sites, per_site if self.share_per_subject else 1))
        return drawn.expand(n_sites, per_site)
