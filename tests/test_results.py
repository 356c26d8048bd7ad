"""The committed results: whole and without a path, and every number that pages take from them, computed again another way."""

import importlib
import itertools
import json
import re
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from scipy.stats import t as student

from m2lgdg import leave_one_site_out, make, read
from m2lgdg.metrics import auc
from m2lgdg.report.contents import read_contents
from m2lgdg.study.config import read_study
from m2lgdg.study.stats import cell_scores, macro_scores, over_seeds, site_scores

pytestmark = pytest.mark.pages
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
STUDIES = {  # cells
    "paper/networks": 140,
    "paper/phenotypes": 120,
    "paper/m2dc": 20,
    "paper/linear": 40,
    "paper/ablation": 70,
    "paper/connectome": 30,
    "paper/ufa-net": 20,
    "paper/scan": 6,
    "all-sites/adapted": 40,
    "atlases/linear": 160,
    "atlases/phenotypes": 160,
    "abide-structure/linear": 140,
    "abide-structure/atlases": 60,
    "abide-structure/paper": 140,
    "abide-structure/matched": 140,
    "abide-structure/head": 100,
    "abide-structure/former": 140,
    "abide-all/linear": 400,
    "abide-all/networks": 280,
    "abide-all/mm-gtunets": 60,
    "abide-all/gpu": 320,
    "abide-all/networks-seeds": 240,
    "abide-all/iib-seeds": 80,
    "abide-all/cdann-seeds": 80,
    "abide-all/brainnet-transformer": 40,
    "abide-all/m2lgdg-connectome": 40,
    "abide-all/m2lgdg-connectome-seeds": 60,
    "abide-all/m2lgdg-seeds": 120,
    "abide-all/motion": 220,
    "abide-all/unique": 220,
    "abide-all/iq": 198,
    "abide-all/noglobal": 220,
    "abide-all/sex-age": 200,
    "abide-all/viq": 20,
    "abide-ii/linear": 84,
    "abide-ii/peers": 56,
    "abide-ii/network": 42,
    "rest-meta-mdd-connectomes/linear": 240,
    "rest-meta-mdd-connectomes/networks": 900,
    "rest-meta-mdd-connectomes/genm": 72,
    "rest-meta-mdd-connectomes/more": 432,
    "sensitivity/m2lgdg": 66,
    "sensitivity/margin": 36,
}
RECENT = ("paper/m2dc", "paper/ufa-net", "paper/scan", "sensitivity/margin")
TARGETS = ("NYU", "USM")
FOUR = [*TARGETS, "UM_1", "YALE"]  # sites kept out of the searches
METRICS = ("AUC", "ACC", "SEN", "SPE", "F1")
LINEAR_AT_20 = ("connectome-adaptive", "tangent-pearson-ridge", "fc-logistic")
BEST = ("connectome-adaptive", "phenotypes")
NETWORK = "m2lgdg-connectome"  # ours, which the pages count apart from the other networks
FORMS = {
    "m2lgdg": ("M2", ""),
    "mm-gtunets": ("imaging", "all-phenotypes"),
    NETWORK: ("scan", ""),
    "phenotype-logistic": ("none", ""),
}  # variants by the scan alone and with phenotypes; of the others "" and "phenotypes"
TABLES = importlib.import_module("tables")  # docs/tables.py
PLACES = [(page, key) for page in TABLES.pages() for key in TABLES.blocks(page)]


def rows_of(key):
    """Rows of a generated table as lists of cells."""
    lines = [line for line in TABLES.lines(key) if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def text_of(key):
    """Generated sentences, on one line."""
    return " ".join(line.strip() for line in TABLES.lines(key) if not line.startswith("|"))


def page(name):
    """Text of a page on one line."""
    return " ".join((ROOT / name).read_text().split())


def numbers(*cells):
    return [float(value) for cell in cells for value in re.findall(r"-?\d+(?:\.\d+)?", cell)]


def named(cell):
    """(method, variant) of a cell such as: `fc-svm` with phenotypes."""
    return re.search(r"`([a-z0-9-]+)`", cell)[1], "phenotypes" if "with phenotypes" in cell else ""


def close(values):
    return pytest.approx(values, abs=0.0501)


def as_chance(text):
    return 0.0005 if text.startswith("<") else float(text)


def paired_p(first, second):
    """Two-sided p of the paired t-test, from its formula."""
    difference = np.asarray(first) - np.asarray(second)
    t = difference.mean() / (difference.std(ddof=1) / len(difference) ** 0.5)
    return 2 * student.sf(abs(t), len(difference) - 1)


def holm(p_values):
    """Holm's adjusted p values, by its definition."""
    order, adjusted = np.argsort(p_values), np.empty(len(p_values))
    for rank, i in enumerate(order):
        adjusted[i] = max((len(order) - k) * p_values[order[k]] for k in range(rank + 1))
    return np.minimum(adjusted, 1)


def delong_p(label, first, second):
    """Two-sided p of two AUCs on the same subjects, from the components of every patient and every control."""
    components = []
    for score in (first, second):
        patients, controls = score[label == 1][:, None], score[label == 0][None, :]
        above = (patients > controls) + 0.5 * (patients == controls)
        components.append((above.mean(axis=1), above.mean(axis=0)))
    (one, other), (two, another) = components
    variance = (one - two).var(ddof=1) / len(one) + (other - another).var(ddof=1) / len(other)
    return 2 * norm.sf(abs(one.mean() - two.mean()) / variance**0.5)


def inside_sites(differences):
    """Mean of as many differences at NYU as at USM, with both ends of its interval, from their spread inside each."""
    spread = np.mean([differences.xs(site, level="target").var(ddof=1) for site in TARGETS])
    half = student.ppf(0.975, len(differences) - 2) * (spread / len(differences)) ** 0.5
    return [differences.mean(), differences.mean() - half, differences.mean() + half]


@pytest.fixture(scope="module")
def predictions():
    tables = {name: pd.read_csv(RESULTS / name / "predictions.csv", keep_default_na=False) for name in STUDIES}
    return {name: table.astype({"seed": int, "label": int}) for name, table in tables.items()}


@pytest.fixture(scope="module")
def scores(predictions):
    """Mean and sd over seeds in percent by study, method, variant, target and metric."""
    keys, result = ["method", "variant", "target", "metric"], {}
    for name, table in predictions.items():
        for row in site_scores(cell_scores(table)).itertuples():
            result[name, *(getattr(row, key) for key in keys)] = (100 * row.mean, 100 * row.sd)
    return result


@pytest.fixture(scope="module")
def areas(scores):
    """Mean and sd of AUC over seeds by study, method, variant and target."""
    return {key[:4]: value for key, value in scores.items() if key[4] == "AUC"}


@pytest.fixture(scope="module")
def records():
    """What was learned, by study, method and variant; then by target and seed."""
    result = {}
    for name in (name for name in STUDIES if name.startswith("paper/") or name == "sensitivity/margin"):
        for record in map(json.loads, (RESULTS / name / "records.jsonl").read_text().splitlines()):
            own = result.setdefault((name, record["method"], record["variant"]), {})
            own[record["target"], record["seed"]] = record["learned"] | {"seconds": record["seconds"]}
    return result


@pytest.fixture(scope="module")
def published():
    table = pd.read_csv(ROOT / "studies" / "paper-abide.csv", dtype={"value": str})
    return table.set_index(["method", "target", "metric"])["value"]


def halves_up(text):
    return str(Decimal(text).quantize(Decimal("0.1"), rounding=ROUND_HALF_UP))


def subjects(predictions, model, target):
    """Labels and probabilities averaged over seeds, by subject."""
    own = predictions[model[0]].query("method == @model[1] and variant == @model[2] and target == @target")
    return own.groupby("subject")[["label", "proba"]].mean().sort_index()


def model_of(method, phenotypes):
    """(study, method, variant) on the paper's subjects; None where it was not run so."""
    linear = json.loads((RESULTS / "paper/linear/study.json").read_text())["methods"]
    if method == "m2lgdg-connectome":
        return "paper/connectome", method, "" if phenotypes else "scan"
    if method in ("m2lgdg", "mm-gtunets", "phenotype-logistic"):
        return ("paper/linear" if method in linear else "paper/networks", method, "") if phenotypes else None
    if method in (*linear, "m2dc", "ufa-net"):
        return f"paper/{'linear' if method in linear else method}", method, "phenotypes" if phenotypes else ""
    return "paper/phenotypes" if phenotypes else "paper/networks", method, ""


# The folders


@pytest.mark.parametrize("name", STUDIES)
def test_the_study_is_whole_and_tells_no_place(name, predictions):
    table, folder = predictions[name], RESULTS / name
    cells = table.assign(variant=table["variant"].str.replace(r",? ?adapted$", "", regex=True))  # one training for both tracks
    assert len(cells.drop_duplicates(["method", "variant", "seed", "target"])) == STUDIES[name]
    assert not read_contents(folder).missing()
    assert set(json.loads((folder / "study.json").read_text())["methods"]) == set(table["method"])
    for file in folder.rglob("*.json*"):
        assert not re.search(r"/(home|root|tmp|work|mnt|opt)/", file.read_text()), file


@pytest.mark.parametrize("name", [name for name in STUDIES if "/connectome" in name or name in RECENT])
def test_the_recorded_fields_are_those_of_the_study_file(name):
    """What was trained is what `studies/` repeats."""
    recorded = json.loads((RESULTS / name / "study.json").read_text())
    study = read_study(ROOT / "studies" / f"{recorded['name']}.toml")
    for key in ("methods", "seeds", "variants", "sweep"):
        assert (getattr(study, key) or []) == (recorded[key] or []), key
    (method,) = study.methods
    given = dict(study.method.get(method, {}))
    fields = json.loads(json.dumps(make(method, given.pop("variant", None), **given).fields()))
    trained = recorded["method"][method]
    assert {key: fields[key] for key in trained} == trained


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith(("abide-all/", "sensitivity/"))])
def test_a_part_of_a_study_was_trained_as_its_file_says(name):
    """Folders with some methods or seeds of a study: their fields, variants and sweeps are those that `studies/` repeats."""
    recorded = json.loads((RESULTS / name / "study.json").read_text())
    study = read_study(ROOT / "studies" / f"{recorded['name']}.toml")
    assert set(recorded["methods"]) <= set(study.methods)
    assert not study.targets or recorded["targets"] == study.targets
    for method, trained in recorded["method"].items():
        fields = make(method, **study.method.get(method, {})).fields()
        assert json.loads(json.dumps(fields)) == trained, method
        for key in ("variants", "sweep"):
            assert dict(recorded[key]).get(method) == dict(getattr(study, key)).get(method), (method, key)


