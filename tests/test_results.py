"""The committed results: tables of the pages come from predictions and agree with oracles, and a cell can be repeated."""

import importlib
import json
import re
import shutil
import sys
from decimal import ROUND_HALF_UP, Decimal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from scipy.stats import t as student

from m2lgdg import leave_one_site_out, make, read
from m2lgdg.metrics import auc
from m2lgdg.report.contents import read_contents
from m2lgdg.report.drawing import plain
from m2lgdg.report.paper_tables import study_tables
from m2lgdg.report.tables import render
from m2lgdg.study.config import read_study
from m2lgdg.study.stats import cell_scores, macro_scores, over_seeds, site_scores

pytestmark = pytest.mark.pages
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
STUDIES = {
    "paper/networks": 140,
    "paper/phenotypes": 120,
    "paper/m2dc": 20,
    "paper/linear": 40,
    "paper/ablation": 70,
    "paper/connectome": 80,
    "paper/connectome-quick": 10,
    "paper/ufa-net": 20,
    "paper/scan": 6,
    "sensitivity/margin": 36,
    "all-sites/networks": 612,
    "all-sites/linear": 400,
    "all-sites/connectome": 60,
    "all-sites/connectome-quick": 120,
    "atlases/connectome": 40,
    "sensitivity/connectome": 78,
    "sensitivity/m2lgdg": 198,
}
RECENT = ("paper/m2dc", "paper/ufa-net", "paper/scan", "sensitivity/margin")
WITH_TABLES = ("all-sites/networks", "sensitivity/m2lgdg")  # m2lgdg report wrote them
TARGETS = ("NYU", "USM")
METRICS = ("AUC", "ACC", "SEN", "SPE", "F1")
BEST = ("connectome-adaptive", "phenotypes")


TABLES = importlib.import_module("tables")  # docs/tables.py
PLACES = [(page, key) for page in TABLES.pages() for key in TABLES.blocks(page)]


