"""Regions of tables of brain structure: patterns, contributions and gradients by slow loops, what is planted, and means."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from m2lgdg import METHODS, Model, leave_one_site_out, make, make_cohort
from m2lgdg.cohort import Parcellation
from m2lgdg.explain.attribution import explain, explain_subject
from m2lgdg.explain.explanation import Explanation, mean_over
from m2lgdg.explain.gradients import _network_attributions
from m2lgdg.explain.regions import by_table, labels, region_table
from m2lgdg.methods.linear import Linear
from m2lgdg.metrics import logit
from m2lgdg.registry import create

THICKNESS = ["lh_insula_thickness", "rh_insula_thickness", "lh_cuneus_thickness", "lh_MeanThickness_thickness"]
ASEG = ["Left-Lateral-Ventricle", "3rd-Ventricle", "Right-Thalamus", "CSF", "EstimatedTotalIntraCranialVol"]
NETWORK = "m2lgdg-connectome"
SMALL = dict(METHODS[NETWORK].variants["small"]) | {"epochs": 2, "warmup": 1, "connectivity": "fc", "plus": True}


def with_tables(cohort, effect=1.5, seed=0, lacking=()):
    """Patients have a thicker left insula, a thinner left cuneus and larger ventricles; volumes grow with the head."""
    draw = np.random.default_rng(seed)
    thickness = draw.normal(size=(len(cohort), len(THICKNESS)))
    thickness[:, 0] += effect * cohort.labels
    thickness[:, 2] -= effect * cohort.labels
    head = draw.normal(size=len(cohort))
    volumes = draw.normal(size=(len(cohort), len(ASEG)))
    volumes[:, 0] += effect * cohort.labels
    volumes = 1000 * (10 + volumes + 0.8 * head[:, None])
    volumes[:, -1] = 1.5e6 + 1e5 * head
    tables = {"thickness": pd.DataFrame(2.5 + 0.1 * thickness, columns=THICKNESS), "aseg": pd.DataFrame(volumes, columns=ASEG)}
    tables["thickness"].iloc[list(lacking)] = np.nan
    return cohort.with_tables({name: table.set_axis(cohort.subjects, axis=0) for name, table in tables.items()})


@pytest.fixture(scope="module")
def cohort():
    bare = make_cohort("tiny", sizes=dict.fromkeys("abcd", 40), missing=0.0, seed=1)
    return with_tables(bare, lacking=(5, 61, 125))


@pytest.fixture(scope="module")
def fold(cohort):
    return next(leave_one_site_out(cohort, ["d"]))


@pytest.fixture(scope="module")
def linear(fold):
    return make("connectome-adaptive", phenotypes=True).fit(fold.source)


@pytest.fixture(scope="module")
def network(fold):
    """With the linear model in it, so that a short training is enough."""
    return create(NETWORK, **SMALL).fit(fold.source, seed=0)


def regions_of(explanation, table):
    own = explanation.regions[explanation.regions["table"] == table]
    return own.set_index("column")


def cleaned(method, name, cohort):
    """Values of a table without confounds, column by column; the mean of source for subjects without it."""
    state, facts = method.state_, method.facts_["tables"][name]
    table, scaled = cohort.tables[name][facts["columns"]], method.scaled_confounds(cohort)
    confounds = [scaled["age"], scaled["sex"], scaled["age"] ** 2]
    if name == "aseg":
        mean, spread = state["table.aseg.head"]
        confounds.append((table[ASEG[-1]].to_numpy() - mean) / spread)
    names = list(scaled)
    confounds[:2] = [scaled[one] for one in names]
    values = np.empty(table.shape)
    for j, column in enumerate(table):
        for i in range(len(table)):
            out = sum(confounds[k][i] * state[f"table.{name}.slopes"][k, j] for k in range(len(confounds)))
            absent = table.iloc[i].isna().all()
            values[i, j] = state[f"table.{name}.mean"][j] if absent else table[column].iloc[i] - out
    return values


def test_patterns_against_slow_loops(linear, fold):
    method, explained = linear.method, explain(linear, fold.target)
    decision = method.decision(method.visible(fold.target))
    for name, columns in (("thickness", THICKNESS), ("aseg", ASEG)):
        values = cleaned(method, name, fold.target)
        term = values @ method.state_[f"table.{name}.weights"]
        pattern = [
            0.0 if columns[j] == ASEG[-1] else np.cov(values[:, j], decision)[0, 1] / values[:, j].std() / decision.var(ddof=1)
            for j in range(len(columns))
        ]
        proportion = np.cov(term, decision)[0, 1] / decision.var(ddof=1)
        assert proportion > 0
        wanted = np.array(pattern) / np.mean(np.abs(pattern)) * proportion
        found = regions_of(explained, name).loc[columns]
        np.testing.assert_allclose(found["direction"], wanted, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found["score"], np.abs(wanted), rtol=1e-6, atol=1e-9)
        assert found["sd"].isna().all()


def test_what_is_planted_is_found_with_its_direction(linear, fold):
    explained = explain(linear, fold.target)
    thickness, aseg = (regions_of(explained, name) for name in ("thickness", "aseg"))
    assert set(thickness.index[:2]) == {THICKNESS[0], THICKNESS[2]} and aseg.index[0] == ASEG[0]
    assert thickness.loc[THICKNESS[0], "direction"] > 0 > thickness.loc[THICKNESS[2], "direction"]
    assert aseg.loc[ASEG[0], "direction"] > 0
    assert aseg.loc[ASEG[0], ["region", "hemisphere", "x"]].tolist() == ["Lateral-Ventricle_L", "L", -12.4]
    assert aseg.loc["CSF", "region"] == "CSF" and np.isnan(aseg.loc["CSF", "x"])
    assert aseg.loc[ASEG[-1], "score"] == 0  # regressed out of itself


def test_the_decision_that_is_explained_includes_the_tables(linear, fold):
    """Blocks' proportions of its variance sum to one."""
    explained = explain(linear, fold.target)
    by_block = [explained.edges[name].mean() for name in ("steady", "log_euclidean", "swings")] + [
        explained.rois["amplitude"].mean()
    ]
    by_block += [explained.phenotypes["score"].mean()]
    by_block += [own["score"].sum() / (len(own) - (name == "aseg")) * (1 - (name == "aseg") / len(own))
                 for name, own in explained.regions.groupby("table")]  # fmt: skip
    assert all(one > 0 for one in by_block)
    assert sum(by_block) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("at", [0, 7])
