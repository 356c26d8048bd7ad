"""MetaExplainer: learned connectivity whose class contrast is regularised to be sparse and stable across sites.

The network learns a graph from the series and passes FC along it. Each update of the loop in `deep.py` is a dual one: a trial
step at some sites, then the gradient at other sites after that step, applied to the weights before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fisher_matrices, source_scaling
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.losses import smoothed_cross_entropy
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.sampler import balanced_sites, site_batches
from m2lgdg.scans import SERIES

SLOPE = 0.2  # of the leaky ReLU
OF_ROWS = "Trained on connectomes: the graph is learned from rows of FC instead of time series."


class Encoder(nn.Module):
    """Convolutions along time, shared by all ROIs, and a softmax over a few features of each ROI."""

    def __init__(self, length: int, config: MetaExplainer) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 1
        for channels, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
            size = min(kernel, length)  # at most the whole of a short series
            layers += [nn.Conv2d(width, channels, (size, 1), (stride, 1)), nn.BatchNorm2d(channels), nn.ReLU()]
            width, length = channels, (length - size) // stride + 1
        pool = min(config.pool, length)
        self.convolutions = nn.Sequential(*layers, nn.MaxPool2d((pool, 1)))
        self.output = dense(width * (length // pool), config.hidden, config.embedding)[:-1]

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, roi, feature)."""
        scaled = functional.instance_norm(series).transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        convolved = self.convolutions(scaled).flatten(1, 2).transpose(1, 2)  # (subject, roi, channel * time)
        return torch.softmax(self.output(convolved), dim=2)


class RowEncoder(nn.Module):
    """For connectomes, which have no time: the dense layers of `Encoder` on rows of standardised FC, without convolutions."""

    def __init__(self, n_rois: int, config: MetaExplainer) -> None:
        super().__init__()
        self.output = dense(n_rois, config.hidden, config.embedding)[:-1]

    def forward(self, rows: Tensor) -> Tensor:
        """(subject, roi, roi) -> (subject, roi, feature)."""
        return torch.softmax(self.output(rows), dim=2)


class InnerProducts(nn.Module):
    """The inner products of the ROIs' features are the edges."""

    def forward(self, nodes: Tensor) -> Tensor:
        """(subject, roi, feature) -> (subject, roi, roi)."""
        with torch.autocast(nodes.device.type, enabled=False):  # contrasts are small differences of these products
            return nodes.float() @ nodes.float().mT


class LearnedConnectivity(InnerProducts):
    """Multi-head attention over ROIs; the inner products of its outputs are the edges."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, nodes: Tensor) -> Tensor:
        """(subject, roi, feature) -> (subject, roi, roi)."""
        width = nodes.shape[2]
        parts = [part(nodes).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        query, key, value = parts  # (subject, head, roi, feature / heads)
        attention = torch.softmax(query @ key.mT / math.sqrt(width), dim=3)  # (subject, head, roi, other roi)
        with torch.autocast(nodes.device.type, enabled=False):
            joined = (attention.float() @ value.float()).transpose(1, 2).flatten(2)  # (subject, roi, feature)
        return super().forward(joined)


class Network(PartsNetwork):
    """Encoder, learned connectivity, message passing of Fisher-z FC along it, and a classifier."""

    def __init__(self, shape: Shape, config: MetaExplainer) -> None:
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        for name in ("mean", "scale"):  # already saved with the fitted arrays
            self.register_buffer(name, torch.from_numpy(np.array(shape.fitted[name])), persistent=False)
        n, self.n_sites, self.config = shape.n_rois, shape.n_sites, config
        self.of_series = config.trained_on == SERIES
        self.encoder = Encoder(shape.length, config) if self.of_series else RowEncoder(n, config)
        attention = LearnedConnectivity(config.embedding, config.heads) if config.attention else None
        self.connectivity: InnerProducts = attention or InnerProducts()
        self.layers = nn.ModuleList([dense(n, n, n), dense(n, n), dense(n, *config.graph_widths)])
        self.norms = nn.ModuleList(nn.BatchNorm1d(n) for _ in self.layers)  # ROIs are channels
        wide, narrow = config.classifier_widths
        first, second = dense(n * config.graph_widths[-1], wide), dense(wide, narrow)
        self.fuse = nn.Sequential(nn.Dropout(config.dropout), first, nn.Dropout(config.dropout), second)
        self.inputs = shape.n_inputs
        self.classifier = nn.Linear(narrow + shape.n_inputs, 2)
        self.history: Tensor  # (site, class, roi, roi); with `known` (site,) used in training only, created in `optimizer`
        self.known: Tensor
        self.trial: torch.optim.Optimizer

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        seen = batch.series if self.of_series else (batch["fc"] - self.mean) / self.scale
        edges = self.connectivity(self.encoder(seen))  # (subject, roi, roi)
        return {"connectivity": edges} | self.decide(edges, batch["fc"], batch)

    def decide(self, edges: Tensor, fc: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Logits and representation, from learned connectivity and Fisher z, both (subject, roi, roi), and any phenotypes."""
        nodes = (fc - self.mean) / self.scale  # (subject, roi, feature)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            nodes = norm(layer(passed(edges, nodes, self.config.normalisation, self.config.self_loops)))
        fused = self.fuse(nodes.flatten(1))
        return {"fused": fused, "logits": self.classifier(with_phenotypes(fused, batch, self.inputs))}


