"""The model card as Markdown and HTML: intended use, training data, and performance at left-out sites.

Made from a model folder, and from a study folder of the same method if one is given; it names no subject and no path.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.data.atlases import about, included, same_rois
from m2lgdg.findings import anonymous_sentences
from m2lgdg.metrics import PAPER_METRICS, auc, delong_interval
from m2lgdg.model.folder import NEW_SITE_CALIBRATION, WEIGHTS
from m2lgdg.model.model import Model
from m2lgdg.model.out_of_distribution import MEASURES
from m2lgdg.registry import create
from m2lgdg.report.contents import Contents, read_contents, read_json
from m2lgdg.report.escaping import markdown
from m2lgdg.report.new_site import (
    AT_LEVEL,
    NOT_CALIBRATED,
    READING,
    UNSEEN,
    WITHOUT_LEVEL,
    low_coverage,
    new_site_facts,
    new_site_tables,
    weak_sites,
)
from m2lgdg.report.operating import operating_table
from m2lgdg.report.tables import Table, changed_fields, label
from m2lgdg.storage import InputError, write_texts
from m2lgdg.study.stats import cell_scores, macro_scores, over_seeds, site_scores

HASHED = (WEIGHTS, NEW_SITE_CALIBRATION)  # files whose hashes the card lists
WARNING = "Research use only. Not a diagnostic device: do not base a decision about a person on it."
SMALL_SITE = 20  # subjects; smaller sites are listed among the limits
LICENCES = {  # by the cohort name that a reader sets; no terms are quoted, because they change with the release
    "abide": "ABIDE I (Preprocessed Connectomes Project): the terms of the downloaded release apply (non-commercial "
    "research); cite Di Martino et al. 2014 and Craddock et al. 2013",
    "rest-meta-mdd": "REST-meta-MDD: the terms agreed with its consortium apply; cite Yan et al. 2019",
}


@dataclass(frozen=True)
class Part:
    """A section of the card: named facts, tables, sentences."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def write_card(model: str | Path, *, study: str | Path | None = None, to: str | Path | None = None) -> Path:
    """Write card.md and card.html into the model folder, or into `to`; return that folder."""
    return write_parts(card(model, study), to or model)


def write_parts(parts: list[Part], folder: str | Path) -> Path:
    """Write the sections of a card as card.md and card.html; return the folder."""
    title = f"Model card: {parts[0].facts[0][1]}"
    return write_texts(folder, {"card.md": _markdown(title, parts), "card.html": _page(title, parts)})


def card(model: str | Path, study: str | Path | None = None) -> list[Part]:
    """Sections of the card of a model folder."""
    fitted = Model.load(model)
    with fitted.method.checking_weights():
        decision = Part("Decision", _decision(fitted))
    results = None if study is None else _results(fitted, read_contents(study))
    weak = [] if fitted.new_site_ is None else weak_sites(fitted.new_site_)
    failures = _failures(fitted) + weak + ([] if results is None else _weak_targets(results))
    return [
        Part("Model", _about(fitted), sentences=[(type(fitted.method).__doc__ or "").strip().splitlines()[0]]),
        Part("Intended use", sentences=INTENDED),
        _training(fitted),
        *_federated(fitted),
        Part("Inputs", _inputs(fitted)),
        decision,
        *_new_site(fitted),
        results or Part(LEFT_OUT, sentences=[NO_STUDY]),
        Part("Known failures and limits", sentences=failures or ["None known from training; see the intended use."]),
        Part("Data licence", sentences=[_licence(fitted.facts_["source"]["cohort"])]),
        Part("Versions and hashes", _versions(fitted, Path(model))),
    ]


