"""The file of a cohort: bit for bit, in float16, damaged, in memory; and files of 0.1.0."""

import json
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
from breakage import header, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_cohort import HO, LENGTHS, assert_same, ho, several, small, with_tables

from m2lgdg import Cohort, InputError
from m2lgdg.cohort import Parcellation
from m2lgdg.data.check import duplicate_flags
from m2lgdg.findings import Exclusion, problems
from m2lgdg.study.cells import cohort_in_memory

FORMER = Path(__file__).parent / "data" / "cohort-0.1.0.safetensors"  # written by 0.1.0, with float16 series


@pytest.fixture(scope="module")
def former():
    return Cohort.load(FORMER)


def test_a_file_of_0_1_0_is_read_and_written_again(former, tmp_path):
    assert former.hash == "34b0d6984f9168f81d018a0aec42edb627235b8652c2a4ec5e6a88ed7d36377f"
    assert former.atlases == ("aal", "ho") and former.parcellations["ho"].present.tolist() == [1, 1, 0, 1, 1, 1]
    again = Cohort.load(former.save(tmp_path / "again.cohort"))
    held = Cohort.load(tmp_path / "again.cohort", in_memory=True)
    for one in (again, held):
        assert (one.hash, one.excluded, one.notes, one.findings) == (
            former.hash,
            former.excluded,
            former.notes,
            former.findings,
        )
    with pytest.raises(ValueError, match="WRITEABLE"):
        held.series[0].flags.writeable = True


def test_its_exclusions_name_nobody_in_general(former):
    assert former.excluded == (
        Exclusion("x1", "a", "head motion", "func_mean_fd is not below 0.2", "value 0.31"),
        Exclusion("x2", "b", "duplicate", detail="same scan as s1, which is kept"),
        Exclusion("x3", "b", "unusable file", detail="x3.npy: subject x3: NaN at volume 1 of ROI p (1 such value)."),
        Exclusion("x4", "a", "left out by an inclusion list", detail="mine.csv"),
        Exclusion("x5", "S4", "site left out", "its subjects duplicate those of S14"),
        Exclusion("x6", "a", "listed but no series file"),
    )
    assert [one.expected for one in former.excluded] == [True, True, False, True, True, False]
    assert former.excluded[0].reason == "head motion: func_mean_fd is not below 0.2 (value 0.31)"
    assert former.excluded[2].reason.startswith("x3.npy: ") and former.excluded[2].general == "unusable file"


def test_its_findings_keep_their_sentences(former):
    found = problems(former.findings)
    assert len(former.findings) == 20 and len(found) == 13 and len(problems(former.findings, new_site=True)) == 10
    assert found[0].text.startswith("s0 (a) and s3 (b) have identical series")
    assert found[0].anonymous.startswith("A subject (a) and another subject (b) have identical series")
    assert [bool(flags) for flags in duplicate_flags(former)] == [True, False, False, True, False, False]
    assert former.notes[0].kind == "label"


@pytest.mark.parametrize("lacking", [None, (), (1,), (0, 1, 2, 3)])
def test_round_trip_is_bit_exact_and_mapped(tmp_path, tiny, lacking):
    others = {} if lacking is None else {"ho": ho(lacking), "a b/é": ho((3,), rois=("x", "y"))}
    for cohort in (small(notes=("é",), parcellations=others), *([tiny] if lacking is None else [])):
        loaded = Cohort.load(cohort.save(tmp_path / "c.cohort"))
        assert_same(cohort, loaded)
        for one in (loaded, *loaded.parcellations.values()):
            base = next((each for each in one.series if each is not None), None)
            while base is not None and not isinstance(base, np.memmap):
                assert base.base is not None  # read from disk when first used
                base = base.base


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tables_come_back_bit_for_bit(tmp_path, dtype):
    odd = pd.DataFrame({"é/ 1": [1 / 3, np.nan, -0.0, 5e-324]}, index=["s1", "s2", "s3", "s4"])
    for cohort in (with_tables(), several(tables={"a b": odd, "c": odd[::-1]}), with_tables().to_connectomes()):
        path = cohort.save(tmp_path / "c.cohort", dtype)
        loaded, held = Cohort.load(path), Cohort.load(path, in_memory=True)
        assert list(loaded.tables) == list(cohort.tables) and loaded.hash == held.hash
        for name, table in cohort.tables.items():
            assert loaded.tables[name].columns.tolist() == table.columns.tolist()
            for one in (loaded, held):
                bits = one.tables[name].to_numpy().view(np.uint64)
                np.testing.assert_array_equal(bits, table.to_numpy().view(np.uint64))
    assert_same(with_tables(), Cohort.load(with_tables().save(tmp_path / "again.cohort")))
    nobody = Cohort.load(with_tables().select(subjects=["s2"]).save(tmp_path / "one.cohort"))
    assert nobody.tables["thickness"].isna().all(axis=None)


