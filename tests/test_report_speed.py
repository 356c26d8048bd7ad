"""What makes reports fast must not change them: ROC curves and deviations are those of the libraries."""

import io
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from m2lgdg.metrics import METRICS, PAPER_METRICS, evaluate, roc_curve
from m2lgdg.study.stats import macro_scores, site_scores

FIELDS = ["method", "variant", "target", "metric"]


@pytest.mark.parametrize("decimals", [0, 1, 3])
def test_roc_curves_are_those_of_scikit_learn(decimals):
    from sklearn.metrics import roc_curve as reference

    rng = np.random.default_rng(decimals)
    for count in (2, 3, 4, 30, 75):
        labels = np.r_[0, 1, rng.integers(0, 2, count - 2)]
        scores = np.round(rng.random(count), decimals)
        false_positive, true_positive, _ = reference(labels, scores)
        ours = roc_curve(np.r_[labels, -1], np.r_[scores, 0.7])  # a subject without a label does not count
        np.testing.assert_array_equal(ours[0], false_positive)
        np.testing.assert_array_equal(ours[1], true_positive)


def test_standard_deviations_are_those_of_pandas():
    rng = np.random.default_rng(0)
    rows = [(m, v, t, s, k) for m in "ab" for v in ("", "x") for t in "pq" for s in range(5) for k in METRICS]
    scores = pd.DataFrame(rows, columns=["method", "variant", "target", "seed", "metric"]).assign(value=rng.random(len(rows)))
    scores.loc[::7, "value"] = np.nan
    scores.loc[(scores["method"] == "b") & (scores["metric"] == "AUC") & (scores["seed"] > 0), "value"] = np.nan
    expected = scores.groupby(FIELDS, sort=False)["value"].std(ddof=1)
    np.testing.assert_allclose(site_scores(scores)["sd"], expected, rtol=1e-12)
    sites = site_scores(scores)
    expected = sites.groupby(["method", "variant", "metric"], sort=False)["mean"].std(ddof=1)
    np.testing.assert_allclose(macro_scores(sites)["sd"], expected, rtol=1e-12)


def test_only_the_wanted_metrics_are_computed():
    labels, proba = [0, 1, 0, 1, 1], [0.2, 0.7, 0.6, 0.4, 0.9]
    every = evaluate(labels, proba)
    assert list(every) == list(METRICS)
    assert evaluate(labels, proba, metrics=PAPER_METRICS) == {metric: every[metric] for metric in PAPER_METRICS}


def test_a_figure_is_laid_out_once(monkeypatch):
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from m2lgdg.report.drawing import draw

    calls, execute = [], ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: calls.append(execute(self, figure)))
    figure = draw("one", "caption", "alt", (3, 2), lambda sheet: sheet.canvas.add_subplot().set_ylabel("a long label"))
    assert len(calls) == 1 and b"a long label" in figure.svg
    pixels = np.asarray(Image.open(io.BytesIO(figure.png)).convert("L"))
    assert pixels[:, :3].min() == 255 and pixels[:, :40].min() < 100  # the label has room at the left, and nothing is cut off


def test_reports_import_neither_nilearn_nor_scikit_learn():
    heavy = ("nilearn.plotting", "sklearn", "torch", "scipy.stats")
    code = f"import sys, m2lgdg.report.page; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
