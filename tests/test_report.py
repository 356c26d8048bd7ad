"""Tables and the page: right numbers, ranks and formats; hostile names stay text; nothing is fetched."""

import io
import json
import re

import numpy as np
import pandas as pd
import pytest

from m2lgdg.method import make
from m2lgdg.metrics import auc
from m2lgdg.report.page import write_report
from m2lgdg.report.tables import changed_fields, render, study_tables

HOSTILE = '<script>alert("x")</script> | & _%$#{}~^\\ "\'' + "ß漢" * 5


@pytest.fixture
def predictions():
    """Two methods (one of them perfect), two targets, two seeds."""
    rng = np.random.default_rng(0)
    rows = []
    for target in ("NYU", "USM"):
        labels = np.array([0, 1] * 10)
        for seed in (0, 1):
            for method, variant, noise in (("good", "", 0.0), ("noisy", "with-age", 0.6)):
                proba = np.clip(0.5 + 0.4 * (labels - 0.5) + noise * rng.normal(size=20), 0, 1)
                rows += [(method, variant, seed, target, f"s{i}", labels[i], proba[i]) for i in range(20)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def test_cells_are_means_and_sds_over_seeds_and_sites(predictions):
    nyu, usm, macro = study_tables(predictions)
    assert [table.title for table in (nyu, usm, macro)] == ["Target NYU", "Target USM", "Macro average over target sites"]
    areas = {}
    for (target, seed), part in predictions[predictions.method == "noisy"].groupby(["target", "seed"]):
        areas[target, seed] = 100 * auc(part.label.to_numpy(), part.proba.to_numpy())
    column = nyu.header.index("AUC")
    pair = [areas["NYU", seed] for seed in (0, 1)]
    assert nyu.rows[1][0] == "noisy + with-age"
    assert nyu.rows[1][column] == f"{np.mean(pair):.2f} ± {np.std(pair, ddof=1):.2f}"
    assert nyu.rows[0][column] == "100.00 ± 0.00"
    assert (nyu.ranks[0][column], nyu.ranks[1][column]) == (1, 2)
    sites = [np.mean([areas[site, seed] for seed in (0, 1)]) for site in ("NYU", "USM")]
    assert macro.rows[1][column] == f"{np.mean(sites):.2f} ± {np.std(sites, ddof=1):.2f}"
    assert macro.rows[1][macro.header.index("AUC difference")] == f"{100 - np.mean(sites):+.2f}"


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


def test_hostile_names_stay_text(predictions, tmp_path):
    hostile = predictions.assign(target=predictions.target.where(predictions.target != "NYU", HOSTILE))
    hostile["variant"] = hostile["variant"].where(hostile["variant"] == "", "</td><img src=x onerror=alert(1)>")
    latex, markdown = (render(study_tables(hostile), form) for form in ("latex", "markdown"))
    assert r"\textbackslash{}" in latex
    assert not re.search(r"(?<!\\)[&%#](?![^&]*\\\\)", latex.split(r"\toprule")[0].split("caption{")[1].replace(r"\&", ""))
    assert "\\|" not in markdown.split("\n")[0]
    hostile.to_csv(tmp_path / "predictions.csv", index=False)
    page = write_report(tmp_path).read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page


def test_the_page_fetches_nothing(predictions, tmp_path):
    predictions.to_csv(tmp_path / "predictions.csv", index=False)
    page = write_report(tmp_path).read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http" not in page
    assert "not a diagnostic device" in page
    assert "Mean AUC over 2 unseen sites: good 100.0" in page


def test_a_target_of_one_class_has_no_auc_but_a_sensitivity(predictions):
    alone = predictions[(predictions.target == "NYU") & (predictions.label == 1)]
    table = study_tables(pd.concat([alone, predictions[predictions.target == "USM"]]))[0]
    assert table.rows[0][table.header.index("AUC")] == "-"
    assert table.rows[0][table.header.index("SEN")] == "100.00 ± 0.00"
    assert table.rows[0][table.header.index("SPE")] == "-"


def test_what_did_not_run_with_its_defaults_is_told():
    def told(name, **changes):
        return changed_fields(json.loads(json.dumps({"method": {name: make(name, **changes).fields()}})))

    assert told("m2lgdg") == ""
    assert told("m2lgdg", epochs=17, learning_rate=1e-3) == "m2lgdg (epochs = 17, learning_rate = 0.001)"
    assert told("fc-logistic", phenotypes=True) == 'fc-logistic (variant = "phenotypes")'
    assert changed_fields({"method": {"somebody's": {"width": 3}}}) == "somebody's (its fields are in study.json)"
    assert changed_fields({}) == ""
