"""Tables of docs/structure.md: what tables of brain structure add on ABIDE, and what they are not."""

from m2lgdg.study.stats import holm
from page_tables.atlases import UNSEEN
from page_tables.committed import Model, by_site, paired_trainings
from page_tables.writing import block, chance, interval, number, table

FOLDER, DEFAULT = "abide-structure", "connectome-adaptive"
ROWS = {  # what a model sees -> method, variant
    "phenotypes": ("phenotype-logistic", ""),
    "structure": (DEFAULT, "structure"),
    "structure and phenotypes": (DEFAULT, "structure-phenotypes"),
    "scan": (DEFAULT, "no-structure"),
    "scan and structure": (DEFAULT, ""),
    "scan and phenotypes": (DEFAULT, "scan-phenotypes"),
    "all three": (DEFAULT, "phenotypes"),
}
WITHOUT = {  # a row with structure -> the same without it
    "structure and phenotypes": "phenotypes",
    "scan and structure": "scan",
    "all three": "scan and phenotypes",
}
COHORTS = {"1,035 subjects": "linear", "the paper's 884": "paper", "754 in pairs of like age and sex": "matched"}


def model(study: str, row: str) -> Model:
    """Where the predictions of a row are."""
    return (f"{FOLDER}/{study}", *ROWS[row])


def adds(pairs: dict[str, tuple[tuple[Model, ...], tuple[Model, ...]]]) -> dict[str, list[str]]:
    """Difference with its interval, sites above and p with Holm's correction over the pairs, by title."""
    tests = {title: paired_trainings(*pair) for title, pair in pairs.items()}
    adjusted = dict(zip(tests, holm([test["p"] for test in tests.values()]), strict=True))
    return {
        title: [
            interval(test["difference"], *test["interval"]),
            "{} of {}".format(test["counts"][0], sum(test["counts"])),
            chance(adjusted[title]),
        ]
        for title, test in tests.items()
    }


@block("structure-inputs")
def inputs() -> list[str]:
    """AUC of the default by what it sees, in one atlas and in two, and what structure adds to each."""
    models = {row: model("linear", row) for row in ROWS}
    models |= {f"{row}, two atlases": (f"{FOLDER}/atlases", *ROWS[row]) for row in ("scan and phenotypes", "all three")}
    without = WITHOUT | {"all three, two atlases": "scan and phenotypes, two atlases"}
    added = adds({row: ((models[row],), (models[other],)) for row, other in without.items()})
    rows = []
    for row, one in models.items():
        own, four = by_site(one), list(UNSEEN)
        values = (own.mean(), own.drop(four).mean(), own[four].mean(), *own[four])
        rows.append([row, *map(number, values), *added.get(row, [""] * 3)])
    header = ["the model sees", "20 sites", "16 sites", "the four", *UNSEEN, "structure adds (95 % over subjects)"]
    return table([*header, "sites above", "p over sites, Holm"], rows)


@block("structure-cohorts")
def cohorts() -> list[str]:
    """Mean AUC over 20 sites of the same models on three sets of subjects, and what structure adds there."""
    rows = []
    added = {
        title: adds({row: ((model(study, row),), (model(study, other),)) for row, other in WITHOUT.items()})
        for title, study in COHORTS.items()
    }
    for row in ROWS:
        shown = [row]
        for title, study in COHORTS.items():
            shown += [number(by_site(model(study, row)).mean()), *added[title].get(row, [""])[:1]]
        rows.append(shown)
    header = [part for title in COHORTS for part in (title, "structure adds")]
    return table(["the model sees", *header], rows)


@block("structure-head-size")
def head_size() -> list[str]:
    """Mean AUC over 20 sites with head size as the only table."""
    study = f"{FOLDER}/head"
    rows = []
    for title, variant in {
        "head size": "structure",
        "scan and phenotypes": "scan-phenotypes",
        "all three": "phenotypes",
    }.items():
        own = by_site((study, DEFAULT, variant))
        rows.append([title, number(own.mean()), number(own[list(UNSEEN)].mean())])
    return table(["the model sees", "20 sites", "the four"], rows)
