"""MM-GTUNets: a population graph of source subjects by phenotype and FC, with two graph U-Nets that target subjects query.

In the order of the data: what is fitted on source-training subjects, affinity, transformer convolution, U-Net, fusion, losses.
A target subject is a query: it reads the source nodes and itself, and changes none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.preprocess import CATEGORICAL, PhenotypeScaler

Arrays = Mapping[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]
ENCODER = ("hidden.weight", "hidden.bias", "mean.weight", "mean.bias")  # parameters of the VAE that are saved


def recursive_elimination(
    features: Floats, label: npt.NDArray[np.int8], wanted: int, step: int, penalty: float
) -> npt.NDArray[np.int64]:
    """Positions of the `wanted` features that remain when those of the smallest ridge weights are removed, `step` at a time."""
    from scipy.linalg import solve

    centred, targets = features - features.mean(axis=0), 2.0 * label - 1  # centring one side is enough
    kernel = centred @ centred.T  # (subject, subject)
    remaining = np.ones(features.shape[1], dtype=bool)
    while remaining.sum() > wanted:
        weight = solve(kernel + penalty * np.eye(len(kernel)), targets, assume_a="pos") @ centred  # (feature,)
        size = np.where(remaining, weight**2, np.inf)
        removed = np.argsort(size, kind="stable")[: min(step, int(remaining.sum()) - wanted)]
        kernel -= centred[:, removed] @ centred[:, removed].T
        remaining[removed] = False
    return np.flatnonzero(remaining)


class PhenotypeVAE(nn.Module):
    """Variational autoencoder that maps phenotype codes in [0, 1] to the width of the imaging features."""

    def __init__(self, codes: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(codes, hidden)
        self.mean, self.log_variance = (nn.Linear(hidden, latent) for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, codes), nn.Sigmoid())

    def loss(self, codes: Tensor, noise: Tensor, kl_weight: float) -> Tensor:
        """Summed squared reconstruction error plus the weighted divergence from the standard normal."""
        hidden = functional.relu(self.hidden(codes))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)  # (subject, latent)
        decoded = self.decoder(mean + noise * torch.exp(log_variance / 2))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (decoded - codes).square().sum() + kl_weight * divergence

    def pretrain(self, codes: Tensor, epochs: int, patience: int, rate: float, weight_decay: float, kl_weight: float) -> None:
        """Full-batch Adam with early stopping on the training loss."""
        optimizer = torch.optim.Adam(self.parameters(), lr=rate, weight_decay=weight_decay)
        best, best_epoch = math.inf, 0
        for epoch in range(epochs):
            optimizer.zero_grad(set_to_none=True)
            noise = torch.randn(len(codes), self.mean.out_features, device=codes.device)
            loss: Any = self.loss(codes, noise, kl_weight)
            loss.backward()
            optimizer.step()
            if loss.item() < best:
                best, best_epoch = loss.item(), epoch
            elif epoch - best_epoch >= patience:
                break


class Nodes(NamedTuple):
    """Subjects as nodes of the graph."""

    imaging: Tensor  # (node, feature) selected FC edges, z-scored with source statistics
    latent: Tensor  # (node, feature) latent mean of the phenotype VAE
    phenotypes: Tensor  # (node, phenotype) that vary in source, z-scored with source statistics


class Source(nn.Module):
    """What was fitted on source-training subjects, including themselves as nodes; nothing in it is trainable."""

    def __init__(self, fitted: Arrays) -> None:
        super().__init__()
        for name, value in fitted.items():  # already saved with the fitted arrays, so not as weights
            self.register_buffer(name, torch.from_numpy(np.array(value, order="C")), persistent=False)

    def __getattr__(self, name: str) -> Tensor:
        return cast(Tensor, super().__getattr__(name))  # for the types: all arrays are tensors

    def forward(self, fc: Tensor, phenotypes: Tensor) -> Nodes:
        """(subject, feature) selected edges and (subject, input) scaled phenotypes -> nodes."""
        used = self.used(phenotypes)
        vae = [self.get_buffer(f"vae_{name}".replace(".", "_")) for name in ENCODER]
        with torch.autocast(fc.device.type, enabled=False):
            hidden = functional.relu(functional.linear(self.codes(used), vae[0], vae[1]))
            return Nodes((fc - self.centre) / self.spread, functional.linear(hidden, vae[2], vae[3]), used)

    def used(self, phenotypes: Tensor) -> Tensor:
        """(subject, phenotype) phenotypes that vary in source; if none does, one constant column."""
        return phenotypes[:, self.varied] if len(self.varied) else phenotypes.new_zeros(len(phenotypes), 1)

    def codes(self, used: Tensor) -> Tensor:
        """(subject, code) in [0, 1]: continuous phenotypes by their source range, one column per category of the others."""
        values = used[:, self.code_column]
        same = (values - self.code_low).abs() < self.tolerance[self.code_column]
        scaled = (values - self.code_low) / torch.where(self.code_span > 0, self.code_span, 1.0)
        return torch.where(self.code_span > 0, scaled.clamp(0.0, 1.0), same.float())

    def agree(self, first: Nodes, second: Nodes) -> Tensor:
        """(phenotype, first, second) whether two nodes agree in a phenotype."""
        difference = first.phenotypes.T[:, :, None] - second.phenotypes.T[:, None, :]
        return difference.abs() < self.tolerance[:, None, None]

    def similarity(self, first: Nodes, second: Nodes) -> Tensor:
        """(first, second) Gaussian kernel; its width is the mean distance between source-training subjects."""
        return torch.exp(-squared_distances(first, second) / (2 * self.sigma.square()))


def squared_distances(first: Nodes, second: Nodes) -> Tensor:
    """(first, second) squared distances between nodes, over the features of both modalities."""
    a, b = torch.cat([first.imaging, first.latent], dim=1), torch.cat([second.imaging, second.latent], dim=1)
    return (a.square().sum(1)[:, None] + b.square().sum(1)[None, :] - 2 * a @ b.T).clamp(min=0.0)


def phenotype_rules(
    scaler: PhenotypeScaler, phenotypes: npt.NDArray[np.float32], years: float, sd: float
) -> dict[str, npt.NDArray[Any]]:
    """Tolerances within which phenotypes agree, and codes of the VAE, from (source, input) scaled phenotypes."""
    varied = np.flatnonzero(np.isfinite(scaler.scale))
    tolerance: list[float] = []
    codes: list[tuple[int, float, float]] = []  # phenotype, minimum or category, range or 0 for a category
    for position, column in enumerate(varied):
        name, values = scaler.columns[column], phenotypes[:, column]
        if name in CATEGORICAL:  # whole numbers
            tolerance.append(0.5 / scaler.scale[column])
            codes += [(position, float(kind), 0.0) for kind in np.unique(values)]
        else:
            tolerance.append(years / scaler.scale[column] if name == "age" else sd)
            codes.append((position, float(values.min()), float(np.ptp(values))))
    if not codes:
        tolerance, codes = [1.0], [(0, 0.0, 1.0)]
    table = np.array(codes)
    return {
        "varied": varied,
        # Slightly less, so that a difference of exactly two years does not agree, whatever the rounding.
        "tolerance": np.array(tolerance, dtype=np.float32) * np.float32(1 - 1e-4),
        "code_column": table[:, 0].astype(np.int64),
        "code_low": table[:, 1].astype(np.float32),
        "code_span": table[:, 2].astype(np.float32),
    }


class Affinity(nn.Module):
    """Weight of an agreement: reward with the same label, penalty with different labels, motivation with unknown ones."""

    def __init__(self, phenotypes: int) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.tensor([1.0, -1.0, 0.5]).repeat(phenotypes, 1))  # (phenotype, 3)
        self.mixture = nn.Parameter(torch.zeros(phenotypes))

    def constrained(self) -> tuple[Tensor, Tensor, Tensor]:
        """(phenotype, 1, 1) each: reward >= motivation; penalty = -max(|penalty|, penalty + motivation) <= 0."""
        reward, penalty, motivation = self.coefficients[:, :, None, None].unbind(1)
        return torch.maximum(reward, motivation), -torch.maximum(penalty.abs(), penalty + motivation), motivation

    def forward(self, agree: Tensor, same: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(phenotype, i, j) agreement and, if both are labelled, (i, j) same label -> (i, j) affinity, () total reward."""
        reward, penalty, motivation = self.constrained()
        weights = motivation * agree if same is None else reward * (agree & same) + penalty * (agree & ~same)
        affinity = (torch.softmax(self.mixture, 0)[:, None, None] * torch.sigmoid(weights)).sum(0)
        return affinity, functional.relu(weights).sum() if same is not None else weights.new_zeros(())


