"""The cohort: what it refuses, what selection, masking and hashing keep, several atlases, arrays and data frames, HTML."""

import copy
import pickle
import re
from dataclasses import replace
from html import escape

import numpy as np
import pandas as pd
import pytest
from sklearn.svm import SVC

import m2lgdg
from m2lgdg import Cohort, InputError
from m2lgdg.cohort import MASKED_SITE, Parcellation, is_proxy, natural_key
from m2lgdg.findings import Exclusion, Finding, is_table_proxy
from m2lgdg.study.predictions import read_predictions

LENGTHS = (4, 6, 5, 4)
HO = ("p", "q")


def numbers(volumes, rois, step):
    """Exact binary fractions, so that the stored hashes below hold on every machine."""
    return (np.arange(volumes * rois).reshape(volumes, rois) * step % 11 - 5) / 4


def small(**changes):
    values = {
        "series": [numbers(length, 3, 7) for length in LENGTHS],
        "subjects": ["s1", "s2", "s3", "s4"],
        "sites": ["x", "x", "y", "y"],
        "labels": [1, 0, 1, 0],
        "rois": ("a", "b", "c"),
        "phenotypes": pd.DataFrame({"age": [20.5, np.nan, 31, 44], "hand": ["R", "", "L", "R"]}),
        "inputs": ("age",),
        "tr": np.array([2.0, 2.0, 1.5, np.nan]),
        "atlas": "aal",
        "excluded": (Exclusion("s9", "x", "why"),),
        "notes": ("note",),
    }
    return Cohort(**(values | changes))


def ho(lacking=(1,), step=5, **changes):
    series = [None if i in lacking else numbers(length, 2, step) for i, length in enumerate(LENGTHS)]
    for position, one in changes.pop("at", {}).items():
        series[position] = one
    return replace(Parcellation(HO, series), **changes)


THICKNESS = pd.DataFrame({"lh_insula": [2.5, 3.25, 2.75], "rh_insula": [2.0, np.nan, -0.0]}, index=["s3", "s1", "s4"])
VOLUME = pd.DataFrame({"Brain-Stem": [20000, 21000, 19500, 20500]}, index=["s1", "s2", "s3", "s4"])


def with_tables(**changes):
    return small(**({"tables": {"thickness": THICKNESS, "volume": VOLUME}} | changes))


def several(**changes):
    cc = Parcellation([str(i) for i in range(1, 6)], [numbers(length, 5, 3) for length in LENGTHS])
    return small(**({"parcellations": {"ho": ho(), "cc": cc}} | changes))


def assert_same(first, second):
    assert first.hash == second.hash
    for name in ("name", "atlas", "atlases", "rois", "inputs", "excluded", "notes", "truth", "allow_proxies"):
        assert getattr(first, name) == getattr(second, name), name
    for name in ("subjects", "sites", "labels", "tr"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    pd.testing.assert_frame_equal(first.phenotypes, second.phenotypes)
    assert set(first.tables) == set(second.tables)
    for name, table in first.tables.items():
        pd.testing.assert_frame_equal(table, second.tables[name], check_exact=True)
    for one, other in [(first, second), *zip(first.parcellations.values(), second.parcellations.values(), strict=True)]:
        assert one.rois == other.rois
        for mine, theirs in zip(one.series, other.series, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype == np.float32
                np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))  # bits, so that -0.0 counts


SCORES = pd.DataFrame({"ADOS_TOTAL": [9, 1, 12, 2.0], "hand": ["R", "", "L", "R"]})


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
        ({"phenotypes": SCORES, "inputs": ("ADOS_TOTAL",)}, "input ADOS_TOTAL reveals the diagnosis"),
        ({"series": [np.zeros((4, 3))] * 4}, "subject s1: the series is zero everywhere"),
        ({"series": [np.ones((4, 3))] * 4}, "subject s1: every ROI is constant"),
        ({"series": [np.eye(3)[:1]] * 4}, "subject s1: the series has 1 volume"),
        ({"series": [np.array([[1, 2, 3], [1, np.nan, 4]])] * 4}, "subject s1: NaN at volume 2 of ROI b (1 such value)"),
        ({"series": [np.array([[1, 2, 3], [1, 5, np.inf]])] * 4}, "infinite value at volume 2 of ROI c"),
        ({"atlas": "", "parcellations": {"ho": ho()}}, "its first atlas has no name, so it cannot hold atlas ho too."),
        ({"parcellations": {" ": ho()}}, "one of its atlases has no name."),
        ({"parcellations": {"aal": ho()}}, "atlas aal appears 2 times."),
        ({"parcellations": {"ho": Parcellation(HO, [None])}}, "atlas ho: 4 subjects but 1 series."),
        ({"parcellations": {"ho": ho(rois=("p", "p"))}}, "atlas ho: ROI p appears 2 times."),
        ({"parcellations": {"ho": ho(rois=("p", "q", "r"))}}, "atlas ho: the series of subject s1 has shape (4, 2)"),
        ({"parcellations": {"ho": ho(at={2: numbers(4, 2, 5)})}}, "subject s3 has 4 volumes, but 5 in atlas aal."),
        ({"parcellations": {"ho": ho(at={3: np.full((4, 2), 2.0)})}}, "atlas ho: subject s4: every ROI is constant."),
    ],
)
def test_refuses_in_a_sentence(changes, words):
    with pytest.raises(InputError) as caught:
        small(**changes)
    assert words in str(caught.value)


