"""M²LG-DG, the paper's method: its networks and its loss, in the order of the paper, with the paper's equation numbers.

Resampling and z-scores (Eq. 2) are in `preprocess.py`, the group graph, its refinement and the Chebyshev convolution (Eq. 3, 5
and 6) in `graph.py`, the losses (Eq. 11 to 13 and 17 to 19) in `losses.py`, training in `deep.py`; `fast/m2lgdg.py` computes
the same networks in less time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape
from m2lgdg.graph import chebyshev, group_graph_of, propagation
from m2lgdg.losses import cross_site_contrastive_loss, difference_loss, orthogonality_loss, similarity_loss
from m2lgdg.method import method

# ---------------------------------------------------------------- dual-stream fMRI encoder


class GlobalEncoder(nn.Module):
    """Global encoder (Eq. 4), time before space: convolutions along each ROI's series, then a transformer over ROIs."""

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
        self.identity = nn.Parameter(config.identity_sd * torch.randn(shape.n_rois, config.hidden))  # P, ROI identity embedding
        block = nn.TransformerEncoderLayer(
            config.hidden, config.heads, 4 * config.hidden, config.dropout, activation=gelu, batch_first=True
        )
        self.transformer = nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False)
        self.output_width = config.global_width
        self.output = mlp(config.hidden, config.global_width, config.global_width, config.dropout)  # MLP_g

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> h_global (subject, global)."""
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        features = self.convolutions(features)  # (subject, channel, time / 8, roi): three poolings by 2
        h_roi = self.projection(features.permute(0, 3, 1, 2).flatten(2))  # (subject, roi, channel * time / 8) -> (.., hidden)
        z_g = h_roi + self.identity  # (subject, roi, hidden)
        tokens = self.transformer(z_g)  # (subject, roi, hidden)
        h_global: Tensor = self.output(tokens.mean(dim=1))  # mean over ROIs
        return h_global


class LocalBlock(nn.Module):
    """ST-GCN block, space before time: graph convolution (Eq. 6), temporal convolution, residual, ReLU, dropout."""

    def __init__(self, width: int, channels: int, stride: int, config: M2LGDG) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(config.chebyshev_order, width, channels))  # W_k, k = 0 to K - 1
        self.bias = nn.Parameter(torch.zeros(channels))  # b
        nn.init.xavier_uniform_(self.weights.view(-1, channels))  # the K terms are summed, so their fans add up
        self.temporal = time_convolution(channels, channels, config.temporal_kernel, stride)
        self.norm = nn.BatchNorm2d(channels)
        self.residual: nn.Module = nn.Identity()
        if width != channels or stride != 1:
            self.residual = nn.Sequential(time_convolution(width, channels, 1, stride), nn.BatchNorm2d(channels))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, operator: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel, time / stride, roi); `operator` is A hat of Eq. 5."""
        nodes = features.permute(0, 2, 3, 1)  # H at each time point, (subject, time, roi, channel)
        nodes = chebyshev(operator, nodes, self.weights, self.bias)  # Y of Eq. 6, (subject, time, roi, channel)
        filtered = self.norm(self.temporal(nodes.permute(0, 3, 1, 2)))  # (subject, channel, time / stride, roi)
        out: Tensor = self.dropout(functional.relu(filtered + self.residual(features)))
        return out