# The blocks of the pages


@pytest.mark.parametrize(("page", "key"), PLACES, ids=[f"{page.name}: {key}" for page, key in PLACES])
def test_a_table_of_a_page_is_that_of_the_results(page, key):
    assert TABLES.blocks(page)[key] == TABLES.lines(key), "python docs/tables.py writes it anew"


def test_every_table_has_its_place():
    assert sorted(key for _, key in PLACES) == sorted(TABLES.BLOCKS)
    for page in TABLES.pages():
        text = page.read_text()
        assert text.count("<!-- table:") == text.count("<!-- end of table -->") == len(TABLES.blocks(page)), page.name


def test_a_changed_table_is_named_and_written_anew(tmp_path, monkeypatch, capsys):
    page, whole = tmp_path / "results.md", (ROOT / "docs" / "results.md").read_text()
    page.write_text(whole.replace("| `m2lgdg` | - | - | - | 66.9", "| `m2lgdg` | - | - | - | 69.6"))
    monkeypatch.setattr(TABLES, "pages", lambda: [page])
    for arguments, code, said in ((["--check"], 1, "Differs"), ([], 0, "Rewritten")):
        assert page.read_text() != whole
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        assert TABLES.main() == code
        assert capsys.readouterr().out == f"{said}: results.md: paper-table\n"
    assert page.read_text() == whole
    page.write_text("<!-- table: nothing -->\n<!-- end of table -->\n")
    with pytest.raises(SystemExit, match="no table 'nothing'"):
        TABLES.main()


# Their rows, by other ways to compute them


def test_networks_on_the_papers_subjects(areas, published):
    rows = rows_of("paper-table")
    assert len(rows) == 17
    for cell, *cells in rows:
        name, _ = named(cell)
        for phenotypes, shown in ((False, cells[:3]), (True, cells[3:])):
            model = model_of(name, phenotypes)
            if model is None:
                assert shown == ["-", "-", "-"]
                continue
            values = [areas[*model, target] for target in TARGETS]
            expected = [*values[0], *values[1], (values[0][0] + values[1][0]) / 2]
            assert numbers(*(text.split(" [")[0] for text in shown)) == close(expected)
            reported = []
            if (name, "NYU", "AUC") in published.index and phenotypes == (name in ("m2lgdg", "mm-gtunets")):
                both = [Decimal(published[name, target, "AUC"]) for target in TARGETS]
                reported = [halves_up(str(value)) for value in (*both, sum(both) / 2)]
            assert re.findall(r"\[([\d.]+)\]", " ".join(shown)) == reported


def test_counts_of_the_papers_table(areas, published):
    names = list(dict.fromkeys(published.index.get_level_values("method")))

    def at(name, phenotypes):
        return np.array([areas[*model_of(name, phenotypes), target][0] for target in TARGETS])

    here = {name: at(name, name in ("m2lgdg", "mm-gtunets")) for name in names}
    rivals, text = [name for name in names if name != "m2lgdg"], text_of("paper-table")
    beyond = {name for name in rivals if all(here[name] > [float(published[name, t, "AUC"]) for t in TARGETS])}
    found = re.search(r"both sites: (\d+) of (\d+) compared networks, all but (.*?)\.", text).groups()
    assert [int(found[0]), int(found[1])] == [len(beyond), 13]
    assert set(re.findall(r"`(.*?)`", found[2])) == set(rivals) - beyond
    above = [
        sum(all(value > here["m2lgdg"]) for value in values)
        for values in ([here[name] for name in rivals], [at(name, True) for name in rivals])
    ]
    assert numbers(re.search(r"Above `m2lgdg` at both sites: (.*?)\.", text)[1]) == [above[0], 13, above[1], 13]
    below = np.sum([here[name] < at("phenotype-logistic", True) for name in names], axis=0)
    assert numbers(re.search(r"phenotype-logistic`: (.*?)\.", text)[1]) == [below[0], len(names), below[1]]


def test_linear_models(areas, predictions):
    macro = macro_scores(site_scores(cell_scores(predictions["abide-all/linear"]))).query("metric == 'AUC'")
    rows = rows_of("linear-models")
    assert len(rows) == 10
    for cell, *cells, every in rows:
        name, _ = named(cell)
        models = [model for phenotypes in (False, True) if (model := model_of(name, phenotypes))]
        sites = [[areas[*model, target][0] for model in models] for target in TARGETS]
        assert numbers(*(text.replace("- /", "") for text in cells)) == close([*sites[0], *sites[1], *np.mean(sites, axis=0)])
        own = macro[macro["method"] == name].set_index("variant").sort_index()
        assert set(own["sites"]) == {20}
        halves = 2.0930 * own["sd"] / 20**0.5  # Student's t with 19 degrees of freedom
        assert numbers(every.replace("- /", "")) == close(np.ravel(100 * np.array([own["mean"], halves]).T))
    # the paper's subjects in the order that verbal IQ gives them, and all of them at every site
    motion, viq, paper = (predictions[name] for name in ("abide-all/motion", "abide-all/viq", "paper/linear"))
    own = viq[viq["subject"].isin(paper["subject"])]
    expected = [100 * auc(*own.query("target == @site")[["label", "proba"]].to_numpy().T) for site in TARGETS]
    assert numbers(text_of("linear-models")) == close(expected)
    both = motion.merge(paper, on=["method", "variant", "target", "subject", "label"], suffixes=("", "_alone"))
    assert motion["subject"].nunique() == 884 and both["subject"].nunique() == 232
    assert both["proba"].to_numpy() == pytest.approx(both["proba_alone"].to_numpy(), abs=5e-4)


def test_linear_models_by_the_scan_alone_beside_networks_of_the_paper(areas, published):
    """The sentence at the top of docs/results.md."""
    names = [name for name in set(published.index.get_level_values("method")) if name not in ("m2lgdg", "mm-gtunets")]
    networks = {site: max(areas[*model_of(name, False), site][0] for name in names) for site in TARGETS}
    linear = [named(row[0])[0] for row in rows_of("linear-models")][:-1]
    each = {site: [areas[*model_of(name, False), site][0] for name in linear] for site in TARGETS}
    assert min(each["NYU"]) > networks["NYU"]
    assert [round(value) for value in (min(each["USM"]), max(each["USM"]), networks["USM"])] == [82, 85, 84]
    assert "at USM between 82 and 85, like the best of them (83 to 84)" in page("docs/results.md")


def test_genm_after_the_change(areas):
    """Two pages say what it has with phenotypes and without at 20 sites, one also on depression and what it had there."""

    def both(study):
        own = [[value[0] for key, value in areas.items() if key[:3] == (study, "genm", one)] for one in ("phenotypes", "")]
        return np.mean(own, axis=1)

    for name in ("docs/results.md", "docs/methods.md"):
        said = page(name).partition("t 20 sites, after the change, it has")[2]
        assert numbers(said)[:2] == close(both("abide-all/networks"))
    said = page("docs/methods.md").partition("depression it has")[2]
    folders = (f"rest-meta-mdd-connectomes/{part}" for part in ("genm", "more"))
    assert numbers(said)[:4] == close(np.ravel([both(folder) for folder in folders]))


def test_linear_models_on_other_subjects(areas, predictions):
    studies = [f"abide-all/{end}" for end in ("linear", "motion", "unique", "iq", "sex-age", "noglobal")]

    def by_site(study, method, variant):
        own = pd.Series({key[3]: value[0] for key, value in areas.items() if key[:3] == (study, method, variant)})
        assert len(own) == (18 if study.endswith("/iq") else 20)
        return own.drop("CMU") if study.endswith("/motion") else own  # five subjects are left there

    def over_sites(study, method, variant, sites=None):
        own = by_site(study, method, variant)
        return own.mean() if sites is None else own[sites].mean()

    rows = rows_of("other-subjects")
    assert len(rows) == 6
    for cell, *cells in rows:
        method, _ = named(cell)
        for study, text in zip(studies, cells, strict=True):
            one = method == "phenotype-logistic" or study.endswith("/sex-age")
            expected = [over_sites(study, method, variant) for variant in (("",) if one else ("", "phenotypes"))]
            assert text.startswith("- / ") == one and numbers(text.replace("- /", "")) == close(expected)
    pairs = [key[3] for key in areas if key[:3] == ("abide-all/iq", *BEST)]
    text = text_of("other-subjects")
    expected = [over_sites("abide-all/linear", BEST[0], variant, pairs) for variant in ("", "phenotypes")]
    assert numbers(re.search(r"has (.*?) there with all", text)[1]) == close(expected)
    methods = [named(row[0])[0] for row in rows][:-1]
    changes, p_values, there = {}, {}, {}
    for end in ("motion", "iq", "noglobal"):
        both = {(one, variant): by_site(f"abide-all/{end}", one, variant) for one in methods for variant in ("", "phenotypes")}
        usual = {key: by_site("abide-all/linear", *key)[own.index] for key, own in both.items()}
        changes[end] = {key: (own - usual[key]).mean() for key, own in both.items()}
        p_values[end] = np.array([paired_p(own, usual[key]) for key, own in both.items()])
        there[end] = both
    losses = [-value for value in changes["motion"].values() if value < 0]
    gains = {key: value for key, value in changes["motion"].items() if value > 0}
    assert {one for one, _ in gains} == {"tangent-pearson-ridge"} and max(changes["iq"].values()) < 0
    said = re.search(
        r"keeps (\d+) .* other (\d+) sites, .*? lose ([\d.]+) to ([\d.]+) points, but .*? gains (.*?)\. None of .*? p is", text
    )
    people = next(table for study, table in predictions.items() if study == "abide-all/motion").query("target == 'CMU'")
    assert [int(one) for one in said.groups()[:2]] == [people["subject"].nunique(), 19]
    assert numbers(*said.groups()[2:]) == close([min(losses), max(losses), *gains.values()])
    lost = re.search(r"like IQ are at 18 sites\. .*? lose ([\d.]+) to ([\d.]+) points", text).groups()
    assert numbers(*lost) == close([-max(changes["iq"].values()), -min(changes["iq"].values())])
    assert numbers(text.split("smallest p is")[1])[0] == pytest.approx(min(p_values["motion"]), abs=0.000501)
    assert min(p_values["motion"]) > 0.05  # "none of these changes is clear"
    found = re.search(r"Of the (\d+) losses (\d+) have a p over sites below 0\.05, and (\d+) with", text).groups()
    counted = [sum(p < 0.05) for p in (p_values["iq"], holm(p_values["iq"]))]
    assert list(map(int, found)) == [len(p_values["iq"]), *counted]
    words = re.search(r"regression (.*?) are ([\d.]+) to ([\d.]+) points higher", text)
    higher = re.findall(r"`(.*?)`", words[1])
    gained = [changes["noglobal"][one, variant] for one in higher for variant in ("", "phenotypes")]
    assert set(higher) == set(methods) - {"connectome-adaptive", "fc-adaptive"}
    assert numbers(*words.groups()[1:]) == close([min(gained), max(gained)])
    pairs = [(there["noglobal"][BEST[0], key[1]], own) for key, own in there["noglobal"].items() if key[0] != BEST[0]]
    furthest, p = numbers(re.search(r"scan there by (.*?), not", text)[1])
    assert furthest == close(max(abs((one - other).mean()) for one, other in pairs))
    assert p == pytest.approx(min(paired_p(*pair) for pair in pairs), abs=0.000501)
    decided = next(table for study, table in predictions.items() if study == "abide-all/sex-age")
    decided = decided.query("method == 'phenotype-logistic'").groupby("target")["proba"].nunique()
    assert f"at {(decided == 1).sum()} of 20 sites that model uses neither" in text
    sex = by_site("abide-all/sex-age", "phenotype-logistic", "")
    assert numbers(re.search(r"Sex and age alone: (.*?) \(", text)[1]) == close([sex.mean(), 2.0930 * sex.std() / 20**0.5])
    verbal = over_sites("abide-all/viq", "phenotype-logistic", "")
    assert numbers(re.search(r"IQ alone: ([\d.]+)\.", text)[1]) == close([verbal])
    told = numbers(text.split("phenotypes is")[1])
    assert told == close([by_site(f"abide-all/{end}", *BEST).std(ddof=1) for end in ("motion", "iq")])