def test_proxies_are_allowed_when_the_user_insists():
    assert small(phenotypes=SCORES, inputs=("ADOS_TOTAL",), allow_proxies=True).inputs == ("ADOS_TOTAL",)
    cohort = small(phenotypes=SCORES, inputs=())
    assert cohort.with_inputs(["ADOS_TOTAL"], allow_proxies=True).inputs == ("ADOS_TOTAL",)
    with pytest.raises(InputError):
        cohort.with_inputs(["ADOS_TOTAL"])


def test_a_cohort_holds_copies_that_nobody_can_write_to():
    given = {
        "series": [numbers(length, 3, 7).astype(np.float32) for length in LENGTHS],
        "subjects": np.array(["s1", "s2", "s3", "s4"]),
        "sites": np.array(["x", "x", "y", "y"]),
        "labels": np.array([1, 0, 1, 0], dtype=np.int8),
        "tr": np.array([2.0, 2.0, 1.5, 2.0]),
        "phenotypes": pd.DataFrame({"age": [20.5, 1, 31, 44]}),
    }
    shown = given["series"][0].view()
    shown.flags.writeable = False  # the caller can still write to what it is a view of
    other = numbers(4, 2, 5).astype(np.float32)
    atlases = {"ho": ho(lacking=(1, 2, 3), at={0: other})}
    cohort = small(**given | {"series": [shown, *given["series"][1:]]}, parcellations=atlases)
    before, text = cohort.hash, repr(cohort.phenotypes)
    for array in (*given["series"], other, *(given[name] for name in ("subjects", "sites", "labels", "tr"))):
        array[...] = array.ravel()[1]
    given["phenotypes"]["age"] = 0.0
    atlases.clear()
    assert (cohort.hash, repr(cohort.phenotypes)) == (before, text) and replace(cohort).hash == before


@pytest.mark.parametrize("how", [lambda c: c, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)),
                                 lambda c: c.with_inputs([]), lambda c: c.select([2, 1, 0]), lambda c: c.unlabelled(),
                                 lambda c: c._changed(labels=np.ones(4)), lambda c: c.parcellation("ho")])  # fmt: skip
def test_no_array_of_any_cohort_can_be_edited(how):
    cohort = several()
    other = how(cohort)
    hashes = cohort.hash, other.hash
    further = [one for each in other.parcellations.values() for one in each.series if one is not None]
    for array in (other.labels, other.sites, other.subjects, other.tr, *other.series, *further):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = array[::-1]
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    table, parts = other.phenotypes, other.parcellations
    table["age"], parts["more"] = 0.0, None
    assert (cohort.hash, other.hash) == hashes and "more" not in other.parcellations
    assert not (other.phenotypes["age"] == 0).any()


def test_a_null_of_permuted_labels_is_asked_for_by_replace(cohort):
    """An edit in place, which was lost on caches and hashes, is refused; a cohort with other labels has a hash of its own."""
    with pytest.raises(ValueError, match="assignment destination is read-only"):
        cohort.labels[:] = np.roll(cohort.labels, 1)
    assert replace(cohort, labels=np.roll(cohort.labels, 1)).hash != cohort.hash


def test_nobody_is_selected_twice():
    for which in ([0, 0, 1], [0, -4], np.array([3, 3])):
        with pytest.raises(InputError, match=r"subject s\d appears 2 times"):
            small().select(which)
    with pytest.raises(InputError, match="subject s1 appears 2 times"):
        small()[[0, 0]]


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


def test_selection_masking_and_inputs_carry_every_atlas():
    cohort = several()
    chosen = cohort.select([3, 1, 0])
    assert chosen.atlases == ("aal", "ho", "cc")
    assert chosen.parcellations["ho"].present.tolist() == [True, False, True]
    np.testing.assert_array_equal(chosen.parcellations["cc"].series[0], cohort.parcellations["cc"].series[3])
    assert cohort.select(sites=["x"]).parcellation("ho").subjects.tolist() == ["s1"]
    assert cohort.unlabelled().parcellation("ho").subjects.tolist() == ["subject-1", "subject-3", "subject-4"]
    checked = cohort.with_findings([Finding("no labels")])
    for one in (checked, cohort.with_inputs([]), replace(cohort, sites=["z"] * 4)):
        assert one.atlases == cohort.atlases
    assert checked.parcellation("aal").findings is None  # those of all atlases


def test_atlases_and_the_cohort_of_each():
    cohort = several(truth={"rois": ["a"]})
    assert (small().atlases, small(atlas="").atlases, cohort.atlases) == (("aal",), ("",), ("aal", "ho", "cc"))
    first, second = cohort.parcellation("aal"), cohort.parcellation("ho")
    assert first.hash == small().hash and (first.atlases, first.truth) == (("aal",), {"rois": ["a"]})
    keep = [0, 2, 3]
    expected = small(series=[numbers(LENGTHS[i], 2, 5) for i in keep], rois=HO, atlas="ho", **{
        name: np.array(getattr(small(), name))[keep] for name in ("subjects", "sites", "labels", "tr")
    }, phenotypes=small().phenotypes.iloc[keep])  # fmt: skip
    assert_same(second, expected)
    assert len(cohort.parcellation("cc")) == 4
    with pytest.raises(InputError, match=r"^cohort cohort has no atlas power; it has aal, ho, cc\.$"):
        cohort.parcellation("power")
    with pytest.raises(InputError, match=r"^cohort cohort has no atlas aal; its only atlas has no name\.$"):
        small(atlas="").parcellation("aal")


