"""Studies on cohorts with tables of brain structure: what is refused beforehand, and that no cell is taken for another."""

import json

import numpy as np
import pandas as pd
import pytest

import m2lgdg
from m2lgdg import connectivity, leave_one_site_out, make, make_cohort
from m2lgdg.methods import linear
from m2lgdg.storage import InputError
from m2lgdg.study import cells
from m2lgdg.study.baselines import no_brain_scores
from m2lgdg.study.config import study_of
from m2lgdg.study.description import describe, read_cohort_facts
from m2lgdg.study.plan import make_cells
from m2lgdg.study.predictions import read_predictions

DEFAULT = "connectome-adaptive"
STUDY = """cohort = "own.cohort"
methods = ["fc-logistic", "connectome-adaptive"]
targets = ["east"]
seeds = [0]
"""


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", n_regions=8, structure_effect=1.2)


@pytest.fixture(scope="module")
def bare():
    return make_cohort("tiny")


def other_values(cohort):
    """The same table of the same columns, with other values of one subject."""
    table = cohort.tables["thickness"].copy()
    table.iloc[0, 0] += 0.001
    return cohort.with_tables({"thickness": table})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def run(typed, folder, out, *more):
    return typed("run", folder / "study.toml", "--out", folder / out, *more)


def keys(folder):
    return {path.stem for path in (folder / "cells").glob("*.json")}


@pytest.mark.parametrize("turned", [False, True])
def test_a_table_that_comes_or_goes_makes_another_study(folder, typed, cohort, bare, turned):
    first, second = (cohort, bare) if turned else (bare, cohort)
    first.save(folder / "own.cohort")
    assert run(typed, folder, "first")[0] == 0
    before = (folder / "first" / "predictions.csv").read_bytes()
    second.save(folder / "own.cohort")
    code, _, error = run(typed, folder, "first")
    assert code == 2 and "belongs to another study (key cohort_hash differs)" in error
    assert (folder / "first" / "predictions.csv").read_bytes() == before
    assert run(typed, folder, "second", "--reuse", folder / "first")[0] == 0
    assert not keys(folder / "first") & keys(folder / "second")
    alone = m2lgdg.run_study(folder / "study.toml", folder / "alone")
    assert (alone.reused, alone.done) == (0, 2)
    assert (folder / "alone" / "predictions.csv").read_bytes() == (folder / "second" / "predictions.csv").read_bytes()
    rows = [read_predictions(folder / name).set_index(["method", "subject"])["proba"] for name in ("first", "second")]
    np.testing.assert_array_equal(*(one.loc["fc-logistic"] for one in rows))  # takes no table
    assert np.abs(rows[0].loc[DEFAULT] - rows[1].loc[DEFAULT]).max() > 0.01


def test_one_value_another_name_or_column_of_a_table_changes_every_key(cohort, bare):
    table = cohort.tables["thickness"]
    holes = table.copy()
    holes.iloc[3] = np.nan
    versions = [
        *(bare, cohort, other_values(cohort), bare.with_tables({"area": table}), cohort.with_tables({"area": table})),
        *(bare.with_tables({"thickness": table.iloc[:, :-1]}), bare.with_tables({"thickness": table.iloc[:, ::-1]})),
        *(bare.with_tables({"thickness": holes}), bare.with_tables({"thickness": table.rename(columns={"eTIV": "ICV"})})),
    ]
    study = {"methods": ["prior", DEFAULT], "targets": ["east"], "seeds": [0]}
    found = [cell.key for one in versions for cell in make_cells(study_of(study | {"cohort": one}), one)]
    assert len(set(found)) == 2 * len(versions)
    shuffled = cohort.select(np.random.default_rng(0).permutation(len(cohort)))
    again = make_cells(study_of(study | {"cohort": shuffled}), shuffled)
    assert [cell.key for cell in again] == found[2:4]  # the order of subjects is no other cohort


