"""CDANN: site loss, gradient penalty and both objectives against loops, the two updates, the ramp, an overfit."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from networks import EDGES, INPUTS, SITES, fc_batch, fc_network, numbers

from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.cdann import CDANN, site_weights
from m2lgdg.methods.erm import ERM, Network
from m2lgdg.registry import create as make

torch.set_num_threads(1)
# Site 0 has 3 + 1 subjects, site 2 has 1 + 2, site 1 shows one class only, site 3 is absent.
SITE = np.array([0, 0, 2, 0, 1, 2, 0, 1, 2])
LABEL = np.array([1, 1, 0, 0, 1, 1, 1, 1, 1])


def method(**fields):
    return make("cdann", widths=(7, 5), discriminator_widths=(6, 3), **{"epochs": 10, "label_smoothing": 0.1, **fields})


def guess_loss(state, joined, site):
    """Cross-entropy of one subject's site, from its joined representation."""
    x = joined
    for place in (0, 3, 6):
        weight, bias = state[f"guess.{place}.weight"], state[f"guess.{place}.bias"]
        x = np.array([sum(weight[o, i] * x[i] for i in range(len(x))) + bias[o] for o in range(len(bias))])
        x = x if place == 6 else np.maximum(x, 0)
    return np.log(sum(np.exp(x - x.max()))) + x.max() - x[site]


def steep(state, joined, site, nudge=1e-6):
    """Squared length of the slope of `guess_loss`, by differences."""
    total = 0.0
    for k in range(len(joined)):
        up, down = joined.copy(), joined.copy()
        up[k], down[k] = up[k] + nudge, down[k] - nudge
        total += ((guess_loss(state, up, site) - guess_loss(state, down, site)) / (2 * nudge)) ** 2
    return total


def terms_by_loops(state, fused):
    """Site loss and unweighted penalty; sites 0 and 2 show both classes."""
    counted = [i for i in range(len(SITE)) if SITE[i] != 1]
    site_loss = penalty = 0.0
    for i in counted:
        joined = fused[i] + state["classes.weight"][LABEL[i]]
        fellows = sum(1 for j in counted if SITE[j] == SITE[i] and LABEL[j] == LABEL[i])
        site_loss += guess_loss(state, joined, SITE[i]) / (2 * 2 * fellows)
        penalty += steep(state, joined, SITE[i]) / len(counted)
    return site_loss, penalty


def test_weights_balance_sites_and_classes_and_skip_sites_of_one_class():
    weight = site_weights(torch.from_numpy(SITE), torch.from_numpy(LABEL))
    expected = [1 / 12, 1 / 12, 1 / 4, 1 / 4, 0, 1 / 8, 1 / 12, 0, 1 / 8]
    np.testing.assert_allclose(weight, expected, rtol=1e-6)
    assert not site_weights(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])).any()


@pytest.mark.parametrize("seed", [0, 1])
def test_site_loss_and_penalty_against_loops_and_differences(seed):
    own = method(gradient_penalty=0.7)
    built = fc_network(own, seed)
    fused = torch.randn(len(SITE), 5, generator=torch.Generator().manual_seed(seed + 5))
    found = own.site_terms(built, fused, fc_batch(SITE, LABEL))
    site_loss, penalty = terms_by_loops(numbers(built.discriminator), fused.double().numpy())
    np.testing.assert_allclose(found["site"].item(), site_loss, rtol=1e-5)
    np.testing.assert_allclose(found["penalty"].item(), 0.7 * penalty, rtol=1e-4)


