"""M²LG-DG: local and global encoders of the scan, shared and private parts of scan and phenotypes, fused across sites.

The whole of the paper's method, from top to bottom in the order of its text: global encoder, local encoder, decomposition,
cross-attention fusion, classifier, losses. Training is `deep.py`'s, the losses are in `losses.py`, the graph in `graph.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg import gpu
from m2lgdg.cohort import Cohort
from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.devices import at_once
from m2lgdg.graph import chebyshev_operators, graph_of, propagation
from m2lgdg.kernels import Gelu, TimeConvolution, gelu, time_convolution
from m2lgdg.losses import cross_site_contrastive_loss, difference_loss, orthogonality_loss, similarity_loss
from m2lgdg.method import method


class GlobalEncoder(nn.Module):
    """Time first, then space: convolutions along each ROI's series, then attention among all ROIs without a graph."""

    def __init__(self, shape: Shape, own: M2LGDG) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width, length = 1, shape.length
        for channels, kernel in zip(own.global_channels, own.global_kernels, strict=True):
            layers += [TimeConvolution(width, channels, kernel), nn.BatchNorm2d(channels), Gelu()]
            layers += [nn.MaxPool2d((2, 1)), nn.Dropout(own.dropout)]
            width, length = channels, length // 2
        self.convolutions = nn.Sequential(*layers)
        self.projection = nn.Linear(width * length, own.hidden)
        self.identity = nn.Parameter(0.02 * torch.randn(shape.n_rois, own.hidden))
        block = nn.TransformerEncoderLayer(
            own.hidden, own.heads, 4 * own.hidden, own.dropout, activation=gelu, batch_first=True, norm_first=False
        )
        self.transformer = nn.TransformerEncoder(block, own.layers, enable_nested_tensor=False)
        self.output = mlp(own.hidden, own.global_width, own.global_width, own.dropout)

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, global)."""
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        stages = list(zip(*[iter(self.convolutions)] * 5, strict=True))
        for i, (convolution, norm, activation, pool, dropout) in enumerate(stages, start=1):
            if self.training and features.shape[2] % 2 == 0 and gpu.ready(features, norm.num_features):
                found = time_convolution(features, convolution.weight, None, 1)
                features = gpu.norm_kernels().pooled(found, norm, convolution.bias, dropout.p, rois_first=i == len(stages))
            else:
                features = dropout(pool(activation(norm(convolution(features)))))  # (subject, channel, time / 2, roi)
        # As each ROI has (time, channel) in memory on a GPU, the weights take that order: they are the smaller ones to turn.
        flat = features.permute(0, 3, 2, 1).flatten(2)  # (subject, roi, time channel)
        weight = self.projection.weight.view(-1, *features.shape[1:3]).transpose(1, 2).flatten(1)
        tokens = functional.linear(flat, weight, self.projection.bias) + self.identity  # (subject, roi, hidden)
        pooled: Tensor = self.output(self.transformer(tokens).mean(dim=1))
        return pooled


class LocalBlock(nn.Module):
    """Space first, then time: Chebyshev convolution over the graph, temporal convolution, residual, ReLU, dropout."""

    def __init__(self, width: int, channels: int, stride: int, own: M2LGDG) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(own.chebyshev_order, width, channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        nn.init.xavier_uniform_(self.weights.view(-1, channels))  # all terms enter one sum: their fans add up
        self.temporal = TimeConvolution(channels, channels, own.temporal_kernel, stride)
        self.norm = nn.BatchNorm2d(channels)
        self.residual: nn.Module = nn.Identity()
        if width != channels or stride != 1:
            self.residual = nn.Sequential(TimeConvolution(width, channels, 1, stride), nn.BatchNorm2d(channels))
        self.dropout = nn.Dropout(own.dropout)

    def forward(self, features: Tensor, operators: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel, time / stride, roi); the operators of `chebyshev_operators`."""
        order = time_then_graph if features.is_cuda and features.shape[1] > 1 else graph_then_time
        through = order(features, operators, self.weights, self.bias, self.temporal)
        if self.training and isinstance(self.residual, nn.Sequential) and gpu.ready(features, self.norm.num_features):
            convolution: Any = self.residual[0]
            rest = time_convolution(features, convolution.weight, None, convolution.stride[0])
            ends = (self.norm, self.residual[1], convolution.bias, self.dropout.p)
            return gpu.norm_kernels().joined(through, rest, *ends)  # type: ignore[no-any-return]
        return self.dropout(functional.relu(self.norm(through) + self.residual(features)))  # type: ignore[no-any-return]


