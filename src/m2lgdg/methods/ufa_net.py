"""UFA-Net: a spatio-temporal graph network whose dense features are aligned in their mean across source sites.

One of the paper's baselines. It was published for adaptation to one unlabelled target site; here it aligns source sites only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import correlations, upper_triangle
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.method import method
from m2lgdg.preprocess import scaled_series
from m2lgdg.sampler import site_batches


def shared_graph(series: npt.NDArray[np.float32], density: float = 1.0) -> npt.NDArray[np.float32]:
    """(roi, roi) D^-1/2 A D^-1/2 with A the |correlation| of all subjects' concatenated series, without self-loops.

    With a `density` below 1, A has this fraction of its edges, the strongest, and self-loops of weight 1.
    """
    strength = np.abs(correlations([np.concatenate(series, axis=1).T])[0])
    np.fill_diagonal(strength, 0.0)
    if density < 1:
        edges = np.sort(upper_triangle(strength))[::-1]
        strength[strength < edges[max(1, round(density * len(edges))) - 1]] = 0.0
        np.fill_diagonal(strength, 1.0)
    degree = strength.sum(axis=1)  # (roi,)
    scale = np.where(
        degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1.0)), 0.0
    )  # a ROI that is flat in all subjects has no edge
    return np.asarray(scale[:, None] * strength * scale, dtype=np.float32)


def same_subjects(series: Tensor) -> Tensor:
    """(subject, subject) whether two rows of a batch are the same subject, drawn twice at a small site."""
    seen = series[..., series.shape[2] // 2]  # (subject, roi): one time point is enough to tell scans apart
    return (seen[:, None] == seen[None]).all(dim=2)


def unbiased_discrepancy(features: Tensor, site: Tensor, same: Tensor) -> Tensor:
    """Unbiased linear MMD of two sites' (subject, d) features, averaged over pairs of sites; negative by chance.

    `same` is (subject, subject): rows of one subject count as one together. Sites with one subject only do not count.
    """
    with torch.autocast(features.device.type, enabled=False):  # small differences of large products
        centred = features.float() - features.detach().float().mean(dim=0)  # the discrepancy is the same, its rounding smaller
        product = centred @ centred.T  # (subject, subject)
        member = functional.one_hot(torch.unique(site, return_inverse=True)[1]) / same.sum(dim=1, keepdim=True)
        count = member.sum(dim=0).round()  # (site,) different subjects
        member, count = member[:, count > 1], count[count > 1]
        sites = len(count)
        if sites < 2:
            return features.float().sum() * 0.0
        within = (((product * ~same) @ member) * member).sum(dim=0) / (count * (count - 1))  # (site,)
        across = (member / count).T @ product @ (member / count)  # (site, site)
        between = (across.sum() - across.diagonal().sum()) / (sites * (sites - 1))
    return 2 * (within.mean() - between)


def site_discrepancy(features: Tensor, site: Tensor) -> Tensor:
    """Linear MMD: squared distance between the means of two sites' (subject, d) features, averaged over pairs of sites."""
    _, position = torch.unique(site, return_inverse=True)
    member = functional.one_hot(position).float()  # (subject, site)
    if member.shape[1] < 2:
        return features.float().sum() * 0.0
    with torch.autocast(features.device.type, enabled=False):  # small differences of large means
        means = (member / member.sum(dim=0)).T @ features.float()  # (site, d)
    return 2 * means.var(dim=0).sum()  # equals the average over pairs


class Block(nn.Module):
    """Space before time: 1x1 convolution, product with the masked graph, then a convolution along each ROI's series."""

    def __init__(self, width: int, channels: int, n_rois: int, config: UFANet) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, channels, 1)
        self.mask = nn.Parameter(torch.ones(n_rois, n_rois))
        self.norm_space = nn.BatchNorm2d(channels)
        kernel = config.temporal_kernel
        self.temporal = nn.Conv2d(channels, channels, (kernel, 1), padding=(kernel // 2, 0))  # along time
        self.norm_time = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, graph: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel out, time, roi)."""
        spread = self.mix(features) @ (graph * self.mask)  # (subject, channel, time, roi)
        filtered = self.temporal(functional.relu(self.norm_space(spread)))
        return functional.relu(self.dropout(self.norm_time(filtered)))


class Network(PartsNetwork):
    """Blocks on the shared graph, a mean over ROIs, and linear layers without activations, down to one output."""

    def __init__(self, shape: Shape, config: UFANet) -> None:
        super().__init__()
        self.graph: Tensor
        self.register_buffer("graph", torch.from_numpy(np.array(shape.fitted["graph"])))
        self.series = config.series
        self.norm = nn.BatchNorm1d(shape.n_rois)
        channels = (1, *config.channels)
        self.blocks = nn.ModuleList(Block(before, after, shape.n_rois, config) for before, after in pairwise(channels))
        bins = config.time_bins or shape.length
        averaging = functional.adaptive_avg_pool1d(torch.eye(shape.length), bins) if config.time_bins else None
        self.averaging: Tensor | None  # (time, bin)
        self.register_buffer("averaging", averaging, persistent=False)
        widths = (channels[-1] * bins, *config.widths)
        self.dense = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.inputs = shape.n_inputs
        self.output = nn.Linear(widths[-1] + shape.n_inputs, 1)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits, the output of each dense layer (dense1, dense2, ...), and that of the last as `fused`."""
        features = self.norm(batch[self.series]).transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, self.graph)
        course = features.mean(dim=3)  # (subject, channel, time)
        if self.averaging is not None:
            course = course @ self.averaging  # (subject, channel, bin)
        fused = course.flatten(1)
        dense = {}
        for i, layer in enumerate(self.dense, start=1):
            fused = dense[f"dense{i}"] = layer(fused)
        logit = self.output(with_phenotypes(fused, batch, self.inputs))  # (subject, 1)
        return dense | {"fused": fused, "logits": torch.cat([torch.zeros_like(logit), logit], dim=1)}


