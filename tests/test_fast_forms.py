"""Fast forms of networks give what the plain ones give: logits, losses and gradients, in training and in prediction."""

import dataclasses
import inspect

import numpy as np
import pytest
import step
import torch
from torch import nn

from m2lgdg.deep import Shape
from m2lgdg.devices import fast_form, plain_form
from m2lgdg.fast import m2lgdg as fast_m2lgdg
from m2lgdg.fast import ufa_net as fast_ufa_net
from m2lgdg.fast.stacked import dropped
from m2lgdg.methods import m2lgdg, ufa_net
from m2lgdg.methods.m2lgdg import M2LGDG
from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome

torch.set_num_threads(1)
ROIS, LENGTH, SUBJECTS = 9, 40, 10
SIZES = {
    **M2LGDG.variants["small"],
    **{"length": LENGTH, "local_channels": (8, 16, 16), "local_strides": (1, 2, 1), "layers": 2, "fusion_layers": 2},
}
VARIANTS = ["M1", "M2", "C1", "C2", "C3", "C4"]


def batch():
    return step.made_up(SUBJECTS, ROIS, LENGTH)


def shape(**fitted):
    draw = torch.Generator().manual_seed(0)
    adjacency = (torch.rand(ROIS, ROIS, generator=draw) > 0.5).float().numpy()
    return Shape(ROIS, LENGTH, step.INPUTS, step.SITES, {"adjacency": adjacency, **fitted})


def both(config, network_class, fitted=None):
    """The plain network and the fast form of an equal one."""
    networks = []
    for form in (plain_form, fast_form):
        torch.manual_seed(0)
        networks.append(form(network_class(shape(**(fitted or {})), config)))
    return networks


def losses_and_gradients(config, network):
    config.class_weight, config.epoch = torch.tensor([0.8, 1.4]), config.epochs - 1
    terms = config.loss(network, batch())
    sum(terms.values()).backward()
    return terms, {name: value.grad for name, value in network.named_parameters()}


