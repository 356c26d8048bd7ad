"""MM-GTUNets with random weights against loops over its equations, and targets that read the source graph alone."""

import dataclasses
import math

import numpy as np
import oracle
import pytest
import torch
from networks import numbers, randomised

from m2lgdg import leave_one_site_out, make_cohort
from m2lgdg.deep import Shape
from m2lgdg.method import Method
from m2lgdg.methods.mm_gtunets import (
    Affinity,
    Graph,
    GTUNet,
    MMGTUNets,
    PhenotypeVAE,
    Source,
    isolation,
    phenotype_rules,
    recursive_elimination,
    smoothness,
    squared_distances,
)
from m2lgdg.preprocess import PhenotypeScaler

torch.set_num_threads(1)
SMALL = {  # all widths differ, so that a swapped one shows
    **{"selected": 9, "elimination_step": 2, "vae_hidden": 8, "vae_epochs": 30, "hidden": 6, "embedding": 4, "head_width": 5},
    **{"label_smoothing": 0.1, "target_share": 0.25, "used_phenotypes": ()},
}


def method(**fields):
    own = MMGTUNets(**{**SMALL, **fields})
    own.class_weight = torch.tensor([0.8, 1.4])  # what training sets from the source-training labels
    return own


@pytest.fixture(scope="module")
def cohort():
    sizes = {"a": 9, "b": 7, "c": 6}
    return make_cohort("tiny", sizes=sizes, n_rois=6, n_disease_rois=1, n_disease_edges=1, missing=0.0, seed=3)


@pytest.fixture(scope="module")
def fold(cohort):
    return next(leave_one_site_out(cohort, ["c"]))


def fitted_on(own, source):
    torch.manual_seed(0)
    return own.prepare(source, own.features(source, torch.device("cpu")))


def batch_of(own, source, cohort):
    return own.make_batch(cohort, PhenotypeScaler.fit(source), torch.device("cpu"))


def network_on(own, source, seed=0):
    fitted = fitted_on(own, source)
    network = own.build(Shape(len(source.rois), own.length, len(source.inputs), len(source.site_names), fitted))
    return randomised(network, seed), fitted