def dense(*widths: int) -> nn.Sequential:
    """Linear layers, each with a leaky ReLU."""
    layers = [(nn.Linear(a, b), nn.LeakyReLU(SLOPE)) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for pair in layers for part in pair))


def passed(edges: Tensor, nodes: Tensor, normalisation: str, self_loops: bool) -> Tensor:
    """Message passing, (subject, roi, other) and (subject, other, feature) -> (subject, roi, feature)."""
    if normalisation == "release":
        return edges.sum(dim=2, keepdim=True) * nodes
    degree = edges.abs().sum(dim=2, keepdim=True).clamp(min=1e-6)  # (subject, roi, 1); edges may be negative
    if normalisation == "row":
        edges = edges / degree
    elif normalisation == "size":
        edges = edges / len(edges[0])
    elif normalisation == "symmetric":
        edges = edges / (degree * degree.mT).sqrt()
    return edges @ nodes + nodes if self_loops else edges @ nodes


def class_means(edges: Tensor, label: Tensor, per_site: int) -> tuple[Tensor, Tensor]:
    """(site, class, roi, roi) mean connectivity and (site, class) counts, of subjects ordered by site; 0 for empty classes."""
    member = functional.one_hot(label, 2).to(edges.dtype).view(-1, per_site, 2)  # (site, subject, class)
    count = member.sum(dim=1)
    with torch.autocast(edges.device.type, enabled=False):
        sums = torch.einsum("spij,spc->scij", edges.view(-1, per_site, *edges.shape[1:]), member)
    return sums / count.clamp(min=1)[:, :, None, None], count


def contrast_maps(means: Tensor) -> Tensor:
    """(site, class, roi, roi) -> (site, roi, roi): absolute class difference, divided by its sum over edges."""
    contrast = (means[:, 0] - means[:, 1]).abs()
    return contrast / contrast.sum(dim=(1, 2), keepdim=True).clamp(min=1e-12)


def spread(maps: Tensor) -> Tensor:
    """Mean entropy of the maps over that of a uniform map: 1 if all edges differ alike, 0 if one does; 0 without a map."""
    certain = maps.clamp(min=1e-12)  # an edge without difference adds 0, and no gradient
    entropy = -(maps * certain.log()).sum(dim=(1, 2)) / math.log(maps[0].numel()) if len(maps) else maps.sum(dim=(1, 2))
    return entropy.sum() / max(len(maps), 1)


def stability(maps: Tensor) -> Tensor:
    """Soft Dice loss between the maps of two sites, averaged over pairs of sites; 0 for equal maps, and without a pair."""
    flat = maps.flatten(1)  # (site, edge)
    size = flat.square().sum(dim=1)
    first, second = torch.triu_indices(len(flat), len(flat), offset=1, device=flat.device)
    dice = 2 * (flat[first] * flat[second]).sum(dim=1) / (size[first] + size[second]).clamp(min=1e-30)
    return (1 - dice).sum() / max(len(dice), 1)


@contextmanager
def unrecorded(network: nn.Module) -> Iterator[None]:
    """Context in which batch norm uses the batch's statistics and leaves the running ones unchanged."""
    norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


