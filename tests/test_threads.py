"""One subject a thread: the same results in the same order for any number of threads, with BLAS kept to one each."""

import threading

import numpy as np
import pytest

import m2lgdg.preprocess
from m2lgdg import make_cohort
from m2lgdg.connectivity import correlations
from m2lgdg.preprocess import on_threads, standardised_series


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
