"""Tables that cannot be misread: constant methods, directions, sites, selection; names as text in LaTeX, Markdown and CSV."""

import csv
import io
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2lgdg.data.spreadsheets import csv_text, quoted, unquoted, unquoted_table
from m2lgdg.metrics import auc, delong_interval
from m2lgdg.registry import METHODS
from m2lgdg.report.answer import answer
from m2lgdg.report.contents import read_contents
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import INTERVAL, chosen_among, study_tables, training_tables
from m2lgdg.report.tables import latex, markdown, render
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.stats import cell_scores, over_seeds

COLUMNS = ["method", "variant", "seed", "target", "subject", "label", "proba"]
HOSTILE = "a<b>&_50% #1 $x^2$ {c} ~d\\e | \"q\" 'r' `s` [t] *u* ± → ² ≥ é Ł ß µ β Σ 漢 \x07 line\nbreak"
RESULTS = Path(__file__).parents[1] / "results"


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


# Constant methods


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


# Directions


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


def test_a_worse_variant_has_a_negative_difference():
    table = predicted({("net", ""): noisy(0.1), ("net", "less"): noisy(0.6)})
    (pairs,) = training_tables(cell_scores(table))
    assert pairs.header[2] == "AUC minus that of net"
    ((variant, _, mean, low, high),) = pairs.shown
    assert variant == "less" and float(mean) < 0 and float(low) < float(mean) < float(high)


# Sites


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


# Selection


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
    assert sentence in answer(read_contents(folder_of(table, tmp_path / "chosen"))).answer
    assert sentence in write_report(tmp_path / "chosen").read_text()
    fixed = study_tables(table, best="one")[-1]
    assert "optimistic" not in fixed.note  # chosen beforehand
    paper = table.replace({"method": {"one": "m2lgdg"}})
    assert "optimistic" not in answer(read_contents(folder_of(paper, tmp_path / "paper"))).answer
    alone = table[table.method != "two"]
    assert "optimistic" not in answer(read_contents(folder_of(alone, tmp_path / "alone"))).answer
    assert "optimistic" not in study_tables(alone)[-1].note


def test_the_first_table_of_a_sweep_has_methods_only(tmp_path):
    rows = THREE | {("two", f"width={i}"): noisy(0.3 + 0.01 * i) for i in range(30)}
    folder = folder_of(predicted(rows), tmp_path / "sweep", sweep={"two": {"width": list(range(30))}})
    page = write_report(folder).read_text()
    first, rest, _ = page.split('data-section="overall"')[1].split("</section>")[0].split("<details>")
    assert first.count("<tr>") == 1 + 3 and rest.count("<tr>") == 1 + 33
    whole = study_tables(predicted(rows))[-1]
    assert (folder / "tables" / "Macro-average-over-target-sites.md").read_text() == render([whole], "markdown")


# LaTeX