def test_hash_ignores_order_and_history_but_not_content():
    """The stored one is that of 0.1.0."""
    cohort = small()
    assert cohort.hash == "8d64b677d8645c996b5e31f53e72b015d2d2ff0a01fa6b4b2801db5d3b28353f"
    assert cohort.select([3, 1, 0, 2]).hash == small(notes=(), excluded=()).hash == cohort.hash
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


def test_hash_covers_every_atlas():
    cohort = several()
    cc = cohort.parcellations["cc"]
    one_bit = numbers(4, 2, 5).astype(np.float32)
    one_bit[0, 0] = np.nextafter(one_bit[0, 0], np.float32(9))
    others = [
        small(),
        *(several(parcellations={"ho": other, "cc": cc}) for other in (ho(lacking=()), ho(step=4), ho(rois=("q", "p")))),
        several(parcellations={"ho": ho(at={3: one_bit}), "cc": cc}),
        *(several(parcellations=each) for each in ({"ho": ho()}, {"harvard": ho(), "cc": cc}, {"cc": cc, "ho": ho()})),
        several(atlas="AAL"),
        several(labels=[1, 0, 1, 1]),
    ]
    assert len({cohort.hash, *(one.hash for one in others)}) == 11
    assert several().hash == cohort.select([3, 1, 0, 2]).hash == cohort.hash
    # Digests that a selection takes over are those that it would compute.
    assert cohort.select([1, 2])._digests == several().select([1, 2])._digests == several()._digests[1:3]


def test_repr_and_site_names_read_well():
    assert repr(small(atlas="")) == "Cohort cohort: 4 subjects (2 patients, 2 controls) of 2 sites, 3 ROIs"
    assert repr(several()).endswith("3 ROIs (aal), 2 ROIs (ho), 5 ROIs (cc)")
    assert small(sites=["S10", "S2", "S2", "S1"]).site_names == ["S1", "S2", "S10"]
    assert natural_key("S2") < natural_key("S10")


PROXIES = """HAMD,HAMA total,ADOS_TOTAL,ADI_R_SOCIAL_TOTAL_A,SRS_RAW_TOTAL,DSM_IV_TR,DX_GROUP,On medication?,HDRS17,HDRS,hrsd
hrsd_24,qids,QIDS-SR16,qidsTotal,CARS,cars2_total,SSRI,on_ssris,onSsri,BDI,BDI2,bdi_ii,bditotal,MADRS,PHQ9,phq_9,SCQ_TOTAL,AQ,AQ_TOTAL
aq10,AQ-50,antidepressants,Antidepressant use"""
ORDINARY = """sex,age,education,viq,fiq,BMI,HANDEDNESS_SCORES,func_mean_fd,AGE_AT_SCAN,site,SITE_ID,PIQ,mean_fd,scars,oscars_won
subdivision,aquisition,aqueduct,plaque,Iraq,cardiac"""


def test_label_proxies_are_known_by_name():
    assert [name for name in re.split("[,\n]", PROXIES) if not is_proxy(name)] == []
    assert [name for name in re.split("[,\n]", ORDINARY) if is_proxy(name)] == []


def test_tables_are_matched_by_subject_and_missing_where_they_lack_one():
    table = with_tables().tables["thickness"]
    assert table.index.tolist() == ["s1", "s2", "s3", "s4"] and table.columns.tolist() == ["lh_insula", "rh_insula"]
    nan = np.nan
    np.testing.assert_array_equal(table, [[3.25, nan], [nan, nan], [2.5, 2], [2.75, 0]])
    assert with_tables().tables["volume"].dtypes.tolist() == [np.float64]
    assert repr(with_tables()).endswith("3 ROIs (aal), table thickness (2 columns), table volume (1 column)")
    more = THICKNESS.rename(index={"s3": "another"})  # a row of somebody else is left out
    assert small(tables={"t": more}).tables["t"]["lh_insula"].tolist()[:1] == [3.25]
    assert small(tables={"t": more}).tables["t"].loc["s3"].isna().all()
    by_position = small(tables={"t": np.arange(8).reshape(4, 2)})
    assert by_position.tables["t"].loc["s2"].tolist() == [2, 3] and by_position.tables["t"].columns.tolist() == ["0", "1"]
    assert small(tables={"t": {"a": pd.array([1, None, 3, 4], dtype="Int64")}}).tables["t"]["a"].isna().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("how", ["constructor", "from_arrays", "from_connectomes", "with_tables"])
