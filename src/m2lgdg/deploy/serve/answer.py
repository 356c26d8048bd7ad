"""What the page says of one subject: probability, decision, flags, distance from source, and what the decision rests on.

Between the upload and the page; the same values as `m2lgdg predict` writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from m2lgdg.cohort import Cohort
from m2lgdg.explain.attribution import LOOSE_COMPLETENESS, explain_subject
from m2lgdg.method import Method
from m2lgdg.model.new_site import percent
from m2lgdg.model.out_of_distribution import missing_phenotypes
from m2lgdg.report.brains import HALF, TOP, glass_brain
from m2lgdg.storage import InputError, one_line

STEPS = 16  # of integrated gradients: somebody is waiting; where they are too few, their error is told
MEANINGS = {
    "phenotypes missing": "the source median stands in for them (for sex, the more frequent)",
    "short scan": "fewer than 100 volumes, of which correlations are noisy",
    "flat rois": "so many never change; their correlations count as 0",
    "outside": "farther from source than 95 % of source subjects are from other sites",
}


COVERAGE = 0.9
SETS = {
    "patient": "patient alone",
    "control": "control alone",
    "both": "patient and control, so it cannot tell",
    "none": "neither: the subject is unlike the patients and unlike the controls it has seen",
}


@dataclass(frozen=True)
class Promised:
    """What source sites left out say of a probability at a new site."""

    low: float
    high: float
    set: str  # one of SETS
    said: list[str]


@dataclass(frozen=True)
class Explained:
    """The top ROIs of one subject, with their place on a brain where there is one, and how they were found."""

    rois: list[tuple[int, str, str]] = field(default_factory=list)  # rank, name, score
    phenotypes: list[tuple[str, str, str]] = field(default_factory=list)  # name, score, towards which class
    brain: str = ""  # an <img> whose every letter we wrote
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """All that the page shows of a subject."""

    name: str
    volumes: int
    proba: float
    threshold: float
    promised: Promised | None
    flags: list[tuple[str, str]]  # as `predict` writes it, and what it means
    shifts: list[tuple[str, str, bool]]  # of what, score, whether outside
    compared: list[str]
    explained: Explained

    @property
    def positive(self) -> bool:
        """Whether the subject is decided to be a patient."""
        return self.proba >= self.threshold


def answer(fitted: Method, cohort: Cohort, *, explained: bool = True) -> Answer:
    """What a fitted method says of a cohort of one; a large network takes long to be explained."""
    proba = float(fitted.predict_proba(cohort)[0, 1])
    scores = fitted.source_distribution_.scores(cohort) if fitted.source_distribution_ else {}
    shifts = [(kind, "not known" if math.isnan(one[0]) else f"{one[0]:.2f}", bool(one[0] > 1)) for kind, one in scores.items()]
    return Answer(
        name=str(cohort.subjects[0]),
        volumes=int(cohort.lengths[0]),
        proba=proba,
        threshold=fitted.threshold,
        promised=_promised(fitted, proba),
        flags=[(flag, MEANINGS[flag.split(":")[0]]) for flag in fitted.flags(cohort)[0]],
        shifts=shifts,
        compared=fitted.source_distribution_.compare(cohort) if fitted.source_distribution_ else [],
        explained=_explained(fitted, cohort) if explained else Explained(said=["It was not asked for."]),
    )


def _promised(fitted: Method, proba: float) -> Promised | None:
    new_site = fitted.new_site_
    if new_site is None:
        return None
    ends = new_site.interval([proba], COVERAGE)
    low, high = (float(end[0]) for end in ends)
    inside, expected = str(new_site.sets([proba], COVERAGE)[0]), new_site.expected(COVERAGE)
    said = [
        f"Interval: of those with this score, the share of patients is {low:.2f} to {high:.2f} at nine in ten sites like the "
        "model's own. It tells how sites differ, not how sure one subject is.",
        f"Prediction set at {percent(COVERAGE)} coverage: {SETS[inside]}. At sites left out, {percent(expected.reached)} of "
        f"such sets held the truth, at the worst site {percent(expected.lowest)}; {percent(expected.decided)} named one class.",
    ]
    return Promised(low, high, inside, said)


def _explained(fitted: Method, cohort: Cohort) -> Explained:
    try:
        found = explain_subject(fitted, cohort, steps=STEPS)
    except InputError as error:
        return Explained(said=[f"Not explained: {one_line(error)}."])
    said = [f"{found.about['scores']}. Baseline: {found.about['baseline']}."]
    missed = (found.error() or {}).get("median_relative", 0.0)
    if missed > LOOSE_COMPLETENESS:
        said.append(f"The attributions miss {percent(missed)} of the decision's change: take them as a hint only.")
    top = found.rois[found.rois["score"] > 0].head(TOP)
    brain = glass_brain(fitted.name, top) if len(top) else None
    if not len(top):
        said.append("No ROI counts in this decision.")
    elif brain is None:
        said.append("The centroids of this atlas are not known, so there is no brain to show them on.")
    absent = missing_phenotypes(cohort, fitted.facts_["inputs"])[0]
    return Explained(
        rois=[(int(row["rank"]), str(row["roi"]), f"{row['score']:.3g}") for row in top.head(HALF).to_dict("records")],
        phenotypes=[
            (
                f"{row['phenotype']} (not given)" if row["phenotype"] in absent else str(row["phenotype"]),
                f"{row['score']:.3g}",
                "patient" if row["direction"] > 0 else "control",
            )
            for row in found.phenotypes.to_dict("records")
            if row["score"] > 0
        ],
        brain="" if brain is None else brain.page,
        said=said,
    )
