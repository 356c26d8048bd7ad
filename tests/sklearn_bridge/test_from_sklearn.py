"""scikit-learn estimators as methods: features, source sites as groups, studies, models without pickle, audit and commands."""

import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier, RandomForestClassifier, StackingClassifier, VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    RidgeClassifier,
    RidgeClassifierCV,
    SGDClassifier,
)
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, RandomizedSearchCV, ShuffleSplit, StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC

import m2lgdg
from m2lgdg.connectivity import amplitude_features, covariances, fc_features
from m2lgdg.metrics import platt, sigmoid
from m2lgdg.model.model import Model
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.sklearn_bridge import text
from m2lgdg.sklearn_bridge.routing import SiteFolds, is_random, prepared
from m2lgdg.sklearn_bridge.stored import packed
from m2lgdg.sklearn_bridge.text import code_of, estimator_of, estimator_text
from m2lgdg.splits import leave_one_site_out, site_folds
from m2lgdg.study.audit import audit
from m2lgdg.study.predictions import read_predictions
from m2lgdg.tangent import geometric_mean, tangent_features

pytestmark = pytest.mark.usefixtures("methods_forgotten")


def spread(subject):
    """Features for tests: sd of each ROI."""
    return subject.series[0].std(axis=0)


def make_model():
    """An estimator by import path."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1))


class Seen(LogisticRegression):
    """Remembers what it was fitted on."""

    def fit(self, X, y, sample_weight=None):
        Seen.fitted = [*getattr(Seen, "fitted", []), (np.array(X), np.array(y))]
        return super().fit(X, y)


def test_probabilities_are_those_of_the_estimator(fold):
    proba = m2lgdg.from_sklearn(make_model()).fit(fold.source).predict_proba(fold.target)
    expected = make_model().fit(fc_features(fold.source.series).astype(float), fold.source.labels)
    np.testing.assert_array_equal(proba[:, 1], expected.predict_proba(fc_features(fold.target.series).astype(float))[:, 1])


def test_features(fold):
    reference = geometric_mean(covariances(fold.source.series), tolerance=0.02, first_step=256)
    scaler = PhenotypeScaler.fit(fold.source)
    hidden = PhenotypeScaler.restore(scaler.columns, scaler.state("p"), "p")
    expected = {
        "fc": lambda one: fc_features(one.series),
        "tangent": lambda one: tangent_features(covariances(one.series), reference),
        "amplitude": lambda one: amplitude_features(one.series),
        "phenotypes": lambda one: (scaler if one is fold.source else hidden).transform(one),
        spread: lambda one: np.stack([series.std(axis=0) for series in one.series]),
    }
    for features, compute in expected.items():
        proba = m2lgdg.from_sklearn(make_model(), features).fit(fold.source).predict_proba(fold.target)[:, 1]
        peer = make_model().fit(compute(fold.source).astype(float), fold.source.labels)
        np.testing.assert_allclose(proba, peer.predict_proba(compute(fold.target).astype(float))[:, 1], rtol=1e-9)


def test_tables(fold, tmp_path):
    """All columns side by side, missing values by the mean of source; who has no table is flagged."""

    def with_tables(cohort):
        draw = np.random.default_rng(len(cohort))
        frames = {name: pd.DataFrame(draw.normal(5, 1, (len(cohort), 3)), cohort.subjects) for name in ("aseg", "area")}
        frames["aseg"].iloc[1, 0], frames["aseg"].iloc[2], frames["area"].iloc[:, 1] = np.nan, np.nan, 1.0  # constant
        return cohort.with_tables(frames)

    source, target = with_tables(fold.source), with_tables(fold.target)
    fitted = m2lgdg.from_sklearn(make_model(), "tables", name="on-tables").fit(source)
    columns = {"aseg": ["0", "1", "2"], "area": ["0", "2"]}
    assert {name: one["columns"] for name, one in fitted.facts_["tables"].items()} == columns
    means = {name: source.tables[name].mean() for name in columns}

    def features(cohort):
        return np.hstack([cohort.tables[name].fillna(means[name])[chosen].to_numpy() for name, chosen in columns.items()])

    peer = make_model().fit(features(source), source.labels)
    expected = peer.predict_proba(features(target))[:, 1]
    np.testing.assert_allclose(fitted.predict_proba(target)[:, 1], expected, rtol=1e-9)
    for block in fitted.method.table_blocks():  # nothing is taken out
        cleaned = block.cleaned(target, fitted.method.scaled_confounds(target))
        np.testing.assert_array_equal(cleaned, block.features(target))
    flags = fitted.flags(target)
    assert "no aseg: decided without it" in flags[2] and not any("decided" in flag for flag in flags[1])
    loaded = m2lgdg.Model.load(fitted.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(target), fitted.predict_proba(target))
    with pytest.raises(m2lgdg.InputError, match="has no tables"):
        m2lgdg.from_sklearn(make_model(), "tables", name="on-tables").fit(fold.source)


def test_series_are_a_list_of_arrays(fold):
    spreads = FunctionTransformer(lambda x: np.stack([one.std(axis=0) for one in x]))
    on_series = m2lgdg.from_sklearn(make_pipeline(spreads, LogisticRegression()), "series", name="on-series")
    by_function = m2lgdg.from_sklearn(LogisticRegression(), lambda subject: subject.series[0].astype(float).std(axis=0))
    np.testing.assert_allclose(
        *(one.fit(fold.source).predict_proba(fold.target)[:, 1] for one in (on_series, by_function)), rtol=1e-6
    )


def test_a_function_sees_one_subject_without_label_site_and_id(fold):
    seen = []

    def features(subject):
        seen.append((len(subject), *subject.sites, *subject.labels, *subject.subjects))
        return [subject.series[0].std()]

    m2lgdg.from_sklearn(LogisticRegression(), features).fit(fold.source)
    assert seen == [(1, "", -1, f"subject-{i + 1}") for i in range(len(fold.source))]


def test_decisions_are_platt_scaled_on_held_out_sites(fold):
    fitted = m2lgdg.from_sklearn(SVC(kernel="linear"), "fc").fit(fold.source)
    x, source = fc_features(fold.source.series).astype(float), fold.source
    held_out = np.empty(len(source))
    for train, test in site_folds(source.sites, source.labels, 5):
        assert not set(source.sites[train]) & set(source.sites[test])
        held_out[test] = SVC(kernel="linear").fit(x[train], source.labels[train]).decision_function(x[test])
    slope, offset = platt(held_out, source.labels)
    decision = SVC(kernel="linear").fit(x, source.labels).decision_function(fc_features(fold.target.series).astype(float))
    np.testing.assert_allclose(fitted.predict_proba(fold.target)[:, 1], sigmoid(slope * decision + offset), rtol=1e-9)


def test_calibration_is_on_the_scale_of_the_chosen_penalty(fold):
    """Fits without one site have the penalty of the fit on all, whose decisions are calibrated."""
    x, source = fc_features(fold.source.series).astype(float), fold.source
    for estimator, chosen in (
        (RidgeClassifierCV([0.01, 10.0, 1e4]), lambda one: RidgeClassifier(one.alpha_)),
        (GridSearchCV(SVC(), {"C": [0.01, 1, 100]}), lambda one: SVC(C=one.C)),
        (
            make_pipeline(StandardScaler(), RidgeClassifierCV([0.1, 1e3])),
            lambda one: make_pipeline(StandardScaler(), RidgeClassifier(one[-1].alpha_)),
        ),
    ):
        fitted = m2lgdg.from_sklearn(estimator).fit(source)
        held_out = np.empty(len(source))
        for train, test in site_folds(source.sites, source.labels, 5):
            held_out[test] = chosen(fitted.estimator_).fit(x[train], source.labels[train]).decision_function(x[test])
        np.testing.assert_allclose(fitted.state_["calibration"], platt(held_out, source.labels), rtol=1e-5)


def test_a_search_chooses_on_held_out_source_sites(fold):
    Seen.fitted = []
    search = GridSearchCV(make_pipeline(StandardScaler(), Seen()), {"seen__C": [0.1, 1.0]}, scoring="roc_auc")
    x = fc_features(fold.source.series).astype(float)
    ready = prepared(search, 0, 5)
    fitted = ready.fit(x, fold.source.labels.astype(np.int64), fold.source.sites)
    assert ready.computed == ("cv",) and fitted.n_splits_ == len(fold.source.site_names) == 3
    folds = site_folds(fold.source.sites, fold.source.labels, 5)
    sizes = [len(y) for _, y in Seen.fitted]
    assert sizes == [*(len(train) for train, _ in folds), *(len(train) for train, _ in folds), len(fold.source)]
    for (_, labels), (train, _) in zip(Seen.fitted, folds, strict=False):
        np.testing.assert_array_equal(labels, fold.source.labels[train])


@pytest.mark.parametrize(
    "estimator",
    [
        GridSearchCV(SVC(), {"C": [1, 10]}),
        make_pipeline(StandardScaler(), GridSearchCV(LogisticRegression(), {"C": [1, 10]})),
        RidgeClassifierCV([0.1, 1.0]),
        LogisticRegressionCV(Cs=[0.1, 1.0], l1_ratios=(0,), use_legacy_attributes=False, scoring="neg_log_loss"),
        CalibratedClassifierCV(GridSearchCV(SVC(), {"C": [1, 10]})),
    ],
    ids=lambda one: type(one).__name__,
)
def test_all_that_chooses_gets_the_sites(fold, estimator):
    ready = prepared(estimator, 0, 5)
    assert not ready.notes
    for name, value in ready.estimator.get_params().items():
        if name.split("__")[-1] == "cv":
            assert isinstance(value, SiteFolds) if ready.routed else name in ready.computed
    fitted = m2lgdg.from_sklearn(estimator).fit(fold.source)
    proba = fitted.predict_proba(fold.target)[:, 1]
    assert m2lgdg.evaluate(fold.target.labels, proba)["AUC"] > 0.7
    np.testing.assert_array_equal(*(packed(one.estimator_) for one in (fitted, m2lgdg.make(fitted.name).fit(fold.source))))


def test_alpha_of_a_ridge_is_chosen_on_held_out_source_sites(fold):
    """With and without a scorer, which scikit-learn's routing does not allow in RidgeClassifierCV."""
    x, y = fc_features(fold.source.series).astype(float), fold.source.labels.astype(np.int64)
    folds, alphas = site_folds(fold.source.sites, fold.source.labels, 5), np.logspace(-3, 3, 7)
    for scoring in (None, "roc_auc"):
        fitted = prepared(make_pipeline(StandardScaler(), RidgeClassifierCV(alphas, scoring=scoring)), 0, 5).fit(
            x, y, fold.source.sites
        )
        expected = RidgeClassifierCV(alphas, scoring=scoring, cv=folds).fit(StandardScaler().fit_transform(x), y)
        assert fitted[-1].alpha_ == expected.alpha_ and fitted[-1].cv is None


