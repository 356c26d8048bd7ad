"""M²LG-DG, the paper's method, in the order of its text: each part stands beside the equation that defines it.

Read it with the paper open. The losses (Eq. 11 to 13 and 19) are in `losses.py`, the group graph and the Chebyshev
convolution (Eq. 3, 5 and 6) in `graph.py`, training in `deep.py`. `fast/m2lgdg.py` computes the same in less time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.fast import fast_form
from m2lgdg.graph import chebyshev, group_graph_of, propagation
from m2lgdg.losses import cross_site_contrastive_loss, difference_loss, orthogonality_loss, similarity_loss
from m2lgdg.method import method

# ---------------------------------------------------------------- dual-stream fMRI encoder


class GlobalEncoder(nn.Module):
    """Global encoder, Eq. 4. Time first, then space: convolutions along each ROI's series, then attention among ROIs."""

    def __init__(self, shape: Shape, config: M2LGDG) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width, length = 1, shape.length
        for channels, kernel in zip(config.global_channels, config.global_kernels, strict=True):
            layers += [time_convolution(width, channels, kernel), nn.BatchNorm2d(channels), nn.GELU()]
            layers += [nn.MaxPool2d((2, 1)), nn.Dropout(config.dropout)]
            width, length = channels, length // 2
        self.convolutions = nn.Sequential(*layers)  # CNN_1D
        self.projection = nn.Linear(width * length, config.hidden)  # Proj
        self.identity = nn.Parameter(0.02 * torch.randn(shape.n_rois, config.hidden))  # P
        block = nn.TransformerEncoderLayer(
            config.hidden, config.heads, 4 * config.hidden, config.dropout, activation=gelu, batch_first=True
        )
        self.transformer = nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False)
        self.output = mlp(config.hidden, config.global_width, config.global_width, config.dropout)  # MLP_g

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> h_global (subject, global)."""
        features = self.convolutions(
            series.transpose(1, 2).unsqueeze(1)
        )  # (subject, 1, time, roi) -> (.., channel, time / 8, roi)
        h_roi = self.projection(features.permute(0, 3, 1, 2).flatten(2))  # (subject, roi, channel time / 8) -> (.., hidden)
        tokens = self.transformer(h_roi + self.identity)  # (subject, roi, hidden)
        h_global: Tensor = self.output(tokens.mean(dim=1))
        return h_global


class LocalBlock(nn.Module):
    """One ST-GCN block. Space first, then time: graph convolution (Eq. 6), temporal convolution, residual, ReLU, dropout."""

    def __init__(self, width: int, channels: int, stride: int, config: M2LGDG) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(config.chebyshev_order, width, channels))  # W_k
        self.bias = nn.Parameter(torch.zeros(channels))  # b
        nn.init.xavier_uniform_(self.weights.view(-1, channels))  # all orders enter one sum, so their fans add up
        self.temporal = time_convolution(channels, channels, config.temporal_kernel, stride)
        self.norm = nn.BatchNorm2d(channels)
        self.residual: nn.Module = nn.Identity()
        if width != channels or stride != 1:
            self.residual = nn.Sequential(time_convolution(width, channels, 1, stride), nn.BatchNorm2d(channels))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, operator: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel, time / stride, roi); `operator` is the normalised adjacency."""
        nodes = chebyshev(operator, features.permute(0, 2, 3, 1), self.weights, self.bias)  # (subject, time, roi, channel)
        through = self.norm(self.temporal(nodes.permute(0, 3, 1, 2)))  # (subject, channel, time / stride, roi)
        out: Tensor = self.dropout(functional.relu(through + self.residual(features)))
        return out