def test_contributions_of_a_subject_sum_to_its_decision(fold, at):
    model = make("connectome-adaptive", scan=False).fit(fold.source)
    one, state = fold.target.select([at]), model.method.state_
    explained = explain_subject(model, one)
    slope, offset = state["calibration"]
    baseline = offset + slope * sum(state[f"table.{name}.absent"] for name in ("aseg", "thickness"))
    change = logit(model.predict_proba(one)[:, 1])[0] - baseline
    assert explained.regions["contribution"].sum() == pytest.approx(change, abs=1e-9)
    for name in ("thickness", "aseg"):
        found, values = regions_of(explained, name), cleaned(model.method, name, one)[0]
        wanted = (values - state[f"table.{name}.mean"]) / state[f"table.{name}.scale"]
        np.testing.assert_allclose(found.loc[model.facts_["tables"][name]["columns"], "value"], wanted, atol=1e-9)
        np.testing.assert_array_equal(found["score"], found["contribution"].abs())
        np.testing.assert_array_equal(found["direction"], found["contribution"] * np.sign(found["value"]))
    weights = state["table.aseg.weights"][ASEG.index("3rd-Ventricle")]
    assert np.sign(regions_of(explained, "aseg").loc["3rd-Ventricle", "direction"]) == np.sign(slope * weights)


def test_a_subject_without_a_table_has_no_contribution_of_it(fold):
    model = make("connectome-adaptive", scan=False).fit(fold.source)
    lacking = np.flatnonzero(fold.target.tables["thickness"].isna().all(axis=1))
    explained = explain_subject(model, fold.target.select(lacking))
    assert len(lacking) == 1 and not regions_of(explained, "thickness")["score"].any()
    assert regions_of(explained, "aseg")["score"].any()
    assert "No subject has table thickness, so it has no scores." in explained.lacking()
    none = dataclasses.replace(fold.target, tables={})
    assert not explain(make("connectome-adaptive").fit(fold.source), none).regions["score"].any()


def test_gradients_against_slow_loops(network, fold):
    target = fold.target.select(np.arange(12))
    found = explain(network, target, steps=4, of="margin")
    given = _network_attributions(network, network.visible(target), "margin", 4, torch.device("cpu"), None)
    features = network.table_features(network.visible(target))
    for name, columns in (("thickness", THICKNESS), ("aseg", ASEG)):
        attributed = given.tables[name]
        own = regions_of(found, name)
        for j, column in enumerate(columns):
            sizes = [abs(value) for value in attributed[:, j]]
            signed = [value if features[f"table.{name}"][i, j] > 0 else -value for i, value in enumerate(attributed[:, j])]
            assert own.loc[column, "score"] == pytest.approx(np.mean(sizes), rel=1e-9)
            assert own.loc[column, "sd"] == pytest.approx(np.std(sizes, ddof=1), rel=1e-9)
            assert own.loc[column, "direction"] == pytest.approx(np.mean(signed), rel=1e-6, abs=1e-12)
    assert found.about["structure"]["thickness"] == {"subjects": 11}
    assert list(found.gate.columns[3:]) == ["imaging", "phenotypes", "aseg", "thickness"]


