"""Graphs that take scans: features against numpy, the matrix logarithm against eigenvalues, probabilities against `predict`."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import small

from m2lgdg import leave_one_site_out, make, make_cohort, read
from m2lgdg.connectivity import correlations
from m2lgdg.scans import KINDS, Connectomes

torch = pytest.importorskip("torch")
for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)
from m2lgdg.deploy.onnx import export_onnx, parts_of, prepared, raw_inputs, run_onnx  # noqa: E402
from m2lgdg.deploy.onnx_features import FLOOR, Features, Plan, matrix_logarithm, median  # noqa: E402

NETWORK = small("m2lgdg-connectome") | {"epochs": 2, "learning_rate": 1e-2}  # with less, Platt scaling multiplies rounding


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny", seed=1), ["west"]))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.floats(-5.5, 0), st.floats(-3, 3), st.integers(0, 2**31))
def test_the_logarithm_is_that_of_the_eigenvalues(n, least, size, seed):
    """Of matrices of any size, with eigenvalues down to nearly the least that a shrunk covariance can have."""
    draw = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(draw.normal(size=(n, n)))
    values = 10 ** draw.uniform(least, 0, n)
    values *= 10**size * n / values.sum()  # mean 10^size
    values = np.maximum(values, 2 * FLOOR * values.mean())
    matrix = torch.from_numpy((vectors * values) @ vectors.T)[None]
    found = matrix_logarithm((matrix + matrix.mT) / 2, torch.eye(n, dtype=torch.float64), FLOOR / n)[0].numpy()
    np.testing.assert_allclose(found, (vectors * np.log(values)) @ vectors.T, atol=1e-6)


@given(st.floats(1e-14, 1.0))
def test_the_plan_suffices_for_the_least_eigenvalue(least):
    plan = Plan.of(least)
    value = least
    for steps in plan.roots:
        y, z = value, 1.0
        for _ in range(steps):
            factor = 1.5 - 0.5 * z * y
            y, z = y * factor, factor * z
        assert y == pytest.approx(np.sqrt(value), rel=1e-9)
        value = y
    log = 0.0
    for coefficient in plan.series:
        log = (value / plan.middle - 1) * (log + coefficient)
    assert (log + np.log(plan.middle)) * 2 ** len(plan.roots) == pytest.approx(np.log(least), abs=1e-6)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_the_median_is_that_of_numpy(values):
    assert median(torch.tensor([values], dtype=torch.float64)).item() == pytest.approx(np.median(values), abs=1e-12)


def spoiled(cohort):
    """The subjects with other lengths, flat ROIs, single wild volumes, and one who was standardised."""
    series = [np.array(one) for one in cohort.series]
    series[0] = series[0][:31]
    series[1][:, 3] = 2.5
    series[2][7] *= 30
    series[3] = (series[3] - series[3].mean(axis=0)) / series[3].std(axis=0)
    return replace(cohort, series=tuple(series))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("connectome-adaptive", ["steady", "log_euclidean", "swings", "amplitude"]),
        ("connectome-ensemble", ["fc", "tangent", "amplitude"]),
        ("tangent-pearson-ridge", ["tangent_pearson"]),
    ],
)
def test_features_are_those_of_the_method(name, blocks, fold):
    fitted = make(name).fit(fold.source).method
    features = Features(fitted, blocks).eval()
    target = fitted.visible(spoiled(fold.target).select(range(6)))
    for i in range(6):
        one = target.select([i])
        with torch.no_grad():
            found = features(torch.from_numpy(one.series[0].copy())[None])
        for block in blocks:
            np.testing.assert_allclose(found[block].numpy(), fitted._features(block, one), rtol=0, atol=3e-6, err_msg=block)
            assert found[block].dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_connectomes_are_those_of_the_method(kind, fold):
    spread = np.linspace(0.5, 3.0, len(fold.source.rois))
    change = {
        "fisher-z": lambda r: np.arctanh(np.clip(r, -0.9999, 0.9999)),
        "covariance": lambda r: r * np.outer(spread, spread),
    }

    def made(cohort):
        matrices = [change.get(kind, np.array)(one) for one in correlations(cohort.series)]
        return replace(cohort, series=Connectomes.of(matrices, kind, len(spread)))

    fitted = make("connectome-adaptive").fit(made(fold.source)).method
    one = fitted.visible(made(fold.target).select([2]))
    with torch.no_grad():
        found = Features(fitted, ["fc", "log_euclidean"]).eval()(torch.from_numpy(np.array(one.connectomes[0]))[None])
    for block, value in found.items():
        np.testing.assert_allclose(value.numpy(), fitted._features(block, one), rtol=0, atol=3e-6, err_msg=block)


def exported(fitted, folder):
    path = export_onnx(fitted, folder / "model.onnx")
    return path, json.loads(path.with_suffix(".json").read_text())


def compared(fitted, path, target):
    """Largest difference from `predict`, one subject at a time; their scans have different lengths."""
    parts = parts_of(fitted, prepared(fitted, target.select([0])))
    found = [run_onnx(path, raw_inputs(parts, target.select([i])))[0] for i in range(len(target))]
    expected = fitted.predict_proba(target)[:, 1]
    assert np.ptp(expected) > 0.01
    return np.abs(found - expected).max()


def without_some(cohort):
    """The subjects with some phenotypes missing."""
    table = cohort.phenotypes.astype(float)
    table.iloc[::2, 0] = np.nan
    table.iloc[1::3, 1] = np.nan
    return replace(cohort, phenotypes=table)


@pytest.mark.onnx
@pytest.mark.parametrize(
    ("name", "fields"),
    [("connectome-adaptive", {"phenotypes": True}), ("m2lgdg-connectome", NETWORK)],
    ids=["linear", "network"],
)
def test_the_graph_is_within_1e_5_of_predict(name, fields, fold, tmp_path, capfd):
    fitted = make(name, **fields).fit(fold.source, new_site_calibration=name == "connectome-adaptive")
    path, about = exported(fitted, tmp_path)
    assert about["format"] == "m2lgdg-onnx-2"
    rois, columns = len(fold.source.rois), fitted.facts_["inputs"]
    assert [(one["name"], one["type"], one["shape"]) for one in about["inputs"]] == [
        ("series", "float32", ["subject", "time", rois]),
        ("phenotypes", "float64", ["subject", len(columns)]),
    ]
    assert about["inputs"][1]["columns"] == columns and about["rois"] == list(fold.source.rois)
    assert compared(fitted, path, without_some(spoiled(fold.target)).select(range(6))) < 1e-5
    series, rest = np.array(fold.target.series[5]), np.full((1, len(columns)), np.nan)
    holed = series.copy()
    holed[3, 2] = np.nan
    for wrong in (holed, series[:19], np.ones_like(series), series * np.float32(np.inf)):
        assert np.isnan(run_onnx(path, {"series": wrong[None], "phenotypes": rest})).all()
    capfd.readouterr()
    import onnxruntime

    onnxruntime.InferenceSession(path)  # as in any other program, which would show its warnings
    assert capfd.readouterr().err == ""


@pytest.mark.onnx
def test_a_graph_of_two_atlases_and_one_of_connectomes(tmp_path):
    from miniature import with_two_atlases

    cohort = with_two_atlases(make_cohort("tiny", seed=1))
    fitted = make("connectome-adaptive", phenotypes=True).fit(cohort)
    path, about = exported(fitted, tmp_path)
    assert [one["name"] for one in about["inputs"]] == ["atlas-0.series", "atlas-1.series", "phenotypes"]
    assert compared(fitted, path, cohort.select(range(4))) < 1e-5
    of_matrices = make_cohort("tiny", seed=1).to_connectomes()
    fitted = make("fc-logistic").fit(of_matrices)
    path, about = exported(fitted, tmp_path)
    assert [one["name"] for one in about["inputs"]] == ["connectome"]
    assert compared(fitted, path, of_matrices.select(range(4))) < 1e-5


@pytest.mark.onnx
@pytest.mark.skipif("M2LGDG_ABIDE" not in os.environ, reason="needs M2LGDG_ABIDE, a folder of ABIDE's series")
def test_real_series(tmp_path):
    cohort = read(Path(os.environ["M2LGDG_ABIDE"]))
    fitted = make("connectome-adaptive", phenotypes=True).fit(cohort.select(np.arange(len(cohort)) % 4 > 0))
    path, _ = exported(fitted, tmp_path)
    assert compared(fitted, path, cohort.select(np.arange(len(cohort)) % 4 == 0)) < 1e-5
