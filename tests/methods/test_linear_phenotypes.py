"""Phenotypes in linear methods: what must not matter (the order of subjects and of phenotypes) and what may be missing."""

import numpy as np
import pandas as pd
import pytest

from m2lgdg import METHODS, Model, make, make_cohort
from m2lgdg.deploy import onnx
from m2lgdg.deploy.adapt import adapt
from m2lgdg.deploy.calibrate import calibrate
from m2lgdg.explain.attribution import explain, explain_subject
from m2lgdg.methods.linear import DO_NOT_HOLD, Linear
from m2lgdg.report.card import write_card
from m2lgdg.scans import Connectomes

NAMES = sorted(name for name, cls in METHODS.items() if issubclass(cls, Linear))
TAKING = [name for name in NAMES if "phenotypes" not in METHODS[name].unused]


def variant(name):
    return {} if name == "phenotype-logistic" or name not in TAKING else {"phenotypes": True}


def cohort_of(seed, **columns):
    """A small cohort with a phenotype that holds, beside those given."""
    cohort = make_cohort("tiny", seed=seed)
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"age": rng.normal(size=len(cohort)) + 1.5 * cohort.labels} | columns, index=cohort.subjects)
    return cohort._changed(phenotypes=table, inputs=tuple(table))


@pytest.fixture(scope="module")
def cohort():
    rng, size = np.random.default_rng(5), len(make_cohort("tiny", seed=5))
    cohort = cohort_of(5, sex=rng.integers(0, 2, size).astype(float), iq=rng.normal(100, 15, size))
    return cohort.to_connectomes()


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_subjects_does_not_matter(name, cohort):
    expected = make(name, **variant(name)).fit(cohort).predict_proba(cohort)
    for seed in range(2):
        shuffled = cohort.select(np.random.default_rng(seed).permutation(len(cohort)))
        found = make(name, **variant(name)).fit(shuffled).predict_proba(cohort)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_nor_does_it_between_penalties_of_nearly_the_same_auc():
    """Two held-out decisions differ by 1e-7 here, so that rounding chose between penalties 30 and 100."""
    cohort = make_cohort("tiny", seed=2).to_connectomes()
    shuffled = cohort.select(np.random.default_rng(201).permutation(len(cohort)))
    fits = [make("tangent-logistic").fit(one) for one in (cohort, shuffled)]
    assert fits[0].facts_["penalties"] == fits[1].facts_["penalties"]
    np.testing.assert_allclose(fits[1].predict_proba(cohort), fits[0].predict_proba(cohort), atol=1e-12)


@pytest.mark.parametrize("name", TAKING)
def test_the_order_of_phenotypes_does_not_matter(name, cohort):
    other = cohort._changed(phenotypes=cohort.phenotypes[["iq", "age", "sex"]], inputs=("iq", "age", "sex"))
    first, second = (make(name, **variant(name)).fit(one) for one in (cohort, other))
    assert second.facts_["inputs"] == ["iq", "age", "sex"]
    expected = first.predict_proba(cohort)
    for fitted, target in ((first, other), (second, other), (second, cohort)):
        np.testing.assert_allclose(fitted.predict_proba(target), expected, atol=1e-9)


def same_scans(cohort):
    """All subjects have the connectome of the first."""
    one = cohort.connectomes[0]
    return cohort._changed(series=Connectomes.of([one] * len(cohort), "fisher-z", len(one)))


@pytest.mark.parametrize("name", [name for name in TAKING if name != "phenotype-logistic"])
def test_scans_that_do_not_differ_say_nothing(name, cohort):
    """Neither their rounding nor the intercepts of folds are taken for decisions, also of scans that do differ."""
    source = same_scans(cohort)
    prevalence = make(name).fit(source).predict_proba(cohort)[:, 1]
    np.testing.assert_allclose(prevalence, cohort.labels.mean(), atol=2e-3)
    by_phenotypes = make(name, phenotypes=True).fit(source)
    decisions = [by_phenotypes.predict_proba(one)[:, 1] for one in (source, cohort)]
    np.testing.assert_array_equal(decisions[0], decisions[1])
    alone = make("phenotype-logistic").fit(source).predict_proba(source)[:, 1]
    assert np.corrcoef(decisions[0], alone)[0, 1] > 0.95


