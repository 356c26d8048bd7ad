"""The contract that every registered method keeps, on a small cohort; a new method is covered the moment it exists."""

import dataclasses
import inspect

import numpy as np
import pandas as pd
import pytest

from m2lgdg import METHODS, InputError, Model, leave_one_site_out, make, make_cohort
from m2lgdg.deep import DeepMethod
from m2lgdg.method import CONNECTOMES, Method, is_network
from m2lgdg.metrics import auc
from m2lgdg.scans import Connectomes

NAMES = sorted(METHODS)
BLIND = {"prior"}  # cannot learn anything
BRAINLESS = {"phenotype-logistic"}  # learn from phenotypes only


@pytest.fixture(scope="module")
def fold():
    cohort = make_cohort("tiny", seed=1)
    return next(leave_one_site_out(cohort, ["west"]))


@pytest.fixture(scope="module")
def fitted(fold):
    """Each method, fitted on the fold's source when it is first asked for."""

    class Fits(dict):
        def __missing__(self, name):
            self[name] = make(name, **small(name)).fit(fold.source, seed=0)
            return self[name]

    return Fits()


def small(name, **changes):
    """Fields that make a method quick enough for the suite; the idea stays the same."""
    fields = dict(METHODS[name].variants.get("small", {}))
    if not issubclass(METHODS[name], DeepMethod):
        return fields
    fields |= {"length": 32, "epochs": 2, "warmup": 1, "batch_size": 16} | changes
    return {field: value for field, value in fields.items() if field not in METHODS[name].unused}


def same_bits(first, second):
    assert first.state_.keys() == second.state_.keys()
    for key, value in first.state_.items():
        assert value.shape == second.state_[key].shape, key
        np.testing.assert_array_equal(value, second.state_[key], err_msg=key)


