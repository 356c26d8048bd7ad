"""Our methods as scikit-learn estimators: scikit-learn's own checks, its tools, and the same numbers as the methods."""

import inspect
import pickle
import subprocess
import sys
import warnings

import miniature
import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, GroupKFold, LeaveOneGroupOut, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator

import m2lgdg
from m2lgdg.connectivity import correlations, fc_features
from m2lgdg.sklearn_bridge.estimator import takes_fc
from m2lgdg.splits import leave_one_site_out

FC = ("fc-logistic", "fc-svm", "fc-adaptive", "combat-logistic")
EXPECTED_FAILED_CHECKS = {}  # docs/scikit-learn.md: none for methods on FC


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, roi_effect=2.0, edge_effect=2.0)


@pytest.mark.parametrize("name", [FC[0], *(pytest.param(name, marks=pytest.mark.long) for name in FC[1:])])
def test_scikit_learns_checks(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of data in the checks themselves
        results = check_estimator(m2lgdg.as_estimator(name), expected_failed_checks=EXPECTED_FAILED_CHECKS, on_fail=None)
    assert [(one["check_name"], one["exception"]) for one in results if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in results) > 50


@pytest.mark.parametrize("name", ["connectome-adaptive", "tangent-ridge", "m2lgdg"])
def test_checks_that_need_no_table(name):
    """Methods on series take no table, so that check_estimator leaves them out; these checks need no data."""
    estimator = m2lgdg.as_estimator(name)
    checks = (
        *("estimator_cloneable", "estimator_repr", "no_attributes_set_in_init", "get_params_invariance", "set_params"),
        *("parameters_default_constructible", "estimator_tags_renamed", "valid_tag_types", "mixin_order"),
    )
    for check in checks:
        getattr(estimator_checks, f"check_{check}")(type(estimator).__name__, clone(estimator))


def test_the_same_probabilities_as_the_method(cohort):
    fold = next(iter(leave_one_site_out(cohort)))
    for name in ("connectome-adaptive", "fc-svm"):
        expected = m2lgdg.make(name).fit(fold.source).predict_proba(fold.target)
        estimator = m2lgdg.as_estimator(name).fit(list(fold.source.series), fold.source.labels, groups=fold.source.sites)
        np.testing.assert_array_equal(estimator.predict_proba(list(fold.target.series)), expected)
        np.testing.assert_array_equal(estimator.predict(list(fold.target.series)), (expected[:, 1] > 0.5).astype(int))
        decision = estimator.decision_function(list(fold.target.series))
        np.testing.assert_allclose(1 / (1 + np.exp(-decision)), expected[:, 1], atol=1e-12)


@pytest.mark.parametrize("name", FC)
def test_series_matrices_and_vectors_give_the_same(cohort, name):
    fold = next(iter(leave_one_site_out(cohort)))

    def proba(of):
        estimator = m2lgdg.as_estimator(name).fit(of(fold.source), fold.source.labels, groups=fold.source.sites)
        return estimator.predict_proba(of(fold.target))[:, 1]

    series = proba(lambda one: list(one.series))
    np.testing.assert_array_equal(proba(lambda one: fc_features(one.series)), series)
    np.testing.assert_allclose(proba(lambda one: correlations(one.series)), series, atol=1e-5)
    np.testing.assert_allclose(proba(lambda one: list(np.arctanh(correlations(one.series) * 0.999))), series, atol=2e-3)


def test_a_matrix_does_not_depend_on_the_others(cohort):
    """Whether it holds correlations is a matter of its own range and diagonal; in doubt it is of the kind of the fit."""
    matrices = correlations(cohort.series).astype(float)
    estimator = m2lgdg.as_estimator("fc-svm").fit(matrices, cohort.labels, groups=cohort.sites)
    alone = estimator.predict_proba(matrices)
    odd = matrices.copy()
    np.fill_diagonal(odd[3], 0.0)
    odd[5] = np.arctanh(np.clip(odd[5], -0.999, 0.999))
    np.fill_diagonal(odd[6], np.inf)
    odd[6] = np.arctanh(np.minimum(odd[6], 1.0), where=odd[6] < 1, out=odd[6])
    np.testing.assert_allclose(estimator.predict_proba(odd), alone, atol=1e-6)
    np.testing.assert_array_equal(estimator.predict_proba(odd[5:6])[0], estimator.predict_proba(odd)[5])


def test_matrices_that_leave_their_kind_open_are_not_taken_for_two_kinds(cohort):
    matrices = correlations(cohort.series)
    z = np.arctanh(np.where(np.eye(len(cohort.rois), dtype=bool), 0, matrices))
    z[1] *= 0.9 / np.abs(z[1]).max()  # may be correlations
    z[2] *= 1.5 / np.abs(z[2]).max()  # cannot
    fitted = m2lgdg.as_estimator("fc-logistic").fit(matrices, cohort.labels, groups=cohort.sites)
    with pytest.raises(
        ValueError, match=r"that of subject 2 is fisher-z and that of subject 1 may be either; .*on correlation"
    ):
        fitted.predict_proba(z[1:3])
    infinite = z[1:3] + np.where(np.eye(len(cohort.rois), dtype=bool), np.inf, 0)
    unit = np.where(np.eye(len(cohort.rois), dtype=bool), 1, np.tanh(z[1:3]))
    np.testing.assert_allclose(fitted.predict_proba(infinite), fitted.predict_proba(unit), atol=1e-6)


@pytest.mark.parametrize("name", ["connectome-adaptive", "tangent-logistic", "fc-logistic"])
def test_matrices_are_a_cohort_of_connectomes(cohort, name, tmp_path):
    fold = next(iter(leave_one_site_out(cohort)))
    source, target = (list(map(np.array, one.to_connectomes().connectomes)) for one in (fold.source, fold.target))
    estimator = m2lgdg.as_estimator(name).fit(source, fold.source.labels, groups=fold.source.sites)
    assert estimator.n_features_in_ == len(cohort.rois)
    rois = [str(i + 1) for i in range(len(cohort.rois))]
    given = m2lgdg.Cohort.from_connectomes(target, fold.target.labels, "new", rois=rois, values=estimator.method_.trained_on)
    loaded = m2lgdg.Model.load(estimator.method_.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(given), estimator.predict_proba(target))
    expected = m2lgdg.make(name).fit(m2lgdg.Cohort.from_connectomes(source, fold.source.labels, fold.source.sites, rois=rois))
    np.testing.assert_array_equal(expected.predict_proba(given), estimator.predict_proba(target))


def test_which_methods_take_fc():
    assert {name for name in m2lgdg.METHODS if takes_fc(name)} == set(FC)


def test_labels_can_be_words(cohort):
    words = np.where(cohort.labels == 1, "patient", "control")
    numbers = m2lgdg.as_estimator("fc-svm").fit(list(cohort.series), cohort.labels, groups=cohort.sites)
    named = clone(numbers).fit(list(cohort.series), words, groups=cohort.sites)
    assert named.classes_.tolist() == ["control", "patient"]
    assert set(named.predict(list(cohort.series))) <= {"control", "patient"}
    np.testing.assert_array_equal(named.predict_proba(list(cohort.series)), numbers.predict_proba(list(cohort.series)))


def test_groups_change_what_is_held_out(cohort):
    with_sites = m2lgdg.as_estimator("fc-svm").fit(list(cohort.series), cohort.labels, groups=cohort.sites)
    without = m2lgdg.as_estimator("fc-svm").fit(list(cohort.series), cohort.labels)
    assert set(with_sites.method_.facts_["source"]["sites"]) == set(cohort.site_names)
    assert set(without.method_.facts_["source"]["sites"]) == {"all"}
    assert not np.array_equal(with_sites.method_.state_["calibration"], without.method_.state_["calibration"])


def test_cross_val_score_leaves_one_site_out(cohort):
    x, folds = list(cohort.series), LeaveOneGroupOut()
    scores = cross_val_score(
        m2lgdg.as_estimator("fc-logistic"), x, cohort.labels, groups=cohort.sites, cv=folds, params={"groups": cohort.sites},
        scoring="roc_auc",
    )  # fmt: skip
    expected = []
    for site in sorted(cohort.site_names):
        (fold,) = leave_one_site_out(cohort, [site])
        proba = m2lgdg.make("fc-logistic").fit(fold.source).predict_proba(fold.target)[:, 1]
        expected.append(m2lgdg.evaluate(fold.target.labels, proba)["AUC"])
    np.testing.assert_allclose(scores, expected)


def test_metadata_routing_passes_groups_to_fit_and_split(cohort):
    with config_context(enable_metadata_routing=True):
        estimator = m2lgdg.as_estimator("fc-logistic").set_fit_request(groups=True)
        options = {"cv": LeaveOneGroupOut(), "params": {"groups": cohort.sites}}
        routed = cross_val_predict(estimator, list(cohort.series), cohort.labels, method="predict_proba", **options)
    fold = next(iter(leave_one_site_out(cohort, ["east"])))
    expected = m2lgdg.make("fc-logistic").fit(fold.source).predict_proba(fold.target)
    np.testing.assert_array_equal(routed[cohort.sites == "east"], expected)


def test_grid_search(cohort):
    search = GridSearchCV(m2lgdg.as_estimator("fc-svm"), {"penalties": [(0.1,), (10.0,)]}, cv=GroupKFold(2), scoring="roc_auc")
    search.fit(fc_features(cohort.series), cohort.labels, groups=cohort.sites)
    assert search.best_params_["penalties"] in ((0.1,), (10.0,))
    assert search.best_estimator_.method_.facts_["penalties"]["fc"] == search.best_params_["penalties"][0]


def test_other_processes_know_the_classes(cohort):
    """As joblib needs it: both the estimator and its method on FC vectors have classes made while running."""
    fitted = m2lgdg.as_estimator("fc-svm").fit(fc_features(cohort.series), cohort.labels)
    code = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer).method_).__name__)"
    ended = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(fitted), capture_output=True, check=False)
    assert ended.stdout.decode().split() == ["FcSvmOnVectors"], ended.stderr.decode()


