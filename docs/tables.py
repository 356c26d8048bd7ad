"""The tables of docs/*.md that follow from the committed results, written into the pages between markers.

Usage: python docs/tables.py [--check]. A block is `<!-- table: NAME -->`, its lines, `<!-- end of table -->`; NAME is a key of
`BLOCKS`. With --check nothing is written, and blocks that differ from the results are named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student
from scipy.stats import ttest_rel

from m2lgdg.data.atlases import about, regions
from m2lgdg.metrics import auc, calibration, delong_test, logit
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.stats import (
    cell_scores,
    half_interval,
    holm,
    macro_scores,
    over_seeds,
    paired_tests,
    site_scores,
    training_differences,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end of table -->", re.S)
BLOCKS: dict[str, Callable[[], list[str]]] = {}

Key = tuple[str, str]  # method, variant
TARGETS = ("NYU", "USM")  # the paper's
METRICS = ("AUC", "ACC", "SEN", "SPE", "F1")
NETWORKS = (  # in the order of the paper's table
    *("m2lgdg", "brainnetcnn", "cdann", "mixup", "mldg", "braingnn", "iib", "ibgnn-plus", "ufa-net", "genm", "msstan", "m2dc"),
    *("mm-gtunets", "metaexplainer"),
)
AT_CHANCE = ("ufa-net", "m2dc", "braingnn")  # far below their published AUC
WITH_PHENOTYPES = ("m2lgdg", "cdann", "mixup", "mldg", "iib", "mm-gtunets", "metaexplainer")
LINEAR = (
    *("fc-logistic", "fc-svm", "fc-adaptive", "tangent-logistic", "tangent-ridge", "connectome-ensemble"),
    "connectome-adaptive",
)
ALL_SITES = ("coral", "mm-gtunets", "cdann", "mldg", "irm", "m2lgdg")  # networks trained for every target
BRAIN_NETWORKS = ("brainnetcnn", "braingnn", "ibgnn-plus", "msstan", "mm-gtunets", "ufa-net")
GENERALIZATION = ("cdann", "mixup", "mldg", "iib", "genm", "m2dc", "metaexplainer")
BEST: Key = ("connectome-adaptive", "phenotypes")
FUSED = ("coral", "irm", "cdann", "mldg", "mm-gtunets", "m2lgdg")
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # of the networks
DRAWS = 2000
ATLASES = {
    "aal": "AAL",
    "ho": "Harvard-Oxford",
    "cc200": "CC200",
    "ez": "Eickhoff-Zilles",
    "tt": "Talairach-Tournoux",
    "dosenbach160": "Dosenbach 160",
}
ATLAS_STUDIES = ("abide-atlases", "abide-atlases-phenotypes")
UNSEEN = ("NYU", "USM", "UM_1", "YALE")  # sites that no choice was made on
ABLATIONS = {
    "C4": "the whole method",
    "M1": "phenotypes alone",
    "M2": "the scan alone",
    "C1": "no decomposition, no cross-attention",
    "C2": "no cross-attention",
    "C3": "no contrast across sites",
}
SWEEPS = {
    "decomposition_weight": "0.1",
    "contrastive_weight": "0.1",
    "temperature": "0.07",
    "percentile": "80",
    "length": "200",
}


def block(name: str) -> Callable[[Callable[[], list[str]]], Callable[[], list[str]]]:
    """Register a function as the generator of the block of this name."""

    def register(function: Callable[[], list[str]]) -> Callable[[], list[str]]:
        BLOCKS[name] = cache(function)
        return function

    return register


# The results, read once


@cache
def predictions(study: str) -> pd.DataFrame:
    """The predictions table of a committed study."""
    return read_predictions(RESULTS / study)


@cache
def cells(study: str) -> pd.DataFrame:
    """One row a cell and metric."""
    return cell_scores(predictions(study), METRICS)


@cache
def sites(study: str) -> pd.DataFrame:
    """Mean and sd over seeds in percent by (method, variant, target, metric)."""
    table = site_scores(cells(study)).set_index(["method", "variant", "target", "metric"])
    return table[["mean", "sd"]].sort_index() * 100


@cache
def macro() -> pd.DataFrame:
    """Mean AUC over 18 sites and half of its 95 % interval in percent, by (method, variant)."""
    table = macro_scores(site_scores(cells("abide-all-sites")).query("metric == 'AUC'")).set_index(["method", "variant"])
    table["half"] = [half_interval(sd, count) for sd, count in zip(table["sd"], table["sites"], strict=True)]
    return table[["mean", "half"]] * 100


@cache
def averaged(study: str) -> pd.DataFrame:
    """(target, (method, variant)) AUC in percent of probabilities averaged over seeds."""
    grouped = over_seeds(predictions(study)).groupby(["target", "method", "variant"], sort=False)
    areas = {key: 100 * auc(part["label"].to_numpy(), part["proba"].to_numpy()) for key, part in grouped}
    return pd.Series(areas).unstack([1, 2])


@cache
def records(study: str) -> list[dict]:
    """The records of a study's cells."""
    return [json.loads(line) for line in (RESULTS / study / "records.jsonl").read_text().splitlines()]