INTENDED = [
    "For research on how classifiers of resting-state fMRI generalise to unseen sites.",
    "Not for diagnosis, screening, treatment or any other decision about a person.",
    "Not for data unlike the training data below: another atlas, preprocessing or age range.",
]
SUMS_ONLY = (
    "No subject's data left a site. Revealed were counts of patients and controls, and sums over subjects: of features, of "
    "their products with labels, age and sex, of decisions, and counts of phenotypes below a value. No noise was added."
)
AGAIN = "totals with and without the sites that left give the sums of these sites"
LEFT_OUT = "Performance at left-out sites of a study"
NO_STUDY = (
    "No study was given. A leave-one-site-out study (m2lgdg run) measures the performance at each left-out site; "
    "m2lgdg card MODEL --study DIR adds it."
)
NOT_CHECKED = "The model has no record of a check of its training data; m2lgdg check COHORT lists their problems."
NO_FINDING = "m2lgdg check had no finding about the training data."
OTHERWISE = "so the performance of this model may differ."
AMPLITUDES = "those of the training data: the model uses the amplitude of each ROI, so do not z-score or rescale the ROIs"
OTHER_COHORT = "The cohort of the study, or its inputs, differ from those of this model."
ROIS_UNKNOWN = "Its ROIs are not known, so it may be on another atlas."
SHARE_ASSUMED = (
    "The level of the site assumes the share of patients of the training sites. With fewer patients among the scans that it "
    "was learned from, too many subjects are called patients; with more, too few."
)
SHARE_GIVEN = "The level of the site is as wrong as the share of patients that was given for the scans it was learned from."
AS_IT_RAN = "Probabilities and threshold are those of the study, without the calibration and threshold of this model."


def _about(fitted: Model) -> list[tuple[str, str]]:
    fields = json.loads(json.dumps(fitted.fields()))  # tuples become lists, as in study.json
    facts = [
        ("method", fitted.name),
        ("reference", fitted.method.reference or "none"),
        ("fields changed from their defaults", changed_fields({"method": {fitted.name: fields}}) or "none"),
        ("seed", str(fitted.facts_["seed"]) if fitted.method.stochastic else "none (the method has no randomness)"),
    ]
    parameters = [part.facts_["parameters"] for part in fitted.members.values() if "parameters" in part.facts_]
    if parameters:
        facts.append(("trained parameters", f"{sum(parameters):,}"))
    return facts


def _training(fitted: Model) -> Part:
    sites = fitted.facts_["source"]["sites"]
    rows = [[site, str(n["patients"]), str(n["controls"]), str(sum(n.values()))] for site, n in sites.items()]
    totals = [sum(n[kind] for n in sites.values()) for kind in ("patients", "controls")]
    rows.append(["all", *map(str, totals), str(sum(totals))])
    table = _plain_table("Training sites", ["Site", "patients", "controls", "subjects"], rows, "labelled subjects of the fit")
    facts = [("cohort", fitted.facts_["source"]["cohort"]), *_ranges(fitted)]
    for part in fitted.members.values():
        if "training_subjects" in part.facts_:
            counts = (part.facts_["training_subjects"], part.facts_["validation_subjects"])
            key = f"trained on ({part.facts_['atlas']})" if len(fitted.members) > 1 else "trained on"
            facts.append((key, "{} subjects; early stopping and calibration on {} subjects".format(*counts)))
    stored = fitted.facts_["source"].get("findings")
    findings = [NOT_CHECKED] if stored is None else anonymous_sentences(stored) or [NO_FINDING]
    return Part("Training data", facts, [table], findings)


def _federated(fitted: Model) -> list[Part]:
    """How the sites trained together, for a model whose subjects never left them."""
    about = fitted.facts_.get("federated")
    if about is None:
        return []
    facts = [
        ("sites", ", ".join(fitted.facts_["source"]["sites"])),
        ("rounds", str(about["rounds"])),
        ("subjects at every site", f"at least {about['least_subjects']}"),
        ("coordinator saw", "totals over sites (masks were on)" if about["masks"] else "sums over each site (masks were off)"),
    ]
    if "network" in about:  # a model of 0.1.0
        facts[-1] = ("server saw", "the weights of each site's network after every round, and sums over each site")
    if "noise" in about:
        facts.append(("noise on the sums", f"epsilon {about['noise']['epsilon']:.3g}, delta {about['noise']['delta']:.0e}"))
    if "left_out" in about:
        facts.append(("left out for evaluation", about["left_out"]))
    if about["attempt"] > 1:
        facts.append(("attempt", f"{about['attempt']}; {AGAIN}"))
    alone = [f"Held out of a fold alone, so that differences of totals give its own sums: {site}." for site in about["alone"]]
    return [Part("Federated training", facts, sentences=[*([] if {"network", "noise"} & set(about) else [SUMS_ONLY]), *alone])]


