"""What MM-GTUNets fits on source-training subjects before it trains: chosen features, phenotype codes, VAE, the graph's nodes.

`Source` turns any subjects into nodes by it; the graph, the network and the method itself are in `mm_gtunets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.preprocess import CATEGORICAL, PhenotypeScaler

Arrays = Mapping[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]
ENCODER = ("hidden.weight", "hidden.bias", "mean.weight", "mean.bias")  # what of the VAE is kept


def recursive_elimination(
    features: Floats, label: npt.NDArray[np.int8], wanted: int, step: int, penalty: float
) -> npt.NDArray[np.int64]:
    """Positions of the `wanted` features left when those of the smallest ridge weights go, `step` at a time.

    A ridge with fewer subjects than features is solved among subjects, where dropping features only takes from one matrix.
    """
    from scipy.linalg import solve

    centred, aim = features - features.mean(axis=0), 2.0 * label - 1  # centring one side is enough
    kernel = centred @ centred.T  # (subject, subject)
    left = np.ones(features.shape[1], dtype=bool)
    while left.sum() > wanted:
        weight = solve(kernel + penalty * np.eye(len(kernel)), aim, assume_a="pos") @ centred  # (feature,)
        size = np.where(left, weight**2, np.inf)
        gone = np.argsort(size, kind="stable")[: min(step, int(left.sum()) - wanted)]
        kernel -= centred[:, gone] @ centred[:, gone].T
        left[gone] = False
    return np.flatnonzero(left)


class PhenotypeVAE(nn.Module):
    """Variational autoencoder that brings phenotype codes in [0, 1] to the width of the imaging features."""

    def __init__(self, codes: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.hidden, self.mean, self.log_variance = (
            nn.Linear(codes, hidden),
            nn.Linear(hidden, latent),
            nn.Linear(hidden, latent),
        )
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, codes), nn.Sigmoid())

    def loss(self, codes: Tensor, noise: Tensor, kl_weight: float) -> Tensor:
        """Summed squared error of the decoded sample, and the divergence from the standard normal."""
        hidden = functional.relu(self.hidden(codes))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)  # (subject, latent)
        decoded = self.decoder(mean + noise * torch.exp(log_variance / 2))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        total: Tensor = (decoded - codes).square().sum() + kl_weight * divergence
        return total

    def pretrain(self, codes: Tensor, epochs: int, patience: int, rate: float, weight_decay: float, kl_weight: float) -> None:
        """Full-batch Adam until the loss has not fallen for some epochs."""
        optimizer = torch.optim.Adam(self.parameters(), lr=rate, weight_decay=weight_decay)
        best, best_epoch = math.inf, 0
        for epoch in range(epochs):
            optimizer.zero_grad(set_to_none=True)
            noise = torch.randn(len(codes), self.mean.out_features, device=codes.device)
            loss: Any = self.loss(codes, noise, kl_weight)
            loss.backward()
            optimizer.step()
            if loss.item() < best:
                best, best_epoch = loss.item(), epoch
            elif epoch - best_epoch >= patience:
                break


class Nodes(NamedTuple):
    """Some subjects as the graph sees them."""

    imaging: Tensor  # (node, feature) chosen edges of the connectome, in source standard deviations
    latent: Tensor  # (node, feature) mean of the phenotype VAE
    phenotypes: Tensor  # (node, phenotype) those that vary in source, in source standard deviations


class Source(nn.Module):
    """What source-training subjects have fitted, themselves as nodes included; nothing in it learns any more."""

    chosen: Tensor  # (feature,) positions among the edges of the connectome
    centre: Tensor
    spread: Tensor
    varied: Tensor
    tolerance: Tensor
    code_column: Tensor
    code_low: Tensor
    code_span: Tensor
    sigma: Tensor
    fc: Tensor  # (source, feature)
    phenotypes: Tensor  # (source, input)
    label: Tensor

    def __init__(self, fitted: Arrays) -> None:
        super().__init__()
        for name, value in fitted.items():  # saved with the model as what was fitted, so not again as weights
            self.register_buffer(name, torch.from_numpy(np.array(value, order="C")), persistent=False)

    def forward(self, fc: Tensor, phenotypes: Tensor) -> Nodes:
        """(subject, feature) chosen edges and (subject, input) scaled phenotypes -> nodes."""
        used = self.used(phenotypes)
        vae = [self.get_buffer(f"vae_{name}".replace(".", "_")) for name in ENCODER]
        with torch.autocast(fc.device.type, enabled=False):
            hidden = functional.relu(functional.linear(self.codes(used), vae[0], vae[1]))
            return Nodes((fc - self.centre) / self.spread, functional.linear(hidden, vae[2], vae[3]), used)

    def used(self, phenotypes: Tensor) -> Tensor:
        """(subject, phenotype) those that vary in source; without any, one in which all subjects are alike."""
        return phenotypes[:, self.varied] if len(self.varied) else phenotypes.new_zeros(len(phenotypes), 1)

    def codes(self, used: Tensor) -> Tensor:
        """(subject, code) in [0, 1]: a continuous one between the source's extremes, a column for each category of others."""
        values = used[:, self.code_column]
        same = (values - self.code_low).abs() < self.tolerance[self.code_column]
        share = (values - self.code_low) / torch.where(self.code_span > 0, self.code_span, 1.0)
        return torch.where(self.code_span > 0, share.clamp(0.0, 1.0), same.float())

    def agree(self, first: Nodes, second: Nodes) -> Tensor:
        """(phenotype, first, second) whether two nodes agree in a phenotype."""
        apart = first.phenotypes.T[:, :, None] - second.phenotypes.T[:, None, :]
        return apart.abs() < self.tolerance[:, None, None]

    def similarity(self, first: Nodes, second: Nodes) -> Tensor:
        """(first, second) Gaussian kernel with the mean distance among source-training subjects as its width."""
        return torch.exp(-squared_distances(first, second) / (2 * self.sigma.square()))


