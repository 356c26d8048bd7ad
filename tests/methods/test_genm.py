"""GenM: its loss and both modulations against loops, which net moves in which step, episodes, the switch of stages."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from m2lgdg import make_cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.deep import Batch, Shape
from m2lgdg.methods.genm import AcrossSites, GenM, Network, balanced_rows
from m2lgdg.registry import create as make

torch.set_num_threads(1)
EDGES, WIDTH, SITES, SUPPORT = 10, 3, 4, 5
SMALL = {"width": WIDTH, "per_site": 4, "shots": 2, "epochs": 10, "warmup": 0, "learning_rate": 0.01, "clip": 1e9}


def network(own, seed=0):
    rng = np.random.default_rng(seed)
    fitted = {"mean": rng.normal(size=EDGES), "scale": rng.uniform(0.5, 2, EDGES)}
    if own.modulation == "bank":
        fitted["support"] = rng.normal(size=(SUPPORT, EDGES))
    built = own.build(Shape(5, 20, 0, SITES, {name: value.astype(np.float32) for name, value in fitted.items()}))
    optimizer = own.optimizer(built)
    draw = torch.Generator().manual_seed(seed)
    for value in [value for part in (built, *built.sites) for value in part.parameters()]:
        value.data = torch.randn(value.shape, generator=draw)
    return built, optimizer


def batch(subjects=6, seed=1, site=None):
    draw = torch.Generator().manual_seed(seed)
    site = torch.arange(subjects) % SITES if site is None else site
    fc, phenotypes = torch.randn(len(site), EDGES, generator=draw), torch.full((len(site), 3), torch.nan)
    return Batch({"fc": fc}, phenotypes, torch.arange(len(site)) % 2, site)


def dense(net, x):
    weight, bias = net.weight.detach().double().numpy(), net.bias.detach().double().numpy()
    return [sum(weight[o, i] * x[i] for i in range(len(x))) + bias[o] for o in range(len(bias))]


def gelu(values):
    return [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in values]


def modulated(built, net, fc):
    """One subject's feature by the equations; attention where there is a support set."""
    mean, scale = built.mean.double().numpy(), built.scale.double().numpy()
    x = [(fc[i] - mean[i]) / scale[i] for i in range(EDGES)]
    f, g = gelu(dense(net, x)), dense(built.modulation, x)
    if built.support is None:
        return [f[d] * g[d] for d in range(WIDTH)]
    bank = [gelu(dense(net, [(one[i] - mean[i]) / scale[i] for i in range(EDGES)])) for one in built.support.double().numpy()]
    bank = [*bank, f]
    share = [math.exp(sum(g[d] * one[d] for d in range(WIDTH))) for one in bank]
    return [sum(share[s] * bank[s][d] for s in range(len(bank))) / sum(share) for d in range(WIDTH)]


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("modulation", ["dot", "bank"])
def test_modulation_and_prediction_against_loops(modulation):
    built, _ = network(GenM(**SMALL, modulation=modulation))
    some = batch()
    fused = [modulated(built, built.feature, one) for one in some["fc"].double().numpy()]
    parts = built.parts(some)
    agrees(parts["fused"], fused)
    agrees(parts["logits"], [dense(built.task, one) for one in fused])
    agrees(built(some), [dense(built.task, one) for one in fused])
    across = []
    for one, site in zip(some["fc"].double().numpy(), some.site.tolist(), strict=True):
        said = [dense(built.task, modulated(built, built.sites[k], one)) for k in range(SITES) if k != site]
        across.append([sum(logits[c] / math.hypot(*logits) for logits in said) / (SITES - 1) for c in (0, 1)])
    agrees(AcrossSites(built)(some), across)


def test_the_site_nets_are_not_modulated_in_the_base_update():
    built, _ = network(GenM(**SMALL))
    fc = torch.randn(6, EDGES, generator=torch.Generator().manual_seed(0))
    x = ((fc - built.mean) / built.scale).double().numpy()
    expected = [dense(built.task, gelu(dense(built.sites[n], one))) for n, one in zip([2, 2, 2, 0, 0, 0], x, strict=True)]
    given = Batch({"fc": fc}, torch.zeros(6, 0), torch.zeros(6).long(), torch.tensor([2, 2, 2, 0, 0, 0]))
    agrees(built.at_own_site(given, [2, 0]), expected)


