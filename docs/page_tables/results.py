"""Tables of docs/results.md: the paper's subjects, then every site of the first cohort."""

import numpy as np
import pandas as pd
from scipy.stats import t as student
from scipy.stats import ttest_rel

from m2lgdg.metrics import auc, logit, sigmoid
from m2lgdg.study.stats import holm
from page_tables import committed as results
from page_tables.committed import (
    CONNECTOME_OF_THEM,
    FOUR,
    LINEAR,
    LITTLE_MOTION,
    PAPER,
    SMALL,
    TARGETS,
    TWENTY,
    TWENTY_NETWORKS,
    WITH_PHENOTYPES,
    Model,
    as_in_paper,
    of_paper,
    paired,
    paired_trainings,
    published,
    scores_at,
)
from page_tables.writing import block, bullets, chance, interval, name, number, spread, table

FURTHER = ("m2lgdg-connectome", "erm", "brainnet-transformer")  # networks that the paper does not have
OWN: Model = (PAPER, "m2lgdg", "")
CONNECTOME: Model = ("paper/connectome", "m2lgdg-connectome", "")
BEST: Model = (TWENTY, "connectome-adaptive", "phenotypes")
ADDED = (0.1, 0.3, 0.5, 1)  # weights beside the default's logits
FORMS = {  # with the scan alone, with all phenotypes
    "m2lgdg": ("M2", ""),
    "mm-gtunets": ("imaging", "all-phenotypes"),
    "m2lgdg-connectome": ("scan", ""),
}
ABLATIONS = {
    "": "the whole method (C4)",
    "M1": "M1, phenotypes alone",
    "M2": "M2, the scan alone",
    "scan": "`scan`, M2 with the contrast",
    "C1": "C1, no decomposition, no cross-attention",
    "C2": "C2, no cross-attention",
    "C3": "C3, no contrast across sites",
}
ABLATED = (("paper/ablation", "m2lgdg"), CONNECTOME[:2])


# The paper's subjects


def auc_cell(method: str, phenotypes: bool, target: str) -> str:
    """AUC on the paper's subjects at a site or ("both") its mean; in brackets the paper's own, where it has this model."""
    model = of_paper(method, phenotypes)
    if model is None:
        return "-"
    at = TARGETS if target == "both" else (target,)
    text = spread(scores_at(model, target)) if target in TARGETS else number(np.mean([scores_at(model, t)[0] for t in at]))
    if method not in results.networks() or phenotypes != (method in WITH_PHENOTYPES):
        return text
    return f"{text} [{np.mean([published()[method, t, 'AUC'] for t in at]) + 1e-6:.1f}]"  # halves up


def both(method: str, target: str) -> str:
    """AUC without / with phenotypes."""
    return " / ".join(auc_cell(method, phenotypes, target) for phenotypes in (False, True))


def everywhere(method: str) -> str:
    """Mean AUC over all 20 sites with half of its interval, without / with phenotypes."""
    known = results.macro(results.TWENTY)
    if (method, "phenotypes") not in known.index:  # a method that always takes phenotypes
        return f"- / {spread(known.loc[(method, '')])}"
    return " / ".join(spread(known.loc[(method, variant)]) for variant in ("", "phenotypes"))


@block("paper-table")
def paper_table() -> list[str]:
    """Networks at NYU and USM, without and with phenotypes."""
    columns = [(phenotypes, target) for phenotypes in (False, True) for target in (*TARGETS, "both")]
    rows = [[name(method), *(auc_cell(method, *column) for column in columns)] for method in (*results.networks(), *FURTHER)]
    return [*table(["method", "NYU", "USM", "mean", "with phenotypes: NYU", "USM", "mean"], rows), "", *_counts()]