def test_splitters_of_groups_get_the_sites(fold):
    Seen.fitted = []
    x, y = fc_features(fold.source.series).astype(float), fold.source.labels.astype(np.int64)
    search = GridSearchCV(Seen(), {"C": [1.0]}, cv=LeaveOneGroupOut())
    prepared(search, 0, 5).fit(x, y, fold.source.sites)
    sizes = [(fold.source.sites != site).sum() for site in sorted(fold.source.site_names)]
    assert [len(labels) for _, labels in Seen.fitted] == [*sizes, len(fold.source)]


def test_a_search_in_a_search_chooses_on_other_sites_too(fold):
    Seen.fitted = []
    x, y = fc_features(fold.source.series).astype(float), fold.source.labels.astype(np.int64)
    nested = CalibratedClassifierCV(GridSearchCV(Seen(), {"C": [1.0]}), method="sigmoid")
    ready = prepared(nested, 0, 5)
    assert ready.routed and ready.computed == ()
    ready.fit(x, y, fold.source.sites)
    sites = sorted(fold.source.site_names)
    assert len(Seen.fitted) == 9  # each of three sites left out; of the other two, each once, then both
    sizes = {len(labels) for _, labels in Seen.fitted}
    counts = {site: int((fold.source.sites == site).sum()) for site in sites}
    pairs = {counts[a] + counts[b] for a in sites for b in sites if a != b}
    assert sizes == pairs | set(counts.values())