def test_the_loss_is_cosine_distance_and_a_share_of_cross_entropy_of_unit_logits():
    own = GenM(entropy_weight=0.3)
    logits, label = torch.tensor([[3.0, 4.0], [-1.0, 2.0], [0.5, 0.1]]), [1, 0, 0]
    terms = []
    for (a, b), y in zip(logits.tolist(), label, strict=True):
        unit = [a / math.hypot(a, b), b / math.hypot(a, b)]
        entropy = math.log(sum(math.exp(u) for u in unit)) - unit[y]
        terms.append(1 - unit[y] + 0.3 * entropy)
    some = dataclasses.replace(batch(3), label=torch.tensor(label))
    agrees(own.cross_entropy(logits, some), sum(terms) / 3)
    agrees(own.cross_entropy(17 * logits, some), sum(terms) / 3)  # only the direction counts
    still = torch.zeros(3, 2, requires_grad=True)
    own.cross_entropy(still, some).backward()
    assert torch.isfinite(still.grad).all()


def bits(built):
    nets = {"F": built.feature, "G": built.modulation, "H": built.task} | {f"F{k}": net for k, net in enumerate(built.sites)}
    return {name: torch.cat([value.detach().flatten() for value in net.parameters()]).clone() for name, net in nets.items()}


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def episode(own):
    """A first-stage batch: sites 2, 0, 3 in the base; an episode from site 3 to site 1."""
    own.epoch, own._base = 0, 3 * own.per_site
    return batch(site=torch.tensor([2] * 4 + [0] * 4 + [3] * 4 + [3] * 12 + [1] * 8))


@pytest.mark.parametrize("modulation", ["dot", "bank"])
def test_which_net_moves_when(modulation, monkeypatch):
    own = GenM(**SMALL, modulation=modulation)
    built, optimizer = network(own)
    seen, update = [], GenM.update

    def watched(self, loss, nets, by):
        before, copies = bits(built), [copy.deepcopy(net) for net in nets]
        result = update(self, loss, nets, by)
        changed = [not torch.equal(a, b) for c, n in zip(copies, nets, strict=True)
                   for a, b in zip(c.parameters(), n.parameters(), strict=True)]  # fmt: skip
        seen.append((moved(before, bits(built)), all(changed)))
        return result

    monkeypatch.setattr(GenM, "update", watched)
    some = episode(own)
    for _ in range(2):  # the second time the optimizer has moments of everything
        terms = own.step(built, some, optimizer)
        assert terms.keys() == {"base", "meta_train", "meta_test"}
    once = [({"F0", "F2", "F3", "H"}, True), *[(set(), True)] * 3, *[({"G"}, True)] * 2]
    assert seen == 2 * once
    seen.clear()
    own.epoch = own.switch()
    assert own.step(built, some, optimizer).keys() == {"all_sites"}
    assert seen == [({"F"}, True)]


def adam(values, gradients, state, rate):
    """One step of Adam on a list of arrays, in place."""
    state["t"] = state.get("t", 0) + 1
    for i, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
        m, v = state.get(i, (0.0, 0.0))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        state[i] = m, v
        value -= rate * (m / (1 - 0.9 ** state["t"])) / ((v / (1 - 0.999 ** state["t"])).sqrt() + 1e-8)


def descend(loss, groups, rate=0.01):
    """One step of Adam on each (state, values)."""
    gradients = iter(torch.autograd.grad(loss, [value for _, values in groups for value in values]))
    with torch.no_grad():
        for state, values in groups:
            adam(values, [next(gradients) for _ in values], state, rate)


def copied(values):
    return [value.detach().clone().double().requires_grad_() for value in values]


def test_two_steps_of_the_first_stage_are_the_algorithm():
    own = GenM(**SMALL, modulation="dot")
    built, optimizer = network(own)
    some = episode(own)
    x = ((some["fc"] - built.mean) / built.scale).double()
    whole = {"G": built.modulation, "H": built.task, **dict(enumerate(built.sites))}
    nets = {name: copied(net.parameters()) for name, net in whole.items()}
    states = {name: {} for name in nets}

    def loss(f, start, modulate=True):
        rows = slice(start, start + 4)
        z = torch.nn.functional.gelu(x[rows] @ f[0].T + f[1])
        z = z * (x[rows] @ nets["G"][0].T + nets["G"][1]) if modulate else z
        logits = z @ nets["H"][0].T + nets["H"][1]
        unit = logits / logits.norm(dim=1, keepdim=True)
        picked = unit[torch.arange(4), some.label[rows]]
        return (1 - picked).mean() + 0.1 * (unit.exp().sum(dim=1).log() - picked).mean()

    for _ in range(2):
        own.step(built, some, optimizer)
        base = sum(loss(nets[k], 4 * i, modulate=False) for i, k in enumerate((2, 0, 3))) / 3
        descend(base, [(states[k], nets[k]) for k in (2, 0, 3, "H")])
        working, fresh = copied(nets[3]), {}
        for start in (12, 16, 20):
            descend(loss(working, start), [(fresh, working)])
        for start in (24, 28):
            descend(loss(working, start), [(states["G"], nets["G"])])
    for name, net in whole.items():
        for given, expected in zip(net.parameters(), nets[name], strict=True):
            np.testing.assert_allclose(given.detach(), expected.detach(), atol=2e-5)


