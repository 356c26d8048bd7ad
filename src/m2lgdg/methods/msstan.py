"""MSSTAN: a graph of each sliding window, a transformer that sees its edges, three poolings, attention over the windows.

The whole of the method, from top to bottom in the order in which a scan passes: windows, edges, transformer, poolings,
temporal attention, head. Training is `deep.py`'s; window graphs are made anew in each pass, since all of them would fill a
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from m2lgdg.deep import Batch, DeepMethod, Shape
from m2lgdg.losses import normalised
from m2lgdg.method import method
from m2lgdg.storage import InputError

ITSELF = -5e4  # finite, so that a window without any other still attends to itself


def window_points(length: int, share: float, stride: int) -> int:
    """Points of a window: a share of the length, but so few that two windows fit."""
    points = min(round(share * length), length - stride - 1)
    if stride < 1 or points < 3:
        raise InputError(f"method msstan: no two windows of three points or more with window {share}, stride {stride}.")
    return points


def window_correlations(series: Tensor, points: int, stride: int) -> Tensor:
    """(subject, roi, time) -> (subject, window, roi, roi) Pearson correlations in float32; 0 with a ROI that is flat there."""
    with torch.autocast(series.device.type, enabled=False):
        # As published a window ends before the last point, never on it: 50 windows, not 51, of 100 points in 200.
        windows = series[..., :-1].float().unfold(-1, points, stride).transpose(1, 2)  # (subject, window, roi, point)
        flat = windows.amax(-1, keepdim=True) == windows.amin(-1, keepdim=True)  # its mean may be off by rounding
        unit = normalised((windows - windows.mean(-1, keepdim=True)).masked_fill(flat, 0.0))
        return unit @ unit.mT


@torch.no_grad()
def strongest_edges(correlations: Tensor, density: float) -> Tensor:
    """(..., roi, roi) binary graphs: correlations above the quantile of those over the diagonal, and self loops.

    The quantile is the value that `ceil(density (edges - 1))` others exceed where there are no ties, so the interpolated
    quantile gives the same edges; values that tie with it are all left out, whatever their order.
    """
    rois = correlations.shape[-1]
    row, column = torch.triu_indices(rois, rois, 1, device=correlations.device)
    values = correlations.flatten(-2).index_select(-1, row * rois + column)  # (..., edge)
    kept = math.ceil(density * (len(row) - 1) - 1e-9)
    threshold = values.topk(kept + 1, sorted=False).values.amin(-1)
    above = (correlations > threshold[..., None, None]).triu(1)
    itself = torch.eye(rois, dtype=torch.bool, device=correlations.device)
    return (above | above.mT | itself).to(correlations.dtype)


class TopologyTransformer(nn.Module):
    """One transformer layer among the ROIs of a window; an edge adds 1 to its attention logit."""

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
        share = torch.softmax(query @ self.key(features).mT + graph, dim=-1)  # (window, roi, other roi)
        features = self.norm_attention(features + self.output(self.dropout(share) @ self.value(features)))
        refined: Tensor = self.norm_feed(features + self.feed(features))
        return refined


class Pooling(nn.Module):
    """One scale: the ROIs with the highest scores of a graph isomorphism layer, weighted by them; their mean and maximum."""

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
        # Ranked before the tanh, which makes large scores equal in single precision.
        order = score.argsort(dim=1, descending=True, stable=True)[:, : self.kept]  # (window, kept)
        chosen = features.gather(1, order[..., None].expand(-1, -1, features.shape[-1]))  # (window, kept, width)
        kept = chosen * torch.tanh(score.gather(1, order))[..., None]
        return torch.cat([kept.mean(dim=1), kept.amax(dim=1)], dim=-1)


class TemporalAttention(nn.Module):
    """Softmax attention over the windows with one projection for queries and keys; a window looks at all others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.output = nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        """(subject, window, width) -> the same."""
        query = self.query(sequence)
        logits = query @ normalised(query).mT / math.sqrt(sequence.shape[-1])  # (subject, window, other window)
        itself = torch.eye(sequence.shape[1], dtype=torch.bool, device=sequence.device)
        share = torch.softmax(logits.float().masked_fill(itself, ITSELF), dim=-1)
        attended: Tensor = self.output(share @ self.value(sequence))
        return attended


