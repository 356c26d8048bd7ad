"""Maps and probes of a representation: a site that is there is read, one that is not is not, and the map keeps neighbours."""

import numpy as np
import pytest
from test_contract import small

from m2lgdg import make
from m2lgdg.data.synthetic import make_cohort
from m2lgdg.explain.representation import effective_dimensions, flat_map, probe, read_representation, readability
from m2lgdg.splits import leave_one_site_out


@pytest.fixture(scope="module")
def fold():
    return next(iter(leave_one_site_out(make_cohort("tiny"))))


def test_a_planted_site_is_read_and_noise_is_not():
    rng = np.random.default_rng(0)
    sites = np.repeat(["a", "b", "c", "lone"], [60, 40, 50, 2])
    points = rng.normal(size=(152, 6))
    read, chance = probe(points, sites)
    assert chance == 60 / 150  # the site of two is left out
    assert abs(read - chance) < 0.12
    points[:, 0] += 6 * (sites == "a")
    points[:, 1] += 6 * (sites == "b")
    assert probe(points, sites)[0] > 0.98
    assert probe(points[:60], sites[:60]) == (None, None)


def test_effective_dimensions():
    rng = np.random.default_rng(0)
    line = rng.normal(size=(500, 1)) @ np.ones((1, 4))
    assert effective_dimensions(line) == pytest.approx(1.0)
    assert effective_dimensions(rng.normal(size=(20000, 4))) == pytest.approx(4.0, abs=0.01)
    assert effective_dimensions(np.ones((5, 3))) is None
    assert effective_dimensions(np.ones((1, 3))) is None


def test_the_map_keeps_groups_apart_and_is_the_same_again():
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 30)
    points = rng.normal(size=(60, 8)) + 20 * groups[:, None]
    flat = flat_map(points)
    centres = np.stack([flat[groups == g].mean(axis=0) for g in (0, 1)])
    nearest = np.linalg.norm(flat[:, None] - centres, axis=2).argmin(axis=1)
    assert (nearest == groups).all()
    assert np.array_equal(flat, flat_map(points))


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (5, 4), (20, 1)])
def test_few_points_or_dimensions_have_a_map_too(shape):
    points = np.random.default_rng(0).normal(size=shape)
    flat = flat_map(points)
    assert flat.shape == (shape[0], 2)
    wanted = np.linalg.norm(points[:, None] - points, axis=2)
    if min(shape) < 3:  # two dimensions hold all of it
        assert np.allclose(np.linalg.norm(flat[:, None] - flat, axis=2), wanted)


def test_source_is_probed_and_both_are_on_the_map_without_ids(fold):
    fitted = make("erm", **small("erm")).fit(fold.source)
    table, read = read_representation(fitted, fold.target, fold.source)
    assert table.columns.tolist() == ["site", "label", "part", "x", "y"]
    assert (table["part"] == "source").sum() == len(fold.source)
    assert table.loc[table["part"] == "target", "site"].unique().tolist() == [fold.site]
    assert table["label"].tolist() == [*fold.source.labels, *fold.target.labels]
    alone = readability(fitted.represent(fold.source).astype(float), fold.source)
    assert read == alone | {"probed": "source"}
    shares = np.unique(fold.source.sites, return_counts=True)[1] / len(fold.source)
    assert read["site_chance"] == pytest.approx(shares.max())
    _, read = read_representation(fitted, fold.target, None)
    assert (read["probed"], read["site"]) == ("target", None)
