"""Fast form of UFA-Net's block, with its convolution along time in the memory order a GPU needs."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from m2lgdg.fast import along_time
from m2lgdg.methods import ufa_net as plain


class Block(plain.Block):
    """1x1 convolution, product with the masked graph, then a convolution along each ROI's series."""

    def forward(self, features: Tensor, graph: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> (subject, channel out, time, roi)."""
        spread = self.mix(features) @ (graph * self.mask)  # (subject, channel, time, roi)
        filtered = along_time(self.temporal, functional.relu(self.norm_space(spread)))
        return functional.relu(self.dropout(self.norm_time(filtered)))


FORMS = {plain.Block: Block}