def agrees(given, expected):
    np.testing.assert_allclose(given.detach().numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


# The equations, in loops. A graph is (n, n) weights of base nodes, then of one query, whose column is 0 but for itself.


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def alike(one, other, education_sd):
    """Agreement of two rows (sex, age, education) in years, and in education within a quarter of the source's sd."""
    return [one[0] == other[0], abs(one[1] - other[1]) < 2, abs(one[2] - other[2]) < 0.25 * education_sd]


def constrained(reward, penalty, motivation):
    return max(reward, motivation), -max(abs(penalty), penalty + motivation), motivation


def affinity(state, agreement, label):
    """Agreement (phenotype, n, n), labels with None where not known -> affinity (n, n) and the sum of rewards."""
    share = oracle.softmax(list(state["mixture"]))
    n = len(label)
    total, value = np.zeros((n, n)), 0.0
    for one, coefficients in enumerate(state["coefficients"]):
        w_r, w_p, w_m = constrained(*coefficients)
        for i in range(n):
            for j in range(n):
                known = label[i] is not None and label[j] is not None
                r = float(agreement[one][i][j] and known and label[i] == label[j])
                p = float(agreement[one][i][j] and known and label[i] != label[j])
                m = float(agreement[one][i][j] and not known)
                total[i, j] += share[one] * sigmoid(w_r * r + w_p * p + w_m * m)
                value += max(0.0, w_r * r + w_p * p)
    return total, value


def convolution(state, x, graph):
    """Edge by edge; graph[i, j] is what i reads of j, 0 for no edge."""
    weight, bias = np.split(state["project.weight"], 4), np.split(state["project.bias"], 4)
    part = {name: (weight[k], bias[k]) for k, name in enumerate(("query", "key", "value", "skip"))}

    def project(name, row):
        return part[name][0] @ row + part[name][1]

    out = []
    for i in range(len(x)):
        q = project("query", x[i])
        readable = [j for j in range(len(x)) if graph[i, j] != 0]
        keys = [project("key", x[j]) + graph[i, j] * state["edge"] for j in readable]
        alpha = oracle.softmax([oracle.dot(q, k) / math.sqrt(len(q)) for k in keys])
        o = np.zeros(len(q))
        for a, j in zip(alpha, readable, strict=True):
            o += a * (project("value", x[j]) + graph[i, j] * state["edge"])
        r = project("skip", x[i])
        beta = sigmoid(float(state["gate.weight"][0] @ np.concatenate([o, r, o - r])))
        out.append(beta * r + (1 - beta) * o)
    return np.array(out)


def unet(state, x, graph, share):
    """Base nodes and, last, one query, who stays on every level."""
    x = np.maximum(convolution(oracle.under(state, "first"), x, graph), 0)
    levels = []
    for direction in state["projections"]:
        score = [oracle.dot(row, direction) / math.sqrt(oracle.dot(direction, direction)) for row in x]
        base = len(x) - 1
        best = sorted(range(base), key=lambda i: -score[i])[: math.ceil(share * base)]
        rows = [*sorted(best), base]
        levels.append((x, graph, rows))
        x, graph = np.array([x[i] * math.tanh(score[i]) for i in rows]), graph[np.ix_(rows, rows)]
        x = np.maximum(convolution(oracle.under(state, "down"), x, graph), 0)
    for depth, (skip, graph, rows) in reversed(list(enumerate(levels))):
        up = skip.copy()
        for row, i in zip(x, rows, strict=True):
            up[i] += row
        x = convolution(oracle.under(state, "up" if depth else "last"), up, graph)
        x = np.maximum(x, 0) if depth else x
    return x


def fusion(state, imaging, phenotype):
    joint, sizes = [], np.zeros(3)
    for i, p in zip(imaging, phenotype, strict=True):
        mean = (i + p) / 2
        parts = {"imaging": i, "phenotype": p, "mean": mean}
        att = {name: np.tanh(oracle.linear(oracle.under(state, name), part)) for name, part in parts.items()}
        joint.append(sum(att[name] * part for name, part in parts.items()))
        sizes += [(att[name] ** 2).sum() for name in parts]
    return np.array(joint), oracle.softmax([sizes[0] / sizes[2], sizes[1] / sizes[2]])


def head(state, fused):
    hidden = np.maximum(oracle.linear(oracle.under(state, "0"), fused), 0)
    return oracle.linear(oracle.under(state, "3"), oracle.batch_norm(oracle.under(state, "2"), hidden))


def nodes_of(fitted, fc, phenotypes, source):
    """(imaging, latent) of subjects from all their edges and raw phenotypes (sex, age, education) of a source without gaps."""
    x = (fc[:, fitted["chosen"]] - fitted["fc"].mean(axis=0)) / fitted["fc"].std(axis=0)
    low, high = source.min(axis=0), source.max(axis=0)
    latent = []
    for sex, age, education in phenotypes:
        scaled = [min(max((v - low[k]) / (high[k] - low[k]), 0), 1) for k, v in ((1, age), (2, education))]
        codes = np.array([float(sex == kind) for kind in np.unique(source[:, 0])] + scaled)
        hidden = np.maximum(fitted["vae_hidden_weight"].astype(float) @ codes + fitted["vae_hidden_bias"], 0)
        latent.append(fitted["vae_mean_weight"].astype(float) @ hidden + fitted["vae_mean_bias"])
    return x, np.array(latent)


def distances(x, latent):
    f = np.concatenate([x, latent], axis=1)
    return np.array([[math.sqrt(((a - b) ** 2).sum()) for b in f] for a in f])


def population_graph(state, fitted, everyone, raw, label, source_raw):
    """(n, n) of all nodes by the equations, edges between two unlabelled ones left out; and the rewards."""
    x, latent = everyone
    n, sd = len(label), source_raw[:, 2].std()
    agreement = [[[alike(raw[i], raw[j], sd)[k] for j in range(n)] for i in range(n)] for k in range(3)]
    graph, value = affinity(oracle.under(state, "affinity"), agreement, label)
    apart = distances(x, latent)
    for i in range(n):
        for j in range(n):
            graph[i, j] *= math.exp(-(apart[i, j] ** 2) / (2 * float(fitted["sigma"]) ** 2))
            if label[i] is None and label[j] is None and i != j:
                graph[i, j] = 0
    return graph, value


def raw_phenotypes(cohort):
    return cohort.phenotypes[list(cohort.inputs)].to_numpy(float)


def inserted(own, state, both, graph, rows):
    """The last of some rows as a query of the others: both embeddings of all rows, its joint embedding and logits."""
    reading = graph[np.ix_(rows, rows)]
    reading[:-1, -1] = 0  # base nodes do not read the query
    imaging, phenotype = (
        unet(oracle.under(state, name), x[rows], reading, own.pool_share)
        for name, x in zip(("imaging", "phenotype"), both, strict=True)
    )
    joint, _ = fusion(oracle.under(state, "fusion"), imaging, phenotype)
    return imaging, phenotype, joint[-1], head(oracle.under(state, "head"), joint[-1])


def by_loops(own, network, fitted, source, target):
    """Nodes and population graph of source and, after it, target."""
    fc = torch.cat([own.features(one, None)["fc"] for one in (source, target)]).double().numpy()
    source_raw = raw_phenotypes(source)
    raw = np.concatenate([source_raw, raw_phenotypes(target)])
    both = nodes_of(fitted, fc, raw, source_raw)
    label = [*source.labels.tolist(), *[None] * len(target)]
    return both, *population_graph(numbers(network), fitted, both, raw, label, source_raw)


@pytest.mark.parametrize("seed", range(2))
def test_the_whole_network_one_target_at_a_time(seed, fold):
    own = method()
    network, fitted = network_on(own, fold.source, seed)
    batch = batch_of(own, fold.source, fold.target)
    given = network.parts(batch)
    source = network.source
    found = network.insert(source(source.fc, source.phenotypes), source.label, network.nodes(batch))
    both, graph, _ = by_loops(own, network, fitted, fold.source, fold.target)
    n = len(fold.source)
    expected = [inserted(own, numbers(network), both, graph, [*range(n), n + i]) for i in range(len(fold.target))]
    agrees(given["fused"], [joint for _, _, joint, _ in expected])
    agrees(given["logits"], [logits for *_, logits in expected])
    agrees(network(batch), [logits for *_, logits in expected])
    agrees(found.imaging, np.concatenate([expected[0][0][:-1], [imaging[-1] for imaging, *_ in expected]]))
    agrees(found.phenotype, np.concatenate([expected[0][1][:-1], [phenotype[-1] for _, phenotype, *_ in expected]]))
    assert np.ptp(given["logits"].detach().numpy(), axis=0).min() > 1e-3


def test_agreement_is_under_two_years_of_age_equal_sex_and_a_quarter_sd_of_the_rest(fold):
    rng, n = np.random.default_rng(0), len(fold.source)
    table = fold.source.phenotypes.assign(age=20.0 + rng.integers(0, 6, n), education=rng.normal(12, 3, n))
    source = dataclasses.replace(fold.source, phenotypes=table)
    own = method()
    fitted, raw = fitted_on(own, source), raw_phenotypes(source)
    nodes = Source(fitted)(torch.from_numpy(fitted["fc"]), torch.from_numpy(fitted["phenotypes"]))
    given = Source(fitted).agree(nodes, nodes).numpy()
    expected = [[[alike(raw[i], raw[j], raw[:, 2].std())[k] for j in range(n)] for i in range(n)] for k in range(3)]
    np.testing.assert_array_equal(given, expected)
    assert (np.abs(raw[:, 1][:, None] - raw[:, 1]) == 2).any()  # the boundary is there, and is apart
    assert all(0 < one.mean() < 1 for one in given)
    wide = Source(fitted_on(method(agreement_years=3.0, agreement_sd=1.0), source)).agree(nodes, nodes).numpy()
    np.testing.assert_array_equal(wide[1], np.abs(raw[:, 1][:, None] - raw[:, 1]) < 3)
    np.testing.assert_array_equal(wide[2], np.abs(raw[:, 2][:, None] - raw[:, 2]) < raw[:, 2].std())


@pytest.mark.parametrize("seed", range(6))
def test_reward_penalty_and_motivation(seed):
    module = randomised(Affinity(3), seed)
    rng = np.random.default_rng(seed)
    agreement = rng.random((3, 7, 7)) < 0.5
    label = rng.integers(0, 2, 7).tolist()
    same = torch.tensor([[a == b for b in label] for a in label])
    given, value = module(torch.tensor(agreement), same)
    expected = affinity(numbers(module), agreement, label)
    agrees(given, expected[0])
    agrees(value, expected[1])
    given, value = module(torch.tensor(agreement))
    agrees(given, affinity(numbers(module), agreement, [None] * 7)[0])
    assert value == 0
    reward, penalty, motivation = (one.flatten() for one in module.constrained())
    assert (reward >= motivation).all() and (penalty <= 0).all() and (-penalty >= motivation + module.coefficients[:, 1]).all()


def test_coefficients_start_within_their_constraints_and_the_mixture_even():
    module = Affinity(4)
    torch.testing.assert_close(torch.cat(module.constrained(), dim=1)[:, :, 0], module.coefficients)
    assert (module.coefficients[:, 1] < 0).all() and (module.coefficients[:, 0] > module.coefficients[:, 2]).all()
    agreeing = module(torch.ones(4, 1, 1, dtype=torch.bool))[0]
    agrees(agreeing, [[sigmoid(0.5)]])


def graph_like(rng, base, queries):
    """Directed random weights with gaps, so that a transposed one shows."""
    edges = rng.uniform(0.2, 2.0, (base + queries, base + queries)) * (rng.random((base + queries, base + queries)) < 0.6)
    np.fill_diagonal(edges, rng.uniform(0.2, 2.0, base + queries))
    edges[:base, base:] = 0
    edges[base:, base:] = np.diag(np.diag(edges)[base:])
    whole = torch.tensor(edges).float()
    inside = whole[:base, :base]
    graph = Graph(inside - torch.diag(inside.diagonal()), inside.diagonal(), whole[base:, :base], whole.diagonal()[base:])
    return edges, graph


@pytest.mark.parametrize(("depth", "share"), [(1, 0.5), (2, 0.8), (3, 0.6)])
def test_unet_pools_base_nodes_and_keeps_the_query(depth, share):
    own = method(pool_share=share)
    net, rng = randomised(GTUNet(5, depth, own), depth), np.random.default_rng(depth)
    edges, graph = graph_like(rng, 9, 2)
    x = rng.normal(size=(11, 5))
    given = torch.cat(net((torch.tensor(x[:9]).float(), torch.tensor(x[9:]).float()), graph))
    for query in (9, 10):
        rows = [*range(9), query]
        expected = unet(numbers(net), x[rows], edges[np.ix_(rows, rows)], share)
        agrees(given[rows], expected)
    assert given.shape == (11, own.embedding)


def test_graph_losses_are_their_sums_over_pairs():
    rng = np.random.default_rng(3)
    e, g = rng.normal(size=(7, 4)), rng.uniform(0.1, 1.0, (7, 7))
    g = (g + g.T) / 2
    pairs = sum(g[i, j] * ((e[i] - e[j]) ** 2).sum() / 2 for i in range(7) for j in range(7))
    agrees(smoothness(torch.tensor(e).float(), torch.tensor(g).float()), pairs / 49)
    agrees(isolation(torch.tensor(g).float()), -sum(math.log(sum(row)) for row in g) / 7)
    assert isolation(torch.tensor(g) * 0.1) > isolation(torch.tensor(g))  # cut off nodes cost


WEIGHTS = {"smoothness_weight": 0.7, "degree_weight": 0.3, "reward_weight": 0.2}


@pytest.mark.parametrize("fields", [{}, WEIGHTS, {"target_share": 0.5, "label_smoothing": 0.3}])
def test_the_loss_is_of_pseudo_targets_in_the_graph_of_the_rest(fields, fold):
    own = method(**fields)
    network, fitted = network_on(own, fold.source)
    order = torch.randperm(len(fold.source), generator=torch.Generator().manual_seed(4))
    batch = batch_of(own, fold.source, fold.source).take(order)
    source, n, state = fold.source.select(np.asarray(order)), len(order), numbers(network)
    count = round(fields.get("target_share", 0.25) * n)
    label = [None] * count + source.labels.tolist()[count:]
    raw = raw_phenotypes(source)
    both = nodes_of(fitted, batch["fc"].double().numpy(), raw, raw)
    graph, value = population_graph(state, fitted, both, raw, label, raw)
    logits, emb_i, emb_p = [], [None] * n, [None] * n
    for query in range(count):
        rows = [*range(count, n), query]
        imaging, phenotype, _, own_logits = inserted(own, state, both, graph, rows)
        logits.append(own_logits)
        for i, row in enumerate(rows):
            emb_i[row], emb_p[row] = imaging[i], phenotype[i]
    ce = oracle.cross_entropy(logits, source.labels.tolist()[:count], [0.8, 1.4], fields.get("label_smoothing", 0.1))
    _, (c_i, c_p) = fusion(oracle.under(state, "fusion"), emb_i, emb_p)

    def rough(e):
        return sum(graph[i, j] * ((e[i] - e[j]) ** 2).sum() / 2 for i in range(n) for j in range(n)) / n**2

    l_s, l_d, l_v = (fields.get(name, usual) for name, usual in zip(WEIGHTS, (1.0, 1e-4, 1e-2), strict=True))
    degree = -sum(math.log(sum(row)) for row in graph) / n
    reward = l_v / (value / n**2 + 1e-5)
    given = own.loss(network, batch)
    agrees(given["ce"], ce)
    total = c_i * (l_s * rough(emb_i) + l_d * degree) + c_p * (l_s * rough(emb_p) + l_d * degree + reward)
    agrees(sum(given.values()) - given["ce"], total)
    agrees(given["reward"], c_p * reward)
    agrees(given["degree"], l_d * degree)


def split(own, network, batch):
    count = own.pseudo_targets(len(batch))
    rows = torch.arange(len(batch))
    query, base = batch.take(rows[:count]), batch.take(rows[count:])
    return network.insert(network.nodes(base), base.label, network.nodes(query))


def test_labels_of_pseudo_targets_reach_only_the_cross_entropy(fold):
    own = method()
    network, _ = network_on(own, fold.source)
    batch = batch_of(own, fold.source, fold.source)
    count = own.pseudo_targets(len(batch))
    flipped = batch.label.clone()
    flipped[:count] = 1 - flipped[:count]
    other = dataclasses.replace(batch, label=flipped)
    assert torch.equal(split(own, network, other).logits, split(own, network, batch).logits)
    before, after = own.loss(network, batch), own.loss(network, other)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"ce"}
    flipped = batch.label.clone()
    flipped[count] = 1 - flipped[count]
    changed = split(own, network, dataclasses.replace(batch, label=flipped)).logits - split(own, network, batch).logits
    assert changed.abs().min() > 1e-7  # a label of the graph does reach them


