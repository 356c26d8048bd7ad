"""Scans: covariances, their correlations and Fisher z are connectomes, every defect is named, and nothing can be edited."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2lgdg import Cohort, InputError, make_cohort
from m2lgdg.scans import (
    KINDS,
    Absent,
    Connectomes,
    common_kind,
    connectome_defect,
    empty_rois,
    is_connectome,
    own_correlation,
    packed,
    possible_kinds,
    triangle_defect,
    unpacked,
)

SEEDS = st.integers(0, 2**32 - 1)


def covariance(seed, rois, volumes, spread=1.0):
    rng = np.random.default_rng(seed)
    scale = np.exp(spread * rng.normal(size=rois))
    return np.cov((rng.normal(size=(volumes, rois)) @ rng.normal(size=(rois, rois)) * scale).T)


def correlation_of(matrix):
    scale = np.sqrt(np.diagonal(matrix))
    return np.clip(matrix / np.outer(scale, scale), -1, 1)


def fisher(matrix, diagonal=0.0):
    z = np.arctanh(np.where(np.eye(len(matrix)), 0, matrix))
    np.fill_diagonal(z, diagonal)
    return z


def names(count):
    return [f"r{i}" for i in range(count)]


@given(SEEDS, st.integers(3, 12), st.integers(4, 40), st.sampled_from(["float64", "float32", "float16"]))
def test_any_covariance_its_correlations_and_their_fisher_z_are_connectomes(seed, rois, volumes, dtype):
    matrix = covariance(seed, rois, volumes)
    correlation = correlation_of(matrix)
    made = {
        "covariance": matrix.astype(np.float32 if dtype == "float16" else dtype),
        "correlation": correlation.astype(dtype),
        "partial-correlation": correlation.astype(dtype),
        "fisher-z": fisher(correlation).astype(dtype),
    }
    for kind, one in made.items():
        assert connectome_defect(one, names(rois), kind) is None
        assert is_connectome(one)
        held = Connectomes.of([one], kind, rois)
        assert triangle_defect(held.triangles[0], names(rois), kind) is None
        np.testing.assert_allclose(held[0], one, atol=1e-6 * np.abs(one).max())
        tolerance = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-2}[dtype] if kind != "covariance" else 1e-4
        np.testing.assert_allclose(own_correlation(held.triangles[0], kind, rois), correlation, atol=tolerance)


@given(SEEDS, st.sampled_from(["zeros", "ones", "nan"]))
def test_the_diagonal_of_a_file_does_not_matter_where_it_holds_nothing(seed, diagonal):
    matrix = correlation_of(covariance(seed, 5, 20))
    value = {"zeros": 0.0, "ones": 1.0, "nan": np.nan}[diagonal]
    for kind, one in (("correlation", matrix.copy()), ("fisher-z", fisher(matrix))):
        np.fill_diagonal(one, value)
        assert connectome_defect(one, names(5), kind) is None
        assert np.diagonal(Connectomes.of([one], kind, 5)[0]).tolist() == [0.0 if kind == "fisher-z" else 1.0] * 5
    infinite = fisher(matrix, np.inf)
    assert connectome_defect(infinite, names(5), "fisher-z") is None


@pytest.fixture
def plain():
    return correlation_of(covariance(0, 6, 50))


def put(matrix, row, column, value):
    changed = np.array(matrix, dtype=np.float64)
    changed[row, column] = changed[column, row] = value
    return changed


def test_every_defect_is_named_with_its_rois(plain):
    z = fisher(plain)
    one_side = plain.copy()
    one_side[1, 4] = 0.9
    without = plain.copy()
    without[3] = without[:, 3] = np.nan
    far = covariance(0, 6, 50)
    limit = np.sqrt(far[0, 0] * far[2, 2])
    found = f"between ROI r1 and ROI r4 it has 0.9 and {plain[4, 1]:.4g}"
    cases = [
        (one_side, "correlation", f"the matrix is not symmetric: {found}"),
        (np.triu(plain), "correlation", "the matrix is not symmetric"),
        (put(plain, 1, 4, 1.5), "correlation", "1.5 between ROI r1 and ROI r4 is out of range for correlation (at most 1)"),
        (
            put(plain, 1, 4, -1.5),
            "partial-correlation",
            "-1.5 between ROI r1 and ROI r4 is out of range for partial-correlation",
        ),
        (put(z, 0, 5, 30), "fisher-z", "30 between ROI r0 and ROI r5 is out of range for fisher-z (at most 20)"),
        (put(far, 0, 2, 2 * limit), "covariance", f"{2 * limit:.4g} between ROI r0 and ROI r2 is out of range for covariance"),
        (1e300 * far, "covariance", "out of range for covariance (at most 3.403e+38)"),
        (put(plain, 2, 3, np.nan), "correlation", "NaN between ROI r2 and ROI r3 (2 such values)"),
        (put(z, 2, 3, np.inf), "fisher-z", "an infinite value between ROI r2 and ROI r3 (2 such values)"),
        (without, "correlation", "NaN between ROI r3 and ROI r0 (10 such values); a ROI without a signal has zeros"),
        (put(plain, 2, 2, 0.5), "correlation", "the diagonal is 0.5 at ROI r2, where a correlation has 1"),
        (put(plain, 2, 2, np.inf), "correlation", "the diagonal is inf at ROI r2, where a correlation has 1"),
        (put(z, 4, 4, 0.5), "fisher-z", "the diagonal is 0.5 at ROI r4, where others have 0"),
        (put(far, 1, 1, -1), "covariance", "the diagonal is -1 at ROI r1, where a covariance has variances"),
        (put(far, 1, 1, np.nan), "covariance", "the diagonal is nan at ROI r1, where a covariance has variances"),
        (np.eye(6), "correlation", "the connectome is zero everywhere"),
        (np.zeros((6, 6)), "fisher-z", "the connectome is zero everywhere"),
        (plain[:5], "correlation", "the matrix has shape (5, 6), not (6, 6)"),
        (plain[:5, :5], "correlation", "the matrix has shape (5, 5), not (6, 6)"),
        (plain[0], "correlation", "the matrix has shape (6,), not (6, 6)"),
        (plain[:, :, None], "correlation", "the matrix has shape (6, 6, 1), not (6, 6)"),
        (plain.astype(complex), "correlation", "the matrix has values of type complex128, not numbers"),
        (plain.astype(object), "correlation", "the matrix has values of type object, not numbers"),
        (plain > 0, "correlation", "the matrix has values of type bool, not numbers"),
    ]
    for matrix, kind, words in cases:
        defect = connectome_defect(matrix, names(6), kind)
        assert defect is not None, words
        assert words in defect
        assert "\n" not in defect
    for count in (0, 1):
        assert connectome_defect(np.ones((count, count)), names(count), "correlation") == "a connectome has two ROIs or more"


@given(SEEDS, st.data())
def test_a_single_wrong_value_is_found_wherever_it_is(seed, data):
    matrix = correlation_of(covariance(seed, 7, 30))
    row, column = sorted(data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True)))
    wrong = data.draw(st.sampled_from([1.01, -1.01, 40.0, np.nan, np.inf, -np.inf]))
    defect = connectome_defect(put(matrix, row, column, wrong), names(7), "correlation")
    assert f"between ROI r{row} and ROI r{column}" in defect
    lopsided = matrix.copy()
    lopsided[column, row] += 0.01
    assert f"between ROI r{row} and ROI r{column}" in connectome_defect(lopsided, names(7), "correlation").replace(
        f"between ROI r{column} and ROI r{row}", f"between ROI r{row} and ROI r{column}"
    )


def test_whole_numbers_are_not_wrapped():
    matrix = np.full((4, 4), 200, dtype=np.uint8)
    assert Connectomes.of([matrix], "covariance", 4)[0].tolist() == [[200.0] * 4] * 4
    matrix[0, 1] = 199
    assert "has 199 and 200" in connectome_defect(matrix, names(4), "covariance")


@given(SEEDS, st.integers(2, 9))
def test_triangles_are_the_upper_half_in_row_order(seed, rois):
    matrix = covariance(seed, rois, 20)
    triangle = packed(matrix, "covariance")
    assert triangle.tolist() == [np.float32(matrix[i, j]) for i in range(rois) for j in range(i, rois)]
    full = unpacked(triangle, rois)
    np.testing.assert_array_equal(full, full.T)
    np.testing.assert_array_equal(full[np.triu_indices(rois)], triangle)
    assert not full.flags.writeable


@given(SEEDS, st.integers(1, 6), st.floats(0, 1))
def test_empty_rois_are_those_of_the_full_matrix_whatever_the_number_of_zeros(seed, rois, share):
    """With as many zeros as an empty ROI has in one place or in several; what is on the diagonal does not count."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(rois * (rois + 1) // 2) < share, 0, rng.choice([-1, 1, np.nan], rois * (rois + 1) // 2))
    full = np.zeros((rois, rois))
    place = iter(values)
    for i in range(rois):
        for j in range(i, rois):
            full[i, j] = full[j, i] = next(place)
    np.testing.assert_array_equal(unpacked(values, rois), full)
    expected = [all(full[i, j] == 0 for j in range(rois) if j != i) for i in range(rois)]
    assert empty_rois(values, rois).tolist() == expected


