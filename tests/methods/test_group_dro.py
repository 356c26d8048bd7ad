"""Group DRO: weights of sites against loops over batches, their cap, the loss and its gradient, a new start in each fit."""

import numpy as np
import pytest
import torch
from networks import fc_batch, fc_network, gradients

from m2lgdg import make_cohort
from m2lgdg.deep import Shape
from m2lgdg.losses import smoothed_cross_entropy
from m2lgdg.methods.group_dro import GroupDRO, capped
from m2lgdg.registry import create as make


def shape():
    return Shape(5, 20, 3, 4, {"mean": np.zeros(10, np.float32), "scale": np.ones(10, np.float32)})


def capped_loops(share, most):
    """Fill the largest first."""
    result, left, rest = {}, sum(share), dict(enumerate(share))
    while rest:
        i = max(rest, key=rest.get)
        level = rest[i] * left / sum(rest.values())
        if level <= most:
            return [result[j] if j in result else share[j] * left / sum(rest.values()) for j in range(len(share))]
        result[i] = most
        left -= most
        del rest[i]
    return [result[j] for j in range(len(share))]


@pytest.mark.parametrize("seed", range(8))
def test_the_cap_against_loops(seed):
    rng = np.random.default_rng(seed)
    share = rng.gamma(0.4, size=7) + 1e-4
    share /= share.sum() * rng.uniform(1, 2)
    most = share.sum() / rng.uniform(2, 7)
    given = capped(torch.from_numpy(share).float(), float(most))
    np.testing.assert_allclose(given, capped_loops(share.tolist(), most), atol=1e-6)
    assert given.max() <= most + 1e-6
    assert given.sum().item() == pytest.approx(share.sum(), abs=1e-6)


def test_a_cap_that_takes_all_or_nothing():
    share = torch.tensor([0.5, 0.3, 0.2])
    torch.testing.assert_close(capped(share, 1.0), share)
    torch.testing.assert_close(capped(share, 1 / 3), torch.full((3,), 1 / 3))


def weights_loops(rounds, n_sites, eta, memory, cap):
    weight, risk = [1 / n_sites] * n_sites, {}
    for losses in rounds:
        for one, loss in losses.items():
            risk[one] = memory * risk[one] + (1 - memory) * loss if one in risk else loss
        mass = sum(weight[one] for one in losses)
        raised = {one: weight[one] * np.exp(eta * risk[one]) for one in losses}
        new = capped_loops([raised[one] * mass / sum(raised.values()) for one in losses], cap / n_sites)
        for one, value in zip(losses, new, strict=True):
            weight[one] = value
    return weight


@pytest.mark.parametrize(("eta", "cap"), [(0.3, 50.0), (3.0, 2.0)])
def test_weights_and_loss_against_loops(eta, cap):
    """Four sites, three in a batch, the first always there; losses are those of random networks."""
    own = make("group-dro", widths=(7, 4), eta=eta, memory=0.6, cap=cap, label_smoothing=0.1)
    built = own.build(shape()).eval()
    rounds = []
    for i in range(6):
        site = torch.tensor([0, 1 + i % 3, 1 + (i + 1) % 3]).repeat_interleave(torch.tensor([4, 2, 3]))
        site = site[torch.randperm(9, generator=torch.Generator().manual_seed(i))]
        batch = fc_batch(site, torch.arange(9) % 2, seed=i)
        built.load_state_dict(fc_network(own, seed=i).state_dict())
        before = built.weight.clone()
        logits = built(batch).detach()
        losses = {}
        for one in sorted(set(site.tolist())):
            rows = site == one
            losses[one] = smoothed_cross_entropy(logits[rows], batch.label[rows], None, 0.1).item()
        rounds.append(losses)
        expected = weights_loops(rounds, 4, eta, 0.6, cap)
        loss = own.loss(built, batch)["ce"].item()
        np.testing.assert_allclose(built.weight, expected, atol=1e-5)
        assert loss == pytest.approx(sum(expected[one] * losses[one] for one in losses) * 4 / 3, rel=1e-4)
        (absent,) = {0, 1, 2, 3} - set(losses)
        assert built.weight[absent] == before[absent]
    assert built.weight.sum().item() == pytest.approx(1, abs=1e-5)
    assert built.weight.max() <= cap / 4 + 1e-6
    assert np.ptp(expected) > 0.1


def test_the_gradient_is_the_weighted_sum_of_the_sites_gradients():
    own, plain = make("group-dro", widths=(7, 4), eta=0.5, cap=3.0), make("erm", widths=(7, 4))
    site, label = torch.arange(24) % 3, torch.arange(24) // 3 % 2
    batch, built = fc_batch(site, label), fc_network(own)
    given = gradients(own, built, batch)
    parts = [gradients(plain, fc_network(plain), batch.take(torch.nonzero(site == one).flatten())) for one in range(3)]
    for name, value in given.items():
        expected = sum(built.weight[one] * parts[one][name] for one in range(3)) * 4 / 3
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{"eta": 0.0}, {"eta": 1.0, "cap": 1.0}])
def test_equal_weights_are_erm(fields):
    own, plain = make("group-dro", widths=(7, 4), **fields), make("erm", widths=(7, 4))
    batch = fc_batch(torch.arange(24) % 3, torch.arange(24) // 3 % 2)
    expected = gradients(plain, fc_network(plain), batch)
    for name, value in gradients(own, fc_network(own), batch).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_one_site_one_class_and_huge_losses():
    own = make("group-dro", widths=(7, 4), eta=1.0)
    built = fc_network(own)
    given = gradients(own, built, fc_batch([2] * 6, [1] * 6))
    assert all(torch.isfinite(value).all() for value in given.values())
    torch.testing.assert_close(built.weight, torch.full((4,), 0.25))
    own.reweigh(built, torch.tensor([0, 1]), torch.tensor([1e4, 1.0]))
    torch.testing.assert_close(built.weight, torch.tensor([0.5, 0.0, 0.25, 0.25]))


def test_each_fit_begins_anew_and_nothing_of_it_is_saved(monkeypatch):
    seen = []
    usual = GroupDRO.loss

    def watched(self, built, batch):
        seen.append(built.weight.clone())
        return usual(self, built, batch)

    monkeypatch.setattr(GroupDRO, "loss", watched)
    cohort = make_cohort("tiny", seed=0)
    own = make("group-dro", widths=(8, 4), epochs=3, warmup=1, per_site=4, sites_per_batch=2, eta=1.0)
    states = []
    for _ in range(2):
        seen.clear()
        states.append(own.fit(cohort, seed=0).state_)
        torch.testing.assert_close(seen[0], torch.full((4,), 0.25))
        assert seen[-1].max() > 0.26
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name])
    assert {name for name in states[0] if name.startswith("network.")} == {
        f"network.{name}" for name in make("erm", widths=(8, 4)).build(shape()).state_dict()
    }
