"""M2DC: sliding-window graphs with attention readouts, batch norm that simulates other sites, and meta-learning over sites.

In the order of the data: backbone, batch norm, network, autoencoder of the distance constraint, and the method with its
episodes, which `sampler.py` draws.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.losses import normalised, smoothed_cross_entropy
from m2lgdg.method import method
from m2lgdg.methods.msstan import strongest_edges, window_correlations
from m2lgdg.sampler import balanced_sites, site_batches
from m2lgdg.storage import InputError


def windows_of(length: int, window: int, stride: int) -> tuple[int, int]:
    """Time points and stride of the windows, reduced for short series so that two windows fit, each at most half the length."""
    points = min(window, length // 2)
    stride = min(stride, length - 1 - points)
    if points < 3 or stride < 1:
        raise InputError(
            f"method m2dc: window {window} does not give two windows of at least three points in {length} time points."
        )
    return points, stride


def edge_density(rois: int, percentile: float) -> float:
    """Fraction of ROI pairs above a percentile of the whole matrix, where pairs count twice and the diagonal comes first."""
    entries, pairs = rois * rois, rois * (rois - 1) // 2
    above = entries - 1 - math.floor((entries - 1) * percentile / 100 + 1e-9)  # entries over the value at the percentile
    return max(0, (above - rois) // 2) / max(1, pairs - 1)  # as `strongest_edges` counts


class GraphIsomorphism(nn.Module):
    """Graph isomorphism layer: an MLP of the sum over neighbours and itself, plus epsilon times itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(1))
        half = [[nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()] for _ in range(2)]
        self.mlp = nn.Sequential(*half[0], *half[1])

    def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
        """(window, roi, width) and (window, roi, roi) -> (window, roi, width)."""
        summed = graph @ nodes + self.epsilon * nodes
        return self.mlp(summed.flatten(0, 1)).view(nodes.shape)


class AttentionReadout(nn.Module):
    """Squeeze-and-excitation readout: the mean over ROIs determines the weight of each ROI."""

    def __init__(self, width: int, rois: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())
        self.attend = nn.Linear(width, rois)
        self.dropout = nn.Dropout(dropout)

    def forward(self, nodes: Tensor) -> Tensor:
        """(window, roi, width) -> (window, width)."""
        weights = self.dropout(torch.sigmoid(self.attend(self.embed(nodes.mean(dim=1)))))  # (window, roi)
        return (weights.unsqueeze(1) @ nodes).squeeze(1) / nodes.shape[1]


