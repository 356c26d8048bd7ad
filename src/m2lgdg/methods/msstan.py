"""MSSTAN: sliding-window graphs, a graph transformer, pooling at three scales, and attention over the windows.

Window graphs are recomputed in each pass, since all of them together would fill a device's memory.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, with_phenotypes
from m2lgdg.losses import normalised
from m2lgdg.method import method
from m2lgdg.storage import InputError

ITSELF = -5e4  # finite, so that a single window can still attend to itself


def window_points(length: int, fraction: float, stride: int) -> int:
    """Time points of a window: a fraction of the length, reduced where two windows would not fit."""
    points = min(round(fraction * length), length - stride - 1)
    if stride < 1 or points < 3:
        raise InputError(
            f"method msstan: window {fraction} and stride {stride} do not give two windows of at least three points."
        )
    return points


def window_correlations(series: Tensor, points: int, stride: int) -> Tensor:
    """(subject, roi, time) -> (subject, window, roi, roi) Pearson correlations in float32; 0 for ROIs flat in the window."""
    with torch.autocast(series.device.type, enabled=False):
        # As published, windows end before the last time point: 50 windows, not 51, of 100 points in 200.
        windows = series[..., :-1].float().unfold(-1, points, stride).transpose(1, 2)  # (subject, window, roi, point)
        flat = windows.amax(-1, keepdim=True) == windows.amin(-1, keepdim=True)  # exact, where the mean has rounding errors
        unit = normalised((windows - windows.mean(-1, keepdim=True)).masked_fill(flat, 0.0))
        return unit @ unit.mT


@torch.no_grad()
def strongest_edges(correlations: Tensor, density: float) -> Tensor:
    """(..., roi, roi) binary graphs: correlations above a quantile of the upper triangle, and self-loops.

    The threshold is the value that `ceil(density (edges - 1))` others exceed; values that tie with it are all left out.
    """
    rois = correlations.shape[-1]
    row, column = torch.triu_indices(rois, rois, 1, device=correlations.device)
    values = correlations.flatten(-2).index_select(-1, row * rois + column)  # (..., edge)
    count = math.ceil(density * (len(row) - 1) - 1e-9)
    threshold = values.topk(count + 1, sorted=False).values.amin(-1)
    above = (correlations > threshold[..., None, None]).triu(1)
    itself = torch.eye(rois, dtype=torch.bool, device=correlations.device)
    return (above | above.mT | itself).to(correlations.dtype)


class TopologyTransformer(nn.Module):
    """Transformer layer over the ROIs of a window; an edge adds 1 to the attention logit."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, graph: Tensor) -> Tensor:
        """(window, roi, width) features and (window, roi, roi) graphs -> (window, roi, width)."""
        query = self.query(features) / math.sqrt(features.shape[-1])
        attention = torch.softmax(query @ self.key(features).mT + graph, dim=-1)  # (window, roi, other roi)
        features = self.norm_attention(features + self.output(self.dropout(attention) @ self.value(features)))
        return self.norm_feed(features + self.feed(features))