@method("ufa-net")
class UFANet(DeepMethod):
    """UFA-Net: spatio-temporal graph network on ROI series with learned edge masks; linear MMD aligns source sites.

    Differs from the publication: the graph is estimated from source-training subjects alone, the target site takes no part in
    the alignment, all sites of a batch pass the network together, so that batch norm does not hide their differences, and
    batches are class-balanced within sites.
    Differs from the release: each scan is divided by its root mean square, since scanners have different units (`scaling`);
    gradients are clipped at 1, without which 9 of 13 trainings on the paper's ABIDE subjects diverged; the MMD is estimated
    without bias, because batches have 32 subjects of a site, not 128 (with `mmd = "biased"` most of it is sampling noise), and
    a negative estimate counts as 0. Variant `two-sites` has two sites of 64.
    Variant `sparse`: the graph has the strongest tenth of its edges and self-loops; the dense one averages all ROIs.
    As published: no activations between the dense layers; one output x, returned as logits [0, x]; the dense layers use every
    time point (`time_bins` averages instead); the alignment is a plain sum over dimensions.
    Differs from the publication: warm-up and cosine replace the halving of the learning rate, and one run with a late start of
    the alignment replaces the two stages. The selected epoch is one with alignment, unless the run is too short to have any.
    """

    channels: tuple[int, ...] = (16, 16, 16, 16)
    temporal_kernel: int = 11
    time_bins: int = 0  # time averages that the dense layers use; 0: every time point, as published
    widths: tuple[int, ...] = (1024, 512, 64)
    dropout: float = 0.5
    sites_per_batch: int = 4
    batch_size: int = 128
    batches_per_epoch: int = 0  # 0: one pass through source
    scaling: Literal["subject", "roi"] = "subject"  # one number for a scan, or one for each of its ROIs
    density: float = 1.0  # fraction of the graph's edges that are kept; below 1 with self-loops
    mmd: Literal["unbiased", "biased"] = "unbiased"
    alignment_weight: float = 1.0
    alignment_start: int = 20  # epochs without alignment
    per_dimension: bool = False  # divide each layer's term by its width
    epochs: int = 120
    patience: int = 100
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    update_rule: Literal["adamw", "adam", "sgd"] = "sgd"
    clip: float = 1.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    bounds = {"alignment_start": (0, math.inf), "density": (1e-6, math.inf)}
    reference = "Fang et al. 2023: UFA-Net, Medical Image Analysis 84:102707"
    variants = {
        "unaligned": {"alignment_weight": 0.0},
        "sparse": {"density": 0.1},
        "two-sites": {"sites_per_batch": 2},
        "phenotypes": {"phenotypes": True},
        "per-dimension": {"per_dimension": True},
        "small": {
            "length": 100,
            "channels": (8, 8),
            "time_bins": 1,
            "widths": (16, 8),
            "dropout": 0.2,
            "batch_size": 32,
            "batches_per_epoch": 8,
            "alignment_start": 5,
            "learning_rate": 0.5,
            "clip": 1.0,  # at this rate
            "epochs": 40,
            "warmup": 4,
            "patience": 15,
        },
    }
    space = {
        "alignment_weight": (0.01, 0.1, 0.5, 1.0, 2.0, 10.0),
        "alignment_start": (0, 10, 20, 40),
        "sites_per_batch": (2, 4, 8),
        "time_bins": (0, 1, 5, 20),
        "dropout": (0.1, 0.3, 0.5, 0.7),
    }

    @property
    def series(self) -> str:
        return "scaled_series" if self.scaling == "subject" else "series"

    @property
    def uses_amplitude(self) -> bool:
        return self.scaling == "subject"

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        if self.scaling == "roi":
            return super().features(cohort, device)
        return {self.series: torch.from_numpy(scaled_series(cohort.series, self.length))}

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        return {"graph": shared_graph(features[self.series].cpu().numpy(), self.density)}

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        return self.updating(network.parameters(), **{"momentum": self.momentum} if self.update_rule == "sgd" else {})

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """`batch_size` subjects from `sites_per_batch` sites (at most all), the same number from each."""
        together = min(self.sites_per_batch, len(torch.unique(site)))
        per_site = max(2, self.batch_size // together)
        count = self.batches_per_epoch or None
        return site_batches(site, label, order, sites_per_batch=together, per_site=per_site, count=count)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return bool(self.alignment_weight) and min(self.sites_per_batch, len(torch.unique(site))) < 2

    def candidate(self, epoch: int) -> bool:
        """Only epochs with alignment, if the run has any."""
        aligned = bool(self.alignment_weight) and self.alignment_start < self.epochs
        return super().candidate(epoch) and (not aligned or epoch >= self.alignment_start)

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy and, from epoch `alignment_start` on, the discrepancy of sites summed over the dense layers."""
        parts = network.parts(batch)
        terms = {"ce": self.cross_entropy(parts["logits"], batch)}
        if self.alignment_weight and self.epoch >= self.alignment_start:
            layers = [parts[f"dense{i}"] for i in range(1, len(self.widths) + 1)]
            gaps = [self.gap(layer, batch) / (layer.shape[1] if self.per_dimension else 1) for layer in layers]
            terms["alignment"] = self.alignment_weight * torch.stack(gaps).sum()
        return terms

    def gap(self, features: Tensor, batch: Batch) -> Tensor:
        if self.mmd == "biased":
            return site_discrepancy(features, batch.site)
        # Not below 0: larger features would make a chance value ever more negative.
        return unbiased_discrepancy(features, batch.site, same_subjects(batch[self.series])).clamp(min=0.0)