def test_a_file_without_tables_is_as_before(tmp_path):
    path = small().save(tmp_path / "c.cohort")
    assert "tables" not in stored_header(path) and Cohort.load(path).tables == {}


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_cohort_survives_its_file(tmp_path_factory, data):
    subjects = data.draw(st.lists(text.filter(bool), min_size=1, max_size=5, unique=True))
    n, rois = len(subjects), data.draw(st.integers(2, 4))
    series = []
    for _ in range(n):
        volumes = data.draw(st.integers(2, 6).filter(lambda volumes: volumes != rois))  # a square may be a connectome
        one = data.draw(hnp.arrays(np.float32, (volumes, rois), elements=finite))
        one[0, :2], one[1, :2] = (0, 3), (1, 0)  # not constant
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
        tables={
            name: pd.DataFrame(
                data.draw(hnp.arrays(np.float64, (n, 2), elements=st.floats(-1e100, 1e100) | st.just(np.nan))), index=subjects
            )
            for name in data.draw(st.lists(text.filter(str.isprintable).filter(str.strip), max_size=2, unique=True))
        },
    )
    path = tmp_path_factory.mktemp("any") / "c.cohort"
    assert_same(cohort, Cohort.load(cohort.save(path)))


@given(st.integers(0, 1000), st.floats(0.01, 1e4), st.floats(-1e4, 1e4))
@settings(max_examples=15, deadline=None)
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


def test_float16_is_scaled_by_atlas(tmp_path):
    rng = np.random.default_rng(0)
    series = [(1000 * rng.normal(size=(length, 2)) + 1e5).astype(np.float32) for length in LENGTHS]
    series[2] = None
    cohort = several(parcellations={"ho": Parcellation(HO, series)})
    path = cohort.save(tmp_path / "c.cohort", "float16")
    loaded = Cohort.load(path)
    for one, other in zip(series, loaded.parcellations["ho"].series, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            reach = np.abs(one - one.mean(axis=0)).max(axis=0)
            assert (np.abs(one - other).max(axis=0) <= reach / 2000 + 0.02).all()
    alone = Cohort.load(small().save(tmp_path / "alone", "float16"))
    assert all((one == other).all() for one, other in zip(loaded.series, alone.series, strict=True))
    wide = Parcellation(HO, [None, np.array([[3e38, 1], *[[-3e38, 0]] * 5]), None, None])
    with pytest.raises(InputError, match="subject s2 is out of range for float16; save it as float32"):
        several(parcellations={"ho": wide}).save(tmp_path / "c.cohort", "float16")


def stored_header(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["cohort"])


def edited(**changes):
    """Changes the entry of the second atlas in the header of a cohort file."""

    def spoil(path):
        head = stored_header(path)
        head["parcellations"][0] |= changes
        header(path, cohort=json.dumps(head))

    return spoil


def cut(path):
    tensors(path, **{"atlas-0.series": lambda series: series[:-1]})


def flipped(path):
    tensors(path, **{"atlas-0.series": lambda series: series + np.float32(1)})


def wider(path):
    tensors(path, **{"atlas-0.series": lambda series: np.c_[series, series[:, :1]]})


def empty_list(path):
    header(path, cohort=json.dumps(stored_header(path) | {"parcellations": []}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "is damaged and cannot be read as a cohort (the series of atlas ho do not have the volumes"),
        (wider, "is damaged and cannot be read as a cohort ("),
        (flipped, "was altered after it was written"),
        (empty_list, "was altered after it was written"),
        (edited(name="harvard"), "was altered after it was written"),
        (edited(rois=["q", "p"]), "was altered after it was written"),
        (edited(name="cc"), "is damaged and cannot be read as a cohort (atlas cc is listed twice"),
        (edited(name="aal"), "is damaged and cannot be read as a cohort (cohort cohort: atlas aal appears 2 times"),
        (edited(name=7), "is damaged and cannot be read as a cohort (cohort cohort: one of its atlases has no name"),
        (edited(lacking=[9]), "is damaged and cannot be read as a cohort (atlas ho is listed twice, or for subjects"),
        (edited(lacking=[0]), "is damaged and cannot be read as a cohort (the series of atlas ho do not have the volumes"),
        (edited(lacking=None), "is damaged and cannot be read as a cohort"),
        (edited(rois=None), "is damaged and cannot be read as a cohort"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path, spoil, words, dtype):
    path = several().save(tmp_path / "c.cohort", dtype)
    spoil(path)
    with pytest.raises(InputError) as caught:
        Cohort.load(path)
    assert str(caught.value).startswith(f"{path} {words}")
    assert "\n" not in str(caught.value)


def edited_table(**changes):
    """Changes the entry of the first table in the header of a cohort file."""

    def spoil(path):
        head = stored_header(path)
        head["tables"][0] |= changes
        header(path, cohort=json.dumps(head))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: tensors(path, **{"table-0": lambda table: table + 1}), "was altered after it was written"),
        (lambda path: tensors(path, **{"table-0": lambda table: table[:-1]}), "is damaged and cannot be read as a cohort ("),
        (lambda path: tensors(path, **{"table-0": lambda table: table[:, :1]}), "is damaged and cannot be read as a cohort ("),
        (
            lambda path: tensors(path, **{"table-0": lambda table: table + np.inf}),
            "is damaged and cannot be read as a cohort (",
        ),
        (edited_table(name="other"), "was altered after it was written"),
        (edited_table(name="volume"), "was altered after it was written"),
        (edited_table(name=None), "is damaged and cannot be read as a cohort (cohort cohort: one of its tables has no name"),
        (edited_table(columns=["rh_insula", "lh_insula"]), "was altered after it was written"),
        (
            edited_table(columns=["a", "a"]),
            "is damaged and cannot be read as a cohort (cohort cohort, table thickness has a col",
        ),
        (edited_table(columns=None), "was altered after it was written"),
        (lambda path: header(path, cohort=json.dumps(stored_header(path) | {"tables": 3})), "is damaged and cannot be read"),
        (
            lambda path: header(path, cohort=json.dumps(stored_header(path) | {"tables": []})),
            "was altered after it was written",
        ),
    ],
)
def test_a_damaged_table_is_refused_in_a_sentence(tmp_path, spoil, words):
    path = with_tables().save(tmp_path / "c.cohort")
    spoil(path)
    with pytest.raises(InputError) as caught:
        Cohort.load(path)
    assert str(caught.value).startswith(f"{path} {words}") and "\n" not in str(caught.value)


