"""IBGNN+ with random weights against loops over its equations, the losses of its mask, and what each stage may move."""

import copy
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers

from m2lgdg import make_cohort
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.ibgnn_plus import BACKBONE, ENHANCED, MASK, IBGNNPlus, MessagePassing

torch.set_num_threads(1)
ROIS, SUBJECTS = 6, 5


def method(epoch=0, **fields):
    own = IBGNNPlus(**{"hidden": 4, "epochs": 30, "warmup": 2, **fields})
    own.class_weight = torch.tensor([0.8, 1.4])  # what training sets from the source-training labels
    own.epoch = epoch
    return own


def randomised(module, seed=0):
    """Every parameter drawn anew, in eval mode; nothing stays 0 or 1 by its initialisation."""
    rng = torch.Generator().manual_seed(seed)
    for value in module.state_dict().values():
        value.copy_(torch.randn(value.shape, generator=rng))
    return module.eval()


def network_of(seed=0, **fields):
    own = method(**fields)
    return own, randomised(own.build(Shape(ROIS, 50, 0, 2, {})), seed)


def batch_of(seed=1, subjects=SUBJECTS, rois=ROIS):
    """Matrices that are not symmetric, so that a transposed one shows; the last ROI of the first subject is flat."""
    fc = torch.randn(subjects, rois, rois, generator=torch.Generator().manual_seed(seed)) * (1 - torch.eye(rois))
    fc[0, -1, :] = fc[0, :, -1] = 0
    return Batch({"fc": fc}, torch.zeros(subjects, 1), torch.arange(subjects) % 2, torch.zeros(subjects))


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def message_passing(state, nodes, weights):
    """One subject: each node sums what the two-layer perceptron says of it, each other node and the edge between."""
    n, out = len(nodes), []
    first = np.concatenate([state["own.weight"], state["other.weight"], state["edge.weight"]], axis=1)
    for i in range(n):
        total = np.zeros(len(first))
        for j in range(n):
            if j != i:
                total += np.maximum(first @ np.concatenate([nodes[i], nodes[j], [weights[i, j]]]) + state["own.bias"], 0)
        out.append(np.maximum(oracle.linear(oracle.under(state, "output"), total / n), 0))
    return np.array(out)


def shares(state):
    mask = state["mask"]
    return np.array([[sigmoid((mask[i, j] + mask[j, i]) / 2) for j in range(len(mask))] for i in range(len(mask))])


def whole(state, fc, masked=True, mask_nodes=False, layers=2):
    """One subject through the network: the representation of the graph, and the logits."""
    weights = fc * shares(state) if masked else fc
    nodes = weights if mask_nodes else fc
    for place in range(layers):
        nodes = message_passing(oracle.under(state, f"layers.{place}"), nodes, weights)
    z = sum(nodes) / len(nodes)
    inner = np.maximum(oracle.linear(oracle.under(state, "readout.0"), z), 0)
    fused = oracle.linear(oracle.under(state, "readout.2"), inner) + z
    return fused, oracle.linear(oracle.under(state, "classifier"), fused)


