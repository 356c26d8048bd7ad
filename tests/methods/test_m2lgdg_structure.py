"""Tables of brain structure as modalities of M²LG-DG: cleaning, tokens, gate, losses, missing rows, variants."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from m2lgdg import METHODS, InputError, Model, leave_one_site_out, make_cohort
from m2lgdg.deep import Batch, Shape
from m2lgdg.deploy.onnx import export_onnx, prepared, run_onnx
from m2lgdg.devices import fast_form, plain_form
from m2lgdg.explain.attribution import explain
from m2lgdg.explain.gradients import integrated_gradients
from m2lgdg.fast import m2lgdg_connectome as fast
from m2lgdg.losses import difference_loss, orthogonality_loss, similarity_loss
from m2lgdg.methods import m2lgdg
from m2lgdg.methods import m2lgdg_connectome as plain
from m2lgdg.methods.m2lgdg_connectome import M2LGDGConnectome
from m2lgdg.metrics import auc, logit
from m2lgdg.model.out_of_distribution import SourceDistribution
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import create as make

NAME = "m2lgdg-connectome"
CPU = torch.device("cpu")
SMALL = dict(METHODS[NAME].variants["small"]) | {"epochs": 2, "warmup": 1, "connectivity": "fc", "table_dropout": 0.0}
EARLIER = [0.190861, 0.670046, 0.014712, 0.381293, 0.208404]
ICV = "EstimatedTotalIntraCranialVol"


def with_tables(cohort, seed=0, effect=1.0, lacking=()):
    """Thickness with an effect of the label, of age and of the site, and volumes that grow with the head."""
    draw = np.random.default_rng(seed)
    age = cohort.phenotypes["age"].to_numpy(dtype=np.float64)
    site = np.array([cohort.site_names.index(one) for one in cohort.sites])
    thickness = draw.normal(size=(len(cohort), 6)) - 0.2 * (age - age.mean())[:, None] + 0.5 * site[:, None]
    thickness[:, 0] += effect * cohort.labels
    head = 1.5e6 + 1e5 * draw.normal(size=len(cohort))
    volumes = np.column_stack([head, 4e-3 * head + 300 * draw.normal(size=len(cohort)), draw.normal(size=len(cohort))])
    tables = {
        "thickness": pd.DataFrame(2.5 + 0.1 * thickness, columns=[f"region {i}" for i in range(6)]),
        "aseg": pd.DataFrame(volumes, columns=[ICV, "hippocampus", "noise"]),
    }
    tables["thickness"].iloc[list(lacking)] = np.nan
    return cohort.with_tables({name: table.set_axis(cohort.subjects, axis=0) for name, table in tables.items()})


@pytest.fixture(scope="module")
def bare():
    return make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), missing=0.0, seed=1)


@pytest.fixture(scope="module")
def fold(bare):
    return next(leave_one_site_out(with_tables(bare, lacking=(3, 40, 100)), ["d"]))


@pytest.fixture(scope="module")
def fitted(fold):
    return make(NAME, **SMALL).fit(fold.source, seed=0)


def batch_of(method, cohort):
    scaler = PhenotypeScaler.restore(tuple(method.facts_["inputs"]), method.state_, "scaler")
    return method.make_batch(method.visible(cohort), scaler, CPU)


# What stays as it was.


def test_without_tables_the_method_is_that_of_two_modalities(bare, fold):
    source = next(leave_one_site_out(bare, ["d"])).source
    before = make(NAME, **SMALL).fit(source, seed=0)
    without = make(NAME, **SMALL | {"tables": "none"}).fit(fold.source, seed=0)
    assert before.state_.keys() == without.state_.keys() and "tables" not in before.facts_
    for name, value in before.state_.items():
        np.testing.assert_array_equal(without.state_[name], value)
    np.testing.assert_array_equal(without.predict_proba(fold.target), before.predict_proba(fold.target))


def test_weights_are_drawn_in_the_order_of_the_papers_network():
    class Paper(m2lgdg.Network):
        encoders = plain.Network.encoders

    fitted = {
        "adjacency": np.ones((5, 5), dtype=np.float32),
        "mean": np.zeros(10),
        "scale": np.ones(10),
        "slopes": np.zeros((3, 10)),
    }
    shape, config = Shape(5, 200, 3, 4, fitted), M2LGDGConnectome(**SMALL)
    states = []
    for kind in (Paper, plain.Network):
        torch.manual_seed(0)
        states.append(kind(shape, config).state_dict())
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_numbers_of_an_earlier_version():
    """Of version 0.1.0 on the same cohort; not bit by bit, which holds on one kind of machine only."""
    cohort = make_cohort("tiny", sizes=dict.fromkeys("abcd", 30), missing=0.1, seed=1)
    fold = next(leave_one_site_out(cohort, ["d"]))
    fields = dict(METHODS[NAME].variants["small"]) | {"epochs": 2, "warmup": 1, "log_euclidean": False}
    fields["readout_dropout"] = 0.0  # masks are drawn in another way since
    found = make(NAME, **fields).fit(fold.source, seed=0).predict_proba(fold.target)[:5, 1]
    np.testing.assert_allclose(found, EARLIER, atol=1e-3)


# Features.


def test_features_have_confounds_out_and_are_centred_by_site_in_training(fold, monkeypatch):
    seen = []
    kept = M2LGDGConnectome.centred

    def centred(self, batch):
        seen.append(kept(self, batch))
        return seen[-1]

    monkeypatch.setattr(M2LGDGConnectome, "centred", centred)
    method = make(NAME, **SMALL | {"members": 1, "batch_size": 1000, "validation_share": 0.0}).fit(fold.source, seed=0)
    given = seen[-1]
    values, sites, labels = given["table.thickness"].numpy(), given.site.numpy(), given.label.numpy()
    absent = ~values.any(axis=1)
    assert absent.sum() == 2
    for site in range(3):
        by_class = [values[(sites == site) & (labels == label) & ~absent].mean(axis=0) for label in (0, 1)]
        np.testing.assert_allclose(np.mean(by_class, axis=0), 0.0, atol=0.05)  # absent ones count as the mean of source
    assert np.abs(values[:, 1:].std(axis=0) - 1).max() < 0.2
    order = np.argsort(fold.source.subjects, kind="stable")
    age = fold.source.phenotypes["age"].to_numpy(dtype=np.float64)[order]
    rows = method.table_features(method.visible(fold.source).select(order))["table.thickness"]
    for site in fold.source.site_names:
        here = (fold.source.sites[order] == site) & rows.any(axis=1)
        assert abs(np.corrcoef(age[here], rows[here, 1])[0, 1]) < 0.35
    # Head size itself has nothing left; what grows with it has only its own noise.
    aseg = method.table_features(method.visible(fold.source))["table.aseg"]
    assert np.abs(aseg[:, 0]).max() < 1e-3
    assert abs(np.corrcoef(fold.source.tables["aseg"][ICV], aseg[:, 1])[0, 1]) < 0.2
    # A target is centred by the mean of source, whatever its own.
    target = method.table_features(method.visible(fold.target))["table.thickness"]
    assert target[target.any(axis=1)].mean() > 0.5


def test_each_site_has_its_own_offset_also_beside_one_without_the_table():
    """Sites are in natural order, S2 before S10, where arrays sorted by name have S10 first."""
    cohort = make_cohort("tiny", sizes=dict.fromkeys(("S1", "S2", "S3", "S10"), 30), missing=0.0, seed=1)
    cohort = with_tables(cohort, lacking=np.flatnonzero(cohort.sites == "S10"))
    method = M2LGDGConnectome(**SMALL)
    method.facts_, method.state_ = {"inputs": ["age", "sex"]}, {}
    method._shifts = method.fit_tables({"thickness": list(cohort.tables["thickness"])}, cohort)
    values = method.table_features(cohort)["table.thickness"]
    offsets = method.table_offsets(cohort, CPU)["table.thickness"].numpy()
    assert cohort.site_names == ["S1", "S2", "S3", "S10"] and not offsets[3].any()
    for site, offset in zip(cohort.site_names[:3], offsets[:3], strict=True):
        means = [values[(cohort.sites == site) & (cohort.labels == label)].mean(axis=0) for label in (0, 1)]
        np.testing.assert_allclose(offset, np.mean(means, axis=0), atol=1e-5)
    assert np.ptp(offsets[:3], axis=0).min() > 0.1  # else it would not matter whose is whose


def test_half_of_the_columns_are_dropped_in_training_only():
    fixed = {"adjacency": np.ones((5, 5)), "mean": np.zeros(10), "scale": np.ones(10), "slopes": np.zeros((0, 10))}
    fixed = {name: value.astype(np.float32) for name, value in fixed.items()} | {"table.a": np.array(400)}
    config = M2LGDGConnectome(**SMALL | {"phenotypes": False, "table_dropout": 0.5})
    network = plain.Network(Shape(5, 200, 0, 4, fixed), config)
    network.table_encoders[0] = torch.nn.Identity()
    values = torch.ones(8, 400)
    batch = Batch({"table.a": values}, values[:, :0], torch.arange(8) % 2, torch.arange(8) % 4)
    (dropped,) = network.train().encodings((), batch)
    assert set(dropped.unique().tolist()) == {0.0, 2.0} and 0.4 < float((dropped == 0).float().mean()) < 0.6
    (kept,) = network.eval().encodings((), batch)
    assert torch.equal(kept, values)


def test_a_target_changes_no_weight(bare, fold):
    other = with_tables(bare, lacking=(3, 40, 100))
    table = other.tables["thickness"]
    table[other.sites == "d"] = 3.0
    changed = next(leave_one_site_out(other.with_tables({"thickness": table}), ["d"]))
    one, two = (make(NAME, **SMALL).fit(each.source, seed=0) for each in (fold, changed))
    for name, value in one.state_.items():
        np.testing.assert_array_equal(two.state_[name], value)
    assert not np.array_equal(one.predict_proba(fold.target), one.predict_proba(changed.target))
    alone = one.predict_proba(changed.target.select([4]))
    np.testing.assert_allclose(alone, one.predict_proba(changed.target)[[4]], atol=1e-4)


# Network.


def test_the_gate_has_a_weight_for_each_modality(fold, fitted):
    network = fitted.network()
    with torch.no_grad():
        parts = network.parts(batch_of(fitted, fold.target))
        first = network.networks[0].parts(batch_of(fitted, fold.target))
    assert parts["gate"].shape == (len(fold.target), 4)  # scan, phenotypes, aseg, thickness
    torch.testing.assert_close(parts["gate"].sum(dim=1), torch.ones(len(fold.target)))
    assert first["shared"].shape == first["private"].shape == (len(fold.target), 4, 32)
    assert {"ce", "similarity", "orthogonality", "difference", "contrast"} == set(fitted.facts_["losses"])
    assert all(type(layer) is m2lgdg.CrossAttention for layer in network.networks[0].fusion)


def test_a_table_in_the_place_of_phenotypes_gives_the_papers_network():
    """With the scan and one table, and weights copied, all parts and losses are those of the paper's equations."""
    draw = np.random.default_rng(0)
    fixed = {"adjacency": np.ones((5, 5)), "mean": np.zeros(10), "scale": np.ones(10), "slopes": np.zeros((0, 10))}
    fixed = {name: value.astype(np.float32) for name, value in fixed.items()}
    paper = plain.Network(Shape(5, 200, 3, 4, fixed), M2LGDGConnectome(**SMALL | {"phenotype_hidden": ()})).eval()
    config = M2LGDGConnectome(**SMALL | {"phenotype_hidden": (), "phenotypes": False})
    network = plain.Network(Shape(5, 200, 0, 4, fixed | {"table.a": np.array(3)}), config).eval()
    names = {"phenotype_encoder": "table_encoders"}
    names |= {f"{kind}_{one}": f"{kind}.{i}" for kind in ("shared", "private") for i, one in enumerate("fn")}
    renamed = {}
    for name, value in paper.state_dict().items():
        first, _, rest = name.partition(".")
        renamed[f"{names.get(first, first)}.{rest}" if rest else name] = value
    network.load_state_dict(renamed)
    values, fc = (torch.from_numpy(draw.normal(size=size).astype(np.float32)) for size in ((8, 3), (8, 10)))
    label, site = torch.arange(8) % 2, torch.arange(8) % 4
    given = Batch({"fc": fc}, values, label, site), Batch({"fc": fc, "table.a": values}, values[:, :0], label, site)
    expected, found = paper.parts(given[0]), network.parts(given[1])
    for name in ("logits", "gate", "fused"):
        torch.testing.assert_close(found[name], expected[name])
    terms = [m2lgdg.M2LGDG.loss(config, one, batch) for one, batch in zip((paper, network), given, strict=True)]
    for name, value in terms[0].items():
        torch.testing.assert_close(terms[1][name], value)


