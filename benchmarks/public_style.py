"""Rulers for `peers.py`: BrainGNN, IBGNN+, BrainNetCNN and UFA-Net as public code usually has them, written from their papers.

Graphs are PyTorch Geometric `Data` of one subject each, batched by its loader and passed edge by edge; matrices and series are
items of a plain `Dataset`. Same layers and sizes as the package's, nothing shared with it. Without torch_geometric the two
graph networks are left out.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

try:
    import torch_geometric as pyg
    from torch_geometric.nn import MessagePassing, TopKPooling, global_add_pool, global_max_pool, global_mean_pool
except ImportError:
    pyg, MessagePassing = None, nn.Module


class RoiConv(MessagePassing):
    """A kernel for every node from its one-hot ROI, then a weighted sum over its edges."""

    def __init__(self, width, out, rois, communities=8):
        super().__init__(aggr="add")
        self.width, self.out = width, out
        self.kernel = nn.Sequential(nn.Linear(rois, communities, bias=False), nn.ReLU(), nn.Linear(communities, width * out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x, edge_index, weight, position):
        kernels = self.kernel(position).view(-1, self.width, self.out)  # one for each node of the batch
        sent = torch.matmul(x.unsqueeze(1), kernels).squeeze(1)
        return functional.relu(self.propagate(edge_index, x=sent, weight=weight) + sent + self.bias)

    def message(self, x_j, weight):
        return x_j * weight


class BrainGNN(nn.Module):
    def __init__(self, rois, width=32):
        super().__init__()
        self.rois = rois
        self.first, self.second = RoiConv(rois, width, rois), RoiConv(width, width, rois)
        self.pools = nn.ModuleList(TopKPooling(width, ratio=0.5, nonlinearity=torch.sigmoid) for _ in range(2))
        self.dense = nn.ModuleList([nn.Linear(4 * width, 32), nn.Linear(32, 512)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(32), nn.BatchNorm1d(512)])
        self.output = nn.Linear(512, 2)

    def forward(self, data):
        x, edges, weight, batch = data.x, data.edge_index, data.edge_attr, data.batch
        position = torch.eye(self.rois, device=x.device).repeat(data.num_graphs, 1)
        x = self.first(x, edges, weight, position)
        x, edges, weight, batch, kept, score = self.pools[0](x, edges, weight, batch)
        scores, readouts = [score], [torch.cat([global_max_pool(x, batch), global_mean_pool(x, batch)], dim=1)]
        edges, weight = two_hops(edges, weight, len(x))
        x = self.second(x, edges, weight, position[kept])
        x, edges, weight, batch, kept, score = self.pools[1](x, edges, weight, batch)
        readouts.append(torch.cat([global_max_pool(x, batch), global_mean_pool(x, batch)], dim=1))
        found = torch.cat(readouts, dim=1)
        for layer, norm in zip(self.dense, self.norms, strict=True):
            found = functional.dropout(norm(functional.relu(layer(found))), 0.5, self.training)
        return self.output(found), [*scores, score]

    def loss(self, data):
        logits, scores = self(data)
        total = functional.cross_entropy(logits, data.y)
        for pool in self.pools:
            total = total + (pool.select.weight.norm() - 1) ** 2
        for score in scores:
            sorted_scores = score.view(data.num_graphs, -1).sort(dim=1, descending=True).values
            total = total - 0.1 * torch.log(sorted_scores + 1e-10).mean()
        for label in (0, 1):
            own = scores[0].view(data.num_graphs, -1)[data.y == label]
            total = total + 0.1 * torch.cdist(own, own).square().mean() if len(own) else total
        return total


def two_hops(edges, weight, nodes):
    """(A + I)² without self-loops, as a sparse product."""
    edges, weight = pyg.utils.add_self_loops(edges, weight, fill_value=1.0, num_nodes=nodes)
    matrix = torch.sparse_coo_tensor(edges, weight.flatten(), (nodes, nodes)).coalesce()
    product = torch.sparse.mm(matrix, matrix).coalesce()
    edges, weight = pyg.utils.remove_self_loops(product.indices(), product.values().unsqueeze(1))
    return edges, weight


class EdgeMessages(MessagePassing):
    def __init__(self, width, hidden):
        super().__init__(aggr="add")
        self.message_mlp = nn.Sequential(nn.Linear(2 * width + 1, hidden), nn.ReLU(), nn.Linear(hidden, hidden))

    def forward(self, x, edge_index, weight):
        return functional.relu(self.propagate(edge_index, x=x, weight=weight))

    def message(self, x_i, x_j, weight):
        return self.message_mlp(torch.cat([x_i, x_j, weight], dim=1))


class IBGNN(nn.Module):
    """The backbone, which is what all three stages spend their time on."""

    def __init__(self, rois, hidden=16):
        super().__init__()
        self.layers = nn.ModuleList([EdgeMessages(rois, hidden), EdgeMessages(hidden, hidden)])
        self.readout = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.classifier = nn.Linear(hidden, 2)

    def forward(self, data):
        x = self.layers[0](data.x, data.edge_index, data.edge_attr) / 116
        x = functional.dropout(x, 0.5, self.training)
        x = self.layers[1](x, data.edge_index, data.edge_attr) / 116
        whole = global_add_pool(x, data.batch) / 116
        return self.classifier(self.readout(whole) + whole)

    def loss(self, data):
        return functional.cross_entropy(self(data), data.y)


class EdgeToEdge(nn.Module):
    def __init__(self, width, out, rois):
        super().__init__()
        self.rois, self.row, self.column = rois, nn.Conv2d(width, out, (1, rois)), nn.Conv2d(width, out, (rois, 1))

    def forward(self, x):
        row, column = self.row(x), self.column(x)
        return torch.cat([row] * self.rois, dim=3) + torch.cat([column] * self.rois, dim=2)


class BrainNetCNN(nn.Module):
    def __init__(self, rois):
        super().__init__()
        self.edges = nn.ModuleList([EdgeToEdge(1, 32, rois), EdgeToEdge(32, 32, rois)])
        self.nodes, self.graph = nn.Conv2d(32, 64, (1, rois)), nn.Conv2d(64, 256, (rois, 1))
        self.dense, self.output = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 30)]), nn.Linear(30, 2)

    def forward(self, batch):
        x = batch[0].unsqueeze(1)
        for layer in (*self.edges, self.nodes, self.graph):
            x = functional.leaky_relu(layer(x), 0.33)
        x = functional.dropout(x.flatten(1), 0.5, self.training)
        for layer in self.dense:
            x = functional.dropout(functional.leaky_relu(layer(x), 0.33), 0.5, self.training)
        return self.output(x)

    def loss(self, batch):
        return functional.cross_entropy(self(batch), batch[1])


class UFANet(nn.Module):
    def __init__(self, graph, length, channels=16):
        super().__init__()
        rois = len(graph)
        self.register_buffer("graph", graph)
        self.norm = nn.BatchNorm1d(rois)
        widths = (1, *[channels] * 4)
        self.mixes = nn.ModuleList(nn.Conv2d(before, channels, 1) for before in widths[:-1])
        self.masks = nn.ParameterList(nn.Parameter(torch.ones(rois, rois)) for _ in self.mixes)
        self.space, self.time = (nn.ModuleList(nn.BatchNorm2d(channels) for _ in self.mixes) for _ in range(2))
        self.temporal = nn.ModuleList(nn.Conv2d(channels, channels, (11, 1), padding=(5, 0)) for _ in self.mixes)
        sizes = (channels * length, 1024, 512, 64)
        self.dense = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.output = nn.Linear(64, 1)

    def forward(self, batch):
        return self.parts(batch)[0]

    def parts(self, batch):
        x = self.norm(batch[0]).permute(0, 2, 1).unsqueeze(1)
        for mix, mask, space, temporal, time in zip(self.mixes, self.masks, self.space, self.temporal, self.time, strict=True):
            x = torch.einsum("nctv,vw->nctw", mix(x), self.graph * mask)
            x = functional.relu(functional.dropout(time(temporal(functional.relu(space(x)))), 0.5, self.training))
        x, layers = x.mean(dim=3).flatten(1), []
        for dense in self.dense:
            x = dense(x)
            layers.append(x)
        return self.output(x).squeeze(1), layers

    def loss(self, batch):
        logit, layers = self.parts(batch)
        total = functional.binary_cross_entropy_with_logits(logit, batch[1].float())
        sites = batch[2].unique()
        pairs = [(a, b) for i, a in enumerate(sites) for b in sites[i + 1 :]]
        for layer in layers:
            for a, b in pairs:
                gap = layer[batch[2] == a].mean(dim=0) - layer[batch[2] == b].mean(dim=0)
                total = total + (gap**2).sum() / len(pairs)
        return total


def graphs(nodes, edges, label):
    """One `Data` a subject: rows of (subject, roi, roi) `nodes` as states, all off-diagonal `edges`."""
    rois = nodes.shape[1]
    pairs = (1 - torch.eye(rois)).nonzero().T
    return [
        pyg.data.Data(x=x, edge_index=pairs, edge_attr=weight[pairs[0], pairs[1]].unsqueeze(1), y=y.view(1))
        for x, weight, y in zip(nodes, edges, label, strict=True)
    ]


def loaders(items, training, validation, batch_size):
    """Shuffled training batches, and validation."""
    if isinstance(items, list):
        make = pyg.loader.DataLoader
        return make([items[i] for i in training], batch_size, shuffle=True, drop_last=True), make(
            [items[i] for i in validation], batch_size
        )
    parts = [TensorDataset(*(one[rows] for one in items)) for rows in (training, validation)]
    return DataLoader(parts[0], batch_size, shuffle=True, drop_last=True), DataLoader(parts[1], batch_size)


def epoch(network, optimizer, training, validation, device):
    """One pass with updates, one without."""
    network.train()
    for batch in training:
        batch = moved(batch, device)
        optimizer.zero_grad()
        network.loss(batch).backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        for batch in validation:
            network(moved(batch, device))


def moved(batch, device):
    return [one.to(device) for one in batch] if isinstance(batch, list) else batch.to(device)
