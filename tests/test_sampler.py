"""The site sampler: who meets in a batch, with tiny sites and sites of one class among the others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg.sampler import balanced_sites, site_batches


def cohort(counts):
    """Site and label numbers for (controls, patients) of each site, shuffled."""
    pairs = [(i, label) for i, both in enumerate(counts) for label, n in enumerate(both) for _ in range(n)]
    order = np.random.default_rng(0).permutation(len(pairs))
    site, label = np.array(pairs)[order].T
    return torch.from_numpy(site.copy()), torch.from_numpy(label.copy())


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), min_size=1, max_size=7),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_every_batch_is_sites_in_a_row_with_balanced_classes(counts, sites_per_batch, per_site):
    site, label = cohort(counts)
    batches = site_batches(site, label, generator(), sites_per_batch=sites_per_batch, per_site=per_site)
    together = min(sites_per_batch, len(counts))
    assert len(batches) == max(1, len(site) // (together * per_site))
    for rows in batches:
        assert len(rows) == together * per_site
        groups = rows.view(together, per_site)
        numbers = [set(site[group].tolist()) for group in groups]
        assert all(len(one) == 1 for one in numbers) and len(set.union(*numbers)) == together
        for group in groups:
            controls, patients = counts[int(site[group[0]])]
            drawn = label[group].bincount(minlength=2).tolist()
            if controls and patients:
                assert abs(drawn[0] - drawn[1]) == per_site % 2
                for one, there in enumerate((controls, patients)):
                    times = np.unique(group[label[group] == one], return_counts=True)[1]
                    assert times.max(initial=0) <= -(-drawn[one] // there)  # nobody twice before everybody once
            else:
                assert drawn[0 if controls else 1] == per_site


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_sites_come_in_proportion_to_a_power_of_their_size(power):
    site, label = cohort([(1, 1), (4, 4), (9, 9), (36, 36)])
    batches = site_batches(site, label, generator(), sites_per_batch=1, per_site=2, power=power, count=5_000)
    seen = torch.bincount(torch.stack([site[rows[0]] for rows in batches]), minlength=4) / len(batches)
    weight = np.array([2, 8, 18, 72.0]) ** power
    np.testing.assert_allclose(seen, weight / weight.sum(), atol=0.03)


def test_same_generator_same_batches():
    site, label = cohort([(5, 5), (3, 8), (10, 2)])
    one, two = (torch.cat(site_batches(site, label, generator(3), per_site=4)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, torch.cat(site_batches(site, label, generator(4), per_site=4)))


def test_sites_fit_for_statistics():
    site, label = cohort([(4, 4), (3, 9), (0, 8), (5, 6)])
    assert balanced_sites(site, label).tolist() == [0, 3]
    assert balanced_sites(site, label, least=3).tolist() == [0, 1, 3]
