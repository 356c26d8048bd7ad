"""`Model` and the `Method` inside it: one way to set a field, the same probabilities, one folder."""

import numpy as np
import pytest

import m2lgdg


@pytest.fixture(scope="module")
def fold(tiny):
    return next(m2lgdg.leave_one_site_out(tiny))


def test_a_field_set_on_a_model_is_the_methods(fold):
    model = m2lgdg.make("fc-logistic")
    model.penalties = (10.0,)
    assert model.method.penalties == model.fields()["penalties"] == (10.0,)
    given = m2lgdg.make("fc-logistic", penalties=(10.0,)).fit(fold.source).predict_proba(fold.target)
    assert np.array_equal(model.fit(fold.source).predict_proba(fold.target), given)
    assert not np.array_equal(m2lgdg.make("fc-logistic").fit(fold.source).predict_proba(fold.target), given)


def test_what_a_model_holds_is_not_set_on_its_method(fold):
    model = m2lgdg.make("m2lgdg-connectome", members=3)
    assert model.members == {} and model.method.members == model.fields()["members"] == 3


def test_a_method_alone_predicts_as_its_model(fold):
    alone = m2lgdg.METHODS["fc-logistic"]().fit(fold.source, seed=0)
    model = m2lgdg.make("fc-logistic").fit(fold.source, seed=0)
    assert np.array_equal(alone.predict_proba(fold.target), model.predict_proba(fold.target))
    assert isinstance(model, m2lgdg.Model) and type(model.method) is type(alone)


def test_the_folder_of_a_method_is_that_of_its_model(fold, tmp_path):
    folder = m2lgdg.METHODS["fc-logistic"]().fit(fold.source).save(tmp_path / "alone")
    m2lgdg.make("fc-logistic").fit(fold.source).save(tmp_path / "model")
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "model" / file.name).read_bytes()
    loaded = m2lgdg.Method.load(folder)
    assert isinstance(loaded, m2lgdg.Model)
    assert np.array_equal(loaded.predict_proba(fold.target), m2lgdg.Model.load(folder).predict_proba(fold.target))


def test_arrays_of_0_1_0_are_found_by_their_former_names(fold, tmp_path):
    model = m2lgdg.make("prior").fit(fold.source)
    expected = model.predict_proba(fold.target)
    model.method.state_ = {"share": model.state_["prevalence"]}
    loaded = m2lgdg.Model.load(model.save(tmp_path / "former"))
    assert list(loaded.state_) == ["prevalence"] and np.array_equal(loaded.predict_proba(fold.target), expected)