def graph_then_time(features: Tensor, operators: Tensor, weights: Tensor, bias: Tensor, temporal: TimeConvolution) -> Tensor:
    """temporal(sum over k of T_k features weights_k + bias), in this order."""
    spread = (features @ operators).view(*features.shape[:3], len(weights) - 1, features.shape[3])
    terms = torch.cat([features, *spread.unbind(3)], dim=1)  # (subject, order channel, time, roi)
    mixing = weights.flatten(0, 1).T[:, :, None, None]  # (channel out, order channel, 1, 1)
    if terms.shape[1] < len(mixing):
        return folded(terms, mixing, bias, temporal)
    return temporal(time_convolution(terms, mixing, bias, 1))  # type: ignore[no-any-return]


def time_then_graph(features: Tensor, operators: Tensor, weights: Tensor, bias: Tensor, temporal: TimeConvolution) -> Tensor:
    """The same the other way round: time and graph are both linear and touch different dimensions, so they can change places.

    With channels last in memory this is one convolution and one product, nothing is copied between, and a stride halves
    what the graph sees.
    """
    stride, rois, order = temporal.stride[0], features.shape[3], len(weights)
    weight = torch.einsum("octz,kic->koitz", temporal.weight, weights).flatten(0, 1)  # (order channel out, channel, kernel, 1)
    through = time_convolution(features, weight, None, stride).permute(0, 2, 3, 1)  # (subject, time, roi, order channel)
    subjects, steps = through.shape[:2]
    level = bias_through(bias, temporal, features.shape[2])  # (1, channel, time, 1)
    if rois <= 128 and through.dtype == torch.bfloat16 and gpu.ready(features, max(len(bias), 64)):
        terms = through.reshape(subjects, steps, rois, order, -1)
        spread: Tensor = gpu.graph_kernels().spread(terms, operators, level[0, :, :, 0].T)  # (subject, time, roi, channel)
        return spread.permute(0, 3, 1, 2)
    each = through.reshape(subjects * steps, rois * order, -1)  # (subject time, roi order, channel)
    itself = torch.eye(rois, device=operators.device, dtype=operators.dtype)
    every = torch.cat([itself, operators], dim=1).to(each.dtype)  # (roi, order roi), transposed
    gather = every.view(rois, order, rois).permute(2, 0, 1).reshape(rois, -1)  # (roi, roi order)
    gather = functional.pad(gather, (0, -gather.shape[1] % 8))[:, : gather.shape[1]]  # rows begin where a GPU reads fast
    found = torch.bmm(gather.expand(len(each), -1, -1), each).view(subjects, steps, rois, -1)
    return found.permute(0, 3, 1, 2) + level


def folded(terms: Tensor, mixing: Tensor, bias: Tensor, temporal: TimeConvolution) -> Tensor:
    """temporal(conv2d(terms, mixing, bias)) as one convolution: with few terms going to many channels, far less work."""
    stride = temporal.stride[0]
    weight = torch.einsum("octz,cizy->oity", temporal.weight, mixing)  # (channel out, term, kernel, 1)
    if terms.is_cuda:  # its convolutions have channels to spare
        return time_convolution(*with_ones(terms, weight, bias, temporal), None, stride)
    return time_convolution(terms, weight, None, stride) + bias_through(bias, temporal, terms.shape[2])


