"""The training loop: selection, stopping, seeds, devices and its messages, with a network small enough to follow."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from m2lgdg import InputError, leave_one_site_out, make, make_cohort
from m2lgdg.deep import Batch, DeepMethod, choose_device
from m2lgdg.method import method
from m2lgdg.registry import METHODS


class Tiny(nn.Module):
    """Linear in the variance of each ROI's changes, which the standardised series still show."""

    def __init__(self, n_rois):
        super().__init__()
        self.linear = nn.Linear(n_rois, 2)

    def forward(self, batch: Batch):
        return self.linear(10 * batch.series.diff(dim=2).square().mean(dim=2))


class Explode(torch.autograd.Function):
    """A finite loss whose gradient is not."""

    @staticmethod
    def forward(ctx, weight):
        return weight * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


@method("tiny-deep")
class TinyDeep(DeepMethod):
    """For these tests only."""

    broken: str = ""
    last: ClassVar[int] = 0
    seen: ClassVar[list] = []

    def build(self, shape):
        return Tiny(shape.n_rois)

    def loss(self, network, batch):
        if self.broken == "nan":
            return {"ce": network(batch).sum() * torch.nan}
        if self.broken == "last step" and len(self.seen) == self.last:
            return {"ce": Explode.apply(network.linear.weight).sum()}
        if self.broken == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.seen.append(len(batch))
        return super().loss(network, batch)


del METHODS["tiny-deep"]  # not a method of the package: the contract suite need not see it

FIELDS = {"length": 40, "epochs": 12, "warmup": 2, "patience": 4, "learning_rate": 0.05, "batch_size": 8}


@pytest.fixture(scope="module")
def fold():
    (one,) = leave_one_site_out(make_cohort("tiny", seed=1), ["west"])
    return one


def test_the_kept_epoch_is_the_best_after_the_warm_up(fold):
    fitted = TinyDeep(**FIELDS).fit(fold.source, seed=0)
    history, best = fitted.facts_["history"], fitted.facts_["best_epoch"]
    candidates = history[2:]
    ranks = [(one["val_auc"], -one["val_loss"]) for one in candidates]
    assert best == 3 + ranks.index(max(ranks))
    assert len(history) <= min(12, best + 4)
    every = TinyDeep(**FIELDS, select_after_warmup=False).fit(fold.source, seed=0)
    all_ranks = [(one["val_auc"], -one["val_loss"]) for one in every.facts_["history"]]
    assert every.facts_["best_epoch"] == 1 + all_ranks.index(max(all_ranks))


