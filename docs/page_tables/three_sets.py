"""Tables of docs/choosing.md on three data sets: the choice of the default, and its AUC at sites kept out of the search."""

import pandas as pd

from page_tables.committed import FOUR, NETWORK_AT_TWENTY, RESULTS, TWENTY, Model, by_site, paired_trainings
from page_tables.writing import block, bullets, interval, name, number, table

DEFAULT, NETWORK, PEER = "connectome-adaptive", "m2lgdg-connectome", "tangent-pearson-ridge"
DEPRESSION = "rest-meta-mdd-connectomes"
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
MEMBERS = {  # what is said of a setting of the network -> its name in the file
    "FC, third power of the association": "base",
    "FC, first power": "fc1",
    "FC, equal scales": "fc0",
    "log-Euclidean, equal scales": "log0",
    "log-Euclidean, equal scales, not centred by site": "log0-source",
    "FC (third power), and tangent space": "base + tp",
    "FC (third power), and log-Euclidean with equal scales": "fc3 + log0",
    "... these not centred by site: **the network**": "fc3 + log0-source",
}
SETS = ("abide-i", "abide-ii", "rest-meta-mdd")
FORMER_DEFAULT: Model = ("abide-structure/former", DEFAULT, "scan-phenotypes")


def searched() -> pd.DataFrame:
    """(rule, set) mean AUC over development sites."""
    return pd.read_csv(RESULTS / "searches" / "default.csv").pivot(index="rule", columns="set", values="AUC")[list(SETS)]


@block("default-search")
def default_search() -> list[str]:
    """Some of the rules that were tried, on the development sites of the three sets."""
    areas, rows = searched(), []
    for said, rule in RULES.items():
        own = areas.loc[rule]
        rows.append([said, *map(number, own), number(own.mean())])
    return table(["rule", "ABIDE I, 16 sites", "ABIDE II, 9 sites", "REST-meta-MDD, 12 sites", "mean"], rows)


@block("default-search-others")
def default_search_others() -> list[str]:
    """Choices inside source, and how far the best rule is from the default; means over the three sets."""
    means = searched().dropna().mean(axis=1)
    learned = means[means.index.str.contains("discriminant")]
    inside = means[means.index.str.startswith(LOG) & means.index.str.contains("all; power 1: all")]
    own, best = means[f"{LOG} 0.5"], means.max()
    return bullets(
        "Weights of blocks that are learned inside source, as those of phenotypes and tables are, have "
        f"{number(learned.min())} to {number(learned.max())} in {len(learned)} rules.",
        f"With scaling and penalty of the log-Euclidean block chosen at left-out source sites, the default has "
        f"{number(inside.min(), 2)} to {number(inside.max(), 2)} (four weights of the block) instead of {number(own, 2)}.",
        f"The best of all rules has {number(best, 2)}. It has a tangent space, whose reference must be fitted on source; the "
        "log-Euclidean block needs nothing.",
    )


def chosen(method: str) -> tuple[Model, Model, Model]:
    """Where a method with phenotypes is, on ABIDE I, ABIDE II and REST-meta-MDD."""
    if method == NETWORK:
        return (
            (NETWORK_AT_TWENTY, NETWORK, ""),
            ("abide-ii/network", NETWORK, ""),
            (f"{DEPRESSION}/networks", NETWORK, ""),
        )
    second = "linear" if method in (DEFAULT, "fc-logistic") else "peers"
    own = (method, "phenotypes")
    return (TWENTY, *own), (f"abide-ii/{second}", *own), (f"{DEPRESSION}/linear", *own)


@block("three-sets")
def three_sets() -> list[str]:
    """Mean AUC on the three sets, at development sites and at the others; on ABIDE II also minus the default."""
    joined = {name(method): [chosen(method)] for method in (DEFAULT, PEER, "fc-logistic", NETWORK)}
    joined["both: variant `plus`"] = [chosen(NETWORK), chosen(DEFAULT)]
    rows = []
    for title, models in joined.items():
        one, two, three = zip(*models, strict=True)
        first, second = by_site(*one), by_site(*two)
        row = [title, *(number(part.mean()) for part in (first, first.drop(FOUR), first[FOUR]))]
        row += [number(part.mean()) for part in (second, second.drop(FIVE), second[FIVE])]
        row.append(number(by_site(*three).mean()))
        test = paired_trainings(two, (chosen(DEFAULT)[1],)) if title != name(DEFAULT) else None
        rows.append([*row, interval(test["difference"], *test["interval"]) if test else ""])
    header = ["", "ABIDE I", "16 sites", "the four", "ABIDE II", "nine sites", "the five", "REST-meta-MDD"]
    return table([*header, "ABIDE II, minus the default (95 % over subjects)"], rows)


@block("three-sets-others")
def three_sets_others() -> list[str]:
    """By the scan alone, and before the change."""
    scan = {one: by_site((f"abide-ii/{part}", one, "")) for one, part in ((DEFAULT, "linear"), (PEER, "peers"))}
    alone, together = scan[DEFAULT], by_site(chosen(DEFAULT)[1])
    former, present = by_site(FORMER_DEFAULT), by_site(chosen(DEFAULT)[0])
    return bullets(
        f"By the scan alone, the default has {number(alone.mean())} on ABIDE II and {name(PEER)} "
        f"{number(scan[PEER].mean())}; at the five sites {number(alone[FIVE].mean())} and {number(scan[PEER][FIVE].mean())}. "
        f"Sex and age change the default by {number((together - alone).drop(FIVE).mean())} at the nine sites and by "
        f"{number((together - alone)[FIVE].mean())} at the five: what they say differs between sites.",
        f"On ABIDE I the former default had {number(former.mean())}, {number(former.drop(FOUR).mean())} at the 16 sites and "
        f"{number(former[FOUR].mean())} at the four. The present one differs by "
        f"{number((present - former).drop(FOUR).mean())} where the former was chosen, and by "
        f"{number((present - former)[FOUR].mean())} where it was not.",
    )


@block("network-search")
def network_search() -> list[str]:
    """What members of the network read, on the development sites of the three sets."""
    tried = pd.read_csv(RESULTS / "searches" / "connectome-network.csv").query("seed == 0")
    tries = tried.groupby(["config", "set"])["AUC"].mean().unstack()[list(SETS)]
    rows = [
        [said, *map(number, own), number(own.mean())] for said, own in ((said, tries.loc[one]) for said, one in MEMBERS.items())
    ]
    return table(["what members read", "ABIDE I, 16 sites", "ABIDE II, 9 sites", "REST-meta-MDD, 12 sites", "mean"], rows)