def forget():
    cells.forget_features()
    for recent in (linear._REFERENCES, linear._TANGENTS, linear._ROWS, linear._BLOCKS):
        recent.results.clear()


@pytest.mark.parametrize("fields", [{}, {"phenotypes": True}, {"tables": "none"}, {"scan": False}])
def test_fits_in_one_process_never_mix_cohorts_that_differ_in_tables(cohort, bare, fields):
    """All hold the same scans, so that features of scans may be shared, and nothing else may."""
    held = [bare.with_tables({"thickness": one.tables["thickness"]}) for one in (cohort, other_values(cohort))]
    held += [] if fields == {"scan": False} else [bare]
    doubled = held[0].tables["thickness"] * np.linspace(1, 2, len(bare))[:, None]
    held.append(bare.with_tables({"thickness": doubled}))
    folds = [next(iter(leave_one_site_out(one))) for one in held]

    def scores(fold):
        return make(DEFAULT, **fields).fit(fold.source).predict_proba(fold.target)

    alone = []
    for fold in folds:
        forget()
        alone.append(scores(fold))
    forget()
    with connectivity.sharing_features(bare.scans):
        for i in (0, 1, 2, 1, 0, len(folds) - 1, 2, 0):
            np.testing.assert_array_equal(scores(folds[i]), alone[i])
    assert (np.abs(alone[0] - alone[-1]).max() > 1e-6) == (fields.get("tables") != "none")
    forget()


def test_a_file_that_gains_a_table_is_read_again(cohort, bare, tmp_path):
    path = str(bare.save(tmp_path / "own.cohort"))
    first = cells.cohort_in_memory(path, bare.inputs, False, bare.hash)
    assert not first.tables
    cohort.save(path)
    again = cells.cohort_in_memory(path, bare.inputs, False, cohort.hash)
    pd.testing.assert_frame_equal(again.tables["thickness"], cohort.in_order().tables["thickness"])
    with pytest.raises(InputError, match="has the hash"):
        cells.cohort_in_memory(path, bare.inputs, False, bare.hash)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[method.connectome-adaptive]\ntables = ["aseg"]\n', "has no table aseg; it has thickness"),
        ('[sweep.connectome-adaptive]\ntables = ["none", "area"]\n', "has no table area"),
        ("[method.connectome-adaptive]\ntables = 3\n", "field tables: 3 is not of type"),
        ("[method.connectome-adaptive]\ntables = []\n", "field tables is empty"),
    ],
)  # fmt: skip
def test_a_table_that_the_cohort_lacks_is_refused_before_the_first_cell(folder, typed, cohort, more, words):
    cohort.save(folder / "own.cohort")
    (folder / "study.toml").write_text(STUDY + more)
    code, _, error = run(typed, folder, "out")
    assert code == 2 and words in error and not (folder / "out").exists()


def test_a_variant_that_needs_a_table_is_refused_on_a_cohort_without_one(folder, typed, bare):
    bare.save(folder / "own.cohort")
    code, _, error = run(typed, folder, "out", "--set", 'variants=["structure"]')
    assert code == 2 and "needs tables or phenotypes; cohort tiny has no tables" in error
    assert not (folder / "out").exists()
    network = {"cohort": bare, "methods": ["m2lgdg-connectome"], "variants": ["structure"], "seeds": [0]}
    with pytest.raises(InputError, match="without scan and phenotypes it needs a table"):
        make_cells(study_of(network), bare)
    average = make("average", methods=("connectome-adaptive:structure", "fc-logistic"))
    with pytest.raises(InputError, match="needs tables or phenotypes"):
        average.fit(bare)


