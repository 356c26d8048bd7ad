"""Published values beside a study's own: in the tables, on the page, and the paper's numbers that are in the repository."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from m2lgdg import InputError, make
from m2lgdg.cli import main
from m2lgdg.registry import PAPER
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import study_tables
from m2lgdg.report.published import read_published
from m2lgdg.report.tables import render
from m2lgdg.study.stats import paired_tests

pytestmark = pytest.mark.usefixtures("figures_painted_only")

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture
def predictions():
    """M²LG-DG right about everybody at A, wrong about one of four at B; its C4 and another method the same."""
    rows = []
    for method, variant in (("m2lgdg", ""), ("m2lgdg", "C4"), ("prior", "")):
        for target, proba in (("A", (0.9, 0.8, 0.2, 0.1)), ("B", (0.9, 0.3, 0.2, 0.1))):
            rows += [(method, variant, 0, target, f"{target}{i}", int(i < 2), one) for i, one in enumerate(proba)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


@pytest.fixture
def published(tmp_path):
    path = tmp_path / "paper.csv"
    path.write_text("method,target,metric,value\nm2lgdg,B,ACC,61.5\nm2lgdg: C4,all,AUC,69.48\nelsewhere,B,ACC,50\n")
    return path


def test_values_stand_where_they_belong(predictions, published):
    tables = read_published(published, {"m2lgdg", "m2lgdg: C4"}, {"A", "B"}).beside(study_tables(predictions, least=1), "AB")
    cells = {}
    for table in tables:
        for row in table.shown:
            cells |= {(table.title, row[0], name): cell for name, cell in zip(table.header, row, strict=True)}
    assert cells["Target B", "m2lgdg", "ACC"] == "75.00 [61.50]"
    assert cells["Target B", "prior", "ACC"] == "75.00"
    assert cells["Target A", "m2lgdg", "ACC"] == "100.00"
    assert cells["Macro average over target sites", "m2lgdg: C4", "AUC"] == "100.00 ± 0.00 [69.48]"
    assert sum("[" in cell for cell in cells.values()) == 2
    assert ["in brackets: published values (paper.csv)" in table.note for table in tables] == [False, True, True]
    sheet = render(tables, "csv").splitlines()
    assert sheet[0] == "table,method,metric,mean,sd,published"
    assert "Target B,m2lgdg,ACC,75.00,,61.50" in sheet
    assert "Macro average over target sites,m2lgdg: C4,AUC,100.00,0.00,69.48" in sheet
    assert render(study_tables(predictions), "csv").splitlines()[0] == "table,method,metric,mean,sd"


def test_the_command_and_the_page(predictions, published, tmp_path, monkeypatch, capsys):
    predictions.to_csv(tmp_path / "predictions.csv", index=False)
    (tmp_path / "study.json").write_text(json.dumps({"method": {"m2lgdg": make("m2lgdg").fields()}, "min_per_class": 1}))
    monkeypatch.setattr(sys, "argv", ["m2lgdg", "table", str(tmp_path), "--beside", str(published)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and "75.00 [61.50]" in capsys.readouterr().out
    write_report(tmp_path, published=published)
    assert "100.00 ± 0.00 [69.48]" in (tmp_path / "tables" / "Ablations-of-m2lgdg.csv").read_text()
    reported = (tmp_path / "tables" / "Ablations-of-m2lgdg.md").read_text().splitlines()[-1]
    assert "Holm-corrected within AUC" in reported
    assert "(little power with 2 sites). C4: the full method" in reported
    assert "75.00 [61.50]" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method,site,metric,value\n", "columns method, target, metric, value"),
        ("method,target,metric,value\nm2lgdg,B,ACC,high\n", "line 2: 'high' is not a number"),
        ("method,target,metric,value\nm2lgdg,B,ACC,1\nm2lgdg,B,ACC,2\n", "line 3: ACC of m2lgdg at B is given twice"),
        ("method,target,metric,value\nm2lgdg,C,ACC,1\n", "no value for a method and target of this study"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    (tmp_path / "paper.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        read_published(tmp_path / "paper.csv", {"m2lgdg"}, {"A", "B"})
    with pytest.raises(InputError, match="does not exist"):
        read_published(tmp_path / "none.csv", {"m2lgdg"}, {"A", "B"})


@pytest.mark.parametrize(("release", "targets"), [("abide", ["NYU", "USM"]), ("rest-meta-mdd", ["S9", "S15", "S20", "S21"])])
def test_the_papers_numbers_are_whole(release, targets):
    table = pd.read_csv(STUDIES / f"paper-{release}.csv")
    sites = table[table["target"] != "all"]
    assert sites.groupby(["method", "target"])["metric"].nunique().to_dict() == {(m, t): 5 for m in PAPER for t in targets}
    assert sites["value"].between(20, 95).all()


def test_the_papers_macro_values_follow_from_its_site_table():
    """So that a slip in copying either would show; Panel B's largest t does too."""
    table = pd.read_csv(STUDIES / "paper-rest-meta-mdd.csv")
    sites, macro = table[table["target"] != "all"], table[table["target"] == "all"]
    means = sites.groupby(["method", "metric"])["value"].mean()
    for row in macro[macro["method"].isin(PAPER)].itertuples():
        assert means[row.method, row.metric] == pytest.approx(row.value, abs=0.0101), (row.method, row.metric)
    scores = sites.rename(columns={"value": "mean"}).assign(variant="", sd=0.0, seeds=5)
    tests = paired_tests(scores, ("m2lgdg", "")).set_index(["method", "metric"])
    assert tests.loc[("mm-gtunets", "AUC"), "t"] == pytest.approx(14.39, abs=0.05)
