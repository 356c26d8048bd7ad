"""The fit from sums over sites is the pooled fit."""

from dataclasses import replace

import numpy as np
import pytest
from hospitals import assert_pooled, by_site, study_of

import m2lgdg
from m2lgdg.connectivity import standardised
from m2lgdg.federated import sums
from m2lgdg.federated.coordinator import _order_statistics
from m2lgdg.federated.plan import CUTS
from m2lgdg.federated.simulation import simulate


def test_the_fit_from_sums_is_the_pooled_fit(cohort):
    fitted = simulate(study_of(cohort), by_site(cohort))
    assert_pooled(fitted, cohort)
    assert fitted.facts_["federated"]["rounds"] <= 60


def test_the_same_without_phenotypes_and_with_other_fields(cohort):
    plain = cohort.with_inputs(())
    fitted = simulate(study_of(plain, fields={"site_folds": 2, "penalties": [1.0]}), by_site(plain))
    assert_pooled(fitted, plain, site_folds=2, penalties=(1.0,))


def test_a_site_with_one_class(cohort):
    some = cohort.select((cohort.sites != "east") | (cohort.labels == 1))
    assert_pooled(simulate(study_of(some, least_subjects=2), by_site(some)), some)


def test_amplitudes_of_standardised_scans_are_not_used(cohort):
    flat = replace(cohort, series=[standardised(one).astype(np.float32) for one in cohort.series])
    fitted = simulate(study_of(flat), by_site(flat))
    assert not fitted.state_["amplitude.weights"].any()
    assert_pooled(fitted, flat)


def test_some_real_sites(abide_folder):
    cohort = m2lgdg.read(abide_folder, atlas="aal")
    largest = sorted(cohort.site_names, key=lambda site: -(cohort.sites == site).sum())[:6]
    cohort = cohort.select(sites=largest)
    assert_pooled(simulate(study_of(cohort, least_subjects=2), by_site(cohort)), cohort)


def test_order_statistics_are_exact():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=50) * 10.0 ** rng.integers(-300, 300, 50), [0.0, -0.0, 3.0, 3.0]])
    keys = np.sort(sums.ordered(values))
    assert (sums.ordered(np.sort(values)) == keys).all()
    search = _order_statistics("age", lambda n: (n // 3, n // 3 + 1))
    (ask,), rounds = next(search), 0
    with pytest.raises(StopIteration) as ended:
        while True:
            rounds += 1
            cuts = ask.arguments["cuts"].view(np.uint64).ravel()
            assert len(cuts) == 2 * CUTS
            (ask,) = search.send([np.append(np.searchsorted(keys, cuts), len(keys)).astype(float)])
    assert ended.value.value == (*np.sort(values)[[18, 19]], len(values)) and rounds == 13
