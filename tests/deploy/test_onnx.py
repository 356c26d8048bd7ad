"""`m2lgdg export`: onnxruntime gives the probabilities of every method, and the JSON is enough to prepare its inputs."""

import contextlib
import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.interpolate import CubicSpline
from sklearn.covariance import ledoit_wolf
from test_contract import NAMES, small

from m2lgdg import InputError, leave_one_site_out, make, make_cohort
from m2lgdg.connectivity import correlations
from m2lgdg.deploy.onnx import described, export_onnx, prepared, run_onnx
from m2lgdg.scans import KINDS, Connectomes

NO_GRAPH = {"prior": "uses no inputs", "average": "cannot be exported"}
# Layers of the same kind become the same nodes again, and the time to export grows with the number of nodes.
FEW_LAYERS = {
    "m2lgdg": {"global_channels": (4,), "global_kernels": (3,), "local_channels": (8,), "local_strides": (2,)},
    "mm-gtunets": {"imaging_depth": 1, "phenotype_depth": 1, "used_phenotypes": ("age", "sex")},
    "m2dc": {"layers": 1, "crops": 2},
    "msstan": {"scales": (0.3, 0.7)},
    # With less, logits are alike, and Platt scaling multiplies their rounding by thousands.
    "metaexplainer": {"channels": (4, 4), "kernels": (4, 4), "strides": (2, 1), "learning_rate": 1e-2},
    "m2lgdg-connectome": {"learning_rate": 1e-2},
}
FEW_LAYERS["m2lgdg"] |= {"layers": 1, "fusion_layers": 1, "phenotype_hidden": (16,)}
BRAIN_ALONE = {"braingnn", "brainnetcnn", "ibgnn-plus", "msstan", "ufa-net", "genm", "m2dc"}  # networks that see no phenotype


@pytest.fixture(scope="module", autouse=True)
def packages():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra: onnx)")
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError, AttributeError):  # inside of onnxscript, and only for speed
            from onnxscript._internal.values import TracedOnnxFunction

            # Every export asks for the signatures of 500 operators, which are parsed from their source each time.
            signature = functools.cache(TracedOnnxFunction.function_ir.fget)
            patch.setattr(TracedOnnxFunction, "function_ir", property(signature))
        yield


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny", seed=1), ["west"]))


def exported(fitted, folder):
    path = export_onnx(fitted, folder / "model.onnx", takes_prepared=True)
    return path, json.loads(path.with_suffix(".json").read_text())


def graphs():
    """Methods with a graph; one of each kind here, the others in `make test-more`, since a graph takes seconds to trace."""
    for name in NAMES:
        if name not in NO_GRAPH:
            quick = name in ("erm", "tangent-pearson-ridge", "phenotype-logistic")
            yield pytest.param(name, marks=() if quick else pytest.mark.onnx)


@pytest.mark.parametrize("name", list(graphs()))
def test_onnxruntime_gives_the_same_probabilities(name, fold, tmp_path):
    fitted = make(name, **small(name) | FEW_LAYERS.get(name, {})).fit(fold.source, seed=0)
    path, reported = exported(fitted, tmp_path)
    expected = fitted.predict_proba(fold.target)[:, 1]
    inputs = prepared(fitted, fold.target)
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(run_onnx(path, inputs), expected, rtol=0, atol=1e-5)
    for i in (0, 7):  # one subject alone
        alone = {key: value[i : i + 1] for key, value in inputs.items()}
        np.testing.assert_allclose(run_onnx(path, alone), expected[i : i + 1], rtol=0, atol=1e-5)
    assert reported["rois"] == list(fold.source.rois)
    assert [(one["name"], one["type"], one["shape"]) for one in reported["inputs"]] == [
        (key, str(value.dtype), ["subject", *value.shape[1:]])
        for key, value in inputs.items()
        if key != "phenotypes" or name not in BRAIN_ALONE
    ]
    assert not [one["name"] for one in reported["inputs"] if "`features` of the method" in one["prepared"]]
    for text in (path.read_bytes(), path.with_suffix(".json").read_bytes()):
        assert not re.search(rb"\w{3}\.py\b|site-packages|/home/|/tmp/|stack_trace", text)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("connectome-ensemble", ["fc", "tangent", "amplitude"]),
        ("connectome-adaptive", ["steady", "log_euclidean", "swings", "amplitude"]),
    ],
)
def test_all_blocks_and_phenotypes_of_a_linear_method(name, blocks, fold, tmp_path):
    fitted = make(name, phenotypes=True).fit(fold.source)
    path, reported = exported(fitted, tmp_path)
    assert [one["name"] for one in reported["inputs"]] == [*blocks, "phenotypes"]
    got = run_onnx(path, prepared(fitted, fold.target))
    np.testing.assert_allclose(got, fitted.predict_proba(fold.target)[:, 1], rtol=0, atol=1e-9)