def test_costs_of_networks(records):
    for cell, *cells in rows_of("network-costs"):
        models = [model for phenotypes in (False, True) if (model := model_of(named(cell)[0], phenotypes))]
        own = [one for model in models for one in records[model].values()]
        assert len(own) == 10 * len(models)
        seconds = [one["seconds"] for one in own]
        assert numbers(*cells[:2]) == pytest.approx([min(seconds), max(seconds), np.median(seconds)], abs=0.501)
        assert float(cells[2]) == pytest.approx(max(one["peak_memory_gib"] for one in own), abs=0.00501)


def test_the_committed_run_of_m2lgdg(scores, published, records):
    learned = records["paper/networks", "m2lgdg", ""]
    for (target, *cells, validation, paper), expected in zip(rows_of("m2lgdg-abide"), TARGETS, strict=True):
        assert target == expected and float(paper) == float(published["m2lgdg", target, "AUC"])
        values = [value for metric in METRICS[:4] for value in scores["paper/networks", "m2lgdg", "", target, metric]]
        assert numbers(*cells) == pytest.approx(values, abs=0.00501)
        best = [100 * one["history"][one["best_epoch"] - 1]["val_auc"] for key, one in learned.items() if key[0] == target]
        assert len(best) == 5 and numbers(validation) == close([np.mean(best), np.std(best, ddof=1)])


def test_which_metrics_of_m2lgdg_are_near_the_papers(scores, published):
    """Within one sd of the paper's table, but for those that the page names, with both values."""
    sd = {"NYU": {"AUC": 3.56, "ACC": 4.22, "SEN": 14.77, "SPE": 17.53, "F1": 4.33}}
    sd["USM"] = {"AUC": 2.79, "ACC": 3.77, "SEN": 10.12, "SPE": 17.23, "F1": 4.23}
    here = {(target, metric): scores["paper/networks", "m2lgdg", "", target, metric][0] for target in sd for metric in METRICS}
    paper = {key: float(published["m2lgdg", *key]) for key in here}
    apart = [key for key in here if abs(here[key] - paper[key]) > sd[key[0]][key[1]]]
    assert apart == [("USM", "SEN"), ("USM", "SPE"), ("USM", "F1")]
    said = (
        " ".join((ROOT / "docs" / "results.md").read_text().split()).partition("but not sensitivity")[2].partition("there.")[0]
    )
    assert numbers(said.replace("F1", "")) == close([value for key in apart for value in (here[key], paper[key])])


def test_terms_of_the_losses(records):
    """From the history of each epoch; `losses` of the records is made of it."""
    rows = rows_of("loss-terms")
    assert [row[0] for row in rows] == ["ce", "similarity", "orthogonality", "difference", "contrast"]
    for i, key in enumerate((("paper/networks", "m2lgdg", ""), ("paper/connectome", "m2lgdg-connectome", ""))):
        learned = list(records[key].values())
        assert len(learned) == 10 and all(epoch["difference"] == 0 for one in learned for epoch in one["history"])
        for term, *cells in rows:
            epochs = [[one["history"][0][term] for one in learned], [kept_epoch(one)[term] for one in learned]]
            for text, values in zip(cells[2 * i : 2 * i + 2], epochs, strict=True):
                assert (numbers(text) * 2)[:2] == pytest.approx([min(values), max(values)], abs=0.0000501)


def test_which_terms_acted(records):
    """Epochs counted and averaged here, from the histories."""
    rows = rows_of("acted-terms")
    assert len(rows) == 11
    folders = {"m2dc": "paper/m2dc", "ufa-net": "paper/ufa-net", "m2lgdg-connectome": "paper/connectome"}
    for cell, entropy, beside in rows:
        method = named(cell)[0]
        histories = [one["history"] for one in records[folders.get(method, "paper/networks"), method, ""].values()]
        main = "query" if method == "m2dc" else "ce"

        def values(term, histories=histories):
            return [[epoch[term] for epoch in history if term in epoch] for history in histories]

        base = np.mean([np.mean(each) for each in values(main)])
        assert numbers(entropy) == pytest.approx([base], abs=0.00501)
        shown = dict(text.split(" ", 1) for text in beside.split("; "))
        present = {term for history in histories for epoch in history for term in epoch if not term.startswith("val_")}
        assert present - {*shown} == ({main, "unit"} if method == "braingnn" else {main})
        for term, text in shown.items():
            each = values(term)
            share = np.mean([abs(value) > 1e-6 for value in itertools.chain(*each)])
            flat = sum(max(one) - min(one) <= 0.02 * max(map(abs, one)) for one in each)
            if text == "never":
                assert share == 0
                continue
            assert numbers(text)[0] == pytest.approx(100 * abs(np.mean([np.mean(one) for one in each])) / base, rel=0.051)
            often = re.search(r"in (\d+) % of epochs", text)
            assert float(often[1]) == pytest.approx(100 * share, abs=0.501) if often else share >= 0.995
            part = re.search(r"constant in (\d+) of (\d+)", text)
            assert [flat, len(each)] == list(map(int, part.groups())) if part else flat == ("constant" in text) * len(each)


def kept_epoch(learned):
    return learned["history"][learned["best_epoch"] - 1]


def test_comparisons_at_nyu_and_usm(predictions):
    rows, told, p_values = rows_of("paper-comparisons"), [], []
    assert len(rows) == 8
    for text, difference, *tests in rows:
        first, second = re.fullmatch(r"`(\S+)` minus (.*)", text).groups()
        models = model_of(first, True), model_of(second.strip("`"), True)
        if second.startswith("its variant"):
            study = {"m2lgdg": "paper/ablation", "m2lgdg-connectome": "paper/connectome"}[first]
            models = (study, first, ""), (study, first, second.split()[-1])
        apart = []
        for target, cell in zip(TARGETS, tests, strict=True):
            one, two = (subjects(predictions, model, target) for model in models)
            label, probas = one["label"].to_numpy().astype(int), [own["proba"].to_numpy() for own in (one, two)]
            apart.append(100 * (auc(label, probas[0]) - auc(label, probas[1])))
            points, p = re.fullmatch(r"(-?[\d.]+) \((.*)\)", cell).groups()
            assert float(points) == close(apart[-1])
            told.append(as_chance(p))
            p_values.append(delong_p(label, *probas))
        middle, low, high = numbers(difference.replace("to ", ""))
        assert middle == close(np.mean(apart)) and low < middle < high
    assert told == pytest.approx(holm(np.array(p_values)), abs=0.000501)


def test_all_models_against_m2lgdg(predictions, areas, published):
    own = {target: subjects(predictions, ("paper/networks", "m2lgdg", ""), target) for target in TARGETS}
    studies = {f"paper/{end}" for end in ("networks", "phenotypes", "linear", "m2dc", "ufa-net")}
    others = {key[:3] for key in areas if key[0] in studies and key[1] not in ("m2lgdg", "prior") and key[2] != "sparse"}
    others |= {("paper/connectome", "m2lgdg-connectome", variant) for variant in ("", "scan")}
    tests = []
    for model in others:
        for target in TARGETS:
            other = subjects(predictions, model, target)
            label = other["label"].to_numpy().astype(int)
            probas = [one["proba"].to_numpy() for one in (other, own[target])]
            tests.append((target, auc(label, probas[0]) - auc(label, probas[1]), delong_p(label, *probas)))
    above = [sum(d > 0 and p < 0.05 for site, d, p in tests if site == target) for target in TARGETS]
    below = sum(d < 0 and p < 0.05 for _, d, p in tests)
    pattern = (
        r"All (\d+) other .*?, (\d+) DeLong .*? in (\d+) at NYU and (\d+) at USM, below it in (\d+)\. .*? (\d+|none) remain"
    )
    found = [int(value.replace("none", "0")) for value in re.search(pattern, text_of("paper-comparisons")).groups()]
    assert found == [len(others), len(tests), *above, below, (holm(np.array([p for *_, p in tests])) < 0.05).sum()]
    tests = {}
    for name in sorted(set(published.index.get_level_values("method")) - {"m2lgdg"}):
        for target in TARGETS:
            other = subjects(predictions, model_of(name, name == "mm-gtunets"), target)
            label, probas = other["label"].to_numpy().astype(int), [own[target]["proba"].to_numpy(), other["proba"].to_numpy()]
            tests[f"`m2lgdg` {'above' if auc(label, probas[0]) > auc(label, probas[1]) else 'below'} `{name}` at {target}"] = (
                delong_p(label, *probas)
            )
    adjusted = dict(zip(tests, holm(np.array(list(tests.values()))), strict=True))
    words = re.search(r"The paper's 13 .*?, (\d+) tests .* Below 0\.05: (.*?)\.$", text_of("paper-comparisons")).groups()
    assert words == (str(len(tests)), " and ".join(key for key, p in adjusted.items() if p < 0.05))


