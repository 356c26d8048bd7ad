"""The model card: its numbers are those of the model and the study, hostile names stay text, no path of a machine is in it."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, make, make_cohort
from m2lgdg.method import Method
from m2lgdg.metrics import auc, delong_interval, wilson
from m2lgdg.model.new_site import NewSiteCalibration
from m2lgdg.report.card import AS_IT_RAN, LEFT_OUT, WARNING, card, write_card

HOSTILE = '<script>alert("x")</script> | [a](http://x.example) `b` *c*'


@pytest.fixture(scope="module")
def cohort():
    """Sites of 14, 14, 12 and 12 subjects, one of them of patients only."""
    cohort = make_cohort("tiny", seed=1)
    return cohort.select((cohort.sites != "east") | (cohort.labels == 1))


@pytest.fixture(scope="module")
def model(cohort, tmp_path_factory):
    return make("fc-logistic", phenotypes=True, site_folds=3).fit(cohort).save(tmp_path_factory.mktemp("card") / "model")


def study_of(folder, predictions, **settings):
    folder.mkdir()
    predictions.to_csv(folder / "predictions.csv", index=False)
    (folder / "study.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def predictions():
    rng = np.random.default_rng(0)
    rows = []
    for target, n, strength in (("NYU", 60, 0.5), ("USM", 16, 0.0)):
        labels = np.array([0, 1] * (n // 2))
        for variant in ("", "phenotypes"):
            proba = np.clip(0.5 + strength * (labels - 0.5) + 0.2 * rng.normal(size=n), 0.01, 0.99)
            rows += [("fc-logistic", variant, 0, target, f"s{i}", labels[i], proba[i]) for i in range(n)]
    return pd.DataFrame(rows, columns=["method", "variant", "seed", "target", "subject", "label", "proba"])


def part(parts, title):
    return next(one for one in parts if one.title == title)


def test_a_sites_own_calibration_is_told(model, tmp_path):
    fitted = Method.load(model)
    fitted.facts_["local"] = {"slope": 0.5, "offset": -0.25, "threshold": 0.4}
    reported = dict(part(card(fitted.save(tmp_path / "own")), "Decision").facts)
    assert reported["local calibration"].startswith("then logit times 0.5 plus -0.25, fitted on labelled subjects of one site")
    assert reported["threshold"] == "patient at 0.4 or above"
    assert "local calibration" not in dict(part(card(model), "Decision").facts)


def test_what_the_model_knows_of_itself(model, cohort):
    parts = card(model)
    about = dict(part(parts, "Model").facts)
    assert about["method"] == "fc-logistic"
    assert about["reference"] == "Abraham et al. 2017, NeuroImage 147: 736-745"
    assert about["fields changed from their defaults"] == "fc-logistic (site_folds = 3, phenotypes = true)"
    (table,) = part(parts, "Training data").tables
    for site, patients, controls, n in table.shown[:-1]:
        labels = cohort.labels[cohort.sites == site]
        assert (int(patients), int(controls), int(n)) == ((labels == 1).sum(), (labels == 0).sum(), len(labels))
    assert table.shown[-1] == ["all", str((cohort.labels == 1).sum()), str((cohort.labels == 0).sum()), str(len(cohort))]
    inputs = dict(part(parts, "Inputs").facts)
    assert inputs["series"].startswith("(time, roi) with 12 ROIs")
    assert inputs["phenotypes"] == "sex, age, education"
    assert dict(part(parts, "Decision").facts)["threshold"] == "patient at 0.5 or above"
    assert any(
        "with one class only" in one and one.endswith(": east.") for one in part(parts, "Known failures and limits").sentences
    )
    assert any(
        "fewer than 20 subjects: east, north, south, west." in one for one in part(parts, "Known failures and limits").sentences
    )
    assert part(parts, "Data licence").sentences == ["authors to complete"]
    hashes = dict(part(parts, "Versions and hashes").facts)
    assert hashes["weights.safetensors, SHA-256"] == hashlib.sha256((model / "weights.safetensors").read_bytes()).hexdigest()
    assert hashes["training cohort, SHA-256 of its content"] == cohort.hash
    assert "No study was given" in part(parts, LEFT_OUT).sentences[0]


def test_sites_left_out_are_of_the_variant_that_the_model_is(model, cohort, predictions, tmp_path):
    settings = {"method": {"fc-logistic": {"site_folds": 3}}, "cohort_hash": cohort.hash}
    found = part(parts := card(model, study_of(tmp_path / "study", predictions, **settings)), LEFT_OUT)
    nyu, _ = found.tables[0].shown
    own = predictions[(predictions.target == "NYU") & (predictions.variant == "phenotypes")]
    low, high = delong_interval(own.label, own.proba)
    assert nyu[:3] == ["NYU", "60", "30"]
    assert nyu[3] == f"{100 * auc(own.label, own.proba):.1f} ({100 * low:.1f}-{100 * high:.1f})"
    hits = int((own[own.label == 1].proba >= 0.5).sum())
    low, high = wilson(hits, 30)
    assert nyu[found.tables[0].header.index("SEN")] == f"{100 * hits / 30:.1f} ({100 * low:.1f}-{100 * high:.1f})"
    both = [auc(one.label, one.proba) for _, one in predictions[predictions.variant == "phenotypes"].groupby("target")]
    assert dict(found.facts)["AUC"].startswith(
        f"{100 * np.mean(both):.1f} ± {100 * np.std(both, ddof=1):.1f} over 2 sites, from"
    )
    assert len(found.sentences) == 2 and not found.remarks  # same fields, same cohort
    reported = part(parts, "Known failures and limits").sentences
    assert "Left-out sites where the AUC interval includes chance: USM." in reported
    assert "Left-out sites with fewer than 20 subjects, with imprecise estimates: USM." in reported


def test_a_study_of_other_fields_or_another_cohort_is_told(model, predictions, tmp_path):
    found = part(card(model, study_of(tmp_path / "study", predictions, cohort_hash="another")), LEFT_OUT)
    assert "The study ran fc-logistic with other field values, so the performance of this model may differ." in found.remarks
    assert any("cohort of the study, or its inputs, differ" in one for one in found.remarks)
    other = study_of(tmp_path / "other", predictions.assign(method="fc-svm"))
    with pytest.raises(InputError, match=r"no method fc-logistic; it has fc-svm, fc-svm \+ phenotypes"):
        card(model, other)


def test_hostile_names_stay_text_and_no_path_is_told(cohort, predictions, tmp_path):
    sites = np.where(cohort.sites == "north", HOSTILE, cohort.sites)
    named = dataclasses.replace(cohort, sites=sites, name="</style><b>", atlas="[x](y)|z")
    model = make("fc-logistic").fit(named).save(tmp_path / "model")
    study = study_of(tmp_path / "study", predictions.assign(target=predictions.target.replace("NYU", HOSTILE)))
    assert write_card(model, study=study) == model
    page, text = (model / "card.html").read_text(), (model / "card.md").read_text()
    assert "&lt;script&gt;alert" in page
    assert "<script" not in page
    assert "</style><b>" not in page
    assert not re.search(r"<script|</style>|(?<!\\)\[a\]|(?<!\\)`b|(?<!\\)\*c", text)
    for row in [line for line in text.splitlines() if "&lt;script" in line and line.startswith("|")]:
        assert row.count(r"\|") == 1
    assert "\\[x\\](y)\\|z" in text
    for one in (page, text):
        assert WARNING in one
        assert str(tmp_path) not in one
        assert not re.search(r"/home/|/tmp/|/work/|file:", one)
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "font: 16px/1.55 system-ui" in page  # the report's own look


def test_known_cohorts_have_their_licence(cohort, tmp_path):
    model = make("prior").fit(dataclasses.replace(cohort, name="abide")).save(tmp_path / "model")
    assert part(card(model), "Data licence").sentences[0].startswith("ABIDE I")
    assert dict(part(card(model), "Decision").facts)["calibration"] == "none"


def test_a_network_tells_its_length_notes_and_calibration(cohort, tmp_path):
    fitted = make("m2lgdg", **{**make("m2lgdg").variants["small"], "length": 32, "epochs": 2, "warmup": 1}).fit(cohort, seed=3)
    fitted.facts_["notes"].append("A note of the fit.")
    parts = card(fitted.save(tmp_path / "model"))
    assert dict(part(parts, "Inputs").facts)["scan length"] == "any; resampled to 32 points"
    assert dict(part(parts, "Model").facts)["seed"] == "3"
    assert "A note of the fit." in part(parts, "Known failures and limits").sentences
    slope, offset = fitted.state_["calibration"]
    assert f"logit times {slope:.4g} plus {offset:.4g}, fitted on held-out subjects" in str(part(parts, "Decision").facts)


def test_the_command(model, predictions, tmp_path, monkeypatch, capsys):
    from m2lgdg.cli import main

    study = study_of(tmp_path / "study", predictions)
    monkeypatch.setattr("sys.argv", ["m2lgdg", "card", str(model), "--study", str(study), "--out", str(tmp_path / "to")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "card.md and card.html." in capsys.readouterr().out.replace("\n", "")
    assert "| NYU | 60 | 30 |" in (tmp_path / "to" / "card.md").read_text()


def test_one_site_or_one_class_has_no_spread(model, predictions, tmp_path):
    one = predictions[predictions.target == "NYU"]
    facts = dict(part(card(model, study_of(tmp_path / "one", one)), LEFT_OUT).facts)
    area = 100 * auc(*(one[one.variant == ""][name].to_numpy() for name in ("label", "proba")))
    assert facts["AUC"] == f"{area:.1f} at one site"
    patients = one[one.label == 1]
    facts = dict(part(card(model, study_of(tmp_path / "class", patients)), LEFT_OUT).facts)
    assert facts == {}  # a site of one class enters no mean


def test_the_page_shows_what_the_columns_mean(model):
    """A caption is for screen readers only: the note of each table must also stand on the page."""
    page = (write_card(model) / "card.html").read_text()
    notes = [table.note for part in card(model) for table in part.tables]
    assert notes == ["labelled subjects of the fit"]
    assert f'<p class="note">{notes[0]}.</p>' in page


def test_the_card_tells_what_training_subjects_were_like(cohort, tmp_path):
    fitted = make("fc-logistic").fit(cohort, source_distribution=True)
    reported = dict(part(card(fitted.save(tmp_path / "model")), "Training data").facts)
    low, middle, high = np.quantile(cohort.phenotypes["age"].dropna(), (0.025, 0.5, 0.975))
    assert reported["age"] == f"median {middle:.3g} years, 95 % of subjects {low:.3g} to {high:.3g}"
    assert "males" not in reported  # a share of sites, not a range of subjects


def test_failures_of_new_site_calibration_are_known_failures(model, predictions, tmp_path):
    rng, sites = np.random.default_rng(0), np.repeat(["A", "B", "C"], 40)
    labels = np.tile([0, 1], 60)
    proba = np.where(labels == 1, 0.8, 0.2) + 0.1 * rng.random(120)
    proba[sites == "C"] = 1 - proba[sites == "C"]  # at one site everything is the other way round
    fitted = Method.load(model)
    fitted.new_site_ = NewSiteCalibration.from_scores(proba, labels, sites, 3)
    folder = fitted.save(tmp_path / "calibrated")
    reported = part(card(folder), "Known failures and limits").sentences
    kept = fitted.new_site_.expected(0.9)
    assert kept.reached < 0.88
    shares = f"{100 * kept.reached:.1f} % of subjects, {100 * kept.lowest:.1f} % at the lowest site"
    assert f"Conformal sets of 90 % coverage contain the true class less often at left-out sites: {shares}." in reported
    assert "Source sites with an AUC interval that includes chance when left out: C." in reported
    parts = card(folder, study_of(tmp_path / "study", predictions))
    assert set(reported) <= set(part(parts, "Known failures and limits").sentences)  # a study adds to them
    assert AS_IT_RAN in part(parts, LEFT_OUT).sentences