def test_pipeline(cohort):
    vectors = fc_features(cohort.series)
    pipeline = make_pipeline(StandardScaler(), m2lgdg.as_estimator("fc-svm"))
    pipeline.fit(vectors, cohort.labels, fcsvmclassifier__groups=cohort.sites)
    assert pipeline.score(vectors, cohort.labels) > 0.9
    cut = make_pipeline(FunctionTransformer(lambda x: [one[:60] for one in x]), m2lgdg.as_estimator("connectome-adaptive"))
    assert cut.fit(list(cohort.series), cohort.labels).predict(list(cohort.series)).shape == (len(cohort),)


def test_calibrated_classifier(cohort):
    vectors = fc_features(cohort.series)
    calibrated = CalibratedClassifierCV(m2lgdg.as_estimator("fc-svm"), cv=3).fit(vectors, cohort.labels)
    proba = calibrated.predict_proba(vectors)
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    assert m2lgdg.evaluate(cohort.labels, proba[:, 1])["AUC"] > 0.9
    on_series = CalibratedClassifierCV(m2lgdg.as_estimator("connectome-adaptive"), cv=2)
    assert on_series.fit(list(cohort.series), cohort.labels).predict(list(cohort.series)).shape == (len(cohort),)


def test_parameters_are_fields():
    estimator = m2lgdg.as_estimator("fc-svm", site_folds=3, penalties=[1, 2])
    assert estimator.get_params() == {
        "site_folds": 3, "penalties": (1, 2), "phenotypes": False, "held_phenotypes": True, "tables": "none", "random_state": 0,
        "device": "cpu",
    }  # fmt: skip
    copy = clone(estimator).set_params(site_folds=4)
    assert (copy.site_folds, estimator.site_folds, copy.penalties) == (4, 3, (1, 2))
    assert repr(copy) == "FcSvmClassifier(penalties=(1, 2), site_folds=4)"
    assert type(m2lgdg.as_estimator("fc-svm")) is type(estimator)
    assert "penalties" in inspect.signature(type(estimator)).parameters


