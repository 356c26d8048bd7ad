"""Fast forms of M²LG-DG's networks: the forwards of `methods/m2lgdg.py` with operations in an order that costs less.

Each class overrides how its plain parent computes and nothing else, so that parameters, names and results stay the same.
`fast_form` puts them in place; tests hold both forms equal, in losses and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch
from m2lgdg.fast import graph_kernels, kernels_fit, norm_kernels
from m2lgdg.fast.recording import at_once
from m2lgdg.fast.time_convolution import along_time, gelu, time_convolution
from m2lgdg.graph import propagation
from m2lgdg.methods import m2lgdg as plain


class GlobalEncoder(plain.GlobalEncoder):
    """Convolution, batch norm, GELU, pooling and dropout of a stage by one kernel each way, where the device has it."""

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, global)."""
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        stages = list(zip(*[iter(self.convolutions)] * 5, strict=True))
        for i, (convolution, norm, _, pool, dropout) in enumerate(stages, start=1):
            if self.training and features.shape[2] % 2 == 0 and kernels_fit(features, norm.num_features):
                through = time_convolution(features, convolution.weight, None, 1)
                features = norm_kernels().pooled(through, norm, convolution.bias, dropout.p, rois_first=i == len(stages))
            else:
                features = dropout(pool(gelu(norm(along_time(convolution, features)))))  # (subject, channel, time / 2, roi)
        # Each ROI has (time, channel) in memory on a GPU: the weights are smaller than the features, so they are reordered.
        flat = features.permute(0, 3, 2, 1).flatten(2)  # (subject, roi, time channel)
        weight = self.projection.weight.view(-1, *features.shape[1:3]).transpose(1, 2).flatten(1)
        tokens = functional.linear(flat, weight, self.projection.bias) + self.identity  # (subject, roi, hidden)
        pooled: Tensor = self.output(self.transformer(tokens).mean(dim=1))
        return pooled


class LocalBlock(plain.LocalBlock):
    """Graph and temporal convolution in the cheaper order; norms, residual, ReLU and dropout by one kernel each way."""

    def forward(self, features: Tensor, operators: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel, time / stride, roi); the operators of `chebyshev_operators`."""
        order = time_then_graph if features.is_cuda and features.shape[1] > 1 else graph_then_time
        through = order(features, operators, self.weights, self.bias, self.temporal)
        if not isinstance(self.residual, nn.Sequential):
            return self.dropout(functional.relu(self.norm(through) + features))  # type: ignore[no-any-return]
        convolution: Any = self.residual[0]
        if self.training and kernels_fit(features, self.norm.num_features):
            rest = time_convolution(features, convolution.weight, None, convolution.stride[0])
            ends = (self.norm, self.residual[1], convolution.bias, self.dropout.p)
            return norm_kernels().joined(through, rest, *ends)  # type: ignore[no-any-return]
        rest = self.residual[1](along_time(convolution, features))
        return self.dropout(functional.relu(self.norm(through) + rest))  # type: ignore[no-any-return]


class LocalEncoder(plain.LocalEncoder):
    """Chebyshev polynomials of the operator computed once for all blocks; a mean whose gradient is not written out."""

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, local)."""
        operators = chebyshev_operators(propagation(self.adjacency, self.edges, self.beta), self.order)
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, operators)
        with torch.autocast(features.device.type, enabled=False):  # it would copy all features to float32 for a sum
            pooled = features.sum(dim=(2, 3)) / features[0, 0].numel()  # the gradient of a mean would be written out
        h_local: Tensor = self.output(pooled)
        return h_local