def rows_of(key):
    """Rows of a generated table as lists of cells."""
    lines = [line for line in TABLES.lines(key) if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def text_of(key):
    """Generated sentences, on one line."""
    return " ".join(line.strip() for line in TABLES.lines(key) if not line.startswith("|"))


def numbers(*cells):
    return [float(value) for cell in cells for value in re.findall(r"-?\d+(?:\.\d+)?", cell)]


def named(cell):
    """(method, variant) of a cell such as: `fc-svm` with phenotypes."""
    return re.search(r"`([a-z0-9-]+)`", cell)[1], "phenotypes" if "with phenotypes" in cell else ""


def close(values):
    return pytest.approx(values, abs=0.0501)


def as_chance(text):
    return 0.0005 if text.startswith("<") else float(text)


def half_interval(sd, count):
    return student.ppf(0.975, count - 1) * sd / count**0.5


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


def inside_sites(differences):
    """Half the interval of the mean of as many differences at NYU as at USM, from their spread inside each."""
    spread = np.mean([differences.xs(site, level="target").var(ddof=1) for site in TARGETS])
    return student.ppf(0.975, len(differences) - 2) * (spread / len(differences)) ** 0.5


@pytest.fixture(scope="module")
def predictions():
    tables = {name: pd.read_csv(RESULTS / name / "predictions.csv", keep_default_na=False) for name in STUDIES}
    return {name: table.astype({"seed": int, "label": int}) for name, table in tables.items()}


@pytest.fixture(scope="module")
def scores(predictions):
    """Mean and sd over seeds in percent by study, method, variant, target and metric."""
    result = {}
    for name, table in predictions.items():
        for row in site_scores(cell_scores(table)).to_dict("records"):
            key = (name, row["method"], row["variant"], row["target"], row["metric"])
            result[key] = (100 * row["mean"], 100 * row["sd"])
    return result


@pytest.fixture(scope="module")
def areas(scores):
    """Mean and sd of AUC over seeds by study, method, variant and target."""
    return {key[:4]: value for key, value in scores.items() if key[4] == "AUC"}


@pytest.fixture(scope="module")
def by_site(areas):
    """(target,) AUC of each (method, variant) at all sites, seeds not averaged."""
    table = pd.Series({key[1:]: value[0] for key, value in areas.items() if key[0] == "all-sites/networks"})
    return table.unstack([0, 1]).sort_index()


@pytest.fixture(scope="module")
def averaged(predictions):
    """(target,) AUC of probabilities averaged over seeds by study and (method, variant)."""
    result = {}
    for study, table in predictions.items():
        for (method, variant, target), part in over_seeds(table).groupby(["method", "variant", "target"]):
            area = 100 * auc(part["label"].to_numpy(), part["proba"].to_numpy())
            result.setdefault(study, {}).setdefault((method, variant), {})[target] = area
    return result


@pytest.fixture(scope="module")
def records():
    """Records by study, method and variant."""
    result = {}
    for name in (name for name in STUDIES if name.startswith("paper/") or name == "sensitivity/margin"):
        for record in map(json.loads, (RESULTS / name / "records.jsonl").read_text().splitlines()):
            result.setdefault((name, record["method"], record["variant"]), []).append(record)
    return result


@pytest.fixture(scope="module")
def published():
    return pd.read_csv(ROOT / "studies" / "paper-abide.csv", dtype={"value": str}).set_index(["method", "target", "metric"])[
        "value"
    ]


def halves_up(text):
    return str(Decimal(text).quantize(Decimal("0.1"), rounding=ROUND_HALF_UP))


# The folders


@pytest.mark.parametrize("name", STUDIES)
def test_the_study_is_whole_and_tells_no_place(name, predictions):
    table, folder = predictions[name], RESULTS / name
    assert len(table.drop_duplicates(["method", "variant", "seed", "target"])) == STUDIES[name]
    assert not read_contents(folder).missing()
    study = json.loads((folder / "study.json").read_text())
    assert set(study["methods"]) == set(table["method"])
    for file in folder.rglob("*.json*"):
        assert not re.search(r"/(home|root|tmp|work|mnt|opt)/", file.read_text()), file


@pytest.mark.parametrize("name", [name for name in STUDIES if "connectome" in name or name in RECENT])
def test_the_recorded_fields_are_those_of_the_study_file(name):
    """What was trained is what `studies/` repeats."""
    recorded = json.loads((RESULTS / name / "study.json").read_text())
    study = read_study(ROOT / "studies" / f"{recorded['name']}.toml")
    for key in ("methods", "seeds", "variants", "sweep"):
        asked = getattr(study, key)
        assert (asked or []) == (recorded[key] or []), key
    (method,) = study.methods
    given = dict(study.method.get(method, {}))
    fields = json.loads(json.dumps(make(method, given.pop("variant", None), **given).fields()))
    assert {key: fields[key] for key in recorded["method"][method]} == recorded["method"][method]


@pytest.mark.parametrize("name", WITH_TABLES)
def test_the_committed_tables_are_those_of_the_committed_predictions(name, predictions):
    for table in study_tables(predictions[name]):
        committed = RESULTS / name / "tables" / f"{plain(table.title.replace(' ', '-'))}.md"
        assert render([table], "markdown").strip() == committed.read_text().strip()


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
    page = tmp_path / "results.md"
    shutil.copy(ROOT / "docs" / "results.md", page)
    whole = page.read_text()
    page.write_text(whole.replace("| `m2lgdg` | - | - | - | 66.9", "| `m2lgdg` | - | - | - | 69.6"))
    monkeypatch.setattr(TABLES, "pages", lambda: [page])
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert TABLES.main() == 1
    assert capsys.readouterr().out == "Differs: results.md: paper-table\n"
    assert page.read_text() != whole
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert TABLES.main() == 0
    assert capsys.readouterr().out == "Rewritten: results.md: paper-table\n"
    assert page.read_text() == whole
    page.write_text("<!-- table: nothing -->\n<!-- end of table -->\n")
    with pytest.raises(SystemExit, match="no table 'nothing'"):
        TABLES.main()


# Their rows, by other ways to compute them


def model_of(method, phenotypes):
    """Study and variant of a method on the paper's subjects; None where it was not run."""
    if method == "m2lgdg-connectome":
        return "paper/connectome", "" if phenotypes else "scan"
    if method in ("m2lgdg", "mm-gtunets", "phenotype-logistic"):
        return ("paper/linear" if method == "phenotype-logistic" else "paper/networks", "") if phenotypes else None
    if method in json.loads((RESULTS / "paper/linear" / "study.json").read_text())["methods"]:
        return "paper/linear", "phenotypes" if phenotypes else ""
    if method in ("m2dc", "ufa-net"):
        return f"paper/{method}", "phenotypes" if phenotypes else ""
    return ("paper/phenotypes" if phenotypes else "paper/networks"), ""


def key_of(method, phenotypes=False):
    """(study, method, variant) of a method, by default as the paper has it."""
    study, variant = model_of(method, phenotypes or method in ("m2lgdg", "mm-gtunets"))
    return study, method, variant


def papers(method, phenotypes, published):
    """The paper's AUC at both sites and their mean, if it has the method with or without phenotypes."""
    if (method, "NYU", "AUC") not in published.index or phenotypes != (method in ("m2lgdg", "mm-gtunets")):
        return []
    values = [Decimal(published[method, target, "AUC"]) for target in TARGETS]
    return [halves_up(str(value)) for value in (*values, sum(values) / 2)]


def test_networks_on_the_papers_subjects(areas, published):
    rows = rows_of("paper-table")
    names = [named(row[0])[0] for row in rows]
    assert set(names) == {
        key[1] for key in areas if key[0] in ("paper/networks", "paper/m2dc", "paper/ufa-net", "paper/connectome")
    }
    for row, name in zip(rows, names, strict=True):
        for phenotypes, cells in ((False, row[1:4]), (True, row[4:7])):
            if model_of(name, phenotypes) is None:
                assert cells == ["-", "-", "-"]
                continue
            study, variant = model_of(name, phenotypes)
            values = [areas[study, name, variant, target] for target in TARGETS]
            expected = [*values[0], *values[1], (values[0][0] + values[1][0]) / 2]
            reported = papers(name, phenotypes, published)
            assert re.findall(r"\[([\d.]+)\]", " ".join(cells)) == reported
            assert numbers(*(cell.split(" [")[0] for cell in cells)) == close(expected)


def test_counts_of_the_papers_table(areas, averaged, published):
    names = list(dict.fromkeys(published.index.get_level_values("method")))
    here = {name: np.array([areas[*key_of(name), target] for target in TARGETS]) for name in names}
    rivals = [name for name in names if name != "m2lgdg"]
    assert len(rivals) == 13
    given = {name: [areas[*key_of(name, True), target][0] for target in TARGETS] for name in rivals}
    text, own = text_of("paper-table"), here["m2lgdg"][:, 0]
    beyond = [
        name for name in rivals if all(here[name][i, 0] > float(published[name, t, "AUC"]) for i, t in enumerate(TARGETS))
    ]
    count, total, others = re.search(
        r"paper's value at both sites: (\d+) of (\d+) compared networks, all but (.*?)\.", text
    ).groups()
    assert [int(count), int(total)] == [len(beyond), len(rivals)]
    assert set(re.findall(r"`(.*?)`", others)) == set(rivals) - set(beyond)
    above = [
        sum(all(value > other for value, other in zip(part[name], own, strict=True)) for name in rivals)
        for part in ({name: here[name][:, 0] for name in rivals}, given)
    ]
    assert numbers(re.search(r"Above `m2lgdg` at both sites: (.*?)\.", text)[1]) == [
        above[0],
        len(rivals),
        above[1],
        len(rivals),
    ]
    alone = [areas["paper/linear", "phenotype-logistic", "", target][0] for target in TARGETS]
    below = [sum(here[name][i, 0] < alone[i] for name in names) for i in range(2)]
    assert numbers(re.search(r"phenotype-logistic`: (.*?)\.", text)[1]) == [below[0], len(names), below[1]]
    between = [np.std([here[name][i, 0] for name in names], ddof=1) for i in range(2)]
    within = [np.mean([here[name][i, 1] ** 2 for name in names]) ** 0.5 for i in range(2)]
    rest = [np.std([here[name][i, 0] for name in names if name != "ufa-net"], ddof=1) for i in range(2)]
    pattern = (
        r"networks: ([\d.]+) at NYU, ([\d.]+) at USM; without `ufa-net`, ([\d.]+) and ([\d.]+)\. .*?\): ([\d.]+) and ([\d.]+)\."
    )
    assert numbers(*re.search(pattern, text).groups()) == close([*between, *rest, *within])
    together = {name: averaged[key_of(name)[0]][key_of(name)[1:]] for name in names}
    gains = [together[name][t] - here[name][i, 0] for name in names for i, t in enumerate(TARGETS)]
    median, most, lost, cases = numbers(
        *re.search(r"median ([\d.]+), at most ([\d.]+), a loss in (\d+) of (\d+)", text).groups()
    )
    assert [median, most] == close([np.median(gains), max(gains)])
    assert [lost, cases] == [sum(gain < 0 for gain in gains), len(gains)]


def test_linear_models(areas, predictions):
    rows = rows_of("linear-models")
    macro = macro_scores(site_scores(cell_scores(predictions["all-sites/linear"]))).query("metric == 'AUC'")
    linear = set(json.loads((RESULTS / "paper/linear" / "study.json").read_text())["methods"]) - {"prior"}
    assert linear <= {named(row[0])[0] for row in rows}
    for row in (row for row in rows if named(row[0])[0] in linear):
        name, _ = named(row[0])
        models = [model_of(name, phenotypes) for phenotypes in (False, True)]
        models = [model for model in models if model]
        sites = [[areas[study, name, variant, target][0] for study, variant in models] for target in TARGETS]
        expected = [*sites[0], *sites[1], *np.mean(sites, axis=0)]
        assert numbers(*(cell.replace("- /", "") for cell in row[1:-1])) == close(expected)
        own = macro[macro["method"] == name].set_index("variant")
        assert set(own["sites"]) == {20}
        halves = 2.0930 * own["sd"] / 20**0.5  # Student's t with 19 degrees of freedom
        expected = [100 * value for variant in sorted(own.index) for value in (own["mean"][variant], halves[variant])]
        assert numbers(row[-1].replace("- /", "")) == close(expected)


def test_costs_of_networks(records):
    for cell, seconds, median, peak in rows_of("network-costs"):
        name, _ = named(cell)
        keys = {key_of(name), key_of(name, True)}
        own = [record for key in keys for record in records[key]]
        assert len(own) == {"mm-gtunets": 10}.get(name, 20)
        each = [record["seconds"] for record in own]
        assert numbers(seconds, median) == pytest.approx([min(each), max(each), np.median(each)], abs=0.501)
        assert float(peak) == pytest.approx(max(record["learned"]["peak_memory_gib"] for record in own), abs=0.00501)


def test_the_committed_run_of_m2lgdg(scores, published, records):
    rows = rows_of("m2lgdg-abide")
    assert [row[0] for row in rows] == list(TARGETS)
    for target, *cells, validation, paper in rows:
        for metric, text in zip(METRICS, cells, strict=False):
            assert numbers(text) == pytest.approx(list(scores["paper/networks", "m2lgdg", "", target, metric]), abs=0.00501)
        learned = [record["learned"] for record in records["paper/networks", "m2lgdg", ""] if record["target"] == target]
        best = np.array([100 * own["history"][own["best_epoch"] - 1]["val_auc"] for own in learned])
        assert len(best) == 5
        assert numbers(validation) == close([best.mean(), best.std(ddof=1)])
        assert float(paper) == float(published["m2lgdg", target, "AUC"])


def test_terms_of_the_loss(records):
    """From the history of each epoch; `losses` of the records is made of it."""
    methods = [("paper/networks", "m2lgdg", ""), ("paper/connectome", "m2lgdg-connectome", "")]
    rows = rows_of("loss-terms")
    assert {row[0] for row in rows} == {"ce", "similarity", "orthogonality", "difference", "contrast"}
    for term, *cells in rows:
        for i, key in enumerate(methods):
            learned = [record["learned"] for record in records[key]]
            assert len(learned) == 10
            for text, values in zip(
                cells[2 * i : 2 * i + 2],
                (
                    [own["history"][0][term] for own in learned],
                    [own["history"][own["best_epoch"] - 1][term] for own in learned],
                ),
                strict=True,
            ):
                low, high = (numbers(text) * 2)[:2]
                assert [low, high] == pytest.approx([min(values), max(values)], abs=0.0000501)
    assert all(epoch["difference"] == 0 for key in methods for record in records[key] for epoch in record["learned"]["history"])


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


def subjects(predictions, model, target):
    """Labels and probabilities averaged over seeds, by subject."""
    table = predictions[model[0]]
    table = table[(table["method"] == model[1]) & (table["variant"] == model[2]) & (table["target"] == target)]
    return table.groupby("subject")[["label", "proba"]].mean().sort_index()


def test_comparisons_at_nyu_and_usm(predictions):
    rows = rows_of("paper-comparisons")
    assert len(rows) == 8
    for text, difference, *tests in rows:
        first, second = re.fullmatch(r"`(\S+)` minus (.*)", text).groups()
        if second.startswith("its variant"):
            study = {"m2lgdg": "paper/ablation", "m2lgdg-connectome": "paper/connectome"}[first]
            models = (study, first, ""), (study, first, second.split()[-1])
        else:
            names = [first, second.strip("`")]
            models = [(model_of(name, True)[0], name, model_of(name, True)[1]) for name in names]
        expected = []
        for target, cell in zip(TARGETS, tests, strict=True):
            one, two = (subjects(predictions, model, target) for model in models)
            label = one["label"].to_numpy().astype(int)
            area = [100 * auc(label, part["proba"].to_numpy()) for part in (one, two)]
            expected.append(area[0] - area[1])
            points, p = re.fullmatch(r"(-?[\d.]+) \((.*)\)", cell).groups()
            assert float(points) == close(expected[-1])
            assert as_chance(p) == pytest.approx(
                delong_p(label, one["proba"].to_numpy(), two["proba"].to_numpy()), abs=0.000501
            )
        middle, low, high = numbers(difference.replace("to ", ""))
        assert middle == close(np.mean(expected)) and low < middle < high


def test_all_models_against_m2lgdg(predictions, areas):
    own = {target: subjects(predictions, ("paper/networks", "m2lgdg", ""), target) for target in TARGETS}
    studies = {f"paper/{end}" for end in ("networks", "phenotypes", "linear", "m2dc", "ufa-net")}
    others = {key[:3] for key in areas if key[0] in studies}
    others |= {("paper/connectome", "m2lgdg-connectome", variant) for variant in ("", "scan")}
    others = {key for key in others if key[1] not in ("m2lgdg", "prior") and key[2] != "sparse"}
    tests = {}
    for model in others:
        for target in TARGETS:
            other = subjects(predictions, model, target)
            label = other["label"].to_numpy().astype(int)
            scores = [part["proba"].to_numpy() for part in (other, own[target])]
            tests[model, target] = (auc(label, scores[0]) - auc(label, scores[1]), delong_p(label, *scores))
    p_values = np.array([p for _, p in tests.values()])
    above = [sum(d > 0 and p < 0.05 for (_, site), (d, p) in tests.items() if site == target) for target in TARGETS]
    below = sum(d < 0 and p < 0.05 for d, p in tests.values())
    pattern = r"All (\d+) other .*?, (\d+) DeLong .*? in (\d+) at NYU and (\d+) at USM, below it in (\d+)\. .*? (\d+) remain"
    found = [int(value) for value in re.search(pattern, text_of("paper-comparisons")).groups()]
    assert found == [len(others), len(tests), *above, below, (holm(p_values) < 0.05).sum()]


def test_all_sites(averaged, by_site):
    *rows, own_row = rows_of("all-sites")
    keys = [named(row[0]) for row in rows]
    assert len(keys) == 8 and named(own_row[0]) == ("m2lgdg", "")
    together = {key: pd.Series(averaged["all-sites/networks"][key])[by_site.index] for key in (*keys, ("m2lgdg", ""))}
    adjusted = holm(np.array([paired_p(together["m2lgdg", ""], together[key]) for key in keys]))
    for row, key in zip((*rows, own_row), (*keys, ("m2lgdg", "")), strict=True):
        own = by_site[key]
        assert len(own) == 18
        assert numbers(row[1]) == close([own.mean(), half_interval(own.std(ddof=1), 18)])
        assert numbers(*row[2:5]) == close([together[key].mean(), own[list(TARGETS)].mean(), own.drop(list(TARGETS)).mean()])
    for row, key, p in zip(rows, keys, adjusted, strict=True):
        difference, low, high = numbers(row[5].replace("to ", ""))
        assert difference == close((together["m2lgdg", ""] - together[key]).mean()) and low < difference < high
        assert as_chance(row[6]) == pytest.approx(p, abs=0.000501)
    text, best = text_of("all-sites"), by_site[BEST]
    alike = np.corrcoef(by_site["m2lgdg", ""], by_site["phenotype-logistic", ""])[0, 1]
    assert float(re.search(r"phenotype-logistic`: ([\d.]+)\.", text)[1]) == pytest.approx(alike, abs=0.00501)
    assert f"lowest {best.min():.1f} ({best.idxmin()}), highest {best.max():.1f} ({best.idxmax()})" in text
    wide = 2.1098 * best.std(ddof=1) * (1 + 1 / 18) ** 0.5  # Student's t with 17 degrees of freedom
    assert numbers(*re.search(r"new site ([\d.]+) to ([\d.]+)\.", text).groups()) == close(
        [best.mean() - wide, best.mean() + wide]
    )


def test_the_interval_is_that_of_subjects_drawn_inside_site_and_class(predictions, monkeypatch):
    """Against every AUC of every draw computed anew, with fewer draws than the pages have."""
    committed = importlib.import_module("page_tables.committed")
    monkeypatch.setattr(committed, "DRAWS", 20)
    monkeypatch.setattr(committed, "bootstrap", committed.bootstrap.__wrapped__)  # without its cache
    models = [("all-sites/networks", *BEST), ("all-sites/networks", "mm-gtunets", "")]
    table = over_seeds(predictions["all-sites/networks"]).set_index(["method", "variant", "target", "subject"]).sort_index()
    one, two = (table.loc[model[1:]] for model in models)
    sites, rng, drawn = sorted(set(one.index.get_level_values("target"))), np.random.default_rng(0), []
    for _ in range(20):
        differences = []
        for site in sites:
            label = one.loc[site]["label"].to_numpy()
            rows = np.concatenate([rng.choice(group, len(group)) for group in (np.flatnonzero(label == c) for c in (0, 1))])
            first, second = (auc(label[rows], model.loc[site]["proba"].to_numpy()[rows]) for model in (one, two))
            differences.append(first - second)
        drawn.append(100 * np.mean(differences))
    result = committed.paired(*models)
    assert result["interval"] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=1e-9)
    assert sum(result["counts"]) == len(sites) == 18