def with_tables(cohort):
    draw = np.random.default_rng(0)
    values = draw.normal(size=(len(cohort), 4)) + 2 * cohort.labels[:, None] * [1, 1, 0, 0]
    values[3], values[4, 0] = np.nan, np.nan
    thickness, noise = values, draw.normal(size=(len(cohort), 2))
    frames = {"thickness": pd.DataFrame(thickness, cohort.subjects), "noise": pd.DataFrame(noise, cohort.subjects)}
    return cohort.with_tables(frames)


@pytest.mark.parametrize("connectomes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_cohort_as_x_has_phenotypes_and_tables(cohort, connectomes):
    """The same probabilities as from the method, fold by fold, whoever selects the subjects."""
    held = with_tables(cohort.to_connectomes() if connectomes else cohort)
    fields = {"phenotypes": True, "tables": "thickness"}
    proba = cross_val_predict(
        m2lgdg.as_estimator("connectome-adaptive", **fields),
        *(held, held.labels),
        groups=held.sites,
        cv=LeaveOneGroupOut(),
        method="predict_proba",
    )
    for fold in leave_one_site_out(held, ["east", "west"]):
        expected = m2lgdg.make("connectome-adaptive", **fields).fit(fold.source).predict_proba(fold.target)
        np.testing.assert_allclose(proba[held.sites == fold.site], expected, rtol=0, atol=1e-12)


def test_labels_and_sites_of_a_cohort_are_y_and_groups(cohort):
    held = with_tables(cohort)
    estimator = m2lgdg.as_estimator("connectome-adaptive")
    by_sites = estimator.fit(held, held.labels).predict_proba(held)
    np.testing.assert_array_equal(by_sites, clone(estimator).fit(held, held.labels, groups=held.sites).predict_proba(held))
    turned = clone(estimator).fit(held, np.where(held.labels, "control", "patient"))  # y counts, not the labels of X
    assert list(turned.classes_) == ["control", "patient"]
    np.testing.assert_allclose(turned.predict_proba(held), by_sites[:, ::-1], rtol=0, atol=1e-3)
    copy = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(copy.predict_proba(held), by_sites)
    twice = [held[int(i)] for i in (0, 0, *range(len(held)))]  # as bagging draws them
    assert clone(estimator).fit(twice, held.labels[[0, 0, *range(len(held))]]).predict(twice).shape == (len(held) + 2,)
    for tables in ("none", ["thickness"], ("noise", "thickness")):
        chosen = clone(estimator).set_params(tables=tables).fit(held, held.labels).method_
        assert list(chosen.facts_.get("tables", {})) == ([] if tables == "none" else list(tables))
    search = GridSearchCV(clone(estimator), {"tables": ["none", "all"]}, cv=GroupKFold(2), scoring="roc_auc")
    assert search.fit(held, held.labels, groups=held.sites).best_params_ == {"tables": "all"}


def test_a_cohort_that_an_estimator_cannot_use_is_one_sentence(cohort, tmp_path):
    held, estimator = with_tables(cohort), m2lgdg.as_estimator("connectome-adaptive")
    fitted = clone(estimator).fit(held, held.labels)
    with pytest.raises(ValueError, match="was fitted on a cohort of series, but X holds series"):
        fitted.predict(list(held.series))
    with pytest.raises(ValueError, match="was fitted on series, but X holds a cohort of series"):
        clone(estimator).fit(list(held.series), held.labels).predict(held)
    two = miniature.with_two_atlases(cohort)
    for x, message in (
        (two, "X holds the atlases .* and mixed; an estimator takes one, such as X.parcellation"),
        ([two[i] for i in range(len(two))], "list of cohorts with several atlases"),
        ([held[i] if i else cohort[i] for i in range(len(held))], "different ROIs, scans, inputs or tables"),
        ([held[:20], held[20:]], "give one cohort of all subjects"),
        ([held[0], *held.series[1:]], "give one cohort of all subjects"),
        (held[:0], "a cohort without subjects"),
    ):
        with pytest.raises(m2lgdg.InputError, match=message):
            clone(estimator).fit(x, held.labels)
    with pytest.raises(ValueError, match="y has 2 labels, but X has 52 subjects"):
        clone(estimator).fit(held, [0, 1])
    with pytest.raises(m2lgdg.InputError, match="has no table volume; it has thickness, noise"):
        clone(estimator).set_params(tables="volume").fit(held, held.labels)


def test_a_fitted_estimator_holds_a_model(cohort, tmp_path):
    estimator = m2lgdg.as_estimator("connectome-adaptive").fit(list(cohort.series), cohort.labels, groups=cohort.sites)
    estimator.method_.save(tmp_path / "model")
    loaded = m2lgdg.Method.load(tmp_path / "model")
    x = list(cohort.series)
    np.testing.assert_array_equal(
        loaded.predict_proba(m2lgdg.Cohort(x, cohort.subjects, cohort.sites, cohort.labels, [str(i + 1) for i in range(12)])),
        estimator.predict_proba(x),
    )
    on_vectors = m2lgdg.as_estimator("fc-svm").fit(fc_features(x), cohort.labels)
    with pytest.raises(m2lgdg.InputError, match="cannot be saved as a model folder"):
        on_vectors.method_.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fc-svm", {"y": "three"}, "Only binary classification is supported; the target y is multiclass (3 classes)."),
        ("fc-svm", {"y": "one"}, "y has only one class (0); two classes are needed."),
        ("fc-svm", {"y": "short"}, "y has 51 labels, but X has 52 subjects."),
        ("fc-svm", {"y": None}, "FcSvmClassifier requires y to be passed, but the target y is None."),
        ("fc-svm", {"groups": "own"}, "every group has one subject; groups are the imaging sites"),
        ("fc-svm", {"groups": "short"}, "groups has shape (51,), but X has 52 subjects; give one site for each subject."),
        ("fc-svm", {"groups": "missing"}, "groups contains missing values; give the site of each subject."),
        ("fc-svm", {"X": "nan"}, "Input X contains NaN or infinity, first in the array of subject 3."),
        ("fc-svm", {"X": "flat"}, "cohort X: subject subject-3: every ROI is constant."),
        ("fc-svm", {"X": "shape"}, "has shape (60, 11), not (time, 12)."),
        ("connectome-adaptive", {"X": "vectors"}, "(ROI, ROI) for each subject, but X holds a table; nilearn.connectome.vec"),
        ("m2lgdg", {"X": "matrices"}, "method m2lgdg needs time series, and cohort X holds connectomes; methods that take"),
        ("fc-svm", {"X": "mixed"}, "subject-3: a symmetric or triangular matrix"),
        ("fc-svm", {"X": "lopsided"}, "X, subject 3: the matrix is not symmetric: between ROI 7 and ROI 12 it has"),
        ("fc-svm", {"X": "sizes"}, "X, subject 3: the matrix has shape (11, 11), not (12, 12)."),
        ("fc-svm", {"X": "kinds"}, "X: the connectomes are of different kinds: that of subject 1 looks like correlation, that"),
        ("fc-svm", {"X": "large"}, "X, subject 3: 1.5 between ROI 1 and ROI 2 is out of range for correlation"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(cohort, name, changes, message):
    x, n = [np.array(one) for one in cohort.series], len(cohort)
    with_nan, flat, other = list(x), list(x), list(x)
    with_nan[2] = np.where(np.arange(len(x[2]))[:, None] == 5, np.nan, x[2])
    flat[2], other[2] = np.ones_like(x[2]), x[2][:60, :11]
    matrices = {name: list(correlations(x)) for name in ("lopsided", "sizes", "kinds", "large")}
    half = np.triu(matrices["lopsided"][2])
    matrices["lopsided"][2], matrices["sizes"][2] = half, matrices["sizes"][2][:11, :11]
    matrices["kinds"][2] = matrices["kinds"][2] * np.outer(np.arange(1, 13), np.arange(1, 13))
    matrices["large"][2][[0, 1], [1, 0]] = 1.5
    values = matrices | {
        "mixed": [*x[:2], correlations(x)[2], *x[3:]],
        "three": np.arange(n) % 3, "one": np.zeros(n, dtype=int), "own": np.arange(n), "missing": [None, *cohort.sites[1:]],
        "nan": with_nan, "flat": flat, "shape": other, "vectors": fc_features(x), "matrices": correlations(x), None: None,
    }  # fmt: skip
    short = {"y": cohort.labels[1:], "groups": cohort.sites[1:]}
    changes = {key: short[key] if value == "short" else values[value] for key, value in changes.items()}
    given = {"X": x, "y": cohort.labels, "groups": cohort.sites} | changes
    with pytest.raises(m2lgdg.InputError) as error:
        m2lgdg.as_estimator(name).fit(**given)
    assert message in str(error.value) and isinstance(error.value, ValueError)


def test_bad_parameters_are_one_sentence(cohort):
    with pytest.raises(m2lgdg.InputError, match="has no field folds; did you mean site_folds"):
        m2lgdg.as_estimator("fc-svm", folds=3)
    with pytest.raises(m2lgdg.InputError, match="method fc-svn is not known; did you mean fc-svm"):
        m2lgdg.as_estimator("fc-svn")
    with pytest.raises(m2lgdg.InputError, match="uses phenotypes alone, which X does not have"):
        m2lgdg.as_estimator("phenotype-logistic")
    with pytest.raises(m2lgdg.InputError, match="one atlas"):
        m2lgdg.as_estimator("fc-svm", atlases="all")
    for changed, message in (
        ({"site_folds": 1}, "it must be at least 2"),
        ({"site_folds": "five"}, "is not of type int"),
        ({"phenotypes": True}, "needs phenotypes, which X does not have"),
        ({"random_state": -1}, "random_state must be None or an integer"),
        ({"tables": "aseg"}, "with tables='aseg' needs tables, which only a Cohort as X has"),
        ({"tables": 3}, "field tables"),
    ):
        estimator = m2lgdg.as_estimator("fc-svm").set_params(**changed)
        with pytest.raises(m2lgdg.InputError, match=message):
            estimator.fit(list(cohort.series), cohort.labels)


def test_prediction_needs_the_same_kind_of_input(cohort):
    series, vectors = list(cohort.series), fc_features(cohort.series)
    on_series, on_fc = (m2lgdg.as_estimator("fc-svm").fit(x, cohort.labels) for x in (series, vectors))
    with pytest.raises(ValueError, match="was fitted on series, but X holds vectors"):
        on_series.predict(vectors)
    with pytest.raises(ValueError, match="was fitted on vectors, but X holds series"):
        on_fc.predict(series)
    matrices = correlations(cohort.series)
    on_matrices = m2lgdg.as_estimator("fc-svm").fit(matrices, cohort.labels)
    for one, x, held in (
        (on_series, matrices, "series"),
        (on_matrices, series, "matrices"),
        (on_matrices, vectors, "matrices"),
    ):
        with pytest.raises(ValueError, match=f"was fitted on {held}, but X holds"):
            one.predict(x)
    spread = np.arange(1, 13)
    with pytest.raises(ValueError, match="X, subject 1: the matrix looks like covariance, and the model was trained on corr"):
        on_matrices.predict(matrices * np.outer(spread, spread))
    with pytest.raises(ValueError, match="trained on 12 ROIs"):
        on_series.predict([one[:, :10] for one in series])
    table = pd.DataFrame(vectors, columns=[f"edge{i}" for i in range(vectors.shape[1])])
    fitted = m2lgdg.as_estimator("fc-svm").fit(table, cohort.labels)
    assert fitted.feature_names_in_.tolist() == table.columns.tolist()
