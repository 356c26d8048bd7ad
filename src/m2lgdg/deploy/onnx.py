"""ONNX export of a fitted method for other languages, with a JSON file on its inputs.

The graph maps scans, phenotypes and tables to the calibrated probability of being a patient (`onnx_scans.py`), or, if asked
for, prepared inputs: the steps before it (resampling, connectivity, imputation) are then described in the JSON file.
Predictions in Python do not need this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from m2lgdg import scans
from m2lgdg.cohort import Cohort, Parcellation
from m2lgdg.connectivity import correlations
from m2lgdg.deep import Batch, DeepMethod
from m2lgdg.deploy.onnx_features import logarithm_nodes
from m2lgdg.deploy.onnx_inputs import PREPARED, RAW_TABLE, TABLE, prepared_connectome
from m2lgdg.deploy.onnx_scans import PHENOTYPES, Part, ScanGraph, described_scans, raw_inputs
from m2lgdg.devices import plain_form
from m2lgdg.method import Method
from m2lgdg.methods.amplitude import AmplitudeRange, UsesAmplitude
from m2lgdg.methods.linear import Linear, Prior
from m2lgdg.methods.m2lgdg_structure import PREFIX as TABLE_PREFIX
from m2lgdg.methods.m2lgdg_structure import WithTables
from m2lgdg.methods.tables import CONFOUNDS, TableBlock
from m2lgdg.metrics import logit
from m2lgdg.model.atlases import PREFIX, targets_of
from m2lgdg.model.model import Model
from m2lgdg.preprocess import CATEGORICAL, PhenotypeScaler
from m2lgdg.storage import InputError, needing, one_line, write_texts

Arrays = dict[str, npt.NDArray[Any]]
FORMAT, OF_SCANS = "m2lgdg-onnx-1", "m2lgdg-onnx-2"  # of a graph that takes prepared inputs, and of one that takes scans
OPSET = 18
TOLERANCE = 5e-5  # largest difference allowed between probabilities of the graph and of the method, in single precision
MOST = float(logit(np.array(1.0)))  # logits beyond it are clipped before another calibration, as in Python
SCAN_TOLERANCE = 1e-5  # the same with the features inside of the graph
VOLUMES, FEWER = 150, 97  # of synthetic subjects, so that the graph is tried with another length than it was traced with
TRIED = 3  # synthetic subjects on which the graph is compared with the method before it is written


class _Graph(nn.Module):
    """Inputs to the probability of being a patient: calibrated logit, then new-site or local calibration and site level."""

    def __init__(self, fitted: Method | Model) -> None:
        super().__init__()
        self.calibration = nn.Parameter(torch.from_numpy(np.array(fitted.state_["calibration"], dtype=np.float64)))
        self.after: nn.Parameter | None = None  # calibration of the model, after that of its method

    def logit(self, *values: Tensor) -> Tensor:
        """(subject,) calibrated logit."""
        raise NotImplementedError

    def forward(self, *values: Tensor) -> Tensor:
        """(subject,) probability of being a patient."""
        logit = self.logit(*values)
        return torch.sigmoid(logit if self.after is None else self.after[0] * logit.clamp(-MOST, MOST) + self.after[1])


class _NetworkGraph(_Graph):
    """Network with its calibration: features and phenotypes to the logit."""

    def __init__(self, fitted: DeepMethod, names: list[str]) -> None:
        super().__init__(fitted)
        self.network, self.names = plain_form(fitted.network()), names

    def logit(self, *values: Tensor) -> Tensor:
        """(subject,) calibrated difference of the network's logits."""
        given = dict(zip(self.names, values, strict=True))
        unknown = torch.zeros_like(values[0].flatten(1)[:, 0], dtype=torch.int64)  # labels and sites are not known here
        phenotypes = given.pop("phenotypes", values[0].flatten(1)[:, :0])
        logits = self.network(Batch(given, phenotypes, unknown, unknown)).double()  # (subject, 2)
        calibrated: Tensor = self.calibration[0] * (logits[:, 1] - logits[:, 0]) + self.calibration[1]
        return calibrated


