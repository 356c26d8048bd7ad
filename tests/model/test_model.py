"""`Model` and the `Method` inside it: one way to set a field, the same probabilities, one folder."""

import dataclasses

import numpy as np
import pytest

import m2lgdg
from m2lgdg import InputError, Model, make
from m2lgdg.cohort import Parcellation
from m2lgdg.connectivity import correlations
from m2lgdg.metrics import logit, sigmoid
from m2lgdg.report.card import write_card
from m2lgdg.scans import KINDS, Connectomes, arrays_of


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


def test_the_default_of_0_1_0_decides_without_the_block_it_lacks(fold, tmp_path):
    """Its facts do not name the block; a model that names it and lacks its weights is damaged."""
    model = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(fold.source)
    logarithms = model.method._features("log_euclidean", fold.target)
    own = logarithms @ model.state_["log_euclidean.weights"] + model.state_["log_euclidean.intercept"]
    expected = model.decision(fold.target) - own
    for part in ("weights", "intercept", "mean"):
        del model.state_[f"log_euclidean.{part}"]
    with pytest.raises(InputError, match="its weights do not fit method connectome-adaptive"):
        m2lgdg.Model.load(model.save(tmp_path / "damaged")).predict_proba(fold.target)
    del model.facts_["penalties"]["log_euclidean"]
    former = m2lgdg.Model.load(model.save(tmp_path / "former"))
    np.testing.assert_allclose(former.decision(fold.target), expected, atol=1e-6)
    assert own.std() > 0.01


def in_kind(cohort, kind):
    """The connectomes of a cohort, as Fisher z, correlations, covariances (of unequal sds) or partial correlations."""
    made, spread = [], np.linspace(0.5, 3.0, len(cohort.rois))
    change = {"fisher-z": lambda r: np.arctanh(np.clip(r, -0.999, 0.999)), "covariance": lambda r: r * np.outer(spread, spread)}
    for one in correlations(cohort.series):
        if kind == "partial-correlation":
            inverse = np.linalg.inv(one)
            scale = np.sqrt(np.diagonal(inverse))
            one = -inverse / (scale[:, None] * scale)
            np.fill_diagonal(one, 1.0)
        made.append(change.get(kind, np.array)(one))
    return dataclasses.replace(cohort, series=Connectomes.of(made, kind, len(cohort.rois)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_connectomes(fold, kind, tmp_path):
    """Fisher z and correlations are one kind; a covariance has the probabilities of its correlations; others are refused."""
    source, target = in_kind(fold.source, kind), in_kind(fold.target, kind)
    fitted = make("fc-logistic").fit(source, source_distribution=True)
    loaded = Model.load(fitted.save(tmp_path / "model"))
    assert loaded.facts_["scans"] == loaded.method.trained_on == kind
    np.testing.assert_array_equal(loaded.predict_proba(target), fitted.predict_proba(target))
    if kind != "partial-correlation":
        expected = make("fc-logistic").fit(fold.source).predict_proba(fold.target)
        np.testing.assert_allclose(fitted.predict_proba(target), expected, atol=1e-6)
    for other in ("series", *KINDS):
        given = fold.target if other == "series" else in_kind(fold.target, other)
        if other == kind or {kind, other} == {"correlation", "fisher-z"}:
            np.testing.assert_allclose(loaded.predict_proba(given), loaded.predict_proba(target), atol=1e-6)
            scores = [loaded.ood_scores(one)["connectivity"] for one in (given, target)]
            np.testing.assert_allclose(*scores, rtol=1e-4)
            continue
        for call in (loaded.predict_proba, loaded.flags, loaded.ood_scores, loaded.compare):
            with pytest.raises(InputError, match=rf"trained on connectomes \({kind}\), and cohort tiny holds .*; "):
                call(given)
    with pytest.raises(
        InputError, match=r"trained on time series, and cohort tiny holds connectomes .* give it the time series"
    ):
        make("fc-logistic").fit(fold.source).predict_proba(target)


def test_an_atlas_of_series_and_one_of_connectomes(fold):
    """Each member has the kind of its atlas, and the model the mean of their logits."""

    def with_second(cohort):
        second = Parcellation(cohort.rois, cohort.to_connectomes().connectomes)
        return dataclasses.replace(cohort, atlas="first", parcellations={"second": second})

    source, target = with_second(fold.source), with_second(fold.target)
    fitted = make("fc-logistic", atlases=("second", "first")).fit(source, source_distribution=True)
    assert [one.trained_on for one in fitted.members.values()] == ["fisher-z", "series"] and fitted.facts_[
        "scans"
    ] == "fisher-z"
    logits = [logit(one.predict_proba(target)[:, 1]) for one in fitted.members.values()]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-6)
    slope, offset = fitted.mean_recalibration
    np.testing.assert_allclose(fitted.predict_proba(target)[:, 1], sigmoid(slope * logits[0] + offset), atol=1e-6)
    assert all(raised[:1] == ["short scan: 89"] for raised in fitted.flags(target))
    assert fitted.compare(target)[0].startswith("volumes: 89 here")


def test_a_model_of_several_atlases_notes_what_each_left_out(fold, tmp_path):
    source = dataclasses.replace(fold.source, atlas="first", parcellations={})
    matrices = Parcellation(source.rois, source.to_connectomes().scans)
    fitted = make("connectome-adaptive").fit(dataclasses.replace(source, parcellations={"second": matrices}))
    assert [note.partition(": plain FC")[0] for note in fitted.facts_["notes"]] == ["second: Trained on connectomes"]
    assert (
        "deviation FC and amplitude, computed from time series, are left out"
        in (write_card(fitted.save(tmp_path)) / "card.md").read_text()
    )


@pytest.mark.parametrize("scans", ["series", "connectomes"])
@pytest.mark.parametrize(("kept", "problem"), [((), "no subject"), ((1,), "only one class")])
def test_an_atlas_that_too_few_have_is_one_sentence(tiny, scans, kept, problem):
    cohort = tiny if scans == "series" else tiny.to_connectomes()
    held = [one if label in kept else None for one, label in zip(arrays_of(cohort.scans), cohort.labels, strict=True)]
    further = held if scans == "series" else Connectomes(held, "fisher-z", len(tiny.rois))
    both = dataclasses.replace(cohort, atlas="a", parcellations={"b": Parcellation(tiny.rois, further)})
    with pytest.raises(InputError, match=f"fc-logistic cannot be fitted: source has {problem} in atlas b"):
        make("fc-logistic", atlases="b").fit(both)
    with pytest.raises(InputError, match=f"atlas b: method fc-logistic cannot be fitted: source has {problem}"):
        make("fc-logistic", atlases="all").fit(both)
