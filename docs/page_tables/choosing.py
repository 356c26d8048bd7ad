"""Tables of docs/choosing.md: linear models and `m2lgdg-connectome` at 20 sites, and what was tried on the way."""

import numpy as np
import pandas as pd

from m2lgdg.metrics import auc, logit, platt, sigmoid
from m2lgdg.study.stats import holm
from page_tables.atlases import UNSEEN
from page_tables.committed import NETWORK_AT_TWENTY, RESULTS, TWENTY, Model, by_site, paired_trainings, trainings
from page_tables.writing import block, bullets, chance, interval, number, spread, table

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of `m2lgdg-connectome` next to the linear model, in sd of the latter
ADAPTIVE: Model = (TWENTY, "connectome-adaptive", "phenotypes")
CONNECTOME: Model = (NETWORK_AT_TWENTY, "m2lgdg-connectome", "")
ORDINARY = ("fc-logistic", "fc-svm", "tangent-pearson-ridge", "connectome-ensemble", "fc-adaptive")
STEP = "FC scaled, minus chance, age and sex out"
MODELS: dict[str, tuple[Model, ...]] = {  # several models: their mean logit
    "phenotypes alone (`phenotype-logistic`)": ((TWENTY, "phenotype-logistic", ""),),
    **{f"`{method}`": ((TWENTY, method, "phenotypes"),) for method in ORDINARY},
    "`connectome-adaptive`": (ADAPTIVE,),
    "`m2lgdg-connectome`": (CONNECTOME,),
    "... variant `plus`": (CONNECTOME, ADAPTIVE),
}


@block("twenty-sites")
def twenty_sites() -> list[str]:
    """AUC at all 20 sites, at the 16 that choices were made on, and at the four others; compared with the default."""
    tests = {title: paired_trainings(joined, (ADAPTIVE,)) for title, joined in MODELS.items() if joined != (ADAPTIVE,)}
    adjusted = dict(zip(tests, holm([test["p"] for test in tests.values()]), strict=True))
    rows = []
    for title, joined in MODELS.items():
        own, four = by_site(*joined), list(UNSEEN)
        row = [title, *(number(value) for value in (own.mean(), own.drop(four).mean(), own[four].mean(), *own[four]))]
        if title in tests:
            test = tests[title]
            better = "{} of {}".format(test["counts"][0], sum(test["counts"]))
            row += [interval(test["difference"], *test["interval"]), better, chance(adjusted[title])]
        rows.append(row + [""] * (11 - len(row)))
    header = ["model", "20 sites", "16 sites", "the four", *UNSEEN, "minus `connectome-adaptive` (95 % over subjects)"]
    return table([*header, "sites above it", "p over sites, Holm"], rows)


@block("linear-features")
def linear_features() -> list[str]:
    """Features that led to `connectome-adaptive`, without and with head motion regressed out."""
    areas = pd.read_csv(RESULTS / "searches" / "linear-features.csv").set_index("features")["auc"]
    shown = [
        *("Fisher-z correlations (FC)", "FC, age and sex out", "FC scaled, minus chance", STEP, f"frame-weighted {STEP}"),
        "FC and deviation FC (weight 0.3) in one kernel, scaled, age and sex out",
        *("sum of scores, age and sex out", "sum of scores, phenotypes 0.3, age and sex out"),
    ]
    rows = []
    for name in shown:
        motion = areas.get(name.replace("age and sex out", "age, sex and motion out")) if "age" in name else None
        rows.append([name, number(areas[name]), "" if motion is None else number(motion)])
    return table(["features", "mean AUC", "motion regressed out too"], rows)


@block("connectome-settings")
def connectome_settings() -> list[str]:
    """Shorter trainings of `m2lgdg-connectome` at the 16 sites, and the weights of its variant `plus` at 20."""
    areas = pd.read_csv(RESULTS / "searches" / "connectome-shorter.csv")
    means = areas.groupby(["setting", "seed"])["auc"].mean().groupby("setting").agg(["mean", "std"])
    default, quick = (spread(means.loc[name]) for name in ("default", "20 epochs, two members"))
    equal, chosen = np.mean([_plus(network, linear) for network, linear in _pairs()], axis=0)
    shares = [np.mean([_weighted(network, linear, tenths / 10) for network, linear in _pairs()]) for tenths in range(2, 9)]
    return bullets(
        f"Defaults {default}, half of the epochs and members (variant `quick`) {quick}: mean AUC and sd over three seeds at "
        "the 16 sites.",
        f"Variant `plus` at 20 sites with equal weights: {number(equal)}; with that of the weights "
        f"{', '.join(f'{one:g}' for one in WEIGHTS)} of the network, in units of the sds of both logits, which has the lowest "
        f"log loss at the 19 other sites: {number(chosen)}. Fixed shares of the network's logit from 0.2 to 0.8, without "
        f"these units, have {number(min(shares))} to {number(max(shares))}. Equal weights were fixed "
        "before the network had its present form.",
    )


def _weighted(network: pd.DataFrame, linear: pd.DataFrame, share: float) -> float:
    """Mean AUC in percent of both logits with a fixed share of the network."""
    joint = share * logit(network.loc[linear.index, "proba"]) + (1 - share) * logit(linear["proba"])
    groups = linear.assign(joint=joint).groupby("target")[["label", "joint"]]
    return float(groups.apply(lambda part: 100 * auc(*part.to_numpy().T)).mean())


def _pairs() -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Each training of the network with the linear model."""
    return list(zip(trainings(CONNECTOME), trainings(ADAPTIVE) * 3, strict=True))


def _plus(network: pd.DataFrame, linear: pd.DataFrame) -> tuple[float, float]:
    """Mean AUC in percent of both logits with equal weights, and with a weight of the network chosen at the other sites."""
    first, label = pd.Series(logit(linear["proba"]), linear.index), linear["label"]
    second = pd.Series(logit(network["proba"]), network.index).loc[first.index]
    areas = []
    for site in first.index.unique("target"):
        others = first.index.get_level_values("target") != site
        unit = first[others].std() / second[others].std()
        losses = {weight: _log_loss(first[others] + weight * unit * second[others], label[others]) for weight in WEIGHTS}
        chosen = unit * min(losses, key=lambda weight: losses[weight])
        joint = [first.loc[site] + weight * second.loc[site] for weight in (1.0, chosen)]
        areas.append([100 * auc(label.loc[site].to_numpy(), one.to_numpy()) for one in joint])
    equal, best = np.mean(areas, axis=0)
    return float(equal), float(best)


def _log_loss(decision: pd.Series, label: pd.Series) -> float:
    """Mean log loss of a decision after Platt scaling on the same subjects."""
    slope, offset = platt(decision.to_numpy(), label.to_numpy())
    right = sigmoid((slope * decision.to_numpy() + offset) * (2 * label.to_numpy() - 1))
    return float(-np.log(np.maximum(right, 1e-12)).mean())
