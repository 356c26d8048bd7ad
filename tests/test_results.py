"""The committed results: tables of the pages come from predictions and agree with oracles, and a cell can be repeated."""

import importlib.util
import json
import re
import shutil
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from scipy.stats import t as student

from m2lgdg import read
from m2lgdg.metrics import auc
from m2lgdg.report.contents import read_contents
from m2lgdg.report.drawing import plain
from m2lgdg.report.tables import render, study_tables
from m2lgdg.study.stats import cell_scores, macro_scores, over_seeds, site_scores

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))
STUDIES = {
    "abide": 172,
    "abide-all-sites": 612,
    "abide-ablation": 70,
    "abide-sensitivity": 198,
    "abide-plus": 16,
    "abide-plus-small": 16,
}
TARGETS = ("NYU", "USM")
METRICS = ("AUC", "ACC", "SEN", "SPE", "F1")
BEST = ("connectome-adaptive", "phenotypes")


def load_tables():
    spec = importlib.util.spec_from_file_location("tables_of_the_pages", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = load_tables()
PLACES = [(page, key) for page in TABLES.pages() for key in TABLES.blocks(page)]


def rows_of(key, page=None):
    """Rows of a table as lists of cells, from the page that shows it."""
    ((place, _),) = [found for found in PLACES if found[1] == key and page in (None, found[0].name)]
    lines = [line for line in TABLES.blocks(place)[key] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def text_of(key):
    ((place, _),) = [found for found in PLACES if found[1] == key]
    return "\n".join(TABLES.blocks(place)[key])


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
    table = pd.Series({key[1:]: value[0] for key, value in areas.items() if key[0] == "abide-all-sites"})
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
    lines = {name: (RESULTS / name / "records.jsonl").read_text().splitlines() for name in ("abide", "abide-ablation")}
    return {name: [json.loads(line) for line in part] for name, part in lines.items()}


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


@pytest.mark.parametrize("name", STUDIES)
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
    page.write_text(whole.replace("| `m2lgdg` | yes | 67.4", "| `m2lgdg` | yes | 76.4"))
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


def test_networks_at_nyu_and_usm(areas, published, records):
    columns = (2, 4)
    rows = rows_of("paper-table")
    assert len(rows) == 14
    for row in rows:
        name, _ = named(row[0])
        for column, target in zip(columns, TARGETS, strict=True):
            *values, paper = re.findall(r"[\d.]+", row[column])
            assert [float(value) for value in values] == close(list(areas["abide", name, "", target]))
            assert paper == halves_up(published[name, target, "AUC"])
        seconds = [record["seconds"] for record in records["abide"] if record["method"] == name]
        assert float(row[-1]) == pytest.approx(np.median(seconds), abs=0.51)


def test_networks_with_averaged_seeds(averaged):
    rows = rows_of("paper-table")
    assert len(rows) == 14
    for row in rows:
        expected = averaged["abide"][named(row[0])]
        assert numbers(row[3], row[5]) == close([expected[target] for target in TARGETS])
    sees = {named(row[0])[0] for row in rows if row[1] == "yes"}
    study = json.loads((RESULTS / "abide" / "study.json").read_text())
    assert sees <= set(study["methods"]) and len(sees) == 7


def test_linear_models(areas, predictions, records):
    rows = rows_of("linear-peers")
    assert len(rows) == 8
    macro = macro_scores(site_scores(cell_scores(predictions["abide-all-sites"])))
    for row in rows:
        name, _ = named(row[0])
        variants = [""] if name == "phenotype-logistic" else ["", "phenotypes"]
        expected = [areas["abide", name, variant, target][0] for target in TARGETS for variant in variants]
        for variant in variants:
            own = macro[(macro["method"] == name) & (macro["variant"] == variant) & (macro["metric"] == "AUC")].iloc[0]
            expected += [100 * own["mean"], 2.1098 * 100 * own["sd"] / 18**0.5]  # Student's t with 17 degrees of freedom
        assert numbers(*(cell.replace("- /", "") for cell in row[1:4])) == close(expected)
        seconds = [record["seconds"] for record in records["abide"] if record["method"] == name]
        assert float(row[4]) == pytest.approx(np.median(seconds), abs=0.51)


def test_networks_at_all_sites(by_site, averaged):
    rows = rows_of("networks-all-sites")
    assert len(rows) == 6
    for row in rows:
        own = by_site[named(row[0])]
        assert len(own) == 18
        assert numbers(row[1]) == close([own.mean(), half_interval(own.std(ddof=1), 18)])
        assert numbers(row[2]) == close([np.mean(list(averaged["abide-all-sites"][named(row[0])].values()))])
        assert numbers(row[3]) == close([own.min(), own.max()])


@pytest.mark.parametrize(("key", "count"), [("networks-abide", 12), ("generalization-abide", 14)])
def test_all_metrics_of_the_compared_networks(key, count, scores, published):
    rows = rows_of(key)
    assert len(rows) == count
    for target, cell, *cells in rows:
        name, _ = named(cell)
        for metric, text in zip(METRICS, cells, strict=True):
            *values, paper = re.findall(r"[\d.]+", text)
            assert [float(value) for value in values] == close(list(scores["abide", name, "", target, metric]))
            assert paper == halves_up(published[name, target, metric])


def test_the_committed_run_of_m2lgdg(scores, published, records):
    rows = rows_of("m2lgdg-abide")
    assert [row[0] for row in rows] == list(TARGETS)
    for target, *cells, validation, paper in rows:
        for metric, text in zip(METRICS, cells, strict=False):
            assert numbers(text) == pytest.approx(list(scores["abide", "m2lgdg", "", target, metric]), abs=0.00501)
        learned = [
            record["learned"] for record in records["abide"] if (record["method"], record["target"]) == ("m2lgdg", target)
        ]
        best = np.array([100 * own["history"][own["best_epoch"] - 1]["val_auc"] for own in learned])
        assert len(best) == 5
        assert numbers(validation) == close([best.mean(), best.std(ddof=1)])
        assert float(paper) == float(published["m2lgdg", target, "AUC"])


def test_differences_from_the_paper_and_from_m2lgdg(areas, published):
    rows = rows_of("paper-differences")
    assert len(rows) == 13
    for row in rows:
        name, _ = named(row[0])
        here = [areas["abide", name, "", target][0] for target in TARGETS]
        paper = [float(published[name, target, "AUC"]) for target in TARGETS]
        own = [areas["abide", "m2lgdg", "", target][0] for target in TARGETS]
        expected = [*np.subtract(here, paper), *np.subtract(here, own)]
        assert numbers(*row[1:]) == close(expected)


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


def test_delong_against_m2lgdg(averaged, predictions):
    rows = rows_of("delong-m2lgdg")
    assert len({named(row[0]) for row in rows}) == 28
    table = over_seeds(predictions["abide"]).set_index(["method", "variant", "target", "subject"]).sort_index()
    p_values = []
    for row in rows:
        for target, difference, p in zip(TARGETS, (row[1], row[3]), (row[2], row[4]), strict=True):
            expected = averaged["abide"][named(row[0])][target] - averaged["abide"]["m2lgdg", ""][target]
            assert numbers(difference) == close([expected])
            other, own = table.loc[(*named(row[0]), target)], table.loc[("m2lgdg", "", target)]
            p_values.append(delong_p(own["label"].to_numpy(), other["proba"].to_numpy(), own["proba"].to_numpy()))
            assert as_chance(p) == pytest.approx(p_values[-1], abs=0.000501)
    count, smallest = re.search(r"over these (\d+) tests: ([\d.]+)\.", text_of("delong-m2lgdg")).groups()
    assert int(count) == len(p_values) == 56
    assert float(smallest) == pytest.approx(holm(p_values).min(), abs=0.00501)


def test_the_best_model_against_all_others(by_site):
    rows = rows_of("against-best")
    keys = [named(row[0]) for row in rows]
    assert sorted(keys) == sorted(set(by_site.columns) - {BEST})
    p_values = np.array([paired_p(by_site[BEST], by_site[key]) for key in keys])
    for row, key, p, adjusted in zip(rows, keys, p_values, holm(p_values), strict=True):
        assert numbers(row[1]) == close([(by_site[BEST] - by_site[key]).mean()])
        assert as_chance(row[2]) == pytest.approx(p, abs=0.000501)
        assert as_chance(row[3]) == pytest.approx(adjusted, abs=0.000501)


def test_nyu_and_usm_beside_the_other_sites(by_site):
    rows = rows_of("two-sites")
    assert {named(row[0]) for row in rows} == set(by_site.columns) - {("prior", "")}
    for row in rows:
        own = by_site[named(row[0])]
        two, others = own[list(TARGETS)].mean(), own.drop(list(TARGETS)).mean()
        assert numbers(*row[1:]) == close([two, others, two - others])


@pytest.mark.parametrize(("first", "count"), [("m2lgdg", 7), ("mm-gtunets", 2)])
def test_averaged_trainings_at_all_sites(first, count, averaged, by_site):
    rows = rows_of(f"{first}-all-sites")
    assert len(rows) == count
    own = pd.Series(averaged["abide-all-sites"][first, ""])
    others = [pd.Series(averaged["abide-all-sites"][named(row[0])])[own.index] for row in rows]
    p_values = np.array([paired_p(own, other) for other in others])
    for row, other, p, adjusted in zip(rows, others, p_values, holm(p_values), strict=True):
        difference, low, high = numbers(row[1].replace("to ", ""))
        assert difference == close((own - other).mean())
        assert low < difference < high
        assert as_chance(row[2]) == pytest.approx(p, abs=0.000501)
        if first == "m2lgdg":
            assert as_chance(row[3]) == pytest.approx(adjusted, abs=0.000501)
    if first == "m2lgdg":
        alike = np.corrcoef(by_site["m2lgdg", ""], by_site["phenotype-logistic", ""])[0, 1]
        assert numbers(text_of("m2lgdg-all-sites").splitlines()[-1].split(":")[1]) == pytest.approx([alike], abs=0.00501)


@pytest.mark.parametrize(
    ("first", "second", "studies"),
    [
        (BEST, ("fc-svm", "phenotypes"), ["abide-all-sites"]),
        (("mm-gtunets", ""), BEST, ["abide-all-sites"]),
        (("m2lgdg-plus", ""), BEST, ["abide-plus", "abide-all-sites"]),
    ],
)
def test_comparisons_are_those_of_the_benchmark(first, second, studies, monkeypatch, capsys):
    """With fewer draws than the pages have, since the benchmark computes every AUC of every draw anew."""
    import paired

    monkeypatch.setattr(paired, "DRAWS", 100)
    monkeypatch.setattr(TABLES, "DRAWS", 100)
    monkeypatch.setattr(TABLES, "bootstrap", TABLES.bootstrap.__wrapped__)  # without its cache
    files = [str(RESULTS / study / "predictions.csv") for study in studies]
    monkeypatch.setattr(sys, "argv", ["paired.py", "/".join(first).strip("/"), "/".join(second), *files])
    paired.main()
    expected = json.loads(capsys.readouterr().out)
    result = TABLES.paired((studies[0], first), ("abide-all-sites", second))
    assert result["means"] == pytest.approx([100 * area for area in expected["mean_auc"]], abs=0.00501)  # it rounds
    assert result["interval"] == pytest.approx([100 * limit for limit in expected["difference_95"]], abs=0.00501)
    assert result["p"] == pytest.approx(expected["p_over_sites"], abs=5.01e-6)
    assert result["counts"][0] == expected["better_at"] and sum(result["counts"]) == expected["sites"]
    for target in TARGETS if "abide-plus" not in studies else ():
        assert result["delong"][target] == pytest.approx(expected[f"delong_{target}"], abs=5.01e-5)


def test_choices_beyond_the_paper(by_site, areas):
    for key, methods in (("first-choice", 4), ("second-choice", 3)):
        rows = rows_of(key)
        assert len(rows) == methods
        for row in rows:
            own = [by_site[named(row[0])[0], variant] for variant in ("", "phenotypes")]
            sixteen, whole = [part.drop(list(TARGETS)).mean() for part in own], [part.mean() for part in own]
            alone = [part[target] for target in TARGETS for part in own]
            assert numbers(*row[1:]) == close([*sixteen, *alone, *whole])
    for row in rows_of("against-fc-svm"):
        name, variant = named(row[0])
        difference = by_site[name, variant] - by_site["fc-svm", variant]
        assert numbers(row[1])[0] == close(difference.mean())
        assert numbers(row[2]) == [(difference > 0).sum(), 18]
        assert as_chance(row[3]) == pytest.approx(paired_p(by_site[name, variant], by_site["fc-svm", variant]), abs=0.000501)
        assert [numbers(cell)[0] for cell in row[4:]] == close([difference[target] for target in TARGETS])


def test_the_network_on_top_of_the_linear_head(areas, by_site):
    head, *rows = rows_of("plus")
    assert numbers(head[1]) == close([by_site[BEST].drop(list(TARGETS)).mean()])
    for row, study in zip(rows, ("abide-plus", "abide-plus-small"), strict=True):
        own = pd.Series({key[3]: value[0] for key, value in areas.items() if key[0] == study})
        assert len(own) == 16
        difference = own - by_site[BEST][own.index]
        assert numbers(row[1]) == close([own.mean()])
        assert numbers(row[2])[0] == close(difference.mean())
        same = difference.abs() < 1e-9
        assert numbers(row[3]) == [(difference[~same] > 0).sum(), same.sum(), (difference[~same] < 0).sum()]
        assert as_chance(row[4]) == pytest.approx(paired_p(own, by_site[BEST][own.index]), abs=0.000501)


def test_calibration_slopes(predictions):
    from sklearn.linear_model import LogisticRegression

    def slope(part):
        p = part["proba"].to_numpy().clip(1e-6, 1 - 1e-6)
        logit = np.log(p / (1 - p))[:, None]
        return LogisticRegression(C=1e8, tol=1e-8, max_iter=1000).fit(logit, part["label"]).coef_[0, 0]

    table = predictions["abide-all-sites"]
    rows = rows_of("calibration-slopes")
    assert len(rows) == 2
    for row in rows:
        name, variant = named(row[0])
        own = table[(table["method"] == name) & (table["variant"] == variant)]
        slopes = [slope(part) for _, part in own.groupby("target")]
        assert numbers(*row[1:]) == pytest.approx([slope(own), np.median(slopes), np.mean(slopes)], abs=0.00501)


@pytest.mark.parametrize("row", range(8))
def test_fusion_is_that_of_the_benchmark(row, monkeypatch, capsys):
    import fusion

    linear, networks, correlation, *cells = rows_of("fusion")[row]
    six = ["coral", "irm", "cdann", "mldg", "mm-gtunets", "m2lgdg"]
    chosen = six if networks == "all six" else [networks.strip("`")]
    table = str(RESULTS / "abide-all-sites" / "predictions.csv")
    arguments = ["/".join(named(linear)), *chosen, "--table", table, "--without", "NYU", "USM"]
    monkeypatch.setattr(sys, "argv", ["fusion.py", *arguments])
    fusion.main()
    expected = json.loads(capsys.readouterr().out)
    assert expected["sites"] == 16
    areas = [100 * area for area in expected["mean_auc_by_weight"].values()]
    assert numbers(*cells) == pytest.approx(areas, abs=0.056)  # the benchmark has two decimals
    assert float(correlation) == pytest.approx(expected["correlation"], abs=1e-9)


def test_seeds_and_averaging(areas, averaged, predictions):
    names = [named(row[0])[0] for row in rows_of("paper-table")]
    good = [name for name in names if name not in ("ufa-net", "m2dc", "braingnn")]
    between, within = rows_of("seeds")
    means = [np.std([areas["abide", name, "", target][0] for name in good], ddof=1) for target in TARGETS]
    assert numbers(*between[1:]) == close(means)
    spreads = [np.mean([areas["abide", name, "", target][1] ** 2 for name in good]) ** 0.5 for target in TARGETS]
    assert numbers(*within[1:]) == close(spreads)
    gains = [averaged["abide"][name, ""][target] - areas["abide", name, "", target][0] for name in names for target in TARGETS]
    pattern = r"(\d+) cases\):\s+median ([\d.]+), at least one point in (\d+) cases, at most ([\d.]+), a loss in (\d+)"
    count, median, helped, most, lost = map(float, re.search(pattern, text_of("seeds")).groups())
    assert [count, helped, lost] == [len(gains), sum(gain >= 1 for gain in gains), sum(gain < 0 for gain in gains)]
    assert [median, most] == close([np.median(gains), max(gains)])
    single = (
        cell_scores(predictions["abide-all-sites"].query("method == 'mm-gtunets'"), ["AUC"]).groupby("seed")["value"].mean()
    )
    assert numbers(text_of("seeds").splitlines()[-1].split(":")[1]) == close(list(100 * single))


def test_phenotypes_alone(areas, averaged, by_site):
    *rows, (_, everywhere, *_) = rows_of("phenotypes-alone")
    names = [named(row[0])[0] for row in rows_of("paper-table")]
    for target, area, single, together in rows:
        alone = areas["abide", "phenotype-logistic", "", target][0]
        assert numbers(area) == close([alone])
        assert int(single) == sum(areas["abide", name, "", target][0] < alone for name in names)
        assert int(together) == sum(averaged["abide"][name, ""][target] < alone for name in names)
    assert numbers(everywhere) == close([by_site["phenotype-logistic", ""].mean()])


def test_threshold_and_expected_auc(predictions, by_site):
    own = predictions["abide"].query("method == 'm2lgdg'")
    for target, patients, *rates in rows_of("threshold"):
        here = own[own["target"] == target]
        assert numbers(patients) == pytest.approx([100 * here["label"].mean()], abs=0.501)
        for label, text in zip((1, 0), rates, strict=True):
            right = (here["proba"] >= 0.5) == (label == 1)
            values = 100 * right[here["label"] == label].groupby(here["seed"]).mean()
            assert numbers(text) == close([values.mean(), values.std(ddof=1)])
    ((mean, lowest, highest, one_site),) = rows_of("expected-auc")
    best = by_site[BEST]
    half = half_interval(best.std(ddof=1), 18)
    assert numbers(mean) == close([best.mean(), best.mean() - half, best.mean() + half])
    assert (lowest, highest) == (f"{best.min():.1f} ({best.idxmin()})", f"{best.max():.1f} ({best.idxmax()})")
    wide = 2.1098 * best.std(ddof=1) * (1 + 1 / 18) ** 0.5  # Student's t with 17 degrees of freedom
    assert numbers(one_site) == close([best.mean() - wide, best.mean() + wide])


def test_ablations(areas, predictions):
    rows = rows_of("ablations")
    assert sorted(row[0][:2] for row in rows) == ["C1", "C2", "C3", "C4", "M1", "M2"]
    paper = pd.read_csv(ROOT / "studies" / "paper-rest-meta-mdd.csv", dtype={"value": str}).set_index(
        ["method", "target", "metric"]
    )
    cells = cell_scores(predictions["abide-ablation"])
    trained = cells[cells["metric"] == "AUC"].set_index(["variant", "target", "seed"])["value"] * 100
    for text, nyu, usm, difference, published in rows:
        name = text[:2]
        expected = [*areas["abide-ablation", "m2lgdg", name, "NYU"], *areas["abide-ablation", "m2lgdg", name, "USM"]]
        assert numbers(nyu, usm) == close(expected)
        assert published == halves_up(paper.loc[(f"m2lgdg: {name}", "all", "AUC"), "value"])
        beyond = trained.loc[""] - trained.loc[name]
        assert len(beyond) == 10
        if name == "C4":
            assert difference == "" and (beyond == 0).all()
            continue
        half = inside_sites(beyond)
        assert numbers(difference) == close([beyond.mean(), beyond.mean() - half, beyond.mean() + half])


def test_training_of_the_ablations(records, averaged):
    for text, loss, validation in rows_of("ablation-training"):
        learned = [record["learned"] for record in records["abide-ablation"] if record["variant"] == text[:2]]
        assert len(learned) == 10
        lowest = sorted(min(epoch["ce"] for epoch in own["history"]) for own in learned)
        best = sorted(100 * own["history"][own["best_epoch"] - 1]["val_auc"] for own in learned)
        assert numbers(loss) == pytest.approx([lowest[0], lowest[-1]], abs=0.00501)
        assert numbers(validation) == close([best[0], best[-1]])
    whole, alone = (averaged["abide-ablation"]["m2lgdg", variant] for variant in ("", "M1"))
    difference, low, high = numbers(text_of("ablation-training").splitlines()[-1].split(":")[1])
    assert difference == close(np.mean([whole[target] - alone[target] for target in TARGETS]))
    assert low < 0 < high


def test_sweeps(predictions):
    pattern = r".*? \(([\d.]+)\) \| ([\d.]+) at ([\d.]+) \| ([\d.]+) at ([\d.]+) \| (.*?) at ([\d.]+)"
    rows = rows_of("sweeps")
    assert len(rows) == 5
    cells = cell_scores(predictions["abide-sensitivity"], ["AUC"])
    trained = cells.set_index(["variant", "target", "seed"])["value"] * 100
    excluded, highest_at_default, same = {}, 0, set()
    for cell, *others in rows:
        field = cell.strip("`")
        default, low, at_low, high, at_high, difference, at = re.fullmatch(pattern, " | ".join(others)).groups()
        own = {name.split("=")[1]: trained.loc[name] for name in set(cells["variant"]) if name.startswith(f"{field}=")}
        assert numbers(others[0])[:2] == [min(map(float, own)), max(map(float, own))]
        means = {value: part.mean() for value, part in own.items()}
        assert min(means, key=means.get) == at_low and float(low) == close(means[at_low])
        assert max(means, key=means.get) == at_high and float(high) == close(means[at_high])
        assert means[default] == close(69.7)
        highest_at_default += at_high == default
        changed = {value: trained.loc[""] - part for value, part in own.items() if value != default}
        assert max(changed, key=lambda value: abs(changed[value].mean())) == at
        mean, half = changed[at].mean(), inside_sites(changed[at])
        assert numbers(difference) == close([mean, mean - half, mean + half])
        excluded |= {f"{field}={value}": abs(part.mean()) > inside_sites(part) for value, part in changed.items()}
        same.add(f"{field}={default}")  # the trainings of the whole
    assert (len(excluded), sum(excluded.values()), highest_at_default) == (27, 1, 1)
    counts, changed, highest, ranges = text_of("sweep-summary").splitlines()
    assert numbers(counts) == [len(excluded), sum(excluded.values())]
    (name,) = [name for name, apart in excluded.items() if apart]
    gain = (trained.loc[name] - trained.loc[""]).groupby(level="target").mean()
    assert f"`{name}`" in changed
    assert numbers(changed.split(":")[1]) == close([gain.mean(), gain["NYU"], gain["USM"]])
    assert numbers(highest) == [highest_at_default, 5]
    spread = trained[~trained.index.get_level_values("variant").isin(same)].groupby(level=["variant", "target"]).agg(np.ptp)
    assert numbers(ranges.split("(")[1]) == [len(spread), close(spread.median()), close(spread.max())]
    assert (len(spread), spread.median(), spread.max()) == (56, close(4.5), close(14.9))


# Commands of the pages, and a cell once more


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*.py"))])
def test_no_command_of_a_page_writes_where_results_are_committed(page):
    """`m2lgdg run` refuses a folder that holds another study, or something else."""
    for out in re.findall(r"m2lgdg run [^`\n]*?--out ([\w./-]+)", page.read_text()):
        assert not (ROOT / out).exists(), f"{page.name}: --out {out}"


def test_a_cell_can_be_repeated(abide_folder):
    from repeat import repeated

    cohort = read(abide_folder)
    if len(cohort) != 873:
        pytest.skip(f"the committed results are of 873 subjects, M2LGDG_ABIDE has {len(cohort)}")
    result = repeated(RESULTS / "abide", cohort, "fc-logistic", "phenotypes", "USM", 0, "cpu")
    assert result["largest_difference"] < 1e-3  # float32 series here, float16 there
    assert result["auc"] == pytest.approx(result["committed"], abs=0.005)
    assert result["auc"] > 0.8