@pytest.fixture(scope="module")
def at_twenty(predictions):
    """Predictions of a model at 20 sites, all seeds, by (method, variant)."""
    studies = ("linear", "networks", "networks-seeds", "iib-seeds", "cdann-seeds", "mm-gtunets")
    studies += ("gpu", "m2lgdg-seeds", "brainnet-transformer", NETWORK)
    together = pd.concat([predictions[f"abide-all/{study}"] for study in studies])
    models = dict(iter(together.groupby(["method", "variant"])))
    assert all(len(table) == 1035 * table["seed"].nunique() for table in models.values())
    return models


def single_trainings(table):
    """(seed, target) AUC in percent."""
    each = table.groupby(["seed", "target"])[["label", "proba"]]
    return each.apply(lambda part: 100 * auc(*part.to_numpy().T)).unstack()


def test_trainings_at_twenty_sites(at_twenty):
    three = set()
    for cell, shown, *_ in rows_of("networks-at-20-sites"):
        method, _ = named(cell)
        seeds = {len(single_trainings(table)) for (name, _), table in at_twenty.items() if name == method}
        trained = method not in (*LINEAR_AT_20, "phenotype-logistic")
        assert shown == (str(*seeds) if trained else "") and seeds <= {1, 3}
        three |= {method} if seeds == {3} else set()
    rows = {named(cell)[0]: cells for cell, *cells in rows_of("three-trainings")}
    assert rows and set(rows) == three
    ranges, gains, within = {}, {}, []
    for method, (each, sd, changed, averaged) in rows.items():
        forms = FORMS.get(method, ("", "phenotypes"))
        scan, given = (single_trainings(at_twenty[method, variant]).mean(axis=1) for variant in forms)
        assert numbers(each) == close(list(given)) and numbers(sd) == close([given.std(ddof=1)])
        assert numbers(changed) == close(list(given - scan))
        table = at_twenty[method, forms[1]].assign(logit=lambda one: np.log(one["proba"] / (1 - one["proba"])))
        mean = table.groupby(["target", "subject"])[["label", "logit"]].mean().groupby("target")
        areas = [auc(part["label"].to_numpy().astype(int), part["logit"].to_numpy()) for _, part in mean]
        assert numbers(averaged) == close([100 * np.mean(areas)])
        ranges[method], gains[method] = np.ptp(given), 100 * np.mean(areas) - given.mean()
        within += [] if method == "m2lgdg" else list(abs(given - scan) <= np.ptp(given))
    text = text_of("three-trainings")
    assert numbers(text.split("by up to")[1])[0] == close(max(ranges.values()))
    assert f"`m2lgdg`, {sum(within)} of {len(within)} changes" in text
    assert numbers(re.sub("`.*?`", "", text.split("on average, by")[1])) == close([min(gains.values()), max(gains.values())])


def test_what_is_said_of_the_trainings_at_twenty_sites():
    """How many have one training, hours of two runs on two cores, and which epochs a network can keep."""
    shown = {named(cell)[0]: count for cell, count, *_ in rows_of("networks-at-20-sites") if count}
    assert shown.pop(NETWORK) == "1"
    counts, text = list(shown.values()), page("docs/results.md")
    words = {10: "ten"}[counts.count("1")]
    assert len(counts) == 16 and f"{words} of the sixteen networks had one training each, and `{NETWORK}` one" in text
    runs = {"CPU trains": ("networks", "mm-gtunets"), "further trainings": ("networks-seeds", "iib-seeds", "cdann-seeds")}
    for run, studies in runs.items():
        seconds = sum(record["seconds"] for study in studies for record in recorded(study))
        assert numbers(text.split(f"{run} (")[1])[0] == close(seconds / 2 / 3600)
    fields = {}
    for study in ("networks", "mm-gtunets", "gpu", "brainnet-transformer", NETWORK):
        fields |= json.loads((RESULTS / "abide-all" / study / "study.json").read_text())["method"]
    network = fields.pop(NETWORK)
    assert network["validation_share"] == 0.05 and {one["validation_share"] for one in fields.values()} == {0.15}
    assert {one["select_after_warmup"] for one in fields.values()} == {True, False} and fields["m2dc"]["select_from"] == 0.5
    for study in (NETWORK, f"{NETWORK}-seeds"):
        assert {record["learned"]["best_epoch"] for record in recorded(study)} == {network["epochs"]}


def recorded(study):
    """Records of the cells of a study at 20 sites."""
    return map(json.loads, (RESULTS / "abide-all" / study / "records.jsonl").read_text().splitlines())


def test_every_linear_model_of_the_scan_is_above_every_network_at_twenty_sites(at_twenty):
    """As README and results.md say, of means over sites; also of three trainings averaged."""
    means = {method: at_twenty[method, "phenotypes"] for method, variant in at_twenty if variant == "phenotypes"}
    linear = json.loads((RESULTS / "abide-all/linear/study.json").read_text())["methods"]
    scan = [single_trainings(means[method]).mean().mean() for method in linear if method in means]
    averaged = [numbers(row[-1])[0] for row in rows_of("three-trainings")]
    others = (*linear, NETWORK)
    shown = [numbers(row[3])[0] for row in rows_of("networks-at-20-sites") if named(row[0])[0] not in others]
    assert len(scan) == 9 and len(shown) == 16 and min(scan) > max(*averaged, *shown)


def test_networks_at_twenty_sites(at_twenty):
    def at(method, variant):
        """AUC at the 20 sites, mean over trainings; None where there is no such model."""
        return single_trainings(at_twenty[method, variant]).mean() if (method, variant) in at_twenty else None

    def decisions(method, variant):
        own = at_twenty[method, variant].groupby(["target", "subject"])[["label", "proba"]].mean()
        return np.log(own["proba"] / (1 - own["proba"])), own["label"]

    peers = (*LINEAR_AT_20, "phenotype-logistic", NETWORK)
    rows = rows_of("networks-at-20-sites")
    order, gains, p_values, texts, shown = [], {}, [], [], []
    for cell, _, *cells in rows:
        method, _ = named(cell)
        both = [at(method, variant) for variant in FORMS.get(method, ("", "phenotypes"))]
        for text, own in zip(cells, both, strict=False):
            values = [] if own is None else [own.mean(), 2.0930 * own.std(ddof=1) / 20**0.5]  # Student's t, 19 degrees
            assert numbers(text) == close(values)
        given = both[1] is not None
        own = both[given]
        assert numbers(cells[2]) == close([own[FOUR].mean()])
        order.append((not given, -own.mean()))
        if method not in peers:
            shown.append((method, FORMS.get(method, ("", "phenotypes"))[given]))
            gains |= {method: own.mean() - both[0].mean()} if given else {}
        if method != "connectome-adaptive":
            best = at(BEST[0], BEST[1] if given else "")
            difference, low, high = numbers(cells[3].replace("to ", ""))
            assert difference == close((best - own).mean()) and low < difference < high
            if method in (*LINEAR_AT_20, NETWORK):  # docs/choosing.md has their p
                assert not cells[4]
            else:
                p_values.append(paired_p(best, own))
                texts.append(cells[4])
    assert order == sorted(order) and len(gains) == 16 and len(rows) == 21
    for text, p in zip(texts, holm(np.array(p_values)), strict=True):
        assert as_chance(text) == pytest.approx(p, abs=0.000501)
    text, areas_of = text_of("networks-at-20-sites"), {method: at(*model) for method, *model in ((m, m, v) for m, v in shown)}
    below = [method for method in gains if areas_of[method].mean() < at("fc-logistic", "phenotypes").mean()]
    assert f"{len(below)} of 16 networks" in text
    peer = at("fc-logistic", "phenotypes")
    behind = [(peer - areas_of[method]).mean() for method in gains]
    least, most, p = numbers(
        re.search(r"`fc-logistic`, by (.*?) points \(largest p over sites ([\d.]+)", text)[0].replace("-", "")
    )
    assert [least, most] == close([min(behind), max(behind)])
    assert p == pytest.approx(max(holm(np.array([paired_p(peer, areas_of[method]) for method in gains]))), abs=0.000501)
    bare = {method: at(method, FORMS.get(method, ("", "phenotypes"))[0]) for method in gains}
    behind = [(at("fc-logistic", "") - one).mean() for one in bare.values()]
    unclear = [p for p in holm(np.array([paired_p(at("fc-logistic", ""), one) for one in bare.values()])) if p > 0.05]
    told = re.search(r"alone 16 of 16 are below it, by ([\d.]+) \(.*? For (\d+) of .*?\(p ([\d.]+) to ([\d.]+)", text).groups()
    assert numbers(told[0]) == close([min(behind)]) and int(told[1]) == len(unclear)
    assert numbers(*told[2:]) == pytest.approx([min(unclear), max(unclear)], abs=0.000501)
    highest = max(bare, key=lambda method: bare[method].mean())
    assert f"the highest of the sixteen is `{highest}`" in page("docs/results.md")
    own_gain = gains.pop("m2lgdg")
    assert numbers(text.split("of them changes by")[1])[:2] == close([min(gains.values()), max(gains.values())])
    assert numbers(text.split("and that of `m2lgdg` by")[1])[0] == close(own_gain)
    assert numbers(text.split("as published,")[1])[0] == close(at("mm-gtunets", "").mean())
    assert numbers(text.split("its release, it has")[1])[0] == close(at("m2dc", "last-epoch").mean())

    usual, label = decisions(*BEST)
    sites = label.index.unique("target")

    def gain(method, variant):
        other, _ = decisions(method, variant)
        joined = [usual + weight * other for weight in (0.1, 0.3, 0.5, 1)]
        means = [np.mean([auc(label[site].to_numpy(), one[site].to_numpy()) for site in sites]) for one in joined]
        return 100 * max(means) - at(*BEST).mean()

    found = numbers(text.split("at most")[1])[0], numbers(text.split(" by M1")[0])[-1]
    assert found == close([max(gain(*model) for model in shown), gain("m2lgdg", "M1")])
    best = at(*BEST)
    assert f"lowest {best.min():.1f} ({best.idxmin()}), highest {best.max():.1f} ({best.idxmax()})" in text
    wide = 2.0930 * best.std(ddof=1) * (1 + 1 / 20) ** 0.5
    assert numbers(text.split("new site")[1])[-2:] == close([best.mean() - wide, best.mean() + wide])


