"""The table of docs/results.md on fewer subjects, other phenotypes and other preprocessing: linear models at every site."""

import pandas as pd
from scipy.stats import ttest_rel

from m2lgdg.study.stats import holm
from page_tables import committed as results
from page_tables.committed import LITTLE_MOTION, SMALL, Model
from page_tables.writing import block, bullets, chance, name, number, spread, table

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