class Graph(NamedTuple):
    """Edge weights (0: no edge): base nodes read each other and themselves, queries read base nodes and themselves."""

    base: Tensor  # (base, base), 0 on the diagonal
    base_loop: Tensor  # (base,)
    query: Tensor  # (query, base)
    query_loop: Tensor  # (query,)

    def keep(self, rows: Tensor) -> Graph:
        return Graph(self.base[rows][:, rows], self.base_loop[rows], self.query[:, rows], self.query_loop)

    def thinned(self, fraction: float) -> Graph:
        """A random fraction of the edges dropped; self-loops stay."""
        base, query = (edges * (torch.rand_like(edges) >= fraction) for edges in (self.base, self.query))
        return self._replace(base=base, query=query)

    def whole(self) -> Tensor:
        """(node, node) adjacency of base nodes, then queries, without edges between queries."""
        above = torch.cat([self.base + torch.diag(self.base_loop), self.query.T], dim=1)
        return torch.cat([above, torch.cat([self.query, torch.diag(self.query_loop)], dim=1)])


Pair = tuple[Tensor, Tensor]  # (base, width) and (query, width)


class TransformerConvolution(nn.Module):
    """Graph transformer convolution: attention over a node's edges, with edge weights in keys and values and a gated skip."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 4 * out)  # query, key, value and skip
        self.edge = nn.Parameter(torch.empty(out).uniform_(-1.0, 1.0))
        self.gate = nn.Linear(3 * out, 1, bias=False)

    def forward(self, nodes: Pair, graph: Graph) -> Pair:
        # Separately: base nodes must not depend, to the last bit, on which queries read them.
        base, query = (self.project(features).chunk(4, dim=1) for features in nodes)
        return self._read(base, base, graph.base, graph.base_loop), self._read(query, base, graph.query, graph.query_loop)

    def _read(self, reader: Sequence[Tensor], base: Sequence[Tensor], edges: Tensor, loop: Tensor) -> Tensor:
        (query, key, value, skip), (_, keys, values, _) = reader, base  # (reader, out), (base, out)
        weights = torch.cat([edges, loop[:, None]], dim=1)  # (reader, base + itself)
        match = torch.cat([query @ keys.T, (query * key).sum(1, keepdim=True)], dim=1)
        match = (match + weights * (query @ self.edge)[:, None]) / math.sqrt(query.shape[1])
        attention = torch.softmax(match.float().masked_fill(weights == 0, -torch.inf), dim=1)
        read = attention[:, :-1] @ values + attention[:, -1:] * value + (attention * weights).sum(1, keepdim=True) * self.edge
        gate = torch.sigmoid(self.gate(torch.cat([read, skip, read - skip], dim=1)))
        return gate * skip + (1 - gate) * read


class GTUNet(nn.Module):
    """Graph U-Net: base nodes are pooled level by level and unpooled with skips; queries pass through every level."""

    def __init__(self, width: int, depth: int, config: MMGTUNets) -> None:
        super().__init__()
        self.pool_share, hidden = config.pool_share, config.hidden
        self.first, self.last = TransformerConvolution(width, hidden), TransformerConvolution(hidden, config.embedding)
        self.down, self.up = (TransformerConvolution(hidden, hidden) for _ in range(2))  # shared by all levels
        self.projections = nn.Parameter(torch.empty(depth, hidden).uniform_(-(hidden**-0.5), hidden**-0.5))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, nodes: Pair, graph: Graph) -> Pair:
        base, query = self._rectified(self.first(nodes, graph))
        levels: list[tuple[Tensor, Tensor, Graph, Tensor]] = []
        for projection in self.projections:
            score = pool_score(base, projection)  # (base,)
            rows = torch.topk(score, math.ceil(self.pool_share * len(base))).indices.sort().values
            levels.append((base, query, graph, rows))
            graph = graph.keep(rows)
            base = base[rows] * torch.tanh(score[rows])[:, None]
            query = query * torch.tanh(pool_score(query, projection))[:, None]
            base, query = self._rectified(self.down((base, query), graph))
        for level in reversed(range(len(levels))):
            base_skip, query_skip, graph, rows = levels[level]
            nodes = base_skip.index_add(0, rows, base), query_skip + query
            base, query = self._rectified(self.up(nodes, graph)) if level else self.last(nodes, graph)
        return self.dropout(base), self.dropout(query)

    @staticmethod
    def _rectified(nodes: Pair) -> Pair:
        return functional.relu(nodes[0]), functional.relu(nodes[1])


def pool_score(nodes: Tensor, projection: Tensor) -> Tensor:
    """(node,) projection onto a direction, in float32."""
    return (nodes.float() * projection).sum(1) / torch.linalg.vector_norm(projection)


class Fusion(nn.Module):
    """Sum of both embeddings and their mean, each with its own attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.imaging, self.phenotype, self.mean = (nn.Linear(width, width) for _ in range(3))

    def forward(self, imaging: Tensor, phenotype: Tensor) -> tuple[Tensor, Tensor]:
        """Two (node, width) embeddings -> (node, width) joint embedding, (2,) modality weights."""
        mean = (imaging + phenotype) / 2
        a_i, a_p, a_m = torch.tanh(self.imaging(imaging)), torch.tanh(self.phenotype(phenotype)), torch.tanh(self.mean(mean))
        sizes = torch.stack([attention.float().square().sum() for attention in (a_i, a_p)])
        weights = torch.softmax(sizes / a_m.float().square().sum().clamp(min=1e-12), dim=0)
        return a_m * mean + a_i * imaging + a_p * phenotype, weights