@cache
def published(data: str = "abide") -> pd.Series:
    """The paper's values by (method, target, metric)."""
    return pd.read_csv(ROOT / "studies" / f"paper-{data}.csv").set_index(["method", "target", "metric"])["value"]


def mean_auc(study: str, key: Key, target: str) -> float:
    """AUC in percent at a target, mean over seeds."""
    return float(sites(study).loc[(*key, target, "AUC"), "mean"])


def without(key: Key) -> float:
    """Mean AUC in percent over the 16 sites other than NYU and USM."""
    areas = sites("abide-all-sites").loc[key].xs("AUC", level="metric")["mean"]
    return float(areas.drop(list(TARGETS)).mean())


def seconds(method: str) -> float:
    """Median seconds of a method's cells at NYU and USM."""
    return float(np.median([record["seconds"] for record in records("abide") if record["method"] == method]))


# Two methods on the same subjects


@cache
def scores(study: str, key: Key, targets: tuple[str, ...]) -> pd.DataFrame:
    """Label and probability averaged over seeds, by (target, subject), sorted."""
    table = over_seeds(predictions(study))
    chosen = table[(table["method"] == key[0]) & (table["variant"] == key[1]) & table["target"].isin(targets)]
    return chosen.set_index(["target", "subject"])[["label", "proba"]].sort_index()


@cache
def bootstrap(groups: tuple[tuple[int, int], ...]) -> list[list[np.ndarray]]:
    """(draw, subject) times a subject is drawn, for each site and class of these sizes; as benchmarks/paired.py draws."""
    rng = np.random.default_rng(0)
    counts = [[np.zeros((DRAWS, size)) for size in site] for site in groups]
    for i in range(DRAWS):
        for site in counts:
            for group in site:
                group[i] = np.bincount(rng.choice(group.shape[1], group.shape[1]), minlength=group.shape[1])
    return counts


def ranked(label: np.ndarray, proba: np.ndarray) -> np.ndarray:
    """(patient, control) 1 where the patient has the higher probability, a half for ties: the AUC is its mean."""
    patients, controls = proba[label == 1][:, None], proba[label == 0][None, :]
    return (patients > controls) + 0.5 * (patients == controls)


def paired(first: tuple[str, Key], second: tuple[str, Key]) -> dict:
    """Difference of mean AUC over the sites of the first in percent, its 95 % interval over subjects, p over sites, DeLong."""
    targets = tuple(sorted(set(predictions(first[0]).query("method == @first[1][0]")["target"])))
    one, two = (scores(*side, targets) for side in (first, second))
    matrices, sizes, tests = [], [], {}
    for target in targets:
        a, b = one.loc[target], two.loc[target]
        label, probas = a["label"].to_numpy(), (a["proba"].to_numpy(), b["proba"].loc[a.index].to_numpy())
        matrices.append([ranked(label, proba) for proba in probas])
        sizes.append((int((label == 0).sum()), int((label == 1).sum())))
        tests[target] = float(delong_test(label, *probas)[1])
    areas = 100 * np.array([[matrix.mean() for matrix in pair] for pair in matrices])  # (site, side)
    drawn = np.zeros(DRAWS)
    for (a, b), (controls, patients) in zip(matrices, bootstrap(tuple(sizes)), strict=True):
        drawn += ((patients @ (a - b)) * controls).sum(axis=1) / a.size / len(matrices)
    difference = areas[:, 0] - areas[:, 1]
    return {
        "means": areas.mean(axis=0),
        "difference": float(difference.mean()),
        "interval": 100 * np.percentile(drawn, [2.5, 97.5]),
        "p": float(ttest_rel(*areas.T).pvalue) if len(targets) > 2 else np.nan,
        "counts": tuple(int(part.sum()) for part in (difference > 1e-9, np.abs(difference) <= 1e-9, difference < -1e-9)),
        "delong": tests,
        "by_site": dict(zip(targets, difference, strict=True)),
    }


@cache
def logits(key: Key) -> pd.Series:
    """Logits at the 16 sites with mean 0 and sd 1 inside each, by (target, subject)."""
    targets = tuple(sorted(set(predictions("abide-all-sites")["target"]) - set(TARGETS)))
    proba = scores("abide-all-sites", key, targets)["proba"]
    values = pd.Series(logit(proba.to_numpy()), index=proba.index)
    return values.groupby("target").transform(lambda part: (part - part.mean()) / part.std())


