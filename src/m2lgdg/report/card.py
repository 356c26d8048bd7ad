"""The model card: what a model folder is for, what it was trained on, and how it did at sites left out, as Markdown and HTML.

Made from the model folder, and from a study folder of the same method where one is given; holds no subject and no path.
"""

from __future__ import annotations

import hashlib
import html
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.deep import DeepMethod
from m2lgdg.method import Method, make
from m2lgdg.metrics import PAPER_METRICS, auc, delong_interval
from m2lgdg.model.out_of_distribution import MEASURES
from m2lgdg.report.contents import Contents, read_contents, read_json
from m2lgdg.report.new_site import NO_PROMISE, PROMISED, UNSEEN, promised_facts, promised_tables, too_small_sets, weak_sites
from m2lgdg.report.operating import operating_table, over_seeds
from m2lgdg.report.tables import Table, changed_fields, label
from m2lgdg.storage import InputError, write_texts
from m2lgdg.study.stats import cell_scores, macro_scores, site_scores

WARNING = "Research use only. Not a diagnostic device: no decision about a person may rest on it."
SMALL_SITE = 20  # subjects below which a site says little, in training and in testing
LICENCES = {  # by the name that a reader gives its cohort; whom to ask and cite, as terms change with the release
    "abide": "ABIDE I (Preprocessed Connectomes Project): the terms of the release that was downloaded apply, which are for "
    "non-commercial research; cite Di Martino et al. 2014 and Craddock et al. 2013",
    "rest-meta-mdd": "REST-meta-MDD: the terms agreed with its consortium apply; cite Yan et al. 2019",
}


