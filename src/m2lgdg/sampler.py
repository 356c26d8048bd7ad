"""Who meets in a batch, for methods that compare sites: some sites, the same number of subjects of each, classes balanced.

`DeepMethod.batches` of such a method calls `site_batches` once an epoch; the default there is a plain shuffle.
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
    """An epoch of batches as positions: `count` times `sites_per_batch` sites, `per_site` subjects of each, in a row.

    Sites are drawn without replacement with probability proportional to size ** power (0: all alike, 1: as subjects come).
    Inside a site half of the subjects are of each class, drawn without replacement as far as the class reaches and then again;
    a site of one class gives that class only. `count` is what makes an epoch about as long as one shuffle of everybody.
    """
    numbers, sizes = torch.unique(site, return_counts=True)
    together = min(sites_per_batch, len(numbers))
    chance = sizes.double() ** power
    members = {int(n): [torch.nonzero((site == n) & (label == one)).flatten() for one in (0, 1)] for n in numbers}
    count = max(1, len(site) // (together * per_site)) if count is None else count
    batches = []
    for _ in range(count):
        chosen = numbers[torch.multinomial(chance, together, replacement=False, generator=order)]
        batches.append(torch.cat([_from_site(members[int(n)], per_site, order) for n in chosen]))
    return batches


def balanced_sites(site: Tensor, label: Tensor, least: int = 4) -> Tensor:
    """Numbers of the sites with at least `least` subjects of each class: fit for statistics within a site."""
    numbers = torch.unique(site)
    enough = [min(int(((site == n) & (label == one)).sum()) for one in (0, 1)) >= least for n in numbers]
    found: Tensor = numbers[torch.tensor(enough, dtype=torch.bool)]
    return found


def _from_site(classes: list[Tensor], wanted: int, order: torch.Generator) -> Tensor:
    """(wanted,) positions, half of each class; an odd one goes to either class by chance."""
    first = wanted // 2 + (int(torch.randint(2, (1,), generator=order)) if wanted % 2 else 0)
    shares = [first, wanted - first]
    if not len(classes[0]) or not len(classes[1]):
        shares = [wanted if len(one) else 0 for one in classes]
    drawn = [_draw(members, share, order) for members, share in zip(classes, shares, strict=True) if share]
    return torch.cat(drawn)


def _draw(members: Tensor, wanted: int, order: torch.Generator) -> Tensor:
    """`wanted` members, nobody twice before everybody was drawn once."""
    rounds = [torch.randperm(len(members), generator=order) for _ in range(-(-wanted // len(members)))]
    return members[torch.cat(rounds)[:wanted]]