def test_every_way_to_make_a_cohort_takes_tables(how):
    given, series = {"thickness": THICKNESS}, np.random.default_rng(0).normal(size=(4, 9, 3))
    named = {"y": [1, 0, 1, 0], "sites": "x", "subjects": ["s1", "s2", "s3", "s4"], "tables": given}
    made = {
        "constructor": lambda: small(tables=given),
        "from_arrays": lambda: Cohort.from_arrays(series, **named),
        "from_connectomes": lambda: Cohort.from_connectomes([np.eye(3) + 1] * 4, values="covariance", **named),
        "with_tables": lambda: small().with_tables(given),
    }[how]()
    pd.testing.assert_frame_equal(made.tables["thickness"], with_tables().tables["thickness"])


def test_with_tables_adds_and_replaces():
    cohort = small().with_tables({"thickness": THICKNESS}).with_tables({"volume": VOLUME})
    assert_same(cohort, with_tables())
    other = cohort.with_tables({"thickness": THICKNESS + 1})
    assert (
        other.tables["thickness"].loc["s1", "lh_insula"] == 4.25 and cohort.tables["thickness"].loc["s1", "lh_insula"] == 3.25
    )
    assert cohort.with_findings([Finding("no labels")]).with_tables({"thickness": THICKNESS}).findings is None
    assert (
        replace(cohort, tables={}).hash == small().hash
        and replace(cohort, sites=["z"] * 4).tables.keys() == cohort.tables.keys()
    )


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({" ": THICKNESS}, "cohort cohort: one of its tables has no name."),
        ({7: THICKNESS}, "cohort cohort: one of its tables has no name."),
        ({"t": 3}, "cohort cohort, table t is not a table (DataFrame constructor not properly called!)."),
        ({"t": pd.DataFrame(index=["s1"])}, "cohort cohort, table t has no columns."),
        ({"t": THICKNESS.set_axis(["a", "a"], axis=1)}, "cohort cohort, table t has a column name twice."),
        ({"t": THICKNESS.set_axis(["1", 1], axis=1)}, "cohort cohort, table t has a column name twice."),
        ({"t": np.ones((3, 2))}, "cohort cohort, table t has 3 rows for 4 subjects, and no subjects in its index."),
        ({"t": THICKNESS.set_axis(["s1", "s1", "s2"])}, "cohort cohort, table t: subject s1 has two rows."),
        (
            {"t": THICKNESS.set_axis(list("abc"))},
            "cohort cohort, table t: none of its rows is of a subject of the cohort, such as s1.",
        ),
        ({"t": THICKNESS.assign(side="L")}, "cohort cohort, table t: column side holds text; a table holds numbers."),
        ({"t": THICKNESS + np.inf}, "cohort cohort, table t: subject s1 has an infinite value in column lh_insula."),
        ({"t": THICKNESS * 1e100}, "cohort cohort, table t: subject s1 has the value 3.25e+100 in column lh_insula."),
        ({"t": THICKNESS + 1j}, "cohort cohort, table t: column lh_insula holds complex128; a table holds numbers."),
        (
            {"t": THICKNESS.astype("category")},
            "cohort cohort, table t: column lh_insula holds category; a table holds numbers.",
        ),
        ({"t\x1b[2J": THICKNESS}, "cohort cohort: the name of table 't\\x1b[2J' has a character that cannot be printed."),
        (
            {"t": THICKNESS.set_axis(pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")]), axis=1)},
            "cohort cohort, table t has 2 levels of names of columns; give it one, such as with reset_index.",
        ),
        (
            {"t": THICKNESS.set_axis(pd.MultiIndex.from_tuples([("x", "s1"), ("x", "s3"), ("y", "s4")]))},
            "cohort cohort, table t has 2 levels of names of rows; give it one, such as with reset_index.",
        ),
        ([THICKNESS], "cohort cohort: tables are given by name, such as tables={'thickness': frame}."),
        (THICKNESS, "cohort cohort: tables are given by name, such as tables={'thickness': frame}."),
        (
            {"t": THICKNESS.assign(DX_GROUP=1)},
            "cohort cohort, table t: column DX_GROUP reveals the diagnosis; leave it out.",
        ),
    ],
)
def test_bad_tables_are_one_sentence(tables, words):
    for make in (lambda: small(tables=tables), lambda: small().with_tables(tables)):
        with pytest.raises(InputError) as caught:
            make()
        assert str(caught.value) == words


def test_a_table_whose_rows_are_only_numbered_is_not_mixed_up():
    frame = pd.DataFrame({"a": [0.0, 1, 2, 3]})
    assert small(subjects=list("0123"), tables={"t": frame}).tables["t"]["a"].tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"its rows are numbered 0 to 3, as the subjects are in another order; set its index"):
        small(subjects=list("3120"), tables={"t": frame})
    named = frame.set_axis(list("0123"))
    assert small(subjects=list("3120"), tables={"t": named}).tables["t"]["a"].tolist() == [3, 1, 2, 0]
    assert small(subjects=list("3120"), tables={"t": frame.to_numpy()}).tables["t"]["0"].tolist() == [0, 1, 2, 3]
    assert small(subjects=list("1234"), tables={"t": frame}).tables["t"]["a"].tolist() == [0, 1, 2, 3]  # 0, 1 ... are no names
    for some in (frame.set_axis(range(2, 6)), frame[2:]):  # but these may be, of 3 and 4 and two others
        with pytest.raises(InputError, match=r"its rows are numbered 2 to \d, as some subjects are; set its index"):
            small(subjects=list("1234"), tables={"t": some})
    assert small(subjects=list("2345"), tables={"t": frame.set_axis(range(2, 6))}).tables["t"]["a"].tolist() == [0, 1, 2, 3]


