"""Tables of docs/results.md on the paper's subjects, at NYU and USM; `twenty_sites` and `other_subjects` have its others."""

import numpy as np

from m2lgdg.metrics import auc
from m2lgdg.study.stats import holm
from page_tables import committed as results
from page_tables.committed import (
    LINEAR,
    PAPER,
    TARGETS,
    TWENTY,
    WITH_PHENOTYPES,
    Model,
    as_in_paper,
    of_paper,
    paired,
    published,
    scores_at,
)
from page_tables.writing import block, bullets, chance, interval, name, number, spread, table

FURTHER = ("m2lgdg-connectome", "erm", "brainnet-transformer")  # networks that the paper does not have
OWN: Model = (PAPER, "m2lgdg", "")
CONNECTOME: Model = ("paper/connectome", "m2lgdg-connectome", "")
BEST: Model = (TWENTY, "connectome-adaptive", "phenotypes")
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