def check_latex(text):
    """What pdflatex would stumble over: braces, columns, special characters outside of mathematics, other alphabets."""
    assert re.fullmatch(r"[\x00-\x7f\u00c0-\u017e]*", text)  # accented letters are read by LaTeX as they are
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    body = re.sub(r"^%.*$", "", text, flags=re.MULTILINE)
    plain = re.sub(r"\\[\\{}$&%#_]", " ", body.replace(r"\\" + "\n", "\n"))
    assert plain.count("{") == plain.count("}")
    depth = 0
    for letter in plain:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert plain.count("$") % 2 == 0
    outside = re.sub(r"\$[^$]*\$", " ", plain)
    accents = re.sub(r"\\[\"^~]\{", "{", outside)
    assert not re.search(r"[#%^~_<>|\"]", accents), re.search(r".{20}[#%^~_<>|\"].{20}", accents)
    for columns, table in re.findall(r"\\begin\{tabular\}\{((?:[lc]|p\{6cm\})*)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL):
        count = len(re.sub(r"\{6cm\}", "", columns))
        lines = [line for line in table.splitlines() if not re.fullmatch(r"\\(top|mid|bottom)rule", line)]
        assert lines
        for line in lines:
            assert line.endswith(r" \\") and not line.lstrip().startswith(("[", "*"))
            assert len(re.findall(r"(?<!\\)&", line)) + 1 == count, line
    outer = re.sub(r"\\begin\{tabular\}.*?\\end\{tabular\}", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)&", outer)


def test_every_table_of_a_report_with_hostile_names_is_latex(tmp_path):
    renamed = {("prior", ""): THREE["prior", ""], (f"one {HOSTILE}", "M1"): noisy(0.1), ("two", HOSTILE): noisy(0.4)}
    table = predicted(renamed, targets=(HOSTILE, "[B"))
    write_report(folder_of(table, tmp_path / "study"))
    files = sorted((tmp_path / "study" / "tables").glob("*.tex"))
    assert len(files) >= 6
    for file in files:
        check_latex(file.read_text())


def test_the_committed_tables_are_latex():
    files = sorted(RESULTS.glob("*/*/tables/*.tex"))
    assert len(files) > 30
    for file in files:
        check_latex(file.read_text())


@given(st.text(max_size=40))
def test_any_name_is_latex(name):
    check_latex(latex(name))
    assert "\n" not in latex(name)


def test_signs_of_the_field_are_readable_in_latex():
    assert latex("p<0.05, R² ≥ 0.1 ± 2 → β") == r"p$<$0.05, R$^{2}$ $\geq$ 0.1 $\pm$ 2 $\rightarrow$ $\beta$"
    assert latex("Zürich, Łódź, 漢_1 50% [x]") == r"Zürich, Łódź, {[}U+6F22{]}\_1 50\% {[}x{]}"


# Markdown


@given(st.text(max_size=40))
def test_no_name_is_markup_in_markdown(name):
    text = markdown(name)
    assert "<" not in text and ">" not in text and "\n" not in text and "\r" not in text
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`\[]", re.sub(r"\\[^\\]", "", text.replace("\\\\", "")))


def test_html_of_names_stays_text_in_every_markdown_file(tmp_path):
    odd = "<img src=x onerror=alert(1)> | `c` [l](javascript:x)\n# t"
    table = predicted({("one", ""): noisy(0.1), ("two", odd): noisy(0.4)}, targets=("A", odd))
    write_report(folder_of(table, tmp_path / "study"))
    for file in (tmp_path / "study" / "tables").glob("*.md"):
        text = file.read_text()
        assert "<" not in text and not re.search(r"(?<!\\)\]\(", text), file
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1, file


# CSV


@pytest.mark.parametrize(
    "name", ["=1+1", "+cmd", "-x", "@sum", "\t=x", "\r=x", "'=x", "''=x", "＝x", "-", "'a", "", "a=b", "-1", "+2.5e3"]
)
def test_a_name_is_safe_in_a_spreadsheet_and_comes_back(name):
    safe = quoted(name)
    assert unquoted(safe) == name
    number = re.fullmatch(r"[+-]?[\d.]+(e\d+)?|-", name)
    assert number or not safe.startswith(("=", "+", "-", "@", "\t", "\r", "＝"))
    assert (safe == name) == bool(number or not name.lstrip("'").startswith(("=", "+", "-", "@", "\t", "\r", "＝")))


@given(st.lists(st.text(alphabet="='+-@a1\t", max_size=6), min_size=1, max_size=5))
def test_a_column_of_names_comes_back(names):
    table = pd.DataFrame({"name": names, "=value": np.arange(len(names)) - 1.5})
    back = pd.read_csv(io.StringIO(csv_text(table)), dtype={"name": str}, keep_default_na=False)
    assert unquoted_table(back).equals(table)


def test_formulas_are_in_no_csv_of_a_study_and_its_report(tmp_path, tiny):
    import dataclasses

    from m2lgdg import run_study
    from m2lgdg.findings import Exclusion

    sites = np.where(tiny.sites == "east", "=HYPERLINK(1)", tiny.sites)
    ids = np.array([f"@{name}" for name in tiny.subjects])
    odd = dataclasses.replace(
        tiny,
        sites=sites,
        subjects=ids,
        phenotypes=tiny.phenotypes.set_axis(ids, axis=0),
        rois=("=roi", *tiny.rois[1:]),
        excluded=(Exclusion("=gone", "+site", "-reason"),),
        truth=None,
    )
    odd.save(tmp_path / "odd.cohort")
    study = {"cohort": str(tmp_path / "odd.cohort"), "methods": ["prior", "fc-svm"], "seeds": [0], "explain": ["fc-svm"]}
    run_study(study | {"targets": ["=HYPERLINK(1)", "west"]}, tmp_path / "out")
    write_report(tmp_path / "out")
    files = sorted((tmp_path / "out").rglob("*.csv"))
    assert {"predictions.csv", "inclusion.csv", "roi.csv", "edges.csv"} <= {file.name for file in files}
    for file in files:
        for row in csv.reader(io.StringIO(file.read_text())):
            for cell in row:
                assert not re.match(r"[=@\t\r]|[+-](?!$|[\d.]+(e[+-]?\d+)?$)", cell), (file, cell)
    assert set(read_predictions(tmp_path / "out")["subject"]) <= set(ids)
    contents = read_contents(tmp_path / "out")
    assert contents.inclusion[-1] == {
        "subject": "=gone",
        "site": "+site",
        "status": "excluded",
        **dict.fromkeys(("reason", "kind"), "-reason"),
    }
    (record, explanation), *_ = contents.explanations["fc-svm"]
    assert record["target"] == "=HYPERLINK(1)" and "=roi" in set(explanation.rois["roi"])
