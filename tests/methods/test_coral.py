"""CORAL: the penalty and its gradient against a loop over pairs, who enters it, its limits, and what it does in training."""

import itertools

import numpy as np
import pytest
import torch
from networks import fc_batch, fc_network, gradients

from m2lgdg import make_cohort
from m2lgdg.methods.coral import coral_penalty
from m2lgdg.registry import create as make


def loops(z, site):
    width = z.shape[1]
    moments = {}
    for one in sorted(set(site)):
        rows = [z[i] for i in range(len(z)) if site[i] == one]
        mean = [sum(row[j] for row in rows) / len(rows) for j in range(width)]
        covariance = [
            [sum((row[j] - mean[j]) * (row[k] - mean[k]) for row in rows) / max(len(rows) - 1, 1) for k in range(width)]
            for j in range(width)
        ]
        moments[one] = np.array(mean), np.array(covariance)
    pairs = list(itertools.combinations(moments.values(), 2))
    return sum(((a[0] - b[0]) ** 2).mean() + ((a[1] - b[1]) ** 2).mean() for a, b in pairs) / len(pairs)


SITES = np.array([2, 0, 2, 5, 0, 5, 0, 2, 0, 7, 5, 5])  # in no order, of 4, 3, 4 and 1 subjects


def test_the_penalty_and_its_gradient_against_a_loop_over_pairs():
    z = np.random.default_rng(0).normal(size=(12, 3)) * [1, 2, 0.5] + SITES[:, None] * [0.3, -0.1, 0.2]
    given = torch.tensor(z, requires_grad=True)
    penalty = coral_penalty(given, torch.from_numpy(SITES))
    assert penalty.dtype == torch.float32
    assert penalty.item() == pytest.approx(loops(z, SITES), rel=1e-5)
    penalty.backward()
    slope = np.empty_like(z)
    for place in np.ndindex(z.shape):
        moved = np.zeros_like(z)
        moved[place] = 1e-5
        slope[place] = (loops(z + moved, SITES) - loops(z - moved, SITES)) / 2e-5
    np.testing.assert_allclose(given.grad, slope, atol=1e-5)


def test_in_single_precision_whatever_it_is_given():
    z = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = coral_penalty(z, torch.from_numpy(SITES))
    torch.testing.assert_close(inside, coral_penalty(z, torch.from_numpy(SITES)), rtol=0, atol=0)


@pytest.mark.parametrize("site", [[], [3], [3, 3, 3], [3, 4]])
def test_few_sites_and_single_subjects(site):
    z = torch.randn(len(site), 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    penalty = coral_penalty(z, torch.tensor(site, dtype=torch.long))
    penalty.backward()
    expected = loops(z.detach().double().numpy(), site) if len(set(site)) > 1 else 0.0
    assert penalty.item() == pytest.approx(expected, rel=1e-5)
    assert torch.isfinite(z.grad).all()
    assert len(set(site)) > 1 or not z.grad.any()


def test_small_sites_stay_out_of_the_penalty_and_in_the_cross_entropy():
    own = make("coral", widths=(7, 4), penalty_weight=0.7)
    site = torch.tensor([0] * 8 + [1] * 7 + [2] * 9 + [3])  # 4 + 4, 3 + 4 and 5 + 4 of the classes, one subject
    label = torch.tensor([0, 1] * 4 + [0] * 3 + [1] * 4 + [0] * 5 + [1] * 4 + [1])
    own.batches(site, label, torch.Generator().manual_seed(0))
    built, batch = fc_network(own), fc_batch(site, label)
    terms, parts = own.loss(built, batch), built.parts(batch)
    kept = np.isin(site, [0, 2])
    expected = 0.7 * loops(parts["fused"].detach().double().numpy()[kept], site.numpy()[kept])
    assert terms["alignment"].item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(terms["ce"], own.cross_entropy(parts["logits"], batch))
    own.least_per_class = 5
    own.batches(site, label, torch.Generator().manual_seed(0))
    assert own.loss(built, batch)["alignment"] == 0.0


def test_weight_0_is_erm():
    site, label = torch.arange(24) % 3, torch.arange(24) // 3 % 2
    given = {}
    for name, fields in [("erm", {}), ("coral", {"penalty_weight": 0.0}), ("aligned", {"penalty_weight": 1.0})]:
        own = make("coral" if fields else "erm", widths=(7, 4), **fields)
        own.batches(site, label, torch.Generator().manual_seed(0))
        given[name] = gradients(own, fc_network(own), fc_batch(site, label))
    for name, value in given["erm"].items():
        torch.testing.assert_close(given["coral"][name], value)
    assert not torch.allclose(given["aligned"]["encoder.0.weight"], given["erm"]["encoder.0.weight"])


def test_training_draws_sites_together():
    cohort = make_cohort("tiny", sizes={"a": 20, "b": 20, "c": 20}, seed=0)
    apart = {}
    for weight in (0.0, 10.0):
        fields = {"widths": (32, 16), "epochs": 30, "warmup": 2, "dropout": 0.0, "penalty_weight": weight}
        z = make("coral", **fields).fit(cohort, seed=0).represent(cohort)
        site_means = np.array([z[cohort.sites == site].mean(axis=0) for site in cohort.site_names])
        apart[weight] = site_means.var(axis=0).sum() / z.var(axis=0).sum()  # a share: shrinking alone gains nothing
    assert apart[10.0] < 0.5 * apart[0.0]