def test_columns_of_tables_that_reveal_the_diagnosis_by_name():
    regions = "lh_G_oc-temp_med-Lingual_thickness,rh_S_orbital_med-olfact_area,Frontal_Med_Orb_L,L_cuneus_thickavg"
    assert not any(map(is_table_proxy, regions.split(","))) and is_proxy("lh_G_oc-temp_med-Lingual_thickness")
    assert [name for name in re.split("[,\n]", PROXIES) if not is_table_proxy(name)] == []
    with pytest.raises(InputError, match="table t: column ados reveals the diagnosis"):
        small().with_tables({"t": THICKNESS.assign(ados=1)})
    kept = small(allow_proxies=True, tables={"t": THICKNESS.assign(ados=1)})
    assert kept.tables["t"]["ados"].loc["s1"] == 1


def test_not_even_the_memory_of_a_table_or_of_phenotypes_can_be_reached():
    cohort = with_tables()
    before = cohort.hash
    table, phenotypes = cohort.tables["thickness"], cohort.phenotypes
    for array in (table.to_numpy(), table.index.values, table.columns.values, phenotypes.to_numpy(), phenotypes.index.values):
        array.flags.writeable = True
        array[0] = 7
    assert replace(cohort, notes=()).hash == cohort.hash == before
    assert cohort.tables["thickness"].index.tolist() == cohort.phenotypes.index.tolist() == ["s1", "s2", "s3", "s4"]


@pytest.mark.parametrize("how", [lambda c: c, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)),
                                 lambda c: c.select([2, 1, 0]), lambda c: c.unlabelled(),
                                 lambda c: c.with_inputs([])])  # fmt: skip
def test_no_table_of_any_cohort_can_be_edited(how):
    given = {"thickness": THICKNESS.copy()}
    cohort = small(tables=given)
    given["thickness"][:] = 0.0
    other = how(cohort)
    before = cohort.hash, other.hash
    assert cohort.hash == small(tables={"thickness": THICKNESS}).hash
    tables = other.tables
    tables["thickness"].iloc[:, :] = 9.0
    tables["more"] = THICKNESS
    assert not (other.tables["thickness"] == 9).any(axis=None) and list(other.tables) == ["thickness"]
    assert (cohort.hash, replace(other, notes=()).hash) == before


def test_selection_and_masking_carry_tables():
    cohort = with_tables(parcellations={"ho": ho()})
    chosen = cohort.select([3, 1, 0])
    assert chosen.tables["volume"].index.tolist() == ["s4", "s2", "s1"]
    assert chosen.tables["volume"]["Brain-Stem"].tolist() == [20500, 21000, 20000]
    assert cohort[1:3].tables["thickness"].loc["s3", "rh_insula"] == 2
    assert cohort.parcellation("ho").tables["volume"].index.tolist() == ["s1", "s3", "s4"]
    bare = cohort.unlabelled()
    assert bare.tables["volume"].index.tolist() == bare.subjects.tolist() == [f"subject-{i}" for i in range(1, 5)]
    np.testing.assert_array_equal(bare.tables["thickness"], cohort.tables["thickness"])
    renamed = cohort._changed(subjects=np.array(["p4", "p3", "p2", "p1"]))  # as in shared reports
    assert renamed.tables["volume"].index.tolist() == ["p4", "p3", "p2", "p1"]
    # A subject without a row is kept, also alone and among others who have none.
    assert cohort.select(subjects=["s2"]).tables["thickness"].isna().all(axis=None)
    assert replace(cohort.select(subjects=["s2"]), notes=()).tables["thickness"].shape == (1, 2)
    assert cohort[[]].tables["thickness"].shape == (0, 2)
    assert cohort.to_connectomes().tables.keys() == cohort.tables.keys()


def test_hash_covers_tables_but_not_their_order():
    cohort = with_tables()
    thickness, volume = cohort.tables["thickness"], cohort.tables["volume"]
    one_bit, gap = thickness.copy(), thickness.copy()
    one_bit.iloc[0, 0], gap.iloc[0, 0] = np.nextafter(3.25, 9), np.nan
    others = [
        small(),
        *(
            small(tables={"thickness": each, "volume": volume})
            for each in (one_bit, gap, thickness[["rh_insula", "lh_insula"]])
        ),
        small(tables={"thickness": thickness.rename(columns={"lh_insula": "lh_cuneus"}), "volume": volume}),
        *(
            small(tables=each)
            for each in ({"thickness": thickness}, {"volume": volume}, {"thick": thickness, "volume": volume})
        ),
        small(tables={"thickness": volume, "volume": thickness}),
        small(tables={"thickness": thickness.iloc[::-1].set_axis(thickness.index), "volume": volume}),
    ]
    assert len({cohort.hash, *(one.hash for one in others)}) == len(others) + 1
    assert (
        cohort.select([3, 1, 0, 2]).hash
        == small(tables={"volume": VOLUME.iloc[::-1], "thickness": thickness}).hash
        == cohort.hash
    )
    assert small(tables={"thickness": thickness.abs(), "volume": volume}).hash == cohort.hash  # one zero
    odd = thickness.copy()
    odd.iloc[1, 0] = np.array([0x7FF8000000000001], dtype=np.uint64).view(np.float64)[0]
    assert small(tables={"thickness": odd, "volume": volume}).hash == cohort.hash  # one NaN
    assert small(tables={}).hash == small().hash
    assert cohort.select([1, 2])._digests == with_tables()._digests[1:3] == with_tables().select([1, 2])._digests
    assert cohort.with_tables({"thickness": one_bit}).hash == others[1].hash  # not the digests from before
    ordered = small(tables={"volume": VOLUME, "thickness": thickness}).select([2, 0, 3, 1]).in_order()
    assert list(ordered.tables) == ["thickness", "volume"] and ordered.tables["volume"].index.tolist() == [
        "s1",
        "s2",
        "s3",
        "s4",
    ]


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, edge_effect=2.0)


