"""Local calibration: against a general optimiser, what it does to a shifted site, and what it refuses."""

import numpy as np
import pytest
from scipy.optimize import minimize

from m2lgdg import InputError, Model, make, make_cohort
from m2lgdg.deploy.calibrate import calibrate
from m2lgdg.metrics import logit, shrunken_platt


@pytest.fixture(scope="module")
def cohort():
    return make_cohort("tiny", sizes={"a": 40, "b": 40, "new": 40}, roi_effect=2.0, edge_effect=2.5, missing=0.0, seed=2)


@pytest.fixture
def fitted(cohort):
    return make("fc-logistic").fit(cohort.select(cohort.sites != "new"))


def test_slope_and_offset_maximise_the_posterior():
    rng = np.random.default_rng(0)
    decision = rng.normal(size=30)
    y = (rng.random(30) < 1 / (1 + np.exp(-(0.5 * decision - 1)))).astype(float)

    def loss(w):
        z = w[0] * decision + w[1]
        return np.logaddexp(0, z).sum() - y @ z + (w[0] - 1) ** 2 / (2 * 0.5**2) + w[1] ** 2 / 2

    np.testing.assert_allclose(shrunken_platt(decision, y), minimize(loss, [1.0, 0.0]).x, atol=1e-4)


def test_no_subject_leaves_source_as_it_is_and_many_have_their_way():
    assert shrunken_platt(np.empty(0), np.empty(0)) == (1.0, 0.0)
    rng = np.random.default_rng(1)
    decision = rng.normal(size=20000)
    y = (rng.random(20000) < 1 / (1 + np.exp(-(0.4 * decision - 1.5)))).astype(float)
    np.testing.assert_allclose(shrunken_platt(decision, y), (0.4, -1.5), atol=0.06)
    assert shrunken_platt(decision, (decision < 0).astype(float))[0] == 0.05  # never turned round


def test_probabilities_are_those_of_slope_and_offset_also_when_loaded(cohort, fitted, tmp_path):
    new = cohort.select(sites=["new"])
    before = fitted.predict_proba(new)[:, 1]
    found = calibrate(fitted, new)
    expected = 1 / (1 + np.exp(-(found.slope * logit(before) + found.offset)))
    loaded = Model.load(fitted.save(tmp_path / "model"))
    np.testing.assert_allclose(loaded.predict_proba(new)[:, 1], expected, rtol=1e-12)
    assert loaded.threshold == found.threshold == np.mean(new.labels)
    assert found.sensitivity[1] < found.sensitivity[0] <= found.sensitivity[2]
    assert (found.patients, found.controls) == ((new.labels == 1).sum(), (new.labels == 0).sum())
    with pytest.raises(InputError, match="already calibrated to a site"):
        calibrate(loaded, new)


def test_too_few_of_a_class_are_refused(cohort, fitted):
    new = cohort.select(sites=["new"])
    few = np.concatenate([np.flatnonzero(new.labels == 1)[:4], np.flatnonzero(new.labels == 0)[:9]])
    with pytest.raises(InputError, match="has 4 labelled patients and 9 controls; at least 5 of each needed"):
        calibrate(fitted, new.select(few))
    assert "local" not in fitted.facts_
