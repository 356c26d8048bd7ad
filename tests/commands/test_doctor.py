"""`m2lgdg doctor`, JSON for scripts, and tab completion."""

import json
import os
import platform
import subprocess
import sys

import numpy

import m2lgdg
from m2lgdg.commands import terminal
from m2lgdg.deploy import doctor
from m2lgdg.storage import EXTRAS, missing_libraries


def test_doctor_has_versions_devices_and_threads(typed):
    code, out, _ = typed("doctor", "--json")
    result = json.loads(out)
    assert code == 0 and result["problems"] == []
    assert (result["m2lgdg"], result["python"]) == (m2lgdg.__version__, platform.python_version())
    assert result["libraries"]["numpy"] == numpy.__version__
    assert result["devices"][0]["name"] == "cpu" and result["cores"] >= 1
    assert result["threads"] and all(count >= 1 for count in result["threads"].values())
    assert set(result["extras"]) == set(EXTRAS)


def test_doctor_names_what_is_missing_for_which_command(typed, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = typed("doctor", "--json")
    extras = json.loads(out)["extras"]
    assert code == 0
    assert {name: extra["missing"] for name, extra in extras.items()} == {
        "networks": ["torch"],
        "onnx": ["torch"],
        "serve": ["uvicorn"],
        "cluster": [],
        "skops": [],
        "matlab": [],
        "optuna": [],
        "federated": missing_libraries("federated"),
        "flower": missing_libraries("flower"),
    }
    assert extras["serve"]["install"] == 'pip install "m2lgdg[serve]"'
    assert [device["name"] for device in json.loads(out)["devices"]] == ["cpu"]
    lines = typed("doctor")[1].splitlines()
    assert 'Extra serve (serve): missing uvicorn; install with: pip install "m2lgdg[serve]"' in lines
    assert lines[-1] == "Linear methods and all other commands: ready"


def test_doctor_compares_versions_with_the_requirements(typed, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy>=99", "torch>=99; extra == 'networks'", "no-such-library>=1"])
    code, _, err = typed("doctor")
    assert code == 1
    assert err.splitlines() == [
        f"numpy {numpy.__version__} is installed; m2lgdg needs numpy>=99.",
        "no-such-library is not installed; m2lgdg needs no-such-library>=1.",
    ]


def test_doctor_shares_no_path_and_no_name_of_a_user(typed):
    text = typed("doctor", "--json")[1] + typed("doctor")[1]
    for secret in (os.getcwd(), os.path.expanduser("~") + "/", sys.prefix, platform.node()):
        assert secret not in text


def test_check_as_json(typed, tmp_path, tiny):
    tiny.save(tmp_path / "tiny.cohort")
    code, out, _ = typed("check", tmp_path / "tiny.cohort", "--out", tmp_path / "check", "--json")
    result = json.loads(out)
    assert code == result["exit_code"]
    assert (result["subjects"], result["hash"]) == (len(tiny), tiny.hash)
    assert [row["site"] for row in result["sites"]] == tiny.site_names
    assert sum(row["subjects"] for row in result["sites"]) == len(tiny)
    assert all(finding["level"] in ("unusable", "finding", "note") for finding in result["findings"])
    assert (tmp_path / "check" / "findings.csv").is_file()


def test_methods_as_json(typed):
    result = {method["name"]: method for method in json.loads(typed("methods", "--json")[1])}
    assert set(result) == set(m2lgdg.METHODS)
    assert [name for name, method in result.items() if method["default"]] == [m2lgdg.METHODS.default]
    for name in ("m2lgdg", "fc-svm", "erm"):
        fields = json.loads(json.dumps(m2lgdg.make(name).fields()))
        assert result[name]["fields"] == fields and set(result[name]["variants"]) == set(m2lgdg.METHODS[name].variants)
        assert result[name]["reference"] == m2lgdg.METHODS[name].reference
    code, _, err = typed("methods", "fc-svmm", "--json")
    assert code == 2 and "did you mean fc-svm?" in err


def answer(words, **variables):
    """Output of the command `m2lgdg` as a shell calls it."""
    code = "import sys\nsys.argv = ['m2lgdg', *sys.argv[1:]]\nfrom m2lgdg.cli import main\nmain()"
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"} | variables
    run = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False)
    return run.stdout


def test_completion_of_commands_and_options():
    assert "_M2LGDG_COMPLETE=complete_bash" in answer(["--show-completion", "bash"])

    def completed(words):
        given = {"_M2LGDG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return answer([], **given).split()

    assert completed("m2lgdg ") == list(terminal.COMMANDS)
    assert "--new-site-calibration" in completed("m2lgdg fit --new")
