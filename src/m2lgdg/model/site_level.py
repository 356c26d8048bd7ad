"""Intercept correction for a site, without labels: a shift of the logit, learned from unlabelled subjects of the site.

`m2lgdg adapt` stores it in a model, and the adapted track of a study computes it for each target. Sites differ in the mean of a
model's scores more than in their order; the shift makes the mean probability of a site equal to its prevalence of patients.
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
LEAST = 2  # subjects; one subject has no intercept
EXTREME = 0.01  # a prevalence nearer to 0 or 1 is refused

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class SiteLevel(NamedTuple):
    """Intercept correction of one site, as `facts_["site_level"]` of a model stores it."""

    shift: float  # of the logit, shrunk for few subjects
    subjects: int
    prevalence: float  # of patients at the site
    assumed: bool  # whether it is that of source, because that of the site was not given
    site: str
    recalibrated: bool  # whether the new-site calibration of the model is that of left-out sites with this correction

    def sentence(self) -> str:
        """One sentence for every place where corrected probabilities are shown."""
        given = "assumed, that of the training sites" if self.assumed else "given"
        return (
            f"The intercept is corrected for site {self.site or '(no name)'}, learned from {self.subjects} scans without "
            f"labels: logits are shifted by {self.shift:+.2f}, for {100 * self.prevalence:.0f} % patients ({given})."
        )

    @classmethod
    def stored(cls, facts: Mapping[str, Any]) -> SiteLevel | None:
        """Correction in the facts of a model, or None."""
        stored = facts.get("site_level")
        return None if stored is None else cls(**{name: stored[name] for name in cls._fields})


def rounded_counts(logits: Floats) -> Counter[int]:
    """Number of subjects by logit in tenths."""
    tenths = np.clip(np.round(STEPS * np.asarray(logits, dtype=np.float64)), -MOST, MOST)
    return Counter(tenths.astype(int).tolist())


def prevalence_shift(prevalence: float, usual: float) -> float:
    """Shift of the logit that another prevalence than the usual one causes, without any difference between sites."""
    return _log_odds(prevalence) - _log_odds(usual) if prevalence != usual else 0.0


def _log_odds(prevalence: float) -> float:
    return math.log(prevalence / (1 - prevalence))


def shift_of_counts(counts: Mapping[int, int], prevalence: float, usual: float | None = None) -> float:
    """Shift after which the mean probability is `prevalence`, shrunk towards that of a site like source.

    `usual` is the prevalence in source, by default the same.
    """
    number, without = sum(counts.values()), prevalence_shift(prevalence, prevalence if usual is None else usual)
    if number < LEAST:
        return without
    tenths = sorted(tenth for tenth, count in counts.items() if count)  # in order, so that sums repeat bit for bit
    values = np.array(tenths, dtype=np.float64) / STEPS
    weights = np.array([counts[tenth] for tenth in tenths], dtype=np.float64) / number
    centre = _log_odds(prevalence)
    low, high = centre - values[-1], centre - values[0]  # at these, all probabilities are at most, or at least, the prevalence
    for _ in range(60):  # halves an interval of at most 10 until it has no width
        middle = (low + high) / 2
        low, high = (middle, high) if float(weights @ sigmoid(values + middle)) < prevalence else (low, middle)
    return float(without + ((low + high) / 2 - without) * number / (number + PRIOR_SUBJECTS))


def site_shift(logits: Floats, prevalence: float) -> float:
    """Shift of the logit for a site, from logits of unlabelled subjects of it and its prevalence."""
    return shift_of_counts(rounded_counts(logits), prevalence)


def source_prevalence(facts: Mapping[str, Any]) -> float:
    """Prevalence among the training subjects of a model."""
    sites = facts["source"]["sites"].values()
    patients, controls = (sum(site[kind] for site in sites) for kind in ("patients", "controls"))
    return float(np.clip(patients / (patients + controls), EXTREME, 1 - EXTREME))


def cross_batches(subjects: Sequence[str], seed: int, size: int) -> Iterator[tuple[Indices, Indices]]:
    """Positions of subjects of a site that have the same batch, and of their batch: `size` other subjects.

    The seed orders subjects by their ids. The first `size` are the batch of all others, as a hospital has one batch; those in
    the batch are scored with its other members and one more subject.
    """
    digests = [hashlib.sha256(f"{seed}\0{subject}".encode()).digest() for subject in subjects]
    order = np.array(sorted(range(len(subjects)), key=lambda i: (digests[i], subjects[i])), dtype=np.int64)
    first, others = order[:size], order[size:]
    if len(others):
        yield others, first
    for i, position in enumerate(first.tolist()):
        yield np.array([position]), np.concatenate([np.delete(first, i), others[:1]])


def corrected_by_batches(proba: Floats, subjects: Sequence[str], prevalence: float, seed: int, size: int) -> Floats:
    """Probabilities of the subjects of a site, each with the intercept of its batch (`cross_batches`)."""
    decision, result = logit(np.asarray(proba, dtype=np.float64)), np.array(proba, dtype=np.float64)
    for scored, batch in cross_batches(subjects, seed, size):
        shift = site_shift(decision[batch], prevalence)
        if shift:  # without one, probabilities are those of the strict track, bit for bit
            result[scored] = sigmoid(decision[scored] + shift)
    return result


def written_counts(counts: Mapping[int, int]) -> dict[str, int]:
    """Counts by logit, for JSON: {"-0.3": 2}."""
    return {f"{tenth / STEPS:.1f}": counts[tenth] for tenth in sorted(counts)}


def read_counts(stored: Mapping[str, int]) -> Counter[int]:
    """Counts by logit in tenths, from `written_counts`."""
    return Counter({round(STEPS * float(text)): count for text, count in stored.items()})


def check_stored(stored: Mapping[str, Any]) -> None:
    """Refuse a correction whose numbers no cohort could have given; their types are checked by `folder`."""
    if not (-20 <= stored["shift"] <= 20 and EXTREME <= stored["prevalence"] <= 1 - EXTREME and stored["subjects"] >= LEAST):
        raise ValueError("the site level is out of range")
    if "logits" in stored:
        counts = read_counts(stored["logits"])
        if max(map(abs, counts)) > MOST or sum(counts.values()) != stored["subjects"]:
            raise ValueError("the logits of the site level are not those of its subjects")
