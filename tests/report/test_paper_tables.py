"""The paper's tables: right numbers, ranks, tests and notes; one study or several; nothing that can be misread."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

import m2lgdg
from m2lgdg import InputError, make
from m2lgdg.cli import main
from m2lgdg.metrics import PAPER_METRICS, auc, delong_interval, evaluate
from m2lgdg.registry import METHODS
from m2lgdg.report.answer import answer
from m2lgdg.report.contents import changed_fields, read_contents
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import (
    INTERVAL,
    Comparison,
    chosen_among,
    one_panel,
    panels_of,
    study_tables,
    training_table,
    training_tables,
)
from m2lgdg.report.published import read_published
from m2lgdg.report.tables import render
from m2lgdg.study.predictions import COLUMNS
from m2lgdg.study.stats import cell_scores, holm, over_seeds

pytestmark = pytest.mark.usefixtures("figures_painted_only")


def test_cells_are_means_and_sds_over_seeds_and_sites(predictions):
    nyu, usm, macro = study_tables(predictions)
    assert [table.title for table in (nyu, usm, macro)] == ["Target NYU", "Target USM", "Macro average over target sites"]
    areas = {}
    for (target, seed), part in predictions[predictions.method == "noisy"].groupby(["target", "seed"]):
        areas[target, seed] = 100 * auc(part.label.to_numpy(), part.proba.to_numpy())
    column = nyu.header.index("AUC")
    pair = [areas["NYU", seed] for seed in (0, 1)]
    assert nyu.shown[1][0] == "noisy: with-age"
    assert nyu.shown[1][column] == f"{np.mean(pair):.2f} ± {np.std(pair, ddof=1):.2f}"
    assert nyu.shown[0][column] == "100.00 ± 0.00"
    assert (nyu.ranks[0][column], nyu.ranks[1][column]) == (1, 2)
    sites = [np.mean([areas[site, seed] for seed in (0, 1)]) for site in ("NYU", "USM")]
    assert macro.shown[1][macro.header.index("AUC")] == f"{np.mean(sites):.2f} ± {np.std(sites, ddof=1):.2f}"
    assert macro.shown[1][macro.header.index("AUC minus that of good")] == f"{np.mean(sites) - 100:+.2f}"


def test_variants_of_one_method_are_tested_against_it_and_not_against_the_luckiest(ablated):
    macro = study_tables(ablated)[-1]
    column = macro.header.index("AUC minus that of noisy")
    areas = [auc(part.label.to_numpy(), part.proba.to_numpy()) for _, part in ablated.groupby(["variant", "target", "seed"])]
    assert [row[0] for row in macro.shown] == ["noisy", "noisy: less", "noisy: all"]
    assert [row[column] for row in macro.shown] == ["", f"{100 - 100 * np.mean(areas[:4]):+.2f}", "+0.00"]
    assert "each row minus noisy (negative: worse than noisy)" in macro.note
    assert "AUC minus that of noisy: less" in study_tables(ablated, best="noisy: less")[-1].header


def test_trainings_of_variants_are_told_with_an_interval(ablated):
    (table,) = training_tables(cell_scores(ablated))
    whole = ablated[ablated.variant == ""]
    areas = [100 * auc(part.label.to_numpy(), part.proba.to_numpy()) for _, part in whole.groupby(["target", "seed"])]
    spread = [np.var(areas[:2], ddof=1), np.var(areas[2:], ddof=1)]  # inside NYU, inside USM
    mean, half = 100 - np.mean(areas), 4.302653 * np.sqrt(np.mean(spread) / 4)  # Student's t, 2 degrees of freedom
    assert table.title == "Variants of noisy, paired by site and seed"
    assert table.shown[0] == ["less", "4", f"{mean:+.2f}", f"{mean - half:+.2f}", f"{mean + half:+.2f}"]
    assert table.shown[1] == ["all", "4", "+0.00", "-", "-"]
    assert mean > 1 and table.header[2] == "AUC minus that of noisy"
    (short,) = [training_table(cell_scores(ablated), "noisy", ["all"], "Sweeps")]
    assert (short.title, [row[0] for row in short.shown]) == ("Sweeps of noisy, paired by site and seed", ["all"])


def test_without_seeds_or_the_whole_no_trainings_are_compared(predictions, ablated):
    assert training_tables(cell_scores(predictions)) == []  # a variant alone
    assert training_tables(cell_scores(ablated[ablated.seed == 0])) == []


def test_formats(predictions):
    tables = study_tables(predictions)
    markdown = render(tables, "markdown")
    assert "| good | **" in markdown
    assert "\\textbf{" in render(tables, "latex")
    assert "\\underline{" in render(tables, "latex")
    frame = pd.read_csv(io.StringIO(render(tables, "csv")))
    good = frame[(frame["table"] == "Target NYU") & (frame["method"] == "good") & (frame["metric"] == "AUC")]
    assert good[["mean", "sd"]].to_numpy().tolist() == [[100.0, 0.0]]
    assert set(frame["table"]) == {table.title for table in tables}


def test_a_target_of_one_class_has_no_auc_but_a_sensitivity(predictions):
    alone = predictions[(predictions.target == "NYU") & (predictions.label == 1)]
    table = study_tables(pd.concat([alone, predictions[predictions.target == "USM"]]))[0]
    assert table.shown[0][table.header.index("AUC")] == "-"
    assert table.shown[0][table.header.index("SEN")] == "100.00 ± 0.00"
    assert table.shown[0][table.header.index("SPE")] == "-"


def test_what_did_not_run_with_its_defaults_is_told():
    def reported(name, **changes):
        study = json.loads(json.dumps({"method": {name: make(name, **changes).fields()}}))
        return changed_fields(study, {name: METHODS.declaration(name)})

    assert reported("m2lgdg") == ""
    assert reported("m2lgdg", epochs=17, learning_rate=1e-3) == "m2lgdg (epochs = 17, learning_rate = 0.001)"
    assert reported("fc-logistic", phenotypes=True) == 'fc-logistic (variant = "phenotypes")'
    whose = "possibly somebody's (a plugin; its fields are in study.json)"
    assert changed_fields({"method": {"somebody's": {"width": 3}}}, {}) == whose
    assert changed_fields({}, {}) == ""


def test_rows_of_fewer_sites_are_told_and_are_not_the_best(predictions):
    """`noisy` is at NYU alone, and perfect there."""
    good, noisy = (predictions[predictions.method == name].assign(variant="") for name in ("good", "noisy"))
    alone = good[good.target == "NYU"].assign(method="alone")
    macro = study_tables(pd.concat([alone, noisy]))[-1]
    assert macro.note.startswith("mean ± sd in % over 2 target sites, 40 subjects; ACC, ")
    assert "at the threshold 0.5; differences are each row minus noisy" in macro.note
    assert "means over fewer than 2 sites: alone (1)" in macro.note


def predicted(rows, labels=(0, 1) * 10, targets=("A", "B"), seeds=(0, 1)):
    """Predictions of methods; `rows` has a function (labels, rng) -> proba by (method, variant)."""
    rng = np.random.default_rng(0)
    table = []
    for target in targets:
        for (method, variant), proba in rows.items():
            for seed in seeds:
                values = np.clip(proba(np.array(labels), rng), 0, 1)
                table += [
                    (method, variant, seed, target, f"{target}{i}", y, p)
                    for i, (y, p) in enumerate(zip(labels, values, strict=True))
                ]
    return pd.DataFrame(table, columns=COLUMNS)


def noisy(amount):
    return lambda y, rng: 0.5 + 0.3 * (y - 0.5) + amount * rng.normal(size=len(y))


THREE = {("prior", ""): lambda y, rng: np.full(len(y), 0.6), ("one", ""): noisy(0.1), ("two", ""): noisy(0.4)}


def column(table, name):
    return [row[table.header.index(name)] for row in table.shown]


def ranks(table, name):
    return [row[table.header.index(name)] for row in table.ranks]


def test_a_constant_method_is_never_the_best():
    tables = study_tables(predicted(THREE))
    for table in tables:
        assert column(table, "SEN")[0].startswith("100.00")  # of all it is the highest
        assert not any(any(row) for row in table.ranks[:1])
        assert all(1 in ranks(table, metric)[1:] for metric in ("ACC", "SPE", "SEN", "AUC", "F1"))
    for form, marks in (("markdown", ("**", "_100")), ("latex", (r"\textbf", r"\underline"))):
        for line in render(tables, form).splitlines():
            if line.startswith(("| prior", "prior")):
                assert not any(mark in line for mark in marks), line


def test_a_method_that_calls_everybody_a_patient_is_not_the_most_sensitive():
    high = {("all", ""): lambda y, rng: 0.8 + 0.1 * y + 0.001 * rng.random(len(y)), ("one", ""): noisy(0.3)}
    nyu, *_, macro = study_tables(predicted(high))
    for table in (nyu, macro):
        assert column(table, "SEN")[0] == "100.00 ± 0.00" and ranks(table, "SEN") == [0, 1]
        assert ranks(table, "AUC")[0] == 1  # it ranks subjects, so its AUC counts


def test_a_constant_method_is_no_candidate_where_all_others_are_below_chance():
    below = {("prior", ""): THREE["prior", ""], ("wrong", ""): lambda y, rng: 0.5 - 0.2 * y + 0.3 * rng.random(len(y))}
    macro = study_tables(predicted(below))[-1]
    assert "AUC minus that of wrong" in macro.header
    assert ranks(macro, "AUC") == [0, 1]


def test_a_worse_row_has_a_negative_difference():
    table = predicted(THREE)
    macro = study_tables(table)[-1]
    means = {
        method: np.mean([auc(part.label, part.proba) for _, part in own.groupby(["target", "seed"])])
        for method, own in table.groupby("method")
    }
    best = max(means, key=means.get)
    assert best == "one" and macro.header[-2] == "AUC minus that of one"
    shown = dict(zip(column(macro, "Method"), column(macro, macro.header[-2]), strict=True))
    assert shown["one"] == ""
    for method in ("prior", "two"):
        assert shown[method] == f"{100 * (means[method] - means[best]):+.2f}" and shown[method].startswith("-")
    for form in ("text", "markdown", "latex", "csv"):
        assert "AUC minus that of one" in render([macro], form)


def test_each_site_has_its_size_and_an_interval():
    table = predicted(THREE)
    table = table[~((table.target == "B") & table.subject.isin(["B0", "B1", "B2"]))]
    a, b, macro = study_tables(table)
    assert column(a, "n") == ["20"] * 3 and column(b, "n") == ["17"] * 3
    mean = over_seeds(table)
    for site, shown in (("A", a), ("B", b)):
        for method in ("one", "two"):
            part = mean[(mean.method == method) & (mean.target == site)]
            low, high = delong_interval(part.label, part.proba)
            wanted = "-" if np.isnan(low) else f"{100 * low:.2f} to {100 * high:.2f}"
            assert dict(zip(column(shown, "Method"), column(shown, INTERVAL), strict=True))[method] == wanted
        assert column(shown, INTERVAL)[0] == "-"  # constant
    assert "averaged over seeds" in a.note
    assert "averaged over seeds" not in study_tables(table[table.seed == 0])[0].note
    assert "2 target sites, 37 subjects" in macro.note
    rows = pd.read_csv(io.StringIO(render([a], "csv"))).set_index(["method", "metric"])["mean"]
    low, high = (rows["two", f"{INTERVAL}, {end}"] for end in ("low", "high"))
    assert (low, high) == tuple(map(float, column(a, INTERVAL)[2].split(" to "))) and rows["one", "n"] == 20


def folder_of(table, path, **study):
    import json

    path.mkdir()
    table.to_csv(path / "predictions.csv", index=False)
    fields = {name: {} for name in set(table.method) & set(METHODS)}
    settings = {"method": fields, "methods": sorted(set(table.method)), "targets": sorted(set(table.target)), "seeds": [0, 1]}
    (path / "study.json").write_text(json.dumps(settings | study))
    return path


def test_a_method_chosen_at_these_sites_is_named_as_such(tmp_path):
    table = predicted(THREE)
    sentence = chosen_among("one", 2)  # prior is no candidate
    assert "one" in sentence and "2 methods" in sentence
    assert sentence in study_tables(table)[-1].note
    assert sentence in " ".join(answer(read_contents(folder_of(table, tmp_path / "chosen"))).notes)
    assert sentence in write_report(tmp_path / "chosen").read_text()
    fixed = study_tables(table, best="one")[-1]
    assert "optimistic" not in fixed.note  # chosen beforehand
    paper = table.replace({"method": {"one": "m2lgdg"}})
    assert not answer(read_contents(folder_of(paper, tmp_path / "paper"))).chosen
    alone = table[table.method != "two"]
    assert not answer(read_contents(folder_of(alone, tmp_path / "alone"))).chosen
    assert "optimistic" not in study_tables(alone)[-1].note


def test_the_first_table_of_a_sweep_has_methods_only(tmp_path):
    rows = THREE | {("two", f"width={i}"): noisy(0.3 + 0.01 * i) for i in range(30)}
    folder = folder_of(predicted(rows), tmp_path / "sweep", sweep={"two": {"width": list(range(30))}})
    page = write_report(folder).read_text()
    first, rest, _ = page.split('data-section="overall"')[1].split("</section>")[0].split("<details>")
    assert first.count("<tr>") == 1 + 3 and rest.count("<tr>") == 1 + 33
    whole = study_tables(predicted(rows))[-1]
    assert (folder / "tables" / "Macro-average-over-target-sites.md").read_text() == render([whole], "markdown")


STUDIES = Path(__file__).parents[2] / "studies"


RIVALS = ("msstan", "m2dc", "mm-gtunets", "metaexplainer")


PRINTED = {  # difference, t and Holm-adjusted p of the paper, in the order of RIVALS
    "ACC": [(2.97, 5.76, 0.017), (2.04, 7.15, 0.017), (1.62, 6.84, 0.017), (2.04, 9.17, 0.011)],
    "SEN": [(2.85, 4.61, 0.019), (2.54, 11.85, 0.004), (2.09, 8.36, 0.007), (2.02, 14.97, 0.003)],
    "AUC": [(3.60, 3.74, 0.033), (2.57, 5.07, 0.030), (2.17, 14.39, 0.003), (2.22, 6.44, 0.023)],
    "F1": [(2.99, 1.54, 0.880), (2.31, 1.28, 0.880), (1.70, 1.10, 0.880), (1.89, 1.08, 0.880)],
}


def four_methods(seed=0, sites=("A", "B", "C", "D"), methods=("one", "two", "three", "four")):
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
    predictions = four_methods()
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
    predictions = four_methods()
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
    predictions = four_methods()
    with pytest.raises(InputError, match="one cannot be its own rival"):
        Comparison(predictions, "one", rivals=["two", "one"]).panels()
    with pytest.raises(InputError, match="the study has no method five; it has one, two, three, four"):
        Comparison(predictions, "one", rivals=["five"]).panels()
    predictions[predictions.target == "A"].to_csv(tmp_path / "predictions.csv", index=False)
    with pytest.raises(InputError, match="paired tests need at least two target sites and two methods"):
        m2lgdg.table(tmp_path, tests=True)


def test_every_format_and_the_report(tmp_path, monkeypatch, capsys):
    predictions = four_methods()
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
    predictions = four_methods(sites=("NYU", "USM"), methods=("m2lgdg", "genm", "prior"))
    published = read_published(STUDIES / "paper-abide.csv", {"m2lgdg", "genm"}, {"NYU", "USM"})
    macro = published.beside(study_tables(predictions), ["NYU", "USM"])[-1]
    cells = {(row[0], name): cell for row in macro.shown for name, cell in zip(macro.header, row, strict=True)}
    averages = {"ACC": "65.15", "SPE": "65.87", "SEN": "62.41", "AUC": "71.67", "F1": "64.37"}
    assert {metric: cells["m2lgdg", metric].split(" [")[1].rstrip("]") for metric in PAPER_METRICS} == averages
    assert cells["genm", "AUC"].endswith(f"[{(67.48 + 70.21) / 2:.2f}]") and "[" not in cells["prior", "AUC"]
    assert "the mean of its values at these sites" in macro.note
    table = pd.read_csv(STUDIES / "paper-abide.csv")
    means = table[table.target != "all"].groupby(["method", "metric"])["value"].mean()
    for row in table[table.target == "all"].itertuples():
        assert means[row.method, row.metric] == pytest.approx(row.value, abs=0.0101)
    more = four_methods(sites=("NYU", "USM", "KKI"), methods=("m2lgdg", "genm"))
    partly = published.beside(study_tables(more), ["NYU", "USM", "KKI"])[-1]  # the paper has no value at KKI
    assert not any("[" in cell for row in partly.shown if row[0] == "genm" for cell in row)
