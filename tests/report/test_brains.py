"""Regions of tables in the report: bars and brains in the colours of their directions, gate weights, tables, and the page."""

import re

import numpy as np
import pandas as pd
import pytest

from m2lgdg import make_cohort, run_study
from m2lgdg.explain.explanation import Explanation
from m2lgdg.explain.regions import by_table, region_table
from m2lgdg.report.brains import BLUE, GREY, RED, brain_of_regions, gate_weights, three_dimensional, top_regions
from m2lgdg.report.page import write_report

COLUMNS = ["Left-Lateral-Ventricle", "Right-Thalamus-Proper", "CSF", "3rd-Ventricle", "lh_insula_area"]


@pytest.fixture
def own():
    table = region_table({"aseg": np.array([[5.0, -4.0, 3.0, 2.0, 0.0]])}, {}, {"aseg": COLUMNS})
    (rows,) = by_table(table).values()
    return rows


def colours_of_bars(figure):
    return re.findall(rf"fill: ({RED}|{BLUE}|{GREY})", figure.svg.decode())


def test_bars_have_the_colours_of_their_directions(own):
    drawn = top_regions("m", "aseg", own)
    assert colours_of_bars(drawn) == [RED, BLUE, RED, RED]  # a score of zero is left out
    assert "the 4 regions with the highest scores of 4" in drawn.caption and "grey" not in drawn.caption
    assert "2. Right-Thalamus-Proper: -4, smaller values point to patient" in drawn.page
    mean = own.assign(low=own["direction"] - 1, high=own["direction"] + 1, **{"same direction": [1.0, 0.95, 0.6, 0.75]})
    drawn = top_regions("m", "aseg", mean)
    assert colours_of_bars(drawn) == [RED, BLUE, GREY, RED] and "grey: fewer than three in four" in drawn.caption
    assert "3. CSF: 3 (2 to 4 over folds and seeds), larger values point to patient in 60 % of folds and seeds" in drawn.page


def test_a_brain_has_the_regions_with_a_place_and_their_ranks(own):
    drawn = brain_of_regions("m", "aseg", own)
    assert "1 of them has no single place" in drawn.caption
    numbers = re.findall(r">(\d+)</text>", drawn.svg.decode())
    # Ventricle from the left, back and top; thalamus from the right, back and top; the third ventricle from everywhere.
    assert sorted(numbers) == ["1"] * 3 + ["2"] * 3 + ["4"] * 4
    assert brain_of_regions("m", "aseg", own[own["region"] == "CSF"]) is None


def test_a_number_that_would_cover_a_higher_one_is_left_out(own):
    near = own.assign(hemisphere="L", x=[-12.0, -11.0, np.nan, -30.0], y=[0.0, 1.0, np.nan, 0.0], z=[0.0, 1.0, np.nan, 0.0])
    numbers = re.findall(r">(\d+)</text>", brain_of_regions("m", "aseg", near).svg.decode())
    assert numbers.count("2") == 0 and numbers.count("1") == 3
    assert numbers.count("4") == 2  # covered from the left only


def test_the_gate_of_more_than_two_modalities():
    gate = pd.DataFrame({"site": ["a", "a"], "label": [0, 1], "subjects": 5})
    weights = {"imaging": [0.5, 0.4], "phenotypes": [0.2, 0.2], "aseg": [0.3, 0.4]}
    drawn = gate_weights("m", gate.assign(**weights))
    assert (
        "each modality" in drawn.caption and "a, patients: aseg 0.40" in drawn.page and "a, controls: scan 0.50" in drawn.page
    )
    assert "phenotypes: 1 minus this" in gate_weights("m", gate.assign(imaging=0.5, phenotypes=0.5)).page
    without_scan = gate_weights("m", gate.assign(phenotypes=0.5, aseg=0.5))
    assert "a, controls: aseg 0.50" in without_scan.page
    assert gate_weights("m", gate.iloc[:0]) is None and gate_weights("m", gate.assign(**{"weight 1": 1.0})) is None


@pytest.mark.usefixtures("figures_painted_only")
def test_the_page_shows_regions_of_tables(tmp_path):
    cohort = make_cohort("tiny", seed=1)
    values = np.random.default_rng(0).normal(size=(len(cohort), 4))
    values[:, 0] += 2.0 * cohort.labels
    frame = pd.DataFrame(values, index=cohort.subjects, columns=[*COLUMNS[:3], "<b>odd"])
    cohort.with_tables({"aseg <i>": frame}).save(tmp_path / "own.cohort")
    study = {"cohort": str(tmp_path / "own.cohort"), "methods": ["connectome-adaptive"], "seeds": [0], "explain": True}
    study["targets"] = ["east", "west"]
    run_study(study, tmp_path / "out")
    page = write_report(tmp_path / "out").read_text()
    section = page.split('data-section="explained"')[1].split("</section>")[0]
    assert "Regions of table aseg &lt;i&gt;" in section and "<i>" not in section and "<b>odd" not in section
    assert "Of the directions of regions:" in section and "same direction" in section
    table = pd.read_csv(next((tmp_path / "out" / "tables").glob("Regions-of-table*.csv")))
    assert table["region"][0] == "Lateral-Ventricle_L" and float(table["x"][0]) == -12.4
    kept = pd.read_csv(tmp_path / "out" / "explained" / "connectome-adaptive" / "regions.csv")
    assert len(kept) == 4 and kept.loc[0, "same direction"] == 1.0
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert sum("regions-connectome-adaptive" in name for name in figures) == 2


def test_regions_on_a_brain_that_can_be_rotated(own):
    empty = {name: pd.DataFrame({"score": []}) for name in ("rois", "edges", "phenotypes", "gate", "completeness", "map")}
    pages = three_dimensional("m", Explanation(**empty, about={}, regions=own))
    (page,) = pages.values()
    assert list(pages) == ["brain-m-aseg-3d.html"] and "4. 3rd-Ventricle" in page and "3. CSF" not in page