def test_targets_neither_see_each_other_nor_change_source(fold):
    own = method()
    network, _ = network_on(own, fold.source)
    batch, source = batch_of(own, fold.source, fold.target), network.source
    base = source(source.fc, source.phenotypes)

    def insert(queries):
        return network.insert(base, source.label, network.nodes(queries))

    together, n = insert(batch), len(source.label)
    strange = dataclasses.replace(batch, features={"fc": 50 * batch["fc"]}, phenotypes=batch.phenotypes - 30)
    for i in range(len(batch)):
        alone = insert(batch.take(torch.tensor([i])))
        torch.testing.assert_close(alone.logits[0], together.logits[i], rtol=0, atol=1e-5)
        assert torch.equal(alone.imaging[:n], together.imaging[:n]) and torch.equal(alone.phenotype[:n], together.phenotype[:n])
    assert torch.equal(insert(strange).imaging[:n], together.imaging[:n])
    assert torch.isfinite(insert(strange).logits).all()
    probe = batch["fc"].clone().requires_grad_()
    network(dataclasses.replace(batch, features={"fc": probe}))[0].sum().backward()
    assert probe.grad[0].any() and not probe.grad[1:].any()
    assert torch.equal(network(dataclasses.replace(batch, label=1 - batch.label, site=batch.site + 1)), network(batch))


