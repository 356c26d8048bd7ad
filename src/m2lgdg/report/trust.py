"""Whether to believe the answer of a report: one line each on leaks, head motion, the level of probabilities, and the study.

Every line says what was looked at and what it means for the reader; the folded sections of the page have the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.findings import is_duplicate, problems, summary
from m2lgdg.registry import SIMPLE
from m2lgdg.report.answer import CHANCE, Answer, further_site, mean_area
from m2lgdg.report.contents import Contents
from m2lgdg.report.operating import Adjusted, adjusted_auc, motion_of, motion_sentence, of_key
from m2lgdg.report.paper_tables import FEW, chosen_among, label
from m2lgdg.study.stats import CELL, NORMAL, class_counts, paired_test

Status = Literal["fine", "look", "bad", "not known"]
MUCH = 0.05  # of an AUC that head motion may take away before it is more than noise
SHOWN = 0.05  # p value of a difference
NAMED = 3  # sites that a sentence names


class Check(NamedTuple):
    """One line: what was asked, how it stands, and a sentence or two."""

    about: str
    status: Status
    text: str


class Level(NamedTuple):
    """Mean probability and proportion of patients at a site, and whether they differ by more than chance."""

    site: str
    predicted: float
    patients: float
    off: bool


def checks(contents: Contents, summary: Answer) -> list[Check]:
    """All lines, in the order in which a reader asks."""
    lines = (_leaks, _motion, _level, _phenotypes, _choice, _sites, _prevalence, _seeds, _findings)
    return [check for line in lines for check in line(contents, summary)]


def _leaks(contents: Contents, summary: Answer) -> Iterator[Check]:
    if not contents.checks:
        yield Check("Leaks", "not known", "The folder has no checks.json, so that leakage was not checked.")
    elif failed := contents.failed_checks:
        count = f"{len(failed)} of {len(contents.checks)} checks failed"
        yield Check("Leaks", "bad", f"{count}; see the top of the page. Repair the data before you read on.")
    else:
        remarks = sum(bool(row.get("remark")) for row in contents.checks)
        more = f" {remarks} with a remark: see Leakage checks." if remarks else ""
        text = f"All {len(contents.checks)} checks passed. Methods got no label, site name or id of a target.{more}"
        yield Check("Leaks", "look" if remarks else "fine", text)


def _motion(contents: Contents, summary: Answer) -> Iterator[Check]:
    motion = motion_of(contents.cohort)
    scores = None if motion is None else adjusted_auc(of_key(contents.counted_mean, summary.main), motion)
    if scores is None:
        why = "the cohort file is not here" if contents.cohort is None else "the phenotypes have no column of head motion"
        yield Check("Head motion", "not known", f"Not adjusted, because {why}. Part of the AUC may be motion.")
        return
    text = motion_sentence(contents.counted_mean, summary.main, motion)
    yield Check("Head motion", motion_status(scores), text)


def motion_status(scores: Adjusted) -> Status:
    """Bad if the adjusted interval has chance where the plain AUC is above it, look if much of the AUC is motion."""
    if math.isfinite(scores.low) and scores.low <= CHANCE and scores.plain - scores.adjusted > MUCH:
        return "bad"
    return "look" if scores.plain - scores.adjusted > MUCH or scores.motion >= scores.adjusted else "fine"


def site_levels(contents: Contents, summary: Answer) -> list[Level]:
    """The level of the main method at each site that counts, farthest off first (z test of calibration in the large)."""
    found = []
    for site, own in of_key(contents.counted_mean, summary.main).groupby("target", sort=False):
        y: npt.NDArray[np.float64] = own["label"].to_numpy(dtype=np.float64)
        p: npt.NDArray[np.float64] = own["proba"].to_numpy(dtype=np.float64)
        spread = math.sqrt(float((p * (1 - p)).sum()))
        off = abs(float((y - p).sum())) > NORMAL * spread
        found.append(Level(str(site), float(p.mean()), float(y.mean()), off))
    return sorted(found, key=lambda one: -abs(one.predicted - one.patients))


def _level(contents: Contents, summary: Answer) -> Iterator[Check]:
    levels = site_levels(contents, summary)
    off = [one for one in levels if one.off]
    if levels and not off:
        yield Check("Level", "fine", f"At all {len(levels)} sites the mean probability agrees with the proportion of patients.")
    elif off:
        named = "; ".join(f"{one.site}: {100 * one.predicted:.0f} instead of {100 * one.patients:.0f} %" for one in off[:NAMED])
        text = (
            f"At {len(off)} of {len(levels)} sites the mean probability differs from the proportion of patients by more than "
            f"chance ({named}{'; ...' if len(off) > NAMED else ''}). The AUC is not affected. At a new site, correct the level "
            "before you use probabilities or the threshold 0.5 (m2lgdg adapt, m2lgdg calibrate)."
        )
        yield Check("Level", "look", text)
    if summary.flat:
        text = f"{'; '.join(summary.flat)}. The AUC there may still be right; decisions and probabilities cannot be used."
        yield Check("Uninformative decisions", "bad", text[0].upper() + text[1:])


def _phenotypes(contents: Contents, summary: Answer) -> Iterator[Check]:
    """What can be had without a scan; nothing if the main method is itself without one."""
    alone = next((key for key in contents.keys if key[0] in contents.with_role("phenotypes") and not key[1]), None)
    if alone == summary.main or "scan" not in contents.inputs_of(summary.main):
        return
    areas = contents.areas
    if alone is None or alone not in areas or summary.main not in areas:
        if contents.study.get("inputs"):
            yield Check("Without a scan", "not known", "Phenotypes alone were not tried: add the method phenotype-logistic.")
        return
    mean, (difference, _, count, p) = mean_area(contents, alone)[0], paired_test(areas[summary.main], areas[alone])
    text = f"Phenotypes alone ({label(*alone)}) have a mean AUC of {100 * mean:.1f} %."
    if difference <= 0:
        yield Check("Without a scan", "bad", f"{text} The scan adds nothing to what they say.")
    elif count > 1 and p < SHOWN:
        yield Check("Without a scan", "fine", f"{text} {label(*summary.main)} is above that (paired t-test over sites).")
    else:
        more = f"The difference of {100 * difference:.1f} points may be chance (paired t-test over sites)."
        yield Check("Without a scan", "look", f"{text} {more}")


def _choice(contents: Contents, summary: Answer) -> Iterator[Check]:
    name = label(*summary.main)
    if summary.chosen:
        text = f"{chosen_among(name, summary.chosen)}. The key main of the study file names a method beforehand."
        yield Check("Choice of the method", "look", text)
    elif len(contents.keys) > 1:
        how = "by the study" if contents.study.get("main") == summary.main[0] else "by this package, whatever its AUC"
        yield Check("Choice of the method", "fine", f"{name} was named {how}, so it is not the luckiest of several.")
    if summary.peer_as_good and summary.peer is not None:
        text = f"A simple model performs as well or better: {label(*summary.peer)} compared with {name}."
        yield Check("Simple peers", "bad", text)
    elif summary.peer is None and summary.main[0] not in contents.with_role(*SIMPLE):
        yield Check("Simple peers", "not known", "No simple model was run beside it: add fc-logistic to the methods.")


def _sites(contents: Contents, summary: Answer) -> Iterator[Check]:
    count = len(contents.counted)
    if not count:
        return
    ends = further_site(contents, summary.main)
    if ends is None:
        text = f"{count} site{'s' * (count > 1)}: too few to say what to expect at a further one."
        yield Check("A further site", "look", text)
        return
    low, high = ends
    text = (
        f"At a further site like these {count}, expect an AUC between {100 * low:.0f} and {100 * high:.0f} % (95 % prediction "
        "interval, apart from the error of its own sample). The interval of the answer is that of the mean over sites."
    )
    yield Check("A further site", "fine" if low > CHANCE and count >= FEW else "look", text)


def _prevalence(contents: Contents, summary: Answer) -> Iterator[Check]:
    counts = class_counts(contents.predictions[contents.predictions["label"] >= 0])
    counts = counts[counts.index.isin(contents.counted)]
    if counts.empty:
        return
    shares = counts["patients"] / counts.sum(axis=1)
    common = float(np.maximum(shares, 1 - shares).mean())
    text = (
        f"{100 * shares.min():.0f} to {100 * shares.max():.0f} % of the subjects of a site are patients. Calling everybody "
        f"what most are at the site has an accuracy of {100 * common:.0f} %: compare accuracies with that. Where "
        "another share are patients, predictive values differ: see Operating point."
    )
    yield Check("Proportion of patients", "fine", text)


def _seeds(contents: Contents, summary: Answer) -> Iterator[Check]:
    method, variant = summary.main
    if method in contents.declared and not contents.declared[method].stochastic:
        return
    own = contents.counted_scores
    own = own[(own["metric"] == "AUC") & (own["method"] == method) & (own["variant"] == variant)]
    if own.empty:
        return
    seeds = int(own.drop_duplicates(CELL)["seed"].nunique())
    if seeds == 1:
        text = f"{label(*summary.main)} was trained once for each site; another seed gives another AUC. Set seeds = [0, 1, 2]."
        yield Check("Training again", "look", text)
        return
    by_seed = own.groupby("seed")["value"].mean()
    text = f"The mean AUC of {seeds} trainings with other seeds lies between {100 * by_seed.min():.1f} and "
    yield Check("Training again", "fine", f"{text}{100 * by_seed.max():.1f} %.")


def _findings(contents: Contents, answered: Answer) -> Iterator[Check]:
    if contents.findings is None:
        yield Check("Data", "not known", "The folder has no findings about its cohort: m2lgdg check COHORT lists them.")
        return
    found = problems(contents.findings)
    if not found:
        yield Check("Data", "fine", "The check of the cohort found nothing.")
        return
    grave = [one for one in found if is_duplicate(one) or one.kind.endswith("by label")]
    yield Check("Data", "bad" if grave else "look", f"{summary(found)[0].upper()}{summary(found)[1:]}: see Data below.")