def test_kinds_are_told_by_range_and_diagonal(plain):
    strong = put(plain, 0, 1, 0.95)
    tiny = covariance(1, 6, 50)
    assert possible_kinds(plain) == ("correlation",)
    assert possible_kinds(fisher(strong)) == ("fisher-z",)
    assert possible_kinds(fisher(0.5 * plain)) == ("correlation", "fisher-z")
    assert possible_kinds(fisher(plain, np.inf)) == ("fisher-z",)
    assert possible_kinds(fisher(plain, 18.7)) == ("fisher-z",)
    assert possible_kinds(tiny) == ("covariance",)
    turned = np.where(np.eye(6, dtype=bool), -1, plain)  # partial correlations with the diagonal of the scaled inverse
    assert possible_kinds(turned) == ("correlation",)
    assert "the diagonal is -1 at ROI a, where a correlation has 1" in connectome_defect(turned, tuple("abcdef"), "correlation")
    both = [("correlation", "fisher-z"), ("fisher-z",), ("correlation", "fisher-z")]
    assert common_kind(both, ["a", "b", "c"], "here") == "fisher-z"
    assert common_kind(both[:1], ["a"], "here") == "correlation"
    with pytest.raises(InputError, match=r"here: .* that of b looks like fisher-z, that of d like covariance; convert them"):
        common_kind([*both[:2], ("covariance",)], ["a", "b", "d"], "here")


