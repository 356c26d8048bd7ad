"""Cohorts of connectomes: hash, file, slices, atlases, errors of `from_connectomes`, and features against other libraries."""

import copy
import json
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg import Cohort, InputError, make_cohort
from m2lgdg.cohort import Parcellation
from m2lgdg.connectivity import (
    CohortFeatures,
    amplitude_features,
    correlations,
    covariances,
    deviations,
    fc_features,
    fisher_matrices,
    frame_weighted,
    row_covariances,
    sharing_features,
)
from m2lgdg.scans import KINDS, Connectomes, kind_of, unpacked
from m2lgdg.storage import read_tensors, write_tensors

ROIS = tuple("abcdef")
TABLE = {"age": [30.0, np.nan, 41.0, 25.0], "hand": ["L", "R", "", "R"]}


def signals(seed=0, subjects=4, volumes=60, rois=6):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(subjects, 1, rois)))
    return scale * (rng.normal(size=(subjects, volumes, rois)) + 2 * rng.normal(size=(subjects, volumes, 1)))


def matrices_of(kind, series):
    correlation = np.array([np.corrcoef(one.T) for one in series])
    if kind == "covariance":
        return np.array([np.cov(one.T) for one in series])
    if kind == "fisher-z":
        return np.arctanh(correlation * (1 - np.eye(correlation.shape[1])))
    if kind == "partial-correlation":
        inverse = np.linalg.inv(correlation)
        scale = np.sqrt(np.diagonal(inverse, axis1=1, axis2=2))
        return -inverse / (scale[:, :, None] * scale[:, None]) * (1 - 2 * np.eye(correlation.shape[1]))
    return correlation


def made(kind="correlation", **changes):
    given = dict(phenotypes=TABLE, rois=ROIS, subjects=["s1", "s2", "s3", "s4"], inputs=["age"], atlas="aal", name="four")
    return Cohort.from_connectomes(
        changes.pop("matrices", matrices_of(kind, signals())),
        changes.pop("y", [0, 1, 0, 1]),
        changes.pop("sites", ["x", "x", "y", "y"]),
        values=changes.pop("values", kind),
        **given | changes,
    )


def mixed():
    """Connectomes in the first atlas, series in the second, connectomes of another kind in the third; not for all subjects."""
    series = [None if i == 2 else one[:, :3].astype(np.float32) for i, one in enumerate(signals(1))]
    others = [None if i == 0 else one for i, one in enumerate(matrices_of("covariance", signals(2, rois=4)))]
    further = {
        "ts": Parcellation(("p", "q", "r"), series),
        "cov": Parcellation(tuple("wxyz"), Connectomes.of(others, "covariance", 4)),
    }
    return replace(made("fisher-z"), parcellations=further)