@method("metaexplainer")
class MetaExplainer(DeepMethod):
    """MetaExplainer: graph network on learned connectivity, meta-learned over source sites with sparse, stable class contrasts.

    Differs from the release: nodes get the sum over their edges, where the release multiplies a node by its row sum
    (normalisation "release"); no sigmoid before cross-entropy; contrasts are of unmixed subjects, with class means that include
    a site's earlier draws; subjects are mixed in learned connectivity and correlations, since mixed series are no one's scan.
    As released: edges are inner products of the ROIs' features. Variant `attention` has the attention over ROIs of its text; it
    averages over ROIs until all edges of a subject are equal to seven digits.
    Differs from the release: a contrast is divided by its sum, where the release's standardisation and sigmoid make sparsity
    and stability almost constant. Sparsity is its entropy relative to that of equal edges; stability is a soft Dice loss with
    squares. Both are between 0 and 1 and means over sites and pairs of sites. At 116 ROIs and the published weight sparsity
    stays at 0.97 in all trainings on ABIDE: it does not act there.
    Interpretation: convolution, batch norm, ReLU; dropout before and within the classifier; Fisher z of correlations; the trial
    step is on plain cross-entropy, the outer one on subjects mixed with others of their site; the two optimizers keep their own
    moments. No second derivatives. Running statistics are of the outer sites' unmixed subjects.
    Differs from the publication: edges are divided by the number of ROIs and nodes keep their own state (`self_loops`), since
    learned edges are almost equal at first. With fewer than 13 sites half are outer; sites with fewer than 5 subjects of a
    class are inner only; 2,000 steps with warm-up and cosine.
    On connectomes, which the publication does not have, the features of a ROI are computed from its row of FC, by the encoder
    without its convolutions along time.
    """

    channels: tuple[int, ...] = (32, 32, 16)
    kernels: tuple[int, ...] = (4, 8, 8)
    strides: tuple[int, ...] = (2, 1, 1)
    pool: int = 16
    hidden: int = 32
    embedding: int = 8
    attention: bool = False  # over ROIs, before the inner products that are the edges
    heads: int = 4
    graph_widths: tuple[int, int] = (64, 8)
    classifier_widths: tuple[int, int] = (256, 32)
    normalisation: Literal["size", "row", "symmetric", "none", "release"] = "size"
    self_loops: bool = True
    inner_sites: int = 6
    outer_sites: int = 7
    per_site: int = 10
    site_power: float = 0.5  # probability of drawing a site is proportional to its size to this power
    mixup: float = 1.0  # both parameters of the beta distribution; 0: no mixing
    sparsity_weight: float = 0.1
    stability_weight: float = 0.03
    memory: float = 0.5  # weight of a site's earlier class means in the current ones
    steps_per_epoch: int = 20
    epochs: int = 100
    warmup: int = 5
    learning_rate: float = 1e-3
    dropout: float = 0.5
    update_rule: Literal["adamw", "adam"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    bounds = {"mixup": (0, math.inf)}
    takes = ANY_SCAN
    unused = ("batch_size",)
    reference = (
        "Qiu et al. 2025: MetaExplainer, revisit domain generalization of functional connectome analyses from explainability"
    )
    variants = {
        "no-explanation": {"sparsity_weight": 0.0, "stability_weight": 0.0},
        "attention": {"attention": True},
        "phenotypes": {"phenotypes": True},
        "release": {"normalisation": "release"},
        "small": {
            "channels": (8, 8, 4),
            "hidden": 16,
            "classifier_widths": (32, 16),
            "steps_per_epoch": 4,
            "learning_rate": 2e-3,
            "epochs": 40,
            "warmup": 4,
        },
    }
    space = {
        "sparsity_weight": (0.0, 0.01, 0.1, 1.0),
        "stability_weight": (0.0, 0.01, 0.03, 0.1, 1.0),
        "normalisation": ("size", "row", "symmetric", "none", "release"),
        "mixup": (0.0, 0.2, 1.0),
    }

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        super().learn(source, seed=seed, device=device, progress=progress)
        if self.trained_on != SERIES:
            self.facts_["notes"].append(OF_ROWS)

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        series = super().features(cohort, device) if cohort.values == SERIES else {}
        return series | {"fc": torch.from_numpy(fisher_matrices(cohort.scans))}

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        return {**source_scaling(features["fc"].cpu().numpy())}

    def optimizer(self, network: Any) -> torch.optim.Optimizer:
        """Adam, another one for the trial steps, and the empty history of class means."""
        n = len(network.mean)
        network.history = network.mean.new_zeros(network.n_sites, 2, n, n)
        network.known = torch.zeros(network.n_sites, dtype=torch.bool, device=network.mean.device)
        network.trial = self.updating(network.parameters())
        return self.updating(network.parameters())

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Inner sites followed by outer sites, classes balanced within each."""
        everyone, fit = torch.unique(site), balanced_sites(site, label, least=self.per_site // 2)
        fit = fit if len(fit) else everyone
        outer = min(self.outer_sites, len(fit), -(-len(everyone) // 2))
        inner = min(self.inner_sites, len(everyone) - outer)
        self._inner = inner * self.per_site

        def draw(allowed: Tensor, sites: int) -> Tensor:
            here = torch.nonzero(allowed).flatten()
            per = {"sites_per_batch": sites, "per_site": self.per_site, "count": 1}
            return here[site_batches(site[here], label[here], order, power=self.site_power, **per)[0]]

        whole = []
        for _ in range(self.steps_per_epoch):
            last = draw(torch.isin(site, fit), outer)
            first = [draw(~torch.isin(site, site[last]), inner)] if inner else []
            whole.append(torch.cat([*first, last]))
        return whole

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return len(torch.unique(site)) < 2

    def step(self, network: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """A trial step at the inner sites; the gradient at the outer sites after it updates the weights from before it."""
        rows = torch.arange(len(batch), device=batch.label.device)
        before = [value.detach().clone() for value in network.parameters()]
        terms = {}
        if self._inner:
            for group in network.trial.param_groups:
                group["lr"] = optimizer.param_groups[0]["lr"]
            inner = batch.take(rows[: self._inner])
            with unrecorded(network), self.autocast(batch.label.device):
                trial = self.cross_entropy(network(inner), inner)
            self._gradient(trial, network)
            network.trial.step()
            terms["trial"] = trial.detach()
        with self.autocast(batch.label.device):
            outer = self.loss(network, batch.take(rows[self._inner :]))
        self._gradient(torch.stack(list(outer.values())).sum(), network)
        with torch.no_grad():
            for value, old in zip(network.parameters(), before, strict=True):
                value.copy_(old)
        optimizer.step()
        return terms | {name: term.detach() for name, term in outer.items()}

    def _gradient(self, loss: Tensor, network: nn.Module) -> None:
        network.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.clip_gradients(network.parameters())

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        parts = network.parts(batch)
        maps = contrast_maps(self.remembered(network, parts["connectivity"], batch))
        if self.mixup:
            weight, partner = self.mixing(batch)
            inputs = (parts["connectivity"], batch["fc"], batch.phenotypes)
            edges, fc, phenotypes = (weight * value + (1 - weight) * value[partner] for value in inputs)
            with unrecorded(network):
                logits = network.decide(edges, fc, replace(batch, phenotypes=phenotypes))["logits"]
            other = batch.take(partner)
            entropy = weight * self.cross_entropy(logits, batch) + (1 - weight) * self.cross_entropy(logits, other)
        else:
            entropy = self.cross_entropy(parts["logits"], batch)
        return {
            "ce": entropy,
            "sparsity": self.sparsity_weight * spread(maps),
            "stability": self.stability_weight * stability(maps),
        }

    def remembered(self, network: Network, edges: Tensor, batch: Batch) -> Tensor:
        """(site, class, roi, roi) class means of sites with both classes, averaged with their history (no gradient)."""
        means, count = class_means(edges.float(), batch.label, self.per_site)
        both = (count > 0).all(dim=1)
        means, number = means[both], batch.site[:: self.per_site][both]
        past = (self.memory * network.known[number])[:, None, None, None]  # (site, 1, 1, 1)
        means = past * network.history[number] + (1 - past) * means
        network.history[number], network.known[number] = means.detach(), True
        return means

    def mixing(self, batch: Batch) -> tuple[float, Tensor]:
        """Mixing weight, and the position of the subject of the same site that each subject is mixed with."""
        weight = float(torch.distributions.Beta(self.mixup, self.mixup).sample())
        sites = len(batch) // self.per_site
        partner = torch.rand(sites, self.per_site).argsort(dim=1) + self.per_site * torch.arange(sites)[:, None]
        return weight, partner.flatten().to(batch.label.device)

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Smoothed cross-entropy without class weights, since batches are balanced."""
        return smoothed_cross_entropy(logits, batch.label, None, self.label_smoothing)