def test_every_cut_and_flipped_byte_is_an_input_error(tmp_path):
    content = several(tr=2.0).save(tmp_path / "c.cohort").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "bad.cohort"
    for end in rng.integers(0, len(content), 20):
        path.write_bytes(content[:end])
        with pytest.raises(InputError):
            Cohort.load(path)
    (size,) = struct.unpack("<Q", content[:8])
    for place in rng.integers(8 + size, len(content), 20):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"altered|damaged"):
            Cohort.load(path)


@pytest.mark.parametrize("shorter", [False, True])
def test_a_file_that_is_overwritten_under_a_cohort_is_noticed(tmp_path, shorter):
    """Copied over, so that the map shows the other's series; a map beyond the end of the file would end the process."""
    cohort = several()
    path = cohort.save(tmp_path / "c.cohort")
    loaded = Cohort.load(path)
    part, digest = loaded.select([2, 0]), loaded.hash
    other = several(series=[-one for one in cohort.series])
    content = (other.select([0]) if shorter else other).save(tmp_path / "other.cohort").read_bytes()
    path.write_bytes(content)
    for one in (loaded, part, loaded.with_inputs([])):
        with pytest.raises(InputError, match=r"c\.cohort was overwritten after its cohort was read"):
            one.hash  # noqa: B018
        with pytest.raises(InputError, match="read it again"):
            one.save(tmp_path / "again.cohort")
    assert not (tmp_path / "again.cohort").exists()
    path.write_bytes(cohort.save(tmp_path / "same.cohort").read_bytes())
    assert loaded.hash == digest and part.hash == cohort.select([2, 0]).hash


def test_a_file_that_is_replaced_leaves_a_cohort_as_it_was(tmp_path):
    path = several().save(tmp_path / "c.cohort")
    loaded = Cohort.load(path)
    loaded.select([0]).save(path)
    assert loaded.hash == several().hash and len(Cohort.load(path)) == 1
    path.unlink()
    assert loaded.hash == several().hash


def test_a_worker_reads_every_atlas_into_memory(tmp_path):
    for dtype in ("float32", "float16"):
        path = several().save(tmp_path / dtype, dtype)
        held = cohort_in_memory(str(path), ("age",), False, None)
        assert held.hash == Cohort.load(path).hash
        with pytest.raises(ValueError, match="WRITEABLE"):
            held.parcellations["cc"].series[0].flags.writeable = True


def test_nothing_is_left_behind_when_writing_fails(tmp_path, tiny, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(InputError, match=r"cannot write .*c\.cohort: No space left on device"):
        tiny.save(tmp_path / "c.cohort")
    assert list(tmp_path.iterdir()) == []
