"""Features of scans as operations of an ONNX graph: what `connectivity.py` computes in numpy, for one subject or several.

`onnx.py` puts these modules before the graph of a method, so that it takes a series or a connectome. ONNX has no eigenvalues:
the matrix logarithm is computed by products alone, in double precision, with a number of steps that suffices for every matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from m2lgdg import scans
from m2lgdg.connectivity import CLIP, LARGEST_Z
from m2lgdg.method import LEAST_VOLUMES, Method
from m2lgdg.methods.amplitude import AmplitudeRange, UsesAmplitude
from m2lgdg.methods.linear import LOG_EUCLIDEAN, TANGENTS, VIEWS, Linear
from m2lgdg.methods.m2lgdg_connectome import LOG_EDGES
from m2lgdg.storage import InputError

FLOOR = 1e-6  # of the mean variance, below which no eigenvalue of a shrunk covariance lies (`connectivity._shrunk`)
PRECISION = 1e-15  # of square roots, and of the last term of the series of a logarithm
NEAR = 0.15  # largest distance of eigenvalues from their middle, relative to it, at which the series begins
COMPUTED = {*VIEWS, *TANGENTS, LOG_EUCLIDEAN, LOG_EDGES, "amplitude", "correlation"}  # inputs that can be part of the graph
ROOT2 = math.sqrt(2.0)


def need_features(fitted: Method, names: list[str]) -> None:
    """Refuse a method with an input that the graph cannot compute from the scan."""
    kind = fitted.trained_on
    own = [name for name in names if name != "phenotypes" and not (name.startswith("table.") and isinstance(fitted, Linear))]
    wrong = [name for name in own if name not in COMPUTED or (name == "tangent" and kind != scans.SERIES)]
    if wrong:
        raise InputError(
            f"method {fitted.name} cannot be exported with its features inside the graph, as ONNX cannot compute "
            f"{' and '.join(wrong)}; with --prepared, the graph takes features, and its JSON file says how to compute them."
        )


class Plan(NamedTuple):
    """How the logarithm of matrices is computed whose eigenvalues, after division by the trace, lie between a bound and 1.

    Square roots (Newton-Schulz) bring them near to each other, where the series of the logarithm converges. The scalar
    iteration from the bound gives the number of steps of each root: larger eigenvalues converge earlier, and stay.
    """

    roots: list[int]  # steps of each
    middle: float  # of the eigenvalues after them
    terms: int  # of the series around it

    @classmethod
    def of(cls, least: float) -> Plan:
        """From the bound."""
        roots = []
        while (1 - least) / (1 + least) > NEAR:
            roots.append(_steps(least))
            least = math.sqrt(least)
        ratio = (1 - least) / (1 + least)
        return cls(roots, (1 + least) / 2, next(k for k in range(1, 100) if ratio**k / k < PRECISION))

    @property
    def series(self) -> list[float]:
        """Coefficients of the logarithm of 1 + x, the highest power first."""
        return [(-1) ** (k + 1) / k for k in range(self.terms, 0, -1)]


@torch.library.custom_op("m2lgdg::matrix_logarithm", mutates_args=())
def matrix_logarithm(matrices: Tensor, identity: Tensor, least: float) -> Tensor:
    """(subject, roi, roi) logarithms of positive definite matrices by inverse scaling and squaring, with products alone.

    One operation for the tracer, which would take minutes for its hundreds of products; `logarithm_nodes` writes them.
    """
    plan = Plan.of(least)
    trace = (matrices * identity).sum(dim=(1, 2), keepdim=True)  # (subject, 1, 1)
    root = matrices / trace
    for steps in plan.roots:
        inverse = identity.expand_as(root)  # becomes the inverse of the root
        for _ in range(steps):
            factor = 1.5 * identity - 0.5 * (inverse @ root)
            root, inverse = root @ factor, factor @ inverse
    distance = root / plan.middle - identity
    log = torch.zeros_like(root)
    for coefficient in plan.series:
        log = distance @ (log + coefficient * identity)
    logarithm: Tensor = (log + math.log(plan.middle) * identity) * 2 ** len(plan.roots) + torch.log(trace) * identity
    return logarithm


@matrix_logarithm.register_fake
def _(matrices: Tensor, identity: Tensor, least: float) -> Tensor:
    return torch.empty_like(matrices)


def logarithm_nodes(matrices: Any, identity: Any, least: float) -> Any:
    """`matrix_logarithm` as operations of ONNX."""
    import onnx
    from onnxscript import opset18 as op

    def number(value: float) -> Any:
        return op.Constant(value=onnx.helper.make_tensor("number", onnx.TensorProto.DOUBLE, [], [value]))

    plan = Plan.of(least)
    axes: Any = op.Constant(value_ints=[1, 2])
    trace = op.ReduceSum(op.Mul(matrices, identity), axes, keepdims=1)
    root = op.Div(matrices, trace)
    three_halves, half = op.Mul(identity, number(1.5)), number(0.5)
    for steps in plan.roots:
        inverse = identity
        for _ in range(steps):
            factor = op.Sub(three_halves, op.Mul(half, op.MatMul(inverse, root)))
            root, inverse = op.MatMul(root, factor), op.MatMul(factor, inverse)
    distance = op.Sub(op.Div(root, number(plan.middle)), identity)
    log = None
    for coefficient in plan.series:
        term = op.Mul(identity, number(coefficient))
        log = op.MatMul(distance, term if log is None else op.Add(log, term))
    log = op.Mul(op.Add(log, op.Mul(identity, number(math.log(plan.middle)))), number(2.0 ** len(plan.roots)))
    return op.Add(log, op.Mul(op.Log(trace), identity))


def _steps(least: float) -> int:
    """Steps after which the product of root and inverse, whose eigenvalues start at those of the matrix, is the identity."""
    value, steps = least, 1  # one more than needed, against rounding
    while 1 - value > PRECISION:
        value, steps = value * (3 - value) ** 2 / 4, steps + 1
    return steps


class Features(nn.Module):
    """Inputs of a method from (subject, time, roi) series, or from (subject, roi, roi) connectomes of the kind of source."""

    def __init__(self, fitted: Method, names: list[str], whole: bool = False) -> None:
        super().__init__()
        need_features(fitted, names)
        self.names = [name for name in names if name in COMPUTED]
        self.kind, n = fitted.trained_on, len(fitted.facts_["rois"])
        self.whole = whole  # FC is a matrix, not its edges
        self.single = not isinstance(fitted, Linear)  # networks take float32
        above, upper = np.triu_indices(n, 1), np.triu_indices(n)
        self.above = nn.Parameter(torch.from_numpy(above[0] * n + above[1]), requires_grad=False)  # (edge,)
        self.upper = nn.Parameter(torch.from_numpy(upper[0] * n + upper[1]), requires_grad=False)  # (edge or diagonal,)
        self.root2 = nn.Parameter(torch.from_numpy(np.where(upper[0] == upper[1], 1.0, ROOT2)))
        self.identity = nn.Parameter(torch.eye(n, dtype=torch.float64))
        self.whitening, self.least = nn.ParameterDict(), {"": FLOOR / n}  # bounds of the eigenvalues
        for name in TANGENTS:
            if name in names:
                values, vectors = np.linalg.eigh(np.asarray(fitted.state_[f"{name}.reference"], dtype=np.float64))
                self.whitening[name] = nn.Parameter(torch.from_numpy((vectors / np.sqrt(values)) @ vectors.T))
                self.least[name] = FLOOR / 2 / n * float(values[0] / values[-1])  # half, as it is rounded first
        if "amplitude" in names:
            assert isinstance(fitted, UsesAmplitude)
            state: Mapping[str, Any] = fitted.amplitude_state
            bounds = AmplitudeRange.restore(state)
            arrays = {
                "profile": bounds.profile,
                "along": bounds.profile / (bounds.profile @ bounds.profile or 1.0),
                "low": bounds.low,
                "high": bounds.high,
                "mean": state["amplitude.mean"],
            }
            self.amplitude_arrays = nn.ParameterDict(
                {name: nn.Parameter(torch.from_numpy(np.array(value, dtype=np.float64))) for name, value in arrays.items()}
            )

    def forward(self, scan: Tensor) -> dict[str, Tensor]:
        """Features by name, float32 as in Python, or float64 after that for linear methods."""
        of_series = self.kind == scans.SERIES
        unit = standardised(scan) if of_series else None
        matrix = self.correlation(unit) if unit is not None else self.own_correlation(scan)  # (subject, roi, roi)
        found = {}
        for name in self.names:
            if name == "fc":
                z = self.own_fisher(scan) if self.kind == scans.FISHER_Z else fisher(matrix)
                value = z * (1 - self.identity) if self.whole else self.edges(z)
            elif name == "correlation":
                value = matrix
            elif name == "amplitude":
                value = self.amplitude(scan)
            elif name in VIEWS:
                assert unit is not None
                view = frame_weighted(unit) if name == "steady" else standardised(unit.abs())
                value = self.edges(fisher(self.correlation(view)))
            elif name in TANGENTS:
                covariance = shrunk(unit, self.identity) if name == "tangent" and unit is not None else self.of_rows(matrix)
                covariance = covariance.float().double()
                white = self.whitening[name] @ covariance @ self.whitening[name]
                value = self.coordinates(self.logarithm((white + white.mT) / 2, self.least[name]))
            else:
                log = self.logarithm(self.of_rows(matrix), self.least[""])
                value = self.coordinates(log) if name == LOG_EUCLIDEAN else ROOT2 * self.edges(log)
            rounded = value if name == "amplitude" else value.float()
            found[name] = rounded.float() if self.single else rounded.double()
        return found

    def sound(self, scan: Tensor) -> Tensor:
        """(subject,) 0, or NaN for a scan that `predict` refuses: NaN, infinite values, few volumes, all ROIs constant."""
        values = scan.double()
        wrong = ~(values - values == 0).all(dim=2).all(dim=1)
        if self.kind == scans.SERIES:
            volumes = torch.ones_like(values[:, :, 0]).sum(dim=1)  # (subject,)
            flat = (scan == scan[:, :1]).all(dim=2).all(dim=1)
            wrong = wrong | flat | (volumes < LEAST_VOLUMES)
        return torch.where(wrong, math.nan, torch.zeros_like(values[:, 0, 0]))

    def correlation(self, unit: Tensor) -> Tensor:
        """(subject, roi, roi) Pearson correlations of standardised series; 1 on the diagonal."""
        volumes = torch.ones_like(unit[:, :, :1]).sum(dim=1, keepdim=True)  # (subject, 1, 1)
        return self.with_ones((unit.mT @ unit / volumes).clamp(-1.0, 1.0))

    def with_ones(self, matrix: Tensor) -> Tensor:
        """The matrices with 1 on the diagonal."""
        return matrix * (1 - self.identity) + self.identity

    def own_correlation(self, scan: Tensor) -> Tensor:
        """(subject, roi, roi) correlations of connectomes; the mean of both halves, as a cohort holds them."""
        wide = self.halves(scan)
        if self.kind == scans.FISHER_Z:
            return self.with_ones(torch.tanh(wide))
        if self.kind == scans.COVARIANCE:
            spread = torch.sqrt((wide * self.identity).sum(dim=2))  # (subject, roi)
            spread = torch.where(spread == 0, torch.ones_like(spread), spread)
            wide = wide / (spread[:, :, None] * spread[:, None, :])
        return self.with_ones(wide.clamp(-1.0, 1.0))

    def halves(self, scan: Tensor) -> Tensor:
        """(subject, roi, roi) mean of both halves, rounded as in a cohort."""
        wide = scan.double()
        return (wide / 2 + wide.mT / 2).float().double()

    def own_fisher(self, scan: Tensor) -> Tensor:
        """(subject, roi, roi) Fisher z of connectomes of it."""
        return self.halves(scan).clamp(-float(LARGEST_Z), float(LARGEST_Z))

    def edges(self, matrix: Tensor) -> Tensor:
        """(subject, edge) values above the diagonal, in row order."""
        return matrix.flatten(1)[:, self.above]

    def coordinates(self, log: Tensor) -> Tensor:
        """(subject, edge or diagonal) values of a symmetric matrix, those off the diagonal times sqrt 2."""
        return log.flatten(1)[:, self.upper] * self.root2

    def of_rows(self, matrix: Tensor) -> Tensor:
        """(subject, roi, roi) Ledoit-Wolf covariances with the rows of a matrix as observations."""
        return shrunk(matrix - matrix.mean(dim=1, keepdim=True), self.identity)

    def logarithm(self, matrices: Tensor, least: float) -> Tensor:
        """(subject, roi, roi) matrix logarithms."""
        log: Tensor = matrix_logarithm(matrices, self.identity, least)
        return (log + log.mT) / 2

    def amplitude(self, scan: Tensor) -> Tensor:
        """(subject, roi) log sds less their mean, or the mean of source for a scan that is scaled differently."""
        wide = scan.double()
        alive = ~(scan == scan[:, :1]).all(dim=1)  # (subject, roi)
        spread = (wide - wide.mean(dim=1, keepdim=True)).square().mean(dim=1).sqrt()
        log = torch.log(torch.where(alive, spread, torch.ones_like(spread)))
        middle = (log * alive).sum(dim=1, keepdim=True) / alive.double().sum(dim=1, keepdim=True).clamp(min=1.0)
        features = torch.where(alive, log - middle, torch.zeros_like(log))
        known = self.amplitude_arrays
        slope = features @ known["along"]
        wide_spread = (features - features.mean(dim=1, keepdim=True)).square().mean(dim=1).sqrt()
        distance = (features - known["profile"]).square().mean(dim=1).sqrt()
        measures = torch.stack([slope, wide_spread, distance], dim=1)  # (subject, measure)
        outside = ((measures < known["low"]) | (measures > known["high"])).any(dim=1, keepdim=True)
        return torch.where(outside, known["mean"], features)


def standardised(series: Tensor) -> Tensor:
    """(subject, time, roi) series with mean 0 and variance 1; 0 for a flat ROI."""
    flat = (series == series[:, :1]).all(dim=1, keepdim=True)  # (subject, 1, roi)
    wide = series.double()
    wide = wide - wide.mean(dim=1, keepdim=True)
    spread = wide.square().mean(dim=1, keepdim=True).sqrt()
    return torch.where(flat, torch.zeros_like(wide), wide / torch.where(flat, torch.ones_like(spread), spread))


def frame_weighted(unit: Tensor) -> Tensor:
    """`connectivity.frame_weighted` of standardised series."""
    size = unit.square().mean(dim=2)  # (subject, time)
    middle = median(size)
    relative = size / torch.where(middle == 0, torch.ones_like(middle), middle)
    weight = 1 / (1 + relative.square())
    weight = (weight / weight.mean(dim=1, keepdim=True))[:, :, None]  # (subject, time, 1)
    wide = (unit - (weight * unit).mean(dim=1, keepdim=True)) * weight.sqrt()
    spread = wide.square().mean(dim=1, keepdim=True).sqrt()
    return wide / torch.where(spread > 0, spread, torch.ones_like(spread))


def median(values: Tensor) -> Tensor:
    """(subject, 1) medians of (subject, time) values, whose number is not known: the mean of the middle two, or the middle."""
    count = values.shape[1]
    ordered = torch.sort(values, dim=1, stable=True).values
    place = torch.arange(count, device=values.device)
    lower, upper = place == (count - 1) // 2, place == count // 2
    return ((ordered * lower).sum(dim=1, keepdim=True) + (ordered * upper).sum(dim=1, keepdim=True)) / 2


def fisher(correlation: Tensor) -> Tensor:
    """Fisher z of clipped correlations; by logarithms, as onnxruntime has no arctanh of doubles."""
    clipped = correlation.clamp(-CLIP, CLIP)
    return 0.5 * torch.log((1 + clipped) / (1 - clipped))


def shrunk(rows: Tensor, identity: Tensor) -> Tensor:
    """(subject, roi, roi) Ledoit-Wolf covariances of (subject, observation, roi) values with mean 0; `connectivity._shrunk`."""
    n = identity.shape[0]
    count = torch.ones_like(rows[:, :, :1]).sum(dim=1, keepdim=True)  # (subject, 1, 1)
    sample = rows.mT @ rows / count
    mu = (sample * identity).sum(dim=(1, 2), keepdim=True) / n  # (subject, 1, 1)
    square = sample.square().sum(dim=(1, 2), keepdim=True)
    distance = square - n * mu.square()
    error = (rows.square().sum(dim=2, keepdim=True).square().sum(dim=1, keepdim=True) / count - square) / count
    positive = distance > 0
    part = torch.minimum(error, distance) / torch.where(positive, distance, torch.ones_like(distance))
    part = torch.where(positive, part, torch.zeros_like(part))
    result = (1 - part) * sample + part.clamp(min=FLOOR) * mu * identity
    return torch.where(mu > 0, result, identity.expand_as(result))
