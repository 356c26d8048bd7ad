"""Estimators that take `sample_domain`, as skada's do: source sites, a target without labels, both tracks and the audit."""

import sys

import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import m2lgdg
from m2lgdg.connectivity import fc_features
from m2lgdg.metrics import platt, sigmoid
from m2lgdg.sklearn_bridge.from_sklearn import STANDS_IN
from m2lgdg.splits import site_folds
from m2lgdg.storage import InputError
from m2lgdg.study.audit import audit
from m2lgdg.study.predictions import read_predictions

pytestmark = pytest.mark.usefixtures("methods_forgotten")


@pytest.fixture(autouse=True)
def nothing_seen():
    routing = sklearn.get_config()["enable_metadata_routing"]
    Sees.fits, Sees.asked = [], []
    yield
    sklearn.set_config(enable_metadata_routing=routing)  # skada turns it on


class Sees(ClassifierMixin, BaseEstimator):
    """skada's signature; remembers what it is given. With `target`, it cannot be fitted on source alone."""

    fits, asked = [], []

    def __init__(self, target=False, C=0.01):
        self.target, self.C = target, C

    def fit(self, X, y, sample_domain=None):
        source = sample_domain > 0
        if self.target and source.all():
            raise ValueError("no subject of a target")
        Sees.fits.append((np.array(X), np.array(y), np.array(sample_domain)))
        self.shift_ = X[~source].mean(axis=0) - X[source].mean(axis=0) if self.target else 0.0
        self.inner_ = LogisticRegression(C=self.C).fit(X[source] + self.shift_, y[source])
        self.classes_ = self.inner_.classes_
        return self

    def predict_proba(self, X, sample_domain=None):
        Sees.asked.append(np.array(sample_domain))
        return self.inner_.predict_proba(X)


class Decides(Sees):
    """The same without probabilities."""

    predict_proba = None

    def fit(self, X, y, sample_domain=None):
        super().fit(X, y, sample_domain)
        self.inner_ = RidgeClassifier(alpha=100.0).fit(X[sample_domain > 0] + self.shift_, y[sample_domain > 0])
        return self

    def decision_function(self, X, sample_domain=None):
        return self.inner_.decision_function(X)


del Decides.predict_proba
Decides.predict_proba = property()  # hidden from hasattr


def make(estimator, name="domains"):
    return m2lgdg.from_sklearn(estimator, "fc", name=name)


def manual(estimator, fold, target):
    """The estimator fitted on source and on the features of subjects without labels."""
    source, sites = fc_features(fold.source.series).astype(float), fold.source.sites
    number = np.unique(sites, return_inverse=True)[1] + 1
    labels = np.concatenate([fold.source.labels, np.full(len(target), -1)])
    domains = np.concatenate([number, np.full(len(target), -len(set(sites)) - 1)])
    return estimator.fit(np.concatenate([source, target]), labels, sample_domain=domains)


def test_source_sites_have_positive_numbers(fold):
    for estimator in (Sees(), make_pipeline(StandardScaler(), Sees())):
        Sees.fits, Sees.asked = [], []
        made = make(estimator)
        assert made.sees_batch
        fitted = made.fit(fold.source)
        names = np.unique(fold.source.sites)
        for _, labels, domains in Sees.fits:
            np.testing.assert_array_equal(names[domains - 1], fold.source.sites)
            np.testing.assert_array_equal(labels, fold.source.labels)
        fitted.predict_proba(fold.target)
        np.testing.assert_array_equal(Sees.asked[-1], np.full(len(fold.target), -len(names) - 1))
        assert "notes" not in fitted.facts_
    assert not make(LogisticRegression()).sees_batch


def test_what_needs_a_target_gets_source_without_labels_in_the_strict_track(fold):
    fitted = make(Sees(target=True)).fit(fold.source)
    values, labels, domains = Sees.fits[-1]
    source, count = fc_features(fold.source.series).astype(float), len(fold.source)
    np.testing.assert_array_equal(values, np.concatenate([source, source]))
    np.testing.assert_array_equal(labels[count:], np.full(count, -1))
    assert (domains[count:] == -4).all() and fitted.facts_["notes"] == [STANDS_IN]
    target = fc_features(fold.target.series).astype(float)
    expected = manual(Sees(target=True), fold, source).predict_proba(target)
    np.testing.assert_array_equal(fitted.predict_proba(fold.target), expected)


def test_the_adapted_track_has_a_batch_without_labels(fold):
    fitted = make(Sees(target=True)).fit(fold.source)
    scored, batch = fold.target.select([0, 1]), fold.target.select(np.arange(2, len(fold.target)))
    found = fitted.method.predict_adapted(scored, batch)
    _, labels, domains = Sees.fits[-1]
    assert (labels[domains < 0] == -1).all() and (domains < 0).sum() == len(batch)
    given = manual(Sees(target=True), fold, fc_features(batch.series).astype(float))
    np.testing.assert_array_equal(found, given.predict_proba(fc_features(scored.series).astype(float))[:, 1])
    other = batch._changed(labels=1 - batch.labels)
    np.testing.assert_array_equal(fitted.method.predict_adapted(scored, other), found)
    assert np.abs(found - fitted.predict_proba(scored)[:, 1]).max() > 1e-6
    del fitted.method.source_
    with pytest.raises(InputError, match="can be fitted with a batch only in the process that fitted it"):
        fitted.method.predict_adapted(scored, batch)