def _ranges(fitted: Model) -> list[tuple[str, str]]:
    """Scan and age ranges of the training subjects, from the source distribution if the model has one."""
    units = {"volumes": "", "TR": " s", "spectral edge": " Hz", "age": " years"}
    distribution = fitted.source_distribution_  # these measures are the same in all atlases
    ranges = [] if distribution is None else zip(MEASURES, distribution.ranges.tolist(), strict=True)
    return [
        (name, f"median {middle:.3g}{units[name]}, 95 % of subjects {low:.3g} to {high:.3g}")
        for name, (low, middle, high) in ranges
        if name in units and not np.isnan([low, middle, high]).any()
    ]


def _inputs(fitted: Model) -> list[tuple[str, str]]:
    # Only networks have a length; asking for their class would import PyTorch.
    resampled = getattr(fitted.method, "length", None) if "length" not in fitted.method.unused else None
    length = f"any; resampled to {resampled} points" if resampled else "any"
    atlases = [_atlas(part.facts_["atlas"]) for part in fitted.members.values()]
    amplitudes = any(part.uses_amplitude for part in fitted.members.values())
    counts = " and ".join(f"{len(part.facts_['rois'])} ROIs" for part in fitted.members.values())
    return [
        ("series", f"(time, roi) with {counts}, in the order of method.json"),
        ("atlases", f"{', '.join(atlases)}; a subject may lack some of them")
        if len(fitted.members) > 1
        else ("atlas", atlases[0]),
        ("scan length", length),
        ("units", AMPLITUDES if amplitudes else "any; each ROI is standardised within its scan"),
        ("phenotypes", ", ".join(fitted.facts_["inputs"]) or "none"),
    ]


def _decision(fitted: Model) -> list[tuple[str, str]]:
    calibrated = "none"
    if "calibration" in fitted.state_:
        slope, offset = fitted.state_["calibration"]
        validation = fitted.facts_.get("validation", "source sites held out in turn")
        of = "mean of the calibrated logits of the atlases" if len(fitted.members) > 1 else "logit"
        calibrated = f"{of} times {slope:.4g} plus {offset:.4g}, fitted on {validation}, never on a target"
        if len(fitted.members) > 1 and (slope, offset) == (1, 0):
            calibrated = of
    facts = [("output", "probability of being a patient"), ("calibration", calibrated)]
    new_site = fitted.new_site_
    if new_site is not None:
        formula = f"then logit times {new_site.slope:.4g} plus {new_site.offset:.4g}, fitted on left-out source sites"
        facts.append(("new-site calibration", f"{formula}; applied by predict_proba, m2lgdg predict and the ONNX graph"))
    if fitted.site_level is not None:
        facts.append(("level of a site", fitted.site_level.sentence()))
    local = fitted.facts_.get("local")
    if local is not None:
        formula = f"then logit times {local['slope']:.4g} plus {local['offset']:.4g}, fitted on labelled subjects of one site"
        facts.append(("local calibration", f"{formula}; do not evaluate the model on these subjects"))
    return [*facts, ("threshold", f"patient at {fitted.threshold:.3g} or above")]


def _new_site(fitted: Model) -> list[Part]:
    """Expected performance at an unseen site; no section for a model with local calibration."""
    if "local" in fitted.facts_:
        return []
    if fitted.new_site_ is None:
        return [Part(UNSEEN, sentences=[NOT_CALIBRATED])]
    level = fitted.site_level
    first = [AT_LEVEL] if level and level.recalibrated else [WITHOUT_LEVEL] if level else []
    return [Part(UNSEEN, new_site_facts(fitted.new_site_), new_site_tables(fitted.new_site_), [*first, *READING])]


