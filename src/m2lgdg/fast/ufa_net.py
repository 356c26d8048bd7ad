"""Fast form of UFA-Net's block: its convolution along time, by `fast.time_convolution`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from m2lgdg.fast.time_convolution import along_time
from m2lgdg.methods import ufa_net as plain


class Block(plain.Block):
    """Channels mixed, ROIs mixed along the masked graph, then a convolution along each ROI's series."""

    def forward(self, features: Tensor, graph: Tensor) -> Tensor:
        """(subject, channel, time, roi) -> the same with other channels."""
        spread = self.mix(features) @ (graph * self.mask)  # (subject, channel, time, roi)
        through = along_time(self.temporal, functional.relu(self.norm_space(spread)))
        return functional.relu(self.dropout(self.norm_time(through)))


FORMS = {plain.Block: Block}