@block("linear-models")
def linear_models() -> list[str]:
    """Linear models without / with phenotypes: NYU and USM on the paper's subjects, 20 sites of all subjects."""
    methods = (*LINEAR, "phenotype-logistic")
    rows = [[name(method), *(both(method, target) for target in (*TARGETS, "both")), everywhere(method)] for method in methods]
    return [
        *table(["method", *TARGETS, "mean", "20 sites, all subjects"], rows),
        "",
        *bullets(f"On the same subjects, verbal IQ alone has {number(verbal_iq('NYU'))} and {number(verbal_iq('USM'))}."),
    ]


def verbal_iq(target: str) -> float:
    """AUC of verbal IQ at a site of the paper's subjects, whose order is that of a model of it alone on all subjects."""
    own = results.scores(("abide-all/viq", "phenotype-logistic", ""), (target,))
    subjects = results.scores((PAPER, "m2lgdg", ""), (target,)).index
    return 100 * auc(*own.loc[subjects, ["label", "proba"]].to_numpy().T)


def _counts() -> list[str]:
    """How many networks are above the paper's values, M²LG-DG and the phenotypes alone."""
    own, *rivals = results.networks()
    areas = {method: np.array([scores_at(as_in_paper(method), t)[0] for t in TARGETS]) for method in (own, *rivals)}
    given = {method: [scores_at(model, t)[0] for t in TARGETS] for method in rivals if (model := of_paper(method, True))}
    reported = {method: [published()[method, t, "AUC"] for t in TARGETS] for method in rivals}
    alone = [scores_at(of_paper("phenotype-logistic", True), t)[0] for t in TARGETS]
    beyond = [method for method in rivals if (areas[method] > reported[method]).all()]
    above, higher = (sum((each[method] > areas[own]).all() for method in set(each) & set(rivals)) for each in (areas, given))
    below = np.sum([values < alone for values in areas.values()], axis=0)
    return bullets(
        f"Above the paper's value at both sites: {len(beyond)} of {len(rivals)} compared networks, all but "
        f"{' and '.join(name(method) for method in rivals if method not in beyond)}.",
        f"Above `m2lgdg` at both sites: {above} of {len(rivals)}; with phenotypes for all, {higher} of {len(given)}.",
        f"Below `phenotype-logistic`: {below[0]} of {len(areas)} networks at NYU, {below[1]} at USM. These are rows of the "
        "first columns, but `m2lgdg` and `mm-gtunets` have phenotypes.",
    )


@block("paper-comparisons")
def paper_comparisons() -> list[str]:
    """Two models at NYU and USM, seeds averaged: difference, its interval over subjects, and DeLong's tests."""
    whole: Model = (*ABLATED[0], "")
    pairs = [(OWN, of_paper(method, True)) for method in ("phenotype-logistic", "erm", "fc-logistic")]
    pairs += [(whole, (*ABLATED[0], "M1")), (CONNECTOME, OWN)]
    pairs += [(CONNECTOME, of_paper(method, True)) for method in ("fc-logistic", "connectome-adaptive")]
    pairs += [(CONNECTOME, (*ABLATED[1], "scan"))]
    compared = [paired(*pair) for pair in pairs]
    adjusted_p = iter(holm([p for result in compared for _, p in result["delong"].values()]))
    rows = []
    for (first, second), result in zip(pairs, compared, strict=True):
        tests = [f"{number(difference)} ({chance(next(adjusted_p))})" for difference, _ in result["delong"].values()]
        other = name(second[1]) if second[1] != first[1] else f"its variant {second[2]}"
        rows.append([f"{name(first[1])} minus {other}", interval(result["difference"], *result["interval"]), *tests])
    methods = (*results.networks()[1:], *FURTHER, *LINEAR, "phenotype-logistic")
    others = {model: given for method in methods for given in (False, True) if (model := of_paper(method, given))}
    tests = {(model, target): test for model in others for target, test in results.delong(model, OWN).items()}
    adjusted = dict(zip(tests, holm([p for _, p in tests.values()]), strict=True))
    above = {target: sum(d > 0 and p < 0.05 for (_, site), (d, p) in tests.items() if site == target) for target in TARGETS}
    below = sum(d < 0 and p < 0.05 for d, p in tests.values())
    remaining = [key for key, p in adjusted.items() if p < 0.05]
    sides = {tests[key][0] > 0 for key in remaining}
    named = [f"{name(model[1])}{' with phenotypes' * others[model]} at {site}" for model, site in remaining]
    as_published = _against_the_published()
    side = "above it" if sides == {True} else "above or below it"
    told = f"{len(remaining)} remain, {side}: {' and '.join(named)}" if remaining else "none remains"
    return [
        *table(["models", "mean of both sites (95 % over subjects)", "NYU (DeLong p, Holm)", "USM (DeLong p, Holm)"], rows),
        "",
        *bullets(
            f"All {len(others)} other models of both tables against `m2lgdg`, {len(tests)} DeLong tests: above it with p < "
            f"0.05 in {above['NYU']} at NYU and {above['USM']} at USM, below it in {below}. With Holm's correction {told}.",
            as_published,
        ),
    ]