def with_ones(terms: Tensor, weight: Tensor, bias: Tensor, temporal: TimeConvolution) -> tuple[Tensor, Tensor]:
    """Terms with a channel of ones, and weights under which it gives `bias_through`: no pass adds the bias afterwards."""
    assert temporal.bias is not None
    half = weight.shape[2] // 2
    level = torch.einsum("octz,c->ot", temporal.weight, bias) + functional.pad(temporal.bias[:, None], (half, half))
    return torch.cat([terms, torch.ones_like(terms[:, :1])], dim=1), torch.cat([weight, level[:, None, :, None]], dim=1)


def bias_through(bias: Tensor, temporal: TimeConvolution, length: int) -> Tensor:
    """(1, channel, time / stride, 1) what a temporal convolution makes of a bias before it; near the padding it is less."""
    level: Tensor = temporal(bias[None, :, None, None].expand(1, -1, length, 1))
    return level


class LocalEncoder(nn.Module):
    """ST-GCN blocks over the group graph with its learnable refinement, pooled over time and ROIs."""

    def __init__(self, shape: Shape, own: M2LGDG) -> None:
        super().__init__()
        self.adjacency: Tensor
        self.register_buffer("adjacency", torch.from_numpy(np.array(shape.fitted["adjacency"])))
        self.edges = nn.Parameter(0.1 * torch.randn(shape.n_rois, own.edge_width))
        self.beta, self.order = own.beta, own.chebyshev_order
        widths = (1, *own.local_channels)
        blocks = zip(widths[:-1], widths[1:], own.local_strides, strict=True)
        self.blocks = nn.ModuleList(LocalBlock(width, channels, stride, own) for width, channels, stride in blocks)
        self.output = mlp(widths[-1], own.local_width, own.local_width, own.dropout)

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, local)."""
        operators = chebyshev_operators(propagation(self.adjacency, self.edges, self.beta), self.order)
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, operators)
        with torch.autocast(features.device.type, enabled=False):  # it would copy all features to float32 for a sum
            pooled = features.sum(dim=(2, 3)) / features[0, 0].numel()  # the gradient of a mean would be written out
        found: Tensor = self.output(pooled)
        return found


class CrossAttention(nn.Module):
    """The scan's tokens attend to the phenotypes', then these to the updated scan's; residual, norm and FFN after each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attend_f, self.attend_n = (nn.MultiheadAttention(width, heads, dropout, batch_first=True) for _ in range(2))
        self.norm_f, self.norm_n, self.norm_ff, self.norm_nn = (nn.LayerNorm(width) for _ in range(4))
        self.feed_f, self.feed_n = (mlp(width, 4 * width, width, dropout) for _ in range(2))

    def forward(self, z_f: Tensor, z_n: Tensor) -> tuple[Tensor, Tensor]:
        """Both (subject, token, width)."""
        z_f = self.norm_f(z_f + self.attend_f(z_f, z_n, z_n, need_weights=False)[0])
        z_f = self.norm_ff(z_f + self.feed_f(z_f))
        z_n = self.norm_n(z_n + self.attend_n(z_n, z_f, z_f, need_weights=False)[0])
        z_n = self.norm_nn(z_n + self.feed_n(z_n))
        return z_f, z_n


