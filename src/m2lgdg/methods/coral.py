"""CORAL: representations of all sites are drawn to one mean and one covariance.

One of the generalization methods on `erm.py`'s network, batches and loss; training is `deep.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod
from m2lgdg.sampler import balanced_sites


def coral_penalty(z: Tensor, site: Tensor) -> Tensor:
    """Mean over pairs of sites of the mean squared differences of their means and of their covariances; 0 without a pair.

    The mean over pairs of a squared difference is twice the variance over sites, so no pair is ever formed.
    """
    with torch.autocast(z.device.type, enabled=False):
        z = z.float()  # (subject, dimension)
        member = (site == torch.unique(site)[:, None]).float()  # (site, subject)
        count = member.sum(dim=1)[:, None]
        mean = member @ z / count  # (site, dimension)
        centred = z - member.T @ mean
        product = (member[:, :, None] * centred).mT @ centred  # (site, dimension, dimension)
        covariance = product / (count - 1).clamp(min=1)[:, :, None]
    return 2 * (_variance(mean).mean() + _variance(covariance).mean())


def _variance(moment: Tensor) -> Tensor:
    """Over the first dimension; unlike torch's own, it is 0 for one site or none."""
    return (moment - moment.mean(dim=0)).square().sum(dim=0) / max(len(moment) - 1, 1)


@method("coral")
class CORAL(SiteMethod):
    """Deep CORAL between sites: cross-entropy plus the differences of means and covariances of the representation.

    Mended: a source-training site with fewer than `least_per_class` subjects of a class stays out of the penalty, not of the
    cross-entropy; its batches repeat subjects or have one class, and aligning it would align the classes away.
    Read so: the representation is what the classifier sees of the scan, after dropout; phenotypes are not aligned.
    Eight subjects give a covariance of rank 7 at most: variant `narrow` has a representation of 32 dimensions.
    """

    penalty_weight: float = 1.0
    least_per_class: int = 4

    reference: ClassVar[str] = "Sun and Saenko 2016, Deep CORAL: correlation alignment for deep domain adaptation"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {**ERM.variants, "narrow": {"widths": (256, 32)}}
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {"penalty_weight": (0.1, 0.3, 1.0, 3.0, 10.0), **ERM.space}

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Those of all methods; the only place that sees how many subjects a site has."""
        self._comparable = balanced_sites(site, label, self.least_per_class)
        return super().batches(site, label, order)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """An alignment is between two sites that are large enough."""
        return super().lacks_sites(site, label) or len(balanced_sites(site, label, self.least_per_class)) < 2

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of everybody, alignment of the sites that are large enough."""
        assert isinstance(network, Network)
        found = network.parts(batch)
        rows = torch.isin(batch.site, self._comparable.to(batch.site.device))
        penalty = coral_penalty(found["fused"][rows], batch.site[rows])
        return {"ce": self.cross_entropy(found["logits"], batch), "alignment": self.penalty_weight * penalty}