def test_a_sweep_over_tables(folder, typed, cohort):
    second = cohort.with_tables({"noise": cohort.tables["thickness"].sample(frac=1, random_state=0).set_axis(cohort.subjects)})
    second.save(folder / "own.cohort")
    sweep = '[sweep.connectome-adaptive]\ntables = ["none", "thickness", ["noise", "thickness"]]\n'
    (folder / "study.toml").write_text(STUDY + sweep)
    code, printed, _ = run(typed, folder, "out")
    assert code == 0
    rows = read_predictions(folder / "out")
    variants = [name for name in rows["variant"].unique() if name]
    assert variants == ["tables=none", "tables=thickness", "tables=noise+thickness"]
    areas = {
        name: rows[(rows["variant"] == name) & (rows["method"] == DEFAULT)]["proba"].to_numpy() for name in ("", *variants)
    }
    np.testing.assert_array_equal(areas[""], areas["tables=noise+thickness"])
    assert np.abs(areas["tables=none"] - areas["tables=thickness"]).max() > 0.01
    code, printed, _ = typed("table", folder / "out")
    assert code == 0 and "structure (noise, thickness)" in printed and "structure (thickness)" in printed


def test_the_folder_describes_tables_in_numbers_only(cohort, tmp_path):
    table = cohort.tables["thickness"].assign(same=1.0)
    table.iloc[:3] = np.nan
    table.iloc[5, 0] = np.nan
    changed = cohort.with_tables({"thickness": table})
    m2lgdg.run_study({"cohort": changed, "methods": ["prior"], "targets": ["east"]}, tmp_path / "out")
    about = read_cohort_facts(tmp_path / "out").description
    assert about == json.loads(json.dumps(describe(changed)))
    thickness = about["tables"]["thickness"]
    assert thickness | {"gaps": 0} == {"columns": 10, "constant": 1, "subjects": 49, "gaps": 0, "head_size": "eTIV"}
    assert thickness["gaps"] == pytest.approx(1 / 490)
    labels = cohort.labels[:3]
    assert [about["groups"][name]["without"]["thickness"] for name in ("all", "patients")] == [3, int((labels == 1).sum())]
    assert sum(group["without"]["thickness"] for group in about["sites"].values()) == 3
    text = (tmp_path / "out" / "cohort.json").read_text()
    path = tmp_path / "out" / "cohort.json"
    for damage in ('"columns": 10', '"thickness": 3'):
        assert damage in text
        path.write_text(text.replace(damage, damage.split(":")[0] + ': [{"a": 1}]'))
        with pytest.raises(InputError, match="is damaged and cannot be read as facts about a cohort"):
            read_cohort_facts(tmp_path / "out")
    assert "tables" not in describe(make_cohort("tiny")) and "without" not in json.dumps(describe(make_cohort("tiny")))


def test_baselines_know_head_size_and_who_lacks_a_table(cohort):
    table = cohort.tables["thickness"].copy()
    table["eTIV"] += 4e5 * cohort.labels
    table.iloc[np.flatnonzero(cohort.labels == 1)[::2]] = np.nan
    changed = cohort.with_tables({"thickness": table})
    study = {"cohort": changed, "methods": ["phenotype-logistic"], "method": {"phenotype-logistic": {"tables": "all"}}}
    scores = {one.name: one for one in no_brain_scores(study_of(study), target="north")}
    assert scores["head-size-only"].columns == ("eTIV (thickness)",) and scores["head-size-only"].auc > 0.7
    assert "table thickness" in scores["missingness-only"].columns and scores["missingness-only"].auc > 0.7
    plain = {one.name: one for one in no_brain_scores({"cohort": make_cohort("tiny"), "methods": ["prior"]}, target="north")}
    assert "head-size-only" not in plain and scores["phenotype-only"].auc == plain["phenotype-only"].auc


def test_subjects_without_a_label_do_not_matter_for_what_is_refused(cohort):
    labels = cohort.labels.copy()
    labels[:2] = -1
    partly = cohort._changed(labels=labels)
    study = {"cohort": partly, "methods": [DEFAULT], "variants": ["structure"], "targets": ["west"], "seeds": [0]}
    assert len(make_cells(study_of(study), partly)) == 2
