"""The committed results, read once, and comparisons of two models on the same subjects."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

from m2lgdg.metrics import auc, delong_test, logit, sigmoid
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.stats import cell_scores, half_interval, macro_scores, over_seeds, site_scores, training_differences

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
DRAWS = 10_000  # an end of an interval is then exact to about 1.5 % of the width

Model = tuple[str, str, str]  # study, method, variant
TARGETS = ("NYU", "USM")  # the paper's
FOUR = [*TARGETS, "UM_1", "YALE"]  # sites of ABIDE I kept out of the searches
METRICS = ("AUC", "ACC", "SEN", "SPE", "F1")
TWENTY = "abide-all/linear"  # linear models at all sites of ABIDE I
NETWORK_AT_TWENTY = "abide-all/m2lgdg-connectome-seeds"  # three trainings of m2lgdg-connectome on the same subjects
# The paper's networks, erm and brainnet-transformer, and the first training of m2lgdg-connectome: one commit.
TWENTY_NETWORKS = ("abide-all/networks", "abide-all/mm-gtunets", "abide-all/gpu", "abide-all/brainnet-transformer")
CONNECTOME_OF_THEM = "abide-all/m2lgdg-connectome"  # also by the scan alone
OWN_AT_TWENTY: Model = ("abide-all/gpu", "m2lgdg", "")
FURTHER_SEEDS = {  # of the same commit
    "abide-all/networks": ("abide-all/networks-seeds", "abide-all/iib-seeds", "abide-all/cdann-seeds"),
    "abide-all/gpu": ("abide-all/m2lgdg-seeds",),
}
PAPER = "paper/networks"
LITTLE_MOTION = "abide-all/motion"  # linear models on the paper's subjects at every site
SMALL = "CMU"  # has five of the paper's subjects
LINEAR = (
    *("fc-logistic", "fc-svm", "fc-adaptive", "tangent-logistic", "tangent-ridge", "tangent-pearson-ridge"),
    *("combat-logistic", "connectome-ensemble", "connectome-adaptive"),
)
WITH_PHENOTYPES = ("m2lgdg", "mm-gtunets")  # in the paper
SLOW = {"m2dc": "paper/m2dc", "ufa-net": "paper/ufa-net"}  # networks with studies of their own


@cache
def predictions(study: str) -> pd.DataFrame:
    """The predictions table of a committed study, with its further seeds."""
    return pd.concat([read_predictions(RESULTS / one) for one in (study, *FURTHER_SEEDS.get(study, ()))], ignore_index=True)


@cache
def cells(study: str) -> pd.DataFrame:
    """One row for each cell and metric."""
    return cell_scores(predictions(study), METRICS)


@cache
def sites(study: str) -> pd.DataFrame:
    """Mean and sd over seeds in percent by (method, variant, target, metric)."""
    table = site_scores(cells(study)).set_index(["method", "variant", "target", "metric"])
    return table[["mean", "sd"]].sort_index() * 100


@cache
def macro(study: str) -> pd.DataFrame:
    """Mean AUC over sites and half of its 95 % interval in percent, by (method, variant)."""
    table = macro_scores(site_scores(cells(study)).query("metric == 'AUC'")).set_index(["method", "variant"])
    table["half"] = [half_interval(sd, count) for sd, count in zip(table["sd"], table["sites"], strict=True)]
    return table[["mean", "half"]] * 100


@cache
def complete(study: str) -> list[Model]:
    """The models of a study that have every target site; a run on a GPU can end before all of them do."""
    counted = predictions(study).groupby(["method", "variant"], sort=False)["target"].nunique()
    return [(study, *model) for model in counted.index[counted == counted.max()]]


@cache
def records(study: str, method: str, variant: str = "") -> list[dict]:
    """The records of a method's cells."""
    lines = (RESULTS / study / "records.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if (one["method"], one["variant"]) == (method, variant)]


@cache
def published(data: str = "abide") -> pd.Series:
    """The paper's values by (method, target, metric)."""
    return pd.read_csv(ROOT / "studies" / f"paper-{data}.csv").set_index(["method", "target", "metric"])["value"]


@cache
def changes(study: str, method: str) -> pd.DataFrame:
    """The whole method minus each variant in percent, with half of its 95 % interval over trainings."""
    differences = training_differences(cells(study), method).query("metric == 'AUC'").set_index("variant")
    return differences[["mean", "half"]] * 100


def networks() -> list[str]:
    """The paper's networks, `m2lgdg` first, then in the order of the paper's table."""
    return list(dict.fromkeys(["m2lgdg", *published().index.get_level_values("method")]))


def scores_at(model: Model, target: str, metric: str = "AUC") -> tuple[float, float]:
    """Mean and sd over seeds in percent."""
    mean, sd = sites(model[0]).loc[(*model[1:], target, metric)]
    return float(mean), float(sd)


def of_paper(method: str, phenotypes: bool) -> Model | None:
    """Where the results of a method on the paper's subjects are, without or with phenotypes; None if it was not run so."""
    if method in LINEAR:
        return ("paper/linear", method, "phenotypes" if phenotypes else "")
    if method == "phenotype-logistic":
        return ("paper/linear", method, "") if phenotypes else None
    if method == "m2lgdg-connectome":
        return ("paper/connectome", method, "" if phenotypes else "scan")
    if method in WITH_PHENOTYPES:
        return (PAPER, method, "") if phenotypes else None
    if method in SLOW:
        return (SLOW[method], method, "phenotypes" if phenotypes else "")
    return ("paper/phenotypes" if phenotypes else PAPER, method, "")


def as_in_paper(method: str) -> Model:
    """Where the results of a network are that takes phenotypes only if the paper says so."""
    model = of_paper(method, method in WITH_PHENOTYPES)
    assert model is not None
    return model


# Two models on the same subjects


@cache
def scores(model: Model, targets: tuple[str, ...]) -> pd.DataFrame:
    """Label and probability averaged over seeds, by (target, subject), sorted."""
    study, method, variant = model
    table = over_seeds(predictions(study))
    chosen = table[(table["method"] == method) & (table["variant"] == variant) & table["target"].isin(targets)]
    return chosen.set_index(["target", "subject"])[["label", "proba"]].sort_index()


@cache
def bootstrap(groups: tuple[tuple[int, int], ...]) -> list[list[np.ndarray]]:
    """(draw, subject) times a subject is drawn, for each site and class of these sizes."""
    rng = np.random.default_rng(0)
    return [[rng.multinomial(size, np.full(size, 1 / size), DRAWS).astype(np.float32) for size in site] for site in groups]


def ranked(label: np.ndarray, proba: np.ndarray) -> np.ndarray:
    """(patient, control) 1 where the patient has the higher probability, a half for ties: the AUC is its mean."""
    patients, controls = proba[label == 1][:, None], proba[label == 0][None, :]
    return (patients > controls) + 0.5 * (patients == controls)


def targets_of(model: Model) -> tuple[str, ...]:
    """The target sites of a model, sorted."""
    return tuple(sorted(set(predictions(model[0]).query("method == @model[1]")["target"])))


def aligned(first: Model, second: Model) -> Iterable[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Label and both probabilities of the subjects at each site of the first."""
    targets = targets_of(first)
    one, two = scores(first, targets), scores(second, targets)
    for target in targets:
        a, b = one.loc[target], two.loc[target]
        yield target, a["label"].to_numpy(), a["proba"].to_numpy(), b["proba"].loc[a.index].to_numpy()


def delong(first: Model, second: Model) -> dict[str, tuple[float, float]]:
    """Difference of AUC in percent and DeLong's p at each site."""
    tests = {target: delong_test(*rest) for target, *rest in aligned(first, second)}
    return {target: (100 * float(difference), float(p)) for target, (difference, p) in tests.items()}


def paired(first: Model, second: Model) -> dict:
    """Probabilities averaged over seeds: difference of mean AUC over the sites of the first, and DeLong's at each."""
    matrices = [[ranked(label, proba) for proba in probas] for _, label, *probas in aligned(first, second)]
    return compared(matrices) | {"delong": delong(first, second)}


def compared(matrices: Iterable[Iterable[np.ndarray]]) -> dict:
    """Difference of mean AUC over sites in percent, its 95 % interval over subjects, p over sites.

    Each site has two matrices of `ranked`, (patient, control), of the same subjects.
    """
    pairs = [tuple(pair) for pair in matrices]
    sizes = tuple((one.shape[1], one.shape[0]) for one, _ in pairs)  # controls, patients
    areas = 100 * np.array([[matrix.mean() for matrix in pair] for pair in pairs])  # (site, side)
    drawn = np.zeros(DRAWS)
    for (a, b), (controls, patients) in zip(pairs, bootstrap(sizes), strict=True):
        won = patients @ (a - b).astype(np.float32)  # (draw, control)
        drawn += np.einsum("dc,dc->d", won, controls) / a.size / len(pairs)
    difference = areas[:, 0] - areas[:, 1]
    return {
        "means": areas.mean(axis=0),
        "difference": float(difference.mean()),
        "interval": 100 * np.percentile(drawn, [2.5, 97.5]),
        "p": float(ttest_rel(*areas.T).pvalue) if len(areas) > 2 else np.nan,
        "counts": tuple(int(part.sum()) for part in (difference > 1e-9, np.abs(difference) <= 1e-9, difference < -1e-9)),
    }


# Single trainings of a model, or of several that are joined by their mean logit


@cache
def trainings(*models: Model) -> list[pd.DataFrame]:
    """Label and probability by (target, subject) for each seed. A model with one seed goes with all seeds of the others."""
    tables = []
    for study, method, variant in models:
        table = predictions(study)
        own = table[(table["method"] == method) & (table["variant"] == variant)]
        parts = [part.set_index(["target", "subject"]).sort_index() for _, part in own.groupby("seed")]
        tables.append([part[["label", "proba"]] for part in parts])
    seeds = max(map(len, tables))
    joined = []
    for parts in zip(*(one * seeds if len(one) == 1 else one for one in tables), strict=True):
        mean = np.mean([logit(part.loc[parts[0].index, "proba"].to_numpy()) for part in parts], axis=0)
        joined.append(parts[0].assign(proba=sigmoid(mean)))
    return joined


def wins(*models: Model) -> dict[str, np.ndarray]:
    """(patient, control) mean of `ranked` over trainings at each target: the mean AUC of a training is its mean."""
    tables = [dict(iter(table.groupby("target"))) for table in trainings(*models)]
    each = {
        site: [ranked(one[site]["label"].to_numpy(), one[site]["proba"].to_numpy()) for one in tables] for site in tables[0]
    }
    return {site: np.mean(matrices, axis=0) for site, matrices in each.items()}


@cache
def by_seed(*models: Model) -> pd.DataFrame:
    """(seed, target) AUC in percent."""
    each = [table.groupby("target")[["label", "proba"]] for table in trainings(*models)]
    return pd.DataFrame([groups.apply(lambda part: 100 * auc(*part.to_numpy().T)) for groups in each])


def by_site(*models: Model) -> pd.Series:
    """AUC in percent at each target, mean over seeds."""
    return by_seed(*models).mean()


def averaged_trainings(model: Model) -> pd.Series:
    """AUC in percent at each target of the mean logit of all trainings."""
    tables = trainings(model)
    mean = np.mean([logit(table["proba"].to_numpy()) for table in tables], axis=0)
    groups = tables[0].assign(proba=mean).groupby("target")[["label", "proba"]]
    return groups.apply(lambda part: 100 * auc(*part.to_numpy().T))


def paired_trainings(first: tuple[Model, ...], second: tuple[Model, ...]) -> dict:
    """Mean AUC of a training of the first minus that of the second, over sites, as `compared`."""
    one, two = wins(*first), wins(*second)
    return compared((one[site], two[site]) for site in one)
