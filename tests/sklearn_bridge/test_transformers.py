"""Parts of the methods as scikit-learn transformers: scikit-learn's checks, the methods' numbers, sites by metadata routing."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import m2lgdg
from m2lgdg import Connectivity, FrameWeightedConnectivity, SiteCentring, TangentConnectivity
from m2lgdg.connectivity import correlations, covariances, fc_features, frame_weighted
from m2lgdg.methods.linear import standardised_block
from m2lgdg.methods.within_sites import balance
from m2lgdg.splits import leave_one_site_out
from m2lgdg.tangent import tangent_features

OF_SCANS = (Connectivity, FrameWeightedConnectivity, TangentConnectivity)
MIXING = np.random.default_rng(0).normal(size=(30, 64))
# Every pipeline fits the steps that it was given.
OF_PIPELINES = dict.fromkeys(("check_estimators_overwrite_params", "check_dont_overwrite_parameters"), "Pipeline")


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3)


@pytest.fixture(scope="module")
def fold(cohort):
    return next(iter(leave_one_site_out(cohort)))


def series_of(table):
    """A series for each row of a table, of as many ROIs as it has columns, whose correlations depend on the row."""
    mixing = MIXING[:, : table.shape[1]]  # (time, roi)
    return np.stack([mixing * (1 + abs(row)) + np.roll(mixing, 1, axis=1) * row for row in table])


@pytest.mark.parametrize(
    "estimator",
    [
        SiteCentring(),
        SiteCentring(scale=True, balanced=False),
        *(
            make_pipeline(FunctionTransformer(series_of, validate=True, feature_names_out="one-to-one"), part())
            for part in OF_SCANS
        ),
    ],
    ids=lambda one: type(one[-1] if hasattr(one, "steps") else one).__name__,
)
def test_scikit_learns_checks(estimator):
    """Its data are tables; a first step makes series of them, so that all checks run through the transformer itself."""
    expected = OF_PIPELINES if hasattr(estimator, "steps") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, expected_failed_checks=expected, on_fail=None)
    assert [(one["check_name"], one["exception"]) for one in results if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in results) > 40


@pytest.mark.parametrize("part", OF_SCANS)
def test_scikit_learn_knows_that_it_takes_series(part):
    with pytest.warns(match="requires input"):
        check_estimator(part())


def test_the_features_are_those_of_the_methods(fold):
    source, target = fold.source, fold.target
    np.testing.assert_array_equal(Connectivity().fit(source).transform(target), fc_features(target.series))
    np.testing.assert_array_equal(
        FrameWeightedConnectivity().fit(source).transform(target), fc_features(target.series, frame_weighted)
    )
    fitted = m2lgdg.make("tangent-ridge").fit(source)
    tangent = TangentConnectivity().fit(source)
    np.testing.assert_array_equal(tangent.reference_, fitted.state_["tangent.reference"])
    np.testing.assert_array_equal(tangent.transform(target), tangent_features(covariances(target.series), tangent.reference_))
    np.testing.assert_array_equal(TangentConnectivity().fit_transform(source), tangent.transform(source))


def test_a_pipeline_of_the_parts_is_the_block_of_a_method(fold):
    """The weights of fc-adaptive's relative without its scaling of edges: a ridge on what SiteCentring gives."""
    source, target = fold.source, fold.target
    edges = Connectivity().fit_transform(source)
    block = standardised_block(edges, source, balance(source), within_sites=True)
    centring = SiteCentring(scale=True)
    trained = centring.fit_transform(edges, source.labels, groups=source.sites)
    np.testing.assert_allclose(trained, block.rows.trained, atol=1e-12)
    new = Connectivity().fit(source).transform(target)
    np.testing.assert_allclose(centring.transform(new), (new - block.centre) / block.scale, atol=1e-12)
    np.testing.assert_array_equal(centring.transform(new, groups=target.sites), centring.transform(new))  # a site not seen
    np.testing.assert_array_equal(centring.transform(edges, groups=source.sites), trained)


