"""GenM: a modulation net that is meta-learned across sites, so that features learned at one site transfer to another.

Works on Fisher-z FC. The loop of `deep.py` trains it in two stages: the modulation and task nets with a feature net for each
source site, then a new feature net for all sites with both frozen; prediction uses the latter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features, source_scaling
from m2lgdg.deep import Batch, DeepMethod, PartsNetwork, Shape, schedule, with_phenotypes
from m2lgdg.losses import normalised, smoothed_cross_entropy
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.sampler import balanced_sites, site_batches


class Network(PartsNetwork):
    """The feature net F, modulation net G and task net H; the site nets of the first stage are not part of its state."""

    def __init__(self, shape: Shape, config: GenM) -> None:
        super().__init__()
        self.mean: Tensor
        self.scale: Tensor
        self.support: Tensor | None
        self.gain: Tensor | None  # of phenotypes; none in models of 0.1.0, whose H takes them as they are
        for name in ("mean", "scale", "support", "gain"):  # already saved with the fitted arrays
            value = torch.from_numpy(np.array(shape.fitted[name])) if name in shape.fitted else None
            self.register_buffer(name, value, persistent=False)
        edges = len(self.mean)
        self.feature = linear(edges, config.width, config.initial)
        offset = float(config.modulation == "dot")  # "dot" starts near f times 1
        self.modulation = linear(edges, config.width, config.initial, offset=offset)
        self.inputs = shape.n_inputs
        self.task = linear(config.width + (shape.n_inputs if self.gain is None else 0), 2)
        self.phenotypes: list[nn.Module] = []
        if self.gain is not None:
            self.beside = nn.Linear(shape.n_inputs, 2, bias=False)
            nn.init.zeros_(self.beside.weight)  # random weights would be balanced by features of the scan that only memorise
            self.phenotypes = [self.beside]
        self.n_sites = shape.n_sites
        self.sites: list[nn.Linear] = []  # F_k of each source site, in the first stage
        self.kept: dict[str, Tensor] = {}  # G and H of the best epoch of the first stage
        self.lowest = float("inf")

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        fused = self.modulated(self.feature, self.scaled(batch))
        return {"fused": fused, "logits": self.decide(fused, batch)}

    def decide(self, features: Tensor, batch: Batch) -> Tensor:
        if self.gain is None:
            return self.task(with_phenotypes(features, batch, self.inputs))
        return self.task(features) + self.beside(batch.phenotypes * self.gain)

    def scaled(self, batch: Batch) -> Tensor:
        return (batch["fc"] - self.mean) / self.scale

    def modulated(self, feature: nn.Module, x: Tensor) -> Tensor:
        """(subject, edge) -> (subject, width): features of a feature net, modulated."""
        f, g = functional.gelu(feature(x)), self.modulation(x)  # (subject, width)
        if self.support is None:
            return f * g
        bank = functional.gelu(feature((self.support - self.mean) / self.scale))  # (support, width)
        match = torch.cat([g @ bank.mT, (g * f).sum(dim=1, keepdim=True)], dim=1)  # (subject, support + itself)
        attention = torch.softmax(match.float(), dim=1).to(f.dtype)
        return attention[:, :-1] @ bank + attention[:, -1:] * f

    def at_own_site(self, batch: Batch, numbers: list[int]) -> Tensor:
        """(subject, 2) logits of some sites' subjects, in the order of the sites, through each site's own net, unmodulated."""
        x = self.scaled(batch).view(len(numbers), len(batch) // len(numbers), -1)  # (site, subject, edge)
        weight = torch.stack([self.sites[n].weight for n in numbers])  # (site, width, edge)
        bias = torch.stack([self.sites[n].bias for n in numbers])[:, None]  # (site, 1, width)
        features = functional.gelu(torch.einsum("kse,kwe->ksw", x, weight) + bias)  # (site, subject, width)
        return self.decide(features.flatten(0, 1), batch)


class AcrossSites(nn.Module):
    """Validation of the first stage: each source subject through the nets of all sites but its own, modulated."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        """(subject, 2) mean of the normalised logits."""
        own, x, nets = self.network, self.network.scaled(batch), self.network.sites
        each = torch.stack([normalised(own.decide(own.modulated(net, x), batch)) for net in nets], dim=1)
        other = (1 - functional.one_hot(batch.site, len(nets)))[:, :, None]  # (subject, net, 1)
        return (each * other).sum(dim=1) / max(len(nets) - 1, 1)


def linear(width: int, out: int, scale: float = 1.0, offset: float = 0.0) -> nn.Linear:
    """Linear layer with He initialisation times `scale`, and bias `offset`."""
    layer = nn.Linear(width, out)
    nn.init.kaiming_normal_(layer.weight)
    nn.init.constant_(layer.bias, offset)
    with torch.no_grad():
        layer.weight *= scale
    return layer


@method("genm")
class GenM(DeepMethod):
    """GenM: one-layer features of Fisher-z FC, modulated by a net that is meta-learned across source sites.

    Differs from the release: sites and subjects are drawn uniformly, not in proportion to the index. Its attention mixes the
    subjects that are predicted together; here a subject attends to itself and to a support set of source-training subjects
    ("bank", whose connectivity a saved model contains), or is modulated alone ("dot"). The working copy of a feature net starts
    each episode with a fresh optimizer.
    Interpretation: the base update is one step on the mean of the sites' losses. No second derivatives. G and H of the first
    stage are those of the epoch with the lowest source-validation loss, with each subject passed through the nets of all sites
    but its own.
    Differs from the publication: edges are standardised with source statistics, so nets on edges start at a tenth of the He
    weights (`initial`), and G in "dot" with an offset of 1; full weights leave random components that no update removes.
    1,000 steps per stage with warm-up and cosine, where the release takes 10,000 at a constant rate (variant `long`): at 6,670
    edges a few hundred steps of 1e-4 fit the source completely.
    Variant `phenotypes`: a linear layer beside H, which starts at 0 and is trained in both stages. Phenotypes are scaled so
    that a step moves the logits by all of them as far as by all edges.
    Small sites: a site with fewer than 2 subjects of a class is in no episode; with fewer than 4 it contributes fewer.
    """

    width: int = 8
    modulation: Literal["dot", "bank"] = "bank"
    support: int = 64
    initial: float = 0.1
    entropy_weight: float = 0.1
    meta_train_steps: int = 3
    meta_test_steps: int = 2
    shots: int = 4  # of each class
    per_site: int = 8
    sites_per_batch: int = 64  # at most
    site_power: float = 0.5  # if there are more: probability proportional to size to this power
    steps_per_epoch: int = 20
    first_share: float = 0.5  # fraction of the epochs in the first stage
    epochs: int = 100
    warmup: int = 2
    weight_decay: float = 0.0
    dropout: float = 0.0
    update_rule: Literal["adamw", "adam"] = "adam"
    clip: float = 0.0
    label_smoothing: float = 0.0
    select_after_warmup: bool = False
    phenotypes: bool = False

    network_class = Network
    takes = ANY_SCAN
    unused = ("length", "batch_size", "dropout")
    remembers = ("fitted.support",)
    reference = "Lee et al. 2023: Site-invariant meta-modulation learning for multisite autism diagnosis"
    variants = {
        "dot": {"modulation": "dot"},
        "long": {"steps_per_epoch": 200},
        "phenotypes": {"phenotypes": True},
        "small": {"learning_rate": 0.01, "steps_per_epoch": 8},
    }
    space = {
        "modulation": ("bank", "dot"),
        "width": (4, 8, 16, 32),
        "learning_rate": (3e-5, 1e-4, 3e-4),
        "entropy_weight": (0.0, 0.1, 1.0),
    }

    def features(self, cohort: Cohort, device: torch.device) -> dict[str, Tensor]:
        return {"fc": torch.from_numpy(fc_features(cohort.scans).astype(np.float32))}

    def prepare(self, train: Cohort, features: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """The support set of "bank" is half of each class, from all sites in turn."""
        fc = features["fc"].cpu().numpy()  # (subject, edge)
        fitted = {**source_scaling(fc)}
        if inputs := self.taken(train):  # so that a step of Adam moves the logits by all phenotypes as far as by all edges
            fitted["gain"] = np.array(fc.shape[1] / len(inputs), dtype=np.float32)
        if self.modulation == "bank":
            rows = balanced_rows(train.sites, train.labels, self.support, torch.randperm(len(train)).numpy())
            fitted["support"] = fc[rows]
        return fitted

    def optimizer(self, network: Any) -> torch.optim.Optimizer:
        """One optimizer for all nets, including the site nets created here; a step updates only those with a gradient."""
        nets = [linear(len(network.mean), self.width, self.initial) for _ in range(network.n_sites)]
        network.sites = [net.to(network.mean.device) for net in nets]
        values = [value for part in (network, *network.sites) for value in part.parameters()]
        return self.updating(values)

    def switch(self) -> int:
        """First epoch of the second stage, which has the last epoch at least."""
        return min(int(self.first_share * self.epochs), self.epochs - 1)

    def candidate(self, epoch: int) -> bool:
        """Only epochs of the second stage, which trains the feature net used for prediction."""
        return epoch >= min(self.switch() + self.warmup * self.select_after_warmup, self.epochs - 1)

    def batches(self, site: Tensor, label: Tensor, order: torch.Generator) -> list[Tensor]:
        """Balanced batches of every site; in the first stage each is followed by an episode: draws of two sites in turn."""
        together = min(self.sites_per_batch, len(torch.unique(site)))
        self._base = together * self.per_site
        per = {"sites_per_batch": together, "per_site": self.per_site, "count": self.steps_per_epoch}
        base = site_batches(site, label, order, power=self.site_power, **per)
        fit = balanced_sites(site, label, least=2)
        if self.epoch >= self.switch() or len(fit) < 2:
            return base
        members = {n: torch.nonzero(site == n).flatten() for n in fit.tolist()}

        def draws(n: int, count: int) -> list[Tensor]:
            here, classes = members[n], label[members[n]]
            shots = min(self.shots, int(torch.bincount(classes).min()))
            return [here[rows] for rows in site_batches(site[here], classes, order, per_site=2 * shots, count=count)]

        whole = []
        for rows in base:
            first, second = fit[torch.randperm(len(fit), generator=order)[:2]].tolist()
            whole.append(torch.cat([rows, *draws(first, self.meta_train_steps), *draws(second, self.meta_test_steps)]))
        return whole

    def lacks_sites(self, site: Tensor, label: Tensor) -> bool:
        return len(balanced_sites(site, label, least=2)) < 2

    def step(self, network: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """First stage: update the site nets and H, a working copy of one site net, then G. Second stage: the feature net."""
        first = self.epoch < self.switch()
        start, end = (0, self.switch()) if first else (self.switch(), self.epochs)
        rate = self.learning_rate * schedule(self.epoch - start, 1, self.warmup, end - start)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if not first:
            learned = [network.feature, *network.phenotypes]
            return {"all_sites": self.learn_from(network, network.feature, batch, learned, optimizer)}
        rows = torch.arange(len(batch), device=batch.label.device)
        terms = {"base": self.base_update(network, batch.take(rows[: self._base]), optimizer)}
        numbers = batch.site.tolist()[self._base :]
        if not numbers:  # fewer than two sites are large enough for an episode
            return terms
        cut = self._base + numbers.count(numbers[0])
        train, test = rows[self._base : cut].chunk(self.meta_train_steps), rows[cut:].chunk(self.meta_test_steps)
        working = copy.deepcopy(network.sites[numbers[0]])
        fresh = self.updating(working.parameters(), lr=rate)
        inner = [self.learn_from(network, working, batch.take(some), [working], fresh) for some in train]
        outer = [self.learn_from(network, working, batch.take(some), [network.modulation], optimizer) for some in test]
        return terms | {"meta_train": torch.stack(inner).mean(), "meta_test": torch.stack(outer).mean()}

    def base_update(self, network: Network, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        numbers = batch.site[:: self.per_site].tolist()
        with self.autocast(batch.label.device):
            logits = network.at_own_site(batch, numbers)
        updated = [network.task, *network.phenotypes, *(network.sites[n] for n in numbers)]
        return self.update(self.cross_entropy(logits, batch), updated, optimizer)

    def learn_from(
        self, network: Network, feature: nn.Module, batch: Batch, updated: list[nn.Module], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        """One update of the nets `updated` on the modulated features of `feature`; returns the loss."""
        with self.autocast(batch.label.device):
            logits = network.decide(network.modulated(feature, network.scaled(batch)), batch)
        return self.update(self.cross_entropy(logits, batch), updated, optimizer)

    def update(self, loss: Tensor, updated: list[nn.Module], optimizer: torch.optim.Optimizer) -> Tensor:
        """One gradient step of some nets; the others have no gradient, so the optimizer leaves them unchanged."""
        values = [value for net in updated for value in net.parameters()]
        optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=values)  # type: ignore[no-untyped-call]
        self.clip_gradients(values)
        optimizer.step()
        return loss.detach()

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Used in its place: 1 - cosine of logits and one-hot label, plus weighted cross-entropy of the normalised logits."""
        unit = normalised(logits)  # (subject, 2)
        distance = 1 - unit.gather(1, batch.label[:, None])
        return distance.mean() + self.entropy_weight * smoothed_cross_entropy(unit, batch.label, None, self.label_smoothing)

    def validate(self, network: Any, batch: Batch) -> dict[str, float]:
        """Validation; in the first stage across site nets, keeping G and H of the lowest loss and loading them at its end."""
        if self.epoch >= self.switch():
            return super().validate(network, batch)
        metrics = super().validate(AcrossSites(network), batch)
        if metrics["val_loss"] < network.lowest:
            network.lowest = metrics["val_loss"]
            both = {"modulation": network.modulation, "task": network.task}
            network.kept = {f"{k}.{n}": v.clone() for k, net in both.items() for n, v in net.state_dict().items()}
        if self.epoch == self.switch() - 1:
            network.load_state_dict(network.kept, strict=False)
        return metrics


def balanced_rows(
    sites: npt.NDArray[np.str_], labels: npt.NDArray[Any], wanted: int, order: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Positions of at most `wanted` subjects, half of each class, taken from all sites in turn."""
    chosen = []
    for label in (0, 1):
        members = order[labels[order] == label]
        turn = [int((sites[members[:i]] == sites[row]).sum()) for i, row in enumerate(members)]
        chosen.append(members[np.argsort(turn, kind="stable")][: wanted // 2])
    return np.concatenate(chosen)
