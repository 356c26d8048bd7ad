"""Slopes of phenotypes by site: values against scipy, false alarms, and what `check` says."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from m2lgdg import Cohort, check_cohort
from m2lgdg.data.phenotype_slopes import _rates_differ, heterogeneity, phenotype_findings, slopes_by_site
from m2lgdg.study.description import describe


def cohort_of(differences, n=24, seed=0, spread=None, patients=None):
    """Age differs by so much between the classes of each site; sex says nothing."""
    rng, rows = np.random.default_rng(seed), []
    for i, difference in enumerate(differences):
        count = n // 2 if patients is None else patients[i]
        labels = (np.arange(n) < count).astype(int)
        sd = 1.0 if spread is None else spread[i]
        rows += [(f"s{i:02d}", label, 30 + i + sd * rng.normal() + difference * label) for label in labels]
    sites, labels, age = (list(column) for column in zip(*rows, strict=True))
    table = pd.DataFrame({"age": age, "sex": rng.integers(1, 3, len(rows)).astype(float)})
    series = [rng.normal(size=(120, 4)).astype(np.float32) for _ in rows]
    return Cohort.from_arrays(series, labels, sites, phenotypes=table, inputs=("sex", "age"), tr=2.0)


def kinds(cohort):
    return [one.kind for one in phenotype_findings(cohort)]


def test_slopes_and_intervals_are_those_of_t_tests():
    cohort = cohort_of([0.5, -1.0, 0.0], n=20)
    by_site = {one.site: one for one in slopes_by_site(cohort, "age")}
    age, groups = cohort.phenotypes["age"].to_numpy(), {}
    for site in cohort.site_names:
        groups[site] = [age[(cohort.sites == site) & (cohort.labels == label)] for label in (1, 0)]
    scale = np.sqrt(np.mean([one.var(ddof=1) for each in groups.values() for one in each]))
    for site, (patients, controls) in groups.items():
        interval = stats.ttest_ind(patients, controls).confidence_interval(0.95)
        expected = (patients.mean() - controls.mean(), interval.low, interval.high)
        np.testing.assert_allclose(by_site[site][1:], np.array(expected) / scale, rtol=1e-10)


def test_false_alarms_are_rare_where_the_difference_is_the_same():
    """Also if sites differ in spread and in their proportion of patients."""
    spread, patients = [1, 5, 2, 0.5, 3, 1, 8, 1], [5, 12, 15, 9, 4, 11, 10, 7]
    p_values = [heterogeneity(cohort_of([0.6] * 8, 18, seed, spread, patients), "age") for seed in range(100)]
    assert np.mean(np.array(p_values) < 0.05) < 0.1 and np.mean(np.array(p_values) < 0.5) < 0.62
    assert sum("direction by site" in kinds(cohort_of([0.0] * 8, 18, seed)) for seed in range(40)) <= 4  # 5 % of 40


def test_a_direction_that_differs_is_found_with_its_sites():
    cohort = cohort_of([1.5, 1.5, -1.5, 0.0])
    (finding,) = [one for one in check_cohort(cohort).findings if one.kind == "direction by site"]
    assert finding.numbers == {"column": "age", "higher": ["s00", "s01"], "lower": ["s02"]} and finding.severity == "finding"
    assert "more of it than controls at s00, s01, and less at s02" in finding.text
    assert "direction by site" not in kinds(cohort_of([1.5, 1.0, 0.2, 0.0]))  # of one sign
    new = [one.kind for one in check_cohort(cohort, new_site=True).findings]
    assert "direction by site" not in new


def test_the_order_of_subjects_does_not_matter():
    cohort = cohort_of([1.5, 0.5, -1.5, 0.0])
    mixed = cohort.select(np.random.default_rng(3).permutation(len(cohort)))
    assert heterogeneity(mixed, "age") == heterogeneity(cohort, "age")
    assert slopes_by_site(mixed, "age") == slopes_by_site(cohort, "age")


@pytest.mark.parametrize("counts", [[[5, 9], [8, 4]], [[10, 10], [10, 11]], [[3, 9], [8, 4], [20, 31]]])
def test_the_rates_of_sites_are_compared_as_by_scipy(counts):
    assert _rates_differ(np.array(counts)) == pytest.approx(stats.chi2_contingency(counts).pvalue, rel=1e-12)


def test_sites_that_inputs_tell_better_than_labels():
    """Only where sites also differ in their proportion of patients, so that the site says something of the label."""
    unequal = cohort_of([0.0] * 4, patients=[4, 6, 18, 20])
    (note,) = [one for one in phenotype_findings(unequal) if one.kind == "inputs tell sites"]
    assert note.severity == "note" and note.numbers["column"] == "age" and note.numbers["between"] > note.numbers["label"]
    assert (note.numbers["least"], note.numbers["most"]) == (pytest.approx(100 / 6), pytest.approx(100 * 20 / 24))
    assert "inputs tell sites" not in kinds(cohort_of([0.0] * 4))


def test_sites_without_values_or_with_one_class_are_left_out():
    cohort = cohort_of([1.0, 1.0, 1.0, 1.0], patients=[12, 12, 12, 24])
    age = cohort.phenotypes["age"].to_numpy().copy()
    age[cohort.sites == "s00"] = np.nan
    age[cohort.sites == "s01"] = 40.0
    some = cohort._changed(phenotypes=cohort.phenotypes.assign(age=age))
    assert [one.site for one in slopes_by_site(some, "age")] == ["s02"] and heterogeneity(some, "age") == 1.0
    empty = cohort._changed(phenotypes=cohort.phenotypes.assign(age=np.nan))
    assert slopes_by_site(empty, "age") == [] and "age" not in describe(empty).get("slopes", {})


def test_a_code_for_missing_at_one_class_of_a_site_is_found():
    """As years of education at one site of REST-meta-MDD, which are 0 for all controls."""
    cohort = cohort_of([-0.8] * 6)
    age = cohort.phenotypes["age"].where(~((cohort.sites == "s03") & (cohort.labels == 0)), 0.0)
    (finding,) = [one for one in phenotype_findings(cohort._changed(phenotypes=cohort.phenotypes.assign(age=age)))]
    assert finding.numbers["column"] == "age" and finding.numbers["higher"] == ["s03"]
