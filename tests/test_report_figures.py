"""Figures that are drawn in less time show the same: the glass brain is that of nilearn, training curves keep every line."""

import io
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from m2lgdg.report.brains import GREY, HALF, RED, TOP, glass_brain
from m2lgdg.report.figures import training_curves


@pytest.fixture
def rois():
    rng = np.random.default_rng(0)
    places = rng.uniform((-60, -90, -40), (60, 60, 60), (TOP, 3))
    places[0, 0] = 0.0  # on the midline: shown from both sides
    return pd.DataFrame(places, columns=["x", "y", "z"]).assign(roi="r", score=np.linspace(1, 0.2, TOP))


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_the_glass_brain_is_that_of_nilearn(rois):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from nilearn.plotting import plot_markers

    figure = plt.figure(figsize=(9, 2.6))
    plot_markers(
        (np.arange(TOP) < HALF).astype(float), rois[["x", "y", "z"]].to_numpy(), node_size=20 + 80 * rois["score"].to_numpy(),
        node_cmap=ListedColormap([GREY, RED]), node_vmin=0.0, node_vmax=1.0, alpha=0.85, display_mode="lyrz", figure=figure,
        colorbar=False,
    )  # fmt: skip
    reference = io.BytesIO()
    figure.savefig(reference, format="png", dpi=110, facecolor="white")
    plt.close(figure)
    ours, theirs = pixels(glass_brain("one", rois).png), pixels(reference.getvalue())
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).mean() < 0.5  # of 255: lines are joined instead of drawn piece by piece
    red = [(image[:, :, 0] - image[:, :, 1] > 80) for image in (ours, theirs)]
    assert red[1].sum() > 1000 and (red[0] != red[1]).mean() < 2e-4


def test_drawing_a_glass_brain_does_not_import_nilearn(rois, tmp_path):
    rois.to_csv(tmp_path / "rois.csv", index=False)
    code = "import sys, pandas; from m2lgdg.report.brains import glass_brain; glass_brain('one', pandas.read_csv('rois.csv')); "
    code += "print([name for name in ('nilearn', 'sklearn') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ended.stdout == "[]\n"


def test_training_curves_have_a_line_for_every_training_and_nothing_is_cut_off():
    runs = [[{"loss": 1e7 / (epoch + 1), "val_auc": 0.5 + epoch / 99} for epoch in range(length)] for length in (9, 20, 33)]
    figure = training_curves({"a": runs, "b": [[{"loss": 0.998500 + epoch / 1e6, "val_auc": 0.5} for epoch in range(9)]]})
    text = figure.svg.decode()
    lines = text.split('id="LineCollection_1"')[1].split("</g>")[0]
    assert lines.count("<path") == 3
    for words in ("a, 3 trainings: training loss", "b, 1 training: training loss", "validation AUC", "epoch", "1e7"):
        assert f">{words}<" in text
    image = pixels(figure.png)
    for edge in (image[:, :2], image[:, -2:], image[:2], image[-2:]):
        assert edge.min() == 255
