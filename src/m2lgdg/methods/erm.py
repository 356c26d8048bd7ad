"""ERM, and what the generalization methods share with it: a network on FC, a sampler of sites and a loss.

`cdann`, `coral`, `group_dro`, `iib`, `irm`, `mixup` and `mldg` build on `SiteMethod` and `Network`, so that they differ in the
algorithm alone. The training loop is in `deep.py`, the sampler in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, source_scaling
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.losses import smoothed_cross_entropy
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.sampler import site_batches


class Network(PartsNetwork):
    """Multi-layer perceptron on standardised FC; variant `phenotypes` concatenates them before the classifier."""

    def __init__(self, shape: Shape, config: SiteMethod) -> None:
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.from_numpy(np.array(shape.fitted["mean"])))
        self.register_buffer("scale", torch.from_numpy(np.array(shape.fitted["scale"])))
        layers: list[nn.Module] = []
        for before, after in pairwise((len(self.mean), *config.widths)):
            layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU(), nn.Dropout(config.dropout)]
        self.encoder = nn.Sequential(*layers)
        self.inputs = shape.n_inputs
        self.classifier = nn.Linear(config.widths[-1] + shape.n_inputs, 2)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits and the representation of the scan (`fused`)."""
        fused = self.encode(batch["fc"])
        return {"fused": fused, "logits": self.classify(fused, batch)}

    def encode(self, fc: Tensor) -> Tensor:
        """(subject, edge) Fisher z -> (subject, width)."""
        encoded: Tensor = self.encoder((fc - self.mean) / self.scale)
        return encoded

    def classify(self, fused: Tensor, batch: Batch) -> Tensor:
        """(subject, width) and the batch's phenotypes, if used -> (subject, 2) logits."""
        logits: Tensor = self.classifier(with_phenotypes(fused, batch, self.inputs))
        return logits


@dataclass
class SiteMethod(DeepMethod):
    """Base class of methods whose batches hold the same number of subjects from each of several sites; not a method itself."""

    widths: tuple[int, ...] = (256, 128)
    sites_per_batch: int = 8
    per_site: int = 8
    site_power: float = 0.5  # probability of drawing a site is proportional to its size to this power
    epochs: int = 200
    patience: int = 40
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    dropout: float = 0.5
    update_rule: Literal["adamw", "adam", "sgd"] = "adamw"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = True
    phenotypes: bool = False

    network_class: ClassVar[Any] = Network
    takes = ANY_SCAN
    unused = ("length", "batch_size")

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        """(subject, edge) Fisher-z FC above the diagonal."""
        return {"fc": torch.from_numpy(fc_features(cohort.scans).astype(np.float32))}

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """Mean and sd of each edge over source-training subjects."""
        return {**source_scaling(features["fc"].cpu().numpy())}

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Batches of `sites_per_batch` sites, classes balanced within each."""
        per = {"sites_per_batch": self.sites_per_batch, "per_site": self.per_site}
        return site_batches(site, label, order, power=self.site_power, **per)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Fewer than two sites in a batch: the method reduces to ERM."""
        return min(self.sites_per_batch, len(torch.unique(site))) < 2

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Smoothed cross-entropy without class weights, since batches are balanced."""
        return smoothed_cross_entropy(logits, batch.label, None, self.label_smoothing)


@method("erm")
class ERM(SiteMethod):
    """ERM: our FC network; mean cross-entropy over source sites, pooled with balanced classes.

    The reference for the generalization methods, with the same network, batches and training.
    """

    reference = "Vapnik 1998; as a peer: Gulrajani and Lopez-Paz 2021, In search of lost domain generalization"
    variants = {
        "phenotypes": {"phenotypes": True},
        "small": {"widths": (32, 16), "learning_rate": 3e-3, "epochs": 40, "warmup": 4, "patience": 15},
    }
    space = {
        "site_power": (0.0, 0.5, 1.0),
        "learning_rate": (1e-4, 3e-4, 1e-3, 3e-3),
        "weight_decay": (1e-4, 1e-3, 1e-2, 1e-1),
        "dropout": (0.0, 0.1, 0.5),
    }

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Never: ERM does not compare sites."""
        return False