class Pooling(nn.Module):
    """Pooling at one scale: mean and maximum of the ROIs with the highest graph-isomorphism scores, weighted by them."""

    def __init__(self, width: int, kept: int) -> None:
        super().__init__()
        hidden = max(width // 2, 1)
        self.kept = kept
        self.epsilon = nn.Parameter(torch.zeros(1))
        self.score = nn.Sequential(
            nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.BatchNorm1d(1)
        )

    def forward(self, features: Tensor, neighbours: Tensor) -> Tensor:
        """(window, roi, width) features and sums over neighbours -> (window, 2 width)."""
        rows = (neighbours + self.epsilon * features).flatten(0, 1)  # (window roi, width)
        score = self.score(rows).view(features.shape[:2])  # (window, roi)
        # Ranked before the tanh, which saturates in single precision.
        order = score.argsort(dim=1, descending=True, stable=True)[:, : self.kept]  # (window, kept)
        chosen = features.gather(1, order[..., None].expand(-1, -1, features.shape[-1]))  # (window, kept, width)
        kept = chosen * torch.tanh(score.gather(1, order))[..., None]
        return torch.cat([kept.mean(dim=1), kept.amax(dim=1)], dim=-1)


class TemporalAttention(nn.Module):
    """Softmax attention of each window to all others, with one projection for queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.output = nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        """(subject, window, width) -> (subject, window, width)."""
        query = self.query(sequence)
        logits = query @ normalised(query).mT / math.sqrt(sequence.shape[-1])  # (subject, window, other window)
        itself = torch.eye(sequence.shape[1], dtype=torch.bool, device=sequence.device)
        attention = torch.softmax(logits.float().masked_fill(itself, ITSELF), dim=-1)
        return self.output(attention @ self.value(sequence))


class Network(PartsNetwork):
    """The whole of MSSTAN; `parts` returns the logits and the input of the head (`fused`)."""

    def __init__(self, shape: Shape, config: MSSTAN) -> None:
        super().__init__()
        width = shape.n_rois  # a ROI's features are its row of correlations
        self.points, self.stride = window_points(shape.length, config.window, config.stride), config.stride
        self.density = config.density
        self.transformer = TopologyTransformer(width, config.dropout)
        self.poolings = nn.ModuleList(Pooling(width, max(1, int(scale * width + 1e-9))) for scale in config.scales)
        self.temporal = nn.ModuleList(TemporalAttention(2 * width) for _ in config.scales)
        first, second = config.head
        self.head = nn.Sequential(
            nn.Linear(2 * width, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second + shape.n_inputs, 2)
        )
        self.inputs = shape.n_inputs

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        correlations = window_correlations(batch.series, self.points, self.stride)  # (subject, window, roi, roi)
        subjects, windows = correlations.shape[:2]
        rows = correlations.flatten(0, 1)  # (subject window, roi, roi)
        graph = strongest_edges(rows, self.density)
        features = self.transformer(rows, graph)
        with torch.autocast(rows.device.type, enabled=False):  # scores are ranked, and in bfloat16 many would tie
            features = features.float()
            neighbours = graph @ features
            pooled = [pooling(features, neighbours).view(subjects, windows, -1) for pooling in self.poolings]
        attended = [
            attend(windowed) for attend, windowed in zip(self.temporal, pooled, strict=True)
        ]  # (subject, window, 2 roi) each
        fused = torch.stack(attended).sum(dim=0).mean(dim=1)
        hidden = with_phenotypes(self.head[:-1](fused), batch, self.inputs)
        return {"fused": fused, "logits": self.head[-1](hidden)}


@method("msstan")
class MSSTAN(DeepMethod):
    """MSSTAN: graph transformer, multi-scale pooling and temporal attention on sliding-window FC; source sites pooled.

    Differs from the release: class-weighted cross-entropy replaces its focal loss, which cannot distinguish the classes; early
    stopping uses source validation, not the test fold; residuals include the block's input (x = LN(x + O), x = LN(x + FFN(x)));
    no ReLU before the tanh of pooling scores, which tied many of them at 0.
    Differs from the publication: exact softmax attention replaces hashed attention in two buckets, which approximates it, hence
    no window of zeros; 100 epochs with patience 20 instead of 500 with patience 100, because the learning rate decays to 0; a
    window is a fraction of the length, because scans are resampled to one length.
    Interpretation: all linear layers but the temporal query and value have a bias, and epsilon is learned (622,946 parameters);
    one head in both attentions; Xavier uniform initialisation; weight decay is Adam's.
    """

    batch_size: int = 64
    learning_rate: float = 3e-4
    weight_decay: float = 1e-3
    window: float = 0.5
    stride: int = 2
    density: float = 0.2
    scales: tuple[float, ...] = (0.3, 0.5, 0.7)
    head: tuple[int, int] = (32, 16)
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    reference = (
        "Kong, Zhang, Wang, Zhou, Li and Yuan (2024): Multi-scale spatial-temporal attention networks for functional "
        "connectome classification, IEEE Transactions on Medical Imaging, doi:10.1109/TMI.2024.3448214"
    )
    variants = {
        "phenotypes": {"phenotypes": True},
        "small": {"learning_rate": 3e-3, "stride": 4},
    }
    space = {
        "window": (0.3, 0.4, 0.5, 0.6, 0.7),
        "density": (0.1, 0.15, 0.2, 0.25, 0.3),
    }