def test_batches_have_every_site_and_in_the_first_stage_an_episode_of_two():
    own = make("genm", per_site=4, steps_per_epoch=40, epochs=4)
    site = torch.tensor([0] * 20 + [1] * 9 + [2] * 6 + [3])
    label = torch.tensor([0, 1] * 10 + [1, 1, 0, 1, 1, 0, 1, 0, 1] + [0] + [1] * 5 + [1])  # site 2 has one control, 3 is one
    own.epoch = 1
    starts = set()
    for rows in own.batches(site, label, torch.Generator().manual_seed(0)):
        assert own._base == 16
        assert torch.bincount(site[rows[:16]], minlength=4).tolist() == [4, 4, 4, 4]
        numbers = site[rows[16:]].tolist()
        first, second = numbers[0], numbers[-1]
        assert {first, second} == {0, 1}
        shots = {0: 4, 1: 3}  # the second site has three controls
        assert numbers == [first] * 6 * shots[first] + [second] * 4 * shots[second]
        for n, steps, part in ((first, 3, rows[16:]), (second, 2, rows[16 + 6 * shots[first] :])):
            for i in range(steps):
                some = part[2 * shots[n] * i : 2 * shots[n] * (i + 1)]
                assert label[some].sum() == shots[n]
                assert len(set(some.tolist())) == len(some)
        starts.add(first)
    assert starts == {0, 1}
    own.epoch = 2
    assert {len(rows) for rows in own.batches(site, label, torch.Generator().manual_seed(0))} == {16}
    own.epoch = 0
    lonely = own.batches(site[20:], label[20:], torch.Generator().manual_seed(0))
    assert {len(rows) for rows in lonely} == {12}  # one site alone is fit for an episode


def test_stages_and_candidates():
    own = make("genm", epochs=10, warmup=2)
    assert own.switch() == 5
    assert [epoch for epoch in range(10) if own.candidate(epoch)] == [5, 6, 7, 8, 9]
    later = make("genm", epochs=10, warmup=2, select_after_warmup=True)
    assert [epoch for epoch in range(10) if later.candidate(epoch)] == [7, 8, 9]
    assert make("genm", epochs=2).switch() == 1
    assert GenM(epochs=1).switch() == 0
    assert GenM(epochs=1).candidate(0)


def test_the_second_stage_begins_with_g_and_h_of_the_lowest_validation_loss(monkeypatch):
    own = GenM(**SMALL | {"epochs": 6})
    built, _ = network(own)
    snapshots = []
    for epoch, loss in enumerate([0.5, 0.2, 0.3]):
        own.epoch = epoch
        for value in built.parameters():
            value.data += 1
        snapshots.append(bits(built))
        monkeypatch.setattr("m2lgdg.deep.DeepMethod.validate", lambda self, net, _, loss=loss: {"val_loss": loss, "by": net})
        assert isinstance(own.validate(built, batch())["by"], AcrossSites)
    after = bits(built)
    assert torch.equal(after["G"], snapshots[1]["G"])
    assert torch.equal(after["H"], snapshots[1]["H"])
    assert torch.equal(after["F"], snapshots[2]["F"])
    own.epoch = 3
    assert isinstance(own.validate(built, batch())["by"], Network)