class Network(plain.Network):
    """Both encoders side by side on a GPU; after them everything in float32, where casts would cost more than they save."""

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        """(subject, global) and (subject, local), in float32."""
        if not self.config.imaging:
            return ()
        series = batch.series
        both = at_once(lambda: self.global_encoder(series), lambda: self.local_encoder(series), series.device)
        return tuple(one.float() for one in both)

    def decide(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """Without autocast."""
        with torch.autocast(batch.label.device.type, enabled=False):
            return super().decide(encoded, batch)


FORMS = {
    plain.GlobalEncoder: GlobalEncoder,
    plain.LocalBlock: LocalBlock,
    plain.LocalEncoder: LocalEncoder,
    plain.Network: Network,
}


def chebyshev_operators(operator: Tensor, order: int) -> Tensor:
    """(roi, (order - 1) roi): the transposed T_1 to T_{order - 1} side by side; (..., roi) features meet all in one product."""
    before, now = torch.eye(len(operator), device=operator.device, dtype=operator.dtype), operator
    polynomials = []
    for _ in range(order - 1):
        polynomials.append(now.T)
        before, now = now, 2 * (operator @ now) - before
    return torch.cat(polynomials, dim=1) if polynomials else operator.new_empty(len(operator), 0)


def graph_then_time(features: Tensor, operators: Tensor, weights: Tensor, bias: Tensor, temporal: nn.Conv2d) -> Tensor:
    """temporal(sum over k of T_k features weights_k + bias), in this order."""
    spread = (features @ operators).view(*features.shape[:3], len(weights) - 1, features.shape[3])
    terms = torch.cat([features, *spread.unbind(3)], dim=1)  # (subject, order channel, time, roi)
    mixing = weights.flatten(0, 1).T[:, :, None, None]  # (channel out, order channel, 1, 1)
    if terms.shape[1] < len(mixing):
        return folded(terms, mixing, bias, temporal)
    return along_time(temporal, time_convolution(terms, mixing, bias, 1))


def time_then_graph(features: Tensor, operators: Tensor, weights: Tensor, bias: Tensor, temporal: nn.Conv2d) -> Tensor:
    """The same the other way round: time and graph are both linear and touch different dimensions, so they can change places.

    With channels last in memory this is one convolution and one product, nothing is copied between, and a stride halves
    what the graph sees.
    """
    stride, rois, order = temporal.stride[0], features.shape[3], len(weights)
    weight = torch.einsum("octz,kic->koitz", temporal.weight, weights).flatten(0, 1)  # (order channel out, channel, kernel, 1)
    through = time_convolution(features, weight, None, stride).permute(0, 2, 3, 1)  # (subject, time, roi, order channel)
    subjects, steps = through.shape[:2]
    level = bias_through(bias, temporal, features.shape[2])  # (1, channel, time, 1)
    if rois <= 128 and through.dtype == torch.bfloat16 and kernels_fit(features, max(len(bias), 64)):
        terms = through.reshape(subjects, steps, rois, order, -1)
        spread: Tensor = graph_kernels().spread(terms, operators, level[0, :, :, 0].T)  # (subject, time, roi, channel)
        return spread.permute(0, 3, 1, 2)
    each = through.reshape(subjects * steps, rois * order, -1)  # (subject time, roi order, channel)
    itself = torch.eye(rois, device=operators.device, dtype=operators.dtype)
    every = torch.cat([itself, operators], dim=1).to(each.dtype)  # (roi, order roi), transposed
    gather = every.view(rois, order, rois).permute(2, 0, 1).reshape(rois, -1)  # (roi, roi order)
    gather = functional.pad(gather, (0, -gather.shape[1] % 8))[:, : gather.shape[1]]  # rows begin where a GPU reads fast
    through = torch.bmm(gather.expand(len(each), -1, -1), each).view(subjects, steps, rois, -1)
    return through.permute(0, 3, 1, 2) + level


def folded(terms: Tensor, mixing: Tensor, bias: Tensor, temporal: nn.Conv2d) -> Tensor:
    """temporal(conv2d(terms, mixing, bias)) as one convolution: with few terms going to many channels, far less work."""
    stride = temporal.stride[0]
    weight = torch.einsum("octz,cizy->oity", temporal.weight, mixing)  # (channel out, term, kernel, 1)
    if terms.is_cuda:  # its convolutions have channels to spare
        return time_convolution(*with_ones(terms, weight, bias, temporal), None, stride)
    return time_convolution(terms, weight, None, stride) + bias_through(bias, temporal, terms.shape[2])


def with_ones(terms: Tensor, weight: Tensor, bias: Tensor, temporal: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Terms with a channel of ones, and weights under which it gives `bias_through`: no pass adds the bias afterwards."""
    assert temporal.bias is not None
    half = weight.shape[2] // 2
    level = torch.einsum("octz,c->ot", temporal.weight, bias) + functional.pad(temporal.bias[:, None], (half, half))
    return torch.cat([terms, torch.ones_like(terms[:, :1])], dim=1), torch.cat([weight, level[:, None, :, None]], dim=1)


def bias_through(bias: Tensor, temporal: nn.Conv2d, length: int) -> Tensor:
    """(1, channel, time / stride, 1) what a temporal convolution makes of a bias before it; near the padding it is less."""
    return along_time(temporal, bias[None, :, None, None].expand(1, -1, length, 1))
