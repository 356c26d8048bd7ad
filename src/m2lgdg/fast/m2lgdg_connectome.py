"""Fast forms of the networks of `methods/m2lgdg_connectome.py`: all members are one network with a dimension of members.

Members are small, so that one after another most of the time goes into calls. `fast_form` puts `Members` in place; its stack
has the layers of `stacked.py` and these encoders, and tests hold losses and gradients of both forms equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.deep import Batch
from m2lgdg.fast.stacked import LAYERS, clip_each, dropped, linear, stacked
from m2lgdg.graph import propagation
from m2lgdg.methods import m2lgdg_connectome as plain

FIRST = ("tokens", "nodes")  # what the first layers of the two encoders give, by its name in a batch


class GlobalEncoder(plain.GlobalEncoder):
    """The transformer of all members."""

    def first(self, rows: Tensor) -> Tensor:
        """(member, subject, roi, roi) -> tokens (member, subject, roi, hidden)."""
        tokens: Tensor = self.projection(rows) + self.identity[:, None]
        return tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """(member, subject, roi, hidden) -> h_global (member, subject, roi * readout)."""
        for layer in self.transformer.layers:
            block: Any = layer
            tokens = block.norm1(tokens + block.dropout1(self.attend(block.self_attn, tokens)))
            wide = block.dropout(functional.gelu(block.linear1(tokens)))  # (member, subject, roi, 4 * hidden)
            tokens = block.norm2(tokens + block.dropout2(block.linear2(wide)))
        h_global: Tensor = self.dropout(self.readout(tokens).flatten(-2))
        return h_global

    @staticmethod
    def attend(attention: Any, tokens: Tensor) -> Tensor:
        """(member, subject, roi, hidden), attention of ROIs to each other."""
        joint = linear(tokens, attention.in_proj_weight, attention.in_proj_bias)  # (member, subject, roi, 3 * hidden)
        parts = joint.view(
            -1, tokens.shape[2], 3, attention.num_heads, attention.head_dim
        )  # (member * subject, roi, 3, head, width)
        q, k, v = parts.transpose(1, 3).unbind(2)  # each (member * subject, head, roi, width)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)  # (member * subject, roi, head, width)
        out: Tensor = attention.out_proj(mixed.reshape(tokens.shape))
        return out


class GraphConvolution(plain.GraphConvolution):
    """Features are multiplied by the weights first, which makes them narrower, then by the operator (Clenshaw's order)."""

    def forward(self, nodes: Tensor, operator: Tensor) -> Tensor:
        """(member, roi, subject, width) -> (member, roi, subject, channel), with operators (member, roi, roi)."""
        members, rois, subjects, _ = nodes.shape
        flat, weights = nodes.flatten(1, 2), self.weights.unbind(1)  # (member, roi * subject, width), (member, width, channel)
        products = [torch.baddbmm(self.bias[:, None], flat, weights[0]), *(torch.bmm(flat, each) for each in weights[1:])]
        terms = [each.view(members, rois, -1) for each in products]  # nodes W_k, (member, roi, subject * channel)
        if len(terms) == 1:
            return terms[0].view(members, rois, subjects, -1)
        now, after = terms[-1], None
        for term in terms[-2:0:-1]:
            stepped = torch.baddbmm(term, operator, now, alpha=2)
            now, after = (stepped if after is None else stepped - after), now
        result = torch.baddbmm(terms[0], operator, now)
        return (result if after is None else result - after).view(members, rois, subjects, -1)


class LocalEncoder(plain.LocalEncoder):
    """ROIs before subjects, so that an operator is applied to all subjects of its member in one product."""

    def operator(self) -> Tensor:
        """(member, roi, roi) A hat, Eq. 5."""
        return propagation(self.adjacency, self.edges, self.beta)

    def first(self, rows: Tensor, operator: Tensor) -> Tensor:
        """(member, subject, roi, roi) -> nodes (member, subject, roi, channel)."""
        nodes: Tensor = self.layers[0](rows.transpose(1, 2), operator)  # (member, roi, subject, channel)
        return nodes.transpose(1, 2)

    def forward(self, nodes: Tensor, operator: Tensor) -> Tensor:  # type: ignore[override]
        """(member, subject, roi, channel) -> h_local (member, subject, roi * readout)."""
        nodes = nodes.transpose(1, 2)  # (member, roi, subject, channel), as all that follow
        for layer in list(self.layers)[1:]:
            nodes = layer(self.between(functional.relu(nodes)), operator)
        h_local: Tensor = self.dropout(nodes.transpose(1, 2).flatten(-2))
        return h_local


class Network(plain.Network):
    """All members as one. Float32 after the encoders, where casts would cost more than they save."""

    def encode(self, batch: Batch) -> tuple[Tensor, ...]:
        """h_global and h_local in float32."""
        if not self.config.imaging:
            return ()
        operator = self.local_encoder.operator()
        tokens, nodes = self.first(batch, operator)
        return self.global_encoder(tokens).float(), self.local_encoder(nodes, operator).float()

    def first(self, batch: Batch, operator: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and nodes, (member, subject, roi, ...) each; those of the batch, if it has them."""
        if FIRST[0] in batch.features:
            return batch[FIRST[0]], batch[FIRST[1]]
        rows = self.rows(batch)
        return self.global_encoder.first(rows), self.local_encoder.first(rows, operator)

    def decide(self, encoded: tuple[Tensor, ...], batch: Batch) -> dict[str, Tensor]:
        """As the plain form, without autocast."""
        with torch.autocast(batch.label.device.type, enabled=False):
            return super().decide(encoded, batch)

    def rows(self, batch: Batch) -> Tensor:
        """(member, subject, roi, roi), as the plain form."""
        config, fc = self.config, batch[self.config.view]  # (member, subject, edge)
        if config.confounds and batch.phenotypes.shape[-1]:
            fc = fc - batch.phenotypes @ self.get_buffer("slopes")
        fc = (fc - self.get_buffer("mean")[:, None]) * self.get_buffer("scale")[:, None]
        fc = dropped(fc, config.edge_dropout, self.training)
        rows: Tensor = _Squares.apply(fc, self.get_buffer("edge"))  # type: ignore[no-untyped-call]
        return rows


class _Squares(torch.autograd.Function):
    """(..., edge) values as symmetric (..., roi, roi) matrices with a diagonal of 0; faster than indexing, above all back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, edge: Tensor) -> Tensor:
        ctx.rois = len(edge)
        flat = values.flatten(0, -2).index_select(1, edge.flatten()).view(*values.shape[:-1], *edge.shape)
        flat.diagonal(dim1=-2, dim2=-1).zero_()
        return flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        above = torch.triu_indices(ctx.rois, ctx.rois, 1, device=gradients[0].device)
        both = (gradients[0] + gradients[0].mT).flatten(-2)  # (..., roi * roi)
        return both.flatten(0, -2).index_select(1, above[0] * ctx.rois + above[1]).view(*both.shape[:-1], -1), None


class Members(plain.Members):
    """Networks that are computed by their stack, which is made when it is first needed on a device."""

    _stack: Network | None = None

    def stack(self) -> Network:
        """All networks as one."""
        if self._stack is None:
            made = stacked([*self.networks], IN_STACK | LAYERS, ("edge", "off_diagonal"))
            object.__setattr__(self, "_stack", made)  # its weights are those of the networks, which has them registered
        assert self._stack is not None
        if self._stack.training != self.training:
            self._stack.train(self.training)
        return self._stack

    def _apply(self, *args: Any, **options: Any) -> Any:
        object.__setattr__(self, "_stack", None)  # weights that are moved to a device are no rows of a stack any more
        return super()._apply(*args, **options)  # type: ignore[no-untyped-call]

    def updated(self) -> Iterable[nn.Parameter]:
        """Weights of the stack, (member, ...) each."""
        return self.stack().parameters()

    def clip(self, largest: float) -> None:
        """Scale the gradient of each member down to this norm."""
        clip_each(list(self.stack().parameters()), largest)

    def each(self, function: Callable[[nn.Module, Batch], dict[str, Tensor]], batch: Batch) -> dict[str, Tensor]:
        """(member,) results, as the plain form."""
        members = len(self.networks)
        size = (members, len(batch) // members)
        return function(self.stack(), _of_all(batch, lambda value: value.view(*size, *value.shape[1:])))

    def member_parts(self, views: list[Batch]) -> dict[str, Tensor]:
        """(member, subject, ...) parts, as the plain form."""
        return self.stack().parts(self.of_all(views))

    def of_all(self, views: list[Batch]) -> Batch:
        """What all networks read of the same subjects, (member, subject, ...)."""
        first, view = views[0], self.stack().config.view
        batch = _of_all(first, lambda value: value.expand(len(views), *value.shape))
        if FIRST[0] in first.features:
            read = {name: first[name].transpose(0, 1) for name in FIRST}
        else:
            read = {view: torch.stack([each[view] for each in views])} if view in first.features else {}
        return replace(batch, features={**batch.features, **read})

    def affine(self, batch: Batch) -> Batch:
        """The batch with what the first layers give, (subject, member, roi, ...); `parts` then goes on from there."""
        stack = self.stack()
        if not stack.config.imaging:
            return batch
        first = stack.first(self.of_all(self.views(batch)), stack.local_encoder.operator())
        given = {name: value.transpose(0, 1) for name, value in zip(FIRST, first, strict=True)}
        return replace(batch, features={**batch.features, **given})


FORMS: dict[type[nn.Module], type[nn.Module]] = {
    plain.Members: Members,
    plain.Network: plain.Network,  # as it is: without this line it would get the form of the paper's network
}
IN_STACK: dict[type[nn.Module], type[nn.Module]] = {
    plain.GlobalEncoder: GlobalEncoder,
    plain.GraphConvolution: GraphConvolution,
    plain.LocalEncoder: LocalEncoder,
    plain.Network: Network,
}


def _of_all(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch of (member, subject, ...) tensors."""
    features = {name: change(value) for name, value in batch.features.items()}
    return Batch(features, change(batch.phenotypes), change(batch.label), change(batch.site))
