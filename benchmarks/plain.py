"""The ruler: M²LG-DG read straight from the paper's equations, eager, in float32, with nothing made quick.

`step.py` times it beside `m2lgdg.methods.m2lgdg`; it shares no code with the package, so that it stays what it is when the
package gets faster. Modules and parameters have the package's names, so that `copy_weights` makes both the same network.
"""

import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-8


class PlainGlobalEncoder(nn.Module):
    def __init__(self, rois, length, own):
        super().__init__()
        layers, width = [], 1
        for channels, kernel in zip(own.global_channels, own.global_kernels, strict=True):
            layers += [nn.Conv1d(width, channels, kernel, padding=kernel // 2), nn.BatchNorm1d(channels), nn.GELU()]
            layers += [nn.MaxPool1d(2), nn.Dropout(own.dropout)]
            width, length = channels, length // 2
        self.convolutions = nn.Sequential(*layers)
        self.projection = nn.Linear(width * length, own.hidden)
        self.identity = nn.Parameter(torch.zeros(rois, own.hidden))
        layer = nn.TransformerEncoderLayer(
            own.hidden, own.heads, 4 * own.hidden, own.dropout, activation="gelu", batch_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, own.layers)
        self.output = mlp(own.hidden, own.global_width, own.global_width, own.dropout)

    def forward(self, series):
        subjects, rois, length = series.shape
        signals = series.reshape(subjects * rois, 1, length)  # each ROI's series by itself
        features = self.convolutions(signals).flatten(1)  # (subject roi, channel time)
        tokens = self.projection(features).view(subjects, rois, -1) + self.identity
        return self.output(self.transformer(tokens).mean(dim=1))


class PlainLocalBlock(nn.Module):
    def __init__(self, width, channels, stride, own):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(own.chebyshev_order, width, channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        kernel = own.temporal_kernel
        self.temporal = nn.Conv2d(channels, channels, (kernel, 1), stride=(stride, 1), padding=(kernel // 2, 0))
        self.norm = nn.BatchNorm2d(channels)
        self.residual = nn.Identity()
        if width != channels or stride != 1:
            self.residual = nn.Sequential(nn.Conv2d(width, channels, 1, stride=(stride, 1)), nn.BatchNorm2d(channels))
        self.dropout = nn.Dropout(own.dropout)

    def forward(self, features, operator):
        nodes = features.permute(0, 2, 3, 1)  # (subject, time, roi, channel)
        terms = [nodes, operator @ nodes]
        while len(terms) < len(self.weights):
            terms.append(2 * (operator @ terms[-1]) - terms[-2])
        spread = self.bias
        for term, weight in zip(terms, self.weights, strict=False):
            spread = spread + term @ weight
        through = self.norm(self.temporal(spread.permute(0, 3, 1, 2)))  # (subject, channel, time, roi)
        return self.dropout(functional.relu(through + self.residual(features)))


class PlainLocalEncoder(nn.Module):
    def __init__(self, rois, own):
        super().__init__()
        self.register_buffer("adjacency", torch.zeros(rois, rois))
        self.edges = nn.Parameter(torch.zeros(rois, own.edge_width))
        self.beta = own.beta
        widths = (1, *own.local_channels)
        sizes = zip(widths, widths[1:], own.local_strides, strict=False)
        self.blocks = nn.ModuleList(PlainLocalBlock(width, channels, stride, own) for width, channels, stride in sizes)
        self.output = mlp(widths[-1], own.local_width, own.local_width, own.dropout)

    def forward(self, series):
        learned = torch.softmax(self.edges @ self.edges.T, dim=1)
        final = self.beta * learned + (1 - self.beta) * self.adjacency
        looped = final + torch.eye(len(final), device=final.device)
        root = torch.diag(looped.sum(dim=1) ** -0.5)
        operator = root @ looped @ root
        features = series.permute(0, 2, 1).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, operator)
        return self.output(functional.adaptive_avg_pool2d(features, 1).flatten(1))


class PlainCrossAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attend_f, self.attend_n = (nn.MultiheadAttention(width, heads, dropout, batch_first=True) for _ in range(2))
        self.norm_f, self.norm_n, self.norm_ff, self.norm_nn = (nn.LayerNorm(width) for _ in range(4))
        self.feed_f, self.feed_n = (mlp(width, 4 * width, width, dropout) for _ in range(2))

    def forward(self, z_f, z_n):
        z_f = self.norm_f(z_f + self.attend_f(z_f, z_n, z_n)[0])
        z_f = self.norm_ff(z_f + self.feed_f(z_f))
        z_n = self.norm_n(z_n + self.attend_n(z_n, z_f, z_f)[0])
        return z_f, self.norm_nn(z_n + self.feed_n(z_n))


class PlainNetwork(nn.Module):
    """The whole method with `own`'s sizes (an `M2LGDG`, of which only fields are read)."""

    def __init__(self, rois, length, inputs, own):
        super().__init__()
        width = own.shared_width
        self.global_encoder, self.local_encoder = PlainGlobalEncoder(rois, length, own), PlainLocalEncoder(rois, own)
        self.combine = nn.Linear(own.global_width + own.local_width, own.imaging_width)
        layers, before = [], inputs
        for hidden in own.phenotype_hidden:
            layers += [nn.Linear(before, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Dropout(own.dropout)]
            before = hidden
        self.phenotype_encoder = nn.Sequential(*layers, nn.Linear(before, own.phenotype_width))
        self.shared_f, self.private_f = (mlp(own.imaging_width, width, width, 0) for _ in range(2))
        self.shared_n, self.private_n = (mlp(own.phenotype_width, width, width, 0) for _ in range(2))
        fusion = [PlainCrossAttention(width, own.fusion_heads, own.dropout) for _ in range(own.fusion_layers)]
        self.fusion = nn.ModuleList(fusion)
        self.gate = mlp(4 * width, width, 2, 0)
        self.output = mlp(4 * width, 2 * width, own.fused_width, own.dropout)
        layers, before = [], own.fused_width
        for _ in range(2):
            layers += [nn.Linear(before, before // 2), nn.GELU(), nn.Dropout(own.dropout)]
            before //= 2
        self.classifier = nn.Sequential(*layers, nn.Linear(before, 2))

    def forward(self, series, phenotypes):
        """Logits, the fused representation, and the four components s_f, p_f, s_n, p_n."""
        both = torch.cat([self.global_encoder(series), self.local_encoder(series)], dim=1)
        h_f, h_n = functional.gelu(self.combine(both)), self.phenotype_encoder(phenotypes)
        components = self.shared_f(h_f), self.private_f(h_f), self.shared_n(h_n), self.private_n(h_n)
        z_f, z_n = torch.stack(components[:2], dim=1), torch.stack(components[2:], dim=1)
        for layer in self.fusion:
            z_f, z_n = layer(z_f, z_n)
        flat_f, flat_n = z_f.flatten(1), z_n.flatten(1)
        gate = torch.softmax(self.gate(torch.cat([flat_f, flat_n], dim=1)), dim=1)
        fused = self.output(torch.cat([gate[:, :1] * flat_f, gate[:, 1:] * flat_n], dim=1))
        return self.classifier(fused), fused, components


def mlp(width, hidden, out, dropout):
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), *between, nn.Linear(hidden, out))


def plain_loss(network, batch, own, class_weight):
    """The paper's total: cross-entropy, then similarity, orthogonality and difference, then the cross-site contrast."""
    logits, fused, (s_f, p_f, s_n, p_n) = network(batch.series, batch.phenotypes)
    entropy = functional.cross_entropy(logits, batch.label, weight=class_weight, label_smoothing=own.label_smoothing)
    similarity = ((unit(s_f) - unit(s_n)) ** 2).mean()
    orthogonality = ((s_f * p_f).sum(dim=1).abs() + (s_n * p_n).sum(dim=1).abs()).mean()
    difference = torch.relu(own.margin - ((unit(p_f) - unit(p_n)) ** 2).sum(dim=1).mean())
    contrast = cross_site_contrast(unit(fused), batch.label, batch.site, own.temperature)
    auxiliary = own.decomposition_weight * (similarity + orthogonality + difference)
    return entropy + auxiliary + own.contrastive_weight * contrast


def unit(vectors):
    return vectors / (vectors.norm(dim=1, keepdim=True) + EPSILON)


def cross_site_contrast(z, label, site, temperature):
    similar = torch.exp(z @ z.T / temperature)
    others = 1 - torch.eye(len(z), device=z.device)
    log_share = torch.log(similar / (similar * others).sum(dim=1, keepdim=True))
    positive = ((label[:, None] == label) & (site[:, None] != site)).float()
    count = positive.sum(dim=1)
    anchors = count > 0
    return -((log_share * positive).sum(dim=1) / count.clamp(min=1))[anchors].sum() / anchors.sum().clamp(min=1)


def plain_step(network, batch, optimizer, own, class_weight):
    """One training step; returns the loss."""
    optimizer.zero_grad()
    loss = plain_loss(network, batch, own, class_weight)
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def plain_optimizer(network, own):
    return torch.optim.AdamW(network.parameters(), lr=own.learning_rate, weight_decay=own.weight_decay)


def copy_weights(ours, plain):
    """Our network's weights into the plain one; the shapes differ only in dimensions of size one."""
    own = ours.state_dict()
    if set(own) != set(plain.state_dict()):
        raise KeyError(f"parameters of one network alone: {sorted(set(own) ^ set(plain.state_dict()))}")
    with torch.no_grad():
        for name, value in plain.state_dict().items():
            value.copy_(own[name].reshape(value.shape))
    return plain


def plain_gradients(ours, plain):
    """The gradients of both networks by parameter, in our shapes."""
    theirs = dict(plain.named_parameters())
    return {name: (value.grad, theirs[name].grad.reshape(value.shape)) for name, value in ours.named_parameters()}