def test_what_the_trainings_of_ufa_net_did(areas, records):
    text = text_of("ufa-net-epochs").replace(",", "")
    learned = [record["learned"] for variant in ("", "phenotypes") for record in records["paper/ufa-net", "ufa-net", variant]]
    assert len(learned) == 20 and {len(one["history"]) for one in learned} == {120}
    kept = [100 * one["history"][one["best_epoch"] - 1]["val_auc"] for one in learned]
    first, last = ([one["history"][i]["ce"] for one in learned] for i in (0, -1))
    first_number, last_number, epochs, low, high, median, zero, none, total = numbers(text)
    assert [first_number, last_number] == pytest.approx([np.mean(first), max(last)], abs=0.0051)
    assert [low, high, median] == pytest.approx([min(kept), max(kept), np.median(kept)], abs=0.501)
    aligned = [epoch["alignment"] for one in learned for epoch in one["history"] if "alignment" in epoch]
    assert [epochs, zero, none, total] == [120, 0, aligned.count(0.0), len(aligned)]


def test_which_epoch_m2dc_keeps(records):
    watched = pd.read_csv(RESULTS / "searches" / "m2dc-epochs.csv")
    assert watched.groupby(["fold", "seed"])["epoch"].nunique().tolist() == [60] * 10
    assert watched["site"].nunique() == 16 and not {*TARGETS, "UM_1", "YALE"} & set(watched["site"])
    means = {}
    for first in (1, 31):
        late = watched[watched["epoch"] >= first]
        best = late.loc[late.sort_values("val_loss").groupby(["fold", "seed", "site"])["val_auc"].idxmax()]
        means[first] = best.groupby("site")["auc"].mean()
    difference = means[31] - means[1]
    half = 2.1314 * difference.std() / 16**0.5  # Student's t with 15 degrees of freedom
    expected = [means[1].mean(), means[31].mean(), difference.mean(), difference.mean() - half, difference.mean() + half]
    assert numbers(text_of("m2dc-epochs").split("AUC")[1]) == close(expected)
    learned = [record["learned"] for variant in ("", "phenotypes") for record in records["paper/m2dc", "m2dc", variant]]
    assert len(learned) == 20 and min(one["best_epoch"] for one in learned) >= 31