def test_directions_of_a_network_say_where_larger_values_point(network, fold):
    explained = explain(network, fold.target.select(np.arange(16)), steps=8)
    assert explained.error()["median_relative"] < 0.05
    found = regions_of(explained, "thickness")
    assert set(found.index[:2]) == {THICKNESS[0], THICKNESS[2]}
    assert found.loc[THICKNESS[0], "direction"] > 0 > found.loc[THICKNESS[2], "direction"]
    at = int(np.flatnonzero(fold.target.tables["thickness"][THICKNESS[0]] < 2.4)[0])  # thin: for control
    one = regions_of(explain_subject(Model(network), fold.target.select([at]), steps=8), "thickness").loc[THICKNESS[0]]
    assert one["value"] < 0 and one["contribution"] < 0 < one["direction"]


def test_the_values_of_a_region_decide_where_an_attribution_points():
    signed, values = {"t": np.array([[2.0, -1.0], [-4.0, -1.0]])}, {"t": np.array([[0.5, 3.0], [-0.5, 1.0]])}
    table = region_table(signed, values, {"t": ["lh_insula_area", "CSF"]}).set_index("column")
    assert table.loc["lh_insula_area", ["score", "direction"]].tolist() == [3.0, 3.0]
    assert table.loc["CSF", ["score", "direction"]].tolist() == [1.0, -1.0]
    assert "value" not in table and table.loc["lh_insula_area", "sd"] == pytest.approx(2**0.5)
    one = region_table({"t": np.array([[2.0]])}, {"t": np.array([[-0.5]])}, {"t": ["CSF"]}).iloc[0]
    assert one[["score", "direction", "value", "contribution"]].tolist() == [2.0, -2.0, -0.5, 2.0]


def test_a_region_with_two_measures_goes_by_its_columns():
    columns = ["lh_insula_area", "lh_insula_thickness", "CSF"]
    table = region_table({"both": np.array([[3.0, -2.0, 0.0]])}, {}, {"both": columns})
    (own,) = by_table(table).values()
    assert labels(own) == columns[:2]


def test_means_over_folds_and_a_column_that_one_fold_lacks(linear, fold, tmp_path):
    first = explain(linear, fold.target)
    second = dataclasses.replace(
        first, regions=first.regions[first.regions["column"] != "CSF"].assign(score=1.0, direction=-1.0)
    )
    for name, one in (("a", first), ("b", second)):
        one.save(tmp_path / name)
    back = [Explanation.load(tmp_path / name) for name in "ab"]
    pd.testing.assert_frame_equal(back[0].regions, first.regions, check_dtype=False)
    mean = mean_over(back)
    for column in ("CSF", "3rd-Ventricle"):
        signed = [regions_of(one, "aseg")["direction"].get(column, 0.0) for one in (first, second)]
        row = regions_of(mean, "aseg").loc[column]
        assert row[["direction", "low", "high"]].tolist() == pytest.approx([np.mean(signed), min(signed), max(signed)])
        assert row["score"] == abs(row["direction"])
        assert row["same direction"] == np.mean([np.sign(one) == np.sign(row["direction"]) for one in signed])
    assert regions_of(mean, "aseg").loc["3rd-Ventricle", "x"] == 0.4
    assert mean.about["structure"]["thickness"]["weight"] == pytest.approx(first.about["structure"]["thickness"]["weight"])
    assert "agreement" not in mean_over([first]).about["structure"]["aseg"]
    assert mean_over([first, first]).about["structure"]["aseg"]["agreement"] == pytest.approx(1.0)
    empty = dataclasses.replace(first, regions=first.regions.iloc[:0])
    assert mean_over([empty, first]).regions["score"].sum() == pytest.approx(first.regions["score"].sum() / 2)
    assert not len(mean_over([empty, empty]).regions)