def test_a_network_without_phenotypes_and_with_a_sites_own_calibration(fold, tmp_path):
    source, target = fold.source.with_inputs([]), fold.target.with_inputs([])
    fitted = make("erm", **small("erm")).fit(source, seed=0)
    before = fitted.predict_proba(target)[:, 1]
    fitted.facts_["local"] = {"slope": 1.7, "offset": -0.4, "threshold": 0.42}
    path, reported = exported(fitted, tmp_path)
    assert [one["name"] for one in reported["inputs"]] == ["fc"] and reported["output"]["threshold"] == 0.42
    found = run_onnx(path.read_bytes(), prepared(fitted, target))
    np.testing.assert_allclose(found, fitted.predict_proba(target)[:, 1], rtol=0, atol=1e-5)
    assert np.abs(found - before).max() > 0.01


def by_the_json(reported, series, phenotypes):
    """The inputs of one subject as somebody would make them who has only the JSON."""
    made = {}
    for one in reported["inputs"]:
        if one["name"] == "series":
            spline = CubicSpline(np.linspace(0, 1, len(series)), series.astype(np.float64))
            at = spline(np.linspace(0, 1, one["length"]))
            value = ((at - at.mean(axis=0)) / (at.std(axis=0) + 1e-8)).T
        elif one["name"] == "fc":
            z = np.arctanh(np.clip(np.corrcoef(series.astype(np.float64).T), -0.999, 0.999))
            value = z[np.triu_indices(len(z), 1)]
            if len(one["shape"]) == 3:
                value = z * (1 - np.eye(len(z)))
        elif one["name"] in ("steady", "swings"):
            unit = (series - series.mean(axis=0, dtype=np.float64)) / series.std(axis=0, dtype=np.float64)
            size = (unit**2).mean(axis=1)
            how = {"aweights": 1 / (1 + (size / np.median(size)) ** 2)} if one["name"] == "steady" else {}
            common = np.cov((unit if how else np.abs(unit)).T, **how)
            z = np.arctanh(np.clip(common / np.sqrt(np.outer(np.diag(common), np.diag(common))), -0.999, 0.999))
            value = z[np.triu_indices(len(z), 1)]
        elif one["name"] == "log_euclidean":
            value = tangent(shrunk(np.corrcoef(series.astype(np.float64).T)), np.eye(series.shape[1]))
        elif one["name"] == "amplitude":
            value = np.log(series.std(axis=0, dtype=np.float64))
            value = value - value.mean()
            profile, wide = np.array(one["profile"]), value.std()
            seen = (value @ profile / (profile @ profile), wide, np.sqrt(((value - profile) ** 2).mean()))
            outside = [low is not None and x < low for low, x in zip(one["low"], seen, strict=True)]
            outside += [high is not None and x > high for high, x in zip(one["high"], seen, strict=True)]
            value = np.array(one["mean"]) if any(outside) else value
        else:
            value = np.array(
                [
                    ((column["fill"] if np.isnan(phenotypes[column["name"]]) else phenotypes[column["name"]]) - column["mean"])
                    / (column["scale"] or np.inf)
                    for column in one["columns"]
                ]
            )
        assert list(value.shape) == one["shape"][1:]
        made[one["name"]] = value[None].astype(one["type"])
    return made


@pytest.mark.parametrize("name", ["fc-logistic", "connectome-adaptive", pytest.param("metaexplainer", marks=pytest.mark.onnx)])
def test_the_json_is_enough_to_prepare_the_inputs(name, fold, tmp_path):
    fields = (small(name) if name == "metaexplainer" else {}) | {"phenotypes": True}
    constant = fold.source.phenotypes.assign(education=12.0)  # what does not vary in source counts for nobody
    fitted = make(name, **fields).fit(replace(fold.source, phenotypes=constant), seed=0)
    path, reported = exported(fitted, tmp_path)
    scales = {one["name"]: one["scale"] for one in reported["inputs"][-1]["columns"]}
    assert scales["education"] is None
    assert scales["age"] > 0
    table = fold.target.phenotypes.assign(age=[np.nan, *fold.target.phenotypes["age"][1:]])
    target = replace(fold.target, phenotypes=table)
    expected = fitted.predict_proba(target)[:, 1]
    for i in (0, 5):
        row = target.phenotypes.iloc[i].to_dict()
        got = run_onnx(path, by_the_json(reported, np.asarray(target.series[i]), row))
        np.testing.assert_allclose(got, expected[i : i + 1], rtol=0, atol=1e-5)