@dataclass(frozen=True)
class Part:
    """A section of the card: facts by name, then tables, then sentences."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def write_card(model: str | Path, *, study: str | Path | None = None, to: str | Path | None = None) -> Path:
    """Write card.md and card.html into the model folder, or into `to`; returns that folder."""
    return write_parts(card(model, study), to or model)


def write_parts(parts: list[Part], folder: str | Path) -> Path:
    """Write the sections of a card as card.md and card.html; returns the folder."""
    title = f"Model card: {parts[0].facts[0][1]}"
    return write_texts(folder, {"card.md": _markdown(title, parts), "card.html": _page(title, parts)})


def card(model: str | Path, study: str | Path | None = None) -> list[Part]:
    """The sections of the card of a model folder."""
    fitted = Method.load(model)
    with fitted.doubted():
        decision = Part("Decision", _decision(fitted))
    results = None if study is None else _results(fitted, read_contents(study))
    promised = [] if fitted.new_site_ is None else weak_sites(fitted.new_site_)
    failures = _failures(fitted) + (promised if results is None else _weak_targets(results))
    return [
        Part("Model", _about(fitted), sentences=[(type(fitted).__doc__ or "").strip().splitlines()[0]]),
        Part("Intended use", sentences=INTENDED),
        _training(fitted),
        Part("Inputs", _inputs(fitted)),
        decision,
        *_promised(fitted),
        results or Part(LEFT_OUT, sentences=[NO_STUDY]),
        Part("Known failures and limits", sentences=failures or ["None is known from training; see the intended use."]),
        Part("Data licence", sentences=[_licence(fitted.facts_["source"]["cohort"])]),
        Part("Versions and hashes", _versions(fitted, Path(model))),
    ]


INTENDED = [
    "For research on how classifiers of resting-state fMRI carry over to sites they have never seen.",
    "Not for diagnosis, screening, treatment or any other decision about a person.",
    "Not for subjects unlike those below: another atlas, another preprocessing, another age range.",
]
LEFT_OUT = "In a study, at sites left out"
NO_STUDY = (
    "No study was given. A leave-one-site-out study (m2lgdg run) tells how the method does at each site it has not seen, and "
    "m2lgdg card MODEL --study DIR puts it here."
)
OTHERWISE = "than this model has: it may do otherwise."
OTHER_COHORT = "The study's cohort is not the same as the one of this model, or not with the same inputs."
AS_IT_RAN = "Probabilities and threshold are the study's, without the temperature and threshold of this model."


def _about(fitted: Method) -> list[tuple[str, str]]:
    fields = json.loads(json.dumps(fitted.fields()))  # tuples as lists, as a study has them
    facts = [
        ("method", fitted.name),
        ("reference", fitted.reference or "none"),
        ("fields changed from their defaults", changed_fields({"method": {fitted.name: fields}}) or "none"),
        ("seed", str(fitted.facts_["seed"]) if fitted.stochastic else "none, the method has no randomness"),
    ]
    if "parameters" in fitted.facts_:
        facts.append(("trained parameters", f"{fitted.facts_['parameters']:,}"))
    return facts


def _training(fitted: Method) -> Part:
    sites = fitted.facts_["source"]["sites"]
    rows = [[site, str(one["patients"]), str(one["controls"]), str(sum(one.values()))] for site, one in sites.items()]
    totals = [sum(one[kind] for one in sites.values()) for kind in ("patients", "controls")]
    rows.append(["all", *map(str, totals), str(sum(totals))])
    table = _plain_table("Training sites", ["Site", "patients", "controls", "subjects"], rows, "labelled subjects of the fit")
    facts = [("cohort", fitted.facts_["source"]["cohort"]), *_ranges(fitted)]
    if "training_subjects" in fitted.facts_:
        counts = (fitted.facts_["training_subjects"], fitted.facts_["validation_subjects"])
        facts.append(("trained on", "{} subjects; epoch and calibration chosen on {}".format(*counts)))
    return Part("Training data", facts, [table])


def _ranges(fitted: Method) -> list[tuple[str, str]]:
    """What training subjects were like, as far as the model folder knows, since it is not for subjects unlike them."""
    units = {"volumes": "", "TR": " s", "spectral edge": " Hz", "age": " years"}
    ranges = (
        [] if fitted.source_distribution_ is None else zip(MEASURES, fitted.source_distribution_.ranges.tolist(), strict=True)
    )
    return [
        (name, f"median {middle:.3g}{units[name]}, 95 % of subjects {low:.3g} to {high:.3g}")
        for name, (low, middle, high) in ranges
        if name in units and not np.isnan([low, middle, high]).any()
    ]


def _inputs(fitted: Method) -> list[tuple[str, str]]:
    network = isinstance(fitted, DeepMethod) and "length" not in fitted.unused
    length = f"any; resampled to {fitted.length} points" if isinstance(fitted, DeepMethod) and network else "any"
    return [
        ("series", f"(time, roi) of {len(fitted.facts_['rois'])} ROIs, in the order of method.json"),
        ("atlas", fitted.facts_["atlas"] or "not named"),
        ("scan length", length),
        ("phenotypes", ", ".join(fitted.facts_["inputs"]) or "none"),
    ]


def _decision(fitted: Method) -> list[tuple[str, str]]:
    calibrated = "none"
    if "calibration" in fitted.state_:
        slope, offset = fitted.state_["calibration"]
        on = fitted.facts_.get("validation", "source sites held out in turn")
        calibrated = f"logit times {slope:.4g} plus {offset:.4g}, fitted on {on}; never on a target"
    facts = [("output", "probability of the patient"), ("calibration", calibrated)]
    new_site = fitted.new_site_
    if new_site is not None:
        told = f"then logit times {new_site.slope:.4g} plus {new_site.offset:.4g}, fitted on source sites left out whole"
        facts.append(("temperature", f"{told}; in predict_proba, m2lgdg predict and the ONNX graph alike"))
    local = fitted.facts_.get("local")
    if local is not None:
        told = (
            f"then logit times {local['slope']:.4g} plus {local['offset']:.4g}, fitted on some labelled subjects of that site"
        )
        facts.append(("calibration to a site", f"{told}, who must not be used to evaluate it"))
    return [*facts, ("threshold", f"patient at {fitted.threshold:.3g} or above")]


def _promised(fitted: Method) -> list[Part]:
    """What the model says of itself at a site it has never seen; of a model calibrated to a site, nothing."""
    if "local" in fitted.facts_:
        return []
    if fitted.new_site_ is None:
        return [Part(UNSEEN, sentences=[NO_PROMISE])]
    return [Part(UNSEEN, promised_facts(fitted.new_site_), promised_tables(fitted.new_site_), PROMISED)]


def _results(fitted: Method, contents: Contents) -> Part:
    """Each left-out site of the study's cells of this method."""
    own = contents.predictions[contents.predictions["method"] == fitted.name]
    if not len(own):
        raise InputError(
            f"the study has no method {fitted.name}; it has {', '.join(dict.fromkeys(label(*k) for k in contents.keys))}."
        )
    variant, same = _variant(fitted, contents, list(dict.fromkeys(own["variant"])))
    own = own[own["variant"] == variant]
    areas = {target: _area(part) for target, part in over_seeds(own).groupby("target", sort=False)}
    operating = operating_table(own)
    rows = [[row[1], *row[2:4], areas[row[1]], *row[8:]] for row in operating.rows]
    header = ["Site left out", "n", "patients", "AUC", *operating.header[8:]]
    table = _plain_table("Sites left out", header, rows, f"AUC with DeLong's interval; {operating.note}")
    macro = macro_scores(site_scores(cell_scores(own, PAPER_METRICS)))
    mean = [(one.metric, _mean(one.mean, one.sd, one.sites)) for one in macro.itertuples() if one.sites]
    told = [f"Seeds: {', '.join(map(str, sorted(set(own['seed']))))}. Every site was left out whole: training never saw it."]
    if not same:
        told.append(f"The study ran {label(fitted.name, variant)} with other fields {OTHERWISE}")
    if contents.study.get("cohort_hash") != fitted.facts_["source"]["hash"]:
        told.append(OTHER_COHORT)
    if fitted.recalibration is not None:
        told.append(AS_IT_RAN)
    return Part(LEFT_OUT, mean, [table], told)


