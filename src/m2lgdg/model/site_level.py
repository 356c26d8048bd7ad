"""The level of a site: a shift of the logit, learned from unlabelled subjects of the site, so that decisions fit there.

`m2lgdg adapt` stores it in a model, and the adapted track of a study computes it for each target. Sites differ in the mean of a
model's scores more than in their order; the shift makes the mean probability of a site equal to its share of patients.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.metrics import logit, sigmoid

STEPS = 10  # logits are rounded to a tenth, so that a model stores counts instead of scores of subjects
MOST = 50  # tenths; a logit further out counts as this one, so that no single subject matters much
PRIOR_SUBJECTS = 2  # weight of source: the shift of n subjects is multiplied by n / (n + PRIOR_SUBJECTS)
ADAPT_SUBJECTS = 20  # of a batch, where a study or model does not say otherwise
LEAST = 2  # subjects; one subject has no level
EXTREME = 0.01  # shares of patients nearer to 0 or 1 are refused

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class SiteLevel(NamedTuple):
    """Level of one site, as `facts_["site_level"]` of a model stores it."""

    shift: float  # of the logit, shrunk for few subjects
    subjects: int
    prevalence: float  # share of patients at the site
    assumed: bool  # whether it is the share of source, because that of the site was not given
    site: str
    recalibrated: bool  # whether the new-site calibration of the model is that of left-out sites at their level

    def sentence(self) -> str:
        """One sentence for every place where probabilities at this level are shown."""
        given = "assumed, that of the training sites" if self.assumed else "given"
        return (
            f"Probabilities are at the level of site {self.site or '(no name)'}, learned from {self.subjects} scans "
            f"without labels: logits are shifted by {self.shift:+.2f}, for {100 * self.prevalence:.0f} % patients ({given})."
        )


def stored_level(facts: Mapping[str, Any]) -> SiteLevel | None:
    """Level in the facts of a model, or None."""
    stored = facts.get("site_level")
    return None if stored is None else SiteLevel(**{name: stored[name] for name in SiteLevel._fields})


def rounded_counts(logits: Floats) -> Counter[int]:
    """Number of subjects by logit in tenths."""
    tenths = np.clip(np.round(STEPS * np.asarray(logits, dtype=np.float64)), -MOST, MOST)
    return Counter(tenths.astype(int).tolist())


def shift_of_share(share: float, usual: float) -> float:
    """Shift of the logit that another share of patients than the usual one causes, without any difference between sites."""
    return math.log(share / (1 - share)) - math.log(usual / (1 - usual)) if share != usual else 0.0


def shift_of_counts(counts: Mapping[int, int], share: float, usual: float | None = None) -> float:
    """Shift after which the mean probability is `share`, shrunk towards that of a site like source.

    `usual` is the share of patients in source, by default `share`, so that the shift is shrunk towards 0. Fewer than two
    subjects have no level, only a share.
    """
    number, without = sum(counts.values()), shift_of_share(share, share if usual is None else usual)
    if number < LEAST:
        return without
    tenths = sorted(tenth for tenth, count in counts.items() if count)  # in order, so that sums repeat bit for bit
    values = np.array(tenths, dtype=np.float64) / STEPS
    weights = np.array([counts[tenth] for tenth in tenths], dtype=np.float64) / number
    centre = math.log(share / (1 - share))
    low, high = centre - values[-1], centre - values[0]  # at these, all probabilities are at most, or at least, the share
    for _ in range(60):  # halves an interval of at most 10 until it has no width
        middle = (low + high) / 2
        low, high = (middle, high) if float(weights @ sigmoid(values + middle)) < share else (low, middle)
    return float(without + ((low + high) / 2 - without) * number / (number + PRIOR_SUBJECTS))


def site_shift(logits: Floats, share: float) -> float:
    """Shift of the logit for a site, from logits of unlabelled subjects of it and the share of patients."""
    return shift_of_counts(rounded_counts(logits), share)


def source_share(facts: Mapping[str, Any]) -> float:
    """Share of patients among the training subjects of a model."""
    sites = facts["source"]["sites"].values()
    patients, controls = (sum(site[kind] for site in sites) for kind in ("patients", "controls"))
    return float(np.clip(patients / (patients + controls), EXTREME, 1 - EXTREME))


def cross_batches(subjects: Sequence[str], seed: int, size: int) -> Iterator[tuple[Indices, Indices]]:
    """Positions of subjects of a site that share a batch, and of their batch: the first `size` other subjects.

    The order of subjects is drawn by the seed from their ids, so it does not depend on the order in which they are given. The
    first `size` of it are the batch of all further subjects, as a hospital has one batch. Each of these first has the others of
    them and the next subject, so that nobody is in their own batch.
    """
    digests = [hashlib.sha256(f"{seed}\0{subject}".encode()).digest() for subject in subjects]
    order = np.array(sorted(range(len(subjects)), key=lambda i: (digests[i], subjects[i])), dtype=np.int64)
    first, others = order[:size], order[size:]
    if len(others):
        yield others, first
    for i, position in enumerate(first.tolist()):
        yield np.array([position]), np.concatenate([np.delete(first, i), others[:1]])


def at_cross_levels(proba: Floats, subjects: Sequence[str], share: float, seed: int, size: int) -> Floats:
    """Probabilities of the subjects of a site, each at the level of its batch (`cross_batches`)."""
    decision, result = logit(np.asarray(proba, dtype=np.float64)), np.array(proba, dtype=np.float64)
    for scored, batch in cross_batches(subjects, seed, size):
        shift = site_shift(decision[batch], share)
        if shift:  # without one, probabilities are those of the strict track, bit for bit
            result[scored] = sigmoid(decision[scored] + shift)
    return result


def check_site_level(stored: Any) -> None:
    """Refuse a stored level with anything but the expected values."""
    if not isinstance(stored, dict) or not set(SiteLevel._fields) <= set(stored) <= {*SiteLevel._fields, "logits", "findings"}:
        raise ValueError("the site level does not have its values")
    for name, least, most in (("shift", -20, 20), ("prevalence", EXTREME, 1 - EXTREME), ("subjects", LEAST, 2**53)):
        value = stored[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"{name} of the site level is not a number from {least:g} to {most:g}")
    if (
        not isinstance(stored["subjects"], int)
        or not isinstance(stored["site"], str)
        or not all(isinstance(stored[name], bool) for name in ("assumed", "recalibrated"))
    ):
        raise ValueError("the site level has a value of the wrong type")
    if "logits" in stored and sum(read_counts(stored["logits"]).values()) != stored["subjects"]:
        raise ValueError("the logits of the site level are not those of its subjects")


def written_counts(counts: Mapping[int, int]) -> dict[str, int]:
    """Counts by logit, for JSON: {"-0.3": 2}."""
    return {f"{tenth / STEPS:.1f}": counts[tenth] for tenth in sorted(counts)}


def read_counts(stored: Any) -> Counter[int]:
    """Counts by logit in tenths, from `written_counts`."""
    counts: Counter[int] = Counter()
    for text, count in dict(stored).items():
        tenth = round(STEPS * float(text))
        if abs(tenth) > MOST or text != f"{tenth / STEPS:.1f}" or type(count) is not int or not 0 < count < 2**53:
            raise ValueError(f"{str(text)[:40]!r} is not a rounded logit with a count")
        counts[tenth] = count
    return counts
