"""Site names that differ in spelling only: by case, surrounding or repeated spaces, or Unicode form.

`leakage` reports them, because a site under two names would be trained on when it is the target. `m2lgdg convert
--merge-sites` merges them.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.findings import counted


def alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of two or more names that are the same up to case, spaces and Unicode form, in natural order."""
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names), key=natural_key):
        groups.setdefault(_key(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def merged(cohort: Cohort, groups: Sequence[Sequence[str]]) -> Cohort:
    """The cohort, and its excluded subjects, with one name for each group; a note records what was merged."""
    counts = Counter(cohort.sites.tolist())
    names = {spelling: common_spelling(group, counts) for group in groups for spelling in group}
    notes = [
        f"Site {shown(other)} ({counted(counts[other], 'subject')}) was merged into {name}: "
        "the names differ only by case, spaces or Unicode form."
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
    """Name of a merged site: its most frequent spelling (or the first such), in NFC and without superfluous spaces."""
    return _plain(max(group, key=lambda name: counts[name]))


def shown(name: str) -> str:
    """Name that can be told apart from similar ones: as Python writes it in ASCII, if spaces or Unicode form are unusual."""
    return name if name == _plain(name) else ascii(name)


def _plain(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).split())


def _key(name: str) -> str:
    """Canonical caseless form of a name (Unicode standard, D145), with single spaces."""
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
    return " ".join(folded.split())