@pytest.mark.parametrize("name", NAMES)
class TestContract:
    def test_probabilities(self, name, fold, fitted):
        proba = fitted[name].predict_proba(fold.target)
        assert proba.shape == (len(fold.target), 2)
        assert np.isfinite(proba).all()
        assert ((proba >= 0) & (proba <= 1)).all()
        np.testing.assert_allclose(proba.sum(axis=1), 1)

    def test_nothing_of_the_target_reaches_the_fit(self, name, fold, fitted):
        """Refitted with the same seed, while series, phenotypes and labels of the target are noise: all weights are the same.

        Source and target stay as they were.
        """
        rng = np.random.default_rng(9)
        target = dataclasses.replace(
            fold.target,
            series=[rng.normal(size=one.shape) for one in fold.target.series],
            labels=1 - fold.target.labels,
            phenotypes=fold.target.phenotypes.assign(age=rng.uniform(20, 60, len(fold.target))),
        )
        (other,) = leave_one_site_out(make_whole(fold.source, target), ["west"])
        again = make(name, **small(name)).fit(other.source, seed=0)
        same_bits(again, fitted[name])
        own = fold.target.select(np.arange(len(fold.target)))
        np.testing.assert_array_equal(again.predict_proba(own), fitted[name].predict_proba(fold.target))
        for seen, same in ((other.source, fold.source), (own, fold.target)):
            fresh = seen.select(np.arange(len(seen)))._changed(series=tuple(np.array(one) for one in seen.series))
            assert fresh.hash == same.hash

    def test_one_subject_at_a_time_and_any_order(self, name, fold, fitted):
        together = fitted[name].predict_proba(fold.target)
        alone = np.concatenate([fitted[name].predict_proba(fold.target.select([i])) for i in range(len(fold.target))])
        # Calibration of a hardly trained network (two epochs here) magnifies the rounding of single precision.
        near = {"atol": 1e-4 if is_network(fitted[name]) else 1e-9, "rtol": 0}
        np.testing.assert_allclose(alone, together, **near)
        order = np.random.default_rng(0).permutation(len(fold.target))
        np.testing.assert_allclose(fitted[name].predict_proba(fold.target.select(order)), together[order], **near)

    def test_labels_sites_and_ids_of_the_target_are_not_looked_at(self, name, fold, fitted):
        disguised = dataclasses.replace(
            fold.target,
            labels=1 - fold.target.labels,
            sites=np.array(["north"] * len(fold.target)),
            subjects=np.array([f"x{i}" for i in range(len(fold.target))]),
        )
        np.testing.assert_array_equal(fitted[name].predict_proba(disguised), fitted[name].predict_proba(fold.target))

    def test_odd_source_sites_and_missing_phenotypes(self, name, fold, fitted):
        """A source site of one class, one of a single subject, one without ages, and nobody's education is known."""
        empty = fold.target.phenotypes.assign(sex=np.nan, age=np.nan, education=np.nan)
        without = dataclasses.replace(fold.target, phenotypes=empty)
        assert np.isfinite(fitted[name].predict_proba(without)).all()
        source = fold.source
        east, south = source.sites == "east", source.sites == "south"
        chosen = ~east & ~south | (east & (source.labels == 1))
        chosen[np.flatnonzero(south)[:1]] = True
        holes = source.phenotypes.copy()
        holes.loc[source.sites == "north", "age"] = np.nan
        holes["education"] = np.nan
        odd = dataclasses.replace(source, phenotypes=holes).select(chosen)
        refitted = make(name, **small(name)).fit(odd, seed=0)
        assert all(np.isfinite(refitted.predict_proba(one)).all() for one in (fold.target, without))

    def test_flat_rois_and_other_lengths(self, name, fold, fitted):
        series = [np.array(one[: 40 + i]) for i, one in enumerate(fold.target.series)]
        for one in series:
            one[:, 3] = 7.0
        assert np.isfinite(fitted[name].predict_proba(dataclasses.replace(fold.target, series=series))).all()

    def test_save_and_load_bit_exact(self, name, fold, fitted, tmp_path):
        loaded = Model.load(fitted[name].save(tmp_path / "model"))
        assert type(loaded) is type(fitted[name])
        assert loaded.fields() == fitted[name].fields()
        assert loaded.facts_ == fitted[name].facts_
        same_bits(loaded, fitted[name])
        np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted[name].predict_proba(fold.target))
        assert not [file for file in (tmp_path / "model").iterdir() if file.suffix not in (".json", ".safetensors")]

    def test_refuses_what_it_was_not_trained_on(self, name, fold, fitted):
        rois = (fold.target.rois[1], fold.target.rois[0], *fold.target.rois[2:])
        with pytest.raises(InputError, match=r"ROI 1 is roi-001 in the model but roi-002 in the cohort"):
            fitted[name].predict_proba(dataclasses.replace(fold.target, rois=rois))
        with pytest.raises(InputError, match="is not fitted yet"):
            make(name).predict_proba(fold.target)
        with pytest.raises(InputError, match="only one class"):
            make(name).fit(fold.source.select(fold.source.labels == 1))

    def test_documented(self, name, fold):
        cls = METHODS[name]
        assert cls.__doc__
        assert len(cls.__doc__.splitlines()[0]) < 140
        for changes in [*cls.variants.values(), *({field: values[0]} for field, values in cls.space.items())]:
            assert make(name, **changes).fields() is not None


# What these take from connectomes is not what they take from series: no Ledoit-Wolf covariance, frame weights, amplitude, time.
OTHERWISE = {"tangent-logistic", "tangent-ridge", "connectome-ensemble", "connectome-adaptive", "m2lgdg-connectome"}
OTHERWISE |= {"braingnn", "metaexplainer"}
ROUNDED = {"brainnet-transformer": 1e-4, "tangent-pearson-ridge": 1e-6}  # take correlations, which are stored as Fisher z
ON_CONNECTOMES = [name for name in NAMES if CONNECTOMES in METHODS[name].takes]


@pytest.fixture(scope="module")
def of_connectomes(fold):
    """The same fold of connectomes. Its source is from a cohort whose target is noise."""
    rng = np.random.default_rng(9)
    noise = [rng.normal(size=one.shape) for one in fold.target.series]
    other = dataclasses.replace(fold.target, series=noise, labels=1 - fold.target.labels)
    (made,) = leave_one_site_out(make_whole(fold.source, other).to_connectomes(), ["west"])
    return made._replace(target=fold.target.to_connectomes())


