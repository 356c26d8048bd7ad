"""Platt scaling from sums of derivatives is that of all decisions."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import logit

from m2lgdg.federated.platt import curve, intercept
from m2lgdg.federated.site import KINDS
from m2lgdg.metrics import platt


def sent(task, sites):
    """Result of a generator whose asks are answered by the total of the sites."""
    asks = next(task)
    while True:
        try:
            asks = task.send([np.sum([KINDS[ask.kind](site, ask) for site in sites], axis=0) for ask in asks])
        except StopIteration as ended:
            return ended.value


@pytest.fixture
def sites():
    rng = np.random.default_rng(0)
    made = []
    for size in (30, 20, 25):
        labels = (rng.random(size) < 0.4).astype(np.int8)
        decisions = rng.normal(size=(size, 2)) + 0.8 * labels[:, None] + rng.normal()
        made.append(SimpleNamespace(labels=labels, decisions=decisions, weights=np.ones(size)))
    return made


@pytest.mark.parametrize("name", ["all", "within"])
def test_the_curve(sites, name):
    weights, labels = np.array([1.0, 0.3]), np.concatenate([site.labels for site in sites])
    by_site = [site.decisions - site.decisions.mean(axis=0) * (name == "within") for site in sites]
    decisions = np.concatenate(by_site) @ weights
    found = sent(curve(name, weights, float(decisions.mean()), float(decisions.std())), sites)
    np.testing.assert_allclose(found, platt(decisions, labels), rtol=1e-9)


@pytest.mark.parametrize("slope", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_the_intercept_keeps_the_prevalence(sites, slope, shift):
    weights, lone = np.array([1.0, 0.3]), SimpleNamespace(labels=np.ones(9), decisions=np.ones((9, 2)), weights=np.zeros(9))
    for site in sites:
        site.decisions += shift
    decisions, labels = (np.concatenate([getattr(site, key) for site in sites]) for key in ("decisions", "labels"))
    offset = sent(intercept(weights, slope, float((decisions @ weights).mean())), [*sites, lone])  # one class does not count
    mean = np.mean(1 / (1 + np.exp(-slope * decisions @ weights - offset)))
    assert logit(mean) == pytest.approx(logit(labels.mean()), abs=1e-8)