def test_a_chosen_splitter_stays_and_what_gets_no_sites_is_noted(fold):
    kept = prepared(GridSearchCV(SVC(), {"C": [1]}, cv=StratifiedKFold(2)), 0, 5)
    assert isinstance(kept.estimator.cv, StratifiedKFold) and not kept.computed and not kept.routed
    stacked = m2lgdg.from_sklearn(StackingClassifier([("a", LogisticRegression())])).fit(fold.source)
    assert "notes" not in stacked.facts_ and stacked.estimator_.cv is None
    inside = StackingClassifier([("a", StackingClassifier([("b", LogisticRegression())], LogisticRegression()))])
    assert m2lgdg.from_sklearn(inside).fit(fold.source).facts_["notes"] == [
        "StackingClassifier chooses on held-out subjects, because it does not get the sites."
    ]


def test_one_source_site(cohort):
    one = cohort.select(sites=["east"])
    for estimator in (SVC(), GridSearchCV(LogisticRegression(), {"C": [1, 10]})):
        proba = m2lgdg.from_sklearn(estimator).fit(one).predict_proba(cohort)
        assert np.isfinite(proba).all()


def test_seeds():
    shuffled = StratifiedKFold(3, shuffle=True)
    tried = {"a": [RandomForestClassifier(), SVC()]}
    nested = VotingClassifier([("v", make_pipeline(StandardScaler(), RandomForestClassifier(3)))])
    exact = (SVC(), LogisticRegression(), make_model(), RidgeClassifierCV(), GridSearchCV(SVC(), {}, cv=StratifiedKFold(3)))
    drawn = (
        *(SGDClassifier(), RandomForestClassifier(), make_pipeline(PCA(2), SVC()), nested),
        *(GridSearchCV(SVC(), {}, cv=shuffled), CalibratedClassifierCV(GridSearchCV(SVC(), {}, cv=ShuffleSplit(2)))),
        GridSearchCV(Pipeline([("a", SVC())]), tried),
    )
    assert [is_random(one) for one in exact] == [False] * len(exact)
    assert [is_random(one) for one in drawn] == [True] * len(drawn)
    assert not any(is_random(prepared(one, 3, 5).estimator) for one in drawn) and is_random(drawn[0])  # the user's own stays
    assert not is_random(RandomForestClassifier(random_state=0))
    ready = prepared(make_pipeline(PCA(2), RandomForestClassifier(random_state=7)), 3, 5).estimator.get_params()
    assert (ready["pca__random_state"], ready["randomforestclassifier__random_state"]) == (3, 7)
    assert m2lgdg.from_sklearn(RandomForestClassifier()).stochastic
    assert not m2lgdg.from_sklearn(make_model()).stochastic


