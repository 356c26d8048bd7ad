"""Panel B: paired tests of one method against chosen rivals for all five metrics, and averages next to the paper's."""

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

import m2lgdg
from m2lgdg import InputError
from m2lgdg.cli import main
from m2lgdg.metrics import PAPER_METRICS, evaluate
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import Comparison, one_panel, panels_of, study_tables
from m2lgdg.report.published import read_published
from m2lgdg.study.stats import holm

STUDIES = Path(__file__).parents[1] / "studies"
RIVALS = ("msstan", "m2dc", "mm-gtunets", "metaexplainer")
PRINTED = {  # difference, t and Holm-adjusted p of the paper, in the order of RIVALS
    "ACC": [(2.97, 5.76, 0.017), (2.04, 7.15, 0.017), (1.62, 6.84, 0.017), (2.04, 9.17, 0.011)],
    "SEN": [(2.85, 4.61, 0.019), (2.54, 11.85, 0.004), (2.09, 8.36, 0.007), (2.02, 14.97, 0.003)],
    "AUC": [(3.60, 3.74, 0.033), (2.57, 5.07, 0.030), (2.17, 14.39, 0.003), (2.22, 6.44, 0.023)],
    "F1": [(2.99, 1.54, 0.880), (2.31, 1.28, 0.880), (1.70, 1.10, 0.880), (1.89, 1.08, 0.880)],
}


def predicted(seed=0, sites=("A", "B", "C", "D"), methods=("one", "two", "three", "four")):
    """Forty subjects a site, two seeds; the methods differ in how much they know."""
    rng, rows = np.random.default_rng(seed), []
    for strength, method in enumerate(methods):
        for site in sites:
            labels = np.array([0, 1] * 20)
            for run in (0, 1):
                scores = 1 / (1 + np.exp(-(0.4 * (strength + 1) * (2 * labels - 1) + rng.normal(size=40))))
                rows += [
                    (method, "", run, site, f"{site}{i}", label, score)
                    for i, (label, score) in enumerate(zip(labels, scores, strict=True))
                ]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def test_the_papers_panel_follows_from_its_site_table():
    """Its values are rounded to two digits, so t differs a little; every p is the paper's to its last digit or nearly."""
    table = pd.read_csv(STUDIES / "paper-rest-meta-mdd.csv")
    sites = table[table["target"] != "all"].rename(columns={"value": "mean"}).assign(variant="", sd=0.0, seeds=5)
    sites["mean"] /= 100
    panels = {table.title.split(", ")[1]: table for table in panels_of(sites, ("m2lgdg", ""), [(name, "") for name in RIVALS])}
    assert list(panels) == list(PAPER_METRICS)
    for metric, printed in PRINTED.items():
        assert [row[0] for row in panels[metric].shown] == list(RIVALS)
        for row, (difference, t, p) in zip(panels[metric].shown, printed, strict=True):
            assert float(row[1]) == pytest.approx(difference, abs=0.0101)
            assert float(row[2]) == pytest.approx(t, rel=0.02)
            assert float(row[4]) == pytest.approx(p, abs=0.0025)
    assert {row[4] for row in panels["SPE"].shown} == {"0.351"}  # the paper's text: p_Holm = 0.351 for all four
    assert (panels["SPE"].shown[0][1], panels["SPE"].shown[2][1]) == ("+2.97", "+1.07")


def test_every_number_against_scipy():
    predictions = predicted()
    panels = Comparison(predictions, "one", rivals=["three", "four"]).panels()
    assert [table.header[1].split()[0] for table in panels] == list(PAPER_METRICS)
    scores = {}
    for (method, site), part in predictions.groupby(["method", "target"]):
        runs = [evaluate(one["label"].to_numpy(), one["proba"].to_numpy()) for _, one in part.groupby("seed")]
        for metric in PAPER_METRICS:
            scores.setdefault((method, metric), {})[site] = np.mean([run[metric] for run in runs])
    for metric, table in zip(PAPER_METRICS, panels, strict=True):
        own, others = list(scores["one", metric].values()), [list(scores[name, metric].values()) for name in ("three", "four")]
        tests = [ttest_rel(own, other) for other in others]
        adjusted = holm([test.pvalue for test in tests])
        for row, other, test, p in zip(table.shown, others, tests, adjusted, strict=True):
            assert row[1] == f"{100 * np.mean(np.subtract(own, other)):+.2f}"
            assert row[2] == f"{test.statistic:.2f}"
            assert row[3:] == ["<0.001" if value < 0.001 else f"{value:.3f}" for value in (test.pvalue, p)]