def fused(linear: Key, networks: Iterable[str]) -> tuple[dict[float, float], float]:
    """Mean AUC in percent over 16 sites by weight of the networks, and the mean correlation of both sides inside sites."""
    first, second = logits(linear), sum(logits((name, "")) for name in networks)
    second = second.groupby("target").transform(lambda part: part / part.std())
    targets = tuple(first.index.unique("target"))
    label = scores("abide-all-sites", linear, targets)["label"]

    def area(values: pd.Series) -> float:
        return 100 * float(np.mean([auc(label.loc[site].to_numpy(), values.loc[site].to_numpy()) for site in targets]))

    areas = {weight: area((1 - weight) * first + weight * second) for weight in WEIGHTS}
    return areas, float(np.mean([np.corrcoef(first.loc[site], second.loc[site])[0, 1] for site in targets]))


# How numbers are written


def number(value: float, digits: int = 1) -> str:
    """A number with a fixed count of decimals; no minus before zero."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def paper(method: str, target: str, metric: str = "AUC", data: str = "abide") -> str:
    """The paper's value with one decimal, halves up."""
    return f"{published(data)[method, target, metric] + 1e-6:.1f}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sd, or mean and half an interval."""
    return " ± ".join(number(value, digits) for value in values)


def interval(middle: float, low: float, high: float) -> str:
    """A difference with its interval."""
    return f"{number(middle)} ({number(low)} to {number(high)})"


def chance(p: float) -> str:
    """A p value with three decimals."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def name(key: Key) -> str:
    """A method as the pages write it."""
    return f"`{key[0]}`" + (f" with {key[1]}" if key[1] else "")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [_line(header), "|" + "---|" * len(header), *(_line(row) for row in rows)]


def _line(row: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in row)


# AUC of every method


def _both(method: str, value: Callable[[Key], str]) -> str:
    return f"{value((method, ''))} / {value((method, 'phenotypes'))}"


def _linear_row(method: str) -> list[str]:
    """NYU, USM, 18 sites and seconds of a linear model, without / with phenotypes."""
    if method == "phenotype-logistic":
        key = (method, "")
        auc_of = [f"- / {number(mean_auc('abide', key, target))}" for target in TARGETS]
        return [*auc_of, f"- / {spread(macro().loc[key])}", f"{seconds(method):.0f}"]
    auc_of = [_both(method, lambda key, target=target: number(mean_auc("abide", key, target))) for target in TARGETS]
    return [*auc_of, _both(method, lambda key: spread(macro().loc[key])), f"{seconds(method):.0f}"]


def _network_cell(method: str, target: str) -> str:
    return f"{spread(sites('abide').loc[(method, '', target, 'AUC')])} [{paper(method, target)}]"


@block("paper-table")
def paper_table() -> list[str]:
    """The paper's fourteen methods at NYU and USM."""
    rows = []
    for method in NETWORKS:
        pairs = [(_network_cell(method, target), number(averaged("abide").loc[target, (method, "")])) for target in TARGETS]
        rows.append([f"`{method}`", "yes" * (method in WITH_PHENOTYPES), *pairs[0], *pairs[1], f"{seconds(method):.0f}"])
    return table(["method", "sees phenotypes", "NYU", "averaged", "USM", "averaged", "seconds"], rows)


@block("linear-peers")
def linear_peers() -> list[str]:
    """The linear models at NYU, USM and 18 sites."""
    marks = {"phenotype-logistic": " (no brain)", "connectome-adaptive": " ([formulas](connectome-adaptive.md))"}
    rows = [[f"`{method}`{marks.get(method, '')}", *_linear_row(method)] for method in ("phenotype-logistic", *LINEAR)]
    return table(["method", *TARGETS, "18 sites", "seconds"], rows)


@block("networks-all-sites")
def networks_all_sites() -> list[str]:
    """Six networks at 18 sites."""
    rows = []
    for method in ALL_SITES:
        areas = sites("abide-all-sites").loc[(method, "")].xs("AUC", level="metric")["mean"]
        mean = number(averaged("abide-all-sites")[method, ""].mean())
        rows.append([f"`{method}`", spread(macro().loc[(method, "")]), mean, f"{number(areas.min())}, {number(areas.max())}"])
    return table(["network", "18 sites", "averaged", "lowest, highest site"], rows)


def _all_metrics(methods: Iterable[str]) -> list[str]:
    rows = []
    for target in TARGETS:
        for method in methods:
            values = [
                f"{spread(sites('abide').loc[(method, '', target, metric)])} ({paper(method, target, metric)})"
                for metric in METRICS
            ]
            rows.append([target, f"`{method}`", *values])
    return table(["target", "method", *METRICS], rows)


@block("networks-abide")
def networks_abide() -> list[str]:
    """Every metric of the brain-network methods."""
    return _all_metrics(BRAIN_NETWORKS)


@block("generalization-abide")
def generalization_abide() -> list[str]:
    """Every metric of the paper's generalization methods."""
    return _all_metrics(GENERALIZATION)