@pytest.fixture(scope="module")
def fitted_there(of_connectomes):
    """Each method, fitted on the connectomes of source when it is first asked for."""

    class Fits(dict):
        def __missing__(self, name):
            self[name] = make(name, **small(name)).fit(of_connectomes.source, seed=0)
            return self[name]

    return Fits()


def test_series_are_needed_only_by_methods_of_series(of_connectomes):
    """These read what no connectome has; they say so, and which methods can."""
    assert set(NAMES) - set(ON_CONNECTOMES) == {"m2dc", "m2lgdg", "msstan", "ufa-net"}
    for name in sorted(set(NAMES) - set(ON_CONNECTOMES)):
        with pytest.raises(InputError, match=f"^method {name} needs time series, and cohort tiny holds .* average, braingnn, "):
            make(name).fit(of_connectomes.source)


@pytest.mark.parametrize("name", ON_CONNECTOMES)
class TestContractOnConnectomes:
    def test_as_from_series_whatever_the_target(self, name, fold, fitted, of_connectomes, fitted_there):
        found = fitted_there[name]
        if name in OTHERWISE:
            same_bits(found, make(name, **small(name)).fit(fold.source.to_connectomes(), seed=0))
            assert not np.allclose(found.predict_proba(of_connectomes.target), fitted[name].predict_proba(fold.target))
        elif name not in ROUNDED:
            same_bits(found, fitted[name])
        if name not in OTHERWISE:
            expected = fitted[name].predict_proba(fold.target)
            np.testing.assert_allclose(found.predict_proba(of_connectomes.target), expected, rtol=0, atol=ROUNDED.get(name, 0))

    def test_one_subject_at_a_time_without_label_and_with_an_empty_roi(self, name, of_connectomes, fitted_there):
        target, found = of_connectomes.target, fitted_there[name]
        together = found.predict_proba(target)
        assert np.isfinite(together).all()
        disguised = target.select(np.arange(len(target))[::-1])._changed(labels=1 - target.labels, sites=target.sites[::-1])
        alone = np.concatenate([found.predict_proba(disguised.select([i])) for i in range(len(target))])[::-1]
        np.testing.assert_allclose(alone, together, rtol=0, atol=1e-4 if is_network(found) else 1e-9)
        matrices = np.stack(target.connectomes)
        matrices[:, 3] = matrices[:, :, 3] = 0.0
        empty = dataclasses.replace(target, series=Connectomes.of(matrices, target.values, len(target.rois)))
        assert np.isfinite(found.predict_proba(empty)).all()

    def test_save_and_load_bit_exact(self, name, of_connectomes, fitted_there, tmp_path):
        loaded = Model.load(fitted_there[name].save(tmp_path / "model"))
        assert loaded.facts_ == fitted_there[name].facts_ and loaded.facts_["scans"] == "fisher-z"
        same_bits(loaded, fitted_there[name])
        expected = fitted_there[name].predict_proba(of_connectomes.target)
        np.testing.assert_array_equal(loaded.predict_proba(of_connectomes.target), expected)

    def test_another_kind_of_scans_is_refused(self, name, fold, fitted, of_connectomes, fitted_there):
        with pytest.raises(InputError, match=r"trained on connectomes \(fisher-z\), and cohort tiny holds time series"):
            fitted_there[name].predict_proba(fold.target)
        with pytest.raises(InputError, match=r"trained on time series, and cohort tiny holds connectomes \(fisher-z\)"):
            fitted[name].predict_proba(of_connectomes.target)


