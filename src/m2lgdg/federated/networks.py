"""Networks trained at several sites by FedAvg, FedProx or FedBN: the comparison with the exact linear model of this folder.

A `Client` trains at one site with the epochs of `deep.py`, `lead` averages the weights of all sites, and `simulate` runs both
in one process. `networks_flower` carries the same requests over a network.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.federated.networks_plan import (
    Arrays,
    Floats,
    Forms,
    NetworkStudy,
    Participant,
    Request,
    average,
    checked,
    edge_sums,
    moments,
    new_network,
    normalisation_names,
    shared_arrays,
    shared_forms,
    statistics_forms,
    weights_of,
)
from m2lgdg.federated.plan import CODES
from m2lgdg.methods.linear import _balance, _site_averages
from m2lgdg.preprocess import CATEGORICAL, PhenotypeScaler, _typical, _values
from m2lgdg.splits import validation_split
from m2lgdg.storage import InputError, needing

with needing("networks", "A federated network"):
    import torch
    from torch import nn

    from m2lgdg.deep import NO_VALIDATION, Batch, DeepMethod
    from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome

NEWTON_STEPS = 30
PENALTY = 100.0  # C of `metrics.platt`
NO_CONTRAST = "The contrastive loss compares subjects of several sites, which no site has: it was 0 in federated training."


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
            raise InputError(f"cohort {cohort.name} has no phenotype {missing[0]}; add it, as an empty column if unknown.")
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
        values = _values(train, study.columns)
        filled, codes = values.copy(), np.zeros((CODES, len(study.columns)))
        for j, name in enumerate(study.columns):
            if name in CATEGORICAL:
                codes[:, j] = [(values[:, j] == code).sum() for code in range(CODES)]
            else:
                filled[np.isnan(values[:, j]), j] = _typical(values[:, j], name)
        edges = self.edges[self.training]
        plain = study.method == "erm"
        sums = moments(edges.astype(np.float64))[1:] if plain else edge_sums(edges, train.labels, self.weights)
        return {
            "counts": np.stack(counts).astype(np.float64),
            "weight": np.array([self.weights.sum()]),
            "moments": moments(filled),
            "codes": codes,
            "edges": sums,
        }

    @property
    def edges(self) -> npt.NDArray[np.float32]:
        """(subject, edge) FC above the diagonal, the only feature of both networks."""
        (feature,) = self.features.values()
        return np.asarray(feature.numpy())

    @property
    def weights(self) -> Floats:
        """(training subject,) weights that balance the classes; 0 at a site with one class."""
        train = self.cohort.select(self.training)
        return _balance(train) if len(set(train.labels.tolist())) == 2 else np.zeros(len(train))

    def _prepared(self, request: Request, name: str) -> tuple[nn.Module, Batch]:
        """The network of the request, with its weights loaded, and all subjects of the site as a batch."""
        n_rois, method, where = len(self.cohort.rois), self.method, f"the request of round {request.round} ({name})"
        forms = shared_forms(self.study, n_rois)
        given = {key: value for key, value in request.arrays.items() if not key.startswith("network.")}
        shared = checked(given, forms, where, infinite=("scaler.scale",))
        network = new_network(self.study, method, shared, n_rois)
        own = weights_of(network)
        weights = {key: value for key, value in request.arrays.items() if key.startswith("network.")}
        _load(network, checked(weights, {key: (value.shape, value.dtype) for key, value in own.items()}, where))
        counts = shared["counts"]
        method.class_weight = torch.tensor(counts.sum() / (2 * np.maximum(counts, 1))).float()
        if isinstance(method, M2LGDGConnectome):
            edges = self.edges[self.training].astype(np.float64)
            mean = _site_averages(np.zeros(len(edges), dtype=np.intp), self.weights) @ edges  # (1, edge)
            method._offsets = torch.from_numpy((mean - shared["fitted.mean"]).astype(np.float32))
        return network, self._batch(shared)

    def _batch(self, shared: Arrays) -> Batch:
        """All subjects; missing phenotypes are filled in with the median of the site, else with the value for all sites."""
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
            raise InputError(f"round {number} of FedBN does not follow the last one at site {self.site}; start again.")
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

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


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
    shared = shared_arrays(study, method, totals, n_rois)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(study.seed)
        network = new_network(study, method, shared, n_rois)
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