class Network(nn.Module):
    """All of MSSTAN; `parts` returns the logits and the representation that the head sees."""

    def __init__(self, shape: Shape, config: MSSTAN) -> None:
        super().__init__()
        width = shape.n_rois  # a ROI's features are its row of correlations
        self.points, self.stride = window_points(shape.length, config.window, config.stride), config.stride
        self.density = config.density
        self.transformer = TopologyTransformer(width, config.dropout)
        self.poolings = nn.ModuleList(Pooling(width, max(1, int(share * width + 1e-9))) for share in config.scales)
        self.temporal = nn.ModuleList(TemporalAttention(2 * width) for _ in config.scales)
        first, second = config.head
        self.head = nn.Sequential(
            nn.Linear(2 * width, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2)
        )

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) logits."""
        return self.parts(batch)["logits"]

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """Logits and the fused representation (subject, 2 roi)."""
        correlations = window_correlations(batch.series, self.points, self.stride)  # (subject, window, roi, roi)
        subjects, windows = correlations.shape[:2]
        rows = correlations.flatten(0, 1)  # (subject window, roi, roi)
        graph = strongest_edges(rows, self.density)
        features = self.transformer(rows, graph)
        with torch.autocast(rows.device.type, enabled=False):  # scores are ranked, and in bfloat16 many would tie
            features = features.float()
            neighbours = graph @ features
            pooled = [pooling(features, neighbours).view(subjects, windows, -1) for pooling in self.poolings]
        attended = [attend(one) for attend, one in zip(self.temporal, pooled, strict=True)]  # (subject, window, 2 roi) each
        fused = torch.stack(attended).sum(dim=0).mean(dim=1)
        return {"fused": fused, "logits": self.head(fused)}


@method("msstan")
class MSSTAN(DeepMethod):
    """Multi-scale spatial-temporal attention network over the connectivity of sliding windows.

    Mended: the released focal loss cannot tell the classes apart (class-weighted cross-entropy here), its early stopping
    looks at the test fold (source validation here), its residuals skip the block's input (x = LN(x + O), x = LN(x + FFN(x))
    here), and a ReLU before tanh ties many pooling scores at 0 (left out here).
    Replaced: hashed attention in two buckets by the exact softmax attention it stands for, hence no window of zeros either.
    Read so: all linear layers have a bias but the temporal query and value, and epsilon is learned (622,946 parameters);
    one head in both attentions; Xavier uniform; weight decay is Adam's own.
    500 epochs with patience 100 at a constant rate became 100 with patience 20, for the loop's rate falls to 0.
    A window is a share of the length, for scans are brought to one length.
    """

    epochs: int = 100
    patience: int = 20
    batch_size: int = 64
    learning_rate: float = 3e-4
    weight_decay: float = 1e-3
    window: float = 0.5
    stride: int = 2
    density: float = 0.2
    scales: tuple[float, ...] = (0.3, 0.5, 0.7)
    head: tuple[int, int] = (32, 16)

    reference: ClassVar[str] = (
        "Kong, Zhang, Wang, Zhou, Li and Yuan (2024): Multi-scale spatial-temporal attention networks for functional "
        "connectome classification, IEEE Transactions on Medical Imaging, doi:10.1109/TMI.2024.3448214"
    )
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"small": {"learning_rate": 3e-3, "stride": 4}}
    space: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "window": (0.3, 0.4, 0.5, 0.6, 0.7),
        "density": (0.1, 0.15, 0.2, 0.25, 0.3),
    }

    def build(self, shape: Shape) -> nn.Module:
        """The network of this configuration."""
        return Network(shape, self)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Adam as published, its decay part of the gradient."""
        return torch.optim.Adam(network.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
