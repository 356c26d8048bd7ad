"""Messages that are read, and messages that are refused: nothing outside of the protocol is answered or added."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hospitals import SIZES, answer_all, by_site, changed, study_of

from m2lgdg.federated import exchange, messages
from m2lgdg.federated.plan import Member, Plan, Settings
from m2lgdg.federated.site import prepared
from m2lgdg.storage import InputError

SITES = tuple("abcdefg")


@pytest.mark.parametrize(
    ("sites", "settings", "message"),
    [
        (SITES, {"leave_out": "x"}, "is not one of the sites; add it with --site"),
        (SITES[:6], {"leave_out": "a"}, "5 sites train, and the study needs 6"),
        (SITES[:5], {}, "5 sites train, and the study needs 6"),
        (SITES, {"least_sites": 2}, "--least-sites is 2; no site takes part in a study with less than 6"),
        (SITES, {"least_subjects": 2}, "--least-subjects is 2; no site takes part in a study with less than 10"),
        (SITES, {"fields": {"site_folds": 50}}, "site_folds is 50; every fold needs 3 sites, so set at most 2"),
        (SITES, {"fields": {"penalties": [1.0, 2.0]}}, "one penalty"),
        (SITES, {"fields": {"tables": "all"}}, "field tables: federated training uses scans and phenotypes only"),
        (SITES, {"fields": {"held_phenotypes": False}}, "field held_phenotypes: .* leave this field out"),
        (SITES, {"fields": {"scan": False}}, "without the scan, federated training needs phenotypes"),
        (("a b", *SITES), {}, "use letters, digits"),
    ],
)
def test_settings_that_are_refused(sites, settings, message):
    with pytest.raises(InputError, match=message):
        Settings("x", sites, **settings)


def test_settings_are_read_as_they_were_written():
    for study in (Settings("x", SITES), Settings("x", SITES, leave_out="d", inputs=("age",), fields={"site_folds": 2})):
        assert messages.read_study(messages.study_json(study).encode(), "") == study


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": False}, "its keys are not"),
        ({"least_sites": 2}, "no site takes part"),
        ({"inputs": "age"}, "inputs is not of type list"),
        ({"sites": ["a", 1]}, "sites is not of type list, or not of printable texts"),
        ({"inputs": ["age\x1b[2J"]}, "inputs is not of type list, or not of printable texts"),
        ({"format": "x"}, "is not an m2lgdg-federated-study-3 file"),
        ({"format": "m2lgdg-federated-study-1"}, "was begun by an earlier version"),
        ({"format": "m2lgdg-federated-study-2"}, "was begun by an earlier version"),
    ],
)
def test_settings_of_a_file_that_are_refused(change, message):
    given = json.loads(messages.study_json(Settings("x", SITES))) | change
    with pytest.raises(InputError, match=message):
        messages.read_study(json.dumps(given).encode(), "study.json")


def test_a_site_with_few_subjects_or_values_is_refused(cohort):
    study, own = study_of(cohort), by_site(cohort)["north"]
    with pytest.raises(InputError, match="site north has 9 labelled subjects; the study needs at least 10"):
        prepared(study, own.select(np.arange(9)), "north")
    table = own.phenotypes.copy()
    table.loc[table.index[4:], "age"] = np.nan
    with pytest.raises(InputError, match="has only 4 values of age; sums over so few"):
        prepared(study, replace(own, phenotypes=table), "north")


def test_the_join_message_names_no_cohort(cohort):
    study = study_of(cohort)
    member, _ = prepared(study, by_site(replace(cohort, name="ward 7"))["north"], "north")
    assert "ward" not in messages.member_json(study, member)


def test_a_join_message_holds_scans_of_a_known_kind(cohort):
    study, own = study_of(cohort), by_site(cohort)["north"].to_connectomes()
    member, arrays = prepared(study, own, "north")
    assert (
        member.scans == "fisher-z" and not member.amplitudes and set(arrays) == {"fc", "log_euclidean", "phenotypes", "labels"}
    )
    written = messages.member_json(study, member)
    assert messages.read_member(written.encode(), "join") == member
    assert "Scans: fisher-z; with amplitudes: no." in list(messages._member_in_words(member))
    with pytest.raises(InputError, match=r"join is damaged \(its scans are neither series nor a kind of connectomes"):
        messages.read_member(written.replace("fisher-z", "tensor").encode(), "join")


def members_of(sizes, **changes):
    base = Member("", 0, 0, ("a", "b"), "aal", "h")
    return tuple(replace(base, site=site, patients=n // 2, controls=n - n // 2, **changes) for site, n in sizes.items())


def test_every_total_is_over_three_sites():
    """Whatever the sizes, a plan is refused, or every group of sites whose sums are added has three that contribute."""
    rng, accepted = np.random.default_rng(0), 0
    for _ in range(60):
        count = int(rng.integers(6, 20))
        sites = tuple(f"s{i:02d}" for i in range(count))
        members = members_of({site: 10 + int(rng.exponential(60)) for site in sites})
        one_class = rng.random(count) < 0.2
        members = tuple(
            replace(each, patients=each.subjects, controls=0) if lone else each
            for each, lone in zip(members, one_class, strict=True)
        )
        try:
            plan = Plan(Settings("x", sites), members)
        except InputError:
            continue
        accepted += 1
        for fold in set(plan.fold_of.values()):
            assert sum(one.balanced for one in plan.members if plan.fold_of[one.site] == fold) >= 3
    assert accepted > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda members: [replace(members[0], patients=2000), *members[1:]], "fewer than 3 sites with patients and controls"),
        (
            lambda members: [*members[:2], *(replace(one, empty=("age",)) for one in members[2:])],
            "only a and b has values of age",
        ),
        (lambda members: [members[0], *(replace(one, amplitudes=False) for one in members[1:])], "only a has scans"),
        (
            lambda members: [members[0], *(replace(one, patients=0, controls=20) for one in members[1:])],
            "only a has patients and",
        ),
        (lambda members: [replace(one, patients=10**6) for one in members], "a study has at most 1000000"),
        (lambda members: [members[0], *members[:-1]], "a site takes part twice"),
        (lambda members: [replace(members[0], site="x"), *members[1:]], "site x is not a site of this study"),
        (lambda members: [replace(members[0], rois=("a", "c")), *members[1:]], "all sites need the same atlas"),
    ],
)
def test_members_that_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        Plan(Settings("x", SITES, inputs=("age",)), tuple(change(members_of(dict.fromkeys(SITES, 20)))))


ANSWERS = [
    ({"head": {"site": "mars"}}, "is not signed by site 'mars'"),
    ({"head": {"format": "x"}}, "is not an m2lgdg-federated-answer-3 file"),
    ({"arrays": {"search.age": np.zeros(63, dtype=np.int64)}}, "is not signed by site 'north'"),
]
SIGNED = [
    ({"arrays": {"search.age": np.full(63, np.nan)}}, "search.age has shape .* and type float64"),
    ({"arrays": {"search.age": np.zeros(62, dtype=np.int64)}}, r"shape \(62,\)"),
    ({"arrays": {"more": np.zeros(3)}}, "its sums are not those that round 4 asks for"),
    ({"drop": ["search.age"]}, "its sums are not those that round 4 asks for"),
    ({"head": {"study": "b"}}, "belongs to another study"),
    ({"head": {"request": "0"}}, "answers another request than that of round 4"),
]


def test_answers_that_are_refused(root):
    answer_all(root)
    path = root / "study" / "answers" / exchange.answer_name(1, 4, "north")
    content, key = path.read_bytes(), json.loads((root / "north" / "private" / "site.json").read_text())["signing"]
    damaged = [(changed(content, **change), message) for change, message in ANSWERS]
    damaged += [(changed(content, **change, key=key), message) for change, message in SIGNED]
    damaged += [
        (content[:100], "is damaged or not an"),
        (content[:-9], "is not signed"),
        (b"\xff" * 64, "its header is too large"),
    ]
    others = [exchange.answer_name(1, 4, "south"), exchange.answer_name(1, 3, "north")]
    damaged += [(path.with_name(other).read_bytes(), "is not signed by|answers another request") for other in others]
    for given, message in damaged:
        path.write_bytes(given)
        with pytest.raises(InputError, match=message):
            exchange.combine(root / "study")
        assert not (root / "study" / "totals" / "totals-01-004.safetensors").exists()
    path.write_bytes(content)
    assert exchange.combine(root / "study").round == 5
    assert set(SIZES) == set(exchange.standing(root / "study").plan.fold_of)


def test_show_does_not_steer_the_terminal(root, tmp_path):
    content = (root / "study" / "answers" / exchange.answer_name(1, 3, "north")).read_bytes()
    path = tmp_path / "answer.safetensors"
    path.write_bytes(changed(content, head={"round": "3\x1b]0;owned\x07\x9b2J"}, arrays={"\x1b[2J": np.zeros(1)}))
    lines = list(messages.in_words(path))
    assert all(line.isprintable() for line in lines) and any(r"\x1b]0;owned\x07\x9b2J" in line for line in lines)