def test_terms_that_hardly_moved(records):
    rows = rows_of("idle-terms")
    assert len(rows) == 4
    for cell, term, *texts in rows:
        learned = [record["learned"] for record in records["paper/networks", named(cell)[0], ""]]
        for key, text in zip((term, "ce"), texts, strict=True):
            values = [one["history"][one["best_epoch"] - 1][key] for one in learned]
            assert numbers(text) == pytest.approx([min(values), max(values)], abs=5.01e-6)


def test_margins_and_the_scan_alone(areas, records):
    rows = rows_of("margins")
    default = {target: areas["sensitivity/margin", "m2lgdg", "", target] for target in TARGETS}
    for margin, acted, *sites, difference in rows:
        variant = "" if margin == "1.0" else f"margin={margin}"
        learned = [record["learned"] for record in records["sensitivity/margin", "m2lgdg", variant]]
        losses = [epoch["difference"] for one in learned for epoch in one["history"]]
        assert len(learned) == 6 and numbers(acted) == [sum(loss > 0 for loss in losses), len(losses)]
        values = [areas["sensitivity/margin", "m2lgdg", variant, target] for target in TARGETS]
        assert numbers(*sites) == close(np.ravel(values))
        if variant:
            mean, low, high = numbers(difference.replace("to ", ""))
            assert mean == close(np.mean([value[0] - default[t][0] for value, t in zip(values, TARGETS, strict=True)]))
            assert low < mean < high and low < 0 < high
        else:
            assert difference == ""
    largest = [
        [epoch["difference"] for epoch in record["learned"]["history"]]
        for record in records["sensitivity/margin", "m2lgdg", "margin=2.5"]
    ]
    assert min(min(one[:2]) for one in largest) > 0.006 and max(max(one[:2]) for one in largest) < 0.04
    assert max(max(one[2:]) for one in largest) < 0.0003
    variants = ("", "precision=fp32", "identity_sd=1.0")
    for (_, *sites, kept), variant in zip(rows_of("scan-alone"), variants, strict=True):
        assert numbers(*sites) == close([areas["paper/scan", "m2lgdg", variant, target][0] for target in TARGETS])
        learned = {record["target"]: record["learned"] for record in records["paper/scan", "m2lgdg", variant]}
        best = [learned[target]["history"][learned[target]["best_epoch"] - 1]["val_auc"] for target in TARGETS]
        assert numbers(kept.replace(",", "")) == close([100 * value for value in best])