def assert_equal_in_training(config, plain, fast):
    terms, gradients = losses_and_gradients(config, plain.train())
    fast_terms, fast_gradients = losses_and_gradients(config, fast.train())
    assert terms.keys() == fast_terms.keys()
    for name, value in terms.items():
        torch.testing.assert_close(fast_terms[name], value, rtol=1e-5, atol=1e-6)
    largest = max(float(value.abs().max()) for value in gradients.values())
    for name, value in gradients.items():
        torch.testing.assert_close(fast_gradients[name], value, rtol=1e-4, atol=1e-5 * largest, msg=name)
    for name, value in plain.named_buffers():  # running means and variances of batch norm
        torch.testing.assert_close(dict(fast.named_buffers())[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_m2lgdg_in_training(variant):
    """Without dropout: which values it drops follows their order in memory, which differs between the forms."""
    config = M2LGDG(**{**SIZES, **M2LGDG.variants[variant], "dropout": 0.0})
    plain, fast = both(config, m2lgdg.Network)
    assert type(plain) is m2lgdg.Network and type(fast) is fast_m2lgdg.Network
    assert_equal_in_training(config, plain, fast)


@pytest.mark.parametrize("variant", VARIANTS)
def test_m2lgdg_in_prediction(variant):
    config = M2LGDG(**{**SIZES, **M2LGDG.variants[variant]})
    plain, fast = (network.eval() for network in both(config, m2lgdg.Network))
    with torch.inference_mode():
        parts, fast_parts = plain.parts(batch()), fast.parts(batch())
    assert parts.keys() == fast_parts.keys()
    for name, value in parts.items():
        torch.testing.assert_close(fast_parts[name], value, rtol=1e-5, atol=1e-6)


def test_ufa_net_in_training():
    config = ufa_net.UFANet(**{**ufa_net.UFANet.variants["small"], "length": LENGTH, "dropout": 0.0, "scaling": "roi"})
    graph = torch.rand(ROIS, ROIS, generator=torch.Generator().manual_seed(2)).numpy()
    plain, fast = both(config, ufa_net.Network, {"graph": graph})
    assert {type(block) for block in fast.blocks} == {fast_ufa_net.Block}
    assert_equal_in_training(config, plain, fast)


class Extended(m2lgdg.Network):
    """Another network on the same parts, as a method author would write it."""

    def forward(self, batch):
        return 2 * super().forward(batch) + 1


def test_a_network_that_extends_another_gets_its_fast_form_too():
    plain, fast = both(M2LGDG(**SIZES), Extended)
    assert isinstance(fast, fast_m2lgdg.Network) and isinstance(fast, Extended)
    torch.testing.assert_close(fast.eval()(batch()), plain.eval()(batch()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast(batch()), 2 * both(M2LGDG(**SIZES), m2lgdg.Network)[0].eval()(batch()) + 1)
    assert type(plain_form(fast)) is Extended


def test_forms_have_the_same_names_and_go_back():
    config = M2LGDG(**SIZES)
    plain, fast = both(config, m2lgdg.Network)
    assert list(plain.state_dict()) == list(fast.state_dict())
    assert sum(type(one) is not type(other) for one, other in zip(plain.modules(), fast.modules(), strict=True)) == 6
    assert [type(one) for one in plain_form(fast).modules()] == [type(one) for one in plain.modules()]
    once = [type(one) for one in fast_form(fast).modules()]
    assert [type(one) for one in fast_form(fast).modules()] == once  # a fast form stays what it is
    assert [type(one) for one in plain_form(fast).modules()] == [type(one) for one in plain.modules()]


@pytest.mark.parametrize("module", [fast_m2lgdg, fast_ufa_net])
def test_a_fast_form_overrides_only_how_its_parent_computes(module):
    for plain, fast in module.FORMS.items():
        assert fast.__bases__ == (plain,)
        defined = {name for name, value in vars(fast).items() if inspect.isfunction(value)}
        assert defined == ({"encode", "decide"} if issubclass(plain, m2lgdg.Network) else {"forward"})


def test_a_network_without_a_fast_form_stays_as_it_is():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    before = [type(one) for one in network.modules()]
    assert [type(one) for one in fast_form(network).modules()] == before


# Members in one stack.


def members():
    fitted = {name: torch.rand(36, generator=torch.Generator().manual_seed(1)).numpy() for name in ("mean", "scale")}
    config = M2LGDGConnectome(**M2LGDGConnectome.variants["small"] | {"connectivity": "fc", "members": 3})
    torch.manual_seed(0)
    return fast_form(config.build(shape(**fitted, slopes=np.zeros((step.INPUTS, 36), dtype=np.float32))))


def edges():
    given = batch()
    return dataclasses.replace(given, features={"fc": torch.randn(SUBJECTS, 36, generator=torch.Generator().manual_seed(2))})


def test_the_weights_of_members_are_rows_of_their_stack():
    network = members().eval()
    before = network(edges()).detach()
    for name, value in network.stack().named_parameters():
        for i, one in enumerate(network.networks):
            row = one.get_parameter(name)
            assert row.data_ptr() == value[i].data_ptr() and torch.equal(row, value[i]), name
    assert len(list(network.parameters())) == 3 * len(list(network.stack().parameters()))
    with torch.no_grad():
        for value in network.updated():
            value += 0.1
    after = network(edges()).detach()
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(plain_form(network)(edges()).detach(), after, rtol=1e-4, atol=1e-5)
    fast_form(network).load_state_dict(members().state_dict())
    torch.testing.assert_close(network(edges()).detach(), before)


def test_a_network_that_is_moved_gets_a_new_stack():
    network = members().eval()
    before, first = network(edges()).detach(), network.stack()
    network.to(torch.float64).to(torch.float32)
    assert network.stack() is not first
    torch.testing.assert_close(network(edges()).detach(), before)
    assert not network.stack().training and network.train().stack().training and not network.eval().stack().training


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_of_a_stack_keeps_its_share_wherever_a_number_stands(p):
    given = torch.rand(4001, 63, generator=torch.Generator().manual_seed(3)) + 1
    torch.manual_seed(0)
    found = dropped(given, p, training=True)
    kept = found != 0
    torch.testing.assert_close(found[kept], (given / (1 - p))[kept])
    spread = (p * (1 - p)) ** 0.5
    for offset in range(8):  # the 64 bits of a draw are those of four numbers
        share = kept.flatten()[offset::8].float().mean()
        assert abs(share - (1 - p)) < 5 * spread / (kept.numel() / 8) ** 0.5
    for shift in (1, 2, 3, 4, 63):  # neighbours do not depend on each other
        other = kept.flatten().roll(shift)
        both = (kept.flatten() & other).float().mean()
        assert abs(both - (1 - p) ** 2) < 5 * (1 / kept.numel()) ** 0.5
    assert torch.equal(dropped(given, p, training=False), given) and not torch.equal(dropped(given, p, training=True), found)
    torch.manual_seed(0)
    assert torch.equal(dropped(given, p, training=True), found)
    assert torch.equal(dropped(given, 1.0, training=True), torch.zeros_like(given))