def _variant(fitted: Method, contents: Contents, variants: list[str]) -> tuple[str, bool]:
    """The variant of a study that has the fields of the model, and whether there is one; else the first."""
    given = (contents.study.get("method") or {}).get(fitted.name) or {}
    for one in variants:
        changes = fitted.variants.get(one, {})
        try:
            there = make(fitted.name, **{**given, **changes}).fields()
        except InputError:
            continue
        if (not one or changes) and there == fitted.fields():
            return one, True
    return variants[0], False


def _mean(mean: float, sd: float, sites: int) -> str:
    return f"{100 * mean:.1f} at one site" if sites == 1 else f"{100 * mean:.1f} ± {100 * sd:.1f} over {sites} sites"


def _area(part: pd.DataFrame) -> str:
    y, p = part["label"].to_numpy(), part["proba"].to_numpy()
    area, (low, high) = auc(y, p), delong_interval(y, p)
    if np.isnan(area):
        return "-"
    return f"{100 * area:.1f}" + ("" if np.isnan(low) else f" ({100 * low:.1f}-{100 * high:.1f})")


def _failures(fitted: Method) -> list[str]:
    sites = fitted.facts_["source"]["sites"]
    found = list(fitted.facts_.get("notes", []))
    one_class = [site for site, one in sites.items() if not one["patients"] or not one["controls"]]
    small = [site for site, one in sites.items() if sum(one.values()) < SMALL_SITE]
    if one_class:
        found.append(f"Training sites of one class only, which can teach site for diagnosis: {', '.join(one_class)}.")
    if small:
        found.append(f"Training sites of fewer than {SMALL_SITE} subjects: {', '.join(small)}.")
    return found + ([] if fitted.new_site_ is None else too_small_sets(fitted.new_site_))


def _weak_targets(results: Part) -> list[str]:
    """Left-out sites that say little, or at which the method may be no better than chance."""
    rows, found = results.tables[0].rows, []
    small = [row[0] for row in rows if int(row[1]) < SMALL_SITE]
    chance = [row[0] for row in rows if "(" in row[3] and float(row[3].split("(")[1].split("-")[0]) <= 50]
    undefined = [row[0] for row in rows if row[3] == "-"]
    if chance:
        found.append(f"Left-out sites at which the interval of the AUC reaches chance: {', '.join(chance)}.")
    if small:
        found.append(f"Left-out sites of fewer than {SMALL_SITE} subjects, whose numbers say little: {', '.join(small)}.")
    if undefined:
        found.append(f"Left-out sites of one class only, which have no AUC: {', '.join(undefined)}.")
    return found


def _licence(cohort: str) -> str:
    return LICENCES.get(cohort.lower(), "authors to complete")


def _versions(fitted: Method, model: Path) -> list[tuple[str, str]]:
    versions = read_json(model / "method.json", {}).get("versions", {})
    facts: list[tuple[str, str]] = [(str(name), str(version)) for name, version in versions.items()]
    there = ["new_site_calibration.json"] if fitted.new_site_ else []
    for name in ("method.json", "weights.safetensors", *there):
        facts.append((f"{name}, SHA-256", hashlib.sha256((model / name).read_bytes()).hexdigest()))
    return [*facts, ("content of the training cohort", str(fitted.facts_["source"]["hash"]))]


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
    lines = [f"# {_text(title)}", "", f"**{WARNING}**"]
    for part in parts:
        lines += ["", f"## {part.title}", ""]
        lines += [f"- {_text(key)}: {_text(value)}" for key, value in part.facts]
        for table in part.tables:
            rows = [table.header, ["---"] + ["---:"] * (len(table.header) - 1), *table.rows]
            lines += ["", *(f"| {' | '.join(map(_text, row))} |" for row in rows), "", f"{_text(table.note)}."]
        lines += [""] if part.tables and part.sentences else []
        lines += [f"- {_text(one)}" for one in part.sentences]
    return "\n".join(lines) + "\n"


def _text(words: str) -> str:
    """Words that Markdown must not take for markup, on one line."""
    safe = html.escape(" ".join(words.split()), quote=False)
    return "".join(f"\\{letter}" if letter in "\\`*[]|" else letter for letter in safe)