def test_the_macro_table_tests_the_same_rivals():
    predictions = predicted()
    (panel,) = one_panel(Comparison(predictions, "one", rivals=["three", "four"]).panels())
    macro = study_tables(predictions, "one", rivals=["three", "four"])[-1]
    rows = {row[0]: row for row in macro.shown}
    assert rows["two"][-1] == "-" and rows["two"][-2] != "-"  # its difference, but no test
    at = panel.header.index("AUC p (Holm)")
    assert {row[0]: row[at] for row in panel.shown} == {name: rows[name][-1] for name in ("three", "four")}
    assert len(panel.header) == 1 + 4 * len(PAPER_METRICS) and "of three, four only" in macro.note
    everybody = one_panel(Comparison(predictions, "one").panels())[0]
    assert [row[0] for row in everybody.shown] == ["two", "three", "four"]
    assert one_panel(Comparison(predictions[predictions.target == "A"], "one").panels()) == []
    assert one_panel(Comparison(predictions[predictions.method == "one"]).panels()) == []


def test_what_cannot_be_tested_is_refused(tmp_path):
    predictions = predicted()
    with pytest.raises(InputError, match="one cannot be its own rival"):
        Comparison(predictions, "one", rivals=["two", "one"]).panels()
    with pytest.raises(InputError, match="the study has no method five; it has one, two, three, four"):
        Comparison(predictions, "one", rivals=["five"]).panels()
    predictions[predictions.target == "A"].to_csv(tmp_path / "predictions.csv", index=False)
    with pytest.raises(InputError, match="paired tests need at least two target sites and two methods"):
        m2lgdg.table(tmp_path, tests=True)


def test_every_format_and_the_report(tmp_path, monkeypatch, capsys):
    predictions = predicted()
    predictions.to_csv(tmp_path / "predictions.csv", index=False)
    plain = m2lgdg.table(tmp_path, best="one")
    assert "Paired tests" not in plain
    text = m2lgdg.table(tmp_path, best="one", rivals=["four"])
    assert text.count("Paired tests over target sites, ") == 5
    (panel,) = one_panel(Comparison(predictions, "one", rivals=["four"]).panels())
    rows = list(csv.DictReader(io.StringIO(m2lgdg.table(tmp_path, "csv", best="one", rivals=["four"]))))
    written = {row["metric"]: row["mean"] for row in rows if row["table"] == "Paired tests over target sites"}
    assert written == dict(zip(panel.header[1:], panel.shown[0][1:], strict=True))
    latex = m2lgdg.table(tmp_path, "latex", best="one", rivals=["four"])
    assert " & ".join(panel.header) in latex and " & ".join(panel.shown[0]).replace("<", "$<$") in latex
    assert len(m2lgdg.table(tmp_path, best="one", tests=True).splitlines()) > len(text.splitlines())
    monkeypatch.setattr("sys.argv", ["m2lgdg", "table", str(tmp_path), "--best", "one", "--rival", "four"])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert not ended.value.code and output.out.startswith(text.rstrip("\n"))
    assert "report" in output.err and "--best one --rival four" in output.err
    write_report(tmp_path, best="one", rivals=["four"])
    file = tmp_path / "tables" / "Paired-tests-over-target-sites.csv"
    stored = list(csv.reader(io.StringIO(file.read_text())))
    assert [row[0] for row in stored] == ["Method", "four"] and stored[1][1].lstrip("'") == panel.shown[0][1]
    assert "Paired tests over target sites" in (tmp_path / "report.html").read_text()
    write_report(tmp_path)
    assert len(file.read_text().splitlines()) == 4


def test_averages_of_the_target_sites_stand_next_to_the_papers():
    predictions = predicted(sites=("NYU", "USM"), methods=("m2lgdg", "genm", "prior"))
    published = read_published(STUDIES / "paper-abide.csv", {"m2lgdg", "genm"}, {"NYU", "USM"})
    macro = published.beside(study_tables(predictions))[-1]
    cells = {(row[0], name): cell for row in macro.shown for name, cell in zip(macro.header, row, strict=True)}
    averages = {"ACC": "65.15", "SPE": "65.87", "SEN": "62.41", "AUC": "71.67", "F1": "64.37"}
    assert {metric: cells["m2lgdg", metric].split(" [")[1].rstrip("]") for metric in PAPER_METRICS} == averages
    assert cells["genm", "AUC"].endswith(f"[{(67.48 + 70.21) / 2:.2f}]") and "[" not in cells["prior", "AUC"]
    assert "the mean of its values at these sites" in macro.note
    table = pd.read_csv(STUDIES / "paper-abide.csv")
    means = table[table.target != "all"].groupby(["method", "metric"])["value"].mean()
    for row in table[table.target == "all"].itertuples():
        assert means[row.method, row.metric] == pytest.approx(row.value, abs=0.0101)
    more = predicted(sites=("NYU", "USM", "KKI"), methods=("m2lgdg", "genm"))
    partly = published.beside(study_tables(more))[-1]  # the paper has no value at KKI
    assert not any("[" in cell for row in partly.shown if row[0] == "genm" for cell in row)