class _LinearGraph(_Graph):
    """Linear method with its calibration: sum of its blocks and tables to the logit."""

    def __init__(self, fitted: Linear, names: list[str]) -> None:
        super().__init__(fitted)
        self.names, self.blocks = names, list(fitted._weights())
        intercept = sum(float(fitted.state_[f"{name}.intercept"]) for name in self.blocks)
        self.intercept = nn.Parameter(torch.tensor(intercept, dtype=torch.float64))  # a Python float would become float32
        self.weights = nn.ParameterList(torch.from_numpy(np.array(fitted.state_[f"{name}.weights"])) for name in self.blocks)
        self.tables = nn.ModuleList(_TableGraph(table, fitted.facts_["inputs"]) for table in fitted.table_blocks())

    def logit(self, *values: Tensor) -> Tensor:
        """(subject,) calibrated sum of the decisions of blocks and tables."""
        given = dict(zip(self.names, values, strict=True))
        decisions = [given[name] @ weight for name, weight in zip(self.blocks, self.weights, strict=True)]
        phenotypes = given.get("phenotypes", values[0][:, :0])
        decisions += [table(given[f"{TABLE_PREFIX}{table.name}"], phenotypes) for table in self.tables]
        return self.calibration[0] * (torch.stack(decisions).sum(dim=0) + self.intercept) + self.calibration[1]


class _TableGraph(nn.Module):
    """Table of a linear method: its values, with NaN where one is missing, and scaled phenotypes to its decision."""

    fill_: Tensor
    head_: Tensor
    slopes_: Tensor
    weights_: Tensor
    intercept_: Tensor
    absent_: Tensor

    def __init__(self, table: TableBlock, inputs: list[str]) -> None:
        super().__init__()
        self.name, self.columns = table.name, len(table.columns)
        self.confounds = [i for i, name in enumerate(inputs) if name in CONFOUNDS]
        self.age = [i for i in self.confounds if inputs[i] == "age"]
        self.head = None if table.head_column is None else table.columns.index(table.head_column)
        for name in ("fill", "head", "slopes", "weights", "intercept", "absent"):
            self.register_parameter(f"{name}_", nn.Parameter(torch.from_numpy(table[name].copy())))

    def forward(self, values: Tensor, phenotypes: Tensor) -> Tensor:
        """(subject,) decision of the (subject, column) values; that for subjects without the table, if most are missing."""
        missing = torch.isnan(values)
        filled = torch.where(missing, self.fill_, values)  # (subject, column)
        confounds = [phenotypes[:, i] for i in self.confounds] + [phenotypes[:, i] ** 2 for i in self.age]
        confounds += [] if self.head is None else [(filled[:, self.head] - self.head_[0]) / self.head_[1]]
        cleaned = filled - torch.stack(confounds, dim=1) @ self.slopes_ if confounds else filled  # (subject, column)
        present = 2 * missing.sum(dim=1) <= self.columns
        return torch.where(present, cleaned @ self.weights_ + self.intercept_, self.absent_)


class _AverageGraph(_Graph):
    """Graphs of the members of a model of several atlases, the mean of their logits, and its calibration."""

    def __init__(self, fitted: Model, inputs: Arrays) -> None:
        super().__init__(fitted)
        owned = list(_by_member(fitted, inputs))
        self.counts = [len(own) for _, _, own in owned]
        self.members = nn.ModuleList(_member_graph(member, list(own)) for _, member, own in owned)

    def logit(self, *values: Tensor) -> Tensor:
        """(subject,) calibrated mean of the members' logits."""
        logits, start = [], 0
        for member, count in zip(self.members, self.counts, strict=True):
            assert isinstance(member, _Graph)
            logits.append(member.logit(*values[start : start + count]).clamp(-MOST, MOST))
            start += count
        return self.calibration[0] * torch.stack(logits).mean(0) + self.calibration[1]


