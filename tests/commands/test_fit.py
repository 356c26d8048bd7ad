"""`m2lgdg fit` and `m2lgdg predict`: a model folder made from all sites, used at a new one, and what they refuse."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import Cohort, Model, make, make_cohort
from m2lgdg.registry import METHODS


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Folder with cohorts of known sites and of a new one, and two models of the known sites."""
    folder = tmp_path_factory.mktemp("ready")
    cohort = make_cohort("tiny", seed=1)
    known, new = cohort.select(cohort.sites != "west"), cohort.select(sites=["west"])
    known.save(folder / "known.cohort")
    new.save(folder / "new.cohort")
    fitted = make("fc-logistic").fit(known, source_distribution=True, new_site_calibration=True)
    fitted.save(folder / "model")
    make("fc-logistic", "phenotypes").fit(known, source_distribution=True).save(folder / "with")
    return folder


@pytest.fixture
def command(monkeypatch, typed, tmp_path, ready):
    shutil.copytree(ready, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return typed


def test_fit_then_predict_is_the_same_in_python(command):
    code, text, _ = command("fit", "known.cohort", "--method", "fc-logistic", "--variant", "phenotypes", "--out", "own")
    assert code == 0
    assert "trained on 40 subjects from 3 sites" in text
    assert f"It decides at a probability of {Model.load('own').threshold:.3g}, from left-out sites; tables of" in text
    code, text, _ = command("predict", "own", "new.cohort", "--out", "p.csv")
    assert code == 0
    assert "not a diagnostic device" in text
    table = pd.read_csv("p.csv")
    new = Cohort.load("new.cohort")
    assert table["subject"].tolist() == new.subjects.tolist()
    np.testing.assert_allclose(table["proba"], Model.load("own").predict_proba(new)[:, 1], atol=1e-12)
    assert (table["decision"] == (table["proba"] >= Model.load("own").threshold)).all()


def test_sites_are_left_out_of_training_and_predicted_alone(command):
    known = Cohort.load("known.cohort")
    held, *others = known.site_names
    code, text, _ = command("fit", "known.cohort", "--method", "fc-logistic", "--out", "own", "--without", held)
    assert code == 0 and "from 2 sites" in text
    assert f"predict own known.cohort --site {held} --out predictions.csv" in text
    assert set(Model.load("own").facts_["source"]["sites"]) == set(others)
    code, text, _ = command("predict", "own", "known.cohort", "--site", held, "--out", "p.csv")
    assert code == 0 and "the model was trained on" not in text
    here = known.select(known.sites == held)
    table = pd.read_csv("p.csv")
    assert table["subject"].tolist() == here.subjects.tolist()
    direct = make("fc-logistic").fit(known.select(known.sites != held)).predict_proba(here)[:, 1]
    np.testing.assert_allclose(table["proba"], direct, atol=1e-12)
    code, _, errors = command("fit", "known.cohort", "--out", "other", "--without", f"{held}x")
    assert code == 2 and f"{held}x is not a site of cohort tiny; did you mean {held}?" in " ".join(errors.split())
    everybody = [part for site in known.site_names for part in ("--without", site)]
    code, _, errors = command("fit", "known.cohort", "--out", "other", *everybody)
    assert code == 2 and "has no labelled subjects to train on" in errors


def test_several_new_sites_are_compared_with_source_one_by_one(command):
    """A median over sites would be the value of none."""
    known, distribution = Cohort.load("known.cohort"), Model.load("model").source_distribution_
    text = command("predict", "model", "known.cohort", "--out", "p.csv")[1].splitlines()
    for site in known.site_names:
        here = known.select(known.sites == site)
        at = text.index(f"  {site} ({len(here)} subjects):")
        wanted = distribution.compare(here)
        assert len(wanted) > 1 and [line.strip() for line in text[at + 1 : at + 1 + len(wanted)]] == wanted
    many = make_cohort("tiny", sizes={f"s{i}": 8 for i in range(6)})
    many.save("many.cohort")
    text = command("predict", "model", "many.cohort", "--out", "many.csv")[1]
    assert f"All 6 sites pooled:\n    {distribution.compare(many)[0]}" in text
    one = command("predict", "model", "new.cohort", "--out", "one.csv")[1]
    assert f"\n  {distribution.compare(Cohort.load('new.cohort'))[0]}\n" in one and "subjects):" not in one


def test_missing_phenotypes_are_imputed_by_source_medians_and_flagged(command):
    new, fitted = Cohort.load("new.cohort"), Model.load("with")
    median = Cohort.load("known.cohort").phenotypes["age"].median()
    filled = fitted.predict_proba(new._changed(phenotypes=new.phenotypes.assign(age=median)))
    lacking = new._changed(phenotypes=new.phenotypes.drop(columns="age"), inputs=("sex", "education"))
    np.testing.assert_array_equal(fitted.predict_proba(lacking), filled)
    assert not np.array_equal(fitted.predict_proba(new), filled)
    blank = new._changed(phenotypes=new.phenotypes.assign(age=""), inputs=("sex", "education"))  # a column of empty cells
    np.testing.assert_array_equal(fitted.predict_proba(blank), filled)

    wanted = fitted.facts_["inputs"]
    none = new._changed(phenotypes=new.phenotypes[[]], inputs=()).select([0])
    none.save("none.cohort")
    assert command("predict", "with", "none.cohort", "--out", "one.csv")[0] == 0
    (row,) = pd.read_csv("one.csv").to_dict("records")
    assert row["flags"].split("; ")[0] == f"phenotypes missing: {' '.join(wanted)}"
    assert row["subject"] == new.subjects[0]


def test_flags_tell_each_subject_apart(command):
    new = Cohort.load("new.cohort").select([0, 1, 2])
    series = [np.tile(one, (5, 1))[:length].copy() for one, length in zip(new.series, (99, 100, 150), strict=True)]
    series[2][:, [1, 4]] = 3.0
    new._changed(series=tuple(series), phenotypes=new.phenotypes[[]], inputs=()).save("odd.cohort")
    code, text, _ = command("predict", "model", "odd.cohort", "--out", "p.csv")
    assert code == 0
    flags = pd.read_csv("p.csv", keep_default_na=False)["flags"].tolist()
    flags = [flag.split("; outside")[0] for flag in flags]
    assert flags == ["short scan: 99", "", "flat rois: 2"]  # this model uses no phenotype, so misses none
    assert "Flagged: short scan (1), flat rois (1)" in text


def test_the_best_model_is_fitted_unless_another_is_asked_for(command):
    """With phenotypes where there are any; whoever names a method or a variant gets just that."""
    name = "connectome-adaptive"
    asked = {
        "best": (),
        "no-inputs": ("--inputs", "none"),
        "without": ("--set", "phenotypes=false"),
        "named": ("--method", name),
    }
    for folder, options in asked.items():
        assert command("fit", "known.cohort", "--no-new-site-calibration", *options, "--out", folder)[0] == 0
    fitted = {folder: Model.load(folder) for folder in asked}
    assert {one.name for one in fitted.values()} == {name}
    assert {folder: one.phenotypes for folder, one in fitted.items()} == {
        "best": True,
        "no-inputs": False,
        "without": False,
        "named": False,
    }
    assert "age" in fitted["best"].facts_["inputs"] and fitted["named"].facts_["inputs"] == []


def test_calibrate_writes_a_model_that_predict_uses(command):
    code, text, _ = command("calibrate", "model", "new.cohort", "--out", "own")
    assert code == 0
    assert "calibrated on 12 subjects; do not evaluate the model on them" in text
    assert "local calibration" in Path("own/card.md").read_text()
    assert command("predict", "own", "new.cohort", "--out", "p.csv")[0] == 0
    table, own = pd.read_csv("p.csv"), Model.load("own")
    np.testing.assert_allclose(table["proba"], own.predict_proba(Cohort.load("new.cohort"))[:, 1], atol=1e-12)
    assert (table["decision"] == (table["proba"] >= own.threshold)).all()
    assert Model.load("model").facts_.get("local") is None


def test_a_deep_model_is_a_folder_of_tensors_and_json(command):
    changes = ["--set", "epochs=2", "--set", "warmup=1", "--set", "length=32"]
    code, text, _ = command(
        "fit", "known.cohort", "--method", "m2lgdg", "--variant", "small", *changes, "--out", "deep", "--device", "cpu"
    )
    assert code == 0
    assert "Trained for 2 epochs; best epoch 2 with validation AUC" in text
    assert "Note: Platt scaling is flat" in text  # two epochs teach nothing
    assert sorted(file.name for file in Path("deep").iterdir()) == [
        *("card.html", "card.md", "method.json", "source_distribution.safetensors", "weights.safetensors")
    ]
    about = json.loads(Path("deep/method.json").read_text())
    assert about["fields"]["epochs"] == 2
    assert about["facts"]["source"]["sites"].keys() == {"east", "north", "south"}
    assert len(about["facts"]["history"]) == 2
    assert command("predict", "deep", "new.cohort", "--out", "p.csv")[0] == 0
    assert len(pd.read_csv("p.csv")) == 12


PLUGIN = """
import numpy as np
from m2lgdg.method import Method, method

@method("{name}")
class Half(Method):
    def learn(self, source, *, seed, device, progress):
        self.state_["x"] = np.zeros(1)

    def score(self, target):
        return np.full(len(target), 0.5)
"""


def test_fit_with_a_plugin_says_what_works_next(command):
    for name in ("half-a", "half-b"):
        Path(f"{name}.py").write_text(PLUGIN.format(name=name))
    options = ["--plugin", "half-a.py", "--plugin", "half-b.py", "--out", "half"]
    try:
        code, text, _ = command("fit", "known.cohort", "--method", "half-a", *options)
        assert code == 0
        reported = text.split("Then, with your own NEW_SITE: m2lgdg ")[1].split()
        assert " ".join(reported) == "predict half NEW_SITE --out predictions.csv --plugin half-a.py --plugin half-b.py"
        METHODS.pop("half-a")
        assert command(*[{"NEW_SITE": "new.cohort"}.get(word, word) for word in reported])[0] == 0
        share = Cohort.load("known.cohort").labels.mean()  # what scores that say nothing mean at sites left out, or nearly
        np.testing.assert_allclose(pd.read_csv("predictions.csv")["proba"], [share] * 12, atol=0.01)
    finally:
        for name in ("half-a", "half-b"):  # not methods of the package
            METHODS.pop(name, None)


def test_what_fit_says_next_can_be_typed_whatever_sites_are_called(command):
    make_cohort("tiny", sizes={"Site A": 14, "b": 14, "c": 14}).save("my cohort.cohort")
    without = ["--without", "Site A", "--without", "Site A"]
    options = ["--method", "fc-logistic", "--no-new-site-calibration", "--out", "my model"]
    code, text, _ = command("fit", "my cohort.cohort", *without, *options)
    assert code == 0
    reported = text.split("Next: m2lgdg ")[1].strip()
    assert reported == "predict 'my model' 'my cohort.cohort' --site 'Site A' --out predictions.csv"
    code, text, _ = command(*shlex.split(reported))
    assert code == 0 and "Wrote predictions.csv: 14 subjects" in text
    assert "Next:" not in text or "--site 'Site A'" in text.split("Next:")[1]  # never training sites too
    code, text, _ = command("predict", "my model", "my cohort.cohort", "--out", "all.csv")
    assert code == 0 and "Next: m2lgdg explain 'my model' 'my cohort.cohort' --out all-explained" in text


def test_fit_says_that_nobody_was_spared_for_validation(command):
    cohort = Cohort.load("known.cohort")
    first = [
        np.flatnonzero((cohort.sites == site) & (cohort.labels == label))[0] for site in ("east", "north") for label in (0, 1)
    ]
    cohort.select(np.sort(first)).save("few.cohort")
    changes = ["--variant", "small", "--set", "epochs=2", "--set", "warmup=1"]
    code, text, _ = command("fit", "few.cohort", "--method", "erm", *changes, "--out", "few", "--device", "cpu")
    assert code == 0
    assert "best epoch 2 with training AUC" in text
    assert "Note: No source subject was held out for validation" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fit", "known.cohort", "--method", "fc-logistics", "--out", "m"), "method fc-logistics is not known; did you mean"),
        (("fit", "known.cohort", "--variant", "x", "--out", "m"), "has no variant x; available: phenotypes"),
        (("fit", "known.cohort", "--set", "site_fold=3", "--out", "m"), "has no field site_fold; did you mean site_folds?"),
        (("fit", "known.cohort", "--inputs", "height", "--out", "m"), "input height is not a phenotype column"),
        (("fit", "nothing", "--out", "m"), "nothing does not exist."),
        (("fit", "known.cohort", "--method", "m2lgdg", "--device", "toaster", "--out", "m"), "device toaster is not available"),
        (("predict", "nowhere", "new.cohort", "--out", "p.csv"), "nowhere is not a model folder (no method.json), nor"),
        (
            ("predict", "model", "other.cohort", "--out", "p.csv"),
            "the model was trained on 12 ROIs (synthetic), the cohort has 13.",
        ),
        (("predict", "model", "swapped.cohort", "--out", "p.csv"), "ROI 1 is roi-001 in the model but roi-002 in the cohort"),
        (("predict", "model", "brief.cohort", "--out", "p.csv"), "has 19 volumes; a prediction needs at least 20."),
        (("predict", "with", "text.cohort", "--out", "p.csv"), "input age holds text; inputs must be numeric."),
        (("predict", "broken", "new.cohort", "--out", "p.csv"), "weights.safetensors"),
        (("fit", "known.cohort", "--out", "model"), "model is not empty; choose another --out."),
    ],
)
def test_bad_input_ends_in_one_sentence(command, arguments, words):
    shutil.copytree("model", "broken")
    Path("broken/weights.safetensors").write_bytes(Path("broken/weights.safetensors").read_bytes()[:-7])
    make_cohort("tiny", n_rois=13).save("other.cohort")
    new = Cohort.load("new.cohort")
    new._changed(series=tuple(one[:19] for one in new.series)).save("brief.cohort")
    new._changed(phenotypes=new.phenotypes.assign(age="old"), inputs=()).save("text.cohort")
    new._changed(rois=(new.rois[1], new.rois[0], *new.rois[2:])).save("swapped.cohort")
    code, _, errors = command(*arguments)
    assert code == 2
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1
    assert words in lines[0]
    assert not Path("m").exists()
    assert not Path("p.csv").exists()