def arrays(cohort, **changes):
    given = {
        "series": list(cohort.series), "y": cohort.labels, "sites": cohort.sites, "phenotypes": cohort.phenotypes,
        "rois": cohort.rois, "tr": cohort.tr, "atlas": cohort.atlas, "name": cohort.name,
    }  # fmt: skip
    return Cohort.from_arrays(**given | changes)


def test_from_arrays_is_the_same_cohort(cohort):
    again = arrays(cohort)
    assert again.hash == cohort.hash and again.inputs == ("sex", "age", "education")
    assert again.subjects.tolist() == cohort.subjects.tolist()
    mixed = cohort.phenotypes.sample(frac=1, random_state=1)
    assert arrays(cohort, phenotypes=mixed, subjects=cohort.subjects).hash == cohort.hash
    words = np.where(cohort.labels == 1, "ASD", "TD")
    assert arrays(cohort, y=words, patient="ASD").hash == cohort.hash
    assert arrays(cohort, y=pd.Series(cohort.labels.astype(bool))).hash == cohort.hash
    assert arrays(cohort, phenotypes=cohort.phenotypes.to_dict("list"), subjects=cohort.subjects).hash == cohort.hash


def test_from_arrays_by_default():
    series = np.random.default_rng(0).normal(size=(4, 50, 3))
    made = Cohort.from_arrays(
        series, [0, 1, np.nan, -1], "Oslo", {"age": [1, 2, 3, 4], "iq": [9, 8, 7, 6], "sex": list("MFMF")}
    )
    assert made.subjects.tolist() == ["sub-0001", "sub-0002", "sub-0003", "sub-0004"]
    assert made.labels.tolist() == [0, 1, -1, -1] and made.sites.tolist() == ["Oslo"] * 4
    assert made.rois == ("1", "2", "3") and made.inputs == ("age",) and np.isnan(made.tr).all()
    assert Cohort.from_arrays(series, [0, 1, 0, 1], ["a", "a", "b", "b"], {"iq": range(4)}, inputs=["iq"]).inputs == ("iq",)
    np.testing.assert_array_equal(made.series[2], series[2].astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.arange(52) % 3}, "y has 3 classes (0, 1, 2); a cohort has patients and controls."),
        ({"y": np.where(np.arange(52) % 2, "a", "b")}, "y holds b, a; name the value of patients, such as patient='a'."),
        ({"patient": "c"}, "patient='c' does not occur in y"),
        ({"y": [0, 1]}, "52 subjects but 2 labels."),
        ({"sites": ["x"] * 51 + [None]}, "sites has a missing value; name the site of every subject."),
        ({"sites": ["x"] * 3}, "52 subjects but 3 sites."),
        ({"series": []}, "series is empty."),
        ({"series": np.zeros((52, 30))}, "series holds arrays of shape (time, ROI), but the first has (30,)."),
        ({"series": "nan"}, "subject east-0002: NaN at volume 4 of ROI roi-003 (1 such value)."),
        ({"rois": ["a"]}, "not (time, 1)."),
        ({"phenotypes": pd.DataFrame({"age": [1, 2]})}, "52 subjects but 2 phenotype rows."),
        ({"phenotypes": "one missing", "subjects": "own"}, "subject east-0001 has no row in phenotypes, although others have."),
        ({"inputs": ["iq"]}, "input iq is not a phenotype column."),
    ],
)  # fmt: skip
def test_bad_arrays_are_one_sentence(cohort, changes, message):
    broken = [np.array(one) for one in cohort.series]
    broken[1][3, 2] = np.nan
    values = {"nan": broken, "one missing": cohort.phenotypes.iloc[1:], "own": cohort.subjects}
    changes = {
        key: values.get(value, value) if isinstance(value, str) and key != "patient" else value
        for key, value in changes.items()
    }
    with pytest.raises(InputError) as error:
        arrays(cohort, **changes)
    assert message in str(error.value)


