"""The study files in `studies/`: each resolves, against a cohort with the sites it is for, to the cells it says it has."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from m2lgdg import make_cohort, run_study
from m2lgdg.cohort import Parcellation
from m2lgdg.data.synthetic import REST_SITES
from m2lgdg.method import ANY_SCAN
from m2lgdg.registry import METHODS, PAPER, SIMPLE, load_methods
from m2lgdg.study.config import read_study
from m2lgdg.study.plan import distinct, make_cells
from m2lgdg.study.predictions import read_predictions

STUDIES = Path(__file__).parents[1] / "studies"
FILES = sorted(STUDIES.glob("*.toml"))
ABIDE_SITES = (
    *("CALTECH", "CMU", "KKI", "LEUVEN_1", "LEUVEN_2", "MAX_MUN", "NYU", "OHSU", "OLIN", "PITT", "SBL", "SDSU", "STANFORD"),
    *("TRINITY", "UCLA_1", "UCLA_2", "UM_2", "USM"),
)
LINEAR, SLOW = "abide-paper-linear.toml", ("m2dc", "ufa-net")  # the slow ones have studies of their own
FAMILIES = ("abide-paper", "abide-atlases", "abide", "rest-meta-mdd")  # of studies with one cohort
COHORTS = {
    "abide-adapted": "abide-atlases",
    "abide-margin": "abide-paper",
    **{f"abide-structure{part}": "abide-structure" for part in ("", "-ablation", "-atlases", "-connectome", "-plus")},
    **{name: name for name in ("abide-structure-head", "abide-structure-matched", "abide-structure-paper")},
    **{name: name for name in ("rest-meta-mdd-connectomes", "abide-ii")},
    **{f"abide-all-{part}": f"abide-{part}" for part in ("motion", "unique", "iq", "noglobal")},
    "abide-default": "abide-structure",
}
AT_20_SITES = (
    *("abide-adapted", "abide-linear", "abide-networks", "abide-all", "abide-all-seeds", "abide-all-viq", "abide-all-sex-age"),
    *("abide-all-motion", "abide-all-unique", "abide-all-noglobal"),
)
TARGETS = {"abide": ["NYU", "USM"], "rest-meta-mdd": ["S9", "S15", "S20", "S21"]}


@pytest.fixture(scope="module")
def cohorts():
    """The sites of both releases, four people at each; the last cohort has six atlases."""
    sites = {"abide": ABIDE_SITES, "rest-meta-mdd": REST_SITES, "abide-atlases": (*ABIDE_SITES, "UM_1", "YALE")}
    small = {"lengths": (30, 40), "n_regions": 3}
    made = {name: make_cohort("tiny", sizes=dict.fromkeys(names, 4), **small) for name, names in sites.items()}
    first, *others = ("aal", "ho", "cc200", "ez", "tt", "dosenbach160")
    public = ("S2", "S3", "S5", "S6", "S11", "S12", "S13", "S16", "S18", "S22", "S23", "S24")
    matrices = make_cohort("tiny", sizes=dict.fromkeys(public, 4), **small).to_connectomes()
    made["rest-meta-mdd-connectomes"] = matrices
    second = [f"ABIDEII-{name}_1" for name in ("BNI", "EMC", "ETH", "GU", "IP", "IU", "KKI", "NYU", "OHSU", "SDSU", "TCD")]
    second += [f"ABIDEII-{name}" for name in ("OILH_2", "UCD_1", "USM_1")]
    made["abide-ii"] = make_cohort("tiny", sizes=dict.fromkeys(second, 4), **small)
    several = made["abide-atlases"]
    further = dict.fromkeys(others, Parcellation(several.rois, several.series))
    return made | {"abide-atlases": dataclasses.replace(several, atlas=first, parcellations=further)}


def cells_of(path, cohorts):
    study = read_study(path)
    cohort = COHORTS.get(path.stem) or next(name for name in FAMILIES if path.stem.startswith(name))
    assert Path(study.cohort).name == f"{cohort}.cohort"
    everywhere = path.stem in AT_20_SITES or "structure" in cohort
    sites = "abide-atlases" if everywhere else "abide" if cohort in ("abide-paper", "abide-iq") else cohort
    return make_cells(study, cohorts[sites])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_study_has_the_cells_and_trainings_it_says(path, cohorts):
    text = path.read_text()
    cells = cells_of(path, cohorts)
    assert [f"{len(cells)} cells"] == re.findall(r"\d+ cells", text)
    trainings = re.findall(r"(\d+) trainings", text) or [str(len(cells))]
    assert [str(len(distinct(cells)))] == trainings
    assert read_study(path).name == path.stem


def test_the_papers_study_has_all_methods_at_its_targets(cohorts):
    cells = cells_of(STUDIES / "rest-meta-mdd.toml", cohorts)
    networks = Counter(cell.method for cell in cells if cell.method in PAPER and not cell.variant)
    assert networks == dict.fromkeys(PAPER, 5 * len(TARGETS["rest-meta-mdd"]))
    wanted = [*PAPER, *METHODS.with_role(*SIMPLE), "brainnet-transformer", "combat-logistic"]
    rows = {(name, "") for name in wanted}
    rows |= {(name, "phenotypes") for name in wanted if "phenotypes" in load_methods()[name].variants}
    assert {(cell.method, cell.variant) for cell in cells} == rows and len(rows) == 48
    assert {cell.target for cell in cells} == set(TARGETS["rest-meta-mdd"])


@pytest.mark.parametrize(("release", "ablated"), [("abide", "abide-paper"), ("rest-meta-mdd", "rest-meta-mdd")])
def test_ablations_and_sweeps_are_the_papers(release, ablated, cohorts):
    method = load_methods()["m2lgdg"]
    ablation = cells_of(STUDIES / f"{ablated}-ablation.toml", cohorts)
    assert {cell.variant for cell in ablation} == {"", "M1", "M2", "C1", "C2", "C3", "C4"}
    sweep = cells_of(STUDIES / f"{release}-sensitivity.toml", cohorts)
    found = {field: set() for field in method.space}
    for cell in sweep:
        if cell.variant:
            field = cell.variant.split("=")[0]
            found[field].add(cell.fields[field])
    assert found == {field: set(values) for field, values in method.space.items()}
    assert len({cell.seed for cell in sweep}) == 3
    assert {cell.target for cell in ablation} == {cell.target for cell in sweep} == set(TARGETS[release])


def test_the_papers_subjects_have_the_papers_methods(cohorts):
    """The paper gives phenotypes to M²LG-DG and MM-GTUNets only; the second study gives them to all others."""
    cells = cells_of(STUDIES / "abide-paper.toml", cohorts)
    counts = Counter((cell.method, cell.variant) for cell in cells)
    assert counts == {(name, ""): 10 for name in (*PAPER, "brainnet-transformer", "erm") if name not in SLOW}
    for name in SLOW:
        own = cells_of(STUDIES / f"abide-paper-{name}.toml", cohorts)
        assert Counter((cell.method, cell.fields["phenotypes"]) for cell in own) == {(name, False): 10, (name, True): 10}
    assert {cell.target for cell in cells} == set(TARGETS["abide"]) and {cell.seed for cell in cells} == set(range(5))
    taking = {cell.method for cell in cells if cell.fields.get("phenotypes")}
    assert taking == {"m2lgdg", "mm-gtunets"}
    second = cells_of(STUDIES / "abide-paper-phenotypes.toml", cohorts)
    assert all(cell.fields["phenotypes"] for cell in second)
    assert {cell.method for cell in second} == {name for name, _ in counts} - taking
    linear = Counter((cell.method, cell.fields.get("phenotypes", False)) for cell in cells_of(STUDIES / LINEAR, cohorts))
    without_brain = {("prior", False), ("phenotype-logistic", False)}
    models = {*METHODS.with_role(*SIMPLE), "combat-logistic"} - {name for name, _ in without_brain}
    assert linear == dict.fromkeys({*without_brain, *((name, given) for name in models for given in (False, True))}, 2)


def test_the_papers_table_is_at_every_site_without_and_with_phenotypes(cohorts):
    cells = cells_of(STUDIES / "abide-all.toml", cohorts)
    assert {cell.seed for cell in cells} == {0} and len({cell.target for cell in cells}) == 20
    assert set(Counter((cell.method, cell.variant) for cell in cells).values()) == {20}
    peers = {*METHODS.with_role(*SIMPLE), "combat-logistic"}
    wanted = {*PAPER, "m2lgdg-connectome", "brainnet-transformer", "erm"} | peers
    assert {cell.method for cell in cells} == wanted
    takes = {(cell.method, bool(cell.fields.get("phenotypes"))) for cell in cells}
    assert takes >= {(name, given) for name in wanted - {"prior", "phenotype-logistic"} for given in (False, True)}
    rows = {(cell.method, cell.variant): cell.fields for cell in cells}
    assert rows["m2dc", ""]["select_from"] == 0.5 and rows["m2dc", "last-epoch"]["select_from"] == 1.0
    assert (
        rows["mm-gtunets", ""]["used_phenotypes"] == ("sex", "age")
        and not rows["mm-gtunets", "all-phenotypes"]["used_phenotypes"]
    )
    three = cells_of(STUDIES / "abide-all-seeds.toml", cohorts)
    assert Counter((cell.variant, cell.seed) for cell in three) == {(v, s): 20 for v in ("", "M1", "M2") for s in range(3)}
    own = {cell.key for cell in cells if cell.method == "m2lgdg"}
    assert own == {cell.key for cell in three if cell.seed == 0}  # so that --reuse copies them


def test_what_is_the_same_training_runs_once_and_has_all_its_rows(tmp_path):
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["fc-logistic"], "seeds": [0], "targets": ["east"]}
    study["sweep"] = {"fc-logistic": {"site_folds": [2, 5]}}  # 5 is the default
    summary = run_study(study, tmp_path / "out")
    assert (summary.total, summary.done) == (2, 2)
    assert run_study(study, tmp_path / "out").reused == 2
    table = read_predictions(tmp_path / "out")
    proba = {variant: one["proba"].tolist() for variant, one in table.groupby("variant")}
    assert list(proba) == ["", "site_folds=2", "site_folds=5"]
    assert proba[""] == proba["site_folds=5"] != proba["site_folds=2"]


def test_depression_has_every_method_that_takes_connectomes(cohorts):
    cells = cells_of(STUDIES / "rest-meta-mdd-connectomes.toml", cohorts)
    taking = {name for name, cls in load_methods().items() if cls.takes == ANY_SCAN and not cls.sees_batch}
    assert {cell.method for cell in cells} == taking - {"average"}
    network = {cell.variant for cell in cells if cell.method == "m2lgdg-connectome"}
    assert network == {"", "scan", "plus", "M1", "M2", "C1", "C2", "C3", "C4"}
    rows = {(cell.method, bool(cell.fields.get("phenotypes"))) for cell in cells}
    assert all({(name, False), (name, True)} <= rows for name in taking - {"average", "prior", "phenotype-logistic"})
