"""MLDG: the objective against loops, its gradients of both orders against differences, the split of sites, an overfit."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.erm import ERM, Network
from m2lgdg.methods.mldg import MLDG
from m2lgdg.registry import create as make

torch.set_num_threads(1)
EDGES, INPUTS = 4, 2
SITE = np.repeat([3, 0, 2, 1], 4)
LABEL = np.tile([0, 0, 1, 1], 4)
UNSEEN = np.isin(SITE, [0, 1])


class Fixed(MLDG):
    """With sites 0 and 1 always the unseen ones."""

    def meta_test(self, site):
        return torch.isin(site, torch.tensor([0, 1]))


class Doubled(Fixed):
    """And in double precision."""

    def cross_entropy(self, logits, batch):
        return functional.cross_entropy(logits, batch.label, label_smoothing=self.label_smoothing)


def network(own, seed=0):
    rng = np.random.default_rng(seed)
    fitted = {"mean": rng.normal(size=EDGES).astype(np.float32), "scale": rng.uniform(0.5, 2, EDGES).astype(np.float32)}
    built = own.build(Shape(5, 20, INPUTS, 4, fitted)).double()
    draw = torch.Generator().manual_seed(seed)
    for value in built.parameters():
        value.data = torch.randn(value.shape, generator=draw, dtype=torch.float64)
    return built.train()


def batch(seed=1):
    draw = torch.Generator().manual_seed(seed)
    fc, inputs = (torch.randn(len(SITE), width, generator=draw, dtype=torch.float64) for width in (EDGES, INPUTS))
    return Batch({"fc": fc}, inputs, torch.from_numpy(LABEL), torch.from_numpy(SITE))


def single(given):
    return Batch({"fc": given["fc"].float()}, given.phenotypes.float(), given.label, given.site)


def doubled(**fields):
    return Doubled(widths=(3, 3), **{"dropout": 0.0, "label_smoothing": 0.1, "inner_rate": 0.3, "meta_weight": 0.7, **fields})


def gradients(own, built, given):
    found = torch.autograd.grad(sum(own.loss(built, given).values()), list(built.parameters()))
    return {name: slope for (name, _), slope in zip(built.named_parameters(), found, strict=True)}


def risk(state, given, sites):
    """Mean over sites of the mean smoothed cross-entropy of their subjects."""
    found = []
    for site in sites:
        each = []
        for i in np.flatnonzero(site == SITE):
            x = (given["fc"][i].numpy() - state["mean"]) / state["scale"]
            for place in (0, 4):
                x = state[f"encoder.{place}.weight"] @ x + state[f"encoder.{place}.bias"]
                x = (x - x.mean()) / (x.var() + 1e-5) ** 0.5
                x = np.maximum(x * state[f"encoder.{place + 1}.weight"] + state[f"encoder.{place + 1}.bias"], 0)
            logits = state["classifier.weight"] @ [*x, *given.phenotypes[i].numpy()] + state["classifier.bias"]
            log = logits - np.log(np.exp(logits).sum())
            each.append(-(0.95 * log[LABEL[i]] + 0.05 * log[1 - LABEL[i]]))
        found.append(sum(each) / len(each))
    return sum(found) / len(found)


def slopes(state, given, sites, nudge=1e-6):
    """The gradient of `risk` in every parameter, by differences."""
    found = {}
    for name, array in state.items():
        if name in ("mean", "scale"):
            continue
        found[name] = np.zeros_like(array)
        for where in np.ndindex(array.shape):
            kept, pair = array[where], []
            for step in (nudge, -nudge):
                array[where] = kept + step
                pair.append(risk(state, given, sites))
            array[where] = kept
            found[name][where] = (pair[0] - pair[1]) / (2 * nudge)
    return found


def numbers(built):
    return {name: value.detach().numpy().copy() for name, value in built.state_dict().items()}


def moved(state, by, rate):
    return {name: value - rate * by[name] if name in by else value for name, value in state.items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_objective_and_its_first_order_gradient_against_loops(seed):
    own, given = doubled(order=1), batch()
    built = network(own, seed)
    state = numbers(built)
    inner = slopes(state, given, (3, 2))
    after = moved(state, inner, 0.3)
    terms = own.loss(built, given)
    np.testing.assert_allclose(terms["ce"].item(), risk(state, given, (3, 2)), rtol=1e-9)
    np.testing.assert_allclose(terms["meta"].item(), 0.7 * risk(after, given, (0, 1)), rtol=1e-6)
    outer = slopes(after, given, (0, 1))
    for name, value in gradients(own, built, given).items():  # first order: the sum of the two gradients, each at its place
        np.testing.assert_allclose(value.numpy(), inner[name] + 0.7 * outer[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("seed", [0, 1])
def test_second_order_gradient_against_differences_of_the_whole_objective(seed):
    own, given = doubled(), batch()
    built = network(own, seed)
    found, first = gradients(own, built, given), gradients(dataclasses.replace(own, order=1), built, given)
    unlike = 0.0
    for name, value in built.named_parameters():
        for where in np.ndindex(tuple(value.shape)):
            kept, pair = value.data[where].item(), []
            for step in (1e-6, -1e-6):
                value.data[where] = kept + step
                pair.append(sum(own.loss(built, given).values()).item())
            value.data[where] = kept
            np.testing.assert_allclose(found[name][where].item(), (pair[0] - pair[1]) / 2e-6, atol=1e-6, err_msg=name)
        unlike = max(unlike, (found[name] - first[name]).abs().max().item())
    assert unlike > 0.01  # the orders differ, so the differences tell them apart


def test_with_weight_0_the_gradient_is_erms_at_the_meta_train_sites():
    own, plain = Fixed(widths=(3, 3), meta_weight=0.0), ERM(widths=(3, 3))  # both with dropout
    built, given = network(own).float(), single(batch())
    torch.manual_seed(0)
    found = gradients(own, built, given)
    torch.manual_seed(0)
    expected = gradients(plain, built, given.take(torch.from_numpy(np.flatnonzero(~UNSEEN))))
    for name, value in expected.items():
        assert value.any()
        torch.testing.assert_close(found[name], value, msg=name)


def test_the_inner_step_is_without_dropout_and_the_rest_is_with_it():
    own = doubled(dropout=0.5)
    built, given = network(own), batch()
    part = given.take(torch.arange(8))
    first, second = own.stepped(built, part), own.stepped(built, part)
    assert built.training
    still = doubled(dropout=0.0)
    for name, value in own.stepped(built, part).items():
        assert torch.equal(first[name], second[name])
        assert torch.equal(value, still.stepped(built.eval(), part)[name])
        built.train()
    terms = [own.loss(built, given) for _ in range(2)]
    assert terms[0]["ce"] != terms[1]["ce"]
    assert terms[0]["meta"] != terms[1]["meta"]
    assert not built.eval().training
    own.stepped(built, part)
    assert not built.training


def test_sites_large_enough_take_turns_as_the_unseen_ones():
    own = make("mldg", sites_per_batch=5, per_site=4)
    site = torch.arange(5).repeat_interleave(10)
    label = (torch.arange(50) % 2).long()
    label[40:] = 1  # site 4 has one class
    label[30:37] = 0  # site 3 has 2 patients
    rows = own.batches(site, label, torch.Generator().manual_seed(0))[0]
    torch.manual_seed(0)
    count = torch.zeros(5)
    for _ in range(300):
        unseen = own.meta_test(site[rows])
        assert len(site[rows][unseen].unique()) == 2
        assert unseen.sum() == 8
        count[site[rows][unseen].unique()] += 1
    assert count[3:].tolist() == [0, 0]
    assert (count[:3] - 200).abs().max() < 40  # 5 standard deviations
    assert len(torch.unique(site[torch.arange(20)][own.meta_test(site[torch.arange(20)])])) == 1  # of two sites one must stay
    assert not own.meta_test(torch.tensor([0, 0, 0])).any()
    assert not own.meta_test(torch.tensor([3, 4, 4])).any()


def test_a_batch_without_a_site_to_spare_is_a_step_of_erm():
    own = MLDG(widths=(3, 3), dropout=0.0)
    own._balanced = torch.tensor([7])
    built, given = network(own).float(), single(batch())
    terms = own.loss(built, given)
    assert terms["meta"] == 0
    torch.testing.assert_close(terms["ce"], ERM().loss(built, given)["ce"])


def test_network_and_optimizer_are_erms():
    own = MLDG()
    built = own.build(Shape(5, 20, INPUTS, 4, {"mean": np.zeros(4, np.float32), "scale": np.ones(4, np.float32)}))
    assert type(built) is Network
    assert (own.order, own.meta_test_sites, own.meta_weight) == (2, 2, 1.0)
