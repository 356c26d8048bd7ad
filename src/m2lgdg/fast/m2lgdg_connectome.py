"""Fast forms of the networks of `methods/m2lgdg_connectome.py`: on a GPU, all members are one batched computation.

Members are small, so that one after another leaves most of a GPU idle. `fast_form` puts these classes in place; tests hold
losses and gradients of both forms equal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from m2lgdg.deep import Batch
from m2lgdg.methods import m2lgdg_connectome as plain


class GraphConvolution(plain.GraphConvolution):
    """Features are multiplied by the weights first, which makes them narrower, then by the operator (Clenshaw's order)."""

    def forward(self, nodes: Tensor, operator: Tensor) -> Tensor:
        """(subject, roi, width) -> (subject, roi, channel)."""
        order, _, channels = self.weights.shape
        products = nodes @ self.weights.transpose(0, 1).flatten(1)  # (subject, roi, order * channel)
        terms = torch.split(products, channels, dim=-1)  # nodes W_k, (subject, roi, channel)
        if order == 1:
            return terms[0] + self.bias
        now, after = terms[-1], None
        for term in terms[-2:0:-1]:
            stepped = term + 2 * (operator @ now)
            now, after = (stepped if after is None else stepped - after), now
        result: Tensor = terms[0] + operator @ now + self.bias
        return result if after is None else result - after


class Network(plain.Network):
    """Float32 after the encoders, where casts would cost more than they save."""

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        """h_global and h_local in float32."""
        return tuple(encoded.float() for encoded in super().encode(batch))

    def decide(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """As the plain form, without autocast."""
        with torch.autocast(batch.label.device.type, enabled=False):
            return super().decide(encoded, batch)


class Members(plain.Members):
    """The function of all networks at once: their weights are stacked, and every product is a batched one."""

    def each(self, function: Callable[[nn.Module, Batch], dict[str, Tensor]], batch: Batch) -> dict[str, Tensor]:
        """(member,) results, as the plain form."""
        if len(self.networks) == 1 or not batch.label.is_cuda:
            return super().each(function, batch)
        return together(list(self.networks), function, batch)


FORMS = {plain.GraphConvolution: GraphConvolution, plain.Network: Network, plain.Members: Members}


class _Call(nn.Module):
    """A function of a network as a module, so that its weights can be replaced by name."""

    def __init__(self, network: nn.Module, function: Callable[[nn.Module, Batch], dict[str, Tensor]]) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.function(self.network, batch)


def together(
    networks: list[nn.Module], function: Callable[[nn.Module, Batch], dict[str, Tensor]], batch: Batch
) -> dict[str, Tensor]:
    """(network,) results of a function of each network and its part of the batch, computed by one vectorised call.

    Gradients reach the weights of each network through the stack; running statistics are copied back into each.
    """
    call = _Call(networks[0], function)
    named = [dict(network.named_parameters()) for network in networks]
    weights = {f"network.{name}": torch.stack([one[name] for one in named]) for name in named[0]}
    kept = [dict(network.named_buffers()) for network in networks]
    statistics = {f"network.{name}": torch.stack([one[name] for one in kept]) for name in kept[0]}

    def one(weights: dict[str, Tensor], statistics: dict[str, Tensor], *parts: Tensor) -> dict[str, Tensor]:
        *features, phenotypes, label, site = parts
        given = Batch(dict(zip(batch.features, features, strict=True)), phenotypes, label, site)
        result: dict[str, Tensor] = torch.func.functional_call(call, (weights, statistics), (given,))
        return result

    tensors = (*batch.features.values(), batch.phenotypes, batch.label, batch.site)
    parts = [value.view(len(networks), len(batch) // len(networks), *value.shape[1:]) for value in tensors]
    with sdpa_kernel(SDPBackend.MATH):  # fused attention is not vectorised on every device
        results: dict[str, Tensor] = torch.func.vmap(one, randomness="different")(weights, statistics, *parts)
    with torch.no_grad():
        for name, stacked in statistics.items():
            if "running" in name or "tracked" in name:
                for buffers, value in zip(kept, stacked, strict=True):
                    buffers[name.removeprefix("network.")].copy_(value)
    return results