def test_every_parameter_learns_and_the_reward_reaches_its_coefficients(fold):
    own = method()
    network, _ = network_on(own, fold.source, seed=1)
    network.affinity.load_state_dict(Affinity(3).state_dict())
    batch = batch_of(own, fold.source, fold.source)
    sum(own.loss(network.train(), batch).values()).backward()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert network.affinity.coefficients.grad.all()
    network.zero_grad()
    own.loss(network, batch)["reward"].backward()
    assert network.fusion.imaging.weight.grad.any()  # through the modality weights
    network.zero_grad()
    for layer in network.fusion.children():  # now these are constant
        layer.weight.data.zero_()
    own.loss(network, batch)["reward"].backward()
    slope = network.affinity.coefficients.grad
    assert (slope[:, 0] < 0).all() and not slope[:, 1:].any()  # more reward, less loss


def test_dropout_of_edges_and_embeddings_is_in_force_in_training_and_only_there(fold):
    own = method()
    network, _ = network_on(own, fold.source)
    batch = batch_of(own, fold.source, fold.target)
    assert torch.equal(network(batch), network(batch))
    graph = Graph(torch.ones(300, 300), torch.ones(300), torch.ones(200, 300), torch.ones(200))
    thin = graph.thinned(0.3)
    assert torch.equal(thin.base_loop, graph.base_loop) and torch.equal(thin.query_loop, graph.query_loop)
    assert [float(one.mean()) for one in (thin.base, thin.query)] == pytest.approx([0.7, 0.7], abs=0.01)
    assert set(thin.base.unique().tolist()) == {0.0, 1.0}
    assert {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}
    network.train()
    for part in (network.imaging, network.phenotype):
        part.dropout.p = 0.0
    torch.manual_seed(0)
    first = network(batch)
    assert not torch.allclose(network(batch), first)
    network.edge_dropout = 0.0
    torch.testing.assert_close(network(batch), network(batch))