@block("m2lgdg-abide")
def m2lgdg_abide() -> list[str]:
    """M²LG-DG's committed run with two decimals, its validation AUC, and the paper's AUC."""
    rows = []
    for target in TARGETS:
        values = [spread(sites("abide").loc[("m2lgdg", "", target, metric)], 2) for metric in METRICS[:4]]
        best = [100 * area for area in _best_validation("abide", "", target)]
        validation = spread((np.mean(best), np.std(best, ddof=1)))
        rows.append([target, *values, validation, f"{published()['m2lgdg', target, 'AUC']:.2f}"])
    return table(["target", *METRICS[:4], "validation AUC", "the paper's AUC"], rows)


def _best_validation(study: str, variant: str, target: str | None = None) -> Iterator[float]:
    """Validation AUC of M²LG-DG's trainings at the epoch that was kept."""
    for record in records(study):
        if (record["method"], record["variant"]) == ("m2lgdg", variant) and target in (None, record["target"]):
            yield record["learned"]["history"][record["learned"]["best_epoch"] - 1]["val_auc"]


# What follows from them


@block("paper-differences")
def paper_differences() -> list[str]:
    """Each compared network minus the paper's value for it, and minus M²LG-DG here."""
    rows = []
    for method in NETWORKS[1:]:
        here = {target: mean_auc("abide", (method, ""), target) for target in TARGETS}
        beyond = [number(here[target] - published()[method, target, "AUC"]) for target in TARGETS]
        more = [number(here[target] - mean_auc("abide", ("m2lgdg", ""), target)) for target in TARGETS]
        rows.append([f"`{method}`", *beyond, *more])
    return table(["method", "NYU, minus the paper's", "USM", "NYU, minus `m2lgdg`", "USM"], rows)


def delong_tests() -> dict[Key, list[tuple[float, float]]]:
    """Difference to M²LG-DG in percent and DeLong's p at NYU and USM, of averaged probabilities."""
    others = [(method, "") for method in (*NETWORKS[1:], "phenotype-logistic")]
    others += [(method, variant) for variant in ("", "phenotypes") for method in LINEAR]
    own = scores("abide", ("m2lgdg", ""), TARGETS)
    tests: dict[Key, list[tuple[float, float]]] = {}
    for key in others:
        other = scores("abide", key, TARGETS).loc[own.index]
        for target in TARGETS:
            a, b = other.loc[target], own.loc[target]
            difference, p = delong_test(a["label"].to_numpy(), a["proba"].to_numpy(), b["proba"].to_numpy())
            tests.setdefault(key, []).append((100 * difference, p))
    return tests


@block("delong-m2lgdg")
def delong_m2lgdg() -> list[str]:
    """DeLong's tests of every method against M²LG-DG at NYU and USM."""
    tests = delong_tests()
    rows = [[name(key), *(text for d, p in pair for text in (number(d), chance(p)))] for key, pair in tests.items()]
    p_values = [p for pair in tests.values() for _, p in pair]
    lines = table(["method, minus `m2lgdg`", "NYU", "p", "USM", "p"], rows)
    return [*lines, "", f"Smallest p with Holm's correction over these {len(p_values)} tests: {np.min(holm(p_values)):.2f}."]


@block("against-best")
def against_best() -> list[str]:
    """`connectome-adaptive` with phenotypes against all others over 18 sites."""
    tests = paired_tests(site_scores(cells("abide-all-sites")).query("metric == 'AUC'"), BEST)
    rows = [
        [name((row["method"], row["variant"])), number(100 * row["delta"]), chance(row["p"]), chance(row["p_holm"])]
        for row in tests.sort_values("delta").to_dict("records")
    ]
    return table([f"{name(BEST)}, minus", "points", "p", "p, Holm"], rows)


@block("two-sites")
def two_sites() -> list[str]:
    """Mean AUC at NYU and USM and at the 16 other sites, seeds one by one."""
    rows = []
    for key in [(name, "") for name in (*ALL_SITES, "phenotype-logistic")] + _variants(LINEAR):
        there, elsewhere = np.mean([mean_auc("abide-all-sites", key, target) for target in TARGETS]), without(key)
        rows.append([name(key), number(there), number(elsewhere), number(there - elsewhere)])
    return table(["method", "NYU and USM", "16 other sites", "difference"], rows)


def _variants(methods: Iterable[str]) -> list[Key]:
    return [(method, variant) for method in methods for variant in ("", "phenotypes")]


def _pairs(first: Key, others: Sequence[Key], correct: bool) -> list[str]:
    results = [paired(("abide-all-sites", first), ("abide-all-sites", key)) for key in others]
    adjusted = holm([result["p"] for result in results])
    rows = []
    for key, result, p in zip(others, results, adjusted, strict=True):
        row = [name(key), interval(result["difference"], *result["interval"]), chance(result["p"])]
        rows.append([*row, chance(p)] if correct else row)
    header = [f"{name(first)}, minus", "points (95 % over subjects)", "p over sites"]
    return table([*header, "p, Holm"] if correct else header, rows)