def test_it_matters_which_neighbour_has_which_weight():
    """With a linear message only the sum of a node's weights would count, as it does in the release."""
    layer, rng = randomised(MessagePassing(3, 5), seed=1), torch.Generator().manual_seed(3)
    nodes, weights = torch.randn(1, ROIS, 3, generator=rng), torch.randn(1, ROIS, ROIS, generator=rng)
    moved = weights.clone()
    moved[0, 0, 1:] = weights[0, 0, 1:].roll(1)  # to the first node, the same weights from other neighbours
    before, after = layer(nodes, weights)[0], layer(nodes, moved)[0]
    assert (after[0] - before[0]).abs().max() > 0.05
    assert torch.equal(after[1:], before[1:])
    with torch.no_grad():
        layer.own.bias.fill_(100.0)  # every ReLU is open: the message is linear
    torch.testing.assert_close(layer(nodes, moved), layer(nodes, weights), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fields", [{}, {"mask_nodes": True}, {"layers": 1}, {"layers": 3}])
@pytest.mark.parametrize("masked", [True, False])
def test_the_whole_network(fields, masked):
    own, network = network_of(3, **fields)
    batch = batch_of()
    assert network.masked
    network.masked = masked
    given, state = network.parts(batch), numbers(network)
    expected = [whole(state, one, masked, own.mask_nodes, own.layers) for one in batch["fc"].double().numpy()]
    agrees(given["fused"], [fused for fused, _ in expected])
    agrees(given["logits"], [logits for _, logits in expected])
    assert torch.equal(network(batch), given["logits"])
    assert given["logits"].std(dim=0).min() > 1e-3


def test_the_losses_of_the_mask():
    fields = {"label_weight": 3.0, "agreement_weight": 2.0, "size_weight": 0.1, "entropy_weight": 0.5}
    own, network = network_of(11, epoch=15, label_smoothing=0.1, **fields)
    batch = batch_of(5, subjects=12)
    network.masked = False
    with torch.no_grad():
        logits = network(batch)
        network.classifier.bias[1] -= (logits[:, 1] - logits[:, 0]).median()  # half of the subjects in each class
    network.masked = True
    state, label = numbers(network), batch.label.tolist()
    masked = np.array([whole(state, one)[1] for one in batch["fc"].double().numpy()])
    said = [int(whole(state, one, masked=False)[1].argmax()) for one in batch["fc"].double().numpy()]
    assert said != label and said != masked.argmax(axis=1).tolist()  # three different sets of labels
    share = shares(state)
    pairs = [share[i, j] for i in range(ROIS) for j in range(ROIS) if i != j]
    entropy = sum(-m * math.log(m) - (1 - m) * math.log(1 - m) for m in pairs) / len(pairs)
    given = own.loss(network, batch)
    assert given.keys() == {"label", "agreement", "size", "entropy"}
    agrees(given["label"], 3 * oracle.cross_entropy(masked, label, [0.8, 1.4]))
    agrees(given["agreement"], 2 * oracle.cross_entropy(masked, said, [1, 1], 0))
    agrees(given["size"], 0.1 * sum(pairs))
    agrees(given["entropy"], 0.5 * entropy)
    assert network.masked


def test_a_mask_that_has_decided_keeps_finite_gradients():
    own, network = network_of(epoch=15)
    with torch.no_grad():
        network.mask.copy_(torch.where(torch.arange(ROIS) < 3, 200.0, -200.0))
    sum(own.loss(network, batch_of()).values()).backward()
    assert torch.isfinite(network.mask.grad).all()


@pytest.mark.parametrize("epoch", [0, 29])
def test_the_other_stages_have_cross_entropy_alone(epoch):
    own, network = network_of(epoch=epoch, label_smoothing=0.1)
    given, batch = own.loss(network, batch_of()), batch_of()
    logits = [whole(numbers(network), one)[1] for one in batch["fc"].double().numpy()]
    assert given.keys() == {"ce"}
    agrees(given["ce"], oracle.cross_entropy(np.array(logits), batch.label.tolist(), [0.8, 1.4]))


@pytest.mark.parametrize(
    ("epochs", "stages"), [(1, [2]), (2, [1, 2]), (3, [0, 1, 2]), (20, [0] * 6 + [1] * 7 + [2] * 7), (300, [0, 1, 2])]
)
def test_stages_are_thirds_and_only_the_last_is_kept(epochs, stages):
    stages = [stage for stage in stages for _ in range(100)] if epochs == 300 else stages
    given = [method(epoch, epochs=epochs).stage() for epoch in range(epochs)]
    assert given == stages
    assert [method(epochs=epochs).candidate(epoch) for epoch in range(epochs)] == [stage == ENHANCED for stage in stages]


def test_each_stage_moves_only_what_it_may():
    """Bit for bit, with a weight decay and momentum that would show; the optimizer's state of the rest stays as well."""
    own = method(weight_decay=0.5, dropout=0.5, epochs=30)
    torch.manual_seed(0)
    network = own.build(Shape(ROIS, 50, 0, 2, {}))
    optimizer, batch = own.optimizer(network), batch_of()
    backbone = [name for name, _ in network.named_parameters() if name != "mask"]
    moved = {BACKBONE: set(backbone), MASK: {"mask"}, ENHANCED: set(backbone)}
    count = dict.fromkeys(range(3), 0)
    for epoch in range(30):
        own.epoch = epoch
        stage = own.stage()
        network.train()  # as the loop does
        before = {name: value.clone() for name, value in network.named_parameters()}
        memory = copy.deepcopy(optimizer.state_dict()["state"])
        own.step(network, batch, optimizer)
        count[stage] += 1
        changed = {name for name, value in network.named_parameters() if not torch.equal(value, before[name])}
        assert changed == moved[stage], epoch
        assert network.masked == (stage != BACKBONE)
        after = optimizer.state_dict()["state"]
        for place, name in enumerate([*backbone, "mask"]):
            if name not in moved[stage] and place in memory:
                assert all(torch.equal(after[place][key], value) for key, value in memory[place].items())
    assert count == {0: 10, 1: 10, 2: 10}
    assert int(optimizer.state[network.classifier.weight]["step"]) == 20  # the network's optimizer goes on where it stopped
    assert int(optimizer.state[network.mask]["step"]) == 10
    assert (network.mask.diagonal() == 1).all()
    torch.testing.assert_close(network.edges(), network.edges().T)
    assert network.mask.detach().std() > 0.01


def test_dropout_rests_while_the_mask_is_learned():
    own = method(epoch=15, dropout=0.5)
    torch.manual_seed(0)
    network, batch = own.build(Shape(ROIS, 50, 0, 2, {})), batch_of()
    optimizer, before = own.optimizer(network), torch.get_rng_state()
    own.step(network.train(), batch, optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    own.epoch = 25
    own.step(network.train(), batch, optimizer)
    assert not torch.equal(torch.get_rng_state(), before)
    assert {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}


def test_each_stage_has_a_warm_up_and_a_cosine_of_its_own(monkeypatch):
    seen, kept = {}, IBGNNPlus.step

    def step(self, network, batch, optimizer):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-5, 0.0]
        seen.setdefault(self.epoch, set()).add(tuple(group["lr"] for group in optimizer.param_groups))
        return kept(self, network, batch, optimizer)

    monkeypatch.setattr(IBGNNPlus, "step", step)
    own = IBGNNPlus(epochs=30, warmup=2, patience=30, batch_size=8, learning_rate=0.1, mask_rate=0.3)
    own.fit(make_cohort("tiny", seed=1))
    shape = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert [len(rates) for rates in seen.values()] == [1] * 30  # the same through an epoch
    np.testing.assert_allclose([rates.pop() for rates in seen.values()], [[0.1 * one, 0.3 * one] for one in shape * 3])


def test_a_run_through_the_loop_keeps_a_network_of_the_last_stage():
    cohort = make_cohort("tiny", seed=1)
    rates = {"learning_rate": 0.01, "mask_rate": 0.3, "size_weight": 1.0, "calibration": "none", "deterministic": True}
    fitted = IBGNNPlus(epochs=9, warmup=1, batch_size=16, patience=1, **rates).fit(cohort)
    history = fitted.facts_["history"]
    assert fitted.facts_["best_epoch"] > 6 and len(history) > 6  # patience 1 would have ended an earlier stage
    losses = [set(one) - {"val_auc", "val_loss"} for one in history]
    assert losses[:3] == [{"ce"}] * 3
    assert losses[3:6] == [{"label", "agreement", "size", "entropy"}] * 3
    assert all(one == {"ce"} for one in losses[6:])
    mask = fitted.state_["network.mask"]
    assert mask.shape == (12, 12) and mask.std() > 0.05 and (np.diag(mask) == 1).all()
    assert history[5]["size"] < history[3]["size"]
    assert fitted.network().masked
    before = fitted.predict_proba(cohort)
    fitted.state_["network.mask"] = np.full_like(mask, 20.0)  # edges have their whole weight
    assert np.abs(fitted.predict_proba(cohort) - before).max() > 1e-3
    assert fitted.represent(cohort).shape == (len(cohort), 16)


def test_the_first_loss_is_that_of_a_guess_at_any_number_of_rois():
    """Sums that are not divided by the number of ROIs begin near 2000."""
    for rois in (8, 116):
        own = method(hidden=16)
        torch.manual_seed(0)
        loss = own.loss(own.build(Shape(rois, 50, 0, 2, {})).eval(), batch_of(rois=rois))["ce"]
        assert abs(loss.item() - math.log(2)) < 0.3


@pytest.mark.parametrize("keep", [True, False])
def test_the_mask_is_learned_for_the_best_epoch_of_the_first_stage(keep, monkeypatch):
    own, network = network_of(epochs=9, keep_best_backbone=keep)
    aucs = iter([0.6, 0.8, 0.7, 0.9, 0.9, 0.9])
    monkeypatch.setattr(type(own).__mro__[1], "validate", lambda self, net, batch: {"val_auc": next(aucs), "val_loss": 1.0})
    for epoch in range(4):  # three of the first stage, one of the second
        own.epoch = epoch
        with torch.no_grad():
            network.classifier.bias.fill_(float(epoch))
        own.validate(network, batch_of())
        if epoch == 2:
            assert network.classifier.bias.tolist() == [1.0 if keep else 2.0] * 2
    assert network.classifier.bias.tolist() == [3.0, 3.0]  # later epochs are selected by the loop