class LocalEncoder(nn.Module):
    """Local encoder (Eq. 5 to 7): ST-GCN blocks on the group graph mixed with a learned one, then global average pooling."""

    def __init__(self, shape: Shape, config: M2LGDG) -> None:
        super().__init__()
        self.adjacency: Tensor  # A_FC of Eq. 3, (roi, roi)
        self.register_buffer("adjacency", torch.from_numpy(np.array(shape.fitted["adjacency"])))
        self.edges = nn.Parameter(0.1 * torch.randn(shape.n_rois, config.edge_width))  # E, edge embeddings
        self.beta, self.order = config.beta, config.chebyshev_order
        widths = (1, *config.local_channels)
        blocks = zip(widths[:-1], widths[1:], config.local_strides, strict=True)
        self.blocks = nn.ModuleList(LocalBlock(width, channels, stride, config) for width, channels, stride in blocks)
        self.output_width = config.local_width
        self.output = mlp(widths[-1], config.local_width, config.local_width, config.dropout)  # MLP_l

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> h_local (subject, local)."""
        operator = propagation(self.adjacency, self.edges, self.beta)  # A hat, Eq. 5, (roi, roi)
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, operator)  # (subject, channel, time / stride, roi)
        h_local: Tensor = self.output(features.mean(dim=(2, 3)))  # Eq. 7; mean over time and ROIs, (subject, channel)
        return h_local


# ---------------------------------------------------------------- non-imaging encoder


def phenotype_encoder(inputs: int, config: M2LGDG) -> nn.Sequential:
    """Non-imaging encoder MLP_ni (Eq. 9): hidden layers with batch norm, GELU and dropout, then a linear layer."""
    layers: list[nn.Module] = []
    width = inputs
    for hidden in config.phenotype_hidden:
        layers += [nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Dropout(config.dropout)]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, config.phenotype_width))


# ---------------------------------------------------------------- cross-attention fusion


class CrossAttention(nn.Module):
    """Cross-attention layer (Eq. 15): fMRI tokens attend to phenotype tokens, then these to the updated fMRI tokens."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attend_f, self.attend_n = (nn.MultiheadAttention(width, heads, dropout, batch_first=True) for _ in range(2))
        self.norm_f, self.norm_n, self.norm_ff, self.norm_nn = (nn.LayerNorm(width) for _ in range(4))
        self.feed_f, self.feed_n = (mlp(width, 4 * width, width, dropout) for _ in range(2))

    def forward(self, z_f: Tensor, z_n: Tensor) -> tuple[Tensor, Tensor]:
        """(subject, token, width) tokens of fMRI and phenotypes -> the same, updated."""
        z_f = self.norm_f(z_f + self.attend_f(z_f, z_n, z_n, need_weights=False)[0])  # Z_f', MHA(query, key, value)
        z_f = self.norm_ff(z_f + self.feed_f(z_f))  # Z_f hat
        z_n = self.norm_n(z_n + self.attend_n(z_n, z_f, z_f, need_weights=False)[0])  # Z_n'
        z_n = self.norm_nn(z_n + self.feed_n(z_n))  # Z_n hat
        return z_f, z_n


# ---------------------------------------------------------------- the whole network


