"""The model card as Markdown and HTML: intended use, training data, and performance at left-out sites.

Made from a model folder, and from a study folder of the same method if one is given; it names no subject and no path.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from m2lgdg.data.atlases import about, included, same_rois
from m2lgdg.findings import anonymous_sentences
from m2lgdg.metrics import THRESHOLD, auc, delong_interval
from m2lgdg.model.folder import NEW_SITE_CALIBRATION, WEIGHTS
from m2lgdg.model.model import Model
from m2lgdg.model.new_site import COVERAGES, LEAST_SUBJECTS, NewSiteCalibration, Performance, percent
from m2lgdg.model.out_of_distribution import MEASURES
from m2lgdg.model.site_level import ADAPT_SUBJECTS
from m2lgdg.registry import METHODS, create
from m2lgdg.report.contents import Contents, changed_fields, read_contents, read_json
from m2lgdg.report.inputs import fitted_tables, sees_tables_only, table_words
from m2lgdg.report.operating import operating_table
from m2lgdg.report.page import rendered
from m2lgdg.report.paper_tables import SHOWN, flat_clauses, label
from m2lgdg.report.sharing import LICENCES
from m2lgdg.report.tables import NAN, Column, Estimate, Table, Value, columns, markdown, markdown_grid
from m2lgdg.scans import CORRELATION, FISHER_Z, SERIES
from m2lgdg.storage import InputError, write_texts
from m2lgdg.study.stats import macro_scores, min_per_class

HASHED = (WEIGHTS, NEW_SITE_CALIBRATION)  # files whose hashes the card lists
SMALL_SITE = 20  # subjects; smaller sites are listed among the limits
COVERAGE = 0.9  # nominal coverage that is shown for each site
SLACK = 0.02  # coverage over all sites may be lower than nominal by this much before it counts as a failure
WARNING = "Research use only. Not a diagnostic device: do not base a decision about a person on it."
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
AMPLITUDES = "those of the training data: the model uses the amplitude of each ROI, so do not z-score or rescale the ROIs"
OTHER_COHORT = "The cohort of the study, or its inputs, differ from those of this model."
ROIS_UNKNOWN = "Its ROIs are not known, so it may be on another atlas."
PREVALENCE_ASSUMED = (
    "The intercept of the site assumes the proportion of patients of the training sites. With fewer patients among the scans "
    "that it was learned from, too many subjects are called patients; with more, too few."
)
PREVALENCE_GIVEN = (
    "The intercept of the site is as wrong as the proportion of patients that was given for the scans it was learned from."
)
WITHOUT_TABLE = "A subject without a table is decided by the other inputs, with a flag."
TABLES_ALONE = "Tables alone decide: a subject without any gets the decision of a mean subject, with a flag."
AS_IT_RAN = "Probabilities and threshold are those of the study, without the calibration and threshold of this model."
UNSEEN = "Expected performance at an unseen site"
NOT_CALIBRATED = (
    "The model was fitted without new-site calibration, so its probabilities are not calibrated for a site it has not seen. "
    "Fit it with m2lgdg fit --new-site-calibration."
)
READING = [
    "All figures are from source sites left out in turn, with recalibration, threshold and conformal sets from the others.",
    "They hold for sites that differ from the source sites as these differ from each other; other sites may do worse.",
    "A conformal set has every class that cannot be ruled out: both (undecided) or none (unlike either class) are possible.",
    "The interval of a probability describes differences between sites, not the uncertainty about one subject.",
]
WITH_INTERCEPT = (
    f"Each left-out site has its own intercept, learned from up to {ADAPT_SUBJECTS} of its other subjects without labels, as "
    "this model has that of its site."
)
WITHOUT_INTERCEPT = "The left-out sites have no intercept of their own, so this model at its site has other figures."


@dataclass(frozen=True)
class CardSection:
    """A section of the card; `remarks` are sentences that the command repeats."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def write_card(model: str | Path, *, study: str | Path | None = None, to: str | Path | None = None) -> Path:
    """Write card.md and card.html into the model folder, or into `to`; return that folder."""
    return write_sections(card(model, study), to or model)


