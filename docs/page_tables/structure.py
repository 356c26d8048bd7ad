"""Tables of docs/structure.md: what tables of brain structure add on ABIDE, and what they are not."""

from m2lgdg.study.stats import holm
from page_tables.atlases import UNSEEN
from page_tables.committed import SMALL, Model, by_site, paired_trainings, scores
from page_tables.writing import block, bullets, chance, interval, number, table

FOLDER, DEFAULT = "abide-structure", "connectome-adaptive"
FORMER = "abide-structure/former"  # the default with which the settings of tables were chosen
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
AREAS = ["20 sites", "16 sites", "the four", *UNSEEN]
ADDED = ["structure adds (95 % over subjects)", "sites above", "p over sites, Holm"]
COHORTS = {"1,035 subjects": "linear", "the paper's 884": "paper", "754 in pairs of like age and sex": "matched"}

LINEAR, LINEAR_BARE = ((f"{FOLDER}/linear", DEFAULT, variant) for variant in ("phenotypes", "scan-phenotypes"))
TWO_ATLASES, TWO_BARE = ((f"{FOLDER}/atlases", *ROWS[row]) for row in ("all three", "scan and phenotypes"))


def model(study: str, row: str) -> Model:
    """Where the predictions of a row are."""
    return (f"{FOLDER}/{study}", *ROWS[row])


def areas(*models: Model) -> list[str]:
    """Mean AUC over sites, those of choice and the others, and at each of the latter."""
    own, four = by_site(*models), list(UNSEEN)
    return [number(value) for value in (own.mean(), own.drop(four).mean(), own[four].mean(), *own[four])]


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


def linear_models() -> dict[str, Model]:
    """Rows of the first table, in one atlas and in two."""
    two = {f"{row}, two atlases": (f"{FOLDER}/atlases", *ROWS[row]) for row in ("scan and phenotypes", "all three")}
    return {row: model("linear", row) for row in ROWS} | two


def added_to_the_default() -> dict[str, list[str]]:
    """What structure adds to each row of the first table, with one correction for all."""
    models, without = linear_models(), WITHOUT | {"all three, two atlases": "scan and phenotypes, two atlases"}
    return adds({row: ((models[row],), (models[other],)) for row, other in without.items()})


@block("structure-inputs")
def inputs() -> list[str]:
    """AUC of the default by what it sees, in one atlas and in two, and what structure adds to each."""
    added = added_to_the_default()
    rows = [[row, *areas(one), *added.get(row, [""] * 3)] for row, one in linear_models().items()]
    pair = ("scan and phenotypes", "all three")
    bare, whole = (by_site(model("linear", row)) for row in pair)
    gain, four = whole - bare, list(UNSEEN)
    former = paired_trainings(*(((FORMER, *ROWS[row]),) for row in reversed(pair)))
    return [
        *table(["the model sees", *AREAS, *ADDED], rows),
        "",
        *bullets(
            f"All three minus scan and phenotypes: {number(gain.drop(four).mean())} at the 16 sites and "
            f"{number(gain[four].mean())} at the four ({', '.join(f'{site} {number(gain[site])}' for site in four)}).",
            f"For the former default it is {interval(former['difference'], *former['interval'])} at the 20 sites.",
        ),
    ]


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
    bare, whole = (by_site(model("paper", row)).drop(SMALL).mean() for row in ("scan and phenotypes", "all three"))
    few = int((scores(model("paper", "all three"), (SMALL,))["label"] >= 0).sum())
    sentence = (
        f"Of the paper's subjects, {few} are of {SMALL}, whose AUC goes by steps of 17 points. Over the other 19 sites, scan "
        f"and phenotypes have {number(bare)} and all three {number(whole)}: structure adds {number(whole - bare)}."
    )
    return [*table(["the model sees", *header], rows), "", *bullets(sentence)]


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
