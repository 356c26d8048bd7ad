"""Networks trained at several sites by FedAvg, FedProx or FedBN: the comparison with the exact linear model of this folder.

A `Client` trains at one site with the epochs of `deep.py`, `lead` averages the weights of all sites, and `simulate` runs both in
one process. `networks_flower` carries the same requests over a network.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.federated.plan import CODES, LEAST_SUBJECTS, NAME
from m2lgdg.method import make
from m2lgdg.methods.linear import SMALLEST_SPREAD, _balance, _site_averages
from m2lgdg.methods.solvers import _association
from m2lgdg.preprocess import CATEGORICAL, PhenotypeScaler, _typical, _values
from m2lgdg.splits import validation_split
from m2lgdg.storage import InputError, needing, read_bytes, write_text

with needing("networks", "A federated network"):
    import torch
    from torch import nn

    from m2lgdg.deep import NO_VALIDATION, Batch, DeepMethod, Shape
    from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome

Floats = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
Forms = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and dtype of each array of a message
Strategy = Literal["fedavg", "fedprox", "fedbn"]
Kind = Literal["statistics", "train", "evaluate", "calibrate"]

NETWORKS = ("erm", "m2lgdg-connectome")
NORMALISATION = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
LARGEST_STUDY = 2**20  # bytes of a study file
NEWTON_STEPS = 30
PENALTY = 100.0  # C of `metrics.platt`
NO_CONTRAST = "The contrastive loss compares subjects of several sites, which no site has: it was 0 in federated training."


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
            raise InputError(
                f"method {self.method} takes phenotypes: name them as inputs, or set its field phenotypes to False."
            )

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

    kind: Kind
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


def _moments(values: Floats) -> Floats:
    """(4, column) count, sum, squares about the mean of the site, and squared sum by count; missing values are left out."""
    present = ~np.isnan(values)
    count, total = present.sum(axis=0).astype(np.float64), np.where(present, values, 0.0).sum(axis=0)
    centred = np.where(present, values - total / np.maximum(count, 1), 0.0)
    return np.stack([count, total, (centred**2).sum(axis=0), total**2 / np.maximum(count, 1)])


def _mean_sd(moments: Floats) -> tuple[Floats, Floats]:
    """Mean and sd over all sites from summed `_moments`."""
    count, total, within, between = moments
    mean = total / np.maximum(count, 1)
    return mean, np.sqrt(np.maximum(within + (between - count * mean**2), 0.0) / np.maximum(count, 1))


def _edge_sums(edges: npt.NDArray[np.float32], labels: npt.NDArray[np.int8], weights: Floats) -> Floats:
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


def _shared(study: NetworkStudy, method: DeepMethod, totals: Arrays, n_rois: int) -> Arrays:
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


def _network(study: NetworkStudy, method: DeepMethod, shared: Mapping[str, npt.NDArray[Any]], n_rois: int) -> nn.Module:
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


# ---------------------------------------------------------------- at a site


class Client:
    """A site: it answers requests from its own labelled subjects, on the CPU.

    `memory` holds the arrays that stay at the site from one request to the next: its normalisation layers (FedBN) and the
    decisions of the network for its validation subjects.
    """

    def __init__(self, study: NetworkStudy, cohort: Cohort, site: str) -> None:
        if site not in study.sites:
            raise InputError(f"{site} is not a site of this study (sites: {', '.join(study.sites)}).")
        if len(cohort.site_names) > 1:
            raise InputError(f"cohort {cohort.name} has the sites {', '.join(cohort.site_names)}; choose the subjects of one.")
        cohort = cohort.parcellation(cohort.atlas).select(cohort.labels >= 0)
        if len(cohort) < study.least_subjects:
            raise InputError(f"site {site} has {len(cohort)} labelled subjects; the study needs {study.least_subjects}.")
        missing = [name for name in study.columns if name not in cohort.phenotypes.columns]
        if missing:
            raise InputError(
                f"cohort {cohort.name} has no phenotype {missing[0]}, which the study uses; add it, empty if unknown."
            )
        self.study, self.site, self.cohort, self.method = study, site, cohort.with_inputs(study.columns), study.create()
        self.training, self.validation = validation_split(cohort, seed=study.seed, share=self.method.validation_share)
        self.features = self.method.features(self.cohort, torch.device("cpu"))
        self.memory: Arrays = {}
        self._check_codes()

    def _check_codes(self) -> None:
        for name in set(CATEGORICAL) & set(self.study.columns):
            values = _values(self.cohort, (name,))[:, 0]
            wrong = ~np.isnan(values) & ~np.isin(values, np.arange(CODES))
            if wrong.any():
                subject = self.cohort.subjects[int(np.flatnonzero(wrong)[0])]
                raise InputError(f"cohort {self.cohort.name}, subject {subject}: {name} is not a code from 0 to {CODES - 1}.")

    @property
    def participant(self) -> Participant:
        """Facts with which the site joins."""
        labels, cohort = self.cohort.labels, self.cohort
        counts = int((labels == 1).sum()), int((labels == 0).sum())
        return Participant(self.site, *counts, tuple(cohort.rois), cohort.atlas, cohort.name, cohort.hash)

    def answer(self, request: Request) -> Arrays:
        """Arrays for one request; another kind, round, name, shape or type, or a number that is not finite, is refused."""
        kinds: dict[str, Callable[[Request], Arrays]] = {
            "statistics": self._statistics,
            "train": self._train,
            "evaluate": self._evaluate,
            "calibrate": self._calibrate,
        }
        if request.kind not in kinds or not 0 <= request.round <= self.study.rounds:
            raise InputError(f"request {str(request.kind)[:40]} in round {request.round} is not part of the protocol.")
        return kinds[request.kind](request)

    def _statistics(self, request: Request) -> Arrays:
        checked(request.arrays, {}, "the request")
        train, study = self.cohort.select(self.training), self.study
        counts = [np.bincount(self.cohort.labels[rows], minlength=2) for rows in (self.training, self.validation)]
        weights = _balance(train) if min(counts[0]) else np.zeros(len(train))  # a site with one class has no weight
        values = _values(train, study.columns)
        filled, codes = values.copy(), np.zeros((CODES, len(study.columns)))
        for j, name in enumerate(study.columns):
            if name in CATEGORICAL:
                codes[:, j] = [(values[:, j] == code).sum() for code in range(CODES)]
            else:
                filled[np.isnan(values[:, j]), j] = _typical(values[:, j], name)
        edges = self.features[self._edges][torch.from_numpy(self.training)].numpy()
        sums = _edge_sums(edges, train.labels, weights)
        if study.method == "erm":
            sums = _moments(edges.astype(np.float64))[1:]
        return {
            "counts": np.stack(counts).astype(np.float64),
            "weight": np.array([weights.sum()]),
            "moments": _moments(filled),
            "codes": codes,
            "edges": sums,
        }

    @property
    def _edges(self) -> str:
        return next(iter(self.features))  # both networks have one feature: FC above the diagonal

    def _prepared(self, request: Request, name: str) -> tuple[nn.Module, Batch]:
        """The network of the request, with its weights loaded, and all subjects of the site as a batch."""
        n_rois, method, where = len(self.cohort.rois), self.method, f"the request of round {request.round} ({name})"
        forms = shared_forms(self.study, n_rois)
        given = {key: value for key, value in request.arrays.items() if not key.startswith("network.")}
        shared = checked(given, forms, where, infinite=("scaler.scale",))
        network = _network(self.study, method, shared, n_rois)
        own = weights_of(network)
        weights = {key: value for key, value in request.arrays.items() if key.startswith("network.")}
        _load(network, checked(weights, {key: (value.shape, value.dtype) for key, value in own.items()}, where))
        counts = shared["counts"]
        method.class_weight = torch.tensor(counts.sum() / (2 * np.maximum(counts, 1))).float()
        if isinstance(method, M2LGDGConnectome):
            edges, labels = self.features[self._edges].numpy()[self.training], self.cohort.labels[self.training]
            weights_here = (
                _balance(self.cohort.select(self.training)) if len(set(labels.tolist())) == 2 else np.zeros(len(labels))
            )
            mean = _site_averages(np.zeros(len(labels), dtype=np.intp), weights_here) @ edges.astype(np.float64)
            method._offsets = torch.from_numpy((mean - shared["fitted.mean"]).astype(np.float32))
        return network, self._batch(shared)

    def _batch(self, shared: Arrays) -> Batch:
        """All subjects; missing phenotypes are filled in with the median of the site, else with that of all sites."""
        columns, train = self.study.columns, self.cohort.select(self.training)
        medians = [np.nan if name in CATEGORICAL else _typical(_values(train, (name,))[:, 0], name) for name in columns]
        fill, mean, scale = (shared[f"scaler.{name}"] for name in ("fill", "mean", "scale"))
        site_fill = np.where(np.isnan(medians), fill, medians).reshape(1, -1)
        scaler = PhenotypeScaler(columns, tuple(self.cohort.site_names), site_fill, fill, mean, scale)
        label = torch.from_numpy(self.cohort.labels.astype(np.int64))
        phenotypes = torch.from_numpy(scaler.transform(self.cohort).astype(np.float32))
        return Batch(self.features, phenotypes, label, torch.zeros_like(label))

    def _train(self, request: Request) -> Arrays:
        """Train for `local_epochs` from the given weights; also measure these weights on the validation subjects."""
        study, method = self.study, self.method
        if request.round >= study.rounds:
            raise InputError(f"the study ends after {study.rounds} rounds of training.")
        seed = study.seed + 1_000_003 * request.round + 7_919 * study.sites.index(self.site)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network, subjects = self._prepared(request, "train")
            validation = self._validation(network, subjects)
            if study.strategy == "fedbn":
                self._recall_normalisation(network, request.round)
            method.epoch = request.round * study.local_epochs
            run = method.begin(network, subjects, torch.from_numpy(self.training), seed)
            if study.strategy == "fedprox":
                _pull(network, study.mu)
            for epoch in range(study.local_epochs):
                method.epoch = request.round * study.local_epochs + epoch
                method.run_epoch(run)
        weights = weights_of(network)
        if study.strategy == "fedbn":
            self.memory |= {name: weights[name] for name in sorted(normalisation_names(network))}
            self.memory["round"] = np.array(request.round)
        return weights | {"validation": validation}

    def _recall_normalisation(self, network: nn.Module, number: int) -> None:
        """Put the site's own normalisation layers into the network; those of the coordinator in the first round."""
        if number and int(self.memory.get("round", np.array(-1))) != number - 1:
            raise InputError(
                f"round {number} of FedBN does not follow the last one at site {self.site}; start the study again."
            )
        if number:
            _load(network, weights_of(network) | {name: self.memory[name] for name in sorted(normalisation_names(network))})

    def _validation(self, network: nn.Module, subjects: Batch) -> Floats:
        """(4,) pairs of validation subjects in the right order, all pairs of patient and control, summed loss, and count."""
        batch = subjects.take(torch.from_numpy(self.validation))
        if not len(batch):
            return np.zeros(4)
        record = self.method.validate(network, batch)
        patients = int(batch.label.sum())
        pairs = patients * (len(batch) - patients)
        return np.array([record["val_auc"] * pairs, pairs, record["val_loss"] * len(batch), len(batch)], dtype=np.float64)

    def _evaluate(self, request: Request) -> Arrays:
        """Measure the given weights, and keep the decisions for the validation subjects for their calibration."""
        with torch.random.fork_rng(devices=[]):
            network, subjects = self._prepared(request, "evaluate")
        batch = subjects.take(torch.from_numpy(self.validation))
        decisions = self.method._decision(network.eval(), batch) if len(batch) else np.empty(0)
        self.memory["decisions"] = decisions
        sums = np.array([len(decisions), decisions.sum(), (decisions**2).sum()])
        return {"validation": self._validation(network, subjects), "decisions": sums}

    def _calibrate(self, request: Request) -> Arrays:
        """(5,) gradient and second derivatives of the log loss of a logistic curve of the kept decisions."""
        point = checked(request.arrays, {"point": ((4,), np.float64)}, "the request to calibrate")["point"]
        if "decisions" not in self.memory or not point[1] > 0:
            raise InputError("calibration follows an evaluation, and needs a positive sd.")
        mean, sd, slope, offset = point
        x, y = (self.memory["decisions"] - mean) / sd, (self.cohort.labels[self.validation] == 1).astype(np.float64)
        p = 0.5 * (1 + np.tanh(0.5 * (slope * x + offset)))
        rest, curvature = p - y, p * (1 - p)
        return {
            "calibration": np.array(
                [(rest * x).sum(), rest.sum(), (curvature * x * x).sum(), (curvature * x).sum(), curvature.sum()]
            )
        }


