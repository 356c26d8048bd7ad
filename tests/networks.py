"""What tests of networks share: parameters that hide nothing, as plain arrays for the oracles."""

import torch


def randomised(module, seed=0, keep="adjacency"):
    """Every parameter and statistic of a module drawn anew, in eval mode; nothing stays 0 or 1 by its initialisation."""
    rng = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
            value.copy_(0.5 + torch.rand(value.shape, generator=rng))
        elif value.is_floating_point() and not name.endswith(keep):
            wide = max(1, value[0].numel()) if value.ndim > 1 else 4
            value.copy_(torch.randn(value.shape, generator=rng) * 1.5 / wide**0.5)
    return module.eval()


def numbers(module):
    """The parameters and statistics in double precision; copies, so that training does not change them."""
    return {name: value.double().numpy().copy() for name, value in module.state_dict().items()}
