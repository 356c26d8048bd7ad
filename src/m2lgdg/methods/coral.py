"""CORAL: aligns the mean and covariance of the representation across source sites.

One of the generalization methods: network, batches and cross-entropy are in `erm.py`, the training loop in `deep.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m2lgdg.deep import Batch
from m2lgdg.method import method
from m2lgdg.methods.erm import ERM, Network, SiteMethod
from m2lgdg.sampler import balanced_sites


def coral_penalty(z: Tensor, site: Tensor) -> Tensor:
    """Mean squared difference of site means plus that of site covariances, over pairs of sites; 0 without a pair.

    Computed without forming pairs: the mean squared difference over pairs is twice the variance over sites.
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
    """Variance over the first dimension; unlike torch.var it is 0 for one site or none."""
    return (moment - moment.mean(dim=0)).square().sum(dim=0) / max(len(moment) - 1, 1)


@method("coral")
class CORAL(SiteMethod):
    """Deep CORAL: our FC network; penalises differences in feature means and covariances between source sites.

    Differs from the publication: source-training sites with fewer than `least_per_class` subjects of a class are left out of
    the penalty, though not of the cross-entropy. Their batches repeat subjects or hold one class, and aligning them would align
    the classes away.
    Interpretation: the representation is the classifier's input from the scan, after dropout; phenotypes are not aligned.
    Eight subjects give a covariance of rank 7 at most; variant `narrow` has a representation of 32 dimensions.
    """

    penalty_weight: float = 1.0
    least_per_class: int = 4

    reference = "Sun and Saenko 2016, Deep CORAL: correlation alignment for deep domain adaptation"
    variants = {**ERM.variants, "narrow": {"widths": (256, 32)}}
    space = {"penalty_weight": (0.1, 0.3, 1.0, 3.0, 10.0), **ERM.space}

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """ERM's batches; also records which sites are large enough for the penalty, since site sizes are known only here."""
        self._comparable = balanced_sites(site, label, self.least_per_class)
        return super().batches(site, label, order)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Fewer than two sites that are large enough to align."""
        return super().lacks_sites(site, label) or len(balanced_sites(site, label, self.least_per_class)) < 2

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of all subjects, and the alignment of the sites that are large enough."""
        assert isinstance(network, Network)
        parts = network.parts(batch)
        rows = torch.isin(batch.site, self._comparable.to(batch.site.device))
        penalty = coral_penalty(parts["fused"][rows], batch.site[rows])
        return {"ce": self.cross_entropy(parts["logits"], batch), "alignment": self.penalty_weight * penalty}
