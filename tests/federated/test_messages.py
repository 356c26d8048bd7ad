"""Messages that are read, and messages that are refused: nothing outside of the protocol is answered or added."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hospitals import answer_all, by_site, changed, study_of

from m2lgdg.federated import exchange, messages
from m2lgdg.federated.plan import MOST_ROUNDS, Ask, Plan, Settings
from m2lgdg.federated.site import prepared
from m2lgdg.storage import InputError

SITES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("sites", "settings", "message"),
    [
        (SITES, {"leave_out": "d"}, "is not one of the sites; add --site d"),
        (SITES, {"leave_out": "a"}, "2 sites train in the study; it needs at least 3"),
        (SITES[:2], {}, "2 sites train in the study; it needs at least 3"),
        (SITES, {"fields": {"penalties": [1.0, 2.0]}}, "one penalty"),
    ],
)
def test_settings_that_are_refused(sites, settings, message):
    with pytest.raises(InputError, match=message):
        Settings("x", sites, **settings)


def test_settings_are_read_as_they_were_written():
    for study in (Settings("x", SITES), Settings("x", (*SITES, "d"), leave_out="d", inputs=("age",), fields={"site_folds": 2})):
        given = json.loads(messages.study_json(study))
        assert messages.read_study(json.dumps(given).encode(), "") == study
        del given["leave_out"]  # as a study without one was written before
        assert messages.read_study(json.dumps(given).encode(), "") == replace(study, sites=study.sites, leave_out="")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": 2.5}, "asks for noise on the sums"),
        ({"masks": "no"}, "masks is not of type bool"),
        ({"sites": ["a", 1]}, "sites is not of type list, or not of texts"),
        ({"format": "x"}, "is not an m2lgdg-federated-study-1 file"),
        ({"more": 1}, "its keys are not"),
    ],
)
def test_settings_of_a_file_that_are_refused(change, message):
    given = json.loads(messages.study_json(Settings("x", SITES))) | change
    with pytest.raises(InputError, match=message):
        messages.read_study(json.dumps(given).encode(), "study.json")


def test_a_small_site_is_refused(cohort):
    few = cohort.select(np.flatnonzero(cohort.sites == "east")[:9])
    with pytest.raises(InputError, match="site east has 9 labelled subjects; the study needs at least 10"):
        prepared(study_of(cohort), few, "east")


ANSWERS = [
    ({"head": {"round": "3"}}, "answers round 3 of attempt 1; the study is at round 4"),
    ({"head": {"attempt": "2"}}, "answers round 4 of attempt 2"),
    ({"head": {"study": "b"}}, "belongs to another study"),
    ({"head": {"site": "mars"}}, "is from site mars, not north"),
    ({"head": {"format": "x"}}, "is not an m2lgdg-federated-answer-1 file"),
    ({"arrays": {"search.age": np.full(63, np.nan)}}, "search.age has shape .* and type float64"),
    ({"arrays": {"search.age": np.zeros(62, dtype=np.int64)}}, r"shape \(62,\)"),
    ({"arrays": {"more": np.zeros(3)}}, "its sums are not those that round 4 asks for"),
    ({"drop": ["search.age"]}, "its sums are not those that round 4 asks for"),
]


def test_answers_that_are_refused(root):
    answer_all(root)
    path = root / "study" / "answers" / exchange.answer_name(1, 4, "north")
    content = path.read_bytes()
    for damaged, message in [(changed(content, **change), message) for change, message in ANSWERS] + [
        (content[:1000], "is damaged or not an")
    ]:
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=message):
            exchange.combine(root / "study")
        assert not (root / "study" / "totals" / "totals-01-004.safetensors").exists()


REQUESTS = [
    ({"head": {"round": "9"}}, "is round 9, but round 4 was not answered"),
    ({"head": {"round": str(MOST_ROUNDS + 1)}}, "is not allowed"),
    ({"head": {"study": "b"}}, "belongs to another study"),
    ({"head": {"asks": '[["rows", "steady"]]'}}, "'rows' is not part of the protocol"),
    ({"head": {"asks": '[["contrast", "steady"]]'}}, "'contrast' is not part of the protocol"),
    ({"head": {"asks": '[["spread", "everything"]]'}}, "'everything' is not part of the protocol"),
    ({"arrays": {"value standard.steady": np.full((4, 66), np.nan)}}, "is not .* finite numbers"),
    ({"arrays": {"value weights": np.zeros(3)}}, "a value named 'weights' is not part of the protocol"),
    ({"arrays": {"extra": np.zeros(3)}}, "arrays that are not part of the protocol"),
    ({"head": {"members": "[]"}}, "0 sites take part"),
]


def test_requests_that_a_site_refuses(root):
    content = (root / "study" / "requests" / exchange.request_name(1, 4)).read_bytes()
    for change, message in REQUESTS:
        with pytest.raises(InputError, match=message):
            exchange.answer(root / "north", changed(content, **change), "the request")
    assert not (root / "north" / "outbox" / exchange.answer_name(1, 4, "north")).exists()


def test_a_site_notices_other_counts_and_other_requests(root):
    content = (root / "study" / "requests" / exchange.request_name(1, 4)).read_bytes()
    exchange.answer(root / "north", content, "")
    head = messages.read_message(content, messages.REQUEST, "")[0]
    other = changed(content, head={"asks": json.dumps(json.loads(head["asks"])[::-1])})
    with pytest.raises(InputError, match=r"is damaged|differs from the request of round 4|is not the protocol"):
        exchange.answer(root / "north", other, "")
    members = json.loads(head["members"])
    members[1]["patients"] += 1
    with pytest.raises(InputError, match="does not take part with the counts and the key"):
        exchange.answer(root / members[1]["site"], changed(content, head={"members": json.dumps(members)}), "")


def test_a_direction_with_nan_is_refused(cohort):
    study = study_of(cohort)
    member, _ = prepared(study, by_site(cohort)["north"], "north")
    plan = Plan(study, tuple(replace(member, site=site) for site in cohort.site_names))
    ask = Ask("product", "steady", {"fits": np.array([0]), "directions": np.full((1, 66), np.nan, dtype=np.float32)})
    with pytest.raises(InputError, match="directions holds NaN"):
        plan.form(ask)
    with pytest.raises(InputError, match="its fits are not those of the protocol"):
        plan.form(replace(ask, arguments=dict(ask.arguments) | {"fits": np.array([plan.fits])}))