@block("m2lgdg-all-sites")
def m2lgdg_all_sites() -> list[str]:
    """M²LG-DG against others over 18 sites, three trainings averaged."""
    others = [(name, "") for name in ("mm-gtunets", "coral", "cdann", "irm", "mldg")] + [BEST, ("phenotype-logistic", "")]
    own, alone = (
        sites("abide-all-sites").loc[(m, "")].xs("AUC", level="metric")["mean"] for m in ("m2lgdg", "phenotype-logistic")
    )
    line = f"Correlation of AUC over sites between `m2lgdg` and `phenotype-logistic`: {own.corr(alone):.2f}."
    return [*_pairs(("m2lgdg", ""), others, correct=True), "", line]


@block("mm-gtunets-all-sites")
def mm_gtunets_all_sites() -> list[str]:
    """The best network against linear models over 18 sites, three trainings averaged."""
    return _pairs(("mm-gtunets", ""), [BEST, ("fc-logistic", "phenotypes")], correct=False)


@block("seeds")
def seeds() -> list[str]:
    """How much networks and seeds differ, and what averaging gives."""
    good = [name for name in NETWORKS if name not in AT_CHANCE]
    areas = {t: sites("abide").loc[[(name, "", t, "AUC") for name in good]] for t in TARGETS}
    rows = [
        ["sd of the eleven networks' means", *(number(areas[t]["mean"].std(ddof=1)) for t in TARGETS)],
        [
            "sd over the seeds of one network (root mean square)",
            *(number(np.sqrt((areas[t]["sd"] ** 2).mean())) for t in TARGETS),
        ],
    ]
    gains = [averaged("abide").loc[t, (name, "")] - mean_auc("abide", (name, ""), t) for name in NETWORKS for t in TARGETS]
    by_seed = cells("abide-all-sites").query("method == 'mm-gtunets' and metric == 'AUC'").groupby("seed")["value"].mean() * 100
    return [
        *table(["", *TARGETS], rows),
        "",
        f"- Gain from averaging five trainings (14 networks, two sites: {len(gains)} cases):",
        f"  median {number(np.median(gains))}, at least one point in {sum(gain >= 1 for gain in gains)} cases, "
        f"at most {number(max(gains))}, a loss in {sum(gain < 0 for gain in gains)}.",
        f"- Mean of `mm-gtunets` over 18 sites by seed (0, 1, 2): {', '.join(number(area) for area in by_seed)}.",
    ]


@block("phenotypes-alone")
def phenotypes_alone() -> list[str]:
    """`phenotype-logistic` and how many networks are below it."""
    rows = []
    for target in TARGETS:
        area = mean_auc("abide", ("phenotype-logistic", ""), target)
        single = sum(mean_auc("abide", (name, ""), target) < area for name in NETWORKS)
        together = sum(averaged("abide").loc[target, (name, "")] < area for name in NETWORKS)
        rows.append([target, number(area), str(single), str(together)])
    rows.append(["18 sites", number(macro().loc[("phenotype-logistic", ""), "mean"]), "", ""])
    return table(["target", "`phenotype-logistic`", "networks below it, of 14", "the same, seeds averaged"], rows)


@block("threshold")
def threshold() -> list[str]:
    """Sensitivity and specificity of M²LG-DG at 0.5."""
    rows = []
    for target in TARGETS:
        patients = 100 * scores("abide", ("m2lgdg", ""), TARGETS).loc[target]["label"].mean()
        rates = [spread(sites("abide").loc[("m2lgdg", "", target, metric)]) for metric in ("SEN", "SPE")]
        rows.append([target, f"{patients:.0f} %", *rates])
    return table(["target", "patients", "SEN", "SPE"], rows)


@block("expected-auc")
def expected_auc() -> list[str]:
    """What to expect of `connectome-adaptive` with phenotypes at a new site."""
    areas = sites("abide-all-sites").loc[BEST].xs("AUC", level="metric")["mean"]
    mean, half = macro().loc[BEST]
    wide = student.ppf(0.975, len(areas) - 1) * areas.std(ddof=1) * np.sqrt(1 + 1 / len(areas))
    return table(
        ["mean of 18 sites (95 % interval)", "lowest site", "highest site", "95 % prediction interval of one new site"],
        [
            [
                interval(mean, mean - half, mean + half),
                f"{number(areas.min())} ({areas.idxmin()})",
                f"{number(areas.max())} ({areas.idxmax()})",
                f"{number(mean - wide)} to {number(mean + wide)}",
            ]
        ],
    )


# Ablations and sweeps of M²LG-DG


