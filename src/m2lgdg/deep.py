"""`DeepMethod`: the base class of all networks and the only training loop.

Updates, linear warm-up then cosine decay, gradient clipping, early stopping on source-validation AUC, seeding, device and
precision are handled here and nowhere else. The whole source is kept on the device; a batch is a row of indices into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from m2lgdg.cohort import Cohort
from m2lgdg.devices import (
    Recorded,
    Replayed,
    Step,
    check_network_size,
    choose_device,
    fast_form,
    free_memory,
    numerics,
    set_rates,
)
from m2lgdg.losses import smoothed_cross_entropy
from m2lgdg.method import Method
from m2lgdg.metrics import FLAT_NOTE, auc, is_flat, platt, sigmoid
from m2lgdg.preprocess import PhenotypeScaler, standardised_series
from m2lgdg.splits import Indices, validation_split
from m2lgdg.storage import InputError

NO_VALIDATION = (
    "No source subject was held out for validation: the epoch and the calibration were selected on the training subjects, "
    "so the validation AUC does not describe other subjects."
)
TOO_FEW_SITES = (
    "Source-training subjects come from {sites} site(s), too few or too small to be compared within batches: the cross-site "
    "part of {name} was not used in this training."
)
CHUNK = 64  # subjects in one forward pass of a prediction


@dataclass(frozen=True)
class Batch:
    """Subjects on the device: the `features` of their scans, phenotypes (subject, input), label and site number."""

    features: Mapping[str, Tensor]
    phenotypes: Tensor
    label: Tensor
    site: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, name: str) -> Tensor:
        return self.features[name]

    @property
    def series(self) -> Tensor:
        """(subject, roi, time) standardised series."""
        return self.features["series"]

    def take(self, rows: Tensor) -> Batch:
        """The subjects at the given positions."""
        features = {name: value[rows] for name, value in self.features.items()}
        return Batch(features, self.phenotypes[rows], self.label[rows], self.site[rows])

    def chunks(self) -> list[Batch]:
        """The subjects in chunks small enough for one forward pass."""
        return [self.take(rows) for rows in torch.split(torch.arange(len(self), device=self.label.device), CHUNK)]


@dataclass(frozen=True)
class Shape:
    """What `build` needs: sizes (`n_inputs` is 0 without phenotypes), and what `prepare` fitted."""

    n_rois: int
    length: int
    n_inputs: int
    n_sites: int
    fitted: Mapping[str, npt.NDArray[Any]]


class PartsNetwork(nn.Module):
    """A network whose `parts` gives its logits and, by name, what its losses and explanations need."""

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """At least `logits` (subject, 2); `fused` is the input of the classifier."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) logits."""
        return self.parts(batch)["logits"]


