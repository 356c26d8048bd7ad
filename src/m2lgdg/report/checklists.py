"""TRIPOD+AI, REFORMS, PROBAST+AI and CLAIM checklists of a study, filled in from its files; the rest is left to the authors.

`known_facts` reads a study folder and `checklists` puts the facts into the templates of checklists.tsv, for the report.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers.tables import MOTION
from m2lgdg.data.spreadsheets import unquoted_table
from m2lgdg.findings import note_on_label, with_kind
from m2lgdg.metrics import METRICS, THRESHOLD
from m2lgdg.registry import METHODS, SIMPLE
from m2lgdg.report.subgroups import EYES
from m2lgdg.report.tables import changed_fields, label
from m2lgdg.report.tracks import what_was_seen
from m2lgdg.splits import leave_one_site_out
from m2lgdg.storage import InputError, one_line
from m2lgdg.study.predictions import ADAPTED, STRICT, by_track, read_predictions
from m2lgdg.study.stats import cell_scores, half_interval, macro_scores, site_scores

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


@dataclass(frozen=True)
class Row:
    """One item and its answer."""

    item: str
    section: str
    topic: str
    answer: str
    filled: bool


@dataclass(frozen=True)
class Checklist:
    """A pre-filled checklist."""

    title: str
    citation: str
    note: str
    rows: list[Row]


def checklists(known: Mapping[str, str]) -> list[Checklist]:
    """All checklists; an item is filled in if all facts in its template are known."""
    text = (files("m2lgdg.report") / "checklists.tsv").read_text(encoding="utf-8")
    items = list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Checklist(f"{name}, pre-filled", citation, NOTE, [_row(item, known) for item in items if item["checklist"] == name])
        for name, citation in CITATIONS.items()
    ]


def _row(item: Mapping[str, str], known: Mapping[str, str]) -> Row:
    needed = [key for _, key, _, _ in Formatter().parse(item["answer"]) if key]
    filled = bool(needed) and all(known.get(key) for key in needed)
    answer = item["answer"].format_map(known) if filled else TO_COMPLETE
    return Row(item["item"], item["section"], item["topic"], answer, filled)


def known_facts(folder: Path, scores: pd.DataFrame | None = None) -> dict[str, str]:
    """Facts from the files of a study folder, as text; facts of a missing file are left out.

    `scores` are the scores of its cells (`stats.cell_scores`), if already computed.
    """
    folder = Path(folder)
    study, environment, checks = (_json(folder / f"{name}.json") for name in ("study", "environment", "checks"))
    facts = _study_facts(study or {}) | _environment_facts(environment or {}) | _check_facts(checks or [])
    if (folder / "inclusion.csv").is_file():
        facts |= _inclusion_facts(unquoted_table(pd.read_csv(folder / "inclusion.csv", dtype=str, keep_default_na=False)))
    if (folder / "predictions.csv").is_file():
        tracks = by_track(read_predictions(folder))
        predictions = next(iter(tracks.values()))
        facts |= _prediction_facts(predictions, cell_scores(predictions) if scores is None else scores)
        if ADAPTED in tracks:
            which = "" if STRICT in tracks else ", the only one of this study"
            facts["updating"] = f"In the adapted track{which}: {what_was_seen(int((study or {}).get('adapt_subjects') or 0))}"
    cohort = _cohort(folder, study or {})
    return facts | (_cohort_facts(cohort, (study or {}).get("targets")) if cohort is not None else {})


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}).") from None


def _cohort(folder: Path, study: dict[str, Any]) -> Cohort | None:
    """The cohort of the study, if its file exists and its content is unchanged."""
    if not study.get("cohort") or not (folder / study["cohort"]).is_file():
        return None
    try:
        cohort = Cohort.load(folder / study["cohort"])
        inputs = study.get("inputs")
        if inputs is not None and tuple(inputs) != cohort.inputs:
            cohort = cohort.with_inputs(inputs, allow_proxies=study.get("allow_proxies", False) or cohort.allow_proxies)
    except InputError:
        return None
    return cohort if cohort.hash == study.get("cohort_hash") else None


def _study_facts(study: dict[str, Any]) -> dict[str, str]:
    if not study:
        return {}
    targets, seeds, threads = study.get("targets") or [], study.get("seeds") or [], study.get("threads", 1)
    facts = {
        "study": str(study.get("name", "")),
        "cohort_hash": str(study.get("cohort_hash") or ""),
        "inputs": ", ".join(study.get("inputs") or []) or "none",
        "hyperparameters": changed_fields(study) or "none",
        "device": f"{study.get('device', 'cpu')}, {threads} thread{'s' * (threads > 1)} per cell",
    }
    if targets:
        facts["split"] = (
            f"Leave-one-site-out: each target site is held out completely, and source is all labelled subjects of the other "
            f"sites; targets: {', '.join(targets)}; seeds {', '.join(map(str, seeds))} (only the first for methods without "
            "randomness)"
        )
    return facts | ({} if study.get("plugins") else OURS)


def _environment_facts(environment: dict[str, str]) -> dict[str, str]:
    facts = {"environment": ", ".join(f"{name} {version}" for name, version in environment.items())}
    if "code" in environment:
        version = environment.get("m2lgdg", "not installed")  # it can run from its source folder
        name = "m2lgdg" if version == "not installed" else f"m2lgdg {version}"
        facts["code"] = f"{name}, hash of the prediction code {environment['code']}"
    return facts


def _check_facts(checks: list[dict[str, Any]]) -> dict[str, str]:
    parts = {"checks": "", "checks_duplicates": "on both sides", "checks_inputs": "inputs"}
    chosen = {key: [check for check in checks if word in check["check"]] for key, word in parts.items()}
    return {key: _outcome(some) for key, some in chosen.items() if some}


def _outcome(checks: list[dict[str, Any]]) -> str:
    failed = [f"{check['check']}: {str(check['detail']).rstrip('.')}" for check in checks if not check["passed"]]
    names = "; ".join(check["check"] for check in checks)
    remarks = "".join(f". {check['remark'].rstrip('.')}" for check in checks if check.get("remark"))
    return f"Checked: {names}; " + (f"NOT passed: {'; '.join(failed)}" if failed else f"all passed{remarks}")


def _inclusion_facts(table: pd.DataFrame) -> dict[str, str]:
    included = table[table["status"] == "included"]
    excluded = table[table["status"] == "excluded"]
    reasons = Counter(with_kind(row)["kind"] for row in excluded.to_dict("records"))
    return {
        "included": str(len(included)),
        "excluded": str(len(table) - len(included)),
        "exclusions": "; ".join(f"{reason} {count}" for reason, count in reasons.most_common()) or "none",
    }


def _prediction_facts(predictions: pd.DataFrame, scores: pd.DataFrame) -> dict[str, str]:
    sites = site_scores(scores[scores["metric"].isin(("AUC", "slope", "intercept"))])
    keys = list(predictions[["method", "variant"]].drop_duplicates().itertuples(index=False, name=None))
    count = predictions["target"].nunique()
    facts = {
        "methods": ", ".join(label(*key) for key in keys),
        "method_count": str(len(keys)),
        "target_count": str(count),
        "tested": str(predictions.loc[predictions["label"] >= 0, "subject"].nunique()),
        "metrics": f"{', '.join(METRICS)}; ACC, SEN, SPE and F1 at the threshold {THRESHOLD:g}",
        "threshold": f"Probability of being a patient; threshold {THRESHOLD:g}, fixed in advance and not tuned",
        "updating": "None: no model was updated or recalibrated with target data",
        "baselines": ", ".join(_baselines([name for name, _ in keys])),
    }
    if count > 1 and len(keys) > 1:
        facts["comparison"] = (
            f"Paired t-tests over {count} target sites: the method with the highest AUC (chosen post hoc) against each other "
            "method, Holm-corrected within AUC"
        )
    return facts | _performance(sites)


def _baselines(names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name in METHODS.with_role(*SIMPLE)]


def _performance(sites: pd.DataFrame) -> dict[str, str]:
    """Mean AUC of each method with t interval; best and worst site and calibration of the method with the highest."""
    macro = macro_scores(sites[sites["metric"] == "AUC"]).dropna(subset=["mean"])
    macro = macro.sort_values("mean", ascending=False, kind="stable")
    if not len(macro):
        return {}
    means = [f"{label(row.method, row.variant)} {_interval(row.mean, row.sd, row.sites)}" for row in macro.itertuples()]
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


def _interval(mean: float, sd: float, sites: int) -> str:
    if sites < 3:  # an interval from two sites would be wider than the scale
        return f"{100 * mean:.1f} ({sites} site{'s' * (sites > 1)}, no interval)"
    half = half_interval(sd, sites)
    return f"{100 * mean:.1f} ({100 * max(mean - half, 0):.1f}-{100 * min(mean + half, 1):.1f})"


def _cohort_facts(cohort: Cohort, targets: list[str] | None) -> dict[str, str]:
    patients, controls = int((cohort.labels == 1).sum()), int((cohort.labels == 0).sum())
    sizes = {site: int((cohort.sites == site).sum()) for site in cohort.site_names}
    rates = [float((labels == 1).mean()) for site in sizes if len(labels := _labels(cohort, site))]
    folds = [(fold.source.labels, _labels(cohort, fold.site)) for fold in leave_one_site_out(cohort, targets)]
    sides = [f"{_span(list(map(len, side)))} ({_span([int(y.sum()) for y in side])})" for side in zip(*folds, strict=True)]
    columns = {str(name).lower() for name in cohort.phenotypes}
    kinds = {"sex": ["sex"], "age": ["age"], "eye status": EYES, "motion": MOTION}
    groups = [name for name, names in kinds.items() if columns & set(names)]
    tr = cohort.tr[~np.isnan(cohort.tr)]
    seconds = f"{_span(tr)} s" if len(tr) else "unknown"
    atlas = f" of atlas {cohort.atlas}" if cohort.atlas else ""
    return {
        "cohort_name": cohort.name,
        "subjects": str(len(cohort)),
        "patients": str(patients),
        "controls": str(controls),
        "site_count": str(len(sizes)),
        "sites": ", ".join(f"{site} {size}" for site, size in sizes.items()),
        "balance": f"{100 * patients / (patients + controls):.0f} % of labelled subjects are patients, "
        f"{100 * min(rates):.0f} to {100 * max(rates):.0f} % by site",
        "fold_sizes": f"Labelled subjects (patients): source {sides[0]}, target {sides[1]}",
        "imaging": f"{len(cohort.rois)} ROIs{atlas}, {_span(cohort.lengths)} volumes, TR {seconds}",
        "missing": "; ".join(_missing(cohort, name) for name in cohort.inputs) or "no phenotype is an input",
        "outcome": note_on_label(cohort.notes),
        "subgroups": ", ".join([*groups, "site size"]),
        "characteristics": "; ".join(_characteristics(cohort.phenotypes)),
    }


def _labels(cohort: Cohort, site: str) -> Any:
    return cohort.labels[(cohort.sites == site) & (cohort.labels >= 0)]


def _missing(cohort: Cohort, column: str) -> str:
    missing = cohort.phenotypes[column].isna().to_numpy()
    rates = [f"{name} {100 * missing[cohort.labels == k].mean():.1f} %" for name, k in (("patients", 1), ("controls", 0))]
    return f"{column} {100 * missing.mean():.1f} % ({', '.join(rates)})"


def _characteristics(table: pd.DataFrame) -> list[str]:
    sentences = []
    if "age" in table and table["age"].dtype == np.float64 and table["age"].notna().any():
        low, middle, high = table["age"].quantile([0.25, 0.5, 0.75])
        sentences.append(f"age median {middle:.1f} (quartiles {low:.1f}, {high:.1f})")
    if "sex" in table and table["sex"].notna().any():
        sentences.append(f"{100 * (table['sex'].dropna() == 1).mean():.0f} % male")
    return sentences


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