def logits_at(predictions, study, method, variant, seed):
    """(target, subject) logits and labels of one training."""
    table = predictions[study].query("method == @method and variant == @variant and seed == @seed")
    table = table.set_index(["target", "subject"]).sort_index()
    p = table["proba"].clip(1e-9, 1 - 1e-9)
    return np.log(p / (1 - p)), table["label"]


def areas_by_site(decision, label):
    return pd.Series(
        {site: 100 * auc(label[site].to_numpy(), decision[site].to_numpy()) for site in label.index.unique("target")}
    )


def test_models_at_twenty_sites(predictions):
    def trained(study, method, variant):
        seeds = sorted(set(predictions[study].query("method == @method and variant == @variant")["seed"]))
        return [logits_at(predictions, study, method, variant, seed) for seed in seeds]

    (linear, label), *_ = trained("all-sites/linear", *BEST)
    own = [one for one, _ in trained("all-sites/connectome", "m2lgdg-connectome", "")]
    expected = {"`m2lgdg-connectome`": own, "... variant `plus`": [(one + linear) / 2 for one in own]}
    for title, variant in (("... variant `quick`", ""), ("... variant `quick` without phenotypes", "scan")):
        expected[title] = [one for one, _ in trained("all-sites/connectome-quick", "m2lgdg-connectome", variant)]
    for method in ("fc-logistic", "fc-svm", "tangent-pearson-ridge", "connectome-ensemble", "fc-adaptive"):
        expected[f"`{method}`"] = [one for one, _ in trained("all-sites/linear", method, "phenotypes")]
    expected["phenotypes alone (`phenotype-logistic`)"] = [trained("all-sites/linear", "phenotype-logistic", "")[0][0]]
    rows = {row[0]: row for row in rows_of("twenty-sites")}
    four, reference = [*TARGETS, "UM_1", "YALE"], areas_by_site(linear, label)
    assert rows["`connectome-adaptive`"][8:] == ["", "", ""] and len(rows) == 14 == len(expected) + 4
    raw = {}
    for title, decisions in expected.items():
        areas, row = sum(areas_by_site(decision, label) for decision in decisions) / len(decisions), rows[title]
        assert len(areas) == 20
        assert numbers(*row[1:8]) == close([areas.mean(), areas.drop(four).mean(), areas[four].mean(), *areas[four]])
        middle, low, high = numbers(row[8])
        assert middle == close((areas - reference).mean()) and low < middle < high
        assert numbers(row[9]) == [(areas > reference + 1e-9).sum(), 20]
        raw[title] = paired_p(areas, reference)
    smallest = min(raw, key=raw.get)  # Holm multiplies it by the number of rows
    assert as_chance(rows[smallest][10]) == pytest.approx(max(13 * raw[smallest], 0.0005), abs=0.000501)
    assert all(as_chance(rows[title][10]) >= p - 0.000501 for title, p in raw.items())
    equal = np.mean([areas_by_site(one + linear, label).mean() for one in own])
    assert numbers(text_of("connectome-settings").split("weights:")[1])[0] == close(equal)