def with_tables(cohort, seed=0):
    """Two tables with the label in them; some values and some subjects are missing in the first."""
    draw = np.random.default_rng(seed)
    columns = ["Left-Caudate", "a & b, ü", "eTIV", "empty here", "e"]
    values = draw.normal(3.0, 0.3, size=(len(cohort), 5)) + 0.4 * np.maximum(cohort.labels, 0)[:, None]
    values[:, 2] = draw.normal(1.5e6, 1e5, size=len(cohort))
    values[::5, 1], values[1::7, :2], values[2::7, :3], values[3::7] = (np.nan,) * 4
    first = pd.DataFrame(values, index=cohort.subjects, columns=columns)
    second = pd.DataFrame(draw.normal(size=(len(cohort), 3)), index=cohort.subjects, columns=list("xyz"))
    second["x"] += 2 * np.maximum(cohort.labels, 0)
    return cohort.with_tables({"aseg of 7": first, "thickness": second})


def bare(cohort):
    """Without age and sex."""
    return replace(cohort, phenotypes=cohort.phenotypes.drop(columns=["age", "sex"]), inputs=("education",))


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"phenotypes": True}, None),
        pytest.param({}, None, marks=pytest.mark.onnx),
        pytest.param({"scan": False}, None, marks=pytest.mark.onnx),
        pytest.param({"tables": "thickness"}, bare, marks=pytest.mark.onnx),
    ],
    ids=["all", "no-phenotypes", "structure", "no-confounds"],
)
def test_a_linear_method_takes_tables_as_they_are(fold, tmp_path, fields, change):
    source, target = (with_tables((change or (lambda one: one))(one)) for one in (fold.source, fold.target))
    fitted = make("connectome-adaptive", **fields).fit(source)
    names = [name for name in fitted.facts_["tables"] if fitted.facts_["tables"][name]["weight"] > 0]
    assert names  # otherwise nothing below is tested
    path, reported = exported(fitted, tmp_path)
    rows = {one["name"]: one for one in reported["inputs"]}
    expected = fitted.predict_proba(target)[:, 1]
    inputs = prepared(fitted, target) | {  # by the names of the columns alone
        f"table.{name}": target.tables[name][rows[f"table.{name}"]["columns"]].to_numpy() for name in fitted.facts_["tables"]
    }
    np.testing.assert_allclose(run_onnx(path, inputs), expected, rtol=0, atol=1e-9)
    without = replace(target, tables={})
    nobody = inputs | {name: np.full_like(value, np.nan) for name, value in inputs.items() if name.startswith("table.")}
    np.testing.assert_allclose(run_onnx(path, nobody), fitted.predict_proba(without)[:, 1], rtol=0, atol=1e-9)
    assert np.abs(fitted.predict_proba(without)[:, 1] - expected).max() > 1e-3
    first = {"age", "sex"} & set(fitted.facts_["inputs"])
    confounds = {name: [each["name"] for each in one["confounds"]] for name, one in rows.items() if "confounds" in one}
    after = ["age squared"] if first else []
    assert set(confounds["table.thickness"]) == first | set(after)
    if "table.aseg of 7" in rows:
        assert confounds["table.aseg of 7"][-1] == "eTIV" and "NaN where one is missing" in rows["table.aseg of 7"]["prepared"]
    assert ("phenotypes" in rows) == bool(first)


