"""The contract that every registered method keeps, on a small cohort; a new method is covered the moment it exists."""

import dataclasses
import inspect
from functools import cache

import numpy as np
import pytest

from m2lgdg import METHODS, InputError, leave_one_site_out, make, make_cohort
from m2lgdg.deep import DeepMethod
from m2lgdg.method import Method
from m2lgdg.metrics import auc

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

    def test_same_seed_same_bits(self, name, fold, fitted):
        again = make(name, **small(name)).fit(fold.source, seed=0)
        same_bits(again, fitted[name])
        np.testing.assert_array_equal(again.predict_proba(fold.target), fitted[name].predict_proba(fold.target))

    def test_one_subject_at_a_time_and_any_order(self, name, fold, fitted):
        together = fitted[name].predict_proba(fold.target)
        alone = np.concatenate([fitted[name].predict_proba(fold.target.select([i])) for i in range(len(fold.target))])
        # Calibration of a hardly trained network (two epochs here) magnifies the rounding of single precision.
        near = {"atol": 1e-4 if isinstance(fitted[name], DeepMethod) else 1e-9, "rtol": 0}
        np.testing.assert_allclose(alone, together, **near)
        order = np.random.default_rng(0).permutation(len(fold.target))
        np.testing.assert_allclose(fitted[name].predict_proba(fold.target.select(order)), together[order], **near)

    def test_nothing_of_the_target_reaches_the_fit(self, name, fold, fitted):
        """The target's series, phenotypes and labels replaced by noise: the weights stay the same, bit for bit."""
        rng = np.random.default_rng(9)
        target = dataclasses.replace(
            fold.target,
            series=[rng.normal(size=one.shape) for one in fold.target.series],
            labels=1 - fold.target.labels,
            phenotypes=fold.target.phenotypes.assign(age=rng.uniform(20, 60, len(fold.target))),
        )
        both = [fold.source.select(sites=[site]) for site in fold.source.site_names] + [target]
        whole = make_whole(both)
        (other,) = leave_one_site_out(whole, ["west"])
        same_bits(make(name, **small(name)).fit(other.source, seed=0), fitted[name])

    def test_labels_sites_and_ids_of_the_target_are_not_looked_at(self, name, fold, fitted):
        disguised = dataclasses.replace(
            fold.target,
            labels=1 - fold.target.labels,
            sites=np.array(["north"] * len(fold.target)),
            subjects=np.array([f"x{i}" for i in range(len(fold.target))]),
        )
        np.testing.assert_array_equal(fitted[name].predict_proba(disguised), fitted[name].predict_proba(fold.target))

    def test_odd_source_sites(self, name, fold):
        """A source site of one class, one of a single subject."""
        source = fold.source
        east, south = source.sites == "east", source.sites == "south"
        single = np.flatnonzero(south)[:1]
        keep = ~east & ~south | (east & (source.labels == 1))
        keep[single] = True
        proba = make(name, **small(name)).fit(source.select(keep), seed=0).predict_proba(fold.target)
        assert np.isfinite(proba).all()

    def test_missing_phenotypes(self, name, fold, fitted):
        empty = fold.target.phenotypes.assign(sex=np.nan, age=np.nan, education=np.nan)
        proba = fitted[name].predict_proba(dataclasses.replace(fold.target, phenotypes=empty))
        assert np.isfinite(proba).all()
        holes = fold.source.phenotypes.copy()
        holes.loc[fold.source.sites == "north", "age"] = np.nan
        holes["education"] = np.nan
        refitted = make(name, **small(name)).fit(dataclasses.replace(fold.source, phenotypes=holes), seed=0)
        assert np.isfinite(refitted.predict_proba(fold.target)).all()

    def test_flat_rois_and_other_lengths(self, name, fold, fitted):
        series = [np.array(one[: 40 + i]) for i, one in enumerate(fold.target.series)]
        for one in series:
            one[:, 3] = 7.0
        assert np.isfinite(fitted[name].predict_proba(dataclasses.replace(fold.target, series=series))).all()

    def test_save_and_load_bit_exact(self, name, fold, fitted, tmp_path):
        loaded = Method.load(fitted[name].save(tmp_path / "model"))
        assert type(loaded) is type(fitted[name])
        assert loaded.fields() == fitted[name].fields()
        assert loaded.facts_ == fitted[name].facts_
        same_bits(loaded, fitted[name])
        np.testing.assert_array_equal(loaded.predict_proba(fold.target), fitted[name].predict_proba(fold.target))
        assert not [file for file in (tmp_path / "model").iterdir() if file.suffix not in (".json", ".safetensors")]

    def test_input_not_mutated(self, name, fold):
        before = fold.source.hash, fold.target.hash
        fresh = fold.source.select(np.arange(len(fold.source))), fold.target.select(np.arange(len(fold.target)))
        make(name, **small(name)).fit(fresh[0], seed=0).predict_proba(fresh[1])
        assert (fresh[0].hash, fresh[1].hash) == before

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