def test_losses_are_summed_over_pairs_of_modalities():
    config = M2LGDGConnectome(**SMALL | {"margin": 3.0})
    shared, private = torch.randn(2, 7, 3, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    terms = config.decomposition_losses({"shared": shared, "private": private})
    weight, (a, b, c), (p, q, r) = config.decomposition_weight, shared.unbind(1), private.unbind(1)
    similar = similarity_loss(a, b) + similarity_loss(a, c) + similarity_loss(b, c)
    different = difference_loss(p, q, 3.0) + difference_loss(p, r, 3.0) + difference_loss(q, r, 3.0)
    inner = (orthogonality_loss(a, p, b, q) + orthogonality_loss(a, p, c, r) + orthogonality_loss(b, q, c, r)) / 2
    assert different > 0
    for name, expected in {"similarity": similar, "difference": different, "orthogonality": inner}.items():
        torch.testing.assert_close(terms[name], weight * expected)


@pytest.mark.parametrize("variant", ["M1", "M2", "C1", "C2", "C3", "scan", "structure", "no-phenotypes", "no-structure"])
def test_variants_see_what_they_are_named_after(fold, variant):
    method = make(NAME, **SMALL | M2LGDGConnectome.variants[variant]).fit(fold.source, seed=0)
    before = method.predict_proba(fold.target)
    noise = [np.random.default_rng(i).normal(size=one.shape).astype(np.float32) for i, one in enumerate(fold.target.series)]
    iq = next(name for name in fold.target.inputs if name not in ("age", "sex"))
    changes = {
        "scan": dataclasses.replace(fold.target, series=noise),
        "phenotypes": dataclasses.replace(fold.target, phenotypes=fold.target.phenotypes.assign(**{iq: 3.0})),
        "structure": fold.target.with_tables({"thickness": fold.target.tables["thickness"] + 0.05}),
    }
    seen = {name for name, changed in changes.items() if not np.array_equal(method.predict_proba(changed), before)}
    alone = {"M1": {"phenotypes", "structure"}, "M2": {"scan"}, "scan": {"scan"}, "structure": {"structure"}}
    alone |= {"no-phenotypes": {"scan", "structure"}, "no-structure": {"scan", "phenotypes"}}
    assert seen == alone.get(variant, {"scan", "phenotypes", "structure"})
    if variant in ("structure", "no-phenotypes"):
        assert set(method.facts_["inputs"]) == {"age", "sex"}  # regressed out of tables


def test_nothing_to_learn_from_is_refused(bare):
    with pytest.raises(InputError, match="needs a table"):
        make(NAME, **SMALL | M2LGDGConnectome.variants["structure"]).fit(bare)
    with pytest.raises(InputError, match="no table area"):
        make(NAME, **SMALL | {"tables": ("area",)}).fit(bare)


@pytest.mark.parametrize("variant", ["M1", "C1", "C2", "C4", "structure"])
def test_members_together_have_the_losses_and_gradients_of_one_after_another(variant):
    still = {"members": 3, "dropout": 0.0, "readout_dropout": 0.0, "edge_dropout": 0.0}
    config = M2LGDGConnectome(**SMALL | M2LGDGConnectome.variants[variant] | still)
    config.class_weight = torch.tensor([0.8, 1.4])
    draw = np.random.default_rng(0)
    sizes = ({"fc": 36} if config.imaging else {}) | {"table.a": 7, "table.b": 4}
    features = {name: torch.from_numpy(draw.normal(size=(24, size)).astype(np.float32)) for name, size in sizes.items()}
    phenotypes = torch.from_numpy(draw.normal(size=(24, 3)).astype(np.float32))
    batch = Batch(features, phenotypes, torch.arange(24) % 2, torch.arange(24) % 4)
    fixed = {"adjacency": draw.random((9, 9)) > 0.5, "mean": draw.normal(size=36), "scale": draw.random(36)}
    fixed |= {"slopes": np.zeros((3, 36)), "table.a": np.array(7), "table.b": np.array(4)}
    shape = Shape(9, 200, 3 if config.phenotypes else 0, 4, {name: value.astype(np.float32) for name, value in fixed.items()})
    results = []
    for form in (plain_form, fast_form):
        torch.manual_seed(0)
        network = form(plain.Members(shape, config)).train()
        loss = super(M2LGDGConnectome, config).loss
        terms = network.each(loss, batch)
        sum(term.sum() for term in terms.values()).backward()
        gradients = {name: value.grad for name, value in network.named_parameters()}
        if form is fast_form:  # rows of those of the stack
            each = [(name, value.grad) for name, value in network.stack().named_parameters()]
            gradients = {f"networks.{i}.{name}": value[i] for i in range(3) for name, value in each}
        with torch.no_grad():
            results.append((terms, gradients, dict(network.named_buffers()), {"logits": network.eval()(batch)}))
    assert type(network) is fast.Members
    for one, other in zip(*results, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value is not None, name
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


# Learning.


def test_a_signal_in_a_table_alone_is_learned():
    planted = {"roi_effect": 0.0, "edge_effect": 0.0, "phenotype_effect": 0.0}
    cohort = with_tables(make_cohort("tiny", sizes=dict.fromkeys("abcd", 60), missing=0.0, seed=2, **planted), effect=3.0)
    fold = next(leave_one_site_out(cohort, ["d"]))
    fields = SMALL | {"epochs": 8}
    area, without = (
        auc(fold.target.labels, make(NAME, **fields | more).fit(fold.source, seed=0).predict_proba(fold.target)[:, 1])
        for more in ({}, {"tables": "none"})
    )
    assert area > 0.85 > 0.7 > without


# Subjects and tables that are missing.


def test_a_subject_without_a_table_is_flagged_and_decided_as_an_average_one(fold, fitted):
    lacking = np.flatnonzero(fold.target.tables["thickness"].isna().all(axis=1))
    assert len(lacking) == 1
    flags = fitted.method_flags(fitted.visible(fold.target))
    assert [i for i, one in enumerate(flags) if "no thickness: decided without it" in one] == lacking.tolist()
    table = fold.target.tables["thickness"]
    emptied = table.copy()
    emptied.iloc[:, :] = np.nan
    empty = fitted.predict_proba(fold.target.with_tables({"thickness": emptied}))
    absent = fitted.predict_proba(dataclasses.replace(fold.target, tables={"aseg": fold.target.tables["aseg"]}))
    np.testing.assert_array_equal(empty, absent)
    np.testing.assert_array_equal(empty[lacking], fitted.predict_proba(fold.target)[lacking])
    assert np.isfinite(empty).all()
    with pytest.raises(InputError, match="no column region 5"):
        fitted.predict_proba(fold.target.with_tables({"thickness": table.drop(columns="region 5")}))
    shuffled = fold.target.with_tables({"thickness": table[table.columns[::-1]]})
    np.testing.assert_array_equal(fitted.predict_proba(shuffled), fitted.predict_proba(fold.target))


def test_saved_and_loaded_it_decides_bit_for_bit(fold, fitted, tmp_path):
    folder = fitted.save(tmp_path / "model")
    loaded = Model.load(folder)
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted.predict_proba(fold.target))
    facts = json.loads(next(Path(folder).glob("*.json")).read_text())
    assert "thickness" in json.dumps(facts)


def test_who_has_no_table_has_no_part_in_its_cleaning(bare):
    """A site without the table, and a part of another: means, slopes and sds are those of the others."""
    who = (bare.sites == "a") | (np.arange(len(bare)) % 4 == 1)
    cohort = with_tables(bare, lacking=np.flatnonzero(who))
    rest = with_tables(bare).select(~who)
    one, other = (make(NAME, **SMALL | {"tables": "thickness"}).fit(each, seed=0) for each in (cohort, rest))
    for array in ("fill", "scale"):
        np.testing.assert_allclose(one.state_[f"table.thickness.{array}"], other.state_[f"table.thickness.{array}"], rtol=1e-6)
    values = [each.table_features(each.visible(rest))["table.thickness"] for each in (one, other)]
    np.testing.assert_allclose(*values, atol=1e-4)
    assert one.facts_["tables"]["thickness"]["subjects"] == (~who).sum()
    assert np.isfinite(one.predict_proba(cohort)).all()


def test_a_table_that_only_one_class_has_is_not_used(bare):
    told = with_tables(bare, lacking=np.flatnonzero(bare.labels == 0))
    told = dataclasses.replace(told, tables={"thickness": told.tables["thickness"]})
    one, none = (make(NAME, **SMALL | {"tables": tables}).fit(told, seed=0) for tables in ("all", "none"))
    np.testing.assert_array_equal(one.predict_proba(told), none.predict_proba(told))
    assert one.facts_["notes"][-1] == "Table thickness is not used: only patients have it."


def test_a_model_at_a_new_site_knows_the_tables(fold, fitted, tmp_path):
    model = Model(fitted)
    tables = fitted.table_rows(fold.source)
    model.source_distributions = {fold.source.atlas: SourceDistribution.fit(fold.source, tables)}
    loaded = Model.load(model.save(tmp_path / "model"))
    scores = loaded.ood_scores(fold.target)
    lacking = fold.target.tables["thickness"].isna().all(axis=1).to_numpy()
    assert (np.isnan(scores["table_thickness"]) == lacking).all() and np.isfinite(scores["table_aseg"]).all()
    assert loaded.having_tables(fold.target) == {"thickness": (~lacking).sum(), "aseg": len(fold.target)}
    with pytest.raises(InputError, match="they are of another unit or measure"):
        loaded.predict_proba(fold.target.with_tables({"thickness": fold.target.tables["thickness"] / 1000}))


# Variant `plus`, and explanations.


@pytest.mark.parametrize(("phenotypes", "lacking"), [(True, (3, 40, 100)), (False, (3, 40, 100)), (True, range(35))])
def test_without_its_networks_plus_is_the_linear_model(bare, phenotypes, lacking):
    """The last lack the table at a whole site, and at a part of another."""
    fold = next(leave_one_site_out(with_tables(bare, lacking=lacking), ["d"]))
    plus = make(NAME, **SMALL | {"plus": True, "phenotypes": phenotypes}).fit(fold.source, seed=0)
    head = make("connectome-adaptive", phenotypes=phenotypes).fit(fold.source)
    assert any(each["weight"] for each in head.facts_["tables"].values())
    bare = dataclasses.replace(plus)
    bare.facts_, bare.state_ = plus.facts_, plus.state_ | {"network.network_slope": np.zeros((), dtype=np.float32)}
    expected = logit(head.predict_proba(fold.target)[:, 1])
    exact = np.abs(expected) < 12  # beyond, `logit` is bounded
    np.testing.assert_allclose(bare.decision(bare.visible(fold.target))[exact], expected[exact], atol=1e-3)
    assert exact.sum() > 20


def test_explanations_name_the_modalities_of_the_gate(fold, fitted):
    explained = explain(fitted, fold.target.select(np.arange(6)), steps=4)
    assert list(explained.gate.columns) == ["site", "label", "subjects", "imaging", "phenotypes", "aseg", "thickness"]
    np.testing.assert_allclose(explained.gate[["imaging", "phenotypes", "aseg", "thickness"]].sum(axis=1), 1, atol=1e-5)
    assert len(explained.rois) and len(explained.edges)


def test_integrated_gradients_of_tables_are_complete(fold, fitted):
    batch = batch_of(fitted, fold.target.select(np.arange(4)))
    attributed, change = integrated_gradients(fitted.network(), batch, 64)
    assert attributed["table.thickness"].shape == (4, 6)
    torch.testing.assert_close(change[:, 0], change[:, 1], atol=0.05, rtol=0.05)
    lacking = np.flatnonzero(fold.target.tables["thickness"].isna().all(axis=1))
    batch = batch_of(fitted, fold.target.select(lacking))
    assert not integrated_gradients(fitted.network(), batch, 8)[0]["table.thickness"].any()


@pytest.mark.long
def test_exported_it_decides_the_same_from_inputs_prepared_by_their_description(fold, tmp_path):
    """Two programs: this one reads the JSON file only, with numpy."""
    plus = Model(make(NAME, **SMALL | {"plus": True}).fit(fold.source, seed=0))
    path = export_onnx(plus, tmp_path / "model.onnx", takes_prepared=True)
    described = {one["name"]: one for one in json.loads(path.with_suffix(".json").read_text())["inputs"]}
    inputs = prepared(plus, fold.target)
    for name in ("thickness", "aseg"):
        one, table = described[f"table.{name}"], fold.target.tables[name]
        rows = table[one["columns"]].to_numpy()
        filled = np.where(np.isnan(rows), one["fill"], rows)
        confounds = []
        for each in one["confounds"]:
            if each["name"] == "age squared":
                age = next(i for i, known in enumerate(one["confounds"]) if known["name"] == "age")
                confounds.append(confounds[age] ** 2)
                continue
            held = each["kind"] == "column of the table"
            values = (
                filled[:, one["columns"].index(each["name"])] if held else fold.target.phenotypes[each["name"]].to_numpy(float)
            )
            confounds.append((values - each["mean"]) / each["scale"])
        cleaned = (filled - np.column_stack(confounds) @ np.array(one["slopes"]) - one["mean"]) / one["scale"]
        cleaned[np.isnan(rows).mean(axis=1) > 0.5] = 0.0
        np.testing.assert_allclose(inputs[f"table.{name}"], cleaned, atol=1e-4)
    expected = plus.predict_proba(fold.target)[:, 1]
    np.testing.assert_allclose(run_onnx(path, inputs), expected, atol=1e-5)
