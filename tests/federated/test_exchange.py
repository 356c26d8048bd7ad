"""A study by files: the same bits as in one process, after a kill, without a site, and as typed."""

import json
import os
import shutil

import pytest
from hospitals import SIZES, agreed, answer_all, bits, by_site, request_of
from safetensors.numpy import load_file

from m2lgdg import Model
from m2lgdg.federated import exchange, messages
from m2lgdg.federated.plan import SUMS
from m2lgdg.storage import InputError


def test_by_files_the_same_bits_as_in_one_process(finished, fitted):
    stored = Model.load(finished / "study" / "model")
    assert bits(stored) == bits(fitted)
    assert stored.facts_["federated"]["rounds"] == fitted.facts_["federated"]["rounds"]
    assert (finished / "north" / "private").stat().st_mode & 0o077 == 0
    assert (finished / "study" / "private").stat().st_mode & 0o077 == 0


def test_the_model_folder_predicts_and_has_a_card(finished, typed, cohort, tmp_path):
    cohort.save(tmp_path / "cohort.safetensors")
    model = finished / "study" / "model"
    code, _, _ = typed("predict", model, tmp_path / "cohort.safetensors", "--out", tmp_path / "p.csv")
    assert code == 0 and len((tmp_path / "p.csv").read_text().splitlines()) >= len(cohort)
    card = (model / "card.md").read_text()
    rounds = Model.load(model).facts_["federated"]["rounds"]
    assert "Federated training" in card and f"rounds: {rounds}" in card and "masks were on" in card


def test_facts_of_a_federated_fit_are_checked(finished, tmp_path):
    fitted = Model.load(finished / "study" / "model")
    fitted.facts_["federated"] = fitted.facts_["federated"] | {"rounds": "many"}
    fitted.save(tmp_path / "model")
    with pytest.raises(InputError, match="rounds is not a count"):
        Model.load(tmp_path / "model")


@pytest.mark.parametrize("who", ["step", "combine"])
def test_killed_before_any_of_its_files(root, finished, monkeypatch, who):
    """A command that is killed before it writes a file, and repeated, writes the bytes that it writes undisturbed."""
    commands = {
        "step": lambda: exchange.step(root / "north", root / "study"),
        "combine": lambda: exchange.combine(root / "study"),
    }
    if who == "combine":
        answer_all(root)
    for kills in range(5):
        calls = []

        def killed(function, calls=calls, kills=kills):
            def call(*given):
                calls.append(given)
                if len(calls) > kills:
                    raise KeyboardInterrupt
                return function(*given)

            return call

        with monkeypatch.context() as patch:
            patch.setattr("os.link", killed(os.link))
            patch.setattr("os.replace", killed(os.replace))
            try:
                commands[who]()
                break
            except KeyboardInterrupt:
                pass
    assert kills > 0
    for part in ("north/outbox", "north/received", "study/totals", "study/requests"):
        for path in (root / part).iterdir():
            assert path.read_bytes() == (finished / part / path.name).read_bytes()
    assert (
        (root / {"step": "north/outbox/answer-01-004-north", "combine": "study/requests/request-01-005"}[who])
        .with_suffix(".safetensors")
        .exists()
    )


def test_an_altered_request_is_not_added_to(root):
    answer_all(root)
    path = root / "study" / "requests" / exchange.request_name(1, 4)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InputError, match="is not the request that follows from the totals before it"):
        exchange.combine(root / "study")


def test_a_missing_answer_ends_the_round_with_a_sentence(root):
    answer_all(root, sites=set(SIZES) - {"west"})
    with pytest.raises(InputError, match=r"round 4 has no answer from west in .*answers; wait for it, or begin again with "):
        exchange.combine(root / "study")