class Network(nn.Module):
    """All of M²LG-DG; `parts` returns what the losses and explanations need, `forward` the logits."""

    def __init__(self, shape: Shape, own: M2LGDG) -> None:
        super().__init__()
        self.own = own
        width = own.shared_width
        if own.imaging:
            self.global_encoder, self.local_encoder = GlobalEncoder(shape, own), LocalEncoder(shape, own)
            self.combine = nn.Linear(own.global_width + own.local_width, own.imaging_width)
        if own.phenotypes:
            self.phenotype_encoder = phenotype_encoder(shape.n_inputs, own)
        if not (own.imaging and own.phenotypes):
            self.project = nn.Linear(own.imaging_width if own.imaging else own.phenotype_width, own.fused_width)
        elif not own.decomposition:
            self.project = nn.Linear(own.imaging_width + own.phenotype_width, own.fused_width)
        else:
            self.shared_f, self.private_f = (mlp(own.imaging_width, width, width, 0.0) for _ in range(2))
            self.shared_n, self.private_n = (mlp(own.phenotype_width, width, width, 0.0) for _ in range(2))
            if own.cross_attention:
                layers = [CrossAttention(width, own.fusion_heads, own.dropout) for _ in range(own.fusion_layers)]
                self.fusion = nn.ModuleList(layers)
                self.gate = mlp(4 * width, width, 2, 0.0)
                self.output = mlp(4 * width, 2 * width, own.fused_width, own.dropout)
            else:
                self.project = nn.Linear(4 * width, own.fused_width)
        sizes = (own.fused_width, own.fused_width // 2, own.fused_width // 4)
        layers_: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers_ += [nn.Linear(before, after), nn.GELU(), nn.Dropout(own.dropout)]
        self.classifier = nn.Sequential(*layers_, nn.Linear(sizes[-1], 2))

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) logits."""
        return self.parts(batch)["logits"]

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits, the fused representation, and where there are any the components and the gate's weights."""
        encoded: tuple[Tensor, ...] = ()
        if self.own.imaging:
            series = batch.series
            encoded = at_once(lambda: self.global_encoder(series), lambda: self.local_encoder(series), series.device)
        with torch.autocast(
            batch.label.device.type, enabled=False
        ):  # what follows is small: casts would cost more than they save
            found = self._fused([one.float() for one in encoded], batch)
            return found | {"logits": self.classifier(found["fused"])}

    def _fused(self, encoded: Sequence[Tensor], batch: Batch) -> dict[str, Tensor]:
        own = self.own
        if not encoded:
            return {"fused": self.project(self.phenotype_encoder(batch.phenotypes))}
        both = torch.cat(list(encoded), dim=1)  # (subject, global + local)
        h_f = functional.gelu(self.combine(both))  # (subject, imaging)
        if not own.phenotypes:
            return {"fused": self.project(h_f)}
        h_n = self.phenotype_encoder(batch.phenotypes)  # (subject, phenotype)
        if not own.decomposition:
            return {"fused": self.project(torch.cat([h_f, h_n], dim=1))}
        components = {
            "s_f": self.shared_f(h_f),
            "p_f": self.private_f(h_f),
            "s_n": self.shared_n(h_n),
            "p_n": self.private_n(h_n),
        }
        if not own.cross_attention:
            return components | {"fused": self.project(torch.cat(list(components.values()), dim=1))}
        z_f = torch.stack([components["s_f"], components["p_f"]], dim=1)  # (subject, 2 tokens, shared)
        z_n = torch.stack([components["s_n"], components["p_n"]], dim=1)
        for layer in self.fusion:
            z_f, z_n = layer(z_f, z_n)
        flat_f, flat_n = z_f.flatten(1), z_n.flatten(1)
        gate = torch.softmax(self.gate(torch.cat([flat_f, flat_n], dim=1)), dim=1)  # (subject, 2)
        fused = self.output(torch.cat([gate[:, :1] * flat_f, gate[:, 1:] * flat_n], dim=1))
        return components | {"gate": gate, "fused": fused}


def mlp(width: int, hidden: int, out: int, dropout: float) -> nn.Sequential:
    """Linear, GELU, linear; with dropout between where there is any."""
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), *between, nn.Linear(hidden, out))


def phenotype_encoder(inputs: int, own: M2LGDG) -> nn.Sequential:
    """Hidden layers with batch norm, GELU and dropout, then a linear one."""
    layers: list[nn.Module] = []
    width = inputs
    for hidden in own.phenotype_hidden:
        layers += [nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Dropout(own.dropout)]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, own.phenotype_width))


