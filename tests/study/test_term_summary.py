"""Which terms of a loss acted: the numbers that a record keeps, and those of several trainings together."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2lgdg import make_cohort, run_study
from m2lgdg.study.term_summary import is_constant, pooled, summarised

SMALL = {"variant": "small", "epochs": 3, "warmup": 1, "length": 20}


def test_epochs_mean_and_range_of_each_term():
    history = [{"ce": 0.8, "pull": 0.0, "val_auc": 0.5}, {"ce": 0.4, "pull": -0.2, "val_auc": 0.6}, {"ce": 0.3, "late": 1e-7}]
    assert summarised(history) == {
        "ce": {"epochs": 3, "acted": 3, "mean": 0.5, "smallest": 0.3, "largest": 0.8},
        "pull": {"epochs": 2, "acted": 1, "mean": -0.1, "smallest": -0.2, "largest": 0.0},
        "late": {"epochs": 1, "acted": 0, "mean": 1e-7, "smallest": 1e-7, "largest": 1e-7},
    }
    assert summarised([]) == {}
    assert summarised(["first", {"ce": "low", "rate": 2}]) == {
        "rate": {"epochs": 1, "acted": 1, "mean": 2.0, "smallest": 2.0, "largest": 2.0}
    }


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_numbers_have_six_digits_whatever_the_order(values):
    (term,) = summarised([{"pull": value} for value in values]).values()
    assert term["mean"] == pytest.approx(np.mean(values), rel=1e-5, abs=1e-9)
    assert (term["smallest"], term["largest"]) == pytest.approx((min(values), max(values)), rel=1e-5)
    (turned,) = summarised([{"pull": value} for value in reversed(values)]).values()
    assert {**turned, "mean": None} == {**term, "mean": None}


@pytest.mark.parametrize(
    ("values", "constant"),
    [
        ([0.1, 0.1019], True),
        ([0.1, 0.103], False),
        ([-0.1, -0.1019], True),
        ([-0.1, 0.1], False),
        ([0.1], False),
        ([0, 0], True),
    ],
)
def test_a_term_that_is_the_same_in_every_epoch(values, constant):
    assert is_constant(summarised([{"pull": value} for value in values])["pull"]) is constant


def test_trainings_are_pooled_from_summaries_or_from_whole_histories():
    one, two = [{"ce": 0.8, "pull": 0.0}, {"ce": 0.4, "pull": 0.1}], [{"ce": 0.3, "pull": 0.2}, {"ce": 0.1, "pull": 0.2}]
    expected = {
        "ce": {"epochs": 4, "acted": 4, "mean": pytest.approx(0.4), "trainings": 2, "constant": 0},
        "pull": {"epochs": 4, "acted": 3, "mean": pytest.approx(0.125), "trainings": 2, "constant": 1},
    }
    assert pooled([{"history": one}, {"history": two}]) == expected
    assert pooled([{"terms": summarised(one)}, {"history": two}, {}, {"history": None}]) == expected
    assert pooled([{"penalties": [1.0]}]) == {}


def test_the_record_of_a_network_has_them_and_that_of_a_linear_method_has_not(tmp_path):
    cohort = make_cohort("tiny", sizes={"east": 10, "west": 14, "south": 14})
    study = {"cohort": cohort, "methods": ["braingnn", "fc-logistic"], "seeds": [0], "targets": ["east"]}
    run_study(study | {"method": {"braingnn": {name: value for name, value in SMALL.items() if name != "length"}}}, tmp_path)
    stored = {one["method"]: one["learned"] for one in (json.loads(p.read_text()) for p in (tmp_path / "cells").glob("*.json"))}
    assert "terms" not in stored["fc-logistic"]
    history, terms = stored["braingnn"]["history"], stored["braingnn"]["terms"]
    assert list(terms) == ["ce", "unit", "topk", "consistency"] and terms["unit"]["acted"] == 0
    for name, term in terms.items():
        values = [epoch[name] for epoch in history]
        assert term["epochs"] == len(values) and term["mean"] == pytest.approx(np.mean(values), rel=1e-5, abs=1e-12)