@pytest.mark.parametrize(
    "estimator",
    [
        CalibratedClassifierCV(LogisticRegression(), cv=StratifiedKFold(2, shuffle=True)),
        make_pipeline(StandardScaler(), RandomForestClassifier(3)),
        make_pipeline(StandardScaler(), BaggingClassifier(LogisticRegression(), 2, max_features=0.2)),
        make_pipeline(StandardScaler(), VotingClassifier([("a", SGDClassifier(loss="log_loss"))], voting="soft")),
    ],
    ids=("splitter", "forest", "bagging", "voting"),
)
def test_a_study_gives_the_same_bits_again(estimator, cohort, tmp_path):
    cohort.save(tmp_path / "tiny.cohort")
    m2lgdg.from_sklearn(estimator, name="x")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["x"], "targets": ["east"], "seeds": [0, 1]}
    for i in range(3):
        assert m2lgdg.run_study(study, tmp_path / f"out-{i}").done == 2
    first, *others = [read_predictions(tmp_path / f"out-{i}")["proba"] for i in range(3)]
    assert all(first.equals(other) for other in others) and first[:10].tolist() != first[10:].tolist()


@pytest.mark.parametrize(
    "estimator",
    [
        make_pipeline(SimpleImputer(missing_values=np.nan), StandardScaler(), SVC(C=2.5, class_weight={0: 1.0, 1: 2.0})),
        GridSearchCV(LogisticRegression(), {"C": np.logspace(-1, 1, 3), "tol": [1e-3]}, cv=StratifiedKFold(3, shuffle=True)),
        make_pipeline(FunctionTransformer(np.tanh), LogisticRegression()),
    ],
    ids=("pipeline", "search", "function"),
)
def test_text_and_back(estimator):
    written = estimator_text(estimator)
    again = estimator_of(written)
    assert repr(again) == repr(estimator) and estimator_text(again) == written
    assert code_of(written) == ""  # all of it is of scikit-learn and numpy


