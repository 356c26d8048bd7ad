"""M²LG-DG on connectomes: centring, scaling, members, variants, log-Euclidean edges, and what its explanations find."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.linalg import logm
from sklearn.covariance import ledoit_wolf

from m2lgdg import METHODS, Model, leave_one_site_out, make_cohort
from m2lgdg.connectivity import fc_features, frame_weighted, upper_triangle
from m2lgdg.deep import Batch, Shape
from m2lgdg.devices import fast_form, plain_form
from m2lgdg.explain.attribution import explain
from m2lgdg.fast import m2lgdg_connectome as fast
from m2lgdg.graph import group_graph
from m2lgdg.methods import m2lgdg
from m2lgdg.methods import m2lgdg_connectome as plain
from m2lgdg.methods.m2lgdg_connectome import LOG_EDGES, M2LGDGConnectome
from m2lgdg.methods.solvers import association
from m2lgdg.methods.within_sites import balance
from m2lgdg.metrics import logit
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import create as make

NAME = "m2lgdg-connectome"
CPU = torch.device("cpu")
SMALL = dict(METHODS[NAME].variants["small"]) | {"epochs": 2, "warmup": 1, "connectivity": "fc"}


@pytest.fixture(scope="module")
def fold():
    cohort = make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), missing=0.0, seed=1)
    return next(leave_one_site_out(cohort, ["d"]))


@pytest.fixture(scope="module")
def fitted(fold):
    return make(NAME, **SMALL).fit(fold.source, seed=0)


def fits(source, monkeypatch, **fields):
    """A fitted method, and what it held while it was trained: batches as the networks saw them, and all of source."""
    seen = []
    kept = M2LGDGConnectome.centred

    def centred(self, batch):
        seen.append((batch, kept(self, batch)))
        return seen[-1][1]

    monkeypatch.setattr(M2LGDGConnectome, "centred", centred)
    return make(NAME, **SMALL | fields).fit(source, seed=0), seen


def scaled(method, cohort):
    scaler = PhenotypeScaler.restore(tuple(method.facts_["inputs"]), method.state_, "scaler")
    return method.make_batch(cohort, scaler, CPU)


# Centring, scaling, confounds.


def test_training_is_centred_by_site_and_a_target_by_source(fold, monkeypatch):
    method, seen = fits(fold.source, monkeypatch, members=1, batch_size=1000, validation_share=0.0)
    given, centred = seen[-1]
    mean = method.state_["fitted.mean"]
    weights, sites, labels = balance(fold.source), given.site.numpy(), given.label.numpy()
    assert weights.max() != weights.min()
    for site in range(3):
        rows = centred["fc"].numpy()[sites == site]
        by_class = [rows[labels[sites == site] == label].mean(axis=0) for label in (0, 1)]
        np.testing.assert_allclose(np.mean(by_class, axis=0), mean, atol=1e-5)
    np.testing.assert_array_equal(scaled(method, fold.target)["fc"], fc_features(fold.target.series))
    assert "offsets" not in str(list(method.state_)) and method._offsets is None
    _, seen = fits(fold.source, monkeypatch, centring="source", validation_share=0.0, log_euclidean=False)
    torch.testing.assert_close(seen[-1][1]["fc"], seen[-1][0]["fc"])


def test_edges_are_scaled_by_their_association_with_the_label(fold):
    fields = SMALL | {"validation_share": 0.0, "epochs": 1, "warmup": 0}
    scalings = [{"scaling": "association", "scaling_power": power} for power in (1.0, 3.0)] + [{"scaling": "sd"}]
    method, cubed, plainly = (make(NAME, **fields, **scaling).fit(fold.source, seed=0) for scaling in scalings)
    edges, weights = fc_features(fold.source.series).astype(np.float64), balance(fold.source)
    signs = 2.0 * fold.source.labels - 1
    centred = edges.copy()
    for site in "abc":
        here = fold.source.sites == site
        centred[here] -= np.average(edges[here], axis=0, weights=weights[here])
    sd = np.sqrt(np.average(centred**2, axis=0, weights=weights))
    np.testing.assert_allclose(plainly.state_["fitted.scale"], 1 / sd, rtol=1e-4)
    x = centred / sd
    r = np.abs((weights * signs) @ x) / np.sqrt((x**2).sum(axis=0) * weights.sum())
    r = np.sqrt(np.maximum(r**2 - 1 / len(x), 0)) + 0.05 * r.mean()
    r *= np.sqrt((x**2).sum() / (x**2 * r**2).sum())
    np.testing.assert_allclose(method.state_["fitted.scale"], r / sd, rtol=1e-3)
    power = r**3 * np.sqrt((r**2).sum() / (r**6).sum())
    np.testing.assert_allclose(cubed.state_["fitted.scale"], power / sd, rtol=3e-3)


def test_confounds_are_regressed_out_within_sites(fold):
    fields = SMALL | {"validation_share": 0.0, "epochs": 1, "warmup": 0, "confounds": ("age", "motion")}
    method = make(NAME, **fields).fit(fold.source, seed=0)
    age = fold.source.phenotypes["age"].to_numpy(dtype=np.float64)
    age = (age - age.mean()) / age.std()
    edges, weights = fc_features(fold.source.series).astype(np.float64), balance(fold.source)
    for site in "abc":
        here = fold.source.sites == site
        age[here] -= np.average(age[here], weights=weights[here])
        edges[here] -= np.average(edges[here], axis=0, weights=weights[here])
    slope = (weights * age) @ edges / (weights * age**2).sum()
    inputs = method.facts_["inputs"]
    np.testing.assert_allclose(method.state_["fitted.slopes"][inputs.index("age")], slope, atol=1e-5)
    assert not method.state_["fitted.slopes"][[i for i, name in enumerate(inputs) if name != "age"]].any()
    network = method.network().networks[0]
    batch = scaled(method, fold.target.select([0, 1]))
    expected = (batch["fc"] - batch.phenotypes @ network.slopes - network.mean) * network.scale
    np.testing.assert_allclose(upper_triangle(network.rows(batch).numpy()), expected, atol=1e-5)


def test_rows_are_symmetric_and_dropout_leaves_out_edges(fold, fitted):
    network = fitted.network().networks[0]
    batch = scaled(fitted, fold.target)
    rows = network.rows(batch)
    torch.testing.assert_close(rows, rows.mT)
    assert not rows.diagonal(dim1=1, dim2=2).any()
    network.train()
    n = rows.shape[1]
    network.config = dataclasses.replace(fitted, edge_dropout=0.5)
    dropped = network.rows(batch)
    torch.testing.assert_close(dropped, dropped.mT)
    empty = (dropped == 0).float().mean() - 1 / n
    assert 0.4 < empty < 0.6


def test_the_graph_is_the_papers(fold):
    method = make(NAME, **SMALL | {"validation_share": 0.0, "epochs": 1, "warmup": 0}).fit(fold.source, seed=0)
    np.testing.assert_array_equal(method.state_["fitted.adjacency"], group_graph(fold.source.series, 80.0))


# Members.


def test_members_have_their_own_weights_and_orders_and_are_averaged(fold, fitted):
    order = torch.Generator().manual_seed(0)
    site, label = torch.zeros(40, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    first, *_ = fitted.batches(site, label, order)
    assert len(first) == 32
    assert first[:16].tolist() != first[16:].tolist()
    network = fitted.network()
    one, other = network.networks
    assert not torch.equal(one.combine.weight, other.combine.weight)
    batch = scaled(fitted, fold.target)
    with torch.no_grad():
        parts, each = network.parts(batch), [one.parts(batch), other.parts(network.of_logarithms(batch))]
    for name in ("logits", "gate"):
        torch.testing.assert_close(parts[name], (each[0][name] + each[1][name]) / 2)
    assert parts["fused"].shape[1] == 2 * each[0]["fused"].shape[1]


def test_a_member_is_trained_by_its_own_loss(fold, monkeypatch):
    """The gradient of the second member is clipped by its own norm, whatever the first one's."""
    method = make(NAME, **SMALL | {"clip": 1e-3, "update_rule": "sgd", "learning_rate": 1.0, "weight_decay": 0.0})
    norms = []
    kept = M2LGDGConnectome.step

    def step(self, network, batch, optimizer):
        before = [torch.cat([p.detach().flatten() for p in one.parameters()]).clone() for one in network.networks]
        rate = optimizer.param_groups[0]["lr"]
        terms = kept(self, network, batch, optimizer)
        after = [torch.cat([p.detach().flatten() for p in one.parameters()]) for one in network.networks]
        norms.extend(float((a - b).norm()) / rate for a, b in zip(after, before, strict=True))
        return terms

    monkeypatch.setattr(M2LGDGConnectome, "step", step)
    method.fit(fold.source, seed=0)
    np.testing.assert_allclose(norms[:4], 1e-3, rtol=2e-2)