def squared_distances(first: Nodes, second: Nodes) -> Tensor:
    """(first, second) squared distances of the nodes' features of both modalities."""
    a, b = torch.cat([first.imaging, first.latent], dim=1), torch.cat([second.imaging, second.latent], dim=1)
    return (a.square().sum(1)[:, None] + b.square().sum(1)[None, :] - 2 * a @ b.T).clamp(min=0.0)


def phenotype_rules(
    scaler: PhenotypeScaler, phenotypes: npt.NDArray[np.float32], years: float, sd: float
) -> dict[str, npt.NDArray[Any]]:
    """How far apart agreeing phenotypes may be, and the codes the VAE sees; all in source standard deviations.

    `phenotypes` are the scaled (source, input). Ages agree within `years`, other continuous ones within `sd`.
    """
    varied = np.flatnonzero(np.isfinite(scaler.scale))
    tolerance: list[float] = []
    codes: list[tuple[int, float, float]] = []  # phenotype, lowest or own value, range or 0 for a category
    for position, column in enumerate(varied):
        name, values = scaler.columns[column], phenotypes[:, column]
        if name in CATEGORICAL:  # whole numbers
            tolerance.append(0.5 / scaler.scale[column])
            codes += [(position, float(kind), 0.0) for kind in np.unique(values)]
        else:
            tolerance.append(years / scaler.scale[column] if name == "age" else sd)
            codes.append((position, float(values.min()), float(np.ptp(values))))
    if not codes:
        tolerance, codes = [1.0], [(0, 0.0, 1.0)]
    table = np.array(codes)
    return {
        "varied": varied,
        # A little less, so that exactly two years apart is apart whatever the rounding.
        "tolerance": np.array(tolerance, dtype=np.float32) * np.float32(1 - 1e-4),
        "code_column": table[:, 0].astype(np.int64),
        "code_low": table[:, 1].astype(np.float32),
        "code_span": table[:, 2].astype(np.float32),
    }
