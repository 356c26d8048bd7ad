"""What all networks share: published settings and sizes, a gradient for every parameter, and 32 subjects learned by heart."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from m2lgdg import METHODS, make, make_cohort
from m2lgdg.deep import DeepMethod, Shape
from m2lgdg.registry import create

torch.set_num_threads(1)
NETWORKS = [name for name in sorted(METHODS) if issubclass(METHODS[name], DeepMethod)]

BARE = {"dropout": 0.0, "weight_decay": 0.0, "label_smoothing": 0.0, "validation_share": 0.0, "patience": 60}
FC = {"widths": (32, 16), "epochs": 60, "warmup": 2}  # of the network of erm.py
SERIES = {"length": 40, "epochs": 25, "warmup": 1}


def without(name, *terms, **fields):
    """The small network of a method, some of its weights 0."""
    small = {**METHODS[name].variants["small"], "epochs": 40, "warmup": 1, **fields}
    return name, small | dict.fromkeys(terms, 0.0)


CASES = [
    *[("erm", FC), ("cdann", FC | {"adversary_weight": 0.0}), ("coral", FC | {"penalty_weight": 0.0}), ("group-dro", FC)],
    ("iib", FC | dict.fromkeys(("bottleneck_weight", "invariance_weight", "aware_decay"), 0.0)),
    *[("irm", FC | {"penalty_weight": 0.0, "anneal": 0.0}), ("mixup", FC | {"alpha": 0.0})],
    *[("mldg", FC | {"order": order}) for order in (1, 2)],
    *[without("genm", "entropy_weight", epochs=20, modulation=how) for how in ("dot", "bank")],
    without("brainnet-transformer", "mixup"),
    without("metaexplainer", "mixup", "sparsity_weight", "stability_weight", **SERIES),
    without("braingnn", "unit_weight", "topk_weight", "consistency_weight", epochs=60),
    without("ibgnn-plus", epochs=90, learning_rate=0.02),
    without("brainnetcnn"),
    without("m2dc", "constraint_weight", "head_dropout", sampling=False, length=24, crop=1.0, shots=8, episodes=10, epochs=6),
    without("msstan", length=32, epochs=60),
    without("ufa-net", "alignment_weight", length=20, time_bins=0, learning_rate=0.05, epochs=40),
    without("mm-gtunets", "edge_dropout", "smoothness_weight", "degree_weight", "reward_weight", epochs=12, draws=5),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), CASES)
def test_overfits_32_subjects(name, fields):
    """Without regularisation: nothing keeps the gradient from the weights."""
    cohort = make_cohort("tiny", sizes={"a": 16, "b": 16}, n_rois=8, n_disease_edges=2, seed=0)
    fitted = make(name, **BARE | fields).fit(cohort, seed=0)
    assert ((fitted.predict_proba(cohort)[:, 1] >= 0.5) == cohort.labels).all()
    assert name != "mldg" or fitted.facts_["history"][0]["meta"] > 0


@pytest.fixture(scope="module")
def flat():
    """A ROI is flat in half of the scans, and one scan has a single ROI that is not."""
    cohort = make_cohort("tiny", sizes={"a": 14, "b": 14, "c": 12}, n_rois=8, n_disease_edges=2, seed=1)
    series = [np.array(one[:40]) for one in cohort.series]
    for one in series[::2]:
        one[:, 3] = 0.1
    series[1][:, 1:] = 0.0
    return dataclasses.replace(cohort, series=series)


# What the rest of the fields keeps from a gradient, or what needs no other: site nets of genm are not in its network.
ALL_IN_USE = {"ufa-net": {"alignment_start": 0, "length": 20}, "m2lgdg": {"margin": 3.5}}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_gets_a_gradient_and_flat_scans_leave_it_finite(name, flat):
    fields = {**METHODS[name].variants.get("small", {}), "length": 40, "batch_size": 16, **ALL_IN_USE.get(name, {})}
    fields |= {"epochs": 6, "warmup": 1, "learning_rate": 1e-3}
    own = create(name, **{field: value for field, value in fields.items() if field not in METHODS[name].unused})
    built, reached = [], set()
    own.build = lambda shape: built.append(type(own).build(own, shape)) or built[-1]

    def look(optimizer, *_):
        own_values = {id(value) for network in built for value in network.parameters()}  # none before it, in a first stage
        for value in [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]:
            assert value.grad.isfinite().all()
            members = [(value, value.grad)] if id(value) in own_values or not built else zip(value, value.grad, strict=True)
            reached.update(one.data_ptr() for one, gradient in members if gradient.any())  # rows of a stack are members' values

    watched = register_optimizer_step_pre_hook(look)
    try:
        own.fit(flat, seed=0)
    finally:
        watched.remove()
    assert [one for one, value in built[0].named_parameters() if value.data_ptr() not in reached] == []
    assert all(np.isfinite(value).all() for value in own.state_.values())


EDGES = {"mean": np.zeros(6670, np.float32), "scale": np.ones(6670, np.float32)}
MATRICES = {name: np.ones((116, 116), np.float32) for name in ("mean", "scale", "graph")}
POPULATION = {  # of mm-gtunets: four codes of three phenotypes
    **{"varied": np.arange(3), "tolerance": np.ones(3), "chosen": np.arange(500), "sigma": np.array(1.0)},
    **{"code_column": np.array([0, 0, 1, 2]), "label": np.zeros(4)},
}
SIZES = {  # by the layers of each publication or release, at 116 ROIs and 200 time points
    ("braingnn", ""): ({}, 67_746),
    ("braingnn", "paper"): ({}, 67_746),
    ("ibgnn-plus", ""): ({}, 18_866),
    ("brainnet-transformer", ""): ({}, 1_676_930),
    ("brainnetcnn", ""): ({}, 2_420_380),
    ("brainnetcnn", "lite"): ({}, 556_957),
    ("m2dc", ""): ({}, 980_596 - 4 * 128 * (116 + 128 + 2) - 128 * 128),
    ("m2dc", "clock"): ({}, 980_596),
    ("msstan", ""): ({}, 622_946),
    ("ufa-net", ""): (MATRICES, 3_902_009),
    ("metaexplainer", "attention"): (MATRICES, 311_268 - 3 * 2),
    ("mm-gtunets", ""): (POPULATION, 398_720 + 398_848 + 816 + 5_378 + 12),  # its VAE is fitted before
    ("genm", ""): (EDGES, 53_368 + 53_368 + 18),
}


@pytest.mark.parametrize(("name", "variant"), SIZES)
def test_the_number_of_parameters_is_the_published_one(name, variant):
    fitted, count = SIZES[name, variant]
    network = create(name, **METHODS[name].variants.get(variant, {})).build(Shape(116, 200, 0, 17, fitted))
    assert sum(value.numel() for value in network.parameters()) == count


PUBLISHED = {
    "braingnn": {
        **{"communities": 8, "hidden": 32, "ratio": 0.5, "head": (32, 512), "dropout": 0.5, "form": "release"},
        **{"unit_weight": 0.0, "topk_weight": 0.1, "consistency_weight": 0.1, "label_smoothing": 0.0, "epochs": 100},
        **{"batch_size": 100, "weight_decay": 5e-3, "learning_rate": 0.01, "warmup": 5, "update_rule": "adam", "clip": 0.0},
        **{"select_after_warmup": True, "phenotypes": False},
    },
    "ibgnn-plus": {
        **{"hidden": 16, "layers": 2, "mask_rate": 0.01, "dropout": 0.5, "mask_nodes": False, "label_smoothing": 0.0},
        **{"label_weight": 10.0, "agreement_weight": 10.0, "size_weight": 5e-4, "entropy_weight": 1.0},
        **{"epochs": 300, "batch_size": 16, "learning_rate": 1e-3, "weight_decay": 1e-5},
    },
    "brainnet-transformer": {
        **{"epochs": 200, "batch_size": 16, "learning_rate": 1e-4, "weight_decay": 1e-4, "dropout": 0.1, "mixup": 1.0},
        **{"update_rule": "adam", "clip": 0.0, "label_smoothing": 0.0, "select_after_warmup": False, "phenotypes": False},
        **{"clusters": 100, "heads": 4},
    },
    "brainnetcnn": {
        **{"edge_channels": (32, 32), "node_channels": 64, "graph_channels": 256, "hidden": (128, 30), "dropout": 0.5},
        **{"learning_rate": 1e-4, "weight_decay": 5e-4, "batch_size": 16, "epochs": 100, "label_smoothing": 0.0},
        **{"update_rule": "adam"},
    },
    "m2dc": {
        **{"window": 50, "percentile": 70.0, "meta_train_sites": 2, "shots": 5, "temperature": 0.5, "inner_share": 0.01},
        **{"constraint_weight": 0.01, "margin": 10.0, "spread": "sd", "sampling": True, "clip": 1.0, "epochs": 60},
        **{"clock": False, "crop": 0.7, "crops": 4, "select_after_warmup": False, "select_from": 0.5, "phenotypes": False},
        **{"learning_rate": 5e-4, "autoencoder_rate": 5e-5, "weight_decay": 0.0, "dropout": 0.1, "head_dropout": 0.5},
    },
    "msstan": {
        **{"learning_rate": 3e-4, "weight_decay": 1e-3, "batch_size": 64, "epochs": 100, "patience": 20, "dropout": 0.1},
        **{"window": 0.5, "stride": 2, "density": 0.2, "scales": (0.3, 0.5, 0.7), "head": (32, 16), "update_rule": "adam"},
    },
    "ufa-net": {
        **{"channels": (16, 16, 16, 16), "temporal_kernel": 11, "widths": (1024, 512, 64), "dropout": 0.5, "length": 200},
        **{"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 128, "sites_per_batch": 4},
        **{"alignment_weight": 1.0, "alignment_start": 20, "per_dimension": False, "time_bins": 0, "label_smoothing": 0.0},
        **{"scaling": "subject", "mmd": "unbiased", "density": 1.0, "clip": 1.0, "update_rule": "sgd", "epochs": 120},
        **{"phenotypes": False},
    },
    "mm-gtunets": {
        **{"selected": 500, "elimination_step": 100, "vae_hidden": 256, "vae_epochs": 3000, "vae_patience": 100},
        **{"vae_rate": 1e-3, "agreement_years": 2.0, "imaging_depth": 2, "phenotype_depth": 3, "hidden": 128},
        **{"embedding": 16, "head_width": 256, "pool_share": 0.8, "dropout": 0.3, "edge_dropout": 0.3},
        **{"learning_rate": 1e-4, "weight_decay": 5e-4, "smoothness_weight": 1.0, "degree_weight": 1e-4},
        **{"reward_weight": 1e-2, "target_share": 0.2, "epochs": 100, "draws": 5, "patience": 20, "update_rule": "adam"},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_settings(name):
    assert {field: value for field, value in create(name).fields().items() if field in PUBLISHED[name]} == PUBLISHED[name]