def test_the_last_epoch_is_kept(fold):
    assert make(NAME, **SMALL | {"epochs": 4}).fit(fold.source, seed=0).facts_["best_epoch"] == 4


# Plain and fast forms.


def shape_of(n, draw):
    edges = n * (n - 1) // 2
    fitted = {"adjacency": (draw.random((n, n)) > 0.5), "mean": draw.normal(size=edges), "scale": draw.random(edges)}
    fitted |= {"slopes": draw.normal(size=(3, edges))}
    fitted |= {f"log.{name}": value[..., ::-1] for name, value in fitted.items() if name != "adjacency"}
    return Shape(n, 200, 3, 4, {name: value.astype(np.float32) for name, value in fitted.items()})


@pytest.mark.parametrize("variant", ["M1", "M2", "C1", "C2", "C3", "C4"])
def test_members_together_have_the_losses_and_gradients_of_one_after_another(variant):
    changes = {
        "members": 3,
        "dropout": 0.0,
        "readout_dropout": 0.0,
        "edge_dropout": 0.0,
        "confounds": ("age",),
        "chebyshev_order": 4,
    }
    config = M2LGDGConnectome(**SMALL | M2LGDGConnectome.variants[variant] | changes)
    config.class_weight = torch.tensor([0.8, 1.4])
    draw = np.random.default_rng(0)
    drawn = {name: torch.from_numpy(draw.normal(size=(24, 36)).astype(np.float32)) for name in ("fc", "log_edges")}
    features = drawn if config.imaging else {}
    phenotypes = torch.from_numpy(draw.normal(size=(24, 3 if config.phenotypes else 0)).astype(np.float32))
    batch = Batch(features, phenotypes, torch.arange(24) % 2, torch.arange(24) % 4)
    shape = dataclasses.replace(shape_of(9, draw), n_inputs=phenotypes.shape[1])
    if not config.imaging:
        shape = dataclasses.replace(shape, fitted={})
    results = []
    for form in (plain_form, fast_form):
        torch.manual_seed(0)
        network = form(plain.Members(shape, config)).train()
        loss = super(M2LGDGConnectome, config).loss
        if form is plain_form:
            assert type(network) is plain.Members
        terms = network.each(loss, batch)
        sum(term.sum() for term in terms.values()).backward()
        gradients = gradients_of(network)
        with torch.no_grad():
            results.append((terms, gradients, dict(network.named_buffers()), {"logits": network.eval()(batch)}))
    for one, other in zip(*results, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value is not None, name
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)
    assert len(set(results[0][0]["ce"].tolist())) == 3


