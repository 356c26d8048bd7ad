"""IRM: slopes against autograd, halves, the penalty against loops, the switch of its weight, and what may be kept."""

import numpy as np
import pytest
import torch
from networks import fc_batch, fc_network, gradients

from m2lgdg import make_cohort
from m2lgdg.losses import smoothed_cross_entropy
from m2lgdg.methods.irm import IRM, halves, irm_penalty, scale_slope
from m2lgdg.registry import create as make


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_slopes_against_autograd(smoothing):
    logits = 3 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([0, 1, 1, 0, 1, 0])
    expected = []
    for i in range(6):
        scale = torch.ones((), requires_grad=True)
        smoothed_cross_entropy(scale * logits[i : i + 1], label[i : i + 1], None, smoothing).backward()
        expected.append(scale.grad)
    torch.testing.assert_close(scale_slope(logits, label, smoothing), torch.stack(expected))
    if not smoothing:
        known = (logits.softmax(dim=1) * logits).sum(dim=1) - logits[torch.arange(6), label]
        torch.testing.assert_close(scale_slope(logits, label, smoothing), known)


@pytest.mark.parametrize("seed", range(5))
def test_halves_of_a_site_hold_both_classes_where_it_has_two_of_each(seed):
    counts = {0: (4, 4), 1: (2, 2), 2: (3, 5), 3: (3, 2), 4: (0, 5), 5: (1, 0), 6: (1, 2)}
    site = torch.tensor([one for one, both in counts.items() for _ in range(sum(both))])
    label = torch.tensor([label for both in counts.values() for label in (0, 1) for _ in range(both[label])])
    order = torch.randperm(len(site), generator=torch.Generator().manual_seed(seed))
    site, label = site[order], label[order]
    second = halves(site, label)
    for one, both in counts.items():
        sizes = [int(((site == one) & (second == half)).sum()) for half in (False, True)]
        assert abs(sizes[0] - sizes[1]) <= 1
        for number in (0, 1):
            parts = [int(((site == one) & (label == number) & (second == half)).sum()) for half in (False, True)]
            assert sum(parts) == both[number]
            assert abs(parts[0] - parts[1]) <= 1


def loops(slope, second, site):
    products = []
    for one in sorted(set(site)):
        sides = [[slope[i] for i in range(len(site)) if site[i] == one and second[i] == half] for half in (False, True)]
        products.append(np.prod([sum(side) / len(side) if side else 0.0 for side in sides]))
    return sum(products) / len(products)


def test_the_penalty_against_loops():
    site = np.array([4, 0, 4, 1, 0, 1, 4, 0, 4, 0, 1, 9])
    label = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1])
    slope = np.random.default_rng(0).normal(size=12)
    given = torch.tensor(slope, requires_grad=True)
    penalty = irm_penalty(given, label, torch.from_numpy(site))
    second = halves(torch.from_numpy(site), label).tolist()
    assert penalty.item() == pytest.approx(loops(slope, second, site), rel=1e-6)
    penalty.backward()
    for i in range(12):
        moved = np.eye(12)[i] * 1e-5
        expected = (loops(slope + moved, second, site) - loops(slope - moved, second, site)) / 2e-5
        assert given.grad[i].item() == pytest.approx(expected, abs=1e-6)


def test_the_product_of_halves_has_the_mean_of_the_squared_slope():
    """Slopes of mean 0.3 and sd 1: the square of a mean of 8 would be 0.09 + 1/8 on average."""
    slope = 0.3 + torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    site = torch.arange(2000).repeat_interleave(8)
    penalty = irm_penalty(slope.flatten(), torch.arange(16000) % 2, site)
    assert penalty.item() == pytest.approx(0.09, abs=0.02)


@pytest.mark.parametrize("rows", [0, 1])
def test_nothing_to_split(rows):
    slope = torch.full((rows,), 2.0, requires_grad=True)
    penalty = irm_penalty(slope, torch.zeros(rows).long(), torch.zeros(rows).long())
    penalty.backward()
    assert penalty == 0.0
    assert not slope.grad.any()


def ready(epoch, site, label, **fields):
    own = make("irm", widths=(7, 4), **fields)
    own.epoch = epoch
    own.batches(site, label, torch.Generator().manual_seed(0))
    return own


def test_the_weight_before_and_after_the_switch_and_who_enters():
    site = torch.tensor([0] * 8 + [1] * 7 + [2] * 9 + [3])  # 4 + 4, 3 + 4 and 5 + 4 of the classes, one subject
    label = torch.tensor([0, 1] * 4 + [0] * 3 + [1] * 4 + [0] * 5 + [1] * 4 + [1])
    batch = fc_batch(site, label)
    kept = np.isin(site, [0, 2])
    for epoch, weight in [(0, 1.0), (39, 1.0), (40, 100.0), (150, 100.0)]:
        own = ready(epoch, site, label, label_smoothing=0.1)
        built = fc_network(own)
        logits, terms = built(batch).detach(), own.loss(built, batch)
        slope = scale_slope(logits, label, 0.1).double().numpy()[kept]
        second = halves(site[kept], label[kept]).tolist()
        assert terms["invariance"].item() == pytest.approx(weight * loops(slope, second, site.numpy()[kept]), rel=1e-4)
        torch.testing.assert_close(terms["ce"], own.cross_entropy(logits, batch))


def test_weight_0_is_erm():
    site, label = torch.arange(24) % 3, torch.arange(24) // 3 % 2
    own, batch = make("erm", widths=(7, 4)), fc_batch(site, label)
    plain = gradients(own, fc_network(own), batch)
    own = ready(5, site, label, penalty_weight=0.0, anneal=0.0)
    for name, value in gradients(own, fc_network(own), batch).items():
        torch.testing.assert_close(value, plain[name])
    own = ready(50, site, label)
    assert not torch.allclose(gradients(own, fc_network(own), batch)["encoder.0.weight"], plain["encoder.0.weight"])


def test_the_optimizer_forgets_once_at_the_switch_in_each_fit(monkeypatch):
    steps = []
    usual = IRM.step

    def watched(self, built, batch, optimizer):
        terms = usual(self, built, batch, optimizer)
        steps.append((self.epoch, int(next(iter(optimizer.state.values()))["step"])))
        return terms

    monkeypatch.setattr(IRM, "step", watched)
    fields = {"widths": (8, 4), "epochs": 5, "warmup": 1, "anneal": 0.4, "per_site": 4, "sites_per_batch": 2}
    own = make("irm", **fields)
    assert own.switch == 2
    for _ in range(2):
        steps.clear()
        own.fit(make_cohort("tiny", seed=0), seed=0)
        each = len(steps) // 5
        assert each > 1
        assert steps == [(epoch, (epoch - 2 * (epoch >= 2)) * each + i + 1) for epoch in range(5) for i in range(each)]


def test_only_epochs_under_the_full_penalty_are_kept():
    own = make("irm", epochs=100, warmup=10, anneal=0.3)
    assert [own.candidate(epoch) for epoch in (0, 10, 29, 30, 99)] == [False, False, False, True, True]
    own = make("irm", epochs=100, warmup=40, anneal=0.3)
    assert [own.candidate(epoch) for epoch in (30, 39, 40)] == [False, False, True]
    assert make("irm", epochs=3, warmup=1, anneal=1.0).candidate(2)  # one is left
