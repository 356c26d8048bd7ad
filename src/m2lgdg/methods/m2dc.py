"""M2DC: graphs of sliding windows read out by attention, a batch norm that imagines other sites, episodes of sites that meet.

From top to bottom in the order in which a scan passes: layers of the backbone, the batch norm, the network, the autoencoder
of the distance constraint, the method with its episodes. The loop is `deep.py`'s, the episodes are drawn by `sampler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.losses import normalised, smoothed_cross_entropy
from m2lgdg.method import method
from m2lgdg.methods.msstan import strongest_edges, window_correlations
from m2lgdg.sampler import balanced_sites, site_batches
from m2lgdg.storage import InputError


def windows_of(length: int, window: int, stride: int) -> tuple[int, int]:
    """Points and stride of the windows, in short series so few that two windows fit, none of them over half the length."""
    points = min(window, length // 2)
    stride = min(stride, length - 1 - points)
    if points < 3 or stride < 1:
        raise InputError(f"method m2dc: no two windows of three points or more in {length} with window {window}.")
    return points, stride


def edge_share(rois: int, percentile: float) -> float:
    """The share of ROI pairs above a percentile of the whole matrix, where a pair counts twice and the diagonal is on top."""
    entries, pairs = rois * rois, rois * (rois - 1) // 2
    above = entries - 1 - math.floor((entries - 1) * percentile / 100 + 1e-9)  # entries over the value at the percentile
    return max(0, (above - rois) // 2) / max(1, pairs - 1)  # as `strongest_edges` counts


class GraphIsomorphism(nn.Module):
    """A node's new state: an MLP of the sum over its neighbours, itself among them, and a learned share of itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(1))
        half = [[nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()] for _ in range(2)]
        self.mlp = nn.Sequential(*half[0], *half[1])

    def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
        """(window, roi, width) and (window, roi, roi) -> (window, roi, width)."""
        summed = graph @ nodes + self.epsilon * nodes
        new: Tensor = self.mlp(summed.flatten(0, 1)).view(nodes.shape)
        return new


class AttentionReadout(nn.Module):
    """Squeeze and excite: the mean over ROIs says how much of each ROI is read."""

    def __init__(self, width: int, rois: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())
        self.attend = nn.Linear(width, rois)
        self.dropout = nn.Dropout(dropout)

    def forward(self, nodes: Tensor) -> Tensor:
        """(window, roi, width) -> (window, width)."""
        share = self.dropout(torch.sigmoid(self.attend(self.embed(nodes.mean(dim=1)))))  # (window, roi)
        read: Tensor = (share.unsqueeze(1) @ nodes).squeeze(1) / nodes.shape[1]
        return read