def test_site_means_by_hand():
    values = np.array([[0.0, 1], [2, 1], [4, 1], [10, 3], [20, 5], [7, 7]])
    sites, labels = np.array(["a", "a", "a", "b", "b", "c"]), np.array(["x", "x", "y", "x", "y", "y"])
    centring = SiteCentring().fit(values, labels, groups=sites)
    np.testing.assert_allclose(centring.site_means_[:, 0], [(1 + 4) / 2, 15, 7])  # classes of a site count alike
    np.testing.assert_allclose(centring.mean_[0], (3 * 2.5 + 2 * 15) / 5)  # without the site of one class
    plain = SiteCentring(balanced=False).fit(values, labels, groups=sites)
    np.testing.assert_allclose(plain.site_means_, [[2, 1], [15, 4], [7, 7]])
    np.testing.assert_allclose(plain.mean_, values.mean(axis=0))
    np.testing.assert_allclose(
        plain.transform(values[:2], groups=["b", "new"]), [values[0] - [15, 4], values[1] - values.mean(axis=0)]
    )
    three = SiteCentring().fit(values, [0, 1, 2, 0, 1, 2], groups=sites)
    np.testing.assert_allclose(three.site_means_, plain.site_means_)


@pytest.mark.parametrize("part", OF_SCANS)
def test_forms_of_x(part, fold):
    """A cohort, a list of unequal series and one array give the same; one subject alone gives the same as with others."""
    fitted = part().fit(fold.source)
    expected = fitted.transform(fold.target)
    of_list = part().fit(list(fold.source.series))
    np.testing.assert_array_equal(of_list.transform(list(fold.target.series)), expected)
    np.testing.assert_array_equal(of_list.transform(list(fold.target.series)[3:4])[0], expected[3])
    equal = np.stack([one[:60] for one in fold.source.series])
    np.testing.assert_array_equal(part().fit_transform(equal), part().fit(list(equal)).transform(list(equal)))
    unequal = [one[: 60 + i] for i, one in enumerate(fold.target.series)]
    assert part().fit_transform(unequal).shape == expected.shape
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).transform(fold.target), expected)


@pytest.mark.parametrize("part", [Connectivity, TangentConnectivity])
def test_connectomes(part, fold):
    source, target = fold.source.to_connectomes(), fold.target.to_connectomes()
    of_cohort = part().fit(source).transform(target)
    matrices = correlations(fold.source.series), correlations(fold.target.series)
    np.testing.assert_allclose(part().fit(matrices[0]).transform(matrices[1]), of_cohort, atol=2e-3)
    if part is Connectivity:
        np.testing.assert_allclose(of_cohort, Connectivity().fit_transform(fold.target), atol=1e-6)
    with pytest.raises(ValueError, match=r"was fitted on scans that are correlation, but X holds series"):
        part().fit(matrices[0]).transform(fold.target)
    with pytest.raises(ValueError, match=r"was fitted on scans that are series, but X holds matrices"):
        part().fit(fold.source).transform(matrices[1])
    with pytest.raises(ValueError, match="computed from time series, and X holds connectomes"):
        FrameWeightedConnectivity().fit(matrices[0])


def test_names(cohort):
    edges = Connectivity().set_output(transform="pandas").fit_transform(cohort)
    first, second, *_, last = cohort.rois
    assert isinstance(edges, pd.DataFrame) and edges.columns[0] == f"{first}--{second}" and edges.columns[-1].endswith(last)
    position = list(edges.columns).index(f"{second}--{last}")
    rows, columns = np.triu_indices(len(cohort.rois), 1)
    assert (rows[position], columns[position]) == (1, len(cohort.rois) - 1)
    tangent = TangentConnectivity(rois=[f"r{i}" for i in range(len(cohort.rois))]).fit(list(cohort.series))
    assert tangent.get_feature_names_out()[:2].tolist() == ["r0--r0", "r0--r1"]
    assert Connectivity().fit(list(cohort.series)).get_feature_names_out()[0] == "1--2"
    union = make_union(Connectivity(), FrameWeightedConnectivity()).set_output(transform="pandas")
    assert union.fit_transform(cohort).columns[0] == f"connectivity__{first}--{second}"
    centred = SiteCentring().set_output(transform="pandas").fit_transform(edges, groups=cohort.sites)
    assert list(centred.columns) == list(edges.columns)