def gradients_of(network):
    """Gradient of each weight of each member; in the fast form they are rows of those of the stack."""
    if type(network) is plain.Members:
        return {name: value.grad for name, value in network.named_parameters()}
    each = dict(network.stack().named_parameters())
    return {f"networks.{i}.{name}": value.grad[i] for i in range(len(network.networks)) for name, value in each.items()}


def test_it_inherits_the_framework():
    network = plain.Members(shape_of(9, np.random.default_rng(0)), M2LGDGConnectome(**SMALL)).networks[0]
    assert isinstance(network, m2lgdg.Network)
    own = {name for name in vars(plain.Network) if not name.startswith("__")}
    assert own <= {"encoders", "encode", "rows", "config"}
    assert {type(layer) for layer in network.fusion} == {m2lgdg.CrossAttention}
    for variant in ("M1", "M2", "C1", "C2", "C3", "C4"):
        paper = m2lgdg.M2LGDG.variants[variant] | ({"tables": "none"} if variant == "M2" else {})
        assert M2LGDGConnectome.variants[variant] == paper
    assert {"decomposition_weight", "contrastive_weight", "temperature", "percentile"} <= set(M2LGDGConnectome.space)


@pytest.mark.parametrize("variant", ["M1", "M2", "C1", "C2", "C3", "scan"])
def test_variants_differ_in_their_losses_and_in_what_they_see(fold, variant):
    method = make(NAME, **SMALL | M2LGDGConnectome.variants[variant]).fit(fold.source, seed=0)
    parts = {"similarity", "orthogonality", "difference"}
    expected = {"M1": {"ce"}, "M2": {"ce"}, "C1": {"ce", "contrast"}, "scan": {"ce", "contrast"}}
    assert set(method.facts_["losses"]) == expected.get(variant, {"ce", *parts} | ({"contrast"} if variant == "C2" else set()))
    before = method.predict_proba(fold.target)
    noise = [np.random.default_rng(i).normal(size=one.shape).astype(np.float32) for i, one in enumerate(fold.target.series)]
    changed = method.predict_proba(dataclasses.replace(fold.target, series=noise))
    assert np.array_equal(changed, before) == (variant == "M1")
    older = fold.target.phenotypes.assign(age=fold.target.phenotypes["age"] + 9.0)
    changed = method.predict_proba(dataclasses.replace(fold.target, phenotypes=older))
    assert np.array_equal(changed, before) == (variant in ("M2", "scan"))


