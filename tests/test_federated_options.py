"""Options of a federated study: noise for differential privacy, and a site left out for evaluation."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

import m2lgdg
from m2lgdg.federated import exchange, messages, noise, sums
from m2lgdg.federated.plan import Ask, Plan, Request, Study
from m2lgdg.federated.simulation import simulate
from m2lgdg.federated.site import Site, prepared
from m2lgdg.federated.words import in_words
from m2lgdg.method import Method
from m2lgdg.metrics import auc
from m2lgdg.storage import InputError

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3).with_inputs(())


def by_site(cohort):
    return {site: cohort.select(sites=[site]) for site in cohort.site_names}


def noisy(cohort, epsilon=3.0, **settings):
    return Study("a" * 32, tuple(cohort.site_names), noise=epsilon, **settings)


def site_of(cohort, name="north", secret="00" * 32, **settings):
    study = noisy(cohort, **settings)
    joined = {site: prepared(study, part, site) for site, part in by_site(cohort).items()}
    plan = Plan(study, tuple(member for member, _ in joined.values()))
    return Site(plan, name, joined[name][1], secret)


def test_epsilon_and_rho():
    assert noise.epsilon_of(noise.rho_of(3.0)) == pytest.approx(3.0)
    assert noise.epsilon_of(0.5) == pytest.approx(0.5 + 2 * math.sqrt(0.5 * math.log(1e5)))
    assert sum(noise.SHARES.values()) == pytest.approx(1.0)
    assert noise.spent(3.0, 1) == 3.0
    assert noise.rho_of(noise.spent(3.0, 2)) == pytest.approx(2 * noise.rho_of(3.0))


def test_one_scan_changes_the_sums_by_no_more_than_the_bound():
    rng = np.random.default_rng(0)
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    signs = np.array(noise.centred_signs(3, 5))[labels]
    assert signs.sum() == pytest.approx(0.0)
    features, largest = 45, np.abs(signs).max()
    bound = noise.contrast_deviations(1.0, features, largest) * np.sqrt(2 * noise.rho_of(1.0) * np.array([0.1, 0.8]))
    scores_bound = noise.score_deviation(1.0) * math.sqrt(2 * noise.rho_of(1.0) * 0.1)
    np.testing.assert_allclose(bound, 2 * 0.25 * math.sqrt(features) * np.array([1.0, largest]), rtol=1e-5)
    worst = np.zeros(3)
    for size in (0.1, 1.0, 100.0):
        for i in range(len(labels)):
            rows = rng.normal(size=(8, features)) * size
            rows[i] = rng.normal(size=features) * 100
            other = rows.copy()
            other[i] = -rows[i]  # the farthest scan
            change = noise.contrast(rows, signs) - noise.contrast(other, signs)
            weights = rng.normal(size=(2, features)) * size
            scored = [noise.scores(one, labels, signs, weights, 1.0) for one in (rows, other)]
            norms = [*np.sqrt((change**2).sum(axis=1)), np.sqrt(((scored[0] - scored[1]) ** 2).sum())]
            worst = np.maximum(worst, norms)
    assert (worst <= [*bound, scores_bound]).all()
    assert (worst[:2] > 0.99 * bound).all()  # the bound is attained, so it is not larger than needed


def test_the_largest_change_of_scores_is_within_the_bound():
    """Scores of a subject before and after: any two values from -1 to 1, by trying them; and both ends, by their weights."""
    before, after = np.meshgrid(np.linspace(-1, 1, 201), np.linspace(-1, 1, 201))
    largest = np.hypot(after - before, after**2 - before**2).max()
    row, signs = np.ones((1, 4)), np.array([-1.0])
    steep = np.stack([np.zeros(4), np.full(4, 1e6)])
    scored = [noise.scores(one, np.array([0]), signs, steep, 1.0) for one in (row, -row)]
    assert np.sqrt(((scored[0] - scored[1]) ** 2).sum()) == pytest.approx(largest) == 2.0
    for epsilon in (0.1, 1.0, 10.0):
        bound = noise.score_deviation(epsilon) * math.sqrt(2 * noise.rho_of(epsilon) * noise.SHARES["scores"])
        assert largest < bound < 1.2 * largest


def test_total_noise_has_the_stated_spread_and_one_site_more(cohort):
    sites = len(cohort.site_names)
    drawn = [noise.draw(f"{i:064x}", "a", noise.site_deviation(sites), (20000,)) for i in range(1, sites + 1)]
    total = np.sum(drawn, axis=0)
    assert total.std() == pytest.approx(math.sqrt(sites / (sites - 1)), rel=0.03)
    assert np.sum(drawn[1:], axis=0).std() == pytest.approx(1.0, rel=0.03)  # for the first site, which knows its own noise
    assert abs(total.mean()) < 0.05 and np.abs(drawn).max() < noise.FARTHEST


def test_an_answer_has_the_sum_and_the_noise_of_its_secret(cohort):
    ask = Ask("contrast", noise.BLOCK)
    request = Request(1, {}, (ask,))
    first, again = (site_of(cohort).answer(request)[ask.key] for _ in range(2))
    other = site_of(cohort, secret="11" * 32).answer(request)[ask.key]
    site = site_of(cohort)
    form, deviations = site.plan.form(ask), site.plan.deviations(ask)
    assert (first == again).all() and (first != other).all()
    clean = noise.contrast(site.arrays[noise.BLOCK], site.centred_signs)
    drawn = sums.to_numbers(first.view(np.int64), form) - clean
    expected = deviations[:, 0] * noise.site_deviation(len(site.plan.members))
    np.testing.assert_allclose(drawn.std(axis=1), expected, rtol=0.3)


def test_another_request_gets_other_noise(cohort):
    values = {"contrast.steady": np.zeros((2, 66))}
    drawn = []
    for scale in (1.0, 2.0):  # all scores are 0 for weights of 0, so the answers are noise only
        ask = Ask("scores", noise.BLOCK, {"scale": np.array([scale])})
        drawn.append(site_of(cohort).answer(Request(2, {k: v.copy() for k, v in values.items()}, (ask,)))[ask.key])
    assert (drawn[0] != drawn[1]).all()


@pytest.mark.parametrize(
    ("number", "kinds"), [(2, ["contrast"]), (3, ["contrast"]), (1, ["scores"]), (1, ["contrast", "contrast"]), (1, [])]
)
def test_a_site_sends_each_noisy_sum_once(cohort, number, kinds):
    asks = tuple(Ask(kind, noise.BLOCK, {"scale": np.ones(1)} if kind == "scores" else {}) for kind in kinds)
    with pytest.raises(InputError, match=f"round {number} of a study with noise cannot ask for"):
        site_of(cohort).answer(Request(number, {}, asks))


def test_sums_without_noise_are_not_part_of_a_study_with_noise(cohort):
    plan = site_of(cohort).plan
    for ask in (Ask("spread", "steady"), Ask("usable", "amplitude"), Ask("decisions", "all"), Ask("contrast", "swings")):
        with pytest.raises(InputError, match="is not part of the protocol"):
            plan.form(ask)
    plain = Plan(Study("a" * 32, plan.study.sites), plan.members)
    with pytest.raises(InputError, match="is not part of the protocol"):
        plain.form(Ask("contrast", "steady"))


def test_less_noise_gives_a_better_model(cohort):
    fitted = simulate(noisy(cohort, 1000.0), by_site(cohort))
    assert fitted.facts_["federated"]["noise"] == {"epsilon": 1000.0, "delta": 1e-5}
    assert fitted.facts_["federated"]["rounds"] == 2 and not fitted.state_["swings.weights"].any()
    proba = fitted.predict_proba(cohort)[:, 1]
    assert auc(cohort.labels, proba) > 0.9
    assert abs(proba.mean() - cohort.labels.mean()) < 0.1
    assert np.log(np.where(cohort.labels == 1, proba, 1 - proba)).mean() > np.log(0.5)


def test_the_cohort_hash_does_not_depend_on_the_scans(cohort):
    study = noisy(cohort)
    part = by_site(cohort)["north"]
    other = replace(part, series=[2 * one for one in part.series])
    assert prepared(study, part, "north")[0] == prepared(study, other, "north")[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": -1.0}, "must be from 0.01 to 1000"),
        ({"noise": math.nan}, "must be from 0.01 to 1000"),
        ({"noise": 1.0, "masks": False}, "noise needs masks"),
        ({"noise": 1.0, "inputs": ("age",)}, "uses no phenotypes"),
        ({"leave_out": "d"}, "is not one of the sites; add --site d"),
        ({"leave_out": "a"}, "2 sites train in the study; it needs at least 3"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Study("x", ("a", "b", "c"), **settings)


def test_studies_of_the_first_version_are_read():
    study = Study("x", ("a", "b", "c"))
    assert set(json.loads(messages.study_json(study))) & set(messages.LATER) == set()
    assert messages.read_study(messages.study_json(study).encode(), "") == study
    later = Study("x", ("a", "b", "c", "d"), noise=2.5, leave_out="d")
    assert messages.read_study(messages.study_json(later).encode(), "") == later


def joined(cohort, root, consent=False, **settings):
    exchange.init(root / "study", cohort.site_names, **settings)
    for site, part in by_site(cohort).items():
        shutil.copy(exchange.join(root / "study", part, site, root / site, consent), root / "study" / "joins")
    return exchange.combine(root / "study")


def finish(root, sites):
    while True:
        for site in sites:
            exchange.step(root / site, root / "study", root / "study" / "answers")
        progress = exchange.combine(root / "study")
        if progress.request is None:
            return Method.load(exchange.save_model(root / "study", progress))


def test_noise_by_files(cohort, tmp_path):
    joined(cohort, tmp_path, noise=5.0)
    first = exchange.step(tmp_path / "north", tmp_path / "study").read_bytes()
    assert exchange.step(tmp_path / "north", tmp_path / "study").read_bytes() == first
    secrets = {json.loads((tmp_path / site / "private" / "site.json").read_text())["noise"] for site in cohort.site_names}
    assert len(secrets) == len(cohort.site_names)
    fitted = finish(tmp_path, cohort.site_names)
    assert fitted.facts_["federated"]["noise"]["epsilon"] == 5.0
    card = (tmp_path / "study" / "model" / "card.md").read_text()
    assert "epsilon 5" in card and "No noise was added" not in card
    assert any("epsilon 5 and delta 1e-05" in line for line in in_words(tmp_path / "study" / "study.json"))


def test_a_second_attempt_spends_again(cohort, tmp_path):
    joined(cohort, tmp_path, noise=5.0)
    plan = exchange.combine(tmp_path / "study", without=["west"]).plan
    assert plan.attempt == 2
    for site in ("east", "north", "south"):
        exchange.step(tmp_path / site, tmp_path / "study", tmp_path / "study" / "answers", 2)
    progress = exchange.combine(tmp_path / "study")
    for site in ("east", "north", "south"):
        exchange.step(tmp_path / site, tmp_path / "study", tmp_path / "study" / "answers", 2)
    progress = exchange.combine(tmp_path / "study")
    assert progress.fitted.facts_["federated"]["noise"]["epsilon"] == pytest.approx(noise.spent(5.0, 2))
    assert progress.fitted.facts_["federated"]["noise"]["epsilon"] > 7


def test_a_site_left_out_for_evaluation(cohort, tmp_path):
    exchange.init(tmp_path / "study", cohort.site_names, leave_out="west")
    with pytest.raises(InputError, match=r"leaves out west; .* with --consent"):
        exchange.join(tmp_path / "study", by_site(cohort)["east"], "east", tmp_path / "east")
    assert not (tmp_path / "east").exists()
    for site, part in by_site(cohort).items():
        message = exchange.join(tmp_path / "study", part, site, tmp_path / site, consent=True)
        if site != "west":
            shutil.copy(message, tmp_path / "study" / "joins")
    with pytest.raises(InputError, match=r"lacks the join message of west; wait for it\."):  # its consent
        exchange.combine(tmp_path / "study")
    shutil.copy(tmp_path / "west" / "outbox" / "west.json", tmp_path / "study" / "joins")
    exchange.combine(tmp_path / "study")
    with pytest.raises(InputError, match="west is left out of this study for evaluation, so it sends no sums"):
        exchange.step(tmp_path / "west", tmp_path / "study")
    fitted = finish(tmp_path, ["east", "north", "south"])
    rest, left = cohort.select(cohort.sites != "west"), by_site(cohort)["west"]
    pooled = m2lgdg.make("connectome-adaptive").fit(rest)
    assert np.abs(fitted.predict_proba(left) - pooled.predict_proba(left)).max() < 1e-6
    assert fitted.facts_["federated"]["left_out"] == "west"
    assert "left out for evaluation: west" in (tmp_path / "study" / "model" / "card.md").read_text()
    assert any("west does not train" in line for line in in_words(tmp_path / "study" / "study.json"))


def test_the_options_as_typed(cohort, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save(tmp_path / "cohort.safetensors")
    names = [word for site in cohort.site_names for word in ("--site", site)]
    code, out, _ = typed("federate", "init", "study", *names, "--leave-out", "west", "--noise", "8")
    assert code == 0 and "--consent" in out
    study = exchange.open_study(tmp_path / "study")
    assert study.leave_out == "west" and study.noise == 8.0
    words = ("federate", "join", "study/study.json", "cohort.safetensors", "--site", "east", "--cohort-site", "east")
    code, _, err = typed(*words, "--out", "east")
    assert code == 2 and "--consent" in err
    code, _, _ = typed(*words, "--out", "east", "--consent")
    assert code == 0
