"""What tests of networks share: parameters that hide nothing, as plain arrays for the oracles."""

import numpy as np
import torch

from m2lgdg.deep import Batch, Shape

EDGES, INPUTS, SITES = 10, 3, 4  # of `fc_network`


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


def fc_network(own, seed=0, scale=1.0):
    """The network of a method that stands on `erm.Network`, with random numbers everywhere; in eval mode."""
    rng = np.random.default_rng(seed)
    fitted = {"mean": rng.normal(size=EDGES).astype(np.float32), "scale": rng.uniform(0.5, 2, EDGES).astype(np.float32)}
    built = own.build(Shape(5, 20, INPUTS, SITES, fitted))
    draw = torch.Generator().manual_seed(seed)
    for value in built.parameters():
        value.data = scale * torch.randn(value.shape, generator=draw)
    return built.eval()


def fc_batch(site, label, seed=1):
    """Random connectivity and phenotypes of subjects with these sites and labels."""
    draw = torch.Generator().manual_seed(seed)
    fc, inputs = torch.randn(len(site), EDGES, generator=draw), torch.randn(len(site), INPUTS, generator=draw)
    return Batch({"fc": fc}, inputs, torch.as_tensor(label), torch.as_tensor(site))


def gradients(own, built, batch):
    """Of the total loss, by parameter."""
    built.zero_grad()
    sum(own.loss(built, batch).values()).backward()
    return {name: value.grad.clone() for name, value in built.named_parameters()}
