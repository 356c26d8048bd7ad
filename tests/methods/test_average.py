"""The mean of fitted methods: its logit is theirs averaged, in a study, from a folder and in several atlases."""

import dataclasses
import json

import numpy as np
import pytest

from m2lgdg import METHODS, InputError, Model, leave_one_site_out, make, make_cohort
from m2lgdg.cohort import Parcellation
from m2lgdg.explain.attribution import explain, explain_subject
from m2lgdg.methods.amplitude import FLAG
from m2lgdg.metrics import logit
from m2lgdg.model.folder import digest
from m2lgdg.report.sharing import shared_model
from m2lgdg.study.runner import run_study

AVERAGED = ("erm:phenotypes", "connectome-adaptive", "genm")
SETTINGS = {"erm:phenotypes": {"epochs": 2, "warmup": 1}, "genm": {"epochs": 2, "warmup": 1, "steps_per_epoch": 2}}


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny", seed=1), ["west"]))


@pytest.fixture(scope="module")
def fitted(fold):
    return make("average", methods=AVERAGED, settings=SETTINGS).fit(fold.source, seed=3)


def test_its_logit_is_the_mean_of_theirs(fold, fitted):
    alone = []
    for given in AVERAGED:
        name, _, variant = given.partition(":")
        one = make(name, variant or None, **SETTINGS.get(given, {})).fit(fold.source, seed=3)
        alone.append(logit(one.predict_proba(fold.target)[:, 1]))
    np.testing.assert_allclose(logit(fitted.predict_proba(fold.target)[:, 1]), np.mean(alone, axis=0), atol=1e-9)


def test_what_its_methods_need_and_hold_is_known(fold, fitted):
    assert fitted.facts_["inputs"] == list(fold.source.inputs)  # of erm
    assert fitted.remembers == ("method-2.fitted.support",) and fitted.remembers[0] in fitted.state_
    assert fitted.uses_amplitude and not make("average", "small").fit(fold.source).uses_amplitude
    scored = fold.target._changed(series=[(one - one.mean(0)) / one.std(0) for one in fold.target.series])
    assert all(FLAG in raised for raised in fitted.flags(scored)) and not any(FLAG in one for one in fitted.flags(fold.target))


def test_linear_methods_are_calibrated_together_in_several_atlases(fold):
    own = make("average", methods=("fc-logistic", "fc-svm")).fit(fold.source)
    each = [make(name).fit(fold.source).held_out_logits() for name in ("fc-logistic", "fc-svm")]
    np.testing.assert_allclose(own.held_out_logits(), np.mean(each, axis=0))

    def with_coarse(cohort):
        coarse = Parcellation(tuple("abcde"), [one[:, :5] + one[:, 5:10] for one in cohort.series])
        return dataclasses.replace(cohort, atlas="fine", parcellations={"coarse": coarse})

    both = make("average", "small", atlases="all").fit(with_coarse(fold.source))
    assert list(both.members) == ["fine", "coarse"] and both.mean_recalibration[0] != 1
    found = both.predict_proba(with_coarse(fold.target))
    assert np.isfinite(found).all() and np.ptp(found[:, 1]) > 0


def test_explanations_are_means_of_those_of_its_methods(fold, fitted):
    found = explain(fitted, fold.target, steps=4)
    assert found.rois[[*AVERAGED, "score"]].sum().tolist() == pytest.approx([1.0] * 4)
    np.testing.assert_allclose(found.rois["score"], found.rois[list(AVERAGED)].mean(axis=1))
    assert set(found.phenotypes["phenotype"]) == set(fold.source.inputs)
    alone = explain_subject(fitted, fold.target.select([0]), steps=4)
    assert alone.edges["score"].sum() == pytest.approx(1.0) and alone.about["subjects"] == 1


def test_in_a_study(tmp_path, fold):
    whole = make_cohort("tiny", seed=1)
    study = tmp_path / "study.toml"
    study.write_text(
        f'cohort = "{whole.save(tmp_path / "some.cohort")}"\nmethods = ["average", "erm"]\ntargets = ["west"]\nseeds = [3]\n'
        f'[method.average]\nmethods = {list(AVERAGED)}\n[method.average.settings."erm:phenotypes"]\nepochs = 2\nwarmup = 1\n'
        "[method.average.settings.genm]\nepochs = 2\nwarmup = 1\nsteps_per_epoch = 2\n[method.erm]\nepochs = 2\nwarmup = 1\n"
    )
    assert not run_study(str(study), tmp_path / "out").failed
    assert "average,,3,west" in (tmp_path / "out" / "predictions.csv").read_text()


def test_from_a_folder(fold, fitted, tmp_path):
    loaded = Model.load(fitted.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted.predict_proba(fold.target))
    assert loaded.held_out_logits() is None