def test_a_study_begins_again_without_a_site(root, cohort):
    progress = exchange.combine(root / "study", without=["west"])
    assert progress.round == 1 and progress.plan.attempt == 2
    with pytest.raises(InputError, match="5 sites take part, and the study needs 6"):
        exchange.combine(root / "study", without=["north"])
    assert json.loads((root / "study" / "without.json").read_text()) == ["west"]
    answer_all(root, without=["west"])
    assert exchange.combine(root / "study").round == 2
    total = load_file(root / "study" / "totals" / "totals-02-001.safetensors")["codes.sex"]
    rest = cohort.phenotypes["sex"][cohort.sites != "west"]
    assert total.tolist() == [(rest == code).sum() for code in range(10)]


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
    exchange.step(tmp_path / "east", tmp_path / "study", fingerprint=agreed(tmp_path))
    assert any("west does not train" in line for line in messages.in_words(tmp_path / "study" / "study.json"))


def test_another_version_of_the_program(cohort, tmp_path, monkeypatch):
    exchange.init(tmp_path / "study", cohort.site_names)
    monkeypatch.setattr("m2lgdg.__version__", "9.9.9")
    with pytest.raises(InputError, match=r"and this is 9\.9\.9; all sites run the same program"):
        exchange.join(tmp_path / "study", by_site(cohort)["east"], "east", tmp_path / "east")


def test_the_commands(cohort, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save(tmp_path / "cohort.safetensors")
    names = [word for site in cohort.site_names for word in ("--site", site)]
    code, out, _ = typed("federate", "init", "study", *names, "--inputs", "sex,age")
    assert code == 0 and "federate join study/study.json COHORT --site coast" in out
    for site in cohort.site_names:
        words = ("--site", site, "--cohort-site", site, "--out", site)
        code, out, err = typed("federate", "join", "study/study.json", "cohort.safetensors", *words)
        assert code == 0 and "this site agrees to" in out and "All other sites together" in out, err
        shutil.copy(f"{site}/outbox/{site}.json", "study/joins")
    code, out, _ = typed("federate", "combine", "study")
    assert code == 0 and "request-01-001.safetensors (round 1)" in out and "in 2 folds" in out
    words = ("federate", "step", "east", "study", "--to", "study/answers")
    code, _, err = typed(*words)
    fingerprint = err.split("--fingerprint ")[1].strip().rstrip(".")
    assert code == 2 and "by telephone" in err and fingerprint in out
    code, out, _ = typed(*words, "--fingerprint", fingerprint)
    assert code == 0 and "Next: m2lgdg federate show study/answers/answer-01-001-east.safetensors" in out
    for path, said in (
        ("study/answers/answer-01-001-east.safetensors", SUMS["codes"].reveals),
        ("study/study.json", "At least 10 subjects at every site"),
        ("east/outbox/east.json", "Site east: "),
        ("study/requests/request-01-001.safetensors", "Request of the coordinator"),
    ):
        code, out, _ = typed("federate", "show", path)
        assert code == 0 and said in out
    code, _, err = typed("federate", "combine", "study")
    assert code == 2 and "no answer from coast, hills, lakes, north, south, west" in err
    code, _, err = typed("federate", "show", "cohort.safetensors")
    assert code == 2 and "is not a file of a federated study" in err


def test_consent_as_typed(cohort, tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save(tmp_path / "cohort.safetensors")
    names = [word for site in cohort.site_names for word in ("--site", site)]
    code, out, _ = typed("federate", "init", "study", *names, "--leave-out", "west")
    assert code == 0 and "--consent" in out and exchange.open_study(tmp_path / "study").leave_out == "west"
    words = ("federate", "join", "study/study.json", "cohort.safetensors", "--site", "east", "--cohort-site", "east")
    code, _, err = typed(*words, "--out", "east")
    assert code == 2 and "--consent" in err
    code, _, _ = typed(*words, "--out", "east", "--consent")
    assert code == 0


def test_a_repeated_step_gives_the_same_bytes(root):
    first = exchange.step(root / "north", root / "study").read_bytes()
    assert exchange.step(root / "north", root / "study").read_bytes() == first
    assert exchange.answer(root / "north", request_of(root, 4), "", to=root / "there").read_bytes() == first
