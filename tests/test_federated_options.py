"""Options of a federated study: a site left out for evaluation."""

import json
import shutil

import numpy as np
import pytest

import m2lgdg
from m2lgdg.federated import exchange, messages
from m2lgdg.federated.plan import Study
from m2lgdg.federated.words import in_words
from m2lgdg.method import Method
from m2lgdg.storage import InputError

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3).with_inputs(())


def by_site(cohort):
    return {site: cohort.select(sites=[site]) for site in cohort.site_names}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
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
    later = Study("x", ("a", "b", "c", "d"), leave_out="d")
    assert messages.read_study(messages.study_json(later).encode(), "") == later


def test_a_study_with_noise_is_refused():
    given = json.loads(messages.study_json(Study("x", ("a", "b", "c")))) | {"noise": 2.5}
    with pytest.raises(InputError, match="asks for noise on the sums"):
        messages.read_study(json.dumps(given).encode(), "study.json")


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
    code, out, _ = typed("federate", "init", "study", *names, "--leave-out", "west")
    assert code == 0 and "--consent" in out
    study = exchange.open_study(tmp_path / "study")
    assert study.leave_out == "west"
    words = ("federate", "join", "study/study.json", "cohort.safetensors", "--site", "east", "--cohort-site", "east")
    code, _, err = typed(*words, "--out", "east")
    assert code == 2 and "--consent" in err
    code, _, _ = typed(*words, "--out", "east", "--consent")
    assert code == 0
