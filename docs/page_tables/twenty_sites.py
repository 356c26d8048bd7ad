"""Tables of docs/results.md at all 20 sites of ABIDE I: networks beside linear models, and what each part of M²LG-DG has."""

import numpy as np
import pandas as pd
from scipy.stats import t as student

from m2lgdg.metrics import auc, logit, sigmoid
from m2lgdg.study.stats import holm
from page_tables import committed as results
from page_tables.committed import (
    CONNECTOME_OF_THEM,
    FOUR,
    OWN_AT_TWENTY,
    TWENTY,
    TWENTY_NETWORKS,
    Model,
    paired_trainings,
)
from page_tables.results import ABLATIONS, BEST
from page_tables.writing import block, bullets, chance, interval, name, number, spread, table

ADDED = (0.1, 0.3, 0.5, 1)  # weights beside the default's logits
FORMS = {  # with the scan alone, with all phenotypes
    "m2lgdg": ("M2", ""),
    "mm-gtunets": ("imaging", "all-phenotypes"),
    "m2lgdg-connectome": ("scan", ""),
}


def the_sixteen() -> dict[str, str]:
    """The study of each network, without `m2lgdg-connectome`."""
    return {method: study for study in TWENTY_NETWORKS for _, method, _ in results.complete(study)}


def at_twenty(study: str, method: str) -> tuple[Model | None, Model | None]:
    """A method at all 20 sites: by the scan alone and with phenotypes, None where it has no such form or was not run."""
    if method == "phenotype-logistic":
        return None, (study, method, "")
    alone, given = ((study, method, variant) for variant in FORMS.get(method, ("", "phenotypes")))
    known = results.complete(study)
    return alone if alone in known else None, given if given in known else None


def at_twenty_sites() -> dict[str, tuple[Model | None, Model | None]]:
    """Linear models and m2lgdg-connectome, then the other networks at all 20 sites, by the scan alone and with phenotypes."""
    peers = dict.fromkeys(("connectome-adaptive", "tangent-pearson-ridge", "fc-logistic", "phenotype-logistic"), TWENTY)
    peers["m2lgdg-connectome"] = CONNECTOME_OF_THEM
    return {method: at_twenty(study, method) for method, study in (peers | the_sixteen()).items()}