@method("m2lgdg")
class M2LGDG(DeepMethod):
    """Multi-modal local-global domain generalization with cross-site contrast (the paper's method)."""

    global_channels: tuple[int, ...] = (32, 64, 128)
    global_kernels: tuple[int, ...] = (7, 5, 3)
    hidden: int = 128
    heads: int = 8
    layers: int = 2
    global_width: int = 256
    local_channels: tuple[int, ...] = (64, 128, 256)
    local_strides: tuple[int, ...] = (1, 2, 2)
    temporal_kernel: int = 9
    chebyshev_order: int = 3
    edge_width: int = 16
    beta: float = 0.5
    percentile: float = 80.0
    local_width: int = 256
    imaging_width: int = 256
    phenotype_hidden: tuple[int, ...] = (32, 64)
    phenotype_width: int = 64
    shared_width: int = 128
    fusion_heads: int = 4
    fusion_layers: int = 2
    fused_width: int = 128
    margin: float = 1.0
    temperature: float = 0.07
    decomposition_weight: float = 0.1
    contrastive_weight: float = 0.1
    imaging: bool = True
    phenotypes: bool = True
    decomposition: bool = True
    cross_attention: bool = True

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"temperature": (1e-6, math.inf), "percentile": (0, 100)}
    recordable: ClassVar[bool] = True
    may_be_empty: ClassVar[tuple[str, ...]] = ("phenotype_hidden",)
    reference: ClassVar[str] = "Hasan, Zhu, Yin and Liew: M²LG-DG, a multi-modal local-global domain generalization framework"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "M1": {"imaging": False, "contrastive_weight": 0.0},
        "M2": {"phenotypes": False, "contrastive_weight": 0.0},
        "C1": {"decomposition": False},
        "C2": {"cross_attention": False},
        "C3": {"contrastive_weight": 0.0},
        "C4": {},
        "small": {
            "length": 50,
            "global_channels": (4, 8, 8),
            "hidden": 32,
            "heads": 4,
            "layers": 1,
            "global_width": 64,
            "local_channels": (8, 16),
            "local_strides": (2, 2),
            "local_width": 64,
            "imaging_width": 64,
            "phenotype_hidden": (16, 16),
            "phenotype_width": 16,
            "shared_width": 32,
            "fusion_layers": 1,
            "fused_width": 32,
            "batch_size": 16,
            "learning_rate": 1e-3,
            "dropout": 0.0,
            "epochs": 12,
            "warmup": 2,
        },
    }
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "decomposition_weight": (0.001, 0.01, 0.05, 0.1, 0.15, 0.2, 0.5),
        "contrastive_weight": (0.001, 0.01, 0.05, 0.1, 0.15, 0.2, 0.5),
        "temperature": (0.01, 0.03, 0.05, 0.07, 0.1, 0.15, 0.3),
        "percentile": (60.0, 65.0, 70.0, 75.0, 80.0, 85.0, 90.0),
        "length": (150, 175, 200, 225),
    }

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """The group graph of source-training subjects."""
        if not self.imaging:
            return {}
        series = features["series"]
        return {"adjacency": graph_of(series.cpu() if series.device.type == "mps" else series, self.percentile)}

    def build(self, shape: Shape) -> nn.Module:
        """The network of this configuration."""
        return Network(shape, self)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """The contrast is between subjects of two sites."""
        return bool(self.contrastive_weight) and len(torch.unique(site)) < 2

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy, the three decomposition losses and the cross-site contrast, each with its weight."""
        assert isinstance(network, Network)
        found = network.parts(batch)
        terms = {"ce": self.cross_entropy(found["logits"], batch)}
        if "s_f" in found:
            s_f, p_f, s_n, p_n = (found[name] for name in ("s_f", "p_f", "s_n", "p_n"))
            terms["similarity"] = self.decomposition_weight * similarity_loss(s_f, s_n)
            terms["orthogonality"] = self.decomposition_weight * orthogonality_loss(s_f, p_f, s_n, p_n)
            terms["difference"] = self.decomposition_weight * difference_loss(p_f, p_n, self.margin)
        if self.contrastive_weight:
            contrast = cross_site_contrastive_loss(found["fused"], batch.label, batch.site, self.temperature)
            terms["contrast"] = self.contrastive_weight * contrast
        return terms