def test_sites_by_metadata_routing(cohort):
    """In a leave-one-site-out loop the sites reach the splitter and the centring, each fit with its own."""
    x, y = list(cohort.series), cohort.labels
    with config_context(enable_metadata_routing=True):
        centring = SiteCentring().set_fit_request(groups=True).set_transform_request(groups=True)
        pipeline = make_pipeline(Connectivity(), centring, LogisticRegression(C=0.01))
        found = cross_val_predict(
            pipeline, x, y, cv=LeaveOneGroupOut(), params={"groups": cohort.sites}, method="decision_function"
        )
    for fold in leave_one_site_out(cohort):
        train, test = np.isin(cohort.subjects, fold.source.subjects), np.isin(cohort.subjects, fold.target.subjects)
        edges = fc_features(cohort.series).astype(float)
        centred = SiteCentring().fit(edges[train], y[train], groups=cohort.sites[train])
        classifier = LogisticRegression(C=0.01).fit(centred.transform(edges[train], groups=cohort.sites[train]), y[train])
        np.testing.assert_allclose(found[test], classifier.decision_function(centred.transform(edges[test])), atol=1e-6)


def test_from_sklearn_gives_the_sites_to_the_centring(fold):
    """Under the protocol no request is needed, and the sites are those of source."""
    pipeline = make_pipeline(SiteCentring(), LogisticRegression(C=0.01))
    try:
        method = m2lgdg.from_sklearn("test_transformers:centred", features="fc", name="centred").fit(fold.source)
    finally:
        m2lgdg.METHODS.pop("centred", None)
    assert method.method.estimator_[0].sites_.tolist() == sorted(fold.source.site_names)
    edges = fc_features(fold.source.series).astype(float)
    trained = SiteCentring().fit_transform(edges, fold.source.labels, groups=fold.source.sites)
    classifier = clone(pipeline[-1]).fit(trained, fold.source.labels)
    new = SiteCentring().fit(edges, fold.source.labels, groups=fold.source.sites).transform(fc_features(fold.target.series))
    np.testing.assert_allclose(method.predict_proba(fold.target), classifier.predict_proba(new), atol=1e-9)


def centred():
    """A pipeline by import path."""
    return make_pipeline(SiteCentring(), LogisticRegression(C=0.01))


def test_bad_input_is_one_sentence(cohort, fold):
    x = list(cohort.series)
    for part in OF_SCANS:
        with pytest.raises(ValueError, match=rf"{part.__name__} needs series .* but X is a table; give"):
            part().fit(np.zeros((5, 10)))
    fitted = Connectivity().fit(cohort)
    with pytest.raises(ValueError, match=r"X has 5 ROIs, but Connectivity was fitted on \d+"):
        fitted.transform([one[:, :5] for one in x])
    with pytest.raises(ValueError, match="rois has 2 different names, but X has"):
        Connectivity(rois=["a", "b"]).fit(x)
    with pytest.raises(ValueError, match="a single ROI"):
        Connectivity().fit([one[:, :1] for one in x])
    with pytest.raises(ValueError, match=r"ROI 1 is .* in the fit but .* in X: another atlas or order"):
        fitted.transform(m2lgdg.Cohort.from_arrays([one[:, ::-1] for one in x], cohort.labels, "a", rois=cohort.rois[::-1]))
    holed = [one.copy() for one in x]
    holed[3][0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity, first in the array of subject 4"):
        fitted.transform(holed)
    edges = fitted.transform(fold.target)
    for call in (SiteCentring().fit, SiteCentring().fit(edges).transform):
        with pytest.raises(ValueError, match=r"groups has shape \(2,\), but X has \d+ subjects"):
            call(edges, groups=["a", "b"])
    with pytest.raises(ValueError, match=r"y has 1 labels"):
        SiteCentring().fit(edges, [1])