def test_features_are_those_that_sklearn_s_elimination_leaves():
    from sklearn.feature_selection import RFE
    from sklearn.linear_model import RidgeClassifier

    rng = np.random.default_rng(5)
    for subjects, features in ((25, 60), (60, 25)):
        x, y = rng.normal(size=(subjects, features)), rng.integers(0, 2, subjects).astype(np.int8)
        judge = RFE(RidgeClassifier(alpha=1.0), n_features_to_select=11, step=4).fit(x, y)
        np.testing.assert_array_equal(recursive_elimination(x, y, 11, 4, 1.0), np.flatnonzero(judge.support_))
        np.testing.assert_array_equal(recursive_elimination(x, y, 99, 4, 1.0), np.arange(features))


def test_what_is_fitted_on_source(fold):
    own = method()
    fitted, raw = fitted_on(own, fold.source), raw_phenotypes(fold.source)
    fc = own.features(fold.source, None)["fc"].numpy()
    np.testing.assert_array_equal(fitted["chosen"], recursive_elimination(fc.astype(float), fold.source.labels, 9, 2, 1.0))
    np.testing.assert_array_equal(fitted["fc"], fc[:, fitted["chosen"]])
    np.testing.assert_array_equal(fitted["label"], fold.source.labels)
    apart = distances(*nodes_of(fitted, fc.astype(float), raw, raw))
    n = len(raw)
    assert float(fitted["sigma"]) == pytest.approx(np.mean([apart[i, j] for i in range(n) for j in range(i)]), rel=1e-5)
    source = Source(fitted)
    nodes = source(source.fc, source.phenotypes)
    agrees(nodes.imaging.mean(0), np.zeros(9))
    agrees(nodes.imaging.std(0, correction=0), np.ones(9))
    agrees(squared_distances(nodes, nodes).sqrt()[0, 1:], apart[0, 1:])