def _results(fitted: Model, contents: Contents) -> Part:
    """Performance of this method at each left-out site of a study."""
    predictions = contents.predictions[contents.predictions["method"] == fitted.name]
    if not len(predictions):
        raise InputError(
            f"the study has no method {fitted.name}; it has {', '.join(dict.fromkeys(label(*k) for k in contents.keys))}."
        )
    _refuse_other_rois(fitted, contents)
    variant, same = _variant(fitted, contents, list(dict.fromkeys(predictions["variant"])))
    predictions = predictions[predictions["variant"] == variant]
    areas = {target: _area(part) for target, part in over_seeds(predictions).groupby("target", sort=False)}
    operating = operating_table(predictions)
    rows = [[row[1], *row[2:4], areas[row[1]], *row[8:]] for row in operating.rows]
    header = ["Left-out site", "n", "patients", "AUC", *operating.header[8:]]
    table = _plain_table("Left-out sites", header, rows, f"AUC in % with DeLong interval; {operating.note}")
    macro = macro_scores(site_scores(cell_scores(predictions, PAPER_METRICS)))
    mean = [(row.metric, _mean(row.mean, row.sd, row.sites)) for row in macro.itertuples() if row.sites]
    seeds = ", ".join(map(str, sorted(set(predictions["seed"]))))
    sentences = [f"Seeds: {seeds}. Each site was held out of training completely."]
    if not same:
        sentences.append(f"The study ran {label(fitted.name, variant)} with other field values, {OTHERWISE}")
    if contents.study.get("cohort_hash") != fitted.facts_["source"]["hash"]:
        sentences.append(OTHER_COHORT if contents.known_rois else f"{OTHER_COHORT} {ROIS_UNKNOWN}")
    if fitted.recalibration is not None:
        sentences.append(AS_IT_RAN)
    return Part(LEFT_OUT, mean, [table], sentences)


def _atlas(atlas: str) -> str:
    """Name of an atlas, with its title if it is included."""
    name = included(atlas)
    return f"{atlas} ({about()[name]['title']})" if name is not None else atlas or "not named"


def _refuse_other_rois(fitted: Model, contents: Contents) -> None:
    """Refuse a study on other ROIs than those of the model; its figures say nothing about the model."""
    if contents.study.get("cohort_hash") == fitted.facts_["source"]["hash"] or contents.known_rois is None:
        return
    (atlas, rois), expected = contents.known_rois, tuple(fitted.facts_["rois"])
    numbered = all(name.isdigit() for name in rois)
    other_atlas = numbered and atlas and fitted.facts_["atlas"] and atlas != fitted.facts_["atlas"]
    if same_rois(rois, atlas, expected, fitted.facts_["atlas"]) and not other_atlas:
        return
    names = [
        f"{len(each)} ROIs ({name or 'atlas not named'})" for name, each in ((atlas, rois), (fitted.facts_["atlas"], expected))
    ]
    differing = next(((a, b) for a, b in zip(rois, expected, strict=False) if a != b), None)
    detail = f": ROI {differing[0]} in place of {differing[1]}" if differing and len(rois) == len(expected) else ""
    raise InputError(
        f"--study {contents.folder}: the study has {names[0]}, the model {names[1]}{detail}; "
        "give a study of the same method on the ROIs of the model."
    )


def _variant(fitted: Model, contents: Contents, variants: list[str]) -> tuple[str, bool]:
    """Variant of the study with the fields of the model and True; the first variant and False if there is none."""
    given = (contents.study.get("method") or {}).get(fitted.name) or {}
    for variant in variants:
        changes = fitted.method.variants.get(variant, {})
        try:
            fields = create(fitted.name, **{**given, **changes}).fields()
        except InputError:
            continue
        if (not variant or changes) and fields == fitted.fields():
            return variant, True
    return variants[0], False


def _mean(mean: float, sd: float, sites: int) -> str:
    return f"{100 * mean:.1f} at one site" if sites == 1 else f"{100 * mean:.1f} ± {100 * sd:.1f} over {sites} sites"