def test_parts_of_m2lgdg_at_twenty_sites(at_twenty):
    text = text_of("m2lgdg-at-20-sites")
    models = (("m2lgdg", ""), ("m2lgdg", "M1"), ("phenotype-logistic", ""))
    whole, alone, simple = (single_trainings(at_twenty[model]).mean() for model in models)
    told = re.search(r"minus M1: (.*?)\. The whole minus `phenotype-logistic`: (.*?)\. M1 minus .*?: (.*?)\. The p", text)
    pairs = [(whole, alone), (whole, simple), (alone, simple)]
    adjusted = holm(np.array([paired_p(*pair) for pair in pairs]))
    assert min(adjusted) > 0.05  # "neither over sites"
    for words, (one, two), expected in zip(told.groups(), pairs, adjusted, strict=True):
        middle, low, high, p = numbers(words.replace("to ", ""))
        assert middle == close((one - two).mean()) and low < middle < high
        assert p == pytest.approx(expected, abs=0.000501)
        clear = (one is whole and high < 0) if two is alone else low > 0
        assert clear == (two is alone or one is alone)  # "both differences are clear over subjects", not the other one
    each = [single_trainings(at_twenty["m2lgdg", variant]) for variant in ("", "M1", "M2")]
    linked = [np.corrcoef(one.mean(), simple)[0, 1] for one in each]
    rows = rows_of("m2lgdg-at-20-sites")
    for (_, shown, mean, alike, link), variant, one, r in zip(rows, ("", "M1", "M2"), each, linked, strict=True):
        assert numbers(shown) == close(list(one.mean(axis=1))) and numbers(mean) == close([one.mean(axis=1).mean()])
        decided = at_twenty["m2lgdg", variant].pivot(index=["target", "subject"], columns="seed", values="proba")
        ranks = [part.rank() for _, part in decided.groupby("target")]
        pairs = [np.corrcoef(part[i], part[j])[0, 1] for part in ranks for i, j in ((0, 1), (0, 2), (1, 2))]
        assert numbers(alike) == pytest.approx([np.mean(pairs)], abs=0.00501)
        assert numbers(link) == pytest.approx([r], abs=0.00501)
        assert np.mean(pairs) > 0.5  # "its trainings rank the subjects of a site alike"
    half = 2.0930 * each[2].std(axis=1, ddof=1) / 20**0.5
    assert ((each[2].mean(axis=1) - 50).abs() < half).all()  # "each training is at chance"
    for variant in ("", "phenotypes"):  # "`ufa-net` is at chance without and with phenotypes"
        memorised = single_trainings(at_twenty["ufa-net", variant]).mean()
        assert abs(memorised.mean() - 50) < 2.0930 * memorised.std(ddof=1) / 20**0.5


def test_what_is_said_of_m2lgdg_and_its_encoders_at_twenty_sites(at_twenty, predictions):
    """The same numbers on README, results.md, m2lgdg.md, choosing.md and results/README.md."""

    def mean(method, variant=""):
        return single_trainings(at_twenty[method, variant]).mean().mean()

    own = [mean("m2lgdg", part) for part in ("", "M1", "M2")]
    for name in ("docs/results.md", "docs/m2lgdg.md"):
        found = re.search(r"([\d.]+), without the scan\s([\d.]+), and\s?with\s?the scan alone ([\d.]+)", page(name))
        assert numbers(*found.groups()) == close(own)
    readme = re.search(r"it has ([\d.]+), without the scan ([\d.]+) \(corrected p over sites ([\d.]+)\)", page("README.md"))
    assert numbers(*readme.groups()[:2]) == close(own[:2]) and f"p {readme[3]}." in text_of("m2lgdg-at-20-sites")
    scan, given, linear = mean(NETWORK, "scan"), mean(NETWORK), mean("connectome-adaptive")
    found = re.search(r"differ\sclearly from the default \(([\d.]+) and ([\d.]+), one training\)", page("docs/results.md"))
    assert numbers(*found.groups()) == close([scan, linear])
    alone = single_trainings(at_twenty[NETWORK, "scan"]).mean(), single_trainings(at_twenty["connectome-adaptive", ""]).mean()
    assert paired_p(*alone) > 0.05  # "does not differ clearly"
    found = re.search(
        r"One training by their commit has\s([\d.]+) as\s+well, and ([\d.]+) by the scan alone", page("docs/choosing.md")
    )
    assert numbers(*found.groups()) == close([given, scan])
    earlier = predictions[f"abide-all/{NETWORK}-seeds"].query("seed == 0")
    found = re.search(r"mean AUC ([\d.]+), and ([\d.]+) in", (RESULTS / "README.md").read_text())
    assert numbers(*found.groups()) == close([single_trainings(earlier).mean().mean(), given])


def test_the_interval_is_that_of_subjects_drawn_inside_site_and_class(predictions, monkeypatch):
    """Against every AUC of every draw computed anew, with fewer draws than the pages have."""
    committed = importlib.import_module("page_tables.committed")
    monkeypatch.setattr(committed, "DRAWS", 20)
    monkeypatch.setattr(committed, "bootstrap", committed.bootstrap.__wrapped__)  # without its cache
    models = [("abide-all/linear", *BEST), ("abide-all/linear", "fc-svm", "")]
    table = over_seeds(predictions["abide-all/linear"]).set_index(["method", "variant", "target", "subject"]).sort_index()
    one, two = (table.loc[model[1:]] for model in models)
    sites, drawn = sorted(set(one.index.get_level_values("target"))), []
    groups = [[np.flatnonzero(one.loc[site]["label"].to_numpy() == c) for c in (0, 1)] for site in sites]
    times = committed.bootstrap(tuple(tuple(map(len, site)) for site in groups))
    for i in range(20):
        differences = []
        for site, members, counts in zip(sites, groups, times, strict=True):
            label = one.loc[site]["label"].to_numpy()
            rows = np.concatenate([group.repeat(count[i].astype(int)) for group, count in zip(members, counts, strict=True)])
            assert len(rows) == len(label) and (label[rows] == np.sort(label)).all()  # as many of each class
            first, second = (auc(label[rows], model.loc[site]["proba"].to_numpy()[rows]) for model in (one, two))
            differences.append(first - second)
        drawn.append(100 * np.mean(differences))
    result = committed.paired(*models)
    assert result["interval"] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=1e-4)
    (own,) = committed.bootstrap(((4000, 1),))
    assert np.bincount(own[0][0].astype(int))[:3] / 4000 == pytest.approx([np.exp(-1), np.exp(-1), np.exp(-1) / 2], abs=0.03)
    assert sum(result["counts"]) == len(sites) == 20


def test_epochs_of_ufa_net_and_m2dc(records):
    ufa, m2dc = (
        [one for variant in ("", "phenotypes") for one in records[f"paper/{name}", name, variant].values()]
        for name in ("ufa-net", "m2dc")
    )
    assert len(ufa) == len(m2dc) == 20 and min(one["best_epoch"] for one in m2dc) >= 31
    kept = [100 * kept_epoch(one)["val_auc"] for one in ufa]
    first, last = ([one["history"][i]["ce"] for one in ufa] for i in (0, -1))
    aligned = [epoch["alignment"] for one in ufa for epoch in one["history"] if "alignment" in epoch]
    found = numbers(text_of("ufa-net-epochs").replace(",", ""))
    assert found[:2] == pytest.approx([np.mean(first), max(last)], abs=0.0051)
    assert found[3:6] == pytest.approx([min(kept), max(kept), np.median(kept)], abs=0.501)
    assert [found[2], *found[6:]] == [120, 0, aligned.count(0.0), len(aligned)]
    watched = pd.read_csv(RESULTS / "searches" / "m2dc-epochs.csv")
    assert watched["site"].nunique() == 16 and not set(FOUR) & set(watched["site"])
    means = {}
    for start in (1, 31):
        late = watched[watched["epoch"] >= start].sort_values("val_loss")
        means[start] = late.loc[late.groupby(["fold", "seed", "site"])["val_auc"].idxmax()].groupby("site")["auc"].mean()
    difference = means[31] - means[1]
    half = 2.1314 * difference.std() / 16**0.5  # Student's t with 15 degrees of freedom
    expected = [means[1].mean(), means[31].mean(), difference.mean(), difference.mean() - half, difference.mean() + half]
    assert numbers(text_of("m2dc-epochs").split("AUC")[1]) == close(expected)


def test_margins_and_the_scan_alone(areas, records):
    default = np.array([areas["sensitivity/margin", "m2lgdg", "", target] for target in TARGETS])
    for margin, acted, *sites, difference in rows_of("margins"):
        variant = "" if margin == "1.0" else f"margin={margin}"
        learned = records["sensitivity/margin", "m2lgdg", variant].values()
        losses = [epoch["difference"] for one in learned for epoch in one["history"]]
        assert numbers(acted) == [sum(loss > 0 for loss in losses), len(losses)]
        values = np.array([areas["sensitivity/margin", "m2lgdg", variant, target] for target in TARGETS])
        assert numbers(*sites) == close(values.ravel())
        if variant:
            mean, low, high = numbers(difference.replace("to ", ""))
            assert mean == close((values - default)[:, 0].mean()) and low < min(mean, 0) and high > max(mean, 0)
    for (_, *sites, kept), variant in zip(rows_of("scan-alone"), ("", "precision=fp32", "identity_sd=1.0"), strict=True):
        learned = records["paper/scan", "m2lgdg", variant]
        assert numbers(*sites) == close([areas["paper/scan", "m2lgdg", variant, target][0] for target in TARGETS])
        assert numbers(kept.replace(",", "")) == close([100 * kept_epoch(learned[target, 0])["val_auc"] for target in TARGETS])