def test_phenotype_codes_lie_between_the_source_s_extremes_and_categories_have_columns(fold):
    fitted = fitted_on(method(), fold.source)
    source, raw = Source(fitted), raw_phenotypes(fold.source)
    codes = source.codes(source.used(source.phenotypes)).numpy()
    assert codes.shape == (len(raw), 4) and codes.min() == 0 and codes.max() == 1
    np.testing.assert_array_equal(codes[:, :2], [[sex == 1, sex == 2] for sex in raw[:, 0]])
    np.testing.assert_allclose(codes[:, 2], (raw[:, 1] - raw[:, 1].min()) / np.ptp(raw[:, 1]), atol=1e-5)
    beyond = source.codes(torch.tensor([[9.0, 9.0, -9.0]]))  # a sex nobody has, older and less schooled than anyone
    assert beyond.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_vae_loss_and_its_means_tell_subjects_apart():
    vae, rng = randomised(PhenotypeVAE(3, 5, 4)), np.random.default_rng(6)
    codes, noise, state = rng.random((6, 3)), rng.normal(size=(6, 4)), numbers(vae)
    expected = 0.0
    for x, e in zip(codes, noise, strict=True):
        hidden = np.maximum(oracle.linear(oracle.under(state, "hidden"), x), 0)
        mean, log_variance = (oracle.linear(oracle.under(state, name), hidden) for name in ("mean", "log_variance"))
        z = mean + e * np.sqrt(np.exp(log_variance))
        hidden = np.maximum(oracle.linear(oracle.under(state, "decoder.0"), z), 0)
        decoded = [sigmoid(v) for v in oracle.linear(oracle.under(state, "decoder.2"), hidden)]
        expected += sum((decoded - x) ** 2)
        expected += 0.3 * -0.5 * sum(1 + lv - m**2 - math.exp(lv) for m, lv in zip(mean, log_variance, strict=True))
    agrees(vae.loss(torch.tensor(codes).float(), torch.tensor(noise).float(), 0.3), expected)


