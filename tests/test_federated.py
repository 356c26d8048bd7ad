"""Federated training: the pooled model from sums alone, whatever the transport, and messages that are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import m2lgdg
from m2lgdg.connectivity import standardised
from m2lgdg.federated import exchange, messages, sums
from m2lgdg.federated.coordinator import _order_statistics
from m2lgdg.federated.plan import CUTS, FORMS, MOST_ROUNDS, Ask, Form, Plan, Study
from m2lgdg.federated.simulation import simulate
from m2lgdg.federated.site import KINDS, Site, prepared
from m2lgdg.federated.words import REVEALS
from m2lgdg.method import Method
from m2lgdg.storage import InputError

DOCS = Path(__file__).parents[1] / "docs" / "federated.md"


@pytest.fixture(scope="module")
def cohort():
    """The tiny cohort with what a real one has: missing phenotypes, standardised scans, and a site of one class."""
    tiny = m2lgdg.make_cohort("tiny", seed=3)
    table = tiny.phenotypes.copy()
    table.loc[tiny.sites == "east", "education"] = np.nan
    table.iloc[2, table.columns.get_loc("age")] = np.nan
    table.iloc[20, table.columns.get_loc("sex")] = np.nan
    series = list(tiny.series)
    for i in (1, 30):
        series[i] = (series[i] - series[i].mean(axis=0)) / series[i].std(axis=0)
    return replace(tiny, phenotypes=table, series=series)


def by_site(cohort):
    return {site: cohort.select(sites=[site]) for site in cohort.site_names}


def study_of(cohort, **settings):
    return Study("a" * 32, tuple(cohort.site_names), **{"inputs": cohort.inputs, "masks": False} | settings)


def pooled(cohort, **fields):
    return m2lgdg.make("connectome-adaptive", **{"phenotypes": bool(cohort.inputs)} | fields).fit(cohort)


def assert_equal(fitted, other, cohort):
    assert set(fitted.state_) == set(other.state_)
    for name in ("phenotypes.scaler.fill", "amplitude.low", "amplitude.high"):
        if name in other.state_:
            np.testing.assert_allclose(fitted.state_[name], other.state_[name], rtol=1e-12)
    assert np.abs(fitted.predict_proba(cohort) - other.predict_proba(cohort)).max() < 1e-6
    assert {key: fitted.facts_[key] for key in ("rois", "inputs", "penalties")} == {
        key: other.facts_[key] for key in ("rois", "inputs", "penalties")
    }
    assert fitted.facts_["source"]["sites"] == other.facts_["source"]["sites"]
    assert fitted.facts_.get("standardised_scans") == other.facts_.get("standardised_scans")


def test_the_fit_from_sums_is_the_pooled_fit(cohort):
    fitted = simulate(study_of(cohort), by_site(cohort))
    assert_equal(fitted, pooled(cohort), cohort)
    assert fitted.facts_["federated"]["rounds"] <= 60


def test_the_same_without_phenotypes_and_with_other_fields(cohort):
    plain = cohort.with_inputs(())
    fitted = simulate(study_of(plain, fields={"site_folds": 2, "penalties": [1.0]}), by_site(plain))
    assert_equal(fitted, pooled(plain, site_folds=2, penalties=(1.0,)), plain)


def test_a_site_with_one_class(cohort):
    keep = (cohort.sites != "east") | (cohort.labels == 1)
    part = cohort.select(keep)
    assert_equal(simulate(study_of(part, least_subjects=2), by_site(part)), pooled(part), part)


def test_amplitudes_of_standardised_scans_are_not_used(cohort):
    flat = replace(cohort, series=[standardised(one).astype(np.float32) for one in cohort.series])
    fitted = simulate(study_of(flat), by_site(flat))
    assert not fitted.state_["amplitude.weights"].any()
    assert_equal(fitted, pooled(flat), flat)


def test_some_real_sites(abide_folder):
    cohort = m2lgdg.read(abide_folder, atlas="aal")
    largest = sorted(cohort.site_names, key=lambda site: -(cohort.sites == site).sum())[:6]
    cohort = cohort.select(sites=largest)
    assert_equal(simulate(study_of(cohort, least_subjects=2), by_site(cohort)), pooled(cohort), cohort)


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
    assert ended.value.value == tuple(np.sort(values)[[18, 19]]) and rounds == 13


@pytest.mark.parametrize("size", [5, 8])
def test_sums_are_exact_in_any_order(size):
    form = Form((3, 4), np.full((3, 1), 1000.0), size)
    rng = np.random.default_rng(0)
    values = rng.uniform(-30, 30, (20, 3, 4))
    arrays = [sums.to_bytes(sums.to_words(one, form, ""), form) for one in values]
    total = sums.add(arrays, form)
    assert (sums.add(arrays[::-1], form) == total).all()
    np.testing.assert_allclose(sums.to_numbers(total, form), values.sum(axis=0), atol=20 * 1000 * 2.0 ** (2 - 8 * size))


def test_values_that_no_sum_may_have():
    form = Form((1,), np.array(10.0))
    for bad in (np.nan, np.inf, 11.0):
        with pytest.raises(InputError, match="sum of ages"):
            sums.to_words(np.array([bad]), form, "sum of ages")


def test_a_small_site_and_a_small_study_are_refused(cohort):
    few = cohort.select(np.flatnonzero(cohort.sites == "east")[:9])
    with pytest.raises(InputError, match="site east has 9 labelled subjects; the study needs at least 10"):
        prepared(study_of(cohort), few, "east")
    with pytest.raises(InputError, match="2 sites train in the study; it needs at least 3"):
        Study("x", ("a", "b"))
    with pytest.raises(InputError, match="one penalty"):
        Study("x", ("a", "b", "c"), fields={"penalties": [1.0, 2.0]})


def test_every_kind_of_sum_is_explained():
    assert set(REVEALS) == set(FORMS) == set(KINDS)
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert set(REVEALS) <= {row.split("`")[1] for row in rows}


@pytest.fixture(scope="module")
def begun(cohort, tmp_path_factory):
    """Folders of a study without masks after three rounds, for tests that go on from there."""
    root = tmp_path_factory.mktemp("begun")
    make_study(cohort, root, masks=False)
    for _ in range(3):
        answer_all(root)
        exchange.combine(root / "study")
    return root


@pytest.fixture
def root(begun, tmp_path):
    return Path(shutil.copytree(begun, tmp_path / "copy"))


def make_study(cohort, root, **settings):
    exchange.init(root / "study", cohort.site_names, inputs=cohort.inputs, **settings)
    for site, part in by_site(cohort).items():
        shutil.copy(exchange.join(root / "study", part, site, root / site), root / "study" / "joins")
    assert exchange.combine(root / "study").round == 1


def answer_all(root, attempt=1, sites=None):
    for site in sites or exchange.open_study(root / "study").sites:
        exchange.step(root / site, root / "study", root / "study" / "answers", attempt)


def finish(root, **settings):
    while True:
        answer_all(root, **settings)
        progress = exchange.combine(root / "study")
        if progress.request is None:
            return exchange.save_model(root / "study", progress)


def state(folder):
    return {name: value.tobytes() for name, value in Method.load(folder).state_.items()}


@pytest.fixture(scope="module")
def finished(begun, tmp_path_factory):
    root = Path(shutil.copytree(begun, tmp_path_factory.mktemp("finished") / "copy"))
    finish(root)
    return root


def test_by_files_the_same_bits_as_in_one_process(finished, cohort):
    fitted = simulate(study_of(cohort), by_site(cohort))
    stored = Method.load(finished / "study" / "model")
    assert state(finished / "study" / "model") == {name: value.tobytes() for name, value in fitted.state_.items()}
    assert stored.facts_["federated"]["rounds"] == fitted.facts_["federated"]["rounds"]
    assert exchange.combine(finished / "study").request is None  # finished, and stays so


def test_masks_leave_no_trace_in_the_total(cohort, tmp_path, finished):
    pytest.importorskip("cryptography")
    make_study(cohort, tmp_path)
    model = finish(tmp_path)
    assert state(model) == state(finished / "study" / "model")
    name = exchange.answer_name(1, 5, "north")
    masked, plain = (root / "study" / "answers" / name for root in (tmp_path, finished))
    arrays = [messages.read_message(path.read_bytes(), messages.ANSWER, "")[1] for path in (masked, plain)]
    for key in arrays[0]:
        if not key.startswith("association"):  # by fold, and this site is alone in its fold
            assert (arrays[0][key] != arrays[1][key]).mean() > 0.9
    assert (tmp_path / "north" / "private").stat().st_mode & 0o077 == 0


def test_the_model_folder_predicts_and_has_a_card(finished, typed, cohort, tmp_path):
    cohort.save(tmp_path / "cohort.safetensors")
    model = finished / "study" / "model"
    code, _, _ = typed("predict", model, tmp_path / "cohort.safetensors", "--out", tmp_path / "p.csv")
    assert code == 0 and len((tmp_path / "p.csv").read_text().splitlines()) >= len(cohort)
    card = (model / "card.md").read_text()
    rounds = Method.load(model).facts_["federated"]["rounds"]
    assert "Federated training" in card and f"rounds: {rounds}" in card and "masks were off" in card


def test_facts_of_a_federated_fit_are_checked(finished, tmp_path):
    fitted = Method.load(finished / "study" / "model")
    fitted.facts_["federated"] = fitted.facts_["federated"] | {"rounds": "many"}
    fitted.save(tmp_path / "model")
    with pytest.raises(InputError, match="rounds is not a count"):
        Method.load(tmp_path / "model")


def test_a_killed_combine_is_repeated(root, monkeypatch):
    answer_all(root)
    before = sorted((root / "study" / "requests").iterdir())

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(messages, "write_request", lambda *_: killed())
        patch.setattr(exchange, "_check_stored", lambda *_: None)
        exchange.combine(root / "study")
    assert sorted((root / "study" / "requests").iterdir()) == before  # the totals are stored, the request is not
    request = exchange.combine(root / "study").request
    twin = root / "twin"
    shutil.copytree(root / "study", twin)
    (twin / "requests" / request.name).unlink()
    assert exchange.combine(twin).request.read_bytes() == request.read_bytes()


def test_a_repeated_step_gives_the_same_bytes(root):
    first = exchange.step(root / "north", root / "study").read_bytes()
    assert exchange.step(root / "north", root / "study").read_bytes() == first


def test_a_missing_answer_ends_the_round_with_a_sentence(root):
    answer_all(root, sites=["east", "north", "south"])
    with pytest.raises(InputError, match=r"round 4 has no answer from west in .*answers; wait for it, or begin again with "):
        exchange.combine(root / "study")


def test_a_study_begins_again_without_a_site(root, cohort):
    progress = exchange.combine(root / "study", without=["west"])
    assert progress.round == 1 and progress.plan.attempt == 2
    with pytest.raises(InputError, match=r"attempt 2, without west; .* with --attempt 2"):
        exchange.step(root / "north", root / "study")
    model = finish(root, attempt=2, sites=["east", "north", "south"])
    rest = cohort.select(cohort.sites != "west")
    assert_equal(Method.load(model), pooled(rest), rest)
    with pytest.raises(InputError, match="the study is finished"):
        exchange.combine(root / "study", without=["north"])


def test_too_few_sites_are_left(root):
    exchange.combine(root / "study", without=["west"])
    with pytest.raises(InputError, match="2 sites take part; the study needs at least 3"):
        exchange.combine(root / "study", without=["north"])
    assert json.loads((root / "study" / "without.json").read_text()) == ["west"]


def changed(path, head=None, arrays=None, drop=()):
    """Write a message with another header or other arrays."""
    from safetensors.numpy import load, save

    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"] | (head or {})
    tensors = {name: value for name, value in load(content).items() if name not in drop} | (arrays or {})
    path.write_bytes(save(tensors, metadata=metadata))


ANSWERS = [
    ({"head": {"round": "3"}}, "answers round 3 of attempt 1; the study is at round 4"),
    ({"head": {"attempt": "2"}}, "answers round 4 of attempt 2"),
    ({"head": {"study": "b"}}, "belongs to another study"),
    ({"head": {"site": "mars"}}, "is from site mars, which does not take part"),
    ({"head": {"site": "east"}}, "is from site east, not north"),
    ({"head": {"format": "x"}}, "is not an m2lgdg-federated-answer-1 file"),
    ({"arrays": {"search.age": np.full(63, np.nan)}}, "search.age has shape .* and type float64"),
    ({"arrays": {"search.age": np.zeros(62, dtype=np.int64)}}, r"shape \(62,\)"),
    ({"arrays": {"more": np.zeros(3)}}, "its sums are not those that round 4 asks for"),
    ({"drop": ["search.age"]}, "its sums are not those that round 4 asks for"),
]


@pytest.mark.parametrize(("change", "message"), ANSWERS, ids=[str(i) for i in range(len(ANSWERS))])
def test_answers_that_are_refused(root, change, message):
    answer_all(root)
    path = root / "study" / "answers" / exchange.answer_name(1, 4, "north")
    changed(path, **change)
    with pytest.raises(InputError, match=message):
        exchange.combine(root / "study")
    assert not (root / "study" / "totals" / "totals-01-004.safetensors").exists()


def test_a_damaged_answer_is_refused(root):
    answer_all(root)
    path = root / "study" / "answers" / exchange.answer_name(1, 4, "north")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="is damaged or not an"):
        exchange.combine(root / "study")


REQUESTS = [
    ({"head": {"round": "9"}}, "is round 9, but round 4 was not answered"),
    ({"head": {"round": str(MOST_ROUNDS + 1)}}, "is not allowed"),
    ({"head": {"study": "b"}}, "belongs to another study"),
    ({"head": {"asks": '[["rows", "steady"]]'}}, "'rows' is not part of the protocol"),
    ({"head": {"asks": '[["spread", "everything"]]'}}, "'everything' is not part of the protocol"),
    ({"arrays": {"value standard.steady": np.full((4, 66), np.nan)}}, "is not .* finite numbers"),
    ({"arrays": {"value weights": np.zeros(3)}}, "a value named 'weights' is not part of the protocol"),
    ({"arrays": {"extra": np.zeros(3)}}, "arrays that are not part of the protocol"),
    ({"head": {"members": "[]"}}, "0 sites take part"),
]


@pytest.mark.parametrize(("change", "message"), REQUESTS, ids=[str(i) for i in range(len(REQUESTS))])
def test_requests_that_a_site_refuses(root, change, message):
    path = shutil.copy(root / "study" / "requests" / exchange.request_name(1, 4), root / "request.safetensors")
    changed(path, **change)
    with pytest.raises(InputError, match=message):
        exchange.step(root / "north", path)
    assert not (root / "north" / "outbox" / exchange.answer_name(1, 4, "north")).exists()


def test_a_site_notices_other_counts_and_other_requests(root):
    path = root / "study" / "requests" / exchange.request_name(1, 4)
    exchange.step(root / "north", path)
    head = messages.read_message(path.read_bytes(), messages.REQUEST, "")[0]
    other = shutil.copy(path, root / "request.safetensors")
    changed(other, head={"asks": json.dumps(json.loads(head["asks"])[::-1])})
    with pytest.raises(InputError, match=r"is damaged|differs from the request of round 4|is not the protocol"):
        exchange.step(root / "north", other)
    members = json.loads(head["members"])
    members[1]["patients"] += 1
    changed(other, head={"members": json.dumps(members)})
    with pytest.raises(InputError, match="does not take part with the counts and the key"):
        exchange.step(root / members[1]["site"], other)


def test_a_direction_with_nan_is_refused(cohort):
    study = study_of(cohort)
    member, arrays = prepared(study, by_site(cohort)["north"], "north")
    others = [replace(member, site=site) for site in cohort.site_names]
    site = Site(Plan(study, tuple(others)), "north", arrays)
    ask = Ask("product", "steady", {"parts": np.array([0]), "directions": np.full((1, 66), np.nan, dtype=np.float32)})
    with pytest.raises(InputError, match="directions holds NaN"):
        site.plan.form(ask)


def test_the_commands(cohort, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save(tmp_path / "cohort.safetensors")
    names = [word for site in cohort.site_names for word in ("--site", site)]
    code, out, _ = typed("federate", "init", "study", *names, "--inputs", "sex,age", "--no-masks")
    assert code == 0 and "federate join study/study.json COHORT --site east" in out
    for site in cohort.site_names:
        code, out, err = typed(
            *("federate", "join", "study/study.json", "cohort.safetensors", "--site", site, "--cohort-site", site),
            *("--out", site),
        )
        assert code == 0, err
        shutil.copy(f"{site}/outbox/{site}.json", "study/joins")
    code, out, _ = typed("federate", "combine", "study")
    assert code == 0 and "request-01-001.safetensors (round 1)" in out
    code, out, _ = typed("federate", "step", "east", "study", "--to", "study/answers")
    assert code == 0 and "Next: m2lgdg federate show study/answers/answer-01-001-east.safetensors" in out
    code, out, _ = typed("federate", "show", "study/answers/answer-01-001-east.safetensors")
    assert code == 0 and "round 1, site east" in out and REVEALS["codes"] in out
    for path, words in (("study/study.json", "Masks: off"), ("east/outbox/east.json", "Site east: "), ("study/requests/*", "")):
        code, out, _ = typed("federate", "show", next(tmp_path.glob(path)))
        assert code == 0 and words in out
    code, _, err = typed("federate", "combine", "study")
    assert code == 2 and "no answer from north, south, west" in err
    code, _, err = typed("federate", "show", "cohort.safetensors")
    assert code == 2 and "is not a file of a federated study" in err
