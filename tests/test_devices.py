"""What a CPU can show of recording; that a recorded step is the plain one, benchmarks/step.py shows on CUDA."""

import inspect
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import m2lgdg
from m2lgdg.deep import DeepMethod
from m2lgdg.devices import at_once, set_rate

RECORDABLE = [name for name, cls in m2lgdg.METHODS.items() if issubclass(cls, DeepMethod) and cls.recordable]
# A number asked of the device, a size that depends on values, or a constant made in Python: CUDA refuses to record each.
REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "equal.default", "is_nonzero")


class Recording(TorchDispatchMode):
    """Stands in for CUDA's recording: what that would refuse is noted."""

    def __init__(self):
        super().__init__()
        self.refused, self.calls = set(), 0

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        name = operation.name().removeprefix("aten::")
        self.calls += 1
        by_mask = name.startswith("index") and any(
            torch.is_tensor(one) and one.dtype == torch.bool
            for where in given
            if isinstance(where, list | tuple)
            for one in where
        )
        if by_mask or name.startswith(REFUSED):
            self.refused.add(name)
        return operation(*given, **(named or {}))


class Still(torch.optim.SGD):
    """An optimizer that counts and stays: on a CPU PyTorch's read their own counters, on CUDA they do not."""

    def step(self, closure=None):
        self.taken = getattr(self, "taken", 0) + 1


def test_a_rate_is_set_as_a_number_or_where_it_lies():
    lying = torch.tensor(1.0)
    for group in ({"lr": 1.0}, {"lr": lying}):
        set_rate(group, 0.25)
        assert float(group["lr"]) == 0.25
    assert float(lying) == 0.25


def test_two_at_once_give_both_results_and_gradients():
    value = torch.tensor(3.0, requires_grad=True)
    one, other = at_once(lambda: value**2, lambda: 2 * value, value.device)
    assert (one.item(), other.item()) == (9.0, 6.0)
    assert float(torch.autograd.grad(one + other, value)[0]) == 8.0


@pytest.mark.parametrize("name", RECORDABLE)
def test_a_recorded_step_asks_the_device_for_no_answer(name, monkeypatch):
    cls = m2lgdg.METHODS[name]
    monkeypatch.setattr(cls, "optimizer", lambda self, network: Still(network.parameters(), lr=1e-3))
    kept, recording = cls.step, Recording()

    def step(self, network, batch, optimizer):
        with recording:
            return kept(self, network, batch, optimizer)

    monkeypatch.setattr(cls, "step", step)
    cohort = m2lgdg.make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), seed=1)
    m2lgdg.make(name, **cls.variants["small"] | {"epochs": 2, "warmup": 1}).fit(cohort)
    assert recording.calls > 100
    assert not recording.refused


def test_what_a_recording_refuses_is_noticed():
    value, many = torch.tensor(2.0), torch.arange(4.0)
    asked = [
        lambda: float(value),
        lambda: many[many > 1],
        lambda: torch.tensor([1.0]),
        lambda: many.nonzero(),
        lambda: bool(value),
    ]
    for ask in asked:
        with Recording() as recording:
            ask()
        assert recording.refused
    with Recording() as recording:
        (many[torch.arange(2)] * value).sum()
    assert not recording.refused


@pytest.mark.parametrize("name", RECORDABLE)
def test_a_recorded_step_does_not_ask_for_the_epoch(name):
    """What Python decides in a step is decided once, when it is recorded."""
    assert "_epoch" not in inspect.getsource(sys.modules[m2lgdg.METHODS[name].__module__]).replace("vae_epochs", "")