def write_sections(sections: list[CardSection], folder: str | Path) -> Path:
    """Write the sections of a card as card.md and card.html."""
    title = f"Model card: {sections[0].facts[0][1]}"
    page = rendered("card.html", title=title, warning=WARNING, sections=sections)
    return write_texts(folder, {"card.md": _markdown(title, sections), "card.html": page})


def _markdown(title: str, sections: list[CardSection]) -> str:
    lines = [f"# {markdown(title)}", "", f"**{WARNING}**"]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        lines += [f"- {markdown(key)}: {markdown(value)}" for key, value in section.facts]
        for table in section.tables:
            lines += ["", *markdown_grid(table), "", f"{markdown(table.note)}."]
        lines += [""] if section.tables and section.sentences else []
        lines += [f"- {markdown(sentence)}" for sentence in section.sentences + section.remarks]
    return "\n".join(lines) + "\n"


def card(model: str | Path, study: str | Path | None = None) -> list[CardSection]:
    """Sections of the card of a model folder."""
    fitted = Model.load(model)
    with fitted.method.checking_weights():
        decision = CardSection("Decision", _decision(fitted))
    results = CardSection(LEFT_OUT, sentences=[NO_STUDY]) if study is None else _results(fitted, read_contents(study))
    limits = [*_limits(fitted), *_weak_targets(results)] or ["None known from training; see the intended use."]
    return [
        CardSection("Model", _about(fitted), sentences=[(type(fitted.method).__doc__ or "").strip().splitlines()[0]]),
        CardSection("Intended use", sentences=INTENDED),
        _training(fitted),
        *_federated(fitted),
        CardSection("Inputs", _inputs(fitted)),
        decision,
        *_new_site(fitted),
        results,
        CardSection("Known failures and limits", sentences=limits),
        CardSection("Data licence", sentences=[LICENCES.get(fitted.facts_["source"]["cohort"].lower(), "authors to complete")]),
        CardSection("Versions and hashes", _versions(fitted, Path(model))),
    ]


def _about(fitted: Model) -> list[tuple[str, str]]:
    fields = json.loads(json.dumps(fitted.fields()))  # tuples become lists, as in study.json
    declared = {fitted.name: METHODS.declaration(fitted.name)}
    facts = [
        ("method", fitted.name),
        ("reference", fitted.method.reference or "none"),
        ("fields changed from their defaults", changed_fields({"method": {fitted.name: fields}}, declared) or "none"),
        ("seed", str(fitted.facts_["seed"]) if fitted.method.stochastic else "none (the method has no randomness)"),
    ]
    parameters = [member.facts_["parameters"] for member in fitted.members.values() if "parameters" in member.facts_]
    return [*facts, ("trained parameters", f"{sum(parameters):,}")] if parameters else facts


