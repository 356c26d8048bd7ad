"""Site names that differ in spelling only: UM_1 and um-1, Site1 and Site 01, or letters that look the same.

`check` and `leakage` report them, because a site under two names would be trained on when it is the target. `m2lgdg convert
--merge-sites` merges them.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.findings import counted

DIFFER = "differ only by case, spaces, hyphens, leading zeros or Unicode form"


def alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of two or more names that `spelled_alike` makes equal, in natural order."""
    groups: dict[str, list[str]] = {}
    for name in sorted(sorted(set(names)), key=natural_key):  # 0 before 00, which the key makes equal
        groups.setdefault(spelled_alike(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def merged(cohort: Cohort, groups: Sequence[Sequence[str]]) -> Cohort:
    """The cohort, and its excluded subjects, with one name for each group; a note records what was merged."""
    counts = Counter(cohort.sites.tolist())
    names = {spelling: common_spelling(group, counts) for group in groups for spelling in group}
    notes = [
        f"Site {shown(other)} ({counted(counts[other], 'subject')}) was merged into {name}: the names {DIFFER}."
        for other, name in names.items()
        if other != name
    ]
    return dataclasses.replace(
        cohort,
        sites=np.array([names.get(site, site) for site in cohort.sites.tolist()], dtype=np.str_),
        excluded=tuple(one._replace(site=names.get(one.site, one.site)) for one in cohort.excluded),
        notes=(*cohort.notes, *notes),
    )


def common_spelling(group: Sequence[str], counts: Counter[str]) -> str:
    """Name of a merged site: its most frequent spelling (or the first such), without what cannot be seen."""
    return _plain(max(group, key=lambda name: counts[name]))


def shown(name: str) -> str:
    """Name that can be told apart from similar ones: as Python writes it in ASCII, if it has what cannot be seen."""
    return name if name == _plain(name) else ascii(name)


def spelled_alike(name: str) -> str:
    """The name without what is only spelling: case, separators, leading zeros, Unicode form, characters without a width."""
    words = re.findall(r"[^\W\d_]+|\d+|[^\w\s.\-]", unicodedata.normalize("NFKD", _plain(name).casefold()))
    return " ".join(word.lstrip("0") or "0" if word.isdigit() else word for word in words) or name


def _plain(name: str) -> str:
    """The name with usual letters and single spaces, and without soft hyphens, zero-width spaces and byte order marks."""
    seen = "".join(
        character for character in name if unicodedata.category(character) not in ("Cf", "Cc") or character.isspace()
    )
    return " ".join(unicodedata.normalize("NFKC", seen).split())