@cache
def changes(study: str) -> pd.DataFrame:
    """The whole method minus each variant in percent, with half its interval."""
    differences = training_differences(cells(study), "m2lgdg").query("metric == 'AUC'").set_index("variant")
    return differences[["mean", "half"]] * 100


def _difference(study: str, variant: str) -> str:
    mean, half = changes(study).loc[variant]
    return interval(mean, mean - half, mean + half)


@block("ablations")
def ablations() -> list[str]:
    """AUC without one part or another."""
    rows = []
    for variant, text in ABLATIONS.items():
        areas = [spread(sites("abide-ablation").loc[("m2lgdg", variant, target, "AUC")]) for target in TARGETS]
        difference = "" if variant == "C4" else _difference("abide-ablation", variant)
        rows.append([f"{variant}, {text}", *areas, difference, paper(f"m2lgdg: {variant}", "all", data="rest-meta-mdd")])
    return table(["variant", *TARGETS, "whole minus variant", "paper, REST-meta-MDD"], rows)


@block("ablation-training")
def ablation_training() -> list[str]:
    """Training loss and validation AUC of the parts alone, and the whole minus M1 with trainings averaged."""
    rows = []
    for variant in ("M1", "M2"):
        own = [record for record in records("abide-ablation") if record["variant"] == variant]
        lowest = [min(epoch["ce"] for epoch in record["learned"]["history"]) for record in own]
        best = [100 * area for area in _best_validation("abide-ablation", variant)]
        text = f"{number(min(lowest), 2)} to {number(max(lowest), 2)}"
        rows.append([f"{variant}, {ABLATIONS[variant]}", text, f"{number(min(best))} to {number(max(best))}"])
    whole = paired(("abide-ablation", ("m2lgdg", "")), ("abide-ablation", ("m2lgdg", "M1")))
    text = interval(whole["difference"], *whole["interval"])
    return [
        *table(["variant", "lowest cross-entropy, ten trainings", "validation AUC at the epoch kept"], rows),
        "",
        f"The whole method minus M1, five trainings averaged, 95 % interval over subjects: {text}.",
    ]


def sweep(field: str) -> dict[str, float]:
    """Mean AUC in percent over sites and seeds by value of a field."""
    table = cells("abide-sensitivity").query("metric == 'AUC'")
    own = table[table["variant"].str.startswith(f"{field}=")]
    return {variant.split("=")[1]: 100 * value for variant, value in own.groupby("variant")["value"].mean().items()}


@block("sweeps")
def sweeps() -> list[str]:
    """AUC over the values of five fields."""
    rows, default = [], 100 * cells("abide-sensitivity").query("metric == 'AUC' and variant == ''")["value"].mean()
    for field, usual in SWEEPS.items():
        means = sweep(field)
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        far = max(
            (value for value in means if value != usual),
            key=lambda value: abs(changes("abide-sensitivity").loc[f"{field}={value}", "mean"]),
        )
        values = sorted(means, key=float)
        rows.append(
            [
                f"`{field}`",
                f"{values[0]} to {values[-1]} ({usual})",
                *(f"{number(means[value])} at {value}" for value in (low, high)),
                f"{_difference('abide-sensitivity', f'{field}={far}')} at {far}",
            ]
        )
    header = [
        "field",
        "values (default)",
        "lowest AUC",
        "highest AUC",
        f"default ({number(default)}) minus value, largest difference",
    ]
    return table(header, rows)


@block("sweep-summary")
def sweep_summary() -> list[str]:
    """Which values differ from the default, and how far seeds lie apart."""
    usual = {f"{field}={value}" for field, value in SWEEPS.items()}
    changed = changes("abide-sensitivity").drop(index=list(usual))
    apart = changed[changed["mean"].abs() > changed["half"]]
    trained = cells("abide-sensitivity").query("metric == 'AUC'").set_index(["variant", "target", "seed"])["value"] * 100
    highest = sum(max(means, key=means.__getitem__) == SWEEPS[field] for field in SWEEPS if (means := sweep(field)))
    kept = trained[~trained.index.get_level_values("variant").isin(usual)]
    ranges = kept.groupby(level=["variant", "target"]).agg(np.ptp)
    lines = [f"- Changed values: {len(changed)}. Intervals without zero: {len(apart)}."]
    for variant in apart.index:
        gain = {t: float((trained.loc[variant] - trained.loc[""]).loc[t].mean()) for t in TARGETS}
        sides = ", ".join(f"{number(gain[t])} at {t}" for t in TARGETS)
        lines.append(f"- `{variant}` minus the default: {number(np.mean(list(gain.values())))} ({sides}).")
    return [
        *lines,
        f"- Fields with their highest AUC at the default: {highest} of {len(SWEEPS)}.",
        f"- Range of three seeds of one value at one site ({len(ranges)} cases): median {number(ranges.median())}, "
        f"largest {number(ranges.max())}.",
    ]