def _training(fitted: Model) -> CardSection:
    source = fitted.facts_["source"]
    rows: list[list[Value]] = [[site, n["patients"], n["controls"], sum(n.values())] for site, n in source["sites"].items()]
    totals = np.array([row[1:] for row in rows], dtype=int).sum(axis=0).tolist()
    header = [Column("Site"), *columns("count", "patients", "controls", "subjects")]
    table = Table("Training sites", header, [*rows, ["all", *totals]], "labelled subjects of the fit")
    facts = [("cohort", source["cohort"])]
    kinds = dict.fromkeys(member.trained_on for member in fitted.members.values())
    facts += [("scans", f"connectomes ({kind})" if kind != SERIES else "series") for kind in kinds if set(kinds) != {SERIES}]
    units = {"volumes": "", "TR": " s", "spectral edge": " Hz", "age": " years"}
    distribution = fitted.source_distribution_  # these measures are the same in all atlases
    for name, ends in () if distribution is None else zip(MEASURES, distribution.ranges.tolist(), strict=True):
        if name in units and not np.isnan(ends).any():
            low, middle, high = (f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" for value in ends)
            facts.append((name, f"median {middle}{units[name]}, 95 % of subjects {low} to {high}"))
    for member in fitted.members.values():
        if "training_subjects" in member.facts_:
            counts = (member.facts_["training_subjects"], member.facts_["validation_subjects"])
            key = f"trained on ({member.facts_['atlas']})" if len(fitted.members) > 1 else "trained on"
            facts.append((key, "{} subjects; early stopping and calibration on {} subjects".format(*counts)))
    stored = source.get("findings")
    findings = [NOT_CHECKED] if stored is None else anonymous_sentences(stored) or [NO_FINDING]
    return CardSection("Training data", facts, [table], findings)


def _federated(fitted: Model) -> list[CardSection]:
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
    if "noise" in about:  # likewise
        facts.append(("noise on the sums", f"epsilon {about['noise']['epsilon']:.3g}, delta {about['noise']['delta']:.0e}"))
    if "left_out" in about:
        facts.append(("left out for evaluation", about["left_out"]))
    if about["attempt"] > 1:
        facts.append(("attempt", f"{about['attempt']}; {AGAIN}"))
    alone = [f"Held out of a fold alone, so that differences of totals give its own sums: {site}." for site in about["alone"]]
    first = [] if {"network", "noise"} & set(about) else [SUMS_ONLY]
    return [CardSection("Federated training", facts, sentences=[*first, *alone])]


def _inputs(fitted: Model) -> list[tuple[str, str]]:
    # Only networks have a length; asking for their class would import PyTorch.
    resampled = getattr(fitted.method, "length", None) if "length" not in fitted.method.unused else None
    atlases = [_atlas(member.facts_["atlas"]) for member in fitted.members.values()]
    amplitudes = any(member.uses_amplitude for member in fitted.members.values())
    counts: dict[str, list[str]] = {}
    for member in fitted.members.values():
        counts.setdefault(member.trained_on, []).append(f"{len(member.facts_['rois'])} ROIs")
    scans = [_scans(kind, " and ".join(some)) for kind, some in counts.items()]
    of_series = [
        ("scan length", f"any; resampled to {resampled} points" if resampled else "any"),
        ("units", AMPLITUDES if amplitudes else "any; each ROI is standardised within its scan"),
    ]
    return [
        *scans,
        ("atlases", f"{', '.join(atlases)}; a subject may lack some of them") if atlases[1:] else ("atlas", atlases[0]),
        *(of_series if SERIES in counts else []),
        ("phenotypes", _phenotypes(fitted)),
        *((f"table {name}", table_words(name, every)) for name, every in fitted_tables(fitted).items()),
    ]


def _phenotypes(fitted: Model) -> str:
    names = ", ".join(fitted.facts_["inputs"]) or "none"
    only_regressed = fitted_tables(fitted) and names != "none" and not getattr(fitted.method, "phenotypes", True)
    return f"{names} (only regressed out of the tables)" if only_regressed else names


def _scans(kind: str, count: str) -> tuple[str, str]:
    if kind == SERIES:
        return "series", f"(time, roi) with {count}, in the order of method.json"
    either = " or ".join((CORRELATION, FISHER_Z)) if kind in (CORRELATION, FISHER_Z) else kind
    return "connectomes", f"symmetric (roi, roi) matrices of {either} with {count}, in the order of method.json"


def _atlas(atlas: str) -> str:
    name = included(atlas)
    return f"{atlas} ({about()[name]['title']})" if name is not None else atlas or "not named"


def _decision(fitted: Model) -> list[tuple[str, str]]:
    calibrated = "none"
    if "calibration" in fitted.state_:
        slope, intercept = fitted.state_["calibration"]
        validation = fitted.facts_.get("validation", "source sites held out in turn")
        of = "mean of the calibrated logits of the atlases" if len(fitted.members) > 1 else "logit"
        calibrated = f"{of} times {slope:.4g} plus {intercept:.4g}, fitted on {validation}, never on a target"
        if len(fitted.members) > 1 and (slope, intercept) == (1, 0):
            calibrated = of
    facts = [("output", "probability of being a patient"), ("calibration", calibrated)]
    if fitted.new_site_ is not None:
        formula = f"then logit times {fitted.new_site_.slope:.4g} plus {fitted.new_site_.offset:.4g}"
        where = "fitted on left-out source sites; applied by predict_proba, m2lgdg predict and the ONNX graph"
        facts.append(("Platt recalibration for a new site", f"{formula}, {where}"))
    if fitted.site_level is not None:
        facts.append(("intercept correction for a site", fitted.site_level.sentence()))
    local = fitted.facts_.get("local")
    if local is not None:
        formula = f"then logit times {local['slope']:.4g} plus {local['offset']:.4g}, fitted on labelled subjects of one site"
        facts.append(("local calibration", f"{formula}; do not evaluate the model on these subjects"))
    return [*facts, ("threshold", f"patient at {fitted.threshold:.3g} or above")]


def _new_site(fitted: Model) -> list[CardSection]:
    """No section for a model with local calibration."""
    if "local" in fitted.facts_:
        return []
    if fitted.new_site_ is None:
        return [CardSection(UNSEEN, sentences=[NOT_CALIBRATED])]
    level = fitted.site_level
    first = [WITH_INTERCEPT if level.recalibrated else WITHOUT_INTERCEPT] if level else []
    return [CardSection(UNSEEN, new_site_facts(fitted.new_site_), new_site_tables(fitted.new_site_), [*first, *READING])]


def new_site_facts(new_site: NewSiteCalibration) -> list[tuple[str, str]]:
    """Performance over all left-out sites."""
    whole, sets, areas = new_site.whole, new_site.expected(COVERAGE), _areas(new_site)
    rate, number = Column("", "percent", ".1f").number, Column("", "number").number
    return [
        ("learned from", f"{whole.subjects} subjects of left-out sites, in {new_site.folds} refits"),
        ("AUC", f"mean {rate(_mean(areas))} % over {len(areas)} left-out sites{_range(areas)}"),
        ("sensitivity, specificity over all", f"{rate(whole.sensitivity)} %, {rate(whole.specificity)} %"),
        ("calibration", f"slope {number(whole.slope)} (ideal 1), intercept {number(whole.intercept)} (ideal 0)"),
        ("Brier score, ECE", f"{number(whole.brier)}, {number(whole.ece)}"),
        ("differences between sites", f"sd {new_site.slope_sd:.2f} of the slope, {new_site.offset_sd:.2f} of the intercept"),
        (
            f"conformal sets of {percent(COVERAGE)} coverage",
            f"contain the true class for {rate(sets.reached)} % of subjects (lowest site {rate(sets.lowest)} %, median "
            f"site {rate(sets.median)} %); have one class for {rate(sets.decided)} %, which is correct for "
            f"{rate(sets.right)} % of these",
        ),
    ]


def _areas(new_site: NewSiteCalibration) -> dict[str, float]:
    """AUC of each left-out site that has one; one over all subjects would mix the levels of sites."""
    return {site: of.auc for site, of in new_site.sites.items() if not math.isnan(of.auc)}


def _mean(areas: Mapping[str, float]) -> float:
    return float(np.mean(list(areas.values()))) if areas else NAN


def _range(areas: Mapping[str, float]) -> str:
    if len(areas) < 2:
        return ""
    low, high = min(areas, key=lambda site: areas[site]), max(areas, key=lambda site: areas[site])
    return f", from {100 * areas[low]:.1f} ({low}) to {100 * areas[high]:.1f} ({high})"


def new_site_tables(new_site: NewSiteCalibration) -> list[Table]:
    """A table by left-out site and a table by nominal coverage."""
    k = COVERAGES.index(COVERAGE)

    def row(name: str, of: Performance, area: Value) -> list[Value]:
        sets = (of.reached[k], of.decided[k], of.right[k])
        return [name, of.subjects, of.patients, area, of.slope, of.intercept, of.brier, of.ece, *sets]

    rows = [row(site, of, Estimate(of.auc, of.auc_low, of.auc_high)) for site, of in new_site.sites.items()]
    rows.append(row("all", new_site.whole, _mean(_areas(new_site))))
    header = [Column("Left-out site"), *columns("count", "n", "patients"), Column("AUC", "percent", ".1f")]
    header += columns("number", "slope", "intercept", "Brier", "ECE")
    header += columns("percent", "in set", "one class", "correct", form=".1f")
    note = (
        f"AUC in % with DeLong interval, in the last row the mean over sites; last three columns: conformal sets of "
        f"{percent(COVERAGE)} coverage, % of subjects with the true class in their set, % with one class, % of these that are "
        f"correct; sites with fewer than {LEAST_SUBJECTS} subjects count only in the last row, and not in its AUC"
    )
    names = ("in set", "lowest site", "median site", "one class", "correct")
    by_level: list[list[Value]] = [[percent(coverage), *new_site.expected(coverage)] for coverage in COVERAGES]
    level_note = "% of subjects of all left-out sites; nominal coverage in the first column"
    level_header = [Column("Coverage"), *columns("percent", *names, form=".1f")]
    return [
        Table("Left-out source sites", header, rows, note),
        Table("Conformal sets", level_header, by_level, level_note),
    ]


def _results(fitted: Model, contents: Contents) -> CardSection:
    variants = [variant for method, variant in contents.keys if method == fitted.name]
    if not variants:
        raise InputError(f"the study has no method {fitted.name}; it has {', '.join(label(*key) for key in contents.keys)}.")
    _refuse_other_rois(fitted, contents)
    variant, same = _variant(fitted, contents, variants)
    contents = contents.of_methods([(fitted.name, variant)])
    operating = operating_table(contents.mean)
    at = {column.name: i for i, column in enumerate(operating.columns)}
    before, after = ("n", "patients"), ("SEN", "SPE", "intercept", "slope", "Brier", "ECE")
    rows: list[list[Value]] = []
    for row, (target, own) in zip(operating.rows, contents.mean.groupby("target", sort=False), strict=True):
        y, p = own["label"].to_numpy(), own["proba"].to_numpy()
        area = Estimate(auc(y, p), *delong_interval(y, p))
        rows.append([str(target), *(row[at[name]] for name in before), area, *(row[at[name]] for name in after)])
    shown = [[operating.columns[at[name]] for name in names] for names in (before, after)]
    header = [Column("Left-out site"), *shown[0], Column("AUC", "percent", ".1f"), *shown[1]]
    table = Table("Left-out sites", header, rows, f"AUC in % with DeLong interval; {operating.note}")
    averaged = contents.averaged
    areas = averaged[averaged["metric"] == "AUC"].dropna(subset=["mean"]).set_index("target")["mean"].to_dict()
    macro = macro_scores(averaged)
    facts = {}
    for row in macro[macro["metric"].isin(SHOWN) & (macro["sites"] > 0)].itertuples():
        over = "at one site" if row.sites == 1 else f"± {100 * row.sd:.1f} over {row.sites} sites"
        facts[row.metric] = f"{100 * row.mean:.1f} {over}{_range(areas) if row.metric == 'AUC' else ''}"
    facts = {name: facts[name] for name in ("AUC", *SHOWN) if name in facts}
    least, targets = min_per_class(contents.study), contents.predictions["target"].unique()
    left = [str(site) for site in targets if site not in contents.counted]
    remarks = _listed(f"Not in the means, with fewer than {least} patients or controls", left)
    if not same:
        name = label(fitted.name, variant)
        remarks.append(f"The study ran {name} with other field values, so the performance of this model may differ.")
    if contents.study.get("cohort_hash") != fitted.facts_["source"]["hash"]:
        remarks.append(OTHER_COHORT if contents.known_rois else f"{OTHER_COHORT} {ROIS_UNKNOWN}")
    seeds = ", ".join(map(str, sorted(set(contents.predictions["seed"]))))
    sentences = [f"Seeds: {seeds}. Each site was held out of training completely."]
    sentences += [AS_IT_RAN] if fitted.recalibration is not None else []
    sentences.append(f"The study decides at the threshold {THRESHOLD:g}, this model at {fitted.threshold:.3g}.")
    remarks += [f"Uninformative decisions: {clause}." for clause in flat_clauses(contents.predictions, least)]
    return CardSection(LEFT_OUT, list(facts.items()), [table], sentences, remarks)


def _refuse_other_rois(fitted: Model, contents: Contents) -> None:
    """Figures of a study on other ROIs say nothing about the model."""
    if contents.study.get("cohort_hash") == fitted.facts_["source"]["hash"] or contents.known_rois is None:
        return
    (atlas, rois), own, expected = contents.known_rois, fitted.facts_["atlas"], tuple(fitted.facts_["rois"])
    if same_rois(rois, atlas, expected, own):
        return
    names = [f"{len(each)} ROIs ({name or 'atlas not named'})" for name, each in ((atlas, rois), (own, expected))]
    differing = next(((a, b) for a, b in zip(rois, expected, strict=False) if a != b), None)
    detail = f": ROI {differing[0]} in place of {differing[1]}" if differing and len(rois) == len(expected) else ""
    raise InputError(
        f"--study {contents.folder}: the study has {names[0]}, the model {names[1]}{detail}; "
        "give a study of the same method on the ROIs of the model."
    )


def _variant(fitted: Model, contents: Contents, variants: list[str]) -> tuple[str, bool]:
    """Variant with the fields of the model and True; the first variant and False if there is none."""
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


def _limits(fitted: Model) -> list[str]:
    sites, new_site = fitted.facts_["source"]["sites"], fitted.new_site_
    sentences = list(fitted.facts_.get("notes", []))
    tables = fitted_tables(fitted)
    if tables:
        sentences.append(TABLES_ALONE if sees_tables_only(fitted) else WITHOUT_TABLE)
    idle = [name for name, every in tables.items() if all(one.facts_["tables"][name].get("weight") == 0 for one in every)]
    sentences += _listed(
        "Tables with weight 0, which added nothing at held-out source sites and do not enter the decision", idle
    )
    local = fitted.facts_.get("local", {}).get("findings", [])
    sentences += [f"Subjects of the local calibration: {sentence}" for sentence in anonymous_sentences(local)]
    if fitted.site_level is not None:
        sentences.append(PREVALENCE_ASSUMED if fitted.site_level.assumed else PREVALENCE_GIVEN)
        findings = fitted.facts_["site_level"].get("findings", [])
        sentences += [f"Subjects of the site intercept: {sentence}" for sentence in anonymous_sentences(findings)]
    one_class = [site for site, n in sites.items() if not n["patients"] or not n["controls"]]
    small = [site for site, n in sites.items() if sum(n.values()) < SMALL_SITE]
    sentences += _listed("Training sites with one class only (site and diagnosis confounded)", one_class)
    sentences += _listed(f"Training sites with fewer than {SMALL_SITE} subjects", small)
    if new_site is None:
        return sentences
    sets = new_site.expected(COVERAGE)
    if sets.reached < COVERAGE - SLACK:
        observed = f"{100 * sets.reached:.1f} % of subjects, {100 * sets.lowest:.1f} % at the lowest site"
        low = f"Conformal sets of {percent(COVERAGE)} coverage contain the true class less often at left-out sites"
        sentences.append(f"{low}: {observed}.")
    chance = [site for site, figures in new_site.sites.items() if figures.auc <= 0.5 or figures.auc_low <= 0.5]
    return sentences + _listed("Source sites with an AUC interval that includes chance when left out", chance)


def _weak_targets(results: CardSection) -> list[str]:
    sites = [(str(row[0]), row[1], row[3]) for table in results.tables for row in table.rows]
    chance = [site for site, _, area in sites if isinstance(area, Estimate) and area.low <= 0.5]
    small = [site for site, n, _ in sites if isinstance(n, int) and n < SMALL_SITE]
    undefined = [site for site, _, area in sites if isinstance(area, Estimate) and math.isnan(area.value)]
    return [
        *_listed("Left-out sites where the AUC interval includes chance", chance),
        *_listed(f"Left-out sites with fewer than {SMALL_SITE} subjects, with imprecise estimates", small),
        *_listed("Left-out sites with one class only, without AUC", undefined),
    ]


def _listed(what: str, sites: list[str]) -> list[str]:
    return [f"{what}: {', '.join(sites)}."] if sites else []


def _versions(fitted: Model, model: Path) -> list[tuple[str, str]]:
    about = read_json(model / "method.json", {})
    facts = [(str(name), str(version)) for name, version in about.get("versions", {}).items()]
    for name in ("method.json", *(name for name in about.get("hashes", {}) if name in HASHED)):
        facts.append((f"{name}, SHA-256", hashlib.sha256((model / name).read_bytes()).hexdigest()))
    return [*facts, ("training cohort, SHA-256 of its content", str(fitted.facts_["source"]["hash"]))]