def test_slices_masks_and_positions(cohort):
    assert cohort[:10].subjects.tolist() == cohort.subjects[:10].tolist()
    assert cohort[::-1].hash == cohort.hash and cohort[-1].subjects.tolist() == [cohort.subjects[-1]]
    assert cohort[cohort.labels == 1].labels.tolist() == [1] * int(cohort.labels.sum())
    assert cohort[[3, 1]].subjects.tolist() == cohort.subjects[[3, 1]].tolist()
    assert cohort[cohort.phenotypes["age"] > 30].hash == cohort.query("age > 30").hash
    assert len(cohort[[]]) == len(cohort[5:5]) == 0
    assert [one.subjects[0] for one in cohort] == cohort.subjects.tolist()
    for which, message in (
        ("NYU", "select subjects by position or mask"),
        ([True, False], "boolean index did not match"),
        ([100], "out of bounds"),
    ):
        with pytest.raises(InputError, match=message):
            cohort[which]
    with pytest.raises(IndexError):
        cohort[100]


def test_query(cohort):
    assert set(cohort.query("site == 'east'").sites) == {"east"}
    chosen = cohort.query("label == 1 and volumes > 60 and site in ['east', 'west']")
    expected = (cohort.labels == 1) & (cohort.lengths > 60) & np.isin(cohort.sites, ["east", "west"])
    assert chosen.subjects.tolist() == cohort.subjects[expected].tolist()
    assert len(cohort.query("age < 0")) == 0
    for expression in ("sites == 'east'", "age >", "age + 1", ""):
        with pytest.raises(InputError, match=r"cannot evaluate the query.*its columns are site, label, tr, volumes, sex"):
            cohort.query(expression)


def test_to_frame_and_back(cohort):
    frame = cohort.to_frame()
    assert frame.columns.tolist() == ["site", "label", "tr", "volumes", "sex", "age", "education"]
    assert frame.index.tolist() == cohort.subjects.tolist()
    pd.testing.assert_frame_equal(frame[["sex", "age", "education"]], cohort.phenotypes, check_names=False)
    again = arrays(cohort, y=frame["label"], sites=frame["site"], phenotypes=frame[["sex", "age", "education"]], tr=frame["tr"])
    assert again.hash == cohort.hash
    named = arrays(cohort, phenotypes=cohort.phenotypes.assign(site="x"))
    assert named.to_frame().columns.tolist()[-1] == "phenotype_site" and set(named.query("site == 'east'").sites) == {"east"}


def test_study_of_a_cohort_in_memory(cohort, tmp_path):
    study = {"cohort": cohort, "methods": ["fc-logistic", "prior"], "targets": ["east", "west"]}
    summary = m2lgdg.run_study(study, tmp_path / "memory")
    cohort.save(tmp_path / "tiny.cohort")
    m2lgdg.run_study(study | {"cohort": str(tmp_path / "tiny.cohort")}, tmp_path / "file")
    pd.testing.assert_frame_equal(read_predictions(tmp_path / "memory"), read_predictions(tmp_path / "file"))
    assert (summary.done, summary.folder) == (4, str(tmp_path / "memory"))
    assert m2lgdg.run_study(study, tmp_path / "memory").reused == 4
    assert m2lgdg.run_study(tmp_path / "memory" / "study.json", tmp_path / "memory").reused == 4
    with pytest.raises(InputError, match="belongs to another study"):
        m2lgdg.run_study(study | {"cohort": cohort[1:]}, tmp_path / "memory")
    scores = summary.scores()
    assert scores.index.tolist() == ["fc-logistic", "prior"] and scores.columns.tolist() == ["east", "west", "mean"]
    part = read_predictions(tmp_path / "memory").query("method == 'fc-logistic' and target == 'east'")
    assert scores.loc["fc-logistic", "east"] == m2lgdg.evaluate(part["label"], part["proba"])["AUC"]
    assert scores.loc["prior", "mean"] == 0.5


def test_methods_of_a_study_can_be_objects(cohort, tmp_path):
    svm = m2lgdg.from_sklearn(SVC(kernel="linear"), name="an-svm")
    try:
        methods = [svm, m2lgdg.make("fc-logistic", phenotypes=True), "prior"]
        summary = m2lgdg.run_study({"cohort": cohort, "methods": methods, "targets": ["east"]}, tmp_path / "out")
    finally:
        del m2lgdg.METHODS["an-svm"]
    assert summary.failed == [] and summary.done == 3
    predictions = read_predictions(tmp_path / "out").set_index("method")["proba"]
    (fold,) = m2lgdg.leave_one_site_out(cohort, ["east"])
    expected = m2lgdg.make("fc-logistic", phenotypes=True).fit(fold.source).predict_proba(fold.target)[:, 1]
    np.testing.assert_allclose(np.sort(predictions["fc-logistic"]), np.sort(expected), rtol=1e-9)


def cells(html):
    return re.findall(r"<td>(.*?)</td>", html)


def test_html(cohort, tmp_path):
    html = cohort._repr_html_()
    assert cells(html)[:5] == ["east", "10", "5", "5", "0"] and "52 subjects" in html
    method = m2lgdg.make("fc-svm", site_folds=3)
    assert "Not fitted." in method._repr_html_() and cells(method._repr_html_())[:4] == ["atlases", "first", "site_folds", "3"]
    assert "Fitted on 23 patients and 29 controls of 4 sites." in method.fit(cohort)._repr_html_()
    check = m2lgdg.check_cohort(cohort)
    assert check.findings and all(escape(one.text) in check._repr_html_() for one in check.findings)
    summary = m2lgdg.run_study({"cohort": cohort, "methods": ["fc-logistic"], "targets": ["east"]}, tmp_path / "out")
    assert "1 of 1 cells done, 0 failed" in summary._repr_html_()
    assert cells(summary._repr_html_())[0] == "fc-logistic"