def _against_the_published() -> str:
    """M²LG-DG against the paper's other methods, each with phenotypes only if the paper says so."""
    rivals = results.networks()[1:]
    tests = {(one, site): test for one in rivals for site, test in results.delong(OWN, as_in_paper(one)).items()}
    adjusted = dict(zip(tests, holm([p for _, p in tests.values()]), strict=True))
    remaining = [
        f"`m2lgdg` {'above' if tests[key][0] > 0 else 'below'} {name(key[0])} at {key[1]}"
        for key, p in adjusted.items()
        if p < 0.05
    ]
    bare = sum(one not in WITH_PHENOTYPES for one in rivals)
    return (
        f"The paper's {len(rivals)} other methods as it has them ({bare} take no phenotypes; `m2lgdg` does), {len(tests)} "
        f"tests with a correction of their own. Below 0.05: {' and '.join(remaining) or 'none'}."
    )


# Ablations


def _ablated(study: str, method: str, variant: str) -> list[str]:
    if (method, variant) not in results.sites(study).index.droplevel(["target", "metric"]):
        return ["", "", ""]
    areas = [spread(scores_at((study, method, variant), target)) for target in TARGETS]
    mean, half = results.changes(study, method).loc[variant] if variant else (0, 0)
    return [*areas, interval(mean, mean - half, mean + half) if variant else ""]


@block("ablations")
def ablations() -> list[str]:
    """AUC without one part or another, of both frameworks; the paper's on REST-meta-MDD."""
    rows = []
    for variant, text in ABLATIONS.items():
        reported = published("rest-meta-mdd").get((f"m2lgdg: {variant or 'C4'}", "all", "AUC"))
        values = [cell for study, method in ABLATED for cell in _ablated(study, method, variant)]
        rows.append([text, *values, f"{reported + 1e-6:.1f}" if reported else ""])
    header = [f"`{method}`: NYU | USM | whole minus variant" for _, method in ABLATED]
    return table(["variant", *" | ".join(header).split(" | "), "paper, REST-meta-MDD"], rows)


# Every site


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
    trained = {method: study for study in TWENTY_NETWORKS for _, method, _ in results.complete(study)}
    return {method: at_twenty(study, method) for method, study in (peers | trained).items()}


@block("networks-at-20-sites")
def networks_at_twenty_sites() -> list[str]:
    """Networks at each of 20 sites, and the default against each of them, beside linear models."""
    trained = {method: study for study in TWENTY_NETWORKS for _, method, _ in results.complete(study)}
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
    own, alone, scan = ((TWENTY_NETWORKS[2], "m2lgdg", part) for part in ("", "M1", "M2"))
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
        "The logit of one more model, both with phenotypes, added to that of `connectome-adaptive` with the best of the "
        f"weights {', '.join(map(str, ADDED[:-1]))} and {ADDED[-1]}: at most {number(gains[most])} points by one of these "
        f"{len(networks)} networks ({name(most[1])}), and {number(best(phenotypes) - usual)} by M1. Probabilities of three "
        "trainings are averaged before."
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


