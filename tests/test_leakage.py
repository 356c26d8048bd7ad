"""Each way to leak is found where it is planted, counted by a slow loop, and not where it is not."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from m2lgdg import InputError, make_cohort
from m2lgdg.data.leakage import check_folds, leakage_checks
from m2lgdg.splits import Fold, leave_one_site_out

CHECKS = (
    "target site absent from source",
    "no subject on both sides",
    "no identical scan on both sides",
    "no near-duplicate scan on both sides",
    "no label proxy among the inputs",
    "source labels known",
    "missingness does not reveal the label",
    "no two site names are one site",
)


def failed(result):
    return {one["check"]: one["detail"] for one in result if not one["passed"]}


def first_of(cohort, site, label=None):
    return int(np.flatnonzero((cohort.sites == site) & ((cohort.labels == label) if label is not None else True))[0])


def copied(cohort, into, series):
    """The cohort with the series of one subject replaced."""
    return replace(cohort, series=[series if i == into else one for i, one in enumerate(cohort.series)])


def test_a_clean_cohort_passes_everything(tiny):
    result = leakage_checks(tiny)
    assert tuple(one["check"] for one in result) == CHECKS
    assert all(one["passed"] is True for one in result)
    assert all(one["detail"].startswith("4 targets checked: ") for one in result[:6])
    assert result[6]["detail"].startswith("52 subjects checked: ")
    assert result[7]["detail"].startswith("4 site names checked: ")
    assert "(inputs: sex, age, education)" in result[4]["detail"]
    assert json.loads(json.dumps(result)) == result
    assert leakage_checks(tiny, ["east"])[0]["detail"].startswith("1 target checked: ")


def test_an_unknown_target_is_an_error(tiny):
    with pytest.raises(InputError, match="target moon is not a site"):
        leakage_checks(tiny, ["moon"])


def test_an_identical_scan_is_found_at_both_targets_and_at_no_other(tiny):
    north, south = first_of(tiny, "north"), first_of(tiny, "south")
    cohort = copied(tiny, south, tiny.series[north])
    again = "source contains copies of its scans (1 at {}; `m2lgdg check` lists them)"
    assert failed(leakage_checks(cohort)) == {
        CHECKS[2]: f"Target north: {again.format('south')}; target south: {again.format('north')}."
    }
    assert failed(leakage_checks(cohort, ["east", "west"])) == {}
    reported = json.dumps(leakage_checks(cohort))
    assert not any(subject in reported for subject in cohort.subjects)


def test_two_copies_within_one_site_do_not_cross(tiny):
    two = np.flatnonzero(tiny.sites == "north")[:2]
    assert failed(leakage_checks(copied(tiny, two[1], tiny.series[two[0]]))) == {}


def test_a_copy_without_a_label_is_in_no_source_but_may_hide_none(tiny):
    """The first of three copies has no label: the two others still face each other."""
    north, south, west = (first_of(tiny, site) for site in ("north", "south", "west"))
    labels = tiny.labels.copy()
    labels[north] = -1
    cohort = replace(copied(tiny, south, tiny.series[north]), labels=labels)
    assert failed(leakage_checks(cohort, ["south"])) == {}
    assert "Target north" in failed(leakage_checks(cohort, ["north"]))[CHECKS[2]]
    cohort = copied(cohort, west, tiny.series[north])
    assert "(1 at west;" in failed(leakage_checks(cohort, ["south"]))[CHECKS[2]]
    assert "(1 at south, 1 at west;" in failed(leakage_checks(cohort, ["north"]))[CHECKS[2]]


def test_a_cropped_and_rescaled_scan_is_a_near_duplicate_not_an_identical_one(tiny):
    north, west = first_of(tiny, "north"), first_of(tiny, "west")
    cohort = copied(tiny, west, 3 * tiny.series[north][5:] + 1)
    again = "source contains copies of its scans (1 at {}; `m2lgdg check` lists them)"
    assert failed(leakage_checks(cohort)) == {
        CHECKS[3]: f"Target north: {again.format('west')}; target west: {again.format('north')}."
    }
    assert failed(leakage_checks(cohort, ["east", "south"])) == {}


def test_proxies_and_unlabelled_subjects(tiny):
    phenotypes = tiny.phenotypes.assign(HAMD=np.arange(len(tiny), dtype=float))
    cohort = replace(tiny, phenotypes=phenotypes).with_inputs(["age", "HAMD"], allow_proxies=True)
    assert failed(leakage_checks(cohort)) == {CHECKS[4]: "Every target: HAMD reveals the diagnosis (allow_proxies is set)."}
    labels = np.where(np.arange(len(tiny)) % 5 == 0, -1, tiny.labels)
    assert failed(leakage_checks(replace(tiny, labels=labels))) == {}


@pytest.mark.parametrize("extra", [1, 3])
def test_a_broken_split_is_caught(tiny, extra):
    """What `splits` never does: target subjects in source, and source without labels."""
    fold, other = leave_one_site_out(tiny, ["north", "south"])
    own = np.flatnonzero(tiny.sites == "north")[:extra]
    leaking = Fold("north", tiny.select((tiny.sites != "north") | np.isin(np.arange(len(tiny)), own)), fold.target)
    found = failed(check_folds(tiny, [leaking, other]))
    shared = sum(a == b for a, b in product(leaking.source.subjects, leaking.target.subjects))
    assert shared == extra
    assert list(found) == list(CHECKS[:3])
    subjects, ids = ("1 subject", "1 subject id is") if extra == 1 else (f"{extra} subjects", f"{extra} subject ids are")
    are, have = ("is", "subject has") if extra == 1 else ("are", "subjects have")
    assert found[CHECKS[0]] == f"Target north: {subjects} of the target site {are} in source."
    assert found[CHECKS[1]] == f"Target north: {ids} also in source."
    assert f"({extra} at north;" in found[CHECKS[2]]
    labels = tiny.labels.copy()
    labels[np.flatnonzero(tiny.sites == "west")[:extra]] = -1
    cohort = replace(tiny, labels=labels)
    bare = Fold("north", cohort.select(sites=["south", "west", "east"]), cohort.select(sites=["north"]))
    assert failed(check_folds(cohort, [bare])) == {CHECKS[5]: f"Target north: {extra} source {have} no label."}


@pytest.fixture(scope="module")
def large():
    """Sites with at least ten subjects of each class."""
    return make_cohort("tiny", seed=2, sizes={"north": 40, "south": 40, "west": 40}, lengths=(20, 20), phenotype_effect=0.0)


def with_column(cohort, name, values):
    return replace(cohort, phenotypes=cohort.phenotypes.assign(**{name: values})).with_inputs(["age", name])


def test_an_input_that_separates_the_classes_fails_whatever_its_name(large):
    draw = np.random.default_rng(0)
    questionnaire = with_column(large, "questionnaire", 10.0 * large.labels + draw.normal(size=len(large)))
    sentence = "questionnaire separates patients from controls as a label proxy does"
    assert failed(leakage_checks(questionnaire)) == {CHECKS[4]: f"Every target: {sentence} (leave it out of the inputs)."}
    harmless = with_column(large, "questionnaire", draw.normal(size=len(large)))
    assert failed(leakage_checks(harmless)) == {}
    related = with_column(large, "questionnaire", 1.0 * large.labels + draw.normal(size=len(large)))
    assert failed(leakage_checks(related)) == {}


@pytest.mark.parametrize("kind", ["binary", "two-sided", "codes"])
def test_an_input_need_not_rank_the_classes_to_reveal_them(large, kind):
    """Taken by 85 % of patients and 5 % of controls; patients at both ends; patients with codes 0 and 2, controls with 1."""
    rng, patients = np.random.default_rng(3), large.labels == 1
    ends = np.where(rng.random(len(large)) < 0.5, -3, 3)
    place = np.zeros(len(large), dtype=int)  # in the class
    for label in (0, 1):
        place[large.labels == label] = np.arange((large.labels == label).sum())
    values = {
        "binary": (place % 20 < np.where(patients, 17, 1)).astype(float),
        "two-sided": rng.normal(size=len(large)) + np.where(patients, ends, 0),
        "codes": np.where(patients, 1.0 + np.sign(ends), 1.0),
    }[kind]
    assert "item separates patients" in failed(leakage_checks(with_column(large, "item", values)))[CHECKS[4]]
    shuffled = with_column(large, "item", np.random.default_rng(4).permutation(values))
    assert failed(leakage_checks(shuffled)) == {}


def test_an_input_that_separates_the_classes_within_sites_only_fails_too(large):
    """Each site has its own units, so that the pooled values overlap."""
    offset = 100.0 * np.unique(large.sites, return_inverse=True)[1]
    shifted = with_column(large, "scale", offset + large.labels + 0.01 * np.random.default_rng(0).normal(size=len(large)))
    assert "scale separates patients from controls" in failed(leakage_checks(shifted))[CHECKS[4]]
    missing = shifted.phenotypes["scale"].where(np.arange(len(large)) % 10 == 0)  # 12 subjects
    few = replace(shifted, phenotypes=shifted.phenotypes.assign(scale=missing))
    assert failed(leakage_checks(few)) == {}
