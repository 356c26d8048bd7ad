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
ROOT = Path(__file__).parents[2]
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
print(json.dumps([sorted({"torch", "captum", "triton"} & set(sys.modules)), ended]))
"""
REST = ("cohort=tiny.cohort", "inputs=[]", 'targets=["north"]', "seeds=[0]", "variants=[]", "explain=false", "device=cpu")
REST = ("run", "rest-meta-mdd.toml", *(word for change in REST for word in ("--set", change)), "--method")
COMMANDS = {
    "fit": ("fit", "tiny.cohort", "--without", "north", "--out", "model"),
    "run": ("run", "study.toml", "--out", "results", "--jobs", "2"),
    "check": ("check", "tiny.cohort", "--out", "check"),
    "convert": ("convert", "new.cohort", "copy.cohort"),
    "methods": ("methods",),
    "method": ("methods", "connectome-adaptive"),
    "predict": ("predict", "model", "new.cohort", "--out", "predictions.csv"),
    "adapt": ("adapt", "model", "new.cohort", "--out", "adapted"),
    "calibrate": ("calibrate", "model", "tiny.cohort", "--site", "north", "--out", "calibrated"),
    "explain": ("explain", "model", "new.cohort", "--out", "explained"),
    "card": ("card", "model"),
    "export": ("export", "model", "--share", "--out", "to-share"),
    "table": ("table", "results"),
    "report": ("report", "results"),
    "share": ("share", "results", "--out", "shared", "--uncommitted"),  # whatever the tree of who runs the tests
    "audit": ("audit", "study.toml", "--method", "prior", "--site", "east"),
    "curve": ("curve", "both.toml", "--out", "curve", "--sizes", "0.5,1", "--repeats", "1"),
    "demo": ("demo", "--preset", "tiny", "--jobs", "1", "--out", "demo"),
    "linear methods of a study with networks": (*REST, "fc-logistic", "--out", "linear"),
    "table of networks": ("table", str(ROOT / "results" / "paper" / "connectome")),
    "report of networks": ("report", str(ROOT / "results" / "paper" / "connectome"), "--share", "--out", "network-report"),
}
ERM, M2LGDG = (f"method {name} is a network, which {MISSING}" for name in ("erm", "m2lgdg"))
REFUSED = {
    ("fit", "tiny.cohort", "--method", "m2lgdg", "--out", "no-model"): M2LGDG,
    ("run", "study.toml", "--set", 'methods=["erm"]', "--set", "explain=[]", "--out", "no-study"): ERM,
    (*REST, "m2lgdg", "--out", "no-networks"): M2LGDG,
    ("methods", "brainnetcnn"): f"method brainnetcnn is a network, which {MISSING}",
    ("predict", "network-model", "new.cohort", "--out", "no.csv"): ERM,
    ("card", "network-model"): ERM,
    ("export", "model", "--out", "no.onnx"): 'ONNX export needs torch; install it with: pip install "m2lgdg[onnx]"',
}


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny):
    """A folder with a cohort, a new site, studies, a network and the blocker."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "blocker").mkdir()
    (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    tiny.save(folder / "tiny.cohort")
    tiny.select(sites=["north"]).unlabelled().save(folder / "new.cohort")
    make("erm", epochs=1, warmup=1).fit(tiny).save(folder / "network-model")
    (folder / "study.toml").write_text(STUDY)
    (folder / "both.toml").write_text('cohort = "tiny.cohort"\nmethods = ["erm", "fc-logistic"]\ntargets = ["north"]\n')
    (folder / "rest-meta-mdd.toml").write_text((ROOT / "studies" / "rest-meta-mdd.toml").read_text())
    return folder


def python(work, *words, blocked=True):
    """Standard output and error of Python where PyTorch cannot be imported."""
    paths = [str(work / "blocker")] * blocked + [str(ROOT / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *words], cwd=work, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout, ended.stderr


def several(work, *commands, blocked=True):
    """Modules of PyTorch that were imported, and exit code, standard output and error of each command."""
    out, err = python(work, "-c", SEVERAL, json.dumps(commands), blocked=blocked)
    assert out, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def ended(work):
    imported, ended = several(work, *COMMANDS.values(), *REFUSED)
    assert imported == []
    return dict(zip((*COMMANDS, *REFUSED), ended, strict=True))


def test_commands_of_linear_models(ended, work):
    for name in COMMANDS:
        assert ended[name][0] in ((0, 1) if name == "check" else (0,)), (name, ended[name][2])
    assert "8 of 8 cells done" in ended["run"][1]
    predictions = read_predictions(work / "results")
    assert set(predictions["variant"]) == {"", "adapted"} and len(set(predictions["method"])) == 4
    environment = json.loads((work / "results" / "environment.json").read_text())
    assert environment["torch"] == "not installed" and environment["numpy"] != "not installed"
    assert [name for name in NAMES if f"  {name}  " not in ended["methods"][1]] == []  # networks are listed, too
    assert (work / "results" / "report.html").stat().st_size > 10000
    assert "2 of 2 trainings done" in ended["curve"][1]
    assert 'for networks: pip install "m2lgdg[networks]"' in ended["demo"][1]
    assert "m2lgdg" not in set(read_predictions(work / "demo" / "results")["method"])
    assert "m2lgdg-connectome" in ended["table of networks"][1]  # computed elsewhere


def test_a_network_is_one_sentence(ended, work):
    for words, sentence in REFUSED.items():
        assert ended[words][::2] == [2, f"m2lgdg: {sentence}.\n"], words
    assert not list(work.glob("no*.*")) and not list(work.glob("no-*"))


def test_in_python(work):
    code = "import m2lgdg\ntry:\n    m2lgdg.losses\nexcept m2lgdg.InputError as error:\n    print(error)\nimport torch"
    out, err = python(work, "-c", code)
    assert out == f"m2lgdg.losses {MISSING}\n" and "ModuleNotFoundError" in err


def test_linear_commands_do_not_import_torch_where_it_is_installed(work, ended):
    """The speed of commands, and the proof that the blocker hides no other way."""
    commands = ((*COMMANDS["explain"][:4], "again"), (*COMMANDS["predict"][:4], "again.csv"))
    imported, again = several(work, *commands, blocked=False)
    assert imported == [] and [code for code, *_ in again] == [0, 0]
