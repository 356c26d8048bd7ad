"""Renderings of a table: names stay text in LaTeX, Markdown and CSV, whatever they are."""

import csv
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2lgdg.data.spreadsheets import csv_text, quoted, unquoted, unquoted_table
from m2lgdg.report.contents import read_contents
from m2lgdg.report.page import write_report
from m2lgdg.report.tables import Column, Table, latex, markdown, render
from m2lgdg.study.predictions import read_predictions

pytestmark = pytest.mark.usefixtures("figures_painted_only")

HOSTILE = "a<b>&_50% #1 $x^2$ {c} ~d\\e | \"q\" 'r' `s` [t] *u* ± → ² ≥ é Ł ß µ β Σ 漢 \x07 line\nbreak"


RESULTS = Path(__file__).parents[2] / "results"


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


def test_every_file_of_a_report_with_hostile_names_is_latex_and_markdown(predictions, tmp_path):
    odd = "<img src=x onerror=alert(1)> | `c` [l](javascript:x)\n# t"
    renamed = predictions.replace({"method": {"good": f"one {HOSTILE}"}, "variant": {"with-age": odd}})
    renamed["target"] = renamed["target"].replace({"NYU": HOSTILE, "USM": "[B"})
    renamed.to_csv(tmp_path / "predictions.csv", index=False)
    write_report(tmp_path)
    files = sorted((tmp_path / "tables").glob("*.tex"))
    assert len(files) >= 6
    for file in files:
        check_latex(file.read_text())
        text = file.with_suffix(".md").read_text()
        assert "<" not in text and not re.search(r"(?<!\\)\]\(", text), file
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1, file


@pytest.mark.long
def test_the_tables_of_committed_studies_are_latex(tmp_path):
    """Those that are committed, and those that are made of all linear models at 20 sites."""
    copy = shutil.copytree(RESULTS / "abide-all" / "linear", tmp_path / "linear")
    write_report(copy)
    files = sorted([*RESULTS.glob("*/*/tables/*.tex"), *copy.glob("tables/*.tex")])
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


@given(st.text(max_size=40))
def test_no_name_is_markup_in_markdown(name):
    text = markdown(name)
    assert "<" not in text and ">" not in text and "\n" not in text and "\r" not in text
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`\[]", re.sub(r"\\[^\\]", "", text.replace("\\\\", "")))


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


def test_large_counts_are_numbers_in_a_csv():
    made = Table("t", [Column("m"), Column("n", "count")], [["a", 1234]])
    assert ",1234," in render([made], "csv") and "1234" in render([made], "text")


def test_a_column_with_long_texts_is_read_from_the_left():
    header = [Column("Inputs"), Column("Method"), Column("site"), Column("AUC", "percent")]
    table = Table("t", header, [["x" * 40, "short", "a", 0.5], ["y", "m" * 29, "b", 0.6]])
    assert table.phrases == [False, True, False, False]  # the first column always is
    assert Table("t", header, []).phrases == [False] * 4
