"""A methods paragraph for a paper, written from the files of a study, with its citations and versions.

The report shows it for copying. It has only what the study folder knows; acquisition and preprocessing are for the authors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from m2lgdg.metrics import THRESHOLD
from m2lgdg.registry import load_methods
from m2lgdg.report.contents import Contents
from m2lgdg.report.paths import without_paths
from m2lgdg.report.tables import changed_fields, label
from m2lgdg.report.tracks import what_was_seen
from m2lgdg.study.predictions import ADAPTED

DELONG = "DeLong, DeLong and Clarke-Pearson 1988, Biometrics 44: 837-845"
HOLM = "Holm 1979, Scandinavian Journal of Statistics 6: 65-70"
JANES_PEPE = "Janes and Pepe 2009, Biometrika 96: 371-382"
PACKAGE = "m2lgdg: leave-one-site-out classification of functional MRI (the package that wrote this report)"
AUTHORS = "Authors to complete: acquisition, image preprocessing, parcellation and ethics approval."


@dataclass(frozen=True)
class MethodsText:
    """Paragraphs and references, in the order in which they are cited."""

    paragraphs: list[str]
    references: list[str]


def methods_text(contents: Contents, *, motion: bool) -> MethodsText:
    """The paragraphs on data, design, methods, statistics and software; `motion`: the report has motion-adjusted AUCs."""
    references: list[str] = []

    def cite(reference: str) -> str:
        if reference not in references:
            references.append(reference)
        return f"[{references.index(reference) + 1}]"

    paragraphs = [
        _data(contents),
        _design(contents),
        _methods(contents, cite),
        _statistics(contents, cite, motion),
        _software(contents, cite),
    ]
    return MethodsText([*filter(None, paragraphs), AUTHORS], references)


def _data(contents: Contents) -> str:
    rows = pd.DataFrame(contents.inclusion, columns=["subject", "site", "status", "kind"])
    included, excluded = rows[rows["status"] == "included"], rows[rows["status"] == "excluded"]
    if not len(included):
        return ""
    everybody = contents.description.get("groups", {}).get("all", {})
    classes = f" ({everybody['patients']} patients, {everybody['controls']} controls)" if everybody else ""
    sentence = f"We included {len(included)} subjects{classes} of {included['site'].nunique()} sites."
    if len(excluded):
        reasons = Counter(excluded["kind"])
        sentence += f" {len(excluded)} further subject{'s were' if len(excluded) > 1 else ' was'} left out: "
        sentence += "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common()) + "."
    if contents.known_rois is not None:
        atlas, rois = contents.known_rois
        sentence += f" Each scan was represented by the mean time series of {len(rois)} regions of interest"
        sentence += f" (atlas: {without_paths(atlas)})." if atlas else "."  # an atlas may be called by the path of its image
    return sentence


def _design(contents: Contents) -> str:
    targets = contents.predictions["target"].nunique()
    inputs = ", ".join(contents.study.get("inputs") or [])
    text = (
        f"Models were evaluated by leave-one-site-out cross-validation: each of {targets} target site{'s' * (targets > 1)} was "
        "held out whole, and models were fitted on the labelled subjects of all other sites (source). Imputation, scaling, "
        "feature estimation, choice of penalties, early stopping and calibration used source subjects only. Target subjects "
        "were predicted one at a time, without labels, site names or ids."
    )
    if contents.track == ADAPTED or contents.adapted is not None:
        text += f" In the adapted track, {what_was_seen(contents.batch)}."
    return f"{text} Phenotypes available to methods that use them were {inputs}." if inputs else text


def _methods(contents: Contents, cite: Callable[[str], str]) -> str:
    known = load_methods()
    listed = []
    for method in dict.fromkeys(method for method, _ in contents.keys):
        reference = known.declaration(method).reference if method in known else ""
        cited = reference and not reference.startswith("beyond the paper")
        listed.append(f"{method} {cite(reference)}" if cited else method)
    seeds = contents.study.get("seeds") or []
    text = f"We compared {len(listed)} method{'s' * (len(listed) > 1)}: {', '.join(listed)}."
    variants = [label(*key) for key in contents.keys if key[1]]
    text += f" Variants: {', '.join(variants)}." if 0 < len(variants) <= 12 else ""
    text += f" Methods with randomness were trained with {len(seeds)} seeds." if len(seeds) > 1 else ""
    changed = changed_fields(contents.study)
    return f"{text} Fields that differ from the defaults of the package: {changed}." if changed else text


def _statistics(contents: Contents, cite: Callable[[str], str], motion: bool) -> str:
    text = (
        "The main measure is the area under the ROC curve (AUC) at each target site, averaged over seeds and then over sites "
        f"without weights. Accuracy, sensitivity, specificity and F1 use the fixed threshold {THRESHOLD:g}. Intervals of a "
        f"mean over sites are 95 % Student t intervals; those of one site are DeLong's {cite(DELONG)}."
    )
    if contents.predictions["target"].nunique() > 1 and len(contents.keys) > 1:
        text += f" Methods were compared by two-sided paired t-tests over target sites with Holm's correction {cite(HOLM)}."
    if motion:
        text += f" AUCs adjusted for head motion (mean framewise displacement) follow {cite(JANES_PEPE)}."
    return text


def _software(contents: Contents, cite: Callable[[str], str]) -> str:
    versions = contents.environment
    if not versions:
        return ""
    others = [f"{name} {version}" for name, version in versions.items() if name not in ("m2lgdg", "code", "system")]
    code = f", code {versions['code']}" if versions.get("code") else ""
    return (
        f"Analyses used m2lgdg {versions.get('m2lgdg', '')} {cite(PACKAGE)}{code} with {', '.join(others)}"
        f" on {versions.get('system', 'an unknown system')}."
    )
