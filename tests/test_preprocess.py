"""The paper's rules for missing phenotypes and their scaling, and work on threads that gives the bits of one thread."""

import math
import threading

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m2lgdg.preprocess
from m2lgdg import Cohort, make_cohort
from m2lgdg.connectivity import correlations
from m2lgdg.preprocess import PhenotypeScaler, on_threads, standardised_series

NAN = math.nan
SERIES = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
COLUMNS = ("sex", "age", "education")


def cohort_of(sites, labels=None, prefix="p", **columns):
    names = [f"{prefix}{i}" for i in range(len(sites))]
    return Cohort(
        series=[SERIES] * len(sites),
        subjects=names,
        sites=list(sites),
        labels=[i % 2 for i in range(len(sites))] if labels is None else labels,
        rois=("r1", "r2"),
        phenotypes=pd.DataFrame({key: np.array(value, dtype=float) for key, value in columns.items()}),
        inputs=tuple(columns),
    )


@pytest.fixture
def source():
    """Site a knows most, b knows one age, c no age at all."""
    return cohort_of(
        "aaaabbbcc",
        sex=[1, 2, 2, NAN, 2, 2, 1, NAN, 2],
        age=[20, 30, 70, NAN, 55, NAN, NAN, NAN, NAN],
        education=[0, 12, NAN, 9, 0, NAN, 16, 10, 11],
    )


@pytest.fixture
def target():
    return cohort_of("ttt", prefix="t", sex=[NAN, 1, 2], age=[NAN, 44, 0.5], education=[0, NAN, 20])


def unscaled(scaler, cohort):
    return scaler.transform(cohort) * scaler.scale + scaler.mean


def test_sex_is_imputed_by_the_mode_of_all_source_subjects(source, target):
    scaler = PhenotypeScaler.fit(source)
    np.testing.assert_allclose(unscaled(scaler, source)[:, 0], [1, 2, 2, 2, 2, 2, 1, 2, 2])
    np.testing.assert_allclose(unscaled(scaler, target)[:, 0], [2, 1, 2])


def test_sex_is_imputed_by_the_overall_mode_even_where_the_own_site_says_otherwise():
    source = cohort_of("aaabbbbb", sex=[1, 1, NAN, 2, 2, 2, 2, 2])
    assert unscaled(PhenotypeScaler.fit(source), source)[2, 0] == pytest.approx(2)


def test_the_mode_is_neither_median_nor_mean():
    source = cohort_of("aaaaaa", sex=[1, 1, 1, 2, 2, NAN])
    assert unscaled(PhenotypeScaler.fit(source), source)[5, 0] == pytest.approx(1)


def test_age_is_imputed_by_the_own_sites_median_else_by_the_overall_median(source):
    """Site a: median of 20, 30, 70; b: its one age; c has none: median of 20, 30, 55, 70 whatever their sites."""
    ages = unscaled(PhenotypeScaler.fit(source), source)[:, 1]
    np.testing.assert_allclose(ages, [20, 30, 70, 30, 55, 55, 55, 42.5, 42.5])


def test_target_subjects_get_only_the_overall_median(source, target):
    scaler = PhenotypeScaler.fit(source)
    np.testing.assert_allclose(unscaled(scaler, target)[:, 1], [42.5, 44, 0.5])
    np.testing.assert_allclose(unscaled(scaler, target)[:, 2], [0, 10, 20])
    np.testing.assert_array_equal(scaler.transform(target.unlabelled()), scaler.transform(target))


def test_a_masked_source_subject_gets_the_overall_median_too(source):
    ages = unscaled(PhenotypeScaler.fit(source), source.unlabelled())[:, 1]
    np.testing.assert_allclose(ages, [20, 30, 70, 42.5, 55, 42.5, 42.5, 42.5, 42.5])


def test_target_subjects_do_not_use_each_other(source, target):
    scaler = PhenotypeScaler.fit(source)
    together = scaler.transform(target)
    for i in range(len(target)):
        np.testing.assert_array_equal(scaler.transform(target.select([i]))[0], together[i])