def test_searches():
    shorter = pd.read_csv(RESULTS / "searches" / "connectome-shorter.csv").groupby(["setting", "seed"])["auc"].mean()
    expected = [(shorter[name].mean(), shorter[name].std(ddof=1)) for name in ("default", "20 epochs, two members")]
    assert [float(value) for value in re.findall(r"([\d.]+) ±", text_of("connectome-settings"))] == close(
        [mean for mean, _ in expected]
    )
    tried = pd.read_csv(RESULTS / "searches" / "linear-features.csv").set_index("features")["auc"]
    for name, area, motion in rows_of("linear-features"):
        assert float(area) == tried[name]
        assert not motion or float(motion) == tried[name.replace("age and sex out", "age, sex and motion out")]


def test_several_atlases_are_joined_by_their_mean_logit():
    from page_tables.committed import by_site

    studies = {"atlases/connectome": "m2lgdg-connectome", "atlases/phenotypes": "connectome-adaptive"}
    models = tuple((study, method, "atlases=aal+ho") for study, method in studies.items())
    tables = [pd.read_csv(RESULTS / study / "predictions.csv", keep_default_na=False) for study, *_ in models]
    parts = [table[(table["method"] == m) & (table["variant"] == v)] for table, (_, m, v) in zip(tables, models, strict=True)]
    one, two = (part.set_index(["target", "subject"]) for part in parts)
    decision = sum(np.log(part["proba"] / (1 - part["proba"])).loc[one.index] for part in (one, two))
    expected = areas_by_site(decision.sort_index(), one["label"].sort_index())
    pd.testing.assert_series_equal(by_site(*models), expected, check_names=False)