@pytest.mark.parametrize("members", [None, {}, [], {"fc-logistic": 1, "phenotype-logistic": 2}])
def test_a_folder_without_the_facts_of_its_methods_is_refused(fold, tmp_path, members):
    folder = make("average", "small").fit(fold.source).save(tmp_path / "model")
    about = json.loads((folder / "method.json").read_text())
    about["facts"] |= {"members": members}
    if members is None:
        del about["facts"]["members"]
    del about["hashes"]["method.json"]
    about["hashes"]["method.json"] = digest({name: value for name, value in about.items() if name != "hashes"})
    (folder / "method.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"facts|damaged"):
        _ = Model.load(folder).uses_amplitude


def test_a_shared_model_hides_of_its_methods_what_it_hides_alone(fold, tmp_path):
    source = dataclasses.replace(fold.source, name="/home/somebody/secret-cohort")
    shared = [shared_model(make(*given).fit(source)) for given in (("average", "small"), ("phenotype-logistic",))]
    both, alone = (Model.load(one.save(tmp_path / one.name)) for one in shared)
    assert "secret-cohort" not in (tmp_path / "average" / "method.json").read_text()
    fill = next(name for name in alone.state_ if name.endswith("scaler.fill"))
    assert np.array_equal(both.state_[f"method-1.{fill}"], alone.state_[fill])
    assert not np.array_equal(both.state_[f"method-1.{fill}"], make("phenotype-logistic").fit(source).state_[fill])
    both.predict_proba(fold.target)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"methods": ("erm",)}, "two or three"),
        ({"methods": ("erm", "erm")}, "two or three"),
        ({"methods": ("erm", "average")}, "average is not one"),
        ({"methods": ("erm", "nope")}, "nope is not known"),
        ({"methods": ("erm:x", "fc-svm")}, "no variant x"),
        ({"settings": {"erm": {}}}, "erm is not one"),
        ({"methods": ("erm", "fc-svm"), "settings": {"erm": {"epoch": 3}}}, "no field epoch"),
        ({"methods": ("erm", "fc-svm"), "settings": {"erm": 3}}, "a table of fields"),
        ({"methods": ("fc-svm", "fc-svm:")}, "two or three"),
        ({"methods": ("mida", "fc-svm")}, "mida needs other subjects"),
    ],
)
def test_what_cannot_be_averaged_is_refused(fields, problem):
    with pytest.raises(InputError, match=problem):
        make("average", **fields)


def test_an_estimator_of_a_study_file_is_refused(tmp_path, fold):
    fold.source.save(tmp_path / "known.cohort")
    text = """
cohort = "known.cohort"
methods = ["mine", "average"]
[method.mine]
estimator = "sklearn.linear_model.LogisticRegression"
[method.average]
methods = ["mine", "fc-logistic"]
"""
    (tmp_path / "study.toml").write_text(text)
    try:
        with pytest.raises(InputError, match="mine is defined in a study file"):
            run_study(tmp_path / "study.toml", tmp_path / "out")
    finally:
        METHODS.pop("mine", None)


def test_an_average_takes_what_all_its_methods_take(fold):
    source, target = fold.source.to_connectomes(), fold.target.to_connectomes()
    names = ("connectome-adaptive", "fc-svm")
    found = make("average", methods=names).fit(source)
    each = [logit(make(name, atlases="first").fit(source).predict_proba(target)[:, 1]) for name in names]
    np.testing.assert_allclose(logit(found.predict_proba(target)[:, 1]), np.mean(each, axis=0), atol=1e-9)
    assert found.facts_["notes"][0].startswith("connectome-adaptive: Trained on connectomes: ")
    with pytest.raises(InputError, match=r"^method average of m2lgdg:M1 needs time series, and cohort tiny holds connectomes"):
        make("average", methods=("fc-svm", "m2lgdg:M1")).fit(source)


def test_tables_of_its_methods_are_those_of_the_average(tmp_path):
    cohort = make_cohort("tiny", n_regions=12, seed=1)
    fold = next(leave_one_site_out(cohort, ["west"]))
    fitted = make("average", methods=("connectome-adaptive", "fc-logistic")).fit(fold.source, source_distribution=True)
    loaded = Model.load(fitted.save(tmp_path / "model"))
    scores = loaded.ood_scores(fold.target)
    np.testing.assert_array_equal(scores["table_thickness"], fitted.ood_scores(fold.target)["table_thickness"])
    assert loaded.having_tables(fold.target) == {"thickness": len(fold.target)}
    table = fold.target.tables["thickness"]
    table.iloc[0] = np.nan
    flags = loaded.flags(fold.target.with_tables({"thickness": table}))
    assert flags[0].count("no thickness: decided without it") == 1 and not any("no thickness" in one for one in flags[1])
    with pytest.raises(InputError, match="another unit or measure"):
        loaded.predict_proba(fold.target.with_tables({"thickness": table / 1000}))
