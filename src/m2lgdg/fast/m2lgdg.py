"""Fast forms of M²LG-DG's networks: the forwards of `methods/m2lgdg.py` with operations reordered or fused.

Each class overrides only how its plain parent computes, so that parameters, names and results stay the same. `fast_form` puts
them in place; tests hold losses and gradients of both forms equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch
from m2lgdg.devices import at_once
from m2lgdg.fast import along_time, graph_kernels, kernels_fit, norm_kernels, time_convolution
from m2lgdg.graph import propagation
from m2lgdg.methods import m2lgdg as plain


class GlobalEncoder(plain.GlobalEncoder):
    """Batch norm, GELU, pooling and dropout of a stage in one kernel each way, on devices that have it."""

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, global)."""
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        stages = list(zip(*[iter(self.convolutions)] * 5, strict=True))
        for i, (convolution, norm, _, pool, dropout) in enumerate(stages, start=1):
            if self.training and features.shape[2] % 2 == 0 and kernels_fit(features, norm.num_features):
                convolved = time_convolution(features, convolution.weight, None, 1)
                features = norm_kernels().pooled(convolved, norm, convolution.bias, dropout.p, rois_first=i == len(stages))
            else:
                activated = functional.gelu(norm(along_time(convolution, features)))
                features = dropout(pool(activated))  # (subject, channel, time / 2, roi)
        # On a GPU each ROI lies as (time, channel) in memory: reorder the weights, which are smaller than the features.
        flat = features.permute(0, 3, 2, 1).flatten(2)  # (subject, roi, time * channel)
        weight = self.projection.weight.view(-1, *features.shape[1:3]).transpose(1, 2).flatten(1)
        tokens = functional.linear(flat, weight, self.projection.bias) + self.identity  # (subject, roi, hidden)
        h_global: Tensor = self.output(self.transformer(tokens).mean(dim=1))
        return h_global