# Beyond the paper


def _choices(methods: Iterable[str]) -> list[str]:
    rows = []
    for method in methods:
        two = [_both(method, lambda key, target=target: number(mean_auc("abide-all-sites", key, target))) for target in TARGETS]
        sixteen, every = (
            _both(method, lambda key: number(without(key))),
            _both(method, lambda key: number(macro().loc[key, "mean"])),
        )
        rows.append([f"`{method}`", sixteen, *two, every])
    return table(["method", "16 sites", *TARGETS, "18 sites"], rows)


@block("first-choice")
def first_choice() -> list[str]:
    """`fc-adaptive` and ordinary linear models."""
    return _choices(("fc-adaptive", "fc-svm", "fc-logistic", "connectome-ensemble"))


@block("second-choice")
def second_choice() -> list[str]:
    """`connectome-adaptive`, `fc-adaptive` and the strongest ordinary peer."""
    return _choices(("connectome-adaptive", "fc-adaptive", "fc-svm"))


@block("against-fc-svm")
def against_fc_svm() -> list[str]:
    """Both choices against `fc-svm`."""
    rows = []
    for method, variant in _variants(("fc-adaptive", "connectome-adaptive")):
        result = paired(("abide-all-sites", (method, variant)), ("abide-all-sites", ("fc-svm", variant)))
        better, text = f"{result['counts'][0]} of 18", interval(result["difference"], *result["interval"])
        alone = [f"{number(result['by_site'][t])} ({chance(result['delong'][t])})" for t in TARGETS]
        rows.append([name((method, variant)), text, better, chance(result["p"]), *alone])
    header = [
        "method, minus `fc-svm`",
        "points (95 % over subjects)",
        "better at",
        "p over sites",
        "NYU (DeLong p)",
        "USM (DeLong p)",
    ]
    return table(header, rows)


@block("calibration-slopes")
def calibration_slopes() -> list[str]:
    """Calibration slopes of `connectome-adaptive` over all left-out subjects and by site."""
    rows = []
    for key in _variants(("connectome-adaptive",)):
        own = predictions("abide-all-sites").query("method == @key[0] and variant == @key[1]")
        slopes = [calibration(part["label"].to_numpy(), part["proba"].to_numpy())[0] for _, part in own.groupby("target")]
        pooled = calibration(own["label"].to_numpy(), own["proba"].to_numpy())[0]
        rows.append([name(key), *(number(value, 2) for value in (pooled, np.nanmedian(slopes), np.nanmean(slopes)))])
    return table(["method", "all subjects together", "median of sites", "mean of sites"], rows)


@block("plus")
def plus() -> list[str]:
    """`m2lgdg-plus` against its own head at 16 sites."""
    texts = {
        "abide-plus": "the paper's sizes",
        "abide-plus-small": "small (64 wide, dropout 0.3, weight decay 0.01, 60 epochs)",
    }
    rows = [[f"the head alone: {name(BEST)}", number(without(BEST)), "", "", ""]]
    for study, text in texts.items():
        result = paired((study, ("m2lgdg-plus", "")), ("abide-all-sites", BEST))
        difference, counts = interval(result["difference"], *result["interval"]), ", ".join(map(str, result["counts"]))
        rows.append([f"`m2lgdg-plus`, {text}", number(result["means"][0]), difference, counts, chance(result["p"])])
    header = [
        "network",
        "mean AUC, 16 sites",
        "minus its head (95 % over subjects)",
        "better, the same, worse at",
        "p over sites",
    ]
    return table(header, rows)


@block("fusion")
def fusion() -> list[str]:
    """Mean AUC at 16 sites of weighted sums of a linear model's and networks' logits."""
    pairs = [(BEST, FUSED, "all six"), *((BEST, (name,), f"`{name}`") for name in FUSED)]
    pairs.append((("fc-logistic", "phenotypes"), FUSED, "all six"))
    rows = []
    for linear, networks, text in pairs:
        areas, alike = fused(linear, networks)
        rows.append([name(linear), text, number(alike, 2), *(number(areas[weight]) for weight in WEIGHTS)])
    return table(["linear model", "networks", "correlation", *(f"{weight:g}" for weight in WEIGHTS)], rows)


# Atlases


@block("atlases")
def included_atlases() -> list[str]:
    """Names, sizes, codes and licences of the included atlases."""
    rows = []
    for atlas, facts in about().items():
        known = regions(atlas)
        codes = known["code"].tolist()
        numbered = codes == [str(i + 1) for i in range(len(codes))]
        names = ", ".join(f"`{other}`" for other in (atlas, *facts.get("aliases", ())))
        keys = f"1 to {len(codes)}" if numbered else ", ".join([*codes[:3], "...", codes[-1]])
        networks = len(set(known["network"]) - {""})
        rows.append([names, facts["title"], str(len(codes)), keys, str(networks or ""), facts["licence"]])
    return table(["name", "atlas", "ROIs", "codes", "networks", "licence of the atlas"], rows)