def test_incomplete_batches_are_dropped_and_history_names_the_losses(fold):
    TinyDeep.seen.clear()
    fitted = TinyDeep(**FIELDS).fit(fold.source, seed=0)
    assert set(TinyDeep.seen) == {8}
    assert len(TinyDeep.seen) == len(fitted.facts_["history"]) * (fitted.facts_["training_subjects"] // 8)
    assert set(fitted.facts_["history"][0]) == {"ce", "val_auc", "val_loss"}


def test_calibration_is_that_of_source_validation_subjects(fold):
    plain = TinyDeep(**FIELDS, calibration="none").fit(fold.source, seed=0)
    platt = TinyDeep(**FIELDS).fit(fold.source, seed=0)
    np.testing.assert_array_equal(plain.state_["calibration"], [1.0, 0.0])
    slope, offset = platt.state_["calibration"]
    logit = {name: np.log(one / (1 - one)) for name, one in _positive(plain=plain, platt=platt, target=fold.target).items()}
    np.testing.assert_allclose(logit["platt"], slope * logit["plain"] + offset, atol=1e-5)


def _positive(target, **fitted):
    return {name: one.predict_proba(target)[:, 1] for name, one in fitted.items()}


def test_training_leaves_the_global_generator_and_switches_alone(fold):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    TinyDeep(**FIELDS, deterministic=True).fit(fold.source, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_seeds_matter_and_repeat(fold):
    first, again, other = (TinyDeep(**FIELDS).fit(fold.source, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.state_["network.linear.weight"], again.state_["network.linear.weight"])
    assert (first.state_["network.linear.weight"] != other.state_["network.linear.weight"]).any()


def test_bf16_trains_close_to_fp32(fold):
    single, half = (TinyDeep(**FIELDS, precision=precision).fit(fold.source, seed=0) for precision in ("fp32", "bf16"))
    gap = np.abs(single.state_["network.linear.weight"] - half.state_["network.linear.weight"]).max()
    assert 0 < gap < 0.3


def test_validation_by_whole_sites(fold):
    fitted = TinyDeep(**FIELDS, validation_by="site").fit(fold.source, seed=0)
    sizes = {int((fold.source.sites == site).sum()) for site in fold.source.site_names}
    assert fitted.facts_["validation_subjects"] in sizes


def pairs(source):
    """One patient and one control of each site: nobody can be spared for validation."""
    cells = [(source.sites == site) & (source.labels == label) for site in source.site_names for label in (0, 1)]
    return source.select(np.sort([np.flatnonzero(cell)[0] for cell in cells]))


def test_whom_validation_looked_at_is_a_fact(fold):
    reported = [
        TinyDeep(**FIELDS | {"calibration": "none"}, validation_by=by).fit(fold.source).facts_ for by in ("subject", "site")
    ]
    assert [one["validation"] for one in reported] == ["held-out subjects", "held-out sites"]
    assert [one["notes"] for one in reported] == [[], []]
    few = TinyDeep(**FIELDS).fit(pairs(fold.source)).facts_
    assert few["validation"] == "training subjects"
    assert len(few["notes"]) == 1 and "No source subject was held out" in few["notes"][0]


def test_progress_is_told(fold):
    reported = []
    TinyDeep(**FIELDS).fit(fold.source, seed=0, progress=lambda **values: reported.append(values))
    assert reported[0]["epoch"] == 1
    assert reported[0]["epochs"] == 12
    assert {"ce", "val_auc", "val_loss"} <= set(reported[0])


def test_mistakes_end_in_a_sentence(fold):
    with pytest.raises(InputError, match="loss ce is nan in epoch 1; lower learning_rate"):
        TinyDeep(**FIELDS, broken="nan").fit(fold.source)
    with pytest.raises(InputError, match=r"ran out of memory on cpu: lower batch_size \(8\)"):
        TinyDeep(**FIELDS, broken="memory").fit(fold.source)
    with pytest.raises(InputError, match="device toaster is not available"):
        choose_device("toaster")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize(
    ("hook", "given", "words"),
    [
        ("candidate", False, r"method tiny-deep: candidate\(epoch\) rejected all 12 epochs"),
        ("batches", [], r"method tiny-deep: batches\(\.\.\.\) returned no batch, or an empty one, in epoch 1"),
        ("batches", [torch.arange(8), torch.arange(0)], "returned no batch, or an empty one, in epoch 1"),
    ],
)
def test_hooks_that_leave_nothing_to_train_or_keep_are_named(fold, monkeypatch, hook, given, words):
    monkeypatch.setattr(TinyDeep, hook, lambda self, *arguments: given)
    with pytest.raises(InputError, match=words):
        TinyDeep(**FIELDS).fit(fold.source)


@pytest.mark.parametrize("epoch", [3, 12])
def test_a_last_step_that_breaks_the_weights_ends_in_the_same_sentence(fold, epoch, monkeypatch):
    whole = TinyDeep(**FIELDS | {"patience": 12}).fit(fold.source, seed=0)
    steps = whole.facts_["training_subjects"] // 8
    monkeypatch.setattr(TinyDeep, "last", epoch * steps - 1)
    TinyDeep.seen.clear()
    with pytest.raises(InputError, match=f"loss val_loss is nan in epoch {epoch}; lower learning_rate"):
        TinyDeep(**FIELDS | {"patience": 12}, broken="last step").fit(fold.source, seed=0)


def test_weights_of_another_network_are_refused(fold):
    fitted = TinyDeep(**FIELDS).fit(fold.source)
    fitted.state_["network.linear.weight"] = fitted.state_["network.linear.weight"][:, :3]
    with pytest.raises(InputError, match="the weights do not fit method"):
        fitted.predict_proba(fold.target)


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd"])
def test_the_update_rule_and_its_weight_decay(rule, fold):
    """One step from a known gradient, against the definition of each rule."""
    own = TinyDeep(**FIELDS | {"update_rule": rule, "learning_rate": 0.1, "weight_decay": 0.5, "label_smoothing": 0.0})
    value = torch.nn.Parameter(torch.tensor([2.0, -4.0]))
    optimizer = own.updating([value])
    value.grad = torch.tensor([0.5, -3.0])
    optimizer.step()
    decayed = torch.tensor([0.5, -3.0]) + 0.5 * torch.tensor([2.0, -4.0])  # in the gradient
    expected = {
        "adamw": torch.tensor([2.0, -4.0]) * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([1.0, -1.0]),
        "adam": torch.tensor([2.0, -4.0]) - 0.1 * decayed.sign(),
        "sgd": torch.tensor([2.0, -4.0]) - 0.1 * decayed,
    }
    torch.testing.assert_close(value.detach(), expected[rule])
    assert type(own.optimizer(torch.nn.Linear(2, 2))) is type(optimizer)


@pytest.mark.parametrize(("clip", "expected"), [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (7.0, [3.0, 4.0])])
def test_gradients_are_clipped_at_a_norm_or_not_at_all(clip, expected):
    value = torch.nn.Parameter(torch.zeros(2))
    value.grad = torch.tensor([3.0, 4.0])
    TinyDeep(**FIELDS | {"clip": clip}).clip_gradients([value])
    torch.testing.assert_close(value.grad, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("epochs", 0),
            ("batch_size", 1),
            ("length", 3),
            ("learning_rate", 0.0),
            ("learning_rate", float("nan")),
            ("clip", -1.0),
        ),
        *(("dropout", 1.0), ("dropout", -0.1), ("label_smoothing", 1.5), ("validation_share", 1.0), ("weight_decay", -1.0)),
    ],
)
def test_numbers_that_cannot_train_are_told_by_name(field, value, fold):
    with pytest.raises(InputError, match=f"field {field}: {value} is"):
        TinyDeep(**FIELDS | {field: value}).fit(fold.source)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("erm", {"per_site": 0}, "method erm, field per_site: 0 is too small; it must be at least 1."),
        ("erm", {"widths": []}, "method erm, field widths is empty."),
        ("erm", {"widths": [8, 0]}, "method erm, field widths: 0 is too small; it must be at least 1."),
        ("erm", {"epochs": 3}, r"field warmup: the warm-up of 10 epochs is longer than the training \(epochs = 3\)"),
        ("erm", {"site_power": float("inf")}, "field site_power: inf is not a finite number."),
        ("erm", {"dropout": 1.0}, "field dropout: 1.0 is too large; it must be below 1."),  # declared by DeepMethod
        ("cdann", {"discriminator_dropout": 1.5}, "field discriminator_dropout: 1.5 is too large; it must be below 1."),
        ("ufa-net", {"alignment_start": -1}, "field alignment_start: -1 is too small; it must be at least 0."),
        ("ufa-net", {"time_bins": -1}, "field time_bins: -1 is too small; it must be at least 0."),
        ("m2lgdg", {"temperature": 0.0}, "field temperature: 0.0 is too small"),
        ("group-dro", {"cap": 0.5}, "field cap: 0.5 is too small; it must be at least 1."),
        ("fc-logistic", {"site_folds": 1}, "field site_folds: 1 is too small; it must be at least 2."),
        ("fc-logistic", {"penalties": []}, "field penalties is empty."),
        ("fc-logistic", {"penalties": [1.0, 0.0]}, "field penalties: 0.0 is too small"),
    ],
)
def test_fields_of_single_methods_have_bounds(name, fields, words):
    with pytest.raises(InputError, match=words):
        make(name, **fields)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(("iib", {"head_width": 0}), ("cdann", {"discriminator_widths": []}), ("ufa-net", {"alignment_start": 0})),
        *(("brainnetcnn", {"hidden": [], "edge_channels": []}), ("braingnn", {"head": []}), ("erm", {"warmup": 1})),
        *(("m2lgdg", {"phenotype_hidden": []}),),
    ],
)
def test_values_that_mean_something_are_not_refused(name, fields, fold):
    given = dict(METHODS[name].variants.get("small", {})) | {"epochs": 1, "warmup": 0} | fields
    assert np.isfinite(make(name, **given).fit(fold.source).predict_proba(fold.target)).all()