def test_html_is_escaped(cohort):
    odd = arrays(cohort, sites=np.where(cohort.sites == "east", "<script>", cohort.sites), name="<b>")
    assert "<script>" not in odd._repr_html_() and "&lt;script&gt;" in odd._repr_html_() and "<b>:" not in odd._repr_html_()


def test_phenotypes_of_numbered_subjects_are_not_mixed_up():
    """A dict is in the order of the arrays, a frame follows an index of ids, and what could be both is refused."""
    series = np.random.default_rng(0).normal(size=(6, 30, 3))
    ids, ages, y = [3, 0, 5, 1, 4, 2], np.array([30.0, 31, 32, 33, 34, 35]), [0, 1, 0, 1, 0, 1]
    made = Cohort.from_arrays(series, y, "Oslo", {"age": ages}, subjects=ids)
    assert made.subjects.tolist() == [str(one) for one in ids] and made.phenotypes["age"].tolist() == ages.tolist()
    made = Cohort.from_arrays(series, y, "Oslo", {"age": pd.Series(ages)}, subjects=ids)
    assert made.phenotypes["age"].tolist() == ages.tolist()
    frame = pd.DataFrame({"age": ages})
    with pytest.raises(InputError, match=r"rows of phenotypes are numbered 0 to 5, .* in another order; set phenotypes\.index"):
        Cohort.from_arrays(series, y, "Oslo", frame, subjects=ids)
    assert Cohort.from_arrays(series, y, "Oslo", frame, subjects=range(6)).phenotypes["age"].tolist() == ages.tolist()
    assert Cohort.from_arrays(series, y, "Oslo", frame, subjects=range(10, 16)).phenotypes["age"].tolist() == ages.tolist()
    shuffled = frame.set_axis(ids, axis=0).loc[[5, 4, 3, 2, 1, 0]]
    made = Cohort.from_arrays(series, y, "Oslo", shuffled, subjects=ids)
    assert made.phenotypes["age"].tolist() == ages.tolist()
    named = pd.Series(y, index=ids).sort_index()
    trs = pd.Series(ages / 10, index=ids).sort_index()
    made = Cohort.from_arrays(series, named, pd.Series(list("aabbcc"), index=ids).sort_index(), subjects=ids, tr=trs)
    assert made.labels.tolist() == y and made.sites.tolist() == list("aabbcc") and made.tr.tolist() == (ages / 10).tolist()
    with pytest.raises(InputError, match=r"rows of y are numbered 0 to 5, .* in another order"):
        Cohort.from_arrays(series, pd.Series(y), "Oslo", subjects=ids)
    mistyped = pd.Series(y, index=list("abcdef"))[::-1].rename({"c": "C"})
    with pytest.raises(InputError, match="subject c has no row in y, although others have"):
        Cohort.from_arrays(series, mistyped, "Oslo", subjects=list("abcdef"))
    assert Cohort.from_arrays(series, pd.Series(y, index=list("uvwxyz")), "Oslo", subjects=ids).labels.tolist() == y


def test_a_tr_in_another_unit_and_sites_with_odd_digits():
    series, y = np.random.default_rng(0).normal(size=(4, 30, 3)), [0, 1, 0, 1]
    for tr in (0.002, [2.0, 2.0, 0.002, np.nan], 2000):
        with pytest.raises(InputError, match=r"a TR of 0\.002 s is below|a TR of 2000 s is above"):
            Cohort.from_arrays(series, y, "Oslo", tr=tr)
    assert Cohort.from_arrays(series, y, ["\u00b2", "10", "9", "\u2460"]).site_names == ["9", "10", "\u00b2", "\u2460"]


@pytest.mark.parametrize(
    "form", ["correlation", "covariance", "zero diagonal", "infinite diagonal", "upper half", "rounded", "directed"]
)
def test_a_connectome_is_no_series(form):
    fc = np.corrcoef(np.random.default_rng(0).normal(size=(8, 50)))
    forms = {
        "correlation": fc,
        "covariance": np.cov(np.random.default_rng(0).normal(size=(8, 50)) * np.arange(1, 9)[:, None]),
        "zero diagonal": fc - np.eye(8),
        "infinite diagonal": np.where(np.eye(8) > 0, np.inf, np.arctanh(np.where(np.eye(8) > 0, 0, fc))),
        "upper half": np.triu(fc, 1),
        "directed": fc + 0.01 * np.triu(np.random.default_rng(2).normal(size=(8, 8)), 1),
        "rounded": np.round(fc, 5) + np.triu(np.full((8, 8), 1e-6), 1),
    }
    other = np.random.default_rng(1).normal(size=(8, 8))  # as many volumes as ROIs
    assert len(Cohort.from_arrays([other, other + 1], [0, 1], "Oslo")) == 2
    with pytest.raises(
        InputError, match=r"subject sub-0002: a symmetric or triangular matrix, .* is a connectome, not a series"
    ):
        Cohort.from_arrays([other, forms[form]], [0, 1], "Oslo")