@block("networks-at-20-sites")
def networks_at_twenty_sites() -> list[str]:
    """Networks at each of 20 sites, and the default against each of them, beside linear models."""
    trained = the_sixteen()
    models = at_twenty_sites()
    whole = {method: given or alone for method, (alone, given) in models.items()}
    means = {method: results.by_site(model).mean() for method, model in whole.items()}
    order = sorted(models, key=lambda method: (models[method][1] is None, -means[method]))
    default = models["connectome-adaptive"]
    tests = {
        method: paired_trainings((default[models[method][1] is not None],), (whole[method],))
        for method in order
        if method != BEST[1]
    }
    asked = [method for method in tests if method in trained or method == "phenotype-logistic"]  # docs/choosing.md: the others
    adjusted = dict(zip(asked, holm([tests[method]["p"] for method in asked]), strict=True))
    rows = []
    for method in order:
        cells = [str(len(results.trainings(whole[method]))) if models[method][1][0] != TWENTY else ""]
        cells += ["-" if one is None else spread(results.macro(one[0]).loc[one[1:]]) for one in models[method]]
        four, test = number(results.by_site(whole[method])[FOUR].mean()), tests.get(method)
        compared = "" if test is None else interval(test["difference"], *test["interval"])
        rows.append([name(method), *cells, four, compared, chance(adjusted[method]) if method in adjusted else ""])
    compared = "`connectome-adaptive` minus it (95 %)"
    header = ["model", "trainings", "scan alone", "with phenotypes", "the four", compared, "p, Holm"]
    given = [method for method in trained if None not in models[method]]
    below = [method for method in given if means[method] < means["fc-logistic"]]
    gains = {method: means[method] - results.by_site(models[method][0]).mean() for method in given}
    least, most = min(gains, key=gains.get), max((m for m in gains if m != "m2lgdg"), key=gains.get)
    against = {method: paired_trainings((models["fc-logistic"][1],), (whole[method],)) for method in given}
    behind = [test["difference"] for test in against.values()]
    unlikely = max(holm([test["p"] for test in against.values()]))
    bare = {method: paired_trainings((models["fc-logistic"][0],), (models[method][0],)) for method in given}
    nearest = min(bare, key=lambda method: bare[method]["difference"])
    unclear = [p for p in holm([test["p"] for test in bare.values()]) if p > 0.05]
    return [
        *table(header, rows),
        "",
        *bullets(
            f"With phenotypes, {len(below)} of {len(given)} networks are below `fc-logistic`, by {number(min(behind))} to "
            f"{number(max(behind))} points (largest p over sites {chance(unlikely)}, with Holm's correction over the "
            f"{len(given)}).",
            f"By the scan alone {sum(test['difference'] > 0 for test in bare.values())} of {len(given)} are below it, by "
            f"{number(bare[nearest]['difference'])} ({name(nearest)}) or more. For {len(unclear)} of them this is not clear "
            f"over sites (p {chance(min(unclear))} to {chance(max(unclear))}, with Holm's correction over the {len(given)}).",
            f"With phenotypes the mean AUC of {len(given) - 1} of them changes by {number(gains[least])} ({name(least)}) to "
            f"{number(gains[most])} ({name(most)}), and that of `m2lgdg` by {number(gains['m2lgdg'])}.",
            other_rules(trained["m2dc"]),
            added_to_the_default([whole[method] for method in trained], (trained["m2lgdg"], "m2lgdg", "M1")),
            *one_new_site(),
        ),
    ]


@block("three-trainings")
def three_trainings() -> list[str]:
    """Networks with three trainings: how far these lie apart, what phenotypes change in each, and the mean of their logits."""
    rows, ranges, gains, within = [], {}, {}, []
    for alone, given in at_twenty_sites().values():
        if alone is None or given is None or len(results.trainings(given)) == 1:
            continue
        scan, whole = (results.by_seed(model).mean(axis=1) for model in (alone, given))
        averaged, method = results.averaged_trainings(given).mean(), given[1]
        ranges[method], gains[method] = np.ptp(whole), averaged - whole.mean()
        if method != "m2lgdg":
            within += list((whole - scan).abs() <= ranges[method])
        rows.append([name(method), ", ".join(map(number, whole)), number(whole.std(ddof=1))])
        rows[-1] += [", ".join(map(number, whole - scan)), number(averaged)]
    wide, (least, most) = max(ranges, key=ranges.get), (pick(gains, key=gains.get) for pick in (min, max))
    return [
        *table(["network", "each training", "sd", "change by phenotypes in each", "mean logit of the three"], rows),
        "",
        *bullets(
            f"Three trainings of one network differ by up to {number(ranges[wide])} points ({name(wide)}).",
            f"Except in `m2lgdg`, {sum(within)} of {len(within)} changes by phenotypes are no larger than the range of the "
            "network's three trainings.",
            f"The mean logit of three trainings has a higher AUC than these have on average, by {number(gains[least])} "
            f"({name(least)}) to {number(gains[most])} ({name(most)}).",
        ),
    ]


def other_rules(study: str) -> str:
    """The form of mm-gtunets with sex and age, and m2dc with its last epoch."""
    less = results.by_site(("abide-all/mm-gtunets", "mm-gtunets", "")).mean()
    return (
        f"`mm-gtunets` has all five phenotypes here; with sex and age alone, as published, {number(less)}. `m2dc` keeps the "
        "best epoch of the second half of its training, a rule [chosen at 16 sites](methods.md#settings). With the last epoch, "
        f"as in its release, it has {number(results.by_site((study, 'm2dc', 'last-epoch')).mean())} by the scan alone."
    )


