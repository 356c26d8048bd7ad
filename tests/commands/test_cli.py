"""The commands from end to end, as a user types them, and how fast `--help` answers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import miniature
import pandas as pd
import pytest

from m2lgdg import Cohort, make, make_cohort
from m2lgdg.commands import demo
from m2lgdg.registry import PAPER


@pytest.fixture
def command(typed):
    return typed


def test_help_names_every_command_and_imports_nothing_heavy():
    heavy = ("torch", "pandas", "numpy", "nilearn", "sklearn")
    code = f"import sys, m2lgdg.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    text = subprocess.run([sys.executable, "-m", "m2lgdg.cli", "--help"], capture_output=True, text=True, check=True).stdout
    for name in ("demo", "check", "convert", "methods", "run", "table", "report", "audit"):
        assert name in text


def test_version(command):
    assert command("--version")[1].startswith("m2lgdg 0.")


def test_demo_from_nothing_to_a_report(command, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "NETWORKS", re.sub("epochs = .", "epochs = 2\nwarmup = 1", demo.NETWORKS))
    code, text, _ = command("demo", "--preset", "tiny", "--jobs", 1, "--out", tmp_path / "demo")
    assert code == 0
    assert "Macro average over target sites" in text
    assert "Effect planted in patients" in text
    assert f"Next: m2lgdg table {tmp_path / 'demo' / 'results'}" in text
    page = (tmp_path / "demo" / "results" / "report.html").read_text()
    assert "connectome-adaptive" in page
    assert Cohort.load(tmp_path / "demo" / "tiny.cohort").hash == make_cohort("tiny").hash
    code, again, _ = command("run", tmp_path / "demo" / "study.toml", "--out", tmp_path / "again")
    assert code == 0
    assert (tmp_path / "again" / "predictions.csv").read_bytes() == (tmp_path / "demo/results/predictions.csv").read_bytes()
    assert "m2lgdg table" in again


def test_check_writes_lists_and_convert_keeps_what_they_include(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_cohort("tiny").save("tiny.cohort")
    code, text, _ = command("check", "tiny.cohort")
    assert code == 1  # short scans
    assert "usable, with findings" in text
    inclusion = pd.read_csv("tiny-check/inclusion.csv")
    assert (inclusion["status"] == "included").sum() == 52
    inclusion.loc[:3, "status"] = "excluded"
    inclusion.to_csv("mine.csv", index=False)
    code, text, _ = command("convert", "tiny.cohort", "kept.cohort", "--keep", "mine.csv")
    assert code == 0
    kept = Cohort.load("kept.cohort")
    assert len(kept) == 48
    assert [one.reason for one in kept.excluded] == ["left out by an inclusion list (mine.csv)"] * 4


def test_check_keeps_an_inclusion_list_that_was_edited(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_cohort("tiny").save("tiny.cohort")
    folder, said = tmp_path / "tiny-check", "The inclusion.csv that was there is kept as inclusion-2.csv."
    first, again = command("check", "tiny.cohort")[1], command("check", "tiny.cohort")[1]
    assert "is kept as" not in first + again and len(list(folder.iterdir())) == 3
    own = (folder / "inclusion.csv").read_bytes()
    edited = own.replace(b"included", b"excluded", 1)
    (folder / "inclusion.csv").write_bytes(edited)
    assert said in command("check", "tiny.cohort")[1]
    assert (folder / "inclusion-2.csv").read_bytes() == edited and (folder / "inclusion.csv").read_bytes() == own
    assert command("convert", "tiny.cohort", "kept.cohort", "--keep", folder / "inclusion-2.csv")[0] == 0
    assert len(Cohort.load("kept.cohort")) == 51


def test_labels_of_a_bids_folder_are_coded_by_options(command, tmp_path):
    rows = [
        (*row[:3], {"patient": "bipolar", "n/a": "n/a"}.get(row[3], "relative"), *row[4:]) for row in miniature.PARTICIPANTS
    ]
    folder = miniature.xcpd(tmp_path / "xcpd", atlases=("Gordon",), participants=rows).folder
    assert "--patient" in command("check", folder, "--out", tmp_path / "lists")[2]
    coding = ("--patient", "mdd,bipolar", "--control", "relative")
    assert command("check", folder, "--out", tmp_path / "lists", *coding)[0] == 1
    assert command("convert", folder, tmp_path / "out.cohort", *coding)[0] == 0
    assert Cohort.load(tmp_path / "out.cohort").labels.tolist() == [1, 0, 0, -1]


def test_check_of_one_site_is_unusable_unless_it_is_a_new_site(command, tmp_path):
    path = make_cohort("tiny").select(sites=["north"]).save(tmp_path / "one.cohort")
    assert command("check", path, "--out", tmp_path / "a")[0] == 2
    assert command("check", path, "--new-site", "--out", tmp_path / "b")[0] == 1


def test_run_table_methods_and_failures(command, tmp_path):
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom m2lgdg.method import Method, method\n\n"
        '@method("fails-at-north")\nclass Fails(Method):\n    """Fails where north is held out."""\n\n'
        "    def learn(self, source, *, seed, device, progress):\n"
        "        self.state_['x'] = np.array([source.site_names.index('north')])\n\n"
        "    def score(self, target):\n        return np.full(len(target), 0.5)\n"
    )
    study = tmp_path / "study.toml"
    study.write_text('cohort = "tiny.cohort"\nmethods = ["prior", "fails-at-north"]\nseeds = [0]\nplugins = ["mine.py"]\n')
    code, text, errors = command("run", study, "--out", tmp_path / "out", "--set", "targets=['north', 'east']")
    assert code == 1
    assert "3 of 4 cells done" in text
    assert "failed: fails-at-north, target north, seed 0: ValueError: 'north' is not in list" in errors
    for form, mark in (
        ("text", "Target east"),
        ("markdown", "| Method |"),
        ("latex", r"\toprule"),
        ("csv", "table,method,metric,mean,sd"),
    ):
        code, text, _ = command("table", tmp_path / "out", "--format", form)
        assert code == 0
        assert mark in text
    assert command("report", tmp_path / "out")[0] == 0
    assert "1 cell failed" in (tmp_path / "out" / "report.html").read_text()
    code, text, _ = command("methods", "--plugin", tmp_path / "mine.py")
    assert code == 0
    assert "fails-at-north" in text
    assert "connectome-ensemble" in text
    found = [text.index(f"  {name}  ") for name in PAPER]  # all fourteen, in the order of the paper's tables
    assert len(found) == 14 and found == sorted(found)
    code, text, _ = command("methods", "mixup")
    assert code == 0
    assert "fields without effect here: length, batch_size" in text and "  batch_size:" not in text
    assert "alpha: 0.2" in text and "per-subject: share_per_subject = True" in text and "before Fisher z" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nothing.toml", "--out", "out"), "nothing.toml does not exist."),
        (("table", "nowhere"), "nowhere is not a study folder (no predictions.csv)."),
        (("report", "nowhere"), "nowhere is not a study folder (no predictions.csv)."),
        (
            ("run", "study.toml", "--out", "out", "--set", "targets=['Mars']"),
            "target Mars is not a site of cohort tiny (sites: ",
        ),
        (("run", "study.toml", "--out", "out", "--set", "methods=['x']"), "method x is not known"),
        (("run", "study.toml", "--out", "out", "--set", "cohort='no.cohort'"), "no.cohort does not exist."),
        (
            ("run", "study.toml", "--out", "out", "--engine", "ray"),
            "engine ray is not known; choose one of serial, joblib, dask.",
        ),
        (
            ("run", "study.toml", "--out", "out", "--set", "methods=['erm']", "--set", "method.erm.per_site=0"),
            "method erm, field per_site: 0 is too small; it must be at least 1.",
        ),
        (
            ("run", "study.toml", "--out", "out", "--set", "methods=['erm']", "--set", "device='cuda:99'"),
            "device cuda:99 is not available on this machine; add --set device=cpu to run the study on the CPU",
        ),
        (
            ("run", "study.toml", "--out", "out", "--set", "methods=['erm']", "--set", "sweep.erm.batch_size=[8]"),
            "method erm, field batch_size: this method does not use it; leave it at 32.",
        ),
        (("run", "study.toml", "--out", "out", "--shard", "²/3"), "--shard ²/3: expected i/n"),
        (("run", "study.toml", "--out", "out", "--shard", f"1/{'9' * 5000}"), "expected i/n"),
        (("run", "study.toml", "--out", "out", "--set", "plugins=5", "--plugin", "p.py"), "key plugins: input should be"),
        (("run", "study.toml", "--out", "out", "--method", "priors"), "--method priors: not one of the study's methods"),
        (("run", "study.toml", "--out", "out", "--shard", "x"), "--shard x: expected i/n"),
        (("run", "study.toml", "--out", "study.toml"), "study.toml"),
        (("run", "study.toml", "--out", "out", "--set", "inputs=['height']"), "height is not a phenotype of cohort tiny"),
        (("run", "one.toml", "--out", "out"), "has only one site, north"),
        (("run", "class.toml", "--out", "out"), "has labels of only one class"),
        (("methods", "mixupp"), "method mixupp is not known; did you mean mixup?"),
        (("methods", "--plugin", "nothing.py"), "plugin nothing.py is not a Python file."),
    ],
)
def test_bad_input_ends_in_one_sentence(command, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    tiny = make_cohort("tiny")
    tiny.save("tiny.cohort")
    tiny.select(sites=["north"]).save("one.cohort")
    tiny.select(tiny.labels == 1).save("class.cohort")
    for name, cohort in (("study", "tiny"), ("one", "one"), ("class", "class")):
        Path(f"{name}.toml").write_text(f'cohort = "{cohort}.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
    code, _, errors = command(*arguments)
    assert code == 2
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1
    assert words in lines[0]
    assert not Path("out").exists()


def test_table_of_an_unknown_best_or_format(command, tmp_path):
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    (tmp_path / "s.toml").write_text('cohort = "tiny.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
    command("run", tmp_path / "s.toml", "--out", tmp_path / "out")
    assert "the study has no method x; it has prior." in command("table", tmp_path / "out", "--best", "x")[2]
    assert "unknown format pdf" in command("table", tmp_path / "out", "--format", "pdf")[2]


def test_a_table_of_a_part_of_a_study_says_so(command, tmp_path):
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    study, out = tmp_path / "study.toml", tmp_path / "out"
    study.write_text('cohort = "tiny.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
    command("run", study, "--out", out, "--shard", "1/2")
    assert command("table", out)[1].endswith("\nMissing in these tables (failed or not run yet): 2 cells of prior.\n")
    command("run", study, "--out", out, "--shard", "2/2")
    whole = command("table", out)
    assert "not run yet" not in whole[1]
    (out / "study.json").write_text('{"methods": 3, "seeds": "x", "targets": 5}')  # damaged: no reason to fall over
    assert command("table", out) == whole


def test_a_study_file_in_place_of_its_folder(command, tmp_path):
    (tmp_path / "study.toml").write_text("")
    code, _, errors = command("table", tmp_path / "study.toml")
    assert (code, errors) == (2, f"m2lgdg: {tmp_path / 'study.toml'} is not a study folder (no predictions.csv).\n")


def test_card_tells_of_a_study_of_another_cohort(command, tmp_path):
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    make_cohort("tiny", seed=2).save(tmp_path / "other.cohort")
    study = tmp_path / "study.toml"
    study.write_text('cohort = "tiny.cohort"\nmethods = ["fc-logistic"]\nseeds = [0]\n')
    command("run", study, "--out", tmp_path / "out")
    make("fc-logistic").fit(Cohort.load(tmp_path / "tiny.cohort")).save(tmp_path / "same")
    make("fc-logistic").fit(Cohort.load(tmp_path / "other.cohort")).save(tmp_path / "model")
    assert "differ" not in command("card", tmp_path / "same", "--study", tmp_path / "out")[1]
    text = command("card", tmp_path / "model", "--study", tmp_path / "out")[1]
    assert "Note: The cohort of the study, or its inputs, differ" in text


def test_methods_that_run_on_a_cohort_and_those_that_cannot(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_cohort("tiny").save("series.cohort")
    make_cohort("tiny").to_connectomes().save("matrices.cohort")
    code, text, _ = command("methods", "--cohort", "matrices.cohort")
    able, unable = text.split("Not on cohort tiny (connectomes: fisher-z)\n")
    assert code == 0 and "  fc-logistic  " in able and "  m2lgdg-connectome  " in able and "  m2lgdg  " not in able
    assert unable.splitlines()[:4] == [f"  {name}: needs time series" for name in ("m2dc", "m2lgdg", "msstan", "ufa-net")]
    assert "Not on cohort" not in command("methods", "--cohort", "series.cohort")[1]
    refused = {
        one["name"]: one["refused"] for one in json.loads(command("methods", "--cohort", "matrices.cohort", "--json")[1])
    }
    assert (refused["msstan"], refused["erm"]) == ("needs time series", None)
    takes = {one["name"]: one["takes"] for one in json.loads(command("methods", "--json")[1])}
    assert (takes["msstan"], takes["erm"]) == (["series"], ["series", "connectomes"])
    assert command("methods", "erm", "--cohort", "matrices.cohort")[1].endswith(
        "\nOn cohort tiny (connectomes: fisher-z): runs.\nNext: m2lgdg fit matrices.cohort --method erm --out erm-model\n"
    )
    text = command("methods", "msstan", "--cohort", "matrices.cohort")[1]
    assert text.endswith("\nOn cohort tiny (connectomes: fisher-z): needs time series.\n") and "\nscans: series\n" in text
    for words in (("fit", "matrices.cohort", "--method", "msstan"), ("run", "study.toml")):
        Path("study.toml").write_text('cohort = "matrices.cohort"\nmethods = ["prior", "msstan"]\nseeds = [0]\n')
        code, _, errors = command(*words, "--out", "out")
        assert code == 2 and errors.startswith("m2lgdg: method msstan needs time series, and cohort tiny holds connectomes; ")
        assert not Path("out").exists()
    code, _, errors = command("audit", "study.toml", "--method", "msstan")
    assert code == 2 and errors.startswith("m2lgdg: method msstan needs time series")