def assert_same(first, second):
    assert first.hash == second.hash
    assert (first.rois, first.atlases, first.values, first.inputs) == (
        second.rois,
        second.atlases,
        second.values,
        second.inputs,
    )
    pd.testing.assert_frame_equal(first.to_frame(), second.to_frame())
    for name in first.parcellations:
        one, other = first.parcellations[name], second.parcellations[name]
        assert (one.rois, kind_of(one.scans)) == (other.rois, kind_of(other.scans))
        assert one.present.tolist() == other.present.tolist()
        assert all((a is None and b is None) or (a == b).all() for a, b in zip(one.scans, other.scans, strict=True))
    assert all((a == b).all() for a, b in zip(first.scans, second.scans, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohort_of_each_kind(kind):
    given = matrices_of(kind, signals())
    cohort = made(kind)
    assert (cohort.values, cohort.rois, len(cohort), len(cohort.connectomes)) == (kind, ROIS, 4, 4)
    np.testing.assert_allclose(np.array(list(cohort.connectomes)), given, rtol=1e-6, atol=1e-7)
    assert repr(cohort) == f"Cohort four: 4 subjects (2 patients, 2 controls) of 2 sites, 6 ROIs (aal), connectomes ({kind})"
    assert kind in cohort._repr_html_()
    assert cohort.to_frame().columns.tolist() == ["site", "label", "tr", "age", "hand"]
    assert cohort.to_connectomes().hash == cohort.hash
    assert cohort.unlabelled().values == kind
    if kind != "partial-correlation":  # which cannot be told from correlations
        assert made(kind, values=None).hash == cohort.hash


@pytest.mark.parametrize("kind", KINDS)
def test_hash_does_not_depend_on_order_but_on_kind_and_values(kind):
    cohort = made(kind)
    assert cohort.select([2, 0, 3, 1]).hash == cohort.hash
    assert cohort.in_order().hash == cohort.hash
    others = {made(other, matrices=matrices_of("correlation", signals())).hash for other in KINDS if other != "fisher-z"}
    assert len(others) == 3
    given = matrices_of(kind, signals())
    given[3, 0, 1] = given[3, 1, 0] = given[3, 0, 1] * 1.001
    assert made(kind, matrices=given).hash != cohort.hash
    given = matrices_of(kind, signals()).transpose(0, 2, 1)
    assert made(kind, matrices=list(given)).hash == cohort.hash
    swapped = matrices_of(kind, signals())[[1, 0, 2, 3]]
    assert made(kind, matrices=swapped).hash != cohort.hash


def test_hash_covers_the_kind_of_every_atlas():
    cohort = mixed()
    series = [None if i == 0 else one[:, :4] for i, one in enumerate(signals(2))]
    as_series = replace(cohort, parcellations=cohort.parcellations | {"cov": Parcellation(tuple("wxyz"), series)})
    given = [None, *matrices_of("correlation", signals(2, rois=4))[1:]]
    alike = [Parcellation(tuple("wxyz"), Connectomes.of(given, kind, 4)) for kind in ("correlation", "partial-correlation")]
    others = [replace(cohort, parcellations=cohort.parcellations | {"cov": one}) for one in alike]
    assert len({cohort.hash, as_series.hash, *(one.hash for one in others)}) == 4


@pytest.mark.parametrize("form", [made, mixed, lambda: made("covariance"), lambda: mixed().select([0])])
def test_a_file_is_read_back_bit_by_bit(form, tmp_path):
    cohort = form()
    path = cohort.save(tmp_path / "c.cohort")
    for loaded in (Cohort.load(path), Cohort.load(path, in_memory=True)):
        assert_same(loaded, cohort)
        assert isinstance(loaded.scans, Connectomes)
        for one in loaded.scans.triangles:
            with pytest.raises(ValueError, match="WRITEABLE"):
                one.setflags(write=True)
    assert_same(Cohort.load(loaded.save(tmp_path / "again.cohort")), cohort)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.floats(-6, 6), st.floats(0, 4))
def test_half_precision_is_below_a_two_thousandth_whatever_the_units(tmp_path_factory, seed, kind, unit, spread):
    rng = np.random.default_rng(seed)
    scale = 10**unit * np.exp(spread * rng.normal(size=6))
    given = matrices_of(kind, signals(seed) * (scale if kind == "covariance" else 1))
    cohort = made(kind, matrices=given)
    folder = tmp_path_factory.mktemp("half")
    loaded = Cohort.load(cohort.save(folder / "c.cohort", "float16"))
    assert loaded.hash == cohort._rounded().hash
    for one, other in zip(loaded.connectomes, cohort.connectomes, strict=True):
        sd = np.sqrt(np.diagonal(other)) if kind == "covariance" else np.full(6, np.sqrt(max(1, np.abs(other).max())))
        assert (np.abs(one - other) <= 0.0005 * np.outer(sd, sd)).all()


def test_empty_rois_and_equal_rois_survive_half_precision(tmp_path):
    series = signals()
    series[:, :, 1] = 1.0001 * series[:, :, 0]
    for kind in ("correlation", "covariance"):
        given = matrices_of(kind, series)
        given[:, 4] = given[:, :, 4] = 0.0
        cohort = made(kind, matrices=given)
        loaded = Cohort.load(cohort.save(tmp_path / kind, "float16"))
        np.testing.assert_allclose(np.array(list(loaded.connectomes)), np.array(list(cohort.connectomes)), rtol=2e-3, atol=1e-3)
        assert not np.array(list(loaded.connectomes))[:, 4, :4].any()


@pytest.mark.parametrize("shorter", [False, True])
def test_a_file_that_is_overwritten_under_connectomes_is_noticed(tmp_path, shorter):
    cohort = mixed()
    path = cohort.save(tmp_path / "c.cohort")
    loaded = Cohort.load(path)
    digest, part = loaded.hash, loaded.select([1, 3])
    other = replace(cohort, series=Connectomes([-one for one in cohort.scans.triangles], "fisher-z", 6))
    content = (other.select([0]) if shorter else other).save(tmp_path / "other.cohort").read_bytes()
    path.write_bytes(content)
    for one in (loaded, part):
        with pytest.raises(InputError, match=r"c\.cohort was overwritten after its cohort was read"):
            one.hash  # noqa: B018
    path.write_bytes(cohort.save(tmp_path / "same.cohort").read_bytes())
    assert loaded.hash == digest == cohort.hash


def lies(path, **changes):
    """A cohort file with another header, and with the hash that it had."""
    metadata, tensors = read_tensors(path, "m2lgdg-cohort-1", in_memory=True)
    head = json.loads(metadata["cohort"]) | changes
    held = {name: np.array(one) for name, one in tensors.items()}
    if changes.get("values", "") is None:
        del head["values"]
    return write_tensors(path, held, metadata | {"cohort": json.dumps(head)})


@pytest.mark.parametrize("values", ["correlation", "pearson", None, "series", 3])
def test_a_file_that_lies_about_its_kind_is_refused(tmp_path, values):
    path = made("fisher-z").save(tmp_path / "c.cohort")
    with pytest.raises(InputError, match=r"is damaged and cannot be read as a cohort|was altered after it was written"):
        Cohort.load(lies(path, values=values))


def test_slices_selections_and_queries():
    cohort = mixed()
    for part in (cohort[[3, 1]], cohort.select(subjects=["s4", "s2"])[::-1], cohort[np.array([0, 1, 0, 1], bool)][::-1]):
        assert part.subjects.tolist() == ["s4", "s2"]
        np.testing.assert_array_equal(part.connectomes[0], cohort.connectomes[3])
        assert part.parcellations["cov"].scans.triangles[1] is not None
        assert [one is None for one in part.parcellations["ts"].scans] == [False, False]
    assert cohort.query("site == 'y' and label == 1").subjects.tolist() == ["s4"]
    assert len(cohort[:0]) == 0
    assert len(cohort[:0].connectomes) == 0
    assert [one.subjects[0] for one in (cohort[i] for i in range(4))] == ["s1", "s2", "s3", "s4"]


def test_each_atlas_has_its_own_kind():
    cohort = mixed()
    by_name = {one.atlas: one for one in cohort.each_atlas()}
    assert {name: one.values for name, one in by_name.items()} == {"aal": "fisher-z", "ts": "series", "cov": "covariance"}
    assert by_name["ts"].subjects.tolist() == ["s1", "s2", "s4"]
    assert by_name["cov"].subjects.tolist() == ["s2", "s3", "s4"]
    assert by_name["ts"].lengths.tolist() == [60] * 3
    np.testing.assert_allclose(by_name["cov"].connectomes[0], np.cov(signals(2, rois=4)[1].T), rtol=1e-6)
    with pytest.raises(InputError, match="this atlas holds connectomes"):
        list(cohort.parcellations["cov"].series)
    whole = cohort.to_connectomes()
    assert [one.values for one in whole.each_atlas()] == ["fisher-z", "fisher-z", "covariance"]
    assert whole.parcellations["ts"].present.tolist() == [True, True, False, True]
    expected = np.arctanh(np.corrcoef(signals(1)[3, :, :3].T)[0, 1])
    assert whole.parcellations["ts"].scans[3][0, 1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("form", [pickle.dumps, None])
def test_copies_stay_read_only(form):
    for cohort in (made(), mixed()):
        other = copy.deepcopy(cohort) if form is None else pickle.loads(form(cohort))
        assert_same(other, cohort)
        arrays = [*other.scans.triangles, *(one for each in other.parcellations.values() for one in each.scans), other.labels]
        for one in arrays:
            assert one is None or not one.flags.writeable
        for one in other.scans.triangles:
            with pytest.raises(ValueError, match="WRITEABLE"):
                one.setflags(write=True)


def test_the_given_arrays_are_copied():
    given = matrices_of("correlation", signals())
    cohort = made(matrices=given)
    digest = cohort.hash
    given[:] = 7
    assert cohort.hash == digest == made().hash
    with pytest.raises(ValueError, match="read-only"):
        cohort.connectomes[0][0, 1] = 0.5


ERRORS = {
    "none": (dict(matrices=[]), "cohort four: there are no matrices."),
    "one matrix": (
        dict(matrices=np.eye(6)),
        "connectomes are arrays of numbers of shape (ROI, ROI), but the first has shape (6,)",
    ),
    "not square": (dict(matrices=np.ones((4, 6, 5))), "but the first has shape (6, 5) and type float64."),
    "text": (dict(matrices=[[["a", "b"], ["b", "a"]]] * 4), "but the first has shape (2, 2) and type <U1."),
    "another size": (
        dict(matrices=[*matrices_of("correlation", signals())[:3], np.eye(5)]),
        "subject s4: the matrix has shape",
    ),
    "rois": (dict(rois=list("abc")), "subject s1: the matrix has shape (6, 6), not (3, 3)."),
    "same rois": (dict(rois=list("abcdea")), "ROI a appears 2 times"),
    "kind": (dict(values="pearson"), "connectomes hold correlation, fisher-z, covariance or partial-correlation, not pearson."),
    "few labels": (dict(y=[0, 1, 0]), "4"),
    "few sites": (dict(sites=["x", "y"]), "4"),
    "no site": (dict(sites=["x", "x", "", "y"]), "sites has a missing value"),
    "labels": (dict(y=["a", "b", "a", "b"]), "name the value of patients"),
    "three classes": (dict(y=[0, 1, 2, 0]), "y has 3 classes"),
    "subjects": (dict(subjects=["s1", "s1", "s2", "s3"]), "s1 appears 2 times"),
    "inputs": (dict(inputs=["iq"]), "iq"),
    "tr": (dict(tr=2000), "looks like milliseconds"),
    "phenotypes": (dict(phenotypes={"age": [1, 2]}), "phenotype"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_every_error_of_from_connectomes_is_one_sentence(case):
    changes, words = ERRORS[case]
    with pytest.raises(InputError) as error:
        made(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_matrices_of_several_kinds_and_unknown_words():
    z, r = (matrices_of(kind, signals()) for kind in ("fisher-z", "correlation"))
    assert np.abs(z).max() > 1
    with pytest.raises(
        InputError, match="different kinds: that of subject s1 looks like fisher-z, that of subject s3 like corr"
    ):
        made(matrices=[*z[:2], *r[2:]], values=None)
    with pytest.raises(InputError, match=r"subject s1: .* is out of range for correlation"):
        made(matrices=z, values="correlation")
    with pytest.raises(TypeError, match="unexpected keyword argument 'site'"):
        made(site="x")
    assert made(y=pd.Series(["MDD", "HC", "MDD", "HC"]), patient="MDD").labels.tolist() == [1, 0, 1, 0]
    assert made(rois=None).rois == tuple("123456")


@pytest.mark.parametrize("kind", ["correlation", "fisher-z", "covariance"])
def test_features_are_those_of_numpy(kind):
    series = signals()
    expected = np.array([np.corrcoef(one.T) for one in series])
    scans = made(kind).scans
    np.testing.assert_allclose(correlations(scans), expected, atol=2e-6)
    edges = np.array([np.arctanh(np.clip(one[np.triu_indices(6, 1)], -0.999, 0.999)) for one in expected])
    np.testing.assert_allclose(fc_features(scans), edges, atol=1e-5)
    full = fisher_matrices(scans)
    np.testing.assert_allclose(full[:, *np.triu_indices(6, 1)], edges, atol=1e-5)
    np.testing.assert_array_equal(full, full.transpose(0, 2, 1))
    assert not np.diagonal(full, axis1=1, axis2=2).any()
    from sklearn.covariance import ledoit_wolf

    rows = np.array([ledoit_wolf(one - one.mean(axis=0), assume_centered=True)[0] for one in expected])
    np.testing.assert_allclose(row_covariances(scans), rows, atol=1e-4)
    definite = covariances(scans)
    least = np.linalg.eigvalsh(definite)[:, 0]
    assert (least > 0.099).all()
    np.testing.assert_allclose(np.diagonal(definite, axis1=1, axis2=2), 1, atol=1e-6)
    assert np.abs(np.corrcoef(definite[0][np.triu_indices(6, 1)], expected[0][np.triu_indices(6, 1)])[0, 1]) > 0.9999


def test_features_of_partial_correlations_are_their_own():
    given = matrices_of("partial-correlation", signals())
    residual = signals()[0]
    others = np.column_stack([residual[:, 2:], np.ones(60)])
    left = [one - others @ np.linalg.lstsq(others, one, rcond=None)[0] for one in residual[:, :2].T]
    assert given[0, 0, 1] == pytest.approx(np.corrcoef(left)[0, 1])
    scans = made("partial-correlation").scans
    np.testing.assert_allclose(correlations(scans), given, atol=1e-6)
    np.testing.assert_allclose(fc_features(scans), np.arctanh(given[:, *np.triu_indices(6, 1)]), atol=1e-5)


def test_features_of_connectomes_have_the_bits_of_those_of_series():
    cohort = make_cohort("tiny")
    z = cohort.to_connectomes()
    np.testing.assert_array_equal(fc_features(z.scans), fc_features(cohort.series))
    np.testing.assert_array_equal(fisher_matrices(z.scans), fisher_matrices(cohort.series))
    part = [7, 3, 50]
    np.testing.assert_array_equal(fc_features(z.scans.take(part)), fc_features(z.scans)[part])
    with sharing_features(z.scans):
        np.testing.assert_array_equal(fc_features(z.select(part).scans), fc_features(cohort.series)[part])
    assert CohortFeatures(z.scans).find(z.select(part).scans) == part
    assert CohortFeatures(z.scans).find(cohort.series[:2]) is None


def test_what_needs_series_says_so():
    scans = made().scans
    for work in (amplitude_features, lambda s: fc_features(s, frame_weighted), lambda s: correlations(s, deviations)):
        with pytest.raises(InputError, match="computed from time series, and the cohort holds connectomes"):
            work(scans)


def test_covariances_of_a_matrix_that_is_not_definite():
    """By the documented rule: (1 - a) R + a I, with the smallest a of at least 0.2 with which no eigenvalue is below 0.2."""
    given = matrices_of("correlation", signals())
    given[0] = np.where(np.eye(6), 1, 0.9 * np.sign(np.outer(*np.random.default_rng(3).normal(size=(2, 6)))))
    given[0] = (given[0] + given[0].T) / 2
    least = np.linalg.eigvalsh(given)[:, 0]
    assert least[0] < -0.5
    shrunk = covariances(made(matrices=given).scans)
    a = (0.2 - np.minimum(least, 0)) / (1 - np.minimum(least, 0))
    np.testing.assert_allclose(shrunk, (1 - a)[:, None, None] * given + a[:, None, None] * np.eye(6), atol=1e-6)
    assert np.linalg.eigvalsh(shrunk)[0, 0] == pytest.approx(0.2, abs=1e-5)


def test_connectomes_are_much_smaller_than_long_series(tmp_path):
    cohort = make_cohort("tiny", lengths=(400, 400))
    sizes = [form.save(tmp_path / name).stat().st_size for name, form in (("s", cohort), ("z", cohort.to_connectomes()))]
    assert sizes[1] < sizes[0] / 10
    triangle = cohort.to_connectomes().scans.triangles[0]
    assert triangle.nbytes == 4 * 12 * 13 // 2
    assert unpacked(triangle, 12).shape == (12, 12)