# Explanations.


@pytest.mark.long
def test_planted_edges_are_among_the_first_twenty():
    planted = {"n_disease_rois": 4, "n_disease_edges": 8, "roi_effect": 0.0, "edge_effect": 1.5, "phenotype_effect": 0.0}
    cohort = make_cohort("tiny", sizes=dict.fromkeys("abcd", 50), n_rois=24, missing=0.0, seed=3, **planted)
    fold = next(leave_one_site_out(cohort, ["d"]))
    method = make(NAME, **M2LGDGConnectome.variants["small"]).fit(fold.source, seed=0)
    found = explain(method, fold.target, steps=16)
    first = {frozenset(pair) for pair in found.edges[["roi", "other roi"]].to_numpy()[:20].tolist()}
    assert {frozenset(pair) for pair in cohort.truth["edges"]} <= first  # 8 of 276
    assert {"edges", "phenotypes", "gate", "map"} <= set(found.filled)
    assert found.about["baseline"].startswith("mean of source")


# Variant `plus`.


@pytest.fixture(scope="module")
def plus(fold):
    return make(NAME, **SMALL | {"plus": True}).fit(fold.source, seed=0)


def test_without_its_networks_plus_is_the_linear_model(fold, plus):
    head = make("connectome-adaptive", phenotypes=True).fit(fold.source)
    bare = dataclasses.replace(plus)
    bare.facts_, bare.state_ = plus.facts_, plus.state_ | {"network.network_slope": np.zeros((), dtype=np.float32)}
    expected = logit(head.predict_proba(fold.target)[:, 1])
    np.testing.assert_allclose(bare.decision(bare.visible(fold.target)), expected, atol=1e-3)
    assert plus.uses_amplitude
    weighted = dataclasses.replace(plus)
    weighted.facts_, weighted.state_ = plus.facts_, plus.state_ | {"network.network_slope": np.array(0.5, dtype=np.float32)}
    alone = make(NAME, **SMALL)
    alone.facts_ = plus.facts_
    alone.state_ = {
        name: value for name, value in plus.state_.items() if "head" not in name and name != "network.network_slope"
    }
    added = weighted.decision(weighted.visible(fold.target)) - bare.decision(bare.visible(fold.target))
    np.testing.assert_allclose(added, 0.5 * alone.decision(alone.visible(fold.target)), atol=1e-3)


