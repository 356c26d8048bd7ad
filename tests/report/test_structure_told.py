"""What cards, checklists, shared copies, notebooks and commands tell of tables of brain structure, and what they do not."""

import json
import re

import numpy as np
import pytest

import m2lgdg
from m2lgdg import InputError, make, make_cohort
from m2lgdg.method import Method
from m2lgdg.report.card import TABLES_ALONE, WITHOUT_TABLE, card
from m2lgdg.report.checklists import known_facts, methods_text
from m2lgdg.report.contents import read_contents
from m2lgdg.report.data import site_table, structure_table, who
from m2lgdg.report.page import write_report
from m2lgdg.report.sharing import share_study, shared_model

DEFAULT = "connectome-adaptive"
LACKING = 4  # subjects, the first of the cohort


@pytest.fixture(scope="module")
def cohort():
    """Four subjects without the table, one with a segmentation that failed, and a second table that tells nothing."""
    made = make_cohort("tiny", n_regions=12, structure_effect=1.2, seed=2)
    table, rng = made.tables["thickness"], np.random.default_rng(0)
    table.iloc[:LACKING] = np.nan
    table.iloc[LACKING, :8] *= 1.9
    noise = rng.normal(100, 5, (len(made), 3))
    return made.with_tables({"thickness": table, "noise": noise})


@pytest.fixture(scope="module")
def study(cohort, tmp_path_factory):
    """The folder of a study, with the cohort file beside it."""
    folder = tmp_path_factory.mktemp("told")
    path = cohort.save(folder / "own.cohort")
    study = {
        "cohort": str(path),
        "name": "told",
        "methods": ["fc-logistic", DEFAULT],
        "variants": ["no-structure"],
        "seeds": [0],
    }
    assert not m2lgdg.run_study(study | {"min_per_class": 4}, folder / "out").failed
    return folder / "out"


def part(parts, title):
    return next(one for one in parts if one.title == title)


@pytest.mark.parametrize("fields", [{}, {"phenotypes": True}, {"scan": False}])
def test_the_card_says_what_a_model_takes_of_tables(cohort, tmp_path, fields):
    fitted = make(DEFAULT, **fields).fit(cohort)
    told = card(fitted.save(tmp_path / "model"))
    facts = dict(part(told, "Inputs").facts)
    stored = fitted.facts_["tables"]["thickness"]
    assert facts["table thickness"] == (
        f"13 columns ({stored['columns'][0]} to eTIV); of 48 of 52 training subjects; weight {stored['weight']:.3g}; "
        "sex, age, age squared, head size (eTIV) regressed out within training sites"
    )
    assert "3 columns" in facts["table noise"] and "head size" not in facts["table noise"]
    only = "sex, age (only regressed out of the tables)"
    assert facts["phenotypes"] == ("sex, age, education" if fields == {"phenotypes": True} else only)
    limits = part(told, "Known failures and limits").sentences
    assert (TABLES_ALONE if fields == {"scan": False} else WITHOUT_TABLE) in limits
    idle = [name for name, about in fitted.facts_["tables"].items() if about["weight"] == 0]
    assert any(one.startswith("Tables with weight 0") for one in limits) == bool(idle)


def test_the_card_of_a_model_without_tables_is_as_it_was(cohort, tmp_path):
    told = card(make(DEFAULT, tables="none").fit(cohort).save(tmp_path / "model"))
    assert dict(part(told, "Inputs").facts)["phenotypes"] == "none"
    assert not re.search(
        r"\btables?\b", json.dumps([(one.facts, one.sentences) for one in told if one.title != "Training data"])
    )


def test_a_weight_of_zero_is_told(cohort, tmp_path):
    fitted = make(DEFAULT).fit(cohort)
    fitted.facts_["tables"]["noise"]["weight"] = 0.0
    limits = part(card(fitted.save(tmp_path / "model")), "Known failures and limits").sentences
    assert any(one.startswith("Tables with weight 0") and one.endswith(": noise.") for one in limits)


def test_the_card_of_an_average_has_the_tables_of_its_methods(cohort, tmp_path):
    average = make("average", methods=(f"{DEFAULT}:structure", "fc-logistic")).fit(cohort)
    told = card(average.save(tmp_path / "model"))
    assert "table thickness" in dict(part(told, "Inputs").facts)
    assert WITHOUT_TABLE in part(told, "Known failures and limits").sentences


def test_the_data_section_says_who_lacks_a_table(study, cohort):
    contents = read_contents(study)
    text = who(contents)
    assert "thickness (13 columns, 48 of 52 subjects), noise (3 columns, 52 of 52 subjects)" in text
    assert "The segmentation of 1 subject may have failed." in text
    table = site_table(contents)
    lacking = dict(zip(table.values("Site"), table.values("without thickness"), strict=True))
    patients = int((cohort.labels[:LACKING] == 1).sum())
    assert (lacking["all"], lacking["all patients"], lacking["east"]) == (LACKING, patients, LACKING)
    assert lacking["north"] == 0 and "without noise" not in table.header
    told = structure_table(contents)
    assert told.values("columns") == [13, 3] and told.values("head size") == ["eTIV", "none"]
    assert told.values("patients without") == [patients, 0]


