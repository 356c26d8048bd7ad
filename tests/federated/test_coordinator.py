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
from m2lgdg.federated.coordinator import Work, _calibrate, _order_statistics
from m2lgdg.federated.plan import CUTS, LARGEST_DECISION, NO_TABLES, Ask, Member, Plan
from m2lgdg.federated.simulation import simulate
from m2lgdg.federated.site import KINDS, Site, prepared
from m2lgdg.methods.tables import table_weights
from m2lgdg.metrics import platt
from m2lgdg.report.card import write_card
from m2lgdg.scans import Connectomes
from m2lgdg.storage import InputError


def with_education(cohort, shift):
    """Education of patients is higher."""
    return replace(
        cohort, phenotypes=cohort.phenotypes.assign(education=cohort.phenotypes["education"] + shift * cohort.labels)
    )


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


@pytest.fixture(scope="module")
def nine():
    sizes = dict.fromkeys(("p", "q", "r", "s", "t", "u"), 14) | dict.fromkeys(("x", "y", "z"), 10)
    return m2lgdg.make_cohort("tiny", sizes=sizes, seed=2)


def with_one_class(cohort, count):
    """The last sites have one class: the very last controls, the others patients."""
    last = np.isin(cohort.sites, cohort.site_names[len(cohort.site_names) - count :])
    labels = np.where(last, cohort.sites != cohort.site_names[-1], cohort.labels)
    return replace(cohort, labels=labels.astype(np.int8))


def test_sites_with_one_class(nine):
    """Such sites do not weigh phenotypes, but count among the subjects."""
    some = with_education(with_one_class(nine, 3), 8.0)
    fitted = simulate(study_of(some), by_site(some))
    assert_pooled(fitted, some)
    assert fitted.facts_["phenotypes"]["relative"] > 0.1


def plan_of(cohort):
    labels = {site: cohort.labels[cohort.sites == site].tolist() for site in cohort.site_names}
    members = [Member(site, own.count(1), own.count(0), cohort.rois, cohort.atlas, "") for site, own in labels.items()]
    return Plan(study_of(cohort), tuple(members))


def sites_of(plan, cohort, decisions):
    """Sites whose decisions are a function of labels and the number of blocks."""
    for name in cohort.site_names:
        labels = cohort.labels[cohort.sites == name]
        weights = Site(plan, name, {"labels": labels}).weights
        own = decisions(labels, len(plan.blocks))
        yield SimpleNamespace(name=name, plan=plan, labels=labels, weights=weights, decisions=own)


def added(sites, ask):
    """Total of a sum, in the form of messages."""
    form = sites[0].plan.form(ask)
    words = [sums.to_words(KINDS[ask.kind](site, ask), form, "") for site in sites]
    return sums.to_numbers(sums.add(words, form), form)


def calibrated(cohort, decisions):
    """Weights and calibration from sums, and the (subject, block) decisions."""
    work = Work(plan_of(cohort))
    sites, task = list(sites_of(work.plan, cohort, decisions)), _calibrate(work)
    asks = next(task)
    with pytest.raises(StopIteration):
        while True:
            asks = task.send([added(sites, ask) for ask in asks])
    values = np.empty((len(cohort), len(work.plan.blocks)))
    for site in sites:
        values[cohort.sites == site.name] = site.decisions
    return work, values


def test_calibration_where_offsets_of_sites_hide_the_labels(cohort):
    """The slope is at least half of that within sites, as in the pooled fit."""
    rng = np.random.default_rng(0)

    def hidden(labels, blocks):
        signal = labels + rng.normal(0, 0.6, len(labels)) - 12 * np.mean(labels) + rng.normal(0, 2)
        return signal[:, None] + rng.normal(0, 0.1, (len(labels), blocks))

    work, decisions = calibrated(cohort, hidden)
    decision = decisions @ list(work.weights.values())
    expected = platt(decision, cohort.labels, cohort.sites)
    assert expected[0] > 1.2 * platt(decision, cohort.labels)[0]  # the rule acts
    np.testing.assert_allclose(work.calibration, expected, rtol=1e-6)


