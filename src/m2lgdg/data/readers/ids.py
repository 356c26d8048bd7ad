"""Which row of a table is which subject of a cohort: ids that are spelled in different ways by two tools.

`structure` matches the tables of a cohort with it. A match that could be another one is an error that names both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from m2lgdg.storage import InputError

SESSION = re.compile(r"_ses-[A-Za-z0-9]+.*$")
LAST_NUMBER = re.compile(r"(?P<before>.*?)0*(?P<number>\d+)$")


def plain_id(name: str) -> str:
    """An id without what tools add or lose: the prefix sub-, a session, a trailing slash or .0, case, zeros before a number."""
    bare = SESSION.sub("", name.strip().rstrip("/").casefold()).removeprefix("sub-")
    bare = re.sub(r"^(\d+)\.0$", r"\1", bare)
    return re.sub(r"\d+", lambda digits: digits[0].lstrip("0") or "0", bare)


def matched_ids(ids: Sequence[str], subjects: Sequence[str], where: str) -> dict[str, str]:
    """The id of each subject that has one, by subject: as it is written, else by `plain_id`, else by the number alone.

    By the number alone (51456 for Caltech_0051456) only if one of the two is nothing but a number.
    """
    rules: list[tuple[Callable[[str], Iterable[str]], Callable[[str], Iterable[str]]]] = [
        (lambda one: [one], lambda one: [one]),
        (lambda one: [plain_id(one)], lambda one: [plain_id(one)]),
        (_number, _bare_number),
        (_bare_number, _number),
    ]
    found: dict[str, list[str]] = {}
    rest = list(ids)
    for of_subject, of_id in rules:
        by_key: dict[str, list[str]] = {}
        for subject in subjects:
            for key in of_subject(subject):
                by_key.setdefault(key, []).append(subject)
        later = []
        for one in rest:
            candidates = [subject for key in of_id(one) for subject in by_key.get(key, [])]
            if len(candidates) > 1:
                both = f"both {candidates[0]} and {candidates[1]}"
                raise InputError(f"{where}: id {one} could be {both}; write the ids as those of the subjects.")
            if candidates:
                found.setdefault(candidates[0], []).append(one)
            else:
                later.append(one)
        rest = later
    for subject, names in found.items():
        if len(names) > 1:
            raise InputError(f"{where}: ids {names[0]} and {names[1]} could both be subject {subject}; remove one of the rows.")
    return {subject: names[0] for subject, names in found.items()}


def _number(name: str) -> list[str]:
    """The number at the end of an id."""
    match = LAST_NUMBER.fullmatch(plain_id(name))
    return [match["number"]] if match else []


def _bare_number(name: str) -> list[str]:
    """The id, if it is nothing but a number."""
    bare = plain_id(name)
    return [bare] if bare.isdecimal() else []