@pytest.mark.parametrize("kind", ["correlation", "covariance", "partial-correlation"])
@pytest.mark.parametrize("name", ["fc-logistic", "tangent-ridge", "tangent-pearson-ridge", "braingnn", "metaexplainer"])
def test_every_kind_of_connectome_is_learned_from(name, kind, of_connectomes):
    def as_kind(cohort):
        scale = 3.0 if kind == "covariance" else 1.0
        matrices = [scale * (np.tanh(one) + np.eye(len(one))) for one in cohort.connectomes]
        return dataclasses.replace(cohort, series=Connectomes.of(matrices, kind, len(cohort.rois)))

    model = make(name, **small(name)).fit(as_kind(of_connectomes.source), seed=0)
    proba = model.predict_proba(as_kind(of_connectomes.target))
    assert np.isfinite(proba).all() and np.ptp(proba[:, 1]) > 0
    if name == "fc-logistic":  # correlations by any scale are the same features
        same = make(name).fit(of_connectomes.source).predict_proba(of_connectomes.target)
        np.testing.assert_allclose(proba, same, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_and_the_rounding_of_source_do_not_matter(name):
    """Where they could most: one source site has both classes, so that most subjects have no weight in some methods."""
    cohort = make_cohort("tiny", sizes={"a": 16, "b": 12, "c": 12, "d": 12, "west": 10}, seed=3)
    (fold,) = leave_one_site_out(cohort, ["west"])
    one_class = {"b": 0, "c": 1, "d": 0}
    source = fold.source.select([one_class.get(s, y) == y for s, y in zip(fold.source.sites, fold.source.labels, strict=True)])
    shuffled = source.select(np.random.default_rng(0).permutation(len(source)))
    rounded = source._changed(series=[(one.astype(np.float64) * (1 + 1e-7)).astype(np.float32) for one in source.series])
    fits = [make(name, **small(name, epochs=1, warmup=0)).fit(one, seed=0) for one in (source, shuffled, rounded)]
    expected, *found = [one.predict_proba(fold.target)[:, 1] for one in fits]
    for proba in found:
        np.testing.assert_allclose(proba, expected, atol=2e-3)


def older(fold):
    """The target with other ages, its series unchanged."""
    return dataclasses.replace(fold.target, phenotypes=fold.target.phenotypes.assign(age=fold.target.phenotypes["age"] + 9.0))


# These take phenotypes as published; all other networks only in a variant.
TAKES = {"m2lgdg", "m2lgdg-connectome", "mm-gtunets"}
NETWORKS = [name for name in NAMES if issubclass(METHODS[name], DeepMethod)]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_phenotypes_only_where_asked_to(name, fold, fitted, tmp_path):
    """Every network has one field for it, with the publication's choice as default."""
    assert make(name).phenotypes == (name in TAKES)
    if name not in TAKES:
        assert METHODS[name].variants["phenotypes"] == {"phenotypes": True}
    other = make(name, **small(name) | {"phenotypes": name not in TAKES}).fit(fold.source, seed=0)
    loaded = Model.load(other.save(tmp_path))
    same_bits(loaded, other)
    for model in (fitted[name], loaded):
        proba, takes = model.predict_proba(fold.target), model.method.phenotypes
        assert model.facts_["inputs"] == (model.method.taken(fold.source) if takes else [])
        assert np.array_equal(model.predict_proba(older(fold)), proba) == (not takes)
    np.testing.assert_array_equal(proba, other.predict_proba(fold.target))
    assert not np.array_equal(proba, fitted[name].predict_proba(fold.target))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_state_the_settings_of_their_training(name):
    """Nothing about updates, clipping, smoothing or selection is inherited from the training loop unseen."""
    stated = {field for cls in METHODS[name].__mro__ if cls is not DeepMethod for field in inspect.get_annotations(cls)}
    assert {"update_rule", "clip", "label_smoothing", "select_after_warmup", "phenotypes"} <= stated


OF_SERIES = {  # fields of m2lgdg that a network on connectomes inherits and does not use
    **{"global_channels": (4, 4), "global_kernels": (3, 3), "global_width": 8, "local_strides": (1,), "local_width": 8},
    **{"temporal_kernel": 3, "patience": 1, "select_after_warmup": False},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_unused_fields_change_nothing_and_sizes_that_are_used_do(name, fold, fitted, monkeypatch):
    unused = METHODS[name].unused
    other = {"length": 40, "batch_size": 8, "dropout": 0.7}
    other |= {field: OF_SERIES[field] for field in unused if field not in other}
    for field in unused:
        with pytest.raises(InputError, match=f"method {name}, field {field}: this method does not use it"):
            make(name, **{field: other[field]})
    together = {field: other[field] for field in unused}
    for changes in ([together] if together else []) + [{field: other[field]} for field in other if field not in unused]:
        with monkeypatch.context() as allowed:
            allowed.setattr(METHODS[name], "unused", ())
            state = make(name, **small(name) | changes).fit(fold.source, seed=0).state_
        same = all(np.array_equal(one, fitted[name].state_.get(key)) for key, one in state.items())
        assert same == (changes == together), changes


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # PyTorch tells so of small bfloat16 products on some CPUs
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_in_half_precision_and_when_told_to_be_deterministic(name, fold):
    proba = make(name, **small(name, precision="bf16", deterministic=True)).fit(fold.source, seed=0).predict_proba(fold.target)
    assert np.isfinite(proba).all()
    assert np.ptp(proba[:, 1]) > 0


def make_whole(first, *others):
    """One cohort of several."""
    every = [first, *others]
    joined = {name: np.concatenate([getattr(one, name) for one in every]) for name in ("subjects", "sites", "labels", "tr")}
    series = [one for cohort in every for one in cohort.series]
    whole = dataclasses.replace(first, series=series, phenotypes=pd.concat([one.phenotypes for one in every]), **joined)
    return whole.select(np.argsort(whole.subjects))


@pytest.fixture(scope="module")
def planted():
    """A strong signal at three sites to learn from, and at a fourth with enough subjects to measure an AUC."""
    sizes = {"a": 160, "b": 40, "c": 40, "d": 40}
    return make_cohort("tiny", sizes=sizes, roi_effect=2.0, edge_effect=2.5, phenotype_effect=1.5, missing=0.0, seed=2)


def held_out_auc(name, cohort, **training):
    (fold,) = leave_one_site_out(cohort, ["a"])
    proba = make(name, **small(name, **training)).fit(fold.source, seed=0).predict_proba(fold.target)[:, 1]
    return auc(fold.target.labels, proba)


TRAINED = {"length": 50, "epochs": 20, "warmup": 2, "batch_size": 32}  # enough for a network to learn what is planted


def trained_at_length(names):
    """Every method; of the networks only two in `make test`, the others among the long tests."""
    return [pytest.param(n, marks=pytest.mark.long if n in NETWORKS and n not in ("erm", "m2lgdg") else ()) for n in names]


@pytest.mark.parametrize("name", trained_at_length(name for name in NAMES if name not in BLIND))
def test_learns_a_planted_signal(name, planted):
    # A network learns less from 120 subjects than a linear model does.
    least = 0.75 if name in BRAINLESS else 0.8 if name in NETWORKS else 0.85
    assert held_out_auc(name, planted, **TRAINED) > least


@pytest.mark.parametrize("name", trained_at_length(NAMES))
def test_stays_at_chance_on_permuted_labels(name, planted):
    shuffled = dataclasses.replace(planted, labels=np.random.default_rng(3).permutation(planted.labels))
    assert abs(held_out_auc(name, shuffled, epochs=5) - 0.5) < 4 * 0.58 / np.sqrt(160)  # 4 se


class Spy(Method):
    """Keeps what `score` is given, as a method that wanted to peek would."""

    name = "spy"

    def learn(self, source, *, seed, device, progress):
        self.state_["x"] = np.zeros(1)

    def score(self, target):
        self.seen = target
        return np.full(len(target), 0.5)


def test_a_method_that_wants_to_peek_sees_nothing(fold):
    """No method of ours looks at labels, so only a spy can tell whether they are there to be looked at."""
    assert set(fold.target.labels.tolist()) == {0, 1}
    spy = Spy().fit(fold.source)
    spy.predict_proba(fold.target)
    assert set(spy.seen.labels.tolist()) == {-1}
    assert set(spy.seen.sites.tolist()) == {""}
    assert not set(spy.seen.subjects.tolist()) & set(fold.target.subjects.tolist())
    assert list(spy.seen.phenotypes.columns) == list(fold.source.inputs)
    assert spy.seen.truth is None
