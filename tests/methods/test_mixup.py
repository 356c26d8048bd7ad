"""Mixup between sites: who is mixed with whom, mixtures that stay correlation matrices, the loss against loops, its limits."""

import numpy as np
import pytest
import torch
from networks import fc_batch, fc_network, gradients

from m2lgdg.connectivity import fc_features
from m2lgdg.deep import Batch
from m2lgdg.methods.mixup import mixed_connectivity, site_pairs
from m2lgdg.registry import create as make

SITE = torch.tensor([5, 0, 2, 9]).repeat_interleave(6)
LABEL = torch.tensor([0, 0, 0, 1, 1, 1]).repeat(4)


def test_sites_are_paired_in_a_circle_and_classes_meet():
    torch.manual_seed(0)
    met, orders = set(), set()
    for _ in range(40):
        first, second = site_pairs(SITE)  # (site, subject) each
        assert sorted(first.flatten().tolist()) == sorted(second.flatten().tolist()) == list(range(24))
        following = {}
        for a, b in zip(SITE[first], SITE[second], strict=True):
            assert len(set(a.tolist())) == len(set(b.tolist())) == 1
            following[int(a[0])] = int(b[0])
        circle = [0]
        while following[circle[-1]] != 0:
            circle.append(following[circle[-1]])
        assert sorted(circle) == [0, 2, 5, 9]  # one circle, nobody with itself
        orders.add(tuple(circle))
        met |= set(zip(LABEL[first].flatten().tolist(), LABEL[second].flatten().tolist(), strict=True))
    assert met == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(orders) == 6


def test_mixtures_of_connectivity_are_correlation_matrices():
    """Few time points, so that the matrices are singular and any other mixture would leave the cone."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(2, 2, 8))
    series = [(rng.normal(size=(60, 2)) @ mixing[i % 2] + 0.1 * rng.normal(size=(60, 8))).astype(np.float32) for i in range(12)]
    fc = torch.from_numpy(fc_features(series).astype(np.float32))
    share = torch.linspace(0, 1, 6)[:, None]
    mixed = mixed_connectivity(fc[::2], fc[1::2], share)
    rows, columns = np.triu_indices(8, 1)
    for i in range(6):
        matrix = np.eye(8)
        matrix[rows, columns] = matrix[columns, rows] = np.tanh(mixed[i].double().numpy())
        assert np.linalg.eigvalsh(matrix).min() > -1e-5
        first, second = (np.corrcoef(series[2 * i + j], rowvar=False)[rows, columns] for j in (0, 1))
        expected = share[i].item() * first + (1 - share[i].item()) * second
        np.testing.assert_allclose(matrix[rows, columns], expected, atol=1e-5)
    np.testing.assert_allclose(mixed[0], fc[1], atol=1e-4)  # the ends are the subjects themselves
    np.testing.assert_allclose(mixed[-1], fc[10], atol=1e-4)
    wild = torch.tensor([[0.0, 3.8002, 50.0, -50.0]])
    assert torch.isfinite(mixed_connectivity(wild, wild, torch.tensor([[0.3]]))).all()


@pytest.mark.parametrize("per_subject", [False, True])
def test_the_loss_against_loops(per_subject):
    own = make("mixup", widths=(7, 4), alpha=0.8, share_per_subject=per_subject, label_smoothing=0.1)
    built, batch = fc_network(own), fc_batch(SITE, LABEL)
    torch.manual_seed(3)
    given = own.loss(built, batch)["ce"].item()
    torch.manual_seed(3)
    first, second = site_pairs(SITE).flatten(1).tolist()
    share = own.mixing_weights(4, 6).flatten().tolist()
    total = 0.0
    for one, other, part in zip(first, second, share, strict=True):
        fc = np.arctanh(part * np.tanh(batch["fc"][one].numpy()) + (1 - part) * np.tanh(batch["fc"][other].numpy()))
        phenotypes = part * batch.phenotypes[one] + (1 - part) * batch.phenotypes[other]
        mixed = Batch({}, phenotypes[None], batch.label[:1], batch.site[:1])
        logits = built.classify(built.encode(torch.from_numpy(fc)[None]), mixed)[0].detach().double().numpy()
        log = logits - np.log(np.exp(logits).sum())
        for number, weight in ((one, part), (other, 1 - part)):
            label = int(batch.label[number])
            total -= weight * (0.95 * log[label] + 0.05 * log[1 - label])
    assert given == pytest.approx(total / 24, rel=1e-4)


def test_shares_are_of_a_pair_of_sites_or_of_subjects():
    torch.manual_seed(0)
    share = make("mixup").mixing_weights(4000, 3)
    assert (share == share[:, :1]).all()
    alone = make("mixup", share_per_subject=True).mixing_weights(4000, 3)
    assert (alone[:, 0] != alone[:, 1]).float().mean() > 0.9
    for drawn in (share[:, 0], alone.flatten()):
        assert drawn.mean().item() == pytest.approx(0.5, abs=0.03)
        assert drawn.var().item() == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01)  # of Beta(0.2, 0.2)
        assert drawn.min() >= 0
        assert drawn.max() <= 1


@pytest.mark.parametrize(("site", "alpha"), [(SITE, 0.0), (torch.zeros(24).long(), 0.2)])
def test_nothing_mixed_is_erm(site, alpha):
    own, plain, batch = make("mixup", widths=(7, 4), alpha=alpha), make("erm", widths=(7, 4)), fc_batch(site, LABEL)
    expected = gradients(plain, fc_network(plain), batch)
    for name, value in gradients(own, fc_network(own), batch).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    mixing, batch = make("mixup", widths=(7, 4)), fc_batch(SITE, LABEL)
    torch.manual_seed(0)
    given = gradients(mixing, fc_network(mixing), batch)
    assert not torch.allclose(given["encoder.0.weight"], expected["encoder.0.weight"])
    assert all(torch.isfinite(value).all() for value in given.values())
