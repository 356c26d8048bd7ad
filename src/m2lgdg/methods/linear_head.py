"""A network and `connectome-adaptive` as one network, which decides by the mean of their calibrated logits.

Variant `plus` of `m2lgdg_connectome.py`: what `average.py` does with two methods, here explained and exported as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, log_features
from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.methods.amplitude import ARRAYS, UsesAmplitude
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.methods.linear import LOG_EUCLIDEAN, VIEWS, blocks_of
from m2lgdg.preprocess import PhenotypeScaler

Arrays = dict[str, npt.NDArray[Any]]
BLOCKS = ("fc", *ConnectomeAdaptive.blocks)  # the first on connectomes, the others on series


class LinearHead(nn.Module):
    """Mixed into a network: the logit of the linear model is added to `network_slope` times that of the network."""

    def __init__(self, shape: Shape, config: Any) -> None:
        super().__init__(shape, config)
        tables = sorted(name for name in shape.fitted if name.startswith("head.table."))
        self.tables_of_head = tuple(name.removeprefix("head.") for name in tables)
        for name, value in shape.fitted.items():
            if name.startswith("head."):  # already saved with the fitted arrays
                weights = torch.from_numpy(np.array(value, dtype=np.float32))
                buffer = f"head_table_{tables.index(name)}" if name in tables else name.replace(".", "_")
                self.register_buffer(buffer, weights, persistent=False)
        self.register_buffer("network_slope", torch.ones(()))
        self.blocks = tuple(name for name in BLOCKS if f"head.{name}" in shape.fitted)
        self.trained = config._linear is None  # the network is trained, and calibrated, alone

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = super().parts(batch)  # type: ignore[misc]
        if self.trained:
            half = self.head(batch) / 2
            parts["logits"] = self.get_buffer("network_slope") * parts["logits"] + torch.stack([-half, half], dim=1)
        return parts

    def head(self, batch: Batch) -> Tensor:
        """(subject,) logit of the linear model."""
        total: Tensor = self.get_buffer("head_intercept")
        for name in self.blocks:
            total = total + batch[name] @ self.get_buffer(f"head_{name}")
        for i, name in enumerate(self.tables_of_head):
            total = total + batch[name] @ self.get_buffer(f"head_table_{i}")
        return total + batch.phenotypes @ self.get_buffer("head_phenotypes")

    def baselines(self) -> dict[str, Tensor]:
        """Means of source, from which integrated gradients start."""
        means = {name: self.get_buffer(f"head_mean_{name}") for name in self.blocks}
        return means | super().baselines()  # type: ignore[misc]


class WithLinearHead(UsesAmplitude, DeepMethod):
    """Mixed into the method of the network: with `plus`, fits the linear model before the training and joins both after it."""

    plus, tables = False, cast(Any, "none")  # fields of the method
    _linear = cast(ConnectomeAdaptive | None, None)  # while the network is trained; a cast, as it is no field
    former_arrays = {"network.share": "network.network_slope"}

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        fields: dict[str, Any] = {"phenotypes": self.phenotypes, "tables": self.tables}
        self._linear = ConnectomeAdaptive(**fields).fit(source) if self.plus else None
        super().learn(source, seed=seed, device=device, progress=progress)
        if self._linear is not None:
            slope, offset = self.state_["calibration"]
            self.state_["network.network_slope"] = np.array(slope, dtype=np.float32)
            self.state_["calibration"] = np.array([0.5, 0.5 * offset])
        self._linear = None

    def linear_features(self, cohort: Cohort) -> Arrays:
        """Features of the linear model, (subject, feature) each; in models of 0.1.0 it has fewer blocks."""
        blocks = [name for name in BLOCKS if f"fitted.head.{name}" in self.state_]
        features: Arrays = {name: fc_features(cohort.scans, VIEWS[name]) for name in blocks if name in VIEWS}
        features |= {LOG_EUCLIDEAN: log_features(cohort.scans)} if LOG_EUCLIDEAN in blocks else {}
        return features | ({"amplitude": self.amplitude_block(cohort).astype(np.float32)} if "amplitude" in blocks else {})

    @property
    def amplitude_state(self) -> Mapping[str, Any]:
        fitted = {name.removeprefix("fitted."): value for name, value in self.state_.items()}
        return fitted | ({"amplitude.weights": fitted["head.amplitude"]} if "head.amplitude" in fitted else {})

    def linear_weights(self, train: Cohort) -> Arrays:
        """Weights of the linear model's logit; those of phenotypes in the units of the network's inputs."""
        assert self._linear is not None
        fitted, inputs = self._linear.state_, tuple(self.facts_["inputs"])
        slope, offset = fitted["calibration"]
        blocks = blocks_of(ConnectomeAdaptive.blocks, self.trained_on)
        weights = {f"head.{name}": slope * fitted[f"{name}.weights"] for name in blocks}
        weights |= {f"head.mean.{name}": fitted[f"{name}.mean"] for name in blocks}
        intercept = slope * sum(fitted[f"{name}.intercept"] for name in (*blocks, *["phenotypes"] * self.phenotypes)) + offset
        for table in self._linear.table_blocks():  # features of the network are in units of the sd, and 0 at the mean
            weights[f"head.table.{table.name}"] = slope * table["weights"] * self.state_[f"table.{table.name}.scale"]
            intercept = intercept + slope * table["absent"]
        weights["head.phenotypes"] = np.zeros(len(inputs))
        if self.phenotypes:
            head_scaler = PhenotypeScaler.restore(inputs, fitted, "phenotypes.scaler")
            network_scaler = PhenotypeScaler.fit(train)
            in_head_units = slope * fitted["phenotypes.weights"] / head_scaler.scale
            finite = np.where(np.isfinite(network_scaler.scale), network_scaler.scale, 0.0)
            weights["head.phenotypes"] = in_head_units * finite
            intercept = intercept + in_head_units @ (network_scaler.mean - head_scaler.mean)
        amplitude = {name: fitted[name] for name in ARRAYS if name in fitted}
        return weights | amplitude | {"head.intercept": np.array(intercept)}
