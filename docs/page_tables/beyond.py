"""Tables of docs/beyond.md and docs/linear-search.md."""

from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import pandas as pd

from m2lgdg.metrics import auc, calibration, logit, platt, sigmoid
from page_tables.atlases import ATLAS_STUDIES, UNSEEN
from page_tables.committed import (
    ALL_SITES,
    RESULTS,
    TARGETS,
    Model,
    by_seed,
    by_site,
    cells,
    macro,
    paired,
    paired_trainings,
    predictions,
    scores,
    sites,
    trainings,
)
from page_tables.results import BEST
from page_tables.writing import block, chance, interval, name, number, spread, table

Key = tuple[str, str]  # method, variant
FUSED = ("coral", "irm", "cdann", "mldg", "mm-gtunets", "m2lgdg")
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)  # of the networks
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of `m2lgdg-connectome` next to the linear model, in sd of the latter
TWENTY = "all-sites/linear"  # 20 sites
TWO_ATLASES = "atlases=aal+ho"
ADAPTIVE: Model = (TWENTY, "connectome-adaptive", "phenotypes")
ADAPTIVE_TWO: Model = (ATLAS_STUDIES[1], "connectome-adaptive", TWO_ATLASES)
CONNECTOME: Model = ("all-sites/connectome", "m2lgdg-connectome", "")
QUICK, QUICK_SCAN = (("all-sites/connectome-quick", "m2lgdg-connectome", variant) for variant in ("", "scan"))
QUICK_TWO: Model = ("atlases/connectome", "m2lgdg-connectome", TWO_ATLASES)
LINEAR_MODELS: dict[str, tuple[Model, ...]] = {  # several models: their mean logit
    "phenotypes alone (`phenotype-logistic`)": ((TWENTY, "phenotype-logistic", ""),),
    **{f"`{method}`": ((TWENTY, method, "phenotypes"),) for method in ("fc-logistic", "fc-svm", "tangent-pearson-ridge")},
    **{f"`{method}`": ((TWENTY, method, "phenotypes"),) for method in ("connectome-ensemble", "fc-adaptive")},
    "`connectome-adaptive`": (ADAPTIVE,),
    "`connectome-adaptive` in two atlases": (ADAPTIVE_TWO,),
}
NETWORKS: dict[str, tuple[Model, ...]] = {
    "`connectome-adaptive`": (ADAPTIVE,),
    "`m2lgdg-connectome`": (CONNECTOME,),
    "... variant `plus`": (CONNECTOME, ADAPTIVE),
    "... variant `quick`": (QUICK,),
    "... variant `quick` without phenotypes": (QUICK_SCAN,),
    "... variant `quick` in two atlases": (QUICK_TWO,),
    "... variant `quick` and `connectome-adaptive`, both in two atlases": (QUICK_TWO, ADAPTIVE_TWO),
}


def _at_twenty_sites(models: dict[str, tuple[Model, ...]]) -> list[str]:
    """AUC at all 20 sites, at the 16 that choices were made on, and at the four others; compared with one model."""
    rows = []
    for title, joined in models.items():
        own, four = by_site(*joined), list(UNSEEN)
        means = (own.mean(), own.drop(four).mean(), own[four].mean())
        row = [title, *(number(value) for value in (*means, *own[four]))]
        if joined != (ADAPTIVE,):
            test = paired_trainings(joined, (ADAPTIVE,))
            better = "{} of {}".format(test["counts"][0], sum(test["counts"]))
            row += [interval(test["difference"], *test["interval"]), better, chance(test["p"])]
        rows.append(row + [""] * (11 - len(row)))
    header = ["model", "20 sites", "16 sites", "the four", *UNSEEN, "minus `connectome-adaptive` (95 % over subjects)"]
    return table([*header, "sites above it", "p over sites"], rows)


block("twenty-sites")(partial(_at_twenty_sites, LINEAR_MODELS))
block("connectome-sites")(partial(_at_twenty_sites, NETWORKS))


GAINS: dict[str, tuple[tuple[Model, ...], tuple[Model, ...]]] = {
    "`plus` minus `m2lgdg-connectome`": ((CONNECTOME, ADAPTIVE), (CONNECTOME,)),
    "`m2lgdg-connectome` minus `quick`": ((CONNECTOME,), (QUICK,)),
    "`quick` minus `quick` without phenotypes": ((QUICK,), (QUICK_SCAN,)),
    "`quick` in two atlases minus `quick`, same seed": ((QUICK_TWO,), (("atlases/connectome", "m2lgdg-connectome", ""),)),
}