def test_the_support_set_is_balanced_over_classes_and_sites_and_drawn_from_source_training():
    sites = np.array(["a"] * 50 + ["b"] * 6 + ["c"] * 4)
    labels = np.array([0, 1] * 25 + [0, 1] * 3 + [1] * 4)
    rows = balanced_rows(sites, labels, 12, np.random.default_rng(0).permutation(60))
    assert len(set(rows.tolist())) == 12
    count = {(s, y): int(((sites[rows] == s) & (labels[rows] == y)).sum()) for s in "abc" for y in (0, 1)}
    assert count == {("a", 0): 3, ("b", 0): 3, ("c", 0): 0, ("a", 1): 2, ("b", 1): 2, ("c", 1): 2}
    assert len(balanced_rows(sites[50:], labels[50:], 64, np.arange(10))) == 10
    cohort = make_cohort("tiny", seed=3)
    own = GenM(modulation="bank", support=8)
    fc = own.features(cohort, torch.device("cpu"))["fc"]
    np.testing.assert_array_equal(fc, fc_features(cohort.series).astype(np.float32))
    fc[:, 4] = 0.25
    fitted = own.prepare(cohort, {"fc": fc})
    expected = fc.double().numpy().std(axis=0)
    expected[4] = 1.0  # never varies
    np.testing.assert_allclose(fitted["mean"], fc.double().numpy().mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(fitted["scale"], expected, atol=1e-6)
    assert fitted["support"].shape == (8, fc.shape[1])
    assert all((fc.numpy() == one).all(axis=1).any() for one in fitted["support"])
    assert GenM().modulation == "bank" and GenM(**GenM.variants["dot"]).modulation == "dot"
    assert "support" not in GenM(modulation="dot").prepare(cohort, {"fc": fc})


def test_the_number_of_parameters_and_what_is_saved():
    fitted = {"mean": np.zeros(6670, dtype=np.float32), "scale": np.ones(6670, dtype=np.float32)}
    built = GenM().build(Shape(116, 200, 0, 17, fitted))
    GenM().optimizer(built)
    counts = [sum(value.numel() for value in net.parameters()) for net in (built.feature, built.modulation, built.task)]
    assert counts == [53_368, 53_368, 18]
    assert len(built.sites) == 17
    assert sum(value.numel() for value in built.sites[0].parameters()) == 53_368
    nets = {"feature", "modulation", "task"}
    assert built.state_dict().keys() == {f"{net}.{name}" for net in nets for name in ("weight", "bias")}


def test_with_a_bank_one_by_one_equals_together_and_survives_a_folder(tmp_path):
    cohort = make_cohort("tiny", seed=1)
    source, target = cohort.select(cohort.sites != "west"), cohort.select(cohort.sites == "west")
    fields = dict(GenM.variants["small"]) | {"epochs": 6, "modulation": "bank", "support": 10, "calibration": "none"}
    own = make("genm", **fields).fit(source, seed=0)
    together = own.predict_proba(target)
    alone = np.concatenate([own.predict_proba(target.select([i])) for i in range(len(target))])
    np.testing.assert_allclose(alone, together, atol=1e-5)
    assert own.state_["fitted.support"].shape == (10, 66)
    np.testing.assert_array_equal(GenM.load(own.save(tmp_path / "model")).predict_proba(target), together)


def test_phenotypes_have_a_layer_that_starts_at_zero_and_is_trained_in_both_stages():
    """Random weights in H, which the second stage does not train, made features of the scan balance them by heart."""
    cohort = make_cohort("tiny", seed=1)
    fields = dict(GenM.variants["small"]) | {"epochs": 2, "warmup": 1, "phenotypes": True}
    own = make("genm", **fields).fit(cohort, seed=0)
    inputs = len(own.facts_["inputs"])
    assert inputs > 1 and own.state_["fitted.gain"] == pytest.approx(66 / inputs)
    assert own.state_["network.task.weight"].shape == (2, own.width) and (own.state_["network.beside.weight"] != 0).all()
    fitted = {name.removeprefix("fitted."): value for name, value in own.state_.items() if name.startswith("fitted.")}
    built = own.build(Shape(12, 20, inputs, 3, fitted))
    assert (built.beside.weight == 0).all()
    some = batch()
    some = Batch({"fc": torch.randn(6, 66)}, torch.randn(6, inputs), some.label, some.site)
    without = built(Batch(some.features, torch.zeros(6, inputs), some.label, some.site))
    torch.testing.assert_close(built(some), without)
    with torch.no_grad():
        built.beside.weight[1, 0] = 0.5
    expected = without + torch.stack([torch.zeros(6), 0.5 * 66 / inputs * some.phenotypes[:, 0]], dim=1)
    torch.testing.assert_close(built(some), expected)
    optimizer, own._base = own.optimizer(built), 6
    own.per_site, some = 2, Batch(some.features, some.phenotypes, some.label, torch.tensor([0, 0, 1, 1, 2, 2]))
    for own.epoch in (0, 1):  # one epoch of each stage; the task net is trained in the first alone
        before = {name: value.clone() for name, value in built.state_dict().items()}
        own.step(built, some, optimizer)
        moved = {name for name, value in built.state_dict().items() if not torch.equal(value, before[name])}
        assert "beside.weight" in moved and ("task.weight" in moved, "feature.weight" in moved) == (
            own.epoch == 0,
            own.epoch == 1,
        )


def test_a_model_of_0_1_0_takes_phenotypes_as_they_are():
    own = GenM(**SMALL, phenotypes=True)
    rng = np.random.default_rng(0)
    fitted = {"mean": rng.normal(size=EDGES), "scale": rng.uniform(0.5, 2, EDGES), "support": rng.normal(size=(SUPPORT, EDGES))}
    built = own.build(Shape(5, 20, 3, SITES, {name: value.astype(np.float32) for name, value in fitted.items()}))
    some = batch()
    some = Batch(some.features, torch.randn(6, 3), some.label, some.site)
    with torch.no_grad():
        built.task.weight[:, WIDTH:] = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, -2.0]])
    added = built(some) - built(Batch(some.features, torch.zeros(6, 3), some.label, some.site))
    agrees(added, np.stack([np.zeros(6), (some.phenotypes[:, 0] - 2 * some.phenotypes[:, 2]).numpy()], axis=1))