# Other subjects, inputs and scans


SEX_AND_AGE = "abide-all/sex-age"  # has phenotypes in all rows: the scan alone would not differ
WITHOUT_SMALL = f"FD below 0.2 mm, without {SMALL}"
LIKE_IQ = "pairs of like IQ"
NO_GLOBAL = "no global signal regression, CC200"
OTHERS = {  # what differs -> study; every study has all linear models of `SHOWN`
    "all 1,035": results.TWENTY,
    WITHOUT_SMALL: LITTLE_MOTION,
    "no duplicate scans": "abide-all/unique",
    LIKE_IQ: "abide-all/iq",
    "sex and age, no IQ": SEX_AND_AGE,
    NO_GLOBAL: "abide-all/noglobal",
}
SHOWN = ("connectome-adaptive", "fc-adaptive", "tangent-pearson-ridge", "fc-svm", "fc-logistic", "phenotype-logistic")


def _alone_and_with(study: str, method: str) -> tuple[Model | None, Model]:
    """A method by the scan alone, None where the study has no such row, and with phenotypes."""
    if method == "phenotype-logistic" or study == SEX_AND_AGE:
        return None, (study, method, "")
    return (study, method, ""), (study, method, "phenotypes")


def _at_sites(model: Model) -> pd.Series:
    """AUC at each site, without the one where too few subjects move little."""
    areas = results.by_site(model)
    return areas.drop(SMALL) if model[0] == LITTLE_MOTION else areas


def _lost(study: str) -> dict[str, list[float]]:
    """Points that a model of the scan has less than on all subjects of the same sites, without and with phenotypes."""
    lost = {}
    for method in SHOWN[:-1]:
        pairs = zip(_alone_and_with(results.TWENTY, method), _alone_and_with(study, method), strict=True)
        lost[method] = [float((results.by_site(whole) - _at_sites(part)).mean()) for whole, part in pairs]  # at sites of both
    return lost


def _p_values(study: str) -> list[float]:
    """p over sites of what models of the scan have more or less than on all subjects, without and with phenotypes."""
    pairs = [
        (results.by_site(whole), _at_sites(part))
        for method in SHOWN[:-1]
        for whole, part in zip(_alone_and_with(results.TWENTY, method), _alone_and_with(study, method), strict=True)
    ]
    return [float(ttest_rel(whole[part.index], part).pvalue) for whole, part in pairs]