class LocalBlock(plain.LocalBlock):
    """Graph and temporal convolution in the cheaper order; norms, residual, ReLU and dropout in one kernel each way."""

    def forward(self, features: Tensor, operators: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel, time / stride, roi); `operators` from `chebyshev_operators`."""
        convolve = time_then_graph if features.is_cuda and features.shape[1] > 1 else graph_then_time
        filtered = convolve(features, operators, self.weights, self.bias, self.temporal)
        if not isinstance(self.residual, nn.Sequential):
            return self.dropout(functional.relu(self.norm(filtered) + features))  # type: ignore[no-any-return]
        convolution: Any = self.residual[0]
        if self.training and kernels_fit(features, self.norm.num_features):
            residual = time_convolution(features, convolution.weight, None, convolution.stride[0])
            parameters = (self.norm, self.residual[1], convolution.bias, self.dropout.p)
            return norm_kernels().joined(filtered, residual, *parameters)  # type: ignore[no-any-return]
        residual = self.residual[1](along_time(convolution, features))
        return self.dropout(functional.relu(self.norm(filtered) + residual))  # type: ignore[no-any-return]


class LocalEncoder(plain.LocalEncoder):
    """Chebyshev polynomials computed once for all blocks; a pooling whose gradient is not materialised."""

    def forward(self, series: Tensor) -> Tensor:
        """(subject, roi, time) -> (subject, local)."""
        operators = chebyshev_operators(propagation(self.adjacency, self.edges, self.beta), self.order)
        features = series.transpose(1, 2).unsqueeze(1)  # (subject, 1, time, roi)
        for block in self.blocks:
            features = block(features, operators)
        with torch.autocast(features.device.type, enabled=False):  # autocast would copy all features to float32 for the sum
            pooled = features.sum(dim=(2, 3)) / features[0, 0].numel()  # unlike this, a mean would materialise its gradient
        h_local: Tensor = self.output(pooled)
        return h_local


class Network(plain.Network):
    """Both encoders in parallel on a GPU; float32 after them, where casts would cost more than they save."""

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        """(subject, global) and (subject, local), in float32."""
        if not self.config.imaging:
            return ()
        series = batch.series
        both = at_once(lambda: self.global_encoder(series), lambda: self.local_encoder(series), series.device)
        return tuple(embedding.float() for embedding in both)

    def decide(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """As the plain form, without autocast."""
        with torch.autocast(batch.label.device.type, enabled=False):
            return super().decide(encoded, batch)


FORMS = {
    plain.GlobalEncoder: GlobalEncoder,
    plain.LocalBlock: LocalBlock,
    plain.LocalEncoder: LocalEncoder,
    plain.Network: Network,
}


def chebyshev_operators(operator: Tensor, order: int) -> Tensor:
    """(roi, (order - 1) * roi): the transposed T_1 to T_{order - 1}, concatenated, so that one product applies them all."""
    before, now = torch.eye(len(operator), device=operator.device, dtype=operator.dtype), operator
    polynomials = []
    for _ in range(order - 1):
        polynomials.append(now.T)
        before, now = now, 2 * (operator @ now) - before
    return torch.cat(polynomials, dim=1) if polynomials else operator.new_empty(len(operator), 0)


def graph_then_time(features: Tensor, operators: Tensor, weights: Tensor, bias: Tensor, temporal: nn.Conv2d) -> Tensor:
    """temporal(sum over k of T_k features weights_k + bias), in this order."""
    spread = (features @ operators).view(*features.shape[:3], len(weights) - 1, features.shape[3])
    terms = torch.cat([features, *spread.unbind(3)], dim=1)  # (subject, order * channel, time, roi)
    mixing = weights.flatten(0, 1).T[:, :, None, None]  # (channel out, order * channel, 1, 1)
    if terms.shape[1] < len(mixing):
        return folded(terms, mixing, bias, temporal)
    return along_time(temporal, time_convolution(terms, mixing, bias, 1))


def time_then_graph(features: Tensor, operators: Tensor, weights: Tensor, bias: Tensor, temporal: nn.Conv2d) -> Tensor:
    """The same with the temporal convolution first: both are linear and act on different dimensions, so they commute.

    With channels last in memory this is one convolution and one product, without a copy in between, and a stride halves the
    input of the graph product.
    """
    stride, rois, order = temporal.stride[0], features.shape[3], len(weights)
    weight = torch.einsum("octz,kic->koitz", temporal.weight, weights)  # (order, channel out, channel, kernel, 1)
    weight = weight.flatten(0, 1)  # (order * channel out, channel, kernel, 1)
    filtered = time_convolution(features, weight, None, stride).permute(0, 2, 3, 1)  # (subject, time, roi, order * channel)
    subjects, steps = filtered.shape[:2]
    level = bias_through(bias, temporal, features.shape[2])  # (1, channel, time, 1)
    if rois <= 128 and filtered.dtype == torch.bfloat16 and kernels_fit(features, max(len(bias), 64)):
        terms = filtered.reshape(subjects, steps, rois, order, -1)
        spread: Tensor = graph_kernels().spread(terms, operators, level[0, :, :, 0].T)  # (subject, time, roi, channel)
        return spread.permute(0, 3, 1, 2)
    each = filtered.reshape(subjects * steps, rois * order, -1)  # (subject * time, roi * order, channel)
    identity = torch.eye(rois, device=operators.device, dtype=operators.dtype)
    polynomials = torch.cat([identity, operators], dim=1).to(each.dtype)  # (roi, order * roi), transposed
    gather = polynomials.view(rois, order, rois).permute(2, 0, 1).reshape(rois, -1)  # (roi, roi * order)
    gather = functional.pad(gather, (0, -gather.shape[1] % 8))[:, : gather.shape[1]]  # rows aligned for fast reads on a GPU
    filtered = torch.bmm(gather.expand(len(each), -1, -1), each).view(subjects, steps, rois, -1)
    return filtered.permute(0, 3, 1, 2) + level


def folded(terms: Tensor, mixing: Tensor, bias: Tensor, temporal: nn.Conv2d) -> Tensor:
    """temporal(conv2d(terms, mixing, bias)) as one convolution: far less work with few terms and many channels."""
    stride = temporal.stride[0]
    weight = torch.einsum("octz,cizy->oity", temporal.weight, mixing)  # (channel out, term, kernel, 1)
    if terms.is_cuda:  # its convolutions are padded to eight channels, so one more is free
        return time_convolution(*with_ones(terms, weight, bias, temporal), None, stride)
    return time_convolution(terms, weight, None, stride) + bias_through(bias, temporal, terms.shape[2])


def with_ones(terms: Tensor, weight: Tensor, bias: Tensor, temporal: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Terms with a channel of ones, and weights that turn it into `bias_through`: saves a pass that adds the bias."""
    assert temporal.bias is not None
    half = weight.shape[2] // 2
    level = torch.einsum("octz,c->ot", temporal.weight, bias) + functional.pad(temporal.bias[:, None], (half, half))
    return torch.cat([terms, torch.ones_like(terms[:, :1])], dim=1), torch.cat([weight, level[:, None, :, None]], dim=1)


def bias_through(bias: Tensor, temporal: nn.Conv2d, length: int) -> Tensor:
    """(1, channel, time / stride, 1) temporal convolution of a bias that precedes it; smaller near the padding."""
    return along_time(temporal, bias[None, :, None, None].expand(1, -1, length, 1))
