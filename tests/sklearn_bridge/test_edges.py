"""Weights of edges: with the features they give the model's own logits."""

import miniature
import numpy as np
import pytest

import m2lgdg
from m2lgdg.connectivity import fc_features
from m2lgdg.metrics import logit
from m2lgdg.sklearn_bridge.transformers import BETWEEN
from m2lgdg.storage import InputError


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, edge_effect=2.0)


@pytest.mark.parametrize("name", ["fc-logistic", "fc-adaptive", "tangent-ridge"])
def test_weights_times_features_are_the_logits(cohort, name, tmp_path):
    model = m2lgdg.make(name).fit(cohort)
    table = m2lgdg.edge_weights(model)
    part = m2lgdg.TangentConnectivity() if name.startswith("tangent") else m2lgdg.Connectivity()
    features = part.set_output(transform="pandas").fit_transform(cohort)
    named = [f"{roi}{BETWEEN}{other}" for roi, other in zip(table["roi"], table["other roi"], strict=True)]
    logits = features[named].to_numpy() @ table["weight"].to_numpy(dtype=float)  # by the names of both
    expected = logit(model.predict_proba(cohort)[:, 1])
    np.testing.assert_allclose(logits - logits[0], expected - expected[0], atol=1e-6)
    estimator = m2lgdg.as_estimator(name).fit(cohort, cohort.labels)
    np.testing.assert_array_equal(m2lgdg.edge_weights(estimator)["weight"], table["weight"])
    np.testing.assert_array_equal(m2lgdg.edge_weights(m2lgdg.Model.load(model.save(tmp_path)))["weight"], table["weight"])


def test_several_blocks_and_atlases():
    cohort = miniature.with_two_atlases(m2lgdg.make_cohort("tiny", seed=3))
    model = m2lgdg.make("connectome-adaptive").fit(cohort)
    table = m2lgdg.edge_weights(model)
    assert list(table.columns) == ["atlas", "block", "roi", "other roi", "weight"]
    sizes = table.groupby(["atlas", "block"], sort=False).size()
    for atlas in cohort.atlases:
        n = len(cohort.parcellation(atlas).rois)
        assert sizes[atlas].to_dict() == {
            "steady": n * (n - 1) / 2,
            "log_euclidean": n * (n + 1) / 2,
            "swings": n * (n - 1) / 2,
        }
    only = m2lgdg.make("fc-logistic", atlases="all").fit(cohort)
    weights = m2lgdg.edge_weights(only).groupby("atlas")["weight"]
    logits = sum(fc_features(cohort.parcellation(atlas).series) @ weights.get_group(atlas) for atlas in cohort.atlases)
    expected = logit(only.predict_proba(cohort)[:, 1])
    np.testing.assert_allclose(logits - logits[0], expected - expected[0], atol=1e-6)


def test_what_has_no_weights_is_one_sentence(cohort):
    with pytest.raises(InputError, match="method prior is not linear, so its edges have no weights"):
        m2lgdg.edge_weights(m2lgdg.make("prior").fit(cohort))
    with pytest.raises(InputError, match="fc-svm is not fitted yet"):
        m2lgdg.edge_weights(m2lgdg.make("fc-svm"))
    vectors = m2lgdg.as_estimator("fc-logistic").fit(fc_features(cohort.series), cohort.labels, groups=cohort.sites)
    with pytest.raises(InputError, match="fitted on vectors"):
        m2lgdg.edge_weights(vectors)
    phenotypes = m2lgdg.make("phenotype-logistic").fit(cohort)
    assert m2lgdg.edge_weights(phenotypes).empty
