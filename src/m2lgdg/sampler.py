"""Batches for methods that compare sites: a few sites per batch, equally many subjects of each, classes balanced.

The `batches` hook of such a method calls `site_batches` once per epoch; the default of `DeepMethod` is a plain shuffle.
"""

from __future__ import annotations

import torch
from torch import Tensor


def site_batches(
    site: Tensor,
    label: Tensor,
    order: torch.Generator,
    *,
    sites_per_batch: int = 8,
    per_site: int = 8,
    power: float = 0.5,
    count: int | None = None,
) -> list[Tensor]:
    """The batches of one epoch, as positions: each holds `sites_per_batch` sites with `per_site` subjects, site after site.

    Sites are drawn without replacement, with probability proportional to size ** power (0: all sites alike, 1: by size).
    Half of a site's subjects are of each class. They are drawn without replacement until the class is used up, then again.
    A site with one class contributes that class only. By default `count` makes an epoch about as long as one pass over all
    subjects.
    """
    numbers, sizes = torch.unique(site, return_counts=True)
    n_sites = min(sites_per_batch, len(numbers))
    weights = sizes.double() ** power
    members = {int(n): [torch.nonzero((site == n) & (label == value)).flatten() for value in (0, 1)] for n in numbers}
    count = max(1, len(site) // (n_sites * per_site)) if count is None else count
    batches = []
    for _ in range(count):
        chosen = numbers[torch.multinomial(weights, n_sites, replacement=False, generator=order)]
        batches.append(torch.cat([_from_site(members[int(n)], per_site, order) for n in chosen]))
    return batches


def balanced_sites(site: Tensor, label: Tensor, least: int = 4) -> Tensor:
    """Numbers of the sites with at least `least` subjects of each class, enough for statistics within a site."""
    numbers = torch.unique(site)
    enough = [min(int(((site == n) & (label == value)).sum()) for value in (0, 1)) >= least for n in numbers]
    balanced: Tensor = numbers[torch.tensor(enough, dtype=torch.bool)]
    return balanced


def _from_site(classes: list[Tensor], wanted: int, order: torch.Generator) -> Tensor:
    """(wanted,) positions, half of each class; with an odd number the extra subject is of a random class."""
    first = wanted // 2 + (int(torch.randint(2, (1,), generator=order)) if wanted % 2 else 0)
    counts = [first, wanted - first]
    if not len(classes[0]) or not len(classes[1]):
        counts = [wanted if len(members) else 0 for members in classes]
    drawn = [_draw(members, count, order) for members, count in zip(classes, counts, strict=True) if count]
    return torch.cat(drawn)


def _draw(members: Tensor, wanted: int, order: torch.Generator) -> Tensor:
    """Draw `wanted` members; no member is drawn again before all others have been drawn as often."""
    rounds = [torch.randperm(len(members), generator=order) for _ in range(-(-wanted // len(members)))]
    return members[torch.cat(rounds)[:wanted]]