class TemporalBlock(nn.Module):
    """Transformer over the windows with one head and, as published, no residual around the attention."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequence: Tensor) -> Tensor:
        """(subject, window, width) -> (subject, window, width)."""
        attended, _ = self.attention(sequence, sequence, sequence, need_weights=False)
        attended = self.norm_attention(self.dropout(attended))
        return self.norm_feed(attended + self.dropout(self.feed(attended)))


class MetaBatchNorm(nn.BatchNorm1d):
    """Batch norm that can also mix its input with features sampled from the `statistics` of other sites (`sampled`)."""

    def statistics(self, features: Tensor, spread: Literal["sd", "variance"]) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(features.detach(), dim=0, correction=0)
        return mean, variance.sqrt() if spread == "sd" else variance

    def sampled(self, features: Tensor, sites: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(subject, width) -> (site, subject, width): a copy mixed with samples of each site, all with one mixing weight."""
        mean, spread = (torch.stack(values).unsqueeze(1) for values in zip(*sites, strict=True))  # (site, 1, width)
        drawn = mean + spread * torch.randn(len(sites), *features.shape, device=features.device)
        return self.mixed(features, drawn, torch.rand((), device=features.device))  # uniform, that is Beta(1, 1)

    def mixed(self, features: Tensor, drawn: Tensor, weight: Tensor) -> Tensor:
        """Each copy normalised by the statistics of its own mixture; running statistics are unchanged."""
        mixture = weight * drawn + (1 - weight) * features  # (site, subject, width)
        variance, mean = torch.var_mean(mixture, dim=1, keepdim=True, correction=0)
        return (mixture - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Autoencoder(nn.Module):
    """Autoencoder whose embedding the distance constraint acts on; used in training only, so without running statistics."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, embedding)
        norm = nn.BatchNorm1d(embedding, track_running_stats=False)
        self.decoder = nn.Sequential(norm, nn.ReLU(), nn.Linear(embedding, width))

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """(subject, width) -> embedding (subject, embedding) and reconstruction error (subject,)."""
        embedding = self.encoder(latent)  # (subject, embedding)
        error = (self.decoder(embedding).float() - latent.float()).square().mean(dim=1)  # (subject,)
        return embedding.float(), error


class Network(PartsNetwork):
    """Backbone and heads; `encode`, the norms and `classify` are separate because the episodes combine them differently."""

    def __init__(self, shape: Shape, config: M2DC) -> None:
        super().__init__()
        width, rois, layers = config.hidden, shape.n_rois, range(config.layers)
        self.crop = min(shape.length, max(8, round(config.crop * shape.length)))  # time points
        self.views = config.crops if self.crop < shape.length else 1
        self.points, self.stride = windows_of(self.crop, config.window, config.stride)
        self.density = edge_density(rois, config.percentile)
        self.clock = nn.LSTM(rois, width, batch_first=True) if config.clock else None
        self.start = nn.Linear(rois + width if config.clock else rois, width)
        self.graphs = nn.ModuleList(GraphIsomorphism(width) for _ in layers)
        self.readouts = nn.ModuleList(AttentionReadout(width, rois, config.dropout) for _ in layers)
        self.temporal = nn.ModuleList(TemporalBlock(width, config.dropout) for _ in layers)
        self.norms = nn.ModuleList(MetaBatchNorm(3 * width) for _ in layers)
        self.inputs = shape.n_inputs
        self.heads = nn.ModuleList(nn.Linear(3 * width + shape.n_inputs, 2) for _ in layers)
        self.dropout = nn.Dropout(config.head_dropout)
        self.autoencoder = Autoencoder(3 * width * config.layers, config.embedding)

    def train(self, mode: bool = True) -> Network:
        """Set the mode, except for the LSTM: eval mode changes nothing in it, but on a GPU it has no gradient there."""
        super().train(mode)
        if self.clock is not None:
            self.clock.train()
        return self

    def predictor(self) -> list[nn.Parameter]:
        return [value for name, value in self.named_parameters() if not name.startswith("autoencoder.")]

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits and latent representation (subject, 3 * layers * width), with all subjects treated as one site."""
        crops = [batch.series] if self.training else self.fixed_crops(batch.series)
        latent = [self.plain(self.encode(crop)) for crop in crops]
        logits = [self.classify(one, batch) for one in latent]
        return {"fused": torch.stack([flat(one) for one in latent]).mean(dim=0), "logits": torch.stack(logits).mean(dim=0)}

    def fixed_crops(self, series: Tensor) -> list[Tensor]:
        """(subject, roi, time) -> crops at equal distances, the first at the start and the last at the end."""
        last = series.shape[2] - self.crop
        starts = [round(last * view / max(self.views - 1, 1)) for view in range(self.views)]
        return [series[..., start : start + self.crop] for start in starts]

    def random_crop(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, roi, crop), from a random start in each subject."""
        subjects, rois, length = series.shape
        start = torch.randint(length - self.crop + 1, (subjects, 1, 1), device=series.device)
        points = start + torch.arange(self.crop, device=series.device)  # (subject, 1, crop)
        return series.gather(2, points.expand(-1, rois, -1))

    def encode(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (layer, subject, 3 * width): means, readouts and attended readouts, summed over windows."""
        if self.training and self.crop < series.shape[2]:
            series = self.random_crop(series)
        with torch.no_grad():
            correlations = window_correlations(series, self.points, self.stride)  # (subject, window, roi, roi)
            graph = strongest_edges(correlations.flatten(0, 1), self.density)  # (subject window, roi, roi)
        subjects, windows, rois = correlations.shape[:3]
        # A linear layer of [one-hot ROI; time code], without forming the one-hot part.
        nodes = self.time_code(series, windows) + self.start.weight[:, :rois].T  # (subject window, roi, width)
        encoded = []
        for convolve, readout, attend in zip(self.graphs, self.readouts, self.temporal, strict=True):
            nodes = convolve(nodes, graph)
            mean = nodes.mean(dim=1).view(subjects, windows, -1)  # (subject, window, width)
            read = readout(nodes).view(subjects, windows, -1)
            encoded.append(torch.cat([mean, read, attend(read)], dim=2).float().sum(dim=1))
        return torch.stack(encoded)

    def time_code(self, series: Tensor, windows: int) -> Tensor:
        """(subject window, 1, width): the bias, and with a clock the LSTM's output at the end of each window."""
        if self.clock is None:
            return self.start.bias.expand(series.shape[0] * windows, 1, -1)  # not len, which would fix it in an export
        last = self.points + (windows - 1) * self.stride
        with torch.autocast(series.device.type, enabled=False):  # LSTMs in bfloat16 are missing on some CPUs
            time, _ = self.clock(series[..., :last].mT)  # (subject, time, width)
        ends = time[:, self.points - 1 :: self.stride]  # (subject, window, width)
        rois = series.shape[1]
        return functional.linear(ends, self.start.weight[:, rois:], self.start.bias).flatten(0, 1).unsqueeze(1)

    def plain(self, encoded: Tensor) -> Tensor:
        return torch.stack([norm(features) for norm, features in zip(self.norms, encoded, strict=True)])

    def sampled(self, encoded: Tensor, sites: list[Tensor], spread: Literal["sd", "variance"]) -> Tensor:
        """(layer, subject, 3 * width) -> (layer, site * subject, 3 * width), mixed towards each of the encoded sites."""
        mixed = []
        for position, norm in enumerate(self.norms):
            assert isinstance(norm, MetaBatchNorm)
            statistics = [norm.statistics(site[position], spread) for site in sites]
            mixed.append(norm.sampled(encoded[position], statistics).flatten(0, 1))
        return torch.stack(mixed)

    def classify(self, latent: Tensor, batch: Batch) -> Tensor:
        """(layer, subject, 3 * width) -> (subject, 2): logits summed over layers."""
        known = [with_phenotypes(features, batch, self.inputs) for features in latent]
        logits = [self.dropout(head(features)).float() for head, features in zip(self.heads, known, strict=True)]
        return torch.stack(logits).sum(dim=0)


def flat(latent: Tensor) -> Tensor:
    """(layer, subject, width) -> (subject, layer * width)."""
    return latent.transpose(0, 1).flatten(1)


def distances(query: Tensor, support: Tensor, same: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Mean cosine distance of same-class pairs, and mean squared hinge on the Euclidean distance of the other pairs."""
    cosine = (normalised(query).unsqueeze(1) * normalised(support)).sum(dim=-1)  # (query, support)
    gap = torch.linalg.vector_norm(query.unsqueeze(1) - support, dim=-1)
    intra = ((1 - cosine) * same).sum() / same.sum().clamp(min=1)
    inter = ((margin - gap).clamp(min=0.0).square() * ~same).sum() / (~same).sum().clamp(min=1)
    return intra, inter


@method("m2dc")
class M2DC(DeepMethod):
    """M2DC: sliding-window graph network, meta-learned over source sites with sampling batch norm and a distance constraint.

    Differs from the release: it adds the cosine similarity of a class's subjects where a distance is meant (1 - cosine here),
    passes a variance to the sampling as its sd (`spread`), counts the constraint's gradient twice, keeps the weights of the
    inner step (restored here bit for bit), draws its episodes once for all epochs and evaluates a random crop of the target.
    As released: no time code, and random crops in training; a prediction is the mean over `crops` crops at fixed places.
    Variant `clock` has the time code, an LSTM over the series; it memorised more.
    Interpretation: in the release the meta-train sites reach the weights through the inner step; with that step reverted their
    loss has `support_weight` 1. Variant `released` has the release's spread and weight. The release lacks the autoencoder: here
    a linear layer to 8 dimensions is the embedding, followed by batch norm, ReLU and a linear layer.
    Differs from the publication: the inner step is first order; 60 epochs of 40 episodes, not of 400; an epoch of the second
    half is kept (`select_from`), where the release selects none and saves the last: variant `last-epoch`, and `long` with 400
    episodes. If any epoch can be kept, it was often one of the first ten on ABIDE.
    Sites with fewer than `shots` subjects of a class are left out of episodes as long as enough others remain.
    """

    hidden: int = 128
    layers: int = 4
    clock: bool = False  # a time code at the nodes
    crop: float = 0.7  # fraction of the scan in a crop; 1: whole scans
    crops: int = 4  # crops of a scan in a prediction
    window: int = 50
    stride: int = 10
    percentile: float = 70.0
    meta_train_sites: int = 2
    shots: int = 5  # subjects of each class and site
    episodes: int = 40  # per epoch
    site_power: float = 0.5  # probability of drawing a site is proportional to its size to this power
    temperature: float = 0.5
    inner_share: float = 0.01  # rate of the inner step, as a fraction of the current learning rate
    support_weight: float = 1.0
    sampling: bool = True
    spread: Literal["sd", "variance"] = "sd"
    constraint_weight: float = 0.01
    margin: float = 10.0
    embedding: int = 8
    autoencoder_rate: float = 5e-5
    head_dropout: float = 0.5
    epochs: int = 60
    warmup: int = 5
    learning_rate: float = 5e-4
    weight_decay: float = 0.0
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 1.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    select_from: float = 0.5  # no epoch before this fraction of the training is kept; 1: the last, as released
    phenotypes: bool = False

    network_class = Network
    bounds = {
        "head_dropout": (0, 1),
        "temperature": (1e-6, math.inf),
        "percentile": (0, 100),
        "crop": (1e-6, math.inf),
        "select_from": (0, math.inf),
    }
    unused = ("batch_size",)
    recordable = True
    reference = (
        "Su et al. (2024): M2DC, a meta-learning framework for generalizable diagnostic classification of major depressive "
        "disorder, IEEE Transactions on Medical Imaging, doi:10.1109/TMI.2024.3461312"
    )
    variants = {
        "clock": {"clock": True},
        "last-epoch": {"select_from": 1.0},
        "long": {"select_from": 1.0, "episodes": 400},
        "no-sampling": {"sampling": False},
        "phenotypes": {"phenotypes": True},
        "no-constraint": {"constraint_weight": 0.0},
        "released": {"spread": "variance", "support_weight": 0.0},
        "small": {"hidden": 16, "layers": 1, "episodes": 4, "learning_rate": 0.01, "head_dropout": 0.1},
    }
    space = {
        "constraint_weight": (0.0, 0.001, 0.01, 0.1),
        "temperature": (0.25, 0.5, 1.0),
        "percentile": (60.0, 70.0, 80.0, 90.0),
        "support_weight": (0.0, 0.5, 1.0),
        "window": (30, 40, 50, 60),
    }

    def optimizer(self, network: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": network.predictor(), "lr": self.learning_rate},
            {"params": list(network.autoencoder.parameters()), "lr": self.autoencoder_rate},
        ]
        return self.updating(groups)

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Episodes of an epoch: meta-train sites, then one meta-test site, with `shots` subjects of each class per site."""
        sites = self.meta_train_sites + 1
        rows = torch.arange(len(site))
        # Small sites are better than too few sites, but a class of one subject has no statistics at all.
        for wanted, least in [(wanted, least) for wanted in (sites, 2) for least in range(self.shots, 1, -1)]:
            fit = balanced_sites(site, label, least)
            if len(fit) >= wanted:
                rows = torch.nonzero(torch.isin(site, fit)).flatten()
                break
        per = {"sites_per_batch": sites, "per_site": 2 * self.shots, "count": self.episodes}
        return [rows[episode] for episode in site_batches(site[rows], label[rows], order, power=self.site_power, **per)]

    def candidate(self, epoch: int) -> bool:
        """Also not before `select_from`: early on, a high AUC on a hundred validation subjects is often chance."""
        return super().candidate(epoch) and epoch >= min(int(self.select_from * self.epochs), self.epochs - 1)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return len(torch.unique(site)) < 2

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """With a temperature and without class weights, since episodes are balanced."""
        return smoothed_cross_entropy(logits.float() / self.temperature, batch.label, None, self.label_smoothing)

    def by_site(self, batch: Batch) -> tuple[list[Batch], Batch]:
        """Meta-train sites and meta-test site of an episode; a single site is both."""
        rows = torch.arange(len(batch), device=batch.label.device).view(-1, 2 * self.shots)  # (site, subject)
        *support, query = (batch.take(subjects) for subjects in rows)
        return support or [query], query

    def support_loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy over meta-train sites, each site normalised by its own statistics."""
        return torch.stack([self.cross_entropy(network(site), site) for site in self.by_site(batch)[0]]).mean()

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Outer loss, after the inner step: cross-entropy of the meta-test site, and the distance constraint."""
        support, query = self.by_site(batch)
        sites = [network.encode(site.series) for site in support]  # (layer, subject, 3 width) each
        encoded = network.encode(query.series)
        copies = len(sites) if self.sampling else 1
        latent = network.sampled(encoded, sites, self.spread) if self.sampling else network.plain(encoded)
        repeated = query.take(torch.arange(len(query), device=query.label.device).repeat(copies))
        terms = {"query": self.cross_entropy(network.classify(latent, repeated), repeated)}
        if self.constraint_weight:
            support_latent = torch.cat([flat(network.plain(site)) for site in sites])  # (site subject, layer 3 width)
            embedding, error = network.autoencoder(torch.cat([support_latent, flat(latent)]))
            same = repeated.label.unsqueeze(1) == torch.cat([site.label for site in support])
            intra, inter = distances(embedding[len(support_latent) :], embedding[: len(support_latent)], same, self.margin)
            terms["intra"], terms["inter"] = self.constraint_weight * intra, self.constraint_weight * inter
            reconstruction = error[: len(support_latent)].mean() + error[len(support_latent) :].mean()
            terms["reconstruction"] = self.constraint_weight * reconstruction
        return terms

    def step(self, network: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """A small step on the meta-train sites, the outer loss, the step reverted, and an update by both gradients."""
        optimizer.zero_grad(set_to_none=True)
        learned = network.predictor()
        with self.autocast(batch.label.device):
            support = self.support_loss(network, batch)
        slopes = torch.autograd.grad(support, learned)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        with torch.no_grad():
            for value, slope in zip(learned, slopes, strict=True):
                value.sub_(slope * (self.inner_share * optimizer.param_groups[0]["lr"]))
        with self.autocast(batch.label.device):
            terms = self.loss(network, batch)
        total: Any = torch.stack(list(terms.values())).sum()
        total.backward()
        network.load_state_dict(before)
        for value, slope in zip(learned, slopes, strict=True):
            assert value.grad is not None
            value.grad.add_(slope, alpha=self.support_weight)
        self.clip_gradients(network.parameters())
        optimizer.step()
        terms["support"] = self.support_weight * support
        return {name: term.detach() for name, term in terms.items()}