def _load(network: nn.Module, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    network.load_state_dict({name.removeprefix("network."): torch.from_numpy(np.array(v)) for name, v in weights.items()})


def _pull(network: nn.Module, mu: float) -> None:
    """Add the gradient of mu / 2 |w - w_global|² to that of the loss, before it is clipped; w_global are the weights now."""
    for parameter in network.parameters():
        start = parameter.detach().clone()

        def add(weight: torch.Tensor, start: torch.Tensor = start) -> None:
            assert weight.grad is not None
            weight.grad.add_(weight.detach() - start, alpha=mu)

        parameter.register_post_accumulate_grad_hook(add)


# ---------------------------------------------------------------- at the coordinator


Answers = Mapping[str, Mapping[str, npt.NDArray[Any]]]  # arrays of each site
Progress = Callable[..., None] | None


def lead(
    study: NetworkStudy, members: Iterable[Participant], progress: Progress = None
) -> Generator[Request, Answers, DeepMethod]:
    """Yield requests, receive the answers of all sites, and return the fitted method."""
    participants = _checked_members(study, members)
    method, n_rois = study.create(), len(participants[0].rois)
    answers = _checked_answers(participants, (yield Request("statistics", 0, {})), statistics_forms(study, n_rois))
    totals = {name: np.asarray(sum(one[name] for one in answers.values())) for name in next(iter(answers.values()))}
    subjects = {site: float(one["counts"][0].sum()) for site, one in answers.items()}
    shared = _shared(study, method, totals, n_rois)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(study.seed)
        network = _network(study, method, shared, n_rois)
    weights = weights_of(network)
    forms: dict[str, Any] = {name: (value.shape, value.dtype) for name, value in weights.items()}
    measured = {"validation": ((4,), np.float64)}
    history: list[dict[str, float]] = []
    best: tuple[tuple[float, float], int, Arrays] | None = None
    for number in range(study.rounds + 1):
        last = number == study.rounds
        request = Request("evaluate" if last else "train", number, shared | weights)
        extra = {"decisions": ((3,), np.float64)} if last else forms
        answers = _checked_answers(participants, (yield request), measured | extra)
        if number:  # the weights that were sent are those after `number` rounds
            history.append(_record(answers))
            rank = history[-1]["val_auc"], -history[-1]["val_loss"]
            if method.candidate(number * study.local_epochs - 1) and (best is None or rank > best[0]):
                best = rank, number, weights
            if progress:
                progress(epoch=number, epochs=study.rounds, **history[-1])
        if not last:
            weights = average({site: {name: one[name] for name in forms} for site, one in answers.items()}, subjects)
    assert best is not None  # the last epoch is a candidate of every method
    if best[1] != study.rounds:
        request = Request("evaluate", best[1], shared | best[2])
        answers = _checked_answers(participants, (yield request), measured | {"decisions": ((3,), np.float64)})
    calibration = yield from _calibrated(method, participants, answers, totals["counts"][1])
    method.facts_ = _facts(study, participants, totals, history, best[1], network)
    method.state_ = {**best[2], **{name: value for name, value in shared.items() if name != "counts"}}
    method.state_["calibration"] = np.array(calibration, dtype=np.float64)
    return method


def _checked_members(study: NetworkStudy, members: Iterable[Participant]) -> list[Participant]:
    participants = sorted(members, key=lambda one: study.sites.index(one.site) if one.site in study.sites else -1)
    if [one.site for one in participants] != list(study.sites):
        raise InputError(f"the sites that joined are not those of the study ({', '.join(study.sites)}).")
    first = participants[0]
    for one in participants:
        if one.rois != first.rois:
            raise InputError(f"sites {first.site} and {one.site} have different ROIs, or another order of them.")
        if one.patients + one.controls < study.least_subjects:
            raise InputError(f"site {one.site} has fewer than {study.least_subjects} labelled subjects.")
    return participants


def _checked_answers(participants: list[Participant], answers: Answers, forms: Forms) -> dict[str, Arrays]:
    """Answers in the order of the study; a missing or wrong one is refused."""
    for one in participants:
        if one.site not in answers:
            raise InputError(f"site {one.site} did not answer.")
    return {one.site: checked(answers[one.site], forms, f"the answer of site {one.site}") for one in participants}


def _record(answers: Mapping[str, Arrays]) -> dict[str, float]:
    """AUC within sites and loss of the validation subjects, from sums over sites."""
    right, pairs, loss, count = np.sum([one["validation"] for one in answers.values()], axis=0)
    return {"val_auc": float(right / pairs) if pairs else 0.5, "val_loss": float(loss / count) if count else 0.0}


def _calibrated(
    method: DeepMethod, participants: list[Participant], answers: Mapping[str, Arrays], classes: Floats
) -> Generator[Request, Answers, tuple[float, float]]:
    """Platt scaling (`metrics.platt`) on the validation subjects of all sites, by Newton's method on sums."""
    count, total, squares = np.sum([one["decisions"] for one in answers.values()], axis=0)
    if method.calibration == "none" or not count:
        return 1.0, 0.0
    mean = float(total / count)
    sd = math.sqrt(max(float(squares / count) - mean**2, 0.0))
    if not classes.all() or sd < 1e-12:
        share = float(np.clip(classes[1] / classes.sum(), 0.01, 0.99))
        return 1.0, math.log(share / (1 - share)) - mean
    point = np.zeros(2)
    for _ in range(NEWTON_STEPS):
        request = Request("calibrate", 0, {"point": np.array([mean, sd, *point])})
        sums = _checked_answers(participants, (yield request), {"calibration": ((5,), np.float64)})
        gradient_x, gradient, xx, x, one = np.sum([answer["calibration"] for answer in sums.values()], axis=0)
        hessian = np.array([[xx + 1 / PENALTY, x], [x, one]]) + 1e-9 * np.eye(2)
        step = np.clip(np.linalg.solve(hessian, [gradient_x + point[0] / PENALTY, gradient]), -2.0, 2.0)
        point = point - step
        if np.abs(step).max() < 1e-8:
            break
    slope = max(float(point[0]), 1e-3) / sd
    return slope, float(point[1]) - slope * mean


def _facts(
    study: NetworkStudy,
    participants: list[Participant],
    totals: Arrays,
    history: list[dict[str, float]],
    kept: int,
    network: nn.Module,
) -> dict[str, Any]:
    first, names = participants[0], sorted({one.cohort for one in participants})
    training, validation = (int(row.sum()) for row in totals["counts"])
    contrast = getattr(study.create(), "contrastive_weight", 0.0)
    return {
        "rois": list(first.rois),
        "atlas": first.atlas,
        "inputs": list(study.columns),
        "seed": study.seed,
        "source": {
            "cohort": names[0] if len(names) == 1 else "federated",
            "hash": hashlib.sha256("\n".join(sorted(one.hash for one in participants)).encode()).hexdigest(),
            "sites": {one.site: {"patients": one.patients, "controls": one.controls} for one in participants},
        },
        "validation": "held-out subjects",
        "notes": ([NO_CONTRAST] if contrast else []) + ([] if validation else [NO_VALIDATION]),
        "history": history,
        "best_epoch": kept,
        "losses": {},
        "parameters": sum(value.numel() for value in network.parameters()),
        "n_sites": len(study.sites),
        "training_subjects": training,
        "validation_subjects": validation,
        "federated": {
            "study": study.id,
            "attempt": 1,
            "rounds": study.rounds,
            "masks": False,
            "least_subjects": study.least_subjects,
            "alone": [],
            "network": {
                "strategy": study.strategy,
                "mu": study.mu if study.strategy == "fedprox" else 0.0,
                "local_epochs": study.local_epochs,
                "kept_round": kept,
            },
        },
    }


def simulate(study: NetworkStudy, cohorts: Mapping[str, Cohort], progress: Progress = None) -> DeepMethod:
    """Train on the cohorts of the sites in one process."""
    clients = {site: Client(study, cohort, site) for site, cohort in cohorts.items()}
    work = lead(study, [client.participant for client in clients.values()], progress)
    request = next(work)
    while True:
        try:
            request = work.send({site: client.answer(request) for site, client in clients.items()})
        except StopIteration as ended:
            fitted = ended.value
            assert isinstance(fitted, DeepMethod)
            return fitted


def by_site(cohort: Cohort) -> dict[str, Cohort]:
    """The labelled subjects of each site, for `simulate`."""
    labelled = cohort.select(cohort.labels >= 0)
    return {site: labelled.select(sites=[site]) for site in labelled.site_names}