def older(fold):
    """The target with other ages, its series unchanged."""
    return dataclasses.replace(fold.target, phenotypes=fold.target.phenotypes.assign(age=fold.target.phenotypes["age"] + 9.0))


# These take phenotypes as published; all other networks only in a variant.
TAKES = {"m2lgdg", "m2lgdg-connectome", "mm-gtunets"}
NETWORKS = [name for name in NAMES if issubclass(METHODS[name], DeepMethod)]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_phenotypes_only_where_asked_to(name, fold, tmp_path):
    """Every network has one field for it, with the publication's choice as default."""
    assert make(name).phenotypes == (name in TAKES)
    if name not in TAKES:
        assert METHODS[name].variants["phenotypes"] == {"phenotypes": True}
    probas = {}
    for phenotypes in (False, True):
        own = make(name, **small(name) | {"phenotypes": phenotypes}).fit(fold.source, seed=0)
        loaded = Method.load(own.save(tmp_path / str(phenotypes)))
        same_bits(loaded, own)
        probas[phenotypes] = own.predict_proba(fold.target)
        np.testing.assert_array_equal(loaded.predict_proba(fold.target), probas[phenotypes])
        assert own.facts_["inputs"] == (own.taken(fold.source) if phenotypes else [])
        changed = loaded.predict_proba(older(fold))
        assert np.array_equal(changed, probas[phenotypes]) == (not phenotypes)
    assert not np.array_equal(probas[False], probas[True])


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
    for field, value in other.items():
        if field in unused:
            with pytest.raises(InputError, match=f"method {name}, field {field}: this method does not use it"):
                make(name, **{field: value})
        with monkeypatch.context() as allowed:
            allowed.setattr(METHODS[name], "unused", ())
            state = make(name, **small(name) | {field: value}).fit(fold.source, seed=0).state_
        same = all(np.array_equal(one, fitted[name].state_.get(key)) for key, one in state.items())
        assert same == (field in unused), field


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # PyTorch tells so of small bfloat16 products on some CPUs
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_in_half_precision_and_when_told_to_be_deterministic(name, fold):
    proba = make(name, **small(name, precision="bf16", deterministic=True)).fit(fold.source, seed=0).predict_proba(fold.target)
    assert np.isfinite(proba).all()
    assert np.ptp(proba[:, 1]) > 0


def make_whole(parts):
    """One cohort of several."""
    import pandas as pd

    first = parts[0]
    joined = dataclasses.replace(
        first,
        series=[one for part in parts for one in part.series],
        subjects=np.concatenate([part.subjects for part in parts]),
        sites=np.concatenate([part.sites for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        tr=np.concatenate([part.tr for part in parts]),
        phenotypes=pd.concat([part.phenotypes for part in parts]),
    )
    return joined.select(np.argsort(joined.subjects))


@cache
def planted(deep):
    """A strong signal at four sites; a network is held out of the first only, which has twice the subjects to score."""
    sizes = {"a": 80 if deep else 40, "b": 40, "c": 40, "d": 40}
    return make_cohort("tiny", sizes=sizes, roi_effect=2.0, edge_effect=2.5, phenotype_effect=1.5, missing=0.0, seed=2)


def held_out_auc(name, cohort):
    areas = []
    for fold in leave_one_site_out(cohort, ["a"] if issubclass(METHODS[name], DeepMethod) else None):
        proba = make(name, **small(name, **TRAINED)).fit(fold.source, seed=0).predict_proba(fold.target)[:, 1]
        areas.append(auc(fold.target.labels, proba))
    return float(np.mean(areas))


TRAINED = {"length": 50, "epochs": 20, "warmup": 2, "batch_size": 32}  # enough for a network to learn what is planted


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BLIND])
def test_learns_a_planted_signal(name):
    deep = issubclass(METHODS[name], DeepMethod)
    # A network learns less from 120 subjects than a linear model does.
    assert held_out_auc(name, planted(deep)) > (0.75 if name in BRAINLESS else 0.8 if deep else 0.85)


@pytest.mark.parametrize("name", NAMES)
def test_stays_at_chance_on_permuted_labels(name):
    draw = np.random.default_rng(3)
    deep = issubclass(METHODS[name], DeepMethod)
    cohort = planted(deep)
    shuffled = [dataclasses.replace(cohort, labels=draw.permutation(cohort.labels)) for _ in range(2)]
    scored = 2 * (80 if deep else 160)
    assert abs(np.mean([held_out_auc(name, one) for one in shuffled]) - 0.5) < 4 * 0.58 / np.sqrt(scored)  # 4 se


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
