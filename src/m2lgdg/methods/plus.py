"""M²LG-DG plus: the network of `m2lgdg.py` trained to correct the logit of a linear model of the connectome.

The paper's encoders average over ROIs and so discard the connectome, which carries most of the diagnostic information. Here
`connectome-adaptive`, the head, reads it in closed form, and the network adds what series and phenotypes contribute beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.deep import Batch, Shape, pieces
from m2lgdg.fast import fast_form
from m2lgdg.method import method
from m2lgdg.methods.amplitude import ARRAYS, UsesAmplitude
from m2lgdg.methods.linear import VIEWS, ConnectomeAdaptive
from m2lgdg.methods.m2lgdg import M2LGDG, Network
from m2lgdg.methods.m2lgdg_connectome import network_weight
from m2lgdg.preprocess import PhenotypeScaler

BLOCKS = tuple(ConnectomeAdaptive.blocks)


class PlusNetwork(Network):
    """The head's logit plus a fraction (`share`) of the logits of M²LG-DG."""

    def __init__(self, shape: Shape, config: M2LGDGPlus) -> None:
        super().__init__(shape, config)
        for name in (*BLOCKS, "phenotypes", "intercept"):
            self.register_buffer(f"head_{name}", torch.from_numpy(np.array(shape.fitted[f"head.{name}"], dtype=np.float32)))
        self.share: Tensor
        self.register_buffer("share", torch.ones(()))

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """The parts of M²LG-DG, its own logits as `residual`, and the combined logits."""
        parts = super().parts(batch)
        half = self.head(batch) / 2
        head = torch.stack([-half, half], dim=1)  # (subject, 2)
        return parts | {"residual": parts["logits"], "logits": self.share * parts["logits"] + head}

    def head(self, batch: Batch) -> Tensor:
        """(subject,) logit of the head; in training, of a head fitted without the subject's site."""
        if "held_out" in batch.features:
            return batch["held_out"]
        with torch.autocast(batch.label.device.type, enabled=False):
            total: Tensor = self.get_buffer("head_intercept")
            for name in BLOCKS:
                total = total + batch[name] @ self.get_buffer(f"head_{name}")
            total = total + batch.phenotypes @ self.get_buffer("head_phenotypes")
        return total


@method("m2lgdg-plus")
class M2LGDGPlus(UsesAmplitude, M2LGDG):
    """M²LG-DG as an additive correction to the logit of connectome-adaptive, weighted 0 to 1 on held-out source sites."""

    validation_by: Literal["subject", "site"] = "site"

    reference: ClassVar[str] = "beyond the paper: docs/beyond.md"

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Fit the head, then train the network on top of head logits for source sites held out from the head."""
        self._head = head = ConnectomeAdaptive(phenotypes=self.phenotypes).fit(source)
        slope, offset = head.state_["calibration"]
        self._unseen = source, torch.from_numpy((slope * head.held_out_ + offset).astype(np.float32))
        try:
            super().learn(source, seed=seed, device=device, progress=progress)
        finally:
            del self._head, self._unseen

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        """The series and the features of the head."""
        blocks = {
            name: fc_features(cohort.series, VIEWS[name]) if name in VIEWS else self.amplitude_block(cohort) for name in BLOCKS
        }
        single = {name: torch.from_numpy(value.astype(np.float32)) for name, value in blocks.items()}
        return super().features(cohort, device) | single

    @property
    def amplitude_state(self) -> Mapping[str, Any]:
        """Fitted arrays of the head's amplitude block."""
        fitted = {name.removeprefix("fitted."): value for name, value in self.state_.items()}
        return fitted | ({"amplitude.weights": fitted["head.amplitude"]} if "head.amplitude" in fitted else {})

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """The group graph and the head's weights; phenotype weights are converted to the units of the network's inputs."""
        fitted, inputs = self._head.state_, tuple(self.facts_["inputs"])
        slope, offset = fitted["calibration"]
        head = {f"head.{name}": slope * fitted[f"{name}.weights"] for name in BLOCKS}
        intercept = slope * sum(value for name, value in fitted.items() if name.endswith(".intercept")) + offset
        head["head.phenotypes"] = np.zeros(len(inputs))
        if self.phenotypes:
            head_scaler = PhenotypeScaler.restore(inputs, fitted, "phenotypes.scaler")
            network_scaler = PhenotypeScaler.fit(train)
            weights = slope * fitted["phenotypes.weights"] / head_scaler.scale
            head["head.phenotypes"] = weights * np.where(np.isfinite(network_scaler.scale), network_scaler.scale, 0.0)
            intercept = intercept + weights @ (network_scaler.mean - head_scaler.mean)
        amplitude = {name: fitted[name] for name in ARRAYS if name in fitted}
        return super().prepare(train, features) | head | amplitude | {"head.intercept": np.array(intercept)}

    def build(self, shape: Shape) -> nn.Module:
        """Network of this configuration."""
        return fast_form(PlusNetwork(shape, self))

    def make_batch(self, cohort: Cohort, scaler: PhenotypeScaler, device: torch.device) -> Batch:
        """A batch; in training, with each subject's logit from a head fitted without the subject's site."""
        batch = super().make_batch(cohort, scaler, device)
        if not hasattr(self, "_unseen") or cohort is not self._unseen[0]:
            return batch
        features = {name: value for name, value in batch.features.items() if name not in BLOCKS}
        return Batch(features | {"held_out": self._unseen[1].to(device)}, batch.phenotypes, batch.label, batch.site)

    def calibrate(self, check: Batch) -> tuple[float, float]:
        """Platt scaling, after choosing the network's weight on source-validation subjects (0 where it only does harm)."""
        network: Any = self.network().to(check.label.device)
        with torch.inference_mode():
            parts = [network.parts(check.take(rows))["residual"] for rows in pieces(len(check), check.label.device)]
            residual = torch.cat(parts)  # (subject, 2)
        correction = (residual[:, 1] - residual[:, 0]).double().cpu().numpy()
        head = check["held_out"].double().cpu().numpy()
        self.facts_["share"] = network_weight(head, correction, check.label.cpu().numpy())
        self.state_["network.share"] = np.array(self.facts_["share"], dtype=np.float32)
        return super().calibrate(check)