class TemporalBlock(nn.Module):
    """A transformer over the windows with one head and, as published, no way around the attention."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequence: Tensor) -> Tensor:
        """(subject, window, width) -> the same."""
        attended, _ = self.attention(sequence, sequence, sequence, need_weights=False)
        attended = self.norm_attention(self.dropout(attended))
        refined: Tensor = self.norm_feed(attended + self.dropout(self.feed(attended)))
        return refined


class MetaBatchNorm(nn.BatchNorm1d):
    """Batch norm that can also mix its input with subjects drawn from the statistics of other sites.

    Called, it is plain: a site's own statistics in training, running ones in eval mode. `statistics` of the sites that were
    met are what `sampled` draws from.
    """

    def statistics(self, features: Tensor, spread: Literal["sd", "variance"]) -> tuple[Tensor, Tensor]:
        """(subject, width) of a site -> its mean and spread, (width,) each, without a gradient."""
        variance, mean = torch.var_mean(features.detach(), dim=0, correction=0)
        return mean, variance.sqrt() if spread == "sd" else variance

    def sampled(self, features: Tensor, sites: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(subject, width) -> (site, subject, width): a copy for each site's mean and spread, all mixed by one share."""
        mean, spread = (torch.stack(one).unsqueeze(1) for one in zip(*sites, strict=True))  # (site, 1, width)
        drawn = mean + spread * torch.randn(len(sites), *features.shape, device=features.device)
        return self.mixed(features, drawn, torch.rand((), device=features.device))  # uniform, that is Beta(1, 1)

    def mixed(self, features: Tensor, drawn: Tensor, share: Tensor) -> Tensor:
        """Each copy normalised by the statistics of its own mixture; running ones stay as they are."""
        mixture = share * drawn + (1 - share) * features  # (site, subject, width)
        variance, mean = torch.var_mean(mixture, dim=1, keepdim=True, correction=0)
        return (mixture - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Autoencoder(nn.Module):
    """The embedding in which subjects of a class should meet; it serves training alone, so it keeps no statistics."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, embedding)
        norm = nn.BatchNorm1d(embedding, track_running_stats=False)
        self.decoder = nn.Sequential(norm, nn.ReLU(), nn.Linear(embedding, width))

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """(subject, width) -> the embedding and the error of its reconstruction, a subject each."""
        embedding = self.encoder(latent)  # (subject, embedding)
        error = (self.decoder(embedding).float() - latent.float()).square().mean(dim=1)  # (subject,)
        return embedding.float(), error


class Network(nn.Module):
    """The backbone and its heads; `encode`, `classify` and the norms between are apart for the sake of the episodes."""

    def __init__(self, shape: Shape, config: M2DC) -> None:
        super().__init__()
        width, rois, layers = config.hidden, shape.n_rois, range(config.layers)
        self.points, self.stride = windows_of(shape.length, config.window, config.stride)
        self.density = edge_share(rois, config.percentile)
        self.clock = nn.LSTM(rois, width, batch_first=True)
        self.start = nn.Linear(rois + width, width)
        self.graphs = nn.ModuleList(GraphIsomorphism(width) for _ in layers)
        self.readouts = nn.ModuleList(AttentionReadout(width, rois, config.dropout) for _ in layers)
        self.temporal = nn.ModuleList(TemporalBlock(width, config.dropout) for _ in layers)
        self.norms = nn.ModuleList(MetaBatchNorm(3 * width) for _ in layers)
        self.heads = nn.ModuleList(nn.Linear(3 * width, 2) for _ in layers)
        self.dropout = nn.Dropout(config.head_dropout)
        self.autoencoder = Autoencoder(3 * width * config.layers, config.embedding)

    def train(self, mode: bool = True) -> Network:
        """The LSTM has nothing that eval mode changes, and on a GPU no gradient in that mode."""
        super().train(mode)
        self.clock.train()
        return self

    def predictor(self) -> list[nn.Parameter]:
        """The parameters of everything but the autoencoder."""
        return [value for name, value in self.named_parameters() if not name.startswith("autoencoder.")]

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) logits."""
        return self.parts(batch)["logits"]

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits and the latent representation (subject, 3 layers width), all subjects as if of one site."""
        latent = self.plain(self.encode(batch.series))
        return {"fused": flat(latent), "logits": self.classify(latent)}

    def encode(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (layer, subject, 3 width): means, readouts and their course, summed over the windows."""
        with torch.no_grad():
            correlations = window_correlations(series, self.points, self.stride)  # (subject, window, roi, roi)
            graph = strongest_edges(correlations.flatten(0, 1), self.density)  # (subject window, roi, roi)
        subjects, windows, rois = correlations.shape[:3]
        last = self.points + (windows - 1) * self.stride
        with torch.autocast(series.device.type, enabled=False):  # processors without bfloat16 have no LSTM for it
            time, _ = self.clock(series[..., :last].mT)  # (subject, time, width)
        ends = time[:, self.points - 1 :: self.stride]  # (subject, window, width)
        # A linear layer of [who the ROI is; what the time is], without the ones and zeros of the first.
        code = functional.linear(ends, self.start.weight[:, rois:], self.start.bias)
        nodes = code.flatten(0, 1).unsqueeze(1) + self.start.weight[:, :rois].T  # (subject window, roi, width)
        found = []
        for convolve, readout, attend in zip(self.graphs, self.readouts, self.temporal, strict=True):
            nodes = convolve(nodes, graph)
            mean = nodes.mean(dim=1).view(subjects, windows, -1)  # (subject, window, width)
            read = readout(nodes).view(subjects, windows, -1)
            found.append(torch.cat([mean, read, attend(read)], dim=2).float().sum(dim=1))
        return torch.stack(found)

    def plain(self, encoded: Tensor) -> Tensor:
        """(layer, subject, 3 width) -> the same, normalised."""
        return torch.stack([norm(one) for norm, one in zip(self.norms, encoded, strict=True)])

    def sampled(self, encoded: Tensor, sites: list[Tensor], spread: Literal["sd", "variance"]) -> Tensor:
        """(layer, subject, 3 width) -> (layer, site subject, 3 width), towards each of the encoded sites."""
        found = []
        for position, norm in enumerate(self.norms):
            assert isinstance(norm, MetaBatchNorm)
            known = [norm.statistics(site[position], spread) for site in sites]
            found.append(norm.sampled(encoded[position], known).flatten(0, 1))
        return torch.stack(found)

    def classify(self, latent: Tensor) -> Tensor:
        """(layer, subject, 3 width) -> (subject, 2): the sum of each layer's logits."""
        logits = [self.dropout(head(one)).float() for head, one in zip(self.heads, latent, strict=True)]
        return torch.stack(logits).sum(dim=0)


def flat(latent: Tensor) -> Tensor:
    """(layer, subject, width) -> (subject, layer width)."""
    return latent.transpose(0, 1).flatten(1)


def distances(query: Tensor, support: Tensor, same: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Mean cosine distance of pairs of a class, mean squared hinge on the Euclidean distance of all others.

    (query, dimension), (support, dimension) and whether the two are of a class (query, support); 0 where there are no pairs.
    """
    cosine = (normalised(query).unsqueeze(1) * normalised(support)).sum(dim=-1)  # (query, support)
    gap = torch.linalg.vector_norm(query.unsqueeze(1) - support, dim=-1)
    intra = ((1 - cosine) * same).sum() / same.sum().clamp(min=1)
    inter = ((margin - gap).clamp(min=0.0).square() * ~same).sum() / (~same).sum().clamp(min=1)
    return intra, inter


@method("m2dc")
class M2DC(DeepMethod):
    """Meta-learned generalization over sites with a sampling batch norm and a distance constraint, on windowed graphs.

    Mended: the release adds the cosine similarity of a class's subjects where a distance is meant (1 - cosine here), hands
    a variance to the sampling as its sd (`spread`), feeds the constraint's gradient twice (one joint backward pass here),
    keeps the weights of the inner step (put back here, bit for bit, with the running statistics), draws its episodes once for
    all epochs (anew in each here) and looks at random crops of the target in each (whole scans, source validation).
    Read: its outer loss has no loss of the meta-train sites, which reached its weights through the inner step; with that step
    taken back they have `support_weight` 1. The variant `released` has the release's spread and weight.
    Read: the autoencoder is missing there: a linear layer to 8 is the embedding, then batch norm, ReLU, linear. Its error is
    the mean over support and the mean over query, added.
    Differs: the inner step is first order, since a second-order term at a hundredth of the rate is next to nothing. Running
    statistics come from meta-train sites before the inner step alone. No random crops in training.
    Differs: 60 epochs are of 40 episodes, not of 400; both rates follow the loop's schedule.
    Sites with fewer than `shots` of a class stay out of episodes as long as enough others remain.
    """

    hidden: int = 128
    layers: int = 4
    window: int = 50
    stride: int = 10
    percentile: float = 70.0
    meta_train_sites: int = 2
    shots: int = 5  # subjects of each class and site
    episodes: int = 40  # in an epoch
    site_power: float = 0.5  # sites are drawn by size to this power
    temperature: float = 0.5
    inner_share: float = 0.01  # of the present rate, for the inner step
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
    label_smoothing: float = 0.0

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "head_dropout": (0, 1),
        "temperature": (1e-6, math.inf),
        "percentile": (0, 100),
    }
    unused: ClassVar[tuple[str, ...]] = ("batch_size",)
    recordable: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Su et al. (2024): M2DC, a meta-learning framework for generalizable diagnostic classification of major depressive "
        "disorder, IEEE Transactions on Medical Imaging, doi:10.1109/TMI.2024.3461312"
    )
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "no-sampling": {"sampling": False},
        "no-constraint": {"constraint_weight": 0.0},
        "released": {"spread": "variance", "support_weight": 0.0},
        "small": {"hidden": 16, "layers": 1, "episodes": 4, "learning_rate": 0.01, "head_dropout": 0.1},
    }
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "constraint_weight": (0.0, 0.001, 0.01, 0.1),
        "temperature": (0.25, 0.5, 1.0),
        "percentile": (60.0, 70.0, 80.0, 90.0),
        "support_weight": (0.0, 0.5, 1.0),
        "window": (30, 40, 50, 60),
    }

    def build(self, shape: Shape) -> nn.Module:
        """The network of this configuration."""
        return Network(shape, self)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Adam as published, slower for the autoencoder."""
        assert isinstance(network, Network)
        groups = [
            {"params": network.predictor(), "lr": self.learning_rate},
            {"params": list(network.autoencoder.parameters()), "lr": self.autoencoder_rate},
        ]
        return torch.optim.Adam(groups, weight_decay=self.weight_decay)

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """An epoch's episodes: meta-train sites and one meta-test site, `shots` of each class, a site after the other."""
        sites = self.meta_train_sites + 1
        rows = torch.arange(len(site))
        # Poor statistics of a site are better than no third site, but a class of one subject has none at all.
        for wanted, least in [(wanted, least) for wanted in (sites, 2) for least in range(self.shots, 1, -1)]:
            fit = balanced_sites(site, label, least)
            if len(fit) >= wanted:
                rows = torch.nonzero(torch.isin(site, fit)).flatten()
                break
        per = {"sites_per_batch": sites, "per_site": 2 * self.shots, "count": self.episodes}
        return [rows[one] for one in site_batches(site[rows], label[rows], order, power=self.site_power, **per)]

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """One site would play both parts."""
        return len(torch.unique(site)) < 2

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """With a temperature, and without class weights: episodes are balanced already."""
        return smoothed_cross_entropy(logits.float() / self.temperature, batch.label, None, self.label_smoothing)

    def by_site(self, batch: Batch) -> tuple[list[Batch], Batch]:
        """An episode's meta-train sites, and its meta-test site; where there is but one site, it is both."""
        rows = torch.arange(len(batch), device=batch.label.device).view(-1, 2 * self.shots)  # (site, subject)
        *support, query = (batch.take(one) for one in rows)
        return support or [query], query

    def support_loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The mean over meta-train sites of their cross-entropies, each site normalised by itself."""
        return torch.stack([self.cross_entropy(network(one), one) for one in self.by_site(batch)[0]]).mean()

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """What is asked of the network after the inner step: cross-entropy of the meta-test site, and the constraint."""
        assert isinstance(network, Network)
        support, query = self.by_site(batch)
        sites = [network.encode(one.series) for one in support]  # (layer, subject, 3 width) each
        asked = network.encode(query.series)
        copies = len(sites) if self.sampling else 1
        latent = network.sampled(asked, sites, self.spread) if self.sampling else network.plain(asked)
        repeated = query.take(torch.arange(len(query), device=query.label.device).repeat(copies))
        terms = {"query": self.cross_entropy(network.classify(latent), repeated)}
        if self.constraint_weight:
            known = torch.cat([flat(network.plain(one)) for one in sites])  # (site subject, layer 3 width)
            embedding, error = network.autoencoder(torch.cat([known, flat(latent)]))
            same = repeated.label.unsqueeze(1) == torch.cat([one.label for one in support])
            intra, inter = distances(embedding[len(known) :], embedding[: len(known)], same, self.margin)
            terms["intra"], terms["inter"] = self.constraint_weight * intra, self.constraint_weight * inter
            reconstruction = error[: len(known)].mean() + error[len(known) :].mean()
            terms["reconstruction"] = self.constraint_weight * reconstruction
        return terms

    def step(self, network: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """A small step on the meta-train sites, the loss there, the step taken back, and an update by both gradients."""
        assert isinstance(network, Network)
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
        nn.utils.clip_grad_norm_(network.parameters(), self.clip)
        optimizer.step()
        terms["support"] = self.support_weight * support
        return {name: term.detach() for name, term in terms.items()}
