"""Tables of docs/rest-meta-mdd.md: all methods that take connectomes at 12 sites of REST-meta-MDD."""

from itertools import combinations

import numpy as np
import pandas as pd

from m2lgdg.study.stats import half_interval
from page_tables.committed import LINEAR, Model, by_seed, by_site, compared, paired_trainings, predictions, wins
from page_tables.writing import block, bullets, interval, name, number, spread, table

FOLDER = "rest-meta-mdd-connectomes"
NETWORK, DEFAULT, PHENOTYPES = "m2lgdg-connectome", "connectome-adaptive", "phenotype-logistic"
POWER = 1.96 + 0.8416  # standard errors of a difference that a test at 5 % finds in four of five studies


def linear(method: str, variant: str = "") -> Model:
    """Where a linear model is."""
    return (f"{FOLDER}/linear", method, variant)


def network(method: str, variant: str = "") -> Model:
    """Where a network is."""
    return (f"{FOLDER}/networks", method, variant)


def other(method: str, variant: str = "") -> Model:
    """Where one of the six graph and multi-modal networks is; `genm` was run again after a change."""
    return (f"{FOLDER}/{'genm' if method == 'genm' else 'more'}", method, variant)


def models() -> dict[str, tuple[tuple[Model, ...] | None, tuple[Model, ...]]]:
    """Name -> the method by the connectome alone, if it takes one, and with phenotypes."""
    found: dict[str, tuple[tuple[Model, ...] | None, tuple[Model, ...]]] = {
        name(PHENOTYPES): (None, (linear(PHENOTYPES),)),
        name(NETWORK): ((network(NETWORK, "scan"),), (network(NETWORK),)),
        f"{name(NETWORK)}, variant `plus`": (
            (network(NETWORK, "scan"), linear(DEFAULT)),
            (network(NETWORK), linear(DEFAULT, "phenotypes")),
        ),
    }
    for method in LINEAR:
        found[name(method)] = ((linear(method),), (linear(method, "phenotypes"),))
    for method in dict.fromkeys(predictions(f"{FOLDER}/networks")["method"]):
        if method != NETWORK:
            found[name(method)] = ((network(method),), (network(method, "phenotypes"),))
    for method in dict.fromkeys(predictions(f"{FOLDER}/more")["method"]):
        found[name(method)] = ((other(method),), (other(method, "phenotypes"),))
    # this one takes phenotypes in its base configuration
    found[name("mm-gtunets")] = ((other("mm-gtunets", "imaging"),), (other("mm-gtunets"),))
    return found


def own_interval(*chosen: Model) -> tuple[float, float]:
    """95 % interval of the mean AUC over subjects, drawn inside site and class."""
    matrices = wins(*chosen)
    low, high = compared((one, np.full_like(one, 0.5)) for one in matrices.values())["interval"]
    return 50 + low, 50 + high


def mean_and_sd(*chosen: Model) -> str:
    """Mean AUC over sites, and its sd over seeds."""
    means = by_seed(*chosen).mean(axis=1)
    return spread((means.mean(), means.std()))


@block("mdd-methods")
def methods() -> list[str]:
    """Mean AUC over 12 sites without and with phenotypes, the highest first."""
    rows = []
    for title, (alone, together) in models().items():
        own = by_site(*together)
        low, high = own_interval(*together)
        half = half_interval(own.std(), len(own))
        over = [f"{number(low)} to {number(high)}", f"{number(own.mean() - half)} to {number(own.mean() + half)}"]
        added = ""
        if alone:
            test = paired_trainings(together, alone)
            added = interval(test["difference"], *test["interval"])
        rows.append((own.mean(), [title, mean_and_sd(*alone) if alone else "", mean_and_sd(*together), *over, added]))
    header = ["", "connectome alone", "with phenotypes", "95 % over subjects", "95 % over sites"]
    ordered = [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
    return table([*header, "phenotypes add (95 % over subjects)"], ordered)


@block("mdd-beside-phenotypes")
def beside_phenotypes() -> list[str]:
    """What the rows have more than phenotypes alone."""
    alone = (linear(PHENOTYPES),)
    tests = {title: paired_trainings(together, alone) for title, (_, together) in models().items() if together != alone}
    above = sum(test["interval"][0] > 0 for test in tests.values())
    titles = (f"{name(NETWORK)}, variant `plus`", name(NETWORK), "`fc-svm`", name(DEFAULT))
    plus, network_, svm, default = (interval(tests[one]["difference"], *tests[one]["interval"]) for one in titles)
    return bullets(
        f"Above phenotypes alone, with an interval over subjects that excludes 0: {above or 'none'} of {len(tests)} rows. "
        f"`plus` has {plus} points more, {name(NETWORK)} {network_}, `fc-svm` {svm}, the default {default}.",
    )


@block("mdd-ablation")
def ablation() -> list[str]:
    """The network without one part or another."""
    parts = {
        "whole": "",
        "C1, no decomposition": "C1",
        "C2, no cross-attention": "C2",
        "C3, no contrastive loss": "C3",
        "M1, phenotypes alone": "M1",
        "M2, connectome alone": "M2",
        "connectome alone, with contrastive loss": "scan",
    }
    rows = []
    for title, variant in parts.items():
        test = paired_trainings((network(NETWORK, variant),), (network(NETWORK),))
        less = interval(test["difference"], *test["interval"]) if variant else ""
        rows.append([title, mean_and_sd(network(NETWORK, variant)), less])
    return table([f"`{NETWORK}`", "mean AUC", "minus the whole (95 % over subjects)"], rows)


@block("mdd-sites")
def sites() -> list[str]:
    """AUC at each site of some methods with phenotypes."""
    shown = [linear("fc-svm", "phenotypes"), linear(DEFAULT, "phenotypes"), network(NETWORK), linear(PHENOTYPES)]
    subjects = predictions(f"{FOLDER}/linear").drop_duplicates("subject")
    sizes = subjects.groupby("target")["label"].agg(["size", "sum"])
    areas = pd.DataFrame([by_site(one) for one in shown]).T
    rows = []
    for site in sorted(sizes.index, key=lambda text: int(text[1:])):
        size, patients = sizes.loc[site]
        rows.append([site, str(size), str(patients), *map(number, areas.loc[site])])
    return table(["site", "subjects", "patients", *(name(one[1]) for one in shown)], rows)


@block("mdd-power")
def power() -> list[str]:
    """What 575 subjects at 12 sites can show."""
    shown = models()
    errors = {title: np.ptp(own_interval(*together)) / 3.92 for title, (_, together) in shown.items()}
    own = float(np.median(list(errors.values())))
    pairs = combinations([together for _, together in shown.values()], 2)
    between = float(np.median([np.ptp(paired_trainings(*pair)["interval"]) / 3.92 for pair in pairs]))
    return bullets(
        f"The standard error of a mean AUC over subjects is {number(own)} points (median of {len(shown)} rows), so that, as "
        f"far as subjects go, a method is told from chance with a power of 80 % from {number(50 + POWER * own)} on.",
        f"That of a difference between two methods is {number(between)} points (median of all pairs): "
        f"with this power, a difference of {number(POWER * between)} points could have been shown, no smaller one. Most "
        "differences in the table are smaller.",
    )
