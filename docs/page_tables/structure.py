"""Tables of docs/structure.md: what tables of brain structure add on ABIDE, and what they are not."""

from m2lgdg.study.stats import holm
from page_tables.atlases import UNSEEN
from page_tables.committed import SMALL, Model, averaged_trainings, by_seed, by_site, paired_trainings, scores
from page_tables.writing import block, bullets, chance, interval, number, table

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
AREAS = ["20 sites", "16 sites", "the four", *UNSEEN]
ADDED = ["structure adds (95 % over subjects)", "sites above", "p over sites, Holm"]
COHORTS = {"1,035 subjects": "linear", "the paper's 884": "paper", "754 in pairs of like age and sex": "matched"}

NETWORK = "m2lgdg-connectome"
WHOLE, BARE = ((f"{FOLDER}/connectome", NETWORK, variant) for variant in ("", "no-structure"))
PLUS_TWO: Model = (f"{FOLDER}/plus", NETWORK, "")
LINEAR, LINEAR_BARE = ((f"{FOLDER}/linear", DEFAULT, variant) for variant in ("phenotypes", "scan-phenotypes"))
DEFAULTS: dict[str, Model] = {"one atlas": LINEAR, "two atlases": (f"{FOLDER}/atlases", *ROWS["all three"])}
NETWORKS: dict[str, tuple[Model, ...]] = {  # several models: their mean logit
    "structure": ((f"{FOLDER}/ablation", NETWORK, "structure"),),
    "scan and structure": ((f"{FOLDER}/ablation", NETWORK, "no-phenotypes"),),
    "scan and phenotypes": (BARE,),
    "all three": (WHOLE,),
    "scan and phenotypes, variant `plus`": (BARE, LINEAR_BARE),
    "all three, variant `plus`": (WHOLE, LINEAR),
    "all three, variant `plus`, two atlases": (PLUS_TWO,),
}


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
    return table(["the model sees", *AREAS, *ADDED], rows)


def added_to_the_network() -> dict[str, list[str]]:
    """What structure adds to the network, and the best model minus the default by atlases, with one correction for all four."""
    bare = {row: row.replace("all three", "scan and phenotypes") for row in list(NETWORKS)[3:6:2]}
    pairs = {row: (NETWORKS[row], NETWORKS[other]) for row, other in bare.items()}
    return adds(pairs | {title: ((PLUS_TWO,), (one,)) for title, one in DEFAULTS.items()})


@block("structure-network")
def network() -> list[str]:
    """AUC of the network by what it sees, what structure adds to it, and the best model against the default."""
    added = added_to_the_network()
    rows = [[row, str(len(by_seed(*models))), *areas(*models), *added.get(row, [""] * 3)] for row, models in NETWORKS.items()]
    joined, four = averaged_trainings(PLUS_TWO), list(UNSEEN)
    told = ["in {} {}, {} sites above, p {}".format(title, *added[title]) for title in DEFAULTS]
    return [
        *table(["the network sees", "trainings", *AREAS, *ADDED], rows),
        "",
        *bullets(
            f"Variant `plus` in two atlases minus the default on all three: {'; '.join(told)}.",
            f"Its single trainings at 20 sites: {', '.join(number(one) for one in by_seed(PLUS_TWO).mean(axis=1))}. The mean "
            f"logit of the three: {number(joined.mean())} at 20 sites, {number(joined.drop(four).mean())} at the 16, "
            f"{number(joined[four].mean())} at the four.",
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