def test_several_atlases_and_methods(cohort):
    second = Parcellation(tuple(f"r{i}" for i in range(len(cohort.rois))), [one[::-1, ::-1] for one in cohort.series])
    both = next(leave_one_site_out(dataclasses.replace(cohort, parcellations={"other": second}), ["d"]))
    model = make("connectome-adaptive").fit(both.source)
    assert len(model.members) == 2
    each = [explain(Model(one), both.target) for one in model.members.values()]
    explained = explain(model, both.target)
    wanted = sum(regions_of(one, "aseg")["direction"] for one in each) / 2
    np.testing.assert_allclose(regions_of(explained, "aseg")["direction"], wanted[regions_of(explained, "aseg").index])
    assert "agreement" not in explained.about["structure"]["aseg"]
    parts = [explained, explain(model, both.target.select(np.arange(20)))]
    means = [mean_over(one.by_atlas()[atlas] for one in parts) for atlas in explained.by_atlas()]
    agreement = np.mean([one.about["structure"]["aseg"]["agreement"] for one in means])
    assert mean_over(parts).about["structure"]["aseg"]["agreement"] == pytest.approx(agreement)
    one = both.target.select([3])
    alone = make("connectome-adaptive", scan=False).fit(both.source)
    change = logit(alone.predict_proba(one)[:, 1])[0] - logit(
        alone.predict_proba(dataclasses.replace(one, tables={}))[:, 1])[0]  # fmt: skip
    assert explain_subject(alone, one).regions["contribution"].sum() == pytest.approx(change, abs=1e-9)


def test_an_average_of_methods(fold):
    average = make("average", methods=("connectome-adaptive", "fc-logistic")).fit(fold.source, seed=0)
    explained = explain(average, fold.target)
    alone = explain(make("connectome-adaptive").fit(fold.source), fold.target).regions
    wanted = alone.set_index(["table", "column"])["direction"] / alone["score"].sum() / 2
    got = explained.regions.set_index(["table", "column"])["direction"]
    np.testing.assert_allclose(got[wanted.index], wanted)
    assert explained.regions.loc[explained.regions["column"] == ASEG[0], "x"].tolist() == [-12.4]
    one = explain_subject(average, fold.target.select([0])).regions.set_index(["table", "column"])
    linear = explain_subject(make("connectome-adaptive").fit(fold.source), fold.target.select([0])).regions
    linear = linear.set_index(["table", "column"])
    assert (one["value"] == linear["value"][one.index]).all()
    assert (np.sign(one["contribution"]) == np.sign(linear["contribution"][one.index])).all()


def test_a_table_without_weight_is_named(fold):
    noise = fold.source.tables["thickness"] * 0 + np.random.default_rng(3).normal(size=fold.source.tables["thickness"].shape)
    source = fold.source.with_tables({"noise": noise})
    model = make("connectome-adaptive", tables=("aseg", "noise")).fit(source)
    model.method.facts_["tables"]["noise"]["weight"] = 0.0  # whatever was learned from so few
    model.method.state_["table.noise.weights"] = model.method.state_["table.noise.weights"] * 0.0
    target = fold.target.with_tables({"noise": fold.target.tables["thickness"]})
    explained = explain(model, target)
    assert not regions_of(explained, "noise")["score"].any() and regions_of(explained, "aseg")["score"].any()
    assert "Table noise has no weight in the decision: it added nothing at left-out source sites." in explained.lacking()
    assert list(by_table(explained.regions)) == ["aseg"]


def test_the_command_writes_and_shows_regions(linear, fold, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fold.target.save("d.cohort")
    linear.save("model")
    make("fc-svm").fit(fold.source).save("other")
    code, text, _ = typed("explain", "model", "d.cohort", "--out", "why")
    assert code == 0 and "regions.csv (regions of tables)" in text
    written = pd.read_csv("why/regions.csv", keep_default_na=False)
    assert len(written) == len(THICKNESS) + len(ASEG)
    assert list(written.columns[:4]) == ["table", "column", "region", "hemisphere"]
    block = text.split("Regions of table aseg")[1].splitlines()
    assert "Lateral-Ventricle_L (larger)" in block[1]
    assert "insula_L (larger)" in text and "cuneus_L (smaller)" in text
    about = json.loads(Path("why/explanation.json").read_text())
    assert about["structure"]["aseg"]["subjects"] == 40 and "regions" in about["tables"]
    code, text, _ = typed("explain", "other", "d.cohort", "--out", "why")
    assert code == 0 and "the model takes no table of brain structure" in text and not Path("why/regions.csv").exists()


def test_without_tables_nothing_is_said_of_them(fold):
    bare = dataclasses.replace(fold.target, tables={})
    explained = explain(make("fc-svm").fit(bare), bare)
    assert "structure" not in explained.about and not len(explained.regions)
    assert not any("table" in sentence for sentence in explained.lacking())
    assert issubclass(METHODS["fc-svm"], Linear)
