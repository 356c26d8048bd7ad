"""Linear methods need neither PyTorch nor Captum: all of their commands run where both cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2lgdg import METHODS, make
from m2lgdg.study.predictions import read_predictions

NAMES = sorted(METHODS)  # before another test of this process adds its own
# As Python's own start-up file, so that it holds in worker processes too.
BLOCKER = """
import importlib.metadata, sys

class Blocked:
    NAMES = ("torch", "captum", "triton")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
original = importlib.metadata.version

def version(name):
    if name in Blocked.NAMES:
        raise importlib.metadata.PackageNotFoundError(name)
    return original(name)

importlib.metadata.version = version
"""
STUDY = """cohort = "tiny.cohort"
methods = ["prior", "fc-logistic", "connectome-adaptive", "phenotype-logistic"]
seeds = [0]
targets = ["north", "east"]
explain = ["fc-logistic"]
track = ["strict", "adapted"]
"""
MISSING = 'needs torch; install it with: pip install "m2lgdg[networks]"'


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny):
    """A folder with a cohort, a new site, a study and the blocker."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "blocker").mkdir()
    (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    tiny.save(folder / "tiny.cohort")
    tiny.select(sites=["north"]).unlabelled().save(folder / "new.cohort")
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def python(work):
    """Run Python where PyTorch cannot be imported; returns exit code, standard output and error."""
    paths = [str(work / "blocker"), str(Path(__file__).parents[2] / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(*words):
        ended = subprocess.run(
            [sys.executable, *map(str, words)], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        return ended.returncode, ended.stdout, ended.stderr

    return run


# Several commands in one process, each as from a shell; importing takes longer than most of them.
SEVERAL = """
import contextlib, io, json, sys
from m2lgdg.cli import main
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv, streams = ["m2lgdg", *words], (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    ended.append((code, *(stream.getvalue() for stream in streams)))
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def several(python):
    """Run commands one after the other; returns exit code, standard output and error of each."""

    def run(*commands):
        code, out, err = python("-c", SEVERAL, json.dumps([[str(word) for word in words] for words in commands]))
        assert code == 0, err
        return [tuple(one) for one in json.loads(out.splitlines()[-1])]

    return run


@pytest.fixture(scope="module")
def m2lgdg(python):
    return lambda *words: python("-m", "m2lgdg", *words)


@pytest.fixture(scope="module")
def fitted(m2lgdg):
    code, _, err = m2lgdg("fit", "tiny.cohort", "--without", "north", "--out", "model")
    assert code == 0, err
    return "model"


@pytest.fixture(scope="module")
def study(m2lgdg):
    code, out, err = m2lgdg("run", "study.toml", "--out", "results", "--jobs", 2)
    assert code == 0, err
    assert "8 of 8 cells done" in out
    return "results"


def test_the_blocker_blocks(python):
    code, _, err = python("-c", "import torch")
    assert code == 1 and "ModuleNotFoundError" in err


def test_a_study_with_workers(work, study):
    predictions = read_predictions(work / study)
    assert set(predictions["variant"]) == {"", "adapted"} and len(set(predictions["method"])) == 4
    environment = json.loads((work / study / "environment.json").read_text())
    assert environment["torch"] == "not installed" and environment["numpy"] != "not installed"


COMMANDS = (
    ("check", "tiny.cohort", "--out", "check"),
    ("convert", "new.cohort", "copy.cohort"),
    ("methods",),
    ("methods", "connectome-adaptive"),
    ("predict", "model", "new.cohort", "--out", "predictions.csv"),
    ("adapt", "model", "new.cohort", "--out", "adapted"),
    ("calibrate", "model", "tiny.cohort", "--site", "north", "--out", "calibrated"),
    ("explain", "model", "new.cohort", "--out", "explained"),
    ("card", "model"),
    ("export", "model", "--share", "--out", "to-share"),
    ("table", "results"),
    ("report", "results"),
    ("share", "results", "--out", "shared"),
    ("audit", "study.toml"),
    ("curve", "both.toml", "--out", "curve", "--sizes", "0.5,1", "--repeats", 1),
)


def test_commands_of_linear_models(several, work, fitted, study):
    (work / "both.toml").write_text('cohort = "tiny.cohort"\nmethods = ["erm", "fc-logistic"]\ntargets = ["north"]\n')
    ended = dict(zip(COMMANDS, several(*COMMANDS), strict=True))
    for words, (code, _, err) in ended.items():
        assert code in ((0, 1) if words[0] == "check" else (0,)), (words, err)
    assert [name for name in NAMES if f"  {name}  " not in ended[("methods",)][1]] == []  # networks are listed, too
    assert (work / study / "report.html").stat().st_size > 10000
    assert "2 of 2 trainings done" in ended[COMMANDS[-1]][1]


def test_the_demo_leaves_the_network_out(m2lgdg, work):
    code, out, err = m2lgdg("demo", "--preset", "tiny", "--jobs", 1, "--out", "demo")
    assert code == 0, err
    assert 'for networks: pip install "m2lgdg[networks]"' in out
    assert "m2lgdg" not in set(read_predictions(work / "demo" / "results")["method"])


def test_a_network_is_one_sentence(several, work, tiny, fitted):
    make("erm", epochs=1, warmup=1).fit(tiny).save(work / "network-model")
    erm = f"method erm is a network, which {MISSING}"
    run = ("run", "study.toml", "--set", 'methods=["erm"]', "--set", "explain=[]", "--out", "no-study")
    said = {
        ("fit", "tiny.cohort", "--method", "m2lgdg", "--out", "no-model"): f"method m2lgdg is a network, which {MISSING}",
        run: erm,
        ("methods", "brainnetcnn"): f"method brainnetcnn is a network, which {MISSING}",
        ("predict", "network-model", "new.cohort", "--out", "no.csv"): erm,
        ("card", "network-model"): erm,
        ("export", fitted, "--out", "no.onnx"): 'ONNX export needs torch; install it with: pip install "m2lgdg[onnx]"',
    }
    for (words, sentence), (code, _, err) in zip(said.items(), several(*said), strict=True):
        assert (code, err) == (2, f"m2lgdg: {sentence}.\n"), words
    assert not list(work.glob("no*.*")) and not (work / "no-model").exists() and not (work / "no-study").exists()


def test_the_linear_methods_of_a_study_with_networks(m2lgdg, work):
    """Only the methods that are run need to be usable here."""
    study = "rest-meta-mdd.toml"
    (work / study).write_text((Path(__file__).parents[2] / "studies" / study).read_text())
    changes = (
        "cohort=tiny.cohort",
        "inputs=[]",
        'targets=["north"]',
        "seeds=[0]",
        "variants=[]",
        "explain=false",
        "device=cpu",
    )
    words = ("run", study, *(word for change in changes for word in ("--set", change)))
    code, _, err = m2lgdg(*words, "--method", "fc-logistic", "--out", f"{study}-results")
    assert code == 0, err
    wanted = f"m2lgdg: method m2lgdg is a network, which {MISSING}.\n"
    assert m2lgdg(*words, "--method", "m2lgdg", "--out", f"{study}-networks")[::2] == (2, wanted)
    assert not (work / f"{study}-networks").exists()


def test_tables_and_report_of_networks(several):
    """Results that were computed elsewhere can be read."""
    results = Path(__file__).parents[2] / "results" / "paper" / "connectome"
    table, report = several(("table", results), ("report", results, "--share", "--out", "network-report"))
    assert table[0] == 0 and "m2lgdg-connectome" in table[1], table
    assert report[0] == 0, report


def test_in_python(python):
    code = "import m2lgdg\ntry:\n    m2lgdg.losses\nexcept m2lgdg.InputError as error:\n    print(error)"
    assert python("-c", code)[1] == f"m2lgdg.losses {MISSING}\n"


def test_linear_commands_do_not_import_torch_where_it_is_installed(work, fitted):
    """The speed of commands, and the proof that the blocker hides no other way."""
    code = (
        "import sys\nfrom m2lgdg.cli import main\nsys.argv = ['m2lgdg', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint(sorted({'torch', 'captum', 'triton'} & set(sys.modules)))"
    )
    for words in (
        ("explain", fitted, "new.cohort", "--out", "explained-again"),
        ("predict", fitted, "new.cohort", "--out", "again.csv"),
    ):
        ended = subprocess.run([sys.executable, "-c", code, *words], cwd=work, capture_output=True, text=True, check=True)
        assert ended.stdout.splitlines()[-1] == "[]", words