class Insertion(NamedTuple):
    """Queries inserted into a graph of labelled base nodes, with what the losses need."""

    logits: Tensor  # (query, 2)
    fused: Tensor  # (query, embedding)
    imaging: Tensor  # (base + query, embedding)
    phenotype: Tensor  # (base + query, embedding)
    modality: Tensor  # (2,) weights of imaging and phenotypes
    graph: Graph  # before edge dropout
    value: Tensor  # () total reward


class Network(PartsNetwork):
    """`insert` adds queries to a graph, `parts` adds a batch to the graph of source."""

    def __init__(self, shape: Shape, config: MMGTUNets) -> None:
        super().__init__()
        self.source, self.edge_dropout = Source(shape.fitted), config.edge_dropout
        self.affinity = Affinity(len(self.source.tolerance))
        width = len(self.source.chosen)
        depths = (config.imaging_depth, config.phenotype_depth)
        self.imaging, self.phenotype = (GTUNet(width, depth, config) for depth in depths)
        self.fusion = Fusion(config.embedding)
        hidden = config.head_width
        self.head = nn.Sequential(nn.Linear(config.embedding, hidden), nn.ReLU(), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        source = self.source
        inserted = self.insert(source(source.fc, source.phenotypes), source.label, self.nodes(batch))
        return {"logits": inserted.logits, "fused": inserted.fused}

    def nodes(self, batch: Batch) -> Nodes:
        return cast(Nodes, self.source(batch["fc"][:, self.source.chosen], batch.phenotypes))

    def insert(self, base: Nodes, label: Tensor, query: Nodes) -> Insertion:
        graph, value = self.graph(base, label, query)
        read = graph.thinned(self.edge_dropout) if self.training else graph
        imaging = torch.cat(self.imaging((base.imaging, query.imaging), read))  # (base + query, embedding)
        phenotype = torch.cat(self.phenotype((base.latent, query.latent), read))
        joint, modality = self.fusion(imaging, phenotype)
        fused = joint[len(label) :]
        return Insertion(self.head(fused), fused, imaging, phenotype, modality, graph, value)

    def graph(self, base: Nodes, label: Tensor, query: Nodes) -> tuple[Graph, Tensor]:
        """The population graph (affinity times similarity) and its total reward."""
        source = self.source
        with torch.autocast(label.device.type, enabled=False):
            within, value = self.affinity(source.agree(base, base), label[:, None] == label[None, :])
            across, _ = self.affinity(source.agree(query, base))
            itself, _ = self.affinity(torch.ones_like(query.phenotypes, dtype=torch.bool).T[:, :, None])  # (query, 1)
            loops = torch.eye(len(label), dtype=torch.bool, device=label.device)
            edges = (within * source.similarity(base, base)).masked_fill(loops, 0.0)
            return Graph(edges, within.diagonal(), across * source.similarity(query, base), itself[:, 0]), value


def smoothness(embedding: Tensor, graph: Tensor) -> Tensor:
    """tr(E' (D - G) E) / n²: large where strong edges join different embeddings."""
    embedding = embedding.float()
    scale = (graph.sum(1) * embedding.square().sum(1)).sum()
    return (scale - (embedding * (graph @ embedding)).sum()) / len(graph) ** 2


def isolation(graph: Tensor) -> Tensor:
    """Minus the mean log degree: large where nodes are isolated."""
    return -graph.sum(1).log().mean()


@method("mm-gtunets")
class MMGTUNets(DeepMethod):
    """MM-GTUNets: graph transformer U-Nets on a population graph of source subjects, queried by each target subject alone.

    A saved model contains the selected features, phenotypes and labels of source-training subjects: they are the graph.
    Differs from the publication (made inductive): everything is fitted on source-training subjects; a target has motivation
    edges to them only, is never pooled away and changes nothing for them. At each update a fraction of source acts as the
    target: these subjects leave the labelled graph, query it, and alone enter cross-entropy and batch norm.
    As published: features are eliminated with the labels of all source-training subjects, pseudo-targets included.
    Differs from the release: phenotypes are `used_phenotypes` (the release has the site, which a target does not share), each
    with its own graph and coefficients; motivation requires agreement; the mixture is learned; the reward loss and the modality
    weights carry gradient; dropout and VAE noise are off outside training; the VAE's divergence has weight 0.01, since with 1
    its means are the same for all subjects.
    Interpretation: the degree loss is minus the log degree (the release adds it); graph losses use the graph before edge
    dropout; the coefficients in use are constrained. Continuous phenotypes other than age agree within a quarter of their sd,
    about what two years are of ABIDE's ages; imputed ones count as known; one that does not vary in source is left out.
    On ABIDE the degree loss hardly changes in a training: degrees depend on the few coefficients of the affinity alone.
    """

    warmup: int = 5
    weight_decay: float = 5e-4
    dropout: float = 0.3
    selected: int = 500
    elimination_step: int = 100
    elimination_penalty: float = 1.0
    vae_hidden: int = 256
    vae_epochs: int = 3000
    vae_patience: int = 100
    vae_rate: float = 1e-3
    kl_weight: float = 0.01
    agreement_years: float = 2.0
    agreement_sd: float = 0.25
    imaging_depth: int = 2
    phenotype_depth: int = 3
    hidden: int = 128
    embedding: int = 16
    head_width: int = 256
    pool_share: float = 0.8
    edge_dropout: float = 0.3
    target_share: float = 0.2
    draws: int = 5  # updates per epoch; with 100 epochs the release's 500
    smoothness_weight: float = 1.0
    degree_weight: float = 1e-4
    reward_weight: float = 1e-2
    update_rule: Literal["adamw", "adam", "sgd"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = True
    used_phenotypes: tuple[str, ...] = ("sex", "age")  # of the cohort's inputs; empty: all

    network_class = Network
    bounds = {"edge_dropout": (0, 1)}
    may_be_empty = ("used_phenotypes",)
    takes = ANY_SCAN
    unused = ("length", "batch_size")
    recordable = True
    remembers = ("fitted.fc", "fitted.phenotypes", "fitted.label")
    reference = "Cai et al. 2025, IEEE Transactions on Medical Imaging 44(9): 3705-3716"
    variants = {
        "all-phenotypes": {"used_phenotypes": ()},
        "imaging": {"phenotypes": False},
        "small": {
            **{"selected": 40, "elimination_step": 5, "vae_hidden": 32, "vae_epochs": 60, "hidden": 32, "embedding": 8},
            **{"head_width": 32, "learning_rate": 4e-3, "draws": 3},
        },
    }
    space = {
        "selected": (100, 250, 500, 1000),
        "target_share": (0.1, 0.2, 0.3, 0.5),
        "edge_dropout": (0.0, 0.3, 0.5),
    }

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        return {"fc": torch.from_numpy(fc_features(cohort.scans).astype(np.float32))}

    def taken(self, source: Cohort) -> list[str]:
        return [name for name in super().taken(source) if not self.used_phenotypes or name in self.used_phenotypes]

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        fc, device = features["fc"].cpu().numpy(), features["fc"].device
        chosen = recursive_elimination(
            fc.astype(np.float64), train.labels, self.selected, self.elimination_step, self.elimination_penalty
        )
        fc = fc[:, chosen]
        spread = fc.std(axis=0)
        scaler = PhenotypeScaler.fit(train, self.taken(train))
        phenotypes = scaler.transform(train).astype(np.float32)
        fitted = phenotype_rules(scaler, phenotypes, self.agreement_years, self.agreement_sd) | {
            **{"chosen": chosen, "centre": fc.mean(axis=0), "spread": np.where(spread > 1e-6, spread, np.float32(1))},
            **{"fc": fc, "phenotypes": phenotypes, "label": train.labels.astype(np.int64)},
        }
        source = Source(fitted).to(device)
        codes = source.codes(source.used(source.phenotypes))
        vae = PhenotypeVAE(codes.shape[1], self.vae_hidden, len(chosen)).to(device)
        vae.pretrain(codes, self.vae_epochs, self.vae_patience, self.vae_rate, self.weight_decay, self.kl_weight)
        weights = vae.state_dict()
        fitted |= {f"vae_{name}".replace(".", "_"): weights[name].cpu().numpy() for name in ENCODER}
        nodes = Source(fitted)(torch.from_numpy(fc), torch.from_numpy(phenotypes))
        distance = squared_distances(nodes, nodes).sqrt().numpy()
        pairs = distance[np.triu_indices(len(distance), 1)]
        return fitted | {"sigma": np.array(max(float(pairs.mean()), 1e-6), dtype=np.float32)}

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """All subjects in each of `draws` batches: one shuffle, rotated so that other pseudo-targets come first each time."""
        shuffled = torch.randperm(len(label), generator=order)
        return [torch.roll(shuffled, -draw * self.pseudo_targets(len(label))) for draw in range(self.draws)]

    def pseudo_targets(self, subjects: int) -> int:
        """Number of pseudo-targets, the first subjects of a batch; batch norm needs two."""
        return min(max(round(self.target_share * subjects), 2), subjects - 1)

    def loss(self, network: Any, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the pseudo-targets, which query the graph of the others, and the losses of the graph."""
        everyone, count = torch.arange(len(batch), device=batch.label.device), self.pseudo_targets(len(batch))
        query, base = batch.take(everyone[:count]), batch.take(everyone[count:])
        inserted = network.insert(network.nodes(base), base.label, network.nodes(query))
        terms = {"ce": self.cross_entropy(inserted.logits, query)}
        with torch.autocast(batch.label.device.type, enabled=False):
            whole = inserted.graph.whole()
            rough = torch.stack([smoothness(inserted.imaging, whole), smoothness(inserted.phenotype, whole)])
            terms["smoothness"] = self.smoothness_weight * (inserted.modality * rough).sum()
            terms["degree"] = self.degree_weight * isolation(whole)  # the same for both modalities, whose weights sum to 1
            value = inserted.value / len(batch) ** 2
            terms["reward"] = inserted.modality[1] * self.reward_weight / (value + 1e-5)
        return terms
