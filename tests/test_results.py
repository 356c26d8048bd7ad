"""The committed results: tables come from predictions, README and docs quote them right, and a cell can be repeated."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from m2lgdg import read
from m2lgdg.metrics import auc
from m2lgdg.report.contents import read_contents
from m2lgdg.report.drawing import plain
from m2lgdg.report.operating import over_seeds
from m2lgdg.report.tables import render, study_tables
from m2lgdg.study.stats import cell_scores, macro_scores, site_scores

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


@pytest.fixture(scope="module")
def predictions():
    tables = {name: pd.read_csv(RESULTS / name / "predictions.csv", keep_default_na=False) for name in STUDIES}
    return {name: table.astype({"seed": int, "label": int}) for name, table in tables.items()}


@pytest.fixture(scope="module")
def areas(predictions):
    """Mean and sd over seeds by study, method, variant and target."""
    found = {}
    for name, table in predictions.items():
        scores = site_scores(cell_scores(table))
        for row in scores[scores["metric"] == "AUC"].to_dict("records"):
            found[name, row["method"], row["variant"], row["target"]] = (100 * row["mean"], 100 * row["sd"])
    return found


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
    for table in study_tables(cell_scores(predictions[name])):
        kept = RESULTS / name / "tables" / f"{plain(table.title.replace(' ', '-'))}.md"
        assert render([table], "markdown").strip() == kept.read_text().strip()


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_quoted_networks_are_those_of_the_predictions(page, areas):
    rows = re.findall(
        r"^\| `([a-z0-9-]+)`.*?\| ([\d.]+) ± ([\d.]+) \[.*?\|.*?([\d.]+) ± ([\d.]+) \[", (ROOT / page).read_text(), re.M
    )
    assert len(rows) == 14
    for name, *told in rows:
        found = [*areas["abide", name, "", "NYU"], *areas["abide", name, "", "USM"]]
        assert [float(value) for value in told] == pytest.approx(found, abs=0.06)


def test_the_quoted_means_of_seeds_and_seconds_are_those_of_the_results(predictions):
    pattern = r"^\| `([a-z0-9-]+)` \| (?:yes)? *\| .*?\] \| ([\d.]+) \| .*?\] \| ([\d.]+) \| (\d+) \|"
    rows = re.findall(pattern, (ROOT / "docs" / "results.md").read_text(), re.M)
    assert len(rows) == 14
    table = over_seeds(predictions["abide"])
    records = [json.loads(line) for line in (RESULTS / "abide" / "records.jsonl").read_text().splitlines()]
    for name, *told, seconds in rows:
        own = table[table["method"] == name]
        found = [100 * auc(part["label"].to_numpy(), part["proba"].to_numpy()) for _, part in own.groupby("target")]
        assert [float(value) for value in told] == pytest.approx(found, abs=0.06)
        taken = [record["seconds"] for record in records if record["method"] == name]
        assert float(seconds) == pytest.approx(np.median(taken), abs=0.6)


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_seconds_of_linear_peers_and_numbers_of_the_paper_are_quoted_right(page):
    text = (ROOT / page).read_text()
    records = [json.loads(line) for line in (RESULTS / "abide" / "records.jsonl").read_text().splitlines()]
    rows = re.findall(r"^\| `([a-z0-9-]+)`.*?\| .*? / .*?\| .*? / .*?\| .*? / .*?\| (\d+) \|$", text, re.M)
    assert len(rows) == 8
    for name, seconds in rows:
        taken = np.median([record["seconds"] for record in records if record["method"] == name])
        assert float(seconds) == pytest.approx(taken, abs=0.51)
    published = pd.read_csv(ROOT / "studies" / "paper-abide.csv").set_index(["method", "target", "metric"])["value"]
    quoted = re.findall(r"^\| `([a-z0-9-]+)`.*?\[([\d.]+)\].*?\[([\d.]+)\]", text, re.M)
    assert len(quoted) == 14
    for name, *told in quoted:
        wanted = [published[name, target, "AUC"] for target in ("NYU", "USM")]
        assert told == [f"{value + 1e-6:.1f}" for value in wanted]  # halves go up


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_quoted_linear_peers_are_those_of_the_predictions(page, areas, predictions):
    pattern = (
        r"^\| `([a-z0-9-]+)`.*?\| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) ± ([\d.]+) / ([\d.]+) ± ([\d.]+) \|"
    )
    rows = re.findall(pattern, (ROOT / page).read_text(), re.M)
    assert len(rows) == 7
    macro = macro_scores(site_scores(cell_scores(predictions["abide-all-sites"])))
    for name, *told in rows:
        both = ("", "phenotypes")
        found = [areas["abide", name, variant, target][0] for target in ("NYU", "USM") for variant in both]
        for variant in both:
            own = macro[(macro["method"] == name) & (macro["variant"] == variant) & (macro["metric"] == "AUC")].iloc[0]
            found += [100 * own["mean"], 2.1098 * 100 * own["sd"] / 18**0.5]  # Student's t with 17 degrees of freedom
        assert [float(value) for value in told] == pytest.approx(found, abs=0.06)


@pytest.mark.parametrize(("page", "count"), [("networks", 12), ("generalization", 14)])
def test_the_pages_of_the_methods_quote_the_same_run(page, count, predictions):
    rows = re.findall(r"^\| (NYU|USM) \| `([a-z0-9-]+)` \| (.*) \|$", (ROOT / "docs" / f"{page}.md").read_text(), re.M)
    scores = site_scores(cell_scores(predictions["abide"]))
    known = scores[scores["variant"] == ""].set_index(["method", "target", "metric"])[["mean", "sd"]] * 100
    rows = [row for row in rows if (row[1], row[0], "AUC") in known.index]  # the others are of an earlier run, and told so
    assert len(rows) == count
    for target, name, cells in rows:
        for metric, cell in zip(("AUC", "ACC", "SEN", "SPE", "F1"), cells.split(" | "), strict=True):
            told = [float(value) for value in re.findall(r"[\d.]+", cell)[:2]]
            assert told == pytest.approx(known.loc[name, target, metric].tolist(), abs=0.06)


def half_interval(sd, count):
    return student.ppf(0.975, count - 1) * sd / count**0.5


def inside_sites(differences):
    """Half the interval of the mean of as many differences at NYU as at USM, from their spread inside each."""
    spread = np.mean([differences.xs(site, level="target").var(ddof=1) for site in ("NYU", "USM")])
    return student.ppf(0.975, len(differences) - 2) * (spread / len(differences)) ** 0.5


@pytest.mark.parametrize(
    ("page", "pattern", "count"),
    [
        ("README.md", r"^\| `([a-z0-9-]+)` .*? \[.*?\] \| .*? \[.*?\] \| ([\d.]+) ± ([\d.]+) \| \d+ \|$", 4),
        ("docs/results.md", r"^\| `([a-z0-9-]+)` \| ([\d.]+) ± ([\d.]+) \| [\d.]+ \| ([\d.]+), ([\d.]+) \|$", 6),
    ],
)
def test_the_quoted_networks_at_all_sites_are_those_of_the_predictions(page, pattern, count, areas):
    rows = re.findall(pattern, (ROOT / page).read_text(), re.M)
    assert len(rows) == count
    for name, *told in rows:
        own = np.array(
            [mean for (study, method, _, _), (mean, _) in areas.items() if (study, method) == ("abide-all-sites", name)]
        )
        assert len(own) == 18
        found = [own.mean(), half_interval(own.std(ddof=1), 18), own.min(), own.max()]
        assert [float(value) for value in told] == pytest.approx(found[: len(told)], abs=0.06)


def test_what_is_said_of_averaged_trainings_at_all_sites_is_that_of_the_predictions(predictions):
    text = (ROOT / "docs" / "results.md").read_text()
    means = {
        key: 100 * np.mean([auc(site["label"].to_numpy(), site["proba"].to_numpy()) for _, site in part.groupby("target")])
        for key, part in over_seeds(predictions["abide-all-sites"]).groupby(["method", "variant"])
    }
    for name, told in re.findall(r"^\| `([a-z0-9-]+)` \| [\d.]+ ± [\d.]+ \| ([\d.]+) \| [\d.]+, [\d.]+ \|$", text, re.M):
        assert float(told) == pytest.approx(means[name, ""], abs=0.06)

    def below(lower, higher):
        return means[higher] - means[lower]

    own, best = ("m2lgdg", ""), ("connectome-adaptive", "phenotypes")
    assert f"{below(own, ('mm-gtunets', '')):.1f} points below `mm-gtunets`" in text
    assert f"{below(own, ('coral', '')):.1f} below `coral`" in text
    assert f"{below(own, best):.1f} below `connectome-adaptive` with phenotypes" in text
    assert f"{below(('phenotype-logistic', ''), own):.1f} above `phenotype-logistic`" in text
    assert f"three of `mm-gtunets` averaged are {below(('mm-gtunets', ''), best):.1f} below it" in text
    assert f"({below(('mm-gtunets', ''), ('fc-logistic', 'phenotypes')):.1f} below," in text
    single = (
        cell_scores(predictions["abide-all-sites"].query("method == 'mm-gtunets'"), ["AUC"]).groupby("seed")["value"].mean()
    )
    assert "is {:.1f}, {:.1f} and {:.1f} with seeds 0, 1 and 2".format(*100 * single) in text


@pytest.mark.parametrize(
    ("linear", "networks", "told"),
    [
        (
            "connectome-adaptive/phenotypes",
            "coral irm cdann mldg mm-gtunets m2lgdg",
            ("mean is at {1.0}", "of 0.1 both together are at {0.1}, with 0.3 at {0.3}, against {0.0}"),
        ),
        ("connectome-adaptive/phenotypes", "m2lgdg", ("with {0.05} at a weight of 0.05",)),
        ("fc-logistic/phenotypes", "coral irm cdann mldg mm-gtunets m2lgdg", ("({0.5}, weight 0.5)",)),
    ],
)
def test_the_quoted_fusion_is_that_of_the_predictions(linear, networks, told, monkeypatch, capsys):
    import fusion

    table = str(RESULTS / "abide-all-sites" / "predictions.csv")
    asked = [linear, *networks.split(), "--table", table, "--without", "NYU", "USM"]
    monkeypatch.setattr(sys, "argv", ["fusion.py", *asked])
    fusion.main()
    areas = json.loads(capsys.readouterr().out)["mean_auc_by_weight"]
    text = (ROOT / "docs" / "beyond.md").read_text()
    for sentence in told:
        assert re.sub(r"\{([\d.]+)\}", lambda found: f"{100 * areas[found[1]]:.1f}", sentence) in text


def test_the_quoted_ablations_are_those_of_the_predictions(areas, predictions):
    pattern = r"^\| ([MC]\d), .*? \| ([\d.]+) ± ([\d.]+) \| ([\d.]+) ± ([\d.]+) \| *(.*?) *\| ([\d.]+) \|$"
    rows = re.findall(pattern, (ROOT / "docs" / "results.md").read_text(), re.M)
    assert sorted(name for name, *_ in rows) == ["C1", "C2", "C3", "C4", "M1", "M2"]
    cells = cell_scores(predictions["abide-ablation"])
    trained = cells[cells["metric"] == "AUC"].set_index(["variant", "target", "seed"])["value"] * 100
    for name, *told, difference, _ in rows:
        found = [*areas["abide-ablation", "m2lgdg", name, "NYU"], *areas["abide-ablation", "m2lgdg", name, "USM"]]
        assert [float(value) for value in told] == pytest.approx(found, abs=0.06)
        beyond = trained.loc[""] - trained.loc[name]
        assert len(beyond) == 10
        if name == "C4":
            assert difference == "" and (beyond == 0).all()
            continue
        mean, low, high = (float(value) for value in re.findall(r"-?[\d.]+", difference))
        half = inside_sites(beyond)
        assert [mean, low, high] == pytest.approx([beyond.mean(), beyond.mean() - half, beyond.mean() + half], abs=0.06)


def test_the_quoted_sweeps_are_those_of_the_predictions(predictions):
    text = (ROOT / "docs" / "results.md").read_text()
    pattern = r"^\| `(\w+)` \| .*? \(([\d.]+)\) \| ([\d.]+) at ([\d.]+) \| ([\d.]+) at ([\d.]+) \| (.*?) at ([\d.]+) \|$"
    rows = re.findall(pattern, text, re.M)
    assert len(rows) == 5
    cells = cell_scores(predictions["abide-sensitivity"], ["AUC"])
    trained = cells.set_index(["variant", "target", "seed"])["value"] * 100
    excluded, highest_at_default = [], 0
    for field, default, low, at_low, high, at_high, difference, at in rows:
        own = {name.split("=")[1]: trained.loc[name] for name in set(cells["variant"]) if name.startswith(f"{field}=")}
        means = {value: part.mean() for value, part in own.items()}
        assert min(means, key=means.get) == at_low and float(low) == pytest.approx(means[at_low], abs=0.06)
        assert max(means, key=means.get) == at_high and float(high) == pytest.approx(means[at_high], abs=0.06)
        assert means[default] == pytest.approx(69.7, abs=0.06)
        highest_at_default += at_high == default
        changed = {value: trained.loc[""] - part for value, part in own.items() if value != default}
        assert max(changed, key=lambda value: abs(changed[value].mean())) == at
        mean, half = changed[at].mean(), inside_sites(changed[at])
        told = [float(value) for value in re.findall(r"-?[\d.]+", difference)]
        assert told == pytest.approx([mean, mean - half, mean + half], abs=0.06)
        excluded += [abs(part.mean()) > inside_sites(part) for part in changed.values()]
    assert (len(excluded), sum(excluded), highest_at_default) == (27, 1, 1)
    same = {f"{field}={default}" for field, default, *_ in rows}  # the trainings of the whole
    spread = trained[~trained.index.get_level_values("variant").isin(same)].groupby(level=["variant", "target"]).agg(np.ptp)
    assert (len(spread), spread.median(), spread.max()) == (56, pytest.approx(4.5, abs=0.06), pytest.approx(14.9, abs=0.06))


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
    told = repeated(RESULTS / "abide", cohort, "fc-logistic", "phenotypes", "USM", 0, "cpu")
    assert told["largest_difference"] < 1e-3  # float32 series here, float16 there
    assert told["auc"] == pytest.approx(told["committed"], abs=0.005)
    assert told["auc"] > 0.8