class LocalEncoder(nn.Module):
    """Local encoder, Eq. 5 to 7: ST-GCN blocks over the group graph and its learned refinement, then a mean over all."""

    def __init__(self, shape: Shape, config: M2LGDG) -> None:
        super().__init__()
        self.adjacency: Tensor  # A_FC, Eq. 3
        self.register_buffer("adjacency", torch.from_numpy(np.array(shape.fitted["adjacency"])))
        self.edges = nn.Parameter(0.1 * torch.randn(shape.n_rois, config.edge_width))  # E
        self.beta, self.order = config.beta, config.chebyshev_order
        widths = (1, *config.local_channels)
        blocks = zip(widths[:-1], widths[1:], config.local_strides, strict=True)
        self.blocks = nn.ModuleList(LocalBlock(width, channels, stride, config) for width, channels, stride in blocks)
        self.output = mlp(widths[-1], config.local_width, config.local_width, config.dropout)  # MLP_l

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> h_local (subject, local)."""
        operator = propagation(self.adjacency, self.edges, self.beta)  # Eq. 5, (roi, roi)
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, operator)  # (subject, channel, time / stride, roi)
        h_local: Tensor = self.output(features.mean(dim=(2, 3)))  # Eq. 7
        return h_local


# ---------------------------------------------------------------- non-imaging encoder


def phenotype_encoder(inputs: int, config: M2LGDG) -> nn.Sequential:
    """Non-imaging encoder, Eq. 9: hidden layers with batch norm, GELU and dropout, then a linear layer."""
    layers: list[nn.Module] = []
    width = inputs
    for hidden in config.phenotype_hidden:
        layers += [nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Dropout(config.dropout)]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, config.phenotype_width))


# ---------------------------------------------------------------- cross-attention fusion


class CrossAttention(nn.Module):
    """One cross-attention layer, Eq. 15: scan tokens attend to phenotype tokens, then these to the updated scan tokens."""

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


# ---------------------------------------------------------------- the whole network


class Network(nn.Module):
    """All of M²LG-DG. `forward` returns the logits, `parts` also what the losses and explanations need."""

    def __init__(self, shape: Shape, config: M2LGDG) -> None:
        super().__init__()
        self.config = config
        width = config.shared_width
        if config.imaging:
            self.global_encoder, self.local_encoder = GlobalEncoder(shape, config), LocalEncoder(shape, config)
            self.combine = nn.Linear(config.global_width + config.local_width, config.imaging_width)  # W_p, b_p
        if config.phenotypes:
            self.phenotype_encoder = phenotype_encoder(shape.n_inputs, config)
        if not (config.imaging and config.phenotypes):  # ablations M1 and M2
            self.project = nn.Linear(config.imaging_width if config.imaging else config.phenotype_width, config.fused_width)
        elif not config.decomposition:  # ablation C1
            self.project = nn.Linear(config.imaging_width + config.phenotype_width, config.fused_width)
        else:
            self.shared_f, self.private_f = (mlp(config.imaging_width, width, width, 0.0) for _ in range(2))
            self.shared_n, self.private_n = (mlp(config.phenotype_width, width, width, 0.0) for _ in range(2))
            if config.cross_attention:
                fusion = [CrossAttention(width, config.fusion_heads, config.dropout) for _ in range(config.fusion_layers)]
                self.fusion = nn.ModuleList(fusion)
                self.gate = mlp(4 * width, width, 2, 0.0)  # MLP_g of Eq. 16
                self.output = mlp(4 * width, 2 * width, config.fused_width, config.dropout)  # MLP_o
            else:  # ablation C2
                self.project = nn.Linear(4 * width, config.fused_width)
        layers: list[nn.Module] = []
        sizes = (config.fused_width, config.fused_width // 2, config.fused_width // 4)
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(config.dropout)]
        self.classifier = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) logits."""
        return self.parts(batch)["logits"]

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits, the fused representation, and where the configuration has them the components and the gate's weights."""
        return self.decide(self.encode(batch), batch)

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        """h_global (subject, global) and h_local (subject, local); nothing where imaging is left out (M1)."""
        if not self.config.imaging:
            return ()
        return self.global_encoder(batch.series), self.local_encoder(batch.series)

    def decide(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """From the encoded scan and the phenotypes to the logits."""
        parts = self.fuse(encoded, batch)
        return parts | {"logits": self.classifier(parts["fused"])}

    def fuse(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """Eq. 8 to 10 and 14 to 16: `fused` (subject, fused), and the parts on the way to it."""
        config = self.config
        if not encoded:  # M1
            return {"fused": self.project(self.phenotype_encoder(batch.phenotypes))}
        h_fmri = functional.gelu(self.combine(torch.cat(encoded, dim=1)))  # Eq. 8, (subject, imaging)
        if not config.phenotypes:  # M2
            return {"fused": self.project(h_fmri)}
        h_ni = self.phenotype_encoder(batch.phenotypes)  # Eq. 9, (subject, phenotype)
        if not config.decomposition:  # C1
            return {"fused": self.project(torch.cat([h_fmri, h_ni], dim=1))}
        s_f, p_f = self.shared_f(h_fmri), self.private_f(h_fmri)  # Eq. 10, each (subject, shared)
        s_n, p_n = self.shared_n(h_ni), self.private_n(h_ni)
        components = {"s_f": s_f, "p_f": p_f, "s_n": s_n, "p_n": p_n}
        if not config.cross_attention:  # C2
            return components | {"fused": self.project(torch.cat([s_f, p_f, s_n, p_n], dim=1))}
        z_f, z_n = torch.stack([s_f, p_f], dim=1), torch.stack([s_n, p_n], dim=1)  # Eq. 14, (subject, 2 tokens, shared)
        for layer in self.fusion:
            z_f, z_n = layer(z_f, z_n)  # Eq. 15
        flat_f, flat_n = z_f.flatten(1), z_n.flatten(1)  # (subject, 2 shared)
        alpha = torch.softmax(self.gate(torch.cat([flat_f, flat_n], dim=1)), dim=1)  # Eq. 16, (subject, 2)
        fused = self.output(torch.cat([alpha[:, :1] * flat_f, alpha[:, 1:] * flat_n], dim=1))  # (subject, fused)
        return components | {"gate": alpha, "fused": fused}


def mlp(width: int, hidden: int, out: int, dropout: float) -> nn.Sequential:
    """Linear, GELU, linear; with dropout in between where there is any."""
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), *between, nn.Linear(hidden, out))


