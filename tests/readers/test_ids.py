"""Ids of a table and subjects of a cohort: spelled in other ways, alone by number, never matched where two are possible."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2lgdg import InputError
from m2lgdg.data.readers.ids import matched_ids, plain_id


@pytest.mark.parametrize(
    ("one", "subject"),
    [
        ("Caltech_0051456", "Caltech_0051456"),
        ("51456", "Caltech_0051456"),
        ("0051456", "Caltech_0051456"),
        ("sub-0051456", "Caltech_0051456"),
        ("51456.0", "Caltech_0051456"),
        ("caltech_51456/", "Caltech_0051456"),
        ("Caltech_0051456", "51456"),
        ("Caltech_0051456", "sub-0051456"),
        ("sub-01", "1"),
        ("01", "sub-01"),
        ("sub-01_ses-baseline", "sub-01"),
        ("P07", "p7"),
        ("S1-1-0001", "S1-1-0001"),
    ],
)
def test_one_person_in_two_spellings(one, subject):
    assert matched_ids(["somebody", one], ["Nobody_9", subject], "t") == {subject: one}


@pytest.mark.parametrize(
    ("one", "subject"),
    [
        ("NYU_51456", "Caltech_51456"),
        ("514560", "Caltech_51456"),
        ("1456", "Caltech_51456"),
        ("P1", "P10"),
        ("", "P1"),
        ("x", "y"),
    ],
)
def test_two_people(one, subject):
    assert matched_ids([one], [subject], "t") == {}


def test_an_id_as_it_is_written_comes_before_one_that_is_only_alike():
    subjects = ["A_01", "B_01", "01"]
    assert matched_ids(["01", "B_1", "A_01"], subjects, "t") == {"01": "01", "B_01": "B_1", "A_01": "A_01"}


def test_what_could_be_two_is_an_error_that_names_both():
    with pytest.raises(InputError) as caught:
        matched_ids(["1"], ["A_01", "B_01"], "table t (x.tsv)")
    assert str(caught.value) == ("table t (x.tsv): id 1 could be both A_01 and B_01; write the ids as those of the subjects.")
    for ids in (["sub-01", "1"], ["A_01", "01"], ["sub-01_ses-1", "sub-01_ses-2"]):
        with pytest.raises(InputError) as caught:
            matched_ids(ids, ["A_01"] if "A_01" in ids else ["sub-01"], "t")
        assert str(caught.value).startswith(f"t: ids {ids[0]} and {ids[1]} could both be subject ")


@given(st.lists(st.text(st.sampled_from("aB_-0159"), min_size=1, max_size=7), unique=True, max_size=6), st.integers(0, 99))
def test_order_does_not_matter_and_nobody_is_matched_twice(names, seed):
    ids = [plain_id(one) for one in names]
    shuffled = random.Random(seed).sample(ids, len(ids))
    results = []
    for some in (ids, shuffled):
        try:
            results.append(matched_ids(some, names, "t"))
        except InputError:
            results.append(None)
    assert results[0] == results[1]
    if results[0] is not None:
        assert len(set(results[0].values())) == len(results[0])
        assert all(
            subject == one or plain_id(subject) == plain_id(one) for subject, one in results[0].items() if subject in ids
        )
    assert matched_ids(names, names, "t") == {one: one for one in names}
