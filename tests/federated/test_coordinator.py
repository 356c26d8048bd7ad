"""The fit from sums over sites is the pooled fit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hospitals import assert_pooled, by_site, pooled, study_of

import m2lgdg
from m2lgdg.connectivity import standardised
from m2lgdg.federated import sums
from m2lgdg.federated.coordinator import PARTS, Work, _calibrate, _order_statistics
from m2lgdg.federated.plan import CUTS, NO_TABLES, Plan
from m2lgdg.federated.simulation import simulate
from m2lgdg.federated.site import KINDS, prepared
from m2lgdg.metrics import platt
from m2lgdg.report.card import write_card
from m2lgdg.scans import Connectomes
from m2lgdg.storage import InputError


def test_the_fit_from_sums_is_the_pooled_fit(fitted, cohort):
    assert_pooled(fitted, cohort)
    assert fitted.facts_["federated"]["rounds"] <= 60 and fitted.method.site_folds == 2


def test_the_same_without_phenotypes_and_a_site(cohort, tmp_path):
    study = study_of(cohort.with_inputs(()), fields={"site_folds": 2, "penalties": [1.0]}, leave_out="west")
    rest = cohort.with_inputs(()).select(cohort.sites != "west")
    fitted = simulate(study, by_site(rest))
    assert_pooled(fitted, rest, penalties=(1.0,))
    assert fitted.facts_["federated"]["left_out"] == "west"
    assert "left out for evaluation: west" in (write_card(fitted.save(tmp_path / "model")) / "card.md").read_text()


def test_sites_with_one_class():
    sizes = dict.fromkeys(("p", "q", "r", "s", "t", "u"), 14) | dict.fromkeys(("x", "y", "z"), 10)
    many = m2lgdg.make_cohort("tiny", sizes=sizes, seed=2)
    one_class = np.isin(many.sites, ["x", "y", "z"])
    some = replace(many, labels=np.where(one_class, many.sites != "z", many.labels).astype(np.int8))
    assert_pooled(simulate(study_of(some), by_site(some)), some)


def test_calibration_where_offsets_of_sites_hide_the_labels(cohort):
    """The slope is at least half of that within sites, as in the pooled fit."""
    study, rng = study_of(cohort), np.random.default_rng(0)
    plan = Plan(study, tuple(prepared(study, part, site)[0] for site, part in by_site(cohort).items()))
    work, sites = Work(plan, {PARTS: np.ones(3)}), []
    for part in by_site(cohort).values():
        signal = part.labels + rng.normal(0, 0.6, len(part)) - 12 * np.mean(part.labels) + rng.normal(0, 2)
        decisions = signal[:, None] + rng.normal(0, 0.1, (len(part), len(plan.blocks)))
        sites.append(SimpleNamespace(decisions=decisions, labels=part.labels, weights=np.ones(len(part))))
    task = _calibrate(work)
    asks = next(task)
    with pytest.raises(StopIteration):
        while True:
            asks = task.send([np.sum([KINDS[ask.kind](site, ask) for site in sites], axis=0) for ask in asks])
    decisions = np.concatenate([site.decisions for site in sites]) @ list(work.weights.values())
    labels = np.concatenate([site.labels for site in sites])
    expected = platt(decisions, labels, np.repeat(np.arange(len(sites)), [len(site.labels) for site in sites]))
    assert expected[0] > 1.2 * platt(decisions, labels)[0]  # the rule acts
    np.testing.assert_allclose(work.calibration, expected, rtol=1e-6)


def test_amplitudes_of_standardised_scans_are_not_used(cohort):
    flat = replace(cohort, series=[standardised(one).astype(np.float32) for one in cohort.series])
    fitted = simulate(study_of(flat), by_site(flat))
    assert not fitted.state_["amplitude.weights"].any()
    assert_pooled(fitted, flat)


def test_some_real_sites(abide_folder, monkeypatch):
    monkeypatch.setattr("m2lgdg.federated.plan.LEAST_SUBJECTS", 2)
    cohort = m2lgdg.read(abide_folder, atlas="aal")
    places = {site: f"group {i % 6}".replace(" ", "") for i, site in enumerate(cohort.site_names)}
    cohort = replace(cohort, sites=np.array([places[site] for site in cohort.sites.tolist()]))
    assert_pooled(simulate(study_of(cohort, least_subjects=2), by_site(cohort)), cohort)


def test_order_statistics_are_exact():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=50) * 10.0 ** rng.integers(-300, 300, 50), [0.0, -0.0, 3.0, 3.0]])
    keys = np.sort(sums.ordered(values))
    assert (sums.ordered(np.sort(values)) == keys).all()
    search = _order_statistics("age", lambda n: (n // 3, n // 3 + 1))
    (ask,), rounds = next(search), 0
    with pytest.raises(StopIteration) as ended:
        while True:
            rounds += 1
            cuts = ask.arguments["cuts"].view(np.uint64).ravel()
            assert len(cuts) == 2 * CUTS
            (ask,) = search.send([np.append(np.searchsorted(keys, cuts), len(keys)).astype(float)])
    assert ended.value.value == (*np.sort(values)[[18, 19]], len(values)) and rounds == 13


@pytest.mark.parametrize("inputs", [True, False])
def test_connectomes_are_fitted_as_pooled_ones(cohort, inputs):
    """Fisher z at all sites but two, which have correlations; no sum is about amplitudes."""
    of_z = cohort.to_connectomes() if inputs else cohort.to_connectomes().with_inputs(())
    sites = by_site(of_z)
    for site in list(sites)[1:3]:
        matrices = [np.tanh(one) for one in sites[site].connectomes]
        sites[site] = replace(sites[site], series=Connectomes.of(matrices, "correlation", len(cohort.rois)))
    fitted = simulate(study_of(of_z), sites)
    assert_pooled(fitted, of_z)
    expected = pooled(of_z)
    assert fitted.facts_["scans"] == "fisher-z" and fitted.facts_["notes"] == [*expected.facts_["notes"], NO_TABLES]
    assert not any("amplitude" in name or "steady" in name for name in fitted.state_)


def test_phenotypes_count_as_far_as_in_a_pooled_fit(cohort):
    """Education differs between the classes at all sites, so it counts; then age and sex are taken out of edges, too."""
    phenotypes = cohort.phenotypes.assign(education=cohort.phenotypes["education"] + 3.0 * cohort.labels)
    held = replace(cohort, phenotypes=phenotypes)
    fitted = simulate(study_of(held), by_site(held))
    expected = pooled(held, site_folds=fitted.method.site_folds)
    parts = fitted.facts_["phenotypes"]["parts"]
    assert parts == pytest.approx(expected.facts_["phenotypes"]["parts"], abs=1e-9)
    assert parts["education"] > 0.2 and fitted.state_["phenotypes.weights"][0]  # sex counts as a confound
    assert_pooled(fitted, held)


def test_tables_stay_at_the_sites(cohort, fitted):
    """A site with tables sends what it sends without them, and the model does not ask for any."""
    draw = np.random.default_rng(0)
    volumes = pd.DataFrame(draw.normal(size=(len(cohort), 3)), index=cohort.subjects, columns=list("abc"))
    some = by_site(cohort.with_tables({"aseg": volumes + 5 * cohort.labels[:, None]}))
    sites = {site: some[site] if i % 2 else part for i, (site, part) in enumerate(by_site(cohort).items())}
    study = study_of(cohort)
    for site, part in by_site(cohort).items():
        (member, arrays), (expected, own) = (prepared(study, one[site], site) for one in (sites, {site: part}))
        assert member == expected and set(arrays) == set(own)
    other = simulate(study, sites)
    assert set(other.state_) == set(fitted.state_)
    for name, value in fitted.state_.items():
        np.testing.assert_array_equal(other.state_[name], value)
    assert other.fields()["tables"] == "none" and "tables" not in other.facts_ and other.facts_["notes"][-1] == NO_TABLES
    assert not any("decided without" in flag for flags in other.flags(some["north"]) for flag in flags)


def test_sites_need_the_same_kind_of_scans(cohort):
    sites = by_site(cohort)
    last = max(sites)
    of_z = sites[last].to_connectomes()
    needed = "all sites need series, or connectomes of one kind"
    with pytest.raises(InputError, match=f"the scans of site {last} are fisher-z and those of site coast series; {needed}"):
        simulate(study_of(cohort), sites | {last: of_z})
    matrices = [np.tanh(one) + np.eye(len(cohort.rois)) for one in of_z.connectomes]
    of_covariance = replace(of_z, series=Connectomes.of(matrices, "covariance", len(cohort.rois)))
    with pytest.raises(InputError, match=f"site {last} are covariance and those of site coast fisher-z; {needed}"):
        simulate(study_of(cohort), by_site(cohort.to_connectomes()) | {last: of_covariance})
