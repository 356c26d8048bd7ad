"""What the sites of a federated network agree on: settings, the arrays of each message, and sums instead of pooled fits.

`networks` uses it at the sites and at the coordinator; `networks_flower` carries its requests.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from m2lgdg.federated.plan import CODES, LEAST_SUBJECTS, NAME
from m2lgdg.method import make
from m2lgdg.methods.linear import SMALLEST_SPREAD, _site_averages
from m2lgdg.methods.solvers import _association
from m2lgdg.preprocess import CATEGORICAL
from m2lgdg.storage import InputError, needing, read_bytes, write_text

with needing("networks", "A federated network"):
    from torch import nn

    from m2lgdg.deep import DeepMethod, Shape
    from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome

Floats = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
Forms = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and dtype of each array of a message
Strategy = Literal["fedavg", "fedprox", "fedbn"]

NETWORKS = ("erm", "m2lgdg-connectome")
NORMALISATION = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
LARGEST_STUDY = 2**20  # bytes of a study file


# ---------------------------------------------------------------- what all sites agree on


@dataclass(frozen=True)
class NetworkStudy:
    """Settings of a federated network, chosen by the coordinator and read by every site.

    `rounds` times `local_epochs` replaces the field `epochs` of the method; its warm-up and decay of the learning rate run over
    all rounds. `mu` is the weight of the proximal term, of FedProx only.
    """

    sites: tuple[str, ...]
    method: str = "erm"
    fields: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy = "fedavg"
    mu: float = 0.01
    rounds: int = 40
    local_epochs: int = 2
    seed: int = 0
    inputs: tuple[str, ...] = ()
    least_subjects: int = LEAST_SUBJECTS

    def __post_init__(self) -> None:
        for site in self.sites:
            if not NAME.fullmatch(site):
                raise InputError(f"site {site[:80]!r}: use letters, digits, dots, dashes and underscores only.")
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise InputError("the study has no site, or lists one twice.")
        if self.strategy not in get_args(Strategy):
            raise InputError(f"strategy {self.strategy} is not one of {', '.join(get_args(Strategy))}.")
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise InputError(f"mu is {self.mu}; it must be a finite number of at least 0.")
        if min(self.rounds, self.local_epochs) < 1 or self.seed < 0 or self.least_subjects < 2:
            raise InputError("rounds and local_epochs must be at least 1, seed at least 0, and least_subjects at least 2.")
        if self.create().phenotypes and not self.inputs:
            raise InputError(f"method {self.method} takes phenotypes: name them as inputs, or set phenotypes to False.")

    def create(self) -> DeepMethod:
        """The method, not fitted; a method or a field that cannot be federated is refused."""
        if self.method not in NETWORKS:
            raise InputError(f"method {self.method} is not a federated network; available: {', '.join(NETWORKS)}.")
        if "epochs" in self.fields:
            raise InputError("epochs follow from rounds and local_epochs in a federated network; leave the field out.")
        created = make(self.method, **dict(self.fields) | {"epochs": self.rounds * self.local_epochs})
        assert isinstance(created, DeepMethod)
        if isinstance(created, M2LGDGConnectome):
            allowed = {"plus": False, "confounds": (), "centring": "site", "imaging": True}
            for name, value in allowed.items():
                if getattr(created, name) != value:
                    raise InputError(f"method {self.method}, field {name}: a federated network needs {value!r}.")
        if created.validation_by != "subject":
            raise InputError("validation_by: a site holds out subjects of its own, so only 'subject' can be federated.")
        return created

    @property
    def columns(self) -> tuple[str, ...]:
        """Phenotypes that the network takes."""
        return self.inputs if self.create().phenotypes else ()

    @property
    def id(self) -> str:
        """SHA-256 of the settings; every message names it."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        """The settings as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the settings to a file, for the sites."""
        write_text(Path(path), self.text())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> NetworkStudy:
        """Read the settings that the coordinator sent."""
        try:
            content = json.loads(read_bytes(path, LARGEST_STUDY))
            lists = {name: tuple(content[name]) for name in ("sites", "inputs")}
            return cls(**content | lists)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is not the file of a federated network ({str(error)[:200]}).") from None


class Participant(NamedTuple):
    """What a site says about itself when it joins."""

    site: str
    patients: int
    controls: int
    rois: tuple[str, ...]
    atlas: str
    cohort: str
    hash: str


class Request(NamedTuple):
    """What the coordinator asks of every site: a kind of work, the number of the round, and the arrays that it needs."""

    kind: str  # statistics, train, evaluate or calibrate
    round: int
    arrays: Arrays


def checked(arrays: Mapping[str, npt.NDArray[Any]], forms: Forms, where: str, infinite: Iterable[str] = ()) -> Arrays:
    """The arrays, if they have exactly the names, shapes and types of `forms` and only finite numbers."""
    if set(arrays) != set(forms):
        different = sorted(set(arrays) ^ set(forms))[0][:100]
        raise InputError(f"{where}: array {different} is missing or not expected.")
    for name, (shape, dtype) in forms.items():
        value = arrays[name]
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            raise InputError(f"{where}: array {name} is not {shape} numbers of type {np.dtype(dtype)}.")
        if np.isnan(value).any() or not (name in infinite or np.isfinite(value).all()):
            raise InputError(f"{where}: array {name} has a number that is not finite.")
    return {name: np.array(arrays[name]) for name in forms}


def edges_of(n_rois: int) -> int:
    """Number of pairs of ROIs."""
    return n_rois * (n_rois - 1) // 2


# ---------------------------------------------------------------- sums over sites instead of fits on the pooled cohort


def statistics_forms(study: NetworkStudy, n_rois: int) -> Forms:
    """Arrays with which a site answers the request for statistics."""
    inputs, rows = len(study.columns), 3 if study.method == "erm" else 5
    return {
        "counts": ((2, 2), np.float64),
        "weight": ((1,), np.float64),
        "moments": ((4, inputs), np.float64),
        "codes": ((CODES, inputs), np.float64),
        "edges": ((rows, edges_of(n_rois)), np.float64),
    }


def moments(values: Floats) -> Floats:
    """(4, column) count, sum, squares about the mean of the site, and squared sum by count; missing values are left out."""
    present = ~np.isnan(values)
    count, total = present.sum(axis=0).astype(np.float64), np.where(present, values, 0.0).sum(axis=0)
    centred = np.where(present, values - total / np.maximum(count, 1), 0.0)
    return np.stack([count, total, (centred**2).sum(axis=0), total**2 / np.maximum(count, 1)])


def _mean_sd(sums: Floats) -> tuple[Floats, Floats]:
    """Mean and sd over all sites from summed `moments`."""
    count, total, within, between = sums
    mean = total / np.maximum(count, 1)
    return mean, np.sqrt(np.maximum(within + (between - count * mean**2), 0.0) / np.maximum(count, 1))


def edge_sums(edges: npt.NDArray[np.float32], labels: npt.NDArray[np.int8], weights: Floats) -> Floats:
    """(5, edge) sums for `m2lgdg-connectome`: see `_connectome_arrays`."""
    wide = edges.astype(np.float64)
    averages = _site_averages(np.zeros(len(labels), dtype=np.intp), weights)
    centred = wide - averages @ wide
    signed = weights * np.where(labels == 1, 1.0, -1.0)
    correlation = np.tanh(edges).sum(axis=0, dtype=np.float64)
    return np.stack([correlation, weights @ wide, weights @ centred**2, (centred**2).sum(axis=0), signed @ centred])


def _connectome_arrays(method: M2LGDGConnectome, totals: Arrays, n_rois: int, n_inputs: int) -> Arrays:
    """What `M2LGDGConnectome.prepare` fits on the pooled cohort, from sums over sites."""
    correlation, weighted, spreads, squares, products = totals["edges"]
    count, weight = totals["counts"][0].sum(), totals["weight"]
    centre, spread = weighted / weight, np.sqrt(spreads / weight)
    spread = np.where(spread > SMALLEST_SPREAD, spread, 1.0)
    scale = np.ones_like(spread)
    if method.scaling == "association":
        strength = _association((products / spread)[None], (squares / spread**2)[None], weight, np.array([count]))[0]
        scale = method.edge_scale(strength)
    fitted = {"mean": centre, "scale": scale / spread, "slopes": np.zeros((n_inputs, len(centre)))}
    single = {name: value.astype(np.float32) for name, value in fitted.items()}
    return {"adjacency": method.group_graph(correlation / count, n_rois), **single}


def _erm_arrays(totals: Arrays) -> Arrays:
    """What `SiteMethod.prepare` fits: mean and sd of each edge over all sites."""
    count = np.full(totals["edges"].shape[1], totals["counts"][0].sum())
    mean, sd = _mean_sd(np.concatenate([count[None], totals["edges"]]))
    return {"mean": mean.astype(np.float32), "scale": np.where(sd > 1e-6, sd, 1.0).astype(np.float32)}


def shared_arrays(study: NetworkStudy, method: DeepMethod, totals: Arrays, n_rois: int) -> Arrays:
    """Arrays that all sites use, from summed statistics: `fitted.*` and `scaler.*` of a fitted method, and class counts."""
    if not totals["counts"][0].all() or not totals["weight"][0] > 0:
        raise InputError("a federated network needs a site with training subjects of both classes.")
    mean, sd = _mean_sd(totals["moments"])
    constant = sd**2 <= 1e-12 * np.maximum(mean**2, 1e-12)
    modes = totals["codes"].argmax(axis=0).astype(np.float64)
    fill = np.where([name in CATEGORICAL for name in study.columns], modes, mean)
    scaler = {"fill": fill, "mean": mean, "scale": np.where(constant, np.inf, sd)}
    fitted = (
        _connectome_arrays(method, totals, n_rois, len(study.columns))
        if isinstance(method, M2LGDGConnectome)
        else _erm_arrays(totals)
    )
    return {
        "counts": totals["counts"][0],
        **{f"scaler.{name}": value.reshape(-1) for name, value in scaler.items()},
        **{f"fitted.{name}": value for name, value in fitted.items()},
    }


def shared_forms(study: NetworkStudy, n_rois: int) -> Forms:
    """Forms of the arrays that all sites use."""
    inputs, edges = len(study.columns), edges_of(n_rois)
    forms: dict[str, tuple[tuple[int, ...], Any]] = {"counts": ((2,), np.float64)}
    forms |= {f"scaler.{name}": ((inputs,), np.float64) for name in ("fill", "mean", "scale")}
    forms |= {f"fitted.{name}": ((edges,), np.float32) for name in ("mean", "scale")}
    if study.method != "erm":
        forms |= {"fitted.adjacency": ((n_rois, n_rois), np.float32), "fitted.slopes": ((inputs, edges), np.float32)}
    return forms


def new_network(study: NetworkStudy, method: DeepMethod, shared: Mapping[str, npt.NDArray[Any]], n_rois: int) -> nn.Module:
    """A new network of the study; the random numbers of its initial weights are those of `fit`."""
    fitted = {name.removeprefix("fitted."): value for name, value in shared.items() if name.startswith("fitted.")}
    return method.build(Shape(n_rois, method.length, len(study.columns), len(study.sites), fitted))


def weights_of(network: nn.Module) -> Arrays:
    """Parameters and buffers of a network, as `network.*` of a fitted method."""
    return {f"network.{name}": value.detach().cpu().numpy().copy() for name, value in network.state_dict().items()}


def normalisation_names(network: nn.Module) -> set[str]:
    """Names in `weights_of` that belong to normalisation layers, with their running statistics."""
    return {
        f"network.{prefix}.{name}"
        for prefix, layer in network.named_modules()
        if isinstance(layer, NORMALISATION)
        for name in layer.state_dict()
    }


def average(weights: Mapping[str, Arrays], subjects: Mapping[str, float]) -> Arrays:
    """Mean of the sites' arrays, weighted by number of subjects, in float64; integers are rounded."""
    total, result = sum(subjects.values()), {}
    for name, value in next(iter(weights.values())).items():
        mean = sum(subjects[site] * arrays[name].astype(np.float64) for site, arrays in weights.items()) / total
        result[name] = np.asarray(np.rint(mean) if value.dtype.kind == "i" else mean).astype(value.dtype)
    return result