def test_sweeps(predictions):
    """The table of five fields, and what is said below it: of `length`, and of a low temperature."""
    own = predictions["sensitivity/m2lgdg"]
    each = {name: single_trainings(table).loc[0, list(TARGETS)].mean() for name, table in own.groupby("variant")}
    swept = read_study(ROOT / "studies" / "abide-sensitivity.toml").sweep["m2lgdg"]
    default, changed = make("m2lgdg").fields(), {}
    rows = rows_of("sweeps")
    assert [row[0].strip("`") for row in rows] == list(swept)
    for (_, values, usual, low, high), (field, tried) in zip(rows, swept.items(), strict=True):
        assert numbers(values.replace(",", "")) == list(tried) and float(usual) == default[field]
        assert each[f"{field}={default[field]:g}"] == each[""]
        others = {value: each[f"{field}={value}"] for value in tried if value != default[field]}
        for text, (value, area) in zip((low, high), _ends(others), strict=True):
            assert numbers(text)[0] == close(area) and numbers(text)[1] == value
        changed |= {(field, value): area for value, area in others.items()}
    text, trained = text_of("sweeps"), pd.concat([predictions[f"abide-all/{part}"] for part in ("gpu", "m2lgdg-seeds")])
    trained = single_trainings(trained.query("method == 'm2lgdg' and variant == '' and target in @TARGETS")).mean(axis=1)
    here = numbers(text.split("The default has")[1])[0]
    assert [here, *numbers(re.search(r"sites\) have (.*?)\.( |$)", text)[1])] == close([each[""], *trained])
    less = np.array([each[""] - area for (field, _), area in changed.items() if field == "length"])
    apart = np.array([area - each[""] for (field, _), area in changed.items() if field != "length"])
    found = re.search(r"The (\d+) other values .*? by ([\d.]+) .*?: (\d+) are higher, (\d+) lower", text).groups()
    assert numbers(*found) == close([24, np.sqrt((apart**2).mean()), (apart > 0).sum(), (apart < 0).sum()])
    found = numbers(text.split("`length` are")[1].replace(" to ", " "))
    lower = less - (each[""] - trained.mean())
    assert found == close([less.min(), less.max(), lower.min(), lower.max()])
    assert apart.max() < np.ptp(trained)  # "no value shows a gain"
    cold = own.query("variant == 'temperature=0.01' and target == 'USM'")
    usual = own.query("variant == '' and target == 'USM'")
    found = re.search(r"AUC there is ([\d.]+), that\sof the default ([\d.]+)", page("docs/m2lgdg.md")).groups()
    assert numbers(*found) == close([float(single_trainings(one).iloc[0, 0]) for one in (cold, usual)])
    assert (cold["proba"] < 0.5).all()
    sites, seeds = 2, 3
    shown, trainings = re.search(r"three seeds are run: (\d+) cells, of which (\d+)", page("docs/m2lgdg.md")).groups()
    assert int(trainings) == sites * seeds * (1 + len(changed))
    assert int(shown) == sites * seeds * (1 + sum(map(len, swept.values())))


def _ends(areas):
    """The values with the lowest and the highest mean AUC, and these."""
    return sorted(areas.items(), key=lambda one: one[1])[:: len(areas) - 1]


def test_models_at_twenty_sites(predictions):
    def trained(study, method, variant):
        """(target, subject) logits of each training, and the labels."""
        own = predictions[study].query("method == @method and variant == @variant")
        tables = [table.set_index(["target", "subject"]).sort_index() for _, table in own.groupby("seed")]
        return [np.log(p / (1 - p)) for p in (table["proba"].clip(1e-9, 1 - 1e-9) for table in tables)], tables[0]["label"]

    (linear,), label = trained("abide-all/linear", *BEST)

    def by_site(decisions):
        each = [[100 * auc(label[site].to_numpy(), one[site].to_numpy()) for site in sites] for one in decisions]
        return pd.Series(np.mean(each, axis=0), sites)

    sites = label.index.unique("target")
    own, _ = trained("abide-all/m2lgdg-connectome-seeds", NETWORK, "")
    expected = {"`m2lgdg-connectome`": own, "... variant `plus`": [one + linear for one in own]}
    for method in ("fc-logistic", "fc-svm", "tangent-pearson-ridge", "connectome-ensemble", "fc-adaptive"):
        expected[f"`{method}`"], _ = trained("abide-all/linear", method, "phenotypes")
    expected["phenotypes alone (`phenotype-logistic`)"], _ = trained("abide-all/linear", "phenotype-logistic", "")
    rows = {row[0]: row for row in rows_of("twenty-sites")}
    assert rows.pop("`connectome-adaptive`")[8:] == ["", "", ""] and set(rows) == set(expected)
    reference, areas = by_site([linear]), {title: by_site(expected[title]) for title in rows}
    adjusted = holm(np.array([paired_p(values, reference) for values in areas.values()]))
    for (title, row), p in zip(rows.items(), adjusted, strict=True):
        values = areas[title]
        assert numbers(*row[1:8]) == close([values.mean(), values.drop(FOUR).mean(), values[FOUR].mean(), *values[FOUR]])
        middle, low, high = numbers(row[8])
        assert middle == close((values - reference).mean()) and low < middle < high
        assert numbers(row[9]) == [(values > reference + 1e-9).sum(), 20]
        assert as_chance(row[10]) == pytest.approx(p, abs=0.000501)
    text = page("docs/choosing.md")
    behind = (reference - areas["`tangent-pearson-ridge`"])[FOUR].mean()
    assert numbers(text.split("with no choice made for it, is")[1])[0] == close(behind)
    network = areas["`m2lgdg-connectome`"] - reference
    assert network.drop(FOUR).mean() > 0 and abs(network[FOUR].mean()) < 0.1501  # "equal within 0.1"
    plus = paired_p(areas["... variant `plus`"], reference)
    assert plus > 0.05 and numbers(rows["... variant `plus`"][8])[1] > 0  # "clear over subjects, not over sites"
    equal, told = areas["... variant `plus`"].mean(), text_of("connectome-settings")
    assert numbers(told.split("weights:")[1])[0] == close(equal)
    shares = [by_site([share * one + (1 - share) * linear for one in own]).mean() for share in np.linspace(0.2, 0.8, 7)]
    assert numbers(told.split("without these units, have")[1])[:2] == close([min(shares), max(shares)])


def auc_by_seed(decisions):
    """(seed, site) AUC in percent of (subject, seed) decisions."""
    label, site = (decisions.index.get_level_values(name).to_numpy() for name in ("label", "target"))
    each = {seed: values.to_numpy() for seed, values in decisions.items()}
    rows = {seed: {one: 100 * auc(label[site == one], own[site == one]) for one in set(site)} for seed, own in each.items()}
    return pd.DataFrame(rows).T


@pytest.fixture(scope="module")
def depression(predictions):
    """Predictions at 12 sites, decisions of a method or variant, and those of a method without and with phenotypes."""
    tables = {part: predictions[f"rest-meta-mdd-connectomes/{part}"] for part in ("linear", "networks", "genm", "more")}

    def trained(part, method, variant):
        own = tables[part].query("method == @method and variant == @variant")
        proba = own["proba"].clip(1e-9, 1 - 1e-9)
        table = own.assign(logit=np.log(proba / (1 - proba)))
        return table.pivot(index=["target", "subject", "label"], columns="seed", values="logit")

    def both(method):
        if method == "phenotype-logistic":
            return None, trained("linear", method, "")
        if method == "m2lgdg-connectome":
            return trained("networks", method, "scan"), trained("networks", method, "")
        if method == "mm-gtunets":
            return trained("more", method, "imaging"), trained("more", method, "")
        part = next(part for part, table in tables.items() if method in set(table["method"]))
        return trained(part, method, ""), trained(part, method, "phenotypes")

    return tables, trained, both


def test_depression_at_12_sites(depression):
    """Means over seeds and sites, with and without phenotypes, the order of rows, and both intervals."""
    tables, trained, both = depression
    assert set(tables["linear"]["subject"]) == set(tables["networks"]["subject"])
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in tables["linear"]["subject"])
    means = []
    for title, alone, together, over_subjects, over_sites, added in rows_of("mdd-methods"):
        without, own = both(named(title)[0])
        if "variant `plus`" in title:
            without, own = without.add(trained("linear", BEST[0], "")[0], axis=0), own.add(trained("linear", *BEST)[0], axis=0)
        areas = auc_by_seed(own)
        means.append(areas.mean(axis=None))
        assert numbers(together) == close([means[-1], *([areas.mean(axis=1).std()] if len(areas) > 1 else [])])
        sites = areas.mean()
        half = student.ppf(0.975, 11) * sites.std() / 12**0.5
        assert numbers(over_sites.replace("to ", "")) == close([sites.mean() - half, sites.mean() + half])
        low, high = numbers(over_subjects.replace("to ", ""))
        assert low < means[-1] < high and high - low < 12
        if without is None:
            assert alone == added == ""
            continue
        assert numbers(alone)[0] == close(auc_by_seed(without).mean(axis=None))
        middle, low, high = numbers(added.replace("to ", ""))
        assert middle == close(means[-1] - auc_by_seed(without).mean(axis=None)) and low < middle < high
    assert len(means) == 27 and means == sorted(means, reverse=True)
    simple = auc_by_seed(both("phenotype-logistic")[1]).mean(axis=None)
    network, svm, default = (
        auc_by_seed(both(name)[1]).mean(axis=None) - simple for name in ("m2lgdg-connectome", "fc-svm", BEST[0])
    )
    more = re.sub("`.*?`", "", re.search(r"excludes 0: none of 26 rows\. (.*)", text_of("mdd-beside-phenotypes"))[1])
    told = np.reshape(numbers(more.replace("to ", "")), (4, 3))  # of `plus` first
    assert told[:, 0] == close([means[0] - simple, network, svm, default])
    assert (told[:, 1] < 0).all() and (told[:, 0] > 0).all() and (told[:, 0] < told[:, 2]).all()
    assert max(means) >= 60 and means[[row[0] for row in rows_of("mdd-methods")].index("`phenotype-logistic`")] >= 50


def test_depression_by_part_of_the_network_and_by_site(depression):
    tables, trained, both = depression
    whole = auc_by_seed(trained("networks", "m2lgdg-connectome", "")).mean(axis=None)
    for title, own, less in rows_of("mdd-ablation"):
        variant = {"whole": "", "connectome alone, with contrastive loss": "scan"}.get(title, title.split(",")[0])
        value = auc_by_seed(trained("networks", "m2lgdg-connectome", variant)).mean(axis=None)
        assert numbers(own)[0] == close(value) and (not variant or numbers(less)[0] == close(value - whole))
    people = tables["linear"].drop_duplicates("subject").groupby("target")["label"]
    shown = [both(name)[1] for name in ("fc-svm", BEST[0], "m2lgdg-connectome", "phenotype-logistic")]
    areas = [auc_by_seed(one).mean() for one in shown]
    for site, size, patients, *cells in rows_of("mdd-sites"):
        assert (int(size), int(patients)) == (people.size()[site], people.sum()[site])
        assert numbers(*cells) == close([one[site] for one in areas])
    own, least, between, shown = numbers(text_of("mdd-power").split("12 sites")[-1].replace("80 %", "").replace("27 rows", ""))
    assert least == pytest.approx(50 + 2.8016 * own, abs=0.2) and shown == pytest.approx(2.8016 * between, abs=0.2)


