"""An ONNX graph that takes scans and phenotypes as they are: features, imputation and scaling before the graph of a method.

`onnx.py` exports it, unless prepared inputs are asked for. What `predict` refuses, a scan with NaN, of few volumes or without
any signal, has the probability NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from m2lgdg import scans
from m2lgdg.cohort import Cohort
from m2lgdg.deploy.onnx_features import Features, need_features
from m2lgdg.method import LEAST_VOLUMES, Method
from m2lgdg.methods.linear import Linear
from m2lgdg.methods.m2lgdg_structure import PREFIX as TABLE_PREFIX
from m2lgdg.methods.tables import rows_of
from m2lgdg.preprocess import PhenotypeScaler

Arrays = dict[str, npt.NDArray[Any]]
PHENOTYPES = "phenotypes"
CONNECTOME = "connectome"


class Part(NamedTuple):
    """A member of a model, the prefix of its inputs, and the inputs that its graph takes, prepared."""

    prefix: str
    member: Method
    inputs: Arrays
    scaler: PhenotypeScaler | None

    @property
    def scan(self) -> str:
        """Name of the input with its scan; empty if it takes none."""
        kind = scans.SERIES if self.member.trained_on == scans.SERIES else CONNECTOME
        return f"{self.prefix}{kind}" if any(not _is_other(name) for name in self.inputs) else ""


def _is_other(name: str) -> bool:
    return name == PHENOTYPES or name.startswith(TABLE_PREFIX)


class ScanGraph(nn.Module):
    """Scans, phenotypes and tables to the probability of a graph that takes prepared inputs."""

    def __init__(self, parts: list[Part], graph: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.method, self.names, self.parts = graph, names, parts
        self.features, self.scaling = nn.ModuleList(), nn.ModuleList()
        columns, self.table_columns = columns_of(parts)
        for part in parts:
            need_features(part.member, list(part.inputs))
            fc = part.inputs.get("fc")
            whole = fc is not None and fc.ndim == 3
            self.features.append(Features(part.member, list(part.inputs), whole) if part.scan else nn.Identity())
            self.scaling.append(_Scaling(part.scaler, columns) if part.scaler is not None else nn.Identity())

    def forward(self, *values: Tensor) -> Tensor:
        """(subject,) probability of being a patient; NaN for a scan that `predict` refuses."""
        given = dict(zip(self.names, values, strict=True))
        prepared, wrong = [], torch.zeros_like(values[0].flatten(1)[:, 0], dtype=torch.float64)
        for part, features, scaling in zip(self.parts, self.features, self.scaling, strict=True):
            found: dict[str, Tensor] = {}
            if part.scan:
                assert isinstance(features, Features)
                found = features(given[part.scan])
                wrong = wrong + features.sound(given[part.scan])
            if PHENOTYPES in part.inputs:
                scaled = scaling(given[PHENOTYPES])
                found[PHENOTYPES] = scaled if isinstance(part.member, Linear) else scaled.float()
            for name in part.inputs:
                if name.startswith(TABLE_PREFIX):
                    every, own = self.table_columns[name], _columns(part.member, name)
                    found[name] = given[name][:, [every.index(column) for column in own]]
            prepared += [found[name] for name in part.inputs]
        proba: Tensor = self.method(*prepared) + wrong
        return proba


class _Scaling(nn.Module):
    """Phenotypes, NaN where one is missing, to the imputed and scaled inputs of a member."""

    def __init__(self, scaler: PhenotypeScaler, columns: list[str]) -> None:
        super().__init__()
        self.own = [columns.index(name) for name in scaler.columns]
        known = np.isfinite(scaler.scale)
        inverse = np.where(known, 1 / np.where(known, scaler.scale, 1.0), 0.0)  # a constant phenotype is 0 for all
        self.fill, self.mean, self.inverse = (
            nn.Parameter(torch.from_numpy(np.array(one))) for one in (scaler.fill, scaler.mean, inverse)
        )

    def forward(self, values: Tensor) -> Tensor:
        """(subject, input) scaled phenotypes."""
        own = values[:, self.own]
        return (torch.where(torch.isnan(own), self.fill, own) - self.mean) * self.inverse


def _columns(member: Method, table: str) -> list[str]:
    columns: list[str] = member.facts_["tables"][table.removeprefix(TABLE_PREFIX)]["columns"]
    return columns


def columns_of(parts: list[Part]) -> tuple[list[str], dict[str, list[str]]]:
    """Phenotypes, and columns of each table, that any member takes."""
    phenotypes: dict[str, None] = {}
    tables: dict[str, dict[str, None]] = {}
    for part in parts:
        if PHENOTYPES in part.inputs and part.scaler is not None:
            phenotypes |= dict.fromkeys(part.scaler.columns)
        for name in part.inputs:
            if name.startswith(TABLE_PREFIX):
                tables.setdefault(name, {}).update(dict.fromkeys(_columns(part.member, name)))
    return list(phenotypes), {name: list(own) for name, own in tables.items()}


def raw_inputs(parts: list[Part], cohort: Cohort) -> Arrays:
    """Inputs of the graph for subjects whose scans have one length: as they are in the cohort."""
    phenotypes, tables = columns_of(parts)
    given: Arrays = {}
    for part in parts:
        if part.scan:
            seen = cohort.parcellation(part.member.facts_["atlas"]) if len(parts) > 1 else cohort
            held: Any = seen.connectomes if part.member.trained_on != scans.SERIES else seen.series
            given[part.scan] = np.stack([_in_kind(np.asarray(one), seen.values, part.member.trained_on) for one in held])
    if phenotypes:
        given[PHENOTYPES] = cohort.phenotypes[phenotypes].to_numpy(dtype=np.float64)
    for name, columns in tables.items():
        given[name] = rows_of(cohort, name.removeprefix(TABLE_PREFIX), columns)
    return given


def _in_kind(matrix: npt.NDArray[Any], values: str, kind: str) -> npt.NDArray[Any]:
    """A connectome in the kind of the training data; only correlations and Fisher z are turned into each other."""
    if values == kind:
        return matrix
    other = np.arctanh(np.clip(matrix, -scans.CLIP, scans.CLIP)) if kind == scans.FISHER_Z else np.tanh(matrix)
    return np.asarray(other, dtype=np.float32)


def described_scans(parts: list[Part]) -> list[dict[str, Any]]:
    """Description of each input."""
    phenotypes, tables = columns_of(parts)
    rows: list[dict[str, Any]] = []
    for part in parts:
        kind, n = part.member.trained_on, len(part.member.facts_["rois"])
        if part.scan and kind == scans.SERIES:
            what = f"the series as it was extracted, in the units of the training data, of {LEAST_VOLUMES} volumes or more"
            rows.append({"name": part.scan, "type": "float32", "shape": ["subject", "time", n], "given": what})
        elif part.scan:
            what = (
                f"the connectome ({kind}), symmetric; its diagonal does not matter"
                if kind != scans.COVARIANCE
                else f"the connectome ({kind})"
            )
            rows.append({"name": part.scan, "type": "float32", "shape": ["subject", n, n], "given": what})
        if rows and len(parts) > 1:
            rows[-1]["atlas"] = part.member.facts_["atlas"]
    if phenotypes:
        what = "the values in the order of `columns`, NaN where one is missing"
        rows.append(
            {"name": PHENOTYPES, "type": "float64", "shape": ["subject", len(phenotypes)], "given": what, "columns": phenotypes}
        )
    for name, columns in tables.items():
        what = "the values in the unit of the training data and the order of `columns`, NaN where one is missing"
        rows.append({"name": name, "type": "float64", "shape": ["subject", len(columns)], "given": what, "columns": columns})
    return rows
