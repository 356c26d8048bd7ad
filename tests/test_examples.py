"""The files in `examples/` run as they are, in an empty folder, and print what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from m2lgdg import make_cohort

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def printed(*command, where):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def areas(text, name=""):
    return [float(one) for one in re.findall(rf"left out \w+: {name} ?AUC (\d\.\d\d)", text)]


def test_quickstart(tmp_path):
    text = printed(EXAMPLES / "quickstart.py", where=tmp_path)
    assert "52 subjects (24 patients, 28 controls) of 4 sites" in text
    assert "8 trainings, 0 failed" in text
    macro = text.split("Macro average")[1]
    rows = [row for row in macro.splitlines() if re.match(r"[\w-]+logistic  ", row)]
    area = {row.split()[0]: float(re.findall(r"[\d.]+ ±", row)[3][:-2]) for row in rows}
    assert area["fc-logistic"] > 80 > area["phenotype-logistic"]
    assert (tmp_path / "runs" / "quickstart" / "predictions.csv").is_file()


def test_own_cohort(tmp_path):
    text = printed(EXAMPLES / "own_cohort.py", where=tmp_path)
    assert re.search(r"Lima +20 +10 +10 +120", text)
    assert "label from column diagnosis: patient = patient, control = control" in text
    assert len(areas(text)) == 3 and min(areas(text)) > 0.8


def test_new_method(tmp_path):
    text = printed(EXAMPLES / "new_method.py", where=tmp_path)
    assert len(areas(text, "nearest-neighbours")) == len(areas(text, "fc-logistic")) == 4
    assert sum(areas(text, "nearest-neighbours")) / 4 > 0.65


def test_new_method_as_a_plugin_that_leaks_nothing(tmp_path):
    """As its docstring says."""
    make_cohort("tiny", seed=1).save(tmp_path / "tiny.cohort")
    plugin = os.path.relpath(EXAMPLES / "new_method.py", tmp_path)
    text = f'cohort = "tiny.cohort"\nmethods = ["nearest-neighbours"]\ntargets = ["east"]\nplugins = ["{plugin}"]\n'
    (tmp_path / "STUDY.toml").write_text(text)
    ran = printed("-m", "m2lgdg.cli", "run", "STUDY.toml", "--out", "results", where=tmp_path)
    assert "1 of 1 cells done" in ran
    assert "nearest-neighbours" in printed("-m", "m2lgdg.cli", "audit", "STUDY.toml", where=tmp_path)


def test_new_method_says_that_it_keeps_subjects(tmp_path):
    """Such a model must not be shared, and whoever copies the example copies that."""
    code = f"import runpy; print(runpy.run_path({str(EXAMPLES / 'new_method.py')!r})['NearestNeighbours'].remembers)"
    assert printed("-c", code, where=tmp_path) == "('features', 'labels')\n"


def test_new_site(tmp_path):
    text = printed(EXAMPLES / "new_site.py", where=tmp_path)
    rows = re.findall(r"subject \d: proba (\d\.\d\d), OOD score (\d\.\d\d), (.+)", text)
    assert len(rows) == 5
    assert all(0 <= float(proba) <= 1 and "short scan: 63" in flags for proba, _, flags in rows)
    assert "volumes: 63 here" in text
    assert (tmp_path / "model" / "method.json").is_file()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_is_short_tested_and_linked(path):
    assert len(path.read_text().splitlines()) <= 60
    assert f'"{path.name}"' in Path(__file__).read_text()
    assert any(f"examples/{path.name})" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