def test_gradients_of_the_discriminators_objective_against_differences():
    """The penalty is a gradient already, so this needs the second order: in class vectors, layers and representation."""
    own = method(gradient_penalty=0.3)
    built = fc_network(own)
    fused = torch.randn(len(SITE), 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    sum(own.site_terms(built, fused, fc_batch(SITE, LABEL)).values()).backward()
    rng = np.random.default_rng(0)
    state, values = numbers(built.discriminator), fused.detach().double().numpy()
    places = [(state[name], built.discriminator.get_parameter(name).grad) for name in ("classes.weight", "guess.3.weight")]
    for array, slope in [*places, (values, fused.grad)]:
        for where in [tuple(rng.integers(0, size) for size in array.shape) for _ in range(6)]:
            kept, found = array[where], []
            for nudge in (1e-4, -1e-4):
                array[where] = kept + nudge
                site_loss, penalty = terms_by_loops(state, values)
                found.append(site_loss + 0.3 * penalty)
            array[where] = kept
            np.testing.assert_allclose(slope[where].item(), (found[0] - found[1]) / 2e-4, rtol=2e-3, atol=2e-4)


def test_the_rest_minimises_cross_entropy_less_the_ramped_objective_of_the_discriminator():
    own = method(adversary_weight=3.0, gradient_penalty=0.5)
    built, given = fc_network(own), fc_batch(SITE, LABEL)
    own.epoch = 2
    share = 2 / (1 + np.exp(-10 * 2 / 10)) - 1
    found = own.loss(built, given)
    parts = built.parts(given)
    site_loss, penalty = terms_by_loops(numbers(built.discriminator), parts["fused"].detach().double().numpy())
    np.testing.assert_allclose(found["site"].item(), -3 * share * site_loss, rtol=1e-4)
    np.testing.assert_allclose(found["penalty"].item(), -3 * share * 0.5 * penalty, rtol=1e-4)
    logits, ce = parts["logits"].detach().double().numpy(), 0.0
    for row, label in zip(logits, LABEL, strict=True):
        log = row - np.log(np.exp(row).sum())
        ce -= (0.95 * log[label] + 0.05 * log[1 - label]) / len(LABEL)
    np.testing.assert_allclose(found["ce"].item(), ce, rtol=1e-5)


@pytest.mark.parametrize(("fields", "epoch"), [({"adversary_weight": 0.0}, 9), ({}, 0)])
def test_without_the_adversary_the_gradients_are_those_of_erm(fields, epoch):
    own, plain = method(**fields), ERM(widths=(7, 5), label_smoothing=0.1)
    built, given = fc_network(own), fc_batch(SITE, LABEL)
    own.epoch = epoch
    twin = Network(Shape(5, 20, INPUTS, SITES, {"mean": built.mean.numpy(), "scale": built.scale.numpy()}), plain)
    twin.load_state_dict({name: value for name, value in built.state_dict().items() if not name.startswith("discriminator.")})
    sum(own.loss(built, given).values()).backward()
    sum(plain.loss(twin.eval(), given).values()).backward()
    for name, value in twin.named_parameters():
        assert value.grad.any()
        torch.testing.assert_close(built.get_parameter(name).grad, value.grad)


def test_each_update_leaves_the_other_side_as_it_was_bit_for_bit():
    own = method(weight_decay=0.5, discriminator_decay=0.5, clip=0.5, discriminator_steps=2, dropout=0.0)
    own.epoch = 5
    built = fc_network(own).train()
    optimizer = own.optimizer(built)
    seen = [numbers(built)]
    norms = []

    def look(*_):
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        norms.append(torch.stack([one.norm() for one in gradients]).norm().item())
        seen.append(numbers(built))

    optimizer.register_step_post_hook(look)
    own.step(built, fc_batch(SITE, LABEL), optimizer)
    own.step(built, fc_batch(SITE, LABEL, 2), optimizer)
    assert len(seen) == 7
    for turn, (before, after) in enumerate(pairwise(seen)):
        for name in before.keys() - {"mean", "scale"}:
            moved = name.startswith("discriminator.") == (turn % 3 < 2)
            assert (before[name] != after[name]).any() == moved, (turn, name)
    assert max(norms) < 0.5 + 1e-4


def test_each_update_goes_down_its_own_objective():
    own = method(discriminator_dropout=0.0, dropout=0.0, adversary_weight=2.0, discriminator_rate=1e-3, learning_rate=1e-3)
    own.epoch = 5
    built, given = fc_network(own).train(), fc_batch(SITE, LABEL)
    optimizer, seen = own.optimizer(built), []

    def look(*_):
        site = sum(own.site_terms(built, built.encode(given["fc"]), given).values()).item()
        seen.append((site, sum(own.loss(built, given).values()).item()))

    look()
    optimizer.register_step_post_hook(look)
    own.step(built, given, optimizer)
    assert seen[1][0] < seen[0][0]
    assert seen[2][1] < seen[1][1]
    assert seen[2][0] > seen[1][0]  # the rest moves against the discriminator


def test_optimizer_and_discriminator_are_as_specified():
    own = CDANN()
    groups = own.optimizer(fc_network(method())).param_groups
    assert all(group["betas"] == (0.5, 0.9) for group in groups)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 1e-3), (1e-3, 0.0)]
    fitted = {"mean": np.zeros(EDGES, np.float32), "scale": np.ones(EDGES, np.float32)}
    rival = own.build(Shape(5, 20, INPUTS, 20, fitted)).discriminator
    assert sum(value.numel() for value in rival.parameters()) == 2 * 128 + 2 * (128 * 128 + 128) + 128 * 20 + 20
    assert [one.p for one in rival.modules() if isinstance(one, torch.nn.Dropout)] == [0.5, 0.5]


def test_the_kept_epoch_has_felt_the_adversary():
    own = CDANN(epochs=20, warmup=0)
    assert own.ramp(0) == 0
    assert own.ramp(20) == pytest.approx(0.9999092)
    assert [epoch for epoch in range(20) if not own.candidate(epoch)] == [0, 1, 2]
    assert CDANN(epochs=1).candidate(0)
    assert CDANN(select_after_warmup=False).candidate(0)


def test_sites_of_one_class_only_leave_cross_entropy_alone():
    own = method()
    own.epoch = 5
    built = fc_network(own).train()
    given = fc_batch(SITE, LABEL)
    alone = Batch(given.features, given.phenotypes, given.label, given.label)
    terms = own.step(built, alone, own.optimizer(built))
    assert terms["site"] == terms["penalty"] == 0
    assert all(torch.isfinite(value).all() for value in built.parameters())
