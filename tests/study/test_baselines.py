"""What needs no brain: planted phenotypes, motion, missing values and site shares are found, and noise is not."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, make, make_cohort
from m2lgdg.metrics import auc, delong_interval
from m2lgdg.study.audit import no_brain_scores
from m2lgdg.study.baselines import POOLED, NoBrainScore, site_only

SIZES = {"north": 40, "south": 40, "west": 40, "east": 60}


@pytest.fixture(scope="module")
def plain():
    """Sites of enough subjects, with phenotypes that say nothing: no effect, nobody missing."""
    return make_cohort("tiny", seed=2, sizes=SIZES, lengths=(20, 20), phenotype_effect=0.0, missing=0.0)


@pytest.fixture
def printed(tmp_path):
    """Baselines by name of a cohort with some phenotype columns or labels changed."""

    def run(cohort, *, target="east", inputs=None, labels=None, **columns):
        cohort = dataclasses.replace(
            cohort,
            phenotypes=cohort.phenotypes.assign(**columns),
            labels=cohort.labels if labels is None else labels,
        )
        study = {"cohort": str(cohort.save(tmp_path / "a.cohort")), "methods": ["prior"], "seeds": [0]}
        found = no_brain_scores(study | ({"inputs": inputs} if inputs is not None else {}), target=target)
        assert [one.name for one in found] == ["phenotype-only", "motion-only", "missingness-only", "site-only"]
        return {one.name: one for one in found}

    return run


def noise(cohort, seed=0):
    return np.random.default_rng(seed).normal(size=len(cohort))


def test_phenotype_only_is_the_method_of_that_name(plain, printed):
    east = plain.sites == "east"
    age = 30 + 2 * plain.labels + 3 * noise(plain)
    found = printed(plain, age=age)["phenotype-only"]
    cohort = dataclasses.replace(plain, phenotypes=plain.phenotypes.assign(age=age))
    proba = make("phenotype-logistic", **POOLED).fit(cohort.select(~east)).predict_proba(cohort.select(east))[:, 1]
    labels = plain.labels[east]
    assert found.auc == pytest.approx(auc(labels, proba), abs=1e-12)
    assert (found.low, found.high) == pytest.approx(delong_interval(labels, proba), abs=1e-12)
    assert 0.55 < found.auc < 0.85
    assert (found.columns, found.subjects, found.chance) == (("sex", "age", "education"), 60, 0.5)
    assert found.note == "sex, age, education; fitted on source, scored at east"


def test_planted_phenotypes_are_found_and_noise_is_not(plain, printed):
    assert printed(plain, education=10 + plain.labels + 0.01 * noise(plain))["phenotype-only"].auc == 1.0
    nothing = printed(plain)["phenotype-only"]
    assert nothing.low < 0.5 < nothing.high
    assert printed(plain, inputs=[])["phenotype-only"] == NoBrainScore(
        "phenotype-only", "not reported: no input phenotype varies in source"
    )


def test_motion_counts_though_it_is_no_input(plain, printed):
    moved = 0.2 + 0.1 * plain.labels + 0.001 * noise(plain)
    found = printed(plain, Mean_FD=moved)
    assert (found["motion-only"].auc, found["motion-only"].columns) == (1.0, ("Mean_FD",))
    assert found["phenotype-only"] == printed(plain)["phenotype-only"]
    # At source patients move more, at the target controls do: what was learned is wrong there.
    turned = np.where(plain.sites == "east", 0.5 - moved, moved)
    assert printed(plain, Mean_FD=turned)["motion-only"].auc == 0.0
    nothing = printed(plain, func_mean_fd=noise(plain, 3))["motion-only"]
    assert nothing.low < 0.5 < nothing.high
    # Two columns that tell the label only together.
    shared = 10 * noise(plain)
    both = printed(plain, func_mean_fd=shared, mean_fd=shared + plain.labels)["motion-only"]
    assert both.columns == ("func_mean_fd", "mean_fd")
    assert both.auc > 0.9 > printed(plain, mean_fd=shared + plain.labels)["motion-only"].auc


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({}, "not reported: no column of head motion varies in source (recognised: func_mean_fd, mean_fd, "),
        ({"mean_fd": "little"}, "not reported: no column of head motion varies in source"),
        ({"mean_fd": 0.2}, "not reported: no column of head motion varies in source"),
        ({"mean_fd": "not at east"}, "not reported: east has no values of mean_fd"),
    ],
)
def test_without_motion_it_is_said(plain, printed, column, said):
    if column.get("mean_fd") == "not at east":
        column = {"mean_fd": np.where(plain.sites == "east", np.nan, noise(plain))}
    found = printed(plain, **column)["motion-only"]
    assert np.isnan([found.auc, found.low, found.high]).all()
    assert found.note.startswith(said)


def test_missing_values_that_tell_the_label(plain, printed):
    age = pd.Series(30 + noise(plain), index=plain.phenotypes.index)
    found = printed(plain, age=age.mask(plain.labels == 1))
    assert (found["missingness-only"].auc, found["missingness-only"].columns) == (1.0, ("age",))
    assert found["missingness-only"].note == "which of age are missing; fitted on source, scored at east"
    by_chance = printed(plain, age=age.mask(noise(plain, 5) > 0.5))["missingness-only"]
    assert by_chance.low < 0.5 < by_chance.high
    assert printed(plain, age=age)["missingness-only"].note.startswith("not reported: no input is missing for some")
    elsewhere = printed(plain, age=age.mask((plain.labels == 1) & (plain.sites != "east")))["missingness-only"]
    assert elsewhere.auc == 0.5
    assert elsewhere.note.endswith("scored at east, where all values are equal")
    assert np.isnan(elsewhere.low)


def test_nothing_of_the_target_is_fitted(plain, printed):
    """Turned labels at the target turn each AUC round, and leave site-only, which is of source, as it was."""
    columns = {"age": 30 + plain.labels + 2 * noise(plain), "mean_fd": noise(plain, 1) + plain.labels}
    columns["education"] = np.where(noise(plain, 2) > 0, np.nan, 12.0)
    there = printed(plain, **columns)
    turned = printed(plain, labels=np.where(plain.sites == "east", 1 - plain.labels, plain.labels), **columns)
    for name in ("phenotype-only", "motion-only", "missingness-only"):
        assert turned[name].auc == pytest.approx(1 - there[name].auc, abs=1e-12)
        assert there[name].auc != 0.5
    assert turned["site-only"] == there["site-only"]
    assert there["site-only"].subjects == 120


def test_a_target_of_one_class_has_no_score(plain, printed):
    found = printed(plain, labels=np.where(plain.sites == "east", 1, plain.labels))
    assert found["phenotype-only"].note == "not reported: east does not have labels of both classes"
    assert found["site-only"].subjects == 120
    with pytest.raises(InputError, match="target nowhere is not a site"):
        printed(plain, target="nowhere")


def slow_site_only(sites, labels):
    """Every patient against every control by the share of patients at their sites."""
    share = {site: labels[sites == site].mean() for site in set(sites.tolist())}
    pairs = list(itertools.product(np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)))
    won = sum(
        1.0 if share[sites[i]] > share[sites[j]] else 0.5 if share[sites[i]] == share[sites[j]] else 0.0 for i, j in pairs
    )
    return won / len(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_site_only_against_every_pair(seed):
    draw = np.random.default_rng(seed)
    sites = draw.choice(["a", "b", "c", "d"], 60, p=[0.1, 0.2, 0.3, 0.4])
    labels = draw.integers(0, 2, 60).astype(np.int8)
    assert site_only(sites, labels).auc == pytest.approx(slow_site_only(sites, labels), abs=1e-12)


def test_site_only_of_known_shares():
    sites = np.repeat(["a", "b"], 10)
    unequal = site_only(sites, np.array([1] * 9 + [0] + [0] * 9 + [1], dtype=np.int8))
    assert unequal.auc == pytest.approx(0.9)  # (9 x 9 + half of 9 + 9) of 100 pairs
    # Equal shares tell nothing; shares without the subject itself would have an AUC of 0 here.
    assert site_only(sites, np.tile([0, 1], 10).astype(np.int8)).auc == 0.5
    assert site_only(np.repeat("a", 4), np.array([0, 1, 1, 1], dtype=np.int8)).auc == 0.5
    # Two sites of two: of the six ways to place two patients two part the sites (1), four do not (0.5).
    assert site_only(np.array(["a", "a", "b", "b"]), np.array([1, 1, 0, 0], dtype=np.int8)).chance == pytest.approx(
        2 / 3, abs=0.05
    )
