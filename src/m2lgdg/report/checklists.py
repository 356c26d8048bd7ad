"""What a study can fill in of a paper: the TRIPOD+AI, REFORMS, PROBAST+AI and CLAIM checklists, and a methods paragraph.

Both are written from the contents of a study folder; what it does not know is left to the authors.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.pseudonyms import without_paths
from m2lgdg.data.readers.tables import MOTION, usual_name
from m2lgdg.findings import note_on_label
from m2lgdg.metrics import METRICS, THRESHOLD
from m2lgdg.registry import SIMPLE
from m2lgdg.report.contents import MATRICES, Contents, changed_fields
from m2lgdg.report.paper_tables import label, what_was_seen
from m2lgdg.report.subgroups import EYES
from m2lgdg.report.tables import Table, columns
from m2lgdg.scans import SERIES
from m2lgdg.study.description import with_table
from m2lgdg.study.predictions import ADAPTED
from m2lgdg.study.provenance import CHANGED, CLEAN, UNKNOWN
from m2lgdg.study.stats import half_interval, macro_scores, min_per_class

TO_COMPLETE = "authors to complete"
CITATIONS = {
    "TRIPOD+AI": "Collins et al. 2024, BMJ 385: e078378",
    "REFORMS": "Kapoor et al. 2024, Science Advances 10: eadk3452",
    "PROBAST+AI": "Moons et al. 2025, BMJ 388: e082505; its questions grouped by us, not compared with the original",
    "CLAIM": "Tejani et al. 2024, Radiology: Artificial Intelligence 6: e240300; not compared with the original",
}
NOTE = (
    "Filled in by m2lgdg from the files of this study. Items are paraphrased, and an answer may cover only part of its item. "
    "This is a draft for the authors, not a statement that the study meets the checklist."
)
MOST_NAMED = 8  # methods whose performance is listed; the tables have all
# True of every method of the package, by what `Method` and the study runner pass to it; plugins are free to differ.
OURS = {
    "selection": "Penalties, early stopping and calibration use source subjects only",
    "imputation": "Missing sex is imputed by the mode, other inputs by medians, of source-training subjects",
    "transformations": "Phenotypes are imputed and z-scored with source-training statistics; series or their connectivity are "
    "standardised within each subject or with source statistics, depending on the method",
}
OF_MATRICES = (
    "Phenotypes are imputed and z-scored with source-training statistics; connectomes are taken as Fisher z or as "
    "correlations, and standardised with source statistics or not at all, depending on the method"
)
OF_TABLES = {
    "imputation": "Subjects without a table of brain structure are decided without it; single values are means of source",
    "transformations": "Age, its square, sex and head size are regressed out of tables of brain structure within source sites",
}
UNUSABLE = "Series with NaN or infinite values, fewer than two volumes or no variation"
UNUSABLE_MATRICES = "Matrices that are not symmetric or zero everywhere, or have NaN, infinite values or values out of range"
YEARS = 5  # width of an age band in a shared report


class Row(NamedTuple):
    """An item of a checklist."""

    item: str
    section: str
    topic: str
    answer: str
    filled: bool


def checklist_tables(contents: Contents) -> list[Table]:
    """All checklists, filled in as far as the study knows."""
    tables = []
    for name, rows in checklists(known_facts(contents)).items():
        filled = sum(row.filled for row in rows)
        note = f"{CITATIONS[name]}. {filled} of {len(rows)} items have an answer. {NOTE}".rstrip(".")
        header = columns("text", "Item", "Section", "Topic", "Answer")
        tables.append(Table(f"{name}, pre-filled", header, [row[:4] for row in rows], note))
    return tables


def checklists(known: Mapping[str, str]) -> dict[str, list[Row]]:
    """Items of each checklist; one is filled in if all facts in its template are known."""
    text = (files("m2lgdg.report") / "checklists.tsv").read_text(encoding="utf-8")
    rows: dict[str, list[Row]] = {name: [] for name in CITATIONS}
    for item in csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE):
        needed = [key for _, key, _, _ in Formatter().parse(item["answer"]) if key]
        filled = bool(needed) and all(known.get(key) for key in needed)
        answer = item["answer"].format_map(known) if filled else TO_COMPLETE
        rows[item["checklist"]].append(Row(item["item"], item["section"], item["topic"], answer, filled))
    return rows


def known_facts(contents: Contents) -> dict[str, str]:
    """Facts about a study as text, by the names that the checklists ask for."""
    facts = _study_facts(contents) | _check_facts(contents.checks) | _prediction_facts(contents)
    if contents.environment:
        facts["environment"] = ", ".join(f"{name} {version}" for name, version in contents.environment.items())
        version = contents.environment.get("m2lgdg", "not installed")  # it can run from its source folder
        if "code" in contents.environment:
            name = "m2lgdg" if version == "not installed" else f"m2lgdg {version}"
            facts["code"] = f"{name}, hash of the prediction code {contents.environment['code']}{_commit(contents.environment)}"
    if contents.inclusion:
        facts["included"], facts["excluded"] = (str(len(contents.included(one))) for one in ("included", "excluded"))
        facts["exclusions"] = "; ".join(f"{reason} {count}" for reason, count in contents.exclusions()) or "none"
        facts["unusable"] = UNUSABLE if contents.scans == SERIES else UNUSABLE_MATRICES
    if contents.cohort is not None:
        facts |= _cohort_facts(contents.cohort, contents.study.get("targets"), banded=contents.shared)
    return {name: without_paths(text) for name, text in facts.items()} if contents.shared else facts


def _study_facts(contents: Contents) -> dict[str, str]:
    study = contents.study
    if not study:
        return {}
    targets, seeds, threads = study.get("targets") or [], study.get("seeds") or [], study.get("threads", 1)
    facts = {
        "study": str(study.get("name", "")),
        "cohort_hash": str(study.get("cohort_hash") or ""),
        "inputs": ", ".join(study.get("inputs") or []) or "none",
        "hyperparameters": changed_fields(study, contents.declared) or "none",
        "device": f"{study.get('device', 'cpu')}, {threads} thread{'s' * (threads > 1)} per cell",
    }
    if targets:
        facts["split"] = (
            f"Leave-one-site-out: each target site is held out completely, and source is all labelled subjects of the other "
            f"sites; targets: {', '.join(targets)}; seeds {', '.join(map(str, seeds))} (only the first for methods without "
            "randomness)"
        )
    ours = OURS if contents.scans == SERIES else OURS | {"transformations": OF_MATRICES}
    if any(each.tables for each in contents.seen.values()):
        ours = {name: f"{text}. {OF_TABLES[name]}" if name in OF_TABLES else text for name, text in ours.items()}
    return facts | ({} if study.get("plugins") else ours)


def _check_facts(checks: list[dict[str, Any]]) -> dict[str, str]:
    facts = {}
    for key, word in {"checks": "", "checks_duplicates": "on both sides", "checks_inputs": "inputs"}.items():
        chosen = [check for check in checks if word in check["check"]]
        failed = [f"{check['check']}: {str(check['detail']).rstrip('.')}" for check in chosen if not check["passed"]]
        remarks = "".join(f". {check['remark'].rstrip('.')}" for check in chosen if check.get("remark"))
        outcome = f"NOT passed: {'; '.join(failed)}" if failed else f"all passed{remarks}"
        if chosen:
            facts[key] = f"Checked: {'; '.join(check['check'] for check in chosen)}; {outcome}"
    return facts


def _prediction_facts(contents: Contents) -> dict[str, str]:
    predictions, keys = contents.predictions, contents.keys
    count, simple = predictions["target"].nunique(), contents.with_role(*SIMPLE)
    facts = {
        "methods": ", ".join(label(*key) for key in keys),
        "method_count": str(len(keys)),
        "target_count": str(count),
        "tested": str(predictions.loc[predictions["label"] >= 0, "subject"].nunique()),
        "metrics": f"{', '.join(METRICS)}; ACC, SEN, SPE and F1 at the threshold {THRESHOLD:g}",
        "threshold": f"Probability of being a patient; threshold {THRESHOLD:g}, fixed in advance and not tuned",
        "updating": "None: no model was updated or recalibrated with target data",
        "baselines": ", ".join(dict.fromkeys(method for method, _ in keys if method in simple)),
    }
    if contents.track == ADAPTED or contents.adapted is not None:
        which = ", the only one of this study" if contents.track == ADAPTED else ""
        facts["updating"] = f"In the adapted track{which}: {what_was_seen(contents.batch)}"
    if (counted := len(contents.counted)) > 1 and len(keys) > 1:
        facts["comparison"] = (
            f"Paired t-tests over {counted} target sites: the method with the highest AUC (chosen post hoc) against each other "
            "method, Holm-corrected within AUC"
        )
    return facts | _performance(contents.averaged)


def _performance(sites: pd.DataFrame) -> dict[str, str]:
    """Mean AUC of each method; best and worst site and calibration of the highest."""
    macro = macro_scores(sites[sites["metric"] == "AUC"]).dropna(subset=["mean"])
    macro = macro.sort_values("mean", ascending=False, kind="stable")
    if not len(macro):
        return {}
    means = []
    for row in macro.itertuples():
        half = half_interval(row.sd, row.sites) if row.sites > 2 else 0.0  # of two sites it would be wider than the scale
        ends = f"{100 * max(row.mean - half, 0):.1f}-{100 * min(row.mean + half, 1):.1f}"
        none = f"{row.sites} site{'s' * (row.sites > 1)}, no interval"
        means.append(f"{label(row.method, row.variant)} {100 * row.mean:.1f} ({ends if row.sites > 2 else none})")
    more = f"; {len(means) - MOST_NAMED} more in the tables" if len(means) > MOST_NAMED else ""
    best = macro.iloc[0]
    at_sites = sites[(sites["method"] == best["method"]) & (sites["variant"] == best["variant"])].dropna(subset=["mean"])
    areas = at_sites[at_sites["metric"] == "AUC"].set_index("target")["mean"]
    name = label(best["method"], best["variant"])
    facts = {
        "performance": f"Mean AUC over target sites (95 % t interval over sites): {'; '.join(means[:MOST_NAMED])}{more}",
        "heterogeneity": f"AUC of {name} from {100 * areas.min():.1f} ({areas.idxmin()}) to {100 * areas.max():.1f} "
        f"({areas.idxmax()}) over {len(areas)} target sites",
    }
    medians = at_sites.groupby("metric")["mean"].median()
    if {"slope", "intercept"} <= set(medians.index):
        slope, intercept = medians["slope"], medians["intercept"]
        facts["calibration"] = f"Median over sites for {name}: slope {slope:.2f}, intercept {intercept:.2f}"
    return facts


def _cohort_facts(cohort: Cohort, targets: list[str] | None, *, banded: bool) -> dict[str, str]:
    labelled = {site: cohort.labels[(cohort.sites == site) & (cohort.labels >= 0)] for site in cohort.site_names}
    patients, controls = int((cohort.labels == 1).sum()), int((cohort.labels == 0).sum())
    rates = [100 * float(labels.mean()) for labels in labelled.values() if len(labels)]
    tested = np.array([(len(labelled[site]), labelled[site].sum()) for site in targets or labelled])  # (target, n / patients)
    rest = (patients + controls, patients) - tested
    source, target = (f"{_span(side[:, 0])} ({_span(side[:, 1])})" for side in (rest, tested))
    present = {usual_name(name) for name in cohort.phenotypes}
    kinds = {"sex": ["sex"], "age": ["age"], "eye status": EYES, "motion": MOTION}
    groups = [name for name, names in kinds.items() if present & set(names)]
    tr = cohort.tr[~np.isnan(cohort.tr)]
    imaging = f"{len(cohort.rois)} ROIs{f' of atlas {cohort.atlas}' if cohort.atlas else ''}"
    if cohort.values == SERIES:
        imaging = f"{imaging}, {_span(cohort.lengths)} volumes, TR {f'{_span(tr)} s' if len(tr) else 'unknown'}"
    else:
        imaging = f"Connectomes ({MATRICES[cohort.values]}) of {imaging}{f', TR {_span(tr)} s' if len(tr) else ''}"
    structure = "".join(f"; table {name} ({len(table.columns)} columns)" for name, table in cohort.tables.items())
    missing = [*(_missing(cohort, name) for name in cohort.inputs), *(_lacking(cohort, name) for name in cohort.tables)]
    return {
        "cohort_name": cohort.name,
        "subjects": str(len(cohort)),
        "patients": str(patients),
        "controls": str(controls),
        "site_count": str(len(labelled)),
        "sites": ", ".join(f"{site} {(cohort.sites == site).sum()}" for site in cohort.site_names),
        "balance": f"{100 * patients / (patients + controls):.0f} % of labelled subjects are patients, "
        f"{min(rates):.0f} to {max(rates):.0f} % by site",
        "fold_sizes": f"Labelled subjects (patients): source {source}, target {target}",
        "imaging": imaging,
        "predictors": (f"ROI series ({imaging})" if cohort.values == SERIES else imaging) + structure,
        "parts": "volumes" if cohort.values == SERIES else "connectomes",
        "missing": "; ".join(missing) or "no phenotype is an input",
        "outcome": note_on_label(cohort.notes),
        "subgroups": ", ".join([*groups, "site size"]),
        "characteristics": "; ".join(_characteristics(cohort.phenotypes, banded)),
    }


def _missing(cohort: Cohort, column: str) -> str:
    return _rates(cohort, column, cohort.phenotypes[column].isna().to_numpy())


def _lacking(cohort: Cohort, name: str) -> str:
    return _rates(cohort, f"table {name}", ~with_table(cohort.tables[name]))


def _rates(cohort: Cohort, column: str, missing: npt.NDArray[np.bool_]) -> str:
    rates = [f"{name} {100 * missing[cohort.labels == k].mean():.1f} %" for name, k in (("patients", 1), ("controls", 0))]
    return f"{column} {100 * missing.mean():.1f} % ({', '.join(rates)})"


def _characteristics(table: pd.DataFrame, banded: bool) -> list[str]:
    sentences = []
    if "age" in table and table["age"].dtype == np.float64 and table["age"].notna().any():
        low, middle, high = table["age"].quantile([0.25, 0.5, 0.75])
        if banded:
            low, middle, high = map(age_band, (low, middle, high))
            sentences.append(f"age median in {middle} (quartiles in {low} and {high})")
        else:
            sentences.append(f"age median {middle:.1f} (quartiles {low:.1f}, {high:.1f})")
    if "sex" in table and table["sex"].notna().any():
        sentences.append(f"{100 * (table['sex'].dropna() == 1).mean():.0f} % male")
    return sentences


def age_band(age: float) -> str:
    """Five-year band of an age, in place of the age in what is shared."""
    low = int(age // YEARS) * YEARS
    return f"{low} to {low + YEARS - 1}"


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


DELONG = "DeLong, DeLong and Clarke-Pearson 1988, Biometrics 44: 837-845"
HOLM = "Holm 1979, Scandinavian Journal of Statistics 6: 65-70"
JANES_PEPE = "Janes and Pepe 2009, Biometrika 96: 371-382"
PACKAGE = "m2lgdg: leave-one-site-out classification of functional MRI (the package that wrote this report)"
AUTHORS = "Authors to complete: acquisition, image preprocessing, parcellation and ethics approval."
AUTHORS_OF_MATRICES = AUTHORS.replace("parcellation and", "parcellation, how the connectomes were computed, and")


@dataclass(frozen=True)
class MethodsText:
    """Paragraphs, and references in the order in which they are cited."""

    paragraphs: list[str]
    references: list[str]


def methods_text(contents: Contents, *, motion: bool) -> MethodsText:
    """A methods paragraph for a paper; `motion`: AUCs are adjusted for motion."""
    references: list[str] = []

    def cite(reference: str) -> str:
        if reference not in references:
            references.append(reference)
        return f"[{references.index(reference) + 1}]"

    texts = [_data(contents), _design(contents), _methods(contents, cite), _statistics(contents, cite, motion)]
    texts.append(_software(contents.environment, cite))
    return MethodsText([*filter(None, texts), AUTHORS if contents.scans == SERIES else AUTHORS_OF_MATRICES], references)


def _data(contents: Contents) -> str:
    included, reasons = contents.included(), contents.exclusions()
    if not included:
        return ""
    everybody = contents.description.get("groups", {}).get("all", {})
    classes = f" ({everybody['patients']} patients, {everybody['controls']} controls)" if everybody else ""
    sentence = f"We included {len(included)} subjects{classes} of {len({row['site'] for row in included})} sites."
    if reasons:
        count = sum(number for _, number in reasons)
        sentence += f" {count} further subject{'s were' if count > 1 else ' was'} left out: "
        sentence += "; ".join(f"{reason} ({number})" for reason, number in reasons) + "."
    if contents.known_rois is not None:
        atlas, rois = contents.known_rois
        matrices = f"its connectome, computed beforehand: the {MATRICES.get(contents.scans)} between"
        what = "the mean time series of" if contents.scans == SERIES else matrices
        sentence += f" Each scan was represented by {what} {len(rois)} regions of interest"
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
    text = f"{text} Phenotypes available to methods that use them were {inputs}." if inputs else text
    takers = [label(*key) for key, each in contents.seen.items() if each.tables]
    if not takers:
        return text
    named = ", ".join(f"{name} ({about['columns']} columns)" for name, about in contents.tables.items())
    regressed = (
        ""
        if contents.study.get("plugins")
        else (
            " Age, its square, sex and head size, as far as they were known, were regressed out of them within source sites, "
            "and subjects without a table were decided without it."
        )
    )
    return f"{text} Tables of brain structure, {named}, were available to {', '.join(takers)}.{regressed}"


def _methods(contents: Contents, cite: Callable[[str], str]) -> str:
    listed = []
    for method in dict.fromkeys(method for method, _ in contents.keys):
        reference = contents.declared[method].reference if method in contents.declared else ""
        cited = reference and not reference.startswith("beyond the paper")
        listed.append(f"{method} {cite(reference)}" if cited else method)
    text = f"We compared {len(listed)} method{'s' * (len(listed) > 1)}: {', '.join(listed)}."
    variants = [label(*key) for key in contents.keys if key[1]]
    text += f" Variants: {', '.join(variants)}." if 0 < len(variants) <= 12 else ""
    random = contents.predictions.groupby("method")["seed"].nunique().max()  # methods without randomness have one seed
    text += f" Methods with randomness were trained with {random} seeds." if random > 1 else ""
    changed = changed_fields(contents.study, contents.declared)
    return f"{text} Fields that differ from the defaults of the package: {changed}." if changed else text


def _statistics(contents: Contents, cite: Callable[[str], str], motion: bool) -> str:
    text = (
        "The main measure is the area under the ROC curve (AUC) at each target site, averaged over seeds and then over sites "
        f"without weights. Accuracy, sensitivity, specificity and F1 use the fixed threshold {THRESHOLD:g}. Intervals of a "
        f"mean over sites are 95 % Student t intervals; those of one site are DeLong's {cite(DELONG)}."
    )
    if left := contents.predictions["target"].nunique() - len(contents.counted):
        text += f" {left} target site{'s' * (left > 1)} with fewer than {min_per_class(contents.study)} patients or controls "
        text += f"{'do' if left > 1 else 'does'} not enter means and tests."
    if len(contents.counted) > 1 and len(contents.keys) > 1:
        text += f" Methods were compared by two-sided paired t-tests over target sites with Holm's correction {cite(HOLM)}."
    if motion:
        text += f" AUCs adjusted for head motion (mean framewise displacement) follow {cite(JANES_PEPE)}."
    return text


def _commit(versions: Mapping[str, str]) -> str:
    """Commit of the code, for the end of a phrase; empty if it is not known."""
    commit, tree = versions.get("commit", UNKNOWN), versions.get("tree", UNKNOWN)
    state = {CLEAN: "", CHANGED: ", changed since"}.get(tree, f", {tree}")
    return "" if commit == UNKNOWN else f" (commit {commit[:12]}{state})"


def _software(versions: Mapping[str, str], cite: Callable[[str], str]) -> str:
    if not versions:
        return ""
    told = ("m2lgdg", "code", "system", "commit", "tree")
    others = [f"{name} {version}" for name, version in versions.items() if name not in told]
    code = f", code {versions['code']}{_commit(versions)}" if versions.get("code") else ""
    return (
        f"Analyses used m2lgdg {versions.get('m2lgdg', '')} {cite(PACKAGE)}{code} with {', '.join(others)}"
        f" on {versions.get('system', 'an unknown system')}."
    )