@block("atlas-sources")
def atlas_sources() -> list[str]:
    """Where the tables of the included atlases come from."""
    rows = [
        [f"`{atlas}`", facts["reference"], facts["source"], facts["made"], facts["lobe"]] for atlas, facts in about().items()
    ]
    return table(["name", "reference", "source", "centroids and names", "lobe"], rows)


# Pages


# Several atlases


def _atlas_name(atlases: Sequence[str]) -> str:
    return " + ".join(ATLASES[atlas] for atlas in atlases)


@cache
def by_atlas(study: str) -> pd.DataFrame:
    """Logits of `connectome-adaptive` in each atlas, by (target, subject, label)."""
    frame = predictions(study)
    frame = frame.assign(logit=logit(frame["proba"].to_numpy()), atlas=frame["variant"].str.removeprefix("atlases="))
    return frame.pivot(index=["target", "subject", "label"], columns="atlas", values="logit")


@cache
def atlas_auc(study: str, *atlases: str) -> float:
    """Mean AUC over sites, in percent, of the mean logit over these atlases."""
    mean = by_atlas(study)[list(atlases)].mean(axis=1)
    areas = [auc(part.index.get_level_values("label").to_numpy(), part.to_numpy()) for _, part in mean.groupby("target")]
    return 100 * float(np.mean(areas))


@block("atlases-averaged")
def atlases() -> list[str]:
    """Mean AUC over 20 sites in single atlases, in two and in all, with differences from AAL."""
    rows = []
    variants = {f"atlases={atlas}": title for atlas, title in ATLASES.items()}
    variants |= {"atlases=aal+ho": "AAL and Harvard-Oxford", "": "all six"}
    for variant, title in variants.items():
        cells_of_row = [title]
        for study in ATLAS_STUDIES:
            test = paired((study, ("connectome-adaptive", variant)), (study, ("connectome-adaptive", "atlases=aal")))
            better = "" if variant == "atlases=aal" else interval(test["difference"], *test["interval"])
            counts = "" if not better else "{} of {}".format(test["counts"][0], sum(test["counts"]))
            cells_of_row += [number(test["means"][0], 2), better, counts]
        rows.append(cells_of_row)
    header = ["atlases", "scan", "minus AAL", "sites above AAL", "with phenotypes", "minus AAL", "sites above AAL"]
    return table(header, rows)


@block("atlases-pairs")
def atlas_pairs() -> list[str]:
    """Mean AUC of all pairs of atlases, next to the mean of the two alone."""
    rows = []
    for pair in combinations(ATLASES, 2):
        row = [_atlas_name(pair)]
        for study in ATLAS_STUDIES:
            alone = float(np.mean([atlas_auc(study, atlas) for atlas in pair]))
            row += [number(atlas_auc(study, *pair), 2), number(alone, 2)]
        rows.append(row)
    return table(["pair", "scan", "mean of the two", "with phenotypes", "mean of the two"], rows)


@block("atlases-sites")
def atlas_sites() -> list[str]:
    """AUC with phenotypes at the four sites that no choice was made on."""
    areas = averaged(ATLAS_STUDIES[1])["connectome-adaptive"]
    variants = {"atlases=aal": "AAL", "atlases=ho": "Harvard-Oxford", "atlases=aal+ho": "both", "": "all six"}
    rows = [[title, *(number(areas.loc[site, variant]) for site in UNSEEN)] for variant, title in variants.items()]
    return table(["atlases", *UNSEEN], rows)


def pages() -> list[Path]:
    """Every page that may hold a block."""
    return sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> dict[str, list[str]]:
    """The lines of each block of a page."""
    return {match[1]: match[2].splitlines() for match in MARKED.finditer(page.read_text())}


def lines(key: str) -> list[str]:
    """The lines that a block should have."""
    if key not in BLOCKS:
        raise SystemExit(f"There is no table {key!r}; known are {', '.join(sorted(BLOCKS))}.")
    return BLOCKS[key]()


def rewritten(text: str) -> str:
    """The text of a page with every block generated anew."""
    return MARKED.sub(lambda match: "\n".join([f"<!-- table: {match[1]} -->", *lines(match[1]), "<!-- end of table -->"]), text)


def main() -> int:
    """Rewrite the blocks of all pages, or name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a block differs from the results")
    check, different = parser.parse_args().check, []
    for page in pages():
        changed = [key for key, present in blocks(page).items() if present != lines(key)]
        different += [f"{page.name}: {key}" for key in changed]
        if changed and not check:
            page.write_text(rewritten(page.read_text()))
    for entry in different:
        print(f"{'Differs' if check else 'Rewritten'}: {entry}")
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
