"""Predictions that several tests of the report share."""

import numpy as np
import pandas as pd
import pytest


@pytest.fixture
def predictions():
    """Two methods (one of them perfect), two targets, two seeds."""
    rng = np.random.default_rng(0)
    rows = []
    for target in ("NYU", "USM"):
        labels = np.array([0, 1] * 10)
        for seed in (0, 1):
            for method, variant, noise in (("good", "", 0.0), ("noisy", "with-age", 0.6)):
                proba = np.clip(0.5 + 0.4 * (labels - 0.5) + noise * rng.normal(size=20), 0, 1)
                rows += [(method, variant, seed, target, f"s{i}", labels[i], proba[i]) for i in range(20)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


@pytest.fixture
def ablated(predictions):
    """One method, whole and without a part that harms it, and the whole again under another name."""
    whole = predictions[predictions.method == "noisy"].assign(variant="")
    better = predictions[predictions.method == "good"].assign(method="noisy", variant="less")
    return pd.concat([whole, better, whole.assign(variant="all")])