def test_the_sensitivity_of_the_framework(predictions):
    table = predictions["sensitivity/connectome"]
    areas = {
        (variant, target): 100 * auc(part["label"].to_numpy(), part["proba"].to_numpy())
        for (variant, target), part in table.groupby(["variant", "target"])
    }
    means = pd.Series(areas).groupby(level=0).mean()
    rows = rows_of("connectome-sensitivity")
    assert len(rows) == 6
    for field, _, lowest, highest in rows:
        own = means[means.index.str.startswith(field.strip("`") + "=")]
        assert numbers(lowest)[0] == close(own.min()) and numbers(highest)[0] == close(own.max())
        assert float(own.idxmin().split("=")[1]) == numbers(lowest)[1]
    assert numbers(text_of("connectome-sensitivity"))[0] == close(means[""])


def test_labels_of_many_swept_fields_do_not_overlap(predictions, monkeypatch):
    from matplotlib.figure import Figure

    from m2lgdg.report import figures

    sheets = []

    def drawn(name, caption, alt, size, paint):
        sheets.append(figures.Sheet(Figure(figsize=size, dpi=100, layout="constrained")))
        paint(sheets[0])
        sheets[0].canvas.draw_without_rendering()

    monkeypatch.setattr(figures, "draw", drawn)
    recorded = json.loads((RESULTS / "sensitivity/connectome" / "study.json").read_text())
    axes, default = recorded["sweep"]["m2lgdg-connectome"], recorded["method"]["m2lgdg-connectome"]
    scores = cell_scores(predictions["sensitivity/connectome"])
    figures.sensitivity_curves("m2lgdg-connectome", scores, axes, default)
    lowest = sheets[0].canvas.axes[-len(axes) :]
    assert [panel.get_xlabel() for panel in lowest] == list(axes)
    for panel in lowest:
        labels = panel.get_xticklabels()
        assert [float(label.get_text()) for label in labels] == sorted(axes[panel.get_xlabel()])
        boxes = [label.get_window_extent() for label in labels if label.get_rotation() == 0]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_ablations(areas, predictions):
    rows = rows_of("ablations")
    names = [{"the": "", "`scan`": "scan"}.get(row[0].split(",")[0].split()[0], row[0][:2]) for row in rows]
    assert names == ["", "M1", "M2", "scan", "C1", "C2", "C3"]
    paper = pd.read_csv(ROOT / "studies" / "paper-rest-meta-mdd.csv", dtype={"value": str}).set_index(
        ["method", "target", "metric"]
    )
    for i, (study, method) in enumerate(
        (("paper/ablation", "m2lgdg"), ("paper/connectome", "m2lgdg-connectome")),
    ):
        trained = cell_scores(predictions[study], ["AUC"]).set_index(["variant", "target", "seed"])["value"] * 100
        assert (trained.loc[""] == trained.loc["C4"]).all()
        for name, (_, *cells, published) in zip(names, rows, strict=True):
            nyu, usm, difference = cells[3 * i : 3 * i + 3]
            assert published == (
                "" if name == "scan" else halves_up(paper.loc[(f"m2lgdg: {name or 'C4'}", "all", "AUC"), "value"])
            )
            if (study, method, name, "NYU") not in areas:
                assert (name, nyu, usm, difference) == ("scan", "", "", "")
                continue
            assert numbers(nyu, usm) == close([*areas[study, method, name, "NYU"], *areas[study, method, name, "USM"]])
            if not name:
                assert difference == ""
                continue
            beyond = trained.loc[""] - trained.loc[name]
            assert len(beyond) == 10
            half = inside_sites(beyond)
            assert numbers(difference) == close([beyond.mean(), beyond.mean() - half, beyond.mean() + half])


