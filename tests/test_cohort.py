"""The cohort: what it refuses, what selection, masking and hashing keep, and the file format bit for bit."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m2lgdg import Cohort, InputError, make_cohort
from m2lgdg.cohort import MASKED_SITE, is_proxy, natural_key
from m2lgdg.findings import Exclusion

ROIS = ("a", "b", "c")


def small(**changes):
    rng = np.random.default_rng(0)
    values = {
        "series": [rng.normal(size=(length, 3)) for length in (4, 6, 5, 4)],
        "subjects": ["s1", "s2", "s3", "s4"],
        "sites": ["x", "x", "y", "y"],
        "labels": [1, 0, 1, 0],
        "rois": ROIS,
        "phenotypes": pd.DataFrame({"age": [20.5, np.nan, 31, 44], "ADOS_TOTAL": [9, 1, 12, 2.0], "hand": ["R", "", "L", "R"]}),
        "inputs": ("age",),
        "tr": np.array([2.0, 2.0, 1.5, np.nan]),
    }
    return Cohort(**(values | changes))


def assert_same(first, second):
    assert first.hash == second.hash
    for name in ("name", "atlas", "rois", "inputs", "excluded", "notes", "truth", "allow_proxies"):
        assert getattr(first, name) == getattr(second, name), name
    for name in ("subjects", "sites", "labels", "tr"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    pd.testing.assert_frame_equal(first.phenotypes, second.phenotypes)
    for one, other in zip(first.series, second.series, strict=True):
        assert one.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))  # bits, so that -0.0 counts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": [1, 0, 1]}, "4 subjects but 3 labels"),
        ({"labels": [1, 0, 2, 0]}, "label 2 is neither 1"),
        ({"subjects": ["s1", "s2", "s2", "s4"]}, "subject s2 appears 2 times"),
        ({"rois": ("a", "b", "b")}, "ROI b appears 2 times"),
        ({"rois": ("a", "b")}, "subject s1 has shape (4, 3), not (time, 2)"),
        ({"tr": [2, 2, 0, 2]}, "subject s3 has a TR of 0 s"),
        ({"tr": np.inf}, "subject s1 has a TR of inf s"),
        ({"inputs": ("weight",)}, "input weight is not a phenotype column"),
        ({"inputs": ("hand",)}, "input hand holds text"),
        ({"inputs": ("ADOS_TOTAL",)}, "input ADOS_TOTAL reveals the diagnosis"),
        ({"series": [np.zeros((4, 3))] * 4}, "subject s1: the series is zero everywhere"),
        ({"series": [np.ones((4, 3))] * 4}, "subject s1: every ROI is constant"),
        ({"series": [np.eye(3)[:1]] * 4}, "subject s1: the series has 1 volume"),
        ({"series": [np.array([[1, 2, 3], [1, np.nan, 4]])] * 4}, "subject s1: NaN at volume 2 of ROI b (1 such value)"),
        ({"series": [np.array([[1, 2, 3], [1, 5, np.inf]])] * 4}, "infinite value at volume 2 of ROI c"),
    ],
)
def test_refuses_in_a_sentence(changes, words):
    with pytest.raises(InputError) as caught:
        small(**changes)
    assert words in str(caught.value)


def test_proxies_are_allowed_when_the_user_insists():
    assert small(inputs=("ADOS_TOTAL",), allow_proxies=True).inputs == ("ADOS_TOTAL",)
    assert small().with_inputs(["ADOS_TOTAL"], allow_proxies=True).inputs == ("ADOS_TOTAL",)
    with pytest.raises(InputError):
        small().with_inputs(["ADOS_TOTAL"])


def test_series_cannot_be_changed_in_place():
    mine = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    cohort = small(series=[mine] * 4)
    with pytest.raises(ValueError, match="read-only"):
        cohort.series[0][0, 0] = 7
    mine[0, 0] = 7  # the caller's own array stays the caller's
    assert cohort.series[0][0, 0] != 7


def test_select_by_mask_site_and_subject_keeps_rows_together():
    cohort = small()
    part = cohort.select([False, True, True, True], sites=["y"])
    assert part.subjects.tolist() == ["s3", "s4"]
    assert part.labels.tolist() == [1, 0]
    assert part.phenotypes.loc["s3", "age"] == 31
    assert part.tr[0] == 1.5
    np.testing.assert_array_equal(part.series[0], cohort.series[2])
    assert cohort.select(subjects=["s2"]).sites.tolist() == ["x"]
    assert len(cohort) == 4
    with pytest.raises(InputError, match="no site z"):
        cohort.select(sites=["z"])


def test_unlabelled_shows_nothing_but_series_inputs_and_tr():
    cohort = small(truth={"rois": ["a"]}, excluded=(Exclusion("s9", "x", "why"),), notes=("label from column dx",))
    bare = cohort.unlabelled()
    assert set(bare.sites.tolist()) == {MASKED_SITE}
    assert set(bare.labels.tolist()) == {-1}
    assert not set(bare.subjects.tolist()) & set(cohort.subjects.tolist())
    assert list(bare.phenotypes.columns) == ["age"]
    assert (bare.truth, bare.excluded, bare.notes) == (None, (), ())
    # Two targets that differ only in what is hidden look the same to a method, down to the hash.
    other = small(labels=[0, 1, 0, 1], sites=["q"] * 4, subjects=list("abcd"))
    assert other.unlabelled().hash == bare.hash


def test_hash_ignores_order_and_history_but_not_content():
    cohort = small()
    assert cohort.select([3, 1, 0, 2]).hash == cohort.hash
    assert small(notes=("x",), excluded=(Exclusion("a", "b", "c"),)).hash == cohort.hash
    one_bit = [np.array(one) for one in cohort.series]
    one_bit[2][0, 0] = np.nextafter(one_bit[2][0, 0], np.float32(9))
    changed = [
        small(series=one_bit),
        small(labels=[1, 0, 1, 1]),
        small(sites=["x", "x", "y", "x"]),
        small(tr=np.array([2.0, 2.0, 1.5, 2.0])),
        small(inputs=()),
        small(rois=("a", "c", "b")),
        cohort.select([0, 1, 2]),
    ]
    assert len({cohort.hash, *(one.hash for one in changed)}) == 8


def test_file_round_trip_is_bit_exact(tmp_path, tiny):
    for cohort in (tiny, small(excluded=(Exclusion("s9", "x", "why"),), notes=("é",), name="mine", atlas="aal")):
        assert_same(cohort, Cohort.load(cohort.save(tmp_path / "c.cohort")))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_cohort_survives_its_file(tmp_path_factory, data):
    subjects = data.draw(st.lists(text.filter(bool), min_size=1, max_size=5, unique=True))
    n, rois = len(subjects), data.draw(st.integers(2, 4))
    series = []
    for _ in range(n):
        one = data.draw(hnp.arrays(np.float32, (data.draw(st.integers(2, 5)), rois), elements=finite))
        one[0, 0], one[1, 0] = 0, 1  # not constant
        series.append(one)
    cohort = Cohort(
        series=series,
        subjects=subjects,
        sites=data.draw(st.lists(text, min_size=n, max_size=n)),
        labels=data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=n, max_size=n)),
        rois=range(rois),
        phenotypes=pd.DataFrame(
            {
                "age": data.draw(hnp.arrays(np.float64, n, elements=st.floats(0, 100) | st.just(np.nan))),
                "words": np.array(data.draw(st.lists(text, min_size=n, max_size=n)), dtype=object),
            }
        ),
        inputs=("age",),
    )
    path = tmp_path_factory.mktemp("any") / "c.cohort"
    assert_same(cohort, Cohort.load(cohort.save(path)))


@given(st.integers(0, 1000), st.floats(0.01, 1e4), st.floats(-1e4, 1e4))
@settings(max_examples=30, deadline=None)
def test_float16_keeps_each_roi_to_a_two_thousandth(tmp_path_factory, seed, scale, offset):
    rng = np.random.default_rng(seed)
    one = (offset + scale * rng.normal(size=(50, 3))).astype(np.float32)
    one[:, 2] = offset  # a flat ROI stays flat
    cohort = small(series=[one] * 4)
    path = cohort.save(tmp_path_factory.mktemp("half") / "c.cohort", "float16")
    loaded = Cohort.load(path)
    error = np.abs(loaded.series[0] - one).max(axis=0)
    reach = np.abs(one - one.mean(axis=0)).max(axis=0)
    assert (error <= reach / 2000 + np.abs(one).max(axis=0) * 2e-7).all()
    assert np.ptp(loaded.series[0][:, 2]) == 0


def test_an_altered_file_is_refused(tmp_path, tiny):
    path = tiny.save(tmp_path / "c.cohort")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"was altered|damaged"):
        Cohort.load(path)


def test_loaded_series_share_the_file(tmp_path):
    cohort = make_cohort("tiny")
    loaded = Cohort.load(cohort.save(tmp_path / "c.cohort"))
    base = loaded.series[0]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_nothing_is_left_behind_when_writing_fails(tmp_path, tiny, monkeypatch):
    import safetensors.numpy

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(InputError, match=r"cannot write .*c\.cohort: No space left on device"):
        tiny.save(tmp_path / "c.cohort")
    assert list(tmp_path.iterdir()) == []


def test_repr_and_site_names_read_well():
    assert repr(small()) == "Cohort cohort: 4 subjects (2 patients, 2 controls) of 2 sites, 3 ROIs"
    assert small(sites=["S10", "S2", "S2", "S1"]).site_names == ["S1", "S2", "S10"]
    assert natural_key("S2") < natural_key("S10")


@pytest.mark.parametrize(
    "column",
    [
        *(
            "HAMD",
            "HAMA total",
            "ADOS_TOTAL",
            "ADI_R_SOCIAL_TOTAL_A",
            "SRS_RAW_TOTAL",
            "DSM_IV_TR",
            "DX_GROUP",
            "On medication?",
        ),
        *("HDRS17", "HDRS", "hrsd", "hrsd_24", "qids", "QIDS-SR16", "qidsTotal", "CARS", "cars2_total", "SSRI", "on_ssris"),
        *("onSsri", "BDI", "BDI2", "bdi_ii", "bditotal", "MADRS", "PHQ9", "phq_9", "SCQ_TOTAL", "AQ", "AQ_TOTAL", "aq10"),
        *("AQ-50", "antidepressants", "Antidepressant use"),
    ],
)
def test_label_proxies_are_known_by_name(column):
    assert is_proxy(column)


@pytest.mark.parametrize(
    "column",
    [
        *(
            "sex",
            "age",
            "education",
            "viq",
            "fiq",
            "BMI",
            "HANDEDNESS_SCORES",
            "func_mean_fd",
            "AGE_AT_SCAN",
            "site",
            "SITE_ID",
        ),
        *("PIQ", "mean_fd", "scars", "oscars_won", "subdivision", "aquisition", "aqueduct", "plaque", "Iraq", "cardiac"),
    ],
)
def test_ordinary_phenotypes_are_no_proxies(column):
    assert not is_proxy(column)