@pytest.mark.long
def test_plus_decides_by_the_mean_of_both_logits(fold):
    fields = SMALL | {"epochs": 4}
    models = [make(NAME, **fields), make("connectome-adaptive", phenotypes=True), make(NAME, **fields | {"plus": True})]
    network, head, both = (logit(model.fit(fold.source, seed=0).predict_proba(fold.target)[:, 1]) for model in models)
    exact = np.maximum(abs(network), abs(head)) < 12  # beyond, `logit` is bounded
    np.testing.assert_allclose(both[exact], (network + head)[exact] / 2, atol=1e-3)
    assert min(network.std(), head.std()) > 0.1 and exact.sum() > 20
    assert models[2]._source is None and models[2]._linear is None


def test_connectivity_without_unusual_time_points(fold):
    method = make(NAME, **SMALL | {"connectivity": "steady", "plus": True}).fit(fold.source, seed=0)
    batch = scaled(method, fold.target)
    np.testing.assert_array_equal(batch["steady"], fc_features(fold.target.series, frame_weighted))
    assert set(batch.features) == {"steady", "log_euclidean", "swings", "amplitude", "log_edges"}
    assert np.isfinite(method.predict_proba(fold.target)).all()


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_the_fast_convolution_has_every_chebyshev_order(order):
    torch.manual_seed(0)
    layer, both = plain.GraphConvolution(7, 4, order).double(), fast.GraphConvolution(7, 4, order).double()
    layer.bias.data.normal_()
    both.weights.data = torch.stack([torch.randn_like(layer.weights), layer.weights.data])  # of another member, and these
    both.bias.data = torch.stack([torch.randn_like(layer.bias), layer.bias.data])
    nodes = torch.randn(2, 3, 9, 7, dtype=torch.float64)  # (member, subject, roi, width)
    operator = torch.randn(2, 9, 9, dtype=torch.float64) / 9
    expected = layer(nodes[1], operator[1])
    found = both(nodes.transpose(1, 2), operator).transpose(1, 2)
    torch.testing.assert_close(found[1], expected, rtol=1e-10, atol=1e-12)
    slow = sum(torch.from_numpy(chebyshev_matrix(operator[1].numpy(), k)) @ nodes[1] @ layer.weights[k] for k in range(order))
    torch.testing.assert_close(expected, slow + layer.bias, rtol=1e-10, atol=1e-12)


def chebyshev_matrix(operator, k):
    """T_k of a matrix by its eigenvalues: cos(k arccos x), for complex x."""
    values, vectors = np.linalg.eig(operator.astype(complex))
    return (vectors @ np.diag(np.cos(k * np.arccos(values))) @ np.linalg.inv(vectors)).real


# Cohorts of connectomes.


@pytest.mark.parametrize("variant", ["plus", "M1"])
def test_connectomes_are_learned_from_as_plain_fc_of_series(fold, variant):
    """The network and, in variant `plus`, its linear head; without imaging, nothing of the scan is used."""
    fields = (
        SMALL | dict(METHODS[NAME].variants[variant]) | {"log_euclidean": False}
    )  # its eigenvalues are not the same bit by bit
    matrices, target = fold.source.to_connectomes(), fold.target.to_connectomes()
    found = make(NAME, **fields | {"connectivity": "steady"}).fit(matrices, seed=0)
    alone = make(NAME, **fields | {"plus": False}).fit(fold.source, seed=0)
    for name, value in alone.state_.items():
        if name not in ("calibration", "network.network_slope"):
            np.testing.assert_array_equal(found.state_[name], value, err_msg=name)
    if variant == "M1":
        np.testing.assert_array_equal(found.predict_proba(target), alone.predict_proba(fold.target))
        assert not any("connectomes" in note for note in found.facts_["notes"])
        return
    head = make("connectome-adaptive", phenotypes=True).fit(matrices)
    mean = (logit(alone.predict_proba(fold.target)[:, 1]) + logit(head.predict_proba(target)[:, 1])) / 2
    np.testing.assert_allclose(logit(found.predict_proba(target)[:, 1]), mean, atol=1e-3)
    assert set(scaled(found, target).features) == {"fc", "log_euclidean"} and not found.uses_amplitude
    assert head.facts_["notes"][0] in found.facts_["notes"]