def test_three_data_sets(predictions):
    """Means at development sites and at the others, of single models and of the mean of two logits."""

    def decisions(study, method, variant):
        own = predictions[study].query("method == @method and variant == @variant")
        logits = np.log(own["proba"] / (1 - own["proba"]))
        return own.assign(logit=logits).pivot(index=["target", "subject", "label"], columns="seed", values="logit")

    five = [f"ABIDEII-{site}_1" for site in ("NYU", "SDSU", "TCD", "UCD", "USM")]
    own = {"connectome-adaptive": "linear", "fc-logistic": "linear", "tangent-pearson-ridge": "peers"}
    found = {}
    for method, part in own.items():
        studies = "abide-all/linear", f"abide-ii/{part}", "rest-meta-mdd-connectomes/linear"
        found[f"`{method}`"] = [decisions(study, method, "phenotypes") for study in studies]
    name = "m2lgdg-connectome"
    studies = "abide-all/m2lgdg-connectome-seeds", "abide-ii/network", "rest-meta-mdd-connectomes/networks"
    network = [decisions(study, name, "") for study in studies]
    found[f"`{name}`"] = network
    linear = found["`connectome-adaptive`"]
    found["both: variant `plus`"] = [one.add(other[0], axis=0) for one, other in zip(network, linear, strict=True)]
    rows = {row[0]: row[1:] for row in rows_of("three-sets")}
    assert set(rows) == set(found)
    default = auc_by_seed(linear[1]).mean().mean()
    for title, sets in found.items():
        first, second, third = (auc_by_seed(one).mean() for one in sets)
        expected = [first.mean(), first.drop(FOUR).mean(), first[FOUR].mean()]
        expected += [second.mean(), second.drop(five).mean(), second[five].mean(), third.mean()]
        assert numbers(*rows[title][:7]) == close(expected)
        if title != "`connectome-adaptive`":
            middle, low, high = numbers(rows[title][7].replace("to ", ""))
            assert middle == close(second.mean() - default) and low < middle < high
    assert second.index.nunique() == 14 and first.index.nunique() == 20
    default_text, _, former_text = text_of("three-sets-others").partition("On ABIDE I")
    scan = [decisions("abide-ii/linear", "connectome-adaptive", ""), decisions("abide-ii/peers", "tangent-pearson-ridge", "")]
    alone, peer = (auc_by_seed(one).mean() for one in scan)
    added = auc_by_seed(linear[1]).mean() - alone
    expected = [alone.mean(), peer.mean(), alone[five].mean(), peer[five].mean(), added.drop(five).mean(), added[five].mean()]
    assert numbers(default_text) == close(expected)
    former = auc_by_seed(decisions("abide-structure/former", "connectome-adaptive", "scan-phenotypes")).mean()
    change = auc_by_seed(linear[0]).mean() - former
    expected = [former.mean(), former.drop(FOUR).mean(), 16, former[FOUR].mean(), change.drop(FOUR).mean(), change[FOUR].mean()]
    assert numbers(former_text) == close(expected)
    means = (
        pd.read_csv(RESULTS / "searches" / "default.csv")
        .groupby("rule")["AUC"]
        .agg(["mean", "size"])
        .query("size == 3")["mean"]
    )
    learned = [value for rule, value in means.items() if "discriminant" in rule]
    log = "steady 1 + swings 0.3 + amplitude 0.2 + log_euclidean"
    inside = [value for rule, value in means.items() if rule.startswith(log) and rule.endswith("[power 0: all; power 1: all]")]
    expected = [min(learned), max(learned), len(learned), min(inside), max(inside), means[f"{log} 0.5"], means.max()]
    assert numbers(text_of("default-search-others")) == close(expected)


def test_depression_with_permuted_labels_is_at_chance():
    found = pd.read_csv(RESULTS / "searches" / "rest-meta-mdd-permuted.csv").groupby("method")["AUC"]
    assert (found.size() == 20).all() and ((found.mean() - 50).abs() < 3 * found.std() / 20**0.5).all()
    assert ((found.mean() - 50).abs() < 3).all()


def test_the_learning_curve_of_depression_ends_at_the_study(depression):
    curve = pd.read_csv(RESULTS / "searches" / "rest-meta-mdd-curve.csv", keep_default_na=False).query("size == 1")
    for row in curve.itertuples():
        assert auc_by_seed(depression[1]("linear", row.method, row.variant)).mean(axis=None) == pytest.approx(row.AUC, abs=0.01)


def test_the_intercept_of_a_new_site(predictions):
    """The rule once more with other draws: the shift to the share of patients elsewhere, times n / (n + 2)."""
    own = predictions["all-sites/adapted"].query("method == 'connectome-adaptive' and variant == ''")
    known = {site: (np.log(p / (1 - p)), y) for site, y, p in _sites(own)}
    rows = {row[0]: row[1:] for row in rows_of("site-intercept")}
    draw, gains = np.random.default_rng(7), {}
    plain = {site: called(logits, labels) for site, (logits, labels) in known.items()}
    for scans, cells in rows.items():
        size, rates = 0 if scans == "none" else int(scans), []
        for site, (logits, labels) in known.items():
            elsewhere = np.concatenate([y for other, (_, y) in known.items() if other != site]).mean()
            for _ in range(20 if size else 1):
                order, moved = draw.permutation(len(labels)), logits.copy()
                batch, others = order[:size], order[size:]
                if size:
                    moved[others] += shift(logits[batch], elsewhere)
                    for one in batch:  # the rest of the batch, and one more subject where there is one
                        moved[one] += shift(logits[[*batch[batch != one], *others[:1]]], elsewhere)
                rates.append((site, *called(moved, labels)))
        table = pd.DataFrame(rates, columns=["site", "SEN", "SPE"]).groupby("site").mean()
        balanced, sensitivity, spread, specificity = (numbers(cells[i])[k] for i, k in ((0, 0), (1, 0), (1, 1), (2, 0)))
        apart = 1.5 if size else 0.0501  # of other draws; the page's own are exact
        assert [sensitivity, specificity] == pytest.approx(100 * table.mean().to_numpy(), abs=apart), scans
        assert balanced == pytest.approx(50 * table.sum(axis=1).mean(), abs=apart)
        if not size:
            assert spread == close(100 * table["SEN"].std())
            assert numbers(cells[3])[0] == close(np.mean([100 * auc(y, x) for x, y in known.values()]))
        gains[size] = 50 * (table.sum(axis=1) - pd.Series({site: sum(rate) for site, rate in plain.items()})).mean()
    text = text_of("site-intercept")
    middle, low, high = numbers(text.split("over sites:")[1].replace("to ", ""))[:3]
    assert middle == pytest.approx(gains[20], abs=1.5) and low < middle < high
    found = re.findall(r"patients (\d+) and (\d+) % if the share is assumed, (\d+) and (\d+) % if it is given", text)
    (few, more), given = ([tuple(map(int, one[:2])) for one in found], [tuple(map(int, one[2:])) for one in found])
    assert few[0] > more[0] and few[1] < more[1] and all(abs(one[i] - given[0][i]) <= 6 for one in given for i in (0, 1))


def shift(logits, share):
    """Intercept by which the mean probability of these subjects is the share of patients, times n / (n + 2)."""
    found = brentq(lambda s: (1 / (1 + np.exp(-np.round(logits, 1) - s))).mean() - share, -20, 20)
    return found * len(logits) / (len(logits) + 2)


def _sites(table):
    """Site, labels and probabilities."""
    return [(site, part["label"].to_numpy(), part["proba"].to_numpy()) for site, part in table.groupby("target")]


def called(logits, labels):
    """Sensitivity and specificity of the sign."""
    return (logits[labels == 1] >= 0).mean(), (logits[labels == 0] < 0).mean()


def test_what_structure_adds_to_the_default(predictions):
    methods = {"phenotypes": ("phenotype-logistic", ""), "structure": (BEST[0], "structure"), "scan": (BEST[0], "no-structure")}
    methods |= {"structure and phenotypes": (BEST[0], "structure-phenotypes"), "scan and structure": (BEST[0], "")}
    methods |= {"scan and phenotypes": (BEST[0], "scan-phenotypes"), "all three": BEST}
    methods["head size"] = methods["structure"]
    bare = {"structure and phenotypes": "phenotypes", "scan and structure": "scan", "all three": "scan and phenotypes"}

    def by_site(study, row):
        own = predictions[f"abide-structure/{study}"].set_index(["method", "variant"]).loc[methods[row]]
        return pd.Series({site: 100 * auc(*part[["label", "proba"]].to_numpy().T) for site, part in own.groupby("target")})

    rows = rows_of("structure-inputs")
    assert len(rows) == 9
    studies = [("linear" if "atlases" not in row[0] else "atlases", row[0].removesuffix(", two atlases")) for row in rows]
    tested = [key for key in studies if key[1] in bare]
    corrected = holm([paired_p(by_site(*key), by_site(key[0], bare[key[1]])) for key in tested])
    for key, (_, *cells) in zip(studies, rows, strict=True):
        values = by_site(*key)
        assert numbers(*cells[:7]) == close([values.mean(), values.drop(FOUR).mean(), values[FOUR].mean(), *values[FOUR]])
        if key not in tested:
            assert cells[7:] == ["", "", ""]
            continue
        other = by_site(key[0], bare[key[1]])
        middle, low, high = numbers(cells[7])
        assert middle == close((values - other).mean()) and low < middle < high
        assert numbers(cells[8]) == [(values > other + 1e-9).sum(), 20]
        assert as_chance(cells[9]) == pytest.approx(corrected[tested.index(key)], abs=0.000501)
    former = predictions["abide-structure/former"].set_index(["method", "variant"])
    parts = [former.loc[methods[row]].groupby("target") for row in ("scan and phenotypes", "all three")]
    means = [np.mean([100 * auc(*part[["label", "proba"]].to_numpy().T) for _, part in sites]) for sites in parts]
    gain = by_site("linear", "all three") - by_site("linear", "scan and phenotypes")
    said = numbers(re.search(r"phenotypes: (.*?)\)\.", text_of("structure-inputs").replace("UM_1", "UM"))[1])
    assert said == close([gain.drop(FOUR).mean(), 16, gain[FOUR].mean(), *gain[FOUR]])
    middle, low, high = numbers(text_of("structure-inputs").split("former default it is")[1].replace("to ", ""))[:3]
    assert middle == close(means[1] - means[0]) and low < middle < high
    for row, *cells in rows_of("structure-cohorts"):
        for study, shown in zip(("linear", "paper", "matched"), np.reshape(cells, (3, 2)), strict=True):
            values = by_site(study, row)
            assert float(shown[0]) == close(values.mean())
            assert (
                not shown[1] if row not in bare else numbers(shown[1])[0] == close((values - by_site(study, bare[row])).mean())
            )
    bare, whole = (by_site("paper", row).drop("CMU").mean() for row in ("scan and phenotypes", "all three"))
    said = numbers(text_of("structure-cohorts").replace("-", ""))
    assert said[0] == len(predictions["abide-structure/paper"].query("target == 'CMU'")["subject"].unique())
    assert said[-3:] == close([bare, whole, whole - bare])
    for row, *cells in rows_of("structure-head-size"):
        values = by_site("head", row)
        assert numbers(*cells) == close([values.mean(), values[FOUR].mean()])