def test_the_training_sites_themselves_are_told(command):
    """Else a careless user takes a model's own subjects for a new site, and what it says of them for the truth."""
    note = "trained on sites of these names: east, north, south. Predictions for training subjects are optimistic"
    for arguments in (
        ("predict", "model", "known.cohort", "--out", "p.csv"),
        ("calibrate", "model", "known.cohort", "--out", "own"),
    ):
        code, text, _ = command(*arguments)
        assert code == 0
        assert note in text
    assert "the subjects are from 3 sites" in text
    for arguments in (
        ("predict", "model", "new.cohort", "--out", "p.csv"),
        ("calibrate", "model", "new.cohort", "--out", "other"),
    ):
        assert "Note:" not in command(*arguments)[1]


def test_a_used_folder_is_refused_before_anything_is_read(command):
    code, _, errors = command("fit", "not-there.cohort", "--out", "model")
    assert (code, errors) == (2, "m2lgdg: model is not empty; choose another --out.\n")


def test_a_cohort_without_labels_and_one_site(command):
    new = Cohort.load("new.cohort")
    new.unlabelled().save("blank.cohort")
    code, text, errors = command("fit", "blank.cohort", "--method", "fc-logistic", "--out", "one")
    assert (code, text) == (2, "")
    assert "no labelled subjects to train on" in errors
    assert "trained on 12 subjects from 1 site," in command("fit", "new.cohort", "--method", "fc-logistic", "--out", "one")[1]


def test_ctrl_c_in_fit_is_told_and_leaves_nothing(command, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(METHODS["fc-logistic"], "learn", stopped)
    code, _, errors = command("fit", "known.cohort", "--method", "fc-logistic", "--out", "stopped")
    assert (code, errors) == (130, "Stopped: nothing was written.\n")
    assert not Path("stopped").exists()