@block("other-subjects")
def other_subjects() -> list[str]:
    """Mean AUC over sites of linear models, without / with phenotypes, on other subjects, inputs and scans."""
    rows = []
    for method in SHOWN:
        row = [name(method)]
        for study in OTHERS.values():
            alone, given = _alone_and_with(study, method)
            row.append(" / ".join("-" if one is None else number(_at_sites(one).mean()) for one in (alone, given)))
        rows.append(row)
    moving, matched = _lost(LITTLE_MOTION), _lost(OTHERS[LIKE_IQ])
    losses = [value for both in moving.values() for value in both if value > 0]
    gaining = {method: [-value for value in both] for method, both in moving.items() if max(both) < 0}
    gained = ", ".join(f"{name(method)} gains {' / '.join(map(number, both))}" for method, both in gaining.items())
    few = results.predictions(LITTLE_MOTION).query("target == @SMALL")["subject"].nunique()
    own = ("connectome-adaptive", "phenotypes")
    still, pairs = (_at_sites((study, *own)) for study in (LITTLE_MOTION, OTHERS[LIKE_IQ]))
    all_there = [results.by_site((results.TWENTY, own[0], variant))[pairs.index].mean() for variant in ("", own[1])]
    still_p, pairs_p = _p_values(LITTLE_MOTION), _p_values(OTHERS[LIKE_IQ])
    unregressed = _lost(OTHERS[NO_GLOBAL])
    higher = {method: [-value for value in both] for method, both in unregressed.items() if max(both) < -2}
    best = [results.by_site(model) for model in _alone_and_with(OTHERS[NO_GLOBAL], SHOWN[0])]
    beside = [
        (best[i], results.by_site(model))
        for method in SHOWN[1:-1]
        for i, model in enumerate(_alone_and_with(OTHERS[NO_GLOBAL], method))
    ]
    verbal = results.by_site(("abide-all/viq", "phenotype-logistic", ""))
    sex_and_age = results.macro(SEX_AND_AGE).loc[("phenotype-logistic", "")]
    decided = results.scores((SEX_AND_AGE, "phenotype-logistic", ""), tuple(verbal.index))["proba"].groupby("target")
    unused = (decided.nunique() == 1).sum()
    return [
        *table(["model", *OTHERS], rows),
        "",
        *bullets(
            f"With little head motion {SMALL} keeps {few} subjects and is left out of that column. Beside all subjects of the "
            f"other {len(still)} sites, models of the scan lose {number(min(losses))} to {number(max(losses))} points, but "
            f"{gained}. None of these changes is clear over sites: the smallest p is {chance(min(still_p))}.",
            f"Pairs of like IQ are at {len(pairs)} sites. Beside all subjects of these sites, models of the scan lose "
            f"{number(min(map(min, matched.values())))} to {number(max(map(max, matched.values())))} points; "
            f"`connectome-adaptive` has {' / '.join(map(number, all_there))} there with all. Of the {len(pairs_p)} losses "
            f"{sum(p < 0.05 for p in pairs_p)} have a p over sites below 0.05, and {sum(p < 0.05 for p in holm(pairs_p))} with "
            "Holm's correction.",
            f"Without global signal regression {', '.join(map(name, higher))} are {number(min(map(min, higher.values())))} to "
            f"{number(max(map(max, higher.values())))} points higher than with it. `connectome-adaptive` differs from the "
            f"other models of the scan there by {number(max(abs((one - other).mean()) for one, other in beside))} at most "
            f"(smallest p over sites {chance(min(ttest_rel(*pair).pvalue for pair in beside))}, not corrected).",
            f"Verbal IQ alone: {number(verbal.mean())}. Sex and age alone: {spread(sex_and_age)} (95 % over sites); at "
            f"{unused} of {len(still) + 1} sites that model uses neither, and its AUC is 50.",
            f"Sites differ more than columns: the sd over sites of `connectome-adaptive` with phenotypes is "
            f"{number(still.std(ddof=1))} with little motion and {number(pairs.std(ddof=1))} in pairs.",
        ),
    ]


@block("repeats")
def repeats() -> list[str]:
    """M²LG-DG trained twice on the same kind of GPU: its cells in two folders."""
    studies = (PAPER, ABLATED[0][0])
    trained = [results.records(study, "m2lgdg") for study in studies]
    kept = [{(one["target"], one["seed"], one["learned"]["best_epoch"]) for one in records} for records in trained]
    tables = [results.predictions(study).query("method == 'm2lgdg' and variant == ''") for study in studies]
    first, second = (own.set_index(["target", "seed", "subject"])["proba"] for own in tables)
    apart = (first - second).abs().groupby(level=["target", "seed"]).max()
    areas = [f"{spread(scores_at((studies[1], 'm2lgdg', ''), target))} ({target})" for target in TARGETS]
    return bullets(
        f"**`m2lgdg` trained twice on an H200 in bf16**: the same epoch is kept in {len(kept[0] & kept[1])} of {len(apart)} "
        f"trainings. The largest difference of a probability in a training is {number(apart.min(), 3)} to "
        f"{number(apart.max(), 3)}, median {number(apart.median(), 3)}. The second AUC is {' and '.join(areas)}."
    )