@block("m2lgdg-at-20-sites")
def own_parts() -> list[str]:
    """M²LG-DG, its phenotypes alone and its scan alone: each training, how alike they rank, and tests of the differences."""
    own, alone, scan = ((*OWN_AT_TWENTY[:2], part) for part in ("", "M1", "M2"))
    simple: Model = (TWENTY, "phenotype-logistic", "")
    rows = []
    for model in (own, alone, scan):
        each = results.by_seed(model).mean(axis=1)
        row = [ABLATIONS[model[2]].replace(" (C4)", ""), ", ".join(map(number, each)), number(each.mean())]
        rows.append([*row, number(ranked_alike(model), 2), number(results.by_site(model).corr(results.by_site(simple)), 2)])
    tests = [paired_trainings((one,), (other,)) for one, other in ((own, alone), (own, simple), (alone, simple))]
    adjusted = holm([test["p"] for test in tests])
    told = [
        f"{interval(test['difference'], *test['interval'])}, p {chance(p)}" for test, p in zip(tests, adjusted, strict=True)
    ]
    header = ["`m2lgdg`", "each training", "mean", "trainings rank alike", "AUC goes with that of phenotypes"]
    return [
        *table(header, rows),
        "",
        *bullets(
            f"The whole minus M1: {told[0]}. The whole minus `phenotype-logistic`: {told[1]}. M1 minus `phenotype-logistic`: "
            f"{told[2]}. The p over sites have Holm's correction over these three."
        ),
    ]


def ranked_alike(model: Model) -> float:
    """Spearman's correlation of two trainings over the subjects of a site, mean over pairs of trainings and sites."""
    decided = pd.DataFrame([one["proba"] for one in results.trainings(model)]).T
    each = [part.corr("spearman").to_numpy()[np.triu_indices(decided.shape[1], 1)] for _, part in decided.groupby("target")]
    return float(np.mean(each))


def added_to_the_default(networks: list[Model], phenotypes: Model) -> str:
    """How much the logits of one more model add to the default at best, with weights that these sites chose."""
    sites = tuple(results.by_site(BEST).index)
    own, usual = results.scores(BEST, sites), results.by_site(BEST).mean()

    def best(model: Model) -> float:
        other = logit(results.scores(model, sites)["proba"])
        joined = (logit(own["proba"]) + weight * other for weight in ADDED)
        tables = (own.assign(proba=sigmoid(decision)).groupby("target") for decision in joined)
        return max(100 * np.mean([auc(part["label"].to_numpy(), part["proba"].to_numpy()) for _, part in t]) for t in tables)

    gains = {model: best(model) - usual for model in networks}
    most = max(gains, key=gains.get)
    return (
        "If the logit of one more model with phenotypes is added to that of `connectome-adaptive`, with the best of the "
        f"weights {', '.join(map(str, ADDED[:-1]))} and {ADDED[-1]}, the AUC gains at most {number(gains[most])} points by one "
        f"of these {len(networks)} networks ({name(most[1])}), and {number(best(phenotypes) - usual)} by M1. Probabilities of "
        "three trainings are averaged first."
    )


def one_new_site() -> list[str]:
    """How far the default lies apart between sites."""
    areas = results.by_site(BEST)
    wide = student.ppf(0.975, len(areas) - 1) * areas.std(ddof=1) * np.sqrt(1 + 1 / len(areas))
    return [
        f"{name(*BEST[1:])}: lowest {number(areas.min())} ({areas.idxmin()}), highest {number(areas.max())} "
        f"({areas.idxmax()}); 95 % prediction interval of the AUC measured at one "
        f"new site, the error of its own sample included (t times sd times √(1 + 1/{len(areas)})), "
        f"{number(areas.mean() - wide)} to {number(areas.mean() + wide)}.",
    ]
