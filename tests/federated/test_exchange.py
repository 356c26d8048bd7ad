"""A study by files: the same bits as in one process, with masks, after a kill, without a site, and as typed."""

import json
import shutil

import numpy as np
import pytest
from hospitals import answer_all, assert_pooled, bits, by_site, finish, make_study, pooled, study_of
from safetensors.numpy import load_file

from m2lgdg import Model
from m2lgdg.federated import exchange, messages
from m2lgdg.federated.messages import in_words
from m2lgdg.federated.plan import SUMS
from m2lgdg.federated.simulation import simulate
from m2lgdg.storage import InputError


def test_by_files_the_same_bits_as_in_one_process(finished, cohort):
    fitted = simulate(study_of(cohort), by_site(cohort))
    stored = Model.load(finished / "study" / "model")
    assert bits(stored) == bits(fitted)
    assert stored.facts_["federated"]["rounds"] == fitted.facts_["federated"]["rounds"]


def test_masks_leave_no_trace_in_the_total(cohort, tmp_path, finished):
    pytest.importorskip("cryptography")
    make_study(cohort, tmp_path)
    for _ in range(6):  # most kinds of sums
        answer_all(tmp_path)
        exchange.combine(tmp_path / "study")
    for path in (tmp_path / "study" / "totals").iterdir():
        given, plain = (load_file(root / "study" / "totals" / path.name) for root in (tmp_path, finished))
        assert set(given) == set(plain) and all((given[key] == plain[key]).all() for key in plain)
    paths = [root / "study" / "answers" / exchange.answer_name(1, 5, "north") for root in (tmp_path, finished)]
    masked, plain = (messages.read_message(path.read_bytes(), messages.ANSWER, "")[1] for path in paths)
    for key in masked:
        if not key.startswith("association"):  # by fold, and this site is alone in its fold
            assert (masked[key] != plain[key]).mean() > 0.9
    assert (tmp_path / "north" / "private").stat().st_mode & 0o077 == 0


def test_the_model_folder_predicts_and_has_a_card(finished, typed, cohort, tmp_path):
    cohort.save(tmp_path / "cohort.safetensors")
    model = finished / "study" / "model"
    code, _, _ = typed("predict", model, tmp_path / "cohort.safetensors", "--out", tmp_path / "p.csv")
    assert code == 0 and len((tmp_path / "p.csv").read_text().splitlines()) >= len(cohort)
    card = (model / "card.md").read_text()
    rounds = Model.load(model).facts_["federated"]["rounds"]
    assert "Federated training" in card and f"rounds: {rounds}" in card and "masks were off" in card


def test_facts_of_a_federated_fit_are_checked(finished, tmp_path):
    fitted = Model.load(finished / "study" / "model")
    fitted.facts_["federated"] = fitted.facts_["federated"] | {"rounds": "many"}
    fitted.save(tmp_path / "model")
    with pytest.raises(InputError, match="rounds is not a count"):
        Model.load(tmp_path / "model")


def test_a_killed_combine_is_repeated(root, monkeypatch):
    answer_all(root)
    before = sorted((root / "study" / "requests").iterdir())

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(exchange, "write_bytes", killed)
        exchange.combine(root / "study")
    assert sorted((root / "study" / "requests").iterdir()) == before  # the totals are stored, the request is not
    request = exchange.combine(root / "study").request
    twin = root / "twin"
    shutil.copytree(root / "study", twin)
    (twin / "requests" / request.name).unlink()
    assert exchange.combine(twin).request.read_bytes() == request.read_bytes()


def test_an_altered_request_is_not_added_to(root):
    answer_all(root)
    path = root / "study" / "requests" / exchange.request_name(1, 4)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InputError, match="is not the request that follows from the totals before it"):
        exchange.combine(root / "study")


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
    with pytest.raises(InputError, match="2 sites take part; the study needs at least 3"):
        exchange.combine(root / "study", without=["north"])
    assert json.loads((root / "study" / "without.json").read_text()) == ["west"]
    model = finish(root, attempt=2, sites=["east", "north", "south"])
    assert_pooled(Model.load(model), cohort.select(cohort.sites != "west"))
    with pytest.raises(InputError, match="the study is finished"):
        exchange.combine(root / "study", without=["north"])


def test_a_site_left_out_for_evaluation(cohort, tmp_path):
    pytest.importorskip("cryptography")
    cohort = cohort.with_inputs(())
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
    fitted = Model.load(finish(tmp_path, sites=["east", "north", "south"]))
    rest, left = pooled(cohort.select(cohort.sites != "west")), by_site(cohort)["west"]
    assert np.abs(fitted.predict_proba(left) - rest.predict_proba(left)).max() < 1e-6
    assert fitted.facts_["federated"]["left_out"] == "west"
    assert "left out for evaluation: west" in (tmp_path / "study" / "model" / "card.md").read_text()
    assert any("west does not train" in line for line in in_words(tmp_path / "study" / "study.json"))


def test_the_commands(cohort, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save(tmp_path / "cohort.safetensors")
    names = [word for site in cohort.site_names for word in ("--site", site)]
    code, out, _ = typed("federate", "init", "study", *names, "--inputs", "sex,age", "--no-masks")
    assert code == 0 and "federate join study/study.json COHORT --site east" in out
    for site in cohort.site_names:
        words = ("--site", site, "--cohort-site", site, "--out", site)
        code, out, err = typed("federate", "join", "study/study.json", "cohort.safetensors", *words)
        assert code == 0, err
        shutil.copy(f"{site}/outbox/{site}.json", "study/joins")
    code, out, _ = typed("federate", "combine", "study")
    assert code == 0 and "request-01-001.safetensors (round 1)" in out
    code, out, _ = typed("federate", "step", "east", "study", "--to", "study/answers")
    assert code == 0 and "Next: m2lgdg federate show study/answers/answer-01-001-east.safetensors" in out
    code, out, _ = typed("federate", "show", "study/answers/answer-01-001-east.safetensors")
    assert code == 0 and "round 1, site east" in out and SUMS["codes"].reveals in out
    for path, words in (("study/study.json", "Masks: off"), ("east/outbox/east.json", "Site east: ")):
        code, out, _ = typed("federate", "show", path)
        assert code == 0 and words in out
    code, out, _ = typed("federate", "show", "study/requests/request-01-001.safetensors")
    assert code == 0 and out.startswith("Request of the coordinator")
    code, _, err = typed("federate", "combine", "study")
    assert code == 2 and "no answer from north, south, west" in err
    code, _, err = typed("federate", "show", "cohort.safetensors")
    assert code == 2 and "is not a file of a federated study" in err


def test_consent_as_typed(cohort, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save(tmp_path / "cohort.safetensors")
    names = [word for site in cohort.site_names for word in ("--site", site)]
    code, out, _ = typed("federate", "init", "study", *names, "--leave-out", "west", "--no-masks")
    assert code == 0 and "--consent" in out and exchange.open_study(tmp_path / "study").leave_out == "west"
    words = ("federate", "join", "study/study.json", "cohort.safetensors", "--site", "east", "--cohort-site", "east")
    code, _, err = typed(*words, "--out", "east")
    assert code == 2 and "--consent" in err
    code, _, _ = typed(*words, "--out", "east", "--consent")
    assert code == 0
