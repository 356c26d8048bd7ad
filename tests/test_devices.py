"""What a CPU can show of recording; that a recorded step is the plain one, benchmarks/step.py shows on CUDA."""

import inspect
import sys

import pytest
import torch

import m2lgdg
from m2lgdg.deep import DeepMethod
from m2lgdg.devices import at_once, set_rate


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


@pytest.mark.parametrize(
    "name", [name for name, cls in m2lgdg.METHODS.items() if issubclass(cls, DeepMethod) and cls.recordable]
)
def test_a_recorded_step_does_not_ask_for_the_epoch(name):
    """What Python decides in a step is decided once, when it is recorded."""
    assert "_epoch" not in inspect.getsource(sys.modules[m2lgdg.METHODS[name].__module__]).replace("vae_epochs", "")
