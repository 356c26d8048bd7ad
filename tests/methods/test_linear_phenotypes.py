"""Phenotypes in linear methods: what must not matter (the order of subjects and of phenotypes) and what may be missing."""

import numpy as np
import pandas as pd
import pytest

from m2lgdg import METHODS, make, make_cohort
from m2lgdg.methods.linear import Linear

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