def test_decisions_of_either_track_are_calibrated_on_held_out_sites(fold):
    fitted = make(Decides(target=True)).fit(fold.source)
    source, labels, sites = fc_features(fold.source.series).astype(float), fold.source.labels, fold.source.sites
    held = {"strict": np.empty(len(labels)), "adapted": np.empty(len(labels))}
    for train, test in site_folds(sites, labels, 5):
        for track, unlabelled in (("strict", source[train]), ("adapted", source[test])):
            domains = np.concatenate([np.unique(sites[train], return_inverse=True)[1] + 1, np.full(len(unlabelled), -9)])
            given = np.concatenate([labels[train], np.full(len(unlabelled), -1)])
            one = Decides(target=True).fit(np.concatenate([source[train], unlabelled]), given, sample_domain=domains)
            held[track][test] = one.decision_function(source[test])
    scored, batch = fold.target.select([0, 1]), fold.target.select(np.arange(2, len(fold.target)))
    features = fc_features(scored.series).astype(float)
    for track, unlabelled, found in (
        ("strict", source, fitted.predict_proba(scored)[:, 1]),
        ("adapted", fc_features(batch.series).astype(float), fitted.method.predict_adapted(scored, batch)),
    ):
        slope, offset = platt(held[track], labels, sites)
        decision = manual(Decides(target=True), fold, unlabelled).decision_function(features)
        np.testing.assert_allclose(found, sigmoid(slope * decision + offset), atol=1e-9)


def test_a_search_chooses_on_held_out_source_sites_beside_a_target(fold):
    fitted = make(GridSearchCV(Sees(target=True), {"C": [1e-4, 0.1]}, scoring="roc_auc")).fit(fold.source)
    assert fitted.method.estimator_.C in (1e-4, 0.1)
    sizes = {int((domains > 0).sum()) for _, _, domains in Sees.fits}
    counts = [int((fold.source.sites != site).sum()) for site in fold.source.site_names]
    assert sizes == {*counts, len(fold.source)}


def test_what_fails_in_any_case_fails_with_its_own_reason(fold):
    with pytest.raises(ValueError, match="broken"):
        make("test_domains:Broken").fit(fold.source)


class Broken(Sees):
    def fit(self, X, y, sample_domain=None):
        raise ValueError("broken")


PLUGIN = """
import skada
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
import m2lgdg

def coral():
    return skada.make_da_pipeline(StandardScaler(), skada.CORALAdapter(reg=0.1), LogisticRegression(C=0.01))

def subspace():
    return skada.SubspaceAlignment(LogisticRegression(), n_components=5)

def reweighted():
    return skada.DiscriminatorReweight(LogisticRegression().set_fit_request(sample_weight=True))

def jdot():
    return skada.JDOTClassifier(LogisticRegression())
"""
NAMES = ("coral", "subspace", "reweighted", "jdot")


@pytest.fixture
def study(cohort, tmp_path):
    cohort.save(tmp_path / "tiny.cohort")
    (tmp_path / "lab.py").write_text(PLUGIN)
    sections = [f'[method.skada-{name}]\nestimator = "lab:{name}"\n' for name in NAMES]
    lines = [
        'cohort = "tiny.cohort"',
        'targets = ["east"]',
        'plugins = ["lab.py"]',
        'track = ["strict", "adapted"]',
    ]
    lines += ["seeds = [0]", "adapt_subjects = 6", f"methods = {[f'skada-{name}' for name in NAMES]}", *sections]
    (tmp_path / "study.toml").write_text("\n".join(lines))
    return tmp_path / "study.toml"


@pytest.mark.filterwarnings("ignore")  # of skada and POT
def test_methods_of_skada(study, fold):
    summary = m2lgdg.run_study(study, study.parent / "out")
    assert summary.failed == []
    table = read_predictions(study.parent / "out")
    by_subject = table.set_index(["method", "variant", "subject"])["proba"]
    sys.path.insert(0, str(study.parent))
    try:
        import lab
    finally:
        sys.path.remove(str(study.parent))
        sys.modules.pop("lab", None)
    source, target = (fc_features(one.series).astype(float) for one in (fold.source, fold.target))
    for name in NAMES:
        strict = by_subject[f"skada-{name}", ""][fold.target.subjects.tolist()].to_numpy()
        fitted = getattr(lab, name)()
        manual(fitted, fold, source)
        np.testing.assert_allclose(strict, fitted.predict_proba(target)[:, 1], atol=1e-6)
        adapted = by_subject[f"skada-{name}", "adapted"][fold.target.subjects.tolist()].to_numpy()
        assert np.abs(adapted - strict).max() > 1e-4, name


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_audit_of_skada(study):
    results = {one.method: one for one in audit(study, methods=["skada-coral", "skada-reweighted"])}
    assert all(one.passed for one in results.values()), {name: one.differs for name, one in results.items()}