def _by_member(fitted: Model, inputs: Arrays) -> Iterator[tuple[str, Method, Arrays]]:
    """Each member with its inputs, and the prefix that their names have in a model of several atlases."""
    for i, member in enumerate(fitted.members.values()):
        prefix = PREFIX.format(i) if len(fitted.members) > 1 else ""
        own = {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
        yield prefix, member, own


def export_onnx(fitted: Model, path: str | Path, *, takes_prepared: bool = False) -> Path:
    """Write the graph of a fitted method to `path` (.onnx), and the description of its inputs to a .json file of that name.

    The graph takes scans and phenotypes as they are, or with `takes_prepared` the features and scaled phenotypes of the method.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise InputError(f"{path}: the name of an ONNX file must end in .onnx.")
    if isinstance(fitted.method, Prior):
        raise InputError("method prior uses no inputs, so there is no graph to export.")
    if not isinstance(fitted.method, DeepMethod | Linear):
        raise InputError(f"method {fitted.name} cannot be exported: it is neither a network nor a linear method.")
    if not fitted.members:
        raise InputError(f"method {fitted.name} is not fitted; fit it before exporting.")
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        _need(needed)
    with fitted.checking_weights():
        subjects = _synthetic(fitted)
        inputs = prepared(fitted, subjects)
        tried, tolerance, parts = [(subjects, inputs)], TOLERANCE, []
        if not takes_prepared:
            parts, tolerance = parts_of(fitted, inputs), SCAN_TOLERANCE
            tried = [(one, raw_inputs(parts, one)) for one in (subjects, _shorter(subjects))]
        content, used = _converted(fitted, inputs, parts, tried[0][1])
        for cohort, given in tried:
            error = float(np.abs(run_onnx(content, given) - fitted.predict_proba(cohort)[:, 1]).max())
            if not error <= tolerance:
                raise InputError(
                    f"the ONNX graph of method {fitted.name} was not written: its probabilities differ by {error:.1e}."
                )
    about = described(fitted, {name: inputs[name] for name in used}) if takes_prepared else described_whole(fitted, parts, used)
    description = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False)
    write_texts(path.parent, {path.name: content, path.with_suffix(".json").name: description + "\n"})  # both or none
    return path


def parts_of(fitted: Model, inputs: Arrays) -> list[Part]:
    """The members of a model with their prepared inputs."""
    return [
        Part(prefix, member, own, _scaler(member) if PHENOTYPES in own else None)
        for prefix, member, own in _by_member(fitted, inputs)
    ]


def _shorter(cohort: Cohort) -> Cohort:
    """Subjects with fewer volumes, if they have series, one of whom lacks a phenotype."""
    table = cohort.phenotypes.astype(np.float64)
    if table.shape[1]:
        table.iloc[0, 0] = np.nan

    def cut(held: Any) -> Any:
        return held if isinstance(held, scans.Connectomes) else tuple(one[:FEWER] for one in held)

    further = {name: Parcellation(one.rois, cut(one.scans)) for name, one in cohort.parcellations.items()}
    return dataclasses.replace(cohort, series=cut(cohort.scans), parcellations=further, phenotypes=table)


def _member_graph(fitted: Method, names: list[str]) -> _Graph:
    return _NetworkGraph(fitted, names) if isinstance(fitted, DeepMethod) else _LinearGraph(fitted, names)  # type: ignore[arg-type]


def prepared(fitted: Model, cohort: Cohort) -> Arrays:
    """Inputs of the graph by name, (subject, ...): float32 for networks, float64 for linear methods.

    The inputs of a model of several atlases are those of its members, with the number of the atlas before their names.
    """
    targets = targets_of(fitted.members, cohort)
    if len(targets) < len(fitted.members) or any(len(one.rows) < len(cohort) for one in targets):
        raise InputError(f"the graph needs all atlases of the model ({', '.join(fitted.members)}) for each subject.")
    of_members = [_member_inputs(one.member, one.target) for one in targets]
    if len(of_members) == 1:
        return of_members[0]
    return {f"{PREFIX.format(i)}{name}": value for i, given in enumerate(of_members) for name, value in given.items()}


def _member_inputs(fitted: Method, cohort: Cohort) -> Arrays:
    cohort = cohort.with_inputs(fitted.facts_["inputs"], allow_proxies=True).unlabelled()
    if isinstance(fitted, Linear):
        tables = fitted.table_blocks()
        scaled = ["phenotypes"] if tables and cohort.inputs else []  # age and sex are taken out of tables
        blocks = {name: fitted._features(name, cohort).astype(np.float64) for name in (*fitted._weights(), *scaled)}
        return blocks | {f"{TABLE_PREFIX}{one.name}": one.rows(cohort) for one in tables}
    assert isinstance(fitted, DeepMethod)
    batch = fitted.make_batch(cohort, _scaler(fitted), torch.device("cpu"))
    features = {name: value.numpy() for name, value in batch.features.items()}
    return features | ({"phenotypes": batch.phenotypes.numpy()} if cohort.inputs else {})


def described(fitted: Model, inputs: Arrays) -> dict[str, Any]:
    """Description of the inputs and the output of a graph that takes prepared inputs, for other programs."""
    several = len(fitted.members) > 1
    rows = [
        _described_input(member, name, value)
        | ({"name": f"{prefix}{name}", "atlas": member.facts_["atlas"]} if several else {})
        for prefix, member, own in _by_member(fitted, inputs)
        for name, value in own.items()
    ]
    return {"format": FORMAT, **_described(fitted), "inputs": rows}


def described_whole(fitted: Model, parts: list[Part], used: list[str]) -> dict[str, Any]:
    """The same of a graph that takes scans."""
    rows = [row for row in described_scans(parts) if row["name"] in used]
    return {"format": OF_SCANS, **_described(fitted), "inputs": rows}


def _described(fitted: Model) -> dict[str, Any]:
    """Description of what is not an input."""
    from m2lgdg import __version__

    several = len(fitted.members) > 1
    return {
        "method": fitted.name,
        "use": "Research use; not a diagnostic device.",
        "output": {"name": "proba", "type": "float64", "shape": ["subject"], "threshold": fitted.threshold},
        **({} if fitted.site_level is None else {"site_level": fitted.site_level._asdict()}),
        "atlas": fitted.facts_["atlas"],
        "rois": fitted.facts_["rois"],
        "scans": fitted.facts_.get("scans", scans.SERIES),
        **({"atlases": {name: one.facts_["rois"] for name, one in fitted.members.items()}} if several else {}),
        "versions": {"m2lgdg": __version__, "torch": torch.__version__, "opset": OPSET},
    }


def _described_input(fitted: Method, name: str, value: npt.NDArray[Any]) -> dict[str, Any]:
    """Description of an input of one member."""
    kind = fitted.facts_.get("scans", scans.SERIES)
    how = PREPARED.get((name, value.ndim)) if kind == scans.SERIES else prepared_connectome(kind, name, value.ndim)
    how = how or f"as computed by `features` of the method: {name}"
    row: dict[str, Any] = {"name": name, "type": str(value.dtype), "shape": ["subject", *value.shape[1:]], "prepared": how}
    if name in ("series", "scaled_series"):
        row["length"] = value.shape[2]
    if name in ("tangent", "tangent_pearson"):
        row["reference"] = fitted.state_[f"{name}.reference"].tolist()
    if name == "amplitude" and isinstance(fitted, UsesAmplitude):
        row |= _amplitude_range(fitted)
    if name == "phenotypes":
        row["columns"] = _columns(_scaler(fitted))
    for table in _tables(fitted):
        if name == f"{TABLE_PREFIX}{table.name}":
            row |= {"columns": table.columns, "confounds": _table_confounds(fitted, table)}
            if isinstance(fitted, Linear):
                row |= {"prepared": RAW_TABLE, "fill": table["fill"].tolist()}
            else:
                row |= {"prepared": TABLE} | {array: table[array].tolist() for array in ("fill", "slopes", "mean", "scale")}
    return row


def _tables(fitted: Method) -> list[TableBlock]:
    """The tables that a method was fitted with."""
    return fitted.table_blocks() if isinstance(fitted, Linear | WithTables) else []


def _table_confounds(fitted: Method, table: TableBlock) -> list[dict[str, Any]]:
    """What is regressed out of a table, in the order of its slopes."""
    scaler = fitted.confound_scaler() if isinstance(fitted, WithTables) else _scaler(fitted)
    listed = [one for one in _columns(scaler) if one["name"] in CONFOUNDS]
    if any(one["name"] == "age" for one in listed):
        listed.append({"name": "age squared", "kind": "square of the scaled age"})
    if table.head_column is not None:
        mean, scale = table["head"].tolist()
        listed.append({"name": table.head_column, "kind": "column of the table", "mean": mean, "scale": scale})
    return listed


def _amplitude_range(fitted: UsesAmplitude) -> dict[str, Any]:
    """Arrays behind the rule for scans that are scaled differently from source; an infinite bound is null."""
    state = fitted.amplitude_state
    bounds = AmplitudeRange.restore(state)
    shown = {name: [x if np.isfinite(x) else None for x in getattr(bounds, name).tolist()] for name in ("low", "high")}
    return {"profile": bounds.profile.tolist(), **shown, "mean": state["amplitude.mean"].tolist()}


def run_onnx(graph: bytes | str | Path, inputs: Arrays) -> npt.NDArray[np.float64]:
    """(subject,) probabilities computed by onnxruntime on the CPU."""
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    content = graph if isinstance(graph, bytes) else str(graph)
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return np.asarray(session.run(["proba"], {name: inputs[name] for name in names})[0], dtype=np.float64)


def _converted(fitted: Model, inputs: Arrays, parts: list[Part], given: Arrays) -> tuple[bytes, list[str]]:
    """Bytes of the ONNX file, and the names of its inputs (some networks use no phenotypes), traced with those given.

    With parts, the graph takes scans.

    Source locations that the exporter stores with each operation are removed, because they contain local paths.
    """
    graph = _AverageGraph(fitted, inputs) if len(fitted.members) > 1 else _member_graph(fitted.method, list(inputs))
    if fitted.recalibration is not None:
        graph.after = nn.Parameter(torch.tensor(fitted.recalibration, dtype=torch.float64))
    whole = ScanGraph(parts, graph, list(given)) if parts else graph
    whole.eval()
    subject, time = torch.export.Dim("subject"), torch.export.Dim("time", min=2, max=100_000)
    of_series = {part.scan for part in parts if part.member.trained_on == scans.SERIES}
    dynamic = tuple({0: subject, 1: time} if name in of_series else {0: subject} for name in given)
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                whole,
                tuple(map(torch.from_numpy, given.values())),
                input_names=list(given),
                output_names=["proba"],
                opset_version=OPSET,
                dynamic_shapes=(dynamic,),
                custom_translation_table={
                    torch.ops.aten.sort.stable: _stable_sort,
                    torch.ops.m2lgdg.matrix_logarithm.default: logarithm_nodes,
                },
                optimize=False,  # runtimes optimise on loading; constant folding of a deep network takes a minute here
                verbose=False,
            )
            proto = program.model_proto
    except torch.onnx.OnnxExporterError as error:
        reason = one_line(error.__cause__ or error)[-300:]
        raise InputError(f"method {fitted.name} has an operation that ONNX does not support ({reason}).") from None
    described = (*proto.graph.node, *proto.graph.value_info, *proto.graph.input, *proto.graph.output)
    for one in (proto, proto.graph, *described, *(node for function in proto.functions for node in function.node)):
        one.ClearField("metadata_props")
        one.ClearField("doc_string")
    used = {name for node in proto.graph.node for name in node.input}
    for unused in [value for value in proto.graph.input if value.name not in used]:
        proto.graph.input.remove(unused)
    return bytes(proto.SerializeToString()), [value.name for value in proto.graph.input]


def _stable_sort(values: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """Stable sort in ONNX: TopK over all values, which keeps the order of equal ones."""
    opset = _need("onnxscript").opset18
    size = opset.Gather(opset.Shape(values), opset.Constant(value_ints=[dim]), axis=0)
    return opset.TopK(values, size, axis=dim, largest=int(descending), sorted=1)


def _synthetic(fitted: Model) -> Cohort:
    """Synthetic subjects of noise with the atlases, ROIs and phenotypes of a model, to trace and test its graph."""
    (name, first), *others = [(name, _synthetic_in_atlas(member)) for name, member in fitted.members.items()]
    if not others:
        return first
    further = {other: Parcellation(made.rois, made.scans) for other, made in others}
    tables = dict(first.tables)
    for _, made in others:  # a member may have been fitted without some columns
        tables |= {table: tables[table].combine_first(own) if table in tables else own for table, own in made.tables.items()}
    return dataclasses.replace(first, atlas=name, parcellations=further, tables=tables)


def _synthetic_in_atlas(fitted: Method) -> Cohort:
    draw = np.random.default_rng(0)
    rois, inputs = tuple(fitted.facts_["rois"]), fitted.facts_["inputs"]
    names = [f"made-up-{i}" for i in range(TRIED)]
    table = pd.DataFrame(index=names)
    if inputs:
        scaler = _scaler(fitted)
        spread = np.where(np.isfinite(scaler.scale), scaler.scale, 0.0)
        table = pd.DataFrame(scaler.mean + spread * draw.normal(size=(TRIED, len(inputs))), index=names, columns=inputs)
    drawn: Any = [draw.normal(size=(VOLUMES, len(rois))).cumsum(axis=0).astype(np.float32) for _ in names]
    kind = fitted.facts_.get("scans", scans.SERIES)
    if kind != scans.SERIES:  # correlations are also covariances and, in form, partial correlations
        kind = scans.CORRELATION if kind == scans.FISHER_Z else kind
        drawn = scans.Connectomes.of(correlations(drawn), kind, len(rois))
    tables = {}
    for one in _tables(fitted):
        noise = draw.normal(size=(TRIED, len(one.columns)))
        values = one["fill"] + one["scale"] * noise / 2  # well within the unit of source
        values[1, ::3], values[2] = np.nan, np.nan  # a third of the columns without a value, and a subject without any
        tables[one.name] = pd.DataFrame(values, index=names, columns=one.columns)
    made = Cohort(
        drawn, np.array(names), np.array([""] * TRIED), np.full(TRIED, -1), rois, table, tuple(inputs), allow_proxies=True
    )
    return made.with_tables(tables) if tables else made


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
    with needing("onnx", "ONNX export"):
        return importlib.import_module(package)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages about other packages; errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
