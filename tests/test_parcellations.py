"""Several atlases of one scan in a cohort: what it holds and refuses, its hash, its file."""

import hashlib
import json
import struct
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from breakage import header, tensors

from m2lgdg import Cohort, InputError
from m2lgdg.cohort import Parcellation
from m2lgdg.findings import Exclusion, Finding

LENGTHS = (4, 6, 5, 4)
HO = ("p", "q")


def numbers(volumes, rois, step):
    """Exact binary fractions, so that the stored hashes below hold on every machine."""
    return (np.arange(volumes * rois).reshape(volumes, rois) * step % 11 - 5) / 4


def one_atlas(**changes):
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


def ho(lacking=(1,), step=5):
    return Parcellation(HO, [None if i in lacking else numbers(length, 2, step) for i, length in enumerate(LENGTHS)])


def several(**changes):
    cc = Parcellation([str(i) for i in range(1, 6)], [numbers(length, 5, 3) for length in LENGTHS])
    return one_atlas(**({"parcellations": {"ho": ho(), "cc": cc}} | changes))


def file_digest(path):
    """SHA-256 of a cohort file; the library writes the entries of its header in any order."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    entries = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True)
    return hashlib.sha256(content[:8] + entries.encode() + content[8 + size :]).hexdigest()


def assert_same_series(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype == np.float32
            np.testing.assert_array_equal(one, other)


def test_one_atlas_keeps_its_hash():
    """Values of the version before a cohort could hold several atlases."""
    cohort = one_atlas()
    assert cohort.hash == "8d64b677d8645c996b5e31f53e72b015d2d2ff0a01fa6b4b2801db5d3b28353f"
    assert cohort._digests[0].hex().startswith("4cfe6dec9e0698b3")


def test_atlases_and_the_cohort_of_each():
    cohort = several(truth={"rois": ["a"]})
    assert one_atlas().atlases == ("aal",)
    assert one_atlas(atlas="").atlases == ("",)
    assert cohort.atlases == ("aal", "ho", "cc")
    first = cohort.parcellation("aal")
    assert first.hash == one_atlas().hash
    assert (first.atlases, first.truth) == (("aal",), {"rois": ["a"]})
    part = cohort.parcellation("ho")
    assert (part.atlas, part.rois, part.parcellations) == ("ho", HO, {})
    assert part.subjects.tolist() == ["s1", "s3", "s4"]
    assert part.sites.tolist() == ["x", "y", "y"]
    assert part.labels.tolist() == [1, 1, 0]
    assert part.phenotypes["age"].tolist() == [20.5, 31, 44]
    np.testing.assert_array_equal(part.tr, [2.0, 1.5, np.nan])
    assert (part.inputs, part.excluded, part.notes, part.truth) == (("age",), cohort.excluded, cohort.notes, None)
    assert_same_series(part.series, [numbers(length, 2, 5).astype(np.float32) for length in (4, 5, 4)])
    assert len(cohort.parcellation("cc")) == 4
    assert one_atlas().parcellation("aal").subjects.tolist() == ["s1", "s2", "s3", "s4"]
    # A cohort of one atlas that was made from several is as one that was read with this atlas alone.
    alone = replace(part.select([0, 1, 2]), name="cohort")
    assert alone.hash == part.hash


def test_an_unknown_atlas_lists_what_there_is():
    with pytest.raises(InputError, match=r"^cohort cohort has no atlas power; it has aal, ho, cc\.$"):
        several().parcellation("power")
    with pytest.raises(InputError, match=r"^cohort cohort has no atlas aal; its only atlas has no name\.$"):
        one_atlas(atlas="").parcellation("aal")


def bad(position, series):
    listed = list(ho().series)
    listed[position] = series
    return Parcellation(HO, listed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"atlas": ""}, "cohort cohort: its first atlas has no name, so it cannot hold atlas ho too."),
        ({"parcellations": {"": ho()}}, "cohort cohort: one of its atlases has no name."),
        ({"parcellations": {" ": ho()}}, "cohort cohort: one of its atlases has no name."),
        ({"parcellations": {"aal": ho()}}, "cohort cohort: atlas aal appears 2 times."),
        ({"parcellations": {"ho": Parcellation(HO, [None])}}, "cohort cohort, atlas ho: 4 subjects but 1 series."),
        ({"parcellations": {"ho": replace(ho(), rois=("p", "p"))}}, "cohort cohort, atlas ho: ROI p appears 2 times."),
        (
            {"parcellations": {"ho": replace(ho(), rois=("p", "q", "r"))}},
            "cohort cohort, atlas ho: the series of subject s1 has shape (4, 2), not (time, 3).",
        ),
        (
            {"parcellations": {"ho": bad(2, numbers(4, 2, 5))}},
            "cohort cohort, atlas ho: subject s3 has 4 volumes, but 5 in atlas aal.",
        ),
        (
            {"parcellations": {"ho": bad(3, np.full((4, 2), 2.0))}},
            "cohort cohort, atlas ho: subject s4: every ROI is constant.",
        ),
        (
            {"parcellations": {"ho": bad(0, np.where(np.eye(4, 2, 1), np.nan, numbers(4, 2, 5)))}},
            "cohort cohort, atlas ho: subject s1: NaN at volume 1 of ROI q (1 such value).",
        ),
    ],
)
def test_refuses_in_a_sentence(changes, words):
    with pytest.raises(InputError) as caught:
        several(**changes)
    assert str(caught.value) == words


def test_series_cannot_be_changed_in_place():
    given = numbers(4, 2, 5).astype(np.float32)
    cohort = several(parcellations={"ho": bad(0, given)})
    with pytest.raises(ValueError, match="read-only"):
        cohort.parcellations["ho"].series[0][0, 0] = 7
    given[0, 0] = 7
    assert cohort.parcellations["ho"].series[0][0, 0] != 7


def test_selection_masking_and_inputs_carry_every_atlas():
    cohort = several()
    part = cohort.select([3, 1, 0])
    assert part.atlases == ("aal", "ho", "cc")
    assert part.parcellations["ho"].present.tolist() == [True, False, True]
    assert_same_series(part.parcellations["cc"].series, [cohort.parcellations["cc"].series[i] for i in (3, 1, 0)])
    assert part.parcellation("ho").subjects.tolist() == ["s4", "s1"]
    assert cohort.select(sites=["x"]).parcellation("ho").subjects.tolist() == ["s1"]
    bare = cohort.unlabelled()
    assert bare.parcellation("ho").subjects.tolist() == ["subject-1", "subject-3", "subject-4"]
    assert cohort.with_inputs([]).atlases == cohort.atlases
    assert replace(cohort, sites=["z"] * 4).atlases == cohort.atlases
    checked = cohort.with_findings([Finding("no labels")])
    assert checked.atlases == cohort.atlases
    assert checked.parcellation("aal").findings is None  # those of all atlases


def test_repr_lists_the_atlases():
    expected = "Cohort cohort: 4 subjects (2 patients, 2 controls) of 2 sites, 3 ROIs (aal), 2 ROIs (ho), 5 ROIs (cc)"
    assert repr(several()) == expected


def test_hash_covers_every_atlas():
    cohort = several()
    cc = cohort.parcellations["cc"]
    one_bit = [None if one is None else np.array(one) for one in ho().series]
    one_bit[3][0, 0] = np.nextafter(one_bit[3][0, 0], np.float32(9))
    others = [
        one_atlas(),
        several(parcellations={"ho": ho()}),
        several(parcellations={"ho": ho(lacking=()), "cc": cc}),
        several(parcellations={"ho": ho(step=4), "cc": cc}),
        several(parcellations={"ho": Parcellation(HO, one_bit), "cc": cc}),
        several(parcellations={"ho": replace(ho(), rois=("q", "p")), "cc": cc}),
        several(parcellations={"harvard": ho(), "cc": cc}),
        several(parcellations={"cc": cc, "ho": ho()}),
        several(atlas="AAL"),
        several(labels=[1, 0, 1, 1]),
    ]
    assert len({cohort.hash, *(one.hash for one in others)}) == 11
    assert several().hash == cohort.hash
    assert cohort.select([3, 1, 0, 2]).hash == cohort.hash
    # Digests that a selection takes over are those that it would compute.
    assert cohort.select([1, 2]).hash == several().select([1, 2]).hash
    assert cohort.select([1, 2])._digests == tuple(several()._digests[i] for i in (1, 2))


@pytest.mark.parametrize("lacking", [(), (1,), (0, 1, 2, 3)])
def test_file_round_trip(tmp_path, lacking):
    cohort = several(parcellations={"ho": ho(lacking), "a b/é": replace(ho((3,)), rois=("x", "y"))})
    loaded = Cohort.load(cohort.save(tmp_path / "c.cohort"))
    assert loaded.hash == cohort.hash
    assert loaded.atlases == ("aal", "ho", "a b/é")
    for name, each in cohort.parcellations.items():
        assert loaded.parcellations[name].rois == each.rois
        assert_same_series(loaded.parcellations[name].series, each.series)
    base = loaded.parcellations["a b/é"].series[0]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)  # read from disk when first used, as the first atlas


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
    alone = Cohort.load(one_atlas().save(tmp_path / "alone", "float16"))
    assert_same_series(loaded.series, alone.series)
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


def test_every_cut_and_flipped_byte_is_an_input_error(tmp_path):
    content = several(tr=2.0).save(tmp_path / "c.cohort").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "bad.cohort"
    for end in rng.integers(0, len(content), 40):
        path.write_bytes(content[:end])
        with pytest.raises(InputError):
            Cohort.load(path)
    (size,) = struct.unpack("<Q", content[:8])
    for place in rng.integers(8 + size, len(content), 40):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"altered|damaged"):
            Cohort.load(path)


def test_a_worker_reads_every_atlas_into_memory(tmp_path):
    from m2lgdg.study.cells import cohort_in_memory

    for dtype in ("float32", "float16"):
        path = several().save(tmp_path / dtype, dtype)
        held = cohort_in_memory(str(path), ("age",), False, None)
        assert held.hash == Cohort.load(path).hash
        with pytest.raises(ValueError, match="WRITEABLE"):
            held.parcellations["cc"].series[0].flags.writeable = True
