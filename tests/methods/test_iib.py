"""IIB: bottleneck, both classifiers and every term against loops, ERM as a special case, the ramp, an overfit."""

import numpy as np
import pytest
import torch
from networks import fc_batch, fc_network, numbers

from m2lgdg.deep import Batch
from m2lgdg.methods.iib import IIB
from m2lgdg.registry import create as make

torch.set_num_threads(1)
SITE, LABEL = np.array([0, 2, 1, 0, 2, 1]), np.array([1, 0, 0, 0, 1, 1])


SMALL = {"head_width": 6, "epochs": 10, "dropout": 0.0, "label_smoothing": 0.1}


def method(**fields):
    return make("iib", widths=(7, 5), latent=4, site_width=2, **{**SMALL, **fields})


def linear(state, name, x):
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return np.array([sum(weight[o, i] * x[i] for i in range(len(x))) + bias[o] for o in range(len(bias))])


def block(state, name, place, x):
    """Linear, layer norm, ReLU."""
    x = linear(state, f"{name}.{place}", x)
    middle = sum(x) / len(x)
    x = (x - middle) / (sum((one - middle) ** 2 for one in x) / len(x) + 1e-5) ** 0.5
    return np.maximum(x * state[f"{name}.{place + 1}.weight"] + state[f"{name}.{place + 1}.bias"], 0)


def gaussian(state, fc):
    """Mean and log variance of one subject."""
    x = (fc - state["mean"]) / state["scale"]
    for name, place in (("encoder", 0), ("encoder", 4), ("bottleneck", 0), ("bottleneck", 3)):
        x = block(state, name, place, x)
    return linear(state, "mu", x), linear(state, "log_variance", x)


def classified(state, name, x):
    if f"{name}.weight" in state:
        return linear(state, name, x)
    return linear(state, f"{name}.2", np.maximum(linear(state, f"{name}.0", x), 0))


def smoothed(logits, label):
    log = logits - np.log(np.exp(logits).sum())
    return -(0.95 * log[label] + 0.05 * log[1 - label])


@pytest.mark.parametrize("head_width", [6, 0])
def test_every_term_against_loops(head_width):
    own = method(bottleneck_weight=0.3, invariance_weight=4.0, rise=0.4, head_width=head_width)
    built, given = fc_network(own, scale=0.7).train(), fc_batch(SITE, LABEL)
    own.epoch = 1  # a quarter of the rise
    torch.manual_seed(5)
    noise = torch.randn(len(SITE), 4).double().numpy()
    torch.manual_seed(5)
    found = own.loss(built, given)
    state, blind, aware, kl = numbers(built), 0.0, 0.0, 0.0
    for i in range(len(SITE)):
        mu, log_variance = gaussian(state, given["fc"][i].double().numpy())
        z = [mu[k] + np.exp(log_variance[k] / 2) * noise[i, k] for k in range(4)]
        inputs = given.phenotypes[i].double().tolist()
        blind += smoothed(classified(state, "classifier", [*z, *inputs]), LABEL[i]) / len(SITE)
        known = [*z, *inputs, *state["sites.weight"][SITE[i]]]
        aware += smoothed(classified(state, "aware", known), LABEL[i]) / len(SITE)
        kl -= sum(1 + log_variance[k] - mu[k] ** 2 - np.exp(log_variance[k]) for k in range(4)) / 2 / len(SITE)
    expected = {"ce": blind, "aware": aware, "bottleneck": 0.3 * kl, "invariance": 4 * 0.25 * (blind - aware) ** 2}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].item(), value, rtol=2e-5, err_msg=name)


def test_prediction_takes_the_mean_and_asks_no_site():
    built, given = fc_network(method(), scale=0.7), fc_batch(SITE, LABEL)
    parts, state = built.parts(given), numbers(built)
    for i in range(len(SITE)):
        mu, _ = gaussian(state, given["fc"][i].double().numpy())
        np.testing.assert_allclose(parts["fused"][i].detach(), mu, atol=1e-5)
        both = [*mu, *given.phenotypes[i].double().tolist()]
        np.testing.assert_allclose(parts["logits"][i].detach(), classified(state, "classifier", both), atol=1e-5)
    other = Batch(given.features, given.phenotypes, given.label, torch.zeros_like(given.site))
    assert torch.equal(built(other), built(given))
    for value in [*built.aware.parameters(), *built.sites.parameters()]:
        value.data.fill_(torch.nan)
    assert torch.equal(built(given), parts["logits"])


def test_without_extras_the_gradient_is_erms_on_the_mean():
    own = method(bottleneck_weight=0.0, invariance_weight=0.0)
    own.epoch = 9
    built, given = fc_network(own, scale=0.7).train(), fc_batch(SITE, LABEL)
    built.log_variance.weight.data.zero_()
    built.log_variance.bias.data.fill_(-80.0)  # no noise
    names = [name for name, _ in built.named_parameters() if not name.startswith(("aware.", "sites.", "log_variance."))]
    terms = own.loss(built, given)
    assert terms["bottleneck"] == terms["invariance"] == 0
    total = sum(terms.values()) - terms["aware"]
    found = torch.autograd.grad(total, [built.get_parameter(name) for name in names])
    built.eval()
    loss = own.cross_entropy(built.classify(built.parts(given)["mu"], given), given)
    for name, one, two in zip(
        names, found, torch.autograd.grad(loss, [built.get_parameter(name) for name in names]), strict=True
    ):
        assert two.any()
        torch.testing.assert_close(one, two, msg=name)


def test_the_penalty_rises_and_the_kept_epoch_has_felt_all_of_it():
    own = IIB(epochs=20, warmup=0, rise=0.2)
    assert [own.ramp(epoch) for epoch in (0, 1, 2, 4, 19)] == [0, 0.25, 0.5, 1, 1]
    assert [epoch for epoch in range(20) if not own.candidate(epoch)] == [0, 1, 2, 3]
    assert [epoch for epoch in range(20) if not IIB(epochs=20, warmup=6).candidate(epoch)] == [0, 1, 2, 3, 4, 5]
    assert IIB(epochs=1).candidate(0)
    assert IIB(select_after_warmup=False).candidate(0)


def test_what_knows_the_site_decays_more():
    built = fc_network(method(), scale=0.7)
    groups = method(aware_decay=0.5, weight_decay=0.1, learning_rate=0.2).optimizer(built).param_groups
    knowing = {id(value) for name, value in built.named_parameters() if name.startswith(("aware.", "sites."))}
    for group, decay, expected in zip(groups, (0.1, 0.5), (False, True), strict=True):
        assert (group["weight_decay"], group["lr"]) == (decay, 0.2)
        assert all((id(value) in knowing) == expected for value in group["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(built.parameters()))
