"""A fitted method as an ONNX graph, with a JSON beside it that says how its inputs are prepared, for other languages.

The graph goes from prepared inputs to the calibrated probability of the patient; what stands before it (resampling,
connectivity, imputation) is told in words and numbers. Stands after the methods; nothing of it is needed to predict here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import CLIP
from m2lgdg.deep import Batch, DeepMethod
from m2lgdg.fast import plain_form
from m2lgdg.method import Method
from m2lgdg.methods.linear import Linear, Prior
from m2lgdg.preprocess import CATEGORICAL, SERIES_EPSILON, PhenotypeScaler
from m2lgdg.storage import InputError, one_line, write_bytes, write_text

FORMAT = "m2lgdg-onnx-1"
OPSET = 18
TOLERANCE = 1e-5  # how far the graph's probabilities may be from the method's own
TRIED = 3  # made-up subjects on which the graph is compared before it is written

CORRELATION = (
    "Pearson correlations of the (time, roi) series in double precision; 0 with a ROI that never changes; clipped to "
    f"-{CLIP} ... {CLIP}; then Fisher z, arctanh"
)
SHRUNK = "Ledoit-Wolf covariance of the series after each ROI was set to mean 0 and sd 1 (a ROI that never changes: 0)"
EDGES = "of the ROI pairs (i, j), i < j, row by row: (1,2), (1,3), ..., (2,3), ..."
PREPARED = {  # by name, and whether it is of one value an edge (2 dimensions) or a matrix (3)
    ("series", 3): (
        "each ROI resampled to the given length by a not-a-knot cubic spline through equally spaced points, first and last "
        f"kept; then minus its mean, divided by (its population sd + {SERIES_EPSILON:g}); transposed to (roi, time)"
    ),
    ("fc", 2): f"{CORRELATION}; {EDGES}",
    ("steady", 2): (
        "of the series after each ROI was set to mean 0 and sd 1: e, the mean square over ROIs at each time point; weights "
        "1 / (1 + (e / median of e)^2) of the time points; weighted Pearson correlations in double precision; 0 with a ROI "
        f"that never changes; clipped to -{CLIP} ... {CLIP}; then Fisher z, arctanh; {EDGES}"
    ),
    ("swings", 2): f"of the absolute values of the series after each ROI was set to mean 0 and sd 1: {CORRELATION}; {EDGES}",
    ("fc", 3): f"{CORRELATION}; the whole symmetric matrix, with 0 on the diagonal",
    ("partial", 3): f"absolute partial correlations from the inverse of the {SHRUNK}; 0 on the diagonal",
    ("tangent", 2): (
        f"{SHRUNK}, at least 1e-6 of the mean variance added to its diagonal; W C W with W the inverse square root of "
        "`reference`; its matrix logarithm; upper triangle with the diagonal, row by row, off-diagonal times sqrt 2"
    ),
    ("amplitude", 2): (
        "log of the population sd of each ROI of the series as it is, minus the mean of these logs over ROIs; ROIs that never "
        "change do not count and are 0"
    ),
    ("phenotypes", 2): "missing values replaced by `fill`, minus `mean`, divided by `scale`; 0 where `scale` is null",
}


def calibration_of(fitted: Method) -> tuple[float, float]:
    """Slope and offset of the logit: the method's own, and on top of it those promised or those of a site, if any."""
    slope, offset = map(float, fitted.state_["calibration"])
    after, added = fitted.recalibration or (1.0, 0.0)
    return after * slope, after * offset + added


class _NetworkGraph(nn.Module):
    """A network and its calibration: features and phenotypes to probability."""

    def __init__(self, fitted: DeepMethod, names: list[str]) -> None:
        super().__init__()
        self.network, self.names = plain_form(fitted.network()), names
        self.calibration = nn.Parameter(torch.tensor(calibration_of(fitted), dtype=torch.float64))

    def forward(self, *values: Tensor) -> Tensor:
        """(subject,) probability of the patient."""
        given = dict(zip(self.names, values, strict=True))
        nobody = torch.zeros_like(values[0].flatten(1)[:, 0], dtype=torch.int64)  # labels and sites are unknown here
        phenotypes = given.pop("phenotypes", values[0].flatten(1)[:, :0])
        logits = self.network(Batch(given, phenotypes, nobody, nobody)).double()  # (subject, 2)
        return torch.sigmoid(self.calibration[0] * (logits[:, 1] - logits[:, 0]) + self.calibration[1])


