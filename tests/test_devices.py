"""What a CPU can show of recording; that a recorded step is the plain one, benchmarks/step.py shows on CUDA."""

import inspect
import re
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import m2lgdg
from m2lgdg import devices
from m2lgdg.deep import DeepMethod
from m2lgdg.devices import Recorded, Replayed, at_once, set_rates

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
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (1.0, lying)]
    optimizer = torch.optim.AdamW(groups, capturable=True, foreach=False)
    set_rates(optimizer, [0.25, 0.125])
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125]
    assert float(lying) == 0.125


def test_two_at_once_give_both_results_and_gradients():
    value = torch.tensor(3.0, requires_grad=True)
    one, other = at_once(lambda: value**2, lambda: 2 * value, value.device)
    assert (one.item(), other.item()) == (9.0, 6.0)
    assert float(torch.autograd.grad(one + other, value)[0]) == 8.0


@pytest.mark.parametrize(
    ("error", "gone"), [(None, False), (torch.OutOfMemoryError("full"), False), (RuntimeError("CUDA error"), True)]
)
def test_a_gpu_is_lost_where_it_does_nothing_any_more(monkeypatch, error, gone):
    """A full one is not lost, and one that was never used cannot be."""

    def ones(*size, device):
        assert device == "cuda"
        if error:
            raise error
        return torch.zeros(*size)

    monkeypatch.setattr(torch, "ones", ones)
    assert not devices.cuda_failed()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert devices.cuda_failed() == gone


class Graph:
    """Stands in for a CUDA graph: replaying it does again what was done under it."""

    recording = None

    def replay(self):
        for again in self.done:
            again()


@pytest.fixture
def graphs(monkeypatch):
    """CUDA's recording without CUDA; the list has every graph that was made."""
    made, streams = [], []

    @contextmanager
    def graph(one):
        one.done = []
        made.append(one)
        Graph.recording = one
        yield
        Graph.recording = None

    class Stream:
        def __init__(self, device=None):
            streams.append(device)

        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(-1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    devices._stream.cache_clear()
    yield made
    devices._stream.cache_clear()
    assert streams.count(0) <= 1  # each would keep 32 MiB


def test_a_step_is_recorded_after_three_and_again_in_another_phase(graphs):
    """Each step adds its rows and the phase to a sum; what a recording took for the phase stays in it."""
    total, stage, rows = torch.zeros(1), [1.0], torch.tensor([1.0, 2.0])

    def step(given):
        held = stage[0]  # Python's part, decided when the step is recorded

        def add():
            total.add_(held * given.sum())

        if Graph.recording:
            Graph.recording.done.append(add)
        else:
            add()
        return {"sum": total}

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    recorded = Recorded(step, optimizer, False, lambda: stage[0])
    expected = 0.0
    for count in range(1, 8):
        expected += count * 3.0
        assert float(recorded(rows * count)["sum"]) == expected
        assert len(graphs) == (count > 3)
    recorded(torch.tensor([1.0]))  # of another number: stepped as it is
    stage[0] = 10.0
    expected += 1.0
    for count in range(1, 6):
        expected += 30.0
        assert float(recorded(rows)["sum"]) == expected
        assert len(graphs) == 1 + (count > 3)


def test_what_is_seen_is_recorded_at_the_second_look_and_again_in_another_phase(graphs):
    weight, stage, found = torch.tensor(2.0), [1.0], torch.zeros(1)

    def compute():
        held = stage[0]

        def look():
            found.fill_(float(weight) * held)

        Graph.recording.done.append(look) if Graph.recording else look()
        return found

    seen = Replayed(compute, lambda: stage[0])
    for count in range(1, 4):
        weight.fill_(count)
        assert float(seen()) == count
        assert len(graphs) == (count > 1)
    stage[0] = 5.0
    assert [float(seen()), float(seen()), float(seen())] == [15.0] * 3
    assert len(graphs) == 2


@pytest.mark.parametrize("name", RECORDABLE)
def test_a_recorded_step_asks_the_device_for_no_answer(name, monkeypatch):
    cls = m2lgdg.METHODS[name]
    monkeypatch.setattr(cls, "optimizer", lambda self, network: Still(network.parameters(), lr=1e-3))
    kept, recording = cls.step, Recording()

    def step(self, network, batch, optimizer):
        with recording:
            return kept(self, network, batch, optimizer)

    looked = cls.validation_logits

    def seen_by(self, network, batch):
        with recording:
            return looked(self, network, batch)

    monkeypatch.setattr(cls, "step", step)
    monkeypatch.setattr(cls, "validation_logits", seen_by)
    cohort = m2lgdg.make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), seed=1)
    m2lgdg.make(name, **cls.variants["small"] | {"epochs": 3, "warmup": 1}).fit(cohort)
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
    """What Python decides in a step is decided once, when it is recorded, and again where the phase changes."""
    cls = m2lgdg.METHODS[name]
    asked = len(re.findall(r"self\.epoch\b", inspect.getsource(sys.modules[cls.__module__])))
    # `validate` runs between the steps; only its logits are recorded.
    stages = () if cls.phase is DeepMethod.phase else (cls.rate_factor, cls.stage, cls.validate)
    allowed = sum(len(re.findall(r"self\.epoch\b", inspect.getsource(one))) for one in stages)
    assert asked == allowed
