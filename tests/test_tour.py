"""examples/tour.ipynb and the code in docs/scikit-learn.md run as they are, show what they say and write their files."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn import config_context

import m2lgdg
from m2lgdg.study.predictions import read_predictions

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def run(cells):
    """Values of the last expression of each code cell, as a notebook would show them."""
    names, values = {"__name__": "__main__"}, []
    for number, cell in enumerate(cells):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"<cell {number}>", "exec"), names)
        values.append(eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names) if last else None)
    return names, values


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text())


def test_the_tour_has_ten_cells_without_output(notebook):
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 10 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert notebook["nbformat"] == 4


def test_the_tour_runs(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        names, values = run([cell for cell in notebook["cells"] if cell["cell_type"] == "code"])
    finally:
        m2lgdg.METHODS.pop("my-svm", None)
    cohort, frame, check, one_site, method, summary, scores = (values[i] for i in (1, 2, 3, 4, 5, 6, 7))
    assert len(cohort) == 60 and set(frame["site"]) == {"Oslo"} and (frame["age"] > 30).all()
    assert all(hasattr(shown, "_repr_html_") for shown in (cohort, check, method, summary))
    assert summary.failed == [] and summary.done == 12
    assert summary.scores().loc["fc-svm", "Oslo"] == pytest.approx(one_site["AUC"])
    np.testing.assert_allclose(list(scores.values()), summary.scores().loc["fc-svm", sorted(scores)], atol=5e-4)
    assert summary.scores().loc["my-svm", "mean"] > 0.7 > summary.scores().loc["prior", "mean"]
    assert "Macro average" in capsys.readouterr().out
    assert values[9] == Path("tour-study") / "report.html" and "my-svm" in values[9].read_text()
    assert names["cohort"].tr.tolist() == [2.0] * 60


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "scikit-learn.md").read_text(), re.DOTALL)
    with config_context():  # the page turns metadata routing on
        try:
            names, values = run([{"source": [block]} for block in blocks])
        finally:
            m2lgdg.METHODS.pop("my-svm", None)
    assert len(values[0]) == len(values[1]) == 4
    assert set(read_predictions(tmp_path / "my-study")["method"]) == {"my-svm", "fc-svm"}
    assert values[3] == "roi-001--roi-002" and len(values[5]) == 3
    assert len(values[7]) == 52 and len(names["cohort"]) == 52
