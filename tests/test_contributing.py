"""The examples printed in CONTRIBUTING.md run, as a plugin, from a study to a saved model."""

import re
from pathlib import Path

import pytest

from m2lgdg import METHODS, make_cohort, run_study
from m2lgdg.metrics import auc
from m2lgdg.study import read_predictions

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
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
