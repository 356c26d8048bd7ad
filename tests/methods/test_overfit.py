"""Networks without regularisation learn 32 subjects by heart: nothing keeps the gradient from their weights."""

import pytest

from m2lgdg import METHODS, make, make_cohort

BARE = {"dropout": 0.0, "weight_decay": 0.0, "label_smoothing": 0.0, "validation_share": 0.0, "patience": 60}
FC = {"widths": (32, 16), "epochs": 60, "warmup": 2}  # of the network of erm.py
SERIES = {"length": 40, "epochs": 25, "warmup": 1}
CASES = [
    *[("erm", FC), ("cdann", FC | {"adversary_weight": 0.0}), ("coral", FC | {"penalty_weight": 0.0}), ("group-dro", FC)],
    ("iib", FC | dict.fromkeys(("bottleneck_weight", "invariance_weight", "aware_decay"), 0.0)),
    *[("irm", FC | {"penalty_weight": 0.0, "anneal": 0.0}), ("mixup", FC | {"alpha": 0.0})],
    *[("mldg", FC | {"order": order}) for order in (1, 2)],
    *[
        ("genm", {"learning_rate": 0.01, "epochs": 20, "warmup": 1, "entropy_weight": 0.0, "modulation": how, "dropout": 0.0})
        for how in ("dot", "bank")
    ],
    ("brainnet-transformer", METHODS["brainnet-transformer"].variants["small"] | {"mixup": 0.0, "epochs": 40}),
    (
        "metaexplainer",
        METHODS["metaexplainer"].variants["small"]
        | SERIES
        | dict.fromkeys(("mixup", "sparsity_weight", "stability_weight"), 0.0),
    ),
]


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_overfits_32_subjects(name, fields):
    cohort = make_cohort("tiny", sizes={"a": 16, "b": 16}, seed=0)
    fitted = make(name, **BARE | fields).fit(cohort, seed=0)
    assert ((fitted.predict_proba(cohort)[:, 1] >= 0.5) == cohort.labels).all()
    assert name != "mldg" or fitted.facts_["history"][0]["meta"] > 0