def time_convolution(width: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution along time of (subject, channel, time, roi) features, the same for every ROI, with same padding."""
    return nn.Conv2d(width, channels, (kernel, 1), stride=(stride, 1), padding=(kernel // 2, 0))


def gelu(features: Tensor) -> Tensor:
    """GELU by a name of our own: given PyTorch's, its transformer predicts by a fused operation that ONNX does not have."""
    return functional.gelu(features)


@method("m2lgdg", role="headline")
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
        """Group graph of the source-training subjects, Eq. 3."""
        return {"adjacency": group_graph_of(features["series"], self.percentile)} if self.imaging else {}

    def build(self, shape: Shape) -> nn.Module:
        """Network of this configuration."""
        return fast_form(Network(shape, self))

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """The contrast is between subjects of two sites."""
        return bool(self.contrastive_weight) and len(torch.unique(site)) < 2

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Total loss, Eq. 20 and 21: cross-entropy, three decomposition losses with one weight, cross-site contrast."""
        assert isinstance(network, Network)
        parts = network.parts(batch)
        terms = {"ce": self.cross_entropy(parts["logits"], batch)}  # Eq. 17
        if "s_f" in parts:
            s_f, p_f, s_n, p_n = (parts[name] for name in ("s_f", "p_f", "s_n", "p_n"))
            terms["similarity"] = self.decomposition_weight * similarity_loss(s_f, s_n)  # Eq. 11
            terms["orthogonality"] = self.decomposition_weight * orthogonality_loss(s_f, p_f, s_n, p_n)  # Eq. 12
            terms["difference"] = self.decomposition_weight * difference_loss(p_f, p_n, self.margin)  # Eq. 13
        if self.contrastive_weight:
            contrast = cross_site_contrastive_loss(parts["fused"], batch.label, batch.site, self.temperature)  # Eq. 18, 19
            terms["contrast"] = self.contrastive_weight * contrast
        return terms