class _LinearGraph(nn.Module):
    """The calibrated sum of the blocks of a linear method."""

    def __init__(self, fitted: Linear, names: list[str]) -> None:
        super().__init__()
        intercept = sum(float(fitted.state_[f"{name}.intercept"]) for name in names)
        self.intercept = nn.Parameter(torch.tensor(intercept, dtype=torch.float64))  # a plain number would become float32
        self.calibration = nn.Parameter(torch.tensor(calibration_of(fitted), dtype=torch.float64))
        self.weights = nn.ParameterList(torch.from_numpy(np.array(fitted.state_[f"{name}.weights"])) for name in names)

    def forward(self, *values: Tensor) -> Tensor:
        """(subject,) probability of the patient."""
        total = torch.stack([value @ weight for value, weight in zip(values, self.weights, strict=True)]).sum(dim=0)
        return torch.sigmoid(self.calibration[0] * (total + self.intercept) + self.calibration[1])


def export_onnx(fitted: Method, path: str | Path) -> Path:
    """Write the graph of a fitted method to `path` (.onnx) and what its inputs are to a JSON file of the same name."""
    path = Path(path)
    if path.suffix != ".onnx":
        raise InputError(f"{path}: an ONNX file ends in .onnx.")
    graph_class(fitted)
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        _need(needed)
    with fitted.doubted():
        some = _made_up(fitted)
        expected = fitted.predict_proba(some)[:, 1]
        inputs = prepared(fitted, some)
        content, used = _converted(fitted, inputs)
    inputs = {name: inputs[name] for name in used}
    error = float(np.abs(run_onnx(content, inputs) - expected).max())
    if not error <= TOLERANCE:
        raise InputError(f"the ONNX graph of method {fitted.name} gives other probabilities ({error:.1e} apart): not written.")
    told = json.dumps(described(fitted, inputs), indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, content)
    write_text(path.with_suffix(".json"), told + "\n")
    return path


def graph_class(fitted: Method) -> type[nn.Module]:
    """Which graph a method becomes; methods that have none are refused."""
    if isinstance(fitted, Prior):
        raise InputError("method prior looks at nobody and gives everybody the same: there is no graph to export.")
    if not isinstance(fitted, DeepMethod | Linear):
        raise InputError(f"method {fitted.name} is neither a network nor one of the linear methods: it cannot be exported.")
    if not hasattr(fitted, "state_"):
        raise InputError(f"method {fitted.name} is not fitted yet, there is nothing to export.")
    return _NetworkGraph if isinstance(fitted, DeepMethod) else _LinearGraph


def prepared(fitted: Method, cohort: Cohort) -> dict[str, npt.NDArray[Any]]:
    """What the graph takes in, by name, (subject, ...): float32 of networks, float64 of linear methods."""
    cohort = cohort.with_inputs(fitted.facts_["inputs"], allow_proxies=True).unlabelled()
    if isinstance(fitted, Linear):
        return {name: fitted._features(name, cohort) for name in fitted._weights()}
    assert isinstance(fitted, DeepMethod)
    device = torch.device("cpu")
    batch = fitted.make_batch(cohort, _scaler(fitted), device)
    found = {name: value.numpy() for name, value in batch.features.items()}
    return found | ({"phenotypes": batch.phenotypes.numpy()} if cohort.inputs else {})