def test_checklists_and_the_methods_paragraph_name_tables(study):
    contents = read_contents(study)
    facts = known_facts(contents)
    assert facts["predictors"].endswith("; table thickness (13 columns); table noise (3 columns)")
    assert "table thickness 7.7 %" in facts["missing"] and "table noise 0.0 %" in facts["missing"]
    assert "regressed out of tables" in facts["transformations"] and "decided without it" in facts["imputation"]
    words = " ".join(methods_text(contents, motion=False).paragraphs)
    assert (
        "Tables of brain structure, thickness (13 columns), noise (3 columns), were available to connectome-adaptive." in words
    )


def test_what_is_shared_has_no_row_of_a_table(study, cohort, tmp_path, figures_painted_only):
    write_report(study, share=tmp_path / "report")
    share_study(study, tmp_path / "copy")
    written = [path for folder in ("report", "copy") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    values = {f"{value:g}" for value in cohort.tables["thickness"]["eTIV"].dropna()}
    for path in written:
        text = path.read_bytes().decode(errors="replace")
        assert not any(value in text for value in values), path
    page = (tmp_path / "report" / "report.html").read_text()
    assert "What each input adds" in page and "thickness (13 columns, 48 of 52 subjects)" in page
    assert not any(subject in page for subject in cohort.subjects)
    table = (tmp_path / "report" / "tables" / "Sites.csv").read_text().splitlines()
    place = table[0].split(",").index("without thickness") - len(table[0].split(","))
    assert {row.split(",")[place] for row in table[4:]} == {"-"}  # of sites; all and both classes are told
    copied = read_contents(tmp_path / "copy")
    assert copied.tables == read_contents(study).tables and copied.additions == read_contents(study).additions


def test_medians_of_a_shared_model_are_rounded_and_predictions_the_same(cohort, tmp_path):
    fitted = make(DEFAULT).fit(cohort, source_distribution=True)
    shared = shared_model(fitted)
    ranges = [one.source_distribution_.tables["thickness"] for one in (fitted, shared)]
    assert ranges[0].usual[-1] != ranges[1].usual[-1] == 1_540_000  # eTIV
    for one, other in zip(*ranges, strict=True):
        np.testing.assert_allclose(other, one, rtol=0.005)
    usual, rounded = (one.method.state_["table.thickness.usual"] for one in (fitted, shared))
    columns = cohort.tables["thickness"][fitted.facts_["tables"]["thickness"]["columns"]]
    assert (usual[:, None] == columns.to_numpy().T).any() and not (rounded[-1] == columns["eTIV"]).any()
    np.testing.assert_allclose(rounded, usual, rtol=0.005)
    known = cohort.select(np.flatnonzero(cohort.phenotypes["age"].notna()))  # typical ages are those of a band
    np.testing.assert_array_equal(shared.predict_proba(known), fitted.predict_proba(known))
    assert Method.load(shared.save(tmp_path / "model")).predict_proba(cohort).shape == (len(cohort), 2)


def test_a_table_that_is_named_by_a_path_is_not_shared(cohort, tmp_path):
    named = make_cohort("tiny").with_tables({"/home/jane/thickness.csv": cohort.tables["thickness"].reset_index(drop=True)})
    summary = m2lgdg.run_study({"cohort": named, "methods": ["prior"], "targets": ["east"]}, tmp_path / "out")
    for give in (share_study, lambda folder, to: write_report(folder, share=to)):
        with pytest.raises(InputError, match=r"table or subject name '/home/jane/thickness.csv' contains a path"):
            give(summary.folder, tmp_path / "given")
    assert not (tmp_path / "given").exists()
    with pytest.raises(InputError, match=r"table /home/jane/thickness.csv of the model may be named by a path"):
        shared_model(make(DEFAULT).fit(named))


def test_notebooks_and_commands_name_tables(cohort, tmp_path, typed):
    shown = cohort._repr_html_()
    assert "without thickness" in shown and "without noise" not in shown and "table noise (3 columns)" in shown
    assert "without" not in make_cohort("tiny", n_regions=4)._repr_html_()
    path = cohort.save(tmp_path / "own.cohort")
    code, printed, _ = typed("methods", "--cohort", path)
    assert code == 0 and "with tables thickness, noise" in " ".join(printed.split())
    _, printed, _ = typed("methods", DEFAULT, "--cohort", path)
    assert "On cohort tiny (time series; tables: thickness, noise): runs, with tables thickness, noise." in " ".join(
        printed.split()
    )
    _, printed, _ = typed("methods", "fc-svm", "--cohort", path)
    assert 'runs, with tables thickness, noise on request (tables = "all")' in " ".join(printed.split())
    bare = make_cohort("tiny").save(tmp_path / "bare.cohort")
    _, printed, _ = typed("methods", DEFAULT, "--cohort", bare)
    assert "On cohort tiny (time series): runs." in " ".join(printed.split())