def test_plain_fc_that_was_asked_for_needs_no_note(fold):
    steady, plain = (
        make(NAME, **SMALL | {"connectivity": view}).fit(fold.source.to_connectomes(), seed=0).facts_["notes"]
        for view in ("steady", "fc")
    )
    assert [note for note in steady if note not in plain] == [note for note in steady if "plain FC" in note]
    assert len(steady) == len(plain) + 1


# Members that read log-Euclidean edges.


@pytest.fixture(scope="module")
def three(fold):
    return make(NAME, **SMALL | {"members": 3}).fit(fold.source, seed=0)


def by_hand(series):
    """Edges of one subject, by scikit-learn's covariance and scipy's logarithm."""
    r = np.corrcoef(series.astype(np.float64).T)
    return np.sqrt(2) * upper_triangle(logm(ledoit_wolf(r - r.mean(axis=0), assume_centered=True)[0]))


def test_half_of_the_members_read_rows_of_the_log_euclidean_form(fold, three):
    network, batch = plain_form(three.network()), scaled(three, fold.target)
    assert network.of_fc == 2
    edges = np.stack([by_hand(one) for one in fold.target.series])
    np.testing.assert_allclose(batch[LOG_EDGES], edges, atol=1e-4)
    seen = {}
    for i, member in enumerate(network.networks):
        member.encode = lambda given, i=i, kept=member.encode, rows=member.rows: (seen.update({i: rows(given)}), kept(given))[1]
    with torch.no_grad():
        network(batch)
    mean, scale = (three.state_[f"fitted.log.{name}"] for name in ("mean", "scale"))
    np.testing.assert_allclose(upper_triangle(seen[2].numpy()), (edges - mean) * scale, atol=1e-3)
    fc = (fc_features(fold.target.series) - three.state_["fitted.mean"]) * three.state_["fitted.scale"]
    for i in range(2):
        np.testing.assert_allclose(upper_triangle(seen[i].numpy()), fc, atol=1e-4)


def test_in_training_each_member_has_its_own_edges_and_only_fc_is_centred_by_site(fold, monkeypatch):
    fields = {"members": 3, "batch_size": 90, "validation_share": 0.0, "epochs": 1, "warmup": 0}
    method, seen = fits(fold.source, monkeypatch, **fields)
    given, moved = seen[0]
    size = len(given) // 3
    assert set(moved.features) == {"fc"} and len(moved["fc"]) == len(given)
    for i in range(2):
        rows = slice(i * size, (i + 1) * size)
        site, label, own = given.site[rows].numpy(), given.label[rows].numpy(), given["fc"][rows].numpy()
        for each in range(3):
            centre = np.mean([own[(site == each) & (label == one)].mean(axis=0) for one in (0, 1)], axis=0)
            expected = own[site == each] - centre + method.state_["fitted.mean"]
            np.testing.assert_allclose(moved["fc"][rows].numpy()[site == each], expected, atol=2e-5)
    np.testing.assert_array_equal(moved["fc"][2 * size :], given[LOG_EDGES][2 * size :])


@pytest.mark.parametrize(
    "fields", [{"members": 1}, {"log_euclidean": False}, {"imaging": False, "contrastive_weight": 0.0}], ids=str
)
def test_without_log_euclidean_edges_nothing_of_them_is_fitted(fold, fields):
    method = make(NAME, **SMALL | fields).fit(fold.source, seed=0)
    assert not any(name.startswith("fitted.log.") for name in method.state_)
    assert LOG_EDGES not in scaled(method, fold.target).features
    with_field = make(NAME, **SMALL | fields | {"log_euclidean": True}).fit(fold.source, seed=0)
    if "log_euclidean" not in fields:
        np.testing.assert_array_equal(with_field.predict_proba(fold.target), method.predict_proba(fold.target))