@block("connectome-gains")
def connectome_gains() -> list[str]:
    """Differences of mean AUC between forms of `m2lgdg-connectome` at 20 sites."""
    rows = []
    for title, (first, second) in GAINS.items():
        test = paired_trainings(first, second)
        better = "{} of {}".format(test["counts"][0], sum(test["counts"]))
        rows.append([title, interval(test["difference"], *test["interval"]), better, chance(test["p"])])
    return table(["difference", "points (95 % over subjects)", "sites above", "p over sites"], rows)


@block("connectome-seeds")
def connectome_seeds() -> list[str]:
    """Mean AUC over 20 sites of each training of `m2lgdg-connectome`, and their sd."""
    rows = []
    for title, joined in (("defaults", (CONNECTOME,)), ("`quick`", (QUICK,)), ("`quick`, no phenotypes", (QUICK_SCAN,))):
        means = by_seed(*joined).mean(axis=1)
        rows.append([title, *(number(value) for value in means), number(means.std())])
    return table(["setting", "seed 0", "seed 1", "seed 2", "sd"], rows)


@block("plus-weights")
def plus_weights() -> list[str]:
    """Mean AUC over 20 sites of variant `plus` with equal weights, and with one chosen at the other 19 sites."""
    rows = []
    for seed, (network, linear) in enumerate(zip(trainings(CONNECTOME), trainings(ADAPTIVE) * 3, strict=True)):
        first, label = pd.Series(logit(linear["proba"]), linear.index), linear["label"]
        second = pd.Series(logit(network["proba"]), network.index).loc[first.index]
        areas: dict[str, list[float]] = {"equal": [], "chosen": []}
        for site in first.index.unique("target"):
            others = first.index.get_level_values("target") != site
            unit = first[others].std() / second[others].std()
            losses = {weight: _log_loss(first[others] + weight * unit * second[others], label[others]) for weight in SHARES}
            weights = {"equal": 1.0, "chosen": unit * min(losses, key=lambda weight: losses[weight])}
            for title, weight in weights.items():
                joint = first.loc[site] + weight * second.loc[site]
                areas[title].append(100 * auc(label.loc[site].to_numpy(), joint.to_numpy()))
        rows.append([str(seed), *(number(np.mean(areas[title])) for title in ("equal", "chosen"))])
    return table(["seed", "equal weights", "weight chosen at the 19 other sites"], rows)


def _log_loss(decision: pd.Series, label: pd.Series) -> float:
    """Mean log loss of a decision after Platt scaling on the same subjects."""
    slope, offset = platt(decision.to_numpy(), label.to_numpy())
    right = sigmoid((slope * decision.to_numpy() + offset) * (2 * label.to_numpy() - 1))
    return float(-np.log(np.maximum(right, 1e-12)).mean())


@block("connectome-shorter")
def connectome_shorter() -> list[str]:
    """Mean AUC at the 16 sites of shorter trainings of `m2lgdg-connectome`, over seeds."""
    areas = pd.read_csv(RESULTS / "searches" / "connectome-shorter.csv")
    means = areas.groupby(["setting", "seed"])["auc"].mean().groupby("setting").agg(["mean", "std"])
    ordered = means.sort_values("mean", ascending=False)
    return table(["setting", "mean AUC"], [[title, spread((row["mean"], row["std"]))] for title, row in ordered.iterrows()])


@block("connectome-sensitivity")
def connectome_sensitivity() -> list[str]:
    """Lowest and highest mean AUC of NYU and USM over the values of each field."""
    areas = sites("sensitivity/connectome").xs("AUC", level="metric")["mean"].groupby("variant").mean()
    swept = pd.DataFrame(
        [(*title.split("="), area) for title, area in areas.items() if title], columns=["field", "value", "AUC"]
    )
    rows = []
    for field, part in swept.groupby("field"):
        values = [f"{value:g}" for value in sorted(map(float, part["value"]))]
        lowest, highest = (part.loc[chosen] for chosen in (part["AUC"].idxmin(), part["AUC"].idxmax()))
        ends = [f"{number(one['AUC'])} (at {float(one['value']):g})" for one in (lowest, highest)]
        rows.append([f"`{field}`", f"{values[0]} to {values[-1]}", *ends])
    seeds = cells("paper/connectome-quick").query("metric == 'AUC'").groupby("seed")["value"].mean() * 100
    ends = f"{number(seeds.min())} to {number(seeds.max())}"
    sentence = f"All fields at their values in `quick`: {number(areas[''])}; with {len(seeds)} seeds, {ends}."
    return [*table(["field", "values", "lowest", "highest"], rows), "", sentence]


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