def test_sweeps(predictions):
    cells = cell_scores(predictions["sensitivity/m2lgdg"], ["AUC"])
    trained = cells.set_index(["variant", "target", "seed"])["value"] * 100
    names = [name for name in dict.fromkeys(cells["variant"]) if name]
    default = {name for name in names if (trained.loc[name] == trained.loc[""]).all()}  # the trainings of the whole
    assert len(default) == 5 == len({name.split("=")[0] for name in default})
    changed = {name: trained.loc[name] - trained.loc[""] for name in names if name not in default}
    texts = {
        name: [part.mean(), part.mean() - inside_sites(part), part.mean() + inside_sites(part)]
        for name, part in changed.items()
    }
    text = text_of("sweep-summary")
    usual, count, far, largest = re.search(r"default \(([\d.]+)\), of (\d+) .*?: `(.*?)`: (.*?\))\.", text).groups()
    assert numbers(usual) == close([trained.loc[""].mean()]) and int(count) == len(changed)
    assert far == max(changed, key=lambda name: abs(changed[name].mean())) and numbers(largest) == close(texts[far])
    apart = {name for name, part in changed.items() if abs(part.mean()) > inside_sites(part)}
    (single,) = apart
    count, value, interval = re.search(r"without zero: (\d+) \(`(.*?)`: (.*?\))\)\.", text).groups()
    assert (int(count), value) == (1, single) and numbers(interval) == close(texts[single])
    fields = {name.split("=")[0] for name in names}
    best = [
        max((name for name in names if name.split("=")[0] == field), key=lambda name: trained.loc[name].mean())
        for field in fields
    ]
    highest, total = re.search(r"at the default: (\d) of (\d)\.", text).groups()
    assert (int(highest), int(total)) == (sum(name in default for name in best), 5)
    ranges = trained[~trained.index.get_level_values("variant").isin(default)].groupby(level=["variant", "target"]).agg(np.ptp)
    assert numbers(*re.search(r"median ([\d.]+), largest ([\d.]+)\.", text).groups()) == close([ranges.median(), ranges.max()])


def test_regions_and_explanations():
    folders = sorted((RESULTS / "paper/networks" / "explanations").iterdir())
    assert len(folders) == 10
    each = {folder.name: pd.read_csv(folder / "roi.csv").set_index("roi")["score"] for folder in folders}
    names = sorted(next(iter(each.values())).index)
    scores = np.array([own[names] for own in each.values()])  # (training, roi)
    order = np.argsort(-scores.mean(axis=0))
    text = text_of("regions")
    assert re.search(r"Ten highest: (.*?)\.", text)[1].split(", ") == [names[i] for i in order[:10]]
    mean = scores.mean(axis=0)
    assert int(re.search(r"(\d+) % above", text)[1]) == round(100 * (mean[order[0]] / mean[order[19]] - 1))
    low, high = (float(value) for value in re.search(r"by training: (\S+) to (\S+)\.", text).groups())
    assert (low, high) == pytest.approx((scores.max(axis=1).min(), scores.max(axis=1).max()), rel=0.06)
    equal = np.argsort(-(scores / scores.mean(axis=1, keepdims=True)).mean(axis=0))
    count, first, second = re.search(r"(\d+) of the ten remain, led by (\S+) and (\S+)\.", text).groups()
    assert (int(count), first, second) == (len({*order[:10]} & {*equal[:10]}), names[equal[0]], names[equal[1]])
    ranks = np.corrcoef(np.argsort(np.argsort(scores, axis=1), axis=1))
    assert float(text.rsplit(" ", 1)[1].rstrip(".")) == pytest.approx(ranks[np.triu_indices(10, 1)].mean(), abs=0.00501)
    gates = []
    for folder in folders:
        gate = pd.read_csv(folder / "gate.csv")
        gates.append((gate["imaging"] * gate["subjects"]).sum() / gate["subjects"].sum())
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
    first, second = (
        predictions[study].query("method == 'm2lgdg' and variant == ''").set_index(["target", "seed", "subject"])["proba"]
        for study in studies
    )
    apart = (first - second.loc[first.index]).abs().groupby(level=["target", "seed"]).max()
    epochs = [
        {(one["target"], one["seed"]): one["learned"]["best_epoch"] for one in records[study, "m2lgdg", ""]}
        for study in studies
    ]
    text = text_of("repeats").split("**", 2)[2]
    same, count, low, high, median, *again = numbers(text)
    assert (same, count) == (sum(epochs[0][key] == epochs[1][key] for key in epochs[0]), 10)
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