def test_a_full_weight_of_the_divergence_would_make_all_subjects_alike():
    sex, age = torch.arange(60) % 2, torch.rand(60, generator=torch.Generator().manual_seed(0))
    codes = torch.stack([sex.float(), 1.0 - sex, age], dim=1)
    apart = {}
    for weight in (MMGTUNets().kl_weight, 1.0):
        torch.manual_seed(0)
        vae = PhenotypeVAE(3, 32, 20)
        vae.pretrain(codes, 300, 100, 5e-3, 5e-4, weight)
        mean = vae.mean(torch.relu(vae.hidden(codes))).detach()
        apart[weight] = float(torch.cdist(mean[sex == 0], mean[sex == 1]).mean())
    assert apart[0.01] > 3 and apart[1.0] < 0.5


def test_the_vae_stops_when_its_loss_no_longer_falls():
    torch.manual_seed(0)
    vae, seen = PhenotypeVAE(2, 4, 3), []
    plain = vae.loss
    vae.loss = lambda *given: seen.append(0) or plain(*given)
    vae.pretrain(torch.rand(5, 2), 500, 7, 0.0, 0.0, 1.0)  # a rate of 0: only the noise changes
    assert 8 <= len(seen) < 200


@pytest.mark.parametrize("inputs", [(), ("education",)])
def test_without_phenotypes_that_vary_the_affinity_is_one_constant_graph(inputs, fold, tmp_path):
    table = fold.source.phenotypes.assign(education=np.nan)
    source = dataclasses.replace(fold.source, phenotypes=table, inputs=inputs)
    own = method(epochs=2, warmup=1)
    network, fitted = network_on(own, source)
    target = fold.target.with_inputs(inputs)
    batch, everyone = batch_of(own, source, target), batch_of(own, source, source)
    base, query = network.nodes(everyone), network.nodes(batch)
    assert network.source.agree(query, base).shape == (1, len(target), len(source)) and len(fitted["varied"]) == 0
    assert network.source.agree(query, base).all() and (base.latent == base.latent[0]).all()
    graph, _ = network.graph(base, everyone.label, query)
    ratio = graph.query / network.source.similarity(query, base)
    agrees(ratio, np.full((len(target), len(source)), sigmoid(network.affinity.coefficients[0, 2].item())))
    proba = own.fit(source, seed=0).predict_proba(target)
    assert np.isfinite(proba).all()
    other = dataclasses.replace(target, phenotypes=target.phenotypes.assign(**dict.fromkeys(inputs, 7.0)))
    np.testing.assert_array_equal(Method.load(own.save(tmp_path / "model")).predict_proba(other), proba)


def test_phenotypes_that_do_not_vary_are_left_out(fold):
    table = fold.source.phenotypes.assign(sex=1.0)
    source = dataclasses.replace(fold.source, phenotypes=table)
    scaler = PhenotypeScaler.fit(source)
    rules = phenotype_rules(scaler, scaler.transform(source).astype(np.float32), 2.0, 0.25)
    assert rules["varied"].tolist() == [1, 2] and len(rules["tolerance"]) == 2
    assert rules["code_column"].tolist() == [0, 1] and (rules["code_span"] > 0).all()


def test_batches_hold_everybody_and_each_plays_the_target_in_turn():
    own, label = MMGTUNets(), torch.arange(40) % 2
    order = torch.Generator().manual_seed(0)
    batches = own.batches(label, label, order)
    assert len(batches) == 5 and all(sorted(one.tolist()) == list(range(40)) for one in batches)
    assert sorted(torch.cat([one[: own.pseudo_targets(40)] for one in batches]).tolist()) == list(range(40))
    assert not torch.equal(own.batches(label, label, order)[0], batches[0])
    assert [own.pseudo_targets(n) for n in (740, 10, 3)] == [148, 2, 2]