def test_zero_years_of_education_are_valid(source):
    scaler = PhenotypeScaler.fit(source)
    years = unscaled(scaler, source)[:, 2]
    np.testing.assert_allclose(years, [0, 12, 9, 9, 0, 8, 16, 10, 11], atol=1e-12)  # a: of 0, 9, 12; b: of 0, 16


def test_held_out_source_subjects_get_their_sites_median_from_the_training_subjects(source):
    """Validation subjects belong to source sites, but what is filled in was learned without them."""
    training, validation = source.select([0, 1, 3, 4, 5, 7, 8]), source.select([2, 6])
    scaler = PhenotypeScaler.fit(training)
    assert unscaled(scaler, validation)[0, 2] == pytest.approx(9)  # site a without its third subject: 0, 9, 12
    assert unscaled(scaler, validation)[1, 1] == pytest.approx(55)
    assert unscaled(scaler, validation)[0, 1] == pytest.approx(70)


def test_scores_have_the_mean_and_sd_of_the_imputed_source(source, target):
    scaler = PhenotypeScaler.fit(source)
    scores = scaler.transform(source)
    np.testing.assert_allclose(scores.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(scores.std(axis=0), 1)
    ages = [20, 30, 70, 30, 55, 55, 55, 42.5, 42.5]
    mean = sum(ages) / 9
    sd = math.sqrt(sum((age - mean) ** 2 for age in ages) / 9)
    np.testing.assert_allclose(scaler.transform(target)[:, 1], [(age - mean) / sd for age in (42.5, 44, 0.5)])
    assert scores.shape == (9, 3) and scores.dtype == np.float64


def test_labels_do_not_matter(source, target):
    plain = PhenotypeScaler.fit(source)
    swapped = cohort_of(source.sites, labels=1 - source.labels, **{c: source.phenotypes[c] for c in COLUMNS})
    other = PhenotypeScaler.fit(swapped)
    np.testing.assert_array_equal(plain.transform(source), other.transform(swapped))
    np.testing.assert_array_equal(plain.transform(target), other.transform(target))


def test_what_was_fitted_and_the_cohorts_stay_as_they_were(source, target):
    scaler = PhenotypeScaler.fit(source)
    before = {name: value.copy() for name, value in scaler.state("x").items()}
    tables = source.phenotypes.copy(), target.phenotypes.copy()
    first = scaler.transform(source)
    wild = cohort_of("ab?", prefix="w", sex=[7, NAN, NAN], age=[-1e6, 1e6, NAN], education=[NAN, 1e9, NAN])
    scaler.transform(wild)
    scaler.transform(target)
    for name, value in scaler.state("x").items():
        np.testing.assert_array_equal(value, before[name])
    np.testing.assert_array_equal(scaler.transform(source), first)
    pd.testing.assert_frame_equal(source.phenotypes, tables[0])
    pd.testing.assert_frame_equal(target.phenotypes, tables[1])


def test_a_column_without_any_valid_value_says_nothing_about_anyone():
    source = cohort_of("aabb", age=[20, 30, NAN, 40], fiq=[NAN] * 4)
    scaler = PhenotypeScaler.fit(source)
    np.testing.assert_array_equal(scaler.transform(source)[:, 1], 0)
    target = cohort_of("tt", prefix="t", age=[50, NAN], fiq=[NAN, 130])
    np.testing.assert_array_equal(scaler.transform(target)[:, 1], 0)  # 130 of what spread? nobody knows
    assert np.isfinite(scaler.transform(target)).all()


@pytest.mark.parametrize("value", [12.0, 0.1, 22.4, 1e-9, 123456.7])
def test_a_column_that_does_not_vary_in_source_says_nothing_about_anyone(value):
    """Also where the mean of equal numbers is off by a rounding error, which must not become the unit of the scores."""
    source = cohort_of("aaabbbb", age=[20, 30, NAN, 40, 20, 21, 22], education=[value, value, NAN, value, value, value, value])
    scaler = PhenotypeScaler.fit(source)
    np.testing.assert_array_equal(scaler.transform(source)[:, 1], 0)
    target = cohort_of("tt", prefix="t", age=[50, NAN], education=[value + 1, NAN])
    np.testing.assert_array_equal(scaler.transform(target)[:, 1], 0)


def test_no_inputs_give_no_columns():
    source = cohort_of("aab")
    assert PhenotypeScaler.fit(source).transform(source).shape == (3, 0)


def test_columns_are_those_of_the_fit_whatever_else_the_target_has(source):
    scaler = PhenotypeScaler.fit(source)
    plain = cohort_of("tt", prefix="t", sex=[1, 2], age=[44, 50], education=[9, 10])
    turned = cohort_of("tt", prefix="t", iq=[100, 101], education=[9, 10], age=[44, 50], sex=[1, 2])
    np.testing.assert_array_equal(scaler.transform(plain), scaler.transform(turned))
    assert scaler.columns == COLUMNS


def test_saved_numbers_give_the_same_target_scores_bit_for_bit(source, target):
    scaler = PhenotypeScaler.fit(source)
    state = scaler.state("phenotypes")
    assert all(name.startswith("phenotypes") for name in state)
    copied = {name: np.frombuffer(value.tobytes(), dtype=value.dtype).reshape(value.shape) for name, value in state.items()}
    back = PhenotypeScaler.restore(scaler.columns, copied, "phenotypes")
    np.testing.assert_array_equal(back.transform(target), scaler.transform(target))
    np.testing.assert_array_equal(back.transform(source.unlabelled()), scaler.transform(source.unlabelled()))
    assert not any("aaaa" in str(value) or value.dtype.kind not in "fiu" for value in state.values())  # numbers only
    again = back.state("phenotypes")
    assert set(again) == set(state)
    for name, value in again.items():
        np.testing.assert_array_equal(value, state[name])


def loop_median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def loop_scores(source_rows, rows):
    """z-scores of age by the paper's rules; rows are (site, age)."""
    valid = [age for _, age in source_rows if not math.isnan(age)]

    def filled(site, age):
        own = [a for s, a in source_rows if s == site and not math.isnan(a)]
        return age if not math.isnan(age) else loop_median(own or valid)

    known = [filled(*row) for row in source_rows]
    mean = sum(known) / len(known)
    sd = math.sqrt(sum((age - mean) ** 2 for age in known) / len(known))
    return [(filled(*row) - mean) / sd for row in rows], sd


age = st.one_of(st.just(NAN), st.integers(5, 90).map(float), st.sampled_from([18.5, 20.25]))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), age), min_size=2, max_size=25),
    st.lists(age, min_size=1, max_size=5),
)
def test_ages_equal_a_loop_over_subjects(source_rows, target_ages):
    if len({a for _, a in source_rows if not math.isnan(a)}) < 2:
        return
    expected, sd = loop_scores(source_rows, [*source_rows, *(("t", a) for a in target_ages)])
    assert sd > 0
    source = cohort_of([s for s, _ in source_rows], age=[a for _, a in source_rows])
    target = cohort_of(["t"] * len(target_ages), prefix="t", age=target_ages)
    scaler = PhenotypeScaler.fit(source)
    got = [*scaler.transform(source)[:, 0], *scaler.transform(target)[:, 0]]
    np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(m2lgdg.preprocess, "_fewest_threads", lambda pools: request.param)
    return request.param


def test_results_come_in_the_order_given_from_as_many_threads_as_blas_has(threads):
    meeting, names = threading.Barrier(threads), set()

    def work(number):
        meeting.wait(timeout=60)  # nobody goes on before all threads are there
        names.add(threading.get_ident())
        return number**2

    assert list(on_threads(work, range(6))) == [0, 1, 4, 9, 16, 25]
    assert len(names) == threads


def test_an_error_of_a_subject_is_not_lost(threads):
    def work(number):
        if number == 2:
            raise ValueError("the third")
        return number

    with pytest.raises(ValueError, match="the third"):
        list(on_threads(work, range(4)))


def test_features_are_the_same_bits_for_any_number_of_threads(monkeypatch):
    series, found = make_cohort("tiny").series, []
    for count in (1, 3):
        monkeypatch.setattr(m2lgdg.preprocess, "_fewest_threads", lambda pools, count=count: count)
        found.append((standardised_series(series, 40), correlations(series)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