def test_searches():
    shorter = pd.read_csv(RESULTS / "searches" / "connectome-shorter.csv").groupby(["setting", "seed"])["auc"].mean()
    means = [value for name in ("default", "20 epochs, two members") for value in (shorter[name].mean(), shorter[name].std())]
    found = re.findall(r"([\d.]+) ± ([\d.]+)", text_of("connectome-settings"))
    assert [float(value) for pair in found for value in pair] == close(means)
    tried = pd.read_csv(RESULTS / "searches" / "linear-features.csv").set_index("features")["auc"]
    for name, area, motion in rows_of("linear-features"):
        assert float(area) == tried[name]
        assert not motion or float(motion) == tried[name.replace("age and sex out", "age, sex and motion out")]


def test_search_for_the_default():
    import search_default

    from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive

    table = pd.read_csv(RESULTS / "searches" / "default.csv")
    sets = {"abide-i": 16, "abide-ii": 9, "rest-meta-mdd": 12}
    assert dict(zip(table["set"], table["sites"], strict=True)) == sets and not table.duplicated(["rule", "set"]).any()
    tried = table.pivot(index="rule", columns="set", values="AUC")
    assert set(tried.index) == {rule.title for rule in search_default.RULES}
    of_series = {rule.title for rule in search_default.RULES if {part.block for part in rule.parts} <= {"swings", "amplitude"}}
    assert set(tried.index[tried.isna().any(axis=1)]) == of_series  # alone, they are no rule for connectomes
    for name in ("docs/choosing.md", "results/README.md"):
        said = f"{len(tried)} rules ({len(tried) - len(of_series)} on all three sets, {len(of_series)} on ABIDE I and II"
        assert said in page(name)
    chosen = search_default.DEFAULT
    assert {part.block: part.weight for part in chosen.parts} == ConnectomeAdaptive.blocks
    assert {(one.power, one.penalty) for part in chosen.parts for one in part.settings} == {
        (1, ConnectomeAdaptive().penalties[0])
    }
    former = search_default.Rule(search_default.FORMER, confounds=True)
    for rule, areas in (
        (chosen, [75.61, 71.73, 60.12]),
        (former, [76.18, 69.57, 59.92]),
        (search_default.Rule(search_default.FORMER), [75.37, 70.97, 60.00]),
    ):
        assert tried.loc[rule.title, list(sets)].tolist() == areas
    means = tried.dropna().mean(axis=1)
    above = means[means > means[chosen.title]]
    assert len(above) == 8 and above.index.str.contains("tangent_pearson").all()
    said = numbers((RESULTS / "README.md").read_text().partition("Over the three sets,")[2].partition("All of them")[0])
    gains = tried.loc[chosen.title] - tried.loc[former.title]
    wanted = [means[chosen.title], means[former.title], means[chosen.title] - means[former.title], gains["abide-i"]]
    assert [said[0], said[1], said[2], said[4]] == pytest.approx(wanted, abs=0.05)
    assert above.max() - means[chosen.title] == pytest.approx(0.15, abs=0.005)


def test_tries_of_the_network():
    table = pd.read_csv(RESULTS / "searches" / "connectome-network.csv")
    means = table.groupby(["config", "set"])["AUC"].mean().unstack()
    assert means.loc["base + tp"].tolist() == pytest.approx([78.04, 71.33, 56.30], abs=0.01)
    assert means.loc["base"].tolist() == pytest.approx([77.51, 69.14, 58.36], abs=0.01)
    assert means.loc["fc3 + log0-source"].tolist() == pytest.approx([78.31, 71.28, 62.35], abs=0.01)
    rows = [numbers(*row[1:]) for row in rows_of("network-search")]
    shown = ["base", "fc1", "fc0", "log0", "log0-source", "base + tp", "fc3 + log0", "fc3 + log0-source"]
    first = table.query("seed == 0").groupby(["config", "set"])["AUC"].mean().unstack().loc[shown]
    assert rows == [close([*own, own.mean()]) for _, own in first.iterrows()]
    settings = {one for one in table["config"] if "+" not in one} - {"fc3"}  # which is `base` on another day
    assert f"{len(settings)} settings of the network" in " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    said = re.findall(r"^\| `([^`]+)` \|", (RESULTS / "README.md").read_text().partition("connectome-network.csv`")[2], re.M)
    assert set(said) == set(table["config"])


def test_ablations(areas, predictions):
    rows = rows_of("ablations")
    names = [{"the": "", "`scan`": "scan"}.get(row[0].split(",")[0].split()[0], row[0][:2]) for row in rows]
    assert names == ["", "M1", "M2", "scan", "C1", "C2", "C3"]
    paper = pd.read_csv(ROOT / "studies" / "paper-rest-meta-mdd.csv", dtype={"value": str})
    paper = paper.query("target == 'all' and metric == 'AUC'").set_index("method")["value"]
    trained = {"paper/ablation": ["", "M1", "M2", "C1", "C2", "C3"], "paper/connectome": ["", "M1", "scan"]}
    for i, (study, method) in enumerate((("paper/ablation", "m2lgdg"), ("paper/connectome", "m2lgdg-connectome"))):
        single = cell_scores(predictions[study], ["AUC"]).set_index(["variant", "target", "seed"])["value"] * 100
        assert {*single.index.unique("variant")} - {"C4"} == {*trained[study]}
        assert study != "paper/ablation" or (single.loc[""] == single.loc["C4"]).all()
        for name, (_, *cells, reported) in zip(names, rows, strict=True):
            nyu, usm, difference = cells[3 * i : 3 * i + 3]
            assert reported == ("" if name == "scan" else halves_up(paper[f"m2lgdg: {name or 'C4'}"]))
            if name not in trained[study]:
                assert (nyu, usm, difference) == ("", "", "")
                continue
            assert numbers(nyu, usm) == close([*areas[study, method, name, "NYU"], *areas[study, method, name, "USM"]])
            assert numbers(difference) == close(inside_sites(single.loc[""] - single.loc[name]) if name else [])
    gain = next(numbers(row[6])[0] for row in rows if row[0].startswith("`scan`"))
    there = next(-numbers(row[2])[0] for row in rows_of("mdd-ablation") if "with contrastive" in row[0])
    assert numbers(page("docs/rest-meta-mdd.md").split("`m2lgdg-connectome` gains")[1])[:2] == [there, gain]


def test_regions_and_explanations():
    folders = sorted((RESULTS / "paper/networks/explanations").iterdir())
    assert len(folders) == 10
    scored = pd.DataFrame({folder: pd.read_csv(folder / "roi.csv").set_index("roi")["score"] for folder in folders})
    mean, text = scored.mean(axis=1).sort_values(ascending=False), text_of("regions")
    assert re.search(r"Ten highest: (.*?)\.", text)[1].split(", ") == list(mean.index[:10])
    assert int(re.search(r"(\d+) % above", text)[1]) == round(100 * (mean.iloc[0] / mean.iloc[19] - 1))
    low, high = (float(value) for value in re.search(r"by training: (\S+) to (\S+)\.", text).groups())
    assert (low, high) == pytest.approx((scored.max().min(), scored.max().max()), rel=0.06)
    ranks = scored.rank().corr().to_numpy()[np.triu_indices(10, 1)].mean()
    assert float(text.rsplit(" ", 1)[1].rstrip(".")) == pytest.approx(ranks, abs=0.00501)
    gates = [np.average(gate["imaging"], weights=gate["subjects"]) for gate in (pd.read_csv(f / "gate.csv") for f in folders)]
    explained = text_of("explained")
    found = re.search(r"gate: ([\d.]+) on average, ([\d.]+) to ([\d.]+) over (\d+)", explained).groups()
    assert numbers(*found) == pytest.approx([np.mean(gates), min(gates), max(gates), 10], abs=0.00501)
    about = [json.loads((folder / "explanation.json").read_text())["readability"] for folder in folders]
    expected = [100 * np.mean([one[key] for one in about]) for key in ("site", "site_chance", "label", "label_chance")]
    assert numbers(explained.split("source site of")[1]) == pytest.approx(expected, abs=0.501)
    phenotypes = pd.concat([pd.read_csv(folder / "phenotypes.csv") for folder in folders]).groupby("phenotype")["score"].mean()
    assert re.search(r"by score: (.*?)\.", explained)[1].split(", ") == list(phenotypes.sort_values(ascending=False).index)


def test_repeated_trainings(predictions, records, areas):
    studies = ("paper/networks", "paper/ablation")
    tables = [predictions[study].query("method == 'm2lgdg' and variant == ''") for study in studies]
    first, second = (table.set_index(["target", "seed", "subject"])["proba"].sort_index() for table in tables)
    apart = (first - second).abs().groupby(level=["target", "seed"]).max()
    one, two = (records[study, "m2lgdg", ""] for study in studies)
    same, count, low, high, median, *again = numbers(text_of("repeats").split("**", 2)[2])
    assert (same, count) == (sum(one[key]["best_epoch"] == two[key]["best_epoch"] for key in one), 10)
    assert [low, high, median] == pytest.approx([apart.min(), apart.max(), apart.median()], abs=0.000501)
    assert again == close([value for target in TARGETS for value in areas["paper/ablation", "m2lgdg", "", target]])


# Commands of the pages, and a cell once more


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*.py"))])
def test_no_command_of_a_page_writes_where_results_are_committed(page):
    """`m2lgdg run` refuses a folder that holds another study, or something else."""
    for out in re.findall(r"m2lgdg run [^`\n]*?--out ([\w./-]+)", page.read_text()):
        assert not (ROOT / out).exists(), f"{page.name}: --out {out}"


def test_a_cell_can_be_repeated(abide_folder, predictions):
    cohort = read(abide_folder, atlas="aal", max_motion=0.2)
    if len(cohort) != 884:
        pytest.skip(f"the committed results are of 884 subjects, M2LGDG_ABIDE has {len(cohort)}")
    (fold,) = leave_one_site_out(cohort, ["USM"])
    proba = make("fc-logistic", phenotypes=True).fit(fold.source).predict_proba(fold.target)[:, 1]
    table = predictions["paper/linear"].query("method == 'fc-logistic' and variant == 'phenotypes' and target == 'USM'")
    committed = table.set_index("subject")["proba"][fold.target.subjects].to_numpy()
    assert np.abs(proba - committed).max() < 1e-3  # float32 series here, float16 there
    areas = [auc(fold.target.labels, values) for values in (proba, committed)]
    assert areas[0] == pytest.approx(areas[1], abs=0.005) and areas[0] > 0.8