def described(fitted: Method, inputs: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Everything another program must know to prepare the inputs of the graph and to read its answer."""
    from m2lgdg import __version__

    rows = []
    for name, value in inputs.items():
        how = PREPARED.get((name, value.ndim), f"as the method's own `features` makes {name}")
        row: dict[str, Any] = {"name": name, "type": str(value.dtype), "shape": ["subject", *value.shape[1:]], "prepared": how}
        if name == "series":
            row["length"] = value.shape[2]
        if name == "tangent":
            row["reference"] = fitted.state_["tangent.reference"].tolist()
        if name == "phenotypes":
            row["columns"] = _columns(_scaler(fitted))
        rows.append(row)
    return {
        "format": FORMAT,
        "method": fitted.name,
        "use": "Research use; not a diagnostic device.",
        "output": {"name": "proba", "type": "float64", "shape": ["subject"], "threshold": fitted.threshold},
        "inputs": rows,
        "atlas": fitted.facts_["atlas"],
        "rois": fitted.facts_["rois"],
        "versions": {"m2lgdg": __version__, "torch": torch.__version__, "opset": OPSET},
    }


def run_onnx(graph: bytes | str | Path, inputs: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """(subject,) probabilities that onnxruntime gives, on the CPU."""
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    content = graph if isinstance(graph, bytes) else str(graph)
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    asked = [one.name for one in session.get_inputs()]
    return np.asarray(session.run(["proba"], {name: inputs[name] for name in asked})[0], dtype=np.float64)


def _converted(fitted: Method, inputs: dict[str, npt.NDArray[Any]]) -> tuple[bytes, list[str]]:
    """The ONNX file, and which inputs it takes: some networks see no phenotypes.

    The exporter notes where in the source each operation comes from, which nobody else must see.
    """
    graph = graph_class(fitted)(fitted, list(inputs)).eval()
    subject = torch.export.Dim("subject")
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                graph,
                tuple(map(torch.from_numpy, inputs.values())),
                input_names=list(inputs),
                output_names=["proba"],
                opset_version=OPSET,
                dynamic_shapes=(tuple({0: subject} for _ in inputs),),
                custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
                optimize=False,  # a runtime optimizes as it loads; folding here takes a minute of a deep network
                verbose=False,
            )
            proto = program.model_proto
    except torch.onnx.OnnxExporterError as error:
        reason = one_line(error.__cause__ or error)[-300:]
        raise InputError(f"method {fitted.name} has an operation that ONNX does not know ({reason}).") from None
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for function in proto.functions:
        for node in function.node:
            node.ClearField("metadata_props")
    asked = {name for node in proto.graph.node for name in node.input}
    for unused in [one for one in proto.graph.input if one.name not in asked]:
        proto.graph.input.remove(unused)
    return bytes(proto.SerializeToString()), [one.name for one in proto.graph.input]


def _stable_sort(values: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """Sorting as ONNX has it: all of the top, where of equal values the earlier comes first."""
    known = _need("onnxscript").opset18
    size = known.Gather(known.Shape(values), known.Constant(value_ints=[dim]), axis=0)
    return known.TopK(values, size, axis=dim, largest=int(descending), sorted=1)


def _made_up(fitted: Method) -> Cohort:
    """A few subjects of noise with the ROIs and phenotypes of a model, to trace its graph with and to try it on."""
    draw = np.random.default_rng(0)
    rois, inputs = tuple(fitted.facts_["rois"]), fitted.facts_["inputs"]
    names = [f"made-up-{i}" for i in range(TRIED)]
    table = pd.DataFrame(index=names)
    if inputs:
        scaler = _scaler(fitted)
        spread = np.where(np.isfinite(scaler.scale), scaler.scale, 0.0)
        table = pd.DataFrame(scaler.mean + spread * draw.normal(size=(TRIED, len(inputs))), index=names, columns=inputs)
    series = [draw.normal(size=(150, len(rois))).cumsum(axis=0).astype(np.float32) for _ in names]
    return Cohort(
        series, np.array(names), np.array([""] * TRIED), np.full(TRIED, -1), rois, table, tuple(inputs), allow_proxies=True
    )


def _scaler(fitted: Method) -> PhenotypeScaler:
    prefix = "phenotypes.scaler" if isinstance(fitted, Linear) else "scaler"
    return PhenotypeScaler.restore(tuple(fitted.facts_["inputs"]), fitted.state_, prefix)


def _columns(scaler: PhenotypeScaler) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "kind": "category" if name in CATEGORICAL else "number",
            "fill": float(scaler.fill[i]),
            "mean": float(scaler.mean[i]),
            "scale": float(scaler.scale[i]) if np.isfinite(scaler.scale[i]) else None,
        }
        for i, name in enumerate(scaler.columns)
    ]


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise InputError(f"ONNX export needs the package {package}: pip install 'm2lgdg[onnx]'.") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's talk about other packages; what goes wrong is an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
