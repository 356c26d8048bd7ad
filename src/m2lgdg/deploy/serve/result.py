"""Result of the page for one subject: probability, decision, quality flags, out-of-distribution scores and important ROIs.

Computed from the upload and rendered by the page; the values are those of `m2lgdg predict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.deploy.serve.structure import expected_tables
from m2lgdg.explain.attribution import LOOSE_COMPLETENESS, explain_subject
from m2lgdg.methods.tables import FLAG
from m2lgdg.model.model import Model
from m2lgdg.model.new_site import percent
from m2lgdg.model.out_of_distribution import missing_phenotypes
from m2lgdg.report.brains import HALF, TOP, glass_brain
from m2lgdg.scans import SERIES
from m2lgdg.storage import InputError, one_line

STEPS = 16  # of integrated gradients: few, because a user is waiting; a large error is reported
MEANINGS = {
    "phenotypes missing": "replaced by the source median (sex: by the more frequent value)",
    "short scan": "fewer than 100 volumes, so correlations are noisy",
    "flat rois": "number of constant ROIs; their correlations count as 0",
    "empty rois": "number of ROIs without any connection, which had no signal",
    "amplitude not used": "ROIs were standardised or rescaled one by one; give the series in the units of the training data",
    "atlas missing": "the prediction is the mean over the other atlases of the model",
    "rois by number": "the atlas of the model or of the file is not named, so columns were matched by their position",
    "failed segmentation": "many of its values are far from those of source at once; look at the segmentation",
    "outside": "further from source than 95 % of source subjects are from the other sites",
}
WITHOUT = FLAG.partition(":")[2].strip()
NO_TABLE = "the table was not given, or has less than half of its values; the decision is that of the other inputs"
COVERAGE = 0.9
SETS = {
    "patient": "patient only",
    "control": "control only",
    "both": "patient and control (undecided)",
    "none": "neither (the subject is unlike both the patients and the controls of the source)",
}


@dataclass(frozen=True)
class NewSiteInterval:
    """Interval and conformal set of a probability at a new site."""

    low: float
    high: float
    set: str  # one of SETS
    sentences: list[str]


@dataclass(frozen=True)
class Explained:
    """Top ROIs of one subject, a brain with their positions if these are known, and notes on how they were computed."""

    rois: list[tuple[int, str, float]] = field(default_factory=list)  # rank, name, score
    phenotypes: list[tuple[str, float, str]] = field(default_factory=list)  # name, score, towards which class
    regions: list[tuple[str, float, float, str, str]] = field(default_factory=list)  # name, value, score, towards, table
    brain: str = ""  # an <img> without any text of the user
    sentences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """All that the page shows for a subject."""

    name: str
    scan: str  # what the file holds
    proba: float
    threshold: float
    new_site: NewSiteInterval | None
    flags: list[tuple[str, str]]  # as in `m2lgdg predict`, and its meaning
    ood_scores: dict[str, float]  # by name; NaN where it is not known
    compared: list[str]
    explained: Explained
    level: str = ""  # sentence on the site that the model was adapted to
    tables: list[tuple[str, str]] = field(default_factory=list)  # name, and what was used of it

    @property
    def positive(self) -> bool:
        """Whether the subject is decided to be a patient."""
        return self.proba >= self.threshold


def result_of(
    fitted: Model, cohort: Cohort, *, explained: bool = True, files: Mapping[str, Sequence[str]] | None = None
) -> Result:
    """Result of a model for a cohort of one subject, with the names of the files of its tables.

    Explaining a large network takes long.
    """
    proba = float(fitted.predict_proba(cohort)[0, 1])
    scores = {name: float(score[0]) for name, score in fitted.ood_scores(cohort).items()}
    return Result(
        name=str(cohort.subjects[0]),
        scan=f"{len(cohort.scans[0])} volumes" if cohort.values == SERIES else f"connectome, used as {cohort.values}",
        proba=proba,
        threshold=fitted.threshold,
        new_site=_new_site(fitted, proba),
        flags=[
            (flag, NO_TABLE if WITHOUT in flag else MEANINGS.get(flag.split(":")[0], "")) for flag in fitted.flags(cohort)[0]
        ],
        tables=_tables(fitted, cohort, files or {}),
        ood_scores=scores,
        compared=fitted.compare(cohort),
        level="" if fitted.site_level is None else fitted.site_level.sentence(),
        explained=_explained(fitted, cohort) if explained else Explained(sentences=["Not requested."]),
    )


def _tables(fitted: Model, cohort: Cohort, files: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """What was used of each table that the model takes."""
    sentences, held = [], cohort.tables
    for one in expected_tables(fitted):
        given = int(held[one.name].notna().sum(axis=1).iloc[0]) if one.name in held else 0
        named = f", from {' and '.join(files[one.name])}" if files.get(one.name) else ""
        used = f"{given} of {len(one.columns)} values{named}" if one.name in held else "not given"
        if 2 * given < len(one.columns):
            used += f"; {WITHOUT}"
        elif given < len(one.columns):
            used += "; the mean of the training subjects takes the place of the others"
        sentences.append((one.name, used + "." + " It has no weight in this model." * one.weightless))
    return sentences


def _new_site(fitted: Model, proba: float) -> NewSiteInterval | None:
    calibration = fitted.new_site_
    if calibration is None:
        return None
    low, high = (float(end[0]) for end in calibration.interval([proba], COVERAGE))
    conformal_set, expected = str(fitted.conformal_sets(np.array([proba]), COVERAGE)[0]), calibration.expected(COVERAGE)
    sentences = [
        f"Interval: among subjects with this score, the proportion of patients is {low:.2f} to {high:.2f} at nine in ten sites "
        "like the source sites. It describes how sites differ, not the uncertainty about one subject.",
        f"Conformal set at {percent(COVERAGE)} coverage: {SETS[conformal_set]}. At left-out sites, {percent(expected.reached)} "
        f"of the sets held the true class (lowest site {percent(expected.lowest)}), and {percent(expected.decided)} had one "
        "class.",
    ]
    return NewSiteInterval(low, high, conformal_set, sentences)


def _explained(fitted: Model, cohort: Cohort) -> Explained:
    try:
        explanation = explain_subject(fitted, cohort, steps=STEPS)
    except InputError as error:
        return Explained(sentences=[f"Not explained: {one_line(error)}."])
    sentences = [f"{explanation.about['scores']}. Baseline: {explanation.about['baseline']}."]
    missed = (explanation.error() or {}).get("median_relative", 0.0)
    if missed > LOOSE_COMPLETENESS:
        sentences.append(f"The attributions miss {percent(missed)} of the change in the decision: they are a rough guide only.")
    top = {atlas: one.rois[one.rois["score"] > 0].head(TOP) for atlas, one in explanation.by_atlas().items()}
    brains = {atlas: glass_brain(fitted.name, table) for atlas, table in top.items() if len(table)}
    if not brains:
        sentences.append("No ROI contributes to this decision.")
    for atlas, brain in brains.items():
        if brain is None:
            which = f"atlas {atlas}" if len(top) > 1 else "this atlas"
            sentences.append(f"The centroids of {which} are not known, so no brain is shown.")
    absent = missing_phenotypes(cohort, fitted.facts_["inputs"])[0]
    return Explained(
        rois=[
            (int(row["rank"]), f"{row['roi']} ({atlas})" if len(top) > 1 else str(row["roi"]), float(row["score"]))
            for atlas, table in top.items()
            for row in table.head(HALF).to_dict("records")
        ],
        phenotypes=[
            (
                f"{row['phenotype']} (not given)" if row["phenotype"] in absent else str(row["phenotype"]),
                float(row["score"]),
                "patient" if row["direction"] > 0 else "control",
            )
            for row in explanation.phenotypes.to_dict("records")
            if row["score"] > 0
        ],
        regions=[
            (
                str(row["region"]),
                float(row["value"]),
                float(row["score"]),
                "patient" if row["contribution"] > 0 else "control",
                str(row["table"]),
            )
            for row in explanation.regions.head(HALF).to_dict("records")
            if row["score"] > 0
        ],
        brain="".join(brain.page for brain in brains.values() if brain is not None),
        sentences=sentences,
    )