@given(SEEDS, st.sets(st.integers(0, 6), max_size=5))
def test_empty_rois_are_those_without_edges(seed, empty):
    for kind, matrix in (("correlation", correlation_of(covariance(seed, 7, 30))), ("covariance", covariance(seed, 7, 30))):
        matrix[list(empty)] = matrix[:, list(empty)] = 0.0
        assert connectome_defect(matrix, names(7), kind) is None
        held = Connectomes.of([matrix], kind, 7)
        assert set(np.flatnonzero(empty_rois(held.triangles[0], 7))) == empty
        correlations = own_correlation(held.triangles[0], kind, 7)
        assert np.isfinite(correlations).all()
        assert np.diagonal(correlations).tolist() == [1.0] * 7


def test_connectomes_are_a_sequence_that_nobody_can_edit(plain):
    held = Connectomes.of([plain, None, fisher(plain)], "fisher-z", 6)
    assert (len(held), held[1], held.kind, repr(held)) == (3, None, "fisher-z", "3 connectomes (fisher-z) of 6 ROIs")
    assert [one is None for one in held] == [False, True, False]
    assert isinstance(held[1:], Connectomes)
    np.testing.assert_array_equal(held[-1], held[2])
    np.testing.assert_array_equal(held.take([2])[0], held[2])
    with pytest.raises(IndexError):
        held[3]
    for one in (held, pickle.loads(pickle.dumps(held)), copy.deepcopy(held)):
        array = Cohort(series=one.take([0, 2]), subjects=["a", "b"], sites=["x", "y"], labels=[0, 1], rois=names(6)).scans
        for each in (array[0], array.triangles[0]):
            assert not each.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.triangles[0].setflags(write=True)
        with pytest.raises(ValueError, match="WRITEABLE"):
            one.triangles[0].setflags(write=True)
    with pytest.raises(InputError, match="not pearson"):
        Connectomes.of([plain], "pearson", 6)
    assert KINDS == ("correlation", "fisher-z", "covariance", "partial-correlation")


USES = {
    "len": len,
    "index": lambda absent: absent[0],
    "slice": lambda absent: absent[:2],
    "loop": list,
    "unpack": lambda absent: [*absent],
    "contains": lambda absent: np.zeros(3) in absent,
    "array": np.asarray,
    "stack": np.stack,
    "zip": lambda absent: list(zip(absent, "ab", strict=False)),
    "bool": bool,
    "reversed": lambda absent: list(reversed(absent)),
    "count": lambda absent: absent.count(1),
    "enumerate": lambda absent: list(enumerate(absent)),
    "iter": lambda absent: next(iter(absent)),
    "equal": lambda absent: absent.index(1),
}


@pytest.mark.parametrize("use", USES)
def test_series_of_connectomes_are_one_error_however_they_are_used(use):
    cohort = make_cohort("tiny").to_connectomes()
    both = make_cohort("tiny", further_atlas="")
    with pytest.raises(InputError) as error:
        USES[use](cohort.series)
    assert str(error.value).startswith("cohort tiny holds connectomes, but the time series of the ROIs are needed; see ")
    with pytest.raises(InputError, match=r"cohort tiny holds time series; to_connectomes\(\) computes connectomes from them."):
        USES[use](both.connectomes)
    with pytest.raises(InputError, match="holds connectomes"):
        _ = cohort.lengths
    assert isinstance(cohort.series, Absent)
    assert "holds connectomes" in repr(cohort.series)


def test_replace_keeps_the_connectomes_and_changes_what_is_asked_for():
    cohort = make_cohort("tiny").to_connectomes()
    other = replace(cohort, labels=1 - cohort.labels)
    assert other.values == "fisher-z"
    assert all(a is b or (a == b).all() for a, b in zip(other.scans.triangles, cohort.scans.triangles, strict=True))
    assert replace(cohort, series=make_cohort("tiny").series).values == "series"
