"""Tables of docs/choosing.md on three data sets: the choice of the default, and its AUC at sites that had no part in it."""

import pandas as pd

from page_tables.committed import RESULTS, Model, by_site, paired_trainings
from page_tables.writing import block, interval, name, number, table

DEFAULT, NETWORK = "connectome-adaptive", "m2lgdg-connectome"
FOUR = ["NYU", "USM", "UM_1", "YALE"]
FIVE = [f"ABIDEII-{site}" for site in ("NYU_1", "SDSU_1", "TCD_1", "UCD_1", "USM_1")]
FORMER = "steady 1 + swings 0.3 + amplitude 0.2"
LOG, TANGENT = f"{FORMER} + log_euclidean", f"{FORMER} + tangent_pearson"
RULES = {  # what is said of a rule -> its name in the file
    "former default: age and sex regressed out": f"{FORMER}; age and sex out",
    "nothing regressed out": FORMER,
    "... log-Euclidean block, weight 0.3": f"{LOG} 0.3",
    "**... log-Euclidean block, weight 0.5: the default**": f"{LOG} 0.5",
    "... log-Euclidean block, weight 1": f"{LOG} 1",
    "... tangent space, weight 0.5": f"{TANGENT} 0.5",
    "... tangent space, weight 0.5, scaling and penalty chosen": f"{TANGENT} 0.5 [power 0: all; power 1: all]",
}
SETS = ("abide-i", "abide-ii", "rest-meta-mdd")


@block("default-search")
def default_search() -> list[str]:
    """Some of the rules that were tried, on the development sites of the three sets."""
    areas = pd.read_csv(RESULTS / "searches" / "default.csv").pivot(index="rule", columns="set", values="AUC")
    rows = []
    for said, rule in RULES.items():
        own = areas.loc[rule, list(SETS)]
        rows.append([said, *map(number, own), number(own.mean())])
    return table(["rule", "ABIDE I, 16 sites", "ABIDE II, 9 sites", "REST-meta-MDD, 12 sites", "mean"], rows)


def chosen(method: str) -> tuple[Model, Model | None, Model | None]:
    """Where a method with phenotypes is, on ABIDE I, ABIDE II and REST-meta-MDD."""
    if method == NETWORK:
        return ("abide-default/network", NETWORK, ""), ("abide-ii/network", NETWORK, ""), None
    second = "linear" if method in (DEFAULT, "fc-logistic") else "peers"
    own = (method, "phenotypes")
    return ("abide-default/linear", *own), (f"abide-ii/{second}", *own), ("rest-meta-mdd-connectomes/linear", *own)


@block("three-sets")
def three_sets() -> list[str]:
    """Mean AUC on the three sets, at development sites and at the others; on ABIDE II also minus the default."""
    joined = {name(method): [chosen(method)] for method in (DEFAULT, "tangent-pearson-ridge", "fc-logistic", NETWORK)}
    joined["both: variant `plus`"] = [chosen(NETWORK), chosen(DEFAULT)]
    rows = []
    for title, models in joined.items():
        one, two, three = (tuple(model for model in of_set if model) for of_set in zip(*models, strict=True))
        first, second = by_site(*one), by_site(*two)
        row = [title, *(number(part.mean()) for part in (first, first.drop(FOUR), first[FOUR]))]
        row += [number(part.mean()) for part in (second, second.drop(FIVE), second[FIVE])]
        row.append(number(by_site(*three).mean()) if len(three) == len(models) else "")
        test = paired_trainings(two, (chosen(DEFAULT)[1],)) if title != name(DEFAULT) else None
        rows.append([*row, interval(test["difference"], *test["interval"]) if test else ""])
    header = ["", "ABIDE I", "16 sites", "the four", "ABIDE II", "nine sites", "the five", "REST-meta-MDD"]
    return table([*header, "ABIDE II, minus the default (95 % over subjects)"], rows)
