"""M²LG-DG on connectomes: the framework of `m2lgdg.py` with two encoders that read functional connectivity (FC).

The token of a ROI is its row of FC, or of the log-Euclidean form of FC, and both readouts keep the ROIs; all parts after the
encoders, the graph and the losses are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, log_features
from m2lgdg.deep import Batch, PartsNetwork, Shape, total_of
from m2lgdg.graph import chebyshev, propagation, thresholded
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.methods import m2lgdg_structure
from m2lgdg.methods.blocks import standardised_block
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.methods.linear import VIEWS, note_on_connectomes
from m2lgdg.methods.linear_head import LinearHead, WithLinearHead
from m2lgdg.methods.m2lgdg import M2LGDG, gelu
from m2lgdg.methods.m2lgdg_structure import WithTables
from m2lgdg.methods.solvers import association
from m2lgdg.methods.within_sites import balance
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.scans import SERIES

LOG_EDGES = "log_edges"  # name of the feature that half of the members read
LOG_PREFIX = "log."  # of what is fitted for it

# ---------------------------------------------------------------- dual-stream encoder of connectomes


class GlobalEncoder(nn.Module):
    """Global encoder: a transformer over ROIs (Eq. 4) whose tokens are rows of FC, and a readout that keeps the ROIs."""

    def __init__(self, shape: Shape, config: M2LGDGConnectome) -> None:
        super().__init__()
        self.projection = nn.Linear(shape.n_rois, config.hidden)  # Proj
        self.identity = nn.Parameter(config.identity_sd * torch.randn(shape.n_rois, config.hidden))  # P, ROI identity embedding
        block = nn.TransformerEncoderLayer(
            config.hidden, config.heads, 4 * config.hidden, config.dropout, activation=gelu, batch_first=True
        )
        self.transformer = nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False)
        for layer in self.transformer.layers:
            layer.self_attn.dropout = 0.0  # drawing a number for each pair of ROIs would take a tenth of the time on a CPU
        self.readout = nn.Linear(config.hidden, config.readout)
        self.dropout = nn.Dropout(config.readout_dropout)
        self.output_width = shape.n_rois * config.readout

    def forward(self, rows: Tensor) -> Tensor:
        """(subject, roi, roi) -> h_global (subject, roi * readout)."""
        z_g = self.projection(rows) + self.identity  # (subject, roi, hidden)
        tokens = self.transformer(z_g)  # (subject, roi, hidden)
        return self.dropout(self.readout(tokens).flatten(1))


class GraphConvolution(nn.Module):
    """Chebyshev convolution (Eq. 6) of node features over the graph."""

    def __init__(self, width: int, channels: int, order: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(order, width, channels))  # W_k, k = 0 to K - 1
        self.bias = nn.Parameter(torch.zeros(channels))  # b
        nn.init.xavier_uniform_(self.weights.view(-1, channels))  # the K terms are summed, so their fans add up

    def forward(self, nodes: Tensor, operator: Tensor) -> Tensor:
        """(subject, roi, width) -> (subject, roi, channel); `operator` is A hat of Eq. 5."""
        return chebyshev(operator, nodes, self.weights, self.bias)


class LocalEncoder(nn.Module):
    """Local encoder: Chebyshev convolutions (Eq. 5 and 6) of rows of FC over the group graph, ROIs kept."""

    def __init__(self, shape: Shape, config: M2LGDGConnectome) -> None:
        super().__init__()
        self.adjacency: Tensor  # A_FC of Eq. 3, (roi, roi)
        self.register_buffer("adjacency", torch.from_numpy(np.array(shape.fitted["adjacency"])))
        self.edges = nn.Parameter(0.1 * torch.randn(shape.n_rois, config.edge_width))  # E, edge embeddings
        self.beta = config.beta
        widths = (shape.n_rois, *config.local_channels, config.readout)
        self.layers = nn.ModuleList(GraphConvolution(*pair, config.chebyshev_order) for pair in pairwise(widths))
        self.between, self.dropout = nn.Dropout(config.dropout), nn.Dropout(config.readout_dropout)
        self.output_width = shape.n_rois * config.readout

    def forward(self, rows: Tensor) -> Tensor:
        """(subject, roi, roi) -> h_local (subject, roi * readout)."""
        operator = propagation(self.adjacency, self.edges, self.beta)  # A hat, Eq. 5, (roi, roi)
        nodes = rows
        for i, layer in enumerate(self.layers):
            nodes = layer(self.between(functional.relu(nodes)) if i else nodes, operator)  # (subject, roi, channel)
        return self.dropout(nodes.flatten(1))


# ---------------------------------------------------------------- the whole network


class Network(m2lgdg_structure.Network):
    """M²LG-DG with these two encoders. FC is centred and scaled first, with values of source.

    A network of log-Euclidean edges has their values instead (`prefix`); `Members` gives it these edges in place of FC.
    """

    config: M2LGDGConnectome

    def __init__(self, shape: Shape, config: M2LGDGConnectome, prefix: str = "") -> None:
        super().__init__(shape, config)
        if not config.imaging:
            return
        for name in ("mean", "scale", "slopes"):  # (edge,), (edge,) and (input, edge); a model stores them once, as fitted
            self.register_buffer(name, torch.from_numpy(np.array(shape.fitted[f"{prefix}{name}"])), persistent=False)
        edge = torch.zeros(shape.n_rois, shape.n_rois, dtype=torch.int64)
        above = torch.triu_indices(shape.n_rois, shape.n_rois, 1)
        edge[above[0], above[1]] = edge[above[1], above[0]] = torch.arange(len(above[0]))
        self.register_buffer("edge", edge, persistent=False)  # (roi, roi) number of each edge
        self.register_buffer("off_diagonal", 1 - torch.eye(shape.n_rois), persistent=False)

    def encoders(self, shape: Shape) -> tuple[Any, Any]:
        return GlobalEncoder(shape, self.config), LocalEncoder(shape, self.config)

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        if not self.config.imaging:
            return ()
        rows = self.rows(batch)
        return self.global_encoder(rows), self.local_encoder(rows)

    def rows(self, batch: Batch) -> Tensor:
        """(subject, roi, roi) FC less confounds and the mean of source, in the scale of each edge; 0 on the diagonal."""
        config, fc = self.config, batch[self.config.view]  # (subject, edge)
        if config.confounds and batch.phenotypes.shape[1]:
            fc = fc - batch.phenotypes @ self.get_buffer("slopes")
        fc = (fc - self.get_buffer("mean")) * self.get_buffer("scale")
        fc = functional.dropout(fc, config.edge_dropout, self.training)
        rows = fc[:, self.get_buffer("edge")]  # (subject, roi, roi)
        return rows * self.get_buffer("off_diagonal")


def fc_members(members: int) -> int:
    """How many members read FC where the others read log-Euclidean edges: half, and one more if they are odd."""
    return -(-members // 2)


class Members(PartsNetwork):
    """Networks trained side by side, each from its own initial weights, on its own batches; their logits are averaged.

    The first half reads FC; the others read log-Euclidean edges, if these were fitted.
    """

    def __init__(self, shape: Shape, config: M2LGDGConnectome) -> None:
        super().__init__()
        self.of_fc = fc_members(config.members) if f"{LOG_PREFIX}mean" in shape.fitted else config.members
        prefixes = [LOG_PREFIX if i >= self.of_fc else "" for i in range(config.members)]
        self.networks = nn.ModuleList(Network(shape, config, prefix) for prefix in prefixes)
        self.points_at_once = max(16, 2**20 // shape.n_rois**2)  # of integrated gradients: 0.2 to 0.3 GB

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the gate's weights."""
        first: Any = self.networks[0]
        return cast(tuple[str, ...], first.modalities)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        each = self.member_parts(self.views(batch))
        means = {name: each[name].mean(dim=0) for name in ("logits", "gate") if name in each}
        return means | {"fused": each["fused"].transpose(0, 1).flatten(1)}  # (subject, member * fused)

    def views(self, batch: Batch) -> list[Batch]:
        """What each network reads of the same subjects."""
        return [batch] * self.of_fc + [self.of_logarithms(batch)] * (len(self.networks) - self.of_fc)

    def member_parts(self, views: list[Batch]) -> dict[str, Tensor]:
        """(member, subject, ...) parts of all networks, each of what it reads of the same subjects."""
        networks = cast(Iterable[Any], self.networks)
        each = [network.parts(view) for network, view in zip(networks, views, strict=True)]
        return {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def of_logarithms(self, batch: Batch) -> Batch:
        """Subjects with their log-Euclidean edges in place of FC; unchanged if no network reads these."""
        if self.of_fc == len(self.networks):
            return batch
        first: Any = self.networks[0]
        return replace(batch, features={**batch.features, first.config.view: batch[LOG_EDGES]})

    def baselines(self) -> dict[str, Tensor]:
        """Means of source, from which integrated gradients start: the network sees deviations from them."""
        first, last = cast(Any, self.networks[0]), cast(Any, self.networks[-1])
        if not first.config.imaging:
            return {}
        logarithms = {LOG_EDGES: last.mean} if self.of_fc < len(self.networks) else {}
        return {first.config.view: first.mean} | logarithms

    def each(self, function: Callable[[nn.Module, Batch], dict[str, Tensor]], batch: Batch) -> dict[str, Tensor]:
        """(member,) results of a function of each network and its rows of the batch: equally many rows each, in order."""
        size = len(batch) // len(self.networks)
        rows = torch.split(torch.arange(len(batch), device=batch.label.device), size)
        results = [function(network, batch.take(some)) for network, some in zip(self.networks, rows, strict=True)]
        return {name: torch.stack([one[name] for one in results]) for name in results[0]}

    def updated(self) -> Iterable[nn.Parameter]:
        """What an optimizer updates."""
        return self.parameters()

    def clip(self, largest: float) -> None:
        """Scale the gradient of each network down to this norm."""
        for network in self.networks:
            nn.utils.clip_grad_norm_(network.parameters(), largest)


class MembersAndLinearModel(LinearHead, Members):
    """Variant `plus`."""


@method("m2lgdg-connectome")
class M2LGDGConnectome(WithTables, WithLinearHead, M2LGDG):
    """M²LG-DG on rows of FC: site-centred edges, scaled by a power of their association with the label, several members.

    In training, FC is centred by site; a target subject is centred by the mean of source. Each edge is scaled by a power of
    its association with the label in source, and edges are dropped at random. The last epoch is kept. FC is frame-weighted as
    in `connectome-adaptive`; on connectomes it is plain FC. Half of the members read the log-Euclidean form of FC of that
    method instead, centred by the mean of source and with equal scales.
    Tables of brain structure are further modalities (`m2lgdg_structure.py`); variant `no-structure` takes none, and variant
    `structure` nothing else.
    Variant `scan` takes the scan alone. Variant `plus` decides by the mean of two calibrated logits: that of the network and
    that of `connectome-adaptive`. Variant `quick` has two members and 20 epochs, which is a quarter of the time.
    """

    hidden: int = 32
    heads: int = 4
    layers: int = 1
    local_channels: tuple[int, ...] = (64,)
    readout: int = 8  # numbers that each readout keeps for a ROI
    readout_dropout: float = 0.8
    connectivity: Literal["fc", "steady"] = "steady"  # of all time points alike, or frame-weighted; see `view`
    centring: Literal["site", "source"] = "site"  # in training
    scaling: Literal["association", "sd"] = "association"
    scaling_power: float = 3.0  # of the association; above 1, the network sees little of weakly associated edges
    confounds: tuple[str, ...] = ()  # phenotypes regressed out of edges, within sites
    edge_dropout: float = 0.5
    log_euclidean: bool = True  # half of the members read rows of the log-Euclidean form of FC, of equal scales
    tables: str | tuple[str, ...] = "all"  # of brain structure: "all", "none", or their names
    table_dropout: float = 0.5  # of columns
    members: int = 4
    plus: bool = False
    epochs: int = 40
    warmup: int = 5
    learning_rate: float = 1e-3
    weight_decay: float = 1.0
    validation_share: float = 0.05

    takes = ANY_SCAN
    bounds = {
        "scaling_power": (0, math.inf),
        **dict.fromkeys(("readout_dropout", "edge_dropout", "table_dropout"), (0, 1)),
    }
    may_be_empty = ("phenotype_hidden", "local_channels", "confounds", "tables")
    unused = (
        *("length", "global_channels", "global_kernels", "global_width", "local_strides", "local_width", "temporal_kernel"),
        *("patience", "select_after_warmup"),
    )
    reference = "beyond the paper: docs/choosing.md"
    variants = {
        **{name: M2LGDG.variants[name] for name in ("M1", "C1", "C2", "C3", "C4")},
        "M2": {**M2LGDG.variants["M2"], "tables": "none"},
        "scan": {"phenotypes": False, "tables": "none"},
        "structure": {"imaging": False, "phenotypes": False},
        "no-phenotypes": {"phenotypes": False},
        "no-structure": {"tables": "none"},
        "plus": {"plus": True},
        "quick": {"members": 2, "epochs": 20, "warmup": 3},
        "small": {
            **{"hidden": 16, "local_channels": (16,), "readout": 4, "imaging_width": 64, "phenotype_hidden": (16, 16)},
            **{"phenotype_width": 16, "shared_width": 32, "fusion_layers": 1, "fused_width": 32, "batch_size": 16},
            **{"learning_rate": 1e-3, "dropout": 0.0, "readout_dropout": 0.5, "edge_dropout": 0.0, "epochs": 12, "warmup": 2},
            **{"members": 2, "validation_share": 0.15},
        },
    }
    space = {
        **{name: M2LGDG.space[name] for name in ("decomposition_weight", "contrastive_weight", "temperature", "percentile")},
        "scaling_power": (1.0, 1.5, 2.0, 3.0, 4.0),
    }

    _source = cast(Cohort | None, None)  # in training only, as are the offsets of its sites, (site, feature) by feature
    _offsets = cast(dict[str, Tensor] | None, None)

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        self._source = source
        try:
            super().learn(source, seed=seed, device=device, progress=progress)
        finally:
            self._source = self._offsets = None
        own = {"steady": 1.0} if self.imaging and self.connectivity == "steady" else {}
        if note := note_on_connectomes(own | (ConnectomeAdaptive.blocks if self.plus else {}), self.trained_on):
            self.facts_["notes"].append(note)

    @property
    def view(self) -> str:
        """The field `connectivity`; "fc" on connectomes, of which no other FC can be had."""
        return self.connectivity if self.trained_on == SERIES else "fc"

    # ------------------------------------------------------------ inputs

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        """In variant `plus`, after training, also those of the linear model."""
        own = {self.view: fc_features(cohort.scans, VIEWS[self.view])} if self.imaging else {}
        if self._reads_logarithms():
            n = len(cohort.rois)
            own[LOG_EDGES] = log_features(cohort.scans)[:, np.not_equal(*np.triu_indices(n))]  # without the diagonal
        linear = self.linear_features(cohort) if self.plus and self._source is None else {}
        return {name: torch.from_numpy(value) for name, value in (own | self.table_features(cohort) | linear).items()}

    def _reads_logarithms(self) -> bool:
        """Whether some members read log-Euclidean edges; those of a model of 0.1.0 do not."""
        if self._source is None:
            return f"fitted.{LOG_PREFIX}mean" in self.state_
        return self.log_euclidean and self.imaging and self.members > 1

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """The group graph (Eq. 3), and mean, scale and confound slopes of each edge; the offsets of sites are not saved."""
        assert self._source is not None
        self._offsets = self.table_offsets(self._source, next(iter(features.values())).device) if features else {}
        further = self.table_columns() | (self.linear_weights(train) if self.plus else {})
        if not self.imaging:
            return further
        fitted = self.fit_edges(self.view, train, features, self.centring, self.scaling_power)
        if LOG_EDGES in features:  # not chosen by labels and not by sites: members of both kinds then err at other subjects
            of_logarithms = self.fit_edges(LOG_EDGES, train, features, "source", 0.0)
            fitted |= {f"{LOG_PREFIX}{name}": value for name, value in of_logarithms.items()}
        edges = features[self.view].cpu().numpy()  # (subject, edge)
        correlation = np.tanh(edges).mean(axis=0, dtype=np.float64)  # (edge,); the paper's graph is of mean correlations
        return {"adjacency": self.group_graph(correlation, len(train.rois)), **fitted, **further}

    def fit_edges(
        self, feature: str, train: Cohort, features: Mapping[str, Tensor], centring: str, power: float
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Mean, scale and confound slopes of each edge of a feature; keeps the offsets of sites for the training."""
        assert self._source is not None and self._offsets is not None
        edges = features[feature].cpu().numpy()  # (subject, edge)
        weights = balance(train)  # of patients and controls, within each site
        scaler = PhenotypeScaler.fit(train, self.facts_["inputs"])
        columns = [i for i, name in enumerate(self.facts_["inputs"]) if name in self.confounds]
        confounds = scaler.transform(train)[:, columns] if columns else None
        rows, centre, spread, slopes = standardised_block(edges, train, weights, centring == "site", confounds)
        signs = np.where(train.labels == 1, 1.0, -1.0)
        scale = np.ones_like(spread)
        if self.scaling == "association":
            scale = self.edge_scale(association(rows.trained.astype(np.float64), signs, weights), power)
        offsets = np.zeros((len(self._source.site_names), len(centre)))
        offsets[[self._source.site_names.index(site) for site in np.unique(train.sites)]] = rows.shift * spread
        self._offsets[feature] = torch.from_numpy(offsets.astype(np.float32)).to(features[feature].device)
        all_slopes = np.zeros((len(self.facts_["inputs"]), len(centre)))
        if slopes is not None:
            all_slopes[columns] = slopes
        fitted = {"mean": centre, "scale": scale / spread, "slopes": all_slopes}
        return {name: value.astype(np.float32) for name, value in fitted.items()}

    def edge_scale(self, strength: npt.NDArray[np.float64], power: float) -> npt.NDArray[np.float64]:
        """(edge,) scales: a power of the association, with the same mean square for any power."""
        scale = strength**power
        scale *= np.sqrt((strength**2).mean() / (scale**2).mean())
        return scale

    def group_graph(self, correlation: npt.NDArray[np.float64], n_rois: int) -> npt.NDArray[np.float32]:
        group, above = np.zeros((n_rois, n_rois)), np.triu_indices(n_rois, 1)
        group[above] = correlation
        return thresholded(group + group.T, self.percentile)

    def build(self, shape: Shape) -> nn.Module:
        return MembersAndLinearModel(shape, self) if self.plus else Members(shape, self)

    # ------------------------------------------------------------ training

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Rows for each member in turn, which goes through the subjects in its own order."""
        orders = [super(M2LGDGConnectome, self).batches(site, label, order) for _ in range(self.members)]
        return [torch.cat(rows) for rows in zip(*orders, strict=True)]

    def candidate(self, epoch: int) -> bool:
        """Only the last epoch: with scaled edges, selecting one on validation subjects cost more than it gained."""
        return epoch == self.epochs - 1

    def centred(self, batch: Batch) -> Batch:
        """Training subjects, moved by the offset of their site from the mean of source; not by that of a table they lack.

        FC of the rows of members that read log-Euclidean edges is replaced by these.
        """
        assert self._offsets is not None
        offsets, edges = dict(self._offsets), LOG_EDGES
        moved: dict[str, Tensor] = {}
        if (of_logarithms := offsets.pop(edges, None)) is not None:
            of_fc, fc = fc_members(self.members) * (len(batch) // self.members), offsets.pop(self.view)
            of_first = batch[self.view][:of_fc] - fc[batch.site[:of_fc]]  # (subject, edge)
            moved[self.view] = torch.cat([of_first, batch[edges][of_fc:] - of_logarithms[batch.site[of_fc:]]])
        moved |= {name: batch[name] - offset[batch.site] for name, offset in offsets.items()}
        for name in self._shifts:
            moved[name] = moved[name] * batch[name].any(dim=1, keepdim=True)
        return replace(batch, features=moved)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """In one fused operation."""
        members: Any = network
        return self.updating(members.updated(), fused=True)

    def member_losses(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        members: Any = network
        terms: dict[str, Tensor] = members.each(super().loss, self.centred(batch))
        return terms

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {name: term.mean() for name, term in self.member_losses(network, batch).items()}

    def step(self, network: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """One update of every member by its own loss, with its own gradient norm."""
        optimizer.zero_grad(set_to_none=True)
        with self.autocast(batch.label.device):
            terms = self.member_losses(network, batch)
        total_of(terms).backward()  # type: ignore[no-untyped-call]
        members: Any = network
        if self.clip:
            members.clip(self.clip)
        optimizer.step()
        return {name: term.detach().mean() for name, term in terms.items()}