class Network(PartsNetwork):
    """The whole of M²LG-DG. `forward` returns the logits; `parts` also returns what losses and explanations need."""

    def __init__(self, shape: Shape, config: M2LGDG) -> None:
        super().__init__()
        self.config = config
        if config.imaging:
            self.global_encoder, self.local_encoder = self.encoders(shape)
            encoded = self.global_encoder.output_width + self.local_encoder.output_width
            self.combine = nn.Linear(encoded, config.imaging_width)  # W_p, b_p
        if config.phenotypes:
            self.phenotype_encoder = phenotype_encoder(shape.n_inputs, config)
        self.build_fusion(shape, config)
        layers: list[nn.Module] = []  # three-layer classification MLP
        sizes = (config.fused_width, config.fused_width // 2, config.fused_width // 4)
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(config.dropout)]
        self.classifier = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))

    def build_fusion(self, shape: Shape, config: M2LGDG) -> None:
        """What lies between the encoders and the classifier: psi of Eq. 10, and the layers of Eq. 15 and 16."""
        if not (config.imaging and config.phenotypes):  # ablations M1 (phenotypes only) and M2 (imaging only)
            self.project = nn.Linear(config.imaging_width if config.imaging else config.phenotype_width, config.fused_width)
        elif not config.decomposition:  # ablation C1: concatenation
            self.project = nn.Linear(config.imaging_width + config.phenotype_width, config.fused_width)
        else:
            width = config.shared_width
            self.shared_f, self.private_f = (mlp(config.imaging_width, width, width, 0.0) for _ in range(2))  # psi_f
            self.shared_n, self.private_n = (mlp(config.phenotype_width, width, width, 0.0) for _ in range(2))  # psi_n
            if config.cross_attention:
                fusion = [CrossAttention(width, config.fusion_heads, config.dropout) for _ in range(config.fusion_layers)]
                self.fusion = nn.ModuleList(fusion)
                self.gate = mlp(4 * width, width, 2, 0.0)  # the MLP_g of Eq. 16
                self.output = mlp(4 * width, 2 * width, config.fused_width, config.dropout)  # MLP_o of Eq. 16
            else:  # ablation C2: decomposition, then concatenation
                self.project = nn.Linear(4 * width, config.fused_width)

    def encoders(self, shape: Shape) -> tuple[Any, Any]:
        """The global and the local encoder, each with its `output_width`."""
        return GlobalEncoder(shape, self.config), LocalEncoder(shape, self.config)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits and fused representation, and, in configurations that have them, the four components and the gate weights."""
        return self.decide(self.encode(batch), batch)

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        """h_global (subject, global) and h_local (subject, local); empty without imaging (M1)."""
        if not self.config.imaging:
            return ()
        return self.global_encoder(batch.series), self.local_encoder(batch.series)

    def decide(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """The parts of `fuse` and the logits (subject, 2), from the encoded scan and the phenotypes."""
        parts = self.fuse(encoded, batch)
        return parts | {"logits": self.classifier(parts["fused"])}

    def fuse(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """Eq. 8 to 10 and 14 to 16: h_fused as `fused` (subject, fused), and the components and gate weights behind it."""
        config = self.config
        if not encoded:  # M1
            return {"fused": self.project(self.phenotype_encoder(batch.phenotypes))}
        h_fmri = functional.gelu(self.combine(torch.cat(encoded, dim=-1)))  # Eq. 8, (subject, imaging)
        if not config.phenotypes:  # M2
            return {"fused": self.project(h_fmri)}
        h_ni = self.phenotype_encoder(batch.phenotypes)  # Eq. 9, (subject, phenotype)
        if not config.decomposition:  # C1
            return {"fused": self.project(torch.cat([h_fmri, h_ni], dim=-1))}
        s_f, p_f = self.shared_f(h_fmri), self.private_f(h_fmri)  # Eq. 10, each (subject, shared)
        s_n, p_n = self.shared_n(h_ni), self.private_n(h_ni)  # Eq. 10
        components = {"s_f": s_f, "p_f": p_f, "s_n": s_n, "p_n": p_n}
        if not config.cross_attention:  # C2
            return components | {"fused": self.project(torch.cat([s_f, p_f, s_n, p_n], dim=-1))}
        z_f, z_n = torch.stack([s_f, p_f], dim=-2), torch.stack([s_n, p_n], dim=-2)  # Eq. 14, (subject, 2 tokens, shared)
        for layer in self.fusion:
            z_f, z_n = layer(z_f, z_n)  # Eq. 15
        flat_f, flat_n = z_f.flatten(-2), z_n.flatten(-2)  # (subject, 2 * shared)
        alpha = torch.softmax(self.gate(torch.cat([flat_f, flat_n], dim=-1)), dim=-1)  # Eq. 16, (subject, 2 modalities)
        fused = self.output(torch.cat([alpha[..., :1] * flat_f, alpha[..., 1:] * flat_n], dim=-1))  # h_fused, Eq. 16
        return components | {"gate": alpha, "fused": fused}


def mlp(width: int, hidden: int, out: int, dropout: float) -> nn.Sequential:
    """Two-layer perceptron: linear, GELU, dropout (unless it is 0), linear."""
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), *between, nn.Linear(hidden, out))


def time_convolution(width: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Convolution along time of (subject, channel, time, roi) features, with same padding and weights shared by all ROIs."""
    return nn.Conv2d(width, channels, (kernel, 1), stride=(stride, 1), padding=(kernel // 2, 0))


def gelu(features: Tensor) -> Tensor:
    """GELU as a function that PyTorch's transformer does not recognise: its fused inference path has no ONNX operator."""
    return functional.gelu(features)


@method("m2lgdg", role="headline")
class M2LGDG(DeepMethod):
    """M²LG-DG: ROI transformer and ST-GCN on series, shared-private fusion with phenotypes, cross-site contrastive loss."""

    global_channels: tuple[int, ...] = (32, 64, 128)
    global_kernels: tuple[int, ...] = (7, 5, 3)
    hidden: int = 128
    heads: int = 8
    layers: int = 2
    identity_sd: float = 0.02  # of the ROI identity embedding at the start
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
    update_rule: Literal["adamw", "adam", "sgd"] = "adamw"
    clip: float = 1.0
    label_smoothing: float = 0.1
    select_after_warmup: bool = True
    imaging: bool = True
    phenotypes: bool = True
    decomposition: bool = True
    cross_attention: bool = True

    network_class = Network
    bounds = {
        "temperature": (1e-6, math.inf),
        "percentile": (0, 100),
        "margin": (0, math.inf),
        "identity_sd": (0, math.inf),
    }
    loss_weights = {
        **dict.fromkeys(("similarity", "orthogonality", "difference"), "decomposition_weight"),
        "contrast": "contrastive_weight",
    }
    recordable = True
    may_be_empty: ClassVar[tuple[str, ...]] = ("phenotype_hidden",)
    reference = "Hasan, Zhu, Yin and Liew: M²LG-DG, a multi-modal local-global domain generalization framework"
    variants = {
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
    space = {
        "decomposition_weight": (0.001, 0.01, 0.05, 0.1, 0.15, 0.2, 0.5),
        "contrastive_weight": (0.001, 0.01, 0.05, 0.1, 0.15, 0.2, 0.5),
        "temperature": (0.01, 0.03, 0.05, 0.07, 0.1, 0.15, 0.3),
        "percentile": (60.0, 65.0, 70.0, 75.0, 80.0, 85.0, 90.0),
        "length": (150, 175, 200, 225),
    }

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """A_FC, the group graph of the source-training subjects (Eq. 3)."""
        return {"adjacency": group_graph_of(features["series"], self.percentile)} if self.imaging else {}

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Fewer than two sites: the contrastive loss has no positive pairs."""
        return bool(self.contrastive_weight) and len(torch.unique(site)) < 2

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Terms of the total loss (Eq. 20), the three decomposition losses with one weight (Eq. 21)."""
        assert isinstance(network, Network)
        parts = network.parts(batch)
        terms = {"ce": self.cross_entropy(parts["logits"], batch)}  # Eq. 17
        terms |= self.decomposition_losses(parts)
        if self.contrastive_weight:
            contrast = cross_site_contrastive_loss(parts["fused"], batch.label, batch.site, self.temperature)  # Eq. 18 and 19
            terms["contrast"] = self.contrastive_weight * contrast
        return terms

    def decomposition_losses(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The three terms of Eq. 11 to 13; none without a decomposition."""
        if "s_f" not in parts:
            return {}
        s_f, p_f, s_n, p_n = (parts[name] for name in ("s_f", "p_f", "s_n", "p_n"))
        return {
            "similarity": self.decomposition_weight * similarity_loss(s_f, s_n),  # Eq. 11
            "orthogonality": self.decomposition_weight * orthogonality_loss(s_f, p_f, s_n, p_n),  # Eq. 12
            "difference": self.decomposition_weight * difference_loss(p_f, p_n, self.margin),  # Eq. 13
        }
