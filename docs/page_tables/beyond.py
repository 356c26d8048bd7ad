"""Tables of docs/beyond.md and docs/linear-search.md."""

from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import pandas as pd

from m2lgdg.metrics import auc, calibration, logit
from page_tables.atlases import ATLAS_STUDIES, UNSEEN
from page_tables.committed import ALL_SITES, TARGETS, Model, areas_of, by_site, macro, paired, predictions, scores
from page_tables.results import BEST
from page_tables.writing import block, chance, interval, name, number, table

Key = tuple[str, str]  # method, variant
FUSED = ("coral", "irm", "cdann", "mldg", "mm-gtunets", "m2lgdg")
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # of the networks
TWENTY = "abide-linear"  # 20 sites
ADAPTIVE: Model = (TWENTY, "connectome-adaptive", "phenotypes")
MODELS: dict[str, Model] = {
    "phenotypes alone (`phenotype-logistic`)": (TWENTY, "phenotype-logistic", ""),
    **{f"`{method}`": (TWENTY, method, "phenotypes") for method in ("fc-logistic", "fc-svm", "tangent-pearson-ridge")},
    **{f"`{method}`": (TWENTY, method, "phenotypes") for method in ("connectome-ensemble", "fc-adaptive")},
    "`connectome-adaptive`": ADAPTIVE,
    "`connectome-adaptive` in two atlases": (ATLAS_STUDIES[1], "connectome-adaptive", "atlases=aal+ho"),
}


@block("twenty-sites")
def twenty_sites() -> list[str]:
    """AUC of models with phenotypes at all 20 sites, at the 16 that choices were made on, and at the four others."""
    rows = []
    for title, model in MODELS.items():
        areas, four = areas_of(model), list(UNSEEN)
        means = (areas.mean(), areas.drop(four).mean(), areas[four].mean())
        row = [title, *(number(value) for value in (*means, *areas[four]))]
        if model != ADAPTIVE:
            test = paired(model, ADAPTIVE)
            better = "{} of {}".format(test["counts"][0], sum(test["counts"]))
            row += [interval(test["difference"], *test["interval"]), better, chance(test["p"])]
        rows.append(row + [""] * (11 - len(row)))
    header = ["model", "20 sites", "16 sites", "the four", *UNSEEN, "minus `connectome-adaptive` (95 % over subjects)"]
    return table([*header, "sites above it", "p over sites"], rows)


def _without(key: Key) -> float:
    """Mean AUC in percent over the 16 sites other than NYU and USM."""
    return float(by_site((ALL_SITES, *key)).drop(list(TARGETS)).mean())


def _both(method: str, value: Callable[[Key], float]) -> str:
    return " / ".join(number(value((method, variant))) for variant in ("", "phenotypes"))


def _choices(methods: Iterable[str]) -> list[str]:
    rows = []
    for method in methods:
        two = [_both(method, lambda key, target=target: by_site((ALL_SITES, *key))[target]) for target in TARGETS]
        every = _both(method, lambda key: macro(ALL_SITES).loc[key, "mean"])
        rows.append([f"`{method}`", _both(method, _without), *two, every])
    return table(["method", "16 sites", *TARGETS, "18 sites"], rows)


block("first-choice")(partial(_choices, ("fc-adaptive", "fc-svm", "fc-logistic", "connectome-ensemble")))
block("second-choice")(partial(_choices, ("connectome-adaptive", "fc-adaptive", "fc-svm")))


@block("against-fc-svm")
def against_fc_svm() -> list[str]:
    """Both choices against `fc-svm`."""
    rows = []
    for method in ("fc-adaptive", "connectome-adaptive"):
        for variant in ("", "phenotypes"):
            result = paired((ALL_SITES, method, variant), (ALL_SITES, "fc-svm", variant))
            better, text = f"{result['counts'][0]} of 18", interval(result["difference"], *result["interval"])
            alone = [f"{number(difference)} ({chance(p)})" for difference, p in (result["delong"][t] for t in TARGETS)]
            rows.append([name(method, variant), text, better, chance(result["p"]), *alone])
    header = ["method, minus `fc-svm`", "points (95 % over subjects)", "better at", "p over sites"]
    return table([*header, "NYU (DeLong p)", "USM (DeLong p)"], rows)


@block("calibration-slopes")
def calibration_slopes() -> list[str]:
    """Calibration slopes of `connectome-adaptive` over all left-out subjects and by site."""
    rows = []
    for variant in ("", "phenotypes"):
        own = predictions(ALL_SITES).query("method == 'connectome-adaptive' and variant == @variant")
        slopes = [calibration(part["label"].to_numpy(), part["proba"].to_numpy())[0] for _, part in own.groupby("target")]
        pooled = calibration(own["label"].to_numpy(), own["proba"].to_numpy())[0]
        values = [number(value, 2) for value in (pooled, np.nanmedian(slopes), np.nanmean(slopes))]
        rows.append([name("connectome-adaptive", variant), *values])
    return table(["method", "all subjects together", "median of sites", "mean of sites"], rows)


@cache
def _logits(key: Key) -> pd.Series:
    """Logits at the 16 sites with mean 0 and sd 1 inside each, by (target, subject)."""
    targets = tuple(sorted(set(predictions(ALL_SITES)["target"]) - set(TARGETS)))
    proba = scores((ALL_SITES, *key), targets)["proba"]
    values = pd.Series(logit(proba.to_numpy()), index=proba.index)
    return values.groupby("target").transform(lambda part: (part - part.mean()) / part.std())


def _fused(linear: Key, networks: Iterable[str]) -> tuple[dict[float, float], float]:
    """Mean AUC in percent over 16 sites by weight of the networks, and the mean correlation of both sides inside sites."""
    first, second = _logits(linear), sum(_logits((network, "")) for network in networks)
    second = second.groupby("target").transform(lambda part: part / part.std())
    targets = tuple(first.index.unique("target"))
    label = scores((ALL_SITES, *linear), targets)["label"]

    def area(values: pd.Series) -> float:
        return 100 * float(np.mean([auc(label.loc[site].to_numpy(), values.loc[site].to_numpy()) for site in targets]))

    areas = {weight: area((1 - weight) * first + weight * second) for weight in WEIGHTS}
    return areas, float(np.mean([np.corrcoef(first.loc[site], second.loc[site])[0, 1] for site in targets]))


@block("fusion")
def fusion() -> list[str]:
    """Mean AUC at 16 sites of weighted sums of a linear model's and networks' logits."""
    best = BEST[1:]
    pairs = [(best, FUSED, "all six"), *((best, (network,), f"`{network}`") for network in FUSED)]
    pairs.append((("fc-logistic", "phenotypes"), FUSED, "all six"))
    rows = []
    for linear, networks, text in pairs:
        areas, alike = _fused(linear, networks)
        rows.append([name(*linear), text, number(alike, 2), *(number(areas[weight]) for weight in WEIGHTS)])
    return table(["linear model", "networks", "correlation", *(f"{weight:g}" for weight in WEIGHTS)], rows)