@dataclass
class Training:
    """What the epochs of one training share; `DeepMethod._begin` makes it."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    rates: list[float]  # learning rate of each parameter group, before `rate_factor`
    order: torch.Generator  # of the subjects
    site: Tensor  # (training subject,) on the CPU
    label: Tensor
    step: Step


@dataclass
class DeepMethod(Method):
    """A neural network trained on source. Its fields are common to all deep methods.

    A subclass names its `network_class`, or writes `build`. All other hooks have a default:

    - data: `features`, `prepare`, `make_batch`, `batches`, `lacks_sites`
    - training: `loss`, `step`, `optimizer`, `rate_factor`, `autocast`, `phase`
    - selection of the epoch: `validate`, `validation_logits`, `candidate`; afterwards `calibrate`

    Hooks can read `self.epoch` and `self.class_weight`, which the training loop sets.
    """

    length: int = 200
    epochs: int = 100
    warmup: int = 10
    patience: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    update_rule: Literal["adamw", "adam", "sgd"] = "adamw"  # "adam" and "sgd" add the weight decay to the gradient
    clip: float = 1.0  # largest norm of the gradient; 0: not clipped
    dropout: float = 0.1
    label_smoothing: float = 0.1
    validation_share: float = 0.15
    validation_by: Literal["subject", "site"] = "subject"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    deterministic: bool = False
    select_after_warmup: bool = True  # an untrained network can rank a hundred subjects well by chance
    phenotypes: bool = True  # whether the network takes phenotypes; otherwise a fitted model does not need them
    calibration: Literal["platt", "none"] = "platt"  # Platt scaling on source-validation subjects, or the plain softmax

    bounds = {
        **{"length": (8, math.inf), "warmup": (0, math.inf), "batch_size": (2, math.inf), "weight_decay": (0, math.inf)},
        **{"learning_rate": (1e-12, math.inf), "clip": (0, math.inf)},
        **dict.fromkeys(("dropout", "label_smoothing", "validation_share"), (0, 1)),
    }

    loss_weights: ClassVar[Mapping[str, str]] = {}  # term of `loss` -> field with its weight, if that is not TERM_weight
    network_class: ClassVar[Any]  # called with a `Shape` and the method
    recordable = False  # whether `step` runs without reading values back, so that CUDA can record it

    # Set by the training loop, for use in the hooks. Not annotated, because annotations would make them hyper-parameters.
    epoch = 0  # the current epoch, from 0
    _size_checked = cast(Mapping[str, Any] | None, None)  # arrays of a loaded model whose size is known to fit its fields
    class_weight = cast(Tensor | None, None)  # (class,) weights n / (2 n_class) of source-training subjects

    def build(self, shape: Shape) -> nn.Module:
        """Create the network. Its `forward` takes a `Batch` and returns (subject, 2) logits. Default: `network_class`."""
        return cast(nn.Module, self.network_class(shape, self))

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        """Inputs from the scans, (subject, ...) tensors by name, each row of its own subject only. Default: the series."""
        return {"series": torch.from_numpy(standardised_series(cohort.series, self.length))}

    def taken(self, source: Cohort) -> list[str]:
        """Names of the phenotypes that the network takes: the inputs of source, or none without `phenotypes`."""
        return list(source.inputs) if self.phenotypes else []

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """Arrays fitted on source-training subjects before training, for `shape.fitted`. Default: none."""
        return {}

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, whose rates `rate_factor` scales. Default: `update_rule` for all parameters."""
        return self.updating(network.parameters())

    def updating(self, parameters: Any, **options: Any) -> torch.optim.Optimizer:
        """Optimizer of the field `update_rule` for parameters or groups of them."""
        rules: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        options = {"lr": self.learning_rate, "weight_decay": self.weight_decay} | options
        return cast(torch.optim.Optimizer, rules[self.update_rule](parameters, **options))

    def clip_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Scale the gradient of some parameters down to the norm `clip`."""
        if self.clip:
            nn.utils.clip_grad_norm_(parameters, self.clip)

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Batches of one epoch, as positions among source-training subjects; draw random numbers from `order` only.

        Default: all subjects shuffled, without the incomplete last batch.
        """
        size = min(self.batch_size, len(label))
        shuffled = torch.randperm(len(label), generator=order)[: len(label) // size * size]
        return list(shuffled.view(-1, size))  # (batch, subject)

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        """Whether the source-training sites are too few or too small for the cross-site part of the method."""
        return False

    def rate_factor(self, batch: int, batches: int) -> float:
        """Learning-rate factor at a batch of the current epoch. Default: linear warm-up, then cosine decay to 0."""
        return schedule(self.epoch * batches + batch, batches, self.warmup, self.epochs)

    def phase(self) -> object:
        """Training stage of a recordable method whose Python code branches on it; each is recorded anew."""
        return None

    def candidate(self, epoch: int) -> bool:
        """Whether the network after this epoch (from 0) can be selected. Default: only epochs after the warm-up."""
        return not self.select_after_warmup or epoch >= min(self.warmup, self.epochs - 1)

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Terms of the training loss by name; their sum is minimised. Default: cross-entropy."""
        return {"ce": self.cross_entropy(network(batch), batch)}

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy with label smoothing and `class_weight`."""
        return smoothed_cross_entropy(logits, batch.label, self.class_weight, self.label_smoothing)

    def step(self, network: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Make one update of the weights and return the detached loss terms."""
        optimizer.zero_grad(set_to_none=True)
        with self.autocast(batch.label.device):
            terms = self.loss(network, batch)
        total_of(terms).backward()  # type: ignore[no-untyped-call]
        self.clip_gradients(network.parameters())
        optimizer.step()
        return {name: term.detach() for name, term in terms.items()}

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Train on source-training subjects and keep the epoch that is best on source-validation subjects."""
        self.facts_["inputs"] = self.taken(source)
        chosen = choose_device(device)
        devices = [torch.cuda.current_device()] if chosen.type == "cuda" else []
        try:
            with numerics(tf32=self.precision != "fp32", deterministic=self.deterministic):
                free_memory(chosen)
                with torch.random.fork_rng(devices=devices):
                    torch.manual_seed(seed)
                    self._train(source, seed, chosen, progress)
                if devices:
                    self.facts_["peak_memory_gib"] = round(torch.cuda.max_memory_allocated(chosen) / 2**30, 3)
        except torch.OutOfMemoryError:
            sizes = [f"{name} ({getattr(self, name)})" for name in ("batch_size", "length") if name not in self.unused]
            advice = f"lower {' or '.join(sizes) or 'the sizes of network and batches'}, or set precision to bf16"
            raise InputError(f"method {self.name} ran out of memory on {chosen}: {advice}.") from None

    def check(self) -> None:
        """Also refuse a warm-up longer than the training."""
        super().check()
        if self.warmup > self.epochs:
            raise InputError(
                f"method {self.name}, field warmup: the warm-up of {self.warmup} epochs is longer than the training "
                f"(epochs = {self.epochs}); lower warmup or raise epochs."
            )

    def _train(self, source: Cohort, seed: int, device: torch.device, progress: Callable[..., None] | None) -> None:
        source = source.select(np.argsort(source.subjects, kind="stable"))  # the same weights whatever the order of subjects
        training, validation = self._split(source, seed)
        scaler = PhenotypeScaler.fit(source.select(training), self.taken(source))
        subjects = self.make_batch(source, scaler, device)  # all of source
        training_rows, validation_rows = torch.from_numpy(training).to(device), torch.from_numpy(validation).to(device)
        fitted = self.prepare(source.select(training), subjects.take(training_rows).features)
        shape = self._shape(len(source.rois), len(self.facts_["inputs"]), len(source.site_names), fitted)
        counts = np.bincount(source.labels[training], minlength=2)
        self.class_weight = torch.tensor(counts.sum() / (2 * np.maximum(counts, 1))).float().to(device)

        network = fast_form(self.build(shape)).to(device)
        self.epoch = 0
        run, held_out = self._begin(network, subjects, training_rows, seed), subjects.take(validation_rows)
        if self.lacks_sites(run.site, run.label):
            self.facts_["notes"].append(TOO_FEW_SITES.format(name=self.name, sites=len(torch.unique(run.site))))
        self._replayed: Replayed | None = None
        history: list[dict[str, float]] = []
        best: tuple[float, float] | None = None
        weights: dict[str, npt.NDArray[Any]] = {}  # of the best epoch
        for epoch in range(self.epochs):
            self.epoch = epoch
            record = self._run_epoch(run)
            record |= self.validate(network, held_out)
            self._stop_if_not_finite(record, epoch)  # shows whether the last step of the epoch broke the weights
            history.append(record)
            if progress:
                progress(epoch=epoch + 1, epochs=self.epochs, **record)
            if not self.candidate(epoch):
                continue
            rank = (record["val_auc"], -record["val_loss"])
            if best is None or rank > best:
                best, best_epoch = rank, epoch
                weights = {name: value.detach().cpu().numpy().copy() for name, value in network.state_dict().items()}
            elif epoch - best_epoch >= self.patience:
                break
        if best is None:
            raise InputError(f"method {self.name}: candidate(epoch) rejected all {self.epochs} epochs.")
        self.state_ |= {f"network.{name}": value for name, value in weights.items()}
        self.state_ |= {f"fitted.{name}": value for name, value in fitted.items()} | scaler.state("scaler")
        self.facts_ |= {
            "history": history,
            "best_epoch": best_epoch + 1,
            "losses": self._losses(history, best_epoch),
            "parameters": sum(value.numel() for value in network.parameters()),
            "n_sites": len(source.site_names),
            "training_subjects": len(training),
            "validation_subjects": len(validation),
        }
        self._device, self._replayed = device, None
        self.state_["calibration"] = np.array(self.calibrate(held_out), dtype=np.float64)

    def _begin(self, network: nn.Module, subjects: Batch, training: Tensor, seed: int) -> Training:
        optimizer = self.optimizer(network)
        rates = [group["lr"] for group in optimizer.param_groups]
        sites, labels = subjects.site[training].cpu(), subjects.label[training].cpu()
        step = self._stepper(network, optimizer, subjects, training)
        return Training(network, optimizer, rates, torch.Generator().manual_seed(seed), sites, labels, step)

    def _run_epoch(self, run: Training) -> dict[str, float]:
        """Train for one epoch, and return the mean of each term of the loss over its batches."""
        run.network.train()
        sums: dict[str, Tensor] = {}
        batches = self.batches(run.site, run.label, run.order)
        if not batches or not all(map(len, batches)):
            raise InputError(f"method {self.name}: batches(...) returned no batch, or an empty one, in epoch {self.epoch + 1}.")
        for i, rows in enumerate(batches):
            set_rates(run.optimizer, [rate * self.rate_factor(i, len(batches)) for rate in run.rates])
            terms = run.step(rows.to(next(run.network.parameters()).device))
            sums |= {name: sums.get(name, 0.0) + term for name, term in terms.items()}
        record = {name: float(total) / len(batches) for name, total in sums.items()}
        self._stop_if_not_finite(record, self.epoch)
        return record

    def _losses(self, history: list[dict[str, float]], best: int) -> dict[str, dict[str, float | None]]:
        """Each term of the loss in the first epoch that has it and in the best epoch, and its weight if a field holds it."""
        first: dict[str, float] = {}
        for record in history:
            first = record | first
        return {
            name: {
                "first": value,
                "kept": history[best].get(name),  # the name that model folders of 0.1.0 have
                "weight": getattr(self, self.loss_weights.get(name, f"{name}_weight"), None),
            }
            for name, value in first.items()
            if not name.startswith("val_")
        }

    def _stepper(self, network: nn.Module, optimizer: torch.optim.Optimizer, subjects: Batch, training: Tensor) -> Step:
        def step(rows: Tensor) -> dict[str, Tensor]:
            return self.step(network, subjects.take(training[rows]), optimizer)

        device = training.device
        if device.type != "cuda" or not self.recordable or self.deterministic:
            return step
        return Recorded(step, optimizer, self.precision != "fp32", self.phase)

    def _split(self, source: Cohort, seed: int) -> tuple[Indices, Indices]:
        """Positions of training and validation subjects; both are all of source if none can be held out."""
        training, validation = validation_split(source, seed=seed, proportion=self.validation_share, by=self.validation_by)
        if len(validation):
            self.facts_ |= {"validation": f"held-out {self.validation_by}s", "notes": []}
            return training, validation
        self.facts_ |= {"validation": "training subjects", "notes": [NO_VALIDATION]}
        return training, training

    def calibrate(self, batch: Batch) -> tuple[float, float]:
        """Slope and offset applied to the logit in `score`. Default: Platt scaling on `batch`, the validation subjects."""
        if self.calibration == "none" or not len(batch):
            return 1.0, 0.0
        decision = self._decision(self.network().to(batch.label.device), batch)
        slope, offset = platt(decision, batch.label.cpu().numpy())
        if is_flat(slope, decision):
            self.facts_.setdefault("notes", []).append(FLAT_NOTE)
        return slope, offset

    def _decision(self, network: nn.Module, batch: Batch) -> npt.NDArray[np.float64]:
        with torch.inference_mode():
            logits = torch.cat([network(chunk) for chunk in batch.chunks()]).cpu().double()
        return (logits[:, 1] - logits[:, 0]).numpy()

    def score(self, target: Cohort) -> npt.NDArray[np.float64]:
        """(subject,) calibrated probability from the logits of the fitted network."""
        slope, offset = self.state_["calibration"]
        return sigmoid(slope * self.decision(target) + offset)

    def decision(self, target: Cohort) -> npt.NDArray[np.float64]:
        """(subject,) difference between the logits of patient and control, before Platt scaling."""
        device, network, scaler = self._ready()
        decision = []
        for start in range(0, len(target), CHUNK):  # so that a large site need not fit on the device
            some = target.select(np.arange(start, min(start + CHUNK, len(target))))
            decision.append(self._decision(network, self.make_batch(some, scaler, device)))
        return np.concatenate(decision)

    def represent(self, cohort: Cohort) -> npt.NDArray[np.float32]:
        """(subject, dimension) input of the classifier, for networks with `parts(batch)["fused"]`."""
        device, network, scaler = self._ready()
        with torch.inference_mode():
            fused = [network.parts(chunk)["fused"] for chunk in self.make_batch(cohort, scaler, device).chunks()]
        return np.asarray(torch.cat(fused).float().cpu().numpy())

    def _ready(self) -> tuple[torch.device, Any, PhenotypeScaler]:
        device = getattr(self, "_device", torch.device("cpu"))
        scaler = PhenotypeScaler.restore(tuple(self.facts_["inputs"]), self.state_, "scaler")
        return device, self.network().to(device), scaler

    def network(self) -> nn.Module:
        """The fitted network in evaluation mode."""
        fitted = {name.removeprefix("fitted."): value for name, value in self.state_.items() if name.startswith("fitted.")}
        shape = self._shape(len(self.facts_["rois"]), len(self.facts_["inputs"]), self.facts_["n_sites"], fitted)
        weights = {
            name.removeprefix("network."): torch.from_numpy(np.array(value))
            for name, value in self.state_.items()
            if name.startswith("network.")
        }
        with torch.random.fork_rng(devices=[]):
            if self._folder and self._size_checked is not self.state_:  # fields read from a folder may request any size
                check_network_size(lambda: self.build(shape), weights, self)
                self._size_checked = self.state_
            network = fast_form(self.build(shape))
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"the weights do not fit method {self.name}: {str(error).splitlines()[-1].strip()}.") from None
        return network.eval()

    def _shape(self, n_rois: int, n_inputs: int, n_sites: int, fitted: Mapping[str, npt.NDArray[Any]]) -> Shape:
        return Shape(n_rois, self.length, n_inputs if self.phenotypes else 0, n_sites, fitted)

    def make_batch(self, cohort: Cohort, scaler: PhenotypeScaler, device: torch.device) -> Batch:
        """All subjects of a cohort as one batch on the device; `scaler` was fitted on source-training subjects."""
        numbers = {site: i for i, site in enumerate(cohort.site_names)}
        return Batch(
            features={name: value.to(device) for name, value in self.features(cohort, device).items()},
            phenotypes=torch.from_numpy(scaler.transform(cohort).astype(np.float32)).to(device),
            label=torch.from_numpy(cohort.labels.astype(np.int64)).to(device),
            site=torch.tensor([numbers[site] for site in cohort.sites.tolist()], device=device),
        )

    def autocast(self, device: torch.device) -> torch.autocast:
        """Context for forward passes in training and validation: bfloat16 if `precision` is bf16."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def validate(self, network: nn.Module, batch: Batch) -> dict[str, float]:
        """AUC (0.5 where it is undefined) and loss on the source-validation subjects, from which the best epoch is selected.

        An override may record more, under names that start with `val_`.
        """
        network.eval()
        with torch.inference_mode(), self.autocast(batch.label.device):
            logits = self.validation_logits(network, batch)
            loss = float(self.cross_entropy(logits, batch))
        area = auc(batch.label.cpu().numpy(), (logits[:, 1] - logits[:, 0]).float().cpu().numpy())
        return {"val_auc": 0.5 if math.isnan(area) else area, "val_loss": loss}

    def validation_logits(self, network: nn.Module, batch: Batch) -> Tensor:
        """(subject, 2) logits of the source-validation subjects, the same ones after every epoch; recorded on CUDA."""

        def logits() -> Tensor:
            return torch.cat([network(chunk) for chunk in chunks])

        chunks = batch.chunks()
        if not batch.label.is_cuda or not self.recordable or self.deterministic:
            return logits()
        self._replayed = self._replayed or Replayed(logits, self.phase)
        return self._replayed()

    def _stop_if_not_finite(self, record: Mapping[str, float], epoch: int) -> None:
        for name, value in record.items():
            if not math.isfinite(value):
                raise InputError(
                    f"method {self.name}: loss {name} is {value} in epoch {epoch + 1}; lower learning_rate "
                    f"({self.learning_rate}), or set precision to fp32."
                )


def with_phenotypes(fused: Tensor, batch: Batch, inputs: int) -> Tensor:
    """(subject, width + input): scaled phenotypes concatenated to a representation, where a network takes any (`n_inputs`)."""
    return torch.cat([fused, batch.phenotypes], dim=1) if inputs else fused


def total_of(terms: Mapping[str, Tensor]) -> Tensor:
    """Sum of the terms of a loss, in float32."""
    return torch.stack([term.float() for term in terms.values()]).sum()


def schedule(step: int, per_epoch: int, warmup: int, epochs: int) -> float:
    """Learning-rate factor at a step: linear to 1 over the warm-up epochs, then cosine to 0 at the last epoch."""
    rise, total = warmup * per_epoch, epochs * per_epoch
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(total - rise, 1)))