def test_text_of_a_randomised_search():
    from scipy.stats import loguniform

    search = RandomizedSearchCV(SVC(), {"C": loguniform(1e-2, 1e2)}, n_iter=2, random_state=0)
    again = estimator_of(estimator_text(search))
    draws = [one.param_distributions["C"].rvs(size=3, random_state=1) for one in (search, again)]
    np.testing.assert_array_equal(*draws)


def test_model_folder(fold, tmp_path):
    for features in ("fc", "tangent", "phenotypes"):
        fitted = m2lgdg.from_sklearn(GridSearchCV(SVC(), {"C": [1, 10]}), features, name="saved").fit(fold.source)
        expected = fitted.predict_proba(fold.target)
        fitted.save(tmp_path / features)
        assert sorted(path.name for path in (tmp_path / features).iterdir()) == ["method.json", "weights.safetensors"]
        del m2lgdg.METHODS["saved"]  # as in another process
        np.testing.assert_array_equal(Model.load(tmp_path / features).predict_proba(fold.target), expected)


def test_amplitude_matters_for_some_features():
    made = [m2lgdg.from_sklearn(SVC(), features, name="a") for features in ("fc", "tangent", "amplitude", "series", spread)]
    assert [one.uses_amplitude for one in made] == [False, False, True, True, True]


def test_several_atlases(tmp_path):
    cohort = m2lgdg.make_cohort("tiny", seed=3, edge_effect=2.0)
    other = m2lgdg.cohort.Parcellation([f"r{i}" for i in range(6)], [one[:, ::2] for one in cohort.series])
    both = m2lgdg.Cohort(
        cohort.series, cohort.subjects, cohort.sites, cohort.labels, cohort.rois, atlas="a", parcellations={"b": other}
    )
    method = m2lgdg.from_sklearn(SVC(kernel="linear"), name="two")
    method.method.atlases = "all"
    fitted = method.fit(both)
    fitted.save(tmp_path / "model")
    np.testing.assert_array_equal(Model.load(tmp_path / "model").predict_proba(both), fitted.predict_proba(both))
    assert "atlas-1.estimator" in fitted.state_


def test_untrusted_types_are_refused(fold, tmp_path):
    forest = m2lgdg.from_sklearn(RandomForestClassifier(5), name="forest").fit(fold.source)
    assert np.isfinite(forest.predict_proba(fold.target)).all()
    with pytest.raises(m2lgdg.InputError, match=r"it holds sklearn.tree._tree.Tree, a type that skops does not trust"):
        forest.save(tmp_path / "forest")
    assert not (tmp_path / "forest").exists()
    own = m2lgdg.from_sklearn(Seen(), name="own").fit(fold.source)
    with pytest.raises(m2lgdg.InputError, match=r"test_from_sklearn.Seen, a type that skops does not trust"):
        own.save(tmp_path / "own")