def _area(part: pd.DataFrame) -> str:
    y, p = part["label"].to_numpy(), part["proba"].to_numpy()
    area, (low, high) = auc(y, p), delong_interval(y, p)
    if np.isnan(area):
        return "-"
    return f"{100 * area:.1f}" + ("" if np.isnan(low) else f" ({100 * low:.1f}-{100 * high:.1f})")


def _failures(fitted: Model) -> list[str]:
    sites = fitted.facts_["source"]["sites"]
    sentences = list(fitted.facts_.get("notes", []))
    local = fitted.facts_.get("local", {}).get("findings", [])
    sentences += [f"Subjects of the local calibration: {sentence}" for sentence in anonymous_sentences(local)]
    if fitted.site_level is not None:
        sentences.append(SHARE_ASSUMED if fitted.site_level.assumed else SHARE_GIVEN)
        findings = fitted.facts_["site_level"].get("findings", [])
        sentences += [f"Subjects of the site level: {sentence}" for sentence in anonymous_sentences(findings)]
    one_class = [site for site, n in sites.items() if not n["patients"] or not n["controls"]]
    small = [site for site, n in sites.items() if sum(n.values()) < SMALL_SITE]
    if one_class:
        sentences.append(f"Training sites with one class only (site and diagnosis confounded): {', '.join(one_class)}.")
    if small:
        sentences.append(f"Training sites with fewer than {SMALL_SITE} subjects: {', '.join(small)}.")
    return sentences + ([] if fitted.new_site_ is None else low_coverage(fitted.new_site_))


def _weak_targets(results: Part) -> list[str]:
    """Left-out sites that are small or of one class, or where the method may be no better than chance."""
    rows, sentences = results.tables[0].rows, []
    small = [row[0] for row in rows if int(row[1]) < SMALL_SITE]
    chance = [row[0] for row in rows if "(" in row[3] and float(row[3].split("(")[1].split("-")[0]) <= 50]
    undefined = [row[0] for row in rows if row[3] == "-"]
    if chance:
        sentences.append(f"Left-out sites where the AUC interval includes chance: {', '.join(chance)}.")
    if small:
        sentences.append(f"Left-out sites with fewer than {SMALL_SITE} subjects, with imprecise estimates: {', '.join(small)}.")
    if undefined:
        sentences.append(f"Left-out sites with one class only, without AUC: {', '.join(undefined)}.")
    return sentences


def _licence(cohort: str) -> str:
    return LICENCES.get(cohort.lower(), "authors to complete")


def _versions(fitted: Model, model: Path) -> list[tuple[str, str]]:
    about = read_json(model / "method.json", {})
    versions = about.get("versions", {})
    facts: list[tuple[str, str]] = [(str(name), str(version)) for name, version in versions.items()]
    for name in ("method.json", *(name for name in about.get("hashes", {}) if name in HASHED)):
        facts.append((f"{name}, SHA-256", hashlib.sha256((model / name).read_bytes()).hexdigest()))
    return [*facts, ("training cohort, SHA-256 of its content", str(fitted.facts_["source"]["hash"]))]


def _plain_table(title: str, header: list[str], rows: list[list[str]], note: str) -> Table:
    return Table(title, header, rows, [[0] * len(header) for _ in rows], note)


def _page(title: str, parts: list[Part]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    here = files("m2lgdg.report")
    style, page = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "card.html"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(page).render(style=Markup(style), title=title, warning=WARNING, parts=parts)


def _markdown(title: str, parts: list[Part]) -> str:
    lines = [f"# {markdown(title)}", "", f"**{WARNING}**"]
    for part in parts:
        lines += ["", f"## {part.title}", ""]
        lines += [f"- {markdown(key)}: {markdown(value)}" for key, value in part.facts]
        for table in part.tables:
            rows = [table.header, ["---"] + ["---:"] * (len(table.header) - 1), *table.rows]
            lines += ["", *(f"| {' | '.join(map(markdown, row))} |" for row in rows), "", f"{markdown(table.note)}."]
        lines += [""] if part.tables and part.sentences else []
        lines += [f"- {markdown(sentence)}" for sentence in part.sentences]
    return "\n".join(lines) + "\n"