# Decisions by phenotypes given those by the scan, and between which limits they count relative to them
CASES = {
    "new": (lambda scan, labels, rng: 0.01 * (labels + rng.normal(0, 1.0, len(labels))), 0.1, 3),
    "beside a useless scan": (lambda scan, labels, rng: 0.3 * labels + rng.normal(0, 0.02, len(labels)), 20, 200),
    "a worse copy of the scan": (lambda scan, labels, rng: scan + rng.normal(0, 2.0, len(labels)), 0, 0.4),
    "inverted": (lambda scan, labels, rng: rng.normal(0, 1.0, len(labels)) - 2 * labels, 0, 0),
    "none": (lambda scan, labels, rng: np.zeros(len(labels)), 0, 0),
}


@pytest.mark.parametrize("one_class", [0, 3, 9])
@pytest.mark.parametrize("case", CASES)
def test_phenotypes_are_weighed_as_in_a_pooled_fit(nine, case, one_class):
    """The oracle weighs the decisions of all subjects; sites with one class do not tell what phenotypes add."""
    some = with_one_class(nine, one_class)
    rng, (by_phenotypes, least, most) = np.random.default_rng(1), CASES[case]

    def of_blocks(labels, blocks):
        scan = rng.normal(0, 0.3, (len(labels), blocks - 1)) + (case != "beside a useless scan") * 0.2 * labels[:, None]
        scan[:, -1] = 0  # amplitudes are not used
        return np.column_stack([scan, by_phenotypes(scan[:, 0], labels, rng)])

    work, decisions = calibrated(some, of_blocks)
    scan = decisions[:, :-2] @ ([1.0, 0.5, 0.3] / decisions[:, :-2].std(axis=0))
    (expected,) = table_weights(scan, [decisions[:, -1]], some)
    assert work.weights["phenotypes"] == pytest.approx(expected, rel=1e-6)
    relative = expected * decisions[:, -1].std() / scan.std()
    assert work.relative == {"relative": pytest.approx(relative, rel=1e-6)}
    assert relative == 0 if one_class == 9 else least <= relative <= most


@pytest.mark.parametrize("side", [lambda labels: 2 * labels - 1, np.ones_like, lambda labels: -np.ones_like(labels)])
def test_sums_of_the_largest_decisions_have_their_form(cohort, side):
    plan = plan_of(cohort)
    largest = lambda labels, blocks: LARGEST_DECISION * np.tile(side(labels.astype(float))[:, None], blocks)  # noqa: E731
    sites, ask = list(sites_of(plan, cohort, largest)), Ask("decisions", "all")
    total = added(sites, ask)
    np.testing.assert_allclose(total, np.sum([KINDS[ask.kind](site, ask) for site in sites], axis=0), rtol=1e-12)
    signs = side(cohort.labels.astype(float))
    difference = signs[cohort.labels == 1].mean() - signs[cohort.labels == 0].mean()
    np.testing.assert_allclose(total[-1 - len(plan.blocks)], difference * LARGEST_DECISION, rtol=1e-12)


def test_wrong_sums_of_decisions_are_named(cohort):
    """A scatter that no decisions have."""
    plan = plan_of(cohort)
    blocks = len(plan.blocks)
    for wrong in (-np.eye(blocks), 9 - 8 * np.eye(blocks)):  # the second has correlations of 9
        task = _calibrate(Work(plan))
        (ask,) = next(task)
        total = np.ones(plan.form(ask).shape)
        total[1 : 1 + blocks] = 9 * np.eye(blocks)
        total[-blocks:] = wrong
        with pytest.raises(InputError, match="a site sent wrong sums"):
            task.send([total])


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


@pytest.mark.parametrize(("shift", "least", "most"), [(3.0, 0.1, 1.0), (30.0, 3.0, 20.0)])
def test_phenotypes_count_as_far_as_in_a_pooled_fit(cohort, shift, least, most):
    """Education differs between the classes at all sites, so it counts."""
    held = with_education(cohort, shift)
    fitted = simulate(study_of(held), by_site(held))
    assert_pooled(fitted, held)
    about = fitted.facts_["phenotypes"]
    weights = dict(zip(fitted.facts_["inputs"], fitted.state_["phenotypes.weights"], strict=True))
    assert about["parts"]["education"] > 0.2 and weights["education"] > 0
    assert least < about["relative"] < most


def test_phenotypes_alone(cohort):
    """Without the scan there is nothing to weigh them against."""
    held = with_education(cohort, 8.0)
    fitted = simulate(study_of(held, fields={"scan": False}), by_site(held))
    assert_pooled(fitted, held, scan=False)
    assert set(fitted.facts_["phenotypes"]) == {"parts"} and fitted.state_["phenotypes.weights"].any()


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