def test_a_model_with_foreign_types_is_refused_when_read(fold):
    fitted = m2lgdg.from_sklearn(LogisticRegression(), name="read").fit(fold.source)
    fitted.complete_state()
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(fitted.state_["estimator"].tobytes())) as given, zipfile.ZipFile(buffer, "w") as made:
        for name in given.namelist():
            text = given.read(name)
            made.writestr(
                name,
                text.replace(b'"LogisticRegression"', b'"Popen"').replace(b"sklearn.linear_model._logistic", b"subprocess"),
            )
    for content, message in (
        (buffer.getvalue(), "does not trust its type subprocess.Popen"),
        (b"PK nothing", "cannot be read"),
    ):
        vars(fitted.method).pop("estimator_", None)
        fitted.state_["estimator"] = np.frombuffer(content, dtype=np.uint8)
        with pytest.raises(m2lgdg.InputError, match=message):
            fitted.predict_proba(fold.target)


def test_a_model_cannot_choose_what_is_imported(fold, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_features.py").write_text("def spread(subject):\n    return subject.series[0].std(axis=0)\n")
    fitted = m2lgdg.from_sklearn(LogisticRegression(max_iter=5000), "lab_features:spread", name="spread").fit(fold.source)
    fitted.save(tmp_path / "model")
    expected = fitted.predict_proba(fold.target)
    np.testing.assert_array_equal(Model.load(tmp_path / "model").predict_proba(fold.target), expected)
    del m2lgdg.METHODS["spread"], sys.modules["lab_features"], text._GIVEN["lab_features:spread"]  # as in another process
    with pytest.raises(m2lgdg.InputError, match="lab_features:spread is neither of scikit-learn nor of a loaded plugin"):
        Model.load(tmp_path / "model").predict_proba(fold.target)
    assert "lab_features" not in sys.modules
    m2lgdg.METHODS.load_plugins((str(tmp_path / "lab_features.py"),))
    np.testing.assert_array_equal(Model.load(tmp_path / "model").predict_proba(fold.target), expected)


def test_without_skops_a_study_runs_and_saving_is_refused(fold, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "skops.io", None)
    fitted = m2lgdg.from_sklearn(SVC()).fit(fold.source)
    assert np.isfinite(fitted.predict_proba(fold.target)).all()
    with pytest.raises(m2lgdg.InputError, match=r"needs skops(\.io)?; install it with: pip install"):
        fitted.save(tmp_path / "model")


def test_bytes_do_not_depend_on_addresses(fold):
    x, y = fc_features(fold.source.series), fold.source.labels
    made = [packed(make_model().fit(x, y)) for _ in range(2)]
    np.testing.assert_array_equal(*made)
    with zipfile.ZipFile(io.BytesIO(made[0].tobytes())) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert json.loads(archive.read("schema.json"))["__id__"] < 1000


PLUGIN = """
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
import m2lgdg

def spread(subject):
    return subject.series[0].std(axis=0)

def make_model():
    return make_pipeline(StandardScaler(), SVC())

m2lgdg.from_sklearn(make_model(), features=spread, name="by-plugin")
"""
STUDY = """
cohort = "tiny.cohort"
seeds = [0, 1]
targets = ["east", "west"]
methods = ["fc-logistic", "my-svm", "by-path", "by-plugin"]
plugins = ["lab.py"]
[method.my-svm]
estimator = "sklearn.svm.SVC"
features = "tangent"
parameters = { C = 0.5, kernel = "linear" }
[method.by-path]
estimator = "lab:make_model"
features = "lab:spread"
"""


@pytest.fixture
def study(cohort, tmp_path):
    cohort.save(tmp_path / "tiny.cohort")
    (tmp_path / "lab.py").write_text(PLUGIN)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path / "study.toml"


def test_study_file(study, cohort, tmp_path, typed):
    summary = m2lgdg.run_study(study, tmp_path / "out", jobs=2)
    assert summary.failed == [] and summary.done == 8  # one seed: nothing is drawn
    predictions = read_predictions(tmp_path / "out").set_index(["method", "target", "subject"])["proba"]
    (fold,) = leave_one_site_out(cohort, ["east"])
    expected = m2lgdg.from_sklearn(SVC(C=0.5, kernel="linear"), "tangent", name="here").fit(fold.source)
    np.testing.assert_allclose(
        predictions["my-svm"]["east"][fold.target.subjects.tolist()], expected.predict_proba(fold.target)[:, 1], rtol=1e-6
    )
    np.testing.assert_array_equal(predictions["by-path"].to_numpy(), predictions["by-plugin"].to_numpy())
    assert m2lgdg.run_study(tmp_path / "out" / "study.json", tmp_path / "out").reused == 8
    code, out, _ = typed("table", tmp_path / "out")
    assert code == 0 and "my-svm" in out and "by-plugin" in out


@pytest.mark.long
def test_audit(study):
    (study.parent / "leaky.py").write_text(
        "import numpy as np\nfrom sklearn.linear_model import LogisticRegression\nimport m2lgdg\n\n"
        "class Batch(LogisticRegression):\n    def predict_proba(self, X):\n"
        "        return super().predict_proba(X - X.mean(axis=0))\n\n"
        "m2lgdg.from_sklearn(Batch(), name='batch')\n"
    )
    changed = study.read_text().replace('["lab.py"]', '["lab.py", "leaky.py"]').replace('"by-plugin"]', '"by-plugin", "batch"]')
    study.write_text(changed)
    results = {one.method: one for one in audit(study, methods=["by-plugin", "batch"])}
    assert results["by-plugin"].passed
    assert any("one subject at a time" in text for text in results["batch"].differs)


def test_commands(study, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit = ("fit", "tiny.cohort", "--out", "model", "--method", "my-svm", "--no-new-site-calibration")
    code, out, err = typed(*fit, "--set", "estimator=sklearn.svm:SVC", "--set", "features=tangent", "--device", "cpu")
    assert (code, err) == (0, "") and "my-svm trained on 52 subjects" in out
    del m2lgdg.METHODS["my-svm"]
    code, out, err = typed("predict", "model", "tiny.cohort", "--out", "p.csv")
    assert (code, err) == (0, "") and len(Path("p.csv").read_text().splitlines()) == 53
    assert typed("card", "model")[0] == 0
    assert 'estimator = "sklearn.svm:SVC", features = "tangent"' in Path("model/card.md").read_text()
    code, _, err = typed("explain", "model", "tiny.cohort", "--out", "why")
    assert code == 2 and "cannot be explained: it is neither a network nor a linear method" in err
    code, _, err = typed("export", "model", "--share", "--out", "shared")
    assert code == 2 and "keeps features of its source subjects (estimator) and cannot be shared" in err
    code, _, err = typed("export", "model", "--out", "model.onnx")
    assert code == 2 and "cannot be exported: it is neither a network nor a linear method" in err


def test_a_changed_file_is_another_cell(cohort, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_code.py").write_text("from sklearn.svm import SVC\n\ndef model():\n    return SVC()\n")
    first = m2lgdg.from_sklearn("lab_code:model", name="first")
    (tmp_path / "lab_code.py").write_text("from sklearn.svm import SVC\n\ndef model():\n    return SVC(C=2)\n")
    second = m2lgdg.from_sklearn("lab_code:model", name="second")
    assert first.code and second.code and first.code != second.code
    with pytest.raises(m2lgdg.InputError, match="the code of its estimator or features has changed"):
        first.fit(cohort)


def test_methods_in_memory(cohort, tmp_path, monkeypatch):
    """A function of this process is hashed by its source, and runs in studies of this process."""
    m2lgdg.from_sklearn(make_model(), lambda subject: subject.series[0].std(axis=0), name="by-lambda")
    cohort.save(tmp_path / "tiny.cohort")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["by-lambda"], "targets": ["east"]}
    assert m2lgdg.run_study(study, tmp_path / "out").done == 1
    monkeypatch.setattr(text, "_GIVEN", {})  # as in another process
    with pytest.raises(m2lgdg.InputError, match="is defined in another process; put it into a module or a plugin file"):
        m2lgdg.make("by-lambda").fit(cohort)


def test_bad_input_is_one_sentence(fold, tmp_path):
    for estimator, message in (
        (LinearRegression(), "LinearRegression has neither predict_proba nor decision_function, so it gives no score"),
        (make_pipeline(StandardScaler(), LinearRegression()), "LinearRegression has neither predict_proba"),
        (SVC, "is not a scikit-learn estimator; pass an instance, such as SVC()"),
        (3, "3 is not a scikit-learn estimator"),
        ("sklearn.svm:SVCC", "module sklearn.svm has no SVCC"),
        ("not_there:make", "cannot import not_there (ModuleNotFoundError: No module named 'not_there'); install the package"),
        ("svc", "svc is not an import path; write module:name"),
        ("json:dumps", ""),
    ):
        with pytest.raises((m2lgdg.InputError, TypeError)) as error:
            m2lgdg.from_sklearn(estimator)
        assert message in str(error.value)
    with pytest.raises(m2lgdg.InputError, match="features: tangents is not known; did you mean tangent"):
        m2lgdg.from_sklearn(SVC(), "tangents", name="x")
    with pytest.raises(m2lgdg.InputError, match="there is another method fc-svm; give this one another name"):
        m2lgdg.from_sklearn(SVC(), name="fc-svm")
    with pytest.raises(m2lgdg.InputError, match="cannot be the name of a method"):
        m2lgdg.from_sklearn(SVC(), name="../x")
    ragged = m2lgdg.from_sklearn(SVC(), lambda subject: np.ones(len(subject.series[0])), name="ragged")
    with pytest.raises(m2lgdg.InputError, match="return one vector of the same length for every subject"):
        ragged.fit(fold.source)
    with pytest.raises(m2lgdg.InputError, match="has no phenotypes as inputs"):
        m2lgdg.from_sklearn(SVC(), "phenotypes", name="p").fit(fold.source.with_inputs([]))
    base = {"cohort": str(tmp_path), "methods": ["x"]}
    for section, message in (
        ({"features": "fc"}, "method x is not known"),
        ({"estimator": "sklearn.svm:SVCC"}, r"study, \[method.x\]: module sklearn.svm has no SVCC"),
        ({"estimator": "sklearn.svm:SVC", "parameters": {"D": 1}}, "field parameters: Invalid parameter 'D'"),
        ({"estimator": "sklearn.svm:SVC", "feature": "fc"}, "method x has no field feature; did you mean features"),
        ({"estimator": 3}, "field estimator: 3 is not of type str"),
    ):
        with pytest.raises(m2lgdg.InputError, match=message):
            m2lgdg.run_study(base | {"method": {"x": section}}, tmp_path / "out")


def test_connectomes_have_fc_and_tangent_features_and_neither_series_nor_amplitude():
    cohort = m2lgdg.make_cohort("tiny", seed=1)
    matrices = cohort.to_connectomes()
    (fold,) = m2lgdg.leave_one_site_out(cohort, ["west"])
    (other,) = m2lgdg.leave_one_site_out(matrices, ["west"])
    method = m2lgdg.from_sklearn(LogisticRegression(C=1e-3), "fc", name="on-connectomes")
    expected = method.fit(fold.source).predict_proba(fold.target)
    np.testing.assert_array_equal(method.fit(other.source).predict_proba(other.target), expected)
    tangent = m2lgdg.from_sklearn(LogisticRegression(C=1e-3), "tangent", name="on-connectomes").fit(other.source)
    assert np.ptp(tangent.predict_proba(other.target)[:, 1]) > 0
    for features in ("series", "amplitude"):
        method = m2lgdg.from_sklearn(LogisticRegression(), features, name="on-connectomes")
        with pytest.raises(m2lgdg.InputError, match=f"^method on-connectomes with features {features} needs time series, and "):
            method.fit(other.source)
