"""Who trains and who tests, over random compositions of sites and labels."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sklearn.model_selection import GroupKFold

from m2lgdg import Cohort, InputError, make, make_cohort
from m2lgdg.methods.within_sites import balance
from m2lgdg.metrics import auc
from m2lgdg.splits import leave_one_site_out, site_folds, validation_split

SERIES = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def cohort_of(pairs, shuffle=None):
    """A cohort of (site, label) pairs, one subject each."""
    pairs = list(pairs)
    if shuffle is not None:
        np.random.default_rng(shuffle).shuffle(pairs)
    return Cohort(
        series=[SERIES] * len(pairs),
        subjects=[f"p{i:03d}" for i in range(len(pairs))],
        sites=[str(site) for site, _ in pairs],
        labels=[int(label) for _, label in pairs],
        rois=("r1", "r2"),
    )


def expand(sizes, names=None):
    """(site, label) pairs from a list of (controls, patients, unknown) of each site."""
    for i, counts in enumerate(sizes):
        for label, count in zip((0, 1, -1), counts, strict=False):
            yield from [(names[i] if names else f"site-{i + 1}", label)] * count


cell = st.one_of(st.integers(0, 3), st.integers(0, 30))
labelled_sites = st.lists(st.tuples(cell, cell).filter(any), min_size=1, max_size=7)
mixed_sites = st.lists(st.tuples(cell, cell, st.integers(0, 2)).filter(any), min_size=2, max_size=6)


def both_classes(labels):
    return {0, 1} <= set(np.asarray(labels).tolist())


@quick
@given(mixed_sites, st.integers(0, 99))
def test_leave_one_site_out_cuts_every_site_off_once(sizes, shuffle):
    cohort = cohort_of(expand(sizes), shuffle)
    assume(both_classes(cohort.labels))
    where = dict(zip(cohort.subjects.tolist(), zip(cohort.sites.tolist(), cohort.labels.tolist(), strict=True), strict=True))
    labelled = {name for name, (_, label) in where.items() if label != -1}
    seen = []
    for fold in leave_one_site_out(cohort):
        site, source, target = fold
        seen.append(site)
        assert (fold.site, fold.source, fold.target) == (site, source, target)
        inside, outside = set(source.subjects.tolist()), set(target.subjects.tolist())
        assert not inside & outside
        assert inside == {name for name in labelled if where[name][0] != site}
        assert outside == {name for name, (own, _) in where.items() if own == site}
        assert (inside | outside) >= labelled
        for part in (source, target):
            for name, own, label in zip(part.subjects.tolist(), part.sites.tolist(), part.labels.tolist(), strict=True):
                assert where[name] == (own, label)
    assert sorted(seen) == sorted({own for own, _ in where.values()})


def test_targets_can_be_named_and_come_in_that_order():
    cohort = cohort_of(expand([(2, 2), (2, 2), (1, 3)]))
    assert [fold.site for fold in leave_one_site_out(cohort, ["site-3", "site-1"])] == ["site-3", "site-1"]
    assert [fold.site for fold in leave_one_site_out(cohort, iter(["site-2"]))] == ["site-2"]
    assert [fold.site for fold in leave_one_site_out(cohort, ["site-2", "site-2"])] == ["site-2"]  # a target is held out once


def test_a_site_without_labels_or_with_one_class_can_be_a_target():
    cohort = cohort_of(expand([(2, 2, 0), (0, 0, 3), (0, 2, 1), (3, 1, 0)]))
    folds = {fold.site: fold for fold in leave_one_site_out(cohort)}
    assert len(folds["site-2"].target) == 3 and len(folds["site-2"].source) == 10
    assert len(folds["site-3"].target) == 3 and len(folds["site-3"].source) == 8


@pytest.mark.parametrize(
    ("sizes", "targets", "words"),
    [
        ([(2, 2), (2, 2)], ["site-9"], "site-9"),
        ([(2, 2), (2, 2)], ["site-1", "Site-2"], "Site-2"),
        ([(4, 4)], None, "one site"),
        ([(4, 4)], ["site-1"], "one site"),
        ([(4, 0), (3, 0)], None, "one class"),
        ([(0, 4), (0, 3, 2)], None, "one class"),
        ([(0, 0, 4), (0, 0, 3)], None, "one class"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_the_first_fold(sizes, targets, words):
    with pytest.raises(InputError, match=words):
        next(leave_one_site_out(cohort_of(expand(sizes)), targets))


def counts_of(cohort, positions=None):
    positions = range(len(cohort)) if positions is None else positions
    return Counter((str(cohort.sites[i]), int(cohort.labels[i])) for i in positions)


def assert_partition(cohort, train, held):
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(cohort)))
    assert train.tolist() == sorted(train.tolist()) and held.tolist() == sorted(held.tolist())
    assert np.issubdtype(train.dtype, np.integer) and np.issubdtype(held.dtype, np.integer)


@quick
@given(labelled_sites, st.integers(0, 10_000), st.sampled_from([0.15, 0.15, 0.1, 0.25, 0.3]))
def test_validation_takes_its_share_of_every_cell(sizes, seed, proportion):
    cohort = cohort_of(expand(sizes), seed)
    train, held = validation_split(cohort, seed=seed, proportion=proportion)
    assert_partition(cohort, train, held)
    whole, taken = counts_of(cohort), counts_of(cohort, held)
    least = most = 0
    for key, n in whole.items():
        if n == 1:
            assert taken[key] == 0  # a subject alone in its cell is for training
            continue
        assert abs(taken[key] - proportion * n) < 1 + 1e-9, key
        assert taken[key] < n, key
        least += math.floor(proportion * n + 1e-9)
        most += math.ceil(proportion * n - 1e-9)
    # The whole proportion, unless so many subjects are alone in their cell that the others cannot make up for them.
    possible = min(max(proportion * len(cohort), least), most)
    assert abs(len(held) - possible) <= 0.5 + 1e-9
    if 1 not in whole.values():
        assert abs(len(held) - proportion * len(cohort)) < 1
    if both_classes(cohort.labels):
        assert both_classes(cohort.labels[train])


def test_validation_default_is_fifteen_percent():
    cohort = cohort_of(expand([(20, 20), (40, 60), (7, 13)]))
    train, held = validation_split(cohort, seed=0)
    assert (len(train), len(held)) == (136, 24)
    taken = counts_of(cohort, held)
    assert [taken["site-1", 0], taken["site-1", 1], taken["site-2", 0], taken["site-2", 1]] == [3, 3, 6, 9]
    assert taken["site-3", 0] + taken["site-3", 1] == 3


@pytest.mark.parametrize("by", ["subject", "site"])
def test_validation_is_seeded(by):
    cohort = cohort_of(expand([(9, 8), (7, 7), (12, 5), (1, 2), (5, 5)]))
    np.random.seed(0)
    first = validation_split(cohort, seed=5, by=by)
    np.random.seed(1)
    again = validation_split(cohort, seed=5, by=by)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert len({tuple(validation_split(cohort, seed=seed, by=by)[1]) for seed in range(20)}) > 2


def test_anyone_but_those_alone_in_their_cell_can_be_drawn():
    cohort = cohort_of(expand([(9, 8), (3, 7), (1, 2)]))
    drawn = Counter(i for seed in range(400) for i in validation_split(cohort, seed=seed)[1].tolist())
    whole = counts_of(cohort)
    alone = {i for i in range(len(cohort)) if whole[str(cohort.sites[i]), int(cohort.labels[i])] == 1}
    assert set(drawn) == set(range(len(cohort))) - alone
    assert all(0.08 < count / 400 < 0.3 for count in drawn.values())


@quick
@given(
    st.lists(st.tuples(cell, cell).filter(any), min_size=2, max_size=7), st.integers(0, 10_000), st.sampled_from([0.15, 0.4])
)
def test_validation_by_site_takes_whole_sites_until_the_share_is_reached(sizes, seed, proportion):
    cohort = cohort_of(expand(sizes), seed)
    train, held = validation_split(cohort, seed=seed, proportion=proportion, by="site")
    assert_partition(cohort, train, held)
    assert len(train) and len(held)
    assert not set(cohort.sites[train].tolist()) & set(cohort.sites[held].tolist())
    members = Counter(cohort.sites[held].tolist())
    assert len(held) >= proportion * len(cohort) - 1e-9 or len(set(cohort.sites[train].tolist())) == 1
    # Whichever came last, the proportion was not reached without it.
    assert len(members) == 1 or len(held) - max(members.values()) < proportion * len(cohort)


def test_validation_by_site_needs_two_sites():
    with pytest.raises(InputError, match="site"):
        validation_split(cohort_of(expand([(5, 5)])), seed=0, by="site")


@quick
@given(st.lists(st.tuples(cell, cell).filter(any), min_size=2, max_size=8), st.integers(2, 6), st.integers(0, 99))
def test_site_folds_hold_out_whole_sites(sizes, count, shuffle):
    cohort = cohort_of(expand(sizes), shuffle)
    sites, labels = cohort.sites, cohort.labels
    folds = site_folds(sites, labels, count)
    assert len(folds) <= min(count, len(sizes))
    tested = Counter()
    for train, test in folds:
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(sites)))
        assert not set(sites[train].tolist()) & set(sites[test].tolist())
        assert both_classes(labels[train])
        assert len(test)
        tested.update(test.tolist())
    assert all(times == 1 for times in tested.values())
    controls, patients = (set(sites[labels == label].tolist()) for label in (0, 1))
    if len(controls) > 1 and len(patients) > 1 and count >= len(sizes):  # one site a fold: no fold can lose a class
        assert len(folds) == len(sizes) and len(tested) == len(sites)
    if len(folds) == min(count, len(sizes)):  # none was left out, so that their sizes are to be compared
        lengths = [len(test) for _, test in folds]
        assert max(lengths) - min(lengths) <= max(Counter(sites.tolist()).values())


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=30), st.integers(2, 12), st.randoms(use_true_random=False))
def test_site_folds_are_those_of_scikit_learn(sizes, count, shuffle):
    """Many sites of the same size: the order of ties counts, too."""
    sites = [f"s{i}" for i, size in enumerate(sizes) for _ in range(size)]
    shuffle.shuffle(sites)
    sites, labels = np.array(sites), np.array([0, 1] * len(sites), dtype=np.int8)[: len(sites)]
    wanted = GroupKFold(min(count, len(sizes))).split(sites, groups=sites)
    wanted = [(train, test) for train, test in wanted if len(set(labels[train])) == 2]
    found = site_folds(sites, labels, count)
    assert [[part.tolist() for part in fold] for fold in found] == [[part.tolist() for part in fold] for fold in wanted]


def test_site_folds_are_balanced_where_they_can_be():
    cohort = cohort_of(expand([(10, 10), (5, 5), (5, 5), (2, 3), (3, 2), (6, 4)]))
    assert [len(test) for _, test in site_folds(cohort.sites, cohort.labels, 3)] == [20, 20, 20]


@quick
@given(st.integers(0, 12), st.integers(0, 12), st.integers(2, 5), st.integers(0, 99))
def test_site_folds_of_one_site_are_stratified_folds_of_subjects(controls, patients, count, shuffle):
    assume(controls + patients)
    cohort = cohort_of(expand([(controls, patients)]), shuffle)
    folds = site_folds(cohort.sites, cohort.labels, count)
    if min(controls, patients) < 2:
        assert folds == []
        return
    tested = Counter()
    assert 2 <= len(folds) <= count
    for train, test in folds:
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(cohort)))
        assert both_classes(cohort.labels[train])
        for label, total in ((0, controls), (1, patients)):
            assert abs(int((cohort.labels[test] == label).sum()) - total / len(folds)) < 1
        tested.update(test.tolist())
    assert tested == Counter(range(len(cohort)))


def test_site_folds_without_both_classes_are_none():
    cohort = cohort_of(expand([(3, 0), (4, 0)]))
    assert site_folds(cohort.sites, cohort.labels, 3) == []
    apart = cohort_of(expand([(3, 0), (0, 4)]))  # holding either out leaves one class
    assert site_folds(apart.sites, apart.labels, 3) == []


@quick
@given(st.lists(st.tuples(cell, cell).filter(any), min_size=2, max_size=8), st.integers(2, 6), st.integers(0, 99))
def test_site_folds_train_on_both_classes_with_weight(sizes, count, shuffle):
    """Whatever the sites: weights are those of methods that compare patients and controls within sites."""
    cohort = cohort_of(expand(sizes), shuffle)
    weights = balance(cohort)
    folds = site_folds(cohort.sites, cohort.labels, count, weights)
    for train, test in folds:
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(cohort)))
        assert both_classes(cohort.labels[train][weights[train] > 0])
    compared = [min(pair) for pair in sizes if min(pair)]
    if len(compared) > 1 or (compared and max(compared) > 1):
        held = np.concatenate([test for _, test in folds])
        assert set(np.flatnonzero(weights).tolist()) <= set(held.tolist())


@pytest.mark.parametrize("size", [1, 20])
def test_one_source_site_with_both_classes_is_enough_to_fit(size):
    """The others are of one class each: no fold is fitted on weights of 0, whose decisions would be rounding errors."""
    made = make_cohort("tiny", sizes={"both": 40, "b": 30, "c": 30, "new": 20}, edge_effect=2.5, seed=0)
    rank = np.concatenate([np.cumsum(made.labels[made.sites == site] == 1) for site in made.site_names])
    few = (rank <= size) if size == 1 else np.ones(len(made), dtype=bool)
    patients, site = made.labels == 1, made.sites
    keep = ((site == "both") & few) | ((site == "b") & patients) | ((site == "c") & ~patients)
    source, target = made.select(keep).in_order(), made.select(sites=["new"])
    for name in ("connectome-adaptive", "connectome-ensemble", "fc-adaptive"):
        proba = make(name).fit(source).predict_proba(target)[:, 1]
        again = make(name).fit(source._changed(series=[one * np.float32(1 + 1e-6) for one in source.series]))
        np.testing.assert_allclose(again.predict_proba(target)[:, 1], proba, atol=5e-3)
        if size > 1:
            assert auc(target.labels, proba) > 0.75
