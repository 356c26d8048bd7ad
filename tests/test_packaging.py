"""What is installed: extras, the wheel for every system, and every line of the docs that installs something."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from m2lgdg.storage import EXTRAS, install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = PROJECT["project"]["optional-dependencies"]
DISTRIBUTIONS = {"python_multipart": "python-multipart", "dask_jobqueue": "dask-jobqueue", "distributed": "dask"}
INSTALLING = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "Dockerfile", "Dockerfile.cuda", ".ci/run")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.yml")),
]


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0]


def test_a_plain_installation_has_no_network_library():
    core = {name_of(requirement) for requirement in PROJECT["project"]["dependencies"]}
    heavy = {"torch", "captum", "triton", "onnx", "onnxruntime", "dask", "starlette"}
    assert not core & heavy


def test_every_extra_brings_the_libraries_that_its_commands_need():
    brought = {extra: {name_of(requirement) for requirement in OPTIONAL[extra]} for extra in EXTRAS}
    assert "m2lgdg[networks]" in OPTIONAL["onnx"]
    brought["onnx"] |= brought["networks"]
    for extra, libraries in EXTRAS.items():
        assert {DISTRIBUTIONS.get(name, name) for name in libraries} <= brought[extra]
        assert install_command(extra) == f'pip install "m2lgdg[{extra}]"'


def test_classifiers_and_versions():
    listed = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line}
    assert listed == {"3.11", "3.12", "3.13"} and PROJECT["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("path", [path for path in INSTALLING if path.is_file()], ids=lambda path: path.name)
def test_every_installation_is_constrained_and_its_extras_exist(path):
    """PyTorch comes only in the version of constraints.txt, and never by accident."""
    text = re.sub(r"\\\n\s*", " ", path.read_text()).replace("$(PIP)", "pip install -c constraints.txt")
    for line in re.findall(r"pip install ([^\n`]*)", text):
        ours = "." in line.split() or "-e" in line.split() or ".[" in line or "m2lgdg" in line or re.search(r"\btorch\b", line)
        assert not ours or "-c constraints.txt" in line or "-c /" in line or line.startswith("m2lgdg["), line
        for extras in re.findall(r"(?:\.|m2lgdg|\.whl)\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= set(OPTIONAL), line


def test_the_source_distribution_has_no_results():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    assert "results" not in included and "src" in included and all((ROOT / name).exists() for name in included)


def test_the_wheel_and_the_source_distribution_have_the_models():
    """Hatch takes all files of the package that git does not ignore; `make wheel-check` asks the wheel itself."""
    targets = PROJECT["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["src/m2lgdg"]} and "src" in targets["sdist"]["only-include"]
    files = [path for path in (ROOT / "src/m2lgdg/model/trained").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"models.json", "LICENCE.md", "method.json", "weights.safetensors", "card.md"}
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is not a clone")
    ignored = subprocess.run(["git", "-C", ROOT, "check-ignore", "--no-index", *files], capture_output=True, text=True)
    assert ignored.returncode == 1 and not ignored.stdout
    assert "m2lgdg models" in (ROOT / "Makefile").read_text().split("wheel-check: wheel")[1]


def test_the_licence_of_the_models_is_in_every_distribution():
    assert "src/m2lgdg/model/trained/LICENCE.md" in PROJECT["project"]["license-files"]