def test_what_cannot_be_exported_is_a_sentence(fold, tmp_path, monkeypatch):
    fitted = make("fc-logistic").fit(fold.source)
    with pytest.raises(InputError, match=r"model\.pb: the name of an ONNX file must end in \.onnx"):
        export_onnx(fitted, tmp_path / "model.pb")
    with pytest.raises(InputError, match="method fc-logistic is not fitted; fit it before exporting"):
        export_onnx(make("fc-logistic"), tmp_path / "model.onnx")
    for name, sentence in NO_GRAPH.items():
        with pytest.raises(InputError, match=sentence):
            export_onnx(make(name, "small" if name == "average" else None), tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"as ONNX cannot compute partial; with --prepared, the graph takes features"):
        export_onnx(make("braingnn", **small("braingnn") | {"epochs": 1}).fit(fold.source), tmp_path / "model.onnx")
    monkeypatch.setattr("m2lgdg.deploy.onnx.run_onnx", lambda content, inputs: np.full(3, 0.123))
    for takes_prepared in (True, False):
        with pytest.raises(InputError, match=r"was not written: its probabilities differ by .*\."):
            export_onnx(fitted, tmp_path / "model.onnx", takes_prepared=takes_prepared)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r'needs onnxruntime; install it with: pip install "m2lgdg\[onnx\]"'):
        export_onnx(fitted, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_command(fold, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    make("fc-svm").fit(fold.source).save("model")
    code, out, _ = typed("export", "model", "--out", "fc.onnx")
    assert code == 0 and "Wrote fc.onnx, and fc.json on its inputs, which are scans and phenotypes as they are." in out
    assert json.loads(Path("fc.json").read_text())["inputs"][0]["shape"] == ["subject", "time", len(fold.source.rois)]
    code, out, _ = typed("export", "model", "--out", "prepared.onnx", "--prepared")
    assert code == 0 and "Wrote prepared.onnx, and prepared.json on how to prepare its inputs." in out
    assert Path("fc.onnx").stat().st_size > 0


def shrunk(rows):
    """Ledoit-Wolf covariance, by scikit-learn."""
    return ledoit_wolf(rows - rows.mean(axis=0), assume_centered=True)[0]


def tangent(matrix, reference):
    w, v = np.linalg.eigh(np.array(reference))
    root = v @ np.diag(w**-0.5) @ v.T
    w, v = np.linalg.eigh(root @ matrix @ root)
    log = v @ np.diag(np.log(w)) @ v.T
    rows, columns = np.triu_indices(len(log))
    return log[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        *("fc-logistic", "tangent-logistic", "tangent-pearson-ridge", "brainnetcnn", "brainnet-transformer", "braingnn"),
        *("m2lgdg-connectome", "connectome-adaptive"),
    ],
)
def test_the_inputs_of_a_model_of_connectomes(name, kind, fold):
    """As somebody would make them who has the connectome and the words of the JSON."""
    spread = np.linspace(0.5, 3.0, len(fold.source.rois))
    change = {
        "fisher-z": lambda r: np.arctanh(np.clip(r, -0.9999, 0.9999)),
        "covariance": lambda r: r * np.outer(spread, spread),
    }

    def made(cohort):
        matrices = [change.get(kind, np.array)(one) for one in correlations(cohort.series)]
        return replace(cohort, series=Connectomes.of(matrices, kind, len(spread)))

    quick = {"epochs": 1} if name.startswith(("brain", "m2lgdg")) else {}
    fitted = make(name, **small(name) | quick if quick else {}).fit(made(fold.source), seed=0)
    target = made(fold.target)
    inputs = prepared(fitted, target)
    words = {one["name"]: one for one in described(fitted, inputs)["inputs"]}
    own = np.array(target.connectomes[0], dtype=np.float64)
    r = {"fisher-z": np.tanh, "covariance": lambda c: c / np.outer(spread, spread)}.get(kind, np.array)(own)
    np.fill_diagonal(r, 1.0)
    z = np.arctanh(np.clip(r, -0.999, 0.999))
    least = min(np.linalg.eigvalsh(r)[0], 0.0)
    a = (0.2 - least) / (1 - least)
    definite = (1 - a) * r + a * np.eye(len(r))
    inverse = np.linalg.inv(definite)
    partial = r if kind == "partial-correlation" else inverse / np.sqrt(np.outer(np.diag(inverse), np.diag(inverse)))
    off = np.not_equal(*np.triu_indices(len(z)))
    by_hand = {
        ("fc", 2): lambda _: z[np.triu_indices(len(z), 1)],
        ("fc", 3): lambda _: z * (1 - np.eye(len(z))),
        ("correlation", 3): lambda _: r,
        ("partial", 3): lambda _: np.abs(partial) * (1 - np.eye(len(z))),
        ("tangent", 2): lambda one: tangent(definite, one["reference"]),
        ("tangent_pearson", 2): lambda one: tangent(shrunk(r), one["reference"]),
        ("log_euclidean", 2): lambda _: tangent(shrunk(r), np.eye(len(r))),
        ("log_edges", 2): lambda _: tangent(shrunk(r), np.eye(len(r)))[off],
    }
    said = {"fisher-z": "Fisher z of the conn", "covariance": "divided by the sds of both ROIs", "correlation": "the correlat"}
    for block, one in words.items():
        if block != "phenotypes":
            np.testing.assert_allclose(inputs[block][0], by_hand[block, inputs[block].ndim](one), atol=2e-5)
            assert said.get(kind, "the partial correlations of the connectome") in one["prepared"]
            assert "series" not in one["prepared"]
    assert described(fitted, inputs)["scans"] == kind