def test_a_model_from_before_reads_fc_only(fold, tmp_path):
    before = make(NAME, **SMALL | {"log_euclidean": False}).fit(fold.source, seed=0)
    loaded = Model.load(Model(before).save(tmp_path / "model"))
    loaded.method.log_euclidean = True  # the default, which a folder without the field gets
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), before.predict_proba(fold.target))


def test_a_saved_model_predicts_the_same(fold, three, tmp_path):
    loaded = Model.load(Model(three).save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), three.predict_proba(fold.target))


@pytest.mark.parametrize("scaling", ["association", "sd"])
def test_log_euclidean_edges_have_unit_variance_over_all_sites_and_one_scale(fold, scaling):
    fields = {"validation_share": 0.0, "epochs": 1, "warmup": 0, "scaling": scaling, "scaling_power": 3.0, "centring": "site"}
    method = make(NAME, **SMALL | fields).fit(fold.source, seed=0)
    edges, weights = np.stack([by_hand(one) for one in fold.source.series]), balance(fold.source)
    mean = np.average(edges, axis=0, weights=weights)
    np.testing.assert_allclose(method.state_["fitted.log.mean"], mean, atol=1e-4)
    standard = (edges - mean) / np.sqrt(np.average((edges - mean) ** 2, axis=0, weights=weights))
    signs = 2.0 * fold.source.labels - 1
    one = np.sqrt(np.mean(association(standard, signs, weights) ** 2)) if scaling == "association" else 1.0
    np.testing.assert_allclose(method.state_["fitted.log.scale"] * (edges - mean).std(axis=0), one, rtol=0.1)
    np.testing.assert_allclose((edges - mean) * method.state_["fitted.log.scale"], one * standard, rtol=1e-3, atol=1e-3)
    fc = method.state_["fitted.scale"] * fc_features(fold.source.series).std(axis=0)
    assert (np.ptp(fc) > 10 * np.median(fc)) == (scaling == "association")  # the third power, of FC alone


def test_connectomes_have_the_log_euclidean_edges_of_their_series(fold):
    series = make(NAME, **SMALL).fit(fold.source, seed=0)
    matrices = make(NAME, **SMALL).fit(fold.source.to_connectomes(), seed=0)
    np.testing.assert_allclose(matrices.state_["fitted.log.mean"], series.state_["fitted.log.mean"], rtol=1e-3, atol=1e-4)
    found = matrices.predict_proba(fold.target.to_connectomes())
    np.testing.assert_allclose(found, series.predict_proba(fold.target), atol=1e-3)


def test_attributions_of_both_kinds_of_edges_sum_to_the_decision(fold, three):
    found = explain(three, fold.target.select(np.arange(4)), of="margin", steps=64)
    assert {"fc", LOG_EDGES} <= set(found.rois.columns)
    assert found.rois[LOG_EDGES].to_numpy().all() and found.rois["fc"].to_numpy().all()
    assert found.error()["median_relative"] < 0.05
    baselines = three.network().baselines()
    np.testing.assert_array_equal(baselines[LOG_EDGES], three.state_["fitted.log.mean"])
    np.testing.assert_array_equal(baselines["fc"], three.state_["fitted.mean"])


def test_plus_with_members_that_read_log_euclidean_edges(fold):
    method = make(NAME, **SMALL | {"plus": True}).fit(fold.source, seed=0)
    changed = dataclasses.replace(method)
    changed.facts_, changed.state_ = method.facts_, dict(method.state_)
    changed.state_["fitted.log.scale"] = 0 * method.state_["fitted.log.scale"]
    assert np.abs(changed.predict_proba(fold.target) - method.predict_proba(fold.target)).max() > 1e-6
