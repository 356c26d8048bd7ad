"""The examples printed in CONTRIBUTING.md run, as a plugin, from a study to a saved model, and keep the package's own rules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from m2lgdg import METHODS, make_cohort, run_study
from m2lgdg.metrics import auc
from m2lgdg.study.predictions import read_predictions

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = {re.search(r'@method\("([^"]+)"\)', code)[1]: code for code in CODE}


@pytest.mark.parametrize(("name", "least"), [("nearest-mean", 0.8), ("roi-rows", 0.8)])
def test_the_examples_run_as_printed_and_learn(name, least, tmp_path):
    (tmp_path / f"{name.replace('-', '_')}.py").write_text(EXAMPLES[name])
    sizes = {"a": 40, "b": 40, "c": 40}
    make_cohort("tiny", sizes=sizes, seed=4, roi_effect=3.0, edge_effect=3.0).save(tmp_path / "tiny.cohort")
    study = f'cohort = "tiny.cohort"\nmethods = ["{name}"]\nseeds = [0]\nplugins = ["{name.replace("-", "_")}.py"]\n'
    (tmp_path / "study.toml").write_text(study)
    try:
        summary = run_study(tmp_path / "study.toml", tmp_path / "out")
    finally:
        METHODS.pop(name, None)  # not a method of the package
    assert not summary.failed
    predictions = read_predictions(tmp_path / "out")
    areas = [auc(one["label"].to_numpy(), one["proba"].to_numpy()) for _, one in predictions.groupby("target")]
    assert len(areas) == 3 and min(areas) > least


@pytest.mark.types
def test_the_examples_pass_the_checks_of_the_package(tmp_path):
    """As if they lay in `methods/`: ruff, its format, and mypy with the settings of pyproject.toml."""
    for name, code in EXAMPLES.items():
        place = ["--stdin-filename", f"src/m2lgdg/methods/{name.replace('-', '_')}.py", "-"]
        for work in (["check", "--no-cache"], ["format", "--check"]):
            found = tool("ruff", *work, *place, given=code)
            assert found.returncode == 0, f"{name}: {found.stdout}{found.stderr}"
    files = [tmp_path / f"{name.replace('-', '_')}.py" for name in EXAMPLES]
    for file, code in zip(files, EXAMPLES.values(), strict=True):
        file.write_text(code)
    found = tool("mypy", "--config-file", "pyproject.toml", *files)
    assert found.returncode == 0, found.stdout + found.stderr


def tool(name, *arguments, given=None):
    paths = os.environ | {"MYPYPATH": "src"}  # as mypy names the package itself, so that it reads what `make test-more` cached
    command = [sys.executable, "-m", name, *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=paths, check=False)
