"""What a CPU can show of recording and compiling; that a recorded step is the plain one, benchmarks/step.py shows on CUDA."""

import pytest
import torch
from torch import nn

from m2lgdg.devices import compiled, set_rate


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).train()


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_no_trace_and_a_failure_a_note(network, fails, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", self._call_impl))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    drawn = torch.get_rng_state()

    def loss():
        total = network(torch.randn(8, 3)).square().sum()
        if fails:
            raise RuntimeError("no compiler here")
        return total

    notes = compiled([network], loss, torch.device("cpu"))
    assert notes == (["The network was not compiled (RuntimeError: no compiler here)."] if fails else [])
    assert (network._compiled_call_impl is None) == fails
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(value.grad is None for value in network.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_rate_is_set_as_a_number_or_where_it_lies(network):
    lying = torch.tensor(1.0)
    for group in ({"lr": 1.0}, {"lr": lying}):
        set_rate(group, 0.25)
        assert float(group["lr"]) == 0.25
    assert float(lying) == 0.25