@pytest.mark.parametrize("name", ["combat-logistic", "connectome-ensemble", "fc-svm", "tangent-logistic"])
def test_flat_scans(name):
    cohort = cohort_of(5)
    flat = cohort._changed(series=[np.full_like(one, 3.0) for one in cohort.series])
    np.testing.assert_allclose(make(name).fit(flat).predict_proba(cohort)[:, 1], cohort.labels.mean(), atol=2e-3)


def test_a_phenotype_that_nobody_has_changes_nothing(cohort):
    none = cohort._changed(phenotypes=cohort.phenotypes.assign(age=np.nan), inputs=("age",))
    for name in ("connectome-adaptive", "fc-svm"):
        expected = make(name).fit(none).predict_proba(none)
        np.testing.assert_allclose(make(name, phenotypes=True).fit(none).predict_proba(none), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["connectome-adaptive", "fc-svm", "phenotype-logistic"])
def test_a_phenotype_that_a_whole_site_lacks(name, cohort):
    """Of a source site: it is learned from the others. Of a target: all have the usual value of source."""
    lacking = cohort.sites == cohort.site_names[0]
    source = cohort._changed(phenotypes=cohort.phenotypes.mask(np.tile(lacking[:, None], 3)))
    fitted = make(name, **variant(name)).fit(source)
    assert fitted.facts_["phenotypes"]["parts"]["age"] > 0.5
    target = source.select(lacking)
    usual = {column: source.phenotypes[column].median() for column in ("age", "iq")}
    usual["sex"] = source.phenotypes["sex"].mode()[0]
    filled = target._changed(phenotypes=target.phenotypes.assign(**usual))
    np.testing.assert_allclose(fitted.predict_proba(target), fitted.predict_proba(filled), atol=1e-12)


@pytest.fixture(scope="module")
def not_holding():
    """A target, a model whose phenotypes do not hold, and one without phenotypes."""
    rng, plain = np.random.default_rng(3), make_cohort("tiny", seed=1)
    table = pd.DataFrame({"age": rng.normal(40, 5, len(plain)), "sex": rng.integers(0, 2, len(plain)) * 1.0}, plain.subjects)
    cohort = plain._changed(phenotypes=table, inputs=("age", "sex")).to_connectomes()
    target = cohort.select(sites=["south"])
    source = cohort.select(cohort.sites != "south")
    fitted, without = (make("connectome-adaptive", name).fit(source) for name in ("phenotypes", None))
    return target, fitted, without


def test_a_model_whose_phenotypes_do_not_hold_is_one_without_them(not_holding, tmp_path):
    """In every use of it: explained, described, adapted and calibrated."""
    target, fitted, without = not_holding
    assert DO_NOT_HOLD in fitted.facts_["notes"]
    folder, other = fitted.save(tmp_path / "model"), without.save(tmp_path / "without")

    def each(use):
        return use(Model.load(folder)), use(Model.load(other))

    assert DO_NOT_HOLD in (write_card(folder) / "card.md").read_text()
    explained = explain(fitted, target)
    assert not explained.phenotypes["score"].any()
    np.testing.assert_array_equal(explained.edges["score"], explain(without, target).edges["score"])
    assert not explain_subject(fitted, target.select([0])).phenotypes["score"].any()
    np.testing.assert_array_equal(fitted.predict_proba(target), without.predict_proba(target))
    first, second = each(lambda one: calibrate(one, target))
    assert first == second
    first, second = each(lambda one: adapt(one, target).level)
    assert first == second


@pytest.mark.onnx
def test_so_it_is_where_it_is_exported(not_holding, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    target, fitted, without = not_holding
    graph = onnx.export_onnx(fitted, tmp_path / "model.onnx", takes_prepared=True)
    found = onnx.run_onnx(graph, onnx.prepared(fitted, target))
    np.testing.assert_allclose(found, without.predict_proba(target)[:, 1], atol=1e-5)
